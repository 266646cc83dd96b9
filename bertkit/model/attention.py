"""Attention over packed sequences, which computes nothing on padding, and plain attention as the reference.

Shape letters are defined in `packing.py`. Left out: cached decoding, cross-attention and masks other than (B, T).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bertkit.model.cpu import attend_on_cpu, move, trains_on_cpu
from bertkit.model.cpu import dropout as apply_dropout
from bertkit.model.packing import PACKED, Group, Layout, Packed

LARGEST_HEAD = 192  # the largest head size of the flash kernel, with dropout and gradients, on every GPU


def name_kernel(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation, which transformers keeps here for models to read."""
    return config._attn_implementation


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Compute plain attention.

    Args:
        query: (B, A, T, D), as `key` and `value`.
        attention_mask: (B, 1, T, T), added to the scores, or None.

    Returns:
        The mixed values (B, T, A, D) and the probabilities (B, A, T, T).
    """
    scores = query @ key.transpose(-1, -2) * scaling  # (B, A, T, T)
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = apply_dropout(scores.softmax(dim=-1), dropout)  # (B, A, T, T)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities  # (B, T, A, D)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    layout: Layout | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute the attention of every token of a layout to the tokens of its own sequence.

    On CUDA the flash kernel runs over the cumulative lengths, in half precision and for head sizes that are multiples
    of 8. Otherwise torch's attention runs over the padded batch on CUDA and in a compiled graph, and plain attention
    over groups of similar length elsewhere, with a hand-written kernel for training on a CPU.

    Args:
        query: (1, A, N, D), as `key` and `value`: the form of transformers' kernels over packed sequences; or
            (1, A, W, D) if the layout is narrowed.

    Returns:
        The mixed values (1, N, A, D) or (1, W, A, D), and None.
    """
    if not isinstance(layout, Packed):  # a traced model, or one of transformers with a configuration of this package
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)
    layout = layout.to(query.device)
    if can_flash(query):
        attend = attend_flash
    elif query.is_cuda or torch.compiler.is_compiling():
        attend = attend_unpacked
    else:
        attend = attend_on_cpu if trains_on_cpu(dropout, query, key, value) else attend_grouped
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, A, D)
    mixed = attend(query, key, value, layout, dropout, scaling, module.is_causal)
    return mixed[None], None  # (1, N, A, D)


def can_flash(query: Tensor) -> bool:
    """Return whether torch's flash kernel takes these states."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= LARGEST_HEAD
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Compute packed attention (N, A, D) with torch's flash kernel over cumulative lengths.

    `torch.nn.attention.varlen.varlen_attn` reaches the same kernel without dropout, which BERT trains with.
    """
    lengths = layout.bounds, layout.whole.bounds, *2 * [layout.shape[1]]
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *lengths, dropout, causal, return_debug_mask=False, scale=scaling
    )[0]


def attend_unpacked(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Compute packed attention (N, A, D) over the padded batch (B, T), whose shape does not depend on lengths."""
    states = (
        part.unpack(x).transpose(1, 2) for x, part in zip((query, key, value), layout.sides, strict=True)
    )  # (B, A, T, D)
    visible = layout.whole.unpack(torch.ones_like(key[:, 0, 0], dtype=torch.bool))[:, None, None]  # (B, 1, 1, T)
    if causal:
        visible = visible & torch.ones(*2 * layout.shape[1:], dtype=torch.bool, device=query.device).tril()
    mixed = nn.functional.scaled_dot_product_attention(
        *states, attn_mask=visible, dropout_p=dropout, scale=scaling
    )  # (B, A, T, D)
    return layout.pack(mixed.transpose(1, 2))  # (N, A, D)


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Compute packed attention (N, A, D) by plain attention over groups of similar length."""
    states = map(_divide, (query, key, value), layout.sides)
    mixed = [
        _attend_group(*parts, group, dropout, scaling, causal)  # (b * t, H)
        for group, *parts in zip(layout.whole.groups, *states, strict=True)
    ]
    if layout.is_even:
        return mixed[0].view(query.shape)  # (N, A, D)
    rows, slots, real = layout.plan_moves()
    return move(torch.cat(mixed), slots, rows, real).view(query.shape)  # (N, A, D)


def _divide(x: Tensor, layout: Packed) -> Iterator[Tensor]:
    """Yield the part (b, A, t, D) of each group of x (N, A, D).

    Padding repeats a token. No gradient reaches it, because it is masked as a key and left out of the result.
    """
    moved = x.reshape(len(x), -1)  # (N, H)
    if not layout.is_even:
        rows, slots, _ = layout.plan_moves()
        moved = move(moved, rows, slots)  # (M, H)
    for group, part in zip(layout.groups, layout.divide(moved), strict=True):
        yield part.view(*group.shape, *x.shape[1:]).transpose(1, 2)  # (b, A, t, D)


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: Group, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Return the mixed values (b * t, H) of one group from query, key and value (b, A, t, D).

    Torch's kernel is used only without dropout and gradients: in bf16 on a CPU its backward pass takes three times as
    long as that of plain attention.
    """
    visible = group.mark_visible(causal)
    if dropout == 0.0 and not query.requires_grad:
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        scores = query @ key.transpose(-1, -2) * scaling  # (b, A, t, t)
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        mixed = apply_dropout(scores.softmax(dim=-1), dropout) @ value  # (b, A, t, D)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)  # (b * t, H)


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, sdpa_mask)  # for a traced model, which is padded
