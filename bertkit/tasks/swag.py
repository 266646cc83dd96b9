"""SWAG: which of four endings follows a sentence and the first words of the next one (paper section 4.4), as a Task.

A question is four sequences [CLS] context [SEP] start and ending [SEP]. Each one's C is scored by one and the same
vector, and the four scores go through a softmax; the bias that transformers adds moves all four alike and changes
nothing. Left out: the files train_full.csv and val_full.csv, and scoring predictions of other programs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.formats.swag import ENDINGS, HUB_SWAG, Situation, read_swag, read_swag_copy
from bertkit.data.sequences import Choices, encode_texts, pad_choices
from bertkit.errors import UsageError
from bertkit.metrics.glue import compute_scores
from bertkit.reports.tables import ScoreRow
from bertkit.system.progress import Report
from bertkit.tasks import finetuning
from bertkit.tasks.task import LONGEST_SHOWN, Task, repeat_run, use_transformers

SWAG_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}
SWAG_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
UNLABELLED = ("test",)
SWAG_PAPER = {"BERT-base, dev": 0.816, "BERT-large, dev": 0.866, "BERT-large, test": 0.863}  # Table 4

SWAG_RECIPE = finetuning.FINETUNING_RECIPE | {
    "batch_size": 16,  # section 4.4
    "data": {
        "dir": "",  # empty: the Hub's data set
        "max_length": 128,  # of each of the four; the paper names none
        "max_train_samples": 0,  # the first so many questions; 0: all
    },
    "train": finetuning.TRAIN
    | {
        "num_train_epochs": 3.0,  # section 4.4
        "learning_rate": 2e-5,  # section 4.4
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    },
}


# --- The data ---------------------------------------------------------------------------------------------------------


def check(recipe: Mapping[str, Any]) -> None:
    """Nothing, or a UsageError about an option."""
    finetuning.check_recipe("swag", recipe, {"max_length": 5, "max_train_samples": 0}, "a BERT to fine-tune")


def load(options: Mapping[str, Any], report: Report) -> dict[str, list[Situation]]:
    """The questions of train, dev and, if it is there, test; one that is not is named."""
    folder = Path(options["dir"])
    examples = read_folder(folder) if options["dir"] else read_swag_copy(SWAG_SPLITS, UNLABELLED)
    for name, file in SWAG_FILES.items():
        if name not in examples:
            report(f"SWAG: {folder / file if options['dir'] else name} is not there and is passed over")
    examples["train"] = examples["train"][: options["max_train_samples"] or None]
    report("SWAG: " + ", ".join(f"{name} {len(found):,}" for name, found in examples.items()))
    return examples


def read_folder(folder: Path) -> dict[str, list[Situation]]:
    """The official files in a folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the one that holds {SWAG_FILES['train']}: --data DIR")
    return {
        name: read_swag(folder / file, labelled=name not in UNLABELLED)
        for name, file in SWAG_FILES.items()
        if name not in UNLABELLED or (folder / file).exists()
    }


def encode(examples: Sequence[Situation], tokenizer: Any, recipe: Mapping[str, Any], split: str) -> Choices:
    """The questions of a split, four sequences each."""
    return encode_situations(examples, tokenizer, recipe["data"]["max_length"])


def encode_situations(situations: Sequence[Situation], tokenizer: Any, max_length: int) -> Choices:
    """Four sequences a question: A is the context, B the start and one of the endings."""
    pairs = [(one.context, f"{one.start} {ending}") for one in situations for ending in one.endings]
    answers = [one.answer for one in situations]
    sequences = encode_texts(list(zip(*pairs, strict=True)), None, tokenizer, max_length)
    return Choices(sequences, len(ENDINGS), None if None in answers else np.array(answers, np.int64))


def describe(data: Choices, split: str) -> list[str]:
    """How long the sequences are."""
    lengths = np.diff(data.sequences.ends, prepend=0)
    return [
        f"{split}: {len(data):,} questions of {data.count} sequences; "
        f"{lengths.mean():.1f} tokens on average, {lengths.max():,} in the longest"
    ]


def configure(recipe: Mapping[str, Any], tokenizer: Any, examples: Any) -> dict[str, Any]:
    """The vocabulary has to hold the tokenizer's tokens."""
    return {} if tokenizer is None else {"vocab_size": len(tokenizer)}


# --- Scores -----------------------------------------------------------------------------------------------------------


def summarize(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, C) the logits."""
    return outputs.logits.float()


def decide(logits: np.ndarray) -> np.ndarray:
    """(S,) the place of the likeliest ending, of logits (S, C).

    Raises:
        UsageError: the logits are no numbers, as those of a model that has diverged.
    """
    if not np.isfinite(logits).all():
        raise UsageError(finetuning.DIVERGED)
    return logits.argmax(axis=1)


def score(logits: np.ndarray, data: Choices) -> dict[str, float]:
    """The accuracy, a fraction; a UsageError as `decide`."""
    return compute_scores(("accuracy",), decide(logits), data.labels)


def baseline(train: Choices, dev: Choices) -> dict[str, float]:
    """What the place that is most often right in the dev set scores on it."""
    places = np.full(len(dev), np.bincount(dev.labels).argmax())
    value = compute_scores(("accuracy",), places, dev.labels)["accuracy"]
    return {"majority_accuracy": value, "majority_score": value}


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """A warning where always the same place scores as much."""
    if metrics["accuracy"] > metrics["majority_accuracy"]:
        return []
    found, least = (ACCURACY.show(metrics[key]) for key in ("accuracy", "majority_accuracy"))
    return [
        f"warning: accuracy ({found}) is not above the majority ending ({least}). Likely causes: a learning rate that "
        "is too high, too few questions or updates, or an unlucky seed (try --set train.learning_rate=1e-5, "
        "--set preset=stable or --set train.seed=43)"
    ]


# --- Files ------------------------------------------------------------------------------------------------------------


def predict(logits: np.ndarray, data: Choices, split: str) -> dict[str, str]:
    """A file named as the split's: number of the question and place of the ending, as CSV."""
    rows = "".join(f"{index},{place}\n" for index, place in enumerate(decide(logits)))
    return {SWAG_FILES[split]: f"index,pred\n{rows}"}


@torch.no_grad()
def show_examples(
    model: nn.Module, tokenizer: Any, examples: Mapping[str, Sequence[Situation]], count: int = 5
) -> list[str]:
    """The first questions of the dev set, with the model's ending and the right one."""
    situations = examples["dev"][:count]
    data = encode_situations(situations, tokenizer, model.config.max_position_embeddings)
    batch = pad_choices(data.__getitems__(range(len(data))))
    logits = model(**{name: column.to(model.device) for name, column in batch.items()}).logits
    return [
        f"{cut(one.context)}  |  {cut(one.start)}  →  {cut(one.endings[place])}  ({cut(one.endings[one.answer])})"
        for one, place in zip(situations, decide(logits.float().cpu().numpy()), strict=True)
    ]


def cut(text: str) -> str:
    """The text in one line that is not too long."""
    return shorten(text, LONGEST_SHOWN, placeholder="…")


# --- The task ---------------------------------------------------------------------------------------------------------

ACCURACY = ScoreRow("accuracy", "accuracy", {"the majority ending": "majority_accuracy"}, "fraction", SWAG_PAPER)


def suggest(output: Path, recipe: Mapping[str, Any]) -> list[str]:
    """What to do with a fine-tuned model."""
    path = json.dumps(str(output))
    call = f"from transformers import AutoModelForMultipleChoice as M; print(M.from_pretrained({path}))"
    again = repeat_run(output, "43", "train.seed=43")
    return [
        f"bertkit swag {again}  # another seed",
        use_transformers(call),
    ]


SWAG = Task(
    name="swag",
    recipe={"task": "swag"} | SWAG_RECIPE,
    stable=finetuning.STABLE,
    metric="accuracy",
    check=check,
    head=lambda options: "BertForMultipleChoice",
    load=load,
    tokenize=finetuning.tokenize,
    configure=configure,
    encode=encode,
    describe=describe,
    collate=pad_choices,
    summarize=summarize,
    score=score,
    baseline=baseline,
    table=(ACCURACY,),
    examples=show_examples,
    diagnose=diagnose,
    suggest=suggest,
    unlabelled=UNLABELLED,
    predict=predict,
    title="SWAG",
    copies={name: (*HUB_SWAG, split) for name, split in SWAG_SPLITS.items()},
    folder="swag",
)
