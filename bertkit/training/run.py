"""Run one task: from a recipe to a directory with model, tokenizer, scores and everything needed to repeat it.

It is the same for every task, and with `trainer.py`, `arguments.py` and `costs.py` the only place that touches the
Trainer. The Trainer does the loop, precision, clipping, accumulation, several processes and checkpoints. bertkit adds
the division of an update into parts that fit into memory, the division of losses (over the whole update, not a part),
their logging (`trainer.py`), and the run directory (`run_dir.py`).

Where the last batch of an epoch does not divide among several processes, accelerate fills it with repeated sequences to
keep the processes in step.

Differs from the paper: the learning rate decays linearly from its peak at the end of the warm-up (transformers'
"linear"), where the reference code multiplies the warm-up's end by 1 - step / total.
"""

import math
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments, set_seed

from bertkit.errors import as_usage_error, explain_disk_error
from bertkit.model.checkpoint import (
    fingerprint_weights,
    fold_targets,
    trace_commit,
)
from bertkit.model.optim import BERT_ADAM, BertAdam
from bertkit.model.precision import choose_precision
from bertkit.reports.tables import OWN_DATA, name_limits
from bertkit.system.files import atomic_write, hold_directory
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.finetuning import BEST_BASELINE, IS_LEARNED, KEPT, LOSS_FALLS, SEARCHED, SOLVED
from bertkit.tasks.task import CHOSEN_ON_DEV, TUNE, Task
from bertkit.training.arguments import make_arguments
from bertkit.training.baselines import Baseline, fit_baselines, score_baselines, show_baseline
from bertkit.training.callbacks import PredictionProgress, Progress, StopAfter, StopOnSignal
from bertkit.training.facts import MOST_SOLVED, settle
from bertkit.training.network import compile_if_long, make_model
from bertkit.training.outputs import find_better, is_falling, is_learned, save_best, write_results
from bertkit.training.parts import collate_parts
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import explain_lost_process, join_processes
from bertkit.training.recipe import Recipe, list_settled, load_recipe, make_first, resolve, save_recipe
from bertkit.training.run_dir import (
    BEST,
    CALIBRATION_FILE,
    FIRST,
    METRICS_FILE,
    RECIPE_FILE,
    SEARCH,
    START,
    find_checkpoint,
    find_finished,
    has_begun,
    list_checkpoints,
    start_directory,
    write_environment,
)
from bertkit.training.scoring import score_splits
from bertkit.training.start import BeforeTraining, keep_better, read_start, save_start
from bertkit.training.trainer import BertTrainer, explain_shortage, train

PAUSE = 120.0  # seconds: a fifth of ten minutes, in which a training that starts solved writes five checkpoints


def run(
    recipe: Recipe,
    *,
    output: str | Path,
    report: Report = ignore,
    progress: Progress = ignore,
    prepared: "Prepared | None" = None,
    milestones: Collection[int] = (),
    stop: StopAfter | None = None,
) -> dict[str, Any]:
    """Train by a recipe and return the scores, as written to `output/metrics.json`; a finished run is not repeated.

    All possible checks come first; nothing is written before the data are read and the vocabulary exists.

    Args:
        output: The run directory: new, empty, or of the same run, which then continues.
        report: Called with a line of text now and then.
        progress: Called after every logged update.
        prepared: The data, if `prepare` has already made them for a recipe of the same `name_examples`.
        milestones: Updates whose checkpoints are kept, whatever the save settings in `[train]`.
        stop: It may end the training before its schedule; the recipe in the directory then gets `stop_after`.

    Raises:
        Interrupted: SIGTERM or SIGINT was received; a checkpoint was saved.
        ProcessLost: One of several processes has ended.
    """
    task, output = TASKS[recipe.task], Path(os.path.expanduser(output))  # as TrainingArguments does
    processes = join_processes(recipe)
    args = make_arguments(recipe, output)
    report = report if processes.is_main_process else ignore
    if (finished := find_finished(output, recipe)) is not None:
        report(f"{output} is finished; its scores are in {output / METRICS_FILE}")
        return finished
    if has_begun(output):  # nothing is decided again
        recipe = resolve(recipe, list_settled(load_recipe(output / RECIPE_FILE)))

    held = hold_directory(output) if processes.is_main_process else nullcontext()
    shortage = explain_shortage(args, lambda: recipe)  # below it gets its `max_tokens`
    with explain_disk_error(output), shortage, explain_lost_process(processes.num_processes), held:
        set_seed(args.seed)
        checkpoint = find_checkpoint(output, report)
        if prepared is None:
            prepared = prepare(recipe, report, output, goes_on=checkpoint is not None)
        else:
            processes.wait_for_everyone()  # all check the directory before the first one writes to it
            if processes.is_main_process:
                start_directory(output, recipe, prepared.tokenizer)
        first = train_first(recipe, output, report, progress)
        recipe, model = settle(task, recipe, first, prepared, checkpoint is not None, args.device, report)
        args = make_arguments(recipe, output)
        baselines = fit_baselines(task, recipe, prepared, report) if processes.is_main_process else {}
        if processes.is_main_process:
            save_recipe(recipe.to_dict(), output / RECIPE_FILE)
            weights = fingerprint_weights(model)
            commits = {**trace_commit(recipe.checkpoint), **prepared.commits}
            write_environment(output, prepared.fingerprints, weights, commits, goes_on=checkpoint is not None)
        stop = stop or StopAfter(recipe.stop_after)
        trainer = make_trainer(task, model, args, prepared.data, recipe, progress, report, milestones, [stop])
        parameters = f"{model.num_parameters():,} parameters"
        if "train" in prepared.data and recipe.is_solved:
            fold_targets(model)
        elif "train" in prepared.data:
            report(f"{parameters}; {describe_training(args, recipe, prepared.data['train'])}")
            compile_if_long(recipe, args, model, count_updates(args, recipe, len(prepared.data["train"])), report)
            if recipe.starts_solved and not trainer.is_fsdp_enabled:  # FSDP shards the model
                save = partial(save_start, task, trainer, prepared, output)
                trainer.add_callback(BeforeTraining(save))
            train(trainer, checkpoint, report)
            fold_targets(model)
            if stop.update != recipe.stop_after:
                recipe = resolve(recipe, {"stop_after": stop.update})
                if processes.is_main_process:
                    save_recipe(recipe.to_dict(), output / RECIPE_FILE)
        else:
            report(f"{parameters}; nothing to train, only to predict")
        return finish(task, recipe, trainer, prepared, output, report, baselines)


def train_first(recipe: Recipe, output: Path, report: Report, progress: Progress) -> str:
    """Run the training that comes before this one, if any, and return its directory.

    It is a separate run in `output/first`, and is not repeated if it is finished.
    """
    if (earlier := make_first(recipe)) is None:
        return ""
    report(f"first, in {output / FIRST}:")
    run(earlier, output=output / FIRST, report=report, progress=progress)
    report("then:")
    return str(output / FIRST)


def count_updates(args: TrainingArguments, recipe: Recipe, rows: int) -> int:
    """Return the updates of a training on this many rows."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(math.ceil(rows / recipe.batch_size) * args.num_train_epochs)


def describe_training(args: TrainingArguments, recipe: Recipe, data: Any) -> str:
    """Return one line with updates, sequences per update and their division, and precision."""
    steps, precision = count_updates(args, recipe, len(data)), choose_precision(recipe.precision)
    late = "" if args.get_warmup_steps(steps) < steps else "; warm-up is longer, so the learning rate never peaks"
    cut = f"{args.world_size} x {args.gradient_accumulation_steps} x {args.per_device_train_batch_size}"
    return f"{steps:,} updates of {recipe.batch_size} sequences ({cut}), {precision}{late}"


def dry_run(recipe: Recipe, output: str | Path) -> dict[str, Any]:
    """Return a recipe and the sizes that follow, without reading data or writing files."""
    task, args = TASKS[recipe.task], make_arguments(recipe, Path(output))
    plan: dict[str, Any] = {"recipe": recipe, "output": str(output)}
    if not recipe.checkpoint:
        with torch.device("meta"):
            plan["parameters"] = make_model(task, recipe, task.configure(recipe, None, None)).num_parameters()
    plan["sequences_per_update"] = recipe.batch_size
    plan["per_device_batch"] = args.per_device_train_batch_size
    plan["accumulation"] = args.gradient_accumulation_steps
    plan["precision"] = choose_precision(recipe.precision)
    if args.max_steps > 0:
        plan["updates"] = args.max_steps
    if make_first(recipe) is not None:
        plan["before"] = f"another training run, in {Path(output) / FIRST}"
    return plan


# --- Training ---------------------------------------------------------------------------------------------------------


def make_trainer(
    task: Task,
    model: nn.Module,
    args: TrainingArguments,
    data: Mapping[str, Any],
    recipe: Recipe,
    progress: Progress,
    report: Report,
    milestones: Collection[int] = (),
    callbacks: Collection[TrainerCallback] = (),
) -> BertTrainer:
    """Return the Trainer of a run; training reports to `progress`, prediction to `report`, instead of printing."""
    optimizer = None
    if recipe.train.get("optim") == BERT_ADAM:
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = (BertAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
    dev = data.get(TUNE, data.get(next(iter(task.splits), "")))
    most = recipe.data["max_tokens"]
    is_unwatched = recipe.preset == "auto" and recipe.train.get("eval_strategy") == "no"
    planned = recipe.given.get("train", {}).keys() & {"save_steps", "save_strategy", "load_best_model_at_end"}
    with as_usage_error("[train]"):
        trainer = BertTrainer(
            model=model,
            args=args,
            task=task,
            keep=recipe.train.get("save_total_limit", 0),
            milestones=milestones,
            pause=PAUSE if is_unwatched and not planned else 0.0,
            patience=recipe.patience,
            max_tokens=(most, 0 if "per_device_eval_batch_size" in recipe.train else most),
            train_dataset=data.get("train"),
            eval_dataset=dev,
            data_collator=partial(collate_parts, type(model)),
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[StopOnSignal(Path(args.output_dir), progress), PredictionProgress(report), *callbacks],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    task: Task,
    recipe: Recipe,
    trainer: BertTrainer,
    prepared: Prepared,
    output: Path,
    report: Report,
    baselines: Mapping[str, Baseline],
) -> dict[str, Any]:
    """Score and save a trained model, and return its scores; the first process writes the rest of the directory."""
    trainer.compute_metrics = None  # each split has its own labels
    answers: dict[int, np.ndarray] = {}  # answers of the splits that are predicted already

    def predict(data: Any) -> np.ndarray:
        if id(data) not in answers:
            answers[id(data)] = trainer.summarize(data)
        return answers[id(data)]

    starts = {} if recipe.is_solved else read_start(output)
    compared = keep_better(task, trainer, prepared, output, predict) if starts else {}
    if recipe.is_solved:
        compared = {KEPT: "start"}
    if starts and compared.get(KEPT) == "start":
        answers = {id(prepared.data[split]): summaries for split, summaries in starts.items()}
    elif starts and recipe.strength and "frozen" in task.baselines and recipe.baseline:
        summaries, fitted = starts[next(iter(task.splits))], min(len(prepared.data["train"]), MOST_SOLVED)
        baselines = {**baselines, "frozen": Baseline(summaries, np.arange(len(summaries)), fitted)}
    found = score_splits(task, recipe, predict, prepared, report)
    metrics, tuned, chosen = found.metrics, found.tuned, found.decided or {}
    if tuned is None:  # with a tune split, the scores at the start are not those of dev
        start = next((entry for entry in trainer.state.log_history if entry["step"] == 0), {})  # eval_on_start
        metrics |= {f"start_{name}": start[key] for name in sorted(metrics) if (key := f"eval_{name}") in start}
    if task.metric:
        dev = prepared.data[next(iter(task.splits))]
        metrics |= task.baseline(prepared.data["train"], dev) | score_baselines(task, baselines, dev, found.rows)
        found.files |= show_baseline(task, baselines.get(metrics.get(BEST_BASELINE)), dev, found.rows)
        for key, own in zip(("score", *name_limits("score")), (task.metric, *name_limits(task.metric)), strict=True):
            if own in metrics:
                metrics[key] = metrics[own]
        log = trainer.state.log_history
        facts = {LOSS_FALLS: is_falling(log), IS_LEARNED: is_learned(log), SEARCHED: (output / SEARCH).exists()}
        metrics |= {name: True for name, is_so in facts.items() if is_so}
    metrics |= {"updates": trainer.state.global_step} | compared
    if recipe.strength:
        metrics[SOLVED] = recipe.strength
    model = trainer.accelerator.unwrap_model(trainer.model)
    if found.temperature is not None:
        metrics["temperature"] = found.temperature
    for name, value in chosen.items():
        setattr(model.config, name, value)
    others = ["the start or the end of the training"] if starts and compared else []
    others += ["the checkpoint"] if trainer.args.load_best_model_at_end else []
    if names := [] if tuned else [*chosen, *others]:
        metrics[CHOSEN_ON_DEV] = " and ".join(names)
    is_foreign = task.metric and getattr(dev, "language", "en") != "en"
    if task.copies and (is_foreign or recipe.data.get("label") or not task.is_official(recipe.data["dir"])):
        metrics[OWN_DATA] = True
    trainer.save_model(str(output))
    if best := {} if compared else find_better(trainer, tuned or metrics, report):
        name, _ = trainer.criterion
        prefix = "best_tune_" if tuned else "best_"
        metrics |= {"best_update": best["step"], f"{prefix}{name}": best[name]}
        values = f"{name} {best[name]:.4g}, at the end {(tuned or metrics)[name]:.4g}"
        report(f"update {best['step']:,} was better ({values}); its model is in {output / BEST}")
    if trainer.is_world_process_zero():
        if best:
            save_best(recipe, trainer, best, prepared.tokenizer, output)
        if found.conformity:
            atomic_write(msgspec.json.encode(found.conformity).decode() + "\n", output / CALIBRATION_FILE)
        write_results(task, recipe, trainer, metrics, found.files, prepared, output)
        shutil.rmtree(output / START, ignore_errors=True)
        if trainer.keep == 1:  # the model itself is the one to keep; the last and the best checkpoint were for resuming
            for update, checkpoint in list_checkpoints(output).items():
                if update not in trainer.milestones:
                    shutil.rmtree(checkpoint, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return metrics
