"""Long texts in `classify` and GLUE: the same scores in training, in prediction and however an update is split."""

import json
import shutil
from functools import cache

import pytest
import torch
import transformers

from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.predictor import Predictor, flatten_result
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.heads import BertForSequenceClassification
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_reviews
from tests.tasks.conftest import make_small, read_rows
from tests.world import read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with reviews of 13 to 31 tokens: some fit into a sequence, others have up to four windows."""
    place = tmp_path_factory.mktemp("reviews")
    for seed, (split, size) in enumerate({"train": 48, "dev": 24, "test": 16}.items()):
        write_reviews(place / f"{split}.csv", size, seed)
    return place


def make_recipe(start, folder, long, text=("body",), label="stars", **train):
    data = {"text": list(text), "label": [label], "max_length": 16, "doc_stride": 6, "long": long}
    return make_small(start, folder, data, num_train_epochs=2.0, **train)


@pytest.fixture(scope="module")
def finish(start, folder, tmp_path_factory):
    """Return the directory of a finished run with this `long`, made once."""

    @cache
    def finish(long, text=("body",), label="stars", per_device=8, attention="packed"):
        output = tmp_path_factory.mktemp("run") / "run"
        recipe = make_recipe(start, folder, long, text, label, per_device_train_batch_size=per_device)
        run(Recipe.make(CLASSIFICATION, recipe, {"model": {"attn_implementation": attention}}), output=output)
        return output

    return finish


@pytest.mark.parametrize(
    ("long", "said"),
    [
        ("truncate", "are truncated to 16 tokens; data.max_length (up to {most}) or data.long=mean reads more of them"),
        ("mean", "have several windows, {windows} windows in all"),
    ],
)
def test_what_is_truncated_is_said_with_what_to_set(start, folder, long, said):
    lines = []
    prepared = prepare(Recipe.make(CLASSIFICATION, make_recipe(start, folder, long)), lines.append)
    data = prepared.data["train"].sequences
    windows = data.sequences if long == "mean" else data
    count = int(((windows.counts > 1) | windows.shortened).sum())
    assert 0 < count < 48
    most = load_config(str(start)).max_position_embeddings
    assert most == prepared.tokenizer.model_max_length < 512
    assert lines[-1] == f"{count} of 48 training texts {said.format(windows=len(windows), most=most)}"


@pytest.mark.parametrize(
    ("long", "given"),
    [("max", {}), ("mean", {"text": ("title", "body"), "label": "tags"}), ("mean", {"label": "price"})],
)
def test_predict_gives_the_scores_of_the_evaluation_and_marks_nothing(finish, folder, long, given):
    """Training evaluates texts, and prediction windows. A pair has room for 13 tokens, its shorter text for 6."""
    output, text = finish(long, **given), given.get("text", ("body",))
    predictor = Predictor(output, precision="fp32")
    rows = read_rows(folder / "dev.csv")
    results = predictor([{name: row[name] for name in text} for row in rows])
    counts = [[len(predictor.settings.tokenizer.tokenize(row[name])) for name in text] for row in rows]
    shortened = [len(text) == 2 and min(count) > 6 and sum(count) > 13 for count in counts]
    for result, row, is_cut in zip(results, read_rows(output / "predictions" / "dev.csv"), shortened, strict=True):
        assert result.get("truncated", False) == is_cut
        for name, value in flatten_result(result).items():
            if isinstance(value, float):
                assert float(row[name]) == pytest.approx(value, abs=1e-5)
    limits = (output / "README.md").read_text().partition("## Limitations")[2]
    assert f"Longer texts are read in windows, whose scores bertkit combines ({long})" in limits


@pytest.mark.parametrize("long", ["mean", "max"])
def test_predictions_are_stock_scores_of_each_window_combined(finish, folder, long):
    """Stock transformers cuts the windows itself: its stride is the overlap, room - doc_stride = 14 - 6 tokens."""
    output = finish(long)
    tokenizer = load_tokenizer(str(output))
    model = transformers.BertForSequenceClassification.from_pretrained(output).eval()
    texts = [row["body"] for row in read_rows(folder / "dev.csv")]
    results = Predictor(output, precision="fp32")(texts)
    for text, result in zip(texts, results, strict=True):
        windows = tokenizer(
            text, max_length=16, truncation=True, stride=8, return_overflowing_tokens=True, padding=True
        )
        windows.pop("overflow_to_sample_mapping", None)
        with torch.no_grad():
            logits = model(**{name: torch.tensor(column) for name, column in windows.items()}).logits
        logits = logits.mean(0) if long == "mean" else logits.amax(0)
        assert list(result["probabilities"].values()) == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)


def test_a_text_of_any_length_is_read_in_batches_of_bounded_size(finish):
    """All of 4,000 words count: the last one changes the scores, and no batch has more than 8,192 tokens."""
    predictor, sizes = Predictor(finish("mean"), precision="fp32"), []
    predictor.settings.model.register_forward_pre_hook(
        lambda model, args, given: sizes.append(given["input_ids"].shape), with_kwargs=True
    )
    results = predictor(["word " * 4000 + end for end in ("good", "bad")])
    assert all("truncated" not in result for result in results)
    assert results[0]["probabilities"] != results[1]["probabilities"]
    assert max(rows * columns for rows, columns in sizes) <= 8192
    assert sum(rows for rows, _ in sizes) == 2 * len(range(0, 4001 - 14 + 6, 6))


@pytest.mark.parametrize("long", ["truncate", "head+tail"])
def test_shortened_texts_are_marked(finish, folder, long):
    results = Predictor(finish(long), precision="fp32")([row["body"] for row in read_rows(folder / "dev.csv")])
    assert 0 < sum("truncated" in result for result in results) < len(results)
    assert "window_pooling" not in json.loads((finish(long) / "config.json").read_text())


def test_neither_accumulation_nor_padding_changes_the_weights(finish):
    """1 x 8 packed = 4 x 2 padded, though the texts of a micro-batch have different numbers of windows."""
    one, other = (read_weights(finish("mean", **more)) for more in ({}, {"per_device": 2, "attention": "eager"}))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=2e-4)


def test_a_model_without_its_recipe_keeps_its_windows(finish, tmp_path):
    """They are as long as the model's 128 positions allow: 126 tokens and 74 of 200."""
    copy = shutil.copytree(finish("max"), tmp_path / "model", ignore=lambda *_: ["recipe.toml", "predictions"])
    predictor, text = Predictor(copy, precision="fp32"), "good " * 100 + "bad " * 100
    inputs = predictor.task.encode_inputs([(text,)], predictor.settings)
    assert inputs.lengths.tolist() == [128, 76]
    (result,) = predictor([text])
    assert "truncated" not in result
    assert inputs.data.sequences.counts.tolist() == [2]
    again, _ = load_model(BertForSequenceClassification, str(copy), {})
    assert again.config.window_pooling is None, "a further run decides for itself"
