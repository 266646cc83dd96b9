"""Find faults in data before a model is trained on them: one value for the terminal, for JSON and for the page.

Repeated rows are those of `bertkit.tasks.equal_rows`; nearly equal ones, labels, lengths, unknown words, scripts and
columns are added here. Texts are read again for each check and never kept, so a million rows need little memory.

A person's own files are written without the rows of some findings. Wrong labels, which only a model's predictions show,
are found by `bertkit.analysis.label_errors`. Left out: corrections other than leaving rows out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bertkit.analysis.expected import EXPECTED, ROWS, choose_models, measure_expected, tabulate_expected
from bertkit.analysis.label_errors import LABEL_ERRORS, describe_label_errors, predict_by_vectors
from bertkit.data.cells import encode_cells, parse_number
from bertkit.data.duplicates import TRAIN_SPLIT, encode_answers, hash_bands, list_near_repeats
from bertkit.data.formats.line import TYPED_ROW, raise_errors
from bertkit.data.formats.rows import Columns, check_output, check_suffix, walk_rows
from bertkit.data.formats.writer import write_beside, write_rows
from bertkit.data.labels import ALIKE, list_alike
from bertkit.data.long_texts import POOLED
from bertkit.data.scripts import ROWS_A_CHECK, detect_scripts, list_rarer_forms, split_characters
from bertkit.data.splits import EmptySplitError
from bertkit.data.tokenizer import get_cached_tokenizer, load_tokenizer
from bertkit.errors import UsageError, as_usage_error
from bertkit.metrics.table import LABEL, PROBABILITY_PREFIX
from bertkit.reports.tables import MISSING, Table, make_table
from bertkit.system.files import atomic_open, atomic_write
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.equal_rows import CheckedRows, check_rows, count_rows, tabulate_splits
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.task import Task, shorten_text
from bertkit.training.predictions import ROW_NUMBER, UNKNOWN_COUNT
from bertkit.training.recipe import Recipe

LABELS_SHOWN = 20  # in the table, which counts the other labels
WORDS_SHOWN = 10  # the most frequent unknown words
SAMPLES_SHOWN = 2  # samples of each finding, of different splits if several have it
ROWS_SHOWN = 5  # rows of a sample
LABEL_ERRORS_SHOWN = 20
MOST_GROUPS = 100  # classes of the label, and numbers of a column; more are ranges with equally many rows
GIVEN_AWAY = 0.95  # share of the label's variance that a column explains


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of an examination."""

    recipe: Recipe
    rows: Mapping[str, ExampleRows]  # the rows of each split, without their groups
    checked: CheckedRows
    findings: Mapping[str, Any]  # the content of the JSON file. Rows have the numbers of their lines
    train: Any  # the examples of train; None without them

    def add(self, **findings: Any) -> "Diagnosis":
        """Return the diagnosis with further findings."""
        return replace(self, findings={**self.findings, **findings})


def examine(task: Task, given: Mapping[str, Any], model: str | None, report: Report) -> Diagnosis:
    """Read the data of a recipe, and check them.

    Args:
        given: A recipe that is merged over the task's.
        model: The checkpoint whose tokenizer counts tokens; None: the recipe's, or none if it cannot be loaded.
    """
    recipe = Recipe.make(task, given, fits_model=False)
    options, left_out = {**recipe.data, "is_check": True}, []
    if not options["dir"] and not task.copies:
        raise UsageError("no data to check; name them: bertkit doctor FILE, or --task cola for a data set of the Hub")
    tokenizer = None
    try:
        tokenizer = load_tokenizer(model or recipe.checkpoint, report=report)
    except UsageError as error:
        if model:
            raise
        left_out.append(f"lengths and unknown words, which need a tokenizer (--model): {error}")
    try:
        examples = task.load(options, report)
    except EmptySplitError as error:
        left_out.append(f"the split of train, which training needs: {error}")
        examples = task.load({**options, "dev_share": None}, ignore)
    if not (rows := tabulate_splits(task, examples)):
        raise UsageError(f"{task.name} has no rows to check; name another task with --task")
    checked = check_rows(rows)
    near = compare_all(rows, checked)
    splits = checked.format()
    scripts = {split: detect_scripts(one.walk_texts()) for split, one in rows.items()}
    kinds, names = scripts.get(TRAIN_SPLIT) or next(iter(scripts.values()))
    counts = np.bincount(kinds[kinds >= 0], minlength=len(names))
    usual = names[counts.argmax()] if counts.any() else ""  # empty if all rows are without letters
    forms = list_rarer_forms(rows.get(TRAIN_SPLIT, next(iter(rows.values()))).walk_texts)
    for split, found in splits.items():
        found |= near[split] | list_labels(rows, split)
        found |= list_scripts(*scripts[split], usual, rows[split].lines)
        if tokenizer is not None:
            found |= measure(rows[split], tokenizer, options["max_length"])
        if left_out_rows := getattr(examples[split], "left_out", ()):
            found |= count_rows(unlabelled=left_out_rows)
        texts = zip(rows[split].lines, rows[split].walk_texts(), strict=True)
        found |= count_rows(blank=[line for line, own in texts if not all(map(str.strip, own))])
        for kind, form in forms.items():
            texts = zip(rows[split].lines, rows[split].walk_texts(), strict=True)
            found |= count_rows(**{kind: [line for line, own in texts if any(map(form.search, own))]})
    findings = {"data": options["dir"], "task": task.name, "script": usual}
    if tokenizer is not None:
        findings |= {"tokenizer": model or recipe.checkpoint, "max_length": options["max_length"]}
        findings["long"] = "read in windows" if options.get("long") in POOLED else task.long
    names = {name for found in splits.values() for name in found.get("labels", ())}
    findings |= {"splits": splits, "columns": check_columns(rows), "alike_labels": list_alike(sorted(names))}
    findings["left_out"] = left_out
    findings["samples"] = list(list_samples(rows, splits))
    return Diagnosis(recipe, rows, checked, findings, examples.get(TRAIN_SPLIT))


def suspect_labels(diagnosis: Diagnosis, report: Report) -> Diagnosis:
    """Return the diagnosis with the label errors that frozen vectors show, or with the reason why they show none."""
    try:
        found = predict_by_vectors(diagnosis.rows, diagnosis.checked.keys, diagnosis.recipe, report)
    except UsageError as error:
        return diagnosis.add(left_out=[*diagnosis.findings["left_out"], f"suspected label errors: {error}"])
    return diagnosis if found is None else diagnosis.add(**{LABEL_ERRORS: describe_label_errors(found)})


def expect_scores(diagnosis: Diagnosis, models: Sequence[str], report: Report) -> dict[str, Any] | None:
    """Return the scores of baselines on train and their forecast; None where the task has no baselines.

    Args:
        models: Checkpoints to compare; none: the recipe's, if its weights are on this disk.
    """
    rows = diagnosis.rows.get(TRAIN_SPLIT)
    if type(diagnosis.train) not in ROWS or rows.labels is None:
        return None
    recipe, groups = diagnosis.recipe, np.asarray(rows.groups)
    chosen = choose_models(models, recipe.checkpoint, report)
    keys, longest = diagnosis.checked.keys[TRAIN_SPLIT], recipe.data["max_length"]
    return measure_expected(TASKS[recipe.task], diagnosis.train, groups, keys, chosen, longest, report)


def add_expected(diagnosis: Diagnosis, models: Sequence[str], report: Report) -> Diagnosis:
    """Return the diagnosis with `expect_scores`, or with the reason why there are none."""
    try:
        found = expect_scores(diagnosis, models, report)
    except UsageError as error:
        return diagnosis.add(left_out=[*diagnosis.findings["left_out"], f"expected scores: {error}"])
    return diagnosis if found is None else diagnosis.add(**{EXPECTED: found})


# --- Checks -----------------------------------------------------------------------------------------------------------


def compare_all(rows: Mapping[str, ExampleRows], checked: CheckedRows) -> dict[str, dict[str, Any]]:
    """Return the counts and rows of each split's nearly equal rows."""

    def read(split: str, numbers: np.ndarray) -> Iterator[tuple[str, ...]]:
        distinct, indices = np.unique(numbers, return_inverse=True)
        texts = list(rows[split].walk_texts(distinct))
        return (texts[index] for index in indices.tolist())

    bands, found = {split: hash_bands(one.walk_texts()) for split, one in rows.items()}, {}
    for split, (in_train, repeats) in list_near_repeats(checked.keys, bands, read).items():
        pairs = {"near_repeats": checked.pair_lines(split, split, repeats)}
        if split != TRAIN_SPLIT:
            pairs["near_train"] = checked.pair_lines(split, TRAIN_SPLIT, in_train)
        found[split] = count_rows(**pairs)
    return found


def list_labels(rows: Mapping[str, ExampleRows], split: str) -> dict[str, Any]:
    """Return how often each label occurs in a split and which it lacks, or the spread of its numbers."""
    if (answers := rows[split].labels) is None:
        return {}
    if counts := Counter(rows[split].classes):
        all_labels = set(counts).union(*(one.classes for one in rows.values()))
        return {"labels": dict(counts.most_common()), "missing_labels": sorted(all_labels - counts.keys())}
    if not isinstance(answers[0], float):
        return {}
    values = np.array(answers)
    spread = {"mean": values.mean(), "sd": values.std(), "min": values.min(), "max": values.max()}
    return {"numbers": {name: float(value) for name, value in spread.items()}}


def list_scripts(scripts: np.ndarray, names: Sequence[str], usual: str, lines: Sequence[int]) -> dict[str, Any]:
    """Return how many rows are in each script, and the rows in another one than the usual one."""
    counts = np.bincount(scripts[scripts >= 0], minlength=len(names))
    own = names.index(usual) if usual in names else -1
    found = {names[number]: int(counts[number]) for number in np.argsort(-counts, kind="stable") if counts[number]}
    others = np.flatnonzero((scripts >= 0) & (scripts != own))
    return {"scripts": found} | count_rows(other_scripts=[lines[number] for number in others.tolist()])


def measure(rows: ExampleRows, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Return the lengths in tokens, the rows longer than `max_length`, and those with unknown words."""
    words, unknown = get_cached_tokenizer(tokenizer), tokenizer.unk_token_id
    texts, lengths, flags, missed = rows.walk_texts(), [], [], Counter[str]()
    while batch := list(islice(texts, ROWS_A_CHECK)):
        flat = [text for row in batch for text in row]
        ids, sizes = words.encode(flat, np.int32)
        lengths.append(measure_lengths(sizes.reshape(len(batch), -1), rows.choices))
        ends = np.cumsum(sizes)
        counts = np.concatenate([[0], np.cumsum(ids == unknown)])
        is_odd = counts[ends] > counts[ends - sizes]  # (texts,)
        flags.append(is_odd.reshape(len(batch), -1).any(1))
        for number in np.flatnonzero(is_odd).tolist():
            odd = [word for word in flat[number].split(" ") if unknown in words.ids.get(word, ())]
            parts = list(filter(None, chain.from_iterable(map(split_characters, odd))))
            missed.update(part for part, own in zip(parts, words.tokenize(parts), strict=True) if unknown in own)
    tokens = np.concatenate(lengths)
    marks = {"longer": tokens > max_length, "unknown": np.concatenate(flags)}
    found = {name: [rows.lines[n] for n in np.flatnonzero(marked).tolist()] for name, marked in marks.items()}
    quantiles = {name: float(np.quantile(tokens, share)) for name, share in (("median", 0.5), ("p95", 0.95))}
    return {
        "tokens": {"mean": float(tokens.mean()), **quantiles, "max": int(tokens.max())},
        "unknown_words": dict(missed.most_common(WORDS_SHOWN)),
    } | count_rows(**found)


def measure_lengths(tokens: np.ndarray, choices: int) -> np.ndarray:
    """Return (S,) the tokens of the longest sequence of each row, from the tokens (S, texts) of its texts."""
    if not choices:
        return tokens.sum(1) + 1 + tokens.shape[1]  # [CLS], and [SEP] after each text
    return tokens[:, :-choices].sum(1) + tokens[:, -choices:].max(1) + 3


# --- Columns ----------------------------------------------------------------------------------------------------------


def check_columns(rows: Mapping[str, ExampleRows]) -> dict[str, Any]:
    """Return the findings on the columns of the training rows of a person's own table; empty for other data.

    They are the empty and the constant columns, and how well each column that gives the label away explains it.
    """
    if (train := rows.get(TRAIN_SPLIT)) is None or train.source is None:
        return {}
    are_numbers = isinstance(train.labels[0], float)
    answers = np.array(train.labels) if are_numbers else encode_answers(train.labels, {})  # a set of labels is a class
    found: dict[str, Any] = {"empty": [], "constant": [], "gives_label_away": {}}
    for name in (name for name in train.source.table.column_names if name not in train.source.faults):
        codes, values = encode_cells(train.source, name)
        if not any(value.strip() for value in values):
            found["empty"].append(name)
        elif len(values) == 1:
            found["constant"].append(name)
        elif name not in train.used:
            share = explain_answers(divide_numbers(codes, values), answers)
            if share >= GIVEN_AWAY:
                found["gives_label_away"][name] = round(share, 4)
    return found


def divide_numbers(codes: np.ndarray, values: list[str]) -> np.ndarray:
    """Return (S,) the ranges of a column of many numbers; unchanged `codes`, its different values, of any other."""
    numbers = [parse_number(value) if value.strip() else 0.0 for value in values]
    if len(values) <= MOST_GROUPS or None in numbers:
        return codes
    cells = np.array(numbers)[codes]
    return np.searchsorted(np.quantile(cells, np.linspace(0, 1, MOST_GROUPS + 1)[1:-1]), cells)


def explain_answers(codes: np.ndarray, answers: np.ndarray) -> float:
    """Return the share of the answers' variance that the groups `codes` (S,) explain, at most 1.

    A row's answer is predicted by the mean of the other rows of its group, or of all rows if it is alone, so a column
    of names that never repeat explains nothing. For classes it is the mean over indicators of the MOST_GROUPS most
    frequent ones (the tau of Goodman and Kruskal).
    """
    _, groups, sizes = np.unique(codes, return_inverse=True, return_counts=True)
    others = sizes[groups] - 1.0  # (S,)
    columns: Iterable[np.ndarray] = [answers.astype(np.float64)]
    if answers.dtype.kind != "f":
        classes, counts = np.unique(answers, return_counts=True)
        frequent = classes[np.argsort(-counts, kind="stable")[:MOST_GROUPS]]
        columns = ((answers == one).astype(np.float64) for one in frequent)
    errors = total = 0.0
    for values in columns:
        sums = np.bincount(groups, values)[groups] - values
        expected = np.where(others > 0, sums / np.maximum(others, 1), values.mean())
        errors += ((values - expected) ** 2).sum()
        total += ((values - values.mean()) ** 2).sum()
    return 1 - errors / total if total > 0 else 0.0


# --- Tables -----------------------------------------------------------------------------------------------------------

FINDINGS = {  # key of a count in a split's findings -> its name
    "in_train": "rows that also occur in train",
    "near_train": "rows similar to a row of train",
    "contradicts_train": "rows with a different label in train",
    "repeats": "rows that repeat others",
    "near_repeats": "rows that nearly repeat others",
    "contradictory": "texts with different labels",
    "blank": "rows with an empty text",
    "unlabelled": "rows without a label, left out",
    "other_scripts": "rows in another script",
    "other_width": "rows with 1 or １, whichever is rarer in train",
    "other_form": "rows with 国 or 國, whichever is rarer in train",
    "unknown": "rows with unknown words",
    "longer": "rows longer than max_length",
}
IN_TRAIN = ("in_train", "near_train", "contradicts_train")  # findings whose second row is one of train


def list_tables(findings: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the findings, as written to JSON; checks that were left out are missing."""
    splits = findings["splits"]
    more = {"other_scripts": f" than {findings.get('script') or 'train'}"}
    if "long" in findings:
        more["longer"] = f" ({findings['max_length']:,}), {findings['long']}"
    lines = [["rows", *(f"{found['rows']:,}" for found in splits.values())]]
    for key, name in FINDINGS.items():
        if any(key in found for found in splits.values()):
            lines.append([f"{name}{more.get(key, '')}", *(show_count(found, key) for found in splits.values())])
    lines += list_values(splits)
    tables = [make_table("Data", ["", *splits], lines)]
    if samples := findings.get("samples"):
        rows = []
        for one in samples:
            numbers = f", {'train ' if one['finding'] in IN_TRAIN else ''}".join(f"{row:,}" for row in one["rows"])
            rows.append([FINDINGS[one["finding"]], one["split"], numbers, one["text"]])
        tables.append(make_table("Rows to look at", ["finding", "split", "rows", "text"], rows, "text"))
    if rows := list(describe_columns(findings.get("columns", {}))):
        tables.append(make_table("Columns", ["column", "finding"], rows, "text"))
    if alike := findings.get("alike_labels"):
        tables.append(make_table("Labels", ["labels", "finding"], [[group, ALIKE] for group in alike], "text"))
    if found := findings.get(LABEL_ERRORS):
        tables.append(tabulate_label_errors(found))
    if found := findings.get(EXPECTED):
        tables.append(tabulate_expected(found))
    return tables


def tabulate_label_errors(described: Mapping[str, Any], most: int = LABEL_ERRORS_SHOWN) -> Table:
    """Return the table of the first suspected rows of `describe_label_errors`."""
    entries = described["suspected"]
    lines = [
        [
            f"{entry['row']:,}",
            "  |  ".join(map(shorten_text, entry["texts"])),
            f"{entry['given']} ({entry['score']:.3f})",
            f"{entry['suggested']} ({entry['suggested_score']:.3f})",
        ]
        for entry in entries[:most]
    ]
    shown = f", the first {most}" if len(entries) > most else ""
    caption = f"Suspected label errors by {described['by']}: {len(entries):,} of {described['rows']:,} rows{shown}"
    return make_table(caption, ["row", "text", "given (its probability)", "suggested"], lines, "text")


def show_count(found: Mapping[str, Any], key: str) -> str:
    """Return a count of a split, with its share of the rows."""
    if key not in found:
        return MISSING
    share = f" ({found[key] / found['rows']:.1%})" if found[key] and key != "contradictory" else ""
    return f"{found[key]:,}{share}"


def list_values(splits: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines about lengths and labels."""
    if any("tokens" in found for found in splits.values()):
        shown = ("mean", "median", "p95", "max")
        cells = (" / ".join(f"{found['tokens'][name]:,.0f}" for name in shown) for found in splits.values())
        yield ["tokens: mean / median / 95 % / longest", *cells]
    names = Counter[str]()
    for found in splits.values():
        names.update(found.get("labels", {}))
    totals = [sum(found.get("labels", {}).values()) for found in splits.values()]
    for name, _ in names.most_common(LABELS_SHOWN):
        pairs = zip(splits.values(), totals, strict=True)
        cells = (f"{found['labels'].get(name, 0) / total:.1%}" if total else MISSING for found, total in pairs)
        yield [f"label {shorten_text(name)}", *cells]
    if len(names) > LABELS_SHOWN:
        yield [f"… and {len(names) - LABELS_SHOWN:,} other labels", *[""] * len(splits)]
    if any(found.get("missing_labels") for found in splits.values()):
        cells = (str(len(found["missing_labels"])) if "labels" in found else MISSING for found in splits.values())
        yield ["labels that the split lacks", *cells]
    if any("numbers" in found for found in splits.values()):
        for name in ("mean", "sd", "min", "max"):
            values = (found.get("numbers") for found in splits.values())
            yield [f"label, {name}", *(f"{value[name]:.3f}" if value else MISSING for value in values)]


def describe_columns(columns: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a line for each finding on a column."""
    yield from ([shorten_text(name), "is empty"] for name in columns.get("empty", ()))
    yield from ([shorten_text(name), "has the same value in every row"] for name in columns.get("constant", ()))
    for name, share in columns.get("gives_label_away", {}).items():
        yield [shorten_text(name), f"gives the label away: it explains {share:.1%} of its variance"]


def list_samples(rows: Mapping[str, ExampleRows], splits: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first rows of each finding, with the text of the first; `splits` are the findings of each split."""
    for key in FINDINGS:
        listed = {split: found.get(f"{key}_rows", ())[:SAMPLES_SHOWN] for split, found in splits.items()}
        ranked = [(rank, split, entry) for split, entries in listed.items() for rank, entry in enumerate(entries)]
        for _, split, entry in sorted(ranked, key=itemgetter(0))[:SAMPLES_SHOWN]:
            found = entry[:ROWS_SHOWN] if isinstance(entry, list) else [entry]
            text = ""
            if found[0] in (lines := rows[split].lines):
                (texts,) = rows[split].walk_texts(np.array([lines.index(found[0])]))
                text = "  |  ".join(map(shorten_text, texts))
            yield {"finding": key, "split": split, "rows": found, "text": text}


# --- A person's own rows ----------------------------------------------------------------------------------------------

DROPS = {"leaks": ["in_train"], "repeats": ["repeats"], "contradictory": [], "near": ["near_train", "near_repeats"]}
USUAL_DROPS = ("leaks", "repeats", "contradictory")
LABEL_ERROR_DROP = "label-errors"


def plan_files(diagnosis: Diagnosis, output: Path) -> dict[str, Path]:
    """Return the file to write for each file of the data; several become a folder."""
    files = {rows.source.source: output for rows in diagnosis.rows.values() if rows.source is not None}
    if not files or not all(Path(source).is_file() for source in files):
        raise UsageError(f"--write is for files of your own, not for {diagnosis.findings['data']}; leave it out")
    is_folder = len(files) > 1
    fits = not output.exists() if is_folder else output.suffix in (".csv", ".jsonl")
    if not fits:
        wanted = "a new folder for data of several files" if is_folder else "a file that ends in .csv or .jsonl"
        raise UsageError(f"--write is {output}; name {wanted}")
    for source in files:
        check_output(source, output, "--write")
        if is_folder:
            suffix = ".csv" if check_suffix(source) in (".csv", ".tsv", ".xlsx") else ".jsonl"
            files[source] = output / f"{Path(source).name.partition('.')[0]}{suffix}"
    return files


def write_clean(diagnosis: Diagnosis, drops: Sequence[str], output: Path, report: Report) -> None:
    """Write the remaining rows of the training data, in the order of their files."""
    if LABEL_ERROR_DROP in drops and LABEL_ERRORS not in diagnosis.findings:
        raise UsageError(f"there was no search for label errors; add --folds 5, or leave --drop {LABEL_ERROR_DROP} out")
    kept: dict[str, set[int]] = {}
    for split, rows in diagnosis.rows.items():
        found = diagnosis.findings["splits"][split]
        dropped = {pair[0] for drop in drops for key in DROPS.get(drop, ()) for pair in found.get(f"{key}_rows", ())}
        if "contradictory" in drops:
            dropped.update(np.asarray(rows.lines)[diagnosis.checked.mark_contradictory(split)].tolist())
        kept.setdefault(rows.source.source, set()).update(set(rows.lines) - dropped)
    if LABEL_ERROR_DROP in drops:
        suspected = diagnosis.findings["label_errors"]["suspected"]
        kept[diagnosis.rows["train"].source.source] -= {entry["row"] for entry in suspected}
    for source, path in plan_files(diagnosis, output).items():
        reading = {name: value for name, value in diagnosis.recipe.data.items() if name in ("sep", "encoding")}
        rows = raise_errors(source, walk_rows(Path(source), decoder=TYPED_ROW, **reading))
        remaining = [row for number, row in rows if number in kept[source]]
        if remaining:  # training refuses a file without rows
            with as_usage_error(f"the file {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_open(path) as stream:
                    write_rows(remaining, dict.fromkeys(chain.from_iterable(remaining)), stream, path.suffix)
        report(f"{path}: {len(remaining):,} rows, without {', '.join(drops)}{'' if remaining else '; not written'}")


def write_label_errors(described: Mapping[str, Any], rows: pa.Table, path: Path) -> None:
    """Write the suspected rows as CSV: the input's columns, then number, labels and probabilities.

    Without suspected rows there is no file.
    """
    if not (entries := described["suspected"]):
        path.unlink(missing_ok=True)
        return
    names = rows.column_names
    names = names[names.index(UNKNOWN_COUNT) + 1 : names.index(LABEL)]  # the columns of the input
    numbers = pc.index_in(pa.array([entry["row"] for entry in entries]), rows.column(ROW_NUMBER))
    results = [
        {name: entry[name] for name in ("row", "given", "suggested", "score")}
        | {f"{PROBABILITY_PREFIX}{name}": value for name, value in entry["probabilities"].items()}
        for entry in entries
    ]
    atomic_write(write_beside(Columns("", rows.select(names).take(numbers), frozenset(), ()), results), path)
