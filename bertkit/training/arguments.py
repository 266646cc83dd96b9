"""Convert a recipe to `TrainingArguments`."""

import os
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from bertkit.errors import UsageError, as_usage_error
from bertkit.model.optim import BERT_ADAM
from bertkit.model.precision import choose_precision
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, split_batch

EVALUATED, EVALUATED_ON_GPU = 32, 512  # the fewest sequences of a batch in evaluation


def make_arguments(recipe: Recipe, output: Path) -> TrainingArguments:
    """Return TrainingArguments from `[train]` and the other keys of a recipe."""
    task, train = TASKS[recipe.task], dict(recipe.train)
    per_device, accumulation = split_batch(
        recipe.batch_size,
        processes=join_processes(recipe).num_processes,
        per_device=train.pop("per_device_train_batch_size", None),
    )
    # `max_tokens` divides batches of evaluation too, except where a recipe says the sequences of a part.
    is_bounded = "per_device_train_batch_size" not in recipe.train
    evaluated = EVALUATED_ON_GPU if is_bounded and torch.cuda.is_available() else EVALUATED
    precision = choose_precision(recipe.precision)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # accelerate launch sets it, and it would win over the recipe
    if train.get("optim") == BERT_ADAM:
        del train["optim"]  # an optimizer of bertkit, passed by `make_trainer`
    train.pop("save_total_limit", None)  # BertTrainer rotates: the Trainer deletes before the new one is complete
    defaults = {
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",  # only the first of several processes logs
        "logging_nan_inf_filter": False,  # the filter would hide a NaN loss
        "use_cpu": not torch.accelerator.is_available(),  # required for bf16 on a CPU
        "ddp_find_unused_parameters": False,  # a head uses all of its parameters
        "remove_unused_columns": False,  # all columns of a task are arguments of its head
        "per_device_eval_batch_size": max(per_device, evaluated),
    }
    if (
        train.get("load_best_model_at_end") or train.get("save_strategy") == "best"
    ):  # the last checkpoint is kept unless the best one is asked for
        defaults |= {"metric_for_best_model": task.metric, "greater_is_better": not task.lower_is_better}
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__ and "gradient_checkpointing" in train:
        train["activation_checkpointing"] = train.pop("gradient_checkpointing")  # transformers' newer name
    with as_usage_error("[train]"):
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
        nobody = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(args.lr_scheduler_type, nobody, 0, 1, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
    names, given = list_scores(task), (train.get("metric_for_best_model") or task.metric).removeprefix("eval_")
    if given not in names:
        raise UsageError(
            f"metric_for_best_model = {given[:40]!r} in [train] is not a score of {task.name}; expected "
            f"{', '.join(names) or 'none, because it has no labels'}"
        )
    if args.accelerator_config.dispatch_batches:
        raise UsageError("dispatch_batches in [train] would split token positions as if they were rows; leave it out")
    return args


def list_scores(task: Task) -> list[str]:
    """Return the names of the scores of the first split, which is evaluated during training."""
    names = dict.fromkeys([task.metric, *(row.key for row in task.table)])
    others = [pattern for pattern in task.splits.values() if pattern != "{}"]
    return [name for name in names if name not in {pattern.format(key) for pattern in others for key in names}]
