"""The layout of a batch: which tokens are real, and which of them a head reads (paper section 3, "Model").

A batch arrives as (B, T) token ids and a mask. `Packed` keeps only its N real tokens, one sequence after the other, so
that every layer works on (N, H); `narrow` leaves the W tokens that a head reads, whose states the last layer computes
alone. `Padded` leaves the batch unchanged. The model is written against their common interface, `Layout`. The attention
implementation's name, as transformers sets it, chooses: `packed` (ours, registered in `attention.py`, the default), or
`eager`, `sdpa` and the flash names, which run as in stock BERT and are the reference of the tests.

Shape letters, here and in the other files of this package: B batch, T tokens, N packed tokens, W tokens that are read,
H hidden, A heads, D head size, V vocabulary, L labels, C choices; M slots in all groups of sequences of similar length,
each of which holds a token or padding. An index is the number of a token in the flattened batch (B * T).
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

PACKED = "packed"
LOWEST = torch.finfo(torch.float32).min

# Sequences of similar length share one padded product on a CPU. More groups waste less, but have smaller products.
_MAX_GROUPS = 4


class Layout:
    """The interface of all layouts. "Packed" states are those of a layout's tokens, in its own shape and order."""

    shape: tuple[int, int]  # (B, T)

    @property
    def whole(self) -> "Layout":
        """Return the layout of all tokens."""
        return self

    def read(self, hidden: Tensor) -> Tensor:
        """Return the states of the layout's own tokens, from those of all tokens."""
        return hidden

    def make_mask(self, config: PreTrainedConfig, hidden: Tensor, attention_mask: Tensor | None) -> Any:
        """Return the mask of attention in the form of its kernel; None if the layout takes its place."""
        return None


@dataclass(frozen=True)
class Padded(Layout):
    """The plain layout: states stay (B, T, ...), padding included."""

    shape: tuple[int, int]
    real: Tensor  # (B, T) bool

    def make_mask(self, config: PreTrainedConfig, hidden: Tensor, attention_mask: Tensor | None) -> Any:
        make = create_causal_mask if config.is_decoder else create_bidirectional_mask
        cache = (None,) if config.is_decoder else ()  # required; its name depends on transformers' version
        return make(config, hidden, attention_mask, *cache)

    def to_kernel(self, *states: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return query, key and value (B, T, H), and the mask, as attention takes them: unchanged."""
        return states

    def from_kernel(self, mixed: Tensor) -> Tensor:
        """Return the result of attention (B, T, A, D) as (B, T, H)."""
        return mixed.flatten(2)

    def pack(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) unchanged."""
        return x

    def unpack(self, x: Tensor, fill: float | None = None) -> Tensor:
        """Return x (B, T, ...), with `fill` at padding if given."""
        if fill is None:
            return x
        return x.masked_fill(~self.real.to(x.device).view(*self.shape, *[1] * (x.dim() - 2)), fill)

    def select(self, x: Tensor, indices: Tensor) -> Tensor:
        """Return x (B, T, ...) at indices (M,), as (M, ...)."""
        return x.flatten(0, 1).index_select(0, indices.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of the first real token, [CLS]; stock BERT takes the first token, real or not."""
        return self.select(hidden, self._index(self.real.int().argmax(dim=1)))  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of the last real token, the final [SEP]."""
        columns = torch.arange(self.shape[1], device=self.real.device)
        return self.select(hidden, self._index((self.real * columns).argmax(dim=1)))  # (B, H)

    def _index(self, positions: Tensor) -> Tensor:
        """Return the indices (B,) of the tokens at these positions (B,) of their sequences."""
        return torch.arange(self.shape[0], device=positions.device) * self.shape[1] + positions


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that share one padded product: b of them, at most t tokens long."""

    tokens: Tensor  # (b * t,) numbers of packed tokens; at padding, that of the sequence's last token
    shape: tuple[int, int]  # (b, t)
    real: Tensor | None  # (b, t) bool; None: all b are t long
    biases: dict[bool, Tensor | None] = field(default_factory=dict, init=False)

    def spread(self, x: Tensor, heads: int) -> Tensor:
        """Repeat x (b * t,) for each head, as (b, A, t)."""
        return x.view(self.shape[0], 1, -1).expand(-1, heads, -1)

    def flag_real(self) -> Tensor:
        """Return (b * t,) bool, False at padding."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real.flatten()

    def mark_visible(self, causal: bool) -> Tensor | None:
        """Return which tokens each token may attend to, broadcastable to (b, 1, t, t), or None for all."""
        visible = None if self.real is None else self.real[:, None, None, :]  # (b, 1, 1, t)
        if causal:
            length = self.shape[1]
            past = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()  # (t, t)
            visible = past if visible is None else visible & past  # (b, 1, t, t)
        return visible

    def get_bias(self, causal: bool) -> Tensor | None:
        """Return `mark_visible` as an fp32 bias for the scores: 0 or the lowest fp32 number; shared by all layers."""
        if causal not in self.biases:
            visible = self.mark_visible(causal)
            if visible is not None:
                visible = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, LOWEST)
            self.biases[causal] = visible
        return self.biases[causal]


@dataclass(frozen=True)
class Packed(Layout):
    """The packed layout: states are (N, ...), the real tokens of all sequences, one sequence after the other.

    A narrowed layout has only the W tokens that a head reads: in the last layer they attend to all `others`. States may
    be on another device than the layout, because a model's layers may be spread over several devices.
    """

    shape: tuple[int, int]
    indices: Tensor | None  # (N,); None: all are real
    offsets: Tensor  # (B + 1,) int64; sequence b is tokens offsets[b] to offsets[b + 1]
    others: "Packed | None" = None  # the layout of all tokens, if this one is narrowed
    copies: dict[torch.device, "Packed"] = field(default_factory=dict, init=False)
    moves: dict[int, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict, init=False)
    # (B + 1,) the offsets as int32, for kernels that take only these; at a cached property a graph would break
    bounds: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", self.offsets.int())

    def to(self, device: torch.device | str | int) -> "Packed":
        """Return the layout on `device`, copied once per device. accelerate's hooks call it, too."""
        device = torch.device(device)
        if device == self.offsets.device:
            return self
        if device not in self.copies:
            values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
            moved = {name: value.to(device) for name, value in values.items() if hasattr(value, "to")}
            self.copies[device] = replace(self, **moved)
        return self.copies[device]

    @property
    def whole(self) -> "Packed":
        return self if self.others is None else self.others

    def read(self, hidden: Tensor) -> Tensor:
        return hidden if self.others is None else self.others.select(hidden, self.indices)  # (packed, H)

    @property
    def sides(self) -> "tuple[Packed, Packed, Packed]":
        """Return the layouts of query, key and value."""
        return self, self.whole, self.whole

    def to_kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: None) -> tuple[Tensor | None, ...]:
        """Return query, key and value (N, H) as attention takes them: (1, N, H), the form of packed sequences."""
        return query[None], key[None], value[None], mask

    def from_kernel(self, mixed: Tensor) -> Tensor:
        """Return the result of attention (1, N, A, D) as (N, H)."""
        return mixed[0].flatten(1)

    def pack(self, x: Tensor) -> Tensor:
        """Return the real tokens (N, ...) of x (B, T, ...)."""
        if x.shape[:2] != self.shape:
            raise ValueError(f"got a tensor of shape {tuple(x.shape)}; expected (B, T, ...), (B, T) = {self.shape}")
        flat, indices = x.flatten(0, 1), self.to(x.device).indices  # (B * T, ...)
        return flat if indices is None else flat.index_select(0, indices)  # (N, ...)

    def unpack(self, x: Tensor, fill: float | None = None) -> Tensor:
        """Return x (N, ...) as (B, T, ...), with `fill` (default 0) at padding."""
        if (indices := self.to(x.device).indices) is not None:
            flat = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill or 0.0)
            x = flat.index_copy(0, indices, x)  # (B * T, ...)
        return x.unflatten(0, self.shape)  # (B, T, ...)

    def select(self, x: Tensor, indices: Tensor) -> Tensor:
        """Return x (N, ...) at the indices (M,) of real tokens, as (M, ...)."""
        if self.indices is not None:
            indices = torch.searchsorted(self.indices, indices.to(self.indices.device))
        return x.index_select(0, indices.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of each sequence's first token, [CLS]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[:-1])  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of each sequence's last token, the final [SEP]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[1:] - 1)  # (B, H)

    @cached_property
    def groups(self) -> list[Group]:
        """Return the tokens in groups of sequences of similar length (reads the lengths on the host)."""
        lengths = self.whole.offsets.diff()  # (B,)
        parts = 1 if int(lengths.min()) == int(lengths.max()) else _MAX_GROUPS
        divided = lengths.argsort(stable=True).tensor_split(parts)
        return [_make_group(self.offsets, members) for members in divided if len(members)]

    @property
    def is_even(self) -> bool:
        """Return whether all sequences have the same length, so that the slots of the group are the tokens in order."""
        return len(self.groups) == 1 and all(part.groups[0].real is None for part in (self, self.whole))

    def plan_moves(self, heads: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return how rows move into the slots of the groups and back.

        A row belongs to a token, or with `heads` > 1 to one head of a token. A group has (b, A, t) slots.

        Returns:
            (M * A,) the row in each slot, (N * A,) the slot of each row, and (M * A, 1) whether a slot holds a token,
            or None if all do.
        """
        if heads not in self.moves:
            head = torch.arange(heads, device=self.offsets.device)[:, None]  # (A, 1)
            firsts = [group.spread(group.tokens * heads, heads) for group in self.groups]  # (b, A, t) each
            rows = torch.cat([(first + head).flatten() for first in firsts])  # (M * A,)
            real = torch.cat([group.spread(group.flag_real(), heads).flatten() for group in self.groups])  # (M * A,)
            slots = rows.new_empty(int(self.offsets[-1]) * heads)  # (N * A,)
            slots[rows[real]] = real.nonzero().squeeze(1)
            self.moves[heads] = rows, slots, None if len(slots) == len(rows) else real[:, None]
        return self.moves[heads]

    def divide(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split x (M, ...), the slots of all groups, into the parts (b * t, ...) of each group."""
        return x.split([len(group.tokens) for group in self.groups])


def _make_group(offsets: Tensor, members: Tensor) -> Group:
    """Return the group of the sequences with the numbers `members` (b,)."""
    lengths = offsets.diff()[members]  # (b,)
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
    indices: Tensor | None = None,
) -> Packed | Padded:
    """Return the layout of a batch of `shape` (B, T) for an attention implementation.

    A row of the mask without a real token keeps its first one, so that every sequence has a [CLS].

    Args:
        indices: (N,) those of the real tokens, from `index_true`; without them the host waits for an accelerator.

    Raises:
        ValueError: Attention is packed, and the mask is not (B, T).
    """
    if implementation != PACKED:
        has_padding = mask is not None and mask.dim() == 2
        return Padded(shape, mask.bool() if has_padding else torch.ones(shape, dtype=torch.bool, device=device))
    if mask is None:
        return Packed(shape, None, torch.arange(shape[0] + 1, device=device) * shape[1])
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}; packed attention expects {shape}: "
            "choose attn_implementation='sdpa' for other masks"
        )
    mask = keep_first(mask.bool())
    offsets = nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))  # (B + 1,)
    return Packed(shape, index_true(mask) if indices is None else indices, offsets)


def narrow(layout: Packed, indices: Tensor | None) -> Packed:
    """Return the layout of the W tokens that a head reads.

    Args:
        indices: (W,) sorted, the first real token of each sequence among them; None: only those.
    """
    numbers = torch.arange(layout.shape[0] + 1, device=layout.offsets.device)  # (B + 1,)
    if indices is None:
        firsts = layout.offsets[:-1]  # (B,)
        firsts = firsts if layout.indices is None else layout.indices.index_select(0, firsts)
        return Packed(layout.shape, firsts, numbers, layout)
    indices = indices.to(numbers.device)
    return Packed(layout.shape, indices, torch.searchsorted(indices, numbers * layout.shape[1]), layout)


def keep_first(mask: Tensor) -> Tensor:
    """Return the mask (B, T) bool, with the first token set in every row that has no real token."""
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return mask | (first & ~mask.any(dim=1, keepdim=True))  # (B, T)


def index_true(mask: Tensor) -> Tensor:
    """Return the indices (N,) of the tokens where a mask (B, T) is True."""
    return mask.flatten().nonzero().squeeze(1)  # (N,)


def index_read(mask: Tensor, is_target: Tensor) -> Tensor:
    """Return the indices (W,) of the real tokens that are targets (B, T) or the first of their sequence."""
    return index_true(mask & (is_target | (mask.cumsum(dim=1) == 1)))
