"""The forms of language that are not used here, in docstrings, comments, messages, help texts and pages.

Each form stands in the table with what to write instead. Plain technical English is more than this list; a form enters
it when a reader has stumbled over it.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THIS = Path(__file__)
FOLDERS = ("bertkit", "recipes", "tests")
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != THIS)
PAGES = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
PAGES += sorted(path for ending in ("md", "toml") for path in (ROOT / "recipes").rglob(f"*.{ending}"))
PAGES += sorted(path for ending in ("jinja", "html") for path in (ROOT / "bertkit").rglob(f"*.{ending}"))

START = r"(?:^|(?<=[.;:!?]\s))"  # of a text or a sentence
FORBIDDEN = {  # form -> what to write instead
    rf"{START}Nothing, or\b": "Check that …",
    rf"{START}(Of|Whose) ": "begin with the subject",
    rf"{START}What [^?]*(\.|$)": "begin with the subject or a verb",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|better\b|worse\b)": "is not a …",
    r"\b(is|are|was|were|be) not there\b|\bis none there\b": "not found; does not exist",
    r"\bpass(es|ed) over\b": "skip",
    r"\banew\b": "random initialisation; again",
    r"\b(lose|loses|lost|losing) (its|their) ends?\b": "truncated",
    r"\b(is|are|was|were|been|and) cut\b(?! off)": "truncated",
    r"\bno number\b": "NaN or infinite",
    r"\b[Mm]end(s|ed|ing)?\b": "fix, correct",
    r"\bbut for\b": "except",
    r", for (it|its|they|their|there|nobody|this|these|that|he|she|we|one) ": "because",
    r"\b(begun|broken-off) (run|study|corpus)": "unfinished run",
    r"\b(so|first so) many\b(?! that)": "the first N; a number of",
    r"\ba (line|vector|row|text|page|file|folder|directory|job|task|process|worker) (of \w+ )?an? \w+": "one … per …",
    r"\b(whereof|whereby|wherein|thereof|thereby|therein|lest|whilst|amid|hitherto|nought)\b": "plain words",
    r"\bmakes? up for\b|\bof its own accord\b|\bsays? so itself\b": "plain words",
    r"\b(the|a) (twin|herald|crew|tally|board)\b": "the standard term",
    rf"{START}So (?!that\b|far\b)": "therefore; so … in the same sentence",
    r"\bsays? it\b(?! is)": "records, prints or names, with its object",
    r"\b(tell|tells|told|telling) (\w+ )?apart\b": "distinguish; no clear difference",
    r"\b(is|are|was|were) told\b(?! (to|that|by|of)\b)": "recognised, reported, detected",
    r"\b(in|take|takes|taking|took) the place of\b": "instead of; replace",
    r"\b(all|every \w+|any \w+|anything|everything|nothing|none|nobody|no \w+) but\b": "except; only",
    r"\b(\w+'s|\w+s') own\b(?! [\w\[`])": "its own with a noun; your own",
    r"\bhowever (it|they|many|long|often|much)\b": "in any spelling; for any number of",
    r"\bno others\b": "only these",
    r"\boverrul\w+|\boverrides? what\b": "override, with a noun",
    r"\b(is|are|was|were) (not )?looked for\b": "searched, checked, counted",
    r"\b(so|such|those|rows) that [^.;:,|]{1,40} that\b": "two sentences, or a noun for one that",
    r"\bwhose\b[^.;:|]*\bwhose\b": "two sentences",
    r", the (\w+) the (\w+'s|\w+s')": "repeat the verb",
    r"\bended the same\b": "was identical at the end",
    r"\bbeside (plain|stock|transformers'|other|simple|the paper|the pipeline|another)\b": "compared with; while",
    r"\b(paragraph|sentence|piece|document|word|pair)s? an? (line|row|piece|word|update|document)\b": "… per …",
}


def compile_forms(forms):
    """Return a pattern with a group for each form."""
    return re.compile("|".join(f"(?P<f{index}>{form})" for index, form in enumerate(forms)), re.MULTILINE)


ALL, INSTEAD = compile_forms(FORBIDDEN), list(FORBIDDEN.values())


def read_code(path):
    """Yield each comment, docstring and text of a Python file with its line."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    tree = ast.parse(text)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def read_page(path):
    """Yield each paragraph of a page with its line; commands and samples are left out."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    line = 1
    for block in text.split("\n\n"):
        yield line, re.sub(r"(?m)^# ?", "", block) if path.suffix == ".toml" else block
        line += block.count("\n") + 2


def find_forms(path):
    """Return `file:line: form in its words -> what to write` for each forbidden form of a file."""
    found = []
    for line, text in read_code(path) if path.suffix == ".py" else read_page(path):
        flat = re.sub(r"\s+", " ", text.strip())
        for match in ALL.finditer(flat):
            instead = INSTEAD[int(match.lastgroup.removeprefix("f"))]
            around = flat[max(0, match.start() - 25) : match.end() + 25]
            found.append(f"{path.relative_to(ROOT)}:{line}: {around!r} -> {instead}")
    return found


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_forbidden_form(path):
    assert not find_forms(path)
