"""The file of the prediction table, `predictions/<split>.parquet`: made by a run, and read by everything else.

Rows have a key, a hash of their texts and their right answer, so that tables are joined by content, whatever their
order and their tokenizer. A table from another program, CSV or Parquet, gets its keys when it is read. The columns are
described in recipes/data/README.md.
"""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bertkit.data.cells import encode_cells, read_lists
from bertkit.data.formats.rows import Columns, read_columns
from bertkit.data.formats.writer import name_apart, name_columns, write_rows
from bertkit.data.labels import guess_kind
from bertkit.data.scripts import close_characters
from bertkit.data.tokenizer import get_cached_tokenizer
from bertkit.errors import UsageError, as_usage_error, make_printable
from bertkit.metrics.ner import find_entities, sum_types
from bertkit.metrics.table import (
    BASELINE,
    BASELINE_PROBABILITY,
    KIND_COLUMNS,
    LABEL,
    PREDICTION,
    PROBABILITY_PREFIX,
    SPELLED,
    add_facts,
    list_names,
    make_rows,
    read_facts,
    read_numbers,
)
from bertkit.reports.tables import show_number
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.kinds import LABEL_KINDS, get_kind
from bertkit.tasks.task import Task
from bertkit.training.run_dir import PREDICTIONS

TABLE_FORMAT = 1
TABLE_SUFFIX = ".parquet"  # among the predictions of a run, after a split's name
EMPTY_ANSWER = "nothing"  # an empty answer in words
MISTAKES = ".mistakes.csv"  # the wrong rows, after a split's name
PREDICTED = name_columns([LABEL], [LABEL])[LABEL]  # the answers of `bertkit predict` to a table that has labels
OWN_COLUMNS = ("key", "row", "record", "group", "tokens", "unknown_tokens")
KEY, ROW_NUMBER, RECORD_NUMBER, GROUP, TOKEN_COUNT, UNKNOWN_COUNT = OWN_COLUMNS
RESULTS = ("probability", "label_set", "error", "truncated")  # columns of `bertkit predict` that are not inputs
PAGE = 64 << 20  # bytes of a column's distinct texts that are stored once


def join_rows(rows: pa.Table, examples: ExampleRows | None, tokenizer: Any, **facts: Any) -> pa.Table:
    """Return the prediction table of a split.

    An input column that has the name of another column is called NAME_input, or a longer name if this is taken, too.

    Args:
        rows: As `bertkit.tasks.answers.Answers` has them.
        examples: As `Task.tabulate_examples` returns them; None: the number of a sequence is its key.
        facts: The names of the task and of the split.
    """
    facts = {"table": TABLE_FORMAT, **facts, **read_facts(rows)}
    if examples is None:
        numbers = pa.array(np.arange(len(rows)), pa.uint64())
        return make_rows({KEY: numbers} | dict(zip(rows.column_names, rows.columns, strict=True)), **facts)
    columns: dict[str, Any] = {KEY: None, ROW_NUMBER: pa.array(examples.lines, pa.int64())}
    if examples.source is not None and len(examples.source.records):
        columns[RECORD_NUMBER] = pa.array(examples.source.records, pa.int64())
    columns[GROUP] = pa.array([hash_texts([str(group)]) for group in examples.groups], pa.uint64())
    columns[TOKEN_COUNT], columns[UNKNOWN_COUNT] = count_tokens(examples, tokenizer)
    taken = {*columns, *rows.column_names, *KIND_COLUMNS, BASELINE, BASELINE_PROBABILITY}
    inputs = dict(examples.texts)
    if examples.source is not None:
        others = [name for name in examples.source.table.column_names if name != LABEL or name not in examples.used]
        inputs |= {name: examples.source.table.column(name) for name in others}
    named = {}
    for name in inputs:
        named[name] = name_apart(name, taken | (inputs.keys() - {name}), "_input")
        taken.add(named[name])
    columns |= {named[name]: column for name, column in inputs.items()}
    columns |= dict(zip(rows.column_names, rows.columns, strict=True))
    columns[KEY] = pa.array(hash_rows(examples.walk_texts(), examples.labels), pa.uint64())
    others = [named[name] for name in inputs if name not in examples.used and name not in examples.texts]
    return make_rows(columns, texts=[named[name] for name in examples.texts], inputs=others, **facts)


def count_tokens(examples: ExampleRows, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the texts of each row, and the unknown ones among them, (S,) each."""
    words, counts = get_cached_tokenizer(tokenizer), []
    for texts in examples.walk_texts():
        ids, _ = words.encode(list(texts), np.int32)
        counts.append((len(ids), int((ids == tokenizer.unk_token_id).sum())))
    tokens, unknown = np.array(counts, np.int32).T
    return tokens, unknown


def hash_rows(texts: Iterable[Sequence[str]], labels: Sequence[Any] | None) -> list[int]:
    """Return the key of each row; equal rows are numbered, so that their keys differ."""
    numbers: Counter[tuple[str, ...]] = Counter()
    keys = []
    for number, row in enumerate(texts):
        content = (*row, *list_label_texts(None if labels is None else labels[number]))
        keys.append(hash_texts((*content, str(numbers[content]))))
        numbers[content] += 1
    return keys


def list_label_texts(label: Any) -> tuple[str, ...]:
    """Return a label, labels, a number or nothing as texts."""
    if label is None:
        return ()
    if isinstance(label, list | tuple):
        return tuple(sorted(label))
    return (f"{label:g}" if isinstance(label, float) else label,)


def hash_texts(texts: Sequence[str]) -> int:
    """Return a 64-bit hash of some texts."""
    content = "\0".join(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=8).digest())


# --- Files ------------------------------------------------------------------------------------------------------------


def format_table(rows: pa.Table, name: str) -> dict[str, str | bytes]:
    """Return the files of a table, by name: Parquet, and with right answers the mistakes as CSV."""
    files: dict[str, str | bytes] = {f"{name}{TABLE_SUFFIX}": pack_table(rows)}
    return files | ({f"{name}{MISTAKES}": write_mistakes(rows)} if LABEL in rows.column_names else {})


def pack_table(rows: pa.Table) -> bytes:
    """Return the content of a Parquet file, in which a text that many rows have is stored once."""
    file = io.BytesIO()
    sizes = {"dictionary_pagesize_limit": PAGE, "row_group_size": 1 << 30}
    pq.write_table(rows, file, compression="zstd", write_page_checksum=True, **sizes)
    return file.getvalue()


def read_table(path: Path, texts: Sequence[str] = ()) -> pa.Table:
    """Read a prediction table; one of another program needs the columns `label` and `prediction` beside its texts.

    Args:
        texts: The columns of texts of a table without keys; by default all columns that are not results.
    """
    if path.name.endswith(TABLE_SUFFIX) and path.is_file():
        with as_usage_error(str(path), "delete it and write it again"):
            rows = pq.read_table(path, page_checksum_verification=True)
            rows.validate(full=True)
            found = read_facts(rows).get("table") if KEY in rows.column_names else None
        if found:
            return rows
    return adopt_table(read_columns(path), texts)


def adopt_table(table: Columns, texts: Sequence[str]) -> pa.Table:
    """Return the prediction table of another program, or one that `bertkit predict` has written, with keys."""
    if PREDICTION not in table.table.column_names and PREDICTED in table.table.column_names:
        table = replace(table, table=table.table.rename_columns({PREDICTED: PREDICTION}))
    names = table.table.column_names
    for name in (LABEL, PREDICTION, *texts):
        if name not in names:
            shown = make_printable(", ".join(names))
            raise UsageError(
                f"{table.source} has no column {name!r}, only {shown}; rename one, or give a run, whose "
                f"table is predictions/<split>{TABLE_SUFFIX}"
            )
    results = {*OWN_COLUMNS, LABEL, PREDICTION, *RESULTS, *table.faults}
    texts = texts or [name for name in names if name not in results and not name.startswith(PROBABILITY_PREFIX)]
    if not texts:
        raise UsageError(f"{table.source} has no column of texts beside {LABEL} and {PREDICTION}; add it")
    cells = {name: encode_cells(table, name) for name in (LABEL, PREDICTION)}
    kinds = {guess_kind(values, bool(read_lists(table, name, values)))[0] for name, (_, values) in cells.items()}
    kind = next(kind for name, kind in LABEL_KINDS.items() if name in kinds)
    columns = dict(zip(names, table.table.columns, strict=True))
    for name, (codes, values) in cells.items():
        try:
            columns[name] = pa.array([kind.read(value) for value in values], kind.type).take(pa.array(codes))
        except (TypeError, ValueError):
            raise UsageError(f"{table.source}: {name!r} has cells that are not numbers; correct them") from None
    words = zip(*(table.find(name).to_pylist() for name in texts), strict=True)
    keys = pa.array(hash_rows(words, columns[LABEL].to_pylist()), pa.uint64())
    columns |= {KEY: keys, GROUP: keys, ROW_NUMBER: pa.array(table.lines, pa.int64())}
    classes = [name.removeprefix(PROBABILITY_PREFIX) for name in names if name.startswith(PROBABILITY_PREFIX)]
    found = make_rows(columns, texts=list(texts))
    if not kind.has_names or set(classes) < set(list_names(found)):  # probabilities of some classes are of no use
        return found
    return add_facts(found, names=classes)


def format_cells(rows: pa.Table, name: str = PREDICTION, wrong: bool = False) -> list[str]:
    """Return answers in words: entities, classes of words (without right ones if `wrong`), or the parts of a list."""
    if f"{name}{SPELLED}" in rows.column_names:
        return [", ".join(cell) for cell in rows.column(f"{name}{SPELLED}").to_pylist()]
    cells, facts = rows.column(name).to_pylist(), read_facts(rows)
    if "scheme" in facts:
        others = rows.column(LABEL if name == PREDICTION else PREDICTION).to_pylist()
        pairs = (zip(*pair, strict=True) for pair in zip(cells, others, strict=True))
        cells = [["O" if wrong and tag == other else f"B-{tag}" for tag, other in pair] for pair in pairs]
    if "strict_found" in rows.column_names:
        sentences = rows.column(facts["texts"][0]).to_pylist()
        return [", ".join(name_entities(*row)) for row in zip(sentences, cells, strict=True)]
    if cells and isinstance(cells[0], list):
        return [" | ".join(sorted(cell)) for cell in cells]
    return [show_number(cell) if isinstance(cell, float) else cell for cell in cells]


def name_entities(sentence: str, tags: Sequence[str]) -> list[str]:
    """Return the words and the type of each entity of a sentence."""
    words = sentence.split(" ")
    return [f"{close_characters(' '.join(words[start:end]))}: {kind}" for start, end, kind in find_entities(tags)]


# --- Rows that are wrong ----------------------------------------------------------------------------------------------


def mark_wrong(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (S,) which rows are wrong, and how wrong each is.

    A row is wrong if it has another class than the right one, an F1 below 1 as an answer or a sentence, or a number
    that is off by more than the root mean squared error. The worst rows have the least probability of the right answer,
    the lowest F1, or the largest error.
    """
    if "f1" in rows.column_names:  # answers to questions
        return read_numbers(rows, "f1") < 1, 1 - read_numbers(rows, "f1")
    if "strict_found" in rows.column_names:  # tags
        right, found, wanted = sum_types(rows)
        share = np.divide(2 * right, found + wanted, out=np.ones(len(rows)), where=found + wanted > 0)
        return share < 1, 1 - share
    return get_kind(rows).mark_wrong(rows)


def list_mistakes(rows: pa.Table) -> np.ndarray:
    """Return the numbers of the wrong rows, the worst first."""
    is_wrong, badness = mark_wrong(rows)
    numbers = np.flatnonzero(is_wrong)
    return numbers[np.argsort(-badness[numbers], kind="stable")]


def read_first_table(task: Task, output: Path) -> pa.Table | None:
    """Return the prediction table of a run's first evaluated split, if there is one."""
    path = output / PREDICTIONS / f"{next(iter(task.splits), '')}{TABLE_SUFFIX}"
    return read_table(path) if path.is_file() else None


def show_mistakes(rows: pa.Table, most: int) -> list[list[str]]:
    """Return the worst mistakes in words: row, texts, prediction and right answer; none without answers."""
    if LABEL not in rows.column_names or read_facts(rows).get("soft"):
        return []
    chosen = rows.take(pa.array(list_mistakes(rows)[:most], pa.int64()))
    texts = [chosen.column(name).to_pylist() for name in read_facts(rows)["texts"]]
    if "strict_found" in rows.column_names:  # tags
        texts = [list(map(close_characters, column)) for column in texts]
    columns = [*texts, *(format_cells(chosen, name, True) for name in (PREDICTION, LABEL))]
    cells = [[cell.strip() or EMPTY_ANSWER for cell in column] for column in columns]
    return list(map(list, zip(map(str, chosen.column(ROW_NUMBER).to_pylist()), *cells, strict=True)))


def write_mistakes(rows: pa.Table) -> str:
    """Return the wrong rows as CSV, the worst first: row, texts, prediction and right answer, then the other inputs."""
    facts = read_facts(rows)
    names = [ROW_NUMBER, *(name for name in (RECORD_NUMBER,) if name in rows.column_names), *facts.get("texts", [])]
    names += [PREDICTION, LABEL]
    names += [name for name in facts.get("inputs", []) if name not in names]
    wrong = rows.take(pa.array(list_mistakes(rows), pa.int64()))
    columns = {name: wrong.column(name).to_pylist() for name in names}
    for name in (PREDICTION, LABEL):
        if get_kind(rows).has_names:
            columns[name] = format_cells(wrong, name, True)
        else:
            columns[name] = [f"{cell:.7g}" for cell in columns[name]]
    cells = (dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True))
    write_rows(cells, names, file := io.StringIO())
    return file.getvalue()
