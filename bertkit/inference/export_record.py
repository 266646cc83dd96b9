"""The record of an export, `export.json`, which is written last: its presence means that the export is complete."""

from pathlib import Path

import msgspec

from bertkit.errors import UsageError, make_printable
from bertkit.model.onnx import ONNX_FILE
from bertkit.system.files import find_checksum
from bertkit.system.instructions import find_instruction_set
from bertkit.training.run_dir import read_record

EXPORT_FILE = "export.json"
PARTS = ".export-"  # the beginning of a folder within the directory while it is written


class Int8Variant(msgspec.Struct):
    """An int8 variant of an export, with its score and the difference to the run's, in points.

    Attributes:
        exempt: Layers that stay in fp32: numbers of encoder layers from 0, "embeddings", "head".
        size: Bytes of the ONNX file.
        score: In points.
        low: The lower limit of the difference's 95 % interval.
        high: The upper limit.
    """

    exempt: list[int | str]
    size: int
    score: float
    difference: float
    low: float
    high: float


class Int8(msgspec.Struct):
    """The int8 variants of an export that were tried on the rows of dev; the last one is exported.

    Attributes:
        metric: The score.
        rows: Number of rows: groups of examples with the same first text, context or document.
        run_score: The run's score on them, in points.
        max_loss: Points that may be lost; None: no bound.
    """

    metric: str
    rows: int
    run_score: float = 0.0  # exports of earlier versions lack it
    max_loss: float | None = None
    variants: list[Int8Variant] = []


class Latency(msgspec.Struct):
    """Percentiles of some calls in milliseconds; with fewer than 100 calls the 99th is close to the maximum."""

    p50: float
    p99: float
    calls: int


class Timing(msgspec.Struct):
    """How fast a model answers.

    Attributes:
        size: Bytes of the ONNX file; of the weights for the run.
        latency: Number of tokens of one text -> latency.
        texts_per_second: Rate for batches of texts of `texts_tokens` tokens.
    """

    size: int
    latency: dict[str, Latency]
    texts_per_second: float


class ExportRecord(msgspec.Struct):
    """An export and its measurements.

    Attributes:
        run: The last part of the run's path, or its name on the Hub.
        head: The name of the head's class.
        precision: "fp32" or "int8".
        largest_difference: Between the probabilities of the export in fp32 and those of the run.
        timings: "run" (in fp32, packed), "fp32" and, if it was asked for, "int8" -> how fast it answers.
        threads: Threads of the measurements.
        processor: Processor of the measurements.
        instruction_set: The same, as `find_instruction_set` returns it.
        checksums: File -> its CRC-32; the card is not among them.
        int8: The variants in int8; None in fp32.
    """

    run: str
    head: str
    precision: str
    largest_difference: float
    timings: dict[str, Timing]
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

    def describe_processor(self) -> str:
        """Return a line about another processor than that of an int8 export, whose results differ; else empty."""
        here = find_instruction_set()
        if self.precision != "int8" or here == self.instruction_set:
            return ""
        return (
            f"this int8 export was made with {self.instruction_set}, and this processor has {here}: results may differ "
            "from those that were measured; export again on this machine"
        )


def check_files(place: str, record: ExportRecord) -> None:
    """Check that the files of an export are those that were exported.

    Raises:
        UsageError: One is missing or another one.
    """
    files = {path.name for path in Path(place).iterdir() if path.is_file()}  # a damaged record may name anything
    for name, checksum in record.checksums.items():
        if name not in files or find_checksum(Path(place, name)) != checksum:
            path = make_printable(str(Path(place, name)))
            raise UsageError(f"{path} is missing or not the file that was exported; export the run again")


def find_export(place: str) -> ExportRecord | None:
    """Return the record of the export in a directory, or None if it holds none.

    Raises:
        UsageError: The record is damaged, or missing beside an exported model.
    """
    path = Path(place, EXPORT_FILE)
    if not path.is_file():
        has_model = path.with_name(ONNX_FILE).is_file() and not path.with_name("model.safetensors").is_file()
        if has_model or any(path.parent.glob(f"{PARTS}*")):
            raise UsageError(f"{place} holds an incomplete export; export the run again")
        return None
    try:
        return read_record(path, ExportRecord)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged ({error}); export the run again") from None
