"""Make the results of a study: the runs of every cell, means and deviations, and the chosen settings."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError
from bertkit.reports.tables import OWN_DATA, ScoreLine, find_main, find_row, list_shown
from bertkit.studies.cells import Cell, Pretraining
from bertkit.studies.run_processes import RunJob, State
from bertkit.studies.spec import PRETRAIN, Column, Study, define
from bertkit.tasks import TASKS
from bertkit.training.run_dir import METRICS_FILE, find_finished, read_metrics
from bertkit.training.study_results import (
    STUDY_RESULT,
    PretrainingScore,
    StudyCell,
    StudyColumn,
    StudyPretraining,
    StudyResults,
    StudyRow,
    StudyRun,
    StudyWinner,
)


def read_states(
    jobs: Mapping[str, RunJob], cells: Iterable[Cell], output: Path
) -> tuple[dict[str, State], dict[str, RunJob]]:
    """Return the state of every run and ensemble, and the jobs that are not finished.

    An ensemble with a member that is not finished is not finished either.
    """
    states, left = {}, {}
    for directory, job in jobs.items():
        metrics = find_finished(output / directory, job.recipe)
        states[directory] = State() if metrics is None else fail_if_not_finite(State("finished", metrics=metrics))
        if metrics is None:
            left[directory] = job
    for cell in (cell for cell in cells if cell.members):
        metrics = output / cell.directory / METRICS_FILE
        is_over = metrics.exists() and not left.keys() & set(cell.members)
        states[cell.directory] = State("finished", metrics=read_metrics(metrics)) if is_over else State()
    return states, left


def fail_if_not_finite(state: State) -> State:
    """Return the state; a finished run whose score is NaN or infinite becomes failed."""
    if state.status == "finished" and not math.isfinite(state.metrics["score"]):
        return replace(state, status="failed", reason=f"the score is {state.metrics['score']}")
    return state


def check_all_finished(results: StudyResults, output: Path) -> None:
    """Check that no run of a study has failed."""
    if results.failed:
        why = f"{output / STUDY_RESULT} gives the reasons, and the same command retries them"
        raise UsageError(f"{results.failed:,} of {results.runs:,} runs failed; {why}")


# --- The choice -------------------------------------------------------------------------------------------------------


def group_cells(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group the cells by row and column, without those that show a pretraining."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if not cell.is_pretraining:
            groups.setdefault((cell.row, cell.column.name), []).append(cell)
    return list(groups.values())


def list_scores(cell: Cell, states: Mapping[str, State]) -> dict[str, float]:
    """Return the score used for selection by directory, for the finished runs of a cell.

    The score is `tune_score` if the run has one.
    """
    done = {path: states[path].metrics for path in cell.runs.values() if states[path].status == "finished"}
    return {path: metrics.get("tune_score", metrics["score"]) for path, metrics in done.items()}


def choose(study: Study, group: Sequence[Cell], states: Mapping[str, State]) -> tuple[Cell, str] | None:
    """Return the winning cell of a row and column, and its best run's directory; None if no run has finished.

    The task's score decides, whichever metric the column shows, so columns that share runs share the winner. The first
    of equal cells wins, so that the order in which runs finish does not matter.
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
) -> StudyResults:
    """Return the results of a study from the states of its runs by directory."""
    status = [state.status for state in states.values()]
    over = sum(name in ("finished", "failed") for name in status)
    origins = {row: origin.directory for origin in pretrainings for row in origin.rows}
    winners = [(group, choose(study, group, states)) for group in group_cells(cells)]
    return StudyResults(
        definition=define(study),
        finished=over == len(status),
        runs=len(status),
        over=over,
        failed=status.count("failed"),
        columns={column.name: describe_column(column, cells, states) for column in study.columns},
        rows={name: StudyRow(dict(row.paper), origins.get(name), row.step or None) for name, row in study.rows.items()},
        pretrainings=[describe_pretraining(origin, states[origin.directory]) for origin in pretrainings],
        cells=[summarize_cell(cell, states) for cell in cells],
        chosen=[describe_winner(group, *winner, states) for group, winner in winners if winner],
    )


def describe_column(column: Column, cells: Iterable[Cell], states: Mapping[str, State]) -> StudyColumn:
    """Describe a column; without published scores, as for a person's own data, it has trained baselines."""
    runs = [run for cell in cells if cell.column == column for run in cell.runs.values()]
    metrics = next((states[run].metrics for run in runs if states[run].status == "finished"), {})
    row, names = name_score(column.task, column.row.key, metrics), TASKS[column.task].baselines
    published = {} if OWN_DATA in metrics else dict(row.paper)
    trained = {words: key for words, key in row.baselines.items() if key.partition("_")[0] in names}
    return StudyColumn(
        task=column.task,
        metric=row.key,
        name=row.name,
        unit=row.unit,
        lower_is_better=column.lower_is_better,
        split=column.split,
        published=published,
        paper=column.paper,
        baselines={} if published else trained,
    )


def name_score(task: str, key: str, metrics: Mapping[str, Any]) -> ScoreLine:
    """Return the line of a score; that of one's own texts depends on their labels, so metrics.json names it."""
    rows = list_shown(TASKS[task].table, key, metrics) if key == "score" else []
    return find_main(rows, key) if rows else find_row(TASKS[task].table, key)


def describe_pretraining(origin: Pretraining, state: State) -> StudyPretraining:
    """Describe a pretraining with its state and the scores that it has so far."""
    task, metrics = TASKS[PRETRAIN], state.metrics or {}
    rows = [find_row(task.table, task.metric), *task.table]
    scores = [PretrainingScore(row.name, row.unit, metrics[row.key]) for row in rows if row.key in metrics]
    return StudyPretraining(list(origin.rows), origin.directory, list(origin.steps), scores, **describe_state(state))


def summarize_cell(cell: Cell, states: Mapping[str, State]) -> StudyCell:
    """Describe a cell with its runs and the statistics over the finished ones."""
    done = [states[path].metrics for path in cell.runs.values() if states[path].status == "finished"]
    values = [metrics[cell.column.key] for metrics in done if cell.column.key in metrics]
    poor = [is_poor(metrics) for metrics in done if "majority_score" in metrics]
    return StudyCell(
        row=cell.row,
        column=cell.column.name,
        task=cell.column.task,
        setting=dict(cell.setting),
        directory=cell.directory,
        is_pretraining=cell.is_pretraining,
        runs=[StudyRun(seed, path, **describe_state(states[path])) for seed, path in cell.runs.items()],
        n=len(values),
        failed=sum(states[path].status == "failed" for path in cell.runs.values()),
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        best=(min if cell.column.lower_is_better else max)(values, default=None),
        at_or_below_majority=sum(poor) if poor else None,
    )


def is_poor(metrics: Mapping[str, Any]) -> bool:
    """Return whether any score of a run is at or below its majority-class baseline (`majority_…`)."""
    least = {key.removeprefix("majority_"): value for key, value in metrics.items() if key.startswith("majority_")}
    return any(metrics[key] <= value for key, value in least.items())


def describe_state(state: State) -> dict[str, Any]:
    """Return the fields of a `RunState` that a run has in this state."""
    fields: dict[str, Any] = {"status": state.status}
    if state.status == "finished":
        fields["metrics"] = dict(state.metrics)
    elif state.status == "failed":
        fields["failure"] = state.reason
    elif state.status == "running":
        fields |= {"update": state.done, "updates": state.total, "loss": state.loss}
    return fields


def describe_winner(group: Sequence[Cell], cell: Cell, run: str, states: Mapping[str, State]) -> StudyWinner:
    """Describe the chosen cell and run of a row and column."""
    scored = [scores for other in group if (scores := list_scores(other, states))]
    metrics = states[run].metrics
    return StudyWinner(
        row=cell.row,
        column=cell.column.name,
        task=cell.column.task,
        setting=dict(cell.setting),
        cell=cell.directory,
        run=run,
        seed=next(seed for seed, directory in cell.runs.items() if directory == run),
        score=metrics["score"],
        decided_by=list_scores(cell, states)[run],
        value=metrics.get(cell.column.key),
        of_settings=len(scored),
        of_runs=sum(map(len, scored)),
    )


def describe_score(name: str, state: State) -> str:
    """Describe a finished run's score in words."""
    return name_score(name, TASKS[name].metric, state.metrics).describe(state.metrics["score"])
