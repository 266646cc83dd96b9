"""Dropout whose random numbers are cheap on a CPU (paper section A.2: rate 0.1 on hidden states and on attention).

On a CPU `torch.nn.functional.dropout` spends most of its time drawing one random number an element. Here one 64-bit
number serves four of them, and numpy's SFC64 draws it, several times as fast as torch does; torch's own generator gives
a seed for each mask, so a seed still fixes everything and checkpointing replays it. The mathematics is the same; the
rate is rounded to a multiple of 1/65536 (0.1 becomes 0.100006) and the scale follows the rounded rate, so that the mean
stays exact. What is drawn becomes a mask of bits, which a CPU applies to whole vectors, as it does not with booleans.
Other devices, compiled graphs and `torch.func` transforms use torch's function.
"""

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.model.precision import runs_at_once_on_cpu

_LEVELS = 1 << 16  # a 16-bit mask value an element
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def draw_mask(shape: torch.Size, rate: float) -> Tensor:
    """A mask (shape) int16 on the CPU: a value has no bit set with the probability `rate`, rounded, else all."""
    generator = np.random.SFC64(int(torch.randint(1 << 62, (), device="cpu")))
    draws = torch.from_numpy(generator.random_raw((shape.numel() + 3) // 4).view(np.int16))
    return draws[: shape.numel()].view(shape).ge_(_count_dropped(rate) - _LEVELS // 2).neg_()


def find_scale(rate: float) -> float:
    """What the elements that a mask keeps are multiplied by, so that the mean stays."""
    return _LEVELS / (_LEVELS - _count_dropped(rate))


def _count_dropped(rate: float) -> int:
    """How many of the values that a mask is drawn from set no bit."""
    return min(round(rate * _LEVELS), _LEVELS - 1)


def apply_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where the mask has its bits set, else 0; without a mask x itself."""
    if mask is None:
        return x
    return (x.view(_INTEGERS[x.element_size()]) & mask).view(x.dtype)  # which widens the mask by its sign


class _Mask(torch.autograd.Function):
    """scale * x where the mask has its bits set, else 0; saves the mask, two bytes an element."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return apply_mask(x, mask).mul_(scale)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Mask.apply(gradient, *ctx.saved_tensors, ctx.scale), None, None


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """x, in training with each element zeroed with probability `rate` and the rest divided by 1 - `rate`; any shape.

    Randomness: torch's default generator of x's device.
    """
    if not training or rate == 0.0:
        return x
    if rate == 1.0 or not runs_at_once_on_cpu(x):
        return nn.functional.dropout(x, rate)
    return _Mask.apply(x, draw_mask(x.shape, rate), find_scale(rate))


class Dropout(nn.Dropout):
    """Apply `dropout` at the rate `p`, which may be changed, while the module is in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)
