"""Ensembles of SQuAD runs: means computed by hand, invariance to copies and order, the files, and errors."""

import json
import math
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.inference import ensemble
from bertkit.inference.ensemble import average, combine, list_entries
from bertkit.system.progress import ignore
from bertkit.tasks.squad import SQUAD
from bertkit.training.recipe import Recipe, save_recipe
from bertkit.training.run import run as train
from tests.official import write_checkpoint, write_squad

ONE, TWO = SQUAD.values()
GOLD = {1: {"q1": ["blue sky"], "q2": ["two cats"], "q3": ["Paris"]}, 2: {"q1": ["red"], "q2": [], "q3": ["Paris"]}}
RUNS = {
    1: [
        {
            "q1": {"red": 0.6, "blue": 0.4},
            "q2": {"cats": 0.5, "two cats": 0.4, "two": 0.1},
            "q3": {"Paris": 1.0},
        },
        {
            "q1": {"blue": 0.5, "green": 0.3, "red": 0.2},
            "q2": {"two cats": 0.7, "cats": 0.3},
            "q3": {"in Paris": 0.9, "Paris": 0.1},
        },
    ],
    2: [
        {"q1": {"red": 0.6, "": 0.4}, "q2": {"": 0.8, "cats": 0.2}, "q3": {"Paris": 1.0, "": 0.0}},
        {"q1": {"": 0.7, "red": 0.3}, "q2": {"": 0.5, "cats": 0.4, "two": 0.1}, "q3": {"Paris": 0.5, "": 0.5}},
    ],
}


def write_gold(folder, task, gold=None):
    """Write an official dev file whose context holds only the answers."""
    qas = [
        {
            "id": name,
            "question": "What?",
            "answers": [{"text": text, "answer_start": 0} for text in texts],
            **({"is_impossible": not texts} if task is TWO else {}),
        }
        for name, texts in (gold or GOLD[task.version.number]).items()
    ]
    folder.mkdir()
    path = folder / task.name_file("dev")
    articles = [{"title": "", "paragraphs": [{"context": "blue", "qas": qas}]}]
    path.write_text(json.dumps({"version": task.version.release, "data": articles}))
    return path


def write_run(folder, task, answers, data=""):
    """Write the files of a finished run that an ensemble reads. answers: question -> text -> probability."""
    (folder / "predictions").mkdir(parents=True)
    save_recipe({"task": task.name, "data": {"dir": str(data)}}, folder / "recipe.toml")
    (folder / "metrics.json").write_text(json.dumps({task.version.exact: 50.0, "f1": 60.0, "score": 60.0}))
    logits = {"start_logit": 0.0, "end_logit": 0.0}
    nbest = {
        name: [{"text": text, "probability": value} | logits for text, value in best.items()]
        for name, best in answers.items()
    }
    (folder / "predictions" / "nbest_predictions.json").write_text(json.dumps(nbest))
    return folder


@pytest.fixture(params=[ONE, TWO], ids=["1.1", "2.0"])
def task(request):
    return request.param


def write_runs(folder, task):
    """Write the two runs above and their data."""
    write_gold(folder / "squad", task)
    found = zip("ab", RUNS[task.version.number], strict=True)
    return [write_run(folder / name, task, answers, data=folder / "squad") for name, answers in found]


@pytest.fixture
def runs(tmp_path, task):
    return write_runs(tmp_path, task)


def join(task, runs, output, data=None):
    """Combine the runs; return results and lines."""
    lines = []
    return combine(task, runs, output, data, lines.append), lines


def read(folder):
    """Return the JSON files below a directory, by name; none holds NaN or infinite numbers."""
    paths = sorted(folder.rglob("*.json"))
    return {str(path.relative_to(folder)): json.loads(path.read_text(), parse_constant=pytest.fail) for path in paths}


def test_two_runs_of_1_1_worked_by_hand(tmp_path):
    """q1: blue (0.4 + 0.5) / 2 = 0.45, red 0.4, green 0.15: half of "blue sky", F1 2/3.
    q2: two cats 0.55, cats 0.4, two 0.05: right. q3: Paris 0.55, in Paris 0.45: right. EM 2/3, F1 8/9.
    Alone either run has only one right.
    """
    gold = write_gold(tmp_path / "other", ONE)
    results, lines = join(ONE, write_runs(tmp_path, ONE), tmp_path / "both", gold.parent)
    assert lines == [f"SQuAD 1.1: 3 questions from {gold}, answered by 2 runs"]
    scores = {"exact_match": pytest.approx(200 / 3), "f1": pytest.approx(800 / 9), "score": results["f1"]}
    assert results.keys() == {*scores, "runs"}, "one context has no other to be drawn with"
    assert results.items() >= (scores | {"runs": 2}).items()
    files = read(tmp_path / "both")
    assert files["metrics.json"] == results
    assert files["predictions/predictions.json"] == {"q1": "blue", "q2": "two cats", "q3": "Paris"}
    means = {
        name: [(entry["text"], pytest.approx(entry["probability"])) for entry in entries]
        for name, entries in files["predictions/nbest_predictions.json"].items()
    }
    assert means == {
        "q1": [("blue", 0.45), ("red", 0.4), ("green", 0.15)],
        "q2": [("two cats", 0.55), ("cats", 0.4), ("two", 0.05)],
        "q3": [("Paris", 0.55), ("in Paris", 0.45)],
    }


def test_runs_with_chinese_scores_give_such_scores(tmp_path):
    """教师 for 教师节 has the F1 2 * 2/3 / (5/3) = 4/5 over characters."""
    write_gold(tmp_path / "squad", ONE, {"q1": ["教师节"]})
    runs = [write_run(tmp_path / name, ONE, {"q1": {"教师": 1.0}}) for name in "ab"]
    data = {"dir": str(tmp_path / "squad"), "language": "zh"}
    save_recipe({"task": ONE.name, "data": data}, runs[0] / "recipe.toml")
    assert join(ONE, runs, tmp_path / "both")[0]["f1"] == pytest.approx(80)


def test_two_runs_of_2_0_worked_by_hand(tmp_path):
    """No answer and the best: q1 0.55 and red 0.45, q2 0.65 and cats 0.3, q3 0.25 and Paris 0.75. At tau = 0 q1 is not
    answered, which is wrong, q2 rightly not, and q3 is. All are right where -tau is between q1's and q2's odds.
    """
    runs = write_runs(tmp_path, TWO)
    metrics, _ = join(TWO, runs, tmp_path / "both")
    odds = {"q1": math.log(0.55 / 0.45), "q2": math.log(0.65 / 0.3), "q3": math.log(0.25 / 0.75)}
    assert metrics["null_score_diff_threshold"] == -metrics["tau"] == pytest.approx((odds["q1"] + odds["q2"]) / 2)
    others = ("tau", "null", "_low", "_high")
    assert {name: value for name, value in metrics.items() if not any(part in name for part in others)} == {
        **dict.fromkeys(["exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "score"], 100.0),
        "runs": 2,
        "chosen_on_dev": "tau",
    }
    assert (metrics["tau0_exact"], metrics["tau0_HasAns_exact"]) == (pytest.approx(200 / 3), 50.0)
    files = read(tmp_path / "both")
    assert files["metrics.json"] == metrics
    assert files["predictions/predictions.json"] == {"q1": "red", "q2": "", "q3": "Paris"}
    assert files["predictions/null_odds.json"] == pytest.approx(odds)
    best = [[entry["text"] for entry in entries] for entries in files["predictions/nbest_predictions.json"].values()]
    assert best == [["", "red"], ["", "cats", "two"], ["Paris", ""]]


probabilities = (
    st.dictionaries(st.sampled_from(["", *"abcdefgh"]), st.floats(0, 0.1), max_size=8).map(dict.items).map(list)
)


@given(lists=st.lists(probabilities, min_size=2, max_size=5))
def test_every_mean_is_the_mean(lists):
    answer = average(lists)
    tables = [dict(pairs) for pairs in lists]
    expected = {text: sum(table.get(text, 0.0) for table in tables) / len(lists) for table in tables for text in table}
    found = {entry["text"]: entry["probability"] for entry in list_entries(answer, with_null=True)}
    assert found == pytest.approx({"": 0.0} | expected, abs=1e-12)
    assert all(span.start == span.end and math.isfinite(span.start) for span in answer.spans)
    assert math.isfinite(answer.odds)


def test_killed_at_any_moment_there_are_no_scores_beside_other_answers(tmp_path, monkeypatch, task, runs):
    """The last step fails; old metrics are not taken for the result, and the same command completes it."""
    join(task, runs, tmp_path / "both")
    complete = read(tmp_path / "both")
    write = ensemble.write_json

    def fail_at_the_end(value, path):
        if path.name == "metrics.json":
            raise KeyboardInterrupt
        write(value, path)

    for output in ("both", "new"):
        with monkeypatch.context() as patch:
            patch.setattr(ensemble, "write_json", fail_at_the_end)
            with pytest.raises(KeyboardInterrupt):
                join(task, runs, tmp_path / output)
        assert set(complete) - set(read(tmp_path / output)) == {"metrics.json"}
        join(task, runs, tmp_path / output)
        assert read(tmp_path / output) == complete


def test_runs_that_cannot_be_combined(tmp_path, task, runs, refused):
    (a, b), out = runs, tmp_path / "both"
    larger = write_gold(tmp_path / "larger", task, {**GOLD[task.version.number], "q4": ["red"]})
    other = ONE if task is TWO else TWO
    for kind, some, data in (
        (task, [a, a], None),
        (task, [a, tmp_path / "missing"], None),
        (other, runs, None),
        (task, runs, larger),
        (task, runs, tmp_path / "nothing"),
    ):
        with refused():
            combine(kind, some, out, data, ignore)
    (b / "metrics.json").unlink()
    with refused():
        combine(task, runs, out, None, ignore)
    assert not out.exists()


def test_only_an_ensemble_is_replaced(tmp_path, task, runs, refused):
    a, b = runs
    with refused():
        combine(task, runs, a, None, ignore)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with refused():
        combine(task, runs, tmp_path / "notes", None, ignore)
    for members in ([a, b], [b, a]):
        join(task, members, tmp_path / "both")
        assert read(tmp_path / "both")["ensemble.json"] == {"runs": list(map(str, members))}


def test_a_real_run_with_its_own_copy_scores_as_it_does_alone(tmp_path):
    data = {"dir": str(write_squad(tmp_path / "squad", 2)), "max_length": 64, "max_query_length": 8}
    recipe = {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "batch_size": 4, "precision": "fp32"}
    recipe |= {"data": data, "train": {"max_steps": 2, "save_strategy": "no"}}
    own = train(Recipe.make(TWO, recipe), output=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    results, _ = join(TWO, [tmp_path / "run", tmp_path / "copy"], tmp_path / "both")
    del results["runs"]
    assert results == pytest.approx({key: own[key] for key in results}, abs=1e-9)
    one, same = (read(tmp_path / name / "predictions") for name in ("run", "both"))
    assert same["predictions.json"] == one["predictions.json"]
    assert same["null_odds.json"] == pytest.approx(one["null_odds.json"], abs=1e-9)
