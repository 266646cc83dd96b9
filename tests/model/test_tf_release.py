"""Checkpoints in the format of BERT's release; those in tests/model/tensorflow are from the paper's code."""

import errno
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import bertkit
from bertkit import cli
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.model import tf_release
from bertkit.model.checkpoint import load_model
from bertkit.model.tf_release import (
    import_checkpoint,
    mask_checksum,
    read_bundle,
    read_table,
    read_variable,
)

WRITTEN = Path(__file__).parent / "tensorflow"
PRETRAINING, CLASSIFIER, SQUAD = "uncased_pretraining", "cased_classifier", "uncased_squad"
HEADS = {
    PRETRAINING: "BertForPreTraining",
    CLASSIFIER: "BertForSequenceClassification",
    SQUAD: "BertForQuestionAnswering",
}

# --- A writer of tables and bundles, for what TensorFlow does not write -----------------------------------------------


def number(value):
    """Encode a number as a varint."""
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def seal(block, compression=0):
    """Return a block with its compression byte and checksum."""
    block += bytes([compression])
    return block + mask_checksum(google_crc32c.value(block)).to_bytes(4, "little")


def make_block(records):
    """Return a block of keys and values; keys omit the prefix shared with the previous key."""
    block, last = b"", b""
    for key, value in records:
        shared = 0
        while last[shared : shared + 1] == key[shared : shared + 1] != b"":
            shared += 1
        block += number(shared) + number(len(key) - shared) + number(len(value)) + key[shared:] + value
        last = key
    return block + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")


def make_table(*blocks, compression=0):
    """Return a table of these blocks."""
    table, places = b"", []
    for block in (*blocks, make_block([])):
        places.append(number(len(table)) + number(len(block)))
        table += seal(block, compression)
    index = make_block([(b"%08d" % at, place) for at, place in enumerate(places[:-1])])
    footer = places[-1] + number(len(table)) + number(len(index))
    return table + seal(index) + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def make_entry(shape, dtype=1, part=0, offset=0, size=None, checksum=0, more=b""):
    """Return the index entry of a variable."""
    dimensions = b"".join(b"\x12" + number(len(number(n)) + 1) + b"\x08" + number(n) for n in shape)
    size = 4 * int(np.prod(shape, dtype=object)) if size is None else size
    fields = b"\x08" + number(dtype) + b"\x12" + number(len(dimensions)) + dimensions + b"\x18" + number(part)
    fields += b"\x20" + number(offset) + b"\x28" + number(size)
    return fields + b"\x35" + mask_checksum(checksum).to_bytes(4, "little") + more


def write_bundle(folder, entries, data=bytes(64), header=b"\x08\x01"):
    """Write a checkpoint of one file with these entries."""
    (folder / "x.data-00000-of-00001").write_bytes(data)
    records = sorted(({b"": header} | {name.encode(): value for name, value in entries.items()}).items())
    (folder / "x.index").write_bytes(make_table(make_block(records)))
    return folder / "x"


@pytest.fixture
def copy(tmp_path):
    """Copy a checkpoint, optionally removing, adding or renaming variables."""

    def copy(name, folder=None, drop=(), rename=()):
        target = tmp_path / (folder or name)
        shutil.copytree(WRITTEN / name, target)
        if drop or rename:
            (index,) = target.glob("*.index")
            records = read_table(index.read_bytes())
            for old, new in rename:
                records[new.encode()] = records.pop(old.encode())
            kept = {key: value for key, value in records.items() if not any(word in key.decode() for word in drop)}
            index.write_bytes(make_table(make_block(sorted(kept.items()))))
        return target

    return copy


# --- What comes out of it ---------------------------------------------------------------------------------------------


def read_expected(name):
    """Return the input and the output of the paper's code."""
    arrays = dict(np.load(WRITTEN / name / "expected.npz"))
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}
    return {ours: torch.from_numpy(arrays.pop(theirs)).long() for ours, theirs in names.items()}, arrays


@pytest.mark.parametrize("library", [bertkit, transformers], ids=["bertkit", "transformers"])
@pytest.mark.parametrize("name", HEADS)
def test_the_outputs_are_those_of_the_papers_code(name, library, tmp_path):
    import_checkpoint(WRITTEN / name, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == "gelu"
    batch, expected = read_expected(name)
    # That code computes GELU by tanh, which has another name in transformers.
    model = getattr(library, HEADS[name]).from_pretrained(tmp_path / "out", hidden_act="gelu_new").eval()
    with torch.no_grad():
        outputs = model(**batch)
        if name == PRETRAINING:
            encoded = model.bert(**batch)
            outputs |= {"sequence_output": encoded.last_hidden_state, "pooled_output": encoded.pooler_output}
    real = batch["attention_mask"].bool()
    for key, values in expected.items():
        ours, theirs = outputs[key], torch.from_numpy(values)
        if ours.shape[:2] == real.shape:
            ours, theirs = ours[real], theirs[real]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5, key
        assert theirs.abs().max() > 0.1


@pytest.mark.parametrize("name", HEADS)
def test_it_is_a_checkpoint_like_others(name, tmp_path):
    out = tmp_path / "new" / "out"
    lines = []
    import_checkpoint(WRITTEN / name, out, report=lines.append)
    model, new = load_model(getattr(bertkit, HEADS[name]), str(out), {})
    assert new == []
    _, info = getattr(transformers, HEADS[name]).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    config, source = model.config.to_dict(), json.loads((WRITTEN / name / "bert_config.json").read_text())
    assert {key: config[key] for key in source} == source
    assert config["architectures"] == [HEADS[name]]
    tokenizers = [load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)]
    for tokenizer in tokenizers:
        pieces = tokenizer.tokenize("My dogs")
        assert pieces == (["[UNK]", "dog", "##s"] if name == CLASSIFIER else ["my", "dog", "##s"])
        assert tokenizer.model_max_length == source["max_position_embeddings"]
    assert (out / "vocab.txt").read_bytes() == (WRITTEN / name / "vocab.txt").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
    ]
    assert list(out.parent.iterdir()) == [out]
    assert ("its 3 labels have no names" in "\n".join(lines)) == (name == CLASSIFIER)
    assert ("skipping the pooler" in "\n".join(lines)) == (name == SQUAD)
    assert any(line.startswith("skipping ") and "variables of the optimizer" in line for line in lines)


def test_a_bundle_has_every_variable_from_every_part():
    variables = read_bundle(WRITTEN / PRETRAINING / "bert_model.ckpt")
    assert variables["bert/embeddings/word_embeddings"].shape == (36, 16)
    assert variables["bert/encoder/layer_1/intermediate/dense/kernel/adam_m"].shape == (16, 24)
    assert {variable.path.name[-5:] for variable in variables.values()} == {"00002"}
    assert len({variable.path for variable in variables.values()}) == 2
    assert read_variable("global_step", variables["global_step"]) == 1
    for name, variable in variables.items():
        values = read_variable(name, variable)
        assert values.shape == variable.shape
        assert np.isfinite(values).all()
    assert len(variables) == 3 * 46 + 1
    # Each byte of the files belongs to a variable, so each has a checksum.
    for path in {variable.path for variable in variables.values()}:
        assert path.stat().st_size == sum(variable.size for variable in variables.values() if variable.path == path)


def test_without_heads_it_is_an_encoder(copy, tmp_path):
    import_checkpoint(copy(PRETRAINING, drop=["cls/"]), tmp_path / "out")
    import_checkpoint(WRITTEN / PRETRAINING, tmp_path / "whole")
    bare, new = load_model(bertkit.BertModel, str(tmp_path / "out"), {})
    whole = bertkit.BertForPreTraining.from_pretrained(tmp_path / "whole").bert
    assert new == []
    assert bare.config.architectures == ["BertModel"]
    for name, values in whole.state_dict().items():
        assert torch.equal(bare.state_dict()[name], values), name


@pytest.mark.parametrize(
    ("drop", "head"),
    [
        (["pooler/dense/kernel/adam", "pooler/dense/bias/adam"], "BertForTokenClassification"),  # it did not learn
        (["adam", "global_step"], "BertForSequenceClassification"),  # nobody knows
    ],
)
def test_a_pooler_that_did_not_learn_was_not_read(drop, head, copy, tmp_path):
    import_checkpoint(copy(CLASSIFIER, drop=drop), tmp_path / "out")
    model, new = load_model(getattr(bertkit, head), str(tmp_path / "out"), {})
    assert model.config.architectures == [head]
    assert new == []
    variables = read_bundle(WRITTEN / CLASSIFIER / "model.ckpt-1")
    expected = read_variable("output_weights", variables["output_weights"])
    assert np.array_equal(model.classifier.weight.detach().numpy(), expected)


def test_an_adam_of_tensorflows_own_is_left_out_too(copy, tmp_path):
    name = "output_bias"
    rename = [(f"{name}/adam_m", f"{name}/Adam"), (f"{name}/adam_v", f"{name}/Adam_1"), ("global_step", "beta1_power")]
    import_checkpoint(copy(CLASSIFIER, rename=rename), tmp_path / "out")


# --- Which checkpoint, cased or not -----------------------------------------------------------------------------------


def test_one_of_several_checkpoints_is_named(copy, tmp_path):
    folder = copy(CLASSIFIER)
    for path in folder.glob("model.ckpt-1.*"):
        shutil.copy(path, path.with_name(path.name.replace("ckpt-1", "ckpt-20")))
    with pytest.raises(
        UsageError, match=r"has 2 checkpoints \(model.ckpt-1, model.ckpt-20\); name one of them: .*-20$"
    ):
        import_checkpoint(folder, tmp_path / "out")
    import_checkpoint(folder / "model.ckpt-20", tmp_path / "out")
    import_checkpoint(folder / "model.ckpt-1.index", tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "folder", "cased", "expected"),
    [
        (SQUAD, "uncased_L-12_H-768_A-12", None, "uncased: vocab.txt has no capital letters"),
        (SQUAD, "biobert", None, "uncased: vocab.txt has no capital letters"),
        (CLASSIFIER, "multi_cased_L-12_H-768_A-12", None, "cased: vocab.txt has capital letters"),
        (CLASSIFIER, "biobert", None, "cased: vocab.txt has capital letters"),
        (
            CLASSIFIER,
            "uncased_L-2",
            None,
            "vocab.txt has capital letters, .* is called uncased_L-2; choose --cased or",
        ),
        (SQUAD, "cased_L-2", None, "vocab.txt has no capital letters, .* is called cased_L-2; choose --cased or"),
        (CLASSIFIER, "uncased_L-2", True, ""),
        (CLASSIFIER, "uncased_L-2", False, ""),
        (SQUAD, "cased_L-2", False, ""),
        (SQUAD, "uncased_L-2", True, "has no capital letter, so it is uncased"),
    ],
)
def test_the_folder_and_the_vocabulary_say_whether_it_is_cased(name, folder, cased, expected, copy, tmp_path):
    source, out, lines = copy(name, folder), tmp_path / "out", []
    if "choose" in expected or (cased and name == SQUAD):
        with pytest.raises(UsageError, match=expected):
            import_checkpoint(source, out, cased=cased)
        assert not out.exists()
        return
    import_checkpoint(source, out, cased=cased, report=lines.append)
    is_cased = name == CLASSIFIER if cased is None else cased
    assert load_tokenizer(out).tokenize("My") == (["[UNK]"] if is_cased else ["my"])
    assert [line.removeprefix("loaded as ") for line in lines if line.startswith("loaded")] == (
        [f"{expected}, and the folder is called {folder}"] if expected else []
    )


# --- What cannot be used ----------------------------------------------------------------------------------------------


def change_config(folder, **values):
    path = folder / "bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BREAKS = {  # change to the pre-training checkpoint -> words of the message
    "no config": (lambda d: (d / "bert_config.json").unlink(), r"there is no .*bert_config.json; copy it"),
    "no vocabulary": (lambda d: (d / "vocab.txt").unlink(), r"there is no .*vocab.txt; copy it"),
    "no index": (lambda d: (d / "bert_model.ckpt.index").unlink(), r"is not a TensorFlow checkpoint; name a folder"),
    "no part": (
        lambda d: (d / "bert_model.ckpt.data-00001-of-00002").unlink(),
        r"there is no .*data-00001-of-00002; copy all files",
    ),
    "no JSON": (lambda d: (d / "bert_config.json").write_text("{"), r"bert_config.json: Input data was truncated; "),
    "no object": (
        lambda d: (d / "bert_config.json").write_text("[1]"),
        r"Expected `object`, got `array`; ",
    ),
    "type": (lambda d: change_config(d, hidden_size="16"), r"bert_config.json cannot be used: .*hidden_size"),
    "heads": (lambda d: change_config(d, num_attention_heads=3), r"cannot be used: .*not divisible"),
    "activation": (lambda d: change_config(d, hidden_act="magic"), r"cannot be used: .*'magic' is unknown"),
    "layers": (lambda d: change_config(d, num_hidden_layers=10**9), r"num_hidden_layers must be at most 1,000"),
    "hidden": (lambda d: change_config(d, hidden_size=18), r"has the shape \(.*16.*\) but .* asks for \(.*18.*\)"),
    "inner": (
        lambda d: change_config(d, intermediate_size=16),
        r"layer_0/intermediate/dense/kernel has the shape \(16, 24\) but .* \(16, 16\)",
    ),
    "segments": (lambda d: change_config(d, type_vocab_size=16), r"token_type_embeddings has the shape \(2, 16\)"),
    "huge": (lambda d: change_config(d, vocab_size=10**30), r"bert_config.json cannot be used"),
    "tokens": (lambda d: change_config(d, vocab_size=35), r"has 36 tokens, but the model only 35; use the vocabulary"),
    "more tokens": (lambda d: change_config(d, vocab_size=37), r"word_embeddings has the shape \(36, 16\)"),
    "no text": (lambda d: (d / "vocab.txt").write_bytes(b"\xff\n"), r"vocab.txt, line 1 is not UTF-8"),
    "other text": (lambda d: (d / "vocab.txt").write_text("a\n"), r"is not a BERT vocabulary: it has no \[PAD\]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_folder_with_a_fault_is_refused_in_one_line(name, copy, tmp_path):
    source = copy(PRETRAINING)
    break_it, message = BREAKS[name]
    break_it(source)
    with pytest.raises(UsageError, match=message) as refusal:
        import_checkpoint(source, tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "drop", "rename", "message"),
    [
        (
            PRETRAINING,
            ["seq_relationship"],
            [],
            r"is not a BertForPreTraining of the release: it lacks cls/seq_relationsh",
        ),
        (PRETRAINING, ["layer_0/"], [], r"asks for 2 layers, but the checkpoint has 1"),
        (SQUAD, ["attention"], [], r"it lacks bert/encoder/layer_0/attention/\S+, \S+, \S+ and 27 more; name"),
        (
            CLASSIFIER,
            ["output_bias"],
            [],
            r"is not a BertForSequenceClassification of the release: it lacks output_bias",
        ),
        (CLASSIFIER, [], [("global_step", "extra/kernel")], r"of the release: it has extra/kernel; name another"),
        (CLASSIFIER, [], [("global_step", "extra/adam_m")], r"of the release: it has extra/adam_m; name another"),
        (CLASSIFIER, [], [("output_bias/adam_m", "cls/squad/output_weights")], r"lacks cls/squad/output_bias"),
        (
            CLASSIFIER,
            ["output_bias/adam"],
            [("output_bias", "cls/squad/output_bias"), ("output_weights/adam_m", "cls/squad/output_weights")],
            r"is not a BertForQuestionAnswering of the release: it has output_weights",
        ),
        (PRETRAINING, ["bert/"], [], r"asks for 2 layers, but the checkpoint has 0"),
    ],
)
def test_no_variable_is_left_over_and_none_is_missing(name, drop, rename, message, copy, tmp_path):
    with pytest.raises(UsageError, match=message):
        import_checkpoint(copy(name, drop=drop, rename=rename), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_integers_are_no_weights(copy, tmp_path):
    source = copy(SQUAD)
    index = source / "model.ckpt-1.index"
    records = read_table(index.read_bytes())
    data = source / "model.ckpt-1.data-00000-of-00001"
    values, size = np.zeros(2, "<i8").tobytes(), data.stat().st_size
    data.write_bytes(data.read_bytes() + values)
    records[b"cls/squad/output_bias"] = make_entry([2], 9, offset=size, size=16, checksum=google_crc32c.value(values))
    index.write_bytes(make_table(make_block(sorted(records.items()))))
    with pytest.raises(UsageError, match=r"cls/squad/output_bias in .* has integers, expected weights"):
        import_checkpoint(source, tmp_path / "out")


def test_nothing_is_written_over(tmp_path, monkeypatch):
    for name in ("full", "file"):
        (tmp_path / name).mkdir() if name == "full" else (tmp_path / name).write_text("mine")
    (tmp_path / "full" / "mine").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(UsageError, match=f"{name} exists and is not an empty directory; name another one"):
            import_checkpoint(WRITTEN / SQUAD, tmp_path / name)
    with pytest.raises(UsageError, match="out cannot be used"):
        import_checkpoint(WRITTEN / SQUAD, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="is the current directory"):
        import_checkpoint(WRITTEN / SQUAD, Path("."))
    monkeypatch.chdir(tmp_path)
    import_checkpoint(WRITTEN / SQUAD, tmp_path / "empty")
    assert load_tokenizer(tmp_path / "empty")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def fail(tokenizer, directory):
        assert (directory / "model.safetensors").exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tf_release, "save_tokenizer", fail)
    with pytest.raises(UsageError, match="out cannot be written to: the disk is full"):
        import_checkpoint(WRITTEN / SQUAD, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ({"a": make_entry([2, 1 << 37])}, {}, r"is truncated: it has 64 of 1,099,511,627,776 bytes; download it again"),
        ({"a": make_entry([16], offset=1)}, {}, r"is truncated: it has 64 of 65 bytes"),
        ({"a": make_entry([16], offset=2**64 - 8)}, {}, r"is truncated"),
        ({"a": make_entry([2**63, 2], size=0)}, {}, r"a variable of 0 bytes has the shape"),
        ({"a": make_entry([4], size=12)}, {}, r"a variable of 12 bytes has the shape \(4,\)"),
        ({"a": make_entry([1], part=1)}, {}, r"a variable refers to part 1, but there are 1"),
        ({"a": make_entry([1], dtype=7, size=4)}, {}, r"a variable of type 7; expected float32, float16"),
        ({"a": make_entry([1], more=b"\x3a\x00")}, {}, r"has a sliced variable"),
        ({"a": make_entry([1], more=b"\x40\x00")}, {}, r"it has an unknown field 64"),
        ({"a": make_entry([1], more=b"\x08")}, {}, r"is damaged \(index out of range\)"),
        ({"a": make_entry([1], more=b"\x35\x00")}, {}, r"a value is truncated"),
        ({"a\nb": make_entry([1])}, {}, r"a name is not text"),
        ({"a" * 1001: make_entry([1])}, {}, r"a name or its value lies outside its block"),
        ({"_CHECKPOINTABLE_OBJECT_GRAPH": make_entry([], dtype=7)}, {}, r"holds TensorFlow 2 objects"),
        ({"a": make_entry([1])}, {"header": b"\x08\x01\x10\x01"}, r"its numbers are big-endian"),
        ({"a": make_entry([1])}, {"header": b""}, r"a variable refers to part 0, but there are 0"),
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(entries, options, message, tmp_path):
    with pytest.raises(UsageError, match=message) as refusal:
        read_bundle(write_bundle(tmp_path, entries, **options))
    assert "\n" not in str(refusal.value)


def test_tables_that_are_compressed_or_damaged_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.index"
    block = make_block([(b"a", b""), (b"b", b"")])
    assert read_table(make_table(block, make_block([(b"c", b"1")]))) == {b"a": b"", b"b": b"", b"c": b"1"}
    for table, message in (
        (make_table(block, compression=1), "its index is compressed"),
        (make_table(block)[:-1] + b"\0", "its footer is not that of a table"),
        (b"", "its footer is not that of a table"),
        (make_table(b""), "a block is shorter than its length field"),
    ):
        path.write_bytes(table)
        with pytest.raises(UsageError, match=message):
            read_bundle(tmp_path / "x")
    monkeypatch.setattr(tf_release, "LARGEST_INDEX", 10)
    with pytest.raises(UsageError, match="too large for the index of a BERT"):
        read_bundle(tmp_path / "x")


@pytest.mark.parametrize(
    ("footer", "message"),
    [
        (b"\xff" * 40, "a varint does not end"),
        (number(0) * 3 + number(1 << 20), "a block lies outside the file"),
    ],
)
def test_a_table_whose_end_says_what_cannot_be_is_damaged(footer, message, tmp_path):
    table = make_table(make_block([(b"a", b"")]))
    (tmp_path / "x.index").write_bytes(table[:-48] + footer.ljust(40, b"\0") + table[-8:])
    with pytest.raises(UsageError, match=rf"x\.index is damaged \({message}\); download it again$"):
        read_bundle(tmp_path / "x")


@pytest.mark.parametrize(("dtype", "code"), [("float16", 19), ("bfloat16", 14), ("float32", 1)])
def test_weights_of_16_bits_are_read_in_full(dtype, code, tmp_path):
    values = torch.tensor([[0.5, -2.0, 3.140625], [1e-4, 0.0, 65504.0]]).to(getattr(torch, dtype))
    data = values.view(torch.uint8 if dtype == "float32" else torch.int16).numpy().tobytes()
    entry = make_entry([2, 3], code, offset=3, size=len(data), checksum=google_crc32c.value(data))
    found = read_variable("a", read_bundle(write_bundle(tmp_path, {"a": entry}, b"abc" + data))["a"])
    assert found.dtype == np.float32
    assert np.array_equal(found, values.float().numpy())


# --- Checksums, and damage of every kind ------------------------------------------------------------------------------


@cache
def read_written(name):
    """Return the files of a checkpoint by name."""
    return {path.name: path.read_bytes() for path in (WRITTEN / name).glob("*ckpt*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a copy of a checkpoint whose files are damaged repeatedly."""
    target = tmp_path_factory.mktemp("damaged")
    shutil.copytree(WRITTEN / PRETRAINING, target, dirs_exist_ok=True)
    for part in range(2):
        shutil.copy(WRITTEN / PRETRAINING / PART, target / f"lie.data-0000{part}-of-00002")
    return target


INDEX, PART = "bert_model.ckpt.index", "bert_model.ckpt.data-00001-of-00002"


def flip(data, draw):
    """Return the bytes with one of them changed, and its position."""
    at = draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= draw(st.integers(1, 255))
    return bytes(changed), at


@given(st.data())
def test_any_changed_byte_of_an_index_is_found_or_unused(folder, data):
    original = read_written(PRETRAINING)[INDEX]
    changed, _ = flip(original, data.draw)
    (folder / INDEX).write_bytes(changed)
    try:
        assert read_table(changed) == read_table(original)
    except (ValueError, IndexError):
        with pytest.raises(UsageError, match=r"\.index (is damaged|cannot be imported)"):
            read_bundle(folder / "bert_model.ckpt")
    (folder / INDEX).write_bytes(original)


@given(st.data())
def test_any_changed_byte_of_a_weight_is_found(folder, data):
    original = read_written(PRETRAINING)[PART]
    changed, at = flip(original, data.draw)
    (folder / PART).write_bytes(changed)
    variables = read_bundle(folder / "bert_model.ckpt")
    (hit,) = (
        name
        for name, variable in variables.items()
        if variable.path.name == PART and variable.offset <= at < variable.offset + variable.size
    )
    with pytest.raises(UsageError, match=f"{hit} has a wrong checksum; download it again"):
        read_variable(hit, variables[hit])
    (folder / PART).write_bytes(original)


@given(st.sampled_from([INDEX, PART]), st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_anywhere_is_found(folder, name, share):
    original = read_written(PRETRAINING)[name]
    (folder / name).write_bytes(original[: int(share * len(original))])
    with pytest.raises(UsageError, match=r"is damaged|is truncated"):
        read_bundle(folder / "bert_model.ckpt")
    (folder / name).write_bytes(original)


@given(st.data())
def test_an_index_that_lies_with_good_checksums_is_refused_or_lies_about_no_byte(folder, data):
    records = list(read_table(read_written(PRETRAINING)[INDEX]).items())
    block = make_block(records[: data.draw(st.integers(1, 6))])
    for _ in range(data.draw(st.integers(1, 3))):
        block, _ = flip(block, data.draw)
    (folder / "lie.index").write_bytes(make_table(block))
    try:
        variables = read_bundle(folder / "lie")
    except UsageError:
        return
    for variable in variables.values():
        assert variable.offset + variable.size <= variable.path.stat().st_size
        assert np.prod(variable.shape, dtype=object) * {"<f4": 4, "<i8": 8}.get(variable.dtype, 2) == variable.size


def test_damage_leaves_no_directory(copy, tmp_path):
    source = copy(SQUAD)
    data = source / "model.ckpt-1.data-00000-of-00001"
    variable = read_bundle(source / "model.ckpt-1")["bert/encoder/layer_2/output/dense/kernel"]
    content = bytearray(data.read_bytes())
    content[variable.offset] ^= 1
    data.write_bytes(content)
    with pytest.raises(UsageError, match="layer_2/output/dense/kernel has a wrong checksum"):
        import_checkpoint(source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


# --- The command, and TensorFlow itself -------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bertkit", "import-tf", str(WRITTEN / CLASSIFIER), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "BertForSequenceClassification with 2,087 parameters, from model.ckpt-1\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err
        == f"bertkit: {tmp_path / 'out'} exists and is not an empty directory; name another one\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "parts"), [(1, 1), (40, 1), (7, 3), (300, 2)])
def test_what_tensorflow_writes_is_read(count, parts, tmp_path):
    tf = pytest.importorskip("tensorflow.compat.v1", reason="TensorFlow is not installed: pip install tensorflow-cpu")
    random = np.random.default_rng(count)
    dtypes = [tf.float32, tf.float16, tf.bfloat16, tf.int64]
    with tf.Graph().as_default():
        variables = {}
        for at in range(count):
            shape = random.integers(1, 40, random.integers(0, 4))
            with tf.device(f"/cpu:{at % parts}"):
                name = f"bert/encoder/layer_{at}/{'x' * (at % 9 + 1)}"
                values = tf.constant(random.normal(0, 9, shape))
                variables[name] = tf.Variable(tf.cast(values, dtypes[at % 4]), name=name, use_resource=False)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": parts})) as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver(sharded=parts > 1).save(session, str(tmp_path / "model.ckpt"), global_step=7)
            expected = session.run(variables)
    found = read_bundle(tmp_path / "model.ckpt-7")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        read = read_variable(name, found[name])
        assert read.shape == values.shape
        assert np.array_equal(read, values.astype(read.dtype))
    assert len({variable.path for variable in found.values()}) == min(parts, count)


@pytest.mark.slow
def test_what_the_release_does_not_have_is_refused(tmp_path):
    tf = pytest.importorskip("tensorflow.compat.v1", reason="TensorFlow is not installed: pip install tensorflow-cpu")
    with tf.Graph().as_default():
        tf.get_variable("a", [8, 2], partitioner=tf.fixed_size_partitioner(2), use_resource=False)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, str(tmp_path / "sliced"))
    with pytest.raises(UsageError, match="it has a sliced variable"):
        read_bundle(tmp_path / "sliced")
    import tensorflow as tf2

    path = tf2.train.Checkpoint(a=tf2.Variable([1.0])).write(str(tmp_path / "objects"))
    with pytest.raises(UsageError, match="it holds TensorFlow 2 objects"):
        read_bundle(Path(path))
