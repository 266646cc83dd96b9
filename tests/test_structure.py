"""Executable code rules: the modules that may print, and the modules that an import must not load."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bertkit

PACKAGE = Path(bertkit.__file__).parent


def name_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_the_command_line_prints_or_exits(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    allowed = {"os._exit"} if name == "bertkit.system.signals" else set()  # of what helps, when its parent ends it
    assert name.startswith("bertkit.cli") or not calls & {"print", "exit", "sys.exit", "os._exit"} - allowed


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_and_public_function_has_a_docstring(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    missing = [node.name for node in functions if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert missing == []


def list_names(tree: ast.Module) -> list[str]:
    """Return the constants and classes of a module."""
    found = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in found if not name.startswith("__")]


def test_no_two_constants_or_classes_have_one_name():
    homes = {}
    for module, path in MODULES.items():
        for name in set(list_names(ast.parse(path.read_text(encoding="utf-8")))):
            homes.setdefault(name, []).append(module)
    assert len(homes) > 300
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import bertkit",
            ("torch", "transformers", "numpy", "typer", "sklearn", "pyarrow", "pandas", "datasets", "tqdm"),
        ),
        ("import bertkit.cli", ("torch", "transformers", "numpy", "rich.table")),
        ("import bertkit.training.recipe", ("torch", "transformers")),
        ("from bertkit.tasks import TASKS", ("torch", "transformers", "datasets", "sklearn", "matplotlib")),
        pytest.param("import bertkit.model.bert", ("datasets", "evaluate"), marks=pytest.mark.slow),
        pytest.param("import bertkit.inference.predictor", ("datasets", "sklearn"), marks=pytest.mark.slow),
        # transformers' Trainer imports datasets if it is there
        pytest.param("import bertkit.training.run", ("evaluate", "matplotlib"), marks=pytest.mark.slow),
    ],
)
def test_an_import_stays_light(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_a_task_has_few_attributes_and_methods():
    """Functions and data serve a single caller outside of tasks/."""
    members = {name: value for name, value in vars(bertkit.Task).items() if not name.startswith("_")}
    methods = [name for name, value in members.items() if inspect.isfunction(value)]
    attributes = (members.keys() | bertkit.Task.__annotations__.keys()) - set(methods)
    assert len(attributes) <= 24
    assert len(methods) <= 16


def test_public_names_are_exported():
    for name in bertkit.__all__:
        assert name == "TASKS" or getattr(bertkit, name).__name__ == name
    glue = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax"]
    assert list(bertkit.TASKS) == ["pretrain", "classify", *glue, "squad1", "squad2", "swag", "ner"]
    with pytest.raises(AttributeError, match="no attribute 'BertForNothing'"):
        bertkit.BertForNothing  # noqa: B018


# Methods that transformers asks its models to define, and functions of Python's with documentation of their own.
KNOWN = {"_init_weights", "_exit", "_replace", "_asdict"}
# Parts of bertkit's own names in texts, such as that of a column of limits.
AFFIXES = re.compile(
    "_(rows|type|predicted|thresh|spans|without_leaks|low|high|number|score|loss|accuracy|fitted|scored|input|known|vendor)"
)


def list_own_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, as functions, classes, variables or attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def has_private_name(tree: ast.Module) -> bool:
    """Return whether a module uses a name of a library that begins with an underscore, also as text or as keyword."""
    own, named = list_own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_stored = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) not in ("self", "cls")
            named |= {node.attr} if node.attr not in own or is_stored else set()
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            named |= {node.attr} if is_super else set()
        elif isinstance(node, ast.ImportFrom):
            named |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.keyword) and node.arg:
            named.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not AFFIXES.fullmatch(node.value):
            named.add(node.value)
    return any(re.fullmatch(r"_[a-z]\w+", name) and name not in KNOWN for name in named)


def test_few_modules_use_private_names_of_libraries():
    found = [name for name, path in MODULES.items() if has_private_name(ast.parse(path.read_text(encoding="utf-8")))]
    assert found == ["bertkit.cli.console", "bertkit.model.attention", "bertkit.model.cpu", "bertkit.training.trainer"]


def test_no_test_file_imports_another():
    tests = sorted(PACKAGE.with_name("tests").rglob("*.py"))
    assert len(tests) > 100
    found = [
        path.name for path in tests if re.search(r"^(from|import) tests\b.*\btest_", path.read_text(), re.MULTILINE)
    ]
    assert found == []
