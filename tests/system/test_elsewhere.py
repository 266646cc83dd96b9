"""Commands where POSIX's modules, signals and `fork` are missing, as on Windows, end as they do on Linux."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.official import write_checkpoint, write_reviews

ROOT = Path(__file__).parents[2]
NAMED = ["--text", "title,body", "--label", "stars"]
SETTINGS = ["--set", "precision=fp32", "--set", "train.max_steps=3", "--set", "train.dataloader_num_workers=1"]
COMMANDS = [
    ["classify", "--data", "reviews.csv", *NAMED, "--model", "bert", *SETTINGS, "--output", "run"],
    ["predict", "run", "--input", "reviews.csv", "--output", "answers.csv"],
    ["evaluate", "run", "--data", "reviews.csv", "--output", "evaluated"],
    ["export", "run", "--output", "exported"],
]


def run_python(*words, folder=ROOT):
    threads = {"OMP_NUM_THREADS": "1"}  # as the tests themselves, for equal weights
    surroundings = os.environ | threads | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=surroundings, capture_output=True, text=True)


def test_commands_end_the_same_where_posix_is_missing(call, tmp_path):
    here, elsewhere = tmp_path, tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        write_reviews(folder / "reviews.csv", 60)
        write_checkpoint(folder / "bert")
    for words in COMMANDS:
        assert call(*words)[0] == 0
        done = run_python("-m", "tests.elsewhere", *words, folder=elsewhere)
        assert (done.returncode, done.stderr) == (0, ""), words[0]
    assert (elsewhere / "run" / "model.safetensors").read_bytes() == (here / "run" / "model.safetensors").read_bytes()
    for name in ("run/predictions/dev.parquet", "run/predictions/test.parquet"):
        assert pq.read_table(elsewhere / name) == pq.read_table(here / name)
    for name in ("answers.csv", "evaluated/metrics.json", "exported/model.onnx"):
        assert (elsewhere / name).read_bytes() == (here / name).read_bytes(), name


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.sched_getaffinity(0)", "AttributeError: module 'os' has no attribute 'sched_getaffinity'"),
        ("from signal import SIGKILL", "ImportError: cannot import name 'SIGKILL' from 'signal'"),
        ("import resource", "ModuleNotFoundError: No module named 'resource'"),
        ("import multiprocessing; multiprocessing.get_context('fork')", "ValueError: cannot find context for 'fork'"),
    ],
)
def test_names_of_posix_are_hidden_from_modules_of_bertkit(code, error):
    lines = [
        "import builtins",
        "from tests.elsewhere import import_elsewhere",
        "builtins.__import__ = import_elsewhere",
        f"exec({code!r}, {{'__name__': 'bertkit.module'}})",
    ]
    done = run_python("-c", "\n".join(lines))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(error)
