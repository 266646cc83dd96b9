"""Count how often an explanation puts the word that decided first, where the label depends on one planted word.

`python -m tests.analysis.planted_keywords ROOT --model MODEL` prints the table.

Sentences of SST-2 get a label by chance, and one of the label's keywords at a random place. A classifier learns this
from some of them; of the others, an explanation is right if the planted word has the largest attribution to the
predicted label. The same is done with [PAD] in the place of [MASK] in the baseline.
"""

import argparse
import csv
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bertkit.analysis.explanation import explain
from bertkit.inference.predictor import Predictor
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run

KEYWORDS = {  # label -> its keywords, some of which have several pieces
    "mineral": ["quartz", "granite", "zirconium", "feldspar", "basalt"],
    "plant": ["clover", "juniper", "rhododendron", "thistle", "fennel"],
    "tool": ["chisel", "wrench", "screwdriver", "hacksaw", "pliers"],
}
TRAINED, EXPLAINED = 4_000, 400  # rows


def plant(root: Path, count: int) -> list[tuple[str, str, str]]:
    """Return sentences with a planted keyword, the keyword, and the label."""
    rng = np.random.default_rng(0)
    with open(root / "glue" / "SST-2" / "train.tsv", encoding="utf-8") as file:
        sentences = [line.split("\t")[0].split() for line in file][1:]
    rows = []
    for number in rng.choice(len(sentences), count, replace=False).tolist():
        words, label = list(sentences[number]), str(rng.choice(list(KEYWORDS)))
        keyword = str(rng.choice(KEYWORDS[label]))
        words.insert(int(rng.integers(len(words) + 1)), keyword)
        rows.append((" ".join(words), keyword, label))
    return rows


def train(rows: list[tuple[str, str, str]], model: str, folder: Path) -> Path:
    """Return a run that has learned the labels."""
    with open(folder / "rows.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((text, label) for text, _, label in rows)
    recipe = {
        "checkpoint": model,
        "data": {"dir": str(folder / "rows.csv"), "max_length": 64},
        "train": {"num_train_epochs": 2.0, "learning_rate": 1e-4},
    }
    run(Recipe.make(TASKS["classify"], recipe), output=folder / "run")
    return folder / "run"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="folder with glue/SST-2")
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    rows = plant(given.root, TRAINED + EXPLAINED)
    with TemporaryDirectory() as folder:
        place = train(rows[:TRAINED], given.model, Path(folder))
        print("| baseline | predicted right | keyword first | keyword second | error, median |")
        print("|---|--:|--:|--:|--:|")
        for baseline in ("[MASK]", "[PAD]"):
            predictor = Predictor(place, precision="fp32")
            predictor.settings.tokenizer.mask_token = baseline
            right, ranks, errors = 0, [], []
            results = explain(predictor, [text for text, _, _ in rows[TRAINED:]])
            for (_, keyword, label), result in zip(rows[TRAINED:], results, strict=True):
                (entry,) = result["explanation"]
                words = sorted(entry["words"], key=lambda word: -word["attribution"])
                ranks.append([word["text"] for word in words].index(keyword))
                right += result["label"] == label
                errors.append(entry["error"])
            first, second = (100 * ranks.count(rank) / len(ranks) for rank in (0, 1))
            shares = f"{100 * right / len(ranks):.1f} % | {first:.1f} % | {second:.1f} %"
            print(f"| {baseline} | {shares} | {np.median(errors):.4f} |", flush=True)


if __name__ == "__main__":
    main()
