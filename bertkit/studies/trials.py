"""The trials of a search, as Optuna sees them, in a journal that survives kills.

A trial is written to the journal in one piece when it is over. The journal is read into memory at the start, so the
trial of a killed process leaves no trace there, and the same values are proposed again.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from bertkit.errors import explain_damage

JOURNAL = "optuna.log"
REDUCTION = 3  # one of three trials goes on (Li et al. 2020)


class TrialResult(msgspec.Struct, forbid_unknown_fields=True):
    """The outcome of a trial: its last score and updates, and why it has no score or has ended early."""

    score: float | None
    updates: int
    reason: str


class Trials:
    """The trials of a search in a folder that no other process writes to.

    Args:
        seed: Seed of the proposals, with the number of the trial.

    Attributes:
        done: The trials that are over, in order.
    """

    def __init__(self, folder: Path, lower_is_better: bool, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path, direction = folder / JOURNAL, "minimize" if lower_is_better else "maximize"
        cut_last_line(path)
        lock = JournalFileOpenLock(str(path))  # a file, because links are refused in directories of runs
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
        self.study = optuna.create_study(direction=direction, pruner=pruner)
        self.seed = seed
        self.trial: Trial
        with explain_damage(path, folder):
            storage = JournalStorage(JournalFileBackend(str(path), lock))
            self.journal = optuna.create_study(
                storage=storage, study_name="search", direction=direction, load_if_exists=True
            )
            self.done: list[FrozenTrial] = self.journal.get_trials()
            for trial in self.done:
                msgspec.convert(trial.user_attrs, TrialResult)
                self.study.add_trial(trial)

    def ask(self, axes: Mapping[str, BaseDistribution], first: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trial, and return its values: `first` in the first trial, else those that TPE proposes."""
        if not self.done:
            self.study.enqueue_trial(dict(first))
        draw = np.random.SeedSequence([self.seed, len(self.done)]).generate_state(1)
        self.study.sampler = optuna.samplers.TPESampler(seed=int(draw[0]))
        self.trial = self.study.ask(dict(axes))
        return self.trial.params

    def is_bad(self, stage: int, score: float) -> bool:
        """Return whether the trial should end after a score.

        Args:
            stage: 0 for the first score of a trial, 1 for the second.
        """
        self.trial.report(score, REDUCTION**stage)
        return self.trial.should_prune()

    def end(self, state: TrialState, value: float | None, updates: int, reason: str) -> FrozenTrial:
        """End the trial, and write it to the journal.

        Args:
            value: The last score; None without one.
            reason: Why the trial has no score, or has ended early.
        """
        for name, content in msgspec.structs.asdict(TrialResult(value, updates, reason)).items():
            self.trial.set_user_attr(name, content)
        found = self.study.tell(self.trial, value if state == TrialState.COMPLETE else None, state)
        self.journal.add_trial(found)
        self.done.append(found)
        return found

    def find_best(self) -> dict[str, Any]:
        """Return the values of the best completed trial, the first of equal ones; empty without one."""
        completed = [trial for trial in self.done if trial.state == TrialState.COMPLETE]
        sign = -1 if self.study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
        return min(completed, key=lambda trial: sign * trial.value).params if completed else {}


def cut_last_line(path: Path) -> None:
    """Remove the line of a journal that a killed process has not written completely, and its lock."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists():
        size = path.read_bytes().rfind(b"\n") + 1
        if size < path.stat().st_size:
            os.truncate(path, size)
