"""Baselines of a run: their scores, the rows that they read, what is said, and all that they must not change."""

import numpy as np
import pytest

from bertkit.inference.evaluate import evaluate
from bertkit.reports.tables import list_shown
from bertkit.system.hub import CARD
from bertkit.tasks import TASKS, frozen
from bertkit.training import baselines
from bertkit.training.predictions import read_table
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_conll, write_reviews
from tests.world import assert_same_bits, read_weights

WORDS = ["film", "plot", "actor", "scene", "music", "story", "camera", "script"]
SMALL = {"precision": "fp32", "start": "random", "batch_size": 8, "train": {"max_steps": 2, "learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("baselines")
    write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    write_reviews(root / "reviews.csv", 120)
    rng, lines = np.random.default_rng(0), ["text,label"]
    for number in range(200):  # one word decides
        is_good = rng.random() < 0.6
        words = [*rng.choice(WORDS, 5), "wonderful" if is_good else "awful", f"number{number}"]
        lines.append(f"{' '.join(rng.permutation(words))},{'good' if is_good else 'bad'}")
    (root / "opinions.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    write_conll(root / "ner")
    return root


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(frozen, "locate_cache", lambda: folder)
    return folder


def make_recipe(root, name="opinions", **data):
    data = {"dir": str(root / f"{name}.csv"), "max_length": 24} | data
    return SMALL | {"checkpoint": str(root / "bert"), "data": data}


def test_a_word_that_decides_is_found_and_the_run_stays_the_same(root, cache, tmp_path):
    """TF-IDF is near 1, the constant answer at the share of the larger class, and two updates have learned nothing."""
    task, lines = TASKS["classify"], []
    metrics = run(Recipe.make(task, make_recipe(root)), output=tmp_path / "run", report=lines.append)
    plain = Recipe.make(task, make_recipe(root), {"baseline": False})
    without = run(plain, output=tmp_path / "without")
    assert prepare(plain).texts == []
    assert "fitting the baselines: TF-IDF, frozen vectors" in lines
    assert any("warning: dev has 17 rows, too few" in line for line in lines)
    assert metrics["tfidf_score"] == metrics["tfidf_macro_f1"] > 0.95
    assert metrics["majority_accuracy"] < 0.8
    added = metrics.keys() - without.keys()
    assert {name: value for name, value in metrics.items() if name not in added} == without
    assert {name.partition("_")[0] for name in added} == {"tfidf", "frozen", "best", "baseline"}
    assert_same_bits(*(read_weights(tmp_path / name) for name in ("run", "without")))
    tables = [read_table(tmp_path / name / "predictions" / "dev.parquet") for name in ("run", "without")]
    added = ["baseline_prediction", "baseline_probability"]
    assert tables[0].drop_columns(added) == tables[1]
    frame = tables[0].to_pandas()
    assert (frame["baseline_prediction"] == frame["label"]).mean() == pytest.approx(metrics["tfidf_accuracy"])
    assert frame["baseline_probability"].between(0.5, 1).all()
    evaluate(str(tmp_path / "run"), None, None)
    assert read_table(tmp_path / "run" / "predictions" / "dev.parquet").select(added) == tables[0].select(added)
    assert run(plain, output=tmp_path / "run") == metrics
    rows = {row.key: row.baselines for row in list_shown(task.table, task.metric, metrics)}
    assert list(rows["accuracy"].values()) == ["majority_accuracy", "tfidf_accuracy", "frozen_accuracy"]
    said = task.comment(metrics)
    assert metrics["baseline_gain"] == pytest.approx(metrics["macro_f1"] - metrics["tfidf_macro_f1"])
    assert any(line.startswith("fine-tuning is not better than TF-IDF: the difference in macro F1") for line in said)
    assert not any("fine-tuning" in line for line in task.comment(metrics | {"baseline_gain_low": 0.01}))
    for facts, advice in {
        "updates": "; 2 updates are few, and more time may help (--epochs, or a longer --budget)",
        "is_learned": "; the loss is near 0, so that longer training will not help: read the mistakes",
        "searched": ")",
    }.items():
        (line,) = [line for line in task.comment({facts: True} | metrics) if "not better than" in line]
        assert line.endswith(advice)
        assert line.count("; ") == advice.count("; ")
    (line,) = [line for line in task.comment(metrics | {"updates": 300}) if "not better than" in line]
    assert line.endswith(")"), "nothing is known"
    assert "is_learned" not in metrics
    assert "TF-IDF" in (tmp_path / "run" / CARD).read_text(encoding="utf-8")


@pytest.mark.parametrize(("label", "score"), [("tags", "macro_f1"), ("price", "pearson")])
def test_several_labels_and_numbers_of_pairs_have_one_too(label, score, root, cache, tmp_path):
    """Pairs have frozen vectors, too."""
    recipe = make_recipe(root, "reviews", text=["title", "body"], label=[label])
    metrics = run(Recipe.make(TASKS["classify"], recipe), output=tmp_path / "run")
    assert metrics["tfidf_score"] == metrics[f"tfidf_{score}"] > metrics[f"majority_{score}"]
    assert metrics["best_baseline"] == "tfidf"
    assert metrics["frozen_fitted"] == metrics["tfidf_fitted"]


def test_endings_of_words_are_found_by_characters(root, cache, tmp_path, monkeypatch):
    """No word occurs twice, so that words say nothing; folds choose a weak penalty for the endings."""
    rng, lines = np.random.default_rng(0), ["text,label"]
    for number in range(300):
        stems = ["".join(rng.choice(list("bcdfgklmnprst"), 6)) for _ in range(3)]
        lines.append(f"{' '.join(stem + 'aeeo'[number % 2 :: 2] for stem in stems)},{'ab'[number % 2]}")
    (root / "endings.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    chosen = []
    choose = baselines.choose_head
    monkeypatch.setattr(
        baselines, "choose_head", lambda *given, **named: chosen.append(choose(*given, **named)) or chosen[-1]
    )
    metrics = run(Recipe.make(TASKS["classify"], make_recipe(root, "endings")), output=tmp_path / "run")
    assert chosen[0] == ("characters", 100.0)
    assert metrics["tfidf_score"] > 0.95


def test_equal_texts_have_one_group(root, tmp_path):
    """The integers of train's rows are numbers of their texts, or of the groups that the data name."""
    lines = [f"text {number // 2},{'ab'[number % 2]},{number // 4}" for number in range(80)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label,person", *lines, ""]), encoding="utf-8")
    for group, most in (("", 2), ("person", 4)):
        data = {"dir": str(tmp_path / "rows.csv"), "text": ["text"], "label": ["label"], "group": group}
        prepared = prepare(Recipe.make(TASKS["classify"], make_recipe(root) | {"data": data}))
        counts = np.unique(prepared.groups, return_counts=True)[1]
        assert len(prepared.groups) == len(prepared.data["train"])
        assert counts.tolist() == [most] * len(counts)


@pytest.mark.parametrize("features", ["", "last"])
def test_tags_have_that_of_words(features, root, cache, tmp_path):
    data = {"dir": str(root / "ner"), "max_length": 32, "features": features, "features_dir": str(tmp_path / "kept")}
    recipe = SMALL | {"checkpoint": str(root / "bert"), "data": data}
    small = {"model": {"bilstm_hidden_size": 8}} if features else {}
    metrics = run(Recipe.make(TASKS["ner"], recipe, small), output=tmp_path / "run")
    assert metrics["words_f1"] == metrics["words_score"] > 0
    assert metrics["best_baseline"] == "words"
    assert metrics["words_scored"] == len(read_table(tmp_path / "run/predictions/dev.parquet"))


def test_large_splits_are_read_in_part(root, cache, tmp_path, monkeypatch):
    """The rows have the smallest keys: the order of the file does not matter."""
    monkeypatch.setattr(baselines, "FROZEN_ROWS", 10)
    for module in ("baselines", "prepare"):
        monkeypatch.setattr(f"bertkit.training.{module}.FITTED_ROWS", 50)
    metrics = run(Recipe.make(TASKS["classify"], make_recipe(root)), output=tmp_path / "run")
    counts = {name: (metrics[f"{name}_fitted"], metrics[f"{name}_scored"]) for name in ("tfidf", "frozen")}
    dev = read_table(tmp_path / "run/predictions/dev.parquet")
    assert counts == {"tfidf": (50, len(dev)), "frozen": (10, 10)}

    lines = (root / "opinions.csv").read_text(encoding="utf-8").splitlines()
    (root / "turned.csv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n", encoding="utf-8")
    again = run(Recipe.make(TASKS["classify"], make_recipe(root, "turned")), output=tmp_path / "again")
    assert [again[f"{name}_score"] for name in counts] == pytest.approx([metrics[f"{name}_score"] for name in counts])


def test_a_run_with_another_seed_finds_what_was_computed(root, cache, tmp_path, monkeypatch):
    found = [run(Recipe.make(TASKS["classify"], make_recipe(root)), output=tmp_path / "one")]
    for module, name in ((frozen, "run_encoder"), (baselines, "vectorize_texts")):
        monkeypatch.setattr(module, name, lambda *given: 1 / 0)
    other = {"train": {"seed": 1}}
    found.append(run(Recipe.make(TASKS["classify"], make_recipe(root), other), output=tmp_path / "two"))
    assert len({(one["tfidf_score"], one["frozen_score"]) for one in found}) == 1


def test_a_run_needs_no_cache(tmp_path, monkeypatch):
    """An array is made where the cache has a file instead of its folder, or a damaged array."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(frozen, "locate_cache", lambda: tmp_path / "file" / "cache")
    assert frozen.keep_array("a", lambda: np.arange(3)).tolist() == [0, 1, 2]
    monkeypatch.setattr(frozen, "locate_cache", lambda: tmp_path)
    (tmp_path / "a.npy").write_bytes(b"damaged")
    for _ in range(2):
        assert frozen.keep_array("a", lambda: np.arange(4)).tolist() == [0, 1, 2, 3]


def test_an_option_leaves_them_out(root, call, monkeypatch):
    monkeypatch.setattr("bertkit.training.costs.describe_cost", lambda *_: [])
    given = ["--model", root / "bert", "--data", root / "ner", "--set", "data.max_length=32"]
    code, out, _ = call("ner", *given, "--no-baseline", "--dry-run")
    assert (code, "baseline = false" in out) == (0, True)
