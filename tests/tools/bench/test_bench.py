"""Each bench runs on tiny models, and a stopped one says what it has."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from torch.autograd import DeviceType

from bertkit.data.pretraining.store import open_corpus
from tests.tools.bench import __main__ as command
from tests.tools.bench import arithmetic, gpu, predict, profile, scale, train
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
    assert {path.stem for path in (tmp_path / "gpu").glob("*.done")} == set(gpu.STEPS) - {"tests"}
    for name in set(gpu.STEPS) - {"tests", "curve"}:
        found = json.loads((tmp_path / "gpu" / f"{name}.json").read_text())
        assert found["facts"]["kernels"] if name.startswith("profile") else found["rates"]
    assert (tmp_path / "gpu" / "curve" / "metrics.json").exists()


def test_the_steps_fit_into_nine_minutes():
    assert sum(seconds for seconds, _ in gpu.STEPS.values()) + gpu.STOP_SECONDS < 9 * 60


# --- The profile and the arithmetic -----------------------------------------------------------------------------------


def make_event(name, start, end, device=DeviceType.CUDA, annotates=False):
    """Make a stand-in for an event of torch's profiler, in microseconds."""
    time_range = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotates, time_range=time_range)


def test_a_profile_has_the_share_of_time_without_a_kernel():
    """Kernels run from 10 to 40 us, two that overlap, and from 60 to 110; an annotation does not count."""
    host = [("cudaLaunchKernel", 0, 1), ("cudaLaunchKernelExC", 1, 2), ("cudaStreamSynchronize", 2, 50)]
    events = [
        make_event("gemm", 10, 30),
        make_event("flash_fwd_kernel", 20, 40),
        make_event("gemm", 60, 110),
        make_event("Optimizer.step#BertAdam.step", 0, 200, annotates=True),
        *(make_event(name, *span, device=DeviceType.CPU) for name, *span in host),
        make_event("aten::_fused_adamw_", 3, 4, device=DeviceType.CPU),
    ]
    found = profile.summarize(events, 2, True)
    assert found["share of time without a kernel"] == pytest.approx(0.2)
    assert found["kernels"] == {"gemm": (0.035, 1.0), "flash_fwd_kernel": (0.01, 0.5)}
    assert (found["launches per update"], found["waits per update"]) == (1.0, 0.5)
    assert (found["has fused AdamW"], found["has flash attention"]) == (True, True)
    assert not found["looks for indices on the device"]
    searched = profile.summarize([*events, make_event("cub::DeviceSelectSweepKernel", 5, 6)], 2, True)
    assert searched["looks for indices on the device"]


def test_a_profile_of_updates_on_a_cpu_has_its_operations(measure):
    code, found = measure("profile", "mrpc")
    facts = found["facts"]
    assert (code, facts["updates"]) == (0, 2)
    assert {"aten::addmm", "aten::mm", "aten::_fused_adamw_"} <= facts["kernels"].keys()
    assert 0 < facts["share of time without a kernel"] < 1
    assert facts["has fused AdamW"]


def test_the_work_of_an_update_counted_by_hand():
    """Two sequences of 2 tokens, one layer of 4 units: 12 x 16 = 192 weights in its products.

    Each weight and token has a product and a sum, and twice as many back: 192 x 4 x 6. Attention multiplies, for each
    of 4 tokens, 2 keys by 4 units, in 7 products of 2 operations. AdamW, for each weight of the layer and of the
    embeddings, reads 16 bytes and writes 12; the norm and the clipping move 12, the casts 12.
    """
    update = arithmetic.Update(2, 2, layers=1, hidden=4)
    assert update.products == 192 * 4 * 6
    assert update.attention == 4 * 2 * 4 * 7 * 2
    moved = update.move(arithmetic.EAGER)
    assert moved["element-wise passes of the layers"] == 4 * 4 * arithmetic.EAGER
    assert moved["casts of weights, clipping, AdamW"] == (192 + 30_522 * 4) * (28 + 12 + 12)


def test_the_aim_is_that_of_6400_sequences_a_second():
    update = arithmetic.Update(256, 128)
    assert update.rows / update.aim == pytest.approx(6_400, rel=0.01)
