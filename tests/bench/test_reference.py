"""Loading reference code from a file leaves no modules or paths behind."""

import sys
from types import ModuleType

import pytest

from bertkit.bench.reference import load_module
from bertkit.errors import UsageError


def test_a_stand_in_is_imported_and_nothing_stays(tmp_path, monkeypatch):
    path = tmp_path / "their.py"
    path.write_text("import a_library, bertkit_errors_of_old\ndef answer(): return a_library.number\n")
    there = ModuleType("bertkit_errors_of_old")
    monkeypatch.setitem(sys.modules, there.__name__, there)
    library = ModuleType("a_library")
    library.number = 7
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # a loader would leave bytecode
    modules, places = dict(sys.modules), list(sys.path)
    beside = {"a_library": library, there.__name__: ModuleType("another")}
    module = load_module(path, "answer", remedy="correct it", beside=beside)
    assert module.answer() == 7
    assert module.bertkit_errors_of_old is beside[there.__name__]
    assert sys.modules == modules
    assert sys.modules[there.__name__] is there
    assert sys.path == places
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is not a file"),
        ("def another(): pass", "has no function answer"),
        ("answer = 1", "has no function answer"),
        ("import a_library\nimport that_is_missing", "cannot be imported (No module named 'that_is_missing')"),
        ("def :", "cannot be imported (invalid syntax"),
        ("raise RuntimeError('two\\nlines')", "cannot be imported (two lines)"),
    ],
)
def test_what_is_no_reference_is_one_line_with_the_remedy(tmp_path, content, complaint):
    path = tmp_path / "their.py"
    if content is not None:
        path.write_text(content)
    modules = dict(sys.modules)
    with pytest.raises(UsageError) as caught:
        load_module(path, "answer", remedy="give another", beside={"a_library": ModuleType("a_library")})
    message = str(caught.value)
    assert message.startswith(f"{path} {complaint}")
    assert message.endswith("; give another")
    assert "\n" not in message
    assert sys.modules == modules
