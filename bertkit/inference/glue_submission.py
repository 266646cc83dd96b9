"""What GLUE's leaderboard takes: a zip of eleven files of test predictions, gathered from finished runs (section 4.1).

As in the paper, WNLI is answered with the majority class, and AX by the model of MNLI. Nothing is trained here.
"""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

from bertkit.data.formats.glue import read_answers
from bertkit.errors import UsageError, explain_refusal
from bertkit.system.files import atomic_open
from bertkit.system.progress import Report, ignore
from bertkit.tasks.glue import BENCHMARKS, find_glue, spell_majority, write_predictions
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, STUDY_RESULT, read_study

# File of the submission -> its split and the row of the task whose model predicts it: for AX that is MNLI.
SUBMITTED = {
    split.submission: (row, split)
    for row in BENCHMARKS
    for split in row.splits.values()
    if row.metrics and split.submission
}
DATE = (1980, 1, 1, 0, 0, 0)  # of every file, so that equal predictions make equal zips


def check_target(path: Path) -> None:
    """Nothing, or a UsageError: no zip can be written there."""
    if path.suffix != ".zip" or path.is_dir():
        raise UsageError(f"{path} is not the name of a zip; write for instance --submit glue.zip")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"the folder {path.absolute().parent} is not there or cannot be written to; make it first")


def list_tasks(name: str) -> list[str]:
    """The tasks of a name in any spelling: one, or for "all" those that are trained.

    Raises:
        UsageError: there is none of that name.
    """
    if name.lower() == "all":
        return [row.name for row in BENCHMARKS if row.metrics]
    try:
        return [find_glue(name).name]
    except UsageError as error:
        raise UsageError(f"{error}, or all") from None


def find_runs(folder: Path, report: Report = ignore) -> list[Path]:
    """The finished runs of GLUE's tasks in a folder: those that a study has chosen, best first, or else one a task.

    report: is told of a study that is not finished.
    """
    if not (folder / STUDY_RESULT).exists():
        return [folder / row.name for row in BENCHMARKS if (folder / row.name / METRICS_FILE).exists()]
    study = read_study(folder)
    if not study.finished:
        report(f"the study in {folder} is not finished; what it has chosen so far is taken")
    best_first = sorted(
        study.chosen, key=lambda winner: winner.score if winner.decided_by is None else winner.decided_by, reverse=True
    )
    return [folder / winner.run for winner in best_first]


def find_gaps(names: Iterable[str], data: Path, *, tested: bool) -> list[str]:
    """The official files of some tasks that are not in a folder; with `tested` also those of the test sets."""
    splits = [split for row in BENCHMARKS if row.name in names for split in row.splits.values()]
    wanted = [split.file for split in splits if split.needed or (tested and split.submission)]
    return [name for name in dict.fromkeys(wanted) if not (data / name).exists()]


def keep_complete(names: list[str], data: Path, *, tested: bool, partial: bool, report: Report = ignore) -> list[str]:
    """The tasks whose files are in a folder; with `partial` the others are left out, else they are a mistake.

    Raises:
        UsageError: files are missing, and which; or there is no task left.
    """
    kept = [name for name in names if not find_gaps([name], data, tested=tested and not partial)]
    left = [name for name in names if name not in kept]
    if left and not (partial and kept):
        gaps = ", ".join(find_gaps(names, data, tested=tested))
        raise UsageError(f"{data} has no {gaps}; give them" + " or fill the submission: --submit-partial" * tested)
    if left:
        report(f"left out, for their files are not in {data}: {', '.join(left)}")
    return kept


def gather_files(runs: Iterable[Path], *, where: Path, fill: bool, report: Report) -> dict[str, str]:
    """Name -> text of the eleven files, from the predictions in finished runs.

    where: the folder of the runs, for messages.
    fill: answers what no run has predicted with the majority class.
    report: is told of what is filled, and of files of another length than the leaderboard's test set.

    Raises:
        UsageError: predictions are missing, and which.
    """
    found: dict[str, str] = {}
    for run in runs:
        for name in SUBMITTED.keys() - found.keys():
            if (path := run / PREDICTIONS / name).exists():
                read_answers(SUBMITTED[name][0], path)  # refuses what is no prediction
                found[name] = path.read_text(encoding="utf-8")
    missing = [name for name, (row, _) in SUBMITTED.items() if name not in found and not row.submits_majority]
    if missing and not fill:
        tasks = ", ".join(dict.fromkeys(SUBMITTED[name][0].name for name in missing))
        raise UsageError(
            f"{where} lacks predictions: {', '.join(missing)}; fine-tune {tasks} with test files, name the folder of "
            "the finished runs with --output, or fill in the majority class: --submit-partial"
        )
    if missing:
        report(f"filled with the majority class: {', '.join(missing)}")
    files: dict[str, str] = {}
    for name, (row, split) in SUBMITTED.items():
        rows = count_rows(found[name]) if name in found else split.rows
        if rows != split.rows:
            report(f"{name} has {rows:,} answers; the leaderboard expects {split.rows:,}")
        alike = row.submits_majority or name not in found
        files[name] = write_predictions([spell_majority(row)] * rows) if alike else found[name]
    return files


def count_rows(text: str) -> int:
    """How many answers a file of predictions has."""
    return text.count("\n") - 1


def write_zip(files: dict[str, str], path: Path) -> None:
    """Writes the zip, at once or not at all; equal files make equal bytes."""
    with (
        explain_refusal(str(path)),
        atomic_open(path, "wb") as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), text, zipfile.ZIP_DEFLATED)
