"""Export a model with a head to ONNX, and quantise it to int8.

The graph is that of transformers' exporter with padded attention, in standard operators only. Fusing it, with
transformers or onnxruntime, changes neither its speed nor its answers, because onnxruntime fuses at loading.
Left out: weights beside the graph, which only models above 2 GB need, answers of the exported model
(`bertkit.model.onnx_model`), and its comparison with the model (`bertkit.inference.export`).
"""

import ast
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertkit.errors import UsageError, explain_missing
from bertkit.model.attention import name_kernel
from bertkit.model.onnx_model import CHOOSES, LENGTH

SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node: the modules it comes from, as a list in Python
EXACT_SETS = ("avx512_vnni", "avx_vnni")  # instruction sets whose int8 products do not saturate


def check_exporter() -> None:
    """Check that the packages for an export are installed."""
    with explain_missing("an ONNX export needs onnx, onnxscript and onnxruntime", "onnx"):
        import onnxscript  # noqa: F401


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
    check_exporter()
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


# --- int8 -------------------------------------------------------------------------------------------------------------


def quantize(path: Path, output: Path) -> None:
    """Write an ONNX file in fp32 with int8 matrices; activations are quantised when the model runs.

    Weights have a scale for each output unit. Without VNNI, products of 8-bit activations and 8-bit weights saturate;
    on such a processor weights have 7 bits, which cannot.
    """
    check_exporter()
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
