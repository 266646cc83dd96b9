"""Quantise an export to int8, and measure how much of the score on dev this costs.

With a bound, the layers whose int8 weights change the outputs most stay in fp32, one more at a time, until the score is
within it. Left out: the arithmetic of int8 (`bertkit.model.onnx`).
"""

import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.data.sequences import IGNORED, batch_by_length
from bertkit.errors import UsageError
from bertkit.inference.export_record import Int8, Int8Variant
from bertkit.metrics.calibration import temper
from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import RowScore
from bertkit.model.checkpoint import find_file
from bertkit.model.onnx import ONNX_FILE, Layer, OnnxModel, list_layers, quantize
from bertkit.reports.tables import Table, make_table
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.examples import divide
from bertkit.tasks.prediction import TOKENS_ON_CPU
from bertkit.tasks.task import TUNE, PredictionSettings, Task
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE

RANKING_ROWS = 128  # on which the effect of each layer is measured
SIZED_AT_ONCE = 256  # rows collated to find their lengths


@dataclass(frozen=True)
class Rows:
    """Encoded rows of a run's dev split, and a way to rate a model on them.

    Attributes:
        lengths: (S,) tokens of each row.
        decided: Values of the run's configuration that an evaluation decides: tau, thresholds.
        groups: The group of each example, such as its context; an interval samples whole groups.
    """

    task: Task
    data: Any
    lengths: np.ndarray
    decided: dict[str, Any]
    groups: Sequence[Hashable]

    def list_batches(self, most: int | None = None) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield the numbers of some rows and their batch, for the first `most` rows or all."""
        for numbers in batch_by_length(self.lengths[:most], TOKENS_ON_CPU):
            yield numbers, self.task.collate(self.data.__getitems__(numbers.tolist()))

    @torch.inference_mode()
    def rate(self, model: Any) -> RowScore:
        """Return the task's score of a model as a function of the weights of these rows."""
        found: list[Any] = [None] * len(self.lengths)
        for numbers, batch in self.list_batches():
            summaries = self.task.summarize(model(**batch, **self.task.evaluation_options), batch).numpy()
            summaries = temper(summaries, model.config.temperature)
            for number, summary in zip(numbers.tolist(), summaries, strict=True):
                found[number] = summary
        sizes = np.array([summary.shape for summary in found])
        widths = sizes.max(axis=0) - sizes  # NER has a label for each word
        padded = [
            np.pad(summary, [(0, width) for width in row], constant_values=IGNORED)
            for summary, row in zip(found, widths.tolist(), strict=True)
        ]
        return self.task.score(self.task.rows(np.stack(padded), self.data, self.decided))[self.task.metric]


def load_rows(run: str, settings: PredictionSettings, place: str | None = None) -> Rows:
    """Return the rows of a run's dev split that score.

    Args:
        place: The folder of the data; None: that of the run's recipe.

    Raises:
        UsageError: There is no recipe, the task has no score, or the data are wrong or missing.
    """
    path = find_file(run, RECIPE_FILE)
    recipe = {} if path is None else read_recipe(path)
    task = TASKS.get(str(recipe.get("task")))
    if task is None or not task.metric:
        raise UsageError(f"{run} is not a fine-tuned run, so there is no score that int8 could lose; leave out --int8")
    examples = task.load(recipe["data"] | ({"dir": place} if place else {}), ignore)
    dev = examples[next(iter(task.splits))]
    if (share := recipe["data"].get("tune_share")) and TUNE not in examples:
        _, dev = divide(task, dev, share)
    config = settings.model.config
    decided = {name: value for name in ("tau", "thresholds") if (value := getattr(config, name)) is not None}
    data = task.encode(dev, settings.tokenizer, recipe, "dev")
    starts = range(0, len(data), SIZED_AT_ONCE)
    parts = (task.collate(data.__getitems__(range(x, min(x + SIZED_AT_ONCE, len(data))))) for x in starts)
    lengths = np.concatenate([batch["attention_mask"].flatten(1).sum(1).numpy() for batch in parts])
    return Rows(task, data, lengths, decided, task.tabulate(dev).groups)


@torch.inference_mode()
def rank_layers(exact: Path, rows: Rows, load: Callable[[Path], OnnxModel], folder: Path) -> list[Layer]:
    """Return the layers of an export, first the one whose int8 weights change the outputs most."""
    layers, model = list_layers(exact), load(exact)
    batches = [batch for _, batch in rows.list_batches(RANKING_ROWS)]
    expected = [model(**batch, **rows.task.evaluation_options) for batch in batches]
    effects = []
    for layer in layers:
        path = folder / "one.onnx"
        quantize(exact, path, [other for other in layers if other != layer])
        variant = load(path)
        squares = 0.0
        for batch, outputs in zip(batches, expected, strict=True):
            found = variant(**batch, **rows.task.evaluation_options)
            real = batch["attention_mask"].bool()
            for name, values in outputs.items():
                square = (found[name] - values).square()
                squares += float((square[real] if square.dim() > real.dim() else square).sum())
        effects.append(squares)
    return [layers[place] for place in np.argsort(effects, kind="stable")[::-1]]


def choose_int8(
    rows: Rows, model: Any, exact: Path, folder: Path, max_loss: float | None, report: Report = ignore
) -> tuple[Int8, Path]:
    """Quantise an export, and return the record of what was tried and the file of the last variant.

    Args:
        exact: The export in fp32.
        folder: Where to write the variants, each in a folder of its own.
        max_loss: Points of the score that may be lost; None: all layers are int8, whatever is lost.

    Raises:
        UsageError: Even the variant with the fewest int8 layers loses more.
    """

    def load(path: Path) -> OnnxModel:
        return OnnxModel(path, model.config, is_int8=path != exact)

    before, exempt = rows.rate(model), []
    found = Int8(rows.task.metric, len(set(rows.groups)), show_points(before), max_loss)
    while True:
        path = folder / str(len(exempt)) / ONNX_FILE
        path.parent.mkdir()
        quantize(exact, path, exempt)
        after = rows.rate(load(path))
        difference = compare_methods([before], [after], rows.groups)
        limits = (round(number, 4) for number in (difference.value, difference.low, difference.high))
        size = sum(part.stat().st_size for part in path.parent.iterdir())
        found.variants.append(Int8Variant(exempt, size, show_points(after), *limits))
        report(describe_variant(found))
        if max_loss is None or difference.value >= -max_loss:
            return found, path
        if not exempt:
            ranked = rank_layers(exact, rows, load, folder)
        if len(exempt) + 1 == len(ranked):
            raise UsageError(
                f"int8 loses {-difference.value:.2f} points of {found.metric} even if only {spell_layer(ranked[-1])} "
                f"is int8, more than --max-loss {max_loss:g}; raise it, or export in fp32"
            )
        exempt = ranked[: len(exempt) + 1]
        shutil.rmtree(path.parent)


def show_points(score: RowScore) -> float:
    """Return a score in points, to four decimals."""
    return round(float(score.points * score.score(np.ones((1, len(score))))[0]), 4)


def spell_layer(layer: Layer) -> str:
    """Return a layer in words."""
    return f"layer {layer + 1}" if isinstance(layer, int) else layer


def describe_exempt(variant: Int8Variant) -> str:
    """Return which layers of a variant stay in fp32."""
    return f"int8 except {', '.join(map(spell_layer, variant.exempt))}" if variant.exempt else "int8 in all layers"


def describe_variant(found: Int8) -> str:
    """Return a line about the last variant."""
    last = found.variants[-1]
    return (
        f"{describe_exempt(last)}: {last.difference:+.2f} points of {found.metric} "
        f"({last.low:+.2f} to {last.high:+.2f}) with {found.rows:,} rows of dev"
    )


def tabulate_int8(found: Int8) -> Table:
    """Return the table of the variants; the last one is exported."""
    lines = [
        [
            describe_exempt(one),
            f"{one.size / 1e6:,.1f}",
            f"{one.score:.2f}",
            f"{one.difference:+.2f}",
            f"{one.low:+.2f} to {one.high:+.2f}",
        ]
        for one in found.variants
    ]
    chosen = "; the layers were chosen on the same rows" if len(found.variants) > 1 else ""
    caption = f"{found.metric} on dev ({found.rows:,} rows), difference to the run in points{chosen}"
    return make_table(caption, ["", "MB", "score", "difference", "95 % interval"], lines)
