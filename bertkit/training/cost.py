"""The costs of training and evaluation, from a few updates on this machine: operations, memory and seconds.

Left out: start-up, loading and saving, which take seconds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedConfig, TrainerCallback

from bertkit.model.precision import DTYPES, choose_precision, find_device, use_precision
from bertkit.model.pretraining_heads import BertLMHead
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.tasks.prediction import collate_with_places
from bertkit.tasks.task import TUNE, Task
from bertkit.training.arguments import make_arguments
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe
from bertkit.training.run import make_model, make_trainer

SAMPLED = 512  # sequences whose tokens are counted
EVALUATED = 128  # sequences of each split that are predicted
PROBE_SECONDS = 10.0  # of updates
LONGEST_UPDATE = 4.0  # seconds that an update of the probe should take; larger ones have fewer sequences
EXPECTED_SHARE = 0.5  # of the matmul rate, for the size of the probe's updates
UNTIMED = 2  # updates before those that are timed
LEAST_UPDATES = 3  # timed, however long they take
MATMUL_SECONDS = 1.0  # for which large matrix products are measured
TRAIN_ONLY = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "max_steps": 1_000_000,
}


@dataclass(frozen=True)
class PartCost:
    """The costs of training on some of the rows, which have lengths of their own.

    Attributes:
        rows: Positions in the training data.
        tokens: Real tokens of a sequence.
        operations: Floating-point operations for a sequence, forwards and backwards.
        seconds: Time for a sequence in a process, forwards and backwards.
        fixed: Seconds of an update that do not depend on its sequences: the optimizer.
        activations: Bytes that a micro-batch keeps for the backward pass.
        optimizer: Bytes of the optimizer's state.
    """

    rows: range
    tokens: float
    operations: float
    seconds: float
    fixed: float
    activations: int
    optimizer: int


@dataclass(frozen=True)
class Costs:
    """The costs of a run, for any number of updates and any batch size.

    Attributes:
        evaluation: Seconds of one pass over each split, by name.
        rows: Sequences of each split, by name.
        weights, gradients: Bytes in every process.
        matmul_rate: Floating-point operations per second of large matrix products in a process here.
    """

    parts: Sequence[PartCost]
    evaluation: Mapping[str, float]
    rows: Mapping[str, int]
    weights: int
    gradients: int
    matmul_rate: float


def measure_costs(recipe: Recipe, prepared: Prepared, seconds: float | None = None, *, is_best: bool = False) -> Costs:
    """Measure the costs of a recipe on its data: some updates on each part, and some predictions.

    Args:
        seconds: Time for the updates; PROBE_SECONDS by default.
        is_best: Whether the fastest updates count, as of a machine without other work, instead of the median.
    """
    task = TASKS[recipe.task]
    model = make_model(task, recipe, prepared.settings)
    precision = choose_precision(recipe.precision)
    before = torch.tensor(measure_matmul_rate(precision), device=find_device())
    matmul_rate = float(reduce(before, "mean"))  # the same in all processes
    rows = prepared.data["train"]
    with TemporaryDirectory() as folder:
        parts = getattr(rows, "parts", [range(len(rows))])
        each = (seconds or PROBE_SECONDS) / len(parts)
        probe = Probe(task, recipe, model, matmul_rate, each, Path(folder), is_best)
        measured = [probe.measure_part(rows, part) for part in parts]
        splits = [split for split in (TUNE, *task.splits, *task.unlabelled) if split in prepared.data]
        evaluation = {split: probe.measure_evaluation(prepared.data[split]) for split in splits}
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    gradients = sum(x.numel() * x.element_size() for x in model.parameters() if x.requires_grad)
    # Other work makes the rate too low, never too high.
    sizes = {split: len(prepared.data[split]) for split in splits}
    return Costs(measured, evaluation, sizes, weights, gradients, max(matmul_rate, measure_matmul_rate(precision)))


@dataclass(frozen=True)
class Probe:
    """Measures costs with a run's own Trainer."""

    task: Task
    recipe: Recipe
    model: nn.Module
    matmul_rate: float
    seconds: float  # of the timed updates of a part
    folder: Path
    is_best: bool

    def measure_part(self, rows: Any, part: range) -> PartCost:
        """Measure the costs of updates on a part of the training rows."""
        args = make_arguments(self.recipe, self.folder)
        numbers: Sequence[int] = part
        if args.train_sampling_strategy != "sequential":
            numbers = np.random.default_rng(0).permutation(part).tolist()
        sample = Subset(rows, numbers[:SAMPLED])
        lengths, labelled = count_tokens(self.task, sample, args.per_device_train_batch_size)
        operations = self.count_operations(lengths, labelled) / len(sample)
        micro = args.per_device_train_batch_size
        largest = max(int(LONGEST_UPDATE * EXPECTED_SHARE * self.matmul_rate / operations), 1)
        size = min(largest, micro * args.gradient_accumulation_steps)  # sequences of an update, in a process
        size = size // micro * micro or size
        train = TRAIN_ONLY | {"per_device_train_batch_size": min(size, micro)}
        recipe = self.recipe.override(batch_size=size * args.world_size, patience=0, train=train)
        clock = UpdateClock(self.seconds)
        short = make_arguments(recipe, self.folder)
        data = {"train": Subset(rows, numbers)}
        trainer = make_trainer(self.task, self.model, short, data, recipe, ignore, ignore)
        trainer.add_callback(clock)
        trainer.train()
        seconds, fixed = clock.summarize(np.min if self.is_best else np.median)
        states = (x for state in trainer.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        few = min(size, micro, len(sample))
        return PartCost(
            part,
            float(lengths.sum()) / len(sample),
            operations,
            (seconds - fixed) / size,
            fixed,
            self.measure_activations(sample, few) * micro // few,
            sum(x.numel() * x.element_size() for x in states),
        )

    def count_operations(self, lengths: Tensor, labelled: int) -> float:
        """Return the floating-point operations of training; a frozen encoder has no backward pass."""
        decoded = labelled if isinstance(self.model, BertLMHead) else 0
        learns = any(x.requires_grad for x in self.model.bert.encoder.parameters())
        return count_flops(self.model.config, lengths, decoded) / (1 if learns else 3)

    def measure_activations(self, sample: Subset, size: int) -> int:
        """Return the bytes that the forward pass of some sequences keeps for the backward pass."""
        device, kept = find_device(), {}
        own = {x.untyped_storage().data_ptr() for x in self.model.parameters()}
        collate = partial(collate_with_places, self.task.collate, type(self.model))
        batch = next(iter(DataLoader(sample, size, collate_fn=collate)))

        def keep(x: Tensor) -> Tensor:
            storage = (x.values() if x.is_nested else x).untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        self.model.train()
        with use_precision(choose_precision(self.recipe.precision), device), saved_tensors_hooks(keep, lambda x: x):
            outputs = self.model(**{name: x.to(device) for name, x in batch.items()})
        del outputs  # until here the kept tensors have addresses of their own
        return sum(kept.values())

    def measure_evaluation(self, rows: Any) -> float:
        """Return the seconds of one pass over a split."""
        args = make_arguments(self.recipe.override(train=TRAIN_ONLY), self.folder)
        trainer = make_trainer(self.task, self.model, args, {}, self.recipe, ignore, ignore)
        trainer.compute_metrics = None
        numbers = np.random.default_rng(0).permutation(len(rows))[:EVALUATED].tolist()
        trainer.predict(Subset(rows, numbers[: args.world_size]))  # a warm-up
        parts = np.array_split(numbers, 2 if self.is_best and len(numbers) > args.world_size else 1)
        seconds = []
        for part in parts:
            start = read_clock()
            trainer.predict(Subset(rows, part.tolist()))
            seconds.append((read_clock() - start) / len(part))
        return min(seconds) * len(rows)


class UpdateClock(TrainerCallback):
    """Times updates, and ends the training.

    Args:
        seconds: Least duration of the timed updates, after UNTIMED others; several processes, which must end together,
            do LEAST_UPDATES.

    Attributes:
        ends: Time at the end of each update.
        fixed: Seconds of each update's optimizer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends: list[float] = []
        self.fixed: list[float] = []
        self.before = 0.0

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.before = read_clock()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ends.append(read_clock())
        self.fixed.append(self.ends[-1] - self.before)
        is_over = args.world_size > 1 or self.ends[-1] - self.ends[min(UNTIMED, len(self.ends)) - 1] > self.seconds
        if is_over and len(self.ends) >= UNTIMED + LEAST_UPDATES:
            control.should_training_stop = True

    def summarize(self, statistic: Callable[..., Any] = np.median) -> tuple[float, float]:
        """Return the seconds of an update, and the part of them that is fixed; by default the medians."""
        return float(statistic(np.diff(self.ends[UNTIMED - 1 :]))), float(statistic(self.fixed[UNTIMED:]))


def read_clock() -> float:
    """Return the time in seconds, once an accelerator has finished what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


# --- Operations -------------------------------------------------------------------------------------------------------


def count_tokens(task: Task, rows: Any, batch_size: int) -> tuple[Tensor, int]:
    """Return the lengths (S,) of all sequences, without padding, and the number of labelled tokens."""
    lengths, targets = [], 0
    for batch in DataLoader(rows, batch_size, collate_fn=task.collate):
        lengths.append(batch["attention_mask"].sum(-1).flatten())
        if (labels := batch.get("labels")) is not None and labels.dim() == 2:  # (B, T)
            targets += int((labels >= 0).sum())
    return torch.cat(lengths), targets


def count_flops(config: PreTrainedConfig, lengths: Tensor, targets: int) -> float:
    """Return the floating-point operations of training on sequences of lengths (S,), with `targets` decoded tokens.

    Only matrix products count, with one multiplication and one addition each; the backward pass takes twice the
    operations of the forward pass. The pooler is counted, heads with a few classes are not.
    """
    hidden, lengths = config.hidden_size, lengths.double()
    layer = 8 * hidden**2 + 4 * hidden * config.intermediate_size  # per token: query, key, value, output; both dense
    scores = 4 * hidden * float((lengths**2).sum())  # query times key, and probabilities times value
    encoder = config.num_hidden_layers * (layer * float(lengths.sum()) + scores)
    decoder = targets * (2 * hidden**2 + 2 * hidden * config.vocab_size)
    return 3.0 * (encoder + decoder + len(lengths) * 2 * hidden**2)


def measure_matmul_rate(precision: str) -> float:
    """Return the floating-point operations per second of products of large square matrices, from the median time."""
    from torch.utils.benchmark import Timer  # looks for a CUDA toolkit, and logs what it misses

    device = find_device()
    size = 8192 if device.type == "cuda" else 2048
    one, two = torch.randn(2, size, size, device=device, dtype=DTYPES.get(precision, torch.float32))
    timer = Timer("one @ two", globals={"one": one, "two": two}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=MATMUL_SECONDS).median
