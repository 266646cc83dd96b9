"""SQuAD as a task: files, tau, the official formats, training on another file first."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from bertkit import BertForQuestionAnswering
from bertkit.data.formats.squad import read_squad
from bertkit.data.spans import Answer, Question, Span, cut, decode, express, locate_answer, rank
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.metrics.rows import take_values
from bertkit.metrics.squad import score_answers, score_squad1, score_squad2
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.squad import SQUAD, VERSIONS, describe_windows, find_squad
from bertkit.tasks.task import score_summaries
from bertkit.training.recipe import Recipe, load_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import FIRST, read_metrics
from tests.conftest import draft
from tests.official import encode_questions, write_checkpoint, write_glue, write_squad

pytestmark = pytest.mark.usefixtures("here")

ONE, TWO = VERSIONS
SMALL = {"max_length": 40, "doc_stride": 12, "max_query_length": 8}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("bert")))


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def version(request):
    return request.param


def make_recipe(folder, start, version, **options):
    data = SMALL | {"dir": str(write_squad(folder / "squad", version.number))} | options
    return {"checkpoint": start, "batch_size": 8, "data": data, "train": {"max_steps": 3}}


def load(version, folder, **options):
    lines = []
    data = SQUAD[version.name].recipe["data"] | {"dir": str(folder)} | options
    return SQUAD[version.name].load(data, lines.append), lines


def change(path, edit):
    """Edit the first question and its paragraph in a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    paragraph = content["data"][0]["paragraphs"][0]
    edit(paragraph, paragraph["qas"][0])
    path.write_text(json.dumps(content), encoding="utf-8")


def make_kept(data, gold, high=10.0):
    """Return the scores (W, 82) of a model that is certain of (first, last) in each window."""
    from bertkit.data.spans import keep_top

    length = int((data.find_first() + data.lengths).max()) + 1
    logits = torch.zeros(2, len(data), length)
    for side in (0, 1):
        logits[side, torch.arange(len(data)), torch.as_tensor(gold)[:, side]] = high
    return keep_top(*logits).numpy()


# --- The data


def test_the_paper_s_numbers():
    assert {v.name: (v.batch_size, v.epochs) for v in VERSIONS} == {"squad1": (32, 3.0), "squad2": (48, 2.0)}
    for task in SQUAD.values():
        assert task.recipe["train"]["learning_rate"] == 5e-5
        assert task.recipe["train"]["warmup_steps"] == 0.1
        lengths = ("max_length", "doc_stride", "max_query_length", "max_answer_length")
        assert [task.recipe["data"][key] for key in lengths] == [384, 128, 64, 30]
    with pytest.raises(UsageError, match="no SQuAD version 3; --version takes 1"):
        find_squad(3)


def test_both_files_are_read(tmp_path, version):
    examples, lines = load(version, write_squad(tmp_path, version.number))
    assert [len(examples[split]) for split in ("train", "dev")] == [24, 24]
    assert sum(not question.answers for question in examples["dev"]) == (8 if version.unanswerable else 0)
    assert lines == [f"SQuAD {version.release}: train 24 questions, dev 24 questions"]


def test_the_first_questions_are_taken(tmp_path):
    whole, _ = load(ONE, write_squad(tmp_path, 1))
    some, _ = load(ONE, tmp_path, max_train_samples=5)
    assert some["train"] == whole["train"][:5]
    assert some["dev"] == whole["dev"]


def test_an_answer_elsewhere_is_left_out_of_training_only(tmp_path, version):
    write_squad(tmp_path, version.number)
    for split in ("train", "dev"):
        change(
            tmp_path / f"{split}-v{version.release}.json",
            lambda paragraph, qa: qa["answers"][0].update(answer_start=qa["answers"][0]["answer_start"] + 1),
        )
    examples, lines = load(version, tmp_path)
    assert [len(examples[split]) for split in ("train", "dev")] == [23, 24]
    assert any("skipping 1 training questions" in line for line in lines)
    assert any("1 dev questions have an answer that is not at" in line for line in lines)


def test_nothing_left_to_train_on(tmp_path):
    write_squad(tmp_path, 1)
    content = json.loads((tmp_path / "train-v1.1.json").read_text())
    paragraph = content["data"][0]["paragraphs"][0]
    paragraph["qas"] = paragraph["qas"][:1]
    paragraph["qas"][0]["answers"][0]["answer_start"] = 9999
    content["data"] = [{"title": "", "paragraphs": [paragraph]}]
    (tmp_path / "train-v1.1.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"no question to train on; give the official files with --data"):
        load(ONE, tmp_path)


def test_the_other_version_s_files_are_refused(tmp_path):
    write_squad(tmp_path, 1)
    write_squad(tmp_path, 2)
    for split in ("train", "dev"):
        one, two = (tmp_path / f"{split}-v{release}.json" for release in ("1.1", "2.0"))
        texts = [path.read_text() for path in (one, two)]
        one.write_text(texts[1])
        two.write_text(texts[0])
    with pytest.raises(UsageError, match="use --version 2"):
        load(ONE, tmp_path)
    with pytest.raises(UsageError, match="use --version 1"):
        load(TWO, tmp_path)


def test_another_file_may_be_trained_on(tmp_path):
    folder = write_squad(tmp_path / "official", 2)
    other = write_squad(tmp_path / "other", 1, seed=1) / "train-v1.1.json"
    examples, _ = load(TWO, folder, train_file=str(other))
    assert examples["train"] == read_squad(other)
    assert examples["dev"] == read_squad(folder / "dev-v2.0.json")
    unanswerable = write_squad(tmp_path / "two", 2) / "train-v2.0.json"
    with pytest.raises(UsageError, match="use --version 2"):
        load(ONE, write_squad(tmp_path / "official", 1), train_file=str(unanswerable))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 67}, "max_length 67 leaves no room"),
        ({"doc_stride": 0}, "doc_stride is 0"),
        ({"max_query_length": 0}, "max_query_length is 0"),
        ({"max_answer_length": 0}, "max_answer_length is 0"),
        ({"max_train_samples": -1}, "max_train_samples is -1"),
        ({"extra_train": "no.json"}, r"extra_train no.json not found"),
        ({"train_file": "no.json"}, r"train_file no.json not found"),
        ({"dir": "no/folder"}, r"no/folder.*give a file .*, a folder with train.csv, or a Hub data set"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    start = str(write_checkpoint(tmp_path / "bert", max_position_embeddings=512))
    with pytest.raises(UsageError, match=message) as error:
        run(Recipe.make(TASKS["squad2"], {"checkpoint": start, "data": options}), output=tmp_path / "run")
    assert "\n" not in str(error.value)


def test_what_became_of_the_questions_is_said(start, tmp_path):
    tokenizer = load_tokenizer(start)
    context = "word1 word2 " + "word3 " * 40 + "good"
    questions = [
        Question("fits", "word1 ?", context, ("word2",), (6,)),
        Question("long", "word1 " * 9, context, ("good",), (len(context) - 4,)),
        Question("within", "word1 ?", context, ("rd2",), (8,)),
        Question("window", "word1 ?", context, (context,), (0,)),
    ]
    recipe = draft(TASKS["squad1"], {"data": SMALL | {"max_answer_length": 5}})
    data = SQUAD["squad1"].encode(questions, tokenizer, recipe, "train")
    line = describe_windows(data, "train")
    assert line == (
        f"train: {len(data)} windows of 4 questions; 1 questions are truncated; 1 answers are in no window; 2 "
        "answers cannot be predicted exactly because they begin or end within a token or have more than 5 tokens"
    )


# --- Answers and scores


def test_answers_of_an_oracle_are_perfect(tmp_path, start, version):
    examples, _ = load(version, write_squad(tmp_path, version.number))
    data = SQUAD["squad1"].encode(
        examples["dev"], load_tokenizer(start), draft(TASKS["squad1"], {"data": SMALL}), "dev"
    )
    assert len(data) > len(examples["dev"]), "several windows for some"
    metrics = score_summaries(SQUAD[version.name], make_kept(data, data.answers), data)
    assert metrics[version.exact] == metrics["f1"] == 100.0
    if version.unanswerable:
        assert metrics["tau0_exact"] == metrics["HasAns_f1"] == metrics["NoAns_exact"] == 100.0


def test_an_oracle_falls_short_only_by_what_no_token_can_express(start, version):
    """Answers that begin within a token: the scores are those of the nearest texts."""
    context = "word1 word2 goodword4 ."
    questions = [
        Question("a", "word1 ?", context, ("word2",), (6,)),
        Question("b", "word1 ?", context, ("goodword4",), (12,)),
        Question("c", "word1 ?", context, ("od",), (14,)),
    ]
    data = encode_questions(questions, load_tokenizer(start), max_length=40, max_query_length=8)
    metrics = score_summaries(SQUAD[version.name], make_kept(data, data.answers), data)
    nearest = {question.id: express(data, index)[0] for index, question in enumerate(questions)}
    assert nearest["c"] != "od"
    gold = {question.id: question.answers for question in questions}
    expected = (score_squad2 if version.unanswerable else score_squad1)(gold, nearest)
    assert metrics[version.exact] == expected[version.exact] == pytest.approx(200 / 3)
    assert metrics["f1"] == expected["f1"]


def test_of_several_references_the_oracle_says_one_that_tokens_can_express(start, version):
    """Gold answers as predictions score 100 except on the questions that `describe` counts."""
    context = "word1 word2 goodword4 . " + "word3 " * 40
    questions = [
        Question("a", "word1 ?", context, ("od", "word2"), (14, 6)),
        Question("b", "word1 ?", context, ("od", "goodwo"), (14, 12)),
        Question("c", "word1 ?", context, (context[:200], "word1"), (0, 0)),
        Question("d", "word1 ?", context, (context[24:224],), (24,)),
    ]
    lengths = {"max_length": 110, "max_query_length": 8, "max_answer_length": 20}
    data = encode_questions(questions, load_tokenizer(start), **lengths)
    line = describe_windows(data, "dev")
    assert "2 answers cannot be predicted exactly" in line
    exact = [set(express(data, index)) & set(question.answers) for index, question in enumerate(questions)]
    assert [len(found) for found in exact] == [1, 0, 1, 0]
    oracle = [
        replace(question, answers=(text,), starts=(question.starts[question.answers.index(text)],))
        for question, found in zip(questions, exact, strict=True)
        for text in (next(iter(found)) if found else question.answers[0],)
    ]
    answers = encode_questions(oracle, load_tokenizer(start), **lengths).answers
    assert score_summaries(SQUAD[version.name], make_kept(data, answers), data)[version.exact] == 50.0


def test_tau_is_the_paper_s_and_the_flag_its_opposite():
    """Four questions; the first two have answers. Answering all scores 50, none 50, the first three 75.

    The odds s_null - best are -2, 0, 1, 3: tau = 0 answers only the first, because the second is not *above* s_null.
    """
    questions = [
        Question("a", "", "x", ("x",), (0,)),
        Question("b", "", "x", ("x",), (0,)),
        Question("c", "", "x", (), ()),
        Question("d", "", "x", (), ()),
    ]
    answers = [Answer([Span("x", 1.0, 1.0)], (odds + 1.0, 1.0)) for odds in (-2.0, 0.0, 1.0, 3.0)]
    assert [answer.odds for answer in answers] == [-2.0, 0.0, 1.0, 3.0]
    rows = SQUAD["squad2"].tabulate_answers(questions, ["x"] * 4, [answer.odds for answer in answers])
    assert rows.column("prediction").to_pylist() == ["x", "x", "", ""]
    assert take_values(SQUAD["squad2"].score(rows)) == {
        "exact": 100.0,
        "f1": 100.0,
        "HasAns_exact": 100.0,
        "HasAns_f1": 100.0,
        "NoAns_exact": 100.0,
        "NoAns_f1": 100.0,
        "tau0_exact": 75.0,
        "tau0_f1": 75.0,
        "tau0_HasAns_exact": 50.0,
        "tau0_HasAns_f1": 50.0,
        "tau0_NoAns_exact": 100.0,
        "tau0_NoAns_f1": 100.0,
        "tau": -0.5,
        "null_score_diff_threshold": 0.5,
    }


def test_answers_without_numbers_are_refused(start, version):
    data = encode_questions([Question("a", "word1 ?", "good", ("good",), (0,))], load_tokenizer(start), max_length=40)
    kept = make_kept(data, data.answers)
    kept[0, 0] = np.nan
    with pytest.raises(UsageError, match="training has diverged"):
        SQUAD[version.name].rows(kept, data)


def test_the_best_answers_have_the_reference_s_form():
    answer = Answer([Span("good", 2.0, 1.0), Span("bad", 1.0, 0.0)], (1.5, 0.5))
    total = np.exp(3) + np.exp(2) + np.exp(1)
    assert rank(answer, with_null=True) == [
        {"text": "good", "probability": pytest.approx(np.exp(3) / total), "start_logit": 2.0, "end_logit": 1.0},
        {"text": "", "probability": pytest.approx(np.exp(2) / total), "start_logit": 1.5, "end_logit": 0.5},
        {"text": "bad", "probability": pytest.approx(np.exp(1) / total), "start_logit": 1.0, "end_logit": 0.0},
    ]
    assert [entry["text"] for entry in rank(answer, with_null=False)] == ["good", "bad"]
    many = Answer([Span(f"{n}", 30.0 - n, 0.0) for n in range(20)], (0.0, 0.0))
    assert [entry["text"] for entry in rank(many, with_null=True)] == [*map(str, range(20)), ""], "added, as a 21st"
    likely = Answer(many.spans, (40.0, 0.0))
    assert [entry["text"] for entry in rank(likely, with_null=True)] == ["", *map(str, range(19))]
    assert rank(Answer([], (0.0, 0.0)), with_null=False)[0]["text"] == ""


# --- Runs


def test_tau_is_that_of_the_rows_that_decide(tmp_path, start):
    """The scores are those of the other rows at that tau; without such rows the scores are marked."""
    recipe = make_recipe(tmp_path, start, TWO)
    whole = run(Recipe.make(TASKS["squad2"], recipe), output=tmp_path / "whole")
    assert whole["chosen_on_dev"] == "tau"
    card = (tmp_path / "whole" / "README.md").read_text()
    assert (
        "The scores are optimistic because the same data were used to choose tau; with --set data.tune_share=0.5"
        in card
    )
    lines = []
    found = run(
        Recipe.make(TASKS["squad2"], recipe, {"data": {"tune_share": 0.5}}),
        output=tmp_path / "run",
        report=lines.append,
    )
    assert "chosen_on_dev" not in found
    assert "optimistic" not in (tmp_path / "run" / "README.md").read_text()
    gold, nbest, odds = (
        json.loads((tmp_path / path).read_text())
        for path in ("squad/dev-v2.0.json", "run/predictions/nbest_predictions.json", "run/predictions/null_odds.json")
    )
    answers = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert 0 < len(answers) < 24 == sum(len(x["qas"]) for text in gold["data"] for x in text["paragraphs"])
    for question, text in answers.items():
        best = next(entry["text"] for entry in nbest[question] if entry["text"])
        assert text == (best if odds[question] < -found["tau"] else "")
    assert sum(line.startswith("tune: ") and "windows of" in line for line in lines) == 1
    scored = [x for x in read_squad(tmp_path / "squad" / "dev-v2.0.json") if x.id in answers]
    exact, f1 = score_answers({x.id: x.answers for x in scored}, answers, 2)
    assert found["f1"] == pytest.approx(100 * sum(f1.values()) / len(f1))
    assert found["exact"] == pytest.approx(100 * sum(exact.values()) / len(exact))
    assert BertForQuestionAnswering.from_pretrained(tmp_path / "run").config.tau == found["tau"]


def test_a_run_leaves_what_the_official_scripts_take(tmp_path, start, version):
    task, output = TASKS[version.name], tmp_path / "run"
    lines = []
    metrics = run(Recipe.make(task, make_recipe(tmp_path, start, version)), output=output, report=lines.append)
    assert any("windows of 24 questions" in line for line in lines)
    gold = tmp_path / "squad" / f"dev-v{version.release}.json"
    names = ["predictions.json", "nbest_predictions.json"] + ["null_odds.json"] * version.unanswerable
    found = {name: json.loads((output / "predictions" / name).read_text(encoding="utf-8")) for name in names}
    ids = [question.id for question in read_squad(gold)]
    assert all(list(content) == ids for content in found.values())
    again = SQUAD[version.name].score_files(gold, output / "predictions" / "predictions.json")
    assert {key: metrics[key] for key in (version.exact, "f1")} == {key: again[key] for key in (version.exact, "f1")}
    assert metrics["score"] == metrics["f1"]
    for question, answer in found["predictions.json"].items():
        best = next((x for x in found["nbest_predictions.json"][question] if x["text"]), {"text": ""})
        if not version.unanswerable:
            assert answer == best["text"]
        else:
            assert answer == (best["text"] if found["null_odds.json"][question] < -metrics["tau"] else "")
    model = BertForQuestionAnswering.from_pretrained(output)
    assert model.config.tau == (metrics["tau"] if version.unanswerable else None)
    stock = AutoModelForQuestionAnswering.from_pretrained(output)
    assert type(stock).__module__.startswith("transformers.")
    ids = torch.tensor([[2, 5, 6, 3, 7, 8, 3]])
    with torch.no_grad():
        ours, theirs = model.eval()(ids), stock.eval()(ids)
    assert torch.allclose(ours.start_logits, theirs.start_logits, atol=1e-5)
    assert torch.allclose(ours.end_logits, theirs.end_logits, atol=1e-5)


def test_another_file_comes_first(tmp_path, start):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    recipe = make_recipe(tmp_path, start, TWO, extra_train=str(extra), max_train_samples=6)
    output, lines, steps = tmp_path / "run", [], []
    metrics = run(
        Recipe.make(TASKS["squad2"], recipe),
        output=output,
        report=lines.append,
        progress=lambda done, *rest: steps.append(done),
    )
    assert lines.index("then:") > next(i for i, line in enumerate(lines) if line.startswith("first, in"))
    assert any("train 24 questions, dev 24 questions" in line for line in lines), "the complete extra file"
    assert any("train 6 questions, dev 24 questions" in line for line in lines)
    assert not any("randomly initialised, because" in line for line in lines[lines.index("then:") :]), (
        "the head is the first one's"
    )
    assert read_metrics(output / FIRST / "metrics.json")["updates"] == metrics["updates"] == 3
    first, second = (BertForQuestionAnswering.from_pretrained(path) for path in (output / FIRST, output))
    assert not torch.equal(first.qa_outputs.weight, second.qa_outputs.weight)
    # The saved recipe repeats all of it, and a run without the other file ends elsewhere.
    again = run(load_recipe(output / "recipe.toml"), output=tmp_path / "again")
    assert again == metrics
    recipe["data"]["extra_train"] = ""
    run(Recipe.make(TASKS["squad2"], recipe), output=tmp_path / "plain")
    plain = BertForQuestionAnswering.from_pretrained(tmp_path / "plain")
    assert not torch.equal(plain.qa_outputs.weight, second.qa_outputs.weight)


def test_another_recipe_does_not_overwrite_one_whose_first_part_has_begun(tmp_path, start):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    recipe = make_recipe(tmp_path, start, ONE, extra_train=str(extra))
    output = tmp_path / "run"

    def stop(done, *rest):
        raise Interrupted("stopped", 15)

    with pytest.raises(Interrupted):
        run(Recipe.make(TASKS["squad1"], recipe), output=output, progress=stop)
    written = (output / "recipe.toml").read_bytes()
    recipe["train"]["learning_rate"] = 1e-5
    with pytest.raises(UsageError, match="belongs to another run"):
        run(Recipe.make(TASKS["squad1"], recipe), output=output)
    assert (output / "recipe.toml").read_bytes() == written


def test_a_broken_extra_file_is_told_before_anything_is_written(tmp_path, start):
    (tmp_path / "extra.json").write_text("{")
    with pytest.raises(UsageError, match=r"extra\.json: Input data was truncated"):
        run(
            Recipe.make(TASKS["squad1"], make_recipe(tmp_path, start, ONE, extra_train=str(tmp_path / "extra.json"))),
            output=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def kill_after_first(recipe, output):
    """Run SQuAD 1.1 until the first part of its training is finished."""

    class Killed(Exception):
        pass

    def kill(line):
        if line == "then:":
            raise Killed

    with pytest.raises(Killed):
        run(Recipe.make(TASKS["squad1"], recipe), output=output, report=kill)


@pytest.mark.slow
def test_a_run_killed_after_its_first_part_goes_on(tmp_path, start):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    recipe = make_recipe(tmp_path, start, ONE, extra_train=str(extra))
    expected = run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "straight")

    kill_after_first(recipe, tmp_path / "killed")
    lines = []
    assert run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "killed", report=lines.append) == expected
    assert any("is finished" in line for line in lines)
    weights = [BertForQuestionAnswering.from_pretrained(tmp_path / name) for name in ("straight", "killed")]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in weights), strict=True))


def test_never_answering_is_warned_of():
    metrics = {"f1": 50.0, "majority_f1": 50.0, "tau": 2.5}
    meaning, line = TASKS["squad2"].comment(metrics).lines
    assert "more than tau = 2.500 above no answer (null_score_diff_threshold = -2.500 in the reference code)" in meaning
    assert line.startswith("warning: F1 (50.0) is not above never answering (50.0). Likely causes: a learning rate")
    assert TASKS["squad2"].comment(metrics | {"f1": 50.1}).lines == [meaning]
    assert TASKS["squad1"].comment({"f1": 0.0}).lines == []


# --- Unusual texts


@pytest.mark.parametrize(
    ("context", "question", "answer"),
    [
        ("", "word1 ?", None),
        ("good word1", "", "word1"),
        ("", "", None),
        (" \n\t ", "word1 ?", None),
        ("😀 good 👩‍👩‍👧 word1", "word2 ?", "good"),
        ("cafe\u0301 good nai\u0308ve", "word2 ?", "good"),
        ("한국어 good", "word1 ?", "good"),
        ("\x00\x01 good \u200b", "word1 ?", "good"),
        ("good " + "word1 " * 17_000, "word2 ?", "good"),
        ("x" * 100_000, "word2 ?", None),
    ],
)
def test_odd_texts_are_answered(start, version, context, question, answer, tmp_path):
    answers = (answer,) if answer else ()
    asked = Question("a", question, context, answers, tuple(context.index(text) for text in answers))
    sound = Question("b", "word1 ?", "word1 good .", ("good",), (6,))
    data = encode_questions([asked, sound], load_tokenizer(start), max_length=40, max_query_length=8, doc_stride=12)
    assert max(len(item["input_ids"]) for item in data.__getitems__(range(0, len(data), 97))) <= 40
    found = decode(make_kept(data, data.answers), data)
    assert found[1].best.text == "good"
    if answer:
        assert found[0].best.text == answer
    if version.unanswerable:
        metrics = score_summaries(SQUAD["squad2"], make_kept(data, data.answers), data)
        assert metrics["tau0_f1"] == 100.0
    for span in found[0].spans:
        assert span.text in context


def test_the_first_token_of_a_word_with_accents_is_found(start):
    """Characters that the tokenizer drops or joins do not shift the following offsets."""
    context = "cafe\u0301 good nai\u0308ve bad"
    tokenizer = load_tokenizer(start)
    data = encode_questions([Question("a", "", context, ("bad",), (context.index("bad"),))], tokenizer, max_length=40)
    offsets = cut(data.offsets, data.context_ends, 0)
    first, last = locate_answer(offsets, context.index("bad"), len(context))
    assert context[offsets[first, 0] : offsets[last, 1]] == "bad"


@pytest.mark.parametrize("start_at", [-1, -5, 3, 10**6, 10**400])
def test_a_start_that_cannot_be_is_passed_over(start, version, start_at):
    asked = Question("a", "word1 ?", "word1 good .", ("good", "good"), (6, start_at))
    wrong = Question("b", "word1 ?", "word1 good .", ("good",), (start_at,))
    data = encode_questions([asked, wrong], load_tokenizer(start), max_length=40, max_query_length=8)
    assert express(data, 0) == ["good"]
    assert express(data, 1) == []
    assert data.answers.tolist()[1] == [0, 0]
    line = describe_windows(data, "dev")
    assert line == "dev: 2 windows of 2 questions"


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_predictions_belong_to_their_questions_however_training_is_ordered(tmp_path, start, strategy):
    """The Trainer would silently sort evaluation data by length, too."""
    recipe = make_recipe(tmp_path, start, ONE)
    recipe["train"]["train_sampling_strategy"] = strategy
    metrics = run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "run")
    model = BertForQuestionAnswering.from_pretrained(tmp_path / "run").eval()
    questions = read_squad(tmp_path / "squad" / "dev-v1.1.json")
    data = SQUAD["squad1"].encode(
        questions, load_tokenizer(start), load_recipe(tmp_path / "run" / "recipe.toml"), "dev"
    )
    task, kept = TASKS["squad1"], []
    for index in range(len(data)):
        batch = task.collate([data[index]])
        with torch.no_grad():
            kept.append(task.summarize(model(**batch), batch).numpy())
    files = task.format_predictions(np.concatenate(kept), data, "dev")
    written = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert written == json.loads(files["predictions.json"])
    assert len(set(written.values())) > 5
    assert metrics["f1"] == score_summaries(task, np.concatenate(kept), data)["f1"]


def test_a_tau_does_not_outlive_its_task(tmp_path, start):
    run(Recipe.make(TASKS["squad2"], make_recipe(tmp_path, start, TWO)), output=tmp_path / "two")
    glue = write_glue(tmp_path / "glue")
    recipe = {"checkpoint": str(tmp_path / "two"), "batch_size": 8, "data": {"dir": str(glue), "max_length": 40}}
    run(Recipe.make(TASKS["rte"], recipe | {"train": {"max_steps": 1}}), output=tmp_path / "rte")
    assert "tau" in json.loads((tmp_path / "two" / "config.json").read_text())
    assert "tau" not in json.loads((tmp_path / "rte" / "config.json").read_text())


def test_scoring_says_what_is_missing(tmp_path):
    gold = write_squad(tmp_path, 1) / "dev-v1.1.json"
    (tmp_path / "some.json").write_text(json.dumps({"dev-0-0-0": "x"}))
    lines = []
    assert SQUAD["squad1"].score_files(gold, tmp_path / "some.json", report=lines.append)["exact_match"] == 0.0
    assert lines == [f"23 of 24 questions have no answer in {tmp_path / 'some.json'} and score 0"]
    with pytest.raises(UsageError, match="23 of 24 questions have no prediction"):
        SQUAD["squad2"].score_files(gold, tmp_path / "some.json")
    for options in ({"odds": tmp_path / "some.json"}, {"threshold": 0.5}):
        with pytest.raises(UsageError, match="remove --null-odds and --na-prob-thresh"):
            SQUAD["squad1"].score_files(gold, tmp_path / "some.json", **options)


def test_an_extra_file_without_a_fitting_answer_is_named(tmp_path, start):
    folder = write_squad(tmp_path / "extra", 1)
    content = json.loads((folder / "train-v1.1.json").read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                question["answers"][0]["answer_start"] = 9999
    (folder / "train-v1.1.json").write_text(json.dumps(content))
    recipe = make_recipe(tmp_path, start, TWO, extra_train=str(folder / "train-v1.1.json"))
    with pytest.raises(UsageError, match=r"no answer in .*extra.* is at its answer_start"):
        run(Recipe.make(TASKS["squad2"], recipe), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
