"""The samples of a pretraining, a pure function of their position (paper section 3.1 and appendix A.2).

One map-style data set covers the whole run: position -> phase, epoch, permuted sample, pair, masks.
"""

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.pretraining.masking import mask_tokens
from bertkit.data.pretraining.pairs import Pairing, assemble_pairs
from bertkit.data.pretraining.rng import draw_key, permute
from bertkit.data.pretraining.store import CORPUS_INDEX, PLAN_FOLDER, fingerprint_files, open_corpus
from bertkit.data.pretraining.tokenize import TokenizedCorpus
from bertkit.data.sequences import IGNORED
from bertkit.system.files import atomic_open, take_fingerprint

if TYPE_CHECKING:
    from torch import Tensor


PLAN_VERSION = 2  # the version of the algorithm in `pairs.py` and of file names: other plans must not be reused


@dataclass(frozen=True)
class Phase:
    """A part of the run at one length (A.2: 90 % of the steps at 128 tokens, the rest at 512)."""

    samples: int
    max_length: int


@lru_cache(maxsize=4)  # a batch may hold the end of one copy and the beginning of the next; two splits
def plan_pairs(
    corpus: TokenizedCorpus, max_length: int, seed: int, copy: int, short_seq_prob: float
) -> tuple[Pairing, np.ndarray]:
    """Return the plan of one copy of a corpus, and (P,) the first sentences of its pairs.

    For a corpus on disk they are kept in `plans/` beside it, four bytes a pair, and mapped, because finding those of a
    large corpus takes many seconds. If they cannot be written, they stay in memory.
    """
    pairing = Pairing(corpus, max_length, seed, copy, short_seq_prob)
    if corpus.directory is None:
        return pairing, pairing.locate_chunks()
    index = next(corpus.directory.glob(f"{CORPUS_INDEX}-*")).stem  # the name holds the checksum of the corpus
    documents = zlib.crc32(corpus.document_ends, zlib.crc32(corpus.document_starts))
    name = f"{PLAN_VERSION}-{index}-{documents:08x}-{max_length}-{short_seq_prob}-{seed}-{copy}.npy"
    path = corpus.directory / PLAN_FOLDER / name
    with suppress(OSError, ValueError, EOFError):  # missing or truncated
        return pairing, np.load(path, mmap_mode="r")
    chunks = pairing.locate_chunks()
    with suppress(OSError):  # a full or read-only disk
        path.parent.mkdir(exist_ok=True)
        with atomic_open(path, "wb") as stream:
            np.save(stream, chunks)
    return pairing, chunks


class PretrainingData:
    """All samples of a run in training order, a pure function of the position and the constructor's arguments.

    A pair is taken from the copy `epoch % dupe_factor` of the corpus, in an order permuted again in every epoch. No
    earlier position has to be read or computed first.

    Args:
        corpus: Token ids with sentence and document ends.
        tokenizer: Source of the special token ids, the vocabulary size and the `##` pieces.
        phases: The phases in order; a batch lies in one phase.
        options: The `[data]` table.
        seed: Seed of pairs, order and masks.
    """

    def __init__(
        self, corpus: TokenizedCorpus, tokenizer: Any, phases: Sequence[Phase], options: Mapping[str, Any], seed: int
    ) -> None:
        self.corpus = corpus
        self.phases = list(phases)
        self.options = dict(options)
        self.seed = seed
        self.special = {
            "cls_id": tokenizer.cls_token_id,
            "sep_id": tokenizer.sep_token_id,
            "pad_id": tokenizer.pad_token_id,
        }
        self.mask_id = tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.continues = None  # (V,) bool, True for ## pieces; (2V,), True from V on, if the text's words are known
        if options["whole_word_masking"] and corpus.word_offset:
            self.continues = np.arange(2 * corpus.word_offset) >= corpus.word_offset
        elif options["whole_word_masking"]:
            tokens = tokenizer.convert_ids_to_tokens(range(self.vocab_size))
            self.continues = np.array([token.startswith("##") for token in tokens])
        self.copy_ends: dict[int, list[int]] = {}  # max_length -> cumulative pairs of the copies used so far

    def __len__(self) -> int:
        return sum(phase.samples for phase in self.phases)

    @property
    def parts(self) -> list[range]:
        """Return the positions of each phase, whose sequences have lengths of their own."""
        ends = np.cumsum([phase.samples for phase in self.phases]).tolist()
        return [range(end - phase.samples, end) for phase, end in zip(self.phases, ends, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without arrays that a worker process can map from files."""
        if self.corpus.directory is None:
            return self.__dict__
        return self.__dict__ | {"corpus": replace(self.corpus, ids=None, sentence_ends=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.corpus.directory is not None:
            whole = open_corpus(self.corpus.directory, verify=False)
            self.corpus = replace(self.corpus, ids=whole.ids, sentence_ends=whole.sentence_ends)

    def fingerprint(self) -> str:
        """Return a fingerprint of the corpus as tokenized with this vocabulary."""
        corpus = self.corpus
        if corpus.directory is None:
            text = take_fingerprint(corpus.ids, corpus.sentence_ends)
        else:  # the checksums are known
            text = fingerprint_files(corpus.directory)
        return take_fingerprint(text.encode(), corpus.document_starts, corpus.document_ends)

    def plan(self, max_length: int, copy: int) -> tuple[Pairing, np.ndarray]:
        """Plan the pairs of one copy of the corpus; also return the first sentences (P,) of its pairs."""
        return plan_pairs(self.corpus, max_length, self.seed, copy, self.options["short_seq_prob"])

    def count_pairs(self, max_length: int, copy: int = 0) -> int:
        """Return the number of pairs in one copy of the corpus."""
        return len(self.plan(max_length, copy)[1])

    @property
    def passes(self) -> float:
        """Return how many times the run passes its text."""
        return sum(phase.samples / self.count_pairs(phase.max_length) for phase in self.phases)

    def locate(self, phase: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the epochs (B,) of a phase's samples (B,), and their positions in those epochs."""
        copies, max_length = self.options["dupe_factor"], self.phases[phase].max_length
        ends = self.copy_ends.setdefault(max_length, [])
        while len(ends) < copies and (not ends or ends[-1] <= samples.max()):
            ends.append((ends[-1] if ends else 0) + self.count_pairs(max_length, len(ends)))
        rounds, rest = np.divmod(samples, ends[-1]) if len(ends) == copies else (np.zeros_like(samples), samples)
        copy = np.searchsorted(ends, rest, side="right")
        return rounds * copies + copy, rest - np.concatenate([[0], ends])[copy]

    def __getitem__(self, position: int) -> dict[str, "Tensor"]:
        """Return one sample; each column has a batch dimension of 1."""
        return self.__getitems__([position])

    def __getitems__(self, positions: Sequence[int]) -> dict[str, "Tensor"]:
        """Return a batch of positions of one phase.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` and `labels` (B, T) int64, T the longest of the batch;
            `next_sentence_label` (B,) int64, only for the objective "mlm+nsp": 0 if B follows A, 1 if B is random.

        Raises:
            IndexError: A position is beyond the end of the run, or in another phase than the others.
        """
        import torch

        samples, ends = np.asarray(positions, np.int64), np.cumsum([phase.samples for phase in self.phases])
        number = int(np.searchsorted(ends, samples.min(), side="right"))
        if samples.max() >= ends[number]:
            raise IndexError(
                f"position {samples.max()} is beyond the phase of the others, which ends at {ends[number]}"
            )
        phase, options = self.phases[number], self.options
        epochs, offsets = self.locate(number, samples - (ends[number] - phase.samples))
        pairs, index = np.empty((len(samples), 5), np.int64), np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            pairing, chunks = self.plan(phase.max_length, int(epoch) % options["dupe_factor"])
            index[rows] = permute(draw_key(self.seed, number, epoch), offsets[rows], len(chunks))
            pairs[rows] = pairing.draw_pairs(chunks[index[rows]])
        batch = assemble_pairs(self.corpus.ids, pairs, **self.special)
        lengths, ids = batch.pop("lengths"), batch["input_ids"]
        batch["input_ids"] = self.corpus.strip_words(ids)
        if options["objective"] == "clm":
            batch["labels"] = np.where(batch["attention_mask"] == 1, batch["input_ids"], IGNORED)
            batch["labels"][:, 0] = IGNORED  # nothing predicts [CLS]
        else:
            batch["input_ids"], batch["labels"] = mask_tokens(
                batch["input_ids"],
                lengths,
                seed=self.seed,
                epoch=epochs + (number << 32),
                index=index,
                special_ids=(self.special["cls_id"], self.special["sep_id"]),
                mask_id=self.mask_id,
                vocab_size=self.vocab_size,
                probability=options["masked_lm_prob"],
                mask_rate=options["mask_rate"],
                random_rate=options["random_rate"],
                same_rate=options["same_rate"],
                continues=None if self.continues is None else self.continues[ids],
            )
        if options["objective"] == "mlm+nsp":
            batch["next_sentence_label"] = pairs[:, 4]
        return {name: torch.from_numpy(column) for name, column in batch.items()}
