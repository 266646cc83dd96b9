"""Benchmark fine-tuning on sentences and pairs against plain transformers, in four ways.

Batches are composed at random, as in the paper. Stock transformers runs on the same batches; at its best, with rows
sorted by length, with and without torch.compile; and as in its example scripts, padded to 128 tokens in fp32.

Left out: other heads, whose encoder is the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bertkit.bench.training import EMBEDDING_ROWS, SMALL_VOCABULARY, TRAINING_SEED, bench_training, choose_size
from bertkit.data.pretraining.sources import Document, read_documents
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.sequences import Sequences
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from bertkit.errors import UsageError
from bertkit.model.bert import BertModel
from bertkit.model.checkpoint import make_config
from bertkit.model.precision import choose_precision
from bertkit.reports.tables import Table
from bertkit.system.progress import Report, ignore
from bertkit.tasks.glue import find_glue
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe

PAIR_TASK = "mrpc"  # the task whose lengths synthetic pairs have
PAIR_LENGTH, PAIR_SPREAD, SHORTEST_PAIR, LONGEST_PAIR = 53.0, 16.0, 8, 128  # tokens: mean, deviation, least, most
PAIR_CHARACTERS = 4_000_000  # of documentation from which pairs are made


def bench_finetune(
    model: str | None = None,
    data: str | Path | None = None,
    *,
    task: str = "",
    size: str | None = None,
    batch_size: int = 32,
    updates: int = 50,
    repeats: int = 3,
    compiled: bool = True,
    kernels: Sequence[str] = (),
    characters: int = PAIR_CHARACTERS,
    report: Report = ignore,
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the rates of this package and of stock transformers, their ratios, and the difference of their losses.

    Args:
        model: A checkpoint; None uses random weights.
        data: The folder of the official GLUE files; None makes pairs of MRPC's lengths from installed documentation.
        task: A GLUE task with training data in `data`.
        size: The size of the random weights, for `choose_size`.
        updates: Updates of each side per round; at most 50 of them are compared. With few updates, stock has little to
            sort: it sorts within a quarter of the rows, or 50 batches.
        compiled: Whether stock is also tried with torch.compile.
        kernels: Attention implementations with which stock is also tried.
        characters: The length of the documentation that is read.

    Raises:
        UsageError: The task, size, checkpoint or files do not exist, there are too few rows, or the losses differ.
    """
    if bool(data) != bool(task):
        raise UsageError("--task and --data must be given together; add the task or the folder of its official files")
    chosen = find_glue(task or PAIR_TASK)
    if not chosen.metric:
        raise UsageError(f"{chosen.name} has no training data; name another GLUE task with --task")
    sizes = choose_size(size)
    documents: list[Document] = []
    if not model or not data:
        documents = list(read_documents(["docs"], limit_characters=characters, report=report))
    with TemporaryDirectory() as folder:
        start = model or make_start(Path(folder), sizes, documents)
        recipe = Recipe.make(chosen, {"checkpoint": start, "batch_size": batch_size, "data": {"dir": str(data or "")}})
        if data:
            prepared = prepare(recipe, report)
            rows, settings = prepared.data["train"], prepared.settings
        else:
            rows, settings = make_pairs(documents, load_tokenizer(start)), {}
        rows = choose_rows(rows, updates, batch_size)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        report(
            f"{len(rows):,} rows in updates of {batch_size}, {choose_precision(recipe.precision)}; "
            f"{lengths.mean():.1f} tokens on average (standard deviation {lengths.std():.1f}, maximum {lengths.max()})"
        )
        report(f"model: {model or f'random weights, {sizes}'}")
        options = {"repeats": repeats, "compiled": compiled, "kernels": kernels, "report": report}
        found, tables = bench_training(chosen, recipe, settings, rows, **options)
    return found | {"model": model, "task": task}, tables


def make_start(folder: Path, sizes: Mapping[str, int], documents: Iterable[Document]) -> str:
    """Write an encoder with random weights, V = 30,522, and a smaller vocabulary trained on some text."""
    save_tokenizer(train_tokenizer(chain.from_iterable(documents), size=SMALL_VOCABULARY), folder)
    torch.manual_seed(TRAINING_SEED)
    BertModel(make_config({**sizes, "vocab_size": EMBEDDING_ROWS})).save_pretrained(folder)
    return str(folder)


# --- The rows ---------------------------------------------------------------------------------------------------------


def make_pairs(documents: Sequence[Document], tokenizer: Any) -> Sequences:
    """Make pairs of MRPC's lengths from text; the second part continues the first in half of them (label 1)."""
    ids = np.asarray(tokenize_documents(documents, tokenizer).ids[:], np.int32)
    random = np.random.default_rng(TRAINING_SEED)
    count = len(ids) // int(PAIR_LENGTH)
    lengths = random.normal(PAIR_LENGTH, PAIR_SPREAD, count).round().clip(SHORTEST_PAIR, LONGEST_PAIR).astype(int) - 3
    firsts, labels = lengths // 2, random.integers(0, 2, count)
    parts, seconds = [], lengths - firsts + 1
    cls, sep = (np.array([token], np.int32) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    places = random.integers(0, len(ids) - LONGEST_PAIR, (2, count))
    for length, first, label, (place, other) in zip(lengths, firsts, labels, places.T, strict=True):
        second = place + first if label else other
        parts += [cls, ids[place : place + first], sep, ids[second : second + length - first], sep]
    return Sequences(np.concatenate(parts), np.cumsum(lengths + 3), seconds, labels)


def choose_rows(rows: Sequences, updates: int, batch_size: int) -> list[dict[str, Any]]:
    """Return random rows, in memory for both sides, for `updates` batches or as many as there are.

    Raises:
        UsageError: There are fewer rows than one batch needs.
    """
    count = min(updates, len(rows) // batch_size) * batch_size
    if not count:
        raise UsageError(
            f"{len(rows):,} rows are too few for a batch of {batch_size}; give more data, or lower --batch-size"
        )
    return rows.__getitems__(np.random.default_rng(TRAINING_SEED).permutation(len(rows))[:count].tolist())
