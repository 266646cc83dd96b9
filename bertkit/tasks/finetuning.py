"""What all fine-tuning tasks share: the recipe's common part (paper A.3), its checks, the checkpoint's tokenizer."""

from collections.abc import Mapping
from typing import Any

from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.system.progress import Report

DIVERGED = "the model answers with NaN: training has diverged; lower train.learning_rate"

FINETUNING_RECIPE = {
    "checkpoint": "google-bert/bert-base-uncased",
    "precision": "auto",
    "preset": "paper",
    "model": {},
}
TRAIN = {  # A.3: as in pre-training, but for batch size, learning rate and epochs, which are the task's
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,  # a share of all updates
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "optim": "bert_adam",
    "save_total_limit": 1,
    "logging_steps": 0.01,  # a share of all updates
    "seed": 42,
}
# Mosbach et al. 2021: bias correction and more epochs, against runs that never leave the majority class.
STABLE = {"train": {"optim": "adamw_torch", "num_train_epochs": 20.0, "learning_rate": 2e-5}}


def check_recipe(name: str, recipe: Mapping[str, Any], least: Mapping[str, int], start: str = "a BERT") -> None:
    """Nothing.

    Args:
        name: the task's.
        least: option of `[data]` -> the least it can be.
        start: what the task starts from.

    Raises:
        UsageError: nothing to start from, options of other tasks, or a number out of its range.
    """
    if not recipe.get("checkpoint"):
        raise UsageError(f"{name} needs {start}; name one with --model")
    if recipe.get("freeze") and recipe.get("reinit_layers"):
        raise UsageError("freeze would leave the layers of reinit_layers as they are drawn; leave one of the two out")
    if recipe.get("phase"):
        raise UsageError(f"[[phase]] is for pretraining; leave it out of a recipe for {name}")
    for key, bound in least.items():
        if recipe["data"][key] < bound:
            raise UsageError(f"{key} is {recipe['data'][key]} in [data]; it must be at least {bound}")
    if recipe["train"].get("max_steps", -1) <= 0 and recipe["train"]["num_train_epochs"] <= 0:
        raise UsageError(f"num_train_epochs is {recipe['train']['num_train_epochs']:g} in [train]; it must be above 0")


def tokenize(recipe: Mapping[str, Any], examples: Mapping[str, Any], report: Report) -> Any:
    """The checkpoint's tokenizer."""
    return load_tokenizer(recipe["checkpoint"])
