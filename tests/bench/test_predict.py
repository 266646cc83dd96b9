"""The bench of predictions: both sides say the same, and every figure that is promised is there."""

import json

import pytest

from bertkit.bench import predict as bench
from bertkit.bench.measure import OURS
from bertkit.bench.words import make_words
from bertkit.errors import UsageError
from tests.test_predict import write_head


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return str(write_head(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", num_labels=3))


def test_both_sides_are_timed_on_the_same_texts_and_agree(classifier, tmp_path):
    (tmp_path / "texts.txt").write_text("good word1\nbad\n" * 4)
    lines = []
    found = bench.bench_predict(classifier, str(tmp_path / "texts.txt"), count=6, repeats=2, report=lines.append)
    assert json.loads(json.dumps(found)) == found
    assert found["texts"] == 6
    assert found["other_labels"] == 0
    assert found["largest_difference"] < 1e-5
    exact = found["figures"]["fp32"]
    assert exact["seconds"].keys() == {OURS, *(f"pipeline of {size}" for size in bench.BATCH_SIZES)}
    assert all(len(seconds) == 2 for seconds in exact["seconds"].values())
    assert exact["best"] in exact["seconds"]
    assert found["ratio"] == exact["ratio"] > 0
    assert any("0 of 6 classes differ" in line for line in lines)


def test_made_up_texts_are_of_mixed_length_and_known_words():
    texts = bench.make_texts(300)
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths) < 10, max(lengths) > 100, max(lengths) <= bench.LONGEST) == (True, True, True)
    assert {word for text in texts for word in text.split()} <= set(make_words(bench.WORDS))
    assert texts == bench.make_texts(300)


def test_inputs_that_are_no_texts_are_one_line(classifier, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "pairs.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(UsageError, match="has no texts"):
        bench.bench_predict(classifier, str(tmp_path / "empty.txt"))
    with pytest.raises(UsageError, match="has an input without text"):
        bench.bench_predict(classifier, str(tmp_path / "pairs.jsonl"))
