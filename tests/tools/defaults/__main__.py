"""Do the runs of the plan, or show what was measured; see `tests.tools.defaults`."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from filelock import FileLock, Timeout

from bertkit.analysis.expected import compare_sides
from bertkit.data.sequences import encode_inputs
from bertkit.data.tagging import ABSENT
from bertkit.metrics.rows import take_values
from bertkit.tasks import TASKS
from bertkit.tasks.frozen import choose_head, encode, load_encoder
from bertkit.tasks.ner import fill_summaries, get_words
from bertkit.tasks.task import Task
from bertkit.training.baselines import Baseline, answer, fit_frozen, fit_texts, fit_words
from bertkit.training.predictions import TABLE_SUFFIX, join_rows, pack_table
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, RECIPE_FILE, describe_environment, read_metrics
from tests.tools.defaults.page import print_choices, write_tables
from tests.tools.defaults.plan import COMMANDS, PLAN, READERS, SCORED, WAYS, draw, list_runs, name_run, write_rows

LOG = "log.txt"
MAX_LENGTH = 128
OLD_UPDATES, BATCH = 300, 32  # the length of `auto` before it started from a solved head


def fit_usual(fit: Callable[..., Baseline], *args: Any) -> Baseline:
    """Return the answers of a baseline with scikit-learn's own C = 1 in place of one that folds choose."""
    with patch.multiple(
        "bertkit.training.baselines",
        choose_head=lambda vectors, *rest: (next(iter(vectors)), 1.0),
        keep_answers=lambda name, facts, compute: compute(),  # the cache has those of the other way
    ):
        return fit(*args)


def fit_both(task: Task, recipe: Recipe, prepared: Prepared, dev: str) -> Baseline:
    """Return the answers of a linear head on the vectors of the two texts of a pair, each read alone."""
    encoder, features = load_encoder(recipe.checkpoint, "last"), []
    for pairs in (prepared.texts, [*task.tabulate_examples(prepared.examples[dev]).walk_texts()]):
        sides = (encode_inputs(texts, None, prepared.tokenizer, MAX_LENGTH) for texts in zip(*pairs, strict=True))
        features.append(compare_sides(*(encode(encoder, side) for side in sides)))
    train, asked = features
    targets, labels = prepared.data["train"].labels, len(prepared.settings["id2label"])
    _, strength = choose_head({"both": train}, targets, labels, prepared.groups)
    return Baseline(answer(train, asked, targets, strength, labels), np.arange(len(asked)), len(targets))


FITTERS = {"both": fit_both, "frozen": fit_frozen, "tfidf": fit_texts, "words": fit_words}
FITTERS |= {f"{name}-1": partial(fit_usual, FITTERS[name]) for name in ("frozen", "tfidf")}


def measure(root: Path, model: str, output: Path, data: str, rows: int, seed: int, way: str) -> None:
    """Do a run, and keep what is compared; its scores are written last."""
    _, _, folder, read = READERS[data]
    train, dev = read(root / folder)
    with TemporaryDirectory() as directory:
        place = Path(directory) / "data"
        place.mkdir()
        write_rows(draw(train, rows, seed), place / "train")
        write_rows(draw(dev, SCORED, 0), place / "dev")
        (output / PREDICTIONS).mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        do = partial(train_command, rows=rows) if way in COMMANDS else answer_dev
        metrics = do(data, way=way, place=place, model=model, seed=seed, output=output)
        metrics["seconds"] = round(time.monotonic() - begun, 1)
    metrics["processor"] = describe_environment()["processor"]
    (output / METRICS_FILE).write_text(json.dumps(metrics), encoding="utf-8")


def train_command(data: str, rows: int, way: str, place: Path, model: str, seed: int, output: Path) -> dict[str, Any]:
    """Train by the command that a user types, and return the scores."""
    command, texts, _, _ = READERS[data]
    run = place.with_name("run")
    words = [*command, "--data", str(place), "--model", model, "--output", str(run), "--seed", str(seed)]
    words += ["--text", ",".join(texts)] if texts else []
    words += COMMANDS[way]
    if way == "old":
        epochs = min(max(ceil(OLD_UPDATES * BATCH / rows), 3), 20)
        words += ["--epochs", str(epochs), "--set", "data.pooling=cls" if texts else "data.order="]
    with (output / LOG).open("w", encoding="utf-8") as log:
        program = "tests.tools.defaults.watched" if way == "auto" else "bertkit"
        subprocess.run([sys.executable, "-m", program, *words], stdout=log, stderr=log, check=True)
    for path in (run / PREDICTIONS).glob(f"*{TABLE_SUFFIX}"):
        shutil.copy(path, output / PREDICTIONS)
    shutil.copy(run / RECIPE_FILE, output)
    return read_metrics(run / METRICS_FILE)


def answer_dev(data: str, way: str, place: Path, model: str, seed: int, output: Path) -> dict[str, Any]:
    """Write the prediction table of a baseline or of another program, and return its score."""
    (name, *_), texts, _, _ = READERS[data]
    task = TASKS[name]
    columns = {"text": texts} if texts else {}
    recipe = Recipe.make(
        task, {"checkpoint": model, "start": "random", "baseline": True, "data": {"dir": str(place), **columns}}
    )
    prepared = prepare(recipe)
    if way in FITTERS:
        summaries = FITTERS[way](task, recipe, prepared, "dev").summaries
    else:
        summaries = ask_other(way, prepared, place, model, output)
    rows = task.decode(summaries, prepared.data["dev"]).rows
    rows = join_rows(
        rows, task.tabulate_examples(prepared.examples["dev"]), prepared.tokenizer, task=task.name, split="dev"
    )
    (output / PREDICTIONS / f"dev{TABLE_SUFFIX}").write_bytes(pack_table(rows))
    return {"score": take_values(task.score(rows))[task.metric]}


def ask_other(way: str, prepared: Prepared, place: Path, model: str, output: Path) -> np.ndarray:
    """Return the summaries of dev by another program: SetFit for texts, CRFsuite for words."""
    names = list(prepared.settings["id2label"].values())
    if way == "crf":
        sentences = get_words(prepared.data["dev"])
        tagged = get_words(prepared.data["train"]).text.sentences
        given = {"train": [x.words for x in tagged], "labels": [x.tags for x in tagged]}
        given["dev"] = [x.words for x in sentences.text.sentences]
    else:
        train, dev = (
            list(map(json.loads, (place / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()))
            for split in ("train", "dev")
        )
        given = {"train": [row["text"] for row in train], "labels": [row["label"] for row in train]}
        given["dev"] = [row["text"] for row in dev]
    paths = place / "given.json", place / "answers.json"
    paths[0].write_text(json.dumps(given), encoding="utf-8")
    program = str(Path(__file__).with_name("others.py"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [os.environ["SETFIT_PYTHON"], program, way, model, *map(str, paths)]
    with (output / LOG).open("w", encoding="utf-8") as log:
        subprocess.run(words, stdout=log, stderr=log, env=environment, check=True)
    answers = json.loads(paths[1].read_text(encoding="utf-8"))
    if way == "setfit":
        return np.eye(len(names))[[names.index(answer) for answer in answers]]
    labels = np.array([names.index(tag) for tags in answers for tag in tags])
    return fill_summaries(sentences, labels[sentences.firsts != ABSENT])


def main(root: str, model: str, output: str, *asked: str) -> None:
    """Do the runs that are left, or show what was measured."""
    out = Path(output)
    if "--choices" in asked:
        print_choices(out)
    elif "--table" in asked:
        write_tables(out)
    else:
        do_runs(Path(root), model, out, {*asked})


def do_runs(root: Path, model: str, out: Path, asked: set[str]) -> None:
    """Do the runs that are left, all or those of some ways and data."""
    out.mkdir(parents=True, exist_ok=True)
    ways, names = asked & {*WAYS} or {*WAYS}, asked & PLAN.keys() or PLAN.keys()
    for data, rows, seed, way in list_runs():
        folder = out / name_run(data, rows, seed, way)
        if way not in ways or data not in names or (folder / METRICS_FILE).exists():
            continue
        try:
            with FileLock(f"{folder}.lock", blocking=False):  # another process may be at it
                if not (folder / METRICS_FILE).exists():
                    measure(root, model, folder, data, rows, seed, way)
                    print(folder.name, read_metrics(folder / METRICS_FILE)["score"], flush=True)
        except Timeout:
            continue
        except subprocess.CalledProcessError:
            print(folder.name, "failed", flush=True)  # its log says why; the next start tries again


if __name__ == "__main__":
    main(*sys.argv[1:])
