"""Measure how long commands take from a cold process to their first result, in two checkouts in turn.

    python -m tests.start RUN GLUE MODEL --before CHECKOUT

RUN is a finished classifier, GLUE the folder with RTE, MODEL a checkpoint. Prints a Markdown table with the medians of
the time to the awaited line and of the CPU time; the latter depends less on what else the machine does. Every command
is stopped at its line. Not a test: it takes minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]


def list_commands(run, glue, model):
    """Return the name of each command, its words, and a text in the line that is waited for."""
    rte = ["glue", "--task", "rte", "--model", model, "--data", glue, "--set", "train.max_steps=1"]
    return {
        "--help": (["--help"], "╰"),
        "an unknown task": (["glue", "--task", "mnlii"], "bertkit: "),
        "a missing folder": (["squad", "--version", "2", "--model", model, "--data", "nowhere"], "bertkit: "),
        "an unknown key": ([*rte, "--set", "data.max_lenght=64"], "bertkit: "),
        "an unknown key of [train]": ([*rte, "--set", "train.learning_rat=1"], "bertkit: "),
        "predict, the answer": (["predict", run, "a fine film"], "%)"),
        "serve, ready": (["serve", run, "--port", "0"], "http://"),
        "glue --dry-run": ([*rte, "--dry-run"], "dry run"),
        "glue, the first update": (rte, "update 1 of 1"),
    }


def time_command(checkout, words, awaited):
    """Return the seconds until a line of the command has the awaited text, and the CPU seconds until its stop."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "bertkit", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            if awaited in line:
                break
        else:
            sys.exit(f"{' '.join(words)} in {checkout} did not print {awaited!r}:\n{''.join(lines)}")
        seconds = time.perf_counter() - start
        process.kill()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # so that its destructor does not wait for it
        process.stdout.close()
        return seconds, used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=os.path.abspath)
    parser.add_argument("glue", type=os.path.abspath)
    parser.add_argument("model", type=os.path.abspath)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of the names of the commands to measure")
    given = parser.parse_args()
    checkouts = [*([given.before.resolve()] if given.before else []), HERE]
    print("| seconds (CPU seconds) |", " | ".join(["before", "after", "ratio"] if given.before else ["now"]), "|")
    print("|---|", "---|" * (2 * len(checkouts) - 1), sep="")
    for name, (words, awaited) in list_commands(given.run, given.glue, given.model).items():
        if given.only not in name:
            continue
        found = {checkout: [] for checkout in checkouts}
        for _ in range(given.rounds):
            for checkout in checkouts:
                found[checkout].append(time_command(checkout, words, awaited))
        medians = [tuple(map(median, zip(*times, strict=True))) for times in found.values()]
        cells = [f"{seconds:.2f} ({cpu:.2f})" for seconds, cpu in medians]
        if given.before:
            cells.append(f"{medians[1][0] / medians[0][0]:.2f} ({medians[1][1] / medians[0][1]:.2f})")
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
