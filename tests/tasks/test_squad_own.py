"""SQuAD's task on a person's own questions: equal runs from every form, splits, test, folds and cards."""

import json

import pytest

import bertkit
from bertkit.data.formats.squad import read_own_squad
from bertkit.data.spans import Question
from bertkit.data.tokenizer import load_tokenizer
from bertkit.metrics.rows import take_values
from bertkit.metrics.squad import score_squad1
from bertkit.reports.tables import OWN_DATA, list_shown
from bertkit.tasks import TASKS
from bertkit.tasks.squad import SQUAD, VERSIONS, collect_answers
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import list_questions, write_checkpoint, write_questions, write_squad
from tests.tasks.conftest import load_examples, make_small


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Return by version the rows of the two official files, and their folder."""
    found = {}
    for version in VERSIONS:
        folder = write_squad(tmp_path_factory.mktemp("squad"), version.number)
        files = (folder / SQUAD[version.name].name_file(split) for split in ("train", "dev"))
        found[version.name] = (folder, *map(list_questions, files))
    return found


def load(version, place, **options):
    return load_examples(SQUAD[version.name], place, **options)


def make_recipe(bert, place, **options):
    lengths = {"max_length": 40, "doc_stride": 12, "max_query_length": 8}
    return make_small(bert, place, lengths | options, max_steps=3)


def write_folder(folder, form, **splits):
    for split, rows in splits.items():
        write_questions(folder / f"{split}{form}", rows)
    return folder


# --- Splits


def test_all_questions_about_one_text_are_in_one_split(tmp_path, version, questions):
    _, train, _ = questions[version.name]
    found, _ = load(version, write_questions(tmp_path / "all.jsonl", train), dev_share=0.3, test_share=0.2)
    contexts = [{question.context for question in part} for part in found.values()]
    assert {split: len(part) > 0 for split, part in found.items()} == dict.fromkeys(("train", "dev", "test"), True)
    assert sum(map(len, found.values())) == 24
    assert len(set.union(*contexts)) == sum(map(len, contexts)) == 8


def test_questions_of_a_group_stay_together_also_where_some_of_dev_decide(tmp_path, questions):
    version = VERSIONS[0]
    _, train, _ = questions[version.name]
    rows = [row | {"book": f"b{number % 5}"} for number, row in enumerate(train)]
    found, _ = load(version, write_questions(tmp_path / "all.csv", rows), group="book", test_share=0.0, dev_share=0.5)
    assert set(found) == {"train", "dev"}
    books = [{question.group for question in part} for part in found.values()]
    assert not books[0] & books[1]
    assert books[0] | books[1] == {f"b{number}" for number in range(5)}
    assert TASKS[version.name].tabulate_examples(found["dev"]).groups == [question.group for question in found["dev"]]


def test_the_folder_of_official_files_is_read_as_such_whatever_else_is_in_it(tmp_path, version):
    folder = write_squad(tmp_path, version.number)
    expected, _ = load(version, folder)
    write_questions(folder / "train.jsonl", list_questions(folder / SQUAD[version.name].name_file("dev")))
    assert load(version, folder)[0] == expected
    assert [TASKS[version.name].is_official(name) for name in ("", str(folder), "owner/data")] == [True, True, False]


def test_a_misplaced_answer_is_left_out_of_training_alone(tmp_path, questions, refused):
    _, train, dev = questions["squad1"]

    def move(row):
        return row | {"answers": {"text": row["answers"]["text"][:1], "answer_start": [999]}}

    folder = write_folder(tmp_path, ".jsonl", train=[move(train[0]), *train[1:]], dev=[move(dev[0]), *dev[1:]])
    found, lines = load(VERSIONS[0], folder)
    assert [len(part) for part in found.values()] == [23, 24]
    assert f"{folder}: skipping 1 training questions whose answer is not at its answer_start" in lines
    write_questions(folder / "train.jsonl", [move(row) for row in train])
    with refused():
        load(VERSIONS[0], folder)


def test_options_that_make_no_sense(bert, questions, refused):
    folder, *_ = questions["squad1"]
    for options in ({"folds": 3}, {"group": "title"}, {"max_length": 67, "max_query_length": 64}):
        with refused():
            Recipe.make(TASKS["squad1"], make_recipe(bert, folder, **options))


# --- Test


def test_test_is_scored_at_the_tau_of_dev_and_its_files_stand_beside_those_of_dev(tmp_path, bert, version, questions):
    _, train, dev = questions[version.name]
    folder = write_folder(tmp_path / "own", ".jsonl", train=train, dev=dev[:12], test=dev[12:])
    task, output = TASKS[version.name], tmp_path / "run"
    metrics = run(Recipe.make(task, make_recipe(bert, folder)), output=output)
    names = ["predictions.json", "nbest_predictions.json"] + ["null_odds.json"] * version.unanswerable
    texts = (path for path in (output / "predictions").iterdir() if path.suffix != ".parquet")
    files = {path.name: path.read_text(encoding="utf-8") for path in texts}
    rows = {f"{split}.{ending}" for split in ("dev", "test") for ending in ("jsonl", "mistakes.csv")}
    assert set(files) == {*names, *(f"test_{name}" for name in names), *rows}
    found = read_own_squad(str(folder), version.number)
    for split, prefix, given in (("dev", "", dev[:12]), ("test", "test_", dev[12:])):
        answers = json.loads(files[f"{prefix}predictions.json"])
        lines = [json.loads(line) for line in files[f"{split}.jsonl"].splitlines()]
        assert list(answers) == [row["id"] for row in given] == [line["id"] for line in lines]
        assert [line["answer"] for line in lines] == list(answers.values())
        assert [line["answers"] for line in lines] == [list(one.answers) for one in found[split].questions]
        if not version.unanswerable:
            scores = score_squad1(collect_answers(found[split].questions), answers)
            assert {key: metrics[f"{prefix}{key}"] for key in scores} == scores
            continue
        odds, ranked = (json.loads(files[f"{prefix}{name}"]) for name in ("null_odds.json", "nbest_predictions.json"))
        best = {key: next(one["text"] for one in entries if one["text"]) for key, entries in ranked.items()}
        assert answers == {key: best[key] if odds[key] < -metrics["tau"] else "" for key in best}
        assert [line["odds"] for line in lines] == list(odds.values())
    assert metrics.get("test_tau") == metrics.get("tau")
    shown = [row.name for row in list_shown(task.table, task.metric, metrics)]
    assert {"EM", "F1", "EM, test", "F1, test"} <= set(shown)
    card = (output / "README.md").read_text()
    assert "- Local files: `own`." in card
    assert not [word for word in ("the paper", "official", "rajpurkar") if word in card]


def test_an_unlabelled_test_split_is_only_predicted(tmp_path, bert, version, questions):
    _, train, dev = questions[version.name]
    bare = [{key: cell for key, cell in row.items() if key != "answers"} for row in dev[:6]]
    folder, task = write_folder(tmp_path / "own", ".csv", train=train, dev=dev, test=bare), TASKS[version.name]
    metrics = run(Recipe.make(task, make_recipe(bert, folder)), output=tmp_path / "run")
    assert not any(key.startswith("test_") for key in metrics)
    predictions = tmp_path / "run" / "predictions"
    assert list(json.loads((predictions / "test_predictions.json").read_text())) == [row["id"] for row in bare]
    assert len((predictions / "test.jsonl").read_text().splitlines()) == 6
    assert not (predictions / "test.mistakes.csv").exists()


# --- Chinese

STORY = ("小明母亲的职业是什么？", "今天是教师节，小明送给了母亲一份特殊的节日礼物", "教师")


def write_story(folder):
    """Write the story as dev, and its like with other names and days as train; return its characters too."""
    trades, names = ("教师", "护士", "记者", "医师"), ("小明", "小红", "小华", "小强")
    texts = [
        [text.replace("小明", name).replace("教师", trade) for text in STORY] for trade in trades for name in names
    ]
    rows = [
        {"question": question, "context": context, "answers": {"text": [answer], "answer_start": [3]}}
        for question, context, answer in texts
    ]
    return write_folder(folder, ".jsonl", train=rows[1:], dev=rows[:1]), "".join(map("".join, texts))


def test_the_story_of_the_teacher(tmp_path):
    folder, characters = write_story(tmp_path / "own")
    start = write_checkpoint(tmp_path / "bert", characters=characters, initializer_range=0.1)
    recipe = make_recipe(str(start), folder, max_query_length=16)
    lines, task, output = [], TASKS["squad1"], tmp_path / "run"
    changes = {"train": {"max_steps": 60, "learning_rate": 2e-3}}
    metrics = run(Recipe.make(task, recipe, changes), output=output, report=lines.append)
    assert 'dev: exact match and F1 are those of CMRC, over Chinese characters (data.language = "zh")' in lines
    assert metrics["f1"] == 100.0
    assert OWN_DATA in metrics, "the scores of the paper are not beside those of CMRC"
    (found,) = bertkit.load(str(output)).predict([STORY[:2]])
    assert found["answer"] == STORY[2]
    assert STORY[1][found["best"]["start"] : found["best"]["end"]] == STORY[2]


def test_tau_is_tuned_on_the_f1_over_characters():
    """教师 for 教师节 has the F1 2 * 2/3 / (5/3) = 4/5, the official F1 is 0. To answer both questions of this kind,
    one without an answer must be answered too: the total changes by 4/5 + 4/5 - 1, the official one by -1.
    """
    given = [("a", (), -2.0), ("b", ("教师节",), -1.5), ("c", ("教师节",), -1.5), ("d", (), 0.0)]
    questions = [Question(name, STORY[0], STORY[1], answers, (3,) * len(answers)) for name, answers, _ in given]
    task, odds, found = TASKS["squad2"], [odds for *_, odds in given], {}
    for language in ("zh", "en"):
        rows = task.tabulate_answers(questions, ["教师"] * 4, odds, language=language)
        scores = take_values(task.score(rows))
        found[language] = (scores["tau"], scores["f1"], scores["exact"], rows.column("f1").to_pylist())
    assert found["zh"] == (0.75, pytest.approx(65), 25.0, [0, pytest.approx(0.8), pytest.approx(0.8), 1])
    assert found["en"] == (3.0, 50.0, 50.0, [1, 0, 0, 1])


def test_the_language_is_that_of_the_contexts_or_given(tmp_path, bert, questions, refused):
    official, _, _ = questions["squad1"]
    own, _ = write_story(tmp_path / "own")
    task, tokenizer, found = TASKS["squad1"], load_tokenizer(bert), {}
    for folder in (official, own):
        for language in ("", "en", "zh"):
            recipe = Recipe.make(task, make_recipe(bert, folder, language=language))
            examples = task.load(recipe.data, str)
            found[folder, language] = task.encode(examples["dev"], tokenizer, recipe, "dev").language
    assert list(found.values()) == ["en", "en", "zh", "zh", "en", "zh"]
    with refused():
        Recipe.make(task, make_recipe(bert, own, language="ja"))
