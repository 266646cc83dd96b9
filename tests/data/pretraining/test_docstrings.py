"""The documentation reader: what is prose in real-looking docstrings; no paragraph occurs twice."""

import inspect
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bertkit.data.pretraining import docstrings
from bertkit.data.pretraining.docstrings import extract_prose, read_docs
from bertkit.data.pretraining.sources import read_documents
from bertkit.system.signals import STOPS
from tests.data.conftest import write
from tests.runs import is_running, wait_until

# --- processes that read

READING = """
import os, time
from bertkit.cli.console import explain_mistakes
from bertkit.data.pretraining import docstrings

def read(files):
    time.sleep(0.1)
    return [[f"{os.getpid()} {files[0]}"]]

docstrings._list_modules, docstrings._read_docstrings, docstrings.FILES_A_CHUNK = lambda: range(1000), read, 1
with explain_mistakes():
    for _, [line] in zip(range(1000), docstrings.read_docs(2)):
        print(line.split()[0], flush=True)
"""


@pytest.fixture
def reading():
    """Start a process that reads with two others as a group, and return it and their ids once both have read."""
    command = [sys.executable, "-c", READING]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        helpers = set()
        for line in process.stdout:
            helpers.add(int(line))
            if len(helpers) == 2:
                break
        try:
            yield process, helpers
        finally:
            for pid in (process.pid, *helpers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_to_the_whole_group_is_one_line(reading, number):
    process, helpers = reading
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert error == "bertkit: stopped; finished work is kept, and the same command continues\n"
    assert wait_until(lambda: not any(map(is_running, helpers)), seconds=10)


def test_what_helps_to_read_does_not_outlive_its_parent(reading):
    process, helpers = reading
    process.kill()
    assert wait_until(lambda: not any(map(is_running, helpers)), seconds=10)


# --- prose of docstrings

PROSE = [
    "Return the median of the data.",
    "Initialize self. The weights (if any) are copied, and the caller's array isn't changed.",
    'Whether to use "pre-norm" layers; otherwise, the 12 layers of the encoder are "post-norm".',
    "If False, each of the words is read alone. Should be between 0.0 and 1.0 for all of the other cases!",
]
NOT_PROSE = [
    "Return False.",
    "the default is the last axis of the array.",  # the end of a sentence
    "The data may be an iterator. Open the file like this:",
    "References",
    "Deprecated since version 1.2.3.4, 2019",
    "Like `join` of the module, but with a separator.",
    "Like :func:`join` of the module, but with a separator.",
    "The **kwargs are passed on to the tokenizer.",
    "See [1]_ for the definition of the score.",
    "Read the page <https://example.org> for all of the options.",
    "Raise an error if n_jobs is negative.",
    "ValueError: If the array is empty.",
    "A | B is the union of both of the types.",
    "Return x = f(a, b) for all of the rows.",
    "Equal to numpy.add.reduce and os.path.join of all arrays.",
    "See https://example.org/page for the details.",
    "C 1 1 1 1 0 0 1 and 1 0 0 1 1 1 1 1.",
    "Gibt den Namen der Datei auf der Platte zurück.",
    "The character \ud800 is not a part of any text.",
]


@pytest.mark.parametrize("paragraph", PROSE)
def test_plain_sentences_are_prose(paragraph):
    assert extract_prose(paragraph) == [paragraph]


@pytest.mark.parametrize("paragraph", NOT_PROSE, ids=ascii)
def test_a_paragraph_with_markup_or_code_is_left_out(paragraph):
    assert extract_prose(paragraph) == []


DOCSTRINGS = {
    "numpydoc": (
        """Sum of the elements
        over all of the axes.

        Parameters
        ----------
        a : array_like of shape (n, m)
            Elements to sum over
            all of the axes.

        Notes
        -----
        The sum of an empty array is zero.

        >>> total([1, 2])
        The output of an example.
        """,
        [
            "Sum of the elements over all of the axes.",
            "Elements to sum over all of the axes.",
            "The sum of an empty array is zero.",
        ],
    ),
    "Google": (
        """Read the output of the model.

        Args:
            outputs (`torch.Tensor` of shape `(batch, length)`, *optional*):
                The output of the model's
                generate function.
            **kwargs: Passed on to the tokenizer.

        This may take some time.
        """,
        ["Read the output of the model.", "The output of the model's generate function.", "This may take some time."],
    ),
    "reST": (
        """Send a request to the server.

        :param str url: The address of the server
            to which it is sent.

        .. note:: This is not safe for threads.

        - read the file in the folder
        - close it at the end.

        ====== ===========================
        format what it is for in the table
        ====== ===========================
        """,
        ["Send a request to the server."],
    ),
}


@pytest.mark.parametrize(("docstring", "paragraphs"), DOCSTRINGS.values(), ids=DOCSTRINGS)
def test_a_paragraph_ends_where_the_indentation_changes(docstring, paragraphs):
    assert extract_prose(inspect.cleandoc(docstring)) == paragraphs


# --- the documentation installed on this machine


@pytest.fixture
def installation(tmp_path, monkeypatch) -> Path:
    """Make a standard library of one module and a folder of installed packages."""
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
    write(site / "p" / "latin1_too.py", b'# coding: latin1, caf\xe9\n"""The encoding of this is valid."""')
    write(site / "p" / "tests" / "test.py", '"""The tests of a package are skipped."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(stdlib))
    monkeypatch.setattr(docstrings, "sys", SimpleNamespace(path=["", str(tmp_path), str(site)], platform=sys.platform))
    return tmp_path


def test_docs_are_one_document_a_module_and_no_paragraph_comes_twice(installation, monkeypatch):
    documents = [
        ["The class is the second document.", "The rest of this is new."],
        [
            "The module has a docstring with prose. It is never imported.",
            "The method is the third of them.",
            "The function inside of it is the fourth.",
        ],
        ["The encoding of this is valid."],
    ]
    assert list(read_docs(1)) == documents
    monkeypatch.setattr(docstrings, "FILES_A_CHUNK", 1)
    assert list(read_docs(2)) == documents == list(read_docs(3))
    assert list(read_documents(["docs"], limit_characters=1, split_sentences=False)) == documents[:1]


@pytest.mark.slow
def test_installed_documentation_is_prose():
    part = list(read_documents(["docs"], limit_characters=30_000))
    sentences = [sentence for document in part for sentence in document]
    assert 30_000 <= sum(map(len, sentences)) < 60_000
    assert not any(sentence.startswith((">>>", "..", "import ", "from ")) for sentence in sentences)
    assert np.mean([sentence[-1] in ".?!" for sentence in sentences]) > 0.95
    assert np.mean(["the" in sentence.lower().split() for sentence in sentences]) > 0.4
