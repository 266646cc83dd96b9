"""Complete and check a recipe, and convert it to `TrainingArguments`."""

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from bertkit.errors import UsageError, explain_refusal
from bertkit.model import bilstm
from bertkit.model.checkpoint import check_sizes, load_config, make_config
from bertkit.model.optim import BERT_ADAM
from bertkit.model.precision import choose_precision
from bertkit.tasks.pretraining import list_phases
from bertkit.tasks.task import Task
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, check, list_lengths, merge, split_batch

CHECKPOINT_SIZES = (  # fixed by a checkpoint
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def complete(task: Task, *recipes: Mapping[str, Any], config: PreTrainedConfig | None = None) -> Recipe:
    """Return the complete, checked recipe of a run.

    Precedence: the paper's recipe < the preset < what given options imply < `recipes`.

    Args:
        config: Configuration of the checkpoint, if that does not exist yet.

    Raises:
        UsageError: A key is unknown, a type is wrong, or the recipe is for another task.
    """
    given = merge(*recipes)
    if given.get("task", task.name) != task.name:
        raise UsageError(
            f"the recipe is for the task {str(given['task'])[:40]!r}, not {task.name!r}; use the command of that task"
        )
    preset = task.stable if given.get("preset") == "stable" else {}
    implied = [changes for option, changes in task.implied.items() if given.get("data", {}).get(option)]
    recipe = check(merge(task.recipe, preset, *implied, given), data_defaults=task.recipe["data"])
    task.check(recipe)
    if recipe["train"].get("max_steps") == 0:
        raise UsageError("max_steps is 0 in [train]; it must be above 0, or -1 for num_train_epochs to decide")
    if recipe.get("patience") and recipe["train"].get("eval_strategy", "no") == "no":
        raise UsageError(
            f"patience is {recipe['patience']}, but nothing is evaluated during training; set eval_strategy in [train] "
            "to epoch or steps, or remove patience"
        )
    if any(len(segment) != 3 for segment in recipe.get("pace", [])):
        raise UsageError("each segment of pace is a first update, a share, and a share per update; give all three")
    check_model(task, recipe, config)
    return recipe


def check_model(task: Task, recipe: Recipe, config: PreTrainedConfig | None = None) -> None:
    """Check that the checkpoint exists and its sizes fit, and that texts are no longer than its positions.

    Raises:
        UsageError: One of these is not the case, or `[model]` or `reinit_layers` does not fit the task or the model.
    """
    if "class_weights" in recipe["model"]:  # by position; [data] has them by label
        raise UsageError("class_weights in [model] follow from the data; set class_weights in [data], or leave it out")
    if recipe.get("checkpoint"):
        if config is None:
            config = load_config(recipe["checkpoint"])
            if Path(recipe["checkpoint"]).is_dir():
                check_sizes(recipe["checkpoint"], config)
        if not task.metric:
            labels = task.configure(recipe, None, None)["id2label"].values()
            if {label.lower() for label in labels} != {str(label).lower() for label in config.id2label.values()}:
                raise UsageError(explain_missing_head(task, recipe, labels))
            if (name := name_head(task, recipe)) != (had := (config.architectures or [name])[0]):
                raise UsageError(
                    f"{recipe['checkpoint']} is a {had} but would be loaded as a {name}; add --set bilstm="
                    f"{str('BiLSTM' in had).lower()}"
                )
        given = {key: value for key, value in recipe["model"].items() if key in CHECKPOINT_SIZES}
        if other := [f"{key} {value}" for key, value in given.items() if value != getattr(config, key)]:
            raise UsageError(
                f"[model] sets {', '.join(other)}, but {recipe['checkpoint']} has other sizes; leave them out"
            )
    else:
        config = make_config(recipe["model"])
    own = {"feature_layers"} if recipe["data"].get("features") else {"feature_layers", "bilstm_hidden_size"}
    if unused := sorted(own & recipe["model"].keys()):
        raise UsageError(
            f"{unused[0]} in [model] belongs to the feature-based approach (bertkit ner --features LAYERS); "
            "leave it out"
        )
    if layers := recipe["data"].get("features"):
        with explain_refusal(f"features = {layers!r}"):
            bilstm.check_feature_layers(layers, config)
    if recipe["model"].get("attn_implementation") == "flex_attention":
        raise UsageError("flex_attention has no dropout, with which BERT is trained; use packed, sdpa or eager")
    longest = max(*list_lengths(recipe), recipe["data"].get("heldout_length", 0))
    if recipe.get("reinit_layers", 0) > config.num_hidden_layers:
        raise UsageError(
            f"reinit_layers is {recipe['reinit_layers']}, but the model has {config.num_hidden_layers} layers; lower it"
        )
    if longest > config.max_position_embeddings:
        raise UsageError(
            f"max_length {longest} exceeds the model's {config.max_position_embeddings} positions; lower it"
            + ("" if recipe.get("checkpoint") else " or raise max_position_embeddings in [model]")
        )


def make_arguments(task: Task, recipe: Recipe, output: Path) -> TrainingArguments:
    """Return TrainingArguments from `[train]` and the other keys of a recipe.

    Raises:
        UsageError: transformers rejects a value, a package is not installed, the batch cannot be divided, or one
            process would split the batches for the others (`dispatch_batches`).
    """
    train = dict(recipe["train"])
    per_device, accumulation = split_batch(
        recipe["batch_size"],
        processes=join_processes(recipe).num_processes,
        per_device=train.pop("per_device_train_batch_size", None),
    )
    precision = choose_precision(recipe["precision"])
    if (asked := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", precision):  # it would win
        raise UsageError(
            f"accelerate asks for {asked} (--mixed_precision, ACCELERATE_MIXED_PRECISION) and the recipe for "
            f"{precision}; remove --mixed_precision, and set precision in the recipe"
        )
    if train.get("optim") == BERT_ADAM:
        del train["optim"]  # bertkit's own, passed by `make_trainer`
    train.pop("save_total_limit", None)  # BertTrainer rotates: the Trainer deletes before the new one is complete
    defaults = {
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",  # only the first of several processes logs
        "logging_nan_inf_filter": False,  # it would hide a NaN loss
        "use_cpu": not torch.accelerator.is_available(),  # required for bf16 on a CPU
        "ddp_find_unused_parameters": False,  # a head uses all of its parameters
        "remove_unused_columns": False,  # all columns of a task are arguments of its head
        "per_device_eval_batch_size": max(per_device, 32),
    }
    if train.get("load_best_model_at_end") or train.get("save_strategy") == "best":  # otherwise the last one is kept
        defaults |= {"metric_for_best_model": task.metric, "greater_is_better": not task.lower_is_better}
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__ and "gradient_checkpointing" in train:
        train["activation_checkpointing"] = train.pop("gradient_checkpointing")  # its newer name
    with explain_refusal("[train]"):
        args = TrainingArguments(
            **defaults
            | train
            | {
                "output_dir": str(output),
                "per_device_train_batch_size": per_device,
                "gradient_accumulation_steps": accumulation,
                "bf16": precision == "bf16",
                "fp16": precision == "fp16",
            }
        )
        Trainer.get_optimizer_cls_and_kwargs(args)  # checks that its package is installed
        get_reporting_integration_callbacks(args.report_to)  # checks the names
        nobody = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(args.lr_scheduler_type, nobody, 0, 1, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
        context = args.dataloader_multiprocessing_context
        DataLoader([], num_workers=args.dataloader_num_workers, multiprocessing_context=context)
    usable = get_available_reporting_integrations() if args.report_to else []
    # These two are not listed everywhere that they are installed.
    if missing := [name for name in args.report_to if name not in (*usable, "azure_ml", "flyte")]:
        raise UsageError(
            f"report_to in [train] names {missing[0]}, which is not installed here; pip install {missing[0]}, or choose"
            f" from {', '.join(usable) or 'none'}"
        )
    if (mode := args.torch_compile_mode) and mode not in (modes := torch._inductor.list_mode_options()):
        raise UsageError(
            f"torch_compile_mode = {mode[:40]!r} in [train] is unknown; expected one of {', '.join(modes)}"
        )
    names, given = list_scores(task), (train.get("metric_for_best_model") or task.metric).removeprefix("eval_")
    if given not in names:
        raise UsageError(
            f"metric_for_best_model = {given[:40]!r} in [train] is not a score of {task.name}; expected "
            f"{', '.join(names) or 'none, because it has no labels'}"
        )
    if args.accelerator_config.dispatch_batches:
        raise UsageError("dispatch_batches in [train] would split token positions as if they were rows; leave it out")
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes (accelerate launch), never DataParallel
    return args


def set_updates(recipe: Recipe, updates: int) -> Recipe:
    """Return a recipe that ends after `updates` updates; the last of its phases becomes shorter or longer."""
    found = {**recipe, "train": recipe["train"] | {"max_steps": updates}}
    if not recipe.get("phase"):
        return found
    phases = list_phases(recipe)
    ends = np.cumsum([phase.samples // recipe["batch_size"] for phase in phases])[:-1].tolist()
    bounds = pairwise([0, *(min(end, updates) for end in ends), updates])
    shares = [((stop - start) / updates, phase) for phase, (start, stop) in zip(phases, bounds, strict=True)]
    return found | {"phase": [{"share": share, "max_length": phase.max_length} for share, phase in shares if share > 0]}


def list_scores(task: Task) -> list[str]:
    """Return the names of the scores of the first split, which is evaluated during training."""
    names = dict.fromkeys([task.metric, *(row.key for row in task.table)])
    others = [pattern for pattern in task.splits.values() if pattern != "{}"]
    return [name for name in names if name not in {pattern.format(key) for pattern in others for key in names}]


def name_head(task: Task, recipe: Recipe) -> str:
    """Return the name of the class to train: the task's head, or its variant with a BiLSTM."""
    name = task.head
    for option, heads in task.heads.items():
        name = heads.get(recipe["data"][option], name)
    return name.replace("BertFor", "BertBiLSTMFor") if recipe.get("bilstm") else name


def explain_missing_head(task: Task, recipe: Recipe, labels: Iterable[str]) -> str:
    """Return the error message for a model without a head for a task that has no training data."""
    return (
        f"{task.name} has no training data: a fine-tuned model predicts it, but {recipe['checkpoint']} has no head for "
        f"the labels {', '.join(labels)}; give a run that has one with --model RUN"
    )
