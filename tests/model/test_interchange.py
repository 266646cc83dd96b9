"""Models trained here answer the same in plain transformers."""

import json

import pytest
import torch
import transformers

import bertkit
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.conftest import collect, make_batch, shape_for
from tests.world import CASES


@pytest.mark.parametrize("case", ["pretrain", "pretrain, mlm", "sst2", "stsb", "squad2", "swag", "ner"])
def test_plain_transformers_answers_the_same(case, tmp_path):
    task, make_recipe, _ = CASES[case]
    steps = {"precision": "fp32", "train": {"max_steps": 6, "learning_rate": 1e-3, "eval_strategy": "no"}}
    run(Recipe.make(task, make_recipe(tmp_path), steps), output=tmp_path / "run")
    head = json.loads((tmp_path / "run" / "config.json").read_text())["architectures"][0]
    models = [getattr(library, head).from_pretrained(tmp_path / "run").eval() for library in (bertkit, transformers)]
    batch = shape_for(head, make_batch([5, 23, 11, 7], models[0].config.vocab_size))
    ours, stock = (collect(model(**batch), batch["attention_mask"]) for model in models)
    assert ours.keys() == stock.keys()
    for name, values in stock.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-5)
