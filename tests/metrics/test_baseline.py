"""Vectors of texts and words, with scikit-learn as oracle, and the linear head on them."""

import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier

from bertkit.metrics.baseline import find_shape, vectorize_texts, vectorize_words
from bertkit.tasks.frozen import solve

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


def test_a_word_is_described_by_itself_its_shape_and_its_neighbours():
    vectors, others = vectorize_words([["Ada", "met", "Bob"], ["Ada"]], [["Ada", "met", "Eve"], ["7th"]])
    assert vectors.shape[0] == 4
    assert (vectors[0] != others[0]).nnz == 0
    assert others[2].nnz == 4  # the shape of Eve, the word before it with its shape, and the end of the sentence
    assert others[3].nnz == 2  # the ends of the sentence
    assert [find_shape(word) for word in ("McDonald's", "B-52", "ÉCOLE", "U.N.")] == ["XxXx'x", "X-0", "xX", "X.X."]


def test_a_head_answers_like_scikit_learn():
    rng = np.random.default_rng(0)
    vectors, noise = rng.normal(size=(80, 5)), rng.normal(size=80)
    classes = (vectors[:, 0] + noise > 0).astype(int) + (vectors[:, 1] > 0.5)
    for targets in (classes, classes.clip(max=1)):
        weight, bias = solve(vectors, targets, 3.0, targets.max() + 1)
        expected = LogisticRegression(C=3.0, max_iter=1000).fit(vectors, targets).predict_proba(vectors)
        assert softmax(vectors @ weight.T + bias, axis=1) == pytest.approx(expected)
    several = np.stack([classes == 0, vectors[:, 2] + noise > 0], axis=1).astype(np.float32)
    weight, bias = solve(vectors, several, 3.0, 2)
    oracle = OneVsRestClassifier(LogisticRegression(C=3.0, max_iter=1000)).fit(vectors, several.astype(int))
    assert expit(vectors @ weight.T + bias) == pytest.approx(oracle.predict_proba(vectors))
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
