"""The losses of training (sections 3.1 and 4), none of which depends on how an update is cut into micro-batches.

`decode_loss` is the masked-LM head's: decoder, softmax and cross-entropy at once. One after the other, on a CPU, they
spend most of their time on carrying (M, V) logits, their fp32 copy and its gradients through memory; there a kernel of
`cpu.py` takes their place.

Shape letters: M labelled tokens, H hidden units, V the vocabulary, L labels, B a batch.
"""

import torch
from torch import Tensor, nn

from bertkit.model.cpu import DecodeOnCPU, can_decode_in_blocks

IGNORE_INDEX = -100  # a label that no loss counts, as in all of transformers


def sum_over_count(losses: Tensor, labelled: Tensor, count: Tensor | int | None) -> Tensor:
    """The sum of `losses` over `count` labels: those of the whole update if known, else the `labelled` here.

    A Trainer passes the count over all micro-batches and processes, so that a loss does not depend on how an update is
    cut.
    """
    if count is None:
        count = labelled.sum()
    return losses.sum() / torch.as_tensor(count, device=losses.device).clamp(min=1)  # 0 without a label


def classify_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """The mean cross-entropy of logits (..., L) against labels (...); IGNORE_INDEX labels do not count. In fp32."""
    logits, labels = logits.flatten(0, -2).float(), labels.flatten().to(logits.device)
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return sum_over_count(losses, labels != IGNORE_INDEX, count)


def regress_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean squared error of logits (B, L) against labels (B, L), or (B,) with L = 1. In fp32."""
    losses = (logits.float() - match_labels(labels, logits)).square()
    return sum_over_count(losses, torch.ones_like(losses), count)


def classify_each_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean binary cross-entropy of logits (B, L) against labels (B, L), 0 or 1 each. In fp32."""
    labels = match_labels(labels, logits)
    losses = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return sum_over_count(losses, torch.ones_like(losses), count)


def match_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels as fp32 in the shape (B, L) and on the device of the logits.

    Raises:
        ValueError: they are neither (B, L), nor (B,) with L = 1.
    """
    if logits.shape[1] == 1 and labels.numel() == len(logits):
        labels = labels.view_as(logits)
    if labels.shape != logits.shape:
        raise ValueError(f"got labels of shape {tuple(labels.shape)} for logits of {tuple(logits.shape)}; give as many")
    return labels.to(logits.device, torch.float32)


def decode_loss(hidden: Tensor, decoder: nn.Module, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """`classify_loss(decoder(hidden), labels, count)` of hidden (M, H) and labels (M,), none of them IGNORE_INDEX."""
    labels = labels.to(hidden.device)
    if not can_decode_in_blocks(hidden, decoder):
        return classify_loss(decoder(hidden), labels, count)
    autocast = torch.is_autocast_enabled("cpu") and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
    losses = DecodeOnCPU.apply(hidden, decoder.weight, decoder.bias, labels.long(), dtype)
    return sum_over_count(losses, torch.ones_like(labels), count)
