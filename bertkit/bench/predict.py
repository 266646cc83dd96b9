"""Benchmark a classifier's predictions against the pipeline of plain transformers at its best batch size.

Both sides get the same texts of mixed length, in the same process and on the same device: in fp32, the pipeline's
default, and in the precision in which the hardware is fastest. On a CPU the classifier's ONNX export in fp32 is timed,
too, if the extra onnx is installed; a given export, such as one in int8, is timed beside the fastest precision.

Left out: loading, and other heads: transformers has no pipeline for questions, endings and next sentences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import pipeline

from bertkit.bench.measure import BERTKIT, Measurement, alternate, note_machine, time_call
from bertkit.bench.synthetic_text import TEXT_SEED, draw_words, make_words
from bertkit.bench.training import choose_size
from bertkit.data.formats.rows import read_inputs
from bertkit.data.tokenizer import SPECIAL_TOKENS, make_tokenizer, save_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.export_record import find_export
from bertkit.inference.predictor import Predictor
from bertkit.model.config import BertConfig
from bertkit.model.heads import BertForSequenceClassification
from bertkit.model.onnx import ONNX_FILE, OnnxModel, write_onnx
from bertkit.model.precision import DTYPES, choose_precision
from bertkit.reports.tables import Table
from bertkit.system.progress import Report, ignore
from bertkit.tasks import ANSWERING

BATCH_SIZES = (1, 8, 32)  # of the pipeline
LARGE_BATCH = 128  # also of the pipeline, on an accelerator
EXPORT = "export"  # a side
TEXT_VARIETY = 8_000  # different words in synthetic text
# Words of a synthetic text: the median, the standard deviation of the logarithm, the maximum.
TEXT_LENGTH, TEXT_SPREAD, LONGEST_TEXT_WORDS = 30.0, 0.9, 400


def bench_predict(
    run: str | None = None,
    source: str | None = None,
    count: int = 512,
    repeats: int = 3,
    export: str | None = None,
    *,
    size: str = "base",
    report: Report = ignore,
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the texts per second of both sides, their ratio, and the difference of their answers.

    Args:
        run: A classifier; None uses random weights of the given size.
        source: A file of texts, as `bertkit predict` reads it; None makes synthetic texts.
        count: The number of texts, from the beginning of the file.
        export: An export of the run.
        size: The size of the random weights, for `choose_size`.

    Raises:
        UsageError: The run does not classify single texts, or a line has no text.
    """
    if run and find_export(run):
        raise UsageError(f"{run} is an export; give its run, and the export with --export")
    with TemporaryDirectory() as folder:
        name = run or make_classifier(Path(folder), size)
        texts = read_texts(source, count) if source else make_texts(count)
        found, tables = time_sides(name, texts, repeats, export, report)
    return found | {"run": run or f"BERT-{size}, random weights"}, tables


def time_sides(
    name: str, texts: Sequence[str], repeats: int, export: str | None, report: Report
) -> tuple[dict[str, Any], list[Table]]:
    """Measure both sides in fp32 and in the precision in which the hardware is fastest."""
    environment = note_machine(report)
    figures, answers, tables = {}, {}, []
    best_precision = choose_precision("auto")
    for precision in dict.fromkeys(("fp32", best_precision)):
        predictor = Predictor(name, pairs=False, precision=precision)
        settings = predictor.settings
        if predictor.task is not ANSWERING["BertForSequenceClassification"] or len(settings.labels) < 2:
            raise UsageError(f"{name} is not a text classifier; give one, or omit it for random weights")
        options = {"truncation": True, "max_length": settings.max_length}
        dtype = DTYPES.get(precision, torch.float32)
        stock = pipeline("text-classification", model=name, device=settings.model.device, dtype=dtype)
        calls = {BERTKIT: partial(predictor, texts)}
        is_on_cpu = settings.model.device.type == "cpu"
        sizes = BATCH_SIZES if is_on_cpu else (*BATCH_SIZES, LARGE_BATCH)
        pipelines = {f"pipeline of {size}": partial(stock, texts, batch_size=size, **options) for size in sizes}
        calls |= pipelines
        if precision == "fp32" and is_on_cpu and (exported := make_exported(name)):
            calls[EXPORT] = partial(exported, texts)
        if export and precision == best_precision:
            given = Predictor(export, pairs=False)
            calls[f"{EXPORT} in {given.precision}"] = partial(given, texts)
        report(f"{len(texts):,} texts on {settings.model.device}, {precision}")
        answers[precision] = {side: call() for side, call in calls.items()}  # warms up, off the clock
        seconds, _ = alternate({side: partial(time_call, call) for side, call in calls.items()}, repeats, report)
        measured = Measurement(seconds, dict.fromkeys(calls, len(texts)))
        best = measured.find_fastest(pipelines)
        figures[precision] = {
            "seconds": seconds,
            "texts_per_second": measured.rates,
            "best": best,
            "ratio": measured.compare(best),
        }
        tables.append(measured.tabulate(f"Predictions in {precision}", "texts"))
    exact, fast = figures["fp32"], figures[precision]
    plain = answers["fp32"][exact["best"]]
    apart = {name: compare_answers(made[BERTKIT], plain) for name, made in answers.items()}
    found = {
        "figures": figures,
        "ratio": exact["ratio"],
        "ratio_of_fastest_to_plain": fast["texts_per_second"][BERTKIT] / exact["texts_per_second"][exact["best"]],
        **apart["fp32"],
        "texts": len(texts),
        "tokens": sum(len(ids) for ids in settings.tokenizer(list(texts), **options)["input_ids"]),
        "device": str(settings.model.device),
        "threads": torch.get_num_threads(),
        "environment": environment,
    }
    for name, differences in apart.items():
        report(
            f"{name}: {figures[name]['ratio']:.2f} times the texts per second of the pipeline at its best, "
            f"{differences['other_labels']} of {len(texts):,} classes differ from the pipeline's in fp32, "
            f"probabilities by {differences['largest_difference']:.1e}"
        )
    if EXPORT in answers["fp32"]:
        found[EXPORT] = compare_answers(answers["fp32"][EXPORT], plain)
    if precision != "fp32":
        found["fastest"] = apart[precision] | {"precision": precision}
        ratio = found["ratio_of_fastest_to_plain"]
        report(f"{precision} is {ratio:.2f} times as fast as the pipeline in fp32, its default")
    return found, tables


def make_exported(name: str) -> Predictor | None:
    """Return a predictor with the ONNX export of a classifier, or None if onnxruntime is not installed."""
    if any(find_spec(package) is None for package in ("onnx", "onnxruntime", "onnxscript")):
        return None
    predictor = Predictor(name, pairs=False, precision="fp32")
    model = predictor.settings.model.to("cpu")
    with TemporaryDirectory() as folder:
        path = Path(folder, ONNX_FILE)
        write_onnx(model, path)
        predictor.settings = replace(predictor.settings, model=OnnxModel(path, model.config))
    return predictor


def compare_answers(ours: Sequence[Mapping[str, Any]], stock: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of texts whose classes differ, and the largest difference of a probability."""
    pairs = list(zip(ours, stock, strict=True))
    return {
        "other_labels": sum(one["label"] != other["label"] for one, other in pairs),
        "largest_difference": max(abs(one["probabilities"][other["label"]] - other["score"]) for one, other in pairs),
    }


# --- The input --------------------------------------------------------------------------------------------------------


def read_texts(source: str, count: int) -> list[str]:
    """Read the first `count` texts of a file."""
    texts = []
    for line in islice(read_inputs(source), count):
        given = line.value
        if isinstance(given, UsageError):
            raise UsageError(f"{line.place} {given}")
        text = given if isinstance(given, str) else given.get("text", given.get("sentence"))
        if not isinstance(text, str):
            raise UsageError(f"{line.place} has no text; give a file of texts")
        texts.append(text)
    if not texts:
        raise UsageError(f"{source} has no texts; give a file of texts")
    return texts


def make_texts(count: int) -> list[str]:
    """Make texts of synthetic words; lengths are log-normal, as those of reviews and sentences are."""
    random, words = np.random.default_rng(TEXT_SEED), make_words(TEXT_VARIETY)
    lengths = (
        np.exp(random.normal(math.log(TEXT_LENGTH), TEXT_SPREAD, count)).round().clip(1, LONGEST_TEXT_WORDS).astype(int)
    )
    return [" ".join(draw_words(words, length, random)) for length in lengths]


def make_classifier(folder: Path, size: str) -> str:
    """Write a model with random weights and a vocabulary of the synthetic words, and return the directory."""
    tokenizer = make_tokenizer([*SPECIAL_TOKENS, *make_words(TEXT_VARIETY).tolist()], cased=False)
    torch.manual_seed(TEXT_SEED)
    BertForSequenceClassification(BertConfig(**choose_size(size))).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)
