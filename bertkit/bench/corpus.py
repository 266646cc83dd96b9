"""Benchmark from text to masked next-sentence pairs (paper sections 3.1, A.2), against the reference code.

The reference is create_pretraining_data.py in the user's checkout of google-research/bert. It runs unchanged, with
stubs for six and for tensorflow, of which it needs only flags and files.

Both sides are timed on the same job: read and tokenize a file with one sentence per line and blank lines between
documents, and make pairs of at most 128 tokens with their masks from all copies of it, in random order. On this side
that is the whole path of a pretraining: `bertkit corpus build` writes the token ids to disk, and `PretrainingData`
returns every sample of the epochs in batches.

Left out on both sides: sentence splitting, training, and the reference's TFRecords, which would cost it more time to
write and read.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from bertkit.bench.measure import BERTKIT, REFERENCE, Measurement, alternate, note_machine, time_call
from bertkit.bench.reference import explain_failure, load_module
from bertkit.data.pretraining.build import build
from bertkit.data.pretraining.dataset import Phase, PretrainingData
from bertkit.data.pretraining.sources import DOCS, read_documents
from bertkit.data.pretraining.store import open_corpus
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from bertkit.reports.tables import Table
from bertkit.system.cluster import count_cores
from bertkit.system.progress import Report, ignore
from bertkit.tasks.pretraining import PRETRAINING

REFERENCE_SEED = 12345  # as in the reference
MAX_LENGTH, MAX_PREDICTIONS = 128, 20
DATA_DEFAULTS = PRETRAINING.recipe["data"]
SAMPLES_A_BATCH = PRETRAINING.recipe["batch_size"]
COUNT_TOLERANCE = 0.01  # allowed difference of the sides' counts and shares
COUNTS = ("text_tokens", "samples", "tokens")
CHECKOUT_REMEDY = "give a checkout of github.com/google-research/bert with --reference DIR"

# --- The input --------------------------------------------------------------------------------------------------------


def write_text(source: str, path: Path, characters: int) -> dict[str, int]:
    """Write the first documents of a source, about `characters` long, one sentence per line; return counts."""
    written = dict.fromkeys(("documents", "sentences", "characters"), 0)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for document in read_documents([source], limit_characters=characters):
            lines = [line for sentence in document if (line := " ".join(sentence.split()))]
            stream.writelines(f"{line}\n" for line in [*lines, ""])
            written["documents"] += 1
            written["sentences"] += len(lines)
            written["characters"] += sum(map(len, lines))
    return written


def choose_tokenizer(vocab: str | None, text: Path, report: Report) -> Any:
    """Return a lower-casing tokenizer, with a given vocabulary or one trained on the text."""
    if vocab is not None:
        return load_tokenizer(vocab, cased=False)
    with text.open(encoding="utf-8") as lines:
        return train_tokenizer(lines, size=DATA_DEFAULTS["vocab_size"], report=report)


@dataclass(frozen=True)
class Made:
    """The output of one side.

    Attributes:
        text_tokens: Tokens of the text.
        samples: Samples of all copies.
        tokens: Tokens of the samples, with [CLS] and [SEP] and without padding.
        random_next: Samples whose segment B is random.
        tokenizing: Seconds until the text was tokenized.
        spread: Standard error of `samples` as a share of them, if known.
    """

    text_tokens: int
    samples: int
    tokens: int
    random_next: int
    tokenizing: float
    spread: float = 0.0


# --- This package -----------------------------------------------------------------------------------------------------


def make_samples(text: Path, tokenizer: Any, copies: int, cores: int) -> Made:
    """Build a corpus, open it, and make every batch of `copies` epochs.

    As in training with several processes, each process makes its own share of the batches and keeps them: passing a
    batch on, as the workers of a DataLoader do, costs more than making it.
    """
    start = time.perf_counter()
    folder = mkdtemp(dir=text.parent)  # deleted with the text, off the clock
    build([str(text)], tokenizer, folder, split_sentences=False, workers=cores)
    corpus = open_corpus(folder)
    tokenizing = time.perf_counter() - start

    data = PretrainingData(corpus, tokenizer, [], DATA_DEFAULTS | {"dupe_factor": copies}, REFERENCE_SEED)
    by_copy = [data.count_pairs(MAX_LENGTH, copy) for copy in range(copies)]
    count = sum(by_copy)
    data.phases = [Phase(count, MAX_LENGTH)]
    batches = [range(first, min(first + SAMPLES_A_BATCH, count)) for first in range(0, count, SAMPLES_A_BATCH)]
    shares = [batches[number::cores] for number in range(cores)]
    with ProcessPoolExecutor(cores, get_context("fork" if sys.platform == "linux" else "spawn")) as pool:
        tokens, random_next = np.sum(list(pool.map(partial(count_samples, data), shares)), axis=0).tolist()
    return Made(corpus.token_count, count, tokens, random_next, tokenizing, measure_spread(by_copy))


def count_samples(data: PretrainingData, batches: Sequence[range]) -> tuple[int, int]:
    """Count the tokens of some batches, and the samples whose segment B is random."""
    tokens = random_next = 0
    for batch in map(data.__getitems__, batches):
        tokens += int(batch["attention_mask"].numpy().sum())
        random_next += int(batch["next_sentence_label"].numpy().sum())
    return tokens, random_next


def measure_spread(by_copy: Sequence[int]) -> float:
    """Return the relative standard error of the number of samples, from the counts of the copies."""
    return float(np.std(by_copy, ddof=1) / np.mean(by_copy) / np.sqrt(len(by_copy))) if len(by_copy) > 1 else 1.0


# --- The reference ----------------------------------------------------------------------------------------------------


def load_reference(folder: Path) -> tuple[Callable[..., list[Any]], Callable[..., Any]]:
    """Load `create_training_instances` and `FullTokenizer` from a checkout.

    Raises:
        UsageError: The folder is not such a checkout.
    """
    beside = make_libraries()
    beside["tokenization"] = load_module(
        folder / "tokenization.py", "FullTokenizer", remedy=CHECKOUT_REMEDY, beside=beside
    )
    path = folder / "create_pretraining_data.py"
    module = load_module(path, "create_training_instances", remedy=CHECKOUT_REMEDY, beside=beside)
    return module.create_training_instances, beside["tokenization"].FullTokenizer


def make_libraries() -> dict[str, ModuleType]:
    """Return stubs for tensorflow (its flags, with whole-word masking off, and its files) and for six."""
    tensorflow, six = ModuleType("tensorflow"), ModuleType("six")
    define = dict.fromkeys(("DEFINE_string", "DEFINE_bool", "DEFINE_integer", "DEFINE_float"), ignore)
    tensorflow.flags = SimpleNamespace(FLAGS=SimpleNamespace(do_whole_word_mask=False), **define)
    tensorflow.gfile = SimpleNamespace(GFile=partial(open, encoding="utf-8"))
    six.PY3 = True  # all that the reference uses
    return {"tensorflow": tensorflow, "six": six}


class TimedTokenizer:
    """A wrapper of the reference's tokenizer that measures its seconds and counts its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner, self.vocab = tokenizer, tokenizer.vocab
        self.seconds, self.tokens = 0.0, 0

    def tokenize(self, text: str) -> list[str]:
        """Tokenize a text with the wrapped tokenizer."""
        start = time.perf_counter()
        tokens = self.inner.tokenize(text)
        self.seconds += time.perf_counter() - start
        self.tokens += len(tokens)
        return tokens


def make_instances(
    create: Callable[..., list[Any]], text: Path, tokenizer: Any, copies: int
) -> tuple[list[Any], TimedTokenizer]:
    """Return the reference's samples, and the tokenizer that it used."""
    timed, rates = TimedTokenizer(tokenizer), (DATA_DEFAULTS["short_seq_prob"], DATA_DEFAULTS["masked_lm_prob"])
    with explain_failure("create_training_instances", CHECKOUT_REMEDY):
        random = Random(REFERENCE_SEED)
        return create([str(text)], timed, MAX_LENGTH, copies, *rates, MAX_PREDICTIONS, random), timed


def count_instances(made: tuple[list[Any], TimedTokenizer]) -> Made:
    """Count what the reference made."""
    instances, timed = made
    with explain_failure("create_training_instances", CHECKOUT_REMEDY):
        tokens = sum(len(instance.tokens) for instance in instances)
        random_next = sum(instance.is_random_next for instance in instances)
        return Made(timed.tokens, len(instances), tokens, random_next, timed.seconds)


# --- The benchmark ----------------------------------------------------------------------------------------------------


def bench_corpus(
    reference: Path | None = None,
    data: str | None = None,
    vocab: str | None = None,
    report: Report = ignore,
    *,
    characters: int,
    copies: int,
    repeats: int = 3,
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the way from text to masked pairs in sample tokens per second, without padding.

    The reference uses one process, and this package as many as there are `cores`.

    Args:
        reference: A checkout of google-research/bert; None measures this package alone.
        data: A source of text for `read_documents`; `docs` by default.
        vocab: A lower-case vocabulary; by default one is trained on the text.
        characters: The length of the text, which may be a little longer.
        copies: Copies of the text, each with pairs and masks of its own.

    Returns:
        The one row, `corpus`, has the text's `documents`, `sentences` and `characters`, `vocabulary` (its size),
        `copies` and `cores`; by side `made` (`COUNTS` of `Made`), the shares `random_next` and `fill`, `seconds`, their
        `median_seconds`, the resulting `tokens_per_second`, and `stages`, the medians of `tokenizing` and of the rest,
        `pairs_and_masks`; with a reference also `differ`, the figures that show that the sides do different jobs.
        `ratios.corpus` is the median over rounds of the ratio of tokens per second. The tables come second.

    Raises:
        UsageError: The reference, the text or the vocabulary cannot be read.
    """
    loaded = None if reference is None else load_reference(reference)
    source, cores = data or DOCS, count_cores()
    machine = note_machine(report)
    with TemporaryDirectory(prefix="bertkit-bench-") as folder:
        text = Path(folder, "text.txt")
        row: dict[str, Any] = write_text(source, text, characters)
        tokenizer = choose_tokenizer(vocab, text, report)
        row |= {"vocabulary": len(tokenizer), "copies": copies, "cores": cores}
        report(
            f"{row['documents']:,} documents of {source}, {row['characters']:,} characters, "
            f"{row['vocabulary']:,} tokens in the vocabulary, {copies} copies; {cores} cores"
        )
        ours = partial(make_samples, text, tokenizer, copies, cores)
        sides = {BERTKIT: partial(time_call, ours, lambda made: made)}
        if loaded is not None:
            create, make_their_tokenizer = loaded
            save_tokenizer(tokenizer, Path(folder, "vocab"))
            with explain_failure("FullTokenizer", CHECKOUT_REMEDY):
                theirs = make_their_tokenizer(vocab_file=str(Path(folder, "vocab", "vocab.txt")), do_lower_case=True)
            call = partial(make_instances, create, text, theirs, copies)
            sides[REFERENCE] = partial(time_call, call, count_instances)
        figures, measured = summarize(*alternate(sides, repeats, report))
    found = {
        "bench": "corpus",
        "machine": machine,
        "data": source,
        "rows": {"corpus": row | figures},
        "ratios": {"corpus": measured.compare(REFERENCE)} if loaded else {},
    }
    for name, one in figures["made"].items():
        report(
            f"  {name}: {one['text_tokens']:,} tokens of text became {one['tokens']:,} in {one['samples']:,} samples, "
            f"{figures['fill'][name]:.1%} of {MAX_LENGTH} in each; {figures['random_next'][name]:.1%} have a random B"
        )
    if differ := figures.get("differ"):
        named = ", ".join(key.replace("_", " ") for key in differ)
        report(f"  warning: the two sides differ by more than chance: {named}")
    cells = {name: [f"{stage:.2f}" for stage in stages.values()] for name, stages in figures["stages"].items()}
    table = measured.tabulate("Pretraining data", "tokens", ["tokenizing, s", "pairs and masks, s"], cells)
    return found, [table]


def summarize(
    seconds: Mapping[str, list[float]], made: Mapping[str, Sequence[Made]]
) -> tuple[dict[str, Any], Measurement]:
    """Return the measured part of the row, and the measurement in tokens."""
    first = {name: found[0] for name, found in made.items()}  # only the seconds differ between rounds
    measured = Measurement(seconds, {name: one.tokens for name, one in first.items()})
    figures: dict[str, Any] = {
        "made": {name: {key: getattr(one, key) for key in COUNTS} for name, one in first.items()},
        "random_next": {name: one.random_next / one.samples for name, one in first.items()},
        "fill": {name: one.tokens / one.samples / MAX_LENGTH for name, one in first.items()},
        "seconds": seconds,
        "median_seconds": measured.medians,
        "tokens_per_second": measured.rates,
        "stages": {name: split_seconds(seconds[name], found) for name, found in made.items()},
    }
    if REFERENCE in first:
        figures["differ"] = list_differences(figures, first[BERTKIT].spread)
    return figures, measured


def split_seconds(seconds: Sequence[float], made: Sequence[Made]) -> dict[str, float]:
    """Return the median seconds of a side's stages."""
    return {
        "tokenizing": median(one.tokenizing for one in made),
        "pairs_and_masks": median(whole - one.tokenizing for whole, one in zip(seconds, made, strict=True)),
    }


def list_differences(row: Mapping[str, Any], spread: float) -> list[str]:
    """Return the figures whose difference exceeds `COUNT_TOLERANCE`: relative for counts, absolute for shares.

    With few documents, the number of samples and so their fill vary by chance: one document in ten is split into short
    samples throughout. These two may differ by three standard errors if that is more.
    """
    ours, theirs = row["made"][BERTKIT], row["made"][REFERENCE]
    distances = {key: abs(ours[key] / theirs[key] - 1) for key in COUNTS}
    distances |= {key: abs(row[key][BERTKIT] - row[key][REFERENCE]) for key in ("random_next", "fill")}
    allowed = dict.fromkeys(distances, COUNT_TOLERANCE)
    allowed["samples"] = allowed["fill"] = max(COUNT_TOLERANCE, 3 * 2**0.5 * spread)
    return [key for key, distance in distances.items() if distance > allowed[key]]
