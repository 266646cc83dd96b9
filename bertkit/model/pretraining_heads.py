"""The heads of pretraining: masked LM, next sentence, both, and a left-to-right LM (paper section 3.1).

The decoder shares its matrix with the word embeddings. In training it sees only the labelled positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput, NextSentencePredictorOutput
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from bertkit.model.bert import StartsAtZero
from bertkit.model.config import BertConfig
from bertkit.model.cpu import is_adapted
from bertkit.model.heads import BertHead, Count, Encoded, Inputs, Scored, finish, ignore_masked
from bertkit.model.loss import IGNORE_INDEX, classify_loss, decode_loss
from bertkit.model.packing import Layout, index_read, index_true, keep_first

logger = logging.get_logger(__name__)


@dataclass
class BertForPreTrainingOutput(ModelOutput):
    """The two predictions and their losses."""

    loss: Tensor | None = None  # the sum of `mlm_loss` and `nsp_loss`, each a mean (A.2)
    # (B, T, V), or (M, V) at the M labelled positions, or None (see `BertForPreTraining.forward`)
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None  # (B, 2), for "B follows A" and "B is random"
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    mlm_loss: Tensor | None = None
    nsp_loss: Tensor | None = None


class BertPredictionHeadTransform(nn.Module):
    """Dense, GELU and LayerNorm before the decoder."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden)))  # (..., H)


class BertLMPredictionHead(StartsAtZero):
    """Scores over the vocabulary; the decoder is tied to the token embeddings and has a bias of its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the decoder's, with the name in old checkpoints

    def forward(self, hidden: Tensor, labels: Tensor | None = None, count: Count = None) -> Tensor:
        """Return logits (..., V) from hidden (..., H), or with labels (M,) the `decode_loss` of hidden (M, H)."""
        hidden = self.transform(hidden)
        return self.decoder(hidden) if labels is None else decode_loss(hidden, self.decoder, labels, count)


class BertOnlyMLMHead(nn.Module):
    """The masked-LM head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.predictions(hidden)  # (..., V)


class BertOnlyNSPHead(nn.Module):
    """The next-sentence head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.seq_relationship(pooled)  # (B, 2)


class BertPreTrainingHeads(BertOnlyMLMHead):
    """Both heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(hidden), self.seq_relationship(pooled)  # (..., V), (B, 2)


class BertLMHead(BertHead):
    """Base class of the models with a decoder over the vocabulary."""

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @staticmethod
    def align(labels: Tensor, mask: Tensor | None) -> Tensor:
        """Return the labels (B, T) at the positions that predict them, and see `ignore_masked`."""
        return ignore_masked(labels, mask)

    def count_labels(self, labels: Tensor, attention_mask: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Count predicted tokens."""
        return super().count_labels(self.align(labels, attention_mask))

    @classmethod
    def index_tokens(cls, attention_mask: Tensor, labels: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Return the indices of a batch's real and predicted tokens, and of those to read, by argument of `forward`."""
        indices = super().index_tokens(attention_mask)
        if labels is not None:
            targets, read = cls.index_targets(cls.align(labels, attention_mask), keep_first(attention_mask.bool()))
            indices |= {"target_indices": targets, "read_indices": read}
        return indices

    @classmethod
    def index_targets(cls, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices (M,) of aligned labels, and (W,) of the tokens to read, from labels and mask (B, T)."""
        is_target = labels != IGNORE_INDEX  # (B, T)
        return index_true(is_target), index_read(mask, is_target)

    def predict(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        count: Count,
        targets_only: bool | None = None,
        target_indices: Tensor | None = None,
        read_indices: Tensor | None = None,
        **kwargs,
    ) -> tuple[Encoded, Tensor | None, Tensor | None, Tensor | None]:
        """Return the encoder's outputs, token logits, their loss if labels are given, and any next-sentence logits.

        The arguments are those of `forward`. Training returns no token logits of labelled positions: nobody reads them,
        and not computing M * V of them is the gain. If all positions are decoded, or hooks are registered on `cls` or
        `cls.predictions`, they are called as in stock, but see packed states.
        """
        labels = None if labels is None else self.align(labels, inputs[1])
        few = labels is not None and (self.training if targets_only is None else targets_only)
        calls_head = not few or any(map(is_adapted, (self.cls, self.cls.predictions)))
        if calls_head:
            read_indices = None
        elif target_indices is None:
            mask = torch.ones_like(labels) if inputs[1] is None or inputs[1].dim() > 2 else inputs[1]
            target_indices, read_indices = self.index_targets(labels, keep_first(mask.bool()))
        outputs, layout = self.encode(inputs, read_indices=read_indices, **kwargs)
        hidden, pooled = outputs.last_hidden_state, outputs.pooler_output
        relationship = None
        if calls_head:
            scores = self.cls(hidden, pooled) if self.has_pooler else self.cls(hidden)
            logits, relationship = scores if self.has_pooler else (scores, None)  # (packed, V), (B, 2)
            labels = None if labels is None else layout.pack(labels)  # (packed)
            loss = None if labels is None else classify_loss(logits, labels, count)
            if not few:
                logits = layout.unpack(logits)  # (B, T, V)
            else:
                logits = None if self.training else logits[labels.to(logits.device) != IGNORE_INDEX]  # (M, V)
            return outputs, logits, loss, relationship
        if self.has_pooler:
            relationship = self.cls.seq_relationship(pooled)  # (B, 2)
        hidden = layout.select(hidden, target_indices)  # (M, H)
        labels = labels.flatten().index_select(0, target_indices.to(labels.device))  # (M,)
        if self.training:
            return outputs, None, self.cls.predictions(hidden, labels, count), relationship
        logits = self.cls.predictions(hidden)  # (M, V)
        return outputs, logits, classify_loss(logits, labels, count), relationship

    def score(
        self, inputs: Inputs, labels: Tensor | None, count: Count, **kwargs
    ) -> tuple[Encoded, Tensor | None, Tensor | None]:
        """Return the encoder's outputs, token logits (B, T, V), and the mean loss if labels (B, T) are given.

        Left to right, labels are not shifted, usually `input_ids` with -100 at padding. Other arguments are those of
        `BertForPreTraining.forward`.
        """
        return self.predict(inputs, labels, count, **kwargs)[:3]


class BertForPreTraining(BertLMHead):
    """Predict masked tokens and the next sentence, as BERT is pre-trained (section 3.1)."""

    pipeline_tag = "fill-mask"
    has_pooler = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()

    def count_labels(self, labels: Tensor, next_sentence_label: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Count masked tokens and sequences."""
        sequences = labels.new_full((), len(next_sentence_label))
        return super().count_labels(labels, **batch) | {"num_sequences_in_batch": sequences}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: Count = None,
        num_sequences_in_batch: Count = None,
        **kwargs,
    ) -> BertForPreTrainingOutput:
        """Return both predictions, and their losses if labels are given.

        Args:
            labels: (B, T), the original token at masked positions and -100 elsewhere. See `ignore_masked`.
            next_sentence_label: (B,), 0 if B follows A, 1 if B is random.
            num_items_in_batch: Labelled tokens of the whole update, which divide the masked-LM loss.
            num_sequences_in_batch: Sequences of the whole update, which divide the next-sentence loss. If only the
                tokens are known (stock Trainer), the batch is weighted by its share of the labelled tokens.
            kwargs: `targets_only`, whether to decode only the labelled positions, None: in training, which then returns
                no token logits; and from `index_tokens` `target_indices` (M,) of the labelled positions,
                `read_indices` (W,) of those and the first tokens, and `real_indices` (N,) of the real tokens.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs, logits, mlm_loss, relationship = self.predict(inputs, labels, num_items_in_batch, **kwargs)
        nsp_loss = None
        if next_sentence_label is not None:
            nsp_loss = classify_loss(relationship, next_sentence_label, num_sequences_in_batch)
            if num_sequences_in_batch is None and num_items_in_batch is not None and labels is not None:
                count = torch.as_tensor(num_items_in_batch, device=labels.device)
                labelled = self.align(labels, attention_mask) != IGNORE_INDEX
                share = labelled.sum() / count.clamp(min=1)
                nsp_loss = nsp_loss * share.to(nsp_loss.device)
        losses = [loss for loss in (mlm_loss, nsp_loss) if loss is not None]
        return finish(
            BertForPreTrainingOutput,
            outputs,
            loss=sum(losses) if losses else None,
            prediction_logits=logits,
            seq_relationship_logits=relationship,
            mlm_loss=mlm_loss,
            nsp_loss=nsp_loss,
        )


class BertForMaskedLM(BertLMHead):
    """Predict only masked tokens (section 3.1, task 1; Table 5 "No NSP")."""

    pipeline_tag = "fill-mask"
    output_class = MaskedLMOutput

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()


class BertLMHeadModel(BertLMHead, GenerationMixin):
    """Predict every token from those before it: the left-to-right language model of Table 5 and Figure 5.

    It needs `config.is_decoder=True`. `generate` works without a cache: each new token recomputes the whole text.
    """

    pipeline_tag = "text-generation"
    output_class = CausalLMOutput
    _is_stateful = True  # marks that there is no cache to shorten, which assisted generation needs

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # tells a Trainer that the first token is not a target
        if not config.is_decoder:
            logger.warning("BertLMHeadModel without is_decoder=True sees the token to predict; set is_decoder=True")
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: object = None,
        cache: object = None,
        **kwargs,
    ) -> dict:
        """Return the arguments of `forward` for the next token: the whole text so far, as there is no cache."""
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    @staticmethod
    def align(labels: Tensor, mask: Tensor | None) -> Tensor:
        """Return the labels (B, T) shifted to the preceding token, which predicts them; nothing predicts the first."""
        shifted = nn.functional.pad(ignore_masked(labels, mask)[:, 1:], (0, 1), value=IGNORE_INDEX)  # (B, T)
        return ignore_masked(shifted, mask)


class BertForNextSentencePrediction(BertHead):
    """Predict only the next sentence (section 3.1, task 2)."""

    pipeline_tag = "text-classification"
    output_class = NextSentencePredictorOutput
    has_pooler = reads_sentences = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    def compute_scores(self, outputs: Encoded, layout: Layout, labels: Tensor | None, count: Count) -> Scored:
        """Return logits (B, 2), and the loss if labels (B,) are given: 0 if B follows A, 1 if B is random."""
        logits = self.cls(outputs.pooler_output)  # (B, 2)
        return logits, None if labels is None else classify_loss(logits, labels, count)
