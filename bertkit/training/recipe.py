"""How one run is done: a recipe in TOML, read, merged, checked and saved.

A recipe is the plain nested dictionary that `tomllib` returns: a few top-level keys, the tables `[model]` (BertConfig),
`[data]` (the task's options) and `[train]` (`transformers.TrainingArguments`, plus BERT's own Adam), and for
pretraining the `[[phase]]` tables (paper A.2: a length and its share of the steps). Names from a library are
kept, and values are checked against the library's annotations. A merged and checked recipe holds all that a run needs:
saved, it repeats the run.

Left out: the effect of the values (the task's and `run.py`'s business), whether the sizes in `[model]` fit together
(`bertkit.model.config`), and every command-line option except `--set`.
"""

import ast
import contextlib
import dataclasses
import datetime
import difflib
import inspect
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from enum import EnumType
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from bertkit.errors import UsageError
from bertkit.system.differences import LONGEST_NAME, LONGEST_TEXT, expand_recipe, show_toml
from bertkit.system.files import atomic_write
from bertkit.tasks.option import check_range

Recipe = dict[str, Any]
PACKAGE = Path(__file__).parents[1]  # has a link to recipes/, in a wheel a copy

TOP_KEYS = {
    "task": str,
    "checkpoint": str,
    "batch_size": int,
    "precision": Literal["auto", "fp32", "bf16", "fp16"],
    "preset": Literal["paper", "stable"],
    "freeze": Literal["encoder"],
    "bilstm": bool,
    "reinit_layers": int,
    "patience": int,
    "calibrate": bool,
    "baseline": bool,
    "pace": list[list[float]],
}
TABLES = ("model", "data", "train")
# Names that other programs have for keys -> table and key.
ALIASES = {
    "epochs": ("train", "num_train_epochs"),
    "steps": ("train", "max_steps"),
    "lr": ("train", "learning_rate"),
    "bs": ("", "batch_size"),
}
PHASE = {"share": float, "max_length": int}
# Table -> package, file and name of the class whose fields are its keys.
SOURCES = {
    "model": ("bertkit", "model/config.py", "BertConfig"),
    "train": ("transformers", "training_args.py", "TrainingArguments"),
}
# Table -> key -> range of the value: lower bound (included), upper bound (excluded).
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "": {"batch_size": (1, math.inf), "reinit_layers": (0, math.inf), "patience": (0, math.inf)},
    "phase": {"max_length": (5, math.inf)},  # [CLS] a [SEP] b [SEP]
    "train": {
        **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"), (0, math.inf)),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1)),
        # Steps: a whole number, or a fraction of all steps.
        **dict.fromkeys(("warmup_steps", "eval_steps", "logging_steps", "save_steps"), (0, math.inf)),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, 10**9)),
        "eval_accumulation_steps": (1, math.inf),
        "seed": (0, 2**32),
        "data_seed": (0, 2**32),
        "neftune_noise_alpha": (0, 10**6),
        "max_steps": (-1, 10**9),
        "num_train_epochs": (0, 10**6),
        "dataloader_num_workers": (0, 1024),
        "ddp_timeout": (1, 10**9),  # seconds; torch counts nanoseconds in 64 bits
    },
}

# These schedules need an evaluation loss, which is not computed.
LEARNED_SCHEDULES = {"reduce_lr_on_plateau", "greedy"}

# Keys of [train] that fit a run to a machine: changing them changes results only by rounding.
FITTING = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_checkpointing",
    "dataloader_num_workers",
)

# Table -> keys that earlier versions lack -> the value that matches their behaviour.
ADDED: dict[str, dict[str, Any]] = {
    "": {"patience": 0, "calibrate": False},
    "data": {"tune_share": 0.0, "held_back": 0, "unlabelled": "error"},
}

# Keys of [train] that the user may not set -> the remedy. The last two are names of transformers 4.
RESERVED = {
    "output_dir": "use --output",
    "gradient_accumulation_steps": "set batch_size at the top level: accumulation follows from it, "
    "per_device_train_batch_size and the number of processes",
    "auto_find_batch_size": "set batch_size at the top level, and per_device_train_batch_size to what fits in memory",
    **dict.fromkeys(
        ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"),
        'set precision at the top level, for example precision = "bf16"',
    ),
    "resume_from_checkpoint": "run the same command again: an unfinished run continues by itself",
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), "the command decides what is trained, evaluated and predicted"
    ),
    "ignore_data_skip": "a resumed run would see other data than an uninterrupted one",
    "dataloader_persistent_workers": "a resumed run would read its data in another order",
    "save_only_model": "a resumed run would differ from an uninterrupted one",
    "local_rank": "start the processes with torchrun or accelerate launch",
    "parallelism_config": "use an accelerate config",
    "hub_token": "secrets do not belong in a recipe: log in with `hf auth login`",
    "push_to_hub": "use --push-to-hub REPO, or upload the run directory: hf upload REPO DIR",
    "dataloader_drop_last": "every held-out text is evaluated",
    "eval_do_concat_batches": "scores are computed over all batches",
    "remove_unused_columns": "all columns of a task are arguments of its model",
    "label_smoothing_factor": "the paper has no label smoothing, and bertkit's losses do not support it",
    "use_liger_kernel": "bertkit has its own model",
    "warmup_ratio": "use warmup_steps: a value below 1 is a share of all steps",
    "group_by_length": 'write train_sampling_strategy = "group_by_length"',
}
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a TOML file without checking it, with `~` expanded as in `merge`.

    A file of recipes/ that does not exist in this directory is read from the installed package.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has two precisions.
    """
    try:
        given, installed = Path(path), PACKAGE / path
        found = installed if given.parts[:1] == ("recipes",) and installed.is_file() and not given.exists() else given
        return merge(tomllib.loads(found.read_bytes().decode("utf-8-sig")))
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UsageError as error:
        raise UsageError(f"recipe {path}: {error}") from None
    # TOMLDecodeError, an encoding other than UTF-8, a number with too many digits; lists or tables nested too deeply
    except (ValueError, RecursionError) as error:
        raise UsageError(f"recipe {path} is not TOML: {error}; correct it there (https://toml.io)") from None


def parse_setting(text: str) -> Recipe:
    """Return a recipe that holds the single key of a `--set [table.]key=value`.

    The value is parsed as TOML; invalid TOML and dates are taken as text. In a study the key may begin with
    `pretrain.`, and then belongs to the pretraining runs.

    Raises:
        UsageError: There is no `=`, no key, or more than one dot in the key.
    """
    name, equals, value = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys) or len(keys) > (3 if keys[0] == "pretrain" else 2):
        raise UsageError(
            f"--set {text[:LONGEST_TEXT]!r} is not [table.]key=value; write for example train.learning_rate=1e-4 or "
            "batch_size=16"
        )
    table: Recipe = {keys[-1]: _parse_value(value.strip())}
    for key in reversed(keys[:-1]):
        table = {key: table}
    return table


def merge(*recipes: Mapping[str, Any]) -> Recipe:
    """Merge recipes into a new one; later recipes take precedence.

    `[model]`, `[data]` and `[train]` are merged key by key; any other value (a list, the phases, a table inside
    `[train]`) replaces the earlier one entirely. None means "not given" and replaces nothing. Text that begins with
    `~` or `~user` is expanded as a path; `fp16 = true` and `bf16 = true` are read as `precision`.

    Raises:
        UsageError: A recipe has two precisions.
    """
    merged: Recipe = {}
    for recipe in map(name_precision, map(expand_recipe, recipes)):
        for key, value in recipe.items():
            if key in TABLES and isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] |= value
            else:
                merged[key] = value
    return merged


def name_precision(recipe: Recipe) -> Recipe:
    """Write `fp16 = true` or `bf16 = true`, at the top level or in `[train]`, as `precision`; return the recipe.

    Raises:
        UsageError: The recipe has two precisions.
    """
    for table in (recipe, recipe.get("train")):
        for name in ("bf16", "fp16"):
            if isinstance(table, dict) and table.get(name) is True:
                del table[name]
                if (other := recipe.setdefault("precision", name)) != name:
                    raise UsageError(f"precision is given twice, as {name} and as {show_toml(other)}; keep one of them")
    return recipe


def check(recipe: Mapping[str, Any], *, data_defaults: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check the keys, types and ranges of a recipe and return a copy with integers converted to float where needed.

    No key is required, so a recipe file can be checked as well as a merged recipe. transformers is imported only for
    the values of a `[model]` or a `[train]` whose keys are all known, which takes a second or two.

    Args:
        data_defaults: The task's options with their defaults, whose types are allowed in `[data]`; items of an empty
            list are text.
        where: Prefix of the messages, for example a file name.

    Raises:
        UsageError: A key or table is unknown, bertkit sets the key itself, a value has the wrong type or is out of
            range, or the shares of the phases do not add up to one.
    """
    recipe = merge(recipe)
    tables = {table: recipe.pop(table) for table in TABLES if table in recipe}
    phases = recipe.pop("phase", None)
    try:
        checked = _check_table("", recipe, data_defaults)
        for table, values in tables.items():
            checked[table] = _check_table(table, values, data_defaults)
        if phases is not None:
            checked["phase"] = _check_phases(phases, data_defaults)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return checked


def check_value(key: str, value: Any, annotation: Any, place: str = "") -> Any:
    """Return the value of a key, converted to the annotated type.

    Raises:
        UsageError: The value has another type; the message begins with `place`.
    """
    try:
        return _convert(value, annotation)
    except TypeError:
        remedy = _propose(key, value, annotation)
        raise UsageError(f"{place}{key} = {show_toml(value)} must be {_describe(annotation)}{remedy}") from None


def save_recipe(recipe: Mapping[str, Any], path: str | Path) -> None:
    """Write a recipe atomically, so that `read_recipe` returns an equal one.

    Order: top-level keys, `[model]`, `[data]`, `[[phase]]`, `[train]`. TOML has no null, so keys that are None are left
    out.
    """
    import tomli_w

    recipe = expand_recipe(recipe)
    tables = {table: {table: recipe.pop(table)} for table in TABLES if table in recipe}
    phases = recipe.pop("phase") if recipe.get("phase") else []  # an empty list stays a top-level key
    train = tables.pop("train", {})
    top = {key: recipe.pop(key) for key in TOP_KEYS if key in recipe} | recipe
    parts = map(tomli_w.dumps, (top, *tables.values()))
    listed = ["[[phase]]\n" + tomli_w.dumps(phase) for phase in phases]
    atomic_write("\n".join(filter(None, [*parts, *listed, tomli_w.dumps(train)])), Path(path))


def list_decisive(recipe: Mapping[str, Any]) -> Recipe:
    """Return the part of a recipe that identifies the run.

    Keys that fit it to a machine (FITTING), baselines beside it and newer keys at their defaults (ADDED) are left out.
    """

    def select(table: str, values: Mapping[str, Any]) -> Recipe:
        fitting, added = {"train": FITTING, "": ("baseline",)}.get(table, ()), ADDED.get(table, {}).items()
        return {key: value for key, value in values.items() if key not in fitting and (key, value) not in added}

    return select("", recipe) | {table: select(table, recipe[table]) for table in TABLES if table in recipe}


def list_lengths(recipe: Mapping[str, Any]) -> list[int]:
    """Return the maximum sequence length in tokens of each phase, or of the run; 0 if the task has none."""
    return [phase["max_length"] for phase in recipe.get("phase", [])] or [recipe["data"].get("max_length", 0)]


def split_batch(batch_size: int, *, processes: int, per_device: int | None = None) -> tuple[int, int]:
    """Return `(per_device_train_batch_size, gradient_accumulation_steps)` for each process.

    Args:
        batch_size: Sequences per update over all processes, as in the paper.
        per_device: Sequences per micro-batch; None disables accumulation.

    Raises:
        UsageError: The batch size is not divisible.
    """
    unit = processes * (per_device or 1)
    steps, remainder = divmod(batch_size, unit)
    if remainder:
        nearest = " or ".join(str(size) for size in (steps * unit, (steps + 1) * unit) if size)
        raise UsageError(
            f"batch_size {batch_size} cannot be divided among {processes} processes x {per_device or 1} sequences "
            f"(per_device_train_batch_size); set batch_size to {nearest}"
        )
    return (steps, 1) if per_device is None else (per_device, steps)


def _list_fields(table: str, data_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of each key of a table ("" is the top level)."""
    if table == "model":
        from bertkit.model.config import BertConfig

        return inspect.get_annotations(BertConfig, eval_str=True) | {"attn_implementation": str}
    if table == "train":
        from transformers.trainer_utils import SchedulerType
        from transformers.training_args import OptimizerNames, TrainingArguments

        fields = inspect.get_annotations(TrainingArguments, eval_str=True)
        for field in dataclasses.fields(TrainingArguments):
            if choices := field.metadata.get("choices"):
                fields[field.name] = Literal[tuple(choices)]
        schedules = {name.value for name in SchedulerType} - LEARNED_SCHEDULES
        fields["lr_scheduler_type"] = Literal[tuple(sorted(schedules))]
        fields["optim"] = Literal[("bert_adam", *(name.value for name in OptimizerNames))]
        return {key: kind for key, kind in fields.items() if key not in RESERVED}
    if table == "data":
        return {key: find_type(default) for key, default in data_defaults.items()}
    return {"": TOP_KEYS, "phase": PHASE}[table]


def _list_names(table: str, data_defaults: Mapping[str, Any]) -> list[str]:
    """Return the keys of a table."""
    names = _read_names(table) if table in SOURCES else []
    return names or list(_list_fields(table, data_defaults))


@cache
def _read_names(table: str) -> list[str]:
    """Read the keys of a class from its source, because importing it takes seconds; empty without the source."""
    package, file, name = SOURCES[table]
    with contextlib.suppress(OSError):
        path = Path(find_spec(package).origin).parent / file
        for found in ast.parse(path.read_bytes()).body:
            if isinstance(found, ast.ClassDef) and found.name == name:
                keys = [field.target.id for field in found.body if isinstance(field, ast.AnnAssign)]
                keys += ["attn_implementation"] * (table == "model")
                return [key for key in keys if key not in RESERVED]
    return []


def find_type(default: Any) -> Any:
    """Return the type of an option from its default: a list of texts if it is empty; a table, or a name for one."""
    if isinstance(default, list):
        return list[type(default[0]) if default else str]
    return dict[str, float] | str if isinstance(default, dict) else type(default)


def _check_table(table: str, values: Any, data_defaults: Mapping[str, Any]) -> Recipe:
    """Check one table and return its values, converted to their types."""
    if not isinstance(values, dict):
        raise UsageError(
            f"{table} = {show_toml(values)} must be a table; write [{table}] on its own line, with its keys below"
        )
    place = f"{_bracket(table)} " if table else ""
    names = _list_names(table, data_defaults)
    for key in [key for key in values if key not in names]:
        if key in RESERVED:
            raise UsageError(f"{place}{key} cannot be set here; {RESERVED[key]}")
        raise UsageError(_explain_unknown_key(key, table, data_defaults))
    fields = _list_fields(table, data_defaults) if values else {}
    checked: Recipe = {}
    for key, value in values.items():
        checked[key] = check_value(key, value, fields[key], place)
        if limits := RANGES.get(table, {}).get(key):
            check_range(f"{place}{key} = {show_toml(value)}", checked[key], *limits)
    return checked


def _check_phases(phases: Any, data_defaults: Mapping[str, Any]) -> list[Recipe]:
    """Check the phases, whose shares must add up to one, and return them converted to their types."""
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise UsageError("phase must be a list of tables; write [[phase]] above the share and max_length of each")
    checked = [_check_table("phase", phase, data_defaults) for phase in phases]
    for number, phase in enumerate(checked, start=1):
        if missing := PHASE.keys() - phase:
            raise UsageError(f"[[phase]] {number} has no {min(missing)}; each phase needs {' and '.join(PHASE)}")
        if phase["share"] <= 0:
            raise UsageError(f"[[phase]] {number} has share = {phase['share']}; it must be above 0")
    total = math.fsum(phase["share"] for phase in checked)
    if checked and abs(total - 1) > 1e-6:
        shares = " + ".join(str(phase["share"]) for phase in checked)
        raise UsageError(f"the shares of the [[phase]] tables are {shares} = {total:g}; they must add up to 1")
    return checked


def _explain_unknown_key(key: str, table: str, data_defaults: Mapping[str, Any]) -> str:
    """Return the error message for an unknown key, with the table it belongs to or the nearest key."""
    problem = f"unknown key {key[:LONGEST_NAME]!r} {f'in {_bracket(table)}' if table else 'at the top level'}"
    for home in ("", "data", "train", "model"):
        if home != table and key in _list_names(home, data_defaults):
            return f"{problem}; it belongs {f'in [{home}]' if home else 'at the top level, above the first table'}"
    home, name = ALIASES.get(key, ("", ""))
    if name in _list_names(home, data_defaults):
        return f"{problem}; did you mean {name!r} {f'in [{home}]' if home else 'at the top level'}?"
    names = {name: repr(name) for name in _list_names(table, data_defaults)}
    if not table:
        names |= {name: _bracket(name) for name in (*TABLES, "phase")}
    if nearest := difflib.get_close_matches(key, names, n=1):
        return f"{problem}; did you mean {names[nearest[0]]}?"
    source = {"model": "the fields of bertkit.BertConfig", "train": "the arguments of transformers.TrainingArguments"}
    return f"{problem}; expected {source.get(table) or ', '.join(names.values())}"


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have.

    An enumeration is replaced by its values. In "enumeration or str" the str is dropped, because the library converts
    such text to the enumeration; next to a float an int is dropped, because a float may be written as an int anyway.
    """
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    implied = {NoneType}
    if any(isinstance(member, EnumType) for member in members):
        implied.add(str)
    if float in members:
        implied.add(int)
    return [
        Literal[tuple(choice.value for choice in member)] if isinstance(member, EnumType) else member
        for member in members
        if member not in implied
    ]


def _convert(value: Any, annotation: Any) -> Any:
    """Return the value, converted to the annotated type.

    Raises:
        TypeError: The value has another type; `_describe` and `_propose` make the message.
    """
    for kind in _alternatives(annotation):
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin is Any:
            return value
        if origin is Literal and any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        if origin is float and type(value) is float and not math.isnan(value):
            return value
        if origin is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if origin in (bool, int, str, list, dict) and type(value) is origin:  # not isinstance: True is not an int here
            if origin is list and arguments:
                return [_convert(item, arguments[0]) for item in value]
            if origin is dict and arguments:
                return {key: _convert(item, arguments[1]) for key, item in value.items()}
            return value
    raise TypeError


def _describe(annotation: Any) -> str:
    """Return the annotation in words."""
    words = []
    for kind in _alternatives(annotation):
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin is Literal:
            words.append("one of " + ", ".join(map(str, arguments)))
        elif origin is list and arguments:
            words.append(f"a list, each item {_describe(arguments[0])}")
        else:
            words.append(TYPE_NAMES.get(origin, str(kind)))
    return " or ".join(words)


def _propose(key: str, value: Any, annotation: Any) -> str:
    """Return a remedy: the value in its correct spelling, or the nearest choice; empty if there is neither."""
    for reading in _read_otherwise(value):
        try:
            fitting = show_toml(_convert(reading, annotation))
        except TypeError:
            continue
        unquoted = isinstance(value, str) and not isinstance(reading, str | list)
        return f"; write {'it without quotes: ' * unquoted}{key} = {fitting}"
    choices = [choice for kind in _alternatives(annotation) if get_origin(kind) is Literal for choice in get_args(kind)]
    nearest = difflib.get_close_matches(str(value), map(str, choices), n=1)
    return f"; did you mean {show_toml(nearest[0])}?" if nearest else ""


def _read_otherwise(value: Any) -> Iterator[Any]:
    """Yield values that a value of the wrong type may have been meant to be."""
    if isinstance(value, str):
        yield _parse_value(value.strip().lower())  # "2e-5", "True"
        with contextlib.suppress(ValueError):
            yield float(value)  # ".5", which is not TOML
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    if not isinstance(value, list | dict | str):
        yield show_toml(value)
    yield [value]


def _parse_value(text: str) -> Any:
    """Parse a TOML value; return the text itself if it is not TOML or a date."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text could add further keys.
    return text if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time) else parsed["value"]


def _bracket(table: str) -> str:
    """Return the header of a table."""
    return "[[phase]]" if table == "phase" else f"[{table}]"
