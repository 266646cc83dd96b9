"""Turn 5 % of 8,000 labels of SST-2 around, and count how many of them the suspected label errors contain.

    python -m tests.analysis.turned_labels ROOT --model MINILM

ROOT holds glue/. The folds are kept in --output, where the same command continues.
"""

import argparse
from pathlib import Path

import numpy as np

from bertkit.analysis.label_errors import describe_label_errors, predict_out_of_fold
from bertkit.tasks import TASKS
from tests.official import write_table

ROWS, SHARE, SEED = 8000, 0.05, 0
CUTS = (100, 200, 400, 800)
RECIPE = {
    "batch_size": 32,
    "data": {"max_length": 64},
    "train": {"num_train_epochs": 2, "learning_rate": 5e-5, "eval_strategy": "no", "save_strategy": "no"},
}


def turn_labels(source: Path, path: Path) -> np.ndarray:
    """Write the first rows of SST-2 as a table with turned labels, and return (S,) which are turned."""
    lines = source.read_text(encoding="utf-8").split("\n")[1 : ROWS + 1]
    turned = np.zeros(ROWS, int)
    turned[np.random.default_rng(SEED).permutation(ROWS)[: round(SHARE * ROWS)]] = 1
    pairs = zip((line.rsplit("\t", 1) for line in lines), turned.tolist(), strict=True)
    write_table(path, [{"sentence": text, "label": int(label) ^ turn} for (text, label), turn in pairs])
    return turned


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/turned-labels"))
    given = parser.parse_args()
    path = given.output / "sst2.csv"
    turned = turn_labels(given.root / "glue" / "SST-2" / "train.tsv", path)
    start = {"checkpoint": given.model, "data": {"dir": str(path)}}
    rows = predict_out_of_fold(TASKS["classify"], RECIPE, start, folds=5, output=given.output / "folds", report=print)
    suspected = [one["row"] - 2 for one in describe_label_errors(rows)["suspected"]]  # of lines, without the header
    accuracy = np.mean(rows.column("label").to_numpy() == rows.column("prediction").to_numpy())
    print(f"accuracy of the folds on these labels: {accuracy:.1%}\n")
    print("| rows | precision (%) | recall (%) |\n|---|--:|--:|")
    cuts = {f"first {cut}": cut for cut in CUTS} | {f"all suspected, {len(suspected)}": len(suspected)}
    for name, cut in cuts.items():
        found = turned[suspected[:cut]].sum()
        print(f"| {name} | {100 * found / cut:.1f} | {100 * found / turned.sum():.1f} |")


if __name__ == "__main__":
    main()
