"""Pretraining, masked LM and next sentence, beside plain transformers on the same batches.

Stock is its own BertForPreTraining under its Trainer, padded to the longest of a batch as ours is, with and without
torch.compile; and as its example scripts do, padded to the full length and in fp32.

Left out: other objectives; phases, for each is like this one at its own length.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertForPreTraining as StockBertForPreTraining
from transformers import PreTrainedModel

from bertkit.bench.measure import OURS
from bertkit.bench.training import (
    COMPARED,
    COMPILED,
    EXAMPLE,
    SAME,
    SEED,
    Side,
    choose_size,
    compare_losses,
    compile_model,
    make_ours,
    make_start,
    make_stock,
    measure_sides,
)
from bertkit.data.corpus import ignore, read_documents
from bertkit.device import choose_precision
from bertkit.recipe import Recipe
from bertkit.run import complete, make_model, prepare
from bertkit.tasks import TASKS
from bertkit.tasks.task import Report

CHARACTERS = 8_000_000  # of documentation, or of the text that is given
IGNORED = -100


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
        size: a key of `SIZES`.
        length: tokens of a pair, at most.
        updates: of each side in a round, and of the comparison at most `COMPARED`.
        compiled: whether stock is tried with torch.compile as well.

    Raises:
        UsageError: no such size or text, or losses that differ.
    """
    task, sizes, source = TASKS["pretrain"], choose_size(size), str(data or "docs")
    with TemporaryDirectory() as folder:
        start = make_start(Path(folder), sizes, read_documents([source], limit_characters=CHARACTERS, report=report))
        given = {
            "batch_size": batch_size,
            "model": {**sizes, "max_position_embeddings": max(length, 128), "vocab_size": 30_522},
            "data": {"corpus": [source], "vocab": start, "limit_characters": CHARACTERS, "max_length": length},
            "train": {"max_steps": updates, "warmup_steps": 0.1},
        }
        recipe = complete(task, given)
        prepared = prepare(task, recipe, report)
        rows = prepared.data["train"]
        precision = choose_precision(recipe["precision"])
        report(f"{updates:,} updates of {batch_size} pairs of at most {length} tokens, {precision}, {sizes}")
        losses = compare_sides(recipe, prepared.settings, rows, precision, min(updates, COMPARED), report)
        sides = make_sides(recipe, prepared.settings, rows, precision, compiled, report)
        found = measure_sides(sides, updates, repeats, report)
    for name, ratio in found["ratios"].items():
        report(f"{name}: {ratio:.2f} times" + (f" ({found['best']})" if name == "stock_best" else ""))
    memory = compare_memory(found["sides"])
    if memory is not None:
        report(f"memory above the weights: {memory:.2f} of stock's on the same batches")
    return found | {"memory": memory, "losses": losses, "length": length, "batch_size": batch_size, "size": sizes}


def compare_memory(sides: Mapping[str, Mapping[str, Any]]) -> float | None:
    """What ours takes as a share of what stock does on the same batches; None where memory cannot be seen."""
    ours, stock = (sides[name]["peak_bytes"] for name in (OURS, SAME))
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


def load_both(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """This package's model and stock's, with the same weights."""
    torch.manual_seed(SEED)
    ours = make_model(TASKS["pretrain"], recipe, settings)
    with TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        stock = StockBertForPreTraining.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return ours, stock


def compare_sides(
    recipe: Recipe, settings: Mapping[str, Any], rows: Dataset, precision: str, updates: int, report: Report
) -> dict[str, Any]:
    """The losses of both without dropout and with the same optimizer."""
    task = TASKS["pretrain"]
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    quiet = recipe | {"model": recipe["model"] | still, "train": recipe["train"] | {"optim": "adamw_torch_fused"}}
    ours, stock = load_both(quiet, settings)
    other = make_stock(quiet, stock, rows, task.collate, precision=precision, strategy="sequential")
    return compare_losses(make_ours(task, quiet, ours, rows), other, updates, report)


def make_sides(
    recipe: Recipe, settings: Mapping[str, Any], rows: Dataset, precision: str, compiled: bool, report: Report
) -> dict[str, Side]:
    """Ours and stock's."""
    task = TASKS["pretrain"]
    ours, stock = load_both(recipe, settings)
    make = partial(make_stock, recipe, strategy="sequential")
    full = partial(fill, length=recipe["data"]["max_length"])
    sides = {
        OURS: make_ours(task, recipe, ours, rows),
        SAME: make(stock, rows, task.collate, precision=precision),
        EXAMPLE: make(stock, rows, full, precision="fp32"),
    }
    if compiled:
        _, other = load_both(recipe, settings)
        if compile_model(other, report, dynamic=False):
            sides[COMPILED] = make(other, rows, full, precision=precision)
    return sides
