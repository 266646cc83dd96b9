"""Compare methods on the rows that their prediction tables have in common, matched by key, and say which differ.

A method is a run, or several runs whose recipes differ only in their seed: those of a study's cell, or runs given one
by one. A table of another program is a method as well. Each method is compared with the first; the p-values are
corrected for the number of comparisons. The statistics are in `bertkit.metrics.intervals`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit.errors import UsageError, pluralize
from bertkit.metrics import intervals
from bertkit.metrics.intervals import LEVEL, POWER, Contrast
from bertkit.metrics.rows import WeightedScore
from bertkit.metrics.table import LABEL, add_facts, list_names, read_facts
from bertkit.reports.tables import Table, find_row, make_table
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.kinds import get_kind
from bertkit.tasks.task import Task, shorten_text
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import GROUP, KEY, TABLE_SUFFIX, format_cells, read_table
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, RECIPE_FILE
from bertkit.training.study_results import STUDY_RESULT, StudyResults

UNDECIDED_VERDICT = "no clear difference"
MOST_ROWS = 10  # shown of the rows on which methods differ, over all comparisons
MOST_TEXTS = 2  # shown of a row
SMALLEST = 1e-9  # points; a smaller difference is that of rounding
COUNT_COLUMNS = ("em", "strict_found")  # answers and tags are scored by them instead of labels


@dataclass(frozen=True, eq=False)
class Method:
    """A method of a task with the prediction tables of its runs."""

    name: str
    task: Task
    runs: Sequence[pa.Table]

    @cached_property
    def scores(self) -> list[WeightedScore]:
        """Return the task's metric of each run."""
        try:
            return [self.task.score(rows)[self.task.metric] for rows in self.runs]
        except KeyError:
            raise UsageError(
                f"{self.name} lacks what {self.task.name} is scored by; give runs, or score its answers: bertkit score"
            ) from None

    @cached_property
    def answers(self) -> list[tuple[str, ...]]:
        """Return the answers of all runs to each row."""
        return list(zip(*map(format_cells, self.runs), strict=True))

    def name_metric(self) -> str:
        """Return the name of the metric, that of the score that it is equal to if it has none of its own."""
        scores = self.task.score(self.runs[0])
        key = next(name for name, score in scores.items() if score is scores[self.task.metric])
        return find_row(self.task.table, key).name

    def describe(self) -> str:
        """Return its name, with the number of seeds if there are several."""
        return f"{self.name} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.name

    def rate(self) -> np.ndarray:
        """Return the points of each run."""
        return np.array([score.points * score.score(np.ones((1, len(score))))[0] for score in self.scores])

    def judge_rows(self) -> np.ndarray:
        """Return (S,) how right each row is, on average over the runs."""
        return np.mean([score.judge_rows() for score in self.scores], axis=0)


@dataclass(frozen=True)
class MethodComparison:
    """A method compared with the first of its task."""

    first: Method
    second: Method
    contrast: Contrast
    left_out: int  # the number of rows that are not in all runs of the task
    p: float  # the p-value, corrected for the number of `comparisons`
    comparisons: int

    @property
    def verdict(self) -> str:
        """Return "better" or "worse" of the second method, or neither."""
        if self.p > 1 - LEVEL:
            return UNDECIDED_VERDICT
        return "better" if self.contrast.value > 0 else "worse"

    @property
    def mcnemar(self) -> float | None:
        """Return the p-value of McNemar's test of two single runs; None if rows may be partly right."""
        right = np.stack([self.first.judge_rows(), self.second.judge_rows()])
        is_classified = len(self.first.runs) == len(self.second.runs) == 1 and np.isin(right, (0, 1)).all()
        return intervals.compute_mcnemar(*(right == 1)) if is_classified else None

    def estimate(self) -> float | None:
        """Return what would be enough, as `estimate_factor`; None if the difference is clear, or there is none."""
        if self.verdict != UNDECIDED_VERDICT or abs(self.contrast.value) < SMALLEST:
            return None
        return intervals.estimate_factor(self.contrast, self.comparisons)

    def describe(self) -> str:
        """Return the verdict with what it rests on, or what would decide it."""
        said = f"{self.verdict} with {pluralize(self.contrast.rows, 'row')}"
        if self.verdict != UNDECIDED_VERDICT:
            return said
        if (factor := self.estimate()) is None:
            return f"{said}: the scores are equal"
        seeds = "" if self.contrast.seed_error is None else " and seeds"
        return f"{said}; about {factor:,.1f} times as many rows{seeds} would be enough"

    def list_differing(self) -> list[dict[str, Any]]:
        """Return the rows with different answers, first those on which one method is right and the other wrong."""
        rows = self.first.runs[0]
        gaps = np.abs(self.second.judge_rows() - self.first.judge_rows())
        differs = [set(one) != set(two) for one, two in zip(self.first.answers, self.second.answers, strict=True)]
        numbers = np.flatnonzero(differs | (gaps > 0))
        texts, right = [rows.column(name) for name in read_facts(rows)["texts"]], format_cells(rows, LABEL)
        return [
            {
                "texts": [column[row].as_py() for column in texts],
                "right": right[row],
                "first": self.first.answers[row],
                "second": self.second.answers[row],
            }
            for row in numbers[np.argsort(-gaps[numbers], kind="stable")].tolist()
        ]


def compare(sources: Sequence[Path], split: str | None = None, report: Report = ignore) -> list[MethodComparison]:
    """Compare runs, studies or prediction tables, each method with the first one of its task.

    Args:
        split: The split of runs; None: the first one that is scored.
    """
    groups: dict[str, list[Method]] = {}
    for method in read_methods(sources, split):
        groups.setdefault(method.task.name, []).append(method)
    for name in [name for name, group in groups.items() if len(group) < 2]:
        report(f"{groups.pop(name)[0].name}: nothing else to compare with for {name}, skipping")
    if not groups:
        raise UsageError("there is only one method of each task; give two or more runs or studies of one task")
    pairs = [pair for group in groups.values() for pair in match(group)]
    adjusted = intervals.adjust_p_values([contrast.p for _, _, contrast, _ in pairs])
    return [MethodComparison(*pair, p, len(pairs)) for pair, p in zip(pairs, adjusted, strict=True)]


def match(group: Sequence[Method]) -> Iterator[tuple[Method, Method, Contrast, int]]:
    """Yield the first method with each other one, their difference on common rows, and how many are left out."""
    tables = [rows for method in group for rows in method.runs]
    columns = [rows.column(KEY).to_numpy() for rows in tables]
    keys = columns[0][np.isin(columns[0], reduce(np.intersect1d, columns))]
    both = f"{group[0].name} and {group[-1].name}"
    if not len(keys):
        raise UsageError(
            f"{both} have no row in common, which are equal texts with equal right answers; give runs that were "
            "scored on the same data"
        )
    names = unite_names(tables)
    first, *others = (Method(one.name, one.task, [align(rows, keys, names) for rows in one.runs]) for one in group)
    if len({(score.rate, score.rows.shape[1:]) for method in (first, *others) for score in method.scores}) > 1:
        raise UsageError(f"{both} have answers of different kinds; give only classes, or only numbers")
    if len({score.row_weights is None for method in (first, *others) for score in method.scores}) > 1:
        raise UsageError(f"{both} differ in data.weighted_scores; evaluate both with the same weights")
    groups = align(next((rows for rows in tables if "task" in read_facts(rows)), tables[0]), keys, ()).column(GROUP)
    for other in others:
        contrast = intervals.compare_methods(first.scores, other.scores, groups.to_pylist())
        yield first, other, contrast, len(reduce(np.union1d, columns)) - len(keys)


def unite_names(tables: Sequence[pa.Table]) -> list[str]:
    """Return the classes as the runs know them, or of all tables without a run; none for numbers, answers and tags."""
    if any(not get_kind(rows).has_names or set(COUNT_COLUMNS) & set(rows.column_names) for rows in tables):
        return []
    runs = [rows for rows in tables if "task" in read_facts(rows)]
    return list(dict.fromkeys(name for rows in runs or tables for name in list_names(rows)))


def align(rows: pa.Table, keys: np.ndarray, names: Sequence[str]) -> pa.Table:
    """Return the rows that have these keys, in their order, and the names of all classes if there are some."""
    own = rows.column(KEY).to_numpy()
    order = np.argsort(own)
    taken = rows.take(pa.array(order[np.searchsorted(own[order], keys)]))
    # Thresholds belong to the labels in their first order.
    return add_facts(taken, names=names, decided={}) if names else taken


# --- Runs, studies and tables -----------------------------------------------------------------------------------------


def read_methods(sources: Sequence[Path], split: str | None) -> list[Method]:
    """Return the methods of runs, studies and tables; runs whose recipes differ only in the seed are one method.

    If this leaves a single method, each run is one. A table of another program belongs to the task of the first run.
    """
    named: dict[str, tuple[str, list[Path]]] = {}
    for source in sources:
        for name, paths in list_runs(source):
            is_lone = len(paths) == 1 and paths[0].is_dir()
            key = drop_seed(read_recipe(paths[0] / RECIPE_FILE)) if is_lone else name
            named.setdefault(key, (name, []))[1].extend(paths)
    found = list(named.values())
    if len(found) == 1:
        found = [(str(path), [path]) for path in found[0][1]]
    for _, paths in found:
        if len(paths) > 1 and len({str(read_recipe(path / RECIPE_FILE)) for path in paths}) < len(paths):
            raise UsageError(f"two of {', '.join(map(str, paths))} have the same recipe and seed; give one of the two")
    tables = read_tables([path for _, paths in found for path in paths], split)
    tasks = {path: read_facts(rows).get("task") for path, rows in tables.items()}
    usual = next(filter(None, tasks.values()), CLASSIFICATION.name)
    return [Method(name, TASKS[tasks[paths[0]] or usual], [tables[path] for path in paths]) for name, paths in found]


def list_runs(source: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the finished runs of each cell of a study, or of the run or table itself."""
    tables = sorted((source / PREDICTIONS).glob(f"*{TABLE_SUFFIX}"))
    if source.is_file():
        yield str(source), [source]
    elif len(tables) == 1 and not (source / RECIPE_FILE).is_file():
        yield str(source), tables  # an evaluation
    elif is_run(source):
        if not (source / METRICS_FILE).is_file() or not (source / RECIPE_FILE).is_file():
            raise UsageError(f"{source} is not a finished run; repeat its command to continue it")
        yield str(source), [source]
    elif (source / STUDY_RESULT).is_file():
        for cell in StudyResults.read(source).cells:
            paths = [source / run.directory for run in cell.runs if run.status == "finished"]
            # A pretraining has no task to compare by, and an ensemble no recipe.
            if paths and (paths[0] / RECIPE_FILE).is_file() and read_task(paths[0]) is not None:
                yield str(paths[0].parent if len(cell.runs) > 1 else paths[0]), paths
    else:
        raise UsageError(f"{source} is neither a run nor a study; give --output directories, or tables")


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run, or an ensemble of runs."""
    return (path / RECIPE_FILE).is_file() or (path / METRICS_FILE).is_file()


def drop_seed(recipe: Mapping[str, Any]) -> str:
    """Return a key that is equal for recipes that differ only in their seed."""
    return json.dumps({**recipe, "train": {**recipe["train"], "seed": None}}, sort_keys=True)


def read_task(run: Path) -> Task | None:
    """Return the task of a run; None if its rows are not scored, as in pretraining."""
    task = TASKS.get(str(read_recipe(run / RECIPE_FILE).get("task")))
    return task if task is not None and task.metric and not task.lower_is_better else None


def read_tables(paths: Sequence[Path], split: str | None) -> dict[Path, pa.Table]:
    """Read the tables of runs and of other programs: their keys are made of the texts of the first run.

    Without a run, keys are made of the columns that all tables have.
    """
    tables = {path: read_table(path) if path.is_file() else read_run(path, split) for path in paths}
    facts = [read_facts(rows) for rows in tables.values()]
    run = next((own for own in facts if "task" in own), None)
    texts = run["texts"] if run else [name for name in facts[0]["texts"] if all(name in own["texts"] for own in facts)]
    owned = zip(tables.items(), facts, strict=True)
    return {path: rows if "task" in own else read_table(path, texts) for (path, rows), own in owned}


def read_run(path: Path, split: str | None) -> pa.Table:
    """Read the prediction table of a run's split."""
    task = read_task(path)
    split = split or next(iter(task.splits if task else ()), "dev")
    file = path / PREDICTIONS / f"{split}{TABLE_SUFFIX}"
    if task and file.is_file() and LABEL in (rows := read_table(file)).column_names:
        return rows
    raise UsageError(
        f"{path} has no scored rows of {split!r}; choose with --split, or write the table of an earlier version's run: "
        f"bertkit evaluate {quote(str(path))}"
    )


# --- Results ----------------------------------------------------------------------------------------------------------


def tabulate(comparisons: Sequence[MethodComparison]) -> Iterator[Table]:
    """Yield a table for each task: a line for each method, the first one without a difference."""
    interval, corrected = "95 % interval", "p"
    if len(comparisons) > 1:
        interval, corrected = "95 % interval, uncorrected", f"p, Holm, {comparisons[0].comparisons} comparisons"
    for task, group in groupby(comparisons, lambda one: one.first.task):
        group = list(group)
        first, contrast = group[0].first, group[-1].contrast
        lines = [[first.describe(), show_points(first), "", "", "", ""]]
        for one in group:
            limits = f"{one.contrast.low:+.2f} to {one.contrast.high:+.2f}"
            cells = [show_points(one.second), f"{one.contrast.value:+.2f}", limits, show_p(one.p), one.verdict]
            lines.append([one.second.describe(), *cells])
        heads = ["", f"{first.name_metric()} (%)", "difference", interval, corrected, "verdict"]
        yield make_table(f"{task.name}, {pluralize(contrast.rows, 'row')} in common", heads, lines)


def comment(comparisons: Sequence[MethodComparison]) -> Iterator[str]:
    """Yield lines with the verdicts and what they rest on, then some rows on which the methods differ."""
    for one in comparisons:
        exact = "" if one.mcnemar is None else f" (right or wrong rows, McNemar's exact test: p {show_p(one.mcnemar)})"
        yield f"{one.second.name} against {one.first.name}: {one.describe()}{exact}"
    for task, left_out in {one.first.task.name: one.left_out for one in comparisons if one.left_out}.items():
        yield f"{task}: {pluralize(left_out, 'row')} not in all runs, skipped"
    counts = [{len(one.first.runs), len(one.second.runs)} for one in comparisons]
    if any(len(both) > 1 and 1 in both for both in counts):
        yield "a method with a single run is assumed to vary with its seed as the other one does"
    if {1} in counts and all(Path(one.second.name).is_dir() for one in comparisons):
        yield (
            "single runs: two models are compared, not two methods; other seeds may turn the result around "
            "(--restarts 5 trains several)"
        )
    if any(one.estimate() is not None for one in comparisons):
        yield f"enough: to tell the difference with a chance of {100 * POWER:.0f} %, if it stays the same"
    for one in comparisons:
        yield from list_lines(one, max(MOST_ROWS // len(comparisons), 1))


def list_lines(one: MethodComparison, most: int) -> Iterator[str]:
    """Yield a line for some of the rows on which two methods differ, after one with their number."""
    if rows := one.list_differing():
        shown = f"the first {most} of them" if len(rows) > most else "all of them"
        yield f"{one.second.name} and {one.first.name} differ on {pluralize(len(rows), 'row')}; {shown}:"
    for row in rows[:most]:
        texts = "  |  ".join(map(shorten_text, row["texts"][:MOST_TEXTS]))
        answers = f"{describe_answers(one.first, row['first'])}, {describe_answers(one.second, row['second'])}"
        yield f"  {texts}  →  {answers}  ({shorten_text(row['right']) or '(nothing)'})"


def describe_answers(method: Method, answers: Sequence[str]) -> str:
    """Return the answer to a row with the method's name; the most frequent one where the runs differ."""
    answer, number = Counter(answers).most_common(1)[0]
    share = "" if number == len(answers) else f" ({number} of {len(answers)} runs)"
    return f"{method.name}: {shorten_text(answer) or '(nothing)'}{share}"


def show_points(method: Method) -> str:
    """Return the points of a method, with the standard deviation over its seeds."""
    points = method.rate()
    return f"{points.mean():.2f}" + (f" ± {points.std(ddof=1):.2f}" if len(points) > 1 else "")


def show_p(p: float) -> str:
    """Return a p-value with three digits after the point."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def list_values(comparisons: Sequence[MethodComparison]) -> dict[str, Any]:
    """Return everything for a file, in points, with all rows that differ."""
    found = []
    for one in comparisons:
        methods = {"first": one.first, "second": one.second}
        found.append(
            {"task": one.first.task.name, "metric": one.first.task.metric}
            | {name: {"name": method.name, "scores": method.rate().tolist()} for name, method in methods.items()}
            | {"difference" if name == "value" else name: value for name, value in asdict(one.contrast).items()}
            | {"p_corrected": one.p, "comparisons": one.comparisons, "verdict": one.verdict, "mcnemar_p": one.mcnemar}
            | {"rows_left_out": one.left_out, "factor_needed": one.estimate(), "differing": one.list_differing()}
        )
    return {"comparisons": found}
