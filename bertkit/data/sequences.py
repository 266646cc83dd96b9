"""Texts and pairs of texts -> token sequences and batches for fine-tuning (paper section 4).

The format is that of pre-training: [CLS] A [SEP], or [CLS] A [SEP] B [SEP] unless a tokenizer joins pairs otherwise;
several sequences per example for multiple choice (4.4), and for long texts (`bertkit.data.long_texts`). A batch is
padded to its longest sequence, and the model removes the padding. Left out: the meaning of the labels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertkit.data.tokenizer import get_cached_tokenizer, get_pair_template
from bertkit.system.files import take_fingerprint
from bertkit.system.progress import Report

if TYPE_CHECKING:
    from torch import Tensor

TEXTS_A_BATCH = 10_000  # texts tokenized in one call
TOKENS_A_BATCH = 8192
IGNORED = -100  # label of positions without a loss, as in torch.nn.functional.cross_entropy

Pieces = list[np.ndarray]  # the tokens of a text, or of the two of a pair
Batch = dict[str, np.ndarray]
Cut = Callable[[Pieces, int], tuple[list[Pieces], bool]]


class Items:
    """A data set for torch's DataLoader that returns several items by indexing each of them."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several items."""
        return [self[index] for index in indices]


@dataclass(eq=False)
class Sequences(Items):
    """S encoded sequences, concatenated in flat arrays."""

    ids: np.ndarray  # (N,) token ids
    ends: np.ndarray  # (S,) the end offset of each sequence in `ids`
    seconds: np.ndarray  # (S,) the number of tokens of segment B, which is at the end of the sequence
    labels: np.ndarray | None  # (S,) int64 classes or float32 numbers; None without labels
    shortened: np.ndarray | None = None  # (E,) bool, whether an input was truncated; None if unknown
    counts: np.ndarray | None = None  # (E,) the number of sequences of each input, side by side; None if unknown

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sequence: `input_ids` and `token_type_ids` (T,) int64, and `labels` if there are any."""
        start = self.ends[index - 1] if index else 0
        ids = self.ids[start : self.ends[index]].astype(np.int64)
        segments = np.zeros_like(ids)
        segments[len(ids) - self.seconds[index] :] = 1
        item = {"input_ids": ids, "token_type_ids": segments}
        return item if self.labels is None else item | {"labels": self.labels[index]}

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels."""
        return take_fingerprint(self.ids, self.ends, self.seconds, self.labels)


@dataclass(eq=False)
class Groups(Items):
    """S items of several sequences each: the endings of a question, or the windows of a text."""

    sequences: Sequences  # those of all items, the sequences of an item side by side
    labels: np.ndarray | None  # (S,) or (S, L), one label or one row of labels for each item; None without labels
    counts: np.ndarray  # (S,) the number of sequences of each item

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one item: `input_ids` and `token_type_ids`, lists of arrays (T,) int64, and `labels` if any."""
        found = self.sequences.__getitems__(range(self.ends[index] - self.counts[index], self.ends[index]))
        item = {name: [sequence[name] for sequence in found] for name in found[0]}
        return item if self.labels is None else item | {"labels": self.labels[index]}

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels."""
        return take_fingerprint(self.sequences.fingerprint().encode(), self.counts, self.labels)


def truncate(texts: Pieces, room: int) -> tuple[list[Pieces], bool]:
    """Return the first tokens of a text or two, and whether any were left out."""
    lengths = list(map(len, texts))
    kept = cut_longest(lengths, room)
    return [[text[:count] for text, count in zip(texts, kept, strict=True)]], kept != lengths


def cut_longest(counts: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of one text or two fit into `room` when the longer one is truncated first.

    The first text is truncated if both are equally long. This is `longest_first` of tokenizers, which itself keeps what
    it truncates in every combination: for two long texts, more than fits into memory.
    """
    if sum(counts) <= room:
        return list(counts)
    if len(counts) == 1:
        return [room]
    shorter = min(*counts, room // 2)
    longer = room - shorter
    return [longer, shorter] if counts[0] > counts[1] else [shorter, longer]


def encode_inputs(
    inputs: Sequence[str | tuple[str, str]],
    labels: np.ndarray | None,
    tokenizer: Any,
    max_length: int,
    cut: Cut = truncate,
) -> Sequences:
    """Encode E texts and pairs as sequences of at most `max_length` tokens, [CLS] and [SEP] included.

    Longer pairs are truncated at the end, the longer text first until both are equally long, then both. [CLS], [SEP],
    [MASK], [PAD] and [UNK] written out in a text are ordinary text, as in the reference code; other special tokens that
    the tokenizer has are tokens.

    Differs from the paper: where the room for a pair is odd and both texts are longer than half of it, the reference
    code gives the odd token to A; here, as in tokenizers, the longer text gets it, or B if both are equally long.

    Args:
        cut: Returns the sequences of an input from the tokens of its texts and the room for these in a sequence, and
            whether tokens were left out; by default one sequence, truncated as described.
    """
    words, form = get_cached_tokenizer(tokenizer), get_pair_template(tokenizer)
    before, between, after = (np.array(ids, np.int32) for ids in form[:3])
    chunks, lengths, seconds, shortened, counts = [], [], [], [], []
    for start in range(0, len(inputs), TEXTS_A_BATCH):
        parts = []
        texts = [(text,) if isinstance(text, str) else text for text in inputs[start : start + TEXTS_A_BATCH]]
        ids, sizes = words.encode(list(chain.from_iterable(texts)), np.int32)
        pieces = iter(np.split(ids, np.cumsum(sizes)[:-1]))
        for text in texts:
            special = form.count(len(text))
            found, is_shortened = cut([next(pieces) for _ in text], max_length - special)
            for sequence in found:
                parts += [before, sequence[0], *(each for piece in sequence[1:] for each in (between, piece)), after]
                lengths.append(special + sum(map(len, sequence)))
                seconds.append(len(sequence[1]) + len(after) if len(sequence) == 2 and form.second_type else 0)
            shortened.append(is_shortened)
            counts.append(len(found))
        chunks.append(np.concatenate(parts))  # many small arrays take several times their tokens
    ends, ids = np.cumsum(lengths), np.concatenate(chunks)
    return Sequences(ids, ends, np.array(seconds), labels, np.array(shortened), np.array(counts))


def report_cut(data: Sequences, is_windowed: bool, most: int, report: Report) -> None:
    """Report how many training texts are truncated, or have several windows.

    Args:
        is_windowed: Whether long texts have windows; then only the shorter text of a pair is truncated.
        most: The number of tokens that the model can read at once.
    """
    count = f"of {len(data.counts):,} training texts"
    if several := int((data.counts > 1).sum()):
        report(f"{several:,} {count} have several windows, {len(data):,} windows in all")
    if truncated := int(data.shortened.sum()):
        length = int(np.diff(data.ends, prepend=0).max())
        ways = []
        if length < most:
            ways.append(f"data.max_length (up to {most})")
        if not is_windowed:
            ways.append("data.long=mean")
        remedy = f"; {' or '.join(ways)} reads more of them" if ways else ""
        what = "have a pair's shorter text truncated" if is_windowed else f"are truncated to {length} tokens"
        report(f"{truncated:,} {count} {what}{remedy}")


def pad_arrays(items: Sequence[dict[str, Any]]) -> Batch:
    """Collate sequences into a batch, padded to the longest sequence.

    `attention_mask` and columns with an integer per token become (B, T), other columns (B,), or (B, L) for several
    labels. The padding value is IGNORED for `labels` and 0 for all other columns, whatever the vocabulary: nothing is
    computed on padding.
    """
    lengths = np.array([len(item["input_ids"]) for item in items])
    is_token = np.arange(lengths.max()) < lengths[:, None]  # (B, T)
    batch = {"attention_mask": is_token.astype(np.int64)}
    for name in items[0]:
        column = [item[name] for item in items]
        if np.ndim(column[0]) and column[0].dtype.kind != "f":
            batch[name] = np.full(is_token.shape, IGNORED if name == "labels" else 0)
            batch[name][is_token] = np.concatenate(column)  # (N,) -> (B, T)
        else:
            batch[name] = np.array(column)  # (B,) or (B, L)
    return batch


def stack_summaries(summaries: Sequence[np.ndarray]) -> np.ndarray:
    """Return the summaries (S, ...) of all sequences, padded with IGNORED where their sizes differ."""
    sizes = np.array([summary.shape for summary in summaries])
    widths = sizes.max(axis=0) - sizes  # words have a label each
    if not widths.any():
        return np.stack(summaries)
    return np.stack(
        [
            np.pad(summary, [(0, width) for width in row], constant_values=IGNORED)
            for summary, row in zip(summaries, widths.tolist(), strict=True)
        ]
    )


class EncodedInputs(NamedTuple):
    """The sequences of the inputs of a prediction."""

    data: Any  # a data set of the sequences
    lengths: np.ndarray  # (S,) the tokens of each sequence
    truncated: Sequence[bool]  # whether each input was truncated
    collate: Callable[[Sequence[dict[str, Any]]], Batch] = pad_arrays  # returns the batch of a list of sequences
    join: Callable[[list[Any]], Any] = stack_summaries  # returns what `Task.decode` takes, from that of each sequence


def pad_array_choices(items: Sequence[dict[str, Any]]) -> Batch:
    """Collate items of several sequences, such as choices or windows, into columns (B, C, T), as `pad_arrays` does.

    C is the largest number of sequences of an item. An absent sequence has an `attention_mask` of zeros.
    """
    names = ("input_ids", "token_type_ids")
    pairs = [pair for item in items for pair in zip(*(item[name] for name in names), strict=True)]
    flat = pad_arrays([dict(zip(names, pair, strict=True)) for pair in pairs])  # (N, T), N = all sequences
    counts = np.array([len(item[names[0]]) for item in items])
    is_there = np.arange(counts.max()) < counts[:, None]  # (B, C)
    batch = {}
    for name, column in flat.items():
        batch[name] = np.zeros((*is_there.shape, column.shape[1]), column.dtype)
        batch[name][is_there] = column  # (N, T) -> (B, C, T)
    others = [name for name in items[0] if name not in names]
    return batch | {name: np.array([item[name] for item in items]) for name in others}


def to_tensors(batch: Mapping[str, Any]) -> dict[str, "Tensor"]:
    """Return a batch of arrays or tensors as one of tensors."""
    import torch

    return {name: torch.as_tensor(column) for name, column in batch.items()}


def to_array(x: "np.ndarray | Tensor") -> np.ndarray:
    """Return an array, or a tensor on any device as one, in fp32 if it is of half precision."""
    if isinstance(x, np.ndarray):
        return x
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def pad(items: Sequence[dict[str, Any]]) -> dict[str, "Tensor"]:
    """Return `pad_arrays` as tensors."""
    return to_tensors(pad_arrays(items))


def pad_choices(items: Sequence[dict[str, Any]]) -> dict[str, "Tensor"]:
    """Return `pad_array_choices` as tensors."""
    return to_tensors(pad_array_choices(items))


def batch_by_length(lengths: np.ndarray, tokens: int = TOKENS_A_BATCH) -> Iterator[np.ndarray]:
    """Yield the indices of sequences of similar length, about `tokens` tokens per batch, longest first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, tokens // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count


def pad_features(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, "Tensor"]:
    """Collate sequences into `features` (B, W, K, H), `labels` (B, W) and `attention_mask` (B, W) of words."""
    import torch

    longest = max(1, *(len(item["labels"]) for item in items))
    shape = (len(items), longest)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
    features = torch.zeros(*shape, *items[0]["features"].shape[1:])  # (B, W, K, H)
    for row, item in enumerate(items):
        count = len(item["labels"])
        mask[row, :count] = 1
        labels[row, :count] = torch.from_numpy(np.array(item["labels"], np.int64))
        features[row, :count] = torch.from_numpy(np.array(item["features"]))
    return {"features": features, "labels": labels, "attention_mask": mask}


def collate(items: Any) -> dict[str, "Tensor"]:
    """Return the batch of what the `__getitems__` of a data set returns.

    Sequences are padded (B, T), as are items with several, such as windows and choices (B, C, T), and words with their
    features (B, W, K, H). The data set of a pretraining returns batches already.
    """
    if isinstance(items, dict):
        return items
    if "features" in items[0]:
        return pad_features(items)
    return pad_choices(items) if isinstance(items[0]["input_ids"], list) else pad(items)
