"""Export a run to a directory that `Predictor` and `bertkit predict` take in its place: ONNX, tokenizer, thresholds.

The exported model is compared with the run and timed before the directory is complete. Left out: the graph
(`bertkit.model.onnx`).
"""

import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from bertkit.data.labels import REGRESSION, SEVERAL
from bertkit.data.tokenizer import TOKENIZER_FILES, save_tokenizer
from bertkit.errors import UsageError, explain_disk_error
from bertkit.inference.evaluate import open_scored
from bertkit.inference.export_record import EXPORT_FILE, ExportRecord, find_export
from bertkit.inference.predictor import Predictor
from bertkit.inference.quantization import choose_int8, load_dev, tabulate_int8
from bertkit.model.checkpoint import find_file
from bertkit.model.config import BertConfig
from bertkit.model.onnx import CHOOSES, EXACT_SETS, ONNX_FILE, OnnxModel, import_onnxruntime, write_onnx
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import Table, make_table
from bertkit.system.files import atomic_write, check_empty, find_checksum, write_json
from bertkit.system.hub import CARD
from bertkit.system.progress import Report, ignore
from bertkit.training.run_dir import CALIBRATION_FILE, RECIPE_FILE, describe_environment

TOLERANCE = 1e-4  # of probabilities
PARTS = ".export-"  # prefix of the folder in the output that has the files until they are complete
TIMED_LENGTHS = (16, 128, 512)  # tokens of one text
TEXTS_AT_ONCE, TIMED_IN_BATCHES = 8, 128  # texts, and the tokens of each
MOST_CALLS, FEWEST_CALLS, MOST_SECONDS = 200, 5, 10.0  # of each measurement
EXPORTED = (ONNX_FILE, "config.json", RECIPE_FILE, CARD, *TOKENIZER_FILES)

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
    max_loss: float | None = None,
    data: str | None = None,
) -> tuple[ExportRecord, list[Table]]:
    """Export a run to a directory, and return its record and the tables of its measurements.

    An export in the same directory is replaced.

    Args:
        int8: Whether to export in int8.
        max_loss: Points of the score that int8 may lose on dev; layers stay in fp32 until it does. None: no bound.
        data: The folder of the data with this dev; None: that of the run's recipe.

    Raises:
        UsageError: The run cannot be exported, the directory holds other files, the exported model differs from the
            run, or int8 loses more than `max_loss`.
    """
    import_onnxruntime()
    if find_export(run):
        raise UsageError(f"{run} is an export already; give the run that it was made from")
    predictor = Predictor(run, precision="fp32")
    settings, model = predictor.settings, predictor.settings.model.to("cpu")
    dev = load_dev(open_scored(run, predictor), data) if int8 else None
    with explain_disk_error(output):
        check_output(output)
        output.mkdir(parents=True, exist_ok=True)
        for lost in output.glob(f"{PARTS}*"):  # a killed export leaves its folder
            shutil.rmtree(lost)
        with TemporaryDirectory(dir=output, prefix=PARTS) as temporary:
            folder = Path(temporary, "export")
            folder.mkdir()
            path = folder / ONNX_FILE
            write_onnx(model, path)
            for name in ("config.json", RECIPE_FILE, CALIBRATION_FILE, CARD):
                if found := find_file(run, name):
                    shutil.copyfile(found, folder / name)
            save_tokenizer(settings.tokenizer, folder)
            exported = OnnxModel(path, model.config)
            difference = find_largest_difference(model, exported)
            if not difference <= TOLERANCE:  # also refuses NaN
                raise UsageError(
                    f"probabilities of the exported model differ from those of {run} by {difference:.1e}, more than "
                    f"{TOLERANCE:g}; install other versions of torch and onnxruntime"
                )
            report(f"the exported model differs from {run} by at most {difference:.1e} in probabilities")
            weights = sum(weight.nbytes for weight in model.parameters())
            timings = {"run": time_model(model, weights), "fp32": time_model(exported, path.stat().st_size)}
            record = describe(run, exported, difference, timings)
            if dev:
                record.int8, variant = choose_int8(dev, model, path, Path(temporary), max_loss, report)
                variant.replace(path)
                record.precision = "int8"
                timings["int8"] = time_model(OnnxModel(path, model.config, is_int8=True), path.stat().st_size)
            tables = [tabulate(record), *([] if record.int8 is None else [tabulate_int8(record.int8)])]
            write_export_card(folder / CARD, output.resolve().name, record, tables)
            publish(folder, record, output)
    return record, tables


def check_output(output: Path) -> None:
    """Check that a directory is new or empty or holds an export, complete or not.

    Raises:
        UsageError: It holds something else.
    """
    if not any(output.joinpath(name).exists() for name in (EXPORT_FILE, ONNX_FILE)):
        check_empty(output, "export")


def publish(folder: Path, record: ExportRecord, output: Path) -> None:
    """Move the files of a complete export to its directory, in the place of an earlier one.

    export.json is removed first and written last.
    """
    names = [name for name in EXPORTED if name != CARD and (folder / name).exists()]
    record.checksums = {name: find_checksum(folder / name) for name in names}
    for name in (EXPORT_FILE, *EXPORTED):
        (output / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        path.replace(output / path.name)
    write_json(msgspec.to_builtins(record), output / EXPORT_FILE)


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


def find_largest_difference(model: Any, exported: OnnxModel) -> float:
    """Return the largest difference between the probabilities of a model and its export.

    The sequences have random tokens and several lengths, up to the model's positions.
    """
    longest = model.config.max_position_embeddings
    groups = [[2], [3, longest // 4, 2, longest // 8], [longest, longest // 2]]
    differences = []
    for lengths in groups:
        batch = make_batch(model.config, [max(2, length) for length in lengths], exported.head == CHOOSES)
        with torch.inference_mode():
            sides = (list_probabilities(side(**batch), model.config, batch) for side in (model, exported))
            differences += [float((one - other).abs().max()) for one, other in zip(*sides, strict=True)]
    return float(np.max(differences))  # NaN if one is


def list_probabilities(outputs: Any, config: BertConfig, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield the probabilities of each of a head's outputs at real tokens; the scores of a regression as they are."""
    mask = batch["attention_mask"].bool()
    for values in outputs.values():
        if values.dim() > mask.dim():
            values = values[mask]  # (N, L)
        if config.problem_type == SEVERAL:
            yield values.sigmoid()
        elif config.problem_type == REGRESSION or values.shape[-1] == 1:
            yield values
        else:
            yield values.softmax(-1)


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


def describe(run: str, exported: OnnxModel, difference: float, timings: dict[str, dict[str, Any]]) -> ExportRecord:
    """Return the record of an export in fp32."""
    machine = describe_environment()
    return ExportRecord(
        run=Path(run).resolve().name if Path(run).exists() else run,
        head=exported.head,
        precision="fp32",
        largest_difference=difference,
        timings=timings,
        texts_tokens=min(TIMED_IN_BATCHES, exported.config.max_position_embeddings),
        threads=machine["threads"],
        processor=machine["processor"],
        instruction_set=next(filter(torch.cpu.get_capabilities().get, EXACT_SETS), machine["instructions"]),
        bertkit=machine["bertkit"],
        onnxruntime=version("onnxruntime"),
        onnx=version("onnx"),
        date=machine["date"],
    )


def tabulate(record: ExportRecord) -> Table:
    """Return the table of an export's measurements, with a column for each model."""
    sides = list(record.timings.values())
    lines = [
        [
            f"one text of {length} tokens, ms: p50 / p99",
            *("{p50:,.1f} / {p99:,.1f}".format_map(side["latency"][length]) for side in sides),
        ]
        for length in sides[0]["latency"]
    ]
    lines += [
        [f"{TEXTS_AT_ONCE} texts of {record.texts_tokens} tokens, texts per second"]
        + [f"{side['texts_per_second']:,.1f}" for side in sides],
        ["MB", *(f"{side['size'] / 1e6:,.1f}" for side in sides)],
    ]
    caption = f"{record.processor}, {record.instruction_set}, threads: {record.threads}"
    heads = ["", *("run, fp32" if name == "run" else f"ONNX, {name}" for name in record.timings)]
    return make_table(caption, heads, lines)


def write_export_card(path: Path, name: str, record: ExportRecord, tables: list[Table]) -> None:
    """Append the section about the export to the run's card; without one it is the whole page."""
    chooses = record.head == CHOOSES
    section = CARD_SECTION.format(
        **msgspec.to_builtins(record),
        file=ONNX_FILE,
        name=name,
        shape="(batch, choices, length)" if chooses else "(batch, length)",
        choices="[None]" * chooses,
        table="\n\n".join("\n".join([f"{table.caption}:", "", *format_table(table)]) for table in tables),
    )
    card = path.read_text(encoding="utf-8", errors="replace") if path.exists() else f"# {name}\n"
    atomic_write(card.rstrip("\n") + "\n" + section, path)
