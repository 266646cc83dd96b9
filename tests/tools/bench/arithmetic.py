"""Count the work of one update of masked LM in bf16 on an H200, and the time that it needs: arithmetic, not measured.

    python -m tests.tools.bench.arithmetic

Letters: N tokens, T tokens of a sequence, H hidden, L layers, V vocabulary, M predicted tokens. Autocast keeps weights,
states and LayerNorm in fp32 (4 bytes) and gives products, GELU and attention bf16 (2 bytes). Reading or writing one
value of H or 4H units is counted, in bytes per unit of H, for each pass that runs as a kernel of its own.
"""

from dataclasses import dataclass

PEAK, BANDWIDTH = 989e12, 4.8e12  # dense bf16 products per second and bytes per second of the data sheet
OF_PEAK, OF_PEAK_IN_ATTENTION, OF_BANDWIDTH = 0.70, 0.40, 0.80  # shares that good kernels reach; assumed
AIM = 0.45  # share of the peak
COMPILING = 60.0  # seconds assumed; two whole models took over a minute in the first run on a GPU
BATCHES = ((256, 128), (32, 512))  # rows and tokens of each
VOCABULARY, PREDICTED = 30_522, 0.15

# Bytes of a layer per token and unit of H: what a pass reads + what it writes, times the passes
EAGER_FORWARD = {
    "casts of the inputs of query, key, value and of the feed-forward half": 4 * (4 + 2),
    "dropout with its mask": 2 * (2 + 2 + 1),
    "residual sum": 2 * (2 + 4 + 4),
    "LayerNorm": 2 * (4 + 4),
    "GELU": 4 * (2 + 2),
}
EAGER_BACKWARD = {
    "LayerNorm, and its weights' gradient": 2 * (4 + 4 + 4) + 2 * (4 + 4),
    "casts of gradients to bf16": 2 * (4 + 2),
    "dropout": 2 * (2 + 1 + 2),
    "gradients of biases": 5 * 2 + 4 * 2,
    "GELU": 4 * (2 + 2 + 2),
    "casts of gradients to fp32, and their sums": 4 * (2 + 4) + 4 * (4 + 4 + 4),
}
FUSED_FORWARD = {
    "dropout, residual sum, LayerNorm, cast": 2 * (2 + 4 + 4 + 2 + 4 + 1),  # with what the backward pass reads again
    "GELU": 4 * (2 + 2),
}
FUSED_BACKWARD = {
    "sums, LayerNorm, dropout, cast": (2 + 4 + 4 + 1 + 4 + 2) + (3 * 2 + 4 + 4 + 1 + 4 + 2),
    "LayerNorm's weights' gradient": 2 * (4 + 4),
    "gradients of biases": 5 * 2 + 4 * 2,
    "GELU": 4 * (2 + 2 + 2),
}
EAGER = sum(EAGER_FORWARD.values()) + sum(EAGER_BACKWARD.values())
FUSED = sum(FUSED_FORWARD.values()) + sum(FUSED_BACKWARD.values())
EMBEDDING_BYTES = 57 + 53  # per token and unit of H: three gathers, sums, LayerNorm, dropout; and back
LOGIT_BYTES = (2 + 4) + 2 * (4 + 4) + (4 + 2)  # per logit: cast to fp32, softmax and its gradient, cast back
# Per weight: cast to bf16 and the gradient's to fp32, norm and clipping, AdamW (reads p, g, m, v; writes p, m, v)
WEIGHT_BYTES = 2 * (4 + 2) + (4 + 4 + 4) + 4 * 4 + 3 * 4
EAGER_LAUNCHES = (4 + 6 + 1 + 2 + 2 + 2 + 1) + (
    12 + 1 + 6 + 4 + 2 + 2 + 1 + 4 + 4
)  # kernels of a layer, there and back
FUSED_LAUNCHES = (6 + 1 + 2 + 1) + (12 + 1 + 2 + 2 + 3 + 1)


@dataclass(frozen=True)
class Update:
    """The work of one update of `rows` sequences of `length` tokens, all real; all layers compute all states."""

    rows: int
    length: int
    layers: int = 12  # BERT-base
    hidden: int = 768

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def weights(self) -> int:
        """Return the weights of the layers and of the embeddings, without vectors."""
        return self.layers * 12 * self.hidden**2 + VOCABULARY * self.hidden

    @property
    def products(self) -> float:
        """Return the operations of the layers' matrix products: two each weight and token, and twice as many back."""
        return 3 * 2 * 12 * self.hidden**2 * self.layers * self.tokens

    @property
    def attention(self) -> float:
        """Return the operations of attention: two products, and five back, because flash computes the scores again."""
        return (2 + 5) * 2 * self.length * self.hidden * self.layers * self.tokens

    @property
    def decoder(self) -> float:
        """Return the operations of the decoder and its transformation on the predicted tokens."""
        return 3 * 2 * (VOCABULARY + self.hidden) * self.hidden * PREDICTED * self.tokens

    def move(self, layer: int) -> dict[str, float]:
        """Return the bytes of the element-wise passes, of `layer` bytes per token and unit of H in each layer."""
        return {
            "element-wise passes of the layers": layer * self.hidden * self.layers * self.tokens,
            "embeddings": EMBEDDING_BYTES * self.hidden * self.tokens,
            "softmax of the decoder": LOGIT_BYTES * VOCABULARY * PREDICTED * self.tokens,
            "casts of weights, clipping, AdamW": WEIGHT_BYTES * self.weights,
        }

    def list_seconds(self, layer: int) -> dict[str, float]:
        """Return the seconds of each part, if the assumed shares of peak and bandwidth are reached."""
        return {
            "matrix products of the layers": self.products / PEAK / OF_PEAK,
            "attention": self.attention / PEAK / OF_PEAK_IN_ATTENTION,
            "decoder": self.decoder / PEAK / OF_PEAK,
            **{name: moved / BANDWIDTH / OF_BANDWIDTH for name, moved in self.move(layer).items()},
        }

    @property
    def aim(self) -> float:
        """Return the seconds of an update at the share AIM of the peak."""
        return (self.products + self.attention + self.decoder) / PEAK / AIM


def format_table() -> str:
    """Return the Markdown of all updates, eager and fused."""
    updates = {f"{rows} x {length}": Update(rows, length) for rows, length in BATCHES}
    heads = [f"{name}, {way}" for name in updates for way in ("eager", "fused")]
    columns = [update.list_seconds(layer) for update in updates.values() for layer in (EAGER, FUSED)]
    lines = [[name, *(f"{1e3 * column[name]:.1f}" for column in columns)] for name in columns[0]]
    totals = [sum(column.values()) for column in columns]
    twice = [update for update in updates.values() for _ in range(2)]
    lines.append(["sum, ms", *(f"{1e3 * total:.1f}" for total in totals)])
    lines.append(["sequences a second", *(f"{update.rows / s:,.0f}" for update, s in zip(twice, totals, strict=True))])
    lines.append(["of the peak", *(f"{update.aim * AIM / s:.0%}" for update, s in zip(twice, totals, strict=True))])
    lines.append([f"at {AIM:.0%} of the peak, ms", *(f"{1e3 * update.aim:.1f}" for update in twice)])
    launches = [update.layers * each for update in updates.values() for each in (EAGER_LAUNCHES, FUSED_LAUNCHES)]
    lines.append(["kernels of the layers", *(f"{count:,}" for count in launches)])
    paid = [COMPILING / (eager - fused) for eager, fused in zip(totals[::2], totals[1::2], strict=True)]
    lines.append(["updates until compiling is paid back", *(text for each in paid for text in ("", f"{each:,.0f}"))])
    return "\n".join(f"| {' | '.join(row)} |" for row in [["ms", *heads], ["---"] * (1 + len(heads)), *lines])


if __name__ == "__main__":
    print(format_table())
