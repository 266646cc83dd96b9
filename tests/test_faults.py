"""Commands that are killed repeatedly lose nothing that was finished, and end like commands that were never killed.

Each row of COMMANDS is a real command with small data. It is killed at every n-th write to its output (kill -9 and
SIGTERM in turn), and each time run again in the same directory. When it ends by itself, its directory is compared with
that of an undisturbed run.
"""

import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest

from bertkit.data.pretraining.tokenize import CHARACTERS_A_BATCH
from bertkit.data.tokenizer import make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from tests.corpora import SCRIPT, write_text
from tests.kills import (
    MADE,
    RENEWED,
    SURROUNDINGS,
    Command,
    Victim,
    find_lost,
    list_differences,
    list_finished,
    read_result,
    scan,
)
from tests.official import (
    list_questions,
    write_checkpoint,
    write_glue,
    write_questions,
    write_reviews,
    write_squad,
    write_swag,
    write_table,
)


def predict(made: Path) -> dict[str, object]:
    """Return the predictions of an export, or why there are none."""
    try:
        return {"answers": Predictor(made)(["so good", "bad"]), "files": sorted(scan(made))}
    except UsageError as error:
        return {"refusal": str(error)}


def is_whole_or_refused(made: Path, expected: Mapping[str, object]) -> bool:
    """Return whether an export predicts as a complete one, or is named as incomplete, or has not begun."""
    found = predict(made)
    begun = [path for path in scan(made) if not path.startswith(".")]
    return found.get("answers") == expected["answers"] or "incomplete export; export" in found["refusal"] or not begun


# The log's interval differs from that of checkpoints, so that some are saved between two lines of the log.
PRETRAIN = (
    "-m bertkit pretrain --corpus PLACE/text.txt --output made precision=fp32 batch_size=16 model.hidden_size=32 "
    "model.num_hidden_layers=2 model.num_attention_heads=2 model.intermediate_size=64 model.max_position_embeddings=32 "
    "data.vocab_size=120 data.max_length=32 data.heldout_share=0.2 train.max_steps=120 train.save_steps=10 "
    "train.eval_steps=20 train.logging_steps=7"
)
TINY = "--model PLACE/bert --output made precision=fp32 batch_size=8"
SQUAD = f"{TINY} data.max_length=40 data.doc_stride=12 data.max_query_length=8 train.max_steps=120 train.save_steps=10"
RTE = f"-m bertkit glue --task rte --data PLACE/glue {TINY}"
GRID = f"{RTE} --grid train.learning_rate=[1e-3,1e-4] train.num_train_epochs=[4.0,8.0]"
EPOCHS = "train.learning_rate=1e-3 train.num_train_epochs=8.0"
CLASSIFY = (
    f"-m bertkit classify --data PLACE/reviews.csv --text title,body --label tags {TINY} {EPOCHS} patience=6 "
    "train.save_steps=0.2 data.class_weights=balanced"
)
NER = f"-m bertkit ner --data PLACE/entities.jsonl {TINY} {EPOCHS} train.save_steps=0.2 data.max_length=40 start=solved"
DOCTOR = (
    f"-m bertkit doctor PLACE/reviews.csv --text title,body --label stars --folds 3 {TINY} train.learning_rate=1e-3 "
    "train.num_train_epochs=6.0"
)
PYTHON = """
import sys
import warnings

import bertkit
from bertkit.system.signals import Interrupted

if __name__ == "__main__":
    warnings.simplefilter("ignore", bertkit.BertkitWarning)
    named = {"text": ["title", "body"], "label": "stars", "model": "PLACE/bert", "output": "made"}
    rates = {"learning_rate": 1e-3, "num_train_epochs": 8.0, "save_steps": 0.2}
    try:
        bertkit.train("classify", "PLACE/reviews.csv", precision="fp32", batch_size=8, train=rates, **named)
    except Interrupted as stop:
        print(f"bertkit: {stop}", file=sys.stderr)
        sys.exit(128 + stop.number)
    except bertkit.UsageError as error:
        print(f"bertkit: {error}", file=sys.stderr)
        sys.exit(2)
"""
STUDY = """
seeds = [1, 2]
column = [{ name = "stars", task = "classify" }]
row = [{ name = "all" }, { name = "frozen", recipe = { freeze = "encoder" } }]

[recipe]
checkpoint = "PLACE/bert"
precision = "fp32"
batch_size = 8
data = { text = ["title", "body"], label = ["stars"] }
train = { learning_rate = 1e-3, num_train_epochs = 6.0, save_steps = 0.2 }
"""
CORPUS = "PLACE/script.py corpus build PLACE/long.txt --vocab PLACE/vocab --output made --workers 2"
COMMANDS = [
    Command("pretrain", PRETRAIN, 16),
    Command("squad", f"-m bertkit squad --version 2 --data PLACE/squad {SQUAD}", 12),
    Command("glue --grid", GRID, 12),
    Command("glue --grid --workers 2", f"{GRID} --workers 2", 4),
    Command("glue --search", f"{RTE} --search 4 train.num_train_epochs=4.0", 12),
    Command("classify", CLASSIFY, 8),
    Command("classify from a solved head", f"{CLASSIFY} start=solved", 8),
    Command("classify --folds", f"{CLASSIFY} --folds 3", 8),
    Command("ner", NER, 8),
    Command("ner --folds", f"{NER} --folds 3", 8),
    Command("squad of own questions", f"-m bertkit squad --version 2 --data PLACE/questions.jsonl {SQUAD}", 8),
    Command("classify in windows", f"{CLASSIFY} data.long=mean data.max_length=12 data.doc_stride=4", 8),
    Command("swag", f"-m bertkit swag --data PLACE/swag {TINY} {EPOCHS} train.save_steps=0.2 data.max_length=40", 8),
    Command("study", "-m bertkit study PLACE/study.toml --data PLACE/reviews.csv --output made", 8),
    Command("bertkit.train", "PLACE/train.py", 8),
    Command("doctor --folds", DOCTOR, 8),
    Command("corpus build", CORPUS, 8),
    Command("corpus build --deduplicate documents", f"{CORPUS} --deduplicate documents", 8),
    Command("corpus build --deduplicate lines", f"{CORPUS} --deduplicate lines", 8),
    Command("export", "-m bertkit export PLACE/run --output made", 8, read=predict),
    Command("torchrun pretrain", PRETRAIN, 4, nodes=(2,)),
    Command("torchrun pretrain on two nodes", PRETRAIN, 8, nodes=(1, 1)),
    Command("torchrun --max-restarts 2 pretrain", PRETRAIN, 2, nodes=(2,), restarts=2),
    Command("torchrun --max-restarts 2 pretrain on two nodes", PRETRAIN, 2, nodes=(1, 1), restarts=2),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with the data of all commands, tiny BERTs with dropout, and `corpus build` with small shards."""
    folder = tmp_path_factory.mktemp("place")
    write_text(folder / "text.txt", documents=120)
    lines = write_text(folder / "long.txt", documents=1200).read_text()
    (folder / "long.txt").write_text(f"{lines}\n{lines[:4000]}")
    save_tokenizer(make_tokenizer(train_vocabulary(lines.splitlines(), size=100), cased=False), folder / "vocab")
    (folder / "script.py").write_text(SCRIPT.format(piece_bytes=24000, shard_tokens=1800, batch=CHARACTERS_A_BATCH))
    write_glue(folder / "glue")
    write_squad(folder / "squad", 2)
    write_questions(folder / "questions.jsonl", list_questions(folder / "squad" / "train-v2.0.json"))
    write_reviews(folder / "reviews.csv", 160)
    rows = [{"tokens": ["good", "bad", f"word{n}"], "ner_tags": ["B-PER", "B-LOC", "O"]} for n in range(160)]
    write_table(folder / "entities.jsonl", rows)
    write_checkpoint(folder / "bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    write_checkpoint(folder / "run", labels=("yes", "no"), num_hidden_layers=1)
    write_swag(folder / "swag")
    for name, text in (("train.py", PYTHON), ("study.toml", STUDY)):
        (folder / name).write_text(text.replace("PLACE", str(folder)))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_killed_at_every_nth_write_nothing_finished_is_lost_and_the_end_is_the_same(command, place, tmp_path):
    with Victim(command, place, tmp_path / "straight") as victim:
        writes = victim.count()
        assert victim.wait() == 0, victim.error
    every, expected = -(-writes // command.kills), command.read(victim.made)
    kills, starts, folder, lost = 0, 0, tmp_path / "0", []

    def start(writes: float) -> bool:
        """Start the command and kill it after some writes; return whether that hit, or compare the finished result."""
        there = list_finished(folder / MADE)
        number = signal.SIGTERM if kills % 2 and not command.restarts else signal.SIGKILL
        with Victim(command, place, folder) as victim:
            is_hit = victim.count(writes) >= writes and victim.kill(number, rank=kills // 2)
            code = victim.wait()
        lost.extend(find_lost(there, victim.made))
        if is_hit and code:
            assert command.read is read_result or is_whole_or_refused(victim.made, expected)
        else:
            assert code == 0, victim.error
            assert command.nodes or victim.error == "", victim.error
            assert list_differences(command.read(victim.made), expected, sum(command.nodes)) == []
        return is_hit

    while kills < command.kills:
        is_hit, starts = start(every * kills + every // 2 if command.restarts else every + kills), starts + 1
        kills += is_hit
        if command.read is read_result and (command.restarts or not is_hit):  # finished, and not done again
            folder = tmp_path / str(starts)
        assert starts < 4 * command.kills
    start(inf)
    before = scan(folder / MADE)
    start(inf)
    again = scan(folder / MADE)
    changed = [path for path in before if before[path] != again.get(path) and not RENEWED.fullmatch(path)]
    assert changed == [] or command.read is predict
    print(f"\n{command.name}: kills {kills}, starts {starts + 2}, lost {'; '.join(lost) or 'none'}")
    assert lost == []


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
@pytest.mark.parametrize(
    "command", [x for x in COMMANDS if x.read is read_result and not x.nodes], ids=lambda command: command.name
)
def test_a_full_disk_is_one_line_and_the_end_is_the_same_when_there_is_room(command, place, tmp_path):
    with Victim(command, place, tmp_path / "straight") as victim:
        assert victim.wait() == 0, victim.error
    expected, draw = command.read(victim.made), random.Random(command.name)
    whole = sum(-(-path.stat().st_size // 4096) * 4 for path in victim.made.rglob("*") if path.is_file())
    for number in range(3):
        room, folder = round(whole * (number + draw.uniform(0.05, 0.95)) / 3), tmp_path / str(number)
        folder.mkdir()
        words = [*NAMESPACE, str(room), sys.executable, *next(command.list_starts(place))]
        if subprocess.run(words, cwd=folder, env=SURROUNDINGS, check=False).returncode == 70:
            pytest.skip("file systems cannot be mounted here")
        error = (folder / "full").read_text()
        assert (folder / "codes").read_text().split() == ["2", "0"], error + (folder / "roomy").read_text()
        assert re.fullmatch(r"bertkit: .* the disk is full \(.*\); free some space .*\n", error), error
        assert list_differences(command.read(folder / "kept"), expected) == []
