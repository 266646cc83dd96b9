"""Read what was measured: print what defaults are chosen by, and write the tables of recipes/defaults.md.

Choices are made on the rows of dev with odd keys, and the tables are of those with even keys.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from scipy.stats import t

from bertkit.metrics.intervals import OUTSIDE, compare_methods
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.tasks import TASKS
from bertkit.training.predictions import TABLE_SUFFIX, read_table
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, read_metrics
from tests.tools.defaults.plan import BUDGETS, PLAN, READERS, Rows, list_runs, list_seeds, name_run

ROOT = Path(__file__).parents[3]
FIGURES, PAGE = ROOT / "recipes" / "defaults.jsonl", ROOT / "recipes" / "defaults.md"
SHOWN = ("frozen", "frozen-1", "tfidf", "tfidf-1", "both", "words", "old", "setfit", "crf")  # beside auto
KEYS = (
    "score",
    "start_score",
    "end_score",
    "kept",
    "best_baseline",
    "baseline_gain",
    "updates",
    "seconds",
    "processor",
)
PARTS = ("dev-start", "dev-end", "dev-mean")  # tables of start, end and mean of weights, of watched.py
WIDTH = 1.96  # standard errors of an interval of 95 %
DECIDING, DRAWS = (50, 200), 20  # rows by which a rule decides, and how often they are drawn

Runs = dict[int, WeightedScore]  # seed -> score


# --- Scores of some rows ----------------------------------------------------------------------------------------------


def read_scores(out: Path, data: str, rows: int, way: str, odd: bool, part: str = "dev") -> Runs:
    """Return the scores of the runs that have the table, on the rows with odd or with even keys, in their order."""
    task, scores = TASKS[READERS[data][0][0]], {}
    for seed in list_seeds(data, rows):
        folder = out / name_run(data, rows, seed, way)
        path = folder / PREDICTIONS / f"{part}{TABLE_SUFFIX}"
        if (folder / METRICS_FILE).exists() and path.exists():
            table = read_table(path).sort_by("key")
            scores[seed] = task.score(table.filter(table.column("key").to_numpy() % 2 == odd))[task.metric]
    return scores


def pair_seeds(*methods: Runs) -> list[list[WeightedScore]]:
    """Return the runs of each method with the seeds that all of them have."""
    seeds = [seed for seed in methods[0] if all(seed in runs for runs in methods)]
    return [[runs[seed] for seed in seeds] for runs in methods]


def average(scores: Iterable[WeightedScore]) -> float | None:
    """Return the mean points of some runs, 100 for the best ones; None without runs."""
    points = [rate(score) for score in scores]
    return mean(points) if points else None


def rate(score: WeightedScore) -> float:
    """Return the points of a score."""
    return score.points * take_values({"": score})[""]


def show(value: float | None) -> str:
    """Return points with one decimal, or a dash."""
    return "–" if value is None else f"{value:.1f}"


# --- What the defaults are chosen by ----------------------------------------------------------------------------------


def print_choices(out: Path) -> None:
    """Print the scores on the odd rows of start, end and mean of weights, and of rules."""
    print("Weights: start, end, their mean")
    pairs, means = [], []
    for data, sizes in PLAN.items():
        for rows in sizes:
            start, end, both = pair_seeds(*(read_scores(out, data, rows, "auto", True, part) for part in PARTS))
            if start:
                pairs += zip(start, end, strict=True)
                means.append([average(part) for part in (start, end, both)])
                print(f"  {data:8} {rows:5}", *map(show, means[-1]))
    if pairs:
        print(f"  {'mean':14}", *map(show, np.mean(means, axis=0)))
        print(
            f"\nRule, by some odd rows and scored on the others, {DRAWS} draws: the end, the higher, the start at 80 %"
        )
        for size in DECIDING:
            print(f"  {size} rows", *map(show, np.mean([try_rules(*pair, size) for pair in pairs], axis=0)))


def try_rules(start: WeightedScore, end: WeightedScore, size: int) -> np.ndarray:
    """Return (3,) the points of what is delivered: the end, the higher one, the start if it is above at 80 %."""
    found, rng = [], np.random.default_rng(0)
    for _ in range(DRAWS):
        order = rng.permutation(len(start))
        contrast = compare_methods([end.take(order[:size])], [start.take(order[:size])])
        before, after = (rate(score.take(order[size:])) for score in (start, end))
        is_higher = contrast.value > 0
        found.append([after, before if is_higher else after, before if is_higher and contrast.p < 0.2 else after])
    return np.mean(found, axis=0)


# --- The page ---------------------------------------------------------------------------------------------------------


def tabulate(out: Path, figures: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield the name and the rows of each table of the page, from the rows of dev with even keys."""
    scores, gains, limited = [], [], []
    means: dict[str, list[list[float | None]]] = {way: [] for way in SHOWN}
    for data, sizes in PLAN.items():
        for rows in sizes:
            runs = {way: read_scores(out, data, rows, way, False) for way in (*SHOWN, "auto", *BUDGETS)}
            if not (auto := runs["auto"]):
                continue
            for way in SHOWN:
                means[way] += [[average(found) for found in pair_seeds(runs[way], auto)]] if runs[way] else []
            points = [average(runs[way].values()) for way in SHOWN]
            olds = [
                find_old(figures, data, rows, way) if x is None else show(x)
                for way, x in zip(SHOWN, points, strict=True)
            ]
            scores.append([data, f"{rows:,}", len(auto), *olds, f"**{show(average(auto.values()))}**"])
            gains.append([data, f"{rows:,}", *(contrast_runs(runs[way], auto) for way in SHOWN)])
            simple = runs["words"] or runs["frozen"]
            if any(runs[way] for way in BUDGETS):
                cells = [contrast_runs(simple, runs[way]) for way in BUDGETS]
                limited.append([data, f"{rows:,}", show(average(simple.values())), *cells])
    ends = [" / ".join(map(show, np.mean(pairs, axis=0))) if pairs else "" for pairs in means.values()]
    yield "scores", [["data", "rows", "seeds", *SHOWN, "auto"], *scores, ["mean / that of auto", "", "", *ends, ""]]
    yield "differences", [["data", "rows", *SHOWN], *gains]
    yield "budgets", [["data", "rows", "frozen or words", *BUDGETS], *limited]


def contrast_runs(firsts: Runs, seconds: Runs) -> str:
    """Return how far the second runs are above the first ones, marked where that is more than the interval.

    Two or three seeds give a wide interval, so another mark is for the interval of the rows alone.
    """
    before, after = pair_seeds(firsts, seconds)
    if not before:
        return ""
    found = compare_methods(before, after)
    width = WIDTH * found.row_error
    marks = "▽△" if abs(found.value) > width else "  "
    if len(before) > 1:  # runs of a seed have the same training rows, so that seeds count by their differences
        gains = [rate(second) - rate(first) for first, second in zip(before, after, strict=True)]
        seeds = float(np.var(gains, ddof=1)) / len(gains)
        variance = found.row_error**2 + seeds
        freedom = (len(gains) - 1) * (variance / seeds) ** 2 if seeds else np.inf  # as in Welch's test
        width = t.isf(OUTSIDE, freedom) * np.sqrt(variance)
    marks = "▼▲" if abs(found.value) > width else marks
    limits = f"({found.value - width:.1f} to {found.value + width:.1f})"
    return f"{found.value:+.1f} {limits} {marks[found.value > 0]}".rstrip()


def find_old(figures: Rows, data: str, rows: int, way: str) -> str:
    """Return the mean score of runs without tables, on all rows of dev, with a star."""
    values = [100 * x["score"] for x in figures if (x["data"], x["rows"], x["way"]) == (data, rows, way)]
    return f"{mean(values):.1f}*" if values else ""


def write_tables(out: Path) -> None:
    """Write the line of each run, and the tables of the page."""
    figures = read_figures(out)
    FIGURES.write_text("".join(json.dumps(figure) + "\n" for figure in figures), encoding="utf-8")
    for name, rows in tabulate(out, figures):
        if len(rows) > 1:
            write_table(name, rows)


def read_figures(out: Path) -> Rows:
    """Return the lines of all runs, those of earlier versions without a folder first."""
    runs = []
    for data, rows, seed, way in list_runs():
        if (path := out / name_run(data, rows, seed, way) / METRICS_FILE).exists():
            metrics = read_metrics(path)
            runs.append(
                {"data": data, "rows": rows, "seed": seed, "way": way} | {x: metrics[x] for x in KEYS if x in metrics}
            )
    names = [name_line(run) for run in runs]
    lines = map(json.loads, FIGURES.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if name_line(line) not in names] + runs


def name_line(line: Mapping[str, Any]) -> str:
    """Return the name of the run of a line."""
    return name_run(line["data"], line["rows"], line["seed"], line["way"])


def write_table(name: str, rows: Rows) -> None:
    """Write a table into the page, behind its mark."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    before, mark, after = PAGE.read_text(encoding="utf-8").partition(
        f"<!-- python -m tests.tools.defaults: {name} -->\n"
    )
    rest = after.split("\n\n", 1)[-1] if after.startswith("|") else after.removeprefix("\n")
    PAGE.write_text(before + mark + "\n".join(lines) + "\n\n" + rest, encoding="utf-8")
