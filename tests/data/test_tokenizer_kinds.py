"""Tokenizers of many kinds: the ids are those of transformers' AutoTokenizer, also after a run has saved them."""

import json
import random
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertJapaneseTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.sequences import encode_inputs
from bertkit.data.spans import Question, encode_questions, tokenize
from bertkit.data.tagging import TaggedText, encode_words
from bertkit.data.tokenizer import (
    SPECIAL_TOKENS,
    get_cached_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_vocabulary,
)
from bertkit.errors import UsageError
from bertkit.training.vocabulary import change_vocabulary
from tests.conftest import make_model

WORDS = [
    "The Café's ÜBER hairy dog, naïve ＦＵＬＬ in 2024: 1,203.5! e\u0301 <user> [E1]ada[/E1] new_thing",
    "Быстрая Лиса прыгает ёжик",
    "Ο Γρήγορος ΣΊΣΥΦΟΣ αλεπού",
    "السلام عَلَيْكُمْ ورحمة الله",
    "שָׁלוֹם עולם",
    "दिल्ली में पोस्ट ऑफिस",
    "เธอไปโรงเรียน ทุกวัน",
    "他去了北京。学校",
    "この鍋はとても良い カタカナ ｶﾅ",
    "안녕하세요 세계 😀 x\u200by\u00a0z\u3000w\tq  r",
]


@cache
def make_texts() -> list[str]:
    """Return 500 texts of words of ten scripts."""
    draw = random.Random(0)
    words = [line.split(" ") for line in WORDS]
    return [" ".join(draw.choice(draw.choice(words)) for _ in range(draw.randint(0, 20))) for _ in range(500)]


@cache
def train(cased: bool) -> list[str]:
    return train_vocabulary(make_texts(), size=500, cased=cased)


def save_plain(folder: Path, **options) -> BertTokenizerFast:
    words = dict.fromkeys([*train(cased=True), *train(cased=False)])
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}, **options)
    save_tokenizer(tokenizer, folder)
    return tokenizer


def keep(folder: Path, name: str, **config) -> None:
    """Leave only one file, and a tokenizer_config.json if one is given."""
    for path in folder.iterdir():
        if path.name != name:
            path.unlink()
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_vocabulary(folder: Path, **config) -> None:
    save_plain(folder, do_lower_case=config.get("do_lower_case", True))
    if not config:
        (folder / "vocab.txt").write_bytes("".join(f"{word}\n" for word in train(cased=False)).encode())
    keep(folder, "vocab.txt", **config)


def save_added(folder: Path, special: bool) -> None:
    tokenizer = save_plain(folder)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "[E1]", "[/E1]"]})
    else:
        tokenizer.add_tokens(["<user>", "[E1]", "ada[/E1]", AddedToken("new_thing", single_word=True), "hairy dog"])
    save_tokenizer(tokenizer, folder)


def save_own(folder: Path, normalizer=None, splitter=None, model=None, names=SPECIAL_TOKENS, **more) -> None:
    """Save a tokenizer.json of parts that are not BERT's."""
    pad, unknown, cls, sep, mask = names
    ids = save_plain(folder).get_vocab()
    ids = {dict(zip(SPECIAL_TOKENS, names, strict=True)).get(word, word): number for word, number in ids.items()}
    backend = Tokenizer(model or models.WordPiece(ids, unk_token=unknown, **more))
    backend.normalizer = normalizer or normalizers.BertNormalizer()
    backend.pre_tokenizer = splitter or pre_tokenizers.BertPreTokenizer()
    if model is not None:
        trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=list(names), unk_token=unknown)
        backend.train_from_iterator([text for text in make_texts() if text], trainer)
    ids = backend.get_vocab()
    backend.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, sep, "$B", sep] if cls == "<s>" else [cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
    )
    words = {"pad_token": pad, "unk_token": unknown, "cls_token": cls, "sep_token": sep, "mask_token": mask}
    for path in folder.iterdir():
        path.unlink()
    PreTrainedTokenizerFast(tokenizer_object=backend, **words).save_pretrained(folder)


def save_japanese(folder: Path, **config) -> None:
    save_plain(folder)
    words = {"tokenizer_class": "BertJapaneseTokenizer", "do_lower_case": False, "word_tokenizer_type": "basic"}
    keep(folder, "vocab.txt", **words | config)


QUESTION = Question("q", "who?", "Ada.", (), ())
LENGTHS = {"max_length": 32, "doc_stride": 8, "max_query_length": 8, "max_answer_length": 8}
ROBERTA = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
KINDS: dict[str, Callable[[Path], object]] = {
    "uncased": save_plain,
    "cased": lambda folder: save_plain(folder, do_lower_case=False),
    "accents kept": lambda folder: save_plain(folder, strip_accents=False),
    "Chinese not split": lambda folder: save_plain(folder, tokenize_chinese_chars=False),
    "vocab.txt alone": save_vocabulary,
    "vocab.txt, cased in tokenizer_config.json": lambda folder: save_vocabulary(folder, do_lower_case=False),
    "added special tokens": lambda folder: save_added(folder, special=True),
    "added tokens": lambda folder: save_added(folder, special=False),
    "PreTrainedTokenizerFast": save_own,
    "NFD, Lowercase, StripAccents": lambda folder: save_own(
        folder, normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    ),
    "WhitespaceSplit": lambda folder: save_own(folder, splitter=pre_tokenizers.WhitespaceSplit()),
    "no prefix": lambda folder: save_own(folder, continuing_subword_prefix=""),
    "other names": lambda folder: save_own(folder, names=ROBERTA),
    "Unigram": lambda folder: save_own(
        folder, normalizers.NFKC(), pre_tokenizers.Metaspace(), models.Unigram(), names=ROBERTA
    ),
    "Japanese, WordPiece": save_japanese,
}


if find_spec("fugashi") and find_spec("unidic_lite"):
    KINDS["Japanese, MeCab"] = lambda folder: save_japanese(folder, word_tokenizer_type="mecab")


def save_kind(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    KINDS[name](folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_transformers_before_and_after_saving(tmp_path, name):
    folder = save_kind(name, tmp_path / "model")
    stock, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    texts = make_texts()
    pairs = list(zip(texts, reversed(texts), strict=True))[:50]
    expected = [stock(text)["input_ids"] for text in texts]
    joined = [stock(*pair) for pair in pairs]
    save_tokenizer(ours, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for tokenizer in (ours, load_tokenizer(tmp_path / "run")):
        found = encode_inputs([*texts, *pairs], None, tokenizer, 1 << 20)
        items = found.__getitems__(range(len(found)))
        assert [item["input_ids"].tolist() for item in items] == expected + [pair["input_ids"] for pair in joined]
        for item, pair in zip(items[len(texts) :], joined, strict=True):
            assert item["token_type_ids"].tolist() == pair.get("token_type_ids", [0] * len(pair["input_ids"]))
        corpus = tokenize_documents([texts], tokenizer)
        assert corpus.ids.tolist() == [token for ids in expected for token in ids[1:-1]]
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert [saved(text)["input_ids"] for text in texts] == expected


def write_encoder(name: str, folder: Path) -> int:
    """Write a tokenizer beside a tiny random model with a row for each token, and return their number."""
    save_kind(name, folder)
    count = len(load_tokenizer(folder))
    make_model("BertModel", vocab_size=count, pad_token_id=None).save_pretrained(folder)
    return count


@pytest.mark.parametrize("name", [name for name in KINDS if name != "Unigram" and "Japanese" not in name])
@pytest.mark.parametrize("words", [0, 7])
def test_a_trimmed_or_extended_tokenizer_stays_what_it_is(tmp_path, name, words):
    count = write_encoder(name, tmp_path / "model")
    texts, others = make_texts()[:30], make_texts()[30:60]
    if words:
        texts = [*texts, "doghairy hairydog", "dognaive dogdog naivehairy", "hairyhairy naivedog"]
    change_vocabulary(str(tmp_path / "model"), texts, tmp_path / "made", words=words)
    old, new = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("model", "made"))
    (pair, types), (former, former_types) = ([*tokenizer(*texts[:2]).values()][:2] for tokenizer in (new, old))
    assert words or (new.convert_ids_to_tokens(pair), types) == (old.convert_ids_to_tokens(former), former_types)
    ends = [new.cls_token_id, new.sep_token_id]
    for text in (*texts, *others):
        ids, former = new(text)["input_ids"], old(text)["input_ids"]
        assert [ids[0], ids[-1]] == ends
        tokens, former = new.convert_ids_to_tokens(ids), old.convert_ids_to_tokens(former)
        assert "".join(tokens).replace("##", "") == "".join(former).replace("##", "")
        assert tokens == former or words or text in others
    assert len(new) == count + words if words else len(new) < count
    assert [*new.added_tokens_encoder] == [*old.added_tokens_encoder]
    added = (each.convert_ids_to_tokens([*each.added_tokens_encoder.values()]) for each in (new, old))
    assert next(added) == next(added)


@pytest.mark.parametrize("name", ["Unigram", "Japanese, WordPiece"])
def test_other_tokenizers_are_not_trimmed(tmp_path, refused, name):
    write_encoder(name, tmp_path / "model")
    with refused():
        change_vocabulary(str(tmp_path / "model"), make_texts(), tmp_path / "made")


def test_own_special_tokens_in_a_text_are_ordinary_text(tmp_path):
    for name in ("added special tokens", "Japanese, WordPiece", "other names"):
        tokenizer = load_tokenizer(save_kind(name, tmp_path / name))
        core = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id}
        text = f"{tokenizer.cls_token} <user>{tokenizer.mask_token} {tokenizer.sep_token}"
        ids, _ = get_cached_tokenizer(tokenizer).encode([text], np.int64)
        assert not core & set(ids.tolist())
        assert ("<user>" in tokenizer.convert_ids_to_tokens(ids.tolist())) is (name == "added special tokens")


def test_a_tokenizer_without_a_post_processor_is_saved_with_that_of_bert(tmp_path, refused):
    folder = save_kind("WhitespaceSplit", tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    save_tokenizer(load_tokenizer(folder), tmp_path / "run")
    ids = AutoTokenizer.from_pretrained(tmp_path / "run")("dog")["input_ids"]
    assert (ids[0], ids[-1]) == (2, 3)
    content["post_processor"]["single"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused():
        load_tokenizer(folder)


def test_offsets_of_sentencepiece_leave_out_the_space(tmp_path, refused):
    tokenizer = load_tokenizer(save_kind("Unigram", tmp_path / "model"))
    _, _, offsets = tokenize([text := "The hairy dog,  北京"], tokenizer)
    pieces = [text[start:end] for start, end in offsets.tolist()]
    assert "".join(pieces).endswith("hairydog,北京")
    assert all(piece == piece.strip() for piece in pieces)
    with refused():
        encode_questions([QUESTION], tokenizer, **LENGTHS)


def test_questions_and_entities_need_the_characters_of_tokens(tmp_path, refused):
    tokenizer = load_tokenizer(save_kind("Japanese, WordPiece", tmp_path / "model"))
    assert isinstance(tokenizer, BertJapaneseTokenizer)
    with refused():
        encode_questions([QUESTION], tokenizer, **LENGTHS)
    with refused():
        encode_words(TaggedText("", [], 0, "IOB2", 0), ["O"], tokenizer)


def test_what_cannot_be_loaded_is_one_line(tmp_path, refused):
    save_vocabulary(tmp_path, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    with refused():
        load_tokenizer(tmp_path)
    save_vocabulary(tmp_path, tokenizer_class="AlbertTokenizer")
    with refused():
        load_tokenizer(tmp_path)
    save_vocabulary(tmp_path, tokenizer_class="BertJapaneseTokenizer", word_tokenizer_type="jumanpp")
    with pytest.raises(UsageError, match=r"cannot be loaded .*rhoknp.*; install that package$"):
        load_tokenizer(tmp_path)


def test_a_class_that_only_config_json_names_is_used(tmp_path):
    save_vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer"}))
    assert isinstance(load_tokenizer(tmp_path), BertJapaneseTokenizer)
