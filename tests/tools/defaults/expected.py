"""Check the doctor's expected scores on real data: `python -m tests.tools.defaults.expected DATA MODEL OUT`.

OUT is the folder of the runs of `tests.tools.defaults`. It prints what the doctor expects of each table, beside the
score on dev that `auto` reached from the same rows. With `--forecasts` instead of OUT it counts how often the
interval of the forecast has the score that the same baseline reaches with twice the rows, on 1,000 others.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from bertkit.analysis import expected
from bertkit.analysis.doctor import Diagnosis, examine, expect_scores
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.run_dir import METRICS_FILE, read_metrics
from tests.tools.defaults.plan import PLAN, READERS, TYPES, Rows, draw, name_run, write_rows

TABLES = ((300, 1), (1000, 1))  # rows and seed of the tables that are shown
FORECASTS, SUBSETS, OTHERS = (("SST-2", 200), ("SST-2", 500), ("topics", 200), ("topics", 500)), 20, 1000
FIRST_SEED = 100
MAX_LENGTH = 128


def look(data: str, rows: Rows, model: str, folder: Path) -> Diagnosis:
    """Examine rows as a training split."""
    (name, *_), texts, _, _ = READERS[data]
    write_rows(rows, folder / "train")
    write_rows(rows[:50], folder / "dev")
    columns = {"text": list(texts)} if texts else {}
    return examine(TASKS[name], {"checkpoint": model, "data": {"dir": str(folder), **columns}}, None, ignore)


def expect(data: str, rows: Rows, model: str) -> Mapping[str, Any]:
    """Return what the doctor expects of rows."""
    with TemporaryDirectory() as folder:
        found = expect_scores(look(data, rows, model, Path(folder)), [model], ignore)
    assert found is not None
    return found


def score_others(data: str, rows: Rows, model: str, name: str) -> tuple[float, float]:
    """Return the scores of a baseline on the last OTHERS rows, fitted to half of the other rows and to all of them."""
    count, choose = len(rows) - OTHERS, expected.choose_head

    def choose_by_fitted(vectors: Any, targets: np.ndarray, labels: int, groups: np.ndarray) -> tuple[str, float]:
        fitted = {unit: matrix[:count] for unit, matrix in vectors.items()}
        return choose(fitted, targets[:count], labels, groups[:count])

    with TemporaryDirectory() as folder, patch.object(expected, "choose_head", choose_by_fitted):
        diagnosis = look(data, rows, model, Path(folder))
        groups = np.asarray(diagnosis.rows["train"].groups)
        whole = expected.ROWS[type(diagnosis.train)](TASKS[diagnosis.recipe.task], diagnosis.train, groups)
        baselines = whole.list_baselines([model], MAX_LENGTH, ignore)
        (fit,) = [fit for facts, fit in baselines if facts["name"] == name]
    asked = np.arange(count, len(rows))
    asked = asked[~np.isin(groups[asked], groups[:count])]
    answers = [fit(np.arange(size), asked) for size in (count // 2, count)]
    half, full = (expected.get_value(whole.score([part], asked)[whole.task.metric]) for part in answers)
    return half, full


def check_forecasts(root: Path, model: str) -> None:
    """Print how often the forecasts were right."""
    print("| data | rows | score within its interval | its mean width | gain within its interval | mean gain, true |")
    print("|---|---|---|---|---|---|", flush=True)
    for data, count in FORECASTS:
        train, _ = READERS[data][3](root / READERS[data][2])
        scores_inside, gains_inside, widths, gains = 0, 0, [], []
        for seed in range(FIRST_SEED, FIRST_SEED + SUBSETS):
            rows = draw(train, 2 * count + OTHERS, seed)
            found = expect(data, rows[:count], model)
            ahead, name = found["curve"]["forecast"], found["curve"]["name"]
            half, full = score_others(data, rows, model, name)
            scores_inside += ahead["low"] <= full <= ahead["high"]
            gains_inside += ahead["gain_low"] <= full - half <= ahead["gain_high"]
            widths.append(ahead["high"] - ahead["low"])
            gains.append((ahead["gain"], full - half))
        cells = [f"{scores_inside} of {SUBSETS}", f"{100 * np.mean(widths):.1f}", f"{gains_inside} of {SUBSETS}"]
        cells.append(", ".join(f"{gain:+.1f}" for gain in 100 * np.mean(gains, axis=0)))
        print(f"| {data} | {count} | {' | '.join(cells)} |", flush=True)


def show_tables(root: Path, model: str, out: Path) -> None:
    """Print what the doctor expects, beside the score of `auto`."""
    print("| data | rows | constant | TF-IDF or words | frozen vectors | twice the rows | auto on dev |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for data, sizes in [*PLAN.items(), (TYPES, (300, 1000))]:
        train, _ = READERS[data][3](root / READERS[data][2])
        for count, seed in TABLES:
            if count not in sizes:
                continue
            found = expect(data, draw(train, count, seed), model)
            named = {one["name"]: one for one in found["baselines"]}
            cells = [f"{100 * named['constant answer']['score']:.1f}"]
            for names in (("TF-IDF", "words alone"), ("frozen vectors",)):
                cells += [next((show(named[name]) for name in names if name in named), "")]
            cells.append(show(found["curve"]["forecast"]) if "curve" in found else "")
            file = out / name_run(data, count, seed, "auto") / METRICS_FILE
            cells.append(f"{100 * read_metrics(file)['score']:.1f}" if file.exists() else "")
            print(f"| {data} | {count:,} | {' | '.join(cells)} |", flush=True)


def show(found: Mapping[str, float]) -> str:
    """Return a score with its interval, in percent."""
    limits = f" ({100 * found['low']:.1f} to {100 * found['high']:.1f})" if "low" in found else ""
    return f"{100 * found['score']:.1f}{limits}"


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", default=Path())
    parser.add_argument("--forecasts", action="store_true")
    options = parser.parse_args()
    if options.forecasts:
        check_forecasts(options.data, options.model)
    else:
        show_tables(options.data, options.model, options.out)


if __name__ == "__main__":
    main()
