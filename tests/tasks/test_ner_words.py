"""A class for each word: treebanks and columns of CoNLL files, scores over words, runs, results, pages, the doctor."""

import json
from functools import partial

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score
from transformers import pipeline

from bertkit.analysis.compare import Method
from bertkit.analysis.doctor import examine, list_tables
from bertkit.analysis.report import write_page
from bertkit.analysis.slices import choose_score
from bertkit.data.formats.conll import list_conll_files, read_conll
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.predictor import Predictor
from bertkit.reports.tables import find_row, list_shown
from bertkit.system.progress import ignore
from bertkit.tasks.ner import NER, fill_summaries
from bertkit.training.predictions import format_cells, name_entities, read_table, show_mistakes
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.conftest import draft
from tests.official import write_conll, write_table, write_treebank
from tests.tasks.conftest import load_examples
from tests.world import find_part, make_tagger, read_tables

CLASSES = ["ADJ", "ADV", "NOUN", "PUNCT", "VERB"]
NAMES = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")
EWT = """# newdoc id = reviews
# sent_id = reviews-1
# text = Don't miss New York!
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVBP\tMood=Imp\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\tPolarity=Neg\t3\tadvmod\t_\t_
3\tmiss\tmiss\tVERB\tVB\tVerbForm=Inf\t0\troot\t_\t_
4\tNew York\tNew York\tPROPN\tNNP\t_\t3\tobj\t_\tSpaceAfter=No
5\t!\t!\tPUNCT\t.\t_\t3\tpunct\t_\t_

# sent_id = reviews-2
1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_
1.1\tmiss\tmiss\tVERB\tVB\t_\t_\t_\t0:root\t_

# newdoc
# newpar
1\t#\t#\tSYM\tNN\t_\t0\troot\t_\t_
"""


load = partial(load_examples, NER)


def encode(examples, start, split, report=ignore, **data):
    recipe = draft(NER, {"data": {"max_length": 40} | data})
    return NER.encode(examples[split], load_tokenizer(start), recipe, split, report)


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


# --- Files


def test_a_treebank_is_read_without_ranges_and_empty_nodes(tmp_path):
    text = read_conll(write(tmp_path / "ewt.conllu", EWT))
    assert (text.scheme, text.odd, text.documents) == ("words", 0, 2)
    assert [(list(x.words), list(x.tags), x.document, x.line) for x in text.sentences] == [
        (["Do", "n't", "miss", "New York", "!"], ["AUX", "PART", "VERB", "PROPN", "PUNCT"], 1, 5),
        (["Yes"], ["INTJ"], 1, 12),
        (["#"], ["SYM"], 2, 17),
    ]
    assert all(x.tags is x.official for x in text.sentences)
    lone = EWT + "\n1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_\n\n1.1\tmiss\tmiss\tVERB\tVB\t_\t_\t_\t0:root\t_\n"
    assert read_conll(write(tmp_path / "lone.conllu", lone)).sentences == text.sentences, "no words, no sentence"
    for label, tags in (("xpos", ["VBP", "RB", "VB", "NNP", "."]), ("HEAD", ["3", "3", "0", "3", "3"])):
        found = read_conll(tmp_path / "ewt.conllu", label=label, scheme="words")
        assert list(found.sentences[0].tags) == tags


MISC = {
    "Oslo": "{}=B-LOC|SpaceAfter=No",
    "is": "Gloss=be|{}=_",
    "New": "{}=B-LOC",
    "York": "{}=I-LOC|Lang=en",
    ".": "_",
}


@pytest.mark.parametrize("key", ["name", "NER"])
def test_entities_are_found_among_the_values_of_misc(key, tmp_path, refused):
    rows = [[word, *"_" * 7, cell.format(key)] for word, cell in MISC.items()]
    cells = ["\t".join([str(number), *row]) for number, row in enumerate(rows, 1)]
    path, lines = write(tmp_path / "a.conllu", "\n".join(cells)), []
    for label in ("MISC", "misc"):
        text = read_conll(path, lines.append, label)
        assert (text.scheme, text.sentences[0].tags) == ("IOB2", ["B-LOC", "O", "B-LOC", "I-LOC", "O"])
    assert lines[0] == f"{path}: the tags are the values of {key} in the column MISC"
    bare = write(tmp_path / "b.conllu", path.read_text().replace(f"{key}=", ""))
    assert read_conll(bare, label="MISC").sentences[0].tags == text.sentences[0].tags
    for wrong in (path.read_text().replace("=B-", "=").replace("=I-", "="), path.read_text().replace("Lang=en", "A=O")):
        with refused():
            read_conll(write(tmp_path / "c.conllu", wrong), label="MISC")


def test_what_is_not_a_column_or_not_a_class_is_refused(tmp_path, refused):
    write(tmp_path / "ewt.conllu", EWT)
    write(tmp_path / "cut.conllu", EWT.replace("\tobj\t_\tSpaceAfter=No", "\tobj"))
    write(tmp_path / "four.conll", "Ada NNP B-NP B-PER\n")
    for name, options in (
        ("ewt.conllu", {"label": "POS"}),
        ("ewt.conllu", {"label": "HEAD"}),  # numbers are not guessed to be classes
        ("ewt.conllu", {"scheme": "entities"}),
        ("cut.conllu", {}),
        ("four.conll", {"label": "UPOS"}),
        ("four.conll", {"label": "5"}),
    ):
        with refused():
            read_conll(tmp_path / name, **options)
    with refused():
        load(tmp_path / "ewt.conllu", label=["DEPS"], dev_share=None)
    table = write_table(tmp_path / "table.jsonl", [{"tokens": ["a"], "upos": ["DET"]}] * 4)
    with refused():
        load(table, label=["postags"])


def test_the_files_of_a_treebank_have_its_names(tmp_path):
    write_treebank(tmp_path / "UD_Tiny")
    (tmp_path / "README").write_text("about")
    names = {split: path.name for split, path in list_conll_files(tmp_path).items()}
    assert names == {split: f"en_tiny-ud-{split}.conllu" for split in ("train", "dev", "test")}
    examples, lines = load(tmp_path)
    path = tmp_path / "UD_Tiny" / "en_tiny-ud-train.conllu"
    assert lines == [
        "NER: train 48 sentences, dev 18 sentences, test 10 sentences",
        f"{path}: tags are 5 classes of words, such as VERB (data.scheme=words)",
    ]
    assert {part.labels for part in examples.values()} == {tuple(CLASSES)}
    assert examples["train"].text.documents == 16


@pytest.mark.parametrize(
    ("label", "labels"), [("2", ("JJ", "NN")), ("3", ("O", "B-NP", "I-NP")), ("4", NAMES), ("", NAMES)]
)
def test_a_column_of_conll_files_is_named_by_its_number(tmp_path, label, labels):
    """The second of CoNLL-2003's columns has parts of speech, the third has phrases, the last one has names."""
    folder = write_conll(tmp_path)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("good NN", "good JJ"))
    examples, lines = load(folder, label=[label] if label else [])
    assert examples["train"].labels == labels
    assert any("classes of words" in line for line in lines) == (label == "2")


def test_all_splits_have_the_scheme_of_train(tmp_path, refused):
    """Tags of names without a mark are a mistake in data of names, and marks are parts of classes in others."""
    write(tmp_path / "train.conll", "a B-X\nb O\n")
    write(tmp_path / "dev.conll", "a X\nb O\n")
    with refused():
        load(tmp_path)
    examples, _ = load(tmp_path, scheme="words")
    assert examples["dev"].labels == ("O", "B-X")
    write(tmp_path / "train.conll", "a X\nb O\nc B\n")
    write(tmp_path / "dev.conll", "a B-X\nb O\n")
    examples, _ = load(tmp_path)
    assert {part.text.scheme for part in examples.values()} == {"words"}
    assert examples["train"].labels == ("O", "B", "X")


def test_a_table_has_the_sequences_and_labels_of_a_treebank(start, tmp_path):
    folder = write_treebank(tmp_path / "treebank")
    for split, path in list_conll_files(folder).items():
        rows = [{"tokens": list(x.words), "upos": list(x.tags), "n": x.line} for x in read_conll(path).sentences]
        write_table(tmp_path / "table" / f"{split}.jsonl", rows)
    prints = []
    for place, options in ((folder, {}), (tmp_path / "table", {"label": ["upos"]})):
        examples, _ = load(place, **options)
        data = {split: encode(examples, start, split, context=False) for split in examples}
        prints.append({split: one.fingerprint() for split, one in data.items()})
    assert prints[0] == prints[1]
    assert NER.tabulate_examples(examples["dev"]).used == ("tokens", "upos")
    answers = NER.decode(fill_summaries(data["dev"], 2), data["dev"])
    files = NER.format_predictions(answers, data["dev"], "dev")
    row = json.loads(files["dev.jsonl"].splitlines()[0])
    assert (list(row), row["predicted"]) == (["tokens", "upos", "n", "predicted"], ["NOUN"] * 7)
    more = write_table(tmp_path / "more.jsonl", [row | {"ner_tags": ["B-X"] * 7}] * 2)
    with_names, _ = load(more, dev_share=None)
    assert with_names["train"].labels == ("O", "B-X"), "without a label, the usual column"


# --- Scores


def test_scores_are_those_of_all_words(start, tmp_path):
    """Accuracy and macro F1 are scikit-learn's; they follow from the table, for any weights of sentences."""
    folder = write_treebank(tmp_path / "treebank")
    path = folder / "en_tiny-ud-dev.conllu"
    path.write_text(path.read_text().replace("\tbad\tbad\tADJ", "\tbad\tbad\tX").replace("\tso\tso\t", "\t\u200b\t_\t"))
    examples, _ = load(folder)
    lines = []
    data = encode(examples, start, "dev", lines.append)
    assert "words have no token and are predicted as ADJ" in lines[0]
    assert "have a tag that is not in training data (X)" in lines[0]
    words = data.locate_all()[2]
    drawn = np.random.default_rng(0).integers(0, len(CLASSES), len(words))
    rows = NER.decode(fill_summaries(data, drawn), data).rows
    gold, found = (rows.column(name).to_pylist() for name in ("label", "prediction"))
    measured, flat_gold = NER.score(rows), [tag for tags in gold for tag in tags]

    def judge(weights):
        repeated = np.repeat(np.arange(len(rows)), weights)
        flat, guesses = ([tag for row in repeated for tag in side[row]] for side in (gold, found))
        return accuracy_score(flat, guesses), f1_score(flat, guesses, average="macro", zero_division=0)

    assert "X" in flat_gold
    for weights in (np.ones(len(rows), int), np.random.default_rng(1).integers(0, 3, len(rows))):
        values = {name: score.score(weights[None].astype(float))[0] for name, score in measured.items()}
        accuracy, macro = judge(weights)
        assert values == pytest.approx({"accuracy": accuracy, "macro_f1": macro, "f1": accuracy})
    train = encode(examples, start, "train")
    baseline = NER.baseline(train, data)
    assert CLASSES[np.bincount(train.labels).argmax()] == "NOUN"
    assert set(baseline) == {f"majority_{name}" for name in ("accuracy", "macro_f1", "f1", "score")}
    assert baseline["majority_accuracy"] == baseline["majority_score"] == np.mean(np.array(flat_gold) == "NOUN")


# --- A run and its results


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    """Return the directory of a run that has learned the classes of words, and its metrics."""
    folder = tmp_path_factory.mktemp("tagger")
    train = {"max_steps": 60, "learning_rate": 5e-3, "save_strategy": "no", "eval_strategy": "no"}
    recipe = Recipe.make(NER, make_tagger(folder) | {"precision": "fp32"}, {"train": train})
    return folder / "run", run(recipe, output=folder / "run")


def test_a_run_scores_words_against_the_most_frequent_class(tagger):
    output, metrics = tagger
    assert metrics["score"] == metrics["accuracy"] == metrics["f1"] > 0.9
    assert metrics["score_low"] == metrics["accuracy_low"] <= metrics["accuracy"] <= metrics["accuracy_high"]
    assert metrics["own_data"]
    for split, name in (("dev", "{}"), ("test", "test_{}")):
        blocks = (output / "predictions" / f"{split}.conll").read_text(encoding="utf-8").split("\n\n")
        lines = [line.split(" ") for block in blocks for line in block.splitlines() if "DOCSTART" not in line]
        _, gold, found = zip(*lines, strict=True)
        assert metrics[name.format("accuracy")] == pytest.approx(accuracy_score(gold, found))
    shown = {row.name: row for row in list_shown(NER.table, NER.metric, metrics)}
    assert list(shown) == ["accuracy", "macro F1", "accuracy, test", "macro F1, test"]
    assert list(shown["accuracy"].baselines) == ["the most frequent class", "words alone"]
    assert not any(key.startswith(("strict", "precision", "recall")) for key in metrics)
    config = json.loads((output / "config.json").read_text())
    assert list(config["id2label"].values()) == CLASSES


def test_a_mistake_names_the_words_that_are_wrong(tagger):
    rows = read_table(tagger[0] / "predictions" / "dev.parquet")
    gold, found = (rows.column(name).to_pylist() for name in ("label", "prediction"))
    wrong = [one != other for one, other in zip(gold, found, strict=True)]
    mistakes = show_mistakes(rows, 99)
    assert len(mistakes) == sum(wrong)
    for _, text, predicted, right in mistakes:
        words = text.split(" ")
        for cell in (predicted, right):
            assert 0 < len(cell.split(", ")) < len(words)
            assert {one.split(": ")[0] for one in cell.split(", ")} <= {*words}
    assert [len(one.split(", ")) for one in format_cells(rows)] == [7] * len(rows), "elsewhere all words are named"


def test_an_entity_is_written_as_people_write_it():
    tags = ["O", "O", "B-ORG", "I-ORG", "O", "B-PER", "I-PER"]
    assert name_entities("他 在 北 大 见 Ada Lovelace", tags) == ["北大: ORG", "Ada Lovelace: PER"]


def test_results_name_each_word_with_its_class(tagger):
    predictor = Predictor(str(tagger[0]), precision="fp32")
    text = "good word1 so."
    result, same = predictor([text, {"words": ["good", "word1", "so", "."]}])
    assert result["tags"] == same["tags"] == ["ADJ", "NOUN", "ADV", "PUNCT"]
    assert [(x["text"], x["type"], x["start"], x["end"]) for x in result["words"]] == [
        ("good", "ADJ", 0, 4),
        ("word1", "NOUN", 5, 10),
        ("so", "ADV", 11, 13),
        (".", "PUNCT", 13, 14),
    ]
    assert [(x["start"], x["end"]) for x in same["words"]] == [(n, n + 1) for n in range(4)]
    assert "entities" not in result
    assert result.keys() == predictor.output_schema["properties"].keys()
    assert predictor.describe(result) == "good: ADJ, word1: NOUN, so: ADV, .: PUNCT"
    stock = pipeline("token-classification", model=str(tagger[0]), aggregation_strategy="first")(text)
    found = predictor.format_for_pipeline(result)
    assert [one["score"] for one in found] == pytest.approx([float(one["score"]) for one in stock], abs=1e-5)
    keys = ("entity_group", "word", "start", "end")
    assert [[one[key] for key in keys] for one in found] == [[one[key] for key in keys] for one in stock]


def test_pages_and_comparisons_show_classes_and_accuracy(tagger, tmp_path):
    output, metrics = tagger
    write_page([output], tmp_path / "page.html")
    tables = read_tables(find_part(tmp_path / "page.html", str(output)))
    assert [row[0] for row in tables["Scores by type, dev (%)"][1:]] == CLASSES
    assert tables["Confusion matrix, dev; shades: percent of the true class"][0][1:] == CLASSES
    rows = read_table(output / "predictions" / "dev.parquet")
    method = Method("run", NER, [rows])
    assert (method.name_metric(), method.rate()) == ("accuracy", pytest.approx([100 * metrics["accuracy"]]))
    assert choose_score(find_row(NER.table, "f1"), rows)[0].name == "accuracy"


def test_the_doctor_lists_the_classes_of_words(tmp_path):
    found = examine(NER, {"data": {"dir": str(write_treebank(tmp_path))}}, None, ignore).findings
    assert {*found["splits"]["train"]["labels"]} == {*CLASSES}
    assert sum(found["splits"]["dev"]["labels"].values()) == 18 * 7
    assert any("label NOUN" in row[0].lines[0][0] for table in list_tables(found) for row in table.rows)
    found = examine(NER, {"data": {"dir": str(tmp_path), "label": ["XPOS"]}}, None, ignore).findings
    assert {*found["splits"]["train"]["labels"]} == {"JJ", "RB", "NN", "VB", "."}
