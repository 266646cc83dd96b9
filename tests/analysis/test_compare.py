"""Comparisons of runs, studies and tables of other programs: matching, verdicts, messages, the rows that differ."""

import json
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bertkit.analysis.compare import comment, compare, list_values, tabulate
from bertkit.errors import UsageError
from bertkit.metrics.intervals import adjust_p_values
from bertkit.metrics.table import make_rows
from bertkit.training.predictions import format_cells, hash_rows, pack_table
from bertkit.training.recipe import save_recipe
from tests.world import make_results

NAMES = ["entailment", "not_entailment"]


def make_table(right, order=None):
    """Return the rows of RTE with whether each (S,) is right, in an order, as a person may have them."""
    numbers = np.arange(len(right)) if order is None else order
    gold = numbers % 2
    answers = np.where(np.asarray(right)[numbers], gold, 1 - gold)
    names = {"label": [NAMES[place] for place in gold], "prediction": [NAMES[place] for place in answers]}
    return pd.DataFrame({"first": [f"text {number}" for number in numbers], "second": "pair", **names})


def write_run(folder, right, seed=42, order=None, rate=2e-5, task="rte", group=1, **data):
    """Write the files that a comparison reads of a run of RTE; `group` rows are drawn together."""
    columns = make_table(right, order).to_dict("list")
    keys = hash_rows(zip(columns["first"], columns["second"], strict=True), columns["label"])
    columns |= {"key": np.array(keys, np.uint64), "group": np.arange(len(keys), dtype=np.uint64) // group}
    columns["row"] = list(range(len(keys)))
    rows = make_rows(columns, table=1, task=task, texts=["first", "second"], names=NAMES)
    (folder / "predictions").mkdir(parents=True)
    (folder / "predictions" / "dev.parquet").write_bytes(pack_table(rows))
    save_recipe({"task": task, "data": data, "train": {"seed": seed, "learning_rate": rate}}, folder / "recipe.toml")
    (folder / "metrics.json").write_text("{}")
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
    assert all(row["second"] == (row["right"],) != row["first"] for row in rows)


def test_rows_of_a_group_are_drawn_together(tmp_path):
    """A difference on groups of 50 rows that agree is less certain than the same one on independent rows."""
    right, other = draw(0), np.repeat([1, 0, 1, 1, 0, 1], 50) > 0
    alone, together = (
        compare([write_run(tmp_path / f"{n}{group}", x, rate=n + 1, group=group) for n, x in enumerate((right, other))])
        for group in (1, 50)
    )
    assert together[0].contrast.value == alone[0].contrast.value
    assert together[0].contrast.row_error > 2 * alone[0].contrast.row_error


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
    assert re.search(
        r"b against \S+/a: no clear difference with 300 rows; about [\d.]+ times as many rows would be", out
    )
    assert "enough: to tell the difference with a chance of 80 %, if it stays the same" in out
    assert "uncorrected" in out
    assert "two models are compared, not two methods" in out
    assert re.search(r"text \d+ \| pair → \S+/a: (not_)?entailment, \S+/b: (not_)?entailment \((not_)?ent", out)
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
    assert not any("single run" in line for line in comment([found]))
    assert any("a method with a single run is assumed" in line for line in comment(compare([*ours, theirs[0]])))
    alone = compare(ours)
    assert [len(one.second.runs) for one in alone] == [1, 1], "one method alone is compared run by run"


def test_a_study_has_a_method_for_each_cell(tmp_path):
    grid = {"train.learning_rate": [0.8, 0.6]}
    results = make_results(grid, {"rte": "accuracy"}, lambda *cell: None if cell[-1] == 3 else 0.5, ["a"], (1, 2, 3))
    results.write(tmp_path)
    for cell, share in zip(results.cells, (0.8, 0.6), strict=True):
        for one in cell.runs[:2]:
            write_run(tmp_path / one.directory, draw(one.seed + int(10 * share), share), one.seed, rate=share)
    (found,) = compare([tmp_path])
    assert found.second.describe() == f"{tmp_path / 'a/rte/1'} (2 seeds)"
    (table,) = tabulate([found])
    assert "±" in table.rows[0][1].lines[0][0]


def test_wrong_sources_are_one_line(tmp_path, refused):
    first, second = write_run(tmp_path / "a", draw(0)), write_run(tmp_path / "b", draw(1)[:100], rate=1.0)
    other = write_run(tmp_path / "other", draw(2, rows=400), order=np.arange(300, 400))
    again, more = write_run(tmp_path / "again", draw(0)), write_run(tmp_path / "more", draw(4), rate=3.0)
    answers = [write_run(tmp_path / name, draw(0), task="squad1", rate=rate) for name, rate in (("q", 1.0), ("r", 2.0))]
    (tmp_path / "tables").mkdir()
    kinds = write_both(tmp_path / "tables", ["a", "b"] * 15, ["a", "b"] * 15, ["a|b", "b"] * 15)
    for sources in (
        [second, other],
        [first, again, other, more],
        [first, tmp_path],
        [first],
        [tmp_path / "nothing.csv", first],
        answers,
        kinds,
    ):
        with refused():
            compare(sources)
    with refused():
        compare([first, other], split="test")
    for name in ("predictions/dev.parquet", "metrics.json"):
        (second / name).unlink()
        with refused():
            compare([first, second])


# --- Tables of other programs -----------------------------------------------------------------------------------------


def test_a_table_that_pandas_wrote_in_another_order_is_compared_with_a_run(tmp_path, call):
    """The table has other columns, its texts are swapped, and it answers with a class that the run does not know."""
    right, theirs = draw(0), draw(1, 0.3)
    table = make_table(theirs, np.random.default_rng(0).permutation(300))[["second", "label", "prediction", "first"]]
    table.loc[table["first"] == "text 7", "prediction"] = "I do not know"
    theirs[7] = False
    path = tmp_path / "answers.csv"
    table.assign(model="an LLM").to_csv(path, index=False)
    run = write_run(tmp_path / "run", right)
    for sources in ((run, path), (path, run)):
        (found,) = compare(sources)
        assert (found.first.task.name, found.contrast.rows, found.left_out) == ("rte", 300, 0)
        sides = {one.name: one.rate()[0] for one in (found.first, found.second)}
        assert sides == pytest.approx({str(run): 100 * right.mean(), str(path): 100 * theirs.mean()})
    kept = path.read_bytes()
    assert call("compare", run, path, "--json", path)[0] == 2
    assert path.read_bytes() == kept
    table.drop(columns="second").to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(UsageError, match=r"less.csv has no column 'second', only"):
        compare([run, tmp_path / "less.csv"])


def write_both(folder, label, *predictions):
    """Write tables with texts, right answers and predictions, as CSV, each with a column that the other lacks."""
    texts = [f"text {n}" for n in range(len(label))]
    for number, prediction in enumerate(predictions):
        table = pd.DataFrame({"text": texts, "label": label, "prediction": prediction, f"own_{number}": number})
        table.to_csv(folder / f"{number}.csv", index=False)
    return [folder / f"{number}.csv" for number in range(len(predictions))]


def test_tables_are_matched_by_the_inputs_that_all_have(tmp_path):
    """Probabilities and errors differ between models; columns of a person may begin with such a name."""
    gold = np.arange(60) % 2
    paths = write_both(tmp_path, gold, np.where(np.arange(60) < 20, 1 - gold, gold), gold)
    for number, path in enumerate(paths):
        own = {"error_code": np.arange(60), "cut_off": np.arange(60) + 1}
        other = dict.fromkeys(("probability", "probability_1", "error"), number)
        pd.read_csv(path).assign(**own, **other).to_csv(path, index=False)
    (found,) = compare(paths)
    assert (found.verdict, found.contrast.rows, found.left_out) == ("better", 60, 0)
    assert (found.first.task.name, found.first.task.metric) == ("classify", "score"), "macro F1"
    assert found.contrast.value == pytest.approx(100 - found.first.rate()[0])
    assert found.list_differing()[0] == {
        "texts": ["text 0", "0", "1"],
        "right": "0",
        "first": ("1",),
        "second": ("0",),
    }


@pytest.mark.parametrize("labels", [np.linspace(0, 5, 40), np.arange(40) % 5])
def test_predicted_numbers_are_a_regression_even_if_the_right_ones_are_whole(tmp_path, labels):
    noise = np.random.default_rng(0).normal(size=(2, 40))
    paths = write_both(tmp_path, labels, labels + noise[0] / 10, labels + 3 * noise[1])
    (found,) = compare(paths)
    assert found.verdict == "worse"
    assert found.first.rate()[0] == pytest.approx(100 * np.corrcoef(labels, labels + noise[0] / 10)[0, 1])


def test_several_labels_are_in_any_order_and_include_those_that_are_only_predicted(tmp_path):
    """F1 is 1 for a and b, which are right in every row, and 0 for c, which no row has."""
    paths = write_both(tmp_path, ["a|b", "b"] * 15, ["b|a|c", "b"] * 15, ["a|b", "b"] * 15)
    (found,) = compare(paths)
    assert [one.rate()[0] for one in (found.first, found.second)] == pytest.approx([200 / 3] * 2)
    lists = [["b", "a"], ["b"]] * 15
    pd.read_csv(paths[1]).assign(label=lists, prediction=lists).to_parquet(tmp_path / "c.parquet")
    (same,) = compare([paths[1], tmp_path / "c.parquet"])
    assert (same.describe(), same.list_differing()) == ("no clear difference with 30 rows: the scores are equal", [])
    assert not any("enough" in line for line in comment([same]))


def test_tags_are_shown_as_entities():
    tags = pa.array([["B-PER", "I-PER", "O"], ["O"]])
    rows = make_rows({"words": ["Ada Byron slept", "No"], "label": tags, "strict_found": [1, 0]}, texts=["words"])
    assert format_cells(rows, "label") == ["Ada Byron: PER", ""]
