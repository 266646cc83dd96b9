"""What README.md and the recipes say must be so: commands parse, the example runs, the tree is the tree."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

import bertkit
from bertkit.cli import app
from bertkit.definition import list_cells, read_study
from bertkit.features import extract
from bertkit.recipe import read_recipe
from bertkit.run import dry_run, run
from bertkit.tasks import TASKS
from tests.official import write_checkpoint
from tests.tasks.test_conformance import make_pretraining

ROOT = Path(bertkit.__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STUDIES = sorted((ROOT / "recipes" / "studies").rglob("*.toml"))
RECIPES = sorted(set((ROOT / "recipes").rglob("*.toml")) - set(STUDIES))
TEXTS = [README, (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")]
TEXTS += [path.read_text(encoding="utf-8") for path in (*RECIPES, *STUDIES)]


def find_commands(text):
    """The bertkit commands in fenced blocks and in lines that begin with "Command"."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = blocks.splitlines() + re.findall(r"Command +(.*)", text)
    found = [re.search(r"(?:^|[:;] *|-m )(bertkit \w.*)", line) for line in lines]
    return [match.group(1) for match in found if match]


COMMANDS = [command for text in TEXTS for command in find_commands(text)]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5 + len(RECIPES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command):
    words = shlex.split(command, comments=True)
    program = typer.main.get_command(app)
    name, subcommand, rest = program.resolve_command(
        program.make_context("bertkit", ["--help"], resilient_parsing=True), words[1:]
    )
    context = subcommand.make_context(name, list(rest))
    assert context.info_name == words[1]
    for option in ("recipe", "file"):
        if context.params.get(option):
            assert (ROOT / context.params[option]).exists()


def test_the_make_targets_that_are_named_exist():
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in set(re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(TEXTS))) - {"the"}:
        assert f"make {target} " in targets or f"make {target}\n" in targets, target
    for target in ("help", "install", "demo", "check", "format", "test", "test-all", "clean"):
        assert f"make {target}" in targets


def test_the_tree_names_every_module_and_nothing_else():
    tree = re.search(r"```\n(bertkit/\n.*?)```", README, re.DOTALL).group(1)
    named = set(re.findall(r"─ (\S+\.py)", tree))
    there = {str(path.relative_to(ROOT / "bertkit")) for path in (ROOT / "bertkit").rglob("*.py")}
    assert named == {name for name in there if not name.endswith(("__init__.py", "__main__.py"))}


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_with_features_runs(tmp_path, monkeypatch, capsys):
    assert len(EXAMPLES) == 2
    (tmp_path / "texts.txt").write_text("good apple word1\nbad word2 apple\n")
    checkpoint = write_checkpoint(tmp_path / "bert")
    extract(str(checkpoint), tmp_path / "texts.txt", "last", tmp_path / "vectors.npz")
    monkeypatch.chdir(tmp_path)
    exec(compile(next(block for block in EXAMPLES if "apple" in block), "README.md", "exec"), {})
    same, other, again, _ = map(float, re.findall(r"-?\d+\.?\d*", capsys.readouterr().out))
    assert same == 1
    assert other == again < 1


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    example = next(block for block in EXAMPLES if "pipeline" in block)
    assert len([line for line in example.splitlines() if line]) <= 5
    run(TASKS["pretrain"], make_pretraining(tmp_path), output=tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_a_recipe_runs_dry(path, tmp_path, monkeypatch):
    recipe = read_recipe(path)
    given = (
        {"checkpoint": str(write_checkpoint(tmp_path / "bert", num_hidden_layers=4, max_position_embeddings=512))}
        if recipe.get("checkpoint")
        else {}
    )  # no Hub here
    plan = dry_run(TASKS[recipe["task"]], recipe, given, output=tmp_path / "run")
    assert plan.get("updates", 1) > 0  # how many there are of so many epochs only the data say
    assert plan["per_device_batch"] * plan["accumulation"] == plan["sequences_per_update"] == recipe["batch_size"]
    sizes = {"base.toml": 110, "large.toml": 336, "small.toml": 29, "tiny.toml": 4}  # millions, heads included
    if recipe["task"] == "pretrain" and path.name in sizes:
        assert plan["parameters"] // 1_000_000 == sizes[path.name]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "cells", "runs"),
    [
        ("glue-grid", 192, 192),
        ("minilm", 4, 20),
        ("proof", 8, 24),
        ("restarts", 8, 80),
        ("table1", 72, 192),
        ("table5", 20, 100),
        ("table6", 24, 96),
        ("table7", 16, 40),
        ("table8", 18, 90),
        ("figure5", 16, 80),
        ("small/table1", 24, 72),
        ("small/table5", 20, 60),
        ("small/table6", 24, 60),
        ("small/table7", 14, 21),
        ("small/table8", 18, 54),
        ("small/figure5", 16, 48),
    ],
)
def test_a_study_has_the_runs_it_should_have(name, cells, runs, tmp_path):
    path = ROOT / "recipes" / "studies" / f"{name}.toml"
    start = {"checkpoint": str(write_checkpoint(tmp_path / "bert", num_hidden_layers=4, max_position_embeddings=512))}
    found = list_cells(read_study(path, {} if "pretrain" in read_recipe(path) else start))
    assert len(found) == cells
    assert len({directory for cell in found for directory in cell.runs.values()}) == runs


# Tokens of WNUT-17's longest sentence, which is one of test, by the vocabularies of 8,192 that the small studies train;
# by BERT's own it has 189.
LONGEST = 229


@pytest.mark.parametrize("name", ["table7", "table8"])
def test_every_sentence_fits_a_small_study_of_names(name, tmp_path):
    path = ROOT / "recipes" / "studies" / "small" / f"{name}.toml"
    start = {"checkpoint": str(write_checkpoint(tmp_path / "bert", num_hidden_layers=4, max_position_embeddings=512))}
    study = read_study(path, {} if "pretrain" in read_recipe(path) else start)
    cells = [cell for cell in list_cells(study) if cell.column.task == "ner"]
    assert cells
    for cell in cells:
        assert cell.recipe["data"]["max_length"] >= LONGEST + 2
    for row in study.rows.values():
        if row.pretrain:
            assert row.pretrain["model"]["max_position_embeddings"] >= LONGEST + 2


def test_recipes_are_counted_and_listed():
    assert len(RECIPES) == 13
    assert len(STUDIES) == 16
    listed = set(re.findall(r"\]\((\S+\.toml)\)", TEXTS[1]))
    assert listed == {str(path.relative_to(ROOT / "recipes")) for path in (*RECIPES, *STUDIES)}
