"""The options of `[data]`, declared once: checks, dry runs and help texts are made from them.

Only the standard library is imported here, so that `--help` is fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertkit.errors import UsageError


def check_range(said: str, value: float, least: float, below: float = math.inf) -> None:
    """Check that a number is at least `least` and below `below`.

    Raises:
        UsageError: The number is out of range; the message begins with `said`.
    """
    if not least <= value < below:
        limit = f" and below {below}" if value >= below else ""
        raise UsageError(f"{said}; it must be at least {least}{limit}")


@dataclass(frozen=True)
class Option:
    """An option of `[data]`.

    Attributes:
        default: The paper's value, or ours if the paper has none.
        least: The minimum of a number; None: no check.
        source: The source of the default.
        help: The help text.
        below: The exclusive upper bound, checked together with `least`.
    """

    default: Any
    least: int | None = None
    source: str = ""
    help: str = ""
    below: float = math.inf

    def explain(self, value: Any) -> str:
        """Return the help text, with the source if the value is the default."""
        return f"{self.help} ({self.source})" if self.source and value == self.default else self.help


Options = Mapping[str, Option]

CODE = "reference code"
DIR = Option("", help="Folder of the official files; the Hub's data set if not given.")
MAX_TRAIN_SAMPLES = Option(0, 0, help="Train on the first so many examples only; 0: all.")

TUNE_SHARE = Option(
    0.0,
    0,
    help="Share of dev that decides (tau, the best checkpoint) and is not scored; 0: all of dev does both.",
    below=1,
)

PRETRAINING_OPTIONS: Options = {
    "corpus": Option([], help="Text files, directories, a Hub data set, docs; or one corpus that has been built."),
    "vocab": Option("", help="Vocabulary; that of the corpus or the checkpoint, or a trained one, if not given."),
    "vocab_size": Option(30522, 1, CODE, "Tokens of a vocabulary that is trained."),
    "cased": Option(False, help="Keep upper case and accents."),
    "objective": Option("mlm+nsp", None, "3.1", "mlm+nsp, mlm, or clm (left to right)."),
    "max_length": Option(128, 5, "A.2", "Tokens of a pair, where there is no [[phase]]."),
    "short_seq_prob": Option(0.1, 0, CODE, "Share of the pairs that are made shorter.", below=1),
    "dupe_factor": Option(10, 1, CODE, "Copies of the pairs, used in turn."),
    "masked_lm_prob": Option(0.15, None, "3.1", "Share of the tokens that are predicted."),
    "mask_rate": Option(0.8, None, "3.1", "Share of these that become [MASK]."),
    "random_rate": Option(0.1, None, "3.1", "Share of these that become a random token."),
    "same_rate": Option(0.1, None, "3.1", "Share of these that stay the same."),
    "whole_word_masking": Option(False, None, CODE, "Mask all tokens of a word."),
    "split_sentences": Option(True, help="Split lines into sentences."),
    "heldout_share": Option(0.01, 0, help="Share of the documents that are evaluated, and never trained on.", below=1),
    "heldout_pairs": Option(5000, 1, help="Pairs of these that are evaluated, at most."),
    "heldout_length": Option(0, help="Tokens of such a pair, at most; 0: as in the first phase."),
    "limit_characters": Option(0, 0, help="Characters of each source that are read; 0: all."),
}
GLUE_OPTIONS: Options = {
    "dir": DIR,
    "max_length": Option(128, 5, CODE, "Tokens of a sequence; longer pairs are truncated, longest text first."),
    "max_train_samples": MAX_TRAIN_SAMPLES,
    "tune_share": TUNE_SHARE,
}
WINDOW_OPTIONS: Options = {
    "max_length": Option(384, None, CODE, "Tokens of a window, its question included."),
    "doc_stride": Option(128, 1, CODE, "Tokens between the starts of two windows."),
    "max_query_length": Option(64, 1, CODE, "Tokens of a question; longer ones are truncated."),
    "max_answer_length": Option(30, 1, CODE, "Tokens of an answer."),
}
SQUAD_OPTIONS: Options = {
    "dir": DIR,
    "train_file": Option("", help="Training file in SQuAD's form; the official one if not given."),
    "extra_train": Option("", help="Fine-tune on this file in SQuAD's form first; triviaqa makes one."),
    "max_train_samples": MAX_TRAIN_SAMPLES,
    "tune_share": TUNE_SHARE,
    **WINDOW_OPTIONS,
}
SWAG_OPTIONS: Options = {
    "dir": DIR,
    "max_length": Option(128, 5, "ours", "Tokens of each of the four sequences."),
    "max_train_samples": MAX_TRAIN_SAMPLES,
    "tune_share": TUNE_SHARE,
}
NER_OPTIONS: Options = {
    "dir": DIR,
    "max_length": Option(512, 3, "5.3: maximal context", "Tokens of a sequence."),
    "context": Option(True, None, "5.3", "Show the sentences around, too."),
    "features": Option("", None, "Table 7", "Learn a BiLSTM from these layers of a fixed encoder."),
    "half_features": Option(False, help="Keep features in 16 bits a number instead of 32."),
    "features_dir": Option("", help="Folder of kept features; among huggingface_hub's cached assets if not given."),
    "max_train_samples": MAX_TRAIN_SAMPLES,
    "tune_share": TUNE_SHARE,
}


def list_defaults(options: Options) -> dict[str, Any]:
    """Return the default of each option."""
    return {name: option.default for name, option in options.items()}
