"""BERT: the network and its heads, in the order of the paper (sections 3, 3.1 and 4).

Parameter names, head classes, outputs and the `PreTrainedModel` API are those of transformers' BERT, so that weights
travel both ways and Trainer, accelerate and pipelines work. What differs: nothing is computed on padding
(`attention.py`), the masked-LM decoder sees only the masked positions in training, weights start from a truncated
normal as in the reference code, and no loss depends on how a batch is cut into micro-batches. Shape letters are defined
in `attention.py`; "packed" is (N, ...) under packed attention and (B, T, ...) under the others.

Left out: cross-attention, cached decoding, chunked feed-forward layers.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from bertkit.model.attention import PACKED, Packed, Padded, attend_eagerly, find_places, keep_first, lay_out
from bertkit.model.bilstm import run_bilstm
from bertkit.model.config import BertConfig
from bertkit.model.dropout import Dropout
from bertkit.model.loss import IGNORED, classify_each_loss, classify_loss, decode_loss, regress_loss
from bertkit.model.precision import is_adapted, is_transformed

logger = logging.get_logger(__name__)

# --- The encoder (section 3, "Model Architecture" and "Input/Output Representations") ---------------------------------


class BertEmbeddings(nn.Module):
    """The sum of token, segment and position embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        # No padding_idx: [PAD] is a token like others in the reference code, and no padding is computed on here.
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor,
        position_ids: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the first layer's input (packed, H), from ids (packed) or token embeddings (packed, H)."""
        embedded = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        embedded = embedded + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embedded))


class BertSelfAttention(nn.Module):
    """Multi-head attention; the kernel is looked up under the name `config._attn_implementation`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.attention_head_size**-0.5
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.is_causal = config.is_decoder

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, layout: Packed | Padded, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """The mixed values (packed, H), and the probabilities (B, A, T, T) if the kernel has them."""
        states = hidden[None] if isinstance(layout, Packed) else hidden  # (1, N, H) or (B, T, H)
        query, key, value = (
            project(states).view(*states.shape[:-1], -1, self.attention_head_size).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # (1, A, N, D) or (B, A, T, D)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        mixed, probabilities = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.scaling,
            layout=layout,
        )  # (1, N, A, D) or (B, T, A, D)
        return mixed.reshape(hidden.shape).contiguous(), probabilities  # (packed, H)


class BertSelfOutput(nn.Module):
    """The output projection of attention, added to its input and normalised after it (post-LayerNorm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)  # (packed, H)


class BertAttention(nn.Module):
    """The attention half of a layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Packed | Padded) -> Tensor:
        mixed, _ = self.self(hidden, attention_mask, layout)
        return self.output(mixed, hidden)  # (packed, H)


class BertIntermediate(nn.Module):
    """The first half of the feed-forward network: H to 4H, then GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activation(self.dense(hidden))  # (packed, 4H)


class BertOutput(nn.Module):
    """The second half of the feed-forward network: 4H to H, added to its input and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)  # (packed, H)


class BertLayer(GradientCheckpointingLayer):
    """One Transformer block."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Packed | Padded) -> Tensor:
        hidden = self.attention(hidden, attention_mask, layout)
        return self.output(self.intermediate(hidden), hidden)  # (packed, H)


class BertEncoder(nn.Module):
    """The stack of L layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Packed | Padded) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, attention_mask, layout)
        return hidden  # (packed, H)


class BertPooler(nn.Module):
    """Dense and tanh on the sentence vector C, the states of the first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the pooled sentence vectors (B, H) of hidden (B, T, H)."""
        return self.activation(self.dense(hidden[:, 0]))  # (B, H)


class BertPreTrainedModel(PreTrainedModel):
    """What all classes below share: configuration, initialisation, and the choice of an attention implementation."""

    config: BertConfig
    config_class = BertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": BertLayer, "attentions": BertSelfAttention}
    _no_split_modules = ["BertLayer"]  # not the embeddings, whose table the decoder reads
    # A buffer in old checkpoints, and what another head had: parts of a pre-trained BERT that this class does not use.
    _keys_to_ignore_on_load_unexpected = [r"position_ids", r"^cls\.", r"^(bert\.)?pooler\."]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the implementation's name: unless one is asked for, packed, or eager if attentions are to come out."""
        default = "eager" if self.config.output_attentions else PACKED
        return super().get_correct_attn_implementation(requested_attention or default, is_init_check)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers; who may read config.json may read the weights, which safetensors 0.8 denies."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        for weights in folder.glob("*.safetensors"):
            with suppress(OSError):  # somebody else's, or a disk without modes
                shutil.copymode(folder / "config.json", weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Truncated normal, deviation `initializer_range`, cut at two deviations, as in the reference code."""
        if isinstance(module, nn.Linear | nn.Embedding):
            deviation = self.config.initializer_range
            init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, BertLMPredictionHead):
            init.zeros_(module.bias)
        elif isinstance(module, BertLayerMix):
            if module.weights is not None:
                init.zeros_(module.weights)
        elif isinstance(module, nn.LSTM):
            for parameter in module.parameters():  # as torch draws them
                init.uniform_(parameter, -(module.hidden_size**-0.5), module.hidden_size**-0.5)
        else:
            super()._init_weights(module)


# Arguments of transformers' models that would change a result, and what to do instead.
UNSUPPORTED = {
    **dict.fromkeys(
        ("encoder_hidden_states", "encoder_attention_mask"),
        "there is no cross-attention: use the model of transformers",
    ),
    "past_key_values": "there is no cache: pass the whole text",
    "head_mask": "heads cannot be masked",
    "is_causal": "set is_decoder in the configuration",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "pass a batch (B, T) with an attention_mask: nothing is computed on its padding",
    ),
    "logits_to_keep": "only BertLMHeadModel has it",
    "shift_labels": "pass labels, which BertLMHeadModel alone shifts",
}


class BertModel(BertPreTrainedModel):
    """The encoder, with the pooler unless a head needs none."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def lay_out(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        real_places: Tensor | None = None,
    ) -> Packed | Padded:
        """The layout of a batch, for a head that wants the states as they are computed.

        Raises:
            ValueError: both or none of `input_ids` and `inputs_embeds`; a batch that packed attention cannot take.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        given = input_ids if inputs_embeds is None else inputs_embeds
        implementation = self.config._attn_implementation
        return lay_out(tuple(given.shape[:2]), attention_mask, implementation, given.device, real_places)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        layout: Packed | Padded | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """`last_hidden_state` (B, T, H), `pooler_output` (B, H), and on request `hidden_states` and `attentions`.

        Args:
            input_ids: (B, T); or `inputs_embeds` (B, T, H).
            attention_mask: (B, T), nonzero at real tokens; None: all are real. States at padding are zero when packed.
            token_type_ids: (B, T), the segment of each token: 0 for A, 1 for B; None: all 0.
            position_ids: (B, T) or (1, T), each below `max_position_embeddings`; None: 0 to T - 1.
            layout: from `lay_out`; then all states come back packed, as they were computed.
            output_hidden_states: the embeddings' and every layer's output, L + 1 of them.
            output_attentions: probabilities (B, A, T, T) a layer; only with `attn_implementation="eager"`.

        Raises:
            ValueError: attention probabilities asked of another implementation; T above `max_position_embeddings`
                without `position_ids`; an argument of `UNSUPPORTED`.
        """
        unpacked = layout is None
        layout = layout or self.lay_out(input_ids, attention_mask, inputs_embeds)
        self.check_request(kwargs)
        if position_ids is None:
            position_ids = self._number_positions(layout, input_ids if inputs_embeds is None else inputs_embeds)
        if token_type_ids is None:
            token_type_ids = position_ids.new_zeros(1, 1)
        outputs = self.encode(
            input_ids,
            token_type_ids.expand(layout.shape),
            position_ids.expand(layout.shape),
            inputs_embeds,
            attention_mask,
            layout,
            return_dict=True,
            **{key: value for key, value in kwargs.items() if key.startswith("output_")},
        )
        if unpacked:
            outputs.last_hidden_state = layout.unpack(outputs.last_hidden_state)  # (B, T, H)
            outputs.hidden_states = unpack_all(outputs.hidden_states, layout)
        return outputs

    @capture_outputs
    def encode(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor,
        position_ids: Tensor,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        layout: Packed | Padded,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """The encoder's outputs, packed: transformers' recorder stores what the layers return."""
        hidden = self.embed(input_ids, token_type_ids, position_ids, inputs_embeds, layout)  # (packed, H)
        if isinstance(layout, Padded):
            make_mask = create_causal_mask if self.config.is_decoder else create_bidirectional_mask
            extra = {"past_key_values": None} if self.config.is_decoder else {}
            mask = make_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, **extra)
        else:
            mask = None
        hidden = self.encoder(hidden, mask, layout)  # (packed, H)
        pooled = None
        if self.pooler is not None:
            sentence = layout.last(hidden) if self.config.is_decoder else layout.first(hidden)  # (B, H)
            pooled = self.pooler(sentence[:, None])  # (B, H)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def embed(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor,
        position_ids: Tensor,
        inputs_embeds: Tensor | None,
        layout: Packed | Padded,
    ) -> Tensor:
        """Return the first layer's input (packed, H); hooks on the embeddings see (B, T, H), as in transformers."""
        words, given = self.embeddings.word_embeddings, {"token_type_ids": token_type_ids, "position_ids": position_ids}
        if any(is_adapted(module) for module in self.embeddings.modules() if module is not words):
            return layout.pack(self.embeddings(input_ids=input_ids, inputs_embeds=inputs_embeds, **given))
        if inputs_embeds is None and (type(words) is not nn.Embedding or is_adapted(words)):
            input_ids, inputs_embeds = None, words(input_ids)  # (B, T, H)
        given |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        return self.embeddings(**{name: None if x is None else layout.pack(x) for name, x in given.items()})

    def check_request(self, kwargs: dict) -> None:
        """Raise a ValueError about what this model cannot take or give."""
        for name in sorted(UNSUPPORTED.keys() & kwargs.keys()):
            if kwargs[name] is not None:
                raise ValueError(f"bertkit's models do not take {name}; {UNSUPPORTED[name]}")
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        if wanted and self.config._attn_implementation != "eager":
            raise ValueError(
                f"attention probabilities exist with attn_implementation='eager' only, got "
                f"{self.config._attn_implementation!r}; load the model with it or call set_attn_implementation('eager')"
            )

    def _number_positions(self, layout: Packed | Padded, given: Tensor) -> Tensor:
        """Return the positions (1, T) of a batch on the device of what was given, or raise a ValueError."""
        if layout.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence has {layout.shape[1]} tokens, but the model has {self.config.max_position_embeddings} "
                "positions; truncate it (tokenizer(..., truncation=True))"
            )
        return torch.arange(layout.shape[1], device=given.device)[None]  # (1, T)


def unpack_all(states: tuple[Tensor, ...] | None, layout: Packed | Padded) -> tuple[Tensor | None, ...] | None:
    """Recorded states, each (packed, H), as (B, T, H)."""
    return None if states is None else tuple(None if state is None else layout.unpack(state) for state in states)


# --- Heads for pre-training (section 3.1) -----------------------------------------------------------------------------


@dataclass
class BertForPreTrainingOutput(ModelOutput):
    """The two predictions and their losses.

    loss: masked LM + next sentence, each a mean (A.2); `mlm_loss` and `nsp_loss` are its parts.
    prediction_logits: (B, T, V), or (M, V) at the M labelled positions, or None (see `BertForPreTraining.forward`).
    seq_relationship_logits: (B, 2), for "B follows A" and "B is random".
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
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


class BertLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder is tied to the token embeddings and has a bias of its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the decoder's, under the name old checkpoints have

    def forward(self, hidden: Tensor, labels: Tensor | None = None, count: Tensor | int | None = None) -> Tensor:
        """Scores (..., V) of hidden (..., H); with labels (M,) of hidden (M, H) the loss alone, as of `decode_loss`."""
        hidden = self.transform(hidden)
        return self.decoder(hidden) if labels is None else decode_loss(hidden, self.decoder, labels, count)


class BertOnlyMLMHead(nn.Module):
    """The masked-LM head alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.predictions(hidden)  # (..., V)


class BertOnlyNSPHead(nn.Module):
    """The next-sentence head alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.seq_relationship(pooled)  # (B, 2)


class BertPreTrainingHeads(nn.Module):
    """Both heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(hidden), self.seq_relationship(pooled)  # (..., V), (B, 2)


class BertHead(BertPreTrainedModel):
    """What the classes with a head share: the encoder under the name `bert`, and how its batch is laid out.

    All of them take the arguments of `BertModel.forward`, and with labels also

    num_items_in_batch: how many labels the whole update has, over all micro-batches and processes; None: those of this
    batch.
    """

    bert: BertModel
    has_bilstm = False  # between the encoder and the head

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.is_frozen = False
        if self.has_bilstm:
            if config.hidden_size % 2:
                raise ValueError(f"hidden_size is {config.hidden_size}; a BiLSTM on top needs an even one")
            self.bilstm = BertBiLSTM(config.hidden_size, config.hidden_size // 2)

    def freeze_encoder(self) -> None:
        """Leaves embeddings and layers as they are: only what is above them learns, the pooler included.

        Without dropout, too: what the head is given is what the feature-based approach would give it (section 5.3).
        """
        self.is_frozen = True
        for module in (self.bert.embeddings, self.bert.encoder):
            module.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "BertHead":
        """Training or evaluation; a frozen encoder is always in evaluation."""
        super().train(mode)
        if self.is_frozen:
            self.bert.embeddings.eval()
            self.bert.encoder.eval()
        return self

    def count_labels(self, labels: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """What a batch adds to the counts that divide this head's losses, under the names `forward` takes them by."""
        return {"num_items_in_batch": (labels != IGNORED).sum()}

    @classmethod
    def find_places(cls, attention_mask: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Where a batch's real tokens are, under the name `forward` takes it by.

        Without it `forward` looks itself, and on an accelerator waits for the answer in the middle of an update.
        """
        return {"real_places": find_places(keep_first(attention_mask.flatten(0, -2).bool()))}  # (N,)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        real_places: Tensor | None = None,
        **kwargs,
    ) -> tuple[BaseModelOutputWithPooling, Packed | Padded]:
        """The encoder's outputs, packed (recorded hidden states as (B, T, H)), and the layout to unpack with."""
        layout = self.bert.lay_out(input_ids, attention_mask, inputs_embeds, real_places)
        outputs = self.bert(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, layout=layout, return_dict=True, **kwargs
        )
        outputs.hidden_states = unpack_all(outputs.hidden_states, layout)
        if self.has_bilstm:
            outputs.last_hidden_state = self.bilstm(outputs.last_hidden_state, layout)  # (packed, H)
            if self.bert.pooler is not None:
                sentence = self.bilstm.read_sentence(outputs.last_hidden_state, layout)  # (B, H)
                outputs.pooler_output = self.bert.pooler(sentence[:, None])  # (B, H)
        return outputs, layout


class BertLMHead(BertHead):
    """What the classes with a decoder over the vocabulary share."""

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
    def align(labels: Tensor) -> Tensor:
        """The labels (B, T), each where it is predicted."""
        return labels

    @classmethod
    def find_places(cls, attention_mask: Tensor, labels: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Where a batch's real tokens are, and those that are predicted, under the names `forward` takes them by."""
        places = super().find_places(attention_mask)
        if labels is not None:
            targets = keep_first(attention_mask.bool()) & (cls.align(labels) != IGNORED)  # (B, T)
            places["target_places"] = find_places(targets)  # (M,)
        return places

    def call_hooked_head(self, hidden: Tensor, layout: Packed | Padded, *pooled: Tensor) -> Any:
        """Return the output of `cls` for all places (B, T, H), as in transformers, if it is hooked or replaced.

        Training then decodes all places, not the labelled ones alone. Otherwise return None.
        """
        is_ours = isinstance(self.cls, BertOnlyMLMHead | BertPreTrainingHeads) and not is_adapted(self.cls)
        if is_ours and type(self.cls.predictions) is BertLMPredictionHead and not is_adapted(self.cls.predictions):
            return None
        return self.cls(layout.unpack(hidden), *pooled)

    def predict_tokens(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        layout: Packed | Padded,
        targets_only: bool | None,
        count: Tensor | int | None,
        places: Tensor | None,
        scores: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, T, V) and with labels (B, T) the loss.

        targets_only: logits (M, V) of the labelled positions alone; None: in training. Training then has no logits at
        all: nobody reads them, and to make M * V of them is what it saves.
        places: (M,), from `find_places`; None: they are looked for.
        scores: (B, T, V), if a hooked head has computed them already.
        """
        if labels is not None:
            labels = layout.pack(self.align(labels))  # (packed)
        few = self.training if targets_only is None else targets_only
        if scores is not None or labels is None or not few or is_transformed():  # no transform takes a mask as an index
            logits = self.cls.predictions(hidden) if scores is None else layout.pack(scores)  # (packed, V)
            if labels is None:
                return layout.unpack(logits), None
            loss = classify_loss(logits, labels, count)
            if few:
                return None if self.training else logits[labels.to(logits.device) != IGNORED], loss  # (M, V)
            return layout.unpack(logits), loss
        if places is None:
            labelled = labels != IGNORED
            hidden, labels = hidden[labelled.to(hidden.device)], labels[labelled]  # (M, H), (M)
        else:
            hidden, labels = layout.select(hidden, places), layout.select(labels, places)  # (M, H), (M)
        if self.training:
            return None, self.cls.predictions(hidden, labels, count)
        logits = self.cls.predictions(hidden)  # (M, V)
        return logits, classify_loss(logits, labels, count)


class BertForPreTraining(BertLMHead):
    """Masked LM and next sentence, as BERT is pre-trained (section 3.1)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()

    def count_labels(self, labels: Tensor, next_sentence_label: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Masked tokens and sequences."""
        sequences = labels.new_full((), len(next_sentence_label))
        return super().count_labels(labels) | {"num_sequences_in_batch": sequences}

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
        targets_only: bool | None = None,
        target_places: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_sequences_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> BertForPreTrainingOutput:
        """Both predictions; with labels also their losses.

        Args:
            labels: (B, T), the original token at masked positions and -100 elsewhere; packed, those at padding do not
                count.
            next_sentence_label: (B,), 0 where B follows A, 1 where B is random.
            targets_only: decode only the labelled positions; None: in training. Training then returns no token logits.
            real_places, target_places: (N,) and (M,), from `find_places`, where they are known.
            num_items_in_batch: labelled tokens of the whole update; divides the masked-LM loss.
            num_sequences_in_batch: sequences of the whole update; divides the next-sentence loss. If only the tokens
                are known (stock Trainer), this batch weighs as much as its share of the labelled tokens.
        """
        outputs, layout = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        hidden, pooled = outputs.last_hidden_state, outputs.pooler_output
        hooked = self.call_hooked_head(hidden, layout, pooled)
        scores, relationship = hooked or (None, self.cls.seq_relationship(pooled))  # (B, 2)
        logits, mlm_loss = self.predict_tokens(
            hidden, labels, layout, targets_only, num_items_in_batch, target_places, scores
        )
        nsp_loss = None
        if next_sentence_label is not None:
            nsp_loss = classify_loss(relationship, next_sentence_label, num_sequences_in_batch)
            if num_sequences_in_batch is None and num_items_in_batch is not None and labels is not None:
                count = torch.as_tensor(num_items_in_batch, device=labels.device)
                share = (labels != IGNORED).sum() / count.clamp(min=1)
                nsp_loss = nsp_loss * share.to(nsp_loss.device)
        losses = [loss for loss in (mlm_loss, nsp_loss) if loss is not None]
        return BertForPreTrainingOutput(
            loss=sum(losses) if losses else None,
            prediction_logits=logits,
            seq_relationship_logits=relationship,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            mlm_loss=mlm_loss,
            nsp_loss=nsp_loss,
        )


class BertForMaskedLM(BertLMHead):
    """Masked LM alone (section 3.1, task 1; Table 5 "No NSP")."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        targets_only: bool | None = None,
        target_places: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Token logits, and with labels the masked-LM loss; arguments as in `BertForPreTraining.forward`."""
        outputs, layout = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        scores = self.call_hooked_head(hidden, layout)
        logits, loss = self.predict_tokens(
            hidden, labels, layout, targets_only, num_items_in_batch, target_places, scores
        )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertLMHeadModel(BertLMHead, GenerationMixin):
    """The left-to-right language model of Table 5 and Figure 5: every token is predicted from those before it.

    Needs `config.is_decoder=True`. `generate` works, without a cache: each new token recomputes the whole text.
    """

    _is_stateful = True  # transformers' word for a model without a cache to shorten, which assisted generation needs

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # tells a Trainer that the first token is no target
        if not config.is_decoder:
            logger.warning("BertLMHeadModel without is_decoder=True sees the token it should predict; set it")
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, past_key_values: object = None, **kwargs
    ) -> dict:
        """Arguments of `forward` for the next token: the whole text so far, as there is no cache to continue from."""
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    @staticmethod
    def align(labels: Tensor) -> Tensor:
        """The labels (B, T), each where it is predicted: at the token before."""
        return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # (B, T)

    def count_labels(self, labels: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Tokens that are predicted: never the first."""
        return super().count_labels(self.align(labels))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        targets_only: bool | None = None,
        target_places: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutput:
        """Logits (B, T, V) for the token after each one, and with labels (B, T), not shifted, the mean loss.

        Args: as in `BertForPreTraining.forward`; `labels` usually are `input_ids` with -100 at padding.
            logits_to_keep: without labels, how many places at the end have logits, or their numbers (K,); 0: all.

        Raises:
            ValueError: `logits_to_keep` together with labels, or of two dimensions.
        """
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if not keeps_all and (labels is not None or getattr(logits_to_keep, "ndim", 1) != 1):
            raise ValueError("logits_to_keep is a number or a vector (K,), and only without labels; leave it out")
        outputs, layout = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if keeps_all:
            scores = self.call_hooked_head(hidden, layout)
            logits, loss = self.predict_tokens(
                hidden, labels, layout, targets_only, num_items_in_batch, target_places, scores
            )
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits, loss = self.cls(layout.unpack(hidden)[:, kept]), None  # (B, K, V)
        return CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertForNextSentencePrediction(BertHead):
    """Next sentence alone (section 3.1, task 2)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> NextSentencePredictorOutput:
        """Logits (B, 2); `labels` (B,): 0 where B follows A, 1 where B is random."""
        outputs, _ = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.cls(outputs.pooler_output)  # (B, 2)
        return NextSentencePredictorOutput(
            loss=None if labels is None else classify_loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# --- Heads for fine-tuning (section 4, Figure 4) ----------------------------------------------------------------------


def make_head_dropout(config: BertConfig) -> Dropout:
    """The dropout before a classifier: `classifier_dropout`, or the hidden rate if that is not set."""
    return Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


SENTENCE_LOSSES = {  # problem_type in a configuration -> loss
    "regression": regress_loss,
    "single_label_classification": classify_loss,
    "multi_label_classification": classify_each_loss,
}


class BertForSequenceClassification(BertHead):
    """Predict a class of a text or a pair, several, or scores, as `config.problem_type` says (section 4.1, GLUE)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def set_problem_type(self, labels: Tensor) -> str:
        """Return the configuration's `problem_type`; set it first if it is unset, as transformers does.

        One label is a regression, several with whole numbers are classes, others are yes or no for each label.

        Raises:
            ValueError: the configuration has an unknown one.
        """
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.int64, torch.int32):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type not in SENTENCE_LOSSES:
            known = ", ".join(SENTENCE_LOSSES)
            raise ValueError(f"problem_type {self.config.problem_type!r} is unknown; expected one of {known}")
        return self.config.problem_type

    def count_labels(self, labels: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Count sequences, or with several scores or labels for each of them B * L."""
        if self.set_problem_type(labels) == "single_label_classification":
            return super().count_labels(labels)
        return {"num_items_in_batch": torch.tensor(labels.numel(), device=labels.device)}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """Return logits (B, L), and with labels the loss of the problem type.

        Args:
            labels: (B,) classes; (B, L) scores, or (B,) with L = 1; or (B, L) 0 or 1 for each of several labels.
        """
        outputs, _ = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))  # (B, L)
        loss = None
        if labels is not None:
            loss = SENTENCE_LOSSES[self.set_problem_type(labels)](logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForMultipleChoice(BertHead):
    """The best of C continuations: one scoring vector, softmax over the choices (section 4.4, SWAG)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        """Logits (B, C) from inputs (B, C, T); `labels` (B,): the number of the right choice."""
        choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        flat = [
            None if x is None else x.flatten(0, 1)
            for x in (input_ids, attention_mask, inputs_embeds, token_type_ids, position_ids)
        ]  # each (B * C, T, ...)
        outputs, _ = self.encode(*flat[:3], token_type_ids=flat[3], position_ids=flat[4], **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)  # (B, C)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else classify_loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertForTokenClassification(BertHead):
    """A label a token (section 5.3, named entities)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Logits (B, T, L), zero at padding when packed; `labels` (B, T), -100 where a token has none."""
        outputs, layout = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))  # (packed, L)
        return TokenClassifierOutput(
            loss=None if labels is None else classify_loss(logits, layout.pack(labels), num_items_in_batch),
            logits=layout.unpack(logits),  # (B, T, L)
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertForQuestionAnswering(BertHead):
    """The start and the end of an answer: a start vector S and an end vector E (section 4.2, SQuAD)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def count_labels(self, start_positions: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Sequences."""
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
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """S.T_i and E.T_i for every token, each (B, T), the dtype's least value at padding, under every kernel.

        Stock BERT lets padding take part in the softmax; here a loss does not depend on how far a batch is padded.

        Args:
            start_positions: (B,), the answer's first token; one outside [0, T) is not counted.
            end_positions: (B,), its last.
        """
        outputs, layout = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
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
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def ignore_outside(positions: Tensor, length: int) -> Tensor:
    """Positions (B,), those outside [0, length) replaced by IGNORED."""
    positions = positions.view(-1)
    return positions.masked_fill((positions < 0) | (positions >= length), IGNORED)


# --- A BiLSTM on top, and features of a frozen encoder (sections 5.1 and 5.3, Tables 5 and 7) -------------------------

# Table 7: what is taken of the recorded states (0 are the embeddings' output), and what becomes of several.
FEATURE_LAYERS = {
    "embeddings": (slice(0, 1), "one"),
    "second-to-last": (slice(-2, -1), "one"),
    "last": (slice(-1, None), "one"),
    "sum-last-four": (slice(-4, None), "sum"),
    "concat-last-four": (slice(-4, None), "concatenation"),
    "sum-all": (slice(1, None), "sum"),
}


def check_feature_layers(name: str, config: BertConfig) -> None:
    """Nothing, when a model of these sizes has the layers that `name` names.

    Raises:
        ValueError: no such name, or too few layers.
    """
    if name not in FEATURE_LAYERS:
        raise ValueError(f"unknown layers {name!r}; expected one of {', '.join(FEATURE_LAYERS)}")
    least = abs(FEATURE_LAYERS[name][0].start)  # counted from either end it is how many there have to be
    if config.num_hidden_layers < least:
        raise ValueError(f"{name} needs {least} layers and the model has {config.num_hidden_layers}; choose others")


def select_features(hidden_states: tuple[Tensor, ...], name: str) -> Tensor:
    """(..., K, H) the states of the K layers that `name` names, from the embeddings' output and every layer's."""
    chosen = hidden_states[FEATURE_LAYERS[name][0]]
    return torch.stack([states.to(chosen[-1].device) for states in chosen], dim=-2)  # (..., K, H)


class BertBiLSTM(nn.Module):
    """Two layers of LSTM in both directions, `units` each, randomly initialised (sections 5.1 and 5.3)."""

    def __init__(self, input_size: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, units, num_layers=2, bidirectional=True)

    def forward(self, states: Tensor, layout: Packed | Padded) -> Tensor:
        """(packed, 2 * units) from (packed, `input_size`); a sequence's states depend on its real tokens only."""
        packed = layout if isinstance(layout, Packed) else lay_out(layout.shape, layout.mask, PACKED, states.device)
        tokens = states if isinstance(layout, Packed) else packed.pack(states)  # (N, F)
        tokens = run_bilstm(self.lstm, tokens, packed)  # (N, 2 * units)
        return tokens if isinstance(layout, Packed) else packed.unpack(tokens)  # (packed, 2 * units)

    def read_sentence(self, states: Tensor, layout: Packed | Padded) -> Tensor:
        """(B, 2 * units) where each direction has read all: the forward one at the last token, the other at the first.

        Differs from the paper: it does not say what a sentence head reads of the BiLSTM.
        """
        units = self.lstm.hidden_size
        return torch.cat([layout.last(states)[:, :units], layout.first(states)[:, units:]], dim=1)


class BertBiLSTMForSequenceClassification(BertForSequenceClassification):
    """With a BiLSTM between the encoder and the pooler (Table 5); plain transformers loads its encoder only."""

    has_bilstm = True


class BertBiLSTMForMultipleChoice(BertForMultipleChoice):
    """With a BiLSTM between the encoder and the pooler; plain transformers loads its encoder only."""

    has_bilstm = True


class BertBiLSTMForTokenClassification(BertForTokenClassification):
    """With a BiLSTM between the encoder and the classifier; plain transformers loads its encoder only."""

    has_bilstm = True


class BertBiLSTMForQuestionAnswering(BertForQuestionAnswering):
    """With a BiLSTM between the encoder and the two vectors; plain transformers loads its encoder only."""

    has_bilstm = True


class BertLayerMix(nn.Module):
    """One vector of the activations of K layers: of the only one, a learned sum, or their concatenation (Table 7).

    Differs from the paper: it does not say how the sum is weighted; here by a softmax, as in ELMo (Peters et al. 2018),
    but without its scale.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        layers, self.kind = FEATURE_LAYERS[config.feature_layers]
        count = len(range(config.num_hidden_layers + 1)[layers])
        self.size = config.hidden_size * (count if self.kind == "concatenation" else 1)
        self.weights = nn.Parameter(torch.zeros(count)) if self.kind == "sum" else None

    def forward(self, features: Tensor) -> Tensor:
        """(..., `size`) from (..., K, H)."""
        if self.weights is None:
            return features.flatten(-2)  # (..., K * H)
        return (features * self.weights.softmax(dim=0)[:, None]).sum(dim=-2)  # (..., H)


class BertFeaturesForTokenClassification(BertHead):
    """A label a word from the activations of a frozen encoder: a BiLSTM and a classifier (section 5.3, feature-based).

    Differs from the paper: it does not say over what the BiLSTM runs; here over the words of a sentence, each with the
    activations of its first token. `bilstm_hidden_size` is the number of units in each direction.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        check_feature_layers(config.feature_layers or "", config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.mix = BertLayerMix(config)
        self.bilstm = BertBiLSTM(self.mix.size, config.bilstm_hidden_size)
        self.dropout = make_head_dropout(config)
        self.classifier = nn.Linear(2 * config.bilstm_hidden_size, config.num_labels)
        self.freeze_encoder()
        self.post_init()

    @classmethod
    def find_places(cls, **batch: Tensor) -> dict[str, Tensor]:
        """Nothing: most batches hold features of words, and no tokens."""
        return {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        word_places: Tensor | None = None,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Logits (B, W, L), of no meaning where a sequence has fewer words than W.

        Args:
            word_places: (B, W) the place of each word's first token in `input_ids`, -1 where there is no word; None:
                every token is a word.
            features: (B, W, K, H) activations that were computed before (`bertkit.inference.features`), instead of `input_ids`;
                then `attention_mask` (B, W) is nonzero at words.
            labels: (B, W), -100 where there is no word.
        """
        self.bert.check_request(kwargs)
        words = attention_mask
        if features is None:
            with torch.no_grad():
                outputs = self.bert(
                    input_ids,
                    attention_mask,
                    token_type_ids,
                    position_ids,
                    inputs_embeds,
                    output_hidden_states=True,
                    return_dict=True,
                    **kwargs,
                )
            features = select_features(outputs.hidden_states, self.config.feature_layers)  # (B, T, K, H)
            if word_places is not None:
                word_places = word_places.to(features.device)
                words = word_places >= 0  # (B, W)
                rows = torch.arange(len(word_places), device=features.device)[:, None]
                features = features[rows, word_places.clamp(min=0)]  # (B, W, K, H)
        layout = lay_out(tuple(features.shape[:2]), words, PACKED, features.device)
        states = self.dropout(self.mix(layout.pack(features).to(self.classifier.weight.dtype)))  # (N, F)
        logits = self.classifier(self.dropout(self.bilstm(states, layout)))  # (N, L)
        return TokenClassifierOutput(
            loss=None if labels is None else classify_loss(logits, layout.pack(labels), num_items_in_batch),
            logits=layout.unpack(logits),  # (B, W, L)
        )
