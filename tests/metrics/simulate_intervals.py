"""Simulate data sets of known score, and count how often the interval of `bertkit.metrics.intervals` holds it.

`python -m tests.metrics.simulate_intervals` prints the table; `--trials` is the number of data sets for each line.

A population is a large number of rows, whose score is the true one. A data set takes N of its rows at random. On the
same samples the interval is compared with the plain percentiles and BCa, whichever of them it uses.
"""

import argparse
from collections.abc import Callable

import numpy as np
from scipy.special import expit

from bertkit.metrics.calibration import measure_calibration
from bertkit.metrics.intervals import (
    INTERVAL_SAMPLES,
    LEVEL,
    find_bca,
    find_influences,
    find_interval,
    merge_rows,
    resample,
)
from bertkit.metrics.rows import (
    RowScore,
    list_errors,
    measure_classes,
    measure_counts,
    measure_label,
    measure_mean,
    measure_numbers,
)

ROWS = 60_000  # of a population
Range = tuple[float, float]


def answer_binary(positives: float, right: float) -> RowScore:
    """Return the F1 of a label that a share of the rows has, with a share of right predictions."""
    rng = np.random.default_rng(6)
    labels = rng.random(ROWS) < positives
    return measure_label(labels ^ (rng.random(len(labels)) >= right), labels)["f1"]


def answer_exactly(right: float) -> RowScore:
    """Return the accuracy of a run with this share of right rows."""
    return measure_mean(np.random.default_rng(7).random(ROWS) < right)


def state_probabilities(excess: float) -> RowScore:
    """Return the calibration error of a run of two classes, whose logits are too large by a factor of 1 + excess."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, ROWS)
    labels = (rng.random(len(logits)) < expit(logits)).astype(int)
    return measure_calibration(np.stack([np.zeros_like(logits), (1 + excess) * logits], axis=1), labels)["ece"]


def answer_cola() -> RowScore:
    """Return the Matthews correlation of a run as for CoLA, with 70 % of one class and 82 % right."""
    rng = np.random.default_rng(2)
    labels = (rng.random(ROWS) < 0.7).astype(int)
    predictions = np.where(rng.random(ROWS) < 0.82, labels, 1 - labels)
    return measure_classes(predictions, labels, 2)["matthews_correlation"]


def answer_numbers() -> RowScore:
    """Return the Spearman correlation of scores as for STS-B, about 0.9."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 26, ROWS) / 5
    return measure_numbers(labels + rng.normal(0, 0.7, ROWS), labels)["spearmanr"]


def answer_questions() -> RowScore:
    """Return the F1 of answers, 70 % of them 1 and 10 % 0."""
    rng = np.random.default_rng(5)
    values = rng.choice([0.0, 1.0, 2.0], ROWS, p=[0.1, 0.7, 0.2])
    return measure_mean(np.where(values == 2, rng.beta(2, 2, ROWS), values), percent=True)


def find_entities(size: float) -> RowScore:
    """Return the F1 of documents with a mean of `size` entities, of widely varying numbers, 80 % found."""
    rng = np.random.default_rng(3)
    wanted = rng.poisson(rng.gamma(1.0, size, ROWS))
    right = rng.binomial(wanted, 0.8)
    found = right + rng.poisson(0.15 * size, ROWS)
    return measure_counts(
        *(x[:, None] for x in (right, found, wanted)), "f1", list_errors(np.full((1, 1), wanted.mean()))
    )


SCORES: dict[str, Callable[[], RowScore]] = {
    "accuracy, 60 %": lambda: answer_exactly(0.6),
    "accuracy, 90 %": lambda: answer_exactly(0.9),
    "accuracy, 99 %": lambda: answer_exactly(0.99),
    "F1, 68 % positive, 85 % right (MRPC)": lambda: answer_binary(0.68, 0.85),
    "F1, 10 % positive, 95 % right": lambda: answer_binary(0.1, 0.95),
    "F1, 50 % positive, 99 % right": lambda: answer_binary(0.5, 0.99),
    "Matthews (CoLA)": answer_cola,
    "Spearman (STS-B)": answer_numbers,
    "exact match (SQuAD)": lambda: answer_exactly(0.7),
    "F1 of answers (SQuAD)": answer_questions,
    "entity F1, sentences": lambda: find_entities(0.8),
    "entity F1, documents": lambda: find_entities(25.0),
    "calibration error, 0 points": lambda: state_probabilities(0.0),
    "calibration error, 8 points": lambda: state_probabilities(1.0),
}


def simulate(name: str, count: int, trials: int) -> dict[str, tuple[int, int, float]]:
    """Return for each method how many intervals lie above and below the true score, and their mean width in points."""
    population = SCORES[name]()
    true = population.score(np.ones((1, len(population))))[0]
    rng, found = np.random.default_rng(count), {}
    for trial in range(trials):
        score = population.take(rng.integers(len(population), size=count))
        for method, (low, high) in find_all(score, trial).items():
            above, below, width = found.get(method, (0, 0, 0.0))
            found[method] = above + (low > true), below + (high < true), width + score.points * (high - low) / trials
    return found


def find_all(score: RowScore, seed: int) -> dict[str, Range]:
    """Return the interval, and those of percentiles and BCa."""
    interval = find_interval(score, seed=seed)
    merged, numbers, counts = merge_rows(score)
    rng, outside = np.random.default_rng(seed), (1 - LEVEL) / 2
    influences = find_influences(merged, numbers, rng)
    sampled = resample(merged, numbers, INTERVAL_SAMPLES, rng)
    value = merged.score(counts[None])[0]
    bca = find_bca(value, sampled, influences) if influences.any() else (value, value)
    return {
        "interval": (interval.low, interval.high),
        "percentile": tuple(np.quantile(sampled, [outside, 1 - outside])),
        "BCa": tuple(bca),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", nargs="*", help="beginnings of names in the table; all if none is given")
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    trials, scores = given.trials, tuple(given.scores) or ""
    print(f"% of {trials:,} data sets whose interval holds the true score (lies above it, below it)\n")
    print("| score | rows | interval | percentile | BCa | width of the interval, points |\n|---|--:|--:|--:|--:|--:|")
    for name in (name for name in SCORES if name.startswith(scores)):
        for count in (300, 1000):
            found = simulate(name, count, trials)
            cells = [
                f"{100 - 100 * (above + below) / trials:.1f} ({100 * above / trials:.1f}, {100 * below / trials:.1f})"
                for above, below, _ in found.values()
            ]
            print(f"| {name} | {count:,} | {' | '.join(cells)} | {found['interval'][2]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
