"""CoNLL files: columns, documents, both kinds of IOB, bad files by line, files found in a folder, the Hub's copy."""

from pathlib import Path

import datasets
import pytest

from bertkit.data.formats import hub as hub_format
from bertkit.data.formats.conll import NER_HUB, find_conll, read_conll, read_conll_copy
from bertkit.errors import UsageError
from tests.official import write_conll

OFFICIAL = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
call NN I-NP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- O O

Paris NNP I-NP I-LOC
London NNP B-NP B-LOC
Germany NNP I-NP I-LOC
"""
TWITTER = "Empire\tB-location\nState\tI-location\n=\tO\n\t\nESB\tB-location\n\t\n\n"  # blank lines may have blanks


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- Files


def test_the_official_form(tmp_path):
    text = read_conll(write(tmp_path / "eng.train", OFFICIAL))
    assert (text.documents, text.scheme, text.odd) == (2, "IOB1", 0)
    assert [(x.words, x.tags) for x in text.sentences] == [
        (["EU", "rejects", "German", "call"], ["B-ORG", "O", "B-MISC", "O"]),
        (["Peter", "Blackburn"], ["B-PER", "I-PER"]),
        (["Paris", "London", "Germany"], ["B-LOC", "B-LOC", "I-LOC"]),
    ]
    assert text.sentences[2].official == ["I-LOC", "B-LOC", "I-LOC"]
    assert [(x.document, x.line) for x in text.sentences] == [(1, 3), (1, 8), (2, 13)]
    assert text.number_documents().tolist() == [1, 1, 2]


def test_two_columns_with_tabs_and_without_documents(tmp_path):
    text = read_conll(write(tmp_path / "train.conll", TWITTER))
    assert (text.documents, text.scheme, text.odd) == (0, "IOB2", 0)
    assert [x.words for x in text.sentences] == [["Empire", "State", "="], ["ESB"]]
    assert all(x.tags is x.official for x in text.sentences)
    assert text.number_documents().tolist() == [0, 1], "each is alone"


def test_columns_are_cut_at_blanks_and_tabs_alone(tmp_path):
    """A no-break space, U+2028, a form feed and U+0085 belong to words."""
    words = ["a\u00a0b", "c\u2028d", "e\x0cf", "\x85", "\u3000"]
    text = read_conll(write(tmp_path / "x", "".join(f"{word} \t NN\t O\r\n" for word in words)))
    assert text.sentences[0].words == words


def test_where_every_line_has_a_tab_a_space_belongs_to_the_word(tmp_path):
    content = "-DOCSTART- O\n\nAda\tO\nNew York\tB-LOC\n"
    assert read_conll(write(tmp_path / "x", content)).sentences[0].words == ["Ada", "New York"]
    with pytest.raises(UsageError, match=r"line 4 has 3 columns, expected 2"):
        read_conll(write(tmp_path / "x", content.replace("Ada\tO", "Ada O")))


NUMBERED = "#\thttp://example.org [2009]\n1\tAda\tB-PER{0}\n2\t1996\tO{0}\n\n# text\n1\t#\tB-LOC{0}\n"


@pytest.mark.parametrize(
    ("content", "which"),
    [
        (NUMBERED.format(""), "third"),
        (NUMBERED.format("\tO"), "third"),  # GermEval: inner tags of nested entities
        (NUMBERED.replace("{0}", "\t_").replace("\n2", "\n1-2\tAda96\t_\t_\n2"), "last"),
    ],
)
def test_a_column_of_numbers_is_not_the_words(tmp_path, content, which):
    lines = []
    if which == "last":  # CoNLL-U: more columns between word and tag, and a line for two words in one
        content = content.replace("B-PER\t_", "_\tB-PER").replace("O\t_", "_\tO").replace("B-LOC\t_", "_\tB-LOC")
    text = read_conll(write(tmp_path / "x", content), report=lines.append)
    assert [(x.words, x.tags) for x in text.sentences] == [(["Ada", "1996"], ["B-PER", "O"]), (["#"], ["B-LOC"])]
    assert text.sentences[0].line == 2
    assert lines == [
        f"{tmp_path / 'x'}: the first column counts the words, so the second is read as the words and the {which} as "
        "their tags"
    ]


@pytest.mark.parametrize("content", ["1 CD O\n\n# NN O\n", "1 CD O\n3 CD O\n", "1 CD O\n2 CD O\na X O\n", "1 O\n2 O\n"])
def test_numbers_that_do_not_count_the_words_are_words(tmp_path, content):
    text = read_conll(write(tmp_path / "x", content))
    assert [word for x in text.sentences for word in x.words] == [x.split(" ")[0] for x in content.split("\n") if x]


def test_words_before_the_first_document_are_one(tmp_path):
    text = read_conll(write(tmp_path / "x", "a O\n\nb O\n-DOCSTART-\nc O\n\nd O"))
    assert text.documents == 1
    assert text.number_documents().tolist() == [0, 0, 1, 1]
    assert [x.words for x in text.sentences] == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nb B-\n", r"x, line 2: the tag 'B-' is not of IOB, IOBES or BILOU \(O, or B-, I-, E-, S-, L- or U- and"),
        ("a O\n\nb X\n", r"x, line 3: the tag 'X' is not of IOB"),
        ("a B\n", r"x, line 1: the tag 'B' is not of IOB"),
        ("a b-per\n", r"x, line 1: the tag 'b-per' is not of IOB"),
        ("a\n", r"x, line 1 has 1 column, expected at least 2, with the word first and its tag last; correct it"),
        ("a NN O\n\nO\n", r"x, line 3 has 1 column, expected 3 as in line 1"),
        ("a O\n\tO\n", r"x, line 2 has 1 column, expected 2 as in line 1"),
        ("a NN O\nb O\n", r"x, line 2 has 2 columns, expected 3 as in line 1"),
        ("a O\nNew York B-LOC\n", r"x, line 2 has 3 columns, expected 2 as in line 1"),
        ("", r"x has no sentences; correct it or get the file again"),
        ("\n \n\t\n", r"x has no sentences"),
        (b"a O\n\x81 O\n", r"x, line 2 is not UTF-8 \(byte 0x81 at position 1\)"),
        (b"a O\nb\0 O\n", r"x, line 2 has a NUL byte"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content, message):
    with pytest.raises(UsageError, match=message) as error:
        read_conll(write(tmp_path / "x", content))
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"no\.conll does not exist; check the folder"):
        read_conll(tmp_path / "no.conll")


# --- Folders


@pytest.mark.parametrize("names", [("eng.train", "eng.testa", "eng.testb"), ("train.txt", "dev.txt", "test.txt")])
def test_the_files_of_a_folder(tmp_path, names):
    for name in names:
        write(tmp_path / name, "a O\n")
    lines = []
    expected = dict(zip(("train", "dev", "test"), (tmp_path / name for name in names), strict=True))
    assert find_conll(tmp_path, lines.append) == expected
    assert lines == []
    (tmp_path / names[2]).unlink()
    assert list(find_conll(tmp_path, lines.append)) == ["train", "dev"]
    assert lines == [f"{tmp_path / names[2]} not found, skipping"]


def test_the_only_folder_in_a_folder_will_do(tmp_path):
    write_conll(tmp_path / "ner" / "conll2003")
    (tmp_path / "ner" / "other").mkdir()
    write(tmp_path / "ner" / "README", "about")
    assert find_conll(tmp_path / "ner")["dev"] == tmp_path / "ner" / "conll2003" / "eng.testa"
    write_conll(tmp_path / "ner" / "wnut17")
    with pytest.raises(UsageError, match=r"ner has several data sets \(conll2003, wnut17\); give a CoNLL file"):
        find_conll(tmp_path / "ner")
    write_conll(tmp_path / "ner")
    assert find_conll(tmp_path / "ner")["dev"] == tmp_path / "ner" / "eng.testa", "files of its own come first"


def test_of_two_kinds_one_is_taken_and_said(tmp_path):
    for name in ("train.txt", "dev.txt", "train.conll"):
        write(tmp_path / name, "a O\n")
    lines = []
    assert find_conll(tmp_path, lines.append)["train"].name == "train.txt", "the complete one"
    write(tmp_path / "dev.conll", "a O\n")
    lines.clear()
    assert find_conll(tmp_path, lines.append)["train"].name == "train.conll"
    assert f"{tmp_path} has train.conll and train.txt; using the files named like train.conll" in lines


def test_folders_that_will_not_do(tmp_path):
    for prepare, message in (
        (lambda: None, f"{tmp_path / 'ner'} does not exist; give a CoNLL file"),
        (lambda: (tmp_path / "ner").mkdir(), f"{tmp_path / 'ner'} has no CoNLL files and no tables; give a CoNLL file"),
        (lambda: write(tmp_path / "ner" / "dev.conll", "a O"), f"{tmp_path / 'ner'} has no train.conll; give a CoNLL"),
    ):
        prepare()
        with pytest.raises(UsageError) as error:
            find_conll(tmp_path / "ner")
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)


# --- The Hub

NAMES = ["O", "B-PER", "I-PER"]


def make_rows(words: list[list[str]], tags: list[list[int]], names: list[str] = NAMES) -> datasets.Dataset:
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=names)),
        }
    )
    return datasets.Dataset.from_dict({"tokens": words, "ner_tags": tags}, features=features)


@pytest.fixture
def hub(monkeypatch):
    """Return a function that sets the data set served by the Hub."""

    def serve(**splits: datasets.Dataset) -> None:
        found = datasets.DatasetDict(splits)
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {(NER_HUB, "default"): found}[name, config])

    monkeypatch.setattr(hub_format, "find_hub_trouble", lambda *_: None)
    return serve


def test_the_hub_gives_what_a_file_does(hub, tmp_path):
    words, tags = [["Peter", "Black", "!"], [], ["Ann"]], [[1, 2, 0], [], [1]]
    make_rows(words, tags).to_parquet(tmp_path / "train.parquet")
    train = datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path))
    hub(train=train, validation=make_rows(words[:1], tags[:1]))
    texts = read_conll_copy()
    assert list(texts) == ["train", "dev"], "test may be missing"
    file = read_conll(write(tmp_path / "x", "Peter B-PER\nBlack I-PER\n! O\n\nAnn B-PER\n"))
    assert [(x.words, x.tags) for x in texts["train"].sentences] == [(x.words, x.tags) for x in file.sentences]
    assert texts["train"].documents == 0
    assert [x.line for x in texts["train"].sentences] == [1, 3], "a row without words is none"


def test_bad_rows_on_the_hub_are_one_line(hub):
    fine = make_rows([["a"]], [[0]])
    for rows, message in (
        (
            make_rows([["a"], ["b", "c"]], [[0], [0]]),
            r"train, row 2 has 2 tokens and 1 ner_tags; give one tag per word",
        ),
        (make_rows([["a"]], [[1]], ["O", "PER"]), r"train, row 1: ner_tags: the tag 'PER' is not of IOB"),
        (
            fine.rename_column("tokens", "text_words"),
            r"train has the columns 'text_words', 'ner_tags'; expected tokens",
        ),
        (fine.select([]), r"train has no rows"),
    ):
        hub(train=rows, validation=fine)
        with pytest.raises(UsageError, match=message) as error:
            read_conll_copy()
        assert "\n" not in str(error.value)
    hub(train=fine)
    with pytest.raises(UsageError, match="has no split 'validation'; found train"):
        read_conll_copy()
