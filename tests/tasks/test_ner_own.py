"""A person's own named entities: every form, splits, folds, predictions with scores."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from transformers import pipeline

from bertkit.data.tags import from_iob2
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.evaluate import evaluate
from bertkit.inference.predictor import Predictor
from bertkit.metrics.ner import find_entities
from bertkit.reports.tables import OWN_DATA
from bertkit.studies.folds import gather_folds
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_folds
from bertkit.tasks.examples import divide
from bertkit.tasks.ner import NER
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_table
from tests.tasks.conftest import load_examples, make_small, read_rows

pytestmark = pytest.mark.usefixtures("here")

WORDS = {"good": "PER", "bad": "LOC", "word1": "", "so": "", ".": ""}
FORMS = ("IOB1", "IOB2", "IOBES", "BILOU", "tokens", "spans")


def make_rows(count):
    """Return sentences of words and their tags in IOB2; neighbours of one type are one entity."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        words = draw.choice(list(WORDS), 6).tolist()
        kinds = [WORDS[word] for word in words]
        tags = [
            f"{'I' if before == kind else 'B'}-{kind}" if kind else "O"
            for before, kind in zip(["", *kinds], kinds, strict=False)
        ]
        rows.append((words, tags))
    return rows


def write_form(path, form, rows):
    """Write sentences as a CoNLL file in a scheme, as words and tags, or as texts and spans."""
    if form in FORMS[:4]:
        lines = [zip(words, from_iob2(tags, form), strict=True) for words, tags in rows]
        path = path.with_suffix(".conll")
        path.write_text("\n".join("".join(f"{word} {tag}\n" for word, tag in pairs) for pairs in lines))
        return path
    table = []
    for number, (words, tags) in enumerate(rows):
        row = {"id": f"n{number}", "writer": f"w{number // 5}"}
        if form == "tokens":
            table.append(row | {"tokens": words, "ner_tags": tags})
            continue
        starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        entities = find_entities(tags)
        spans = [{"start": starts[first], "end": starts[end] - 1, "label": kind} for first, end, kind in entities]
        table.append(row | {"text": " ".join(words), "spans": spans})
    return write_table(path.with_suffix(".jsonl"), table)


load = partial(load_examples, NER)


def make_recipe(bert, place, updates=6):
    return make_small(bert, place, {"max_length": 40}, max_steps=updates)


@pytest.fixture(scope="module")
def finished(bert, tmp_path_factory):
    """Return the directory of a finished run on texts and spans, which has learned them, and its metrics."""
    folder = tmp_path_factory.mktemp("own")
    path = write_form(folder / "train", "spans", make_rows(80))
    return folder / "run", run(Recipe.make(NER, make_recipe(bert, path, updates=60)), output=folder / "run")


def test_every_form_has_the_same_sequences_and_labels(bert, tmp_path):
    tokenizer, found = load_tokenizer(bert), {}
    for form in FORMS:
        recipe = Recipe.make(NER, make_recipe(bert, write_form(tmp_path / form, form, make_rows(60))))
        examples = NER.load(recipe.data, str)
        found[form] = {key: NER.encode(part, tokenizer, recipe, key).fingerprint() for key, part in examples.items()}
    assert set(found["spans"]) == {"train", "dev", "test"}
    assert found == dict.fromkeys(FORMS, found["spans"])


def test_predictions_have_the_rows_of_the_input(finished):
    output, metrics = finished
    assert OWN_DATA in metrics
    assert "For whole names" in (output / "README.md").read_text(encoding="utf-8")
    for split, key in (("dev", "f1"), ("test", "test_f1")):
        rows = [json.loads(line) for line in (output / "predictions" / f"{split}.jsonl").read_text().splitlines()]
        assert {tuple(row) for row in rows} == {("id", "writer", "text", "spans", "predicted")}
        sides = [(row["spans"], row["predicted"]) for row in rows]
        right = sum(span in predicted for spans, predicted in sides for span in spans)
        assert metrics[key] == pytest.approx(2 * right / sum(len(spans) + len(found) for spans, found in sides))
        assert metrics[key] > 0.3


def test_entities_have_scores_as_in_the_stock_pipeline(finished):
    predictor = Predictor(str(finished[0]), precision="fp32")
    text = "so good good . bad word1"
    _, result = predictor(["word1", text])  # the shorter one is padded
    stock = pipeline("token-classification", model=str(finished[0]), aggregation_strategy="first")(text)
    found = predictor.format_for_pipeline(result)
    keys = ("entity_group", "word", "start", "end")
    assert [[one[key] for key in keys] for one in found] == [[one[key] for key in keys] for one in stock]
    expected = [float(one["score"]) for one in stock]
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)
    assert 0.5 < min(expected) < 1


def write_texts(path, rows):
    """Write texts with spans of each name, which has quotes, a hyphen or a possessive beside it."""
    draw, table = np.random.default_rng(1), []
    for words, _ in rows:
        text, spans = "", []
        for word in words:
            before, behind = (
                draw.choice(marks) if WORDS[word] else "" for marks in (["", "“", "("], ["’s", "-so", "”"])
            )
            text += before
            if WORDS[word]:
                spans.append([len(text), len(text) + len(word), WORDS[word]])
            text += f"{word}{behind} "
        table.append({"text": text, "spans": spans})
    return write_table(path, table)


@pytest.fixture(scope="module")
def marked(bert, tmp_path_factory):
    """Return the directory of a run on such texts, in whose test file a span is a part of a word, and its metrics."""
    folder = tmp_path_factory.mktemp("marked")
    write_texts(folder / "train.jsonl", make_rows(80))
    write_texts(folder / "dev.jsonl", make_rows(90)[80:])
    write_table(folder / "test.jsonl", [{"text": "so goodword1 bad’s", "spans": [[3, 7, "PER"], [13, 16, "LOC"]]}])
    lines = []
    metrics = run(Recipe.make(NER, make_recipe(bert, folder, updates=60)), output=folder / "run", report=lines.append)
    (line,) = [line for line in lines if "within a word" in line]
    assert line.startswith(f"{folder / 'test.jsonl'}: 1 spans")
    return folder, metrics


def test_spans_beside_marks_are_learned_scored_and_written(marked):
    folder, metrics = marked
    output = folder / "run"
    assert metrics["f1"] > 0.9
    assert json.loads((output / "config.json").read_text())["text_words"] == "basic"
    rows = [json.loads(line) for line in (output / "predictions" / "dev.jsonl").read_text().splitlines()]
    found = {row["text"][x["start"] : x["end"]] for row in rows for x in row["predicted"]}
    assert {"good", "bad"} <= found
    lines = (output / "predictions" / "dev.conll").read_text().splitlines()
    assert {"’", "s", "-", "“"} <= {line.split(" ")[0] for line in lines if line}
    (wrong,) = read_rows(output / "predictions" / "test.mistakes.csv")
    assert wrong["label"] == "good: PER, bad: LOC", "as it was given"
    assert not (output / "predictions" / "test.conll").exists()


def test_prediction_and_evaluation_divide_texts_as_training_did(marked, tmp_path):
    folder, metrics = marked
    text = "so “good”, bad’s word1-so 好的."
    words = ["so", "“", "good", "”", ",", "bad", "’", "s", "word1", "-", "so", "好", "的", "."]
    result = Predictor(str(folder / "run"), precision="fp32")([text])[0]
    assert [text[start:end] for start, end in result["places"]] == words
    assert [(x["text"], x["type"]) for x in result["entities"]][:2] == [("good", "PER"), ("bad", "LOC")]
    for given in (None, str(folder / "dev.jsonl")):
        found = evaluate(str(folder / "run"), given, tmp_path / "new" if given else None)
        assert found[0].metrics["f1"] == pytest.approx(metrics["f1"])

    old = tmp_path / "old"
    shutil.copytree(folder / "run", old)
    config = json.loads((old / "config.json").read_text())
    del config["text_words"]
    (old / "config.json").write_text(json.dumps(config))
    (old / "environment.json").unlink()  # its fingerprint is of the words of today
    result = Predictor(str(old), precision="fp32")([text])[0]
    words = ["so", "“", "good", "”", ",", "bad’s", "word1-so", "好", "的", "."]
    assert [text[start:end] for start, end in result["places"]] == words, "a run of an earlier version"
    assert evaluate(str(old), None, None)[0].metrics["f1"] < metrics["f1"]


def test_a_model_of_words_divides_texts_as_before(bert, tmp_path):
    (tmp_path / "d").mkdir()
    write_form(tmp_path / "d" / "train", "tokens", make_rows(20))
    write_texts(tmp_path / "d" / "dev.jsonl", make_rows(3))
    examples, _ = load(tmp_path / "d")
    assert any("good’s" in sentence.words for sentence in examples["dev"].text.sentences)
    recipe = Recipe.make(NER, make_recipe(bert, tmp_path / "d"))
    assert NER.configure(recipe, load_tokenizer(bert), examples)["text_words"] is None


def test_the_splits_of_texts_do_not_depend_on_their_words(tmp_path):
    path = write_texts(tmp_path / "t.jsonl", make_rows(60))
    found = [load(path, text_words=text_words)[0] for text_words in (None, "basic")]
    for split, one in found[0].items():
        rows, others = NER.tabulate_examples(one), NER.tabulate_examples(found[1][split])
        assert (rows.lines, rows.texts) == (others.lines, others.texts)
        assert rows.labels != others.labels


def test_the_rows_of_a_group_stay_together_and_need_a_table(tmp_path, refused):
    path = write_form(tmp_path / "t", "tokens", make_rows(200))
    examples, _ = load(path, group="writer")
    sizes = {split: len(found.text.sentences) for split, found in examples.items()}
    assert sum(sizes.values()) == 200
    assert all(size % 5 == 0 for size in sizes.values())
    assert set(sizes) == {"train", "dev", "test"}
    for rows in divide(NER, examples["train"], 0.5):
        assert len(rows.text.sentences) % 5 == 0, "also where a part of dev decides"
    with refused():
        load(write_form(tmp_path / "t", "IOB2", make_rows(9)), group="writer")


def test_a_test_split_without_tags_is_predicted_and_train_must_have_some(bert, tmp_path, refused):
    folder = tmp_path / "d"
    folder.mkdir()
    rows = [{"tokens": words, "ner_tags": from_iob2(tags, "BILOU")} for words, tags in make_rows(80)]
    write_table(folder / "train.jsonl", rows)
    write_table(folder / "test.jsonl", [{"tokens": words} for words in (["good", "so"], ["bad"])])
    metrics = run(Recipe.make(NER, make_recipe(bert, folder, updates=40)), output=tmp_path / "run")
    assert not any(key.startswith("test_") for key in metrics)
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions" / "test.jsonl").read_text().splitlines()]
    assert [row["predicted"] for row in rows] == [["U-PER", "O"], ["U-LOC"]], "in the scheme of train"
    again = Predictor(str(tmp_path / "run"))([{"tokens": ["good", "so"]}, {"tokens": '["bad"]'}])
    assert [result["tags"] for result in again] == [["B-PER", "O"], ["B-LOC"]]
    assert not (tmp_path / "run" / "predictions" / "test.conll").exists()
    write_table(folder / "dev.jsonl", [{"tokens": ["good"]}])
    with refused():
        load(folder)
    (folder / "dev.jsonl").unlink()
    write_table(folder / "train.jsonl", [{"tokens": ["good", str(n)], "tags": ["O", "O"]} for n in range(50)])
    with refused():
        load(folder)


def test_rows_without_tags_are_an_error_or_left_out_and_told(tmp_path, refused):
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in make_rows(60)]
    path = write_table(tmp_path / "t.jsonl", [*rows, {"tokens": ["so"]}, *rows[:9], {"tokens": ["good"]}])
    with refused():
        load(path)
    examples, lines = load(path, unlabelled="drop")
    assert sum(len(found.text.sentences) for found in examples.values()) == 69
    assert lines[0] == f"{path}: 2 rows have no ner_tags and are left out (first: line 61)"


def test_labels_of_several_words_are_kept_and_have_no_spaces_in_conll_files(bert, tmp_path, refused):
    rows = [(words, [tag.replace("PER", "Person name") for tag in tags]) for words, tags in make_rows(60)]
    path = write_form(tmp_path / "t", "spans", rows)
    run(Recipe.make(NER, make_recipe(bert, path, updates=60)), output=tmp_path / "run")
    labels = json.loads((tmp_path / "run" / "config.json").read_text())["id2label"]
    assert {*labels.values()} == {"O", "B-LOC", "I-LOC", "B-Person name", "I-Person name"}
    files = [tmp_path / "run" / "predictions" / f"dev.{suffix}" for suffix in ("conll", "jsonl")]
    cells = [line.split(" ") for line in files[0].read_text().splitlines() if line]
    assert {"B-Person_name"} < {tag for _, right, guess in cells for tag in (right, guess)}
    found = [span["label"] for line in files[1].read_text().splitlines() for span in json.loads(line)["predicted"]]
    assert "Person name" in found
    words, tags = rows[0]
    other = write_form(tmp_path / "other", "spans", [(words, [tag.replace(" ", "_") for tag in tags])])
    path.write_text(path.read_text() + other.read_text())
    with refused():
        load(path)


@pytest.mark.parametrize("form", ["tokens", "IOBES"])
def test_folds_predict_every_sentence(bert, tmp_path, form):
    rows, output = make_rows(40), tmp_path / "out"
    path = write_form(tmp_path / "t", form, rows)
    found = run_study(make_study(define_folds("ner", make_recipe(bert, path, updates=2), 2)), output=output)
    assert gather_folds(found, output) is not None
    if form == "tokens":
        lines = list(map(json.loads, (output / "out_of_fold.jsonl").read_text().splitlines()))
        assert [row["tokens"] for row in lines] == [words for words, _ in rows]
        assert {row["fold"] for row in lines} == {1, 2}
    else:
        blocks = (output / "out_of_fold.conll").read_text().split("\n\n")
        found = [[line.split(" ")[0] for line in block.splitlines()] for block in blocks if block]
        assert found == [words for words, _ in rows]
