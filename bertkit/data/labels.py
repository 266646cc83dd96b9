"""A person's own table -> its texts and labels: their columns, the kind of problem, the label names and their numbers.

The kind and the names are decided once, over all of train. Soft labels are shares of the classes, in a column for each
class, in lists or in objects; rows that are scored have the likeliest class, or the right one from another column.
Left out: splits.
"""

import ast
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from unicodedata import combining, normalize

import msgspec
import numpy as np
import pyarrow.compute as pc

from bertkit.data.cells import (
    MARKS,
    convert_cells,
    encode_cells,
    normalise,
    parse_number,
    read_flags,
    read_list,
    read_lists,
    read_number,
)
from bertkit.data.formats.rows import CHUNK_ROWS, Columns
from bertkit.data.splits import DROP, LEAVE_OUT, MOST_SHOWN, UNLABELLED
from bertkit.errors import UsageError, list_some, pluralize
from bertkit.system.progress import Report

PAIR_NAMES = (  # names of two texts that belong together: ours, which are transformers', and GLUE's
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
TEXT_NAMES = ("text", "sentence", "review", "content", "comment", "message", "tweet", "body", "description", "title")
LABEL_NAMES = ("label", "labels", "class", "category", "target", "sentiment", "score", "rating", "stars", "y")
AS_TRAINED = "as in training"  # the reason of the labels of a trained model
MOST_BLANK = 0.05  # share of the rows that may be without a text
SINGLE, SEVERAL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
BALANCED = "balanced"
INEXACT = 1e-3  # by which the sum of a soft label may differ from 1
MOST_NUMBERS = 20  # different whole numbers that are taken for classes
TEXTS = "texts"  # the reason for one label if nothing else is found
SEPARATOR = "|"  # between several labels in a cell
OTHER_SEPARATORS = ";,#"  # used only where several labels are asked for
UNKNOWN_LABEL = -1
ALIKE = "differ only in case, accents or spaces"
DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+")
OBJECT = re.compile(
    r"""\s*\[?\s*\{\s*['"][^'"]*['"]\s*:"""
)  # an object or a list of objects, as JSON or Python writes them


@dataclass(frozen=True)
class LabelSpace:
    """The labels that a model learns."""

    kind: str  # the `problem_type` of the configuration
    names: tuple[str, ...]  # the labels in the order of the logits
    columns: tuple[str, ...]  # the label columns
    reason: str  # why it is this kind and order, for a report
    remarks: tuple[str, ...] = ()  # lines about labels that look odd
    separator: str = SEPARATOR  # the text between several labels in a cell; "" if each cell is a list
    positions: tuple[str, ...] = ()  # the labels at the positions of lists of 0 and 1; empty if lists hold the labels
    is_soft: bool = False  # whether the columns hold shares of the labels

    def describe(self) -> str:
        """Return the kind of problem and the labels in words."""
        names = list_some(self.names, MOST_SHOWN)
        found = "numbers" if self.kind == REGRESSION else f"{len(self.names)} labels: {names}"
        if self.is_soft:
            found = f"soft {found}"
        return f"{self.kind.replace('_', ' ')} ({self.reason}), {found}; data.problem_type changes it"

    def read(self, table: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray, Counter[str]]:
        """Return the labels of a table.

        Returns:
            (S,) int64 classes, of soft labels the likeliest ones, UNKNOWN_LABEL for an unknown or an empty one; (S, L)
            float32, 0 or 1 for each of several labels; or (S,) float32 numbers, NaN for a missing one.
            (S,) whether a row lacks its only label or number, and whether it has a label that the space lacks.
            The number of rows with each label that the space lacks.
        """
        none = np.zeros(len(table), bool)
        if self.kind == REGRESSION:
            codes, numbers = convert_cells(table, self.columns[0], read_number)
            labels = np.array(numbers, np.float32)[codes]
            return labels, np.isnan(labels), none, Counter()
        if self.is_soft:
            shares = self.read_shares(table)
            is_blank = np.isnan(shares[:, 0])
            return np.where(is_blank, UNKNOWN_LABEL, shares.argmax(1)), is_blank, none, Counter()
        if len(self.columns) > 1:
            return np.stack([read_flags(table, name) for name in self.columns], axis=1), none, none, Counter()
        codes, cells = self.split_cells(table)
        known = {name: number for number, name in enumerate(self.names)}
        flags = np.zeros((len(cells), len(self.names)), np.float32)
        for row, cell in zip(flags, cells, strict=True):
            row[[known[label] for label in cell if label in known]] = 1
        other = Counter()
        for cell, count in zip(cells, np.bincount(codes, minlength=len(cells)).tolist(), strict=True):
            other.update({label: count for label in cell if label not in known})
        has_other = np.array([not known.keys() >= {*cell} for cell in cells], bool)[codes]
        if self.kind == SEVERAL:
            return flags[codes], none, has_other, other
        is_blank = np.array([not cell for cell in cells], bool)[codes]
        return np.where(flags.any(1), flags.argmax(1), UNKNOWN_LABEL)[codes], is_blank, has_other, other

    def read_shares(self, table: Columns) -> np.ndarray:
        """Return (S, L) float32 shares of the labels, which sum to 1; NaN in a row without any."""
        if len(self.columns) > 1:
            parts = [convert_cells(table, name, read_number) for name in self.columns]
            shares = np.stack([np.array(numbers)[codes] for codes, numbers in parts], axis=1)
        else:
            table = replace(table, faults=table.faults - {*self.columns})
            codes, rows = convert_cells(table, self.columns[0], partial(read_share_cell, names=self.names))
            shares = np.array(rows, np.float64)[codes]
        is_missing = np.isnan(shares)
        is_partial = is_missing.any(1) & ~is_missing.all(1)
        is_no_share = (shares < 0).any(1) | (np.abs(shares.sum(1) - 1) > INEXACT)
        wrong = is_partial | is_no_share
        if wrong.any():
            row = int(wrong.argmax())
            raise UsageError(
                f"{table.locate(row)}: soft labels {', '.join(f'{share:g}' for share in shares[row][:MOST_SHOWN])} are "
                f"not {len(self.names)} shares of at least 0 that sum to 1; correct them"
            )
        return (shares / shares.sum(1, keepdims=True)).astype(np.float32)

    def format_labels(self, labels: np.ndarray) -> list[Hashable]:
        """Return the name, the names or the number of each row's label, as `read` returns these."""
        if self.kind == REGRESSION:
            return labels.astype(np.float64).tolist()
        if labels.ndim == 1:
            return [self.names[label] for label in labels.tolist()]
        return [tuple(self.names[number] for number in np.flatnonzero(row)) for row in labels]

    def count(self, labels: np.ndarray) -> np.ndarray:
        """Return (L,) how many rows have each label."""
        return np.bincount(labels, minlength=len(self.names)) if labels.ndim == 1 else labels.sum(0)

    def measure(self, labels: np.ndarray) -> list[float]:
        """Return the mean and the standard deviation of numbers; 1 if all are equal."""
        numbers = labels.astype(np.float64)
        return [float(numbers.mean()), float(numbers.std()) or 1.0]

    def weigh(self, labels: np.ndarray, given: str | Mapping[str, float]) -> list[float]:
        """Return the weight of each label: balanced as in scikit-learn, or as given; empty without weights.

        The balanced weight of one of several labels is its number of negative rows per positive row.
        """
        if not given:
            return []
        if self.kind == REGRESSION:
            raise UsageError("class_weights is for labels, not for numbers; leave it out")
        if given == BALANCED:
            counts = self.count(labels).clip(min=1)  # a fold may have no row of a label
            if labels.ndim == 1:
                return (len(labels) / (len(counts) * counts)).tolist()
            return ((len(labels) - counts).clip(min=1) / counts).tolist()  # a label of all rows is still learned
        return match_weights(self.names, given)

    def split_cells(self, table: Columns) -> tuple[np.ndarray, list[list[str]]]:
        """Return (S,) the index of each row's cell among the different cells of the label column, and their labels."""
        is_list = not self.separator or self.columns[0] in table.lists
        known = {*self.names} if self.kind == SINGLE else set()  # a cell that is a name as it stands

        def split(value: str) -> list[str]:
            return [value] if value in known else self.split(value, is_list)

        return convert_cells(table, self.columns[0], split)

    def split(self, value: str, is_list: bool) -> list[str]:
        """Return the labels of a cell."""
        said, parts = f"the label {value[:40]!r}", [value]
        if is_list and (parts := read_list(value) if value.strip() else []) is None:
            raise UsageError(f"{said} is not a list, but those of train are; correct it")
        if self.positions and value.strip():
            flags = [MARKS.get(normalise(part)) for part in parts]
            if len(flags) != len(self.positions) or None in flags:
                raise UsageError(f"{said} is not a list of {len(self.positions)} times 0 or 1 as in train; correct it")
            parts = [name for name, flag in zip(self.positions, flags, strict=True) if flag]
        elif self.kind == SEVERAL and not is_list:
            parts = value.split(self.separator)
        labels = [label for part in parts if (label := normalise(part))]
        if self.kind == SINGLE and len(labels) > 1:
            several = "" if self.reason == AS_TRAINED else f", or set data.problem_type={SEVERAL}"
            raise UsageError(f"{said} has {len(labels)} labels; give each row one{several}")
        return labels


def check_class_weights(given: Any) -> None:
    """Check the form of class weights."""
    if isinstance(given, str) and given != BALANCED:
        raise UsageError(f'class_weights is {given!r}; give "balanced" or a table label -> weight')


def match_weights(names: Collection[str], given: Mapping[str, float]) -> list[float]:
    """Return the weight of each name from a table that must have exactly these names."""
    if wrong := sorted(set(given) ^ set(names)):
        listed = ", ".join(map(repr, wrong[:MOST_SHOWN]))
        raise UsageError(
            f"class_weights and the labels differ in {listed}; give a weight for each of {', '.join(names)}"
        )
    return [float(given[name]) for name in names]


def make_label_space(
    train: Columns, columns: Sequence[str], problem_type: str, labels: Sequence[str] = (), label_sep: str = ""
) -> LabelSpace:
    """Return the label space of the training rows; `problem_type` "auto" decides the kind from their values.

    Args:
        labels: The names of several columns, or of the positions of lists; by default those of the columns, or numbers.
        label_sep: The text between several labels in a cell; by default |, or another if several labels are asked for.
    """
    shares = name_shares(train, columns, labels) if problem_type in ("auto", SINGLE) else ()
    if not shares and len(columns) > 1 and problem_type == SINGLE:  # 0 and 1 are shares, too
        shares = tuple(labels or columns)
    if shares:
        return LabelSpace(SINGLE, shares, tuple(columns), "shares of the labels", is_soft=True)
    if len(columns) > 1:
        if problem_type not in ("auto", SEVERAL):
            raise UsageError(
                f"{problem_type} has one label column, but {len(columns)} are given; give one with --label"
            )
        for name in columns:
            read_flags(train, name)  # checks the values
        return LabelSpace(SEVERAL, tuple(labels or columns), tuple(columns), "a column of 0 and 1 for each label")
    (column,) = columns
    check_objects(train, column)
    _, values = encode_cells(train, column)
    classes = () if column in train.lists else tuple(train.classes.get(column, ()))
    lists = [] if classes else read_lists(train, column, values)  # a name may look like a list
    positions = name_positions(lists, labels)
    if not positions:
        check_shares(train, column, lists)
    if problem_type != "auto":
        kind, reason = problem_type, "as set"
    elif classes:  # names of classes may be numbers
        kind, reason = SINGLE, "class labels"
    elif label_sep and not lists:
        kind, reason = SEVERAL, f"labels separated by {label_sep}"
    else:
        kind, reason = guess_kind(values, bool(lists))
    if kind == REGRESSION:
        return LabelSpace(REGRESSION, ("score",), (column,), reason)
    separator = "" if lists else label_sep or detect_label_separator(values) or SEPARATOR
    space = LabelSpace(kind, classes, (column,), reason, (), separator, positions)
    _, cells = space.split_cells(train)
    names = {label for cell in cells for label in cell}
    trouble = ""
    if (len(names) < 2 and kind == SINGLE) or not names:
        trouble = f"{pluralize(len(names), 'label')}; give a column with two or more"
    elif kind == SINGLE and len(names) > max(MOST_NUMBERS, len(train) // 2):
        odd = sorted(name for name in names if parse_number(name) is None)
        hint = f" ({odd[0][:40]!r} is not a number)" if odd and len(odd) < len(names) / 2 else ""
        trouble = (
            f"{len(names):,} different texts in {len(train):,} rows{hint}, too many for labels; choose another column "
            "with --label"
        )
    if trouble:
        raise UsageError(f"{train.source}: the column {column!r} has {trouble}")
    ordered = positions or tuple(sort_names(names))
    space = replace(space, names=ordered)
    return replace(space, remarks=tuple(list_remarks(space, values)))


def fit_space(space: LabelSpace, table: Columns, label_sep: str) -> LabelSpace:
    """Return a model's several labels as another table spells them: by the form in which most cells have its names."""
    _, values = encode_cells(table, space.columns[0])
    if lists := read_lists(table, space.columns[0], values):
        is_marked = len(name_positions(lists, ())) == len(space.names)
        return replace(space, separator="", positions=space.names if is_marked else ())
    return replace(space, separator=label_sep or fit_separator(values, {*space.names}))


def fit_separator(cells: Sequence[str], names: Set[str]) -> str:
    """Return the separator that divides cells into the most names; one that is part of a name divides nothing."""
    unused = [mark for mark in (SEPARATOR, *OTHER_SEPARATORS) if not any(mark in name for name in names)]
    known = {mark: sum(normalise(part) in names for cell in cells for part in cell.split(mark)) for mark in unused}
    return max(known, key=known.get, default=SEPARATOR)


def list_remarks(space: LabelSpace, values: Sequence[str]) -> Iterator[str]:
    """Yield a line for each oddity of the labels and of the different cells of train."""
    names = space.names
    known, spelled = {*names}, {}
    for value in sorted({value.strip() for value in values}):
        spelled.setdefault(value if value in known else normalise(value), []).append(value)
    for group in [found for found in spelled.values() if len(found) > 1][:1]:
        yield f"cells such as {' and '.join(map(repr, group[:2]))} are one label"
    for group in list_alike(names):
        yield f"warning: the labels {group} {ALIKE}, and are learned as different labels; correct them in the table"
    if space.reason != TEXTS:
        return
    if any(map(DECIMAL_COMMA.fullmatch, names)) and not any(
        parse_number(x.replace(",", ".", 1)) is None for x in names
    ):
        yield "the labels are numbers with a decimal comma, learned as classes; write a point for a regression"
    elif separator := detect_label_separator(names):
        some = next(name for name in names if separator in name)
        yield f"labels such as {some[:40]!r} are one label each; data.label_sep={separator!r} divides them"


def list_alike(names: Iterable[str]) -> list[str]:
    """Return in words each group of names that differ only in case, accents or spaces."""
    alike: dict[str, list[str]] = {}
    for name in names:
        plain = (letter for letter in normalize("NFKD", name.casefold()) if not combining(letter))
        alike.setdefault("".join("".join(plain).split()), []).append(name)
    groups = [group for group in alike.values() if len(group) > 1]
    looks = [ascii if len({normalize("NFC", name) for name in group}) < len(group) else repr for group in groups]
    return [", ".join(map(show, group)) for show, group in zip(looks, groups, strict=True)]


def check_objects(table: Columns, column: str) -> None:
    """Check that no cell is a JSON object or a list of them, which would become the name of a class."""
    cells = table.table.column(column).unique().to_pylist() if column in table.table.column_names else []
    if odd := next(filter(OBJECT.match, cells), None):
        raise UsageError(
            f"{table.source}: {column!r} has objects such as {odd[:40]!r}; a label is a name or a list of names: "
            "export one choice per text (Label Studio: CSV), or write the names"
        )


def check_shares(table: Columns, column: str, lists: Sequence[Sequence[str]]) -> None:
    """Check that lists are not fractions or percentages of classes, whose numbers would become classes."""
    shares = to_matrix(lists)
    if len(shares) and (are_fractions(shares) or np.allclose(shares.sum(1), 100, atol=1)):
        raise UsageError(
            f"{table.source}: {column!r} has numbers such as {str(shares[0].tolist())[:40]}, but soft labels are "
            "shares of the classes that sum to 1; correct them, or leave out data.problem_type"
        )


def to_matrix(lists: Sequence[Sequence[str]]) -> np.ndarray:
    """Return lists of numbers of at least 0 as rows (S, L); (0, 0) of others, or if their lengths differ."""
    rows = np.zeros((0, 0))
    with suppress(ValueError):  # the cells may be texts, or lists of different lengths
        rows = np.array([found for found in lists if found], float)
    return rows if rows.ndim == 2 and rows.shape[1] > 1 and rows.min() >= 0 else np.zeros((0, 0))


def are_fractions(numbers: np.ndarray) -> bool:
    """Return whether all numbers are at most 1, and some are fractions."""
    return bool(len(numbers) and np.nanmax(numbers) <= 1 and (np.nan_to_num(numbers) % 1).any())


def name_shares(train: Columns, columns: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of soft labels; empty if the columns hold something else.

    They are soft if they hold fractions of at most 1: in a column for each label, in lists, or in objects; columns that
    a * names also if each row has a single 1.
    """
    if len(columns) > 1:
        cells = [encode_cells(train, name) for name in columns]
        numbers = [[parse_number(cell) for cell in values] for _, values in cells]
        parsed = [number for number in chain.from_iterable(numbers) if number is not None]
        is_soft = are_fractions(np.array(parsed))
        if not is_soft and labels and {*labels} != {*columns}:
            shares = [np.array(values, float)[codes] for (codes, _), values in zip(cells, numbers, strict=True)]
            is_soft = {*parsed} == {0.0, 1.0} and bool((np.sum(shares, axis=0) == 1).all())
        return tuple(labels or columns) if is_soft else ()
    (column,) = columns
    if column not in train.table.column_names:
        return ()
    cells = [cell for cell in train.table.column(column).unique().to_pylist() if cell.strip()]
    objects = [read_object(cell) for cell in cells]
    if objects and None not in objects and are_fractions(np.array([x for y in objects for x in y.values()])):
        return tuple(objects[0])
    lists = [read_list(cell) for cell in cells]
    if not lists or None in lists or not are_fractions(shares := to_matrix(lists)):
        return ()
    if np.abs(shares.sum(1) - 1).min() > INEXACT:  # probabilities of several labels
        return ()
    return tuple(labels or map(str, range(shares.shape[1])))


def read_object(cell: str) -> dict[str, float] | None:
    """Return the numbers of an object as JSON or Python writes it, or None for another text."""
    found: dict[str, str | float] = {}
    with suppress(msgspec.MsgspecError, RecursionError):
        found = msgspec.json.decode(cell, type=dict[str, str | float])
    if not found:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, msgspec.MsgspecError):
            found = msgspec.convert(ast.literal_eval(cell), dict[str, str | float])
    numbers = {name: parse_number(str(value)) for name, value in found.items()}
    return None if not numbers or None in numbers.values() else numbers


def read_share_cell(cell: str, names: Sequence[str]) -> list[float]:
    """Return the share of each label in a list or an object; NaN for a blank cell."""
    if not cell.strip():
        return [np.nan] * len(names)
    if (found := read_object(cell)) is not None and found.keys() == {*names}:
        return [found[name] for name in names]
    if (found := read_list(cell)) is not None and len(found) == len(names):
        return list(map(read_number, found))
    raise UsageError(f"the soft label {cell[:40]!r} has other labels than those of train; correct it")


def expand_columns(columns: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the columns that are named, each with the name of its label, which is what a * stands for."""
    found: dict[str, str] = {}
    for name in given:
        start, star, end = name.partition("*")
        matching = [x for x in columns if x.startswith(start) and x.endswith(end) and len(x) > len(start) + len(end)]
        if not star or name in columns or not matching:
            found[name] = name
        else:
            found |= {column: column[len(start) : len(column) - len(end)] for column in matching}
    return found


def name_positions(lists: Sequence[Sequence[str]], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of the positions of lists of 0 and 1 of one length: those that are given, or numbers."""
    length = len(lists[0]) if lists else 0
    if length < 2 or not all(len(found) == length and MARKS.keys() >= {*map(normalise, found)} for found in lists):
        return ()
    if labels and len({*labels}) != length:
        raise UsageError(f"data.labels has {len({*labels})} different names for lists of {length}; give one for each")
    return tuple(labels or map(str, range(length)))


def detect_label_separator(cells: Iterable[str]) -> str:
    """Return the first separator that divides a text in two: | or one of OTHER_SEPARATORS; empty if none does."""
    cells = list(cells)
    for separator in (SEPARATOR, *OTHER_SEPARATORS):
        if any(separator in cell and sum(map(bool, map(str.strip, cell.split(separator)))) > 1 for cell in cells):
            return separator
    return ""


def guess_kind(values: Sequence[str], is_list: bool) -> tuple[str, str]:
    """Return the kind of problem that the different values of a column mean, and the reason."""
    if is_list:
        return SEVERAL, "a column of lists"
    filled = [value.strip() for value in values if value.strip()]
    if all(value.lower() in ("true", "false") for value in filled):
        return SINGLE, "true and false"
    numbers = [parse_number(value) for value in filled]
    if all(number is not None for number in numbers):
        whole = {number for number in numbers if number.is_integer()}
        if len(whole) == len(set(numbers)) <= MOST_NUMBERS:
            return SINGLE, f"{len(whole)} different whole numbers"
        return REGRESSION, f"{len(set(numbers)):,} different numbers"
    if any(SEPARATOR in value for value in filled):
        return SEVERAL, f"labels separated by {SEPARATOR}"
    return SINGLE, TEXTS


def sort_names(names: set[str]) -> list[str]:
    """Return labels in order: numbers by value, others by their characters."""
    numbers = {name: parse_number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return sorted(names, key=lambda name: (numbers[name], name))
    return sorted(names)


# --- The rows of a person's own table ---------------------------------------------------------------------------------


def guess_texts(names: Iterable[str]) -> list[str]:
    """Return the names, in upper or lower case, of a text or of two that belong together; empty if none is usual."""
    spelled = {str(name).lower(): name for name in names}
    pair = next((pair for pair in PAIR_NAMES if spelled.keys() >= set(pair)), ())
    return [spelled[name] for name in pair or [name for name in TEXT_NAMES if name in spelled][:1]]


def choose_columns(
    table: Columns, text: Sequence[str], label: Sequence[str], report: Report
) -> tuple[list[str], dict[str, str]]:
    """Return the columns of the texts, and of the labels with their names; those not given are guessed."""
    names = table.table.column_names
    guessed = " and ".join(option for option, given in (("--text", text), ("--label", label)) if not given)
    spelled = {name.lower(): name for name in names}
    label = list(label) or [spelled[name] for name in LABEL_NAMES if name in spelled and spelled[name] not in text][:1]
    label = expand_columns(names, label)
    text = list(text) or guess_texts(name for name in names if name not in label)
    for option, found in {"--text": text, "--label": label}.items():
        if not found:
            listed = ", ".join(map(repr, names[:MOST_SHOWN]))
            raise UsageError(f"{table.source} has the columns {listed}; name one with {option}")
    if both := set(text) & set(label):
        raise UsageError(f"the column {both.pop()!r} is both text and label; name different columns")
    by = f", guessed from the names; set {guessed} for others" if guessed else ""
    report(f"{table.source}: text from {' and '.join(map(repr, text))}, label from {', '.join(map(repr, label))}{by}")
    return text, label


def drop_blank(table: Columns, text: Sequence[str], report: Report) -> Columns:
    """Return the rows of which a text holds more than white space; the others are reported."""
    lacks = {name: pc.equal(pc.utf8_trim_whitespace(table.find(name)), "").to_numpy() for name in text}
    is_blank = np.all(list(lacks.values()), axis=0)
    for name, found in lacks.items():
        if (found := found & ~is_blank).any():
            report(f"{describe_blank(table, found, 'text', [name])}; the other text is read")
    if not is_blank.any():
        return table
    said = describe_blank(table, is_blank, "text", text)
    if is_blank.mean() > MOST_BLANK:
        raise UsageError(f"{said}, {is_blank.mean():.1%} of the rows; give each a text or delete it")
    report(f"warning: {said}; left out")
    return table.take(np.flatnonzero(~is_blank))


def describe_blank(table: Columns, is_blank: np.ndarray, what: str, columns: Sequence[str]) -> str:
    """Return how many rows have no text or no label, and the first of them."""
    rows = np.flatnonzero(is_blank)
    found = f"{len(rows):,} row{'s have' if len(rows) > 1 else ' has'} no {what} in {' or '.join(map(repr, columns))}"
    return f"{table.source}: {found} (first: {table.name_row(int(rows[0]))})"


def iterate_keys(table: Columns, text: Sequence[str], group: str) -> Iterator[str]:
    """Yield what keeps each row together with others: its group, or without one its texts, stripped of white space."""
    columns = [table.find(name) for name in ([group] if group else []) + list(text)]
    for start in range(0, len(table), CHUNK_ROWS):
        parts = (column.slice(start, CHUNK_ROWS).to_pylist() for column in columns)
        for cells in zip(*parts, strict=True):
            stripped = [cell.strip() for cell in cells]
            yield stripped[0] if group and stripped[0] else "\0".join(stripped[bool(group) :])


def has_labels(table: Columns, columns: Collection[str]) -> bool:
    """Return whether a table has the label columns with a cell that is filled, or some of several of them."""
    known = set(columns) & set(table.table.column_names)
    if len(known) < len(columns):
        return bool(known)
    return len(columns) > 1 or any(table.table.column(*columns).unique().to_pylist())


def read_weights(table: Columns, column: str) -> np.ndarray:
    """Return (S,) the weights in a column, numbers of at least 0."""

    def read(cell: str) -> float:
        if (number := parse_number(cell)) is None or number < 0:
            raise UsageError(f"the weight in {column!r} is {cell[:40]!r}; give a number of at least 0")
        return number

    codes, numbers = convert_cells(table, column, read)
    weights = np.array(numbers, np.float64)[codes]
    if not weights.any():
        raise UsageError(f"{table.source}: all weights in {column!r} are 0; give some above 0")
    return weights


def check_missing(split: str, table: Columns, space: LabelSpace, options: Mapping[str, Any], report: Report) -> None:
    """Report or refuse the rows of a file that have no label; a test split may be without labels."""
    if split == "test" and not has_labels(table, space.columns):
        return
    _, is_blank, _, _ = space.read(table)
    if is_blank.any():
        said = describe_blank(table, is_blank, "label", space.columns)
        if options.get(UNLABELLED, DROP) == DROP:
            report(f"{said}; left out")
        elif options.get("is_check"):  # the doctor lists such rows
            report(f"{said}; training stops at them without {LEAVE_OUT}")
        else:
            raise UsageError(f"{said}; give each a label, or leave them out with {LEAVE_OUT}")


def read_labelled(
    split: str, table: Columns, space: LabelSpace, report: Report
) -> tuple[Columns, np.ndarray | None, list[int]]:
    """Return a split's rows with a label of the space, their labels, and the lines of the rows without any label.

    Labels are None for a test split without them; rows that are left out are reported.
    """
    if split == "test" and not has_labels(table, space.columns):
        report(f"{table.source}, test: no labels in {', '.join(map(repr, space.columns))}; predicted, not scored")
        return table, None, []
    labels, is_blank, has_other, other = space.read(table)
    whose = "the model" if space.reason == AS_TRAINED else "train"
    if space.kind == SEVERAL and space.reason != AS_TRAINED:  # the other labels of these rows are learned
        has_other = np.zeros_like(has_other)
    if other:
        listed = ", ".join(f"{label!r} ({number:,})" for label, number in other.most_common(MOST_SHOWN))
        ending = "; these rows are left out" if has_other.any() else ""
        report(f"{table.source}, {split}: {whose} lacks the labels {listed}{ending}")
    kept, total = np.flatnonzero(~is_blank & ~has_other), len(table) - int(is_blank.sum())
    if not len(kept):
        raise UsageError(
            f"{table.source}, {split}: {whose} has none of the labels in its {pluralize(total, 'row')}, but "
            f"{', '.join(space.names[:MOST_SHOWN])}; correct them"
        )
    return table.take(kept), labels[kept], np.asarray(table.lines)[is_blank].tolist()
