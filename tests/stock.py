"""GLUE with plain transformers, for the comparison in recipes/RESULTS.md. It uses bertkit's optimizer only.

    python -m tests.stock --task rte --data glue --model DIR --seeds 42 43 44 45 46

Stock BertForSequenceClassification, tokenizer, padding collator and Trainer, on the same files with the same
hyper-parameters; prints one JSON line per seed. Not a test: it takes minutes.
"""

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from bertkit.model.optim import BertAdam

# folder, header, texts, label, classes
TASKS = {
    "cola": ("CoLA", False, (3,), 1, ("0", "1")),
    "sst2": ("SST-2", True, (0,), 1, ("0", "1")),
    "stsb": ("STS-B", True, (7, 8), 9, None),
    "rte": ("RTE", True, (1, 2), 3, ("entailment", "not_entailment")),
}


def read(folder, split, header, texts, label, classes):
    with (folder / f"{split}.tsv").open(encoding="utf-8", newline="\n") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[header:]
    labels = [float(row[label]) if classes is None else classes.index(row[label]) for row in rows]
    return [[row[i] for i in texts] for row in rows], labels


def encode(texts, labels, tokenizer):
    columns = [list(column) for column in zip(*texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=128)
    return [{"labels": label} | {key: encoded[key][i] for key in encoded} for i, label in enumerate(labels)]


def score(task, prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    if task == "stsb":
        return {"pearson": pearsonr(logits[:, 0], labels)[0], "score": spearmanr(logits[:, 0], labels)[0]}
    guesses = logits.argmax(-1)
    return {"score": (matthews_corrcoef if task == "cola" else accuracy_score)(labels, guesses)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--max-train-samples", type=int)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--optim", choices=("bert_adam", "adamw_torch"), default="bert_adam")
    options = parser.parse_args()
    folder, *form = TASKS[options.task]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts, labels = read(options.data / folder, "train", *form)
    texts, labels = texts[: options.max_train_samples], labels[: options.max_train_samples]
    train, dev = encode(texts, labels, tokenizer), encode(*read(options.data / folder, "dev", *form), tokenizer)
    for seed in options.seeds:
        set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.model, num_labels=1 if form[-1] is None else len(form[-1]), dtype=torch.float32
        )
        with tempfile.TemporaryDirectory() as output:
            arguments = TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=32,
                learning_rate=options.learning_rate,
                num_train_epochs=3,
                warmup_steps=0.1,
                adam_epsilon=1e-6,
                weight_decay=0.01,
                bf16=True,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=seed,
            )
            optimizer = (BertAdam, {"lr": options.learning_rate, "eps": 1e-6})
            trainer = Trainer(
                model,
                arguments,
                train_dataset=train,
                eval_dataset=dev,
                data_collator=DataCollatorWithPadding(tokenizer),
                optimizer_cls_and_kwargs=optimizer if options.optim == "bert_adam" else None,
            )
            start = time.monotonic()
            trainer.train()
            seconds = time.monotonic() - start
            scores = {name: round(float(value), 6) for name, value in score(options.task, trainer.predict(dev)).items()}
        named = {"task": options.task, "optim": options.optim, "seed": seed}
        print(json.dumps(named | scores | {"seconds": round(seconds, 1), "rows": len(np.array(labels))}), flush=True)


if __name__ == "__main__":
    main()
