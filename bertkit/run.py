"""One run of one task: from a recipe to a directory with model, tokenizer, scores and everything needed to repeat it.

The same for every task, and the only place that touches the Trainer. What the Trainer does stays with it: the loop,
precision, clipping, accumulation, several processes, checkpoints. Added here: how losses are divided (over the whole
update, not a micro-batch), what is logged of them, and the run directory (see `start_directory`).

Differs from the paper: the learning rate decays linearly from its peak at the end of the warm-up (transformers'
"linear"), where the reference code multiplies the warm-up's end by 1 - step / total.
"""

import errno
import json
import math
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

import bertkit
from bertkit import model as models
from bertkit.config import BertConfig
from bertkit.data.corpus import find_hub_trouble
from bertkit.data.vocab import load_tokenizer, save_tokenizer
from bertkit.errors import UsageError
from bertkit.optim import NAME as BERT_ADAM
from bertkit.optim import BertAdam
from bertkit.recipe import Recipe, check, find_recipe_differences, merge, read_recipe, save_recipe, split_batch
from bertkit.share import write_card
from bertkit.tasks.task import Report, Task

Progress = Callable[[int, int, Mapping[str, float]], None]  # updates done, of how many, the latest log entry

METRICS = "metrics.json"
RECIPE = "recipe.toml"
LOG = "training_log.jsonl"
EXAMPLES = "predictions/examples.txt"
COMPLETE = "complete"  # this file marks a checkpoint as fully written; it holds the sizes of the others


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM or Ctrl-C), has written a checkpoint, and can be continued.

    number: of the signal.
    """

    def __init__(self, number: int, update: int) -> None:
        super().__init__(f"stopped after update {update:,}; the same command continues")
        self.number = number


def ignore(*_: Any) -> None:
    """Reports to nobody."""


def run(
    task: Task,
    *recipes: Mapping[str, Any],
    output: str | Path,
    report: Report = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """The scores of `task` after training, as written to `output/metrics.json`; a finished run is not repeated.

    What can be checked is checked first; nothing is written before the data are read and the vocabulary is there.

    Args:
        recipes: merged over the task's own, the later ones winning.
        output: the run directory, new, empty, or of the same run, which then continues.
        report: gets one line now and then.
        progress: called after every logged update.

    Raises:
        UsageError: a mistake in the recipe, the data or the directory; nothing is overwritten.
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
    """
    recipe, output = complete(task, *recipes), Path(output)
    processes = join_processes(recipe)
    args = make_arguments(task, recipe, output)
    report = report if processes.is_main_process else ignore
    if (finished := find_finished(output, recipe)) is not None:
        report(f"{output} is finished; its scores are in {output / METRICS}")
        return finished

    set_seed(args.seed)
    examples = task.load(recipe["data"], report)
    with processes.main_process_first():  # the others read the first one's vocabulary
        tokenizer = find_tokenizer(task, recipe, examples, output, report)
        if processes.is_main_process:
            start_directory(output, recipe, tokenizer)
    data = {name: task.encode(examples[name], tokenizer, recipe, name) for name in ("train", *task.splits)}
    model = make_model(task, recipe, task.configure(recipe, tokenizer, examples), report)
    report(f"{count_parameters(model):,} parameters; {describe_training(args, recipe, data['train'])}")

    trainer = make_trainer(task, model, args, data, recipe, progress)
    del examples["train"]  # encoded; the text may be large
    train(trainer, find_checkpoint(output, report), report)
    return finish(task, recipe, trainer, data, examples, tokenizer, output)


# --- The recipe, complete ---------------------------------------------------------------------------------------------


def complete(task: Task, *recipes: Mapping[str, Any]) -> Recipe:
    """The whole recipe of a run: paper < preset < `recipes`, checked.

    Raises:
        UsageError: an unknown key, a wrong type, a recipe of another task.
    """
    given = merge(*recipes)
    if given.get("task", task.name) != task.name:
        raise UsageError(
            f"the recipe is for the task {given['task']!r}, not {task.name!r}; use the command of that task"
        )
    preset = task.stable if given.get("preset") == "stable" else {}
    recipe = check(merge(task.recipe, preset, given), data_defaults=task.recipe["data"])
    task.check(recipe)
    check_ranges(recipe["train"])
    check_model(recipe)
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
    }
    for key, (least, bound) in ranges.items():
        if key in train and not least <= train[key] < bound:
            raise UsageError(f"{key} is {train[key]} in [train]; it must be at least {least:g} and below {bound:g}")


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def check_model(recipe: Recipe) -> None:
    """Nothing, or a UsageError: no such checkpoint, sizes that do not fit, texts longer than the positions."""
    if recipe.get("checkpoint"):
        config = load_config(recipe["checkpoint"])
        given = {key: value for key, value in recipe["model"].items() if key in SIZES}
        if other := [f"{key} {value}" for key, value in given.items() if value != getattr(config, key)]:
            raise UsageError(
                f"[model] asks for {', '.join(other)}, but {recipe['checkpoint']} has other sizes; leave them out"
            )
    else:
        config = make_config(recipe["model"])
    if recipe["model"].get("attn_implementation") == "flex_attention":
        raise UsageError("flex_attention has no dropout, with which BERT is trained; use packed, sdpa or eager")
    lengths = [phase["max_length"] for phase in recipe.get("phase", [])] or [recipe["data"].get("max_length", 0)]
    if max(lengths) > config.max_position_embeddings:
        raise UsageError(
            f"max_length {max(lengths)} exceeds the model's {config.max_position_embeddings} positions; lower it"
            + ("" if recipe.get("checkpoint") else " or raise max_position_embeddings in [model]")
        )


def make_arguments(task: Task, recipe: Recipe, output: Path) -> TrainingArguments:
    """TrainingArguments of `[train]`, with what follows from the other keys.

    Raises:
        UsageError: transformers refuses a value, something it needs is not installed, or the batch cannot be divided.
    """
    train = dict(recipe["train"])
    per_device, accumulation = split_batch(
        recipe["batch_size"],
        processes=join_processes(recipe).num_processes,
        per_device=train.pop("per_device_train_batch_size", None),
    )
    precision = choose_precision(recipe["precision"])
    defaults = {
        "optim": "adamw_torch" if train.get("optim") == BERT_ADAM else train.pop("optim", "adamw_torch"),
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would hide a NaN loss
        "use_cpu": not torch.accelerator.is_available(),  # bf16 on a CPU has to be allowed by it
        "ddp_find_unused_parameters": False,  # a head uses all it has
        "remove_unused_columns": False,  # a task's columns all are arguments of its head
        "per_device_eval_batch_size": max(per_device, 32),
        "metric_for_best_model": task.metric,
        "greater_is_better": not task.lower_is_better,
    }
    train.pop("optim", None)
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__ and "gradient_checkpointing" in train:
        train["activation_checkpointing"] = train.pop("gradient_checkpointing")  # its name from transformers 5.20 on
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
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes (accelerate launch), never DataParallel
    return args


def choose_precision(asked: str) -> str:
    """fp32, bf16 or fp16; "auto" takes bf16 where the hardware has it, since elsewhere it is emulated and slow.

    Raises:
        UsageError: fp16 without an accelerator.
    """
    if asked == "fp16" and not torch.accelerator.is_available():
        raise UsageError('precision = "fp16" needs an accelerator and there is none; use "auto", "bf16" or "fp32"')
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if torch.backends.mps.is_available():
        return "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


@contextmanager
def explain_refusal(what: str) -> Iterator[None]:
    """A refusal by a library becomes a UsageError about `what`."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError, OSError, SafetensorError, StrictDataclassError) as error:
        raise UsageError(f"{what} is refused: {join_lines(error.__cause__ or error)}; correct it") from None


def join_lines(error: Exception) -> str:
    """An exception's message as one line."""
    return " ".join(str(error).split())


# --- The run directory ------------------------------------------------------------------------------------------------


def find_finished(output: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The metrics of a finished run in this directory, or None when there is work to do.

    Raises:
        UsageError: the directory cannot be written, belongs to another run that has begun, or holds something else.
    """
    with explain_refusal(f"the directory {output}"):
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file; name a directory with --output")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} cannot be written; name another directory with --output")
    if not output.exists():
        return None
    if not (output / RECIPE).exists():
        if any(output.iterdir()):
            raise UsageError(f"{output} is not empty and holds no run; name another directory with --output")
        return None
    differences = find_recipe_differences(read_recipe(output / RECIPE), recipe)
    if differences and has_begun(output):
        more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
        raise UsageError(
            f"{output} belongs to another run ({'; '.join(differences[:2])}{more}); "
            "name another directory with --output"
        )
    return read_metrics(output / METRICS) if (output / METRICS).exists() else None


def read_metrics(path: Path) -> dict[str, Any]:
    """The scores of a finished run.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); delete it, and the same command evaluates again") from None


def has_begun(output: Path) -> bool:
    """Whether a run in this directory has come as far as its first update."""
    return (output / LOG).exists()


def start_directory(output: Path, recipe: Recipe, tokenizer: Any) -> None:
    """Writes what comes first in a run directory: recipe.toml, environment.json and the tokenizer.

    Checkpoints follow; metrics.json comes last, written at once, so its presence means done.
    """
    with explain_refusal(f"the directory {output}"):
        output.mkdir(parents=True, exist_ok=True)
    write_json(describe_environment(), output / "environment.json")
    save_tokenizer(tokenizer, output)
    save_recipe(recipe, output / RECIPE)  # last: with it the tokenizer counts as this run's


def write_json(value: Any, path: Path) -> None:
    """Writes a JSON file at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def describe_environment() -> dict[str, Any]:
    """Versions, hardware and, in a checkout, the commit: what may explain a difference between two runs."""
    from importlib.metadata import distributions

    names = {"torch", "transformers", "tokenizers", "accelerate", "datasets", "numpy", "sentencex"}
    packages = {found.name: found.version for found in distributions() if found.name in names}
    return {
        "bertkit": bertkit.__version__,
        "commit": find_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": PartialState().num_processes,
    }


def find_commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+" if files differ; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_tokenizer(task: Task, recipe: Recipe, examples: Mapping[str, Any], output: Path, report: Report) -> Any:
    """The tokenizer in the run directory, where this run has left one; else the task's."""
    if (output / RECIPE).exists() and read_recipe(output / RECIPE) == recipe and (output / "vocab.txt").exists():
        return load_tokenizer(str(output))
    return task.tokenize(recipe, examples, report)


def find_checkpoint(output: Path, report: Report = ignore) -> Path | None:
    """The newest checkpoint that was written to its end and is still as long as it was."""
    marked = [path.parent for path in output.glob(f"checkpoint-*/{COMPLETE}")]
    numbered = {int(number): path for path in marked if (number := path.name.removeprefix("checkpoint-")).isdigit()}
    for _, path in sorted(numbered.items(), reverse=True):
        sizes = json.loads((path / COMPLETE).read_text(encoding="utf-8") or "{}")
        found = measure_files(path)
        if all(found.get(name) == size for name, size in sizes.items()):
            return path
        report(f"{path.name} is damaged and passed over")
    return None


def measure_files(folder: Path) -> dict[str, int]:
    """The sizes in bytes of the files in a folder, by name."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != COMPLETE}


# --- The model --------------------------------------------------------------------------------------------------------


def make_model(task: Task, recipe: Recipe, settings: Mapping[str, Any], report: Report = ignore) -> nn.Module:
    """The task's head, from the checkpoint if the recipe names one, else new.

    `settings` are BertConfig's values that the data decide.

    Raises:
        UsageError: sizes that do not fit together, or a checkpoint that cannot be loaded.
    """
    head = getattr(models, task.head(recipe["data"]))
    if recipe.get("checkpoint"):
        return load_model(head, recipe["checkpoint"], recipe["model"] | settings, report)
    with explain_refusal("[model]"):
        return head(make_config(recipe["model"] | settings))


def make_config(values: Mapping[str, Any]) -> BertConfig:
    """BertConfig of `values`.

    Raises:
        UsageError: they do not fit together.
    """
    with explain_refusal("[model]"):
        return BertConfig(**values)


def load_config(checkpoint: str) -> BertConfig:
    """The configuration of a checkpoint: a directory, or a name on the Hub, whose cached copy will do.

    Raises:
        UsageError: there is none, or it is no BERT.
    """
    remedy = "give a directory with a BERT checkpoint: --model DIR"
    local = is_local(checkpoint)
    if not local and (trouble := find_hub_trouble(checkpoint, "model")):
        raise UsageError(f"there is no directory {checkpoint}, and {trouble}; {remedy}")
    with explain_refusal(f"the model {checkpoint}"):
        values, _ = PreTrainedConfig.get_config_dict(checkpoint, local_files_only=local)
        if values.get("model_type") != "bert":
            raise UsageError(f"{checkpoint} is a model of type {values.get('model_type')}, not bert; {remedy}")
        return BertConfig.from_pretrained(checkpoint, local_files_only=local)


def is_local(checkpoint: str) -> bool:
    """Whether a checkpoint is a path, or a Hub model whose configuration is in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(checkpoint).exists() or isinstance(try_to_load_from_cache(checkpoint, "config.json"), str)
    except HFValidationError:
        return False


def load_model(head: type, checkpoint: str, settings: Mapping[str, Any], report: Report) -> nn.Module:
    """A model in fp32 with the weights of a checkpoint; what it lacks, a new head's, is drawn and reported.

    Raises:
        UsageError: there is none in safetensors, or its vocabulary is smaller than the tokenizer's.
    """
    settings = dict(settings)
    tokens, known = settings.pop("vocab_size", 0), load_config(checkpoint).vocab_size
    if tokens > known:
        raise UsageError(
            f"the tokenizer has {tokens:,} tokens and {checkpoint} only {known:,}; use the checkpoint's own vocabulary"
        )
    with explain_refusal(f"the model {checkpoint} (in safetensors)"):
        model, info = head.from_pretrained(
            checkpoint,
            use_safetensors=True,
            dtype=torch.float32,
            local_files_only=is_local(checkpoint),
            output_loading_info=True,
            **settings,
        )
    if info["missing_keys"]:
        report(f"new, because {checkpoint} has none: {', '.join(sorted(info['missing_keys']))}")
    return model


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model learns; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def describe_training(args: TrainingArguments, recipe: Recipe, data: Any) -> str:
    """One line: updates, sequences an update, how they are cut, precision."""
    steps = (
        args.max_steps if args.max_steps > 0 else math.ceil(len(data) / recipe["batch_size"] * args.num_train_epochs)
    )
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    late = "" if args.get_warmup_steps(steps) < steps else "; the warm-up is longer, so the rate never reaches its peak"
    cut = f"{args.world_size} x {args.gradient_accumulation_steps} x {args.per_device_train_batch_size}"
    return f"{steps:,} updates of {recipe['batch_size']} sequences ({cut}), {precision}{late}"


def describe_duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 5 min 40 s, 3 h 12 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


# --- Training ---------------------------------------------------------------------------------------------------------


def train(trainer: Trainer, checkpoint: Path | None, report: Report) -> None:
    """Trains to the end, from a checkpoint if there is one.

    Raises:
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
    """
    if checkpoint:
        report(f"continues after {checkpoint.name}")
    start = time.monotonic()
    with explain_full_disk(Path(trainer.args.output_dir)), stop_on_signal(trainer) as watcher:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if watcher.agreed:
        raise Interrupted(watcher.agreed, trainer.state.global_step)
    report(f"trained for {describe_duration(time.monotonic() - start)}")


@contextmanager
def explain_full_disk(output: Path) -> Iterator[None]:
    """A file that could not be written becomes a UsageError; what was complete stays so."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        words = ("No space left", "File too large", "inline_container", "PytorchStreamWriter", "quota exceeded")
        if getattr(error, "errno", None) not in codes and not any(word in str(error) for word in words):
            raise
        raise UsageError(
            f"{output} cannot be written to: the disk is full ({join_lines(error)[:80]}); "
            "free some space, and the same command continues"
        ) from None


class BertTrainer(Trainer):
    """The Trainer, with losses divided by the labels of the whole update and every part of the loss logged.

    A head counts its own labels (`count_labels`); the counts of all micro-batches and processes are added before the
    first of them is computed, so that no loss or gradient depends on how an update is cut.
    """

    def __init__(self, *args, task: Task, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.task = task
        self.parts: dict[str, Tensor] = {}  # sums of the loss's parts since the last log, of this process

    def get_batch_samples(self, epoch_iterator, num_batches, device) -> tuple[list, dict[str, Tensor]]:
        """The micro-batches of one update, and the label counts of all of it."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        head = self.accelerator.unwrap_model(self.model)
        counts: dict[str, Tensor] = {}
        for sample in samples:
            for name, count in head.count_labels(**sample).items():
                counts[name] = counts.get(name, 0) + count
        counts = {name: self.accelerator.reduce(count.to(device), "sum") for name, count in counts.items()}
        return samples, {name: count.clamp(min=1) for name, count in counts.items()}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> Any:
        """This micro-batch's share of the update's loss (times the processes, over which gradients are averaged)."""
        outputs = model(**inputs, **(num_items_in_batch or {}))
        for name, value in outputs.items():
            if name.endswith("_loss"):
                self.parts[name] = self.parts.get(name, 0) + value.detach()
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the parts of the loss, each its mean over the updates since the last log."""
        if "loss" in logs:
            updates = self.state.global_step - self.logged_at
            for name, total in self.parts.items():
                logs[name] = self.accelerator.reduce(total, "sum").item() / updates
            self.parts, self.logged_at = {}, self.state.global_step
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, Tensor, Tensor]:
        """The task's summary of a batch; it stands for the labels too, which the Trainer wants to see."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, **self.task.evaluation_options)
        summary = self.task.summarize(outputs, inputs)
        return None, summary, summary[:, :1]

    def train(self, resume_from_checkpoint=None, **kwargs) -> Any:
        self.logged_at = 0 if resume_from_checkpoint is None else int(str(resume_from_checkpoint).rpartition("-")[2])
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)


class Watcher(TrainerCallback):
    """Reports progress, marks complete checkpoints, stops on a signal or on a loss that is no number."""

    def __init__(self, output: Path, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.signalled = 0  # the signal's number
        self.agreed = 0  # the same, once all processes know

    def on_log(self, args, state: TrainerState, control: TrainerControl, logs=None, **kwargs) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise UsageError(
                f"the loss is {loss} after update {state.global_step}; lower learning_rate or raise warmup_steps in "
                f'[train], or set precision = "fp32"; checkpoints in {self.output} are kept'
            )
        if state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, logs or {})

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state, self.output)
            checkpoint = self.output / f"checkpoint-{state.global_step}"
            write_json(measure_files(checkpoint), checkpoint / COMPLETE)

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state, self.output)  # from now on the directory is this run's

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # All processes have to stop after the same update. On a GPU they ask each other less often: it waits for them.
        if args.world_size > 1 and (args.device.type == "cpu" or state.global_step % 16 == 0):
            flag = torch.tensor(self.signalled, device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.agreed = int(flag)
        elif args.world_size == 1:
            self.agreed = self.signalled
        if self.agreed:
            control.should_save = control.should_training_stop = True
        elif state.is_world_process_zero and state.global_step % max(1, state.max_steps // 200) == 0:
            self.progress(state.global_step, state.max_steps, {})


class stop_on_signal:
    """In this context SIGTERM and the first Ctrl-C let the update finish, write a checkpoint and end the training."""

    def __init__(self, trainer: Trainer) -> None:
        self.watcher = next(x for x in trainer.callback_handler.callbacks if isinstance(x, Watcher))
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Watcher:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.previous[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: there signals cannot be caught
                break
        return self.watcher

    def _note(self, number: int, frame: Any) -> None:
        self.watcher.signalled = number
        signal.signal(number, self.previous[number])  # a second one is not held back

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def make_trainer(
    task: Task, model: nn.Module, args: TrainingArguments, data: dict[str, Any], recipe: Recipe, progress: Progress
) -> BertTrainer:
    """The Trainer of a run, its printing replaced by `progress`."""
    optimizer = None
    if recipe["train"].get("optim") == BERT_ADAM:
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = (BertAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
    dev = data[task.splits[0]]
    with explain_refusal("[train]"):
        trainer = BertTrainer(
            model=model,
            args=args,
            task=task,
            train_dataset=data["train"],
            eval_dataset=dev,
            data_collator=task.collate,
            compute_metrics=lambda prediction: task.score(prediction.predictions, dev),
            optimizer_cls_and_kwargs=optimizer,
            callbacks=[Watcher(Path(args.output_dir), progress)],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def write_log(state: TrainerState, output: Path) -> None:
    """Writes the training log, one JSON object a line."""
    lines = "".join(json.dumps(entry) + "\n" for entry in state.log_history)
    (output / LOG).write_text(lines, encoding="utf-8")


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    task: Task,
    recipe: Recipe,
    trainer: BertTrainer,
    data: dict[str, Any],
    examples: Mapping[str, Any],
    tokenizer: Any,
    output: Path,
) -> dict[str, Any]:
    """The scores of a trained model; saves it, and the first process writes the rest of the directory."""
    metrics: dict[str, Any] = {}
    for split in task.splits:
        summaries = trainer.predict(data[split]).predictions
        prefix = "" if split == task.splits[0] else f"{split}_"
        metrics |= {prefix + name: value for name, value in task.score(summaries, data[split]).items()}
    metrics |= list_start(trainer.state.log_history) | task.baseline(data["train"], data[task.splits[0]])
    metrics["score"] = metrics[task.metric]
    metrics["updates"] = trainer.state.global_step
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        write_results(task, recipe, trainer, metrics, examples, tokenizer, output)
    trainer.accelerator.wait_for_everyone()
    return metrics


def write_results(
    task: Task,
    recipe: Recipe,
    trainer: BertTrainer,
    metrics: dict[str, Any],
    examples: Mapping[str, Any],
    tokenizer: Any,
    output: Path,
) -> None:
    """Writes log, card and predictions to look at beside the saved model, and last the metrics."""
    (output / "training_args.bin").unlink(missing_ok=True)  # a pickle; recipe.toml says the same
    write_log(trainer.state, output)
    # What was saved is what is shown, and it is whole where training has sharded it.
    model = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(output).eval()
    card = write_card(task, str(output), recipe, metrics, describe_environment(), model)
    (output / "README.md").write_text(card, encoding="utf-8")
    if task.illustrate is not None:
        lines = task.illustrate(model, tokenizer, examples)
        (output / "predictions").mkdir(exist_ok=True)
        (output / EXAMPLES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_json(metrics, output / METRICS)


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
            plan["parameters"] = count_parameters(make_model(task, recipe, task.configure(recipe, None, None)))
    plan["sequences_per_update"] = recipe["batch_size"]
    plan["per_device_batch"] = args.per_device_train_batch_size
    plan["accumulation"] = args.gradient_accumulation_steps
    plan["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if args.max_steps > 0:
        plan["updates"] = args.max_steps
    return plan
