"""Commands that are started to be killed, and what must be the same afterwards."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil
import pytest

from bertkit.data.pretraining.store import SHARD_NAME
from bertkit.training.run_dir import COMPLETE, ENVIRONMENT, LOG, METRICS_FILE
from tests.world import read_curve

# The resource tracker of a killed process warns of the semaphores that it cleans up.
QUIET = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}
SURROUNDINGS = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"} | QUIET
MADE = "made"  # the output of a command, in its working directory
CHECKPOINT = re.compile(r"(.*?)checkpoint-(\d+)/.*")
# Paths that a finished study or doctor writes again, and paths that depend on where a command was stopped: a trial that
# is worse may end before or after it is told to.
RENEWED = re.compile(r".*\.png|(.*/)?((study|folds|doctor)\.\w+|table\.md|label_errors\.csv|out_of_fold\.\w+)")
STOPPED = re.compile(rf".*\.log|search/trial-.*|(.*/)?(recipes/.*|checkpoint-.*|{re.escape(ENVIRONMENT)})")
SPEED = re.compile(r'"tokens_per_second": [\d.e+]+')  # measured by the doctor
LINE = "bertkit: another process of this run was lost; the same command continues from its last checkpoint\n"
PATIENCE = 60.0  # seconds in which the loss of a process must end all others


# --- Finished files and results ---------------------------------------------------------------------------------------


def scan(folder: Path, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Return path -> inode and, for a file, modification time, which identify a version of a file."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has just gone
                status, is_folder = entry.stat(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
                found[prefix + entry.name] = (status.st_ino, 0 if is_folder else status.st_mtime_ns)
                if is_folder:
                    found |= scan(folder / entry.name, f"{prefix}{entry.name}/")
    return found


def list_finished(made: Path) -> dict[str, tuple[int, int]]:
    """Return the files of complete checkpoints, of finished runs except weights, and complete shards.

    The trials of a search are left out: a killed one may begin again.
    """
    found = {path: version for path, version in scan(made).items() if not path.startswith("search/")}
    whole = tuple(path.removesuffix(COMPLETE) for path in found if path.endswith(f"/{COMPLETE}"))
    runs = tuple(path.removesuffix(METRICS_FILE) for path in found if path.rpartition("/")[2] == METRICS_FILE)
    passing = re.compile(rf"{RENEWED.pattern}|{STOPPED.pattern}|(.*/)?\..*|.*\.safetensors")
    return {
        path: version
        for path, version in found.items()
        if (path.startswith(whole) if CHECKPOINT.match(path) else path.startswith(runs) and not passing.fullmatch(path))
        or SHARD_NAME.fullmatch(path.rpartition("/")[2])
    }


def find_lost(before: dict[str, tuple[int, int]], made: Path) -> Iterator[str]:
    """Return the finished files that have disappeared without replacement, or have changed."""
    now = list_finished(made)
    for path, old in before.items():
        if (new := now.get(path)) == old:
            continue
        if new is None and (found := CHECKPOINT.fullmatch(path)):
            run, step = found.groups()
            later = (CHECKPOINT.fullmatch(other) for other in now)
            if f"{run}{METRICS_FILE}" in now or any(x and x[1] == run and int(x[2]) > int(step) for x in later):
                continue  # no longer needed, or rotated
        if new is None and (found := re.fullmatch(r"(.+/)best(/.*)?", path)) and f"{found[1]}{METRICS_FILE}" in now:
            continue  # a study keeps the last model of a finished run
        if new is None and path.startswith("parts/") and (made / "corpus.json").exists():
            continue  # what it was made of
        yield f"{path} is {'gone' if new is None else 'another one'}"


def read_result(made: Path) -> dict[str, object]:
    """Return path -> content that must not depend on the kills.

    Times, speeds and places are left out, and checkpoints: which of them are left depends on where the command was
    stopped.
    """
    result: dict[str, object] = {}
    for path in sorted(made.rglob("*")):
        name = path.relative_to(made).as_posix()
        if not path.is_file() or STOPPED.fullmatch(name):
            continue
        if path.name == LOG:
            result[name] = read_curve(path.parent)
        elif path.name == "doctor.json":
            result[name] = SPEED.sub("", path.read_text())
        else:
            result[name] = path.read_bytes()
    return result


def list_differences(one: dict[str, object], other: dict[str, object], processes: int = 1) -> list[str]:
    """Return the paths that only one of two results has, or that differ.

    Losses of several processes are summed in another order after a stop, so they have to be close, not equal, and the
    picture of them is not compared.
    """
    paths = [path for path in sorted(one | other) if one.get(path) != other.get(path)]
    if processes > 1:
        rounded = {LOG} if is_close(one.get(LOG, []), other.get(LOG, [])) else set()
        return [path for path in paths if path not in rounded and not path.endswith(".png")]
    return paths


def is_close(one: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    """Return whether the numbers of two logs are equal up to rounding."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(left == pytest.approx(right, rel=1e-5) for left, right in pairs)


# --- A command and a start of it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command to kill.

    Attributes:
        words: Arguments of Python, or of torchrun; PLACE is the directory of the data, and KEY=VALUE a --set.
        kills: How many kills have to hit it.
        nodes: The number of processes that torchrun starts on each node, all of them here; empty without torchrun.
        restarts: How often torchrun starts the processes again.
        read: Reads a result from an output directory.
    """

    name: str
    words: str
    kills: int = 1
    nodes: tuple[int, ...] = ()
    restarts: int = 0
    read: Callable[[Path], object] = read_result

    def list_starts(self, place: Path) -> Iterator[list[str]]:
        """Return the command line of each node."""
        words = []
        for word in self.words.replace("PLACE", str(place)).split():
            words += ["--set", word] if "=" in word else [word]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        launch = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}"]
        launch += ["--nnodes", f"{len(self.nodes)}", "--max_restarts", f"{self.restarts}", "--nproc_per_node"]
        yield from ([*launch, f"{count}", *words] for count in self.nodes) if self.nodes else [words]


class Victim:
    """A command started in `folder`, which may hold files of earlier starts."""

    def __init__(self, command: Command, place: Path, folder: Path, given: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.command, self.made = command, folder / MADE
        self.errors = folder / f"err-{time.monotonic_ns()}"
        environment = SURROUNDINGS | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | dict(given or {})
        with (folder / "out").open("a") as out, self.errors.open("a") as err:
            options = {"cwd": folder, "env": environment, "stdout": out, "stderr": err}
            starts = command.list_starts(place)
            self.processes = [subprocess.Popen([sys.executable, *words], **options) for words in starts]

    def __enter__(self) -> "Victim":
        return self

    def __exit__(self, *exception: object) -> None:
        """End the processes, whatever happened to the test."""
        for process in [*self.list_ranks(), *self.processes]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()

    @property
    def error(self) -> str:
        """Return the standard error."""
        return self.errors.read_text()

    def is_over(self) -> bool:
        """Return whether all processes have ended.

        An agent of torchrun waits for a lost one for minutes: one without processes, beside one that ended, is over.
        """
        over = [process.poll() is not None for process in self.processes]
        return all(over) or (any(over) and not self.list_ranks())

    def list_ranks(self) -> list[psutil.Process]:
        """Return the processes that torchrun has started."""
        alive = [psutil.Process(process.pid) for process in self.processes if process.poll() is None]
        return [rank for agent in alive for rank in agent.children()] if self.command.nodes else []

    def wait(self, seconds: float = 300.0) -> int:
        """Wait for the end and return the exit code, of several the first that is not 0."""
        end = time.monotonic() + seconds
        while not self.is_over():
            assert time.monotonic() < end, f"still running after {seconds:.0f} s: {self.error[-4000:]}"
            time.sleep(0.05)
        return next((process.returncode for process in self.processes if process.returncode), 0)

    def count(self, writes: float = inf) -> int:
        """Wait for this number of writes below the output, or for the end, and return how many there were."""
        seen, done = scan(self.made), 0
        while done < writes and not self.is_over():
            now = scan(self.made)
            done += len(now.items() - seen.items())
            seen = now
            time.sleep(0.003)
        return done

    def kill(self, number: int, rank: int = 0) -> bool:
        """Send a signal, and return whether it ended the command; how the command ends is asserted.

        SIGTERM goes to the launchers, kill -9 to one of the processes that they have started.
        """
        ranks = self.list_ranks() if number == signal.SIGKILL else []
        for process in [ranks[rank % len(ranks)]] if ranks else self.processes:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.send_signal(number)
        if (code := self.wait(300.0 if self.command.restarts else PATIENCE)) == 0:
            return bool(self.command.restarts)
        assert not re.search(r'File ".*/bertkit/', self.error), self.error
        if self.command.nodes:  # the rest comes from torchrun
            assert not self.command.restarts, self.error
            if len(self.command.nodes) > 1 and number == signal.SIGKILL and not (self.made / METRICS_FILE).exists():
                assert 0 < self.error.count(LINE) < sum(self.command.nodes), self.error
        elif code > 0:
            assert code == 128 + number, self.error
            assert re.fullmatch(r"bertkit: stopped( after| with|;) .*\n", self.error)
        else:  # SIGTERM while it is about to leave, or kill -9
            assert (code, self.error) == (-number, "")
        return True
