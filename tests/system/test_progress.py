"""Lines about long work."""

from bertkit.system.progress import ShareDone


def test_lines_on_long_work_become_rarer(monkeypatch):
    lines, now = [], 100.0  # seconds
    monkeypatch.setattr("time.monotonic", lambda: now)
    share = ShareDone(lines.append, "predicted")
    for done in range(1, 101):  # one part a second
        share.note(done, 100)
        now += 1
    assert lines == ["  16% predicted, 1 min 24 s left", "  46% predicted, 54 s left"]
