"""Dry runs: the plan of a run, and a forecast of its cost from a few updates on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from bertkit.errors import UsageError
from bertkit.system.progress import describe_duration, ignore
from bertkit.tasks.task import TUNE, Task
from bertkit.training.arguments import complete, make_arguments
from bertkit.training.cost import Costs, measure_costs
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import count_updates, make_model
from bertkit.training.run_dir import FIRST, describe_environment

# 16-bit floating-point operations per second of the tensor cores, without sparsity, from NVIDIA's data sheets.
ACCELERATORS = {"T4": 65e12, "L4": 121e12, "A100": 312e12, "H100 (SXM)": 989e12}


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


@dataclass(frozen=True)
class Forecast:
    """The expected cost of a run.

    Attributes:
        tokens, operations: Of the whole run; operations are floating-point ones, on real tokens only.
        training, evaluation: Seconds on this machine.
        memory: Bytes of a process by what they hold.
        products: Floating-point operations per second of large matrix products here.
    """

    updates: int
    tokens: float
    operations: float
    training: float
    evaluation: float
    memory: Mapping[str, int]
    products: float

    @property
    def share(self) -> float:
        """Return the share of the rate of products that training reaches here."""
        return self.operations / self.training / self.products

    def describe(self) -> list[str]:
        """Return the forecast in lines."""
        held = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.memory.items())
        machine = describe_environment()
        device = "; ".join(machine["gpus"]) or f"{machine['processor']}, {machine['threads']} threads"
        times = {name: self.operations / rate / self.share for name, rate in ACCELERATORS.items()}
        others = (f"{name} {describe_duration(x) if x >= 60 else 'below 1 min'}" for name, x in times.items())
        return [
            f"floating-point operations: {self.operations:.2e} in {self.updates:,} updates of "
            f"{self.tokens / self.updates:,.0f} tokens",
            f"memory of a process: {sum(self.memory.values()) / 1e9:.2f} GB ({held})",
            f"expected here: {describe_duration(self.training)} of training, {describe_duration(self.evaluation)} of "
            f"evaluation ({device}: {self.products / 1e9:,.0f} GFLOP/s in matrix products, {self.share:.0%} of that in "
            "training)",
            f"computed, not measured, at this share of their 16-bit rates: {', '.join(others)} of training",
        ]


def forecast(task: Task, recipe: Recipe, output: Path) -> Forecast | str:
    """Return the expected cost of a complete recipe, or why it is unknown.

    The data are read, or the beginning of a pretraining's text. Start-up, loading and saving take seconds more.
    """
    if recipe["data"].get("features"):
        return "time and memory are not forecast for the feature-based approach"
    try:
        prepared = prepare(task, recipe | {"data": task.shorten(recipe["data"])}, ignore)
    except UsageError as error:
        return f"without data the updates, time and memory are unknown: {error}"
    if "train" not in prepared.data:
        return "nothing to train, only to predict"
    return forecast_run(task, recipe, measure_costs(task, recipe, prepared), make_arguments(task, recipe, output))


def forecast_run(task: Task, recipe: Recipe, costs: Costs, args: TrainingArguments) -> Forecast:
    """Return the expected cost of a run from measured costs."""
    size, rows = recipe["batch_size"], sum(len(part.rows) for part in costs.parts)
    total = count_updates(args, recipe, rows)
    updates = [total] if len(costs.parts) == 1 else [len(part.rows) // size for part in costs.parts]
    pairs = list(zip(costs.parts, updates, strict=True))
    dev = TUNE if TUNE in costs.evaluation else next(iter(task.splits), "")
    during = count_evaluations(args, total) * costs.evaluation.get(dev, 0.0)
    return Forecast(
        total,
        sum(part.tokens * count for part, count in pairs) * size,
        sum(part.operations * count for part, count in pairs) * size,
        sum((part.seconds * size / args.world_size + part.fixed) * count for part, count in pairs),
        sum(costs.evaluation.values()) + during,
        {
            "weights": costs.weights,
            "gradients": costs.gradients,
            "optimizer": costs.optimizer,
            "activations": max(part.activations for part in costs.parts),
        },
        costs.products,
    )


def count_evaluations(args: TrainingArguments, updates: int) -> int:
    """Return how often the dev set is evaluated during training."""
    if args.eval_strategy == "epoch":
        count = ceil(args.num_train_epochs)
    elif args.eval_strategy == "steps":
        steps = args.eval_steps if args.eval_steps >= 1 else ceil(updates * args.eval_steps)
        count = int(updates // steps)
    else:
        return 0
    return count + bool(args.eval_on_start)
