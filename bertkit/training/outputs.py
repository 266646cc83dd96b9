"""The outputs of a finished run beside its weights: scores, predictions, the best model."""

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
from bertkit.training.model_card import list_benchmarks, write_card
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe, save_recipe
from bertkit.training.run_dir import (
    BEST,
    DOCTOR_FILE,
    EVAL_RESULTS,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    describe_environment,
    is_intact,
    read_environment,
    write_log,
)
from bertkit.training.trainer import BertTrainer

COMPARED = 0.2  # share of the log whose losses are compared with as many before
LEAST_LOSS = 0.25  # share of the loss at the start, below which the rows are learned


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
    write_json(metrics, output / METRICS_FILE)


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
    decided = {name: best.get(name) for name in ("tau", "redaction_threshold")}
    for name, value in (*decided.items(), ("thresholds", None if None in thresholds else thresholds)):
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
