"""The BiLSTM on top of an encoder (Table 5), and the selection of a frozen encoder's layers as its input (Table 7).

The heads that use it are in `bilstm_heads.py`. Shape letters: N packed tokens, F input features, U units per direction.
"""

import torch
from torch import Tensor, nn

from bertkit.model.bert import StartsAtZero
from bertkit.model.config import BertConfig
from bertkit.model.packing import PACKED, Layout, Packed, lay_out


def run_bilstm(lstm: nn.LSTM, tokens: Tensor, layout: Packed) -> Tensor:
    """Run a bidirectional LSTM over each sequence separately.

    Args:
        lstm: Bidirectional, with biases, without dropout.
        tokens: (N, F).

    Returns:
        The states (N, 2U).
    """
    sequences = tokens.split(layout.offsets.diff().tolist())
    states, _ = lstm(nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False))
    return torch.cat(nn.utils.rnn.unpack_sequence(states))


# Table 7: the slice of the recorded states (0 is the embeddings' output), and how several are combined.
FEATURE_LAYERS = {
    "embeddings": (slice(0, 1), "one"),
    "second-to-last": (slice(-2, -1), "one"),
    "last": (slice(-1, None), "one"),
    "sum-last-four": (slice(-4, None), "sum"),
    "concat-last-four": (slice(-4, None), "concatenation"),
    "sum-all": (slice(1, None), "sum"),
}


def select_layers(name: str, count: int) -> tuple[list[int], str]:
    """Return the numbers of the layers that `name` selects in a model of `count` layers, and how they are combined.

    Args:
        name: A name of FEATURE_LAYERS; or several layers that are concatenated in this order: `all`, or numbers joined
            by commas, where 0 is the embeddings' output and -1 the last layer.

    Raises:
        ValueError: The name is unknown, or the model does not have these layers.
    """
    numbers = range(count + 1)
    if name in FEATURE_LAYERS:
        chosen, kind = FEATURE_LAYERS[name]
        if count < (least := abs(chosen.start)):  # number of layers needed, counted from either end
            raise ValueError(f"{name} needs {least} layers, but the model has {count}; choose other layers")
        return list(numbers[chosen]), kind
    try:
        return list(numbers[1:]) if name == "all" else [numbers[int(part)] for part in name.split(",")], "concatenation"
    except (ValueError, IndexError):
        expected = f"one of {', '.join(FEATURE_LAYERS)}, all, or numbers from {-count - 1} to {count} joined by commas"
        raise ValueError(f"unknown layers {name!r}; expected {expected}") from None


def select_features(hidden_states: tuple[Tensor, ...], name: str) -> Tensor:
    """Select the states (..., K, H) of the K layers called `name` from the outputs of embeddings and layers."""
    chosen = [hidden_states[number] for number in select_layers(name, len(hidden_states) - 1)[0]]
    return torch.stack([states.to(chosen[-1].device) for states in chosen], dim=-2)  # (..., K, H)


class BertBiLSTM(nn.Module):
    """Two layers of bidirectional LSTM with `units` per direction, randomly initialised (sections 5.1 and 5.3)."""

    def __init__(self, input_size: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, units, num_layers=2, bidirectional=True)

    def forward(self, states: Tensor, layout: Layout) -> Tensor:
        """Return (packed, 2 * units) from (packed, `input_size`); states depend only on real tokens.

        Raises:
            ValueError: The model is exported or traced, where shapes cannot depend on lengths.
        """
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise ValueError("a BiLSTM cannot be exported or traced; use a model without one")
        if isinstance(layout, Packed):
            return run_bilstm(self.lstm, states, layout)  # (N, 2 * units)
        packed = lay_out(layout.shape, layout.real, PACKED, states.device)
        return packed.unpack(run_bilstm(self.lstm, packed.pack(states), packed))  # (B, T, 2 * units)

    def read_sentence(self, states: Tensor, layout: Layout) -> Tensor:
        """Return each direction's final states (B, 2 * units): forward at the last token, backward at the first.

        Differs from the paper: it does not say which states of the BiLSTM a sentence head reads.
        """
        units = self.lstm.hidden_size
        return torch.cat([layout.last(states)[:, :units], layout.first(states)[:, units:]], dim=1)


class BertLayerMix(StartsAtZero):
    """Combine the activations of K layers: a single layer, a learned weighted sum, or a concatenation (Table 7).

    Differs from the paper: it does not say how the sum is weighted; here by a softmax, as in ELMo (Peters et al. 2018),
    but without its scale.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        layers, self.kind = select_layers(config.feature_layers or "", config.num_hidden_layers)
        count = len(layers)
        self.size = config.hidden_size * (count if self.kind == "concatenation" else 1)
        self.weights = nn.Parameter(torch.zeros(count)) if self.kind == "sum" else None

    def forward(self, features: Tensor) -> Tensor:
        """Return (..., `size`) from (..., K, H)."""
        if self.weights is None:
            return features.flatten(-2)  # (..., K * H)
        return (features * self.weights.softmax(dim=0)[:, None]).sum(dim=-2)  # (..., H)
