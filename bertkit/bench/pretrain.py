"""Pretraining, masked LM and next sentence, beside plain transformers on the same batches.

Stock is its own BertForPreTraining under its Trainer, padded to the longest of a batch as ours is, with and without
torch.compile; and as its example scripts do, padded to the full length and in fp32.

Left out: other objectives; phases, for each is like this one at its own length.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertForPreTraining as StockBertForPreTraining

from bertkit.bench.measure import BERTKIT
from bertkit.bench.training import (
    COMPILED,
    EMBEDDING_ROWS,
    EXAMPLE,
    SAME_BATCHES,
    SMALL_VOCABULARY,
    Side,
    choose_size,
    compare_sides,
    compile_model,
    load_both,
    make_ours,
    make_stock,
    measure_sides,
)
from bertkit.data.sequences import IGNORED
from bertkit.model.precision import choose_precision
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task
from bertkit.training.arguments import complete
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe

PRETRAIN_CHARACTERS = 8_000_000  # of documentation, or of the text that is given


def bench_pretrain(
    data: str | Path | None = None,
    *,
    size: str | None = None,
    batch_size: int = 64,
    length: int = 128,
    updates: int = 20,
    repeats: int = 3,
    compiled: bool = True,
    report: Report = ignore,
) -> dict[str, Any]:
    """Rates of this package and of stock transformers from random weights, their ratios, and their losses.

    Args:
        data: text as a corpus of pretrain; None: the documentation at hand.
        size: a key of `RELEASED_SIZES`.
        length: tokens of a pair, at most.
        updates: of each side in a round, and of the comparison at most 50.
        compiled: whether stock is tried with torch.compile as well.

    Raises:
        UsageError: no such size or text, or losses that differ.
    """
    task, sizes = TASKS["pretrain"], choose_size(size)
    given = {
        "batch_size": batch_size,
        "model": {**sizes, "max_position_embeddings": max(length, 128), "vocab_size": EMBEDDING_ROWS},
        "data": {
            "corpus": [str(data or "docs")],
            "vocab_size": SMALL_VOCABULARY,
            "limit_characters": PRETRAIN_CHARACTERS,
            "max_length": length,
        },
        "train": {"max_steps": updates, "warmup_steps": 0.1},
    }
    recipe = complete(task, given)
    prepared = prepare(task, recipe, report)
    rows, settings = prepared.data["train"], prepared.settings
    precision = choose_precision(recipe["precision"])
    report(f"{updates:,} updates of {batch_size} pairs of at most {length} tokens, {precision}, {sizes}")
    losses = compare_sides(task, recipe, settings, StockBertForPreTraining, rows, task.collate, updates, report)
    found = measure_sides(make_sides(task, recipe, settings, rows, compiled, report), updates, repeats, report)
    memory = compare_memory(found["sides"])
    if memory is not None:
        report(f"memory above the weights: {memory:.2f} of stock's on the same batches")
    return found | {"memory": memory, "losses": losses, "length": length, "batch_size": batch_size, "size": sizes}


def compare_memory(sides: Mapping[str, Mapping[str, Any]]) -> float | None:
    """What ours takes as a share of what stock does on the same batches; None where memory cannot be seen."""
    ours, stock = (sides[name]["peak_bytes"] for name in (BERTKIT, SAME_BATCHES))
    return ours / stock if ours and stock else None


# --- The sides --------------------------------------------------------------------------------------------------------


def fill(batch: dict[str, Tensor], *, length: int) -> dict[str, Tensor]:
    """The batch, padded on to (B, length) as example scripts do; nothing is labelled there."""
    missing = length - batch["input_ids"].shape[1]
    padding = {"labels": IGNORED}
    return {
        name: F.pad(column, (0, missing), value=padding.get(name, 0)) if column.dim() == 2 else column
        for name, column in batch.items()
    }


def make_sides(
    task: Task, recipe: Recipe, settings: Mapping[str, Any], rows: Dataset, compiled: bool, report: Report
) -> dict[str, Side]:
    """Ours and stock's."""
    ours, stock = load_both(task, recipe, settings, StockBertForPreTraining)
    make = partial(make_stock, recipe, rows=rows)
    full = partial(fill, length=recipe["data"]["max_length"])
    sides = {
        BERTKIT: make_ours(task, recipe, ours, rows),
        SAME_BATCHES: make(stock, collate=task.collate),
        EXAMPLE: make(stock, collate=full, precision="fp32"),
    }
    if compiled:
        _, other = load_both(task, recipe, settings, StockBertForPreTraining)
        if compile_model(other, report, dynamic=False):
            sides[COMPILED] = make(other, collate=full)
    return sides
