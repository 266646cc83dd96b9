"""Training beside plain transformers: what the benches of fine-tuning and of pretraining share.

Every side trains the same rows for one epoch through its Trainer, from the same weights, in turn with the others and in
the same process, which keeps or returns freed memory as it would for that side alone. What is counted is counted of
real tokens, so that padding is no work done: rates of sequences and tokens, the model's floating-point operations, and
their share of the rate at which the machine multiplies matrices, measured in between. The memory is what a side's
updates add to the weights that are loaded: gradients, the optimizer's moments, activations.

With dropout off, both sides have to have the same losses, update by update; they are compared before anything is timed.

Left out: several processes; loading; evaluation.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from bertkit.bench.measure import BERTKIT, REFERENCE, alternate, compare, measure_growth
from bertkit.errors import UsageError
from bertkit.model.precision import DTYPES, choose_precision, find_device
from bertkit.system.memory import restore_memory
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import Task
from bertkit.training.arguments import make_arguments
from bertkit.training.recipe import Recipe, merge
from bertkit.training.run import make_model, make_trainer
from bertkit.training.run_dir import describe_environment

SAME_BATCHES, SORTED, COMPILED, EXAMPLE = "same", "sorted", "compiled", "example"  # stock's sides
TRAINING_SEED = 0
# Tokens that are trained for random weights, and the rows that their embeddings have.
SMALL_VOCABULARY, EMBEDDING_ROWS = 8192, 30_522
WARM_UP = 8  # updates of each side before the clock runs
MEMORY = 4  # updates whose memory is measured
COMPARED = 50  # updates whose losses are compared
# Of the losses of an update, on average: rounding, which bf16 has much of.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
RELEASED_SIZES = {  # Google's release: layers, hidden size
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
QUIET = {  # for either side: train, and nothing else
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "num_train_epochs": 1.0,
    "seed": TRAINING_SEED,
}


@dataclass(frozen=True)
class Epochs:
    """What was trained: sequences, their real tokens, and the floating-point operations that a model needs for them."""

    sequences: int
    tokens: int
    flops: float


@dataclass(frozen=True)
class Epoch:
    """One side's way through the rows: how long it took, what was done, and each update's loss if it was logged."""

    seconds: float
    work: Epochs
    losses: list[float]


@dataclass(frozen=True)
class Side:
    """One of those that train.

    build: folder, updates, whether losses are logged, collator's wrapper -> a Trainer.
    weights: of the model that `build` trains; they are put back before every epoch.
    """

    precision: str
    model: PreTrainedModel
    weights: Mapping[str, Tensor]
    build: "Callable[[Path, int, bool, Meter], Trainer]"


class Meter:
    """Wraps a collator, and notes the lengths of the sequences and the decoded positions of every batch."""

    def __init__(self) -> None:
        self.lengths: list[Tensor] = []  # of each batch (B,)
        self.targets = 0  # labels at tokens

    def wrap(self, collate: Callable[[Any], dict[str, Tensor]]) -> Callable[[Any], dict[str, Tensor]]:
        """The collator that counts."""

        def count(items: Any) -> dict[str, Tensor]:
            batch = collate(items)
            self.lengths.append(batch["attention_mask"].sum(-1))
            if batch["labels"].dim() == 2:
                self.targets += int((batch["labels"] >= 0).sum())
            return batch

        return count

    def measure(self, config: PreTrainedConfig) -> Epochs:
        """What has gone through the collator."""
        lengths = torch.cat(self.lengths)
        return Epochs(len(lengths), int(lengths.sum()), count_flops(config, lengths, self.targets))


def count_flops(config: PreTrainedConfig, lengths: Tensor, targets: int) -> float:
    """Floating-point operations of training on sequences of these lengths (S,), of which `targets` tokens are decoded.

    Matrix products alone, a multiplication and an addition each; the backward pass takes twice the forward one. The
    pooler is counted, heads of a few classes are not.
    """
    hidden, lengths = config.hidden_size, lengths.double()
    layer = 8 * hidden**2 + 4 * hidden * config.intermediate_size  # a token: query, key, value, output; both dense
    scores = 4 * hidden * float((lengths**2).sum())  # query times key, and probabilities times value
    encoder = config.num_hidden_layers * (layer * float(lengths.sum()) + scores)
    decoder = targets * (2 * hidden**2 + 2 * hidden * config.vocab_size)
    return 3.0 * (encoder + decoder + len(lengths) * 2 * hidden**2)


class Clock(TrainerCallback):
    """The seconds of the loop itself, without what the Trainer prepares."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        synchronize()
        self.seconds = -time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        synchronize()
        self.seconds += time.perf_counter()


def synchronize() -> None:
    """Waits for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- The sides --------------------------------------------------------------------------------------------------------


def make_ours(task: Task, recipe: Recipe, model: PreTrainedModel, rows: Any) -> Side:
    """This package, as a run trains; of the recipe nothing is changed but what is saved and logged."""

    def build(folder: Path, updates: int, logs: bool, meter: Meter) -> Trainer:
        train = QUIET | {"max_steps": updates, "logging_steps": 1, "logging_strategy": "steps" if logs else "no"}
        whole = merge(recipe, {"train": train})
        args = make_arguments(task, whole, folder)
        trainer = make_trainer(task, model, args, {"train": rows}, whole, ignore, ignore)
        trainer.data_collator = meter.wrap(trainer.data_collator)
        return trainer

    return Side(choose_precision(recipe["precision"]), model, keep_weights(model), build)


def make_stock(
    recipe: Recipe,
    model: PreTrainedModel,
    rows: Any,
    collate: Callable[[Any], dict[str, Tensor]],
    *,
    precision: str | None = None,
    strategy: str | None = None,
) -> Side:
    """Plain transformers: its Trainer, with fused AdamW and the hyper-parameters of the recipe.

    Args:
        precision: of its matrix products; None: as the recipe says.
        strategy: how it draws the rows; None: likewise.
    """
    precision = precision or choose_precision(recipe["precision"])
    strategy = strategy or recipe["train"].get("train_sampling_strategy", "random")
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")
    given = {name: recipe["train"][name] for name in (*names, "warmup_steps", "lr_scheduler_type")}

    def build(folder: Path, updates: int, logs: bool, meter: Meter) -> Trainer:
        args = TrainingArguments(
            **QUIET,
            **given,
            output_dir=str(folder),
            max_steps=updates,
            logging_steps=1,
            logging_strategy="steps" if logs else "no",
            per_device_train_batch_size=recipe["batch_size"],
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=not torch.accelerator.is_available(),
            train_sampling_strategy=strategy,
            optim="adamw_torch_fused",
            remove_unused_columns=False,
        )
        args._n_gpu = min(args.n_gpu, 1)
        trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=meter.wrap(collate))
        trainer.remove_callback(PrinterCallback)
        return trainer

    return Side(precision, model, keep_weights(model), build)


def load_both(
    task: Task, recipe: Recipe, settings: Mapping[str, Any], stock: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """This package's model and that of `stock`, a class of plain transformers, with the same weights."""
    torch.manual_seed(TRAINING_SEED)
    ours = make_model(task, recipe, settings)
    with TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        return ours, stock.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def keep_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def train_epoch(side: Side, updates: int, *, logs: bool = False) -> Epoch:
    """One side's updates, from its first weights."""
    with torch.no_grad():
        for name, weight in side.model.state_dict().items():
            weight.copy_(side.weights[name])
    side.model.zero_grad(set_to_none=True)
    restore_memory()  # what we keep, we ask for when a training begins
    clock, meter = Clock(), Meter()
    with TemporaryDirectory() as folder:
        set_seed(TRAINING_SEED)
        trainer = side.build(Path(folder), updates, logs, meter)
        trainer.add_callback(clock)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Epoch(clock.seconds, meter.measure(side.model.config), losses)


# --- What is measured -------------------------------------------------------------------------------------------------


def compare_sides(
    task: Task,
    recipe: Recipe,
    settings: Mapping[str, Any],
    stock: Any,
    rows: Any,
    collate: Callable[[Any], dict[str, Tensor]],
    updates: int,
    report: Report,
) -> dict[str, Any]:
    """The losses of both without dropout and with the same optimizer; see `load_both` and `compare_losses`."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    quiet = merge(recipe, {"model": still, "train": {"optim": "adamw_torch_fused"}})
    ours, other = load_both(task, quiet, settings, stock)
    sides = make_ours(task, quiet, ours, rows), make_stock(quiet, other, rows, collate)
    return compare_losses(*sides, min(updates, COMPARED), report)


def compare_losses(ours: Side, stock: Side, updates: int, report: Report) -> dict[str, Any]:
    """The losses of both sides, update by update; they have to be without dropout, on the same batches.

    Raises:
        UsageError: they are further apart than rounding explains, so nothing that is timed would be the same.
    """
    one, two = (train_epoch(side, updates, logs=True).losses for side in (ours, stock))
    apart = [abs(left - right) for left, right in zip(one, two, strict=True)]
    found = {BERTKIT: one, "stock": two, "mean_difference": fmean(apart), "largest_difference": max(apart)}
    report(
        f"losses of {updates} updates without dropout: {fmean(one):.4f}, stock {fmean(two):.4f}; "
        f"apart by {found['mean_difference']:.1e} on average, at most {found['largest_difference']:.1e}"
    )
    if not found["mean_difference"] <= LOSS_TOLERANCE[ours.precision]:
        raise UsageError(
            f"the losses of both sides are {found['mean_difference']:.1e} apart on average, where rounding explains "
            f"{LOSS_TOLERANCE[ours.precision]:.0e}: they do not train the same; report it with this line"
        )
    return found


def measure_sides(sides: Mapping[str, Side], updates: int, repeats: int, report: Report) -> dict[str, Any]:
    """Rates, memory and ratios of sides that train the same rows; BERTKIT, SAME_BATCHES, EXAMPLE are among them."""
    memory = {}
    for name, side in sides.items():
        report(f"  {name}: warming up, measuring memory")
        train_epoch(side, min(WARM_UP, updates))
        memory[name] = measure_growth(partial(train_epoch, side, min(MEMORY, updates)), find_device())
    done: dict[str, Epoch] = {}
    speeds = {precision: [measure_products(precision)] for precision in {side.precision for side in sides.values()}}
    calls = {name: partial(train_epoch, side, updates) for name, side in sides.items()}
    seconds = alternate(calls, repeats, report, done.__setitem__, lambda call, take: note_seconds(call(), take))
    for precision, found in speeds.items():
        found.append(measure_products(precision))
    figures = {}
    for name, side in sides.items():
        rate = [done[name].work.flops / value for value in seconds[name]]
        figures[name] = {
            "precision": side.precision,
            "seconds": seconds[name],
            "samples_per_second": done[name].work.sequences / median(seconds[name]),
            "tokens_per_second": done[name].work.tokens / median(seconds[name]),
            "flops_per_second": median(rate),
            "share_of_products": median(rate) / median(speeds[side.precision]),
            "peak_bytes": memory[name],
        }
        report(f"  {name}: {describe(figures[name])}")
    best = min((name for name in sides if name not in (BERTKIT, EXAMPLE)), key=lambda name: median(seconds[name]))
    sides_of = {"stock_same": SAME_BATCHES, "stock_best": best, "stock_example": EXAMPLE}
    ratios = {name: compare({BERTKIT: seconds[BERTKIT], REFERENCE: seconds[side]}) for name, side in sides_of.items()}
    for name, ratio in ratios.items():
        report(f"{name}: {ratio:.2f} times" + (f" ({best})" if name == "stock_best" else ""))
    return {
        "sides": figures,
        "best": best,
        "ratios": ratios,
        "products": speeds,
        "tokens": done[BERTKIT].work.tokens,
        "sequences": done[BERTKIT].work.sequences,
        "updates": updates,
        "device": str(find_device()),
        "threads": torch.get_num_threads(),
        "environment": describe_environment(),
    }


def note_seconds(epoch: Epoch, take: Callable[[Epoch], None]) -> float:
    """The seconds on an epoch's own clock."""
    take(epoch)
    return epoch.seconds


def describe(figures: Mapping[str, Any]) -> str:
    """A side's figures in a line."""
    parts = [
        f"{figures['samples_per_second']:,.1f} sequences/s",
        f"{figures['tokens_per_second']:,.0f} tokens/s",
        f"{figures['flops_per_second'] / 1e9:,.0f} GFLOP/s ({figures['share_of_products']:.0%} of products in "
        f"{figures['precision']})",
    ]
    if figures["peak_bytes"] is not None:
        parts.append(f"{figures['peak_bytes'] / 2**20:,.0f} MiB above the weights")
    return ", ".join(parts)


def measure_products(precision: str) -> float:
    """Floating-point operations a second of products of large square matrices: the median of some."""
    device = find_device()
    size = 8192 if device.type == "cuda" else 2048
    one, two = torch.randn(2, size, size, device=device, dtype=DTYPES.get(precision, torch.float32))
    seconds = []
    for _ in range(9):
        synchronize()
        start = time.perf_counter()
        one @ two
        synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / median(seconds)


def compile_model(model: PreTrainedModel, report: Report, *, dynamic: bool) -> bool:
    """Whether torch could compile a model, in place; it needs a C++ compiler on a CPU, and Triton on a GPU."""
    try:
        model.to(find_device()).compile(dynamic=dynamic)
        ids = torch.ones(2, 8, dtype=torch.int64, device=model.device)
        model(input_ids=ids, attention_mask=ids)
    except Exception as error:  # whatever a compiler says
        report(f"torch.compile fails here, so no side uses it: {type(error).__name__}")
        return False
    return True


def choose_size(name: str | None) -> dict[str, int]:
    """BertConfig's sizes of one of Google's; BERT-base on an accelerator and BERT-small without if none is named.

    Raises:
        UsageError: there is none of that name.
    """
    name = name or ("base" if torch.accelerator.is_available() else "small")
    if name not in RELEASED_SIZES:
        raise UsageError(f"unknown size {name!r}; expected one of {', '.join(RELEASED_SIZES)}")
    layers, hidden = RELEASED_SIZES[name]
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
    }
