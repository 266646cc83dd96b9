"""Classification and regression of a person's own texts, from any table with a column of texts and one of labels.

The kind of problem and the labels are decided by the training rows (`bertkit.data.labels`), splits by a hash of the
texts (`bertkit.data.splits`). Head, loss and prediction are those of every classifier (`bertkit.tasks.texts`).
"""

import csv
import io
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bertkit.data.formats.columns import Columns, read_splits
from bertkit.data.labels import REGRESSION, SEVERAL, SINGLE, UNKNOWN_LABEL, LabelSpace, find_labels
from bertkit.data.long_texts import WindowedTexts
from bertkit.data.sequences import Items, Sequences
from bertkit.data.splits import MOST_SHOWN, check_split_options, describe_shares, divide_train
from bertkit.errors import UsageError
from bertkit.metrics.classification import FIXED_THRESHOLD, score_table
from bertkit.metrics.rows import RowScore
from bertkit.metrics.table import find_kind
from bertkit.reports.tables import ScoreRow, count
from bertkit.system.files import take_fingerprint
from bertkit.system.progress import Report, ignore
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.finetuning import CALIBRATION_ROWS, EVERY_EPOCH
from bertkit.tasks.option import CLASSIFY_OPTIONS
from bertkit.tasks.task import Comments, repeat_run, score_summaries, use_transformers
from bertkit.tasks.texts import (
    TextTask,
    find_problem_type,
    flatten_result,
    guess_texts,
    name_results,
    report_long,
    tabulate_logits,
)

if TYPE_CHECKING:
    from bertkit.model.config import BertConfig

LABEL_NAMES = ("label", "labels", "class", "category", "target", "sentiment", "score", "rating", "stars", "y")
BALANCED = "balanced"
AS_TRAINED = "as in training"  # the reason of the labels of a trained model
MOST_BLANK = 0.05  # share of the rows that may be without a text
ROWS_A_PART = 10_000  # converted from Arrow
UNLABELLED = "unlabelled"  # a test split without labels
SCORES = {  # kind -> the scores of the table; the first one is the score of the run
    SINGLE: {
        "macro_f1": "macro F1",
        "accuracy": "accuracy",
        "weighted_f1": "weighted F1",
        "matthews_correlation": "Matthews correlation",
        "roc_auc": "area under the ROC curve",
        "average_precision": "average precision",
        **{row.key: row.name for row in CALIBRATION_ROWS},
    },
    SEVERAL: {
        "macro_f1": "macro F1",
        "micro_f1": "micro F1",
        "exact_match": "exact match",
        "fixed_macro_f1": "macro F1 at 0.5",
        "fixed_micro_f1": "micro F1 at 0.5",
        **{row.key: row.name for row in CALIBRATION_ROWS},
    },
    REGRESSION: {
        "pearson": "Pearson correlation",
        "spearmanr": "Spearman correlation",
        "rmse": "root mean squared error",
        "r2": "R²",
    },
}


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """The examples of a split.

    Attributes:
        rows: The rows of the table.
        text: One or two columns of `rows`.
        group: The column whose equal values keep rows together; empty for the texts.
        labels: As `LabelSpace.read` returns them; None without labels.
        left_out: The lines of rows that are left out because they have no label.
    """

    rows: Columns
    text: tuple[str, ...]
    group: str
    labels: np.ndarray | None
    space: LabelSpace
    left_out: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: np.ndarray) -> "LabelledTexts":
        """Return some of the examples."""
        labels = None if self.labels is None else self.labels[numbers]
        return replace(self, rows=self.rows.take(numbers), labels=labels)


@dataclass(frozen=True, eq=False)
class TextInputs(Sequence):
    """The texts or pairs of a split as a sequence, converted from Arrow when they are read."""

    columns: tuple[pa.ChunkedArray, ...]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            parts = [column.slice(start, stop - start).to_pylist() for column in self.columns]
            return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        return self[place : place + 1][0]


@dataclass(eq=False)
class LabelledSequences(Items):
    """Encoded texts with their labels' space, and where their rows are written these and the columns of texts."""

    sequences: Sequences | WindowedTexts
    space: LabelSpace
    rows: Columns | None = None
    text: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one text, as `sequences` does."""
        return self.sequences[index]

    @property
    def labels(self) -> np.ndarray | None:
        """Return the labels, as `LabelSpace.read` does; None without labels."""
        return self.sequences.labels

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels."""
        return take_fingerprint(json.dumps(self.space.names).encode(), self.sequences.fingerprint().encode())


class ClassificationTask(TextTask):
    """Texts or pairs in a table of one's own, with one label, several labels or a number each."""

    name = command = "classify"
    title = "your texts"
    options = CLASSIFY_OPTIONS
    metric = "score"
    is_classifier = True  # regression is refused when the data are read
    splits: Mapping[str, str] = {"dev": "{}", "test": "test_{}"}
    unlabelled = (UNLABELLED,)
    row_files = ("dev.csv",)
    compared = ("macro_f1", "pearson")  # class weights may lower other scores

    def __init__(self) -> None:
        self.table = list_rows()
        self.recipe = self.make_recipe(32, num_train_epochs=3.0, learning_rate=2e-5, **EVERY_EPOCH)  # as for GLUE, 4.1

    # --- The data -----------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check the recipe, including the columns, the shares and the folds."""
        super().check(recipe)
        data = recipe.data
        if len(data["text"]) > 2:
            raise UsageError(f"text names {len(data['text'])} columns in [data]; give one, or two for pairs")
        if data["problem_type"] not in ("auto", *SCORES):
            raise UsageError(f"unknown problem_type {data['problem_type']!r}; expected auto, {', '.join(SCORES)}")
        check_split_options(data)
        weights = data["class_weights"]
        if isinstance(weights, str) and weights != BALANCED:
            raise UsageError(f'class_weights is {weights!r}; give "balanced" or a table label -> weight')

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, LabelledTexts]:
        """Read the table or tables, and split a single one by a hash of its texts."""
        if not options["dir"]:
            raise UsageError(
                "classify needs a table of texts and labels; name a file, a folder or a Hub data set with --data"
            )
        tables = read_splits(options["dir"], needs_train=config is None)
        if config is not None:
            return read_scored(tables, options, config, report)
        train = tables["train"]
        text, label = choose_columns(train, options["text"], options["label"], report)
        options = {**options, "text": text}
        for split, table in tables.items():
            # The doctor lists such rows, and a test split without labels keeps them.
            if not options.get("is_check") and (split != "test" or has_labels(table, label)):
                tables[split] = drop_blank(table, text, report)
        splits = divide_tables(tables, options)
        # The models of all folds have the same labels, whatever each of them is trained on.
        space = find_space(train if options["folds"] else splits["train"], label, options)
        names = ", ".join(space.names[:MOST_SHOWN]) + ", …" * (len(space.names) > MOST_SHOWN)
        found = "numbers" if space.kind == REGRESSION else f"{len(space.names)} labels: {names}"
        report(f"{space.kind.replace('_', ' ')} ({space.reason}), {found}; data.problem_type changes it")
        for remark in space.remarks:
            report(f"{train.source}: {remark}")
        examples = {split: read_rows(split, rows, space, options, report) for split, rows in splits.items()}
        if "test" in examples and examples["test"].labels is None:
            examples[UNLABELLED] = examples.pop("test")
        if limit := options["max_train_samples"]:
            examples["train"] = examples["train"].take(np.arange(min(limit, len(examples["train"]))))
        report(f"{train.source}: " + ", ".join(f"{split} {len(found):,}" for split, found in examples.items()))
        for line in describe_labels(examples):
            report(line)
        return examples

    def tabulate(self, examples: LabelledTexts) -> ExampleRows:
        """Return the rows of the table."""
        space, labels = examples.space, None if examples.labels is None else spell_labels(examples)
        several, numbers = space.kind == SEVERAL, space.kind == REGRESSION
        classes = [] if labels is None or numbers else [x for row in labels for x in row] if several else labels
        return ExampleRows(
            {name: examples.rows.find(name) for name in examples.text},
            list(iterate_keys(examples.rows, {"group": examples.group, "text": examples.text})),
            labels,
            classes,
            examples.rows.lines,
            examples.rows,
            {*examples.text, *space.columns},
        )

    def encode(
        self, examples: LabelledTexts, tokenizer: Any, recipe: Any, split: str, report: Report = ignore
    ) -> LabelledSequences:
        """Return the sequences of a split; all but train keep their rows, for the files of predictions."""
        pa.default_memory_pool().release_unused()  # of the whole table, which has been divided
        inputs = TextInputs(tuple(examples.rows.find(name) for name in examples.text))
        found = self.encode_split(inputs, examples.labels, tokenizer, recipe.data)
        if split != "train":
            return LabelledSequences(found, examples.space, examples.rows, examples.text)
        report_long(found, report)
        return LabelledSequences(found, examples.space, text=examples.text)

    def configure(self, recipe: Any, tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return label names, kind of problem, columns and class weights; without data what the tokenizer decides."""
        settings = super().configure(recipe, tokenizer, examples)
        if examples is None:
            return settings
        train = examples["train"]
        settings |= {"id2label": dict(enumerate(train.space.names)), "problem_type": train.space.kind}
        settings["text_columns"] = list(train.text)
        if recipe.calibrate and train.space.kind == REGRESSION:
            raise UsageError("calibrate is for labels, not for numbers; remove it")
        if weights := find_weights(recipe.data["class_weights"], train):
            settings["class_weights"] = weights
        return settings

    # --- Scores -------------------------------------------------------------------------------------------------------

    def rows(
        self, summaries: np.ndarray, data: LabelledSequences, decided: Mapping[str, Any] | None = None
    ) -> pa.Table:
        """Return labels, predictions and probabilities; several labels at tuned thresholds."""
        thresholds = (decided or {}).get("thresholds")
        return tabulate_logits(summaries, data.labels, data.space.names, data.space.kind, thresholds)

    def score(self, rows: pa.Table) -> dict[str, RowScore | float]:
        """Return the scores of the kind of problem as fractions."""
        found = score_table(rows)
        return found | {"score": found[next(iter(SCORES[find_kind(rows)]))]}

    def baseline(self, train: LabelledSequences, dev: LabelledSequences) -> dict[str, float]:
        """Return the scores of the most frequent training label, of each label's majority, or of the mean."""
        if dev.space.kind == SINGLE:
            constant = np.eye(len(dev.space.names))[np.bincount(train.labels).argmax()]
        elif dev.space.kind == SEVERAL:
            constant = np.where(train.labels.mean(0) > 0.5, 1.0, -1.0)
        else:
            constant = train.labels.mean(keepdims=True)
        thresholds = {"thresholds": [FIXED_THRESHOLD] * len(dev.space.names)}
        scores = score_summaries(self, np.tile(constant, (len(dev), 1)), dev, thresholds)
        return {f"majority_{row.key}": scores[row.key] for row in self.table if row.baselines and row.key in scores}

    # --- Files --------------------------------------------------------------------------------------------------------

    def format_predictions(
        self, summaries: np.ndarray, data: LabelledSequences, split: str, decided: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return a split's rows with the predicted label and probabilities as CSV."""
        thresholds = (decided or {}).get("thresholds")
        results = name_results(summaries, data.space.names, data.space.kind, thresholds)
        name = "test" if split == UNLABELLED else split
        return {f"{name}.csv": write_rows(data.rows, list(map(flatten_result, results)))}

    def comment(self, metrics: Mapping[str, Any], output: Path | None = None, recipe: Any = None) -> Comments:
        """Return also commands that use the fine-tuned model."""
        lines, _ = super().comment(metrics)
        if output is None:
            return Comments(lines, [])
        from bertkit.model.checkpoint import load_config

        is_saved = (output / "config.json").is_file()  # with the columns, which may have been guessed
        text = load_config(str(output)).text_columns if is_saved else recipe.data["text"]
        given = 'dict(text="…", text_pair="…")' if len(text) == 2 else '"…"'
        call = f'pipeline("text-classification", {json.dumps(str(output))})({given})'
        data = recipe.data
        is_file = Path(data["dir"]).is_file()
        table = quote(data["dir"]) if is_file else "FILE.csv"
        folds = [f"bertkit classify {repeat_run(output, 'folds')} --folds 5  # a prediction for every row"]
        commands = [
            f"bertkit predict {quote(str(output))} --input {table} --output predictions.csv",
            *(folds if is_file and not data["folds"] and not data["tune_share"] else []),
            use_transformers(f"from transformers import pipeline; print({call})"),
        ]
        return Comments(lines, commands)


def choose_columns(
    table: Columns, text: Sequence[str], label: Sequence[str], report: Report = ignore
) -> tuple[list[str], list[str]]:
    """Return the columns of the texts and of the labels; those not given are guessed by their names."""
    names = table.table.column_names
    for name in (*text, *label):
        table.find(name)
    guessed = " and ".join(option for option, given in (("--text", text), ("--label", label)) if not given)
    spelled = {name.lower(): name for name in names}
    label = list(label) or [spelled[name] for name in LABEL_NAMES if name in spelled and spelled[name] not in text][:1]
    text = list(text) or guess_texts(name for name in names if name not in label)
    for option, chosen in (("--text", text), ("--label", label)):
        if not chosen:
            raise UsageError(
                f"{table.source} has the columns {', '.join(map(repr, names[:MOST_SHOWN]))}; name one with {option}"
            )
    for option, chosen in (("--text", text), ("--label", label)):
        if len(set(chosen)) < len(chosen):
            raise UsageError(f"{option} names a column twice: {', '.join(chosen)}; name each column once")
    if both := set(text) & set(label):
        raise UsageError(f"the column {both.pop()!r} is both text and label; name different columns")
    by = f", guessed from the names; set {guessed} for others" if guessed else ""
    report(f"{table.source}: text from {' and '.join(map(repr, text))}, label from {', '.join(map(repr, label))}{by}")
    return text, label


def find_space(train: Columns, label: Sequence[str], options: Mapping[str, Any]) -> LabelSpace:
    """Return the labels of the training rows, as the recipe asks for them."""
    return find_labels(train, label, options["problem_type"], options["labels"], options["label_sep"])


def drop_blank(table: Columns, text: Sequence[str], report: Report = ignore) -> Columns:
    """Return the rows of which a text holds more than white space; the others are reported.

    Raises:
        UsageError: They are more than MOST_BLANK of all rows.
    """
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
    report(f"{said}; left out")
    return table.take(np.flatnonzero(~is_blank))


def describe_blank(table: Columns, is_blank: np.ndarray, what: str, columns: Sequence[str]) -> str:
    """Return how many rows have no text or no label, and the first of them."""
    rows = np.flatnonzero(is_blank)
    found = f"{count(len(rows), 'row has', 'rows have')} no {what} in {' or '.join(map(repr, columns))}"
    return f"{table.source}: {found} (first: {table.name_row(int(rows[0]))})"


def divide_tables(tables: Mapping[str, Columns], options: Mapping[str, Any]) -> dict[str, Columns]:
    """Return the rows of each split: train gives dev if there is none, and test if it is the only table."""
    train = tables["train"]
    rows = divide_train({split: table.source for split, table in tables.items()}, iterate_keys(train, options), options)
    return {**tables, **{split: train.take(numbers) for split, numbers in rows.items()}}


def iterate_keys(table: Columns, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps each row together with others: its group, or without one its texts, stripped of white space."""
    group = options["group"]
    columns = [table.find(name) for name in ([group] if group else []) + list(options["text"])]
    for start in range(0, len(table), ROWS_A_PART):
        parts = (column.slice(start, ROWS_A_PART).to_pylist() for column in columns)
        for cells in zip(*parts, strict=True):
            stripped = [cell.strip() for cell in cells]
            yield stripped[0] if group and stripped[0] else "\0".join(stripped[bool(group) :])


def has_labels(table: Columns, columns: Sequence[str]) -> bool:
    """Return whether a table has the label columns with a cell that is filled, or some of several of them."""
    known = set(columns) & set(table.table.column_names)
    if len(known) < len(columns):
        return bool(known)
    return len(columns) > 1 or any(table.find(columns[0]).unique().to_pylist())


def read_rows(
    split: str, table: Columns, space: LabelSpace, options: Mapping[str, Any], report: Report
) -> LabelledTexts:
    """Return the examples of a split; rows whose label train lacks are reported and left out."""
    text = tuple(options["text"])
    if split == "test" and not has_labels(table, space.columns):
        report(f"{table.source}, test: no labels in {', '.join(map(repr, space.columns))}; predicted, not scored")
        return LabelledTexts(table, text, options["group"], None, space)
    is_blank = space.find_blank(table)
    left_out = np.asarray(table.lines)[is_blank].tolist()
    if left_out and not options["folds"]:  # each row of the folds has its prediction
        report(f"{describe_blank(table, is_blank, 'label', space.columns)}; left out of {split}")
        table = table.take(np.flatnonzero(~is_blank))
    labels, unknown = space.read(table)
    found = LabelledTexts(table, text, options["group"], labels, space, left_out)
    whose = "the model" if space.reason == AS_TRAINED else "train"
    if unknown:
        listed = ", ".join(f"{label!r} ({number:,})" for label, number in unknown.most_common(MOST_SHOWN))
        known = labels != UNKNOWN_LABEL
        if space.kind == SEVERAL:
            flags, _ = replace(space, names=(*space.names, *unknown)).read(table)
            known = ~flags[:, len(space.names) :].any(axis=1) | (space.reason != AS_TRAINED)
        ending = "" if known.all() else "; these rows are left out"
        report(f"{table.source}, {split}: {whose} lacks the labels {listed}{ending}")
        found = found.take(np.flatnonzero(known))
    if not len(found):
        raise UsageError(
            f"{table.source}, {split}: {whose} has none of the labels in its {count(len(table), 'row')}, but "
            f"{', '.join(space.names[:MOST_SHOWN])}; correct them"
        )
    return found


def read_scored(
    tables: Mapping[str, Columns], options: Mapping[str, Any], config: "BertConfig", report: Report
) -> dict[str, LabelledTexts]:
    """Return the labelled rows of a table, or of dev and test, with the labels of a trained model.

    Raises:
        UsageError: No table has labels.
    """
    scored = {split: table for split, table in tables.items() if split != "train"} or {"data": tables["train"]}
    given, kind = options["text"] or config.text_columns or [], find_problem_type(config)
    names, examples = tuple(config.id2label[place] for place in range(config.num_labels)), {}
    for split, table in scored.items():
        if not set(table.table.column_names) & set(usual := options["label"] or LABEL_NAMES):
            report(f"{table.source} has no column {' or '.join(map(repr, usual))}, skipping")
            continue
        if missing := [name for name in given if name not in table.table.column_names]:
            raise UsageError(f"{table.source} has no column {missing[0]!r}, which the model reads; rename one")
        text, label = choose_columns(table, given, options["label"])
        report(f"{table.source}: text from {' and '.join(map(repr, text))}, label from {', '.join(map(repr, label))}")
        if not has_labels(table, label):
            report(f"{table.source} has no labels in {' or '.join(map(repr, label))}, skipping")
            continue
        if kind == SEVERAL and len(label) == 1:
            found = find_space(table, label, {**options, "problem_type": SEVERAL})
            space = replace(found, names=names, reason=AS_TRAINED)
        else:
            space = LabelSpace(kind, names, tuple(label), AS_TRAINED)
        table = drop_blank(table, text, report)
        group = options["group"] if options["group"] in table.table.column_names else ""
        examples[split] = read_rows(split, table, space, {**options, "text": text, "group": group, "folds": 0}, report)
    return examples


def describe_labels(examples: Mapping[str, LabelledTexts]) -> list[str]:
    """Return the share of each label in every split with labels, or the mean and the deviation of numbers."""
    labelled = {split: found for split, found in examples.items() if found.labels is not None}
    space = examples["train"].space
    if space.kind == REGRESSION:
        return [
            f"  {split}: mean {found.labels.mean():.3f}, sd {found.labels.std():.3f}"
            for split, found in labelled.items()
        ]
    counts = {split: count_labels(found) for split, found in labelled.items()}
    return describe_shares(counts, {split: len(found) for split, found in labelled.items()}, space.names)


def count_labels(examples: LabelledTexts) -> np.ndarray:
    """Return (L,) how many rows have each label."""
    if examples.labels.ndim == 1:
        return np.bincount(examples.labels, minlength=len(examples.space.names))
    return examples.labels.sum(0)


def find_weights(given: str | Mapping[str, float], train: LabelledTexts) -> list[float]:
    """Return the weight of each label: balanced as in scikit-learn, or as given; empty without weights.

    The balanced weight of one of several labels is its number of negative rows per positive row.

    Raises:
        UsageError: The problem is a regression, or a label is unknown or missing.
    """
    if not given:
        return []
    if train.space.kind == REGRESSION:
        raise UsageError("class_weights is for labels, not for numbers; leave it out")
    if given == BALANCED:
        counts = count_labels(train).clip(min=1)  # a fold may have no row of a label
        if train.labels.ndim == 1:
            return (len(train) / (len(counts) * counts)).tolist()
        return ((len(train) - counts).clip(min=1) / counts).tolist()  # a label of all rows is still learned
    if set(given) != set(train.space.names):
        wrong = ", ".join(map(repr, sorted(set(given) ^ set(train.space.names))[:MOST_SHOWN]))
        raise UsageError(
            f"class_weights and the labels differ in {wrong}; give a weight for each of {', '.join(train.space.names)}"
        )
    return [float(given[name]) for name in train.space.names]


def list_rows() -> tuple[ScoreRow, ...]:
    """Return the lines of the table: every score of every kind, on dev and on test."""
    names = {"score": "score"}  # the lines of studies name it
    for found in SCORES.values():
        names |= found
    hidden = {"score": "score", "micro_f1": "accuracy"}  # they repeat another line
    rows = {}
    for key, name in names.items():
        is_error = key in ("rmse", "ece", "brier")  # lower is better
        baselines = {} if is_error else {"a constant answer": f"majority_{key}"}
        unit = "" if key in ("rmse", "r2", "brier") else "fraction"
        rows[key] = ScoreRow(name, key, baselines, unit, hidden_by=hidden.get(key, ""))
    tests = (replace(row, name=f"{row.name}, test", key=f"test_{row.key}", baselines={}) for row in rows.values())
    return (*rows.values(), *tests)


def spell_labels(examples: LabelledTexts) -> list[Hashable]:
    """Return the name, the names or the number that each row is labelled with."""
    names, labels = examples.space.names, examples.labels
    if examples.space.kind == REGRESSION:
        return labels.astype(np.float64).tolist()
    if labels.ndim == 1:
        return [names[label] for label in labels.tolist()]
    return [tuple(names[place] for place in np.flatnonzero(row)) for row in labels]


def name_apart(name: str, names: Collection[str], suffix: str) -> str:
    """Return a name of a column, with a suffix if the table has a column of this name."""
    while name in names:
        name += suffix
    return name


def write_rows(rows: Columns, results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with its results as CSV: the input's columns, then those of the results."""
    names = list(rows.table.column_names)
    for name in results[0]:
        names.append(name_apart(name, names, "_predicted"))
    file = io.StringIO()
    writer = csv.writer(file)  # a shorter line end would leave cells with a single "\r" unquoted
    writer.writerow(names)
    for start in range(0, len(results), ROWS_A_PART):
        part = rows.table.slice(start, ROWS_A_PART).to_pylist()
        for row, result in zip(part, results[start:], strict=False):
            writer.writerow([*row.values(), *result.values()])
    return file.getvalue()


CLASSIFICATION = ClassificationTask()
