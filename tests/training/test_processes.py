"""Several processes, as started by torchrun (gloo, on a CPU): equality with one, a lost process, sharded models."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bertkit.metrics.table import list_names, read_probabilities
from bertkit.tasks.ner import NER
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import read_table
from bertkit.training.recipe import Recipe, merge, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import find_checkpoint, list_checkpoints, read_log
from tests.corpora import write_text
from tests.official import write_checkpoint, write_conll, write_glue, write_reviews
from tests.world import PRETRAIN, make_recipe, read_losses, read_weights, weigh_classes

SMALL = {"batch_size": 8, "precision": "fp32"}
TWO_PHASES = {"phase": [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Eight updates in two phases of a tiny model, without dropout."""
    recipe = merge(make_recipe(write_text(tmp_path_factory.mktemp("text") / "corpus.txt")), TWO_PHASES)
    del recipe["data"]["max_length"]
    return recipe


def start_two(recipe, folder, name, code="", command="pretrain"):
    """Start two processes that train into `folder / name`, optionally after running Python code."""
    save_recipe(recipe, folder / "recipe.toml")
    program = ["-m", "bertkit"]
    if code:
        (folder / "program.py").write_text(f"{code}\nfrom bertkit.cli import main\nmain()\n")
        program = [str(folder / "program.py")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    files = ["--recipe", str(folder / "recipe.toml"), "--output", str(folder / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, *program, *command.split(), *files], env=environment, **pipes)


def train_two(recipe, folder, name, code="", command="pretrain"):
    """Train with two processes to the end, and return their output."""
    with start_two(recipe, folder, name, code, command) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    assert json.loads((folder / name / "environment.json").read_text())["processes"] == 2
    return out


def read_totals(output):
    """Return the total losses of a training log."""
    return [entry["loss"] for entry in read_log(output) if "loss" in entry]


def assert_close_weights(one, other):
    found, expected = read_weights(one), read_weights(other)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        # Adam divides by the root of v: where a gradient is almost zero, rounding decides; hence the absolute part.
        np.testing.assert_allclose(found[name].numpy(), weight.numpy(), rtol=1e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    ("per_device", "most"), [(8, 50), *(pytest.param(size, 0, marks=pytest.mark.slow) for size in (8, 4))]
)
def test_two_processes_do_the_same_as_one(recipe, tmp_path, per_device, most):
    """16 = 2 x 8 = 2 x 2 x 4, in both phases, also in parts by tokens: losses, scores and weights."""
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "one")
    change = {"data": {"max_tokens": most}} if most else {"train": {"per_device_train_batch_size": per_device}}
    out = train_two(merge(recipe, change), tmp_path, "two")
    assert f"(2 x {8 // per_device} x {per_device})" in out
    assert out.count("masked-LM accuracy") == 1, "both processes speak"
    np.testing.assert_allclose(read_losses(tmp_path / "two"), read_losses(tmp_path / "one"), rtol=1e-5)
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
    assert_close_weights(tmp_path / "two", tmp_path / "one")


WEIGHTED = """
from bertkit.tasks import TASKS
rte = TASKS["rte"]
configure = rte.configure
rte.configure = lambda *given: configure(*given) | {"class_weights": [0.001, 0.005]}
"""


@pytest.mark.slow
def test_two_processes_read_windows_as_one_does(tmp_path):
    """Long texts of unequal numbers of windows: losses, and the same scores of all dev rows."""
    data = {"dir": str(write_reviews(tmp_path / "reviews.csv")), "text": ["title", "body"], "label": ["stars"]}
    recipe = SMALL | {
        "checkpoint": str(write_checkpoint(tmp_path / "bert")),
        "data": data | {"long": "mean", "max_length": 12, "doc_stride": 4},
        "train": {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3},
    }
    run(Recipe.make(CLASSIFICATION, recipe), output=tmp_path / "one")
    train_two(recipe, tmp_path, "two", command="classify")
    assert read_totals(tmp_path / "two") == pytest.approx(read_totals(tmp_path / "one"), rel=1e-5)
    one, two = (read_table(tmp_path / name / "predictions" / "dev.parquet") for name in ("one", "two"))
    found, expected = (read_probabilities(rows, list_names(rows)) for rows in (two, one))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_two_processes_weigh_classes_as_one_does(tmp_path):
    """The sum of an update's weights is over both processes; patience ends both after the same update."""
    write_checkpoint(tmp_path / "bert")
    write_glue(tmp_path / "glue")
    whole = weigh_classes([1.0, 5.0])(tmp_path, tmp_path / "one", per_device_train_batch_size=16)
    recipe = merge(read_recipe(tmp_path / "one" / "recipe.toml"), {"train": {"per_device_train_batch_size": 4}})
    train_two(recipe, tmp_path, "two", WEIGHTED, "glue --task rte")
    assert read_totals(tmp_path / "two") == pytest.approx(whole[0], rel=2e-5)
    patient = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 40, "learning_rate": 0.0}
    recipe = merge(recipe, {"patience": 1, "train": patient})
    train_two(recipe, tmp_path, "patient", WEIGHTED, "glue --task rte")
    assert json.loads((tmp_path / "patient" / "metrics.json").read_text())["updates"] == 2


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_and_the_run_can_go_on(recipe, tmp_path):
    recipe = merge(recipe, {"train": {"max_steps": 400, "eval_steps": 400, "save_steps": 400}})
    with start_two(recipe, tmp_path, "two") as process:
        for line in process.stdout:
            if "update " in line:  # without a terminal, after each third
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[-1]), signal.SIGTERM)
                break
        _, err = process.communicate(timeout=120)
    assert err.count("bertkit: stopped after update") == 1, err[-2000:]
    (stopped,) = list_checkpoints(tmp_path / "two")
    assert 400 / 3 <= stopped < 400
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "two")["updates"] == 400, "by one process"


# --- Another number of processes, also because one is lost ------------------------------------------------------------

LOST = """
import os, signal
from bertkit.training import parts

seen = []

def collate(batch):
    seen.append(len(batch))
    # The next batch is fetched before an update.
    if os.environ["RANK"] == "{rank}" and len(seen) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(batch)

take = parts.collate
parts.collate = collate
"""
SPARSE = {"train": {"max_steps": 10, "logging_steps": 4, "eval_strategy": "no", "eval_on_start": False}}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_ends_the_run_and_one_goes_on_where_two_have_been(recipe, tmp_path, rank):
    """The loss of updates 5 to 8 is logged by another number of processes than computed its first half."""
    recipe = merge(recipe, SPARSE)
    straight = run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "straight")
    with start_two(recipe, tmp_path, "two", code=LOST.format(rank=rank)) as process:
        for line in process.stdout:
            if "updates of" in line:
                break
        start = time.monotonic()
        _, err = process.communicate(timeout=120)
    assert time.monotonic() - start < 60, "the other process waited"
    assert process.returncode != 0
    assert "exitcode  : -9" in err, err[-2000:]
    line = "bertkit: another process of this run was lost; the same command continues from its last checkpoint\n"
    assert err.count(line) == 1, err[-2000:]
    assert not re.search(r'File ".*/bertkit/', err), "a traceback"
    assert find_checkpoint(tmp_path / "two", print).name == "checkpoint-6"
    assert not (tmp_path / "two" / "metrics.json").exists()
    metrics = run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "two")
    assert metrics["perplexity"] == pytest.approx(straight["perplexity"], rel=1e-4)
    np.testing.assert_allclose(read_losses(tmp_path / "two"), read_losses(tmp_path / "straight"), rtol=1e-5)


# --- FSDP -------------------------------------------------------------------------------------------------------------

# accelerate shards only on accelerators, although gloo could: make it believe that each process has one.
ACCELERATED = """
from accelerate import PartialState
from accelerate.utils import DistributedType

start = PartialState.__init__

def init(self, *args, **kwargs):
    start(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

PartialState.__init__ = init
"""
HALVES = """
from bertkit.training import callbacks

step_end = callbacks.StopOnSignal.on_step_end

def on_step_end(self, args, state, control, model=None, **kwargs):
    for name, x in model.named_parameters():
        first = -(-len(x) // 2)
        assert len(x.to_local()) == (len(x) - first if args.process_index else first), name
    return step_end(self, args, state, control, model=model, **kwargs)

callbacks.StopOnSignal.on_step_end = on_step_end
"""
FSDP = {"train": {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"]}}}


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 50])
def test_a_sharded_model_learns_the_same(recipe, tmp_path, most):
    """Each of two processes holds half of every parameter; checkpoints and the finished model are whole.

    Parts by tokens are as many in both processes, although their sequences differ in length.
    """
    run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "one")
    recipe = merge(recipe, FSDP, {"data": {"max_tokens": most}})
    train_two(recipe, tmp_path, "two", code=ACCELERATED + HALVES)
    np.testing.assert_allclose(read_losses(tmp_path / "two"), read_losses(tmp_path / "one"), rtol=1e-4)
    for folder in (tmp_path / "two", tmp_path / "two" / "checkpoint-8"):
        assert_close_weights(folder, tmp_path / "one")


@pytest.mark.slow
def test_a_sharded_run_resumes(recipe, tmp_path):
    recipe = merge(recipe, FSDP)
    train_two(recipe, tmp_path, "two", code=ACCELERATED)
    whole = read_totals(tmp_path / "two")
    (tmp_path / "two" / "metrics.json").unlink()
    for path in (tmp_path / "two" / "checkpoint-8", tmp_path / "two" / "model.safetensors"):
        path.rename(path.with_name(f"old-{path.name}"))
    assert "continues after checkpoint-6" in train_two(recipe, tmp_path, "two", code=ACCELERATED)
    np.testing.assert_allclose(read_totals(tmp_path / "two"), whole, rtol=1e-5)


# --- The feature-based approach ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_share_the_features_and_learn_the_same(tmp_path):
    """The first process writes each split's file and the second reads it; the training result does not change."""
    data = {"dir": str(write_conll(tmp_path / "conll")), "features": "sum-all", "max_length": 48}
    recipe = SMALL | {
        "checkpoint": str(write_checkpoint(tmp_path / "start")),
        "data": data | {"features_dir": str(tmp_path / "kept")},
        "model": {"bilstm_hidden_size": 16, "hidden_dropout_prob": 0.0},
        "train": {"max_steps": 24, "learning_rate": 1e-2},
    }
    train_two(recipe | {"task": "ner"}, tmp_path, "two", command="ner")
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    assert len(kept) == 3, "one file per split, and no temporary file"
    run(Recipe.make(NER, recipe), output=tmp_path / "one")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()} == kept
    losses = [read_totals(tmp_path / name) for name in ("two", "one")]
    assert len(losses[0]) == 24
    np.testing.assert_allclose(*losses, rtol=1e-4)
