"""Processes that tests start, and the files of a run without what differs between two of them."""

import json
import time
from contextlib import suppress
from pathlib import Path

TIMINGS = ("runtime", "per_second", "total_flos", "model_preparation_time", "resumed_at")
TASKS = ("ray::do_command", "ray::write_on_ray")  # titles of the processes of our Ray tasks
LEFT_OUT = ("checkpoint-", "first/", "best/")  # a study keeps none of them


def wait_until(condition, seconds=60):
    """Wait for a condition, and return whether it became true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid):
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def list_children(pid):
    """Return the descendants of a process."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return children + [other for child in children for other in list_children(child)]


def list_tasks(pid):
    """Return the descendants of a process that do one of our Ray tasks."""
    found = []
    for child in list_children(pid):
        with suppress(OSError):
            title = Path(f"/proc/{child}/cmdline").read_text()
            found += [child] if title.startswith(TASKS) else []
    return found


def read_run(output):
    """Return the files of a run by name, without dates, durations, resumptions and what a study does not keep."""
    found = {}
    for path in Path(output).rglob("*"):
        name = path.relative_to(output).as_posix()
        if path.is_file() and not name.startswith(LEFT_OUT):
            found[name] = path.read_bytes()
    environment = json.loads(found.pop("environment.json"))
    log = [json.loads(line) for line in found.pop("training_log.jsonl").splitlines()]
    found |= {"environment": {key: value for key, value in environment.items() if key != "date"}}
    return found | {"log": [drop_timings(entry) for entry in log]}


def drop_timings(values):
    return {key: value for key, value in values.items() if not key.endswith(TIMINGS)}
