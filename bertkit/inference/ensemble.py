"""Combine several finished SQuAD runs by the mean probability of their answers (paper section 4.2, Table 2).

An answer's weight is the mean, over the runs, of its probability among a run's best answers, 0 if it is not one of
them. The logarithm of that mean replaces S.T_i + E.T_j. No answer (2.0) is treated as an answer, so the odds,
the threshold tau and the files have the same form as those of a single run.

Differs from the paper: it does not say how its seven systems, of different checkpoints and seeds, are combined.

Left out: training the runs, and ensembles of ensembles, in which runs would not have equal weights.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertkit.data.formats.squad import Candidate, read_predictions, read_squad, read_squad_copy
from bertkit.data.spans import N_BEST, Answer, Question, Span, rank
from bertkit.errors import UsageError
from bertkit.system.files import hold_directory, write_json
from bertkit.tasks.squad import NBEST, SpanAnswers, SquadTask, choose_language
from bertkit.tasks.task import CHOSEN_ON_DEV
from bertkit.training.recipe import load_recipe
from bertkit.training.run_dir import (
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    find_finished,
    read_metrics,
)
from bertkit.training.scoring import add_limits

MEMBERS = "ensemble.json"  # in an ensemble's directory: its runs
LEAST_PROBABILITY = sys.float_info.min  # replaces a probability of 0, whose logarithm would be infinite

Candidates = list[tuple[str, float]]  # texts with their probabilities


def combine(
    task: SquadTask, runs: Sequence[Path], output: Path, data: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Combine finished runs and write the result to `output`.

    An ensemble in the same directory is replaced.

    Args:
        data: The folder of the official files, or the dev file; None uses that of the first run.

    Returns:
        The metrics of the ensemble, as written to `output/metrics.json`: the official scores and `score` (F1) with
        their intervals, and the number of `runs`.
    """
    if len(set(runs)) < 2:
        raise UsageError("an ensemble needs at least two finished runs; name more of them")
    recipes = [load_recipe(run / RECIPE_FILE) for run in runs]
    for run, recipe in zip(runs, recipes, strict=True):
        if recipe.task != task.name:
            raise UsageError(f"{run} is a run of {recipe.task}, not of {task.name}; combine only runs of {task.title}")
        read_metrics(run / METRICS_FILE)  # raises if the run is not finished
    options = recipes[0].data
    if (output / RECIPE_FILE).exists():
        raise UsageError(f"{output} holds a run; name another directory with --output")
    if not (output / MEMBERS).exists():
        find_finished(output, {})  # raises if the directory is not empty
    if given := data or options["dir"]:
        path = Path(given) / task.name_file("dev") if Path(given).is_dir() else Path(given)
        source, questions = str(path), read_squad(path, task.version.number)
    else:
        source = task.version.hub
        questions = read_squad_copy(source, {"dev": "validation"})["dev"]
    report(f"{task.title}: {len(questions):,} questions from {source}, answered by {len(runs)} runs")
    columns = [read_candidates(run, questions, source) for run in runs]
    averages = [average([column[question.id] for column in columns]) for question in questions]
    answers = SpanAnswers(task, questions, averages, None, choose_language(options["language"], questions))
    measured = task.score(answers.rows)
    metrics: dict[str, Any] = add_limits(measured | {"score": measured["f1"]}, task.tabulate_examples(questions).groups)
    metrics["runs"] = len(runs)
    if "tau" in metrics:
        metrics[CHOSEN_ON_DEV] = "tau"
    files = task.format_answers(answers, [list_entries(answer, task.version.unanswerable) for answer in averages])
    with hold_directory(output):
        (output / METRICS_FILE).unlink(missing_ok=True)  # metrics are never beside predictions of another ensemble
        write_json({"runs": [str(run.resolve()) for run in runs]}, output / MEMBERS)
        (output / PREDICTIONS).mkdir(exist_ok=True)
        for name, text in files.items():
            (output / PREDICTIONS / name).write_text(text, encoding="utf-8")
        write_json(metrics, output / METRICS_FILE)
    return metrics


# --- The answers ------------------------------------------------------------------------------------------------------


def average(candidates: Sequence[Candidates]) -> Answer:
    """Return the answer to a question from the best answers of each run, scored by the mean of their probabilities.

    Start and end of a span each get half of the logarithm of the mean. If means are equal, the text that comes first in
    the runs' lists comes first; nothing else depends on the order of the runs.
    """
    found: dict[str, list[float]] = {}
    for text, probability in (pair for pairs in candidates for pair in pairs):
        found.setdefault(text, []).append(probability / len(candidates))
    means = {text: math.fsum(parts) for text, parts in found.items()}  # exact, in any order
    null = halve(means.pop("", 0.0))
    best = sorted(means.items(), key=lambda pair: pair[1], reverse=True)[:N_BEST]  # stable
    return Answer([Span(text, *halve(mean)) for text, mean in best], null)


def halve(probability: float) -> tuple[float, float]:
    """Return two equal, finite numbers that add up to the logarithm of a probability."""
    half = math.log(max(probability, LEAST_PROBABILITY)) / 2
    return half, half


def list_entries(answer: Answer, with_null: bool) -> list[dict[str, Any]]:
    """Return the best answers in the reference code's form; start and end logits add up to the log probability.

    The probabilities are the means themselves; they add up to less than 1 if texts were left out.
    """
    entries = rank(answer, with_null)
    return [entry | {"probability": math.exp(entry["start_logit"] + entry["end_logit"])} for entry in entries]


# --- The runs and their data ------------------------------------------------------------------------------------------


def read_candidates(run: Path, questions: Sequence[Question], source: str) -> dict[str, Candidates]:
    """Read a run's best answers to each question, by the question's id."""
    path = run / PREDICTIONS / NBEST
    entries = read_predictions(path, list[Candidate])
    found = {name: [(entry.text, entry.probability) for entry in best] for name, best in entries.items()}
    wanted = {question.id for question in questions}
    missing, others = len(wanted - found.keys()), len(found.keys() - wanted)
    if missing or others:
        raise UsageError(
            f"{run} does not answer the questions of {source}: {missing:,} of {len(wanted):,} are missing and "
            f"{others:,} belong to other questions; score all runs on the same dev set, all of it (without "
            "tune_share)"
        )
    return found
