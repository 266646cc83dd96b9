"""Quantise an export to int8, and measure how much of the score on dev this costs.

With a bound, the layers whose int8 weights change the outputs most stay in fp32, one more at a time, until the score is
within it. Left out: the arithmetic of int8 (`bertkit.model.onnx`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.errors import UsageError
from bertkit.inference.evaluate import ScoredModel, read_own, summarize
from bertkit.inference.export_record import Int8, Int8Variant
from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import RowScore
from bertkit.model.onnx import Layer, OnnxModel, list_layers, quantize
from bertkit.reports.tables import Table, make_table
from bertkit.system.progress import Report, ignore

RANKING_ROWS = 128  # on which the effect of each layer is measured


@dataclass(frozen=True, eq=False)
class Dev:
    """The encoded rows of a run's dev split, each with its group."""

    scored: ScoredModel
    data: Any
    groups: Sequence[Hashable]

    def rate(self, model: Any) -> RowScore:
        """Return the task's score of a model as a function of the weights of these rows."""
        task, summaries = self.scored.task, summarize(self.scored.task, model, self.data)
        return task.score(task.rows(summaries, self.data, self.scored.decided))[task.metric]


def load_dev(scored: ScoredModel, folder: str | None = None) -> Dev:
    """Return the rows of a run's dev split, or of that in another folder."""
    if folder:
        scored = replace(scored, recipe=scored.recipe.override(data={"dir": folder}))
    dev = read_own(scored, ignore)[next(iter(scored.task.splits))]
    data = scored.task.encode(dev, scored.settings.tokenizer, scored.recipe, "dev")
    return Dev(scored, data, scored.task.tabulate(dev).groups)


@torch.inference_mode()
def rank_layers(exact: Path, dev: Dev, config: Any, folder: Path) -> list[Layer]:
    """Return the layers of an export, first the one whose int8 weights change the outputs most."""
    task, layers, effects = dev.scored.task, list_layers(exact), []
    batch = task.collate(dev.data.__getitems__(list(range(min(len(dev.data), RANKING_ROWS)))))
    real = batch["attention_mask"].bool()
    expected = OnnxModel(exact, config)(**batch, **task.evaluation_options)
    for layer in layers:
        path = folder / "one.onnx"
        quantize(exact, path, [other for other in layers if other != layer])
        found = OnnxModel(path, config, is_int8=True)(**batch, **task.evaluation_options)
        squares = {name: (found[name] - values).square() for name, values in expected.items()}
        effects.append(sum(float((x[real] if x.dim() > real.dim() else x).sum()) for x in squares.values()))
    return [layers[number] for number in np.argsort(effects, kind="stable")[::-1]]


def choose_int8(
    dev: Dev, model: Any, exact: Path, folder: Path, max_loss: float | None, report: Report = ignore
) -> tuple[Int8, Path]:
    """Quantise an export, and return the record of what was tried and the file of the last variant.

    Args:
        exact: The export in fp32.
        folder: Where to write the variants.
        max_loss: Points of the score that may be lost; None: all layers are int8, whatever is lost.

    Raises:
        UsageError: Even the variant with the fewest int8 layers loses more.
    """
    before, exempt = dev.rate(model), []
    found = Int8(dev.scored.task.metric, len(dev.groups), rate_points(before), max_loss)
    while True:
        path = folder / f"{len(exempt)}.onnx"
        quantize(exact, path, exempt)
        after = dev.rate(OnnxModel(path, model.config, is_int8=True))
        difference = compare_methods([before], [after], dev.groups)
        limits = (round(number, 4) for number in (difference.value, difference.low, difference.high))
        found.variants.append(Int8Variant(exempt, path.stat().st_size, rate_points(after), *limits))
        name, _, _, lost, interval = list_cells(found.variants[-1])
        report(f"{name}: {lost} points of {found.metric} ({interval}) with {found.rows:,} rows of dev")
        if max_loss is None or difference.value >= -max_loss:
            return found, path
        if not exempt:
            ranked = rank_layers(exact, dev, model.config, folder)
        if len(exempt) + 1 == len(ranked):
            raise UsageError(
                f"int8 loses {-difference.value:.2f} points of {found.metric} even if only {spell_layer(ranked[-1])} "
                f"is int8, more than --max-loss {max_loss:g}; raise it, or export in fp32"
            )
        exempt = ranked[: len(exempt) + 1]
        path.unlink()


def rate_points(score: RowScore) -> float:
    """Return a score in points, to four decimals."""
    return round(score.points * float(score.score(np.ones((1, len(score))))[0]), 4)


def spell_layer(layer: Layer) -> str:
    """Return a layer in words."""
    return f"layer {layer + 1}" if isinstance(layer, int) else layer


def list_cells(one: Int8Variant) -> list[str]:
    """Return what a variant is, its megabytes, its score, and the difference with its interval in points."""
    name = f"int8 except {', '.join(map(spell_layer, one.exempt))}" if one.exempt else "int8 in all layers"
    interval = f"{one.low:+.2f} to {one.high:+.2f}"
    return [name, f"{one.size / 1e6:,.1f}", f"{one.score:.2f}", f"{one.difference:+.2f}", interval]


def tabulate_int8(found: Int8) -> Table:
    """Return the table of the variants; the last one is exported."""
    chosen = "; the layers were chosen on the same rows" if len(found.variants) > 1 else ""
    caption = f"{found.metric} on dev ({found.rows:,} rows), difference to the run in points{chosen}"
    return make_table(caption, ["", "MB", "score", "difference", "95 % interval"], map(list_cells, found.variants))
