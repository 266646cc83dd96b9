"""The two versions of SQuAD: their names and files, the paper's hyper-parameters and published scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bertkit.reports.tables import ScoreRow

SQUAD_BASE, SQUAD_LARGE = "BERT-base, dev", "BERT-large, dev"  # Tables 2 and 3
ENSEMBLE = "BERT-large, 7 models, dev"  # Table 2
TRIVIAQA, BOTH = "BERT-large, TriviaQA first, dev", "BERT-large, 7 models, TriviaQA first, dev"  # Table 2


@dataclass(frozen=True)
class Version:
    """A row of the table below.

    Attributes:
        number: The version on the command line.
        release: The version in the names of the files.
        hub: The copy on the Hub.
        batch_size: The paper's.
        epochs: The paper's.
        unanswerable: Whether a context may have no answer.
        exact: The name of exact match in metrics.json.
        paper: Metric -> model -> published score.
        combined: The same for ensembles.
    """

    number: int
    release: str
    hub: str
    batch_size: int
    epochs: float
    unanswerable: bool
    exact: str
    paper: Mapping[str, Mapping[str, float]]
    combined: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the task's name."""
        return f"squad{self.number}"


VERSIONS = (
    Version(
        number=1,
        release="1.1",
        hub="rajpurkar/squad",
        batch_size=32,
        epochs=3.0,
        unanswerable=False,
        exact="exact_match",
        paper={
            "exact_match": {SQUAD_BASE: 80.8, SQUAD_LARGE: 84.1, TRIVIAQA: 84.2},
            "f1": {SQUAD_BASE: 88.5, SQUAD_LARGE: 90.9, TRIVIAQA: 91.1},
        },
        combined={"exact_match": {ENSEMBLE: 85.8, BOTH: 86.2}, "f1": {ENSEMBLE: 91.8, BOTH: 92.2}},
    ),
    Version(
        number=2,
        release="2.0",
        hub="rajpurkar/squad_v2",
        batch_size=48,
        epochs=2.0,
        unanswerable=True,
        exact="exact",
        paper={"exact": {SQUAD_LARGE: 78.7}, "f1": {SQUAD_LARGE: 81.9}},
    ),
)


def list_score_rows(version: Version) -> tuple[ScoreRow, ...]:
    """Return the lines of a version's table."""
    rows = []
    for name, key in (("EM", version.exact), ("F1", "f1")):
        baselines = {"never answering": f"majority_{key}"} if version.unanswerable else {}
        rows.append(ScoreRow(name, key, baselines, "percent", version.paper[key]))
    if version.unanswerable:
        rows += [
            ScoreRow("EM, tau = 0", "tau0_exact", unit="percent"),
            ScoreRow("F1, tau = 0", "tau0_f1", unit="percent"),
            ScoreRow("EM, answerable", "HasAns_exact", unit="percent"),
            ScoreRow("F1, answerable", "HasAns_f1", unit="percent"),
            ScoreRow("EM, unanswerable", "NoAns_exact", unit="percent"),
            ScoreRow("tau", "tau"),
        ]
    tests = [ScoreRow(f"{row.name}, test", f"test_{row.key}", {}, row.unit) for row in rows]
    return (*rows, *tests)
