"""Checkpoints in the format of BERT's release, read by TensorFlow in recipes/pretrain/import_tf.py.

The folders in `tensorflow/` are tiny random models that google-research/bert has trained for one step and saved with
TensorFlow 2.21, and what its code gives for an input (`expected.npz`). The script that wrote them is
tests/model/tensorflow/make.py of bertkit 0.1.0.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bertkit
from bertkit.data.tokenizer import load_tokenizer

WRITTEN = Path(__file__).parent / "tensorflow"
SCRIPT = Path(__file__).parents[2] / "recipes" / "pretrain" / "import_tf.py"
INPUT = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}


@pytest.mark.clients
@pytest.mark.parametrize(
    ("name", "head", "pieces"),
    [
        ("uncased_pretraining", "BertForPreTraining", ["my", "dog", "##s"]),
        ("cased_classifier", "BertForSequenceClassification", ["[UNK]", "dog", "##s"]),
        ("uncased_squad", "BertForQuestionAnswering", ["my", "dog", "##s"]),
    ],
)
def test_the_outputs_are_those_of_the_papers_code(name, head, pieces, tmp_path):
    folder, out = WRITTEN / name, tmp_path / "out"
    (index,) = folder.glob("*.index")
    printed = subprocess.run([sys.executable, SCRIPT, index.with_suffix(""), out], capture_output=True, text=True)
    assert printed.stdout.splitlines()[-1].startswith(f"{head} with "), printed.stderr
    source = json.loads((folder / "bert_config.json").read_text())
    for tokenizer in (load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)):
        assert tokenizer.tokenize("My dogs") == pieces
        assert tokenizer.model_max_length == source["max_position_embeddings"]
    expected = {key: torch.from_numpy(values) for key, values in np.load(folder / "expected.npz").items()}
    batch = {ours: expected.pop(theirs).long() for ours, theirs in INPUT.items()}
    real = batch["attention_mask"].bool()
    for library in (bertkit, transformers):
        # That code computes GELU by tanh, which has another name in transformers.
        model, info = getattr(library, head).from_pretrained(out, hidden_act="gelu_new", output_loading_info=True)
        assert not any(info.values())
        config = model.config.to_dict() | {"hidden_act": source["hidden_act"]}
        assert {key: config[key] for key in source} == source
        assert config["architectures"] == [head]
        with torch.no_grad():
            outputs = model.eval()(**batch)
            if head == "BertForPreTraining":
                encoded = model.bert(**batch)
                outputs |= {"sequence_output": encoded.last_hidden_state, "pooled_output": encoded.pooler_output}
        for key, theirs in expected.items():
            ours = outputs[key]
            if ours.shape[:2] == real.shape:
                ours, theirs = ours[real], theirs[real]
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < 1e-5, key
            assert theirs.abs().max() > 0.1
