"""The notebook in recipes/ runs from the top, and holds what its cells have shown, without paths of a machine."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import bertkit
from bertkit.data.formats import demo
from tests.official import write_checkpoint

NOTEBOOK = Path(bertkit.__file__).parents[1] / "recipes" / "first-steps.ipynb"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_short():
    assert len(CELLS) <= 25
    assert NOTEBOOK.stat().st_size < 150_000
    for cell in CELLS:
        if cell["cell_type"] == "markdown":
            assert len(re.findall(r"\.\s", "".join(cell["source"]) + "\n")) <= 3, cell["source"]


def test_no_path_of_a_machine_is_kept():
    kept = "".join(json.dumps(cell["outputs"]) for cell in CODE)
    assert "macro F1" in kept
    assert "\\r" not in kept.replace("\\r\\n", ""), "a bar is kept as it stands at its end"
    assert re.findall(r"(?<![\w.<*])/(?:home|root|tmp|usr|work|opt|mnt|Users)/[^ \"]*", kept) == []
    assert "image/png" not in kept
    assert "Traceback" not in kept


def run_cell(source, names, call, capsys):
    """Run a cell as a notebook does; return what it prints, and the value of its last expression."""
    printed, value = "", None
    for line in re.findall(r"^!bertkit (.*)$", source, re.MULTILINE):
        code, out, err = call(*shlex.split(line))
        assert code == 0, err
        printed += out
    nodes = ast.parse(re.sub(r"^!.*$", "", source, flags=re.MULTILINE)).body
    last = nodes.pop().value if nodes and isinstance(nodes[-1], ast.Expr) else None
    exec(compile(ast.Module(nodes, []), "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last), "cell", "eval"), names)
    return printed + capsys.readouterr().out, value


@pytest.mark.filterwarnings("ignore::bertkit.BertkitWarning")  # a tiny random model is worse than the baselines
def test_the_cells_run_and_have_kept_what_they_show(call, capsys, monkeypatch, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "bert", initializer_range=0.1)
    monkeypatch.setattr(demo, "DOCUMENTED_PACKAGES", ("scipy",))
    monkeypatch.setattr("bertkit.inference.export.MOST_SECONDS", 0.01)
    names, shown = {}, []
    for number, cell in enumerate(CODE):
        printed, value = run_cell("".join(cell["source"]).replace(ENCODER, str(checkpoint)), names, call, capsys)
        if printed or value is not None:
            shown.append(number)
    assert [number for number, cell in enumerate(CODE) if cell["outputs"]] == shown
    assert len(shown) > len(CODE) / 2
    assert (tmp_path / "topics.html").stat().st_size > 10_000
