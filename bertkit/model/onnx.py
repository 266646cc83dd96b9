"""Export a model with a head to ONNX, run it with onnxruntime in the place of that head, and quantise it to int8.

The graph is that of transformers' exporter with padded attention, in standard operators only. Fusing it, with
transformers or onnxruntime, changes neither its speed nor its answers, because onnxruntime fuses at loading.
Left out: weights beside the graph, which only models above 2 GB need, and the comparison with the model
(`bertkit.inference.export`).
"""

import ast
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from bertkit.errors import UsageError, explain_missing
from bertkit.model.attention import name_kernel
from bertkit.model.config import BertConfig
from bertkit.model.heads import pool_logits
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.packing import index_true

ONNX_FILE = "model.onnx"
LENGTH = "length"  # the axis of tokens
CHOOSES = "BertForMultipleChoice"  # the head whose every input has three dimensions
SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node: the modules it comes from, as a list in Python
EXACT_SETS = ("avx512_vnni", "avx_vnni")  # instruction sets whose int8 products do not saturate


def import_onnxruntime() -> ModuleType:
    """Import onnxruntime, with onnx and onnxscript for the export."""
    with explain_missing("an ONNX export needs onnx, onnxscript and onnxruntime", "onnx"):
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    return onnxruntime


@contextmanager
def silence_export() -> Iterator[None]:
    """Suppress the notices of torch.onnx, transformers' exporter and onnxruntime's quantiser; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# --- Export -----------------------------------------------------------------------------------------------------------


def write_onnx(model: nn.Module, path: Path) -> None:
    """Write a model on the CPU as an ONNX file in fp32, of any batch size and length up to the model's positions.

    Inputs are `input_ids`, `attention_mask` and `token_type_ids`, int64 of shape (batch, length), or (batch, choices,
    length) for multiple choice. Outputs have the names of the head's. Each node is named after its module.
    """
    import_onnxruntime()
    if hasattr(model, "bilstm"):
        name = type(model).__name__
        raise UsageError(f"{name} has a BiLSTM, which cannot be exported to ONNX; export a model without one")
    chooses = type(model).__name__ == CHOOSES
    axes = ["batch", "choices", LENGTH] if chooses else ["batch", LENGTH]
    attention = name_kernel(model.config)
    model.set_attn_implementation("sdpa")
    try:
        with silence_export():
            from transformers.exporters import OnnxConfig, OnnxExporter

            batch = {
                name: torch.ones([2, 3, 9] if chooses else [2, 9], dtype=torch.int64)
                for name in ("input_ids", "attention_mask", "token_type_ids")
            }
            most = {LENGTH: model.config.max_position_embeddings}
            sizes = [torch.export.Dim(axis, max=most.get(axis)) for axis in axes]
            shapes = {name: dict(enumerate(sizes)) for name in batch}
            exported = OnnxExporter().export(model, batch, config=OnnxConfig(dynamic_shapes=shapes))
            program = getattr(exported, "program", None) or exported.model  # torch's, from an older one
    finally:
        model.set_attn_implementation(attention)
    import onnx_ir

    name_parts(program, axes)
    onnx_ir.save(program, str(path))


def name_parts(program: Any, axes: list[str]) -> None:
    """Name a graph's axes and its nodes after their modules, and drop all metadata, such as paths of source files."""
    import onnx_ir

    symbols = dict(zip(map(str, program.graph.inputs[0].shape), axes, strict=True))
    for value in (*program.graph.inputs, *program.graph.outputs):
        value.shape = onnx_ir.Shape([symbols.get(str(size), size) for size in value.shape])
    for node in program.graph.all_nodes():
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
        node.name = "/".join([*scopes[-2:-1], node.name])
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None  # names of symbols differ between exports


# --- The exported model -----------------------------------------------------------------------------------------------


class OnnxModel:
    """A model in an ONNX file, called as the head that it was exported from, on the CPU.

    Attributes:
        config: The configuration of the head.
        head: The name of the head's class.
        device: The CPU.
        is_int8: Whether activations are quantised with a scale for each call. Inputs are then run one at a time, so
            that no answer depends on the other inputs of a batch.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, config: BertConfig, is_int8: bool = False) -> None:
        runtime = import_onnxruntime()
        self.config, self.is_int8 = config, is_int8
        self.head = str(config.architectures[0])
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # a pattern would be kept for each batch size and length
        options.log_severity_level = 3  # errors
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class for each of its statuses
            raise UsageError(f"{path} cannot be read ({type(error).__name__}); export the run again") from None
        self.inputs = [given.name for given in self.session.get_inputs()]
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.has_tokens = [LENGTH in output.shape for output in self.session.get_outputs()]

    def __call__(self, targets_only: bool = False, labels: Tensor | None = None, **batch: Tensor) -> ModelOutput:
        """Return the head's outputs.

        Args:
            targets_only: Whether token logits are (M, V), those of the labelled positions only.
            labels: (B, T), IGNORE_INDEX at positions without a label; read for `targets_only` only.
            batch: Inputs (B, T), (B, C, T) for multiple choice, or for classifiers also (B, W, T), windows of which
                those without a real token are absent. Other names are ignored.
        """
        mask = batch["attention_mask"]
        if mask.dim() == 2 or self.head == CHOOSES:
            outputs = self.run(batch)
            if targets_only:
                targets = labels != IGNORE_INDEX
                return ModelOutput({name: x[targets] if x.dim() == 3 else x for name, x in outputs.items()})
            return outputs
        indices = index_true(mask.any(-1))  # (R,)
        windows = {name: batch[name].flatten(0, 1).index_select(0, indices) for name in self.inputs}  # (R, T)
        logits = pool_logits(self.run(windows).logits, indices, tuple(mask.shape[:2]), self.config.window_pooling)
        return ModelOutput(logits=logits)  # (B, L)

    def run(self, batch: dict[str, Tensor]) -> ModelOutput:
        """Return the outputs of the session."""
        inputs = {name: batch[name].numpy() for name in self.inputs}
        found = self.run_singly(inputs) if self.is_int8 else self.session.run(self.outputs, inputs)
        return ModelOutput(dict(zip(self.outputs, map(torch.from_numpy, found), strict=True)))

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


def pad_tokens(found: np.ndarray, longest: int) -> np.ndarray:
    """Return values (1, T, ...) of tokens as (1, longest, ...), with 0 at padding."""
    return np.pad(found, [(0, 0), (0, longest - found.shape[1]), *[(0, 0)] * (found.ndim - 2)])


# --- int8 -------------------------------------------------------------------------------------------------------------


def quantize(path: Path, output: Path) -> None:
    """Write an ONNX file in fp32 with int8 matrices; activations are quantised when the model runs.

    Weights have a scale for each output unit. Without VNNI, products of 8-bit activations and 8-bit weights saturate;
    on such a processor weights have 7 bits, which cannot.
    """
    import_onnxruntime()
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(str(path))
    with silence_export():
        quantize_dynamic(
            model,
            str(output),
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            per_channel=True,
            reduce_range=not any(torch.cpu.get_capabilities().get(name) for name in EXACT_SETS),
        )
