"""Sequence classification of texts in windows: transformers' scores of each window, combined."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from tests.conftest import NO_DROPOUT, make_batch, make_model, make_twin

HEAD = "BertForSequenceClassification"
COUNTS = (2, 1, 3)  # windows of each of three texts
LENGTHS = [9, 4, 6, 9, 9, 3]
INDICES = [0, 1, 3, 6, 7, 8]  # of the windows in (3, 3)


def spread(flat, width=3):
    """Return the columns (3, width, T) of six windows (6, T), with zeros at absent ones."""
    present = torch.arange(width) < torch.tensor(COUNTS)[:, None]
    batch = {}
    for name, column in flat.items():
        batch[name] = column.new_zeros(*present.shape, column.shape[1])
        batch[name][present] = column
    return batch


def make_windows(labels=None):
    flat = make_batch(LENGTHS)
    return flat, spread(flat) | ({} if labels is None else {"labels": labels})


@pytest.mark.parametrize("kernel", ["packed", "sdpa", "eager"])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_scores_are_those_of_transformers_combined_by_hand(pooling, kernel):
    model = make_model(HEAD, kernel, window_pooling=pooling)
    flat, batch = make_windows()
    windows = make_twin(model)(**flat).logits.split(COUNTS)
    expected = torch.stack([x.mean(0) if pooling == "mean" else x.max(0).values for x in windows])
    torch.testing.assert_close(model(**batch).logits, expected)
    torch.testing.assert_close(model(**spread(flat, 5)).logits, expected)
    torch.testing.assert_close(model(**batch, **model.index_tokens(**batch)).logits, expected)


def test_the_values_of_windows_are_checked():
    model = make_model(HEAD)
    with pytest.raises(ValueError, match=r"inputs are windows \(B, W, T\), but window_pooling is not set"):
        model(**make_windows()[1])
    with pytest.raises(Exception, match="window_pooling"):
        make_model(HEAD, window_pooling="sum")
    assert "window_pooling" not in model.config.to_dict()


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize(
    ("kind", "labels", "compute_loss"),
    [
        ("single_label_classification", torch.tensor([2, 0, 1]), cross_entropy),
        (
            "multi_label_classification",
            torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]]),
            binary_cross_entropy_with_logits,
        ),
        ("regression", torch.tensor([[1.0, 0, 2], [0, 3, 1], [1, 1, 0]]), mse_loss),
    ],
)
def test_a_text_has_one_loss_and_kernels_have_the_same_gradients(kind, labels, compute_loss, pooling):
    """The loss is that of the combined scores; known indices change nothing."""
    values = {"window_pooling": pooling, "problem_type": kind}
    model = make_model(HEAD, **NO_DROPOUT, **values).train()
    _, batch = make_windows(labels)
    known = batch | model.index_tokens(**batch) | model.count_labels(**batch)
    assert known["window_indices"].tolist() == INDICES
    expected = compute_loss(model(**batch).logits, labels)
    gradients = {}
    for name, kernel, given in (("known", "packed", known), ("packed", "packed", batch), ("eager", "eager", batch)):
        model.set_attn_implementation(kernel)
        model.zero_grad()
        loss = model(**given).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters()]
    for one, same, other in zip(*gradients.values(), strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
