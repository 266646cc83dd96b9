"""The prediction table and its file: keys by content, tables of other programs, errors of damaged files, mistakes."""

import csv
import io

import pandas
import pyarrow as pa
import pytest

from bertkit.data.formats.rows import read_columns
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.metrics.table import LABEL, NAMES, PREDICTION, make_rows, read_facts
from bertkit.tasks.examples import ExampleRows
from bertkit.training.predictions import KEY, format_table, join_rows, list_mistakes, read_table, write_mistakes
from tests.official import write_checkpoint, write_table

TEXTS, LABELS, ANSWERS = ["Good.", "Bad.", "good word1 word1"], ["yes", "no", "yes"], ["no", "no", "yes"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_checkpoint(tmp_path_factory.mktemp("bert")))


def join(tokenizer, numbers=(0, 1, 2), answers=ANSWERS, labels=LABELS, **facts):
    """Return the prediction table of some of the rows."""
    texts, labels, answers = ([column[number] for number in numbers] for column in (TEXTS, labels, answers))
    examples = ExampleRows({"text": texts}, texts, labels, labels, [number + 2 for number in numbers])
    return join_rows(make_rows({LABEL: labels, PREDICTION: answers}), examples, tokenizer, **facts)


def test_keys_follow_texts_and_right_answers_only(tokenizer):
    rows = join(tokenizer, task="classify", split="dev")
    keys = rows.column(KEY).to_pylist()
    assert join(tokenizer, (2, 1, 0), LABELS).column(KEY).to_pylist() == keys[::-1]
    assert not set(keys) & set(join(tokenizer, labels=["other"] * 3).column(KEY).to_pylist())
    twice = join(tokenizer, (0, 0, 1, 2)).column(KEY).to_pylist()
    assert len(set(twice)) == 4
    assert [twice[0], *twice[2:]] == keys, "equal rows are numbered"
    assert rows.column_names == ["key", "row", "group", "tokens", "unknown_tokens", "text", "label", "prediction"]
    assert rows.column("row").to_pylist() == [2, 3, 4]
    assert rows.column("tokens").to_pylist() == [2, 2, 5], "good word ##1 word ##1"
    assert read_facts(rows) == {"table": 1, "task": "classify", "split": "dev", "texts": ["text"]}


def test_input_columns_whose_names_are_taken_are_renamed(tokenizer, tmp_path):
    """The label is the table's own under its name, and its input column is left out."""
    given = [{"tokens": TEXTS[n], "label": LABELS[n], "row": "r", "id": n} for n in range(3)]
    source = read_columns(write_table(tmp_path / "t.csv", given))
    examples = ExampleRows(
        {"tokens": source.find("tokens")}, TEXTS, LABELS, LABELS, source.lines, source, {"tokens", "label"}
    )
    rows = join_rows(make_rows({LABEL: LABELS, PREDICTION: ANSWERS}), examples, tokenizer)
    assert rows.column("tokens_input").to_pylist() == TEXTS
    assert (rows.column("row_input").to_pylist(), rows.column("row").to_pylist()) == (["r"] * 3, [2, 3, 4])
    assert rows.column_names.count(LABEL) == 1
    assert "label_input" not in rows.column_names
    assert read_facts(rows) == {"table": 1, "texts": ["tokens_input"], "inputs": ["row_input", "id"]}


@pytest.mark.parametrize("reverse", [False, True])
def test_columns_of_a_table_that_came_out_of_a_run_stay_apart(reverse, tokenizer, tmp_path):
    names = ["group", "group_input", "group_input_input", "probability_a", "probability_a_input", "f1", "strict_found"]
    names.append("prediction_spans")
    names = names[::-1] if reverse else names
    source = read_columns(write_table(tmp_path / "t.csv", [{name: f"{name} {n}" for name in names} for n in range(3)]))
    examples = ExampleRows(
        {"group_input": source.find("group_input")}, TEXTS, LABELS, LABELS, source.lines, source, {"group_input"}
    )
    taken = {name: [0.5] * 3 for name in ("probability_a", "probability_a_input")}
    rows = join_rows(make_rows({LABEL: LABELS, PREDICTION: ANSWERS} | taken), examples, tokenizer)
    facts = read_facts(rows)
    assert not {"f1", "strict_found", "prediction_spans"} & {*rows.column_names}, "these tell the kind of a table"
    assert facts["texts"] == ["group_input"]
    shown = {name: rows.column(name).to_pylist()[1] for name in facts["texts"] + facts["inputs"]}
    assert sorted(shown.values()) == sorted(f"{name} 1" for name in names)
    assert shown["group_input"] == "group_input 1"
    assert "group_input 0" in write_mistakes(rows)


def test_a_file_keeps_all_and_a_repeated_text_once(tokenizer, tmp_path):
    rows = join(tokenizer, [0] * 4000 + [1, 2])
    files = format_table(rows, "dev")
    assert list(files) == ["dev.parquet", "dev.mistakes.csv"]
    (tmp_path / "dev.parquet").write_bytes(files["dev.parquet"])
    assert read_table(tmp_path / "dev.parquet").equals(rows, check_metadata=True)
    assert format_table(rows, "dev") == files
    assert list(format_table(rows.drop_columns([LABEL]), "test")) == ["test.parquet"]
    long = rows.set_column(rows.column_names.index("text"), "text", pa.array(["x" * 9999] * 4002))
    assert len(format_table(long, "dev")["dev.parquet"]) < len(files["dev.parquet"]) + 1000


LISTS = [["a", "b"], [], ["b"]], [["a"], ["b"], ["b"]]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (([1, 2, 3], [1.0, 2.0, 2.0]), (["1", "2", "3"], ["1", "2", "2"])),
        (LISTS, LISTS),
        ((["a|b", "", "b"], ["a", "b", "b"]), LISTS),
        (([0.5, 2.25, 1.0], [1.5, 2.0, 2.5]), ([0.5, 2.25, 1.0], [1.5, 2.0, 2.5])),
    ],
)
def test_a_table_of_pandas_gets_keys(written, read, ending, tmp_path):
    labels, answers = written
    table = pandas.DataFrame({"text": TEXTS, "label": labels, "prediction": answers, "probability": 0.5})
    path = tmp_path / f"answers.{ending}"
    table.to_csv(path, index=False) if ending == "csv" else table.to_parquet(path, index=False)
    rows = read_table(path)
    assert (rows.column(LABEL).to_pylist(), rows.column(PREDICTION).to_pylist()) == read
    assert read_facts(rows)["texts"] == ["text"]
    assert len(set(rows.column(KEY).to_pylist())) == 3
    assert read_table(path, ["text"]).column(KEY).equals(rows.column(KEY))


def test_files_that_are_no_table_are_refused(tokenizer, tmp_path, refused):
    path, rows = tmp_path / "dev.parquet", join(tokenizer)
    whole = format_table(rows, "dev")["dev.parquet"]
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"dev\.parquet cannot be used: .*; delete it and write it again") as error:
            read_table(path)
        assert "\n" not in str(error.value)
    numbers = [{"text": n, "label": n / 7, "prediction": "?" * (n == 30)} for n in range(40)]
    for given in ([{"text": "a", "label": "b"}], [{"label": "b", "prediction": "b"}], numbers):
        with refused():
            read_table(write_table(tmp_path / "t.csv", given))


MISTAKES = {  # columns, and the numbers of the wrong rows, the worst first
    "classes": ({LABEL: ["a", "b", "a"], PREDICTION: ["b", "b", "b"]}, [0, 2]),
    "several": (
        {
            LABEL: pa.array([["a"], ["b", "a"], []], NAMES),
            PREDICTION: pa.array([[], ["a", "b"], ["b"]], NAMES),
            "probability_a": [0.4, 1.0, 0.1],
            "probability_b": [0.1, 1.0, 0.9],
        },
        [2, 0],
    ),
    "numbers": ({LABEL: [1.0, 2.0, 3.0], PREDICTION: [1.1, 4.5, 6.0]}, [2, 1]),  # the root of 15.26 / 3 is 2.26
    "questions": ({LABEL: pa.array([["a"]] * 3, NAMES), PREDICTION: list("abc"), "f1": [1.0, 0.5, 0.0]}, [2, 1]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_worst_mistakes_come_first(kind):
    columns, numbers = MISTAKES[kind]
    assert list_mistakes(make_rows(columns, names=[] if kind == "numbers" else ["a", "b"])).tolist() == numbers


def test_sentences_with_the_lowest_f1_come_first():
    """The second one has 1 right of 2 found and 1 wanted, F1 2/3; the third none of 1; the last has no entity."""
    counts = {"right_X": [1, 1, 0, 0], "found_X": [1, 2, 0, 0], "wanted_X": [1, 1, 1, 0], "strict_found": [1, 2, 0, 0]}
    assert list_mistakes(make_rows({PREDICTION: [["O"]] * 4} | counts, names=["X"])).tolist() == [2, 1]


def test_mistakes_are_a_table_of_their_own(tokenizer, tmp_path):
    given = [{"id": number, "text": text, "tags": ""} for number, text in enumerate(TEXTS)]
    source = read_columns(write_table(tmp_path / "t.csv", given))
    labels, answers = [["a", "b"], ["b"], ["a"]], pa.array([["a"], ["b"], ["b", "a"]], NAMES)
    examples = ExampleRows({"text": source.find("text")}, TEXTS, labels, [], source.lines, source, {"text", "tags"})
    rows = join_rows(make_rows({LABEL: pa.array(labels, NAMES), PREDICTION: answers}), examples, tokenizer)
    assert list(csv.DictReader(io.StringIO(write_mistakes(rows)))) == [
        {"row": "2", "text": TEXTS[0], "prediction": "a", "label": "a | b", "id": "0"},
        {"row": "4", "text": TEXTS[2], "prediction": "a | b", "label": "a", "id": "2"},
    ]
