"""Budgets: durations, the clock, what is measured, expected and fitted, the deadline, and a run without a clock."""

import json
import math
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from bertkit.errors import UsageError
from bertkit.studies.cells import describe_time
from bertkit.studies.search import search_or_train
from bertkit.studies.spec import define_columns, make_study
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training import budget, callbacks, costs
from bertkit.training.budget import CLOCK_FILE, TooShort, train_within
from bertkit.training.callbacks import Deadline, StopAfter
from bertkit.training.clock import RECORDED_EVERY, Clock, parse_duration
from bertkit.training.costs import Costs
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe, load_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import read_log
from tests.corpora import write_text
from tests.official import write_checkpoint, write_glue
from tests.world import PRETRAIN, assert_same_bits, make_recipe, read_weights, replace_values, vary

RTE = TASKS["rte"]
MEMORY = {"weights": 80_000_000, "gradients": 80_000_000, "optimizer": 120_000_000}  # a checkpoint of 1 s
COSTS = Costs(96, 30, 10, 32, 20.0, 640.0, [(1.0, 2.0)], 0.1, 1.0, MEMORY)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(costs, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(costs, "SAMPLED", 16)


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """Return a complete recipe of six updates."""
    folder = tmp_path_factory.mktemp("rte")
    data = {"dir": str(write_glue(folder / "glue"))}
    return Recipe.make(RTE, {"checkpoint": str(write_checkpoint(folder / "bert")), "precision": "fp32", "data": data})


@pytest.fixture
def phases(tmp_path):
    """Return a complete recipe of ten updates at 16 tokens and ten at 32."""
    recipe = make_recipe(write_text(tmp_path / "corpus.txt"))
    del recipe["data"]["max_length"]
    phases = [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}]
    return Recipe.make(PRETRAIN, recipe, {"phase": phases, "train": {"max_steps": 20}})


# --- The clock --------------------------------------------------------------------------------------------------------


def test_durations_are_read_and_other_texts_refused():
    assert list(map(parse_duration, ("90s", "20m", "1.5h", " 1H 30M ", "2d"))) == [90, 1200, 5400, 5400, 172_800]
    for text in ("", "20", "m", "-5m", "0s", "20 minutes", "9" * 50 + "d"):
        with pytest.raises(UsageError, match=r"is not a duration; write for example 90s, 20m, 1\.5h or 1h30m"):
            parse_duration(text)


def test_the_time_of_earlier_starts_counts(tmp_path):
    path = tmp_path / "run/.time.json"
    with Clock(100.0, time.monotonic() - 30).keep(path):
        time.sleep(1.5 * RECORDED_EVERY)
    assert json.loads(path.read_text()) == pytest.approx(30 + RECORDED_EVERY, abs=1)
    second = Clock(100.0, time.monotonic())
    with second.keep(path):
        assert second.left == pytest.approx(100 - 32, abs=2)


# --- What is measured and expected ------------------------------------------------------------------------------------


def test_the_costs_of_a_run_are_those_of_its_data_and_model(rte):
    found = costs.measure(rte, prepare(rte), 0.1)
    assert (found.rows, len(found.parts)) == (48, 1)
    assert 5 < found.tokens < 32
    assert min(found.seconds_per_update, found.seconds_per_row) > 0
    assert found.evaluation == pytest.approx(18 * found.seconds_per_row)
    assert found.end >= 28 * found.seconds_per_row + costs.END_SECONDS
    weights, gradients, optimizer, activations = found.memory.values()
    assert weights == gradients
    assert 2 * weights <= optimizer < 2 * weights + 1000, "two moments, and counts of updates"
    frozen = costs.measure(vary(rte, freeze="encoder", data={"pooling": "cls"}), prepare(rte), 0.1)
    assert frozen.memory["gradients"] < weights == frozen.memory["weights"]
    assert frozen.memory["activations"] < activations / 10
    parts = costs.measure(vary(rte, data={"max_tokens": 50}), prepare(rte), 0.1)
    assert parts.memory["activations"] == pytest.approx(activations * 50 / found.at_once, rel=1e-3)
    assert (parts.at_once, found.at_once) == (50, pytest.approx(32 * found.tokens))


def test_a_large_update_is_timed_in_part(rte, monkeypatch):
    sizes, make = [], costs.make_trainer
    monkeypatch.setattr(costs, "LONGEST_UPDATE", 0.0)
    monkeypatch.setattr(
        costs, "make_trainer", lambda *args, **more: sizes.append(args[4].batch_size) or make(*args, **more)
    )
    assert costs.measure(vary(rte, batch_size=64), prepare(rte), 0.1).seconds_per_update > 0
    assert sizes == [1] * 4


def test_the_faster_of_two_timings_counts(rte, monkeypatch):
    """Other work during one of the last two does not make the training shorter."""

    def time_with(factors):
        seconds = iter(factors)

        def make_trainer(*args, callbacks):
            return SimpleNamespace(train=lambda: callbacks[0].ends.extend([100.0, 100.0 + next(seconds)]))

        monkeypatch.setattr(costs, "make_trainer", make_trainer)
        return costs.time_updates(vary(rte, batch_size=1), None, None, 0.0, Path("run"))[1]

    assert time_with([5.0, 3.0, 8.0, 1.0]) == time_with([5.0, 3.0, 1.0, 8.0]) == 1.0


def test_the_faster_of_two_measurements_counts(rte, tmp_path, monkeypatch):
    def measure_as(seconds):
        measured = msgspec.structs.replace(COSTS, parts=[(1.0, seconds)])
        monkeypatch.setattr(budget, "measure", lambda *_: measured)
        return budget.measure_again(rte, None, start_clock(60), tmp_path).seconds_per_update

    assert [measure_as(seconds) for seconds in (4.0, 9.0, 2.0, 3.0)] == [4.0, 4.0, 2.0, 2.0]


def test_each_phase_has_its_costs(phases):
    found = costs.measure(phases, prepare(phases), 0.1)
    assert [end for end, _ in found.parts] == [0.5, 1.0]
    assert found.seconds_per_update == pytest.approx(sum(seconds for _, seconds in found.parts) / 2)
    assert 16 < found.tokens < 32
    assert found.at_once > 1.2 * found.batch_size * found.tokens, "the last phase has the longest sequences"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (9, 18.0, 0.0)),
        ({"save_strategy": "epoch"}, (9, 21.0, 0.0)),
        ({"eval_strategy": "epoch"}, (9, 18.0, 9.0)),
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, (9, 18.0, 15.0)),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, (9, 18.0, 27.0)),
        ({"max_steps": 4, "save_strategy": "steps", "save_steps": 2}, (4, 10.0, 0.0)),
    ],
)
def test_the_time_of_a_worked_example(rte, settings, expected):
    """Three epochs of three updates at 2 s; an evaluation takes 3 s, a checkpoint 1 s."""
    never = {"eval_strategy": "no", "save_strategy": "no"}
    assert costs.estimate(replace_values(rte, train=never | settings), COSTS, Path("run")) == expected
    half = replace_values(rte, batch_size=16, train=never | {"max_steps": 4})
    assert costs.estimate(half, COSTS, Path("run")) == (4, 4.0, 0.0)


def test_a_forecast_without_data_is_refused_and_one_with_data_says_what_it_takes(rte, tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        costs.describe_cost(vary(rte, data={"dir": str(tmp_path / "nowhere")}), tmp_path / "run")
    lines = costs.describe_cost(rte, tmp_path / "run")
    tokens = re.search(r" parameters; 6 updates of (\d+) tokens$", lines[0])[1]
    memory = "memory, GB: weights 0.00, gradients 0.00, optimizer 0.00, activations "
    assert re.fullmatch(rf"{memory}0\.\d\d of {tokens} tokens at once", lines[1])
    assert lines[2].startswith("expected here, from a few timed updates: ")


def test_a_forecast_reads_the_beginning_of_a_text(phases, monkeypatch):
    monkeypatch.setattr("bertkit.tasks.pretraining.FORECAST_CHARACTERS", 2000)
    options = dict(phases.data)
    whole, beginning, first = (
        sum(len(documents) for documents in PRETRAIN.load(options | given, ignore).values())
        for given in ({}, {"is_forecast": True}, {"is_forecast": True, "limit_characters": 500})
    )
    assert whole > beginning > first


def test_the_training_before_a_run_has_its_own_forecast(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "measure_costs", lambda recipe, report: COSTS)
    recipe = Recipe.make(TASKS["squad1"], {"data": {"extra_train": "more.json"}}, fits_model=False)
    lines = costs.describe_cost(recipe, tmp_path / "run")
    assert [line.startswith("before, ") for line in lines] == [True] * 3 + [False] * 3
    assert not (tmp_path / "run").exists()


def test_a_study_measures_runs_of_the_same_cost_once(rte, tmp_path, monkeypatch):
    """Eight runs differ in rate, epochs and batch size: 10 s an epoch with its evaluation, and 5 s of each end."""
    lines = []
    monkeypatch.setattr(costs, "measure_costs", lambda recipe, left: COSTS)
    grid = {"batch_size": [16, 32], "train.learning_rate": [1e-5, 2e-5], "train.num_train_epochs": [1.0, 2.0]}
    study = make_study({"column": define_columns("rte"), "recipe": dict(rte.given), "grid": grid})
    expected = ["8 runs, one after another: 2 min 40 s expected here"]
    assert describe_time(study, tmp_path, lines.append) == expected
    assert len(lines) == 1
    assert lines[0].startswith("measuring some updates of rte/")


def test_a_study_measures_runs_once_for_each_kind_of_pretrained_model(rte, tmp_path, monkeypatch):
    """Masks change no cost of the runs, but the direction of attention does; of a lost corpus nothing is known."""
    lines = []

    def measure_costs(recipe, left):
        if recipe.data.get("corpus") == ["lost.txt"]:
            raise UsageError("it is lost")
        if left:
            left.mkdir(exist_ok=True)
        return COSTS

    monkeypatch.setattr(costs, "measure_costs", measure_costs)
    rows = [
        {"name": "masked", "pretrain": {"data": {"mask_rate": 1.0, "same_rate": 0.0, "random_rate": 0.0}}},
        {"name": "left", "pretrain": {"data": {"objective": "clm"}}},
        {"name": "lost", "pretrain": {"model": {"hidden_size": 16}, "data": {"corpus": ["lost.txt"]}}},
    ]
    definition = {
        "column": define_columns("rte"),
        "seeds": [1, 2],
        "pretrain": make_recipe(write_text(tmp_path / "corpus.txt")),
    }
    definition |= {"recipe": {"data": {"dir": rte.data["dir"], "max_length": 32}}, "row": [{"name": "BERT"}, *rows]}
    with pytest.raises(UsageError, match=r"^pretrain/lost: it is lost$"):
        describe_time(make_study(definition), tmp_path / "study", lines.append)
    definition["row"].pop()
    lines.clear()
    (known,) = describe_time(make_study(definition), tmp_path / "study", lines.append)
    measured = [f"pretrain/{row}" for row in ("bert", "masked", "left")]
    measured += ["bert/rte", "left/rte"]
    assert lines == [f"measuring some updates of {directory}" for directory in measured]
    assert known.startswith("9 runs, one after another: ")
    assert not (tmp_path / "study").exists()


# --- What fits --------------------------------------------------------------------------------------------------------


def start_clock(seconds):
    return Clock(seconds, time.monotonic())


def test_as_many_updates_as_fit_and_no_more_epochs_than_given(rte, phases, tmp_path, monkeypatch):
    """The end needs 3.5 x 5 + 2 x 1 s, and 5 % of the rest are left."""
    monkeypatch.setattr(budget, "LEAST_UPDATES", 2)
    train = {"eval_strategy": "epoch", "warmup_steps": 3}
    found = budget.fit(replace_values(rte, train=train), COSTS, start_clock(1000), tmp_path).train
    assert (found["max_steps"], found["warmup_steps"], found["eval_strategy"]) == (9, pytest.approx(1 / 3), "epoch")
    assert "save_steps" not in found
    found = budget.fit(replace_values(rte, train=train), COSTS, start_clock(42.5), tmp_path).train
    assert 2 <= found["max_steps"] <= 7, "21.9 s are for updates and evaluations"
    most = budget.fit(replace_values(rte, train={"max_steps": 4}), COSTS, start_clock(1000), tmp_path).train
    assert (most["max_steps"], most.get("eval_steps")) == (4, None), "the epochs would have more"
    own = phases.given | {"train": {"max_steps": 20, "warmup_steps": 2, "eval_strategy": "steps"}}
    long = budget.fit(Recipe.make(PRETRAIN, own), COSTS, start_clock(1000), tmp_path).train
    left = 0.95 * (1000 - 9.5) - 6 * 3.0 - 5  # six evaluations and five checkpoints
    assert long["max_steps"] == pytest.approx(left / 1.0, abs=8), "16 sequences take half as long as 32"
    assert (long["warmup_steps"], long["eval_steps"]) == (0.1, math.ceil(long["max_steps"] / 5))


class World:
    """A machine whose time passes as the test says; it stands for the clock and for the time module."""

    def __init__(self, limit):
        self.limit, self.now = limit, 1.0

    @property
    def left(self):
        return self.limit - self.now

    def monotonic(self):
        return self.now


@given(st.lists(st.floats(0.2, 4.0), min_size=1, max_size=8), st.floats(60, 3000))
def test_the_training_ends_in_time_whatever_the_machine_does(speeds, limit):
    """The machine has another speed in each part of the time; the end takes as long as the last updates tell."""
    world = World(limit)
    keeper = Deadline(world, COSTS, 0)
    args = SimpleNamespace(world_size=1, device=torch.device("cpu"), eval_strategy="no")
    state, control = TrainerState(max_steps=100_000), TrainerControl()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "time", world)
        since = 0.0
        while not control.should_training_stop:
            speed = speeds[min(int(world.now / limit * len(speeds)), len(speeds) - 1)]
            before, world.now = world.now, world.now + 2.0 * speed
            since = (
                since + world.now - before
                if int(before / limit * len(speeds)) == int(world.now / limit * len(speeds))
                else 0.0
            )
            state.global_step += 1
            keeper.on_step_end(args, state, control)
    assert keeper.update == state.global_step
    end = COSTS.end * (speed if since > 90 else min(speed, 1.0)) + 2 * COSTS.saving
    assert world.now + end <= limit + 2.0 * speed, "at most the update in progress is too much"
    if len(set(speeds)) == 1:
        assert limit - world.now - end <= (4.0 + 3.5 * COSTS.end) * max(speed, 1.0)


def test_measuring_changes_nothing_and_the_run_repeats_without_a_clock(rte, tmp_path):
    with pytest.raises(TooShort, match=r" s beside evaluation and saving; give --budget \d+m or more"):
        train_within(rte, output=tmp_path / "run", clock=start_clock(1))
    metrics = train_within(rte, output=tmp_path / "run", clock=start_clock(600))
    written = load_recipe(tmp_path / "run/recipe.toml")
    assert (written.train["max_steps"], written.stop_after) == (metrics["updates"], 0) == (6, 0)
    assert run(written, output=tmp_path / "again") == metrics
    assert_same_bits(read_weights(tmp_path / "again"), read_weights(tmp_path / "run"))
    assert train_within(rte, output=tmp_path / "run", clock=start_clock(600)) == metrics, "nothing is repeated"
    with pytest.raises(UsageError, match=r"another run \(train.learning_rate: .* -> 0\.5\)"):
        train_within(vary(rte, train={"learning_rate": 0.5}), output=tmp_path / "run", clock=start_clock(600))
    with pytest.raises(UsageError, match="has a run without --budget; name another directory with --output"):
        train_within(rte, output=tmp_path / "again", clock=start_clock(600))


def test_a_training_from_a_solved_head_has_enough_updates_or_is_not_begun(rte, tmp_path):
    """Nine updates of 2 s are all of it: five are more than half. Nothing else may be shorter than 20, or than all."""
    random = replace_values(rte, train={"eval_strategy": "no", "save_strategy": "no"})
    solved = replace_values(random, start="solved")
    # The vectors, and the answers before the first update
    start = COSTS.rows * COSTS.seconds_per_row + COSTS.evaluation
    cases = ((solved, 33 + start, 5), (solved, 29 + start, 0), (random, 32, 0), (random, 60, 9))
    for recipe, seconds, updates in cases:
        if updates:
            assert budget.fit(recipe, COSTS, start_clock(seconds), tmp_path).train["max_steps"] >= updates
        else:
            with pytest.raises(TooShort, match="the time allows"):
                budget.fit(recipe, COSTS, start_clock(seconds), tmp_path)
    long = {"num_train_epochs": 100.0}
    found = budget.fit(replace_values(solved, train=long), COSTS, start_clock(200 + start), tmp_path).train
    assert 60 <= found["max_steps"] < 100, "of 300, because 60 are enough"
    with pytest.raises(TooShort):
        budget.fit(replace_values(solved, train=long), COSTS, start_clock(130), tmp_path)
    assert budget.fit(replace_values(random, train=long), COSTS, start_clock(130), tmp_path).train["max_steps"] < 60


def test_the_solved_head_is_the_result_where_no_training_fits(rte, tmp_path):
    output, lines = tmp_path / "run", []
    solved = vary(rte, start="solved")
    metrics = train_within(solved, output=output, clock=start_clock(1), report=lines.append)
    beginning = "nothing is trained and the solved head is the result: the time allows "
    assert sum(line.startswith(beginning) for line in lines) == 1
    written = load_recipe(output / "recipe.toml")
    assert (metrics["updates"], written.freeze, written.is_solved) == (0, "encoder", True)
    assert train_within(solved, output=output, clock=start_clock(600)) == metrics, "nothing is repeated"
    assert run(written, output=tmp_path / "again") == metrics


def test_what_a_deadline_has_ended_repeats_bit_for_bit(rte, tmp_path):
    """The learning rates are those of the whole schedule, and an epoch's evaluation is left out at the end alone."""
    recipe = replace_values(
        rte, train={"max_steps": 6, "eval_strategy": "epoch", "logging_steps": 1, "save_strategy": "no"}
    )
    lines = []
    metrics = run(recipe, output=tmp_path / "run", stop=StopAfter(4), report=lines.append)
    assert "stopped early after update 4, because its time was over (stop_after)" in lines
    written = load_recipe(tmp_path / "run/recipe.toml")
    assert (metrics["updates"], written.stop_after, written.train["max_steps"]) == (4, 4, 6)
    assert run(written, output=tmp_path / "again") == metrics
    assert_same_bits(read_weights(tmp_path / "again"), read_weights(tmp_path / "run"))
    run(recipe, output=tmp_path / "whole")
    logs = [read_log(tmp_path / name) for name in ("whole", "run")]
    whole, part = ([entry["learning_rate"] for entry in log if "loss" in entry] for log in logs)
    assert part == whole[:4]
    assert [sum("eval_accuracy" in entry for entry in log) for log in logs] == [3, 1]


@pytest.mark.slow
def test_a_pretraining_ends_in_time_also_when_it_is_stopped_in_between(phases, tmp_path):
    output, limit = tmp_path / "run", 60.0

    def stop(done, total, log):
        if done >= 10:
            os.kill(os.getpid(), signal.SIGTERM)

    begun = time.monotonic()
    with pytest.raises(Interrupted):
        search_or_train(phases, output=output, clock=start_clock(limit), progress=stop)
    first = time.monotonic() - begun
    assert json.loads((output / CLOCK_FILE).read_bytes()) == pytest.approx(first, abs=2 * RECORDED_EVERY)
    begun = time.monotonic()
    metrics = search_or_train(phases, output=output, clock=start_clock(limit))
    used = first + time.monotonic() - begun
    print(f"{used:.1f} of {limit:.0f} s")
    assert limit / 2 <= used <= limit
    assert run(load_recipe(output / "recipe.toml"), output=tmp_path / "again") == metrics
