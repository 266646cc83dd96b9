"""Compare the answers of an export with those of its run, in fp32, on the run's own dev data.

`python -m tests.inference.compare_export RUN EXPORT` prints the head, the number of inputs, and the largest difference
of a number in their results; `--most` is the largest number of inputs.
"""

import argparse
from itertools import islice

from bertkit.inference.predictor import Predictor
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.tasks.prediction import predict
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE


def find_difference(one, other):
    """Return the largest difference of numbers in two results that are equal otherwise."""
    if isinstance(one, dict) and one.keys() == other.keys():
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list) and len(one) == len(other):
        return max((find_difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    assert one == other, (one, other)
    return 0.0


def main():
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("export")
    parser.add_argument("--most", type=int, default=1000)
    given = parser.parse_args()
    sides = [Predictor(given.run, precision="fp32"), Predictor(given.export, precision="fp32")]
    recipe = read_recipe(f"{given.run}/{RECIPE_FILE}")
    task = TASKS[recipe["task"]]
    dev = task.load(recipe["data"], ignore)[next(iter(task.splits))]
    examples = [example for _, example, _ in islice(task.list_samples(dev, sides[0].settings), given.most)]
    found, expected = (predict(task, examples, side.settings) for side in sides)
    differences = [find_difference(*pair) for pair in zip(found, expected, strict=True)]
    print(f"{sides[0].settings.head}: {len(examples):,} inputs of {task.title}, {max(differences):.1e}")


if __name__ == "__main__":
    main()
