"""Durations, and the time of a command over all of its starts."""

import json
import time

import pytest

from bertkit.errors import UsageError
from bertkit.system.clock import RECORDED_EVERY, Clock, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("1h30m", 5400), (" 1H 30M ", 5400), ("2d", 172_800)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "20", "m", "-5m", "0s", "20 minutes", "1e9h", "9" * 50 + "d", "5m and more"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match=r"is not a duration; write for example 90s, 20m, 1\.5h or 1h30m"):
        parse_duration(text)


def test_the_time_of_earlier_starts_counts(tmp_path):
    path = tmp_path / "run/.time.json"
    first = Clock(100.0, time.monotonic() - 30)
    with first.keep(path):
        assert json.loads(path.read_text())["seconds"] == pytest.approx(30, abs=1)
        time.sleep(1.5 * RECORDED_EVERY)
    assert json.loads(path.read_text())["seconds"] >= 30 + RECORDED_EVERY
    second = Clock(100.0, time.monotonic())
    with second.keep(path):
        assert second.left == pytest.approx(100 - 31 - RECORDED_EVERY, abs=1)
    path.write_text("damaged")
    with Clock(100.0, time.monotonic()).keep(path) as _:
        assert json.loads(path.read_text())["seconds"] < 1


def test_the_clock_begins_with_the_process():
    assert 0 < Clock(10.0).used < 3600 * 24
    assert Clock(10.0).used >= time.process_time() / 64
