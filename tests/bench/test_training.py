"""The training benchmarks: counts, equal training on both sides, and all documented figures."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertkit.bench import finetune, pretrain, training
from bertkit.bench.measure import BERTKIT, measure_growth
from bertkit.bench.training import (
    EXAMPLE,
    SAME_BATCHES,
    SORTED,
    Side,
    choose_size,
    collate_full,
    make_sides,
    train_epoch,
)
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from tests.official import write_checkpoint, write_glue

FIGURES = {
    "precision",
    "seconds",
    "samples_per_second",
    "tokens_per_second",
    "flops_per_second",
    "share_of_products",
    "peak_bytes",
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def tiny(monkeypatch):
    """Use few warm-up updates and the smallest size."""
    monkeypatch.setattr(training, "WARM_UP", 1)
    monkeypatch.setattr(training, "MEMORY", 1)
    monkeypatch.setitem(training.RELEASED_SIZES, "tiny", (1, 64))


def check_figures(found, sides):
    assert json.loads(json.dumps(found)) == found
    assert list(found["sides"]) == sides
    for name, figures in found["sides"].items():
        assert figures.keys() == FIGURES
        assert len(figures["seconds"]) == 2
        assert min(figures["seconds"]) > 0
        rate = found["sequences"] / figures["samples_per_second"]
        assert min(figures["seconds"]) <= rate <= max(figures["seconds"]), name
    assert found["ratios"].keys() == {"stock_same", "stock_best", "stock_example"}
    assert found["best"] not in (BERTKIT, EXAMPLE)
    assert found["losses"]["mean_difference"] < 1e-4
    assert len(found["losses"][BERTKIT]) == len(found["losses"]["stock"]) == found["updates"]


# --- What is counted --------------------------------------------------------------------------------------------------


def test_memory_is_what_a_call_adds():
    kept = torch.ones(1 << 22)  # 16 MiB that are there before
    grown = measure_growth(lambda: torch.ones(1 << 24).sum() + kept.sum(), torch.device("cpu"))
    if grown is None:
        pytest.skip("this system does not tell")
    assert 60 << 20 < grown < 120 << 20


def test_an_unknown_size_lists_those_there_are():
    assert choose_size("large")["num_attention_heads"] == 16
    with pytest.raises(
        UsageError, match="unknown size 'huge'; expected one of tiny, mini, small, medium, base, large, minilm"
    ):
        choose_size("huge")


# --- Fine-tuning ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fine_tuning_on_official_files(bert, glue, tiny):
    found, (table,) = finetune.bench_finetune(
        bert, glue, task="rte", batch_size=8, updates=2, repeats=2, compiled=False
    )
    check_figures(found, [BERTKIT, SAME_BATCHES, EXAMPLE, SORTED])
    assert found["sequences"] == 16
    assert [row[0].lines[0][0] for row in table.rows] == list(found["sides"])


@pytest.mark.slow
def test_fine_tuning_on_pairs_of_documentation(tiny, monkeypatch):
    monkeypatch.setattr(finetune, "PAIR_CHARACTERS", 100_000)
    found, _ = finetune.bench_finetune(size="tiny", batch_size=4, updates=2, repeats=2, compiled=False)
    check_figures(found, [BERTKIT, SAME_BATCHES, EXAMPLE, SORTED])
    assert 30 < found["tokens"] / found["sequences"] < 80


def test_made_up_pairs_have_mrpcs_lengths_and_half_of_them_go_on(bert):
    tokenizer = load_tokenizer(bert)
    sentence = "good bad word ? . " * 3
    documents = [[f"{sentence}{number}" for number in range(4000)]]
    rows = finetune.make_pairs(documents, tokenizer)
    lengths = np.diff(rows.ends, prepend=0)
    assert abs(lengths.mean() - finetune.PAIR_LENGTH) < 1
    assert abs(lengths.std() - finetune.PAIR_SPREAD) < 1
    assert finetune.SHORTEST_PAIR <= lengths.min() < lengths.max() <= finetune.LONGEST_PAIR
    assert abs(rows.labels.mean() - 0.5) < 0.05
    ids = finetune.tokenize_documents(documents, tokenizer).ids[:].tolist()
    text = " ".join(map(str, ids))
    for index in range(20):
        row = rows[index]
        second = int(row["token_type_ids"].argmax())
        first, rest = row["input_ids"][1 : second - 1], row["input_ids"][second:-1]
        assert row["input_ids"][[second - 1, -1]].tolist() == [tokenizer.sep_token_id] * 2
        if row["labels"]:
            assert " ".join(map(str, [*first, *rest])) in text


@pytest.mark.parametrize(
    ("data", "task", "message"),
    [
        ("glue", "", "--task and --data must be given together"),
        (None, "rte", "--task and --data must be given together"),
        ("glue", "squad1", "unknown task 'squad1'; the GLUE tasks are cola, "),
        ("glue", "ax", "ax has no training data; name another GLUE task with --task"),
        ("nowhere", "rte", "nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_line(bert, data, task, message):
    with pytest.raises(UsageError, match=message):
        finetune.bench_finetune(bert, data, task=task, compiled=False)


def test_too_few_rows_for_a_batch(bert, glue):
    with pytest.raises(UsageError, match=r"rows are too few for a batch of 512; give more data, or lower --batch-size"):
        finetune.bench_finetune(bert, glue, task="rte", batch_size=512, compiled=False)


# --- Pretraining ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "omega"], (40, 6, 8))
    documents = ("\n".join(" ".join(sentence) + "." for sentence in document) for document in words)
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.mark.slow
def test_pretraining_on_text(text, tiny):
    lines = []
    found, _ = pretrain.bench_pretrain(
        text, size="tiny", batch_size=4, length=32, updates=2, repeats=2, compiled=False, report=lines.append
    )
    check_figures(found, [BERTKIT, SAME_BATCHES, EXAMPLE])
    if found["memory"] is not None:
        assert any(line.startswith("memory beyond the weights: ") for line in lines)


def test_the_example_pads_to_the_full_length_and_labels_nothing_there():
    batch = {name: torch.ones(2, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    batch["next_sentence_label"] = torch.ones(2)
    filled = collate_full(SimpleNamespace(collate=lambda items: items), 5, batch)
    assert filled["input_ids"].tolist() == filled["attention_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert filled["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2
    assert filled["next_sentence_label"].shape == (2,)


# --- Both sides -------------------------------------------------------------------------------------------------------


def make_rte_sides(bert, glue, **given):
    task = TASKS["rte"]
    recipe = Recipe.make(task, {"checkpoint": bert, "batch_size": 8, "data": {"dir": str(glue)}} | given)
    prepared = prepare(recipe)
    rows = finetune.choose_rows(prepared.data["train"], 2, 8)
    return make_sides(task, recipe, prepared.settings, rows, False, ignore)


def test_sides_that_do_not_train_the_same_are_refused(bert, glue, tiny):
    """Stock has other weights; in fp32 rounding explains the least."""
    sides = make_rte_sides(bert, glue, precision="fp32")
    wrong = {name: weight + 0.3 for name, weight in sides[SAME_BATCHES].weights.items()}
    stock = Side("fp32", sides[SAME_BATCHES].model, wrong, sides[SAME_BATCHES].build)
    with pytest.raises(UsageError, match="they do not train the same model; report this line"):
        training.compare_losses(sides[BERTKIT], stock, 2, ignore)


def test_stock_takes_other_kernels_that_work_here(bert, glue, tiny):
    lines = []
    task = TASKS["rte"]
    recipe = Recipe.make(task, {"checkpoint": bert, "batch_size": 8, "data": {"dir": str(glue)}})
    prepared = prepare(recipe)
    rows, kernels = finetune.choose_rows(prepared.data["train"], 2, 8), ("eager", "no_such_kernel")
    sides = make_sides(task, recipe, prepared.settings, rows, False, lines.append, kernels)
    assert list(sides) == [BERTKIT, SAME_BATCHES, EXAMPLE, SORTED, "eager"]
    assert sides["eager"].model.config._attn_implementation == "eager"
    assert sides[SORTED].model.config._attn_implementation == "sdpa"
    assert lines == ["transformers' no_such_kernel does not work here, so no side uses it: ValueError"]


def test_every_epoch_begins_from_the_same_weights(bert, glue, tiny):
    sides = make_rte_sides(bert, glue)
    for side in (sides[BERTKIT], sides[SAME_BATCHES]):
        train = partial(train_epoch, side, 2, logs=True)
        assert train().made == train().made
