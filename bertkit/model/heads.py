"""The fine-tuning heads of section 4: sentence, multiple choice, token, and answer span.

Classes, arguments and outputs are those of plain transformers; hidden states and attentions are returned on request.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from bertkit.model.bert import BertModel, BertPreTrainedModel
from bertkit.model.bilstm import BertBiLSTM
from bertkit.model.config import BertConfig
from bertkit.model.cpu import Dropout, is_adapted
from bertkit.model.loss import IGNORE_INDEX, classify_each_loss, classify_loss, regress_loss, weigh_labels
from bertkit.model.packing import Layout, index_read, index_true, keep_first

Inputs = Sequence[Tensor | None]  # the first five arguments of `BertModel.forward`
Encoded = BaseModelOutputWithPooling
Count = Tensor | int | None  # number of labels of the whole update, over all micro-batches and processes
Scored = tuple[Tensor, Tensor | None]  # logits, and the loss if labels are given


class BertHead(BertPreTrainedModel):
    """Base class of all models with a head: the encoder, named `bert`, and the layout of its batch.

    `forward` takes the arguments of `BertModel.forward`, `labels`, and `num_items_in_batch`: the number of labels of
    the whole update, over all micro-batches and processes; None: those of this batch.
    """

    output_class: type[ModelOutput]
    pipeline_tag: str  # on the Hub
    has_pooler = False  # on the encoder
    reads_sentences = False  # only the first token of each sequence, so that the last layer need not compute the others
    has_bilstm = False  # between the encoder and the head
    labels_tokens = False  # labels are (B, T)

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.is_frozen = False
        if self.has_bilstm:
            if config.hidden_size % 2:
                raise ValueError(f"hidden_size is {config.hidden_size}; a BiLSTM on top needs an even size")
            self.bilstm = BertBiLSTM(config.hidden_size, config.hidden_size // 2)
        self.bert = BertModel(self.config, add_pooling_layer=self.has_pooler, reads_mean=self.reads_mean)

    def freeze_encoder(self) -> None:
        """Freeze embeddings and layers, so that only the head and the pooler are trained.

        Differs from stock: there the dropout of parameters that learn nothing stays on. Here it is off, so that the
        head reads the states of the feature-based approach (section 5.3), also when it is at work.
        """
        self.is_frozen = True
        for module in (self.bert.embeddings, self.bert.encoder):
            module.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "BertHead":
        """Set training or evaluation mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.is_frozen:
            self.bert.embeddings.eval()
            self.bert.encoder.eval()
        return self

    def count_labels(self, labels: Tensor, attention_mask: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Return a batch's share of the counts that divide this head's losses, by argument name of `forward`."""
        if self.labels_tokens:
            labels = ignore_masked(labels, attention_mask)
        return {"num_items_in_batch": weigh_labels(labels, self.make_weights(labels.device)).sum()}

    def make_weights(self, device: torch.device) -> Tensor | None:
        """Return the configuration's class weights (L,) in fp32, or None if there are none."""
        if self.config.class_weights is None:
            return None
        # Copied without waiting for the device, which torch.tensor(..., device=device) would do.
        return torch.tensor(self.config.class_weights, dtype=torch.float32).to(device, non_blocking=True)

    @classmethod
    def index_tokens(cls, attention_mask: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Return the indices of a batch's real tokens, by argument name of `forward`.

        Without them `forward` finds them itself, and synchronises with an accelerator in the middle of an update; a
        token classifier then computes all tokens.
        """
        return {"real_indices": index_true(keep_first(attention_mask.flatten(0, -2).bool()))}  # (N,)

    def encode(
        self, inputs: Inputs, real_indices: Tensor | None = None, read_indices: Tensor | None = None, **kwargs
    ) -> tuple[Encoded, Layout]:
        """Return the encoder's outputs, packed, and their layout; recorded hidden states are (B, T, H).

        Args:
            read_indices: (W,) those of tokens, all first tokens among them; if given, only their states may be
                computed.
        """
        input_ids, attention_mask, _, _, inputs_embeds = inputs
        layout = self.bert.lay_out(input_ids, attention_mask, inputs_embeds, real_indices)
        if (self.reads_sentences or read_indices is not None) and not self.has_bilstm:
            layout = self.bert.narrow(layout, read_indices, **kwargs)
        if is_adapted(self.bert):  # a hook sees (B, T, H), as in stock
            outputs = Encoded(**self.bert(*inputs, return_dict=True, **kwargs))  # a copy, as the hook may keep its own
            outputs.last_hidden_state = layout.pack(outputs.last_hidden_state)  # (packed, H)
        else:
            outputs = self.bert(*inputs, layout=layout, return_dict=True, **kwargs)
        if self.has_bilstm:
            outputs.last_hidden_state = self.bilstm(outputs.last_hidden_state, layout)  # (packed, H)
            if self.has_pooler:
                sentence = self.bilstm.read_sentence(outputs.last_hidden_state, layout)  # (B, H)
                outputs.pooler_output = self.bert.pooler(sentence[:, None])  # (B, H)
        return outputs, layout

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> ModelOutput:
        """Return `logits`, and `loss` if `labels` are given; `score` or `compute_scores` says their shapes."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs, logits, loss = self.score(inputs, labels, num_items_in_batch, **kwargs)
        return finish(self.output_class, outputs, loss=loss, logits=logits)

    def score(
        self, inputs: Inputs, labels: Tensor | None, count: Count, **kwargs
    ) -> tuple[Encoded, Tensor | None, Tensor | None]:
        """Return the encoder's outputs, the logits, and the loss if labels are given."""
        outputs, layout = self.encode(inputs, **kwargs)
        if labels is not None and self.labels_tokens:
            labels = ignore_masked(labels, inputs[1])
        return outputs, *self.compute_scores(outputs, layout, labels, count)

    def compute_scores(self, outputs: Encoded, layout: Layout, labels: Tensor | None, count: Count) -> Scored:
        """Return the logits, and the loss divided by `count` if labels are given."""
        raise NotImplementedError


def finish(output_class: type[ModelOutput], encoded: Encoded, **values: Any) -> ModelOutput:
    """Return a head's outputs, with the encoder's hidden states and attentions."""
    return output_class(hidden_states=encoded.hidden_states, attentions=encoded.attentions, **values)


def make_head_dropout(config: BertConfig) -> Dropout:
    """Return the dropout before a classifier: `classifier_dropout`, or the hidden rate if it is unset."""
    return Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


class BertWithClassifier(BertHead):
    """Base class of the heads with one linear classifier after dropout."""

    score_count = 0  # outputs of the classifier; 0: one for each label

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, self.score_count or config.num_labels)
        if config.num_labels == 1:
            self._keep_in_fp32_modules = {"classifier"}  # a number may be larger than 65,504, the largest of fp16
        self.post_init()


SENTENCE_LOSSES = {  # problem_type in a configuration -> loss
    "regression": regress_loss,
    "single_label_classification": classify_loss,
    "multi_label_classification": classify_each_loss,
}


class BertForSequenceClassification(BertWithClassifier):
    """Predict classes or scores of a text or a pair; `config.problem_type` says which (section 4.1, GLUE)."""

    pipeline_tag = "text-classification"
    output_class = SequenceClassifierOutput
    has_pooler = reads_sentences = reads_mean = True

    def set_problem_type(self, labels: Tensor) -> str:
        """Return the configuration's `problem_type`; if it is unset, set it first, as transformers does.

        One label means regression, several with integer labels a single class, others independent labels.
        """
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.int64, torch.int32):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        return self.config.problem_type

    def count_labels(self, labels: Tensor, sample_weight: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Count B sequences for a single class, otherwise B * L labels, or add up their weights."""
        if self.set_problem_type(labels) == "single_label_classification":
            counted = weigh_labels(labels, self.make_weights(labels.device), sample_weight)
            return {"num_items_in_batch": counted.sum()}
        count = torch.tensor(labels.numel(), device=labels.device)
        if sample_weight is not None:
            count = sample_weight.sum() * (labels.numel() // len(labels))
        return {"num_items_in_batch": count}

    @classmethod
    def index_tokens(cls, attention_mask: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Return the indices of a batch's real tokens, and of its real windows if it has windows."""
        if attention_mask.dim() == 2:
            return super().index_tokens(attention_mask)
        windows = index_true(attention_mask.any(-1))  # (R,)
        return {"window_indices": windows, **super().index_tokens(attention_mask.flatten(0, 1)[windows])}

    def score(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        count: Count,
        window_indices: Tensor | None = None,
        sample_weight: Tensor | None = None,
        **kwargs,
    ) -> tuple[Encoded, Tensor, Tensor | None]:
        """Return the encoder's outputs, logits (B, L), and the loss of the problem type if labels are given.

        Texts longer than the model's positions are given as up to W windows each, in inputs (B, W, T). A window without
        a real token is absent and not computed. The logits of a text are the mean or the maximum over its windows, as
        the configuration's `window_pooling` says; hidden states and attentions are those of the R real windows.

        Args:
            labels: (B,) classes, or the shares (B, L) of soft labels; (B, L) scores, or (B,) if L = 1; or (B, L), 0 or
                1 for each independent label.
            window_indices: (R,) those of the real windows in the flattened (B * W), and `real_indices` (N,) those of
                the tokens in (R * T), from `index_tokens`; None: they are computed here.
            sample_weight: (B,) the weights of the sequences in the loss; None: 1.

        Raises:
            ValueError: There are windows, but `window_pooling` is not set.
        """
        ids, mask = inputs[:2]
        shape = ids.shape[:-1] if ids is not None else ()  # (B,) or (B, W)
        if len(shape) == 2:
            if (pooling := self.config.window_pooling) is None:
                raise ValueError("inputs are windows (B, W, T), but window_pooling is not set; set it to mean or max")
            if window_indices is None:
                window_indices = index_true((torch.ones_like(ids) if mask is None else mask).any(-1))  # (R,)
            inputs = [None if x is None else x.flatten(0, 1).index_select(0, window_indices) for x in inputs]  # (R, T)
        outputs, _ = self.encode(inputs, **kwargs)
        logits = self.compute_logits(self.dropout(outputs.pooler_output))  # (B, L) or (R, L)
        if len(shape) == 2:
            logits = pool_logits(logits, window_indices, shape, pooling)  # (B, L)
        scale, loss = self.config.target_scale, None
        if labels is not None:
            compute_loss, weights = SENTENCE_LOSSES[self.set_problem_type(labels)], self.make_weights(logits.device)
            if scale is not None:
                labels = (labels.float() - scale[0]) / scale[1]
            given = {} if weights is None else {"weights": weights}
            loss = compute_loss(logits, labels, count, **given, sample_weight=sample_weight)
        if scale is not None:
            logits = logits * scale[1] + scale[0]
        return outputs, logits, loss

    def compute_logits(self, sentences: Tensor) -> Tensor:
        """Return the logits (B, L) of sentences (B, H).

        Differs from stock: a single number is computed in fp32 under autocast, too, which would round it to 8 bits.
        """
        if self.config.num_labels > 1:
            return self.classifier(sentences)
        sentences = sentences.to(self.classifier.weight.dtype)
        if not torch.is_autocast_enabled(sentences.device.type):
            return self.classifier(sentences)
        with torch.autocast(sentences.device.type, enabled=False):
            return self.classifier(sentences)


def pool_logits(logits: Tensor, indices: Tensor, shape: tuple[int, int], pooling: str) -> Tensor:
    """Return the mean or the maximum (B, L) in fp32 of the windows' logits (R, L) of each text.

    Args:
        indices: (R,) those of the windows in the flattened (B * W).
        shape: (B, W).
    """
    logits, indices = logits.float(), indices.to(logits.device)
    spread = logits.new_full((shape[0] * shape[1], logits.shape[1]), 0.0 if pooling == "mean" else -torch.inf)
    spread = spread.index_copy(0, indices, logits).unflatten(0, shape)  # (B, W, L)
    if pooling == "max":
        return spread.amax(1)  # (B, L)
    counts = logits.new_zeros(shape[0] * shape[1]).index_fill(0, indices, 1.0).view(shape).sum(1)  # (B,)
    return spread.sum(1) / counts[:, None]  # (B, L)


class BertForMultipleChoice(BertWithClassifier):
    """Choose the best of C continuations: one scoring vector, softmax over the choices (section 4.4, SWAG)."""

    pipeline_tag = "multiple-choice"
    output_class = MultipleChoiceModelOutput
    has_pooler = reads_sentences = True
    score_count = 1

    def encode(self, inputs: Inputs, **kwargs) -> tuple[Encoded, Layout]:
        """Return the encoder's outputs for inputs (B, C, T), with `pooler_output` (B, C, H)."""
        choices = next(x for x in inputs if x is not None).shape[1]
        flat = [None if x is None else x.flatten(0, 1) for x in inputs]  # each (B * C, T, ...)
        outputs, layout = super().encode(flat, **kwargs)
        outputs.pooler_output = outputs.pooler_output.unflatten(0, (-1, choices))  # (B, C, H)
        return outputs, layout

    def compute_scores(self, outputs: Encoded, layout: Layout, labels: Tensor | None, count: Count) -> Scored:
        """Return logits (B, C), and the loss if labels (B,), the numbers of the correct choices, are given."""
        logits = self.classifier(self.dropout(outputs.pooler_output)).squeeze(-1)  # (B, C)
        return logits, None if labels is None else classify_loss(logits, labels, count)


class BertForTokenClassification(BertWithClassifier):
    """Predict one label per token (section 5.3, named entities)."""

    pipeline_tag = "token-classification"
    output_class = TokenClassifierOutput
    labels_tokens = True

    @classmethod
    def index_tokens(cls, attention_mask: Tensor, labels: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Return the indices of a batch's real tokens, and of those to read, by argument name of `forward`."""
        indices = super().index_tokens(attention_mask)
        if labels is not None:
            mask = keep_first(attention_mask.bool())
            indices["read_indices"] = index_read(mask, labels != IGNORE_INDEX)
        return indices

    def compute_scores(self, outputs: Encoded, layout: Layout, labels: Tensor | None, count: Count) -> Scored:
        """Return logits (B, T, L), zero at padding when packed, and the loss if labels are given.

        With `read_indices` from `index_tokens` logits at tokens without a label may be zero, too.

        Args:
            labels: (B, T), -100 at tokens without a label. See `ignore_masked`.
        """
        logits = self.classifier(self.dropout(outputs.last_hidden_state))  # (packed, L)
        loss = None
        if labels is not None:
            loss = classify_loss(logits, layout.pack(labels), count, self.make_weights(logits.device))
        return layout.unpack(logits), loss  # (B, T, L)


class BertForQuestionAnswering(BertHead):
    """Predict the start and the end of an answer with a start vector S and an end vector E (section 4.2, SQuAD)."""

    pipeline_tag = "question-answering"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def count_labels(self, start_positions: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Count sequences."""
        return {"num_items_in_batch": start_positions.new_full((), len(start_positions))}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """Return `start_logits` S.T_i and `end_logits` E.T_i, each (B, T), and `loss` if positions are given.

        At padding the logits are the dtype's lowest value, with every kernel. In stock BERT padding takes part in the
        softmax; here the loss does not depend on the amount of padding. Differs from the paper: as in the reference
        code, the softmax is over the whole sequence, not the paragraph alone, and the loss is half the sum of the two.

        Args:
            start_positions: (B,), the first token of the answer; positions outside [0, T) are ignored.
            end_positions: (B,), the last token of the answer; positions outside [0, T) are ignored, too.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs, layout = self.encode(inputs, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)  # (packed, 2)
        logits = layout.unpack(logits, fill=torch.finfo(logits.dtype).min)  # (B, T, 2)
        start_logits, end_logits = (x.squeeze(-1).contiguous() for x in logits.split(1, dim=-1))  # (B, T) each
        loss = None
        if start_positions is not None and end_positions is not None:
            losses = [
                classify_loss(scores, ignore_outside(positions, scores.shape[1]), num_items_in_batch)
                for scores, positions in ((start_logits, start_positions), (end_logits, end_positions))
            ]
            loss = sum(losses) / 2
        return finish(
            QuestionAnsweringModelOutput, outputs, loss=loss, start_logits=start_logits, end_logits=end_logits
        )


def ignore_outside(positions: Tensor, length: int) -> Tensor:
    """Return positions (B,) with those outside [0, length) replaced by IGNORE_INDEX."""
    positions = positions.view(-1)
    return positions.masked_fill((positions < 0) | (positions >= length), IGNORE_INDEX)


def ignore_masked(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Return labels (B, T) with IGNORE_INDEX at masked tokens; without a mask (B, T) none are masked.

    Differs from stock: it counts such labels in the loss. Packed there are no logits for them, so that they are left
    out with every attention implementation.
    """
    if mask is None or mask.shape != labels.shape:
        return labels
    return labels.masked_fill(~keep_first(mask.bool()).to(labels.device), IGNORE_INDEX)
