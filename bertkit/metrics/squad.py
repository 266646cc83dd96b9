"""The scores of SQuAD and the paper's tau (sections 4.2 and 4.3, Tables 2 and 3), as functions.

The names are those of the official scripts evaluate-v1.1.py and evaluate-v2.0.py, the values percentages equal to
theirs to the last digit.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bertkit.errors import UsageError

PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")  # ASCII's: “ and – stay, as officially
LONGEST_ID = 40  # characters of a question's id in a message
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """The text in lower case, without ASCII punctuation and English articles, one space between words."""
    return " ".join(ARTICLES.sub(" ", PUNCTUATION.sub("", text.lower())).split())


def score_answers(
    gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str], version: int
) -> tuple[dict[str, int], dict[str, float]]:
    """Question id -> exact match, 0 or 1, and question id -> F1 of the tokens, from 0 to 1; in the order of `gold`.

    Each is the best over the references. Version 2 leaves out references that normalise to nothing, and takes "" if
    none is left; only there an answer and a reference without tokens have F1 1.

    gold: question id -> texts of its references. predictions: of other questions are ignored; a question without one
        scores 0.
    version: 1 for SQuAD 1.1, 2 for 2.0.
    """
    normalize = cache(normalize_answer)  # the same texts come again and again
    split = cache(str.split)
    exact: dict[str, int] = {}
    f1: dict[str, float] = {}
    for question, texts in gold.items():
        if question not in predictions:
            exact[question] = f1[question] = 0
            continue
        answer, references = normalize(predictions[question]), set(map(normalize, texts))
        if version == 2:
            references = references - {""} or {""}
        exact[question] = int(answer in references)
        if version == 2 and not answer:
            f1[question] = exact[question]
        else:
            f1[question] = max(_compare(split(answer), split(reference)) for reference in references)
    return exact, f1


def _compare(answer: list[str], reference: list[str]) -> float:
    # In the order of the official scripts' operations, which are rounded; 0 is an int there, too.
    shared = (Counter(answer) & Counter(reference)).total()
    if not shared:
        return 0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def _check_complete(gold: Mapping[str, Any], given: Mapping[str, Any], what: str, remedy: str) -> None:
    if missing := [question for question in gold if question not in given]:
        raise UsageError(
            f"{len(missing):,} of {len(gold):,} questions have no {what}, the first is {missing[0][:LONGEST_ID]!r}; "
            f"{remedy}"
        )


def score_squad1(gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent, as evaluate-v1.1.py gives them for the questions in the order of `gold`.

    Arguments are those of `score_answers` in version 1.
    """
    exact, f1 = score_answers(gold, predictions, 1)
    exact_total = f1_total = 0.0
    for question in gold:  # not sum(): from Python 3.12 on it makes up for rounding, which the official += does not
        exact_total += exact[question]
        f1_total += f1[question]
    return {"exact_match": 100.0 * exact_total / len(gold), "f1": 100.0 * f1_total / len(gold)}


def score_squad2(
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """The scores of evaluate-v2.0.py under its names and in its order, in percent; the totals are whole numbers.

    HasAns are the questions with a reference, NoAns the others; a group without a question has no scores. With
    `null_odds` also the best scores over all thresholds, and these thresholds.

    gold, predictions: as in `score_answers`.
    null_odds: question id -> probability or log-odds that it has no answer (--na-prob-file); of other questions they
        are ignored.
    threshold: questions with greater odds count as answered by "" (--na-prob-thresh). The default is the official one,
        which means to answer always where the odds are probabilities, but not where they are log-odds.

    Raises:
        UsageError: A question without a prediction or without odds, where the official script crashes.
    """
    _check_complete(gold, predictions, "prediction", 'predict "" where there is no answer')
    odds = dict.fromkeys(gold, 0.0) if null_odds is None else null_odds
    _check_complete(gold, odds, "null odds", "give the odds of all of them")
    exact, f1 = score_answers(gold, predictions, 2)
    kept = (
        [float(not gold[question]) if odds[question] > threshold else score for question, score in scores.items()]
        for scores in (exact, f1)
    )
    result = average_scores(gold, *kept)
    if null_odds is not None:
        for name, scores in (("best_exact", exact), ("best_f1", f1)):
            result[name], result[f"{name}_thresh"] = _find_best(gold, predictions, scores, null_odds)
    return result


def average_scores(gold: Mapping[str, Sequence[str]], exact: Iterable[float], f1: Iterable[float]) -> dict[str, float]:
    """Scores of the questions in the order of `gold`, from 0 to 1, as evaluate-v2.0.py's percentages."""
    exact, f1 = list(exact), list(f1)
    answerable = [bool(texts) for texts in gold.values()]
    groups = {"": [True] * len(gold), "HasAns_": answerable, "NoAns_": [not value for value in answerable]}
    result: dict[str, float] = {}
    for prefix, chosen in groups.items():
        if count := sum(chosen):
            result[f"{prefix}exact"] = 100.0 * sum(compress(exact, chosen)) / count
            result[f"{prefix}f1"] = 100.0 * sum(compress(f1, chosen)) / count
            result[f"{prefix}total"] = count
    return result


def _find_best(
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    odds: Mapping[str, float],
) -> tuple[float, float]:
    # As the official script: questions of equal odds, which no threshold tells apart, are answered one by one in the
    # order of `odds`, so the best score may be out of reach. `find_tau` does not.
    total = best = sum(not texts for texts in gold.values())
    threshold = 0.0
    for question in sorted(filter(gold.__contains__, odds), key=odds.__getitem__):
        if gold[question]:
            total += scores[question]
        elif predictions[question]:
            total -= 1
        if total > best:
            best, threshold = total, odds[question]
    return 100.0 * best / len(gold), threshold


def find_tau(odds: ArrayLike, answered: ArrayLike, unanswered: ArrayLike) -> float:
    """The tau of section 4.3 with the highest total score: question q is answered where `odds[q] < -tau`.

    -tau, the reference code's `null_score_diff_threshold`, is midway between the last odds that are answered and the
    first that are not, or 1.0 below or above all of them; the tau nearest to 0 is taken of those with equal totals, and
    of two as near the positive one. Infinite odds have no say: no tau changes what becomes of them.

    odds: (Q,) s_null - the best non-null score.
    answered, unanswered: (Q,) the score of each question with its best non-null answer, and with "".
    """
    odds, answered, unanswered = (np.asarray(values, np.float64) for values in (odds, answered, unanswered))
    order = np.argsort(odds, kind="stable")
    order = order[np.isfinite(odds[order])]
    if not len(order):
        return 0.0
    ranked = odds[order]
    # Cut k answers the first k questions; only between different odds can one cut. Totals are above that of cut 0, and
    # equal if they differ by no more than their additions may have rounded.
    cuts = np.flatnonzero(np.concatenate([[True], ranked[1:] > ranked[:-1], [True]]))
    totals = np.cumsum(np.concatenate([[0.0], (answered - unanswered)[order]]))[cuts]
    equal = totals >= totals.max() - len(order) ** 2 * np.finfo(np.float64).eps
    taus = -_place_thresholds(ranked, cuts)[equal]
    return float(taus[np.abs(taus).argmin()]) + 0.0  # never -0.0


def _place_thresholds(ranked: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    # What is smaller is answered. A step of 1.0 may be lost to rounding; between neighbours there is no number, and
    # their middle is one of them: then it is the upper one, so that the lower one alone is smaller.
    below = min(ranked[0] - 1.0, np.nextafter(ranked[0], -np.inf))
    above = max(ranked[-1] + 1.0, np.nextafter(ranked[-1], np.inf))
    last, first = ranked[cuts[1:-1] - 1], ranked[cuts[1:-1]]
    middle = last / 2 + first / 2  # their sum may overflow
    return np.concatenate([[below], np.where(middle > last, middle, first), [above]])
