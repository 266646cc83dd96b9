"""Run the cases of one side and record the outcome of each test."""

import os
import unittest
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field

from bertkit.model.packing import PACKED
from tests.peer.cases import CASES, CONTROL, default_to, make_case


@dataclass
class Outcome:
    """Hold "passed", "failed" or "skipped", with the messages of the failures or the skips."""

    kind: str = "passed"
    messages: list[str] = field(default_factory=list)


class Recorder(unittest.TestResult):
    """Record the outcome of each test by case and name; of its subtests the worst one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._find(test)

    def addError(self, test: unittest.TestCase, error: tuple) -> None:
        self._fail(test, error[1])

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: tuple | None) -> None:
        if error is not None:
            self._fail(test, error[1])

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        outcome = self._find(getattr(test, "test_case", test))  # the test of a subtest
        if outcome.kind != "failed":
            outcome.kind = "skipped"
            outcome.messages.append(reason)

    def _fail(self, test: unittest.TestCase, error: BaseException) -> None:
        outcome = self._find(test)
        if outcome.kind != "failed":
            outcome.kind, outcome.messages = "failed", []
        outcome.messages.append(" ".join(f"{type(error).__name__}: {error}".split()))

    def _find(self, test: unittest.TestCase) -> Outcome:
        """Return the outcome of a test, which is filed under a name such as `Encoder.test_training`."""
        return self.outcomes[".".join(test.id().split(".")[-2:])]


def run_side(side: str, pattern: str) -> dict[str, Outcome]:
    """Run one side's tests whose names contain the pattern; meant for a process of its own, which it silences."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    recorder = Recorder()
    with nullcontext() if side in (PACKED, CONTROL) else default_to(side):
        for name in CASES:
            case = make_case(name, side)
            tests = (test for test in unittest.defaultTestLoader.getTestCaseNames(case) if pattern in test)
            unittest.TestSuite(map(case, tests)).run(recorder)
    return dict(recorder.outcomes)
