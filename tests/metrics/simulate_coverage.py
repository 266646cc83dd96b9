"""Measure calibration and label sets of finished runs of one label over random divisions of their dev rows.

`python -m tests.metrics.simulate_coverage RUN…` reads the dev predictions of runs without `calibrate`, and prints a
table. In each division one half decides: the temperature is fitted on it, as with `calibrate = true`, and the limit of
the label sets is found on it. The other half is scored.
"""

import argparse
from collections import defaultdict
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


def measure(logits: np.ndarray, labels: np.ndarray, decides: np.ndarray, scored: np.ndarray) -> dict[str, float]:
    """Return the errors of the probabilities of the scored rows, and for each coverage what their sets are like."""
    probabilities = find_probabilities(logits[scored], several=False)
    found = take_values(measure_calibration(probabilities, labels[scored]))
    for coverage in COVERAGES:
        sets = 1 - probabilities <= find_limit(find_conformity(logits[decides], labels[decides]), coverage)
        found[f"coverage {coverage}"] = sets[np.arange(len(sets)), labels[scored]].mean()
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
        (logits, labels), rng, found = read_dev(run), np.random.default_rng(0), defaultdict(list)
        for _ in range(arguments.trials):
            decides, scored = np.array_split(rng.permutation(len(labels)), 2)
            temperature = choose_temperature(logits[decides], labels[decides])
            found["temperature"].append(temperature)
            for prefix, used in (("plain ", None), ("", temperature)):
                for name, value in measure(temper(logits, used), labels, decides, scored).items():
                    found[prefix + name].append(value)
        for name, values in found.items():
            mean, sd = np.mean(values), np.std(values, ddof=1)
            print(f"| {Path(run).name}, {len(labels):,} rows | {name} | {mean:.4f} | {sd:.4f} |")


if __name__ == "__main__":
    main()
