"""Plain statements: forms that a reader has to read twice are found in the syntax tree and forbidden."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TEXTS = (ast.List, ast.Tuple, ast.JoinedStr)


def is_text(node: ast.AST) -> bool:
    """Return whether a node is written as a text, a list or a tuple."""
    return isinstance(node, TEXTS) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_condition(node: ast.AST) -> bool:
    """Return whether a node is true or false, as far as its form tells."""
    name = getattr(node, "id", getattr(node, "attr", getattr(getattr(node, "func", None), "id", "")))
    is_named = name == "bool" or name.startswith(("is_", "has_", "are_"))
    return is_named or isinstance(node, ast.Compare | ast.BoolOp) or isinstance(getattr(node, "op", None), ast.Not)


def measure_depth(node: ast.AST) -> int:
    """Return how many comprehensions lie in each other."""
    return isinstance(node, COMPREHENSIONS) + max(map(measure_depth, ast.iter_child_nodes(node)), default=0)


def list_walruses(statement: ast.AST) -> Iterator[ast.NamedExpr]:
    """Yield the assignment expressions of a statement, without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from (node for node in ast.walk(child) if isinstance(node, ast.NamedExpr))


def find_golf(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each forbidden form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(is_text, sides)) and any(map(is_condition, sides)):
                yield node.lineno, "a text times a condition"
        if isinstance(node, COMPREHENSIONS) and measure_depth(node) > 2:
            yield node.lineno, "comprehensions in more than two levels"
        if isinstance(node, ast.stmt) and len(list(list_walruses(node))) > 1:
            yield node.lineno, "two walruses in a statement"
        if isinstance(node, ast.IfExp) and any(isinstance(x, ast.IfExp) for x in ast.walk(node) if x is not node):
            yield node.lineno, "a ternary in a ternary"
        if isinstance(node, ast.Lambda) and any(isinstance(x, ast.IfExp) for x in ast.walk(node)):
            yield node.lineno, "a lambda with a conditional"


@pytest.mark.parametrize("path", sorted((ROOT / "bertkit").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_statements_are_plain(path: Path) -> None:
    assert list(find_golf(ast.parse(path.read_text(encoding="utf-8")))) == []
