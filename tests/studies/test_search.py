"""A search: its trials, the choice, the last training, kills in between, and a limit of time."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState, create_trial

from bertkit.errors import UsageError
from bertkit.studies import search, start
from bertkit.studies.search import SEARCH, TRIALS_FILE, Plan, Search, search_or_train
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.clock import Clock
from bertkit.training.costs import Measured
from bertkit.training.preset import settle
from bertkit.training.recipe import ADAPTED, Recipe, load_recipe, merge, read_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import read_metrics
from tests.official import write_checkpoint, write_glue

RTE = TASKS["rte"]
ROWS = 48  # training rows of `write_glue`


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return what a person gives."""
    root = tmp_path_factory.mktemp("rte")
    checkpoint = str(write_checkpoint(root / "bert"))
    return {"checkpoint": checkpoint, "precision": "fp32", "data": {"dir": str(write_glue(root / "glue"))}}


def list_trials(output):
    """Return the recipes of the trials, and their scores."""
    folder = output / SEARCH
    numbers = range(1, 1 + len(list(folder.glob("recipes/trial-*.toml"))))
    scores = [folder / f"trial-{number}/metrics.json" for number in numbers]
    scores = [read_metrics(path)["score"] if path.exists() else None for path in scores]
    return [read_recipe(folder / f"recipes/trial-{number}.toml") for number in numbers], scores


def make_search(recipe, output, clock=None):
    """Return a search that has opened its journal."""
    preset = {} if "preset" in recipe else {"preset": "auto"}
    found = Search(settle(Recipe.make(RTE, recipe, preset), ROWS), output, 4, clock, ignore)
    found.folder = output
    output.mkdir(exist_ok=True)
    found.open_journal()
    return found


class ShownRuns(start.Runs):
    """Tells of a run at work before it is done."""

    def execute(self):
        self.hear(self.jobs[0].output, start.State("running", 3, 12, 0.5))
        return super().execute()


def test_the_first_trial_has_the_values_of_auto_and_the_best_is_trained_on_all_of_train(
    recipe, tmp_path, here, monkeypatch
):
    monkeypatch.setattr(Search, "score_frozen", lambda search: 0.0)
    monkeypatch.setattr("bertkit.studies.search.Runs", ShownRuns)
    output, lines, moves = tmp_path / "run", [], []
    news = {"report": lines.append, "progress": lambda done, total, log: moves.append((done, total))}
    metrics = search_or_train(Recipe.make(RTE, recipe), output=output, trials=2, **news)
    assert moves.count((3, 12)) == 2, "of each trial"
    trials, scores = list_trials(output)
    assert len(scores) == 2
    first = trials[0]
    auto = settle(Recipe.make(RTE, recipe, {"preset": "auto"}), ROWS).train
    assert [first["train"][key] for key in ADAPTED] == [auto[key] for key in ADAPTED]
    assert (first["batch_size"], first["preset"]) == (32, "auto")
    assert (first["data"]["held_back"], first["baseline"], first["train"]["eval_strategy"]) == (1000, True, "steps")
    best = trials[max(range(2), key=lambda i: (scores[i], -i))]
    written = read_recipe(output / "recipe.toml")
    searched = ("learning_rate", "num_train_epochs")
    assert [written[key] for key in ("batch_size", "preset")] == [best[key] for key in ("batch_size", "preset")]
    assert [written["train"][key] for key in searched] == [best["train"][key] for key in searched]
    assert written["data"]["held_back"] == 0
    assert metrics == json.loads((output / "metrics.json").read_text())
    told = [line for line in lines if line.startswith("trial ")]
    assert (output / SEARCH / TRIALS_FILE).read_text() == "".join(f"- {line}\n" for line in told)
    assert told[0].startswith(
        f"trial 1: learning_rate {auto['learning_rate']:.3g}, batch_size 32, num_train_epochs 20: accuracy "
    )
    assert any(line.startswith("TF-IDF, which a search does not choose: accuracy ") for line in lines)
    assert not list((output / SEARCH).glob("*/model*"))
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "A search chose the values, by 2 trials on training rows that were held back." in card
    # A trial repeats from its recipe; the same command repeats nothing, and others are refused.
    again = run(load_recipe(output / "search/recipes/trial-1.toml"), output=tmp_path / "trial")
    assert again["score"] == scores[0]
    assert search_or_train(Recipe.make(RTE, recipe), output=output, trials=2) == metrics
    other = merge(recipe, {"train": {"learning_rate": 3e-5}})
    with pytest.raises(UsageError, match=r"belongs to another search .*learning_rate"):
        search_or_train(Recipe.make(RTE, other), output=output, trials=2)
    with pytest.raises(UsageError, match="has a run without a search; name another directory with --output"):
        search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "trial", trials=2)


def test_a_solved_head_is_scored_on_the_same_rows_and_chosen_if_it_is_better(recipe, tmp_path, here):
    """A short training at a tiny rate learns nothing; the classes of the texts are easy to separate."""
    given, lines = merge(recipe, {"train": {"learning_rate": 1e-9, "num_train_epochs": 1.0}}), []
    metrics = search_or_train(Recipe.make(RTE, given), output=tmp_path / "run", trials=1, report=lines.append)
    folder = tmp_path / "run" / SEARCH / "frozen"
    candidate, trial = (load_recipe(tmp_path / "run" / SEARCH / name / "recipe.toml") for name in ("frozen", "trial-1"))
    assert (candidate.freeze, candidate.data) == ("encoder", trial.data)
    score, (other,) = read_metrics(folder / "metrics.json")["score"], list_trials(tmp_path / "run")[1]
    assert score > other
    assert f"a solved head on the frozen encoder, beside the trials: accuracy {100 * score:.1f} %" in lines
    assert lines.count("the solved head is better than the best of 1 trial: solving it on all of train") == 1
    final = load_recipe(tmp_path / "run" / "recipe.toml")
    assert (final.freeze, final.data["held_back"], metrics["updates"]) == ("encoder", 0, 0)
    assert not list((tmp_path / "run" / SEARCH).glob("*/model*"))
    assert search_or_train(Recipe.make(RTE, given), output=tmp_path / "run", trials=1) == metrics
    for change in ({"bilstm": True}, {"reinit_layers": 1}, {"preset": "paper"}):
        assert math.isnan(make_search(merge(recipe, change), tmp_path / str(change)).score_frozen())
    names = Recipe.make(
        TASKS["ner"], {"checkpoint": recipe["checkpoint"], "preset": "auto", "data": {"max_length": 64}}
    )
    assert Search(names, tmp_path, 1, None, ignore).solves_head is False


def test_given_values_are_not_searched(recipe, tmp_path, monkeypatch):
    given = merge(recipe, {"batch_size": 16, "train": {"num_train_epochs": 1.0}})
    assert list(make_search(given, tmp_path).axes) == ["train.learning_rate"]
    whole = Recipe.make(RTE, given, {"train": {"learning_rate": 1e-4}})
    with pytest.raises(UsageError, match="--search and --budget cannot be combined with held_back; leave it out"):
        search_or_train(Recipe.make(RTE, recipe, {"data": {"held_back": 5}}), output=tmp_path / "run", trials=3)
    lines, clock = [], Clock(600.0, time.monotonic())
    metrics = search_or_train(whole, output=tmp_path / "run", clock=clock, report=lines.append)
    assert "the recipe leaves nothing to search: training with its values" in lines
    assert metrics["updates"] == load_recipe(tmp_path / "run/recipe.toml").train["max_steps"] == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="cannot be combined with torchrun or accelerate launch"):
        make_search(given, tmp_path).choose()


class Fake:
    """A process that ends with a code; without one it works until it is told to end."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code

    def terminate(self):
        self.code = 128 + signal.SIGTERM


def end_trials(monkeypatch, write, code=0):
    """Let the process of a trial do nothing but write what the test says, given its directory and output."""
    monkeypatch.setattr(start, "POLL", 0.0)
    monkeypatch.setattr(search, "start_command", lambda words, log, threads: write(Path(words[4]), log) or Fake(code))


def write_score(folder, score):
    """Write the score of a trial."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"score": score}))


def test_a_failed_trial_is_a_line_once_another_is_complete(recipe, tmp_path, monkeypatch):
    """The first trial fails at its first start; the score of the second one is NaN, and the third one fails."""

    def fail(folder, log):
        log.write_text("bertkit: the loss is nan after update 3")

    end_trials(monkeypatch, fail, 2)
    with pytest.raises(UsageError, match=r"trial-1: the loss is nan after update 3"):
        make_search(recipe, tmp_path).do_trial(1)
    found = make_search(recipe, tmp_path)
    end_trials(monkeypatch, lambda folder, log: write_score(folder, 0.5 if folder.name == "trial-1" else math.nan))
    found.do_trial(1)
    found.do_trial(2)
    end_trials(monkeypatch, fail, 2)
    found.do_trial(3)
    ends = [line.rpartition(": ")[2] for line in (tmp_path / TRIALS_FILE).read_text().splitlines()]
    assert ends[1:] == ["the score is nan", "the loss is nan after update 3"]
    states = [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]
    assert [trial.state for trial in found.journal.trials] == states


def test_a_trial_that_is_killed_too_often_says_so(recipe, tmp_path, monkeypatch):
    seen = []
    end_trials(monkeypatch, lambda folder, log: seen.append(folder), -signal.SIGKILL)
    with pytest.raises(UsageError, match=r"trial-1: its process has ended \(SIGKILL\) 4 times; memory may"):
        make_search(recipe, tmp_path).do_trial(1)
    assert len(seen) == 4


@pytest.mark.parametrize("lost", [lambda text: text[:-7], lambda text: text[:-7] + b"\0" * 7, lambda text: b""])
def test_a_journal_that_lost_its_end_is_made_again_from_the_trials(recipe, tmp_path, monkeypatch, lost):
    """The processes of trials end at once, as that of a finished run does."""
    end_trials(monkeypatch, lambda folder, log: write_score(folder, 0.25 * int(folder.name[-1])))
    found = make_search(recipe, tmp_path)
    for number in (1, 2):
        found.do_trial(number)
    path, trials = tmp_path / search.JOURNAL, found.journal.trials
    path.write_bytes(lost(path.read_bytes()))
    again = make_search(recipe, tmp_path)
    assert len(again.study.trials) < 2
    for number in range(len(again.study.trials) + 1, 4):
        again.do_trial(number)
    last = make_search(recipe, tmp_path).study.trials
    assert [(trial.params, trial.value) for trial in last[:2]] == [(trial.params, trial.value) for trial in trials]
    assert last[2].value == 0.75


def test_searches_with_other_seeds_have_other_proposals_and_continued_ones_the_same(recipe, tmp_path, monkeypatch):
    given = merge(recipe, {"batch_size": 32, "train": {"num_train_epochs": 3.0}})

    def propose(seed, starts):
        rates, found = {}, None
        for _ in range(4):
            if starts or not found:
                folder = tmp_path / f"{seed} {starts}"
                found = make_search(merge(given, {"train": {"seed": seed}}), folder)
            end_trials(monkeypatch, lambda *_: None, None)
            found.find_reason = lambda job, trial: rates.update({trial.number: trial.params}) or "worse"
            found.do_trial(len(found.study.trials) + 1)
        assert [trial.state for trial in found.journal.trials] == [TrialState.PRUNED] * 4
        return [params["train.learning_rate"] for params in rates.values()]

    one, other = propose(1, False), propose(2, False)
    assert one[0] == other[0] == settle(Recipe.make(RTE, given, {"preset": "auto"}), ROWS).train["learning_rate"]
    assert len({*one[1:], *other[1:]}) == 6
    assert propose(1, True) == one


@pytest.mark.parametrize(
    ("changes", "row", "limit", "longest", "updates"),
    [
        ({}, 0.0, 1000, 2.0, 8),  # all of them: 4 epochs of 2 updates
        ({}, 0.0, 280, 1.0, 4),  # one trial fits beside the training, and is compared with a solved head
        ({"bilstm": True}, 0.0, 280, None, 0),  # no head is solved, and two trials do not fit
        ({}, 0.0, 215, None, 0),  # one training fits, a trial beside it would if nothing had been spent yet
        ({}, 1.0, 265, None, 0),  # nor would it if the frozen encoder read its rows in no time
        ({"bilstm": True}, 0.0, 120, None, 0),  # one training fits without a reserve
        ({}, 0.0, 120, 1.0, 2),  # it may not fit: half of the time is for a trial
    ],
)
def test_a_clock_decides_how_long_trials_are_and_whether_there_are_any(
    recipe, tmp_path, monkeypatch, changes, row, limit, longest, updates
):
    """Two epochs of 48 rows are 4 updates of 20 s here, a fifth more is counted for each, and 30 s have passed."""
    monkeypatch.setattr("bertkit.studies.search.START_SECONDS", 0.0)
    monkeypatch.setattr("bertkit.studies.search.budget.PROBE_SHARE", 0.0)
    monkeypatch.setattr("bertkit.training.costs.END_SECONDS", 0.0)
    monkeypatch.setattr("bertkit.training.budget.LEAST_UPDATES", 1)
    memory = {"weights": 0, "gradients": 0, "optimizer": 0}
    costs = Measured(48, 0, 0, 32, 20.0, 640.0, [(1.0, 20.0)], row, 1.0, memory)
    monkeypatch.setattr("bertkit.studies.search.costs.measure", lambda *_: costs)
    found = make_search(merge(recipe, changes), tmp_path / "search", Clock(limit, time.monotonic() - 30.0))
    found.recipe = found.recipe.override(train={"num_train_epochs": 2.0})
    assert found.read_plan(None) == (updates > 0)
    if updates:
        assert found.plan.longest == longest
        trial = found.make_trial(found.recipe.override(train={"num_train_epochs": 2.0 * longest}))
        assert trial.train["max_steps"] == updates


def test_the_first_trial_begins_as_long_as_the_last_training_fits(recipe, tmp_path, monkeypatch):
    numbers, found = [], make_search(recipe, tmp_path / "search", Clock(100, time.monotonic()))
    found.most, found.plan = 0, Plan(1.0, 60.0, 90.0, None)
    monkeypatch.setattr(found, "read_plan", lambda prepared: True)
    monkeypatch.setattr(found, "score_frozen", lambda: math.nan)

    def do_trial(number):
        numbers.append(number)
        found.study.add_trial(create_trial(state=TrialState.FAIL))

    monkeypatch.setattr(found, "do_trial", do_trial)
    assert found.find_best(None) == {}
    assert numbers == [1]


@pytest.mark.slow
def test_a_killed_search_goes_on_and_finds_the_same(recipe, tmp_path):
    """Real processes: SIGKILL and SIGTERM in the trials, a trial that dies, and SIGTERM in the last training."""
    words = ["glue", "--task", "rte", "--model", recipe["checkpoint"], "--data", recipe["data"]["dir"], "--search", "3"]
    words += ["--set", "precision=fp32", "--set", "reinit_layers=0"]  # without the solved head, which would be chosen
    command = [sys.executable, "-m", "bertkit", *words, "--output"]
    subprocess.run([*command, "whole"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    for number, waited in (
        (signal.SIGKILL, "search/trial-2/vocab.txt"),
        (signal.SIGTERM, "search/trial-3/vocab.txt"),
        (signal.SIGTERM, "training_log.jsonl"),
        (0, "metrics.json"),
    ):
        process = subprocess.Popen([*command, "run"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and not (tmp_path / "run" / waited).exists():
            time.sleep(0.02)
        if number:
            process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode == {signal.SIGTERM: 143}.get(number, -number), error
    assert list_trials(tmp_path / "run") == list_trials(tmp_path / "whole")
    assert read_metrics(tmp_path / "run/metrics.json") == read_metrics(tmp_path / "whole/metrics.json")
    for name in ("search/trials.md", "recipe.toml"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.slow
def test_a_worse_trial_is_ended_and_a_dead_one_starts_again(recipe, tmp_path, monkeypatch):
    """The fourth trial is told to end by its log; the first one dies once."""
    output, lines, begin, seen = tmp_path / "run", [], search.start_command, []

    def follow(words, log, threads):
        process = begin(words, log, threads)
        seen.append(log.stem)
        if seen == ["trial-1"]:
            process.kill()
        return process

    monkeypatch.setattr(search, "start_command", follow)
    monkeypatch.setattr("optuna.trial.Trial.should_prune", lambda trial: len(seen) == 3)
    search_or_train(Recipe.make(RTE, recipe), output=output, trials=2, report=lines.append)
    assert seen == ["trial-1", "trial-1", "trial-2"]
    assert any("trial 1: its process has ended (SIGKILL); starting it again" in line for line in lines)
    assert next(line for line in lines if line.startswith("trial 2")).endswith(
        "worse than the median of the other trials"
    )


@pytest.mark.slow
def test_a_budget_is_kept_over_kills(recipe, tmp_path):
    """Two kills in the trials; the time of all processes together counts."""
    limit, spent = 240.0, 0.0
    words = ["glue", "--task", "rte", "--model", recipe["checkpoint"], "--data", recipe["data"]["dir"]]
    command = [sys.executable, "-m", "bertkit", *words, "--set", "precision=fp32", "--budget", f"{limit:.0f}s"]
    for share in (0.15, 0.4, 9.0):  # of the time, after which it is killed
        before, begun = spent, time.monotonic()
        process = subprocess.Popen([*command, "--output", "run"], cwd=tmp_path, stdout=subprocess.DEVNULL)
        while process.poll() is None and spent <= share * limit:
            time.sleep(0.02)
            spent = before + time.monotonic() - begun
        killed = process.poll() is None
        process.kill()
        assert process.wait() == (-signal.SIGKILL if killed else 0)
        spent = before + time.monotonic() - begun
    print(f"{spent:.1f} of {limit:.0f} s")
    assert spent < limit
    again = subprocess.run([sys.executable, "-m", "bertkit", "reproduce", "run"], cwd=tmp_path, capture_output=True)
    assert again.returncode == 0, again.stdout[-2000:]


def test_a_signal_ends_the_trial_and_is_raised(recipe, tmp_path, monkeypatch, here):
    begin = search.start_command

    def stop(words, log, threads):
        os.kill(os.getpid(), signal.SIGTERM)
        return begin(words, log, threads)

    monkeypatch.setattr(search, "start_command", stop)
    with pytest.raises(Interrupted, match="stopped after 0 trials; the same command continues"):
        search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "run", trials=2)
    assert Path(tmp_path / "run/search/recipes/trial-1.toml").exists()


def test_the_extra_is_named_where_optuna_is_missing(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"a search needs Optuna; run pip install -e '\.\[search\]'"):
        search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "run", trials=1)
