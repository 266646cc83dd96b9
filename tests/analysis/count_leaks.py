"""Count leaks, repeats and contradictions in four GLUE data sets by brute force, and compare with the doctor.

The count reads the official files with nothing of bertkit, in plain Python. With finished runs, it also scores their
predictions on dev with and without the leaked rows, with scikit-learn and scipy.

$ python -m tests.analysis.count_leaks GLUE [RUNS]     # RUNS holds cola/, stsb/, sst2/, rte/
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, matthews_corrcoef

from bertkit.tasks import TASKS
from bertkit.tasks.repeats import check_rows, tabulate_splits

FILES = {  # task -> folder, columns of the texts and of the label by number, header lines, metric
    "cola": ("CoLA", (3,), 1, 0, matthews_corrcoef),
    "stsb": ("STS-B", (7, 8), 9, 1, lambda gold, found: spearmanr(gold, found)[0]),
    "sst2": ("SST-2", (0,), 1, 1, accuracy_score),
    "rte": ("RTE", (1, 2), 3, 1, accuracy_score),
}


def read_label(text):
    """Return a number, or the name of a class."""
    try:
        return float(text)
    except ValueError:
        return text


def read_rows(path, texts, label, headers):
    """Return the folded texts and the label of each row of an official file."""
    lines = path.read_text(encoding="utf-8").split("\n")[headers:]
    cells = [line.split("\t") for line in lines if line]
    return [(tuple(" ".join(row[place].lower().split()) for place in texts), read_label(row[label])) for row in cells]


def count_by_force(train, dev):
    """Return the counts of both splits under the doctor's keys."""
    labels = {}
    for name, rows in (("train", train), ("dev", dev)):
        labels[name] = defaultdict(set)
        for texts, label in rows:
            labels[name][texts].add(label)
    found = {
        name: {
            "repeats": len(rows) - len(labels[name]),
            "contradictory": sum(len(own) > 1 for own in labels[name].values()),
        }
        for name, rows in (("train", train), ("dev", dev))
    }
    found["dev"]["in_train"] = sum(texts in labels["train"] for texts, _ in dev)
    found["dev"]["contradicts_train"] = sum(bool(labels["train"].get(texts, set()) - {label}) for texts, label in dev)
    return found


def score_run(run, metric, train, dev):
    """Return the score of a run on dev, and without the rows that also occur in train."""
    (file,) = (run / "predictions").glob("dev.tsv")
    answers = [read_label(line.split("\t")[1]) for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    known = {texts for texts, _ in train}
    gold = [label for _, label in dev]
    kept = np.array([texts not in known for texts, _ in dev])
    gold, answers = np.asarray(gold), np.asarray(answers)
    return metric(gold, answers), metric(gold[kept], answers[kept])


def main(root, runs=None):
    """Print a table of all counts, and of the scores of the runs."""
    print("| data | split | rows | in train | repeats | texts with different labels | a different label in train |")
    print("|---|---|---|---|---|---|---|")
    scores = []
    for name, (folder, texts, label, headers, metric) in FILES.items():
        train, dev = (read_rows(root / folder / f"{split}.tsv", texts, label, headers) for split in ("train", "dev"))
        forced = count_by_force(train, dev)
        task = TASKS[name]
        options = {**task.recipe["data"], "dir": str(root)}
        examples = task.load(options, lambda line: None)
        counted = check_rows(tabulate_splits(task, examples)).format()
        for split, rows in (("train", train), ("dev", dev)):
            wrong = {
                key: (value, counted[split][key])
                for key, value in forced[split].items()
                if counted[split][key] != value
            }
            assert not wrong, f"{name}, {split}: brute force and doctor differ in {wrong}"
            keys = ("in_train", "repeats", "contradictory", "contradicts_train")
            cells = [str(forced[split].get(key, "–")) for key in keys]
            print(f"| {task.title} | {split} | {len(rows):,} | {' | '.join(cells)} |")
        if runs is not None and (runs / name / "metrics.json").is_file():
            both = score_run(runs / name, metric, train, dev)
            written = json.loads((runs / name / "metrics.json").read_text(encoding="utf-8"))
            key = f"{task.metric}_without_leaks"
            scores.append(
                f"{task.title}: {task.metric} {both[0]:.4f}, without leaks {both[1]:.4f}; "
                f"metrics.json {written[task.metric]:.4f}, {written.get(key, '–')}"
            )
    print(*scores, sep="\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
