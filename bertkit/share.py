"""A finished run for others: the model card, with metadata that the Hub reads, and the upload to the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import HfApi, ModelCardData

import bertkit
from bertkit.directory import BEST, FIRST
from bertkit.errors import UsageError, join_lines
from bertkit.tasks.task import Task

CARD = """---
{metadata}
---

# {name}

A BERT trained by bertkit {version} on the task `{task}`: {head}, {parameters:,} parameters.

## Use it

```python
{imports}

model = {head}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
{limits}
## Scores

{scores}

## Recipe

`bertkit {command} --recipe recipe.toml` repeats the run.

```toml
{recipe}```

Trained with {environment}.
"""
STOCK = "from transformers import {head}, AutoTokenizer  # or from bertkit: the weights are the same"
OURS = "from bertkit import {head}  # not from transformers, see below\nfrom transformers import AutoTokenizer"
BILSTM = (
    "\nThere is a BiLSTM on top of the encoder, which plain transformers does not have: it loads the encoder only "
    "(`AutoModel.from_pretrained`), and with one of its own heads the answers are wrong.\n"
)
LEFT_TO_RIGHT = (
    "\nThis model reads from left to right, so its first token has seen nothing, and the head reads the last one. "
    "Plain transformers' head would read the first one and give one answer for every text.\n"
)


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
    head, has_bilstm = type(model).__name__, hasattr(model, "bilstm")
    is_causal = model.config.is_decoder and bool(task.metric) and getattr(model.base_model, "pooler", None) is not None
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
        command=task.command or task.name,
        head=head,
        imports=(OURS if has_bilstm or is_causal else STOCK).format(head=head),
        limits=BILSTM * has_bilstm + LEFT_TO_RIGHT * is_causal,
        parameters=model.num_parameters(),
        scores="\n".join(["| held out | score |", "|---|---|", *lines]),
        recipe=tomli_w.dumps(recipe),
        environment=f"{packages} on {hardware}",
    )


def check_push(repo: str) -> None:
    """Nothing, or a UsageError: no token, no Hub, or no name of a repository. To be asked before training."""
    try:
        user = HfApi().whoami()["name"]
    except Exception as error:  # also the transport's: huggingface_hub has changed its HTTP library more than once
        raise UsageError(
            f"nothing can be pushed to {repo}: {join_lines(error)[:200]}; log in with `hf auth login`, or leave out "
            "--push-to-hub"
        ) from None
    if repo.count("/") > 1 or not all(repo.split("/")):
        raise UsageError(f"{repo!r} is no repository; write {user}/{Path(repo).name or 'my-bert'}")


def push(output: Path, repo: str, note: str = "") -> str:
    """Uploads a finished run to a repository that is made if need be, and gives its address.

    Checkpoints and the run before this one stay behind.

    The card there has the repository's name, and `note` below the scores.

    Raises:
        UsageError: the run has no weights, the Hub refuses or cannot be reached; the run stays as it is.
    """
    if not any(output.glob("model*.safetensors")):
        raise UsageError(
            f"{output} has no weights here, so nothing is pushed to {repo}; push from where it was trained"
        )
    card = (output / "README.md").read_text(encoding="utf-8").replace(str(output), repo)
    card = card.replace("\n## Recipe\n", f"\n{note}\n\n## Recipe\n", 1) if note else card
    try:
        address = HfApi().create_repo(repo, exist_ok=True)
        message = f"bertkit {bertkit.__version__}: {output.name}"
        HfApi().upload_folder(
            repo_id=address.repo_id,
            folder_path=output,
            ignore_patterns=["checkpoint-*", f"{FIRST}/*", f"{BEST}/*", "README.md"],
            commit_message=message,
        )
        HfApi().upload_file(
            path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=address.repo_id, commit_message=message
        )
    except Exception as error:
        raise UsageError(
            f"{output} is not on the Hub as {repo} ({join_lines(error)[:200]}); the same command tries again"
        ) from None
    return str(address)
