"""Corpus builds and studies on a Ray cluster of three nodes: nodes are lost and join, and the driver is killed.

The head is the machine of the driver and has no core, so all work is done on the other nodes, with a core each. All
share the disk.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bertkit.data.tokenizer import make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.studies.runner import make_study, run_study
from bertkit.training.recipe import merge
from tests.corpora import SCRIPT, list_finished, read_files
from tests.official import write_glue
from tests.runs import list_children, list_tasks, read_run, wait_until
from tests.world import make_pretraining

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.1"]
RAY += ["--object-store-memory", "150000000"]


class Cluster:
    """A Ray cluster of processes on this machine, whose driver works in a folder."""

    def __init__(self, folder):
        self.folder, self.nodes = folder, []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment |= own
        self.log = (folder.parent / f"{folder.name}.log").open("w")
        head = ["--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0", "--include-dashboard", "false"]
        self.head = self.start([*RAY, *head])

    def start(self, command):
        """Start a process and wait until it belongs to the cluster."""
        output = {"stdout": self.log, "stderr": self.log}
        process = subprocess.Popen(command, **output, env=self.environment, cwd="/", start_new_session=True)
        before = self.count_started()
        assert wait_until(lambda: self.count_started() > before or process.poll() is not None, 120)
        assert process.poll() is None, Path(self.log.name).read_text()
        return process

    def count_started(self):
        """Return the number of nodes that have ever joined, with the head."""
        return Path(self.log.name).read_text().count("Ray runtime started.")

    def add(self):
        """Start a node of one core and return its process."""
        self.nodes.append(self.start([*RAY, "--address", self.address, "--num-cpus", "1"]))
        return self.nodes[-1]

    def lose(self):
        """Kill a node that is at work, with all its processes."""
        assert wait_until(lambda: any(list_tasks(node.pid) for node in self.nodes))
        node = next(node for node in self.nodes if list_tasks(node.pid))
        self.nodes.remove(node)
        kill(node)

    def drive(self, command):
        """Start a driver."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = self.environment | {"RAY_ADDRESS": self.address}
        return subprocess.Popen([sys.executable, *map(str, command)], env=environment, cwd=self.folder, **pipes)

    def close(self):
        for process in (*self.nodes, self.head):
            kill(process)
        self.log.close()


def kill(process):
    """Kill a process and its descendants."""
    for number in [process.pid, *list_children(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


@pytest.fixture
def start_cluster():
    """Return a function that starts a cluster of three nodes."""
    clusters = []

    def start(folder):
        clusters.append(cluster := Cluster(folder))
        for _ in range(3):
            cluster.add()
        return cluster

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Return the driver's folder, with a corpus of 80 pieces built by one process in built/."""
    folder = tmp_path_factory.mktemp("driver")
    draw = np.random.default_rng(0)
    with (folder / "texts.txt").open("w") as stream:
        for _ in range(1300):  # documents of words that hardly ever repeat, so that tokenizing them takes long
            words = [f"{number:x}" for number in draw.integers(1 << 32, size=1000).tolist()]
            lines = [" ".join(words[start : start + 20]) + ".\n" for start in range(0, 1000, 20)]
            stream.write("".join(lines) + "\n")
    with (folder / "texts.txt").open() as stream:
        tokens = train_vocabulary([stream.readline() for _ in range(200)], size=500)
    save_tokenizer(make_tokenizer(tokens, cased=False), folder / "vocab")
    (folder / "script.py").write_text(SCRIPT.format(piece_bytes=150_000, shard_tokens=50_000, batch=1_000_000))
    build = ["script.py", "corpus", "build", "texts.txt", "--vocab", "vocab", "--output"]
    done = subprocess.run([sys.executable, *build, "built", "--workers", "1"], cwd=folder, check=False, timeout=500)
    assert done.returncode == 0
    return folder, build


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_corpus_is_built_whatever_becomes_of_the_nodes_and_the_driver(driver, start_cluster):
    """Sources are named by relative paths. Each driver loses a node while another one joins."""
    folder, build = driver
    made, cluster = folder / "made", start_cluster(folder)
    with cluster.drive([*build, "made", "--workers", "ray"]) as process:
        assert wait_until(lambda: len(list_finished(made)) > 2 or process.poll() is not None, 300)
        assert process.poll() is None, process.communicate()
        cluster.lose()
        joined, before = cluster.add(), len(list_finished(made))
        assert wait_until(lambda: len(list_finished(made)) > before + 4 and list_tasks(joined.pid), 300)
        process.kill()
    there = list_finished(made)
    with cluster.drive([*build, "made", "--workers", "ray"]) as process:
        assert wait_until(lambda: len(list_finished(made)) > len(there) + 4 or process.poll() is not None, 300)
        cluster.lose()
        cluster.add()
        _, err = process.communicate(timeout=500)
    assert (process.returncode, err) == (0, "")
    assert there.items() <= list_finished(made).items()
    assert read_files(made) == read_files(folder / "built")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_mistake_in_a_source_is_one_line_from_any_node(driver, start_cluster):
    folder, build = driver
    (folder / "latin.txt").write_bytes(b"a line\n" * 400_000 + b"caf\xe9\n")
    cluster = start_cluster(folder)
    command = ["script.py", "corpus", "build", "latin.txt", *build[4:], "latin", "--workers", "ray"]
    with cluster.drive(command) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith("bertkit: latin.txt, line 400001 is not UTF-8 (byte 0xe9 at position 4)")
    assert err.count("\n") == 1


# --- Studies ----------------------------------------------------------------------------------------------------------

UPDATES = 300
STUDY_SCRIPT = """
import json, sys
from pathlib import Path
from bertkit.studies.runner import make_study, run_study
def show(results):
    runs = [run for cell in results.cells for run in cell.runs] + results.pretrainings
    print("at", results.over, max([run.update or 0 for run in runs]), flush=True)
if __name__ == "__main__":
    study = make_study(json.loads(Path("study.json").read_text()))
    say = lambda line: print(line, flush=True)
    run_study(study, output=sys.argv[1], workers=sys.argv[2], report=say, progress=show)
"""


def read_until(process, over=0, update=0):
    """Wait until this number of a study's runs is finished and the fastest has had this update, but not half of all."""
    for line in process.stdout:
        if line.startswith("at "):
            _, done, now = line.split()
            if int(done) >= over and update <= int(now) < UPDATES // 2:
                return
    pytest.fail(process.stderr.read())


def read_study_files(output):
    """Return the files of a study by name, and those of its runs as `read_run` does."""
    runs = [path.parent for path in Path(output).rglob("metrics.json")]
    assert len(runs) == 8
    found = {path.name: path.read_bytes() for path in Path(output).iterdir() if path.is_file()}
    return found | {run.relative_to(output).as_posix(): read_run(run) for run in runs}


def stamp_finished(output):
    """Return the modification time of the results of every finished run."""
    runs = [path.parent for path in Path(output).rglob("metrics.json")]
    paths = [run / name for run in runs for name in ("metrics.json", "recipe.toml", "training_log.jsonl")]
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return the driver's folder with the definition of a study, done without a cluster in one/.

    Six runs start from two pretrainings, also from an earlier update.
    """
    folder = tmp_path_factory.mktemp("study")
    train = {"logging_steps": 5, "warmup_steps": 0, "max_steps": UPDATES, "save_steps": 10}
    settings = {"precision": "fp32", "train": train}
    data = {"dir": str(write_glue(folder / "glue")), "max_length": 40}
    definition = {
        "column": [{"name": "RTE", "task": "rte"}],
        "seeds": [1, 2],
        "pretrain": merge(make_pretraining(folder), settings, {"train": {"eval_steps": 150}}),
        "recipe": merge(settings, {"batch_size": 8, "data": data, "train": {"learning_rate": 1e-3}}),
        "row": [
            {"name": "BERT"},
            {"name": "BERT, 100", "step": 100},
            {"name": "MLM", "pretrain": {"data": {"objective": "mlm"}}},
        ],
    }
    (folder / "study.json").write_text(json.dumps(definition))
    (folder / "script.py").write_text(STUDY_SCRIPT)
    assert run_study(make_study(definition), output=folder / "made").failed == 0
    (folder / "made").rename(folder / "one")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study_is_done_whatever_becomes_of_the_nodes_and_the_driver(study, start_cluster):
    """A node is lost in the pretrainings and one in the runs that start from them; the driver dies in between."""
    cluster, made = start_cluster(study), study / "made"
    with cluster.drive(["script.py", made, "ray"]) as process:
        read_until(process, update=60)
        cluster.lose()
        joined = cluster.add()
        assert wait_until(lambda: list_tasks(joined.pid), 120)
        read_until(process, over=3)
        process.kill()
    there = stamp_finished(made)
    assert len(there) >= 3 * 3
    with cluster.drive(["script.py", made, "ray"]) as process:
        read_until(process, over=4, update=60)
        cluster.lose()
        cluster.add()
        out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert out.count("its process has ended (SIGKILL); starting it again") == 1
    assert there.items() <= stamp_finished(made).items()
    assert any("continues after checkpoint-" in path.read_text() for path in made.rglob("*.log"))
    assert read_study_files(made) == read_study_files(study / "one")
