"""Compare one update's losses and gradients with plain transformers, for each head, on this device.

Both sides have the same weights and batches and no dropout: ours with the packed kernel, stock with sdpa. In 16 bits
they may only differ by rounding, which is not known in advance. So both are compared with stock in fp64: our gradients
agree if their error is at most PARITY_TOLERANCE times stock's own, a loss also if its error is below half a unit of the
precision, because a single number may be right by chance.

Sequences for questions have one length: stock's softmax over the tokens includes padding, ours does not.

Left out: other kernels, which the tests compare.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import bertkit
from bertkit.bench.measure import note_machine
from bertkit.data.sequences import IGNORED
from bertkit.model.config import BertConfig
from bertkit.model.precision import DTYPES, find_device, use_precision
from bertkit.system.progress import Report, ignore
from bertkit.tasks.prediction import add_indices

PARITY_HEADS = (
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)
PARITY_TOLERANCE = 2.0  # of stock's own error, which both sides' rounding makes by chance
SMALLEST_ERROR = 1e-5  # below it errors are not compared
HALF_UNITS = {"fp32": SMALLEST_ERROR, **{name: torch.finfo(dtype).eps / 2 for name, dtype in DTYPES.items()}}
LOSS_SCALE = 1024.0  # keeps small gradients representable in fp16
LABELS = 3  # of the classifiers


def compare_heads(sizes: Mapping[str, int], lengths: list[int], report: Report = ignore) -> dict[str, Any]:
    """Return the errors of both sides by head and precision, and the pairs that do not agree.

    Args:
        sizes: Values of BertConfig.
        lengths: The tokens of each sequence; an even number of sequences.
    """
    environment, heads, apart = note_machine(report), {}, []
    for head in PARITY_HEADS:
        torch.manual_seed(0)
        ours = make_head(head, sizes)
        taken = [max(lengths)] * len(lengths) if head == "BertForQuestionAnswering" else lengths
        batch = make_batch(head, taken, ours.config.vocab_size)
        heads[head] = compare_head(ours, batch)
        wrong = [precision for precision, found in heads[head].items() if not found["agrees"]]
        apart += [f"{head} in {precision}" for precision in wrong]
        worst = max(found["gradients"]["bertkit"] for found in heads[head].values())
        report(f"{head}: largest error of the gradients {worst:.1e}{', does not agree' if wrong else ''}")
    found = {"heads": heads, "sizes": dict(sizes), "lengths": lengths, "environment": environment}
    return found | ({"failure": f"other losses or gradients than stock: {', '.join(apart)}"} if apart else {})


def make_head(head: str, sizes: Mapping[str, int]) -> PreTrainedModel:
    """Return a model with random weights and without dropout, on the device."""
    config = BertConfig(
        **sizes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2 if head == "BertForQuestionAnswering" else LABELS,
        is_decoder=head == "BertLMHeadModel",
    )
    return getattr(bertkit, head)(config).to(find_device())


def make_batch(head: str, lengths: list[int], vocab_size: int) -> dict[str, Tensor]:
    """Return random sequences (B, T), or (B / 2, 2, T) for multiple choice, with labels for the head."""
    columns, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    mask = (columns < ends).long()  # (B, T)
    ids = torch.randint(1, vocab_size, mask.shape) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (columns >= ends // 2).long() * mask}
    chosen = mask.bool() & (torch.rand(mask.shape) < 0.15)
    chosen[:, 1] = True
    sentence, spans = torch.randint(2, (len(lengths),)), torch.arange(len(lengths)) % min(lengths)  # (B,) each
    if head == "BertForMultipleChoice":
        batch = {name: x.unflatten(0, (-1, 2)) for name, x in batch.items()}
        return batch | {"labels": sentence[::2]}
    if head == "BertForQuestionAnswering":
        return batch | {"start_positions": spans, "end_positions": spans}
    if head in ("BertForNextSentencePrediction", "BertForSequenceClassification"):
        return batch | {"labels": sentence}
    kinds = LABELS if head == "BertForTokenClassification" else vocab_size
    tokens = torch.randint(kinds, mask.shape).masked_fill(~chosen, IGNORED)
    return batch | {"labels": tokens} | ({"next_sentence_label": sentence} if head == "BertForPreTraining" else {})


def compare_head(ours: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return by precision whether the sides agree, and both sides' relative errors of loss and gradients."""
    values = ours.config.to_dict() | {"use_cache": False}
    config = transformers.BertConfig(**values)
    stock = getattr(transformers, type(ours).__name__)._from_config(config, attn_implementation="sdpa")
    stock.load_state_dict(ours.state_dict())
    stock.to(ours.device)
    placed = {name: x.to(ours.device) for name, x in batch.items()}
    with_indices = {name: x.to(ours.device) for name, x in add_indices(batch, type(ours)).items()}
    exact = take_update(stock.double(), placed, "fp32")
    stock.float()
    found = {}
    for precision in HALF_UNITS:
        sides = {"bertkit": take_update(ours, with_indices, precision), "stock": take_update(stock, placed, precision)}
        losses = {name: abs(loss / exact[0] - 1) for name, (loss, _) in sides.items()}
        gradients = {name: measure_error(one, exact[1]) for name, (_, one) in sides.items()}
        limits = HALF_UNITS[precision], SMALLEST_ERROR
        agrees = all(
            error["bertkit"] <= max(PARITY_TOLERANCE * error["stock"], least)
            for error, least in zip((losses, gradients), limits, strict=True)
        )
        found[precision] = {"agrees": agrees, "loss": losses, "gradients": gradients}
    return found


def take_update(model: PreTrainedModel, batch: Mapping[str, Tensor], precision: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of an update."""
    model.train().zero_grad(set_to_none=True)
    with use_precision(precision, model.device):
        loss = model(**batch).loss
    (loss * LOSS_SCALE).backward()
    named = model.named_parameters()
    return loss.item(), {name: x.grad.double() / LOSS_SCALE for name, x in named if x.grad is not None}


def measure_error(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the gradients' differences, relative to that of the exact gradients."""
    if gradients.keys() != exact.keys():
        return float("inf")
    error = sum(float((gradients[name] - one).square().sum()) for name, one in exact.items())
    return (error / sum(float(one.square().sum()) for one in exact.values())) ** 0.5
