"""Runs in worker processes: the same results, also after a worker dies."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w

from bertkit.errors import UsageError
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.workers import RunJob, State, do_runs, explain_failure
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe, merge
from tests.studies.test_runner import list_runs, read_result, start_study
from tests.tasks.test_conformance import make_pretraining

PRETRAIN = TASKS["pretrain"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe: four updates of a tiny model with dropout, in fp32."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    small = {"precision": "fp32", "model": dropout, "train": {"logging_steps": 1, "save_steps": 2, "warmup_steps": 0}}
    return merge(make_pretraining(tmp_path_factory.mktemp("workers")), small)


def make_jobs(recipe, folder, seeds, data="", **train):
    recipes = [Recipe.make(PRETRAIN, recipe, {"train": {"seed": seed} | train}) for seed in seeds]
    return [RunJob(some, str(folder / f"seed-{some.train['seed']}"), data) for some in recipes]


class Record:
    """Records the messages of the jobs."""

    def __init__(self):
        self.states, self.lines = {}, []

    def __call__(self, number, news):
        if isinstance(news, str):
            self.lines.append(news)
        else:
            self.states.setdefault(number, []).append(news)

    def end(self, number):
        return self.states[number][-1]


def wait_until(condition, seconds=60):
    """Wait for a condition, and return whether it became true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid):
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def list_children(pid):
    """Return the descendants of a process."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return children + [other for child in children for other in list_children(child)]


def test_a_failure_is_one_line_with_its_place():
    assert explain_failure(UsageError("the loss is nan")) == "the loss is nan"
    try:
        raise RuntimeError("one\n  two " + "x" * 1000)
    except RuntimeError as error:
        reason = explain_failure(error)
    assert reason.startswith("RuntimeError: one two xxx")
    assert "(test_workers.py:" in reason
    assert len(reason) < 400


@pytest.mark.slow
def test_one_process_and_two_and_a_run_of_its_own_give_the_same_bits(recipe, tmp_path):
    """Use one thread each. In one process the second run follows the first; in two, data and task are sent to them."""
    prepared = {"text": prepare(Recipe.make(PRETRAIN, recipe))}  # for seed 42
    here, there, alone = Record(), Record(), Record()
    assert do_runs(make_jobs(recipe, tmp_path / "here", [41, 42]), prepared, here, 1) == 0
    assert do_runs(make_jobs(recipe, tmp_path / "alone", [42]), {}, alone, 1) == 0
    jobs = [*make_jobs(recipe, tmp_path / "there", [41]), *make_jobs(recipe, tmp_path / "there", [42], "text")]
    assert do_runs(jobs, prepared, there, 2) == 0
    assert [there.end(number) for number in (0, 1)] == [here.end(number) for number in (0, 1)]
    assert here.end(1) == alone.end(0)
    assert here.end(1).status == "finished"
    assert here.end(0).metrics != here.end(1).metrics
    assert State("running", 4, 4, here.states[0][-2].loss) == here.states[0][-2] == there.states[0][-2]
    assert any("4 updates of 8 sequences" in line for line in there.lines)
    reading = [line for line in there.lines if line.startswith("reading")]
    assert len(reading) == 1, "a worker that receives the data does not read them"
    for job in jobs:
        assert json.loads((Path(job.output) / "environment.json").read_text())["threads"] == 1
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_only_its_current_run(recipe, tmp_path):
    """The run continues from its checkpoint in another process, and ends with the same bits."""
    straight, record, killed = Record(), Record(), []
    train = {"max_steps": 200, "save_steps": 20}
    do_runs(make_jobs(recipe, tmp_path / "straight", [1, 2, 3, 4], **train), {}, straight, 1)

    def handle(number, news):
        record(number, news)
        busy = [said[-1] for said in record.states.values() if said[-1].status == "running" and said[-1].done > 25]
        if len(busy) == 2 and not killed:
            killed.append(multiprocessing.active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    assert do_runs(make_jobs(recipe, tmp_path / "many", [1, 2, 3, 4], **train), {}, handle, 2) == 0
    assert [record.end(number) for number in range(4)] == [straight.end(number) for number in range(4)]
    assert record.lines.count("its process died (exit code -9); retrying with another worker") == 1
    assert any("continues after checkpoint-" in line for line in record.lines)
    assert not is_running(killed[0])


@pytest.mark.slow
def test_a_run_whose_workers_all_die_fails_and_the_others_go_on(recipe, tmp_path):
    record = Record()

    def handle(number, news):
        record(number, news)
        workers = multiprocessing.active_children()
        if number == 0 and isinstance(news, State) and news.done and len(workers) == 1:  # that of job 1 has ended
            workers[0].kill()

    jobs = [*make_jobs(recipe, tmp_path, [1], max_steps=100_000), *make_jobs(recipe, tmp_path, [2], max_steps=2)]
    assert do_runs(jobs, {}, handle, 2) == 0
    assert record.end(0) == State(
        "failed", reason="its process died (exit code -9) 3 times in a row; memory may be too small"
    )
    assert record.end(1).status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_workers_write_checkpoints(recipe, tmp_path, number):
    definition = {"tasks": ["pretrain"], "recipe": merge(recipe, {"train": {"max_steps": 4000, "save_steps": 4000}})}
    asked = []

    def stop(results):
        busy = [run for run in list_runs(results) if run.get("update", 0) > 5]
        if len(busy) == 2 and not asked:
            asked.append(True)
            os.kill(os.getpid(), number)

    study = make_study(definition | {"seeds": [1, 2, 3]})
    with pytest.raises(Interrupted, match="stopped with 0 of 3 runs done") as stopped:
        run_study(study, output=tmp_path / "study", workers=2, progress=stop)
    assert stopped.value.number == number
    assert len(list((tmp_path / "study").rglob("checkpoint-*/complete"))) == 2
    assert multiprocessing.active_children() == []
    assert [run["status"] for run in list_runs(read_result(tmp_path / "study"))] == ["waiting"] * 3


@pytest.mark.slow
def test_ctrl_c_while_workers_start_is_theirs_at_no_moment(recipe, tmp_path):
    """A terminal sends it to the whole process group while the workers are still importing."""
    definition = {"tasks": ["pretrain"], "recipe": recipe, "seeds": [1, 2]}
    (tmp_path / "study.toml").write_text(tomli_w.dumps(definition))
    command = [sys.executable, "-m", "bertkit", "study", str(tmp_path / "study.toml"), "--workers", "2"]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "study")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert wait_until(lambda: len(list_children(process.pid)) >= 3)  # with the one that tracks resources
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert error == "bertkit: stopped with 0 of 2 runs done; the same command continues\n"


@pytest.mark.slow
def test_workers_end_when_their_study_is_killed(recipe, tmp_path):
    definition = {"tasks": ["pretrain"], "recipe": merge(recipe, {"train": {"max_steps": 100_000}}), "seeds": [1, 2]}
    with start_study(definition, tmp_path, tmp_path / "study", workers=2) as process:
        for line in process.stdout:
            if line.startswith("at ") and int(line.split()[1]) > 20:
                break
        children = list_children(process.pid)
        assert len([pid for pid in children if is_running(pid)]) >= 2
        process.kill()
        assert wait_until(lambda: not any(map(is_running, children)), seconds=10)


# --- Ray --------------------------------------------------------------------------------------------------------------

RAY_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from bertkit.studies.runner import make_study, run_study
killed = []
def list_victims(name):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if name in title.split("\\0")[0]:
                found.append(int(entry.name))
    return sorted(found)
def watch(results):
    runs = [run for cell in results["cells"] for run in cell["runs"]]
    finished = [run for run in runs if run["status"] == "finished"]
    busy = [run for run in runs if run["status"] == "running" and run["update"] > 8]
    if finished and busy and not killed and (victims := list_victims(sys.argv[4])):
        killed.append(victims[0])
        os.kill(victims[0], signal.SIGKILL)
if __name__ == "__main__":
    study = make_study(json.loads(Path(sys.argv[1]).read_text()))
    lines = []
    run_study(study, output=sys.argv[2], workers="ray", report=lines.append, progress=watch)
    Path(sys.argv[3]).write_text(json.dumps({"killed": killed, "lines": lines}))
"""


def run_ray_script(definition, folder, victim):
    """Run a study on a local Ray into ray/, and kill a process of this name when one run is finished."""
    (folder / "study.json").write_text(json.dumps(definition))
    (folder / "script.py").write_text(RAY_SCRIPT)
    files = [str(folder / name) for name in ("script.py", "study.json", "ray", "said.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, *files, victim]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)


def test_a_run_that_the_system_refuses_fails_with_the_remedy():
    line = explain_failure(PermissionError(13, "Permission denied", "a/b"))
    assert line.startswith("a/b cannot be used: Permission denied; change its permissions")


@pytest.mark.slow
def test_ray_loses_a_worker_and_no_finished_run(recipe, tmp_path):
    """Two workers on a local Ray, one of them killed: the same result as one process, and no output."""
    train = {"max_steps": 60, "save_steps": 10}
    definition = {"tasks": ["pretrain"], "recipe": merge(recipe, {"train": train}), "seeds": [1, 2, 3, 4]}
    run_study(make_study(definition), output=tmp_path / "straight")
    done = run_ray_script(definition, tmp_path, "ray::do_on_ray")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads((tmp_path / "said.json").read_text())
    assert len(said["killed"]) == 1
    assert sum("its worker was lost" in line for line in said["lines"]) == 1
    assert read_result(tmp_path / "ray") == read_result(tmp_path / "straight")
    assert (tmp_path / "ray" / "table.md").read_text() == (tmp_path / "straight" / "table.md").read_text()
    assert done.stdout == ""
    assert "ray" not in done.stderr.lower()


@pytest.mark.slow
def test_a_study_whose_ray_is_lost_ends_in_one_line_and_goes_on(recipe, tmp_path):
    """The head is killed after the first run; the same study continues with local workers."""
    train = {"max_steps": 60, "save_steps": 10}
    definition = {"tasks": ["pretrain"], "recipe": merge(recipe, {"train": train}), "seeds": [1, 2, 3, 4]}
    done = run_ray_script(definition, tmp_path, "gcs_server")
    output = tmp_path / "ray"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("bertkit.errors.UsageError: the head of the Ray cluster ")
    finished = {path: path.stat().st_mtime_ns for path in output.rglob("metrics.json")}
    assert 1 <= len(finished) < 4
    results = run_study(make_study(definition), output=output, workers=2)
    assert [run["status"] for cell in results["cells"] for run in cell["runs"]] == ["finished"] * 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.slow
def test_more_than_this_machine_has_is_refused_by_ray(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    definition = {"tasks": ["pretrain"], "recipe": recipe, "num_cpus": 4096}
    with pytest.raises(UsageError, match=r"num_cpus is 4096, but this machine has \d+; lower it, or name a cluster"):
        run_study(make_study(definition), output=tmp_path / "study", workers="ray")
