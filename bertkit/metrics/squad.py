"""SQuAD scores and the paper's tau (sections 4.2 and 4.3, Tables 2 and 3), as functions.

Names are those of the official scripts evaluate-v1.1.py and evaluate-v2.0.py. Values are percentages and equal theirs
except for the rounding of sums. Chinese has no spaces between words, so the official F1 would equal exact match; its
answers are compared as by cmrc2018_evaluate.py of CMRC 2018 (Cui et al. 2019).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bertkit.errors import UsageError
from bertkit.metrics.rows import WeightedScore, measure_mean, take_values

PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")  # ASCII only: “ and – stay, as in the official scripts
ARTICLES = re.compile(r"\b(a|an|the)\b")
CMRC_PUNCTUATION = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
CMRC_WORD = re.compile(r"[\u4e00-\u9fa5]|[^\W\u4e00-\u9fa5]+(?:[.,'][^\W\u4e00-\u9fa5]+)*|\S")  # 果, 3.5, %


def normalize_answer(text: str) -> str:
    """Lower-case a text, remove ASCII punctuation and English articles, and collapse white space."""
    return " ".join(ARTICLES.sub(" ", PUNCTUATION.sub("", text.lower())).split())


def normalize_chinese(text: str) -> str:
    """Lower-case a text, remove the punctuation that CMRC removes, and collapse white space."""
    return " ".join(text.lower().translate(CMRC_PUNCTUATION).split())


# Language -> how a text is normalised and divided into words.
# Differs from CMRC: words that are not Chinese are found by a pattern, not by NLTK's tokenizer for English.
LANGUAGES: dict[str, tuple[Callable[[str], str], Callable[[str], list[str]]]] = {
    "en": (normalize_answer, str.split),
    "zh": (normalize_chinese, CMRC_WORD.findall),
}


def score_answers(
    gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str], version: int, language: str = "en"
) -> tuple[dict[str, int], dict[str, float]]:
    """Return exact match and F1 of each question, the best over its references.

    Version 2 drops references that are empty after normalisation, and uses "" if none is left. Only in version 2 do an
    empty answer and an empty reference have an F1 of 1.

    Args:
        gold: The reference texts by question id.
        predictions: The answer by question id. Other questions are ignored; a question without an answer scores 0.
        version: 1 for SQuAD 1.1, 2 for SQuAD 2.0.
        language: One of LANGUAGES; "en" is the official scripts'.

    Returns:
        Exact match (0 or 1) and token F1 (0 to 1), each by question id in the order of `gold`.
    """
    normalize, split = map(cache, LANGUAGES[language])  # many texts repeat
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
            f1[question] = max(_compare(split(answer), split(reference), language) for reference in references)
    return exact, f1


def _compare(answer: list[str], reference: list[str], language: str) -> float:
    # The order of operations is that of the official scripts, for equal rounding; 0 is an int there as well.
    if language == "zh":  # words of the longest sequence that both texts have
        shared = SequenceMatcher(None, answer, reference, autojunk=False).find_longest_match().size
    else:
        shared = (Counter(answer) & Counter(reference)).total()
    if not shared:
        return 0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def _check_complete(gold: Mapping[str, Any], given: Mapping[str, Any], what: str, remedy: str) -> None:
    if missing := [question for question in gold if question not in given]:
        raise UsageError(
            f"{len(missing):,} of {len(gold):,} questions have no {what}, the first is {missing[0]!r}; {remedy}"
        )


def score_squad1(gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """Return `exact_match` and `f1` in percent, as computed by evaluate-v1.1.py.

    Arguments are those of `score_answers` in version 1.
    """
    exact, f1 = (list(scores.values()) for scores in score_answers(gold, predictions, 1))
    return take_values(measure_questions(exact, f1))


def score_squad2(
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Return the scores of evaluate-v2.0.py in percent, under its names and in its order.

    Totals are counts. HasAns groups the questions with a reference, NoAns the others; an empty group has no scores.
    `null_odds` adds the best scores over all thresholds, and these thresholds.

    Args:
        gold: As in `score_answers`.
        predictions: As in `score_answers`.
        null_odds: Probability or log-odds of having no answer, by question id (--na-prob-file). Other questions are
            ignored.
        threshold: Questions with greater odds count as answered by "" (--na-prob-thresh). The official default of 1.0
            keeps every answer if the odds are probabilities, but not if they are log-odds.
    """
    _check_complete(gold, predictions, "prediction", 'predict "" where there is no answer')
    odds = dict.fromkeys(gold, 0.0) if null_odds is None else null_odds
    _check_complete(gold, odds, "null odds", "give the odds of every question")
    exact, f1 = score_answers(gold, predictions, 2)
    kept = (
        [float(not gold[question]) if odds[question] > threshold else score for question, score in scores.items()]
        for scores in (exact, f1)
    )
    result = take_values(measure_questions(*kept, list(map(bool, gold.values()))))
    if null_odds is not None:
        for name, scores in (("best_exact", exact), ("best_f1", f1)):
            result[name], result[f"{name}_thresh"] = _find_best(gold, predictions, scores, null_odds)
    return result


def measure_questions(
    exact: ArrayLike, f1: ArrayLike, answerable: Sequence[bool] | None = None
) -> dict[str, WeightedScore | float]:
    """Return the scores in percent of some questions, with the names of the official scripts, and their counts.

    Args:
        exact: (Q,) exact match of each question, 0 or 1.
        f1: (Q,) F1 of each question, from 0 to 1.
        answerable: (Q,) whether a question has an answer, for 2.0; None: 1.1, which counts nothing.
    """
    exact, f1 = (np.asarray(values, np.float64) for values in (exact, f1))
    if answerable is None:
        return {"exact_match": measure_mean(exact, percent=True), "f1": measure_mean(f1, percent=True)}
    has_answer = np.asarray(answerable, bool)
    found: dict[str, WeightedScore | float] = {}
    for prefix, chosen in (("", np.ones_like(has_answer)), ("HasAns_", has_answer), ("NoAns_", ~has_answer)):
        if chosen.any():
            found[f"{prefix}exact"] = measure_mean(exact, chosen, percent=True)
            found[f"{prefix}f1"] = measure_mean(f1, chosen, percent=True)
            found[f"{prefix}total"] = int(chosen.sum())
    return found


def compare_answers(
    gold: Mapping[str, Sequence[str]], texts: Sequence[str], language: str = "en"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (Q,) exact match and F1 of each answer of 2.0, and the score of no answer, from 0 to 1.

    Args:
        gold: The references by question id.
        texts: The answer of each question, in the order of `gold`.
        language: As in `score_answers`.
    """
    exact, f1 = score_answers(gold, dict(zip(gold, texts, strict=True)), 2, language)
    silent, _ = score_answers(gold, dict.fromkeys(gold, ""), 2, language)
    return tuple(np.array(list(scores.values()), np.float64) for scores in (exact, f1, silent))


def _find_best(
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    odds: Mapping[str, float],
) -> tuple[float, float]:
    # As in the official script, questions of equal odds are answered one by one in the order of `odds`, although no
    # threshold separates them. The best score may therefore be unreachable. `choose_tau` avoids this.
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


def choose_tau(odds: ArrayLike, answered: ArrayLike, unanswered: ArrayLike) -> float:
    """Return the tau of section 4.3 with the highest total score.

    Question q is answered if `odds[q] < -tau`. -tau, the reference code's `null_score_diff_threshold`, lies midway
    between the last odds that are answered and the first that are not, or 1.0 below or above all of them. Ties go to
    the tau nearest to 0, then to the positive one. Infinite odds are ignored, because no tau changes their outcome.

    Args:
        odds: (Q,) s_null minus the best non-null score.
        answered: (Q,) score of each question with its best non-null answer.
        unanswered: (Q,) score of each question with "".
    """
    odds, answered, unanswered = (np.asarray(values, np.float64) for values in (odds, answered, unanswered))
    order = np.argsort(odds, kind="stable")
    order = order[np.isfinite(odds[order])]
    if not len(order):
        return 0.0
    ranked = odds[order]
    # Cut k answers the first k questions; a cut is possible only between different odds. Totals are relative to that of
    # cut 0, and count as equal if they differ by no more than the rounding error of their sums.
    cuts = np.flatnonzero(np.concatenate([[True], ranked[1:] > ranked[:-1], [True]]))
    totals = np.cumsum(np.concatenate([[0.0], (answered - unanswered)[order]]))[cuts]
    equal = totals >= totals.max() - len(order) ** 2 * np.finfo(np.float64).eps
    middle = (ranked[cuts[1:-1] - 1] + ranked[cuts[1:-1]]) / 2
    taus = -np.concatenate([[ranked[0] - 1.0], middle, [ranked[-1] + 1.0]])[equal]
    return float(taus[np.abs(taus).argmin()]) + 0.0  # never -0.0
