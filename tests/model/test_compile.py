"""Compiled and exported models give the same numbers as the eager ones, without a graph break and for any lengths."""

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bertkit.model import attention
from bertkit.model.bert import BertEncoder
from bertkit.model.config import BertConfig
from bertkit.model.packing import PACKED, Packed
from bertkit.training.network import compile_layers
from tests.conftest import HEADS, NO_DROPOUT, collect, differ, make_batch, make_model, shape_for
from tests.model.inputs import make_inputs, take_gradients

LOSS_HEADS = HEADS[1:]
BATCHES = [[3, 9, 5, 13], [4, 7, 2, 2], [5, 5, 5, 5, 5, 5]]  # more sequences, and all of the same length


@pytest.fixture(autouse=True)
def _forget():
    """Forget compiled code, of which torch keeps a limited number for each function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


FAST = ("BertForPreTraining", True)  # the others take ten seconds each


@pytest.mark.parametrize(
    ("head", "has_indices"),
    [
        pytest.param(head, has_indices, marks=[] if (head, has_indices) == FAST else pytest.mark.slow)
        for head in LOSS_HEADS
        for has_indices in (True, False)
    ],
)
def test_training_compiles_to_one_graph(head, has_indices):
    """With the indices that the Trainer's collator gives the graph is packed, otherwise padded."""
    model = make_model(head, **NO_DROPOUT).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for lengths in BATCHES[:2]:
        inputs = make_inputs(head, lengths)
        inputs |= model.index_tokens(**inputs) if has_indices else {}
        (found, same), (expected, gradients) = (take_gradients(each, inputs) for each in (compiled, model))
        largest = max(x.abs().max() for x in (expected, *gradients.values()))
        assert (found - expected).abs() <= 2e-6 * largest
        for one, other in zip(same.values(), gradients.values(), strict=True):
            assert (one - other).abs().max() <= 2e-6 * largest
    packed = [node for graph in counter.graphs for node in graph.graph.nodes if "index_copy" in str(node.target)]
    assert bool(packed) == has_indices or head == "BertForTokenClassification"


def test_other_lengths_are_not_compiled_again():
    head = "BertForSequenceClassification"
    model = make_model(head, problem_type="single_label_classification").train()
    counter, counts = CompileCounterWithBackend("eager"), []
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for lengths in BATCHES:
        inputs = make_inputs(head, lengths)
        compiled(**inputs | model.index_tokens(**inputs)).loss.backward()
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * len(BATCHES)


@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForMultipleChoice", "BertForQuestionAnswering"])
def test_a_packed_model_is_exported_with_padded_attention(head):
    model, dynamic = make_model(head), torch.export.Dim.DYNAMIC
    batch = shape_for(head, make_batch(BATCHES[0]))
    shapes = {name: {0: dynamic, x.dim() - 1: dynamic} for name, x in batch.items()}
    exported = torch.export.export(model, (), batch, dynamic_shapes=shapes, strict=False).module()
    for lengths in BATCHES:
        batch = shape_for(head, make_batch(lengths))
        found, expected = (collect(dict(each(**batch)), batch["attention_mask"]) for each in (exported, model))
        assert all(differ(x, expected[name]) < 2e-6 for name, x in found.items())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_bilstm_is_neither_exported_nor_traced():
    model, batch = make_model("BertBiLSTMForSequenceClassification"), make_batch(BATCHES[0])
    with pytest.raises(Exception, match="a BiLSTM cannot be exported or traced; use a model without one"):
        torch.export.export(model, (), batch, strict=False)
    with pytest.raises(Exception, match="a BiLSTM cannot be exported or traced; use a model without one"):
        torch.jit.trace(model, (batch["input_ids"],), strict=False)


# --- Compiled layers --------------------------------------------------------------------------------------------------


def count_roles(graphs):
    """Return how many graphs compute something."""
    return sum(any(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs)


def compare_with_compiled_layers(backend):
    """Compare ten batches with those of the eager model, and return the counter of graphs."""
    model = make_model("BertForMaskedLM", **NO_DROPOUT | {"num_hidden_layers": 3}).train()
    compiled = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    for layer in compiled.bert.encoder.layer:
        layer.compile(dynamic=True, backend=counter, fullgraph=True)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    random = np.random.default_rng(0)
    for rows in range(2, 12):
        inputs = make_inputs("BertForMaskedLM", [13, *random.integers(2, 13, rows).tolist()])
        inputs |= model.index_tokens(**inputs)
        (found, same), (expected, gradients) = (take_gradients(each, inputs) for each in (compiled, model))
        largest = max(x.abs().max() for x in (expected, *gradients.values()))
        assert (found - expected).abs() <= 2e-6 * largest
        for one, other in zip(same.values(), gradients.values(), strict=True):
            assert (one - other).abs().max() <= 2e-6 * largest
    return counter


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_share_two_graphs_whatever_the_lengths(backend):
    """One graph is of the layers that compute all states, one of the last, which computes those that the head reads."""
    assert count_roles(compare_with_compiled_layers(backend).graphs) == 2


def test_the_graphs_on_cuda_have_the_flash_kernel_with_dropout(monkeypatch):
    """Tensors without data stand for those on CUDA; the kernel has a form for them, too."""
    monkeypatch.setattr(attention, "can_flash", lambda query: True)
    config = BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=64, num_hidden_layers=3)
    config._attn_implementation = PACKED
    counter = CompileCounterWithBackend("aot_eager")
    with torch.device("meta"):
        encoder = BertEncoder(config).train()
        for layer in encoder.layer:
            layer.compile(dynamic=True, backend=counter, fullgraph=True)
        for rows in range(3, 13):
            offsets, tokens = torch.empty(rows + 1, dtype=torch.int64), torch.empty(11 * rows, dtype=torch.int64)
            whole = Packed((rows, 10 + rows), tokens, offsets)
            layout = Packed((rows, 10 + rows), tokens[: 2 * rows], offsets, whole)
            hidden = torch.empty(11 * rows, 32, requires_grad=True)
            encoder(hidden, None, layout).sum().backward()
            assert hidden.grad.shape == hidden.shape
    assert count_roles(counter.graphs) == 2
    for graph in counter.graphs:
        calls = [node for node in graph.graph.nodes if "_flash_attention_forward" in str(node.target)]
        assert [node.args[7] for node in calls] == [0.1] * len(calls)
        assert len(calls) == any(node.op == "call_function" for node in graph.graph.nodes)


@pytest.mark.gpu
def test_compiled_layers_on_cuda_are_as_near_to_fp32_as_eager_ones():
    """In bf16, with the flash kernel; the tolerance is twice the rounding of the eager layers."""
    model = make_model("BertForMaskedLM", **NO_DROPOUT | {"num_hidden_layers": 3}).train()
    inputs = make_inputs("BertForMaskedLM", [13, 9, 5, 12, 30])
    inputs |= model.index_tokens(**inputs)
    exact = take_gradients(model, inputs)[1]
    model.to("cuda")
    compiled = copy.deepcopy(model)
    compile_layers(compiled)
    inputs = {name: column.to("cuda") for name, column in inputs.items()}
    with torch.autocast("cuda", torch.bfloat16):
        (_, eager), (_, fused) = (take_gradients(each, inputs) for each in (model, compiled))
    largest = max(x.abs().max() for x in exact.values())
    apart, again = (max((x[name].cpu() - exact[name]).abs().max() for name in exact) for x in (eager, fused))
    assert again <= 2 * apart + 1e-3 * largest
