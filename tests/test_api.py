"""The Python door: every form of data gives the same run, a finished run at work, and the scikit-learn estimator."""

import copy
import datetime
import doctest
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks

import bertkit
from bertkit import estimator
from bertkit.api import sort_settings
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.recipe import read_recipe
from tests.official import write_checkpoint, write_reviews, write_table
from tests.world import assert_same_bits, read_weights

pytestmark = pytest.mark.usefixtures("here")

SETTINGS = {"text": ["title", "body"], "label": "stars", "precision": "fp32", "batch_size": 8} | {"preset": "paper"}
SMALL = {"max_length": 32, "batch_size": 8, "precision": "fp32"}
QUICK = {"learning_rate": 3e-3, "num_train_epochs": 1.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a tiny BERT, a table of reviews as a file and as a DataFrame, and a run on the DataFrame."""
    folder = tmp_path_factory.mktemp("world")
    model = write_checkpoint(folder / "bert", initializer_range=0.1)
    table = write_reviews(folder / "reviews.csv", 120)
    frame = pd.read_csv(table)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    world = SimpleNamespace(model=model, table=table, frame=frame, rows=rows, keywords=SETTINGS | {"model": model})
    world.run = train(world, frame, folder / "run")
    return world


def train(world, data, output, **keywords):
    values = world.keywords | {"train": QUICK} | keywords
    return bertkit.train("classify", data=data, output=output, **values)


FORMS = {  # name -> makes it of the rows of the table and a folder
    "Parquet": lambda rows, folder: write_table(folder / "reviews.parquet", rows),
    "Dataset": lambda rows, folder: datasets.Dataset.from_pandas(pd.DataFrame(rows)),
    "Table": lambda rows, folder: pa.Table.from_pylist(rows),
    "list": lambda rows, folder: [{key: np.nan if cell is None else cell for key, cell in row.items()} for row in rows],
    "dict": lambda rows, folder: {"train": write_table(folder / "reviews.csv", rows)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_weights_and_predictions(form, world, tmp_path):
    run = train(world, FORMS[form](world.rows, tmp_path), tmp_path / "run")
    assert_same_bits(*(read_weights(Path(each.source)) for each in (world.run, run)))
    for split in ("dev", "test"):
        assert run.predictions(split).column("key").equals(world.run.predictions(split).column("key"))


def test_columns_that_are_not_read_and_numbers_as_their_names_change_nothing(world, tmp_path):
    rows = np.arange(len(world.frame))
    odd = world.frame.assign(
        age=pd.cut(rows, 4),
        number=[f"n{row}" if row % 3 else row for row in rows],
        facts=[{}, {"a": 1}, {"a": "b"}] * 40,
    )
    numbered = odd.set_axis(range(odd.shape[1]), axis=1)
    names = dict(zip(odd.columns, numbered.columns, strict=True))
    columns = {"text": [names["title"], names["body"]], "label": names["stars"]}
    calls = [(odd, {}), (numbered, columns), (numbered.to_dict("records"), columns)]
    for number, (data, keywords) in enumerate(calls):
        output = tmp_path / f"run{number}"
        run = train(world, data, output, **keywords)
        assert_same_bits(*(read_weights(Path(each.source)) for each in (world.run, run)))
        assert train(world, data, output, **keywords) == run, "it is finished"
        assert run.evaluate(data)["macro_f1"] == world.run.evaluate(world.frame)["macro_f1"]
        found = pd.DataFrame(run.predict(data))
        assert found.label.tolist() == world.run.predict(world.frame).label.tolist()


def test_names_in_a_call_may_be_numbers():
    given = {"text": 0, "label": [1, "2"], "group": 3, "folds": 4, "labels": ["a"]}
    found = {"text": ["0"], "label": ["1", "2"], "group": "3", "folds": 4, "labels": ["a"]}
    assert sort_settings(TASKS["classify"], given) == {"data": found}


def test_evaluate_takes_columns_whose_names_are_numbers(world):
    frame = world.frame[["title", "body", "stars"]]
    numbered = frame.set_axis([0, 1, 2], axis=1)
    scores = world.run.evaluate(numbered, text=[0, 1], label=2)
    assert scores["macro_f1"] == world.run.evaluate(world.frame)["macro_f1"]


def test_class_labels_become_their_names(world, tmp_path):
    names = ["poor", "fair", "fine"]
    frame = world.frame[["title"]].assign(stars=world.frame.stars - 1)
    label = datasets.ClassLabel(names=names)
    rows = datasets.Dataset.from_pandas(frame).cast_column("stars", label).select(range(60))
    data = datasets.DatasetDict(train=rows, validation=rows.select(range(30)), unsupervised=rows)
    run = train(world, data, tmp_path / "run", text="title")
    assert {path.name for path in tmp_path.glob("run/data/*")} == {"train.parquet", "validation.parquet"}
    assert set(run.predictions().column("label").to_pylist()) == {*names}


def test_entities_from_memory(world, tmp_path):
    sentences = [["word1", "good", "word2"], ["bad", "word3", "word4"]] * 20
    rows = [{"tokens": tokens, "ner_tags": ["O", "B-PER", "O"]} for tokens in sentences]
    data = {"train": rows, "dev": rows[:4]}
    run = bertkit.train("ner", data, model=world.model, output=tmp_path / "run", train=QUICK, **SMALL)
    assert "entities" in run.predict([{"text": "word1 good"}])[0]
    assert list(run.predict(pd.DataFrame({"text": ["word1 good"]}, index=["a"])).index) == ["a"]


def test_pretraining_reads_files(world, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"word{n} good.\nword{n} bad." for n in range(40)))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    keywords = {"config": sizes, "vocab": world.model, "heldout_share": 0.2, "train": {"max_steps": 2}} | SMALL
    run = bertkit.train("pretrain", [corpus], output=tmp_path / "run", **keywords)
    assert run.metrics["updates"] == 2
    assert run.predict(["word1 [MASK]."])[0]["masks"]


# --- Calls ------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_repeated(world, refused):
    output, lines = Path(world.run.source), []
    before = (output / "metrics.json").stat().st_mtime_ns
    assert train(world, world.frame, output, report=lines.append) == world.run
    assert f"{output} is finished; its scores are in {output / 'metrics.json'}" in lines
    with refused():
        train(world, world.frame, output, batch_size=16)
    with refused():
        train(world, world.frame.head(100), output)
    assert (output / "metrics.json").stat().st_mtime_ns == before


MISTAKES = [
    {"batchsize": 8},
    {"epoch": 3},
    {"data": 3},
    {"data": [{"a": 1}, {"a": "b"}]},
    {"data": {"trian": [{"a": "b"}]}},
    {"folds": 2, "restarts": 2},
    {"budget": "1m", "train": {"max_steps": 3}},
    {"label": "strs"},
    {"max_length": 3},
    {"max_length": "long"},
    {"train": {"learning_rat": 1.0}},
    {"train": {"batch_size": 8}},
    {"train": {"max_length": 64}},
    {"weight_decay": 0.1},
    {"epochs": "three", "train": {}},
    {"config": {"zzz": 1}},
    {"phase": [{"share": 1.0, "max_length": 8}]},
]


@pytest.mark.parametrize("keywords", MISTAKES, ids=str)
def test_a_mistake_in_a_call_is_refused(keywords, world, tmp_path, refused):
    with refused():
        train(world, **({"data": world.frame, "output": tmp_path / "run"} | keywords))
    assert not (tmp_path / "run").exists(), "tables of a run that did not begin are removed"


def test_an_unknown_task_or_data_of_another_kind_is_refused(world, refused):
    for task, data in (("squad", None), ("pretrain", world.frame)):
        with refused():
            bertkit.train(task, data)


def describe_process():
    """Return seeds, signal handlers, logging levels and threads of this process."""
    seeds = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    levels = [logging.getLogger(name).level for name in ("", "transformers", "datasets", "accelerate", "bertkit")]
    return seeds, handlers, levels, torch.get_num_threads(), os.getcwd()


def test_the_process_is_left_as_it_was_found(world, tmp_path):
    before = describe_process()

    def stop(done, total, losses):
        if done:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped after update"):
        train(world, world.frame, tmp_path / "stopped", progress=stop)
    with pytest.raises(bertkit.UsageError, match="stopped is not finished; repeat the command that started it"):
        bertkit.load(tmp_path / "stopped")
    assert describe_process() == before
    goes_on = []
    train(world, world.frame, tmp_path / "stopped", report=goes_on.append)
    assert any("continues after checkpoint-" in line for line in goes_on)
    assert describe_process() == before


def test_a_notebook_has_one_bar_and_a_table(world, tmp_path, monkeypatch, capsys):
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=True))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    run = train(world, world.frame, tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert "11/11" in err
    assert "loss=" in err
    page = run._repr_html_()
    assert page.startswith("<div")
    assert "macro F1 (%)" in page
    assert run.source not in page
    assert "constant answer" in page
    monkeypatch.chdir(tmp_path)
    assert repr(run) == "Run(source='run')"
    assert bertkit.Run(str(world.model))._repr_html_() is None


@pytest.mark.parametrize("keywords", [{"folds": 2}, {"restarts": 2}, {"search": 1}])
def test_folds_restarts_and_a_search(keywords, world, tmp_path):
    output, seen = tmp_path / "runs", []
    train_keys = {"num_train_epochs": 1.0} if "search" in keywords else QUICK
    found = train(world, world.frame, output, train=train_keys, progress=lambda *news: seen.append(news), **keywords)
    runs = [found] if "search" in keywords else found
    assert len(runs) == (1 if "search" in keywords else 2)
    assert all("score" in run.metrics for run in runs)
    assert seen
    assert (output / "out_of_fold.parquet").exists() == ("folds" in keywords)
    assert (output / "search" / "trials.md").exists() == ("search" in keywords)


# --- A run at work ----------------------------------------------------------------------------------------------------


def test_a_run_predicts_and_scores(world):
    run = bertkit.load(world.run.source)
    assert run == world.run
    assert run.metrics["score"] == run.metrics["macro_f1"]
    dev = run.predictions()
    texts = [list(pair) for pair in zip(*(dev.column(name).to_pylist() for name in ("title", "body")), strict=True)]
    assert [found["label"] for found in run.predict(texts)] == dev.column("prediction").to_pylist()
    frame = world.frame.sample(10, random_state=0)
    found = run.predict(frame)
    assert list(found.index) == list(frame.index)
    assert {"label", "probability", "probability_1"} <= {*found.columns}
    assert [each["label"] for each in run.predict(pa.Table.from_pandas(frame))] == found.label.tolist()
    assert [each["label"] for each in run.predict(datasets.Dataset.from_pandas(frame))] == found.label.tolist()
    scores = run.evaluate(dev.select(["title", "body", "label"]).rename_columns(["title", "body", "stars"]))
    assert scores["macro_f1"] == run.metrics["macro_f1"]
    assert run.evaluate(world.table)["rows"] == 120
    assert not (Path(run.source) / "evaluations").exists()
    with pytest.raises(bertkit.UsageError, match=r"trian\.parquet does not exist"):
        run.predictions("trian")


def test_scores_are_a_dict_that_is_shown_as_a_table(world):
    scores = world.run.evaluate(world.frame)
    assert isinstance(scores, Mapping)
    given = dict(scores)
    assert json.loads(json.dumps(given)) == given == scores
    assert {"score", "score_low", "macro_f1", "rows", "leaks", "majority_accuracy"} <= scores.keys()
    for other in (copy.copy(scores), pickle.loads(pickle.dumps(scores))):
        assert (other, str(other)) == (scores, str(scores))
    caption, heads, *lines = str(scores).splitlines()
    assert caption == "data, 120 rows"
    assert re.split(r"\s{2,}", heads)[:3] == ["held out", "baseline", "score"]
    shown = next(line for line in lines if line.startswith("macro F1 (%)"))
    assert f" {100 * scores['macro_f1']:.1f} " in shown
    assert len(lines) < 12
    page = scores._repr_html_()
    assert page.startswith("<div")
    assert "macro F1 (%)" in page


def test_a_run_is_found_and_copied_after_it_has_predicted(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(world, world.frame, "runs/one")
    (tmp_path / "elsewhere").mkdir()
    opened = bertkit.load("runs/one"), bertkit.Run("runs/one")
    monkeypatch.chdir("elsewhere")
    expected = run.predict([["good", "so"]])
    for other in (*opened, copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert other == run
        assert other.predict([["good", "so"]]) == expected
    assert "leaks" in run.evaluate(world.frame)
    assert bertkit.Run("ada/stars").source == "ada/stars"


PUSHED = [
    "README.md",
    "calibration.json",
    "config.json",
    "environment.json",
    "metrics.json",
    "model.safetensors",
    "recipe.toml",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_log.jsonl",
    "vocab.txt",
]


def test_push_leaves_data_and_predictions_here(world, hub, tmp_path):
    frame = world.frame.assign(body=world.frame.body + " confidential", customer="customer of the bank")
    run = train(world, frame, tmp_path / "run")
    run.evaluate(frame)
    (tmp_path / "run" / "notes.csv").write_text(frame.to_csv())
    address = run.push("ada/stars", private=True)
    assert address.endswith("ada/stars")
    files = hub.repos["ada/stars"].files
    assert sorted(files) == PUSHED
    cells = [b"confidential", b"customer", *(title.encode() for title in frame.title.dropna() if len(title) > 8)]
    assert [(name, cell) for name, content in files.items() for cell in cells if cell in content] == []


# --- The estimator ----------------------------------------------------------------------------------------------------


FURTHER = {"precision": "fp32", "max_length": 24, "train": {"weight_decay": 0.02}}


def make_estimator(world, **values):
    quick = {"batch_size": 8, "learning_rate": 3e-3, "num_train_epochs": 3, "settings": FURTHER}
    return bertkit.BertClassifier(**{"model": str(world.model), **quick, **values})


CHECKS = ("no_attributes_set_in_init", "get_params_invariance", "set_params", "estimator_cloneable")


@pytest.mark.parametrize("name", CHECKS)
def test_the_estimator_passes_the_checks_of_scikit_learn(name):
    getattr(estimator_checks, f"check_{name}")("BertClassifier", bertkit.BertClassifier())


def test_the_estimator(world, tmp_path):
    made = make_estimator(world, random_state=np.int64(7), output=tmp_path / "run")
    before = {**vars(made)}
    with pytest.raises(NotFittedError):
        made.predict(["good"])
    texts, labels = world.frame.body, world.frame.stars
    assert made.fit(texts, labels) is made
    assert vars(made).keys() - before.keys() == {"classes_", "run_"}
    assert {key: value for key, value in vars(made).items() if key in before} == before
    assert made.classes_.tolist() == [1, 2, 3]
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe["data"]["max_length"] == 24
    assert (recipe["train"]["weight_decay"], recipe["train"]["learning_rate"]) == (0.02, 3e-3)
    probabilities = made.predict_proba(texts)
    assert probabilities.shape == (120, 3)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (made.predict(texts) == made.classes_[probabilities.argmax(1)]).all()
    assert made.score(texts, labels) == (made.predict(texts) == labels).mean()
    content = pickle.dumps(made)
    shutil.rmtree(tmp_path / "run")
    assert (pickle.loads(content).predict_proba(texts) == probabilities).all()
    other = clone(made)
    assert not hasattr(other, "run_")
    assert other.get_params() == made.get_params()


LABELS = {  # two classes -> their names in the run
    (True, False): {"true", "false"},
    (1.0, 2.5): {"1", "2.5"},
    ("1.0", "2"): {"1.0", "2"},
    ("[3]", "{3}"): {"[3]", "{3}"},
    ("TRUE", "true"): {"TRUE", "true"},
    ("nan", "4"): {"nan", "4"},
    ("no ", " no"): {"no ", " no"},
    ("", "a|b"): {"''", "a|b"},
    (datetime.date(2024, 5, 6), datetime.date(2024, 5, 7)): {"2024-05-06", "2024-05-07"},
}


@pytest.mark.parametrize("labels", LABELS, ids=str)
def test_the_classes_of_the_estimator_are_the_labels_as_given(world, labels):
    right = np.array(labels)[(world.frame.stars > 1).astype(int)]
    made = make_estimator(world, num_train_epochs=1).fit(world.frame.body, right)
    assert made.classes_.tolist() == np.unique(right).tolist() == sorted(labels)
    probabilities = made.predict_proba(world.frame.body)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (probabilities > 0).all()
    assert set(made.run_.predictions().column("label").to_pylist()) == LABELS[labels]
    assert all(f"`{name.strip()}`" in Path(made.run_.source, "README.md").read_text() for name in LABELS[labels])


MISSING = [
    ["a", None, "b", "a"],
    ["a", np.nan, "b", "a"],
    [1.0, np.nan, 2.0, 1.0],
    pd.Series([1, None, 2, 1], dtype="Int64"),
    pd.Series(["a", None, "b", "a"], dtype="category"),
    pd.Series(pd.to_datetime(["2024-05-06", None, "2024-05-07", "2024-05-06"])),
]


@pytest.mark.parametrize("labels", MISSING, ids=str)
def test_a_missing_label_is_refused_before_training(labels):
    with pytest.raises(ValueError, match=r"y has no label in 1 row \(first: 1\); leave such rows out"):
        bertkit.BertClassifier(model="nothing").fit(["good"] * 4, labels)


NO_TEXTS = [  # X -> the error
    ("good", "X is of type str; give a list of texts"),
    (np.array("good"), "X is of type str; give a list of texts"),
    ({"text": ["good"]}, "X is of type dict; give a list of texts"),
    (pd.DataFrame({"text": ["good", "bad"], "price": [3.5, 4]}), "X has 3.5 in row 0 of the column 'price', which"),
    (pd.DataFrame({"text": ["good", "bad"], "price": ["?", 4]}), "X has 4 in row 1 of the column 'price', which"),
    ([["good", "bad"], ["good", 5]], "X has 5 in row 1 of the column 1, which is not a text"),
    ([1, 2], "X has 1 in row 0 of the column 0, which is not a text; leave the column out, or convert it"),
]


@pytest.mark.parametrize(("given", "message"), NO_TEXTS, ids=[message for _, message in NO_TEXTS])
def test_what_is_not_a_column_of_texts_is_refused(given, message, world):
    made = make_estimator(world)
    with pytest.raises(ValueError, match=re.escape(message)):
        made.fit(given, ["a", "b"])
    made.run_ = world.run
    for method in (made.predict, made.predict_proba):
        with pytest.raises(ValueError, match=re.escape(message)):
            method(given)


def test_numbers_of_a_regression_are_no_classes(world):
    with pytest.raises(bertkit.UsageError, match=r"different texts in .* rows, too many for labels"):
        make_estimator(world).fit(world.frame.body[:40], np.linspace(0, 1, 40))


def test_a_second_fit_with_other_labels_needs_another_directory(world, tmp_path):
    made = make_estimator(world, num_train_epochs=1, output=tmp_path / "run")
    low = world.frame.stars < 2
    made.fit(world.frame.body, low.map({True: "low", False: "high"}))
    with pytest.raises(bertkit.UsageError, match="holds other data; name another directory"):
        made.fit(world.frame.body, low.map({True: "poor", False: "fine"}))


def test_the_estimator_takes_texts_and_pairs_in_every_form(world):
    frame = world.frame[["title", "body"]]
    made = make_estimator(world).fit(frame, world.frame.stars.map({1: "low", 2: "mid", 3: "top"}))
    folder = Path(made.run_.source)
    expected = made.predict_proba(frame)
    for given in (frame.to_numpy(), frame.to_numpy().tolist(), list(frame.itertuples(index=False, name=None))):
        assert (made.predict_proba(given) == expected).all()
    assert set(made.predict(frame)) <= {"low", "mid", "top"}
    for given in (["a", ["b", "c"]], frame.assign(more="a"), []):
        with pytest.raises(ValueError, match="give one text per row, or two in every row"):
            made.predict(given)
    texts = ["good", None]
    assert estimator.read_texts(pd.DataFrame({"x": texts})) == estimator.read_texts(texts) == [("good",), ("",)]
    assert folder.is_dir()
    del made
    assert not folder.exists()


def test_the_examples_of_the_docstrings_run(world, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS["classify"].recipe, "checkpoint", str(world.model))
    shutil.copytree(world.run.source, "runs/stars")
    frame, ran = world.frame, 0
    names = {"bertkit": bertkit, "BertClassifier": bertkit.BertClassifier}
    names |= {"frame": frame, "run": world.run, "texts": frame.body, "labels": frame.stars}
    for function in (bertkit.load, bertkit.Run.predict, bertkit.BertClassifier, bertkit.train):
        for example in doctest.DocTestParser().get_examples(function.__doc__):
            if function is bertkit.train:
                shutil.rmtree("runs")
            exec(example.source, names)
            ran += 1
    assert ran == 4


def test_the_time_of_a_budget_begins_with_the_call(world, tmp_path, monkeypatch):
    clocks = []
    monkeypatch.setattr("bertkit.api.search_or_train", lambda *recipes, clock, **news: clocks.append(clock))
    train(world, world.frame, tmp_path / "run", budget="20m")
    assert clocks[0].limit - 10 < clocks[0].left < clocks[0].limit == 1200


def test_what_matters_is_a_warning_at_the_line_of_the_call(world, tmp_path):
    few = world.frame.head(40)
    with pytest.warns(bertkit.BertkitWarning, match="too few to tell a good model from a bad one") as found:
        given = train(world, few, tmp_path / "warned", train={}, epochs=1, seed=7, learning_rate=1e-3)
    assert {Path(each.filename).name for each in found if each.category is bertkit.BertkitWarning} == {"test_api.py"}
    assert f"not better than the best baseline: {given.verdict}" in [str(each.message) for each in found]
    recipe = read_recipe(Path(given.source, "recipe.toml"))
    assert [recipe["train"][key] for key in ("num_train_epochs", "seed", "learning_rate")] == [1, 7, 1e-3]
    for number, report in enumerate((None, [].append)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", bertkit.BertkitWarning)
            train(world, few, tmp_path / f"silent{number}", epochs=1, report=report)
