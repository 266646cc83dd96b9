"""A BiLSTM over packed sequences (sections 5.1 and 5.3, Tables 5 and 7).

torch steps through packed sequences on a CPU in dozens of small operations a token. Its kernel for padded ones takes a
whole direction at once, several times as fast, but knows no lengths. So each direction is a forward one here, the other
over sequences that were turned around: what pads comes after all real tokens, and reaches none of them. Sequences of
similar length share one call, as in `attention.py`. The mathematics is the same; other devices, compiled graphs, other
precisions than fp32 weights and wide inputs use `nn.LSTM`.

Shape letters: N packed tokens, F features of an input, U units of a direction.
"""

import torch
from torch import Tensor, nn

from bertkit.model.attention import Packed, move
from bertkit.model.precision import is_adapted, runs_at_once_on_cpu

WIDEST = 1024  # features; the products of wider inputs gain more from autocast's precision than they lose in steps


def run_bilstm(lstm: nn.LSTM, tokens: Tensor, layout: Packed) -> Tensor:
    """(N, 2U) from tokens (N, F), each sequence by itself; `lstm` is in both directions, with biases, without dropout.

    In fp32 on a CPU, also under autocast.
    """
    layout = layout.to(tokens.device)
    if can_run_padded(lstm, tokens):
        return run_bilstm_on_cpu(lstm, tokens.float(), layout)
    sequences = tokens.split(layout.offsets.diff().tolist())
    states, _ = lstm(nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False))
    return torch.cat(nn.utils.rnn.unpack_sequence(states))


def can_run_padded(lstm: nn.LSTM, tokens: Tensor) -> bool:
    """Whether torch's kernel for padded sequences serves, and faster."""
    return (
        runs_at_once_on_cpu(tokens)
        and lstm.weight_ih_l0.dtype == torch.float32
        and max(lstm.input_size, 2 * lstm.hidden_size) <= WIDEST
        and not is_adapted(lstm)
    )


def run_bilstm_on_cpu(lstm: nn.LSTM, tokens: Tensor, layout: Packed) -> Tensor:
    """`run_bilstm` of fp32 tokens (N, F), every direction a forward one over groups of padded sequences."""
    there, back, real = layout.find_moves()  # (M,), (N,), (M, 1); M places in all groups
    turn = find_mirrored(layout)  # (N,)
    directions = (there, back), (turn[there], back[turn])
    for layer in range(lstm.num_layers):
        states = []
        for weights, (there, back) in zip(lstm.all_weights[2 * layer : 2 * layer + 2], directions, strict=True):
            moved = move(tokens, there, back)  # (M, F)
            states.append(move(_run_forward(moved, weights, layout), back, there, real))  # (N, U)
        tokens = torch.cat(states, dim=-1)  # (N, 2U), the next layer's input
    return tokens


def find_mirrored(layout: Packed) -> Tensor:
    """(N,) for each token the one that is as far from the other end of its sequence."""
    lengths = layout.offsets.diff()  # (B,)
    ends = (layout.offsets[:-1] + layout.offsets[1:] - 1).repeat_interleave(lengths)  # (N,) first plus last place
    return ends - torch.arange(len(ends), device=ends.device)


def _run_forward(moved: Tensor, weights: list[Tensor], layout: Packed) -> Tensor:
    """The states (M, U) of one layer in one direction over the places (M, F) of all groups."""
    states = []
    for group, part in zip(layout.groups, layout.divide(moved), strict=True):
        zero = moved.new_zeros(1, group.shape[0], weights[1].shape[1])  # (1, b, U)
        with torch.autocast("cpu", enabled=False):  # the kernel learns in fp32 only
            out, _, _ = torch.lstm(
                part.view(*group.shape, -1),  # (b, t, F)
                (zero, zero),
                weights,
                has_biases=True,
                num_layers=1,
                dropout=0.0,
                train=torch.is_grad_enabled(),
                bidirectional=False,
                batch_first=True,
            )  # (b, t, U)
        states.append(out.flatten(0, 1))
    return torch.cat(states)
