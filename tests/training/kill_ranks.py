"""Kill single ranks of a pretraining on two nodes at chosen moments, and count what is lost, different or left hanging.

The nodes are two agents of torchrun on this machine. A rank that reaches the moment of its kill stops there, so that
the finished files can be listed before it is killed (SIGKILL). In half of the kills no restarts are allowed: all other
processes have to end within a minute, with one line and without a traceback of bertkit, and the same command continues.
In the other half the agents restart the ranks (--max-restarts), and the run has to go on by itself. Each run ends with
the files of a run that was never killed.

A rank that is killed after the run has finished ("leaving") leaves nothing to do. The agents do not know that: the
others wait for its node for up to ten minutes, without a rank. There the end of the ranks counts, and the agents are
ended.

$ python -m tests.training.kill_ranks [MOMENT ...]
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.runs import list_children, wait_until
from tests.test_faults import MADE, SURROUNDINGS, find_lost, list_differences, list_finished, make_settings, read_result
from tests.training.test_run import write_text

RESTARTS = 2
PATIENCE = 60.0  # seconds in which the loss of a rank must end all others
LINE = "bertkit: another process of this run was lost; the same command continues from its last checkpoint\n"
OURS = re.compile(r'File ".*/bertkit/')  # in a traceback
SETTINGS = (
    *make_settings(precision="fp32", batch_size=12, model__hidden_size=32, model__num_hidden_layers=2),
    *make_settings(model__num_attention_heads=2, model__intermediate_size=64, model__max_position_embeddings=32),
    *make_settings(data__vocab_size=120, data__max_length=32, data__heldout_share=0.2, train__learning_rate=1e-3),
    # The log's interval differs from that of checkpoints, so that some are saved between two lines of the log.
    *make_settings(train__max_steps=24, train__save_steps=5, train__eval_steps=8, train__logging_steps=3),
)

# The program of every rank: `bertkit`, which notes the sequences of each update where SEEN names a folder, and which
# stops at a moment where KILL names it, the rank and a file. The file then holds the number of the process.
PROGRAM = """
import json, os, signal
from pathlib import Path

moment, rank, note = os.environ.get("KILL", ":-1:").split(":")

def stop_at(name, when=lambda *given: True):
    def wrap(inner):
        def outer(*given, **named):
            if moment == name and os.environ["RANK"] == rank and not Path(note).exists() and when(*given):
                Path(f"{note}.new").write_text(str(os.getpid()))
                os.rename(f"{note}.new", note)
                os.kill(os.getpid(), signal.SIGSTOP)
            return inner(*given, **named)
        return outer
    return wrap

def reach(update):
    return lambda trainer, *given: trainer.state.global_step >= update

from bertkit.cli import main
from bertkit.tasks import TASKS
from bertkit.training import processes, run, trainer

task, batches = TASKS["pretrain"], []
task.load = stop_at("reading")(task.load)
task.collate = stop_at("batch", lambda batch: batches.append(1) or len(batches) > 20)(task.collate)
Trainer = trainer.BertTrainer
Trainer.compute_loss = stop_at("update", reach(12))(Trainer.compute_loss)
Trainer.prediction_step = stop_at("evaluation", reach(8))(Trainer.prediction_step)
Trainer._save_rng_state = stop_at("checkpoint", reach(10))(Trainer._save_rng_state)
trainer.mark_complete = stop_at("marking", lambda path: path.name == "checkpoint-10")(trainer.mark_complete)
trainer.rotate_checkpoints = stop_at("rotation", lambda output, update, *_: update >= 15)(trainer.rotate_checkpoints)
run.finish = stop_at("scoring")(run.finish)
run.write_results = stop_at("results")(run.write_results)
processes.leave_processes = stop_at("leaving")(processes.leave_processes)

if seen := os.environ.get("SEEN"):
    take = Trainer.get_batch_samples

    def get_batch_samples(self, *given):
        samples, counts = take(self, *given)
        pairs = [pair for one in samples for pair in zip(one["input_ids"], one["attention_mask"])]
        rows = [ids[mask.bool()].tolist() for ids, mask in pairs]
        with open(f"{seen}/{self.args.process_index}.jsonl", "a") as file:
            file.write(json.dumps([self.state.global_step, rows]) + chr(10))
        return samples, counts

    Trainer.get_batch_samples = get_batch_samples
main()
"""
FINISHED = "leaving"
MOMENTS = {  # moment -> the ranks that reach it
    "reading": (0, 1),
    "batch": (0, 1),
    "update": (0, 1),
    "evaluation": (0, 1),
    "checkpoint": (0, 1),
    "marking": (0,),
    "rotation": (0,),
    "scoring": (0, 1),
    "results": (0,),
    FINISHED: (0, 1),
}


# --- Nodes ------------------------------------------------------------------------------------------------------------


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass
class Nodes:
    """A run whose ranks are started by an agent per node.

    Attributes:
        folder: The directory of the run (MADE) and of its output.
        text: The corpus.
        counts: The number of processes of each node.
        environment: Variables added to those of this process.
        settings: Options added to SETTINGS.
    """

    folder: Path
    text: Path
    counts: Sequence[int] = (1, 1)
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Sequence[str] = ()

    def __enter__(self):
        self.folder.mkdir(exist_ok=True)
        (self.folder / "program.py").write_text(PROGRAM)
        words = ["-m", "torch.distributed.run", "--nnodes", len(self.counts), "--rdzv_backend", "c10d"]
        words += ["--rdzv_endpoint", f"localhost:{find_port()}", "--max_restarts", self.restarts]
        command = ["program.py", "pretrain", "--corpus", self.text, "--output", MADE, *SETTINGS, *self.settings]
        self.agents, self.errors = [], []
        for number, count in enumerate(self.counts):
            self.errors.append(self.folder / f"err-{time.monotonic_ns()}")
            given = [*words, "--node_rank", number, "--nproc_per_node", count, *command]
            with (self.folder / "out").open("a") as out, self.errors[-1].open("w") as err:
                self.agents.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, given)],
                        cwd=self.folder,
                        env=SURROUNDINGS | self.environment,
                        stdout=out,
                        stderr=err,
                    )
                )
        return self

    def __exit__(self, *exception):
        for agent in self.agents:
            numbers = [agent.pid, *list_children(agent.pid)] if agent.poll() is None else []
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            agent.wait()

    def wait(self, seconds=300.0):
        """Wait for the end of all agents and return their exit codes; -1 for those that are still running."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(agent.poll() is None for agent in self.agents):
            time.sleep(0.05)
        return [-1 if agent.poll() is None else agent.returncode for agent in self.agents]

    def wait_for_ranks(self, seconds):
        """Wait for the end of all ranks, and return whether they have ended."""
        return wait_until(lambda: not any(list_children(agent.pid) for agent in self.agents), seconds)

    @property
    def error(self):
        """Return the standard error of all nodes."""
        return "\n".join(path.read_text() for path in self.errors)


def finish(folder, text, **given):
    """Run a command to its end, and check that all agents succeed."""
    with Nodes(folder, text, **given) as nodes:
        assert set(nodes.wait()) == {0}, nodes.error[-4000:]


# --- One kill ---------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """A kill and its outcome.

    Attributes:
        seconds: The time from the kill to the end of the last process.
        lines: How many lines told it.
        lost: Finished files that have disappeared or changed.
        different: Files that differ from those of a run that was never killed.
        trouble: Everything else that should not be.
    """

    moment: str
    rank: int
    restarts: int
    seconds: float = 0.0
    lines: int = 0
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)


def kill_rank(kill, nodes):
    """Wait until the rank has stopped at the moment, kill it, and return what was finished."""
    note = nodes.folder / "note"
    end = time.monotonic() + 180
    while not note.exists():
        if time.monotonic() > end or all(agent.poll() is not None for agent in nodes.agents):
            raise RuntimeError(f"rank {kill.rank} has not reached {kill.moment}: {nodes.error[-4000:]}")
        time.sleep(0.05)
    time.sleep(0.5)  # the others get as far as they can
    finished = list_finished(nodes.folder / MADE)
    os.kill(int(note.read_text()), signal.SIGKILL)
    return finished


def strike(kill, folder, text, expected):
    """Kill a rank of a new run and let the run end; the outcome is noted in `kill`."""
    environment = {"KILL": f"{kill.moment}:{kill.rank}:{folder / 'note'}"}
    with Nodes(folder, text, restarts=kill.restarts, environment=environment) as nodes:
        finished = kill_rank(kill, nodes)
        began = time.monotonic()
        was_finished = kill.moment == FINISHED
        if was_finished:
            codes = [] if nodes.wait_for_ranks(PATIENCE) else [-1]
        else:
            codes = nodes.wait(180 if kill.restarts else PATIENCE)
        kill.seconds, kill.lines = time.monotonic() - began, nodes.error.count(LINE)
    if -1 in codes:
        kill.trouble.append(f"still running after {kill.seconds:.0f} s")
    if OURS.search(nodes.error):
        kill.trouble.append("a traceback")
    if kill.restarts and set(codes) - {0}:
        kill.trouble.append(f"exit codes {codes}")
    if not kill.restarts and not was_finished and not any(codes):
        kill.trouble.append("no exit code tells it")
    if not kill.restarts and kill.lines != (not was_finished):
        kill.trouble.append(f"{kill.lines} lines")
    kill.lost += find_lost(finished, folder / MADE)
    if not kill.restarts or was_finished:
        finish(folder, text)
    kill.different += list_differences(read_result(folder / MADE), expected, processes=2)


def main(*moments):
    """Print the table of kills and their sums."""
    if unknown := set(moments) - set(MOMENTS):
        sys.exit(f"unknown moments {', '.join(unknown)}; expected {', '.join(MOMENTS)}")
    kills = [
        Kill(moment, rank, restarts)
        for moment in moments or MOMENTS
        for rank in MOMENTS[moment]
        for restarts in (0, RESTARTS)
    ]
    with tempfile.TemporaryDirectory() as place:
        text = write_text(Path(place, "text.txt"), documents=80)
        finish(Path(place, "straight"), text)
        expected = read_result(Path(place, "straight") / MADE)
        print("| moment | rank killed | restarts | seconds to the end | lines | lost | different | trouble |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for number, kill in enumerate(kills):
            strike(kill, Path(place, str(number)), text, expected)
            found = [", ".join(names) or "none" for names in (kill.lost, kill.different, kill.trouble)]
            words = (kill.moment, kill.rank, kill.restarts, f"{kill.seconds:.1f}", kill.lines, *found)
            print("|", " | ".join(map(str, words)), "|", flush=True)
    counts = [sum(map(len, lists)) for lists in zip(*((k.lost, k.different, k.trouble) for k in kills), strict=True)]
    print(f"kills: {len(kills)}, lost: {counts[0]}, different: {counts[1]}, other trouble: {counts[2]}")
    return sum(counts)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
