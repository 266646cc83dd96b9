"""SQuAD as a task: files, tau, the official formats, training on another file first."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from bertkit import BertForQuestionAnswering
from bertkit.data.formats.squad import read_squad
from bertkit.data.sequences import collate
from bertkit.data.spans import Answer, Question, Span, express, keep_top, rank
from bertkit.data.tokenizer import load_tokenizer
from bertkit.metrics.rows import take_values
from bertkit.metrics.squad import score_answers, score_squad1, score_squad2
from bertkit.model.checkpoint import load_model
from bertkit.reports.tables import list_shown
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.squad import SQUAD, VERSIONS, SpanAnswers, describe_windows
from bertkit.tasks.task import score_summaries
from bertkit.training.recipe import Recipe, load_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import FIRST, read_metrics
from tests.conftest import draft
from tests.official import encode_questions, write_squad
from tests.tasks.conftest import load_examples

pytestmark = pytest.mark.usefixtures("here")

ONE, TWO = VERSIONS
SMALL = {"max_length": 40, "doc_stride": 12, "max_query_length": 8}


def make_recipe(folder, start, version, **options):
    data = SMALL | {"dir": str(write_squad(folder / "squad", version.number))} | options
    return {"checkpoint": start, "batch_size": 8, "data": data, "train": {"max_steps": 3}}


def load(version, folder, **options):
    return load_examples(SQUAD[version.name], folder, **options)


def make_kept(data, gold):
    """Return the scores (W, 82) of a model that is certain of (first, last) in each window."""
    length = int((data.locate_first() + data.lengths).max()) + 1
    logits = torch.zeros(2, len(data), length)
    for side in (0, 1):
        logits[side, torch.arange(len(data)), torch.as_tensor(gold)[:, side]] = 10.0
    return keep_top(*logits).numpy()


# --- The data


def test_the_paper_s_numbers():
    assert {v.name: (v.batch_size, v.epochs) for v in VERSIONS} == {"squad1": (32, 3.0), "squad2": (48, 2.0)}
    for task in SQUAD.values():
        assert task.recipe["train"]["learning_rate"] == 5e-5
        assert task.recipe["train"]["warmup_steps"] == 0.1
        lengths = ("max_length", "doc_stride", "max_query_length", "max_answer_length")
        assert [task.recipe["data"][key] for key in lengths] == [384, 128, 64, 30]


def test_what_became_of_the_questions_is_said(start):
    context = "word1 word2 " + "word3 " * 40 + "good"
    questions = [
        Question("long", "word1 " * 9, context, ("good",), (len(context) - 4,)),
        Question("within", "word1 ?", context, ("rd2",), (8,)),
        Question("window", "word1 ?", context, (context,), (0,)),
    ]
    recipe = draft(TASKS["squad1"], {"data": SMALL | {"max_answer_length": 5}})
    line = describe_windows(SQUAD["squad1"].encode(questions, load_tokenizer(start), recipe, "train"), "train")
    assert " windows of 3 questions; 1 questions are truncated; 1 answers are in no window; 2 answers cannot" in line


# --- Answers and scores


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


def test_tau_is_the_paper_s_and_the_flag_its_opposite():
    """Four questions; the first two have answers. Answering all scores 50, none 50, the first three 75.

    The odds s_null - best are -2, 0, 1, 3: tau = 0 answers only the first, because the second is not *above* s_null.
    """
    questions = [Question(name, "", "x", ("x",) * (name < "c"), (0,) * (name < "c")) for name in "abcd"]
    answers = [Answer([Span("x", 1.0, 1.0)], (odds + 1.0, 1.0)) for odds in (-2.0, 0.0, 1.0, 3.0)]
    rows = SQUAD["squad2"].tabulate_answers(questions, ["x"] * 4, [answer.odds for answer in answers])
    assert rows.column("prediction").to_pylist() == ["x", "x", "", ""]
    scores = take_values(SQUAD["squad2"].score(rows))
    assert (scores.pop("tau"), scores.pop("null_score_diff_threshold")) == (-0.5, 0.5)
    at_zero = {"tau0_exact": 75.0, "tau0_f1": 75.0, "tau0_HasAns_exact": 50.0, "tau0_HasAns_f1": 50.0}
    names = ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "tau0_NoAns_exact", "tau0_NoAns_f1")
    assert scores == dict.fromkeys(names, 100.0) | at_zero
    rows = SQUAD["squad2"].tabulate_answers(questions, ["x"] * 4, [answer.odds for answer in answers], tau=0.0)
    assert rows.column("prediction").to_pylist() == ["x", "", "", ""]
    assert take_values(SQUAD["squad2"].score(rows))["exact"] == 75.0


@pytest.mark.parametrize(("tau", "answer"), [(-20.0, ""), (-20.5, "word")])
def test_a_predicted_answer_scores_above_tau_too(start, tau, answer):
    """S.C + E.C is 20, and the sum of every span 0: the first one is the best."""
    question = Question("a", "word1 ?", "word1 word2 .", (), ())
    data = encode_questions([question], load_tokenizer(start), max_length=40, max_query_length=8)
    (result,) = SQUAD["squad2"].decode(make_kept(data, [(0, 0)]), data, {"tau": tau}).list_results()
    assert result["answer"] == answer


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
    """The scores are those of the other rows at that tau."""
    recipe, output = make_recipe(tmp_path, start, TWO, tune_share=0.5), tmp_path / "run"
    found = run(Recipe.make(TASKS["squad2"], recipe), output=output)
    assert "chosen_on_dev" not in found
    assert "optimistic" not in (output / "README.md").read_text()
    names = ("predictions.json", "nbest_predictions.json", "null_odds.json")
    answers, nbest, odds = (json.loads((output / "predictions" / name).read_text()) for name in names)
    assert 0 < len(answers) < 24
    for question, text in answers.items():
        best = next(entry["text"] for entry in nbest[question] if entry["text"])
        assert text == (best if odds[question] < -found["tau"] else "")
    scored = [x for x in read_squad(tmp_path / "squad" / "dev-v2.0.json") if x.id in answers]
    exact, f1 = score_answers({x.id: x.answers for x in scored}, answers, 2)
    assert found["f1"] == pytest.approx(100 * sum(f1.values()) / len(f1))
    assert found["exact"] == pytest.approx(100 * sum(exact.values()) / len(exact))
    assert BertForQuestionAnswering.from_pretrained(output).config.tau == found["tau"]


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
    if not version.unanswerable:
        assert list(found["predictions.json"].values()) == [x[0]["text"] for x in found[names[1]].values()]
    model = BertForQuestionAnswering.from_pretrained(output)
    assert model.config.tau == (metrics["tau"] if version.unanswerable else None)
    assert load_model(BertForQuestionAnswering, str(output), {})[0].config.tau is None, "another run has its own"
    assert not any(key.startswith("test_") for key in metrics)
    rows = list_shown(task.table, task.metric, metrics)
    assert all(row.paper for row in rows if row.key in ("f1", version.exact))
    assert not list((output / "predictions").glob("*.jsonl")), "the rows of official files are not written again"
    card = (output / "README.md").read_text()
    assert "were not compared with the official ones" in card
    warning = "The scores are optimistic because the same data were used to choose tau; with --set data.tune_share=0.5"
    assert (warning in card) == version.unanswerable
    assert metrics.get("chosen_on_dev") == ("tau" if version.unanswerable else None)
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
    output, lines = tmp_path / "run", []
    metrics = run(Recipe.make(TASKS["squad2"], recipe), output=output, report=lines.append)
    then = lines.index("then:")
    assert any("train 24 questions, dev 24 questions" in line for line in lines), "the complete extra file"
    assert any("train 6 questions, dev 24 questions" in line for line in lines)
    assert not any("randomly initialised, because" in line for line in lines[then:]), "the head is the first one's"
    assert read_metrics(output / FIRST / "metrics.json")["updates"] == metrics["updates"] == 3
    first, second = (BertForQuestionAnswering.from_pretrained(path) for path in (output / FIRST, output))
    assert not torch.equal(first.qa_outputs.weight, second.qa_outputs.weight)


def test_a_broken_extra_file_is_told_before_anything_is_written(tmp_path, start, refused):
    (tmp_path / "extra.json").write_text("{")
    recipe = make_recipe(tmp_path, start, ONE, extra_train=str(tmp_path / "extra.json"))
    with refused():
        run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_killed_after_its_first_part_goes_on(tmp_path, start):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    recipe = make_recipe(tmp_path, start, ONE, extra_train=str(extra))
    expected = run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "straight")

    def kill(line):
        if line == "then:":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "killed", report=kill)
    assert run(Recipe.make(TASKS["squad1"], recipe), output=tmp_path / "killed") == expected
    weights = [BertForQuestionAnswering.from_pretrained(tmp_path / name) for name in ("straight", "killed")]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in weights), strict=True))


def test_tau_is_explained():
    (line,) = TASKS["squad2"].comment({"f1": 50.1, "majority_f1": 50.0, "tau": 2.5})
    assert "more than tau = 2.500 above no answer (null_score_diff_threshold = -2.500 in the reference code)" in line


def test_an_answer_says_how_far_it_is_from_the_threshold():
    """The threshold is the score of no answer plus tau."""
    result = {"answer": "", "best": {"text": "x", "score": 2.0}, "null_score": 3.0, "tau": 0.5}
    assert SpanAnswers.describe(result) == "(no answer)  (1.50 below the threshold, best span 'x')"


def test_predictions_belong_to_their_questions_however_training_is_ordered(tmp_path, start):
    """The Trainer would silently sort evaluation data by length, too."""
    recipe, task = make_recipe(tmp_path, start, ONE), TASKS["squad1"]
    recipe["train"]["train_sampling_strategy"] = "group_by_length"
    metrics = run(Recipe.make(task, recipe), output=tmp_path / "run")
    model = BertForQuestionAnswering.from_pretrained(tmp_path / "run").eval()
    questions = read_squad(tmp_path / "squad" / "dev-v1.1.json")
    data = task.encode(questions, load_tokenizer(start), load_recipe(tmp_path / "run" / "recipe.toml"), "dev")
    batches = [collate([data[index]]) for index in range(len(data))]
    with torch.no_grad():
        kept = np.concatenate([task.summarize(model(**batch), batch).numpy() for batch in batches])
    written = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert written == json.loads(task.format_predictions(task.decode(kept, data), data, "dev")["predictions.json"])
    assert len(set(written.values())) > 5
    assert metrics["f1"] == score_summaries(task, kept, data)["f1"]


def test_scoring_says_what_is_missing(tmp_path, refused):
    gold, some, lines = write_squad(tmp_path, 1) / "dev-v1.1.json", tmp_path / "some.json", []
    some.write_text(json.dumps({"dev-0-0-0": "x"}))
    assert SQUAD["squad1"].score_files(gold, some, report=lines.append)["exact_match"] == 0.0
    assert lines == [f"23 of 24 questions have no answer in {some} and score 0"]
    for name, options in (("squad2", {}), ("squad1", {"odds": some}), ("squad1", {"threshold": 0.5})):
        with refused():
            SQUAD[name].score_files(gold, some, **options)


def test_the_other_version_s_files_are_refused(tmp_path, refused):
    one, two = (write_squad(tmp_path, v.number) / f"train-v{v.release}.json" for v in VERSIONS)
    texts = [path.read_text() for path in (one, two)]
    one.write_text(texts[1])
    two.write_text(texts[0])
    for version in VERSIONS:
        with refused():
            load(version, tmp_path)


def test_another_recipe_does_not_overwrite_one_whose_first_part_has_begun(tmp_path, start, refused):
    extra = write_squad(tmp_path / "extra", 1, seed=3) / "train-v1.1.json"
    recipe = make_recipe(tmp_path, start, ONE, extra_train=str(extra))
    output = tmp_path / "run"

    def stop(done, *rest):
        raise Interrupted("stopped", 15)

    with pytest.raises(Interrupted):
        run(Recipe.make(TASKS["squad1"], recipe), output=output, progress=stop)
    written = (output / "recipe.toml").read_bytes()
    recipe["train"]["learning_rate"] = 1e-5
    with refused():
        run(Recipe.make(TASKS["squad1"], recipe), output=output)
    assert (output / "recipe.toml").read_bytes() == written


def test_another_file_may_be_trained_on(tmp_path):
    folder = write_squad(tmp_path / "official", 2)
    other = write_squad(tmp_path / "other", 1, seed=1) / "train-v1.1.json"
    examples, _ = load(TWO, folder, train_file=str(other))
    assert examples["train"] == read_squad(other)
    assert examples["dev"] == read_squad(folder / "dev-v2.0.json")
