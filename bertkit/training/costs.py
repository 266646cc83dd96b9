"""Measure what a run costs here, and say so before it (`--dry-run`): a few updates of a model that is thrown away."""

import gc
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, thread_time

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from bertkit.data.sequences import collate
from bertkit.data.tokenizer import save_tokenizer
from bertkit.errors import pluralize
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import TUNE
from bertkit.training.arguments import make_arguments
from bertkit.training.facts import MOST_SOLVED, describe_rows
from bertkit.training.network import make_model
from bertkit.training.parts import SAMPLED, bound_tokens, measure_activations
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import take_first
from bertkit.training.recipe import Recipe, make_first, resolve
from bertkit.training.run import count_updates, make_trainer
from bertkit.training.run_dir import FIRST, describe_environment
from bertkit.training.trainer import explain_shortage

PROBE_SECONDS = 10.0  # for the timed updates of a dry run
MOST_TIMED = 20  # updates are timed
LONGEST_UPDATE = 4.0  # seconds that a timed update should take; of a larger one only a part is timed
DISK_RATE = 2e8  # bytes a second of a checkpoint, until the first one has been timed
END_SECONDS = 4.0  # for scores, their intervals, the card and the exit, beside predictions and the model
MOST_SLOW = 10.0  # times that what is not measured may take longer while other work runs
BUSY_LATER, BUSIER = 3.5, 1.5  # times that the end may take, if other processes come to a free or to a busy machine
TRAIN_ONLY = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
TRAIN_ONLY |= {"eval_on_start": False, "load_best_model_at_end": False}


class Costs(msgspec.Struct, frozen=True):
    """The costs of a recipe on its data and this machine, in seconds and bytes."""

    rows: int  # rows, evaluated, predicted: Sequences in training, in an evaluation during it, and predicted at its end
    evaluated: int
    predicted: int
    batch_size: int  # sequences in an update
    # tokens, at_once: The mean number of tokens in a sequence, and the most that a process computes at once
    tokens: float
    at_once: float
    # For each part of the data, which has lengths of its own, the share of the training after which it ends, and the
    # seconds of an update in it
    parts: list[tuple[float, float]]
    seconds_per_row: float  # seconds of a predicted sequence
    slowness: float  # wall time over the time that a thread has worked; more than 1 while other work runs
    # Bytes of weights, gradients, optimizer and the activations of a micro-batch, in every process
    memory: dict[str, int]

    @property
    def seconds_per_update(self) -> float:
        """Return the mean seconds of an update."""
        ends, seconds = zip(*self.parts, strict=True)
        return float(np.dot(np.diff(ends, prepend=0.0), seconds))

    @property
    def evaluation(self) -> float:
        """Return the seconds of an evaluation during the training."""
        return self.evaluated * self.seconds_per_row

    @property
    def saving(self) -> float:
        """Return the seconds of a checkpoint during the training."""
        return (self.memory["weights"] + self.memory["optimizer"]) / DISK_RATE

    @property
    def end(self) -> float:
        """Return the seconds of the predictions and the rest of a run's end, without its checkpoint and its model."""
        return self.predicted * self.seconds_per_row + END_SECONDS * self.slowness

    @property
    def longest_end(self) -> float:
        """Return the seconds of the end if other processes come, which may be there already."""
        return max(BUSY_LATER / self.slowness, BUSIER) * self.end


def measure(recipe: Recipe, prepared: Prepared, seconds: float) -> Costs:
    """Measure the costs of a recipe with a model that is thrown away; all processes return the same.

    Args:
        seconds: Time for the updates; at least one is timed, after another one, for each part of the data.
    """
    task, rows = TASKS[recipe.task], prepared.data["train"]
    others = {split: data for split, data in prepared.data.items() if split != "train"}
    dev = others.get(TUNE, others[next(iter(task.splits))])
    parts = getattr(rows, "parts", [range(len(rows))])
    shares = [len(part) / len(rows) for part in parts]
    args = make_arguments(recipe, Path())
    if recipe.starts_solved and recipe.data.get("pooling") == "auto":
        recipe = resolve(recipe, {"pooling": "mean"})  # the mean takes longer than [CLS]
    with TemporaryDirectory() as folder, explain_shortage(args, lambda: recipe):
        model = make_model(task, recipe, prepared.settings)
        recipe = resolve(recipe, bound_tokens(recipe, task, model, rows, args.device))
        updates, tokens = [], []
        wall, own = monotonic(), thread_time()
        for part in parts:
            trainer, found = time_updates(recipe, model, Subset(rows, part), seconds / len(parts), Path(folder))
            updates.append(found)
            some = spread(part) if task.reusable else part[:SAMPLED]  # sequences of a pretraining are planned in order
            mask = collate(rows.__getitems__(list(some)))["attention_mask"]
            tokens.append(float(mask.sum()) / len(some))
        trainer.compute_metrics, some = None, spread(range(len(dev)))
        trainer.predict(Subset(dev, some[: trainer.args.world_size]))  # a warm-up
        row = trainer.predict(Subset(dev, some)).metrics["test_runtime"] / len(some)
        # Beside other work a thread has a part of the time only, and what is not measured takes longer too.
        slowness = min(max((monotonic() - wall) / max(thread_time() - own, 1e-3), 1.0), MOST_SLOW)
        # The part with the longest sequences needs the most memory: the last phase of a pretraining.
        at_once = min(args.per_device_train_batch_size * max(tokens), recipe.data["max_tokens"] or inf)
        activations = int(at_once * measure_activations(recipe, task, model, rows, args.device))
    states = (x for state in trainer.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    learned = (x for x in model.parameters() if x.requires_grad)
    kinds = {"weights": model.parameters(), "gradients": learned, "optimizer": states}
    memory = {name: sum(x.numel() * x.element_size() for x in kind) for name, kind in kinds.items()}
    memory["activations"] = activations
    found = Costs(
        rows=len(rows),
        evaluated=len(dev),
        predicted=sum(map(len, others.values())),
        batch_size=recipe.batch_size,
        tokens=float(np.dot(tokens, shares)),
        at_once=at_once,
        parts=list(zip(np.cumsum(shares).tolist(), updates, strict=True)),
        seconds_per_row=row,
        slowness=slowness,
        memory=memory,
    )
    del trainer, model
    gc.collect()
    torch.cuda.empty_cache()  # for the training, here or in other processes
    return take_first(found)


def spread(rows: range) -> range:
    """Return at most SAMPLED of some rows, evenly spaced."""
    return rows[:: max(len(rows) // SAMPLED, 1)][:SAMPLED]


class UpdateEnds(TrainerCallback):
    """Notes when updates end: a short training takes longer to begin than to do."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(monotonic())


def time_updates(recipe: Recipe, model: nn.Module, rows: Subset, seconds: float, folder: Path) -> tuple[Trainer, float]:
    """Do some updates on some rows, and return the Trainer and the seconds of an update.

    The faster of the last two timings counts, both of the same rows: other work for a moment makes one of them slow.
    """
    args = make_arguments(recipe, folder)
    micro, size, updates = args.per_device_train_batch_size, 1, 2
    most = micro * args.gradient_accumulation_steps
    timings = []
    for _ in range(4):  # each says how large the next one may be
        train = TRAIN_ONLY | {"max_steps": updates}
        if "per_device_train_batch_size" in recipe.train:  # without it `max_tokens` divides the update
            train["per_device_train_batch_size"] = min(size, micro)
        short = resolve(recipe, {"batch_size": size * args.world_size, "patience": 0, **train})
        parts = TASKS[recipe.task], model, make_arguments(short, folder), {"train": rows}, short
        noted = UpdateEnds()
        trainer = make_trainer(*parts, ignore, ignore, callbacks=[noted])
        trainer.train()
        took = (noted.ends[-1] - noted.ends[0]) / (updates - 1)  # the first update takes longer
        timings.append(took * most / size)
        done, size = size, min(most, max(int(size * LONGEST_UPDATE / took), 1))
        size = size // micro * micro or size
        size, updates = take_first((size, min(max(int(seconds / 3 / (took * size / done)), 2), MOST_TIMED)))
    return trainer, min(timings[2:])


def estimate(recipe: Recipe, measured: Costs, output: Path) -> tuple[int, float, float]:
    """Return the updates of a recipe, and the seconds of its training and of the evaluations during it."""
    args = make_arguments(recipe, output)
    updates, in_epoch = count_updates(args, recipe, measured.rows), ceil(measured.rows / recipe.batch_size)

    def count_calls(strategy: str, steps: float | None) -> int:
        if strategy == "epoch":
            return ceil(updates / in_epoch)
        if strategy != "steps":
            return 0
        return int(updates // (steps if steps >= 1 else ceil(updates * steps)))

    training = updates * measured.seconds_per_update * recipe.batch_size / measured.batch_size
    evaluations = args.eval_on_start + count_calls(args.eval_strategy, args.eval_steps)
    saves = count_calls(args.save_strategy, args.save_steps)
    during = evaluations * measured.evaluation
    if recipe.starts_solved:  # the vectors of the training rows, and the answers to dev before the first update
        during += min(measured.rows, MOST_SOLVED) * measured.seconds_per_row + measured.evaluation
    return updates, training + saves * measured.saving, during


def measure_costs(recipe: Recipe, left: Path | None = None, report: Report = ignore) -> Costs | str:
    """Measure the costs of a recipe on its data, or return why they are not forecast.

    Args:
        left: Receives the model, untrained, and the tokenizer, unless it exists; to measure runs that start from it.
        report: Receives lines about the data, such as the rows of each split.
    """
    if recipe.data.get("features"):  # encoding would compute them
        TASKS[recipe.task].load(recipe.data, report)
        return "time and memory are not forecast for the feature-based approach"
    prepared = prepare(replace(recipe, data={**recipe.data, "is_forecast": True}), report)
    if recipe.is_solved:
        return "time and memory are not forecast for a frozen encoder, which reads all rows once; its head is solved"
    if left and not left.exists():
        save_tokenizer(prepared.tokenizer, left)
        make_model(TASKS[recipe.task], recipe, prepared.settings).save_pretrained(left)
    return measure(recipe, prepared, PROBE_SECONDS) if "train" in prepared.data else "nothing to train"


def describe_cost(recipe: Recipe, output: Path, report: Report = ignore) -> list[str]:
    """Return the expected cost of a recipe in lines, or why it is not forecast; arguments as for `measure_costs`."""
    earlier = make_first(recipe)
    lines = [f"before, {line}" for line in describe_cost(earlier, output / FIRST, report)] if earlier else []
    if isinstance(measured := measure_costs(recipe, report=report), str):
        return [*lines, measured]
    recipe = resolve(recipe, describe_rows(recipe, measured.rows, lines.append))
    updates, training, evaluation = estimate(recipe, measured, output)
    machine, memory, tokens = describe_environment(), measured.memory, recipe.batch_size * measured.tokens
    device = "; ".join(machine["gpus"]) or f"{machine['processor']}, {pluralize(machine['threads'], 'thread')}"
    return [
        *lines,
        f"{memory['weights'] // 4:,} parameters; {updates:,} updates of {tokens:,.0f} tokens",
        f"memory, GB: {', '.join(f'{x} {size / 1e9:.2f}' for x, size in memory.items())} of "
        f"{measured.at_once:,.0f} tokens at once",
        f"expected here, from a few timed updates: {describe_duration(training)} of training and "
        f"{describe_duration(evaluation + measured.end)} of evaluation ({device})",
    ]
