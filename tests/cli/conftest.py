import pytest


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch):
    monkeypatch.setattr("bertkit.training.costs.PROBE_SECONDS", 0.1)


@pytest.fixture
def finish(call):
    """Call the program, which ends without a complaint; return standard output."""

    def finish(*arguments):
        code, out, err = call(*arguments)
        assert (code, err) == (0, "")
        return out

    return finish
