"""A text classifier with random weights, and texts for it."""

from pathlib import Path

import numpy as np
import torch

from bertkit.data.tokenizer import SPECIAL_TOKENS, make_tokenizer, save_tokenizer
from bertkit.model.config import BertConfig
from bertkit.model.heads import BertForSequenceClassification

SEED = 0
WORDS = [f"w{number}" for number in range(8000)]  # each is a token
SIZES = {  # Google's releases and MiniLM-L6: layers, hidden size, heads
    "tiny": (2, 128, 2),
    "small": (4, 512, 8),
    "minilm": (6, 384, 12),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


def choose_size(name: str) -> dict[str, int]:
    """Return BertConfig's sizes of a named model."""
    layers, hidden, heads = SIZES[name]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return sizes | {"intermediate_size": 4 * hidden}


def write_classifier(folder: str, size: str) -> str:
    """Write a model of V = 30,522 with a tokenizer that knows the words, and return the folder."""
    save_tokenizer(make_tokenizer([*SPECIAL_TOKENS, *WORDS], cased=False), Path(folder))
    torch.manual_seed(SEED)
    BertForSequenceClassification(BertConfig(**choose_size(size))).save_pretrained(folder)
    return folder


def make_texts(lengths: list[int]) -> list[str]:
    """Return random texts of these numbers of words."""
    random = np.random.default_rng(SEED)
    return [" ".join(random.choice(WORDS, length)) for length in lengths]
