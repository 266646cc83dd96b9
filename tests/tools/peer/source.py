"""Transformers' tests of models, from the source distribution of the installed version.

The distribution has the mixins of `tests/test_modeling_common.py` and none of the folders beside it: no tests of single
models, of text generation or of exports.
"""

import importlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import transformers

CACHE = Path(__file__).parents[3] / "build" / "peer"
PACKAGE = "transformers_tests"  # called `tests` where it comes from, as ours are
MODULE = "test_modeling_common"
# Imported by the module and not in the distribution.
MISSING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def fetch() -> Path:
    """Return the folder of transformers' tests; download them with pip on the first call for a version."""
    release = f"transformers-{transformers.__version__}"
    folder = CACHE / release
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
            command += ["--dest", scratch, f"transformers=={transformers.__version__}"]
            subprocess.run(command, check=True)
            tests = Path(scratch, "tests")
            tests.mkdir()
            with tarfile.open(Path(scratch, f"{release}.tar.gz")) as archive:
                (tests / f"{MODULE}.py").write_bytes(archive.extractfile(f"{release}/tests/{MODULE}.py").read())
            tests.rename(folder)
    return folder


def load() -> ModuleType:
    """Import `test_modeling_common` under another package's name, with empty classes for mixins it lacks."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(fetch())]
    sys.modules[PACKAGE] = package
    for name, mixin in MISSING.items():
        stand_in = ModuleType(f"{PACKAGE}.{name}")
        setattr(stand_in, mixin, type(mixin, (), {}))
        sys.modules[stand_in.__name__] = stand_in
    return importlib.import_module(f"{PACKAGE}.{MODULE}")
