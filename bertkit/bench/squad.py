"""Benchmark the decoding and scoring of SQuAD's answers (paper sections 4.2, 4.3) against transformers' example.

The reference is `postprocess_qa_predictions` in the user's copy of transformers'
examples/pytorch/question-answering/utils_qa.py.

Left out: the models, whose logits are synthetic here (`bertkit bench finetune` times training).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.bench.measure import BERTKIT, REFERENCE, Measurement, alternate, measure_peak, note_machine, time_call
from bertkit.bench.reference import explain_failure, load_module
from bertkit.bench.synthetic_text import TEXT_SEED, draw_words, make_words
from bertkit.data.formats.squad import read_squad
from bertkit.data.spans import N_BEST, Question, Windows, cut, decode, decode_best, encode_questions, keep_top
from bertkit.data.tokenizer import train_tokenizer
from bertkit.reports.tables import Table
from bertkit.system.progress import Report, ignore
from bertkit.tasks.option import WINDOW_OPTIONS, list_defaults
from bertkit.tasks.squad import SQUAD, SquadTask
from bertkit.tasks.task import score_summaries

# --- The input --------------------------------------------------------------------------------------------------------

QUESTIONS = 10_570  # of the dev set of SQuAD 1.1
LENGTHS = list_defaults(WINDOW_OPTIONS)
LISTS = "bertkit_n_best"  # a third side: lists as many answers per question as the reference, without EM and F1
WINDOWS_A_BATCH = 32  # as in evaluation
CONTEXT_VOCABULARY = 8_000  # tokens; trained on the contexts
CONTEXT_VARIETY = 20_000  # different words in synthetic text
CONTEXT_WORDS, CONTEXT_SPREAD, FEWEST = 120, 50, 20  # words of a context: mean, standard deviation, minimum
LONG_WORDS, LONG_EVERY = 700, 50  # every 50th context is long enough for several windows
SCRIPT_REMEDY = "give a copy of transformers' examples/pytorch/question-answering/utils_qa.py with --reference FILE"
SHARED_BY = 5  # questions per context
BUMP, BUMP_SPREAD = 5.0, 2.0  # added to the gold span's logits; the noise has deviation 1: about half are found


def make_questions(count: int) -> list[Question]:
    """Make questions in synthetic words about contexts of SQuAD's lengths, the same in every run.

    Answers have 1 to 5 words.
    """
    random = np.random.default_rng(TEXT_SEED)
    words = make_words(CONTEXT_VARIETY)
    questions: list[Question] = []
    while len(questions) < count:
        if len(questions) % SHARED_BY == 0:
            is_long = len(questions) // SHARED_BY % LONG_EVERY == 0
            length = LONG_WORDS if is_long else max(FEWEST, round(random.normal(CONTEXT_WORDS, CONTEXT_SPREAD)))
            chosen = draw_words(words, length, random)
            chosen = np.char.add(chosen, np.where(random.random(length) < 0.1, ",", "")).tolist()
            context = " ".join(chosen) + "."
        first = int(random.integers(len(chosen)))
        answer = " ".join(chosen[first : first + int(random.integers(1, 6))]).rstrip(",")
        start = len(" ".join([*chosen[:first], ""]))
        asked = " ".join(draw_words(words, 10, random)) + "?"
        questions.append(Question(f"{len(questions):06d}", asked, context, (answer,), (start,)))
    return questions


def read_questions(folder: Path, count: int) -> list[Question]:
    """Read the first questions of the official files of SQuAD 1.1, dev before train."""
    questions: dict[str, Question] = {}
    for split in ("dev", "train"):
        if len(questions) < count:
            found = read_squad(folder / SQUAD["squad1"].name_file(split), 1)
            questions |= {question.id: question for question in found if question.id not in questions}
    return list(questions.values())[:count]


def drop_answers(questions: Sequence[Question]) -> list[Question]:
    """Return the questions, every third without an answer, approximately as in SQuAD 2.0."""
    return [
        question if index % 3 else replace(question, answers=(), starts=()) for index, question in enumerate(questions)
    ]


def make_logits(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic logits of starts and of ends, each (W, 384) in float32.

    They are noise, raised at the answer or [CLS] and set to the minimum after the end of the window.
    """
    random = np.random.default_rng(TEXT_SEED)
    shape = len(windows), LENGTHS["max_length"]
    behind = np.arange(shape[1]) > (windows.find_first() + windows.lengths)[:, None]  # the last [SEP]
    logits = []
    for places in windows.answers.T:
        noise = random.standard_normal(shape, np.float32)
        noise[np.arange(shape[0]), places] += random.normal(BUMP, BUMP_SPREAD, shape[0]).astype(np.float32)
        noise[behind] = np.finfo(np.float32).min
        logits.append(noise)
    return logits[0], logits[1]


# --- This package -----------------------------------------------------------------------------------------------------


def keep(start_logits: np.ndarray, end_logits: np.ndarray) -> np.ndarray:
    """Return (W, 4 * N_BEST + 2), the part of the logits that evaluation keeps, computed batch by batch."""
    kept = np.empty((len(start_logits), 4 * N_BEST + 2), np.float32)
    for begin in range(0, len(kept), WINDOWS_A_BATCH):
        rows = slice(begin, begin + WINDOWS_A_BATCH)
        kept[rows] = keep_top(torch.from_numpy(start_logits[rows]), torch.from_numpy(end_logits[rows])).numpy()
    return kept


# --- The reference ----------------------------------------------------------------------------------------------------


class EncodedExamples(list[dict[str, str]]):
    """Rows as the reference reads them: by iteration, and as columns by name."""

    def __getitem__(self, column: Any) -> Any:
        """Return a column by its name."""
        return [row[column] for row in self]


def load_reference(path: Path) -> Callable[..., Mapping[str, str]]:
    """Load `postprocess_qa_predictions` from a copy of transformers' utils_qa.py, without its progress bar.

    Raises:
        UsageError: The file does not exist, cannot be imported, or lacks the function.
    """
    module = load_module(path, "postprocess_qa_predictions", remedy=SCRIPT_REMEDY)
    module.tqdm = lambda rows: rows
    return module.postprocess_qa_predictions


def describe_windows(windows: Windows) -> tuple[EncodedExamples, list[dict[str, Any]]]:
    """Return questions and windows in the reference's format, as plain lists and dicts, its fastest form.

    A window's offset_mapping is None outside the context; token_is_max_context names its positions of maximum context.
    """
    names = [str(place) for place in range(LENGTHS["max_length"])]
    characters = [
        list(map(tuple, cut(windows.offsets, windows.context_ends, index).tolist()))
        for index in range(len(windows.context_ends))
    ]
    features = []
    for index, first in enumerate(windows.find_first().tolist()):
        owner, start = windows.owners[index], windows.starts[index]
        shown = characters[windows.contexts[owner]][start : start + windows.lengths[index]]
        begin, end = windows.shares[index] - start + first
        features.append(
            {
                "example_id": windows.questions[owner].id,
                "offset_mapping": [*[None] * first, *shown, None],
                "token_is_max_context": dict.fromkeys(names[begin:end], True),
            }
        )
    return EncodedExamples({"id": question.id, "context": question.context} for question in windows.questions), features


def count_differences(best: Sequence[str], texts: Sequence[str], theirs: Sequence[str]) -> tuple[int, int]:
    """Return the number of texts that differ, and of questions without a valid span, whose best text is empty.

    Without a valid span the reference answers "empty" and this package nothing; these do not count as different.
    """
    different = sum(ours != other for span, ours, other in zip(best, texts, theirs, strict=True) if span)
    return different, sum(not span for span in best)


# --- The benchmark ----------------------------------------------------------------------------------------------------


def bench_squad(
    reference: Path | None = None, data: Path | None = None, report: Report = ignore, repeats: int = 3
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the way from logits to EM and F1 for SQuAD 1.1 and 2.0; the reference stops at texts.

    The reference also lists the 20 best answers to each question; `bertkit_n_best` is the time of these lists here.

    Args:
        reference: A copy of transformers' utils_qa.py.
        data: A folder with the official files of SQuAD 1.1; None uses synthetic texts.

    Returns:
        `rows` has for each version `questions`, `windows`, `scores`, `questions_per_second`, by side `seconds` and
        their `median_seconds`, and `bytes`: `kept` by evaluation, all `logits`, and the `peak` of each side, to which
        the logits must be added for the reference, because it needs all of them at once. With a reference also
        `different`, the number of different answers (in 2.0 at tau = 0), and `no_span` (see `count_differences`);
        without one `ratios` is empty. The tables come second.

    Raises:
        UsageError: The reference or the data cannot be read.
    """
    postprocess = None if reference is None else load_reference(reference)
    asked = make_questions(QUESTIONS) if data is None else read_questions(data, QUESTIONS)
    contexts = dict.fromkeys(question.context for question in asked)
    tokenizer = train_tokenizer(contexts, size=CONTEXT_VOCABULARY)
    found = {
        "bench": "squad",
        "machine": note_machine(report),
        "data": "made up" if data is None else "official files",
        "rows": {},
        "ratios": {},
    }
    tables = []
    for task in SQUAD.values():
        windows = encode_questions(drop_answers(asked) if task.version.unanswerable else asked, tokenizer, **LENGTHS)
        mean = np.mean(windows.find_first() + windows.lengths + 1)
        report(
            f"{task.title}: {len(asked):,} questions ({found['data']}), {len(windows):,} windows of {mean:.0f} tokens "
            "on average"
        )
        found["rows"][task.name], measured = measure_version(task, windows, postprocess, repeats, report)
        if postprocess is not None:
            found["ratios"][task.name] = measured.compare(REFERENCE)
        peaks = {name: [f"{size / 1e6:,.0f}"] for name, size in found["rows"][task.name]["bytes"]["peak"].items()}
        tables.append(measured.tabulate(task.title, "questions", ["peak MB"], peaks))
    return found, tables


def measure_version(
    task: SquadTask,
    windows: Windows,
    postprocess: Callable[..., Mapping[str, str]] | None,
    repeats: int,
    report: Report,
) -> tuple[dict[str, Any], Measurement]:
    """Return a version's row, and the measurement that it comes from."""
    logits = make_logits(windows)
    kept = keep(*logits)
    calls: dict[str, Callable[[], Any]] = {
        BERTKIT: lambda: score_summaries(task, keep(*logits), windows),
        LISTS: lambda: decode(keep(*logits), windows),
    }
    row = {"questions": len(windows.questions), "windows": len(windows), "scores": score_summaries(task, kept, windows)}
    row["bytes"] = {"kept": kept.nbytes, "logits": sum(scores.nbytes for scores in logits)}
    report(f"  kept for decoding: {kept.nbytes / 1e6:.1f} MB instead of {row['bytes']['logits'] / 1e6:.1f} MB")
    if postprocess is not None:
        calls[REFERENCE] = partial(
            postprocess,
            *describe_windows(windows),
            logits,
            version_2_with_negative=task.version.unanswerable,  # at a threshold of 0
            n_best_size=N_BEST,
            max_answer_length=windows.max_answer_length,
        )
        with explain_failure("postprocess_qa_predictions", SCRIPT_REMEDY):
            answers = calls[REFERENCE]()
            theirs = [answers[question.id] for question in windows.questions]
        best, odds = decode_best(kept, windows)
        answered = odds < 0 if task.version.unanswerable else np.ones(len(best), bool)  # tau = 0
        texts = [text if given else "" for text, given in zip(best, answered, strict=True)]
        different, no_span = count_differences(best, texts, theirs)
        report(f"  {different:,} of {len(best):,} answers differ; {no_span:,} questions have no span")
        row |= {"different": different, "no_span": no_span}
    seconds, _ = alternate({name: partial(time_call, call) for name, call in calls.items()}, repeats, report)
    measured = Measurement(seconds, dict.fromkeys(calls, len(windows.questions)))
    row["bytes"]["peak"] = {name: measure_peak(call) for name, call in calls.items()}
    row |= {"seconds": seconds, "median_seconds": measured.medians, "questions_per_second": measured.rates[BERTKIT]}
    return row, measured
