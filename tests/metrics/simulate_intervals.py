"""Simulate data sets of known score, and count how often the interval of `bertkit.metrics.intervals` holds it.

`python -m tests.metrics.simulate_intervals` prints the table; `--trials` is the number of data sets for each line.

A population is a large number of rows, whose score is the true one. A data set takes N of its rows at random.
"""

import argparse
from collections.abc import Callable

import numpy as np

from bertkit.metrics.intervals import find_interval
from bertkit.metrics.rows import RowScore, measure_classes, measure_counts, measure_label, measure_mean, measure_numbers

ROWS = 60_000  # of a population
GROUP_SIZE = 5  # questions on a context
COUNTS = (100, 300, 1000, 4000)  # rows of a data set


def answer_binary(positives: float, right: float) -> RowScore:
    """Return the F1 of a label that a share of the rows has, with a share of right predictions."""
    rng = np.random.default_rng(6)
    labels = rng.random(ROWS) < positives
    return measure_label(labels ^ (rng.random(len(labels)) >= right), labels)["f1"]


def answer_exactly(right: float) -> RowScore:
    """Return the accuracy of a run with this share of right rows."""
    return measure_mean(np.random.default_rng(7).random(ROWS) < right)


def answer_classes() -> RowScore:
    """Return the macro F1 of five classes of very different size, 80 % right."""
    rng = np.random.default_rng(8)
    labels = rng.choice(5, ROWS, p=[0.5, 0.25, 0.15, 0.07, 0.03])
    predictions = np.where(rng.random(ROWS) < 0.8, labels, rng.choice(5, ROWS))
    return measure_classes(predictions, labels, 5)["macro_f1"]


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


def answer_contexts() -> RowScore:
    """Return the exact match of answers, 70 % of them right; GROUP_SIZE questions on a context are alike difficult."""
    rng = np.random.default_rng(9)
    shares = np.repeat(rng.beta(1.4, 0.6, ROWS // GROUP_SIZE), GROUP_SIZE)
    return measure_mean(rng.random(ROWS) < shares)


def find_entities(size: float) -> RowScore:
    """Return the F1 of documents with a mean of `size` entities, of widely varying numbers, 80 % found."""
    rng = np.random.default_rng(3)
    wanted = rng.poisson(rng.gamma(1.0, size, ROWS))
    right = rng.binomial(wanted, 0.8)
    found = right + rng.poisson(0.15 * size, ROWS)
    return measure_counts(*(x[:, None] for x in (right, found, wanted)), "f1")


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
    "macro F1, five classes": answer_classes,
    "exact match, five questions on a context, drawn alone": answer_contexts,
    "exact match, five questions on a context, drawn together": answer_contexts,
}


def simulate(name: str, count: int, trials: int) -> tuple[float, float, float]:
    """Return the shares of intervals above and below the true score, and their mean width in points."""
    population = SCORES[name]()
    true = population.score(np.ones((1, len(population))))[0]
    rng, found = np.random.default_rng(count), []
    size = GROUP_SIZE if "on a context" in name else 1
    groups = np.repeat(np.arange(count // size), size).tolist() if name.endswith("together") else None
    for trial in range(trials):
        firsts = size * rng.integers(len(population) // size, size=count // size)
        rows = (firsts[:, None] + np.arange(size)).ravel()
        low, high = find_interval(population.take(rows), groups, seed=trial)
        found.append((low > true, high < true, population.points * (high - low)))
    return tuple(np.mean(found, axis=0))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", nargs="*", help="beginnings of names in the table; all if none is given")
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    scores = tuple(given.scores) or ""
    print(f"% of {given.trials:,} data sets whose interval holds the true score (lies above it, below it; its width)\n")
    print(f"| score | {' | '.join(f'{count:,} rows' for count in COUNTS)} |\n|---|{'--:|' * len(COUNTS)}")
    for name in (name for name in SCORES if name.startswith(scores)):
        cells = []
        for count in COUNTS:
            above, below, width = simulate(name, count, given.trials)
            cells.append(f"{100 - 100 * (above + below):.1f} ({100 * above:.1f}, {100 * below:.1f}; {width:.1f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
