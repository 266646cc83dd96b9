"""The verdict is one sentence of a fixed form."""

import pytest

from bertkit.reports.tables import ScoreLine
from bertkit.reports.verdict import describe_verdict

ROW = ScoreLine("macro F1", "f1", {"TF-IDF": "tfidf_f1", "frozen vectors": "frozen_f1"}, "fraction")
METRICS = {"f1": 0.862, "f1_low": 0.8391, "f1_high": 0.884, "tfidf_f1": 0.821, "frozen_f1": 0.8501}


def test_a_score_stands_beside_its_baselines_the_best_first():
    assert describe_verdict(ROW, METRICS, 1200) == (
        "macro F1 86.2 % (83.9 to 88.4) on 1,200 held-out rows; 1.2 points above frozen vectors, 4.1 above TF-IDF"
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"frozen_f1": 0.9}, "; 3.8 points below frozen vectors, 4.1 above TF-IDF"),
        ({"frozen_f1": 0.8621}, "; as good as frozen vectors, 4.1 above TF-IDF"),
    ],
)
def test_a_score_below_or_equal_says_so(changed, expected):
    assert describe_verdict(ROW, METRICS | changed, 1).endswith(f" on 1 held-out row{expected}")


def test_numbers_without_a_unit_and_unknown_parts_are_left_out():
    assert describe_verdict(ScoreLine("perplexity", "perplexity"), {"perplexity": 5.0}) == "perplexity 5.000"
    row = ScoreLine("perplexity", "perplexity", {"a guess": "guess"})
    assert describe_verdict(row, {"perplexity": 5.0, "guess": 9.0}, 3) == (
        "perplexity 5.000 on 3 held-out rows; 4.000 below a guess"
    )
