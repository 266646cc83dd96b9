"""Texts and pairs of texts -> token sequences, and batches of them: what fine-tuning trains on (paper section 4).

Packed as in pre-training: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]; several of them where one is to be chosen (4.4). A
batch is padded to its own longest sequence, and the model takes even that out again. Left out: what the labels mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bertkit.data.tokenizer import Words, copy_backend
from bertkit.system.files import take_fingerprint

TEXTS_A_BATCH = 10_000  # tokenized at once
TOKENS_A_BATCH = 8192
IGNORED = -100  # the label of a position without a loss, as in torch.nn.functional.cross_entropy


class Items(Dataset):
    """A data set that gives several items as it gives one."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several of them."""
        return [self[index] for index in indices]


@dataclass(eq=False)
class Sequences(Items):
    """S encoded sequences side by side in flat arrays.

    ids: (N,) token ids; `ends` (S,) the tokens up to each sequence's end; `seconds` (S,) how many tokens at each
    sequence's end belong to segment B.
    labels: (S,) int64 classes or float32 numbers; None where there are none.
    shortened: (S,) bool, whether a sequence's texts had more tokens than there is room for; None if that is not known.
    """

    ids: np.ndarray
    ends: np.ndarray
    seconds: np.ndarray
    labels: np.ndarray | None
    shortened: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sequence: `input_ids` and `token_type_ids` (T,) int64, and its `labels` if there are any."""
        start = self.ends[index - 1] if index else 0
        ids = self.ids[start : self.ends[index]].astype(np.int64)
        segments = np.zeros_like(ids)
        segments[len(ids) - self.seconds[index] :] = 1
        item = {"input_ids": ids, "token_type_ids": segments}
        return item if self.labels is None else item | {"labels": self.labels[index]}

    def fingerprint(self) -> str:
        """What tells its sequences and labels from any others."""
        return take_fingerprint(self.ids, self.ends, self.seconds, self.labels)


@dataclass(eq=False)
class Choices(Items):
    """S questions, each a choice among C sequences.

    sequences: S * C of them, those of a question side by side; `count` is C.
    labels: (S,) int64, the place of the right one; None where it is not known.
    """

    sequences: Sequences
    count: int
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.sequences) // self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One question: `input_ids` and `token_type_ids`, lists of C arrays (T,) int64, and its `labels` if any."""
        found = self.sequences.__getitems__(range(index * self.count, (index + 1) * self.count))
        item = {name: [sequence[name] for sequence in found] for name in found[0]}
        return item if self.labels is None else item | {"labels": self.labels[index]}

    def fingerprint(self) -> str:
        """What tells its questions and labels from any others."""
        return take_fingerprint(self.sequences.fingerprint().encode(), self.labels)


def encode_texts(
    texts: Sequence[Sequence[str]], labels: np.ndarray | None, tokenizer: Any, max_length: int
) -> Sequences:
    """The sequences of S texts, or of S pairs: `texts` holds one column of S texts or two. See `encode_inputs`."""
    inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    return encode_inputs(inputs, labels, tokenizer, max_length)


def encode_inputs(
    inputs: Sequence[str | tuple[str, str]], labels: np.ndarray | None, tokenizer: Any, max_length: int
) -> Sequences:
    """The sequences of S texts and pairs, of at most `max_length` tokens with [CLS] and [SEP].

    Of a pair that is too long, the longer text loses tokens at its end until both are as long, then both do. Special
    tokens written out in a text are ordinary text there, as in the reference code.

    Differs from the paper: where the room for a pair is odd and both texts are longer than its half, the reference code
    leaves the odd token to A; here, as with tokenizers, the text that was longer has it, or B.
    """
    words = Words(copy_backend(tokenizer))
    cls, sep = (np.array([token], np.int32) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    parts, lengths, seconds, shortened = [], [], [], []
    for start in range(0, len(inputs), TEXTS_A_BATCH):
        texts = [(text,) if isinstance(text, str) else text for text in inputs[start : start + TEXTS_A_BATCH]]
        ids, counts = words.encode(list(chain.from_iterable(texts)), np.int32)
        pieces = iter(np.split(ids, np.cumsum(counts)[:-1]))
        for text in texts:
            own = [next(pieces) for _ in text]
            kept = cut_longest([len(piece) for piece in own], max_length - 1 - len(own))
            parts.append(cls)
            for piece, count in zip(own, kept, strict=True):
                parts += [piece[:count], sep]
            lengths.append(1 + sum(kept) + len(own))
            seconds.append(kept[1] + 1 if len(own) == 2 else 0)
            shortened.append(sum(kept) < sum(map(len, own)))
    return Sequences(np.concatenate(parts), np.cumsum(lengths), np.array(seconds), labels, np.array(shortened))


def cut_longest(counts: Sequence[int], room: int) -> list[int]:
    """How many tokens one text or two keep that share `room`; the longer loses first, and of equals the first.

    That is `longest_first` of tokenizers, which itself keeps what it cuts off, in every combination: of two long texts
    more than there is memory for.
    """
    if sum(counts) <= room:
        return list(counts)
    if len(counts) == 1:
        return [room]
    shorter = min(*counts, room // 2)
    longer = room - shorter
    return [longer, shorter] if counts[0] > counts[1] else [shorter, longer]


def pad(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of some sequences: `attention_mask` and every column of one value a token (B, T), T the longest, and
    every other column (B,).

    `labels` of tokens are IGNORED at padding, all else is 0 there, whatever the vocabulary: nothing is computed on it.
    """
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    batch = {"attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long()}  # (B, T)
    places = batch["attention_mask"].bool()
    for name in items[0]:
        column = [item[name] for item in items]
        if np.ndim(column[0]):
            batch[name] = torch.full(places.shape, IGNORED if name == "labels" else 0)
            batch[name][places] = torch.from_numpy(np.concatenate(column))  # (N,) -> (B, T)
        else:
            batch[name] = torch.from_numpy(np.array(column))  # (B,)
    return batch


def pad_choices(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of some questions with C sequences each: as `pad`, but (B, C, T), T the longest of all."""
    names = ("input_ids", "token_type_ids")
    pairs = [pair for item in items for pair in zip(*(item[name] for name in names), strict=True)]
    flat = pad([dict(zip(names, pair, strict=True)) for pair in pairs])  # (B * C, T)
    batch = {name: column.unflatten(0, (len(items), -1)) for name, column in flat.items()}  # (B, C, T)
    others = [name for name in items[0] if name not in names]
    return batch | {name: torch.from_numpy(np.array([item[name] for item in items])) for name in others}


def batch_by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of sequences of similar length, together about TOKENS_A_BATCH tokens; the longest ones first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, TOKENS_A_BATCH // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count
