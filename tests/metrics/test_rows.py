"""Scores of ordered classes as functions of the weights of their rows."""

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score, mean_absolute_error

from bertkit.metrics.rows import measure_ordinals


@pytest.mark.parametrize("values", [[1, 2, 3], [1, 2, 5, 9]])
def test_scores_of_ordered_classes_are_those_of_scikit_learn(values):
    """Kappa for any weights; the mean absolute error by the values of the classes."""
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(0, len(values), (2, 60))
    found = measure_ordinals(predictions, labels, np.array(values))
    for weights in (np.ones(60), rng.integers(0, 4, 60).astype(float)):
        kappa = cohen_kappa_score(labels, predictions, weights="quadratic", sample_weight=weights)
        assert found["quadratic_kappa"].score(weights[None])[0] == pytest.approx(kappa)
        error = mean_absolute_error(np.array(values)[labels], np.array(values)[predictions], sample_weight=weights)
        assert found["mae"].score(weights[None])[0] == pytest.approx(error)
    assert measure_ordinals(labels, labels, np.array(values))["quadratic_kappa"].score(np.ones((1, 60)))[0] == 1
