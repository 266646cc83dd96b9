"""Rows are shown as the model gets them: pieces, segments, labels, tags, answers and targets."""

import re

from bertkit.data.sequences import collate
from bertkit.tasks import TASKS
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.shown_rows import show_rows
from tests.corpora import write_text
from tests.official import FILLERS, write_checkpoint, write_conll, write_reviews, write_squad, write_table
from tests.world import make_recipe


def show(task, folder, count=4, **data):
    checkpoint = str(write_checkpoint(folder / "bert"))
    recipe = Recipe.make(TASKS[task], {"checkpoint": checkpoint, "precision": "fp32", "data": data})
    prepared = prepare(recipe)
    return prepared, list(show_rows(prepared, count))


def test_a_class_and_a_pair(tmp_path):
    table = str(write_reviews(tmp_path / "reviews.csv", 60))
    prepared, lines = show("classify", tmp_path, dir=table, text=["title", "body"], label=["stars"])
    names = prepared.settings["id2label"]
    for row, line in enumerate(lines):
        item = prepared.data["train"][row]
        pieces = prepared.tokenizer.convert_ids_to_tokens(item["input_ids"].tolist())
        number, shown, label = re.fullmatch(r"row (\d): (.*)  (\w+)", line).groups()
        assert (int(number), label) == (row + 1, names[int(item["labels"])])
        first, second = (part.split() for part in shown.split(" | "))
        assert [*first, *second] == pieces
        assert len(second) == item["token_type_ids"].sum() > 0


def test_tags_stand_behind_the_pieces_that_have_them(tmp_path):
    write_conll(tmp_path / "ner")
    prepared, (line, *_) = show("ner", tmp_path, dir=str(tmp_path / "ner"))
    item = prepared.data["train"].__getitems__([0])[0]
    found = [piece.partition("/")[2] for piece in line.partition(": ")[2].split()]
    assert found == [prepared.settings["id2label"].get(label, "") for label in item["labels"].tolist()]


def test_an_answer_stands_between_guillemets(tmp_path):
    write_squad(tmp_path / "squad")
    _, lines = show("squad2", tmp_path, count=50, dir=str(tmp_path / "squad"))
    assert 0 < sum("«" in line for line in lines) < len(lines), "some questions have no answer"
    for line in lines:
        assert line.count("«") == line.count("»") <= 1
        assert "»" not in line.partition(" | ")[0], "the question comes first"


def test_a_token_that_is_predicted_stands_beside_the_one_that_is_read(tmp_path):
    prepared = prepare(Recipe.make(TASKS["pretrain"], make_recipe(write_text(tmp_path / "corpus.txt"))))
    for row, line in enumerate(show_rows(prepared, 3)):
        batch = collate(prepared.data["train"].__getitems__([row]))
        name = prepared.tokenizer.convert_ids_to_tokens
        pairs = [(name(int(read)), name(int(target))) for read, target in zip(
            batch["input_ids"][0], batch["labels"][0], strict=True
        ) if target >= 0]  # fmt: skip
        assert re.findall(r"\{(\S+) (\S+)\}", line) == pairs != []
        assert line.endswith(f"next sentence: {'random' if batch['next_sentence_label'][0] else 'follows'}")


def test_the_command_shows_rows_and_trains_nothing(call, tmp_path):
    table = write_reviews(tmp_path / "reviews.csv", 60)
    checkpoint = write_checkpoint(tmp_path / "bert")
    words = ["classify", "--data", str(table), "--text", "body", "--label", "stars", "--model", str(checkpoint)]
    status, out, _ = call(*words, "--output", str(tmp_path / "run"), "--show", "2")
    assert status == 0
    assert len(re.findall(r"^row \d: \[CLS\]", out, re.MULTILINE)) == 2
    assert "nothing was trained or written" in out
    assert not (tmp_path / "run").exists()


def test_several_labels_are_not_taken_for_tags(tmp_path):
    """Each text has as many tokens as there are labels: [CLS], two words of two pieces, [SEP]."""
    words = [f"{one} {two}" for one in FILLERS[:8] for two in FILLERS[:8]]
    rows = [{"text": text, **{f"is_{n}": float(n == row % 6) for n in range(6)}} for row, text in enumerate(words)]
    table = str(write_table(tmp_path / "several.csv", rows))
    _, lines = show("classify", tmp_path, dir=table, text=["text"], label=["is_*"])
    assert len(lines) == 4
    for line in lines:
        text, label = re.fullmatch(r"row \d: \[CLS\] (.*) \[SEP\]  (\d) 1", line).groups()
        assert words.index(text.replace(" ##", "")) % 6 == int(label)
