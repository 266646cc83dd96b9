"""Measure what a run costs here, say so before it (`--dry-run`), and train within a limit of time (`--budget`).

A few updates of a throwaway model give the seconds of an update. With a budget they decide `max_steps`, so that the
training on its ordinary schedule, its evaluations and its end fit into the time. The recipe in the run's directory has
this number, and repeats the run without a clock. A deadline ends the training earlier if the machine becomes slower.
"""

import gc
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import Trainer

from bertkit.errors import UsageError, explain_refusal
from bertkit.reports.tables import count
from bertkit.system.differences import refuse_other
from bertkit.system.files import write_json
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import list_phases
from bertkit.tasks.task import TUNE
from bertkit.training.arguments import make_arguments
from bertkit.training.baselines import fit_baselines
from bertkit.training.callbacks import Deadline, Progress
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import Recipe, list_decisive, load_recipe, resolve
from bertkit.training.run import count_updates, make_model, make_trainer, run
from bertkit.training.run_dir import FIRST, RECIPE_FILE, describe_environment, has_begun, read_record
from bertkit.training.trainer import explain_shortage

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION_PART = r"\s*(\d+(?:\.\d+)?)\s*([smhd])"
CLOCK_FILE, MEASURED_FILE = ".time_used.json", ".measured.json"  # hidden: written before the run has begun
RECORDED_EVERY = 1.0  # seconds between two records of the time used
PROBE_SECONDS, PROBE_SHARE = 10.0, 0.05  # for timed updates: in a dry run, and as a share of a budget
MOST_TIMED = 20  # updates are timed
LONGEST_UPDATE = 4.0  # seconds that a timed update should take; of a larger one only a part is timed
SAMPLED = 128  # sequences whose tokens are counted, and that are predicted
DISK_RATE = 2e8  # bytes a second of a checkpoint, until the first one has been timed
END_SECONDS = 4.0  # for scores, their intervals, the card and the exit, beside predictions and the model
SPARE_SHARE, SPARE_END = 0.05, 0.5  # of the time for training, and of that for the end, for a slower machine
MOST_SLOW = 10.0  # times that what is not measured may take longer beside other work
LEAST_UPDATES = 20  # updates in a training, unless all epochs have fewer
TRAIN_ONLY = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
TRAIN_ONLY |= {"eval_on_start": False, "load_best_model_at_end": False}


class TooShort(UsageError):
    """The time is too short for a training."""


# --- The clock --------------------------------------------------------------------------------------------------------


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 20m, 1.5h or 1h30m."""
    words = text.strip().lower()
    seconds = sum(float(number) * UNIT_SECONDS[unit] for number, unit in re.findall(DURATION_PART, words))
    if not re.fullmatch(f"(?:{DURATION_PART})+", words) or not 0 < seconds < 1e9:
        raise UsageError(f"{text[:40]!r} is not a duration; write for example 90s, 20m, 1.5h or 1h30m")
    return seconds


class Clock:
    """The time that a command has left, also if it is started again.

    Args:
        limit: Seconds that all of its starts may take.
        begun: `time.monotonic()` at its start.
    """

    def __init__(self, limit: float, begun: float) -> None:
        self.limit, self.begun = limit, begun
        self.earlier = 0.0

    @classmethod
    def make(cls, budget: str, given: Mapping[str, Any], begun: float) -> "Clock":
        """Return the clock of a budget, unless a person has given the number of updates too."""
        if "max_steps" in given.get("train", {}):
            raise UsageError("--budget decides the number of updates; leave out train.max_steps (or --steps)")
        return cls(parse_duration(budget), begun)

    @property
    def left(self) -> float:
        """Return the seconds left; negative if the time is over."""
        return self.limit - self.earlier - (time.monotonic() - self.begun)

    @contextmanager
    def keep(self, path: Path) -> Iterator[None]:
        """Add the time of earlier starts, and record the time used, so that a kill loses none of it."""
        with suppress(OSError, ValueError):
            self.earlier = read_record(path, float) + RECORDED_EVERY
        with explain_refusal(f"the directory {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        over = Event()

        def record() -> None:
            while not over.wait(RECORDED_EVERY):
                with suppress(OSError):  # a full disk stops the training itself
                    write_json(round(self.limit - self.left, 1), path)

        thread = Thread(target=record, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# --- What is measured and expected ------------------------------------------------------------------------------------


class Measured(msgspec.Struct, frozen=True):
    """The costs of a recipe on its data and this machine, in seconds and bytes.

    Attributes:
        rows, evaluated, predicted: Sequences in training, in an evaluation during it, and predicted at its end.
        batch_size: Sequences in an update.
        tokens: The mean number of tokens in a sequence.
        parts: For each part of the data, which has lengths of its own, the share of the training after which it ends,
            and the seconds of an update in it.
        row: Seconds of a predicted sequence.
        slowness: Wall time over the time that a thread has worked; more than 1 beside other work.
        parameters: The number of parameters.
        memory: Bytes of weights, gradients and optimizer in every process.
    """

    rows: int
    evaluated: int
    predicted: int
    batch_size: int
    tokens: float
    parts: list[tuple[float, float]]
    row: float
    slowness: float
    parameters: int
    memory: dict[str, int]

    @property
    def update(self) -> float:
        """Return the mean seconds of an update."""
        ends, seconds = zip(*self.parts, strict=True)
        return float(np.dot(np.diff(ends, prepend=0.0), seconds))

    @property
    def evaluation(self) -> float:
        """Return the seconds of an evaluation during the training."""
        return self.evaluated * self.row

    @property
    def saving(self) -> float:
        """Return the seconds of a checkpoint during the training."""
        return (self.memory["weights"] + self.memory["optimizer"]) / DISK_RATE

    @property
    def end(self) -> float:
        """Return the seconds of the predictions and the rest of a run's end, without its checkpoint and its model."""
        return self.predicted * self.row + END_SECONDS * self.slowness


def measure(recipe: Recipe, prepared: Prepared, seconds: float) -> Measured:
    """Measure the costs of a recipe with a model that is thrown away; all processes return the same.

    Args:
        seconds: Time for the updates; at least one is timed for each part of the data.
    """
    task, rows = TASKS[recipe.task], prepared.data["train"]
    others = {split: data for split, data in prepared.data.items() if split != "train"}
    dev = others.get(TUNE, others[next(iter(task.splits))])
    parts = getattr(rows, "parts", [range(len(rows))])
    shares = [len(part) / len(rows) for part in parts]
    with TemporaryDirectory() as folder, explain_shortage(make_arguments(recipe, Path(folder))):
        model = make_model(task, recipe, prepared.settings)
        updates, tokens = [], []
        wall, own = time.monotonic(), time.thread_time()
        for part in parts:
            trainer, found = time_updates(recipe, model, Subset(rows, part), seconds / len(parts), Path(folder))
            updates.append(found)
            some = spread(part) if task.reusable else part[:SAMPLED]  # those of a pretraining are planned in order
            mask = task.collate(rows.__getitems__(list(some)))["attention_mask"]
            tokens.append(float(mask.sum()) / len(some))
        trainer.compute_metrics, some = None, spread(range(len(dev)))
        trainer.predict(Subset(dev, some[: trainer.args.world_size]))  # a warm-up
        row = trainer.predict(Subset(dev, some)).metrics["test_runtime"] / len(some)
        # Beside other work a thread has a part of the time only, and what is not measured takes longer too.
        slowness = min(max((time.monotonic() - wall) / max(time.thread_time() - own, 1e-3), 1.0), MOST_SLOW)
    states = (x for state in trainer.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    learned = (x for x in model.parameters() if x.requires_grad)
    kinds = {"weights": model.parameters(), "gradients": learned, "optimizer": states}
    memory = {name: sum(x.numel() * x.element_size() for x in kind) for name, kind in kinds.items()}
    found = Measured(
        rows=len(rows),
        evaluated=len(dev),
        predicted=sum(map(len, others.values())),
        batch_size=recipe.batch_size,
        tokens=float(np.dot(tokens, shares)),
        parts=list(zip(np.cumsum(shares).tolist(), updates, strict=True)),
        row=row,
        slowness=slowness,
        parameters=model.num_parameters(),
        memory=memory,
    )
    del trainer, model
    gc.collect()
    torch.cuda.empty_cache()  # for the training, here or in other processes
    return take_first(found)


def spread(rows: range) -> range:
    """Return at most SAMPLED of some rows, evenly spaced."""
    return rows[:: max(len(rows) // SAMPLED, 1)][:SAMPLED]


def time_updates(recipe: Recipe, model: nn.Module, rows: Subset, seconds: float, folder: Path) -> tuple[Trainer, float]:
    """Do some updates on some rows, and return the Trainer and the seconds of an update."""
    args = make_arguments(recipe, folder)
    micro, size, updates = args.per_device_train_batch_size, 1, 1
    most = micro * args.gradient_accumulation_steps
    for _ in range(3):  # the last one counts; each of the others says how large the next one may be
        train = TRAIN_ONLY | {"max_steps": updates, "per_device_train_batch_size": min(size, micro)}
        short = recipe.override(batch_size=size * args.world_size, patience=0, train=train)
        parts = TASKS[recipe.task], model, make_arguments(short, folder), {"train": rows}, short
        trainer = make_trainer(*parts, ignore, ignore)
        took = trainer.train().metrics["train_runtime"] / updates
        done, size = size, min(most, max(int(size * LONGEST_UPDATE / took), 1))
        size = size // micro * micro or size
        size, updates = take_first((size, min(max(int(seconds / 2 / (took * size / done)), 1), MOST_TIMED)))
    return trainer, took * most / done


def expect(recipe: Recipe, measured: Measured, output: Path) -> tuple[int, float, float]:
    """Return the updates of a recipe, and the seconds of its training and of the evaluations during it."""
    args = make_arguments(recipe, output)
    updates, in_epoch = count_updates(args, recipe, measured.rows), ceil(measured.rows / recipe.batch_size)

    def count_calls(strategy: str, steps: float | None) -> int:
        if strategy == "epoch":
            return ceil(updates / in_epoch)
        return int(updates // (steps if steps >= 1 else ceil(updates * steps))) if strategy == "steps" else 0

    training = updates * measured.update * recipe.batch_size / measured.batch_size
    evaluations = args.eval_on_start + count_calls(args.eval_strategy, args.eval_steps)
    saves = count_calls(args.save_strategy, args.save_steps)
    return updates, training + saves * measured.saving, evaluations * measured.evaluation


def find_costs(recipe: Recipe) -> Measured | str:
    """Measure the costs of a recipe on its data, or return why that cannot be done."""
    if recipe.data.get("features"):
        return "time and memory are not forecast for the feature-based approach"
    try:
        prepared = prepare(recipe.override(data={"is_forecast": True}), ignore)
        return measure(recipe, prepared, PROBE_SECONDS) if "train" in prepared.data else "nothing to train"
    except UsageError as error:
        return f"time and memory are unknown: {error}"


def describe_cost(recipe: Recipe, output: Path) -> list[str]:
    """Return the expected cost of a recipe in lines, or why it is unknown."""
    earlier = TASKS[recipe.task].pretrain_on(recipe)
    lines = [f"before, {line}" for line in describe_cost(earlier, output / FIRST)] if earlier else []
    if isinstance(measured := find_costs(recipe), str):
        return [*lines, measured]
    updates, training, evaluation = expect(recipe, measured, output)
    machine = describe_environment()
    device = "; ".join(machine["gpus"]) or f"{machine['processor']}, {count(machine['threads'], 'thread')}"
    return [
        *lines,
        f"{measured.parameters:,} parameters; {updates:,} updates of {recipe.batch_size * measured.tokens:,.0f} tokens",
        f"memory, GB, without activations: {', '.join(f'{x} {size / 1e9:.2f}' for x, size in measured.memory.items())}",
        f"expected here, from a few timed updates: {describe_duration(training)} of training and "
        f"{describe_duration(evaluation + measured.end)} of evaluation ({device})",
    ]


# --- A limit of time --------------------------------------------------------------------------------------------------


def fit(recipe: Recipe, measured: Measured, clock: Clock, output: Path) -> Recipe:
    """Return a recipe with the number of updates that fits; its length is exceeded only if it has no epochs.

    Raises:
        TooShort: LEAST_UPDATES updates do not fit.
    """
    planned, each = expect(recipe, measured, output)[0], measured.update * recipe.batch_size / measured.batch_size
    left = (1 - SPARE_SHARE) * take_first(clock.left - (1 + SPARE_END) * measured.end - 2 * measured.saving)
    updates = planned if "num_train_epochs" in recipe.train else max(int(left / each), 0)
    while updates >= (least := min(LEAST_UPDATES, planned)):
        fitted = resolve(recipe, updates, planned)
        if (needed := sum(expect(fitted, measured, output)[1:])) <= left:
            return fitted
        updates = max(int(updates * left / needed), 0)
    minutes = ceil((clock.limit - left + 2 * least * each) / 60) + 1
    allowed = f"the time allows {updates} updates of {each:.2g} s beside evaluation and saving"
    raise TooShort(f"{allowed}; give --budget {minutes}m or more")


def train_within(
    recipe: Recipe,
    *,
    output: Path,
    clock: Clock,
    report: Report = ignore,
    progress: Progress = ignore,
    prepared: Prepared | None = None,
) -> dict[str, Any]:
    """Train by a recipe in the time of the clock, as `run`; an unfinished run continues in the rest."""
    path, is_main = output / MEASURED_FILE, join_processes(recipe).is_main_process
    if has_begun(output):
        if not path.exists():
            raise UsageError(f"{output} has a run without --budget; name another directory with --output")
        fitted, measured, prepared = load_recipe(output / RECIPE_FILE), read_record(path, Measured), None
        again = resolve(recipe, fitted.train["max_steps"], expect(recipe, measured, output)[0])
        both = (list_decisive(each.override(stop_after=0).to_dict()) for each in (fitted, again))
        refuse_other(f"{output} belongs to another run", *both)
    else:
        prepared = prepared or prepare(recipe, report)
        if is_main:
            fit_baselines(TASKS[recipe.task], recipe, prepared, ignore)  # the cache keeps them for the run
        report("measuring some updates")
        measured = measure(recipe, prepared, PROBE_SHARE * clock.left)
        fitted = fit(recipe, measured, clock, output)
        if hasattr(prepared.data["train"], "phases"):  # the samples of a pretraining follow its length
            prepared.data["train"].phases = list_phases(fitted)
        if is_main:
            output.mkdir(parents=True, exist_ok=True)
            write_json(msgspec.to_builtins(measured), path)
    stop = Deadline(clock, measured, fitted.stop_after)
    return run(fitted, output=output, report=report, progress=progress, prepared=prepared, stop=stop)
