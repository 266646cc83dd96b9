"""The record of an export, `export.json`, which is written last: its presence means that the export is complete."""

from pathlib import Path
from typing import Any

import msgspec

from bertkit.errors import UsageError, make_printable
from bertkit.model.onnx import ONNX_FILE
from bertkit.system.files import find_checksum
from bertkit.training.run_dir import read_record

EXPORT_FILE = "export.json"


class Int8Variant(msgspec.Struct):
    """An int8 variant of an export: scores in points, and the difference to the run's with its 95 % interval.

    Attributes:
        exempt: Layers that stay in fp32: numbers of encoder layers from 0, "embeddings", "head".
        size: Bytes of the ONNX file.
    """

    exempt: list[int | str]
    size: int
    score: float
    difference: float
    low: float
    high: float


class Int8(msgspec.Struct):
    """The int8 variants that were tried on the rows of dev, with the run's score; the last one is exported.

    Attributes:
        max_loss: Points that may be lost; None: no bound.
    """

    metric: str
    rows: int
    run_score: float
    max_loss: float | None = None
    variants: list[Int8Variant] = []


class ExportRecord(msgspec.Struct):
    """An export and its measurements.

    Attributes:
        run: The last part of the run's path, or its name on the Hub.
        head: The name of the head's class.
        largest_difference: Between the probabilities of the export in fp32 and those of the run.
        timings: "run" (in fp32, packed), "fp32" and, if it was asked for, "int8" -> `size` in bytes,
            `texts_per_second` in batches, and `latency`: tokens of one text -> `p50` and `p99` of its `calls` in
            milliseconds; with fewer than 100 calls the 99th percentile is close to the maximum.
        texts_tokens: The tokens of each text in timed batches.
        checksums: File -> its CRC-32; the card is not among them.
    """

    run: str
    head: str
    precision: str
    largest_difference: float
    timings: dict[str, dict[str, Any]]
    texts_tokens: int
    threads: int
    processor: str
    instruction_set: str
    bertkit: str
    onnxruntime: str
    onnx: str
    date: str
    checksums: dict[str, int] = {}
    int8: Int8 | None = None


def check_files(run: str, record: ExportRecord) -> None:
    """Check that the files of an export are those that were exported.

    Raises:
        UsageError: One is missing or another one.
    """
    files = {path.name for path in Path(run).iterdir() if path.is_file()}  # a damaged record may name anything
    for name, checksum in record.checksums.items():
        if name not in files or find_checksum(Path(run, name)) != checksum:
            path = make_printable(str(Path(run, name)))
            raise UsageError(f"{path} is missing or not the file that was exported; export the run again")


def find_export(run: str) -> ExportRecord | None:
    """Return the record of the export in a directory, or None if it holds none.

    Raises:
        UsageError: The record is damaged, or missing beside an exported model.
    """
    path = Path(run, EXPORT_FILE)
    if not path.is_file():
        if path.with_name(ONNX_FILE).is_file() and not path.with_name("model.safetensors").is_file():
            raise UsageError(f"{run} holds an incomplete export; export the run again")
        return None
    return read_record(path, ExportRecord, "export the run again")
