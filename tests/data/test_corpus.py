"""Sources, documents of sentences, token arrays: worked examples, bad input, and that nothing is lost on the way."""

import gzip
import os
import subprocess
import sys
import sysconfig
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.data import corpus
from bertkit.data.corpus import (
    LONGEST_LINE,
    extract_prose,
    find_hub_trouble,
    hold_out,
    read_documents,
    split_paragraphs,
    tokenize_documents,
)
from bertkit.data.vocab import make_tokenizer
from bertkit.errors import UsageError

TEXT = "My dog is hairy. He barks!\nA second paragraph.\n\nAnother document.\n"
SENTENCES = [["My dog is hairy.", "He barks!", "A second paragraph."], ["Another document."]]


def read(*sources: object, **options: object) -> list[list[str]]:
    return list(read_documents([str(source) for source in sources], **options))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- text files


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.replace("\n", "\r\n").encode(),
        b"\n \n" + TEXT.replace("\n\n", "\n\t\n\n").encode().rstrip(),
    ],
    ids=["plain", "byte order mark", "CRLF", "more blank lines and no last newline"],
)
def test_text_file(tmp_path, content):
    assert read(write(tmp_path / "a.txt", content)) == SENTENCES
    assert read(write(tmp_path / "a.txt.gz", gzip.compress(content))) == SENTENCES


def test_lines_stay_as_they_are_without_sentence_splitting(tmp_path):
    file = write(tmp_path / "a.txt", TEXT)
    assert read(file, split_sentences=False) == [
        ["My dog is hairy. He barks!", "A second paragraph."],
        ["Another document."],
    ]


def test_directory_is_read_in_the_order_of_its_paths(tmp_path):
    write(tmp_path / "b.txt", "Third.\n")
    write(tmp_path / "a" / "z.txt.gz", gzip.compress(b"Second.\n"))
    write(tmp_path / "a" / "b" / "c.txt", "First.\n")
    write(tmp_path / "a" / "empty.txt", "\n\n")
    write(tmp_path / "a.md", "Other names have to be given themselves.\n")
    write(tmp_path / ".hidden.txt", "So have hidden files.\n")
    assert read(tmp_path) == [["First."], ["Second."], ["Third."]]
    assert read(tmp_path / "b.txt", tmp_path / "a.md") == [["Third."], ["Other names have to be given themselves."]]


def test_limit_takes_whole_documents_of_each_source(tmp_path):
    first = write(tmp_path / "a.txt", "One.\n\nTwo.\n\nThree.\n")
    second = write(tmp_path / "b.txt", "Four.\n\nFive.\n")
    lines: list[str] = []
    assert read(first, second, limit_characters=5, report=lines.append) == [["One."], ["Two."], ["Four."]]
    assert lines == [
        f"{first}: 2 documents, 2 sentences, 8 characters",
        f"{second}: 1 documents, 1 sentences, 5 characters",
    ]


def bad_sources() -> list[tuple[str, bytes, str]]:
    return [
        ("empty.txt", b"", r"empty\.txt holds no text"),
        ("blank.txt", b"\n \n\t\r\n", r"blank\.txt holds no text"),
        ("nul.txt", b"One.\nTw\0o.\n", r"nul\.txt, line 2 has a NUL byte.*UTF-8"),
        ("utf16.txt", TEXT.encode("utf-16"), r"utf16\.txt, line 1 has a NUL byte"),
        ("latin1.txt", b"One.\n\ncaf\xe9.\n", r"latin1\.txt, line 3 is not UTF-8 \(byte 0xe9 in place 4\).*iconv"),
        ("long.txt", b"One.\n" + b"a" * 10_000_000, r"long\.txt, line 2 has 10,000,000 bytes or more"),
        ("long.txt.gz", gzip.compress(b"a" * 20_000_000, 1), r"long\.txt\.gz, line 1 has 10,000,000 bytes or more"),
        ("bom.txt", b"\xef\xbb\xbf" + b"a" * 10_000_000, r"bom\.txt, line 1 has 10,000,000 bytes or more"),
        ("bad.txt", b"\xef\xbb\xbfcaf\xe9", r"bad\.txt, line 1 is not UTF-8 \(byte 0xe9"),
        ("plain.txt.gz", b"This is no gzip file.\n", r"plain\.txt\.gz is no complete gzip file"),
        ("cut.txt.gz", gzip.compress(os.urandom(999))[:-99], r"cut\.txt\.gz, line 1|cut\.txt\.gz is no complete gzip"),
        ("cut2.txt.gz", gzip.compress(TEXT.encode())[:-9], r"cut2\.txt\.gz is no complete gzip file"),
        ("folder/readme.md", b"Text.\n", r"none of the 1 files in .*folder is \.txt"),
    ]


@pytest.mark.parametrize(("name", "content", "message"), bad_sources(), ids=[name for name, _, _ in bad_sources()])
def test_bad_file_is_one_line(tmp_path, name, content, message):
    file = write(tmp_path / name, content)
    with pytest.raises(UsageError, match=message) as raised:
        read(file.parent if file.suffix == ".md" else file)
    assert "\n" not in str(raised.value)


def test_longest_line_that_is_read(tmp_path):
    for end in (b"\n", b""):
        file = write(tmp_path / "long.txt", b"a" * (LONGEST_LINE - 1) + end)
        assert len(read(file)[0][0]) == LONGEST_LINE - 1


def test_unreadable_file(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.txt cannot be read \(No such file"):
        list(corpus._read_lines(tmp_path / "gone.txt"))


@pytest.mark.parametrize(
    "source", ["missing.txt", "./missing", "/missing/file", "~/missing", "~nobody-at-all/a", "a/b/c", "x.txt.gz", "a b"]
)
def test_missing_file_is_an_error_at_once_and_not_a_name_on_the_hub(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "find_hub_trouble", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(UsageError, match="does not exist"):
        read_documents([source])


@pytest.mark.parametrize("sources", [[], [""]])
def test_no_source(sources):
    with pytest.raises(UsageError, match="no corpus given"):
        read_documents(sources)


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


# --- the Hub


class Unreachable(Exception):
    """What some HTTP library raises."""


def test_unreachable_hub_is_one_line_and_fast(monkeypatch):
    import datasets
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise Unreachable("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("datasets tries again for 23 seconds"))
    with pytest.raises(
        UsageError, match=r"Hub cannot be reached for the dataset 'owner/name'.*text file.*docs"
    ) as raised:
        read_documents(["owner/name:config"])
    assert "\n" not in str(raised.value)


def test_trouble_with_the_hub_is_told_apart(monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    def trouble(error: Exception | None) -> str | None:
        def answer(*_: object, **__: object) -> None:
            if error:
                raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", answer)
        return find_hub_trouble("owner/name", "model")

    def status(kind: type[Exception]) -> Exception:
        response = SimpleNamespace(headers={}, status_code=500, request=None)
        return kind("two\nlines", response=response)

    assert trouble(None) is None
    assert trouble(status(errors.RepositoryNotFoundError)) == "the Hub has no model 'owner/name'"
    assert trouble(status(errors.GatedRepoError)) == "the model 'owner/name' on the Hub is open to approved users only"
    assert trouble(status(errors.HfHubHTTPError)) == "the Hub does not serve the model 'owner/name' (two lines)"
    assert trouble(errors.OfflineModeIsEnabled("offline")) == (
        "the Hub cannot be reached for the model 'owner/name' (OfflineModeIsEnabled)"
    )


def test_rows_of_a_hub_data_set_are_documents(monkeypatch):
    import datasets

    asked: list[object] = []
    rows = [{"text": "One. Two.\n\nThree."}, {"text": " \n"}, {"text": "Four."}]

    def load(*arguments: object, **options: object) -> list[dict[str, str]]:
        asked.append((arguments, options))
        return rows

    monkeypatch.setattr(corpus, "find_hub_trouble", lambda name, kind: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("owner/name:20220301.en") == [["One.", "Two.", "Three."], ["Four."]]
    assert asked == [(("owner/name", "20220301.en"), {"split": "train", "streaming": True})]

    rows[:] = [{"question": "Why?", "label": "1"}]
    with pytest.raises(UsageError, match="has the columns question, label; choose one with a column text"):
        read("name")

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(ValueError("Config\nname missing"))
    )
    with pytest.raises(UsageError, match=r"'name' cannot be loaded \(Config name missing\)"):
        read("name")


# --- prose of docstrings

PROSE = {
    "wrapped lines are joined and titles and doctests dropped": (
        """Return the median of the data,
        which is not sorted.

        Examples
        --------
        >>> median([1, 3, 5])
        3

        The data may be an iterator.
        """,
        ["Return the median of the data, which is not sorted.", "The data may be an iterator."],
    ),
    "literal block, code block and fence": (
        """Open the file like this::

            with open(name) as file:  # this is the usual way to do it

        .. code-block:: python

           the = code(of, a) and it is not prose

        ```python
        and this is neither if it can be avoided
        ```
        Then it is closed again.
        """,
        ["Open the file like this:", "Then it is closed again."],
    ),
    "numpydoc": (
        """Sum of the elements.

        Parameters
        ----------
        a : array_like of shape (n, m)
            Elements to sum over
            all of the axes.
        axis
            The axis along which to sum.

        See Also
        --------
        mean : This is the mean of the elements and not prose of ours.

        Notes
        -----
        The sum of an empty array is zero.
        """,
        [
            "Sum of the elements.",
            "Elements to sum over all of the axes.",
            "The axis along which to sum.",
            "The sum of an empty array is zero.",
        ],
    ),
    "Google": (
        """Post-process the output of the model.

        Args:
            outputs (`torch.Tensor` of shape `(batch, length)`, *optional*):
                The output of the model's
                `generate` function.
            skip (bool): Whether or not to skip it.
            **kwargs: Passed on to the tokenizer.

        Returns:
            `list[str]`: The decoded text of the batch.
        """,
        [
            "Post-process the output of the model.",
            "The output of the model's generate function.",
            "Whether or not to skip it.",
            "Passed on to the tokenizer.",
            "The decoded text of the batch.",
        ],
    ),
    "reST fields": (
        """Send a request to the server.

        :param str url: The address of the server
            to which it is sent.
        :type url: this is a type and not prose
        :returns: Whether it has been received.
        :rtype: bool
        """,
        [
            "Send a request to the server.",
            "The address of the server to which it is sent.",
            "Whether it has been received.",
        ],
    ),
    "admonitions, versions and unknown directives": (
        """.. note:: This is not safe for threads.
           Use a lock for that.

        .. versionchanged:: 3.2 The name is optional now.

        .. plot::
           :include-source: this is an option of the plot

           plt.plot(this, is, not_prose)

        .. [1] A. Author, "The title of a book", 1999.
        """,
        ["This is not safe for threads. Use a lock for that.", "The name is optional now."],
    ),
    "lists": (
        """It does these things:

        - read the file in the folder,
          whatever its name is
        * write it to the disk
        2. and close it at the end
        """,
        [
            "It does these things:",
            "read the file in the folder, whatever its name is",
            "write it to the disk",
            "and close it at the end",
        ],
    ),
    "inline markup": (
        """Like :func:`~os.path.join` of the :mod:`os` module, ``None`` is *never* a `name`_ [1]_ (see [`Trainer`] or
        `the guide <https://a.b/c>`_ or [this](https://d.e)), |alpha| is **not** <b>bold</b> and \\* is a star.
        """,
        [
            "Like join of the os module, None is never a name (see Trainer or the guide or this), "
            "alpha is not bold and * is a star."
        ],
    ),
    "tables": (
        """The formats are the following ones:

        ====== ===========================
        format what it is for in the table
        ====== ===========================

        +-----+----------------------------+
        | csv | for the tables of a sheet  |
        +-----+----------------------------+
        """,
        ["The formats are the following ones:"],
    ),
    "lone surrogates": (
        "The character \ud800 is not a part of any text.",
        ["The character is not a part of any text."],
    ),
    "what is no English prose": (
        """x = foo(bar, baz) if a else [b for b in c]

        Return False.

        Gibt den Namen der Datei auf der Platte zurück.

        C 1 1 1 1 0 0 1 and 1 0 0 1 1 1 1 1
        """,
        [],
    ),
}


@pytest.mark.parametrize(("docstring", "paragraphs"), PROSE.values(), ids=PROSE)
def test_prose_of_a_docstring(docstring, paragraphs):
    assert extract_prose(docstring) == paragraphs


MARKUP = [
    *" \n\t`*:.-=#|+>[]()<>_~@\\",
    "the ",
    "of ",
    "file ",
    ">>> ",
    ".. note::",
    ".. code::",
    "    ",
    "====",
    "\n\n",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(MARKUP), max_size=60).map("".join))
def test_prose_of_anything(docstring):
    for paragraph in extract_prose(docstring):
        assert paragraph == " ".join(paragraph.split())
        assert "\0" not in paragraph


# --- the documentation installed on this machine


@pytest.fixture
def installation(tmp_path, monkeypatch) -> Path:
    """A standard library of one module and a folder of installed packages."""
    stdlib, site = tmp_path / "lib", tmp_path / "site-packages"
    write(
        stdlib / "a.py",
        '''
        """The module has a docstring with prose. It is never imported."""
        raise SystemExit("imported")
        class A:
            """The class is the second document."""
            if True:
                def method(self):
                    """The method is the third of them."""
                    def inner():
                        """The function inside of it is the fourth."""
            x = "\\d an invalid escape"
        async def f():
            """Too short."""
        '''.replace("\n        ", "\n"),
    )
    write(stdlib / "site-packages" / "no.py", '"""It belongs to the packages and not to the library."""')
    write(site / "p" / "__init__.py", '"""The class is the second document.\n\nThe rest of this is new."""')
    write(site / "p" / "copy.py", '"""The class is the second document."""')
    write(site / "p" / "broken.py", '"""This is not Python that can be parsed."""\ndef')
    write(site / "p" / "latin1.py", b'"""The encoding of the file is not valid: \xe9."""')
    write(site / "p" / "latin1_too.py", b'# coding: latin1\n"""The encoding of the caf\xe9 is valid."""')
    write(site / "p" / "tests" / "test.py", '"""The tests of a package are passed over."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(stdlib))
    monkeypatch.setattr(corpus, "sys", SimpleNamespace(path=["", str(tmp_path), str(site)], platform=sys.platform))
    return tmp_path


def test_docs_are_one_document_a_module_and_no_paragraph_comes_twice(installation):
    assert read("docs", workers=1) == [
        ["The class is the second document.", "The rest of this is new."],
        [
            "The module has a docstring with prose.",
            "It is never imported.",
            "The method is the third of them.",
            "The function inside of it is the fourth.",
        ],
        ["The encoding of the café is valid."],
    ]


def test_docs_are_the_same_for_any_number_of_workers(installation, monkeypatch):
    monkeypatch.setattr(corpus, "FILES_A_CHUNK", 1)
    documents = read("docs", workers=1)
    assert len(documents) == 3
    assert read("docs", workers=2) == documents == read("docs", workers=3)
    assert read("docs", limit_characters=1, workers=2) == documents[:1]


def test_installed_documentation_is_prose():
    part = read("docs", limit_characters=30_000)
    sentences = [sentence for document in part for sentence in document]
    assert 30_000 <= sum(map(len, sentences)) < 60_000
    assert not any(sentence.startswith((">>>", "..", "import ", "from ")) for sentence in sentences)
    assert np.mean([sentence[-1] in ".:?!)" for sentence in sentences]) > 0.7
    assert np.mean(["the" in sentence.lower().split() for sentence in sentences]) > 0.4
    assert part == read("docs", limit_characters=30_000, workers=1)


def test_a_long_paragraph_without_blanks_is_split_in_linear_time():
    chinese = "天地玄黄。" * 20_000
    start = time.process_time()
    assert corpus.split_paragraphs([chinese]) == ["天地玄黄。"] * 20_000
    assert time.process_time() - start < 5
    english = "The cat sat on the mat. " * 2_000
    assert corpus.split_paragraphs([english]) == ["The cat sat on the mat."] * 2_000
    long = "x" * 25_000
    assert corpus.split_paragraphs([f"{long}。{long}"]) == [f"{long}。", long]


# --- token ids

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", "mask", "my", "dog", "is", "hair", "##y", "."]


def test_token_arrays_of_the_papers_example():
    documents = [["My dog is hairy.", "\u200b", "[MASK] dog"], [" "], ["Is dog."]]
    tokenized = tokenize_documents(documents, make_tokenizer(TOKENS, cased=False))
    assert tokenized.ids.tolist() == [8, 9, 10, 11, 12, 13, 5, 7, 6, 9, 10, 9, 13]
    assert tokenized.ids.dtype == np.uint16
    assert tokenized.sentence_ends.tolist() == [6, 10, 13]
    assert tokenized.document_ends.tolist() == [2, 3]
    assert (tokenized.token_count, tokenized.sentence_count, tokenized.document_count) == (13, 3, 2)
    assert tokenized.sentence_ends.dtype == tokenized.document_ends.dtype == np.int64


words = st.sampled_from(["my", "dog", "hairy", "unknown", ".", "[MASK]", "", "\u200b"])


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(words).map(" ".join))), st.integers(1, 40))
def test_token_arrays_are_the_tokens_of_each_sentence(documents, characters):
    tokenizer = make_tokenizer(TOKENS, cased=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHARACTERS_A_BATCH", characters)
        tokenized = tokenize_documents(iter(documents), tokenizer)
    options = {"add_special_tokens": False, "split_special_tokens": True}
    expected = [
        [ids for sentence in document if (ids := tokenizer(sentence, **options)["input_ids"])] for document in documents
    ]
    starts = [0, *tokenized.sentence_ends.tolist()]
    sentences = [tokenized.ids[a:b].tolist() for a, b in pairwise(starts)]
    starts = [0, *tokenized.document_ends.tolist()]
    assert [sentences[a:b] for a, b in pairwise(starts)] == [document for document in expected if document]


def test_tokenizing_needs_no_length_and_leaves_the_tokenizer_alone(recwarn):
    tokenizer = make_tokenizer(TOKENS, cased=False, max_length=4)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    assert tokenize_documents([["dog " * 9]], tokenizer).ids.tolist() == [9] * 9
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert not recwarn


def test_large_vocabularies_need_wider_ids():
    tokens = [*TOKENS, *(f"t{i}" for i in range(65536 - len(TOKENS)))]
    assert tokenize_documents([["t7 dog"]], make_tokenizer(tokens, cased=False)).ids.dtype == np.uint16
    last = tokenize_documents([["last dog"]], make_tokenizer([*tokens, "last"], cased=False)).ids
    assert (last.dtype, last.tolist()) == (np.uint32, [65536, 9])


# --- held-out documents


@given(st.integers(2, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_hold_out_is_a_split(count, share, seed):
    documents = [[f"Document {i}."] for i in range(count)]
    training, held_out = hold_out(documents, share, seed)
    assert sorted(training + held_out) == sorted(documents)
    assert training == [document for document in documents if document in training]
    assert held_out == [document for document in documents if document in held_out]
    assert (training, held_out) == hold_out(documents, share, seed)
    if share == 0 or count < 4:
        assert not held_out
    else:
        assert len(held_out) >= 2
        assert len(training) >= 2
        assert len(held_out) in (2, count - 2, round(share * count))


def test_hold_out_depends_on_the_seed():
    assert hold_out(range(100), 0.1, seed=0)[1] != hold_out(range(100), 0.1, seed=1)[1]
    assert len(hold_out(range(100), 0.1, seed=0)[1]) == 10


@pytest.mark.parametrize("count", [0, 1])
def test_next_sentence_prediction_needs_two_documents(count):
    with pytest.raises(UsageError, match=rf"has {count} documents? and .* needs two; put a blank line between"):
        hold_out([["One."]] * count, 0.1, seed=0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2, float("nan")])
def test_held_out_share_out_of_range(share):
    with pytest.raises(UsageError, match="held-out share is"):
        hold_out(range(10), share, seed=0)


def test_importing_is_light():
    program = "import sys, bertkit.data.corpus, bertkit.data.vocab; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in modules
    assert not {"torch", "transformers", "tokenizers", "datasets", "huggingface_hub", "sentencex"} & set(modules)
