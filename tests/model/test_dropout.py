"""Dropout from 16 random bits per element: the expected rate, mean and gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.model.cpu import dropout


def scale_of(rate: float) -> float:
    """Return the factor of the kept elements: 1 / (1 - rate), with the rate rounded to a multiple of 1/65536."""
    return 65536 / (65536 - round(rate * 65536))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_share_of_zeros_is_the_rate(rate: float) -> None:
    count = 1_000_003
    dropped = (dropout(torch.ones(count), rate) == 0).sum().item()
    deviation = math.sqrt(count * rate * (1 - rate))
    assert abs(dropped - count * rate) < 5 * deviation + count / 65536


def test_the_four_elements_of_one_draw_are_independent() -> None:
    """One 64-bit draw serves four neighbours; single elements and pairs are dropped independently."""
    count, rate = 400_000, 0.3
    dropped = (dropout(torch.ones(count, 4), rate) == 0).double()  # (count, 4)
    together = dropped.T @ dropped / count  # (4, 4): the rate on the diagonal, its square elsewhere
    expected = torch.full((4, 4), rate**2, dtype=torch.double).fill_diagonal_(rate)
    assert (together - expected).abs().max() < 5 * math.sqrt(0.25 / count)
    neighbours = (dropped[:-1] * dropped[1:]).mean(dim=0)  # one draw and the next
    assert (neighbours - rate**2).abs().max() < 5 * math.sqrt(0.25 / count)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(rate: float) -> None:
    x = torch.randn(100_001, dtype=torch.double)
    y = dropout(x, rate)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] * scale_of(rate))
    draws = torch.stack([dropout(torch.ones(1000), rate).mean() for _ in range(400)])
    assert abs(draws.mean().item() - 1) < 5 * math.sqrt(rate / (1 - rate) / 400_000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    x = torch.ones(4096, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y.detach().unique(), torch.tensor([0, scale_of(0.25)], dtype=dtype))


@given(shape=st.lists(st.integers(0, 5), max_size=4), rate=st.floats(0, 1), turned=st.booleans())
def test_any_shape_and_rate(shape: list[int], rate: float, turned: bool) -> None:
    """Scalars, empty tensors, element counts that four does not divide, and views that are not contiguous."""
    x = torch.ones(shape)
    x = x.transpose(0, -1) if turned and x.dim() else x
    x = x.requires_grad_()
    y = dropout(x, rate)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == x.shape
    assert torch.equal(gradient, y)
    assert y.isfinite().all()
