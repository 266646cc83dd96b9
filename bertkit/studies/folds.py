"""Cross-validation: a study with one row per fold, its mean scores, and the predictions of all rows by models that have
not seen them.
"""

import csv
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.formats.columns import read_splits
from bertkit.data.splits import split_fold
from bertkit.errors import UsageError
from bertkit.reports.tables import Table, make_table
from bertkit.system.files import atomic_open, write_json
from bertkit.tasks.classification import CLASSIFICATION, choose_columns, hash_rows, name_apart
from bertkit.training.recipe import Recipe, merge, read_recipe
from bertkit.training.run_dir import PREDICTIONS, RECIPE_FILE

OUT_OF_FOLD = "out_of_fold.csv"
FOLD_SCORES = "folds.json"


def define_folds(recipe: Recipe, folds: int) -> dict[str, Any]:
    """Return the definition of a study with a row for each fold.

    Raises:
        UsageError: There are fewer than two folds.
    """
    if folds < 2:
        raise UsageError(f"--folds is {folds}; give at least 2")
    rows = [{"name": f"fold {fold + 1}", "recipe": {"data": {"fold": fold}}} for fold in range(folds)]
    return {"tasks": [CLASSIFICATION.name], "recipe": merge(recipe, {"data": {"folds": folds}}), "row": rows}


def gather_folds(results: Mapping[str, Any], output: Path) -> Table | None:
    """Write the scores over all folds and the out-of-fold predictions, and return a table of the scores.

    Nothing is written if a run has failed; then there is no table.

    The predictions are in the order of the input, with its columns, the fold, and the columns of the results.
    """
    runs = [run for cell in results["cells"] for run in cell["runs"]]
    if any(run["status"] != "finished" for run in runs):
        return None
    folders = [output / run["directory"] for run in runs]
    options = read_recipe(folders[0] / RECIPE_FILE)["data"]
    metrics = [run["metrics"] for run in runs]
    scores, lines = {}, []
    for row in CLASSIFICATION.list_rows({key: value for found in metrics for key, value in found.items()}):
        values = [found[row.key] for found in metrics if row.key in found]  # some are undefined without a label
        sd = statistics.stdev(values) if len(values) > 1 else None
        scores[row.key] = {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}
        lines.append((row.head, row.show_mean(*scores[row.key].values())))
    write_json(scores, output / FOLD_SCORES)
    write_rows(folders, options, output / OUT_OF_FOLD)
    return make_table(f"{output}", ["score", f"mean ± sd (n) over {len(runs)} folds"], lines)


def write_rows(folders: list[Path], options: Mapping[str, Any], path: Path) -> None:
    """Write the predictions of each fold's dev split in the order of the input, with the number of the fold.

    Raises:
        UsageError: The table no longer has the rows of the folds.
    """
    table = read_splits(options["dir"])["train"]
    changed = f"{table.source} has changed since the folds were trained; name another directory with --output"
    text, _ = choose_columns(table, options["text"], options["label"])
    places = hash_rows(table, {**options, "text": text})
    fold_of = np.empty(len(table), int)
    for fold in range(len(folders)):
        fold_of[split_fold(places, len(folders), fold)["dev"]] = fold
    csv.field_size_limit(sys.maxsize)  # of the process; the cells were read before
    with ExitStack() as stack:
        files = [(folder / PREDICTIONS / "dev.csv").open(encoding="utf-8", newline="") for folder in folders]
        readers = [csv.reader(stack.enter_context(file)) for file in files]
        heads, *_ = [next(reader) for reader in readers]
        with atomic_open(path) as file:
            writer = csv.writer(file)
            writer.writerow([name_apart("fold", heads, "_number"), *heads])
            for fold in fold_of.tolist():
                if (cells := next(readers[fold], None)) is None:
                    raise UsageError(changed)
                writer.writerow([fold + 1, *cells])
            if any(next(reader, None) for reader in readers):
                raise UsageError(changed)
