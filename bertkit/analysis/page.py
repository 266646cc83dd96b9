"""Write one HTML page of runs and studies: scores beside the paper's, curves, figures of predictions, recipes to copy.

The page is self-contained: matplotlib draws its pictures as inline SVG, in colours that follow the reader's theme. Each
part is a plain dictionary made from the files of a directory: a run's here, a study's in `study_page.py`. A missing or
unreadable file removes only what depends on it. Whatever is shown of predictions comes from the prediction tables.

Results of `bertkit predict --explain` are shown if they were written to `explanations.jsonl` beside the predictions.

Left out: every number that no run has written.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from bertkit.analysis.doctor import list_tables
from bertkit.analysis.explanation import EXPLANATIONS, describe_words, list_parts
from bertkit.analysis.figures import draw_figures
from bertkit.analysis.places import (
    Place,
    find_others,
    keep_numbers,
    list_places,
    read_entries,
    read_object,
    read_part,
    read_text,
)
from bertkit.analysis.slices import tabulate_slices
from bertkit.analysis.study_page import describe_study
from bertkit.errors import UsageError, explain_refusal
from bertkit.metrics.table import LABEL, read_facts
from bertkit.reports.html import attempt, draw_all, render
from bertkit.reports.plots import LOSS, Plot, Series, list_logged, trace
from bertkit.reports.tables import (
    ScoreRow,
    Table,
    count,
    find_row,
    list_shown,
    make_table,
    name_limits,
    tabulate_labels,
    tabulate_scores,
)
from bertkit.system.files import atomic_write
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import EXAMPLES, Task, repeat_run
from bertkit.training.model_card import describe_machine
from bertkit.training.predictions import TABLE_SUFFIX, read_table, show_mistakes
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

POINTS = 600  # per curve at most, about as many as a screen shows
BARS = 48  # per histogram, at most
MOST_EXPLAINED = 10  # inputs whose explanations are shown
MISTAKES_LISTED = 10


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
    predicted = read_tables(path, task, written is not None, notes)
    given = ((rows, split, metrics.get("temperature")) for split, rows in predicted.items())
    figures = [figure for one in given for figure in attempt(draw_figures, *one) or []]
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
            *filter(None, (tabulate_labels(metrics, *split) for split in (task.splits.items() if task else ()))),
        ],
        "comments": getattr(attempt(task.comment, written), "lines", []) if task and written is not None else [],
        "curves": draw_all(list_curves(task, log, metrics)),
        "data": attempt(list_tables, read_part(read_object, path / DOCTOR_FILE, notes)) or [],
        "lengths": draw_all(list_lengths(path, notes)),
        "predicted": draw_all([one for one in figures if isinstance(one, Plot)]),
        "explanations": list(list_explanations(path, notes)),
        "slices": list(list_slices(predicted, task)),
        "tables": [
            *(one for one in figures if isinstance(one, Table)),
            *list_mistakes(predicted),
            *list_examples(path, notes),
        ],
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


def read_tables(path: Path, task: Task | None, is_finished: bool, notes: list[str]) -> dict[str, pa.Table]:
    """Return the prediction tables with right answers that a run has written, by split: dev is the first."""
    files = sorted((path / PREDICTIONS).glob(f"*{TABLE_SUFFIX}"))
    if is_finished and task and task.splits and not files:
        notes.append(f"it has no prediction tables, as in earlier versions; bertkit evaluate {path} writes them")
    found = {file.stem: read_part(read_table, file, notes) for file in files}
    return {split: rows for split, rows in found.items() if rows is not None and LABEL in rows.column_names}


def list_mistakes(predicted: Mapping[str, pa.Table]) -> Iterator[Table]:
    """Yield the table of the worst mistakes of the first of some splits."""
    for split, rows in islice(predicted.items(), 1):
        if lines := attempt(show_mistakes, rows, MISTAKES_LISTED):
            heads = ["row", *read_facts(rows)["texts"], "predicted", "true"]
            yield make_table(f"Mistakes, {split}, worst first", heads, lines, "text")


def list_examples(path: Path, notes: list[str]) -> Iterator[Table]:
    """Yield the table of example predictions, which pretraining writes."""
    text = read_part(read_text, path / PREDICTIONS / EXAMPLES, notes)
    if not text:
        return
    lines = []
    for line in text.splitlines():
        question, _, rest = line.rpartition("  →  ")
        answer, _, right = rest.rpartition("  (")
        lines.append([question, answer, right.removesuffix(")")] if question and answer else [line, "", ""])
    yield make_table("Predictions on held-out text", ["input", "predicted", "true"], lines, "text")


def list_slices(predicted: Mapping[str, pa.Table], task: Task | None) -> Iterator[Table]:
    """Yield the table of the slices of the first of some splits, if it has slices."""
    for split, rows in islice(predicted.items(), 1):
        if task and (table := attempt(tabulate_slices, rows, find_row(task.table, task.metric), split)):
            yield table


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
