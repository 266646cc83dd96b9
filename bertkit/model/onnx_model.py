"""A model in an ONNX file, which answers instead of the head that it was exported from, without torch.

Batches and outputs are arrays. Left out: writing the file (`bertkit.model.onnx`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bertkit.data.long_texts import pool_windows
from bertkit.data.sequences import IGNORED
from bertkit.errors import UsageError, explain_missing

ONNX_FILE = "model.onnx"
LENGTH = "length"  # the axis of tokens
CHOOSES = "BertForMultipleChoice"  # the head whose every input has three dimensions


class ExportConfig(msgspec.Struct, frozen=True):
    """The part of an export's config.json that predictions depend on, named as in `BertConfig`."""

    architectures: list[str]
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    id2label: dict[int, str] = msgspec.field(default_factory=lambda: {0: "LABEL_0", 1: "LABEL_1"})  # transformers'
    problem_type: str | None = None
    tau: float | None = None
    thresholds: list[float] | None = None
    least_confidence: float | None = None
    redaction_threshold: float | None = None
    temperature: float | None = None
    text_columns: list[str] | None = None
    text_words: str | None = None
    window_pooling: str | None = None

    @property
    def num_labels(self) -> int:
        """Return the number of classes."""
        return len(self.id2label)


class Outputs(dict[str, Any]):
    """The outputs of a model by name, which are attributes too."""

    __getattr__ = dict.__getitem__


class OnnxModel:
    """A model in an ONNX file, called as the head that it was exported from, on the CPU.

    Attributes:
        config: The configuration of the head, or the part that predictions depend on.
        head: The name of the head's class.
        is_int8: Whether activations are quantised with a scale for each call. Inputs are then run one at a time, so
            that no answer depends on the other inputs of a batch.

    Args:
        spins: Whether its threads wait for the next call by running, which keeps the cores from torch.
    """

    def __init__(self, path: Path, config: Any, is_int8: bool = False, spins: bool = True) -> None:
        with explain_missing("an exported model needs onnxruntime", "onnx"):
            import onnxruntime
        self.config, self.is_int8 = config, is_int8
        self.head = str(config.architectures[0])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count_threads()
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # a pattern would be kept for each batch size and length
        if not spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3  # errors
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class for each of its statuses
            raise UsageError(f"{path} cannot be read ({type(error).__name__}); export the run again") from None
        self.inputs = [given.name for given in self.session.get_inputs()]
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.has_tokens = [LENGTH in output.shape for output in self.session.get_outputs()]

    def __call__(self, targets_only: bool = False, labels: Any = None, **batch: Any) -> Outputs:
        """Return the head's outputs, arrays.

        Args:
            targets_only: Whether token logits are (M, V), those of the labelled positions only.
            labels: (B, T), IGNORED at positions without a label; read for `targets_only` only.
            batch: Inputs (B, T), (B, C, T) for multiple choice, or for classifiers also (B, W, T), windows of which
                those without a real token are absent: arrays, or tensors on the CPU. Other names are ignored.
        """
        inputs = {name: np.asarray(batch[name]) for name in self.inputs}
        mask = inputs["attention_mask"]
        if mask.ndim == 2 or self.head == CHOOSES:
            outputs = self.run(inputs)
            if targets_only:
                targets = np.asarray(labels) != IGNORED
                return Outputs({name: x[targets] if x.ndim == 3 else x for name, x in outputs.items()})
            return outputs
        is_there = mask.any(-1)  # (B, W)
        logits = self.run({name: each[is_there] for name, each in inputs.items()}).logits  # (R, L)
        return Outputs(logits=pool_windows(logits, is_there.sum(1), self.config.window_pooling))  # (B, L)

    def run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        """Return the outputs of the session."""
        found = self.run_singly(inputs) if self.is_int8 else self.session.run(self.outputs, inputs)
        return Outputs(zip(self.outputs, found, strict=True))

    def run_singly(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs of the session for each input without its padding, where outputs become 0."""
        longest = inputs["attention_mask"].shape[-1]
        rows = []
        for number, mask in enumerate(inputs["attention_mask"]):
            length = max(int(mask.sum(-1).max()), 1)
            one = {name: given[number, None, ..., :length] for name, given in inputs.items()}
            found = zip(self.session.run(self.outputs, one), self.has_tokens, strict=True)
            rows.append([pad_tokens(each, longest) if has_tokens else each for each, has_tokens in found])
        return [np.concatenate(found) for found in zip(*rows, strict=True)]


def count_threads() -> int:
    """Return torch's number of threads if it is loaded, else that of OMP_NUM_THREADS; 0: as onnxruntime chooses."""
    if "torch" in sys.modules:
        return sys.modules["torch"].get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() else 0


def pad_tokens(found: np.ndarray, longest: int) -> np.ndarray:
    """Return values (1, T, ...) of tokens as (1, longest, ...), with 0 at padding."""
    return np.pad(found, [(0, 0), (0, longest - found.shape[1]), *[(0, 0)] * (found.ndim - 2)])
