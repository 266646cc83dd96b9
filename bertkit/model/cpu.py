"""Hand-written kernels for the CPU, each equal to the plain form that other devices use.

A kernel is used only where operations run eagerly: compiled graphs and modules with hooks or a replaced `forward` use
torch's own functions. The mathematics is always the same. Attention and decoder have no second derivatives.

- Dropout (section A.2: rate 0.1 on hidden states and on attention). `torch.nn.functional.dropout` spends most of its
  time drawing one random number per element. Here numpy's SFC64 draws one 64-bit number for every four elements, seeded
  for each mask by torch's generator, so a seed still fixes everything and checkpointing replays it. The rate is rounded
  to a multiple of 1/65536 (0.1 becomes 0.100006) and the scale follows the rounded rate, so that the mean stays exact.
  The result is a bit mask, which a CPU applies to whole vectors.
- Attention in training: states and scores are read fewer times than in `attend_grouped`.
- The masked-LM decoder: scores are overwritten by their gradient a few rows at a time, while they are in the cache.
- Linear layers in prediction: with weights in its own order oneDNN is faster than the product that torch takes in fp32.
"""

import os
import platform
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.model.packing import Packed

# --- When a kernel takes over -----------------------------------------------------------------------------------------


def runs_eagerly_on_cpu(x: Tensor) -> bool:
    """Return whether operations on x run on a CPU and are not compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_traced() -> bool:
    """Return whether a model is compiled, exported or traced."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def refuse_second_derivatives() -> None:
    """Raise a RuntimeError in a backward pass of a kernel with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "bertkit's kernels for the CPU have no second derivatives (create_graph=True); load the model with "
            "attn_implementation='eager', in evaluation mode"
        )


def is_adapted(module: nn.Module) -> bool:
    """Return whether a hook is registered on the module itself, or its `forward` was replaced."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


# --- Dropout ----------------------------------------------------------------------------------------------------------

_LEVELS = 1 << 16  # one 16-bit mask value per element
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def draw_mask(shape: torch.Size, rate: float) -> Tensor:
    """Draw an int16 mask on the CPU; each value is 0 with the rounded probability `rate`, else has all bits set."""
    generator = np.random.SFC64(int(torch.randint(1 << 62, (), device="cpu")))
    draws = torch.from_numpy(generator.random_raw((shape.numel() + 3) // 4).view(np.int16))
    return draws[: shape.numel()].view(shape).ge_(_count_dropped(rate) - _LEVELS // 2).neg_()


def compute_scale(rate: float) -> float:
    """Return the factor for the elements that a mask keeps, which preserves the mean."""
    return _LEVELS / (_LEVELS - _count_dropped(rate))


def _count_dropped(rate: float) -> int:
    """Return how many of the _LEVELS random values drop an element."""
    return min(round(rate * _LEVELS), _LEVELS - 1)


def apply_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x where the mask has its bits set, else 0; return x itself without a mask."""
    if mask is None:
        return x
    return (x.view(_INTEGERS[x.element_size()]) & mask).view(x.dtype)  # the mask is sign-extended


class _Mask(torch.autograd.Function):
    """Return scale * x where the mask has its bits set, else 0; save the mask, two bytes per element."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return apply_mask(x, mask).mul_(scale)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Mask.apply(gradient, *ctx.saved_tensors, ctx.scale), None, None


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Apply dropout to x of any shape: zero elements with probability `rate`, divide the others by 1 - `rate`.

    Returns x itself unless `training`. Randomness: torch's default generator of x's device.
    """
    if not training or rate == 0.0:
        return x
    if not runs_eagerly_on_cpu(x) or rate == 1.0:  # a mask keeps something, so that its scale is finite
        return nn.functional.dropout(x, rate)
    return _Mask.apply(x, draw_mask(x.shape, rate), compute_scale(rate))


class Dropout(nn.Dropout):
    """Apply `dropout` with the rate `p` in training mode; `p` may be changed."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


# --- Attention --------------------------------------------------------------------------------------------------------


def trains_on_cpu(dropout: float, *states: Tensor) -> bool:
    """Return whether to use `attend_on_cpu` instead of `attend_grouped`."""
    has_kernel = dropout < 1.0 and runs_eagerly_on_cpu(states[0])
    return has_kernel and (dropout > 0.0 or any(x.requires_grad for x in states))


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Compute `attend_grouped` for training on a CPU, reading states and scores fewer times.

    Rows are gathered per head, so that nothing is transposed. The query is scaled instead of the scores, and the values
    instead of the probabilities that dropout keeps. The softmax is in fp32, which is faster than bf16 on a CPU.
    Randomness: see the module docstring.
    """
    return _AttendOnCPU.apply(query, key, value, layout, dropout, scaling, causal)


class _AttendOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
    ) -> Tensor:
        shape, dtype, heads = query.shape, query.dtype, query.shape[1]
        with torch.autocast("cpu", enabled=False):
            query, key, value = (
                x.reshape(-1, shape[2]).index_select(0, part.plan_moves(heads)[0])
                for x, part in zip((query, key, value), layout.sides, strict=True)
            )  # (M * A, D) each
            query.mul_(scaling)
            value.mul_(compute_scale(dropout))
            mixed, kept = torch.empty_like(query), []
            parts = _divide_heads(layout, heads, query, mixed), _divide_heads(layout.whole, heads, key, value)
            for group, (queries, out), (keys, values) in zip(layout.whole.groups, *parts, strict=True):
                # (b * A, t, D) each
                scores = torch.bmm(queries, keys.transpose(1, 2))  # (b * A, t, t)
                scores = scores.to(torch.promote_types(dtype, torch.float32))
                if (bias := group.get_bias(causal)) is not None:
                    scores.view(group.shape[0], shape[1], *scores.shape[1:]).add_(bias)
                probabilities = scores.softmax(dim=-1).to(dtype)
                mask = draw_mask(probabilities.shape, dropout) if dropout > 0.0 else None
                torch.bmm(apply_mask(probabilities, mask), values, out=out)
                kept += [probabilities, mask]
            mixed = mixed.index_select(0, layout.plan_moves(heads)[1]).view(shape)  # (N, A, D)
        ctx.layout, ctx.scaling, ctx.dropout = layout, scaling, dropout
        ctx.save_for_backward(query, key, value, *kept)
        return mixed

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        query, key, value, *kept = ctx.saved_tensors
        _, heads, size = gradient.shape
        rows, _, real = ctx.layout.plan_moves(heads)
        with torch.autocast("cpu", enabled=False):
            gradient = gradient.reshape(-1, size).index_select(0, rows)  # (M * A, D)
            if real is not None:  # padding has no gradient
                gradient.mul_(real.to(gradient.dtype))
            gradients = [torch.empty_like(x) for x in (query, key, value)]  # (M * A, D) each
            parts = (
                _divide_heads(ctx.layout, heads, query, gradient, gradients[0]),
                _divide_heads(ctx.layout.whole, heads, key, value, *gradients[1:]),
            )
            saved = zip(kept[::2], kept[1::2], strict=True)  # (b * A, t, t) each
            for (probabilities, mask), (queries, upstream, to_queries), (keys, values, to_keys, to_values) in zip(
                saved, *parts, strict=True
            ):
                torch.bmm(apply_mask(probabilities, mask).transpose(1, 2), upstream, out=to_values)
                scores = apply_mask(torch.bmm(upstream, values.transpose(1, 2)), mask)
                scores = torch._softmax_backward_data(scores, probabilities, -1, probabilities.dtype)
                torch.bmm(scores, keys, out=to_queries)
                torch.bmm(scores.transpose(1, 2), queries, out=to_keys)
            query, key, value = (
                x.index_select(0, part.plan_moves(heads)[1]).view(-1, heads, size)
                for x, part in zip(gradients, ctx.layout.sides, strict=True)
            )  # (N, A, D) each
            query.mul_(ctx.scaling)
            value.mul_(compute_scale(ctx.dropout))
        return query, key, value, None, None, None, None, None


def _divide_heads(layout: Packed, heads: int, *states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each group's part (b * A, t, F) of each of the states (M * A, F)."""
    start = 0
    for group in layout.groups:
        stop = start + heads * len(group.tokens)
        yield tuple(x[start:stop].view(-1, group.shape[1], x.shape[1]) for x in states)
        start = stop


# --- The decoder of masked LM -----------------------------------------------------------------------------------------

ROWS_A_BLOCK = 1024  # rows of scores per matrix product; only (ROWS_A_BLOCK, V) scores exist at a time
CACHED = 1 << 17  # fp32 scores, half a megabyte: a softmax of this size stays in a core's cache


def can_decode_in_blocks(hidden: Tensor, decoder: nn.Module) -> bool:
    """Return whether `DecodeOnCPU` applies: many rows, all gradients needed, a plain linear decoder on a CPU.

    Below H / 2 rows the gradient of the matrix costs more than the kernel saves.
    """
    return (
        runs_eagerly_on_cpu(hidden)
        and 2 * len(hidden) >= hidden.shape[1]
        and torch.is_grad_enabled()
        # It is not adapted, sharded, pruned or hooked.
        and type(decoder) is nn.Linear
        and type(decoder.weight) is type(decoder.bias) is nn.Parameter
        and not is_adapted(decoder)
        and all(tensor.requires_grad for tensor in (hidden, decoder.weight, decoder.bias))
    )


class DecodeOnCPU(torch.autograd.Function):
    """Sum the cross-entropies of a linear decoder's scores; the forward pass also computes the gradients."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight_, bias_ = weight.to(dtype), bias.to(dtype)
            to_hidden, to_bias = torch.empty_like(hidden), torch.zeros_like(bias, dtype=torch.float32)
            to_weight, total = None, torch.zeros((), dtype=torch.float32)
            for begin in range(0, len(hidden), ROWS_A_BLOCK):
                block = hidden[begin : begin + ROWS_A_BLOCK].to(dtype)  # (BLOCK, H)
                scores = torch.addmm(bias_, block, weight_.t())  # (ROWS_A_BLOCK, V), soon their own gradient
                total += turn_to_gradient(scores, labels[begin : begin + ROWS_A_BLOCK], to_bias)
                to_hidden[begin : begin + ROWS_A_BLOCK] = scores @ weight_
                part = (scores.t() @ block).to(weight.dtype)
                to_weight = part if to_weight is None else to_weight.add_(part)
        ctx.save_for_backward(to_hidden, to_weight, to_bias.to(bias.dtype))
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return (*(each * gradient.to(each.dtype) for each in ctx.saved_tensors), None, None)


def turn_to_gradient(scores: Tensor, labels: Tensor, to_bias: Tensor) -> Tensor:
    """Overwrite scores (M, V) with the gradient of their summed cross-entropy, and return that sum.

    The gradient of the bias is added to `to_bias` (V,).
    """
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


# --- Linear layers in prediction --------------------------------------------------------------------------------------


class OrderedLinear(nn.Linear):
    """A linear layer with a second copy of its weights in oneDNN's order, which takes as much memory again.

    The copy is used without gradients, until the weights are changed; otherwise this is the plain layer.
    """

    def order(self) -> None:
        """Make the copy."""
        self.ordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        self.copied = self.weight.data_ptr(), self.weight._version

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        is_plain = torch.is_grad_enabled() or is_traced() or not runs_eagerly_on_cpu(x) or dtype != self.weight.dtype
        if is_plain or self.copied != (self.weight.data_ptr(), self.weight._version):
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x.to(self.weight.dtype), self.ordered, self.bias, "none", [], "")


def order_weights(model: nn.Module) -> None:
    """Convert the linear layers of a model in fp32 or bf16 on an x86 CPU to `OrderedLinear`.

    Not those tied to embeddings; and oneDNN has no such order for other processors.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return
    dtypes = {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is not nn.Linear or id(module.weight) in tables:
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype in dtypes:
            module.__class__ = OrderedLinear
            module.order()


# Sizes of the caches of torch's interface to oneDNN, and of oneDNN.
CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
KERNELS = 32  # several times the kernels of one batch


def limit_kernels() -> None:
    """Let oneDNN keep KERNELS kernels, unless the environment names another number; before the first operation.

    There is one for each layer's size and each size of a batch. By default 1,024 are kept in either, which in a
    process that lives long are hundreds of MB.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(KERNELS))


# --- Rows -------------------------------------------------------------------------------------------------------------


def move(x: Tensor, there: Tensor, back: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the rows x[there]; the backward pass is a gather, which is much faster than a scatter on a CPU.

    Args:
        back: The number of each row of x in the result.
        kept: (rows, 1) of x, True where its gradient counts, which excludes padding.
    """
    return _Move.apply(x, there, back, kept)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, back: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, kept)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, kept = ctx.saved_tensors
        gradient = gradient.index_select(0, back)
        return gradient if kept is None else gradient * kept.to(gradient.dtype), None, None, None
