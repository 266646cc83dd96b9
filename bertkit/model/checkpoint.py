"""Load a configuration and a model from a checkpoint: a directory, or a name on the Hub, cached or not.

Weights are safetensors only. Parameters that a checkpoint lacks are initialised by `_init_weights`, and listed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig

from bertkit.errors import UsageError, as_usage_error, check_access, join_lines
from bertkit.model.config import BertConfig, check_attention
from bertkit.system.files import take_fingerprint
from bertkit.system.hub import check_checkpoint, explain_trouble, find_cached, find_file, split_revision

BERT_KEYS = {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "type_vocab_size"}
RENAMED = {
    r"^((module|_orig_mod|base_model\.model)\.)+": "",  # DataParallel, torch.compile and PEFT
    r"\._orig_mod\.": ".",  # a part that torch.compile had wrapped
    r"\.dense_act\.": ".dense.",  # a layer in NVIDIA's code, which has its activation inside
}
ENCODER = re.compile(r"(bert\.)?(embeddings|encoder)\.")
TRAINED = ("tau", "thresholds", "least_confidence", "redaction_threshold", "temperature")
TRAINED += ("text_columns", "text_words", "window_pooling")
ADAPTER = (
    "is an adapter of PEFT, not a whole model; merge it into its model first (merge_and_unload), save that with "
    "save_pretrained and give its directory"
)
RETURNED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


def check_weights(checkpoint: str) -> None:
    """Check that a checkpoint has complete files of weights in safetensors if it is a directory."""
    folder = Path(checkpoint)
    files = sorted(folder.glob("model*.safetensors"))
    for file in files:
        with as_usage_error(str(file)), safe_open(file, "pt"):
            pass
    if files or not folder.is_dir():
        return
    refuse_adapter(checkpoint)
    remedy = "; give a directory with a BERT checkpoint"
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        remedy = (
            f" but {pickles[0]}, a pickle, which can run any code; if you trust it, load it with transformers and "
            "save it again with save_pretrained"
        )
    raise UsageError(f"{checkpoint} has no weights in safetensors{remedy}")


def refuse_adapter(checkpoint: str) -> None:
    """Raise a UsageError that says what an adapter is, if the checkpoint is one."""
    if find_file(checkpoint, "adapter_config.json"):
        raise UsageError(f"{checkpoint} {ADAPTER}")


def trace_commit(checkpoint: str) -> dict[str, str]:
    """Return the name of a checkpoint on the Hub with its commit in the cache; empty for a path."""
    path = None if Path(checkpoint).exists() else find_cached(checkpoint, "config.json")
    return {split_revision(checkpoint)[0]: path.parent.name} if path else {}


def find_weights(checkpoint: str) -> str:
    """Return the folder on this disk with a checkpoint's weights, also in the Hub's cache, without asking the Hub."""
    if Path(checkpoint).exists():
        found = next(Path(checkpoint).glob("model*.safetensors"), None)
    else:
        with as_usage_error(f"the model {checkpoint}"):
            found = find_cached(checkpoint, "model.safetensors")
    if found is None:
        raise UsageError(
            f"the weights of {checkpoint} are not on this disk; name a folder that has some with --model, or download "
            "those of the Hub: hf download NAME config.json model.safetensors"
        )
    return str(found.parent)


def load_config(checkpoint: str) -> BertConfig:
    """Load the configuration of a checkpoint: a directory, or a name on the Hub, cached or not."""
    remedy = "give a directory with a BERT checkpoint"
    with as_usage_error(f"the model {checkpoint}"):
        check_access(checkpoint)
        if Path(checkpoint).exists() and not Path(checkpoint, "config.json").is_file():
            if Path(checkpoint, "recipe.toml").is_file():
                raise UsageError(f"the run in {checkpoint} is not finished; repeat the command that started it")
            refuse_adapter(checkpoint)
            is_study = Path(checkpoint, "study.json").is_file()
            trouble = "is a study; give one of its runs" if is_study else f"holds no config.json; {remedy}"
            raise UsageError(f"{checkpoint} {trouble}")
        check_checkpoint(checkpoint)
        is_lost = explain_trouble(checkpoint) is not None
        try:
            name, revision = split_revision(checkpoint)
            values, _ = PreTrainedConfig.get_config_dict(name, revision=revision, local_files_only=is_lost)
        except OSError:
            if not is_lost:
                refuse_adapter(checkpoint)
            raise
        except TypeError:  # raised by transformers if the JSON is not an object
            values = None
        try:
            kind, heads = values.get("model_type"), (values.get("architectures") or [])[:]  # a dict raises TypeError
            if all(name.startswith("Bert") for name in heads) and kind is None:
                # Those of 2018 and 2019 have no type. RoBERTa's have the same keys, but its weights other names.
                kind = "bert" if heads or values.keys() >= BERT_KEYS else None
            if kind is None:
                refuse_adapter(checkpoint)
                raise UsageError(
                    f"the config.json of {checkpoint} has no model_type; if the model is a BERT, add "
                    '"model_type": "bert"'
                )
            if kind != "bert":
                raise UsageError(f"{checkpoint} is a model of type {str(kind)[:40]!r}, not bert; {remedy}")
            return BertConfig.from_dict(values)
        except (AttributeError, LookupError, RecursionError, TypeError) as error:  # odd values
            trouble = join_lines(error)[:100]
            raise UsageError(f"the configuration of {checkpoint} is damaged ({trouble!r}); {remedy}") from None


def make_config(values: Mapping[str, Any]) -> BertConfig:
    """Return the BertConfig with these values."""
    with as_usage_error("[model]"):
        check_attention(values.get("attn_implementation"))
        return BertConfig(**values)


def load_model(head: type, checkpoint: str, settings: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Load a model in fp32 with the weights of a checkpoint.

    Labels are matched by name: a classifier for the same labels in another order is permuted. A classifier for other
    labels, or of another head if `settings` has no labels, is randomly initialised.

    Returns:
        The model, and the names of the weights that are randomly initialised.
    """
    # TRAINED belongs to the model that was trained with it, and class weights to a training run; the caller decides
    # what a model returns.
    weights, scale = settings.get("class_weights"), settings.get("target_scale")
    settings = {**dict.fromkeys(TRAINED), **RETURNED, **settings, "class_weights": None}
    settings.pop("target_scale", None)
    tokens, labels = settings.pop("vocab_size", 0), settings.pop("id2label", None)
    if labels is not None:  # a problem type belongs to the checkpoint's own labels
        settings.setdefault("problem_type", None)
    load_config(checkpoint)
    check_weights(checkpoint)
    with as_usage_error(f"the model {checkpoint} (in safetensors)"):
        check_attention(settings.get("attn_implementation"))
        name, revision = split_revision(checkpoint)
        model, info = head.from_pretrained(
            name,
            revision=revision,
            use_safetensors=True,
            dtype=torch.float32,
            local_files_only=explain_trouble(checkpoint) is not None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=RENAMED,
            **settings,
        )
    trained_as = model.config.architectures or [head.__name__]
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    wrong = {name for name in mismatched if not name.startswith(("classifier.", "bilstm.", "mix."))}
    wrong |= {name for name in info["missing_keys"] | info["unexpected_keys"] if ENCODER.match(name)}
    if any(".base_layer." in name for name in wrong):
        raise UsageError(f"{checkpoint} {ADAPTER}")
    if wrong:
        raise UsageError(
            f"{checkpoint} is damaged: its weights do not fit its configuration ({min(wrong)}); restore the "
            "config.json that belongs to it"
        )
    if tokens > (known := model.config.vocab_size):
        raise UsageError(
            f"the tokenizer has {tokens:,} tokens, but {checkpoint} only {known:,}; use the checkpoint's own vocabulary"
        )
    fold_targets(model)  # the checkpoint may be one inside a training
    new = set(info["missing_keys"]) | mismatched
    if labels is None and hasattr(model, "classifier") and trained_as != [head.__name__]:
        initialize(model, model.classifier)
        new |= {f"classifier.{name}" for name, _ in model.classifier.named_parameters()}
    if labels is not None:
        new |= adopt_labels(model, list(labels.values()), known="classifier.weight" not in new)
    if scale is not None:
        scale_targets(model, *scale, is_new="classifier.weight" in new)
    model.config.learned_scale = None  # the learned scale belongs to the checkpoint
    if weights is not None:
        with as_usage_error("class_weights"):
            model.config.class_weights = weights
            model.config.validate()
    return model, sorted(new)


def adopt_labels(model: nn.Module, labels: list[str], known: bool) -> set[str]:
    """Give the model a classifier for these labels in this order.

    Args:
        known: Whether the classifier comes from the checkpoint, with the labels of its configuration.

    Returns:
        The names of the classifier's weights if they are randomly initialised, else an empty set.
    """
    had = [str(model.config.id2label[index]) for index in range(model.config.num_labels)]
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: index for index, label in enumerate(labels)}
    wanted = labels
    if sorted(had) != sorted(wanted):  # compare without case; accepted below only if one to one
        had, wanted = ([label.lower() for label in names] for names in (had, labels))
    if known and sorted(had) == sorted(wanted) and len(set(had)) == len(had):
        order = [had.index(label) for label in wanted]
        for parameter in model.classifier.parameters():
            parameter.data = parameter.data[order]
        return set()
    model.classifier = nn.Linear(model.classifier.in_features, len(labels))
    model._init_weights(model.classifier)
    return {f"classifier.{name}" for name, _ in model.classifier.named_parameters()}


@torch.no_grad()
def scale_targets(model: nn.Module, mean: float, deviation: float, is_new: bool) -> None:
    """Make a regression's classifier compute deviations from the mean of the numbers that it will learn.

    Args:
        is_new: Whether it is randomly initialised. Otherwise what it has learned is brought to the new mean and
            deviation, or keeps its unit if those that it was trained on are unknown.
    """
    old_mean, old_deviation = model.config.learned_scale or (mean, deviation)
    model.config.target_scale = [mean, deviation]
    if not is_new:
        model.classifier.weight.div_(old_deviation)
        model.classifier.bias.sub_(old_mean).div_(old_deviation)


@torch.no_grad()
def fold_targets(model: nn.Module) -> None:
    """Make a regression's classifier compute the numbers themselves, as plain transformers reads it."""
    config = model.config
    if config.target_scale is None:
        return
    config.learned_scale, config.target_scale = config.target_scale, None
    if hasattr(model, "classifier"):
        mean, deviation = config.learned_scale
        model.classifier.weight.mul_(deviation)
        model.classifier.bias.mul_(deviation).add_(mean)


def fingerprint_weights(model: nn.Module) -> str:
    """Return the fingerprint of a model's weights: the CRC-32 of their bytes as eight hexadecimal digits."""
    values = (each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in model.parameters())
    return take_fingerprint(*(value.numpy() for value in values))


def reinitialize(model: nn.Module, count: int) -> None:
    """Reinitialise the pooler and the top `count` layers of the encoder at random (Zhang et al. 2021).

    A layer that computes the mean is not counted.
    """
    layers = list(model.base_model.encoder.layer)
    modules = layers[: len(layers) - bool(model.config.mean_layer)][-count:]
    if model.base_model.pooler is not None:
        modules.append(model.base_model.pooler)
    for module in modules:
        initialize(model, module)


def initialize(model: nn.Module, module: nn.Module) -> None:
    """Reinitialise the weights of a module of the model at random, as in a new model."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach()))  # transformers keeps those that it has loaded
    module.apply(model._init_weights)
