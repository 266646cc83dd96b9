"""A study as text: its tables, and its progress.

A study is the content of its study.json. Wherever our scores stand beside
published ones, the text says what they are: a mean or the best of how many runs, and on which data.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bertkit.errors import pluralize
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import MISSING, ScoreLine, Table, TableCell, make_table, name_limits
from bertkit.tasks.task import CHOSEN_ON_DEV
from bertkit.training.study_results import StudyCell, StudyResults, StudyWinner

AVERAGE = "Average"  # the heading of the column that is a mean of others
OPTIMISTIC = "the data that it is scored on, so its score is optimistic."
MARK = " †"  # on a score with a run that is no better than the majority class


def write_table(study: StudyResults) -> str:
    """Return the text of table.md: the chosen scores next to the paper's, explanations, every cell, and failures."""
    parts = [f"# {describe_size(study)}", "", *format_table(tabulate_summary(study)), "", explain_scores(study)]
    if note := join_note(study):
        parts += ["", note]
    parts += ["", *(f"- {name}: {words}" for name, words in list_columns(study))]
    if study.pretrainings:
        parts += ["", "## Pretraining", "", *format_table(tabulate_pretrainings(study))]
    for table in tabulate_cells(study):
        parts += ["", f"## {table.caption}", "", *format_table(table)]
    if failures := list_failures(study):
        lines = [f"- {directory}: {failure}" for directory, failure in failures.items()]
        parts += ["", f"## Failed: {len(failures)} of {study.runs} runs", "", *lines]
    return "\n".join(parts) + "\n"


def join_note(study: StudyResults) -> str:
    """Return the study's note in one line."""
    return " ".join(study.definition.get("note", "").split())


def list_failures(study: StudyResults) -> dict[str, str]:
    """Return the reason of each failed run by directory."""
    runs = [*study.pretrainings, *(run for cell in study.cells for run in cell.runs)]
    return {run.directory: run.failure for run in runs if run.status == "failed"}


def describe_size(study: StudyResults) -> str:
    """Describe the number of runs as a product of rows, columns, settings and seeds."""
    counts = {"row": len(study.rows), "column": len(study.columns)}
    if grid := study.definition.get("grid"):
        counts["setting"] = math.prod(map(len, grid.values()))
    counts["seed"] = len(study.definition["seeds"])
    words = " x ".join(pluralize(number, name) for name, number in counts.items())
    before = f", including {pluralize(len(study.pretrainings), 'pretraining')}" if study.pretrainings else ""
    # Columns may share their runs; then the product is not the number of runs.
    sign = " =" if math.prod(counts.values()) == study.runs else ":"
    return f"{words}{sign} {pluralize(study.runs, 'run')}{before}"


def explain_scores(study: StudyResults) -> str:
    """Explain in a few sentences what our scores and the published ones are."""
    seeds = study.definition["seeds"]
    settings = max((winner.of_settings for winner in study.chosen), default=0)
    runs = max((winner.of_runs for winner in study.chosen), default=0)
    if len(seeds) > 1:
        many = ", ".join(map(str, seeds))
        sentences = [f"Ours: mean ± standard deviation over n finished runs (n), seeds {many}."]
    else:
        sentences = [f"Ours: one run (1), seed {seeds[0]}."]
        if has_intervals(study):
            sentences.append("The 95 % interval is over examples; it does not include the spread over seeds.")
    if settings > 1:
        rule = "best run" if study.definition["select"] == "best" else "mean"
        sentences.append(
            f"The setting shown (bold below) is the one whose {rule} is best of {settings} settings; it is chosen on "
            + ("rows that are not scored (data.tune_share)." if is_tuned_apart(study) else OPTIMISTIC)
        )
    if runs > 1 and shows_best(study) and not is_tuned_apart(study):
        sentences.append(
            f"The best run is the best of all {runs} runs on that data: even more optimistic, and not comparable with "
            "a mean or a test score."
        )
    if chosen := sorted({metrics[CHOSEN_ON_DEV] for metrics in list_metrics(study) if CHOSEN_ON_DEV in metrics}):
        sentences.append(f"Chosen on the scored data, which is optimistic too: {', '.join(chosen)}.")
    if has_paper(study):
        cites = ", and at the end those of other systems" if study.definition.get("cited") else ""
        sentences.append(f"In italics: the paper's value for the row above{cites}.")
    if any(list_baselines(study, name) for name in study.rows):
        sentences.append("Baselines: their mean over the runs that have them.")
    if names := study.definition.get("average"):
        sentences.append(f"{AVERAGE}: the mean of {', '.join(names)}.")
    if any(cell.at_or_below_majority for cell in study.cells):
        sentences.append(f"{MARK.strip()} At least one run is no better than always giving the same answer.")
    return " ".join(sentences)


def is_tuned_apart(study: StudyResults) -> bool:
    """Return whether settings and runs are chosen on rows that are not scored."""
    found = list_metrics(study)
    return bool(found) and all("tune_score" in metrics for metrics in found)


def list_metrics(study: StudyResults) -> list[Mapping[str, Any]]:
    """Return the metrics of every finished run."""
    return [run.metrics for cell in study.cells for run in cell.runs if run.metrics]


def name_splits(study: StudyResults) -> str:
    """Return the names of the splits that the columns are measured on."""
    return " and ".join(sorted({column.split for column in study.columns.values()}))


def has_paper(study: StudyResults) -> bool:
    """Return whether the study gives the paper's values."""
    return any(row.paper for row in study.rows.values())


def has_intervals(study: StudyResults) -> bool:
    """Return whether a finished run has the interval of a column's score."""
    limits = {name for column in study.columns.values() for name in name_limits(column.metric)}
    return any(limits & metrics.keys() for metrics in list_metrics(study))


def shows_best(study: StudyResults) -> bool:
    """Return whether best runs have lines of their own; they do not if means stand next to the paper's means."""
    return study.definition["select"] == "best" or not has_paper(study)


def _label_cells(study: StudyResults, cells: Sequence[StudyCell]) -> dict[str, list[str]]:
    """Return the labels that distinguish cells, by heading: rows and columns if there are several, and the axes.

    Without axes the columns are always included, because they say what the scores are.
    """
    axes = list(study.definition.get("grid", {}))
    labels, rows = {}, [cell.row for cell in cells]
    columns = [cell.column for cell in cells]
    if len(set(rows)) > 1:
        labels["row"] = rows
    if len(set(columns)) > 1 or not axes:
        labels["column"] = columns
    for axis, head in zip(axes, name_axes(axes), strict=True):
        labels[head] = [show_value(cell.setting[axis]) if axis in cell.setting else MISSING for cell in cells]
    return labels


def name_axes(axes: Sequence[str]) -> list[str]:
    """Return the axes' names without their tables, if these are unique."""
    short = [axis.rpartition(".")[2] for axis in axes]
    return short if len(set(short)) == len(short) else list(axes)


def show_value(value: Any) -> str:
    """Return a value of an axis on one line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        value = int(value)  # 3 epochs, not 3.0
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def take_score_row(study: StudyResults, name: str) -> ScoreLine:
    """Return the score row that formats a column's scores; pretrainings have no column and an empty score row."""
    column = study.columns.get(name)
    if column is None:
        return ScoreLine("", "")
    return ScoreLine(column.name, column.metric, unit=column.unit, paper=column.published)


def show_score(row: ScoreLine, value: float | None) -> str:
    """Format a value as tables show it, or MISSING without one."""
    return MISSING if value is None else row.show(value)


def show_mean(row: ScoreLine, cell: StudyCell) -> str:
    """Format a cell's `mean ± sd (n)`; without a mean it says whether runs failed."""
    if cell.mean is None:
        return "failed" if cell.failed else MISSING
    return row.show_mean(cell.mean, cell.sd, cell.n) + MARK * bool(cell.at_or_below_majority)


def choose_shown(study: StudyResults, name: str) -> dict[str, tuple[StudyCell, StudyWinner | None]]:
    """Return, by column, the cell that the summary shows for a row, with its entry in `chosen` or None."""
    winners = {winner.column: winner for winner in study.chosen if winner.row == name}
    found = {}
    for column in study.columns:
        cells = [cell for cell in study.cells if cell.row == name and cell.column == column]
        winner = winners.get(column)
        chosen = [cell for cell in cells if winner and cell.directory == winner.cell] or cells[:1]
        if chosen:
            found[column] = (chosen[0], winner)
    return found


def tabulate_summary(study: StudyResults, find_link: Callable[[str], str] = lambda directory: "") -> Table:
    """Return a table like the paper's: rows by columns, with the paper's values below each row if there are any.

    Without any, the published scores that the tasks know come last, and then the systems that the study cites, also in
    columns of their own, like the baselines of data without published scores. `find_link` returns the link of a run.
    """
    rows = {name: take_score_row(study, name) for name in study.columns}
    baselines = {name: list_baselines(study, name) for name in study.rows}
    averaged, cited = study.definition.get("average", []), study.definition.get("cited", {})
    names = [*rows, AVERAGE] if averaged else [*rows]
    heads = list(dict.fromkeys([*names, *itertools.chain(*cited.values(), *baselines.values())]))
    lines = []
    for name, own in study.rows.items():
        found = choose_shown(study, name)
        ours: dict[str, Any] = dict(baselines[name])
        for column, (cell, winner) in found.items():  # linked to the chosen run, or else to the first one
            run = winner.run if winner else cell.runs[0].directory
            ours[column] = TableCell(((show_mean(rows[column], cell), ""),), find_link(run))
        ours |= {AVERAGE: average(rows, found, averaged)} if averaged else {}
        lines.append([name or "ours", *(ours.get(head, MISSING) for head in heads)])
        if len(study.definition["seeds"]) == 1:  # a mean over seeds has no interval
            only = {column: cell.runs[0].metrics for column, (cell, _) in found.items()}
            intervals = {column: rows[column].show_interval(metrics) for column, metrics in only.items()}
            if any(intervals.values()):
                lines.append([f"{name or 'ours'}, 95 % interval", *(intervals.get(head) or MISSING for head in heads)])
        if own.paper:
            lines.append(list_published("the paper", own.paper, heads))
        winners = {column: winner for column, (_, winner) in found.items() if winner and winner.value is not None}
        if shows_best(study) and any(winner.of_runs > 1 for winner in winners.values()):
            best = {
                column: TableCell(((rows[column].show(winner.value), f"best of {winner.of_runs}"),))
                for column, winner in winners.items()
            }
            lines.append([f"{name or 'ours'}, best run", *(best.get(head, MISSING) for head in heads)])
    if not has_paper(study):
        for label in dict.fromkeys(label for row in rows.values() for label in row.paper):
            published = {name: show_score(row, row.paper.get(label)) for name, row in rows.items()}
            lines.append([f"published: {label}", *(published.get(head, MISSING) for head in heads)])
    lines += [list_published(name, values, heads) for name, values in cited.items()]
    return make_table("Scores", ["", *heads], lines, "quiet")


def list_baselines(study: StudyResults, name: str) -> dict[str, str]:
    """Return the mean of each baseline over the runs that the summary shows for a row, by its heading."""
    means = {}
    for column, (cell, _) in choose_shown(study, name).items():
        for words, key in study.columns[column].baselines.items():
            values = [run.metrics[key] for run in cell.runs if key in run.metrics]
            if values:
                head = words if len(study.columns) == 1 else f"{column}: {words}"
                means[head] = take_score_row(study, column).show(statistics.fmean(values))
    return means


def list_published(name: str, values: Mapping[str, float], heads: Sequence[str]) -> list[TableCell]:
    """Return the line of a system with published values; a cell without one is empty."""
    return [TableCell(((text, ""),), kind="published") for text in (name, *(str(values.get(x, "")) for x in heads))]


def average(rows: Mapping[str, ScoreLine], found: Mapping[str, tuple[StudyCell, Any]], names: Sequence[str]) -> str:
    """Return the average of the named columns' means in percent."""
    means = [rows[name].scale(found[name][0].mean) for name in names if name in found and found[name][0].n]
    return f"{statistics.fmean(means):.1f}" if len(means) == len(names) else MISSING


def list_columns(study: StudyResults) -> list[tuple[str, str]]:
    """Return name and description of each column: metric, task and data, the majority baseline, the paper's data."""
    found = []
    for name, column in study.columns.items():
        row = take_score_row(study, name)
        runs = [run for cell in study.cells if cell.column == name for run in cell.runs]
        metrics = next((run.metrics for run in runs if run.status == "finished"), {})
        parts = [f"{column.name}{' in percent' if column.unit else ''}; {column.task}, {column.split}"]
        if "heldout_pairs" in metrics:
            parts.append(f" ({metrics['heldout_pairs']:,} pairs)")
        if (least := metrics.get(f"majority_{column.metric}")) is not None:
            parts.append(f"; always giving the same answer scores {row.show(least)}")
        parts += [f"; the paper: {column.paper}"] if column.paper else []
        found.append((name, "".join(parts)))
    return found


def tabulate_pretrainings(study: StudyResults, find_link: Callable[[str], str] = lambda directory: "") -> Table:
    """Return the table of the pretrainings' own scores on held-out text, with the links that `find_link` returns."""
    scores = [score for origin in study.pretrainings for score in origin.scores]
    columns = {score.name: ScoreLine(score.name, "", unit=score.unit) for score in scores}
    lines = []
    for origin in study.pretrainings:
        values = {score.name: score.value for score in origin.scores}
        updates = f"{origin.metrics['updates']:,}" if origin.status == "finished" else origin.status
        name = TableCell(((origin.directory, ""),), find_link(origin.directory))
        rows = "; ".join(row for row in origin.rows if row) or "ours"
        lines.append([name, rows, updates, *(show_score(row, values.get(key)) for key, row in columns.items())])
    heads = ["pretraining", "rows", "updates", *(row.head for row in columns.values())]
    return make_table("Pretraining, on held-out text", heads, lines)


def tabulate_cells(study: StudyResults) -> list[Table]:
    """Return the tables of all cells; a grid has one per column, in which the chosen settings stand out."""
    has_grid = bool(study.definition.get("grid"))
    groups = {"Every cell": study.cells}
    if has_grid:
        own = [cell for cell in study.cells if not cell.is_pretraining]
        groups = {x: [cell for cell in own if cell.column == x] for x in study.columns}
    best = {winner.cell for winner in study.chosen} if has_grid else set()
    tables = []
    for caption, cells in groups.items():
        counted = any(cell.at_or_below_majority is not None for cell in cells)
        labels, lines = _label_cells(study, cells), []
        for index, cell in enumerate(cells):
            row, poor = take_score_row(study, cell.column), cell.at_or_below_majority
            texts = [column[index] for column in labels.values()]
            texts += [show_score(row, value) for value in (cell.mean, cell.sd, cell.best)]
            texts += [str(cell.n), str(cell.failed)]
            if counted:
                texts.append(MISSING if poor is None else str(poor))
            kind = "chosen" if cell.directory in best else ""
            lines.append([TableCell(((text, ""),), kind=kind) for text in texts])
        heads = [*labels, "mean", "sd", "best", "n", "failed"]
        if counted:
            heads.append("at or below majority")
        tables += [make_table(caption, heads, lines, "quiet")] if cells else []
    return tables
