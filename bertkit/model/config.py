"""The configuration of a model: sizes and rates (paper section 3).

`config.json` has the form that plain `transformers` writes for BERT (`model_type: "bert"`, the same keys), so every
BERT on the Hub loads here and every model saved here loads there. Left out, because the paper has none of it:
cross-attention, cached decoding, chunked feed-forward layers and relative positions.
"""

import math
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

ATTENTION = (  # names of implementations; transformers treats any other as a Hub repository and runs its code
    "packed",
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
DROPOUT_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
CONFIG_RANGES = {  # other values cannot work, so that a file with them is damaged
    **dict.fromkeys((*SIZES, "type_vocab_size", "bilstm_hidden_size"), (1, math.inf)),
    **dict.fromkeys(DROPOUT_RATES, (0, 1)),
    **dict.fromkeys(("initializer_range", "layer_norm_eps"), (0, math.inf)),
    "num_hidden_layers": (0, 1_000),
    "temperature": (1e-3, 1e3),
    "redaction_threshold": (0, 1),
}
# Unknown to other programs.
OWN_VALUES = ("tau", "thresholds", "least_confidence", "redaction_threshold", "temperature", "text_columns")
OWN_VALUES += ("text_words", "feature_layers")
OWN_VALUES += ("bilstm_hidden_size", "class_weights", "window_pooling", "target_scale", "learned_scale", "mean_layer")


@strict
class BertConfig(PreTrainedConfig):
    """Sizes and rates of a BERT; the defaults are BERT-base, uncased (section 3).

    L = `num_hidden_layers`, H = `hidden_size`, A = `num_attention_heads`; the feed-forward size is 4H in the paper.

    Raises:
        huggingface_hub.errors.StrictDataclassError: A value has the wrong type or is out of range, H is not divisible
            by A, transformers lacks the activation, or positions are not absolute.
    """

    model_type = "bert"
    keys_to_ignore_at_inference = ["past_key_values", "mlm_loss", "nsp_loss"]  # a list: Trainer adds one to it

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | int | None = None
    is_decoder: bool = False  # whether attention is left-to-right (the ablation of Table 5 and Figure 5)
    tie_word_embeddings: bool = True
    # The margin by which an answer's score must exceed s_null to be given (section 4.3), tuned in training on SQuAD
    # 2.0
    tau: float | int | None = None
    # The probability above which each of several labels is predicted, in label order; None: 0.5
    thresholds: list[float | int] | None = None
    # The probability of the likeliest class below which a classifier gives no answer; None: it answers all
    least_confidence: float | int | None = None
    # The probability of being in a name at which redaction replaces a word; None: it replaces the names of the tags
    redaction_threshold: float | int | None = None
    # The number that a classifier's logits are divided by for calibrated probabilities; the model's outputs are not
    # divided
    temperature: float | int | None = None
    # The columns of a table that a classifier was trained on, one or two for pairs
    text_columns: list[str] | None = None
    # How a text is divided into the words that a tagger tags: "basic" at white space and at each punctuation mark, as
    # BERT's basic tokens are; None: with marks inside of words, as in CoNLL's files
    text_words: Literal["basic"] | None = None
    feature_layers: str | None = None  # the layers that the feature-based approach reads (section 5.3)
    bilstm_hidden_size: int | None = None  # units per direction of the feature-based approach's BiLSTM (section 5.3)
    # The weight of each label in the loss of sequence classification, in the order of the labels: of its sequences
    # for a single class, of its positives for independent labels
    class_weights: list[float | int] | None = None
    # How the scores of a long text's windows are combined: "mean" or "max"; None: texts are not divided
    window_pooling: Literal["mean", "max"] | None = None
    # Mean and standard deviation of the numbers that a regression is being trained on: its classifier computes
    # deviations from the mean, and its logits and labels are numbers. None: it computes the numbers
    target_scale: list[float | int] | None = None
    # The same of a finished training, whose classifier computes the numbers themselves
    learned_scale: list[float | int] | None = None
    # Whether the last of the layers computes the mean over the tokens (`BertLayer.average`); only the head of texts
    # has it, and every other class loads without it
    mean_layer: bool | None = None

    # Written by other programs and kept unchanged; this package has neither a cache nor cross-attention.
    use_cache: bool = True
    add_cross_attention: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "BertConfig":
        """Build the configuration as in transformers, without `auto_map`: code beside the weights never runs here.

        Raises:
            ValueError: `config_dict` names an unknown attention implementation; one in `kwargs` is not checked.
        """
        for key, value in config_dict.items():
            if key.endswith("attn_implementation"):
                check_attention(value)
        return super().from_dict({key: value for key, value in config_dict.items() if key != "auto_map"}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name; ours only if set, so that files are the same as those of transformers."""
        unset = {name for name in OWN_VALUES if getattr(self, name) is None}
        return {name: value for name, value in super().to_dict().items() if name not in unset}

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **options) -> None:
        """Save as in transformers, which up to 5.17 refuses the temperature as one of text generation."""
        temperature, self.temperature = self.temperature, None
        super().save_pretrained(save_directory, push_to_hub, **options)
        self.temperature = temperature
        self.to_json_file(Path(save_directory, "config.json"))

    def validate_architecture(self) -> None:
        """Check that the values are in range and fit together; called by `@strict` at construction.

        Raises:
            ValueError: They are not.
        """
        for name, (least, most) in CONFIG_RANGES.items():
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                limit = f" and at most {most:g}" if most < math.inf else ""
                raise ValueError(f"{name} is {str(value)[:40]}; it must be at least {least:g}{limit}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is unknown; the paper uses 'gelu', others: {sorted(ACT2FN)}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}; "
                "choose a multiple (the paper's head size is 64)"
            )
        if (kind := getattr(self, "position_embedding_type", "absolute")) != "absolute":
            raise ValueError(f"position_embedding_type is {kind!r}; expected 'absolute'; choose another checkpoint")
        if self.class_weights is not None and not all(0 <= weight < math.inf for weight in self.class_weights):
            raise ValueError(f"class_weights is {str(self.class_weights)[:80]}; weights must be finite and at least 0")


def check_attention(name: Any) -> None:
    """Check that the name of an attention implementation is known to bertkit, or None.

    Raises:
        ValueError: The name is unknown.
    """
    if name is not None and name not in ATTENTION:
        raise ValueError(f"attn_implementation {name!r} is unknown; expected one of {', '.join(ATTENTION)}")
