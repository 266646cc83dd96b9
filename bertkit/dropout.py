"""Dropout whose random numbers are cheap on a CPU (paper section A.2: rate 0.1 on hidden states and on attention).

On a CPU `torch.nn.functional.dropout` spends most of its time drawing one random number an element. One 64-bit draw of
torch's own generator serves four elements here, so a seed still fixes everything and checkpointing replays it. The
mathematics is the same; the rate is rounded to a multiple of 1/65536 (0.1 becomes 0.100006) and the scale follows the
rounded rate, so that the mean stays exact. Other devices, and compiled graphs, use torch's function.
"""

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16  # a 16-bit mask value an element


class _DropoutOnCPU(torch.autograd.Function):
    """x, each element zeroed with probability `dropped` / 65536, the others scaled up; saves a byte an element."""

    @staticmethod
    def forward(ctx, x: Tensor, dropped: int) -> Tensor:
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
        keep = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
        ctx.scale = _LEVELS / (_LEVELS - dropped)
        ctx.save_for_backward(keep)
        return torch.ops.aten.native_dropout_backward(x, keep, ctx.scale)  # x * keep * scale in one pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradient, keep, ctx.scale), None


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """x, in training with each element zeroed with probability `rate` and the rest divided by 1 - `rate`; any shape.

    Randomness: torch's default generator of x's device.
    """
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return nn.functional.dropout(x, rate)
    return _DropoutOnCPU.apply(x, min(round(rate * _LEVELS), _LEVELS - 1))


class Dropout(nn.Module):
    """`dropout` as a module; `rate` in [0, 1)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = float(rate)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate, self.training)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
