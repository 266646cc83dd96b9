"""The number of tokens that are computed at once: what memory allows."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from bertkit.model.precision import choose_precision, use_precision
from bertkit.tasks.prediction import add_indices
from bertkit.tasks.task import Task
from bertkit.training.recipe import Recipe

TRAINED_ON_CPU = 2560  # tokens: BERT-base takes less than 5 GB; measured in recipes/RESULTS.md
USED_SHARE = 0.8  # share of a GPU's free memory
STATE_BYTES = 12  # bytes of a learned weight's gradient and two moments of Adam, in fp32
SAMPLED = 128  # sequences whose tokens are counted, and that a dry run predicts


def bound_tokens(recipe: Recipe, task: Task, model: nn.Module, rows: Any, device: torch.device) -> Recipe:
    """Return the recipe with `max_tokens`, unless it has them or the sequences of a micro-batch.

    All processes must call this together: the one with the least free memory decides.
    """
    if recipe.data["max_tokens"] or "per_device_train_batch_size" in recipe.train:
        return recipe
    most = TRAINED_ON_CPU
    if device.type == "cuda":
        each = measure_activations(recipe, task, model.to(device), rows, device)
        states = STATE_BYTES * model.num_parameters(only_trainable=True)
        room = USED_SHARE * torch.cuda.mem_get_info(device)[0] - states
        most = max(1, min(gather_object([int(room / each)])))
    return recipe.override(data={"max_tokens": most})


def measure_activations(recipe: Recipe, task: Task, model: nn.Module, rows: Any, device: torch.device) -> float:
    """Return the bytes a token that a forward pass keeps for the backward pass, in the longest of some sequences."""
    some = list(getattr(rows, "parts", [range(len(rows))])[-1][:SAMPLED])  # the last phase has the longest ones
    found = task.collate(rows.__getitems__(some))
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
