"""Simulate models whose true difference is known, and count how often `bertkit.metrics.intervals` tells them apart.

`python -m tests.analysis.simulate_compare` prints the table; `--trials` is the number of comparisons for each of its
numbers. A trial draws new rows of different difficulty, and the models of two methods. All runs of a method have its
skill, to which each seed adds a normal variate (its deviation is the spread). Methods with strengths of their own find
other rows difficult, but score the same on average. Beside it are the paired permutation test (single runs) and Welch's
test of the runs' scores, which knows nothing of the rows (several runs).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import RowScore, measure_counts, measure_mean

LEVEL = 0.05
SAMPLES = 399  # of the permutation test
SPREAD = 0.05  # the standard deviation of the seeds' skill
GAPS = {300: 0.25, 1000: 0.12}  # rows -> difference of skill whose telling is counted
POPULATION = 200_000  # rows that give differences in points
STRENGTH = 0.5  # the share of a row's difficulty that a method with strengths of its own has for itself

Draw = Callable[[np.random.Generator, np.ndarray, np.ndarray], list[RowScore]]  # difficulties (M, S), skills (M,)


def draw_accuracies(rng: np.random.Generator, difficulties: np.ndarray, skills: np.ndarray) -> list[RowScore]:
    """Return accuracies of about 80 %."""
    return list(map(measure_mean, difficulties + rng.normal(size=difficulties.shape) < 1.2 + skills[:, None]))


def draw_entities(rng: np.random.Generator, difficulties: np.ndarray, skills: np.ndarray) -> list[RowScore]:
    """Return F1 of the entities of sentences, 0.8 on average and of widely varying number; 74 % of them are found."""
    wanted = rng.poisson(rng.gamma(1.0, 0.8, difficulties.shape[1]))
    scores = []
    for chance in 1 / (1 + np.exp(difficulties - 1.2 - 1.5 * skills[:, None])):
        right = rng.binomial(wanted, chance)
        found = right + rng.poisson(0.15, len(wanted))
        scores.append(measure_counts(right[:, None], found[:, None], wanted[:, None], "f1"))
    return scores


SCORES: dict[str, Draw] = {"accuracy": draw_accuracies, "entity F1": draw_entities}


def permute(first: RowScore, second: RowScore, seed: int) -> float:
    """Return the p-value of the paired permutation test: the models change places on random rows."""
    both = replace(first, rows=np.concatenate([first.rows, second.rows]))
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
    rng = np.random.default_rng(0)
    difficulties = np.tile(rng.normal(size=POPULATION), (2, 1))
    first, second = rate(draw(rng, difficulties, np.array([0.0, gap])))
    return 100 * (second - first)


def count_told(
    draw: Draw, rows: int, trials: int, runs: int, spread: float = 0.0, gap: float = 0.0, strength: float = 0.0
) -> tuple[float, float]:
    """Return the percentage of trials that tell two methods apart, with our test and with the one beside it."""
    rng = np.random.default_rng([rows, runs])
    told = np.zeros((trials, 2), bool)
    for trial in range(trials):
        skills = np.repeat([0.0, gap], runs) + spread * rng.normal(size=2 * runs)
        shared, own = rng.normal(size=rows), rng.normal(size=(2, rows))
        difficulties = np.repeat(np.sqrt(1 - strength) * shared + np.sqrt(strength) * own, runs, axis=0)
        scores = draw(rng, difficulties, skills)
        first, second = scores[:runs], scores[runs:]
        other = permute(*scores, trial) if runs == 1 else stats.ttest_ind(rate(first), rate(second), equal_var=False)[1]
        told[trial] = compare_methods(first, second, seed=trial).p <= LEVEL, other <= LEVEL
    ours, other = (100 * told.mean(0)).tolist()
    return ours, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", nargs="*", help="beginnings of names in the table; all if none is given")
    parser.add_argument("--trials", type=int, default=1000)
    given = parser.parse_args()
    trials, chosen = given.trials, tuple(given.scores) or ""
    columns = {
        "1 run: equal": {"runs": 1},
        "1 run: other": {"runs": 1, "gap": True},
        f"1 run: equal methods, spread {SPREAD:g}": {"runs": 1, "spread": SPREAD},
        f"2 runs: equal, spread {SPREAD:g}": {"runs": 2, "spread": SPREAD},
        **{f"5 runs: equal, spread {spread:g}": {"runs": 5, "spread": spread} for spread in (0.0, SPREAD, 0.2)},
        f"5 runs: equal, spread {SPREAD:g}, own strengths": {"runs": 5, "spread": SPREAD, "strength": STRENGTH},
        f"5 runs: other, spread {SPREAD:g}": {"runs": 5, "spread": SPREAD, "gap": True},
    }
    print(f"% of {trials} comparisons called different (in parentheses the permutation test, or Welch's test)\n")
    print(f"| score | rows | points between others | {' | '.join(columns)} |\n|---|--:|--:|{'--:|' * len(columns)}")
    for name, draw in SCORES.items():
        for rows, gap in GAPS.items() if name.startswith(chosen) else ():
            cells = [f"{measure_gap(draw, gap):.1f}"]
            for case in columns.values():
                found = count_told(draw, rows, trials, **case | {"gap": gap * case.get("gap", False)})
                cells.append("{:.1f} ({:.1f})".format(*found))
            print(f"| {name} | {rows:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
