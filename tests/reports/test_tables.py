"""Numbers in tables, and a table as text."""

import pytest

from bertkit.reports.tables import ScoreLine, TableCell, format_text, make_table, show_number


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0.000"),
        (0.9894, "0.989"),
        (-2.5, "-2.500"),
        (1990.3, "1990.300"),
        (627_812.5, "627800"),
        (5.14e-5, "0.0000514"),
        (-17_362_810_300.1, "-17360000000"),
    ],
)
def test_a_number_is_never_shown_as_zero_or_with_an_exponent(number, shown):
    assert show_number(number) == shown
    assert ScoreLine("root mean squared error", "rmse").show(number) == shown


def test_a_table_as_text_has_a_line_for_each_line_of_a_cell():
    scores = TableCell((("75.6", "frozen vectors"), ("1.1", "a constant answer")))
    table = make_table(
        "new rows", ["held out", "baseline", "score"], [["macro F1 (%)", scores, "80.2"], ["ECE", "", "5"]]
    )
    assert format_text(table).splitlines() == [
        "new rows",
        "held out      baseline               score",
        "macro F1 (%)  75.6 frozen vectors    80.2",
        "              1.1 a constant answer",
        "ECE                                  5",
    ]
