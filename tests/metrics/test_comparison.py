"""Differences of methods against scipy and statsmodels, worked examples, and what seeds do to them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from bertkit.metrics.comparison import (
    Contrast,
    adjust_p_values,
    compare_methods,
    compute_mcnemar,
    estimate_rows,
)
from bertkit.metrics.rows import measure_mean, measure_numbers


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
def test_the_p_value_of_an_accuracy_is_that_of_a_row_more_on_either_side_and_near_the_mid_p(gains, losses):
    """It is twice the probability that Beta(c + 1, b + 1) is below 1/2, or above it."""
    first, second = draw_right(gains, losses)
    found = compare_methods([measure_mean(first)], [measure_mean(second)], samples=40_000)
    tail = stats.beta(gains + 1, losses + 1).cdf(0.5)
    assert found.p == pytest.approx(2 * min(tail, 1 - tail), abs=0.01)
    both = stats.binom(gains + losses, 0.5)
    mid = both.cdf(min(gains, losses)) - both.pmf(min(gains, losses)) / 2
    assert found.p == pytest.approx(min(2 * mid, 1), abs=0.025)
    assert found.value == pytest.approx((gains - losses) / 3)
    assert (found.low > 0 or found.high < 0) == (found.p < 0.05)


def draw_numbers(seed, noises=(0.5, 0.6), rows=200):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 26, rows) / 5
    shared = rng.normal(size=rows)
    return labels, [labels + noise * (shared + rng.normal(size=rows)) for noise in noises]


def test_the_standard_error_is_that_of_scipys_paired_bootstrap():
    labels, values = draw_numbers(0)
    scores = [measure_numbers(found, labels)["spearmanr"] for found in values]
    found = compare_methods(scores[:1], scores[1:], samples=4000)

    def subtract(one, two, gold):
        return 100 * (stats.spearmanr(two, gold).statistic - stats.spearmanr(one, gold).statistic)

    columns = (*values, labels)
    drawn = stats.bootstrap(
        columns, subtract, paired=True, vectorized=False, n_resamples=600, method="percentile", rng=0
    )
    assert found.row_error == pytest.approx(drawn.standard_error, rel=0.12)
    assert found.value == pytest.approx(subtract(*columns), abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_p_value_is_near_that_of_scipys_paired_permutations(seed):
    labels, values = draw_numbers(seed, (0.5, 0.55))
    scores = [measure_numbers(found, labels)["pearson"] for found in values]
    found = compare_methods(scores[:1], scores[1:], samples=4000)

    def subtract(one, two):
        return stats.pearsonr(two, labels).statistic - stats.pearsonr(one, labels).statistic

    drawn = stats.permutation_test(
        values, subtract, permutation_type="samples", vectorized=False, n_resamples=1000, rng=seed + 1
    )
    assert abs(found.p - drawn.pvalue) < 0.05 + 0.15 * drawn.pvalue


@pytest.mark.parametrize(("runs", "seed_error"), [(1, None), (2, 0.0)])
def test_models_that_agree_on_all_rows_are_not_told_apart(runs, seed_error):
    first, _ = draw_right(0, 0)
    found = compare_methods([measure_mean(first)], [measure_mean(first)] * runs, samples=100)
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert found.seed_error == seed_error


def draw_runs(rng, offsets, rows):
    return [measure_mean(rng.random(rows) < 0.8 + offset) for offset in offsets]


def test_many_rows_and_few_seeds_are_welchs_test():
    rng = np.random.default_rng(3)
    offsets = [0.0, 0.02, -0.03, 0.01, -0.01], [0.03, 0.06, 0.02, 0.05]
    runs = [draw_runs(rng, found, 100_000) for found in offsets]
    found = compare_methods(*runs, samples=20_000)
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
        found = compare_methods(draw_runs(rng, [0] * 3, 500), draw_runs(rng, [0] * 3, 500), samples=300)
        errors.append((found.row_error, found.seed_error))
    rows, seeds = np.median(errors, axis=0)
    assert rows == pytest.approx(100 * np.sqrt(2 * 0.16 / 500 / 3), rel=0.1)
    assert seeds < rows


def test_a_single_run_beside_several_is_taken_to_vary_like_these():
    rng = np.random.default_rng(4)
    several, single = draw_runs(rng, [0, 0.05, -0.05], 50_000), draw_runs(rng, [0.0], 50_000)
    found = compare_methods(several, single, samples=500)
    spread = np.std([score.score(np.ones((1, 50_000)))[0] for score in several], ddof=1)
    assert found.seed_error == pytest.approx(100 * spread * np.sqrt(1 + 1 / 3), rel=0.02)


def test_rows_that_are_enough():
    """An error of 1 point with 100 rows, and a difference of 1: (1.96 + 0.84)² times as many rows."""
    assert estimate_rows(Contrast(1.0, -1, 3, 0.3, 100, row_error=1.0)) == (780, pytest.approx(7.849, abs=1e-3))
    with_seeds = Contrast(1.0, -1, 3, 0.3, 100, row_error=1.0, seed_error=0.2)
    assert estimate_rows(with_seeds)[0] == 1100
    hidden = Contrast(1.0, -1, 3, 0.3, 100, row_error=1.0, seed_error=1.0)
    assert estimate_rows(hidden) == (None, pytest.approx(15.7, abs=0.01))
    assert estimate_rows(Contrast(1.0, -1, 3, 0.3, 100, 1.0), comparisons=10)[0] > 1000


def test_few_seeds_need_the_quantiles_of_their_t_variates():
    """With one degree of freedom the quantiles are 12.71 and 1.38, and the error of the seeds alone is too large."""
    few = Contrast(1.0, -1, 3, 0.3, 100, row_error=0.2, seed_error=0.1, freedom=1.0)
    needed, factor = estimate_rows(few)
    assert needed is None
    by_hand = (stats.t.ppf(0.975, factor) + stats.t.ppf(0.8, factor)) ** 2 * (0.2**2 + 0.1**2)
    assert factor == pytest.approx(by_hand, rel=1e-6)
    assert estimate_rows(Contrast(1.0, -1, 3, 0.3, 100, row_error=0.2, freedom=1.0))[0] == 790


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), runs=st.integers(1, 3), spread=st.sampled_from([0.0, 0.03, 0.1]))
@example(seed=1265, runs=1, spread=0.1)  # only the two runs of the first method differ
def test_more_rows_than_those_at_hand_are_needed_where_methods_are_not_told_apart(seed, runs, spread):
    rng = np.random.default_rng(seed)
    methods = [draw_runs(rng, np.clip(spread * rng.normal(size=number), -0.8, 0.2), 150) for number in (2, runs)]
    found = compare_methods(*methods, samples=200)
    if found.p <= 0.05 or abs(found.value) < 1e-9:
        return
    needed, factor = estimate_rows(found)
    assert factor > 1
    assert needed is None or needed > found.rows


def test_methods_that_hardly_differ_have_an_interval_of_a_sensible_size():
    """Two methods with the same seeds, of which one row differs, have no less freedom than Welch's test gives."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        right = rng.random((2, 300)) < 0.8
        other = right.copy()
        other[0, 0] ^= True
        found = compare_methods(list(map(measure_mean, right)), list(map(measure_mean, other)), samples=500)
        assert found.freedom >= 1
        assert -100 < found.low < found.high < 100


@pytest.mark.parametrize(("rows", "gains"), [(2, 2), (4, 3), (5, 4), (5, 5), (1000, 6)])
def test_gains_without_a_loss_have_mcnemars_mid_p_value(rows, gains):
    """Half of the probability that as many coins show one side: 2 * (1/2)^(gains + 1), also if every row is a gain."""
    first, second = np.zeros(rows), np.zeros(rows)
    second[:gains] = 1
    found = compare_methods([measure_mean(first)], [measure_mean(second)])
    assert found.p == pytest.approx(2 * 0.5 ** (gains + 1), abs=0.01)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_few_documents_of_equal_models_are_seldom_different(rows):
    rng, differences = np.random.default_rng(0), 0
    for _ in range(200):
        first = rng.normal(0.6, 0.05, rows)
        second = first + rng.normal(0, 0.03, rows)
        differences += compare_methods([measure_mean(first)], [measure_mean(second)], 2000).p <= 0.05
    assert differences <= 13


def test_seeds_count_also_where_all_rows_of_the_runs_differ():
    right, wrong = measure_mean(np.ones(30)), measure_mean(np.zeros(30))
    found = compare_methods([right, wrong], [wrong])
    assert (found.value, found.p > 0.3) == (-50.0, True)
    assert found.seed_error > 50
