"""Run commands with budgets while other processes come and go, and compare the time used with the budgets.

$ python -m tests.studies.keep_budgets GLUE WNUT MODEL [MINUTES …]   # by default ten budgets between 2 and 12 minutes

GLUE is the folder with RTE, WNUT that of WNUT-17, MODEL a checkpoint. The budgets are given to WNUT-17 and RTE in turn,
each with another seed. Prints a line of a Markdown table for each command. The load is that of up to two busy
processes, whose number changes after 5 to 40 seconds. Not a test: it takes 50 minutes.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

BUDGETS = (2, 4, 3, 4, 3, 5, 4, 6, 5, 12)  # minutes
BUSY = [sys.executable, "-c", "while True: sum(range(10**6))"]
MOST_BUSY = 2
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


def keep_budget(minutes: float, words: list[str], seed: int, folder: Path) -> str:
    """Run a command with a budget under a changing load, and return the cells of the table."""
    words = [*words, "--budget", f"{minutes:g}m", "--set", f"train.seed={seed}"]
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
        return f"{used:.1f} | {done.stderr.strip()} | | |"
    metrics = json.loads((folder / "metrics.json").read_bytes())
    trials = len(list(folder.glob("search/recipes/trial-*.toml")))
    late = "late" if used > 60 * minutes else f"{60 * minutes - used:.1f}"
    return f"{used:.1f} | {late} | {trials} | {metrics['updates']} | {100 * metrics['score']:.1f} |"


def main(glue: str, wnut: str, model: str, *minutes: str) -> None:
    """Print the table."""
    tasks = {"WNUT-17": ["ner", "--data", wnut], "RTE": ["glue", "--task", "rte", "--data", glue]}  # in turn
    print("| budget | task, seed | seconds used | unused | trials | updates of the last training | score |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for number, budget in enumerate(map(float, minutes or BUDGETS)):
        round_, name = number // len(tasks), list(tasks)[number % len(tasks)]
        with TemporaryDirectory() as folder:
            cells = keep_budget(budget, [*tasks[name], "--model", model], round_ + 1, Path(folder) / "run")
        print(f"| {budget:g} min | {name}, {round_ + 1} | {cells}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
