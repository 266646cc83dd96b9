"""Expected scores before a training: baselines by folds, their curve and its forecast, in the doctor and in JSON."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import bertkit
from bertkit.analysis.expected import SHARES, TextRows, describe_expected, forecast, plot_expected, tabulate_expected
from tests.official import write_checkpoint, write_conll, write_reviews

BASELINES = ["constant answer", "TF-IDF", "frozen vectors"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("expect")
    write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16, initializer_range=0.5)
    write_checkpoint(root / "other", num_hidden_layers=2, hidden_size=32, intermediate_size=16, initializer_range=0.5)
    write_reviews(root / "reviews.csv", 200)
    return root


def expect(root, label, *models, text="title", data="reviews.csv", **settings):
    return bertkit.expect(root / data, text=text, label=label, model=[root / name for name in models], **settings)


@pytest.mark.parametrize(
    ("label", "metric", "least"), [("stars", "macro_f1", 0.9), ("tags", "macro_f1", 0.9), ("price", "pearson", 0.9)]
)
def test_a_word_that_decides_is_found_by_folds(root, label, metric, least):
    """Classes, several labels and numbers; no row is predicted by a head that has seen it or its text."""
    found = expect(root, label, "bert", "other")
    assert [one["name"] for one in found["baselines"]] == [*BASELINES, "frozen vectors"]
    assert (found["metric"], found["rows"], found["of"]) == (metric, *[found["rows"]] * 2)
    constant, terms, own, other = found["baselines"]
    assert constant["score"] < least < terms["score"]
    assert all(one["low"] <= one["score"] <= one["high"] for one in (terms, own, other))
    assert own["parameters"] < other["parameters"]
    assert own["tokens_per_second"] > 0
    assert own["truncated"] == 0
    curve = found["curve"]
    assert len(curve["sizes"]) == len(curve["scores"]) == len(SHARES)
    assert curve["forecast"]["rows"] == 2 * found["rows"]
    assert curve["forecast"]["low"] <= curve["forecast"]["score"] <= curve["forecast"]["high"] <= 1


@pytest.mark.parametrize("draw", [lambda rng: rng.integers(2), lambda rng: f"{rng.normal():.4f}"])
def test_labels_by_chance_promise_nothing(root, tmp_path, draw):
    """Each row is there twice, and is never predicted by a head that has seen it; numbers correlate with nothing."""
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(rng.choice(list('abcdefgh'), 6))},{draw(rng)}" for _ in range(120)] * 2
    (tmp_path / "noise.csv").write_text("\n".join(["title,stars", *rows, ""]), encoding="utf-8")
    found = expect(root, "stars", "bert", data=tmp_path / "noise.csv")
    chance = 0.5 if found["metric"] == "macro_f1" else 0.0
    for baseline in found["baselines"][1:]:
        assert baseline.get("low", baseline["score"]) <= chance


def test_pairs_have_the_vectors_of_both_texts(root, tmp_path):
    """Whether two texts are equal is in the vectors of each; long texts are counted."""
    rng, rows = np.random.default_rng(0), []
    for number in range(200):
        one, other = (" ".join(rng.choice(["good", "bad", "so", "word1", "word2"], 4)) for _ in range(2))
        rows.append(f"{one},{one if number % 2 else other},{number % 2}")
    (tmp_path / "pairs.csv").write_text("\n".join(["title,body,stars", *rows, ""]), encoding="utf-8")
    found = expect(root, "stars", "bert", text=["title", "body"], data=tmp_path / "pairs.csv", max_length=10)
    scores = {one["name"]: one["score"] for one in found["baselines"]}
    assert list(scores) == BASELINES
    assert scores["frozen vectors"] > 0.9 > scores["TF-IDF"]
    assert found["baselines"][-1]["truncated"] == found["rows"], "4 + 4 words, [CLS] and two [SEP] are 11 tokens"


def test_sentences_with_tags_have_a_baseline_of_words(root, tmp_path):
    """Checkpoints are not compared; with enough sentences there is a forecast."""
    write_conll(tmp_path)
    models, lines = [root / "bert", root / "other"], []
    found = bertkit.expect(tmp_path, task="ner", model=models, report=lines.append)
    assert [one["name"] for one in found["baselines"]] == ["constant answer", "words alone"]
    assert found["baselines"][1]["score"] > found["baselines"][0]["score"] == 0
    assert "curve" not in found, "48 sentences"
    assert any(line.startswith("checkpoints are not compared") for line in lines)
    names = ["Ann", "Bob", "Carla", "Dora"]
    rng = np.random.default_rng(0)
    blocks = [f"{names[rng.integers(4)]} B-PER\nsees O\nword{number} O\n" for number in range(150)]
    (tmp_path / "long").mkdir()
    for split, part in (("train", blocks), ("dev", blocks[:20])):
        (tmp_path / "long" / f"{split}.conll").write_text("\n".join(part), encoding="utf-8")
    found = bertkit.expect(tmp_path / "long", task="ner", model=root / "bert")
    assert found["curve"]["forecast"]["rows"] == 300
    assert tabulate_expected(found).heads == ("", "F1 (%), 95 % interval")


def test_a_known_curve_is_prolonged():
    """Twice as many rows of 0.9 - 2 / sqrt(n) are known."""
    sizes, rng = [100, 200, 400, 800], np.random.default_rng(0)
    truth = 0.9 - 2 * np.array([*sizes, 1600.0]) ** -0.5
    now = {"score": truth[3], "low": truth[3] - 0.01, "high": truth[3] + 0.01}
    found = forecast(sizes, truth[:4, None] + rng.normal(0, 0.002, (4, 10)), now, 2.0)
    assert found["score"] == pytest.approx(truth[4], abs=0.006)
    assert found["score"] == pytest.approx(now["score"] + found["gain"])
    assert found["low"] < truth[4] < found["high"]
    assert found["gain_low"] < truth[4] - truth[3] < found["gain_high"]
    flat = forecast(sizes, 0.8 + rng.normal(0, 0.01, (4, 10)), now, 2.0)
    assert flat["gain"] < 0.01
    assert flat["gain_low"] == 0


def test_the_interval_has_an_error_that_all_draws_share():
    """They are of the same rows: each size has its own error, and 80 % of the intervals have the true gain."""
    sizes, rng = [100, 200, 400, 800], np.random.default_rng(0)
    truth, inside = 0.9 - 2 * np.array([*sizes, 1600.0]) ** -0.5, 0
    for _ in range(100):
        scores = truth[:4, None] + rng.normal(0, 0.01, (4, 1)) + rng.normal(0, 0.01, (4, 10))
        found = forecast(sizes, scores, {"score": 0.8, "low": 0.78, "high": 0.82}, 2.0)
        inside += found["gain_low"] <= truth[4] - truth[3] <= found["gain_high"]
    assert inside >= 80


def test_few_rows_have_no_forecast(root, tmp_path):
    write_reviews(tmp_path / "few.csv", 60)
    found = expect(root, "stars", "bert", data=tmp_path / "few.csv")
    assert "curve" not in found
    assert describe_expected(found) == "no forecast for more rows: fewer than 100 training rows"


def test_the_doctor_compares_checkpoints(root, call):
    models = [str(root / name) for name in ("bert", "other")]
    words = ["--text", "title", "--label", "stars", "--json", "out.json", "--model", models[0], "--model", models[1]]
    code, out, _ = call("doctor", str(root / "reviews.csv"), *words)
    assert code == 0
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))["expected"]
    assert [one.get("model") for one in found["baselines"]] == [None, None, *models]
    assert describe_expected(found) in " ".join(out.split())
    table = tabulate_expected(found)
    assert table.heads == ("", "macro F1 (%), 95 % interval", "parameters", "tokens/s", "truncated")
    names = [*BASELINES[:2], *(f"frozen vectors of {root.name}/{name}" for name in ("bert", "other"))]
    assert [row[0].lines[0][0] for row in table.rows] == names


def test_python_and_the_page_have_it(root):
    with (root / "reviews.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    found = bertkit.expect(rows, text="title", label="stars", model=root / "bert", max_length=24)
    assert [one["name"] for one in found["baselines"]] == BASELINES
    plot = plot_expected(found)
    assert [series.name for series in plot.series] == ["TF-IDF", "forecast"]
    assert plot.words.startswith("Scores of more rows: ")
    with pytest.raises(bertkit.UsageError, match="unknown task"):
        bertkit.expect(rows, task="clasify")


def test_large_groups_have_no_forecast(root, tmp_path):
    lines = [f"word{number % 7} word{number % 5},{int(number % 20 == 0)},{number % 4}" for number in range(200)]
    (tmp_path / "rare.csv").write_text("\n".join(["title,stars,part", *lines, ""]), encoding="utf-8")
    found = expect(root, "stars", data=tmp_path / "rare.csv", group="part")
    assert found["no_forecast"] == "a group has 10% of the rows or more"


def test_vectors_that_tell_nothing_have_no_forecast(root, tmp_path):
    """All answers are alike, so that CoLA's correlation is 0 in every sample and has no interval."""
    (tmp_path / "CoLA").mkdir()
    rng = np.random.default_rng(0)
    lines = [f"x\t{int(number % 10 > 0)}\t\t{' '.join(rng.choice(list('abcdefgh'), 6))}" for number in range(200)]
    (tmp_path / "CoLA" / "train.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (tmp_path / "CoLA" / "dev.tsv").write_text("\n".join([*lines[:20], ""]), encoding="utf-8")
    found = bertkit.expect(tmp_path, task="cola", model=root / "bert")
    assert "low" not in found["baselines"][1]
    assert describe_expected(found) == "no forecast for more rows: no baseline is above a constant answer"


def test_at_most_some_rows_are_read(root, monkeypatch):
    """The forecast is for twice all rows."""
    monkeypatch.setattr(TextRows, "most", 120)
    found = expect(root, "stars", "bert")
    assert found["rows"] == 120 < found["of"]
    assert "on 120 of " in tabulate_expected(found).caption
    assert found["curve"]["forecast"]["rows"] == 2 * found["of"]


def test_without_weights_on_this_disk_texts_have_tf_idf(root):
    lines = []
    found = expect(root, "stars", report=lines.append)
    assert any("are not on this disk: no expected score of its vectors" in line for line in lines)
    assert [one["name"] for one in found["baselines"]] == BASELINES[:2]
