"""Benchmark pretraining, masked LM and next sentence, against plain transformers on the same batches.

Stock is transformers' BertForPreTraining under its Trainer: padded to the longest sequence of a batch as ours is, with
and without torch.compile; and, as in its example scripts, padded to the full length and in fp32.

Left out: other objectives, and phases, because each is like this one at its own length.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.bench.training import EMBEDDING_ROWS, SMALL_VOCABULARY, bench_training, choose_size
from bertkit.model.precision import choose_precision
from bertkit.reports.tables import Table
from bertkit.system.progress import Report, ignore
from bertkit.tasks.pretraining import PRETRAINING
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe

PRETRAIN_CHARACTERS = 8_000_000  # of documentation, or of the given text


def bench_pretrain(
    data: str | Path | None = None,
    *,
    objective: str = "mlm+nsp",
    size: str | None = None,
    batch_size: int = 64,
    length: int = 128,
    updates: int = 20,
    repeats: int = 3,
    compiled: bool = True,
    kernels: Sequence[str] = (),
    characters: int = PRETRAIN_CHARACTERS,
    report: Report = ignore,
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the rates of this package and of stock transformers from random weights, their ratios and losses.

    Args:
        data: Text as for the corpus of `bertkit pretrain`; None uses installed documentation.
        objective: As in the recipe; with "mlm", stock also runs without padding on CUDA.
        size: The size of the model, for `choose_size`.
        length: The maximum number of tokens in a pair.
        updates: Updates of each side per round; at most 50 of them are compared.
        compiled: Whether stock is also tried with torch.compile.
        kernels: Attention implementations with which stock is also tried.
        characters: The length of the text that is read.

    Raises:
        UsageError: The size or the text does not exist, or the losses differ.
    """
    sizes = choose_size(size)
    given = {
        "batch_size": batch_size,
        "model": {**sizes, "max_position_embeddings": max(length, 128), "vocab_size": EMBEDDING_ROWS},
        "data": {
            "corpus": [str(data or "docs")],
            "vocab_size": SMALL_VOCABULARY,
            "objective": objective,
            "limit_characters": characters,
            "max_length": length,
        },
        "train": {"max_steps": updates, "warmup_steps": 0.1},
    }
    recipe = Recipe.make(PRETRAINING, given)
    prepared = prepare(recipe, report)
    precision = choose_precision(recipe.precision)
    report(f"{updates:,} updates of {batch_size} pairs of at most {length} tokens, {precision}, {sizes}")
    rows, settings = prepared.data["train"], prepared.settings
    options = {"repeats": repeats, "compiled": compiled, "kernels": kernels, "report": report}
    found, tables = bench_training(PRETRAINING, recipe, settings, rows, **options)
    if found["memory"] is not None:
        report(f"memory beyond the weights: {found['memory']:.2f} times stock's on the same batches")
    return found | {"objective": objective, "length": length, "size": sizes}, tables
