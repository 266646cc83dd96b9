"""WordPiece vocabularies: the same in every run, complete, and read by transformers as they were written."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from bertkit.data import tokenizer
from bertkit.data.tokenizer import (
    SPECIAL_TOKENS,
    choose_alphabet,
    count_words,
    get_cached_tokenizer,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
    train_vocabulary,
)
from bertkit.errors import UsageError

TEXTS = [
    "The café's owner said: my dog is hairy, my dog's hair is curly!",
    "They were walking, talking and barking; the walkers talked about walks. 他去了北京 in 1999.",
    "Unwanted, unhappy, untold: the naïve Übermensch walked the hairy dog about the curly café.",
]
MIXED = (
    "Ünïcode CAFÉ naïve hairy\tdogs 他去了北京。 ｶﾀｶﾅ 한국어 😀 don't x\u0000y\u200bz\ufffd ﬁ İ "
    f"{'a' * 100} {'b' * 101} [MASK] [mask] 3.14 https://a.b/c_d «quote»"
)


@cache
def vocabulary(cased: bool = False) -> list[str]:
    return train_vocabulary(TEXTS, size=400, cased=cased)


def write_tokens(path: Path, tokens: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{token}\n" for token in tokens).encode())
    return path


def test_tokens_are_in_the_order_of_special_alphabet_inside_merged():
    tokens = train_vocabulary(["ab ab abc!"], size=100)
    assert tokens == [*SPECIAL_TOKENS, "!", "a", "b", "c", "##a", "##b", "##c", "ab"]


def test_pieces_are_merged_by_frequency(monkeypatch):
    # The pairs: u g 19, u n 12, h u 10, m u 9, r u 8, s u 4; with u g and u n merged first, h ug 10 and so on.
    text = " ".join(["hug"] * 10 + ["mug"] * 9 + ["run"] * 8 + ["sun"] * 4)
    assert train_vocabulary([text], size=19 + 6)[-6:] == ["##ug", "##un", "hug", "mug", "run", "sun"]
    monkeypatch.setattr(tokenizer, "LEAST_FREQUENCY", 9)
    assert train_vocabulary([text], size=100)[19:] == ["##ug", "##un", "hug", "mug"]


def test_size_is_exact_and_a_smaller_text_is_reported():
    lines: list[str] = []
    smaller = train_vocabulary(TEXTS, size=80, report=lines.append)
    assert len(smaller) == len(set(smaller)) == 80
    assert not lines
    complete = train_vocabulary(TEXTS, size=5000, report=lines.append)
    assert complete[:80] == smaller
    assert lines == [f"the text yields {len(complete)} tokens, not 5,000: no other piece occurs 2 times"]


def test_marks_that_lower_casing_removes_are_reported():
    texts = {"पोस्ट दिल्ली": 18, "がぎが": 27, "Ünïcode й ά ✌\ufe0f e\u0301 ệ 한국어": 0}
    for text, count in texts.items():
        for cased in (False, True):
            lines: list[str] = []
            count_words([text] * 9, cased=cased, report=lines.append)
            found = [line for line in lines if f"removes the marks of {count} letters" in line]
            assert len(found) == len(lines) == (count > 0 and not cased)


def test_a_text_or_size_that_is_too_small_is_refused(refused):
    assert len(train_vocabulary(["a b c ! 京"], size=99)) == 5 + 5 + 3  # special tokens; a b c ! 京; ##a ##b ##c
    with refused():
        train_vocabulary(["a b c ! 京"], size=12)
    with refused():
        train_vocabulary([" \n\t", "\u200b"])


def test_alphabet_is_the_fewest_characters_that_cover_the_text(monkeypatch):
    counts = Counter({"aaa": 20, "b": 30, "c": 9, "d": 1})
    assert choose_alphabet(counts) == ["a", "b", "c", "d"]
    for coverage, alphabet in ((0.6, "a"), (0.61, "ab"), (0.9, "ab"), (0.99, "abc"), (1.0, "abcd")):
        monkeypatch.setattr(tokenizer, "CHARACTER_COVERAGE", coverage)
        assert choose_alphabet(counts) == list(alphabet)


def test_words_that_will_be_unknown_are_not_trained_on(monkeypatch):
    assert "a" * 50 not in train_vocabulary([f"{'a' * 101} " * 99 + "a"], size=999)
    monkeypatch.setattr(tokenizer, "CHARACTER_COVERAGE", 0.9)
    # Without the rare z in the middle the trainer would join the parts to xy.
    assert train_vocabulary(["x y " * 99 + "xzy " * 2], size=99)[5:] == ["x", "y", "##x", "##y"]


TRAIN = """
import sys
from bertkit.data.tokenizer import train_vocabulary
print(*train_vocabulary(sys.stdin.read().splitlines(), size=1000))
"""


def test_vocabulary_is_the_same_in_every_process_and_order_of_the_text():
    # Random words are full of ties: the trainer of tokenizers alone returns another vocabulary in each run.
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(20)) for _ in range(200)]
    results = set()
    for seed in range(2):
        draw.shuffle(texts)
        options = {"text": True, "capture_output": True, "env": os.environ | {"PYTHONHASHSEED": str(seed)}}
        done = subprocess.run([sys.executable, "-c", TRAIN], input="\n".join(texts), check=True, **options)
        results.add(done.stdout)
    (tokens,) = results
    assert len(tokens.split()) == 1000


@given(st.lists(st.text(max_size=30)), st.booleans())
def test_words_are_those_of_the_tokenizer(texts, cased):
    tokenizer = make_tokenizer(SPECIAL_TOKENS, cased=cased).backend_tokenizer
    expected = Counter(
        word
        for text in texts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    )
    assert count_words(texts, cased=cased) == expected


@given(st.data())
def test_no_word_of_the_alphabet_is_unknown(data):
    tokens = vocabulary(cased=True)
    continuing = [token[2:] for token in tokens if token.startswith("##") and len(token) == 3]
    assert set("ehéÜ1") <= set(continuing)
    assert not set("京!,") & set(continuing)
    word = data.draw(st.text(st.sampled_from(continuing), min_size=1, max_size=100))
    pieces = make_tokenizer(tokens, cased=True).tokenize(word)
    assert "".join(piece.removeprefix("##") for piece in pieces) == word


@pytest.mark.parametrize("cased", [False, True])
def test_tokens_are_those_of_transformers_and_of_the_reference_code(tmp_path, cased):
    tokens = vocabulary(cased)
    file = write_tokens(tmp_path / "vocab.txt", tokens)
    ours = make_tokenizer(tokens, cased=cased)
    stock = BertTokenizerFast(vocab=str(file), do_lower_case=not cased)
    reference = BertTokenizerLegacy(str(file), do_lower_case=not cased)  # the Python implementation of transformers
    for text in (*TEXTS, MIXED):
        assert ours.tokenize(text) == reference.tokenize(text)
    for text in (*TEXTS, MIXED, "e\u0301 \u1100\u1161 \u0627\u064b", "\ue000 \u00ad \u2028 \x85"):
        assert ours(text, TEXTS[0])["input_ids"] == stock(text, TEXTS[0])["input_ids"]
    assert ours(TEXTS[0], TEXTS[1])["token_type_ids"] == stock(TEXTS[0], TEXTS[1])["token_type_ids"]
    assert "[UNK]" not in ours.tokenize(f"{'a' * 100}")
    assert ours.tokenize("b" * 101) == ["[UNK]"]
    assert ours.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert ours.model_max_length == 512


def test_remembered_words_are_not_visited_for_each_batch():
    """With a million rows this took 36.9 s for 1,000 of them (recipes/notebook/faults.md)."""

    class Remembered(dict):
        def __iter__(self):
            raise AssertionError

        keys = values = items = __iter__

    cached = get_cached_tokenizer(make_tokenizer(vocabulary(False), cased=False))
    cached.ids = Remembered()
    ids, lengths = cached.encode([TEXTS[0], "new words", TEXTS[0]], np.int64)
    assert lengths[0] == lengths[2] < len(ids) / 2
    assert ids[: lengths[0]].tolist() == ids[-lengths[0] :].tolist()


@pytest.mark.parametrize("cased", [False, True])
def test_saved_tokenizer_is_the_same_for_us_and_for_plain_transformers(tmp_path, cased):
    tokenizer, folder = make_tokenizer(vocabulary(cased), cased=cased, max_length=64), tmp_path / "new" / "folder"
    tokenizer.add_tokens(["[E1]"])
    save_tokenizer(tokenizer, folder)
    assert (folder / "vocab.txt").read_bytes().decode().split("\n") == [*vocabulary(cased), "[E1]", ""]
    for read in (load_tokenizer, BertTokenizerFast.from_pretrained, AutoTokenizer.from_pretrained):
        again = read(str(folder))
        assert type(again) is BertTokenizerFast
        assert again(MIXED, TEXTS[0]) == tokenizer(MIXED, TEXTS[0])
        assert again.model_max_length == 64


@pytest.mark.parametrize("cased", [False, True])
def test_one_file_is_enough(tmp_path, cased):
    # From tokenizer.json alone BertTokenizerFast makes an uncased tokenizer, whatever the file says.
    tokenizer = make_tokenizer(vocabulary(cased), cased=cased)
    save_tokenizer(tokenizer, tmp_path / "all")
    (tmp_path / "one").mkdir()
    shutil.copy(tmp_path / "all" / "tokenizer.json", tmp_path / "one")
    again = load_tokenizer(tmp_path / "one")
    assert again(MIXED) == tokenizer(MIXED)
    assert again.model_max_length == 512
    assert len(again) == len(tokenizer)


def test_bare_vocabulary_is_cased_if_it_has_many_capitals(tmp_path):
    for cased in (False, True):
        file, lines = tmp_path / f"{cased}.txt", []
        file.write_bytes("\r\n".join([*vocabulary(cased), "[unused1]", ""]).encode())
        expected = make_tokenizer([*vocabulary(cased), "[unused1]"], cased=cased)
        assert load_tokenizer(file, report=lines.append)(MIXED) == expected(MIXED)
        amount = "uncased: False.txt has no" if not cased else "cased: True.txt has"
        assert lines == [f"loaded as {amount} capital letters"]


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("appended", [["NASA"], ["McDonald", "##AÖ"]])
def test_words_appended_to_an_uncased_vocabulary_do_not_make_it_cased(tmp_path, appended, is_folder):
    file, lines = write_tokens(tmp_path / "vocab.txt", [*vocabulary(), *appended]), []
    source = tmp_path if is_folder else file
    tokenizer = load_tokenizer(source, report=lines.append)
    assert lines == [f"loaded as uncased: {tmp_path if is_folder else 'vocab.txt'} has few capital letters"]
    assert tokenizer(MIXED)["input_ids"] == BertTokenizerFast(str(file))(MIXED)["input_ids"]
    assert load_tokenizer(source, cased=True).tokenize("The") != load_tokenizer(source).tokenize("The")


def test_nothing_is_guessed_where_a_file_or_the_caller_says_it(saved):
    folder, change = saved
    load_tokenizer(folder, report=pytest.fail)
    (folder / "tokenizer.json").unlink()
    load_tokenizer(folder, report=pytest.fail)
    change(do_lower_case=None)
    load_tokenizer(folder, cased=True, report=pytest.fail)


@pytest.fixture
def saved(tmp_path):
    """Save a tokenizer, and return its folder and a function that changes its tokenizer_config.json."""
    save_tokenizer(make_tokenizer(vocabulary(), cased=False), tmp_path)

    def change(**values):
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return tmp_path, change


def test_what_the_files_say_comes_first(saved, refused):
    folder, change = saved
    assert load_tokenizer(folder, cased=False).tokenize("The dog") == ["the", "dog"]
    with refused():
        load_tokenizer(folder, cased=True)
    change(tokenize_chinese_chars=False)
    stock = BertTokenizerFast.from_pretrained(folder)
    assert load_tokenizer(folder).tokenize("北京") == stock.tokenize("北京") == ["[UNK]"]


BAD_FILES = {
    "a token twice": ("vocab.txt", "\n".join(["a", *SPECIAL_TOKENS, "a"])),
    "no [SEP]": ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\nthe\n"),
    "not UTF-8": ("vocab.txt", b"[PAD]\xff"),
    "no model": ("tokenizer.json", "{}"),
    "nothing": ("config.json", "{}"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_vocabulary_is_one_line(tmp_path, name, refused):
    file, content = BAD_FILES[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused():
        load_tokenizer(tmp_path)


def test_special_tokens_that_are_missing_are_told_before_a_text_has_one(saved, refused):
    folder, change = saved
    for name in ("pad_token", "cls_token", "sep_token"):
        change(**{name: None})
        with pytest.raises(
            UsageError, match=rf"has no {name}; add it to its tokenizer_config.json|cannot be loaded \("
        ):
            load_tokenizer(folder)
        change(**{name: f"[{name[:3].upper()}]"})
    change(unk_token="-1")
    with refused():
        load_tokenizer(folder)


def test_unreachable_hub_falls_back_to_the_cache(monkeypatch, saved, refused):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    troubles, asked, cached = ["the Hub cannot be reached", None] * 2, [], [saved[0]] * 2

    def snapshot(name, *, local_files_only, **_):
        asked.append(local_files_only)
        if not cached:
            raise LocalEntryNotFoundError("two\nlines")
        return cached.pop()

    monkeypatch.setattr(tokenizer, "explain_hub_trouble", lambda *_: troubles.pop(0))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for _ in range(2):
        assert len(load_tokenizer("owner/name")) == len(vocabulary())
    assert asked == [True, False]
    for _ in range(2):
        with refused():
            load_tokenizer("owner/name")


def test_white_space_in_tokens_is_kept(tmp_path):
    words = ["\u2002", "\u2003", "##", "##\u2028", "world", "world ", "the"]
    file = write_tokens(tmp_path / "vocab.txt", [*SPECIAL_TOKENS, *words])
    reference = BertTokenizerLegacy(str(file))
    save_tokenizer(load_tokenizer(tmp_path), tmp_path / "run")
    for source in (file, tmp_path, tmp_path / "run"):
        ours = load_tokenizer(source)
        assert ours.get_vocab() == reference.get_vocab()
        assert ours("the world \u2002 the")["input_ids"] == reference("the world \u2002 the")["input_ids"]
