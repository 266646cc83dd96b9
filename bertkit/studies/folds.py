"""Cross-validation: a study with one run per fold, and the out-of-fold predictions of all rows."""

FOLD_AXIS = "data.fold"
