"""Measure this package and plain transformers, from a checkout.

    python -m tests.tools.bench train|predict|serve|profile|scale|gpu [options]

Each ends within ten minutes on two cores, unless options ask for more. Ctrl-C and SIGTERM end it earlier: it then
prints the medians of the rounds so far. It needs neither typer nor rich.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import transformers

from bertkit.errors import UsageError
from bertkit.system.files import write_json
from bertkit.system.signals import Interrupted
from bertkit.training.run_dir import describe_environment
from tests.tools.bench.measure import Record, format_rows

STOPPED = "stopped before its end"


def main(words: Sequence[str]) -> int:
    """Run a bench, print its rows, write its JSON, and return the exit code."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.tools.bench", description=__doc__, formatter_class=plain)
    parser.add_argument("bench", choices=("train", "predict", "serve", "profile", "scale", "gpu"))
    name = parser.parse_args(words[:1]).bench
    module = import_module(f"tests.tools.bench.{name}")
    parser = argparse.ArgumentParser(f"{parser.prog} {name}", description=module.__doc__, formatter_class=plain)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--minutes", type=float, default=9.0, help="no round begins that may not end by then")
    parser.add_argument("--tiny", action="store_true", help="rehearse in seconds with other sizes")
    module.add_options(parser)
    given = parser.parse_args(words[1:])
    vars(given).update(module.TINY if given.tiny else {})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record = Record(" ".join((parser.prog, *words[1:])), describe_environment(), time.monotonic() + 60 * given.minutes)
    try:
        module.bench(given, record)
    except (KeyboardInterrupt, Interrupted):
        record.failure = STOPPED
    except UsageError as error:
        record.failure = str(error)
    print("", *format_rows(record), sep="\n", flush=True)
    if given.json:
        write_json(asdict(record), given.json)
    return 130 if record.failure == STOPPED else int(bool(record.failure))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
