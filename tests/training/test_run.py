"""One run: its output files, its errors, and the execution modes that must agree."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertkit import BertModel
from bertkit.errors import UsageError
from bertkit.model.checkpoint import load_config
from bertkit.model.precision import choose_precision
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training import trainer
from bertkit.training.arguments import make_arguments
from bertkit.training.network import make_model
from bertkit.training.parts import TRAINED_ON_CPU
from bertkit.training.recipe import Recipe, load_recipe, merge, save_recipe
from bertkit.training.run import dry_run, run
from tests.conftest import change_task
from tests.corpora import write_text
from tests.official import write_checkpoint, write_glue
from tests.world import (
    PRETRAIN,
    assert_same_bits,
    make_classify,
    make_glue,
    make_recipe,
    read_losses,
    read_weights,
    stop_at,
    weigh_classes,
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return make_recipe(write_text(tmp_path_factory.mktemp("text") / "corpus.txt"))


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    """Return an uninterrupted run: metrics, directory, lines and progress; tests that damage it make a copy."""
    found = SimpleNamespace(output=tmp_path_factory.mktemp("straight") / "run", lines=[], steps=[])
    told = {"report": found.lines.append, "progress": lambda *state: found.steps.append(state[:2])}
    found.metrics = run(Recipe.make(PRETRAIN, recipe), output=found.output, **told)
    return found


def test_a_run_writes_what_is_needed_to_use_and_repeat_it(straight):
    from transformers import AutoModelForPreTraining, AutoTokenizer

    output, metrics = straight.output, straight.metrics
    files = {path.name for path in output.iterdir()}
    assert files >= {"recipe.toml", "metrics.json", "environment.json", "training_log.jsonl", "model.safetensors"}
    assert files >= {"config.json", "vocab.txt", "tokenizer.json", "README.md", "predictions"}
    assert not (output / "training_args.bin").exists()
    assert json.loads((output / "metrics.json").read_text()) == metrics
    assert metrics["score"] == metrics["perplexity"] == pytest.approx(np.exp(metrics["mlm_loss"]))
    assert metrics["updates"] == 8
    assert load_recipe(output / "recipe.toml").data["max_tokens"] == TRAINED_ON_CPU
    assert metrics["mlm_loss"] < metrics["start_mlm_loss"]
    assert 0.5 <= metrics["nsp_majority"] < 1
    assert straight.steps[-1] == (8, 8)
    assert any("parameters" in line for line in straight.lines)
    losses = read_losses(output)
    assert losses.shape == (8, 3)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1] + losses[:, 2], rtol=1e-5)

    model, info = AutoModelForPreTraining.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.vocab_size == len((output / "vocab.txt").read_text(encoding="utf-8").splitlines())


def test_a_run_without_a_checkpoint_begins_anew_with_the_text_and_the_recipe_that_are_there(recipe, tmp_path):
    """The old vocabulary must be replaced, as after Ctrl-C because of a wrong file name, or after a mistake."""
    corpus = write_text(tmp_path / "corpus.txt", seed=1)
    recipe = merge(recipe, {"data": {"corpus": [str(corpus)]}})

    def stop(done, total, log):
        raise KeyboardInterrupt

    wrong = {"data": {"vocab_size": 90}, "model": {"attn_implementation": "nonsense"}}
    with pytest.raises(UsageError, match=r"\[model\] cannot be used"):
        run(Recipe.make(PRETRAIN, recipe, wrong), output=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", progress=stop)
    old = (tmp_path / "run" / "vocab.txt").read_bytes()
    write_text(corpus, seed=2)
    found = run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert found == run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "fresh")
    assert (tmp_path / "run" / "vocab.txt").read_bytes() == (tmp_path / "fresh" / "vocab.txt").read_bytes() != old


def flip_bit(name, output):
    path = output / "checkpoint-8" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def leave_half(output):
    (output / "checkpoint-9").mkdir()
    (output / "checkpoint-9" / "model.safetensors").write_bytes(b"half")
    (output / "checkpoint-old").mkdir()
    (output / "checkpoint-old" / "complete").touch()


def keep_only(names, output):
    for path in output.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGED = ["checkpoint-8 is damaged, skipping", "continues after checkpoint-6"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda output: (output / "environment.json").write_text("{"), ["continues after checkpoint-8"]),
        (lambda output: (output / "model.safetensors").unlink(), ["continues after checkpoint-8"]),
        (leave_half, ["continues after checkpoint-8"]),
        (partial(flip_bit, "model.safetensors"), DAMAGED),
        *(
            pytest.param(partial(flip_bit, name), DAMAGED, marks=pytest.mark.slow)
            for name in ("optimizer.pt", "trainer_state.json", "complete")
        ),
        (partial(keep_only, ["recipe.toml"]), []),
        (partial(keep_only, ["recipe.toml", "tokenizer.json"]), []),
    ],
)
def test_what_a_kill_or_a_disk_leaves_of_a_run_becomes_the_same_run(recipe, straight, tmp_path, damage, said):
    """Only recipe.toml, or also a tokenizer without its last file, is there after a kill at the start."""
    shutil.copytree(straight.output, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    damage(tmp_path / "run")
    lines = []
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", report=lines.append) == straight.metrics
    assert [line for line in lines if "checkpoint-" in line] == said
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(straight.output))
    assert set(json.loads((tmp_path / "run" / "environment.json").read_text())["data"]) == {"train", "dev"}


@pytest.mark.parametrize(
    ("change", "rtol"),
    [
        ({"train": {"per_device_train_batch_size": 4}}, 2e-5),
        ({"data": {"max_tokens": 200}}, 2e-5),
        ({"model": {"attn_implementation": "sdpa"}}, 2e-5),
        ({"precision": "bf16"}, 0.03),
    ],
)
def test_accumulation_parts_packing_and_precision_change_nothing(recipe, straight, tmp_path, change, rtol):
    """16 = 4 x 4: masked LM and next sentence have separate denominators over the whole update."""
    metrics = run(Recipe.make(PRETRAIN, recipe, change), output=tmp_path / "run")
    np.testing.assert_allclose(read_losses(tmp_path / "run"), read_losses(straight.output), rtol=rtol)
    assert metrics["mlm_loss"] == pytest.approx(straight.metrics["mlm_loss"], rel=5 * rtol)


def test_accumulation_changes_nothing_with_class_weights(tmp_path):
    """16 = 4 x 4 = 8 x 2, also for weights of which those of an update add up to less than 1, and not without them."""
    write_checkpoint(tmp_path / "bert")
    write_glue(tmp_path / "glue")
    losses, weights = weigh_classes([1.0, 5.0])(tmp_path, tmp_path / "whole")
    assert weigh_classes([1.0, 1.0])(tmp_path, tmp_path / "plain")[0] != pytest.approx(losses, rel=1e-3)
    for scale, per_device in ((1.0, 4), (0.001, 2)):
        train = weigh_classes([scale, 5.0 * scale])
        parts = train(tmp_path, tmp_path / f"{scale}-{per_device}", per_device_train_batch_size=per_device)
        assert parts[0] == pytest.approx(losses, rel=2e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(parts[1][name], weight, rtol=1e-4, atol=2e-4)
    assert load_config(str(tmp_path / "whole")).class_weights == [1.0, 5.0]


@pytest.mark.parametrize(
    ("cpu", "precision"),
    [
        ({}, "fp32"),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False}, "fp32"),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, "bf16"),
        ({"cpu_name": "INTEL(R) XEON(R) PLATINUM 8568Y+", "avx512_bf16": True, "amx_bf16": False}, "fp32"),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, "bf16"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="then it is the accelerator's precision")
def test_a_processor_takes_bf16_only_where_that_is_faster(monkeypatch, cpu, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert choose_precision("auto") == precision


def test_the_recipe_s_precision_wins_over_that_of_accelerate_launch(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make_arguments(Recipe.make(PRETRAIN, recipe), tmp_path / "run").mixed_precision == "no"


MISTAKES = [
    {"model": {"num_attention_heads": 5}},
    {"task": "glue"},
    {"data": {"corpus": []}},
    {"data": {"vocab_size": 8}},
    {"train": {"lr_scheduler_type": "warmup_stable_decay"}},
    {"train": {"metric_for_best_model": "f1"}},
    {"model": {"attn_implementation": "flex_attention"}},
    {"precision": "fp16"},
    {"patience": 2, "train": {"eval_strategy": "no"}},
]


@pytest.mark.parametrize("change", MISTAKES, ids=str)
def test_a_mistake_is_refused_and_writes_nothing(recipe, tmp_path, change, refused):
    with refused():
        run(Recipe.make(PRETRAIN, recipe, change), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_another_script_is_refused(recipe, tmp_path, refused):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n中\n国\n")
    with refused():
        run(Recipe.make(PRETRAIN, recipe, {"data": {"vocab": str(tmp_path / "vocab.txt")}}), output=tmp_path / "run")


def test_a_model_that_only_predicts_has_the_weights_that_its_configuration_says(tmp_path, refused):
    mnli = write_checkpoint(tmp_path / "mnli", labels=("entailment", "neutral", "contradiction"))
    ax, recipe = TASKS["ax"], {"precision": "fp32", "data": {"max_length": 32}}
    whole = Recipe.make(ax, recipe, {"checkpoint": str(mnli)})
    settings = ax.configure(whole, None, None)
    assert make_model(ax, whole, settings)
    BertModel.from_pretrained(mnli).save_pretrained(tmp_path / "encoder")
    shutil.copy(mnli / "config.json", tmp_path / "encoder" / "config.json")
    bare = Recipe.make(ax, recipe, {"checkpoint": str(tmp_path / "encoder")})
    with refused():
        make_model(ax, bare, settings)


def test_a_dry_run_names_the_training_before_it(tmp_path):
    (tmp_path / "extra.json").touch()
    recipe = {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "data": {"max_length": 96}}
    assert "before" not in dry_run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "run")
    first = {"data": {"extra_train": str(tmp_path / "extra.json")}}
    plan = dry_run(Recipe.make(TASKS["squad1"], recipe, first), output=tmp_path / "run")
    assert plan["before"] == f"another training run, in {tmp_path / 'run' / 'first'}"


def test_a_length_that_the_model_decides_is_told_and_kept_in_the_run(tmp_path):
    checkpoint = str(write_checkpoint(tmp_path / "bert", max_position_embeddings=24))
    given = {"checkpoint": checkpoint, "data": {"dir": str(write_glue(tmp_path / "glue"))}, "train": {"max_steps": 1}}
    told = "max_length is 24, the model's positions, instead of 128"
    for length, count in (({}, 1), ({"data": {"max_length": 24}}, 0)):
        lines: list[str] = []
        run(Recipe.make(TASKS["rte"], given, length), output=tmp_path / "run", report=lines.append)
        assert lines.count(told) == count
        assert load_recipe(tmp_path / "run" / "recipe.toml").data["max_length"] == 24


def test_many_passes_over_a_small_text_are_told(tmp_path):
    text = write_text(tmp_path / "corpus.txt", documents=4)
    given = make_recipe(text)
    for steps, count in ((2, 0), (60, 1)):
        lines: list[str] = []
        small = {"train": {"max_steps": steps, "eval_steps": 60, "save_steps": 60}}
        run(Recipe.make(PRETRAIN, given, small), output=tmp_path / str(steps), report=lines.append)
        warned = [line for line in lines if line.startswith("warning: the training passes its text ")]
        assert len(warned) == count
    assert warned[0].endswith(" times (the paper: 40); give more text, or fewer updates with --steps")


def test_a_directory_of_another_run_is_left_alone(recipe, straight, tmp_path, refused):
    before = {path: path.read_bytes() for path in straight.output.rglob("*") if path.is_file()}
    with refused():
        run(Recipe.make(PRETRAIN, recipe, {"train": {"learning_rate": 2e-3}}), output=straight.output)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    for place in (tmp_path / "thesis", tmp_path / "thesis" / "chapter.txt"):
        with refused():
            run(Recipe.make(PRETRAIN, recipe), output=place)
    assert {path: path.read_bytes() for path in straight.output.rglob("*") if path.is_file()} == before


def poison(monkeypatch, update, spread=True):
    """Make every training loss NaN from the given update; unless it spreads, gradients stay finite."""
    compute = trainer.BertTrainer.compute_loss

    def multiply(self, *args, **kwargs):
        loss, factor = compute(self, *args, **kwargs), math.nan if self.state.global_step >= update else 1.0
        self.sums["loss"] *= factor
        return loss * (factor if spread else 1.0)

    monkeypatch.setattr(trainer.BertTrainer, "compute_loss", multiply)


def test_no_checkpoint_is_written_after_a_loss_that_is_no_number(recipe, straight, tmp_path, monkeypatch, refused):
    """The fifth loss is NaN and is logged after the eighth update; the sixth update's checkpoint would contain it."""
    recipe = merge(recipe, {"train": {"logging_steps": 8, "eval_strategy": "no"}})
    for spread in (True, False):
        with monkeypatch.context() as patch, refused():
            poison(patch, 4, spread)
            run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")["mlm_loss"] == straight.metrics["mlm_loss"]
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(straight.output))


def test_a_model_without_numbers_is_not_a_finished_run(recipe, tmp_path, monkeypatch, refused):
    quiet = {"train": {"logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no"}}
    poison(monkeypatch, 7)
    with refused():
        run(Recipe.make(PRETRAIN, recipe, quiet), output=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_milestone_is_written_once(recipe, tmp_path, monkeypatch):
    """Also at the end of an epoch, which has its own checkpoint: a second write could damage the first."""
    written, save = [], trainer.BertTrainer._save_checkpoint

    def note(self, *arguments):
        written.append(self.state.global_step)
        save(self, *arguments)

    monkeypatch.setattr(trainer.BertTrainer, "_save_checkpoint", note)
    recipe = merge(recipe, {"train": {"save_strategy": "epoch", "eval_strategy": "epoch"}})
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", milestones=(3, 8))
    assert written == [3, 8]


def test_a_stop_does_not_count_on_a_damaged_checkpoint(recipe, straight, tmp_path):
    """A run that skipped it stops before the same update."""
    shutil.copytree(straight.output, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    for number in (6, 8):
        (tmp_path / "run" / f"checkpoint-{number}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Interrupted, match=r"^stopped after update 5; the same command continues$"):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", progress=stop_at(5))


@pytest.mark.parametrize(
    ("given", "less", "cut"),
    [
        ({"train": {"per_device_train_batch_size": 16}}, {"train": {"per_device_train_batch_size": 8}}, "1 x 2 x 8"),
        ({}, {"data": {"max_tokens": 256}}, "1 x 1 x 16"),
    ],
)
def test_want_of_memory_says_what_to_lower_and_with_that_the_run_goes_on(
    recipe, straight, tmp_path, monkeypatch, refused, given, less, cut
):
    compute = trainer.BertTrainer.compute_loss

    def compute_or_fail(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return compute(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.BertTrainer, "compute_loss", compute_or_fail)
        with refused():
            run(Recipe.make(PRETRAIN, recipe, given), output=tmp_path / "run")
    less = merge({"train": {"gradient_checkpointing": True}}, less)
    lines = []
    found = run(Recipe.make(PRETRAIN, recipe, less), output=tmp_path / "run", report=lines.append)
    assert "continues after checkpoint-3" in lines
    assert any(f"16 sequences ({cut})" in line for line in lines)
    assert not any("vocabulary" in line for line in lines), "it is there"
    assert found["mlm_loss"] == pytest.approx(straight.metrics["mlm_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_dead_data_worker_is_one_line_and_the_run_goes_on(recipe, straight, tmp_path):
    def kill(done, total, log):
        if done == 4:
            multiprocessing.active_children()[0].kill()
            time.sleep(60)  # torch raises here; after a fork, logging would stay locked for all other threads

    more = {"train": {"dataloader_num_workers": 2}}
    with pytest.raises(UsageError, match=r"^a data worker has died \(.*dataloader_num_workers=0"):
        run(Recipe.make(PRETRAIN, recipe, more), output=tmp_path / "run", progress=kill)
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run") == straight.metrics
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(straight.output))


FAILING = """
import sys
from bertkit.training.recipe import Recipe, read_recipe
from bertkit.training.run import run
from bertkit.tasks import TASKS

def fail(done, total, log):
    if done == 4:
        raise RuntimeError("not bertkit's")

run(Recipe.make(TASKS["pretrain"], read_recipe(sys.argv[1])), output=sys.argv[2], progress=fail)
"""


@pytest.mark.slow
def test_a_program_that_fails_beside_data_workers_ends(recipe, tmp_path):
    """They ignore signals from other processes, but not from their parent."""
    save_recipe(merge(recipe, {"task": "pretrain", "train": {"dataloader_num_workers": 2}}), tmp_path / "recipe.toml")
    command = [sys.executable, "-c", FAILING, tmp_path / "recipe.toml", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: not bertkit's\n")


def test_training_goes_on_from_a_checkpoint(recipe, straight, tmp_path, refused):
    more = {**recipe, "model": {}, "checkpoint": str(straight.output)}
    metrics = run(Recipe.make(PRETRAIN, more), output=tmp_path / "second")
    assert metrics["start_mlm_loss"] == pytest.approx(straight.metrics["mlm_loss"], rel=1e-5)
    assert metrics["mlm_loss"] < straight.metrics["mlm_loss"]
    larger = {"checkpoint": str(straight.output), "model": {"hidden_size": 64}}
    for wrong in (larger, {"model": {}, "checkpoint": str(tmp_path / "nothing")}):
        with refused():
            run(Recipe.make(PRETRAIN, {**recipe, **wrong}), output=tmp_path / "third")


def test_an_encoder_in_half_precision_is_trained_in_full_and_its_new_head_is_reported(recipe, straight, tmp_path):
    BertModel.from_pretrained(straight.output, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(straight.output / name, tmp_path / "half")
    recipe, lines = {**recipe, "model": {}, "checkpoint": str(tmp_path / "half")}, []
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "second", report=lines.append)
    assert {weight.dtype for weight in read_weights(tmp_path / "second").values()} == {torch.float32}
    (line,) = [line for line in lines if line.startswith("randomly initialised, because")]
    assert "cls.seq_relationship.weight" in line


def test_weight_decay_spares_layer_norms_and_biases(recipe, tmp_path):
    """Two runs with negligible gradients: only weight decay changes the weights."""
    still = {"train": {"learning_rate": 0.5, "max_grad_norm": 1e-12, "adam_epsilon": 1.0, "warmup_steps": 0}}
    weights = {}
    for decay in (0.0, 0.01):
        run(Recipe.make(PRETRAIN, recipe, still, {"train": {"weight_decay": decay}}), output=tmp_path / str(decay))
        weights[decay] = read_weights(tmp_path / str(decay))
    for name, weight in weights[0.0].items():
        spared = name.endswith("bias") or "LayerNorm" in name
        assert torch.allclose(weight, weights[0.01][name], rtol=1e-4) == spared, name


@pytest.mark.parametrize(("objective", "head"), [("mlm", "BertForMaskedLM"), ("clm", "BertLMHeadModel")])
def test_the_other_objectives_learn_and_have_heads_of_their_own(recipe, tmp_path, objective, head):
    metrics = run(Recipe.make(PRETRAIN, recipe, {"data": {"objective": objective}}), output=tmp_path / "run")
    assert metrics[f"{objective}_loss"] < metrics[f"start_{objective}_loss"]
    assert "nsp_loss" not in metrics
    config = load_config(str(tmp_path / "run"))
    assert (config.architectures, config.is_decoder) == ([head], objective == "clm")


def test_a_signal_after_the_last_update_stops_too(recipe, straight, tmp_path, monkeypatch):
    """The signal arrives in the final evaluation, after which there is no update to stop at."""
    evaluated = []

    def score(rows):
        evaluated.append(len(rows))
        if len(evaluated) == 3:  # before the first update, after 4, after 8: the last
            os.kill(os.getpid(), signal.SIGTERM)
        return PRETRAIN.score(rows)

    monkeypatch.setitem(TASKS, "pretrain", change_task(PRETRAIN, score=score))
    with pytest.raises(Interrupted) as stop:
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert stop.value.number == signal.SIGTERM
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run") == straight.metrics
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(straight.output))


@pytest.mark.parametrize("task", ["mrpc", "classify"])
def test_rows_that_were_scored_after_the_last_update_are_not_read_again(tmp_path, monkeypatch, task):
    """The answers are those of another pass; numbers need one, because the classifier gets their scale at the end."""
    made = make_glue(tmp_path, task) if task == "mrpc" else make_classify(tmp_path, ["body"], "price")
    read, predict = [], trainer.BertTrainer.predict

    def watch(self, data, *others, **named):
        read.append(data is self.eval_dataset)
        return predict(self, data, *others, **named)

    monkeypatch.setattr(trainer.BertTrainer, "predict", watch)
    train = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"}
    made = Recipe.make(TASKS[task], made, {"start": "random", "train": train})
    metrics = run(made, output=tmp_path / "once")
    assert read.count(True) == (task == "classify")
    monkeypatch.setattr(trainer.BertTrainer, "summarize", lambda self, data: self.predict(data).predictions)
    assert run(made, output=tmp_path / "twice") == metrics
    once, twice = (tmp_path / name / "predictions" / "dev.parquet" for name in ("once", "twice"))
    assert once.read_bytes() == twice.read_bytes()
