"""The files beside the model of a finished run."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from bertkit.data.formats.glue import read_folder
from bertkit.metrics.intervals import estimate_interval
from bertkit.metrics.rows import measure_mean, take_values
from bertkit.metrics.table import make_rows
from bertkit.tasks import TASKS
from bertkit.training.outputs import is_falling, is_learned
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from bertkit.training.scoring import add_limits, score_rows
from tests.world import make_glue


def test_the_hubs_data_give_results_of_benchmarks(tmp_path, monkeypatch):
    recipe = make_glue(tmp_path, "mnli")
    files = Path(recipe["data"]["dir"])
    monkeypatch.setattr("bertkit.tasks.glue.read_copy", lambda row, report: read_folder(row, files))
    short = {"train": {"max_steps": 3, "save_strategy": "no", "logging_steps": 2}, "data": {"dir": ""}}
    metrics = run(Recipe.make(TASKS["mnli"], recipe, short), output=tmp_path / "run")
    (file,) = (tmp_path / "run" / ".eval_results").iterdir()
    assert file.name == "mnli.yaml"
    entries = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    found = [(entry.dataset_id, entry.task_id, entry.value) for entry in entries]
    scores = {"mnli_matched": metrics["accuracy"], "mnli_mismatched": metrics["accuracy_mm"]}
    assert found == [("nyu-mll/glue", name, score) for name, score in scores.items()]
    date = json.loads((tmp_path / "run" / "environment.json").read_text())["date"]
    assert all(entry.date.startswith(date[:10]) for entry in entries)
    assert (metrics["score_low"], metrics["score_high"]) == (metrics["accuracy_low"], metrics["accuracy_high"])


def test_limits_follow_their_scores():
    """The F1 of the label `risk_low` has the name of the lower limit of that of `risk`, which is left out."""
    share = measure_mean(np.arange(10) < 8)
    other = measure_mean(np.arange(10) < 7)
    measured = {"macro_f1": share, "f1_risk": share, "f1_risk_low": other, "count_risk": 4, "score": share}
    found = add_limits(measured)
    assert take_values(measured).items() <= found.items()
    interval = estimate_interval(share)
    assert (found["score_low"], found["score_high"]) == (interval.low, interval.high)
    assert list(found)[:3] == ["macro_f1", "macro_f1_low", "macro_f1_high"]
    assert (found["f1_risk_low_low"], found["f1_risk_high"]) == (estimate_interval(other).low, interval.high)
    assert "count_risk_low" not in found


@pytest.mark.parametrize("most", [300 * 5 * 6, 1])
def test_a_line_says_which_intervals_are_bounded(monkeypatch, most):
    """Six rows of five labels."""
    monkeypatch.setattr("bertkit.metrics.intervals.MOST_CELLS", (1 << 33, most))
    names, labels = list("abcde"), list("abcdea")
    columns = {f"probability_{name}": [0.2 + 0.01 * (name == label) for label in labels] for name in names}
    rows, lines = make_rows({"label": labels, "prediction": labels[::-1], **columns}, names=names), []
    found = score_rows(TASKS["classify"], rows, "test_{}", np.empty(0, np.int64), lines.append)
    (line,) = lines
    assert line.startswith(
        "fewer than 2,000 samples, or no interval, for test_roc_auc, test_average_precision: 6 rows "
    )
    assert ("test_roc_auc_low" in found) == (most > 1)


@pytest.mark.parametrize(
    ("end", "slope", "expected"),
    [(0.02, 0.0, (True, False)), (0.6, 0.0, (False, False)), (0.4, 0.01, (False, True))],
)
def test_what_the_losses_of_a_training_tell(end, slope, expected):
    """A loss that has become a small part of its start is learned, whether or not it still falls."""
    losses = [0.7] * 20 + [end + slope * (30 - step) + 0.001 * (step % 3) for step in range(30)]
    log = [{"loss": loss} for loss in losses] + [{"eval_accuracy": 0.5}]
    assert (is_learned(log), is_falling(log)) == expected
    assert not is_learned(log[:4])
