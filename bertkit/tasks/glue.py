"""GLUE: nine tasks and a diagnostic set of one text or a pair, with a class or a score (paper section 4.1), as Tasks.

A table has one row per task; the code below it is the same for all. The official files and their copy on the Hub give
the same texts and the same labels, which are matched by name and never by position.

The paper leaves WNLI out of its averages and submits the majority class; here it is trained like the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bertkit.data.formats.glue import (
    GLUE_HUB,
    Benchmark,
    Split,
    read_copy,
    read_folder,
    read_labels,
    read_split,
)
from bertkit.data.formats.rows import Columns
from bertkit.data.labels import REGRESSION, SINGLE, LabelSpace
from bertkit.errors import UsageError
from bertkit.metrics.rows import WeightedScore
from bertkit.reports.tables import ScoreLine
from bertkit.system.progress import Report
from bertkit.tasks.answers import Answers
from bertkit.tasks.finetuning import CALIBRATION_ROWS, EVERY_EPOCH, name_baselines
from bertkit.tasks.kinds import ONE_NUMBER, SINGLE_LABEL, ClassAnswers, get_kind
from bertkit.tasks.option import GLUE_OPTIONS
from bertkit.tasks.text import TextExamples, TextSequences, TextTask

if TYPE_CHECKING:
    from bertkit.model.config import BertConfig

BASE_TEST, LARGE_TEST = "BERT-base, test", "BERT-large, test"  # Table 1
BASE_DEV = "BERT-base, dev"  # Table 5


def describe(title: str, **facts: Any) -> Benchmark:
    """Return a row of the table, whose name, files and Hub configuration follow from its title.

    Args:
        facts: The other attributes of a `Benchmark`.
    """
    name = title.lower().replace("-", "")
    splits = {
        "train": Split(f"{title}/train.tsv", (name, "train"), needed=True),
        "dev": Split(f"{title}/dev.tsv", (name, "validation"), needed=True, scores="{}"),
        "test": Split(f"{title}/test.tsv", (name, "test"), submission=f"{title}.tsv"),
    }
    return Benchmark(name=name, title=title, splits=splits, **facts)


PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}
PREMISE = {"premise": "sentence1", "hypothesis": "sentence2"}
NLI = {label: label for label in ("entailment", "neutral", "contradiction")}
TWO_WAY = {label: label for label in ("entailment", "not_entailment")}
AX = Split("diagnostic/diagnostic.tsv", ("ax", "test"), submission="AX.tsv")

BENCHMARKS = (
    describe(
        "CoLA",
        texts={"sentence": 3},
        label=1,
        labels={"0": "unacceptable", "1": "acceptable"},
        metrics=("matthews_correlation",),
        paper={"matthews_correlation": {BASE_TEST: 0.521, LARGE_TEST: 0.605}},
        bare=4,
    ),
    describe(
        "SST-2",
        texts={"sentence": "sentence"},
        labels={"0": "negative", "1": "positive"},
        paper={"accuracy": {BASE_TEST: 0.935, LARGE_TEST: 0.949, BASE_DEV: 0.927}},
    ),
    describe(
        "MRPC",
        texts={"sentence1": "#1 String", "sentence2": "#2 String"},
        label="Quality",
        labels={"0": "not_equivalent", "1": "equivalent"},
        metrics=("f1", "accuracy"),
        paper={"f1": {BASE_TEST: 0.889, LARGE_TEST: 0.893}, "accuracy": {BASE_DEV: 0.867}},
    ),
    describe(
        "STS-B",
        texts=PAIR,
        label="score",
        labels={},
        metrics=("spearmanr", "pearson"),
        paper={"spearmanr": {BASE_TEST: 0.858, LARGE_TEST: 0.865}},
    ),
    describe(
        "QQP",
        texts={"question1": "question1", "question2": "question2"},
        label="is_duplicate",
        labels={"0": "not_duplicate", "1": "duplicate"},
        metrics=("f1", "accuracy"),
        paper={"f1": {BASE_TEST: 0.712, LARGE_TEST: 0.721}},
        broken=True,
    ),
    Benchmark(
        name="mnli",
        title="MNLI",
        texts=PREMISE,
        label="gold_label",
        labels=NLI,
        splits={
            "train": Split("MNLI/train.tsv", ("mnli", "train"), needed=True),
            "dev_matched": Split("MNLI/dev_matched.tsv", ("mnli", "validation_matched"), needed=True, scores="{}"),
            "dev_mismatched": Split("MNLI/dev_mismatched.tsv", ("mnli", "validation_mismatched"), scores="{}_mm"),
            "test_matched": Split("MNLI/test_matched.tsv", ("mnli", "test_matched"), submission="MNLI-m.tsv"),
            "test_mismatched": Split("MNLI/test_mismatched.tsv", ("mnli", "test_mismatched"), submission="MNLI-mm.tsv"),
            "ax": AX,
        },
        paper={
            "accuracy": {BASE_TEST: 0.846, LARGE_TEST: 0.867, BASE_DEV: 0.844},
            "accuracy_mm": {BASE_TEST: 0.834, LARGE_TEST: 0.859},
        },
    ),
    describe(
        "QNLI",
        texts={"question": "question", "sentence": "sentence"},
        labels=TWO_WAY,
        paper={"accuracy": {BASE_TEST: 0.905, LARGE_TEST: 0.927, BASE_DEV: 0.884}},
    ),
    describe(
        "RTE",
        texts=PAIR,
        labels=TWO_WAY,
        paper={"accuracy": {BASE_TEST: 0.664, LARGE_TEST: 0.701}},
    ),
    describe(
        "WNLI",
        texts=PAIR,
        labels={"0": "not_entailment", "1": "entailment"},
    ),
    Benchmark(
        name="ax",
        title="AX",
        texts=PREMISE,
        label="",
        labels=NLI,
        metrics=(),
        splits={"ax": replace(AX, needed=True)},
    ),
)

# The grid of `--grid`: section 4.1's learning rates, A.3's batch sizes and epochs.
GRID = {
    "train.learning_rate": [5e-5, 4e-5, 3e-5, 2e-5],
    "batch_size": [16, 32],
    "train.num_train_epochs": [2.0, 3.0, 4.0],
}

SCORE_NAMES = {"f1": "F1"} | SINGLE_LABEL.scores | ONE_NUMBER.scores


class GlueTask(TextTask):
    """The task of one row of the table, a classification whose columns, labels and files are known."""

    options = GLUE_OPTIONS
    compared = ()

    def __init__(self, row: Benchmark) -> None:
        self.row = row
        self.name, self.title, self.command = row.name, row.title, f"glue --task {row.name}"
        self.metric = row.metrics[0] if row.metrics else ""
        self.is_classifier = bool(row.labels and row.metrics)
        self.pairs = len(row.texts) == 2
        kind, names = (SINGLE, tuple(row.labels.values())) if row.labels else (REGRESSION, ("similarity",))
        self.space = LabelSpace(kind, names, (), "GLUE's")
        self.splits = {name: split.scores for name, split in row.splits.items() if split.scores}
        self.unlabelled = tuple(name for name, split in row.splits.items() if split.submission)
        self.copies = {name: (GLUE_HUB, *split.hub) for name, split in row.splits.items()}
        self.table = list_rows(row)
        train = {"num_train_epochs": 3.0, "learning_rate": 2e-5} | EVERY_EPOCH  # section 4.1, its lowest rate
        if row.metrics:
            self.recipe = self.make_recipe(32, **train)  # section 4.1
        else:
            self.start, self.next_commands = "a model that was fine-tuned on MNLI", ()
            self.recipe = self.make_recipe(32, checkpoint="", **train | {"eval_strategy": "no"})

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, TextExamples]:
        """Read the examples of every available split, and report the optional ones that are missing."""
        row, folder = self.row, Path(options["dir"])
        if config is not None:
            files = {name: folder / row.splits[name].file for name in self.splits}
            files = {next(iter(files)): folder} if folder.is_file() else {x: y for x, y in files.items() if y.is_file()}
            return {name: self.read(name, read_split(row, name, file, report)) for name, file in files.items()}
        tables = read_folder(row, folder, report) if options["dir"] else read_copy(row, report)
        for name, split in row.splits.items():
            if name not in tables:
                missing = folder / split.file if options["dir"] else name
                report(f"{row.title}: {missing} not found, skipping")
        examples = {name: self.read(name, table) for name, table in tables.items()}
        if "train" in examples:
            examples["train"] = examples["train"].limit(options["max_train_samples"])
        report(f"{row.title}: " + ", ".join(f"{name} {len(found):,}" for name, found in examples.items()))
        return examples

    def read(self, split: str, table: Columns) -> TextExamples:
        """Return the examples of a split's table."""
        labels = None if self.row.splits[split].submission else read_labels(self.row, table)
        rows = replace(table, table=table.table.select([*self.row.texts]))
        return TextExamples(rows, tuple(self.row.texts), labels, self.space)

    # --- Scores -------------------------------------------------------------------------------------------------------

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return the task's metrics as fractions, and of classes the errors of their probabilities."""
        found = get_kind(rows).measure(rows)
        if self.row.labels:
            found["f1"] = found[f"f1_{self.space.names[1]}"]
        wanted = (*self.row.metrics, *(row.key for row in CALIBRATION_ROWS))
        return {name: found[name] for name in wanted if name in found}

    def score_nothing(self, train: TextSequences, dev: TextSequences) -> dict[str, float]:
        """Return the scores of predicting the most frequent label of dev itself, or a constant."""
        return super().score_nothing(dev, dev)

    # --- Files --------------------------------------------------------------------------------------------------------

    def format_predictions(self, answers: Answers, data: TextSequences, split: str) -> dict[str, str]:
        """Return a split's predictions in the leaderboard's form, for which scores are clipped to 0 to 5."""
        submission, spellings = self.row.splits[split].submission, list(self.row.labels)
        if isinstance(answers, ClassAnswers):
            cells = [spellings[label] for label in answers.best.tolist()]
        else:
            cells = [f"{min(max(x, 0.0), 5.0):.3f}" if submission else repr(x) for x in answers.numbers[:, 0].tolist()]
        return {submission or Path(self.row.splits[split].file).name: write_predictions(cells)}


def list_rows(row: Benchmark) -> tuple[ScoreLine, ...]:
    """Return the rows of a task's table: each metric on each evaluated split, then the errors of probabilities."""
    rows, errors, majority = [], [], "the majority class" if row.labels else "a constant"
    for name, form in ((name, split.scores) for name, split in row.splits.items() if split.scores):
        is_first = form == "{}"
        ending = "" if is_first else f", {name.rpartition('_')[2]}"
        for found in CALIBRATION_ROWS if row.labels else ():
            errors.append(replace(found, name=f"{found.name}{ending}", key=form.format(found.key)))
        for metric in row.metrics:
            key, constant = form.format(metric), {majority: f"majority_{metric}"}
            baselines = constant | name_baselines(TextTask.baselines, metric) if is_first else {}
            rows.append(ScoreLine(f"{SCORE_NAMES[metric]}{ending}", key, baselines, "fraction", row.paper.get(key, {})))
    return (*rows, *errors)


def write_predictions(answers: Sequence[str]) -> str:
    """Return the leaderboard's form: a header, then one line per answer with its number."""
    return "index\tprediction\n" + "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))


GLUE = {row.name: GlueTask(row) for row in BENCHMARKS}


def get_glue_task(name: str) -> GlueTask:
    """Return a task by its name in any spelling: `mnli`, `MNLI`, `SST-2`."""
    task = GLUE.get(name.lower().replace("-", "").replace("_", ""))
    if task is None:
        raise UsageError(f"unknown task {name!r}; the GLUE tasks are {', '.join(GLUE)}")
    return task
