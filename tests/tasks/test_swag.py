"""SWAG as a task: four sequences per question, one softmax over them, and the official files."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from bertkit import BertForMultipleChoice
from bertkit.data.formats.swag import Situation
from bertkit.data.sequences import pad_choices
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer
from bertkit.system.signals import Interrupted
from bertkit.tasks.swag import SWAG
from bertkit.training.network import make_model
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.conftest import draft
from tests.official import write_swag
from tests.tasks.conftest import load_examples, make_small, read_losses, read_rows
from tests.world import stop_at

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["he", "she", "sits", "on", "the", "stool", "un", "##lock", "##s", "door", "plays", "a", "piano", "sleeps", "."]
TOKENIZER = make_tokenizer(SPECIAL + WORDS, cased=False)
PIANO = Situation(
    "He sits on the stool.", "He", ("unlocks the door.", "plays the piano.", "sleeps.", "sits on a piano."), 1
)


@pytest.fixture(scope="module")
def swag(tmp_path_factory):
    return write_swag(tmp_path_factory.mktemp("swag"))


def make_recipe(checkpoint, folder, **train):
    """48 updates, 6 an epoch, of a tiny model in fp32."""
    return make_small(checkpoint, folder, {"max_length": 32}, **{"num_train_epochs": 8.0} | train)


def encode(situations, tokenizer, longest):
    return SWAG.encode(situations, tokenizer, draft(SWAG, {"data": {"max_length": longest}}), "dev")


load = partial(load_examples, SWAG)


# --- The data ---------------------------------------------------------------------------------------------------------


def test_the_papers_numbers():
    """Section 4.4 and Table 4."""
    recipe = SWAG.recipe
    assert (recipe["batch_size"], recipe["data"]["max_length"]) == (16, 128)
    assert (recipe["train"]["num_train_epochs"], recipe["train"]["learning_rate"]) == (3.0, 2e-5)
    assert SWAG.table[0].paper == {"BERT-base, dev": 0.816, "BERT-large, dev": 0.866, "BERT-large, test": 0.863}


def test_a_question_is_four_sequences():
    """[CLS] and the first [SEP] belong to A, the context; B is the start and one ending: "un ##lock ##s" are pieces."""
    batch = pad_choices(encode([PIANO], TOKENIZER, 64).__getitems__([0]))
    rows = zip(batch["input_ids"][0], batch["attention_mask"][0], strict=True)
    assert [" ".join(TOKENIZER.convert_ids_to_tokens(ids[mask.bool()])) for ids, mask in rows] == [
        "[CLS] he sits on the stool . [SEP] he un ##lock ##s the door . [SEP]",
        "[CLS] he sits on the stool . [SEP] he plays the piano . [SEP]",
        "[CLS] he sits on the stool . [SEP] he sleeps . [SEP]",
        "[CLS] he sits on the stool . [SEP] he sits on a piano . [SEP]",
    ]
    assert batch["token_type_ids"][0].tolist() == [[0] * 8 + [1] * n + [0] * (8 - n) for n in (8, 6, 4, 7)]
    assert batch["labels"].tolist() == [1]


def test_long_sequences_are_cut_as_the_tokenizer_of_transformers_cuts_them(swag, bert):
    tokenizer = load_tokenizer(bert)
    for split, situations in load(swag)[0].items():
        data = encode(situations, tokenizer, 12)
        assert len(data) == len(situations)
        batch = pad_choices(data.__getitems__(range(len(data))))
        contexts = [one.context for one in situations for _ in range(4)]
        endings = [f"{one.start} {ending}" for one in situations for ending in one.endings]
        expected = tokenizer(contexts, endings, truncation=True, max_length=12, padding=True, return_tensors="pt")
        for name in ("input_ids", "token_type_ids", "attention_mask"):
            assert torch.equal(batch[name].flatten(0, 1), expected[name])
        assert ("labels" in batch) == (split != "test")
        assert split == "test" or batch["labels"].tolist() == [one.answer for one in situations]


def test_all_splits_are_read_and_a_missing_test_file_is_named(tmp_path):
    examples, lines = load(write_swag(tmp_path / "all"))
    assert lines == ["SWAG: train 48, dev 18, test 10"]
    others, lines = load(write_swag(tmp_path / "some", skip=("test.csv",)), max_train_samples=5)
    assert lines == [f"SWAG: {tmp_path / 'some' / 'test.csv'} not found, skipping", "SWAG: train 5, dev 18"]
    assert others == {"train": examples["train"][:5], "dev": examples["dev"]}


# --- The model and its scores -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(swag, bert):
    """Return the data sets and the model of a run before training, in float64."""
    recipe = Recipe.make(SWAG, make_recipe(bert, swag))
    examples = SWAG.load(recipe.data, lambda line: None)
    tokenizer = load_tokenizer(bert)
    torch.manual_seed(0)
    model = make_model(SWAG, recipe, SWAG.configure(recipe, tokenizer, examples)).eval().double()
    torch.nn.init.normal_(model.classifier.weight)
    return {split: SWAG.encode(found, tokenizer, recipe, split) for split, found in examples.items()}, model


@torch.no_grad()
def compute(model, data):
    return model(**pad_choices(data.__getitems__(range(len(data)))))


def test_loss_and_logits_are_those_of_plain_transformers(made):
    data, model = made
    config = transformers.BertConfig(**{**model.config.to_dict(), "use_cache": False})
    stock = transformers.BertForMultipleChoice(config).eval().double()
    stock.load_state_dict(model.state_dict())
    ours, theirs = compute(model, data["dev"]), compute(stock, data["dev"])
    assert ours.logits.shape == (18, 4)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-10)
    # Ours is computed in fp32.
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_the_baseline_is_the_place_that_is_most_often_right(made):
    data, _ = made
    most = max(np.mean(data["dev"].labels == place) for place in range(4))
    expected = {"majority_accuracy": pytest.approx(most), "majority_score": pytest.approx(most)}
    assert SWAG.baseline(data["train"], data["dev"]) == expected


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(swag, bert, tmp_path_factory):
    """Return the directory of a finished run and its metrics."""
    output = tmp_path_factory.mktemp("runs") / "swag"
    return output, run(Recipe.make(SWAG, make_recipe(bert, swag)), output=output)


def test_a_run_learns_and_its_written_predictions_have_its_score(finished, swag):
    output, metrics = finished
    assert 0.8 < metrics["accuracy"] == metrics["score"] <= 1.0
    assert metrics["majority_accuracy"] < 0.6
    found = {name: read_rows(output / "predictions" / name) for name in ("val.csv", "test.csv")}
    assert {name: len(rows) for name, rows in found.items()} == {"val.csv": 18, "test.csv": 10}
    for rows in found.values():
        assert [row["index"] for row in rows] == [str(index) for index in range(len(rows))]
    gold = read_rows(swag / "val.csv")
    right = [row["pred"] == expected["label"] for row, expected in zip(found["val.csv"], gold, strict=True)]
    assert np.mean(right) == metrics["accuracy"]


def test_plain_transformers_loads_a_finished_run(finished, swag):
    output, _ = finished
    stock = transformers.AutoModelForMultipleChoice.from_pretrained(output, dtype=torch.float64).eval()
    assert type(stock) is transformers.BertForMultipleChoice
    ours = BertForMultipleChoice.from_pretrained(output, dtype=torch.float64).eval()
    data = encode(load(swag)[0]["test"], load_tokenizer(output), 32)
    logits = compute(ours, data).logits
    torch.testing.assert_close(compute(stock, data).logits, logits, rtol=0, atol=1e-10)
    predicted = [int(row["pred"]) for row in read_rows(output / "predictions" / "test.csv")]
    assert logits.argmax(dim=1).tolist() == predicted


def test_a_run_stopped_in_its_second_epoch_continues_bit_for_bit(bert, swag, tmp_path):
    recipe = make_recipe(bert, swag, num_train_epochs=2.0, logging_steps=1)
    expected = run(Recipe.make(SWAG, recipe), output=tmp_path / "straight")
    with pytest.raises(Interrupted, match="after update 8;"):
        run(Recipe.make(SWAG, recipe), output=tmp_path / "run", progress=stop_at(8))
    assert run(Recipe.make(SWAG, recipe), output=tmp_path / "run") == expected
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "straight")
