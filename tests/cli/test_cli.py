"""The command line as a person meets it: help, mistakes in one line, and what a run prints."""

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from bertkit import __main__ as program
from bertkit import cli
from bertkit.cli import console
from bertkit.cli.options import app
from bertkit.reports.tables import make_table
from bertkit.tasks.glue import BENCHMARKS
from bertkit.tasks.option import PRETRAINING_OPTIONS
from bertkit.training.study_results import StudyRun
from tests.corpora import write_text
from tests.official import (
    list_questions,
    write_checkpoint,
    write_glue,
    write_questions,
    write_reviews,
    write_squad,
)

SMALL = [
    *("--set", "batch_size=8", "--set", "model.hidden_size=16", "--set", "model.num_hidden_layers=1"),
    *("--set", "model.num_attention_heads=2", "--set", "model.intermediate_size=32", "--set", "data.max_length=32"),
    *("--set", "data.vocab_size=100", "--set", "data.heldout_share=0.2", "--set", "train.max_steps=2"),
]


COMMANDS = [
    f"{name} {part}".strip()
    for name, command in typer.main.get_command(app).commands.items()
    for part in getattr(command, "commands", [""])
]


def test_help_answers_within_half_a_second():
    """On a slow or busy machine in not much more than it takes to import what parses the command line."""

    def measure(*arguments):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        return time.perf_counter() - start, done.stdout

    answers, imports = [], []
    for _ in range(5):  # in turn, because the load changes
        answers.append(measure("-m", "bertkit", "--help"))
        imports.append(measure("-c", "import typer.rich_utils"))
    assert all("pretrain" in answer for _, answer in answers)
    assert min(answers)[0] < max(0.5, 2.5 * min(imports)[0])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("glue --task mnlii", "unknown task 'mnlii'"),
        ("glue --task rte --recipe nowhere.toml", "nowhere.toml cannot be read"),
        ("glue --task rte --set data.max_length='64'", "write max_length = 64"),
        ("squad --version 2 --set data.doc_stride=0", "doc_stride is 0 in [data]; it must be at least 1"),
        # A file before the model, which does not exist either, and whatever else is given.
        ("classify --data no.csv --model no/bert --epochs 2", "there is no file or folder no.csv; correct the path"),
        ("ner --data no/letters.jsonl --restarts 2 --model no/bert", "there is no file or folder no/letters.jsonl"),
        ("swag --data swag/full", "there is no file or folder swag/full"),
        ("squad --version 2 --extra-train more.json --model no/bert", "there is no file or folder more.json"),
        ("pretrain --corpus no.txt --steps 9", "there is no file or folder no.txt"),
        ("study FILE --data no.d", "there is no file or folder no.d"),
        ("doctor no.csv --model no/bert", "there is no file or folder no.csv"),
        ("classify --data FILE --model no/bert --epochs 2", "there is no folder no/bert, and the Hub cannot"),
        ("classify --data FILE --model no.bert/a/b", "there is no folder no.bert/a/b"),
        ("classify --data FILE --model FOLDER --output OTHER --epochs 2", "is not empty and holds no run"),
        ("squad --version 1 --model FOLDER --extra-train FILE --search 2", "cannot be combined with extra_train"),
        ("pretrain --budget 2m --steps 4", "--budget decides the number of updates"),
        ("predict FOLDER/no text", "there is no folder "),
        ("evaluate FOLDER --data FILE,no.csv", "there is no file or folder no.csv"),
        ("export no.run --output exported", "no.run"),
        ("features FOLDER --input no.txt --output a.npz", "there is no file or folder no.txt"),
        ("serve no.run --port PORT", "cannot be used (Address already in use); give another --port or --host"),
        ("serve FOLDER --host 0.0.0.0 --port 0", "give a --token"),
        ("report no.run", "there is no file or folder no.run"),
        ("compare no.run FOLDER", "there is no file or folder no.run"),
        ("reproduce no.run", "no.run is not a finished run"),
    ],
)
def test_a_mistake_is_named_before_torch_is_imported(tmp_path, words, expected):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "table.csv").write_text("text,label\na,b\n")
    places = {"OTHER": tmp_path / "other", "FILE": tmp_path / "table.csv", "FOLDER": tmp_path}
    with socket.create_server(("127.0.0.1", 0)) as used:
        places["PORT"] = used.getsockname()[1]
        for name, place in places.items():
            words = words.replace(name, str(place))
        check_refusal(words, expected)


def check_refusal(words, expected):
    loaded = "print(sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    code = f"import atexit, sys; sys.argv = ['bertkit', *{words.split()}]; atexit.register(lambda: {loaded})"
    command = [sys.executable, "-c", f"{code}; from bertkit import cli; cli.main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert expected in done.stderr


def test_a_shell_completes_commands_and_options():
    """`bertkit --install-completion` writes a script that asks the program like this."""
    asked = {"_BERTKIT_COMPLETE": "complete_bash", "COMP_WORDS": "bertkit glue --ta", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['bertkit']; from bertkit import cli; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["--task"], "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(finish, command):
    out = finish(*command.split(), "--help")
    assert f"$ bertkit {command}" in out


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with small data for every command, a tiny BERT, and files that are refused."""
    world = tmp_path_factory.mktemp("world")
    write_text(world / "good.txt")
    write_reviews(world / "reviews.csv", 120)
    write_glue(world / "GLUE")
    write_checkpoint(world / "bert", max_position_embeddings=512)
    (world / "long.toml").write_text("[data]\nmax_length = 1024\n")
    (world / "study.toml").write_text('column = [{ name = "rte", task = "rte" }]\n')
    (world / "other").mkdir()
    (world / "other" / "notes.txt").write_text("mine")
    return world


MISTAKES = {  # command -> a part of its one line; other tests have the mistakes of data, recipes and options
    "pretran": "No such command 'pretran'",
    "pretrain --corpse x": "--corpse",
    "vocab --output x": "Missing argument",
    "vocab good.txt --trim bert --extend bert --output made": "--trim and --extend are two steps",
    "vocab good.txt --words 9 --output made": "--words is for --extend",
    "vocab good.txt --trim bert --words 9 --output made": "--words is for --extend",
    "vocab good.txt --trim bert --size 90 --output made": "--size and --cased are for a new vocabulary",
    "vocab good.txt --extend bert --cased --output made": "--size and --cased are for a new vocabulary",
    "vocab good.txt --trim bert --output bert": "bert holds a tokenizer already",
    "vocab good.txt --trim missing --output made": "missing",
    "pretrain --corpus missing.txt": "missing.txt",
    "pretrain --corpus good.txt --recipe long.toml": "max_length 1024 exceeds the model's 512 positions",
    "pretrain --corpus good.txt --output other": "other is not empty and holds no run",
    "corpus build good.txt --vocab bert --output made --workers none": "--workers is 'none'",
    "glue --task rte --data GLUE": "google-bert/bert-base-uncased",
    "glue --task all --data GLUE/RTE --model bert": "CoLA/train.tsv",
    "glue --task rte --data GLUE --workers 2": "--workers is for",
    "glue --task ax --data GLUE": "--model",
    "study study.toml --data GLUE --model bert": "--data ROOT",
    "features bert --input good.txt --output a.txt": ".jsonl or .npz",
    "predict bert": "give the inputs either as TEXT or with --input FILE",
    "predict bert one two --text title": "--text names columns of --input",
    "export bert --output made --data GLUE": "--data is for --int8",
    "doctor reviews.csv --task novel": "unknown task 'novel'",
    "doctor reviews.csv --output runs/doctor": "add --folds 5",
    "doctor GLUE --task cola --folds 5": "--folds finds label errors in a table of texts and labels, not in cola",
    "classify --data reviews.csv --model bert --folds 2 --grid": "--folds cannot be combined with --grid",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(call, world, monkeypatch, command):
    monkeypatch.chdir(world)
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()}
    code, _, err = call(*command.split())
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("bertkit: ")
    assert MISTAKES[command] in err
    assert {path: path.stat().st_mtime_ns for path in world.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_the_bare_command_learns_from_the_installed_documentation(finish):
    small = ("data.limit_characters=2000000", "train.max_steps=60", "train.eval_steps=60", "data.heldout_pairs=300")
    out = finish("pretrain", *(word for key in small for word in ("--set", key)))
    assert "docs: " in out
    assert "masked-LM loss" in out


@pytest.fixture
def terminal(monkeypatch):
    """Print as on a terminal, where a run has its whole table of scores."""
    monkeypatch.setenv("FORCE_COLOR", "1")


def test_a_run_prints_scores_beside_baselines_examples_and_what_to_try_next(finish, terminal, tmp_path):
    write_text(tmp_path / "good.txt")
    out = finish("pretrain", "--corpus", "good.txt", "--output", "runs/mine", *SMALL)
    for words in ("masked-LM loss", "ln V", "token frequencies", "next-sentence accuracy", "the larger class"):
        assert words in out
    assert "standard errors from the larger class" in out
    assert "curves.png" in out
    assert "bertkit pretrain --model runs/mine" in out
    assert (tmp_path / "runs/mine/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_writes_nothing_and_says_what_a_run_costs(finish, tmp_path):
    write_text(tmp_path / "good.txt")
    out = finish("pretrain", "--corpus", "good.txt", "--dry-run", *SMALL)
    assert "[train]" in out
    assert "parameters: " in out
    assert "expected here, from a few timed updates: " in out
    assert out.index("expected here") < out.index("dry run: nothing was trained or written") < out.index("[train]")
    assert not (tmp_path / "runs").exists()
    options = PRETRAINING_OPTIONS
    assert f"short_seq_prob = 0.1  # {options['short_seq_prob'].help} (reference code)\n" in out
    assert f"vocab_size = 100  # {options['vocab_size'].help}\n" in out, "this is not the reference code's"
    recipe = tomllib.loads(out[out.index('task = "pretrain"') :])
    assert recipe["data"].keys() == options.keys()


def test_vocab_writes_a_vocabulary_that_a_run_can_use(finish, call, tmp_path):
    write_text(tmp_path / "good.txt")
    out = finish("vocab", "good.txt", "--size", "90", "--output", "vocabulary")
    tokens = (tmp_path / "vocabulary" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert f"{len(tokens)} tokens" in out
    before = (tmp_path / "vocabulary" / "tokenizer.json").read_bytes()
    code, _, err = call("vocab", "good.txt", "--output", "vocabulary")
    assert code == 2
    assert "holds a tokenizer already" in err
    assert (tmp_path / "vocabulary" / "tokenizer.json").read_bytes() == before
    finish("pretrain", "--corpus", "good.txt", "--vocab", "vocabulary", *SMALL)
    assert (tmp_path / "runs/pretrain/vocab.txt").read_bytes() == (tmp_path / "vocabulary/vocab.txt").read_bytes()


def make_terminal(width, **options):
    screen = console.Screen()
    screen.console = Console(file=io.StringIO(), force_terminal=True, width=width, **options)
    return screen


def test_a_terminal_gets_a_progress_bar():
    """The bar shows what is done and the total, the remaining time and the losses, also for a build and a study."""
    screen = make_terminal(120)
    runs = [StudyRun(1, "a", status="finished"), StudyRun(2, "b", status="running", update=30, updates=60)]
    study = SimpleNamespace(over=3, runs=4, cells=[SimpleNamespace(runs=runs)], pretrainings=[])
    screen.names |= {"mlm_loss": "masked-LM loss"}
    shows = (
        lambda: screen.advance(50, 100, {"loss": 3.5, "mlm_loss": 3.0, "grad_norm": 9.0}),
        lambda: screen.show_study(study),
        lambda: screen.show_build(10**8, 10**8, 10**7),
    )
    for show in shows:
        with screen:
            show()
            screen.bar.refresh()
        assert screen.bar is None
    drawn = screen.console.file.getvalue()
    for words in ("update 50 of 100", "loss 3.500", "masked-LM loss 3.000", "3 of 4 runs", "100.0 of 100.0 MB"):
        assert words in drawn
    assert "9.0" not in drawn


BESIDE_A_BAR = """
from types import SimpleNamespace
from bertkit.cli.console import Screen
run = SimpleNamespace(directory="b", update=0, updates=60)
study = SimpleNamespace(over=0, runs=4, cells=[SimpleNamespace(runs=[run])], pretrainings=[])
with Screen() as screen:
    screen.show_study(study)
    (task,), now = screen.bar.tasks, screen.bar.get_time()
    screen.bar.get_time = task._get_time = lambda: now + 100
    run.update, study.over = 30, 1
    screen.show_study(study)
    screen.say("trained for 4 s")
"""


def test_a_line_stands_above_the_bar_and_a_study_says_what_is_left():
    """After 100 s, 1.5 of four runs are done, so that the other 2.5 take 167 s."""
    main, other = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "90"}
    with subprocess.Popen([sys.executable, "-c", BESIDE_A_BAR], stdout=other, stderr=other, env=environment):
        os.close(other)
        drawn = b""
        with suppress(OSError):  # the program has ended
            while part := os.read(main, 1 << 16):
                drawn += part
    os.close(main)
    first, second, *_ = read_screen(drawn.decode())
    assert first == "trained for 4 s"
    assert second.endswith("0:02:47 1 of 4 runs")


def read_screen(drawn):
    """Return the lines that a terminal shows, without colours."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", drawn):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part[0] not in "\x1b\r":
            lines[-1] += part
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_is_one_line_too(tmp_path, number):
    write_text(tmp_path / "good.txt", documents=20_000)
    command = [sys.executable, "-m", "bertkit", "pretrain", "--corpus", "good.txt", *SMALL]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "reading" in process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == "bertkit: stopped; finished work is kept, and the same command continues\n"
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("start", [["-m", "bertkit"], ["-c", "from bertkit.__main__ import main; main()"]])
def test_ctrl_c_in_the_first_moment_is_silent(tmp_path, start):
    """While the command line itself is imported; here that takes longer than usual."""
    (tmp_path / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = ["env", "--default-signal=INT", sys.executable, *start, "vocab"]  # a background job has it ignored
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(("command", "count"), [("serve", None), ("ner", "1000")])
def test_waiting_threads_sleep_soon_except_in_a_server(monkeypatch, command, count):
    monkeypatch.setattr(sys, "argv", ["bertkit", command])
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(cli, "main", lambda: None)
    program.main()
    assert os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_within_an_import_that_catches_everything_is_a_stop_all_the_same(tmp_path, number):
    """A library once caught the exit inside accelerate's import, which then ended in a RecursionError of numpy."""
    thread = "threading.Thread(target=time.sleep, args=(60,)).start()"  # which a stop does not wait for
    close = "atexit.register(print, 'tracker closed')"
    kill = f"import atexit, signal, threading, time; {thread}; {close}; signal.raise_signal({int(number)})"
    (tmp_path / "careless.py").write_text(f"try:\n    {kill}\nexcept BaseException:\n    raise RecursionError")
    code = "from bertkit import cli; cli.app = lambda **options: __import__('careless'); cli.main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=9)
    assert (done.returncode, done.stdout) == (128 + number, "tracker closed\n")
    assert done.stderr == "bertkit: stopped; finished work is kept, and the same command continues\n"


# --- GLUE and studies -------------------------------------------------------------------------------------------------

TINY = ["--set", "precision=fp32", "--set", "batch_size=8", "--set", "train.num_train_epochs=1.0"]


@pytest.fixture
def glue(tmp_path, capsys):
    """The options that name the fixtures: a tiny BERT and a whole GLUE download beside the current directory."""
    write_glue(tmp_path / "GLUE")
    write_checkpoint(tmp_path / "bert")
    capsys.readouterr()  # transformers' progress bars
    return ["--data", "GLUE", "--model", "bert", *TINY]


def test_a_fine_tuned_task_is_shown_beside_the_majority_and_the_paper(finish, glue, terminal):
    out = finish("glue", "--task", "SST-2", *glue, "--set", "train.learning_rate=0.0")
    for words in ("accuracy (%)", "50.0 the majority class", "93.5 BERT-base, test", "warning: accuracy"):
        assert words in out
    assert "The worst mistakes on dev (the right answer in parentheses):" in out
    assert len(re.findall(r"^  row \d+: .+  →  (positive  \(negative|negative  \(positive)\)$", out, re.MULTILINE)) == 5


def test_a_grid_prints_its_table_and_a_dry_run_its_cells(finish, glue, tmp_path):
    grid = ["glue", "--task", "rte", *glue[:-4], "--grid", "--restarts", "2", "--set", "train.num_train_epochs=1.0"]
    out = finish(*grid, "--dry-run")
    assert "8 cells, 16 runs" in out
    assert "rte/learning_rate-5e-05_batch_size-16, seeds 42, 43" in out
    assert not (tmp_path / "runs").exists()
    out = finish(*grid, "--set", "train.learning_rate=[1e-3, 1e-4]", "--set", "batch_size=16")
    for words in ("BERT-base, test", "best of 4", "Chosen for rte: runs/rte/rte/learning_rate-", "heatmap.png"):
        assert words in out
    assert (tmp_path / "runs/rte/heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "runs/rte").rglob("model.safetensors"))) == 1


@pytest.mark.slow
def test_every_task_at_once_writes_the_eleven_files_of_a_submission(finish, glue, tmp_path):
    assert "1 row x 9 columns x 1 seed = 9 runs" in finish("glue", "--task", "all", *glue)
    study = json.loads((tmp_path / "runs/glue/study.json").read_text())
    folders = [tmp_path / "runs/glue" / one["run"] / "predictions" for one in study["chosen"]]
    wanted = {split.submission for row in BENCHMARKS for split in row.splits.values() if split.submission}
    for name in wanted:
        (path,) = (folder / name for folder in folders if (folder / name).exists())
        lines = path.read_text().splitlines()
        assert lines[0] == "index\tprediction"
        assert len(lines) == (10 if name == "AX.tsv" else 11)


def test_a_study_of_which_a_run_fails_shows_the_others_and_ends_with_code_2(call, glue, tmp_path):
    (tmp_path / "glue").symlink_to("GLUE")
    (tmp_path / "odd.toml").write_text(
        'column = [{ name = "rte", task = "rte" }]\nseeds = [1]\ngrid = { "train.learning_rate" = [1e-3, 1e30] }\n'
        'recipe = { precision = "fp32", train = { max_grad_norm = 0.0, max_steps = 4 } }\n'
    )
    code, out, err = call("study", "odd.toml", "--data", ".", "--model", "bert", "--output", "runs/odd")
    why = "1 of 2 runs failed; runs/odd/study.json gives the reasons, and the same command retries them"
    assert (code, err) == (2, f"bertkit: {why}\n")
    assert "accuracy" in out


# --- SQuAD


@pytest.fixture
def squad(tmp_path, capsys):
    """Return the options of a small SQuAD 2.0 call: files, a model, few updates and short windows."""
    write_squad(tmp_path / "squad", 2)
    write_squad(tmp_path / "squad", 1)
    model = write_checkpoint(tmp_path / "bert")
    lengths = {"max_length": 40, "doc_stride": 12, "max_query_length": 8}
    settings = [word for key, value in lengths.items() for word in ("--set", f"data.{key}={value}")]
    settings += ["--set", "batch_size=8", "--set", "train.max_steps=2"]
    capsys.readouterr()  # what writing a model prints
    return ["squad", "--data", str(tmp_path / "squad"), "--model", str(model), *settings]


def test_squad_is_shown_with_its_tau_and_scored_again(finish, squad, terminal, tmp_path):
    out = finish(*squad, "--version", "2", "--output", tmp_path / "run")
    for words in ("81.9 BERT-large, dev", "never answering", "F1, tau = 0", "null_score_diff_threshold = "):
        assert words in out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    files = [tmp_path / "squad" / "dev-v2.0.json", tmp_path / "run" / "predictions" / "predictions.json"]
    odds = tmp_path / "run" / "predictions" / "null_odds.json"
    out = finish("score", "squad", "--version", "2", *files, "--json")
    scores = json.loads(out)
    assert {key: scores[key] for key in ("exact", "f1", "HasAns_exact", "NoAns_f1")} == {
        key: metrics[key] for key in ("exact", "f1", "HasAns_exact", "NoAns_f1")
    }
    assert list(scores)[:3] == ["exact", "f1", "total"]
    out = finish("score", "squad", "--version", "2", *files, "--null-odds", odds, "--json")
    assert set(json.loads(out)) - set(scores) == {"best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"}
    out = finish("score", "squad", "--version", "2", *files)
    assert out.splitlines()[0] == f"exact {metrics['exact']:g}"


def test_own_questions_have_folds_and_a_model_that_predicts_them(finish, call, squad, terminal, tmp_path):
    rows = list_questions(tmp_path / "squad" / "train-v1.1.json")
    write_questions(tmp_path / "own.jsonl", rows)
    own = ["squad", "--version", "1", "--data", "own.jsonl", *squad[3:]]
    out = finish(*own, "--set", "data.dev_share=0.3", "--set", "data.test_share=0.3", "--output", "runs/own")
    for words in ("own.jsonl: train ", "F1, test (%)", "bertkit predict runs/own --input questions.jsonl"):
        assert words in out
    assert call("predict", "runs/own", "--input", "own.jsonl", "--output", "answers.jsonl")[0] == 0
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 24
    out = finish(*own, "--folds", "2", "--output", "runs/folds")
    assert "mean ± sd (n) over 2 folds" in out
    found = [json.loads(line) for line in (tmp_path / "runs" / "folds" / "out_of_fold.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert {row["fold"] for row in found} == {1, 2}
    finish(*own, "--folds", "2", "--output", "runs/folds")


def test_a_file_is_trained_on_first(finish, squad, tmp_path):
    question = {"id": "q", "question": "word1 ?", "answers": [{"text": "good", "answer_start": 6}]}
    paragraph = {"context": "word1 good word2 .", "qas": [question]}
    article = {"title": "Page", "paragraphs": [paragraph]}
    (tmp_path / "trivia.json").write_text(json.dumps({"version": "1.1", "data": [article]}), encoding="utf-8")
    out = finish(*squad, "--version", "1", "--extra-train", "trivia.json", "--output", "run")
    assert "train 1 questions" in out
    first, second = out.split("then:")
    assert "update 2 of 2" in first
    assert "update 2 of 2" in second, "progress starts again"


def test_a_corpus_is_built_and_described(finish, tmp_path):
    write_text(tmp_path / "good.txt")
    finish("vocab", "good.txt", "--size", 100, "--output", "vocab")
    build = ("corpus", "build", "good.txt", "--vocab", "vocab", "--output", "made")
    out = finish(*build, "--workers", "1")
    assert re.search(r"^1 piece \(0 MB\)$", out, re.MULTILINE)
    assert re.search(r"^[\d,]+ tokens in [\d.]+ s: [\d,]+ tokens/s$", out, re.MULTILINE)
    assert re.search(r"documents +│ 40 ", out)
    assert "bertkit pretrain --corpus made" in out
    again = finish(*build)
    assert again.startswith("made is finished\n")
    shown = finish("corpus", "stats", "made")
    assert shown in again
    printed = finish("corpus", "stats", "made", "--json")
    assert json.loads(printed)["documents"] == 40


def test_what_the_system_refuses_is_one_line_and_a_bug_a_traceback(capsys):
    def fail(error):
        raise error

    with pytest.raises(SystemExit) as stop, console.explain_mistakes():
        fail(PermissionError(13, "No", "a/b"))
    assert stop.value.code == 2
    assert re.fullmatch(r"bertkit: \S+ cannot be used: .*; .* or name another path\n", capsys.readouterr().err)
    with pytest.raises(PermissionError), console.explain_mistakes():
        fail(PermissionError(1, "Operation not permitted"))  # of a process


def test_letters_that_the_terminal_has_not_are_written_as_escapes(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "bertkit", "vocab", str(tmp_path / "我"), "--output", "made"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(b"bertkit: ")
    assert b"\\u6211" in done.stderr


HOSTILE = "[/x]\x1b[31m\x9b2J\u202e[link=http://a.b]c[/link]"
SHOWN = r"[/x]\u001b[31m\u009b2J\u202e[link=http://a.b]c[/link]"


def test_controls_in_data_are_escaped_and_json_stays_the_same(capsys):
    console.print_line(json.dumps({"label": HOSTILE + "\u2028"}, ensure_ascii=False))
    out = capsys.readouterr().out
    assert json.loads(out) == {"label": HOSTILE + "\u2028"}
    console.complain(f"no file {HOSTILE}\nforged")
    assert capsys.readouterr().err == f"bertkit: no file {SHOWN}\\u000aforged\n"
    assert not set(out) & set("\x1b\x9b\u202e\u2028")


def test_data_in_tables_and_progress_is_neither_markup_nor_controls(capsys):
    screen = make_terminal(200, color_system=None)
    screen.show_table(make_table(HOSTILE, [f"1{HOSTILE}"], [[f"2{HOSTILE}\nmore"]]))
    with screen:
        screen.names["x"] = "[/x][red]"
        screen.advance(1, 2, {"x": 1.0})
    assert "[/x][red] 1.000" in screen.console.file.getvalue()
    drawn = capsys.readouterr().out
    assert drawn.count(SHOWN) == 3
    assert "\x9b" not in drawn
    assert "more" in drawn


STREAMS = """
from bertkit.cli import console
with console.explain_mistakes():
    screen = console.Screen()
    screen.trains = {trains}
    for number in range(3):
        screen.say(f"update {{number}}")
    console.complain("the end")
"""
FULL = "bertkit: cannot write to standard output (No space left on device)"


@pytest.mark.parametrize(
    ("where", "trains", "code", "said"),
    [
        ("nobody", True, 0, "bertkit: the end\n"),
        ("nobody", False, 128 + signal.SIGPIPE, ""),
        ("/dev/full", True, 0, "bertkit: the end\n"),
        ("/dev/full", False, 2, f"{FULL}; free some space or redirect the output, and try again\n"),
    ],
)
def test_a_training_goes_on_when_its_progress_cannot_be_written_and_other_commands_end(where, trains, code, said):
    if where == "nobody":
        read, stream = os.pipe()
        os.close(read)
    else:
        stream = os.open(where, os.O_WRONLY)
    command = [sys.executable, "-c", STREAMS.format(trains=trains)]
    done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
    os.close(stream)
    assert (done.returncode, done.stderr) == (code, said)
