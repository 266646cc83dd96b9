"""Small data sets in the official formats, made from the documentation installed on this machine without any download.

numpy, scipy, scikit-learn and pandas describe the parameters of thousands of functions in numpydoc's format, which
separates name, type and description. A question asks for the type of a parameter of a function. As in SQuAD 2.0
(section 4.3), some cannot be answered: they are asked about another function's description. As in QNLI (section 4.1), a
sentence either answers a question or is about another parameter. No function is in both train and dev. The first
sentence about a function, with the field that its module is about, is a text with a label, in CSV files.

Left out: every other documentation format.
"""

import ast
import csv
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.pretraining.docstrings import parse_module
from bertkit.errors import UsageError
from bertkit.system.files import atomic_write
from bertkit.system.progress import ignore

DOCUMENTED_PACKAGES = ("numpy", "scipy", "sklearn", "pandas")
SECTION = re.compile(r"^(?:Other )?Parameters\n-{3,}\n", re.MULTILINE)
NEXT_SECTION = re.compile(r"^\S.*\n-{3,}$", re.MULTILINE)
PARAMETER_ENTRY = re.compile(r"^(\*{0,2}[A-Za-z_]\w*) ?: (\S.*)$")
# Text after a type that is not part of it.
BEHIND = re.compile(r"\s*(?:,\s*)?(?:\(?\b(?:optional|default|keyword[- ]only)\b.*)$", re.IGNORECASE)
LONGEST_TYPE, LONGEST_DESCRIPTION = 80, 160  # characters
MOST_PARAMETERS = 4  # parameters of a function described in a context; most contexts then fit into 128 tokens
UNANSWERABLE = 1 / 3  # share of unanswerable questions, as in SQuAD 2.0's training set
DEV_SHARE = 0.1  # share of the functions in dev
SAMPLE_SEED = 0
TOPICS = {  # the field of a function -> the modules that are about it
    "statistics": ("scipy.stats",),
    "optimization": ("scipy.optimize",),
    "signals": ("scipy.signal",),
    "linear algebra": ("scipy.linalg", "numpy.linalg", "scipy.sparse.linalg"),
    "images": ("scipy.ndimage",),
    "calculus": ("scipy.integrate", "scipy.interpolate", "scipy.differentiate"),
    "special functions": ("scipy.special",),
    "geometry": ("scipy.spatial",),
    "files": ("pandas.io", "scipy.io"),
    "tables": ("pandas.core.reshape", "pandas.core.groupby", "pandas.core.window"),
    "text": ("pandas.core.strings",),
    "plots": ("pandas.plotting",),
    "machine learning": (
        *("sklearn.linear_model", "sklearn.ensemble", "sklearn.cluster", "sklearn.svm", "sklearn.tree"),
        *("sklearn.neighbors", "sklearn.decomposition", "sklearn.feature_selection", "sklearn.preprocessing"),
    ),
}
TOPIC_ROWS = {"train": 30, "dev": 30}  # sentences of each field
TOPIC_WORDS = (4, 30)  # the fewest and the most words of a sentence


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its type, without remarks on defaults, and its description."""

    name: str
    type: str
    description: str


@dataclass(frozen=True)
class Function:
    """A documented function, or a class with parameters."""

    name: str
    parameters: tuple[Parameter, ...]


# --- Reading ----------------------------------------------------------------------------------------------------------


def list_modules() -> Iterator[tuple[str, Path]]:
    """Yield the public name of each module's package and its file, of all installed packages."""
    for package in DOCUMENTED_PACKAGES:
        spec = find_spec(package)  # imports nothing
        root = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
        for path in sorted(root.rglob("*.py")) if root else []:
            parts = path.relative_to(root.parent).parts
            if not {"tests", "test", "_vendor"} & set(parts):
                yield ".".join(part for part in parts[:-1] if not part.startswith("_")), path


def read_docstrings() -> dict[str, str]:
    """Return the docstrings of all functions by name, sorted; the first of equal names is kept."""
    found: dict[str, str] = {}
    for folder, path in list_modules():
        for name, docstring in list_docstrings(path):
            found.setdefault(f"{folder}.{name}", docstring)
    return {name: found[name] for name in sorted(found)}


def read_functions(docstrings: Mapping[str, str]) -> list[Function]:
    """Return the functions whose parameters are described."""
    parsed = ((name, tuple(parse_parameters(text))[:MOST_PARAMETERS]) for name, text in docstrings.items())
    return [Function(name, parameters) for name, parameters in parsed if parameters]


def list_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name within the module and the docstring of every public function and class in a file."""

    def walk(before: str, nodes: Sequence[Any]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                if docstring := ast.get_docstring(node, clean=False):
                    yield before + node.name, docstring
                if isinstance(node, ast.ClassDef):
                    yield from walk(f"{before}{node.name}.", node.body)

    tree = parse_module(path)
    yield from walk("", tree.body if tree else ())


def parse_parameters(docstring: str) -> Iterator[Parameter]:
    """Yield the parameters that a docstring describes in numpydoc's format, if they have a type and a description."""
    text = inspect.cleandoc(docstring)
    if not (begin := SECTION.search(text)):
        return
    end = NEXT_SECTION.search(text, begin.end())
    name, kind, lines = "", "", []
    for line in [*text[begin.end() : end.start() if end else None].splitlines(), "the end"]:
        if not line or line[0] == " ":
            lines.append(line.strip())
            continue
        description = clean(" ".join(lines).partition(". ")[0].rstrip("."))
        if kind and description and len(kind) <= LONGEST_TYPE:
            yield Parameter(name, kind, f"{description[:LONGEST_DESCRIPTION].rstrip()}.")
        found = PARAMETER_ENTRY.match(line)
        name, kind = (found[1].lstrip("*"), BEHIND.sub("", clean(found[2]))) if found else ("", "")
        lines = []


def clean(text: str) -> str:
    """Remove reStructuredText markup and join the text into one line."""
    return " ".join(re.sub(r":\w+:(?=`)|[`*]+|\\", "", text).split())


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_samples(output: Path, questions: int = 12_000, report: Callable[[str], None] = ignore) -> None:
    """Write `topics/` (CSV files), `squad/` (SQuAD 2.0 files) and `glue/QNLI/` (GLUE files), each of train and dev.

    Args:
        questions: Maximum number of questions in each training set.

    Raises:
        OSError: The directory cannot be made or written to.
    """
    if there := [str(output / name) for name in ("squad", "glue", "topics") if (output / name).exists()]:
        raise UsageError(f"the directory already has {' and '.join(there)}; delete them, or name another directory")
    docstrings = read_docstrings()
    functions, parts = read_functions(docstrings), {"train": [], "dev": []}
    for function in functions:  # by its name alone, whatever other packages there are
        share = int.from_bytes(blake2b(function.name.encode(), digest_size=4).digest()) / 2**32
        parts["dev" if share < DEV_SHARE else "train"].append(function)
    files = {}
    for split, rows in make_topics(docstrings).items():
        csv.writer(file := StringIO()).writerows([("text", "topic", "function"), *rows])
        files[f"topics/{split}.csv"] = file.getvalue()
        report(f"topics, {split}: {len(rows):,} sentences about functions, each with its field")
    report(f"{len(functions):,} functions with documented parameters")
    for split, chosen in parts.items():
        limit = questions if split == "train" else max(questions // 10, 100)
        articles, pairs = make_articles(chosen, limit), make_pairs(chosen, limit)
        files[f"squad/{split}-v2.0.json"] = json.dumps({"version": "v2.0", "data": articles}) + "\n"
        lines = ["index\tquestion\tsentence\tlabel", *("\t".join([str(n), *row]) for n, row in enumerate(pairs))]
        files[f"glue/QNLI/{split}.tsv"] = "\n".join(lines) + "\n"
        asked = sum(len(article["paragraphs"][0]["qas"]) for article in articles)
        report(f"{split}: {asked:,} questions, {len(pairs):,} pairs")
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(text, output / name)
    report(f"In {output}: topics/, squad/, glue/")


def ask(function: Function, parameter: Parameter) -> str:
    """Return the question for the type of a parameter."""
    return f"What type is the parameter {parameter.name} of {function.name}?"


def order(functions: Sequence[Function]) -> list[Function]:
    """Return the functions in a random order that is the same on each call."""
    return [functions[number] for number in np.random.default_rng(SAMPLE_SEED).permutation(len(functions))]


def make_articles(functions: Sequence[Function], limit: int) -> list[dict[str, Any]]:
    """Return SQuAD articles of one paragraph each, until there are `limit` questions."""
    random, articles, count = np.random.default_rng(SAMPLE_SEED), [], 0
    for function in order(functions):
        context, starts, found = f"{function.name} has these parameters.", {}, []
        for parameter in function.parameters:
            context += f" {parameter.name} is "
            starts[parameter.name] = len(context)
            context += f"{parameter.type}: {parameter.description}"
        for parameter in function.parameters:
            if count == limit:
                break
            count += 1
            other = functions[random.integers(len(functions))]
            is_silent = random.random() < UNANSWERABLE and other is not function
            wanted = other.parameters[random.integers(len(other.parameters))] if is_silent else parameter
            answer = {"text": parameter.type, "answer_start": starts[parameter.name]}
            found.append(
                {
                    "id": f"{function.name}/{parameter.name}",
                    "question": ask(other if is_silent else function, wanted),
                    "answers": [] if is_silent else [answer],
                    "is_impossible": is_silent,
                }
            )
        if found:
            articles.append({"title": function.name, "paragraphs": [{"context": context, "qas": found}]})
    return articles


def make_pairs(functions: Sequence[Function], limit: int) -> list[tuple[str, str, str]]:
    """Return rows (question, sentence, label).

    Every second sentence describes another parameter, of this or another function.
    """
    random, rows = np.random.default_rng(SAMPLE_SEED), []
    for function in order(functions):
        for parameter in function.parameters:
            if len(rows) == limit:
                return rows
            is_entailed = len(rows) % 2 == 0
            owner, shown = function, parameter
            if not is_entailed:
                others = [found for found in function.parameters if found is not parameter]
                if not others or random.random() < 0.5:
                    owner = functions[random.integers(len(functions))]
                    others = [found for found in owner.parameters if found.name != parameter.name]
                if not others:
                    continue
                shown = others[random.integers(len(others))]
            sentence = f"In {owner.name}, {shown.name} is {shown.type}: {shown.description}"
            rows.append((ask(function, parameter), sentence, "entailment" if is_entailed else "not_entailment"))
    return rows


def make_topics(docstrings: Mapping[str, str]) -> dict[str, list[tuple[str, str, str]]]:
    """Return rows (first sentence about a function, its field, its name) of train and dev, mixed.

    Each field has as many rows as there are, up to TOPIC_ROWS. No sentence occurs twice.
    """
    found: dict[str, dict[str, str]] = {topic: {} for topic in TOPICS}  # sentence -> function
    for name, docstring in docstrings.items():
        module = name.rpartition(".")[0]
        paragraph = clean(inspect.cleandoc(docstring).partition("\n\n")[0])
        sentence = re.split(r"(?<=[.!?]) ", paragraph)[0]
        is_known = any(sentence in own for own in found.values())
        if is_known or not TOPIC_WORDS[0] <= len(sentence.split()) <= TOPIC_WORDS[1]:
            continue
        for topic, modules in TOPICS.items():
            if f"{module}.".startswith(tuple(f"{each}." for each in modules)):
                found[topic][sentence] = name
    random, rows = np.random.default_rng(SAMPLE_SEED), {split: [] for split in TOPIC_ROWS}
    for topic, own in found.items():
        mixed = [list(own)[number] for number in random.permutation(len(own))]
        start = 0
        for split, most in TOPIC_ROWS.items():
            rows[split] += [(sentence, topic, own[sentence]) for sentence in mixed[start : start + most]]
            start += most
    return {split: [lines[number] for number in random.permutation(len(lines))] for split, lines in rows.items()}
