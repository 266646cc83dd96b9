"""Write a person's own rows: files without the rows of some findings of the doctor, and the suspected label errors."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bertkit.analysis.doctor import Diagnosis
from bertkit.data.formats.line import TYPED_ROW, raise_errors
from bertkit.data.formats.rows import Columns, check_output, find_suffix, walk_rows
from bertkit.data.formats.writer import write_beside, write_rows
from bertkit.errors import UsageError, explain_refusal
from bertkit.metrics.table import LABEL, PROBABILITY_PREFIX
from bertkit.system.files import atomic_open, atomic_write
from bertkit.system.progress import Report
from bertkit.training.predictions import ROW_NUMBER, UNKNOWN_COUNT

DROPS = {"leaks": ["in_train"], "repeats": ["repeats"], "contradictory": [], "near": ["near_train", "near_repeats"]}
USUAL_DROPS = ("leaks", "repeats", "contradictory")
LABEL_ERROR_DROP = "label-errors"


def plan_files(diagnosis: Diagnosis, output: Path) -> dict[str, Path]:
    """Return the file to write for each file of the data; several become a folder."""
    files = {rows.source.source: output for rows in diagnosis.rows.values() if rows.source is not None}
    if not files or not all(Path(source).is_file() for source in files):
        raise UsageError(f"--write is for files of your own, not for {diagnosis.findings['data']}; leave it out")
    is_folder = len(files) > 1
    fits = not output.exists() if is_folder else output.suffix in (".csv", ".jsonl")
    if not fits:
        wanted = "a new folder for data of several files" if is_folder else "a file that ends in .csv or .jsonl"
        raise UsageError(f"--write is {output}; name {wanted}")
    for source in files:
        check_output(source, output, "--write")
        if is_folder:
            suffix = ".csv" if find_suffix(source) in (".csv", ".tsv", ".xlsx") else ".jsonl"
            files[source] = output / f"{Path(source).name.partition('.')[0]}{suffix}"
    return files


def write_clean(diagnosis: Diagnosis, drops: Sequence[str], output: Path, report: Report) -> None:
    """Write the rows that remain of those that training reads, in the order of their files."""
    kept: dict[str, set[int]] = {}
    for split, rows in diagnosis.rows.items():
        found = diagnosis.findings["splits"][split]
        dropped = {pair[0] for drop in drops for key in DROPS.get(drop, ()) for pair in found.get(f"{key}_rows", ())}
        if "contradictory" in drops:
            dropped.update(np.asarray(rows.lines)[diagnosis.checked.find_contradictory(split)].tolist())
        kept.setdefault(rows.source.source, set()).update(set(rows.lines) - dropped)
    if LABEL_ERROR_DROP in drops:
        suspected = diagnosis.findings["label_errors"]["suspected"]
        kept[diagnosis.rows["train"].source.source] -= {entry["row"] for entry in suspected}
    for source, path in plan_files(diagnosis, output).items():
        reading = {name: value for name, value in diagnosis.recipe.data.items() if name in ("sep", "encoding")}
        rows = raise_errors(source, walk_rows(Path(source), decoder=TYPED_ROW, **reading))
        remaining = [row for number, row in rows if number in kept[source]]
        if remaining:  # training refuses a file without rows
            with explain_refusal(f"the file {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_open(path) as stream:
                    write_rows(remaining, dict.fromkeys(chain.from_iterable(remaining)), stream, path.suffix)
        report(f"{path}: {len(remaining):,} rows, without {', '.join(drops)}{'' if remaining else '; not written'}")


def write_label_errors(described: Mapping[str, Any], rows: pa.Table, path: Path) -> None:
    """Write the suspected rows as CSV: the input's columns, then number, labels and probabilities.

    Without suspected rows there is no file.
    """
    if not (entries := described["suspected"]):
        path.unlink(missing_ok=True)
        return
    names = rows.column_names
    names = names[names.index(UNKNOWN_COUNT) + 1 : names.index(LABEL)]  # the columns of the input
    numbers = pc.index_in(pa.array([entry["row"] for entry in entries]), rows.column(ROW_NUMBER))
    results = [
        {name: entry[name] for name in ("row", "given", "suggested", "score")}
        | {f"{PROBABILITY_PREFIX}{name}": value for name, value in entry["probabilities"].items()}
        for entry in entries
    ]
    atomic_write(write_beside(Columns("", rows.select(names).take(numbers), frozenset(), ()), results), path)
