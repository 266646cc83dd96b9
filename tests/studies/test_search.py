"""A search: its tries, the choice, the last training, kills in between, and a limit of time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from bertkit.errors import UsageError
from bertkit.studies import search as searching
from bertkit.studies import search_sizes
from bertkit.studies.search import SEARCH, Search, describe_search, search_or_train
from bertkit.studies.spec import make_study
from bertkit.studies.trials import Trials, cut_last_line
from bertkit.system.clock import Clock
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training import cost, pace
from bertkit.training.callbacks import Diverged
from bertkit.training.recipe import Recipe, merge, read_recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_glue

RTE = TASKS["rte"]
LAST = "predicting test, 10 sequences"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe whose tries are scored twice before their end."""
    root = tmp_path_factory.mktemp("rte")
    checkpoint = str(write_checkpoint(root / "bert"))
    return {"checkpoint": checkpoint, "precision": "fp32", "data": {"dir": str(write_glue(root / "glue"))}}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(search_sizes, "LEAST_SCORED", 1)
    monkeypatch.setattr(cost, "MATMUL_SECONDS", 0.1)
    monkeypatch.setattr(pace, "END_SECONDS", 2.0)


def read_trials(output):
    """Return the results in study.json, and the scores of the tries."""
    results = json.loads((output / SEARCH / "study.json").read_text(encoding="utf-8"))
    return results, [run["metrics"]["score"] for cell in results["cells"] for run in cell["runs"] if "metrics" in run]


def list_values(output):
    """Return the recipes of the tries."""
    return [row.recipe for row in make_study(read_recipe(output / SEARCH / "study.toml")).rows.values()]


@pytest.fixture(scope="module")
def found(recipe, tmp_path_factory):
    """Search with four tries; return the directory, its metrics and the lines."""
    output, lines = tmp_path_factory.mktemp("search") / "run", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_sizes, "LEAST_SCORED", 1)
        metrics = search_or_train(Recipe.make(RTE, recipe), output=output, trials=4, report=lines.append)
    return output, metrics, lines


def test_the_first_trial_has_the_paper_s_values_and_the_best_is_trained_on_all_of_train(found):
    output, metrics, lines = found
    results, scores = read_trials(output)
    assert (results["runs"], results["finished"]) == (4, True)
    first = list_values(output)[0]
    assert first == {
        "train": {"learning_rate": 2e-5, "num_train_epochs": 3.0},
        "batch_size": 32,
        "preset": "paper",
    }
    whole = [i for i, cell in enumerate(results["cells"]) if "ended after" not in cell["row"]]
    best = max(whole, key=lambda i: (scores[i], -i))
    written = read_recipe(output / "recipe.toml")
    assert {key: written[key] for key in ("batch_size", "preset")} == {
        key: list_values(output)[best][key] for key in ("batch_size", "preset")
    }
    assert written["train"] | list_values(output)[best]["train"] == written["train"]
    assert written["data"]["held_back"] == 0
    assert "pace" not in written
    assert metrics == json.loads((output / "metrics.json").read_text())
    assert "RTE: train 48, dev 18, test 10" in lines
    assert sum(line.startswith("trial ") for line in lines) == 4
    assert not (output / SEARCH / "trial").exists()
    table = (output / SEARCH / "table.md").read_text(encoding="utf-8")
    assert "scored on 12 rows of train that are held back, not on dev" in " ".join(table.split())
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "A search chose the values, by 4 trials on training rows that were held back." in card


def test_a_trial_repeats_from_the_table(found, recipe, tmp_path):
    """The study of the tries has complete recipes: a run of one gives the score in the table."""
    output, _, _ = found
    study = make_study(read_recipe(output / SEARCH / "study.toml"))
    _, scores = read_trials(output)
    again = run(
        Recipe.make(RTE, merge(study.recipe, next(iter(study.rows.values())).recipe)), output=tmp_path / "trial"
    )
    assert again["score"] == scores[0]


def test_the_same_command_repeats_nothing_and_other_searches_are_refused(found, recipe, tmp_path):
    output, metrics, _ = found
    assert search_or_train(Recipe.make(RTE, recipe), output=output, trials=4) == metrics
    other = merge(recipe, {"train": {"learning_rate": 3e-5}})
    with pytest.raises(UsageError, match=r"belongs to another search .*learning_rate"):
        search_or_train(Recipe.make(RTE, other), output=output, trials=4)
    run(Recipe.make(RTE, recipe, {"train": {"max_steps": 1}}), output=tmp_path / "run")
    with pytest.raises(UsageError, match="has a run without a search; name another directory with --output"):
        search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "run", trials=4)


def test_a_killed_search_goes_on_and_finds_the_same(found, recipe, tmp_path, monkeypatch):
    """A kill in the third trial, then SIGTERM in the last training: the trials and the scores are those without."""
    whole, metrics, _ = found
    output, end, count = tmp_path / "run", Trials.end, 0

    def die(self, *args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return end(self, *args)

    monkeypatch.setattr(Trials, "end", die)
    with pytest.raises(KeyboardInterrupt):
        search_or_train(Recipe.make(RTE, recipe), output=output, trials=4)
    with (output / SEARCH / "optuna.log").open("ab") as file:
        file.write(b'{"op_code": 5, "wor')  # a line that was not written completely
    (output / SEARCH / "optuna.log.lock").touch()
    train = Path(recipe["data"]["dir"], "RTE", "train.tsv")
    content = train.read_bytes()
    train.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match=r"search was started with other data \(train\)"):
        search_or_train(Recipe.make(RTE, recipe), output=output, trials=4)
    train.write_bytes(content)

    def stop(done, total, log):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        search_or_train(Recipe.make(RTE, recipe), output=output, trials=4, progress=stop)
    assert search_or_train(Recipe.make(RTE, recipe), output=output, trials=4) == metrics
    assert read_trials(output) == read_trials(whole)
    assert list_values(output) == list_values(whole)


def test_a_run_with_a_budget_needs_one_to_continue_and_a_whole_pace(recipe, tmp_path):
    with pytest.raises(UsageError, match="was started with --budget and is not trained to its end"):
        run(Recipe.make(RTE, recipe, {"pace": []}), output=tmp_path / "run")
    with pytest.raises(UsageError, match="each segment of pace is a first update, a share, and a share per update"):
        run(Recipe.make(RTE, recipe, {"pace": [[0.0, 0.1]]}), output=tmp_path / "run")


def test_given_values_are_not_searched(recipe, tmp_path):
    given = merge(recipe, {"preset": "stable", "batch_size": 16, "train": {"num_train_epochs": 1.0}})
    assert list(Search(Recipe.make(RTE, given), tmp_path, 3, None).list_axes()) == ["train.learning_rate"]
    with pytest.raises(UsageError, match="sets all that would be searched"):
        search_or_train(Recipe.make(RTE, given, {"train": {"learning_rate": 1e-4}}), output=tmp_path / "run", trials=3)
    with pytest.raises(UsageError, match="--search and --budget cannot be combined with held_back; leave it out"):
        search_or_train(Recipe.make(RTE, recipe, {"data": {"held_back": 5}}), output=tmp_path / "run", trials=3)


def test_a_trial_that_diverges_is_a_failure_in_the_table(recipe, tmp_path, monkeypatch):
    trials, lines = [], []

    def diverge(given, *, output, **kwargs):
        if output.name == "trial":
            trials.append(given)
            if len(trials) > 1:
                raise Diverged("the loss is nan after update 3")
        return run(given, output=output, **kwargs)

    monkeypatch.setattr(searching, "run", diverge)
    search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "run", trials=2, report=lines.append)
    results, scores = read_trials(tmp_path / "run")
    assert (results["failed"], len(scores)) == (1, 1)
    assert any(line.endswith(": the loss is nan after update 3, after 0 updates") for line in lines)


def test_a_budget_is_kept_and_its_run_repeats_without_a_clock(recipe, tmp_path):
    limit, begun, lines = 30.0, time.monotonic(), []
    within = {"output": tmp_path / "run", "clock": Clock(limit, begun)}
    metrics = search_or_train(Recipe.make(RTE, recipe), report=lines.append, **within)
    assert limit - 15 <= time.monotonic() - begun <= limit
    written = read_recipe(tmp_path / "run/recipe.toml")
    assert written["train"]["max_steps"] == metrics["updates"] > 1
    assert run(Recipe.make(RTE, written), output=tmp_path / "again") == metrics
    assert read_trials(tmp_path / "run")[0]["runs"] > 1
    assert search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "run", clock=Clock(limit, begun)) == metrics


def test_the_plan_says_what_a_budget_allows(recipe, tmp_path):
    lines = describe_search(Recipe.make(RTE, recipe), tmp_path / "run", 0, Clock(120.0, time.monotonic()))
    assert lines[0].startswith("searching learning_rate, batch_size, preset, num_train_epochs: trials of all updates")
    assert lines[1].startswith("in 2 min 0 s fit about ")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"the time is too short: .* give --budget \d+m or more"):
        describe_search(Recipe.make(RTE, recipe), tmp_path / "run", 0, Clock(1.0, time.monotonic()))


def test_with_all_values_given_it_only_trains_and_without_time_for_test_it_ends(recipe, tmp_path, monkeypatch):
    left, lines = Clock.left, []
    monkeypatch.setattr(Clock, "left", property(lambda self: 0.0 if lines[-1:] == [LAST] else left.fget(self)))
    given = {"preset": "paper", "batch_size": 16, "train": {"num_train_epochs": 1.0, "learning_rate": 1e-4}}
    clock = Clock(20.0, time.monotonic())
    metrics = search_or_train(
        Recipe.make(RTE, recipe, given), output=tmp_path / "run", clock=clock, report=lines.append
    )
    assert "the recipe leaves nothing to search: training with its values" in lines
    assert lines[-1] == "the time is over: test is left out; bertkit predict makes its predictions"
    assert [path.name for path in (tmp_path / "run/predictions").glob("*.tsv")] == ["dev.tsv"]
    assert metrics["updates"] > 0
    assert not (tmp_path / "run/search/study.json").exists()


@pytest.mark.slow
def test_a_budget_is_kept_over_kills(recipe, tmp_path):
    """Two kills in the trials, one in the last training; the time of all processes together counts."""
    limit, spent = 150.0, 0.0
    words = ["glue", "--task", "rte", "--model", recipe["checkpoint"], "--data", recipe["data"]["dir"]]
    command = [sys.executable, "-m", "bertkit", *words, "--set", "precision=fp32", "--budget", f"{limit:.0f}s"]
    last = tmp_path / "run/training_log.jsonl"
    for share in (0.25, 0.45, 0.0, 9.0):  # of the time, after which it is killed; 0: in the last training
        before, begun = spent, time.monotonic()
        process = subprocess.Popen([*command, "--output", "run"], cwd=tmp_path, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (spent > share * limit if share else last.exists()):
            time.sleep(0.02)
            spent = before + time.monotonic() - begun
        killed = process.poll() is None
        process.kill()
        assert process.wait() == (-signal.SIGKILL if killed else 0)
        spent = before + time.monotonic() - begun
    print(f"{spent:.1f} of {limit:.0f} s")
    assert limit - 20 < spent < limit
    again = subprocess.run([sys.executable, "-m", "bertkit", "reproduce", "run"], cwd=tmp_path, capture_output=True)
    assert again.returncode == 0, again.stdout[-2000:]


def test_searches_with_other_seeds_have_other_proposals(tmp_path):
    axes = {"train.learning_rate": FloatDistribution(1e-5, 1e-4, log=True)}

    def propose(seed):
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        rates = []
        for _ in range(4):
            trials = Trials(folder, lower_is_better=False, seed=seed)  # as after a kill
            rates.append(trials.ask(axes, {"train.learning_rate": 5e-5})["train.learning_rate"])
            trials.end(TrialState.COMPLETE, 0.5, 10, "")
        return rates

    one, other = propose(1), propose(2)
    assert one[0] == other[0] == 5e-5
    assert len({*one[1:], *other[1:]}) == 6


@pytest.mark.parametrize(("content", "kept"), [(b"{}\n{", b"{}\n"), (b"{}\n", b"{}\n"), (b"{", b""), (None, None)])
def test_the_end_of_a_journal_that_is_not_complete_is_removed(tmp_path, content, kept):
    path = tmp_path / "optuna.log"
    if content is not None:
        path.write_bytes(content)
    (tmp_path / "optuna.log.lock").touch()
    cut_last_line(path)
    assert (path.read_bytes() if path.exists() else None) == kept
    assert not (tmp_path / "optuna.log.lock").exists()
