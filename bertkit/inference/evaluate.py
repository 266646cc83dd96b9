"""Score a finished run, an export or a Hub model on labelled data that it has not seen.

The data are encoded as in training, with the lengths, the document context and the decisions (tau, thresholds,
temperature) of the run, so that a run's own dev gives the scores in its metrics.json. A table with right answers and
predictions, such as one of another program, is scored as well.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit.data.duplicates import TRAIN_SPLIT
from bertkit.data.splits import DROP, UNLABELLED
from bertkit.errors import UsageError, as_usage_error, pluralize
from bertkit.inference.predictor import Predictor, read_export_record
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.ner import score_types
from bertkit.metrics.table import BASELINE, BASELINE_PROBABILITY, LABEL, read_decided, read_facts
from bertkit.reports.tables import (
    OWN_DATA,
    Table,
    list_shown,
    name_limits,
    tabulate_labels,
    tabulate_scores,
    tabulate_types,
)
from bertkit.system.files import atomic_open
from bertkit.system.hub import find_file
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.equal_rows import check_rows
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.kinds import LABEL_KINDS, get_kind
from bertkit.tasks.prediction import summarize_split
from bertkit.tasks.task import CHOSEN_ON_DEV, PredictionSettings, Task
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import (
    KEY,
    MISTAKES,
    TABLE_SUFFIX,
    format_table,
    join_rows,
    list_mistakes,
    read_table,
)
from bertkit.training.prepare import set_apart
from bertkit.training.recipe import Recipe, load_recipe, read_recipe, resolve
from bertkit.training.run_dir import (
    DATA,
    ENVIRONMENT,
    EVALUATIONS,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    check_data,
    read_environment,
    read_metrics,
)
from bertkit.training.scoring import score_rows

MISTAKES_FILE = "mistakes.csv"  # in the directory of an evaluation
SCORED = "scored"  # the name of the scored rows in the search for leaks from train


@dataclass(frozen=True, eq=False)
class ScoredModel:
    """A trained model with what its scores depend on."""

    run: str
    task: Task
    recipe: Recipe
    settings: PredictionSettings
    precision: str
    decided: Mapping[str, Any]  # values of its configuration that an evaluation has decided: tau, thresholds

    def encode(self, examples: Any, split: str, report: Report = ignore) -> Any:
        """Return the data set of some examples."""
        name = SCORED if split == TRAIN_SPLIT else split  # such a file is not encoded for training
        return self.task.encode(examples, self.settings.tokenizer, self.recipe, name, report)

    def tabulate(self, examples: Any, data: Any, split: str) -> pa.Table:
        """Return the prediction table of some examples and their data set."""
        summaries = summarize_split(self.task, self.settings.model, data, self.precision)
        rows = self.task.decode(summaries, data, self.decided).rows
        examples = self.task.tabulate_examples(examples)
        return join_rows(rows, examples, self.settings.tokenizer, task=self.task.name, split=split)


@dataclass(frozen=True, eq=False)
class EvaluatedSplit:
    """The scores of a model on some labelled rows, as written to `output`."""

    name: str
    task: Task
    metrics: Mapping[str, Any]
    rows: pa.Table
    output: Path | None  # None: nothing is written

    def describe(self) -> Iterator[str]:
        """Yield lines about leaks, choices, mistakes and files."""
        if leaks := self.metrics.get("leaks"):
            yield f"{leaks:,} of {pluralize(len(self.rows), 'row')} also {'occurs' if leaks == 1 else 'occur'} in train"
        yield from (line for line in self.task.comment(self.metrics) if not line.startswith("warning: "))
        mistakes = pluralize(len(list_mistakes(self.rows)), "mistake")
        if not get_kind(self.rows).has_names:
            mistakes = f"{mistakes} above the root mean squared error"
        yield mistakes if self.output is None else f"{mistakes}, the worst first, and scores: {self.output}"


def load_predictor(run: str) -> Predictor:
    """Return a model in the precision of its run, with which its scores were computed."""
    recipe = find_file(run, RECIPE_FILE)
    is_plain = recipe is None or read_export_record(run) is not None  # an export has a precision of its own
    return Predictor(run, precision="auto" if is_plain else read_recipe(recipe).get("precision", "auto"))


def open_scored(run: str, predictor: Predictor) -> ScoredModel:
    """Return a run, an export or a Hub model with its task and recipe; `predictor` has its model."""
    path = find_file(run, RECIPE_FILE)
    recipe = None if path is None else load_recipe(path)
    changes: dict[str, Any] = {UNLABELLED: DROP}  # rows without a label are left out, whatever training did
    tables = Path(run, DATA)
    if recipe and tables.is_dir() and Path(recipe.data.get("dir", "")).name == DATA:
        changes["dir"] = str(tables)  # a relative path is lost with the working directory
    config = predictor.settings.model.config
    head = predictor.settings.head.replace("BiLSTM", "")
    others = (task for task in TASKS.values() if not task.lower_is_better)
    fitting = [
        task for task in others if head in {task.head, *(x for one in task.heads.values() for x in one.values())}
    ]
    if config.tau is not None:
        fitting = fitting[::-1]  # the second of two versions has a tau
    task = fitting[0] if fitting else None
    if recipe:
        task = TASKS[recipe.task]
    if task is None or not task.metric or task.lower_is_better:
        raise UsageError(f"{run} has no labels to score; give a fine-tuned model")
    if recipe is None:
        columns = {"text": predictor.trained} if predictor.trained else {}
        recipe = Recipe.make(task, {"checkpoint": run, "data": columns}, config=config)
    recipe = resolve(recipe, {key: value for key, value in changes.items() if key in recipe.data})
    decided = dict(predictor.settings.decided)
    if config.problem_type and LABEL_KINDS[config.problem_type].has_several:
        decided.setdefault("thresholds", [FIXED_THRESHOLD] * config.num_labels)
    return ScoredModel(run, task, recipe, predictor.settings, predictor.precision, decided)


# --- The command ------------------------------------------------------------------------------------------------------


def evaluate(
    run: str,
    given: str | None,
    output: Path | None,
    report: Report = ignore,
    text: Sequence[str] | None = None,
    label: Sequence[str] | None = None,
) -> list[EvaluatedSplit]:
    """Score a model on labelled data, or a table of predictions, and write scores, table and mistakes of each split.

    Args:
        run: A run, an export, a Hub model, or a table with the columns `label` and `prediction`.
        given: A file, or a folder or Hub data set with dev or test; None: the run's own evaluated splits, whose tables
            and mistakes are written again.
        output: The directory to write; None: `RUN/evaluations/NAME`, NAME being the file's stem or the split;
            nothing for a table.
        text: The columns of the texts in `given`; None: as in training.
        label: The columns of the labels; None: as in training.
    """
    columns = {name: list(names) for name, names in (("text", text), ("label", label)) if names}
    if Path(run).is_file():
        if given is not None or columns:
            raise UsageError(f"{run} is a table, which has right answers; leave out --data, --text and --label")
        return [evaluate_table(Path(run), output, report)]
    if columns and given is None:
        raise UsageError("--text and --label name columns of --data; give it too")
    scored = open_scored(run, load_predictor(run))
    task = scored.task
    if unknown := columns.keys() - task.options.keys():
        raise UsageError(f"{task.name} reads columns of fixed names; leave out --{max(unknown)}")
    texts, pairs = len(columns.get("text", ())), scored.settings.pairs
    if texts > 2 or (texts and pairs is not None and texts != 1 + pairs):
        reads = "one text or two" if pairs is None else pluralize(1 + pairs, "text")
        raise UsageError(f"{run} reads {reads}, but --text names {pluralize(texts, 'column')}; name as many")
    folder = Path(run)
    if not folder.is_dir() and (output is None or given is None):
        raise UsageError(
            f"{run} is not a directory on this machine; give data and a directory with --data and --output"
        )
    if output is not None and (output / RECIPE_FILE).exists():
        raise UsageError(f"{output} holds a run; name another directory with --output")
    train = None if given is None else read_train(scored, report)
    if given is None:
        examples = read_own(scored, report)
    else:
        if columns.get("label") and "gold" in task.options:  # these are the right labels
            columns["gold"] = ""
        scored = replace(scored, recipe=resolve(scored.recipe, {"dir": given, **columns}))
        examples = task.load(scored.recipe.data, report, scored.settings.model.config)
    if not examples:
        step = ", or name their column with --label" if "label" in task.options else ""
        raise UsageError(f"{given or run} has no right answers to score; give labelled data{step}")
    data = {split: scored.encode(own, split, report) for split, own in examples.items()}
    if given is None and (folder / ENVIRONMENT).is_file():
        before = read_environment(folder)["data"]
        now = {split: encoded.fingerprint() for split, encoded in data.items()}
        check_data(folder, {x: before[x] for x in now if x in before}, now, "or score the new ones with --data")
    found = []
    for split, own in examples.items():
        name, target = split, None  # the files are those of the run itself
        if given is not None:
            stem = Path(given.removesuffix(".gz")).stem
            target = folder / EVALUATIONS / stem if output is None else output
            target = target / split if len(examples) > 1 else target
            name = stem if Path(given).is_file() else split
        found.append(evaluate_split(scored, name, own, data[split], train, target, report))
    return found


def list_tables(found: EvaluatedSplit) -> Iterator[Table]:
    """Yield the table of scores with intervals and baselines, and those of each label or type of entity."""
    rows = list_shown(found.task.table, found.task.metric, found.metrics)
    yield replace(
        tabulate_scores(rows, found.metrics, "score"), caption=f"{found.name}, {pluralize(len(found.rows), 'row')}"
    )
    types = score_types(found.rows) if "strict_found" in found.rows.column_names else {}
    yield from filter(None, (tabulate_labels(found.metrics, found.name), tabulate_types(types, found.name)))


def evaluate_split(
    scored: ScoredModel,
    name: str,
    examples: Any,
    data: Any,
    train: ExampleRows | None,
    target: Path | None,
    report: Report,
) -> EvaluatedSplit:
    """Score a split, and write its files to a directory, or its table and mistakes to those of the run."""
    task = scored.task
    rows = scored.tabulate(examples, data, name)
    leaks = np.empty(0, np.int64)
    if train is not None:
        checked = check_rows({TRAIN_SPLIT: train, SCORED: task.tabulate_examples(examples)})
        leaks = checked.splits[SCORED].in_train[:, 0]
    others = leaks if len(leaks) < len(rows) else leaks[:0]  # without the leaks nothing would be left
    metrics = measure(task, rows, others, report) | task.baseline(data, data)
    if train is not None:
        metrics["leaks"] = len(leaks)
    origin = scored.recipe.data["dir"]
    is_foreign = getattr(data, "language", "en") != "en"
    if task.copies and (is_foreign or Path(origin).is_file() or not task.is_official(origin)):
        metrics[OWN_DATA] = True
    if chosen := read_decided(rows).keys() - scored.decided:
        metrics[CHOSEN_ON_DEV] = " and ".join(chosen)
    known = Path(scored.run, METRICS_FILE)
    if target is None and name == next(iter(task.splits)) and known.is_file():
        metrics |= {key: value for key, value in read_metrics(known).items() if key == CHOSEN_ON_DEV}
    output = Path(scored.run) if target is None else target
    if target is None:
        rows = keep_baseline(rows, output / PREDICTIONS / f"{name}{TABLE_SUFFIX}")
    write_files(output, name, rows, None if target is None else metrics)
    return EvaluatedSplit(name, task, metrics, rows, output)


def keep_baseline(rows: pa.Table, path: Path) -> pa.Table:
    """Return a table with the answers of the baseline in an earlier table of the same rows, if it has them."""
    before = read_table(path) if path.is_file() else rows
    if BASELINE in before.column_names and before.column(KEY) == rows.column(KEY):
        for name in (BASELINE, BASELINE_PROBABILITY):
            rows = rows.append_column(name, before.column(name))
    return rows


def evaluate_table(path: Path, output: Path | None, report: Report) -> EvaluatedSplit:
    """Score the prediction table of a run, or a table of another program, whose answers are classes or numbers."""
    rows = read_table(path)
    if LABEL not in rows.column_names:
        raise UsageError(f"{path} has no column {LABEL!r}, which holds the right answers; give a table that has it")
    task = TASKS[read_facts(rows).get("task", CLASSIFICATION.name)]
    metrics = measure(task, rows, np.empty(0, np.int64), report)
    if output is not None:
        write_files(output, path.stem, rows, metrics)
    return EvaluatedSplit(path.stem, task, metrics, rows, output)


def measure(task: Task, rows: pa.Table, leaks: np.ndarray, report: Report) -> dict[str, Any]:
    """Return the scores of a table with their limits, the task's metric also as `score`, and the number of rows."""
    metrics: dict[str, Any] = score_rows(task, rows, "{}", leaks, report)
    for own, key in zip((task.metric, *name_limits(task.metric)), ("score", *name_limits("score")), strict=True):
        if own in metrics:
            metrics[key] = metrics[own]
    return metrics | {"rows": len(rows)}


def write_files(output: Path, name: str, rows: pa.Table, metrics: Mapping[str, Any] | None) -> None:
    """Write a table and its mistakes beside the scores, or without scores as the run itself does."""
    files = {f"{PREDICTIONS}/{file}": content for file, content in format_table(rows, name).items()}
    if metrics is not None:
        files[MISTAKES_FILE] = files.pop(f"{PREDICTIONS}/{name}{MISTAKES}")
        files[METRICS_FILE] = json.dumps(metrics, indent=2) + "\n"
    with as_usage_error(f"the directory {output}"):
        (output / PREDICTIONS).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            with atomic_open(output / file, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)


def load_again(scored: ScoredModel, report: Report) -> dict[str, Any]:
    """Return the examples of a run's own data, whose texts are divided into words as in its training."""
    return scored.task.load({**scored.recipe.data, "text_words": scored.settings.model.config.text_words}, report)


def read_own(scored: ScoredModel, report: Report) -> dict[str, Any]:
    """Return the evaluated splits of a run, as they were scored at its end."""
    examples = set_apart(scored.recipe, load_again(scored, report))
    return {split: examples[split] for split in scored.task.splits if split in examples}


def read_train(scored: ScoredModel, report: Report) -> ExampleRows | None:
    """Return the training rows of a run; None if they are gone, which is reported."""
    if not (Path(scored.run) / RECIPE_FILE).is_file():
        return None
    try:
        return scored.task.tabulate_examples(load_again(scored, ignore)[TRAIN_SPLIT])
    except UsageError as error:
        report(f"the training texts cannot be read, so leaks from training are not counted: {error}")
        return None
