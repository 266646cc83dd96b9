"""Measure the coverage of label sets and the calibration of finished runs over random divisions of their dev rows.

`python -m tests.metrics.simulate_coverage RUN…` predicts the dev rows of each run once, with the data of its recipe,
and prints two tables. In each division one half decides: the temperature is fitted on it, as with `calibrate = true`,
and the limit of the label sets is found on it. The other half is scored.
"""

import argparse

import numpy as np
import torch

from bertkit.inference.predictor import Predictor
from bertkit.metrics.calibration import (
    find_conformity,
    find_limit,
    find_probabilities,
    fit_temperature,
    score_calibration,
    temper,
)
from bertkit.model.checkpoint import find_file
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE

COVERAGES = (0.9, 0.95)
ROWS_AT_ONCE = 64


@torch.inference_mode()
def predict_dev(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits (S, L) of a run's dev rows, without a temperature, and the correct classes."""
    settings = Predictor(run, precision="fp32").settings
    recipe = read_recipe(find_file(run, RECIPE_FILE))
    task = TASKS[recipe["task"]]
    examples = task.load(recipe["data"], ignore)[next(iter(task.splits))]
    data = task.encode(examples, settings.tokenizer, recipe, "dev")
    parts = []
    for start in range(0, len(data), ROWS_AT_ONCE):
        batch = task.collate(data.__getitems__(range(start, min(start + ROWS_AT_ONCE, len(data)))))
        parts.append(task.summarize(settings.model(**batch, **task.evaluation_options), batch).numpy())
    return np.concatenate(parts), task.find_classes(data)


def divide(logits: np.ndarray, labels: np.ndarray, trials: int) -> list[tuple[dict, dict]]:
    """Return for each division what `measure` finds without and with a temperature."""
    rng, results = np.random.default_rng(0), []
    for _ in range(trials):
        decides, scored = np.array_split(rng.permutation(len(labels)), 2)
        temperature = fit_temperature(logits[decides], labels[decides])
        results.append(tuple(measure(logits, labels, decides, scored, value) for value in (None, temperature)))
    return results


def measure(
    logits: np.ndarray, labels: np.ndarray, decides: np.ndarray, scored: np.ndarray, temperature: float | None
) -> dict[str, float]:
    """Return the errors of the scored rows, and for each coverage that of the sets and their mean size."""
    values, several = temper(logits, temperature), labels.ndim == 2
    probabilities = find_probabilities(values[scored], several)
    correct = np.eye(logits.shape[1])[labels[scored]] if not several else labels[scored]
    found = score_calibration(values[scored], labels[scored]) | {"temperature": temperature or 1.0}
    scores = find_conformity(values[decides], labels[decides])
    for coverage in COVERAGES:
        sets = 1 - probabilities <= find_limit(scores, coverage)
        found[f"coverage {coverage}"] = (sets | (correct == 0)).all(axis=1).mean()
        found[f"size {coverage}"] = sets.sum(axis=1).mean()
        found[f"empty {coverage}"] = (sets.sum(axis=1) == 0).mean()
    return found


def average(results: list[dict[str, float]], key: str) -> tuple[float, float]:
    """Return mean and standard deviation of a value over the divisions."""
    values = [found[key] for found in results]
    return float(np.mean(values)), float(np.std(values, ddof=1))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--trials", type=int, default=200)
    arguments = parser.parse_args()
    errors, sets = [], []
    for run in arguments.runs:
        logits, labels = predict_dev(run)
        plain, calibrated = (list(column) for column in zip(*divide(logits, labels, arguments.trials), strict=True))
        name = f"{run.rstrip('/').rpartition('/')[2]}, {len(labels):,} rows"
        pairs = [
            " → ".join(f"{scale * average(side, key)[0]:.{digits}f}" for side in (plain, calibrated))
            for key, scale, digits in (("ece", 100, 1), ("brier", 1, 3))
        ]
        temperature = "{:.2f} ± {:.2f}".format(*average(calibrated, "temperature"))
        errors.append(f"| {name} | {temperature} | {' | '.join(pairs)} |")
        for coverage in COVERAGES:
            covered = "{:.2f} ± {:.1f}".format(*(100 * value for value in average(calibrated, f"coverage {coverage}")))
            size, empty = (average(calibrated, f"{key} {coverage}")[0] for key in ("size", "empty"))
            labels_each = logits.shape[1]
            sets.append(
                f"| {name} | {100 * coverage:g} | {covered} | {size:.2f} of {labels_each} | {100 * empty:.1f} |"
            )
    print(
        "| run | temperature | calibration error (%) | Brier score |\n|---|---|---|---|", *errors, sep="\n", end="\n\n"
    )
    print(
        "| run | asked (%) | coverage (%) | labels in a set | empty sets (%) |\n|---|---|---|---|---|", *sets, sep="\n"
    )


if __name__ == "__main__":
    main()
