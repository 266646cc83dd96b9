"""The prediction benchmark: equal answers on both sides, and all documented figures."""

import json

import pytest

from bertkit.bench import predict as bench
from bertkit.bench.measure import BERTKIT
from bertkit.bench.synthetic_text import make_words
from bertkit.errors import UsageError
from tests.inference.test_predictor import write_head


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return str(write_head(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", num_labels=3))


@pytest.mark.slow
def test_the_export_is_timed_as_well_and_agrees(classifier):
    found, (table, *_) = bench.bench_predict(classifier, count=4, repeats=1)
    assert bench.EXPORT in found["figures"]["fp32"]["seconds"]
    assert found[bench.EXPORT]["other_labels"] == 0
    assert found[bench.EXPORT]["largest_difference"] < 1e-5
    assert found["figures"]["fp32"]["best"].startswith("pipeline")
    assert bench.EXPORT in {row[0].lines[0][0] for row in table.rows}


def test_both_sides_are_timed_on_the_same_texts_and_agree(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # an export takes seconds
    (tmp_path / "texts.txt").write_text("good word1\nbad\n" * 4)
    lines = []
    found, tables = bench.bench_predict(
        classifier, str(tmp_path / "texts.txt"), count=6, repeats=2, report=lines.append
    )
    assert json.loads(json.dumps(found)) == found
    assert found["texts"] == 6
    assert found["other_labels"] == 0
    assert found["largest_difference"] < 1e-5
    exact = found["figures"]["fp32"]
    assert exact["seconds"].keys() == {BERTKIT, *(f"pipeline of {size}" for size in bench.BATCH_SIZES)}
    assert all(len(seconds) == 2 for seconds in exact["seconds"].values())
    assert exact["best"] in exact["seconds"]
    assert found["ratio"] == exact["ratio"] > 0
    assert any("0 of 6 classes differ" in line for line in lines)
    assert len(tables) == len(found["figures"])


def test_made_up_texts_are_of_mixed_length_and_known_words():
    texts = bench.make_texts(300)
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths) < 10, max(lengths) > 100, max(lengths) <= bench.LONGEST_TEXT_WORDS) == (True, True, True)
    assert {word for text in texts for word in text.split()} <= set(make_words(bench.TEXT_VARIETY))
    assert texts == bench.make_texts(300)


def test_inputs_that_are_no_texts_are_one_line(classifier, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "pairs.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(UsageError, match="has no texts"):
        bench.bench_predict(classifier, str(tmp_path / "empty.txt"))
    with pytest.raises(UsageError, match="line 1 has no text; give a file of texts"):
        bench.bench_predict(classifier, str(tmp_path / "pairs.jsonl"))
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text"\n')
    with pytest.raises(UsageError, match="line 2 is not a JSON"):
        bench.bench_predict(classifier, str(tmp_path / "broken.jsonl"))


@pytest.mark.parametrize(
    ("head", "values"),
    [
        ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
        ("BertForTokenClassification", {"num_labels": 3}),
        ("BertForMaskedLM", {}),
    ],
)
def test_what_gives_no_classes_is_refused_before_anything_is_timed(head, values, tmp_path):
    folder = str(write_head(tmp_path, head, **values))
    lines = []
    with pytest.raises(UsageError, match="is not a text classifier; give one, or omit it for random weights"):
        bench.bench_predict(folder, count=2, repeats=1, report=lines.append)
    assert not any("pipeline" in line for line in lines)


def test_the_command_writes_its_figures_where_it_can(call, classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    (tmp_path / "texts.txt").write_text("good word1\nbad\n")
    options = ("bench", "predict", classifier, "--input", "texts.txt", "--texts", 2, "--repeats", 1, "--json")
    code, out, err = call(*options, "figures.json")
    assert (code, err) == (0, "")
    assert "times the texts per second of the pipeline at its best" in out
    assert json.loads((tmp_path / "figures.json").read_text())["texts"] == 2
    for wrong in ("no/such/figures.json", "."):
        code, out, err = call(*options, wrong)
        assert (code, out) == (2, "")
        assert err == f"bertkit: {wrong} cannot be written; name a file in an existing folder with --json\n"
