"""The directory of a run: its files, which recipes are the same run and continue it, and its progress.

`recipe.toml`, the tokenizer and `environment.json` are written first, then checkpoints and the log, then the model with
its card and predictions, and in `best/` the model of an earlier update if that was better. `metrics.json` is written
last and atomically, so its presence means that the run is finished.
"""

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import bertkit
from bertkit.data.tokenizer import save_tokenizer
from bertkit.errors import UsageError, as_usage_error
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, check_empty, compute_checksum, map_in_threads, write_json
from bertkit.training.recipe import Recipe, RecipePart, list_settled, load_recipe, merge, resolve, save_recipe

METRICS_FILE = "metrics.json"
RECIPE_FILE = "recipe.toml"
VOCABULARY = "vocab.txt"
LOG = "training_log.jsonl"
PREDICTIONS = "predictions"
CURVES_FILE = "curves.png"
EVALUATIONS = "evaluations"  # scores on other data, each in a folder
ENVIRONMENT = "environment.json"
EVAL_RESULTS = ".eval_results"  # scores on benchmarks of the Hub, in its own form
CALIBRATION_FILE = "calibration.json"  # the conformity scores of a classifier, for label sets
DOCTOR_FILE = "doctor.json"  # repeated rows of the data, in the form of `bertkit doctor --json`
FIRST = "first"  # the run that comes before this one
SEARCH = "search"  # the tries that come before this run
DATA = "data"  # tables that were given in memory
START = "start"  # the model before the first update of a training that starts from a solved head
BEST = "best"  # the model of an earlier update that was better than the last
NOTED_PACKAGES = (
    "accelerate",
    "datasets",
    "numpy",
    "scikit-learn",
    "scipy",
    "sentencex",
    "tokenizers",
    "torch",
    "transformers",
)
# The files that a run writes in its directory: those that `bertkit push` publishes, then all of them.
PUBLISHED = (
    "config.json",
    "generation_config.json",
    VOCABULARY,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    RECIPE_FILE,
    ENVIRONMENT,
    LOG,
    CURVES_FILE,
    METRICS_FILE,
    CALIBRATION_FILE,
)
RUN_FILES = (*PUBLISHED, DOCTOR_FILE, "README.md", "model.safetensors")
COMPLETE = "complete"  # this file marks a checkpoint as fully written; it holds the checksums of the others

# Keys that fit a run to a machine: changing them changes the masks of dropout, and without dropout only rounding.
FITTING = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_checkpointing",
    "dataloader_num_workers",
    "max_tokens",
)


def find_finished(output: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the metrics of a finished run in this directory, or None if the run is not finished."""
    if not (output / RECIPE_FILE).exists():
        check_free(output)
        return None
    if has_begun(output) or (output / "config.json").exists():  # best/ has no log, but a model
        refuse_other(f"{output} belongs to another run", *list_both(output, recipe))
    return read_metrics(output / METRICS_FILE) if (output / METRICS_FILE).exists() else None


def check_free(output: Path) -> None:
    """Check that a directory holds a run, or only files that come before one."""
    if not (output / RECIPE_FILE).exists():
        check_empty(output, "run", DATA, SEARCH)


def check_finished(folder: Path, *files: str) -> None:
    """Check that a folder holds a finished run that has these files too."""
    if missing := [name for name in (RECIPE_FILE, METRICS_FILE, *files) if not (folder / name).is_file()]:
        remedy = "name the directory of a run"
        if missing[0] != RECIPE_FILE:
            before = "" if METRICS_FILE in missing else f"delete its {METRICS_FILE} and "
            remedy += f", or {before}repeat the command of this one"
        raise UsageError(f"{folder} is not a finished run, because it has no {missing[0]}; {remedy}")


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the scores of a finished run."""
    return read_record(path, dict[str, Any], "delete it, and the same command completes the run")


def read_record(path: Path, kind: Any, remedy: str = "delete it") -> Any:
    """Read a JSON file that bertkit has written as a value of the given type."""
    with as_usage_error(str(path), remedy):
        return msgspec.convert(json.loads(path.read_bytes()), kind)  # json also accepts NaN, as in scores


def identify(part: Mapping[str, Any]) -> RecipePart:
    """Return what identifies a run: no baselines, no origin of values, no keys that fit it to a machine (FITTING)."""
    kept = merge({key: value for key, value in part.items() if key not in ("baseline", "settled")}, {"train": {}})
    for table in kept.keys() & {"data", "train"}:
        kept[table] = {key: value for key, value in kept[table].items() if key not in FITTING}
    return kept


def holds_run(output: Path, recipe: Recipe) -> bool:
    """Return whether this directory was started with this recipe and holds its tokenizer."""
    if not (output / RECIPE_FILE).exists() or not (output / VOCABULARY).exists():
        return False
    before, now = list_both(output, recipe)
    return before == now


def list_both(output: Path, recipe: Recipe) -> list[RecipePart]:
    """Return what identifies the run in a directory, and the run of a recipe."""
    saved = load_recipe(output / RECIPE_FILE)
    return [identify(part.to_dict()) for part in (saved, resolve(recipe, list_settled(saved)))]


def has_begun(output: Path) -> bool:
    """Return whether training has started in this directory, or in that of the run that comes before it."""
    return (output / LOG).exists() or (output / FIRST / LOG).exists()


def start_directory(output: Path, recipe: Recipe, tokenizer: Any) -> None:
    """Write the first files of a run directory: recipe.toml and the tokenizer."""
    with as_usage_error(f"the directory {output}"):
        output.mkdir(parents=True, exist_ok=True)
    # A complete tokenizer must never lie next to another run's recipe; vocab.txt is its last file to be written.
    (output / VOCABULARY).unlink(missing_ok=True)
    save_recipe(recipe.to_dict(), output / RECIPE_FILE)
    save_tokenizer(tokenizer, output)


def write_environment(
    output: Path, data: Mapping[str, str], weights: str, commits: Mapping[str, str], goes_on: bool
) -> None:
    """Write environment.json, which may explain a difference between two runs, or two parts of one.

    Args:
        data: Fingerprint of each split.
        weights: Fingerprint of the model before the first update.
        commits: Commit of each model and data set on the Hub that was read.
        goes_on: Whether the run continues from a checkpoint, whose weights replace the initial ones.
    """
    found = {"data": dict(data), "weights_at_start": weights, "commits": dict(commits)}
    earlier: dict[str, Any] = {}
    if goes_on:
        with suppress(UsageError):  # the file is damaged or lost
            earlier = read_environment(output)
    step = f"delete {output} to start again, or name another directory with --output"
    check_data(output, earlier.get("data", data), data, step)
    found |= {key: earlier[key] for key in found if key in earlier}
    write_json(describe_environment() | found, output / ENVIRONMENT)


def check_data(output: Path, before: Mapping[str, str], now: Mapping[str, str], step: str) -> None:
    """Check that the data of a run are those that it was started with, by the fingerprint of each split."""
    if changed := sorted({split for split, _ in before.items() ^ now.items()}):
        raise UsageError(
            f"{output} was started with other data ({', '.join(changed)}), or with packages that process them "
            f"differently ({ENVIRONMENT}); restore them, {step}"
        )


def read_environment(output: Path) -> dict[str, Any]:
    """Read a run's environment.json, without the date."""
    found = read_record(output / ENVIRONMENT, dict[str, Any])
    return {key: value for key, value in found.items() if key != "date"}


def describe_environment() -> dict[str, Any]:
    """Return the date, versions, hardware and, in a git checkout, the commit."""
    import torch
    from accelerate import PartialState

    from bertkit.model.precision import choose_precision

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bertkit": bertkit.__version__,
        "commit": read_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in NOTED_PACKAGES},
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "auto_precision": choose_precision("auto"),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": PartialState().num_processes,
    }


@cache
def read_commit() -> str | None:
    """Return the git commit of this package, with "+" if files differ; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_checkpoint(output: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is complete and undamaged."""
    for _, path in sorted(list_checkpoints(output).items(), reverse=True):
        if is_intact(path):
            return path
        report(f"{path.name} is damaged, skipping")
    return None


def is_intact(checkpoint: Path) -> bool:
    """Return whether the files of a checkpoint match their checksums; reads all of them (some GB/s)."""
    try:
        known = read_record(checkpoint / COMPLETE, dict[str, str])
        return bool(known) and list(known.values()) == compute_checksums([checkpoint / name for name in known])
    except (UsageError, OSError):  # the marker itself is damaged, or a file is lost
        return False


def list_checkpoints(output: Path) -> dict[int, Path]:
    """Return the checkpoints that were written completely, by the number of updates."""
    marked = [path.parent for path in output.glob(f"checkpoint-*/{COMPLETE}") if path.is_file()]
    return {int(number): path for path in marked if (number := path.name.removeprefix("checkpoint-")).isdigit()}


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint as complete, with the checksums of its files, shards included."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE)
    names = [path.relative_to(checkpoint).as_posix() for path in files]
    write_json(dict(zip(names, compute_checksums(files), strict=True)), checkpoint / COMPLETE)


def compute_checksums(paths: Sequence[Path]) -> list[str]:
    """Return the length and the CRC-32 of each file."""
    found = zip(paths, map_in_threads(compute_checksum, paths), strict=True)
    return [f"{path.stat().st_size} bytes, {checksum:08x}" for path, checksum in found]


def rotate_checkpoints(output: Path, update: int, keep: int, protected: Collection[int] = ()) -> None:
    """Delete the oldest checkpoints until `keep` are left, except that of `update` and the protected ones.

    Incomplete checkpoints are deleted first, and so are checkpoints later than `update`: the resumed run has skipped
    them as damaged.
    """
    whole = {number: path for number, path in list_checkpoints(output).items() if number <= update}
    for path in output.glob("checkpoint-*"):
        if path.name.removeprefix("checkpoint-").isdigit() and path not in whole.values():
            shutil.rmtree(path, ignore_errors=True)
    old = [number for number in sorted(whole) if number != update and number not in protected]
    for number in old[: max(0, len(whole) - keep)]:
        (whole[number] / COMPLETE).unlink()  # if this is interrupted, the rest must not count as complete
        shutil.rmtree(whole[number], ignore_errors=True)


def write_log(entries: Iterable[Mapping[str, float]], output: Path) -> None:
    """Write the training log, one JSON object per line."""
    atomic_write("".join(json.dumps(entry) + "\n" for entry in entries), output / LOG)


def append_log(entry: Mapping[str, float], output: Path) -> None:
    """Append an entry to the training log, for those who follow a run; `write_log` writes it again."""
    with (output / LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def read_log(output: Path) -> list[dict[str, float]]:
    """Read the entries of a run's training log, without a last line that is not complete yet."""
    return [json.loads(line) for line in (output / LOG).read_text(encoding="utf-8").split("\n")[:-1]]
