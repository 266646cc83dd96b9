"""Models in other programs: dropout modules, hooks, off-loading, transforms, exports, errors."""

import copy

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

import bertkit
from bertkit.model import bert as ours
from bertkit.model import pretraining_heads
from bertkit.model.config import BertConfig
from tests.conftest import (
    HEADS,
    NO_DROPOUT,
    TINY,
    collect,
    differ,
    make_batch,
    make_labels,
    make_model,
    make_twin,
    shape_for,
)
from tests.devices import FIRST, SECOND, Devices, place_module

KERNELS = ("packed", "eager", "sdpa")
LANGUAGE_MODELS = ("BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel")
LENGTHS = [2, 9, 5, 13]


def make_inputs(head: str, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Make a batch with labels, as the head takes it."""
    batch = make_batch(lengths)
    return shape_for(head, batch) | ({} if head == "BertModel" else make_labels(head, batch))


def make_pair(head: str, **values) -> tuple[nn.Module, nn.Module]:
    """Make a packed model of ours and its twin in plain transformers."""
    model = make_model(head, **values)
    return model, make_twin(model)


# --- Dropout by its type ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_code_that_finds_dropout_by_its_type_turns_it_off(kernel: str) -> None:
    model, batch = make_model("BertForSequenceClassification", kernel).train(), make_batch(LENGTHS)
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    torch.testing.assert_close(model(**batch).logits, model.eval()(**batch).logits)


@pytest.mark.parametrize("kernel", KERNELS)
def test_code_that_finds_dropout_by_its_type_keeps_it_on(kernel: str) -> None:
    """Monte-Carlo dropout; that of attention follows the mode of the attention module, as in transformers."""
    model, batch = make_model("BertForSequenceClassification", kernel, hidden_dropout_prob=0.3), make_batch(LENGTHS)
    for stays, is_on in (("self", False), ("", True)):
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and stays in name:
                module.train()
        assert torch.equal(model(**batch).logits, model(**batch).logits) != is_on


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rate_of_one_leaves_nothing(kernel: str) -> None:
    model, batch, mixed = make_model("BertForSequenceClassification", kernel).train(), make_batch(LENGTHS), []
    model.dropout.p = model.bert.encoder.layer[0].attention.self.dropout.p = 1.0
    model.bert.encoder.layer[0].attention.self.register_forward_hook(lambda _, args, out: mixed.append(out[0]))
    torch.testing.assert_close(model(**batch).logits, model.classifier.bias.expand(4, -1))
    assert not mixed[0].any()


# --- Arguments that change a result -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", sorted(ours.UNSUPPORTED))
def test_an_argument_that_would_be_ignored_is_refused_by_name(name: str, head: str) -> None:
    model, batch = make_model(head), shape_for(head, make_batch(LENGTHS))
    is_known = name == "logits_to_keep" and head in ("BertLMHeadModel", "BertForMaskedLM")
    if not is_known:
        with pytest.raises(ValueError, match=rf"^bertkit's models do not take {name}; \w+"):
            model(**batch, **{name: torch.tensor([0, 4])})
    model(**batch, **{name: 0 if is_known else None})


@pytest.mark.parametrize("head", [*LANGUAGE_MODELS, "BertForTokenClassification"])
def test_labels_of_another_length_are_refused(head: str) -> None:
    inputs = make_inputs(head)
    inputs["labels"] = nn.functional.pad(inputs["labels"], (0, 1))
    with pytest.raises(
        ValueError, match=r"got a tensor of shape \(4, 14\); expected \(B, T, ...\), \(B, T\) = \(4, 13\)"
    ):
        make_model(head)(**inputs)


def test_arguments_that_change_nothing_are_taken() -> None:
    make_model("BertForMaskedLM")(
        **make_batch(LENGTHS), use_cache=True, num_items_in_batch=3, output_router_logits=False
    )


@pytest.mark.parametrize("kept", [1, 3, 0, torch.tensor([2, 0])])
def test_the_last_logits_alone_are_those_of_transformers(kept: int | Tensor) -> None:
    model, twin = make_pair("BertLMHeadModel")
    batch = make_batch(LENGTHS, left=True)
    expected = twin(**batch).logits[:, kept if isinstance(kept, Tensor) else slice(-kept, None)]
    got = model(**batch, logits_to_keep=kept).logits
    real = batch["attention_mask"][:, kept if isinstance(kept, Tensor) else slice(-kept, None)].bool()
    assert got.shape == expected.shape
    assert differ(got[real], expected[real]) < 2e-6
    with pytest.raises(ValueError, match="logits_to_keep must be an integer or a vector"):
        model(**batch, logits_to_keep=torch.zeros(4, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="only without labels"):
        model(**batch, logits_to_keep=2, labels=batch["input_ids"])


def test_generation_decodes_the_last_place_only() -> None:
    model, rows = make_model("BertLMHeadModel", bos_token_id=1), []
    model.cls.predictions.decoder.register_forward_hook(lambda _, args, out: rows.append(out.shape))
    model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=3, do_sample=False)
    assert rows == [(1, 1, TINY["vocab_size"])] * 3


def test_given_positions_lift_the_limit_of_length() -> None:
    model, twin = make_pair("BertModel")
    ids = torch.randint(1, 99, (2, 100))
    positions = (torch.arange(100) % 64)[None]
    expected = twin(ids, position_ids=positions).last_hidden_state
    assert differ(model(ids, position_ids=positions).last_hidden_state, expected) < 2e-6
    with pytest.raises(ValueError, match="a sequence has 100 tokens, but the model has 64 positions"):
        model(ids)


# --- problem_type -----------------------------------------------------------------------------------------------------

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


def test_labels_that_do_not_fit_are_refused() -> None:
    model, batch = make_model("BertForSequenceClassification", problem_type="regression"), make_batch(LENGTHS)
    for shape in ((3, 4), (4,), (4, 1)):
        with pytest.raises(ValueError, match=r"got labels of shape .*; expected \(4, 3\), as of the logits"):
            model(**batch, labels=torch.zeros(shape))


@pytest.mark.parametrize("case", PROBLEMS)
def test_the_loss_of_every_problem_type_may_be_cut_into_parts(case: str) -> None:
    """Divide each part by the count of the whole, as our Trainer and the stock one count it."""
    kind, count, labels = PROBLEMS[case]
    model = make_model("BertForSequenceClassification", num_labels=count, problem_type=kind)
    batch = make_batch(LENGTHS) | {"labels": labels}
    whole = model(**batch).loss
    stock = (labels != -100).sum()  # transformers.Trainer's
    assert model.count_labels(**batch)["num_items_in_batch"] == stock
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(model(**part, num_items_in_batch=stock).loss for part in parts), whole)


# --- Second derivatives -----------------------------------------------------------------------------------------------


def multiply_hessian(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the Hessian of the loss times a fixed random vector, for every parameter."""
    parameters = list(model.parameters())
    torch.manual_seed(3)
    vectors = [torch.randn_like(x) for x in parameters]
    gradients = torch.autograd.grad(model(**inputs).loss, parameters, create_graph=True)
    return torch.autograd.grad(gradients, parameters, vectors, materialize_grads=True)


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_a_hessian_vector_product_is_that_of_transformers(head: str) -> None:
    """Take plain attention; the masked-LM loss of a training model computes its gradients in a kernel of its own."""
    lengths = [13] * 12  # enough labelled tokens for the kernel
    model = make_model(head, "eager", **NO_DROPOUT).train()
    inputs = make_inputs(head, lengths)
    expected = multiply_hessian(make_twin(model, "eager"), inputs)
    for (name, _), got, wanted in zip(model.named_parameters(), multiply_hessian(model, inputs), expected, strict=True):
        assert (got - wanted).norm() <= 1e-4 * wanted.norm() + 1e-5, name


@pytest.mark.parametrize("wrt", ["parameters", "inputs_embeds"])
def test_second_derivatives_of_packed_attention_are_refused(wrt: str) -> None:
    """Ask for parameters, and for some inputs alone, whose path autograd would leave out."""
    model, inputs = make_model("BertForSequenceClassification", **NO_DROPOUT).train(), make_inputs("BertForMaskedLM")
    inputs["labels"] = torch.tensor([0, 1, 2, 0])
    inputs["inputs_embeds"] = model.bert.embeddings.word_embeddings(inputs.pop("input_ids")).detach().requires_grad_()
    wanted = [inputs["inputs_embeds"]] if wrt == "inputs_embeds" else list(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"not support second derivatives .* load the model with attn_implementation='eager'"
    ):
        torch.autograd.grad(model(**inputs).loss, wanted, create_graph=True)


# --- Off-loading and several devices ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["packed", "sdpa"])
@pytest.mark.parametrize("head", [*HEADS, "BertBiLSTMForSequenceClassification", "BertFeaturesForTokenClassification"])
def test_off_loaded_weights_give_the_same(head: str, kernel: str, tmp_path) -> None:
    values = {"feature_layers": "last", "bilstm_hidden_size": 6} if "Features" in head else {}
    model = make_model(head, kernel, **values)
    inputs = make_inputs("BertForSequenceClassification" if "BiLSTM" in head else head)
    if "Features" in head:
        inputs = make_batch(LENGTHS)
    with torch.no_grad():
        expected = collect(model(**inputs), inputs["attention_mask"])
        disk = copy.deepcopy(model)
        cpu_offload(model, torch.device("cpu"))
        disk_offload(disk, tmp_path, torch.device("cpu"))
        for each in (model, disk):
            assert {x.device.type for x in each.parameters()} == {"meta"}
            got = collect(each(**inputs), inputs["attention_mask"])
            assert max(differ(got[name], expected[name]) for name in expected) < 2e-6


@pytest.mark.parametrize("kernel", ["packed", "sdpa"])
@pytest.mark.parametrize("head", HEADS)
def test_a_model_loads_with_its_weights_on_disk(head: str, kernel: str, tmp_path) -> None:
    model, inputs = make_model(head, kernel), make_inputs(head)
    model.save_pretrained(tmp_path / "model")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "weights", "attn_implementation": kernel}
    again = getattr(bertkit, head).from_pretrained(tmp_path / "model", **options)
    with torch.no_grad():
        got, expected = (collect(x.eval()(**inputs), inputs["attention_mask"]) for x in (again, model))
    # The hooks of accelerate need all states of the last layer.
    assert max(differ(got[name], expected[name]) for name in expected) < 2e-6


@pytest.mark.parametrize("head_on", [FIRST, SECOND])  # accelerate puts a tied decoder beside the embeddings
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["packed", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_layers_may_be_divided_over_two_devices(head: str, kernel: str, training: bool, head_on: torch.device) -> None:
    model, inputs = make_model(head, kernel, **NO_DROPOUT).train(training), make_inputs(head)
    if head != "BertModel":  # as our Trainer gives it
        indices = {} if head == "BertForMultipleChoice" else model.find_indices(**inputs)
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


# --- Hooks, and transforms of functions -------------------------------------------------------------------------------


def record_shapes(model: nn.Module, names: tuple[str, ...], batch: dict[str, Tensor]) -> dict[str, list]:
    """Return the shapes of the tensors that hooks see go into modules and come out."""
    seen = {}

    def note(name: str) -> None:
        def hook(module: nn.Module, args: tuple, out: Tensor | tuple) -> None:
            outs = out if isinstance(out, tuple) else (out,)
            seen[name] = [tuple(x.shape) for x in (*args, *outs)]

        model.get_submodule(name).register_forward_hook(hook)

    for name in names:
        note(name)
    model(**batch)
    return seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", LANGUAGE_MODELS)
def test_hooks_on_the_head_see_what_they_see_in_transformers(head: str, training: bool) -> None:
    model, twin = (x.train(training) for x in make_pair(head, **NO_DROPOUT))
    inputs, names = make_inputs(head), ("cls", "cls.predictions")
    options = {"as it is": {}, "all": {"targets_only": False}, "few": {"targets_only": True}}
    expected = {name: collect(model(**inputs, **given), inputs["attention_mask"]) for name, given in options.items()}
    assert record_shapes(model, names, inputs) == record_shapes(twin, names, inputs)
    for name, given in options.items():  # the outputs stay the same
        got = collect(model(**inputs, **given), inputs["attention_mask"])
        assert got.keys() == expected[name].keys()
        assert max(differ(got[key], expected[name][key]) for key in got) < 2e-6


@pytest.mark.parametrize("name", ["cls", "cls.predictions", "bert.embeddings", "bert.embeddings.word_embeddings"])
def test_a_hook_may_replace_what_a_module_returns(name: str) -> None:
    model, twin = make_pair("BertForMaskedLM")
    batch = make_batch(LENGTHS)
    for each in (model, twin):
        each.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out.flip(-1))
    real = batch["attention_mask"].bool()
    assert differ(model(**batch).logits[real], twin(**batch).logits[real]) < 2e-6


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["cls", "cls.predictions", "bert.embeddings.word_embeddings"])
def test_what_is_put_in_place_of_a_module_is_called(name: str, training: bool) -> None:
    """Replace its `forward`, then the module."""
    model, twin = (x.train(training) for x in make_pair("BertForMaskedLM", **NO_DROPOUT))
    inputs = make_inputs("BertForMaskedLM", [9] * 4)

    class Turned(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x).flip(1)

    for each in (model, twin):
        module = each.get_submodule(name)
        module.forward = lambda x, forward=module.forward: 2 * forward(x)
    torch.testing.assert_close(model(**inputs).loss, twin(**inputs).loss)
    for each in (model, twin):
        each.set_submodule(name, Turned(each.get_submodule(name)))
    torch.testing.assert_close(model(**inputs).loss, twin(**inputs).loss)


def test_a_hook_may_change_what_the_embeddings_are_given() -> None:
    model, twin = make_pair("BertModel")
    batch = make_batch(LENGTHS)

    def change(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"input_ids": kwargs["input_ids"].flip(1)}

    for each in (model, twin):
        each.embeddings.register_forward_pre_hook(change, with_kwargs=True)
        each.embeddings.word_embeddings.register_forward_hook(lambda module, args, out: 2 * out)
    real = batch["attention_mask"].bool()
    assert differ(model(**batch)[0][real], twin(**batch)[0][real]) < 2e-6


@pytest.mark.parametrize("name", ["bert.embeddings", "bert.embeddings.word_embeddings"])
def test_hooks_on_the_embeddings_see_batches(name: str) -> None:
    model, batch = make_model("BertForMaskedLM"), make_batch(LENGTHS)
    expected, shapes = model(**batch).logits, []
    model.get_submodule(name).register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    torch.testing.assert_close(model(**batch).logits, expected)
    assert shapes == [(4, 13, TINY["hidden_size"])]


def test_the_pooler_takes_the_states_as_in_transformers() -> None:
    model, twin = make_pair("BertModel")
    states = torch.randn(3, 7, TINY["hidden_size"])
    torch.testing.assert_close(model.pooler(states), twin.pooler(states))


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


def take_loss(model: nn.Module, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """Compute the loss as a function of the parameters."""
    return torch.func.functional_call(model, values, kwargs=inputs).loss


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_torch_func_has_the_gradients_of_autograd(head: str) -> None:
    model, inputs = make_model(head, **NO_DROPOUT).train(), make_inputs(head)
    model(**inputs).loss.backward()
    values = {name: x.detach() for name, x in model.named_parameters()}
    gradients, loss = torch.func.grad_and_value(lambda values: take_loss(model, values, inputs))(values)
    torch.testing.assert_close(loss, model(**inputs).loss)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name
    _, slope = torch.func.jvp(lambda values: take_loss(model, values, inputs), (values,), (gradients,))
    torch.testing.assert_close(slope, sum(x.square().sum() for x in gradients.values()), rtol=1e-4, atol=0)


def test_torch_func_drops_out_too() -> None:
    model, inputs = make_model("BertForSequenceClassification").train(), make_inputs("BertForSequenceClassification")
    values = {name: x.detach() for name, x in model.named_parameters()}
    first, second = (torch.func.grad(lambda values: take_loss(model, values, inputs))(values) for _ in range(2))
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForMaskedLM", "BertForTokenClassification"])
def test_gradients_of_each_example_by_vmap(head: str) -> None:
    """Packed without a mask; with one the number of tokens depends on the data, and the error names the remedy."""
    last = "cls.predictions.bias" if head == "BertForMaskedLM" else "classifier.weight"
    model, inputs = make_model(head, **NO_DROPOUT).train(), make_inputs(head, [7, 7, 7])
    values = {name: x.detach() for name, x in model.named_parameters()}
    del inputs["attention_mask"]  # a mask may give each example another number of tokens

    def take(values: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        return take_loss(model, values, {name: x[None] for name, x in inputs.items()})

    each = torch.func.vmap(torch.func.grad(take), in_dims=(None, 0))
    found = each(values, inputs)[last]
    for row in range(3):
        model.zero_grad()
        model(**{name: x[row : row + 1] for name, x in inputs.items()}).loss.backward()
        torch.testing.assert_close(found[row], model.get_parameter(last).grad)


# --- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["BertModel", "BertForMaskedLM"])
def test_a_stock_model_of_our_configuration_attends_as_with_sdpa(head: str) -> None:
    stock, batch = getattr(transformers, head)(make_model(head).config).eval(), make_batch(LENGTHS)
    found = stock(**batch)[0]
    stock.set_attn_implementation("sdpa")
    assert torch.equal(found, stock(**batch)[0])


def test_a_configuration_that_wants_attentions_has_them(tmp_path) -> None:
    model, batch = make_model("BertForMaskedLM", "eager"), make_batch(LENGTHS)
    model.config.output_attentions = True
    model.save_pretrained(tmp_path)
    again = pretraining_heads.BertForMaskedLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "eager"
    assert len(again(**batch).attentions) == 2
    assert len(pretraining_heads.BertForMaskedLM(BertConfig(**TINY, output_attentions=True))(**batch).attentions) == 2


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": True}])
def test_assisted_generation_is_refused(options: dict) -> None:
    model = make_model("BertLMHeadModel", bos_token_id=1)
    options = {name: model if value is True else value for name, value in options.items()}
    with pytest.raises(ValueError, match=r"assisted generation is not supported with .*BertLMHeadModel"):
        model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=3, do_sample=False, **options)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kernel", ["packed", "sdpa", "eager"])
def test_an_export_by_tracing_takes_batches_of_any_size_and_length(kernel: str, tmp_path) -> None:
    """`torch.onnx.export` without dynamo, which takes a size that it can compute for a constant."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, batch = make_model("BertModel", kernel), make_batch(LENGTHS)
    model.config.return_dict = False
    torch.onnx.export(
        model,
        tuple(batch.values()),
        tmp_path / "model.onnx",
        dynamo=False,
        input_names=list(batch),
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in batch},
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for lengths in ([4, 4], [20, 3, 11, 1, 7, 30]):
        batch = make_batch(lengths)
        states = session.run(None, {name: x.numpy() for name, x in batch.items()})[0]
        real = batch["attention_mask"].bool()
        assert differ(torch.from_numpy(states)[real], model(**batch)[0][real]) < 2e-6
