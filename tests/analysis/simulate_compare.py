"""Simulate models whose true difference is known, and count how often `bertkit.metrics.comparison` tells them apart.

`python -m tests.analysis.simulate_compare` prints the table; `--trials` is the number of comparisons for each of its
numbers. A trial draws new rows of different difficulty, and the models of two methods. All runs of a method have its
skill, to which each seed adds a normal variate. Beside it are the paired permutation test (single runs) and Welch's
test of the runs' scores, which knows nothing of the rows (five runs).
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from bertkit.metrics.comparison import compare_methods
from bertkit.metrics.rows import (
    RowScore,
    list_errors,
    measure_classes,
    measure_counts,
    measure_label,
    measure_mean,
    measure_numbers,
)

LEVEL = 0.05
SAMPLES = 399  # of a bootstrap
SPREADS = (0.0, 0.05, 0.2)  # standard deviations of the seeds' skill
GAPS = {300: 0.25, 1000: 0.12}  # rows -> difference of skill whose telling is counted
POPULATION = 200_000  # rows that give differences in points

Draw = Callable[[np.random.Generator, int, Sequence[float]], list[RowScore]]  # rows, skill of each run


def draw_right(rng: np.random.Generator, rows: int, skills: Sequence[float]) -> list[np.ndarray]:
    """Return whether each row is right with each model, 80 % of them; some rows are hard for all models."""
    difficulty = rng.normal(size=rows)
    return [difficulty + rng.normal(size=rows) < 1.2 + skill for skill in skills]


def draw_accuracies(rng: np.random.Generator, rows: int, skills: Sequence[float]) -> list[RowScore]:
    """Return accuracies."""
    return [measure_mean(right) for right in draw_right(rng, rows, skills)]


def draw_classes(name: str) -> Draw:
    """Return a function that draws scores of two classes, 30 % of the rows being of the second one."""

    def draw(rng: np.random.Generator, rows: int, skills: Sequence[float]) -> list[RowScore]:
        labels = (rng.random(rows) < 0.3).astype(int)
        found = [np.where(right, labels, 1 - labels) for right in draw_right(rng, rows, skills)]
        if name == "f1":
            return [measure_label(one == 1, labels == 1)[name] for one in found]
        return [measure_classes(one, labels, 2)[name] for one in found]

    return draw


def draw_correlations(rng: np.random.Generator, rows: int, skills: Sequence[float]) -> list[RowScore]:
    """Return Spearman correlations of about 0.87 with scores as those of STS-B."""
    labels, difficulty = rng.integers(0, 26, rows) / 5, rng.normal(size=rows)
    values = [labels + 0.6 * difficulty + (0.6 - 0.4 * skill) * rng.normal(size=rows) for skill in skills]
    return [measure_numbers(found, labels)["spearmanr"] for found in values]


def draw_entities(rng: np.random.Generator, rows: int, skills: Sequence[float]) -> list[RowScore]:
    """Return F1 of the entities of sentences, 0.8 on average and of widely varying number; 74 % of them are found."""
    wanted, difficulty = rng.poisson(rng.gamma(1.0, 0.8, rows)), rng.normal(size=rows)
    errors = list_errors(np.full((1, 1), wanted.mean()))
    scores = []
    for skill in skills:
        right = rng.binomial(wanted, 1 / (1 + np.exp(-(1.2 + difficulty + 1.5 * skill))))
        found = right + rng.poisson(0.15, rows)
        scores.append(measure_counts(right[:, None], found[:, None], wanted[:, None], "f1", errors))
    return scores


SCORES: dict[str, Draw] = {
    "accuracy": draw_accuracies,
    "F1": draw_classes("f1"),
    "Matthews": draw_classes("matthews_correlation"),
    "Spearman": draw_correlations,
    "entity F1": draw_entities,
}


def permute(first: RowScore, second: RowScore, seed: int) -> float:
    """Return the p-value of the paired permutation test: the models change places on random rows."""
    both = first.extend(second.rows)
    is_kept = np.random.default_rng([seed, 1]).random((SAMPLES, len(first))) < 0.5
    is_kept[0] = True  # the models as they are
    kept, others = both.score(np.hstack([is_kept, ~is_kept]) * 1.0), both.score(np.hstack([~is_kept, is_kept]) * 1.0)
    found = np.abs(kept - others)
    return float((found >= found[0] - 1e-12).mean())


def rate(scores: Sequence[RowScore]) -> np.ndarray:
    """Return the score of each run."""
    return np.array([score.score(np.ones((1, len(score))))[0] for score in scores])


def measure_gap(draw: Draw, gap: float) -> float:
    """Return the points between models whose skill differs by `gap`."""
    first, second = rate(draw(np.random.default_rng(0), POPULATION, [0.0, gap]))
    return 100 * (second - first)


def count_told(draw: Draw, rows: int, runs: int, spread: float, gap: float, trials: int) -> tuple[float, float]:
    """Return the percentage of trials that tell two methods apart, with our test and with the one beside it."""
    rng = np.random.default_rng([rows, runs])
    told = np.zeros((trials, 2), bool)
    for trial in range(trials):
        skills = np.repeat([0.0, gap], runs) + spread * rng.normal(size=2 * runs)
        scores = draw(rng, rows, skills)
        first, second = scores[:runs], scores[runs:]
        other = permute(*scores, trial) if runs == 1 else stats.ttest_ind(rate(first), rate(second), equal_var=False)[1]
        told[trial] = compare_methods(first, second, SAMPLES, trial).p <= LEVEL, other <= LEVEL
    ours, other = (100 * told.mean(0)).tolist()
    return ours, other


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", nargs="*", help="beginnings of names in the table; all if none is given")
    parser.add_argument("--trials", type=int, default=1000)
    given = parser.parse_args()
    trials, chosen = given.trials, tuple(given.scores) or ""
    heads = ["1 run: equal", "1 run: other", "1 run: equal methods"]
    heads += [f"2 runs: equal, spread {SPREADS[1]:g}"]
    heads += [f"5 runs: equal, spread {spread:g}" for spread in SPREADS] + [f"5 runs: other, spread {SPREADS[1]:g}"]
    print(f"% of {trials} comparisons called different (in parentheses the permutation test, or Welch's test)\n")
    print(f"| score | rows | points between others | {' | '.join(heads)} |\n|---|--:|--:|{'--:|' * len(heads)}")
    for name, draw in SCORES.items():
        for rows, gap in GAPS.items() if name.startswith(chosen) else ():
            cases = [(1, 0.0, 0.0), (1, 0.0, gap), (1, SPREADS[1], 0.0)]
            cases += [(2, SPREADS[1], 0.0)]
            cases += [(5, spread, 0.0) for spread in SPREADS] + [(5, SPREADS[1], gap)]
            cells = [f"{measure_gap(draw, gap):.1f}"]
            for runs, spread, difference in cases:
                ours, other = count_told(draw, rows, runs, spread, difference, trials)
                cells.append(f"{ours:.1f} ({other:.1f})")
            print(f"| {name} | {rows:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
