"""Pretraining, masked LM and next sentence, beside plain transformers on the same batches.

Stock is its own BertForPreTraining under its Trainer, padded to the longest of a batch as ours is, with and without
torch.compile; and as its example scripts do, padded to the full length and in fp32.

Left out: other objectives; phases, for each is like this one at its own length.
"""

from pathlib import Path
from typing import Any

from bertkit.bench.training import EMBEDDING_ROWS, SMALL_VOCABULARY, bench_training, choose_size
from bertkit.model.precision import choose_precision
from bertkit.reports.tables import Table
from bertkit.system.progress import Report, ignore
from bertkit.tasks.pretraining import PRETRAINING
from bertkit.training.arguments import complete
from bertkit.training.prepare import prepare

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
) -> tuple[dict[str, Any], list[Table]]:
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
    sizes = choose_size(size)
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
    recipe = complete(PRETRAINING, given)
    prepared = prepare(PRETRAINING, recipe, report)
    precision = choose_precision(recipe["precision"])
    report(f"{updates:,} updates of {batch_size} pairs of at most {length} tokens, {precision}, {sizes}")
    rows, settings = prepared.data["train"], prepared.settings
    found, tables = bench_training(
        PRETRAINING, recipe, settings, rows, repeats=repeats, compiled=compiled, report=report
    )
    if found["memory"] is not None:
        report(f"memory above the weights: {found['memory']:.2f} of stock's on the same batches")
    return found | {"length": length, "size": sizes}, tables
