"""Studies: the meaning of a definition, the selection of the best run, and recovery from failures."""

import json
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bertkit.errors import UsageError
from bertkit.reports.tables import ScoreRow
from bertkit.studies import runner as studies
from bertkit.studies.cells import Cell, list_cells, list_pretrainings, name_settings
from bertkit.studies.results import choose, summarize
from bertkit.studies.runner import make_jobs, order_longest_first, prune, run_study
from bertkit.studies.spec import Column, Study, Variant, define, make_study
from bertkit.studies.start import State
from bertkit.studies.tables import explain_scores
from bertkit.tasks import TASKS
from bertkit.training.recipe import merge, read_recipe, save_recipe
from tests.conftest import RunHere, change_task
from tests.official import write_checkpoint, write_conll, write_glue
from tests.tasks.test_conformance import make_pretraining

pytestmark = pytest.mark.usefixtures("here")

PAPER_GRID = {
    "train.learning_rate": [5e-5, 4e-5, 3e-5, 2e-5],
    "batch_size": [16, 32],
    "train.num_train_epochs": [2, 3, 4],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a recipe: four updates of a tiny model in fp32."""
    small = {"precision": "fp32", "train": {"logging_steps": 1, "save_steps": 2, "warmup_steps": 0}}
    return merge(make_pretraining(tmp_path_factory.mktemp("study")), small)


@pytest.fixture
def fake(monkeypatch):
    """Return a task "fake": pretraining with a higher-is-better score, shared data and a published value."""
    task = TASKS["pretrain"]
    row = ScoreRow("next sentence", "nsp_accuracy", unit="fraction", paper={"BERT-base, held out": 0.97})
    changes = {"metric": "nsp_accuracy", "lower_is_better": False, "reusable": True, "table": (row,), "folder": "fakes"}
    task = change_task(task, name="fake", check=lambda recipe: None, recipe={**task.recipe, "task": "fake"}, **changes)
    monkeypatch.setitem(TASKS, "fake", task)
    return task


FAKES = (Column("fake", "fake"),)


def define_small(recipe, **parts):
    return {"tasks": ["pretrain"], "recipe": recipe} | parts


def read_result(output):
    return json.loads((output / "study.json").read_text(encoding="utf-8"))


def list_runs(results):
    return [run for cell in results["cells"] for run in cell["runs"]]


def assert_same_results(one, other):
    assert read_result(one) == read_result(other)
    assert (one / "table.md").read_text() == (other / "table.md").read_text()


# --- The definition ---------------------------------------------------------------------------------------------------


def test_the_grid_of_the_paper_has_24_cells(fake):
    """A.3: every combination of four learning rates, two batch sizes and three numbers of epochs."""
    study = make_study({"tasks": ["fake"], "grid": PAPER_GRID, "restarts": 2})
    cells = list_cells(study)
    assert len(cells) == 24
    assert cells[0].setting == {"train.learning_rate": 5e-5, "batch_size": 16, "train.num_train_epochs": 2}
    assert cells[1].setting == {"train.learning_rate": 5e-5, "batch_size": 16, "train.num_train_epochs": 3}
    assert cells[23].setting == {"train.learning_rate": 2e-5, "batch_size": 32, "train.num_train_epochs": 4}
    assert cells[3].directory == "fake/learning_rate-5e-05_batch_size-32_num_train_epochs-2"
    assert cells[3].runs == {42: f"{cells[3].directory}/seed-42", 43: f"{cells[3].directory}/seed-43"}
    assert len({cell.directory for cell in cells}) == 24
    for cell in cells:
        train = cell.recipe.train
        assert (train["learning_rate"], cell.recipe.batch_size, train["num_train_epochs"]) == tuple(
            cell.setting.values()
        )
        assert cell.recipe.model == {}
        assert train["optim"] == "bert_adam", "keys that are not set have the task's values"


def test_the_command_line_wins_over_the_grid_over_the_row_over_the_recipe(fake):
    definition = {
        "tasks": ["fake"],
        "recipe": {"batch_size": 1, "train": {"max_grad_norm": 1.0, "weight_decay": 0.1, "adam_epsilon": 0.1}},
        "row": [
            {"name": "one", "recipe": {"batch_size": 2, "train": {"weight_decay": 0.2, "adam_epsilon": 0.2}}},
            {"name": "two", "recipe": {"preset": "stable"}},
        ],
        "grid": {"batch_size": [3, 4], "train.weight_decay": [0.3]},
    }
    cells = list_cells(make_study(definition, {"train": {"adam_epsilon": 0.4}}))
    keys = ("max_grad_norm", "weight_decay", "adam_epsilon")
    values = [(c.row, c.recipe.batch_size, *(c.recipe.train[key] for key in keys)) for c in cells]
    assert values == [(row, size, 1.0, 0.3, 0.4) for row in ("one", "two") for size in (3, 4)]
    assert [cell.recipe.train["optim"] for cell in cells] == ["bert_adam"] * 2 + ["adamw_torch"] * 2


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"batch_size": 5}, [{"train.learning_rate": 1.0}, {"train.learning_rate": 2.0}]),
        ({"batch_size": [5]}, [{"train.learning_rate": x, "batch_size": 5} for x in (1.0, 2.0)]),
        ({"train": {"learning_rate": [3, 4.0]}, "batch_size": 5}, [{"train.learning_rate": x} for x in (3.0, 4.0)]),
    ],
)
def test_the_command_line_fixes_an_axis_or_replaces_its_values(fake, given, settings):
    definition = {"tasks": ["fake"], "grid": {"train.learning_rate": [1.0, 2.0], "batch_size": [7, 8]}}
    cells = list_cells(make_study(definition, given))
    assert [cell.setting for cell in cells] == settings
    assert {cell.recipe.batch_size for cell in cells} == {5}


def test_the_command_line_reaches_the_options_of_the_study(fake):
    definition = {"tasks": ["pretrain"], "seeds": [1, 2], "select": "best"}
    study = make_study(definition, {"tasks": ["fake"]}, {"restarts": 3, "train": {"seed": 7}}, {"num_gpus": 0.5})
    assert study == Study(columns=FAKES, seeds=(7, 8, 9), variants=(Variant(),), num_gpus=0.5)
    assert make_study(definition, {"seeds": [5]}).seeds == (5,)
    assert make_study({"tasks": ["fake"]}).seeds == (42,)


def test_directories_name_only_what_there_is_more_of_than_one(fake):
    def directories(**parts):
        study = make_study({"tasks": ["fake"], **parts})
        return [directory for cell in list_cells(study) for directory in cell.runs.values()]

    assert directories() == ["fake"]
    assert directories(seeds=[1, 2]) == ["fake/seed-1", "fake/seed-2"]
    assert directories(grid={"batch_size": [8]}) == ["fake/batch_size-8"]
    assert directories(row=[{"name": "Only one"}]) == ["fake"]
    assert directories(row=[{"name": "A row, named"}, {"name": "b"}]) == ["a-row-named/fake", "b/fake"]
    assert directories(tasks=["fake", "pretrain"]) == ["fake", "pretrain"]


def test_a_file_is_read_and_unquoted_axes_are_understood(fake, tmp_path):
    (tmp_path / "study.toml").write_text(
        'tasks = ["fake"]\nselect = "mean"\n[grid]\ntrain.learning_rate = [1e-4, 1]\nbatch_size = [8]\n'
        '[[row]]\nname = "stable"\n[row.recipe]\npreset = "stable"\n'
    )
    study = make_study(read_recipe(tmp_path / "study.toml"))
    assert study.grid == {"train.learning_rate": (1e-4, 1.0), "batch_size": (8,)}
    assert study.rows == {"stable": Variant("stable", recipe={"preset": "stable"})}
    assert study.select == "mean"
    with pytest.raises(UsageError, match=r"study.toml: unknown task 'Fakes'; did you mean 'fake'\?"):
        make_study(read_recipe(tmp_path / "study.toml"), {"tasks": ["Fakes"]}, where="study.toml")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tasks": []}, r'no tasks; write for example tasks = \["pretrain"\]'),
        ({"tasks": "pretrain"}, r"expected list, got str - at \$.tasks; correct it"),
        ({"tasks": ["nonsense"]}, r"unknown task 'nonsense'; expected pretrain"),
        ({"tasks": ["pretrain", "pretrain"]}, r"two \[\[column\]\] tables are called 'pretrain'; leave one out"),
        ({"gird": {}}, r"unknown key 'gird'; did you mean 'grid'\?"),
        ({"batch_size": 8}, r"unknown key 'batch_size'; it belongs in \[recipe\]"),
        ({"select": "worst"}, r"invalid enum value 'worst' - at \$.select"),
        ({"restarts": 2, "seeds": [1]}, r"seeds are given, and restarts or train.seed too"),
        ({"seeds": [1], "recipe": {"train": {"seed": 2}}}, r"seeds are given, and restarts or train.seed too"),
        ({"seeds": [-1]}, r"expected int >= 0 - at \$.seeds"),
        ({"grid": {"batch_size": []}}, r"\[grid\] batch_size = \[\] must be a list with at least one value"),
        ({"grid": {"batch_size": ["8"]}}, r'\[grid\]: batch_size = "8"; expected int'),
        ({"grid": {"train.learning_rat": [1.0]}}, r"\[grid\]: unknown key 'learning_rat' .*'learning_rate'"),
        ({"grid": {"train.seed": [1]}}, r"\[grid\] train.seed is not an axis; write seeds above the tables"),
        ({"recipe": {"batch_sise": 8}}, r"\[recipe\]: unknown key 'batch_sise' .*'batch_size'"),
        ({"row": [{"name": "a"}, {"name": "A"}]}, r"two \[\[row\]\] tables are called 'a'"),
        ({"row": [{"name": "a", "recipes": {}}]}, r"table contains unknown field recipes - at"),
        ({"row": [{"name": "a", "recipe": {"precison": "fp32"}}]}, r"\[row.recipe\] of 'a': unknown key 'precison'"),
        (
            {"row": [{"name": "a", "recipe": {"train": {"seed": 1}}}]},
            r"the \[\[row\]\] 'a' sets train.seed; write seeds above the tables",
        ),
    ],
)
def test_a_mistake_in_a_definition_is_one_line(parts, message):
    with pytest.raises(UsageError, match=message) as error:
        make_study({"tasks": ["pretrain"]} | parts, where="my.toml")
    assert str(error.value).startswith("my.toml: ")
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_cell_names_the_cell(fake, monkeypatch):
    study = make_study({"tasks": ["fake"], "grid": {"data.max_length": [64, 999]}})
    with pytest.raises(UsageError, match=r"fake/max_length-999: max_length 999 exceeds the model.s 512 positions"):
        list_cells(study)
    monkeypatch.setitem(TASKS, "fake", change_task(fake, metric=""))
    with pytest.raises(UsageError, match="fake has no labels and so no score"):
        make_study({"tasks": ["fake"]})


def test_every_task_finds_its_folder_below_the_root(fake, monkeypatch, tmp_path):
    options = {**fake.recipe["data"], "dir": ""}
    monkeypatch.setitem(TASKS, "fake", change_task(fake, recipe={**fake.recipe, "data": options}))
    study = make_study({"tasks": ["fake", "pretrain"]}, {"data_root": str(tmp_path)})
    with pytest.raises(UsageError, match=r"there is no folder .*fakes for fake; .*--data ROOT"):
        list_cells(study)
    (tmp_path / "fakes").mkdir()
    one, two = list_cells(study)
    assert one.recipe.data["dir"] == str(tmp_path / "fakes")
    assert "dir" not in two.recipe.data


VALUES = st.one_of(st.text("ab/ .é", max_size=4), st.integers(-2, 2), st.floats(0, 1), st.booleans())


@given(
    st.dictionaries(st.sampled_from(["train.a", "data.a", "b"]), st.lists(VALUES, min_size=1, max_size=3), max_size=3)
)
def test_every_setting_has_a_directory_of_its_own(grid):
    settings = [{}]
    for axis, values in grid.items():
        settings = [setting | {axis: value} for setting in settings for value in dict.fromkeys(map(repr, values))]
    names = name_settings(settings)
    assert len(set(names)) == len(settings)
    assert all("/" not in name and len(name) <= 200 for name in names)


@given(
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.floats(0, 1), max_size=3, unique=True),
    rows=st.lists(st.sampled_from(["a", "b b", "C"]), max_size=3, unique=True),
    select=st.sampled_from(["best", "mean"]),
)
@settings(max_examples=25, deadline=None)
def test_the_definition_that_is_written_makes_the_same_study(seeds, rates, rows, select):
    definition = {"tasks": ["pretrain"], "seeds": seeds, "select": select, "recipe": {"batch_size": 8}}
    definition |= {"grid": {"train.learning_rate": rates}} if rates else {}
    definition |= {"row": [{"name": name, "recipe": {"data": {"vocab": name}}} for name in rows]} if rows else {}
    study = make_study(definition, {"train": {"max_steps": 3}})
    assert make_study(define(study)) == study
    with tempfile.TemporaryDirectory() as folder:
        save_recipe(define(study), Path(folder) / "study.toml")
        assert make_study(read_recipe(Path(folder) / "study.toml")) == study


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
        ("mean", [[0.7, 0.5], [0.5, 0.7]], "0/seed-0"),
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
    assert results["chosen"][0]["score"] == 0.5, "the score shown is from the other rows"
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
    one, two, three = summarize(study, [], cells, states)["cells"]
    assert (one["mean"], one["best"], one["n"], one["failed"]) == (5.0, 9.0, 8, 0)
    assert one["sd"] == pytest.approx((32 / 7) ** 0.5)
    assert one["at_or_below_majority"] == 3
    assert (two["mean"], two["sd"], two["n"], two["at_or_below_majority"]) == (1.0, None, 1, None)
    assert (three["mean"], three["sd"], three["best"], three["n"], three["failed"]) == (None, None, None, 0, 1)
    assert three["runs"] == [{"seed": 0, "directory": "2/seed-0", "status": "failed", "failure": "out of memory"}]
    (winner,) = summarize(study, [], cells, states)["chosen"]
    assert (winner["cell"], winner["run"], winner["seed"], winner["score"]) == ("0", "0/seed-7", 7, 9.0)
    assert (winner["of_settings"], winner["of_runs"]) == (2, 9)


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
    study = make_study({"tasks": ["fake"], "recipe": recipe, "grid": {"train.max_steps": [3, 4]}, "restarts": 2})
    output, lines, shown = tmp_path / "study", [], []
    results = run_study(study, output=output, report=lines.append, progress=shown.append)

    assert results == read_result(output) == shown[-1]
    assert results["finished"]
    assert (results["runs"], results["failed"], len(results["cells"])) == (4, 0, 2)
    assert make_study(read_recipe(output / "study.toml")) == study
    assert results["columns"]["fake"]["published"] == {"BERT-base, held out": 0.97}
    for cell in results["cells"]:
        scores = [run["metrics"]["score"] for run in cell["runs"]]
        assert cell["mean"] == statistics.fmean(scores)
        for run in cell["runs"]:
            saved = read_recipe(output / run["directory"] / "recipe.toml")
            assert saved["train"]["seed"] == run["seed"]
            assert saved["train"]["max_steps"] == cell["setting"]["train.max_steps"] == run["metrics"]["updates"]
            assert json.loads((output / run["directory"] / "metrics.json").read_text()) == run["metrics"]
    weights = [path.parent for path in output.rglob("model.safetensors")]
    assert weights == [output / results["chosen"][0]["run"]]
    assert not list(output.rglob("checkpoint-*"))
    made = {"fake", "recipes", "study.toml", "study.json", "table.md", "heatmap.png"}
    assert {path.name for path in output.iterdir()} == made
    assert lines[0] == "1 row x 1 task x 2 settings x 2 seeds = 4 runs, 0 of them finished"
    assert any(line.endswith("(4 of 4 runs done)") for line in lines)
    status = [[run["status"] for run in list_runs(state)] for state in shown]
    assert status[0] == ["waiting"] * 4
    assert ["finished", "waiting", "waiting", "waiting"] in status

    before = {path: path.stat().st_mtime_ns for path in (output / "fake").rglob("*")}
    assert run_study(study, output=output) == results
    assert {path: path.stat().st_mtime_ns for path in (output / "fake").rglob("*")} == before, "weights or not"


def test_all_weights_can_be_kept(recipe, tmp_path):
    study = make_study(define_small(recipe, keep="all", seeds=[1, 2]))
    run_study(study, output=tmp_path / "study")
    assert len(list(tmp_path.rglob("model.safetensors"))) == 2


def test_what_fails_is_recorded_and_the_rest_goes_on(recipe, tmp_path, monkeypatch):
    """One run reaches NaN because of its learning rate; another runs out of memory at the first attempt."""
    import torch

    import bertkit.training.run

    train = bertkit.training.run.train
    short = [2e-3]

    def exhaust(trainer, *rest):
        if trainer.args.learning_rate in short:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")
        train(trainer, *rest)

    monkeypatch.setattr(bertkit.training.run, "train", exhaust)
    grid = {"train.learning_rate": [2e-3, 1e-3, 1e30]}
    study = make_study(define_small(merge(recipe, {"train": {"max_grad_norm": 0.0}}), grid=grid))
    results = run_study(study, output=tmp_path / "study")
    runs = list_runs(results)
    assert results["finished"]
    assert results["failed"] == 2
    assert [run["status"] for run in runs] == ["failed", "finished", "failed"]
    assert runs[0]["failure"].startswith(
        "memory is too small (CUDA out of memory. Tried to allocate 2 GiB); reduce memory"
    )
    assert runs[2]["failure"].startswith("the loss is nan after update")
    assert f"; {runs[2]['directory']} has no checkpoint yet" in runs[2]["failure"], "no path on this machine"
    assert results["chosen"][0]["run"] == runs[1]["directory"]
    table = (tmp_path / "study" / "table.md").read_text()
    assert "## Failed: 2 of 3 runs" in table
    assert runs[0]["failure"] in table

    short.clear()
    again = run_study(study, output=tmp_path / "study")
    assert [run["status"] for run in list_runs(again)] == ["finished", "finished", "failed"]
    assert list_runs(again)[1] == runs[1]


def test_a_study_of_which_nothing_succeeds_still_says_so(recipe, tmp_path):
    wrong = merge(recipe, {"train": {"max_grad_norm": 0.0, "learning_rate": 1e30}})
    results = run_study(make_study(define_small(wrong, seeds=[1, 2])), output=tmp_path / "study")
    assert results["finished"]
    assert results["failed"] == results["runs"] == 2
    assert results["chosen"] == []
    assert "| ours | failed |" in (tmp_path / "study" / "table.md").read_text()


def test_a_score_that_is_no_number_is_a_failure(recipe, fake, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "fake", change_task(fake, score=lambda *_: {"nsp_accuracy": float("nan")}))
    study = make_study({"tasks": ["fake"], "recipe": recipe})
    for _ in range(2):
        (run,) = list_runs(run_study(study, output=tmp_path / "study"))
        assert (run["status"], run["failure"]) == ("failed", "the score is nan")


class Killed(BaseException):
    """Simulates kill -9: no handler catches it."""


def make_grid(recipe, **axes):
    return define_small(recipe, grid={"train.learning_rate": [1e-3, 1e-2]} | axes, select="mean")


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "study"
    run_study(make_study(make_grid(recipe)), output=output)
    return output


def die_at(monkeypatch, part, update):
    """Let the run whose directory has this part in its path die after an update."""

    def watch(output, done):
        if part in str(output) and done == update:
            raise Killed

    monkeypatch.setattr(RunHere, "watch", staticmethod(watch))


@pytest.mark.slow
def test_a_study_that_dies_twice_ends_as_if_it_had_not(recipe, tmp_path, monkeypatch, uninterrupted):
    """It dies in the first run between two checkpoints, then in the second run after its first checkpoint."""
    study = make_study(make_grid(recipe))
    for run, update in (("rate-0.001", 3), ("rate-0.01", 2)):
        die_at(monkeypatch, run, update)
        with pytest.raises(Killed):
            run_study(study, output=tmp_path / "study")
        assert not (tmp_path / "study" / "table.md").exists()
    monkeypatch.undo()
    run_study(study, output=tmp_path / "study")
    assert_same_results(tmp_path / "study", uninterrupted)


def test_a_study_with_its_rows_in_another_order_is_another_one(recipe, tmp_path):
    rows = [{"name": "one"}, {"name": "two", "recipe": {"batch_size": 4}}]
    (tmp_path / "study").mkdir()
    save_recipe(define(make_study(define_small(recipe, row=rows))), tmp_path / "study" / "study.toml")
    studies.check_directory(make_study(define_small(recipe, row=rows)), tmp_path / "study")
    message = r"study has other rows, or in another order; name another directory with --output$"
    with pytest.raises(UsageError, match=message):
        studies.check_directory(make_study(define_small(recipe, row=rows[::-1])), tmp_path / "study")


def test_the_directory_of_another_study_is_left_alone(recipe, tmp_path, uninterrupted):
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    definition = make_grid(recipe)
    other = make_study(definition, {"train": {"learning_rate": [1e-3]}}, {"seeds": [3]}, {"precision": "bf16"})
    with pytest.raises(UsageError) as error:
        run_study(other, output=uninterrupted)
    first = "seeds: [42] -> [3]; grid.train.learning_rate: [0.001, 0.01] -> [0.001]"
    assert f"holds another study ({first} and 1 more)" in str(error.value)
    with pytest.raises(UsageError, match=r"holds another study \(recipe: precision: \"fp32\" -> \"bf16\"\)"):
        run_study(make_study(definition, {"precision": "bf16"}), output=uninterrupted)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    with pytest.raises(UsageError, match="is not empty and holds no study"):
        run_study(other, output=tmp_path / "thesis")
    with pytest.raises(UsageError, match=r"chapter.txt cannot be used: File exists"):
        run_study(other, output=tmp_path / "thesis" / "chapter.txt")
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before
    more = run_study(make_study(definition, {"num_cpus": 2}), output=uninterrupted)
    assert more["definition"]["num_cpus"] == 2, "the study is the same on more hardware"
    run_study(make_study(definition), output=uninterrupted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"corpus": ["missing.txt"]}}, "missing.txt"),
        ({"train": {"optim": "adamw_bnb_8bit"}}, r"pretrain/seed-42: \[train\] cannot be used: .*bitsandbytes"),
        ({"train": {"per_device_train_batch_size": 5}}, r"pretrain/seed-42: batch_size 8"),
        ({"data": {"objective": "mlm+sop"}}, r"pretrain: unknown objective"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(recipe, tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        run_study(make_study(define_small(recipe, restarts=2), change), output=tmp_path / "study")
    assert not (tmp_path / "study").exists()


# --- Rows that begin with a pretraining -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


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
        "recipe": {
            "precision": "fp32",
            "batch_size": 8,
            "data": {"dir": str(glue), "max_length": 40},
            "train": {"max_steps": 2, "learning_rate": 1e-3},
        },
        "row": [
            {"name": "BERT", "paper": {"MNLI-m": 84.4, "Average": 83.9}},
            {"name": "LTR", "pretrain": {"data": {"objective": "clm"}}},
            {"name": "+ frozen", "pretrain": {"data": {"objective": "clm"}}, "recipe": {"freeze": "encoder"}},
        ],
    }


def test_several_workers_begin_with_the_longest_pretraining(ablation, tmp_path):
    """A left-to-right model decodes every token; more updates, layers or vocabulary also take longer."""
    ablation["row"] = [
        {"name": "BERT"},
        {"name": "Short", "pretrain": {"train": {"max_steps": 1}}},
        {"name": "LTR", "pretrain": {"data": {"objective": "clm"}}},
        {"name": "Large", "pretrain": {"model": {"hidden_size": 768}}},
    ]
    study = make_study(ablation)
    first, _ = make_jobs(study, list_pretrainings(study), [], tmp_path)
    assert list(first) == ["pretrain/bert", "pretrain/short", "pretrain/ltr", "pretrain/large"]
    longest = order_longest_first(first)
    assert list(longest) == ["pretrain/large", "pretrain/ltr", "pretrain/bert", "pretrain/short"]
    assert longest == first, "the same jobs"


def test_pretrainings_come_first_and_are_shared(ablation, tmp_path):
    output, lines, shown = tmp_path / "study", [], []
    results = run_study(make_study(ablation), output=output, report=lines.append, progress=shown.append)
    assert results == read_result(output)
    assert results["finished"]
    assert (results["runs"], results["over"], results["failed"]) == (8, 8, 0), "two of them pretrainings"
    assert lines[0] == "3 rows x 3 columns x 2 seeds: 8 runs, including 2 pretrainings, 0 of them finished"
    over = [line.partition(":")[0] for line in lines if line.endswith("runs done)")]
    assert over[:2] == ["pretrain/ltr", "pretrain/bert"], "the longer one comes first"
    assert sorted(over[2:]) == sorted(
        f"{row}/mnli-m/seed-{seed}" for row in ("bert", "ltr", "frozen") for seed in (1, 2)
    )
    cells = {(cell["row"], cell["column"]): cell for cell in results["cells"]}
    for row, directory in (("BERT", "bert"), ("LTR", "ltr"), ("+ frozen", "ltr")):
        metrics = json.loads((output / "pretrain" / directory / "metrics.json").read_text())
        assert cells[row, "Perplexity"]["mean"] == metrics["perplexity"]
        assert (cells[row, "Perplexity"]["n"], cells[row, "MNLI-m"]["n"]) == (1, 2)
        runs = cells[row, "MNLI-m"]["runs"]
        assert cells[row, "MNLI-mm"]["runs"] == runs
        for key, column in (("accuracy", "MNLI-m"), ("accuracy_mm", "MNLI-mm")):
            assert cells[row, column]["mean"] == statistics.fmean(run["metrics"][key] for run in runs)
        for run in runs:
            saved = read_recipe(output / run["directory"] / "recipe.toml")
            assert saved["checkpoint"] == str(output / "pretrain" / directory)
    assert [chosen["column"] for chosen in results["chosen"]] == ["MNLI-m", "MNLI-mm"] * 3
    weights = {str(path.parent.relative_to(output)) for path in output.rglob("model.safetensors")}
    assert weights == {"pretrain/bert", "pretrain/ltr", *(chosen["run"] for chosen in results["chosen"])}
    assert not list(output.rglob("checkpoint-*"))
    status = [run["status"] for run in shown[0]["pretrainings"]]
    assert status == ["waiting", "waiting"]

    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name == "metrics.json"}
    assert run_study(make_study(ablation), output=output) == results
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_data_that_the_new_tokenizer_shows_to_be_wrong_cost_only_their_own_runs(ablation, tmp_path, monkeypatch):
    """Data may be refused when they are encoded, with the vocabulary of the pretraining."""

    def refuse(*_):
        raise UsageError("eng.testa, line 3: a word is wrong; correct it")

    monkeypatch.setattr(TASKS["ner"], "encode", refuse)
    folder = write_conll(tmp_path / "ner")
    names = {"name": "NER", "task": "ner", "recipe": {"data": {"dir": str(folder)}}}
    study = ablation | {"column": [names, ablation["column"][0]], "seeds": [1], "row": ablation["row"][1:]}
    del study["average"]
    results = run_study(make_study(study), output=tmp_path / "study")
    assert results["finished"]
    runs = {run["directory"]: run for run in list_runs(results)}
    assert {name: run["status"] for name, run in runs.items()} == {
        "ltr/ner": "failed",
        "frozen/ner": "failed",
        "ltr/mnli-m": "finished",
        "frozen/mnli-m": "finished",
    }
    assert "eng.testa, line" in runs["ltr/ner"]["failure"]
    assert "a word is wrong" in (tmp_path / "study" / "table.md").read_text()


@pytest.mark.slow
def test_a_study_that_dies_in_either_stage_ends_as_if_it_had_not(ablation, tmp_path, monkeypatch):
    study = make_study(ablation)
    run_study(study, output=tmp_path / "whole" / "study")
    monkeypatch.chdir(tmp_path)
    for run, update in (("pretrain/bert", 3), ("ltr/mnli-m", 1)):
        with monkeypatch.context() as patch:
            die_at(patch, run, update)
            with pytest.raises(Killed):
                run_study(study, output=tmp_path / "study")
        assert not (tmp_path / "study" / "table.md").exists()
    lines = []
    run_study(study, output=tmp_path / "study", report=lines.append)
    assert "4 of them finished" in lines[0]
    assert_same_results(tmp_path / "whole" / "study", tmp_path / "study")


@pytest.mark.slow
def test_the_rows_of_a_pretraining_that_fails_fail_with_it_and_are_tried_again(ablation, tmp_path, monkeypatch):
    import bertkit.training.run

    train, repaired = bertkit.training.run.train, []

    def break_down(trainer, *rest):
        if not repaired and trainer.model.config.is_decoder and trainer.task.name == "pretrain":
            raise RuntimeError("the device is gone\n for good")
        train(trainer, *rest)

    monkeypatch.setattr(bertkit.training.run, "train", break_down)
    results = run_study(make_study(ablation), output=tmp_path / "study")
    assert results["finished"]
    assert results["failed"] == 5, "a pretraining and the two runs of each of its two rows"
    runs = {run["directory"]: run for run in list_runs(results)}
    assert runs["bert/mnli-m/seed-1"]["status"] == "finished"
    assert runs["frozen/mnli-m/seed-2"]["failure"] == "its pretraining, pretrain/ltr, has failed"
    table = (tmp_path / "study" / "table.md").read_text()
    assert "| LTR | failed | failed | failed | – |" in table
    assert "## Failed: 5 of 8 runs" in table
    assert "- pretrain/ltr: RuntimeError: the device is gone for good (test_runner.py:" in table
    repaired.append(True)
    again = run_study(make_study(ablation), output=tmp_path / "study")
    assert (again["failed"], again["over"]) == (0, 8)


@pytest.fixture
def figure5(recipe, glue):
    """Return a study with rows after three of four pretraining updates; checkpoints are only at 2 and 4."""
    return {
        "column": [{"name": "RTE", "task": "rte"}],
        "pretrain": recipe,
        "recipe": {
            "precision": "fp32",
            "batch_size": 8,
            "data": {"dir": str(glue), "max_length": 40},
            "train": {"max_steps": 1},
        },
        "row": [{"name": f"MLM, {step}", "step": step, "paper": {"RTE": 78.6 + step}} for step in (1, 3, 4)],
    }


@pytest.mark.slow
def test_rows_start_from_steps_of_one_pretraining(figure5, tmp_path, monkeypatch):
    """Each kept step is a whole model, deleted when no run starts from it any more."""
    import bertkit.studies.start

    seen, do = {}, bertkit.studies.start.run

    def look(recipe, **rest):
        if recipe.task == "rte":
            folder = Path(recipe.checkpoint)
            state = load_file(folder / "model.safetensors")
            seen[folder.name] = float(state["bert.embeddings.word_embeddings.weight"].norm())
            assert {"config.json", "vocab.txt", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
            assert not list(folder.glob("optimizer*"))
        return do(recipe, **rest)

    monkeypatch.setattr(bertkit.studies.start, "run", look)
    output = tmp_path / "study"
    results = run_study(make_study(figure5), output=output)
    assert (results["runs"], results["failed"]) == (4, 0)
    assert list(seen) == ["step-1", "step-3", "mlm-1"]
    assert len(set(seen.values())) == 3, "three models"
    assert [row["step"] for row in results["rows"].values()] == [1, 3, 4]
    left = {path.name for path in (output / "pretrain" / "mlm-1").iterdir()}
    assert "model.safetensors" in left
    assert not {name for name in left if name.startswith(("checkpoint", "step"))}
    assert (output / "curve.png").exists()

    run_study(make_study(figure5 | {"keep": "all"}), output=tmp_path / "all")
    assert {path.name for path in (tmp_path / "all").rglob("step-*")} == {"step-1", "step-3"}


@pytest.mark.slow
def test_steps_are_there_after_a_death_at_any_moment(figure5, tmp_path, monkeypatch):
    """Die in the pretraining after the first step, before the steps are kept, and while runs start from them."""
    study, output = make_study(figure5), tmp_path / "study"
    run_study(study, output=tmp_path / "whole")

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        die_at(patch, "pretrain/mlm-1", 2)
        with pytest.raises(Killed):
            run_study(study, output=output)
    with monkeypatch.context() as patch:
        patch.setattr(studies, "keep_models", die)
        with pytest.raises(Killed):
            run_study(study, output=output)
    with monkeypatch.context() as patch:
        patch.setattr(studies, "save_tokenizer", die)
        with pytest.raises(Killed):
            run_study(study, output=output)
    with pytest.raises(Killed):
        run_study(study, output=output, progress=lambda results: results["over"] == 2 and die())
    run_study(study, output=output)
    one, two = read_result(output), read_result(tmp_path / "whole")
    assert [cell["mean"] for cell in one["cells"]] == [cell["mean"] for cell in two["cells"]]


@pytest.mark.slow
def test_weights_that_are_not_there_are_a_reason(figure5, tmp_path):
    """As after the files were deleted."""
    output = tmp_path / "study"
    run_study(make_study(figure5), output=output)
    for path in (output / "mlm-1" / "rte", output / "mlm-4" / "rte"):
        (path / "metrics.json").unlink()
    (output / "pretrain" / "mlm-1" / "model.safetensors").unlink()
    runs = list_runs(run_study(make_study(figure5), output=output))
    assert [run["status"] for run in runs] == ["failed", "finished", "failed"]
    assert runs[0]["failure"].startswith(
        "its pretraining left no weights in pretrain/mlm-1/step-1; delete pretrain/mlm-1, and the same command"
    )
    assert "no weights in pretrain/mlm-1; delete pretrain/mlm-1" in runs[2]["failure"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pretrain": {"data": {"corpus": ["missing.txt"]}}}, r"missing.txt"),
        ({"pretrain": {"data": {"corpus": []}}}, r"pretrain/bert has no corpus; give a folder that holds text/"),
        ({"pretrain": {"train": {"optim": "adamw_bnb_8bit"}}}, r"pretrain/bert: \[train\] cannot be used"),
        ({"data": {"dir": "nowhere"}}, r"nowhere is not a folder"),
        ({"data": {"dir": "nowhere"}, "pretrain": {"data": {"corpus": ["missing.txt"]}}}, r"nowhere is not a folder"),
        ({"data": {"max_length": 999}}, r"bert/mnli-m: max_length 999 exceeds the model.s"),
        ({"train": {"per_device_train_batch_size": 5}}, r"bert/mnli-m/seed-1: batch_size 8 cannot be divided"),
    ],
)
def test_a_mistake_in_either_stage_is_found_before_anything_is_written(ablation, tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        run_study(make_study(ablation, change), output=tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_a_study_with_another_pretraining_is_another_one(ablation, tmp_path):
    (tmp_path / "study").mkdir()
    save_recipe(define(make_study(ablation)), tmp_path / "study" / "study.toml")
    with pytest.raises(UsageError, match=r"holds another study \(BERT, pretraining: train.max_steps: 4 -> 5; LTR, pre"):
        run_study(make_study(ablation, {"pretrain": {"train": {"max_steps": 5}}}), output=tmp_path / "study")
    studies.check_directory(make_study(ablation | {"note": "Words may change."}), tmp_path / "study")


def test_runs_on_other_data_are_not_put_into_one_table(tmp_path):
    """A run fails if its data differ from those of an earlier one, also when the study is looked at again."""
    folder = write_glue(tmp_path / "glue")
    recipe = {
        "checkpoint": str(write_checkpoint(tmp_path / "bert")),
        "batch_size": 8,
        "data": {"dir": str(folder), "max_length": 40},
        "train": {"max_steps": 2},
    }
    study = make_study({"tasks": ["rte"], "recipe": recipe, "seeds": [1, 2]})
    output = tmp_path / "study"
    run_study(study, output=output)
    shutil.rmtree(output / "rte" / "seed-2")
    train = folder / "RTE" / "train.tsv"
    content = train.read_text()
    train.write_text("".join(content.splitlines(keepends=True)[:-3]))
    for _ in range(2):
        one, two = list_runs(run_study(study, output=output))
        assert (one["status"], two["status"]) == ("finished", "failed")
        assert two["failure"].startswith("its data differ from those of rte/seed-1 (environment.json); delete one of")
    train.write_text(content)
    shutil.rmtree(output / "rte" / "seed-2")
    assert [run["status"] for run in list_runs(run_study(study, output=output))] == ["finished"] * 2


def test_a_study_inside_several_processes_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UsageError, match=r"leave out torchrun or accelerate launch \(--set num_gpus=N gives each run N"
    ):
        run_study(make_study(define_small(recipe)), output=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("definition", "given", "words"),
    [
        ({"grid": {"train.learning_rate": [1e-3]}}, {"train": 5}, r"train = 5; expected table, got int"),
        ({"row": [{"name": "a", "recipe": {"train": 5}}]}, {}, r"train = 5; expected table, got int"),
        ({"row": []}, {}, r"length >= 1 - at \$.row"),
        ({"grid": {"train": [{"seed": 1}]}}, {}, r"\[grid\] train is a table, not an axis"),
        (
            {"data_root": "here", "recipe": {"data": {"dir": "there"}}},
            {},
            r"both the root of all data .* and data\.dir",
        ),
        ({"data_root": "here", "grid": {"data.dir": ["a", "b"]}}, {}, r"both the root of all data .* and data\.dir"),
    ],
)
def test_odd_definitions_are_one_line(definition, given, words):
    with pytest.raises(UsageError, match=words) as error:
        make_study({"tasks": ["rte"]} | definition, given)
    assert "\n" not in str(error.value)
