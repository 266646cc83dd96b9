"""Teach a small model by a large one: `python -m tests.tools.distil DATA MODEL OUT`.

DATA is the folder of GLUE, and MODEL a sentence encoder. The teacher is MODEL, fine-tuned on 1,000 rows of SST-2; the
student has its first two layers, and learns from the teacher's probabilities for 20,000 other rows, from its labels for
them, or from the teacher's own rows. It prints the accuracy of each on dev, for three seeds.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from bertkit.data.tokenizer import load_tokenizer, save_tokenizer
from bertkit.model.bert import BertModel
from bertkit.training.run_dir import METRICS_FILE, read_metrics

LABELLED, OTHERS, LAYERS = 1_000, 20_000, 2
ONCE = ("--epochs", 1)  # the students of many rows read them once


def call(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "bertkit", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def cut_layers(model: str, folder: Path) -> Path:
    """Write the first layers of a checkpoint."""
    BertModel.from_pretrained(model, num_hidden_layers=LAYERS).save_pretrained(folder)
    save_tokenizer(load_tokenizer(model), folder)
    return folder


def train(folder: Path, seed: int, rows: Path, dev: Path, model: object, *options: object) -> float:
    """Train a model, and return its accuracy on dev."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for split, path in (("train", rows), ("dev", dev)):
        (data / f"{split}{path.suffix}").write_bytes(path.read_bytes())
    call(
        "classify", "--data", data, "--text", "sentence", *options, "--model", model, "--seed", seed, "--output", folder
    )
    return read_metrics(folder / METRICS_FILE)["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    student, dev = cut_layers(given.model, given.out / "student"), given.out / "dev.csv"
    tables = {
        split: pd.read_csv(given.data / "SST-2" / f"{split}.tsv", sep="\t", quoting=3) for split in ("train", "dev")
    }
    tables["dev"].to_csv(dev, index=False)
    for seed in given.seeds:
        folder = given.out / str(seed)
        folder.mkdir(exist_ok=True)
        rows = (
            tables["train"]
            .drop_duplicates("sentence")
            .sample(LABELLED + OTHERS, random_state=np.random.default_rng(seed))
        )
        rows[:LABELLED].to_csv(folder / "labelled.csv", index=False)
        rows[LABELLED:][["sentence"]].to_csv(folder / "others.csv", index=False)
        label, shares = ("--label", "label"), ("--label", "probability_*", "--set", "data.gold=label")
        found = {"teacher": train(folder / "teacher", seed, folder / "labelled.csv", dev, given.model, *label)}
        soft = folder / "soft.parquet"
        call("predict", folder / "teacher", "--input", folder / "others.csv", "--output", soft)
        for name, table, how in (
            ("soft labels", soft, (*shares, *ONCE)),
            ("hard labels", soft, (*label, *ONCE)),
            ("the teacher's rows", folder / "labelled.csv", label),
        ):
            found[name] = train(folder / name.split()[0], seed, table, dev, student, *how)
        print(f"seed {seed}: " + ", ".join(f"{name} {100 * value:.1f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
