"""Another number of processes, on one node or two, continues a run: the same sequences in every update."""

import json
import signal
from functools import cache

import numpy as np
import pytest

from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, merge, read_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import list_checkpoints
from tests.corpora import write_text
from tests.kills import MADE, Command, Victim
from tests.world import read_losses

STILL = " model.hidden_dropout_prob=0.0 model.attention_probs_dropout_prob=0.0"
UPDATES = 24
WORDS = (
    "PLACE/program.py pretrain --corpus PLACE/text.txt --output made precision=fp32 batch_size=12 model.hidden_size=32 "
    "model.num_hidden_layers=2 model.num_attention_heads=2 model.intermediate_size=64 model.max_position_embeddings=32 "
    "data.vocab_size=120 data.max_length=32 data.heldout_share=0.2 train.learning_rate=1e-3 "
    f"train.max_steps={UPDATES} train.save_steps=5 train.eval_steps=8 train.logging_steps=3"
)

# The program of every process: `bertkit`, which notes the sequences of each update in the folder SEEN.
PROGRAM = """
import json, os
from bertkit.cli import main
from bertkit.training.trainer import BertTrainer

def get_batch_samples(self, *given, take=BertTrainer.get_batch_samples):
    samples, counts = take(self, *given)
    pairs = [pair for one in samples for pair in zip(one["input_ids"], one["attention_mask"])]
    rows = [ids[mask.bool()].tolist() for ids, mask in pairs]
    with open(f"{os.environ['SEEN']}/{self.args.process_index}.jsonl", "a") as file:
        file.write(json.dumps([self.state.global_step, rows]) + chr(10))
    return samples, counts

BertTrainer.get_batch_samples = get_batch_samples
main()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_text(folder / "text.txt", documents=80)
    (folder / "program.py").write_text(PROGRAM)
    return folder


def start(place, folder, name, nodes, words=WORDS):
    """Start a command whose processes note the sequences that they see in `folder / name`."""
    (folder / name).mkdir(parents=True)
    return Victim(Command(name, words, nodes=nodes), place, folder, {"SEEN": str(folder / name)})


def read_seen(folder):
    """Return the sequences of each update, sorted, over all processes that wrote to a folder."""
    updates = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            update, rows = json.loads(line)
            updates.setdefault(update, []).extend(rows)
    return {update: sorted(rows) for update, rows in updates.items()}


@pytest.fixture(scope="module")
def straight(place, tmp_path_factory):
    """Return the folder of a run of one process with this command, done once, and the sequences of its updates."""

    @cache
    def straight(words):
        folder = tmp_path_factory.mktemp("straight")
        return folder, finish(place, folder, "all", (1,), words)

    return straight


def finish(place, folder, name, nodes, words=WORDS):
    """Run a command to its end, and return the sequences that it has seen of each update."""
    with start(place, folder, name, nodes, words) as command:
        assert command.wait() == 0, command.error[-4000:]
    return read_seen(folder / name)


def change_processes(place, folder, before, after, words, straight):
    """Kill a process of a run, continue it with another number of processes, and check what both have seen."""
    with start(place, folder, "before", before, words) as command:
        while not list_checkpoints(folder / MADE):
            assert command.count(1)
        command.kill(signal.SIGKILL, rank=-1)
    saved = max(list_checkpoints(folder / MADE))
    first, second = read_seen(folder / "before"), finish(place, folder, "after", after, words)
    assert all(first[update] == straight[update] for update in range(saved))
    assert second == {update: straight[update] for update in range(saved, UPDATES)}


@pytest.mark.parametrize(
    ("before", "after"), [((1,), (1, 1)), ((1, 1), (1,)), ((1, 1), (2, 1)), ((2, 2), (1,))], ids=str
)
def test_another_number_of_processes_continues_the_same_run(place, straight, tmp_path, before, after):
    """Without dropout: losses and scores of the run of one process, and its sequences in every update."""
    whole, seen = straight(WORDS + STILL)
    assert {update: len(rows) for update, rows in seen.items()} == dict.fromkeys(range(UPDATES), 12)
    change_processes(place, tmp_path, before, after, WORDS + STILL, seen)
    np.testing.assert_allclose(*(read_losses(folder / MADE) for folder in (tmp_path, whole)), rtol=1e-5)
    metrics = [json.loads((folder / MADE / "metrics.json").read_text()) for folder in (tmp_path, whole)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.parametrize(("before", "after"), [((1, 1), (1,)), ((1,), (1, 1))], ids=str)
def test_another_number_of_processes_with_dropout_sees_the_same_data(place, straight, tmp_path, before, after):
    """Other units are dropped, so the loss is another one, but within the spread over six seeds."""
    whole, seen = straight(WORDS)
    change_processes(place, tmp_path / "run", before, after, WORDS, seen)
    recipe = read_recipe(whole / MADE / "recipe.toml")
    losses = []
    for seed in range(1, 7):
        changed = Recipe.make(TASKS["pretrain"], merge(recipe, {"train": {"seed": seed}}))
        losses.append(run(changed, output=tmp_path / str(seed))["mlm_loss"])
    found = json.loads((tmp_path / "run" / MADE / "metrics.json").read_text())["mlm_loss"]
    assert abs(found - np.mean(losses)) < 3 * np.std(losses, ddof=1)
