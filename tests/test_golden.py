"""The comparison of golden results."""

import json

import numpy as np
from safetensors.numpy import save_file

from tests.tools.golden import collect, compare, keep_results


def write_run(folder, *, weight=1.0, accuracy=0.5, low=0.1, text="page", metadata=None):
    """Write a run with weights, scores, an official file, a page and the output of predict."""
    (folder / "sst2" / "predictions").mkdir(parents=True)
    save_file({"weight": np.full(3, weight)}, folder / "sst2" / "model.safetensors", metadata)
    scores = {"accuracy": accuracy, "accuracy_low": low, "majority_accuracy": low}
    (folder / "sst2" / "metrics.json").write_text(json.dumps(scores))
    (folder / "sst2" / "predictions" / "SST-2.tsv").write_text("index\tprediction\n0\t1\n")
    (folder / "sst2" / "README.md").write_text(text)
    (folder / "sst2.jsonl").write_text('{"label": "good"}\n')
    return collect(folder)


def test_results_leave_out_pages_limits_baselines_and_metadata(tmp_path):
    before = keep_results(write_run(tmp_path / "before"))
    after = keep_results(write_run(tmp_path / "after", low=0.2, text="other", metadata={"format": "pt"}))
    assert before == after
    assert sorted(before) == [
        "sst2.jsonl",
        "sst2/metrics.json: accuracy",
        "sst2/model.safetensors",
        "sst2/predictions/SST-2.tsv",
    ]


def test_differences_and_names_of_one_side_are_printed(tmp_path, capsys):
    before = keep_results(write_run(tmp_path / "before"))
    after = keep_results(write_run(tmp_path / "after", weight=2.0, accuracy=0.75))
    after["new.jsonl"] = after.pop("sst2.jsonl")
    assert not compare(before, after)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "differs: sst2/metrics.json: accuracy (0.5 before, 0.75 after)"
    assert printed[1].startswith("differs: sst2/model.safetensors (")
    assert printed[2:] == ["only before: sst2.jsonl", "only after: new.jsonl", "1 of 3 common names are equal"]
    assert compare(before, before)
    assert not compare({"one": 1}, {"other": 1}), "nothing in common proves nothing"
