"""Run all that needs an accelerator, each step in its own process: tests, benches and a pretraining.

    python -m tests.tools.bench gpu --output runs/gpu --minutes 20

In the output directory NAME.log has the output of a step, with its Markdown rows for recipes/RESULTS.md, NAME.json its
figures and NAME.done its time. Finished steps are not repeated: the same command continues, failed steps last. A step
that takes three times as long as expected is stopped. --tiny rehearses most steps on the CPU.
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
STEPS = {  # name -> expected seconds on an H200, most of them compilation in training; the bench and its options
    "tests": (60, ""),
    "pretrain-base": (200, "train pretrain --size base --batch-size 256 --updates 20 --compile"),
    "mlm-base": (60, "train mlm --size base --batch-size 256 --updates 20"),
    "pairs-base": (220, "train mrpc --size base --updates 100 --compile"),
    "tags-base": (60, "train ner --size base --updates 100"),
    "predict-base": (40, "predict --size base --texts 512"),
    "curve": (360, ""),
    "pairs-minilm": (150, "train mrpc --size minilm --updates 100 --compile"),
    "predict-minilm": (30, "predict --size minilm --texts 512"),
    "pretrain-large": (280, "train pretrain --size large --batch-size 64 --updates 20 --compile"),
    "pairs-large": (300, "train mrpc --size large --updates 100 --compile"),
    "predict-large": (70, "predict --size large --texts 512"),
}
CURVE = (  # its log and scores are in the run directory, for `bertkit report`
    "import bertkit; bertkit.train('pretrain', {data!r}, output={output!r}, budget='5m', batch_size=256, "
    "config={config}, limit_characters=50_000_000, report=print)"
)
TINY = {"minutes": 60.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--data", default="docs", metavar="FILE|DIR|docs", help="text (default: documentation)")
    parser.set_defaults(minutes=20.0)


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
            say(f"{name}: {run_step(name, commands[name], min(SLACK * seconds, left), output)}")
    if failed := [name for name in commands if not (output / f"{name}.done").exists()]:
        record.failure = f"not finished: {', '.join(failed)}"


def list_commands(given: argparse.Namespace, output: Path) -> dict[str, list[str]]:
    """Return the arguments of Python in each step; a rehearsal has the benches of one size."""
    marked = [path for path in CHECKOUT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    # The checkout's own options need plugins that may be missing.
    options = ["-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    data = str(Path(given.data).absolute()) if Path(given.data).exists() else given.data
    curve = CURVE.format(data=data, output=str(output / "curve"), config=choose_size("small"))
    commands = {"tests": ["-m", "pytest", *options, *map(str, marked)], "curve": ["-c", curve]}
    for name, (_, words) in STEPS.items():
        if words:
            commands[name] = ["-m", "tests.tools.bench", *words.split(), "--json", str(output / f"{name}.json")]
            commands[name] += ["--data", data] * name.startswith(("pretrain", "mlm")) + ["--tiny"] * given.tiny
    return {name: commands[name] for name in STEPS if not given.tiny or name.endswith("-base")}


def run_step(name: str, words: list[str], seconds: float, output: Path) -> str:
    """Run a step for at most `seconds`, and return how it ended."""
    start = time.monotonic()
    limited = ["timeout", f"--kill-after={STOP_SECONDS}", f"{seconds:.0f}", sys.executable, *words]
    with (output / f"{name}.log").open("a", encoding="utf-8") as log:
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if "--tiny" in words else {})
        code = subprocess.run(limited, cwd=CHECKOUT, env=environment, stdout=log, stderr=log).returncode
    took = describe_duration(time.monotonic() - start)
    if code == 0:
        (output / f"{name}.done").write_text(f"{took}\n", encoding="utf-8")
        return f"finished in {took}"
    return f"failed with exit code {code} after {took}; see {output / name}.log"
