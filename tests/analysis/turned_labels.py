"""Turn 5 % of 8,000 labels of SST-2 around, and count how many of them the suspected label errors contain.

    python -m tests.analysis.turned_labels ROOT --model MINILM

ROOT holds glue/. The folds are kept in --output, where the same command continues.
"""

import argparse
from pathlib import Path

import numpy as np

from bertkit.analysis.label_errors import find_label_errors, predict_out_of_fold
from bertkit.tasks import TASKS
from tests.official import write_table

ROWS, SHARE, SEED = 8000, 0.05, 0
CUTS = (100, 200, 400, 800)
RECIPE = {
    "batch_size": 32,
    "data": {"max_length": 64},
    "train": {
        "num_train_epochs": 2,
        "learning_rate": 5e-5,
        "eval_strategy": "no",
        "save_strategy": "no",
    },
}


def turn_labels(source: Path, path: Path) -> np.ndarray:
    """Write the first rows of SST-2 with turned labels, and return (S,) which are turned."""
    lines = source.read_text(encoding="utf-8").split("\n")[1 : ROWS + 1]
    turned = np.zeros(ROWS, bool)
    turned[np.random.default_rng(SEED).permutation(ROWS)[: round(SHARE * ROWS)]] = True
    rows = [line.rsplit("\t", 1) for line in lines]
    write_table(
        path,
        [
            {"sentence": text, "label": int(label) ^ int(turn)}
            for (text, label), turn in zip(rows, turned.tolist(), strict=True)
        ],
    )
    return turned


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/turned-labels"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / "sst2.csv"
    turned = turn_labels(given.root / "glue" / "SST-2" / "train.tsv", path)
    recipe = RECIPE | {"checkpoint": given.model, "data": RECIPE["data"] | {"dir": str(path)}}
    found = predict_out_of_fold(
        TASKS["classify"],
        recipe,
        folds=given.folds,
        output=given.output,
        report=lambda *lines: print(*lines, flush=True),
    )
    errors = find_label_errors(found.probabilities, found.labels)
    ranked = np.argsort(errors.scores, kind="stable")
    print("| rows | precision (%) | recall (%) |\n|--:|--:|--:|")
    for name, rows in [
        *((f"first {cut}", ranked[:cut]) for cut in CUTS),
        (f"suspected, {len(errors.rows)}", errors.rows),
    ]:
        right = turned[rows].sum()
        print(f"| {name} | {100 * right / len(rows):.1f} | {100 * right / turned.sum():.1f} |")


if __name__ == "__main__":
    main()
