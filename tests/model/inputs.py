"""Labelled batches and gradients for several tests of models."""

import torch
from torch import Tensor, nn

from tests.conftest import make_batch, make_labels, shape_for

KERNELS = ("packed", "eager", "sdpa")
LANGUAGE_MODELS = ("BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel")
LENGTHS = [3, 9, 5, 13]


def make_inputs(head: str, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Return a batch with labels, as the head takes it."""
    batch = make_batch(lengths)
    return shape_for(head, batch) | ({} if head == "BertModel" else make_labels(head, batch))


def take_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradient of every parameter, with a fixed seed."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
