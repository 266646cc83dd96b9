"""Measure time and memory of the doctor on a table of one's own with a million rows.

The rows are random sentences of words with the frequencies of a natural text; one in a hundred repeats another one, one
in a hundred differs from another in a word, and one in a thousand has another label than the same text before.

$ python -m tests.analysis.doctor_scale MODEL [ROWS]     # MODEL has the tokenizer
"""

import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WORDS, MEAN_WORDS = 50_000, 25
LABELS = ("negative", "positive", "neutral")


def write_rows(path, count):
    """Write a CSV file of sentences with labels, an id, a date and a source that is always the same."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfw"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 11, WORDS)]
    rates = 1 / np.arange(10, WORDS + 10)
    rates /= rates.sum()
    earlier = []
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "text", "label", "date", "source"])
        for start in range(0, count, 10_000):
            sizes = 3 + rng.poisson(MEAN_WORDS - 3, min(10_000, count - start))
            drawn, place = rng.choice(WORDS, sizes.sum(), p=rates), 0
            for number, size in enumerate(sizes.tolist()):
                chosen, label = [words[word] for word in drawn[place : place + size]], LABELS[rng.integers(3)]
                place += size
                kind = rng.random()
                if earlier and kind < 0.021:
                    chosen, label = earlier[rng.integers(len(earlier))]
                    chosen = list(chosen)
                    if kind < 0.01:
                        chosen[rng.integers(len(chosen))] = words[0]
                    elif kind > 0.02:
                        label = LABELS[(LABELS.index(label) + 1) % 3]
                elif kind > 0.9:
                    earlier.append((chosen, label))
                row = start + number
                writer.writerow([row, " ".join(chosen), label, f"2026-{row % 12 + 1:02d}", "mail"])


def main(model, rows="1000000"):
    """Print the findings, the seconds and the largest memory."""
    with tempfile.TemporaryDirectory() as folder:
        table, found = Path(folder, "table.csv"), Path(folder, "found.json")
        write_rows(table, int(rows))
        start = time.perf_counter()
        command = [sys.executable, "-m", "bertkit", "doctor", table, "--model", model, "--json", found]
        subprocess.run([*map(str, command), "--write", str(table.with_name("clean.csv"))], check=True)
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        splits = json.loads(found.read_text(encoding="utf-8"))["splits"]
        keys = ("in_train", "near_train", "repeats", "near_repeats", "contradictory")
        print({split: {key: one.get(key) for key in keys} for split, one in splits.items()})
        print(f"{int(rows):,} rows, {table.stat().st_size / 1e6:,.0f} MB: {seconds:,.0f} s, {memory / 1e9:.2f} GB")


if __name__ == "__main__":
    main(*sys.argv[1:])
