"""Each bench runs on tiny models, and a stopped one says what it has."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from bertkit.data.pretraining.store import open_corpus
from tests.tools.bench import __main__ as command
from tests.tools.bench import gpu, predict, scale, train
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


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_curves_have_all_sizes_and_reach_the_page(is_apart, here, measure, monkeypatch, tmp_path, capsys):
    if not is_apart:
        figures = {"megabytes": 1.0}
        monkeypatch.setattr(
            scale, "measure_apart", lambda point, *words: scale.POINTS[point](*map(str, words)) | figures
        )
        monkeypatch.setattr(scale, "MOST_REPEATS", 1)
    page = tmp_path / "page.md"
    page.write_text("".join(f"{title}, as measured:\n\n| old |\n|---|\n\n" for title in scale.TABLES))
    code, found = measure("scale", "--page", str(page))
    assert (code, found["failure"]) == (0, "")
    assert {title: tuple(rows[0]) for title, rows in found["tables"].items()} == scale.TABLES
    calls, scored, tokens, runs = (rows for _, *rows in found["tables"].values())
    assert [row[0] for row in calls] == ["1", "8"]
    sizes = [
        ("a file", "1"),
        ("a file", "3"),
        ("a file", "30"),
        *(("a table", size) for size in ("3", "30", "300")),
    ]
    assert [tuple(row[:2]) for row in scored] == sizes
    assert [row[1] for row in tokens] == ["first", "next"] * 2
    assert [tuple(row[:2]) for row in runs] == [("one update", "1"), ("finished", "72")]
    assert all(
        float(cell.replace(",", "")) > 0 for rows in (calls, scored, tokens, runs) for row in rows for cell in row[2:]
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line for line in page.read_text().splitlines() if line.startswith("| ")] == lines
    assert "old" not in page.read_text()


def test_a_made_corpus_is_one(tmp_path):
    tokens = scale.write_corpus(tmp_path / "corpus", 100_000)
    corpus = open_corpus(tmp_path / "corpus")
    lengths = np.diff(corpus.sentence_ends, prepend=0)
    assert len(corpus.ids) == corpus.sentence_ends[-1] == tokens
    assert abs(tokens - 100_000) < 2_000
    assert (lengths.min(), lengths.max()) == (1, 41)
    assert corpus.document_ends[-1] == len(lengths)
    assert np.diff(corpus.document_ends, prepend=0).max() <= 61
    assert not corpus.ids[0:tokens].any()


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
