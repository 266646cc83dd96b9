"""The page of `bertkit report`: one self-contained HTML file on runs and studies, made from the files that they wrote.

A part says what is in the files of a run or a study, and a file that is missing takes only what depends on it away.
Whatever is shown of predictions comes from the prediction tables. Results of `bertkit predict --explain` are shown if
they were written to `explanations.jsonl` among the predictions of a run.

Left out: every number that no run has written. Shape letters: S rows, L labels.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import regex

from bertkit.analysis.compare import drop_seed, is_run
from bertkit.analysis.doctor import list_tables
from bertkit.analysis.expected import EXPECTED, describe_expected, plot_expected
from bertkit.analysis.explanation import EXPLANATIONS, describe_words, list_parts
from bertkit.analysis.slices import tabulate_slices
from bertkit.data.scripts import WORD_BORDER
from bertkit.errors import UsageError, as_usage_error, pluralize
from bertkit.metrics.calibration import bin_probabilities, measure_calibration
from bertkit.metrics.intervals import estimate_share_interval
from bertkit.metrics.ner import score_types
from bertkit.metrics.rows import take_values
from bertkit.metrics.table import (
    BASELINE,
    BASELINE_PROBABILITY,
    LABEL,
    PREDICTION,
    encode_names,
    read_facts,
    read_numbers,
    read_probabilities,
)
from bertkit.reports.html import draw_all, render
from bertkit.reports.plots import LOSS, Plot, Series, list_logged, trace
from bertkit.reports.tables import (
    INTERVAL,
    ScoreLine,
    Table,
    TableCell,
    find_main,
    find_row,
    list_shown,
    make_table,
    name_limits,
    tabulate_labels,
    tabulate_scores,
    tabulate_types,
)
from bertkit.reports.verdict import describe_verdict
from bertkit.studies import plots, tables
from bertkit.studies.spec import STUDY_FILE
from bertkit.system.differences import flatten_recipe, show_toml
from bertkit.system.files import atomic_write
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.kinds import get_kind
from bertkit.tasks.task import list_advice, shorten_text
from bertkit.training.model_card import describe_machine
from bertkit.training.predictions import EMPTY_ANSWER, TABLE_SUFFIX, read_table, show_mistakes
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import (
    DOCTOR_FILE,
    ENVIRONMENT,
    EVALUATIONS,
    LOG,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    read_log,
    read_metrics,
    read_record,
)
from bertkit.training.study_results import STUDY_RESULT, StudyResults

CURVES_SHOWN = 2  # of the loss and of the score; the others are folded
MOST_SETTINGS = 3  # columns of settings that differ between runs
POINTS = 600  # per curve at most, about as many as a screen shows
MOST_EXPLAINED = 10  # inputs whose explanations are shown
MISTAKES_LISTED, MISTAKE_WIDTH = 10, 240  # rows, and characters of a text in one
MOST_MARKED = 0.5  # the share of a text's words; if more of them differ from the other text, marks say nothing
LEAST_ANSWERED, MOST_POINTS = 20, 200  # texts in the first point of a curve, and its points
MOST_CONFUSED = 20  # labels of a confusion matrix
MOST_WITH_SHARES = 6  # labels of one whose cells have shares as numbers too


@dataclass(frozen=True)
class Source:
    """A run or a study that has a part of the page."""

    path: Path
    id: str
    study: StudyResults | None  # None for a run
    is_part: bool = False  # whether a run is included only because of its study


def write_page(paths: Sequence[Path], output: Path, report: Report = ignore) -> None:
    """Write the page of some runs and studies, finished or not; a study includes its chosen runs."""
    if output.suffix not in ("", ".html", ".htm"):
        raise UsageError(f"{output} must end in .html, the format of the page")
    folders = [list(list_folders(path)) or [path] for path in paths]
    sources = list_sources(chain.from_iterable(folders))
    others = list_others(sources)
    links = {source.path.resolve(): f"#{source.id}" for source in sources}
    parts = []
    for source in sources:
        folder = source.path
        # An ensemble has no recipe.
        is_finished = all((folder / name).is_file() for name in (METRICS_FILE, RECIPE_FILE))
        if is_finished and not any((folder / PREDICTIONS).glob(f"*{TABLE_SUFFIX}")):
            report(f"{folder} has no prediction tables, as in earlier versions; bertkit evaluate {folder} writes them")
        part = describe_study(source, source.study, links) if source.study else describe_run(source, others)
        definition = folder / part["file"]
        parts.append(part | {"source": definition.read_text(encoding="utf-8") if definition.is_file() else ""})
    with as_usage_error(f"the page {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(render(parts, tabulate_parts(parts)), output)
    studies = sum(bool(source.study) for source in sources)
    runs = len(sources) - studies
    counts = [(pluralize(runs, "run"), runs), (pluralize(studies, "study", "studies"), studies)]
    report(f"{' and '.join(words for words, number in counts if number)} in {output}")


# --- The files --------------------------------------------------------------------------------------------------------


def list_sources(paths: Iterable[Path]) -> list[Source]:
    """Return the runs and studies, each once, and after each study its pretrainings and chosen runs."""
    sources: dict[Path, Source] = {}

    def add(path: Path, study: StudyResults | None, is_part: bool = False) -> None:
        number = sum(bool(source.study) == bool(study) for source in sources.values()) + 1
        sources.setdefault(path.resolve(), Source(path, f"{'study' if study else 'run'}-{number}", study, is_part))

    for path in paths:
        if path.name in ("", ".."):  # show the real name of the working directory, or of one above it
            path = path.resolve()
        study = StudyResults.read(path) if (path / STUDY_RESULT).is_file() else None
        if not study and not is_run(path):
            raise UsageError(f"{path} is neither a run nor a study; give the --output of one")
        add(path, study)
        names = []
        if study:
            names += [origin.directory for origin in study.pretrainings]
            names += [winner.run for winner in study.chosen]
        for name in dict.fromkeys(names):
            if is_run(path / name):
                add(path / name, None, is_part=True)
    return list(sources.values())


def list_folders(path: Path) -> Iterator[Path]:
    """Yield a run or a study, or those below a folder; what belongs to one of them is left to it."""
    if is_run(path) or (path / STUDY_RESULT).is_file():
        yield path
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if not child.is_symlink():  # a link may lead in a circle
                yield from list_folders(child)


def list_others(sources: Sequence[Source]) -> dict[Path, list[dict[str, Any]]]:
    """Return, for each run, the metrics of all finished runs with the same recipe except the seed, itself included.

    In a study these are the runs of its cell; otherwise the sources with the same recipe.
    """
    groups: dict[str, list[Path]] = {}
    for path in (source.path for source in sources if not source.study and not source.is_part):
        recipe = read_if_there(read_recipe, path / RECIPE_FILE)
        groups.setdefault(drop_seed(recipe) if recipe else str(path), []).append(path)
    found: dict[Path, list[dict[str, Any]]] = {}
    for group in groups.values():
        metrics = [read_metrics(path / METRICS_FILE) for path in group if (path / METRICS_FILE).is_file()]
        found |= {path.resolve(): metrics for path in group}
    for source in sources:
        for cell in source.study.cells if source.study else []:
            done = [run.metrics for run in cell.runs if run.status == "finished"]
            found |= {(source.path / run.directory).resolve(): done for run in cell.runs}
    return found


def read_if_there(read: Callable[[Path], Any], path: Path) -> Any:
    """Read a file with `read`; return an empty value if it does not exist."""
    return read(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty without the file."""
    return read_if_there(lambda file: read_record(file, dict), path)


# --- A run ------------------------------------------------------------------------------------------------------------


def describe_run(source: Source, others: Mapping[Path, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the page's part on a run; `others` is the result of `list_others`."""
    path, run = source.path, shlex.quote(str(source.path))
    recipe = read_if_there(read_recipe, path / RECIPE_FILE)
    log = [entry for entry in map(keep_numbers, read_log(path)) if "step" in entry] if (path / LOG).is_file() else []
    written = read_if_there(read_metrics, path / METRICS_FILE)
    evaluated = [entry for entry in log if any(key.startswith("eval_") for key in entry)]
    latest = {key.removeprefix("eval_"): value for key, value in evaluated[-1].items()} if evaluated else {}
    metrics = keep_numbers(written) if written else latest
    task, step = TASKS.get(recipe.get("task")), max((entry["step"] for entry in log), default=0)
    limits = {name for key in metrics for name in name_limits(key)}
    rows, summary = [ScoreLine(key, key) for key in metrics if key not in limits], ""
    if task:
        rows, summary = list_shown(task.table, task.metric, metrics), task.name
        if task.metric in metrics:
            summary += f", {find_row(task.table, task.metric).describe(metrics[task.metric])}"
    label = "ours" if written else f"at update {step:,}"
    scores = [tabulate_scores(rows, metrics, label, others.get(path.resolve(), ()))] if rows else []
    labels = [tabulate_labels(metrics, *split) for split in (task.splits.items() if task else ())]
    predicted = read_predictions(path)
    main = find_main(rows, task.metric) if task and rows else None
    figures = [one for split, table in predicted.items() for one in draw_figures(table, split)]
    mistakes, slices = [], None
    for split, table in list(predicted.items())[:1]:  # dev
        mistakes += tabulate_mistakes(table, split)
        if task and "table" in read_facts(table):  # one that another program wrote lacks lengths
            slices = tabulate_slices(table, find_row(task.table, task.metric), split)
    thinned, checked = thin(log), read_object(path / DOCTOR_FILE)
    logged = list_logged(thinned, [LOSS, *([main] if main else []), *(row for row in rows if task and row != main)])
    expected = [describe_expected(checked[EXPECTED])] if EXPECTED in checked else []  # of more rows
    curves = draw_all(trace(thinned, row, metrics) for row in logged)
    return {
        "kind": "run",
        "id": source.id,
        "name": str(path),
        "is_part": source.is_part,
        "state": "" if written else f"unfinished, {pluralize(step, 'update')} so far",
        "summary": summary if written else "unfinished",
        "recipe": recipe,
        "task": task,
        "main": main,
        "metrics": metrics,
        "verdict": describe_verdict(main, metrics, len(next(iter(predicted.values()), ()))) if main else "",
        "bars": list_bars(main, metrics) if main else [],
        "facts": list_facts(path, recipe, log),
        "scores": scores,
        "comments": [*list_advice(task, written), *expected] if task and written else [],
        "curves": curves[:CURVES_SHOWN],
        "more_curves": curves[CURVES_SHOWN:],
        "evaluations": tabulate_evaluations(path, main),
        "data": list_tables(checked) if checked else [],
        "predicted": draw_all([*(one for one in figures if isinstance(one, Plot)), *plot_checked(checked)]),
        "explanations": read_if_there(read_explanations, path / PREDICTIONS / EXPLANATIONS),
        "slices": [slices] if slices else [],
        "tables": [*(one for one in figures if isinstance(one, Table)), *filter(None, labels), *mistakes],
        "file": RECIPE_FILE,
        "command": f"bertkit {task.command} --recipe {run}/recipe.toml --output {run}-again" if task else "",
    }


def list_bars(row: ScoreLine, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of a score and its baselines, the highest first; none if one is negative.

    A bar has a name, a text, and a length and an interval in percent.
    """
    most = max(1.0, *(abs(metrics[key]) for key in (row.key, *row.baselines.values())))
    top = {"fraction": 1.0, "percent": 100.0}.get(row.unit, most)
    limits = [metrics[name] for name in name_limits(row.key) if name in metrics]
    if min([metrics[row.key], *limits, *(metrics[key] for key in row.baselines.values())]) < 0:
        return []

    def scale(value: float) -> float:
        return 100 * min(value / top, 1.0)

    names = {"this run": row.key} | row.baselines
    bars = [
        {"name": name, "value": row.show(metrics[key]), "length": scale(metrics[key]), "is_own": key == row.key}
        for name, key in sorted(names.items(), key=lambda item: -metrics[item[1]])
    ]
    return [bar | ({"limits": [*map(scale, limits)]} if bar["is_own"] and limits else {}) for bar in bars]


def tabulate_evaluations(path: Path, row: ScoreLine | None) -> list[Table]:
    """Return the table of a run's scores on other data, or none."""
    lines = []
    for file in sorted((path / EVALUATIONS).glob(f"*/{METRICS_FILE}")) if row else ():
        metrics = read_metrics(file)
        if row.key in metrics:
            lines.append([file.parent.name, row.show(metrics[row.key]), row.show_interval(metrics)])
    heads = ["data", row.head, INTERVAL] if row else []
    return [make_table("Scores on other data", heads, lines)] if lines else []


def tabulate_parts(parts: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for several finished runs of one task and data: scores, and the settings in which they differ.

    A difference is that to the first run of the task.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for part in parts:
        if part["kind"] == "run" and part["main"] and not part["state"] and not part["is_part"]:
            data = part["recipe"].get("data", {})
            same = (show_toml(data.get(name)) for name in ("dir", "corpus", "text", "label", "objective"))
            groups.setdefault((part["task"].name, part["main"].key, *same), []).append(part)
    return [tabulate_runs_of(name, group) for (name, *_), group in groups.items() if len(group) > 1]


def tabulate_runs_of(name: str, parts: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the runs of one task."""
    recipes = [flatten_recipe(part["recipe"]) for part in parts]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    differing = [key for key in keys if len({show_toml(recipe.get(key)) for recipe in recipes}) > 1][:MOST_SETTINGS]
    row, first = parts[0]["main"], parts[0]["metrics"]
    lines = []
    for part, recipe in zip(parts, recipes, strict=True):
        metrics = part["metrics"]
        gap = metrics[row.key] - first[row.key]
        sign = "-" if gap < 0 else "+"
        shown = "" if part is parts[0] else f"{sign}{row.show(abs(gap))}"
        figures = [row.show(metrics[row.key]), shown, row.show_interval(metrics)]
        settings = [show_toml(recipe.get(key)) for key in differing]
        lines.append([TableCell(((part["name"], ""),), f"#{part['id']}"), *figures, *settings])
    return make_table(f"Runs of {name}", ["run", row.head, "difference to the first", INTERVAL, *differing], lines)


def plot_checked(findings: Mapping[str, Any] | None) -> list[Plot]:
    """Return the plot of what to expect, if the doctor has looked for it."""
    return [plot_expected(findings[EXPECTED])] if findings and "curve" in findings.get(EXPECTED, {}) else []


def keep_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers."""
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def list_facts(path: Path, recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return the facts on a run that its files contain, as names and texts."""
    found, config = read_object(path / ENVIRONMENT), read_object(path / "config.json")
    sizes, options = config or recipe.get("model", {}), recipe.get("data", {})
    words = {"num_hidden_layers": "layer", "hidden_size": "hidden unit", "num_attention_heads": "head"}
    shown = ", ".join(pluralize(sizes[key], word) for key, word in words.items() if key in sizes)
    if config.get("mean_layer"):
        shown += "; the last layer computes the mean over the tokens"
    start = recipe.get("checkpoint") or ("new" if recipe else "")
    data = ", ".join(options.get("corpus", [])) or options.get("dir") or "the Hub’s data set"
    facts = {
        "Task": recipe.get("task", ""),
        "Model": "; ".join(filter(None, (start, shown, *(config.get("architectures") or [])))),
        "Data": data if recipe else "",
        "Training": describe_training(recipe, log) if recipe else "",
        "Date": found.get("date", "").partition("T")[0],
        "Environment": describe_machine(found).replace("`", "") if found else "",
    }
    return [(name, text) for name, text in facts.items() if text]


def describe_training(recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]]) -> str:
    """Describe how the model was trained, and for how long."""
    train, last = recipe["train"], max((entry.get("step", 0) for entry in log), default=0)
    parts = [f"{pluralize(last, 'update')} of {recipe['batch_size']:,} sequences"]
    parts += [f"learning rate {train['learning_rate']:g}"] if "learning_rate" in train else []
    parts += [f"seed {train['seed']}"]
    for entry in [entry for entry in log if "train_runtime" in entry][-1:]:
        since = f" since it was resumed after update {entry['resumed_at']:,}" if "resumed_at" in entry else ""
        parts.append(describe_duration(entry["train_runtime"]) + since)
    return ", ".join(parts)


def read_predictions(path: Path) -> dict[str, pa.Table]:
    """Return the prediction tables with right answers that a run has written, by split: dev is the first."""
    found = {file.stem: read_table(file) for file in sorted((path / PREDICTIONS).glob(f"*{TABLE_SUFFIX}"))}
    labelled = {split: rows for split, rows in found.items() if LABEL in rows.column_names}
    return {split: rows for split, rows in labelled.items() if not read_facts(rows).get("soft")}


def read_explanations(path: Path) -> list[dict[str, Any]]:
    """Read the targets of the first inputs, their coloured words and, in words, the largest attributions."""
    lines = path.read_text(encoding="utf-8").splitlines()[:MOST_EXPLAINED]
    return [
        {
            "target": entry["target"],
            "parts": list(list_parts(entry["words"])),
            "largest": describe_words(entry["words"]),
        }
        for line in lines
        for entry in json.loads(line).get("explanation", [])  # an invalid input has none
    ]


def thin(log: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the log with all evaluations, at most POINTS evenly spaced training entries, and the last one."""
    plain = [number for number, entry in enumerate(log) if "loss" in entry]
    step = math.ceil(len(plain) / POINTS) or 1
    dropped = set(plain) - set(plain[::step]) - set(plain[-1:])
    return [entry for number, entry in enumerate(log) if number not in dropped]


# --- Predictions of classes -------------------------------------------------------------------------------------------


def draw_figures(rows: pa.Table, split: str) -> list[Plot | Table]:
    """Return the plots and tables that a prediction table has the columns for."""
    facts = read_facts(rows)
    names = facts.get("names", [])
    if "strict_found" in rows.column_names:
        found = [tabulate_types(score_types(rows), split)]
        if "scheme" in facts:
            words = (rows.column(name).combine_chunks().flatten().to_pylist() for name in (PREDICTION, LABEL))
            found.append(tabulate_confusion(*(encode_names(each, names) for each in words), names, split))
        return list(filter(None, found))
    if (probabilities := read_probabilities(rows, names)) is None:
        return []
    kind = get_kind(rows)
    answers, labels = (kind.encode(rows.column(name).to_pylist(), names) for name in (PREDICTION, LABEL))
    if kind.has_several:
        return [plot_reliability(probabilities, labels, split)]
    found = [tabulate_confusion(answers, labels, names, split), plot_reliability(probabilities, labels, split)]
    stated = np.append(probabilities, np.zeros((len(rows), 1)), axis=1)[np.arange(len(rows)), answers]
    return [*found, plot_selective(rows, answers == labels, stated, split)]


def tabulate_mistakes(rows: pa.Table, split: str) -> list[Table]:
    """Return the table of the worst mistakes, or none, with marks on the words that differ.

    They are those of two answers that have words, names or several labels, and of two texts that are much alike.
    """
    are_questions, separator = "f1" in rows.column_names, ""
    if are_questions:
        separator = WORD_BORDER
    elif "strict_found" in rows.column_names:
        separator = ", "
    elif get_kind(rows).has_several:
        separator = r" \| "
    lines = []
    for row, *texts, answer, right in show_mistakes(rows, MISTAKES_LISTED):
        part = answer if right == EMPTY_ANSWER else right.partition(" | ")[0]
        shown = [take_excerpt(text, part if are_questions else "") for text in texts]
        if len(texts) == 2 and not are_questions:
            shown = [mark_words(*pair, WORD_BORDER, MOST_MARKED) for pair in zip(shown, reversed(texts), strict=True)]
        answers = [answer, right]
        if separator and EMPTY_ANSWER not in answers:
            answers = [mark_words(answer, right, separator), mark_words(right, answer, separator)]
        lines.append([row, *answers, *shown])
    heads = ["row", "predicted", "true", *read_facts(rows)["texts"]]
    return [make_table(f"Mistakes, {split}, worst first", heads, lines, "text")] if lines else []


def take_excerpt(text: str, part: str = "") -> str:
    """Return about MISTAKE_WIDTH characters of a text, around a part if it has that."""
    start = max(0, text.find(part) - MISTAKE_WIDTH // 2)
    shown = shorten_text(text[start:], MISTAKE_WIDTH)
    return f"…{shown}" if start else shown


def mark_words(text: str, other: str, separator: str, most: float = 1.0) -> TableCell:
    """Return a text in which the words that another text lacks are marked, unless their share is more than `most`."""
    known = {"", *regex.split(separator, other.casefold())}
    words = regex.split(f"({separator})", text)  # words and separators in turn
    parts = [(word, number % 2 == 0 and word.casefold() not in known) for number, word in enumerate(words)]
    marked = sum(is_marked for _, is_marked in parts)
    is_shown = 0 < marked <= most * sum(map(bool, words[::2]))
    return TableCell(((text, ""),), parts=tuple(parts) if is_shown else ())


def plot_selective(rows: pa.Table, right: np.ndarray, probabilities: np.ndarray, split: str) -> Plot:
    """Return the accuracy of the texts with the highest probabilities, over their share of all texts.

    Args:
        rows: A prediction table, perhaps with the answers of a baseline.
        right: (S,) whether each answer is right.
        probabilities: (S,) those of the answers.
    """
    series = [Series("this model", trace_accuracy(right, probabilities), "C0-")]
    if BASELINE in rows.column_names:
        read = rows.filter(pc.is_valid(rows.column(BASELINE)))
        is_right = pc.equal(read.column(BASELINE), read.column(LABEL)).to_numpy()
        points = trace_accuracy(is_right, read_numbers(read, BASELINE_PROBABILITY))
        series.append(Series("best baseline", points, "C1--"))
    title, half = f"Accuracy of the surest answers, {split}", series[0].points[len(series[0].points) // 2]
    words = f"{title}: {half[1]:.1f} % of the surest {half[0]:.0f} %, {100 * right.mean():.1f} % of all"
    return Plot(title, "share answered (%)", series, ylabel="accuracy (%)", words=words)


def trace_accuracy(right: np.ndarray, probabilities: np.ndarray) -> list[tuple[float, float]]:
    """Return points of the share answered and the accuracy, both in percent, where LEAST_ANSWERED texts are answered.

    Texts of equal probability are answered together.
    """
    order = np.argsort(-probabilities, kind="stable")
    counts, means = np.arange(1, len(order) + 1), right[order].cumsum() / np.arange(1, len(order) + 1)
    is_last = np.append(np.diff(probabilities[order]) != 0, True)
    shown = np.flatnonzero(is_last & (counts >= min(LEAST_ANSWERED, len(order))))
    shown = shown[np.unique(np.linspace(0, len(shown) - 1, MOST_POINTS).round().astype(int))]
    return list(zip((100 * counts[shown] / len(order)).tolist(), (100 * means[shown]).tolist(), strict=True))


def tabulate_confusion(answers: np.ndarray, labels: np.ndarray, names: Sequence[str], split: str) -> Table:
    """Return the confusion matrix, with correct labels by row; a cell's shade is its share of the row.

    Beyond the MOST_CONFUSED most frequent labels the others share a row and a column.

    Args:
        answers: (S,) predicted classes.
        labels: (S,) correct classes.
        names: The name of each class.
    """
    counts = np.bincount(labels, minlength=len(names))
    kept = sorted(np.argsort(-counts, kind="stable")[:MOST_CONFUSED].tolist())
    lines_of = np.full(len(names), len(kept))
    lines_of[kept] = np.arange(len(kept))
    shown = [names[label] for label in kept]
    if len(kept) < len(names):
        shown.append("(others)")
    counts = np.zeros((len(shown), len(shown)), int)
    np.add.at(counts, (lines_of[labels], lines_of[answers]), 1)
    lines = []
    for label, row in zip(shown, counts.tolist(), strict=True):
        total = sum(row) or 1
        words = [f"{number / total:.0%}" if len(shown) <= MOST_WITH_SHARES else "" for number in row]
        counted = zip(row, words, strict=True)
        cells = [TableCell(((f"{number:,}", share),), share=number / total) for number, share in counted]
        lines.append([label, *cells])
    caption = f"Confusion matrix, {split}; shades: percent of the true class"
    return make_table(caption, ["true ↓  predicted →", *shown], lines, "matrix")


def plot_reliability(probabilities: np.ndarray, labels: np.ndarray, split: str) -> Plot:
    """Return how often labels of a probability are right: below the diagonal probabilities are too high.

    Args:
        probabilities: (S, L).
        labels: (S,) classes, or (S, L) several labels.
    """
    stated, right, counts = bin_probabilities(probabilities, labels)
    spreads = []  # how far each share's interval reaches below and above it
    for share, number in zip(right, counts.tolist(), strict=True):
        interval = estimate_share_interval(round(share * number), number, 100.0)
        spreads.append((100 * share - interval.low, interval.high - 100 * share))
    lowest = 100 * min(stated.min(), right.min())
    diagonal = Series("as often as stated", [(lowest, lowest), (100, 100)], "C6:")
    curve = Series("this model", list(zip(100 * stated, 100 * right, strict=True)), "C0o--", spreads)
    title, error = f"Reliability, {split}", take_values(measure_calibration(probabilities, labels))["ece"]
    words = f"{title}: calibration error {100 * error:.1f} %; bars are 95 % intervals"
    return Plot(title, "probability (%)", [diagonal, curve], ylabel="how often right (%)", words=words)


# --- A study ----------------------------------------------------------------------------------------------------------


def describe_study(source: Source, study: StudyResults, links: Mapping[Path, str]) -> dict[str, Any]:
    """Return the page's part on a study; `links` has the address of each run on the page."""
    checked = read_object(source.path / DOCTOR_FILE)
    path, size = source.path, tables.describe_size(study).replace(" x ", " × ")
    definition, again = shlex.quote(str(path / STUDY_FILE)), shlex.quote(f"{path}-again")

    def find_link(directory: str) -> str:
        return links.get((path / directory).resolve(), "")

    pretrainings = [tables.tabulate_pretrainings(study, find_link)] if study.pretrainings else []
    grids = plots.tabulate_grids(study, find_link)
    return {
        "kind": "study",
        "id": source.id,
        "name": str(path),
        "state": "" if study.finished else f"unfinished, {study.over} of {study.runs} runs so far",
        "summary": size,
        "scores": [tables.tabulate_summary(study, find_link)],
        "comments": [f"{size}.", tables.explain_scores(study)],
        "note": tables.join_note(study),
        "columns": tables.list_columns(study),
        "data": list_tables(checked) if checked else [],
        "predicted": draw_all([*plot_checked(checked), *plots.list_curves(study)]),
        "tables": [*pretrainings, *grids],
        "shades": f"{plots.SHADES.capitalize()}." if grids else "",
        "details": [*tables.tabulate_cells(study), tabulate_runs(study, find_link)],
        "failures": list(tables.list_failures(study).items()),
        "file": STUDY_FILE,
        "command": f"bertkit study {definition} --output {again}",
    }


def tabulate_runs(study: StudyResults, find_link: Callable[[str], str]) -> Table:
    """Return the table of all runs, with links to those on the page."""
    axes, with_intervals = list(study.definition.get("grid", {})), tables.has_intervals(study)
    lines = []
    for cell in study.cells:
        row = tables.take_score_row(study, cell.column)
        for run in cell.runs:
            name = TableCell(((run.directory, ""),), find_link(run.directory))
            settings = [tables.show_value(cell.setting[axis]) for axis in axes]
            figures = [tables.show_score(row, run.metrics.get(row.key))]
            if with_intervals:
                figures.append(row.show_interval(run.metrics))
            lines.append([name, cell.column, *settings, str(run.seed), run.status, *figures])
    heads = ["run", "column", *tables.name_axes(axes), "seed", "state", "score"]
    if with_intervals:
        heads.append(INTERVAL)
    return make_table("All runs", heads, lines, "quiet")
