"""Vectors of texts and words, with scikit-learn as oracle, and the linear head on them and its choice by folds."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit, softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, Ridge
from sklearn.multiclass import OneVsRestClassifier

from bertkit.metrics.baseline import make_shape, rotate, vectorize_texts, vectorize_words
from bertkit.tasks import frozen
from bertkit.tasks.frozen import STRENGTHS, choose_head, divide_rows, measure_loss, measure_strengths, solve

TEXTS = ["The film is good.", "A bad, bad film!", "good good acting", "the plot: bad", "it's the acting", "A plot"]


def test_texts_have_the_vectors_of_scikit_learn():
    texts = [(text,) for text in TEXTS]
    vectors, others = vectorize_texts(texts[:4], texts[4:])
    oracle = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)
    expected = oracle.fit_transform(TEXTS[:4])
    assert vectors.shape == expected.shape
    assert np.allclose((vectors @ vectors.T).toarray(), (expected @ expected.T).toarray())
    assert np.allclose((others @ vectors.T).toarray(), (oracle.transform(TEXTS[4:]) @ expected.T).toarray())


def test_a_word_of_the_first_text_is_another_than_in_the_second():
    vectors, swapped = vectorize_texts([("good film", "bad plot"), ("", "bad")], [("bad plot", "good film"), ("", "")])
    assert swapped.nnz == 0
    assert vectors.shape == (2, 6)


def test_characters_of_a_word_are_counted_with_its_ends_as_scikit_learn_does():
    texts = [(text,) for text in TEXTS]
    vectors, others = vectorize_texts(texts[:4], texts[4:], "characters")
    oracle = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    expected = oracle.fit_transform(TEXTS[:4])
    assert vectors.shape == expected.shape
    assert np.allclose((vectors @ vectors.T).toarray(), (expected @ expected.T).toarray())
    assert np.allclose((others @ vectors.T).toarray(), (oracle.transform(TEXTS[4:]) @ expected.T).toarray())
    pairs, swapped = vectorize_texts([("film", "plot")], [("plot", "film"), ("", "")], "characters")
    assert (pairs.shape[0], swapped.nnz) == (1, 0)


def test_texts_without_spaces_have_the_vectors_of_one_to_three_characters():
    texts = [(text,) for text in ["这家店很好", "这家店很差", "很好很好看", "不好看", "这不好"]]
    vectors, others = vectorize_texts(texts[:4], texts[4:])
    oracle = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), sublinear_tf=True)
    expected = oracle.fit_transform([text for (text,) in texts[:4]])
    assert vectors.shape == expected.shape
    assert np.allclose((others @ vectors.T).toarray(), (oracle.transform(texts[4]) @ expected.T).toarray())


def test_rotated_vectors_have_the_same_answers():
    vectors, _ = vectorize_texts([(text,) for text in TEXTS + TEXTS[:1]], [("",)])
    rotated, targets = rotate(vectors), np.array([0, 1, 0, 1, 2, 2, 0])
    answers = [rows @ head[0].T + head[1] for rows in (vectors, rotated) for head in [solve(rows, targets, 10.0, 3)]]
    assert softmax(answers[1], axis=1) == pytest.approx(softmax(answers[0], axis=1), abs=1e-3)


def test_a_word_is_described_by_itself_its_shape_and_its_neighbours():
    vectors, others = vectorize_words([["Ada", "met", "Bob"], ["Ada"]], [["Ada", "met", "Eve"], ["7th"]])
    assert vectors.shape[0] == 4
    assert (vectors[0] != others[0]).nnz == 0
    assert others[2].nnz == 4  # the shape of Eve, the word before it with its shape, and the end of the sentence
    assert others[3].nnz == 2  # the ends of the sentence
    assert [make_shape(word) for word in ("McDonald's", "B-52", "ÉCOLE", "U.N.")] == ["XxXx'x", "X-0", "xX", "X.X."]


def test_a_head_answers_like_scikit_learn():
    rng = np.random.default_rng(0)
    vectors, noise = rng.normal(size=(80, 5)), rng.normal(size=80)
    classes = (vectors[:, 0] + noise > 0).astype(int) + (vectors[:, 1] > 0.5)
    for targets in (classes, classes.clip(max=1)):
        weight, bias = solve(vectors, targets, 3.0, targets.max() + 1)
        expected = LogisticRegression(C=3.0, tol=1e-6).fit(vectors, targets).predict_proba(vectors)
        assert softmax(vectors @ weight.T + bias, axis=1) == pytest.approx(expected, abs=1e-3)
    several = np.stack([classes == 0, vectors[:, 2] + noise > 0], axis=1).astype(np.float32)
    weight, bias = solve(vectors, several, 3.0, 2)
    oracle = OneVsRestClassifier(LogisticRegression(C=3.0, tol=1e-6)).fit(vectors, several.astype(int))
    assert expit(vectors @ weight.T + bias) == pytest.approx(oracle.predict_proba(vectors), abs=1e-3)
    numbers = (vectors[:, 0] + noise).astype(np.float32)
    weight, bias = solve(vectors, numbers, 3.0, 1)
    assert (vectors @ weight.T + bias)[:, 0] == pytest.approx(Ridge(1 / 6).fit(vectors, numbers).predict(vectors))


def test_an_answer_that_no_row_has_is_never_given():
    vectors = np.random.default_rng(0).normal(size=(20, 3))
    weight, bias = solve(vectors, np.arange(20) % 2 * 2, 1.0, 4)
    assert set((vectors @ weight.T + bias).argmax(1).tolist()) <= {0, 2}
    weight, bias = solve(vectors, np.full(20, 1), 1.0, 3)
    assert (bias.argmax(), weight.any()) == (1, False)
    assert solve(vectors, np.tile([0.0, 1.0], (20, 1)), 1.0, 2)[1].tolist() == [-50, 50]


# --- The choice by folds ----------------------------------------------------------------------------------------------


def make_classes(rows: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors (S, 4), the first number of which says which of two classes a row has, and the classes."""
    rng = np.random.default_rng(0)
    targets = np.arange(rows) % 2
    vectors = rng.normal(size=(rows, 4)).astype(np.float32)
    vectors[:, 0] = 2 * targets - 1 + noise * rng.normal(size=rows)
    return vectors, targets


def test_vectors_of_noise_lose_and_vectors_without_noise_have_a_weak_penalty():
    vectors, targets = make_classes(60, 0.0)
    noise = np.random.default_rng(1).normal(size=vectors.shape)
    assert choose_head({"noise": noise, "right": vectors}, targets, 2, np.arange(60)) == ("right", 100.0)
    assert choose_head({"right": csr_array(vectors)}, targets, 2, np.arange(60)) == ("right", 100.0)
    assert choose_head({"noise": noise}, targets, 2, np.arange(60)) == ("noise", 0.01)
    assert choose_head({"a": vectors, "b": vectors.copy()}, targets, 2, np.arange(60))[0] == "a", "a tie"


def test_the_strength_is_that_of_scikit_learn():
    """Its search computes the same losses, each head from the start."""
    vectors, targets = make_classes(200, 1.0)
    vectors += 5  # far from 0
    targets[:40] = 2
    vectors[:40, 1] += 1
    folds = divide_rows(targets, np.arange(200))
    oracle = LogisticRegressionCV(
        Cs=STRENGTHS, cv=folds, scoring="neg_log_loss", l1_ratios=(0,), use_legacy_attributes=False, max_iter=1000
    ).fit(vectors, targets)
    losses = dict(measure_strengths(vectors, targets, 3, folds, None, STRENGTHS))
    assert list(losses.values()) == pytest.approx(-oracle.scores_.mean(0).ravel(), rel=2e-2)
    assert choose_head({"": vectors}, targets, 3, np.arange(200)) == ("", oracle.C_)


def test_equal_rows_of_one_group_are_in_one_fold():
    """Vectors that only name the text are known by heart where its copies leak, and are noise where they do not."""
    copies = np.arange(120) // 3  # three rows of each text
    targets = np.random.default_rng(0).integers(0, 2, 40)[copies]
    vectors = np.eye(40)[copies]
    assert choose_head({"": vectors}, targets, 2, np.arange(120))[1] == 100.0
    assert choose_head({"": vectors}, targets, 2, copies)[1] < 1.0
    for fitted, held in divide_rows(targets, copies):
        assert not set(copies[fitted]) & set(copies[held])
        assert abs(targets[held].mean() - targets.mean()) < 0.1


def test_a_class_with_one_row_is_always_fitted_and_a_rare_one_decides_the_number_of_folds():
    targets = np.array([0] * 10 + [1] * 3 + [2])
    folds = divide_rows(targets, np.arange(14))
    assert len(folds) == 3
    assert all(13 in fitted for fitted, _ in folds)
    assert sorted(np.concatenate([held for _, held in folds]).tolist()) == list(range(13))
    assert choose_head({"": np.eye(14)}, targets, 4, np.arange(14))[0] == ""


@pytest.mark.parametrize("targets", [[0, 1, 2, 3], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], []])
def test_without_a_choice_it_is_the_first_one(targets):
    targets = np.array(targets)
    vectors = np.ones((len(targets), 2))
    assert choose_head({"a": vectors, "b": vectors}, targets, 4, np.arange(len(targets))) == ("a", 1.0)
    assert choose_head({"a": vectors}, np.array([0, 1, 0, 1])[: len(targets)], 4, np.zeros(len(targets))) == ("a", 1.0)


def test_numbers_and_several_labels_are_chosen_by_their_own_losses():
    vectors, targets = make_classes(80, 0.0)
    noise = np.random.default_rng(1).normal(size=vectors.shape)
    numbers = (3 * vectors[:, 0] + vectors[:, 1]).astype(np.float32)
    several = np.stack([targets, vectors[:, 1] > 0], axis=1).astype(np.float32)
    for answers, labels in ((numbers, 1), (several, 2)):
        assert choose_head({"noise": noise, "right": vectors}, answers, labels, np.arange(80)) == ("right", 100.0)
    assert measure_loss(np.array([[1.0], [3.0]]), np.array([0.0, 1.0])) == 2.5
    assert measure_loss(np.zeros((3, 2)), several[:3]) == pytest.approx(np.log(2))
    # A wrong answer that is certain, and weights: 1 * log(2) and 3 * -log(1e-15), over 4
    logits, expected = np.array([[0.0, 0.0], [99.0, 0.0]]), (np.log(2) + 3 * 15 * np.log(10)) / 4
    assert measure_loss(logits, np.array([0, 1]), [1.0, 3.0]) == pytest.approx(expected)


def test_many_rows_are_drawn_wherever_they_lie(monkeypatch):
    monkeypatch.setattr(frozen, "FOLD_ROWS", 50)
    vectors, targets = make_classes(400, 0.0)
    order = np.argsort(targets, kind="stable")
    assert choose_head({"": vectors[order]}, targets[order], 2, np.arange(400)) == ("", 100.0)
