"""The program: `bertkit`, or `python -m bertkit`, so that `torchrun -m bertkit …` and `accelerate launch -m …` work."""

import signal


def main() -> None:
    """Runs the command line; until that is imported, Ctrl-C ends the process without a word, as SIGTERM does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bertkit import cli

    cli.main()


if __name__ == "__main__":
    main()
