"""Submissions to the leaderboard: eleven files in a zip, from finished runs or filled with the majority class."""

import json
import zipfile

import pytest

from bertkit.errors import UsageError
from bertkit.inference.glue_submission import find_runs, gather_files, keep_complete, list_tasks, write_zip
from tests.official import write_glue

# File -> the task whose run writes it, its possible answers, the answer without a model, the official rows.
NLI, TWO_WAY, BINARY = ["entailment", "neutral", "contradiction"], ["entailment", "not_entailment"], ["0", "1"]
FILES = {
    "CoLA.tsv": ("cola", BINARY, "1", 1063),
    "SST-2.tsv": ("sst2", BINARY, "1", 1821),
    "MRPC.tsv": ("mrpc", BINARY, "1", 1725),
    "STS-B.tsv": ("stsb", ["0.000", "2.417", "5.000"], "2.701", 1379),
    "QQP.tsv": ("qqp", BINARY, "0", 390_965),
    "MNLI-m.tsv": ("mnli", NLI, "contradiction", 9796),
    "MNLI-mm.tsv": ("mnli", NLI, "contradiction", 9847),
    "AX.tsv": ("mnli", NLI, "contradiction", 1104),
    "QNLI.tsv": ("qnli", TWO_WAY, "not_entailment", 5463),
    "RTE.tsv": ("rte", TWO_WAY, "entailment", 3000),
    "WNLI.tsv": ("wnli", BINARY, "0", 146),
}


def write_predictions(count, answers):
    lines = [f"{index}\t{answers[index % len(answers)]}" for index in range(count)]
    return "\n".join(["index\tprediction", *lines]) + "\n"


@pytest.fixture
def runs(tmp_path):
    """Write finished runs of the nine tasks, with the official number of rows except for QQP."""
    for name, (task, answers, _, rows) in FILES.items():
        folder = tmp_path / "runs" / task / "predictions"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(write_predictions(min(rows, 10_000), answers))
        (folder / "dev.tsv").write_text("index\tprediction\n0\tnot for the leaderboard\n")
        (folder.parent / "metrics.json").write_text("{}")
    return tmp_path / "runs"


def gather(folder, fill=False):
    lines = []
    return gather_files(find_runs(folder), where=folder, fill=fill, report=lines.append), lines


def remove(runs, task):
    for path in (runs / task).rglob("*.tsv"):
        path.unlink()
    (runs / task / "metrics.json").unlink()


def test_the_eleven_files_one_by_one(runs):
    files, lines = gather(runs)
    assert list(files) == list(FILES)
    for name, (task, answers, majority, rows) in FILES.items():
        submitted = [majority] if task == "wnli" else answers  # for WNLI whatever the model says, as in the paper
        assert files[name] == write_predictions(min(rows, 10_000), submitted), name
    assert lines == ["QQP.tsv has 10,000 answers; the leaderboard expects 390,965"]


def test_a_study_says_which_of_its_runs_count(runs):
    chosen = [{"run": "a/rte-3", "of_runs": 1, "score": 0.5}, {"run": "b/rte-1", "of_runs": 1, "score": 0.9}]
    for finished in (True, False):
        results, lines = {"columns": {}, "cells": [], "chosen": chosen, "finished": finished}, []
        (runs / "study.json").write_text(json.dumps(results))
        assert find_runs(runs, lines.append) == [runs / "b/rte-1", runs / "a/rte-3"], "the better row comes first"
        assert any("is not finished" in line for line in lines) == (not finished)
    (runs / "study.json").write_text("{")
    with pytest.raises(UsageError, match=r"study\.json cannot be used") as error:
        find_runs(runs)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_listed(runs, refused):
    for task in ("mnli", "rte", "wnli"):  # WNLI needs no model
        remove(runs, task)
    with refused():
        gather(runs)


def test_what_is_missing_is_filled_with_the_majority(runs):
    for task in {task for task, *_ in FILES.values()} - {"cola"}:
        remove(runs, task)
    files, lines = gather(runs, fill=True)
    assert list(files) == list(FILES)
    for name, (task, answers, majority, rows) in FILES.items():
        assert files[name] == write_predictions(rows, answers if task == "cola" else [majority]), name
    assert lines == [
        "filled with the majority class: SST-2.tsv, MRPC.tsv, STS-B.tsv, QQP.tsv, MNLI-m.tsv, MNLI-mm.tsv, AX.tsv, "
        "QNLI.tsv, RTE.tsv"
    ]


def test_ax_comes_from_the_model_of_mnli_or_else_from_a_run_of_its_own(runs):
    own = runs / "ax" / "predictions"
    own.mkdir(parents=True)
    (own.parent / "metrics.json").write_text("{}")
    (own / "AX.tsv").write_text(write_predictions(1104, ["neutral"]))
    assert gather(runs)[0]["AX.tsv"] == write_predictions(1104, NLI)
    (runs / "mnli" / "predictions" / "AX.tsv").unlink()
    assert gather(runs)[0]["AX.tsv"] == write_predictions(1104, ["neutral"])


def test_equal_files_make_equal_zips_and_nothing_else_is_left(runs, tmp_path):
    files, folder = gather(runs)[0], tmp_path / "zips"
    folder.mkdir()
    (folder / "two.zip").write_bytes(b"an older one")
    for name in ("one.zip", "two.zip"):
        write_zip(files, folder / name)
    assert (folder / "one.zip").read_bytes() == (folder / "two.zip").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["one.zip", "two.zip"]
    with zipfile.ZipFile(folder / "one.zip") as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == files
        assert all(entry.compress_type == zipfile.ZIP_DEFLATED for entry in archive.infolist())


def test_a_download_with_gaps_is_named_before_anything_is_trained(tmp_path):
    data = write_glue(tmp_path, skip=("MRPC/train.tsv", "MRPC/dev.tsv", "RTE/test.tsv"))
    names = list_tasks("all")
    with pytest.raises(UsageError, match=r"has no MRPC/train\.tsv, MRPC/dev\.tsv, RTE/test\.tsv; .*--submit-partial"):
        keep_complete(names, data, tested=True, partial=False)
    with pytest.raises(UsageError, match=r"has no MRPC/train\.tsv, MRPC/dev\.tsv; add them$"):
        keep_complete(names, data, tested=False, partial=False)
    lines = []
    kept = keep_complete(names, data, tested=True, partial=True, report=lines.append)
    assert kept == [name for name in names if name != "mrpc"]
    assert lines == [f"not found in {data}, skipping: mrpc"]
    with pytest.raises(UsageError, match=r"CoLA/train\.tsv"):
        keep_complete(names, tmp_path / "nowhere", tested=True, partial=True)
