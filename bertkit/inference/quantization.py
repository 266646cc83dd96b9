"""Choose which layers of an export are int8, and prove on other rows how much of the score this loses.

One half of dev ranks the layers by the effect of their int8 weights on the outputs, and chooses among variants that
exempt the first of them. On the other half the paired difference to the run decides, with its 95 % interval
(`bertkit.metrics.intervals`). Left out: the arithmetic of int8 (`bertkit.model.onnx`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.data.sequences import IGNORED, batch_by_length
from bertkit.errors import UsageError
from bertkit.inference.export_record import Int8Variant, Proof
from bertkit.metrics.calibration import temper
from bertkit.metrics.intervals import Difference, compare_rows, judge
from bertkit.metrics.rows import RowScore
from bertkit.model.checkpoint import find_file
from bertkit.model.onnx import ONNX_FILE, Layer, OnnxModel, list_layers, quantize
from bertkit.reports.tables import Table, make_table
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.prediction import TOKENS_ON_CPU
from bertkit.tasks.task import TUNE, PredictionSettings, Task
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import RECIPE_FILE

RANKING_ROWS = 128  # on which the effect of each layer is measured
MOST_LOST = 0.5  # the part of the bound that a variant may lose on the rows that choose
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
        found = self.task.measure_rows(np.stack(padded), self.data, self.decided)[self.task.metric]
        return found.join(self.groups) if len(found) == len(self.groups) else found  # of NER: documents already


def load_halves(run: str, settings: PredictionSettings, place: str | None = None) -> tuple[Rows, Rows]:
    """Return the halves of a run's dev rows: those that choose, and those that prove.

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
        _, dev = task.divide(dev, share)
    config = settings.model.config
    decided = {name: value for name in ("tau", "thresholds") if (value := getattr(config, name)) is not None}
    halves = []
    for part in task.divide(dev, 0.5):
        data = task.encode(part, settings.tokenizer, recipe, "dev")
        starts = range(0, len(data), SIZED_AT_ONCE)
        parts = (task.collate(data.__getitems__(range(x, min(x + SIZED_AT_ONCE, len(data))))) for x in starts)
        lengths = np.concatenate([batch["attention_mask"].flatten(1).sum(1).numpy() for batch in parts])
        halves.append(Rows(task, data, lengths, decided, task.list_groups(part)))
    return halves[0], halves[1]


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


def prove(
    chooses: Rows,
    proves: Rows,
    model: Any,
    exact: Path,
    folder: Path,
    max_loss: float,
    report: Report = ignore,
) -> tuple[Proof, Path]:
    """Return the proof of the best int8 variant of a model's export, and its file, which is in a folder of its own.

    The best variant has the fewest exempt layers among those that lose at most half of the bound on the rows that
    choose; if there is none, it is the one that loses least.

    Args:
        exact: The export in fp32.
        folder: Where to write the variants.
        max_loss: The bound, in points of a table.
    """

    def load(path: Path) -> OnnxModel:
        return OnnxModel(path, model.config, is_int8=path != exact)

    before, task = chooses.rate(model), chooses.task
    ranked = rank_layers(exact, chooses, load, folder)
    report(f"int8 changes the outputs most in: {', '.join(map(spell_layer, ranked[:4]))}")
    variants, paths = [], []
    for count in (0, *(1 << power for power in range(len(ranked).bit_length()) if 1 << power < len(ranked))):
        paths.append(folder / str(count) / ONNX_FILE)
        paths[-1].parent.mkdir()
        quantize(exact, paths[-1], ranked[:count])
        after = chooses.rate(load(paths[-1]))
        difference = compare_rows(before, after)
        size = sum(part.stat().st_size for part in paths[-1].parent.iterdir())
        variants.append(Int8Variant(ranked[:count], size, show_points(after), *list_limits(difference)))
        report(f"{describe_exempt(variants[-1])}: {describe_difference(difference)}")
    sufficient = [place for place, variant in enumerate(variants) if variant.difference >= -MOST_LOST * max_loss]
    chosen = sufficient[0] if sufficient else int(np.argmax([variant.difference for variant in variants]))
    both = proves.rate(model), proves.rate(load(paths[chosen]))
    difference = compare_rows(*both)
    verdict = judge(difference, max_loss)
    report(f"{describe_exempt(variants[chosen])} on the other half of dev: {describe_difference(difference)}")
    found = (verdict.state, verdict.describe(), max_loss, task.metric, verdict.rows, verdict.needed)
    scores = (show_points(before), show_points(both[0])), show_points(both[1])
    return Proof(*found, *scores, *list_limits(difference), chosen, variants), paths[chosen]


def show_points(score: RowScore) -> float:
    """Return a score in points, to four decimals."""
    return round(float(score.points * score.score(np.ones((1, len(score))))[0]), 4)


def list_limits(difference: Difference) -> tuple[float, float, float]:
    """Return a difference and its interval, to four decimals."""
    value, low, high = (round(number, 4) for number in (difference.value, difference.low, difference.high))
    return value, low, high


def spell_layer(layer: Layer) -> str:
    """Return a layer in words."""
    return f"layer {layer + 1}" if isinstance(layer, int) else layer


def describe_exempt(variant: Int8Variant) -> str:
    """Return which layers of a variant stay in fp32."""
    numbers = sorted(layer + 1 for layer in variant.exempt if isinstance(layer, int))
    layers = [f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"] * bool(numbers)
    names = [*layers, *(layer for layer in variant.exempt if isinstance(layer, str))]
    return f"int8 except {', '.join(names)}" if names else "int8 in all layers"


def describe_difference(difference: Difference) -> str:
    """Return a difference with its interval."""
    limits = f"{difference.low:+.2f} to {difference.high:+.2f}"
    return f"{difference.value:+.2f} points ({limits}) with {difference.rows:,} rows"


def tabulate_proof(proof: Proof) -> Table:
    """Return the table of the variants, and of the chosen one on the rows that prove."""
    lines = [
        [describe_exempt(variant), "first", f"{variant.size / 1e6:,.1f}", *show_limits(variant)]
        for variant in proof.variants
    ]
    chosen = proof.variants[proof.chosen]
    lines.append([describe_exempt(chosen), "second", f"{chosen.size / 1e6:,.1f}", *show_limits(proof)])
    caption = f"{proof.metric}, difference to the run in points; at most {proof.max_loss:g} may be lost: {proof.words}"
    return make_table(caption, ["", "half of dev", "MB", "score", "difference", "95 % interval"], lines)


def show_limits(found: Int8Variant | Proof) -> list[str]:
    """Return the cells of a score, its difference to the run's, and the interval."""
    return [f"{found.score:.2f}", f"{found.difference:+.2f}", f"{found.low:+.2f} to {found.high:+.2f}"]
