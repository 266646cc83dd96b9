"""GLUE: the table against the paper and the Hub, official files and the Hub's copy, bad files, and runs that learn."""

import json
import shutil
from functools import cache
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers

from bertkit import BertForSequenceClassification, BertModel
from bertkit.data.formats import hub as hub_format
from bertkit.data.formats.glue import index_labels, read_labels, read_split
from bertkit.data.sequences import Sequences, encode_inputs, pad
from bertkit.data.tokenizer import load_tokenizer
from bertkit.metrics.glue import compute_scores
from bertkit.reports.tables import OWN_DATA
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.examples import divide
from bertkit.tasks.glue import BENCHMARKS, GLUE, get_glue_task
from bertkit.tasks.text import TextSequences
from bertkit.training import trainer
from bertkit.training.network import make_model
from bertkit.training.recipe import Recipe, merge
from bertkit.training.run import run
from bertkit.training.run_dir import mark_complete, read_log
from tests.official import write_checkpoint, write_glue
from tests.tasks.conftest import load_examples, make_small
from tests.world import assert_same_bits, read_curve, read_weights, stop_at

NAMES = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax"]
NLI = ["entailment", "neutral", "contradiction"]
HUB_LABELS = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "stsb": [],
    "qqp": ["not_duplicate", "duplicate"],
    "mnli": NLI,
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
    "ax": NLI,
}
# Table 1: BERT-base and BERT-large on test, in percent.
TABLE_1 = {
    ("mnli", "accuracy"): (84.6, 86.7),
    ("mnli", "accuracy_mm"): (83.4, 85.9),
    ("qqp", "f1"): (71.2, 72.1),
    ("qnli", "accuracy"): (90.5, 92.7),
    ("sst2", "accuracy"): (93.5, 94.9),
    ("cola", "matthews_correlation"): (52.1, 60.5),
    ("stsb", "spearmanr"): (85.8, 86.5),
    ("mrpc", "f1"): (88.9, 89.3),
    ("rte", "accuracy"): (66.4, 70.1),
}
TABLE_5 = {
    ("mnli", "accuracy"): 84.4,
    ("qnli", "accuracy"): 88.4,
    ("mrpc", "accuracy"): 86.7,
    ("sst2", "accuracy"): 92.7,
}
LEARNED = ("cola", "mrpc", "stsb", "mnli")


# --- The table --------------------------------------------------------------------------------------------------------


def test_the_papers_figures():
    shown = {(name, row.key): row.paper for name, task in GLUE.items() for row in task.table}
    test = {
        key: (paper["BERT-base, test"], paper["BERT-large, test"])
        for key, paper in shown.items()
        if "BERT-base, test" in paper
    }
    assert test == {key: tuple(round(value / 100, 3) for value in values) for key, values in TABLE_1.items()}
    dev = {key: paper["BERT-base, dev"] for key, paper in shown.items() if "BERT-base, dev" in paper}
    assert dev == {key: round(value / 100, 3) for key, value in TABLE_5.items()}
    assert set(shown) >= {(row.name, metric) for row in BENCHMARKS for metric in row.metrics}
    assert all(row.metrics[0] == GLUE[row.name].metric for row in BENCHMARKS if row.metrics)


def test_a_task_is_found_by_any_official_spelling(refused):
    assert [get_glue_task(name).name for name in ("SST-2", "MNLI", "sts_b", "CoLA")] == ["sst2", "mnli", "stsb", "cola"]
    with refused():
        get_glue_task("mnlii")


# --- The data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def hub(monkeypatch, glue):
    """The Hub's copy of the fixture: class labels or float32 scores, -1 in the test sets.

    Returns the names of the splits and configurations that it lacks, for the test to fill.
    """
    read, missing = {name: load(name, glue) for name in NAMES}, set()

    def serve(name, config):
        assert name == "nyu-mll/glue"
        if config in missing:
            raise ValueError(f"BuilderConfig '{config}' not found")
        splits = {}
        for row in BENCHMARKS:
            for split, form in row.splits.items():
                if form.hub[0] == config and form.hub[1] not in missing:
                    splits[form.hub[1]] = make_rows(row, read[row.name][split])
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(hub_format, "explain_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", serve)
    return missing


def make_rows(row, examples):
    """Return a split as on the Hub."""
    columns, count = examples.rows.table.to_pydict(), len(examples)
    labels = [-1] * count if examples.labels is None else examples.labels.tolist()
    label = datasets.ClassLabel(names=HUB_LABELS[row.name]) if row.labels else datasets.Value("float32")
    features = {name: datasets.Value("string") for name in columns} | {"label": label, "idx": datasets.Value("int32")}
    columns |= {"label": labels, "idx": list(range(count))}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def load(name, folder):
    return load_examples(GLUE[name], folder)[0]


def test_the_hubs_copy_gives_what_the_official_files_give(glue, hub):
    for name in NAMES:
        official, copy = load(name, glue), load(name, "")
        assert list(official) == list(get_glue_task(name).row.splits) == list(copy)
        for split, examples in official.items():
            assert examples[:] == copy[split][:]
            np.testing.assert_array_equal(examples.labels, copy[split].labels)


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_labels_are_the_ones_in_the_files(name, glue):
    """Each text is a cell of its line, in the order of the texts, as is the label in its official spelling."""
    row = get_glue_task(name).row
    for split, examples in load(name, glue).items():
        lines = (glue / row.splits[split].file).read_text(encoding="utf-8-sig").split("\n")[:-1]
        assert len(lines) - len(examples) in (0, 1)
        for index, (line, texts) in enumerate(zip(lines[-len(examples) :], examples[:], strict=True)):
            cells = line.split("\t")
            assert [cell for cell in cells if cell in texts] == list(texts)
            if examples.labels is not None:
                label = examples.labels[index]
                assert (list(row.labels)[label] if row.labels else f"{label:.3f}") in cells


def test_missing_splits_that_are_not_needed_are_named_and_passed_over(tmp_path):
    skip = ("MNLI/dev_mismatched.tsv", "MNLI/test_matched.tsv", "diagnostic/diagnostic.tsv")
    folder = write_glue(tmp_path, skip=skip)
    examples, lines = load_examples(GLUE["mnli"], folder)
    assert list(examples) == ["train", "dev_matched", "test_mismatched"]
    assert lines[:3] == [f"MNLI: {folder / file} not found, skipping" for file in skip]
    assert lines[3] == "MNLI: train 48, dev_matched 18, test_mismatched 10"


def test_splits_that_the_hubs_copy_lacks_are_passed_over_unless_needed(hub, refused):
    hub.update({"test_matched", "ax"})
    assert list(load("mnli", "")) == ["train", "dev_matched", "dev_mismatched", "test_mismatched"]
    for missing in ("validation_matched", "mnli"):
        hub.add(missing)
        with refused():
            load("mnli", "")


def test_bad_files_are_refused(glue, tmp_path, refused):
    folder = shutil.copytree(glue, tmp_path / "glue")
    for name, file, old, new in (
        ("rte", "RTE/dev.tsv", "\tnot_entailment\n", "\tperhaps\n"),
        ("stsb", "STS-B/train.tsv", "\t0.000\n", "\t7\n"),
        ("stsb", "STS-B/dev.tsv", "\t0.000\n", "\tnan\n"),
        ("qnli", "QNLI/dev.tsv", "\tlabel\n", "\tgold\n"),
    ):
        text = (folder / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1), encoding="utf-8")
        with refused():
            load(name, folder)
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "QNLI" / "dev.tsv").unlink()
    with refused():
        load("qnli", folder)


def test_mistakes_in_a_recipe_are_refused_and_nothing_is_written(glue, bert, tmp_path, refused):
    for name, change in (
        ("rte", {"data": {"dir": "no/folder"}}),
        ("rte", {"checkpoint": ""}),
        ("ax", {"checkpoint": ""}),
        ("rte", {"checkpoint": "no/model"}),
        ("rte", {"freeze": "encoder", "reinit_layers": 1}),
        ("rte", {"phase": [{"share": 1.0, "max_length": 20}]}),
        ("rte", {"train": {"num_train_epochs": 0.0}}),
    ):
        with refused():
            run(Recipe.make(TASKS[name], merge(make_recipe(bert, glue), change)), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- Runs -------------------------------------------------------------------------------------------------------------


def make_recipe(checkpoint, folder, **train):
    """48 updates, 6 an epoch, of a tiny model in fp32."""
    return make_small(checkpoint, folder, {"max_length": 32}, **{"num_train_epochs": 8.0} | train)


@pytest.fixture(scope="module")
def finish(glue, bert, tmp_path_factory):
    """Return a finished run of a task, made once: its directory, metrics and messages."""

    @cache
    def finish(name):
        output, lines = tmp_path_factory.mktemp("runs") / name, []
        recipe = Recipe.make(TASKS[name], make_recipe(bert, glue))
        return output, run(recipe, output=output, report=lines.append), lines

    return finish


def test_rows_that_decide_choose_the_best_epoch_and_are_not_scored(bert, glue, tmp_path):
    every = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    recipe = merge(make_recipe(bert, glue, num_train_epochs=4.0, **every), {"data": {"tune_share": 0.4}})
    metrics = run(Recipe.make(GLUE["rte"], recipe), output=tmp_path / "run")
    evaluated = [entry["eval_accuracy"] for entry in read_log(tmp_path / "run") if "eval_accuracy" in entry]
    assert len(evaluated) == 4
    assert metrics["tune_score"] == max(evaluated)
    _, scored = divide(GLUE["rte"], load("rte", glue)["dev"], 0.4)
    written = (tmp_path / "run" / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    names = list(GLUE["rte"].row.labels)
    right = [line.split("\t")[1] == names[label] for line, label in zip(written, scored.labels, strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum(right) / len(right))
    assert "chosen_on_dev" not in metrics
    recipe = make_recipe(bert, glue, num_train_epochs=1.0, **every)
    without = run(Recipe.make(GLUE["rte"], recipe), output=tmp_path / "whole")
    assert without["chosen_on_dev"] == "the checkpoint"


@pytest.mark.parametrize("name", LEARNED)
def test_a_run_learns_and_its_metrics_are_fractions(finish, name):
    output, metrics, lines = finish(name)
    own = set(GLUE[name].row.metrics)
    expected = own | {f"majority_{key}" for key in own} | {"score", "majority_score", "updates"}
    expected |= {"ece", "brier"} if name != "stsb" else set()
    expected |= {"accuracy_mm", "ece_mm", "brier_mm"} if name == "mnli" else set()
    limited = {key for key in expected if f"{key}_low" in metrics}
    assert limited == expected - {"updates"} - {key for key in expected if key.startswith(("majority_", "ece"))}
    assert set(metrics) - {"is_learned"} == expected | {f"{key}_{end}" for key in limited for end in ("low", "high")}
    assert all(metrics[f"{key}_low"] <= metrics[key] <= metrics[f"{key}_high"] for key in limited)
    assert json.loads((output / "metrics.json").read_text()) == metrics
    assert (metrics["score"], metrics["updates"]) == (metrics[GLUE[name].metric], 48)
    assert metrics["majority_score"] == metrics[f"majority_{GLUE[name].metric}"]
    assert all(type(metrics[key]) is float and -1 <= metrics[key] <= 1 for key in expected - {"updates"})
    assert metrics["score"] > max(metrics["majority_score"] + 0.1, 0.7)
    assert metrics.get("accuracy_mm", 1.0) > 0.7
    assert any("randomly initialised, because" in line and "classifier.weight" in line for line in lines)
    assert GLUE[name].comment(metrics) == []


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("mrpc", [1, 0, 1], {"majority_f1": 0.8, "majority_accuracy": 2 / 3, "majority_score": 0.8}),
        ("mnli", [2, 1, 2, 0], {"majority_accuracy": 0.5, "majority_score": 0.5}),
        ("stsb", [0.5, 3.0], {"majority_spearmanr": 0.0, "majority_pearson": 0.0, "majority_score": 0.0}),
    ],
)
def test_the_baseline_is_the_most_frequent_label_of_the_dev_set(name, labels, expected):
    """MRPC: two of three are class 1, of which the constant finds all; STS-B: a constant correlates with nothing."""
    empty = np.zeros(len(labels), int)
    dev = TextSequences(Sequences(empty, empty, empty, np.array(labels)), GLUE[name].space)
    assert GLUE[name].baseline(None, dev) == pytest.approx(expected)


@pytest.mark.parametrize("name", LEARNED)
def test_the_written_files_score_what_the_run_scored_or_fit_the_leaderboard(finish, glue, name):
    output, metrics, _ = finish(name)
    task = get_glue_task(name)
    for split in task.row.splits.values():
        if split.scores:
            gold = glue / split.file
            lines = (output / "predictions" / gold.name).read_text().splitlines()[1:]
            read = index_labels(task.row).__getitem__ if task.row.labels else float
            answers = [read(line.split("\t")[1]) for line in lines]
            labels = read_labels(task.row, read_split(task.row, next(iter(task.row.splits)), gold))
            scores = compute_scores(task.row.metrics, answers, labels)
            assert scores == {key: metrics[split.scores.format(key)] for key in task.row.metrics}
        if split.submission:
            head, *lines = (output / "predictions" / split.submission).read_text().splitlines()
            assert head == "index\tprediction"
            numbers, answers = zip(*(line.split("\t") for line in lines), strict=True)
            assert list(map(int, numbers)) == list(range(9 if split.submission == "AX.tsv" else 10))
            assert set(answers) <= set(task.row.labels) or all(0 <= float(answer) <= 5 for answer in answers)


def test_scores_for_the_leaderboard_are_clipped_and_those_of_dev_are_not():
    logits = np.array([[-1.25], [0.1], [4.99994], [7.0]], np.float32)
    task = GLUE["stsb"]
    answers = task.decode(logits, SimpleNamespace(space=task.space, labels=None, rule=None))
    text = task.format_predictions(answers, None, "test")["STS-B.tsv"]
    assert text == "index\tprediction\n0\t0.000\n1\t0.100\n2\t5.000\n3\t5.000\n"
    lines = task.format_predictions(answers, None, "dev")["dev.tsv"].splitlines()[1:]
    assert [float(line.split("\t")[1]) for line in lines] == logits[:, 0].astype(float).tolist()


def test_a_score_no_better_than_the_majority_is_warned_of():
    """QQP's majority class has an F1 of 0, so the accuracy decides."""
    for name, found, majority, warned in [
        ("rte", {"accuracy": 0.5}, {"accuracy": 0.5}, "accuracy (50.0) is not above the majority class (50.0)"),
        ("rte", {"accuracy": 0.51}, {"accuracy": 0.5}, ""),
        ("qqp", {"f1": 0.54, "accuracy": 0.37}, {"f1": 0.0, "accuracy": 0.63}, "accuracy (37.0) is not above"),
        ("mnli", {"accuracy": 0.4, "accuracy_mm": 0.3}, {"accuracy": 0.35}, ""),
        ("ax", {}, {}, ""),
    ]:
        lines = GLUE[name].comment(found | {f"majority_{key}": value for key, value in majority.items()})
        assert [line.startswith(f"warning: {warned}") for line in lines] == [True] * bool(warned)
    known = {"accuracy": 0.5, "majority_accuracy": 0.5}
    for task, found, proposed in [(GLUE["rte"], {}, True), (GLUE["rte"], {OWN_DATA: True}, False)]:
        assert ["preset=auto" in line for line in task.comment(known | found)] == [proposed]
    known = {"macro_f1": 0.5, "majority_macro_f1": 0.5}
    assert ["preset=auto" in line for line in TASKS["classify"].comment(known)] == [False]


def test_the_recipes_are_the_papers_and_mosbachs(bert):
    train = Recipe.make(GLUE["rte"], {"checkpoint": str(bert), "preset": "stable"}).train
    assert (train["optim"], train["num_train_epochs"], train["learning_rate"]) == ("adamw_torch", 20.0, 2e-5)
    assert (train["warmup_steps"], train["lr_scheduler_type"], train["weight_decay"]) == (0.1, "linear", 0.01)
    paper = Recipe.make(GLUE["rte"], {"checkpoint": str(bert)})
    assert (paper.batch_size, paper.data["max_length"]) == (32, 128)
    assert (paper.train["num_train_epochs"], paper.train["learning_rate"]) == (3.0, 2e-5)
    assert (paper.train["optim"], paper.train["warmup_steps"]) == ("bert_adam", 0.1)


def test_plain_transformers_loads_a_finished_run(finish, glue):
    output, _, _ = finish("mrpc")
    row, examples = get_glue_task("mrpc").row, load("mrpc", glue)["dev"]
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float64).eval()
    assert type(stock) is transformers.BertForSequenceClassification
    assert stock.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    assert stock.config.label2id == {"not_equivalent": 0, "equivalent": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    texts = list(map(list, zip(*examples[:], strict=True)))
    batch = tokenizer(*texts, truncation=True, max_length=32, padding=True, return_tensors="pt")
    data = encode_inputs(list(zip(*texts, strict=True)), None, load_tokenizer(output), 32)
    ours = BertForSequenceClassification.from_pretrained(output, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = ours(**pad(data.__getitems__(range(len(data))))).logits
        torch.testing.assert_close(stock(**batch).logits, expected, rtol=0, atol=1e-10)
    classify = transformers.pipeline("text-classification", model=str(output), device="cpu")
    pairs = [{"text": one, "text_pair": other} for one, other in examples[:]]
    predicted = (output / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    answers = [row.labels[line.split("\t")[1]] for line in predicted]
    assert [classify(pair)["label"] for pair in pairs] == answers


# --- Models before training -------------------------------------------------------------------------------------------


def test_ax_is_predicted_by_a_model_of_mnli(finish, glue, tmp_path):
    output, _, _ = finish("mnli")
    expected = (output / "predictions" / "AX.tsv").read_text()
    assert set(expected.split()) > set(NLI)
    recipe = {"checkpoint": str(output), "precision": "fp32", "data": {"dir": str(glue), "max_length": 32}}
    assert run(Recipe.make(GLUE["ax"], recipe), output=tmp_path / "ax") == {"updates": 0}
    assert (tmp_path / "ax" / "predictions" / "AX.tsv").read_text() == expected
    assert (tmp_path / "ax" / "metrics.json").exists()
    labels = json.loads((tmp_path / "ax" / "config.json").read_text())["id2label"]
    assert list(labels.values()) == NLI


def test_ax_needs_a_model_with_its_labels(glue, tmp_path, refused):
    checkpoint = write_checkpoint(tmp_path / "start", labels=("entailment", "not_entailment"))
    recipe = {"checkpoint": str(checkpoint), "precision": "fp32", "data": {"dir": str(glue), "max_length": 32}}
    with refused():
        run(Recipe.make(GLUE["ax"], recipe), output=tmp_path / "run")


def make(name, checkpoint, glue, lines=None, **top):
    """Return a task's model before training, as a run makes it."""
    recipe = Recipe.make(GLUE[name], make_recipe(checkpoint, glue), top)
    tokenizer = load_tokenizer(checkpoint)
    settings = GLUE[name].configure(recipe, tokenizer, None)
    return make_model(GLUE[name], recipe, settings, *([] if lines is None else [lines.append]))


def test_a_classifier_of_the_same_labels_is_kept_and_another_is_new(tmp_path, glue):
    checkpoint = write_checkpoint(tmp_path, labels=["not_entailment", "entailment"])  # WNLI's order, not that of RTE
    saved, lines = read_weights(checkpoint), []
    same, other = make("wnli", checkpoint, glue, lines), make("rte", checkpoint, glue, lines)
    assert lines == []
    assert torch.equal(same.classifier.weight, saved["classifier.weight"])
    assert torch.equal(other.classifier.weight, saved["classifier.weight"].flip(0))
    assert torch.equal(other.classifier.bias, saved["classifier.bias"].flip(0))
    assert other.config.id2label == {0: "entailment", 1: "not_entailment"}
    for name, count in (("cola", 2), ("mnli", 3), ("stsb", 1)):
        model = make(name, checkpoint, glue, lines)
        assert lines.pop().endswith("has no weights of this name and shape: classifier.bias, classifier.weight")
        assert model.classifier.weight.shape == (count, 32)
        assert list(model.config.id2label.values()) == (HUB_LABELS[name] or ["similarity"])


def test_reinit_layers_draws_the_pooler_and_the_top_layers_and_nothing_else(tmp_path, glue):
    """Every parameter of the checkpoint is far from its initial value, as after pre-training."""
    model = BertModel.from_pretrained(write_checkpoint(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    before = {f"bert.{name}": weight for name, weight in read_weights(tmp_path).items()}
    for count in (0, 1, 2):
        lines = []
        found = make("rte", tmp_path, glue, lines, reinit_layers=count).state_dict()
        anew = [f"bert.encoder.layer.{number}." for number in range(2 - count, 2)] + ["bert.pooler."] * bool(count)
        assert set(found) - set(before) == {"classifier.weight", "classifier.bias"}
        for name, weight in before.items():
            if not name.startswith(tuple(anew)):
                assert torch.equal(found[name], weight), name
            elif name.endswith("LayerNorm.weight"):
                assert (found[name] == 1).all(), name
            elif name.endswith("bias"):
                assert not found[name].any(), name
            else:
                assert 0.015 < found[name].std() < 0.025, name
        assert ("randomly initialised: the pooler" in " ".join(lines)) == bool(count)


def test_a_stop_at_the_end_of_an_epoch_comes_after_its_evaluation(glue, tmp_path, monkeypatch):
    """Evaluation uses random numbers; and the checkpoint is written once."""
    start = write_checkpoint(tmp_path / "bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    every = {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 1}
    recipe = Recipe.make(GLUE["rte"], make_recipe(start, glue, num_train_epochs=3.0, **every))
    metrics, written = run(recipe, output=tmp_path / "straight"), []
    monkeypatch.setattr(trainer, "mark_complete", lambda path: written.append(path.name) or mark_complete(path))
    with pytest.raises(Interrupted, match="after update 6;"):
        run(recipe, output=tmp_path / "run", progress=stop_at(6))
    assert run(recipe, output=tmp_path / "run") == metrics
    assert written == [f"checkpoint-{update}" for update in (6, 12, 18)]
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "straight")
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "straight"))
