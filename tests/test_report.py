"""The curves of a run."""

import itertools
import statistics

from PIL import Image

from bertkit.directory import read_log
from bertkit.report import plot_log
from bertkit.tasks.task import Row

ROWS = (
    Row("loss", "mlm_loss", {"ln V": "uniform_loss"}),
    Row("accuracy", "nsp_accuracy", {"the larger class": "nsp_majority"}, unit="fraction"),
    Row("never logged", "clm_loss", {"ln V": "uniform_loss"}),
)


def test_curves_have_a_panel_for_every_score_that_was_logged(tmp_path):
    (tmp_path / "training_log.jsonl").write_text(
        '{"step": 0, "eval_mlm_loss": 9.0, "eval_nsp_accuracy": 0.5}\n'
        '{"step": 1, "mlm_loss": 8.0}\n'
        '{"step": 2, "eval_mlm_loss": 7.0, "eval_nsp_accuracy": 0.6}\n'
    )
    log = read_log(tmp_path)
    assert [entry["step"] for entry in log] == [0, 1, 2]
    metrics = {"uniform_loss": 9.0, "nsp_majority": 0.6}
    plot_log(log, ROWS, metrics, tmp_path / "two.png")
    plot_log(log, ROWS[:1], metrics, tmp_path / "one.png")
    two, one = (Image.open(tmp_path / name) for name in ("two.png", "one.png"))
    assert two.width == 2 * one.width
    assert len(two.convert("L").getcolors()) > 50, "the picture is empty"


# --- Studies ----------------------------------------------------------------------------------------------------------


def make_results(grid, tasks, scores, rows=("",), seeds=(42, 43), select="best", paper=None, majority=None):
    """What study.json would hold; `scores(row, task, setting, seed)`: a score, None for a failed run, or "waiting"."""
    settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    cells, chosen = [], []
    for row, task in itertools.product(rows, tasks):
        group = []
        for setting in settings:
            directory = f"{row}/{task}/{len(group)}"
            values = [scores(row, task, setting, seed) for seed in seeds]
            runs = []
            for seed, value in zip(seeds, values, strict=True):
                state = {"status": "finished", "metrics": {"score": value}}
                if value is None:
                    state = {"status": "failed", "failure": "the loss is nan | lower it"}
                if value == "waiting":
                    state = {"status": "running", "update": 12, "updates": 1234, "loss": 0.6931}
                runs.append({"seed": seed, "directory": f"{directory}/seed-{seed}"} | state)
            done = [value for value in values if isinstance(value, float)]
            statistic = {
                "n": len(done),
                "failed": values.count(None),
                "mean": statistics.fmean(done) if done else None,
                "sd": statistics.stdev(done) if len(done) > 1 else None,
                "best": max(done, default=None),
                "at_or_below_majority": None if majority is None else sum(value <= majority for value in done),
            }
            head = {"row": row, "task": task, "setting": setting, "directory": directory, "runs": runs}
            group.append(head | statistic)
        cells += group
        scored = [cell for cell in group if cell["n"]]
        if scored:
            best = max(scored, key=lambda cell: cell["best" if select == "best" else "mean"])
            run = max((r for r in best["runs"] if r["status"] == "finished"), key=lambda r: r["metrics"]["score"])
            winner = {"row": row, "task": task, "setting": best["setting"], "cell": best["directory"]}
            winner |= {"run": run["directory"], "seed": run["seed"], "score": run["metrics"]["score"]}
            chosen.append(winner | {"of_settings": len(scored), "of_runs": sum(cell["n"] for cell in scored)})
    columns = {
        task: {"metric": "accuracy", "name": name, "unit": "fraction", "lower_is_better": False, "split": "dev"}
        | {"paper": (paper or {}).get(task, {})}
        for task, name in tasks.items()
    }
    definition = {"tasks": list(tasks), "seeds": list(seeds), "select": select}
    return {
        "definition": definition | ({"grid": {axis: list(values) for axis, values in grid.items()}} if grid else {}),
        "finished": True,
        "runs": len(cells) * len(seeds),
        "failed": sum(cell["failed"] for cell in cells),
        "columns": columns,
        "cells": cells,
        "chosen": chosen,
    }
