"""The results of a study, in the form in which `study.json` holds them.

`bertkit.studies.results` makes them from the run directories; all others read them here.
"""

from pathlib import Path
from typing import Any

import msgspec

from bertkit.system.files import write_json
from bertkit.training.run_dir import read_record

STUDY_RESULT = "study.json"  # beside the runs of a study


class RunState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of a run; fields that its status does not have are not written."""

    status: str  # waiting, running, finished or failed
    metrics: dict[str, Any] = {}  # the content of a finished run's metrics.json
    failure: str = ""  # why the run has failed
    update: int | None = None  # updates done by a run at work
    updates: int | None = None  # updates in all of a run at work; 0 if that is not known yet
    loss: float | msgspec.UnsetType | None = msgspec.UNSET  # the latest training loss of a run at work, or null


class StudyRun(RunState):
    """A run of a cell, or the result of an ensemble."""

    seed: int
    directory: str  # relative to the study's, as all directories here


class PretrainingScore(msgspec.Struct):
    """A score of a pretraining on held-out text, as tables show it."""

    name: str
    unit: str
    value: float


class StudyPretraining(RunState):
    """A pretraining that rows start from, with the state of its run."""

    rows: list[str]
    directory: str
    steps: list[int]  # updates before the last one whose models rows start from
    scores: list[PretrainingScore]


class StudyColumn(msgspec.Struct, omit_defaults=True):
    """A column: the metric, the data that it is measured on, and the published scores."""

    task: str
    metric: str  # a key of metrics.json
    name: str  # the name of the metric
    unit: str
    lower_is_better: bool
    split: str  # the data that the values are measured on
    published: dict[str, float]  # scores that the task knows, by system; none for a person's own data
    paper: str  # a note on the paper's values
    baselines: dict[str, str] = {}  # trained baselines -> the keys of their scores, without `published`


class StudyRow(msgspec.Struct):
    """A row: the values of the paper, and the start of its runs."""

    paper: dict[str, float]  # the paper's values by column
    pretraining: str | None  # the directory of the pretraining that the row starts from
    step: int | None  # the update of the pretraining that the row starts from; None for the last


class StudyCell(msgspec.Struct, kw_only=True):
    """A row, column and setting with its runs and the statistics over the finished ones; None if undefined."""

    row: str
    column: str
    task: str
    setting: dict[str, Any]  # the value of each axis of the grid
    directory: str
    is_pretraining: bool = False  # whether the cell shows the pretraining of its row
    runs: list[StudyRun]
    n: int  # finished runs that have the column's metric
    failed: int
    mean: float | None
    sd: float | None  # with n - 1
    best: float | None
    at_or_below_majority: int | None  # runs that are no better than always giving the same answer


class StudyWinner(msgspec.Struct):
    """The chosen setting and run of a row and column."""

    row: str
    column: str
    task: str
    setting: dict[str, Any]
    cell: str  # the directory of the cell
    run: str  # the directory of the run
    seed: int
    score: float
    decided_by: float  # the score that was compared: `tune_score` if the run has one
    value: float | None  # the metric that the column shows
    of_settings: int  # settings and runs that were compared
    of_runs: int


class StudyResults(msgspec.Struct):
    """The content of study.json: plain, reproducible values, without times and hardware."""

    definition: dict[str, Any]  # as in study.toml
    finished: bool  # whether every run is finished or failed
    runs: int
    over: int  # runs that are finished or failed
    failed: int
    columns: dict[str, StudyColumn]
    rows: dict[str, StudyRow]
    pretrainings: list[StudyPretraining]
    cells: list[StudyCell]
    chosen: list[StudyWinner]

    @classmethod
    def read(cls, folder: Path) -> "StudyResults":
        """Read the results of the study in a directory."""
        return read_record(folder / STUDY_RESULT, cls)

    def write(self, folder: Path) -> None:
        """Write the results into the directory of their study."""
        write_json(msgspec.to_builtins(self), folder / STUDY_RESULT)
