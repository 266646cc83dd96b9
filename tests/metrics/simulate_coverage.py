"""Measure calibration and label sets of finished runs of one label over random divisions of their dev rows.

`python -m tests.metrics.simulate_coverage RUN…` reads the dev predictions of runs without `calibrate`, and prints a
table. In each division one half decides: the temperature is fitted on it, as with `calibrate = true`, and the limit of
the label sets is found on it. The other half is scored.
"""

import argparse
from pathlib import Path

import numpy as np

from bertkit.metrics.calibration import (
    choose_temperature,
    find_conformity,
    find_limit,
    find_probabilities,
    measure_calibration,
    temper,
)
from bertkit.metrics.rows import take_values
from bertkit.metrics.table import LABEL, list_names, number_names, read_probabilities
from bertkit.training.predictions import read_table

COVERAGES = (0.9, 0.95)


def read_dev(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms (S, L) of the probabilities of a run's dev rows, and the correct classes (S,)."""
    rows = read_table(min(Path(run, "predictions").glob("dev*.parquet")))
    names = list_names(rows)
    return np.log(read_probabilities(rows, names)), number_names(rows.column(LABEL).to_pylist(), names)


def divide(logits: np.ndarray, labels: np.ndarray, trials: int) -> list[dict[str, float]]:
    """Return for each division what `measure` finds with a temperature, and without it as `plain ...`."""
    rng, found = np.random.default_rng(0), []
    for _ in range(trials):
        decides, scored = np.array_split(rng.permutation(len(labels)), 2)
        plain = measure(logits, labels, decides, scored, None)
        temperature = choose_temperature(logits[decides], labels[decides])
        calibrated = measure(logits, labels, decides, scored, temperature) | {"temperature": temperature}
        found.append(calibrated | {f"plain {name}": value for name, value in plain.items()})
    return found


def measure(
    logits: np.ndarray, labels: np.ndarray, decides: np.ndarray, scored: np.ndarray, temperature: float | None
) -> dict[str, float]:
    """Return the scores of the scored rows, and for each coverage those of the sets."""
    values = temper(logits, temperature)
    probabilities = find_probabilities(values[scored], several=False)
    found = take_values(measure_calibration(probabilities, labels[scored]))
    scores = find_conformity(values[decides], labels[decides])
    for coverage in COVERAGES:
        sets = 1 - probabilities <= find_limit(scores, coverage)
        found[f"coverage {coverage}"] = sets[np.arange(len(scored)), labels[scored]].mean()
        found[f"size {coverage}"] = sets.sum(axis=1).mean()
        found[f"empty {coverage}"] = (~sets.any(axis=1)).mean()
    return found


def main() -> None:
    """Print a row of mean and standard deviation over the divisions for each run and value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--trials", type=int, default=200)
    arguments = parser.parse_args()
    print("| run | value | mean | sd |\n|---|---|--:|--:|")
    for run in arguments.runs:
        logits, labels = read_dev(run)
        found = divide(logits, labels, arguments.trials)
        for name in found[0]:
            values = [one[name] for one in found]
            mean, sd = np.mean(values), np.std(values, ddof=1)
            print(f"| {Path(run).name}, {len(labels):,} rows | {name} | {mean:.4f} | {sd:.4f} |")


if __name__ == "__main__":
    main()
