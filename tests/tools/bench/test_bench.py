"""Each bench runs on tiny models, and a stopped one says what it has."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.tools.bench import __main__ as command
from tests.tools.bench import gpu, predict, train
from tests.tools.bench.measure import BERTKIT


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Run a bench in this process, and return its exit code and its JSON."""
    monkeypatch.setattr(signal, "signal", lambda *given: None)

    def run(*words):
        code = command.main([*words, "--tiny", "--json", str(tmp_path / "found.json")])
        return code, json.loads((tmp_path / "found.json").read_text())

    return run


@pytest.mark.parametrize("words", [["train", "mrpc"], ["predict"], pytest.param(["serve"], marks=pytest.mark.slow)])
def test_a_bench_has_the_rates_of_all_sides(words, measure, capsys):
    code, found = measure(*words)
    assert (code, found["failure"]) == (0, "")
    for rates in found["rates"].values():
        assert len(rates) >= 3
        assert all(rate > 0 for own in rates.values() for rate in own)
    assert f"| {BERTKIT} | " in capsys.readouterr().out


def test_a_stopped_bench_has_the_medians_so_far(measure, monkeypatch, capsys):
    rates = [6.0, 2.0, 8.0, 2.0, 10.0]

    def run():
        if not rates:
            raise KeyboardInterrupt
        return rates.pop(0)

    monkeypatch.setattr(predict, "bench", lambda given, record: record.alternate("", {BERTKIT: run, "other": run}, 9))
    code, found = measure("predict")
    assert (code, found["failure"]) == (130, "stopped before its end")
    out = capsys.readouterr().out
    assert "| bertkit | 8.0 (6.0 to 10.0) |  |" in out
    assert "| other | 2.0 (2.0 to 2.0) | 3.50 times as fast |" in out


def test_sides_that_do_not_train_the_same_are_refused(measure, monkeypatch):
    monkeypatch.setattr(train, "LOSS_TOLERANCE", dict.fromkeys(train.LOSS_TOLERANCE, -1.0))
    code, found = measure("train", "mrpc")
    assert code == 1
    assert found["failure"].endswith("it does not train the same model")


@pytest.mark.slow
def test_the_rehearsal_runs_its_steps_without_typer_and_rich(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['typer'] = sys.modules['rich'] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(gpu.CHECKOUT)])}
    words = [sys.executable, "-m", "tests.tools.bench", "gpu", "--tiny", "--output", str(tmp_path / "gpu")]
    done = subprocess.run(words, cwd=gpu.CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    steps = {name for name in gpu.STEPS if name.endswith("-base")}
    assert {path.stem for path in (tmp_path / "gpu").glob("*.done")} == steps
    assert all(json.loads((tmp_path / "gpu" / f"{name}.json").read_text())["rates"] for name in steps)
