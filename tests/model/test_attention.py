"""Packed attention against attention written out for one sequence at a time; layouts and groups of packed batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertkit.model import attention, packing
from bertkit.model.attention import attend_flash, attend_grouped, attend_unpacked
from bertkit.model.cpu import attend_on_cpu
from bertkit.model.packing import PACKED, Packed, lay_out, narrow

CPU = torch.device("cpu")
KERNELS = {"grouped": attend_grouped, "on CPU": attend_on_cpu, "unpacked": attend_unpacked}

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=9)
masks = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6)
)


def lay_out_lengths(lengths: list[int], device: str | torch.device = CPU) -> Packed:
    """Return the packed layout of sequences of these lengths, padded on the right."""
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    return lay_out(tuple(mask.shape), mask, PACKED, mask.device)


def attend_naively(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float, causal: bool
) -> Tensor:
    """Compute attention (N, A, D) for each token of each sequence by the formula."""
    mixed, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            stop = i + 1 if causal else start + length
            scores = (query[i] * key[start:stop]).sum(dim=-1) * scaling  # (tokens, A)
            mixed.append((scores.softmax(dim=0)[..., None] * value[start:stop]).sum(dim=0))  # (A, D)
        start += length
    return torch.stack(mixed)


def narrow_layout(layout: Packed, chosen: list[bool]) -> tuple[Packed, Tensor]:
    """Return the layout of the first tokens and of the chosen ones (N), and their numbers (W,)."""
    indices = torch.arange(math.prod(layout.shape)) if layout.indices is None else layout.indices
    firsts = torch.zeros(len(indices), dtype=torch.bool).index_fill(0, layout.offsets[:-1], True)
    is_read = torch.tensor(chosen) | firsts
    return narrow(layout, indices[is_read]), is_read.nonzero().squeeze(1)


def draw_states(count: int, heads: int, size: int, **options) -> list[Tensor]:
    """Return random query, key and value, each (N, A, D), that require a gradient."""
    return [torch.randn(count, heads, size, requires_grad=True, **options) for _ in range(3)]


def assert_same(mixed: Tensor, expected: Tensor, states: list[Tensor]) -> None:
    torch.testing.assert_close(mixed, expected)
    upstream = torch.randn_like(mixed)
    found, wanted = (torch.autograd.grad(x, states, upstream) for x in (mixed, expected))
    torch.testing.assert_close(found, wanted)


# --- Kernels ----------------------------------------------------------------------------------------------------------


@given(lengths=lengths, heads=st.integers(1, 3), size=st.integers(1, 5), causal=st.booleans(), data=st.data())
def test_kernels_are_attention_within_each_sequence(
    lengths: list[int], heads: int, size: int, causal: bool, data: st.DataObject
) -> None:
    attend = KERNELS[data.draw(st.sampled_from(sorted(KERNELS)))]
    states = draw_states(sum(lengths), heads, size, dtype=torch.double)
    mixed = attend(*states, lay_out_lengths(lengths), 0.0, 0.7, causal)
    expected = attend_naively(*states, lengths, 0.7, causal)
    assert_same(mixed, expected, states)


@given(lengths=lengths, kernel=st.sampled_from(sorted(KERNELS)), data=st.data())
def test_some_tokens_attend_as_all_do(lengths: list[int], kernel: str, data: st.DataObject) -> None:
    layout, states = lay_out_lengths(lengths), draw_states(sum(lengths), 2, 4, dtype=torch.double)
    chosen = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    narrowed, numbers = narrow_layout(layout, chosen)
    mixed = KERNELS[kernel](states[0][numbers], *states[1:], narrowed, 0.0, 0.7, False)
    expected = attend_naively(*states, lengths, 0.7, False)[numbers]
    assert_same(mixed, expected, states)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["all", "causal", "narrowed"])
@pytest.mark.parametrize("lengths", [[20, 20, 20, 20, 20, 20], [3, 1, 7, 7, 2, 5, 12, 30, 17]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.double, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)],
)
def test_training_s_own_attention_is_the_grouped_one(
    dtype: torch.dtype, tolerance: float, lengths: list[int], kind: str, rate: float
) -> None:
    """Values and gradients match double precision, also under autocast; a seed drops the same probabilities."""
    layout, causal = lay_out_lengths(lengths), kind == "causal"
    states = [x.detach().to(dtype) for x in draw_states(sum(lengths), 2, 8)]
    if kind == "narrowed":
        layout, numbers = narrow_layout(layout, (torch.rand(sum(lengths)) < 0.3).tolist())
        states[0] = states[0][numbers]
    upstream = torch.randn(states[0].shape).to(dtype)
    found = []
    for attend, precision in ((attend_on_cpu, dtype), (attend_grouped, torch.double)):
        torch.manual_seed(1)
        given = [x.to(precision).requires_grad_() for x in states]
        with torch.autocast("cpu", torch.bfloat16):
            mixed = attend(*given, layout, rate, 0.4, causal)
            found.append([mixed, *torch.autograd.grad(mixed, given, upstream.to(precision))])
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() < tolerance * wanted.norm()
        share = (got.double() * wanted).sum() / wanted.square().sum()  # in which rounding averages out
        assert abs(share - 1) < tolerance / 5


def draw_probabilities(kernel: str, lengths: list[int], rate: float, **options) -> list[Tensor]:
    """Return the probabilities (A, length, length) after dropout: zero queries, unit vectors as values.

    Undropped, every probability of a sequence is 1 / its length.
    """
    heads, size = 4, 64
    states = torch.zeros(3, sum(lengths), heads, size, **options)
    states[2] = torch.cat([torch.eye(size)[:length] for length in lengths])[:, None]  # (N, A, D)
    attend = attend_flash if kernel == "flash" else KERNELS[kernel]
    mixed = attend(*states, lay_out_lengths(lengths, states.device), rate, 1.0, False)  # (N, A, D)
    return [x[..., : len(x)].transpose(0, 1) for x in mixed.split(lengths)]


def check_dropout(kernel: str, lengths: list[int], rate: float, draws: int, slack: float, **options) -> None:
    """Each probability is zero, with the frequency `rate`, or scaled by 1 / (1 - rate); the mean is unchanged."""
    drawn = [draw_probabilities(kernel, lengths, rate, **options) for _ in range(draws)]
    dropped = count = 0
    for length, *probabilities in zip(lengths, *drawn, strict=True):
        x = torch.stack(probabilities).float() * length  # (draws, A, length, length)
        kept = x[x != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)), rtol=1e-2, atol=0)
        assert (x.mean(dim=0) - 1).abs().max() < 6 * math.sqrt(rate / (1 - rate) / draws) + slack
        dropped, count = dropped + int((x == 0).sum()), count + x.numel()
    assert abs(dropped / count - rate) < 5 * math.sqrt(rate * (1 - rate) / count) + slack


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_dropout_drops_probabilities_and_keeps_their_mean(kernel: str) -> None:
    check_dropout(kernel, [9, 2, 30, 30, 17], rate=0.3, draws=60, slack=1e-4)


# --- Layouts and their groups -----------------------------------------------------------------------------------------


@given(lengths=lengths)
def test_groups_cover_each_token_once(lengths: list[int]) -> None:
    layout = lay_out_lengths(lengths)
    assert len(layout.groups) <= packing._MAX_GROUPS
    real = torch.cat([group.tokens[group.flag_real()] for group in layout.groups])
    assert real.sort().values.tolist() == list(range(sum(lengths)))
    for group in layout.groups:
        rows = group.tokens.view(group.shape)
        numbers = torch.bucketize(rows, layout.offsets[1:-1], right=True)  # the sequence each token belongs to
        assert (numbers == numbers[:, :1]).all()  # one sequence per row, also in its padding
        assert (rows.diff(dim=1) >= 0).all()
        assert group.flag_real().view(group.shape)[:, 0].all()


def test_a_worked_example_of_groups() -> None:
    """Five sequences of 1, 4, 2, 4 and 1 tokens; sorted by length and split into four groups: (1, 1), (2), (4), (4)."""
    layout = lay_out_lengths([1, 4, 2, 4, 1])
    assert layout.offsets.tolist() == [0, 1, 5, 7, 11, 12]
    assert [group.shape for group in layout.groups] == [(2, 1), (1, 2), (1, 4), (1, 4)]
    assert [group.tokens.tolist() for group in layout.groups] == [[0, 11], [5, 6], [1, 2, 3, 4], [7, 8, 9, 10]]
    assert all(group.real is None for group in layout.groups)
    tokens, slots, real = layout.plan_moves()
    assert tokens.tolist() == [0, 11, 5, 6, 1, 2, 3, 4, 7, 8, 9, 10]
    assert slots.tolist() == [0, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11, 1]
    assert real is None


@given(rows=masks)
def test_what_is_packed_comes_back_in_its_place(rows: list[list[bool]]) -> None:
    """Any mask: left padding, right padding, holes, and rows without a real token, which keep their first."""
    mask = torch.tensor(rows)
    kept = mask.clone()
    kept[~mask.any(dim=1), 0] = True
    layout = lay_out(tuple(mask.shape), mask.long(), PACKED, CPU)
    x = torch.randn(*mask.shape, 3)
    packed = layout.pack(x)
    assert torch.equal(packed, x[kept])
    assert torch.equal(layout.unpack(packed, fill=-7.0), x.masked_fill(~kept[..., None], -7.0))
    assert torch.equal(layout.unpack(packed), x * kept[..., None])
    assert layout.offsets.diff().tolist() == kept.sum(dim=1).tolist()
    assert torch.equal(layout.first(packed), torch.stack([row[keep][0] for row, keep in zip(x, kept, strict=True)]))
    assert torch.equal(layout.last(packed), torch.stack([row[keep][-1] for row, keep in zip(x, kept, strict=True)]))


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3), (1, 4)])
def test_packed_refuses_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask has the shape .* packed attention expects \(2, 4\)"):
        lay_out((2, 4), torch.ones(shape), PACKED, CPU)


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_flash_kernel_has_the_form_that_is_given_to_it(dtype: torch.dtype) -> None:
    """On a device without data, forward and backward, for all tokens and for those of a narrowed layout."""
    layout = lay_out_lengths([5, 3, 9])
    for part in (layout, narrow(layout, None)):
        count = int(part.offsets[-1])
        meta = part.to("meta")
        states = [torch.empty(n, 2, 64, dtype=dtype, device="meta", requires_grad=True) for n in (count, 17, 17)]
        mixed = attend_flash(*states, meta, 0.1, 0.125, False)
        gradients = torch.autograd.grad(mixed.sum(), states)
        assert (mixed.shape, mixed.dtype) == ((count, 2, 64), dtype)
        assert [x.shape for x in gradients] == [x.shape for x in states]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["all", "causal", "narrowed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)])
def test_cuda_s_kernels_are_attention_within_each_sequence(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Flash in half precision, torch's memory-efficient kernel over the padded batch in fp32; forward and backward."""
    lengths, causal = [2, 512, 37, 37, 1, 128], kind == "causal"
    layout = lay_out_lengths(lengths, "cuda")
    if kind == "narrowed":
        layout = narrow(layout, None)
    shapes = int(layout.offsets[-1]), sum(lengths), sum(lengths)
    states = [torch.randn(n, 12, 64, dtype=dtype, device="cuda", requires_grad=True) for n in shapes]
    if dtype == torch.float32:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            mixed = attend_unpacked(*states, layout, 0.0, 0.125, causal)
    else:
        assert attention.can_flash(states[0])
        mixed = attend_flash(*states, layout, 0.0, 0.125, causal)
    exact = [x.detach().double().requires_grad_() for x in states]
    expected = attend_grouped(*exact, layout, 0.0, 0.125, causal)
    upstream = torch.randn_like(mixed)
    gradients = torch.autograd.grad(mixed, states, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for got, wanted in ((mixed, expected), *zip(*gradients, strict=True)):
        assert (got.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_drops_probabilities_and_keeps_their_mean(dtype: torch.dtype) -> None:
    """The tolerance is that of the flash kernel, which keeps eight bits of the rate."""
    kernel = "unpacked" if dtype == torch.float32 else "flash"
    check_dropout(kernel, [9, 2, 30, 30, 17], rate=0.3, draws=60, slack=2e-2, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 12, 64])
def test_any_head_size_runs_on_cuda(size: int) -> None:
    """Sizes that no flash kernel takes run over the padded batch."""
    module = nn.Module().train()
    module.is_causal = True
    query, key, value = (torch.randn(1, 2, 8, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layout = lay_out_lengths([5, 3], "cuda")
    mixed, _ = attention.attend_packed(module, query, key, value, None, dropout=0.0, scaling=0.3, layout=layout)
    exact = (x[0].transpose(0, 1).double() for x in (query, key, value))
    expected = attend_naively(*exact, [5, 3], 0.3, True)
    assert (mixed[0].double() - expected).abs().max() < 2e-2 * expected.abs().max()
