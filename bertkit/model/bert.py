"""BERT: the encoder (paper section 3); its heads are in `pretraining_heads.py` and `heads.py`.

Parameter names, head classes, outputs and the `PreTrainedModel` API are those of transformers' BERT, so that weights
load in both directions and Trainer, accelerate and pipelines work. It differs in four ways: nothing is computed on
padding (`packing.py`), the masked-LM decoder sees only the masked positions in training, weights start from a truncated
normal as in the reference code, and no loss depends on the division into micro-batches. Shape letters are defined in
`packing.py`; "packed" is (N, ...) under packed attention, in its last layer (W, ...) if a head reads only W tokens, and
(B, T, ...) under the others.

Left out: cross-attention, cached decoding, chunked feed-forward layers.
"""

import copy
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from bertkit.model.attention import attend_eagerly, name_kernel
from bertkit.model.config import BertConfig
from bertkit.model.cpu import Dropout, is_adapted, is_traced
from bertkit.model.packing import PACKED, Layout, Packed, lay_out, narrow


class BertEmbeddings(nn.Module):
    """The sum of token, segment and position embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        # No padding_idx: [PAD] is an ordinary token in the reference code, and nothing is computed on padding here.
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
        """Return the input of the first layer (packed, H) from ids (packed) or token embeddings (packed, H)."""
        embedded = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        embedded = embedded + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embedded))


EMBEDDING_PARTS = (BertEmbeddings, nn.Embedding, nn.LayerNorm, Dropout)


class BertSelfAttention(nn.Module):
    """Multi-head attention; `config._attn_implementation` names the kernel."""

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
        self, read: Tensor, hidden: Tensor, attention_mask: Tensor | None, layout: Layout, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed values (packed, H), and the probabilities (B, A, T, T) if the kernel has them.

        Args:
            read: (packed, H), the states that attend to `hidden`, the states of all tokens.
        """
        states = self.query(read), self.key(hidden), self.value(hidden)  # (packed, H) each
        *states, mask = layout.to_kernel(*states, attention_mask)
        size = self.attention_head_size
        states = (x.view(*x.shape[:-1], -1, size).transpose(1, 2) for x in states)  # (B, A, T, D) each
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name_kernel(self.config), attend_eagerly)
        rate = self.dropout.p if self.training else 0.0
        mixed, probabilities = attend(self, *states, mask, dropout=rate, scaling=self.scaling, layout=layout)
        return layout.from_kernel(mixed), probabilities  # (packed, H)


class BertOutput(nn.Module):
    """The output of a layer's attention or feed-forward half: projection to H, residual sum, LayerNorm (post-norm)."""

    def __init__(self, config: BertConfig, input_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)  # (packed, H)


class BertAttention(nn.Module):
    """The attention half of a layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config, config.hidden_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Layout) -> Tensor:
        read = layout.read(hidden)  # (packed, H)
        mixed, _ = self.self(read, hidden, attention_mask, layout)
        return self.output(mixed, read)  # (packed, H)


class BertIntermediate(nn.Module):
    """The first half of the feed-forward network: H to 4H, then GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activation(self.dense(hidden))  # (packed, 4H)


MEAN_SCALE = 100.0  # the weight of the mean: a token's own state is 1 to 3 % of the sum
POOLER_SCALE = 0.5  # the scale of a sentence vector before tanh, which compresses large values


class BertLayer(GradientCheckpointingLayer):
    """One Transformer block."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Layout) -> Tensor:
        hidden = self.attention(hidden, attention_mask, layout)
        return self.output(self.intermediate(hidden), hidden)  # (packed, H)

    @torch.no_grad()
    def average(self) -> None:
        """Make each state of the layer the mean over its sequence, normalised.

        Query and key are 0, so that attention is uniform over the real tokens. In training they stay 0, and so do the
        feed-forward matrices: their gradients are products with each other.
        """
        for parameter in self.parameters():
            parameter.zero_()
        attention = self.attention
        attention.self.value.weight.copy_(torch.eye(len(attention.self.value.weight)))
        attention.output.dense.weight.copy_(MEAN_SCALE * torch.eye(len(attention.output.dense.weight)))
        for norm in (attention.output.LayerNorm, self.output.LayerNorm):
            norm.weight.fill_(1.0)


class BertEncoder(nn.Module):
    """The stack of L layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, layout: Layout) -> Tensor:
        """Return the states (packed, H); all layers but the last compute those of all tokens."""
        for number, layer in enumerate(self.layer, 1):
            hidden = layer(hidden, attention_mask, layout if number == len(self.layer) else layout.whole)
        return hidden  # (packed, H)


class BertPooler(nn.Module):
    """Dense and tanh on the sentence vector C, the state of the first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()  # Differs from the paper: 4.1 has no layer between C and W; the reference code has

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the pooled sentence vectors (B, H) of hidden (B, T, H)."""
        return self.activation(self.dense(hidden[:, 0]))  # (B, H)

    @torch.no_grad()
    def pass_through(self) -> None:
        """Make the pooler a multiple of the identity, so that a head reads the sentence vector itself."""
        self.dense.weight.copy_(POOLER_SCALE * torch.eye(len(self.dense.weight)))
        self.dense.bias.zero_()


class StartsAtZero(nn.Module):
    """A module whose own parameters are 0 before training."""


class BertPreTrainedModel(PreTrainedModel):
    """Base class of all models: configuration, initialisation, and choice of the attention implementation."""

    config: BertConfig
    config_class = BertConfig
    base_model_prefix = "bert"
    reads_mean = False  # whether it has the layer of `config.mean_layer`; the others need the states of the tokens
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": BertLayer, "attentions": BertSelfAttention}
    _no_split_modules = ["BertLayer"]  # not the embeddings: the decoder shares their table
    # A buffer of old checkpoints, and the parts of a pre-trained BERT that this head does not use.
    _keys_to_ignore_on_load_unexpected = [r"position_ids", r"^cls\.", r"^(bert\.)?pooler\."]

    def __init__(self, config: BertConfig) -> None:
        if config.mean_layer and not self.reads_mean:
            last = config.num_hidden_layers - 1
            its_weights = rf"^(bert\.)?encoder\.layer\.{last}\."
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, its_weights]
            config = copy.deepcopy(config)
            config.num_hidden_layers, config.mean_layer = last, None
        super().__init__(config)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the requested implementation; by default packed, or eager if `output_attentions` is set."""
        default = "eager" if self.config.output_attentions else PACKED
        return super().get_correct_attn_implementation(requested_attention or default, is_init_check)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save under the Hub's names, also if the checkpoint had others, and give the weights config.json's file mode.

        safetensors 0.8 restricts the mode.
        """
        super().save_pretrained(save_directory, *args, **{"save_original_format": False} | kwargs)
        folder = Path(save_directory)
        for weights in folder.glob("*.safetensors"):
            with suppress(OSError):  # another owner's file, or a file system without modes
                shutil.copymode(folder / "config.json", weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise from a normal with deviation `initializer_range`, truncated at two deviations (reference code)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            deviation = max(self.config.initializer_range, sys.float_info.min)  # torch divides by it
            init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, StartsAtZero):
            for parameter in module.parameters(recurse=False):
                init.zeros_(parameter)
        elif isinstance(module, nn.LSTM):
            for parameter in module.parameters():  # torch's own initialisation
                init.uniform_(parameter, -(module.hidden_size**-0.5), module.hidden_size**-0.5)
        else:
            super()._init_weights(module)


# Arguments of transformers' models that would change a result.
UNSUPPORTED = (
    *("encoder_hidden_states", "encoder_attention_mask", "cache", "past_key_values", "head_mask", "is_causal"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "logits_to_keep", "shift_labels"),
)


class BertModel(BertPreTrainedModel):
    """The encoder, with a pooler unless the head needs none."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True, reads_mean: bool = False) -> None:
        self.reads_mean = reads_mean
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(self.config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def add_mean_layer(self) -> None:
        """Add a last layer that computes the mean over the tokens, and make the pooler pass it on.

        Differs from the paper: its sentence heads read [CLS], which before fine-tuning has learned next sentences only;
        the mean says more about a text. As a layer of plain BERT it loads in plain transformers.
        """
        layer = BertLayer(self.config).to(self.dtype).to(self.device)
        layer.average()
        layer.train(self.training)
        self.encoder.layer.append(layer)
        self.config.num_hidden_layers += 1
        self.config.mean_layer = True
        self.pooler.pass_through()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def lay_out(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Layout:
        """Return the layout of a batch, for a head that works on packed states; see `packing.lay_out`.

        Raises:
            ValueError: Both or none of `input_ids` and `inputs_embeds` are given, or packed attention cannot take the
                batch.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        given = input_ids if inputs_embeds is None else inputs_embeds
        implementation = name_kernel(self.config)
        if implementation == PACKED and indices is None and is_traced():  # shapes cannot depend on the mask
            implementation = "sdpa"
        return lay_out(tuple(given.shape[:2]), attention_mask, implementation, given.device, indices)

    def narrow(self, layout: Layout, indices: Tensor | None, **kwargs) -> Layout:
        """Return the layout of the tokens that a head reads, or the same layout if the last layer computes all states.

        It computes all states if attention is not packed or causal, if hidden states are requested (in `kwargs` or in
        the configuration), and if a hook would see fewer (transformers' own hooks stay after the first such request).

        Args:
            indices: (W,) those of the tokens in the flattened batch; None: those of the first tokens.
        """
        asked = kwargs.get("output_hidden_states")
        asked = self.config.output_hidden_states if asked is None else asked
        if not isinstance(layout, Packed) or asked or self.config.is_decoder or not self.encoder.layer:
            return layout
        if any(map(is_adapted, (self, self.encoder, *self.encoder.layer[-1].modules()))):
            return layout
        return narrow(layout, indices)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        layout: Layout | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch.

        Args:
            input_ids: (B, T); or give `inputs_embeds` (B, T, H).
            attention_mask: (B, T), nonzero at real tokens; None: all are real. States at padding are zero when packed.
            token_type_ids: (B, T), the segment of each token: 0 for A, 1 for B; None: all 0.
            position_ids: (B, T) or (1, T), each below `max_position_embeddings`; None: 0 to T - 1.
            layout: Result of `lay_out` or `narrow`; with it the last states are returned packed.
            output_hidden_states: Whether to return the outputs of the embeddings and of every layer, L + 1 in all.
            output_attentions: Whether to return the probabilities (B, A, T, T) of each layer; needs
                `attn_implementation="eager"`.

        Returns:
            `last_hidden_state` (B, T, H), `pooler_output` (B, H), and on request `hidden_states` and `attentions`.

        Raises:
            ValueError: Attention probabilities are requested of another implementation, T exceeds
                `max_position_embeddings` without `position_ids`, or an argument is in `UNSUPPORTED`.
        """
        self.check_request(kwargs)
        is_packed = layout is not None
        layout = layout or self.lay_out(input_ids, attention_mask, inputs_embeds)
        length, most = layout.shape[1], self.config.max_position_embeddings
        if position_ids is None:
            if length > most:
                raise ValueError(
                    f"a sequence has {length} tokens, but the model has {most} positions; truncate it "
                    "(tokenizer(..., truncation=True))"
                )
            given = input_ids if inputs_embeds is None else inputs_embeds
            position_ids = torch.arange(length, device=given.device)[None]  # (1, T)
        if token_type_ids is None:
            token_type_ids = position_ids.new_zeros(1, 1)
        hidden = self.embed(input_ids, token_type_ids, position_ids, inputs_embeds, layout.whole)  # (packed, H)
        asked = {key: value for key, value in kwargs.items() if key.startswith("output_")}
        outputs = self.encode(hidden, attention_mask, layout, return_dict=True, **asked)
        if outputs.hidden_states is not None:  # a layer that nobody asked for has None
            states = (None if x is None else layout.unpack(x) for x in outputs.hidden_states)
            outputs.hidden_states = tuple(states)  # (B, T, H) each
        if not is_packed:
            outputs.last_hidden_state = layout.unpack(outputs.last_hidden_state)  # (B, T, H)
        return outputs

    @capture_outputs
    def encode(
        self, hidden: Tensor, attention_mask: Tensor | None, layout: Layout, **kwargs
    ) -> BaseModelOutputWithPooling:
        """Return the encoder's outputs, packed because transformers' recorder stores what the layers return."""
        mask = layout.whole.make_mask(self.config, hidden, attention_mask)
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
        layout: Layout,
    ) -> Tensor:
        """Return the first layer's input (packed, H).

        Replaced or hooked, the embeddings and their parts are called as in stock: (B, T, ...), positions (1, T, ...).
        """
        token_type_ids = token_type_ids.expand(layout.shape)  # (B, T)
        parts = dict(self.embeddings.named_children())
        words = parts.pop("word_embeddings", None)
        if any(type(part) not in EMBEDDING_PARTS or is_adapted(part) for part in (self.embeddings, *parts.values())):
            ids = {"input_ids": input_ids, "position_ids": position_ids, "token_type_ids": token_type_ids}
            return layout.pack(self.embeddings(**ids, inputs_embeds=inputs_embeds))
        if inputs_embeds is None and (type(words) is not nn.Embedding or is_adapted(words)):
            input_ids, inputs_embeds = None, words(input_ids)  # (B, T, H); checkpointing has a hook here, too
        given = (input_ids, token_type_ids, position_ids.expand(layout.shape), inputs_embeds)
        return self.embeddings(*(None if x is None else layout.pack(x) for x in given))

    def check_request(self, kwargs: dict) -> None:
        """Check for unsupported arguments and outputs.

        Raises:
            ValueError: An argument is in `UNSUPPORTED`, or attentions are requested without eager attention.
        """
        for name in UNSUPPORTED:
            if kwargs.get(name) is not None:
                raise ValueError(f"bertkit's models do not take {name}; leave it out, or use transformers' BertModel")
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        if wanted and name_kernel(self.config) != "eager":
            raise ValueError(
                f"attention probabilities exist only with attn_implementation='eager', got "
                f"{name_kernel(self.config)!r}; load the model with it or call set_attn_implementation('eager')"
            )
