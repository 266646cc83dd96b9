"""The model in transformers' tests of models, beside transformers' BERT.

    python -m tests.peer

Downloads the source distribution of the installed transformers when it is asked for the first time, runs the tests of
its mixin with our classes under each attention implementation and with transformers' classes as control, and prints a
table. Fails if a test fails or is skipped with ours that passes with the control and is not in `cases.DIFFERENCES`, or
if one that is listed there does not differ. Not a test: it takes minutes.
"""

import argparse
import multiprocessing
import platform
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import torch
import transformers

import bertkit
from tests.peer import source
from tests.peer.cases import CONTROL, DIFFERENCES, OURS, SIDES
from tests.peer.run import Outcome, run_side

KINDS = ("passed", "failed", "skipped", "differs")


def judge(side: str, outcomes: dict[str, Outcome], control: dict[str, Outcome], pattern: str) -> list[str]:
    """Mark the outcomes of one of our sides that differ on purpose; return one line for each fault."""
    faults, differing = [], set()
    for name, outcome in outcomes.items():
        test, expected = name.split(".")[1], control[name].kind
        known = DIFFERENCES.get(test)
        if outcome.kind == "passed":
            continue
        if known and side in known.sides and all(known.message in message for message in outcome.messages):
            outcome.kind = "differs"
            differing.add(test)
        elif expected == "passed" or (outcome.kind == "failed" and expected == "skipped"):
            faults.append(f"{side}, {outcome.kind}: {describe(name, outcome)}")
    for test, known in DIFFERENCES.items():
        if pattern in test and side in known.sides and test not in differing:
            faults.append(f"{side}, does not differ as listed: {test}")
    return faults


def describe(name: str, outcome: Outcome) -> str:
    """Return one line with a test's name and the first of its messages."""
    more = f" (and {len(outcome.messages) - 1} more)" if len(outcome.messages) > 1 else ""
    return f"{name}: {outcome.messages[0][:200]}{more}"


def tabulate(results: dict[str, dict[str, Outcome]]) -> str:
    """Return a Markdown table with a row for each side."""
    lines = ["| side | ran | passed | failed | skipped | differs on purpose |", "|---|---|---|---|---|---|"]
    for side, outcomes in results.items():
        counts = Counter(outcome.kind for outcome in outcomes.values())
        lines.append(f"| {side} | {len(outcomes)} | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all sides, two at a time, and print the table, what failed and what differs on purpose."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer", description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="TEXT", default="", help="run only the tests whose names contain this text")
    pattern = parser.parse_args().k
    source.fetch()
    versions = {"transformers": transformers, "torch": torch, "bertkit": bertkit}
    print(", ".join(f"{name} {module.__version__}" for name, module in versions.items()), end=", ")
    print(f"Python {platform.python_version()}\n", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        results = dict(zip(SIDES, pool.map(run_side, SIDES, [pattern] * len(SIDES)), strict=True))

    control = results[CONTROL]
    faults = [fault for side in OURS for fault in judge(side, results[side], control, pattern)]
    print(tabulate(results))
    print("\nFailures:\n")
    faults_of_control = [describe(*item) for item in control.items() if item[1].kind == "failed"]
    print("\n".join(f"- {line}" for line in [*faults, *(f"{CONTROL}: {x}" for x in faults_of_control)]) or "None.")
    print("\nIntended differences:\n")
    for test, known in DIFFERENCES.items():
        print(f"- {test} ({', '.join(known.sides)}): {known.reason}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
