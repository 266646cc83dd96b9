"""Dry runs: the plan of a run, and a forecast of its cost from a few updates on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from bertkit.errors import UsageError
from bertkit.reports.tables import count
from bertkit.system.progress import describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import TUNE
from bertkit.training.arguments import make_arguments
from bertkit.training.cost import Costs, measure_costs
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import count_updates, make_model
from bertkit.training.run_dir import FIRST, describe_environment
from bertkit.training.trainer import explain_shortage


def dry_run(recipe: Recipe, output: str | Path) -> dict[str, Any]:
    """Return a recipe and the sizes that follow, without reading data or writing files.

    Raises:
        UsageError: transformers rejects a value, or the batch cannot be divided.
    """
    task, args = TASKS[recipe.task], make_arguments(recipe, Path(output))
    plan: dict[str, Any] = {"recipe": recipe, "output": str(output)}
    if not recipe.checkpoint:
        with torch.device("meta"):
            plan["parameters"] = make_model(task, recipe, task.configure(recipe, None, None)).num_parameters()
    plan["sequences_per_update"] = recipe.batch_size
    plan["per_device_batch"] = args.per_device_train_batch_size
    plan["accumulation"] = args.gradient_accumulation_steps
    plan["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if args.max_steps > 0:
        plan["updates"] = args.max_steps
    if task.pretrain_on(recipe) is not None:
        plan["before"] = f"another training run, in {Path(output) / FIRST}"
    return plan


@dataclass(frozen=True)
class Forecast:
    """The expected cost of a run.

    Attributes:
        tokens, operations: Totals of the run; operations are floating-point ones, on real tokens only.
        training, evaluation, scoring: Seconds on this machine: of updates, of evaluations during training, and of the
            predictions at the end.
        memory: Bytes of a process by what they hold.
        matmul_rate: Floating-point operations per second of large matrix products in all processes here.
    """

    updates: int
    tokens: float
    operations: float
    training: float
    evaluation: float
    scoring: float
    memory: Mapping[str, int]
    matmul_rate: float

    @property
    def share(self) -> float:
        """Return the share of the matmul rate that training reaches here."""
        return min(self.operations / self.training / self.matmul_rate, 1.0)

    def describe(self) -> list[str]:
        """Return the forecast in lines."""
        held = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.memory.items())
        machine = describe_environment()
        device = "; ".join(machine["gpus"]) or f"{machine['processor']}, {count(machine['threads'], 'thread')}"
        return [
            f"floating-point operations: {self.operations:.2e} in {self.updates:,} updates of "
            f"{self.tokens / self.updates:,.0f} tokens",
            f"memory of a process: {sum(self.memory.values()) / 1e9:.2f} GB ({held})",
            f"expected here: {describe_duration(self.training)} of training and "
            f"{describe_duration(self.evaluation + self.scoring)} of evaluation ({device}: matmul rate "
            f"{self.matmul_rate / 1e9:,.0f} GFLOP/s, {self.share:.0%} of it reached in training)",
        ]


def describe_cost(recipe: Recipe, output: Path) -> list[str]:
    """Return the expected cost of a recipe in lines, or why it is unknown.

    The data are read, or the beginning of a pretraining's text. Start-up, loading and saving take seconds more.
    """
    lines = []
    if (earlier := TASKS[recipe.task].pretrain_on(recipe)) is not None:
        lines += [f"before, {line}" for line in describe_cost(earlier, output / FIRST)]
    costs = find_costs(recipe, output)
    if isinstance(costs, str):
        return [*lines, costs]
    if recipe.patience:
        lines.append("patience may end the training earlier than expected here")
    return [*lines, *forecast(recipe, costs, make_arguments(recipe, output)).describe()]


def find_costs(recipe: Recipe, output: Path) -> Costs | str:
    """Measure the costs of a recipe, or return why that cannot be done."""
    if recipe.data.get("features"):
        return "time and memory are not forecast for the feature-based approach"
    try:
        prepared = prepare(recipe.override(data={"is_forecast": True}), ignore)
        if "train" not in prepared.data:
            return "nothing to train, only to predict"
        with explain_shortage(make_arguments(recipe, output)):
            return measure_costs(recipe, prepared)
    except UsageError as error:
        return f"time and memory are unknown: {error}"


def forecast(recipe: Recipe, costs: Costs, args: TrainingArguments) -> Forecast:
    """Return the expected cost of a run from measured costs."""
    size, rows = recipe.batch_size, sum(len(part.rows) for part in costs.parts)
    total = count_updates(args, recipe, rows)
    updates, sequences = [total], [float(total * size)]
    if len(costs.parts) > 1:
        updates = [len(part.rows) // size for part in costs.parts]
        sequences = [float(len(part.rows)) for part in costs.parts]
    elif args.max_steps <= 0:  # the last batch of an epoch may be smaller
        sequences = [rows * args.num_train_epochs]
    parts = list(zip(costs.parts, updates, sequences, strict=True))
    dev = TUNE if TUNE in costs.evaluation else next(iter(TASKS[recipe.task].splits), "")
    return Forecast(
        total,
        sum(part.tokens * count for part, _, count in parts),
        sum(part.operations * count for part, _, count in parts),
        sum(part.seconds * count / args.world_size + part.fixed * steps for part, steps, count in parts),
        count_evaluations(args, total, ceil(rows / size)) * costs.evaluation.get(dev, 0.0),
        sum(costs.evaluation.values()),
        {
            "weights": costs.weights,
            "gradients": costs.gradients,
            "optimizer": max(part.optimizer for part in costs.parts),
            "activations": max(part.activations for part in costs.parts),
        },
        costs.matmul_rate * args.world_size,
    )


def count_evaluations(args: TrainingArguments, updates: int, updates_per_epoch: int) -> int:
    """Return how often the dev set is evaluated during training."""
    count = 0
    if args.eval_strategy == "epoch":
        count = ceil(updates / updates_per_epoch)
    elif args.eval_strategy == "steps":
        count = int(updates // (args.eval_steps if args.eval_steps >= 1 else ceil(updates * args.eval_steps)))
    return count + bool(args.eval_on_start)


def add_forecasts(found: Sequence[Forecast]) -> Forecast:
    """Return the cost of several runs, one after another; the memory is that of the largest."""
    totals = (sum(getattr(one, name) for one in found) for name in SUMMED)
    memory = max((one.memory for one in found), key=lambda held: sum(held.values()))
    return Forecast(*totals, memory, max(one.matmul_rate for one in found))


SUMMED = ("updates", "tokens", "operations", "training", "evaluation", "scoring")
