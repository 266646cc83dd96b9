"""The curves of a run, and the tables and the heat map of a study."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from bertkit.reports.plots import plot_log
from bertkit.reports.tables import ScoreLine
from bertkit.studies.plots import list_curves, plot_curve, plot_heatmap, tabulate_overview
from bertkit.studies.tables import explain_scores, name_axes, show_value, write_table
from bertkit.training.study_results import StudyPretraining, StudyRow
from tests.world import COLUMNS, PAPER, make_ablation, make_results, score_by_hand

ROWS = (
    ScoreLine("loss", "mlm_loss", {"ln V": "uniform_loss"}),
    ScoreLine("accuracy", "nsp_accuracy", {"the larger class": "nsp_majority"}, unit="fraction"),
    ScoreLine("never logged", "clm_loss", {"ln V": "uniform_loss"}),
)


def count_colours(path):
    """Return the size of a picture, and the number of its colours; an empty one has few."""
    picture = Image.open(path)
    return picture.width, picture.height, len(picture.convert("RGB").getcolors(1 << 24))


def test_curves_have_a_panel_for_every_score_that_was_logged_or_show_the_loss(tmp_path):
    log = [
        {"step": 0, "eval_mlm_loss": 9.0, "eval_nsp_accuracy": 0.5},
        {"step": 1, "mlm_loss": 8.0},
        {"step": 2, "eval_mlm_loss": 7.0, "eval_nsp_accuracy": 0.6},
    ]
    metrics, losses = {"uniform_loss": 9.0, "nsp_majority": 0.6}, [{"step": step, "loss": 5.0} for step in range(4)]
    widths = []
    for entries, rows in ((log, ROWS), (log, ROWS[:1]), (losses, ROWS)):
        plot_log(entries, rows, metrics, tmp_path / "curves.png")
        width, _, colours = count_colours(tmp_path / "curves.png")
        assert colours > 50
        widths.append(width)
    assert widths == [2 * widths[1], widths[1], widths[1]]
    plot_log([{"step": 1, "epoch": 1.0}], ROWS, {}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
def test_the_backend_of_a_notebook_that_is_not_installed_is_not_asked_for(tmp_path):
    draw = "from bertkit.reports.plots import Plot, Series, save_plots; from pathlib import Path; "
    draw += "save_plots([Plot('a', 'x', [Series('b', [(0, 1), (1, 2)], 'C0-')])], Path('a.svg'))"
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    subprocess.run([sys.executable, "-c", draw], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "a.svg").exists()


# --- Studies ----------------------------------------------------------------------------------------------------------


def test_the_table_of_a_grid_is_this():
    grid = {"train.learning_rate": [5e-5, 2e-5], "train.num_train_epochs": [3.0]}
    results = make_results(grid, COLUMNS, score_by_hand, paper=PAPER, majority=0.5271)
    assert write_table(results) == (
        "# 1 row x 2 columns x 2 settings x 2 seeds = 8 runs\n"
        "\n"
        "|  | rte | cola |\n"
        "|---|---|---|\n"
        "| ours | 60.0 (1) | 50.0 (1) † |\n"
        "| ours, best run | 60.0 (best of 3) | 50.0 (best of 3) |\n"
        "| published: BERT-base, test | 66.4 | 52.1 |\n"
        "| published: BERT-large, test | 70.1 | – |\n"
        "\n"
        "Ours: mean ± standard deviation over n finished runs (n), seeds 42, 43. "
        "The setting shown (bold below) is the one whose best run is best of 2 settings; it is chosen on the data "
        "that it is scored on, so its score is optimistic. "
        "The best run is the best of all 3 runs on that data: even more optimistic, and not comparable with a "
        "mean or a test score. "
        "† At least one run is no better than always giving the same answer.\n"
        "\n"
        "- rte: accuracy in percent; rte, dev\n"
        "- cola: Matthews correlation in percent; cola, dev\n"
        "\n"
        "## rte\n"
        "\n"
        "| learning_rate | num_train_epochs | mean | sd | best | n | failed | at or below majority |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| **5e-05** | **3** | **60.0** | **–** | **60.0** | **1** | **1** | **0** |\n"
        "| 2e-05 | 3 | 51.0 | 1.4 | 52.0 | 2 | 0 | 2 |\n"
        "\n"
        "## cola\n"
        "\n"
        "| learning_rate | num_train_epochs | mean | sd | best | n | failed | at or below majority |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| **5e-05** | **3** | **50.0** | **–** | **50.0** | **1** | **1** | **1** |\n"
        "| 2e-05 | 3 | 41.0 | 1.4 | 42.0 | 2 | 0 | 2 |\n"
        "\n"
        "## Failed: 2 of 8 runs\n"
        "\n"
        "- /rte/0/seed-43: the loss is nan | lower it\n"
        "- /cola/0/seed-43: the loss is nan | lower it\n"
    )


def test_rows_stand_below_each_other_and_a_mean_says_of_how_many():
    results = make_results({}, COLUMNS, score_by_hand, rows=("paper", "a | b"), select="mean")
    add_limits(results, 0.4, 0.6)
    text = write_table(results)
    for line in (
        "| paper | 51.0 ± 1.4 (2) | 41.0 ± 1.4 (2) |",
        r"| a \| b | 51.0 ± 1.4 (2) | 41.0 ± 1.4 (2) |",
        r"| a \| b, best run | 52.0 (best of 2) | 42.0 (best of 2) |",
        "| row | column | mean | sd | best | n | failed |",
    ):
        assert line in text.splitlines()
    assert "**" not in text, "without a grid nothing was chosen"
    assert "interval" not in text, "a mean over seeds has none"
    assert "setting" not in explain_scores(results)


def test_a_single_run_is_no_mean_and_an_average_has_no_interval():
    results = make_results({}, COLUMNS, score_by_hand, seeds=[42])
    assert explain_scores(results) == "Ours: one run (1), seed 42."
    assert "| ours | 50.0 (1) | 40.0 (1) |" in write_table(results)
    assert "best run" not in write_table(results)
    assert "interval" not in write_table(results)
    add_limits(results, 0.442, 0.558)
    results.definition["average"] = list(COLUMNS)
    results.cells[1].runs[0].metrics = {"score": 0.4}
    text = write_table(results)
    assert "| ours | 50.0 (1) | 40.0 (1) | 45.0 |\n| ours, 95 % interval | 44.2 to 55.8 | – | – |" in text
    assert "is over examples; it does not include the spread over seeds." in explain_scores(results)
    assert "| ours | failed |" in write_table(make_results({}, {"rte": "accuracy"}, lambda *_: None, seeds=[42]))


def add_limits(results, low, high):
    """Give each finished run the same interval."""
    for run in (run for cell in results.cells for run in cell.runs if run.metrics):
        run.metrics |= {"accuracy_low": low, "accuracy_high": high}


def test_baselines_of_ones_own_data_have_columns_with_their_mean_over_the_runs_of_a_row():
    results = make_results({}, {"mine": "macro F1"}, score_by_hand, rows=("a", "b"), select="mean")
    results.columns["mine"].baselines = {"TF-IDF": "tfidf_accuracy", "frozen vectors": "frozen_accuracy"}
    assert "Baselines" not in write_table(results), "no run has one"
    for number, run in enumerate(run for cell in results.cells for run in cell.runs):
        run.metrics |= {"tfidf_accuracy": 0.4} | ({"frozen_accuracy": 0.5 + 0.1 * number} if number < 2 else {})
    text = write_table(results)
    for line in (
        "|  | mine | TF-IDF | frozen vectors |",
        "| a | 51.0 ± 1.4 (2) | 40.0 | 55.0 |",
        "| b | 51.0 ± 1.4 (2) | 40.0 | – |",
        "| b, best run | 52.0 (best of 2) | – | – |",
    ):
        assert line in text.splitlines()
    assert "seeds 42, 43. The best run is" in text
    assert "Baselines: their mean over the runs that have them." in text
    two = make_results({}, {"mine": "macro F1", "theirs": "F1"}, score_by_hand)
    two.columns["theirs"].baselines = {"TF-IDF": "tfidf_accuracy"}
    two.cells[1].runs[0].metrics["tfidf_accuracy"] = 0.3
    assert "|  | mine | theirs | theirs: TF-IDF |" in write_table(two).splitlines()


def test_values_and_axes_are_short_where_they_can_be():
    values = {2e-5: "2e-05", 3.0: "3", 1e30: "1e+30", "bf16": "bf16"}
    assert {value: show_value(value) for value in values} == values
    assert (show_value(True), show_value([1, "é"])) == ("true", '[1, "é"]')
    assert name_axes(["train.learning_rate", "batch_size"]) == ["learning_rate", "batch_size"]
    assert name_axes(["model.a", "data.a"]) == ["model.a", "data.a"]


def test_heat_maps_of_odd_shapes(tmp_path):
    """Failed cells only, one axis, long names, no grid, a table of the paper; a single cell has none."""
    one = {"rte": "accuracy"}
    long = {"checkpoint": ["google-bert/bert-base-uncased", "/a/very/long/path" * 9]}
    for name, results in {
        "failed": make_results({"batch_size": [1, 2]}, one, lambda *_: None),
        "long": make_results(long, one, lambda row, task, setting, seed: 0.5, rows=("a", "a longer name " * 9)),
        "rows": make_results({}, COLUMNS, score_by_hand, rows=("", "stable")),
        # matplotlib would parse text between two dollar signs as mathematics.
        "dollars": make_results({}, COLUMNS, score_by_hand, rows=("cost $5^_$", "a $x_$^$ b")),
        "paper": make_ablation(),
    }.items():
        plot_heatmap(results, tmp_path / f"{name}.png")
        width, height, colours = count_colours(tmp_path / f"{name}.png")
        assert 400 < width < 2500
        assert 200 < height < 2500
        assert colours > 20
    plot_heatmap(make_results({}, one, score_by_hand), tmp_path / "none.png")
    plot_heatmap(make_results({"batch_size": [1]}, one, score_by_hand), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_columns_that_share_runs_have_shades_of_their_own():
    scores = {("a", "rte"): 0.4, ("b", "rte"): 0.5, ("a", "cola"): 0.5, ("b", "cola"): 0.4}
    results = make_results({}, COLUMNS, lambda row, task, *_: scores[row, task], rows=("a", "b"))
    for cell in results.cells:
        cell.directory = cell.row
    assert [[cell.share for cell in row[1:]] for row in tabulate_overview(results).rows] == [[0.0, 1.0], [1.0, 0.0]]


def test_runs_that_failed_to_learn_leave_the_shades_to_the_others():
    rows = tuple("abcdef")
    scores = dict(zip(rows, (0.316, 0.84, 0.85, 0.855, 0.86, 0.3), strict=True))
    for names, expected in {
        rows: [0, 13 / 21, 17 / 21, 19 / 21, 1, 0],  # the limit is 0.845, the median, less 3 times 0.0125
        rows[1:4]: [0, 2 / 3, 1],  # without outliers, the limit is the worst mean
    }.items():
        results = make_results({}, {"rte": "accuracy"}, lambda row, *_: scores[row], rows=names)
        shades = [row[1].share for row in tabulate_overview(results).rows]
        assert shades == pytest.approx(expected)
        results.columns["rte"].lower_is_better = True
        for cell in results.cells:
            cell.mean *= -1
        assert [row[1].share for row in tabulate_overview(results).rows] == pytest.approx(shades)


# --- Tables of the paper ----------------------------------------------------------------------------------------------


def test_cited_systems_come_last_in_italics_and_may_have_columns_of_their_own():
    results = make_ablation()
    results.definition["cited"] = {"Human": {"MNLI-m": 92.0, "Average": 87.1}, "GPT": {"Test": 82.1}}
    text = write_table(results)
    for line in (
        "|  | MNLI-m | QNLI | LM (ppl) | Average | Test |",
        "| BERT | 50.0 ± 1.4 (2) † | 65.0 ± 7.1 (2) | 12.346 (1) | 57.5 | – |",
        "| *the paper* | *84.4* |  |  | *86* |  |",
    ):
        assert line in text.splitlines()
    assert "|  | *3.99* |  |  |\n| *Human* | *92.0* |  |  | *87.1* |  |\n| *GPT* |  |  |  |  | *82.1* |\n\n" in text
    assert "In italics: the paper's value for the row above, and at the end those of other systems." in text


def test_the_table_of_the_paper_is_this():
    assert write_table(make_ablation()) == (
        "# 2 rows x 3 columns x 2 seeds: 10 runs, including 2 pretrainings\n"
        "\n"
        "|  | MNLI-m | QNLI | LM (ppl) | Average |\n"
        "|---|---|---|---|---|\n"
        "| BERT | 50.0 ± 1.4 (2) † | 65.0 ± 7.1 (2) | 12.346 (1) | 57.5 |\n"
        "| *the paper* | *84.4* |  |  | *86* |\n"
        "| LTR | failed | failed | – | – |\n"
        "| *the paper* |  |  | *3.99* |  |\n"
        "\n"
        "Ours: mean ± standard deviation over n finished runs (n), seeds 42, 43. In italics: the paper's value for the "
        "row above. "
        "Average: the mean of MNLI-m, QNLI. † At least one run is no better than always giving the same answer.\n"
        "\n"
        "RTE stands for MRPC.\n"
        "\n"
        "- MNLI-m: accuracy in percent; mnli, dev; always giving the same answer scores 50.0; the paper: dev\n"
        "- QNLI: accuracy in percent; qnli, dev; always giving the same answer scores 50.0; "
        "the paper: MRPC, accuracy, dev\n"
        "- LM (ppl): perplexity; pretrain, dev (1,000 pairs)\n"
        "\n"
        "## Pretraining\n"
        "\n"
        "| pretraining | rows | updates | perplexity | masked-LM accuracy (%) |\n"
        "|---|---|---|---|---|\n"
        "| pretrain/bert | BERT | 6,000 | 12.346 | 25.0 |\n"
        "| pretrain/ltr | LTR | failed | – | – |\n"
        "\n"
        "## Every cell\n"
        "\n"
        "| row | column | mean | sd | best | n | failed | at or below majority |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| BERT | MNLI-m | 50.0 | 1.4 | 51.0 | 2 | 0 | 1 |\n"
        "| BERT | QNLI | 65.0 | 7.1 | 70.0 | 2 | 0 | – |\n"
        "| LTR | MNLI-m | – | – | – | 0 | 2 | – |\n"
        "| LTR | QNLI | – | – | – | 0 | 2 | – |\n"
        "| BERT | LM (ppl) | 12.346 | – | 12.346 | 1 | 0 | – |\n"
        "\n"
        "## Failed: 5 of 10 runs\n"
        "\n"
        "- pretrain/ltr: CUDA out of memory\n"
        "- LTR/MNLI-m/0/seed-42: its pretraining, pretrain/ltr, has failed\n"
        "- LTR/MNLI-m/0/seed-43: its pretraining, pretrain/ltr, has failed\n"
        "- LTR/QNLI/0/seed-42: its pretraining, pretrain/ltr, has failed\n"
        "- LTR/QNLI/0/seed-43: its pretraining, pretrain/ltr, has failed\n"
    )


def make_steps(paper=True):
    """Return two pretrainings, each with rows after three steps; the second one's scores rise more slowly."""
    steps = (300, 1000, 8000)
    names = [f"{label}, {step:,}" for label in ("Masked LM", "Left to right") for step in steps]

    def score(row, *_):
        return 0.3 + 0.05 * steps.index(int(row.rpartition(" ")[2].replace(",", ""))) / (1 + row.startswith("Left"))

    results = make_results({}, {"MNLI": "accuracy"}, score, rows=names, seeds=[42])
    origins = {"a": names[:3], "b": names[3:]}
    results.pretrainings = [StudyPretraining(rows, name, [], [], status="waiting") for name, rows in origins.items()]
    published = dict(zip(names, (78.6, 80.5, 84.4, 79.4, 80.3, 82.2), strict=True))
    results.rows = {
        name: StudyRow({"MNLI": published[name]} if paper else {}, None, steps[number % 3])
        for number, name in enumerate(names)
    }
    return results


def test_a_curve_has_a_line_for_each_pretraining_and_a_study_without_steps_none(tmp_path):
    (plot,) = list_curves(make_steps())
    lines = {series.name: dict(series.points) for series in plot.series}
    assert list(lines) == ["Masked LM", "Masked LM: the paper", "Left to right", "Left to right: the paper"]
    assert lines["Left to right"] == {300: pytest.approx(30.0), 1000: pytest.approx(32.5), 8000: pytest.approx(35.0)}
    assert lines["Left to right: the paper"] == {300: 79.4, 1000: 80.3, 8000: 82.2}
    for paper in (True, False):
        plot_curve(make_steps(paper), tmp_path / "curve.png")
        assert count_colours(tmp_path / "curve.png")[2] > 50
    plot_curve(make_ablation(), tmp_path / "none.png")
    plot_curve(make_results({}, COLUMNS, score_by_hand), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
