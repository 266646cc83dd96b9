"""A finished run's README.md: the model card, with metadata that the Hub reads.

Left out for now: pushing to the Hub.
"""

from collections.abc import Mapping
from typing import Any

import tomli_w
from huggingface_hub import ModelCardData

import bertkit
from bertkit.tasks.task import Task

CARD = """---
{metadata}
---

# {name}

A BERT trained by bertkit {version} on the task `{task}`: {head}, {parameters:,} parameters.

## Use it

```python
from transformers import {head}, AutoTokenizer  # or from bertkit: the weights are the same

model = {head}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Scores

{scores}

## Recipe

`bertkit {task} --recipe recipe.toml` repeats the run.

```toml
{recipe}```

Trained with {environment}.
"""


def write_card(
    task: Task,
    name: str,
    recipe: Mapping[str, Any],
    metrics: Mapping[str, Any],
    environment: Mapping[str, Any],
    model: Any,
) -> str:
    """The text of the model card of a run called `name`."""
    rows = [row for row in task.table if row.key in metrics]
    lines = [f"| {row.name} | {metrics[row.key]:.4f} |" for row in rows]
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    hardware = ", ".join(environment["gpus"]) or f"{environment['processor']}, {environment['threads']} threads"
    data = ModelCardData(
        library_name="transformers", tags=["bert", "bertkit", task.name], metrics=[row.key for row in rows]
    )
    return CARD.format(
        metadata=data.to_yaml(),
        name=name,
        version=bertkit.__version__,
        task=task.name,
        head=type(model).__name__,
        parameters=model.num_parameters(),
        scores="\n".join(["| held out | score |", "|---|---|", *lines]),
        recipe=tomli_w.dumps(recipe),
        environment=f"{packages} on {hardware}",
    )
