"""The pages agree with the code: commands parse, samples are read, tables and messages are those of the code."""

import ast
import json
import pkgutil
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
import typer
from transformers.models.bert import modeling_bert

import bertkit
from bertkit.cli.options import HELP_WIDTH, app
from bertkit.data.formats.conll import read_conll
from bertkit.data.formats.glue import read_labels, read_split
from bertkit.data.formats.rows import read_columns
from bertkit.data.formats.squad import read_own_squad, read_squad
from bertkit.data.formats.swag import read_swag
from bertkit.data.labels import make_label_space
from bertkit.data.pretraining.sources import read_documents
from bertkit.data.spans import is_placed
from bertkit.errors import UsageError
from bertkit.inference.features import extract
from bertkit.studies.cells import list_cells
from bertkit.studies.spec import OPTIONS, make_study
from bertkit.tasks import TASKS
from bertkit.tasks.glue import GRID, get_glue_task
from bertkit.tasks.redaction import redact
from bertkit.tasks.task import list_commands
from bertkit.training.predictions import read_table
from bertkit.training.recipe import Recipe, check, parse_setting, read_recipe
from bertkit.training.run import dry_run
from tests.conftest import draft
from tests.official import FILLERS, write_checkpoint, write_reviews
from tests.tools import docs
from tests.world import write_head

ROOT = Path(bertkit.__file__).parents[1]
STUDIES = sorted((ROOT / "recipes" / "studies").rglob("*.toml"))
RECIPES = sorted(set((ROOT / "recipes").rglob("*.toml")) - set(STUDIES))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").rglob("*.md"))}
HEADERS = {path: path.read_text(encoding="utf-8") for path in (*RECIPES, *STUDIES)}
TEXTS = [README, *PAGES.values(), *HEADERS.values()]
NOTEBOOK = [path for path in PAGES if path.parent.name == "notebook"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")


# --- Command lines ----------------------------------------------------------------------------------------------------


def list_program(program, *names):
    """Return each command by its full name, groups included."""
    if not hasattr(program, "commands"):
        return {" ".join(names): program}
    found = {}
    for name, command in program.commands.items():
        found |= list_program(command, *names, name)
    return found


PROGRAM = list_program(typer.main.get_command(app), "bertkit")
NAMES = {part for name in PROGRAM for part in (name, name.rpartition(" ")[0])}
HELP = {name: re.findall(r"^\$ (.*)", command.help, re.MULTILINE) for name, command in PROGRAM.items()}


def find_blocks(text, kind):
    """Return the fenced blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def find_spans(text):
    """Return the texts between backticks in running text."""
    running = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running)]


def find_commands(text):
    """Return the bertkit commands of a text: lines in blocks, and spans that are neither names nor shortened."""
    lines = [line for block in find_blocks(text, "bash") for line in block.splitlines()]
    shown = re.findall(r"^\$ (.*)", "\n".join(find_blocks(text, "text")), re.MULTILINE)
    lines += [command for line in shown for command in line.split(" && ")]
    lines += [span for span in find_spans(text) if "…" not in span and span not in NAMES]
    found = [re.search(r"(?:^|-m )(bertkit \w.*)", line) for line in lines]
    return [match.group(1) for match in found if match]


def find_header_commands(text):
    """Return the commands of a recipe's header; one may continue on the next line, with prose after its last option."""
    part = re.search(r"^# Command +(.*?)^# ?[A-Z\n]", text, re.DOTALL | re.MULTILINE).group(1)
    lines = re.sub(r"\n#\s+(?=--|')", " ", part).splitlines()
    found = [re.search(r"(?:^#?\s*|: |-m )(bertkit [a-z].*)", line) for line in lines]
    return [drop_prose(match.group(1)) for match in found if match]


def drop_prose(command):
    """Return a command without the prose after its last option and value."""
    words = shlex.split(command)
    last = max((place for place, word in enumerate(words) if word.startswith("--")), default=len(words))
    words = words[: last + 2]
    return shlex.join([*words[:-1], words[-1].rstrip(".,;")])


COMMANDS = [command for text in (README, *PAGES.values()) for command in find_commands(text)]
COMMANDS += re.findall(r"\$\(BIN\)/(bertkit .*)", MAKEFILE)
COMMANDS += [command for text in HEADERS.values() for command in find_header_commands(text)]
COMMANDS += [command for examples in HELP.values() for command in examples]
TRIED = [line for task in TASKS.values() for line in list_commands(task, Path("runs/my own"), draft(task))]
COMMANDS += [line for line in TRIED if line.startswith("bertkit ")]


def parse(command):
    """Return the options of a command line."""
    program, (name, *words) = typer.main.get_command(app), shlex.split(command, comments=True)
    while words and hasattr(program, "commands"):
        name, *words = words
        program = program.commands[name]
    return program.make_context(name, words).params


def test_the_commands_are_found():
    assert sum(map(len, HELP.values())) >= len(HELP) + 8
    assert len(find_commands(README)) >= 14
    assert sum(len(find_commands(text)) for text in PAGES.values()) >= 50
    for path, text in HEADERS.items():
        assert any(str(path.relative_to(ROOT)) in command for command in find_header_commands(text)), path


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_parses(command):
    options = parse(command)
    for name in ("recipe", "file"):
        path = options.get(name)
        assert path is None or path.name == str(path) or path.parts[0] == "runs" or (ROOT / path).exists()


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_every_command_has_examples_of_it(name):
    assert HELP[name]
    for example in HELP[name]:
        assert example.startswith(f"{name} ")
        assert len(example) <= HELP_WIDTH - 2
        assert parse(example)


def find_settings(text):
    """Return the settings given to --set anywhere in a text."""
    found = re.findall(r"--set[\s#]+('[^']+'|[^\s`']+)", text)
    settings = {setting.strip("'").rstrip(".,;") for setting in found if "=" in setting}
    return {setting for setting in settings if not re.search(r"=([A-Z]|value)$", setting)}  # which stand for values


@pytest.mark.parametrize("setting", sorted(set.union(*map(find_settings, [*TEXTS, *COMMANDS]))))
def test_a_setting_is_a_key_of_a_recipe_or_a_study(setting):
    recipe = parse_setting(setting)
    refusals = []
    for task in TASKS.values() if not recipe.keys() <= set(OPTIONS) else ():
        try:
            check(recipe, task)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) < len(TASKS), refusals


def test_the_scripts_that_are_named_have_these_options():
    spans = [span for text in TEXTS for span in find_spans(text) if span.startswith("python -m ")]
    assert spans
    called = []  # the files of a script, and the words after its name
    for module, *words in (re.sub(r"[\[\]]", "", span).split()[2:] for span in spans):
        place = ROOT / module.replace(".", "/")
        called.append((place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")], words))
    lines = [line for text in TEXTS for block in find_blocks(text, "bash") for line in block.splitlines()]
    commands = [line.partition("  #")[0].split()[1:] for line in lines if line.startswith("python recipes/")]
    assert commands
    called += [([ROOT / path], words) for path, *words in commands]
    for files, words in called:
        script = "".join(path.read_text(encoding="utf-8") for path in files)
        for option in (word for word in words if word.startswith("--")):
            assert f'add_argument("{option}"' in script


def test_the_python_names_in_sentences_exist():
    apart = [ROOT / "recipes" / "data" / "README.md", *NOTEBOOK]  # names of metadata, and of earlier versions
    texts = [README, *(text for path, text in PAGES.items() if path not in apart)]
    spans = {span for text in texts for span in find_spans(text) if re.match(r"(from |import )?bertkit\.", span)}
    names = {re.search(r"bertkit\.([\w.]+)", span)[1] for span in spans if ast.parse(span.replace("…", "..."))}
    assert names > {"load", "train", "analysis.explanation.explain"}
    for name in names:
        pkgutil.resolve_name(f"bertkit.{name}")


# --- The pages --------------------------------------------------------------------------------------------------------


def split_sections(text):
    """Return heading -> the text below it."""
    parts = re.split(r"^##? (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


INDEX = ROOT / "recipes" / "README.md"
SECTIONS = split_sections(PAGES[INDEX])
for path, text in PAGES.items():
    if path.parent != INDEX.parent and path.parent.name != "notebook":  # a task's page: its title -> the whole page
        SECTIONS[text.partition("\n")[0].removeprefix("# ")] = text


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert docs.write_tables(text) == text, "run make docs"


def test_a_stale_table_is_noticed():
    text = PAGES[ROOT / "recipes" / "glue" / "README.md"]
    assert len(docs.TABLE.findall("\n".join(PAGES.values()))) == 20
    for stale in (text.replace("`2e-5` | the", "`3e-5` | the"), text.replace("| `rte` |", "| `rté` |")):
        assert stale != text
        assert docs.write_tables(stale) == text


def test_the_page_of_glue_has_the_grid():
    grid = re.search(r"`--grid` tries (.*?);", SECTIONS["GLUE"], re.DOTALL).group(1)
    numbers = [float(text) for text in re.findall(r"(?<![.(A\d])\d+(?:e-\d)?(?![.\d])", grid)]
    assert numbers == [value for values in GRID.values() for value in values]


def list_messages():
    """Yield every text in the code, with an ellipsis for each inserted value."""
    for path in (ROOT / "bertkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_on_the_pages_are_in_the_code():
    items = re.findall(r"^- `([^`]+)`(?:, or `([^`]+)`)?", "\n".join(SECTIONS.values()), re.MULTILINE)
    quoted = [" ".join(message.split()) for item in items for message in item if message]
    assert len(quoted) >= 30
    messages = list(list_messages())
    assert [message for message in quoted if not any(message in known for known in messages)] == []


def test_the_samples_on_the_pages_are_what_is_read(tmp_path):
    def write(page, kind, name):
        (block,) = find_blocks(SECTIONS[page], kind)
        (tmp_path / name).write_text(block, encoding="utf-8")
        return tmp_path / name

    documents = list(read_documents([str(write("Pretraining", "text", "corpus.txt"))]))
    assert [len(document) for document in documents] == [3, 1]
    rte = get_glue_task("rte").row
    table = read_split(rte, "train", write("GLUE", "tsv", "train.tsv"))
    assert read_labels(rte, table).tolist() == [1, 0]
    questions = read_squad(write("SQuAD 1.1 and 2.0", "json", "train-v2.0.json"), 2)
    assert [question.answers for question in questions] == [("Ada",), ()]
    assert all(map(is_placed, questions))
    own = read_own_squad(str(write("SQuAD 1.1 and 2.0", "jsonl", "questions.jsonl")), 1)["train"].questions
    assert [(question.answers, is_placed(question)) for question in own] == [(("Ada",), True)]
    assert [one.answer for one in read_swag(write("SWAG", "csv", "train.csv"))] == [0, 1]
    text = read_conll(write("Named entities", "conll", "eng.train"))
    assert (text.documents, text.scheme) == (1, "IOB2")
    assert text.sentences[0].tags == ["B-PER", "O", "O", "B-LOC"]
    reviews = read_columns(write("Your own texts", "csv", "reviews.csv"))
    assert reviews.find("title").to_pylist()[-1] == "NA"
    space = make_label_space(reviews, ["stars"], "auto")
    assert (space.kind, space.names) == ("single_label_classification", ("1", "4", "5"))
    block, own = find_blocks(SECTIONS["Studies"], "toml")
    cells = list_cells(make_study(tomllib.loads(block), {"checkpoint": str(write_checkpoint(tmp_path / "bert"))}))
    assert (len(cells), sum(len(cell.runs) for cell in cells)) == (8, 24)
    own = re.sub(r'checkpoint = "[^"]+"', f'checkpoint = "{tmp_path / "bert"}"', own)
    cells = list_cells(make_study(tomllib.loads(own), {}, {"data": {"dir": "reviews.csv"}}))
    assert (len(cells), sum(len(cell.runs) for cell in cells)) == (2, 6)


def name_anchor(heading):
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def find_links(text):
    """Return the link targets of a page, except web pages and mail."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match("[a-z]+:", target)]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in find_links(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        path = page.parent / (name or page.name)
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(name_anchor, headings), target


# --- The rest ---------------------------------------------------------------------------------------------------------


def test_the_make_targets_that_are_named_exist():
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    blocks = [block for text in (README, *PAGES.values()) for block in find_blocks(text, "bash")]
    spans = [span for text in TEXTS for span in find_spans(text)]
    named = set(re.findall(r"^make ([a-z-]+)", "\n".join([*blocks, *spans]), re.MULTILINE))
    named |= set(re.findall(r"^# Command +make ([a-z-]+)", "\n".join(TEXTS), re.MULTILINE))
    assert {"demo", "test"} <= named
    for target in named:
        assert f"make {target} " in targets or f"make {target}\n" in targets, target


def test_the_folders_are_all_named():
    table = split_sections(PAGES[ROOT / "recipes" / "development.md"])["Folders"]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(.*?)`", "".join(first))
    packages = {f"bertkit/{path.parent.name}/" for path in (ROOT / "bertkit").glob("*/__init__.py")}
    assert sorted(named) == sorted({*packages, "recipes/", "tests/"})


def test_the_first_pages_are_short():
    assert len(README.splitlines()) <= 160
    assert len(PAGES[ROOT / "recipes" / "README.md"].splitlines()) <= 95


def test_a_page_is_read_in_one_sitting():
    """Pages of figures may be longer: the results, the defaults as measured, and the notebook."""
    texts = {path: text for path, text in PAGES.items() if path.name not in ("RESULTS.md", "defaults.md")}
    lengths = {path: len(text.splitlines()) for path, text in texts.items() if path.parent.name != "notebook"}
    assert len(lengths) >= 25
    assert {path.name: length for path, length in lengths.items() if length > 180} == {}


def test_transformers_lacks_what_the_readme_says():
    assert "question-answering" not in transformers.pipelines.SUPPORTED_TASKS
    assert not hasattr(transformers, "TextDatasetForNextSentencePrediction")
    assert not hasattr(modeling_bert, "load_tf_weights_in_bert")


ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # a model on the Hub
EXAMPLES = [block for text in (README, *PAGES.values()) for block in find_blocks(text, "python")]


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    """Run the example with a word in an empty directory, and return the numbers that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(word):
        capsys.readouterr()  # what writing a model prints
        block = next(block for block in EXAMPLES if word in block)
        exec(compile(block.replace(ENCODER, str(tmp_path / "bert")), "README.md", "exec"), {})
        return [float(number) for number in re.findall(r"-?\d+\.?\d*", capsys.readouterr().out)]

    return run


def test_the_example_with_an_interval_runs(run_example):
    assert len(EXAMPLES) == 10, "the other tests run nine"
    low, high = (number for number in run_example("estimate_interval") if number % 1)
    assert 0 < low < 0.75 < high < 1


def test_the_examples_with_tables_run(run_example, tmp_path):
    run_example("answers.csv")
    rows = read_table(tmp_path / "answers.csv")
    assert rows.column("prediction").to_pylist() == ["5", "2"]
    folder = tmp_path / "runs" / "stars" / "predictions"
    folder.mkdir(parents=True)
    pq.write_table(rows.append_column("tokens", pa.array([2, 3])), folder / "dev.parquet")
    assert run_example("read_parquet")


def test_the_example_that_teaches_names_runs(run_example, tmp_path):
    labels = {"id2label": dict(enumerate(("O", "B-PER", "I-PER", "B-LOC")))}
    write_head(tmp_path / "runs" / "large", "BertForTokenClassification", **labels)
    write_checkpoint(tmp_path / "runs" / "small")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(FILLERS, 6)) for _ in range(60)]
    pd.DataFrame({"text": texts}).to_csv(tmp_path / "letters.csv", index=False)
    run_example("runs/taught")
    taught = bertkit.load(tmp_path / "runs" / "taught")
    rows = taught.predictions("dev").to_pandas()
    names = bertkit.load(tmp_path / "runs" / "large").predict(rows["text"].tolist())
    found = [[name["type"] for name in result["entities"]] for result in names]
    assert sum(map(len, found)) > 0
    assert [[cell.rpartition(": ")[2] for cell in row] for row in rows["label_spans"]] == found


def test_the_example_that_puts_names_back_runs(run_example, tmp_path):
    text = "Call 1815 or 1852, 1815 is Ada."
    spans = [(5, 9), (13, 17), (19, 23)]
    names = [{"text": text[start:end], "type": "TEL", "start": start, "end": end} for start, end in spans]
    found = redact(text, names, "numbered")
    assert found["redacted"] == "Call [TEL-1] or [TEL-2], [TEL-1] is Ada."
    (tmp_path / "redacted.jsonl").write_text(f"{json.dumps(found)}\n")
    assert run_example("placeholder") == [1815, 1852, 1815]


def test_the_example_that_divides_reviews_runs(run_example, tmp_path):
    """No row is lost, and the text for pretraining has only the rows of train, each a document."""
    rows = pd.DataFrame({"text": [f"第{n}条评论。" for n in range(4010)], "label": ["good", "bad"] * 2005})
    rows.to_csv(tmp_path / "clean.csv", index=False)
    run_example("clean.csv")
    parts = {name: pd.read_csv(tmp_path / "reviews" / f"{name}.csv") for name in ("train", "dev", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 10, "dev": 1000, "test": 3000}
    assert set(pd.concat(parts.values())["text"]) == set(rows["text"])
    documents = read_documents([str(tmp_path / "reviews.txt")])
    assert [document for (document,) in documents] == parts["train"]["text"].tolist()


def test_the_examples_with_features_run(run_example, tmp_path):
    texts = ["我爱吃苹果", "我爱苹果手机"]
    checkpoint = str(write_checkpoint(tmp_path / "bert", characters="".join(texts), initializer_range=0.1))
    (tmp_path / "words.txt").write_text("\n".join(texts), encoding="utf-8")
    (tmp_path / "texts.txt").write_text("good apple word1\nbad word2 apple\n")
    extract(checkpoint, tmp_path / "words.txt", "last", tmp_path / "words.npz")
    extract(checkpoint, tmp_path / "texts.txt", "last", tmp_path / "vectors.npz")
    same, other, again, _ = run_example("apple")
    assert same == 1
    assert other == again < 1
    (found,) = run_example("苹")
    assert -1 < found < 0.99


@pytest.mark.parametrize("word", ["bertkit.train", "cross_val_score"])
def test_an_example_that_trains_runs(word, run_example, tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "bert", initializer_range=0.1)
    monkeypatch.setitem(TASKS["classify"].recipe, "checkpoint", str(checkpoint))
    write_reviews(tmp_path / "reviews.csv", 60)
    rows = pd.read_csv(tmp_path / "reviews.csv").rename(columns={"body": "text", "stars": "topic"})
    for split in ("train", "dev"):
        (tmp_path / "demo" / "topics").mkdir(parents=True, exist_ok=True)
        rows[["text", "topic"]].to_csv(tmp_path / "demo" / "topics" / f"{split}.csv", index=False)
    assert run_example(word)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Return the checkpoint of recipes that begin with one; the Hub is not asked."""
    folder = tmp_path_factory.mktemp("bert")
    return str(write_checkpoint(folder, num_hidden_layers=4, max_position_embeddings=512))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_a_recipe_runs_dry(path, bert, tmp_path):
    recipe = read_recipe(path)
    given = {"checkpoint": bert} if recipe.get("checkpoint") else {}
    made = Recipe.make(TASKS[recipe["task"]], recipe, given)
    plan = dry_run(made, output=tmp_path / "run")
    assert plan.get("updates", 1) > 0  # the number of updates per epoch depends on the data
    assert plan["per_device_batch"] * plan["accumulation"] == plan["sequences_per_update"] == made.batch_size
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
        ("table2", 14, 22),
        ("table3", 2, 3),
        ("table4", 2, 6),
        ("table5", 20, 100),
        ("table6", 24, 96),
        ("table7", 16, 40),
        ("table8", 18, 90),
        ("figure5", 16, 80),
        ("small/table1", 24, 72),
        ("small/table2", 4, 8),
        ("small/table3", 2, 2),
        ("small/table4", 1, 3),
        ("small/table5", 20, 60),
        ("small/table6", 24, 60),
        ("small/table7", 14, 21),
        ("small/table8", 18, 54),
        ("small/figure5", 16, 48),
    ],
)
def test_a_study_has_the_runs_it_should_have(name, cells, runs, bert):
    definition = read_recipe(ROOT / "recipes" / "studies" / f"{name}.toml")
    found = list_cells(make_study(definition, {} if "pretrain" in definition else {"checkpoint": bert}))
    assert len(found) == cells
    assert len({directory for cell in found for directory in cell.runs.values()}) == runs


def test_recipes_are_counted_and_listed():
    assert len(RECIPES) == 20
    assert len(STUDIES) == 22
    linked = {(path.parent / target).resolve() for path, text in PAGES.items() for target in find_links(text)}
    assert {path for path in linked if path.suffix == ".toml"} == {*RECIPES, *STUDIES}
