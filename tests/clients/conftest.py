"""Parts of all client tests: the sides of a comparison, and five training steps."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from tests.conftest import NO_DROPOUT, make_model, make_twin

SIDES = ("packed", "sdpa", "stock")  # our class under two attention implementations, and transformers' class


def build(head: str, side: str, **values) -> transformers.PreTrainedModel:
    """Build a tiny model without dropout; every side of a head has the same random weights."""
    torch.manual_seed(0)
    model = make_model(head, "packed" if side == "stock" else side, **NO_DROPOUT, **values)
    model = make_twin(model) if side == "stock" else model
    torch.manual_seed(1)
    return model


def train(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Train for five steps on one batch; return the five losses, which must fall."""
    model.train()
    # Not Adam, which turns a gradient that is only rounding error, as of a bias before a softmax, into a full step.
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    assert losses[-1] < losses[0]
    return torch.stack(losses)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Check that two mappings have the same names and close tensors."""
    assert found
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_as_stock(measure: Callable[[str], dict[str, Tensor]], side: str) -> None:
    """Check that a client measures on this side what it measures on the stock class."""
    found = measure(side)
    check_same(found, found if side == "stock" else measure("stock"))
