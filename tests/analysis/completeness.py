"""Measure the completeness error of explanations of runs, by the number of steps and by the baseline.

`python -m tests.analysis.completeness RUN…` explains the first examples of each run's dev set and prints the table.
"""

import argparse
import time
from itertools import islice

import numpy as np

from bertkit.analysis import explanation
from bertkit.analysis.explanation import explain_example
from bertkit.inference.predictor import Predictor
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.tasks.prediction import predict
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--examples", type=int, default=50)
    given = parser.parse_args()
    print("| run | baseline | steps | targets | error, median | 90 % below | seconds per example |")
    print("|---|---|---|--:|--:|--:|--:|")
    adaptive = explanation.FIRST_STEPS, explanation.MOST_STEPS
    for place in given.runs:
        recipe = read_recipe(f"{place}/{RECIPE_FILE}")
        task = TASKS[recipe["task"]]
        predictor = Predictor(place, precision="fp32")
        dev = task.load(recipe["data"], ignore)[next(iter(task.splits))]
        rows = task.tabulate(dev)
        inputs = (dict(zip(rows.texts, texts, strict=True)) for texts in islice(rows.walk_texts(), given.examples))
        examples = [task.read_input({"text": next(iter(one.values())), **one}, predictor.settings) for one in inputs]
        results = predict(task, examples, predictor.settings)
        for baseline, first, most in (
            *(("[MASK]", steps, steps) for steps in (16, 32, 64)),
            ("[MASK]", *adaptive),
            ("[PAD]", *adaptive),
        ):
            explanation.FIRST_STEPS, explanation.MOST_STEPS = first, most
            predictor.settings.tokenizer.mask_token = baseline
            start, errors = time.perf_counter(), []
            for example, result in zip(examples, results, strict=True):
                errors += [entry["error"] for entry in explain_example(predictor, example, result)]
            seconds = (time.perf_counter() - start) / len(examples)
            steps = f"{first}" if first == most else f"{first} to {most}"
            figures = f"{len(errors)} | {np.median(errors):.4f} | {np.quantile(errors, 0.9):.4f} | {seconds:.2f}"
            print(f"| {task.name} | {baseline} | {steps} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
