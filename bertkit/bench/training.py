"""Benchmark training against plain transformers: the shared part of the fine-tuning and pretraining benchmarks.

Every side trains on the same rows for one epoch through its Trainer, from the same weights. The sides alternate in one
process, which keeps or returns freed memory as it would for that side alone. The task's collator makes the batches of
every side, and the recipe gives all Trainers the same arguments; the seconds are the Trainer's `train_runtime`. Only
real tokens count, so padding is not counted: rates of sequences and tokens, the model's floating-point operations, and
their share of the machine's rate of matrix multiplication, measured before and after the rounds. The memory is what a
side's updates add to the loaded weights: gradients, the optimizer's moments, activations.

Without dropout, both sides must have the same losses in every update; this is checked before anything is timed.

Left out: several processes; loading; evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PrinterCallback, Trainer, set_seed
from transformers.masking_utils import flash_attention_mask

from bertkit.bench.measure import (
    BERTKIT,
    Measurement,
    Timed,
    alternate,
    count_flops,
    count_tokens,
    measure_growth,
    measure_matmul_rate,
    note_machine,
)
from bertkit.data.sequences import IGNORED
from bertkit.errors import UsageError
from bertkit.model.heads import BertHead
from bertkit.model.precision import choose_precision, find_device, use_precision
from bertkit.reports.tables import MISSING, Table
from bertkit.system.memory import restore_memory
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import Task
from bertkit.training.arguments import make_arguments
from bertkit.training.recipe import Recipe
from bertkit.training.run import make_model, make_trainer

OURS_COMPILED = "bertkit, compiled"  # a side, as BERTKIT
SAME_BATCHES, SORTED, COMPILED, EXAMPLE = "same", "sorted", "compiled", "example"  # stock's sides
FLATTENED = "flattened"  # stock's side without padding, and the name of its attention
TRAINING_SEED = 0
# For random weights: the tokens of the trained vocabulary, and the rows of the embeddings.
SMALL_VOCABULARY, EMBEDDING_ROWS = 8192, 30_522
FLATTENABLE = ("BertForMaskedLM", "BertForTokenClassification")  # heads that read no [CLS]
WARM_UP = 8  # updates of each side before timing
MEMORY = 4  # updates whose memory is measured
COMPARED = 50  # updates whose losses are compared
# Allowed mean difference of an update's losses: rounding, which is large in bf16.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
RELEASED_SIZES = {  # Google's release: layers, hidden size
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
MINILM_SIZES = {  # MiniLM-L6-H384, whose heads have 32 units
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
STOCK_OPTIMIZER = {"optim": "adamw_torch_fused"}
QUIET = {  # for every side: only train
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "num_train_epochs": 1.0,
    "seed": TRAINING_SEED,
}


@dataclass(frozen=True)
class Side:
    """A side of the benchmark.

    Attributes:
        weights: The initial weights of the model that `build` trains, restored before every epoch.
        build: Makes a Trainer from a folder, the number of updates, and whether losses are logged.
    """

    precision: str
    model: PreTrainedModel
    weights: Mapping[str, Tensor]
    build: Callable[[Path, int, bool], Trainer]


# --- The sides --------------------------------------------------------------------------------------------------------


def make_side(
    task: Task,
    recipe: Recipe,
    model: PreTrainedModel,
    rows: Any,
    collate: Callable[[Any], dict[str, Tensor]] | None = None,
) -> Side:
    """Return a side that trains as a run does, except for the keys of QUIET, its length and its logging.

    Args:
        collate: The collator for plain transformers' Trainer; None uses this package's Trainer.
    """

    def build(folder: Path, updates: int, logs: bool) -> Trainer:
        train = QUIET | {"max_steps": updates, "logging_steps": 1, "logging_strategy": "steps" if logs else "no"}
        whole = recipe.override(train=train)
        args = make_arguments(whole, folder)
        if collate is None:
            return make_trainer(task, model, args, {"train": rows}, whole, ignore, ignore)
        trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
        trainer.remove_callback(PrinterCallback)
        return trainer

    return Side(choose_precision(recipe.precision), model, deepcopy(model.state_dict()), build)


def load_both(task: Task, recipe: Recipe, settings: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load this package's model and plain transformers' class of the same name, with the same weights."""
    torch.manual_seed(TRAINING_SEED)
    ours = make_model(task, recipe, settings)
    stock = getattr(transformers, type(ours).__name__)
    with TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        return ours, stock.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def make_sides(
    task: Task,
    recipe: Recipe,
    settings: Mapping[str, Any],
    rows: Any,
    compiled: bool,
    report: Report,
    kernels: Sequence[str] = (),
) -> dict[str, Side]:
    """Return this package's sides and stock's; at its best, stock sorts rows unless their order is fixed.

    Args:
        kernels: Attention implementations of stock beside sdpa, each a side of that name if it works here.
    """
    ours, stock = load_both(task, recipe, settings)
    plain = recipe.override(train=STOCK_OPTIMIZER)
    full = partial(collate_full, task, recipe.data["max_length"])
    sides = {
        BERTKIT: make_side(task, recipe, ours, rows),
        SAME_BATCHES: make_side(task, plain, stock, rows, task.collate),
        EXAMPLE: make_side(task, plain.override(precision="fp32"), stock, rows, full),
    }
    is_ordered = recipe.train.get("train_sampling_strategy") == "sequential"
    best, collate = plain, full  # one length, so that the model is compiled once
    if not is_ordered:
        best, collate = plain.override(train={"train_sampling_strategy": "group_by_length"}), task.collate
        sides[SORTED] = make_side(task, best, stock, rows, collate)
    if compiled and compile_model(other := deepcopy(stock), report, dynamic=not is_ordered):
        sides[COMPILED] = make_side(task, best, other, rows, collate)
        if compile_model(other := deepcopy(ours), report, dynamic=True):
            sides[OURS_COMPILED] = make_side(task, recipe, other, rows)
    for kernel in kernels:
        if (other := copy_with_kernel(stock, kernel, sides[BERTKIT].precision, report)) is not None:
            sides[kernel] = make_side(task, best, other, rows, task.collate)
    if type(stock).__name__ in FLATTENABLE and find_device().type == "cuda":
        other = deepcopy(stock)
        other.set_attn_implementation(FLATTENED)
        sides[FLATTENED] = make_side(task, plain, other, rows, lambda items: flatten(task.collate(items)))
    return sides


def flatten(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a batch (B, T) as one sequence (1, N) with its bounds: `DataCollatorWithFlattening`, and token types."""
    real = batch["attention_mask"].bool()  # (B, T)
    lengths = real.sum(1)
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int()  # (B + 1,)
    flat = {name: batch[name][real][None] for name in ("input_ids", "token_type_ids", "labels")}  # (1, N)
    flat["position_ids"] = torch.arange(real.shape[1]).expand(real.shape)[real][None]  # (1, N)
    longest = int(lengths.max())
    return flat | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attend_flattened(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute stock's flash attention over one flattened sequence with torch's kernel, so that no package is needed."""
    states = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, A, D)
    bounds = (kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    options = {"return_debug_mask": False, "scale": kwargs["scaling"]}
    mixed = torch.ops.aten._flash_attention_forward(*states, *bounds, kwargs["dropout"], False, **options)[0]
    return mixed[None], None  # (1, N, A, D)


AttentionInterface.register(FLATTENED, attend_flattened)
AttentionMaskInterface.register(FLATTENED, flash_attention_mask)


def copy_with_kernel(stock: PreTrainedModel, kernel: str, precision: str, report: Report) -> PreTrainedModel | None:
    """Return a copy of a stock model with another attention implementation, or None if that does not work here."""
    other = deepcopy(stock).to(find_device())
    try:
        other.set_attn_implementation(kernel)
        ids = torch.ones(2, 8, dtype=torch.int64, device=other.device)
        with torch.no_grad(), use_precision(precision, other.device):
            other(input_ids=ids, attention_mask=ids)
    except Exception as error:  # missing packages, kernels for other devices, and downloads without a network
        report(f"transformers' {kernel} does not work here, so no side uses it: {type(error).__name__}")
        return None
    return other


def collate_full(task: Task, length: int, items: Any) -> dict[str, Tensor]:
    """Return the batch, padded to (B, length) as in example scripts; the added padding has no labels."""
    batch = task.collate(items)
    missing = length - batch["input_ids"].shape[1]
    padding = {"labels": IGNORED}
    return {
        name: F.pad(column, (0, missing), value=padding.get(name, 0)) if column.dim() == 2 else column
        for name, column in batch.items()
    }


def train_epoch(side: Side, updates: int, *, logs: bool = False) -> Timed:
    """Train one side from its initial weights, and keep the losses of the updates if they are logged."""
    side.model.load_state_dict(side.weights)
    side.model.zero_grad(set_to_none=True)
    restore_memory()  # our side asks to keep memory again when its training begins
    with TemporaryDirectory() as folder:
        set_seed(TRAINING_SEED)
        trainer = side.build(Path(folder), updates, logs)
        seconds = trainer.train().metrics["train_runtime"]  # of the loop itself, without the Trainer's preparation
    return Timed(seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


# --- Measurements -----------------------------------------------------------------------------------------------------


def bench_training(
    task: Task,
    recipe: Recipe,
    settings: Mapping[str, Any],
    rows: Any,
    *,
    repeats: int,
    compiled: bool,
    report: Report,
    kernels: Sequence[str] = (),
) -> tuple[dict[str, Any], list[Table]]:
    """Compare the losses of both sides, and then measure them on the rows, one batch per update.

    Raises:
        UsageError: The losses differ.
    """
    environment = note_machine(report)
    updates = len(rows) // recipe.batch_size
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    quiet = recipe.override(model=still, train=STOCK_OPTIMIZER)
    ours, stock = load_both(task, quiet, settings)
    both = make_side(task, quiet, ours, rows), make_side(task, quiet, stock, rows, task.collate)
    losses = compare_losses(*both, min(updates, COMPARED), report)
    lengths, targets = count_tokens(task, rows, recipe.batch_size)
    flops = count_flops(ours.config, lengths, targets)
    sides = make_sides(task, recipe, settings, rows, compiled, report, kernels)
    found, table = measure_sides(sides, updates, lengths, flops, repeats, report)
    return found | {"losses": losses, "batch_size": recipe.batch_size, "environment": environment}, [table]


def compare_losses(ours: Side, stock: Side, updates: int, report: Report) -> dict[str, Any]:
    """Compare the losses of both sides in every update, and return them with their differences.

    Both sides must be without dropout and train on the same batches.

    Raises:
        UsageError: The losses differ by more than rounding explains, so timings would not be of the same training.
    """
    one, two = (train_epoch(side, updates, logs=True).made for side in (ours, stock))
    apart = [abs(left - right) for left, right in zip(one, two, strict=True)]
    found = {BERTKIT: one, "stock": two, "mean_difference": fmean(apart), "largest_difference": max(apart)}
    report(
        f"losses of {updates} updates without dropout: {fmean(one):.4f}, stock {fmean(two):.4f}; "
        f"mean difference {found['mean_difference']:.1e}, maximum {found['largest_difference']:.1e}"
    )
    if not found["mean_difference"] <= LOSS_TOLERANCE[ours.precision]:
        raise UsageError(
            f"the losses of the two sides differ by {found['mean_difference']:.1e} on average, but rounding explains "
            f"only {LOSS_TOLERANCE[ours.precision]:.0e}: they do not train the same model; report this line"
        )
    return found


def measure_sides(
    sides: Mapping[str, Side], updates: int, lengths: Tensor, flops: float, repeats: int, report: Report
) -> tuple[dict[str, Any], Table]:
    """Measure rates, memory and ratios of sides that train on the same rows.

    The sides must include BERTKIT, SAME_BATCHES and EXAMPLE.
    """
    memory, figures, cells = {}, {}, {}
    for name, side in sides.items():
        report(f"  {name}: warming up, measuring memory")
        train_epoch(side, min(WARM_UP, updates))
        memory[name] = measure_growth(partial(train_epoch, side, min(MEMORY, updates)), find_device())
    speeds = {precision: [measure_matmul_rate(precision)] for precision in {side.precision for side in sides.values()}}
    seconds, _ = alternate({name: partial(train_epoch, side, updates) for name, side in sides.items()}, repeats, report)
    for precision, found in speeds.items():
        found.append(measure_matmul_rate(precision))
    measured, tokens = Measurement(seconds, dict.fromkeys(sides, len(lengths))), int(lengths.sum())
    for name, side in sides.items():
        middle = measured.medians[name]
        share = flops / middle / median(speeds[side.precision])
        figures[name] = {
            "precision": side.precision,
            "seconds": seconds[name],
            "samples_per_second": measured.rates[name],
            "tokens_per_second": tokens / middle,
            "flops_per_second": flops / middle,
            "share_of_products": share,
            "peak_bytes": memory[name],
        }
        added = MISSING if memory[name] is None else f"{memory[name] / 2**20:,.0f}"
        cells[name] = side.precision, f"{tokens / middle:,.0f}", f"{share:.0%}", added
    best = measured.find_fastest(name for name in sides if name not in (BERTKIT, OURS_COMPILED, EXAMPLE))
    compared = {"stock_same": SAME_BATCHES, "stock_best": best, "stock_example": EXAMPLE}
    found = {
        "sides": figures,
        "best": best,
        "ratios": {name: measured.compare(side) for name, side in compared.items()},
        "memory": memory[BERTKIT] / memory[SAME_BATCHES] if memory[BERTKIT] and memory[SAME_BATCHES] else None,
        "products": speeds,
        "tokens": tokens,
        "sequences": len(lengths),
        "updates": updates,
        "device": str(find_device()),
        "threads": torch.get_num_threads(),
    }
    heads = ["precision", "tokens per second", "of matmul rate", "MiB"]
    return found, measured.tabulate("Training, with the memory beyond the weights", "sequences", heads, cells)


def compile_model(model: PreTrainedModel, report: Report, *, dynamic: bool) -> bool:
    """Compile a model in place, and return whether that succeeded.

    torch.compile needs a C++ compiler on a CPU, and Triton on a GPU.
    """
    try:
        model.to(find_device()).compile(dynamic=dynamic)
        ids = torch.ones(2, 8, dtype=torch.int64, device=model.device)
        places = model.find_indices(attention_mask=ids) if isinstance(model, BertHead) else {}
        model(input_ids=ids, attention_mask=ids, **places)
    except Exception as error:  # compilers raise errors of many kinds
        report(f"torch.compile fails here, so no side uses it: {type(error).__name__}")
        return False
    return True


def choose_size(name: str | None) -> dict[str, int]:
    """Return BertConfig's sizes for a named model; the default is base on an accelerator, else small.

    Raises:
        UsageError: There is no model of that name.
    """
    name = name or ("base" if torch.accelerator.is_available() else "small")
    if name == "minilm":
        return MINILM_SIZES
    if name not in RELEASED_SIZES:
        raise UsageError(f"unknown size {name!r}; expected one of {', '.join(RELEASED_SIZES)}, minilm")
    layers, hidden = RELEASED_SIZES[name]
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
    }
