"""The losses of training (sections 3.1 and 4), none of which depends on how an update is cut into micro-batches.

`decode_loss` is the masked-LM head's: decoder, softmax and cross-entropy at once. One after the other, on a CPU, they
spend most of their time on carrying (M, V) logits, their fp32 copy and its gradients through memory. Here a few rows of
scores at a time become their own gradient while they are in the cache, in the precision of autocast, and the backward
pass only scales. The mathematics is the same; other devices, and compiled graphs, use torch's own functions.

Shape letters: M labelled tokens, H hidden units, V the vocabulary, L labels, B a batch.
"""

import torch
from torch import Tensor, nn

from bertkit.model.precision import is_adapted, runs_at_once_on_cpu

IGNORED = -100  # a label that no loss counts, as in all of transformers

BLOCK = 1024  # rows of scores that one matrix product makes; what is kept of them is (BLOCK, V)
CACHED = 1 << 17  # fp32 scores, half a megabyte: a softmax of so many does not leave a core's cache


def sum_over_count(losses: Tensor, labelled: Tensor, count: Tensor | int | None) -> Tensor:
    """The sum of `losses` over `count` labels: those of the whole update if known, else the `labelled` here.

    A Trainer passes the count over all micro-batches and processes, so that a loss does not depend on how an update is
    cut.
    """
    if count is None:
        count = labelled.sum()
    return losses.sum() / torch.as_tensor(count, device=losses.device).clamp(min=1)  # 0 without a label


def classify_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """The mean cross-entropy of logits (..., L) against labels (...); IGNORED labels do not count. In fp32."""
    logits, labels = logits.flatten(0, -2).float(), labels.flatten().to(logits.device)
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return sum_over_count(losses, labels != IGNORED, count)


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
    """`classify_loss(decoder(hidden), labels, count)` of hidden (M, H) and labels (M,), none of them IGNORED."""
    labels = labels.to(hidden.device)
    if not can_decode_in_blocks(hidden, decoder):
        return classify_loss(decoder(hidden), labels, count)
    autocast = torch.is_autocast_enabled("cpu") and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
    losses = _DecodeOnCPU.apply(hidden, decoder.weight, decoder.bias, labels.long(), dtype)
    return sum_over_count(losses, torch.ones_like(labels), count)


def can_decode_in_blocks(hidden: Tensor, decoder: nn.Module) -> bool:
    """Whether all gradients of many rows are wanted on a CPU, by a decoder that is a matrix, a bias and nothing else.

    For fewer rows than H / 2 what the gradient of the matrix costs beside them is more than what is saved.
    """
    return (
        runs_at_once_on_cpu(hidden)
        and 2 * len(hidden) >= hidden.shape[1]
        and torch.is_grad_enabled()
        and is_plain_decoder(decoder)
        and all(tensor.requires_grad for tensor in (hidden, decoder.weight, decoder.bias))
    )


def is_plain_decoder(decoder: nn.Module) -> bool:
    """Whether a decoder is a matrix and a bias; not if somebody has adapted, sharded, pruned or hooked it."""
    return (
        type(decoder) is nn.Linear
        and type(decoder.weight) is type(decoder.bias) is nn.Parameter
        and not is_adapted(decoder)
    )


class _DecodeOnCPU(torch.autograd.Function):
    """The sum of the cross-entropies of a linear decoder's scores; its gradients are computed on the way."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight_, bias_ = weight.to(dtype), bias.to(dtype)
            to_hidden, to_bias = torch.empty_like(hidden), torch.zeros_like(bias, dtype=torch.float32)
            to_weight, total = None, torch.zeros((), dtype=torch.float32)
            for begin in range(0, len(hidden), BLOCK):
                block = hidden[begin : begin + BLOCK].to(dtype)  # (BLOCK, H)
                scores = torch.addmm(bias_, block, weight_.t())  # (BLOCK, V), soon their own gradient
                total += turn_to_gradient(scores, labels[begin : begin + BLOCK], to_bias)
                to_hidden[begin : begin + BLOCK] = scores @ weight_
                part = (scores.t() @ block).to(weight.dtype)
                to_weight = part if to_weight is None else to_weight.add_(part)
        ctx.dtype = dtype
        ctx.save_for_backward(hidden, weight, bias, to_hidden, to_weight, to_bias.to(bias.dtype), labels)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, kept, labels = ctx.saved_tensors[:3], ctx.saved_tensors[3:6], ctx.saved_tensors[6]
        if torch.is_grad_enabled():  # create_graph=True: what was kept is not differentiable
            given = [each.view_as(each) for each in given]  # a tied weight is also behind `hidden`
            with torch.autocast("cpu", enabled=False):
                scores = nn.functional.linear(*(each.to(ctx.dtype) for each in given))  # (M, V)
                total = nn.functional.cross_entropy(scores.float(), labels, reduction="sum")
            return (*torch.autograd.grad(total, given, gradient, create_graph=True), None, None)
        return (*(each * gradient.to(each.dtype) for each in kept), None, None)


def turn_to_gradient(scores: Tensor, labels: Tensor, to_bias: Tensor) -> Tensor:
    """The sum of the cross-entropies of scores (M, V), which become its gradient; theirs is added to `to_bias` (V,)."""
    total = torch.zeros((), dtype=torch.float32)
    step = max(CACHED // scores.shape[1], 1)
    for begin in range(0, len(scores), step):
        rows, targets = scores[begin : begin + step].float(), labels[begin : begin + step, None]
        norms = rows.logsumexp(1, keepdim=True)
        total += (norms - rows.gather(1, targets)).sum()
        rows = rows.sub(norms).exp_()
        rows.scatter_add_(1, targets, rows.new_full(targets.shape, -1.0))
        to_bias += rows.sum(0)
        scores[begin : begin + step] = rows
    return total
