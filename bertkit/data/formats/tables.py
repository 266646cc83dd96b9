"""Official data files -> columns of texts (GLUE) or questions (SQuAD, SWAG), from a download or its copy on the Hub.

Both sources give the same values, so that whoever reads them need not know where they came from. GLUE (Wang et al.
2019; paper §4.1) becomes a `Table`: texts as they stand in the official files, labels by name. Its files look like CSV
and are not: a `"` is an ordinary character that nobody closes, and so is U+2028. SQuAD 1.1 and 2.0 (Rajpurkar et al.
2016, 2018; paper §4.2, §4.3) become `Question`s; the files of predictions that its official scripts take are read too.
SWAG (Zellers et al. 2018; paper §4.4) becomes `Situation`s; its files are CSV indeed.

Left out: what the columns mean (`bertkit.tasks`), windows and answers in tokens (`bertkit.data.spans`), and whether an
answer stands where its file says (training passes over those that do not).
"""

import csv
import difflib
import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.pretraining.sources import find_hub_trouble
from bertkit.errors import UsageError, join_lines

if TYPE_CHECKING:
    import datasets

    from bertkit.data.spans import Question

REMEDY = "give the official files with --data DIR"
AGAIN = "mend it or get the file again"
NAMES = "its first line must name the columns as the official file's does"
MOST_NAMES, LONGEST_NAME = 20, 40  # columns or keys in a message, and characters of each
LARGEST_NUMBER = sys.float_info.max
KINDS = {  # of values in JSON, and what a message calls them; a finite number may be whole
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}
HUB_SQUAD = {"rajpurkar/squad": "plain_text", "rajpurkar/squad_v2": "squad_v2"}  # its one configuration
HUB_SWAG = ("allenai/swag", "regular")  # its configuration with four endings and a label, as the official files
ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = {"context": "sent1", "start": "sent2"} | {name: name for name in ENDINGS}
ROWS_A_BATCH = 1_000  # of a data set on the Hub, in memory at once


@dataclass(frozen=True, eq=False)
class Table:
    """Columns side by side: `columns[name][row]`, all texts.

    `lines[row]` is the row's line in its file, or the row itself on the Hub, from 1; `broken` are the lines that were
    passed over because they had another number of columns.
    """

    source: str
    columns: dict[str, list[str]]
    lines: Sequence[int]
    broken: Sequence[int] = ()

    def locate(self, row: int) -> str:
        """What a message calls this row: the file and the line."""
        return f"{self.source}, line {self.lines[row]}"


# --- tab-separated files


def read_tsv(
    path: str | Path,
    columns: Mapping[str, str | int],
    *,
    width: int | None = None,
    skip_broken: bool = False,
) -> Table:
    """The columns of a file in UTF-8, under the names that `columns` gives them.

    Its values are the names in the file's first line or, for a file without such a line, the columns' numbers from 0;
    then `width` is the number of columns of every row (that of the first row if not given). Cells are cut at tabs and
    rows at \\n alone, and nothing is quoted; a byte order mark, \\r before \\n and blank lines at the end are dropped.
    `skip_broken` passes over rows with another number of columns, as the Hub's copy of QQP does; a blank line in the
    middle is such a row, except in a file of one column, where it is an empty text.

    Raises:
        UsageError: a file that is missing, not UTF-8 or without rows, a missing column, or a row of another width.
    """
    lines = enumerate(read_lines(Path(path)), 1)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty; download the official file again")
    cells = first[1].split("\t")
    if any(isinstance(column, int) for column in columns.values()):
        places = list(columns.values())
        width = width or max(len(cells), *(place + 1 for place in places))
        lines = chain([first], lines)
    else:
        places = [_find_column(str(path), cells, column, NAMES) for column in columns.values()]
        width = len(cells)
    table = Table(str(path), {name: [] for name in columns}, [], [])
    _fill(table, ((number, line.split("\t")) for number, line in lines), places, width, skip_broken)
    return table


def _fill(
    table: Table, rows: Iterable[tuple[int, list[str]]], places: list[int], width: int, skip_broken: bool = False
) -> None:
    wanted = [(column.append, place) for column, place in zip(table.columns.values(), places, strict=True)]
    for number, cells in rows:
        if len(cells) != width:
            if not skip_broken:
                raise UsageError(
                    f"{table.source}, line {number} has {len(cells)} column{'s' * (len(cells) != 1)} and {width} were "
                    "expected; mend the line or download the official file again"
                )
            table.broken.append(number)
            continue
        table.lines.append(number)
        for append, place in wanted:
            append(cells[place])
    if not table.lines:
        skipped = f" ({len(table.broken):,} have another number)" if table.broken else ""
        raise UsageError(f"{table.source} has no rows of {width} columns{skipped}; download the official file again")


def _find_column(source: str, names: Sequence[str], wanted: str, remedy: str) -> int:
    """Its place among `names`."""
    if wanted in names:
        return names.index(wanted)
    raise _name_missing(source, "column", names, wanted, remedy)


def _name_missing(source: str, kind: str, names: Sequence[str], wanted: str, remedy: str) -> UsageError:
    nearest = "".join(f" (nearest: {name!r})" for name in difflib.get_close_matches(wanted, names, n=1))
    listed = ", ".join(repr(name[:LONGEST_NAME]) for name in names[:MOST_NAMES])  # it can be a line of text
    return UsageError(f"{source} has no {kind} {wanted!r} but {listed or 'nothing'}{nearest}; {remedy}")


def read_lines(path: Path) -> Iterator[str]:
    """Its lines, without the blank ones at its end."""
    blank = 0
    with _explain_opening(path), path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = _decode(line, f"{path}, line {number}", "utf-8-sig" if number == 1 else "utf-8")
            if not text:
                blank += 1
                continue
            yield from [""] * blank
            blank = 0
            yield text


@contextmanager
def _explain_opening(path: Path) -> Iterator[None]:
    """A file that cannot be opened or read becomes a UsageError."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the folder and the name of the file") from None
    except OSError as error:
        remedy = "name a file in it" if path.is_dir() else "check its path and permissions"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None


def _decode(line: bytes, where: str, encoding: str) -> str:
    if b"\0" in line:
        raise UsageError(f"{where} has a NUL byte, as binary files and UTF-16 have; give text in UTF-8")
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} in place {error.start + 1}); "
            "convert the file, for instance with iconv -f latin1 -t utf-8"
        ) from None


# --- JSON


def read_json(path: str | Path) -> Any:
    """What a JSON file in UTF-8 holds; it may begin with a byte order mark.

    Raises:
        UsageError: a file that is missing, not UTF-8, empty, or no JSON, with line and column.
    """
    path = Path(path)
    with _explain_opening(path):
        content = path.read_bytes()
    text = _decode(content, str(path), "utf-8-sig")
    if not text.strip():
        raise UsageError(f"{path} is empty; get the file again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        trouble = f"is not JSON ({join_lines(error)})"
    except RecursionError:
        trouble = "has lists or objects nested too deep to be read"
    except ValueError:
        trouble = f"has a whole number of more than {sys.get_int_max_str_digits():,} digits"
    raise UsageError(f"{path} {trouble}; {AGAIN}")


def read_objects(path: str | Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the list that a JSON file has under `key`, each with its place in the file.

    Raises:
        UsageError: as `read_json`; the file holds something else; `remedy` ends the message if there is no such key.
    """
    content = check_kind(read_json(path), dict, str(path))
    if key not in content:
        raise _name_missing(str(path), "key", list(content), key, remedy)
    return walk_objects(content[key], f"{path}, {key}")


def walk_objects(values: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The items of what must be a list of objects, each with its place."""
    for number, value in enumerate(check_kind(values, list, place)):
        where = f"{place}[{number}]"
        yield where, check_kind(value, dict, where)


def take(holder: Mapping[str, Any], key: str, kind: type, place: str) -> Any:
    """The value under a key of the object at `place`, which must be of that kind."""
    if key not in holder:
        raise _name_missing(place, "key", list(holder), key, AGAIN)
    return check_kind(holder[key], kind, f"{place}.{key}")


def check_kind(value: Any, kind: type, place: str) -> Any:
    """The value, which must be of that kind, one of `KINDS`; a text must not hold half a surrogate pair."""
    if kind is float:
        fits = type(value) in (int, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER
    else:
        fits = type(value) is kind  # not isinstance: true is no whole number
    if not fits:
        raise UsageError(f"{place} is {_describe(value)} and {KINDS[kind]} was expected; {AGAIN}")
    if kind is str and not value.isascii():
        _check_surrogates(value, place)
    return value


def _check_surrogates(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} as character {error.start + 1}"
        raise UsageError(f"{place} has {half}, half of a surrogate pair, which no tokenizer takes; {AGAIN}") from None


def _describe(value: Any) -> str:
    """What a message calls a value of the wrong kind."""
    if isinstance(value, dict | list):
        return KINDS[type(value)]
    if isinstance(value, str):
        return repr(value[:LONGEST_NAME])
    return json.dumps(value, default=repr)[:LONGEST_NAME]


# --- SQuAD


def read_squad(path: str | Path, version: int | None = None) -> list["Question"]:
    """The questions of an official SQuAD file in its order; those about one paragraph share its text.

    version: 1 wants an answer to every question; 2 wants the file to say `is_impossible`, and truly. None takes both
        forms and goes by the answers alone, as the official scripts do. `answers` may be missing where `is_impossible`
        is true.

    An `answer_start` that is missing becomes -1; one that does not fit its text, an empty context and an empty question
    are taken as they are.

    Raises:
        UsageError: as `read_json`; the file has another form, the other version's, an id twice, or no question.
    """
    remedy = 'give a file in SQuAD\'s form, {"data": [{"paragraphs": …}]}'
    entries = _walk_paragraphs(read_objects(path, "data", remedy))
    return _gather(str(path), entries, version)


def _walk_paragraphs(articles: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, context and the object of every question."""
    for article_place, article in articles:
        paragraphs = take(article, "paragraphs", list, article_place)
        for place, paragraph in walk_objects(paragraphs, f"{article_place}.paragraphs"):
            context = take(paragraph, "context", str, place)
            for qa_place, qa in walk_objects(take(paragraph, "qas", list, place), f"{place}.qas"):
                yield qa_place, context, qa


def _gather(source: str, entries: Iterable[tuple[str, str, dict[str, Any]]], version: int | None) -> list["Question"]:
    from bertkit.data.spans import Question  # which needs torch; GLUE's files do not

    questions: list[Question] = []
    places: dict[str, str] = {}
    says_impossible = False
    for place, context, qa in entries:
        name, question = take(qa, "id", str, place), take(qa, "question", str, place)
        if not name:
            raise UsageError(f"{place}.id is empty; {AGAIN}")
        if name in places:
            first = places[name].removeprefix(f"{source}, ")
            raise UsageError(f"{place} has the same id {name[:LONGEST_NAME]!r} as {first}; {AGAIN}")
        places[name] = place
        questions.append(Question(name, question, context, *_list_answers(qa, place, version)))
        says_impossible = says_impossible or "is_impossible" in qa
    if not questions:
        raise UsageError(f"{source} has no questions; {AGAIN}")
    if version == 2 and not says_impossible:
        raise UsageError(f"{source} looks like a SQuAD 1.1 file: no question says is_impossible; use --version 1")
    return questions


def _list_answers(qa: dict[str, Any], place: str, version: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and starts of the answers to a question."""
    impossible = None
    if "is_impossible" in qa and (version or "answers" not in qa):
        impossible = take(qa, "is_impossible", bool, place)
    answers: list[tuple[str, int]] = []
    if "answers" in qa or not impossible:
        for where, answer in walk_objects(take(qa, "answers", list, place), f"{place}.answers"):
            start = take(answer, "answer_start", int, where) if "answer_start" in answer else -1
            answers.append((take(answer, "text", str, where), start))
    if version == 1 and (impossible or not answers):
        trouble = "is impossible" if impossible else "has no answer"
        raise UsageError(f"{place} {trouble}, so this looks like a SQuAD 2.0 file; use --version 2")
    if version == 2 and impossible is not None and impossible == bool(answers):
        says, has = ("true", "answers") if impossible else ("false", "no answer")
        raise UsageError(f"{place} has {has} and its is_impossible is {says}; {AGAIN}")
    return tuple(text for text, _ in answers), tuple(start for _, start in answers)


def read_answers(path: str | Path) -> dict[str, str]:
    """Question's id -> answer, from an official file of predictions in its order; "" is no answer.

    Raises:
        UsageError: as `read_json`, or the file has another form.
    """
    return {name: check_kind(text, str, place) for place, name, text in _walk_ids(path)}


def read_odds(path: str | Path) -> dict[str, float]:
    """Question's id -> how much speaks against any answer, from an official file of odds in its order.

    Raises:
        UsageError: as `read_json`, or the file has another form or a number that is not finite.
    """
    return {name: check_kind(odds, float, place) for place, name, odds in _walk_ids(path)}


def read_nbest(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Question's id -> its candidates as the file has them, each at least with `text` and `probability` >= 0.

    Raises:
        UsageError: as `read_json`, or the file has another form.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for place, name, entries in _walk_ids(path):
        found[name] = []
        for where, entry in walk_objects(entries, place):
            take(entry, "text", str, where)
            if take(entry, "probability", float, where) < 0:
                raise UsageError(f"{where}.probability is below 0; {AGAIN}")
            found[name].append(entry)
    return found


def _walk_ids(path: str | Path) -> Iterator[tuple[str, str, Any]]:
    """Place, id and value of every entry of a file of predictions."""
    for name, value in check_kind(read_json(path), dict, str(path)).items():
        place = f"{path}, {name[:LONGEST_NAME]!r}"
        yield place, check_kind(name, str, place), value


# --- SWAG


@dataclass(frozen=True)
class Situation:
    """A question of SWAG: which of four endings goes on from here.

    context: a sentence. start: the first words of the next one. endings: four ways in which it may go on.
    answer: the place of the right one, 0 to 3; None in a split without labels.
    """

    context: str
    start: str
    endings: tuple[str, ...]
    answer: int | None


def read_swag(path: str | Path, labelled: bool = True) -> list[Situation]:
    """The questions of an official SWAG file (train.csv, val.csv, test.csv) in its order; columns go by their names.

    labelled: whether there must be labels; if not, as in test.csv, no column of them is looked at.

    Raises:
        UsageError: a file that is missing, not UTF-8, not CSV or without rows, a missing column, a row of another
            width, other than four endings, one that is empty, or a label that is not 0 to 3.
    """
    rows = _walk_csv(Path(path))
    number, names = next(rows, (0, []))
    if not names:
        raise UsageError(f"{path} is empty; download the official file again")
    where, columns = f"{path}, line {number}", SWAG_COLUMNS | ({"label": "label"} if labelled else {})
    endings = [name for name in names if re.fullmatch(r"ending\d+", name)]
    if endings and len(endings) != len(ENDINGS):
        listed = ", ".join(endings[:MOST_NAMES])
        raise UsageError(f"{where} names {len(endings)} endings ({listed}) and {len(ENDINGS)} were expected; {NAMES}")
    places = [_find_column(where, names, column, NAMES) for column in columns.values()]
    table = Table(str(path), {name: [] for name in columns}, [])
    _fill(table, rows, places, len(names))
    return _make_situations(table, labelled)


def _walk_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line in which each row begins, and its cells; a blank line is no row."""
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            trouble = join_lines(error).partition(" - ")[0]  # behind it is advice for programmers
            raise UsageError(
                f"{path}, line {number} begins no row of CSV ({trouble}); check its quotes or get the file again"
            ) from None
        if cells is None:
            return
        if cells:
            yield number, cells


def _make_situations(table: Table, labelled: bool) -> list[Situation]:
    if labelled and "label" not in table.columns:
        raise UsageError(f"{table.source} has no labels; only splits with labels can be learned or scored")
    places = {str(place): place for place in range(len(ENDINGS))}
    labels = table.columns["label"] if labelled else [None] * len(table.lines)
    texts = zip(*(table.columns[name] for name in SWAG_COLUMNS), strict=True)
    situations = []
    for row, ((context, start, *endings), label) in enumerate(zip(texts, labels, strict=True)):
        if not all(map(str.strip, endings)):
            empty = next(name for name, ending in zip(ENDINGS, endings, strict=True) if not ending.strip())
            raise UsageError(f"{table.locate(row)}: {empty} is empty and four endings were expected; mend the line")
        if label is not None and label not in places:
            expected = ", ".join(places)
            raise UsageError(
                f"{table.locate(row)}: label {label[:LONGEST_NAME]!r} must be one of {expected}; mend the line"
            )
        situations.append(Situation(context, start, tuple(endings), None if label is None else places[label]))
    return situations


# --- the Hugging Face Hub


def read_hub(
    name: str,
    config: str,
    splits: Mapping[str, str],
    columns: Mapping[str, str],
    *,
    optional: Container[str] = (),
) -> dict[str, Table]:
    """Split -> its columns, for a data set on the Hub; `splits` and `columns` map the wanted names to the Hub's.

    A class label becomes its name and a number its shortest text in the column's own precision: a float32 that holds
    the official file's 3.800 is "3.8". A missing value is "". A column of labels or numbers in which all are missing,
    or -1 as the Hub writes it, is left out of that split: so are the labels of GLUE's test sets. So is an `optional`
    split that the data set does not have.

    Without the Hub, the copy in the cache of `datasets` does.

    Raises:
        UsageError: the Hub cannot serve the data set and no copy is at hand, or a split or a column is missing.
    """
    found = load_splits(name, config, splits, optional)
    return {split: _convert(rows, source, columns) for split, source, rows in found}


def read_swag_copy(splits: Mapping[str, str], unlabelled: Container[str] = ()) -> dict[str, list[Situation]]:
    """Split -> its questions, as `read_swag` gives them, for SWAG's copy on the Hub.

    `splits` maps the wanted names to the Hub's; those in `unlabelled` have no labels, and may be missing.

    Without the Hub, the copy in the cache of `datasets` does.

    Raises:
        UsageError: as `read_hub`; a split without labels, an ending that is empty, or a label that is not 0 to 3.
    """
    tables = read_hub(*HUB_SWAG, splits, SWAG_COLUMNS | {"label": "label"}, optional=unlabelled)
    return {split: _make_situations(table, split not in unlabelled) for split, table in tables.items()}


def read_squad_copy(name: str, splits: Mapping[str, str]) -> dict[str, list["Question"]]:
    """Split -> its questions, as `read_squad` gives them, for SQuAD's copies on the Hub; equal contexts are one text.

    name: `rajpurkar/squad` (1.1) or `rajpurkar/squad_v2` (2.0). `splits` maps the wanted names to the Hub's.

    Without the Hub, the copy in the cache of `datasets` does.

    Raises:
        UsageError: the Hub cannot serve the data set and no copy is at hand, a split or a column is missing, or an id
            is there twice.
    """
    found = load_splits(name, HUB_SQUAD[name], splits)
    return {split: _gather(source, _walk_rows(source, rows), None) for split, source, rows in found}


def _walk_rows(source: str, rows: "datasets.Dataset") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, context and question of every row, in the official file's form."""
    columns = ("id", "question", "context", "answers")
    for column in columns:
        _find_column(source, rows.column_names, column, REMEDY)
    contexts: dict[str, str] = {}
    batches = rows.select_columns(list(columns)).iter(ROWS_A_BATCH)
    values = chain.from_iterable(zip(*(batch[column] for column in columns), strict=True) for batch in batches)
    for number, (name, question, context, answers) in enumerate(values):
        place = f"{source}[{number}]"
        check_kind(answers, dict, f"{place}.answers")
        texts, starts = (take(answers, key, list, f"{place}.answers") for key in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise UsageError(f"{place}.answers has {len(texts)} texts and {len(starts)} starts; {REMEDY}")
        pairs = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        context = check_kind(context, str, f"{place}.context")
        yield place, contexts.setdefault(context, context), {"id": name, "question": question, "answers": pairs}


def load_splits(
    name: str, config: str, splits: Mapping[str, str], optional: Container[str] = ()
) -> Iterator[tuple[str, str, "datasets.Dataset"]]:
    """Every wanted split, what messages call it, and its rows."""
    source = f"{name}:{config}"
    found = _load(name, config)
    for split, hub_split in splits.items():
        if hub_split in found:
            yield split, f"{source}, {hub_split}", found[hub_split]
        elif split not in optional:
            raise UsageError(f"the data set {source} has no split {hub_split!r} but {', '.join(found)}; {REMEDY}")


def _load(name: str, config: str) -> "datasets.DatasetDict":
    trouble = find_hub_trouble(name, "dataset")
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache

        if not trouble:
            return datasets.load_dataset(name, config)
        # What load_dataset itself turns to in the end; without a network it would try for long before.
        copy = {"config_name": config, "version": "auto", "hash": "auto"}  # auto: the latest in the cache
        return Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **copy).as_dataset()
    except Exception as error:  # also the transport's: huggingface_hub has changed its HTTP library more than once
        trouble = trouble or f"the data set {name}:{config} cannot be loaded ({join_lines(error)})"
    raise UsageError(f"{trouble}; {REMEDY}")


def _convert(rows: "datasets.Dataset", source: str, columns: Mapping[str, str]) -> Table:
    if not len(rows):
        raise UsageError(f"{source} has no rows; {REMEDY}")
    texts: dict[str, list[str]] = {}
    for name, hub_name in columns.items():
        _find_column(source, rows.column_names, hub_name, REMEDY)
        feature, values = rows.features[hub_name], rows[hub_name][:]
        if "string" in feature.dtype or any(value not in (None, -1) for value in values):
            texts[name] = _write(feature, values)
    return Table(source, texts, range(1, len(rows) + 1))


def _write(feature: Any, values: list[Any]) -> list[str]:
    """The values as an official file has them."""
    if hasattr(feature, "names"):  # of a class label
        return ["" if value in (None, -1) else feature.names[value] for value in values]
    kind = str if "string" in feature.dtype else np.dtype(feature.dtype).type
    return ["" if value is None else str(kind(value)) for value in values]
