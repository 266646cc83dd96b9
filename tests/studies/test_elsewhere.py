"""Runs on a machine without the disk of their study write the same files as one process, and open none of its paths."""

import contextlib
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bertkit.studies.workers import RunJob, accept_files, do_elsewhere, do_run
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe, merge
from tests.official import write_squad
from tests.system.disks import LocalDisk, watch
from tests.tasks.test_conformance import CASES

TIMINGS = ("runtime", "per_second", "total_flos", "model_preparation_time", "resumed_at")
LEFT_OUT = ("checkpoint-", "first/", "best/")  # a study keeps none of them
SMALL = {"precision": "fp32", "train": {"max_steps": 2, "save_steps": 1, "logging_steps": 1, "warmup_steps": 0}}


def read_run(output):
    """Return the files of a run by name, without dates, durations, resumptions and what a study does not keep."""
    found = {}
    for path in Path(output).rglob("*"):
        name = path.relative_to(output).as_posix()
        if path.is_file() and not name.startswith(LEFT_OUT):
            found[name] = path.read_bytes()
    environment = json.loads(found.pop("environment.json"))
    log = [json.loads(line) for line in found.pop("training_log.jsonl").splitlines()]
    results = json.loads(found.pop("all_results.json"))
    found |= {"environment": {key: value for key, value in environment.items() if key != "date"}}
    return found | {"log": [drop_timings(entry) for entry in log], "results": drop_timings(results)}


def drop_timings(values):
    return {key: value for key, value in values.items() if not key.endswith(TIMINGS)}


class Record:
    """Records the messages of a run, without progress and durations."""

    def __init__(self):
        self.lines, self.end = [], None

    def __call__(self, news):
        if isinstance(news, str):
            self.lines += [news] if not news.startswith("trained for") else []
        else:
            self.end = news


def make_job(name, folder, *recipes):
    """Return a small run over files below the folder, and its data as a worker receives them."""
    task, make, _ = CASES[name]
    (folder / "given").mkdir()
    recipe = Recipe.make(task, merge(make(folder / "given"), SMALL, *recipes))
    job = RunJob(recipe, str(folder / "run"), "data" if task.reusable else "")
    return job, prepare(recipe) if task.reusable else None


def compare(job, prepared, folder):
    """Do a run here and elsewhere, and check that the files, the lines and the metrics are the same."""
    here, there = Record(), Record()
    do_run(job, pickle.loads(pickle.dumps(prepared)), here)
    assert here.end.status == "finished", here.end.reason
    os.rename(job.output, folder / "here")
    given, disk = pickle.dumps(prepared), LocalDisk(os.getcwd())
    with contextlib.chdir("/"), watch(folder) as opened:
        do_elsewhere(disk, job, pickle.loads(given), there)
        assert opened == []
    assert there.end == here.end
    assert there.lines == here.lines
    assert not Path(job.output, "metrics.json").exists()
    accept_files(Path(job.output))
    assert read_run(job.output) == read_run(folder / "here")


CHOSEN = ["pretrain", "rte", "squad2, own", "classify", "ner, features"]


@pytest.mark.parametrize(
    "name", [name if name in ("pretrain", "rte") else pytest.param(name, marks=pytest.mark.slow) for name in CHOSEN]
)
def test_a_run_elsewhere_writes_the_same_files(name, tmp_path):
    compare(*make_job(name, tmp_path), tmp_path)


@pytest.mark.slow
def test_relative_paths_stay_relative_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job, _ = make_job("classify", tmp_path)
    shutil.copytree("given/reviews", "reviews")
    parts = {"checkpoint": "given/bert", "data": {"dir": "reviews"}}
    recipe = job.recipe.changed(**parts)
    compare(replace(job, recipe=recipe, output="runs/one"), prepare(recipe), tmp_path)


@pytest.mark.slow
def test_the_run_before_another_is_done_elsewhere_too(tmp_path):
    """SQuAD's `extra_train` is read by the worker, which also needs dev."""
    extra = write_squad(tmp_path / "extra", 2, seed=1) / "train-v2.0.json"
    compare(*make_job("squad2", tmp_path, {"data": {"extra_train": str(extra)}}), tmp_path)


@pytest.mark.slow
def test_the_models_of_milestones_come_back_without_their_optimizers(tmp_path):
    job, _ = make_job("pretrain", tmp_path, {"train": {"max_steps": 3}})
    do_elsewhere(LocalDisk(os.getcwd()), replace(job, milestones=(1,)), None, Record())
    accept_files(Path(job.output))
    models = {path.relative_to(job.output).as_posix() for path in Path(job.output).rglob("checkpoint-*/*")}
    assert models == {"checkpoint-1/config.json", "checkpoint-1/model.safetensors"}


def test_a_failure_elsewhere_names_the_paths_of_the_study(tmp_path):
    job, _ = make_job("pretrain", tmp_path)
    (tmp_path / "given" / "corpus.txt").write_bytes(b"caf\xe9\n")
    record = Record()
    do_elsewhere(LocalDisk(os.getcwd()), job, None, record)
    assert record.end.status == "failed"
    assert record.end.reason.startswith(f"{tmp_path}/given/corpus.txt, line 1 is not UTF-8")
    assert not Path(job.output).exists()


def test_files_are_accepted_the_metrics_last(tmp_path, monkeypatch):
    """A process that is killed in between has an unfinished run of the same recipe."""
    for name in ("metrics.json", "predictions/dev.tsv", "recipe.toml", "vocab.txt"):
        (tmp_path / ".received" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".received" / name).write_text(name)
    (tmp_path / "vocab.txt").write_text("older")
    order, replace_file = [], Path.replace

    def move(path, target):
        order.append(target.name)
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", move)
    accept_files(tmp_path)
    assert (order[0], order[-1]) == ("recipe.toml", "metrics.json")
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name: name for name in ("metrics.json", "predictions/dev.tsv", "recipe.toml", "vocab.txt")}
    accept_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
