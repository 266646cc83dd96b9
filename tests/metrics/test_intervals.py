"""The intervals of scores and of differences, beside scipy and statsmodels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from bertkit.metrics import intervals
from bertkit.metrics.intervals import (
    Contrast,
    Interval,
    adjust_p_values,
    compare_methods,
    compute_mcnemar,
    estimate_factor,
    estimate_interval,
    limit_samples,
)
from bertkit.metrics.rows import (
    WeightedScore,
    measure_classes,
    measure_gaps,
    measure_label,
    measure_mean,
    measure_numbers,
    measure_ranking,
)

# --- The interval of a score ------------------------------------------------------------------------------------------


def repeat_answers(right, count):
    """Return the accuracy of `count` rows with `right` right ones."""
    return measure_mean(np.arange(count) < right)


def predict_numbers(count):
    """Return values with a correlation to labels, both with ties."""
    values = np.random.default_rng(0).normal(size=count)
    return values.round(1), (values + np.random.default_rng(1).normal(size=count)).round()


@pytest.mark.parametrize(("right", "count"), [(0, 1), (3, 3), (2, 3), (0, 277), (162, 277), (276, 277), (277, 277)])
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(right, count):
    found = estimate_interval(repeat_answers(right, count))
    assert found == pytest.approx(proportion_confint(right, count, method="beta"), abs=1e-12)
    percent = estimate_interval(measure_mean(np.arange(count) < right, percent=True))
    assert percent == pytest.approx([100 * limit for limit in found])


@pytest.mark.parametrize("name", ["roc_auc", "average_precision", "spearmanr"])
def test_rows_are_sorted_once_for_several_samples(name, monkeypatch):
    """As many blocks of few samples, each of which sorts the rows, give the same interval."""
    labels = np.random.default_rng(0).integers(0, 2, 3000)
    values = labels + np.random.default_rng(1).normal(size=3000)
    scores = measure_ranking(values[:, None], labels[:, None] == 1) | measure_numbers(values, labels)
    usual = estimate_interval(scores[name])
    blocks, score = [], WeightedScore.score
    monkeypatch.setattr(
        WeightedScore, "score", lambda self, weights: blocks.append(len(weights)) or score(self, weights)
    )
    monkeypatch.setattr(intervals, "WEIGHTS_A_BLOCK", 1)
    assert estimate_interval(scores[name]) == pytest.approx(usual, rel=1e-12)
    assert blocks == [16] * 125
    monkeypatch.setattr(intervals, "SAMPLES_A_SORT", 1)
    assert estimate_interval(scores[name]) == pytest.approx(usual, rel=1e-12)
    assert len(blocks) == 125 + 2000


def test_precision_and_recall_of_a_label_are_shares_of_some_rows():
    """The label has 40 predicted and 50 correct rows, 30 of them the same; one that is never predicted is unknown."""
    found, wanted = np.arange(100) < 40, (np.arange(100) >= 10) & (np.arange(100) < 60)
    scores = measure_label(found, wanted)
    assert estimate_interval(scores["precision"]) == estimate_interval(repeat_answers(30, 40))
    assert estimate_interval(scores["recall"]) == estimate_interval(repeat_answers(30, 50))
    assert estimate_interval(measure_label(found & False, wanted)["precision"]) == Interval(0.0, 1.0)


@pytest.mark.parametrize("name", ["mean", "spearmanr", "matthews_correlation"])
def test_the_interval_is_near_scipys_percentiles(name):
    values, labels = predict_numbers(200)
    classes = (values > 0).astype(int), (labels > 0).astype(int)
    scores = measure_numbers(values, labels) | measure_classes(*classes, 2) | {"mean": measure_mean(abs(values) / 4)}
    columns, statistic = {
        "mean": ((abs(values) / 4,), lambda column: column.mean()),
        "spearmanr": ((values, labels), lambda *pair: stats.spearmanr(*pair).statistic),
        "matthews_correlation": (classes, lambda *pair: np.corrcoef(*pair)[0, 1]),
    }[name]
    options = {"method": "percentile", "n_resamples": 1000, "paired": True, "vectorized": False, "rng": 0}
    low, high = stats.bootstrap(columns, statistic, **options).confidence_interval
    assert estimate_interval(scores[name]) == pytest.approx((low, high), abs=0.08 * (high - low))


def test_intervals_at_the_edges():
    """All rows right have the limit of that share; a score that no sample changes has no interval."""
    labels = np.arange(300) % 2
    best = {**measure_label(labels > 0, labels > 0), **measure_classes(labels, labels, 2)}
    best |= measure_ranking(labels[:, None] / 3, labels[:, None] > 0)
    for name in ("f1", "matthews_correlation", "roc_auc"):
        assert estimate_interval(best[name]) == estimate_interval(repeat_answers(300, 300)), name
    assert estimate_interval(measure_numbers(labels, labels)["rmse"]) is None
    constant = measure_numbers(np.full(50, 0.3), np.random.default_rng(0).random(50))
    assert estimate_interval(constant["pearson"]) is None
    assert estimate_interval(measure_label(labels < 0, labels < 0)["f1"]) is None
    assert estimate_interval(measure_gaps(np.ones((5, 1)))) is None


def rank_labels(rows, labels):
    """Return the scores of a ranking in which each row has one of many labels, which is often near the top."""
    rng = np.random.default_rng(3)
    right = rng.integers(labels, size=rows)[:, None] == np.arange(labels)
    return measure_ranking(rng.normal(size=right.shape).round(2) + 1.5 * right, right)


def test_the_work_for_many_labels_is_bounded(monkeypatch):
    """The bound holds for 900 samples of 400 rows and 40 labels; larger rankings and tables of counts have none."""
    full = rank_labels(400, 40)
    expected = {name: estimate_interval(score) for name, score in full.items()}
    assert {limit_samples(score) for score in full.values()} == {2_000}
    monkeypatch.setattr("bertkit.metrics.intervals.MOST_CELLS", (900 * 400 * 40, 900 * 400 * 40))
    for name, score in full.items():
        assert limit_samples(score) == 900, name
        low, high = expected[name]
        assert estimate_interval(score) == pytest.approx((low, high), abs=0.1 * (high - low)), name
    larger = rank_labels(1_000, 100)
    assert [estimate_interval(score) for score in larger.values()] == [None, None]
    classes = np.arange(1_000) % 100
    assert estimate_interval(measure_classes(classes, classes, 100)["macro_f1"]) is None
    assert estimate_interval(measure_mean(classes == 0)) is not None


@pytest.mark.parametrize(("rows", "labels"), [(5_000, 150), (5_000, 77)])
def test_rankings_of_usual_data_sets_have_intervals(rows, labels):
    score = WeightedScore(np.zeros((rows, 2, labels), bool), "roc_auc")
    assert 300 < limit_samples(score) < 1_000
    assert limit_samples(WeightedScore(np.zeros((6_000, 2, 10_000), bool), "roc_auc")) == 0


def draw_population(name, rows=60_000):
    """Return the score of a run on many rows: those of CoLA, or five classes of very different size."""
    rng = np.random.default_rng(2)
    shares = [0.3, 0.7] if name == "matthews_correlation" else [0.5, 0.25, 0.15, 0.07, 0.03]
    labels = rng.choice(len(shares), rows, p=shares)
    predictions = np.where(rng.random(rows) < 0.8, labels, rng.choice(len(shares), rows))
    return measure_classes(predictions, labels, len(shares))[name]


@pytest.mark.parametrize("name", ["matthews_correlation", "macro_f1"])
def test_most_intervals_hold_the_true_score(name):
    """Fewer than 90 % of 200 intervals of 95 % have a chance of 0.2 %."""
    population, rng = draw_population(name), np.random.default_rng(300)
    true = population.score(np.ones((1, len(population))))[0]
    found = [
        estimate_interval(population.take(rng.integers(len(population), size=300)), seed=trial) for trial in range(200)
    ]
    assert np.mean([low <= true <= high for low, high in found]) >= 0.9


# --- Differences ------------------------------------------------------------------------------------------------------


def draw_right(gains, losses, rows=300):
    """Return whether each row is right with either of two models, 200 of them with both."""
    first = np.arange(rows) < 200
    second = first.copy()
    second[200 : 200 + gains] = True
    second[:losses] = False
    return first, second


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (4, 0), (1, 8), (30, 18), (40, 40)])
def test_mcnemar_is_that_of_statsmodels(gains, losses):
    found = compute_mcnemar(*draw_right(gains, losses))
    assert found == pytest.approx(mcnemar([[200, losses], [gains, 60]], exact=True).pvalue, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holms_correction_is_that_of_statsmodels(values):
    assert adjust_p_values(values) == pytest.approx(multipletests(values, method="holm")[1].tolist(), abs=1e-12)


@pytest.mark.parametrize(("gains", "losses"), [(4, 0), (1, 8), (6, 0), (30, 18), (45, 25)])
def test_the_p_value_of_an_accuracy_is_near_the_mid_p(gains, losses):
    first, second = draw_right(gains, losses)
    found = compare_methods([measure_mean(first)], [measure_mean(second)])
    both = stats.binom(gains + losses, 0.5)
    mid = both.cdf(min(gains, losses)) - both.pmf(min(gains, losses)) / 2
    assert found.p == pytest.approx(min(2 * mid, 1), abs=0.065)
    assert found.value == pytest.approx((gains - losses) / 3)
    assert (found.low > 0 or found.high < 0) == (found.p < 0.05)


def test_models_that_agree_on_all_rows_are_not_told_apart():
    first, _ = draw_right(0, 0)
    for runs, seed_error in ((1, None), (2, 0.0)):
        found = compare_methods([measure_mean(first)], [measure_mean(first)] * runs)
        assert (found.value, found.low, found.high, found.p, found.seed_error) == (0, 0, 0, 1, seed_error)


def draw_runs(rng, offsets, rows):
    return [measure_mean(rng.random(rows) < 0.8 + offset) for offset in offsets]


def test_many_rows_and_few_seeds_are_welchs_test():
    rng = np.random.default_rng(3)
    offsets = [0.0, 0.02, -0.03, 0.01, -0.01], [0.03, 0.06, 0.02, 0.05]
    runs = [draw_runs(rng, found, 100_000) for found in offsets]
    found = compare_methods(*runs)
    scores = [[score.score(np.ones((1, 100_000)))[0] for score in method] for method in runs]
    assert found.p == pytest.approx(stats.ttest_ind(*scores, equal_var=False).pvalue, abs=0.006)
    assert found.seed_error == pytest.approx(
        100 * np.sqrt(sum(np.var(method, ddof=1) / len(method) for method in scores)), rel=0.01
    )


def test_seeds_that_do_not_matter_leave_the_error_of_the_rows():
    """Three runs a method with equal skill: their scores vary because of the rows alone."""
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found = compare_methods(draw_runs(rng, [0] * 3, 500), draw_runs(rng, [0] * 3, 500))
        errors.append((found.row_error, found.seed_error))
    rows, seeds = np.median(errors, axis=0)
    assert rows == pytest.approx(100 * np.sqrt(2 * 0.16 / 500 / 3), rel=0.1)
    assert seeds < rows


def test_a_single_run_beside_several_is_taken_to_vary_like_these():
    rng = np.random.default_rng(4)
    several, single = draw_runs(rng, [0, 0.05, -0.05], 50_000), draw_runs(rng, [0.0], 50_000)
    found = compare_methods(several, single)
    spread = np.std([score.score(np.ones((1, 50_000)))[0] for score in several], ddof=1)
    assert found.seed_error == pytest.approx(100 * spread * np.sqrt(1 + 1 / 3), rel=0.02)


def test_rows_that_are_enough():
    """An error of 1 point and a difference of 1: (1.96 + 0.84)² times as many rows; more for the smallest of 10 p."""
    assert estimate_factor(Contrast(1.0, -1, 3, 0.3, 100, row_error=1.0)) == pytest.approx(7.849, abs=1e-3)
    with_seeds = Contrast(1.0, -1, 3, 0.3, 100, row_error=1.0, seed_error=1.0)
    assert estimate_factor(with_seeds) == pytest.approx(15.7, abs=0.01)
    assert estimate_factor(Contrast(1.0, -1, 3, 0.3, 100, 1.0), comparisons=10) > 10


@pytest.mark.parametrize(("rows", "p"), [(1, 0.9), (3, 0.25), (5, 1 / 16), (6, 1 / 32)])
def test_rows_that_all_gain_are_told_no_better_than_by_coins(rows, p):
    found = compare_methods([measure_mean(np.zeros(rows))], [measure_mean(np.ones(rows))])
    assert (found.value, found.p) == (100.0, pytest.approx(p))
    assert (found.low > 0) == (p < 0.05)
    gains = np.linspace(0.4, 0.45, rows)
    assert compare_methods([measure_mean(np.zeros(rows))], [measure_mean(gains)]).p >= p - 1e-9


@pytest.mark.parametrize("name", ["mean", "f1", "spearmanr", "roc_auc"])
def test_equal_copies_of_a_row_in_a_group_leave_its_interval(name):
    values, labels = predict_numbers(80)

    def measure(numbers):
        one, other = values[numbers], labels[numbers]
        scores = {**measure_numbers(one, other), **measure_label(one > 0, other > 0), "mean": measure_mean(one > 0)}
        return (scores | measure_ranking(one[:, None], other[:, None] > 0))[name]

    copies = np.repeat(np.arange(80), 3)
    alone, grouped = estimate_interval(measure(np.arange(80))), estimate_interval(measure(copies), copies.tolist())
    # The sum of equal rows is one row, drawn as before; ranks have other samples, and a mean has no exact interval.
    tolerance = 1e-12 if name == "f1" else 0.1 * np.diff(alone)[0]
    assert tuple(grouped) == pytest.approx(tuple(alone), abs=tolerance)
    assert np.diff(grouped) > 1.4 * np.diff(estimate_interval(measure(copies)))
