"""The fine-tuning heads with a BiLSTM on top (Table 5), and the feature-based one (section 5.3).

They are ours: plain transformers loads only the encoder of such a model.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from bertkit.model.bilstm import BertBiLSTM, BertLayerMix, select_features
from bertkit.model.config import BertConfig
from bertkit.model.heads import (
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    Count,
    ignore_masked,
    make_head_dropout,
)
from bertkit.model.loss import classify_loss
from bertkit.model.packing import PACKED, lay_out


class BertBiLSTMForSequenceClassification(BertForSequenceClassification):
    """Sequence classifier with a BiLSTM before the pooler (Table 5)."""

    has_bilstm = True
    reads_mean = False


class BertBiLSTMForMultipleChoice(BertForMultipleChoice):
    """Multiple choice with a BiLSTM before the pooler."""

    has_bilstm = True


class BertBiLSTMForTokenClassification(BertForTokenClassification):
    """Token classifier with a BiLSTM before the classifier."""

    has_bilstm = True


class BertBiLSTMForQuestionAnswering(BertForQuestionAnswering):
    """Question answering with a BiLSTM before the two vectors."""

    has_bilstm = True


class BertFeaturesForTokenClassification(BertHead):
    """Predict one label per word from a frozen encoder's activations, with a BiLSTM (section 5.3, feature-based).

    Differs from the paper: it does not say which sequence the BiLSTM reads; here the words of a sentence, each with the
    activations of its first token. `bilstm_hidden_size` is the number of units per direction.
    """

    pipeline_tag = "token-classification"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.mix = BertLayerMix(config)
        self.bilstm = BertBiLSTM(self.mix.size, config.bilstm_hidden_size)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(2 * config.bilstm_hidden_size, config.num_labels)
        self.freeze_encoder()
        self.post_init()

    def count_labels(self, labels: Tensor, word_positions: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Count labelled words."""
        words = batch.get("attention_mask") if word_positions is None else word_positions >= 0  # (B, W)
        return super().count_labels(ignore_masked(labels, words))

    @classmethod
    def index_tokens(cls, **batch: Tensor) -> dict[str, Tensor]:
        """Return an empty dict: most batches hold features of words instead of tokens."""
        return {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        word_positions: Tensor | None = None,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Return `logits` (B, W, L), undefined beyond a sequence's words, and `loss` if labels are given.

        Args:
            word_positions: (B, W) the position of each word's first token in `input_ids`, -1 where there is no word;
                None: every token is a word.
            features: (B, W, K, H) precomputed activations (`tasks/frozen.py`) instead of `input_ids`; then
                `attention_mask` (B, W) is nonzero at words.
            labels: (B, W), -100 where there is no word.
        """
        self.bert.check_request(kwargs)
        words = attention_mask
        if features is None:
            inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            with torch.no_grad():
                outputs = self.bert(*inputs, output_hidden_states=True, return_dict=True, **kwargs)
            features = select_features(outputs.hidden_states, self.config.feature_layers)  # (B, T, K, H)
            if word_positions is not None:
                word_positions = word_positions.to(features.device)
                words = word_positions >= 0  # (B, W)
                rows = torch.arange(len(word_positions), device=features.device)[:, None]
                features = features[rows, word_positions.clamp(min=0)]  # (B, W, K, H)
        layout = lay_out(tuple(features.shape[:2]), words, PACKED, features.device)
        states = self.dropout(self.mix(layout.pack(features).to(self.classifier.weight.dtype)))  # (N, F)
        logits = self.classifier(self.dropout(self.bilstm(states, layout)))  # (N, L)
        loss = None
        if labels is not None:
            loss = classify_loss(logits, layout.pack(labels), num_items_in_batch, self.make_weights(logits.device))
        return TokenClassifierOutput(loss=loss, logits=layout.unpack(logits))  # (B, W, L)
