"""What study.json says: the runs of every cell, means and deviations, and which setting was chosen."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.studies.cells import Cell, Pretraining
from bertkit.studies.spec import PRETRAIN, Column, Study, define
from bertkit.studies.workers import RunJob, State
from bertkit.tasks import TASKS
from bertkit.training.run_dir import find_finished


def find_states(jobs: Mapping[str, RunJob], output: Path) -> tuple[dict[str, State], dict[str, RunJob]]:
    """How far every run is, and the jobs that are left.

    Raises:
        UsageError: a directory holds something else, or its metrics are damaged.
    """
    states, left = {}, {}
    for directory, job in jobs.items():
        metrics = find_finished(output / directory, job.recipe)
        states[directory] = State() if metrics is None else judge(State("finished", metrics=metrics))
        if metrics is None:
            left[directory] = job
    return states, left


def judge(state: State) -> State:
    """The state, failed if it has finished with a score that is no number."""
    if state.status == "finished" and not math.isfinite(state.metrics["score"]):
        return replace(state, status="failed", reason=f"the score is {state.metrics['score']}")
    return state


# --- The choice -------------------------------------------------------------------------------------------------------


def group_cells(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of each row and column, but for borrowed ones."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if not cell.borrowed:
            groups.setdefault((cell.row, cell.column.name), []).append(cell)
    return list(groups.values())


def list_scores(cell: Cell, states: Mapping[str, State]) -> dict[str, float]:
    """Return directory -> the score that chooses among the finished runs, of the rows that decide if there are any."""
    done = {path: states[path].metrics for path in cell.runs.values() if states[path].status == "finished"}
    return {path: metrics.get("tune_score", metrics["score"]) for path, metrics in done.items()}


def choose(study: Study, group: Sequence[Cell], states: Mapping[str, State]) -> tuple[Cell, str] | None:
    """The winner among the cells of a row and column, with its best run's directory; None if no run has finished.

    It is the task's score that decides, whatever the column shows, so columns that share runs share the winner. Of
    equals the first wins, so that the order in which runs finish decides nothing.
    """
    sign = -1 if group and TASKS[group[0].column.task].lower_is_better else 1
    summary = max if study.select == "best" else statistics.fmean
    winner, most = None, -math.inf
    for cell in group:
        scores = {directory: sign * score for directory, score in list_scores(cell, states).items()}
        if scores and (value := summary(scores.values())) > most:
            winner, most = (cell, max(scores, key=scores.__getitem__)), value
    return winner


# --- The results ------------------------------------------------------------------------------------------------------


def summarize(
    study: Study, pretrainings: Sequence[Pretraining], cells: Sequence[Cell], states: Mapping[str, State]
) -> dict[str, Any]:
    """What study.json holds: plain values that repeat exactly, without times and hardware.

    definition: as in study.toml.
    finished: whether every run is finished or failed; runs, over, failed: how many there are, how many are finished or
        failed, and how many have failed.
    columns: name -> its task and metric, the metric's name and unit, the data it is measured on, the scores that the
        task knows as published, words on the paper's values, and whether it is written in its short form.
    rows: name -> the paper's value of each column, the pretraining that it begins with and the step, null without.
    pretrainings: each with its rows, directory, steps kept, scores as tables show them, and the state of a run.
    cells: row, column, task, setting, directory, whether it is borrowed (shows the row's pretraining); runs: each with
        seed, directory, status and metrics, failure, or update, updates and loss; over the finished ones n, failed,
        mean, sd (n - 1), best and at_or_below_majority, null where there is none.
    chosen: for each row and column the winning cell and run, and of how many settings and runs it is the best.
    """
    winners = [(group, choose(study, group, states)) for group in group_cells(cells)]
    status = [state.status for state in states.values()]
    over = sum(name in ("finished", "failed") for name in status)
    origins = {row: origin.directory for origin in pretrainings for row in origin.rows}
    return {
        "definition": define(study),
        "finished": over == len(status),
        "runs": len(status),
        "over": over,
        "failed": status.count("failed"),
        "columns": {column.name: describe_column(column, study.is_short) for column in study.columns},
        "rows": {
            name: {"paper": dict(row.paper), "pretraining": origins.get(name), "step": row.step or None}
            for name, row in study.rows.items()
        },
        "pretrainings": [describe_pretraining(origin, states) for origin in pretrainings],
        "cells": [summarize_cell(cell, states) for cell in cells],
        "chosen": [describe_winner(group, *winner, states) for group, winner in winners if winner],
    }


def describe_column(column: Column, short: bool) -> dict[str, Any]:
    """What can be said of a column."""
    return {
        "task": column.task,
        "metric": column.row.key,
        "name": column.row.name,
        "unit": column.row.unit,
        "lower_is_better": column.lower_is_better,
        "split": column.split,
        "published": dict(column.row.paper),
        "paper": column.paper,
        "short": short,
    }


def describe_pretraining(origin: Pretraining, states: Mapping[str, State]) -> dict[str, Any]:
    """A pretraining, its scores by name as far as it has them, and in which unit they are."""
    state = states[origin.directory]
    task, metrics = TASKS[PRETRAIN], state.metrics or {}
    rows = [task.find_row(task.metric), *task.table]
    scores = [{"name": row.name, "unit": row.unit, "value": metrics[row.key]} for row in rows if row.key in metrics]
    words = {"rows": list(origin.rows), "directory": origin.directory, "steps": list(origin.steps), "scores": scores}
    return words | describe_state(state)


def summarize_cell(cell: Cell, states: Mapping[str, State]) -> dict[str, Any]:
    """A cell with its runs and the statistics over those that have finished."""
    runs = [{"seed": seed, "directory": path} | describe_state(states[path]) for seed, path in cell.runs.items()]
    done = [states[path].metrics for path in cell.runs.values() if states[path].status == "finished"]
    values = [metrics[cell.column.key] for metrics in done if cell.column.key in metrics]
    poor = [is_poor(metrics) for metrics in done if "majority_score" in metrics]
    return {
        "row": cell.row,
        "column": cell.column.name,
        "task": cell.column.task,
        "setting": dict(cell.setting),
        "directory": cell.directory,
        "borrowed": cell.borrowed,
        "runs": runs,
        "n": len(values),
        "failed": sum(states[path].status == "failed" for path in cell.runs.values()),
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "best": (min if cell.column.lower_is_better else max)(values, default=None),
        "at_or_below_majority": sum(poor) if poor else None,
    }


def is_poor(metrics: Mapping[str, Any]) -> bool:
    """Whether one of a run's scores is no better than what the majority class has (`majority_…`)."""
    least = {key.removeprefix("majority_"): value for key, value in metrics.items() if key.startswith("majority_")}
    return any(metrics[key] <= value for key, value in least.items())


def describe_state(state: State) -> dict[str, Any]:
    """A run's state as study.json has it."""
    if state.status == "finished":
        return {"status": state.status, "metrics": dict(state.metrics)}
    if state.status == "failed":
        return {"status": state.status, "failure": state.reason}
    if state.status == "running":
        return {"status": state.status, "update": state.done, "updates": state.total, "loss": state.loss}
    return {"status": state.status}


def describe_winner(group: Sequence[Cell], cell: Cell, run: str, states: Mapping[str, State]) -> dict[str, Any]:
    """The chosen cell and run of a row and column, and what they were chosen from; `value` is what the column shows."""
    scored = [scores for other in group if (scores := list_scores(other, states))]
    metrics = states[run].metrics
    return {
        "row": cell.row,
        "column": cell.column.name,
        "task": cell.column.task,
        "setting": dict(cell.setting),
        "cell": cell.directory,
        "run": run,
        "seed": next(seed for seed, directory in cell.runs.items() if directory == run),
        "score": metrics["score"],
        "decided_by": list_scores(cell, states)[run],
        "value": metrics.get(cell.column.key),
        "of_settings": len(scored),
        "of_runs": sum(map(len, scored)),
    }


def describe_score(name: str, state: State) -> str:
    """A finished run's score in words."""
    return TASKS[name].find_row(TASKS[name].metric).describe(state.metrics["score"])
