"""Run the steps of a GPU campaign, each in its own process, within a total time and from where they were cut off.

In the output directory, `NAME.json` holds the figures of a finished step, which is not repeated; `NAME.failed.json` the
reason of a failed one, which the next call tries again; `NAME.log` its output.

A step gets its own process so that running out of memory, a fault of a kernel or a hang cannot affect the others.

Left out: the steps themselves (`campaign_steps`) and the page (`campaign_page`).
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError, explain_failure, explain_refusal
from bertkit.system.files import hold_directory, write_json
from bertkit.system.progress import Report, describe_duration
from bertkit.system.signals import follow_parent

FAILED = ".failed.json"
FAILURE = "failure"  # key of a step's figures: the reason why they count as failed
STOP_SECONDS = 20.0  # in which a step that is cut off may save its state; reserved in the total time
SLACK = 3  # multiple of its expected time after which a step has failed


@dataclass(frozen=True)
class Campaign:
    """The settings of a campaign.

    Attributes:
        data: Folder that may hold `text` and `squad`.
        model: MiniLM checkpoint to fine-tune; None uses random weights.
        recipe: Recipe of the pretraining whose curve is measured; None leaves that out.
        tiny: Whether this is a rehearsal with tiny sizes on the CPU.
    """

    output: Path
    data: Path | None = None
    model: str | None = None
    recipe: Path | None = None
    tiny: bool = False


@dataclass(frozen=True)
class Step:
    """A step: its expected seconds, and the function that returns its figures for JSON.

    The function must be importable by name, because another process calls it.
    """

    seconds: float
    run: Callable[[Campaign, Report], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The end of a step: its figures, the reason if it failed, or neither if it was cut off."""

    found: Mapping[str, Any] | None = None
    failure: str = ""


Execute = Callable[[Step, Campaign, Path, float, Report], Outcome]


def run_in_process(step: Step, campaign: Campaign, log: Path, seconds: float, report: Report) -> Outcome:
    """Run a step in a new process for at most `seconds`, then stop it with SIGTERM, after STOP_SECONDS with SIGKILL."""
    context = get_context("spawn")  # CUDA does not work in a forked process
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_step, args=(sender, step, campaign, log))
    end = time.monotonic() + seconds
    process.start()
    sender.close()  # the end of the process then closes the pipe
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            message = receiver.recv()
            if isinstance(message, Outcome):
                process.join(STOP_SECONDS)
                return message
            report(f"  {message}")
    except EOFError:
        process.join(STOP_SECONDS)
        return Outcome(failure=f"its process ended with exit code {process.exitcode}; see {log}")
    finally:
        process.terminate()
        process.join(STOP_SECONDS)
        process.kill()
        process.join()
    return Outcome()


def serve_step(sender: Connection, step: Step, campaign: Campaign, log: Path) -> None:
    """Run a step in this process, send its lines and its outcome, and write all other output to its log."""
    follow_parent()
    with log.open("a", encoding="utf-8") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    try:
        found = step.run(campaign, sender.send)
        outcome = Outcome(found, found.get(FAILURE, ""))
    except Exception as error:  # whatever a step raises, the others go on
        traceback.print_exc()
        outcome = Outcome(failure=explain_failure(error))
    sender.send(outcome)


def run_campaign(
    campaign: Campaign,
    steps: Mapping[str, Step],
    minutes: float,
    report: Report,
    execute: Execute = run_in_process,
) -> list[str]:
    """Run the unfinished steps that fit into the time, those that failed before last, and return those that failed.

    Raises:
        UsageError: The output directory is in use, or a rehearsal and a campaign share it.
    """
    end = time.monotonic() + 60 * minutes - STOP_SECONDS
    output, failed = campaign.output, []
    with explain_refusal(f"the directory {output}"), hold_directory(output):
        check_kind(campaign)
        names = sorted(steps, key=lambda name: (output / f"{name}{FAILED}").exists())
        for name in names:
            if (output / f"{name}.json").exists():
                report(f"{name}: finished")
                continue
            left, step = end - time.monotonic(), steps[name]
            if step.seconds > left:
                needed, rest = describe_duration(step.seconds), describe_duration(max(left, 0))
                report(f"{name}: left for the next call; it takes about {needed}, and {rest} are left")
                continue
            report(f"{name}: about {describe_duration(step.seconds)}")
            if record(name, campaign, step, left, report, execute):
                failed.append(name)
    return failed


def record(name: str, campaign: Campaign, step: Step, left: float, report: Report, execute: Execute) -> bool:
    """Run a step, write the file of its outcome, and return whether it failed."""
    limit, start = SLACK * step.seconds, time.monotonic()
    done, failed = campaign.output / f"{name}.json", campaign.output / f"{name}{FAILED}"
    outcome = execute(step, campaign, campaign.output / f"{name}.log", min(limit, left), report)
    seconds, failure = time.monotonic() - start, outcome.failure
    if outcome.found is None and not failure:
        if left < limit:
            report(f"{name}: cut off after {describe_duration(seconds)}; left for the next call")
            return False
        failure = f"it took longer than {describe_duration(limit)}"
    found = {"step": name, "tiny": campaign.tiny, "seconds": seconds, "found": outcome.found}
    if failure:
        write_json({**found, FAILURE: failure}, failed)
        report(f"{name}: failed after {describe_duration(seconds)}: {failure}")
        return True
    write_json(found, done)
    failed.unlink(missing_ok=True)
    report(f"{name}: finished in {describe_duration(seconds)}")
    return False


def check_kind(campaign: Campaign) -> None:
    """Check that a rehearsal and a campaign do not share a directory.

    Raises:
        UsageError: The directory holds figures of the other kind.
    """
    for found in read_records(campaign.output).values():
        if found["tiny"] != campaign.tiny:
            kind = "a rehearsal" if found["tiny"] else "a campaign"
            raise UsageError(f"{campaign.output} holds the figures of {kind}; name another directory with --output")


def read_records(output: Path) -> dict[str, dict[str, Any]]:
    """Read the files of all finished and failed steps, by step."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob("*.json"))]
    return {found["step"]: found for found in records}
