"""Run the program: `bertkit`, `python -m bertkit`, `torchrun -m bertkit …` or `accelerate launch -m bertkit …`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line.

    Until `bertkit.cli` is imported, Ctrl-C ends the process without a message, as SIGTERM does.
    """
    if sys.argv[1:2] != ["serve"]:  # waiting threads sleep soon, see recipes/notebook/faults.md
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bertkit import cli

    cli.main()


if __name__ == "__main__":
    main()
