"""The rules of the house that can be executed: who may import whom, and what stays out of an import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bertkit

PACKAGE = Path(bertkit.__file__).parent
EVERYONE = {"bertkit.errors", "bertkit.whole"}

# module -> the modules of this package that it may import, lazily or not. Beside these, what EVERYONE may.
MAY_IMPORT = {
    "bertkit": set(),
    "bertkit.__main__": {"bertkit.cli"},
    "bertkit.attention": {"bertkit.device", "bertkit.dropout"},
    "bertkit.cli": {
        "bertkit",
        "bertkit.bench.corpus",
        "bertkit.bench.finetune",
        "bertkit.bench.predict",
        "bertkit.bench.pretrain",
        "bertkit.bench.squad",
        "bertkit.build",
        "bertkit.data.corpus",
        "bertkit.data.docs",
        "bertkit.data.inputs",
        "bertkit.data.shards",
        "bertkit.data.statistics",
        "bertkit.data.vocab",
        "bertkit.definition",
        "bertkit.ensemble",
        "bertkit.features",
        "bertkit.page",
        "bertkit.predict",
        "bertkit.recipe",
        "bertkit.directory",
        "bertkit.report",
        "bertkit.reproduce",
        "bertkit.run",
        "bertkit.sample",
        "bertkit.share",
        "bertkit.study",
        "bertkit.signals",
        "bertkit.submission",
        "bertkit.tasks",
        "bertkit.tasks.glue",
        "bertkit.tasks.squad",
        "bertkit.tensorflow",
        "bertkit.trainer",
        "bertkit.triviaqa",
        "bertkit.workers",
    },
    "bertkit.checkpoint": {"bertkit.config", "bertkit.data.corpus", "bertkit.data.tokens"},
    "bertkit.config": set(),
    "bertkit.data": set(),
    "bertkit.data.conll": {"bertkit.data.corpus", "bertkit.data.files"},
    "bertkit.data.corpus": {"bertkit.data.docs"},
    "bertkit.data.docs": {"bertkit.signals"},
    "bertkit.data.draw": set(),
    "bertkit.data.files": {"bertkit.data.corpus", "bertkit.data.spans"},
    "bertkit.data.inputs": set(),
    "bertkit.data.masking": {"bertkit.data.draw"},
    "bertkit.data.pairs": {"bertkit.data.draw", "bertkit.data.tokens"},
    "bertkit.data.plans": {"bertkit.data.pairs", "bertkit.data.shards"},
    "bertkit.data.sequence": {"bertkit.data.tokens"},
    "bertkit.data.shards": {"bertkit.data.corpus", "bertkit.data.tokens"},
    "bertkit.data.spans": {"bertkit.data.tokens"},
    "bertkit.data.statistics": {"bertkit.data.draw", "bertkit.data.pairs", "bertkit.data.tokens"},
    "bertkit.data.tokens": set(),
    "bertkit.data.vocab": {"bertkit.data.corpus"},
    "bertkit.device": set(),
    "bertkit.directory": {"bertkit", "bertkit.data.shards", "bertkit.data.vocab", "bertkit.device", "bertkit.recipe"},
    "bertkit.data.words": {
        "bertkit.data.conll",
        "bertkit.data.masking",
        "bertkit.data.sequence",
        "bertkit.data.tokens",
    },
    "bertkit.dropout": {"bertkit.device"},
    "bertkit.errors": set(),
    "bertkit.features": {
        "bertkit.checkpoint",
        "bertkit.data.corpus",
        "bertkit.device",
        "bertkit.data.inputs",
        "bertkit.data.sequence",
        "bertkit.data.shards",
        "bertkit.data.tokens",
        "bertkit.data.vocab",
        "bertkit.loss",
        "bertkit.model",
    },
    "bertkit.loss": {"bertkit.device"},
    "bertkit.memory": set(),
    "bertkit.metrics": set(),
    "bertkit.bilstm": {"bertkit.attention", "bertkit.device"},
    "bertkit.model": {
        "bertkit.attention",
        "bertkit.bilstm",
        "bertkit.config",
        "bertkit.device",
        "bertkit.dropout",
        "bertkit.loss",
    },
    "bertkit.optim": set(),
    "bertkit.page": {
        "bertkit",
        "bertkit.data.corpus",
        "bertkit.directory",
        "bertkit.metrics",
        "bertkit.recipe",
        "bertkit.report",
        "bertkit.study",
        "bertkit.tasks",
        "bertkit.tasks.task",
        "bertkit.trainer",
    },
    "bertkit.predict": {
        "bertkit.checkpoint",
        "bertkit.data.conll",
        "bertkit.data.corpus",
        "bertkit.data.inputs",
        "bertkit.data.masking",
        "bertkit.data.sequence",
        "bertkit.data.spans",
        "bertkit.data.tokens",
        "bertkit.data.vocab",
        "bertkit.data.words",
        "bertkit.device",
        "bertkit.directory",
        "bertkit.features",
        "bertkit.metrics",
        "bertkit.model",
        "bertkit.recipe",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.ner",
    },
    "bertkit.recipe": {"bertkit.config"},
    "bertkit.report": {"bertkit.tasks.task"},
    "bertkit.run": {
        "bertkit",
        "bertkit.device",
        "bertkit.directory",
        "bertkit.trainer",
        "bertkit.checkpoint",
        "bertkit.data.corpus",
        "bertkit.data.vocab",
        "bertkit.model",
        "bertkit.optim",
        "bertkit.recipe",
        "bertkit.share",
        "bertkit.tasks.task",
    },
    "bertkit.reproduce": {
        "bertkit.data.corpus",
        "bertkit.directory",
        "bertkit.recipe",
        "bertkit.run",
        "bertkit.tasks",
        "bertkit.tasks.task",
        "bertkit.trainer",
    },
    "bertkit.sample": {"bertkit.data.corpus", "bertkit.data.docs"},
    "bertkit.share": {"bertkit", "bertkit.data.corpus", "bertkit.directory", "bertkit.recipe", "bertkit.tasks.task"},
    "bertkit.submission": {
        "bertkit.data.corpus",
        "bertkit.directory",
        "bertkit.study",
        "bertkit.tasks.glue",
        "bertkit.tasks.task",
    },
    "bertkit.definition": {
        "bertkit.checkpoint",
        "bertkit.config",
        "bertkit.recipe",
        "bertkit.report",
        "bertkit.run",
        "bertkit.tasks",
        "bertkit.tasks.task",
    },
    "bertkit.study": {
        "bertkit.data.corpus",
        "bertkit.data.vocab",
        "bertkit.definition",
        "bertkit.directory",
        "bertkit.recipe",
        "bertkit.report",
        "bertkit.run",
        "bertkit.tasks",
        "bertkit.tasks.pretraining",
        "bertkit.tasks.task",
        "bertkit.trainer",
        "bertkit.workers",
    },
    "bertkit.tasks": {
        "bertkit.tasks.glue",
        "bertkit.tasks.ner",
        "bertkit.tasks.pretraining",
        "bertkit.tasks.squad",
        "bertkit.tasks.swag",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.finetuning": {"bertkit.data.vocab", "bertkit.tasks.task"},
    "bertkit.tasks.glue": {
        "bertkit.data.files",
        "bertkit.data.sequence",
        "bertkit.metrics",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.squad": {
        "bertkit.data.corpus",
        "bertkit.data.files",
        "bertkit.data.sequence",
        "bertkit.data.spans",
        "bertkit.metrics",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.ner": {
        "bertkit.data.conll",
        "bertkit.data.tokens",
        "bertkit.data.words",
        "bertkit.features",
        "bertkit.metrics",
        "bertkit.model",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.pretraining": {
        "bertkit.config",
        "bertkit.data.corpus",
        "bertkit.data.draw",
        "bertkit.data.masking",
        "bertkit.data.pairs",
        "bertkit.data.plans",
        "bertkit.data.shards",
        "bertkit.data.tokens",
        "bertkit.data.vocab",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.swag": {
        "bertkit.data.files",
        "bertkit.data.sequence",
        "bertkit.metrics",
        "bertkit.tasks",
        "bertkit.tasks.finetuning",
        "bertkit.tasks.task",
    },
    "bertkit.tasks.task": set(),
    "bertkit.tensorflow": {"bertkit.config", "bertkit.data.corpus", "bertkit.data.vocab", "bertkit.model"},
    "bertkit.triviaqa": {"bertkit.data.corpus", "bertkit.data.files"},
    "bertkit.ensemble": {
        "bertkit.data.files",
        "bertkit.data.spans",
        "bertkit.directory",
        "bertkit.recipe",
        "bertkit.tasks.squad",
    },
    "bertkit.bench": set(),
    "bertkit.bench.corpus": {
        "bertkit.bench.measure",
        "bertkit.bench.reference",
        "bertkit.build",
        "bertkit.data.corpus",
        "bertkit.data.docs",
        "bertkit.data.shards",
        "bertkit.data.vocab",
        "bertkit.directory",
        "bertkit.tasks.pretraining",
        "bertkit.tasks.task",
    },
    "bertkit.bench.finetune": {
        "bertkit.bench.measure",
        "bertkit.bench.training",
        "bertkit.checkpoint",
        "bertkit.data.corpus",
        "bertkit.data.sequence",
        "bertkit.data.tokens",
        "bertkit.data.vocab",
        "bertkit.device",
        "bertkit.model",
        "bertkit.recipe",
        "bertkit.run",
        "bertkit.tasks",
        "bertkit.tasks.task",
    },
    "bertkit.bench.measure": {"bertkit.data.corpus", "bertkit.memory"},
    "bertkit.bench.predict": {
        "bertkit.bench.measure",
        "bertkit.bench.words",
        "bertkit.config",
        "bertkit.data.corpus",
        "bertkit.data.inputs",
        "bertkit.data.vocab",
        "bertkit.device",
        "bertkit.directory",
        "bertkit.model",
        "bertkit.predict",
        "bertkit.tasks.task",
    },
    "bertkit.bench.pretrain": {
        "bertkit.bench.measure",
        "bertkit.bench.training",
        "bertkit.data.corpus",
        "bertkit.data.masking",
        "bertkit.device",
        "bertkit.recipe",
        "bertkit.run",
        "bertkit.tasks",
        "bertkit.tasks.task",
    },
    "bertkit.bench.reference": set(),
    "bertkit.bench.training": {
        "bertkit.bench.measure",
        "bertkit.data.corpus",
        "bertkit.device",
        "bertkit.directory",
        "bertkit.memory",
        "bertkit.recipe",
        "bertkit.run",
        "bertkit.tasks.task",
    },
    "bertkit.bench.words": set(),
    "bertkit.bench.squad": {
        "bertkit.bench.measure",
        "bertkit.bench.words",
        "bertkit.bench.reference",
        "bertkit.data.corpus",
        "bertkit.data.files",
        "bertkit.data.spans",
        "bertkit.data.vocab",
        "bertkit.directory",
        "bertkit.tasks.squad",
        "bertkit.tasks.task",
    },
    "bertkit.build": {
        "bertkit.data.corpus",
        "bertkit.data.plans",
        "bertkit.data.shards",
        "bertkit.data.statistics",
        "bertkit.data.tokens",
        "bertkit.data.vocab",
        "bertkit.directory",
        "bertkit.recipe",
        "bertkit.signals",
        "bertkit.workers",
    },
    "bertkit.signals": set(),
    "bertkit.trainer": {"bertkit.directory", "bertkit.memory", "bertkit.signals", "bertkit.tasks.task"},
    "bertkit.whole": set(),
    "bertkit.workers": {
        "bertkit.directory",
        "bertkit.recipe",
        "bertkit.run",
        "bertkit.signals",
        "bertkit.tasks",
        "bertkit.trainer",
    },
}


def name_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def find_imports(path: Path) -> set[str]:
    """The modules of this package that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & set(MODULES) or {node.module}
    return {name for name in found if name.partition(".")[0] == "bertkit"}


def test_the_table_names_every_module():
    assert set(MAY_IMPORT) == set(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_what_the_table_allows(name):
    assert find_imports(MODULES[name]) - EVERYONE <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_the_command_line_prints_or_exits(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    allowed = {"os._exit"} if name == "bertkit.signals" else set()  # of what helps, when its parent ends it
    assert name == "bertkit.cli" or not calls & {"print", "exit", "sys.exit", "os._exit"} - allowed


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_and_public_function_has_a_docstring(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    missing = [node.name for node in functions if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert missing == []


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import bertkit", ("torch", "transformers", "numpy", "typer")),
        ("import bertkit.cli", ("torch", "transformers", "numpy", "rich.table")),
        ("import bertkit.recipe", ("torch", "transformers")),
        ("import bertkit.model", ("datasets", "evaluate")),
        ("import bertkit.run", ("evaluate", "matplotlib")),  # transformers' Trainer imports datasets if it is there
    ],
)
def test_an_import_stays_light(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_training_works_where_datasets_and_evaluate_are_not_installed():
    block = "import sys; sys.modules['datasets'] = sys.modules['evaluate'] = None"
    imports = "from bertkit.run import run; from bertkit.directory import describe_environment"
    code = f"{block}; {imports}; print(describe_environment()['packages'])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "transformers" in printed


def test_public_names_are_exported():
    for name in bertkit.__all__:
        assert name == "TASKS" or getattr(bertkit, name).__name__ == name
    glue = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax"]
    assert list(bertkit.TASKS) == ["pretrain", *glue, "squad1", "squad2", "swag", "ner"]
    with pytest.raises(AttributeError, match="no attribute 'BertForNothing'"):
        bertkit.BertForNothing  # noqa: B018
