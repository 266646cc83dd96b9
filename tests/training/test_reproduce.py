"""Reproducing a run: the same bits for every task, and the reported differences otherwise."""

import json
import re
import shutil
from importlib.metadata import version

import datasets
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from bertkit.data.formats.hub import load_hub
from bertkit.system.hub import explain_trouble
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, merge, read_recipe, save_recipe
from bertkit.training.reproduce import compare_environments, compare_runs, reproduce
from bertkit.training.run import run
from bertkit.training.run_dir import read_environment
from tests.corpora import write_text
from tests.hub import Repo
from tests.official import write_checkpoint, write_reviews
from tests.world import CASES, PRETRAIN, make_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a finished run with dropout."""
    folder = tmp_path_factory.mktemp("runs")
    dropout = {"model": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}}
    recipe = merge(make_recipe(write_text(folder / "corpus.txt")), dropout)
    run(Recipe.make(PRETRAIN, recipe), output=folder / "run")
    return folder / "run"


def test_a_run_comes_out_the_same_and_is_not_done_a_third_time(finished, call, tmp_path):
    again, steps = tmp_path / "again", []
    code, out, err = call("reproduce", finished, "--output", again)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{again} equals {finished} bit for bit: scores and weights"
    found = reproduce(finished, again, progress=lambda *state: steps.append(state))
    assert (found.is_exact, found.environment, steps) == (True, [], [])


@pytest.mark.parametrize(
    "name", [name if name == "rte" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_task_comes_out_the_same(tmp_path, name):
    task, make, _ = CASES[name]
    recipe = merge(make(tmp_path), {"precision": "fp32"})
    if task.metric and not recipe["data"].get("features"):
        recipe = merge(recipe, {"model": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}})
    run(Recipe.make(task, recipe), output=tmp_path / "run")
    found = reproduce(tmp_path / "run", tmp_path / "again")
    assert found.is_exact, found
    assert found.environment == []


def test_what_differs_is_listed_with_what_may_be_the_reason(finished, call, tmp_path):
    again = shutil.copytree(finished, tmp_path / "again")
    metrics = json.loads((again / "metrics.json").read_text())
    (again / "metrics.json").write_text(json.dumps(metrics | {"mlm_loss": 1.5}))
    weights = load_file(again / "model.safetensors")
    weights["bert.pooler.dense.bias"][0] += 0.25
    del weights["cls.seq_relationship.bias"]
    save_file(weights, again / "model.safetensors")
    machine = json.loads((again / "environment.json").read_text())
    machine["packages"]["torch"] = "1.0"
    (again / "environment.json").write_text(json.dumps(machine | {"threads": 99}))

    apart = {"bert.pooler.dense.bias": pytest.approx(0.25), "cls.seq_relationship.bias": float("inf")}
    assert compare_runs(finished, again).weights == apart
    code, out, err = call("reproduce", finished, "--output", again)
    assert (code, err) == (1, "")
    assert f"mlm_loss: {metrics['mlm_loss']} -> 1.5" in out
    assert "2 weights differ, cls.seq_relationship.bias the most: by inf" in out
    assert f'different machine, software or data: packages.torch: "{version("torch")}" -> "1.0"' in out
    assert re.search(r"different machine, software or data: threads: \d+ -> 99", out)
    assert "bit for bit" not in out


def test_a_search_before_the_run_is_no_difference(finished, tmp_path):
    searched = shutil.copytree(finished, tmp_path / "searched")
    metrics = json.loads((searched / "metrics.json").read_text())
    (searched / "metrics.json").write_text(json.dumps(metrics | {"searched": True}))
    assert compare_runs(searched, finished).is_exact


def test_what_the_run_had_no_time_for_is_not_compared(finished, tmp_path):
    more = shutil.copytree(finished, tmp_path / "again")
    metrics = json.loads((more / "metrics.json").read_text())
    (more / "metrics.json").write_text(json.dumps(metrics | {"test_f1": 0.5}))
    assert compare_runs(finished, more).is_exact
    assert compare_runs(more, finished).scores == {"test_f1": (0.5, None)}


def test_the_environment_of_what_came_before_a_run_is_compared(tmp_path):
    machine = {"date": "today", "threads": 1, "data": {"train": "a"}, "weights_at_start": "b"}
    for name, first in (("one", machine), ("other", machine | {"date": "later", "data": {"train": "c"}})):
        (tmp_path / name / "first").mkdir(parents=True)
        (tmp_path / name / "environment.json").write_text(json.dumps(machine))
        (tmp_path / name / "first" / "environment.json").write_text(json.dumps(first))
    assert list(compare_environments(tmp_path / "one", tmp_path / "one")) == []
    assert list(compare_environments(tmp_path / "one", tmp_path / "other")) == ['first: data.train: "a" -> "c"']


def test_what_is_no_finished_run_is_refused(finished, tmp_path, refused):
    with refused():
        reproduce(tmp_path / "no", tmp_path / "again")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.json").write_text('{"score": 1.0}')
    (tmp_path / "old" / "recipe.toml").write_text('task = "poetry"\n')
    with refused():
        reproduce(tmp_path / "old", tmp_path / "again")
    shutil.copy(finished / "environment.json", tmp_path / "old")
    gone = merge(read_recipe(finished / "recipe.toml"), {"data": {"corpus": ["gone.txt"]}})
    save_recipe(gone, tmp_path / "old" / "recipe.toml")
    with refused():
        reproduce(tmp_path / "old", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_was_read_from_the_hub_is_read_again_at_its_commits(hub, tmp_path, monkeypatch, refused):
    """Both the newest model and the tag of the data have moved since."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    models, reviews = [], []
    for seed in (0, 1):
        files = write_checkpoint(tmp_path / str(seed) / "bert", seed).iterdir()
        models.append(Repo(files={path.name: path.read_bytes() for path in files}))
        tables = [write_reviews(tmp_path / str(seed) / f"{split}.csv", seed=seed) for split in ("train", "validation")]
        reviews.append(Repo(files={path.name: path.read_bytes() for path in tables}))
    hub.repos |= {"ada/bert": models[0], "datasets/ada/reviews": reviews[1]}
    reviews[1].tags["v1"] = reviews[0]
    explain_trouble.cache_clear()
    data = {"dir": "ada/reviews@v1", "text": ["title", "body"], "label": ["stars"], "max_length": 40}
    recipe = {"checkpoint": "ada/bert", "batch_size": 8, "data": data, "train": {"max_steps": 2}}
    run(Recipe.make(TASKS["classify"], recipe), output=tmp_path / "run")
    commits = {"ada/bert": models[0].sha, "datasets/ada/reviews": reviews[0].sha}
    assert read_environment(tmp_path / "run")["commits"] == commits
    card = (tmp_path / "run" / "README.md").read_text()
    for name, commit in commits.items():
        assert f"[{name.removeprefix('datasets/')}](https://huggingface.co/{name}) (commit `{commit}`)" in card
    hub.repos["ada/bert"] = models[1]
    models[1].tags["before"] = models[0]
    reviews[1].tags = {"v1": reviews[1], "before": reviews[0]}
    for cache in (constants.HF_HUB_CACHE, tmp_path / "datasets"):
        shutil.rmtree(cache)
    found = reproduce(tmp_path / "run", tmp_path / "again")
    assert found.is_exact, found
    assert found.environment == []
    for change in ({"checkpoint": "ada/bert@v9"}, {"data": {"dir": "ada/reviews@v9"}}):
        with refused():
            run(Recipe.make(TASKS["classify"], merge(recipe, change)), output=tmp_path / "other")
    monkeypatch.setattr("bertkit.data.formats.hub.explain_hub_trouble", lambda *_: "the Hub cannot be reached")
    assert len(load_hub(f"ada/reviews@{commits['datasets/ada/reviews']}")["train"]) == 72, "the copy in the cache"
    with refused():
        load_hub(f"ada/reviews@{'0' * 40}")
    explain_trouble.cache_clear()
