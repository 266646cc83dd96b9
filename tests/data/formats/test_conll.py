"""CoNLL files: columns, documents, both kinds of IOB, bad files by line, files found in a folder, the Hub's copy."""

import pytest

from bertkit.data.formats.conll import NER_CONFIG, NER_HUB, list_conll_files, read_conll, read_conll_copy
from tests.data.conftest import make_tagged, write
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


def test_where_every_line_has_a_tab_a_space_belongs_to_the_word(tmp_path, refused):
    content = "-DOCSTART- O\n\nAda\tO\nNew York\tB-LOC\n"
    assert read_conll(write(tmp_path / "x", content)).sentences[0].words == ["Ada", "New York"]
    with refused():
        read_conll(write(tmp_path / "x", content.replace("Ada\tO", "Ada O")))


NUMBERED = "#\thttp://example.org [2009]\n1\tAda\t{0}B-PER{1}\n2\t1996\t{0}O{1}\n\n# text\n1\t#\t{0}B-LOC{1}\n"


@pytest.mark.parametrize(
    ("content", "which"),
    [
        (NUMBERED.format("", ""), "third"),
        (NUMBERED.format("", "\tO"), "third"),  # GermEval: inner tags of nested entities
        (NUMBERED.format("_\t", "").replace("\n2", "\n1-2\tAda96\t_\t_\n2"), "last"),  # and a line for two words in one
    ],
)
def test_a_column_of_numbers_is_not_the_words(tmp_path, content, which):
    lines = []
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


@pytest.mark.parametrize("content", ["a O\nb B-\n", "a\n", "a O\nNew York B-LOC\n", "\n \n\t\n", b"a O\n\x81 O\n"])
def test_a_bad_file_is_one_line(tmp_path, content, refused):
    with refused():
        read_conll(write(tmp_path / "x", content))


@pytest.mark.parametrize("names", [("eng.train", "eng.testa", "eng.testb"), ("train.txt", "dev.txt", "test.txt")])
def test_the_files_of_a_folder(tmp_path, names):
    for name in names:
        write(tmp_path / name, "a O\n")
    lines = []
    expected = dict(zip(("train", "dev", "test"), (tmp_path / name for name in names), strict=True))
    assert list_conll_files(tmp_path, lines.append) == expected
    assert lines == []
    (tmp_path / names[2]).unlink()
    assert list(list_conll_files(tmp_path, lines.append)) == ["train", "dev"]
    assert lines == [f"{tmp_path / names[2]} not found, skipping"]


def test_the_only_folder_in_a_folder_will_do(tmp_path, refused):
    write_conll(tmp_path / "ner" / "conll2003")
    (tmp_path / "ner" / "other").mkdir()
    write(tmp_path / "ner" / "README", "about")
    assert list_conll_files(tmp_path / "ner")["dev"] == tmp_path / "ner" / "conll2003" / "eng.testa"
    write_conll(tmp_path / "ner" / "wnut17")
    with refused():
        list_conll_files(tmp_path / "ner")
    write_conll(tmp_path / "ner")
    assert list_conll_files(tmp_path / "ner")["dev"] == tmp_path / "ner" / "eng.testa", "files of its own come first"


def test_folders_that_will_not_do(tmp_path, refused):
    folder = tmp_path / "ner"
    for prepare in (lambda: None, folder.mkdir, lambda: write(folder / "eng.train", "a O")):
        prepare()
        with refused():
            list_conll_files(folder)


# --- The Hub


def test_the_hub_gives_what_a_file_does(served, tmp_path):
    words, tags = [["Peter", "Black", "!"], [], ["Ann"]], [[1, 2, 0], [], [1]]
    served[NER_HUB, NER_CONFIG] = {"train": make_tagged(words, tags), "validation": make_tagged(words[:1], tags[:1])}
    texts = read_conll_copy()
    assert list(texts) == ["train", "dev"], "test may be missing"
    file = read_conll(write(tmp_path / "x", "Peter B-PER\nBlack I-PER\n! O\n\nAnn B-PER\n"))
    assert [(x.words, x.tags) for x in texts["train"].sentences] == [(x.words, x.tags) for x in file.sentences]
    assert texts["train"].documents == 0
    assert [x.line for x in texts["train"].sentences] == [1, 3], "a row without words is none"


def test_bad_rows_on_the_hub_are_one_line(served, refused):
    for rows in (make_tagged([["a"], ["b", "c"]], [[0], [0]]), make_tagged([["a"]], [[1]], ["O", "PER"])):
        served[NER_HUB, NER_CONFIG] = {"train": rows}
        with refused():
            read_conll_copy()
