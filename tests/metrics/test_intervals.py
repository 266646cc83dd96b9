"""Scores of weighted rows against repeated rows and scikit-learn, and the intervals of scores."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics
from statsmodels.stats.proportion import proportion_confint

from bertkit.metrics.classification import (
    measure_class_scores,
    measure_label_scores,
    score_classes,
    score_labels,
    score_numbers,
)
from bertkit.metrics.glue import compute_scores, measure_scores
from bertkit.metrics.intervals import (
    Interval,
    count_deciding,
    find_bca,
    find_influences,
    find_interval,
    merge_rows,
    resample,
)
from bertkit.metrics.ner import find_entities, measure_entities, score_entities
from bertkit.metrics.rows import (
    measure_classes,
    measure_gaps,
    measure_label,
    measure_mean,
    measure_numbers,
    measure_ranking,
)
from bertkit.metrics.squad import measure_answers, score_squad1, score_squad2
from tests.metrics import simulate_intervals
from tests.metrics.test_classification import NAMES, draw_scores

CLOSE = {"rel": 1e-12, "abs": 1e-12}


def draw_weights(seed, count):
    """Return (S,) whole weights from 0 to 3, the first two of which are above 0."""
    weights = np.random.default_rng(seed).integers(0, 4, count)
    weights[:2] = weights[:2].clip(1)
    return weights


def check(measured, score, weights, *columns):
    """Check that weights have the effect of repeated rows, for each of the scores that are measured."""
    expected = score(*(np.repeat(column, weights, axis=0) for column in columns))
    for name, found in measured.items():
        ones = np.ones((1, len(weights)))
        assert found.score(ones)[0] == pytest.approx(score(*columns)[name], **CLOSE), name
        assert found.score(weights[None].astype(float))[0] == pytest.approx(expected.get(name, 0.0), **CLOSE), name


# --- Weighted rows ----------------------------------------------------------------------------------------------------


def test_a_score_of_weighted_rows_of_a_worked_example():
    """Classes a a b, predicted a b b, with weights 2 1 1.

    Accuracy is 3/4. a is predicted with weight 2 and correct with weight 3, both with weight 2: F1 = 4/5. b is
    predicted with weight 2 and correct with weight 1, both with weight 1: F1 = 2/3. Their mean is 11/15, weighted by
    3 and 1 it is 23/30. Matthews: (3 * 4 - 2 * 3 - 2 * 1) / sqrt((16 - 4 - 4) * (16 - 9 - 1)) = 4 / sqrt(48).
    """
    measured = measure_class_scores(np.eye(2)[[0, 1, 1]], np.array([0, 0, 1]), ["a", "b"])
    found = {name: score.score(np.array([[2.0, 1.0, 1.0]]))[0] for name, score in measured.items()}
    assert found["accuracy"] == found["micro_f1"] == 3 / 4
    assert found["macro_f1"] == pytest.approx(11 / 15)
    assert found["weighted_f1"] == pytest.approx(23 / 30)
    assert found["matthews_correlation"] == pytest.approx(4 / 48**0.5)
    assert (found["precision_b"], found["recall_b"]) == (1 / 2, 1.0)


@pytest.mark.parametrize(("seed", "count", "classes"), [(0, 2, 2), (1, 5, 3), (2, 40, 2), (3, 60, 3)])
def test_weights_of_classes_are_repeated_rows(seed, count, classes):
    logits, labels = draw_scores(seed, (count, classes), independent=False)
    weights = draw_weights(seed, count)
    measured = measure_class_scores(logits, labels, NAMES[:classes])
    check(measured, lambda *columns: score_classes(*columns, NAMES[:classes]), weights, logits, labels)
    glue = measure_scores(("accuracy", "f1", "matthews_correlation"), logits.argmax(1), labels, classes)
    check(glue, lambda *columns: compute_scores(glue, *columns), weights, logits.argmax(1), labels)


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 7), (2, 60)])
def test_weights_of_labels_are_repeated_rows(seed, count):
    logits, labels = draw_scores(seed, (count, 3), independent=True)
    limits = np.array([0.4, 0.5, 0.7])
    measured = measure_label_scores(logits, labels, NAMES, limits)
    weights = draw_weights(seed, count)
    check(measured, lambda *columns: score_labels(*columns, NAMES, limits), weights, logits, labels)
    tuned = score_labels(logits, labels, NAMES)
    for name, score in measure_label_scores(logits, labels, NAMES).items():
        assert score.score(np.ones((1, count)))[0] == pytest.approx(tuned[name], **CLOSE)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_weights_of_numbers_are_repeated_rows(seed, count):
    values, labels = np.random.default_rng(seed).normal(size=(2, count)).round(1)
    check(measure_numbers(values, labels), score_numbers, draw_weights(seed, count), values, labels)


def test_constant_numbers_have_no_correlation():
    for values, labels in ((np.full(5, 0.1), np.arange(5) / 3), (np.full(5, 0.1), np.full(5, 0.7))):
        for name in ("pearson", "spearmanr"):
            assert (
                measure_numbers(values, labels)[name].score(np.random.default_rng(0).random((4, 5))).tolist() == [0] * 4
            )


def test_rankings_take_any_weights_and_ties_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    scores, labels, weights = rng.normal(size=300).round(1), rng.random(300) < 0.3, rng.exponential(size=300)
    measured = measure_ranking(scores[:, None], labels[:, None])
    expected = {"roc_auc": metrics.roc_auc_score, "average_precision": metrics.average_precision_score}
    for name, score in expected.items():
        found = measured[name].score(weights[None])[0]
        assert found == pytest.approx(score(labels, scores, sample_weight=weights), **CLOSE)
    assert list(measure_ranking(scores[:, None], np.ones((300, 1), bool))) == ["average_precision"]
    assert not measure_ranking(scores[:, None], np.zeros((300, 1), bool))


def test_documents_of_entities_are_one_row_each():
    """Documents 1 and 2 of two sentences and one. With weights 2 and 1 the first one is there twice."""
    gold = [["B-PER", "O"], ["B-LOC", "I-LOC"], ["O", "B-PER"]]
    predicted = [["B-PER", "B-LOC"], ["B-LOC", "O"], ["O", "I-PER"]]
    measured = measure_entities(list(map(find_entities, gold)), predicted, [1, 1, 2])
    scores = score_entities(gold, predicted)
    twice = score_entities([*gold[:2], *gold], [*predicted[:2], *predicted])
    assert scores.keys() - measured == {"accuracy"}
    for name, score in measured.items():
        assert score.score(np.array([[1.0, 1.0], [2.0, 1.0]])) == pytest.approx([scores[name], twice[name]], **CLOSE)


def test_questions_of_squad_are_one_row_each():
    gold = {"1": ("the Nile",), "2": ("red", "dark red"), "3": (), "4": ()}
    texts, odds = ["Nile", "red car", "blue", ""], [-2.0, -1.0, 0.5, 3.0]
    answers = dict(zip(gold, texts, strict=True))
    ones = np.ones((1, 4))
    first = {name: gold[name] for name in ("1", "2")}
    for name, score in measure_answers(first, texts[:2]).items():
        assert score.score(np.ones((1, 2)))[0] == pytest.approx(score_squad1(first, answers)[name], **CLOSE)
        assert score.points == 1.0
    measured = measure_answers(gold, texts, odds, tau=-1.0)
    expected = score_squad2(gold, answers, dict(zip(gold, odds, strict=True)), threshold=0.9)
    for name in ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"):
        assert measured[name].score(ones)[0] == pytest.approx(expected[name], **CLOSE), name


# --- The interval of a score ------------------------------------------------------------------------------------------


def repeat_answers(right, count):
    """Return the accuracy of `count` rows with `right` right ones."""
    return measure_mean(np.arange(count) < right)


def predict_numbers(count):
    """Return values with a correlation to labels, both with ties."""
    values = np.random.default_rng(0).normal(size=count)
    return values.round(1), (values + np.random.default_rng(1).normal(size=count)).round()


@pytest.mark.parametrize(("right", "count"), [(0, 1), (3, 3), (2, 3), (0, 277), (162, 277), (276, 277), (277, 277)])
def test_the_interval_of_a_share_is_wilson_s(right, count):
    found = find_interval(repeat_answers(right, count))
    expected = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert vars(found) == pytest.approx({"low": expected.low, "high": expected.high}, abs=1e-12)
    assert (found.low, found.high) == pytest.approx(proportion_confint(right, count, method="wilson"), abs=1e-12)
    assert (found.low == 0) == (right == 0)
    assert (found.high == 1) == (right == count)


def test_precision_and_recall_of_a_label_are_shares_of_some_rows():
    """The label has 40 predicted and 50 correct rows, 30 of them the same; one that is never predicted is unknown."""
    found, wanted = np.arange(100) < 40, (np.arange(100) >= 10) & (np.arange(100) < 60)
    scores = measure_label(found, wanted)
    assert find_interval(scores["precision"]) == find_interval(repeat_answers(30, 40))
    assert find_interval(scores["recall"]) == find_interval(repeat_answers(30, 50))
    assert find_interval(measure_label(found & False, wanted)["precision"]) == Interval(0.0, 1.0)
    percent = find_interval(measure_mean(np.arange(5) < 3, percent=True))
    fraction = find_interval(repeat_answers(3, 5))
    assert (percent.low, percent.high) == pytest.approx((100 * fraction.low, 100 * fraction.high))


def test_entities_of_documents_are_no_shares():
    """Two entities of one document are right or wrong together."""
    gold = [["B-A", "B-A"], ["B-A", "O"]]
    assert measure_entities(list(map(find_entities, gold)), gold, [0, 1])["precision"].count_successes() is None
    assert measure_mean(np.array([0.5, 1.0])).count_successes() is None
    assert repeat_answers(1, 2).join(["x", "x"]).count_successes() is None


@pytest.mark.parametrize("name", ["mean", "spearmanr", "matthews_correlation"])
def test_bca_is_scipy_s_on_the_same_samples(name):
    """scipy also computes the jackknife by itself; the interval from other samples is near."""
    values, labels = predict_numbers(200)
    classes = (values > 0).astype(int), (labels > 0).astype(int)
    scores = measure_numbers(values, labels) | measure_classes(*classes, 2) | {"mean": measure_mean(abs(values) / 4)}
    columns, statistic = {
        "mean": ((abs(values) / 4,), lambda column: column.mean()),
        "spearmanr": ((values, labels), lambda *pair: stats.spearmanr(*pair).statistic),
        "matthews_correlation": (classes, lambda *pair: np.corrcoef(*pair)[0, 1]),
    }[name]
    score = scores[name]
    expected = stats.bootstrap(columns, statistic, method="BCa", n_resamples=1000, paired=True, vectorized=False, rng=0)
    merged, numbers, _ = merge_rows(score)
    influences = find_influences(merged, numbers, np.random.default_rng(0))
    value = score.score(np.ones((1, 200)))[0]
    low, high = find_bca(value, expected.bootstrap_distribution, influences)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval), abs=1e-3)
    interval = find_interval(score)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_the_jackknife_of_equal_rows_and_of_groups():
    """Leaving out rows one by one, equal rows at once, or random groups gives the same acceleration."""

    def accelerate(influences):
        return (influences**3).sum() / (influences**2).sum() ** 1.5 / 6

    few = measure_mean(np.repeat([0.1, 0.2, 0.9], [30, 20, 10]))
    merged, numbers, counts = merge_rows(few)
    assert counts.tolist() == [30, 20, 10]
    left_out = few.score(1 - np.eye(60))
    expected = np.sort(left_out.mean() - left_out)
    assert np.sort(find_influences(merged, numbers, None)) == pytest.approx(expected)
    many = measure_mean(np.random.default_rng(0).random(3000) ** 8)
    left_out = many.score(1 - np.eye(3000))
    influences = find_influences(*merge_rows(many)[:2], np.random.default_rng(0))
    assert len(influences) == 256
    assert accelerate(influences) == pytest.approx(accelerate(left_out.mean() - left_out), abs=0.004)
    assert (influences**2).sum() == pytest.approx(((left_out.mean() - left_out) ** 2).sum(), rel=0.3)
    assert count_deciding(np.array([1.0, -1, 1, -1])) == 4
    assert count_deciding(np.array([1.0, 0, 0, 0])) == 1
    assert count_deciding(np.zeros(4)) == 0


def test_samples_of_few_and_of_many_distinct_rows_are_alike():
    """Drawn rows and multinomial counts have the same mean and the standard error of a mean of S values."""
    values = np.repeat([0.0, 0.3, 1.0], [200, 100, 100])
    for rows in (values, values + np.arange(400) / 1e9):  # 3 and 400 distinct rows
        sampled = resample(*merge_rows(measure_mean(rows))[:2], 4000, np.random.default_rng(0))
        assert sampled.mean() == pytest.approx(rows.mean(), abs=4 * rows.std() / 20 / 4000**0.5)
        assert sampled.std() == pytest.approx(rows.std() / 20, rel=0.05)


def test_a_score_without_an_error_has_an_interval():
    """F1 of P positives and an added missed one of weight e is 2A / (2A + e), A of Gamma(P).

    e / (A + e) has the distribution Beta(1, P), so its quantile b gives the limit 2 (1 - b) / (2 - b).
    """
    labels = np.arange(300) < 100
    found = find_interval(measure_label(labels, labels)["f1"])
    b = 1 - 0.025 ** (1 / 100)
    assert found.high == 1.0
    assert found.low == pytest.approx(2 * (1 - b) / (2 - b), abs=0.003)


def test_intervals_at_the_edges():
    """They contain the score, are finite, and are wide where the rows say little."""
    rng = np.random.default_rng(0)
    one_class = np.zeros(50, int), np.zeros(50, int)
    constant = measure_numbers(np.full(50, 0.3), rng.random(50))
    labels = np.arange(3) % 2
    cases = {
        "one class, all right": (measure_classes(*one_class, 2)["matthews_correlation"], 0.5),
        "three rows": (measure_classes(labels, labels, 2)["macro_f1"], 0.5),
        "three numbers": (measure_numbers(np.arange(3.0), np.arange(3.0))["spearmanr"], 0.5),
        "one number": (measure_numbers(np.ones(1), np.ones(1))["spearmanr"], 0.0),
        "constant predictions": (constant["pearson"], 0.0),
        "nothing predicted and nothing correct": (measure_label(labels > 5, labels > 5)["f1"], 0.5),
        "no error": (measure_numbers(np.arange(50.0), np.arange(50.0))["rmse"], 0.5),
    }
    for name, (score, least) in cases.items():
        value, found = score.score(np.ones((1, len(score))))[0], find_interval(score)
        assert np.isfinite([found.low, found.high]).all(), name
        assert found.low <= value <= found.high, name
        assert found.high - found.low >= least, name


def test_the_seed_of_an_interval_decides():
    score = measure_numbers(*predict_numbers(100))["spearmanr"]
    assert find_interval(score) == find_interval(score, seed=0) != find_interval(score, seed=1)


def test_the_interval_of_a_single_gap_is_that_of_its_mean():
    """Far from 0 it is the mean plus and minus 1.96 standard errors; a gap that chance explains may be 0."""
    values = np.random.default_rng(0).normal(0.3, 0.2, 400)
    found, half = find_interval(measure_gaps(values[:, None], np.ones((1, 2, 1)))), 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.002)
    none = find_interval(measure_gaps((values - values.mean() + 0.005)[:, None], np.ones((1, 2, 1))))
    assert none.low == 0.0 < 0.005 < none.high < 0.005 + half


@pytest.mark.parametrize(
    ("name", "count"),
    [("Matthews", 300), ("F1, 50 %", 300), ("calibration error, 0", 300), ("calibration error, 8", 300)],
)
def test_most_intervals_hold_the_true_score(name, count):
    """Fewer than 90 % of 200 intervals of 95 % have a chance of 0.2 %."""
    name = next(found for found in simulate_intervals.SCORES if found.startswith(name))
    above, below, _ = simulate_intervals.simulate(name, count, trials=200)["interval"]
    assert above + below <= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spearmanr", "pearson", "roc_auc", "average_precision", "macro_f1"])
def test_an_interval_of_ten_thousand_rows_takes_at_most_two_seconds(name):
    values, labels = predict_numbers(10_000)
    classes = (np.abs(column).astype(int) for column in (values, labels))
    scores = {
        **measure_numbers(values + np.arange(10_000) / 1e6, labels),
        **measure_ranking(values[:, None], labels[:, None] > 0),
        **measure_classes(*classes, 10),
    }
    start = time.process_time()
    find_interval(scores[name])
    assert time.process_time() - start < 2


# --- Groups -----------------------------------------------------------------------------------------------------------


def test_rows_of_one_group_become_one():
    """Four questions of two contexts: an error is a whole context of mean size, two questions."""
    found = measure_mean(np.array([1.0, 0.0, 1.0, 1.0])).join(["x", "y", "x", "x"])
    assert found.rows.tolist() == [[3.0, 3.0], [0.0, 1.0]]
    assert found.errors.tolist() == [[[2.0, 2.0], [0.0, 2.0]]]
    assert found.score(np.array([[1.0, 1.0], [0.0, 1.0]])).tolist() == [0.75, 0.0]
    ranks = measure_numbers(np.arange(4.0), np.arange(4.0))["spearmanr"]
    assert ranks.join(["x", "y", "x", "x"]) is ranks
