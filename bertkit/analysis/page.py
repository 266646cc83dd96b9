"""One HTML page of runs and studies: scores beside the paper's, curves, what the predictions show, recipes to copy.

The page needs nothing but itself: its pictures are drawn by matplotlib as SVG inside it, in colours that follow the
reader's theme. A part is a plain dictionary, made here of the files in its directory and laid out by page.html.jinja;
a file that is not there, or cannot be read, costs its own part and no more.

A task says what is to be seen in its predictions by files `<split>.figures.json` among them, each a list of
`{"kind": "matrix", "title", "labels", "counts"}`, right labels down and predicted ones across, and
`{"kind": "lines", "title", "xlabel", "ylabel", "xs", "lines": {name: ys}, "mark", "marked"}`, `mark` being an x.
Predictions in conlleval's form (`*.conll`) are scored by type.

Left out: tables and pictures of a study as such (`bertkit.reports.tables`), and every number that no run has written.
"""

import json
import math
import re
import shlex
import statistics
import tempfile
import warnings
import xml.etree.ElementTree as ET
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import bertkit
from bertkit.data.pretraining.sources import ignore
from bertkit.errors import UsageError, explain_refusal, join_lines
from bertkit.metrics import score_types
from bertkit.reports.tables import (
    AVERAGE,
    MISSING,
    average,
    count,
    describe_size,
    explain_scores,
    find_row,
    find_shown,
    grade_cells,
    has_paper,
    head_column,
    list_columns,
    list_progress,
    load_pyplot,
    name_axes,
    plot_curve,
    plot_log,
    show_mean,
    show_value,
    shows_best,
)
from bertkit.studies.runner import STUDY_FILE, STUDY_RESULT
from bertkit.system.files import write_whole
from bertkit.tasks import TASKS
from bertkit.tasks.task import Report, Row, Task, repeat_run
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import (
    ENVIRONMENT,
    EXAMPLES,
    FIGURES,
    LENGTHS,
    LOG,
    METRICS,
    PREDICTIONS,
    RECIPE,
    read_log,
    read_metrics,
)
from bertkit.training.trainer import describe_duration

TEMPLATE = "page.html.jinja"
POINTS = 600  # of a curve, which is as many as a screen shows
BARS = 48  # of a histogram, at most
SIZE = (4.6, 3.6)  # inches, as `bertkit.reports.tables.plot_log` draws a panel
LINES_SHOWN = 30  # of a list that can be folded; a longer one is
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # which no XML can have
NUMBER = re.compile(r"[-−+]?\d[\d.,:/]*(e[-+]?\d+)?( ± [\d.,]+)?( \(\d+\))?( [†*])*")

# What a plot is drawn with -> what the page colours it with.
COLOURS = {
    "#0d0d01": "var(--c0)",
    "#0d0d02": "var(--c1)",
    "#0d0d03": "var(--c2)",
    "#0d0d04": "var(--c3)",
    "#0d0d05": "var(--c4)",
    "#0d0d06": "var(--c5)",
    "#0d0d07": "var(--muted)",
    "#0d0d08": "var(--line)",
    "#0d0d09": "var(--ink)",
    "#000000": "var(--ink)",
    "#808080": "var(--muted)",  # the greys that `bertkit.reports.tables` draws with
    "#666666": "var(--muted)",
}
SERIES, MUTED, LINE, INK = list(COLOURS)[:6], "#0d0d07", "#0d0d08", "#0d0d09"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.prop_cycle": f"cycler(color={SERIES})",
    "axes.titlesize": 13,
    "font.size": 13,  # three pictures stand side by side, each at two thirds of its size
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bertkit",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}

# What a part of the page has: words, tables (`make_table`), pictures (`draw_all`) and pairs of a name and a text.
EMPTY: dict[str, Any] = {
    "is_part": False,
    "state": "",
    "summary": "",
    "notes": [],
    "facts": [],
    "note": "",
    "scores": [],
    "comments": [],
    "columns": [],
    "curves": [],
    "lengths": [],
    "tables": [],
    "predicted": [],
    "details": [],
    "failures": [],
}


@dataclass(frozen=True)
class Place:
    """A run or a study that has a part of the page.

    name: as it was given. study: what study.json holds, empty if there is none; None for a run. is_part: whether it is
    there because of its study.
    """

    path: Path
    name: str
    id: str
    study: Mapping[str, Any] | None = None
    is_part: bool = False


@dataclass(frozen=True)
class Cell:
    """What stands in a table: lines of a text and the words for it; where it leads; how dark it is, from 0 to 1."""

    lines: tuple[tuple[str, str], ...] = ()
    href: str = ""
    share: float | None = None
    is_chosen: bool = False


def write_page(sources: Sequence[Path], output: Path, report: Report = ignore) -> None:
    """Writes the page of some runs and studies, finished or not; of a study also the runs that it chose.

    Raises:
        UsageError: a source that is neither, or the page cannot be written.
    """
    places = list_places(sources)
    if not places:
        raise UsageError("there is nothing to report; name runs or studies")
    links = {place.path.resolve(): f"#{place.id}" for place in places}
    others = find_others(places)
    parts = []
    for place in places:
        part = describe_run(place, others) if place.study is None else describe_study(place, links)
        for note in part["notes"]:
            report(f"{place.name}: {note}")
        parts.append(part)
    page = render(parts)
    with explain_refusal(f"the page {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, output)
    counts = [sum(place.study is None for place in places), sum(place.study is not None for place in places)]
    report(f"{count(counts[0], 'run')} and {count(counts[1], 'study', 'studies')} in {output}")


def render(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page; whatever is no picture is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = lambda text: b64encode(sha256(text.encode()).digest()).decode()
    template = environment.from_string(files("bertkit.reports").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        parts=parts,
        title=parts[0]["name"] if len(parts) == 1 else "Runs and studies",
        made=f"{datetime.now(UTC):%Y-%m-%d} by bertkit {bertkit.__version__}",
        lines_shown=LINES_SHOWN,
    )


# --- What is shown ----------------------------------------------------------------------------------------------------


def list_places(sources: Sequence[Path]) -> list[Place]:
    """The sources, each once; after a study its pretrainings and the runs that it chose.

    Raises:
        UsageError: a source that is neither run nor study.
    """
    places: dict[Path, Place] = {}

    def add(path: Path, study: Mapping[str, Any] | None = None, is_part: bool = False) -> None:
        number = sum((place.study is None) == (study is None) for place in places.values()) + 1
        name = f"{'run' if study is None else 'study'}-{number}"
        places.setdefault(path.resolve(), Place(path, str(path), name, study, is_part))

    for source in sources:
        if source.name in ("", ".."):  # of the working directory, or of one above it, the name is to be seen
            source = source.resolve()
        if is_run(source):
            add(source)
        elif (source / STUDY_RESULT).is_file() or (source / STUDY_FILE).is_file():
            study = read_part(read_object, source / STUDY_RESULT, []) or {}
            add(source, study)
            found = attempt(list_chosen, study) or []
            for path in (source / directory for directory in found):
                if is_run(path):
                    add(path, is_part=True)
        else:
            raise UsageError(f"{source} is neither a run nor a study; name the --output of one")
    return list(places.values())


def is_run(path: Path) -> bool:
    """Whether a directory holds a run, or an ensemble of them."""
    return (path / RECIPE).is_file() or (path / METRICS).is_file()


def list_chosen(study: Mapping[str, Any]) -> list[str]:
    """The directories of a study's pretrainings and of the runs that it chose."""
    pretrainings = [origin["directory"] for origin in study.get("pretrainings", [])]
    return list(dict.fromkeys([*pretrainings, *(winner["run"] for winner in study.get("chosen", []))]))


def read_part(read: Callable[[Path], Any], path: Path, notes: list[str]) -> Any:
    """What `read` makes of a file; None without one, and, with a note, if it is damaged."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read and is left out ({join_lines(error)[:200]})")
        return None


def attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` makes; None of values that have another form, as files of another version may."""
    try:
        return make(*arguments)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def read_text(path: Path) -> str:
    """The text of a file."""
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return json.loads(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not isinstance(found := read_json(path), dict):
        raise ValueError("no object is in it")
    return found


def read_entries(path: Path) -> list[dict[str, float]]:
    """The numbers in the entries of a training log."""
    return [entry for entry in map(keep_numbers, read_log(path.parent)) if "step" in entry]


def find_others(places: Sequence[Place]) -> dict[Path, list[dict[str, Any]]]:
    """Run -> the metrics of all finished runs that differ from it in their seed alone, it among them.

    In a study these are the runs of its cell; else those of the sources that have the same recipe.
    """
    groups: dict[str, list[Path]] = {}
    for place in places:
        if place.study is None and not place.is_part:
            recipe = read_part(read_recipe, place.path / RECIPE, [])
            groups.setdefault(attempt(drop_seed, recipe) or place.id, []).append(place.path)
    found: dict[Path, list[dict[str, Any]]] = {}
    for group in groups.values():
        metrics = [read_part(read_metrics, path / METRICS, []) for path in group]
        found |= {path.resolve(): [scores for scores in metrics if scores is not None] for path in group}
    for place in places:
        found |= attempt(group_runs, place) or {}
    return found


def group_runs(place: Place) -> dict[Path, list[dict[str, Any]]]:
    """Run of a study -> the metrics of the finished runs of its cell."""
    found = {}
    for cell in (place.study or {}).get("cells", []):
        done = [run["metrics"] for run in cell["runs"] if run["status"] == "finished"]
        found |= {(place.path / run["directory"]).resolve(): done for run in cell["runs"]}
    return found


def drop_seed(recipe: Mapping[str, Any]) -> str:
    """A name that recipes share which differ in their seed alone."""
    return json.dumps(recipe | {"train": {**recipe["train"], "seed": None}}, sort_keys=True, default=str)


# --- A run ------------------------------------------------------------------------------------------------------------


def describe_run(place: Place, others: Mapping[Path, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The part of a run."""
    path, notes = place.path, []
    recipe = read_part(read_recipe, path / RECIPE, notes) or {}
    log = read_part(read_entries, path / LOG, notes) or []
    written = read_part(read_metrics, path / METRICS, notes)
    metrics = keep_numbers(written if written is not None else find_latest(log))
    task = attempt(TASKS.get, recipe.get("task"))
    step = max((entry.get("step", 0) for entry in log), default=0)
    rows = task.list_rows(metrics) if task else [Row(key, key) for key in metrics]
    label = "ours" if written is not None else f"at update {step:,}"
    pictures, tables = list_figures(path, notes)
    return EMPTY | {
        "kind": "run",
        "id": place.id,
        "name": place.name,
        "is_part": place.is_part,
        "state": "" if written is not None else f"unfinished, {count(step, 'update')} so far",
        "summary": describe_score(task, metrics) if written is not None else "unfinished",
        "facts": list_facts(path, recipe, log, notes),
        "scores": [make_scores(rows, metrics, others.get(path.resolve(), []), label)] if rows else [],
        "comments": (attempt(task.comment, metrics) or []) if task and written is not None else [],
        "curves": draw_all(f"{place.id}-curve", list_curves(task, log, metrics)),
        "lengths": draw_all(f"{place.id}-length", list_lengths(path, notes)),
        "predicted": draw_all(f"{place.id}-figure", pictures),
        "tables": [*tables, *list_types(path, notes), *list_examples(path, notes)],
        "source": read_part(read_text, path / RECIPE, notes) or "",
        "file": RECIPE,
        "command": f"bertkit {task.command or task.name} {repeat_run(path, 'again')}" if task else "",
        "notes": notes,
    }


def keep_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are numbers."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if isinstance(value, float) or value.bit_length() < 1000}


def find_latest(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The scores that were logged last."""
    evaluated = [entry for entry in log if any(key.startswith("eval_") for key in entry)]
    return {key.removeprefix("eval_"): value for key, value in evaluated[-1].items()} if evaluated else {}


def make_scores(
    rows: Sequence[Row], metrics: Mapping[str, float], others: Sequence[Mapping[str, Any]], label: str
) -> dict[str, Any]:
    """The table of a run's scores beside those of knowing nothing, of its other seeds, and the paper's."""
    seeds = f"mean ± sd over {len(others)} seeds"
    columns: dict[str, Callable[[Row], list[tuple[str, str]]]] = {
        label: lambda row: [(row.show(metrics[row.key]), "")],
        seeds: lambda row: [(show_spread(row, [scores[row.key] for scores in others if row.key in scores]), "")],
        "the paper": lambda row: [(row.show(value), words) for words, value in row.paper.items()],
        "knowing nothing": lambda row: [(row.show(metrics[key]), words) for words, key in row.baselines.items()],
        "before": lambda row: [(row.show(metrics[key]), "") for key in [f"start_{row.key}"] if key in metrics],
    }
    if len(others) < 2:
        del columns[seeds]
    cells = {head: [Cell(tuple(make(row))) for row in rows] for head, make in columns.items()}
    cells = {head: column for head, column in cells.items() if any(cell.lines for cell in column)}
    names = [row.name + (" (%)" if row.unit else "") for row in rows]
    return make_table("Scores on held-out data", ["", *cells], zip(names, *cells.values(), strict=True), "quiet")


def show_spread(row: Row, values: Sequence[float]) -> str:
    """`mean ± sd (n)` of some scores."""
    if not values:
        return MISSING
    spread = f" ± {row.show(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{row.show(statistics.fmean(values))}{spread} ({len(values)})"


def describe_score(task: Task | None, metrics: Mapping[str, float]) -> str:
    """A run's score in words."""
    if task is None or task.metric not in metrics:
        return task.name if task else ""
    row = task.find_row(task.metric)
    return f"{task.name}, {row.name} {row.show(metrics[row.key])}{' %' if row.unit else ''}"


def list_facts(
    path: Path, recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]], notes: list[str]
) -> list[tuple[str, str]]:
    """What a run is, as far as its files say."""
    found = read_part(read_object, path / ENVIRONMENT, notes) or {}
    config = read_part(read_object, path / "config.json", notes) or {}
    facts = {
        "Task": recipe.get("task", ""),
        "Model": attempt(describe_model, recipe, config),
        "Data": attempt(describe_data, recipe) if recipe else "",
        "Training": attempt(describe_training, recipe, log) if recipe else "",
        "Date": str(found.get("date", "")).partition("T")[0],
        "Hardware": attempt(describe_hardware, found),
        "Versions": attempt(describe_versions, found),
    }
    return [(name, text) for name, text in facts.items() if text]


def describe_model(recipe: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What the model started from, and its sizes."""
    start = recipe.get("checkpoint") or ("new" if recipe else "")
    sizes = config or recipe.get("model", {})
    words = {"num_hidden_layers": "layer", "hidden_size": "hidden unit", "num_attention_heads": "head"}
    shown = [count(sizes[key], word) for key, word in words.items() if key in sizes]
    head = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    return "; ".join(text for text in (str(start), ", ".join(shown), *head) if text)


def describe_data(recipe: Mapping[str, Any]) -> str:
    """Where the data came from."""
    options = recipe.get("data", {})
    return ", ".join(options.get("corpus", [])) or options.get("dir") or "the Hub’s data set"


def describe_training(recipe: Mapping[str, Any], log: Sequence[Mapping[str, float]]) -> str:
    """How it was trained, and for how long."""
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


def describe_hardware(found: Mapping[str, Any]) -> str:
    """The machine of environment.json."""
    machine = ", ".join(found["gpus"]) or f"{found['processor']}, {count(found['threads'], 'thread')}"
    return machine + (f", {found['processes']} processes" if found["processes"] > 1 else "")


def describe_versions(found: Mapping[str, Any]) -> str:
    """The versions of environment.json."""
    commit = found.get("commit") or ""
    changed = " with changes" if commit.endswith("+") else ""
    own = f"bertkit {found['bertkit']}" + (f" ({commit[:10]}{changed})" if commit else "")
    packages = (f"{name} {version}" for name, version in found["packages"].items())
    return ", ".join([own, f"Python {found['python']}", *packages])


def list_examples(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The table of the predictions that a run has left to look at."""
    text = read_part(read_text, path / PREDICTIONS / EXAMPLES, notes)
    if not text:
        return
    lines = []
    for line in text.splitlines():
        question, _, rest = line.rpartition("  →  ")
        answer, _, right = rest.rpartition("  (")
        lines.append([question, answer, right.removesuffix(")")] if question and answer else [line, "", ""])
    yield make_table("Some predictions on held-out data", ["input", "predicted", "true"], lines, "text")


def list_types(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Tables of the scores of each type of entity, a table for each file in conlleval's form."""
    for file in sorted((path / PREDICTIONS).glob("*.conll")):
        columns = read_part(read_tags, file, notes)
        scores = attempt(score_types, *columns) if columns else None
        if scores:
            keys = ("precision", "recall", "f1")
            lines = [[kind, *(f"{100 * found[key]:.1f}" for key in keys)] for kind, found in scores.items()]
            yield make_table(f"Types of entities, {file.stem} (%)", ["type", "precision", "recall", "F1"], lines)


def read_tags(path: Path) -> tuple[list[list[str]], list[list[str]]]:
    """The right and the predicted tags of each sentence of a file in conlleval's form."""
    sentences = [[line.split(" ")[-2:] for line in block.splitlines()] for block in read_text(path).split("\n\n")]
    right, predicted = ([[tags[column] for tags in sentence] for sentence in sentences] for column in (0, 1))
    return right, predicted


# --- Pictures ---------------------------------------------------------------------------------------------------------

Picture = tuple[str, Callable[..., None], tuple[Any, ...]]  # what it shows, in words; the plot; its arguments


def list_curves(task: Task | None, log: Sequence[Mapping[str, float]], metrics: Mapping[str, float]) -> list[Picture]:
    """The loss while training, and every score of the task's table that was logged."""
    pictures: list[Picture] = []
    log = thin(log)
    rows = task.list_rows(metrics) if task else []
    rows = [row for row in rows if any(f"eval_{row.key}" in entry for entry in log)]
    for row in [Row("loss", "loss"), *(row for row in rows if row.key != "loss")]:
        key = "loss" if row.key == "loss" else f"eval_{row.key}"
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            (first, start), (last, end) = points[0], points[-1]
            label = f"{row.name} while training: {row.show(start)} at update {first:,}, {row.show(end)} at {last:,}"
            pictures.append((label, plot_log, (log, [row], metrics)))
    return pictures


def thin(log: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The log with all evaluations and at most POINTS of the other entries, evenly spread."""
    plain = [place for place, entry in enumerate(log) if "loss" in entry]
    step = math.ceil(len(plain) / POINTS) or 1
    dropped = set(plain) - set(plain[::step]) - set(plain[-1:])
    return [entry for place, entry in enumerate(log) if place not in dropped]


def list_lengths(path: Path, notes: list[str]) -> Iterator[Picture]:
    """How long the sequences of each split are."""
    for split, found in (read_part(read_object, path / LENGTHS, notes) or {}).items():
        if label := attempt(describe_lengths, split, found):
            yield label, plot_lengths, (split, found)


def describe_lengths(split: str, found: Mapping[str, Any]) -> str:
    """What a histogram of lengths shows, in words."""
    counts = dict(zip(found["lengths"], found["counts"], strict=True))
    total, full = sum(counts.values()), counts.get(found["max_length"], 0)
    mean = sum(length * number for length, number in counts.items()) / total
    many = count(total, "sequence") + (f" of {found['sequences']:,}" if found["sequences"] > total else "")
    room = f"max_length, {found['max_length']:,}"
    cut = f"{full:,} ({full / total:.1%}) fill {room}: of these, what was longer is cut or divided"
    if not full:
        cut = f"none fills {room}, so none is cut there"
    return f"{split}: {many}, {mean:.1f} tokens on average, {max(counts):,} in the longest; {cut}"


def plot_lengths(split: str, found: Mapping[str, Any], path: Path) -> None:
    """Draws how many sequences have how many tokens, and the most that they may have."""
    pyplot = load_pyplot()
    most = max(found["max_length"], found["lengths"][-1])
    width = math.ceil(most / BARS)
    figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
    edges = [edge + 0.5 for edge in range(-1, most + width, width)]
    axis.hist(found["lengths"], bins=edges, weights=found["counts"], color="C0", rwidth=0.9)
    axis.axvline(found["max_length"], color=MUTED, linestyle="--", linewidth=1, label="max_length")
    finish_plot(figure, axis, f"Length of the inputs, {split}", "tokens", "sequences", path)


def plot_lines(split: str, found: Mapping[str, Any], path: Path) -> None:
    """Draws the lines of a figure, and a mark on them."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
    for number, (name, ys) in enumerate(found["lines"].items()):
        axis.plot(found["xs"], ys, color=f"C{number}", label=name, linewidth=1.4)
        marked = [(x, y) for x, y in zip(found["xs"], ys, strict=True) if x == found["mark"]]
        axis.plot(*zip(*marked, strict=True), "o", color=f"C{number}", markersize=5)
    axis.axvline(found["mark"], color=MUTED, linestyle="--", linewidth=1, label=found["marked"])
    finish_plot(figure, axis, f"{found['title']}, {split}", found["xlabel"], found["ylabel"], path)


def finish_plot(figure: Any, axis: Any, title: str, xlabel: str, ylabel: str, path: Path) -> None:
    """Writes a plot, with its words."""
    pyplot = load_pyplot()
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def list_figures(path: Path, notes: list[str]) -> tuple[list[Picture], list[dict[str, Any]]]:
    """The pictures and the tables that the task has left of its predictions; those of an unknown kind are left out."""
    pictures, tables = [], []
    for file in sorted((path / PREDICTIONS).glob(f"*{FIGURES}")):
        split = file.name.removesuffix(FIGURES)
        figures = read_part(read_json, file, notes)
        for figure in figures if isinstance(figures, list) else []:
            kind = attempt(lambda figure: figure["kind"], figure)
            if kind == "matrix" and (table := attempt(make_matrix, split, figure)):
                tables.append(table)
            if kind == "lines" and (label := attempt(describe_lines, split, figure)):
                pictures.append((label, plot_lines, (split, figure)))
    return pictures, tables


def describe_lines(split: str, figure: Mapping[str, Any]) -> str:
    """What lines show, in words."""
    place = figure["xs"].index(figure["mark"])
    values = ", ".join(f"{name} {ys[place]:.1f}" for name, ys in figure["lines"].items())
    mark = show_minus(f"{figure['mark']:.3f}")
    return f"{figure['title']}, {split}: at {figure['marked']}, {figure['xlabel']} = {mark}, {values}"


def make_matrix(split: str, figure: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a confusion matrix; a cell's shade is its share of the row."""
    lines = []
    for label, row in zip(figure["labels"], figure["counts"], strict=True):
        total = sum(row) or 1
        cells = [Cell(((f"{number:,}", f"{number / total:.0%}"),), share=number / total) for number in row]
        lines.append([label, *cells])
    return make_table(f"{figure['title']}, {split}", ["true ↓  predicted →", *figure["labels"]], lines, "matrix")


def draw_all(prefix: str, pictures: Iterable[Picture]) -> list[dict[str, Any]]:
    """The pictures that could be drawn, with what they show in words."""
    drawn = [(label, draw(f"{prefix}-{number}-", *rest)) for number, (label, *rest) in enumerate(pictures)]
    return [{"label": label, "svg": svg} for label, svg in drawn if svg]


def draw(prefix: str, plot: Callable[..., None], arguments: Sequence[Any]) -> str | None:
    """The SVG of a plot, its ids beginning with `prefix`; None if there was nothing to draw."""
    context = load_pyplot().rc_context(STYLE)
    with tempfile.TemporaryDirectory() as folder, context, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: the page's font is another
        path = Path(folder) / "picture.svg"
        attempt(plot, *arguments, path)
        return clean(path.read_text(encoding="utf-8"), prefix) if path.exists() else None


def clean(svg: str, prefix: str) -> str:
    """A picture fit to stand in a page: no names of its own but those used in it, colours of the page, no address."""
    root = ET.fromstring(CONTROLS.sub("", svg))
    for parent in root.iter():
        for child in [child for child in parent if child.tag.rpartition("}")[2] in ("metadata", "style")]:
            parent.remove(child)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        values = {name.rpartition("}")[2]: value for name, value in element.items()}
        if values.get("id") not in used:
            values.pop("id", None)
        element.attrib.clear()
        element.attrib.update({name: adapt(name, value, prefix) for name, value in values.items()})
    width, height = root.get("viewBox").split()[2:]
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    # As wide as it was drawn, or narrower; pt -> px.
    root.attrib |= {"aria-hidden": "true", "style": f"max-width: {float(width) * 4 / 3:.0f}px"}
    root.attrib["viewBox"] = f"0 0 {float(width):g} {float(height):g}"
    return ET.tostring(root, encoding="unicode")


def adapt(name: str, value: str, prefix: str) -> str:
    """The value of an attribute in the page's names and colours."""
    if name == "id":
        return prefix + value
    if name == "href":
        return value.replace("#", f"#{prefix}", 1)
    value = value.replace("url(#", f"url(#{prefix}")
    if name == "style":
        value = re.sub("#[0-9a-f]{6}", lambda found: COLOURS.get(found[0], found[0]), value)
        # Of a font the size alone: the family is the page's. Older matplotlibs write both in one.
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
    return value


# --- A study ----------------------------------------------------------------------------------------------------------


def describe_study(place: Place, links: Mapping[Path, str]) -> dict[str, Any]:
    """The part of a study."""
    path, study, notes = place.path, place.study or {}, []
    read_part(read_object, path / STUDY_RESULT, notes)
    made = attempt(make_study_tables, path, study, links)
    if made is None and not notes:
        notes.append(f"{STUDY_RESULT} has another form than this version of bertkit writes; its tables are left out")
    definition, again = shlex.quote(str(path / STUDY_FILE)), shlex.quote(f"{path}-again")
    words = {
        "kind": "study",
        "id": place.id,
        "name": place.name,
        "predicted": draw_all(f"{place.id}-figure", attempt(list_study_pictures, study) or []),
        "source": read_part(read_text, path / STUDY_FILE, notes) or "",
        "file": STUDY_FILE,
        "command": f"bertkit study {definition} --output {again}",
        "notes": notes,
    }
    return EMPTY | words | (made or {})


def make_study_tables(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """The words and the tables of a study."""
    size = describe_size(study).replace(" x ", " × ")
    heads, lines = list_progress(study, limit=study["runs"] + len(study["cells"]))
    runs = [*study["pretrainings"], *(run for cell in study["cells"] for run in cell["runs"])]
    failures = {run["directory"]: run["failure"] for run in runs if run["status"] == "failed"}
    chosen = " (* chosen)" if study["chosen"] else ""
    return {
        "summary": size,
        "state": "" if study["finished"] else f"unfinished, {study['over']} of {study['runs']} runs so far",
        "comments": [f"{size}.", explain_scores(study).replace("bold below", "outlined below")],
        "note": " ".join(study["definition"].get("note", "").split()),
        "scores": [make_summary(path, study, links)],
        "columns": [] if all(c["short"] for c in study["columns"].values()) else list_columns(study),
        "tables": [
            *([make_pretrainings(path, study, links)] if study["pretrainings"] else []),
            *make_heatmaps(path, study, links),
        ],
        "details": [
            make_table(f"Every cell{chosen}", [*heads[:-1], "state"], lines, "quiet"),
            make_runs(path, study, links),
        ],
        "failures": list(failures.items()),
    }


def make_summary(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """The table like the paper's: rows by columns; in each cell ours, the paper's, and the best run of several."""
    averaged = study["definition"].get("average", [])
    columns, lines = {name: find_row(study, name) for name in study["columns"]}, []
    for name, own in study["rows"].items():
        found = find_shown(study, name)
        shown = {column: found.get(column, (None, None)) for column in columns}
        cells = [make_shown(path, study, column, *pair, own, links) for column, pair in shown.items()]
        for mean in average(columns, found, averaged):
            published = [(str(own["paper"][AVERAGE]), "the paper")] if AVERAGE in own["paper"] else []
            cells.append(Cell(((mean, ""), *published)))
        lines.append([name or "ours", *cells])
    if not has_paper(study):
        for label in dict.fromkeys(label for row in columns.values() for label in row.paper):
            values = [row.show(row.paper[label]) if label in row.paper else MISSING for row in columns.values()]
            lines.append([f"published: {label}", *values, *[MISSING] * bool(averaged)])
    heads = [head_column(study, name) for name in study["columns"]]
    return make_table("Scores", ["", *heads, *[AVERAGE] * bool(averaged)], lines, "quiet")


def make_shown(
    path: Path,
    study: Mapping[str, Any],
    column: str,
    cell: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    own: Mapping[str, Any],
    links: Mapping[Path, str],
) -> Cell:
    """A cell of the table like the paper's."""
    row = find_row(study, column)
    mean, _, rest = (show_mean(row, cell) if cell else MISSING).partition(" ")
    lines = [(mean, rest)]
    if column in own["paper"]:
        lines.append((str(own["paper"][column]), "the paper"))
    if shows_best(study) and winner and winner["of_runs"] > 1 and winner["value"] is not None:
        lines.append((row.show(winner["value"]), f"best of {winner['of_runs']}"))
    run = winner["run"] if winner else cell["runs"][0]["directory"] if cell else ""
    return Cell(tuple(lines), links.get((path / run).resolve(), "") if run else "")


def make_pretrainings(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """The table of the pretrainings' own scores."""
    units = {score["name"]: score["unit"] for origin in study["pretrainings"] for score in origin["scores"]}
    lines = []
    for origin in study["pretrainings"]:
        shown = {score["name"]: Row("", "", unit=score["unit"]).show(score["value"]) for score in origin["scores"]}
        updates = f"{origin['metrics']['updates']:,}" if origin["status"] == "finished" else origin["status"]
        name = Cell(((origin["directory"], ""),), links.get((path / origin["directory"]).resolve(), ""))
        rows = "; ".join(row for row in origin["rows"] if row) or "ours"
        lines.append([name, rows, updates, *(shown.get(score, MISSING) for score in units)])
    heads = [f"{name} (%)" if unit else name for name, unit in units.items()]
    return make_table("Pretraining, on held-out text", ["pretraining", "of", "updates", *heads], lines)


def make_runs(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """The table of every run, with links to those on the page."""
    axes = list(study["definition"].get("grid", {}))
    lines = []
    for cell in study["cells"]:
        row = find_row(study, cell["column"])
        for run in cell["runs"]:
            value = run.get("metrics", {}).get(row.key)
            settings = [show_value(cell["setting"][axis]) for axis in axes]
            name = Cell(((run["directory"], ""),), links.get((path / run["directory"]).resolve(), ""))
            score = MISSING if value is None else row.show(value)
            lines.append([name, cell["column"], *settings, str(run["seed"]), run["status"], score])
    return make_table("Every run", ["run", "column", *name_axes(axes), "seed", "state", "score"], lines, "quiet")


def make_heatmaps(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> list[dict[str, Any]]:
    """The heat map of each row and column of a grid: the learning rate, or else the first axis, goes across."""
    axes = list(study["definition"].get("grid", {}))
    if not axes:
        return []
    first = "train.learning_rate" if "train.learning_rate" in axes else axes[0]
    names = dict(zip(axes, name_axes(axes), strict=True))
    groups = dict.fromkeys((cell["row"], cell["column"]) for cell in study["cells"] if not cell["borrowed"])
    tables = []
    for group in groups:
        squares: dict[str, dict[str, Mapping[str, Any]]] = {}
        for cell in study["cells"]:
            if (cell["row"], cell["column"]) == group:
                down = ", ".join(f"{names[axis]} {show_value(cell['setting'][axis])}" for axis in axes if axis != first)
                squares.setdefault(down, {})[show_value(cell["setting"][first])] = cell
        across = list(dict.fromkeys(value for line in squares.values() for value in line))
        shades = grade_cells(study, [cell for line in squares.values() for cell in line.values()])
        best = find_shown(study, group[0]).get(group[1], (None, None))[1]
        lines = [
            [down, *(make_square(study, line.get(value), shades, best, path, links) for value in across)]
            for down, line in squares.items()
        ]
        title = head_column(study, group[1]) + (f", {group[0]}" if group[0] else "")
        tables.append(make_table(f"Grid: {title}", [f"{names[first]} →", *across], lines, "matrix"))
    return tables


def make_square(
    study: Mapping[str, Any],
    cell: Mapping[str, Any] | None,
    shades: Mapping[str, float],
    best: Mapping[str, Any] | None,
    path: Path,
    links: Mapping[Path, str],
) -> Cell:
    """A square of a heat map; the chosen one leads to its best run."""
    if cell is None:
        return Cell(((MISSING, ""),))
    mean, _, rest = show_mean(find_row(study, cell["column"]), cell).partition(" ")
    lost = [("", f"{cell['failed']} failed")] if cell["failed"] and cell["n"] else []
    is_chosen = best is not None and best["cell"] == cell["directory"]
    link = links.get((path / best["run"]).resolve(), "") if best and is_chosen else ""
    return Cell(((mean, rest), *lost), link, shades.get(cell["directory"]), is_chosen)


def list_study_pictures(study: Mapping[str, Any]) -> list[Picture]:
    """A curve for each column, if rows start from steps of a pretraining."""
    return [
        (
            f"{head_column(study, name)} over the updates of the pretraining",
            plot_curve,
            ({**study, "columns": {name: column}},),
        )
        for name, column in study["columns"].items()
    ]


# --- Tables -----------------------------------------------------------------------------------------------------------


def make_table(caption: str, heads: Sequence[str], lines: Iterable[Sequence[str | Cell]], kind: str = "") -> Any:
    """A table; a text stands for a cell of one line.

    A column of which most lines are numbers is one of numbers; it may have words beside them.

    kind: "quiet", whose caption only a screen reader says, "matrix", "text", or none of these.
    """
    rows = [[cell if isinstance(cell, Cell) else Cell(((cell, ""),)) for cell in line] for line in lines]
    rows = [[replace(cell, lines=tuple((show_minus(a), b) for a, b in cell.lines)) for cell in row] for row in rows]
    columns = []
    for place, head in enumerate(heads):
        found = [line for row in rows for line in row[place].lines if line[0] not in ("", MISSING)]
        numbers = sum(NUMBER.fullmatch(text) is not None for text, _ in found)
        style = ("worded" if any(words for _, words in found) else "number") if 2 * numbers > len(found) else ""
        columns.append({"head": head, "style": style if place else ""})
    return {"caption": caption, "kind": kind, "columns": columns, "rows": rows}


def show_minus(text: str) -> str:
    """A number with a minus sign instead of a hyphen."""
    return text.replace("-", "−", 1) if text.startswith("-") and NUMBER.fullmatch(text) else text
