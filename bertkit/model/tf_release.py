"""Import a checkpoint in BERT's original TensorFlow format (github.com/google-research/bert), read by TensorFlow.

The release is a folder with `bert_config.json`, `vocab.txt` and TensorFlow's `bert_model.ckpt.index` and `.data-…`.

Left out: the optimizer's state, and TensorFlow 2's object-based checkpoints.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertTokenizerFast, PreTrainedModel

import bertkit
from bertkit.data.formats.line import read_json
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer
from bertkit.errors import UsageError, explain_disk_error, explain_missing, explain_refusal, join_lines
from bertkit.model.config import BertConfig
from bertkit.system.progress import Report, ignore

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


def import_checkpoint(source: Path, output: Path, *, cased: bool | None = None, report: Report = ignore) -> None:
    """Convert a TensorFlow checkpoint and its tokenizer to the form that transformers and this package load.

    A pre-trained model becomes `BertForPreTraining`, or `BertModel` if it has no head. A fine-tuned one becomes the
    class of the head that run_classifier.py or run_squad.py trained. All variables are used except those of the
    optimizer and of a pooler that the head does not read; every parameter is filled.

    Differs from the reference code: its GELU is the tanh approximation (transformers' `gelu_new`). The `gelu` of
    bert_config.json stays `gelu`, the exact one, as in every copy of these models on the Hub.

    Args:
        source: The folder, or one of its checkpoints, such as `folder/model.ckpt-1000`.
        output: A new or empty directory.
        cased: Whether upper case is kept; None: inferred from the vocabulary.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty directory; name another one")
    prefix = find_prefix(source.absolute())
    config_file = prefix.with_name("bert_config.json")
    values = {"type_vocab_size": 16, **read_json(config_file, dict[str, Any])}  # the reference code's default
    variables = read_variables(prefix)
    with explain_refusal(str(config_file)), torch.device("meta"):
        config = BertConfig.from_dict(values)
        if "output_weights" in variables:
            config.num_labels = len(variables["output_weights"])
        model = getattr(bertkit, choose_head(variables))(config)
    tokenizer = read_tokenizer(prefix.with_name("vocab.txt"), config, cased, report)
    fill(model, variables, prefix)
    report(f"{type(model).__name__} with {model.num_parameters():,} parameters, from {prefix.name}")
    if hasattr(model, "classifier"):
        report(f"its {config.num_labels} labels have no names; write them into id2label in config.json")
    with explain_refusal(f"the directory {output}"), explain_disk_error(output):
        output.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(output)
        save_tokenizer(tokenizer, output)
    report(f"In {output}: config.json, model.safetensors, vocab.txt and the tokenizer")


def find_prefix(source: Path) -> Path:
    """Return the prefix of the only checkpoint in a folder, or of the named one, without `.index`."""
    files = source.glob("*.index") if source.is_dir() else [source.with_name(f"{source.name}.index")]
    found = sorted(path for path in files if path.is_file())
    if len(found) != 1:
        names = f"several checkpoints ({', '.join(path.stem for path in found)})" if found else "no *.index"
        raise UsageError(f"{source} has {names}; name a checkpoint, such as {source / 'bert_model.ckpt'}")
    return found[0].with_suffix("")


def read_variables(prefix: Path) -> dict[str, np.ndarray]:
    """Return the variables of a checkpoint by name, in 32 bits, without those of the optimizer."""
    with explain_missing("import-tf needs TensorFlow", "tensorflow"):
        import tensorflow as tf
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if not OPTIMIZER.fullmatch(name)]
        return {name: reader.get_tensor(name).astype(np.float32) for name in names}
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError(f"{prefix} cannot be read ({join_lines(error)}); copy all its files again") from None


def choose_head(variables: dict[str, np.ndarray]) -> str:
    """Return the name of our class for the head that the variables belong to."""
    if "cls/squad/output_weights" in variables:
        return "BertForQuestionAnswering"
    if "output_weights" in variables:
        return "BertForSequenceClassification"
    return "BertForPreTraining" if any(name.startswith("cls/") for name in variables) else "BertModel"


def read_tokenizer(path: Path, config: BertConfig, cased: bool | None, report: Report) -> BertTokenizerFast:
    """Return the tokenizer of a vocabulary, inferring its case, which no file of the release states."""
    tokenizer = load_tokenizer(path, cased=cased, report=report)
    ids = tokenizer.get_vocab()
    if len(ids) > config.vocab_size:
        raise UsageError(f"{path} has {len(ids):,} tokens, but the model only {config.vocab_size:,}; use the model's")
    cased = not tokenizer.backend_tokenizer.normalizer.lowercase
    return make_tokenizer(sorted(ids, key=ids.__getitem__), cased=cased, max_length=config.max_position_embeddings)


def fill(model: PreTrainedModel, variables: dict[str, np.ndarray], prefix: Path) -> None:
    """Fill each parameter with its variable; none may be missing, left over, or of another shape."""
    weights, left = {}, variables.keys() - POOLER
    for parameter, _ in model.named_parameters():
        name = parameter if hasattr(model, "bert") else f"bert.{parameter}"
        for ours, theirs in VARIABLE_NAMES:
            name = name.replace(ours, theirs)
        if name not in variables:
            raise UsageError(f"{prefix} lacks {name}, which {type(model).__name__} needs; name another checkpoint")
        values = variables[name].T if name.endswith("/kernel") else variables[name]
        weights[parameter] = torch.from_numpy(np.ascontiguousarray(values))
        left.discard(name)
    if left:
        raise UsageError(f"{prefix} has {min(left)}, which {type(model).__name__} lacks; name another checkpoint")
    with explain_refusal(f"{prefix} with its bert_config.json"):
        model.load_state_dict(weights, strict=False, assign=True)  # not strict: tied weights have two names
    model.tie_weights()
