"""The doctor: its findings on planted faults, every task's data, cleaned tables, and what a fine-tuning notes."""

import csv
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.analysis.doctor import (
    FINDINGS,
    GIVEN_AWAY,
    divide_numbers,
    examine,
    explain_answers,
    list_tables,
    write_clean,
)
from bertkit.analysis.report import write_page
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import (
    write_checkpoint,
    write_conll,
    write_glue,
    write_reviews,
    write_squad,
    write_swag,
    write_table,
)

DATA = {  # task -> the writer of its official files, the folder below a root
    "mrpc": (write_glue, ""),
    "stsb": (write_glue, ""),
    "squad2": (write_squad, "squad"),
    "swag": (write_swag, "swag"),
    "ner": (write_conll, "ner"),
    "classify": (write_reviews, "reviews.csv"),
}


COLUMNS = {"text": ["text"], "label": ["label"]}


def check(task, place, model=None, **options):
    """Return the doctor's result on some data."""
    return examine(TASKS[task], {"data": {"dir": str(place), **options}}, model, ignore)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "bert"))


def read_csv(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def make_rows(texts, labels, **others):
    rows = [{"text": text, "label": label, **others} for text, label in zip(texts, labels, strict=True)]
    return [row | {"date": f"day {number}", "copy": row["label"].upper()} for number, row in enumerate(rows)]


@pytest.fixture
def faulty(tmp_path):
    """Write train, dev and test with planted faults; row n stands in line n + 2."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefgh"), 6)) for _ in range(200)]
    usual = [" ".join(draw.choice(words, 9)) for _ in range(40)]
    texts = [*usual, "A good  film", "a GOOD film", "a bad film", "a bad film", "хороший фильм", ""]
    labels = ["good", "bad"] * 20 + ["good", "good", "bad", "good", "good", "bad"]
    write_table(tmp_path / "train.csv", make_rows(texts, labels, source="mail", empty=" "))
    dev = ["a good film", "A BAD FILM", f"{usual[3]}s", "a film of its own kind"]
    write_table(tmp_path / "dev.csv", make_rows(dev, ["bad", "bad", "good", "good"]))
    write_table(tmp_path / "test.csv", make_rows(["another one", "one more thing"], ["bad", "bad"]))
    return tmp_path


def test_planted_faults_are_found_with_their_lines(faulty, model):
    found = check("classify", faulty, model, **COLUMNS).findings
    train, dev, test = (found["splits"][split] for split in ("train", "dev", "test"))
    assert (train["repeats"], train["repeats_rows"]) == (2, [[43, 42], [45, 44]])
    assert (train["contradictory"], train["contradictory_rows"]) == (1, [[44, 45]])
    assert (dev["in_train"], dev["in_train_rows"]) == (2, [[2, 42], [3, 44]])
    assert dev["contradicts_train_rows"] == [[2, 42], [3, 45]]
    assert dev["near_train_rows"] == [[4, 5]]
    assert train["other_scripts_rows"] == [46]
    assert train["blank_rows"] == [47]
    assert (test["missing_labels"], dev["missing_labels"]) == (["good"], [])
    assert train["labels"] == {"good": 24, "bad": 22}
    assert found["columns"]["empty"] == ["empty"]
    assert found["columns"]["constant"] == ["source"]
    assert list(found["columns"]["gives_label_away"]) == ["copy"]
    json.dumps(found)


def test_a_cleaned_table_has_none_of_what_was_dropped(faulty, tmp_path):
    found = check("classify", faulty, **COLUMNS)
    (reason,) = found.findings["left_out"]
    assert reason.startswith("lengths and unknown words, which need a tokenizer")
    write_clean(found, ("leaks", "repeats", "contradictory", "near"), tmp_path / "clean", ignore)
    again = check("classify", tmp_path / "clean", **COLUMNS).findings["splits"]
    for split in again.values():
        assert not any(split.get(key) for key in ("in_train", "repeats", "contradictory", "near_repeats", "near_train"))
    assert again["dev"]["rows"] == 1
    assert read_csv(tmp_path / "clean" / "test.csv")[:1] == make_rows(["another one"], ["bad"])


def test_each_finding_has_one_or_two_samples(faulty, model):
    found = check("classify", faulty, model, **COLUMNS, max_length=10).findings
    counts = Counter(one["finding"] for one in found["samples"])
    for key in FINDINGS:
        assert counts[key] == min(sum(split.get(key, 0) for split in found["splits"].values()), 2)
    shown = {one["finding"]: (one["split"], one["rows"], one["text"]) for one in reversed(found["samples"])}
    assert shown["repeats"] == ("train", [43, 42], "a GOOD film")
    assert shown["other_scripts"] == ("train", [46], "хороший фильм")
    assert shown["blank"] == ("train", [47], "")
    assert {"in_train", "near_train", "contradicts_train", "contradictory", "longer"} < shown.keys()
    _, table, *_ = list_tables(found)
    assert (table.caption, len(table.rows)) == ("Rows to look at", len(found["samples"]))


def test_a_single_file_stays_one_in_its_order(tmp_path):
    rows = [{"text": f"Text {number // 2}", "label": str(number // 2 % 2)} for number in range(60)]
    write_table(tmp_path / "rows.csv", rows)
    write_clean(check("classify", tmp_path / "rows.csv"), ("leaks", "repeats"), tmp_path / "clean.csv", ignore)
    assert read_csv(tmp_path / "clean.csv") == rows[::2]


TYPED = [{"text": f"text {n}", "label": n % 2, "n": 1.50, "flag": True, "l": ["a", 1, None]} for n in range(40)]
SPANS = [{"text": f"Ada n{n}", "spans": [{"start": 0, "end": 3, "label": "PER"}], "none": None} for n in range(40)]


@pytest.mark.parametrize(("task", "rows"), [("classify", TYPED), ("ner", SPANS)])
def test_objects_keep_their_types(tmp_path, task, rows):
    columns = COLUMNS if task == "classify" else {}
    write_table(tmp_path / "rows.jsonl", [*rows, rows[0]])
    (tmp_path / "rows.json").write_text(json.dumps([*rows, rows[0]], indent=1), encoding="utf-8")
    for name in ("rows.jsonl", "rows.json"):
        write_clean(check(task, tmp_path / name, **columns), ("repeats",), tmp_path / "clean.jsonl", ignore)
        found = (tmp_path / "clean.jsonl").read_text(encoding="utf-8")
        assert found == "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "dev"):
        write_table(tmp_path / "data" / f"{split}.jsonl", [row | {"text": f"{row['text']} {split}"} for row in rows])
    write_clean(check(task, tmp_path / "data", **columns), (), tmp_path / "out", ignore)
    for split in ("train", "dev"):
        assert (tmp_path / "out" / f"{split}.jsonl").read_bytes() == (tmp_path / "data" / f"{split}.jsonl").read_bytes()


def test_outputs_are_checked_before_anything_is_shown_or_overwritten(call, faulty, tmp_path):
    (tmp_path / "clean").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.csv").symlink_to("../train.csv")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.csv")}
    same = "is also the input and would be overwritten; name another"
    for data, options, message in (
        (".", ("--write", "clean"), "--write is clean; name a new folder for data of several files"),
        ("train.csv", ("--write", "train.csv"), same),
        ("train.csv", ("--write", "other/link.csv"), same),
        ("train.csv", ("--write", "clean.txt", "--folds", 2), "name a file that ends in .csv or .jsonl"),
        ("train.csv", ("--workers", "many", "--folds", 2), "--workers is 'many'; give a whole number above 0, or ray"),
    ):
        code, out, err = call("doctor", data, "--text", "text", "--label", "label", *options)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
        assert "Rows to look at" not in out
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.csv")}
    assert not list((tmp_path / "clean").iterdir())
    assert not (tmp_path / "runs").exists()


def test_a_split_without_rows_is_not_written(tmp_path):
    texts = [f"text {number}" for number in range(40)]
    write_table(tmp_path / "train.csv", make_rows(texts, ["a", "b"] * 20))
    write_table(tmp_path / "dev.csv", make_rows(texts[:2], ["a", "b"]))
    write_table(tmp_path / "test.csv", [{"text": "one"}])
    found, lines = check("classify", tmp_path, **COLUMNS), []
    write_clean(found, ("leaks",), tmp_path / "clean", lines.append)
    assert f"{tmp_path / 'clean' / 'dev.csv'}: 0 rows, without leaks; not written" in lines
    assert {path.name for path in (tmp_path / "clean").iterdir()} == {"train.csv", "test.csv"}
    again = check("classify", tmp_path / "clean", **COLUMNS).findings["splits"]
    assert list(again) == ["train", "dev", "unlabelled"]


@pytest.mark.parametrize("task", DATA)
def test_every_task_s_data_can_be_checked(task, tmp_path, model):
    write, place = DATA[task]
    write(tmp_path / place)
    found = check(task, tmp_path / place, model)
    for split, one in found.findings["splits"].items():
        assert one["rows"] == len(list(found.rows[split].walk_texts()))
        assert one["tokens"]["max"] > 3
    assert found.findings["left_out"] == []
    assert list_tables(found.findings)[0].caption == "Data"


def test_a_file_that_cannot_be_divided_is_checked_as_train(tmp_path):
    write_table(tmp_path / "rows.csv", [{"text": "same", "label": n % 2} for n in range(40)])
    found = check("classify", tmp_path / "rows.csv").findings
    assert {split: one["repeats"] for split, one in found["splits"].items()} == {"train": 39}
    assert found["left_out"][-1].startswith("the split of train, which training needs: ")
    assert "rows.csv has 40 rows (different texts: 1) and none for dev; give more" in found["left_out"][-1]


def test_long_and_unknown_inputs_are_counted(tmp_path, model):
    rows = make_rows(["word " * number for number in range(1, 30)] + ["😀"], ["a", "b"] * 15)
    write_table(tmp_path / "train.csv", rows)
    write_table(tmp_path / "dev.csv", rows[:2])
    found = check("classify", tmp_path, model, **COLUMNS, max_length=12).findings
    train = found["splits"]["train"]
    assert train["unknown_rows"] == [31]
    assert train["unknown_words"] == {"😀": 1}
    lengths = [int(row) for row in train["longer_rows"]]
    assert lengths == list(range(lengths[0], 31)), "the longest rows"
    assert train["longer"] == len(lengths) > 0


def test_unknown_characters_and_mixed_forms_are_counted_where_train_has_both(tmp_path, model):
    texts = ["这本书很好看。", "这家店一般。", "這本書很好看。", "1998年的书", "１９９８年的书", "iPhone很好"]
    write_table(tmp_path / "train.csv", make_rows(texts, ["a", "b"] * 3))
    write_table(tmp_path / "dev.csv", make_rows(["這家店很好", "１家", "这里"], ["a", "b", "a"]))
    result = check("classify", tmp_path, model, **COLUMNS).findings
    train, dev = (result["splits"][split] for split in ("train", "dev"))
    assert (train["other_form_rows"], dev["other_form_rows"]) == ([4], [2])
    assert (train["other_width_rows"], dev["other_width_rows"]) == ([6], [3])
    assert {len(word) for word in train["unknown_words"]} <= {1, len("１９９８")}
    assert train["unknown_words"]["书"] == 3
    write_table(tmp_path / "train.csv", make_rows(texts[:2] * 2, ["a", "b"] * 2))
    result = check("classify", tmp_path, model, **COLUMNS).findings
    assert not {"other_form", "other_width"} & result["splits"]["dev"].keys()


# --- Columns that give the label away


SMALL = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=30)


def explain_by_force(codes, values):
    """Return the share of the variance of values (S, L) that the means of the others of a group explain."""
    errors = []
    for row, code in enumerate(codes):
        others = [other for other in range(len(codes)) if codes[other] == code and other != row]
        expected = values[others].mean(0) if others else values.mean(0)
        errors.append(((values[row] - expected) ** 2).sum())
    total = ((values - values.mean(0)) ** 2).sum()
    return 1 - sum(errors) / total if total else 0.0


@given(rows=SMALL)
def test_the_share_is_that_of_brute_force(rows):
    codes, answers = (np.array(column) for column in zip(*rows, strict=True))
    assert explain_answers(codes, answers) == pytest.approx(explain_by_force(codes, np.eye(3)[answers]))
    numbers = answers.astype(np.float32)
    assert explain_answers(codes, numbers) == pytest.approx(explain_by_force(codes, numbers[:, None].astype(float)))


def test_a_name_for_every_row_gives_nothing_away_but_a_sorted_number_does():
    rng = np.random.default_rng(0)
    answers, rows = np.repeat([0, 1], 500), np.arange(1000)
    names, shuffled = [f"row {row}" for row in rows], rng.permutation(1000)
    assert explain_answers(divide_numbers(rows, names), answers) < 0.01
    assert explain_answers(divide_numbers(rows, [str(row) for row in rows]), answers) > GIVEN_AWAY
    assert explain_answers(divide_numbers(rows, [str(row) for row in shuffled]), answers) < 0.2


# --- The command line


def test_mistakes_at_the_command_line(call, tmp_path):
    write_reviews(tmp_path / "reviews.csv")
    write_glue(tmp_path / "glue")
    named = ("reviews.csv", "--text", "title", "--label", "stars")
    for words, message in (
        ((*named, "--drop", "all"), "unknown 'all' in --drop; expected some of leaks"),
        ((), "no data to check; name them: bertkit doctor FILE, or --task cola"),
        (("glue", "--task", "cola", "--write", "clean.csv"), "--write is for files of your own, not for glue;"),
    ):
        code, _, err = call("doctor", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_the_command_writes_tables_json_and_the_clean_table(call, tmp_path):
    write_reviews(tmp_path / "reviews.csv")
    write_checkpoint(tmp_path / "bert")
    words = ("--text", "title", "--label", "stars", "--model", "bert")
    code, out, err = call("doctor", "reviews.csv", *words, "--json", "new/found.json", "--write", "clean.jsonl")
    assert (code, err) == (0, "")
    assert "rows that also occur in train" in out
    assert "Suspected label errors by frozen vectors of bert: " in out
    found = json.loads((tmp_path / "new/found.json").read_text(encoding="utf-8"))
    assert (found["splits"]["dev"]["in_train"], found["label_errors"]["rows"]) == (0, 72)
    assert list_tables(found)[-1].caption in out
    assert (tmp_path / "clean.jsonl").is_file()
    assert "--json FILE" not in out
    (tmp_path / "bert" / "model.safetensors").unlink()
    code, out, _ = call("doctor", "reviews.csv", *words)
    assert code == 0
    assert "left out: suspected label errors: the weights of bert are not on this disk; name a folder" in out
    assert out.endswith("--json FILE lists all rows of the findings\n")


# --- Fine-tuning


def test_a_run_notes_leaks_and_scores_without_them(tmp_path):
    write_table(tmp_path / "data" / "train.csv", make_rows([f"text {n}" for n in range(24)], ["a", "b"] * 12))
    dev = [f"TEXT  {n}" for n in range(6)] + [f"other {n}" for n in range(14)]
    write_table(tmp_path / "data" / "dev.csv", make_rows(dev, ["a", "b"] * 10))
    recipe = {
        "checkpoint": str(write_checkpoint(tmp_path / "bert", initializer_range=0.3)),
        "data": {"dir": str(tmp_path / "data"), **COLUMNS},
        "train": {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"},
        "batch_size": 8,
        "precision": "fp32",
    }
    lines = []
    metrics = run(Recipe.make(TASKS["classify"], recipe), output=tmp_path / "run", report=lines.append)
    (line,) = [line for line in lines if "bertkit doctor" in line]
    assert line.startswith("dev: 6 of 20 rows also occur in train; bertkit doctor ")
    rows = read_csv(tmp_path / "run" / "predictions" / "dev.csv")[6:]
    right = np.mean([row["label"] == row["label_predicted"] for row in rows])
    assert metrics["accuracy_without_leaks"] == pytest.approx(right)
    noted = json.loads((tmp_path / "run" / "doctor.json").read_text(encoding="utf-8"))
    assert noted["splits"]["dev"]["in_train_rows"] == [[n + 2, n + 2] for n in range(6)]
    assert "without leaks" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<summary>Doctor</summary>" in page
    assert "rows that also occur in train" in page


def test_rows_without_a_label_or_a_text_and_labels_that_are_alike_are_listed(tmp_path):
    labels = ["very good", "Very  Good", "bad", ""]
    rows = [{"text": f"Text {n}" if n > 3 else "", "label": labels[n % 4]} for n in range(60)]
    found = check("classify", write_table(tmp_path / "rows.csv", rows), test_share=0).findings
    lines = sorted(line for split in found["splits"].values() for line in split["unlabelled_rows"])
    assert lines == list(range(5, 62, 4))
    assert sum(one["blank"] for one in found["splits"].values()) == 3
    assert found["alike_labels"] == ["'Very  Good', 'very good'"]
    tables = {table.caption: table.rows for table in list_tables(found)}
    assert any("rows without a label, left out" in row[0].lines[0][0] for row in tables["Rows to look at"])
    (cells,) = tables["Labels"]
    alike = ["'Very  Good', 'very good'", "differ only in case, accents or spaces"]
    assert [cell.lines[0][0] for cell in cells] == alike
