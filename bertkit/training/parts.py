"""The parts of an update: as many rows as fit into memory, computed one after the other."""

from typing import Any

from torch import Tensor

from bertkit.data.sequences import collate
from bertkit.model.heads import BertHead


def collate_parts(head: type[BertHead], most_tokens: int, rows: Any) -> dict[str, Any]:
    """Collate rows, and add the `parts` of the batch with their indices, which are computed one after the other."""
    batch = collate(rows)
    return batch | {"parts": [add_indices(part, head) for part in divide_batch(batch, most_tokens)]}


def divide_batch(batch: dict[str, Tensor], most_tokens: int) -> list[dict[str, Tensor]]:
    """Divide a batch, in order, into parts of as many rows as have at most `most_tokens` real tokens, or of one row.

    Padding stays, because nothing is computed on it. With 0 the batch is the only part.
    """
    if not most_tokens:
        return [batch]
    starts, room = [], -1
    for row, tokens in enumerate(batch["attention_mask"].flatten(1).sum(1).tolist()):
        if tokens > room:
            starts.append(row)
            room = most_tokens
        room -= tokens
    rows = [slice(*ends) for ends in zip(starts, [*starts[1:], None], strict=True)]
    return [{name: column[some] for name, column in batch.items()} for some in rows]


def add_indices(batch: dict[str, Tensor], head: type[BertHead]) -> dict[str, Tensor]:
    """Return a batch with the indices of the tokens that the head computes.

    They are found here because the batch is still in main memory.
    """
    return batch | head.index_tokens(**batch) if "attention_mask" in batch else batch
