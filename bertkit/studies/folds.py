"""Cross-validation: a study with one row per fold, its mean scores, and the out-of-fold predictions of all rows."""

import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from bertkit.data.formats.conll import DOCSTART
from bertkit.data.formats.writer import name_apart, write_rows
from bertkit.errors import UsageError
from bertkit.metrics.table import LABEL, make_rows, read_facts
from bertkit.reports.tables import Table, list_shown, make_table
from bertkit.studies.run_processes import RunJob
from bertkit.system.files import atomic_open, write_json
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.predictions import KEY, ROW_NUMBER, TABLE_SUFFIX, hash_rows, pack_table, read_table
from bertkit.training.recipe import load_recipe
from bertkit.training.run_dir import PREDICTIONS, RECIPE_FILE
from bertkit.training.study_results import StudyResults

OUT_OF_FOLD = "out_of_fold"  # the file has the suffixes of a run's predictions
ROW_FILES = ("dev.csv", "dev.jsonl", "dev.conll")  # files with a row, a line or a block for each row of dev
FOLD_SCORES = "folds.json"


def check_folds(finished: Iterable[RunJob]) -> None:
    """Check that finished folds have predicted the rows of the data as they are now, because all folds are joined."""
    for job in finished:
        task, options = TASKS[job.recipe.task], job.recipe.data
        if not options.get("folds"):
            continue
        locate_rows([Path(job.output)])
        rows = task.tabulate_examples(task.load(options, ignore)[next(iter(task.splits))])
        there = read_table(Path(job.output) / PREDICTIONS / f"dev{TABLE_SUFFIX}").select([KEY, ROW_NUMBER])
        if there.to_pydict() != {KEY: hash_rows(rows.walk_texts(), rows.labels), ROW_NUMBER: list(rows.lines)}:
            raise UsageError(
                f"{job.output} was started with other data; restore them, or name another directory with --output"
            )


def gather_folds(results: StudyResults, output: Path) -> Table | None:
    """Write the scores over all folds and the out-of-fold predictions, and return a table of the scores.

    Nothing is written if a run has failed; then there is no table.

    The predictions are in the order of the input with the number of the fold, which only CoNLL files lack.
    """
    runs = [run for cell in results.cells for run in cell.runs]
    if any(run.status != "finished" for run in runs):
        return None
    folders = [output / run.directory for run in runs]
    task = TASKS[load_recipe(folders[0] / RECIPE_FILE).task]
    paths = locate_rows(folders)
    tables = [read_table(path.with_name(f"dev{TABLE_SUFFIX}")) for path in paths]
    metrics = [run.metrics for run in runs]
    scores, lines = {}, []
    together = {key: value for found in metrics for key, value in found.items()}
    for row in list_shown(task.table, task.metric, together):
        values = [found[row.key] for found in metrics if row.key in found]  # some are undefined without a label
        sd = statistics.stdev(values) if len(values) > 1 else None
        scores[row.key] = {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}
        lines.append((row.head, row.show_mean(*scores[row.key].values())))
    write_json(scores, output / FOLD_SCORES)
    rows = join_folds(tables)
    join_files(paths, rows.column(0).to_pylist(), (output / OUT_OF_FOLD).with_suffix(paths[0].suffix))
    with atomic_open(output / f"{OUT_OF_FOLD}{TABLE_SUFFIX}", "wb") as file:
        file.write(pack_table(rows))
    return make_table(f"{output}", ["score", f"mean ± sd (n) over {len(runs)} folds"], lines)


def locate_rows(folders: Sequence[Path]) -> list[Path]:
    """Return the file of dev's rows in the predictions of each finished fold, which lies beside its table."""
    there = [{path.name for path in (folder / PREDICTIONS).glob("dev.*")} for folder in folders]
    name = next((name for name in ROW_FILES if any(name in names for names in there)), ROW_FILES[0])
    for folder, names in zip(folders, there, strict=True):
        if missing := [file for file in (name, f"dev{TABLE_SUFFIX}") if file not in names]:
            raise UsageError(f"{folder} has no {PREDICTIONS}/{missing[0]}; delete {folder} and repeat the command")
    return [folder / PREDICTIONS / name for folder in folders]


def join_folds(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of the folds' tables in the input's order, with the fold's number, from 1.

    Equal rows of several folds get keys that differ, and each fold's threshold stays in its own table.
    """
    names = tables[0].column_names
    folds = np.repeat(np.arange(len(tables)) + 1, list(map(len, tables)))
    rows = pa.concat_tables(tables, promote_options="default")  # a fold may lack a type of entities
    filled = [x.fill_null(0) if x.null_count and pa.types.is_integer(x.type) else x for x in rows.columns]
    rows = pa.table(filled, rows.column_names).add_column(0, name_apart("fold", names, "_number"), pa.array(folds))
    rows = rows.take(pa.array(np.argsort(rows.column(ROW_NUMBER).to_numpy(), kind="stable")))
    facts = {name: fact for name, fact in read_facts(tables[0]).items() if name != "decided"}
    facts["names"] = list(dict.fromkeys(name for one in tables for name in read_facts(one).get("names", [])))
    texts = zip(*(rows.column(name).to_pylist() for name in facts["texts"]), strict=True)
    keys = pa.array(hash_rows(texts, rows.column(LABEL).to_pylist()), pa.uint64())
    return make_rows(dict(zip(rows.column_names, rows.columns, strict=True)) | {KEY: keys}, **facts)


def join_files(paths: list[Path], fold_of: list[int], path: Path) -> None:
    """Write the rows of the folds' predictions in the input's order, with the fold's number, from 1.

    The sentences of CoNLL files are without it, and without the lines that begin documents.
    """
    csv.field_size_limit(sys.maxsize)  # a limit of the process; the cells have been read once
    with ExitStack() as stack:
        files = [stack.enter_context(one.open(encoding="utf-8", newline="")) for one in paths]
        found = list(map(WALKERS[path.suffix], files))
        rows = ((fold, next(found[fold - 1])) for fold in fold_of)
        with atomic_open(path) as file:
            if path.suffix == ".conll":
                file.writelines(f"{block}\n" for _, block in rows)
                return
            numbered = ({name_apart("fold", row, "_number"): fold, **row} for fold, row in rows)
            first = next(numbered)
            write_rows(chain([first], numbered), first, file, path.suffix)


def walk_blocks(file: IO[str]) -> Iterator[str]:
    """Yield the lines of each sentence of a CoNLL file."""
    for is_blank, lines in groupby(file, key=lambda line: line == "\n"):
        block = "".join(lines)
        if not is_blank and not block.startswith(DOCSTART):
            yield block


WALKERS: dict[str, Callable[[IO[str]], Iterator[Any]]] = {
    ".csv": csv.DictReader,
    ".jsonl": partial(map, json.loads),
    ".conll": walk_blocks,
}
