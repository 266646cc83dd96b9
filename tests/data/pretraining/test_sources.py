"""Sources, pieces and documents of sentences: worked examples, bad input, and no lost text."""

import json
import os
import re
import subprocess
import sys
import time
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bertkit.data.pretraining import sources
from bertkit.data.pretraining.sources import (
    END,
    Piece,
    cut_sources,
    keep_passages,
    read_documents,
    read_piece,
    split_divided,
    split_paragraphs,
)
from bertkit.errors import UsageError
from bertkit.system.hub import explain_hub_trouble
from tests.data.conftest import write

TEXT = "My dog is hairy. He barks!\nA second paragraph.\n\nAnother document.\n"
ROWS = '{"text": "My dog is hairy. He barks!\\n\\nA second paragraph."}\n{"id": 7, "text": "Another document."}\n'
SENTENCES = [["My dog is hairy.", "He barks!", "A second paragraph."], ["Another document."]]


def read(*sources: object, **options: object) -> list[list[str]]:
    return list(read_documents([str(source) for source in sources], **options))


def read_lines(pieces: list[Piece]) -> list[list[str]]:
    return [document for piece in pieces for document in read_piece(piece, split_sentences=False)]


# --- text files


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("txt", "\ufeff" + TEXT.replace("\n", "\r\n")),
        ("txt", "\n \n" + TEXT.replace("\n\n", "\n\t\n\n").rstrip()),
        ("jsonl", "\ufeff" + ROWS.replace("\n", "\r\n")),
        ("jsonl", "\n \n" + ROWS.replace("\n", '\n\t\n{"text": " \\n"}\n').rstrip()),
    ],
)
def test_files_with_any_ends_of_lines_and_blank_lines(tmp_path, suffix, content):
    assert read(write(tmp_path / f"a.{suffix}", content)) == SENTENCES
    assert read(write(tmp_path / f"a.{suffix}.gz", content)) == SENTENCES


def test_escapes_in_jsonl(tmp_path):
    text = "\U0001f600 café\nhalf \ud83d of one"
    file = write(tmp_path / "a.jsonl", json.dumps({"text": text}))
    assert "\\ud83d" in file.read_text()
    assert read(file, split_sentences=False) == [["\U0001f600 café", "half  of one"]]


def test_directory_is_read_in_the_order_of_its_paths(tmp_path):
    write(tmp_path / "b.txt", "Third.\n")
    write(tmp_path / "a" / "z.txt.gz", "Second.\n")
    write(tmp_path / "a" / "b" / "c.txt", "First.\n")
    write(tmp_path / "a" / "empty.txt", "\n\n")
    write(tmp_path / "c.jsonl", '{"text": "Fourth."}')
    write(tmp_path / "c.jsonl.gz", '{"text": "Fifth."}')
    os.symlink(tmp_path / "b.txt", tmp_path / "d 100 % \n.txt")
    os.symlink(tmp_path, tmp_path / "loop")
    os.symlink(tmp_path / "gone", tmp_path / "gone.txt")
    (tmp_path / "folder.txt").mkdir()
    write(tmp_path / "a.md", "Other names have to be given themselves.\n")
    write(tmp_path / ".hidden.txt", "Hidden files do not count.\n")
    write(tmp_path / ".cache" / "old.txt", "Caches of other programs are not a corpus.\n")
    assert read(tmp_path) == [["First."], ["Second."], ["Third."], ["Fourth."], ["Fifth."], ["Third."]]
    assert read(tmp_path / "b.txt", tmp_path / "a.md") == [["Third."], ["Other names have to be given themselves."]]
    assert read(tmp_path / ".cache") == [["Caches of other programs are not a corpus."]]


def test_same_source_twice_and_a_directory_called_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "docs" / "a.txt", "One.\n")
    lines: list[str] = []
    assert read("./docs", "./docs", report=lines.append) == [["One."], ["One."]]
    assert lines == ["./docs: 1 document, 1 sentence, 4 characters"] * 2


def test_limit_takes_whole_documents_of_each_source(tmp_path):
    first = write(tmp_path / "a.txt", "One.\n\nTwo.\n\nThree.\n")
    second = write(tmp_path / "b.txt", "Four.\n\nFive.\n")
    lines: list[str] = []
    assert read(first, second, limit_characters=5, report=lines.append) == [["One."], ["Two."], ["Four."]]
    assert lines == [
        f"{first}: 2 documents, 2 sentences, 8 characters",
        f"{second}: 1 document, 1 sentence, 5 characters",
    ]


BAD = {
    "blank.txt": b"\n \n\t\r\n",
    "utf16.txt": TEXT.encode("utf-16"),
    "no-text.jsonl": b'{"text": "One."}\n\n{"title": "A", "id": 7}\n',
    "no-json.jsonl": b'{"text": "One."}\nTwo.\n',
    "latin1.jsonl.gz": b'\n{"text": "caf\xe9"}',
    "table.csv": b"text\nOne.\n",
    "folder/readme.md": b"Text.\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(tmp_path, name, refused):
    file = write(tmp_path / name, BAD[name])
    with refused():
        read(file.parent if file.suffix == ".md" else file)


@pytest.mark.parametrize("source", ["", "missing.txt", "./missing", "~nobody-at-all/a", "a/b/c", "x.jsonl", "a b"])
def test_missing_file_is_an_error_at_once_and_not_a_name_on_the_hub(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "explain_hub_trouble", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(UsageError, match="does not exist"):
        read_documents([source])


def test_a_folder_that_cannot_be_looked_at_is_not_left_out(monkeypatch, tmp_path, refused):
    write(tmp_path / "a.txt", b"a\n")
    (tmp_path / "theirs").mkdir()
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("theirs"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with refused():
        read_documents([str(tmp_path)])


# --- forms that are not in the name

WIKI = """<doc id="12" url="https://example.org/wiki?curid=12" title="Hairy dogs">
Hairy dogs

My dog is hairy. He barks!

A second paragraph.

</doc>
<doc id="13" url="https://example.org/wiki?curid=13" title="B">
Another document.
</doc>
"""


@pytest.mark.parametrize("name", ["wiki_00", "texts.txt", "texts.json", "texts.dump.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff", "\n \n"])
def test_json_lines_and_wiki_documents_are_read_under_any_name(tmp_path, name, mark):
    assert read(write(tmp_path / name, mark + '{"text": ""}\n' + ROWS)) == SENTENCES
    assert read(write(tmp_path / name, mark + ROWS.partition("\n")[0])) == SENTENCES[:1]
    assert read(write(tmp_path / name, mark + WIKI)) == [["Hairy dogs", *SENTENCES[0]], SENTENCES[1]]


@pytest.mark.parametrize(
    "text",
    [
        "{These braces} begin a sentence.\nAnother one.\n",
        '{"text": "A line of JSON is explained."}\nThe line above has a key.\n',
        '{"id": 7}\n{"id": 8}\n{"id": 9}\n',
        '["text", "of", "a", "list"]\n',
        "The tag <doc> begins a document.\n</doc> ends it.\n",
    ],
)
def test_a_text_that_looks_like_another_form_in_a_line_stays_a_text(tmp_path, text):
    assert read(write(tmp_path / "a.txt", text), split_sentences=False) == [text.splitlines()]


@given(st.lists(st.sampled_from(["a", "B.", "", " "])), st.lists(st.sampled_from(["c", ""])), st.integers(1, 40))
def test_pieces_of_wiki_documents_together_are_the_file(tmp_path_factory, first, second, piece_bytes):
    documents = [["x", *first], ["y", *second]]
    content = "".join(f"<doc id={number}>\n{chr(10).join(lines)}\n</doc>\n" for number, lines in enumerate(documents))
    expected = [[line for line in document if line.strip()] for document in documents]
    check_pieces(tmp_path_factory.getbasetemp() / "wiki_00", content, piece_bytes, expected)


@pytest.mark.parametrize(
    ("line", "marks"),
    [
        ("<p>My dog is hairy.</p>", 2),
        ("He barks at&nbsp;cats &#8211; and dogs.", 2),
        ('{"title": "A dog", "id": 7}', 2),
        ('  "title": "A dog",', 1),
        ('[{"body": "One."}, {"body": "Two."}, {"body": "Three."}]', 3),
        ("See [[Dog|dogs]] and {{cite}}.", 2),
        ("<!DOCTYPE html>", 1),
        ('<br/><a href="x">here', 2),
    ],
)
def test_markup_is_counted_where_there_is_much_of_it(tmp_path, line, marks):
    prose = 'AT&T; and R&D grew if a < b, and c > d. Write to <me@example.org>: "yes": he did.\n'
    for count, warnings in ((2, 0), (3, 1)):
        lines: list[str] = []
        file = write(tmp_path / "a.txt", f"{line}\n" * count + prose * 200 * marks)
        read(file, split_sentences=False, report=lines.append)
        assert len(lines) == 1 + warnings
    assert lines[1] == (
        f"warning: the text has {3 * marks} tags, entities or keys of markup, first in {line.strip()[:40]!r}; "
        "they are trained as words; give plain text"
    )


# --- pieces

ENDS = ["\n", "\r\n", "\n\n", "\n \n", "\n\u3000\n", "\n\x1f\r\n", "\n\n\n"]
CHARACTERS = [*ENDS, "\r", "a", "bc", "é", "\U0001f600", "\ufeff", " ", "\x85"]
contents = st.lists(st.sampled_from(CHARACTERS), max_size=25).map("".join)
rows = st.lists(st.tuples(contents, st.sampled_from(ENDS)))


def check_pieces(file: Path, content: str, piece_bytes: int, expected: list[list[str]]) -> None:
    size = write(file, content).stat().st_size
    pieces = cut_sources([str(file)], piece_bytes)
    assert read_lines(pieces) == expected
    assert read_lines([Piece("whole", pieces[0].kind, str(file))]) == expected
    assert sum(piece.size for piece in pieces) == size
    assert [piece.start for piece in pieces] == list(range(0, max(size, 1), piece_bytes))


@given(contents, st.booleans(), st.integers(1, 40))
@example("a\n\u3000\nb", False, 1)
@example("\n\na", True, 3)
def test_pieces_of_a_text_together_are_the_file(tmp_path_factory, content, mark, piece_bytes):
    content = "\ufeff" * mark + content
    documents: list[list[str]] = [[]]
    for line in map(str.strip, content.removeprefix("\ufeff").split("\n")):
        if line:
            documents[-1].append(line)
        else:
            documents.append([])
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    check_pieces(file, content, piece_bytes, list(filter(None, documents)))


@given(rows, st.booleans(), st.integers(1, 40))
def test_pieces_of_jsonl_together_are_the_file(tmp_path_factory, texts, mark, piece_bytes):
    lines = [json.dumps({"text": text}, ensure_ascii=False) + end for text, end in texts]
    documents = [list(filter(None, map(str.strip, text.splitlines()))) for text, _ in texts]
    file = tmp_path_factory.getbasetemp() / "pieces.jsonl"
    check_pieces(file, "\ufeff" * mark + "".join(lines), piece_bytes, list(filter(None, documents)))


def test_a_document_is_in_the_piece_of_its_first_byte(tmp_path):
    file = write(tmp_path / "a.txt", "ab\ncd\n\nef\n\n\ngh")
    #                                 0 2  3 5  6 7 9    12
    pieces = cut_sources([str(file)], 7)
    assert [(piece.start, piece.stop, piece.size) for piece in pieces] == [(0, 7, 7), (7, END, 7)]
    assert [read_lines([piece]) for piece in pieces] == [[["ab", "cd"]], [["ef"], ["gh"]]]
    pieces = cut_sources([str(file)], 3)
    assert [read_lines([piece]) for piece in pieces] == [[["ab", "cd"]], [], [["ef"]], [], [["gh"]]]


def test_pieces_name_the_line_of_a_mistake(tmp_path):
    file = write(tmp_path / "mistake.txt", b"a\n\nbc\r\n \n\xc3\xa9\ncaf\xe9\n")
    for piece_bytes in range(1, 30):
        with pytest.raises(UsageError, match=r"mistake.txt, line 6 is not UTF-8"):
            read_lines(cut_sources([str(file)], piece_bytes))


def test_small_files_share_a_piece_and_compressed_ones_are_not_cut(tmp_path):
    write(tmp_path / "a.txt", b"a" * 200)
    for number in range(5):
        write(tmp_path / f"b{number}.txt", f"{number}" * 30)
    write(tmp_path / "c.jsonl", '{"text": "c"}')
    write(tmp_path / "d.txt.gz", os.urandom(3000).hex())
    write(tmp_path / "e.txt", "e" * 2000)
    pieces = cut_sources([str(tmp_path)], 1600)
    names = [([Path(name).name for name in piece.files], piece.kind, piece.start) for piece in pieces]
    assert names == [
        (["a.txt"], "text", 0),
        (["b0.txt", "b1.txt", "b2.txt", "b3.txt"], "text", 0),
        (["b4.txt"], "text", 0),
        (["c.jsonl"], "jsonl", 0),
        (["d.txt.gz"], "text", 0),
        (["e.txt"], "text", 0),
        (["e.txt"], "text", 1600),
    ]
    assert sum(piece.size for piece in pieces) == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert read_lines(pieces) == read(tmp_path, split_sentences=False)
    assert len(read_lines(pieces)) == 9  # adjacent files are not joined


@given(st.lists(st.lists(st.integers(1, 9), min_size=1)), st.integers(1, 12), st.sampled_from(["txt", "jsonl"]))
def test_long_documents_are_cut_at_paragraphs(tmp_path_factory, lengths, longest, suffix):
    documents = [["a" * length for length in document] for document in lengths]
    text = "\n\n".join("\n".join(document) for document in documents)
    lines = "".join(json.dumps({"text": "\n".join(document)}) + "\n" for document in documents)
    file = write(tmp_path_factory.getbasetemp() / f"long.{suffix}", text if suffix == "txt" else lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "LONGEST_DOCUMENT", longest)
        found = read_lines([Piece("long", "text" if suffix == "txt" else "jsonl", str(file))])
    assert list(chain(*found)) == list(chain(*documents))
    assert all(len(document) == 1 or sum(map(len, document)) <= longest for document in found)
    document_ends = set(accumulate(sum(map(len, document)) for document in documents))
    found_ends = list(accumulate(sum(map(len, document)) for document in found))
    assert document_ends <= set(found_ends)
    for end, document, following in zip(found_ends, found, found[1:], strict=False):
        assert end in document_ends or sum(map(len, document)) + len(following[0]) > longest


def test_a_file_without_a_blank_line_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 40)
    file, lines = write(tmp_path / "a.txt", "The dog is hairy.\n" * 5), []
    documents = read(file, split_sentences=False, report=lines.append)
    assert [len(document) for document in documents] == [2, 2, 1]
    assert lines == [
        f"{file}: documents of more than 40 characters were split at a paragraph, 2 times; "
        "put a blank line between documents",
        f"{file}: 3 documents, 5 lines, 85 characters",
    ]


# --- passages


def choose(*lines: str) -> tuple[list[str], dict[str, list[object]]]:
    left_out: dict[str, list[object]] = {}
    return [line for line in keep_passages(lines, left_out) if line.strip()], left_out


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("headings", "== Early life =="),
        ("headings", "Section::::Early life."),  # of WikiExtractor
        ("list items", "* The first of his two novels, which was not printed before he died."),
        ("list items", "BULLET::::- The first of his two novels."),
        ("table rows", '{| class="wikitable"'),
        ("table rows", "! Year !! Title"),
        ("links", "[[Datei:Haus.jpg|thumb|The [[house]] from the east.]]"),
        ("links", "Category:Museums in Sweden"),
        ("links", "House.JPG|The house from the east, before it was sold."),
        ("links", "https://example.org/house?from=east."),
        ("links", '<doc id="7" url="https://example.org" title="The house">'),
        ("links", "mini|hochkant=1.2|Das Haus im Jahr 1901, vor dem Umbau."),
        ("links", "Vignette|gauche|La maison en 1901."),
        ("links", "miniaturadeimagen|derecha|La casa en 1901."),
        ("links", "miniatuur|rechts|Het huis in 1901."),
        ("links", "min|La casa nel 1901, prima del restauro."),
        ("links", "thumb|upright=0.8|alt=A house|The house in 1901."),
        ("links", "250px|thumb|The house in 1901."),
        ("links", "120x80 px|The house in 1901."),
        ("links", "Kategorie:Museum in Schweden"),
        ("short lines", "Early life"),
        ("short lines", "Museums in Sweden (by county)"),
    ],
)
def test_each_rule_leaves_out_its_lines(rule, line):
    assert choose("A sentence.", line, "", "Another one.") == (["A sentence.", "Another one."], {rule: [1, line[:40]]})


@pytest.mark.parametrize(
    "lines",
    [
        ["#1 Record is the first album of a band.", "*NSYNC is a group.", ":wumpscut: is a project."],
        ["!Kung is a group of languages.", "[[Rome]] is a city: see [[Italy]].", "= is a sign."],
        ["a|b means that a divides b.", "Thumb and finger are digits.", "Mini | is a sign.", "Left, right| and so on."],
        ["Category: a word of Aristotle.", "See https://example.org for more."],
        ["“You!” he said—", "and left", "The following are towns:"],
        ["He took the long road that leads from the house to the", "river, and was never seen again."],
        ["The rose is red", "The violet blue", "And so are you."],
        ["This line has no full stop, but is too long " + "for a heading, an item of a list or a category " * 2],
        ["天地玄黄。", "他走了吗？"],
    ],
)
def test_prose_stays(lines):
    assert choose(*lines) == (lines, {})


COPY = """The house is a museum. It was built in 1911.

History \n
Early years \nThe house was first a mill, which the town bought from its last owner because it wanted to show how the \
workers had lived in it.
They came from:
 Norway

External links
  Official site

Museums in Sweden"""


def test_the_text_of_an_article_on_the_hub_is_its_passages(tmp_path):
    """There headings, items and categories have no marks; a heading may be directly above its text."""
    lines: list[str] = []
    file = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in (COPY, "One\n\nTwo")))
    passages = [line for line in COPY.splitlines() if line.endswith((".", ":"))]
    assert read(file, passages=True, split_sentences=False, report=lines.append) == [passages]
    assert lines == [f"{file}: 1 document, 3 lines, {sum(map(len, passages))} characters; left out 8 short lines"]
    assert len(read(file, split_sentences=False)[0]) == 9


def test_a_source_without_a_passage_is_refused(tmp_path, refused):
    with refused():
        read(write(tmp_path / "a.txt", "== One ==\n* two\n\nThree\n"), passages=True)


@given(st.lists(st.sampled_from(["a", "B", "B.", "* b", "B" * 101, "", " "])), st.integers(1, 40))
def test_pieces_have_the_passages_of_the_file(tmp_path_factory, lines, piece_bytes):
    """No line is lost: it is kept or counted; those that are kept stay in order."""
    file = write(tmp_path_factory.getbasetemp() / "passages.txt", "\n".join(lines))
    found: dict[str, list[object]] = {}
    kept = [
        line
        for piece in cut_sources([str(file)], piece_bytes)
        for document in read_piece(piece, split_sentences=False, passages=True, noted=found)
        for line in document
    ]
    whole, left_out = choose(*map(str.strip, lines))
    assert (kept, found) == (whole, left_out)
    assert len(kept) + sum(count for count, *_ in found.values()) == sum(map(bool, map(str.strip, lines)))
    assert [line for line in kept if line in ("B.", "a")] == [line for line in lines if line in ("B.", "a")]


# --- sentences


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("Dr. Smith met Mr. J. K. Jones, e.g. on Jan. 5th. He left.", 2),
        ('He said "It is over. We lost." Then he went home.', 2),
        ("It is 3.14, version 2.0. See https://x.org/a.b?c=d for more.", 2),
        ("我们今天去学校。你呢？然后他就走了！", 3),
        ("Replaces torch.nn.Linear and pandas.Index. That is all.", 2),
        ("`Are there nine?´ asked the Captain.´", 2),
    ],
)
def test_sentences_are_those_of_a_reader(paragraph, sentences):
    assert len(split_paragraphs([paragraph])) == sentences


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")).map(str.strip).filter(bool)))
def test_splitting_loses_only_blanks(paragraphs):
    sentences = split_paragraphs(paragraphs)
    assert "".join("".join(sentences).split()) == "".join("".join(paragraphs).split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


@given(st.lists(st.text("他说Dr.Ab9。！？”“, ．\u3000", min_size=1).map(str.strip).filter(bool)))
@example(["他 说 ： “ 好 。 ” 我 走 了 。 Dr . A 来 了 ！", "３ ．１４ 是 数"])
def test_divided_words_have_the_sentences_of_the_same_text_without_spaces(paragraphs):
    divided = split_divided(paragraphs, "zh")
    assert ["".join(sentence.split()) for sentence in divided] == split_paragraphs(
        ["".join(paragraph.split()) for paragraph in paragraphs], "zh"
    )
    assert all(sentence in " ".join(paragraphs) for sentence in divided)


def test_a_long_paragraph_is_split_in_linear_time():
    start = time.process_time()
    for sentence, count in (("天地玄黄。", 20_000), ("The cat sat on the mat. ", 2_000)):
        assert split_paragraphs([sentence * count]) == [sentence.strip()] * count
    long = "x" * 25_000
    assert split_paragraphs([f"{long}。{long}"]) == [f"{long}。", long]
    assert time.process_time() - start < 10


# --- the Hub


@pytest.fixture(autouse=True)
def forget_the_hub() -> None:
    sources._load_hub.cache_clear()


def test_trouble_with_the_hub_is_told_apart(monkeypatch, refused):
    import datasets
    import huggingface_hub
    from huggingface_hub import errors

    response = SimpleNamespace(headers={}, status_code=500, request=None)
    for kind, said in (
        (errors.RepositoryNotFoundError, "the Hub has no model 'owner/name'"),
        (errors.GatedRepoError, "the model 'owner/name' on the Hub is open to approved users only"),
        (errors.HfHubHTTPError, "the Hub does not serve the model 'owner/name' (two lines)"),
    ):
        info = Mock(side_effect=kind("two\nlines", response=response))
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", info)
        assert explain_hub_trouble("owner/name", "model") == said
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", Mock(side_effect=errors.OfflineModeIsEnabled("offline")))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("datasets tries again for 23 seconds"))
    with refused():
        read_documents(["owner/name:config"])


def serve(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, object]], shards: int = 1) -> Mock:
    """Make every Hub data set consist of these rows, and return what `datasets` is asked with."""
    import datasets

    sources._load_hub.cache_clear()
    load = Mock(return_value=datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=shards))
    monkeypatch.setattr(sources, "explain_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return load


def test_rows_of_a_hub_data_set_are_documents(monkeypatch, refused):
    load = serve(monkeypatch, [{"text": "One. Two.\n\nThree."}, {"text": " \n"}, {"text": "Four."}])
    assert read("owner/name:20220301.en@v1") == [["One.", "Two.", "Three."], ["Four."]]
    load.assert_called_once_with("owner/name", "20220301.en", split="train", streaming=True, revision="v1")
    serve(monkeypatch, [{"question": "Why?", "label": "1"}])
    with refused():
        read("name")


def test_shards_of_a_hub_data_set_are_pieces(monkeypatch):
    load = serve(monkeypatch, [{"text": f"Number {i}."} for i in range(10)], shards=3)
    pieces = cut_sources(["owner/name"], 50)
    assert [(p.kind, p.path, p.start, p.stop, p.size) for p in pieces] == [
        ("hub", "owner/name", number, 3, 0) for number in range(3)
    ]
    parts = [list(read_piece(piece)) for piece in pieces]
    assert [len(documents) for documents in parts] == [4, 3, 3]
    assert list(chain(*parts)) == read("owner/name") == [[f"Number {i}."] for i in range(10)]
    load.assert_called_once()


def test_a_hub_data_set_that_cannot_be_loaded_is_one_line(monkeypatch, refused):
    serve(monkeypatch, [{"text": "One."}]).side_effect = ValueError("Config\nname missing")
    with refused():
        read("owner/name")


def test_importing_and_reading_are_light(tmp_path):
    file = write(tmp_path / "a.txt", TEXT)
    program = f"""
        import sys
        import bertkit.data.pretraining.docstrings, bertkit.data.pretraining.tokenize, bertkit.data.tokenizer
        from bertkit.data.pretraining.sources import cut_sources, read_piece
        (piece,) = cut_sources([{str(file)!r}], 1000)
        print(len(list(read_piece(piece))), *sys.modules)
    """
    command = [sys.executable, "-c", re.sub("\n +", "\n", program)]
    count, *modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert count == "2"
    assert "sentencex" in modules
    assert not {"torch", "transformers", "tokenizers", "datasets", "huggingface_hub"} & set(modules)


def test_a_corpus_that_was_built_among_the_texts_is_no_text(tmp_path, refused):
    """The same build command then finds the same sources again."""
    write(tmp_path / "texts" / "a.txt", TEXT)
    write(tmp_path / "texts" / "made" / "vocab.txt", "[PAD]")
    write(tmp_path / "texts" / "made" / "build.json", "{}")
    assert len(read(tmp_path / "texts")) == 3  # somebody's folder with such a file
    (tmp_path / "texts" / "made" / "shards").mkdir()
    assert read(tmp_path / "texts") == SENTENCES
    with refused():
        read(tmp_path / "texts" / "made")


def test_docs_are_one_piece(monkeypatch):
    monkeypatch.setattr(sources, "read_docs", lambda workers: ([text] for text in ("One. Two.", f"{workers} workers.")))
    (piece,) = cut_sources(["docs"], 50)
    assert (piece, piece.files) == (Piece("docs", "docs"), ())
    assert list(read_piece(piece, workers=3)) == [["One.", "Two."], ["3 workers."]]
