"""The scripts in recipes/, each run once on small files."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from bertkit.data.formats.squad import read_squad

RECIPES = Path(__file__).parents[1] / "recipes"


def run_script(name: str, *words: str | Path) -> str:
    """Return the lines that a script prints, whichever stream they go to."""
    command = [sys.executable, RECIPES / name, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def test_triviaqa_becomes_questions_with_places(tmp_path):
    """The last word of 400 is read and the next is not; answers are whole words, in any case and white space."""
    (tmp_path / "evidence" / "wikipedia").mkdir(parents=True)
    documents = {
        "Lewis.txt": "Sinclair Lewis\n\nHarry Sinclair\u00a0Lewis, not Lewiston, was NOVELIST.",
        "Prize.txt": "İ! The prize is given in Στοκχόλμης.",
        "Last.txt": " ".join(["word"] * 399 + ["Lewis", "more"]),
        "Late.txt": " ".join(["word"] * 400 + ["Lewis"]),
    }
    for name, text in documents.items():
        (tmp_path / "evidence" / "wikipedia" / name).write_text(text, encoding="utf-8")

    def ask(number, value, aliases, *files):
        pages = [{"DocSource": "TagMe", "Filename": name, "Title": name[:-4]} for name in files]
        answer = {"Value": value, "Aliases": aliases, "NormalizedValue": value.lower()}
        return {"QuestionId": f"tc_{number}", "Question": f"Who {number}?", "Answer": answer, "EntityPages": pages}

    entries = [
        ask(1, "sinclair lewis", ["Harry Sinclair", "lewis", "?!"], "Lewis.txt", "Lewis.txt", "Gone.txt"),
        ask(2, "ΣΤΟΚΧΌΛΜΗΣ", [], "Prize.txt", "Lewis.txt"),
        ask(3, "Lewis", [], "Last.txt", "Late.txt"),
    ]
    entries[2]["EntityPages"].append({"DocSource": "Search", "Title": "never fetched"})
    (tmp_path / "qa.json").write_text(json.dumps({"Data": entries, "Version": 1.0}), encoding="utf-8")
    given = (tmp_path / "qa.json", "--evidence", tmp_path / "evidence", "--output", tmp_path / "out.json")
    printed = run_script("squad/triviaqa.py", *given)
    assert printed.endswith(": 3 paragraphs, 1 documents missing, 2 documents without an answer\n")
    questions = read_squad(tmp_path / "out.json", version=1)
    assert [(question.id, question.answers, question.starts) for question in questions] == [
        ("tc_1--Lewis.txt", ("Sinclair Lewis", "Lewis", "Harry Sinclair"), (0, 9, 16)),
        ("tc_2--Prize.txt", ("Στοκχόλμης",), (25,)),
        ("tc_3--Last.txt", ("Lewis",), (399 * 5,)),
    ]
    assert [question.context for question in questions][:2] == [documents["Lewis.txt"], documents["Prize.txt"]]
    assert "has an answer (" in run_script("squad/triviaqa.py", given[0], "--evidence", tmp_path, *given[3:])


def test_finished_runs_make_a_submission(tmp_path):
    """The chosen runs of a study come first; a name without a run, and WNLI, is filled with the majority class."""
    answers = {
        "study/b/cola-2/predictions/CoLA.tsv": "index\tprediction\n0\t0\n",
        "study/a/wnli-1/predictions/WNLI.tsv": "index\tprediction\n0\t1\n",
        "mnli/predictions/AX.tsv": "index\tprediction\n0\tneutral\n1\tneutral\n",
        "ax/predictions/AX.tsv": "index\tprediction\n0\tentailment\n",
    }
    for name, text in answers.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    chosen = [{"run": "b/cola-2"}, {"run": "a/wnli-1"}]
    (tmp_path / "study" / "study.json").write_text(json.dumps({"chosen": chosen}))
    given = [tmp_path / name for name in ("glue.zip", "study", "mnli", "ax")]
    printed = run_script("glue/submission.py", *given).splitlines()
    assert printed[0].endswith("CoLA.tsv, 1 of 1,063 answers")
    assert printed[7].endswith("mnli/predictions/AX.tsv, 2 of 1,104 answers")
    assert printed[-1] == "WNLI.tsv: filled with 0"
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert len(files) == 11
    assert (files["CoLA.tsv"], files["AX.tsv"]) == tuple(list(answers.values())[::2])
    assert files["RTE.tsv"].splitlines() == ["index\tprediction", *(f"{index}\tentailment" for index in range(3000))]
    assert files["WNLI.tsv"].count("\t0\n") == 146
