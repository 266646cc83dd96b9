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
from optuna.trial import TrialState

from bertkit.errors import UsageError
from bertkit.studies import run_processes, search
from bertkit.studies.search import SEARCH, TRIALS_FILE, Search, search_or_train
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.clock import Clock
from bertkit.training.costs import Costs
from bertkit.training.facts import describe_rows
from bertkit.training.recipe import ADAPTED, Recipe, load_recipe, merge, read_recipe, resolve
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


def read_end(path):
    """Return the score of a training, also where the run delivers its start."""
    metrics = read_metrics(path)
    return metrics.get("end_score", metrics["score"])


def list_trials(output):
    """Return the recipes of the trials, and their scores."""
    folder = output / SEARCH
    numbers = range(1, 1 + len(list(folder.glob("recipes/trial-*.toml"))))
    scores = [folder / f"trial-{number}/metrics.json" for number in numbers]
    scores = [read_end(path) if path.exists() else None for path in scores]
    return [read_recipe(folder / f"recipes/trial-{number}.toml") for number in numbers], scores


def settle(recipe):
    """Return a recipe with what follows from the number of training rows."""
    return resolve(recipe, describe_rows(recipe, ROWS))


def make_search(recipe, output, clock=None):
    """Return a search that has opened its study."""
    preset = {} if "preset" in recipe else {"preset": "auto"}
    found = Search(settle(Recipe.make(RTE, recipe, preset)), output, 4, clock, ignore)
    found.folder = output
    output.mkdir(exist_ok=True)
    found.open_study()
    return found


class ShownRuns(run_processes.Runs):
    """Tells of a run at work before it is done."""

    def execute(self):
        self.on_state(self.jobs[0].output, run_processes.State("running", 3, 12, 0.5))
        return super().execute()


def test_the_first_trial_has_the_values_of_auto_and_the_best_is_trained_on_all_of_train(
    recipe, tmp_path, here, monkeypatch
):
    monkeypatch.setattr("bertkit.studies.search.Runs", ShownRuns)
    output, lines, moves = tmp_path / "run", [], []
    news = {"report": lines.append, "progress": lambda done, total, log: moves.append((done, total))}
    metrics = search_or_train(Recipe.make(RTE, recipe), output=output, trials=2, **news)
    assert moves.count((3, 12)) == 2, "of each trial"
    trials, scores = list_trials(output)
    assert len(scores) == 2
    first = trials[0]
    auto = settle(Recipe.make(RTE, recipe, {"preset": "auto"})).train
    assert [first["train"][key] for key in ADAPTED] == [auto[key] for key in ADAPTED]
    assert (first["batch_size"], first["preset"]) == (32, "auto")
    assert (first["data"]["trial_rows"], first["baseline"], first["train"]["eval_strategy"]) == (1000, False, "steps")
    best = trials[max(range(2), key=lambda i: (scores[i], -i))]
    written = read_recipe(output / "recipe.toml")
    searched = ("learning_rate", "num_train_epochs")
    assert [written[key] for key in ("batch_size", "preset")] == [best[key] for key in ("batch_size", "preset")]
    assert [written["train"][key] for key in searched] == [best["train"][key] for key in searched]
    assert written["data"]["trial_rows"] == 0
    assert metrics == json.loads((output / "metrics.json").read_text())
    told = [line for line in lines if line.startswith("trial ")]
    assert (output / SEARCH / TRIALS_FILE).read_text() == "".join(f"- {line}\n" for line in told)
    assert told[0].startswith(
        f"trial 1: learning_rate {auto['learning_rate']:.3g}, batch_size 32, num_train_epochs 20: accuracy "
    )
    assert not list((output / SEARCH).glob("*/model*"))
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "A search chose the values, by 2 trials on training rows that were held back." in card
    # A trial repeats from its recipe; the same command repeats nothing, and others are refused.
    again = run(load_recipe(output / "search/recipes/trial-1.toml"), output=tmp_path / "trial")
    assert again == read_metrics(output / "search/trial-1/metrics.json")
    assert read_end(tmp_path / "trial/metrics.json") == scores[0]
    assert search_or_train(Recipe.make(RTE, recipe), output=output, trials=2) == metrics
    other = merge(recipe, {"train": {"learning_rate": 3e-5}})
    with pytest.raises(UsageError, match=r"belongs to another search .*learning_rate"):
        search_or_train(Recipe.make(RTE, other), output=output, trials=2)
    with pytest.raises(UsageError, match="has a run without a search; name another directory with --output"):
        search_or_train(Recipe.make(RTE, recipe), output=tmp_path / "trial", trials=2)


def test_given_values_are_not_searched(recipe, tmp_path, monkeypatch):
    given = merge(recipe, {"batch_size": 16, "train": {"num_train_epochs": 1.0}})
    assert make_search(given, tmp_path).searched == ["train.learning_rate"]
    whole = Recipe.make(RTE, given, {"train": {"learning_rate": 1e-4}})
    with pytest.raises(UsageError, match="--search and --budget cannot be combined with trial_rows; leave it out"):
        search_or_train(Recipe.make(RTE, recipe, {"data": {"trial_rows": 5}}), output=tmp_path / "run", trials=3)
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
    """Let the process of a trial only write what the test says, given its directory and output."""
    monkeypatch.setattr(run_processes, "POLL", 0.0)
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
        make_search(recipe, tmp_path).do_trial()
    found = make_search(recipe, tmp_path)
    end_trials(monkeypatch, lambda folder, log: write_score(folder, 0.5 if folder.name == "trial-1" else math.nan))
    found.do_trial()
    found.do_trial()
    end_trials(monkeypatch, fail, 2)
    found.do_trial()
    ends = [line.rpartition(": ")[2] for line in (tmp_path / TRIALS_FILE).read_text().splitlines()]
    assert ends[1:] == ["the score is nan", "the loss is nan after update 3"]
    states = [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]
    assert [trial.state for trial in found.study.trials] == states


def test_a_trial_that_is_killed_too_often_says_so(recipe, tmp_path, monkeypatch):
    seen = []
    end_trials(monkeypatch, lambda folder, log: seen.append(folder), -signal.SIGKILL)
    with pytest.raises(UsageError, match=r"trial-1: its process has ended \(SIGKILL\) 4 times; memory may"):
        make_search(recipe, tmp_path).do_trial()
    assert len(seen) == 4


@pytest.mark.parametrize("lost", [lambda text: text[:-7], lambda text: text[:-7] + b"\0" * 7, lambda text: b""])
def test_a_journal_that_lost_its_end_is_made_again_from_the_trials(recipe, tmp_path, monkeypatch, lost):
    """The processes of trials end at once, as that of a finished run does."""
    end_trials(monkeypatch, lambda folder, log: write_score(folder, 0.25 * int(folder.name[-1])))
    found = make_search(recipe, tmp_path)
    for _ in range(2):
        found.do_trial()
    path, trials = tmp_path / search.JOURNAL, found.study.trials
    path.write_bytes(lost(path.read_bytes()))
    again = make_search(recipe, tmp_path)
    assert len(again.list_done()) < 2
    while len(again.list_done()) < 3:
        again.do_trial()
    last = make_search(recipe, tmp_path).study.trials
    assert [(trial.params, trial.value) for trial in last[:2]] == [(trial.params, trial.value) for trial in trials]
    assert last[2].value == 0.75


def test_a_trial_that_was_interrupted_keeps_its_values_and_its_directory(recipe, tmp_path, monkeypatch):
    end_trials(monkeypatch, lambda folder, log: write_score(folder, 0.5))
    found, folders = make_search(recipe, tmp_path), []
    found.do_trial()
    params = found.begin_trial().params  # and here it is killed
    end_trials(monkeypatch, lambda folder, log: folders.append(folder.name) or write_score(folder, 0.75))
    again = make_search(recipe, tmp_path)
    again.do_trial()
    assert [(trial.params, trial.value) for trial in again.study.trials[1:]] == [(params, 0.75)]
    assert folders == ["trial-2"]


def test_trainings_are_compared_where_a_run_delivers_its_start(recipe, tmp_path, monkeypatch):
    ends = iter([0.4, math.nan])

    def write(folder, log):
        write_score(folder, 0.9)
        (folder / "metrics.json").write_text(json.dumps({"score": 0.9, "end_score": next(ends)}))

    end_trials(monkeypatch, write)
    found = make_search(recipe, tmp_path)
    found.do_trial()
    found.do_trial()
    assert [trial.value for trial in found.study.trials] == [0.4, None]
    assert (tmp_path / TRIALS_FILE).read_text().endswith("the score is nan\n")


def test_searches_with_other_seeds_have_other_proposals_and_continued_ones_the_same(recipe, tmp_path, monkeypatch):
    given = merge(recipe, {"batch_size": 32, "train": {"num_train_epochs": 3.0}})

    def propose(seed, starts):
        rates, found = {}, None
        for _ in range(4):
            if starts or not found:
                folder = tmp_path / f"{seed} {starts}"
                found = make_search(merge(given, {"train": {"seed": seed}}), folder)
            end_trials(monkeypatch, lambda *_: None, None)
            found.is_worse = lambda job, trial: rates.update({trial.number: trial.params}) or True
            found.do_trial()
        assert [trial.state for trial in found.study.trials] == [TrialState.PRUNED] * 4
        return [params["train.learning_rate"] for params in rates.values()]

    one, other = propose(1, False), propose(2, False)
    assert one[0] == other[0] == settle(Recipe.make(RTE, given, {"preset": "auto"})).train["learning_rate"]
    assert len({*one[1:], *other[1:]}) == 6
    assert propose(1, True) == one


@pytest.mark.parametrize(("limit", "trials"), [(120.0, 0), (180.0, 1), (600.0, 5)])
def test_trials_go_on_until_half_of_the_time_is_over(recipe, tmp_path, monkeypatch, limit, trials):
    """A trial takes 40 s of updates, 4 s of an end and 10 s to start, and 10 s have passed."""
    costs = Costs(ROWS, 0, 0, 32, 20.0, 640.0, [(1.0, 1.0)], 0.0, 1.0, dict.fromkeys(("weights", "optimizer"), 0))
    monkeypatch.setattr("bertkit.studies.search.budget.measure", lambda *_: costs)
    lines, clock = [], Clock(limit, time.monotonic() - 10.0)
    found = make_search(recipe, tmp_path, clock)
    found.most, found.report = 0, lines.append

    def write(folder, log):
        write_score(folder, 0.5)
        clock.begun -= 54.0

    end_trials(monkeypatch, write)
    best = found.run_trials(None)
    assert len(found.study.trials) == trials
    assert any("trials of about 54 s until half of the time is over" in line for line in lines)
    assert bool(best) == bool(trials)
    alone = "no trial fits into half of the time: training with the values of the preset"
    assert (alone in lines) == (not trials)


def test_a_trial_at_work_when_half_of_the_time_is_over_does_not_count(recipe, tmp_path, monkeypatch):
    found = make_search(recipe, tmp_path, Clock(100.0, time.monotonic() - 60.0))
    end_trials(monkeypatch, lambda folder, log: None, None)
    found.do_trial()
    assert [trial.state for trial in found.study.trials] == [TrialState.PRUNED]
    assert (tmp_path / TRIALS_FILE).read_text().endswith(": half of the time is over\n")


@pytest.mark.slow
def test_a_killed_search_goes_on_and_finds_the_same(recipe, tmp_path):
    """Real processes: SIGKILL and SIGTERM in the trials, a trial that dies, and SIGTERM in the last training."""
    words = ["glue", "--task", "rte", "--model", recipe["checkpoint"], "--data", recipe["data"]["dir"], "--search", "3"]
    words += ["--set", "precision=fp32"]
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
