"""Run commands with budgets while other processes come and go, and compare the time used with the budgets.

$ python -m tests.studies.keep_budgets GLUE MODEL [MINUTES …]   # by default ten budgets between 2 and 12 minutes

GLUE is the folder with RTE and STS-B, MODEL a checkpoint. Prints a line of a Markdown table for each command. The load
is that of up to three busy processes, whose number changes after 5 to 40 seconds. Not a test: it takes more than an
hour.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

BUDGETS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12)  # minutes
TASKS = ("rte", "stsb")  # in turn
BUSY = [sys.executable, "-c", "while True: sum(range(10**6))"]
MOST_BUSY = 3
SECONDS_OF_LOAD = (5, 40)


def change_load(seed: int, over: Event) -> None:
    """Start and stop busy processes until `over` is set."""
    draw, busy = random.Random(seed), []
    try:
        while not over.is_set():
            wanted = draw.randint(0, MOST_BUSY)
            while len(busy) > wanted:
                busy.pop().kill()
            while len(busy) < wanted:
                busy.append(subprocess.Popen(BUSY))
            over.wait(draw.uniform(*SECONDS_OF_LOAD))
    finally:
        for process in busy:
            process.kill()


def keep_budget(minutes: float, task: str, glue: str, model: str, folder: Path) -> str:
    """Run a command with a budget under a changing load, and return the line of the table."""
    words = ["glue", "--task", task, "--data", glue, "--model", model, "--budget", f"{minutes:g}m"]
    over = Event()
    load = Thread(target=change_load, args=(int(60 * minutes), over))
    load.start()
    began = time.monotonic()
    try:
        command = [sys.executable, "-m", "bertkit", *words, "--output", folder]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        used = time.monotonic() - began
    finally:
        over.set()
        load.join()
    if done.returncode:
        return f"| {minutes:g} min | {task} | {used:.1f} | {done.stderr.strip()} | | | |"
    metrics = json.loads((folder / "metrics.json").read_bytes())
    table = folder / "search" / "study.json"
    trials = json.loads(table.read_bytes())["runs"] if table.exists() else 0
    late = "late" if used > 60 * minutes else f"{60 * minutes - used:.1f}"
    return (
        f"| {minutes:g} min | {task} | {used:.1f} | {late} | {trials} | {metrics['updates']} | {metrics['score']:.3f} |"
    )


def main(glue: str, model: str, *minutes: str) -> None:
    """Print the table."""
    print("| budget | task | seconds used | unused | trials | updates of the last training | score |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for number, budget in enumerate(map(float, minutes or BUDGETS)):
        with TemporaryDirectory() as folder:
            task = TASKS[number % len(TASKS)]
            print(keep_budget(budget, task, glue, model, Path(folder) / "run"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
