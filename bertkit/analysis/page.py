"""Write one HTML page of runs and studies: scores beside the paper's, curves, figures of predictions, recipes to copy.

The page is self-contained: matplotlib draws its pictures as inline SVG, in colours that follow the reader's theme. Each
part is a plain dictionary made from the files of a directory: a run's here, a study's in `study_page.py`. A missing or
unreadable file removes only what depends on it.

A task describes figures of its predictions in files `<split>.figures.json` beside them, each a list of
`{"kind": "matrix", "title", "labels", "counts"}`, with true labels as rows and predicted ones as columns,
`{"kind": "lines", "title", "xlabel", "ylabel", "xs", "lines": {name: ys}, "mark", "marked"}`, where `mark` is an x,
`{"kind": "curves", "title", "xlabel", "ylabel", "curves": {name: {"xs", "ys", "point"}}, "words"}`, where `point` is
an x and y to mark, and
`{"kind": "reliability", "title", "xlabel", "ylabel", "curves": {name: {"xs", "ys", "counts"}}, "words"}` with values in
percent, the first curve in front.
Results of `bertkit predict --explain` are shown if they were written to `explanations.jsonl` beside the predictions.
Predicted entities (`*.conll`, or `*.jsonl` with spans) are scored by type.

Left out: every number that no run has written.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.analysis.doctor import list_tables
from bertkit.analysis.explanation import EXPLANATIONS, describe_words, list_parts
from bertkit.analysis.places import (
    Place,
    find_others,
    keep_numbers,
    list_places,
    read_entries,
    read_json,
    read_object,
    read_part,
    read_text,
)
from bertkit.analysis.slices import tabulate_slices
from bertkit.analysis.study_page import describe_study
from bertkit.data.formats.columns import read_columns
from bertkit.data.formats.entities import SPAN_COLUMNS, find_columns, read_spans
from bertkit.errors import UsageError, explain_refusal
from bertkit.metrics.intervals import find_share_interval
from bertkit.metrics.ner import Entity, find_entities, score_types
from bertkit.reports.html import SERIES, attempt, draw_all, render, show_minus
from bertkit.reports.plots import LOSS, Plot, Series, list_logged, trace
from bertkit.reports.tables import (
    MISSING,
    ScoreRow,
    Table,
    TableCell,
    count,
    find_row,
    list_shown,
    make_table,
    name_limits,
    tabulate_scores,
)
from bertkit.system.files import atomic_write
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.ner_files import PREDICTED_COLUMN
from bertkit.tasks.task import EXAMPLES, FIGURES, Task, repeat_run, shorten_text
from bertkit.training.model_card import describe_machine
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import (
    DOCTOR_FILE,
    ENVIRONMENT,
    LENGTHS_FILE,
    LOG,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    read_metrics,
)
from bertkit.training.scored_rows import ROWS, read_rows

POINTS = 600  # per curve at most, about as many as a screen shows
BARS = 48  # per histogram, at most
MOST_EXPLAINED = 10  # inputs whose explanations are shown
LONGEST_LABEL = 18  # characters in a legend beside the curves
LABEL_SCORES = {  # of each label, in metrics.json -> its column
    "precision": "precision (%)",
    "recall": "recall (%)",
    "f1": "F1 (%)",
    "count": "count",
    "threshold": "threshold",
}


def write_page(sources: Sequence[Path], output: Path, report: Report = ignore) -> None:
    """Write the page of some runs and studies, finished or not; a study includes its chosen runs.

    Raises:
        UsageError: A source is neither a run nor a study, or the page cannot be written.
    """
    if output.suffix not in ("", ".html", ".htm"):
        raise UsageError(f"{output} must end in .html, the format of the page")
    places = list_places(sources)
    if not places:
        raise UsageError("there is nothing to report; give runs or studies")
    links = {place.path.resolve(): f"#{place.id}" for place in places}
    others = find_others(places)
    parts = []
    for place in places:
        part = describe_run(place, others) if place.study is None else describe_study(place, links)
        for note in part["notes"]:
            report(f"{place.path}: {note}")
        parts.append(part)
    page = render(parts)
    with explain_refusal(f"the page {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(page, output)
    counts = [sum(place.study is None for place in places), sum(place.study is not None for place in places)]
    numbers = [count(counts[0], "run"), count(counts[1], "study", "studies")]
    report(f"{' and '.join(words for words, number in zip(numbers, counts, strict=True) if number)} in {output}")


def describe_run(place: Place, others: Mapping[Path, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the page's part on a run; `others` is the result of `find_others`."""
    path, notes = place.path, []
    recipe = read_part(read_recipe, path / RECIPE_FILE, notes) or {}
    log = read_part(read_entries, path / LOG, notes) or []
    written = read_part(read_metrics, path / METRICS_FILE, notes)
    metrics = keep_numbers(written if written is not None else find_latest(log))
    task = attempt(TASKS.get, recipe.get("task"))
    step = max((entry.get("step", 0) for entry in log), default=0)
    limits = {name for key in metrics for name in name_limits(key)}
    untold = [ScoreRow(key, key) for key in metrics if key not in limits]
    rows = list_shown(task.table, task.metric, metrics) if task else untold
    label = "ours" if written is not None else f"at update {step:,}"
    plots, tables = list_figures(path, notes)
    return {
        "kind": "run",
        "id": place.id,
        "name": str(place.path),
        "is_part": place.is_part,
        "state": "" if written is not None else f"unfinished, {count(step, 'update')} so far",
        "summary": describe_score(task, metrics) if written is not None else "unfinished",
        "facts": list_facts(path, recipe, log, notes),
        "scores": [
            *([tabulate_scores(rows, metrics, label, others.get(path.resolve(), []))] if rows else []),
            *(list_labels(task, metrics) if task else []),
        ],
        "comments": getattr(attempt(task.comment, written), "lines", []) if task and written is not None else [],
        "curves": draw_all(f"{place.id}-curve", list_curves(task, log, metrics)),
        "data": attempt(list_tables, read_part(read_object, path / DOCTOR_FILE, notes)) or [],
        "lengths": draw_all(f"{place.id}-length", list_lengths(path, notes)),
        "predicted": draw_all(f"{place.id}-figure", plots),
        "explanations": list(list_explanations(path, notes)),
        "slices": list(list_slices(path, task, notes)),
        "tables": [*tables, *list_types(path, task, notes), *list_examples(path, task, notes)],
        "source": read_part(read_text, path / RECIPE_FILE, notes) or "",
        "file": RECIPE_FILE,
        "command": f"bertkit {task.command} {repeat_run(path, 'again')}" if task else "",
        "notes": notes,
    }


def find_latest(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the scores of the last evaluation in the log."""
    evaluated = [entry for entry in log if any(key.startswith("eval_") for key in entry)]
    return {key.removeprefix("eval_"): value for key, value in evaluated[-1].items()} if evaluated else {}


def describe_score(task: Task | None, metrics: Mapping[str, float]) -> str:
    """Describe a run's score in words."""
    if task is None or task.metric not in metrics:
        return task.name if task else ""
    return f"{task.name}, {find_row(task.table, task.metric).describe(metrics[task.metric])}"


def list_facts(
    path: Path, recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]], notes: list[str]
) -> list[tuple[str, str]]:
    """Return the facts on a run that its files contain, as names and texts."""
    found = read_part(read_object, path / ENVIRONMENT, notes) or {}
    config = read_part(read_object, path / "config.json", notes) or {}
    facts = {
        "Task": recipe.get("task", ""),
        "Model": attempt(describe_model, recipe, config),
        "Data": attempt(describe_data, recipe) if recipe else "",
        "Training": attempt(describe_training, recipe, log) if recipe else "",
        "Date": str(found.get("date", "")).partition("T")[0],
        "Environment": (attempt(describe_machine, found) or "").replace("`", ""),
    }
    return [(name, text) for name, text in facts.items() if text]


def describe_model(recipe: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Describe the model's starting point and its sizes."""
    start = recipe.get("checkpoint") or ("new" if recipe else "")
    sizes = config or recipe.get("model", {})
    words = {"num_hidden_layers": "layer", "hidden_size": "hidden unit", "num_attention_heads": "head"}
    shown = [count(sizes[key], word) for key, word in words.items() if key in sizes]
    head = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    return "; ".join(text for text in (str(start), ", ".join(shown), *head) if text)


def describe_data(recipe: Mapping[str, Any]) -> str:
    """Describe the source of the data."""
    options = recipe.get("data", {})
    return ", ".join(options.get("corpus", [])) or options.get("dir") or "the Hub’s data set"


def describe_training(recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]]) -> str:
    """Describe how the model was trained, and for how long."""
    train, last = recipe["train"], max((entry.get("step", 0) for entry in log), default=0)
    times = [entry for entry in log if "train_runtime" in entry][-1:]
    spent = [describe_duration(entry["train_runtime"]) for entry in times]
    spent += [f"since it was resumed after update {entry['resumed_at']:,}" for entry in times if "resumed_at" in entry]
    parts = [
        f"{count(last, 'update')} of {recipe['batch_size']:,} sequences",
        f"learning rate {train['learning_rate']:g}",
        f"seed {train['seed']}",
        *([" ".join(spent)] if spent else []),
    ]
    return ", ".join(parts)


def list_labels(task: Task, metrics: Mapping[str, float]) -> Iterator[Table]:
    """Yield a table of the scores of each label for each split that has them."""
    for split, pattern in task.splits.items():
        start = pattern.format("count_")
        names = [key.removeprefix(start) for key in metrics if key.startswith(start)]
        scores = [{key: metrics.get(pattern.format(f"{key}_{name}")) for key in LABEL_SCORES} for name in names]
        keys = [key for key in LABEL_SCORES if any(found[key] is not None for found in scores)]
        lines = [
            [shorten_text(name), *(show_label_score(key, found[key]) for key in keys)]
            for name, found in zip(names, scores, strict=True)
        ]
        if lines:
            yield make_table(f"Scores by label, {split}", ["label", *(LABEL_SCORES[key] for key in keys)], lines)


def show_label_score(key: str, value: float | None) -> str:
    """Return a score of a label as the table shows it."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if key == "count" else f"{value:.3f}" if key == "threshold" else f"{100 * value:.1f}"


def list_examples(path: Path, task: Task | None, notes: list[str]) -> Iterator[Table]:
    """Yield the table of example predictions, if the run has written any."""
    text = read_part(read_text, path / PREDICTIONS / EXAMPLES, notes)
    if not text:
        return
    lines = []
    for line in text.splitlines():
        question, _, rest = line.rpartition("  →  ")
        answer, _, right = rest.rpartition("  (")
        lines.append([question, answer, right.removesuffix(")")] if question and answer else [line, "", ""])
    title = task.examples_title if task else Task.examples_title
    yield make_table(title, ["input", "predicted", "true"], lines, "text")


def list_slices(path: Path, task: Task | None, notes: list[str]) -> Iterator[Table]:
    """Yield the table of the slices of the first evaluated split, if the run has written its rows."""
    split = next(iter(task.splits), None) if task else None
    if found := split and read_part(read_rows, path / PREDICTIONS / f"{split}{ROWS}", notes):
        table = attempt(tabulate_slices, found, find_row(task.table, task.metric), split)
        yield from [table] if table else []


def list_explanations(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the explained results of the first inputs, if a file among the predictions has any."""
    yield from read_part(read_explanations, path / PREDICTIONS / EXPLANATIONS, notes) or []


def read_explanations(path: Path) -> list[dict[str, Any]]:
    """Read the targets of the first inputs, their coloured words and, in words, the largest attributions."""
    lines = read_text(path).splitlines()[:MOST_EXPLAINED]
    return [
        {
            "target": entry["target"],
            "parts": list(list_parts(entry["words"])),
            "largest": describe_words(entry["words"]),
        }
        for line in lines
        for entry in json.loads(line).get("explanation", [])  # an invalid input has none
    ]


def list_types(path: Path, task: Task | None, notes: list[str]) -> Iterator[Table]:
    """Yield a table of the scores of each entity type for each split with predicted tags or spans."""
    files = {file.stem: file for file in (path / PREDICTIONS).glob("*.conll")}
    if task and task.pipeline == "token-classification":
        files = {split: path / PREDICTIONS / f"{split}.jsonl" for split in task.splits} | files
    for _, file in sorted(files.items()):
        columns = read_part(read_tags if file.suffix == ".conll" else read_found_spans, file, notes)
        scores = attempt(score_types, *columns) if columns else None
        if scores:
            keys = ("precision", "recall", "f1")
            lines = [[kind, *(f"{100 * found[key]:.1f}" for key in keys)] for kind, found in scores.items()]
            yield make_table(f"Scores by entity type, {file.stem} (%)", ["type", "precision", "recall", "F1"], lines)


def read_tags(path: Path) -> list[list[list[Entity]]]:
    """Read the true and the predicted entities of each sentence of a file in conlleval's format."""
    sentences = [[line.split(" ")[-2:] for line in block.splitlines()] for block in read_text(path).split("\n\n")]
    return [[find_entities([tags[column] for tags in sentence]) for sentence in sentences] for column in (0, 1)]


def read_found_spans(path: Path) -> list[list[list[Entity]]]:
    """Read the true and the predicted spans of each text of a table; nothing from a table without true ones."""
    rows = read_columns(path)
    marked = find_columns(rows.table.column_names)[1]
    if marked not in SPAN_COLUMNS or not any(rows.find(marked, SPAN_COLUMNS).to_pylist()):
        return []
    cells = [rows.find(name, (name,)).to_pylist() for name in (marked, PREDICTED_COLUMN)]
    return [[read_spans(cell, rows.locate(row)) for row, cell in enumerate(column)] for column in cells]


def list_curves(task: Task | None, log: Sequence[Mapping[str, float]], metrics: Mapping[str, float]) -> list[Plot]:
    """Return the plots of the training loss and of every logged score in the task's table."""
    log, rows = thin(log), [LOSS, *(list_shown(task.table, task.metric, metrics) if task else [])]
    return [trace(log, row, metrics) for row in list_logged(log, rows)]


def thin(log: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the log with all evaluations, at most POINTS evenly spaced training entries, and the last one."""
    plain = [place for place, entry in enumerate(log) if "loss" in entry]
    step = math.ceil(len(plain) / POINTS) or 1
    dropped = set(plain) - set(plain[::step]) - set(plain[-1:])
    return [entry for place, entry in enumerate(log) if place not in dropped]


def list_lengths(path: Path, notes: list[str]) -> list[Plot]:
    """Return a histogram of the sequence lengths of each split."""
    found = read_part(read_object, path / LENGTHS_FILE, notes) or {}
    plots = [attempt(plot_lengths, split, lengths) for split, lengths in found.items()]
    return [plot for plot in plots if plot]


def describe_lengths(split: str, found: Mapping[str, Any]) -> str:
    """Describe a histogram of lengths in words."""
    counts = dict(zip(found["lengths"], found["counts"], strict=True))
    total, full = sum(counts.values()), counts.get(found["max_length"], 0)
    mean = sum(length * number for length, number in counts.items()) / total
    many = count(total, "sequence") + (f" of {found['sequences']:,}" if found["sequences"] > total else "")
    room = f"max_length ({found['max_length']:,})"
    cut = f"{full:,} ({full / total:.1%}) reach {room}, at which longer inputs are truncated or split"
    if not full:
        cut = f"none reaches {room}, so none is truncated"
    return f"{split}: {many}, {mean:.1f} tokens on average, at most {max(counts):,}; {cut}"


def plot_lengths(split: str, found: Mapping[str, Any]) -> Plot:
    """Return the histogram of a split's sequence lengths in tokens, with a mark at max_length."""
    most = max(found["max_length"], found["lengths"][-1])
    width = math.ceil(most / BARS)
    heights = Counter[int]()
    for length, number in zip(found["lengths"], found["counts"], strict=True):
        heights[length // width] += number
    bars = [(width * place + (width - 1) / 2, heights[place]) for place in range(most // width + 1)]
    return Plot(
        f"Input lengths, {split}",
        "tokens",
        [Series("", bars, "", width=width)],
        ylabel="sequences",
        marks={"max_length": found["max_length"]},
        words=describe_lengths(split, found),
    )


def list_figures(path: Path, notes: list[str]) -> tuple[list[Plot], list[Table]]:
    """Return the plots and tables that the task has written of its predictions; unknown kinds are skipped."""
    plots, tables = [], []
    for file in sorted((path / PREDICTIONS).glob(f"*{FIGURES}")):
        split = file.name.removesuffix(FIGURES)
        figures = read_part(read_json, file, notes)
        for figure in figures if isinstance(figures, list) else []:
            kind = attempt(lambda figure: figure["kind"], figure)
            if kind == "matrix" and (table := attempt(make_matrix, split, figure)):
                tables.append(table)
            draw = {"lines": plot_lines, "curves": plot_curves, "reliability": plot_reliability}.get(str(kind))
            if draw and (plot := attempt(draw, split, figure)):
                plots.append(plot)
    return plots, tables


def plot_lines(split: str, figure: Mapping[str, Any]) -> Plot:
    """Return the plot of a figure's lines, with a mark on them."""
    xs, mark = figure["xs"], figure["mark"]
    series, values = [], []
    for number, (name, ys) in enumerate(figure["lines"].items()):
        marked = ys[xs.index(mark)]
        values.append(f"{name} {marked:.1f}")
        series += [
            Series(name, list(zip(xs, ys, strict=True)), f"C{number}-"),
            Series("", [(mark, marked)], f"C{number}o"),
        ]
    title, place = f"{figure['title']}, {split}", show_minus(f"{mark:.3f}")
    words = f"{title}: at {figure['marked']}, {figure['xlabel']} = {place}, {', '.join(values)}"
    marks = {figure["marked"]: mark}
    return Plot(title, figure["xlabel"], series, ylabel=figure["ylabel"], marks=marks, words=words)


def plot_curves(split: str, figure: Mapping[str, Any]) -> Plot:
    """Return the plot of a figure's curves, each with its marked point."""
    series = []
    for number, (name, curve) in enumerate(figure["curves"].items()):
        colour, line = f"C{number % len(SERIES)}", "--" if number >= len(SERIES) else "-"
        points = list(zip(curve["xs"], curve["ys"], strict=True))
        label = name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"
        series += [Series(label, points, colour + line), Series("", [curve["point"]], f"{colour}o")]
    title = f"{figure['title']}, {split}"
    words = f"{title}: {figure['words']}"
    return Plot(title, figure["xlabel"], series, ylabel=figure["ylabel"], words=words, has_legend_beside=True)


def plot_reliability(split: str, figure: Mapping[str, Any]) -> Plot:
    """Return a reliability diagram: where a curve is below the diagonal, its probabilities are too high."""
    lowest = min(value for curve in figure["curves"].values() for value in (*curve["xs"], *curve["ys"]))
    series = [Series("as often as stated", [(lowest, lowest), (100, 100)], "k:")]
    for number, (name, curve) in reversed(list(enumerate(figure["curves"].items()))):
        points = list(zip(curve["xs"], curve["ys"], strict=True))
        spreads = [find_reach(share, count) for share, count in zip(curve["ys"], curve["counts"], strict=True)]
        series.append(Series(name, points, f"C{number}o{'--' if number else '-'}", () if number else spreads))
    title = f"{figure['title']}, {split}"
    words = f"{title}: {figure['words']}"
    return Plot(title, figure["xlabel"], series, ylabel=figure["ylabel"], words=words)


def find_reach(percent: float, count: int) -> tuple[float, float]:
    """Return how far the 95 % interval of a share of `count` rows reaches below and above it, all in percent."""
    interval = find_share_interval(round(percent / 100 * count), count, 100.0)
    return percent - interval.low, interval.high - percent


def make_matrix(split: str, figure: Mapping[str, Any]) -> Table:
    """Return the table of a confusion matrix; a cell's shade is its share of the row."""
    lines = []
    for label, row in zip(figure["labels"], figure["counts"], strict=True):
        total = sum(row) or 1
        cells = [TableCell(((f"{number:,}", f"{number / total:.0%}"),), share=number / total) for number in row]
        lines.append([label, *cells])
    return make_table(f"{figure['title']}, {split}", ["true ↓  predicted →", *figure["labels"]], lines, "matrix")
