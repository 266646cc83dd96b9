"""Dry runs: the plan of a run, without data or weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bertkit.tasks.task import Task
from bertkit.training.arguments import complete, make_arguments
from bertkit.training.run import make_model
from bertkit.training.run_dir import FIRST


def dry_run(task: Task, *recipes: Mapping[str, Any], output: str | Path) -> dict[str, Any]:
    """Return the complete recipe of a run and the sizes that follow, without reading data or writing files.

    Raises:
        UsageError: As in `run`, for mistakes that can be found without the data.
    """
    recipe = complete(task, *recipes)
    args = make_arguments(task, recipe, Path(output))
    plan: dict[str, Any] = {"recipe": recipe, "output": str(output)}
    if not recipe.get("checkpoint"):
        with torch.device("meta"):
            plan["parameters"] = make_model(task, recipe, task.configure(recipe, None, None)).num_parameters()
    plan["sequences_per_update"] = recipe["batch_size"]
    plan["per_device_batch"] = args.per_device_train_batch_size
    plan["accumulation"] = args.gradient_accumulation_steps
    plan["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if args.max_steps > 0:
        plan["updates"] = args.max_steps
    if task.pretrain_on(recipe):
        plan["before"] = f"another training run, in {Path(output) / FIRST}"
    return plan
