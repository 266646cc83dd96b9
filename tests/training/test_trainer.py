"""Interrupted and resumed training: the same curve and weights, and the checkpoints kept on the way."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from transformers import TrainerState

from bertkit.data.pretraining.dataset import PretrainingData
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import load_config
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training import callbacks, trainer
from bertkit.training.recipe import Recipe, merge, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import find_checkpoint, list_checkpoints, mark_complete, read_log, rotate_checkpoints
from tests.conftest import change_task
from tests.corpora import write_text
from tests.official import write_checkpoint
from tests.world import PRETRAIN, assert_same_bits, make_glue, make_recipe, read_curve, read_weights, stop_at

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe: two phases of eight updates with dropout; logging, saving and evaluation never coincide."""
    text = write_text(tmp_path_factory.mktemp("text") / "corpus.txt")
    recipe = merge(
        make_recipe(text),
        {
            "phase": [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}],
            "model": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
            "train": {"max_steps": 16, "logging_steps": 3, "eval_steps": 7, "save_steps": 5},
        },
    )
    del recipe["data"]["max_length"]
    return recipe


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    """Return the directory of an uninterrupted run."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run(Recipe.make(PRETRAIN, recipe), output=output)
    return output


def assert_same_run(output, straight):
    assert read_curve(output) == read_curve(straight)
    assert json.loads((output / "metrics.json").read_text()) == json.loads((straight / "metrics.json").read_text())
    assert_same_bits(read_weights(output), read_weights(straight))


def test_the_curve_has_what_a_resume_could_change(recipe, straight):
    """Losses in two parts, rates, norms and evaluations; the epochs of the data end inside both phases."""
    curve = read_curve(straight)
    losses = [entry for entry in curve if "loss" in entry]
    assert [entry["step"] for entry in losses] == [3, 6, 9, 12, 15]
    for entry in losses:
        assert entry.keys() == {"loss", "mlm_loss", "nsp_loss", "grad_norm", "learning_rate", "epoch", "step"}
        assert entry["loss"] == pytest.approx(entry["mlm_loss"] + entry["nsp_loss"], rel=1e-5)
    assert [entry["step"] for entry in curve if "eval_perplexity" in entry] == [0, 7, 14, 16]


@pytest.mark.parametrize(("update", "workers"), [(4, 0), (10, 2), slow(4, 2), slow(8, 0), slow(8, 2), slow(10, 0)])
def test_a_signal_changes_nothing_of_curve_and_weights(recipe, straight, tmp_path, update, workers):
    """Stop before, at and after the phase boundary, never at a logged update."""
    recipe = merge(recipe, {"train": {"dataloader_num_workers": workers}})
    with pytest.raises(Interrupted, match=f"after update {update}; the same command continues"):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", progress=stop_at(update))
    assert max(list_checkpoints(tmp_path / "run")) == update
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)
    (last,) = [entry for entry in read_log(tmp_path / "run") if "train_runtime" in entry]
    assert last["resumed_at"] == update, "the time since the resume"


@pytest.mark.slow
def test_several_signals_change_nothing(recipe, straight, tmp_path, monkeypatch):
    """Stop twice between two logs, and once directly after a log."""
    begin = callbacks.StopOnSignal.on_train_begin

    def begin_and_stop(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="after update 4"):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", progress=stop_at(4))
    with monkeypatch.context() as patch:
        patch.setattr(callbacks.StopOnSignal, "on_train_begin", begin_and_stop)
        for update in (5, 6):
            with pytest.raises(Interrupted, match=f"after update {update}"):
                run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)


def test_a_resumed_run_divides_its_updates_as_it_began(recipe, straight, tmp_path):
    """Nothing is decided again: another division would draw other masks of dropout."""
    divided = Recipe.make(PRETRAIN, recipe, {"data": {"max_tokens": 100}})
    run(divided, output=tmp_path / "straight")
    assert read_curve(tmp_path / "straight") != read_curve(straight)
    with pytest.raises(Interrupted):
        run(divided, output=tmp_path / "run", progress=stop_at(4))
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def train_and_die(recipe, output, update):
    """Train, and kill this process after an update."""

    def die(done, total, log):
        if done == update:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    run(Recipe.make(PRETRAIN, recipe), output=output, progress=die)


@pytest.mark.slow
@pytest.mark.parametrize(("update", "workers"), [(7, 0), (12, 2), (9, 2), (13, 0)])
def test_kill_9_changes_nothing_of_curve_and_weights(recipe, straight, tmp_path, update, workers):
    """The checkpoints are from updates 5 and 10; neither is logged."""
    recipe = merge(recipe, {"train": {"dataloader_num_workers": workers}})
    start = multiprocessing.get_context("spawn")
    process = start.Process(target=train_and_die, args=(recipe, tmp_path / "run", update))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lines = []
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", report=lines.append)
    assert f"continues after checkpoint-{5 * (update // 5)}" in lines
    assert_same_run(tmp_path / "run", straight)


def make_short_recipe(folder, **train):
    """Return a recipe that ends within an epoch; with a constant rate, an extra update would change the weights."""
    start = str(write_checkpoint(folder / "dropping", hidden_dropout_prob=0.1))
    train = {"lr_scheduler_type": "constant", "save_steps": 100, **train}
    return make_glue(folder, "rte") | {"checkpoint": start, "batch_size": 4, "precision": "fp32", "train": train}


def test_a_run_that_dies_in_its_last_evaluation_does_it_again(tmp_path, monkeypatch):
    """The last checkpoint is written after the evaluation, even if it is also due by `save_steps`."""
    recipe = make_short_recipe(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="epoch")
    metrics = run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "straight")
    monkeypatch.setattr(trainer.BertTrainer, "evaluate", lambda self, *args, **kwargs: {}["dies"])
    with pytest.raises(KeyError):
        run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "run")
    monkeypatch.undo()
    assert run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "run") == metrics
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    assert any("eval_accuracy" in entry for entry in read_curve(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "train", [{"max_steps": 4, "eval_strategy": "epoch"}, {"num_train_epochs": 0.4, "eval_strategy": "no"}]
)
def test_a_stop_after_the_last_update_changes_nothing(tmp_path, train):
    """Stop in the middle of an epoch, where the Trainer would continue training."""
    recipe = make_short_recipe(tmp_path, **train)
    metrics = run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "straight")
    last = metrics["updates"]
    assert last in (4, 5)
    with pytest.raises(Interrupted, match=f"after update {last}; the same command continues"):
        run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "run", progress=stop_at(last))
    assert run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "run") == metrics
    assert_same_run(tmp_path / "run", tmp_path / "straight")


# --- Which checkpoints are there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "half", "update", "keep", "protected", "left"),
    [
        ([3, 6, 9], [], 9, 2, [], [6, 9]),
        ([3, 6, 9], [], 9, 2, [3], [3, 9]),
        ([3, 6, 9], [], 9, 1, [3], [3, 9]),
        ([3, 6, 9], [], 9, 1, [9], [9]),
        ([3, 6, 9], [], 9, 5, [], [3, 6, 9]),
        ([3, 6], [4, 9], 6, 2, [], [3, 6]),  # half written, before and after
        ([3, 6, 9], [], 6, 2, [], [3, 6]),  # skipped as damaged
    ],
)
def test_rotation_keeps_the_last_and_the_protected(tmp_path, whole, half, update, keep, protected, left):
    for number in (*whole, *half):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if number in whole:
            mark_complete(tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-mine").mkdir()
    rotate_checkpoints(tmp_path, update, keep, protected)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-mine", *(f"checkpoint-{n}" for n in left)}


def test_an_old_checkpoint_is_deleted_only_when_the_new_one_is_whole(recipe, straight, tmp_path, monkeypatch):
    """If a run that keeps one checkpoint is killed while writing the second, the first is kept."""
    recipe = merge(recipe, {"train": {"save_total_limit": 1}})
    marked = []

    def mark(checkpoint):
        marked.append(checkpoint.name)
        if len(marked) == 2:
            raise KeyboardInterrupt
        mark_complete(checkpoint)

    monkeypatch.setattr("bertkit.training.trainer.mark_complete", mark)
    with pytest.raises(KeyboardInterrupt):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint-10").exists()
    assert find_checkpoint(tmp_path / "run", print).name == "checkpoint-5"
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)


def score_in_turn(perplexities):
    """Return PRETRAIN with these scores for successive evaluations; the last is for the finished model."""
    rest = iter(perplexities)
    return change_task(
        PRETRAIN, score=lambda rows: PRETRAIN.score(rows) | dict.fromkeys(("perplexity", "tau"), next(rest))
    )


EVERY_TWO = {"train": {"max_steps": 8, "eval_steps": 2, "save_steps": 2, "eval_on_start": False}}


@pytest.mark.parametrize("keep", [1, 2])
def test_the_best_is_kept_beside_the_last(recipe, tmp_path, monkeypatch, keep):
    lines, output = [], tmp_path / "run"
    monkeypatch.setitem(TASKS, "pretrain", score_in_turn([5.0, 3.0, 4.0, 6.0, 6.0]))
    kept = Recipe.make(PRETRAIN, recipe, EVERY_TWO, {"train": {"save_total_limit": keep}})
    metrics = run(kept, output=output, report=lines.append)
    assert sorted(list_checkpoints(output)) == {1: [], 2: [4, 8]}[keep], "1 is the model itself"
    assert (metrics["best_update"], metrics["best_perplexity"], metrics["perplexity"]) == (4, 3.0, 6.0)
    assert f"update 4 was better (perplexity 3, at the end 6); its model is in {output / 'best'}" in lines
    if keep > 1:
        assert_same_bits(read_weights(output / "best"), read_weights(output / "checkpoint-4"))
        assert_same_bits(read_weights(output), read_weights(output / "checkpoint-8"))
    assert load_config(str(output / "best")).tau == 3.0, "the result of its own evaluation"
    assert Predictor(output / "best").settings.lengths == {"max_length": 32}
    assert not (output / ".best").exists()
    with pytest.raises(UsageError, match="best belongs to another run"):
        run(Recipe.make(PRETRAIN, recipe), output=output / "best")


@pytest.mark.parametrize(
    ("perplexities", "change"),
    [
        ([5.0, 3.0, 4.0, 6.0, 6.0], None),  # the best one is damaged
        ([5.0, 4.0, 3.0, 2.0, 2.0], {}),  # the last is the best
        slow([5.0, 2.0, 3.0, 2.0, 2.0], {}),  # an earlier one is as good
        ([math.nan, 4.0, 3.0, 2.0, 2.0], {}),  # the first one has no score
        slow([1.0, 5.0, 4.0, 4.0], {"eval_steps": 3}),  # better ones were not saved
        slow([2.0], {"eval_strategy": "no"}),
        ([5.0, 3.0, 4.0, 6.0, 3.0], {"load_best_model_at_end": True}),  # the best is what is saved at the top
    ],
)
def test_there_is_no_best_model_beside_the_last_if_that_is_the_best(
    recipe, tmp_path, monkeypatch, perplexities, change
):
    def damage(done, total, log):
        if change is None and done == 7:
            (tmp_path / "run" / "checkpoint-4" / "model.safetensors").write_bytes(b"?")

    monkeypatch.setitem(TASKS, "pretrain", score_in_turn(perplexities))
    given = Recipe.make(PRETRAIN, recipe, EVERY_TWO, {"train": change or {}})
    metrics = run(given, output=tmp_path / "run", progress=damage)
    assert not (tmp_path / "run" / "best").exists()
    assert not [name for name in metrics if name.startswith("best_")]


def test_a_stop_keeps_best_and_last_and_the_rest_of_the_run_knows_the_best(recipe, tmp_path, monkeypatch):
    recipe = Recipe.make(PRETRAIN, recipe, EVERY_TWO, {"train": {"save_total_limit": 1}})
    monkeypatch.setitem(TASKS, "pretrain", score_in_turn([3.0, 4.0]))
    with pytest.raises(Interrupted):
        run(recipe, output=tmp_path / "run", progress=stop_at(5))
    assert sorted(list_checkpoints(tmp_path / "run")) == [2, 5]
    monkeypatch.setitem(TASKS, "pretrain", score_in_turn([5.0, 6.0, 6.0]))
    metrics = run(recipe, output=tmp_path / "run")
    assert (metrics["best_update"], metrics["best_perplexity"]) == (2, 3.0)
    assert not list_checkpoints(tmp_path / "run")


# --- Early stopping ---------------------------------------------------------------------------------------------------

# The best loss here is the highest, so that every evaluation is worse than the one before while the model learns.
BEST = {"metric_for_best_model": "mlm_loss", "greater_is_better": True}
PATIENT = {"patience": 2, "train": BEST | {"eval_steps": 2, "save_steps": 2, "eval_on_start": False}}


@pytest.fixture(scope="module")
def patient(recipe, tmp_path_factory):
    """Return the directory of an uninterrupted run that stops early."""
    output, lines = tmp_path_factory.mktemp("patient") / "run", []
    metrics = run(Recipe.make(PRETRAIN, recipe, PATIENT), output=output, report=lines.append)
    assert metrics["updates"] == 6
    assert "stopped early after update 6, because mlm_loss did not improve (patience)" in lines
    return output


@pytest.mark.parametrize(
    ("scores", "patience", "is_due"),
    [
        ([], 1, False),
        ([3.0, 4.0, 3.5], 2, False),
        ([3.0, 4.0, 3.5], 1, True),
        ([3.0, 4.0, 3.5, 3.9], 2, True),
        ([4.0, 4.0, 4.0], 2, True),  # equal scores are not better
        ([4.0, 3.0, 4.5], 1, False),  # as it did not stop before
        ([math.nan, math.nan, 1.0], 1, False),
        ([2.0, math.nan, math.nan], 2, True),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_patience_counts_evaluations_since_the_first_best(scores, patience, is_due, sign):
    log = [{"eval_f1": sign * score, "step": step} for step, score in enumerate(scores)] + [{"loss": 9.0, "step": 99}]
    stop = callbacks.StopEarly(patience, "f1", lower_is_better=sign < 0)
    assert stop.is_due(TrainerState(log_history=log)) == is_due


def test_patience_stops_the_run_at_its_update(recipe, patient, tmp_path):
    """The model and the curve are those of a run without patience at that update."""
    curve = [entry for entry in read_curve(patient) if entry["step"] <= 6 and "total_flos" not in entry]
    assert [entry["step"] for entry in curve if "eval_perplexity" in entry] == [2, 4, 6]
    whole = Recipe.make(PRETRAIN, recipe, PATIENT, {"patience": 0, "train": {"save_total_limit": 0}})
    run(whole, output=tmp_path / "run")
    assert_same_bits(read_weights(patient), read_weights(tmp_path / "run" / "checkpoint-6"))
    assert curve == [entry for entry in read_curve(tmp_path / "run") if entry["step"] <= 6]
    assert json.loads((patient / "metrics.json").read_text())["best_update"] == 2


@pytest.mark.parametrize("update", [5, 6])
def test_a_signal_around_the_stopping_evaluation_changes_nothing(recipe, patient, tmp_path, update):
    with pytest.raises(Interrupted, match=f"after update {update}; the same command continues$"):
        run(Recipe.make(PRETRAIN, recipe, PATIENT), output=tmp_path / "run", progress=stop_at(update))
    run(Recipe.make(PRETRAIN, recipe, PATIENT), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", patient)


@pytest.mark.parametrize("method", ["_save_checkpoint", "summarize"])
def test_a_run_that_dies_after_the_stopping_evaluation_ends_at_the_same_update(
    recipe, tmp_path, patient, monkeypatch, method
):
    """It dies before that checkpoint is written, or before the final scores."""
    original = getattr(trainer.BertTrainer, method)

    def die(self, *args, **kwargs):
        if self.state.global_step == 6:
            raise KeyError("dies")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, suppress(KeyError):
        patch.setattr(trainer.BertTrainer, method, die)
        run(Recipe.make(PRETRAIN, recipe, PATIENT), output=tmp_path / "run")
    lines = []
    run(Recipe.make(PRETRAIN, recipe, PATIENT), output=tmp_path / "run", report=lines.append)
    assert read_curve(tmp_path / "run") == read_curve(patient)
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(patient))
    assert f"continues after checkpoint-{6 if method == 'summarize' else 4}" in lines
    assert any("stopped early after update 6" in line for line in lines)


@pytest.mark.parametrize("strategies", [("epoch", "epoch"), ("steps", "epoch")])
def test_a_stop_within_or_after_an_epoch_is_the_end_of_a_resumed_run_too(tmp_path, monkeypatch, strategies):
    """Scores of RTE that never improve; the run dies before its final scores."""
    plain = TASKS["rte"]
    rte = change_task(plain, score=lambda rows: plain.score(rows) | {"accuracy": 0.5})
    recipe = make_short_recipe(tmp_path, num_train_epochs=9.0, eval_steps=4)
    strategies = dict(zip(("eval_strategy", "save_strategy"), strategies, strict=True))
    recipe = merge(recipe, {"patience": 1, "baseline": False, "train": strategies})
    monkeypatch.setitem(TASKS, "rte", rte)
    metrics = run(Recipe.make(rte, recipe), output=tmp_path / "straight")
    predict = trainer.BertTrainer.predict
    monkeypatch.setattr(trainer.BertTrainer, "predict", lambda self, *args, **kwargs: {}["dies"])
    with pytest.raises(KeyError):
        run(Recipe.make(rte, recipe), output=tmp_path / "run")
    monkeypatch.setattr(trainer.BertTrainer, "predict", predict)
    assert find_checkpoint(tmp_path / "run", print).name == f"checkpoint-{metrics['updates']}"
    assert run(Recipe.make(rte, recipe), output=tmp_path / "run") == metrics
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_long_prediction_says_how_far_it_is(recipe, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("bertkit.system.progress.SECONDS_OF_SILENCE", 0)
    change = {"train": {"max_steps": 1, "per_device_eval_batch_size": 8, "eval_strategy": "no", "eval_on_start": False}}
    run(Recipe.make(PRETRAIN, recipe, change), output=tmp_path / "run", report=lines.append)
    first = next(place for place, line in enumerate(lines) if line.startswith("predicting "))
    count = int(re.search(r"([\d,]+) sequences", lines[first])[1].replace(",", ""))
    batches = -(-count // 8)
    shares = [re.fullmatch(r"  (\d+)% predicted, \d+ s left", line) for line in lines[first + 1 : first + batches]]
    assert batches > 2
    assert [int(share[1]) for share in shares] == [round(100 * done / batches) for done in range(2, batches + 1)]


def test_a_resumed_run_reads_nothing_of_what_it_has_learned(recipe, tmp_path, monkeypatch):
    """It asks for the samples of its updates 11 to 16, so seeking takes as long at any update."""
    recipe = merge(recipe, {"train": {"eval_strategy": "no", "eval_on_start": False}})
    with pytest.raises(Interrupted):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path, progress=stop_at(10))
    asked, take = [], PretrainingData.__getitems__

    def note(self, positions):
        if len(self.parts) == 2 and len(positions) > 1:  # of training; one sample is read to check its types
            asked.extend(positions)
        return take(self, positions)

    monkeypatch.setattr(PretrainingData, "__getitems__", note)
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path)
    size = recipe["batch_size"]
    assert sorted(asked) == list(range(10 * size, 16 * size))


GROUP = """
import os, subprocess, sys
import torch
from bertkit.training.recipe import Recipe, read_recipe
from bertkit.training.run import run
from bertkit.tasks import TASKS
from bertkit.system.signals import Interrupted

def stop(done, total, log):
    if done == 3 and log:
        command = ["kill", "-TERM", "--", f"-{os.getpgrp()}"]
        subprocess.run(command, start_new_session=True, check=True)  # from outside of the group

if __name__ == "__main__":
    torch.set_num_threads(1)  # as the run that it is compared with
    try:
        run(Recipe.make(TASKS["pretrain"], read_recipe(sys.argv[1])), output=sys.argv[2], progress=stop)
    except Interrupted as stopped:
        sys.exit(128 + stopped.number)
"""


@pytest.mark.slow
def test_a_signal_to_a_whole_group_leaves_the_data_workers_to_the_process_that_trains(recipe, straight, tmp_path):
    """As sent by schedulers and by Ctrl-C: the update finishes and the checkpoint is written."""
    recipe = merge(recipe, {"train": {"dataloader_num_workers": 2}})
    save_recipe(recipe, tmp_path / "recipe.toml")
    (tmp_path / "program.py").write_text(GROUP)
    command = [sys.executable, "program.py", "recipe.toml", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, start_new_session=True, timeout=200)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert [path.parent.name for path in tmp_path.glob("run/checkpoint-*/complete")] == ["checkpoint-4"]
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)
