"""Convert a checkpoint of github.com/google-research/bert, with its tokenizer, to the form of transformers and bertkit.

    pip install tensorflow-cpu
    python recipes/pretrain/import_tf.py uncased_L-12_H-768_A-12/bert_model.ckpt bert-base-uncased

A release is a folder with `bert_config.json`, `vocab.txt` and TensorFlow's `bert_model.ckpt.index` and `.data-…`. A
pre-trained model becomes `BertForPreTraining`, or `BertModel` if it has no head. A fine-tuned one becomes the class of
the head that run_classifier.py or run_squad.py trained; a classifier's labels have no names, write them into id2label
in config.json. Every parameter is filled, and all variables are used except those of the optimizer and of a pooler that
the head does not read.

Differs from the reference code: its GELU is the tanh approximation (transformers' `gelu_new`). The `gelu` of
bert_config.json stays `gelu`, the exact one, as in every copy of these models on the Hub.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import tensorflow as tf
import torch

import bertkit
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer
from bertkit.model.config import BertConfig

# Parts of parameter names, ours and the release's, replaced in this order; a matrix named kernel is transposed there.
VARIABLE_NAMES = (
    ("encoder.layer.", "encoder.layer_"),
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("_embeddings.weight", "_embeddings"),
    ("cls.predictions.bias", "cls.predictions.output_bias"),
    ("cls.seq_relationship.", "cls.seq_relationship.output_"),
    ("classifier.", "output_"),
    ("qa_outputs.", "cls.squad.output_"),
    ("output_weight", "output_weights"),
    (".weight", ".kernel"),
    (".", "/"),
)
POOLER = {"bert/pooler/dense/kernel", "bert/pooler/dense/bias"}
# Variables of an optimizer: the reference code's, and TensorFlow's own Adam.
OPTIMIZER = re.compile(r"global_step|beta[12]_power|.+/(adam_[mv]|(Adam|AdamWeightDecayOptimizer)(_1)?)")


def choose_head(variables: dict[str, np.ndarray]) -> str:
    """Return the name of our class for the head that the variables belong to."""
    if "cls/squad/output_weights" in variables:
        return "BertForQuestionAnswering"
    if "output_weights" in variables:
        return "BertForSequenceClassification"
    return "BertForPreTraining" if any(name.startswith("cls/") for name in variables) else "BertModel"


def name_variable(parameter: str, head: str) -> str:
    """Return the release's name of a parameter."""
    name = f"bert.{parameter}" if head == "BertModel" else parameter
    for ours, theirs in VARIABLE_NAMES:
        name = name.replace(ours, theirs)
    return name


def main() -> None:
    """Convert the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint of google-research/bert.")
    parser.add_argument("checkpoint", type=Path, help="prefix of its files, such as FOLDER/bert_model.ckpt")
    parser.add_argument("output", type=Path, help="new directory")
    parser.add_argument("--cased", action=argparse.BooleanOptionalAction, help="default: as the vocabulary looks")
    given = parser.parse_args()
    if given.output.exists():
        parser.error(f"{given.output} exists; name another directory")
    folder = given.checkpoint.parent
    reader = tf.train.load_checkpoint(str(given.checkpoint))
    names = [name for name in reader.get_variable_to_shape_map() if not OPTIMIZER.fullmatch(name)]
    variables = {name: reader.get_tensor(name).astype(np.float32) for name in names}
    head = choose_head(variables)
    values = {"type_vocab_size": 16, **json.loads((folder / "bert_config.json").read_text())}  # 16: the code's default
    config = BertConfig.from_dict(values)
    if "output_weights" in variables:
        config.num_labels = len(variables["output_weights"])
    model = getattr(bertkit, head)(config)
    theirs = {name: name_variable(name, head) for name, _ in model.named_parameters()}
    wanted = set(theirs.values())
    if unlike := sorted(wanted - variables.keys()) + sorted(variables.keys() - wanted - POOLER):
        parser.error(f"{given.checkpoint} and {head} do not have the same variables: {', '.join(unlike[:9])}")
    weights = {}
    for name, variable in theirs.items():
        array = variables[variable].T if variable.endswith("/kernel") else variables[variable]
        weights[name] = torch.from_numpy(np.ascontiguousarray(array))
    model.load_state_dict(weights, strict=False)  # not strict, because tied weights have two names
    tokenizer = load_tokenizer(folder / "vocab.txt", cased=given.cased, report=print)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(given.output)
    save_tokenizer(tokenizer, given.output)
    print(f"{head} with {model.num_parameters():,} parameters in {given.output}")


if __name__ == "__main__":
    main()
