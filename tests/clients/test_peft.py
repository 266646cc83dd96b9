"""PEFT: LoRA and prompt tuning of our heads, compared with stock."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.clients.conftest import SIDES, build, check_as_stock, check_same, train
from tests.conftest import collect, make_batch, make_labels

pytestmark = pytest.mark.clients

# Head -> PEFT's name of the task, and the modules to adapt (None: the query and the value, which PEFT knows for BERT).
LORA = {
    "BertForMaskedLM": (None, "all-linear"),
    "BertForSequenceClassification": ("SEQ_CLS", None),
    "BertForTokenClassification": ("TOKEN_CLS", ["key", "dense"]),
    "BertForQuestionAnswering": ("QUESTION_ANS", None),
}
PROMPTS = {
    "BertLMHeadModel": "CAUSAL_LM",
    "BertForSequenceClassification": "SEQ_CLS",
    "BertForTokenClassification": "TOKEN_CLS",
    "BertForQuestionAnswering": "QUESTION_ANS",
}
VIRTUAL = 4  # tokens of a tuned prompt


def make_data(head):
    """Return a batch and its labels.

    In question answering stock counts padding in the loss, and PEFT drops the segments; so there are none.
    """
    if head != "BertForQuestionAnswering":
        batch = make_batch([2, 9, 5, 13])
        return batch, make_labels(head, batch)
    batch = make_batch([9] * 4)
    del batch["token_type_ids"]
    return batch, make_labels(head, batch)


def predict(model, batch, virtual=0):
    """Return the outputs at real tokens, `virtual` ones before the text included."""
    mask = nn.functional.pad(batch["attention_mask"], (virtual, 0), value=1)
    with torch.no_grad():
        return collect(model(**batch), mask)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", LORA)
def test_lora_is_trained_saved_loaded_and_merged_as_on_stock(head, side, tmp_path):
    import peft

    task, targets = LORA[head]
    config = peft.LoraConfig(task_type=task, r=4, target_modules=targets)

    def measure(side):
        model = peft.get_peft_model(build(head, side), config)
        batch, labels = make_data(head)
        untrained = predict(model, batch)
        losses = train(model, batch | labels)
        trained = predict(model, batch)
        assert all((trained[name] - untrained[name]).abs().max() > 1e-2 for name in trained)
        model.save_pretrained(tmp_path / side)
        loaded = peft.PeftModel.from_pretrained(build(head, side), tmp_path / side).eval()
        check_same(predict(loaded, batch), trained)
        merged = loaded.merge_and_unload()
        assert type(merged) is type(build(head, side))
        check_same(predict(merged, batch), trained)
        return {"losses": losses} | trained | load_file(tmp_path / side / "adapter_model.safetensors")

    check_as_stock(measure, side)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", PROMPTS)
def test_a_prompt_is_tuned_saved_and_loaded_as_on_stock(head, side, tmp_path):
    import peft

    config = peft.PromptTuningConfig(task_type=PROMPTS[head], num_virtual_tokens=VIRTUAL)

    def measure(side):
        model = peft.get_peft_model(build(head, side), config)
        batch, labels = make_data(head)
        if head == "BertForTokenClassification":  # PEFT leaves it to the caller to label the virtual tokens
            labels = {"labels": nn.functional.pad(labels["labels"], (VIRTUAL, 0), value=-100)}
        losses = train(model, batch | labels)
        tuned = predict(model, batch, VIRTUAL)
        model.save_pretrained(tmp_path / side)
        loaded = peft.PeftModel.from_pretrained(build(head, side), tmp_path / side).eval()
        check_same(predict(loaded, batch, VIRTUAL), tuned)
        return {"losses": losses} | tuned | load_file(tmp_path / side / "adapter_model.safetensors")

    check_as_stock(measure, side)
