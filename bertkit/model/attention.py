"""Attention without padding: where the real tokens of a batch are, and attention over them (paper section 3, "Model").

A batch arrives as (B, T) token ids and a mask. `Packed` keeps only its N real tokens, one sequence after the other, so
that every layer works on (N, H); `Padded` leaves it as it came. The model is written once against what both offer.
Which of the two it is follows from the attention implementation's name, in transformers' own place: `packed` (ours,
registered below, the default) or `eager`, `sdpa` and the flash names, which run as in stock BERT and are the reference
of the tests.

Shape letters, here and in `model.py`: B batch, T tokens, N packed tokens, H hidden, A heads, D head size, V vocabulary,
L labels, C choices. Left out: cached decoding, cross-attention and masks that are not a plain (B, T).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from bertkit.model.dropout import apply_mask, draw_mask, find_scale
from bertkit.model.dropout import dropout as apply_dropout
from bertkit.model.precision import is_transformed, runs_at_once_on_cpu

PACKED = "packed"

# Sequences of similar length share one padded product on a CPU. More groups waste less, but make smaller products.
_MAX_GROUPS = 4


@dataclass(frozen=True)
class Padded:
    """The plain layout: states stay (B, T, ...), padding included."""

    shape: tuple[int, int]
    mask: Tensor | None  # (B, T) bool, True at real tokens; None: all are real

    def pack(self, x: Tensor) -> Tensor:
        """x (B, T, ...) as the layers take it: unchanged."""
        return x

    def unpack(self, x: Tensor, fill: float | None = None) -> Tensor:
        """x (B, T, ...), with `fill` at padding if one is given."""
        if fill is None or self.mask is None:
            return x
        mask = self.mask.to(x.device).view(*self.shape, *[1] * (x.dim() - 2))  # (B, T, 1...)
        return x.masked_fill(~mask, fill)

    def select(self, x: Tensor, places: Tensor) -> Tensor:
        """x (B, T, ...) at some places (M,) of the flattened batch: (M, ...)."""
        return x.flatten(0, 1).index_select(0, places.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """The states (B, H) of the first real token, [CLS] (stock BERT takes the first place, real or not)."""
        if self.mask is None:
            return hidden[:, 0]  # (B, H)
        return self._select(hidden, self.mask.to(hidden.device).int().argmax(dim=1))  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """The states (B, H) of the last real token, the final [SEP]."""
        if self.mask is None:
            return hidden[:, -1]  # (B, H)
        columns = torch.arange(self.shape[1], device=hidden.device)
        return self._select(hidden, (self.mask.to(hidden.device) * columns).argmax(dim=1))  # (B, H)

    def _select(self, hidden: Tensor, places: Tensor) -> Tensor:
        """The states (B, H) at one place (B,) of each sequence."""
        return hidden[torch.arange(self.shape[0], device=hidden.device), places]  # (B, H)


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that share one padded product: b of them, at most t tokens long."""

    tokens: Tensor  # (b * t,) packed token numbers; a padded place repeats its sequence's last token
    shape: tuple[int, int]  # (b, t)
    real: Tensor | None  # (b, t) bool; None: all b are t long

    def spread(self, x: Tensor, heads: int) -> Tensor:
        """x (b * t,) for each of the heads: (b, A, t)."""
        return x.view(self.shape[0], 1, -1).expand(-1, heads, -1)

    def flag_real(self) -> Tensor:
        """(b * t,) bool, False where a place only pads."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real.flatten()

    def find_visible(self, causal: bool) -> Tensor | None:
        """Which tokens each token may attend to, broadcastable to (b, 1, t, t); None: all of them."""
        visible = None if self.real is None else self.real[:, None, None, :]  # (b, 1, 1, t)
        if causal:
            length = self.shape[1]
            past = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()  # (t, t)
            visible = past if visible is None else visible & past  # (b, 1, t, t)
        return visible

    def get_bias(self, causal: bool) -> Tensor | None:
        """`find_visible` as fp32 that is added to scores: 0, or the lowest number there is; shared by all layers."""
        return self._bias_of_causal if causal else self._bias

    @cached_property
    def _bias(self) -> Tensor | None:
        return _make_bias(self.find_visible(causal=False))

    @cached_property
    def _bias_of_causal(self) -> Tensor | None:
        return _make_bias(self.find_visible(causal=True))


def _make_bias(visible: Tensor | None) -> Tensor | None:
    """0 where it is True, else the lowest number of fp32."""
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Packed:
    """The packed layout: states are (N, ...), the real tokens of all sequences, one sequence after the other.

    The states may lie on another device than the layout, because a model's layers may be divided over several.
    """

    shape: tuple[int, int]
    indices: Tensor | None  # (N,) places in the flattened (B * T); None: all are real
    offsets: Tensor  # (B + 1,) int64; sequence b is tokens offsets[b] to offsets[b + 1]

    def to(self, device: torch.device | str | int) -> "Packed":
        """Return the layout on `device`; each copy is made once. accelerate's hooks call it, too."""
        device = torch.device(device)
        if device == self.offsets.device:
            return self
        if device not in self._copies:
            indices = None if self.indices is None else self.indices.to(device)
            self._copies[device] = Packed(self.shape, indices, self.offsets.to(device))
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, "Packed"]:
        return {}

    def pack(self, x: Tensor) -> Tensor:
        """The real tokens (N, ...) of x (B, T, ...)."""
        if x.shape[:2] != self.shape:
            raise ValueError(f"got a tensor of shape {tuple(x.shape)} in a batch of {self.shape}; make them agree")
        flat, indices = x.flatten(0, 1), self.to(x.device).indices  # (B * T, ...)
        return flat if indices is None else flat.index_select(0, indices)  # (N, ...)

    def unpack(self, x: Tensor, fill: float | None = None) -> Tensor:
        """x (N, ...) put back into (B, T, ...), with `fill` (default 0) at padding."""
        if (indices := self.to(x.device).indices) is not None:
            flat = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill or 0.0)
            x = flat.index_copy(0, indices, x)  # (B * T, ...)
        return x.unflatten(0, self.shape)  # (B, T, ...)

    def select(self, x: Tensor, places: Tensor) -> Tensor:
        """x (N, ...) at some places (M,) of the flattened batch, all of them real: (M, ...)."""
        if self.indices is not None:
            places = torch.searchsorted(self.indices, places.to(self.indices.device))
        return x.index_select(0, places.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """The states (B, H) of each sequence's first token, [CLS]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[:-1])  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """The states (B, H) of each sequence's last token, the final [SEP]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[1:] - 1)  # (B, H)

    @cached_property
    def groups(self) -> list[Group]:
        """The sequences, sorted by length and cut into groups of similar length (reads the lengths on the host)."""
        lengths = self.offsets.diff()  # (B,)
        order = lengths.argsort(stable=True)
        if int(lengths.min()) == int(lengths.max()):
            return [_make_group(self.offsets, lengths, order)]
        return [
            _make_group(self.offsets, lengths, members) for members in order.tensor_split(_MAX_GROUPS) if len(members)
        ]

    def find_moves(self, heads: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """How rows move into the groups and back, a row being that of a token or of one of its heads.

        A group has (b, A, t) of them, M is the number of places in all groups, padded ones included.

        Returns:
            (M * A,) the packed row at each place; (N * A,) the place of each packed row; (M * A, 1) whether a place
            holds a row and does not only pad, or None if all do.
        """
        if heads not in self._moves:
            head = torch.arange(heads, device=self.offsets.device)[:, None]  # (A, 1)
            firsts = [group.spread(group.tokens * heads, heads) for group in self.groups]  # (b, A, t) each
            rows = torch.cat([(first + head).flatten() for first in firsts])  # (M * A,)
            real = torch.cat([group.spread(group.flag_real(), heads).flatten() for group in self.groups])  # (M * A,)
            places = rows.new_empty(int(self.offsets[-1]) * heads)  # (N * A,)
            places[rows[real]] = real.nonzero().squeeze(1)
            self._moves[heads] = rows, places, None if len(places) == len(rows) else real[:, None]
        return self._moves[heads]

    @cached_property
    def _moves(self) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
        return {}

    def divide(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of x (M, ...), the places in all groups, those of each group (b * t, ...)."""
        return x.split([len(group.tokens) for group in self.groups])


def _make_group(offsets: Tensor, lengths: Tensor, members: Tensor) -> Group:
    """The group of the sequences numbered `members` (b,)."""
    lengths = lengths[members]  # (b,)
    longest = int(lengths.max())
    columns = torch.arange(longest, device=offsets.device)
    tokens = offsets[members, None] + columns.minimum(lengths[:, None] - 1)  # (b, t)
    real = None if int(lengths.min()) == longest else columns < lengths[:, None]
    return Group(tokens.flatten(), (len(members), longest), real)


def lay_out(
    shape: tuple[int, int],
    mask: Tensor | None,
    implementation: str,
    device: torch.device,
    places: Tensor | None = None,
) -> Packed | Padded:
    """The layout of a batch of `shape` (B, T) under an attention implementation.

    A row of the mask without a single real token keeps its first one, so that every sequence has a [CLS].

    Args:
        places: (N,), of the real tokens, as `find_places` gives them; without, an accelerator has to be waited for.

    Raises:
        ValueError: packed, and the mask is not (B, T), `torch.func.vmap` maps over it, or the model is exported or
            traced: the shapes depend on the data.
    """
    if mask is not None and mask.dim() == 2:
        mask = mask.bool()
    if implementation != PACKED:
        return Padded(shape, mask if mask is not None and mask.dim() == 2 else None)
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise ValueError(
            "packed attention can be neither exported nor traced, nor can a BiLSTM; load a model without a BiLSTM with "
            "attn_implementation='sdpa', or call set_attn_implementation('sdpa')"
        )
    if mask is None:
        return Packed(shape, None, torch.arange(shape[0] + 1, device=device) * shape[1])
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}; packed attention takes {shape}: "
            "choose attn_implementation='sdpa' for other masks"
        )
    mask = keep_first(mask)
    offsets = nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))  # (B + 1,)
    return Packed(shape, find_places(mask) if places is None else places, offsets)


def keep_first(mask: Tensor) -> Tensor:
    """The mask (B, T) bool, with the first place of every row that has no other."""
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return mask | (first & ~mask.any(dim=1, keepdim=True))  # (B, T)


def find_places(mask: Tensor) -> Tensor:
    """Where a mask (B, T) is True: places (N,) in the flattened batch."""
    try:
        return mask.flatten().nonzero().squeeze(1)  # (N,)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise ValueError(
            "vmap cannot map over attention_mask: each example would have another number of tokens; loop over the "
            "examples, or give examples of one length without a mask"
        ) from error


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Plain attention: the mixed values (B, T, A, D) and the probabilities (B, A, T, T).

    query, key and value are (B, A, T, D); `attention_mask` is added to the scores, (B, 1, T, T) or None.
    """
    scores = query @ key.transpose(-1, -2) * scaling  # (B, A, T, T)
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = apply_dropout(scores.softmax(dim=-1), dropout)  # (B, A, T, T)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities  # (B, T, A, D)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    layout: Packed | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of every token to the tokens of its own sequence: the mixed values (1, N, A, D), and None.

    query, key and value are (1, A, N, D), as transformers' kernels over packed sequences take them. On CUDA the flash
    kernel runs over the cumulative lengths (it takes head sizes that are multiples of 8), elsewhere plain attention
    over groups of similar length, which for training on a CPU is written out.

    Raises:
        ValueError: a model of transformers was made from a configuration of this package.
    """
    if layout is None:
        raise ValueError(
            f"attn_implementation is {PACKED!r}, which only bertkit's models have, not those of "
            f"{type(module).__module__}; make this one with attn_implementation='sdpa'"
        )
    layout = layout.to(query.device)
    if query.is_cuda and query.shape[-1] % 8 == 0 and not is_transformed():
        attend = attend_jagged
    else:
        attend = attend_on_cpu if _trains_on_cpu(dropout, query, key, value) else attend_grouped
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, A, D)
    mixed = attend(query, key, value, layout, dropout, scaling, module.is_causal)
    return mixed[None], None  # (1, N, A, D)


def attend_jagged(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Packed attention (N, A, D) through jagged tensors, for which torch has a flash kernel with dropout.

    `torch.nn.attention.varlen.varlen_attn` reaches the same kernel but knows no dropout, which BERT trains with.
    """

    def jag(x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(x, layout.offsets, min_seqlen=1, max_seqlen=layout.shape[1])
        return jagged.transpose(1, 2)  # (B, A, jagged, D)

    mixed = nn.functional.scaled_dot_product_attention(
        jag(query), jag(key), jag(value), dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return mixed.transpose(1, 2).values()  # (N, A, D)


def move(x: Tensor, there: Tensor, back: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the rows x[there]; the gradient moves back by a gather, which a CPU does much faster than a scatter.

    Args:
        back: the place of each row of x in the result.
        kept: (rows, 1) of the result, True where its gradient counts: at padded places it does not.
    """
    return x.index_select(0, there) if is_transformed() else _Move.apply(x, there, back, kept)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, back: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, kept)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, kept = ctx.saved_tensors
        gradient = gradient.index_select(0, back)
        return gradient if kept is None else gradient * kept.to(gradient.dtype), None, None, None


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """Packed attention (N, A, D) through plain attention over groups of similar length."""
    shape = query.shape
    tokens, places, real = layout.find_moves()
    # A padded place repeats a token. No gradient reaches it, because it is masked as a key and left out of the result.
    states = [move(x.reshape(shape[0], -1), tokens, places) for x in (query, key, value)]  # (M, H) each
    mixed = []
    for group, *parts in zip(layout.groups, *map(layout.divide, states), strict=True):
        parts = (x.view(*group.shape, *shape[1:]).transpose(1, 2) for x in parts)  # (b, A, t, D) each
        mixed.append(_attend_group(*parts, group, dropout, scaling, causal))  # (b * t, H)
    return move(torch.cat(mixed), places, tokens, real).view(shape)  # (N, A, D)


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: Group, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """The mixed values (b * t, H) of one group, of query, key and value (b, A, t, D).

    Without dropout and gradients torch's kernel is faster. Its backward pass is not: in bf16 on a CPU it takes three
    times as long as that of the plain one.
    """
    visible = group.find_visible(causal)
    if dropout == 0.0 and not query.requires_grad and not is_transformed():
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        scores = query @ key.transpose(-1, -2) * scaling  # (b, A, t, t)
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        mixed = apply_dropout(scores.softmax(dim=-1), dropout) @ value  # (b, A, t, D)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)  # (b * t, H)


def _trains_on_cpu(dropout: float, *states: Tensor) -> bool:
    """Whether `attend_on_cpu` should take the place of `attend_grouped`."""
    learns = any(x.requires_grad for x in states)
    return (0.0 < dropout < 1.0 or (learns and dropout == 0.0)) and runs_at_once_on_cpu(states[0])


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
) -> Tensor:
    """`attend_grouped` for training on a CPU, in fewer passes over states and scores.

    Rows that move are those of a head, so that nothing has to be transposed; the scores are scaled by way of the query,
    and what is kept by way of the values; and the softmax is in fp32, which on a CPU is faster than in bf16.
    Randomness: that of `bertkit.model.dropout`.

    Raises:
        RuntimeError: in the backward pass, if its own derivative is wanted (`create_graph=True`).
    """
    return _AttendOnCPU.apply(query, key, value, layout, dropout, scaling, causal)


class _AttendOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, layout: Packed, dropout: float, scaling: float, causal: bool
    ) -> Tensor:
        shape, dtype = query.shape, query.dtype
        there, back, _ = layout.find_moves(shape[1])
        with torch.autocast("cpu", enabled=False):
            query, key, value = (x.reshape(-1, shape[2]).index_select(0, there) for x in (query, key, value))
            query.mul_(scaling)  # (M * A, D), as the others
            value.mul_(find_scale(dropout))
            mixed, kept = torch.empty_like(value), []
            for group, *parts in _divide_heads(layout, shape[1], query, key, value, mixed):
                queries, keys, values, out = parts  # (b * A, t, D) each
                scores = torch.bmm(queries, keys.transpose(1, 2))  # (b * A, t, t)
                scores = scores.to(torch.promote_types(dtype, torch.float32))
                if (bias := group.get_bias(causal)) is not None:
                    scores.view(group.shape[0], shape[1], *scores.shape[1:]).add_(bias)
                probabilities = scores.softmax(dim=-1).to(dtype)
                mask = draw_mask(probabilities.shape, dropout) if dropout > 0.0 else None
                torch.bmm(apply_mask(probabilities, mask), values, out=out)
                kept += [probabilities, mask]
            mixed = mixed.index_select(0, back).view(shape)  # (N, A, D)
        ctx.layout, ctx.scaling, ctx.dropout = layout, scaling, dropout
        ctx.save_for_backward(query, key, value, *kept)
        return mixed

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "packed attention has no second derivatives on a CPU (create_graph=True); load the model with "
                "attn_implementation='eager'"
            )
        query, key, value, *kept = ctx.saved_tensors
        shape = gradient.shape
        there, back, real = ctx.layout.find_moves(shape[1])
        with torch.autocast("cpu", enabled=False):
            gradient = gradient.reshape(-1, shape[2]).index_select(0, there)  # (M * A, D)
            if real is not None:  # padded places have no gradient
                gradient.mul_(real.to(gradient.dtype))
            gradients = [torch.empty_like(x) for x in (query, key, value)]  # (M * A, D) each
            parts = _divide_heads(ctx.layout, shape[1], query, key, value, gradient, *gradients)
            for number, (_, queries, keys, values, upstream, *outs) in enumerate(parts):
                probabilities, mask = kept[2 * number : 2 * number + 2]  # (b * A, t, t) each
                torch.bmm(apply_mask(probabilities, mask).transpose(1, 2), upstream, out=outs[2])
                scores = apply_mask(torch.bmm(upstream, values.transpose(1, 2)), mask)
                scores = torch._softmax_backward_data(scores, probabilities, -1, probabilities.dtype)
                torch.bmm(scores, keys, out=outs[0])
                torch.bmm(scores.transpose(1, 2), queries, out=outs[1])
            to_query, to_key, to_value = (x.index_select(0, back).view(shape) for x in gradients)  # (N, A, D) each
            to_query.mul_(ctx.scaling)
            to_value.mul_(find_scale(ctx.dropout))
        return to_query, to_key, to_value, None, None, None, None


def _divide_heads(layout: Packed, heads: int, *states: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each group, and of each of the states (M * A, F) its part (b * A, t, F)."""
    start = 0
    for group in layout.groups:
        stop = start + heads * len(group.tokens)
        yield group, *(x[start:stop].view(-1, group.shape[1], x.shape[1]) for x in states)
        start = stop


AttentionInterface.register(PACKED, attend_packed)
