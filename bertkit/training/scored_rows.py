"""The rows of a scored split with a run's answers, in a small file: comparing runs needs neither data nor model.

A row has a key, a hash of its texts and its right answer, so that runs match their rows by content, whatever their
order and their tokenizer. Left out: the comparison (`bertkit.analysis.compare`).
"""

import io
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np

from bertkit.data.tokenizer import find_words
from bertkit.errors import UsageError, join_lines
from bertkit.metrics.rows import RowScore
from bertkit.tasks.task import RowAnswer, Task, shorten_text

ROWS = ".rows.npz"  # among the predictions of a run, after a split's name
MOST_TEXTS = 2  # of a row that are kept, shortened
TOKEN_COUNTS, UNKNOWN_COUNTS, LABEL, ANSWER = "tokens", "unknown tokens", "label", "has an answer"
BUILT_IN = (TOKEN_COUNTS, UNKNOWN_COUNTS, LABEL, ANSWER)  # columns of rows
FEW_VALUES = 12  # of a column that is kept, at most
Content = tuple[str, float, list[RowAnswer], dict[str, list[str | int]]]  # in the file
DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, SyntaxError, TokenError)
DAMAGE += (RuntimeError, BadZipFile, zlib.error, msgspec.ValidationError)
NARROW = (np.uint8, np.uint16, np.int32, np.float32)  # types that may hold all values of an array exactly


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows of a split, scored by one model.

    Attributes:
        score: The task's metric as a function of the weights of the rows.
        keys: (S,) uint64, different for every row.
        rows: The rows in words, with shortened texts.
        columns: Name -> a value for each row, by which a report slices the rows; see `describe_columns`.
    """

    score: RowScore
    keys: np.ndarray
    rows: Sequence[RowAnswer]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def take(self, places: np.ndarray) -> "ScoredRows":
        """Return some of the rows."""
        rows = [self.rows[place] for place in places.tolist()]
        columns = {name: [values[place] for place in places.tolist()] for name, values in self.columns.items()}
        return ScoredRows(self.score.take(places), self.keys[places], rows, columns)


def measure_split(
    task: Task,
    score: RowScore,
    summaries: np.ndarray,
    data: Any,
    examples: Any,
    tokenizer: Any,
    decided: Mapping[str, Any] | None,
) -> ScoredRows:
    """Return the rows of a split with labels; `score` is the task's metric on them."""
    rows = list(task.describe_rows(summaries, data, examples, decided))
    columns = describe_columns(task, rows, data, tokenizer)
    return replace(gather_rows(score, rows), columns=columns)


def describe_columns(task: Task, rows: Sequence[RowAnswer], data: Any, tokenizer: Any) -> dict[str, list[Any]]:
    """Return columns of the rows by which a report may slice them.

    They are the number of tokens of all texts, the number of unknown tokens among them, the class, for answers whether
    there is a right one, and the columns of a person's own table; each of the last three only if it has few values.
    """
    words = find_words(tokenizer)
    tokens, unknown = [], []
    for row in rows:
        ids, _ = words.encode(list(row.texts), np.int32)
        tokens.append(len(ids))
        unknown.append(int((ids == tokenizer.unk_token_id).sum()))
    own = task.list_row_columns(data)
    columns = {f"{name} (column)" if name in BUILT_IN else name: values for name, values in own.items()}
    if task.find_classes(data) is not None:
        columns[LABEL] = [row.right for row in rows]
    elif not all(row.right for row in rows):
        columns[ANSWER] = ["yes" if row.right else "no" for row in rows]
    few = {name: values for name, values in columns.items() if len(set(values)) <= FEW_VALUES}
    return few | {TOKEN_COUNTS: tokens, UNKNOWN_COUNTS: unknown}


def gather_rows(score: RowScore, rows: Sequence[RowAnswer]) -> ScoredRows:
    """Return rows with their keys; equal rows are numbered, so that their keys differ."""
    numbers: Counter[tuple[str, ...]] = Counter()
    keys = []
    for row in rows:
        content = (*row.texts, row.right)
        keys.append(hash_row((*content, str(numbers[content]))))
        numbers[content] += 1
    short = [row._replace(texts=tuple(map(shorten_text, row.texts[:MOST_TEXTS]))) for row in rows]
    return ScoredRows(score, np.array(keys, np.uint64), short)


def hash_row(parts: Sequence[str]) -> int:
    """Return a 64-bit hash of some texts."""
    content = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=8).digest())


# --- The file ---------------------------------------------------------------------------------------------------------


def pack_rows(found: ScoredRows) -> bytes:
    """Return the content of a file; equal rows give equal bytes."""
    score, file = found.score, io.BytesIO()
    parts = [score.rate, score.points, found.rows, found.columns]
    words = json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")
    arrays = {"keys": found.keys, "values": narrow(score.rows)}
    np.savez_compressed(file, **arrays, words=np.frombuffer(words, np.uint8))
    return file.getvalue()


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the same values in the first type that holds them exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        kept = (values.astype(kind) for kind in NARROW)
        return next((found for found in kept if (found.astype(values.dtype) == values).all()), values)


def read_rows(path: Path) -> ScoredRows:
    """Read the file that `pack_rows` makes.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            keys, values, words = (file[name] for name in ("keys", "values", "words"))
        content = json.loads(words.tobytes().decode("utf-8", "surrogatepass"))
        rate, points, rows, columns = msgspec.convert(content, Content)
        score = RowScore(values.astype(np.float64), rate, points)
        if {len(keys), len(set(keys.tolist()))} != {len(part) for part in (values, rows, *columns.values())}:
            raise ValueError("its parts do not fit together")
        if keys.dtype != np.uint64 or not np.isfinite(np.append(values, score.score(np.ones((1, len(keys)))))).all():
            raise ValueError("its values are not those of a score")
    except DAMAGE as error:
        raise UsageError(f"{path} is damaged ({join_lines(error)}); delete it and train the run again") from None
    return ScoredRows(score, keys, rows, columns)
