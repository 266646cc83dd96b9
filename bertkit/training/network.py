"""The network that a recipe asks for: whether it fits the checkpoint and the texts, and its head, loaded."""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

import bertkit
from bertkit.errors import UsageError, as_usage_error
from bertkit.model import bilstm
from bertkit.model.checkpoint import check_weights, load_config, load_model, make_config, reinitialize
from bertkit.system.hub import CARD, find_file
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import Task
from bertkit.training.recipe import resolve

if TYPE_CHECKING:
    from bertkit.training.recipe import Recipe

CHECKPOINT_SIZES = (  # fixed by a checkpoint
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)

# Tokens x layers x hidden units of a run, above which compiling its layers is paid back on an H200: each saves 116 of
# 262 bytes of element-wise passes at 80 % of 4.8 TB/s (by the arithmetic in recipes/notebook/speed.md), and compiling
# takes 60 s. With BERT-base and 256 x 128 tokens, all of them real, these are 6,600 updates. Both are assumed.
PAID_BACK = 2e12


def fit_model(task: Task, recipe: "Recipe", config: PreTrainedConfig | None = None) -> "Recipe":
    """Return the recipe with lengths that fit the model, where nobody gave some."""
    if recipe.checkpoint:
        if config is None:
            config = load_config(recipe.checkpoint)
            check_weights(recipe.checkpoint)
        if not task.metric:
            labels = task.configure(recipe, None, None)["id2label"].values()
            if {label.lower() for label in labels} != {str(label).lower() for label in config.id2label.values()}:
                raise UsageError(explain_missing_head(task, recipe, labels))
        given = {key: value for key, value in recipe.model.items() if key in CHECKPOINT_SIZES}
        if other := [f"{key} {value}" for key, value in given.items() if value != getattr(config, key)]:
            raise UsageError(
                f"[model] sets {', '.join(other)}, but {recipe.checkpoint} has other sizes; leave them out"
            )
    else:
        config = make_config(recipe.model)
    if layers := recipe.data.get("features"):
        with as_usage_error(f"features = {layers!r}"):
            bilstm.select_layers(layers, config.num_hidden_layers)
    if recipe.model.get("attn_implementation") == "flex_attention":
        raise UsageError("flex_attention has no dropout, with which BERT is trained; use packed, sdpa or eager")
    recipe = fit_lengths(task, recipe, config.max_position_embeddings)
    longest = max(*recipe.lengths, recipe.data.get("heldout_length", 0))
    if longest > config.max_position_embeddings:
        raise UsageError(
            f"max_length {longest} exceeds the model's {config.max_position_embeddings} positions; lower it"
            + ("" if recipe.checkpoint else " or raise max_position_embeddings in [model]")
        )
    return recipe


def fit_lengths(task: Task, recipe: "Recipe", positions: int) -> "Recipe":
    """Return the recipe with a `max_length` of at most the model's positions if nobody gave one."""
    data, given = recipe.data, recipe.given.get("data", {})
    if recipe.phase or "max_length" in given or data.get("max_length", 0) <= positions:
        return recipe
    lengths = {"max_length": positions}
    if "max_query_length" in data and "max_query_length" not in given:
        lengths["max_query_length"] = min(data["max_query_length"], positions // 2)  # as in predictions
    recipe = resolve(recipe, lengths)
    task.check(recipe)
    return recipe


def count_positions(recipe: "Recipe") -> int:
    """Return how many tokens the model of a recipe can read at once."""
    config = load_config(recipe.checkpoint) if recipe.checkpoint else make_config(recipe.model)
    return config.max_position_embeddings


def name_head(task: Task, recipe: "Recipe") -> str:
    """Return the name of the class to train: the task's head, or another one that the recipe asks for."""
    name = task.head
    for option, heads in task.heads.items():
        name = heads.get(recipe.data[option], name)
    return name.replace("BertFor", "BertBiLSTMFor") if recipe.bilstm else name


def make_model(task: Task, recipe: "Recipe", settings: Mapping[str, Any], report: Report = ignore) -> nn.Module:
    """Return the task's head, loaded from the recipe's checkpoint or with random initialisation; see `load_head`."""
    return load_head(task, recipe, settings, report)[0]


def load_head(
    task: Task, recipe: "Recipe", settings: Mapping[str, Any], report: Report = ignore
) -> tuple[nn.Module, list[str]]:
    """Return the task's head, and the names of the weights that its checkpoint lacks.

    Args:
        settings: Values of BertConfig that depend on the data.
    """
    head = getattr(bertkit, name_head(task, recipe))
    if not recipe.checkpoint:
        with as_usage_error("[model]"):
            return head(make_config(recipe.model | settings)), []
    model, new = load_model(head, recipe.checkpoint, recipe.model | settings)
    with suppress(UsageError):
        find_file(recipe.checkpoint, CARD)  # into the cache: the card of this run repeats its licence
    if new and not task.metric:
        raise UsageError(explain_missing_head(task, recipe, settings["id2label"].values()))
    if recipe.starts_solved and any("pooler" in name for name in new):
        model.bert.pooler.pass_through()
    pooling = recipe.data.get("pooling")
    if pooling == "mean" and not model.config.mean_layer:
        model.bert.add_mean_layer()
        new = [*new, "bert.pooler.dense.weight"]
    if pooling == "cls" and model.config.mean_layer:
        raise UsageError(f"pooling is cls, but the last layer of {recipe.checkpoint} computes the mean; leave it out")
    if new and not recipe.starts_solved:
        lacking = f"{recipe.checkpoint} has no weights of this name and shape"
        report(f"randomly initialised, because {lacking}: {', '.join(new)}")
    if recipe.reinit_layers:
        reinitialize(model, recipe.reinit_layers)
        report(f"randomly initialised: the pooler and the top {recipe.reinit_layers} layers (reinit_layers)")
    if recipe.freeze or model.is_frozen:  # loading does not freeze the encoder
        model.freeze_encoder()
    return model, new


def explain_missing_head(task: Task, recipe: "Recipe", labels: Iterable[str]) -> str:
    """Return the error message for a model without a head for a task that has no training data."""
    return (
        f"{task.name} has no training data: a fine-tuned model predicts it, but {recipe.checkpoint} has no head for "
        f"the labels {', '.join(labels)}; give a run that has one with --model RUN"
    )


def compile_if_long(
    recipe: "Recipe", args: TrainingArguments, model: nn.Module, updates: int, report: Report = ignore
) -> None:
    """Compile the layers of a model whose training is long, in one process on CUDA.

    `torch_compile` in `[train]` decides if it is there: true is the Trainer's, which compiles the whole model.
    """
    if "torch_compile" in recipe.train or args.torch_compile or recipe.train.get("gradient_checkpointing"):
        return
    if args.device.type != "cuda" or args.world_size > 1:
        return
    if find_spec("triton") is None or not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return  # torch compiles for CUDA with these
    tokens = updates * recipe.batch_size * min(recipe.lengths)
    if tokens * model.config.num_hidden_layers * model.config.hidden_size >= PAID_BACK:
        report("the layers are compiled, which takes about a minute; torch_compile=false in [train] never does")
        compile_layers(model)


def compile_layers(model: nn.Module) -> None:
    """Compile each layer in place, so that one pass does a projection's dropout, residual sum and LayerNorm.

    In training all layers share two graphs, one for all states and one for those that a head reads, whose sizes are
    variable.
    Parameters keep their names.
    """
    for layer in model.bert.encoder.layer:
        layer.compile(dynamic=True)
