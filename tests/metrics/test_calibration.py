"""Errors of probabilities, the temperature and label sets, beside torchmetrics, scikit-learn and MAPIE."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from bertkit.errors import UsageError
from bertkit.metrics.calibration import (
    BINS,
    TEMPERATURES,
    bin_probabilities,
    choose_limit,
    choose_temperature,
    compute_probabilities,
    fit_temperature,
    measure_calibration,
    scale_logits,
    score_conformity,
)
from bertkit.metrics.rows import take_values


def make_classes(rows=2000, classes=4, sharpness=2.5, seed=0):
    """Return float32 logits of an overconfident classifier, and classes: they are right at logits / sharpness."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (rows, classes))
    labels = (softmax(logits, axis=1).cumsum(1) < rng.random((rows, 1))).sum(1)
    return (sharpness * logits).astype(np.float32), labels.clip(max=classes - 1)


def make_labels(rows=2000, count=3, sharpness=2.5, seed=0):
    """Return the same for several labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 2, (rows, count))
    labels = (rng.random((rows, count)) < expit(logits)).astype(np.float32)
    return (sharpness * logits).astype(np.float32), labels


def score_calibration(logits, labels):
    """Return the errors of the probabilities of logits."""
    return take_values(measure_calibration(compute_probabilities(logits, labels.ndim == 2), labels))


MADE = pytest.mark.parametrize("make", [make_classes, make_labels])


# --- Errors of probabilities ------------------------------------------------------------------------------------------


def test_the_calibration_error_of_four_rows():
    """Three rows of two classes are stated with 0.9, of which two are right; one with 0.6 is right.

    The gaps are |2/3 - 0.9| in the bin of 0.9 and |1 - 0.6| in the other: (3 * 0.2333 + 1 * 0.4) / 4 = 0.275. The
    squared errors are 0.01, 0.01, 0.81 and 0.16, on average 0.2475.
    """
    logits = np.log([[0.1, 0.9], [0.9, 0.1], [0.1, 0.9], [0.4, 0.6]])
    found = score_calibration(logits, np.array([1, 0, 0, 1]))
    assert found == pytest.approx({"ece": 0.275, "brier": 0.2475})


@pytest.mark.parametrize("classes", [2, 4])
def test_errors_of_classes_are_those_of_torchmetrics_and_scikit_learn(classes):
    logits, labels = make_classes(classes=classes)
    probabilities = softmax(logits.astype(np.float64), axis=1)
    found = score_calibration(logits, labels)
    expected = multiclass_calibration_error(torch.tensor(probabilities), torch.tensor(labels), classes, n_bins=BINS)
    assert found["ece"] == pytest.approx(expected.item(), abs=1e-6)
    assert found["ece"] > 0.05
    given = probabilities[:, 1] if classes == 2 else probabilities
    assert found["brier"] == pytest.approx(brier_score_loss(labels, given, scale_by_half=True))


def test_errors_of_several_labels_are_those_of_torchmetrics_and_scikit_learn():
    logits, labels = make_labels()
    probabilities, found = expit(logits.astype(np.float64)), score_calibration(logits, labels)
    flat = torch.tensor(probabilities.ravel()), torch.tensor(labels.ravel().astype(int))
    assert found["ece"] == pytest.approx(binary_calibration_error(*flat, n_bins=BINS).item(), abs=1e-6)
    each = [brier_score_loss(*columns) for columns in zip(labels.T, probabilities.T, strict=True)]
    assert found["brier"] == pytest.approx(np.mean(each))


@MADE
def test_the_diagram_shows_the_calibration_error(make):
    logits, labels = make()
    stated, right, counts = bin_probabilities(compute_probabilities(logits, labels.ndim == 2), labels)
    assert counts.sum() == labels.size
    assert (np.diff(stated) > 0).all()
    error = np.average(np.abs(right - stated), weights=counts)
    assert error == pytest.approx(score_calibration(logits, labels)["ece"])


# --- The temperature --------------------------------------------------------------------------------------------------


@MADE
def test_the_temperature_is_the_best_of_a_grid_and_restores_the_probabilities(make):
    logits, labels = make()
    grid = np.geomspace(*TEMPERATURES, 2001)

    def read_loss(temperature):
        scaled = logits.astype(np.float64) / temperature
        if labels.ndim == 1:
            return -log_softmax(scaled, axis=1)[np.arange(len(labels)), labels].mean()
        return -np.where(labels > 0, log_expit(scaled), log_expit(-scaled)).mean()

    losses = [read_loss(temperature) for temperature in grid]
    best = grid[np.argmin(losses)]
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(best, rel=grid[1] / grid[0] - 1)
    assert read_loss(found) <= min(losses) + 1e-9
    assert found == pytest.approx(2.5, rel=0.1)
    before, after = (score_calibration(values, labels) for values in (logits, scale_logits(logits, found)))
    assert after["ece"] < before["ece"] / 3
    assert after["brier"] < before["brier"]


@MADE
def test_the_temperature_stays_within_its_bounds(make):
    """Logits that are all right would become infinite."""
    _, labels = make(300)
    right = np.eye(4)[labels] if labels.ndim == 1 else 2 * labels - 1
    assert (fit_temperature(right, labels), fit_temperature(-right, labels)) == TEMPERATURES


@MADE
def test_a_temperature_is_kept_only_if_its_gain_holds_on_other_rows(make):
    few = [make(31, sharpness=1, seed=seed) for seed in range(20)]
    assert sum(choose_temperature(*rows) == 1 for rows in few) >= 19
    assert not any(fit_temperature(*rows) == 1 for rows in few)
    logits, labels = make(200)
    assert choose_temperature(logits, labels) == fit_temperature(logits, labels)
    right = np.eye(4)[labels] if labels.ndim == 1 else 2 * labels - 1
    assert choose_temperature(right, labels) == 1, "all rows are right"
    assert choose_temperature(-right[:1], labels[:1]) == 1, "one row"


@given(st.floats(-100, 100, width=32), st.floats(*TEMPERATURES))
def test_neighbouring_logits_keep_their_order_at_any_temperature(value, temperature):
    logits = np.array([[value, np.nextafter(np.float32(value), np.float32(np.inf))]], np.float32)
    assert np.diff(scale_logits(logits, temperature)) > 0
    assert scale_logits(logits, None) is logits


# --- Label sets -------------------------------------------------------------------------------------------------------


class Softmax(ClassifierMixin, BaseEstimator):
    """A classifier for MAPIE whose inputs are logits."""

    def fit(self, logits, labels):
        self.classes_ = np.arange(logits.shape[1])
        return self

    def predict_proba(self, logits):
        return softmax(logits, axis=1)

    def predict(self, logits):
        return logits.argmax(1)


@pytest.mark.parametrize("coverage", [0.3, 0.8, 0.9, 0.95])
def test_label_sets_are_those_of_mapie(coverage):
    """A coverage below the accuracy leaves some sets empty."""
    logits, labels = (values[:1500].astype(float) for values in make_classes())
    labels = labels.astype(int)
    fitted = Softmax().fit(logits, labels)
    mapie = SplitConformalClassifier(fitted, confidence_level=coverage, conformity_score="lac", prefit=True)
    _, expected = mapie.conformalize(logits[:500], labels[:500]).predict_set(logits[500:])
    limit = choose_limit(score_conformity(logits[:500], labels[:500]), coverage)
    found = 1 - compute_probabilities(logits[500:], several=False) <= limit
    assert np.array_equal(found, expected[:, :, 0])
    assert (found.sum(1) == 0).any() == (coverage < 0.5)


@MADE
def test_label_sets_contain_all_correct_labels_as_often_as_asked(make):
    """Over 200 divisions of 2,000 rows the mean coverage of 90 % has a standard error of about 0.1 points."""
    logits, labels = make()
    right = np.eye(4)[labels] if labels.ndim == 1 else labels
    rng, covered = np.random.default_rng(0), []
    for _ in range(200):
        chooses, scored = np.split(rng.permutation(len(labels)), 2)
        limit = choose_limit(score_conformity(logits[chooses], labels[chooses]), 0.9)
        sets = 1 - compute_probabilities(logits[scored], several=labels.ndim == 2) <= limit
        covered.append((sets | (right[scored] == 0)).all(axis=1).mean())
    assert np.mean(covered) == pytest.approx(0.9, abs=0.005)


@given(st.integers(1, 400), st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99]))
def test_a_limit_needs_enough_rows_and_says_how_many(rows, coverage):
    scores = np.linspace(0, 1, rows)
    needed = {0.5: 1, 0.75: 3, 0.9: 9, 0.95: 19, 0.99: 99}[coverage]
    if rows >= needed:
        assert (scores <= choose_limit(scores, coverage)).sum() / (rows + 1) >= coverage - 1e-9
        assert (scores < choose_limit(scores, coverage)).sum() / (rows + 1) < coverage
    else:
        with pytest.raises(UsageError, match=f"needs {needed} or more rows that decide .*, got {rows};"):
            choose_limit(scores, coverage)


def test_a_coverage_is_a_share_and_needs_rows(refused):
    for coverage in (0.0, 1.0, 95.0, float("nan"), 0.995):
        with refused():
            choose_limit([0.5] * 100, coverage)
