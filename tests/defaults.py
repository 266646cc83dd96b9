"""Measure what is learned from small tables: `preset = "auto"` beside the paper's recipe and a search.

    python -m tests.defaults DATA MODEL [WAY …]

DATA has the folders glue/, ner/wnut17/ and squad/; MODEL is a small BERT. Each run is the command that a user types, on
a table of some rows that are drawn by a seed, scored on at most SCORED rows of dev. It adds a line to
recipes/defaults.jsonl and to the tables of recipes/defaults.md; a run that has its line is not repeated. With names of
WAYS only these are measured, so that with OMP_NUM_THREADS=1 processes can share the work, one for each core.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertkit.training.predictions import read_table
from bertkit.training.recipe import load_recipe
from bertkit.training.run_dir import describe_environment, read_metrics

ROOT = Path(__file__).parents[1]
FIGURES, PAGE = ROOT / "recipes" / "defaults.jsonl", ROOT / "recipes" / "defaults.md"
TABLES = {"presets": ("paper", "auto", "search"), "budgets": ("auto", "2m", "5m", "random")}  # mark -> ways
SCORED = 1_000
TOPICS = 15  # articles of SQuAD with the most questions
WAYS = {
    "paper": ["--set", "preset=paper"],
    "auto": ["--set", "preset=auto"],
    "search": ["--search", "6"],
    "2m": ["--budget", "2m"],
    "5m": ["--budget", "5m"],
    "random": ["--budget", "5m"],
}
RANDOM = (  # the same search with values that are drawn at random
    "import optuna, runpy; optuna.samplers.TPESampler = optuna.samplers.RandomSampler; "
    "runpy.run_module('bertkit', run_name='__main__')"
)
TEXT = (100, 300, 1000, 3000)
PLAN = {  # data -> rows -> seeds
    "SST-2": dict.fromkeys(TEXT, (1, 2, 3)),
    "CoLA": dict.fromkeys(TEXT, (1, 2, 3)),
    "topics": dict.fromkeys(TEXT, (1, 2)),
    "STS-B": dict.fromkeys((300, 3000), (1, 2)),
    "WNUT-17": dict.fromkeys((300, 3000), (1, 2)),
    "SQuAD 1.1": {300: (1, 2), 3000: (1,)},
}
KEYS = (
    "score",
    "score_low",
    "score_high",
    "majority_score",
    "best_baseline",
    "baseline_gain",
    "baseline_gain_low",
    "baseline_gain_high",
    "updates",
)

Rows = list[Any]


# --- The tables -------------------------------------------------------------------------------------------------------


def read_columns(path: Path, *numbers: int, heading: bool = True) -> Rows:
    """Read rows of some columns of a TSV file: texts, and the label as the last one."""
    lines = path.read_text(encoding="utf-8").splitlines()[heading:]
    names = ("text", "label") if len(numbers) == 2 else ("text1", "text2", "label")
    return [dict(zip(names, (line.split("\t")[n] for n in numbers), strict=True)) for line in lines]


def read_glue(folder: Path, *numbers: int, heading: bool = True) -> tuple[Rows, Rows]:
    """Read train and dev of a GLUE task."""
    return tuple(read_columns(folder / f"{split}.tsv", *numbers, heading=heading) for split in ("train", "dev"))


def read_topics(path: Path) -> tuple[Rows, Rows]:
    """Read the questions of the articles with the most questions, with the article as the label; 1,000 are dev."""
    articles = [
        (article["title"], [qa["question"] for part in article["paragraphs"] for qa in part["qas"]])
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]
    ]
    articles = sorted(articles, key=lambda pair: -len(pair[1]))[:TOPICS]
    rows = [{"text": question, "label": title} for title, questions in articles for question in questions]
    rows = draw(rows, len(rows), 0)
    return rows[SCORED:], rows[:SCORED]


def read_questions(folder: Path) -> tuple[Rows, Rows]:
    """Read questions in the form of a person's own file."""

    def flatten(path: Path) -> Rows:
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        pairs = [(part["context"], qa) for article in data for part in article["paragraphs"] for qa in part["qas"]]
        return [{"question": qa["question"], "context": context, "answers": qa["answers"]} for context, qa in pairs]

    return flatten(folder / "train-v1.1.json"), flatten(folder / "dev-v1.1.json")


def read_sentences(folder: Path) -> tuple[Rows, Rows]:
    """Read sentences with tags."""
    return tuple(
        re.split(r"\n\s*\n", (folder / f"{split}.conll").read_text(encoding="utf-8").strip())
        for split in ("train", "dev")
    )


READERS: dict[str, tuple[list[str], str, Callable[[Path], tuple[Rows, Rows]]]] = {  # command, folder, reader
    "SST-2": (["classify"], "glue/SST-2", lambda folder: read_glue(folder, 0, 1)),
    "CoLA": (["classify"], "glue/CoLA", lambda folder: read_glue(folder, 3, 1, heading=False)),
    "STS-B": (["classify", "--text", "text1,text2"], "glue/STS-B", lambda folder: read_glue(folder, 7, 8, 9)),
    "topics": (["classify"], "squad/train-v1.1.json", read_topics),
    "WNUT-17": (["ner"], "ner/wnut17", read_sentences),
    "SQuAD 1.1": (["squad", "--version", "1"], "squad", read_questions),
}


def draw(rows: Rows, number: int, seed: int) -> Rows:
    """Return some rows in an order that the seed decides."""
    return [rows[n] for n in np.random.default_rng(seed).permutation(len(rows))[:number].tolist()]


def write_rows(rows: Rows, path: Path) -> None:
    """Write rows as JSON lines, or sentences in CoNLL's columns."""
    if isinstance(rows[0], str):
        path.with_suffix(".conll").write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    else:
        path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- The runs ---------------------------------------------------------------------------------------------------------


def list_runs() -> Iterator[dict[str, Any]]:
    """Yield the data, rows, seed and way of each run, small tables first."""
    for rows in TEXT:
        for data, sizes in PLAN.items():
            for seed in sizes.get(rows, ()):
                for way in list_ways(data, rows, seed):
                    yield {"data": data, "rows": rows, "seed": seed, "way": way}


def list_ways(data: str, rows: int, seed: int) -> list[str]:
    """Return the ways that are measured: a search at 300 rows, budgets on three sets."""
    searched = rows == 300 and seed == 1 and data != "SQuAD 1.1"
    limited = rows in (300, 3000) and seed < 3 and data in ("SST-2", "topics", "WNUT-17")
    return ["paper", "auto", *["search"] * searched, *["2m", "5m"] * limited, *["random"] * (limited and seed == 1)]


def measure(root: Path, model: str, data: str, rows: int, seed: int, way: str) -> dict[str, Any]:
    """Do a run, and return its scores, what decided its length, and its seconds."""
    command, folder, read = READERS[data]
    train, dev = read(root / folder)
    with TemporaryDirectory() as directory:
        place, output = Path(directory) / "data", Path(directory) / "run"
        place.mkdir()
        write_rows(draw(train, rows, seed), place / "train")
        write_rows(draw(dev, SCORED, 0), place / "dev")
        words = [*command, "--data", str(place), "--model", model, "--output", str(output), "--seed", str(seed)]
        program = ["-c", RANDOM] if way == "random" else ["-m", "bertkit"]
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, *program, *words, *WAYS[way]], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        seconds, metrics = time.monotonic() - begun, read_metrics(output / "metrics.json")
        recipe, answers = load_recipe(output / "recipe.toml"), read_table(output / "predictions" / "dev.parquet")
        trials, machine = output / "search" / "trials.md", describe_environment()
        return {
            **{key: metrics[key] for key in KEYS if key in metrics},
            **{key: recipe.train.get(key) for key in ("learning_rate", "num_train_epochs")},
            "freeze": recipe.freeze,
            "trials": trials.read_text(encoding="utf-8").count("\n") if trials.exists() else 0,
            "answers": len(set(map(str, answers.column("prediction").to_pylist()))),
            "seconds": round(seconds),
            "processor": machine["processor"],
            "precision": machine["auto_precision"],
        }


# --- The table --------------------------------------------------------------------------------------------------------


def tabulate(figures: Rows, ways: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table: a row for some data and a number of rows, with means over the seeds."""
    heads = ["data", "rows", "seeds", *ways, "constant answer", "best baseline", "updates of auto", "seconds"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for data, sizes in PLAN.items():
        for rows in sizes:
            lines = [x for x in figures if (x["data"], x["rows"]) == (data, rows)]
            if "2m" in ways:
                seeds = {x["seed"] for x in lines if x["way"] in ("2m", "5m")}
                lines = [x for x in lines if x["seed"] in seeds]
            found = {way: [x for x in lines if x["way"] == way] for way in ways}
            if not (auto := found["auto"]):
                continue
            unit = 1 if data == "SQuAD 1.1" else 100
            scores = [describe([unit * x["score"] for x in found[way]]) for way in ways]
            majority = describe([unit * x["majority_score"] for x in auto if "majority_score" in x])
            baselines = describe([unit * (x["score"] - x["baseline_gain"]) for x in auto if "baseline_gain" in x])
            seconds = " / ".join(f"{mean(x['seconds'] for x in found[way]):.0f}" for way in ways if found[way])
            cells = [data, f"{rows:,}", len(auto), *scores, majority, baselines, auto[0]["updates"], seconds]
            yield "| " + " | ".join(map(str, cells)) + " |"


def describe(values: list[float]) -> str:
    """Return the mean of some values with the lowest and the highest one."""
    if not values:
        return ""
    return f"{mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def write_page(figures: Rows) -> None:
    """Write the tables into the page, each behind its mark."""
    page = PAGE.read_text(encoding="utf-8")
    for name, ways in TABLES.items():
        before, mark, after = page.partition(f"<!-- python -m tests.defaults: {name} -->\n")
        rest = after.split("\n\n", 1)[-1] if after.startswith("|") else after
        page = before + mark + "\n".join(tabulate(figures, ways)) + "\n\n" + rest
    PAGE.write_text(page, encoding="utf-8")


def read_figures() -> Rows:
    """Read the lines of the runs that were measured."""
    return [json.loads(line) for line in FIGURES.read_text(encoding="utf-8").splitlines()] if FIGURES.exists() else []


def main(root: str, model: str, *ways: str) -> None:
    """Do the runs that are left."""
    for wanted in list_runs():
        if wanted["way"] not in (ways or WAYS) or any(wanted.items() <= each.items() for each in read_figures()):
            continue
        line = json.dumps(wanted | measure(Path(root), model, **wanted))
        print(line, flush=True)
        with FIGURES.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        write_page(read_figures())
    write_page(read_figures())


if __name__ == "__main__":
    main(*sys.argv[1:])
