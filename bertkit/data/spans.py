"""Long contexts -> windows of tokens; answers <-> tokens; scores of tokens -> answer texts (paper sections 4.2, 4.3).

A sequence is [CLS] question [SEP] window [SEP]. Windows advance by a *step*, the reference code's `doc_stride`; the
`stride` of tokenizers is instead the overlap of two windows. Question and context are tokenized once each, and every
answer is sliced from the original context by character offsets, never rebuilt from tokens.

Left out: the files (`bertkit.data.formats.squad`), the scores of texts (`bertkit.metrics`), and the decision whether to
answer (`bertkit.tasks.squad`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertkit.data.sequences import Items
from bertkit.data.tokenizer import get_backend, get_cached_tokenizer, get_pair_template
from bertkit.errors import UsageError
from bertkit.system.files import take_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

N_BEST = 20  # starts and ends kept per window, and answers per question (reference code)
CONTEXTS_A_BATCH = 1_000  # texts tokenized in one call
WINDOWS_A_CHUNK = 512  # windows decoded together; a processor's cache can hold them
LENGTH_WEIGHT = 0.01  # weight of a window's length in a token's context score (reference code)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # the right answers as they stand in the context; empty if it has none (SQuAD 2.0)
    starts: tuple[int, ...]  # the start offset of each answer in characters; -1 if the file does not give it
    group: str = ""  # a name that keeps questions in the same split; empty for the context
    row: int = field(default=0, compare=False)  # the number in the file, from 1


def is_placed(question: Question) -> bool:
    """Return whether the first answer is where the file says, or there is no answer."""
    return not question.answers or stands(question.context, question.answers[0], question.starts[0])


def stands(context: str, answer: str, start: int) -> bool:
    """Return whether a non-empty answer begins at the character `start`."""
    return bool(answer) and 0 <= start < len(context) and context.startswith(answer, start)


# --- Windows ----------------------------------------------------------------------------------------------------------


def cut_windows(count: int, room: int, step: int) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of the windows of at most `room` tokens over `count` tokens.

    The last window ends with the context, and no window begins after it. An empty context has one empty window.
    """
    windows, start = [], 0
    while start + room < count:
        windows.append((start, room))
        start += min(step, room)
    return [*windows, (start, count - start)]


def divide_context(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return for each window the range (first, end) of the tokens that have most context in it.

    Each token belongs to one window. The context of a token is the smaller number of tokens to its left and right in
    the window, plus a hundredth of the window's length; the first of equal windows wins (reference code). The tokens of
    a window are contiguous, because the difference between two windows' contexts never grows from left to right.
    """
    if len(windows) == 1:
        return [(0, windows[0][1])]
    starts, lengths = np.array(windows).T
    step = int(starts[1])
    tokens = np.arange(starts[-1] + lengths[-1])
    latest = np.minimum(tokens // step, len(windows) - 1)  # the last window that has begun at each token
    best, owner = np.full(len(tokens), -1.0), np.zeros(len(tokens), np.int64)
    for back in range(-(-int(lengths[0]) // step)):
        window = np.maximum(latest - back, 0)
        left, right = tokens - starts[window], starts[window] + lengths[window] - 1 - tokens
        context = np.where(right >= 0, np.minimum(left, right) + LENGTH_WEIGHT * lengths[window], -1.0)
        owner = np.where(context >= best, window, owner)  # windows come from right to left: the first wins
        best = np.maximum(context, best)
    numbers = np.arange(len(windows))
    ends = np.searchsorted(owner, numbers, "right")
    return list(zip(np.searchsorted(owner, numbers, "left").tolist(), ends.tolist(), strict=True))


def locate_answer(offsets: np.ndarray, start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token that share a character with [start, end), or None if no token does.

    Args:
        offsets: (n, 2) start and end character of each token, in order.
    """
    first = int(np.searchsorted(offsets[:, 1], start, "right"))
    last = int(np.searchsorted(offsets[:, 0], end, "left")) - 1
    return (first, last) if start < end and first <= last else None


@dataclass(frozen=True, eq=False)
class Windows(Items):
    """W windows over the contexts of Q questions, built on access."""

    questions: Sequence[Question]  # Q questions, in order
    cls: int  # cls, sep: The ids of the two special tokens
    sep: int
    ids: np.ndarray  # (N,) tokens of all questions, concatenated
    ends: np.ndarray  # (Q,) the end offset of each question in `ids`
    context_ids: np.ndarray  # context_ids, context_ends: The same for the C distinct contexts
    context_ends: np.ndarray
    offsets: np.ndarray  # (N, 2) start and end character of each token of the contexts
    contexts: np.ndarray  # (Q,) the index of each question's context
    owners: np.ndarray  # (W,) the index of each window's question, ascending
    starts: np.ndarray  # starts, lengths: (W,) the range of context tokens in each window
    lengths: np.ndarray
    shares: np.ndarray  # (W, 2) first and end of the tokens that have most context in this window
    # (W, 2) first and last token of the answer in the sequence; 0, which is [CLS], if the answer is not completely in
    # the window or there is none
    answers: np.ndarray
    max_answer_length: int  # maximum length of a predicted answer, in tokens
    shortened: np.ndarray  # (Q,) bool, whether a question was truncated
    second_type: int = 1  # the token type of the context
    language: str = "en"  # the language whose rules compare answers (`bertkit.metrics.squad`)

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one window.

        `input_ids` and `token_type_ids` are (T,) int64; `start_positions` and `end_positions` are in [0, T).
        """
        owner = self.owners[index]
        question = cut(self.ids, self.ends, owner)
        context = cut(self.context_ids, self.context_ends, self.contexts[owner])
        window = context[self.starts[index] : self.starts[index] + self.lengths[index]]
        ids = np.concatenate([[self.cls], question, [self.sep], window, [self.sep]]).astype(np.int64)
        segments = np.zeros_like(ids)
        segments[len(question) + 2 :] = self.second_type
        start, end = self.answers[index]
        return {"input_ids": ids, "token_type_ids": segments, "start_positions": start, "end_positions": end}

    def fingerprint(self) -> str:
        """Return a fingerprint of the windows and their right answers."""
        contexts = list(dict.fromkeys(question.context for question in self.questions))  # sources of all answers
        texts = [contexts, [(question.id, question.answers) for question in self.questions]]
        tokens = (self.ids, self.ends, self.context_ids, self.context_ends, self.contexts)
        windows = (self.owners, self.starts, self.lengths, self.answers)
        return take_fingerprint(json.dumps(texts).encode(), *tokens, *windows)

    def locate_first(self) -> np.ndarray:
        """Return (W,) the position of each window's first context token in its sequence."""
        lengths = np.diff(self.ends, prepend=0)
        return lengths[self.owners] + 2


def cut(flat: np.ndarray, ends: np.ndarray, index: int) -> np.ndarray:
    """Return the slice of `flat` that belongs to element `index`."""
    return flat[ends[index - 1] if index else 0 : ends[index]]


def encode_questions(
    questions: Sequence[Question],
    tokenizer: Any,
    *,
    max_length: int,
    doc_stride: int,
    max_query_length: int,
    max_answer_length: int,
) -> Windows:
    """Encode questions as windows for training and evaluation; every question has at least one window.

    Args:
        max_length: Tokens of the whole sequence; it leaves room for the context.
        doc_stride: The step between windows, in tokens.
        max_query_length: Tokens after which a question is truncated.
        max_answer_length: Maximum length of a predicted answer, in tokens.
    """
    form = get_pair_template(tokenizer)
    if form.between != form.after:
        raise UsageError(
            "the tokenizer joins a question and its context with several special tokens, not with [SEP]; answers need "
            "a checkpoint that reads pairs as BERT does"
        )
    texts = dict.fromkeys(question.context for question in questions)
    numbers = {text: number for number, text in enumerate(texts)}
    context_ids, context_ends, offsets = tokenize(list(texts), tokenizer)
    ids, ends, _ = tokenize([question.question for question in questions], tokenizer)
    sizes = np.diff(ends, prepend=0)
    positions = np.arange(len(ids)) - np.repeat(ends - sizes, sizes)  # position of each token in its question
    ids, lengths = ids[positions < max_query_length], np.minimum(sizes, max_query_length)
    contexts = np.array([numbers[question.context] for question in questions])
    owners, windows, shares, answers = [], [], [], []
    for index, question in enumerate(questions):
        characters = cut(offsets, context_ends, contexts[index])
        found = cut_windows(len(characters), max_length - int(lengths[index]) - 3, doc_stride)
        answer = None
        if question.answers and is_placed(question):
            answer = locate_answer(characters, question.starts[0], question.starts[0] + len(question.answers[0]))
        owners += [index] * len(found)
        windows += found
        shares += divide_context(found)
        for start, length in found:
            is_shown = answer is not None and start <= answer[0] and answer[1] < start + length
            shift = int(lengths[index]) + 2 - start
            answers.append((answer[0] + shift, answer[1] + shift) if is_shown else (0, 0))
    starts, counts = np.array(windows, np.int64).T
    return Windows(
        questions,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        ids=ids,
        ends=np.cumsum(lengths),
        context_ids=context_ids,
        context_ends=context_ends,
        offsets=offsets,
        contexts=contexts,
        owners=np.array(owners),
        starts=starts,
        lengths=counts,
        shares=np.array(shares),
        answers=np.array(answers, np.int64),
        max_answer_length=max_answer_length,
        shortened=sizes > max_query_length,
        second_type=form.second_type,
    )


def tokenize(texts: Sequence[str], tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenize texts into flat arrays.

    Returns:
        (N,) the tokens of all texts, the end offset of each text, and (N, 2) start and end character of each token.
    """
    backend = get_backend(tokenizer, "locating answers or words")
    is_plain = get_cached_tokenizer(tokenizer).separator is not None
    ids, offsets, lengths = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)], []
    for first in range(0, len(texts), CONTEXTS_A_BATCH):
        batch = texts[first : first + CONTEXTS_A_BATCH]
        for text, encoding in zip(batch, backend.encode_batch(batch, add_special_tokens=False), strict=True):
            ids.append(np.array(encoding.ids, np.int32))
            lengths.append(len(encoding.ids))
            pairs = encoding.offsets
            if not is_plain:  # SentencePiece counts the space before a word to its first token
                pairs = [(end - len(text[start:end].lstrip()), end) for start, end in pairs]
            offsets.append(np.array(pairs, np.int32).reshape(-1, 2))
    return np.concatenate(ids), np.cumsum(lengths), np.concatenate(offsets)


def express(windows: Windows, index: int) -> list[str]:
    """Return the texts closest to a question's answers that can be predicted.

    They begin and end at token boundaries and have at most `max_answer_length` tokens, so an answer that begins or ends
    within a token, or is longer, cannot be predicted exactly.
    """
    question = windows.questions[index]
    offsets = cut(windows.offsets, windows.context_ends, windows.contexts[index])
    texts = []
    for answer, start in zip(question.answers, question.starts, strict=True):
        if stands(question.context, answer, start) and (found := locate_answer(offsets, start, start + len(answer))):
            last = min(found[1], found[0] + windows.max_answer_length - 1)
            texts.append(question.context[offsets[found[0], 0] : offsets[last, 1]])
    return texts


# --- Decoding ---------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """An answer, with the scores S.T_i of its first token and E.T_j of its last."""

    text: str
    start: float
    end: float
    first: int = 0  # first, last: The offsets of its first character and behind its last one in the context
    last: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to a question."""

    spans: list[Span]  # at most `N_BEST` best answers with distinct texts, sorted by S.T_i + E.T_j
    null: tuple[float, float]  # S.C and E.C of the window with the smallest sum

    @property
    def best(self) -> Span:
        """The best span; an empty text with score 0 if no token of the context is a candidate."""
        return self.spans[0] if self.spans else Span("", 0.0, 0.0)

    @property
    def odds(self) -> float:
        """s_null minus the best span's score: the higher, the more the model prefers not to answer."""
        return self.null[0] + self.null[1] - (self.best.start + self.best.end)


def keep_top(start_logits: "Tensor", end_logits: "Tensor") -> "Tensor":
    """Reduce the scores (B, T) of all tokens to what decoding needs, (B, 4 * N_BEST + 2).

    The columns are scores and positions of the best starts, the same for the best ends, and the two scores of [CLS].
    The first of equal scores come first. If T is below N_BEST, the remaining scores are -infinity.
    """
    import torch

    logits = torch.stack([start_logits.float(), end_logits.float()], dim=1)  # (B, 2, T)
    values, positions = (best[..., :N_BEST] for best in logits.sort(descending=True, stable=True))  # (B, 2, K) each
    positions = positions.float()  # exact below 2 ** 24
    if missing := N_BEST - values.shape[2]:
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        positions = torch.nn.functional.pad(positions, (0, missing))
    return torch.cat([torch.stack([values, positions], dim=2).flatten(1), logits[:, :, 0]], dim=1)


def keep_top_arrays(start_logits: np.ndarray, end_logits: np.ndarray) -> np.ndarray:
    """Return `keep_top` of arrays (B, T)."""
    logits = np.stack([start_logits, end_logits], axis=1)  # (B, 2, T)
    positions = np.argsort(-logits, axis=-1, kind="stable")[..., :N_BEST]  # (B, 2, K)
    values = np.take_along_axis(logits, positions, axis=-1)  # (B, 2, K)
    room = [(0, 0), (0, 0), (0, N_BEST - values.shape[2])]
    values, positions = np.pad(values, room, constant_values=-np.inf), np.pad(positions, room)
    kept = np.stack([values, positions.astype(np.float32)], axis=2)  # (B, 2, 2, N_BEST)
    return np.concatenate([kept.reshape(len(kept), -1), logits[:, :, 0]], axis=1)


def decode_windows(kept: np.ndarray, windows: Windows) -> list[Answer]:
    """Decode the answers to all questions from the output of `keep_top` for each window.

    A span begins at one of its window's best starts, at a token that has most context in this window. It ends at one of
    the best ends of the same window and has at most `max_answer_length` tokens. The earlier window and the better
    start come first among equal scores.

    Args:
        kept: (W, 4 * N_BEST + 2), in the order of the windows.
    """
    null = kept[:, -2:].astype(np.float64)
    order = np.lexsort((null.sum(axis=1), windows.owners))  # stable: the first of equals
    least = null[order[np.searchsorted(windows.owners[order], np.arange(len(windows.questions)))]]  # (Q, 2)
    answers = [Answer([], (start, end)) for start, end in least.tolist()]
    for chunk in divide_windows(windows.owners):
        scores = score_spans(kept[chunk], windows, chunk)
        window, number = np.nonzero(np.isfinite(scores))
        owners = windows.owners[chunk][window]
        order = np.lexsort((-scores[window, number], owners))  # stable
        owners = owners[order]
        bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)) if len(owners) else []
        window, number = chunk.start + window[order], number[order]
        start, end = np.divmod(number, N_BEST)
        shift = windows.starts[window] - windows.locate_first()[window]
        shift += np.concatenate([[0], windows.context_ends])[windows.contexts[windows.owners[window]]]
        first, last = kept[window, N_BEST + start].astype(np.int64), kept[window, 3 * N_BEST + end].astype(np.int64)
        characters = windows.offsets[first + shift, 0], windows.offsets[last + shift, 1]
        columns = kept[window, start], kept[window, 2 * N_BEST + end], *characters
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        for begin, end in pairwise(bounds):
            context, found = windows.questions[owners[begin]].context, {}
            for row in rows[begin:end]:
                found.setdefault(context[slice(*row[2:])], row)
                if len(found) == N_BEST:
                    break
            answers[owners[begin]].spans.extend(Span(text, *row) for text, row in found.items())
    return answers


def divide_windows(owners: np.ndarray) -> Iterator[slice]:
    """Yield slices of about WINDOWS_A_CHUNK windows that keep the windows of a question together."""
    edges = np.searchsorted(owners, owners[::WINDOWS_A_CHUNK])  # the first window of each question there
    for begin, end in pairwise(np.unique([*edges, len(owners)]).tolist()):
        yield slice(begin, end)


def score_spans(kept: np.ndarray, windows: Windows, chunk: slice) -> np.ndarray:
    """Return (W, N_BEST * N_BEST) S.T_i + E.T_j of every start and end; -infinity for invalid spans."""
    start_scores, starts, end_scores, ends = kept[:, : 4 * N_BEST].reshape(-1, 4, N_BEST).swapaxes(0, 1)  # (W, K) each
    first, shares = windows.locate_first()[chunk, None], windows.shares[chunk]
    shift, behind = first - windows.starts[chunk, None], first + windows.lengths[chunk, None]
    may_start = (starts >= shares[:, :1] + shift) & (starts < shares[:, 1:] + shift) & np.isfinite(start_scores)
    may_end = (ends >= first) & (ends < behind) & np.isfinite(end_scores)
    start_scores, end_scores = np.where(may_start, start_scores, -np.inf), np.where(may_end, end_scores, -np.inf)
    scores = np.add(start_scores[:, :, None], end_scores[:, None, :], dtype=np.float64)  # (W, K, K)
    further = ends.astype(np.int32)[:, None, :] - starts.astype(np.int32)[:, :, None]
    refused = further.view(np.uint32) >= windows.max_answer_length  # a negative number is large when unsigned
    np.copyto(scores, -np.inf, where=refused)
    return scores.reshape(len(kept), -1)


def rank(answer: Answer, with_null: bool) -> list[dict[str, Any]]:
    """Return the best answers in the reference code's form; `with_null` includes no answer, as an empty text.

    Probabilities are a softmax over these answers alone. If there is none, the reference code writes the word "empty",
    here an empty text is written.
    """
    spans = list(answer.spans)
    if with_null:
        spans = sorted([*spans, Span("", *answer.null)], key=lambda span: span.start + span.end, reverse=True)
        if any(not span.text for span in spans[:N_BEST]):
            spans = spans[:N_BEST]
    elif not spans:
        spans = [answer.best]
    scores = np.array([span.start + span.end for span in spans])
    weights = np.exp(scores - scores.max())
    return [
        {"text": span.text, "probability": probability, "start_logit": span.start, "end_logit": span.end}
        for span, probability in zip(spans, (weights / weights.sum()).tolist(), strict=True)
    ]
