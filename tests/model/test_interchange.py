"""Checkpoints trained here in other programs (transformers, sentence-transformers, ONNX), and back."""

import json

import numpy as np
import pytest
import torch
import transformers

import bertkit
from bertkit.data.tokenizer import load_tokenizer
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.world import CASES

STOCK = {
    "pretrain": transformers.AutoModelForPreTraining,
    "pretrain, mlm": transformers.AutoModelForMaskedLM,
    "sst2": transformers.AutoModelForSequenceClassification,
    "stsb": transformers.AutoModelForSequenceClassification,
    "squad2": transformers.AutoModelForQuestionAnswering,
    "swag": transformers.AutoModelForMultipleChoice,
    "ner": transformers.AutoModelForTokenClassification,
}
PIPELINES = {
    "pretrain": ("fill-mask", ["a [MASK] b", "[MASK] a"]),
    "sst2": ("text-classification", ["a good film", "bad"]),
    "ner": ("token-classification", ["a good word1", "bad bad"]),
}
LENGTHS = (5, 23, 11)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Case of the conformance tests -> the directory of a run of six updates; each is trained once."""
    done = {}

    def train(case):
        if case not in done:
            folder = tmp_path_factory.mktemp("run")
            task, make_recipe, _ = CASES[case]
            recipe = make_recipe(folder)
            steps = {"train": {"max_steps": 6, "learning_rate": 1e-3, "eval_strategy": "no"}}
            run(Recipe.make(task, recipe, steps, {"precision": "fp32"}), output=folder / "run")
            done[case] = folder / "run"
        return done[case]

    return train


def load_ours(folder, **options):
    """Load the model of a run as the class that its configuration names."""
    head = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(bertkit, head).from_pretrained(folder, **options).eval()


def make_batch(folder, choices=0):
    """Return random padded sequences of different lengths: (B, T), or (1, B, T) as choices."""
    torch.manual_seed(0)
    known = len(load_tokenizer(str(folder)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(5, known, mask.shape) * mask
    segments = (torch.arange(max(LENGTHS)) >= 3).long() * mask
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
    return {name: column[None] for name, column in batch.items()} if choices else batch


def list_outputs(outputs, mask):
    """Return the tensors of a model's output; token outputs without padding."""
    found = []
    for value in outputs.to_tuple():
        is_wise = value.shape[:2] == mask.shape and mask.dim() == 2
        found.append(value[mask.bool()] if is_wise else value)
    return found


@pytest.mark.parametrize("case", STOCK)
def test_plain_transformers_answers_the_same(case, train):
    folder = train(case)
    batch = make_batch(folder, choices=case == "swag")
    with torch.no_grad():
        ours, stock = load_ours(folder)(**batch), STOCK[case].from_pretrained(folder).eval()(**batch)
    assert type(stock).__module__.startswith("transformers")
    pairs = list(zip(*(list_outputs(outputs, batch["attention_mask"]) for outputs in (ours, stock)), strict=True))
    assert pairs
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", PIPELINES)
def test_a_stock_pipeline_runs_either_model_to_the_same_end(case, train):
    folder, (name, texts) = train(case), PIPELINES[case]
    # The pretrained model has two heads; a stock class with one of them is created.
    head = {"pretrain": bertkit.BertForMaskedLM}.get(case)
    ours = head.from_pretrained(folder).eval() if head else load_ours(folder)
    tokenizer = load_tokenizer(str(folder))
    sides = [
        transformers.pipeline(name, model=model, tokenizer=tokenizer, device="cpu")(texts)
        for model in (ours, str(folder))
    ]
    assert len(sides[0]) == len(texts)
    assert flatten(sides[0]) == pytest.approx(flatten(sides[1]), abs=1e-5)


def flatten(found):
    """Flatten nested lists and mappings to a mapping from path to number; texts become part of the path."""
    if isinstance(found, list):
        return {f"{place}/{key}": value for place, part in enumerate(found) for key, value in flatten(part).items()}
    words = ",".join(str(value) for value in found.values() if not isinstance(value, float | np.floating))
    return {f"{words}/{key}": value for key, value in found.items() if isinstance(value, float | np.floating)}


# --- Training by others -----------------------------------------------------------------------------------------------


def make_data(folder, count=16):
    """Return texts in which one word decides the class."""
    tokenizer = load_tokenizer(str(folder))
    texts = [f"word{number} {'good' if number % 2 else 'bad'} word{number % 3}" for number in range(count)]
    columns = tokenizer(texts, padding=True, return_tensors="pt")
    labels = torch.arange(count) % 2
    return [{name: column[row] for name, column in columns.items()} | {"labels": labels[row]} for row in range(count)]


def score(model, data):
    """Return the accuracy."""
    batch = torch.utils.data.default_collate(data)
    with torch.no_grad():
        return (model.eval()(**batch).logits.argmax(-1) == batch["labels"]).float().mean().item()


def test_the_stock_trainer_trains_our_class(train, tmp_path):
    data = make_data(train("sst2"))
    model = load_ours(train("sst2"))
    args = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=60,
        learning_rate=3e-3,
        per_device_train_batch_size=16,
        report_to=[],
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    assert score(model, data) == 1.0
    trainer.save_model(tmp_path / "saved")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert score(again, data) == 1.0
