"""Comparisons of runs, studies and files of predictions: matching, verdicts, messages, the rows that differ."""

import json
import re

import numpy as np
import pytest

from bertkit.analysis.compare import comment, compare, list_values, tabulate
from bertkit.errors import UsageError
from bertkit.metrics.glue import measure_scores
from bertkit.metrics.intervals import adjust_p_values
from bertkit.tasks.task import RowAnswer
from bertkit.training.recipe import save_recipe
from bertkit.training.scored_rows import gather_rows, pack_rows

NAMES = ("entailment", "not_entailment")


def write_run(folder, right, seed=42, order=None, rate=2e-5, metric="accuracy", **data):
    """Write the files that a comparison reads of a run of RTE, from whether each row (S,) is right."""
    numbers = np.arange(len(right)) if order is None else order
    gold = numbers % 2
    answers = np.where(np.asarray(right)[numbers], gold, 1 - gold)
    score = measure_scores((metric,), answers, gold, 2)[metric]
    pairs = zip(numbers.tolist(), gold, answers, strict=True)
    rows = [RowAnswer((f"text {number}", "pair"), NAMES[right], NAMES[answer]) for number, right, answer in pairs]
    (folder / "predictions").mkdir(parents=True)
    recipe = {"task": "rte", "data": data, "train": {"seed": seed, "learning_rate": rate}}
    save_recipe(recipe, folder / "recipe.toml")
    (folder / "predictions" / "dev.rows.npz").write_bytes(pack_rows(gather_rows(score, rows)))
    (folder / "metrics.json").write_text(json.dumps({"score": float(np.mean(answers == gold))}))
    return folder


def draw(seed, share=0.8, rows=300):
    return np.random.default_rng(seed).random(rows) < share


def test_rows_are_matched_by_content_whatever_their_order(tmp_path):
    right = draw(0)
    order = np.random.default_rng(1).permutation(300)[:200]
    better = right | (np.arange(300) % 4 == 0)
    first = write_run(tmp_path / "a", right)
    second = write_run(tmp_path / "b", better, order=order, rate=5e-5, tune_share=0.3)
    (found,) = compare([first, second])
    assert (found.contrast.rows, found.left_out) == (200, 100)
    assert found.contrast.value == pytest.approx(100 * (better[order].mean() - right[order].mean()))
    assert found.verdict == "better"
    assert found.mcnemar == pytest.approx(2 * 0.5 ** int((better & ~right)[order].sum()))
    (back,) = compare([second, first])
    assert back.verdict == "worse"
    assert back.contrast.value == -found.contrast.value
    rows = list_values([found])["comparisons"][0]["differing"]
    assert {row["texts"][0] for row in rows} == {f"text {n}" for n in order if better[n] != right[n]}
    assert all(row["second"] == [row["right"]] != row["first"] for row in rows)


def test_a_small_difference_says_how_many_rows_would_be_enough(tmp_path, call):
    right = draw(0)
    other = np.where(np.arange(300) < 290, right, ~right)
    runs = [
        str(write_run(tmp_path / name, found, rate=rate))
        for name, found, rate in (("a", right, 1.0), ("b", other, 2.0), ("c", draw(3), 3.0))
    ]
    code, out, _ = call("compare", *runs, "--json", str(tmp_path / "new" / "out.json"))
    out = " ".join(out.split())
    assert code == 0
    assert re.search(r"b against \S+/a: not told apart with 300 rows; about [\d.]+ times as many rows would be", out)
    assert "enough: to tell the difference with a chance of 80 %, if it stays the same" in out
    assert "uncorrected" in out
    assert "two models are compared, not two methods" in out
    found = json.loads((tmp_path / "new" / "out.json").read_text())["comparisons"]
    assert [one["comparisons"] for one in found] == [2, 2]
    assert found[0]["factor_needed"] > 1
    assert [one["p_corrected"] for one in found] == adjust_p_values([one["p"] for one in found])
    code, _, err = call("compare", *runs, "--json", tmp_path)
    assert code == 2
    assert f"the file {tmp_path} cannot be used: Is a directory" in " ".join(err.split())


def test_runs_with_other_seeds_are_one_method(tmp_path):
    ours = [write_run(tmp_path / f"a{seed}", draw(seed), seed) for seed in range(3)]
    theirs = [write_run(tmp_path / f"b{seed}", draw(9 + seed, 0.6), seed, rate=5e-5) for seed in range(3)]
    (found,) = compare([*ours, *theirs])
    assert (len(found.first.runs), len(found.second.runs), found.verdict) == (3, 3, "worse")
    assert found.contrast.seed_error is not None
    assert found.mcnemar is None
    alone = compare(ours)
    assert [len(one.second.runs) for one in alone] == [1, 1], "one method alone is compared run by run"


def test_a_study_has_a_method_for_each_cell(tmp_path):
    cells = []
    for name, share in (("low", 0.8), ("high", 0.6)):
        runs = []
        for seed in (1, 2):
            write_run(tmp_path / name / f"seed-{seed}", draw(seed + int(10 * share), share), seed, rate=share)
            runs.append({"seed": seed, "directory": f"{name}/seed-{seed}", "status": "finished"})
        runs.append({"seed": 3, "directory": f"{name}/seed-3", "status": "failed"})
        cells.append({"column": "RTE", "runs": runs, "n": 2, "mean": share, "sd": 0.0})
    columns = {"RTE": {"name": "RTE", "metric": "accuracy", "unit": "fraction"}}
    (tmp_path / "study.json").write_text(
        json.dumps({"finished": True, "columns": columns, "cells": cells, "chosen": []})
    )
    (found,) = compare([tmp_path])
    assert found.second.describe() == f"{tmp_path / 'high'} (2 seeds)"
    (table,) = tabulate([found])
    assert "±" in table.rows[0][1].lines[0][0]


def test_wrong_sources_are_one_promised_line(tmp_path):
    first, second = write_run(tmp_path / "a", draw(0)), write_run(tmp_path / "b", draw(1)[:100], rate=1.0)
    other = write_run(tmp_path / "other", draw(2, rows=400), order=np.arange(300, 400))
    with pytest.raises(UsageError, match="have no row in common"):
        compare([second, other])
    (second / "predictions" / "dev.rows.npz").unlink()
    again = r"rows.npz not found, .* delete the run's metrics.json .*bertkit glue --task rte"
    with pytest.raises(UsageError, match=again):
        compare([first, second])
    with pytest.raises(UsageError, match="a has scored rows of dev, but not of 'test'; choose with --split"):
        compare([first, other], split="test")
    (second / "predictions" / "dev.rows.npz").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"rows.npz is damaged"):
        compare([first, second])
    (second / "metrics.json").unlink()
    with pytest.raises(UsageError, match="is not a finished run"):
        compare([first, second])
    again = write_run(tmp_path / "again", draw(0))
    with pytest.raises(UsageError, match=r"again has the recipe and the seed of .*a; give one of the two"):
        compare([first, again, other, write_run(tmp_path / "more", draw(4), rate=3.0)])
    with pytest.raises(UsageError, match="only one method"):
        compare([first, tmp_path / "b" / ".." / "a"])
    with pytest.raises(UsageError, match="neither a run nor a study"):
        compare([first, tmp_path])
    with pytest.raises(UsageError, match="only one method"):
        compare([first])
    with pytest.raises(UsageError, match=r"nothing.csv does not exist"):
        compare([tmp_path / "nothing.csv", first])
    write_run(tmp_path / "f1", draw(0), metric="f1")
    with pytest.raises(UsageError, match="different labels or a different score"):
        compare([first, tmp_path / "f1"])


def test_an_option_that_does_not_fit_the_sources_is_refused(tmp_path, call):
    runs = [write_run(tmp_path / name, draw(0), rate=rate) for name, rate in (("a", 1.0), ("b", 2.0))]
    tables = [write_table(tmp_path / f"{name}.csv", [0, 1]) for name in "cd"]
    for options in ({"label": "x"}, {"data": tmp_path / "dev.json"}):
        with pytest.raises(UsageError, match="are for files of predictions"):
            compare(runs, **options)
    with pytest.raises(UsageError, match="--split names a split of runs"):
        compare(tables, split="test", label="stars")
    code, _, err = call("compare", *tables, "--label", "stars", "--json", tables[1])
    assert (code, err.count("\n")) == (2, 1)
    assert "d.csv is also the input and would be overwritten; name another file with --json" in err
    assert tables[1].read_text().startswith("text,stars")
    with pytest.raises(UsageError, match="--label names a column of tables"):
        compare(tables, label="stars", data=tmp_path / "dev.json")


# --- Files of predictions ---------------------------------------------------------------------------------------------


def write_table(path, answers, head="text,stars,label,probability"):
    rows = [f"text {n},{n % 2},{answer},0.{n % 9}{answer}" for n, answer in enumerate(answers)]
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_tables_are_compared_by_their_common_columns(tmp_path):
    gold = np.arange(60) % 2
    first = write_table(tmp_path / "a.csv", np.where(np.arange(60) < 20, 1 - gold, gold))
    second = write_table(tmp_path / "b.csv", gold)
    (found,) = compare([first, second], label="stars")
    assert (found.verdict, found.contrast.rows, found.first.title.key) == ("better", 60, "macro_f1")
    assert found.contrast.value == pytest.approx(100 - found.first.rate()[0])
    with pytest.raises(UsageError, match="name it with --label"):
        compare([first, second])
    apart = "text,label,label_predicted,probability"
    (same,) = compare([write_table(tmp_path / f"{n}.csv", found, apart) for n, found in ((1, gold), (2, gold))])
    assert same.contrast.value == 0
    assert same.describe() == "not told apart with 60 rows: the scores are equal"
    assert not any("enough" in line for line in comment([same]))
    with pytest.raises(UsageError, match="has labels that the first file lacks"):
        compare([first, write_table(tmp_path / "3.csv", gold + 5, "text,label,stars,probability")], label="stars")


def test_rows_of_tables_are_matched_by_inputs_alone(tmp_path):
    """Label sets, probabilities and errors differ between models; columns of a person may begin with such a name."""
    head = "text,error_code,cut_off,stars,label,label_set,probability,probability_1,error"
    gold = np.arange(60) % 2
    paths = []
    for name, found in (("a", gold), ("b", np.where(np.arange(60) < 30, 1 - gold, gold))):
        rows = [f"same,{n},{n + 1},{gold[n]},{found[n]},{name},0.{n}{name},0.5{name},{name}" for n in range(60)]
        paths.append(tmp_path / f"{name}.csv")
        paths[-1].write_text("\n".join([head, *rows]) + "\n")
    (result,) = compare(paths, label="stars")
    assert (result.contrast.rows, result.left_out, result.verdict) == (60, 0, "worse")
    assert {row.texts for row in result.first.runs[0].rows} == {("same", str(n)) for n in range(60)}


def test_the_right_labels_are_never_taken_for_predictions(tmp_path):
    """A regression has `prediction` beside `label`; a classifier of several labels `labels`."""
    gold, noise = np.linspace(0, 5, 40), np.random.default_rng(0).normal(size=(2, 40))
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path, found in zip(paths, gold + noise * [[0.1], [3]], strict=True):
        rows = [f"text {n},{gold[n]:.3f},{found[n]:.3f}" for n in range(40)]
        path.write_text("\n".join(["text,label,prediction", *rows]) + "\n")
    for label in (None, "label"):
        (result,) = compare(paths, label=label)
        assert (result.verdict, result.first.title.key) == ("worse", "pearson")
        assert 99 < result.first.rate()[0] < 100
    bare = tmp_path / "c.csv"
    bare.write_text("\n".join(["text,label", *(f"text {n},{gold[n]:.3f}" for n in range(40))]) + "\n")
    with pytest.raises(UsageError, match=r"c.csv has no column prediction, label, labels beside 'label'"):
        compare([paths[0], bare])


def test_predicted_numbers_beside_whole_ones_are_a_regression(tmp_path):
    gold, noise = np.arange(40) % 5, np.random.default_rng(0).normal(size=(2, 40))
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path, found in zip(paths, gold + noise * [[0.1], [3]], strict=True):
        rows = [f"text {n},{gold[n]},{found[n]:.3f}" for n in range(40)]
        path.write_text("\n".join(["text,stars,prediction", *rows]) + "\n")
    (result,) = compare(paths, label="stars")
    assert (result.verdict, result.first.title.key) == ("worse", "pearson")


def test_several_labels_may_have_a_column_each_and_further_predictions(tmp_path, call):
    """a and b are right in every row: F1 is 1, 1 and, for c, which nobody has, 0."""
    paths = []
    for name, found in (("x", "a|b|c"), ("y", "a|b")):
        rows = [f"text {n},{n % 2},1,{found if n % 2 else found[2:]}" for n in range(30)]
        paths.append(tmp_path / f"{name}.csv")
        paths[-1].write_text("\n".join(["text,a,b,labels", *rows]) + "\n")
    (result,) = compare(paths, label="a,b")
    assert [one.rate()[0] for one in (result.first, result.second)] == pytest.approx([200 / 3] * 2)
    _, printed, _ = call("compare", *paths, "--label", "a,b")
    assert call("compare", *paths, "--label", "a", "--label", "b")[1] == printed
    with pytest.raises(UsageError, match=r"x.csv: no 'labels' is one of the right labels; name the column of these"):
        compare(paths, label="a")


def test_conll_files_have_gold_and_predicted_tags(tmp_path):
    lines = [[f"Ada{n}", "B-PER", "B-PER" if n % 3 else "O"] for n in range(90)]
    paths = [tmp_path / "a.conll", tmp_path / "b.conll"]
    for path, changed in zip(paths, (False, True), strict=True):
        sentences = [" ".join([word, gold, gold if changed else tag]) for word, gold, tag in lines]
        path.write_text("\n\n".join(sentences) + "\n")
    (found,) = compare(paths)
    assert (found.verdict, found.contrast.rows, found.first.task) == ("better", 90, "ner")
    assert found.first.rate()[0] == pytest.approx(100 * 2 * 60 / 150)
    assert RowAnswer(("Ada0",), "Ada0: PER", "(nothing)") in found.first.runs[0].rows


def test_answers_to_squad_need_the_questions(tmp_path):
    questions = [
        {"id": str(n), "question": f"Who {n}?", "answers": [{"text": f"Ada {n}", "answer_start": 0}]} for n in range(40)
    ]
    paragraphs = [{"context": f"Ada {one['id']} wrote it.", "qas": [one]} for one in questions]
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    for name, right in (("a", 40), ("b", 10)):
        answers = {str(n): f"Ada {n}" if n < right else "" for n in range(40)}
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))
    (found,) = compare([tmp_path / "a.json", tmp_path / "b.json"], data=tmp_path / "dev.json")
    assert (found.verdict, found.contrast.value, found.first.task) == ("worse", -75.0, "squad1")
