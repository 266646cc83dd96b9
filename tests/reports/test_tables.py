"""Numbers in tables."""

import pytest

from bertkit.reports.tables import ScoreLine, show_number


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
