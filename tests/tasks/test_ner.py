"""NER as a task: files, labels by name, words without tokens, conlleval's format, runs."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from bertkit import BertFeaturesForTokenClassification, BertForTokenClassification, BertModel
from bertkit.data.sequences import collate, pad
from bertkit.data.tagging import ABSENT, IGNORED, Sentence, TaggedText, encode_words
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.predictor import Predictor
from bertkit.reports.tables import find_row
from bertkit.system.signals import Interrupted
from bertkit.tasks import ner
from bertkit.tasks.ner import ENTITY_SCORES, NER, describe_words
from bertkit.tasks.prediction import summarize_split
from bertkit.tasks.task import score_summaries
from bertkit.training.parts import add_indices
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.conftest import draft
from tests.official import write_conll
from tests.tasks.conftest import load_examples, read_losses
from tests.world import assert_same_bits, read_curve, read_weights, stop_at

SMALL = {"max_length": 40}


@pytest.fixture
def folder(tmp_path):
    return write_conll(tmp_path / "ner")


def make_recipe(folder, start, **options):
    data = SMALL | {"dir": str(folder)} | options
    return {"checkpoint": start, "batch_size": 8, "baseline": False, "data": data, "train": {"max_steps": 3}}


load = partial(load_examples, NER)


def encode(examples, start, **options):
    return NER.encode(examples, load_tokenizer(start), draft(NER, {"data": SMALL | options}), "dev")


def keep(data, tags):
    """Return the summary (S, W) of a model that predicts these tags for the words with a token."""
    found = (data.names.index(tag) for sentence in tags for tag in sentence)
    kept = np.full((len(data), 99), IGNORED)
    for index in range(len(data)):
        known = [label for place, label in zip(data.locate(index), found, strict=False) if place != ABSENT]
        kept[index, : len(known)] = known
    return kept


# --- The data


def test_the_paper_s_numbers():
    recipe, train = NER.recipe, NER.recipe["train"]
    assert recipe["checkpoint"] == "google-bert/bert-base-cased"
    assert (recipe["batch_size"], train["learning_rate"], train["num_train_epochs"]) == (32, 5e-5, 3)
    assert (recipe["data"]["max_length"], recipe["data"]["context"]) == (512, True)
    assert find_row(NER.table, "f1").paper == {"BERT-base, dev": 0.964, "BERT-large, dev": 0.966}
    assert find_row(NER.table, "test_f1").paper == {"BERT-base, test": 0.924, "BERT-large, test": 0.928}


def test_all_files_are_read(folder):
    examples, lines = load(folder)
    assert lines == ["NER: train 48 sentences, dev 18 sentences, test 10 sentences"]
    assert [part.labels for part in examples.values()] == [("O", "B-LOC", "B-PER", "I-LOC", "I-PER")] * 3
    assert {part.text.scheme for part in examples.values()} == {"IOB1"}
    assert len(load(folder, max_train_samples=5)[0]["train"].text.sentences) == 5


def test_test_may_be_missing_and_documents_too(tmp_path):
    write_conll(tmp_path, skip=("eng.testb",))
    for name in ("eng.train", "eng.testa"):
        lines = (tmp_path / name).read_text().split("\n")
        (tmp_path / name).write_text("\n".join(line for line in lines if "-DOCSTART-" not in line))
    examples, lines = load(tmp_path)
    assert list(examples) == ["train", "dev"]
    files = f"{tmp_path / 'eng.train'}, {tmp_path / 'eng.testa'}"
    assert lines == [
        f"{tmp_path / 'eng.testb'} not found, skipping",
        f"no -DOCSTART- marks where documents end, so sentences have no context: {files}",
        "NER: train 48 sentences, dev 18 sentences",
    ]


def test_what_became_of_the_words_is_said(tmp_path, start):
    (tmp_path / "train.txt").write_text("-DOCSTART- O\n\ngood B-X\nword1 O\n")
    (tmp_path / "dev.txt").write_text("-DOCSTART- O\n\ngood B-Y\n\u200b O\nbad I-Y\n\nso O\n", encoding="utf-8")
    assert describe_words(encode(load(tmp_path)[0]["dev"], start), "dev") == (
        "dev: 1.5 tokens per sentence, 3.0 with context; 1 words have no token and are predicted as O; 2 words have a "
        "tag that is not in training data (B-Y)"
    )


def test_options_that_make_no_sense(tmp_path, folder, start, refused):
    for options in (
        {"max_length": 129},
        {"dir": "/no/folder"},
        {"features": "concat-last-four"},
    ):
        with refused():
            run(Recipe.make(NER, make_recipe(folder, start, **options)), output=tmp_path / "run")
    with refused():
        Recipe.make(NER, make_recipe(folder, start, features="last", order="documents"))
    for change in ({"freeze": "encoder"}, {"bilstm": True}, {"reinit_layers": 1}):
        with refused():
            Recipe.make(NER, make_recipe(folder, start, features="last"), change)
    assert not (tmp_path / "run").exists()


# --- Scores and files


def test_a_tag_that_training_lacks_counts_as_missed(tmp_path, start):
    """The model can only know one of two gold entities: recall 1/2, precision 1."""
    (tmp_path / "train.txt").write_text("good B-X\nword1 O\n")
    (tmp_path / "dev.txt").write_text("good B-X\nbad B-Y\n")
    examples, _ = load(tmp_path)
    data = encode(examples["dev"], start)
    assert data.names == ("O", "B-X")
    scores = score_summaries(NER, keep(data, [["B-X", "O"]]), data)
    expected = {"precision": 1.0, "recall": 0.5, "f1": 2 / 3}
    assert scores == pytest.approx(expected | {"strict_f1": 2 / 3})


def test_a_span_that_is_not_whole_words_is_missed_in_every_score(tmp_path, start):
    """All tags of "goodso bad so" are right, but only "bad" is whole: 1 right of 2 found and of 3 wanted."""
    row = {"text": "goodso bad so", "spans": [[0, 4, "X"], [4, 6, "Y"], [7, 10, "X"]]}
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    examples, _ = load(tmp_path)
    data = encode(examples["dev"], start)
    kept = keep(data, [["B-X", "B-X", "O"]])
    expected = {"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5, "strict_f1": 2 / 5}
    assert score_summaries(NER, kept, data) == pytest.approx(expected)
    answers = NER.decode(kept, data)
    rows = answers.rows
    assert rows.column("prediction_spans").to_pylist() == [["goodso: X", "bad: X"]]
    assert rows.column("label_spans").to_pylist() == [["good: X", "so: Y", "bad: X"]], "as they were given"
    assert NER.tabulate_examples(examples["dev"]).classes == ["X", "Y", "X"]
    assert list(NER.format_predictions(answers, data, "dev")) == ["dev.jsonl"], "conlleval's form has whole words only"


def test_a_window_is_computed_once_and_all_of_its_sentences_are_read(folder, start):
    """The sentences of a document share a window; logits are those of a sequence for each sentence, in any batch."""
    dev = load(folder)[0]["dev"]
    words = encode_words(dev.text, dev.labels, load_tokenizer(start), SMALL["max_length"])
    windows = encode(dev, start)
    assert (len(words), len(windows)) == (18, 6)
    torch.manual_seed(0)
    model = BertForTokenClassification.from_pretrained(start, num_labels=len(dev.labels)).eval()
    model.classifier.weight.data.normal_()
    logits, tags = [], []
    for data in (words, windows):
        batches = [[index] for index in range(len(data))] + [list(range(len(data)))]
        parts = []
        for batch in [pad(data.__getitems__(numbers)) for numbers in batches]:
            with torch.no_grad():
                parts.append(model(**add_indices(batch, type(model))).logits[batch["labels"] != IGNORED])
        logits += [torch.cat(parts[:-1]), parts[-1]]
        tags.append(NER.decode(summarize_split(NER, model, data), data).tags)
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-4, atol=1e-5)
    assert tags[0] == tags[1]
    assert len({tag for row in tags[0] for tag in row}) > 2


def test_the_windows_of_a_long_text_are_predicted_once(tmp_path, folder, start):
    """A text of 40 words in room for 14 has six parts of at most 7; the last two show the same tokens."""
    recipe = make_recipe(folder, start, max_length=16)
    run(Recipe.make(NER, recipe), output=tmp_path / "run")
    predictor = Predictor(str(tmp_path / "run"), precision="fp32")
    given = {"text": " ".join(["good", "bad", "so", "bad"] * 10)}
    example = predictor.task.read_input(given, predictor.settings)
    assert len(predictor.task.encode_inputs([example], predictor.settings).lengths) == 5
    tags = ["O"] * 40
    text = TaggedText("", [Sentence(example.words, tags, tags, 1, 1)], 1, "IOB2", 0)
    apart = encode_words(text, predictor.settings.labels, predictor.settings.tokenizer, 16)
    assert len(apart) == 6
    (result,) = predictor([given])
    assert "truncated" not in result
    assert result["tags"] == NER.decode(summarize_split(NER, predictor.settings.model, apart), apart).tags[0]


def test_never_tagging_is_what_a_model_has_to_beat():
    nothing = NER.baseline(None, None)
    assert nothing == dict.fromkeys((*(f"majority_{name}" for name in ENTITY_SCORES), "majority_score"), 0.0)


@pytest.mark.parametrize(
    ("dev", "tags", "written"),
    [
        (
            "-DOCSTART- -X- O\n\ngood NN I-X\nbad NN B-X\n\n-DOCSTART- -X- O\n\nso NN O\n\u200b NN I-X\n\nso NN O\n",
            [["B-X", "I-X"], ["B-X", "O"], ["I-X"]],
            "-DOCSTART- O O\n\ngood I-X I-X\nbad B-X I-X\n\n-DOCSTART- O O\n\nso O I-X\n\u200b I-X O\n\nso O I-X\n",
        ),
        ("good B-X\nbad O\n", [["O", "I-X"]], "good B-X O\nbad O I-X\n"),
    ],
)
def test_predictions_are_in_the_form_and_the_scheme_of_the_file(tmp_path, start, dev, tags, written):
    (tmp_path / "train.txt").write_text("good B-X\nbad I-X\n", encoding="utf-8")
    (tmp_path / "dev.txt").write_text(dev, encoding="utf-8")
    data = encode(load(tmp_path)[0]["dev"], start)
    assert NER.format_predictions(NER.decode(keep(data, tags), data), data, "dev") == {"dev.conll": written}


# --- Documents in order


def test_documents_in_order_share_windows_and_nothing_else_changes(tmp_path, folder, start):
    """Without dropout 8 sentences in 8 micro-batches, each with its own window, give the losses of a single one."""
    recipe = make_recipe(folder, start, order="documents") | {"precision": "fp32"}
    found = []
    for size in (8, 1):
        train = {"logging_steps": 1, "per_device_train_batch_size": size}
        run(Recipe.make(NER, recipe, {"train": train}), output=tmp_path / f"{size}")
        found.append(read_losses(tmp_path / f"{size}"))
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_run_of_documents_in_order_resumes_in_its_second_epoch(tmp_path, folder, start):
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    recipe = make_recipe(folder, start, order="documents") | {"precision": "fp32", "model": dropout}
    recipe = Recipe.make(NER, recipe, {"train": {"max_steps": 9, "logging_steps": 1, "save_strategy": "no"}})
    run(recipe, output=tmp_path / "straight")
    with pytest.raises(Interrupted, match="after update 8;"):
        run(recipe, output=tmp_path / "resumed", progress=stop_at(8))
    run(recipe, output=tmp_path / "resumed")
    assert read_curve(tmp_path / "resumed") == read_curve(tmp_path / "straight")
    assert_same_bits(read_weights(tmp_path / "resumed"), read_weights(tmp_path / "straight"))


# --- From features


def make_features_recipe(tmp_path, folder, start, layers="sum-all", **train):
    recipe = make_recipe(folder, start, features=layers, features_dir=str(tmp_path / "features"))
    options = {"num_train_epochs": 12, "learning_rate": 1e-2, "seed": 1, "eval_strategy": "no", "save_strategy": "no"}
    return recipe | {"precision": "fp32", "model": {"bilstm_hidden_size": 16}, "train": options | train}


def test_the_rate_and_the_epochs_of_a_bilstm_are_its_own_with_every_preset(folder, start):
    own, learned = (make_recipe(folder, start, features=layers) | {"train": {}} for layers in ("", "last"))
    for given, preset, *expected in (
        (own, "paper", "bert_adam", 5e-5, 3.0),
        (own, "stable", "adamw_torch", 2e-5, 20.0),
        (learned, "paper", "bert_adam", 1e-3, 10.0),
        (learned, "stable", "adamw_torch", 1e-3, 10.0),
    ):
        train = Recipe.make(NER, given | {"preset": preset}).train
        assert [train[key] for key in ("optim", "learning_rate", "num_train_epochs")] == expected


def test_a_bilstm_learns_from_features_and_reads_text_by_itself(tmp_path, folder, start):
    recipe = make_features_recipe(tmp_path, folder, start)
    metrics = run(Recipe.make(NER, recipe), output=tmp_path / "run")
    assert min(metrics["f1"], metrics["test_f1"]) > 0.6
    model = BertFeaturesForTokenClassification.from_pretrained(tmp_path / "run").eval()
    before = BertModel.from_pretrained(start).state_dict()
    assert all(torch.equal(before[name], value) for name, value in model.bert.state_dict().items())
    dev = load(folder)[0]["dev"]
    data = encode_words(dev.text, dev.labels, load_tokenizer(start), SMALL["max_length"])
    batch = ner.locate_words(data.__getitems__(list(range(len(data)))))
    with torch.no_grad():
        kept = NER.summarize(model(**batch), batch).numpy()
    assert score_summaries(NER, kept, data)["f1"] == pytest.approx(metrics["f1"])
    written = (tmp_path / "run" / "predictions" / "dev.conll").read_text()
    assert NER.format_predictions(NER.decode(kept, data), data, "dev")["dev.conll"] == written


def test_half_features_are_close(tmp_path, folder, start):
    found, dev = [], load(folder)[0]["dev"]
    for half in (False, True):
        recipe = Recipe.make(NER, make_features_recipe(tmp_path, folder, start), {"data": {"half_features": half}})
        found.append(collate([NER.encode(dev, load_tokenizer(start), recipe, "dev")[0]])["features"])
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_the_encoder_runs_once_for_all_seeds(tmp_path, folder, start, monkeypatch):
    recipe = make_features_recipe(tmp_path, folder, start, max_steps=2)
    run(Recipe.make(NER, recipe), output=tmp_path / "first")
    kept = sorted((tmp_path / "features").iterdir())
    assert len(kept) == 3  # train, dev and test

    def refuse(*_):
        raise AssertionError("the encoder was asked again")

    monkeypatch.setattr("bertkit.tasks.frozen.run_encoder", refuse)
    run(Recipe.make(NER, recipe, {"train": {"seed": 2}}), output=tmp_path / "other")
    assert sorted((tmp_path / "features").iterdir()) == kept


def test_sentences_without_a_token_are_scored(tmp_path, start):
    """A word that is a control character has no token, so it has no features."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.conll").write_text("good B-PER\nword1 O\n\n" * 4)
    (folder / "dev.conll").write_text("\x01 B-PER\n\n" * 3)
    metrics = run(Recipe.make(NER, make_features_recipe(tmp_path, folder, start, max_steps=1)), output=tmp_path / "run")
    assert metrics["f1"] == 0.0


def test_features_of_another_encoder_are_other_data(tmp_path, folder, start, refused):
    """The file name stays the same, so a continued run would combine it with the first encoder."""
    checkpoint = shutil.copytree(start, tmp_path / "bert")
    recipe = make_features_recipe(tmp_path, folder, str(checkpoint), max_steps=6)
    with pytest.raises(Interrupted):
        run(Recipe.make(NER, recipe), output=tmp_path / "run", progress=stop_at(4))
    model = BertModel.from_pretrained(checkpoint)
    with torch.no_grad():
        model.embeddings.LayerNorm.bias += 0.5
    model.save_pretrained(checkpoint)
    with refused():
        run(Recipe.make(NER, recipe), output=tmp_path / "run")
