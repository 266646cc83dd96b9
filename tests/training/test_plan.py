"""The cost of a run: what is counted, what is measured, and the forecast that follows."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertkit.model.checkpoint import load_config, make_config
from bertkit.studies.forecast import forecast_study
from bertkit.studies.spec import make_study
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training import cost
from bertkit.training.arguments import make_arguments
from bertkit.training.cost import Costs, PartCost, UpdateClock, count_flops, count_tokens, measure_costs
from bertkit.training.plan import Forecast, add_forecasts, count_evaluations, describe_cost, forecast
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from tests.official import write_checkpoint, write_glue, write_squad
from tests.training.test_run import PRETRAIN, make_recipe, write_text

RTE = TASKS["rte"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(cost, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(cost, "MATMUL_SECONDS", 0.1)


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """Return a complete recipe."""
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


# --- What is counted --------------------------------------------------------------------------------------------------


def test_the_operations_of_a_worked_example():
    """H 2, intermediate 8, a layer, V 5, three tokens of which one is decoded; backwards twice that."""
    config = make_config(
        {
            "hidden_size": 2,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 5,
        }
    )
    dense = 3 * (4 * 2 * 2 * 2 + 2 * 2 * 2 * 8)  # tokens x (query, key, value, output; up and down)
    scores = 2 * 2 * 3 * 3 * 2  # two products, multiply and add, 3 x 3 pairs, H
    decoder, pooler = 2 * 2 * 2 + 2 * 2 * 5, 2 * 2 * 2
    assert count_flops(config, torch.tensor([3]), 1) == 3 * (dense + scores + decoder + pooler)
    two = count_flops(config, torch.tensor([3, 3]), 2)
    assert two == 2 * count_flops(config, torch.tensor([3]), 1)
    assert two < count_flops(config, torch.tensor([6]), 2) + 3 * pooler  # attention is quadratic in the length


def test_real_tokens_are_counted_and_labels_of_tokens():
    rows = [
        {"input_ids": np.arange(length), "token_type_ids": np.zeros(length, np.int64), "labels": 1}
        for length in (3, 5, 4)
    ]
    lengths, targets = count_tokens(TASKS["rte"], rows, 2)
    assert (lengths.tolist(), targets) == ([3, 5, 4], 0)
    labels = torch.tensor([[-100, 7, -100], [4, -100, 0]])
    task = SimpleNamespace(collate=lambda items: {"attention_mask": torch.ones(2, 3, dtype=int), "labels": labels})
    lengths, targets = count_tokens(task, [None] * 4, 2)
    assert (lengths.tolist(), targets) == ([3, 3, 3, 3], 6)


# --- What is measured -------------------------------------------------------------------------------------------------


def test_a_clock_leaves_out_the_first_updates_and_stops_after_its_seconds(monkeypatch):
    """Updates take 9, 9, 2, 2, 2 seconds, half a second of each in the optimizer."""
    args = SimpleNamespace(world_size=1)
    times = iter([8.5, 9.0, 17.5, 18.0, 19.5, 20.0, 21.5, 22.0, 23.5, 24.0])
    monkeypatch.setattr(cost, "read_clock", lambda: next(times))
    clock, stops = UpdateClock(3.0), []
    for _ in range(5):
        control = SimpleNamespace(should_training_stop=False)
        clock.on_pre_optimizer_step(args, None, control)
        clock.on_step_end(args, None, control)
        stops.append(control.should_training_stop)
    assert clock.summarize() == (2.0, 0.5)
    assert stops == [False, False, False, False, True]


def test_the_costs_of_a_run_are_those_of_its_rows(rte):
    prepared = prepare(rte)
    costs = measure_costs(rte, prepared)
    (part,) = costs.parts
    lengths, _ = count_tokens(RTE, prepared.data["train"], 8)
    assert part.rows == range(len(lengths))
    assert part.tokens == pytest.approx(float(lengths.double().mean()))
    operations = count_flops(load_config(rte.checkpoint), lengths, 0)
    assert part.operations == pytest.approx(operations / len(lengths))
    assert 0 < part.seconds < 1
    assert 0 < part.fixed < 1
    assert costs.gradients == costs.weights
    assert 2 * costs.weights <= part.optimizer < 2 * costs.weights + 1000, "two moments, and counts of updates"
    assert costs.evaluation.keys() == {"dev", "test"}


def test_a_frozen_encoder_has_no_backward_pass(rte):
    frozen = rte.changed(freeze="encoder")
    prepared = prepare(frozen)
    costs, whole = measure_costs(frozen, prepared), measure_costs(rte, prepared)
    assert 3 * costs.parts[0].operations == pytest.approx(whole.parts[0].operations)
    assert costs.gradients < whole.gradients
    assert costs.parts[0].activations < whole.parts[0].activations


def test_a_large_batch_is_not_computed_whole(rte, monkeypatch):
    """Updates of the probe have as many sequences as take some seconds, and activations are scaled."""
    prepared, sizes = prepare(rte), []
    monkeypatch.setattr(cost, "LONGEST_UPDATE", 0.0)
    monkeypatch.setattr(cost.Probe, "measure_activations", lambda self, sample, size: sizes.append(size) or 10)
    (part,) = measure_costs(rte.changed(batch_size=64), prepared).parts
    assert (sizes, part.activations) == ([1], 640)


def test_each_phase_has_its_costs(phases):
    prepared = prepare(phases)
    short, long = measure_costs(phases, prepared).parts
    assert (short.rows, long.rows) == (range(160), range(160, 320))
    assert short.tokens < long.tokens <= 32
    assert short.operations < long.operations
    assert short.activations < long.activations


# --- The forecast -----------------------------------------------------------------------------------------------------

PARTS = [PartCost(range(80), 10.0, 100.0, 0.5, 1.0, 7, 8), PartCost(range(80, 160), 20.0, 300.0, 1.5, 1.0, 9, 8)]


def test_the_forecast_of_a_worked_example(phases):
    """Ten updates of 8 sequences in each part; dev is predicted at the start and four times more, then once again."""
    train = {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}
    recipe = phases.changed(batch_size=8, train=train)
    costs = Costs(PARTS, {"dev": 2.0, "test": 16.0}, {}, weights=4, gradients=4, matmul_rate=100.0)
    found = forecast(recipe, costs, make_arguments(recipe, Path("run")))
    assert found.updates == 20
    assert found.tokens == 10 * 8 * (10 + 20)
    assert found.operations == 10 * 8 * (100 + 300)
    assert found.training == 10 * (8 * 0.5 + 1) + 10 * (8 * 1.5 + 1)
    assert (found.evaluation, found.scoring) == (5 * 2.0, 2.0 + 16.0)
    assert found.memory == {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 9}
    assert found.share == 1.0, "more than the matmul rate is noise"
    assert add_forecasts([found, found]).training == 2 * found.training
    assert add_forecasts([found, found]).memory == found.memory


def test_the_last_batch_of_an_epoch_may_be_smaller(rte):
    """80 rows are 3 updates of at most 32."""
    recipe = rte.changed(train={"num_train_epochs": 2.0})
    found = forecast(recipe, Costs(PARTS[:1], {}, {}, 4, 4, 100.0), make_arguments(recipe, Path("run")))
    assert (found.updates, found.tokens, found.training) == (6, 2 * 80 * 10.0, 2 * 80 * 0.5 + 6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval_strategy": "no"}, 0),
        ({"eval_strategy": "no", "eval_on_start": True}, 1),
        ({"eval_strategy": "epoch"}, 3),
        ({"eval_strategy": "steps", "eval_steps": 30}, 3),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, 10),
        ({"eval_strategy": "steps", "eval_steps": 30, "eval_on_start": True}, 4),
    ],
)
def test_evaluations_are_counted(settings, expected):
    given = {"eval_on_start": False, "eval_steps": None} | settings
    assert count_evaluations(SimpleNamespace(**given), 100, 40) == expected


def test_a_forecast_is_for_this_machine_only():
    lines = Forecast(10, 100.0, 312e15, 6240.0, 50.0, 10.0, {"weights": 10**9}, 1e14).describe()
    assert "3.12e+17 in 10 updates of 10 tokens" in lines[0]
    assert "1.00 GB (weights 1.00)" in lines[1]
    assert "1 h 44 min of training and 1 min 0 s of evaluation" in lines[2]
    assert "50% of it" in lines[2]
    assert len(lines) == 3


def test_a_forecast_without_data_says_why(rte, tmp_path):
    recipe = rte.changed(data={"dir": str(tmp_path / "nowhere")})
    (line,) = describe_cost(recipe, tmp_path / "run")
    assert line.startswith("time and memory are unknown: ")
    assert "nowhere" in line


def test_a_forecast_reads_the_beginning_of_a_text(phases, monkeypatch):
    monkeypatch.setattr("bertkit.tasks.pretraining.FORECAST_CHARACTERS", 2000)
    options = dict(phases.data)
    whole, beginning, first = (
        sum(len(documents) for documents in PRETRAIN.load(options | given, ignore).values())
        for given in ({}, {"is_forecast": True}, {"is_forecast": True, "limit_characters": 500})
    )
    assert whole > beginning > first


def test_the_training_before_a_run_has_its_own_forecast(tmp_path):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    data = {"dir": str(write_squad(tmp_path / "squad", 1)), "max_length": 40, "max_query_length": 8, "doc_stride": 12}
    recipe = {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "data": data | {"extra_train": str(extra)}}
    squad = TASKS["squad1"]
    lines = describe_cost(Recipe.make(squad, recipe, {"batch_size": 8}), tmp_path / "run")
    assert [line.startswith("before, ") for line in lines] == [True] * 3 + [False] * 3
    assert not (tmp_path / "run").exists()


def test_a_study_measures_runs_of_the_same_cost_once(rte, tmp_path, monkeypatch):
    """Eight runs differ in rate, epochs and batch size."""
    calls, lines = [], []

    def measure(recipe, prepared):
        calls.append(recipe)
        return Costs(PARTS[:1], {"dev": 1.0}, {}, 4, 4, 100.0)

    monkeypatch.setattr("bertkit.training.plan.measure_costs", measure)
    grid = {"batch_size": [16, 32], "train.learning_rate": [1e-5, 2e-5], "train.num_train_epochs": [1.0, 2.0]}
    study = make_study({"tasks": ["rte"], "recipe": dict(rte.given), "grid": grid})
    forecast_study(study, tmp_path / "study", lines.append)
    assert len(calls) == 1
    updates = 2 * sum(int(np.ceil(80 / size)) * epochs for size in (16, 32) for epochs in (1, 2))
    assert lines[1] == "8 runs, one after another:"
    assert f"in {updates:,} updates" in lines[2]


def test_a_study_says_what_it_does_not_know(rte, tmp_path):
    lines = []
    grid = {"batch_size": [16, 32]}
    study = make_study({"tasks": ["rte"], "recipe": dict(rte.given), "grid": grid}, {"data": {"dir": str(tmp_path)}})
    forecast_study(study, tmp_path / "study", lines.append)
    assert lines[1].startswith("2 runs: time and memory are unknown: ")
