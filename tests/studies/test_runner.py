"""The runs of a study: the selection of the best run, what is kept, and recovery from failures."""

import json
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import bertkit.training.run
from bertkit.analysis.compare import list_runs as list_runs_of
from bertkit.analysis.report import write_page
from bertkit.errors import UsageError
from bertkit.inference.ensemble import combine
from bertkit.studies import run_processes
from bertkit.studies import runner as studies
from bertkit.studies.cells import Cell, describe_plan
from bertkit.studies.results import choose, summarize
from bertkit.studies.run_processes import State
from bertkit.studies.runner import prune, run_study
from bertkit.studies.spec import Column, Study, Variant, define, define_columns, make_study
from bertkit.studies.tables import explain_scores
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.recipe import merge, read_recipe, save_recipe
from bertkit.training.study_results import StudyResults
from tests.conftest import RunHere, change_task
from tests.official import write_checkpoint, write_conll, write_glue, write_squad
from tests.world import find_part, make_pretraining

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe: four updates of a tiny model in fp32."""
    small = {"precision": "fp32", "train": {"logging_steps": 1, "save_steps": 2, "warmup_steps": 0}}
    return merge(make_pretraining(tmp_path_factory.mktemp("study")), small)


FAKES = (Column("fake", "fake"),)


def define_small(recipe, **parts):
    return {"column": define_columns("pretrain"), "recipe": recipe} | parts


def note_times(folder, pattern="*"):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


def read_result(output):
    return StudyResults.read(output)


def list_runs(results):
    return [run for cell in results.cells for run in cell.runs]


def assert_same_results(one, other):
    assert read_result(one) == read_result(other)
    assert (one / "table.md").read_text() == (other / "table.md").read_text()


# --- Which run wins ---------------------------------------------------------------------------------------------------


def make_cells(scores, task="fake"):
    """Return a cell for each list of scores (None: a run not yet done), and the states."""
    cells, states = [], {}
    for number, some in enumerate(scores):
        runs = {seed: f"{number}/seed-{seed}" for seed in range(len(some))}
        cells.append(Cell("", Column(task, task), {"batch_size": number}, {}, str(number), runs))
        for directory, score in zip(runs.values(), some, strict=True):
            states[directory] = State() if score is None else State("finished", metrics={"score": score})
    return cells, states


def make_choice(select, **parts):
    return Study(columns=FAKES, seeds=(0,), variants=(Variant(),), select=select, **parts)


@pytest.mark.parametrize(
    ("select", "scores", "winner"),
    [
        ("best", [[0.5, 0.6], [0.9, 0.1]], "1/seed-0"),
        ("mean", [[0.5, 0.6], [0.9, 0.1]], "0/seed-1"),
        ("best", [[0.5, 0.6], [0.6, 0.6]], "0/seed-1"),  # of equals the first
        ("mean", [[0.7, None], [0.6, 0.7]], "0/seed-0"),
        ("best", [[None], [0.0]], "1/seed-0"),
    ],
)
def test_the_winner(fake, select, scores, winner):
    cells, states = make_cells(scores)
    cell, run = choose(make_choice(select), cells, states)
    assert run == winner
    assert run in cell.runs.values()


def test_rows_that_are_not_scored_choose_where_there_are_any(fake):
    cells, states = make_cells([[0.9], [0.5]])
    states["0/seed-0"].metrics["tune_score"] = 0.2
    states["1/seed-0"].metrics["tune_score"] = 0.4
    assert choose(make_choice("best"), cells, states)[1] == "1/seed-0"
    study = make_choice("best", grid={"batch_size": (0, 1)})
    results = summarize(study, [], cells, states)
    assert results.chosen[0].score == 0.5, "the score shown is from the other rows"
    assert "it is chosen on rows that are not scored (data.tune_share)." in explain_scores(results)
    assert "optimistic" not in explain_scores(results)


def test_a_smaller_perplexity_wins():
    cells, states = make_cells([[3.0, 9.0], [4.0, 5.0]], task="pretrain")
    assert choose(make_choice("best"), cells, states)[1] == "0/seed-0"
    assert choose(make_choice("mean"), cells, states)[1] == "1/seed-0"
    assert choose(make_choice("best"), *make_cells([[None], [None]], task="pretrain")) is None


def test_the_statistics_are_those_of_a_textbook(fake):
    """2, 4, 4, 4, 5, 5, 7, 9: mean 5, squares of the deviations add up to 32, so the sample's sd is sqrt(32 / 7)."""
    scores = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    cells, states = make_cells([scores, [1.0], [None]])
    for state in list(states.values())[:3]:
        state.metrics["majority_score"] = 4.0
    states["0/seed-0"] = replace(states["0/seed-0"])
    states["2/seed-0"] = State("failed", reason="out of memory")
    study = make_choice("best", grid={"batch_size": (0, 1, 2)})
    one, two, three = summarize(study, [], cells, states).cells
    assert (one.mean, one.best, one.n, one.failed) == (5.0, 9.0, 8, 0)
    assert one.sd == pytest.approx((32 / 7) ** 0.5)
    assert one.at_or_below_majority == 3
    assert (two.mean, two.sd, two.n, two.at_or_below_majority) == (1.0, None, 1, None)
    assert (three.mean, three.sd, three.best, three.n, three.failed) == (None, None, None, 0, 1)
    failed = {"seed": 0, "directory": "2/seed-0", "status": "failed", "failure": "out of memory"}
    assert msgspec.to_builtins(three.runs) == [failed]
    (winner,) = summarize(study, [], cells, states).chosen
    assert (winner.cell, winner.run, winner.seed, winner.score) == ("0", "0/seed-7", 7, 9.0)
    assert (winner.of_settings, winner.of_runs) == (2, 9)


@given(
    scores=st.lists(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=2, max_size=2), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    select=st.sampled_from(["best", "mean"]),
)
def test_the_winner_keeps_its_weights_in_whatever_order_runs_finish(scores, order, select):
    """pretrain: smaller is better. At the end no other run has weights or a checkpoint."""
    cells, final = make_cells(scores, task="pretrain")
    states = dict.fromkeys(final, State())
    study = make_choice(select)
    with tempfile.TemporaryDirectory() as folder:
        for directory in order.sample(list(final), len(final)):
            run = Path(folder) / directory
            (run / "checkpoint-4").mkdir(parents=True)
            (run / "first").mkdir()
            (run / "first" / "model.safetensors").touch()
            (run / "model.safetensors").touch()
            (run / "metrics.json").touch()
            states[directory] = final[directory]
            prune(study, cells, states, Path(folder))
        assert [str(path.parent.relative_to(folder)) for path in Path(folder).rglob("*.safetensors")] == [
            choose(study, cells, final)[1]
        ]
        assert not list(Path(folder).rglob("checkpoint-*"))
        assert len(list(Path(folder).rglob("metrics.json"))) == len(final)


# --- The runs ---------------------------------------------------------------------------------------------------------


def test_a_study_runs_its_cells_and_is_not_repeated(recipe, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "SHOWN_EVERY", 0.0)
    study = make_study(
        {
            "column": define_columns("fake"),
            "recipe": recipe,
            "grid": {"train.max_steps": [3, 4]},
            "restarts": 2,
        }
    )
    output, lines, shown = tmp_path / "study", [], []
    results = run_study(study, output=output, report=lines.append, progress=shown.append)
    assert results == read_result(output) == shown[-1]
    assert (output / "study.json").read_text() == json.dumps(msgspec.to_builtins(results), indent=2) + "\n"
    assert (results.finished, results.runs, results.failed, len(results.cells)) == (True, 4, 0, 2)
    assert make_study(read_recipe(output / "study.toml")) == study
    assert results.columns["fake"].published == {"BERT-base, held out": 0.97}
    for cell in results.cells:
        assert cell.mean == statistics.fmean(run.metrics["score"] for run in cell.runs)
        for run in cell.runs:
            saved = read_recipe(output / run.directory / "recipe.toml")
            assert saved["train"]["seed"] == run.seed
            assert saved["train"]["max_steps"] == cell.setting["train.max_steps"] == run.metrics["updates"]
            assert json.loads((output / run.directory / "metrics.json").read_text()) == run.metrics
    weights = [path.parent for path in output.rglob("model.safetensors")]
    assert weights == [output / results.chosen[0].run]
    assert not list(output.rglob("checkpoint-*"))
    made = {"fake", "recipes", "study.toml", "study.json", "table.md", "heatmap.png"}
    assert {path.name for path in output.iterdir()} == made
    assert lines[0] == "1 row x 1 column x 2 settings x 2 seeds = 4 runs, 0 of them finished"
    assert any(line.endswith("(4 of 4 runs done)") for line in lines)
    status = [[run.status for run in list_runs(state)] for state in shown]
    assert status[0] == ["waiting"] * 4
    assert ["finished", "waiting", "waiting", "waiting"] in status
    before = note_times(output / "fake")
    assert run_study(study, output=output) == results
    assert note_times(output / "fake") == before, "weights or not"


def test_what_fails_is_recorded_and_the_rest_goes_on(recipe, tmp_path, monkeypatch):
    """One run reaches NaN because of its learning rate; another runs out of memory at the first attempt."""
    train, short = bertkit.training.run.train, [2e-3]

    def exhaust(trainer, *rest):
        if trainer.args.learning_rate in short:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")
        train(trainer, *rest)

    monkeypatch.setattr(bertkit.training.run, "train", exhaust)
    grid = {"train.learning_rate": [2e-3, 1e-3, 1e30]}
    study = make_study(define_small(merge(recipe, {"train": {"max_grad_norm": 0.0}}), grid=grid, keep="all"))
    results = run_study(study, output=tmp_path / "study")
    runs = list_runs(results)
    assert (results.finished, results.failed) == (True, 2)
    assert [run.status for run in runs] == ["failed", "finished", "failed"]
    short_of = "memory is too small (CUDA out of memory. Tried to allocate 2 GiB); reduce memory"
    assert runs[0].failure.startswith(short_of)
    assert runs[2].failure.startswith("the loss is nan after update")
    assert f"; {runs[2].directory} has no checkpoint yet" in runs[2].failure, "no path on this machine"
    assert results.chosen[0].run == runs[1].directory
    table = (tmp_path / "study" / "table.md").read_text()
    assert "## Failed: 2 of 3 runs" in table
    assert runs[0].failure in table
    short.clear()
    again = run_study(study, output=tmp_path / "study")
    assert [run.status for run in list_runs(again)] == ["finished", "finished", "failed"]
    assert list_runs(again)[1] == runs[1]
    assert len(list((tmp_path / "study").rglob("model.safetensors"))) == 2, "all weights are kept"


def test_a_score_that_is_no_number_is_a_failure_and_a_study_without_success_says_so(
    recipe, fake, tmp_path, monkeypatch
):
    monkeypatch.setitem(TASKS, "fake", change_task(fake, score=lambda *_: {"nsp_accuracy": float("nan")}))
    for _ in range(2):
        results = run_study(make_study({"column": define_columns("fake"), "recipe": recipe}), output=tmp_path / "study")
        (run,) = list_runs(results)
        assert (run.status, run.failure) == ("failed", "the score is nan")
    assert (results.finished, results.failed, results.chosen) == (True, 1, [])
    assert "| ours | failed |" in (tmp_path / "study" / "table.md").read_text()


class Killed(BaseException):
    """Simulates kill -9: no handler catches it."""


def make_grid(recipe):
    return define_small(recipe, grid={"train.learning_rate": [1e-3, 1e-2]}, select="mean")


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "study"
    run_study(make_study(make_grid(recipe)), output=output)
    return output


def die_in_turn(study, output, deaths):
    """Start a study again and again, each time with a death: a part of a run's directory, and an update of it."""
    for part, update in deaths:

        def watch(directory, done, part=part, update=update):
            if part in str(directory) and done == update:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunHere, "watch", staticmethod(watch))
            with pytest.raises(Killed):
                run_study(study, output=output)
        assert not (output / "table.md").exists()


@pytest.mark.slow
def test_a_study_that_dies_twice_ends_as_if_it_had_not(recipe, tmp_path, uninterrupted):
    """It dies in the first run between two checkpoints, then in the second run after its first checkpoint."""
    study = make_study(make_grid(recipe))
    die_in_turn(study, tmp_path / "study", [("rate-0.001", 3), ("rate-0.01", 2)])
    run_study(study, output=tmp_path / "study")
    assert_same_results(tmp_path / "study", uninterrupted)


def test_the_directory_of_another_study_is_left_alone(recipe, tmp_path, uninterrupted, refused):
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    definition = make_grid(recipe)
    other = make_study(definition, {"train": {"learning_rate": [1e-3]}}, {"seeds": [3]}, {"precision": "bf16"})
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    for study, output in (
        (other, uninterrupted),
        (make_study(definition, {"precision": "bf16"}), uninterrupted),
        (other, tmp_path / "thesis"),
        (other, tmp_path / "thesis" / "chapter.txt"),
    ):
        with refused():
            run_study(study, output=output)
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before
    more = run_study(make_study(definition, {"num_cpus": 2}), output=uninterrupted)
    assert more.definition["num_cpus"] == 2, "the study is the same on more hardware"
    run_study(make_study(definition), output=uninterrupted)


def test_runs_are_spread_over_the_gpus(recipe, tmp_path, monkeypatch):
    """The GPUs are pretended: a process is recorded with the GPUs that it would get, and finishes its run at once."""
    given = []

    class Finished:
        def __init__(self, words, log, threads, gpus):
            given.append(gpus)
            output = Path(words[4])
            output.mkdir(parents=True)
            (output / "metrics.json").write_text('{"score": 1.0}')

        def poll(self):
            return 0

    monkeypatch.setattr("bertkit.studies.run_processes.list_gpus", lambda: ["4", "5", "6", "7"])
    monkeypatch.setattr(studies, "start_command", Finished)
    study = make_study(define_small(recipe, seeds=[1, 2, 3, 4], num_gpus=2))
    assert run_study(study, output=tmp_path / "study", workers=2).failed == 0
    assert given == [["4", "5"], ["6", "7"]] * 2


# --- Ensembles --------------------------------------------------------------------------------------------------------


@pytest.fixture
def table2(tmp_path):
    """Return a study of two rows with a run each, and of an ensemble of both."""
    data = {"dir": str(write_squad(tmp_path / "squad", 1)), "max_length": 40, "max_query_length": 8}
    bert = str(write_checkpoint(tmp_path / "bert", initializer_range=0.2))
    train = {"max_steps": 2, "save_strategy": "no"}
    return {
        "column": [{"name": "EM", "task": "squad1", "metric": "exact_match"}, {"name": "F1", "task": "squad1"}],
        "seeds": [1],
        "recipe": {"checkpoint": bert, "batch_size": 8, "precision": "fp32", "data": data, "train": train},
        "row": [
            {"name": "Slow"},
            {"name": "Both", "ensemble": {"Slow": 1, "Fast": 1}, "paper": {"F1": 91.8}},
            {"name": "Fast", "recipe": {"train": {"learning_rate": 1e-2}}},
        ],
        "cited": {"Human": {"Test F1": 91.2}},
    }


def test_an_ensemble_combines_finished_runs_and_is_a_row_like_others(table2, tmp_path, monkeypatch):
    study, output, lines = make_study(table2), tmp_path / "study", []
    assert describe_plan(study)[1:] == ["both/em, of 2 runs", "fast/em, seed 1", "6 cells, 3 runs"]
    results = run_study(study, output=output, report=lines.append)
    assert lines[0] == "3 rows x 2 columns x 1 seed: 3 runs, 0 of them finished"
    assert lines[-1].startswith("both/em: F1 ")
    members = [output / "slow" / "em", output / "fast" / "em"]
    alone = combine(TASKS["squad1"], members, tmp_path / "alone", None, ignore)
    cells = {(cell.row, cell.column): cell for cell in results.cells}
    for column, key in (("EM", "exact_match"), ("F1", "f1")):
        (run,) = cells["Both", column].runs
        assert (run.directory, run.metrics) == ("both/em", alone)
        assert (cells["Both", column].n, cells["Both", column].mean) == (1, alone[key])
    assert ("Both", "both/em") in {(winner.row, winner.run) for winner in results.chosen}
    table = (output / "table.md").read_text().splitlines()
    assert f"| Both | {alone['exact_match']:.1f} (1) | {alone['f1']:.1f} (1) | – |" in table
    assert table.index("| *the paper* |  | *91.8* |  |") < table.index("| *Human* |  |  | *91.2* |")
    write_page([output], tmp_path / "page.html")
    assert "Both" in find_part(tmp_path / "page.html", str(output))
    metrics = output / "both" / "em" / "metrics.json"
    before = metrics.stat().st_mtime_ns
    assert run_study(study, output=output, report=lines.append) == results
    assert lines[-1].endswith("3 runs, 3 of them finished")
    assert metrics.stat().st_mtime_ns == before
    # A member is lost, and fails when it is repeated.
    shutil.rmtree(members[-1])
    with monkeypatch.context() as patch:
        patch.setattr(bertkit.training.run, "train", lambda *_: 1 / 0)
        runs = {run.directory: run for run in list_runs(run_study(study, output=output))}
    assert runs["both/em"].failure == "its run fast/em has failed"
    assert run_study(study, output=output) == results
    assert {name for name, _ in list_runs_of(output)} == set(map(str, members)), "an ensemble is not compared"


# --- Rows that begin with a pretraining -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    """Return the part of a recipe that GLUE's tasks share."""
    folder = write_glue(tmp_path_factory.mktemp("glue"))
    return {"precision": "fp32", "batch_size": 8, "data": {"dir": str(folder), "max_length": 40}}


@pytest.fixture
def ablation(recipe, glue):
    """Return a study of seven runs: two of three rows share a pretraining, two of three columns share runs."""
    return {
        "column": [
            {"name": "MNLI-m", "task": "mnli"},
            {"name": "MNLI-mm", "task": "mnli", "metric": "accuracy_mm"},
            {"name": "Perplexity", "task": "pretrain"},
        ],
        "average": ["MNLI-m", "MNLI-mm"],
        "seeds": [1, 2],
        "pretrain": recipe,
        "recipe": glue | {"train": {"max_steps": 2, "learning_rate": 1e-3}},
        "row": [
            {"name": "BERT", "paper": {"MNLI-m": 84.4, "Average": 83.9}},
            {"name": "LTR", "pretrain": {"data": {"objective": "clm"}}},
            {"name": "+ frozen", "pretrain": {"data": {"objective": "clm"}}, "recipe": {"freeze": "encoder"}},
        ],
    }


def test_pretrainings_come_first_and_are_shared(ablation, tmp_path):
    output, lines, shown = tmp_path / "study", [], []
    results = run_study(make_study(ablation), output=output, report=lines.append, progress=shown.append)
    assert results == read_result(output)
    assert (results.finished, results.runs, results.over, results.failed) == (True, 8, 8, 0)
    assert lines[0] == "3 rows x 3 columns x 2 seeds: 8 runs, including 2 pretrainings, 0 of them finished"
    over = [line.partition(":")[0] for line in lines if line.endswith("runs done)")]
    assert over[:2] == ["pretrain/bert", "pretrain/ltr"]
    own = {f"{row}/mnli-m/seed-{seed}" for row in ("bert", "ltr", "frozen") for seed in (1, 2)}
    assert set(over[2:]) == own
    cells = {(cell.row, cell.column): cell for cell in results.cells}
    for row, directory in (("BERT", "bert"), ("LTR", "ltr"), ("+ frozen", "ltr")):
        metrics = json.loads((output / "pretrain" / directory / "metrics.json").read_text())
        assert cells[row, "Perplexity"].mean == metrics["perplexity"]
        assert (cells[row, "Perplexity"].n, cells[row, "MNLI-m"].n) == (1, 2)
        runs = cells[row, "MNLI-m"].runs
        assert cells[row, "MNLI-mm"].runs == runs
        for key, column in (("accuracy", "MNLI-m"), ("accuracy_mm", "MNLI-mm")):
            assert cells[row, column].mean == statistics.fmean(run.metrics[key] for run in runs)
        for run in runs:
            saved = read_recipe(output / run.directory / "recipe.toml")
            assert saved["checkpoint"] == str(output / "pretrain" / directory)
    assert [chosen.column for chosen in results.chosen] == ["MNLI-m", "MNLI-mm"] * 3
    weights = {str(path.parent.relative_to(output)) for path in output.rglob("model.safetensors")}
    assert weights == {"pretrain/bert", "pretrain/ltr", *(chosen.run for chosen in results.chosen)}
    assert not list(output.rglob("checkpoint-*"))
    assert [run.status for run in shown[0].pretrainings] == ["waiting", "waiting"]
    before = note_times(output, "metrics.json")
    assert run_study(make_study(ablation), output=output) == results
    assert note_times(output, "metrics.json") == before


def test_data_that_the_new_tokenizer_shows_to_be_wrong_cost_only_their_own_runs(ablation, tmp_path, monkeypatch):
    """Data may be refused when they are encoded, with the vocabulary of the pretraining."""

    def refuse(*_):
        raise UsageError("eng.testa, line 3: a word is wrong; correct it")

    monkeypatch.setattr(TASKS["ner"], "encode", refuse)
    names = {"name": "NER", "task": "ner", "recipe": {"data": {"dir": str(write_conll(tmp_path / "ner"))}}}
    study = ablation | {"column": [names, ablation["column"][0]], "seeds": [1], "row": ablation["row"][1:]}
    del study["average"]
    runs = {run.directory: run for run in list_runs(run_study(make_study(study), output=tmp_path / "study"))}
    status = {"ltr/ner": "failed", "frozen/ner": "failed", "ltr/mnli-m": "finished", "frozen/mnli-m": "finished"}
    assert {name: run.status for name, run in runs.items()} == status
    assert "eng.testa, line 3: a word is wrong" in runs["ltr/ner"].failure


@pytest.mark.slow
def test_a_study_that_dies_in_either_stage_ends_as_if_it_had_not(ablation, tmp_path, monkeypatch):
    study, lines = make_study(ablation), []
    run_study(study, output=tmp_path / "whole" / "study")
    monkeypatch.chdir(tmp_path)
    die_in_turn(study, tmp_path / "study", [("pretrain/bert", 3), ("ltr/mnli-m", 1)])
    run_study(study, output=tmp_path / "study", report=lines.append)
    assert "4 of them finished" in lines[0]
    assert_same_results(tmp_path / "whole" / "study", tmp_path / "study")


@pytest.mark.slow
def test_the_rows_of_a_pretraining_that_fails_fail_with_it_and_are_tried_again(ablation, tmp_path, monkeypatch):
    train, repaired = bertkit.training.run.train, []

    def break_down(trainer, *rest):
        if not repaired and trainer.model.config.is_decoder and trainer.task.name == "pretrain":
            raise RuntimeError("the device is gone\n for good")
        train(trainer, *rest)

    monkeypatch.setattr(bertkit.training.run, "train", break_down)
    results = run_study(make_study(ablation), output=tmp_path / "study")
    assert (results.finished, results.failed) == (True, 5), "a pretraining and two runs of each of its two rows"
    runs = {run.directory: run for run in list_runs(results)}
    assert runs["bert/mnli-m/seed-1"].status == "finished"
    assert runs["frozen/mnli-m/seed-2"].failure == "its pretraining, pretrain/ltr, has failed"
    table = (tmp_path / "study" / "table.md").read_text()
    assert "| LTR | failed | failed | failed | – |" in table
    assert "- pretrain/ltr: RuntimeError: the device is gone for good (test_runner.py:" in table
    repaired.append(True)
    again = run_study(make_study(ablation), output=tmp_path / "study")
    assert (again.failed, again.over) == (0, 8)


@pytest.fixture
def figure5(recipe, glue):
    """Return a study with rows after three of four pretraining updates; checkpoints are only at 2 and 4."""
    return {
        "column": [{"name": "RTE", "task": "rte"}],
        "pretrain": recipe,
        "recipe": glue | {"train": {"max_steps": 1}},
        "row": [{"name": f"MLM, {step}", "step": step, "paper": {"RTE": 78.6 + step}} for step in (1, 3, 4)],
    }


@pytest.mark.slow
def test_rows_start_from_steps_of_one_pretraining(figure5, tmp_path, monkeypatch):
    """Each kept step is a whole model, deleted when no run starts from it any more."""
    seen, do = {}, run_processes.run

    def look(recipe, **rest):
        if recipe.task == "rte":
            folder = Path(recipe.checkpoint)
            state = load_file(folder / "model.safetensors")
            seen[folder.name] = float(state["bert.embeddings.word_embeddings.weight"].norm())
            assert {"config.json", "vocab.txt", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
            assert not list(folder.glob("optimizer*"))
        return do(recipe, **rest)

    monkeypatch.setattr(run_processes, "run", look)
    output = tmp_path / "study"
    results = run_study(make_study(figure5), output=output)
    assert (results.runs, results.failed) == (4, 0)
    assert list(seen) == ["step-1", "step-3", "mlm-1"]
    assert len(set(seen.values())) == 3, "three models"
    assert [row.step for row in results.rows.values()] == [1, 3, 4]
    left = {path.name for path in (output / "pretrain" / "mlm-1").iterdir()}
    assert "model.safetensors" in left
    assert not {name for name in left if name.startswith(("checkpoint", "step"))}
    assert (output / "curve.png").exists()
    run_study(make_study(figure5 | {"keep": "all"}), output=tmp_path / "all")
    assert {path.name for path in (tmp_path / "all").rglob("step-*")} == {"step-1", "step-3"}
    # The weights are lost, and two runs with them.
    for path in (output / "mlm-1" / "rte", output / "mlm-4" / "rte"):
        (path / "metrics.json").unlink()
    (output / "pretrain" / "mlm-1" / "model.safetensors").unlink()
    runs = list_runs(run_study(make_study(figure5), output=output))
    assert [run.status for run in runs] == ["failed", "finished", "failed"]
    lost = "its pretraining left no weights in pretrain/mlm-1{}; delete pretrain/mlm-1, and the same command"
    for run, step in ((runs[0], "/step-1"), (runs[2], "")):
        assert run.failure.startswith(lost.format(step))


@pytest.mark.slow
def test_steps_are_there_after_a_death_at_any_moment(figure5, tmp_path):
    """Die in the pretraining after the first step, before the steps are kept, and while runs start from them."""
    study, output = make_study(figure5), tmp_path / "study"
    run_study(study, output=tmp_path / "whole")

    def die(*_):
        raise Killed

    die_in_turn(study, output, [("pretrain/mlm-1", 2)])
    for name in ("keep_models", "save_tokenizer"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(studies, name, die)
            with pytest.raises(Killed):
                run_study(study, output=output)
    with pytest.raises(Killed):
        run_study(study, output=output, progress=lambda results: results.over == 2 and die())
    run_study(study, output=output)
    one, two = read_result(output), read_result(tmp_path / "whole")
    assert [cell.mean for cell in one.cells] == [cell.mean for cell in two.cells]


def test_mistakes_are_found_before_anything_is_written(recipe, ablation, tmp_path, monkeypatch, refused):
    missing = {"data": {"corpus": ["missing.txt"]}}
    small = define_small(recipe, restarts=2)
    for definition, change in (
        (small, missing),
        (small, {"train": {"per_device_train_batch_size": 5}}),
        (small, {"data": {"objective": "mlm+sop"}}),
        (ablation, {"pretrain": missing}),
        (ablation, {"pretrain": {"data": {"corpus": []}}}),
        (ablation, {"pretrain": {"train": {"per_device_train_batch_size": 5}}}),
        (ablation, {"data": {"dir": "nowhere"}, "pretrain": missing}),
        (ablation, {"data": {"max_length": 999}}),
    ):
        with refused():
            run_study(make_study(definition, change), output=tmp_path / "study")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused() as error:
        run_study(make_study(small), output=tmp_path / "study")
    assert error.value.speaks, "whichever process torchrun ends last"
    assert not (tmp_path / "study").exists()


def test_a_study_with_another_pretraining_or_order_is_another_one(ablation, tmp_path, refused):
    (tmp_path / "study").mkdir()
    save_recipe(define(make_study(ablation)), tmp_path / "study" / "study.toml")
    with refused():
        run_study(make_study(ablation, {"pretrain": {"train": {"max_steps": 5}}}), output=tmp_path / "study")
    with refused():
        studies.check_directory(make_study(ablation | {"row": ablation["row"][::-1]}), tmp_path / "study")
    words = {"note": "Words may change.", "cited": {"Human": {"MNLI-m": 92.0}}}
    studies.check_directory(make_study(ablation | words), tmp_path / "study")


def test_runs_on_other_data_are_not_put_into_one_table(glue, tmp_path):
    """A run fails if its data differ from those of an earlier one, also when the study is looked at again."""
    recipe = glue | {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "train": {"max_steps": 2}}
    study = make_study({"column": define_columns("rte"), "recipe": recipe, "seeds": [1, 2]})
    output = tmp_path / "study"
    run_study(study, output=output)
    shutil.rmtree(output / "rte" / "seed-2")
    train = Path(glue["data"]["dir"], "RTE", "train.tsv")
    content = train.read_text()
    train.write_text("".join(content.splitlines(keepends=True)[:-3]))
    for _ in range(2):
        one, two = list_runs(run_study(study, output=output))
        assert (one.status, two.status) == ("finished", "failed")
        assert two.failure.startswith("its data differ from those of rte/seed-1 (environment.json); delete one of")
    train.write_text(content)
    shutil.rmtree(output / "rte" / "seed-2")
    assert [run.status for run in list_runs(run_study(study, output=output))] == ["finished"] * 2
