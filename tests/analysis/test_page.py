"""The page of runs and studies: what is on it, what it escapes, that it loads nothing, and how a browser shows it."""

import itertools
import json
import re
import shlex
import shutil
from base64 import b64decode

import numpy as np
import pytest

from bertkit.analysis import report as page
from bertkit.analysis.report import thin, write_page
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.metrics.ner import score_types
from bertkit.metrics.table import read_facts
from bertkit.reports import html
from bertkit.reports.html import style_columns
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import make_table, split_number
from bertkit.studies.cells import name_folder
from bertkit.studies.tables import describe_size, explain_scores
from bertkit.tasks import TASKS
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.kinds import SINGLE_LABEL, Gold
from bertkit.training.predictions import join_rows, list_mistakes, pack_table, read_table
from bertkit.training.recipe import Recipe, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import read_log
from bertkit.training.study_results import StudyResults
from tests.browser import PROBLEMS
from tests.corpora import write_text
from tests.official import write_checkpoint, write_conll, write_glue, write_squad
from tests.world import (
    COLUMNS,
    PAPER,
    SMALL,
    WIDE,
    Reader,
    find_part,
    make_ablation,
    make_recipe,
    make_results,
    read_tables,
    score_by_hand,
)

HOSTILE = "<script>alert('1')</script> \"onload=\"x ]]> {{ 7*7 }} $\\frac"
FINE_TUNED = {
    "mrpc": {"max_length": 24},
    "stsb": {"max_length": 24},
    "squad2": {"max_length": 24, "max_query_length": 6, "doc_stride": 8},
    "ner": {"max_length": 60},
}


def read_page(path):
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Finished runs of a small model on small data, a pretraining, and a study."""
    root = tmp_path_factory.mktemp("page")
    start = write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    write_glue(root / "glue")
    write_squad(root / "squad")
    write_conll(root / "ner")
    train = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 2e-2}
    recipe = {"checkpoint": str(start), "precision": "fp32", "batch_size": 8, "train": train}
    for name, options in FINE_TUNED.items():
        data = {"dir": str(root / name_folder(TASKS[name])), **options}
        run(Recipe.make(TASKS[name], recipe | {"data": data}), output=root / "runs" / name)
    again = read_recipe(root / "runs" / "mrpc" / "recipe.toml")
    run(Recipe.make(TASKS["mrpc"], again, {"train": {"seed": 43}}), output=root / "runs" / "mrpc-43")
    run(Recipe.make(TASKS["pretrain"], make_recipe(write_text(root / "corpus.txt"))), output=root / "runs" / "pretrain")
    write_study(root / "runs" / "grid", root / "runs" / "mrpc")
    return root / "runs"


def write_study(folder, run):
    """Write a study of a grid with a failure; of its runs only a chosen one exists, a copy of `run`."""
    grid = {"train.learning_rate": [2e-5, 5e-5], "batch_size": [16, 32]}
    study = make_results(grid, COLUMNS, score_by_hand, ("small",), paper=PAPER, majority=0.55)
    study.definition["note"] = "A small grid."
    for done in (run for cell in study.cells for run in cell.runs if run.status == "finished"):
        done.metrics["accuracy"] = done.metrics["score"]
    folder.mkdir(parents=True)
    study.write(folder)
    save_recipe(study.definition, folder / "study.toml")
    shutil.copytree(run, folder / study.chosen[0].run)


@pytest.fixture(scope="module")
def whole(root):
    """Return the page of all of them."""
    path = root.parent / "report.html"
    lines = []
    write_page([root / name for name in (*FINE_TUNED, "mrpc-43", "pretrain", "grid")], path, lines.append)
    assert lines == [f"7 runs and 1 study in {path}"], "nothing is left out"
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Skip the pictures of pages, which are slow to draw."""
    monkeypatch.setattr(html, "draw", lambda *_: None)


# --- Content ----------------------------------------------------------------------------------------------------------


def test_every_run_says_what_it_is_and_how_to_repeat_it(root, whole, call):
    for name in (*FINE_TUNED, "pretrain"):
        found, recipe = Reader(find_part(whole, str(root / name))), read_recipe(root / name / "recipe.toml")
        facts = dict(zip(found.find("dt"), found.find("dd"), strict=True))
        environment = json.loads((root / name / "environment.json").read_text())
        assert facts["Task"] == recipe["task"]
        assert facts["Data"] == (recipe["data"].get("dir") or recipe["data"]["corpus"][0])
        assert facts["Date"] == environment["date"][:10]
        assert f"torch {environment['packages']['torch']}" in facts["Environment"]
        assert f"updates of {recipe['batch_size']} sequences" in facts["Training"]
        sizes = "1 layer, 16 hidden units" if name in FINE_TUNED else "new; 2 layers, 32 hidden units"
        assert sizes in facts["Model"]
        code = {values["id"].partition("-")[2][2:]: text for tag, values, text in found.texts if tag == "code"}
        assert code["recipe"] == (root / name / "recipe.toml").read_text(encoding="utf-8")
        status, printed, _ = call(*shlex.split(code["command"])[1:], "--dry-run")
        assert status == 0
        assert f"output: {root / name}-again" in printed


def test_the_time_of_a_run_that_was_resumed_is_not_taken_for_all_of_it():
    recipe = {"batch_size": 8, "train": {"learning_rate": 1e-4, "seed": 3}}
    log = [{"step": 40, "loss": 1.0}, {"step": 1500, "train_runtime": 16.2}]
    whole = "1,500 updates of 8 sequences, learning rate 0.0001, seed 3, 16 s"
    assert page.describe_training(recipe, log) == whole
    log[1]["resumed_at"] = 613
    assert page.describe_training(recipe, log) == f"{whole} since it was resumed after update 613"


def test_scores_stand_beside_the_paper_s_and_those_of_other_seeds(root, whole):
    ours, other = (json.loads((root / name / "metrics.json").read_text()) for name in ("mrpc", "mrpc-43"))
    heads, f1, accuracy, *_ = read_tables(find_part(whole, str(root / "mrpc")))["Scores on held-out data"]
    interval = "95 % interval over examples"
    assert heads == ["held out", "baseline", "ours", interval, "mean ± sd over 2 seeds", "the paper"]
    mean, spread = (100 * found([ours["f1"], other["f1"]]) for found in (np.mean, lambda x: np.std(x, ddof=1)))
    names = {"majority": "the majority class", "tfidf": "TF-IDF", "frozen": "frozen vectors"}
    baselines = " ".join(f"{100 * ours[f'{key}_f1']:.1f} {name}" for key, name in names.items())
    paper = "88.9 BERT-base, test 89.3 BERT-large, test"
    scores = [f"{100 * ours['f1']:.1f}", "", f"{mean:.1f} ± {spread:.1f} (2)", paper]  # every sample has the F1 of 0
    assert f1 == ["F1 (%)", baselines, *scores]
    assert accuracy[3] == f"{100 * ours['accuracy_low']:.1f} to {100 * ours['accuracy_high']:.1f}"
    metrics = json.loads((root / "pretrain" / "metrics.json").read_text())
    table = read_tables(find_part(whole, str(root / "pretrain")))["Scores on held-out data"]
    assert table[0] == ["held out", "baseline", "before training", "ours"]
    assert table[-1] == ["perplexity", "", f"{metrics['start_perplexity']:.3f}", f"{metrics['perplexity']:.3f}"]


def test_curves_are_drawn_of_the_loss_and_of_every_logged_score(root, whole):
    labels = Reader(find_part(whole, str(root / "mrpc"))).take("alt")
    log = [entry for entry in read_log(root / "mrpc") if "loss" in entry]
    first, last = f"{log[0]['loss']:.3f} at update 1", f"{log[-1]['loss']:.3f} at 4"
    assert f"loss during training: {first}, {last}" in labels
    assert any(label.startswith("F1 during training: ") and "at update 2" in label for label in labels)
    part = Reader(find_part(whole, str(root / "pretrain")))
    drawn = [label.partition(" during")[0] for label in part.take("alt") if "during" in label]
    of_pairs = [f"next-sentence {name}" for name in ("loss", "accuracy")]
    assert drawn == ["loss", "perplexity", "masked-LM loss", "masked-LM accuracy", *of_pairs]
    picture = b64decode(part.take("src")[2].partition(",")[2]).decode()
    assert all(word in picture for word in ("masked-LM loss", "training", "held out", "ln V", "update"))


def test_mistakes_are_in_a_table(root, whole):
    for name in FINE_TUNED:
        table = read_table(root / name / "predictions" / "dev.parquet")
        heads, *lines = read_tables(find_part(whole, str(root / name)))["Mistakes, dev, worst first"]
        assert heads == ["row", "predicted", "true", *read_facts(table)["texts"]]
        assert [int(line[0]) for line in lines] == [table["row"][n].as_py() for n in list_mistakes(table)[:10].tolist()]


@pytest.mark.parametrize(
    ("text", "other", "separator", "most", "marked"),
    [
        ("the city of Warsaw", "Warsaw.", r"\W+", 1.0, ["the", "city", "of"]),
        ("Warsaw.", "the city of warsaw", r"\W+", 1.0, []),
        ("1810", "nothing", r"\W+", 1.0, ["1810"]),
        ("Ann Lee: PER, Rome: LOC", "Ann: PER, Rome: LOC", ", ", 1.0, ["Ann Lee: PER"]),
        ("dear | slow", "slow", r" \| ", 1.0, ["dear"]),
        ("A man sleeps", "a man eats", r"\W+", 0.5, ["sleeps"]),
        ("He sleeps now", "a man eats now", r"\W+", 0.5, []),
        ("iPhone在北京。", "北京的iPhone", page.WORD_BORDER, 1.0, ["在"]),
        ("很好", "好", page.WORD_BORDER, 0.5, ["很"]),
        ("ที่ดี", "ที่ดู", page.WORD_BORDER, 1.0, ["ดี"]),
    ],
)
def test_the_words_that_another_text_lacks_are_marked(text, other, separator, most, marked):
    cell = page.mark_words(text, other, separator, most)
    assert [part for part, is_marked in cell.parts if is_marked] == marked
    assert "".join(part for part, _ in cell.parts) in ("", text)
    assert cell.lines == ((text, ""),)


def test_an_excerpt_has_the_answer_in_it():
    text = "".join(f"word{number} " for number in range(200)).strip()
    assert page.take_excerpt("short") == "short"
    assert page.take_excerpt(text).endswith(" word34…"), "of 240 characters"
    assert page.take_excerpt(text, "absent") == page.take_excerpt(text)
    found = page.take_excerpt(text, "word100")
    assert found.startswith("…")
    assert found.endswith("…")
    assert " word100 " in found
    assert page.take_excerpt("字" * 300) == "字" * 239 + "…"


def test_mistakes_have_marked_words_where_answers_have_words(root, whole):
    """MRPC's answers are single classes; its random texts are little alike."""
    for name in ("squad2", "ner"):
        table = find_part(whole, str(root / name)).partition("Mistakes, dev")[2].partition("</table>")[0]
        assert "<mark>" in table
        assert "</mark>" not in table.rpartition("</td>")[0].split("<td")[-1], "the context has no mark"
    rows = read_table(root / "mrpc" / "predictions" / "dev.parquet")
    alike = rows.set_column(rows.column_names.index("sentence1"), "sentence1", [["All of it is so"] * len(rows)])
    alike = alike.set_column(rows.column_names.index("sentence2"), "sentence2", [["It is all so easy"] * len(rows)])
    _, *cells = page.tabulate_mistakes(alike, "dev")[0].rows[0]
    assert [[part for part, is_marked in cell.parts if is_marked] for cell in cells] == [[], [], ["of"], ["easy"]]


def test_types_of_entities_have_scores_of_their_own(root, whole):
    scores = score_types(read_table(root / "ner" / "predictions" / "dev.parquet"))
    _, *lines = read_tables(find_part(whole, str(root / "ner")))["Scores by type, dev (%)"]
    assert {line[0]: line[3] for line in lines} == {kind: f"{100 * found['f1']:.1f}" for kind, found in scores.items()}


def test_a_study_has_its_tables_heat_maps_failures_and_links(root, whole):
    study = StudyResults.read(root / "grid")
    part = find_part(whole, str(root / "grid"))
    found, tables = Reader(part), read_tables(part)
    words = " ".join(found.find("p"))
    for text in (describe_size(study).replace(" x ", " × "), explain_scores(study), "A small grid."):
        assert text in words
    assert tables["Scores"][2] == ["small, best run", "60.0 best of 6", "50.0 best of 6"]
    assert tables["rte, small"] == [
        ["learning_rate →", "2e-05", "5e-05"],
        ["batch_size 16", "51.0 ± 1.4 (2) †", "60.0 (1) 1 failed"],
        ["batch_size 32", "51.0 ± 1.4 (2) †", "60.0 (1) 1 failed"],
    ]
    shares = re.findall(r'<td class="worded( chosen)?" style="--share: ([\d.]+)"', part)
    assert shares[:4] == [("", "0.000"), (" chosen", "1.000"), ("", "0.000"), ("", "1.000")]
    assert len(tables["All runs"]) == 17
    assert [line[-2:] for line in tables["All runs"][1:3]] == [["finished", "50.0"], ["finished", "52.0"]]
    runs = [run for cell in study.cells for run in cell.runs]
    assert found.find("dt") == [*study.columns, *(run.directory for run in runs if run.status == "failed")]
    columns = ["accuracy in percent; rte, dev", "Matthews correlation in percent; cola, dev"]
    assert found.find("dd") == [*columns, *["the loss is nan | lower it"] * 4]
    target = Reader(find_part(whole, str(root / "grid" / study.chosen[0].run))).elements[0][1]["id"]
    links = [values["href"] for tag, values in found.elements if tag == "a"]
    assert links == [f"#{target}"] * 3, "from the table, from the heat map, and from the list of runs"
    (source,) = [text for tag, values, text in found.texts if tag == "code" and values["id"].endswith("recipe")]
    assert source == (root / "grid" / "study.toml").read_text(encoding="utf-8")


def test_an_unfinished_study_of_pretrainings_has_their_scores_and_curves(tmp_path):
    study = make_ablation()
    study.over, study.finished = 8, False
    for step, row in zip((10, 20), study.rows.values(), strict=True):
        row.step = step
    study.write(tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found, tables = Reader(text), read_tables(text)
    assert tables["Scores"][1] == ["BERT", "50.0 ± 1.4 (2) †", "65.0 ± 7.1 (2)", "12.346 (1)", "57.5"]
    assert tables["Pretraining, on held-out text"][1] == ["pretrain/bert", "BERT", "6,000", "12.346", "25.0"]
    assert "MNLI-m over pretraining updates" in found.take("alt")
    assert "(unfinished, 8 of 10 runs so far)" in found.find("h2")[0]
    assert any("accuracy in percent; mnli, dev; " in text for text in found.find("dd"))


def test_a_run_in_work_or_of_before_is_shown_with_what_there_is(root, tmp_path):
    shutil.copytree(root / "mrpc", tmp_path / "run")
    for name in ("config.json", "environment.json", "doctor.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "run" / "predictions")
    said = []
    write_page([tmp_path / "run"], tmp_path / "page.html", said.append)
    assert "has no prediction tables, as in earlier versions; bertkit evaluate" in said[0]
    assert read_page(tmp_path / "page.html").find("h3") == ["Next steps", "Training"]
    assert read_page(tmp_path / "page.html").find("summary") == [
        "3 more curves",
        "All scores",
        "Recipe and environment",
    ]
    (tmp_path / "run" / "metrics.json").unlink()
    write_page([tmp_path / "run"], tmp_path / "page.html")
    found = read_page(tmp_path / "page.html")
    assert found.find("h2") == [f"{tmp_path / 'run'} (unfinished, 4 updates so far)"]
    assert found.find("h3") == ["Training"]
    latest = [entry for entry in read_log(root / "mrpc") if "eval_f1" in entry][-1]
    table = read_tables((tmp_path / "page.html").read_text(encoding="utf-8"))["Scores on held-out data"]
    assert (table[0][1], table[1][1]) == ("at update 4", f"{100 * latest['eval_f1']:.1f}")
    assert not found.find("nav"), "one part needs no contents"


def test_a_damaged_file_or_another_source_is_one_line_and_no_page(root, tmp_path, undrawn, refused):
    shutil.copytree(root / "mrpc", tmp_path / "run")
    for name in ("metrics.json", "environment.json", "predictions/dev.parquet"):
        whole = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_text("{\n")
        with pytest.raises(UsageError, match=str(tmp_path / "run")):
            write_page([tmp_path / "run"], tmp_path / "page.html")
        (tmp_path / "run" / name).write_bytes(whole)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("{")
    (tmp_path / "none" / "empty").mkdir(parents=True)
    for source, output in (("study", "page.html"), ("none", "page.html"), ("run", "")):
        with refused():
            write_page([tmp_path / source], tmp_path / output)
    assert not (tmp_path / "page.html").exists()


def test_a_folder_of_runs_and_studies_stands_for_them(root, call, tmp_path, undrawn):
    for name in ("more/b", "a", "a/first"):
        shutil.copytree(root / "mrpc", tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    (tmp_path / "runs" / "more" / "again").symlink_to(tmp_path / "runs")
    assert call("report", "runs", "--output", "page.html") == (0, "2 runs in page.html\n", "")
    assert "runs/more/b" in (tmp_path / "page.html").read_text()


def test_the_command_writes_the_page_and_says_where(root, call, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(root / "mrpc")
    page = tmp_path / "new" / "page.html"
    assert call("report", ".", ".", "--output", page) == (0, f"1 run in {page}\n", "")
    assert read_page(page).find("h1") == [str(root / "mrpc")]


# --- Escaped text -----------------------------------------------------------------------------------------------------


def test_hostile_words_stay_words(root, tmp_path, whole):
    folder = tmp_path / HOSTILE.replace("/", "∕")
    shutil.copytree(root / "mrpc", folder)
    save_recipe(read_recipe(folder / "recipe.toml") | {"checkpoint": HOSTILE}, folder / "recipe.toml")
    names = [f"{HOSTILE} {number}" for number in range(3)]
    rows = SINGLE_LABEL.decode(np.eye(3)[[0, 1, 1]], names, Gold(np.array([0, 1, 2]))).rows
    texts = ExampleRows({HOSTILE: [HOSTILE] * 3}, names, rows["label"].to_pylist(), (), (1, 2, 3))
    table = join_rows(rows, texts, load_tokenizer(str(folder)))
    (folder / "predictions" / "dev.parquet").write_bytes(pack_table(table))
    environment = json.loads((folder / "environment.json").read_text()) | {"processor": HOSTILE, "python": HOSTILE}
    (folder / "environment.json").write_text(json.dumps(environment))
    grid, names = {HOSTILE: [HOSTILE, "b"]}, {HOSTILE: HOSTILE}
    study = make_results(grid, names, lambda *cell: None if cell[-1] == 43 else 0.5, (HOSTILE,))
    study.definition["note"] = HOSTILE
    study.cells[0].runs[1].failure = HOSTILE
    (tmp_path / "study").mkdir()
    study.write(tmp_path / "study")
    write_page([folder, tmp_path / "study"], tmp_path / "page.html")
    found, usual = read_page(tmp_path / "page.html"), read_page(whole)
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in usual.elements}
    assert {name for _, values in found.elements for name in values} <= {
        name for _, values in usual.elements for name in values
    }
    assert [tag for tag, _ in found.elements].count("script") == 1
    plain = " ".join(HOSTILE.split())
    for tag, times in {"th": 8, "td": 2, "p": 1, "dd": 2, "code": 0}.items():
        assert sum(plain in text for text in found.find(tag)) >= times, tag
    assert found.find("dd").count(plain) == 1, "the failure"
    assert "49" not in " ".join(found.find("p"))


def test_nothing_is_loaded_and_every_name_is_there_once(whole):
    text, found = whole.read_text(encoding="utf-8"), read_page(whole)
    ids = found.take("id")
    assert len(set(ids)) == len(ids)
    addresses = found.take("href")
    assert addresses.count("data:,") == 1, "the icon"
    assert {address.removeprefix("#") for address in addresses if address != "data:,"} <= set(ids)
    assert {address.partition(",")[0] for address in found.take("src")} == {"data:image/svg+xml;base64"}
    for loading in ("http:", "https:", "@import", "url(", "srcset"):
        assert loading not in text
    pictures = "".join(b64decode(address.partition(",")[2]).decode() for address in found.take("src"))
    colours = set(re.findall(r"(?:fill|stroke): ?(#\w+)", pictures))
    assert colours <= {*html.SERIES, html.GREY, "#808080"}, "for light and dark pages"
    assert {tag for tag, _ in found.elements} & {"iframe", "object", "embed", "base", "form"} == set()
    (policy,) = [values["content"] for _, values in found.elements if "http-equiv" in values]
    assert policy.startswith("default-src 'none'")
    assert not any(name.startswith("on") for _, values in found.elements for name in values)


def test_the_page_can_be_read_without_eyes(whole):
    found = read_page(whole)
    (html,) = [values for tag, values in found.elements if tag == "html"]
    assert html["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(values["alt"] for tag, values in found.elements if tag == "img")
    assert all(values["scope"] in ("col", "row") for tag, values in found.elements if tag == "th")
    assert len(found.find("caption")) == len(found.find("table")) == len(found.find("div", role="region"))
    assert all(found.find("caption"))
    assert set(found.take("aria-labelledby")) <= set(found.take("id"))
    assert "viewport" in [values.get("name") for tag, values in found.elements if tag == "meta"]


def measure_luminance(colour):
    """Return WCAG 2's relative luminance of #rrggbb."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_every_colour_stands_out(whole, theme):
    """Check contrast: 4.5 : 1 for text (WCAG 2, AA), also on the darkest cell, and 3 : 1 for lines of a plot."""
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", whole.read_text(encoding="utf-8").split("@media")[theme]))

    def compare(one, other):
        lighter, darker = sorted((measure_luminance(one), measure_luminance(other)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for name in ("ink", "muted", "accent", "warning"):
        assert compare(colours[name], colours["paper"]) >= 4.5, name
        assert compare(colours[name], colours["faint"]) >= 4.5, name
    for colour in (*html.SERIES, html.GREY):
        assert compare(colour, colours["paper"]) >= 3, colour
    parts = [[int(colours[name][place : place + 2], 16) for place in (1, 3, 5)] for name in ("accent", "paper")]
    darkest = "#" + "".join(f"{round(0.45 * a + 0.55 * b):02x}" for a, b in zip(*parts, strict=True))
    assert compare(colours["ink"], darkest) >= 4.5


def test_any_letter_can_stand_in_a_picture(recwarn):
    address = html.draw(Plot("\x01名 & <b>", "$x$", [Series("a", [(0, 1), (1, 2)], "C0-")]))
    svg = b64decode(address.partition(",")[2]).decode()
    assert ">名 &amp; &lt;b&gt;</text>" in svg
    assert ">$x$</text>" in svg
    assert not recwarn.list


# --- Small parts ------------------------------------------------------------------------------------------------------


def test_columns_of_numbers_stand_to_the_right():
    table = make_table("a", ["", "n", "lr", "words", "mean", "few", "from"], [
        ["1", "-1.5", "5e-05", "1 two", "84.2 ± 0.3 (5) †", "failed", "-1.5 to -0.5"],
        ["2", "–", "0.001", "a", "9.0 (1)", "failed", "0.1 to 0.2"],
        ["3", "2/3", "1,234", "b", "–", "1", ""],
    ])  # fmt: skip
    assert [column["style"] for column in style_columns(table)] == ["", "number", "number", "", "worded", "", "number"]
    assert split_number(*table.rows[0][4].lines[0]) == ("84.2", "± 0.3 (5) †")


def test_a_long_log_is_thinned_but_for_its_evaluations():
    log = [{"step": step, "loss": 1.0} for step in range(10_000)] + [{"step": 5, "eval_f1": 0.1}] * 700
    thinned = thin(log)
    assert sum("eval_f1" in entry for entry in thinned) == 700
    training = [entry["step"] for entry in thinned if "loss" in entry]
    assert 300 < len(training) <= page.POINTS + 1
    assert (training[0], training[-1]) == (0, 9999)
    assert thin([]) == []
    assert thin(log[:5]) == log[:5]


# --- In a browser -----------------------------------------------------------------------------------------------------

EMPTY = """[...document.querySelectorAll('section, h1, h2, h3, table, figure, img, pre, p, dd')].filter(e =>
  !e.closest('details:not([open])') && !(e.checkVisibility() && e.getBoundingClientRect().width > 20 &&
  e.getBoundingClientRect().height > 8)).map(e => e.outerHTML.slice(0, 80))"""


@pytest.mark.slow
def test_a_browser_shows_it_all_on_a_phone_and_a_desk_light_and_dark(browser, whole, root):
    colours = set()
    for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")):
        browser.open(whole, width, scheme)
        requests = [event["params"]["request"]["url"] for event in browser.events if "request" in event["params"]]
        assert {url for url in requests if not url.startswith("data:")} == {whole.as_uri()}
        assert [event for event in browser.events if event["method"] in PROBLEMS] == []
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        across, room = browser.ask(sizes)
        assert across <= room <= width, (width, scheme)
        assert browser.ask(WIDE) == []
        assert browser.ask(EMPTY) == []
        assert browser.ask(SMALL) == 0
        assert browser.ask("document.querySelectorAll('section').length") == 8
        assert browser.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
        colours.add((scheme, browser.ask("getComputedStyle(document.body).backgroundColor")))
    assert len(colours) == 2


# Tables that are wider than the page lets them be; a matrix may have a column for each label.
CUT = """[...document.querySelectorAll('.scroll:not(.matrix)')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => e.ariaLabel + ' ' + e.scrollWidth)"""
ANSWERS = """[...document.querySelectorAll('[aria-label^=Mistakes] tbody tr')].every(row => [1, 2].every(n =>
  row.cells[n].getBoundingClientRect().right <= document.documentElement.clientWidth))"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
def test_no_table_is_wider_than_the_page(browser, whole, width):
    browser.open(whole, width, "light")
    browser.ask("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert browser.ask(CUT) == []
    assert browser.ask(ANSWERS)


@pytest.mark.slow
@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_click_copies_the_recipe(browser, whole, root, has_clipboard):
    browser.open(whole, 1280, "light")
    browser.ask("addEventListener('copy', () => { window.copied = String(getSelection()); })")
    stub = "{ writeText: async text => { window.copied = text; } }" if has_clipboard else "undefined"
    browser.ask(f"Object.defineProperty(navigator, 'clipboard', {{ value: {stub} }})")
    button = "document.querySelector('#run-1 button[data-copy$=recipe]')"
    browser.ask(f"{button}.closest('details').open = true")
    assert browser.ask(f"{button}.checkVisibility() && {button}.textContent") == "Copy"
    assert (
        browser.ask(f"{button}.click(), new Promise(r => setTimeout(() => r({button}.textContent), 200))") == "Copied"
    )
    assert browser.ask("window.copied").strip() == (root / "mrpc" / "recipe.toml").read_text().strip()
    assert [event for event in browser.events if event["method"] in PROBLEMS] == []


def test_several_runs_of_a_task_begin_with_a_table_of_their_differences(root, whole):
    tables = read_tables(whole.read_text(encoding="utf-8"))
    heads, first, second = tables["Runs of mrpc"][:3]
    assert heads[:4] == ["run", "F1 (%)", "difference to the first", "95 % interval over examples"]
    scores = [json.loads((root / name / "metrics.json").read_text())["f1"] for name in ("mrpc", "mrpc-43")]
    assert [first[1], second[1]] == [f"{100 * score:.1f}" for score in scores]
    assert (first[2], second[2]) == ("", f"{100 * (scores[1] - scores[0]):+.1f}")
    differing = dict(zip(heads[4:], zip(first[4:], second[4:], strict=True), strict=True))
    assert differing["train.seed"] == ("42", "43")


def test_evaluations_on_other_data_are_listed_and_bars_are_in_order(root, tmp_path):
    shutil.copytree(root / "mrpc", tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    (tmp_path / "run" / "evaluations" / "new").mkdir(parents=True)
    (tmp_path / "run" / "evaluations" / "new" / "metrics.json").write_text(json.dumps(metrics | {"f1": 0.5}))
    write_page([tmp_path / "run"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert read_tables(text)["Scores on other data"][1][:2] == ["new", "50.0"]
    lengths = [float(length) for length in re.findall(r"--length: ([\d.]+)", text)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 4, "this run, a constant answer, TF-IDF and frozen vectors"
    assert read_page(tmp_path / "page.html").find("p")[1].startswith(f"F1 {100 * metrics['f1']:.1f} %")
