"""Predictions of a classifier, beside the pipeline of plain transformers at its best of three batch sizes.

Both get the same texts of mixed length, in the same process and on the same device; in fp32, which the pipeline has by
default, and in the precision that the hardware is fastest in.

Left out: loading, and other heads: transformers has no pipeline for questions, endings and next sentences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertkit.bench.measure import BERTKIT, REFERENCE, alternate, compare
from bertkit.bench.synthetic_text import TEXT_SEED, draw_words, make_words
from bertkit.data.formats.inputs import read_inputs
from bertkit.data.tokenizer import make_tokenizer, save_tokenizer
from bertkit.errors import UsageError
from bertkit.system.progress import Report, ignore
from bertkit.training.run_dir import describe_environment

BATCH_SIZES = (1, 8, 32)  # of the pipeline
TEXT_VARIETY = 8_000  # different ones in made-up text
# Words of a made-up text: the median, of logarithms the deviation, the most.
TEXT_LENGTH, TEXT_SPREAD, LONGEST_TEXT_WORDS = 30.0, 0.9, 400


def bench_predict(
    run: str | None = None, source: str | None = None, count: int = 512, repeats: int = 3, *, report: Report = ignore
) -> dict[str, Any]:
    """Texts a second of both sides, their ratio, and how far apart their answers are.

    Args:
        run: a classifier; None: BERT-base with random weights.
        source: a file of texts, as `bertkit predict` reads it; None: made-up ones.
        count: the first so many texts.

    Raises:
        UsageError: no classifier of single texts, or a line that is no text.
    """
    with TemporaryDirectory() as folder:
        name = run or make_classifier(Path(folder))
        texts = read_texts(source, count) if source else make_texts(count)
        return time_sides(name, texts, repeats, report) | {"run": run or "BERT-base, random weights"}


def time_sides(name: str, texts: Sequence[str], repeats: int, report: Report) -> dict[str, Any]:
    """The figures of both sides, in fp32 and in the precision that the hardware is fastest in."""
    import torch
    from transformers import pipeline

    from bertkit.inference.predictor import Predictor
    from bertkit.model.precision import DTYPES
    from bertkit.tasks import ANSWERING

    figures: dict[str, Any] = {}
    for asked in ("fp32", "auto"):
        predictor = Predictor(name, pairs=False, precision=asked)
        if predictor.task is not ANSWERING["BertForSequenceClassification"] or len(predictor.settings.labels) < 2:
            raise UsageError(f"{name} is no classifier of texts; give one, or none for random weights")
        device, precision = predictor.settings.model.device, predictor.precision
        if precision in figures:
            break
        dtype = DTYPES.get(precision, torch.float32)
        stock = pipeline("text-classification", model=name, device=device, dtype=dtype)
        options = {"truncation": True, "max_length": predictor.settings.max_length}
        sides: dict[str, Callable[[], Any]] = {BERTKIT: partial(predictor, texts)}
        sides |= {f"pipeline of {size}": partial(stock, texts, batch_size=size, **options) for size in BATCH_SIZES}
        report(f"{len(texts):,} texts on {device}, {torch.get_num_threads()} threads, {precision}")
        figures[precision] = measure_sides(sides, repeats, report)
    exact, fast = figures["fp32"], figures[precision]
    plain = exact.pop("stock")
    found = {
        "figures": figures,
        "ratio": exact["ratio"],
        "ratio_of_fastest_to_plain": fast["texts_per_second"][BERTKIT] / exact["texts_per_second"][exact["best"]],
        **compare_answers(exact.pop("answers"), plain),
        "texts": len(texts),
        "tokens": sum(len(ids) for ids in predictor.settings.tokenizer(list(texts), **options)["input_ids"]),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "environment": describe_environment(),
    }
    report(
        f"fp32: {found['ratio']:.2f} times the texts a second of the pipeline at its best ({exact['best']}); "
        f"{found['other_labels']} of {len(texts):,} classes differ, probabilities by {found['largest_difference']:.1e}"
    )
    if fast is not exact:
        fast.pop("stock")
        apart = compare_answers(fast.pop("answers"), plain)
        found["fastest"] = apart | {"precision": precision}
        report(
            f"{precision}: {fast['ratio']:.2f} times the pipeline in {precision}, "
            f"{found['ratio_of_fastest_to_plain']:.2f} times the pipeline in fp32, which it has by default; "
            f"{apart['other_labels']} of {len(texts):,} classes differ from those in fp32"
        )
    return found


def measure_sides(sides: Mapping[str, Callable[[], Any]], repeats: int, report: Report) -> dict[str, Any]:
    """Seconds, texts a second, the pipeline's best batch size and the ratio to it, and what both say."""
    made = {side: call() for side, call in sides.items()}  # once off the clock: what is made once is not measured
    seconds = alternate(sides, repeats, report)
    best = min((side for side in sides if side != BERTKIT), key=lambda side: median(seconds[side]))
    return {
        "seconds": seconds,
        "texts_per_second": {side: len(made[side]) / median(found) for side, found in seconds.items()},
        "best": best,
        "ratio": compare({BERTKIT: seconds[BERTKIT], REFERENCE: seconds[best]}),
        "answers": made[BERTKIT],
        "stock": made[best],
    }


def compare_answers(ours: Sequence[Mapping[str, Any]], stock: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many texts have another class, and the largest difference of a probability."""
    pairs = list(zip(ours, stock, strict=True))
    return {
        "other_labels": sum(one["label"] != other["label"] for one, other in pairs),
        "largest_difference": max(abs(one["probabilities"][other["label"]] - other["score"]) for one, other in pairs),
    }


# --- The input --------------------------------------------------------------------------------------------------------


def read_texts(source: str, count: int) -> list[str]:
    """The first texts of a file."""
    texts = []
    for line in islice(read_inputs(source), count):
        given = line.value
        if isinstance(given, UsageError):
            raise UsageError(f"{line.place}: {given}")
        text = given if isinstance(given, str) else given.get("text", given.get("sentence"))
        if not isinstance(text, str):
            raise UsageError(f"{line.place}: has no text; give a file of texts")
        texts.append(text)
    if not texts:
        raise UsageError(f"{source} has no texts; give a file that has")
    return texts


def make_texts(count: int) -> list[str]:
    """Texts of made-up words, of lengths as reviews and sentences have them: the logarithms are normal."""
    random, words = np.random.default_rng(TEXT_SEED), make_words(TEXT_VARIETY)
    lengths = (
        np.exp(random.normal(math.log(TEXT_LENGTH), TEXT_SPREAD, count)).round().clip(1, LONGEST_TEXT_WORDS).astype(int)
    )
    return [" ".join(draw_words(words, length, random)) for length in lengths]


def make_classifier(folder: Path) -> str:
    """A directory with BERT-base of random weights, which knows the made-up words."""
    import torch

    from bertkit.model.config import BertConfig
    from bertkit.model.heads import BertForSequenceClassification

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = make_tokenizer([*special, *make_words(TEXT_VARIETY).tolist()], cased=False)
    torch.manual_seed(TEXT_SEED)
    BertForSequenceClassification(BertConfig()).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)
