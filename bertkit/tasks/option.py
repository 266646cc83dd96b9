"""The options of `[data]`, declared once: checks, dry runs and help texts are made from them.

Help texts also list the keys at the top level of a recipe, which `bertkit.training.recipe` checks.

Only the standard library is imported here, so that `--help` is fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertkit.errors import UsageError


def check_range(said: str, value: float, least: float, below: float = math.inf) -> None:
    """Check that a number is at least `least` and below `below`."""
    if not least <= value < below:
        limit = f" and below {below}" if value >= below else ""
        raise UsageError(f"{said}; it must be at least {least}{limit}")


@dataclass(frozen=True)
class Option:
    """An option of `[data]`."""

    default: Any  # the paper's value, or ours if the paper has none
    least: int | None = None  # the minimum of a number; None: no check
    source: str = ""  # the source of the default
    help: str = ""  # the help text
    below: float = math.inf  # the exclusive upper bound, checked together with `least`
    is_input: bool = False  # whether it names files to read: a path, paths joined by commas, or a list of paths
    choices: tuple[str, ...] = ()  # all values that it may have; empty: no check

    def explain(self, value: Any) -> str:
        """Return the help text, with the source if the value is the default."""
        return f"{self.help} ({self.source})" if self.source and value == self.default else self.help


Options = Mapping[str, Option]

TOP_LEVEL = {  # key -> help text
    "task": "Task that a recipe file is for.",
    "checkpoint": "Model to start from, as --model.",
    "batch_size": "Number of sequences per update, over all processes.",
    "precision": "auto (bf16 where the hardware has it), fp32, bf16 or fp16.",
    "preset": "paper; stable: 20 epochs for small data; auto: by the rows and the model, for one's own data.",
    "freeze": "encoder: train the head only; of texts and pairs it is solved.",
    "bilstm": "Whether a BiLSTM reads the encoder's output.",
    "reinit_layers": "Number of last layers that start from random weights.",
    "patience": "End after N evaluations without a better score; 0: never.",
    "calibrate": "Whether a temperature calibrates the probabilities.",
    "baseline": "Whether baselines are fitted to the training rows; false: --no-baseline.",
    "start": "Head that is trained: solved on the encoder's vectors; random; auto: solved if the vectors tell enough.",
    "strength": "C of the solved head, the inverse of its penalty; 0: chosen by folds over the training rows.",
    "settled": "Keys that the data have decided; recorded by a run.",
    "stop_after": "End after this update of the schedule, as --budget does on a slow machine; 0: at its end.",
}

TYPES, NUMBERED = REDACTIONS = ("types", "numbered")  # forms of redacted names: [PER]; [PER-1], one number for a name
CODE = "reference code"
DIR = Option("", help="Folder of the official files (default: the Hub's data set).", is_input=True)
MAX_TOKENS = Option(0, 0, "ours", "Maximum number of tokens that are computed at once; 0: what fits into memory.")
ROW_OPTIONS: Options = {  # rows of train and dev
    "max_train_samples": Option(0, 0, help="Train on the first N examples only; 0: all."),
    "tune_share": Option(
        0.0,
        0,
        help="Share of dev that chooses (tau, the best checkpoint) and is not scored; 0: all of dev does both.",
        below=1,
    ),
    "trial_rows": Option(
        0, 0, help="Number of training rows, at most a quarter, that are scored instead of dev; 0: none."
    ),
    "max_tokens": MAX_TOKENS,
}
PRETRAINING_OPTIONS: Options = {
    "corpus": Option([], help="Text files, directories, a Hub data set, docs, or one built corpus.", is_input=True),
    "vocab": Option("", help="Vocabulary (default: from the corpus or checkpoint, else trained).", is_input=True),
    "vocab_size": Option(30522, 1, CODE, "Number of tokens in a trained vocabulary."),
    "cased": Option(False, help="Keep upper case and accents."),
    "objective": Option(
        "mlm+nsp", None, "3.1", "mlm+nsp, mlm, or clm (left to right).", choices=("mlm+nsp", "mlm", "clm")
    ),
    "max_length": Option(128, 5, "A.2", "Maximum number of tokens per pair, unless there are [[phase]] tables."),
    "short_seq_prob": Option(0.1, 0, CODE, "Probability of a shorter pair.", below=1),
    "dupe_factor": Option(10, 1, CODE, "Number of different sets of pairs, used in turn."),
    "masked_lm_prob": Option(0.15, None, "3.1", "Share of the tokens that are masked and predicted."),
    "mask_rate": Option(0.8, None, "3.1", "Share of these replaced by [MASK]."),
    "random_rate": Option(0.1, None, "3.1", "Share of these replaced by a random token."),
    "same_rate": Option(0.1, None, "3.1", "Share of these left unchanged."),
    "whole_word_masking": Option(False, None, CODE, "Mask all tokens of a word together."),
    "words": Option(
        "",
        help="spaces: spaces are borders of words and nothing else, in segmented text of a script without spaces.",
        choices=("", "spaces"),
    ),
    "split_sentences": Option(True, help="Split lines into sentences."),
    "passages": Option(False, help="Leave out headings, lists, tables and links, as 3.1 does."),
    "heldout_share": Option(0.01, 0, help="Share of the documents held out for evaluation.", below=1),
    "heldout_pairs": Option(5000, 1, help="Maximum number of held-out pairs."),
    "heldout_length": Option(0, 0, help="Maximum number of tokens per held-out pair; 0: as in the first phase."),
    "limit_characters": Option(0, 0, help="Read the first N characters of each source only; 0: all."),
    "max_tokens": MAX_TOKENS,
}
TEXT_OPTIONS: Options = {  # options of one text or a pair
    "max_length": Option(
        128, 5, CODE, "Maximum number of tokens per input; longer pairs are truncated, longest text first."
    ),
    "long": Option(
        "truncate",
        help="Longer inputs: truncate, head+tail, or windows with the mean or max of their scores.",
        choices=("truncate", "head+tail", "mean", "max"),
    ),
    "doc_stride": Option(128, 1, "as for SQuAD", "Tokens between the starts of two windows."),
}
POOLED_VECTOR = Option(
    "auto",
    source="ours",
    help="Vector of a text: cls through the pooler, the mean of the last layer, or auto: by folds for a solved head.",
    choices=("auto", "mean", "cls"),
)
GLUE_OPTIONS: Options = {"dir": DIR, **TEXT_OPTIONS, "pooling": POOLED_VECTOR, **ROW_OPTIONS}
WINDOW_OPTIONS: Options = {
    "max_length": Option(384, None, CODE, "Maximum number of tokens per window, question included."),
    "doc_stride": Option(128, 1, CODE, "Tokens between the starts of two windows."),
    "max_query_length": Option(64, 1, CODE, "Maximum number of tokens per question; longer ones are truncated."),
    "max_answer_length": Option(30, 1, CODE, "Maximum number of tokens per answer."),
}
SPLIT_OPTIONS: Options = {  # options of a person's own data
    "group": Option("", help="Column whose rows with equal values stay in the same split."),
    "dev_share": Option(0.1, 0, "ours", "Share of the training rows for dev, unless there is a dev file.", below=1),
    "test_share": Option(0.1, 0, "ours", "Share of the rows for test, if there is one file only.", below=1),
    "folds": Option(0, 0, help="Number of folds; 0: none."),
    "fold": Option(0, 0, help="Fold that is dev, from 0."),
    "sep": Option("", help="Character between the cells of CSV and TSV files (default: found in each file)."),
    "encoding": Option("", help="Encoding of the files (default: UTF-8, UTF-16, cp1252 or GB18030, as found in each)."),
}
UNLABELLED_ROWS = Option("error", None, help="Rows without a label: error, or drop them from training and scores.")
CLASSIFY_OPTIONS: Options = {
    "dir": Option(
        "", help="File, folder with train, dev and test, or Hub data set of texts and labels.", is_input=True
    ),
    "text": Option([], help="Column of the texts, or two columns for pairs (default: guessed from the names)."),
    "label": Option(
        [],
        help="Column of the labels, or columns of 0 and 1 or of shares, one for each label, as 'probability_*' names "
        "them (default: guessed).",
    ),
    "problem_type": Option(
        "auto",
        help="single_label_classification, multi_label_classification or regression (default: as the labels are).",
        choices=("auto", "single_label_classification", "multi_label_classification", "regression"),
    ),
    "labels": Option([], help="Names of the positions, if the labels are lists of 0 and 1 (default: numbers)."),
    "label_sep": Option("", help="Text between several labels in a cell, such as ; (default: |)."),
    "unlabelled": UNLABELLED_ROWS,
    **SPLIT_OPTIONS,
    "threshold": Option(
        "",
        help="Decide two classes, or each of several labels, by a threshold: f1, f0.5, precision=0.95 or recall=0.9.",
    ),
    "positive": Option("", help="Class that data.threshold is for (default: the rarer one of train)."),
    "target_accuracy": Option(
        0.0, 0, help="Answer only texts at a confidence with this accuracy of the answers; 0: all.", below=1
    ),
    "class_weights": Option({}, help='"balanced", or a table of a weight for each label (default: equal weights).'),
    "weight": Option("", help="Column of a weight for each row in the loss, the solved head and the baselines."),
    "weighted_scores": Option(False, help="Whether the weights of data.weight are those of the rows in scores too."),
    "gold": Option("", help="Column of the right labels for scores, where the labels are soft."),
    **TEXT_OPTIONS,
    "pooling": POOLED_VECTOR,
    **ROW_OPTIONS,
}
SQUAD_OPTIONS: Options = {
    "dir": Option(
        "",
        help="Folder of the official files, or your questions: file, files joined by commas, folder with train, dev "
        "and test, or Hub data set (default: the Hub's SQuAD).",
        is_input=True,
    ),
    "language": Option(
        "",
        help="How answers are compared: en as the official scripts, zh over characters as CMRC (default: by contexts).",
        choices=("", "en", "zh"),
    ),
    **SPLIT_OPTIONS,
    "train_file": Option("", help="Training file in SQuAD's format (default: the official one).", is_input=True),
    "extra_train": Option("", help="Fine-tune on this file in SQuAD's format first.", is_input=True),
    **ROW_OPTIONS,
    **WINDOW_OPTIONS,
}
SWAG_OPTIONS: Options = {
    "dir": DIR,
    "max_length": Option(128, 5, "ours", "Maximum number of tokens per choice."),
    **ROW_OPTIONS,
}
NER_OPTIONS: Options = {
    "dir": Option(
        "", help="File, folder or Hub data set of sentences (default: CoNLL-2003 from the Hub).", is_input=True
    ),
    "label": Option([], help="Column of the tags: its name, or in CoNLL files its number (default: by the form)."),
    "class_weights": Option(
        {}, help='"balanced", or a table of a weight for each type and for O (default: equal weights).'
    ),
    "scheme": Option("", help="words: each tag is a class (default: guessed).", choices=("", "entities", "words")),
    "unlabelled": UNLABELLED_ROWS,
    **SPLIT_OPTIONS,
    "threshold": Option("", help="Redact words by a threshold with this recall of dev's names, such as recall=0.99."),
    "max_length": Option(512, 3, "5.3: maximal context", "Maximum number of tokens per sequence."),
    "context": Option(True, None, "5.3", "Add the surrounding sentences as context."),
    "order": Option(
        "",
        help="documents: train on the sentences of a document together, which computes a window that they share once.",
        choices=("", "documents"),
    ),
    "features": Option(
        "",
        None,
        "Table 7",
        "Train a BiLSTM on these layers of a frozen encoder.",
        choices=("", "embeddings", "second-to-last", "last", "sum-last-four", "concat-last-four", "sum-all"),
    ),
    "half_features": Option(False, help="Store features in 16 bits per number instead of 32."),
    "features_dir": Option("", help="Folder of stored features (default: huggingface_hub's cached assets)."),
    **ROW_OPTIONS,
}


def reads_own_data(options: Options) -> bool:
    """Return whether a task with these options reads a person's own data and divides them into splits."""
    return "dev_share" in options


def list_defaults(options: Options) -> dict[str, Any]:
    """Return the default of each option."""
    return {name: option.default for name, option in options.items()}
