"""Training within a limit of time: its recipe, its end, its continuation and its repetition without a clock."""

import json
import os
import signal
import time

import pytest
from safetensors.torch import load_file

from bertkit.errors import UsageError
from bertkit.system.clock import RECORDED_EVERY, Clock
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import list_phases
from bertkit.training import budget, cost, pace
from bertkit.training.budget import CLOCK_FILE, FITTED, fit, train_within
from bertkit.training.recipe import Recipe, load_recipe, merge, resolve
from bertkit.training.run import run
from bertkit.training.run_dir import read_log
from tests.training.test_run import PRETRAIN, make_recipe, write_text


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(cost, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(cost, "MATMUL_SECONDS", 0.1)
    monkeypatch.setattr(pace, "END_SECONDS", 2.0)


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe of a pretraining in two phases, whose length the time decides."""
    made = make_recipe(write_text(tmp_path / "corpus.txt"))
    del made["data"]["max_length"]
    phases = [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}]
    return merge(made, {"phase": phases, "train": {"max_steps": 20, "warmup_steps": 2}})


def test_a_pretraining_ends_in_time_and_repeats_bit_for_bit_without_a_clock(recipe, tmp_path):
    limit, begun = 16.0, time.monotonic()
    clock = Clock(limit, begun)
    metrics = train_within(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", clock=clock)
    used = time.monotonic() - begun
    assert limit - 8 <= used <= limit
    written = load_recipe(tmp_path / "run/recipe.toml")
    assert written.train["max_steps"] == metrics["updates"] > 20
    assert written.train["warmup_steps"] == 0.1
    assert [phase.max_length for phase in list_phases(written)] == [16, 32]
    again = run(written, output=tmp_path / "again")
    assert again == metrics
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "again")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    rates = [[x["learning_rate"] for x in read_log(tmp_path / name) if "loss" in x] for name in ("run", "again")]
    assert rates[0] == rates[1]
    assert rates[0][-1] < 0.25 * max(rates[0])
    # The same command repeats nothing, and another recipe is refused.
    assert train_within(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", clock=Clock(limit, begun)) == metrics
    with pytest.raises(UsageError, match=r"another run \(train.learning_rate: .* -> 0\.5\)"):
        train_within(
            Recipe.make(PRETRAIN, recipe, {"train": {"learning_rate": 0.5}}),
            output=tmp_path / "run",
            clock=Clock(limit, begun),
        )


def test_a_stopped_pretraining_continues_with_the_time_that_is_left(recipe, tmp_path):
    output, limit = tmp_path / "run", 20.0

    def stop(done, total, log):
        if done >= 10:
            os.kill(os.getpid(), signal.SIGTERM)

    begun = time.monotonic()
    with pytest.raises(Interrupted):
        train_within(Recipe.make(PRETRAIN, recipe), output=output, clock=Clock(limit, begun), progress=stop)
    first = time.monotonic() - begun
    assert json.loads((output / CLOCK_FILE).read_bytes())["seconds"] == pytest.approx(first, abs=2 * RECORDED_EVERY)
    begun = time.monotonic()
    metrics = train_within(Recipe.make(PRETRAIN, recipe), output=output, clock=Clock(limit, begun))
    assert limit - 8 <= first + time.monotonic() - begun <= limit
    written = load_recipe(output / "recipe.toml")
    again = run(written, output=tmp_path / "again")
    assert again == metrics


def test_a_recipe_is_fitted_and_the_rest_stays(recipe):
    given = Recipe.make(PRETRAIN, recipe)
    found = fit(given, 100)
    assert [phase.samples // given.batch_size for phase in list_phases(found)] == [50, 350]
    assert found.train | dict.fromkeys(FITTED) == given.train | dict.fromkeys(FITTED)
    assert (found.train["save_steps"], found.train["logging_steps"]) == (10, 1)
    shorter = resolve(found, 60, [])
    assert [phase.samples // given.batch_size for phase in list_phases(shorter)] == [50, 10]
    (only,) = list_phases(resolve(found, 40, []))
    assert (only.samples // given.batch_size, only.max_length) == (40, 16)


def test_too_little_time_and_costs_that_are_unknown_are_errors(recipe, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"updates of .* s beside evaluation and saving; give --budget \d+m or more"):
        train_within(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", clock=Clock(1.0, time.monotonic()))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(budget, "find_costs", lambda *_: "time and memory are unknown: no data")
    with pytest.raises(UsageError, match="time and memory are unknown: no data"):
        train_within(
            Recipe.make(TASKS["pretrain"], recipe), output=tmp_path / "run", clock=Clock(60.0, time.monotonic())
        )
