"""Test cases over transformers' mixin of model tests, one definition for all sides, and what differs on purpose."""

import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.testing_utils import torch_device

import bertkit
from bertkit.model.bert import BertPreTrainedModel
from bertkit.model.config import BertConfig
from bertkit.model.packing import PACKED
from tests.conftest import HEADS, TINY, make_batch
from tests.peer import source

transformers.logging.set_verbosity_warning()  # tests.conftest silences what these tests expect

# Our classes under an attention implementation, or those of transformers.
OURS = (PACKED, "sdpa", "eager")
CONTROL = "stock"
SIDES = (*OURS, CONTROL)

# The left-to-right model is apart, because a test gives all classes of a case the same configuration.
CASES = {"Encoder": [head for head in HEADS if head != "BertLMHeadModel"], "Decoder": ["BertModel", "BertLMHeadModel"]}
LENGTHS = [7, 4, 2, 6]


class Difference(NamedTuple):
    """Say on which sides a test that stock BERT passes must fail or be skipped, with which message, and why."""

    sides: tuple[str, ...]
    message: str
    reason: str


NO_PROBABILITIES = Difference(
    (PACKED, "sdpa"),
    "attention probabilities exist only with attn_implementation='eager'",
    "Asked for attention probabilities, other kernels than eager raise an error.",
)
DIFFERENCES = {
    **dict.fromkeys(("test_capture_outputs_decorator", "test_model_outputs_equivalence"), NO_PROBABILITIES),
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": Difference(
        OURS, "does not support output_attentions", "Compares attention probabilities, which sdpa does not have here."
    ),
    "test_sdpa_can_dispatch_non_composite_models": Difference(
        (PACKED, "eager"), "False is not true", "Expects sdpa as the default, which is packed, or here eager."
    ),
    "test_bc_cache_name_forward": Difference(
        OURS, "Do not take a cache", "There is no cache: the whole text is given."
    ),
    "test_causal_lm_loss_honors_shift_labels": Difference(
        OURS,
        "do not take shift_labels",
        "Shifted labels are for a sequence divided over devices, which these models do not support.",
    ),
}


class Tester:
    """Give the mixin the sizes, the configuration and a padded batch of a tiny model."""

    batch_size = len(LENGTHS)
    seq_length = max(LENGTHS)
    num_choices = 2
    is_training = True
    num_hidden_layers = TINY["num_hidden_layers"]
    num_attention_heads = TINY["num_attention_heads"]
    hidden_size = TINY["hidden_size"]

    def __init__(self, config_class: type[transformers.PreTrainedConfig], is_decoder: bool) -> None:
        self.config_class, self.is_decoder = config_class, is_decoder

    def get_config(self) -> transformers.PreTrainedConfig:
        """Return a new configuration, which the test may change."""
        return self.config_class(**TINY, is_decoder=self.is_decoder)

    def prepare_config_and_inputs_for_common(self) -> tuple[transformers.PreTrainedConfig, dict[str, Tensor]]:
        """Return a new configuration and a batch padded on the right."""
        return self.get_config(), {name: x.to(torch_device) for name, x in make_batch(LENGTHS).items()}


def make_case(name: str, side: str) -> type[unittest.TestCase]:
    """Return the case of `CASES` with one side's classes."""
    mixin = source.load().ModelTesterMixin
    library, config_class = (transformers, transformers.BertConfig) if side == CONTROL else (bertkit, BertConfig)

    class Case(mixin, unittest.TestCase):
        all_model_classes = tuple(getattr(library, head) for head in CASES[name])
        test_can_init_all_missing_weights_before_2023 = True  # without it the test is skipped for an old model
        test_generation_tester_mixin_inheritance = None  # the source distribution lacks the mixin that it looks for

        def setUp(self) -> None:
            transformers.set_seed(0)
            self.model_tester = Tester(config_class, is_decoder=name == "Decoder")

        def _prepare_for_class(self, inputs: dict, model_class: type, return_labels: bool = False) -> dict:
            inputs = super()._prepare_for_class(inputs, model_class, return_labels)
            if return_labels and model_class.__name__ == "BertForPreTraining":
                inputs["labels"] = torch.zeros_like(inputs["input_ids"])
                inputs["next_sentence_label"] = torch.zeros_like(inputs["input_ids"][:, 0])
            return inputs

    Case.__name__ = Case.__qualname__ = name
    return Case


@contextmanager
def default_to(attention: str) -> Iterator[None]:
    """Let our classes run under this attention implementation, not packed, where a test asks for none."""
    inherited = BertPreTrainedModel.get_correct_attn_implementation

    def choose(self: BertPreTrainedModel, requested: str | None, is_init_check: bool = False) -> str:
        return inherited(self, requested or attention, is_init_check)

    with mock.patch.object(BertPreTrainedModel, "get_correct_attn_implementation", choose):
        yield
