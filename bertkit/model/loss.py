"""The losses of training (sections 3.1 and 4), none of which depends on the division of an update into micro-batches.

`decode_loss`, for the masked-LM head, fuses decoder, softmax and cross-entropy. Run separately on a CPU, they spend
most of their time moving (M, V) logits, their fp32 copy and its gradients through memory; a kernel of `cpu.py` avoids
this.

Shape letters: M labelled tokens, H hidden units, V the vocabulary, L labels, B a batch.
"""

import torch
from torch import Tensor, nn

from bertkit.model.cpu import DecodeOnCPU, can_decode_in_blocks

IGNORE_INDEX = -100  # the label that losses ignore, as in transformers


def sum_over_count(losses: Tensor, labelled: Tensor, count: Tensor | int | None) -> Tensor:
    """Return the sum of `losses` divided by `count`, or by the sum of `labelled` (0, 1 or a weight each) if it is None.

    A Trainer passes the count over all micro-batches and processes of an update, so that a loss does not depend on
    their number.
    """
    count = torch.as_tensor(labelled.sum() if count is None else count, device=losses.device)
    return losses.sum() / count.masked_fill(count == 0, 1)  # 0 without a label; a sum of weights may be below 1


def classify_loss(
    logits: Tensor,
    labels: Tensor,
    count: Tensor | int | None = None,
    weights: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy in fp32 of logits (..., L) against labels (...), ignoring IGNORE_INDEX.

    Args:
        labels: Integers (...), or the shares (..., L) of the classes in soft labels.
        weights: (L,) weights of the classes for a weighted mean; then `count` is the sum of the labels' weights.
        sample_weight: (...) weights of the rows, which also enter that sum.
    """
    dims = -2 if labels.is_floating_point() else -1
    logits, labels = logits.flatten(0, -2).float(), labels.flatten(0, dims).to(logits.device)
    losses = nn.functional.cross_entropy(logits, labels, weights, ignore_index=IGNORE_INDEX, reduction="none")
    if sample_weight is not None:
        losses = losses * sample_weight.flatten()
    return sum_over_count(losses, weigh_labels(labels, weights, sample_weight), count)


def weigh_labels(labels: Tensor, weights: Tensor | None = None, sample_weight: Tensor | None = None) -> Tensor:
    """Return what each label (...) counts in a mean; arguments are those of `classify_loss`."""
    if labels.is_floating_point():
        counted = labels.sum(-1) if weights is None else (labels * weights).sum(-1)
    else:
        counted = labels != IGNORE_INDEX
        if weights is not None:
            counted = weights[labels.clamp(min=0)] * counted
    return counted if sample_weight is None else counted * sample_weight.view_as(counted)


def regress_loss(
    logits: Tensor, labels: Tensor, count: Tensor | int | None = None, sample_weight: Tensor | None = None
) -> Tensor:
    """Return the mean squared error in fp32 of logits (B, L) against labels (B, L), or (B,) if L = 1.

    Args:
        sample_weight: (B,) weights of the rows for a weighted mean.
    """
    losses = (logits.float() - match_labels(labels, logits)).square()
    return average_each(losses, count, sample_weight)


def classify_each_loss(
    logits: Tensor,
    labels: Tensor,
    count: Tensor | int | None = None,
    weights: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Return the mean binary cross-entropy in fp32 of logits (B, L) against labels (B, L), each 0 or 1.

    Args:
        weights: (L,) factors of the positives' losses; the mean is not divided by them.
        sample_weight: (B,) weights of the rows for a weighted mean.
    """
    labels = match_labels(labels, logits)
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits.float(), labels, reduction="none", pos_weight=weights
    )
    return average_each(losses, count, sample_weight)


def average_each(losses: Tensor, count: Tensor | int | None, sample_weight: Tensor | None) -> Tensor:
    """Return the mean of losses (B, L), weighted by the rows' weights (B,) if there are any."""
    counted = torch.ones_like(losses)
    if sample_weight is not None:
        counted = counted * sample_weight[:, None]
    return sum_over_count(losses * counted, counted, count)


def match_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels as fp32 in the shape (B, L) and on the device of the logits.

    Raises:
        ValueError: They are neither (B, L), nor (B,) with L = 1.
    """
    if logits.shape[1] == 1 and labels.numel() == len(logits):
        labels = labels.view_as(logits)
    if labels.shape != logits.shape:
        raise ValueError(f"got labels of shape {tuple(labels.shape)}; expected {tuple(logits.shape)}, as of the logits")
    return labels.to(logits.device, torch.float32)


def decode_loss(hidden: Tensor, decoder: nn.Module, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Compute `classify_loss(decoder(hidden), labels, count)`.

    Args:
        hidden: (M, H).
        labels: (M,), without IGNORE_INDEX.
    """
    labels = labels.to(hidden.device)
    if not can_decode_in_blocks(hidden, decoder):
        return classify_loss(decoder(hidden), labels, count)
    autocast = torch.is_autocast_enabled("cpu") and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
    losses = DecodeOnCPU.apply(hidden, decoder.weight, decoder.bias, labels.long(), dtype)
    return sum_over_count(losses, torch.ones_like(labels), count)
