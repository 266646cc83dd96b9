"""Measure an epoch of the feature-based approach, with features from disk and from the encoder.

    python -m tests.feature_cache --data NER --model DIR --layers concat-last-four

The same head, sentences, batches and optimizer on both sides, in turn; prints seconds. Not a test: it takes minutes.
"""

import argparse
import tempfile
import time
from statistics import median

import torch

from bertkit.model.optim import BertAdam
from bertkit.model.precision import choose_precision
from bertkit.tasks import TASKS
from bertkit.tasks.ner import locate_words
from bertkit.training.recipe import Recipe
from bertkit.training.run import make_model
from tests.bench.measure import time_call


def run_epoch(model, batches, optimizer):
    """Train on every batch once, and return the losses."""
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=choose_precision("auto") == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batch_features(task, data, order):
    for numbers in order:
        yield task.collate(data.__getitems__(numbers))


def batch_tokens(data, order):
    """Return the same batches as token ids, with one label per word."""
    for numbers in order:
        batch = locate_words(data.words.__getitems__(numbers))
        labels = [torch.from_numpy(data[number]["labels"]) for number in numbers]
        yield batch | {"labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", default="concat-last-four")
    parser.add_argument("--units", type=int, default=768)
    parser.add_argument("--sentences", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    task = TASKS["ner"]
    with tempfile.TemporaryDirectory() as folder:
        options = {"dir": given.data, "features": given.layers, "features_dir": folder}
        recipe = Recipe.make(
            task,
            {
                "checkpoint": given.model,
                "data": options | {"max_train_samples": given.sentences},
                "model": {"bilstm_hidden_size": given.units},
            },
        )
        examples = task.load(recipe.data, print)
        tokenizer = task.tokenize(recipe, examples, print)
        start, lines = time.perf_counter(), []
        data = task.encode(examples["train"], tokenizer, recipe, "train", lines.append)
        print(f"the encoder, once: {time.perf_counter() - start:.1f} s; {lines[-1]}")
        torch.manual_seed(0)
        order = [part.tolist() for part in torch.randperm(len(data)).split(recipe.batch_size)]
        model = make_model(task, recipe, task.configure(recipe, tokenizer, examples)).train()
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = BertAdam(learned, lr=recipe.train["learning_rate"])
        first = {
            "on disk": model(**next(batch_features(task, data, order))).loss.item(),
            "computed": model(**next(batch_tokens(data, order))).loss.item(),
        }
        print(f"loss of the first batch, without an update: {first}")
        sides = {
            "on disk": lambda: run_epoch(model, batch_features(task, data, order), optimizer),
            "computed": lambda: run_epoch(model, batch_tokens(data, order), optimizer),
        }
        seconds = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, run in sides.items():
                seconds[name].append(time_call(run))
        rates = [slow / fast for slow, fast in zip(seconds["computed"], seconds["on disk"], strict=True)]
        medians = {name: round(median(found), 2) for name, found in seconds.items()}
        print(f"an epoch of {len(data):,} sentences, median: {medians} s; {median(rates):.2f} times as fast")


if __name__ == "__main__":
    main()
