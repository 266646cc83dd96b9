"""Vectors of texts and of words by counting alone, for the baselines that a fine-tuned model must exceed.

Texts in, arrays out: the linear head on them is `bertkit.tasks.frozen.solve`, and no model is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from scipy.linalg import cholesky
from scipy.sparse import csr_array

from bertkit.data.scripts import split_terms

MOST_TERMS = 100_000  # the most frequent terms; long texts have millions of different pairs of words
RUNS = ((re.compile(r"[A-Z]+"), "X"), (re.compile(r"[^\W\d_A-Z]+"), "x"), (re.compile(r"\d+"), "0"))


def vectorize_texts(
    train: Sequence[Sequence[str]],
    others: Sequence[Sequence[str]],
    unit: str = "words",
    weights: np.ndarray | None = None,
) -> tuple[csr_array, csr_array]:
    """Return the TF-IDF vectors (S, V) of two lists of single texts or pairs, with the weights of the first list.

    Args:
        unit: "words" counts words and pairs of words, or one to three characters of a script without spaces;
            "characters" counts two to five neighbours of a word.
        weights: (S,) how often each text of the first list counts; None: once.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer=TERM_LISTS[unit], sublinear_tf=True, max_features=MOST_TERMS)
    vectors = vectorizer.fit_transform(train)
    if weights is not None:
        counts = weights @ (vectors > 0)  # in how many texts each term is
        vectorizer.idf_ = np.log((1 + weights.sum()) / (1 + counts)) + 1
        vectors = vectorizer.transform(train)
    return vectors, vectorizer.transform(others)


def vectorize_words(train: Sequence[Sequence[str]], others: Sequence[Sequence[str]]) -> tuple[csr_array, csr_array]:
    """Return the vectors (M, V) of the words of two lists of sentences: each word, its shape and its neighbours."""
    from sklearn.feature_extraction.text import CountVectorizer

    vectorizer = CountVectorizer(analyzer=list, binary=True, max_features=MOST_TERMS)
    train, others = ([terms for words in sentences for terms in describe_words(words)] for sentences in (train, others))
    return vectorizer.fit_transform(train), vectorizer.transform(others)


def list_terms(texts: Sequence[str]) -> list[str]:
    """Return the terms of a text or two, as `split_terms` has them, each with the number of its text."""
    terms = []
    for number, text in enumerate(texts):
        terms += [f"{number} {term}" for term in split_terms(text.lower())]
    return terms or [""]


def list_characters(texts: Sequence[str]) -> list[str]:
    """Return the characters of a text or two, two to five neighbours of a word, each with the number of its text."""
    terms = []
    for number, text in enumerate(texts):
        for word in text.lower().split():
            spaced = f" {word} "
            for size in range(2, min(5, len(spaced)) + 1):
                terms += [f"{number} {spaced[start : start + size]}" for start in range(len(spaced) - size + 1)]
    return terms or [""]


def rotate(vectors: csr_array) -> np.ndarray:
    """Return dense vectors (S, S) with the inner products of sparse ones (S, V), so that heads on them answer alike.

    Where rows are fewer than terms and classes are many, a head on them is found in a tenth of the time.
    """
    products = (vectors @ vectors.T).toarray()
    products[np.diag_indices(len(products))] += 1e-6  # equal rows make it singular
    return cholesky(products, lower=True).astype(np.float32)


TERM_LISTS: Mapping[str, Callable[[Sequence[str]], list[str]]] = {"words": list_terms, "characters": list_characters}


def describe_words(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the terms of each word of a sentence."""
    own = [[word.lower(), make_shape(word), word[-3:].lower()] for word in words]
    padded = [["<s>"], *own, ["</s>"]]
    for before, terms, after in zip(padded, own, padded[2:], strict=False):
        numbered = [f"{number} {term}" for number, term in enumerate(terms)]
        yield [*numbered, *(f"before {term}" for term in before[:2]), *(f"after {term}" for term in after[:2])]


def make_shape(word: str) -> str:
    """Return a word with its capitals, other letters and digits as X, x and 0, runs of one kind as one."""
    for run, mark in RUNS:
        word = run.sub(mark, word)
    return word
