"""Masked words of a text, and whether a text follows another: what a pretrained model answers (paper section 3.1).

Left out: its training and its scores (`bertkit.tasks.pretraining`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import softmax

from bertkit.data.sequences import IGNORED, EncodedInputs, to_array
from bertkit.data.tokenizer import get_cached_tokenizer
from bertkit.errors import UsageError
from bertkit.tasks.answers import Answers, Decisions, PairAnswers, Result, judge_pairs
from bertkit.tasks.inputs import describe_texts, read_texts
from bertkit.tasks.schema import PROBABILITY, STRING, Schema, make_array, make_object
from bertkit.tasks.task import PredictionSettings, Task, check_finite

if TYPE_CHECKING:
    from torch import Tensor

MASK = "[MASK]"


class FillMaskTask(Task):
    """Name the likeliest words for each [MASK] in a text or two; it is never trained by itself."""

    head = "BertForPreTraining"
    heads: Mapping[str, Mapping[str, str]] = {"objective": {"mlm": "BertForMaskedLM"}}
    evaluation_options: Mapping[str, Any] = {"targets_only": True}

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a text with masks or two, and of the words of each mask.

        The second has also a pair's probability that a text follows the other.
        """
        masked = ("The man went to the [MASK].", "He bought a gallon of [MASK].")  # section A.2
        word = make_object({"word": STRING, "probability": PROBABILITY})
        masks = {"masks": make_array(make_object({"words": make_array(word)}))}
        with_pair = settings.head == self.head
        follows = {"next_sentence": PROBABILITY} if with_pair else {}
        return describe_texts(masked, settings), make_object(masks | follows, optional=follows)

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> dict[str, np.ndarray]:
        """Return the sequence of one or two texts with masks; `labels` (T,) are IGNORED except at the masks."""
        texts, tokenizer = read_texts(given, settings.pairs), settings.tokenizer
        with_pair = settings.head == self.head  # the head says whether a text follows another
        if not any(MASK in text for text in texts) and not (with_pair and len(texts) == 2):
            also = " and no text_pair; give two texts (predict --pair), or" if with_pair else ";"
            raise UsageError(f"there is no {MASK} to fill in{also} put {MASK} where a word is missing")
        parts = [[*encode_masked(text, settings), tokenizer.sep_token_id] for text in texts]
        ids = [tokenizer.cls_token_id, *(token for part in parts for token in part)]
        if len(ids) > settings.max_length:
            raise UsageError(
                f"the input has {len(ids):,} tokens, but the model takes at most {settings.max_length:,}; shorten it"
            )
        tokens = np.array(ids, np.int64)
        segments = np.zeros_like(tokens)
        segments[len(parts[0]) + 1 :] = 1
        labels = np.where(tokens == tokenizer.mask_token_id, tokens, IGNORED)
        return {"input_ids": tokens, "token_type_ids": segments, "labels": labels}

    def encode_inputs(self, examples: Sequence[dict[str, np.ndarray]], settings: PredictionSettings) -> EncodedInputs:
        """Return the sequences, which `read_input` has made, none of them truncated: those too long are rejected.

        The `labels` (B, T) of a batch mark the masks, so that only these are decoded.
        """
        lengths = np.array([len(example["input_ids"]) for example in examples])
        return EncodedInputs(examples, lengths, [False] * len(examples), join=list)

    def summarize(
        self, outputs: Any, batch: Mapping[str, "Tensor | np.ndarray"], settings: PredictionSettings | None = None
    ) -> list[tuple[Any, Any]]:
        """Return for each sequence the likeliest words of its masks, and NSP logits (2,) or None."""
        logits = outputs["logits" if "logits" in outputs else "prediction_logits"]  # (M, V)
        size = len(settings.tokenizer)  # the model may have room for more
        if isinstance(logits, np.ndarray):
            chances = softmax(logits, axis=-1)[:, :size]
            top = min(settings.top, chances.shape[1])
            ids = np.argpartition(-chances, top - 1, axis=-1)[:, :top]  # (M, top), in no order
            values = np.take_along_axis(chances, ids, axis=-1)
            order = np.argsort(-values, axis=-1, kind="stable")
            values, ids = (np.take_along_axis(each, order, axis=-1) for each in (values, ids))  # (M, top)
        else:
            chances = logits.float().softmax(-1)[:, :size]
            best = chances.topk(min(settings.top, chances.shape[-1]))
            values, ids = best.values.cpu().numpy(), best.indices
        check_finite(values)
        words = [settings.tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
        masks = [list(zip(*pair, strict=True)) for pair in zip(words, values.tolist(), strict=True)]
        counts = to_array((batch["labels"] != IGNORED).sum(1))
        parts = [masks[end - count : end] for count, end in zip(counts, np.cumsum(counts), strict=True)]
        follows = outputs.get("seq_relationship_logits")
        pairs = [None] * len(counts) if follows is None else check_finite(to_array(follows))
        return list(zip(parts, pairs, strict=True))

    def decode(
        self, summaries: Sequence[tuple[Any, Any]], data: Sequence[Mapping[str, Any]], decided: Decisions | None = None
    ) -> Answers:
        """Return the words of each mask, and of two texts the probability that one follows the other."""
        masks, pairs = zip(*summaries, strict=True)
        has_two = [example["token_type_ids"].any() for example in data]
        return MaskAnswers(masks, [pair if two else None for pair, two in zip(pairs, has_two, strict=True)])


@dataclass(frozen=True, eq=False)
class MaskAnswers(Answers):
    """The likeliest words for each mask of each input."""

    key = "masks"
    has_pipeline = True
    # For each input and each of its masks, the words with their probabilities
    masks: Sequence[Sequence[Sequence[tuple[str, float]]]]
    pairs: Sequence[np.ndarray | None]  # next-sentence logits (2,) of two texts

    def list_results(self) -> list[Result]:
        results: list[Result] = []
        for masks, pair in zip(self.masks, self.pairs, strict=True):
            words = [[{"word": word, "probability": chance} for word, chance in mask] for mask in masks]
            result: Result = {"masks": [{"words": found} for found in words]}
            if pair is not None:
                result["next_sentence"] = judge_pairs(pair[None])[0].item()
            results.append(result)
        return results

    @staticmethod
    def describe(result: Result) -> str:
        parts = []
        for mask in result["masks"]:
            parts.append(", ".join(f"{word['word']!r} {word['probability']:.0%}" for word in mask["words"]))
        if "next_sentence" in result:
            parts.append(PairAnswers.describe(result))
        return "; ".join(parts)

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        masks = []
        for mask in result["masks"]:
            masks.append([{"score": word["probability"], "token_str": word["word"]} for word in mask["words"]])
        return masks[0] if len(masks) == 1 else masks


def encode_masked(text: str, settings: PredictionSettings) -> list[int]:
    """Return the tokens of a text, [MASK] being the mask; other special tokens written out are ordinary text."""
    ids: list[int] = []
    for number, piece in enumerate(text.split(MASK)):
        if number:
            ids.append(settings.tokenizer.mask_token_id)
        ids += get_cached_tokenizer(settings.tokenizer).encode([piece.strip()], np.int64)[0].tolist()
    return ids
