"""Write a person's own table without the rows of some findings of the doctor."""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from bertkit.analysis.doctor import Diagnosis
from bertkit.data.duplicates import TRAIN_SPLIT
from bertkit.data.formats.line import find_encoding, read_array, read_lines
from bertkit.data.formats.rows import Columns, list_split_files
from bertkit.data.formats.writer import write_rows
from bertkit.data.splits import name_split
from bertkit.errors import UsageError, explain_refusal
from bertkit.reports.tables import count
from bertkit.system.files import atomic_open
from bertkit.system.progress import Report

LABEL_ERROR_DROP = "label-errors"
USUAL_DROPS = ("leaks", "repeats", "contradictory")
DROPS = {  # name in --drop -> the rows that are left out
    "leaks": "rows of other splits that also occur in train",
    "repeats": "rows that repeat earlier ones",
    "contradictory": "all rows of texts with different labels",
    "near": "rows nearly equal to rows of train or to earlier ones",
    LABEL_ERROR_DROP: "training rows with a suspected label error",
}


def choose_drops(given: str | None, output: Path | None) -> Sequence[str]:
    """Return the names in --drop; None, the option left out, stands for USUAL_DROPS.

    Raises:
        UsageError: A name is unknown, or there is no output from which the rows would be left out.
    """
    if given is None:
        return USUAL_DROPS
    names = [name for name in given.split(",") if name]
    if unknown := [name for name in names if name not in DROPS]:
        raise UsageError(f"unknown {unknown[0]!r} in --drop; expected some of {', '.join(DROPS)}")
    if output is None:
        raise UsageError("--drop names the rows that --write leaves out; add --write, or leave --drop out")
    return names


def check_outputs(diagnosis: Diagnosis, json_file: Path | None, output: Path | None) -> None:
    """Check that the files of --json and --write differ, and are none of the data's, under any of their names.

    Raises:
        UsageError: They are not, or as for `plan_files`.
    """
    files = list(plan_files(diagnosis, output).values()) if output else []
    if json_file and os.path.realpath(json_file) in map(os.path.realpath, files):
        raise UsageError(f"--json and --write would both write {json_file}; name another file with --json")
    named = [(path, "--json") for path in (json_file,) if path] + [(path, "--write") for path in files]
    sources = [diagnosis.findings["data"], *(table.source for table in find_tables(diagnosis).values())]
    for path, option in named:
        for source in sources:
            if os.path.isfile(path) and os.path.isfile(source) and os.path.samefile(path, source):
                kind = "folder" if option == "--write" and len(files) > 1 else "file"
                raise UsageError(
                    f"{path} is also the input and would be overwritten; name another {kind} with {option}"
                )


def plan_files(diagnosis: Diagnosis, output: Path) -> dict[str, Path]:
    """Return the file to write for each file of the data.

    Data of a single file become a file, .csv or .jsonl. Those of several splits become a folder with a file for each.

    Raises:
        UsageError: The data are not a person's own table, or the output does not fit them.
    """
    tables = find_tables(diagnosis)
    if not tables:
        raise UsageError(
            "--write is for texts and labels or tagged sentences in CSV, TSV, JSON, JSON lines or Parquet, not for "
            f"{diagnosis.findings['data'] or diagnosis.task.name}; leave it out"
        )
    sources = {table.source: split for split, table in reversed(tables.items())}  # its first split
    if len(sources) == 1:
        if output.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"{output} must end in .csv or .jsonl; rename it")
        if any(table.lists for table in tables.values()) and output.suffix == ".csv":
            raise UsageError(f"the table has cells with lists, which CSV lacks; name a .jsonl file instead of {output}")
        files = dict.fromkeys(sources, output)
    else:
        if output.suffix or output.is_file():
            raise UsageError(f"the data have several files; name a folder with --write instead of {output}")
        files = {source: output / name_file(split, tables[split]) for source, split in sources.items()}
        check_folder(output, [path.name for path in files.values()])
    return files


def name_file(split: str, table: Columns) -> str:
    """Return the name of a split's file in a folder."""
    suffix = ".jsonl" if table.lists or is_json(table) else ".csv"
    return f"{name_split(split)}{suffix}"


def find_tables(diagnosis: Diagnosis) -> dict[str, Columns]:
    """Return the rows of each split of a person's own table; empty for other data."""
    return {split: rows.source for split, rows in diagnosis.rows.items() if rows.source is not None}


def write_clean(diagnosis: Diagnosis, drops: Sequence[str], output: Path, report: Report) -> None:
    """Write the rows that remain, in the order of their files; rows that training leaves out are not written.

    A file of which no row remains is not written.

    Raises:
        UsageError: As for `plan_files`, no row of train remains, or a file cannot be written.
    """
    files, tables, kept = plan_files(diagnosis, output), find_tables(diagnosis), keep_rows(diagnosis, drops)
    parts = {source: [split for split, table in tables.items() if table.source == source] for source in files}
    left = {source: sum(int(kept[split].sum()) for split in splits) for source, splits in parts.items()}
    if not left[tables[TRAIN_SPLIT].source]:
        raise UsageError(f"--drop {','.join(drops)} leaves no row of train to write; name fewer findings with --drop")
    if len(files) > 1:
        check_folder(output, [files[source].name for source in files if left[source]])
    without = f"without {', '.join(drops) or 'any finding'}"
    for source, path in files.items():
        total = count(sum(len(tables[split]) for split in parts[source]), "row")
        if not left[source]:
            report(f"{path}: 0 of {total}, {without}; not written")
            continue
        rows = join_rows([tables[split].take(np.flatnonzero(kept[split])) for split in parts[source]])
        with explain_refusal(f"the file {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_table(rows, path)
        report(f"{path}: {len(rows):,} of {total}, {without}")


def check_folder(folder: Path, names: Collection[str]) -> None:
    """Check that a folder has no tables of splits besides those to write, which would be read with them.

    Raises:
        UsageError: It has.
    """
    if others := [name for name in list_split_files(folder) if name not in names]:
        raise UsageError(
            f"{folder} already has {' and '.join(others)}, which would be read with the new files; name another folder "
            "with --write"
        )


def keep_rows(diagnosis: Diagnosis, drops: Sequence[str]) -> dict[str, np.ndarray]:
    """Return for each split (S,) whether a row remains."""
    checked, near = diagnosis.checked, diagnosis.near
    wrong = [checked.keys[split][rows] for split, found in checked.splits.items() for rows in found.contradictory]
    wrong += [checked.keys[split][found.contradicts_train[:, 0]] for split, found in checked.splits.items()]
    contradictory, kept = np.unique(np.concatenate(wrong)), {}
    sources = {split: table.source for split, table in find_tables(diagnosis).items()}
    suspected = [entry["row"] for entry in diagnosis.findings.get("label_errors", {}).get("suspected", ())]
    for split, found in checked.splits.items():
        is_suspected = np.isin(diagnosis.rows[split].lines, suspected) & (sources[split] == sources[TRAIN_SPLIT])
        rows = {
            "leaks": found.in_train[:, 0],
            "repeats": found.repeats[:, 0],
            "contradictory": np.flatnonzero(np.isin(checked.keys[split], contradictory)),
            "near": np.concatenate([near[split].in_train[:, 0], near[split].repeats[:, 0]]),
            LABEL_ERROR_DROP: np.flatnonzero(is_suspected),
        }
        kept[split] = np.ones(found.size, bool)
        for name in drops:
            kept[split][rows[name]] = False
    return kept


def join_rows(parts: Sequence[Columns]) -> Columns:
    """Return the rows of parts of one file, in the order of the file."""
    lines = np.concatenate([np.asarray(part.lines, np.int64) for part in parts])
    table = pa.concat_tables([part.table for part in parts])
    joined = replace(parts[0], table=table, lines=lines.tolist(), records=())
    return joined.take(np.argsort(lines, kind="stable"))


def write_table(rows: Columns, path: Path) -> None:
    """Write a table as CSV or JSON lines; objects of the input keep their types."""
    with atomic_open(path) as stream:
        if path.suffix == ".jsonl" and is_json(rows):
            stream.writelines(f"{line}\n" for line in list_objects(rows))
        else:
            write_rows(rows.walk(rows.lists), rows.table.column_names, stream, path.suffix)


def list_objects(rows: Columns) -> Iterator[str]:
    """Yield the object of each row, on one line, as its file has it."""
    path, kept = Path(rows.source), set(rows.lines)
    encoding = find_encoding(path, may_be_western=False)
    found = read_lines(path, encoding) if rows.unit == "line" else map(write_on_a_line, read_array(path, encoding))
    yield from (text for number, text in enumerate(found, 1) if number in kept)


def write_on_a_line(value: msgspec.Raw) -> str:
    """Return a JSON text without its line breaks."""
    return msgspec.json.format(bytes(value), indent=0).decode()


def is_json(rows: Columns) -> bool:
    """Return whether the rows are objects of a JSON or JSON lines file."""
    return rows.source.removesuffix(".gz").endswith((".json", ".jsonl")) and Path(rows.source).is_file()
