"""The documentation reader: prose of docstrings in worked examples; no paragraph occurs twice."""

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
from hypothesis import given
from hypothesis import strategies as st

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

PROSE = {
    "titles, doctests, code, fences and tables": (
        """Return the median of the data,
        which is not sorted.

        Examples
        --------
        >>> median([1, 3, 5])
        3

        The data may be an iterator. Open the file like this::

            with open(name) as file:  # this is the usual way to do it

        ```python
        and this is neither if it can be avoided
        ```
        Then it is closed again.

        ====== ===========================
        format what it is for in the table
        ====== ===========================

        +-----+----------------------------+
        | csv | for the tables of a sheet  |
        +-----+----------------------------+
        """,
        [
            "Return the median of the data, which is not sorted.",
            "The data may be an iterator. Open the file like this:",
            "Then it is closed again.",
        ],
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
            **kwargs: Passed on to the tokenizer.

        Returns:
            `list[str]`: The decoded text of the batch.
        """,
        [
            "Post-process the output of the model.",
            "The output of the model's generate function.",
            "Passed on to the tokenizer.",
            "The decoded text of the batch.",
        ],
    ),
    "reST: fields, admonitions, versions, unknown directives and lists": (
        """Send a request to the server.

        :param str url: The address of the server
            to which it is sent.
        :type url: this is a type and not prose

        .. note:: This is not safe for threads.
           Use a lock for that.

        .. versionchanged:: 3.2 The name is optional now.

        .. plot::
           :include-source: this is an option of the plot

           plt.plot(this, is, not_prose)

        .. [1] A. Author, "The title of a book", 1999.

        - read the file in the folder,
          whatever its name is
        2. and close it at the end
        """,
        [
            "Send a request to the server.",
            "The address of the server to which it is sent.",
            "This is not safe for threads. Use a lock for that.",
            "The name is optional now.",
            "read the file in the folder, whatever its name is",
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
    "text that is not English prose": (
        """x = foo(bar, baz) if a else [b for b in c]

        Return False.

        Gibt den Namen der Datei auf der Platte zurück.

        C 1 1 1 1 0 0 1 and 1 0 0 1 1 1 1 1

        The character \ud800 is not a part of any text.
        """,
        ["The character is not a part of any text."],
    ),
}


@pytest.mark.parametrize(("docstring", "paragraphs"), PROSE.values(), ids=PROSE)
def test_prose_of_a_docstring(docstring, paragraphs):
    assert extract_prose(docstring) == paragraphs


MARKUP = [
    *" \n\t`*:.-=#|+>[]()<>_~@\\",
    *("the ", "of ", "file ", ">>> ", ".. note::", ".. code::", "    ", "====", "\n\n"),
]


@given(st.lists(st.sampled_from(MARKUP), max_size=60).map("".join))
def test_prose_of_anything(docstring):
    for paragraph in extract_prose(docstring):
        assert paragraph == " ".join(paragraph.split())
        assert "\0" not in paragraph


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
    write(site / "p" / "latin1_too.py", b'# coding: latin1\n"""The encoding of the caf\xe9 is valid."""')
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
        ["The encoding of the café is valid."],
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
    assert np.mean([sentence[-1] in ".:?!)" for sentence in sentences]) > 0.7
    assert np.mean(["the" in sentence.lower().split() for sentence in sentences]) > 0.4
