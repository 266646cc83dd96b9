"""Compare the forecast of a run with what the run then takes, for several sizes and lengths.

$ python -m tests.training.forecast_sizes GLUE TEXT VOCAB
"""

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bertkit.bench.finetune import make_start
from bertkit.bench.measure import measure_growth
from bertkit.bench.training import choose_size
from bertkit.data.pretraining.sources import read_documents
from bertkit.tasks import TASKS
from bertkit.training.arguments import make_arguments
from bertkit.training.plan import find_costs, forecast
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from bertkit.training.run_dir import read_log

FINE_TUNED = {  # name -> size, task, max_length, updates
    "STS-B, minilm": ("minilm", "stsb", 128, 100),
    "RTE, minilm": ("minilm", "rte", 256, 40),
    "RTE, base": ("base", "rte", 128, 5),
}
PRETRAINED = {  # name -> size, max_length, batch size, updates
    "pretraining tiny at 128": ("tiny", 128, 64, 150),
    "pretraining small at 128": ("small", 128, 64, 12),
    "pretraining mini at 512": ("mini", 512, 32, 12),
}


def list_recipes(folder: Path, glue: str, text: str, vocab: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return name -> task and recipe; the fine-tuned ones are evaluated once during training."""
    documents = list(read_documents([text], limit_characters=2_000_000))
    found = {}
    for name, (size, task, length, updates) in FINE_TUNED.items():
        start = folder / size
        start.mkdir(exist_ok=True)
        train = {"max_steps": updates, "eval_strategy": "steps", "eval_steps": updates, "save_strategy": "no"}
        found[name] = (
            task,
            {
                "checkpoint": make_start(start, choose_size(size), documents),
                "data": {"dir": glue, "max_length": length},
                "train": train,
            },
        )
    for name, (size, length, batch, updates) in PRETRAINED.items():
        train = {"max_steps": updates, "warmup_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
        found[name] = (
            "pretrain",
            {
                "batch_size": batch,
                "model": {**choose_size(size)},
                "data": {"corpus": [text], "vocab": vocab, "max_length": length, "dupe_factor": 1},
                "train": train | {"eval_on_start": False},
            },
        )
    return found


def main(glue: str, text: str, vocab: str) -> None:
    """Print a line for each run: expected and measured seconds of training, and gigabytes."""
    print("| run | expected s | measured s | off by | expected GB | measured GB |\n|---|--:|--:|--:|--:|--:|")
    with TemporaryDirectory() as folder:
        for name, (task, given) in list_recipes(Path(folder), glue, text, vocab).items():
            recipe = Recipe.make(TASKS[task], given)
            output = Path(folder) / name
            costs = find_costs(recipe, output)
            if isinstance(costs, str):
                raise SystemExit(f"{name}: {costs}")
            found = forecast(recipe, costs, make_arguments(recipe, output))
            expected = found.training + found.evaluation
            grown = measure_growth(partial(run, TASKS[task], recipe, output=output), torch.device("cpu"))
            (seconds,) = (entry["train_runtime"] for entry in read_log(output) if "train_runtime" in entry)
            memory = sum(found.memory.values()) / 1e9
            print(
                f"| {name} | {expected:.1f} | {seconds:.1f} | {expected / seconds - 1:+.0%} | {memory:.2f} | "
                f"{grown / 1e9:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
