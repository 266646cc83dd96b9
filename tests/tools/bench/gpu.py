"""Run all that needs an accelerator, each step in its own process: tests, a profile, benches and a pretraining.

    python -m tests.tools.bench gpu --output runs/gpu --minutes 9

In the output directory NAME.log has the output of a step, with its Markdown rows for recipes/RESULTS.md, NAME.json its
figures and NAME.done its time. The steps that tell most and take least come first. Finished steps are not repeated: the
same command continues, failed steps last. A step that takes three times as long as expected is stopped. During the
tests, which are not timed, the layers are compiled into a cache for later steps. --tiny rehearses the other steps on a
CPU.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from bertkit.errors import UsageError
from bertkit.system.progress import describe_duration
from tests.tools.bench.measure import Record, say
from tests.tools.bench.model import choose_size

CHECKOUT = Path(__file__).parents[3]
STOP_SECONDS = 20  # in which a stopped step may save its state
SLACK = 3  # multiple of its expected time after which a step is stopped
MASKED_LM = "mlm --size base --batch-size 256 --updates 10"
WARM = "profile mlm --size base --batch-size 256 --updates 1 --compile ours"
STEPS = {  # name -> expected seconds on an H200; the bench and its options
    "tests": (60, ""),
    "profile": (35, f"profile {MASKED_LM}"),
    "pretrain": (105, f"train {MASKED_LM} --compile ours"),
    "pairs": (45, "train mrpc --size base --updates 50"),
    "predict": (40, "predict --size base --texts 512"),
    "one-text": (25, "predict --size base --texts 1 --repeats 20"),
    "fp16": (30, "train mrpc --size base --updates 20 --precision fp16 --repeats 1"),
    "curve": (130, ""),
    "profile-compiled": (45, f"profile {MASKED_LM} --compile ours"),
}
CURVE = (  # its log and scores are in the run directory, for `bertkit report`
    "import bertkit; bertkit.train('pretrain', {data!r}, output={output!r}, {length}, batch_size={rows}, "
    "config={config}, limit_characters={characters}, report=print)"
)
CURVE_SIZES = {"length": "budget='2m'", "rows": 256, "characters": 50_000_000, "config": choose_size("small")}
TINY_CURVE = {"length": "train={'max_steps': 4}", "rows": 8, "characters": 200_000, "config": choose_size("tiny")}
TINY = {"minutes": 60.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--data", default="docs", metavar="FILE|DIR|docs", help="text (default: documentation)")


def bench(given: argparse.Namespace, record: Record) -> None:
    """Run the unfinished steps that fit into the time, those that failed before last.

    Raises:
        UsageError: There is no accelerator.
    """
    if not given.tiny and not torch.accelerator.is_available():
        raise UsageError("no accelerator was found; use a machine that has one, or rehearse on the CPU with --tiny")
    output = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    commands = list_commands(given, output)
    for name in sorted(commands, key=lambda name: (output / f"{name}.log").exists()):
        seconds, left = STEPS[name][0], record.end - time.monotonic() - STOP_SECONDS
        if (output / f"{name}.done").exists():
            say(f"{name}: finished")
        elif left < seconds:
            say(f"{name}: left for the next call; it takes about {describe_duration(seconds)}")
        else:
            say(f"{name}: about {describe_duration(seconds)}")
            limit = left if given.tiny else min(SLACK * seconds, left)
            warm = start_step("warm", make_words(WARM, given), limit, output) if name == "tests" else None
            say(f"{name}: {run_step(name, commands[name], limit, output)}")
            if warm is not None:  # the next steps are timed
                say(f"layers are in the cache of compiled code: {warm.wait() == 0}")
    if failed := [name for name in commands if not (output / f"{name}.done").exists()]:
        record.failure = f"not finished: {', '.join(failed)}"


def list_commands(given: argparse.Namespace, output: Path) -> dict[str, list[str]]:
    """Return the arguments of Python in each step; a rehearsal leaves out the tests, which need a GPU."""
    marked = [path for path in CHECKOUT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    # The checkout's own options need plugins that may be missing.
    options = ["-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    curve = CURVE.format(data=locate(given), output=str(output / "curve"), **TINY_CURVE if given.tiny else CURVE_SIZES)
    commands = {"tests": ["-m", "pytest", *options, *map(str, marked)], "curve": ["-c", curve]}
    for name, (_, words) in STEPS.items():
        if words:
            commands[name] = [*make_words(words, given), "--json", str(output / f"{name}.json")]
    return {name: commands[name] for name in STEPS if not given.tiny or name != "tests"}


def locate(given: argparse.Namespace) -> str:
    """Return the text to pretrain on, with the full path if it is a file or a directory."""
    return str(Path(given.data).absolute()) if Path(given.data).exists() else given.data


def make_words(words: str, given: argparse.Namespace) -> list[str]:
    """Return the arguments of Python for a bench and its options."""
    data = ["--data", locate(given)] if " mlm " in words else []
    return ["-m", "tests.tools.bench", *words.split(), *data, *(["--tiny"] if given.tiny else [])]


def start_step(name: str, words: list[str], seconds: float, output: Path) -> subprocess.Popen:
    """Start a step for at most `seconds`."""
    limited = ["timeout", f"--kill-after={STOP_SECONDS}", f"{seconds:.0f}", sys.executable, *words]
    # Compiled code is kept with the figures, for all steps and for the next call.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(output / "compiled")}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if "--tiny" in words else {}
    with (output / f"{name}.log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(limited, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)


def run_step(name: str, words: list[str], seconds: float, output: Path) -> str:
    """Run a step for at most `seconds`, and return how it ended."""
    start = time.monotonic()
    code = start_step(name, words, seconds, output).wait()
    took = describe_duration(time.monotonic() - start)
    if code == 0:
        (output / f"{name}.done").write_text(f"{took}\n", encoding="utf-8")
        return f"finished in {took}"
    return f"failed with exit code {code} after {took}; see {output / name}.log"
