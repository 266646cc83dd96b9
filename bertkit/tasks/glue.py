"""GLUE: nine tasks and a diagnostic set of one text or a pair, with a class or a score (paper section 4.1), as Tasks.

One table, a row a task; everything below it is the same for all. The official files and the Hub's copy of them give the
same texts and the same labels, which are matched by name and never by position.

The paper leaves WNLI out of its averages and submits the majority class; here it is trained like the others, and only
the submission (`bertkit.inference.glue_submission`) follows the paper.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.formats.glue import (
    GLUE_HUB,
    Benchmark,
    SentenceExamples,
    Split,
    read_answers,
    read_copy,
    read_examples,
    read_folder,
    read_gold,
    read_labels,
)
from bertkit.data.sequences import Sequences, encode_texts, pad
from bertkit.errors import UsageError
from bertkit.metrics.glue import compute_scores
from bertkit.reports.tables import ScoreRow
from bertkit.system.progress import Report
from bertkit.tasks import finetuning
from bertkit.tasks.task import LONGEST_SHOWN, Task, repeat_run, use_transformers

BASE_TEST, LARGE_TEST = "BERT-base, test", "BERT-large, test"  # Table 1
BASE_DEV = "BERT-base, dev"  # Table 5


def list_splits(folder: str, config: str, rows: int) -> dict[str, Split]:
    """The three files of a task."""
    return {
        "train": Split(f"{folder}/train.tsv", (config, "train"), needed=True),
        "dev": Split(f"{folder}/dev.tsv", (config, "validation"), needed=True, scores="{}"),
        "test": Split(f"{folder}/test.tsv", (config, "test"), submission=f"{folder}.tsv", rows=rows),
    }


PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}
PREMISE = {"premise": "sentence1", "hypothesis": "sentence2"}
NLI = {label: label for label in ("entailment", "neutral", "contradiction")}
TWO_WAY = {label: label for label in ("entailment", "not_entailment")}
AX = Split("diagnostic/diagnostic.tsv", ("ax", "test"), submission="AX.tsv", rows=1104)

BENCHMARKS = (
    Benchmark(
        name="cola",
        title="CoLA",
        texts={"sentence": 3},
        label=1,
        labels={"0": "unacceptable", "1": "acceptable"},
        metrics=("matthews_correlation",),
        splits=list_splits("CoLA", "cola", 1063),
        majority="acceptable",
        paper={"matthews_correlation": {BASE_TEST: 0.521, LARGE_TEST: 0.605}},
        bare=4,
    ),
    Benchmark(
        name="sst2",
        title="SST-2",
        texts={"sentence": "sentence"},
        label="label",
        labels={"0": "negative", "1": "positive"},
        metrics=("accuracy",),
        splits=list_splits("SST-2", "sst2", 1821),
        majority="positive",
        paper={"accuracy": {BASE_TEST: 0.935, LARGE_TEST: 0.949, BASE_DEV: 0.927}},
    ),
    Benchmark(
        name="mrpc",
        title="MRPC",
        texts={"sentence1": "#1 String", "sentence2": "#2 String"},
        label="Quality",
        labels={"0": "not_equivalent", "1": "equivalent"},
        metrics=("f1", "accuracy"),
        splits=list_splits("MRPC", "mrpc", 1725),
        majority="equivalent",
        paper={"f1": {BASE_TEST: 0.889, LARGE_TEST: 0.893}, "accuracy": {BASE_DEV: 0.867}},
    ),
    Benchmark(
        name="stsb",
        title="STS-B",
        texts=PAIR,
        label="score",
        labels={},
        metrics=("spearmanr", "pearson"),
        splits=list_splits("STS-B", "stsb", 1379),
        majority="2.701",
        paper={"spearmanr": {BASE_TEST: 0.858, LARGE_TEST: 0.865}},
    ),
    Benchmark(
        name="qqp",
        title="QQP",
        texts={"question1": "question1", "question2": "question2"},
        label="is_duplicate",
        labels={"0": "not_duplicate", "1": "duplicate"},
        metrics=("f1", "accuracy"),
        splits=list_splits("QQP", "qqp", 390_965),
        majority="not_duplicate",
        paper={"f1": {BASE_TEST: 0.712, LARGE_TEST: 0.721}},
        broken=True,
    ),
    Benchmark(
        name="mnli",
        title="MNLI",
        texts=PREMISE,
        label="gold_label",
        labels=NLI,
        metrics=("accuracy",),
        splits={
            "train": Split("MNLI/train.tsv", ("mnli", "train"), needed=True),
            "dev_matched": Split("MNLI/dev_matched.tsv", ("mnli", "validation_matched"), needed=True, scores="{}"),
            "dev_mismatched": Split("MNLI/dev_mismatched.tsv", ("mnli", "validation_mismatched"), scores="{}_mm"),
            "test_matched": Split(
                "MNLI/test_matched.tsv", ("mnli", "test_matched"), submission="MNLI-m.tsv", rows=9796
            ),
            "test_mismatched": Split(
                "MNLI/test_mismatched.tsv", ("mnli", "test_mismatched"), submission="MNLI-mm.tsv", rows=9847
            ),
            "ax": AX,
        },
        majority="contradiction",
        paper={
            "accuracy": {BASE_TEST: 0.846, LARGE_TEST: 0.867, BASE_DEV: 0.844},
            "accuracy_mm": {BASE_TEST: 0.834, LARGE_TEST: 0.859},
        },
    ),
    Benchmark(
        name="qnli",
        title="QNLI",
        texts={"question": "question", "sentence": "sentence"},
        label="label",
        labels=TWO_WAY,
        metrics=("accuracy",),
        splits=list_splits("QNLI", "qnli", 5463),
        majority="not_entailment",
        paper={"accuracy": {BASE_TEST: 0.905, LARGE_TEST: 0.927, BASE_DEV: 0.884}},
    ),
    Benchmark(
        name="rte",
        title="RTE",
        texts=PAIR,
        label="label",
        labels=TWO_WAY,
        metrics=("accuracy",),
        splits=list_splits("RTE", "rte", 3000),
        majority="entailment",
        paper={"accuracy": {BASE_TEST: 0.664, LARGE_TEST: 0.701}},
    ),
    Benchmark(
        name="wnli",
        title="WNLI",
        texts=PAIR,
        label="label",
        labels={"0": "not_entailment", "1": "entailment"},
        metrics=("accuracy",),
        splits=list_splits("WNLI", "wnli", 146),
        majority="not_entailment",
        submits_majority=True,
        note="WNLI's dev set contradicts its training set on purpose, and the paper submits the majority class",
    ),
    Benchmark(
        name="ax",
        title="AX",
        texts=PREMISE,
        label="",
        labels=NLI,
        metrics=(),
        splits={"ax": replace(AX, needed=True)},
        majority="contradiction",
    ),
)

GLUE_RECIPE = finetuning.FINETUNING_RECIPE | {
    "batch_size": 32,  # section 4.1
    "data": {
        "dir": "",  # empty: the Hub's data set
        "max_length": 128,
        "max_train_samples": 0,  # the first so many; 0: all
    },
    "train": finetuning.TRAIN
    | {
        "num_train_epochs": 3.0,  # section 4.1
        "learning_rate": 2e-5,  # the least of section 4.1's four; --grid tries all
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    },
}

# The grid of `--grid`: section 4.1's learning rates, A.3's batch sizes and epochs.
GRID = {
    "train.learning_rate": [5e-5, 4e-5, 3e-5, 2e-5],
    "batch_size": [16, 32],
    "train.num_train_epochs": [2.0, 3.0, 4.0],
}


def find_benchmark(name: str) -> Benchmark:
    """The row of a task in any spelling: `mnli`, `MNLI`, `SST-2`.

    Raises:
        UsageError: there is none.
    """
    plain = name.lower().replace("-", "").replace("_", "")
    for row in BENCHMARKS:
        if row.name == plain:
            return row
    raise UsageError(f"unknown task {name!r}; the GLUE tasks are {', '.join(row.name for row in BENCHMARKS)}")


# --- The data ---------------------------------------------------------------------------------------------------------


def load(row: Benchmark, options: Mapping[str, Any], report: Report) -> dict[str, SentenceExamples]:
    """The examples of every split there is; one that is missing and not needed is named."""
    folder = Path(options["dir"])
    tables = read_folder(row, folder) if options["dir"] else read_copy(row, report)
    for name, split in row.splits.items():
        if name not in tables:
            report(f"{row.title}: {folder / split.file if options['dir'] else name} is not there and is passed over")
        elif tables[name].broken:
            report(f"{tables[name].source}: {len(tables[name].broken):,} broken rows are passed over")
    examples = {name: read_examples(row, table, not row.splits[name].submission) for name, table in tables.items()}
    if (count := options["max_train_samples"]) and "train" in examples:
        texts, labels = examples["train"]["texts"], examples["train"]["labels"]
        examples["train"] = {"texts": [column[:count] for column in texts], "labels": labels[:count]}
    report(f"{row.title}: " + ", ".join(f"{name} {len(found['texts'][0]):,}" for name, found in examples.items()))
    return examples


def encode(examples: SentenceExamples, tokenizer: Any, recipe: Mapping[str, Any], split: str) -> Sequences:
    """The sequences of a split."""
    return encode_texts(examples["texts"], examples["labels"], tokenizer, recipe["data"]["max_length"])


# --- The model --------------------------------------------------------------------------------------------------------


def check(row: Benchmark, recipe: Mapping[str, Any]) -> None:
    """Nothing, or a UsageError about an option."""
    start = "a BERT to fine-tune" if row.metrics else "a model that was fine-tuned on MNLI"
    finetuning.check_recipe(row.name, recipe, {"max_length": 5, "max_train_samples": 0}, start)


def configure(row: Benchmark, recipe: Mapping[str, Any], tokenizer: Any, examples: Any) -> dict[str, Any]:
    """The labels by name; a score is one label. The vocabulary has to hold the tokenizer's tokens."""
    names = list(row.labels.values()) or ["similarity"]
    # The type is for plain transformers, whose pipeline would show a sigmoid of a score.
    kind = "single_label_classification" if row.labels else "regression"
    settings: dict[str, Any] = {"id2label": dict(enumerate(names)), "problem_type": kind}
    return settings if tokenizer is None else settings | {"vocab_size": len(tokenizer)}


# --- Scores -----------------------------------------------------------------------------------------------------------


def summarize(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, L) the logits."""
    return outputs.logits.float()


def decide(row: Benchmark, logits: np.ndarray) -> np.ndarray:
    """(S,) the likeliest label's place, or the score, of logits (S, L)."""
    return logits.argmax(axis=1) if row.labels else logits[:, 0]


def score(row: Benchmark, logits: np.ndarray, data: Sequences) -> dict[str, float]:
    """The task's metrics, as fractions.

    Raises:
        UsageError: the logits are no numbers, as those of a model that has diverged.
    """
    if not np.isfinite(logits).all():
        raise UsageError(finetuning.DIVERGED)
    return compute_scores(row.metrics, decide(row, logits), data.labels)


def baseline(row: Benchmark, train: Sequences, dev: Sequences) -> dict[str, float]:
    """What the most frequent label of the dev set scores on it, or any constant: `majority_…` for every metric."""
    constant = np.bincount(dev.labels).argmax() if row.labels else 0.0
    scores = compute_scores(row.metrics, np.full(len(dev), constant), dev.labels)
    return {f"majority_{name}": value for name, value in (scores | {"score": scores[row.metrics[0]]}).items()}


def diagnose(row: Benchmark, metrics: Mapping[str, Any]) -> list[str]:
    """A warning where knowing nothing has as much of one of the task's metrics, with its likely causes."""
    lines = [line for line in list_rows(row) if line.baselines]
    low = next((line for line in lines if metrics[line.key] <= metrics[f"majority_{line.key}"]), None)
    if low is None:
        return []
    value, least = low.show(metrics[low.key]), low.show(metrics[f"majority_{low.key}"])
    constant = f"{'the majority class' if row.labels else 'a constant'} ({least})"
    note = f"; {row.note}" if row.note else ""
    return [
        f"warning: {low.name} ({value}) is not above {constant}. Likely causes: a learning rate that "
        "is too high, too few updates or an unlucky seed (try --set train.learning_rate=1e-5, --set preset=stable or "
        f"--restarts 5), or labels in another order than the model's{note}"
    ]


def spell(row: Benchmark, values: np.ndarray, clip: bool) -> list[str]:
    """Decisions in the official spelling; scores to their last digit, or clipped to 0 to 5 as the leaderboard wants."""
    if not row.labels:
        return [f"{min(max(float(value), 0.0), 5.0):.3f}" if clip else repr(float(value)) for value in values]
    spellings = list(row.labels)
    return [spellings[value] for value in values]


def spell_majority(row: Benchmark) -> str:
    """The answer of a submission without a model."""
    spellings = {name: spelling for spelling, name in row.labels.items()}
    return spellings.get(row.majority, row.majority)


def predict(row: Benchmark, logits: np.ndarray, data: Sequences, split: str) -> dict[str, str]:
    """The file of a split's predictions, in the leaderboard's form, and of classes also their confusion matrix."""
    submission, answers = row.splits[split].submission, decide(row, logits)
    name = submission or Path(row.splits[split].file).name
    files = {name: write_predictions(spell(row, answers, clip=bool(submission)))}
    if row.labels and not submission:
        files[f"{split}.figures.json"] = json.dumps([confuse(row, answers, data.labels)]) + "\n"
    return files


def confuse(row: Benchmark, answers: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The figure of how often each label, down, was taken for each, across (see `bertkit.analysis.page`)."""
    counts = np.zeros((len(row.labels), len(row.labels)), int)
    np.add.at(counts, (labels, answers), 1)
    names = list(row.labels.values())
    return {"kind": "matrix", "title": "Confusion matrix", "labels": names, "counts": counts.tolist()}


def write_predictions(answers: Sequence[str]) -> str:
    """The leaderboard's form: a line of names, then number and answer."""
    return "index\tprediction\n" + "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))


@torch.no_grad()
def show_examples(
    row: Benchmark, model: nn.Module, tokenizer: Any, examples: Mapping[str, SentenceExamples], count: int = 5
) -> list[str]:
    """The first examples of the evaluated split, with the model's answer and the right one."""
    split = next((name for name in examples if row.splits[name].scores), None)
    if split is None:
        return []
    texts = [column[:count] for column in examples[split]["texts"]]
    data = encode_texts(texts, examples[split]["labels"][:count], tokenizer, model.config.max_position_embeddings)
    batch = {name: column.to(model.device) for name, column in pad(data.__getitems__(range(len(data)))).items()}
    answers = decide(row, model(**batch).logits.float().cpu().numpy())
    show = list(row.labels.values()).__getitem__ if row.labels else "{:.1f}".format
    shown = [[shorten(text, LONGEST_SHOWN, placeholder="…") for text in column] for column in texts]
    return [
        f"{'  |  '.join(text)}  →  {show(answer)}  ({show(label)})"
        for text, answer, label in zip(zip(*shown, strict=True), answers, data.labels, strict=True)
    ]


# --- Scoring files of anything ----------------------------------------------------------------------------------------


def score_files(row: Benchmark, gold: Path, predictions: Path) -> dict[str, float]:
    """The scores of a file of predictions beside an official file with labels; `score` is the paper's metric.

    Predictions are in the leaderboard's form, or an answer a line; labels in the official spelling or by name.

    Raises:
        UsageError: a file that cannot be read, a gold file without labels, an answer the task does not have, or another
            number of answers.
    """
    labelled = next((name for name, split in row.splits.items() if split.scores), None)
    if labelled is None:
        raise UsageError(f"{row.name} has no labels, so nothing can be scored; submit it to the leaderboard")
    labels = read_labels(row, read_gold(row, labelled, gold))
    answers = read_answers(row, predictions)
    if len(answers) != len(labels):
        raise UsageError(
            f"{predictions} has {len(answers):,} answers and {gold} {len(labels):,} labels; give one for each"
        )
    scores = compute_scores(row.metrics, answers, labels)
    return scores | {"score": scores[row.metrics[0]]}


# --- The tasks --------------------------------------------------------------------------------------------------------

SCORE_NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
}


def list_rows(row: Benchmark) -> tuple[ScoreRow, ...]:
    """The lines of a task's table: each metric on each evaluated split."""
    rows = []
    for name, split in row.splits.items():
        for metric in row.metrics if split.scores else ():
            key, first = split.scores.format(metric), split.scores == "{}"
            rows.append(
                ScoreRow(
                    SCORE_NAMES[metric] if first else f"{SCORE_NAMES[metric]}, {name.rpartition('_')[2]}",
                    key,
                    {"the majority class" if row.labels else "a constant": f"majority_{metric}"} if first else {},
                    "fraction",
                    row.paper.get(key, {}),
                )
            )
    return tuple(rows)


def suggest(row: Benchmark, output: Path, recipe: Mapping[str, Any]) -> list[str]:
    """What to do with a fine-tuned model."""
    dev = next((split.file for split in row.splits.values() if split.scores), None)
    if dev is None:
        return []
    gold, ours = Path(recipe["data"].get("dir") or "GLUE", dev), output / "predictions" / Path(dev).name
    given = 'dict(text="A man eats.", text_pair="Somebody eats.")' if len(row.texts) > 1 else '"A man eats."'
    call = f'pipeline("text-classification", {json.dumps(str(output))})({given})'
    grid = [f"bertkit glue --task {row.name} {repeat_run(output, 'grid')} --grid  # the paper's"]
    return [
        *(grid if recipe["train"].get("max_steps", -1) <= 0 else []),  # by which the grid's epochs would mean nothing
        f"bertkit score glue --task {row.name} {quote(str(gold))} {quote(str(ours))}  # the scores, again",
        use_transformers(f"from transformers import pipeline; print({call})"),
    ]


def make_task(row: Benchmark) -> Task:
    """The Task of a row."""
    trains = "train" in row.splits
    settings = {"checkpoint": GLUE_RECIPE["checkpoint"]} if trains else {"checkpoint": ""}
    train = GLUE_RECIPE["train"] if trains else GLUE_RECIPE["train"] | {"eval_strategy": "no"}
    return Task(
        name=row.name,
        recipe={"task": row.name} | GLUE_RECIPE | settings | {"train": train},
        stable=finetuning.STABLE,
        metric=row.metrics[0] if row.metrics else "",
        check=partial(check, row),
        head=lambda options: "BertForSequenceClassification",
        load=partial(load, row),
        tokenize=finetuning.tokenize,
        configure=partial(configure, row),
        encode=encode,
        collate=pad,
        summarize=summarize,
        score=partial(score, row),
        baseline=partial(baseline, row),
        table=list_rows(row),
        examples=partial(show_examples, row),
        diagnose=partial(diagnose, row),
        suggest=partial(suggest, row),
        splits={name: split.scores for name, split in row.splits.items() if split.scores},
        unlabelled=tuple(name for name, split in row.splits.items() if split.submission),
        predict=partial(predict, row),
        command=f"glue --task {row.name}",
        title=row.title,
        copies={name: (GLUE_HUB, *split.hub) for name, split in row.splits.items()},
        folder="glue",
        pairs=len(row.texts) == 2,
    )


GLUE = {row.name: make_task(row) for row in BENCHMARKS}
