"""TSV of WebAnno and INCEpTION: with and without its header, several layers, and what does not fit."""

import pytest

from bertkit.data.formats.annotations import read_exports
from bertkit.data.formats.conll import list_conll_files, read_conll
from bertkit.data.formats.entities import read_entities
from bertkit.data.formats.rows import read_columns
from bertkit.errors import UsageError
from tests.data.conftest import write

HEADER = """#FORMAT=WebAnno TSV 3.3
#T_SP=de.tudarmstadt.ukp.dkpro.core.api.lexmorph.type.pos.POS|PosValue
#T_SP=de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity|identifier|value
#T_RL=webanno.custom.Met|kind|BT_webanno.custom.Person


"""
BODY = """#Text=Ada met Mary Ann [x].
1-1\t0-3\tAda\tNNP\t_\tPER\tmet\t1-3[0_2]\t
1-2\t4-7\tmet\tVBD\t_\t_\t_\t_\t
1-3\t8-12\tMary\tNNP\t*[2]\tPER[2]\t_\t_\t
1-4\t13-16\tAnn\tNNP\t*[2]\tPER[2]\t_\t_\t
1-4.1\t13-14\tA\t_\t_\tOTH\t_\t_\t
1-5\t17-20\t\\[x\\]\tSYM\t_\twork of art\\_x\t_\t_\t
1-6\t20-21\t.\t.\t_\t_\t_\t_\t

#Text=Oslo Rome
2-1\t22-26\tOslo\tNNP\t_\tLOC\t_\t_\t
2-2\t27-31\tRome\tNNP\t_\tLOC\t_\t_\t
"""
WORDS = [["Ada", "met", "Mary", "Ann", "[x]", "."], ["Oslo", "Rome"]]
TAGS = [["B-PER", "O", "B-PER", "I-PER", "B-work of art_x", "O"], ["B-LOC", "B-LOC"]]
PLAIN = "".join(f"{line}\n" for line in BODY.splitlines() if line and line[0] != "#")


def test_a_folder_of_documents_is_named_and_can_be_joined(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.txt" / "admin.tsv", HEADER + BODY)
    with pytest.raises(UsageError, match="has a TSV of WebAnno for each document; join them into one file"):
        list_conll_files(tmp_path, print)
    joined = write(tmp_path / "all.tsv", 2 * (HEADER + BODY))
    sentences = read_conll(joined).sentences
    assert [list(sentence.words) for sentence in sentences] == 2 * WORDS
    assert [list(sentence.tags) for sentence in sentences] == 2 * TAGS


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.conll"])
@pytest.mark.parametrize(("content", "label"), [(HEADER + BODY, ""), (BODY, "6"), (PLAIN, "6")])
def test_words_and_entities_with_and_without_comments(name, content, label, tmp_path):
    path, lines = write(tmp_path / name, content), []
    if name == "a.tsv":
        text = read_entities(read_exports(str(path), read_columns, lines.append)["train"], lines.append, label)
    else:
        text = read_conll(path, lines.append, label)
    assert [(sentence.words, sentence.tags) for sentence in text.sentences] == list(zip(WORDS, TAGS, strict=True))
    assert text.scheme == "IOB2"
    assert lines[0] == f"{path}: annotations of parts of words are left out (1 lines)"
    assert lines[1:] == [f"{path}: annotations are in the columns 4, 6, 7, 8; name one with --label"] * bool(label)


def test_the_only_layer_needs_no_name_and_neighbours_without_numbers_are_one_entity(tmp_path):
    rows = [line.split("\t") for line in PLAIN.splitlines() if ".1" not in line]
    cells = ["\t".join([*row[:3], row[5].partition("[")[0]]) for row in rows]
    text = read_conll(write(tmp_path / "a.txt", "\n".join(cells)))
    assert [sentence.tags for sentence in text.sentences] == [TAGS[0], ["B-LOC", "I-LOC"]]
    assert read_conll(tmp_path / "a.txt", label="4").sentences[1].tags == ["B-LOC", "I-LOC"]


def test_a_value_for_each_word_is_its_class(tmp_path):
    text = read_conll(write(tmp_path / "a.txt", BODY), label="4")
    assert text.scheme == "words"
    assert text.sentences[1].tags == ["NNP", "NNP"]


VERSION_2 = "1-1\tAda\tB-PER\n1-2\tmet\tO\n\n2-1\tOslo\tB-LOC\n"


@pytest.mark.parametrize(
    ("content", "label"),
    [
        (BODY.replace("Mary\tNNP\t*[2]\tPER[2]", "Mary\tNNP\t*[2]|*[3]\tPER[2]|ORG[3]"), "6"),
        (BODY.replace("1-2\t4-7", "1-2"), "6"),
        (BODY.replace("\tmet\tVBD", "\tmet\tVBD\tX"), "6"),
        (VERSION_2, ""),
    ],
    ids=["stacked", "no offsets", "columns", "version 2"],
)
def test_what_does_not_fit_is_one_line(content, label, tmp_path, refused):
    with refused():
        read_conll(write(tmp_path / "a.txt", content), label=label)
