"""Export a run to a directory that `Predictor` and `bertkit predict` take in its place: ONNX, tokenizer, thresholds.

The exported model is compared with the run and timed before the directory is complete. An int8 export is scored on dev.
Left out: the graph and the arithmetic of int8 (`bertkit.model.onnx`).
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from huggingface_hub import cached_assets_path
from torch import Tensor

from bertkit.data.tokenizer import TOKENIZER_FILES, save_tokenizer
from bertkit.errors import UsageError, as_usage_error, explain_disk_error
from bertkit.inference.evaluate import ScoredModel, open_scored, read_own
from bertkit.inference.predictor import EXPORT_FILE, Predictor, read_export_record
from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import WeightedScore
from bertkit.model.config import BertConfig
from bertkit.model.heads import BertHead
from bertkit.model.onnx import (
    EXACT_SETS,
    check_exporter,
    quantize,
    write_onnx,
)
from bertkit.model.onnx_model import CHOOSES, ONNX_FILE, OnnxModel
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import Table, make_table
from bertkit.system.files import atomic_write, check_empty, take_fingerprint, write_json
from bertkit.system.hub import CARD, find_file
from bertkit.system.progress import Report, ignore
from bertkit.tasks.kinds import get_trained_kind
from bertkit.tasks.prediction import summarize_split
from bertkit.training.recipe import resolve
from bertkit.training.run_dir import CALIBRATION_FILE, RECIPE_FILE, describe_environment

# Tokens of the longest text that an export answers faster, in 0.8 of the time; half of it for several texts
FEW_TOKENS = 128
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # tolerance of probabilities
PARTS = ".export-"  # prefix of the folder in the output that has the files until they are complete
TIMED_LENGTHS = (16, 128, 512)  # tokens of one text
TEXTS_AT_ONCE, TIMED_IN_BATCHES = 8, 128  # texts, and the tokens of each
MOST_CALLS, FEWEST_CALLS, MOST_SECONDS = 200, 5, 10.0  # limits of each measurement
EXPORTED = (ONNX_FILE, CALIBRATION_FILE, "config.json", RECIPE_FILE, CARD, *TOKENIZER_FILES)

CARD_SECTION = """
## As ONNX

`{file}` is this {head} in {precision}, exported by bertkit {bertkit} for onnxruntime. Its inputs are int64 of shape
{shape}. Its probabilities in fp32 differ from the model's by at most {largest_difference:.0e}.

{table}

With bertkit, thresholds and long texts are read as by the model:

```bash
bertkit predict {name} --input inputs.jsonl
```

With onnxruntime alone:

```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
session = onnxruntime.InferenceSession("{name}/{file}")
inputs = {{name: ids{choices} for name, ids in tokenizer(["A text."], return_tensors="np").items()}}
print(session.run(None, inputs))
```
"""


def export(
    run: str,
    output: Path,
    report: Report = ignore,
    *,
    int8: bool = False,
    data: str | None = None,
) -> tuple[dict[str, Any], list[Table]]:
    """Export a run to a directory, and return its record and the tables of its measurements.

    An export in the same directory is replaced. The record is the content of export.json.

    Args:
        int8: Whether to export in int8.
        data: The folder of the data with this dev; None: that of the run's recipe.
    """
    check_exporter()
    if read_export_record(run):
        raise UsageError(f"{run} is an export already; give the run that it was made from")
    predictor = Predictor(run, precision="fp32")
    settings, model = predictor.settings, predictor.settings.model.to("cpu")
    dev = load_dev(open_scored(run, predictor), data) if int8 else None
    with explain_disk_error(output):
        if not any((output / name).exists() for name in (EXPORT_FILE, ONNX_FILE)):
            check_empty(output, "export")
        output.mkdir(parents=True, exist_ok=True)
        for lost in output.glob(f"{PARTS}*"):  # a killed export leaves its folder
            shutil.rmtree(lost)
        with TemporaryDirectory(dir=output, prefix=PARTS) as temporary:
            folder = Path(temporary, "export")
            folder.mkdir()
            path = folder / ONNX_FILE
            report(f"writing {run} as ONNX, and comparing both")
            write_onnx(model, path)
            model.config.save_pretrained(folder)
            for name in (RECIPE_FILE, CALIBRATION_FILE, CARD):
                if found := find_file(run, name):
                    shutil.copyfile(found, folder / name)
            save_tokenizer(settings.tokenizer, folder)
            exported = OnnxModel(path, model.config)
            difference = measure_difference(model, exported)
            if not difference <= TOLERANCE:  # NaN is refused too
                raise UsageError(
                    f"probabilities of the exported model differ from those of {run} by {difference:.1e}, more than "
                    f"{TOLERANCE:g}; install other versions of torch and onnxruntime"
                )
            report(f"the exported model differs from {run} by at most {difference:.1e} in probabilities")
            report("timing both on this machine, which may take a minute or two")
            weights = sum(weight.nbytes for weight in model.parameters())
            timings = {"run": time_model(model, weights), "fp32": time_model(exported, path.stat().st_size)}
            record = describe(run, exported, difference, timings)
            if dev:
                variant = Path(temporary, "int8.onnx")
                record["int8"] = export_int8(dev, model, path, variant, report)
                variant.replace(path)
                record["precision"] = "int8"
                timings["int8"] = time_model(OnnxModel(path, model.config, is_int8=True), path.stat().st_size)
            tables = [tabulate(record), *([tabulate_int8(record["int8"])] if dev else [])]
            write_export_card(folder / CARD, output.resolve().name, record, tables)
            for name in (EXPORT_FILE, *EXPORTED):  # an earlier export is incomplete from here on
                (output / name).unlink(missing_ok=True)
            for file in folder.iterdir():
                file.replace(output / file.name)
            write_json(record, output / EXPORT_FILE)
    return record, tables


# --- A cached export --------------------------------------------------------------------------------------------------


def add_export(predictor: Predictor, most_tokens: int, report: Report = ignore) -> None:
    """Let an export answer the small batches of a predictor in fp32 on a CPU, if the packages for it are installed.

    The export is kept in the cache under the fingerprint of weights, configuration and versions, if it agrees with the
    model when it is made.

    Args:
        most_tokens: Tokens of the longest text that the export answers; several together have at most half of it.
    """
    model, began = predictor.settings.model, time.monotonic()
    is_torch = isinstance(model, BertHead) and model.device.type == "cpu" and not hasattr(model, "bilstm")
    if not is_torch or predictor.precision != "fp32" or not all(map(find_spec, PACKAGES)):
        return
    facts = [model.config.to_json_string(), *map(version, (*PACKAGES, "torch"))]
    weights = (parameter.detach().numpy() for parameter in model.parameters())
    name = take_fingerprint(json.dumps(facts).encode(), *weights)
    path = cached_assets_path("bertkit", namespace="exports") / f"{name}.onnx"
    with as_usage_error("the folder of cached exports"):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent, prefix=PARTS) as folder:
                made = Path(folder, ONNX_FILE)
                write_onnx(model, made)
                difference = measure_difference(model, OnnxModel(made, model.config))
                if not difference <= TOLERANCE:
                    report(f"onnxruntime is not used: its probabilities differ by {difference:.1e}")
                    return
                made.replace(path)
    exported = OnnxModel(path, model.config, spins=False)
    predictor.settings = replace(predictor.settings, exported=exported, most_exported=most_tokens)
    took = time.monotonic() - began
    known = "everything" if most_tokens == sys.maxsize else f"texts of up to {most_tokens:,} tokens, torch all else"
    report(f"onnxruntime answers {known} ({took:.1f} s)")


# --- Comparison and measurements --------------------------------------------------------------------------------------


def make_batch(config: BertConfig, lengths: list[int], chooses: bool) -> dict[str, Tensor]:
    """Return a batch of random tokens with one sequence of each length, or two if they are choices."""
    rng = np.random.default_rng(0)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]  # (B, T)
    ids = torch.from_numpy(rng.integers(0, config.vocab_size, shape)) * mask
    segments = torch.from_numpy(rng.integers(0, config.type_vocab_size, shape)).sort(dim=1).values * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": segments}
    return {name: torch.stack([x, x.roll(1, 0)], dim=1) for name, x in batch.items()} if chooses else batch


def measure_difference(model: Any, exported: OnnxModel) -> float:
    """Return the largest difference between the probabilities of a model and its export, relative to numbers above 1.

    The sequences have random tokens and several lengths, up to the model's positions.
    """
    longest = model.config.max_position_embeddings
    groups = [[2], [3, longest // 4, 2, longest // 8], [longest, longest // 2]]
    differences = []
    for lengths in groups:
        batch = make_batch(model.config, [max(2, length) for length in lengths], exported.head == CHOOSES)
        with torch.inference_mode():
            sides = (list_probabilities(side(**batch), model.config, batch) for side in (model, exported))
            for one, other in zip(*sides, strict=True):
                shares = (one - other).abs() / one.abs().clamp(min=1)
                differences.append(float(shares.max()))
    return float(np.max(differences))  # NaN if one is


def list_probabilities(outputs: Any, config: BertConfig, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield the probabilities of each of a head's outputs at real tokens; the scores of a regression as they are."""
    mask = batch["attention_mask"].bool()
    for values in map(torch.as_tensor, outputs.values()):
        if values.dim() > mask.dim():
            values = values[mask]  # (N, L)
        yield get_trained_kind(config).activate(values)


def time_calls(call: Callable[[], Any]) -> np.ndarray:
    """Return the seconds of calls, after one that is not counted, for a few seconds or up to MOST_CALLS of them."""
    call()
    found: list[float] = []
    while len(found) < FEWEST_CALLS or (len(found) < MOST_CALLS and sum(found) < MOST_SECONDS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return np.array(found)


@torch.inference_mode()
def time_model(model: Any, size: int) -> dict[str, Any]:
    """Return the latency of a model or its export for one text, and the rate of batches.

    Args:
        size: In bytes.
    """
    config = model.config

    def measure_texts(count: int, length: int) -> np.ndarray:
        batch = make_batch(config, [length] * count, config.architectures[0] == CHOOSES)
        return time_calls(lambda: model(**batch))

    latency = {}
    for length in (length for length in TIMED_LENGTHS if length <= config.max_position_embeddings):
        seconds = measure_texts(1, length)
        middle, slow = (1000 * np.quantile(seconds, (0.5, 0.99))).tolist()
        latency[str(length)] = {"p50": round(middle, 3), "p99": round(slow, 3), "calls": len(seconds)}
    seconds = float(np.median(measure_texts(TEXTS_AT_ONCE, min(TIMED_IN_BATCHES, config.max_position_embeddings))))
    return {"size": size, "latency": latency, "texts_per_second": round(TEXTS_AT_ONCE / seconds, 2)}


def describe(run: str, exported: OnnxModel, difference: float, timings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the record of an export in fp32."""
    machine = describe_environment()
    return {
        "run": Path(run).resolve().name if Path(run).exists() else run,
        "head": exported.head,
        "precision": "fp32",
        "largest_difference": difference,
        "timings": timings,
        "texts_tokens": min(TIMED_IN_BATCHES, exported.config.max_position_embeddings),
        **{key: machine[key] for key in ("threads", "processor", "bertkit", "date")},
        "instruction_set": next(filter(torch.cpu.get_capabilities().get, EXACT_SETS), machine["instructions"]),
        **{name: version(name) for name in ("onnxruntime", "onnx")},
    }


def tabulate(record: Mapping[str, Any]) -> Table:
    """Return the table of an export's measurements, with a column for each model."""
    sides = list(record["timings"].values())
    lines = [
        [
            f"one text of {length} tokens, ms: p50 / p99",
            *("{p50:,.1f} / {p99:,.1f}".format_map(side["latency"][length]) for side in sides),
        ]
        for length in sides[0]["latency"]
    ]
    lines += [
        [f"{TEXTS_AT_ONCE} texts of {record['texts_tokens']} tokens, texts per second"]
        + [f"{side['texts_per_second']:,.1f}" for side in sides],
        ["MB", *(f"{side['size'] / 1e6:,.1f}" for side in sides)],
    ]
    caption = "{processor}, {instruction_set}, threads: {threads}".format_map(record)
    heads = ["", *("run, fp32" if name == "run" else f"ONNX, {name}" for name in record["timings"])]
    return make_table(caption, heads, lines)


def write_export_card(path: Path, name: str, record: Mapping[str, Any], tables: list[Table]) -> None:
    """Append the section about the export to the run's card; without one it is the whole page."""
    chooses = record["head"] == CHOOSES
    section = CARD_SECTION.format(
        **record,
        file=ONNX_FILE,
        name=name,
        shape="(batch, choices, length)" if chooses else "(batch, length)",
        choices="[None]" if chooses else "",
        table="\n\n".join("\n".join([f"{table.caption}:", "", *format_table(table)]) for table in tables),
    )
    card = path.read_text(encoding="utf-8", errors="replace") if path.exists() else f"# {name}\n"
    atomic_write(card.rstrip("\n") + "\n" + section, path)


# --- int8 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dev:
    """The encoded rows of a run's dev split, each with its group."""

    scored: ScoredModel
    data: Any
    groups: Sequence[Hashable]

    def rate(self, model: Any) -> WeightedScore:
        """Return the task's score of a model as a function of the weights of these rows."""
        task, summaries = self.scored.task, summarize_split(self.scored.task, model, self.data)
        return task.score(task.decode(summaries, self.data, self.scored.decided).rows)[task.metric]


def load_dev(scored: ScoredModel, folder: str | None = None) -> Dev:
    """Return the rows of a run's dev split, or of that in another folder."""
    if folder:
        scored = replace(scored, recipe=resolve(scored.recipe, {"dir": folder, "trial_rows": 0}))
    dev = read_own(scored, ignore)[next(iter(scored.task.splits))]
    data = scored.task.encode(dev, scored.settings.tokenizer, scored.recipe, "dev")
    return Dev(scored, data, scored.task.tabulate_examples(dev).groups)


def export_int8(dev: Dev, model: Any, exact: Path, output: Path, report: Report = ignore) -> dict[str, Any]:
    """Write an export in fp32 as int8, and return what it loses on dev."""
    report(f"scoring the run and the export in int8 on {len(dev.groups):,} rows of dev")
    quantize(exact, output)
    before, after = dev.rate(model), dev.rate(OnnxModel(output, model.config, is_int8=True))
    difference = compare_methods([before], [after], dev.groups)
    numbers = {"difference": difference.value, "low": difference.low, "high": difference.high}
    scores = {"run_score": rate_points(before), "score": rate_points(after)}
    found = {"metric": dev.scored.task.metric, "rows": len(dev.groups), "size": output.stat().st_size, **scores}
    return found | {name: round(number, 4) for name, number in numbers.items()}


def rate_points(score: WeightedScore) -> float:
    """Return a score in points, to four decimals."""
    return round(score.points * float(score.score(np.ones((1, len(score))))[0]), 4)


def tabulate_int8(found: Mapping[str, Any]) -> Table:
    """Return the table of what int8 loses."""
    caption = f"{found['metric']} on dev ({found['rows']:,} rows), difference to the run in points"
    cells = [f"{found['size'] / 1e6:,.1f}", f"{found['score']:.2f}", f"{found['difference']:+.2f}"]
    line = ["int8", *cells, f"{found['low']:+.2f} to {found['high']:+.2f}"]
    return make_table(caption, ["", "MB", "score", "difference", "95 % interval"], [line])
