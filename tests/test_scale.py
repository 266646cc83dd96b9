"""The arithmetic of the page "At scale" follows from its assumptions."""

import math
import re
from pathlib import Path

import pytest
import torch

from bertkit.model.bert import BertEncoder
from bertkit.model.config import BertConfig

PAGE = (Path(__file__).parents[1] / "recipes" / "scale.md").read_text(encoding="utf-8")
GPUS = (1, 8, 64)


def read_tables(page):
    """Return each table as its headings and rows."""
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    split = [[[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()] for table in tables]
    return [(table[0], table[2:]) for table in split]


def read_name(head):
    """Return the name between backticks in a heading, or nothing."""
    return (re.findall(r"`(\w+)`", head) or [""])[0]


VALUES = {name: float(value) for name, value in re.findall(r"`(\w+)` = ([\d.e]+)(?![\w*/])", PAGE)}
FORMULAS = [
    line.split(" = ") for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()
]
GIVEN = {  # BERT-base, H200, … -> its values
    row[0]: dict(zip(map(read_name, heads[1:]), map(float, row[1:]), strict=True))
    for heads, rows in read_tables(PAGE)
    if heads[0] == ""
    for row in rows
}
COMPUTED = [(heads, row) for heads, rows in read_tables(PAGE) if heads[0] == "not measured" for row in rows]


def compute(model, gpu, reached, gpus):
    """Return every value of the page, computed by its formulas in their order."""
    values = VALUES | GIVEN[model] | GIVEN[gpu] | {"reached": reached, "gpus": gpus}
    values["link"] = values["link_8" if gpus <= 8 else "link_64"]
    for name, formula in FORMULAS:
        values[name] = eval(formula, {"max": max, "ceil": math.ceil}, values)
    return values


def list_values(heads, row):
    """Return the values of a computed row: those without a number of GPUs do not depend on it."""
    model, gpu = row[0].split(", ")
    name, found = "", []
    for head in heads[2:]:
        name = read_name(head) or name
        gpus = re.search(r"on (\d+)", head)
        found.append(compute(model, gpu, float(row[1]), int(gpus[1]) if gpus else 1)[name])
    return found


def show(value):
    """Return a value with two digits, or as a whole number."""
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


@pytest.mark.parametrize(("heads", "row"), COMPUTED, ids=[" ".join(row[:2]) for _, row in COMPUTED])
def test_a_computed_row_follows_from_the_assumptions(heads, row):
    assert row[2:] == [show(value) for value in list_values(heads, row)]


def test_every_assumption_is_used_and_every_formula_shown_or_used():
    used = set(re.findall(r"[a-z]\w*", " ".join(formula for _, formula in FORMULAS)))
    shown = {read_name(head) for heads, _ in COMPUTED for head in heads}
    names = {*VALUES, *(name for values in GIVEN.values() for name in values)} - {"link_8", "link_64"}
    assert names <= used
    assert {name for name, _ in FORMULAS} <= used | shown
    assert len(COMPUTED) == 6
    assert len(PAGE.splitlines()) <= 120
    assert all("not measured" in heading for heading in re.findall("^## (.*)", PAGE, re.MULTILINE)[1:])


def test_the_work_is_that_of_the_model():
    """Two operations per parameter and token forward, twice that backward; attention has two products of T x H."""
    for name, published in (("BERT-base", 2.4e19), ("BERT-large", None)):
        given = GIVEN[name]
        layers, hidden = int(given["layers"]), int(given["hidden"])
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
        with torch.device("meta"):
            encoder = BertEncoder(BertConfig(**sizes, num_attention_heads=hidden // 64))
        linear = sum(x.weight.numel() for x in encoder.modules() if isinstance(x, torch.nn.Linear))
        total = 0
        for length, share, filled in ((128, 0.9, VALUES["filled_128"]), (512, 0.1, VALUES["filled_512"])):
            tokens = 256 * length * filled
            forward = 2 * tokens * linear + layers * 2 * 2 * tokens * length * hidden
            forward += 2 * 0.15 * tokens * (hidden * hidden + hidden * 30522)
            total += 1e6 * share * 3 * forward
        assert compute(name, "H200", 0.45, 8)["work"] == pytest.approx(total)
        assert published is None or total == pytest.approx(published, rel=0.1)


def test_days_of_one_gpu_and_of_eight():
    one, eight = (compute("BERT-base", "A100", 0.45, gpus) for gpus in (1, 8))
    seconds = one["work"] / (0.45 * 312e12)
    assert one["days"] * 86400 == pytest.approx(seconds + 1e6 * 28 * 110e6 / 2.0e12)
    summed = 2 * 4 * 110e6 * 7 / 8 / 300e9  # a ring: each byte of fp32 is sent twice, except one part of eight
    assert eight["days"] * 86400 == pytest.approx(seconds / 8 + 1e6 * (28 * 110e6 / 2.0e12 + summed))


def test_the_minutes_on_a_gpu_of_the_page_of_machines():
    page = (Path(__file__).parents[1] / "recipes" / "machine.md").read_text(encoding="utf-8")
    update = float(re.search(r"`update` = ([\d.]+)", page)[1])
    [rows] = [rows for heads, rows in read_tables(page) if heads[0] == "not measured"]
    assert len(rows) == 3
    assert all(minutes == show(int(updates) * update / 60) for _, updates, minutes in rows)
    assert update == pytest.approx(39 / 1154, abs=5e-4)
