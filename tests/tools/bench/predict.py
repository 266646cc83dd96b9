"""Predict classes of texts here and by the pipeline of plain transformers at several batch sizes.

    python -m tests.tools.bench predict RUN --input texts.txt --export EXPORT

All sides get the same texts of mixed length on the same device: in fp32, the pipeline's default, and in the precision
in which the hardware is fastest. Loading is left out.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import pipeline

from bertkit.inference.predictor import Predictor
from bertkit.model.precision import DTYPES, choose_device, choose_precision
from tests.tools.bench.measure import BERTKIT, Record, say, time_call
from tests.tools.bench.model import SEED, SIZES, make_texts, write_classifier

# Words of a made text, log-normal as in reviews: the median, the standard deviation of the logarithm, the maximum.
MEDIAN, SPREAD, LONGEST = 30.0, 0.9, 400
TINY = {"size": "tiny", "texts": 8, "repeats": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="text classifier (default: random weights of --size)")
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--input", type=Path, metavar="FILE", help="a text per line (default: made texts)")
    parser.add_argument("--texts", type=int, default=64, help="number of texts (default: %(default)s)")
    parser.add_argument("--export", metavar="DIR", help="an export of RUN, also timed")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")


def bench(given: argparse.Namespace, record: Record) -> None:
    """Measure predictions."""
    if given.input:
        texts = given.input.read_text(encoding="utf-8").splitlines()[: given.texts]
    else:
        lengths = np.exp(np.random.default_rng(SEED).normal(math.log(MEDIAN), SPREAD, given.texts))
        texts = make_texts(lengths.round().clip(1, LONGEST).astype(int).tolist())
    with TemporaryDirectory() as folder:
        run = given.run or write_classifier(folder, given.size)
        for precision in dict.fromkeys(("fp32", choose_precision("auto"))):
            calls = make_sides(run, texts, precision, given.export)
            answers = [call() for call in calls.values()]  # this warms up, too
            pairs = list(zip(*answers[:2], strict=True))
            apart = [abs(ours["probabilities"][stock["label"]] - stock["score"]) for ours, stock in pairs]
            record.facts[f"other classes in {precision}"] = sum(one["label"] != two["label"] for one, two in pairs)
            record.facts[f"largest difference of a probability in {precision}"] = max(apart)
            sides = {name: lambda call=call: len(texts) / time_call(call) for name, call in calls.items()}
            record.alternate(f"Texts in {precision}", sides, given.repeats)


def make_sides(run: str, texts: list[str], precision: str, export: str | None) -> dict[str, Any]:
    """Return the call of each side, this package's and the pipeline's first."""
    predictor, device = Predictor(run, pairs=False, precision=precision), choose_device()
    stock = pipeline("text-classification", model=run, device=device, dtype=DTYPES.get(precision, torch.float32))
    options = {"truncation": True, "max_length": predictor.settings.max_length}
    sizes = (1, 8, 32) if device.type == "cpu" else (1, 8, 32, 128)
    say(f"{len(texts):,} texts on {device}, {precision}")
    calls = {BERTKIT: partial(predictor, texts)}
    calls |= {f"pipeline, batches of {size}": partial(stock, texts, batch_size=size, **options) for size in sizes}
    return calls | ({"bertkit, export": partial(Predictor(export, pairs=False), texts)} if export else {})
