"""The layout of a batch: the positions of its real tokens (paper section 3, "Model").

A batch arrives as (B, T) token ids and a mask. `Packed` keeps only its N real tokens, one sequence after the other, so
that every layer works on (N, H); `Padded` leaves it unchanged. The model is written against their common interface.
The attention implementation's name, as transformers sets it, chooses between them: `packed` (ours, registered in
`attention.py`, the default), or `eager`, `sdpa` and the flash names, which run as in stock BERT and are the reference
of the tests.

Shape letters, here and in the other files of this package: B batch, T tokens, N packed tokens, H hidden, A heads, D
head size, V vocabulary, L labels, C choices; M places in all groups of sequences of similar length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

PACKED = "packed"
LOWEST = torch.finfo(torch.float32).min

# Sequences of similar length share one padded product on a CPU. More groups waste less, but have smaller products.
_MAX_GROUPS = 4


@dataclass(frozen=True)
class Padded:
    """The plain layout: states stay (B, T, ...), padding included."""

    shape: tuple[int, int]
    mask: Tensor | None  # (B, T) bool, True at real tokens; None: all are real
    device: torch.device  # of the batch

    def pack(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) unchanged."""
        return x

    def unpack(self, x: Tensor, fill: float | None = None) -> Tensor:
        """Return x (B, T, ...), with `fill` at padding if given."""
        if fill is None or self.mask is None:
            return x
        mask = self.mask.to(x.device).view(*self.shape, *[1] * (x.dim() - 2))  # (B, T, 1...)
        return x.masked_fill(~mask, fill)

    def select(self, x: Tensor, places: Tensor) -> Tensor:
        """Return x (B, T, ...) at places (M,) of the flattened batch, as (M, ...)."""
        return x.flatten(0, 1).index_select(0, places.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of the first real token, [CLS]; stock BERT takes the first token, real or not."""
        if self.mask is None:
            return hidden[:, 0]  # (B, H)
        return self.select(hidden, self.find_firsts())  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of the last real token, the final [SEP]."""
        if self.mask is None:
            return hidden[:, -1]  # (B, H)
        columns = torch.arange(self.shape[1], device=hidden.device)
        lasts = (self.mask.to(hidden.device) * columns).argmax(dim=1)  # (B,)
        return hidden[torch.arange(self.shape[0], device=hidden.device), lasts]  # (B, H)

    def find_firsts(self) -> Tensor:
        """Return the places (B,) of each sequence's first real token in the flattened batch."""
        starts = torch.arange(self.shape[0], device=self.device) * self.shape[1]  # (B,)
        return starts if self.mask is None else starts + self.mask.int().argmax(dim=1).to(self.device)

    def divide_sequences(self, device: torch.device) -> Sequence[Tensor]:
        """Return the numbers (b,) of the sequences in each group: all in one."""
        return (torch.arange(self.shape[0], device=device),)


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that share one padded product: b of them, at most t tokens long."""

    tokens: Tensor  # (b * t,) packed token numbers; a padded place repeats its sequence's last token
    shape: tuple[int, int]  # (b, t)
    real: Tensor | None  # (b, t) bool; None: all b are t long

    def spread(self, x: Tensor, heads: int) -> Tensor:
        """Repeat x (b * t,) for each head, as (b, A, t)."""
        return x.view(self.shape[0], 1, -1).expand(-1, heads, -1)

    def flag_real(self) -> Tensor:
        """Return (b * t,) bool, False at padded places."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real.flatten()

    def find_visible(self, causal: bool) -> Tensor | None:
        """Return which tokens each token may attend to, broadcastable to (b, 1, t, t), or None for all."""
        visible = None if self.real is None else self.real[:, None, None, :]  # (b, 1, 1, t)
        if causal:
            length = self.shape[1]
            past = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()  # (t, t)
            visible = past if visible is None else visible & past  # (b, 1, t, t)
        return visible

    def get_bias(self, causal: bool) -> Tensor | None:
        """Return `find_visible` as an fp32 bias for the scores: 0 or the lowest fp32 number; shared by all layers."""
        if causal not in self._biases:
            visible = self.find_visible(causal)
            if visible is not None:
                visible = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, LOWEST)
            self._biases[causal] = visible
        return self._biases[causal]

    @cached_property
    def _biases(self) -> dict[bool, Tensor | None]:
        return {}


@dataclass(frozen=True)
class Packed:
    """The packed layout: states are (N, ...), the real tokens of all sequences, one sequence after the other.

    With `whole` they are the W tokens of another layout that a head reads, see `narrow`. States may be on another
    device than the layout, because a model's layers may be spread over several devices.
    """

    shape: tuple[int, int]
    indices: Tensor | None  # (N,) places in the flattened (B * T); None: all are real
    offsets: Tensor  # (B + 1,) int64; sequence b is tokens offsets[b] to offsets[b + 1]
    whole: "Packed | Padded | None" = None  # the layout of all tokens, whose groups have the same sequences

    def to(self, device: torch.device | str | int) -> "Packed":
        """Return the layout on `device`, copied once per device. accelerate's hooks call it, too."""
        device = torch.device(device)
        if device == self.offsets.device:
            return self
        if device not in self._copies:
            indices = None if self.indices is None else self.indices.to(device)
            whole = self.whole.to(device) if isinstance(self.whole, Packed) else self.whole
            self._copies[device] = Packed(self.shape, indices, self.offsets.to(device), whole)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, "Packed"]:
        return {}

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

    def select(self, x: Tensor, places: Tensor) -> Tensor:
        """Return x (N, ...) at places (M,) of the flattened batch, all of them real, as (M, ...)."""
        if self.indices is not None:
            places = torch.searchsorted(self.indices, places.to(self.indices.device))
        return x.index_select(0, places.to(x.device))  # (M, ...)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of each sequence's first token, [CLS]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[:-1])  # (B, H)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the states (B, H) of each sequence's last token, the final [SEP]."""
        return hidden.index_select(0, self.to(hidden.device).offsets[1:] - 1)  # (B, H)

    def find_firsts(self) -> Tensor:
        """Return the places (B,) of each sequence's first token in the flattened batch."""
        firsts = self.offsets[:-1]
        return firsts if self.indices is None else self.indices.index_select(0, firsts)

    def divide_sequences(self, device: torch.device) -> Sequence[Tensor]:
        """Return the numbers (b,) of the sequences in each group, sorted by length (reads the lengths on the host)."""
        lengths = self.to(device).offsets.diff()  # (B,)
        order = lengths.argsort(stable=True)
        parts = 1 if int(lengths.min()) == int(lengths.max()) else _MAX_GROUPS
        return [members for members in order.tensor_split(parts) if len(members)]

    @cached_property
    def bounds(self) -> Tensor:
        """Return the offsets as int32, for kernels that take no others."""
        return self.offsets.int()

    @cached_property
    def groups(self) -> list[Group]:
        """Return the tokens in groups of sequences of similar length (reads the lengths on the host)."""
        lengths = self.offsets.diff()  # (B,)
        divided = (self.whole or self).divide_sequences(lengths.device)
        return [_make_group(self.offsets, lengths, members) for members in divided]

    @property
    def is_even(self) -> bool:
        """Return whether all sequences have the same length, so that the groups' places are the tokens in order."""
        return len(self.groups) == 1 and all(part.groups[0].real is None for part in (self, self.whole or self))

    def find_moves(self, heads: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the indices that move rows into the groups and back.

        A row belongs to a token, or with `heads` > 1 to one head of a token. A group has (b, A, t) rows; M is the
        number of places in all groups, padding included.

        Returns:
            (M * A,) the packed row at each place, (N * A,) the place of each packed row, and (M * A, 1) whether a place
            is real, or None if all are.
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
        """Split x (M, ...), the places of all groups, into the parts (b * t, ...) of each group."""
        return x.split([len(group.tokens) for group in self.groups])


def _make_group(offsets: Tensor, lengths: Tensor, members: Tensor) -> Group:
    """Return the group of the sequences with the numbers `members` (b,)."""
    lengths = lengths[members]  # (b,)
    longest = int(lengths.max())
    columns = torch.arange(longest, device=offsets.device)
    tokens = offsets[members, None] + columns.minimum(lengths[:, None] - 1)  # (b, t)
    real = None if int(lengths.min()) == longest else columns < lengths[:, None]
    return Group(tokens.flatten(), (len(members), longest), real)


Layout = Packed | Padded


def unpack_all(states: tuple[Tensor, ...] | None, layout: Layout) -> tuple[Tensor | None, ...] | None:
    """Return recorded states, each (packed, H), as (B, T, H)."""
    return None if states is None else tuple(None if state is None else layout.unpack(state) for state in states)


def lay_out(
    shape: tuple[int, int], mask: Tensor | None, implementation: str, device: torch.device, places: Tensor | None = None
) -> Layout:
    """Return the layout of a batch of `shape` (B, T) for an attention implementation.

    A row of the mask without a real token keeps its first one, so that every sequence has a [CLS].

    Args:
        places: (N,) the real tokens, from `find_places`; without them the host waits for an accelerator.

    Raises:
        ValueError: Attention is packed, and the mask is not (B, T).
    """
    if mask is not None and mask.dim() == 2:
        mask = mask.bool()
    if implementation != PACKED:
        return Padded(shape, mask if mask is not None and mask.dim() == 2 else None, device)
    if mask is None:
        return Packed(shape, None, torch.arange(shape[0] + 1, device=device) * shape[1])
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}; packed attention expects {shape}: "
            "choose attn_implementation='sdpa' for other masks"
        )
    mask = keep_first(mask)
    offsets = nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))  # (B + 1,)
    return Packed(shape, find_places(mask) if places is None else places, offsets)


def narrow(layout: Layout, places: Tensor | None) -> Packed:
    """Return the layout of the W tokens that a head reads.

    Args:
        places: (W,) in the flattened batch, sorted, the first real token of each sequence among them; None: only those.
    """
    firsts = layout.find_firsts()  # (B,)
    numbers = torch.arange(layout.shape[0] + 1, device=firsts.device)  # (B + 1,)
    if places is None:
        return Packed(layout.shape, firsts, numbers, layout)
    places = places.to(firsts.device)
    return Packed(layout.shape, places, torch.searchsorted(places, numbers * layout.shape[1]), layout)


def keep_first(mask: Tensor) -> Tensor:
    """Return the mask (B, T) bool, with the first place set in every row that has no real token."""
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return mask | (first & ~mask.any(dim=1, keepdim=True))  # (B, T)


def find_places(mask: Tensor) -> Tensor:
    """Return the places (N,) in the flattened batch where a mask (B, T) is True."""
    return mask.flatten().nonzero().squeeze(1)  # (N,)


def find_read_places(mask: Tensor, is_target: Tensor) -> Tensor:
    """Return the places (W,) of the real tokens that are targets (B, T) or the first of their sequence."""
    return find_places(mask & (is_target | (mask.cumsum(dim=1) == 1)))
