"""Runs as processes: what is started, how states are read, and that neither deaths nor signals change a result."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from bertkit.errors import explain_failure
from bertkit.studies import run_processes
from bertkit.studies.run_processes import RunJob, Runs, State, read_end, read_state, share_gpus, write_command
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_columns
from bertkit.system import cluster
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, load_recipe, merge, save_recipe
from bertkit.training.run import run
from tests.runs import is_running, list_children, list_tasks, read_run, wait_until
from tests.world import make_pretraining, replace_values

PRETRAIN = TASKS["pretrain"]
SURROUNDINGS = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe: four updates of a tiny model with dropout, in fp32."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    small = {"precision": "fp32", "model": dropout, "train": {"logging_steps": 1, "save_steps": 2, "warmup_steps": 0}}
    return merge(make_pretraining(tmp_path_factory.mktemp("start")), small)


def make_job(recipe, folder, name, **train):
    return RunJob(Recipe.make(PRETRAIN, recipe, {"train": train}), str(folder / name))


# --- What is started and read -----------------------------------------------------------------------------------------


def test_a_failure_is_one_line_with_its_place():
    try:
        raise RuntimeError("one\n  two " + "x" * 1000)
    except RuntimeError as error:
        reason = explain_failure(error)
    assert reason.startswith("RuntimeError: one two xxx")
    assert "(test_run_processes.py:" in reason
    assert len(reason) < 400
    line = explain_failure(PermissionError(13, "Permission denied", "a/b"))
    assert line.startswith("a/b cannot be used: Permission denied; change its permissions")


@pytest.mark.parametrize(
    ("gpus", "asked", "shared"),
    [
        ("", None, [[], [], []]),
        ("0,1", None, [["0"], ["1"], ["0"]]),
        ("3,5", 0.5, [["3"], ["3"], ["5"]]),
        ("0,1,2,3", 2, [["0", "1"], ["2", "3"], ["0", "1"]]),
        ("0,1", 0, [[], [], []]),
    ],
)
def test_slots_use_the_gpus_in_turn(monkeypatch, gpus, asked, shared, refused):
    monkeypatch.setattr(run_processes, "list_gpus", lambda: gpus.split(",") if gpus else [])
    assert share_gpus(3, asked) == shared
    with refused():
        share_gpus(3, 5)


def test_a_process_gets_its_recipe_threads_and_gpus(recipe, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(cluster, "Command", lambda words, **options: started.append((words[1:], options)))
    job = RunJob(make_job(recipe, tmp_path, "some/run").recipe, str(tmp_path / "some/run"), (2, 4))
    words = write_command(tmp_path, job)
    saved = tmp_path / "recipes" / "some" / "run.toml"
    assert words == ["run", "--recipe", str(saved), "--output", job.output, "--keep-step", "2", "--keep-step", "4"]
    assert load_recipe(saved) == job.recipe
    cluster.start_command(words, tmp_path / "a.log", 3, ["1"])
    cluster.start_command(words, tmp_path / "b.log", 1, ["0", "2"])
    (one, options), (two, others) = started
    assert one == ["-m", "bertkit", *words]
    assert two[:2] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=2" in two
    assert two[-len(one) :] == one
    assert [options["env"][name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")] == ["3", "1"]
    assert others["env"]["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_the_state_of_a_run_is_in_its_files(recipe, tmp_path):
    job = make_job(recipe, tmp_path, "some/run")
    output = tmp_path / "some" / "run"
    assert read_state(job) == State()
    output.mkdir(parents=True)
    (output / "recipe.toml").touch()
    assert read_state(job) == State("running")
    entries = ['{"eval_loss": 5, "step": 0, "epoch": 0}', '{"loss": 4.5, "step": 3, "epoch": 0.5}', '{"loss": 4']
    (output / "training_log.jsonl").write_text("\n".join(entries))
    assert read_state(job) == State("running", 3, 4, 4.5), "the last line is being written"
    epochs = RunJob(replace_values(job.recipe, train={"max_steps": -1, "num_train_epochs": 3.0}), job.output)
    assert read_state(epochs) == State("running", 3, 18, 4.5)
    (output / "metrics.json").write_text('{"score": 0.5}')
    assert read_state(job) == State("finished", metrics={"score": 0.5})
    (tmp_path / "log").write_text("one\nthe last\n\n")
    assert read_end(tmp_path / "log") == ("", "the last")
    (tmp_path / "log").write_text("one\nbertkit: the line\n====\n")
    assert read_end(tmp_path / "log") == ("the line", "===="), "before the words of torchrun"
    (tmp_path / "log").write_text("bertkit: the cause\nbertkit: stopped after update 3; the same command continues\n")
    assert read_end(tmp_path / "log")[0] == "the cause"
    assert read_end(tmp_path / "none") == ("", "it wrote nothing")


CODES = {"once": [-9, 0], "often": [-9, 137, -9, -9, 0], "wrong": [2, 0], "crash": [1, 1, 1, 1, 0], "whole": [0]}
OUTPUT = {
    2: "bertkit: the disk is full; free some space\n",
    1: "Traceback (most recent call last):\nImportError: torch\n",
}


class Fake:
    """A process that ends with the next of these codes; with 0 it finishes its run."""

    codes = {}

    def __init__(self, words, log, slot):
        output = Path(words[4])
        self.code = self.codes[output.name].pop(0)
        log.write_text(OUTPUT.get(self.code, ""))
        if not self.code:
            output.mkdir(parents=True)
            (output / "metrics.json").write_text('{"score": 1}')

    def poll(self):
        return self.code

    def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_process_that_dies_is_started_again_and_one_that_says_why_is_not(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(run_processes, "POLL", 0.0)
    monkeypatch.setattr(run_processes, "await_note", lambda noted: False)
    monkeypatch.setattr(Fake, "codes", {name: list(codes) for name, codes in CODES.items()})
    said, last = [], {}

    def hear(output, news):
        name = str(Path(output).relative_to(tmp_path))
        if isinstance(news, str):
            said.append(f"{name}: {news}")
        else:
            last[name] = news

    assert Runs(tmp_path, [make_job(recipe, tmp_path, name) for name in CODES], hear, Fake, 2).execute() == 0
    ended = "its process has ended (SIGKILL)"
    again = [f"{name}: {ended}; starting it again" for name in ("often", "often", "often", "once")]
    assert sorted(said) == ["crash: its process has ended (exit code 1); starting it again"] * 3 + again
    failures = {name: state.reason for name, state in last.items() if state.status == "failed"}
    assert failures == {
        "crash": "ImportError: torch",
        "often": f"{ended} 4 times; memory may be too small",
        "wrong": "the disk is full; free some space",
    }
    assert {name for name, state in last.items() if state.status == "finished"} == {"once", "whole"}


# --- Processes --------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from bertkit.studies.runner import make_study, run_study
def show(results):
    runs = [run for cell in results.cells for run in cell.runs]
    updates = [run.update for run in runs if run.status == "running"]
    print("at", results.over, min(updates, default=0), flush=True)
if __name__ == "__main__":
    study = make_study(json.loads(Path(sys.argv[1]).read_text()))
    say = lambda line: print(line, flush=True)
    run_study(study, output=sys.argv[2], workers=sys.argv[3], report=say, progress=show)
"""


def start_study(definition, folder, workers=2):
    """Start a process that runs a study into made/, as a user would."""
    (folder / "study.json").write_text(json.dumps(definition))
    (folder / "script.py").write_text(SCRIPT)
    files = [str(folder / name) for name in ("script.py", "study.json", "made")]
    return subprocess.Popen(
        [sys.executable, *files, str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in SURROUNDINGS.items() if name != "RAY_ADDRESS"},
    )


def read_until(process, over=0, update=0):
    """Read until this number of runs of a study is finished and all running ones have had this update."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("at "):
            done, now = map(int, line.split()[1:])
            if done >= over and now >= update:
                return
    pytest.fail("".join(lines)[-2000:])


def finish_study(process):
    """Return the lines of a study that ends by itself."""
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out[-2000:]
    return out


def define_two(recipe, **train):
    """Return a study of two cells with two seeds each."""
    grid = {"train.learning_rate": [1e-3, 1e-2]}
    return {
        "column": define_columns("pretrain"),
        "recipe": merge(recipe, {"train": train}),
        "seeds": [1, 2],
        "grid": grid,
    }


LONG = {"max_steps": 200, "save_steps": 20}


def read_study_files(output):
    """Return the results of a study and the files of its runs, by name; cards name the directory."""
    found = {name: (output / name).read_bytes() for name in ("study.json", "table.md")}
    for path in output.rglob("metrics.json"):
        files = read_run(path.parent)
        files["README.md"] = files["README.md"].replace(str(output).encode(), b"")
        found[str(path.parent.relative_to(output))] = files
    return found


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """Return the files of a study that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with start_study(define_two(recipe, **LONG), folder) as process:
        out = finish_study(process)
    assert out.count("runs done)") == 4
    assert "starting it again" not in out
    return read_study_files(folder / "made")


@pytest.mark.slow
def test_a_run_of_its_own_has_the_bytes_of_one_in_a_study(recipe, tmp_path):
    study = make_study({"column": define_columns("pretrain"), "recipe": recipe, "seeds": [41, 42], "keep": "all"})
    output = tmp_path / "study" / "pretrain" / "seed-42"
    save_recipe(make_job(recipe, tmp_path, "x", seed=42).recipe.to_dict(), tmp_path / "recipe.toml")
    metrics = run(load_recipe(tmp_path / "recipe.toml"), output=output)
    output.rename(tmp_path / "alone")
    (tmp_path / "study" / "pretrain").rmdir()
    results = run_study(study, output=tmp_path / "study")
    assert results.cells[0].runs[1].metrics == metrics
    assert read_run(output) == read_run(tmp_path / "alone")
    assert json.loads((output / "environment.json").read_text())["threads"] == 1


def has_checkpoint(pid):
    """Return whether this is the process of a run that has written a checkpoint."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return "--output" in words and any(Path(words[words.index("--output") + 1]).glob("checkpoint-*/complete"))


@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again_and_nothing_differs(recipe, tmp_path, whole):
    with start_study(define_two(recipe, **LONG), tmp_path) as process:
        read_until(process, update=30)
        victim = next(child for child in list_children(process.pid) if has_checkpoint(child))
        os.kill(victim, signal.SIGKILL)
        out = finish_study(process)
    assert out.count("its process has ended (SIGKILL); starting it again") == 1
    assert any("continues after checkpoint-" in path.read_text() for path in tmp_path.rglob("*.log"))
    assert not is_running(victim)
    assert read_study_files(tmp_path / "made") == whole


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_processes_write_checkpoints(recipe, tmp_path, whole, number):
    """Ctrl-C goes to the group of the terminal, in which the processes are not."""
    (tmp_path / "study.toml").write_text(tomli_w.dumps(define_two(recipe, **LONG)))
    command = [sys.executable, "-m", "bertkit", "study", tmp_path / "study.toml", "--output", tmp_path / "made"]
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": SURROUNDINGS}
    with subprocess.Popen([*command, "--workers", "2"], start_new_session=True, **words) as process:
        assert wait_until(lambda: len(list(tmp_path.rglob("training_log.jsonl"))) == 2)
        children = list_children(process.pid)
        os.killpg(process.pid, number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error == "bertkit: stopped with 0 of 4 runs done; the same command continues\n"
    assert not any(map(is_running, children))
    assert len(list((tmp_path / "made").rglob("checkpoint-*/complete"))) >= 2
    results = json.loads((tmp_path / "made" / "study.json").read_text())
    assert [run["status"] for cell in results["cells"] for run in cell["runs"]] == ["waiting"] * 4
    with start_study(define_two(recipe, **LONG), tmp_path) as process:
        finish_study(process)
    assert read_study_files(tmp_path / "made") == whole


@pytest.mark.slow
def test_a_study_that_is_killed_leaves_nobody_writing_and_goes_on(recipe, tmp_path, whole):
    for over in (0, 2):
        with start_study(define_two(recipe, **LONG), tmp_path) as process:
            read_until(process, over, update=30)
            children = list_children(process.pid)
            assert len(list(filter(is_running, children))) >= 2
            process.kill()
            assert wait_until(lambda some=children: not any(map(is_running, some)), seconds=10)
        assert not (tmp_path / "made" / "table.md").exists()
        finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("metrics.json")}
    with start_study(define_two(recipe, **LONG), tmp_path) as process:
        finish_study(process)
    assert len(finished) >= 2
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished runs are not repeated"
    assert read_study_files(tmp_path / "made") == whole


@pytest.mark.slow
def test_a_run_on_two_gpus_has_two_processes(recipe, tmp_path, monkeypatch):
    """The GPUs are pretended, so both processes use the CPU."""
    monkeypatch.setattr(run_processes, "list_gpus", lambda: ["0", "1"])
    study = make_study({"column": define_columns("pretrain"), "recipe": recipe, "num_gpus": 2})
    (cell,) = run_study(study, output=tmp_path / "study").cells
    assert cell.runs[0].status == "finished", cell
    assert json.loads((tmp_path / "study" / "pretrain" / "environment.json").read_text())["processes"] == 2


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_ends_the_tasks_of_ray_after_their_checkpoints(recipe, tmp_path):
    with start_study(define_two(recipe, **LONG | {"max_steps": 5000}), tmp_path, "ray") as process:
        read_until(process, update=30)
        process.terminate()
        out, _ = process.communicate(timeout=120)
    assert "stopped with 0 of 4 runs done; the same command continues" in out
    assert len(list((tmp_path / "made").rglob("checkpoint-*/complete"))) >= 2
    logs = [path.read_text() for path in (tmp_path / "made" / "recipes").rglob("*.log")]
    assert any("bertkit: stopped" in log for log in logs), logs


@pytest.mark.slow
def test_ray_loses_a_worker_and_no_finished_run(recipe, tmp_path, whole):
    with start_study(define_two(recipe, **LONG), tmp_path, "ray") as process:
        read_until(process, update=30)
        os.kill(list_tasks(process.pid)[0], signal.SIGKILL)
        out = finish_study(process)
    assert out.count("its process has ended (SIGKILL); starting it again") == 1
    assert read_study_files(tmp_path / "made") == whole
