"""Fixtures of the client tests: the sides of a comparison, five training steps, and the final table."""

from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
import transformers
from torch import Tensor

from tests.conftest import NO_DROPOUT, make_model, make_twin

SIDES = ("packed", "sdpa", "stock")  # our class under two attention implementations, and transformers' class
OUTCOMES = ("passed", "failed", "error", "skipped")


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


# --- The table --------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note at every test which cell of the table it fills: the client, what is run, and the side."""
    for item in items:
        marker = item.get_closest_marker("clients")
        if marker is not None and marker.args:
            item.user_properties.append(("cell", [*marker.args, item.callspec.params["side"]]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of clients."""
    rows: dict[tuple[str, str], dict[str, Counter]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            properties = getattr(report, "user_properties", [])  # a file that was not collected has none
            for client, what, side in [value for name, value in properties if name == "cell"]:
                reason = f": {report.longrepr[2]}" if outcome == "skipped" else ""
                cells = rows.setdefault((name_client(client), what), {side: Counter() for side in SIDES})
                cells[side][outcome + reason] += 1
    if rows:
        terminalreporter.section("clients")
        terminalreporter.write_line(tabulate(rows))


def name_client(distribution: str) -> str:
    """Return the name and the installed version of a distribution."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution}, not installed"


def tabulate(rows: dict[tuple[str, str], dict[str, Counter]]) -> str:
    """Return a Markdown table of clients and sides."""
    lines = [("client", "what was run", *SIDES)]
    for (client, what), cells in sorted(rows.items()):
        counts = (", ".join(f"{count} {outcome}" for outcome, count in cells[side].items()) or "-" for side in SIDES)
        lines.append((client, what, *counts))
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
