"""Expected scores before a training: baselines by folds, their curve and its forecast, in the doctor and in JSON."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import bertkit
from bertkit.analysis.expected import SHARES, describe_expected, forecast, plot_expected, tabulate_expected
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


def test_labels_by_chance_promise_nothing(root, tmp_path):
    """More rows of noise do not help, and no one is above chance by more than its interval."""
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(rng.choice(list('abcdefgh'), 6))},{rng.integers(2)}" for _ in range(200)]
    (tmp_path / "noise.csv").write_text("\n".join(["title,stars", *rows, ""]), encoding="utf-8")
    found = expect(root, "stars", "bert", data=tmp_path / "noise.csv")
    for one in found["baselines"][1:]:
        assert one["low"] < 0.5
    assert found["curve"]["forecast"]["low"] < 0.55


def test_pairs_have_the_vectors_of_both_texts(root, tmp_path):
    """Whether two texts are equal is in the vectors of each; long texts are counted."""
    rng, rows = np.random.default_rng(0), []
    for number in range(200):
        one, other = (" ".join(rng.choice(["good", "bad", "so", "word1", "word2"], 4)) for _ in range(2))
        rows.append(f"{one},{one if number % 2 else other},{number % 2}")
    (tmp_path / "pairs.csv").write_text("\n".join(["title,body,stars", *rows, ""]), encoding="utf-8")
    found = expect(root, "stars", "bert", text=["title", "body"], data=tmp_path / "pairs.csv", max_length=10)
    scores = {one["name"]: one["score"] for one in found["baselines"]}
    assert list(scores) == [*BASELINES, "vectors of both texts"]
    assert scores["vectors of both texts"] > 0.9 > scores["TF-IDF"]
    assert found["baselines"][-1]["truncated"] == found["rows"], "4 + 4 words, [CLS] and two [SEP] are 11 tokens"


def test_words_have_a_curve_too(root):
    write_conll(root / "ner")
    found = bertkit.expect(root / "ner", task="ner", model=root / "bert")
    assert [one["name"] for one in found["baselines"]] == ["constant answer", "words"]
    assert found["baselines"][1]["score"] > found["baselines"][0]["score"] == 0
    assert "curve" not in found, "48 sentences"


def test_a_known_curve_is_prolonged():
    """Twice as many rows of 0.9 - 2 / sqrt(n) are known."""
    sizes, rng = [100, 200, 400, 800], np.random.default_rng(0)
    truth = 0.9 - 2 * np.array([*sizes, 1000, 2000.0]) ** -0.5
    found = forecast(sizes, truth[:4, None] + rng.normal(0, 0.002, (4, 10)), truth[3], 0.005, 1000)
    assert found["score"] == pytest.approx(truth[5], abs=0.006)
    assert found["low"] < truth[5] < found["high"]
    assert found["gain_low"] < truth[5] - truth[4] < found["gain_high"]
    flat = forecast(sizes, 0.8 + rng.normal(0, 0.01, (4, 10)), 0.8, 0.005, 1000)
    assert flat["gain"] < 0.01
    assert flat["gain_low"] == 0


def test_few_rows_have_no_forecast(root, tmp_path):
    write_reviews(tmp_path / "few.csv", 60)
    found = expect(root, "stars", "bert", data=tmp_path / "few.csv")
    assert "curve" not in found
    assert describe_expected(found).startswith("what more rows bring is forecast from 100 rows on")


def test_the_doctor_compares_checkpoints(root, call):
    models = [str(root / name) for name in ("bert", "other")]
    words = ["--text", "title", "--label", "stars", "--json", "out.json", "--model", models[0], "--model", models[1]]
    code, out, _ = call("doctor", str(root / "reviews.csv"), *words)
    assert code == 0
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))["expected"]
    assert [one.get("model") for one in found["baselines"]] == [None, None, *models]
    assert describe_expected(found) in " ".join(out.split())
    table = tabulate_expected(found)
    assert table.heads == ("", "parameters", "tokens a second", "truncated", "macro F1 (%)", "95 % interval")
    assert [row[0].lines[0][0] for row in table.rows] == [
        *BASELINES[:2],
        *(f"frozen vectors of {n}" for n in ("bert", "other")),
    ]


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


def test_one_predicted_class_has_no_interval_and_large_groups_no_forecast(root, tmp_path):
    """CoLA's correlation of a constant answer is 0 in every sample."""
    lines = [f"word{number % 7} word{number % 5},{int(number % 20 == 0)},{number % 4}" for number in range(120)]
    (tmp_path / "rare.csv").write_text("\n".join(["title,stars,part", *lines, ""]), encoding="utf-8")
    found = expect(root, "stars", data=tmp_path / "rare.csv", group="part")
    assert "curve" not in found
    assert [one["name"] for one in found["baselines"]][:2] == BASELINES[:2]


def test_without_weights_on_this_disk_texts_have_tf_idf(root):
    found = expect(root, "stars")
    assert [one["name"] for one in found["baselines"]] == BASELINES[:2]
