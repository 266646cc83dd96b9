"""Submissions to GLUE's leaderboard: a zip of eleven files of test predictions from finished runs (section 4.1).

As in the paper, the predictions for WNLI are its majority class, and those for AX come from the model of MNLI. Nothing
is trained here.
"""

import zipfile
from collections.abc import Iterable
from pathlib import Path

from bertkit.data.formats.glue import read_answers
from bertkit.errors import UsageError, explain_refusal
from bertkit.system.files import atomic_open
from bertkit.system.progress import Report, ignore
from bertkit.tasks.glue import BENCHMARKS, find_glue, write_predictions
from bertkit.training.run_dir import METRICS_FILE, PREDICTIONS, STUDY_RESULT, read_study

# File of the submission -> the row of the task whose model predicts it (for AX: MNLI), and its split.
SUBMITTED = {
    split.submission: (row, split)
    for row in BENCHMARKS
    for split in row.splits.values()
    if row.metrics and split.submission
}
DATE = (1980, 1, 1, 0, 0, 0)  # of every file, so that equal predictions give equal zips


def list_tasks(name: str) -> list[str]:
    """Return the task with a name in any spelling, or for "all" the tasks that have training data."""
    return [row.name for row in BENCHMARKS if row.metrics] if name.lower() == "all" else [find_glue(name).name]


def find_runs(folder: Path, report: Report = ignore) -> list[Path]:
    """Return the finished GLUE runs in a folder: those chosen by a study, best first, or one per task.

    Args:
        report: Called with a message if the study is not finished.
    """
    if not (folder / STUDY_RESULT).exists():
        return [folder / row.name for row in BENCHMARKS if (folder / row.name / METRICS_FILE).exists()]
    study = read_study(folder)
    if not study.finished:
        report(f"the study in {folder} is not finished; using the runs chosen so far")
    best_first = sorted(
        study.chosen, key=lambda winner: winner.score if winner.decided_by is None else winner.decided_by, reverse=True
    )
    return [folder / winner.run for winner in best_first]


def find_gaps(names: Iterable[str], data: Path, *, tested: bool) -> list[str]:
    """Return the official files of these tasks that are missing in a folder; with `tested` also test sets."""
    splits = [split for row in BENCHMARKS if row.name in names for split in row.splits.values()]
    wanted = [split.file for split in splits if split.needed or (tested and split.submission)]
    return [name for name in dict.fromkeys(wanted) if not (data / name).exists()]


def keep_complete(names: list[str], data: Path, *, tested: bool, partial: bool, report: Report = ignore) -> list[str]:
    """Return the tasks whose files are in a folder; with `partial` the others are skipped."""
    kept = [name for name in names if not find_gaps([name], data, tested=tested and not partial)]
    left = [name for name in names if name not in kept]
    if left and not (partial and kept):
        gaps = ", ".join(find_gaps(names, data, tested=tested))
        raise UsageError(f"{data} has no {gaps}; add them" + " or fill the submission with --submit-partial" * tested)
    if left:
        report(f"not found in {data}, skipping: {', '.join(left)}")
    return kept


def gather_files(runs: Iterable[Path], *, where: Path, fill: bool, report: Report) -> dict[str, str]:
    """Return the text of each of the eleven files, by name, from the predictions of finished runs.

    Args:
        where: The folder of the runs, for messages.
        fill: Whether missing predictions are replaced by the majority class.
        report: Called with messages about replaced files, and files whose length differs from the leaderboard's.
    """
    found: dict[str, str] = {}
    for run in runs:
        for name in SUBMITTED.keys() - found.keys():
            if (path := run / PREDICTIONS / name).exists():
                read_answers(SUBMITTED[name][0], path)  # raises if it holds no predictions
                found[name] = path.read_text(encoding="utf-8")
    missing = [name for name, (row, _) in SUBMITTED.items() if name not in found and not row.submits_majority]
    if missing and not fill:
        tasks = ", ".join(dict.fromkeys(SUBMITTED[name][0].name for name in missing))
        raise UsageError(
            f"{where} lacks predictions: {', '.join(missing)}; fine-tune {tasks} with test files, give the folder of "
            "the finished runs with --output, or fill in the majority class with --submit-partial"
        )
    if missing:
        report(f"filled with the majority class: {', '.join(missing)}")
    files: dict[str, str] = {}
    for name, (row, split) in SUBMITTED.items():
        rows = found[name].count("\n") - 1 if name in found else split.rows  # without the line of names
        if rows != split.rows:
            report(f"{name} has {rows:,} answers; the leaderboard expects {split.rows:,}")
        alike = row.submits_majority or name not in found
        files[name] = write_predictions([row.majority] * rows) if alike else found[name]
    return files


def write_zip(files: dict[str, str], path: Path) -> None:
    """Write the zip atomically; equal files give equal bytes."""
    with explain_refusal(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path, "wb") as stream, zipfile.ZipFile(stream, "w") as archive:
            for name, text in files.items():
                archive.writestr(zipfile.ZipInfo(name, DATE), text, zipfile.ZIP_DEFLATED)
