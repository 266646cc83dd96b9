"""From text to masked next-sentence pairs (paper sections 3.1, A.2), beside the reference code.

The reference is create_pretraining_data.py of google-research/bert, of which the user brings a checkout. It runs as it
is, but for a stub in place of tensorflow, of which it needs only flags and files.

Timed on both sides: a file with a sentence a line, blank lines between documents, is read and tokenized, and all copies
of it become pairs of at most 128 tokens with their masks, in random order. Here that is the whole way of a pretraining:
`bertkit corpus build` writes the token ids to disk, and `PretrainingData` gives every sample of the epochs as batches.

Left out: sentence splitting, on neither side, and what comes after: the reference's TFRecords, of which the writing and
the reading would cost it more time still, and training.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from bertkit.bench.measure import BERTKIT, REFERENCE, alternate, compare
from bertkit.bench.reference import load_module
from bertkit.data.pretraining.build import build
from bertkit.data.pretraining.dataset import Phase, PretrainingData
from bertkit.data.pretraining.sources import DOCS, read_documents
from bertkit.data.pretraining.store import open_corpus
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.errors import UsageError, join_lines
from bertkit.system.parallel import count_cores
from bertkit.system.progress import Report, ignore
from bertkit.tasks.pretraining import PRETRAINING
from bertkit.training.run_dir import describe_environment

REFERENCE_SEED = 12345  # as in the reference
CORPUS_CHARACTERS = 4_000_000  # of text: about half a minute of the reference
COPIES = PRETRAINING.recipe["data"]["dupe_factor"]
MAX_LENGTH, MAX_PREDICTIONS = 128, 20
SAMPLES_A_BATCH = PRETRAINING.recipe["batch_size"]
COUNT_TOLERANCE = 0.01  # by which the two sides may differ in how much they make and of what kind
COUNTS = ("text_tokens", "samples", "tokens")
REFERENCE_REMEDY = "give a checkout of github.com/google-research/bert: --reference DIR"

# --- The input --------------------------------------------------------------------------------------------------------


def write_text(source: str, path: Path, characters: int) -> dict[str, int]:
    """Writes the first documents of a source that have so many `characters`, a sentence a line; how much that is."""
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
    """The tokenizer of a vocabulary, lower-casing, or of one trained on the text."""
    if vocab is not None:
        return load_tokenizer(vocab, cased=False)
    with text.open(encoding="utf-8") as lines:
        return make_tokenizer(
            train_vocabulary(lines, size=PRETRAINING.recipe["data"]["vocab_size"], report=report), cased=False
        )


@dataclass(frozen=True)
class Made:
    """What a side made of the text: its tokens, and of all copies the samples, their tokens, and how many B are random.

    The tokens of samples are real ones, with [CLS] and [SEP] and without padding. `tokenizing` are the seconds until
    the text was token ids, or tokens; `spread` the standard error of `samples` as a share of them, where it is known.
    """

    text_tokens: int
    samples: int
    tokens: int
    random_next: int
    tokenizing: float
    spread: float = 0.0


# --- This package -----------------------------------------------------------------------------------------------------


def make_samples(text: Path, tokenizer: Any, output: Path, copies: int, cores: int) -> Made:
    """Builds a corpus, opens it and makes every batch of as many epochs as there are copies.

    As in a training with several processes, each makes its own share of the batches and keeps them: to hand a batch
    over, as the workers of a DataLoader do, costs more than to make it.
    """
    start = time.perf_counter()
    build([str(text)], tokenizer, output, split_sentences=False, workers=cores)
    corpus = open_corpus(output)
    tokenizing = time.perf_counter() - start

    options = PRETRAINING.recipe["data"] | {"dupe_factor": copies}
    data = PretrainingData(corpus, tokenizer, [], options, REFERENCE_SEED)
    by_copy = [data.count_pairs(MAX_LENGTH, copy) for copy in range(copies)]
    count = sum(by_copy)
    data.phases = [Phase(count, MAX_LENGTH)]
    batches = [range(first, min(first + SAMPLES_A_BATCH, count)) for first in range(0, count, SAMPLES_A_BATCH)]
    shares = [batches[number::cores] for number in range(cores)]
    with ProcessPoolExecutor(cores, get_context("fork" if sys.platform == "linux" else "spawn")) as pool:
        tokens, random_next = np.sum(list(pool.map(partial(count_samples, data), shares)), axis=0).tolist()
    return Made(corpus.token_count, count, tokens, random_next, tokenizing, measure_spread(by_copy))


def count_samples(data: PretrainingData, batches: Sequence[range]) -> tuple[int, int]:
    """The tokens of some batches, and how many of their samples have a random B."""
    tokens = random_next = 0
    for batch in map(data.__getitems__, batches):
        tokens += int(batch["attention_mask"].numpy().sum())
        random_next += int(batch["next_sentence_label"].numpy().sum())
    return tokens, random_next


def measure_spread(by_copy: Sequence[int]) -> float:
    """The standard error of the sum, as a share of it: how far chance alone moves the number of samples."""
    return float(np.std(by_copy, ddof=1) / np.mean(by_copy) / np.sqrt(len(by_copy))) if len(by_copy) > 1 else 1.0


# --- The reference ----------------------------------------------------------------------------------------------------


def load_reference(folder: Path) -> tuple[Callable[..., list[Any]], Callable[..., Any]]:
    """`create_training_instances` and `FullTokenizer` of a checkout.

    Raises:
        UsageError: it is none, or the package `six`, which it needs, is not installed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; {REFERENCE_REMEDY}")
    if find_spec("six") is None:
        raise UsageError("the reference needs the package six, which is not installed; pip install six")
    beside = {"tensorflow": make_tensorflow()}
    beside["tokenization"] = load_module(
        folder / "tokenization.py", "FullTokenizer", remedy=REFERENCE_REMEDY, beside=beside
    )
    path = folder / "create_pretraining_data.py"
    module = load_module(path, "create_training_instances", remedy=REFERENCE_REMEDY, beside=beside)
    return module.create_training_instances, beside["tokenization"].FullTokenizer


def make_tensorflow() -> ModuleType:
    """What stands for tensorflow: its flags, with whole-word masking off, and its files."""
    stub = ModuleType("tensorflow")
    define = dict.fromkeys(("DEFINE_string", "DEFINE_bool", "DEFINE_integer", "DEFINE_float"), ignore)
    stub.flags = SimpleNamespace(FLAGS=SimpleNamespace(do_whole_word_mask=False), **define)
    stub.gfile = SimpleNamespace(GFile=partial(open, encoding="utf-8"))
    return stub


class Timed:
    """A tokenizer of the reference that keeps its seconds and counts its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner, self.vocab = tokenizer, tokenizer.vocab
        self.seconds, self.tokens = 0.0, 0

    def tokenize(self, text: str) -> list[str]:
        """The inner one's tokens."""
        start = time.perf_counter()
        tokens = self.inner.tokenize(text)
        self.seconds += time.perf_counter() - start
        self.tokens += len(tokens)
        return tokens


def make_instances(
    create: Callable[..., list[Any]], text: Path, tokenizer: Any, copies: int
) -> tuple[list[Any], Timed]:
    """The reference's samples, and the tokenizer that it used."""
    timed = Timed(tokenizer)
    options = PRETRAINING.recipe["data"]
    rates = options["short_seq_prob"], options["masked_lm_prob"]
    with explain_failure("create_training_instances"):
        instances = create(
            [str(text)], timed, MAX_LENGTH, copies, *rates, MAX_PREDICTIONS, random.Random(REFERENCE_SEED)
        )
    return instances, timed


def count_instances(instances: Sequence[Any], timed: Timed) -> Made:
    """What the reference made."""
    with explain_failure("create_training_instances"):
        tokens = sum(len(instance.tokens) for instance in instances)
        random_next = sum(instance.is_random_next for instance in instances)
    return Made(timed.tokens, len(instances), tokens, random_next, timed.seconds)


@contextmanager
def explain_failure(function: str) -> Iterator[None]:
    """Whatever the reference's function does wrong becomes a UsageError."""
    try:
        yield
    except Exception as error:  # another's code
        raise UsageError(
            f"the reference's {function} fails ({type(error).__name__}: {join_lines(error)}); {REFERENCE_REMEDY}"
        ) from None


# --- The bench --------------------------------------------------------------------------------------------------------


def bench_corpus(
    reference: Path | None = None,
    data: str | None = None,
    vocab: str | None = None,
    report: Report = ignore,
    *,
    repeats: int = 3,
    characters: int = CORPUS_CHARACTERS,
    copies: int = COPIES,
) -> dict[str, Any]:
    """From text to all masked pairs: tokens of samples a second, padding not counted, beside the reference's.

    The one row, `corpus`, has the text's `documents`, `sentences` and `characters`, `vocabulary` (its size), `copies`
    and `cores`; by side `made` (`COUNTS` of `Made`), `random_next` and `fill`, both shares, `seconds`,
    their `median_seconds`, `tokens_per_second` by them, and `stages`, the medians of `tokenizing` and of the rest,
    `pairs_and_masks`; with a reference also `differ`, the figures by which the sides do not do the same job.
    `ratios.corpus` is the median of the rounds' ratios of tokens a second.

    The reference has one process, and this package as many as there are `cores`.

    Args:
        reference: a checkout of google-research/bert.
        data: a source of text as `read_documents` takes it; `docs` if not given.
        vocab: a lower-case vocabulary; trained on the text if not given.
        characters: of text, or a little more.
        copies: of the text, each with pairs and masks of its own.

    Raises:
        UsageError: the reference, the text or the vocabulary cannot be read.
    """
    loaded = None if reference is None else load_reference(reference)
    source, cores = data or DOCS, count_cores()
    with TemporaryDirectory(prefix="bertkit-bench-") as folder:
        text = Path(folder, "text.txt")
        row: dict[str, Any] = write_text(source, text, characters)
        tokenizer = choose_tokenizer(vocab, text, report)
        row |= {"vocabulary": len(tokenizer), "copies": copies, "cores": cores}
        report(
            f"{row['documents']:,} documents of {source}, {row['characters']:,} characters, "
            f"{row['vocabulary']:,} tokens in the vocabulary, {copies} copies; {cores} cores"
        )
        sides: dict[str, Callable[[], Any]] = {
            BERTKIT: lambda: make_samples(text, tokenizer, Path(mkdtemp(dir=folder), "corpus"), copies, cores)
        }
        if loaded is not None:
            create, make_their_tokenizer = loaded
            save_tokenizer(tokenizer, Path(folder, "vocab"))
            with explain_failure("FullTokenizer"):
                theirs = make_their_tokenizer(vocab_file=str(Path(folder, "vocab", "vocab.txt")), do_lower_case=True)
            sides[REFERENCE] = lambda: make_instances(create, text, theirs, copies)
        row |= measure(sides, repeats, report)
    for line in describe(row):
        report(line)
    return {
        "bench": "corpus",
        "machine": describe_environment(),
        "data": source,
        "rows": {"corpus": row},
        "ratios": {"corpus": compare_rates(row)} if loaded else {},
    }


def measure(sides: Mapping[str, Callable[[], Any]], repeats: int, report: Report) -> dict[str, Any]:
    """The part of the row that is measured."""
    made: dict[str, list[Made]] = {name: [] for name in sides}

    def count(name: str, result: Any) -> None:
        made[name].append(count_instances(*result) if name == REFERENCE else result)

    seconds = alternate(sides, repeats, report, count)
    middle = {name: median(found) for name, found in seconds.items()}
    first = {name: found[0] for name, found in made.items()}  # the same in every round but for the seconds
    row: dict[str, Any] = {
        "made": {name: {key: getattr(one, key) for key in COUNTS} for name, one in first.items()},
        "random_next": {name: one.random_next / one.samples for name, one in first.items()},
        "fill": {name: one.tokens / one.samples / MAX_LENGTH for name, one in first.items()},
        "seconds": seconds,
        "median_seconds": middle,
        "tokens_per_second": {name: one.tokens / middle[name] for name, one in first.items()},
        "stages": {name: split_seconds(seconds[name], found) for name, found in made.items()},
    }
    return row | {"differ": list_differences(row, first[BERTKIT].spread)} if REFERENCE in sides else row


def split_seconds(seconds: Sequence[float], made: Sequence[Made]) -> dict[str, float]:
    """The stages of a side, medians."""
    return {
        "tokenizing": median(one.tokenizing for one in made),
        "pairs_and_masks": median(whole - one.tokenizing for whole, one in zip(seconds, made, strict=True)),
    }


def list_differences(row: Mapping[str, Any], spread: float) -> list[str]:
    """The figures in which the sides differ by more than `COUNT_TOLERANCE`: of a count, or from share to share.

    How many samples a text gives, and so how full they are, is left to chance where it has few documents: one in ten is
    cut into short samples throughout. Of these two, three standard errors are allowed if that is more.
    """
    ours, theirs = row["made"][BERTKIT], row["made"][REFERENCE]
    distances = {key: abs(ours[key] / theirs[key] - 1) for key in COUNTS}
    distances |= {key: abs(row[key][BERTKIT] - row[key][REFERENCE]) for key in ("random_next", "fill")}
    by_chance = 3 * 2**0.5 * spread
    allowed = {
        key: max(COUNT_TOLERANCE, by_chance) if key in ("samples", "fill") else COUNT_TOLERANCE for key in distances
    }
    return [key for key, distance in distances.items() if distance > allowed[key]]


def compare_rates(row: Mapping[str, Any]) -> float:
    """How many times as many tokens a second as the reference."""
    return compare(row["seconds"]) * row["made"][BERTKIT]["tokens"] / row["made"][REFERENCE]["tokens"]


def describe(row: Mapping[str, Any]) -> list[str]:
    """A row for a person."""
    lines = []
    for name, made in row["made"].items():
        stages = row["stages"][name]
        lines += [
            f"  {name}: {row['tokens_per_second'][name]:,.0f} tokens a second; "
            f"tokenizing {stages['tokenizing']:.2f} s, pairs and masks {stages['pairs_and_masks']:.2f} s",
            f"    {made['text_tokens']:,} tokens of text became {made['tokens']:,} in {made['samples']:,} samples, "
            f"{row['fill'][name]:.1%} of {MAX_LENGTH} in each; {row['random_next'][name]:.1%} have a random B",
        ]
    if REFERENCE in row["made"]:
        lines.append(f"  {compare_rates(row):.1f} times as fast as the reference")
    if row.get("differ"):
        named = ", ".join(key.replace("_", " ") for key in row["differ"])
        lines.append(f"  warning: the two do not make the same, by more than chance: {named}")
    return lines
