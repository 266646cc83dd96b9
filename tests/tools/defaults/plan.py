"""The runs that are measured: rows of which data, by which seeds, in which ways."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCORED = 1_000
TOPICS = 15  # articles of SQuAD with the most questions
PLAN = {  # data -> rows
    "SST-2": (50, 100, 300, 1000, 3000),
    "CoLA": (100, 300, 1000, 3000),
    "topics": (50, 100, 300, 1000, 3000),
    "STS-B": (100, 300, 1000, 3000),
    "RTE": (300, 1000),
    "WNUT-17": (100, 300, 1000, 3000),
}
TYPES = "types"  # the types of names in each sentence of WNUT-17, as several labels of a text
LIMITED = ("SST-2", "topics", "WNUT-17")  # data that are also learned within a time
COMMANDS = {  # way -> options of a run
    "auto": (),
    "old": ("--set", "start=random"),
    **{budget: ("--budget", budget) for budget in ("1m", "2m", "5m")},
}
BUDGETS = ("1m", "2m", "5m")
BASELINES = ("frozen", "tfidf", "words", "frozen-1", "tfidf-1", "both")
OTHERS = ("setfit", "crf")  # others.py
WAYS = (*COMMANDS, *BASELINES, *OTHERS)

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


def read_sentences(folder: Path) -> tuple[Rows, Rows]:
    """Read sentences with tags."""
    return tuple(
        re.split(r"\n\s*\n", (folder / f"{split}.conll").read_text(encoding="utf-8").strip())
        for split in ("train", "dev")
    )


def read_types(folder: Path) -> tuple[Rows, Rows]:
    """Read sentences with the types of their names as labels."""
    found = []
    for sentences in read_sentences(folder):
        lines = [[line.split() for line in sentence.splitlines()] for sentence in sentences]
        types = [sorted({line[-1][2:] for line in words if line[-1] != "O"}) for words in lines]
        texts = [" ".join(line[0] for line in words) for words in lines]
        found.append([{"text": text, "label": names} for text, names in zip(texts, types, strict=True) if names])
    train, dev = found
    return train, dev


# data -> command, columns of texts, folder, reader
READERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, Callable[[Path], tuple[Rows, Rows]]]] = {
    "SST-2": (("classify",), ("text",), "glue/SST-2", lambda folder: read_glue(folder, 0, 1)),
    "CoLA": (("classify",), ("text",), "glue/CoLA", lambda folder: read_glue(folder, 3, 1, heading=False)),
    "STS-B": (("classify",), ("text1", "text2"), "glue/STS-B", lambda folder: read_glue(folder, 7, 8, 9)),
    "RTE": (("classify",), ("text1", "text2"), "glue/RTE", lambda folder: read_glue(folder, 1, 2, 3)),
    "topics": (("classify",), ("text",), "squad/train-v1.1.json", read_topics),
    TYPES: (("classify",), ("text",), "ner/wnut17", read_types),
    "WNUT-17": (("ner",), (), "ner/wnut17", read_sentences),
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


def list_seeds(data: str, rows: int) -> tuple[int, ...]:
    """Return the seeds of the rows that are drawn."""
    if (data, rows) == ("topics", 50):
        return (2, 3, 8)  # other draws lack topics
    return (1, 2, 3) if rows <= 300 else (1, 2)


def list_ways(data: str, rows: int) -> list[str]:
    """Return the ways that are measured: times on three sets, other programs where they are of use."""
    ways = ["words", "crf"] if data == "WNUT-17" else ["frozen", "tfidf", "frozen-1", "tfidf-1"]
    ways += ["both"] if len(READERS[data][1]) == 2 else []
    ways += ["auto", "old"]
    if data in LIMITED and rows == 300:
        ways += BUDGETS
    if data in LIMITED and rows == 3000:
        ways += BUDGETS[1:]
    if data in ("SST-2", "CoLA", "topics") and rows <= 300:
        ways += ["setfit"]
    return ways


def list_runs() -> Iterator[tuple[str, int, int, str]]:
    """Yield the data, rows, seed and way of each run, small tables first."""
    for rows in sorted({rows for sizes in PLAN.values() for rows in sizes}):
        for data in (data for data, sizes in PLAN.items() if rows in sizes):
            for way in list_ways(data, rows):
                seeds = list_seeds(data, rows)
                for seed in seeds[:2] if way in (*BUDGETS, "setfit") else seeds:
                    yield data, rows, seed, way


def name_run(data: str, rows: int, seed: int, way: str) -> str:
    """Return the name of the folder of a run."""
    return f"{data}-{rows}-{seed}-{way}"
