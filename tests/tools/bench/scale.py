"""Measure how cost grows: texts of a call, rows of an evaluation and of a table, tokens of a corpus, runs of a study.

    python -m tests.tools.bench scale --page recipes/scale.md

The model has two layers of 128 and random weights, all data are made. Each size is measured in a process of its own,
whose peak memory it therefore is; its seconds begin after the imports. The ids of a corpus are all 0, in files with
holes, so that a small disk holds them: reading them costs memory bandwidth, but not the disk.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from bertkit.data.pretraining.build import TOKENS_A_SHARD
from bertkit.data.pretraining.store import CORPUS_INDEX, SHARD_SUFFIX, SHARDS, write_manifest
from bertkit.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, make_tokenizer, save_tokenizer
from bertkit.errors import UsageError, pluralize
from bertkit.inference.evaluate import evaluate
from bertkit.inference.predictor import Predictor
from bertkit.metrics.table import LABEL, PREDICTION, PROBABILITY_PREFIX, make_rows
from bertkit.studies.cells import list_cells
from bertkit.studies.runner import make_jobs, run_study
from bertkit.studies.spec import STUDY_FILE, define, make_study
from bertkit.system.files import write_json
from bertkit.tasks import TASKS
from bertkit.tasks.glue import BENCHMARKS, GRID
from bertkit.training.predictions import GROUP, KEY, ROW_NUMBER, TABLE_FORMAT, TABLE_SUFFIX, pack_table
from bertkit.training.recipe import Recipe, save_recipe
from bertkit.training.run_dir import ENVIRONMENT, LOG, METRICS_FILE, PREDICTIONS, RECIPE_FILE
from tests.tools.bench.measure import Record, format_table, read_memory, say
from tests.tools.bench.model import SEED, WORDS, make_texts, write_classifier

CHECKOUT = Path(__file__).parents[3]
LABELS = ("LABEL_0", "LABEL_1")  # the classes of the model
NAMES = ("first", "second", "third")  # the classes of a prediction table
WORDS_A_TEXT = (1, 20)  # the least and the most, uniform
TOKENS_A_SENTENCE, SENTENCES_A_DOCUMENT = (1, 41), (1, 61)  # means of 21 and 31, as in the paper's corpus (RESULTS.md)
SENTENCES_A_BLOCK = 1 << 22  # sentence ends written at once
BYTES_A_TOKEN = 2
LENGTH = 128  # tokens of a pair
BATCH = 256  # A.2
BATCHES = 100  # that a rate is measured on
CALLS, ROWS, TOKENS, RUNS = "Texts of a call", "Rows that are scored", "Tokens of a corpus", "Runs of a study"
TABLES = {  # title -> headings
    CALLS: ("texts", "seconds", "texts per second"),
    ROWS: ("of", "rows", "seconds", "rows per second", "peak MB"),
    TOKENS: ("tokens", "start", "open (s)", "plan (s)", "first batch (s)", "sequences per second", "peak MB"),
    RUNS: ("of", "runs", "seconds", "ms per run", "ms to write study.json", "peak MB"),
}
SEEDS = [42, 43, 44]  # of the finished runs
WORKERS = 2  # runs of one update at a time
DEV_ROWS = 100  # rows of the prediction table of a finished run
LEAST_SECONDS, MOST_REPEATS = 1.0, 50  # a short call is repeated for so long, and its median is taken
TINY = {"texts": 8, "rows": 30, "table": 300, "gigabytes": 1e-4, "runs": 1, "tasks": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--texts", type=int, default=4096, help="most texts of a call (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="most rows evaluated (default: %(default)s)")
    parser.add_argument("--table", type=int, default=1_000_000, help="most rows of a table (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the larger corpus (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=25, help="of the larger study (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=8, help="of the finished studies (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="an existing folder for made data (default: the system's)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables to this page")


def bench(given: argparse.Namespace, record: Record) -> None:
    """Measure each curve while there is time, and write what there is to the page."""
    with TemporaryDirectory(dir=given.folder) as folder:
        write_classifier(str(Path(folder, "model")), "tiny")
        for title, make_rows_of, sizes in list_curves(given):
            table = record.tables.setdefault(title, [list(TABLES[title])])
            for size in sizes:
                if time.monotonic() > record.end:
                    record.failure = "no time for all sizes within --minutes"
                    return
                for row in make_rows_of(Path(folder), size):
                    say(f"{title}: {', '.join(row)}")
                    table.append(row)
    if given.page:
        given.page.write_text(write_page(given.page.read_text(encoding="utf-8"), record), encoding="utf-8")


def list_curves(given: argparse.Namespace) -> list[tuple[str, Callable[[Path, Any], list[list[str]]], list[Any]]]:
    """Return each curve: the title of its table, the function that returns the rows of a size, and the sizes."""
    return [
        (CALLS, measure_texts, [given.texts]),  # with all smaller calls
        (ROWS, measure_evaluation, divide(given.rows, 100, 10, 1)),
        (ROWS, measure_table, divide(given.table, 100, 10, 1)),
        (TOKENS, measure_corpus, [given.gigabytes / 10, given.gigabytes]),
        (RUNS, measure_runs, divide(given.runs, 5, 1)),
        (RUNS, measure_finished, divide(given.tasks, 8, 1)),
    ]


def divide(most: int, *parts: int) -> list[int]:
    """Return the different sizes, at least 1, that are these parts of the largest one."""
    return sorted({max(most // part, 1) for part in parts})


def write_page(page: str, record: Record) -> str:
    """Return a page with the tables of a record below the lines of their titles."""
    for title, table in record.tables.items():
        pattern = re.compile(rf"(^{re.escape(title)}[^|]*\n\n)(?:\|.*\n)+", re.MULTILINE)
        if not pattern.search(page):
            raise UsageError(f"the page has no table {title!r}; add its title and a row")
        lines = "".join(f"{line}\n" for line in format_table(table))
        page = pattern.sub(lambda found, lines=lines: found[1] + lines, page)
    return page


# --- A size in a process of its own -----------------------------------------------------------------------------------


def measure_apart(point: str, *words: Any) -> dict[str, float]:
    """Run a function of POINTS in its own process, and return its figures and `megabytes`, the peak of the process.

    Raises:
        UsageError: It fails.
    """
    command = [sys.executable, "-m", "tests.tools.bench.scale", point, *map(str, words)]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UsageError(f"{' '.join(command[1:])} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def time_median(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, the median where it is short enough to be repeated."""
    seconds: list[float] = []
    while sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_REPEATS:
        gc.collect()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def show(value: float) -> str:
    """Return a figure with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- Predicting -------------------------------------------------------------------------------------------------------


def measure_texts(folder: Path, most: int) -> list[list[str]]:
    """Return a row per number of texts in a call."""
    found = measure_apart("predict", folder / "model", most)
    found.pop("megabytes")  # those of the largest call
    return [[f"{int(count):,}", show(seconds), show(int(count) / seconds)] for count, seconds in found.items()]


def time_predicting(model: str, most: str) -> dict[str, float]:
    """Return the seconds of calls by their number of texts."""
    predictor, number, found = Predictor(model, pairs=False), 1, {}
    texts = make_texts(np.random.default_rng(SEED).integers(*WORDS_A_TEXT, int(most), endpoint=True).tolist())
    predictor(texts[:64])  # warms up
    while number <= int(most):
        found[str(number)] = time_median(lambda number=number: predictor(texts[:number]))
        number *= 8
    return found


# --- Evaluating -------------------------------------------------------------------------------------------------------


def measure_evaluation(folder: Path, count: int) -> list[list[str]]:
    """Return the row of an evaluation of `count` rows."""
    random, path = np.random.default_rng(SEED), folder / f"rows-{count}.csv"
    texts = make_texts(random.integers(*WORDS_A_TEXT, count, endpoint=True).tolist())
    pa.csv.write_csv(pa.table({"text": texts, "label": random.choice(LABELS, count)}), path)
    found = measure_apart("evaluate", folder / "model", path, folder / path.stem)
    return [["a file", f"{count:,}", *show_costs(count, found)]]


def show_costs(count: int, found: dict[str, float]) -> list[str]:
    """Return the seconds, the rate and the memory of a number of rows."""
    return [show(found["seconds"]), show(count / found["seconds"]), show(found["megabytes"])]


def time_evaluating(model: str, path: str, output: str) -> dict[str, float]:
    """Return the seconds of an evaluation of a file."""
    start = time.perf_counter()
    evaluate(model, path, Path(output), text=["text"], label=["label"])
    return {"seconds": time.perf_counter() - start}


def measure_table(folder: Path, count: int) -> list[list[str]]:
    """Return the row of the scores of a prediction table of `count` rows."""
    path = folder / f"table-{count}{TABLE_SUFFIX}"
    path.write_bytes(pack_table(make_predictions(count)))
    return [["a table", f"{count:,}", *show_costs(count, measure_apart("score", path))]]


def make_predictions(count: int) -> pa.Table:
    """Return a prediction table of three classes, about 70 % right, with probabilities and a text per row."""
    random = np.random.default_rng(SEED)
    logits, right = random.normal(size=(count, len(NAMES))), random.integers(0, len(NAMES), count)
    logits[np.arange(count), right] += 1.2
    shares = np.exp(logits)
    shares /= shares.sum(axis=1, keepdims=True)
    names, keys = np.array(NAMES), np.arange(count, dtype=np.uint64)
    columns = {KEY: keys, ROW_NUMBER: np.arange(2, count + 2), GROUP: keys}
    columns["text"] = random.choice(WORDS, count)
    columns |= {LABEL: names[right], PREDICTION: names[shares.argmax(axis=1)]}
    columns |= {f"{PROBABILITY_PREFIX}{name}": shares[:, number] for number, name in enumerate(NAMES)}
    return make_rows(columns, table=TABLE_FORMAT, task="classify", split="dev", names=list(NAMES), texts=["text"])


def time_scoring(path: str) -> dict[str, float]:
    """Return the seconds of the scores of a prediction table, with their intervals."""
    start = time.perf_counter()
    evaluate(path, None, None)
    return {"seconds": time.perf_counter() - start}


# --- Reading a corpus -------------------------------------------------------------------------------------------------


def measure_corpus(folder: Path, gigabytes: float) -> list[list[str]]:
    """Return the rows of a corpus of this size: its first start, and one that has its plans."""
    corpus = folder / f"corpus-{gigabytes}"
    tokens = write_corpus(corpus, int(gigabytes * 1e9 / BYTES_A_TOKEN))
    rows = []
    for name in ("first", "next"):
        found = measure_apart("read", corpus)
        figures = [show(found[key]) for key in ("open", "encode", "batch", "rate", "megabytes")]
        rows.append([f"{gigabytes:g} GB, {tokens / 1e6:,.0f} M tokens", name, *figures])
    return rows


def write_corpus(folder: Path, tokens: int) -> int:
    """Write a corpus as `bertkit corpus build` lays it out, whose shards are holes, and return its tokens.

    A shard has no ends of sentences: the index has those of the whole corpus, and reading needs only these.
    """
    (folder / SHARDS).mkdir(parents=True)
    save_tokenizer(make_tokenizer([*SPECIAL_TOKENS, *WORDS], cased=False), folder)
    random = np.random.default_rng(SEED)
    sentences = max(tokens // (sum(TOKENS_A_SENTENCE) // 2), 200)
    ends, last = np.empty(sentences, np.int64), 0
    for start in range(0, sentences, SENTENCES_A_BLOCK):
        sizes = random.integers(*TOKENS_A_SENTENCE, min(SENTENCES_A_BLOCK, sentences - start), endpoint=True)
        ends[start : start + len(sizes)] = last + np.cumsum(sizes)
        last = int(ends[start + len(sizes) - 1])
    enough = 100 + 2 * sentences // sum(SENTENCES_A_DOCUMENT) * 5 // 4  # documents, a quarter more than are needed
    documents = np.cumsum(random.integers(*SENTENCES_A_DOCUMENT, enough, endpoint=True))
    documents = np.append(documents[documents < sentences], sentences)
    names = [f"{CORPUS_INDEX}-00000000{SHARD_SUFFIX}"]
    write_arrays(folder / names[0], {"sentence_ends": ends, "document_ends": documents})
    for number, start in enumerate(range(0, last, TOKENS_A_SHARD)):
        names.append(f"{SHARDS}/{0:05d}-{number:04d}-00000000{SHARD_SUFFIX}")
        write_holes(folder / names[-1], min(TOKENS_A_SHARD, last - start))
    statistics = {"unknown_rate": 0.0, "pairs": {"128": {"random_next": 0.5}}}
    write_manifest(folder, names, {"dtype": "uint16", "statistics": statistics})
    return last


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays of int64 to a file as the store does, without a copy of them in memory."""
    header: dict[str, Any] = {"__metadata__": {"bertkit": "{}"}}
    start = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "I64", "shape": [len(array)], "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    with path.open("wb") as stream:
        write_header(stream, header)
        for array in arrays.values():
            array.tofile(stream)


def write_holes(path: Path, tokens: int) -> None:
    """Write a shard of this number of tokens, all 0, that takes no place on the disk."""
    size = BYTES_A_TOKEN * tokens
    header = {"__metadata__": {"bertkit": "{}"}, "ids": {"dtype": "U16", "shape": [tokens], "data_offsets": [0, size]}}
    with path.open("wb") as stream:
        stream.truncate(write_header(stream, header) + size)


def write_header(stream: Any, header: dict[str, Any]) -> int:
    """Write the header of a safetensors file, and return its size."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    return stream.tell()


def time_reading(folder: str) -> dict[str, float]:
    """Return the seconds of opening a corpus and encoding it, of the first batch, and sequences per second after it."""
    task, marks = TASKS["pretrain"], [time.perf_counter()]
    recipe = Recipe.make(task, {"data": {"corpus": [folder], "max_length": LENGTH}, "batch_size": BATCH})
    examples = task.load(recipe.data, lambda line: None)
    tokenizer = load_tokenizer(folder)
    marks.append(time.perf_counter())
    data = task.encode(examples["train"], tokenizer, recipe, "train")
    marks.append(time.perf_counter())
    data.__getitems__(range(BATCH))
    marks.append(time.perf_counter())
    for number in range(1, BATCHES + 1):
        data.__getitems__(range(BATCH * number, BATCH * (number + 1)))
    opened, encoded, first = np.diff(marks).tolist()
    rate = BATCHES * BATCH / (time.perf_counter() - marks[-1])
    return {"open": opened, "encode": encoded, "batch": first, "rate": rate}


# --- Studies ----------------------------------------------------------------------------------------------------------


def measure_runs(folder: Path, runs: int) -> list[list[str]]:
    """Return the row of a study of `runs` runs of one update."""
    path = folder / "study.csv"
    if not path.exists():
        texts = make_texts([10] * 40)
        pa.csv.write_csv(pa.table({"text": texts, "label": np.resize(LABELS, len(texts))}), path)
    found = measure_apart("run", folder / "model", path, folder / f"runs-{runs}", runs)
    return [["one update", *show_runs(runs, found)]]


def show_runs(runs: int, found: dict[str, float]) -> list[str]:
    """Return the cells of a number of runs."""
    figures = (found["seconds"], 1000 * found["seconds"] / runs, 1000 * found["write"], found["megabytes"])
    return [f"{runs:,}", *map(show, figures)]


def time_runs(model: str, path: str, output: str, runs: str) -> dict[str, float]:
    """Return the seconds of a study of some seeds."""
    recipe = {"checkpoint": model, "baseline": False, "start": "random", "batch_size": 8}
    recipe |= {"data": {"dir": path, "text": ["text"], "label": ["label"]}, "train": {"max_steps": 1}}
    column = {"name": "made", "task": "classify"}
    study = make_study({"column": [column], "seeds": list(range(int(runs))), "recipe": recipe})
    start = time.perf_counter()
    results = run_study(study, output=output, workers=WORKERS)
    seconds = time.perf_counter() - start
    if results.failed:
        raise UsageError(f"{results.failed} of {results.runs} runs failed; see {output}")
    return {"seconds": seconds, "write": time_median(lambda: results.write(Path(output)))}


def define_grid(model: str, tasks: int) -> dict[str, Any]:
    """Return the study of the first tasks of GLUE with the paper's grid and three seeds."""
    names = [row.name for row in BENCHMARKS if row.metrics and row.name != "wnli"][:tasks]
    columns = [{"name": name, "task": name} for name in names]
    return {"column": columns, "seeds": SEEDS, "grid": GRID, "recipe": {"checkpoint": model}}


def measure_finished(folder: Path, tasks: int) -> list[list[str]]:
    """Return the row of a finished study that is asked for again."""
    output, random = folder / f"finished-{tasks}", np.random.default_rng(SEED)
    study = make_study(define_grid(str(folder / "model"), tasks))
    _, jobs = make_jobs([], list_cells(study, output), output)
    table = pack_table(make_predictions(DEV_ROWS))
    output.mkdir()
    save_recipe(define(study), output / STUDY_FILE)
    for job in jobs.values():
        write_run(Path(job.output), job.recipe, table, random.uniform(0.5, 0.9))
    found = measure_apart("tabulate", folder / "model", output, tasks)
    return [["finished", *show_runs(len(jobs), found)]]


def write_run(output: Path, recipe: Recipe, table: bytes, score: float) -> None:
    """Write the files of a finished run that a study reads, and its prediction table."""
    task = TASKS[recipe.task]
    (output / PREDICTIONS).mkdir(parents=True)
    save_recipe(recipe.to_dict(), output / RECIPE_FILE)
    values = {name: score + shift for name, shift in (("score", 0.0), ("score_low", -0.02), ("score_high", 0.02))}
    keys = [row.key for row in task.table]
    metrics = {key.replace("score", other): value for key, value in values.items() for other in ("score", *keys)}
    write_json(metrics | {"updates": 100, "majority_score": 0.5}, output / METRICS_FILE)
    write_json({"data": {"train": recipe.task}}, output / ENVIRONMENT)
    (output / LOG).write_text('{"step": 100, "epoch": 1.0, "loss": 0.5}\n', encoding="utf-8")
    (output / PREDICTIONS / f"dev{TABLE_SUFFIX}").write_bytes(table)


def time_tabulating(model: str, output: str, tasks: str) -> dict[str, float]:
    """Return the seconds of a finished study's tables, and of one writing of study.json, as after each run."""
    study = make_study(define_grid(model, int(tasks)))
    start = time.perf_counter()
    results = run_study(study, output=output)
    seconds = time.perf_counter() - start
    if results.over != results.runs or results.failed:
        raise UsageError(f"{pluralize(results.runs, 'run')} of {output} are not finished; they were not made well")
    return {"seconds": seconds, "write": time_median(lambda: results.write(Path(output)))}


POINTS: dict[str, Callable[..., dict[str, float]]] = {
    "predict": time_predicting,
    "evaluate": time_evaluating,
    "score": time_scoring,
    "read": time_reading,
    "run": time_runs,
    "tabulate": time_tabulating,
}

if __name__ == "__main__":
    figures = POINTS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(figures | {"megabytes": read_memory("VmHWM") / 1e6}))
