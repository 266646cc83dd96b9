"""Simulate exports whose true loss is known, and count how often the proof of `bertkit.metrics.intervals` is wrong.

`python -m tests.metrics.simulate_proof` prints the table; `--trials` is the number of samples for each of its numbers.

A population is a large number of rows, of which some are damaged by the export. The share of damaged rows is chosen
such that the whole population loses a given number of points. A trial takes N rows, and judges their difference.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from bertkit.metrics.intervals import compare_rows, judge
from bertkit.metrics.rows import RowScore, list_errors, measure_classes, measure_counts, measure_mean, measure_numbers

ROWS = 60_000  # of a population
BOUND = 0.5  # points
HARMLESS, SMALL, ABOVE, BEYOND, RUINED = LOSSES = (0.1, 0.3, 0.51, 0.75, 10.0)  # points
SAMPLES = 1_000  # of a bootstrap

Population = Callable[[float], tuple[RowScore, RowScore]]  # share of damaged rows -> scores of run and export


def accuracy(gains: float) -> Population:
    """Return a run with 90 % right; `gains` is the share of damaged rows that turn from wrong to right."""
    rng = np.random.default_rng(1)
    right, order, is_gain = rng.random(ROWS) < 0.9, rng.random(ROWS), rng.random(ROWS) < gains

    def damage(share: float) -> tuple[RowScore, RowScore]:
        turned = (order < share) & (is_gain != right)
        return measure_mean(right), measure_mean(right ^ turned)

    return damage


def matthews() -> Population:
    """Return a run as for CoLA, with 70 % of one class and 82 % right; a fifth of the turned rows become right."""
    rng = np.random.default_rng(2)
    labels = (rng.random(ROWS) < 0.7).astype(int)
    right, order, is_gain = rng.random(ROWS) < 0.82, rng.random(ROWS), rng.random(ROWS) < 0.2
    predictions = np.where(right, labels, 1 - labels)

    def damage(share: float) -> tuple[RowScore, RowScore]:
        turned = (order < share) & (is_gain != right)
        both = predictions, np.where(turned, 1 - predictions, predictions)
        return tuple(measure_classes(found, labels, 2)["matthews_correlation"] for found in both)

    return damage


def entities(size: float, together: bool) -> Population:
    """Return documents with a mean of `size` entities, of widely varying numbers, 80 % found.

    Damaged entities are anywhere, and a quarter of the changes are gains, or all those of damaged documents are missed.
    """
    rng = np.random.default_rng(3)
    wanted = rng.poisson(rng.gamma(1.0, size, ROWS))
    right = rng.binomial(wanted, 0.8)
    found = right + rng.poisson(0.15 * size, ROWS)
    order, noise = rng.random(ROWS), rng.random((2, ROWS))

    def damage(share: float) -> tuple[RowScore, RowScore]:
        from scipy.stats import binom

        if together:
            lost, gained = np.where(order < share, right, 0), 0
        else:
            lost = binom.ppf(noise[0], right, share).astype(int)
            gained = binom.ppf(noise[1], wanted - right, share).astype(int)
        errors = list_errors(np.full((1, 1), wanted.mean()))
        counts = (right, found), (right - lost + gained, found - lost + gained)
        return tuple(measure_counts(a[:, None], b[:, None], wanted[:, None], "f1", errors) for a, b in counts)

    return damage


def spearman(ruined: bool) -> Population:
    """Return scores as for STS-B with a correlation of about 0.9.

    Damaged rows have random predictions, or all predictions have some noise.
    """
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 26, ROWS) / 5
    values = labels + rng.normal(0, 0.7, ROWS)
    order, noise = rng.random(ROWS), rng.permutation(values)

    def damage(share: float) -> tuple[RowScore, RowScore]:
        changed = np.where(order < share, noise, values) if ruined else values + share * (noise - noise.mean())
        return tuple(measure_numbers(found, labels)["spearmanr"] for found in (values, changed))

    return damage


def squad() -> Population:
    """Return F1 of answers, 70 % of them 1 and 10 % 0; damaged ones are other answers, a third of them better."""
    rng = np.random.default_rng(5)

    def draw() -> np.ndarray:
        return rng.choice([0.0, 1.0, 2.0], ROWS, p=[0.1, 0.7, 0.2])

    values = draw()
    values = np.where(values == 2, rng.beta(2, 2, ROWS), values)
    others = np.where(rng.random(ROWS) < 1 / 3, np.minimum(values + rng.beta(2, 2, ROWS), 1), values * rng.random(ROWS))
    order = rng.random(ROWS)

    def damage(share: float) -> tuple[RowScore, RowScore]:
        changed = np.where(order < share, others, values)
        return measure_mean(values, percent=True), measure_mean(changed, percent=True)

    return damage


def contexts(share: float) -> Population:
    """Return contexts of ten questions, 70 % right; in a damaged one this share of the right answers is lost."""
    rng = np.random.default_rng(6)
    right, order, lost = rng.random((ROWS, 10)) < 0.7, rng.random(ROWS), rng.random((ROWS, 10)) < share
    groups = np.repeat(np.arange(ROWS), 10).tolist()

    def damage(damaged: float) -> tuple[RowScore, RowScore]:
        both = right, right & ~(lost & (order < damaged)[:, None])
        return tuple(measure_mean(values.ravel(), percent=True).join(groups) for values in both)

    return damage


POPULATIONS: dict[str, Callable[[], Population]] = {
    "accuracy, losses only": lambda: accuracy(0.0),
    "accuracy, some gains": lambda: accuracy(0.5),
    "Matthews": matthews,
    "entity F1, sentences": lambda: entities(0.8, together=False),
    "entity F1, documents": lambda: entities(25.0, together=False),
    "entity F1, whole documents": lambda: entities(25.0, together=True),
    "Spearman, noise": lambda: spearman(ruined=False),
    "Spearman, ruined rows": lambda: spearman(ruined=True),
    "SQuAD F1": squad,
    "SQuAD EM, half of a context": lambda: contexts(0.5),
    "SQuAD EM, whole contexts": lambda: contexts(1.0),
}


@dataclass(frozen=True)
class Simulated:
    """How many of the trials with an export of each loss are proved and refused."""

    trials: int
    proved: dict[float, int]
    refused: dict[float, int]

    @property
    def wrong(self) -> float:
        """Return the share of those proved that exceed the bound, where each loss is equally frequent."""
        return sum(self.proved[loss] for loss in (ABOVE, BEYOND)) / max(sum(self.proved.values()), 1)


@cache
def find_population(name: str, loss: float) -> tuple[RowScore, RowScore]:
    """Return a population in which the export loses this number of points, found by bisection of the damaged share."""
    damage = POPULATIONS[name]()
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if lose(*damage(middle)) > loss else (middle, high)
    return damage(high)


def lose(run: RowScore, export: RowScore) -> float:
    """Return how many points the export loses on all rows."""
    weights = np.ones((1, len(run)))
    return run.points * (run.score(weights) - export.score(weights))[0]


def simulate(name: str, count: int, trials: int, losses: tuple[float, ...] = LOSSES) -> Simulated:
    """Return the verdicts on samples of `count` rows."""
    proved, refused = dict.fromkeys(losses, 0), dict.fromkeys(losses, 0)
    for loss in losses:
        both = find_population(name, loss)
        rng = np.random.default_rng(count)
        for trial in range(trials):
            numbers = rng.integers(0, ROWS, count)
            taken = (score.take(numbers) for score in both)
            state = judge(compare_rows(*taken, samples=SAMPLES, seed=trial), BOUND).state
            proved[loss] += state == "proved"
            refused[loss] += state == "refused"
    return Simulated(trials, proved, refused)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", nargs="*", help="beginnings of names in the table; all if none is given")
    parser.add_argument("--trials", type=int, default=200)
    given = parser.parse_args()
    trials, scores = given.trials, tuple(given.scores) or ""
    heads = [f"{loss:g} proved" for loss in LOSSES[:-1]] + ["proved wrongly"]
    heads += [f"{loss:g} refused" for loss in (SMALL, RUINED)]
    print(f"% of {trials} samples where the export loses this many points; the bound is {BOUND} points\n")
    print(f"| score | rows | {' | '.join(heads)} |\n|---|--:|{'--:|' * len(heads)}")
    for name in (name for name in POPULATIONS if name.startswith(scores)):
        for count in (100, 200, 500, 1000, 2000, 5000) if name.startswith("accuracy") else (200, 1000, 4000):
            found = simulate(name, count, trials)
            rates = [100 * found.proved[loss] / trials for loss in LOSSES[:-1]] + [100 * found.wrong]
            rates += [100 * found.refused[loss] / trials for loss in (SMALL, RUINED)]
            print(f"| {name} | {count:,} | {' | '.join(f'{rate:.1f}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    main()
