"""Models in other programs: hooks, off-loading, several devices, refused arguments."""

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from bertkit.model import bert as ours
from tests.conftest import HEADS, NO_DROPOUT, collect, differ, make_batch, make_model, make_twin, shape_for
from tests.devices import FIRST, SECOND, Devices, place_module
from tests.model.inputs import LANGUAGE_MODELS, LENGTHS, make_inputs


def make_pair(head: str, **values) -> tuple[nn.Module, nn.Module]:
    """Make a packed model of ours and its twin in plain transformers."""
    model = make_model(head, **values)
    return model, make_twin(model)


@pytest.mark.parametrize("head", HEADS)
def test_arguments_that_would_be_ignored_are_refused_by_name(head: str) -> None:
    model, batch = make_model(head), shape_for(head, make_batch(LENGTHS))
    for name in ours.UNSUPPORTED:
        with pytest.raises(ValueError, match=rf"^bertkit's models do not take {name}; \w+"):
            model(**batch, **{name: torch.tensor([0, 4])})
    model(**batch, **dict.fromkeys(ours.UNSUPPORTED))


@pytest.mark.parametrize("head", [*LANGUAGE_MODELS, "BertForTokenClassification"])
def test_labels_of_another_length_are_refused(head: str) -> None:
    inputs = make_inputs(head)
    inputs["labels"] = nn.functional.pad(inputs["labels"], (0, 1))
    with pytest.raises(
        ValueError, match=r"got a tensor of shape \(4, 14\); expected \(B, T, ...\), \(B, T\) = \(4, 13\)"
    ):
        make_model(head)(**inputs)


PROBLEMS = {  # problem_type, number of labels, labels of four texts
    "one score": ("regression", 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "one score, a column": ("regression", 1, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
    "three scores": ("regression", 3, torch.randn(4, 3)),
    "one of three": ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
    "one of three, some unlabelled": ("single_label_classification", 3, torch.tensor([0, -100, 1, -100])),
    "some of three": ("multi_label_classification", 3, torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]])),
    "yes or no": ("multi_label_classification", 1, torch.tensor([[0.0], [1.0], [1.0], [0.0]])),
}


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("case", PROBLEMS)
def test_the_problem_type_means_what_it_means_in_transformers(case: str, is_named: bool) -> None:
    """Name it in the configuration, or let the first labels decide."""
    kind, count, labels = PROBLEMS[case]
    values = {"num_labels": count, "problem_type": kind if is_named else None}
    model, twin = make_pair("BertForSequenceClassification", **values)
    inputs = make_batch(LENGTHS) | {"labels": labels}
    expected, got = twin(**inputs), model(**inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=1e-6)
    assert model.config.problem_type == twin.config.problem_type
    grads = [torch.autograd.grad(x.loss, y.classifier.weight)[0] for x, y in ((got, model), (expected, twin))]
    torch.testing.assert_close(*grads)
    count = model.count_labels(**inputs)["num_items_in_batch"]
    assert count == (labels != -100).sum()  # as transformers' Trainer counts
    parts = [{name: x[rows] for name, x in inputs.items()} for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(model(**part, num_items_in_batch=count).loss for part in parts), got.loss)


def test_labels_that_do_not_fit_are_refused() -> None:
    model, batch = make_model("BertForSequenceClassification", problem_type="regression"), make_batch(LENGTHS)
    for shape in ((3, 4), (4,), (4, 1)):
        with pytest.raises(ValueError, match=r"got labels of shape .*; expected \(4, 3\), as of the logits"):
            model(**batch, labels=torch.zeros(shape))


@pytest.mark.parametrize(
    ("head", "kernel"), [("BertForMaskedLM", "eager"), ("BertForSequenceClassification", "packed")]
)
def test_second_derivatives_of_a_kernel_are_refused(head: str, kernel: str) -> None:
    """Ask for a part of the parameters, whose path through the kernel autograd would leave out."""
    model, inputs = make_model(head, kernel, **NO_DROPOUT).train(), make_inputs(head, [13] * 12)
    with pytest.raises(RuntimeError, match=r"no second derivatives .* attn_implementation='eager', in"):
        torch.autograd.grad(model(**inputs).loss, list(model.bert.embeddings.parameters()), create_graph=True)


@pytest.mark.parametrize("head_on", [FIRST, SECOND])  # accelerate puts a tied decoder beside the embeddings
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["packed", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_layers_may_be_divided_over_two_devices(head: str, kernel: str, training: bool, head_on: torch.device) -> None:
    model, inputs = make_model(head, kernel, **NO_DROPOUT).train(training), make_inputs(head)
    if head != "BertModel":  # as our Trainer gives it
        indices = {} if head == "BertForMultipleChoice" else model.index_tokens(**inputs)
        inputs |= model.count_labels(**inputs) | indices
    mask = inputs["labels"] != -100 if head == "BertForTokenClassification" else inputs["attention_mask"]
    expected = collect(model(**inputs), mask)
    encoder = model if head == "BertModel" else model.bert
    with Devices():
        for name, module in {**dict(encoder.named_children()), **dict(model.named_children())}.items():
            if name not in ("bert", "encoder"):
                place_module(module, FIRST if name == "embeddings" else head_on)
        for layer, device in zip(encoder.encoder.layer, (FIRST, SECOND), strict=True):
            place_module(layer, device)
        outputs = model(**{name: x.to(FIRST) for name, x in inputs.items()})
    assert {x.device.type for x in outputs.values()} == {FIRST.type}
    got = collect({name: x.value for name, x in outputs.items()}, mask)
    assert max(differ(got[name], expected[name]) for name in expected) < 2e-6


@pytest.mark.parametrize("name", ["cls", "cls.predictions", "bert.embeddings", "bert.embeddings.word_embeddings"])
def test_a_hook_may_replace_what_a_module_returns(name: str) -> None:
    model, twin = make_pair("BertForMaskedLM")
    batch = make_batch(LENGTHS)
    for each in (model, twin):
        each.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out.flip(-1))
    real = batch["attention_mask"].bool()
    assert differ(model(**batch).logits[real], twin(**batch).logits[real]) < 2e-6


def record_shapes(model: nn.Module, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what these modules return, filled when the model runs."""
    shapes = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: shapes.update(
                {name: tuple((out if isinstance(out, Tensor) else out.last_hidden_state).shape)}
            )
        )
    return shapes


EMBEDDINGS = ["bert.embeddings"] + [
    f"bert.embeddings.{name}"
    for name in ("word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm", "dropout")
]


@pytest.mark.parametrize("has_segments", [True, False])
@pytest.mark.parametrize("name", [*EMBEDDINGS, "bert"])
def test_a_hook_on_the_encoder_or_its_embeddings_sees_the_shapes_of_stock(name: str, has_segments: bool) -> None:
    model, twin = make_pair("BertForTokenClassification")
    batch = make_batch(LENGTHS)
    if not has_segments:
        del batch["token_type_ids"]
    expected, shapes = model(**batch).logits, [record_shapes(each, [name]) for each in (model, twin)]
    twin(**batch)
    assert torch.equal(model(**batch).logits, expected)
    assert shapes[0] == shapes[1]
    assert len(shapes[0][name]) == 3


def test_replaced_embeddings_are_called_with_the_arguments_of_stock() -> None:
    class Given(nn.Module):
        def forward(self, **arguments: Tensor) -> Tensor:
            calls.append({name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor)})
            return embedded  # (B, T, H)

    batch, calls, found = make_batch(LENGTHS), [], []
    embedded = torch.randn(*batch["input_ids"].shape, 32)
    for each in make_pair("BertForSequenceClassification"):
        each.bert.embeddings = Given()
        found.append(each(**batch).logits)
    assert calls[0].items() >= calls[1].items()  # stock leaves it to the embeddings to number the positions
    assert differ(*found) < 2e-6


def test_a_hook_on_the_predictions_sees_scores_in_training() -> None:
    model, inputs = make_model("BertForMaskedLM", **NO_DROPOUT).train(), make_inputs("BertForMaskedLM")
    expected = model(**inputs).loss
    shapes = record_shapes(model, ["cls.predictions"])
    assert differ(model(**inputs).loss, expected) < 2e-6
    assert shapes["cls.predictions"][-1] == model.config.vocab_size


def test_neftune_adds_the_noise_of_transformers_in_training() -> None:
    batch, logits = make_batch(LENGTHS), []
    for model in make_pair("BertForSequenceClassification", **NO_DROPOUT):
        expected = model(**batch).logits
        embeddings = model.train().get_input_embeddings()
        embeddings.neftune_noise_alpha = 5.0
        embeddings.register_forward_hook(neftune_post_forward_hook)
        torch.manual_seed(5)
        logits.append(model(**batch).logits)
        assert not torch.allclose(logits[-1], expected)
        torch.testing.assert_close(model.eval()(**batch).logits, expected)
    assert differ(*logits) < 2e-6
