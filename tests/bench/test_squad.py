"""The bench of decoding: its figures, equal answers beside a stand-in for the reference, and bad input."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bertkit.bench import squad as bench
from bertkit.bench.measure import BERTKIT, REFERENCE
from bertkit.bench.squad import LISTS, bench_squad
from bertkit.data.spans import N_BEST, cut, decode, is_placed
from bertkit.data.tokenizer import train_tokenizer
from bertkit.errors import UsageError
from bertkit.tasks.squad import VERSIONS
from tests.official import encode_questions

ROW = {"questions", "windows", "scores", "seconds", "median_seconds", "questions_per_second", "bytes"}
STAND_IN = """
def rank(scores, count):
    values = scores.tolist()
    return sorted(((-value, place) for place, value in enumerate(values)))[:count]


def postprocess_qa_predictions(
    examples, features, predictions, version_2_with_negative, n_best_size, max_answer_length
):
    assert examples["id"] == [row["id"] for row in examples]
    best = {name: (float("-inf"), 0, 0) for name in examples["id"]}
    null = dict.fromkeys(best, float("inf"))
    for feature, start_logits, end_logits in zip(features, *predictions):
        name, offsets = feature["example_id"], feature["offset_mapping"]
        null[name] = min(null[name], float(start_logits[0]) + float(end_logits[0]))
        ends = rank(end_logits, n_best_size)
        for minus_start, start in rank(start_logits, n_best_size):
            for minus_end, end in ends:
                if max(start, end) >= len(offsets) or offsets[start] is None or offsets[end] is None:
                    continue
                if not 0 <= end - start < max_answer_length or not feature["token_is_max_context"].get(str(start)):
                    continue
                if -minus_start - minus_end > best[name][0]:
                    best[name] = -minus_start - minus_end, offsets[start][0], offsets[end][1]
    answers = {}
    for row in tqdm(examples):
        score, first, last = best[row["id"]]
        answers[row["id"]] = row["context"][first:last] if last else "empty"
        if version_2_with_negative and null[row["id"]] - (score if last else 0.0) > 0:
            answers[row["id"]] = ""
    return answers
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "utils_qa.py"
    path.write_text(STAND_IN, encoding="utf-8")
    return path


@pytest.fixture
def count(monkeypatch):
    """A function that sets how many questions there are."""
    return partial(monkeypatch.setattr, bench, "QUESTIONS")


@pytest.fixture(scope="module")
def windows():
    questions = bench.make_questions(30)
    return encode_questions(questions, train_tokenizer([question.context for question in questions], size=8_000))


def test_beside_a_reference_the_answers_are_equal_and_all_figures_are_there(stand_in, count):
    lines = []
    count(40)
    found, tables = bench_squad(stand_in, report=lines.append, repeats=2)

    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"bench", "machine", "data", "rows", "ratios"}
    assert found["bench"] == "squad"
    assert found["data"] == "made up"
    assert {"processor", "threads", "packages"} <= set(found["machine"])
    assert set(found["rows"]) == set(found["ratios"]) == {"squad1", "squad2"}
    for name, row in found["rows"].items():
        assert set(row) == ROW | {"different", "no_span"}
        assert (row["questions"], row["different"], row["no_span"]) == (40, 0, 0)
        assert row["windows"] > 40  # some contexts take several
        assert {side: len(seconds) for side, seconds in row["seconds"].items()} == {BERTKIT: 2, LISTS: 2, REFERENCE: 2}
        ratios = np.divide(row["seconds"][REFERENCE], row["seconds"][BERTKIT])
        assert found["ratios"][name] == pytest.approx(np.mean(ratios))  # the median of two
        assert row["questions_per_second"] == 40 / row["median_seconds"][BERTKIT]
        size = row["bytes"]
        assert size["kept"] == row["windows"] * (4 * N_BEST + 2) * 4
        assert size["logits"] == row["windows"] * 2 * 384 * 4
        assert set(size["peak"]) == {BERTKIT, LISTS, REFERENCE}
        assert size["peak"][BERTKIT] > size["kept"]
    assert 20 < found["rows"]["squad1"]["scores"]["f1"] < 100
    assert found["rows"]["squad2"]["scores"]["f1"] >= found["rows"]["squad2"]["scores"]["tau0_f1"]
    assert sum("0 of 40 answers differ" in line for line in lines) == 2
    for table, row in zip(tables, found["rows"].values(), strict=True):
        assert [cells[0].lines[0][0] for cells in table.rows] == list(row["seconds"])


def test_without_a_reference_there_is_our_own_rate_and_no_ratio(count):
    lines = []
    count(20)
    found, tables = bench_squad(report=lines.append, repeats=1)
    assert found["ratios"] == {}
    for row in found["rows"].values():
        assert set(row) == ROW
        assert set(row["seconds"]) == {BERTKIT, LISTS}
        assert row["questions_per_second"] > 0
    assert len(tables) == 2
    assert not any("reference" in line for line in lines)


def test_an_answer_that_differs_is_counted(stand_in, count):
    wrong = STAND_IN.replace("return answers", 'return answers | {"000004": "!"}')
    stand_in.write_text(wrong, encoding="utf-8")
    count(10)
    found, _ = bench_squad(stand_in, repeats=1)
    assert [row["different"] for row in found["rows"].values()] == [1, 1]


def test_no_span_is_no_difference():
    best = ["a", "b", "", ""]
    assert bench.count_differences(best, ["a", "", "", ""], ["a", "", "empty", ""]) == (0, 2)
    assert bench.count_differences(best, ["a", "", "", ""], ["b", "b", "empty", ""]) == (2, 2)


# --- The input --------------------------------------------------------------------------------------------------------


def test_made_up_questions_are_the_same_in_every_run_and_as_long_as_squads():
    questions = bench.make_questions(400)
    assert questions == bench.make_questions(400)
    assert len({question.id for question in questions}) == 400
    assert all(map(is_placed, questions))
    assert all(1 <= len(question.answers[0].split()) <= 5 for question in questions)
    contexts = list(dict.fromkeys(question.context for question in questions))
    assert len(contexts) == 80  # five questions each
    lengths = np.array([len(context.split()) for context in contexts])
    assert lengths.min() >= 20
    assert (lengths > 600).sum() == 2
    usual = lengths[lengths < 600]
    assert 105 < usual.mean() < 135
    assert 35 < usual.std() < 65


def test_every_third_question_loses_its_answers():
    questions = bench.make_questions(7)
    dropped = bench.drop_answers(questions)
    assert [len(question.answers) for question in dropped] == [0, 1, 1, 0, 1, 1, 0]
    assert [question.starts for question in dropped[::3]] == [()] * 3
    assert dropped[1] is questions[1]


def test_logits_are_least_behind_the_window_and_high_at_the_answer(windows):
    starts, ends = bench.make_logits(windows)
    assert starts.shape == ends.shape == (len(windows), 384)
    assert starts.dtype == ends.dtype == np.float32
    least = np.finfo(np.float32).min
    rows = np.arange(len(windows))
    for logits, places in zip((starts, ends), windows.answers.T, strict=True):
        for row, logit in enumerate(logits):
            tokens = len(windows[row]["input_ids"])
            assert (logit[tokens:] == least).all()
            assert (logit[:tokens] > least).all()
        assert 3 < logits[rows, places].mean() < 7


def test_the_windows_are_described_as_they_are(windows):
    examples, features = bench.describe_windows(windows)
    assert examples["id"] == [row["id"] for row in examples] == [question.id for question in windows.questions]
    assert len(features) == len(windows)
    shown: dict[str, list[tuple[int, int]]] = {}
    for index, feature in enumerate(features):
        offsets, names = feature["offset_mapping"], feature["token_is_max_context"]
        assert len(offsets) == len(windows[index]["input_ids"])
        assert offsets[0] is None
        assert offsets[-1] is None
        inside = [place for place, offset in enumerate(offsets) if offset is not None]
        assert inside == list(range(inside[0], inside[-1] + 1))
        assert {int(name) for name in names} <= set(inside)
        assert all(names.values())
        shown.setdefault(feature["example_id"], []).extend(offsets[int(name)] for name in names)
    for index, question in enumerate(windows.questions):  # each token of the context in most context once
        tokens = cut(windows.offsets, windows.context_ends, windows.contexts[index])
        assert shown[question.id] == list(map(tuple, tokens.tolist()))


def test_what_is_kept_is_decoded_to_the_same_whatever_the_batch(windows, monkeypatch):
    logits = bench.make_logits(windows)
    kept = bench.keep(*logits)
    monkeypatch.setattr(bench, "WINDOWS_A_BATCH", 7)
    assert decode(bench.keep(*logits), windows) == decode(kept, windows)


def write_squad(folder: Path, split: str, count: int) -> None:
    qas = [
        {"id": f"{split}{i}", "question": "What?", "answers": [{"text": "ten words", "answer_start": 9}]}
        for i in range(count)
    ]
    paragraph = {"context": f"Here are ten words of the {split} file, or are they more?", "qas": qas}
    content = {"version": "1.1", "data": [{"title": split, "paragraphs": [paragraph]}]}
    (folder / f"{split}-v1.1.json").write_text(json.dumps(content), encoding="utf-8")


def test_official_files_are_read_dev_before_train(tmp_path, stand_in, count):
    write_squad(tmp_path, "dev", 3)
    assert [question.id for question in bench.read_questions(tmp_path, 2)] == ["dev0", "dev1"]  # needs no train
    write_squad(tmp_path, "train", 5)
    asked = bench.read_questions(tmp_path, 5)
    assert [question.id for question in asked] == ["dev0", "dev1", "dev2", "train0", "train1"]
    assert len(bench.read_questions(tmp_path, 100)) == 8

    count(6)
    found, _ = bench_squad(stand_in, tmp_path, repeats=1)
    assert found["data"] == "official files"
    assert [(row["questions"], row["different"]) for row in found["rows"].values()] == [(6, 0), (6, 0)]
    assert VERSIONS[1].name in found["rows"]


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is not a file"),
        ("def another(): pass", "has no function postprocess_qa_predictions"),
        ("postprocess_qa_predictions = 1", "has no function postprocess_qa_predictions"),
        ("import a_library\nthat_is_missing", "cannot be imported (No module named 'a_library')"),
        ("def :", "cannot be imported (invalid syntax"),
        ("def postprocess_qa_predictions(): pass", "fails (TypeError"),
        ("def postprocess_qa_predictions(*_, **__): return {}", "fails (KeyError"),
    ],
)
def test_a_reference_that_is_none_is_one_line(tmp_path, count, content, complaint):
    path = tmp_path / "reference.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    count(5)
    with pytest.raises(UsageError) as caught:
        bench_squad(path)
    message = str(caught.value)
    assert complaint in message
    assert "\n" not in message
    assert "utils_qa.py with --reference FILE" in message


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_the_files_is_one_line(tmp_path, make):
    folder = tmp_path / "squad"
    if make:
        folder.mkdir()
    with pytest.raises(UsageError, match=r"dev-v1\.1\.json") as caught:
        bench_squad(data=folder)
    assert "\n" not in str(caught.value)
