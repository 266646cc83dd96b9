"""The distributions of `python -m build`: their metadata are valid, and what they install trains and predicts."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.official import write_checkpoint, write_reviews

ROOT = Path(__file__).parents[1]
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build both distributions, the wheel from the source distribution, and return their folder."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "tests")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source"]
    subprocess.run(command, check=True, env=ALONE)
    return folder / "dist"


def test_the_metadata_are_valid(built):
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()], check=True)


@pytest.mark.parametrize("kind", ["*.tar.gz", "*.whl"])
def test_an_installed_distribution_trains_and_predicts(built, kind, tmp_path):
    """The new environment sees the libraries of this one, but not its bertkit."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "new"], check=True)
    programs = tmp_path / "new" / "bin"
    site = tmp_path / "new" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (distribution,) = built.glob(kind)
    install = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    options = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, *options, distribution], check=True, env=ALONE)
    write_reviews(tmp_path / "reviews.csv")
    write_checkpoint(tmp_path / "bert")

    def call(*words):
        done = subprocess.run([programs / "bertkit", *words], cwd=tmp_path, env=ALONE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "pretrain" in call("--help")
    found = [programs / "python", "-c", "import bertkit; print(bertkit.__file__)"]
    home = subprocess.run(found, cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=True).stdout
    assert Path(home.strip()).is_relative_to(tmp_path / "new")
    data = ("--data", "reviews.csv", "--text", "title", "--label", "stars")
    call("classify", *data, "--model", "bert", "--output", "run", "--set", "train.max_steps=2")
    assert call("predict", "run", "A fine film")
