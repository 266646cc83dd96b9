"""Compare the answers of an export with those of its run, in fp32, on the run's own dev data.

`python -m tests.inference.compare_export RUN EXPORT` prints the head, the number of inputs, and the largest difference
of a number in their results; `--most` is the largest number of inputs. Checkpoints without a run need `--text FILE`:
inputs are its lines, with every seventh word masked, in pairs for next sentence prediction.
"""

import argparse
from itertools import islice, pairwise
from pathlib import Path

from bertkit.data.labels import PAIR_NAMES
from bertkit.inference.predictor import Predictor
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.tasks.prediction import predict
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE

MASK, MASK_EVERY = "[MASK]", 7


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


def mask_lines(path, predictor):
    """Yield the texts of inputs made of the lines of a file."""
    lines = [line.split() for line in path.read_text().splitlines() if len(line.split()) > MASK_EVERY]
    if tuple(predictor.sample) == PAIR_NAMES[0]:
        yield from ([" ".join(first), " ".join(second)] for first, second in pairwise(lines))
    else:
        for words in lines:
            words[MASK_EVERY - 1 :: MASK_EVERY] = [MASK] * len(words[MASK_EVERY - 1 :: MASK_EVERY])
            yield [" ".join(words)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("export")
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    sides = [Predictor(given.run, precision="fp32"), Predictor(given.export, precision="fp32")]
    if given.text:
        task, source = sides[0].task, given.text.name
        examples = [sides[0].read(texts) for texts in islice(mask_lines(given.text, sides[0]), given.most)]
    else:
        recipe = read_recipe(f"{given.run}/{RECIPE_FILE}")
        task = TASKS[recipe["task"]]
        source = task.title
        dev = task.load(recipe["data"], ignore)[next(iter(task.splits))]
        rows = task.tabulate(dev)
        inputs = (dict(zip(rows.texts, texts, strict=True)) for texts in islice(rows.walk_texts(), given.most))
        examples = [task.read_input({"text": next(iter(one.values())), **one}, sides[0].settings) for one in inputs]
    found, expected = (predict(task, examples, side.settings) for side in sides)
    differences = [find_difference(*pair) for pair in zip(found, expected, strict=True)]
    print(f"{sides[0].settings.head}: {len(examples):,} inputs of {source}, {max(differences):.1e}")


if __name__ == "__main__":
    main()
