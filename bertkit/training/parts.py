"""The parts of an update, computed one after the other: as many tokens as fit into memory, which is measured."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from bertkit.data.sequences import collate
from bertkit.model.heads import BertHead
from bertkit.model.precision import choose_precision, use_precision
from bertkit.tasks.task import Task
from bertkit.training.recipe import Recipe

TRAINED_ON_CPU = 2560  # tokens: BERT-base takes less than 5 GB; measured in recipes/RESULTS.md
USED_SHARE = 0.8  # share of a GPU's free memory
STATE_BYTES = 12  # bytes of a learned weight's gradient and two moments of Adam, in fp32
SAMPLED = 128  # sequences whose tokens are counted, and that a dry run predicts


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


def bound_tokens(recipe: Recipe, task: Task, model: nn.Module, rows: Any, device: torch.device) -> dict[str, Any]:
    """Return the `max_tokens` that memory allows, unless a recipe has them or the sequences of a micro-batch.

    All processes must call this together: the one with the least free memory decides.
    """
    if recipe.data["max_tokens"] or "per_device_train_batch_size" in recipe.train:
        return {}
    most = TRAINED_ON_CPU
    if device.type == "cuda":
        each = measure_activations(recipe, task, model.to(device), rows, device)
        states = STATE_BYTES * model.num_parameters(only_trainable=True)
        room = USED_SHARE * torch.cuda.mem_get_info(device)[0] - states
        most = max(1, min(gather_object([int(room / each)])))
    return {"max_tokens": most}


def measure_activations(recipe: Recipe, task: Task, model: nn.Module, rows: Any, device: torch.device) -> float:
    """Return the bytes a token that a forward pass keeps for the backward pass, in the longest of some sequences."""
    some = list(getattr(rows, "parts", [range(len(rows))])[-1][:SAMPLED])  # the last phase has the longest ones
    found = collate(rows.__getitems__(some))
    lengths = found["attention_mask"].flatten(1).sum(1)  # (B,)
    longest = int(lengths.argmax())

    def measure(size: int) -> int:
        kept: list[Tensor] = []
        batch = add_indices({name: column[[longest] * size] for name, column in found.items()}, type(model))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
        with use_precision(choose_precision(recipe.precision), device), hooks:
            model.train()(**{name: column.to(device) for name, column in batch.items()})
        return sum({x.data_ptr(): x.nbytes() for x in map(Tensor.untyped_storage, kept)}.values())

    return (measure(2) - measure(1)) / int(lengths.max())  # the difference has no weights
