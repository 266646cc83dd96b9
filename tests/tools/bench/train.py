"""Train here and with plain transformers: speed and memory of pretraining (pretrain, mlm) and of fine-tuning on a task.

    python -m tests.tools.bench train pretrain --size small
    python -m tests.tools.bench train rte --model MINILM --data GLUE

Without --data, pretraining reads installed documentation, and fine-tuning has random tokens with the lengths of MRPC.
Every side trains on the same rows for one epoch through its Trainer, from the same weights and with the same arguments;
the seconds are the Trainer's `train_runtime`. Without dropout, both sides must have the same losses in every update,
which is checked first. The memory is what updates add to the loaded weights.

The sides of plain transformers: the same batches; rows sorted by length, within 50 batches; as in its examples, fp32
and padded to the full length; on CUDA also flash attention, and for heads that label tokens (mlm, ner) no padding at
all (`DataCollatorWithFlattening`); with --compile also compiled, with --compile ours only this package's layers.
"""

import argparse
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback
from transformers.masking_utils import flash_attention_mask

from bertkit.data.sequences import IGNORED, collate
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.model.precision import choose_device, choose_precision
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task
from bertkit.training.arguments import make_arguments
from bertkit.training.network import compile_layers, make_model
from bertkit.training.prepare import prepare
from bertkit.training.recipe import TABLES, Recipe
from bertkit.training.run import make_trainer
from tests.tools.bench.measure import BERTKIT, Record, measure_growth, say
from tests.tools.bench.model import SEED, SIZES, choose_size, write_classifier

SAME_BATCHES = "transformers, the same batches"
SORTED = "the same, rows sorted by length"
EXAMPLE = "as in its examples, fp32, padded to the full length"
COMPILED, OURS_COMPILED = "its best, compiled", "bertkit, compiled layers"
FLASH = "flash_attention_2"  # also the name of stock's attention
FLATTENED = "without padding, flash attention"
FLAT_KERNEL = "flat"  # the name of an attention that is registered here
FLATTENABLE = ("BertForMaskedLM", "BertForTokenClassification")  # heads that read no [CLS]
OBJECTIVES = {"pretrain": "mlm+nsp", "mlm": "mlm"}  # names of pretraining
WARM_UP, MEMORY, COMPARED = 4, 2, 50  # updates at most: before timing, of which memory is measured, whose losses count
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # mean difference that rounding may explain
LENGTH, SPREAD, SHORTEST, LONGEST = 53.0, 16.0, 8, 128  # tokens of a made row: mean, deviation, least, most
TAGS, TAGGED = 9, 0.7  # kinds of tags, as in CoNLL-2003, and the share of tokens that begin a word
STOCK_OPTIMIZER = {"optim": "adamw_torch_fused"}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ONLY_TRAIN = {"eval_strategy": "no", "eval_on_start": False, "save_strategy": "no", "logging_steps": 1, "seed": SEED}
TINY = {"size": "tiny", "batch_size": 4, "updates": 2, "repeats": 1, "characters": 200_000, "precision": "auto"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    size = "base" if torch.accelerator.is_available() else "small"
    parser.add_argument("task", metavar="TASK", help="pretrain, mlm, or a task of --data; without it mrpc or ner")
    parser.add_argument("--data", default="", metavar="DIR", help="text to pretrain on, or the task's official files")
    parser.add_argument("--model", metavar="NAME|RUN", help="checkpoint to fine-tune (default: random weights)")
    parser.add_argument("--size", choices=SIZES, default=size, help="of random weights (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per update (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=8, help="of each side in a round (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=4_000_000, help="of text (default: %(default)s)")
    parser.add_argument("--precision", default="auto", help="of this package and of stock (default: %(default)s)")
    text = "also compile both sides, or only this package's layers, which takes minutes"
    parser.add_argument("--compile", nargs="?", choices=("ours", "both"), default="", const="both", help=text)


def bench(given: argparse.Namespace, record: Record) -> None:
    """Compare the losses of both sides, and then measure rates and memory, one batch per update.

    Raises:
        UsageError: The losses differ.
    """
    with TemporaryDirectory() as folder:
        training = make_pretraining(given) if given.task in OBJECTIVES else make_finetuning(given, folder)
        compare_losses(training, min(given.updates, COMPARED), record)
        sides, memory = make_sides(training, given.compile), {}
        count = len(training.rows)
        for name, side in sides.items():
            say(f"  {name}: warm-up and memory")
            side.train(min(WARM_UP, given.updates))
            memory[name] = measure_growth(partial(side.train, min(MEMORY, given.updates)), choose_device())
        tokens = sum(batch["attention_mask"].sum().item() for batch in training.load())
        record.facts |= {"updates": given.updates, "tokens per sequence": tokens / count, "memory": memory}
        title = f"Sequences of {given.task}"
        record.columns[title] = {
            "precision": {name: side.precision for name, side in sides.items()},
            "memory beyond the weights, MiB": {name: f"{size / 2**20:,.0f}" for name, size in memory.items()},
        }
        calls = {name: lambda side=side: count / side.train(given.updates)[0] for name, side in sides.items()}
        record.alternate(title, calls, given.repeats)


# --- The rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A recipe, and the rows of an epoch."""

    task: Task
    recipe: Recipe
    settings: Mapping[str, Any]
    rows: Any

    def load(self) -> DataLoader:
        """Return the batches in order."""
        return DataLoader(self.rows, self.recipe.batch_size, collate_fn=collate)


def make_pretraining(given: argparse.Namespace) -> Training:
    """Return a pretraining from random weights."""
    data = {"corpus": [given.data or "docs"], "objective": OBJECTIVES[given.task], "limit_characters": given.characters}
    recipe = {
        "batch_size": given.batch_size,
        "precision": given.precision,
        "model": choose_size(given.size) | {"vocab_size": 30_522, "max_position_embeddings": LONGEST},
        "data": data | {"vocab_size": 8192, "max_length": LONGEST},
        "train": {"max_steps": given.updates, "warmup_steps": 0.1},
    }
    recipe = Recipe.make(TASKS["pretrain"], recipe)
    prepared = prepare(recipe, say)
    return Training(TASKS["pretrain"], recipe, prepared.settings, prepared.data["train"])


def make_finetuning(given: argparse.Namespace, folder: str) -> Training:
    """Return a fine-tuning on rows of a task's data, chosen at random and held in memory, or on made rows.

    Raises:
        UsageError: The data have too few rows.
    """
    task, count = TASKS[given.task], given.updates * given.batch_size
    start = given.model or write_classifier(folder, given.size)
    recipe = {"checkpoint": start, "batch_size": given.batch_size, "precision": given.precision}
    recipe |= {"data": {"dir": given.data}}
    recipe = Recipe.make(task, recipe)
    if given.data:
        prepared = prepare(recipe, say)
        rows, settings = prepared.data["train"], prepared.settings
        if len(rows) < count:
            raise UsageError(
                f"{given.task} has {len(rows):,} rows in {given.data}, fewer than {count:,}; lower --updates"
            )
        rows = [rows[index] for index in np.random.default_rng(SEED).permutation(len(rows))[:count].tolist()]
    else:
        rows = make_rows(load_tokenizer(start), count, task.name == "ner")
        settings = {"num_labels": TAGS} if task.name == "ner" else {}
    return Training(task, recipe, settings, rows)


def make_rows(tokenizer: Any, count: int, is_tagged: bool) -> list[dict[str, Any]]:
    """Make pairs with a class, or single texts with tags."""
    random, rows = np.random.default_rng(SEED), []
    for length in random.normal(LENGTH, SPREAD, count).round().clip(SHORTEST, LONGEST).astype(int):
        second = 0 if is_tagged else length // 2
        ids, types = random.integers(len(tokenizer) // 2, len(tokenizer), length), np.zeros(length, np.int64)
        ids[[0, length - second - 1, -1]] = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id
        types[length - second :] = 1
        labels = random.integers(2)
        if is_tagged:
            labels = np.where(random.random(length) < TAGGED, random.integers(TAGS, size=length), IGNORED)
            labels[[0, -1]] = IGNORED
        rows.append({"input_ids": ids, "token_type_ids": types, "labels": labels})
    return rows


def replace_tables(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other values, as `tests.world.replace_values`, which needs typer."""
    tables = {name: {**getattr(recipe, name), **changes[name]} for name in TABLES if name in changes}
    return replace(recipe, **changes | tables)


# --- The sides --------------------------------------------------------------------------------------------------------


class Side:
    """A model that is trained from the same weights every time.

    Args:
        collate: The collator for plain transformers' Trainer; None uses this package's Trainer.
    """

    def __init__(self, training: Training, model: PreTrainedModel, recipe: Recipe, collate: Any = None) -> None:
        self.training, self.model, self.recipe, self.collate = training, model, recipe, collate
        self.weights = deepcopy(model.state_dict())
        self.precision = choose_precision(recipe.precision)

    def train(
        self, updates: int, logs: bool = False, callback: TrainerCallback | None = None
    ) -> tuple[float, list[float]]:
        """Return the seconds of some updates, and their losses if these are logged."""
        self.model.load_state_dict(self.weights)
        self.model.zero_grad(set_to_none=True)
        train = ONLY_TRAIN | {"max_steps": updates, "logging_strategy": "steps" if logs else "no"}
        recipe, task, rows = replace_tables(self.recipe, train=train), self.training.task, self.training.rows
        with TemporaryDirectory() as folder:
            transformers.set_seed(SEED)
            args = make_arguments(recipe, Path(folder))
            if self.collate is None:
                trainer = make_trainer(task, self.model, args, {"train": rows}, recipe, ignore, ignore)
            else:
                trainer = Trainer(model=self.model, args=args, train_dataset=rows, data_collator=self.collate)
                trainer.remove_callback(PrinterCallback)
            if callback is not None:
                trainer.add_callback(callback)
            try:
                seconds = trainer.train().metrics["train_runtime"]  # without the Trainer's preparation
            except Interrupted:
                raise KeyboardInterrupt from None
        return seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def load_both(training: Training, recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load this package's model and plain transformers' class of the same name, with the same weights."""
    torch.manual_seed(SEED)
    ours = make_model(training.task, recipe, training.settings)
    stock = getattr(transformers, type(ours).__name__)
    with TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        return ours, stock.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def compare_losses(training: Training, updates: int, record: Record) -> None:
    """Compare the losses of both sides in every update without dropout, and of stock without padding where it runs.

    Raises:
        UsageError: They differ by more than rounding explains, so timings would not be of the same training.
    """
    recipe = replace_tables(training.recipe, model=STILL, train=STOCK_OPTIMIZER)
    ours, stock = load_both(training, recipe)
    sides = {BERTKIT: Side(training, ours, recipe)} | make_flattened(training, stock, recipe)
    exact = Side(training, stock, recipe, collate).train(updates, logs=True)[1]
    for name, side in sides.items():
        losses = side.train(updates, logs=True)[1]
        apart = fmean(abs(one - other) for one, other in zip(losses, exact, strict=True))
        record.facts[f"loss difference, {name}"] = apart
        say(f"  losses of {updates} updates without dropout, {name}: {fmean(losses):.4f}, mean difference {apart:.1e}")
        if not apart <= LOSS_TOLERANCE[side.precision]:
            raise UsageError(f"the losses of {name} differ by {apart:.1e} on average: it does not train the same model")


def make_sides(training: Training, compiled: str) -> dict[str, Side]:
    """Return this package's side and those of plain transformers that run here."""
    recipe = training.recipe
    ours, stock = load_both(training, recipe)
    plain = replace_tables(recipe, train=STOCK_OPTIMIZER)
    full = partial(collate_full, collate, recipe.data["max_length"])
    sides = {
        BERTKIT: Side(training, ours, recipe),
        SAME_BATCHES: Side(training, stock, plain, collate),
        EXAMPLE: Side(training, stock, replace_tables(plain, precision="fp32"), full),
    }
    is_ordered = recipe.train.get("train_sampling_strategy") == "sequential"
    best, at_best = plain, full  # one length, so that the model is compiled once
    if not is_ordered:
        best, at_best = replace_tables(plain, train={"train_sampling_strategy": "group_by_length"}), collate
        sides[SORTED] = Side(training, stock, best, collate)
    if choose_device().type == "cuda":
        kernel = methodcaller("set_attn_implementation", FLASH)
        sides |= try_side(FLASH, training, stock, kernel, best, collate)
    sides |= make_flattened(training, stock, plain)
    if compiled == "both":
        sides |= try_side(COMPILED, training, stock, methodcaller("compile", dynamic=not is_ordered), best, at_best)
    if compiled:
        sides |= try_side(OURS_COMPILED, training, ours, compile_layers, recipe)
    return sides


def try_side(
    name: str, training: Training, model: PreTrainedModel, change: Callable, recipe: Recipe, collate: Any = None
) -> dict[str, Side]:
    """Return a side of a changed copy of a model, if it can do an update here; else say that it cannot."""
    other = deepcopy(model)
    try:
        change(other)
        side = Side(training, other, recipe, collate)
        side.train(1)
    except Exception as error:  # compilers and kernels raise errors of many kinds
        say(f"  left out, because it does not run here: {name} ({type(error).__name__})")
        return {}
    return {name: side}


def collate_full(collate: Callable, length: int, items: Any) -> dict[str, Tensor]:
    """Return the batch, padded to (B, length) as in example scripts; the added padding has no labels."""
    batch = collate(items)
    missing = length - batch["input_ids"].shape[1]
    return {
        name: F.pad(column, (0, missing), value=IGNORED if name == "labels" else 0) if column.dim() == 2 else column
        for name, column in batch.items()
    }


# --- Plain transformers without padding -------------------------------------------------------------------------------


def make_flattened(training: Training, stock: PreTrainedModel, recipe: Recipe) -> dict[str, Side]:
    """Return stock without padding, if the head allows it and it runs here.

    Its rows are made beforehand, with the masks that other sides draw on the way.
    """
    if type(stock).__name__ not in FLATTENABLE:
        return {}
    rows = [
        {name: batch[name][number][real] for name in ("input_ids", "token_type_ids", "labels")}
        for batch in training.load()
        for number, real in enumerate(batch["attention_mask"].bool())
    ]
    kernel = methodcaller("set_attn_implementation", FLAT_KERNEL)
    return try_side(FLATTENED, replace(training, rows=rows), stock, kernel, recipe, flatten)


def flatten(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return rows as one sequence (1, N) with its bounds, and the token types, which stock's collator leaves out."""
    types = torch.cat([row["token_type_ids"] for row in rows])[None]  # (1, N)
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows) | {"token_type_ids": types}


def attend_flat(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute flash attention within the bounds that `flatten` gives, with torch's kernel: it needs no package."""
    states = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, A, D)
    bounds = (kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    options = {"return_debug_mask": False, "scale": kwargs["scaling"]}
    mixed = torch.ops.aten._flash_attention_forward(*states, *bounds, kwargs["dropout"], False, **options)[0]
    return mixed[None], None  # (1, N, A, D)


transformers.AttentionInterface.register(FLAT_KERNEL, attend_flat)
transformers.AttentionMaskInterface.register(FLAT_KERNEL, flash_attention_mask)
