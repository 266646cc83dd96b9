"""Losses: transformers' values, the same gradients under every kernel, and independence of how an update is split."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bertkit.model import attention, cpu
from bertkit.model.cpu import ROWS_A_BLOCK
from bertkit.model.heads import ignore_masked
from bertkit.model.loss import IGNORE_INDEX, classify_loss, decode_loss, regress_loss
from tests.conftest import HEADS, NO_DROPOUT, make_batch, make_labels, make_model, make_twin
from tests.model.inputs import LANGUAGE_MODELS, LENGTHS, make_inputs, take_gradients

LOSS_HEADS = HEADS[1:]
TOKEN_HEADS = (*LANGUAGE_MODELS, "BertForTokenClassification")

# A constant added to all scores of a softmax changes nothing: the true gradient of these parameters is zero.
UNMOVED = dict.fromkeys(LOSS_HEADS, ("key.bias",))
UNMOVED["BertForMultipleChoice"] += ("classifier.bias",)
UNMOVED["BertForQuestionAnswering"] += ("qa_outputs.bias", "layer.1.output.LayerNorm.bias")


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [LENGTHS, [9] * 4], ids=["padded", "of one length"])
@pytest.mark.parametrize("head", LOSS_HEADS)
def test_losses_equal_transformers(head: str, lengths: list[int]) -> None:
    if head == "BertForQuestionAnswering":
        lengths = [9] * 4  # stock includes padding in the softmax
    model, inputs = make_model(head), make_inputs(head, lengths)
    torch.testing.assert_close(model(**inputs).loss, make_twin(model)(**inputs).loss)


@pytest.mark.parametrize("kernel", ["packed", "sdpa"])
def test_an_answers_loss_does_not_depend_on_the_padding(kernel: str) -> None:
    """Return the mean of stock's losses of single rows, because stock includes padding in the softmax."""
    model, inputs = make_model("BertForQuestionAnswering", kernel), make_inputs("BertForQuestionAnswering")
    twin = make_twin(model)
    alone = [twin(**trim({name: x[row : row + 1] for name, x in inputs.items()})).loss for row in range(4)]
    torch.testing.assert_close(model(**inputs).loss, torch.stack(alone).mean())
    assert (twin(**inputs).loss - torch.stack(alone).mean()).abs() > 1e-3


def test_an_answer_outside_of_the_window_is_not_counted() -> None:
    model, batch = make_model("BertForQuestionAnswering"), make_batch([9, 9])
    inside = model(
        **{name: x[:1] for name, x in batch.items()}, start_positions=torch.tensor([2]), end_positions=torch.tensor([4])
    )
    for outside in (9, 100, -1):
        start, end = torch.tensor([2, outside]), torch.tensor([4, outside])
        torch.testing.assert_close(model(**batch, start_positions=start, end_positions=end).loss, inside.loss)
    nothing = torch.tensor([9, 9])
    assert model(**batch, start_positions=nothing, end_positions=nothing).loss == 0


def test_the_left_to_right_loss_is_that_of_the_next_token() -> None:
    """Three tokens a b c: the mean of -log p(b | a) and -log p(c | a b)."""
    model, ids = make_model("BertLMHeadModel"), torch.tensor([[7, 8, 9]])
    log_p = model(ids).logits.log_softmax(dim=-1)
    torch.testing.assert_close(model(ids, labels=ids).loss, -(log_p[0, 0, 8] + log_p[0, 1, 9]) / 2)


def test_the_pretraining_loss_is_the_sum_of_its_parts() -> None:
    model, inputs = make_model("BertForPreTraining"), make_inputs("BertForPreTraining")
    both = model(**inputs)
    torch.testing.assert_close(both.loss, both.mlm_loss + both.nsp_loss)
    nsp = inputs.pop("next_sentence_label")
    alone = model(**inputs)
    assert torch.equal(alone.loss, both.mlm_loss)
    assert alone.nsp_loss is None
    inputs.pop("labels")
    alone = model(**inputs, next_sentence_label=nsp)
    assert torch.equal(alone.loss, both.nsp_loss)
    assert alone.mlm_loss is None
    assert model(**inputs).loss is None


@pytest.mark.parametrize("head", LANGUAGE_MODELS)
def test_in_training_only_labelled_positions_are_decoded(head: str) -> None:
    model, inputs = make_model(head, **NO_DROPOUT), make_inputs(head)
    name = "prediction_logits" if head == "BertForPreTraining" else "logits"
    labels = inputs["labels"]
    if head == "BertLMHeadModel":
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    full = model(**inputs)
    assert full[name].shape == (4, 13, 99)
    few = model(**inputs, targets_only=True)
    torch.testing.assert_close(few[name], full[name][labels != IGNORE_INDEX])
    trained = model.train()(**inputs)
    assert trained.get(name) is None
    assert model(**inputs, targets_only=False)[name].shape == (4, 13, 99)
    for other in (few, trained, model(**inputs, targets_only=False)):
        torch.testing.assert_close(other.loss, full.loss)
    inputs = {key: x for key, x in inputs.items() if "label" not in key}
    assert model(**inputs)[name].shape == (4, 13, 99)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)], ids=["unknown", "0", "tensor 0"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_without_a_label_the_loss_is_zero(head: str, training: bool, count: Tensor | int | None) -> None:
    model, inputs = make_model(head, **NO_DROPOUT).train(training), make_inputs(head)
    inputs["labels"].fill_(IGNORE_INDEX)
    outputs = model(**inputs, num_items_in_batch=count)
    loss = outputs.get("mlm_loss", outputs.loss)
    assert loss == 0
    outputs.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("weights", [[1.0, 2.5, 0.25], [0.01, 0.02, 0], [3, 300, 30]])
@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification"])
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertBiLSTMForSequenceClassification"])
def test_class_weights_are_those_of_torch(head: str, kind: str, weights: list[float]) -> None:
    """Loss and gradient equal torch's, for a sum of weights below 1, too, and with parts of an update added up."""
    model, batch = make_model(head, problem_type=kind, class_weights=weights, **NO_DROPOUT), make_batch([9] * 8)
    tensor = torch.tensor(weights, dtype=torch.float32)
    if kind == "single_label_classification":
        batch["labels"], torchs = torch.tensor([0, 1, 1, IGNORE_INDEX, 2, 0, 0, 2]), nn.CrossEntropyLoss(tensor)
    else:
        batch["labels"], torchs = torch.randint(2, (8, 3)).float(), nn.BCEWithLogitsLoss(pos_weight=tensor)
    outputs = model(**batch)
    expected = torchs(outputs.logits, batch["labels"])
    torch.testing.assert_close(outputs.loss, expected)
    wanted = torch.autograd.grad(expected, model.classifier.weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(outputs.loss, model.classifier.weight), wanted)
    parts = [dict(zip(batch, xs, strict=True)) for xs in zip(*(x.split(2) for x in batch.values()), strict=True)]
    counts = [model.count_labels(**part)["num_items_in_batch"] for part in parts]
    losses = [model(**part, num_items_in_batch=sum(counts)).loss for part in parts]
    torch.testing.assert_close(sum(losses), expected)


def test_losses_are_computed_in_full_precision() -> None:
    """In bfloat16 these two logits are equal, and their sum over many labels would stop growing at 256."""
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)
    loss = classify_loss(logits, torch.zeros(4096, dtype=torch.long))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(2.0).log())
    loss = regress_loss(torch.zeros(4096, 1, dtype=torch.bfloat16), torch.full((4096,), 0.1))
    torch.testing.assert_close(loss, torch.tensor(0.01))


# --- The decoder's ----------------------------------------------------------------------------------------------------


def decode(
    fast: bool, rows: int, vocabulary: int, dtype: torch.dtype | None = None, frozen: str = ""
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss of random rows by one of the two methods, and the gradients of seven times the loss."""
    torch.manual_seed(0)
    decoder, hidden = nn.Linear(24, vocabulary), torch.randn(rows, 24, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))
    wanted = {"hidden": hidden, "weight": decoder.weight, "bias": decoder.bias}
    for name in frozen.split():
        wanted[name].requires_grad_(False)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = decode_loss(hidden, decoder, labels, 3) if fast else classify_loss(decoder(hidden), labels, 3)
    (7 * loss).backward()
    return loss.detach(), {name: tensor.grad for name, tensor in wanted.items()}


@pytest.mark.parametrize(
    ("rows", "vocabulary", "frozen"),
    [
        (1, 5, ""),
        (ROWS_A_BLOCK, 300, ""),
        (2 * ROWS_A_BLOCK + 37, 700, ""),
        (40, 300_000, ""),
        (50, 300, "weight bias"),
        (9, 9, "hidden"),
    ],
)
def test_the_decoder_learns_the_same_with_its_loss(rows: int, vocabulary: int, frozen: str) -> None:
    loss, gradients = decode(True, rows, vocabulary, frozen=frozen)
    expected, plain = decode(False, rows, vocabulary, frozen=frozen)
    torch.testing.assert_close(loss, expected)
    for name, gradient in plain.items():
        if name in frozen:
            assert gradient is gradients[name] is None
        else:
            assert gradient.abs().max() > 0
            explain = partial("{}: {}".format, name)
            bound = 1e-5 * max(1, rows / 512)  # another order of summation: differences of 1.5e-5 on one processor
            torch.testing.assert_close(gradients[name], gradient, rtol=1.3e-6, atol=bound, msg=explain)


def test_the_decoder_learns_in_the_precision_of_autocast() -> None:
    """As far from exact gradients as torch's own bfloat16, within its rounding; parameters keep their precision."""
    rows, vocabulary = ROWS_A_BLOCK + 300, 600
    _, exact = decode(False, rows, vocabulary)
    for fast in (True, False):
        loss, gradients = decode(fast, rows, vocabulary, torch.bfloat16)
        assert loss.dtype == torch.float32
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            error = (gradient - exact[name]).norm() / exact[name].norm()
            assert 1e-5 < error < 2e-2, (fast, name)


def test_a_decoder_that_is_not_plain_is_called() -> None:
    """The decoder may have been replaced by an adapter."""

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    decoder, hidden, labels = Adapted(8, 30), torch.randn(5, 8), torch.arange(5)
    torch.testing.assert_close(decode_loss(hidden, decoder, labels), classify_loss(decoder(hidden), labels))


# --- Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", LOSS_HEADS)
def test_kernels_have_the_same_gradients(head: str) -> None:
    """Equals stock where padding does not affect its loss; every parameter gets a gradient."""
    model, inputs, gradients = make_model(head, **NO_DROPOUT).train(), make_inputs(head), {}
    for kernel in ("packed", "sdpa", "eager"):
        model.set_attn_implementation(kernel)
        gradients[kernel] = take_gradients(model, inputs)[1]
    if head != "BertForQuestionAnswering":
        gradients["stock"] = take_gradients(make_twin(model).train(), inputs)[1]
    packed = gradients.pop("packed")
    largest = max(gradient.abs().max() for gradient in packed.values())
    for name, gradient in packed.items():
        scale = largest if name.endswith(UNMOVED[head]) else gradient.abs().max()
        assert scale > 0, name
        for kernel, other in gradients.items():
            assert (gradient - other[name]).abs().max() <= 1e-5 * scale, f"{kernel}: {name}"


@pytest.mark.parametrize("kernel", ["packed", "sdpa"])
@pytest.mark.parametrize("head", LOSS_HEADS)
def test_known_indices_change_nothing(head: str, kernel: str) -> None:
    model, inputs = make_model(head, kernel, **NO_DROPOUT).train(), make_inputs(head)
    looked_for, gradients = take_gradients(model, inputs)
    loss, known = take_gradients(model, inputs | model.index_tokens(**inputs))
    tolerance = 1e-6 if head == "BertForTokenClassification" else 0.0  # whose last layer is narrowed by them
    torch.testing.assert_close(loss, looked_for)
    assert all((gradient - known[name]).abs().max() <= tolerance for name, gradient in gradients.items())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_labels_at_masked_tokens_count_with_no_kernel(head: str, left: bool) -> None:
    """Equals a batch without them."""
    model, batch = make_model(head, **NO_DROPOUT), make_batch([3, 9, 5], left=left)
    inputs = batch | make_labels(head, batch)
    inputs["labels"] = torch.randint(1, 3, batch["input_ids"].shape)
    clean = inputs | {"labels": ignore_masked(inputs["labels"], batch["attention_mask"])}
    assert (clean["labels"] == IGNORE_INDEX).sum() == 6 + 4
    expected, count = take_gradients(model, clean)[1], model.count_labels(**clean)
    loss = model(**clean).loss
    for kernel in ("packed", "sdpa", "eager"):
        model.set_attn_implementation(kernel)
        for training in (False, True):
            model.train(training)
            assert model.count_labels(**inputs) == count
            torch.testing.assert_close(model(**inputs, **count).loss, loss)
            for name, gradient in take_gradients(model, inputs)[1].items():
                torch.testing.assert_close(gradient, expected[name], msg=f"{kernel}: {name}")


class Unhurried(TorchDispatchMode):
    """In it what has to wait for an accelerator, as it asks for values or for a size that depends on them, raises."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        masks = args[1] if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if any(word in name for word in self.WAITS) or any(x is not None and x.dtype == torch.bool for x in masks):
            raise AssertionError(f"{name} waits")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("head", "values"),
    [*((head, {}) for head in LOSS_HEADS), ("BertForSequenceClassification", {"class_weights": [1.0, 2.0, 3.0]})],
)
def test_an_update_waits_for_no_accelerator(head: str, values: dict, monkeypatch) -> None:
    """All but attention and dropout, which are a CPU's own here."""
    monkeypatch.setattr(attention, "attend_on_cpu", lambda query, key, value, *options: query + (key + value).sum(0))
    monkeypatch.setattr(cpu, "draw_mask", lambda shape, rate: torch.full(shape, -1, dtype=torch.int16))
    model, inputs = make_model(head, **values).train(), make_inputs(head)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    counts, indices = model.count_labels(**inputs), model.index_tokens(**inputs)
    with Unhurried():
        model(**inputs, **counts, **indices).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with pytest.raises(AssertionError, match=r"nonzero.* waits"), Unhurried():
        model(**inputs)


# --- How an update is split -------------------------------------------------------------------------------------------


def cut(inputs: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Split a batch into equal parts, each trimmed to its longest sequence."""
    pieces = [dict(zip(inputs, xs, strict=True)) for xs in zip(*(x.chunk(parts) for x in inputs.values()), strict=True)]
    return [trim(piece) for piece in pieces]


def trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch without the columns that are padding in every row."""
    width, longest = batch["input_ids"].shape[-1], int(batch["attention_mask"].sum(dim=-1).max())
    return {name: x[..., :longest] if x.dim() > 1 and x.shape[-1] == width else x for name, x in batch.items()}


@pytest.mark.parametrize("head", LOSS_HEADS)
def test_parts_of_an_update_sum_to_the_whole(head: str) -> None:
    """Given the label count of the whole update, the losses and gradients of the parts add up, for any lengths."""
    model, inputs = make_model(head, **NO_DROPOUT).train(), make_inputs(head, [3, 9, 5, 13, 20, 2, 2, 6] * 2)
    model.double()
    whole, expected = take_gradients(model, inputs)
    parts = cut(inputs, 4)
    counts = [model.count_labels(**part) for part in parts]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    assert total == model.count_labels(**inputs)
    model.zero_grad()
    losses = [model(**part, **total).loss for part in parts]
    torch.testing.assert_close(sum(losses), whole)
    sum(losses).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows of equal width as a trimmed batch."""
    return trim({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def make_rows(head: str) -> list[dict[str, Tensor]]:
    """Return 64 labelled rows of 4 to 24 tokens as a Trainer's data set."""
    inputs = make_inputs(head, torch.randint(4, 25, (128 if head == "BertForMultipleChoice" else 64,)).tolist())
    return [{name: x[i] for name, x in inputs.items()} for i in range(64)]


def train(model: nn.Module, rows: list[dict[str, Tensor]], parts: int, folder: Path) -> list[float]:
    """Return the losses that the stock Trainer reports over two updates of 32 rows, each split into `parts`."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=32 // parts,
        gradient_accumulation_steps=parts,
        train_sampling_strategy="sequential",
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(model, args, train_dataset=rows, data_collator=collate)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("head", LOSS_HEADS)
def test_accumulation_changes_nothing_under_transformers_trainer(head: str, tmp_path: Path) -> None:
    """32 rows at once and 4 x 8 report the true mean, not a multiple of it, and end with the same weights.

    Micro-batches have unequal widths and label counts; equal counts in pre-training, as stock has one for all.
    """
    rows = make_rows(head)
    if head == "BertForPreTraining":
        for row in rows:  # two tokens each
            row["labels"] = row["input_ids"].masked_fill(torch.arange(24) // 2 != 1, IGNORE_INDEX)
    model = make_model(head, **NO_DROPOUT)
    start, other, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(model), model(**collate(rows[:32])).loss
    losses = train(model, rows, 1, tmp_path)
    assert losses[0] == pytest.approx(whole.item(), rel=1e-4)
    assert train(other, rows, 4, tmp_path) == pytest.approx(losses, rel=1e-4)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
        assert not torch.equal(p, start[name]) or name.endswith(UNMOVED[head]), name


@pytest.mark.parametrize("head", LOSS_HEADS)
def test_transformers_trainer_evaluates_every_head(head: str, tmp_path: Path) -> None:
    """It finds the labels by the argument names of `forward`, reports a loss, and returns the logits."""
    model, rows = make_model(head), make_rows(head)[:16]
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=16, report_to="none", use_cpu=True, disable_tqdm=True
    )
    answer = transformers.Trainer(model, args, data_collator=collate).predict(rows)
    with torch.no_grad():
        expected = model(**collate(rows))
    assert answer.metrics["test_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    logits = [value for name, value in expected.items() if name.endswith("logits")]
    predictions = answer.predictions if len(logits) > 1 else [answer.predictions]
    for prediction, value in zip(predictions, logits, strict=True):
        torch.testing.assert_close(torch.from_numpy(prediction), value)


def test_pretraining_under_transformers_trainer_is_not_inflated(tmp_path: Path) -> None:
    """Rows as they come: the masked-LM loss is exact, and the next-sentence loss a weighted mean, not a sum."""
    model, rows = make_model("BertForPreTraining", **NO_DROPOUT), make_rows("BertForPreTraining")
    whole = model(**collate(rows[:32]))
    parts = [collate(rows[start : start + 8]) for start in range(0, 32, 8)]
    weights = torch.stack([(part["labels"] != IGNORE_INDEX).sum() for part in parts])
    nsp_losses = torch.stack([model(**part).nsp_loss for part in parts])
    expected = whole.mlm_loss + (weights * nsp_losses).sum() / weights.sum()
    assert train(copy.deepcopy(model), rows, 1, tmp_path)[0] == pytest.approx(whole.loss.item(), rel=1e-4)
    assert train(model, rows, 4, tmp_path)[0] == pytest.approx(expected.item(), rel=1e-4)
