"""The model in transformers' tests of models, beside transformers' BERT.

    python -m unittest --buffer tests.tools.peer.models [-k EncoderPacked]

Downloads the source distribution of the installed transformers when it is asked for the first time, and runs the tests
of its mixin with our classes under each attention implementation and with transformers' classes as control. Those that
differ on purpose are expected to fail. Not collected by pytest: it takes minutes.
"""

import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
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
from tests.tools.peer import source

transformers.logging.set_verbosity_warning()  # tests.conftest silences what these tests expect

# Our classes under an attention implementation, or those of transformers.
OURS = (PACKED, "sdpa", "eager")
CONTROL = "stock"
SIDES = (*OURS, CONTROL)

# The left-to-right model is apart, because a test gives all classes of a case the same configuration.
CASES = {"Encoder": [head for head in HEADS if head != "BertLMHeadModel"], "Decoder": ["BertModel", "BertLMHeadModel"]}
LENGTHS = [7, 4, 2, 6]


# Test -> the sides on which it must fail, or is skipped, although stock BERT passes it.
DIFFERENCES = {
    # Asked for attention probabilities, other kernels than eager raise an error.
    "test_capture_outputs_decorator": (PACKED, "sdpa"),
    "test_model_outputs_equivalence": (PACKED, "sdpa"),
    # Compares attention probabilities, which sdpa does not have here.
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": OURS,
    # Expects sdpa as the default, which is packed, or here eager.
    "test_sdpa_can_dispatch_non_composite_models": (PACKED, "eager"),
    # There is no cache: the whole text is given.
    "test_bc_cache_name_forward": OURS,
    # Shifted labels are for a sequence divided over devices, which these models do not support.
    "test_causal_lm_loss_honors_shift_labels": OURS,
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
            if side in ("sdpa", "eager"):
                self.enterContext(default_to(side))
            transformers.set_seed(0)
            self.model_tester = Tester(config_class, is_decoder=name == "Decoder")

        def _prepare_for_class(self, inputs: dict, model_class: type, return_labels: bool = False) -> dict:
            inputs = super()._prepare_for_class(inputs, model_class, return_labels)
            if return_labels and model_class.__name__ == "BertForPreTraining":
                inputs["labels"] = torch.zeros_like(inputs["input_ids"])
                inputs["next_sentence_label"] = torch.zeros_like(inputs["input_ids"][:, 0])
            return inputs

    Case.__name__ = Case.__qualname__ = f"{name}{side.capitalize()}"
    for test, sides in DIFFERENCES.items():
        if side in sides and hasattr(mixin, test):  # transformers 5.14 lacks some of these tests
            setattr(Case, test, expect_failure(getattr(mixin, test)))
    return Case


def expect_failure(test: Callable[[unittest.TestCase], None]) -> Callable[[unittest.TestCase], None]:
    """Return a test that fails if the given one passes."""

    @unittest.expectedFailure
    @wraps(test)
    def run(self: unittest.TestCase) -> None:
        test(self)

    return run


def default_to(attention: str) -> AbstractContextManager:
    """Let our classes run under this attention implementation, not packed, where a test asks for none."""
    inherited = BertPreTrainedModel.get_correct_attn_implementation

    def choose(self: BertPreTrainedModel, requested: str | None, is_init_check: bool = False) -> str:
        return inherited(self, requested or attention, is_init_check)

    return mock.patch.object(BertPreTrainedModel, "get_correct_attn_implementation", choose)


for name in CASES:
    for side in SIDES:
        case = make_case(name, side)
        globals()[case.__name__] = case
del case  # another name of the last one
