"""Writes the checkpoints of ../test_tf_release.py with TensorFlow and the paper's own code, google-research/bert.

    git clone https://github.com/google-research/bert BERT
    pip install tensorflow-cpu            # 2.21.0 wrote what is here
    python tests/model/tensorflow/make.py BERT

That code is of TensorFlow 1; tf.layers.dense and tf.contrib.layers.layer_norm, which TensorFlow 2 lacks, are here.
Each folder gets a tiny random BERT in the form of the release, and `expected.npz`: an input and what the code gives for
it. One optimizer step has been made, so that the optimizer's variables are there and are not zero.
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow.compat.v1 as tf

HERE = Path(__file__).parent
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "my", "dog", "##s", "hairy"]
SIZES = {  # all sizes of a model differ, so that a misplaced variable does not fit
    "uncased_pretraining": {"layers": 2, "hidden": 16, "heads": 2, "inner": 24, "positions": 20, "words": WORDS},
    "cased_classifier": {"layers": 1, "hidden": 12, "heads": 3, "inner": 20, "positions": 18, "words": [*WORDS, "Dog"]},
    "uncased_squad": {"layers": 3, "hidden": 8, "heads": 1, "inner": 12, "positions": 14, "words": WORDS},
}
LENGTHS = (11, 7)  # of the sequences of the input


def dense(inputs, units, activation=None, name="dense", kernel_initializer=None):
    """tf.layers.dense of two dimensions."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [inputs.shape.as_list()[-1], units], initializer=kernel_initializer)
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    outputs = tf.nn.bias_add(tf.matmul(inputs, kernel), bias)
    return outputs if activation is None else activation(outputs)


def layer_norm(inputs, begin_norm_axis, begin_params_axis, scope):
    """tf.contrib.layers.layer_norm of the last dimension."""
    with tf.variable_scope(scope or "LayerNorm"):
        beta = tf.get_variable("beta", inputs.shape.as_list()[-1:], initializer=tf.zeros_initializer())
        gamma = tf.get_variable("gamma", inputs.shape.as_list()[-1:], initializer=tf.ones_initializer())
    mean, variance = tf.nn.moments(inputs, [-1], keep_dims=True)
    return tf.nn.batch_normalization(inputs, mean, variance, offset=beta, scale=gamma, variance_epsilon=1e-12)


def import_reference(folder: str) -> SimpleNamespace:
    """The modules of google-research/bert, as under TensorFlow 1."""
    tf.disable_v2_behavior()
    tf.layers = SimpleNamespace(dense=dense)
    tf.contrib = SimpleNamespace(layers=SimpleNamespace(layer_norm=layer_norm))
    tf.flags = MagicMock()  # its scripts define the same ones
    sys.modules["tensorflow"] = tf
    sys.path.insert(0, folder)
    import modeling
    import optimization
    import run_classifier
    import run_pretraining
    import run_squad

    return SimpleNamespace(
        modeling=modeling,
        optimization=optimization,
        pretraining=run_pretraining,
        classifier=run_classifier,
        squad=run_squad,
    )


def make_config(layers: int, hidden: int, heads: int, inner: int, positions: int, words: list[str]) -> dict:
    """bert_config.json, with the keys of the released ones."""
    return {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "type_vocab_size": 2,
        "vocab_size": len(words),
    }


def make_input(vocabulary: int) -> dict[str, np.ndarray]:
    """Two sequences of random tokens in two segments, the second one padded."""
    columns, lengths = np.arange(max(LENGTHS)), np.array(LENGTHS)[:, None]
    mask = (columns < lengths).astype(np.int32)
    ids = np.random.default_rng(1).integers(1, vocabulary, mask.shape).astype(np.int32) * mask
    return {"input_ids": ids, "input_mask": mask, "segment_ids": (columns >= lengths // 2).astype(np.int32) * mask}


def build_pretraining(code: SimpleNamespace, config, given: dict) -> tuple:
    """The loss of pre-training, and the outputs by name."""
    model = code.modeling.BertModel(config, False, given["input_ids"], given["input_mask"], given["segment_ids"])
    shape = given["input_ids"].shape.as_list()
    positions = tf.constant(np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)))
    tokens, _, token_scores = code.pretraining.get_masked_lm_output(
        config,
        model.get_sequence_output(),
        model.get_embedding_table(),
        positions,
        given["input_ids"],
        tf.cast(given["input_mask"], tf.float32),
    )
    sentences, _, sentence_scores = code.pretraining.get_next_sentence_output(
        config, model.get_pooled_output(), tf.constant([0, 1])
    )
    outputs = {
        "sequence_output": model.get_sequence_output(),
        "pooled_output": model.get_pooled_output(),
        "prediction_logits": tf.reshape(token_scores.op.inputs[0], [*shape, -1]),  # under the log-softmax
        "seq_relationship_logits": sentence_scores.op.inputs[0],
    }
    return tokens + sentences, outputs


def build_classifier(code: SimpleNamespace, config, given: dict) -> tuple:
    """The loss of run_classifier.py with three labels, and the outputs by name."""
    loss, _, logits, _ = code.classifier.create_model(
        config,
        False,
        given["input_ids"],
        given["input_mask"],
        given["segment_ids"],
        labels=tf.constant([2, 0]),
        num_labels=3,
        use_one_hot_embeddings=False,
    )
    return loss, {"logits": logits}


def build_squad(code: SimpleNamespace, config, given: dict) -> tuple:
    """A loss of run_squad.py, and the outputs by name."""
    starts, ends = code.squad.create_model(
        config, False, given["input_ids"], given["input_mask"], given["segment_ids"], use_one_hot_embeddings=False
    )
    loss = tf.reduce_mean(tf.square(starts - 1.0)) + tf.reduce_mean(tf.square(ends))
    return loss, {"start_logits": starts, "end_logits": ends}


def write(code: SimpleNamespace, name: str, checkpoint: str, build: Callable, parts: int) -> None:
    """One folder: bert_config.json, vocab.txt, the checkpoint in `parts` files, expected.npz."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = make_config(**SIZES[name])
    (folder / "bert_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in SIZES[name]["words"]), encoding="utf-8")
    given = make_input(config["vocab_size"])

    def place(operation) -> str:
        number = zlib.crc32(operation.name.encode()) % parts if operation.type == "VariableV2" else 0
        return f"/cpu:{number}"

    with tf.Graph().as_default(), tf.device(place):
        inputs = {key: tf.constant(value) for key, value in given.items()}
        loss, outputs = build(code, code.modeling.BertConfig.from_dict(config), inputs)
        step = code.optimization.create_optimizer(loss, 1e-3, 10, 0, use_tpu=False)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": parts})) as session:
            session.run(tf.global_variables_initializer())
            for variable in tf.trainable_variables():
                middle = 1.0 if variable.op.name.endswith("gamma") else 0.0
                variable.load(random.normal(middle, 0.2, variable.shape.as_list()).astype(np.float32), session)
            session.run(step)
            np.savez(folder / "expected.npz", **given, **session.run(outputs))
            saver = tf.train.Saver(sharded=parts > 1)
            saver.save(session, str(folder / checkpoint), write_meta_graph=False, write_state=False)


if __name__ == "__main__":
    reference = import_reference(sys.argv[1])
    write(reference, "uncased_pretraining", "bert_model.ckpt", build_pretraining, parts=2)
    write(reference, "cased_classifier", "model.ckpt-1", build_classifier, parts=1)
    write(reference, "uncased_squad", "model.ckpt-1", build_squad, parts=1)
