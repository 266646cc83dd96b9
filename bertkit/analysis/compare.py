"""Compare methods on the rows that their runs have in common, matched by content, and say which differ.

A method is a run, or several runs whose recipes differ only in their seed: those of a study's cell, or runs given one
by one. Each method is compared with the first; the p-values are corrected for the number of comparisons.

Left out: the statistics (`bertkit.metrics.intervals`), and reading files of predictions
(`bertkit.analysis.prediction_files`).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from bertkit.analysis.places import drop_seed, is_run
from bertkit.analysis.prediction_files import read_files
from bertkit.errors import UsageError
from bertkit.metrics.intervals import (
    LEVEL,
    POWER,
    Contrast,
    adjust_p_values,
    compare_methods,
    compute_mcnemar,
    estimate_factor,
)
from bertkit.reports.tables import ScoreRow, Table, count, find_row, make_table
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task, shorten_text
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, RECIPE_FILE, STUDY_RESULT, read_study
from bertkit.training.scored_rows import ROWS, ScoredRows, read_rows

UNDECIDED_VERDICT = "not told apart"
MOST_ROWS = 10  # shown of those on which methods differ, over all comparisons
MOST_FACTOR = 1000  # of rows that a verdict asks for
SMALLEST = 1e-9  # points; a smaller difference is that of rounding


@dataclass(frozen=True)
class Method:
    """A method and the rows of its runs.

    Attributes:
        task: The name of its task.
        title: The name of its score.
    """

    name: str
    task: str
    title: ScoreRow
    runs: Sequence[ScoredRows]

    def describe(self) -> str:
        """Return its name, with the number of seeds if there are several."""
        return f"{self.name} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.name

    def take(self, keys: np.ndarray) -> "Method":
        """Return the method with the rows that have these keys, in their order."""
        runs = []
        for run in self.runs:
            order = np.argsort(run.keys)
            runs.append(run.take(order[np.searchsorted(run.keys[order], keys)]))
        return Method(self.name, self.task, self.title, runs)

    def rate(self) -> np.ndarray:
        """Return the points of each run."""
        weights = np.ones((1, len(self.runs[0].keys)))
        return np.array([run.score.points * run.score.score(weights)[0] for run in self.runs])

    def judge_rows(self) -> np.ndarray:
        """Return (S,) how right each row is, on average over the runs."""
        return np.mean([run.score.judge_rows() for run in self.runs], axis=0)

    def share_answers(self) -> Iterator[dict[str, float]]:
        """Yield for each row the share of the runs that gave each answer."""
        for answers in zip(*([row.answer for row in run.rows] for run in self.runs), strict=True):
            yield {answer: number / len(answers) for answer, number in Counter(answers).items()}

    def describe_answer(self, row: int) -> str:
        """Return the answer to a row with the method's name; the most frequent one where the runs differ."""
        answers = Counter(run.rows[row].answer for run in self.runs)
        answer, number = answers.most_common(1)[0]
        share = "" if number == len(self.runs) else f" ({number} of {len(self.runs)} runs)"
        return f"{self.name}: {shorten_text(answer) or '(nothing)'}{share}"


@dataclass(frozen=True)
class MethodComparison:
    """A method compared with the first of its task.

    Attributes:
        p: The p-value, corrected for the number of `comparisons`.
        mcnemar: The p-value of McNemar's test; None without classes or with several runs.
        left_out: The number of rows that are not in all runs of the task.
    """

    first: Method
    second: Method
    contrast: Contrast
    p: float
    comparisons: int
    mcnemar: float | None
    left_out: int

    @property
    def has_lone_run(self) -> bool:
        """Return whether one method has a single run and the other several."""
        return min(len(self.first.runs), len(self.second.runs)) == 1 and self.contrast.seed_error is not None

    @property
    def verdict(self) -> str:
        """Return "better" or "worse" of the second method, or neither."""
        if self.p > 1 - LEVEL:
            return UNDECIDED_VERDICT
        return "better" if self.contrast.value > 0 else "worse"

    def estimate(self) -> float | None:
        """Return what would be enough, as `estimate_factor`; None if the difference is told, or there is none."""
        if self.verdict != UNDECIDED_VERDICT or abs(self.contrast.value) < SMALLEST:
            return None
        return estimate_factor(self.contrast, self.comparisons)

    def describe(self) -> str:
        """Return the verdict with what it rests on, or what would decide it."""
        said = f"{self.verdict} with {count(self.contrast.rows, 'row')}"
        if self.verdict != UNDECIDED_VERDICT:
            return said
        if (factor := self.estimate()) is None:
            return f"{said}: the scores are equal"
        if factor > MOST_FACTOR:
            return f"{said}; more than {MOST_FACTOR:,} times as many would be needed for so small a difference"
        seeds = "" if self.contrast.seed_error is None else " and seeds"
        return f"{said}; about {factor:.1f} times as many rows{seeds} would be enough"

    def find_differing(self) -> np.ndarray:
        """Return the rows with different answers, first those on which one method is right and the other wrong."""
        shares = zip(self.first.share_answers(), self.second.share_answers(), strict=True)
        differs = [one != two for one, two in shares]
        gaps = np.abs(self.second.judge_rows() - self.first.judge_rows())
        rows = np.flatnonzero(differs)
        return rows[np.argsort(-gaps[rows], kind="stable")]


def compare(
    sources: Sequence[Path],
    split: str | None = None,
    label: str | None = None,
    data: Path | None = None,
    report: Report = ignore,
) -> list[MethodComparison]:
    """Compare runs, studies or files of predictions, each method with the first one of its task.

    Args:
        split: The split of runs; None: the first one that is scored.
        label: The column of the right labels in tables of predictions.
        data: The SQuAD file that files of answers are about.

    Raises:
        UsageError: There are fewer than two methods, or no rows in common; a source does not exist, is not finished,
            has no file of its rows, or cannot be read; an option does not fit the sources.
    """
    if missing := next((source for source in sources if not source.exists()), None):
        raise UsageError(f"{missing} does not exist; give runs and studies, or files of predictions")
    if all(source.is_file() for source in sources):
        if split is not None:
            raise UsageError("--split names a split of runs; leave it out with files of predictions")
        task, title, found = read_files(sources, label, data)
        methods = [Method(str(path), task, title, [rows]) for path, rows in zip(sources, found, strict=True)]
    else:
        if label is not None or data is not None:
            raise UsageError("--label and --data are for files of predictions; leave them out with runs and studies")
        methods = read_methods(sources, split)
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(method.task, []).append(method)
    for name in [name for name, group in groups.items() if len(group) < 2]:
        report(f"{groups.pop(name)[0].name}: nothing else to compare with for {name}, skipping")
    if not groups:
        raise UsageError("there is only one method of each task; give two or more runs or studies of one task")
    pairs = [pair for group in groups.values() for pair in match(group)]
    contrasts = [compare_methods(*([run.score for run in one.runs] for one in pair[:2])) for pair in pairs]
    adjusted = adjust_p_values([contrast.p for contrast in contrasts])
    return [
        MethodComparison(first, second, contrast, p, len(pairs), compare_classes(first, second), left_out)
        for (first, second, left_out), contrast, p in zip(pairs, contrasts, adjusted, strict=True)
    ]


def match(group: Sequence[Method]) -> Iterator[tuple[Method, Method, int]]:
    """Yield the first method with each other one, on the rows of all runs, and the number of rows left out.

    Raises:
        UsageError: No row is in all runs, or the scores have different labels.
    """
    runs = [run for method in group for run in method.runs]
    keys = reduce(np.intersect1d, (run.keys for run in runs))
    if not len(keys):
        raise UsageError(
            f"{group[0].name} and {group[-1].name} have no row in common, which are equal texts with equal right "
            "answers; give runs that were scored on the same data"
        )
    if len({(run.score.rate, run.score.rows.shape[1:]) for run in runs}) > 1:
        raise UsageError(
            f"{group[0].name} and {group[-1].name} have different labels or a different score; give runs with the "
            "same labels"
        )
    left_out = len(reduce(np.union1d, (run.keys for run in runs))) - len(keys)
    first, *others = (method.take(keys) for method in group)
    for other in others:
        yield first, other, left_out


def compare_classes(first: Method, second: Method) -> float | None:
    """Return the p-value of McNemar's test of two single runs; None if rows may be partly right."""
    if len(first.runs) > 1 or len(second.runs) > 1:
        return None
    right = np.stack([first.judge_rows(), second.judge_rows()])
    return compute_mcnemar(*(right == 1)) if np.isin(right, (0, 1)).all() else None


# --- Runs and studies -------------------------------------------------------------------------------------------------


def check_seeds(paths: Sequence[Path]) -> None:
    """Check that no run of a method repeats another one."""
    known: dict[str, Path] = {}
    for path in paths:
        recipe = json.dumps(read_recipe(path / RECIPE_FILE), sort_keys=True, default=str)
        if (other := known.setdefault(recipe, path)) is not path:
            raise UsageError(f"{path} has the recipe and the seed of {other}; give one of the two")


def read_methods(sources: Sequence[Path], split: str | None) -> list[Method]:
    """Return the methods of runs and studies; runs whose recipes differ only in the seed are one method.

    If this leaves a single method, each run is one.

    Raises:
        UsageError: Two runs of a method have the same seed.
    """
    named: dict[str, tuple[str, list[Path]]] = {}
    for source in sources:
        for name, paths in list_runs(source):
            key = drop_seed(read_recipe(paths[0] / RECIPE_FILE)) if len(paths) == 1 else name
            known = named.setdefault(key, (name, []))[1]
            known += [path for path in paths if path.resolve() not in [other.resolve() for other in known]]
    found = list(named.values())
    if len(found) == 1:
        found = [(str(path), [path]) for path in found[0][1]]
    for _, paths in found:
        check_seeds(paths)
    return [read_method(name, paths, split) for name, paths in found]


def list_runs(source: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the finished runs of each cell of a study, or of the run itself.

    Raises:
        UsageError: It is neither a finished run nor a study.
    """
    if is_run(source):
        if not (source / METRICS_FILE).is_file() or not (source / RECIPE_FILE).is_file():
            raise UsageError(f"{source} is not a finished run; repeat its command to continue it")
        yield str(source), [source]
    elif (source / STUDY_RESULT).is_file():
        for cell in read_study(source).cells:
            paths = [source / run.directory for run in cell.runs if run.status == "finished"]
            if paths and find_task(paths[0]) is not None:  # not a pretraining
                yield str(paths[0].parent if len(cell.runs) > 1 else paths[0]), paths
    else:
        raise UsageError(f"{source} is neither a run nor a study; give --output directories, or files only")


def find_task(run: Path) -> Task | None:
    """Return the task of a run; None if its rows are not scored, as in pretraining."""
    task = TASKS.get(str(read_recipe(run / RECIPE_FILE).get("task")))
    return task if task is not None and task.metric and not task.lower_is_better else None


def read_method(name: str, paths: Sequence[Path], split: str | None) -> Method:
    """Read the rows of a method's runs.

    Raises:
        UsageError: A run has no file of its rows, or has only those of other splits.
    """
    if (task := find_task(paths[0])) is None:
        raise UsageError(f"{name} has no scores of rows to compare; give fine-tuned runs")
    split = split or next(iter(task.splits))
    files = [path / PREDICTIONS / f"{split}{ROWS}" for path in paths]
    for path, file in zip(paths, files, strict=True):
        if not file.is_file():
            scored = sorted(other.name.removesuffix(ROWS) for other in file.parent.glob(f"*{ROWS}"))
            if scored:
                raise UsageError(
                    f"{path} has scored rows of {', '.join(scored)}, but not of {split!r}; choose with --split"
                )
            again = f"bertkit {task.command} --recipe {quote(str(path / RECIPE_FILE))} --output {quote(str(path))}"
            raise UsageError(
                f"{file} not found, as in runs of earlier versions; delete the run's {METRICS_FILE} and train it "
                f"again: {again}"
            )
    return Method(name, task.name, find_row(task.table, task.metric), list(map(read_rows, files)))


# --- Results ----------------------------------------------------------------------------------------------------------


def tabulate(comparisons: Sequence[MethodComparison]) -> Iterator[Table]:
    """Yield a table for each task: a line for each method, the first one without a difference."""
    interval, corrected = "95 % interval", "p"
    if len(comparisons) > 1:
        interval, corrected = "95 % interval, uncorrected", f"p, Holm, {comparisons[0].comparisons} comparisons"
    for group in group_by_task(comparisons):
        first = group[0].first
        lines = [[first.describe(), show_points(first), "", "", "", ""]]
        for one in group:
            contrast = one.contrast
            limits = f"{contrast.low:+.2f} to {contrast.high:+.2f}"
            cells = [f"{contrast.value:+.2f}", limits, show_p(one.p), one.verdict]
            lines.append([one.second.describe(), show_points(one.second), *cells])
        heads = ["", f"{first.title.name} (%)", "difference", interval, corrected, "verdict"]
        yield make_table(f"{first.task}, {count(group[0].contrast.rows, 'row')} in common", heads, lines)


def group_by_task(comparisons: Sequence[MethodComparison]) -> list[list[MethodComparison]]:
    """Return the comparisons of each task."""
    names = dict.fromkeys(one.first.task for one in comparisons)
    return [[one for one in comparisons if one.first.task == name] for name in names]


def comment(comparisons: Sequence[MethodComparison]) -> Iterator[str]:
    """Yield lines with the verdicts and what they rest on, then a few of the rows on which the methods differ."""
    for one in comparisons:
        exact = "" if one.mcnemar is None else f" (right or wrong rows, McNemar's exact test: p {show_p(one.mcnemar)})"
        yield f"{one.second.name} against {one.first.name}: {one.describe()}{exact}"
    for group in group_by_task(comparisons):
        if group[0].left_out:
            yield f"{group[0].first.task}: {count(group[0].left_out, 'row')} not in all runs, skipped"
    if any(one.has_lone_run for one in comparisons):
        yield "a method with a single run is assumed to vary with its seed as the other one does"
    if any(one.contrast.seed_error is None for one in comparisons):
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
    if len(rows := one.find_differing()):
        shown = f"the first {most} of them" if len(rows) > most else "all of them"
        yield f"{one.second.name} and {one.first.name} differ on {count(len(rows), 'row')}; {shown}:"
    for row in rows[:most].tolist():
        described = one.first.runs[0].rows[row]
        answers = ", ".join(method.describe_answer(row) for method in (one.first, one.second))
        yield f"  {'  |  '.join(described.texts)}  →  {answers}  ({shorten_text(described.right) or '(nothing)'})"


def show_points(method: Method) -> str:
    """Return the points of a method, with the standard deviation over its seeds."""
    points = method.rate()
    return f"{points.mean():.2f}" + (f" ± {points.std(ddof=1):.2f}" if len(points) > 1 else "")


def show_p(p: float) -> str:
    """Return a p-value with three digits after the point."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def list_values(comparisons: Sequence[MethodComparison]) -> dict[str, Any]:
    """Return everything for a file, with all rows that differ."""
    return {"comparisons": [list_comparison(one) for one in comparisons]}


def list_comparison(one: MethodComparison) -> dict[str, Any]:
    """Return the values of a comparison, in points, and the rows on which the methods differ."""
    contrast = one.contrast
    methods = {"first": one.first, "second": one.second}
    rows = []
    for row in one.find_differing().tolist():
        described = one.first.runs[0].rows[row]
        answers = {name: [run.rows[row].answer for run in method.runs] for name, method in methods.items()}
        rows.append({"texts": described.texts, "right": described.right, **answers})
    return {
        "task": one.first.task,
        "metric": one.first.title.key,
        **{name: {"name": method.name, "scores": method.rate().tolist()} for name, method in methods.items()},
        "difference": contrast.value,
        "low": contrast.low,
        "high": contrast.high,
        "p": contrast.p,
        "p_corrected": one.p,
        "comparisons": one.comparisons,
        "verdict": one.verdict,
        "rows": contrast.rows,
        "rows_left_out": one.left_out,
        "factor_needed": one.estimate(),
        "row_error": contrast.row_error,
        "seed_error": contrast.seed_error,
        "mcnemar_p": one.mcnemar,
        "differing": rows,
    }
