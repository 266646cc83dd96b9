"""One run of one task: from a recipe to a directory with model, tokenizer, scores and everything needed to repeat it.

The same for every task, and with `trainer.py` the only place that touches the Trainer. What the Trainer does stays with
it: the loop, precision, clipping, accumulation, several processes, checkpoints. Added here: how losses are divided
(over the whole update, not a micro-batch), what is logged of them (`trainer.py`), and the run directory
(`directory.py`).

Several processes repeat some sequences to fill the last batch of an epoch, where it does not divide among them: that is
accelerate's way to keep them in step.

Differs from the paper: the learning rate decays linearly from its peak at the end of the warm-up (transformers'
"linear"), where the reference code multiplies the warm-up's end by 1 - step / total.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

from bertkit.data.pretraining.sources import ignore
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer
from bertkit.errors import UsageError, explain_full_disk, explain_refusal
from bertkit.model import bert as models
from bertkit.model.checkpoint import (
    check_weights,
    fingerprint_weights,
    load_config,
    load_model,
    make_config,
    reinitialize,
)
from bertkit.model.optim import NAME as BERT_ADAM
from bertkit.model.optim import BertAdam
from bertkit.model.precision import choose_precision
from bertkit.system.files import write_json
from bertkit.tasks.task import Report, Task
from bertkit.training.model_card import write_card
from bertkit.training.recipe import Recipe, check, list_lengths, merge, split_batch
from bertkit.training.run_dir import (
    BEST,
    EXAMPLES,
    FIRST,
    LENGTHS,
    METRICS,
    PREDICTIONS,
    check_data,
    describe_environment,
    find_checkpoint,
    find_finished,
    hold_run_dir,
    holds_run,
    is_intact,
    start_directory,
    write_environment,
    write_log,
)
from bertkit.training.trainer import (
    BertTrainer,
    Herald,
    PlacingCollator,
    Progress,
    Watcher,
    explain_lost_process,
    explain_shortage,
    name_stopped_processes,
    train,
)

SIZES = (  # what a checkpoint decides
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
MEASURED = 4096  # sequences of a split, whose lengths are kept


def run(
    task: Task,
    *recipes: Mapping[str, Any],
    output: str | Path,
    report: Report = ignore,
    progress: Progress = ignore,
    prepared: "Prepared | None" = None,
    milestones: Collection[int] = (),
) -> dict[str, Any]:
    """The scores of `task` after training, as written to `output/metrics.json`; a finished run is not repeated.

    What can be checked is checked first; nothing is written before the data are read and the vocabulary is there.

    Args:
        recipes: merged over the task's own, the later ones winning.
        output: the run directory, new, empty, or of the same run, which then continues.
        report: gets one line now and then.
        progress: called after every logged update.
        prepared: the data, where `prepare` has made them already for a recipe of the same `name_data`.
        milestones: the updates whose checkpoints are there at the end, whatever `[train]` says of saving.

    Raises:
        UsageError: a mistake in the recipe, the data or the directory; nothing is overwritten.
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
        ProcessLost: one of several processes has ended.
    """
    recipe, output = complete(task, *recipes), Path(os.path.expanduser(output))  # as TrainingArguments does
    processes = join_processes(recipe)
    args = make_arguments(task, recipe, output)
    report = report if processes.is_main_process else ignore
    if (finished := find_finished(output, recipe)) is not None:
        report(f"{output} is finished; its scores are in {output / METRICS}")
        return finished

    held = hold_run_dir(output) if processes.is_main_process else nullcontext()
    with explain_full_disk(output), explain_shortage(args), explain_lost_process(processes.num_processes), held:
        return carry_out(task, recipe, args, output, report, progress, prepared, milestones)


def carry_out(
    task: Task,
    recipe: Recipe,
    args: TrainingArguments,
    output: Path,
    report: Report,
    progress: Progress,
    prepared: "Prepared | None",
    milestones: Collection[int],
) -> dict[str, Any]:
    """The scores of a run that is not finished; see `run`."""
    processes = join_processes(recipe)
    set_seed(args.seed)
    checkpoint = find_checkpoint(output, report)
    if prepared is None:
        prepared = prepare(task, recipe, report, output, goes_on=checkpoint is not None)
    else:
        processes.wait_for_everyone()  # all have looked at the directory before the first one begins it
        if processes.is_main_process:
            start_directory(output, recipe, prepared.tokenizer)
    start = train_first(task, recipe, output, report, progress)
    set_seed(args.seed)  # again: a run must not depend on whether its data were at hand
    model = make_model(task, start, prepared.settings, report)
    if processes.is_main_process:
        weights = fingerprint_weights(model)
        write_environment(output, prepared.fingerprints, weights, goes_on=checkpoint is not None)
    parameters = f"{model.num_parameters():,} parameters"
    trainer = make_trainer(task, model, args, prepared.data, recipe, progress, report, milestones)
    with name_stopped_processes():
        if "train" in prepared.data:
            report(f"{parameters}; {describe_training(args, recipe, prepared.data['train'])}")
            train(trainer, checkpoint, report)
        else:
            report(f"{parameters}; nothing to train, only to predict")
        return finish(task, recipe, trainer, prepared, output, report)


def train_first(task: Task, recipe: Recipe, output: Path, report: Report, progress: Progress) -> Recipe:
    """The recipe, starting from the model of the training that comes before it, if the task has one.

    That is a run of its own in `output/first`, and not repeated when it is finished, on the same data.
    """
    if not (given := task.precede(recipe)):
        return recipe
    earlier = complete(task, given)
    report(f"first, in {output / FIRST}:")
    was_finished = find_finished(output / FIRST, earlier) is not None
    run(task, earlier, output=output / FIRST, report=report, progress=progress)
    if was_finished:  # all processes saw the same: none can finish it without the others
        prepared = prepare(task, earlier, report)
        if join_processes(recipe).is_main_process:
            check_data(output / FIRST, prepared.fingerprints)
    report("then:")
    return recipe | {"checkpoint": str(output / FIRST), "reinit_layers": 0}


# --- The data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What training needs beside the model; it serves every run of the same `name_data`.

    examples: as the task's `load` gives them, but for "train", whose text may be large.
    data: split -> the encoded data set.
    settings: BertConfig's values that the data decide.
    """

    examples: Mapping[str, Any]
    tokenizer: Any
    data: Mapping[str, Any]
    settings: Mapping[str, Any]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Split -> what tells its data from any others."""
        return {split: data.fingerprint() for split, data in self.data.items()}


def prepare(
    task: Task, recipe: Recipe, report: Report = ignore, output: Path | None = None, goes_on: bool = False
) -> Prepared:
    """The data of a complete recipe, read and encoded; with `output` the run directory is begun as soon as it can be.

    Args:
        goes_on: whether the run there continues from a checkpoint, and so with its own tokenizer.

    Raises:
        UsageError: wrong or missing files, or a tokenizer that cannot be loaded.
    """
    processes = join_processes(recipe)
    examples = task.load(recipe["data"], report)
    with processes.main_process_first():  # the others read the first one's vocabulary
        # What another start has left may be of another text, unless the run has come to a checkpoint with it.
        if output is not None and (goes_on or not processes.is_main_process) and holds_run(output, recipe):
            tokenizer = load_tokenizer(str(output))
        else:
            tokenizer = task.tokenize(recipe, examples, report)
        if output is not None and processes.is_main_process:
            start_directory(output, recipe, tokenizer)
    data = {}
    for split in ("train", *task.splits, *task.unlabelled):
        if split in examples:
            data[split] = task.encode(examples[split], tokenizer, recipe, split)
            for line in task.describe(data[split], split):
                report(line)
    settings = task.configure(recipe, tokenizer, examples)
    return Prepared({split: texts for split, texts in examples.items() if split != "train"}, tokenizer, data, settings)


def name_data(task: Task, recipe: Recipe) -> str:
    """A name that two complete recipes share if what `prepare` makes of one serves the other."""
    parts = {"task": task.name} | {key: recipe.get(key) for key in ("checkpoint", "data", "model")}
    return json.dumps(parts if task.reusable else recipe, sort_keys=True)


# --- The recipe, complete ---------------------------------------------------------------------------------------------


def complete(task: Task, *recipes: Mapping[str, Any], config: PreTrainedConfig | None = None) -> Recipe:
    """The whole recipe of a run: paper < preset < what the options change < `recipes`, checked.

    Args:
        config: what the checkpoint will be like, where it is still to be made.

    Raises:
        UsageError: an unknown key, a wrong type, a recipe of another task.
    """
    given = merge(*recipes)
    if given.get("task", task.name) != task.name:
        raise UsageError(
            f"the recipe is for the task {str(given['task'])[:40]!r}, not {task.name!r}; use the command of that task"
        )
    preset = task.stable if given.get("preset") == "stable" else {}
    recipe = check(merge(task.recipe, preset, task.adapt(given), given), data_defaults=task.recipe["data"])
    task.check(recipe)
    check_ranges(recipe["train"])
    check_model(task, recipe, config)
    return recipe


def join_processes(recipe: Recipe) -> PartialState:
    """This process among those that torchrun or accelerate launch have started; alone if there are no others.

    They wait for each other up to `[train] ddp_timeout` seconds; two hours if not given, for the others wait while the
    first one trains a vocabulary.
    """
    timeout = timedelta(seconds=recipe["train"].get("ddp_timeout", 7200))
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)


def leave_processes() -> None:
    """Ends the connection to the other processes, if there are any: without it one may abort while others still end."""
    PartialState().destroy_process_group()


def check_ranges(train: Mapping[str, Any]) -> None:
    """Nothing, or a UsageError about a number in `[train]` that no optimizer can use."""
    ranges = {
        "learning_rate": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
        "adam_epsilon": (0.0, math.inf),
        "max_grad_norm": (0.0, math.inf),
        "warmup_steps": (0.0, math.inf),
        "adam_beta1": (0.0, 1.0),
        "adam_beta2": (0.0, 1.0),
        "seed": (0, 2**32),
        "max_steps": (-1, 10**9),
        "dataloader_num_workers": (0, 1024),
        "num_train_epochs": (0, 10**6),
    }
    for key, (least, bound) in ranges.items():
        if key in train and not least <= train[key] < bound:
            raise UsageError(f"{key} is {train[key]} in [train]; it must be at least {least:g} and below {bound:g}")
    if train.get("max_steps") == 0:
        raise UsageError("max_steps is 0 in [train]; it must be above 0, or -1 for num_train_epochs to decide")


def check_model(task: Task, recipe: Recipe, config: PreTrainedConfig | None = None) -> None:
    """Nothing, or a UsageError: no such checkpoint, sizes that do not fit, texts longer than the positions."""
    if recipe.get("checkpoint"):
        if config is None:
            config = load_config(recipe["checkpoint"])
            check_weights(Path(recipe["checkpoint"]))
        if not task.metric:
            labels = task.configure(recipe, None, None)["id2label"].values()
            if {label.lower() for label in labels} != {str(label).lower() for label in config.id2label.values()}:
                raise UsageError(explain_missing_head(task, recipe, labels))
            if (name := name_head(task, recipe)) != (had := (config.architectures or [name])[0]):
                raise UsageError(
                    f"{recipe['checkpoint']} is a {had} and would be taken for a {name}; say so: --set bilstm="
                    f"{str('BiLSTM' in had).lower()}"
                )
        given = {key: value for key, value in recipe["model"].items() if key in SIZES}
        if other := [f"{key} {value}" for key, value in given.items() if value != getattr(config, key)]:
            raise UsageError(
                f"[model] asks for {', '.join(other)}, but {recipe['checkpoint']} has other sizes; leave them out"
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
            models.check_feature_layers(layers, config)
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
    """TrainingArguments of `[train]`, with what follows from the other keys.

    Raises:
        UsageError: transformers refuses a value, something it needs is not installed, the batch cannot be divided, or
            one process would cut it for the others.
    """
    train = dict(recipe["train"])
    per_device, accumulation = split_batch(
        recipe["batch_size"],
        processes=join_processes(recipe).num_processes,
        per_device=train.pop("per_device_train_batch_size", None),
    )
    precision = choose_precision(recipe["precision"])
    if (asked := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", precision):  # which would win
        raise UsageError(
            f"accelerate asks for {asked} (--mixed_precision, ACCELERATE_MIXED_PRECISION) and the recipe for "
            f"{precision}; remove --mixed_precision, and set precision in the recipe"
        )
    if train.get("optim") == BERT_ADAM:
        del train["optim"]  # ours, which `make_trainer` hands over
    train.pop("save_total_limit", None)  # BertTrainer's: the Trainer deletes before the new checkpoint is whole
    defaults = {
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",  # of several processes one speaks
        "logging_nan_inf_filter": False,  # it would hide a NaN loss
        "use_cpu": not torch.accelerator.is_available(),  # bf16 on a CPU has to be allowed by it
        "ddp_find_unused_parameters": False,  # a head uses all it has
        "remove_unused_columns": False,  # a task's columns all are arguments of its head
        "per_device_eval_batch_size": max(per_device, 32),
    }
    if train.get("load_best_model_at_end") or train.get("save_strategy") == "best":  # else the last one is kept
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
        Trainer.get_optimizer_cls_and_kwargs(args)  # whether it is installed
        nobody = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(args.lr_scheduler_type, nobody, 0, 1, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
        context = args.dataloader_multiprocessing_context
        DataLoader([], num_workers=args.dataloader_num_workers, multiprocessing_context=context)
    if (mode := args.torch_compile_mode) and mode not in (modes := torch._inductor.list_mode_options()):
        raise UsageError(
            f"torch_compile_mode = {mode[:40]!r} in [train] is unknown; expected one of {', '.join(modes)}"
        )
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise UsageError(
            f"lr_scheduler_type = {args.lr_scheduler_type.value} in [train] needs the loss of an evaluation, which "
            "bertkit does not compute; take one that depends on the update alone, such as linear, cosine or constant"
        )
    names, given = list_scores(task), (train.get("metric_for_best_model") or task.metric).removeprefix("eval_")
    if given not in names:
        raise UsageError(
            f"metric_for_best_model = {given[:40]!r} in [train] is no score of {task.name}; expected "
            f"{', '.join(names) or 'none, for it has no labels'}"
        )
    if args.accelerator_config.dispatch_batches:
        raise UsageError("dispatch_batches in [train] would cut a batch's places like its rows; leave it out")
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes (accelerate launch), never DataParallel
    return args


def list_scores(task: Task) -> list[str]:
    """Return the names of the scores by which the first split, which is evaluated during training, can be judged."""
    names = dict.fromkeys([task.metric, *(row.key for row in task.table)])
    others = [pattern for pattern in task.splits.values() if pattern != "{}"]
    return [name for name in names if name not in {pattern.format(key) for pattern in others for key in names}]


# --- The model --------------------------------------------------------------------------------------------------------


def make_model(task: Task, recipe: Recipe, settings: Mapping[str, Any], report: Report = ignore) -> nn.Module:
    """The task's head, from the checkpoint if the recipe names one, else new.

    `settings` are BertConfig's values that the data decide.

    Raises:
        UsageError: sizes that do not fit together, or a checkpoint that cannot be loaded.
    """
    head = getattr(models, name_head(task, recipe))
    if not recipe.get("checkpoint"):
        with explain_refusal("[model]"):
            return head(make_config(recipe["model"] | settings))
    model, new = load_model(head, recipe["checkpoint"], recipe["model"] | settings)
    if new and not task.metric:
        raise UsageError(explain_missing_head(task, recipe, settings["id2label"].values()))
    if new:
        report(f"new, because {recipe['checkpoint']} has none that fits: {', '.join(new)}")
    if recipe.get("reinit_layers"):
        reinitialize(model, recipe["reinit_layers"])
        report(f"drawn anew: the pooler and the top {recipe['reinit_layers']} layers (reinit_layers)")
    if recipe.get("freeze") or model.is_frozen:  # what is loaded forgets that it is
        model.freeze_encoder()
    return model


def name_head(task: Task, recipe: Recipe) -> str:
    """The class of `bertkit.model.bert` that a run trains: the task's head, or its sibling with a BiLSTM."""
    name = task.head(recipe["data"])
    return name.replace("BertFor", "BertBiLSTMFor") if recipe.get("bilstm") else name


def explain_missing_head(task: Task, recipe: Recipe, labels: Iterable[str]) -> str:
    """What is wrong with a model that should predict a task without training data, and cannot."""
    return (
        f"{task.name} has no training data: a fine-tuned model predicts it, and {recipe['checkpoint']} has no head for "
        f"the labels {', '.join(labels)}; give the run of one that has: --model RUN"
    )


def describe_training(args: TrainingArguments, recipe: Recipe, data: Any) -> str:
    """One line: updates, sequences an update, how they are cut, precision."""
    steps = (
        args.max_steps
        if args.max_steps > 0
        else math.ceil(math.ceil(len(data) / recipe["batch_size"]) * args.num_train_epochs)
    )
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    late = "" if args.get_warmup_steps(steps) < steps else "; the warm-up is longer, so the rate never reaches its peak"
    cut = f"{args.world_size} x {args.gradient_accumulation_steps} x {args.per_device_train_batch_size}"
    return f"{steps:,} updates of {recipe['batch_size']} sequences ({cut}), {precision}{late}"


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
) -> BertTrainer:
    """The Trainer of a run, its printing replaced by `progress` and, where it predicts, by `report`."""
    optimizer = None
    if recipe["train"].get("optim") == BERT_ADAM:
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = (BertAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
    dev = data.get(next(iter(task.splits), ""))
    with explain_refusal("[train]"):
        trainer = BertTrainer(
            model=model,
            args=args,
            task=task,
            keep=recipe["train"].get("save_total_limit", 0),
            milestones=milestones,
            train_dataset=data.get("train"),
            eval_dataset=dev,
            data_collator=PlacingCollator(task.collate, type(model)),
            compute_metrics=lambda prediction: task.score(prediction.predictions, dev),
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[Watcher(Path(args.output_dir), progress), Herald(report)],
        )
    if args.fsdp and not trainer.is_fsdp_enabled:
        raise UsageError(
            "fsdp in [train] would shard nothing here: accelerate does it where there are several processes, each with "
            "an accelerator of its own; leave it out"
        )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    task: Task, recipe: Recipe, trainer: BertTrainer, prepared: Prepared, output: Path, report: Report
) -> dict[str, Any]:
    """The scores of a trained model; saves it, and the first process writes the rest of the directory."""
    trainer.compute_metrics = None  # each split has its own labels
    metrics: dict[str, Any] = {}
    files: dict[str, str] = {}
    for split in (*task.splits, *task.unlabelled):
        if split in prepared.data:
            report(f"predicting {split}, {len(prepared.data[split]):,} sequences")
            summaries = trainer.predict(prepared.data[split]).predictions
            files |= task.predict(summaries, prepared.data[split], split)
            if name := task.splits.get(split):
                scores = task.score(summaries, prepared.data[split])
                metrics |= {name.format(key): value for key, value in scores.items()}
    metrics |= list_start(trainer.state.log_history)
    if task.metric:
        metrics |= task.baseline(prepared.data["train"], prepared.data[next(iter(task.splits))])
        metrics["score"] = metrics[task.metric]
    metrics["updates"] = trainer.state.global_step
    model = trainer.accelerator.unwrap_model(trainer.model)
    for name, value in task.settle(metrics).items():
        setattr(model.config, name, value)
    trainer.save_model(str(output))
    if best := find_better(trainer, metrics, report):
        name, _ = trainer.criterion
        metrics |= {"best_update": best["step"], f"best_{name}": best[name]}
        values = f"{name} {best[name]:.4g}, at the end {metrics[name]:.4g}"
        report(f"update {best['step']:,} was better ({values}); its model is in {output / BEST}")
    if trainer.is_world_process_zero():
        if best:
            save_best(task, type(model), best, prepared.tokenizer, output)
        write_results(task, recipe, trainer, metrics, files, prepared, output)
    trainer.accelerator.wait_for_everyone()
    return metrics


def write_results(
    task: Task,
    recipe: Recipe,
    trainer: BertTrainer,
    metrics: dict[str, Any],
    files: Mapping[str, str],
    prepared: Prepared,
    output: Path,
) -> None:
    """Writes log, card and predictions beside the saved model, and last the metrics."""
    (output / "training_args.bin").unlink(missing_ok=True)  # a pickle; recipe.toml says the same
    write_log(trainer.state.log_history, output)
    # What was saved is what is shown, and it is whole where training has sharded it.
    model = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(output).eval()
    sizes = {split: len(data) for split, data in prepared.data.items()}
    card = write_card(task, str(output), recipe, metrics, describe_environment(), model, sizes)
    (output / "README.md").write_text(card, encoding="utf-8")
    if task.illustrate is not None:
        lines = task.illustrate(model, prepared.tokenizer, prepared.examples)
        files = {**files, EXAMPLES: "".join(f"{line}\n" for line in lines)}
    (output / PREDICTIONS).mkdir(exist_ok=True)
    for name, text in files.items():
        (output / PREDICTIONS / name).write_text(text, encoding="utf-8")
    write_json(measure_lengths(task, recipe, prepared.data), output / LENGTHS)
    write_json(metrics, output / METRICS)


def measure_lengths(task: Task, recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    """Split -> how many of its `sequences` have how many tokens, `counts` and `lengths`, and the most they may have.

    Of a large split, of MEASURED sequences, evenly spread. Where samples are drawn for each run, of those held out.
    """
    first = next(iter(task.splits), "")
    longest = recipe["data"].get("heldout_length") or list_lengths(recipe)[0]
    found = {}
    for split in [split for split in ("train", first) if split in data and (task.reusable or split == first)]:
        places = np.linspace(0, len(data[split]) - 1, min(len(data[split]), MEASURED)).astype(int).tolist()
        counts: Counter[int] = Counter()
        for start in range(0, len(places), 64):
            batch = task.collate(data[split].__getitems__(places[start : start + 64]))
            if "input_ids" not in batch:  # but features of words
                break
            counts.update(batch["attention_mask"].sum(-1).flatten().tolist())
        if counts:
            lengths = sorted(counts)
            found[split] = {"sequences": len(data[split]), "max_length": longest, "lengths": lengths}
            found[split]["counts"] = [counts[length] for length in lengths]
    return found


def find_better(trainer: BertTrainer, metrics: Mapping[str, Any], report: Report) -> dict[str, float]:
    """The `step` and scores of an earlier checkpoint that is better than the model at the end; empty if none is."""
    name, lower_is_better = trainer.criterion
    best = None if trainer.args.load_best_model_at_end else trainer.find_best()
    if not best or best["step"] == trainer.state.global_step:
        return {}
    if not is_intact(Path(trainer.args.output_dir) / f"checkpoint-{best['step']}"):
        report(f"checkpoint-{best['step']}, which was better, is damaged and left out")
        return {}
    better = best[name] < metrics[name] if lower_is_better else best[name] > metrics[name]
    return best if better else {}


def save_best(task: Task, head: type[PreTrainedModel], best: Mapping[str, float], tokenizer: Any, output: Path) -> None:
    """Writes `output/best` at once: the model of an earlier checkpoint, saved as the last one is, and the tokenizer."""
    model = head.from_pretrained(output / f"checkpoint-{best['step']}")
    for name, value in task.settle(best).items():
        setattr(model.config, name, value)
    temporary = output / f".{BEST}"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    save_tokenizer(tokenizer, temporary)
    shutil.rmtree(output / BEST, ignore_errors=True)
    temporary.rename(output / BEST)


def list_start(log: list[dict[str, float]]) -> dict[str, float]:
    """The scores before the first update (`eval_on_start`), as `start_…`."""
    for entry in log:
        if entry.get("step") == 0:
            found = {key.removeprefix("eval_"): value for key, value in entry.items() if key.startswith("eval_")}
            timings = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
            return {f"start_{key}": value for key, value in sorted(found.items()) if key not in timings}
    return {}


def dry_run(task: Task, *recipes: Mapping[str, Any], output: str | Path) -> dict[str, Any]:
    """What `run` would do, without data, weights or a file written: the complete recipe and the sizes that follow.

    Raises:
        UsageError: as `run`, for what can be known without the data.
    """
    recipe = complete(task, *recipes)
    args = make_arguments(task, recipe, Path(output))
    plan: dict[str, Any] = {"recipe": recipe, "output": str(output)}
    if not recipe.get("checkpoint"):
        with torch.device("meta"):
            plan["parameters"] = make_model(task, recipe, task.configure(recipe, None, None)).num_parameters()
    plan["sequences_per_update"] = recipe["batch_size"]
    plan["per_device_batch"] = args.per_device_train_batch_size
    plan["accumulation"] = args.gradient_accumulation_steps
    plan["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if args.max_steps > 0:
        plan["updates"] = args.max_steps
    if task.precede(recipe):
        plan["before"] = f"another training, in {Path(output) / FIRST}"
    return plan
