"""Fine-tuning on sentences and pairs beside plain transformers, in four ways.

Batches are composed at random, as in the paper. Stock has the same batches; its best, which sorts rows by length, with
and without torch.compile; and what its example scripts do, which is to pad to 128 tokens in fp32.

Left out: other heads, whose encoder is the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from bertkit.bench.measure import BERTKIT
from bertkit.bench.training import (
    COMPILED,
    EMBEDDING_ROWS,
    EXAMPLE,
    SAME_BATCHES,
    SMALL_VOCABULARY,
    SORTED,
    TRAINING_SEED,
    Side,
    choose_size,
    compare_sides,
    compile_model,
    load_both,
    make_ours,
    make_stock,
    measure_sides,
)
from bertkit.data.pretraining.sources import Document, read_documents
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.sequences import Sequences
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.model.bert import BertModel
from bertkit.model.checkpoint import make_config
from bertkit.model.precision import choose_precision
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task
from bertkit.training.arguments import complete
from bertkit.training.recipe import Recipe

PAIR_TASK = "mrpc"  # the task whose lengths made-up pairs have
PAIR_LENGTH, PAIR_SPREAD, SHORTEST_PAIR, LONGEST_PAIR = 53.0, 16.0, 8, 128  # its tokens: mean, deviation, least, most
PAIR_CHARACTERS = 4_000_000  # of documentation that pairs are made of
STOCK_CLASS = AutoModelForSequenceClassification


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
    report: Report = ignore,
) -> dict[str, Any]:
    """Rates of this package and of stock transformers, their ratios, and how far apart their losses are.

    Args:
        model: a checkpoint; None: random weights.
        data: the folder of the official GLUE files; None: pairs of MRPC's lengths from the documentation at hand.
        task: a GLUE task with training data, of `data`.
        size: of the random weights, a key of `RELEASED_SIZES`.
        updates: of each side in a round, and of the comparison at most 50. With few of them stock has little
            to sort: it does so within a quarter of the rows, or 50 batches.
        compiled: whether stock is tried with torch.compile as well.

    Raises:
        UsageError: no such task, size, checkpoint or files, too few rows, or losses that differ.
    """
    if bool(data) != bool(task):
        raise UsageError("--task and --data go together: the folder of the official files, and which of its tasks")
    chosen = find_task(task or PAIR_TASK)
    with TemporaryDirectory() as folder:
        sizes = choose_size(size)
        documents = (
            [] if model and data else list(read_documents(["docs"], limit_characters=PAIR_CHARACTERS, report=report))
        )
        start = model or make_start(Path(folder), sizes, documents)
        tokenizer = load_tokenizer(start)
        recipe = complete(chosen, {"checkpoint": start, "batch_size": batch_size, "data": {"dir": str(data or "")}})
        if data:
            rows, settings = read_rows(chosen, recipe, tokenizer, report)
        else:
            rows, settings = make_pairs(documents, tokenizer), {}
        updates = check_counts(len(rows), updates, batch_size)
        rows = choose_rows(rows, updates * batch_size)
        precision = choose_precision(recipe["precision"])
        report(f"{len(rows):,} rows in {updates:,} updates of {batch_size}, {precision}; {describe_rows(rows)}")
        report(f"model: {model or f'random weights, {sizes}'}")
        losses = compare_sides(chosen, recipe, settings, STOCK_CLASS, rows, PadLists(tokenizer), updates, report)
        sides = make_sides(chosen, recipe, settings, rows, tokenizer, compiled, report)
        found = measure_sides(sides, updates, repeats, report)
    return found | {"losses": losses, "model": model, "task": task, "batch_size": batch_size}


def find_task(name: str) -> Task:
    """A GLUE task that has training data.

    Raises:
        UsageError: it is another.
    """
    task = TASKS.get(name)
    if task is None or task.folder != "glue" or not task.metric:
        known = sorted(name for name, task in TASKS.items() if task.folder == "glue" and task.metric)
        raise UsageError(f"unknown task {name!r}; expected one of {', '.join(known)}")
    return task


# --- The rows ---------------------------------------------------------------------------------------------------------


def read_rows(task: Task, recipe: Recipe, tokenizer: Any, report: Report) -> tuple[Sequences, Mapping[str, Any]]:
    """The training rows of a task, and what they say of the model."""
    examples = task.load(recipe["data"], report)
    return task.encode(examples["train"], tokenizer, recipe, "train"), task.configure(recipe, tokenizer, examples)


def make_pairs(documents: Sequence[Document], tokenizer: Any) -> Sequences:
    """Pairs of MRPC's lengths from some text: half of them go on where the first part ends, which is the label."""
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


def check_counts(rows: int, updates: int, batch_size: int) -> int:
    """The updates that so many rows suffice for.

    Raises:
        UsageError: not for one.
    """
    possible = min(updates, rows // batch_size)
    if possible < 1:
        raise UsageError(f"{rows:,} rows are no batch of {batch_size}; give more data, or lower --batch-size")
    return possible


def choose_rows(rows: Sequences, count: int) -> list[dict[str, Any]]:
    """So many rows, drawn at random, in memory as both sides take them."""
    chosen = np.random.default_rng(TRAINING_SEED).permutation(len(rows))[:count].tolist()
    return rows.__getitems__(chosen)


def describe_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """How long they are."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    return f"{lengths.mean():.1f} tokens on average (deviation {lengths.std():.1f}, most {lengths.max()})"


class PadLists(DataCollatorWithPadding):
    """Stock's collator, given lists, as its own tokenizer would."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        lists = [{name: column.tolist() for name, column in row.items()} for row in rows]
        return dict(super().__call__(lists))


# --- The sides --------------------------------------------------------------------------------------------------------


def make_start(folder: Path, sizes: Mapping[str, int], documents: Iterable[Document]) -> str:
    """A directory with an encoder of random weights, V = 30,522, and a smaller vocabulary of some text."""
    tokens = train_vocabulary(chain.from_iterable(documents), size=SMALL_VOCABULARY)
    torch.manual_seed(TRAINING_SEED)
    BertModel(make_config({**sizes, "vocab_size": EMBEDDING_ROWS})).save_pretrained(folder)
    save_tokenizer(make_tokenizer(tokens, cased=False), folder)
    return str(folder)


def make_sides(
    task: Task,
    recipe: Recipe,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    compiled: bool,
    report: Report,
) -> dict[str, Side]:
    """Ours and stock's."""
    pad, full = PadLists(tokenizer), PadLists(tokenizer, padding="max_length", max_length=recipe["data"]["max_length"])
    ours, stock = load_both(task, recipe, settings, STOCK_CLASS)
    make = partial(make_stock, recipe, rows=rows)
    sides = {
        BERTKIT: make_ours(task, recipe, ours, rows),
        SAME_BATCHES: make(stock, collate=pad),
        SORTED: make(stock, collate=pad, strategy="group_by_length"),
        EXAMPLE: make(stock, collate=full, precision="fp32"),
    }
    if compiled:
        _, other = load_both(task, recipe, settings, STOCK_CLASS)
        if compile_model(other, report, dynamic=True):
            sides[COMPILED] = make(other, collate=pad, strategy="group_by_length")
    return sides
