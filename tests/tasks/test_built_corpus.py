"""Pretraining on a built corpus: the same run as on its text, and options that do not fit."""

import pickle
import shutil

import numpy as np
import pytest
import torch

from bertkit.data.pretraining import build as builder
from bertkit.data.pretraining.store import fingerprint_files
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.system.signals import Interrupted
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.corpora import write_divided, write_text
from tests.world import PRETRAIN, assert_same_bits, make_recipe, read_losses, read_weights, stop_at


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "corpus.txt")


@pytest.fixture
def recipe(text):
    return make_recipe(text)


@pytest.fixture(scope="module")
def built(text, tmp_path_factory):
    """Return a vocabulary, and two corpora built with it, of one shard and of several."""
    folder = tmp_path_factory.mktemp("built")
    tokens = train_vocabulary(text.read_text(encoding="utf-8").splitlines(), size=120)
    save_tokenizer(make_tokenizer(tokens, cased=False, max_length=32), folder / "vocab")
    tokenizer = load_tokenizer(folder / "vocab")
    builder.build([str(text)], tokenizer, folder / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "PIECE_BYTES", 2000)
        patch.setattr(builder, "TOKENS_A_SHARD", 300)
        builder.build([str(text)], tokenizer, folder / "several")
    assert len(list((folder / "several" / "shards").iterdir())) > 3
    return folder


@pytest.fixture(scope="module")
def built_words(tmp_path_factory):
    """Return a folder with a vocabulary, a text of words divided by spaces and without, and a corpus of each."""
    folder = tmp_path_factory.mktemp("words")
    write_divided(folder / "divided.txt")
    plain = folder / "plain.txt"
    tokens = train_vocabulary(plain.read_text(encoding="utf-8").splitlines(), size=120)
    save_tokenizer(make_tokenizer(tokens, cased=False, max_length=32), folder / "vocab")
    tokenizer = load_tokenizer(folder / "vocab")
    builder.build([str(plain)], tokenizer, folder / "plain")
    builder.build([str(folder / "divided.txt")], tokenizer, folder / "made", words="spaces")
    return folder


def test_a_corpus_is_known_by_its_tokens(built, text, tmp_path):
    """A corpus rebuilt from a copy is the same; one from a text with a changed word differs."""
    content, found = text.read_text(encoding="utf-8"), []
    for name, words in (("copy", content), ("other", content.replace(content.split()[0], content.split()[1], 1))):
        (tmp_path / f"{name}.txt").write_text(words)
        builder.build([str(tmp_path / f"{name}.txt")], load_tokenizer(built / "vocab"), tmp_path / name)
        found.append(fingerprint_files(tmp_path / name))
    assert found[0] == fingerprint_files(built / "one") != found[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_words_of_a_built_corpus_give_the_run_that_their_text_gives(recipe, built_words, tmp_path, workers):
    """A run that is stopped in the middle, and continued from the corpus, gives it too."""
    data = recipe["data"] | {"whole_word_masking": True}
    asked = {"corpus": [str(built_words / "divided.txt")], "vocab": str(built_words / "vocab"), "words": "spaces"}
    expected = run(Recipe.make(PRETRAIN, recipe | {"data": data | asked}), output=tmp_path / "text")
    train = recipe["train"] | {"dataloader_num_workers": workers}
    given = Recipe.make(PRETRAIN, recipe | {"data": data | {"corpus": [str(built_words / "made")]}, "train": train})
    with pytest.raises(Interrupted):
        run(given, output=tmp_path / "built", progress=stop_at(4))
    assert run(given, output=tmp_path / "built") == expected
    assert_same_bits(read_weights(tmp_path / "built"), read_weights(tmp_path / "text"))


def test_whole_words_are_asked_of_text_that_has_them(recipe, built_words, refused):
    """Text without spaces does not tell them, whatever is asked; a corpus that was built without words has none."""
    whole = {"whole_word_masking": True, "vocab": str(built_words / "vocab")}
    for change in (
        whole | {"corpus": [str(built_words / "plain.txt")]},
        {"whole_word_masking": True, "corpus": [str(built_words / "plain")]},
        {"words": "spaces", "corpus": [str(built_words / "plain")]},
        whole | {"words": "spaces", "corpus": [str(built_words / "plain.txt")]},
    ):
        with refused():
            prepare(Recipe.make(PRETRAIN, recipe | {"data": recipe["data"] | change}))
    asked = whole | {"corpus": [str(built_words / "divided.txt")], "words": "spaces"}
    prepare(Recipe.make(PRETRAIN, recipe | {"data": recipe["data"] | asked}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_built_corpus_gives_the_run_that_its_text_gives(recipe, built, tmp_path, name, workers):
    """The held-out documents, pairs and masks are the same, so the weights are bit-identical; also in two phases."""
    phases = [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}]
    data = {key: value for key, value in recipe["data"].items() if key != "max_length"}
    options = {"data": data | {"vocab": str(built / "vocab")}, "phase": phases}
    expected = run(Recipe.make(PRETRAIN, recipe | options), output=tmp_path / "text")
    options["data"] = data | {"corpus": [str(built / name)]}
    train = recipe["train"] | {"dataloader_num_workers": workers}
    found = run(Recipe.make(PRETRAIN, recipe | options | {"train": train}), output=tmp_path / "built")
    assert found == expected
    assert_same_bits(read_weights(tmp_path / "built"), read_weights(tmp_path / "text"))
    np.testing.assert_array_equal(read_losses(tmp_path / "built"), read_losses(tmp_path / "text"))
    assert list((built / name / "plans").iterdir())  # and both phases have planned their pairs from it


def test_a_built_corpus_is_small_in_the_hands_of_a_worker(recipe, built):
    """A data worker that is not forked receives it without the tokens, which it maps again."""
    data = recipe["data"] | {"corpus": [str(built / "several")]}
    train = prepare(Recipe.make(PRETRAIN, recipe | {"data": data})).data["train"]
    packed = pickle.dumps(train)
    assert len(packed) < 4000 + 16 * train.corpus.document_count + 300 * len(train.corpus.ids.maps)
    copied = pickle.loads(packed).__getitems__(range(20, 30))
    for column, values in train.__getitems__(range(20, 30)).items():
        assert torch.equal(copied[column], values)


def test_what_does_not_fit_a_built_corpus_is_refused(recipe, built, text, tmp_path, refused):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *"abcdefghij.", *(f"##{letter}" for letter in "abcdefghij")]
    save_tokenizer(make_tokenizer(tokens, cased=False), tmp_path / "other")
    damaged = shutil.copytree(built / "several", tmp_path / "damaged")
    shard = sorted((damaged / "shards").iterdir())[2]
    content = shard.read_bytes()
    shard.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    for change in (
        {"vocab": str(tmp_path / "other")},
        {"cased": True},
        {"corpus": [str(built / "one"), str(text)]},
        {"corpus": [str(damaged)]},
    ):
        data = recipe["data"] | {"corpus": [str(built / "one")]} | change
        with refused():
            run(Recipe.make(PRETRAIN, recipe | {"data": data}), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_continues_sees_that_its_corpus_has_another_vocabulary(recipe, built, text, tmp_path, refused):
    corpus = shutil.copytree(built / "one", tmp_path / "corpus")
    given = recipe | {"data": recipe["data"] | {"corpus": [str(corpus)]}}
    with pytest.raises(Interrupted):
        run(Recipe.make(PRETRAIN, given), output=tmp_path / "run", progress=stop_at(3))
    shutil.rmtree(corpus)
    tokens = train_vocabulary(text.read_text(encoding="utf-8").splitlines(), size=90)
    builder.build([str(text)], make_tokenizer(tokens, cased=False), corpus)
    with refused():
        run(Recipe.make(PRETRAIN, given), output=tmp_path / "run")
