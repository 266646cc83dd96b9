"""SQuAD with plain transformers, for the comparison in recipes/RESULTS.md.

    python -m tests.stock_squad --version 2 --data SQUAD --model DIR --seeds 42

Stock BertForQuestionAnswering and Trainer, with the same hyper-parameters, on the same windows as bertkit's, whose
optimizer, decoding and scores it uses; prints one JSON line per seed. Not a test: it takes an hour.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForQuestionAnswering, Trainer, TrainingArguments, set_seed

from bertkit.data.sequences import pad
from bertkit.data.spans import keep_top
from bertkit.data.tokenizer import load_tokenizer
from bertkit.model.optim import BertAdam
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", choices=("1", "2"), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--max-train-samples", type=int, default=0)
    parser.add_argument("--epochs", type=float)
    options = parser.parse_args()
    task = TASKS[f"squad{options.version}"]
    change = {"dir": str(options.data), "max_train_samples": options.max_train_samples}
    recipe = Recipe.make(task, {"data": change}, fits_model=False)
    tokenizer = load_tokenizer(options.model)
    examples = task.load(recipe.data, print)
    data = {split: task.encode(examples[split], tokenizer, recipe, split) for split in ("train", "dev")}
    for seed in options.seeds:
        set_seed(seed)
        model = AutoModelForQuestionAnswering.from_pretrained(options.model, dtype=torch.float32)
        assert type(model).__module__.startswith("transformers.")
        with tempfile.TemporaryDirectory() as output:
            arguments = TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=recipe.batch_size,
                per_device_eval_batch_size=32,
                learning_rate=recipe.train["learning_rate"],
                num_train_epochs=options.epochs or recipe.train["num_train_epochs"],
                train_sampling_strategy="group_by_length",  # else it computes on as much padding as text
                warmup_steps=recipe.train["warmup_steps"],
                adam_epsilon=recipe.train["adam_epsilon"],
                weight_decay=recipe.train["weight_decay"],
                bf16=True,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                logging_steps=0.05,
                report_to="none",
                disable_tqdm=True,
                label_names=["start_positions", "end_positions"],
                seed=seed,
            )
            trainer = Trainer(
                model,
                arguments,
                train_dataset=data["train"],
                data_collator=pad,
                optimizer_cls_and_kwargs=(BertAdam, {"lr": arguments.learning_rate, "eps": arguments.adam_epsilon}),
                preprocess_logits_for_metrics=lambda logits, labels: keep_top(*logits),
            )
            start = time.monotonic()
            trainer.train()
            seconds = time.monotonic() - start
            arguments.train_sampling_strategy = "sequential"  # otherwise the predictions would be reordered too
            scores = task.score(trainer.predict(data["dev"]).predictions, data["dev"])
        named = {"task": task.name, "seed": seed, "questions": len(examples["train"])}
        print(json.dumps(named | scores | {"seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
