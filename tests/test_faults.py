"""Commands that are killed repeatedly lose nothing that was finished, and end like commands that were never killed.

Each row of COMMANDS is a real command with small data. It is killed at moments drawn beforehand (kill -9 and SIGTERM in
turn, half of them at a random time, half as soon as a certain file is written), and each time run again in the same
directory. When it ends by itself, its directory is compared with that of an undisturbed run.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import cycle, islice
from pathlib import Path

import pytest

from bertkit.data.pretraining.store import SHARD_NAME
from bertkit.data.tokenizer import make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.studies.search import JOURNAL
from bertkit.training.run_dir import ALL_RESULTS, COMPLETE, ENVIRONMENT, LOG, METRICS_FILE
from tests.data.pretraining.test_build_faults import SCRIPT
from tests.official import (
    list_questions,
    write_checkpoint,
    write_glue,
    write_questions,
    write_reviews,
    write_squad,
    write_table,
)
from tests.studies.test_workers import list_children
from tests.training.test_run import write_text
from tests.training.test_trainer import TIMINGS, read_curve

SURROUNDINGS = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
MADE = "made"  # the output of a command, in its working directory
CHECKPOINT = re.compile(r"(.*?)checkpoint-(\d+)/.*")
RENEWED = (
    ".png",
    "study.toml",
    "study.json",
    "table.md",
    "folds.json",
    "out_of_fold.csv",
    "out_of_fold.jsonl",
    "out_of_fold.parquet",
    "doctor.json",
    "label_errors.csv",
)  # rewritten, with equal content, by a finished study or doctor
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def make_settings(**settings: object) -> tuple[str, ...]:
    """Return `--set` for each setting; two underscores stand for the dot between a table and its key."""
    return tuple(word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.', 1)}={value}"))


@dataclass(frozen=True)
class Command:
    """A command to kill.

    Attributes:
        arguments: Arguments of Python; PLACE in them is the directory of the data.
        kills: How many kills have to hit it.
        files: Patterns of paths below its output; it is killed when such a file is written.
        processes: More than one if a launcher starts them; SIGTERM goes to the launcher, kill -9 to one of the others.
    """

    name: str
    arguments: tuple[str, ...]
    kills: int
    files: tuple[str, ...]
    processes: int = 1


PRETRAIN = (
    *("-m", "bertkit", "pretrain", "--corpus", "PLACE/text.txt", "--output", MADE),
    *make_settings(precision="fp32", batch_size=16, model__hidden_size=32, model__num_hidden_layers=2),
    *make_settings(model__num_attention_heads=2, model__intermediate_size=64, model__max_position_embeddings=32),
    *make_settings(data__vocab_size=120, data__max_length=32, data__heldout_share=0.2),
    # The log's interval differs from that of checkpoints, so that some are saved between two lines of the log.
    *make_settings(train__max_steps=120, train__save_steps=10, train__eval_steps=20, train__logging_steps=7),
)
SQUAD = (
    *("-m", "bertkit", "squad", "--version", "2", "--data", "PLACE/squad", "--model", "PLACE/bert", "--output", MADE),
    *make_settings(precision="fp32", batch_size=8, data__max_length=40, data__doc_stride=12, data__max_query_length=8),
    *make_settings(train__max_steps=120, train__save_steps=10),
)
GRID = (
    *("-m", "bertkit", "glue", "--task", "rte", "--data", "PLACE/glue", "--model", "PLACE/bert", "--output", MADE),
    *make_settings(precision="fp32", batch_size=8),
    *("--grid", *make_settings(train__learning_rate=[1e-3, 1e-4], train__num_train_epochs=[4.0, 8.0])),
)
SEARCH = (
    *("-m", "bertkit", "glue", "--task", "rte", "--data", "PLACE/glue", "--model", "PLACE/bert", "--output", MADE),
    *("--search", "3", *make_settings(precision="fp32", train__learning_rate=1e-3)),
)
CLASSIFY = (
    *("-m", "bertkit", "classify", "--data", "PLACE/reviews.csv", "--text", "title,body", "--label", "tags"),
    *("--model", "PLACE/bert", "--output", MADE),
    *make_settings(precision="fp32", batch_size=8, data__class_weights="balanced", train__learning_rate=1e-3),
    *make_settings(train__num_train_epochs=8.0, patience=6),
)
NER = (
    *("-m", "bertkit", "ner", "--data", "PLACE/entities.jsonl", "--model", "PLACE/bert", "--output", MADE),
    *make_settings(precision="fp32", batch_size=8, data__max_length=40, train__learning_rate=1e-3),
    *make_settings(train__num_train_epochs=8.0),
)
OWN_SQUAD = (
    *("-m", "bertkit", "squad", "--version", "2", "--data", "PLACE/questions.jsonl", "--model", "PLACE/bert"),
    *("--output", MADE, *SQUAD[SQUAD.index("--set") :]),
)
LONG = (*CLASSIFY, *make_settings(data__long="mean", data__max_length=12, data__doc_stride=4))
DOCTOR = (
    *("-m", "bertkit", "doctor", "PLACE/reviews.csv", "--text", "title,body", "--label", "stars"),
    *("--model", "PLACE/bert", "--folds", "3", "--output", MADE),
    *make_settings(precision="fp32", batch_size=8, train__learning_rate=1e-3, train__num_train_epochs=6.0),
)
CORPUS = (
    *("PLACE/script.py", "corpus", "build", "PLACE/long.txt", "--vocab", "PLACE/vocab", "--output", MADE),
    *("--workers", "2"),
)
RUN = ("vocab.txt", "checkpoint-*", "checkpoint-*/optimizer.pt", ".*", "model.safetensors", "predictions", METRICS_FILE)
COMMANDS = [
    Command("pretrain", PRETRAIN, 16, RUN),
    Command("squad", SQUAD, 12, RUN),
    Command("glue --grid", GRID, 12, (*(f"rte/*/{name}" for name in RUN), "table.md")),
    Command("glue --grid --workers 2", (*GRID, "--workers", "2"), 4, ("rte/*/checkpoint-*", "rte/*/metrics.json")),
    Command(
        "glue --search", SEARCH, 12, ("search/trial-?/vocab.txt", f"search/{JOURNAL}", "search/trials.md", *RUN[1:])
    ),
    Command("classify", CLASSIFY, 8, RUN),
    Command(
        "classify --folds",
        (*CLASSIFY, "--folds", "3"),
        8,
        (*(f"fold-2/classify/{name}" for name in RUN[1:]), "table.md", "out_of_fold.*"),
    ),
    Command("ner", NER, 8, RUN),
    Command(
        "ner --folds",
        (*NER, "--folds", "3"),
        8,
        (*(f"fold-2/ner/{name}" for name in RUN[1:]), "table.md", "out_of_fold.*"),
    ),
    Command("squad of one's own", OWN_SQUAD, 8, (*RUN, "splits*")),
    Command("classify in windows", LONG, 8, RUN),
    Command(
        "doctor --folds",
        DOCTOR,
        8,
        ("*/checkpoint-*", "*/predictions", f"*/{METRICS_FILE}", "table.md", "label_errors*"),
    ),
    Command("corpus build", CORPUS, 8, ("vocab.txt", "shards/.*", "shards/*", "corpus.json")),
    Command(
        "corpus build --deduplicate lines",
        (*CORPUS, "--deduplicate", "lines"),
        8,
        ("parts/.*", "parts/*", "shards/*", "index*"),
    ),
    Command("torchrun pretrain", (*TWO, *PRETRAIN), 4, ("checkpoint-*", "model.safetensors"), processes=2),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with the data of all commands, a tiny BERT with dropout, and `corpus build` with small shards."""
    folder = tmp_path_factory.mktemp("place")
    write_text(folder / "text.txt", documents=120)
    lines = write_text(folder / "long.txt", documents=1200).read_text()
    (folder / "long.txt").write_text(f"{lines}\n{lines[:4000]}")
    save_tokenizer(make_tokenizer(train_vocabulary(lines.splitlines(), size=100), cased=False), folder / "vocab")
    (folder / "script.py").write_text(SCRIPT.format(piece_bytes=24000, shard_tokens=1800, batch=1000))
    write_glue(folder / "glue")
    write_squad(folder / "squad", 2)
    write_questions(folder / "questions.jsonl", list_questions(folder / "squad" / "train-v2.0.json"))
    write_reviews(folder / "reviews.csv", 160)
    rows = [{"tokens": ["good", "bad", f"word{n}"], "ner_tags": ["B-PER", "B-LOC", "O"]} for n in range(160)]
    write_table(folder / "entities.jsonl", rows)
    write_checkpoint(folder / "bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return folder


# --- One attempt ------------------------------------------------------------------------------------------------------


@dataclass
class Victim:
    """A command started in `folder`, which may hold files of earlier ones."""

    command: Command
    place: Path
    folder: Path
    process: subprocess.Popen = field(init=False)
    errors: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        words = [word.replace("PLACE", str(self.place)) for word in self.command.arguments]
        # A separate file: the semaphore tracker of a killed process may still write to the old one.
        self.errors = self.folder / f"err-{time.monotonic_ns()}"
        with (self.folder / "out").open("a") as out, self.errors.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=SURROUNDINGS, stdout=out, stderr=err
            )

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def error(self) -> str:
        """Return its standard error."""
        return self.errors.read_text()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout=300)

    def end(self) -> None:
        """End the process, whatever happened to the test."""
        if not self.is_over:
            for number in [self.process.pid, *list_children(self.process.pid)]:
                os.kill(number, signal.SIGKILL)
            self.process.wait()

    def lurk(self, seconds: float, pattern: str) -> bool:
        """Wait for a new matching file, or for some seconds without a pattern; return whether the process is alive."""
        began, before = time.monotonic(), scan(self.folder / MADE)  # it has not loaded Python yet
        while not self.is_over:
            if not pattern and time.monotonic() - began > seconds:
                return True
            new = scan(self.folder / MADE).items() - before.items()
            if pattern and any(fnmatch(path, pattern) for path, _ in new):
                return True
            time.sleep(0.003)
        return False

    def hurt(self, number: int, draw: random.Random) -> bool:
        """Send a signal, wait for the end and return whether the signal caused it; the message is asserted."""
        catches = catches_sigterm(self.process.pid)
        target = self.process.pid
        if self.command.processes > 1 and number == signal.SIGKILL:
            while len(children := list_children(target)) < self.command.processes and not self.is_over:
                time.sleep(0.01)
            target = draw.choice(children[: self.command.processes] or [target])
        with suppress(ProcessLookupError):  # one of several has just ended
            os.kill(target, number)
        code = self.wait()
        if code == 0:
            return False
        assert not re.search(r'File ".*/bertkit/', self.error), self.error
        if self.command.processes > 1:
            return True  # the rest comes from torchrun
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        elif catches:
            assert code == 128 + signal.SIGTERM, self.error
            assert re.fullmatch(r"bertkit: stopped( after| with|;) .*\n", self.error)
        else:  # it was loading Python, or about to leave
            assert (code, self.error) == (-signal.SIGTERM, "")
        return True


def catches_sigterm(pid: int) -> bool:
    """Return whether the process has a handler for SIGTERM, according to the system."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"SigCgt:\s+([0-9a-f]+)", status)
    return bool(found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


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


# --- Finished files and results ---------------------------------------------------------------------------------------


def list_finished(made: Path) -> dict[str, tuple[int, int]]:
    """Return the files of complete checkpoints, of finished runs except weights, and complete shards."""
    found = scan(made)
    folders = {path.rpartition("/")[0] for path in found if fnmatch(path, f"*checkpoint-*/{COMPLETE}")}
    runs = {path.rpartition("/")[0] for path in found if path.rpartition("/")[2] == METRICS_FILE}
    is_finished = {}
    for path in found:
        folder, _, name = path.rpartition("/")
        if folder.startswith("search/trial-") and "checkpoint-" in path:
            continue  # deleted with the weights when the trial is over
        inside = any(path.startswith(f"{run}/".lstrip("/")) for run in runs) and "checkpoint-" not in path
        of_run = inside and not path.endswith((".safetensors", *RENEWED)) and not name.startswith(".")
        is_finished[path] = folder in folders or of_run or SHARD_NAME.fullmatch(name)
    return {path: found[path] for path, is_whole in is_finished.items() if is_whole}


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
        if new is None and path.startswith("parts/") and (made / "corpus.json").exists():
            continue  # what it was made of
        yield f"{path} is {'gone' if new is None else 'another one'}"


def read_result(made: Path) -> dict[str, object]:
    """Return path -> content that must not depend on the kills.

    Times and places are left out, and checkpoints: which of them are left depends on where the command was stopped.
    """
    result: dict[str, object] = {}
    for path in sorted(made.rglob("*")):
        name = path.relative_to(made).as_posix()
        if not path.is_file() or "checkpoint-" in name or path.name == ENVIRONMENT:
            continue
        if path.suffix == ".log" and path.name != JOURNAL:
            continue  # the output of processes
        if path.name == LOG:
            result[name] = read_curve(path.parent)
        elif path.name == JOURNAL:
            lines = [x for x in map(json.loads, path.read_text().splitlines()) if "params" in x]  # the trials
            result[name] = [{k: v for k, v in x.items() if k != "worker_id" and "datetime" not in k} for x in lines]
        elif path.name == ALL_RESULTS:
            found = json.loads(path.read_text())
            result[name] = [{key: value for key, value in found.items() if not key.endswith(TIMINGS)}]
        else:
            result[name] = path.read_bytes()
    return result


def list_differences(one: dict[str, object], other: dict[str, object], processes: int) -> list[str]:
    """Return the paths that only one of two results has, or that differ.

    Losses of several processes are summed in another order after a stop, so they have to be close, not equal.
    """
    paths = [path for path in sorted(one | other) if one.get(path) != other.get(path)]
    rounded = (LOG, ALL_RESULTS) if processes > 1 else ()
    return [path for path in paths if path not in rounded or not is_close(one, other, path)]


def is_close(one: dict[str, object], other: dict[str, object], path: str) -> bool:
    """Return whether the numbers of two logs are equal up to rounding."""
    logs = one.get(path, []), other.get(path, [])
    same = len(logs[0]) == len(logs[1])
    return same and all(left == pytest.approx(right, rel=1e-5) for left, right in zip(*logs, strict=True))


# --- The sequence -----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """The faults of a command and their outcome."""

    kills: Counter = field(default_factory=Counter)
    starts: int = 0
    ends: int = 0
    lost: list[str] = field(default_factory=list)

    def show(self, name: str, seconds: float) -> str:
        kills = ", ".join(f"{signal.Signals(number).name} {count}" for number, count in sorted(self.kills.items()))
        return (
            f"{name:<34} kills: {kills:<24} starts: {self.starts:<4} ends: {self.ends:<3} "
            f"lost: {'; '.join(self.lost) or 'none'}  ({seconds:.0f} s)"
        )


def deal(command: Command, draw: random.Random) -> list[tuple[int, float, str]]:
    """Return the kills: the signal, the share of a whole run's time, and the file to wait for instead, if any."""
    patterns = list(islice(cycle(command.files), command.kills // 2))
    patterns += [""] * (command.kills - len(patterns))
    signals = list(islice(cycle((signal.SIGKILL, signal.SIGTERM)), command.kills))
    draw.shuffle(patterns)
    draw.shuffle(signals)
    return [(number, draw.uniform(0.02, 0.98), pattern) for number, pattern in zip(signals, patterns, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_killed_at_any_moment_nothing_finished_is_lost_and_the_end_is_the_same(command, place, tmp_path):
    began, draw, tally = time.monotonic(), random.Random(command.name), Tally()
    victim = Victim(command, place, tmp_path / "straight")
    assert victim.wait() == 0, victim.error
    seconds = time.monotonic() - began
    expected = read_result(tmp_path / "straight" / MADE)
    assert len(expected) > 5

    def strike(folder: Path, kill: tuple[int, float, str] | None) -> bool:
        """Return whether a start in this folder was killed; if it finished, its result is compared."""
        number, share, pattern = kill or (0, 0.0, "")
        there = list_finished(folder / MADE)
        victim, tally.starts = Victim(command, place, folder), tally.starts + 1
        try:
            is_hit = bool(kill) and victim.lurk(share * seconds, pattern) and victim.hurt(number, draw)
            code = victim.wait()
        finally:
            victim.end()
        tally.lost += find_lost(there, folder / MADE)
        if is_hit:
            tally.kills[number] += 1
            print(f"  {folder.name} {signal.Signals(number).name:<7} {pattern or f'{share * seconds:.1f} s'}")
            return True
        assert code == 0, victim.error
        assert victim.error == "" or command.processes > 1, victim.error
        tally.ends += 1
        assert list_differences(read_result(folder / MADE), expected, command.processes) == []
        return False

    print()
    folder = tmp_path / "0"
    for number, share, pattern in deal(command, draw):
        for misses in range(4):
            if strike(folder, (number, share / 2**misses, pattern)):
                break
            folder = tmp_path / str(tally.ends)  # the command had finished: the kill is for a new one
        else:
            pytest.fail(f"it ends without {signal.Signals(number).name} {pattern or share}")
    strike(folder, None)
    before = scan(folder / MADE)
    strike(folder, None)
    again = scan(folder / MADE)
    assert [x for x in before if before[x] != again.get(x) and not x.endswith(RENEWED)] == []
    print(tally.show(command.name, time.monotonic() - began))
    assert tally.lost == []
    assert sum(tally.kills.values()) == command.kills
    assert min(tally.kills[number] for number in (signal.SIGKILL, signal.SIGTERM)) >= command.kills // 2


# --- Full disks -------------------------------------------------------------------------------------------------------

# $1 is the room in KiB. A namespace of its own may mount without being root.
FULL_DISK = """
mkdir made && mount -t tmpfs -o size="$1"k none made || exit 70
shift
"$@" >out 2>full
echo $? >codes
mount -o remount,size=2g made
"$@" >>out 2>roomy
echo $? >>codes
cp -r made kept
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", FULL_DISK, "full-disk")


@pytest.mark.slow
@pytest.mark.parametrize("command", [x for x in COMMANDS if x.processes == 1], ids=lambda command: command.name)
def test_a_full_disk_is_one_line_and_the_end_is_the_same_when_there_is_room(command, place, tmp_path):
    straight, draw = Victim(command, place, tmp_path / "straight"), random.Random(command.name)
    assert straight.wait() == 0, straight.error
    made = tmp_path / "straight" / MADE
    expected = read_result(made)
    whole = sum(-(-path.stat().st_size // 4096) * 4 for path in made.rglob("*") if path.is_file())
    for number in range(3):
        room, folder = round(whole * (number + draw.uniform(0.05, 0.95)) / 3), tmp_path / str(number)
        folder.mkdir()
        words = [word.replace("PLACE", str(place)) for word in command.arguments]
        done = subprocess.run(
            [*NAMESPACE, str(room), sys.executable, *words], cwd=folder, env=SURROUNDINGS, check=False
        )
        if done.returncode == 70:
            pytest.skip("file systems cannot be mounted here")
        error = (folder / "full").read_text()
        assert (folder / "codes").read_text().split() == ["2", "0"], error + (folder / "roomy").read_text()
        assert re.fullmatch(r"bertkit: .* the disk is full \(.*\); free some space .*\n", error), error
        assert list_differences(read_result(folder / "kept"), expected, 1) == []


# --- Other faults -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_export_is_incomplete_or_predicts_as_a_whole_one(tmp_path):
    run = write_checkpoint(tmp_path / "run", labels=("yes", "no"), num_hidden_layers=1)
    command = Command("export", ("-m", "bertkit", "export", str(run), "--output", MADE), 8, ())
    draw, outcomes, began = random.Random(command.name), Counter(), time.monotonic()
    straight = Victim(command, tmp_path, tmp_path / "straight")
    assert straight.wait() == 0, straight.error
    seconds = time.monotonic() - began

    def predict(folder: Path) -> object:
        """Return the predictions of an export, or why there are none."""
        try:
            return Predictor(folder / MADE)(["so good", "bad"])
        except UsageError as error:
            return str(error)

    expected, files = predict(tmp_path / "straight"), scan(tmp_path / "straight" / MADE).keys()
    for number in range(command.kills):
        folder = tmp_path / str(number // 4)  # the last two kills of a folder find a complete export there
        if number % 4 == 2:
            again = Victim(command, tmp_path, folder)
            assert again.wait() == 0, again.error
        victim = Victim(command, tmp_path, folder)
        if victim.lurk(draw.uniform(0.6, 1.0) * seconds, ""):
            victim.hurt((signal.SIGKILL, signal.SIGTERM)[number % 2], draw)
        found = predict(folder)
        assert found == expected or not scan(folder / MADE) or "holds an incomplete export; export" in found
        outcomes["whole" if found == expected else "incomplete"] += 1
    print(dict(outcomes))
    for folder in (tmp_path / "0", tmp_path / "1"):
        last = Victim(command, tmp_path, folder)
        assert last.wait() == 0, last.error
        assert predict(folder) == expected
        assert scan(folder / MADE).keys() == files


IMPATIENT = """
from bertkit import cli
from bertkit.training import processes

processes.SECONDS_OF_WAITING = 3.0
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_the_system_has_stopped_is_named_and_goes_on(rank, place, tmp_path):
    (place / "impatient.py").write_text(IMPATIENT)
    command = replace(COMMANDS[-1], arguments=(*TWO, "PLACE/impatient.py", *PRETRAIN[2:]))
    straight = Victim(command, place, tmp_path / "straight")
    assert straight.wait() == 0, straight.error
    assert "has not responded" not in straight.error
    victim = Victim(command, place, tmp_path / "stopped")
    try:
        assert victim.lurk(0.0, "checkpoint-*")
        stopped = list_children(victim.process.pid)[rank]
        os.kill(stopped, signal.SIGSTOP)
        end = time.monotonic() + 60
        while "has not responded" not in victim.error and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(stopped, signal.SIGCONT)
        assert victim.wait() == 0, victim.error
    finally:
        victim.end()
    lines = re.findall(r"^bertkit: process .*$", victim.error, re.MULTILINE)
    assert len(lines) == 1, victim.error
    assert lines[0].startswith(f"bertkit: process {rank} (pid {stopped} on ")
    results = [read_result(tmp_path / name / MADE) for name in ("stopped", "straight")]
    assert list_differences(*results, command.processes) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"RANK": "1"}, "RANK = 1 in the environment means several processes, but .*"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2 in the environment means several processes, but .*"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate asks for bf16 .* and the recipe for fp32; .*"),
    ],
)
def test_environment_variables_of_a_launcher_are_one_line(given, line, place, tmp_path):
    words = [word.replace("PLACE", str(place)) for word in PRETRAIN]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=SURROUNDINGS | given, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"bertkit: {line}\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
