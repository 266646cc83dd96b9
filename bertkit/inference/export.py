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
from bertkit.data.tokenizer import save_tokenizer
from bertkit.errors import UsageError, explain_disk_error
from bertkit.inference.export_record import EXPORT_FILE, ExportRecord, Proof, find_export
from bertkit.inference.predictor import Predictor
from bertkit.inference.quantization import prove, tabulate_proof
from bertkit.model.checkpoint import find_file
from bertkit.model.config import BertConfig
from bertkit.model.onnx import CHOOSES, ONNX_FILE, OnnxModel, import_onnxruntime, write_onnx
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import Table, make_table
from bertkit.system.files import atomic_write, hold_directory, refuse_links, write_json
from bertkit.system.hub import CARD
from bertkit.system.instructions import find_instruction_set
from bertkit.system.progress import Report, ignore
from bertkit.training.run_dir import RECIPE_FILE, describe_environment

PARTS = ".export-"  # the beginning of a folder within the directory while it is written
TOLERANCE = 1e-4  # of probabilities
TIMED_LENGTHS = (16, 128, 512)  # tokens of one text
TEXTS_AT_ONCE = 16
MAX_LOSS = 0.5  # points of a table
MOST_CALLS, FEWEST_CALLS, MOST_SECONDS = 200, 5, 4.0  # of each measurement

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
    run: str, output: Path, report: Report = ignore, *, int8: bool = False, max_loss: float = MAX_LOSS
) -> tuple[ExportRecord, list[Table]]:
    """Export a run to a directory, and return its record and the tables of its measurements.

    An export in the same directory is replaced.

    Args:
        int8: Whether to export in int8 if it is proved that the score loses at most `max_loss` points, else in fp32.

    Raises:
        UsageError: The run cannot be exported, the directory holds other files, or the exported model differs from the
            run.
    """
    import_onnxruntime()
    if find_export(run):
        raise UsageError(f"{run} is an export already; give the run that it was made from")
    settings = Predictor(run, precision="fp32").settings
    model = settings.model.to("cpu")
    with explain_disk_error(output), hold_directory(output, check=check_output):
        for lost in output.glob(f"{PARTS}*"):  # of a killed export
            shutil.rmtree(lost)
        with TemporaryDirectory(dir=output, prefix=PARTS) as temporary:
            folder = Path(temporary)
            path = folder / ONNX_FILE
            write_onnx(model, path)
            for name in ("config.json", RECIPE_FILE, CARD):
                if found := find_file(run, name):
                    shutil.copyfile(found, folder / name)
            save_tokenizer(settings.tokenizer, folder)
            exported = OnnxModel(path, model.config)
            difference = find_largest_difference(model, exported)
            if difference > TOLERANCE:
                raise UsageError(
                    f"probabilities of the exported model differ from those of {run} by {difference:.1e}, more than "
                    f"{TOLERANCE:g}; install other versions of torch and onnxruntime"
                )
            report(f"the exported model differs from {run} by at most {difference:.1e} in probabilities")
            proof, precision = None, "fp32"
            if int8:
                with TemporaryDirectory(dir=output, prefix=PARTS) as variants:
                    proof, variant = prove(run, settings, path, Path(variants), max_loss, report)
                    report(explain_proof(proof))
                    if proof.verdict == "proved":
                        variant.replace(path)
                        exported, precision = OnnxModel(path, model.config), "int8"
            record = measure(exported, run, path, difference, precision)
            record.int8 = proof
            tables = [tabulate(record), *([] if proof is None else [tabulate_proof(proof)])]
            write_export_card(folder / CARD, output.resolve().name, record, tables)
            publish(folder, record, output)
    return record, tables


def check_output(output: Path) -> None:
    """Check that a directory is empty or holds an export, complete or not, and has no links.

    Raises:
        UsageError: It holds something else.
    """
    refuse_links(output, (PARTS,))
    has_files = any(not path.name.startswith(".") for path in output.iterdir())
    if has_files and not (output / EXPORT_FILE).exists() and not any(output.glob(f"{PARTS}*")):
        raise UsageError(f"{output} is not empty and holds no export; name another directory with --output")


def publish(folder: Path, record: ExportRecord, output: Path) -> None:
    """Move the files of a complete export to its directory; export.json is removed first and written last."""
    (output / EXPORT_FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        path.replace(output / path.name)
    write_json(msgspec.to_builtins(record), output / EXPORT_FILE)


def explain_proof(proof: Proof) -> str:
    """Return a line about a proof, and which precision follows from it."""
    bound = f"that int8 loses at most {proof.max_loss:g} points of {proof.metric}"
    ending = "" if proof.verdict == "proved" else "; the export is in fp32"
    return f"{proof.words}: {bound}{ending}"


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
    return max(differences)


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


def measure(model: OnnxModel, run: str, path: Path, difference: float, precision: str = "fp32") -> ExportRecord:
    """Return the record of an exported model, with its latency for one text and the rate of batches."""
    chooses, longest = model.head == CHOOSES, model.config.max_position_embeddings

    def measure_texts(count: int, length: int) -> np.ndarray:
        batch = make_batch(model.config, [length] * count, chooses)
        return time_calls(lambda: model(**batch))

    latency = {}
    for length in (length for length in TIMED_LENGTHS if length <= longest):
        middle, slow = (1000 * np.quantile(measure_texts(1, length), (0.5, 0.99))).tolist()
        latency[str(length)] = {"p50": round(middle, 3), "p99": round(slow, 3)}
    tokens = min(128, longest)
    seconds = float(np.median(measure_texts(TEXTS_AT_ONCE, tokens)))
    machine = describe_environment()
    return ExportRecord(
        run=Path(run).resolve().name if Path(run).exists() else run,
        head=model.head,
        precision=precision,
        size=sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*")),
        largest_difference=difference,
        latency=latency,
        texts_per_second=round(TEXTS_AT_ONCE / seconds, 2),
        texts_tokens=tokens,
        threads=machine["threads"],
        processor=machine["processor"],
        instruction_set=find_instruction_set(),
        bertkit=machine["bertkit"],
        onnxruntime=version("onnxruntime"),
        onnx=version("onnx"),
        date=machine["date"],
    )


def tabulate(record: ExportRecord) -> Table:
    """Return the table of an export's measurements."""
    machine = f"{record.processor}, {record.instruction_set}, threads: {record.threads}"
    lines = [
        [f"one text of {length} tokens", f"{found['p50']:,.1f}", f"{found['p99']:,.1f}", ""]
        for length, found in record.latency.items()
    ]
    rate = f"{record.texts_per_second:,.1f}"
    lines.append([f"{TEXTS_AT_ONCE} texts of {record.texts_tokens} tokens at once", "", "", rate])
    caption = f"{record.precision}, {record.size / 1e6:,.1f} MB; {machine}"
    return make_table(caption, ["", "p50 ms", "p99 ms", "texts per second"], lines)


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
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {name}\n"
    atomic_write(card.rstrip("\n") + "\n" + section, path)
