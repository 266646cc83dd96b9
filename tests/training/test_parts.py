"""The tokens that are computed at once: what a pretended GPU has room for, and how a batch is divided by them."""

from types import SimpleNamespace

import pytest
import torch

from bertkit.tasks import TASKS
from bertkit.training import parts
from bertkit.training.parts import TRAINED_ON_CPU, bound_tokens, divide_batch
from tests.conftest import draft
from tests.world import replace_values

RTE = TASKS["rte"]


@pytest.mark.parametrize(("others", "most"), [([], 5000), ([7000, 3000], 3000), ([-1], 1)])
def test_a_gpu_is_filled_to_four_fifths(monkeypatch, others, most):
    """A model of 1 M weights needs 12 MB for gradients and moments; 5,000 tokens of 1 kB are the rest of 80 % of 21.25.

    The process with the least free memory decides, and a sequence is computed even where nothing is free.
    """
    model = SimpleNamespace(num_parameters=lambda only_trainable: 1_000_000, to=lambda device: model)
    monkeypatch.setattr(parts, "measure_activations", lambda *args: 1000.0)
    monkeypatch.setattr(parts, "gather_object", lambda own: [*own, *others])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (21_250_000, 80_000_000))
    found = bound_tokens(draft(RTE), RTE, model, [], torch.device("cuda"))
    assert found == {"max_tokens": most}


def test_what_a_person_gives_is_not_decided():
    for change in ({"data": {"max_tokens": 7}}, {"train": {"per_device_train_batch_size": 8}}):
        recipe = replace_values(draft(RTE), **change)
        assert bound_tokens(recipe, RTE, None, None, torch.device("cuda")) == {}
    assert bound_tokens(draft(RTE), RTE, None, None, torch.device("cpu")) == {"max_tokens": TRAINED_ON_CPU}


@pytest.mark.parametrize(
    ("most", "parts"),
    [
        (0, [[0, 1, 2, 3]]),
        (1, [[0], [1], [2], [3]]),
        (5, [[0, 1], [2], [3]]),
        (9, [[0, 1], [2, 3]]),
        (13, [[0, 1, 2, 3]]),
    ],
)
def test_a_part_has_as_many_rows_as_fit(most, parts):
    """Rows of 3, 2, 7 and 1 tokens in two sequences each; a row that does not fit is alone."""
    lengths = torch.tensor([[2, 1], [2, 0], [4, 3], [1, 0]])
    mask = (torch.arange(5) < lengths[..., None]).long()  # (B, C, T)
    found = divide_batch({"attention_mask": mask, "labels": torch.arange(4)}, most)
    assert [part["labels"].tolist() for part in found] == parts
    assert torch.equal(torch.cat([part["attention_mask"] for part in found]), mask)
