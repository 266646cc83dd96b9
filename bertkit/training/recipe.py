"""How one run is done: a recipe, made once and trusted everywhere else.

A recipe has a few top-level keys, the tables `[model]` (BertConfig), `[data]` (the task's options) and `[train]`
(`transformers.TrainingArguments`, plus BERT's own Adam), and for pretraining the `[[phase]]` tables (paper A.2: a
length and its share of the steps). Names from a library are kept, and values are checked against its annotations. Saved
as TOML, a recipe repeats its run.

Left out: the effect of the values (the task's and `run.py`'s business), whether they fit the network (`network.py`),
and every command-line option except `--set`.
"""

import contextlib
import dataclasses
import datetime
import difflib
import inspect
import math
import tomllib
from collections.abc import Mapping, Sequence
from enum import EnumType
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from bertkit.errors import UsageError, locate_refusal, make_printable
from bertkit.system.differences import LONGEST_NAME, LONGEST_TEXT, expand_recipe, show_toml
from bertkit.system.files import atomic_write
from bertkit.system.hub import check_checkpoint, check_path
from bertkit.tasks import TASKS
from bertkit.tasks.option import check_range, reads_own_data
from bertkit.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RecipePart = dict[str, Any]  # some keys of a recipe, as `tomllib` returns them
TABLES = ("model", "data", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete and checked recipe; use `Recipe.make`."""

    task: str  # a name in TASKS
    checkpoint: str = ""
    batch_size: int
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    preset: Literal["auto", "paper", "stable"] = "paper"
    freeze: Literal["encoder"] | None = None
    bilstm: bool = False
    reinit_layers: int = 0
    patience: int = 0
    calibrate: bool = False
    baseline: bool | None = None
    # Whether the head that a training of texts or words starts from is solved, or random; auto: by the data
    start: Literal["auto", "solved", "random"] = "random"
    strength: float = 0.0  # C of the solved head; 0: chosen by folds over the training rows
    stop_after: int = 0  # the update after which the training ends, before the end of its schedule; 0: at the end
    # The keys that the data have decided: of `train`, `strength`, `start`, and `pooling` of `data`
    settled: list[str] = dataclasses.field(default_factory=list)
    model: Mapping[str, Any]  # model, data, train: The tables; nobody changes them
    data: Mapping[str, Any]
    phase: Sequence[Mapping[str, Any]] = ()
    train: Mapping[str, Any]
    # The values that a person gave
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def make(
        cls,
        task: Task,
        *given: Mapping[str, Any],
        where: str = "recipe",
        config: "PreTrainedConfig | None" = None,
        fits_model: bool = True,
    ) -> "Recipe":
        """Make the recipe of a run from what a person gives, and check all that can be checked without data.

        Precedence: the paper's recipe < the preset < what given options imply < `given`, later ones first. The preset
        is `auto` for a person's own data, else `paper`. A `max_length` that is not given is at most the model's.

        Args:
            where: Prefix of the messages about keys and values, for example a file name.
            config: Configuration of the checkpoint, if that does not exist yet.
            fits_model: Whether the checkpoint and the network are checked too, which are not needed to read data.
        """
        own = check(merge(*given), task, where)
        if own.get("task", task.name) != task.name:
            raise UsageError(
                f"the recipe is for the task {own['task'][:40]!r}, not {task.name!r}; use the command of that task"
            )
        usual = apply_preset(task, own)
        recipe = cls(**merge(usual, own), given=own)
        asked = {**recipe.data, **own}
        implied = [changes for key, changes in task.implied.items() if asked.get(key) and not recipe.is_solved]
        recipe = cls(**merge(usual, *implied, own), given=own)
        task.check(recipe)
        recipe.check_schedule()
        if fits_model:
            from bertkit.training.network import fit_model  # after the other checks, because torch takes seconds

            recipe = fit_model(task, recipe, config)
        return recipe

    def check_schedule(self) -> None:
        """Check that the phases, the length of the training and its evaluations fit together."""
        total = math.fsum(phase["share"] for phase in self.phase)
        if self.phase and not abs(total - 1) <= 1e-6:
            raise UsageError(f"the shares of the [[phase]] tables add up to {total:g}; they must add up to 1")
        if self.patience and self.train.get("eval_strategy", "no") == "no":
            raise UsageError(
                f"patience is {self.patience}, but nothing is evaluated during training; set eval_strategy in [train] "
                "to epoch or steps, or remove patience"
            )

    def to_dict(self) -> RecipePart:
        """Return the recipe as in TOML, without the keys that ask for nothing."""
        keys = {key: getattr(self, key) for key in TOP_KEYS}
        kept = {key: value for key, value in keys.items() if value or value not in (getattr(Recipe, key, None), [])}
        phases = {"phase": list(map(dict, self.phase))} if self.phase else {}
        return kept | {table: dict(getattr(self, table)) for table in TABLES} | phases

    @property
    def is_solved(self) -> bool:
        """Return whether the head is linear on the vectors of a frozen encoder, and is solved instead of trained."""
        return bool(self.freeze and not self.bilstm and TASKS[self.task].solves_head)

    @property
    def starts_solved(self) -> bool:
        """Return whether the head that is trained, or used without a training, is solved first."""
        return self.is_solved or self.start != "random"

    @property
    def lengths(self) -> list[int]:
        """Return the maximum sequence length in tokens of each phase, or of the run; 0 if the task has none."""
        return [phase["max_length"] for phase in self.phase] or [self.data.get("max_length", 0)]


def make_first(recipe: Recipe) -> Recipe | None:
    """Return the recipe of the training on `extra_train`, which comes before; None without one (section 4.2)."""
    if not (source := recipe.data.get("extra_train")):
        return None
    data = {**recipe.data, "train_file": source, "extra_train": "", "max_train_samples": 0}
    # The rows of the run have settled these; those of the training before it settle their own.
    train = {key: value for key, value in recipe.train.items() if key not in recipe.settled}
    return dataclasses.replace(recipe, data=data, train=train, settled=[])


# Names that other programs have for keys -> table and key.
ALIASES = {
    "epochs": ("train", "num_train_epochs"),
    "steps": ("train", "max_steps"),
    "lr": ("train", "learning_rate"),
    "bs": ("", "batch_size"),
}
TOP_KEYS = {key: hint for key, hint in get_type_hints(Recipe).items() if key not in (*TABLES, "phase", "given")}
# Table -> key -> range of the value: lower bound (included), upper bound (excluded).
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "": {
        "batch_size": (1, math.inf),
        **dict.fromkeys(("reinit_layers", "patience", "stop_after", "strength"), (0, math.inf)),
    },
    "train": {
        **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"), (0, math.inf)),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1)),
        # Steps: a whole number, or a fraction of all steps.
        **dict.fromkeys(("warmup_steps", "eval_steps", "logging_steps", "save_steps"), (0, math.inf)),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, 10**9)),
        "seed": (0, 2**32),
        "max_steps": (-1, 10**9),
        "num_train_epochs": (0, 10**6),
        "dataloader_num_workers": (0, 1024),
        "ddp_timeout": (1, 10**9),
    },
}

# Keys of [train] that the preset `auto` leaves open until the rows are known (`bertkit.training.facts`).
ADAPTED = ("optim", "learning_rate", "num_train_epochs")
# Keys that a recipe may leave open -> the value that leaves it; None: the key is absent.
OPEN = {**dict.fromkeys(ADAPTED), "pooling": "auto", "strength": 0.0, "start": "auto", "max_tokens": 0}
# Instead of an evaluation and a checkpoint in each of many short epochs: shares of all updates.
FIVE_TIMES = {"eval_strategy": "steps", "eval_steps": 0.2, "save_strategy": "steps", "save_steps": 0.2}

# These schedules need an evaluation loss, which is not computed.
LEARNED_SCHEDULES = {"reduce_lr_on_plateau", "greedy"}

DECIDED = (
    "resume_from_checkpoint do_train do_eval do_predict ignore_data_skip dataloader_persistent_workers save_only_model "
    "local_rank parallelism_config dataloader_drop_last eval_do_concat_batches remove_unused_columns "
    "label_smoothing_factor use_liger_kernel"
)
# Keys of [train] that the user may not set -> the remedy. The last two are names of transformers 4.
RESERVED = {
    **dict.fromkeys(DECIDED.split(), "bertkit decides it"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "auto_find_batch_size"),
        "set batch_size at the top level, and per_device_train_batch_size to what fits in memory",
    ),
    **dict.fromkeys(
        ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"),
        'set precision at the top level, for example precision = "bf16"',
    ),
    "output_dir": "use --output",
    "hub_token": "secrets do not belong in a recipe: log in with `hf auth login`",
    "push_to_hub": "use --push-to-hub REPO",
    "warmup_ratio": "use warmup_steps: a value below 1 is a share of all steps",
    "group_by_length": 'write train_sampling_strategy = "group_by_length"',
}


class PhaseTable(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a pretraining: its share of the updates, and its maximum sequence length in tokens."""

    share: Annotated[float, msgspec.Meta(gt=0)]
    max_length: Annotated[int, msgspec.Meta(ge=5)]  # [CLS] a [SEP] b [SEP]


def check_early(task: Task, *given: Mapping[str, Any], where: str) -> Recipe:
    """Check that the inputs of a recipe exist, and return it without `[model]` and `[train]`, which need torch."""
    others = ("model", "train", "patience")  # the last one needs [train]
    part = {key: value for key, value in merge(*given).items() if key not in others}
    recipe = Recipe.make(task, part, where=where, fits_model=False)
    check_inputs(task, recipe.data, recipe.checkpoint)
    return recipe


def check_inputs(task: Task, data: Mapping[str, Any], checkpoint: Any = "") -> None:
    """Check that the files in `[data]` exist, and then that the checkpoint does."""
    own = "owner/name" if reads_own_data(task.options) else ""
    forms = {"corpus": "name", "vocab": "name", "dir": own}
    for key in (key for key, option in task.options.items() if option.is_input):
        value = data.get(key) or []
        for source in [value] if isinstance(value, str) else value:
            check_path(source, forms.get(key, ""))
    if isinstance(checkpoint, str):  # an axis of a study is a list
        check_checkpoint(checkpoint)


def read_recipe(path: str | Path) -> RecipePart:
    """Read a recipe from a TOML file without checking it, with `~` expanded as in `merge`."""
    try:
        recipe = merge(tomllib.loads(Path(path).read_bytes().decode("utf-8-sig")))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"recipe {path} cannot be read ({reason}); give a file in TOML (https://toml.io)") from None
    data = recipe.get("data")
    if isinstance(data, dict) and "held_back" in data:  # a run of an earlier version
        data["trial_rows"] = data.pop("held_back")
        if "start" not in recipe:
            recipe["start"] = "random"
            if "freeze" not in recipe:
                data.pop("pooling", None)
    return recipe


def load_recipe(path: str | Path) -> Recipe:
    """Read the recipe of a run, whose checkpoint and data need not exist any more."""
    saved = read_recipe(path)
    saved.pop("pace", None)  # the learning rate of a budget in earlier versions
    if (task := TASKS.get(str(saved.get("task")))) is None:
        raise UsageError(f"{path} names the unknown task {saved.get('task')!r}; correct it")
    own = check(saved, task, str(path))
    return Recipe(**merge(apply_preset(task, own), own), given=own)


def apply_preset(task: Task, own: Mapping[str, Any]) -> RecipePart:
    """Return the task's recipe as the preset of a given recipe changes it."""
    adapts = "num_train_epochs" in task.recipe["train"]
    source = own.get("data", {}).get("dir", "")
    preset = own.get("preset") or ("auto" if adapts and not task.is_official(source) else "paper")
    if preset == "stable":
        return merge(task.recipe, task.stable, {"preset": preset})
    if preset == "paper":
        return merge(task.recipe, {"preset": preset})
    if not adapts:
        raise UsageError(f"preset auto is for fine-tuning; {task.name} has paper and stable")
    fixed = {key: value for key, value in task.recipe["train"].items() if key not in ADAPTED}
    rhythm = FIVE_TIMES if fixed["eval_strategy"] == "epoch" else {}
    data, has_features = task.recipe["data"], own.get("data", {}).get("features")
    if "order" in data and not has_features:
        data = {**data, "order": "documents"}
    is_random = own.get("bilstm") or own.get("reinit_layers") or has_features or not task.solves_head
    is_random = is_random or own.get("data", {}).get("long") == "max"
    start = own.get("start") or ("random" if is_random else "auto")
    is_evaluated = own.get("patience") or own.get("train", {}).keys() & {"load_best_model_at_end", "eval_steps"}
    if start != "random" and not is_evaluated:
        rhythm = {**rhythm, "eval_strategy": "no"}  # start and end are compared, and nothing between them
    return {**task.recipe, "preset": preset, "start": start, "data": data, "train": fixed | rhythm}


def resolve(recipe: Recipe, facts: Mapping[str, Any]) -> Recipe:
    """Return the recipe with what only the data, the machine, a clock or an earlier start of the same run know.

    Args:
        facts: Key of any table -> value. A key in OPEN gets it only where it is open, and is then `settled`.
    """
    top = {key: getattr(recipe, key) for key in TOP_KEYS}
    data, train, settled = dict(recipe.data), dict(recipe.train), list(recipe.settled)
    for key, value in facts.items():
        table = next((table for table in (top, data) if key in table), train)
        if key in OPEN and table.get(key) != OPEN[key]:
            continue
        table[key] = value
        if key in OPEN and key != "max_tokens":  # the machine decides that one
            settled.append(key)
    return dataclasses.replace(recipe, **top | {"data": data, "train": train, "settled": settled})


def list_settled(recipe: Recipe) -> dict[str, Any]:
    """Return the facts that an earlier start has settled, for another start of the same run."""
    values = {**recipe.train, **recipe.data, **{key: getattr(recipe, key) for key in TOP_KEYS}}
    return {key: values[key] for key in (*recipe.settled, "max_tokens") if key in values}


def parse_setting(text: str) -> RecipePart:
    """Return a recipe that holds the single key of a `--set [table.]key=value`.

    The value is parsed as TOML; invalid TOML and dates are taken as text. In a study the key may begin with
    `pretrain.`, and then belongs to the pretraining runs.
    """
    name, equals, value = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys) or len(keys) > (3 if keys[0] == "pretrain" else 2):
        raise UsageError(
            f"--set {text!r} is not [table.]key=value; write for example train.learning_rate=1e-4 or batch_size=16"
        )
    table: RecipePart = {keys[-1]: _parse_value(value.strip())}
    for key in reversed(keys[:-1]):
        table = {key: table}
    return table


def merge(*recipes: Mapping[str, Any]) -> RecipePart:
    """Merge recipes into a new one; later recipes take precedence.

    `[model]`, `[data]` and `[train]` are merged key by key; any other value (a list, the phases, a table inside
    `[train]`) replaces the earlier one entirely. None means "not given" and replaces nothing. Text that begins with
    `~` or `~user` is expanded as a path; `fp16 = true` and `bf16 = true` are read as `precision`.
    """
    merged: RecipePart = {}
    for given in recipes:
        recipe = name_precision(expand_recipe(given))
        for key, value in recipe.items():
            if key in TABLES and isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] |= value
            else:
                merged[key] = value
    return merged


def name_precision(recipe: RecipePart) -> RecipePart:
    """Write `fp16 = true` or `bf16 = true`, at the top level or in `[train]`, as `precision`; return the recipe."""
    for table in (recipe, recipe.get("train")):
        for name in ("bf16", "fp16"):
            if isinstance(table, dict) and table.get(name) is True:
                del table[name]
                if (other := recipe.setdefault("precision", name)) != name:
                    raise UsageError(f"precision is given twice, as {name} and as {show_toml(other)}; keep one of them")
    return recipe


def check(part: Mapping[str, Any], task: Task, where: str = "recipe") -> RecipePart:
    """Check the keys, types and ranges of a part of a recipe, and return it with integers converted to float.

    transformers is imported last, and only for a `[model]` or `[train]`, which takes a second or two.

    Args:
        task: Its options are the keys of `[data]`.
        where: Prefix of the messages, for example a file name.
    """
    part = merge(part)
    tables = {table: part.pop(table) for table in ("data", "model", "train") if table in part}
    with locate_refusal(where):
        checked = _check_table("", part, task)
        return checked | {table: _check_table(table, values, task) for table, values in tables.items()}


def check_value(key: str, value: Any, hint: Any, prefix: str = "") -> Any:
    """Return the value of a key, converted to the type of the hint."""

    def convert(value: Any, strict: bool) -> Any:
        return msgspec.to_builtins(msgspec.convert(value, hint, strict=strict))

    try:
        if (found := convert(value, strict=True)) == found:
            return found
        wanted = "expected a number"
    except msgspec.ValidationError as error:
        wanted = reword(error)
    choices = [choice for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        wanted = f"expected one of {', '.join(map(str, choices))}"
    text = "" if isinstance(value, dict | list) else str(value)
    for reading in (value, text.lower(), [value], *difflib.get_close_matches(text, map(str, choices), n=1)):
        with contextlib.suppress(msgspec.ValidationError):
            if (found := convert(reading, strict=False)) == found:
                wanted += f"; write {key} = {show_toml(found)}"
                break
    raise UsageError(f"{prefix}{key} = {show_toml(value)}; {wanted}")


def reword(error: msgspec.ValidationError) -> str:
    """Return msgspec's message in the words of TOML."""
    text = make_printable(str(error))[: 2 * LONGEST_TEXT].replace("`", "").replace(" | null", "")
    return (text[0].lower() + text[1:]).replace("array", "list").replace("object", "table")


def save_recipe(recipe: Mapping[str, Any], path: str | Path) -> None:
    """Write a recipe atomically, so that `read_recipe` returns an equal one.

    Order: top-level keys, `[model]`, `[data]`, `[[phase]]`, `[train]`. TOML has no null, so keys that are None are left
    out.
    """
    import tomli_w

    recipe = expand_recipe(recipe)
    phases, train = recipe.pop("phase", []), recipe.pop("train", {})
    listed = ["[[phase]]\n" + tomli_w.dumps(phase) for phase in phases]
    order = [key for key in (*TOP_KEYS, "model", "data") if key in recipe]
    first = tomli_w.dumps({key: recipe[key] for key in order} | recipe)
    last = tomli_w.dumps({"train": train} if train else {})
    atomic_write("\n".join(filter(None, [first, *listed, last])), Path(path))


def split_batch(batch_size: int, *, processes: int, per_device: int | None = None) -> tuple[int, int]:
    """Return `(per_device_train_batch_size, gradient_accumulation_steps)` for each process.

    Args:
        batch_size: Sequences per update over all processes, as in the paper.
        per_device: Sequences per micro-batch; None disables accumulation.
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


@cache
def _list_library_fields(table: str) -> dict[str, Any]:
    """Return the type of each key of `[model]` or `[train]`."""
    if table == "model":
        from bertkit.model.config import BertConfig

        fields = inspect.get_annotations(BertConfig, eval_str=True) | {"attn_implementation": str}
        return {key: _simplify(hint) for key, hint in fields.items()}
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames, TrainingArguments

    fields = get_type_hints(TrainingArguments)
    for field in dataclasses.fields(TrainingArguments):
        if choices := field.metadata.get("choices"):
            fields[field.name] = Literal[tuple(choices)]
    fields["lr_scheduler_type"] = Literal[tuple(sorted({name.value for name in SchedulerType} - LEARNED_SCHEDULES))]
    fields["optim"] = Literal[("bert_adam", *(name.value for name in OptimizerNames))]
    return {key: _simplify(hint) for key, hint in fields.items() if key not in RESERVED}


def _list_fields(table: str, task: Task) -> dict[str, Any]:
    """Return the type of each key of a table ("" is the top level)."""
    if table == "data":
        return {key: _find_type(default) for key, default in task.recipe["data"].items()}
    return _list_library_fields(table) if table else TOP_KEYS | {"phase": list[PhaseTable]}


def _find_type(default: Any) -> Any:
    """Return the type of an option from its default: an empty list is for texts, a table also for a name."""
    if isinstance(default, list):
        return list[type(default[0]) if default else str]
    return dict[str, float] | str if isinstance(default, dict) else type(default)


def _check_table(table: str, values: Any, task: Task) -> RecipePart:
    """Check one table and return its values, converted to their types."""
    prefix = f"[{table}] " if table else ""
    values = check_value(table, values, dict) if table else values
    fields = _list_fields(table, task) if values else {}
    if unknown := [key for key in values if key not in fields]:
        raise UsageError(_explain_unknown_key(unknown[0], table, task))
    checked: RecipePart = {}
    for key, value in values.items():
        checked[key] = check_value(key, value, fields[key], prefix)
        if limits := RANGES.get(table, {}).get(key):
            check_range(f"{prefix}{key} = {show_toml(value)}", checked[key], *limits)
    return checked


def _explain_unknown_key(key: str, table: str, task: Task) -> str:
    """Return the error message for a wrong key, with the table it belongs to or the nearest key."""
    if key in RESERVED:
        return f"{key} cannot be set here; {RESERVED[key]}"
    where = {"": "at the top level", **{table: f"in [{table}]" for table in TABLES}}
    problem = f"unknown key {key[:LONGEST_NAME]!r} {where[table]}"
    for home in ("", "data", "train", "model"):
        if home != table and key in _list_fields(home, task):
            return f"{problem}; it belongs {where[home]}"
    home, name = ALIASES.get(key, ("", ""))
    if name in _list_fields(home, task):
        return f"{problem}; did you mean {name!r}{f' in [{home}]' if home else ''}?"
    names = [*_list_fields(table, task), *(() if table else TABLES)]
    options = () if table else _list_fields("data", task)  # as keywords of bertkit.train
    if nearest := difflib.get_close_matches(key, [*names, *options], n=1):
        place = "" if nearest[0] in names else " in [data]"
        return f"{problem}; did you mean {nearest[0]!r}{place}?"
    source = {"model": "the fields of bertkit.BertConfig", "train": "the arguments of transformers.TrainingArguments"}
    return f"{problem}; expected {source.get(table) or ', '.join(names)}"


def _simplify(hint: Any) -> Any:
    """Return the type of a library's key for msgspec: an enumeration's values, and float for a float or an int."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if enums := [member for member in members if isinstance(member, EnumType)]:
        return Literal[tuple(choice.value for choice in enums[0])]
    return Union[tuple(member for member in members if member is not int or float not in members)]  # noqa: UP007


def _parse_value(text: str) -> Any:
    """Parse a TOML value; return the text itself if it is not TOML or a date."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    # A line break in the text could add further keys.
    return text if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time) else parsed["value"]
