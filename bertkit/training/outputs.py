"""The outputs of a finished run beside its weights: scores, predictions, sequence lengths, the best model."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from bertkit.data.tokenizer import save_tokenizer
from bertkit.model.checkpoint import fold_targets
from bertkit.system.files import write_json
from bertkit.system.progress import Report
from bertkit.tasks.task import Task
from bertkit.training.model_card import list_benchmarks, walk_scores, write_card
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe, save_recipe
from bertkit.training.run_dir import (
    ALL_RESULTS,
    BEST,
    DOCTOR_FILE,
    EVAL_RESULTS,
    LENGTHS_FILE,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    describe_environment,
    is_intact,
    read_environment,
    write_log,
)
from bertkit.training.trainer import BertTrainer

MEASURED = 4096  # sequences of a split whose lengths are recorded
COMPARED = 0.2  # share of the log whose losses are compared with as many before
LEAST_LOSS = 0.25  # of the loss at the start: below it the rows are learned


def write_results(
    task: Task,
    recipe: Recipe,
    trainer: BertTrainer,
    metrics: dict[str, Any],
    files: Mapping[str, str | bytes],
    prepared: Prepared,
    output: Path,
) -> None:
    """Write log, card and predictions beside the saved model, then the metrics."""
    (output / "training_args.bin").unlink(missing_ok=True)  # a pickle; recipe.toml holds the same
    write_log(trainer.state.log_history, output)
    # The card is of the saved model, which is complete even where training has sharded it.
    model = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(output).eval()
    sizes = {split: len(data) for split, data in prepared.data.items()}
    environment = read_environment(output) | describe_environment()
    card = write_card(task, str(output), recipe, metrics, environment, model, sizes)
    (output / "README.md").write_text(card, encoding="utf-8")
    (output / PREDICTIONS).mkdir(exist_ok=True)
    for name, content in files.items():
        (output / PREDICTIONS / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if entries := list_benchmarks(task, recipe, metrics, environment["date"]):
        (output / EVAL_RESULTS).mkdir(exist_ok=True)
        text = yaml_dump(eval_result_entries_to_yaml(entries))
        (output / EVAL_RESULTS / f"{task.name}.yaml").write_text(text, encoding="utf-8")
    if prepared.checked.summarize():
        write_json({"task": task.name, "splits": prepared.checked.format()}, output / DOCTOR_FILE)
    write_json(measure_lengths(task, recipe, prepared.data), output / LENGTHS_FILE)
    write_json(summarize_results(task, metrics, sizes, trainer.state.log_history), output / ALL_RESULTS)
    write_json(metrics, output / METRICS_FILE)


def summarize_results(
    task: Task, metrics: Mapping[str, Any], sizes: Mapping[str, int], log: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the scores of a run under the keys that transformers' example scripts give them.

    Scores on dev begin with `eval_`, on test with `predict_`. `train_loss` is the mean over all logged updates.

    Args:
        sizes: Number of inputs of each split.
    """
    found: dict[str, Any] = {}
    for row, split, name in walk_scores(task, metrics):
        found[f"predict_{name}" if split == "test" else f"eval_{row.key}"] = metrics[row.key]
    prefixes = {"train": "train", next(iter(task.splits), ""): "eval", "test": "predict"}
    found |= {f"{prefix}_samples": sizes[split] for split, prefix in prefixes.items() if split in sizes}
    if losses := [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]:
        updates, means = zip(*losses, strict=True)
        found["train_loss"] = float(np.average(means, weights=np.diff(updates, prepend=0)))
    end = next((entry for entry in reversed(log) if "train_runtime" in entry), {})
    found |= {key: value for key, value in end.items() if key != "step"}
    return dict(sorted(found.items()))


def measure_lengths(task: Task, recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the distribution of sequence lengths of the training split and the first evaluated split.

    Large splits are sampled at MEASURED evenly spaced rows. Tasks that draw training samples for each run are
    measured on held-out sequences only.

    Returns:
        Split -> `sequences` (its size), `max_length` (the limit), and `lengths` in tokens with their `counts`.
    """
    first = next(iter(task.splits), "")
    longest = recipe.data.get("heldout_length") or recipe.lengths[0]
    found = {}
    for split in [split for split in ("train", first) if split in data and (task.reusable or split == first)]:
        rows = np.linspace(0, len(data[split]) - 1, min(len(data[split]), MEASURED)).astype(int).tolist()
        lengths: list[int] = []
        for start in range(0, len(rows), 64):
            batch = task.collate(data[split].__getitems__(rows[start : start + 64]))
            if "input_ids" not in batch:  # features of words instead of tokens
                break
            tokens = batch["attention_mask"].sum(-1).flatten()
            lengths += tokens[tokens > 0].tolist()  # 0: a window that a text lacks
        if lengths:
            found[split] = {"sequences": len(data[split]), "max_length": longest}
            values, counts = np.unique(lengths, return_counts=True)
            found[split] |= {"lengths": values.tolist(), "counts": counts.tolist()}
    return found


def find_better(trainer: BertTrainer, metrics: Mapping[str, Any], report: Report) -> dict[str, float]:
    """Return `step` and scores of an earlier checkpoint that is better than the final model; empty if there is none."""
    name, lower_is_better = trainer.criterion
    best = None if trainer.args.load_best_model_at_end else trainer.find_best()
    if not best or best["step"] == trainer.state.global_step:
        return {}
    if not is_intact(Path(trainer.args.output_dir) / f"checkpoint-{best['step']}"):
        report(f"checkpoint-{best['step']}, which scored better, is damaged, skipping")
        return {}
    better = best[name] < metrics[name] if lower_is_better else best[name] > metrics[name]
    return best if better else {}


def save_best(recipe: Recipe, trainer: BertTrainer, best: Mapping[str, float], tokenizer: Any, output: Path) -> None:
    """Write the model of an earlier checkpoint, saved like the final one, tokenizer and recipe to `output/best`.

    The directory is renamed into place when it is complete.
    """
    head = type(trainer.accelerator.unwrap_model(trainer.model))
    model = head.from_pretrained(output / f"checkpoint-{best['step']}")
    fold_targets(model)
    thresholds = [best.get(f"threshold_{name}") for name in model.config.id2label.values()]
    for name, value in (("tau", best.get("tau")), ("thresholds", None if None in thresholds else thresholds)):
        if value is not None:
            setattr(model.config, name, value)
    temporary = output / f".{BEST}"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    save_tokenizer(tokenizer, temporary)
    save_recipe(recipe.to_dict(), temporary / RECIPE_FILE)  # predictions need the lengths
    shutil.rmtree(output / BEST, ignore_errors=True)
    temporary.rename(output / BEST)


def is_learned(log: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the training loss at the end was a small part of that at the start."""
    losses = [entry["loss"] for entry in log if "loss" in entry]
    part = int(COMPARED * len(losses))
    return part >= 2 and bool(np.mean(losses[-part:]) < LEAST_LOSS * np.mean(losses[:part]))


def is_falling(log: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the training loss was still falling at the end, by Welch's test at 1 %."""
    from scipy.stats import ttest_ind  # takes a second

    losses = [entry["loss"] for entry in log if "loss" in entry]
    part = int(COMPARED * len(losses))
    if part < 2 or is_learned(log):
        return False
    before, last = losses[-2 * part : -part], losses[-part:]
    return bool(ttest_ind(before, last, alternative="greater", equal_var=False).pvalue < 0.01)
