"""Checkpoints in the format of BERT's release, read by TensorFlow.

The folders in `tensorflow/` are tiny random models that google-research/bert has trained for one step and saved with
TensorFlow 2.21, and what its code gives for an input (`expected.npz`). The script that wrote them is
tests/model/tensorflow/make.py of bertkit 0.1.0.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bertkit
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.model.checkpoint import load_model
from bertkit.model.tf_release import import_checkpoint

WRITTEN = Path(__file__).parent / "tensorflow"
PRETRAINING, CLASSIFIER, SQUAD = "uncased_pretraining", "cased_classifier", "uncased_squad"
HEADS = {
    PRETRAINING: "BertForPreTraining",
    CLASSIFIER: "BertForSequenceClassification",
    SQUAD: "BertForQuestionAnswering",
}
INPUT = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}


def write_changed(name, folder, change=lambda variables: variables, **config):
    """Write a copy of a checkpoint with changed variables or a changed bert_config.json."""
    import tensorflow as tf

    shutil.copytree(WRITTEN / name, folder, ignore=shutil.ignore_patterns("*.ckpt*"))
    reader = tf.train.load_checkpoint(str(next((WRITTEN / name).glob("*.index")).with_suffix("")))
    variables = change({name: tf.constant(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()})
    tf.raw_ops.SaveV2(
        prefix=str(folder / "bert_model.ckpt"),
        tensor_names=list(variables),
        shape_and_slices=[""] * len(variables),
        tensors=list(variables.values()),
    )
    path = folder / "bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def drop(word):
    """Return a change that leaves out the variables with a word in their names."""
    return lambda variables: {name: values for name, values in variables.items() if word not in name}


def rename(old, new):
    """Return a change that gives a variable another name."""
    return lambda variables: {new if name == old else name: values for name, values in variables.items()}


@pytest.mark.clients
@pytest.mark.parametrize("library", [bertkit, transformers], ids=["bertkit", "transformers"])
@pytest.mark.parametrize("name", HEADS)
def test_the_outputs_are_those_of_the_papers_code(name, library, tmp_path):
    import_checkpoint(WRITTEN / name, tmp_path / "out")
    expected = {key: torch.from_numpy(values) for key, values in np.load(WRITTEN / name / "expected.npz").items()}
    batch = {ours: expected.pop(theirs).long() for ours, theirs in INPUT.items()}
    # That code computes GELU by tanh, which has another name in transformers.
    model = getattr(library, HEADS[name]).from_pretrained(tmp_path / "out", hidden_act="gelu_new").eval()
    with torch.no_grad():
        outputs = model(**batch)
        if name == PRETRAINING:
            encoded = model.bert(**batch)
            outputs |= {"sequence_output": encoded.last_hidden_state, "pooled_output": encoded.pooler_output}
    real = batch["attention_mask"].bool()
    for key, theirs in expected.items():
        ours = outputs[key]
        if ours.shape[:2] == real.shape:
            ours, theirs = ours[real], theirs[real]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5, key
        assert theirs.abs().max() > 0.1


@pytest.mark.clients
@pytest.mark.parametrize("name", HEADS)
def test_it_is_a_checkpoint_like_others(name, tmp_path):
    out, lines = tmp_path / "new" / "out", []
    import_checkpoint(WRITTEN / name, out, report=lines.append)
    model, new = load_model(getattr(bertkit, HEADS[name]), str(out), {})
    assert new == []
    _, info = getattr(transformers, HEADS[name]).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    config, source = model.config.to_dict(), json.loads((WRITTEN / name / "bert_config.json").read_text())
    assert {key: config[key] for key in source} == source
    assert config["architectures"] == [HEADS[name]]
    for tokenizer in (load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)):
        pieces = tokenizer.tokenize("My dogs")
        assert pieces == (["[UNK]", "dog", "##s"] if name == CLASSIFIER else ["my", "dog", "##s"])
        assert tokenizer.model_max_length == source["max_position_embeddings"]
    assert (out / "vocab.txt").read_bytes() == (WRITTEN / name / "vocab.txt").read_bytes()
    assert list(out.parent.iterdir()) == [out]
    assert ("its 3 labels have no names" in "\n".join(lines)) == (name == CLASSIFIER)
    with pytest.raises(UsageError, match="out exists and is not an empty directory; name another one"):
        import_checkpoint(WRITTEN / name, out)


@pytest.mark.clients
def test_without_heads_it_is_an_encoder(tmp_path):
    import_checkpoint(write_changed(PRETRAINING, tmp_path / "bare", drop("cls/")), tmp_path / "out")
    import_checkpoint(WRITTEN / PRETRAINING, tmp_path / "whole")
    bare, new = load_model(bertkit.BertModel, str(tmp_path / "out"), {})
    whole = bertkit.BertForPreTraining.from_pretrained(tmp_path / "whole").bert
    assert new == []
    for name, values in whole.state_dict().items():
        assert torch.equal(bare.state_dict()[name], values), name


@pytest.mark.clients
def test_weights_of_16_bits_become_32(tmp_path):
    import tensorflow as tf

    def shorten(variables):
        return {name: tf.cast(values, tf.bfloat16) for name, values in variables.items()}

    import_checkpoint(write_changed(SQUAD, tmp_path / "short", shorten), tmp_path / "out")
    import_checkpoint(WRITTEN / SQUAD, tmp_path / "whole")
    short, whole = (bertkit.BertForQuestionAnswering.from_pretrained(tmp_path / name) for name in ("out", "whole"))
    assert torch.equal(short.qa_outputs.weight, whole.qa_outputs.weight.bfloat16().float())


@pytest.mark.clients
def test_the_state_of_tensorflows_own_adam_is_left_out_too(tmp_path):
    change = rename("output_bias/adam_m", "output_bias/Adam_1")
    import_checkpoint(write_changed(CLASSIFIER, tmp_path / "changed", change), tmp_path / "out")


@pytest.mark.clients
@pytest.mark.parametrize(
    ("name", "change", "config", "message"),
    [
        (PRETRAINING, drop("seq_relationship/output_b"), {}, r"lacks cls/seq_relationship/output_bias, which BertFor"),
        (SQUAD, rename("global_step", "extra/kernel"), {}, r"has extra/kernel, which BertForQuestionAnswering lacks"),
        (SQUAD, dict, {"num_hidden_layers": 2}, r"has bert/encoder/layer_2/\S+, which BertForQuestionAnswering lacks"),
        (SQUAD, dict, {"intermediate_size": 16}, r"bert_config.json cannot be used: .* size mismatch for"),
        (SQUAD, dict, {"vocab_size": 35}, r"vocab.txt has 36 tokens, but the model only 35; use the model's"),
        (SQUAD, dict, {"num_attention_heads": 3}, r"bert_config.json cannot be used: .*not divisible"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(name, change, config, message, tmp_path):
    source = write_changed(name, tmp_path / "changed", change, **config)
    with pytest.raises(UsageError, match=message) as refusal:
        import_checkpoint(source, tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "new").exists()


def change_byte(path):
    """Change the first byte of a file."""
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.clients
@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("bert_config.json", Path.unlink, "bert_config.json does not exist; check the folder"),
        ("vocab.txt", Path.unlink, "vocab.txt' does not exist; name a directory"),
        ("model.ckpt-1.index", Path.unlink, r"has no \*.index; name a checkpoint"),
        ("model.ckpt-1.index", change_byte, r"model.ckpt-1 cannot be read \(.+\); copy all its files again"),
        ("model.ckpt-1.data-00000-of-00001", Path.unlink, r"model.ckpt-1 cannot be read \(.+\); copy all its files"),
        ("model.ckpt-1.data-00000-of-00001", change_byte, r"model.ckpt-1 cannot be read \(.+\); copy all its files"),
    ],
)
def test_a_missing_or_damaged_file_is_one_line(file, spoil, message, tmp_path):
    source = tmp_path / "copy"
    shutil.copytree(WRITTEN / SQUAD, source)
    spoil(source / file)
    with pytest.raises(UsageError, match=message) as refusal:
        import_checkpoint(source, tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.clients
def test_one_of_several_checkpoints_is_named(tmp_path):
    source = write_changed(SQUAD, tmp_path / "two")
    for path in source.glob("bert_model.ckpt.*"):
        shutil.copy(path, path.with_name(path.name.replace("bert_model", "model")))
    with pytest.raises(UsageError, match=r"has several checkpoints \(bert_model.ckpt, model.ckpt\); name a checkpoint"):
        import_checkpoint(source, tmp_path / "out")
    import_checkpoint(source / "model.ckpt", tmp_path / "out")


@pytest.mark.clients
def test_the_vocabulary_or_an_option_says_whether_it_is_cased(tmp_path):
    lines = []
    import_checkpoint(WRITTEN / CLASSIFIER, tmp_path / "cased", report=lines.append)
    assert "loaded as cased: vocab.txt has capital letters" in lines
    import_checkpoint(WRITTEN / CLASSIFIER, tmp_path / "uncased", cased=False)
    assert load_tokenizer(tmp_path / "cased").tokenize("My") == ["[UNK]"]
    assert load_tokenizer(tmp_path / "uncased").tokenize("My") == ["my"]


def test_the_extra_is_named_where_tensorflow_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UsageError, match=r"import-tf needs TensorFlow; run pip install -e '\.\[tensorflow\]'"):
        import_checkpoint(WRITTEN / SQUAD, tmp_path / "out")
