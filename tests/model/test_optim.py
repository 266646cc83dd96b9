"""BERT's Adam against its formula, written out (PAPER: A.2; AdamWeightDecayOptimizer of the reference code)."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bertkit.model.optim import BertAdam


def write_out(
    p: float, gradients: list[float], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> float:
    """One number after a step on each gradient: m and v without bias correction, decay beside them."""
    m = v = 0.0
    for g in gradients:
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (math.sqrt(v) + eps) + weight_decay * p)
    return p


def walk(params: list[Tensor], optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    """One step on each row of gradients."""
    for row in gradients:
        for p, gradient in zip(params, row, strict=True):
            p.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_steps_are_the_formula_written_out(weight_decay: float, betas: tuple[float, float]) -> None:
    values = {"lr": 0.05, "betas": betas, "eps": 1e-3, "weight_decay": weight_decay}
    params = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((3, 2), (4,), ())]
    starts = [p.detach().clone() for p in params]
    gradients = [[torch.randn_like(p) for p in params] for _ in range(7)]
    walk(params, BertAdam(params, **values), gradients)
    for i, p in enumerate(params):
        columns = torch.stack([row[i].flatten() for row in gradients]).T.tolist()
        expected = [
            write_out(start, column, **values)
            for start, column in zip(starts[i].flatten().tolist(), columns, strict=True)
        ]
        torch.testing.assert_close(p.detach().flatten(), torch.tensor(expected, dtype=torch.double))


def test_the_defaults_are_the_papers() -> None:
    """A.2: learning rate 1e-4, betas 0.9 and 0.999, decay 0.01; the reference code: epsilon 1e-6."""
    defaults = BertAdam([torch.zeros(1, requires_grad=True)]).defaults
    assert defaults == {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def test_groups_have_values_of_their_own_and_a_parameter_without_gradient_rests() -> None:
    decayed, plain, resting = (torch.ones(2, requires_grad=True) for _ in range(3))
    groups = [{"params": [decayed, resting], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0, "lr": 0.2}]
    optimizer = BertAdam(groups, lr=0.1)
    decayed.grad, plain.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    step = 0.1 / (math.sqrt(0.001) + 1e-6)
    torch.testing.assert_close(decayed.detach(), torch.full((2,), 1 - 0.1 * (step + 0.1)))
    torch.testing.assert_close(plain.detach(), torch.full((2,), 1 - 0.2 * step))
    assert torch.equal(resting.detach(), torch.ones(2))
    assert not optimizer.state[resting]


def test_a_saved_state_resumes_exactly(tmp_path: Path) -> None:
    gradients = [[torch.randn(5, 3), torch.randn(3)] for _ in range(9)]
    straight, resumed = ([torch.ones(5, 3, requires_grad=True), torch.ones(3, requires_grad=True)] for _ in range(2))
    walk(straight, BertAdam(straight, lr=0.1), gradients)
    first = BertAdam(resumed, lr=0.1)
    walk(resumed, first, gradients[:4])
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = BertAdam(resumed, lr=123.0)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    walk(resumed, second, gradients[4:])
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
