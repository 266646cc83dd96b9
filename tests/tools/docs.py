"""Write the tables of the pages that repeat the code.

    python -m tests.tools.docs

`make docs` runs it. A table that follows a comment `<!-- make docs: KIND NAME -->` is written from the code: of a
`values` table the values of the recipes, of a `sizes` table all columns but the first, of the others everything.
`tests/test_readme.py` fails if a page is out of date.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.tasks import TASKS
from bertkit.tasks.glue import BASE_TEST, BENCHMARKS, LARGE_TEST, SCORE_NAMES, Benchmark
from bertkit.tasks.option import Option
from bertkit.tasks.pretraining import STARTER
from bertkit.training.recipe import merge, read_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes").rglob("*.md"))]
TABLE = re.compile(r"^(<!-- make docs: (\w+) (\S+) -->\n)((?:\|.*\n)*)", re.MULTILINE)

Rows = list[list[str]]

FEATURES = {"data": {"features": "last"}}
BASE = read_recipe(ROOT / "recipes" / "pretrain" / "base.toml")
BENCHMARK_RECIPES = [TASKS[row.name].recipe for row in BENCHMARKS if row.metrics]
VALUES: dict[str, dict[str, list[Mapping[str, Any]]]] = {  # table -> column -> the recipes that have its values
    "finetuning": {"value": [task.recipe for task in TASKS.values() if task.name != "pretrain"]},
    "pretrain": {
        "without a recipe": [merge(TASKS["pretrain"].recipe, STARTER)],
        "base.toml": [merge(TASKS["pretrain"].recipe, BASE)],
    },
    "glue": {"value": BENCHMARK_RECIPES},
    "squad": {"1.1": [TASKS["squad1"].recipe], "2.0": [TASKS["squad2"].recipe]},
    "classify": {"value": [TASKS["classify"].recipe]},
    "swag": {"value": [TASKS["swag"].recipe]},
    "ner": {
        "fine-tuned": [TASKS["ner"].recipe],
        "features": [merge(TASKS["ner"].recipe, TASKS["ner"].implied["features"], FEATURES)],
    },
}


def show_value(value: Any) -> str:
    """Return a value as TOML; numbers below 0.01 in scientific notation."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return f"`{np.format_float_scientific(value, trim='-', exp_digits=1)}`"
    return f"`{value:_}`" if type(value) is int and value >= 10_000 else f"`{json.dumps(value)}`"


def find_value(cell: str, recipes: list[Mapping[str, Any]]) -> str:
    """Return the value of the key in a cell, such as `train.seed`, which all the recipes have."""
    table, _, name = cell.strip("`").rpartition(".")
    (value,) = {show_value((recipe[table] if table else recipe)[name]) for recipe in recipes}
    return value


def fill_values(rows: Rows, name: str) -> Rows:
    """Return a table with the values of its keys, which stand in the first column."""
    heads, *body = rows
    for column, recipes in VALUES[name].items():
        place = heads.index(column)
        body = [[*row[:place], find_value(row[0], recipes), *row[place + 1 :]] for row in body]
    return [heads, *body]


def fill_sizes(rows: Rows, name: str) -> Rows:
    """Return the table of recipes for pretraining with their sizes; each row begins with a link to its recipe."""
    filled = []
    for row in rows[1:]:
        recipe = read_recipe(ROOT / "recipes" / name / re.search(r"\]\((.*?)\)", row[0])[1])
        lengths = [phase["max_length"] for phase in recipe.get("phase", [recipe["data"]])]
        sizes = recipe.get("model")
        model = f"{sizes['num_hidden_layers']} layers of {sizes['hidden_size']}" if sizes else recipe["checkpoint"]
        updates = f"{recipe['train']['max_steps']:,} of {recipe['batch_size']}"
        filled.append([row[0], model, updates, ", ".join(map(str, lengths))])
    return [["recipe", "model", "updates of sequences", "maximum tokens per sequence"], *filled]


def list_options(rows: Rows, name: str) -> Rows:
    """Return the table of a task's options of `[data]`."""

    def show(key: str, option: Option) -> list[str]:
        return [f"`data.{key}`", show_value(option.default), option.help.replace("|", r"\|"), option.source]

    options = TASKS[name].options
    return [["key", "default", "meaning", "source of the default"], *(show(*item) for item in options.items())]


def list_benchmarks(rows: Rows, name: str) -> Rows:
    """Return the table of GLUE's tasks."""

    def show(row: Benchmark) -> list[str]:
        columns = "by position" if row.bare else ", ".join(f"`{column}`" for column in [*row.texts.values(), row.label])
        metrics = ", ".join(SCORE_NAMES[metric] for metric in row.metrics)
        paper = row.paper.get(row.metrics[0])
        values = f"{100 * paper[BASE_TEST]:.1f}, {100 * paper[LARGE_TEST]:.1f}" if paper else "left out"
        return [f"`{row.name}`", f"`{row.splits['train'].file.partition('/')[0]}`", columns, metrics, values]

    heads = ["task", "folder", "columns", "metrics, the paper's first", "paper, test: base, large"]
    return [heads, *(show(row) for row in BENCHMARKS if row.metrics)]


def list_published(rows: Rows, name: str) -> Rows:
    """Return a table of the paper, its own systems and the others, from the recipe of its study."""
    study = read_recipe(ROOT / "recipes" / "studies" / f"{name}.toml")
    systems = {row["name"]: row["paper"] for row in study["row"] if "paper" in row} | study["cited"]
    heads = dict.fromkeys([column["name"] for column in study["column"]])
    heads |= dict.fromkeys(head for values in systems.values() for head in values)
    return [["system", *heads], *([system, *(str(x.get(head, "")) for head in heads)] for system, x in systems.items())]


KINDS = {
    "published": list_published,
    "values": fill_values,
    "sizes": fill_sizes,
    "options": list_options,
    "benchmarks": list_benchmarks,
}


def write_tables(page: str) -> str:
    """Return a page with its marked tables written from the code."""

    def write(found: re.Match) -> str:
        lines = [[cell.strip() for cell in line.strip()[1:-1].split(" | ")] for line in found[4].splitlines()]
        rows = KINDS[found[2]](lines[:1] + lines[2:], found[3])
        table = [f"| {' | '.join(row)} |\n" for row in rows]
        return found[1] + "".join([table[0], "|---" * len(rows[0]) + "|\n", *table[1:]])

    return TABLE.sub(write, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
