"""Two nodes, as two agents of torchrun on this machine: a lost rank, restarts, another number of processes."""

import json

import numpy as np
import pytest

from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, merge, read_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import list_checkpoints
from tests.test_faults import MADE, read_result
from tests.training.kill_ranks import MOMENTS, RESTARTS, Kill, Nodes, finish, kill_rank, strike
from tests.training.test_run import read_losses, write_text

DROPOUT = "hidden_dropout_prob", "attention_probs_dropout_prob"
STILL = tuple(word for name in DROPOUT for word in ("--set", f"model.{name}=0.0"))
UPDATES, SAVED = 24, 10  # of the run, and in the last checkpoint before the kill
SEEDS = range(1, 7)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", documents=80)


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    """Return the files of a run on two nodes that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(folder, text)
    return read_result(folder / MADE)


# The moments between two updates and in a half-written checkpoint; `python -m tests.training.kill_ranks` takes all.
@pytest.mark.parametrize("restarts", [0, RESTARTS])
@pytest.mark.parametrize(("moment", "rank"), [("update", 0), ("checkpoint", 0), ("checkpoint", 1)])
def test_a_lost_rank_costs_nothing_that_is_finished(text, expected, tmp_path, moment, rank, restarts):
    """All others end within a minute with one line, or the agents continue the run; the result is the same."""
    assert rank in MOMENTS[moment]
    kill = Kill(moment, rank, restarts)
    strike(kill, tmp_path / "run", text, expected)
    assert (kill.lost, kill.different, kill.trouble) == ([], [], [])


# --- Another number of processes --------------------------------------------------------------------------------------


def read_seen(folder):
    """Return the sequences of each update, sorted, over all processes that wrote to a folder."""
    updates = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            update, rows = json.loads(line)
            updates.setdefault(update, []).extend(rows)
    return {update: sorted(rows) for update, rows in updates.items()}


def finish_seen(folder, text, name, **given):
    """Run a command to its end, and return the sequences that it has seen of each update."""
    (folder / name).mkdir(parents=True)
    finish(folder, text, environment={"SEEN": str(folder / name)}, **given)
    return read_seen(folder / name)


def change_processes(folder, text, before, after, settings=()):
    """Kill a rank of a run, and continue it with another number of processes; return what both have seen."""
    (folder / "before").mkdir(parents=True)
    rank = max(sum(before) - 1, 0)
    environment = {"KILL": f"update:{rank}:{folder / 'note'}", "SEEN": str(folder / "before")}
    with Nodes(folder, text, before, environment=environment, settings=settings) as nodes:
        kill_rank(Kill("update", rank, 0), nodes)
        assert -1 not in nodes.wait(60)
    assert max(list_checkpoints(folder / MADE)) == SAVED
    return read_seen(folder / "before"), finish_seen(folder, text, "after", counts=after, settings=settings)


@pytest.mark.parametrize(
    ("before", "after"), [((1,), (1, 1)), ((1, 1), (1,)), ((1, 1), (2, 1)), ((2, 2), (1,))], ids=str
)
def test_another_number_of_processes_continues_the_same_run(text, tmp_path, before, after):
    """Without dropout: losses and scores of the run of one process, and its sequences in every update."""
    straight = finish_seen(tmp_path / "straight", text, "all", counts=(1,), settings=STILL)
    assert sorted(straight) == list(range(UPDATES))
    assert {len(rows) for rows in straight.values()} == {12}
    first, second = change_processes(tmp_path / "run", text, before, after, STILL)
    assert all(first[update] == straight[update] for update in range(SAVED))
    assert second == {update: straight[update] for update in range(SAVED, UPDATES)}
    losses = [read_losses(tmp_path / name / MADE) for name in ("run", "straight")]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    apart = np.abs(np.divide(*losses) - 1).max()
    print(f"| {before} | {after} | 0 | same data; losses differ by {apart:.1e} at most |")
    metrics = [json.loads((tmp_path / name / MADE / "metrics.json").read_text()) for name in ("run", "straight")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.parametrize(("before", "after"), [((1, 1), (1,)), ((1,), (1, 1))], ids=str)
def test_another_number_of_processes_with_dropout_sees_the_same_data(text, tmp_path, before, after):
    """Other units are dropped, so the loss is another one, but within the spread over seeds."""
    straight = finish_seen(tmp_path / "straight", text, "all", counts=(1,))
    first, second = change_processes(tmp_path / "run", text, before, after)
    assert all(first[update] == straight[update] for update in range(SAVED))
    assert second == {update: straight[update] for update in range(SAVED, UPDATES)}
    recipe = read_recipe(tmp_path / "straight" / MADE / "recipe.toml")
    losses = []
    for seed in SEEDS:
        changed = merge(recipe, {"train": {"seed": seed}})
        losses.append(run(Recipe.make(TASKS["pretrain"], changed), output=tmp_path / str(seed))["mlm_loss"])
    found = json.loads((tmp_path / "run" / MADE / "metrics.json").read_text())["mlm_loss"]
    mean, sd = np.mean(losses), np.std(losses, ddof=1)
    assert abs(found - mean) < 3 * sd
    print(f"| {before} | {after} | 0.1 | same data; loss {found:.4f}, {mean:.4f} ± {sd:.4f} of {len(losses)} seeds |")
