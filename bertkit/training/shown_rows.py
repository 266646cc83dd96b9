"""Training rows as the model gets them, in words: pieces, segments, and the label, tags, targets or answer.

    row 1: [CLS] a fine film [SEP]  good
    row 2: [CLS] who [SEP] | ada «love ##lace» wrote it [SEP]
    row 3: [CLS] the {[MASK] man} went {to to} [SEP]  next sentence: random

Text after a bar is segment B, guillemets hold an answer, and braces a token that is read and the one that is to be
predicted there; left to right it is predicted from the tokens before it. A tag follows its piece after a slash. Left
out: rows that were truncated, which a run counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertkit.data.sequences import IGNORED, collate
from bertkit.training.prepare import Prepared


def show_rows(prepared: Prepared, count: int) -> Iterator[str]:
    """Yield a line for each sequence of the first rows of train; a row may have several, such as endings or windows."""
    data, names = prepared.data["train"], prepared.settings.get("id2label", {})
    for row in range(min(count, len(data))):
        columns = collate(data.__getitems__([row])).items()
        batch = {name: column[0].numpy() for name, column in columns}  # (T,), or (C, T) for several sequences
        label = describe_label(batch, names)
        if batch["input_ids"].ndim == 1:
            yield f"row {row + 1}: {show_sequence(batch, prepared.tokenizer, names)}{label}"
            continue
        for number, mask in enumerate(batch["attention_mask"]):
            if mask.any():
                one = {name: batch[name][number] for name in ("input_ids", "token_type_ids", "attention_mask")}
                yield f"row {row + 1}, sequence {number + 1}: {show_sequence(one, prepared.tokenizer, names)}{label}"


def show_sequence(batch: Mapping[str, np.ndarray], tokenizer: Any, names: Mapping[int, str]) -> str:
    """Return the pieces of one sequence with what is learned of them.

    Args:
        names: The names of tags; empty where labels of tokens are tokens.
    """
    real = batch["attention_mask"].astype(bool)
    pieces = tokenizer.convert_ids_to_tokens(batch["input_ids"][real].tolist())
    segments = batch["token_type_ids"][real]
    if labels_tokens(batch):
        labels = batch["labels"][real].tolist()
        pieces = [label_piece(piece, label, names, tokenizer) for piece, label in zip(pieces, labels, strict=True)]
    if end := int(batch.get("end_positions", 0)):  # 0 is [CLS]: no answer in this window
        start = int(batch["start_positions"])
        pieces[start], pieces[end] = f"«{pieces[start]}", f"{pieces[end]}»"
    for index in np.flatnonzero(np.diff(segments) > 0).tolist():
        pieces[index] += " |"
    return " ".join(pieces)


def labels_tokens(batch: Mapping[str, np.ndarray]) -> bool:
    """Return whether the labels are those of the tokens; several labels of a text are numbers with fractions."""
    labels = batch.get("labels")
    return labels is not None and labels.ndim == 1 and labels.dtype.kind == "i"


def label_piece(piece: str, label: int, names: Mapping[int, str], tokenizer: Any) -> str:
    """Return a piece with its tag, or with the token that is to be predicted in its place."""
    if label == IGNORED:
        return piece
    return f"{piece}/{names[label]}" if names else f"{{{piece} {tokenizer.convert_ids_to_tokens([label])[0]}}}"


def describe_label(batch: Mapping[str, np.ndarray], names: Mapping[int, str]) -> str:
    """Return the label of a whole row after two spaces; empty if it has none."""
    if "next_sentence_label" in batch:
        return f"  next sentence: {'random' if batch['next_sentence_label'] else 'follows'}"
    labels = batch.get("labels")
    if labels is None or labels_tokens(batch):
        return ""
    return f"  {name_label(labels, names)}"


def name_label(labels: np.ndarray, names: Mapping[int, str]) -> str:
    """Return the name of a class, the names of several with their shares, or a number."""
    if labels.ndim:
        shown: Sequence[str] = [f"{names[n]} {value:g}" for n, value in enumerate(labels.tolist()) if value]
        return ", ".join(shown) or "no label"
    is_class = labels.dtype.kind == "i"
    return str(names.get(int(labels), int(labels))) if is_class else f"{float(labels):g}"
