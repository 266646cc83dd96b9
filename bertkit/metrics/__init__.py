"""GLUE, SQuAD and NER scores: pure functions, and `evaluate.Metric` modules over them that need no network.

GLUE (paper section 4.1, Table 1): the names are those of `evaluate`, the values fractions as plain floats; scikit-learn
and scipy do the arithmetic.
SQuAD (sections 4.2 and 4.3, Tables 2 and 3): the names are those of the official scripts evaluate-v1.1.py and
evaluate-v2.0.py, the values percentages equal to theirs to the last digit; also the paper's tau.
NER (section 5.3, Table 7): precision, recall and F1 of entities as in conlleval, the official script of CoNLL-2003, as
fractions.
`evaluate.load` would fetch the same functions from the Hub, a script each.

Left out: which task has which metric (`bertkit.tasks`), the files (`bertkit.data.formats.tables`), precision-recall curves of
SQuAD 2.0.
"""

import math
import re
import string
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, compress, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from bertkit.errors import UsageError

if TYPE_CHECKING:
    import evaluate

# --- GLUE -------------------------------------------------------------------------------------------------------------

GLUE_DESCRIPTION = "Scores of the GLUE benchmark, computed by scikit-learn and scipy."
GLUE_INPUTS = """
Args:
    predictions: a class id, or a number for pearson and spearmanr, for each example.
    references: the right one for each example, in the same order.
Returns:
    One fraction for each metric, under its name. f1 is that of class 1.
"""
GLUE_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}
"""


def compute_accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """The share of the predictions that equal their reference."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def compute_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 if nothing is or was predicted to be of class 1."""
    from sklearn.metrics import f1_score

    # With one label the macro average is that label's F1; unlike average="binary" it takes other ids than 0 and 1.
    return float(f1_score(references, predictions, labels=[1], average="macro", zero_division=0))


def compute_matthews(predictions: np.ndarray, references: np.ndarray) -> float:
    """Matthews' correlation of the classes, from -1 to 1; 0 where it is undefined: one side has only one class."""
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of one class on both sides
        return float(matthews_corrcoef(references, predictions))


def compute_pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Pearson's correlation, from -1 to 1; 0 where it is undefined: one side is constant, or there is one example."""
    from scipy.stats import pearsonr

    return _correlate(pearsonr, predictions, references)


def compute_spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal values having the mean of theirs."""
    from scipy.stats import spearmanr

    return _correlate(spearmanr, predictions, references)


def _correlate(function: Callable[..., Any], predictions: np.ndarray, references: np.ndarray) -> float:
    if len(predictions) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of input that is constant, or nearly
        value = float(function(predictions, references).statistic)
    return 0.0 if math.isnan(value) else value


# Each takes predictions and references (N,), N at least 1, finite; `compute_scores` checks that.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": compute_accuracy,
    "f1": compute_f1,
    "matthews_correlation": compute_matthews,
    "pearson": compute_pearson,
    "spearmanr": compute_spearman,
}
OF_NUMBERS = frozenset({"pearson", "spearmanr"})  # the others are of class ids


def compute_scores(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Metric -> value, in the order of `names`; `predictions` and `references` (N,) are class ids or numbers.

    Raises:
        UsageError: an unknown metric, no example, another number of predictions than of references, a NaN or an
            infinity, or a class id that is not whole.
    """
    _check_names(names)
    predictions, references = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if predictions.ndim != 1 or predictions.shape != references.shape:
        shapes = f"{_describe_shape(predictions)} and references {_describe_shape(references)}"
        raise UsageError(f"predictions {shapes} do not fit; give one prediction for each reference")
    if not len(predictions):
        raise UsageError("there are no predictions to score; give at least one, with its reference")
    for what, values in (("prediction", predictions), ("reference", references)):
        if len(places := np.flatnonzero(~np.isfinite(values))):
            raise UsageError(
                f"{what} {places[0] + 1} of {len(values):,} is {values[places[0]]}, which cannot be scored; "
                "a model whose training diverged predicts such values: try a lower learning rate"
            )
        if not OF_NUMBERS.issuperset(names) and len(places := np.flatnonzero(values % 1)):
            raise UsageError(
                f"{what} {places[0] + 1} of {len(values):,} is {values[places[0]]}, which is no class id; "
                "give whole numbers, or score with pearson or spearmanr"
            )
    return {name: METRICS[name](predictions, references) for name in names}


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in METRICS:
            raise UsageError(f"unknown metric {name!r}; the metrics are {', '.join(METRICS)}")


def _describe_shape(values: np.ndarray) -> str:
    return f"({', '.join(map(str, values.shape))})"


def make_metric(*names: str) -> "evaluate.Metric":
    """A module of `evaluate` whose `compute` is `compute_scores` of `names`; it keeps what is added in memory.

    It takes class ids as int64, and with `pearson` or `spearmanr` numbers as float64.

    Raises:
        UsageError: no metric or an unknown one.
    """
    _check_names(names)
    if not names:
        raise UsageError(f"no metric given; the metrics are {', '.join(METRICS)}")
    import datasets
    import evaluate

    class Glue(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            value = datasets.Value("int64" if OF_NUMBERS.isdisjoint(names) else "float64")
            # Without format="numpy", which rounds to float32.
            return evaluate.MetricInfo(
                description=GLUE_DESCRIPTION,
                citation=GLUE_CITATION,
                inputs_description=GLUE_INPUTS,
                features=datasets.Features({"predictions": value, "references": value}),
            )

        def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
            return compute_scores(names, predictions, references)

    return _make_quiet(Glue, "+".join(names))


def _make_quiet(module: type["evaluate.Metric"], name: str) -> "evaluate.Metric":
    # evaluate makes a folder for its files even where it writes none: in the user's cache if none is given.
    with tempfile.TemporaryDirectory() as folder:
        return module(config_name=name, keep_in_memory=True, cache_dir=folder)


# --- SQuAD ------------------------------------------------------------------------------------------------------------

SQUAD_VERSIONS = (1, 2)  # 1.1 and 2.0
SQUAD_DESCRIPTION = "Scores of the Stanford Question Answering Dataset, equal to the official evaluation scripts'."
SQUAD_INPUTS = """
Args:
    predictions: {"id", "prediction_text"} of each question; for SQuAD 2.0 also "no_answer_probability", and the text is
        "" for no answer.
    references: {"id", "answers": {"text": [...], "answer_start": [...]}} of each question, in any order; no text where
        the question has no answer (2.0). The starts are not looked at.
    no_answer_threshold: a prediction whose no_answer_probability is greater counts as "" (2.0; 1.0 if not given).
Returns:
    Percentages under the names of the official script: exact_match and f1 (1.1), exact, f1, total and more (2.0).
"""
SQUAD_CITATION = """\
@inproceedings{rajpurkar2016squad,
  title={{SQuAD}: 100,000+ Questions for Machine Comprehension of Text},
  author={Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2016}
}
@inproceedings{rajpurkar2018know,
  title={Know What You Don't Know: Unanswerable Questions for {SQuAD}},
  author={Rajpurkar, Pranav and Jia, Robin and Liang, Percy},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2018}
}
"""
PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")  # ASCII's: “ and – stay, as officially
LONGEST_ID = 40  # characters of a question's id in a message
SHORT = 100  # tokens, which are counted fastest one by one
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

    gold: question id -> texts of its references. predictions: of other questions are ignored; in version 1 a question
        without one scores 0.
    version: 1 for SQuAD 1.1, 2 for 2.0.

    Raises:
        UsageError: another version, no question, in version 1 a question without a reference, in version 2 one without
            a prediction.
    """
    _check_version(version)
    _check_questions(gold, predictions, version)
    normalize = cache(normalize_answer)  # the same texts come again and again
    split = cache(str.split)
    exact: dict[str, int] = {}
    f1: dict[str, float] = {}
    for question, texts in gold.items():
        if question not in predictions:
            exact[question] = f1[question] = 0
            continue
        answer = normalize(predictions[question])
        if answer and predictions[question] in texts:  # word for word: the others need not be looked at
            exact[question], f1[question] = 1, 1.0
        elif version == 2 and not answer:
            exact[question] = f1[question] = int(not any(map(normalize, texts)))
        elif not texts:
            exact[question] = f1[question] = 0
        else:
            references = set(map(normalize, texts))
            if version == 2:
                references = references - {""} or {""}
            exact[question] = int(answer in references)
            f1[question] = max(_compare(split(answer), split(reference)) for reference in references)
    return exact, f1


def score_silence(gold: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Question id -> exact match and F1, which are the same, of the answer "" in version 2."""
    normalize = cache(normalize_answer)
    return {question: int(not any(map(normalize, texts))) for question, texts in gold.items()}


def _compare(answer: list[str], reference: list[str]) -> float:
    # In the order of the official scripts' operations, which are rounded; 0 is an int there, too.
    if len(answer) + len(reference) < SHORT:
        shared = sum(min(answer.count(token), reference.count(token)) for token in {*answer} & {*reference})
    else:
        shared = (Counter(answer) & Counter(reference)).total()
    if not shared:
        return 0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def _check_version(version: int) -> None:
    if version not in SQUAD_VERSIONS:
        raise UsageError(f"unknown SQuAD version {version!r}; give 1 for SQuAD 1.1 or 2 for 2.0")


def _check_questions(gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str], version: int) -> None:
    if not gold:
        raise UsageError("there are no questions to score; give a SQuAD file that holds at least one")
    if version == 2:
        _check_complete(gold, predictions, "prediction", 'predict "" where there is no answer')
    elif empty := [question for question, texts in gold.items() if not texts]:
        raise UsageError(
            f"{len(empty):,} of {len(gold):,} questions have no reference answer, the first is "
            f"{empty[0][:LONGEST_ID]!r}; SQuAD 1.1 has answers to all, score this file as version 2"
        )


def _check_complete(gold: Mapping[str, Any], given: Mapping[str, Any], what: str, remedy: str) -> None:
    if missing := [question for question in gold if question not in given]:
        raise UsageError(
            f"{len(missing):,} of {len(gold):,} questions have no {what}, the first is {missing[0][:LONGEST_ID]!r}; "
            f"{remedy}"
        )


def score_squad1(gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent, as evaluate-v1.1.py gives them for the questions in the order of `gold`.

    Arguments and errors are those of `score_answers` in version 1.
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
        UsageError: no question, or one without a prediction or without odds, where the official script crashes; odds
            that are NaN.
    """
    exact, f1 = score_answers(gold, predictions, 2)
    odds = dict.fromkeys(gold, 0.0) if null_odds is None else null_odds
    _check_odds(gold, odds)
    kept = (
        [float(not gold[question]) if odds[question] > threshold else score for question, score in scores.items()]
        for scores in (exact, f1)
    )
    result = average_scores(gold, *kept)
    if null_odds is not None:
        for name, scores in (("best_exact", exact), ("best_f1", f1)):
            result[name], result[f"{name}_thresh"] = _find_best(gold, predictions, scores, null_odds)
    return result


def _check_odds(gold: Mapping[str, Any], odds: Mapping[str, float]) -> None:
    _check_complete(gold, odds, "null odds", "give the odds of all of them")
    if wrong := [question for question in gold if math.isnan(odds[question])]:
        raise UsageError(
            f"{len(wrong):,} of {len(gold):,} null odds are NaN, the first of question {wrong[0][:LONGEST_ID]!r}; a "
            "model whose training diverged predicts such values: try a lower learning rate"
        )


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

    Raises:
        UsageError: no question, other numbers of scores than of odds, or odds that are NaN.
    """
    odds, answered, unanswered = (np.asarray(values, np.float64) for values in (odds, answered, unanswered))
    _check_columns(odds, answered, unanswered)
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


def _check_columns(odds: np.ndarray, answered: np.ndarray, unanswered: np.ndarray) -> None:
    if not (odds.ndim == 1 and odds.shape == answered.shape == unanswered.shape):
        shapes = ", ".join(map(_describe_shape, (odds, answered, unanswered)))
        raise UsageError(f"odds, answered and unanswered {shapes} do not fit; give one of each for every question")
    if not len(odds):
        raise UsageError("there are no questions to find tau on; give at least one")
    if len(places := np.flatnonzero(np.isnan(odds))):
        raise UsageError(
            f"{len(places):,} of {len(odds):,} odds are NaN, the first at place {places[0] + 1}; a model whose "
            "training diverged predicts such values: try a lower learning rate"
        )


def _place_thresholds(ranked: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    # What is smaller is answered. A step of 1.0 may be lost to rounding; between neighbours there is no number, and
    # their middle is one of them: then it is the upper one, so that the lower one alone is smaller.
    below = min(ranked[0] - 1.0, np.nextafter(ranked[0], -np.inf))
    above = max(ranked[-1] + 1.0, np.nextafter(ranked[-1], np.inf))
    last, first = ranked[cuts[1:-1] - 1], ranked[cuts[1:-1]]
    middle = last / 2 + first / 2  # their sum may overflow
    return np.concatenate([[below], np.where(middle > last, middle, first), [above]])


def make_squad_metric(version: int) -> "evaluate.Metric":
    """A module of `evaluate` that takes and gives what the Hub's `squad` (version 1) or `squad_v2` (2) does.

    Like these it takes "no_answer_probability" as float32, so `best_exact_thresh` and `best_f1_thresh` are rounded.

    Raises:
        UsageError: another version.
    """
    _check_version(version)
    import datasets
    import evaluate

    class Squad(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            text = datasets.Value("string")
            prediction = {"id": text, "prediction_text": text}
            if version == 2:
                prediction["no_answer_probability"] = datasets.Value("float32")
            answers = datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")})
            reference = {"id": text, "answers": answers}
            return evaluate.MetricInfo(
                description=SQUAD_DESCRIPTION,
                citation=SQUAD_CITATION,
                inputs_description=SQUAD_INPUTS,
                features=datasets.Features({"predictions": prediction, "references": reference}),
            )

        def _compute(
            self,
            predictions: list[dict[str, Any]],
            references: list[dict[str, Any]],
            no_answer_threshold: float | None = None,
        ) -> dict[str, float]:
            gold = {question: answers["text"] for question, answers in _index(references, "answers").items()}
            texts = _index(predictions, "prediction_text")
            if version == 2:
                odds = _index(predictions, "no_answer_probability")
                return score_squad2(gold, texts, odds, 1.0 if no_answer_threshold is None else no_answer_threshold)
            if no_answer_threshold is not None:
                raise UsageError("SQuAD 1.1 has no no_answer_threshold; leave it out, or score as version 2")
            return score_squad1(gold, texts)

    return _make_quiet(Squad, ("squad", "squad_v2")[version - 1])


def _index(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, Any]:
    index = {row["id"]: row[column] for row in rows}
    if len(index) < len(rows):
        twice, _ = Counter(row["id"] for row in rows).most_common(1)[0]
        raise UsageError(f"question {twice!r} comes with {column} more than once; give each question once")
    return index


# --- NER --------------------------------------------------------------------------------------------------------------

NER_DESCRIPTION = "Scores of entities in tagged sentences, equal to those of conlleval, the script of CoNLL-2003."
NER_INPUTS = """
Args:
    predictions: the tags of each sentence: O, B-TYPE and I-TYPE, in IOB1 or IOB2.
    references: the right ones, in the same order.
Returns:
    Fractions: precision, recall and f1 of the entities, and accuracy, the share of tags that are right.
"""
NER_CITATION = """\
@inproceedings{tjong2003conll,
  title={Introduction to the {CoNLL}-2003 Shared Task: Language-Independent Named Entity Recognition},
  author={Tjong Kim Sang, Erik F. and De Meulder, Fien},
  booktitle={Conference on Computational Natural Language Learning},
  year={2003}
}
"""
IOB = re.compile("O|[BI]-.+")
Entity = tuple[int, int, str]  # first word, end, type


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence in order, from tags in IOB1 or IOB2.

    As conlleval reads them, sequences that are neither included: an entity begins with each B-, and with an I- that
    comes first, after O, or after another type; it ends before the next one, before O, and with the sentence.
    """
    entities: list[Entity] = []
    start = 0
    for place, (tag, after) in enumerate(pairwise([*tags, "O"])):
        if after[0] == "I" and after[2:] == tag[2:]:
            continue
        if tag != "O":
            entities.append((start, place + 1, tag[2:]))
        start = place + 1
    return entities


def score_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """`precision`, `recall` and `f1` of all entities, and `accuracy` of the tags, as fractions; 0 where undefined.

    An entity is right if its words and its type are; a sentence's end ends it.

    gold, predicted: the tags of each sentence.

    Raises:
        UsageError: other sentences on one side than on the other, or a tag that is not IOB.
    """
    _check_tags(gold, predicted)
    right, found, wanted = (counts.total() for counts in _count_entities(gold, predicted))
    pairs = [pair for tags in zip(gold, predicted, strict=True) for pair in zip(*tags, strict=True)]
    accuracy = sum(tag == guess for tag, guess in pairs) / max(len(pairs), 1)
    return _rate_entities(right, found, wanted) | {"accuracy": accuracy}


def score_types(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
    """Type -> `precision`, `recall` and `f1` of its entities, for the types on either side in alphabetical order.

    Arguments and errors are those of `score_entities`.
    """
    _check_tags(gold, predicted)
    right, found, wanted = _count_entities(gold, predicted)
    return {kind: _rate_entities(right[kind], found[kind], wanted[kind]) for kind in sorted(found | wanted)}


def _count_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[Counter[str], ...]:
    """By type: the predicted entities that are right, all predicted ones, and all right ones."""
    right, found, wanted = Counter(), Counter(), Counter()
    for tags, guesses in zip(gold, predicted, strict=True):
        entities, guessed = set(find_entities(tags)), set(find_entities(guesses))
        for counts, chosen in ((right, entities & guessed), (found, guessed), (wanted, entities)):
            counts.update(kind for _, _, kind in chosen)
    return right, found, wanted


def _rate_entities(right: int, found: int, wanted: int) -> dict[str, float]:
    precision, recall = right / max(found, 1), right / max(wanted, 1)
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}


def _check_tags(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> None:
    if len(gold) != len(predicted):
        raise UsageError(f"{len(predicted):,} sentences were predicted and {len(gold):,} are right; give one for each")
    for number, (tags, guesses) in enumerate(zip(gold, predicted, strict=True), 1):
        if len(tags) != len(guesses):
            raise UsageError(
                f"sentence {number} has {len(tags)} tags and {len(guesses)} predicted ones; give one for each word"
            )
    for sentences in (gold, predicted):
        if wrong := [tag for tag in set(chain.from_iterable(sentences)) if not IOB.fullmatch(tag)]:
            raise UsageError(
                f"the tag {min(wrong)!r} is not IOB, that is O, B-TYPE or I-TYPE; convert IOBES or BILOU to IOB first"
            )


def make_ner_metric() -> "evaluate.Metric":
    """A module of `evaluate` whose `compute` is `score_entities`; it keeps what is added in memory."""
    import datasets
    import evaluate

    class Ner(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            tags = datasets.Sequence(datasets.Value("string"))
            return evaluate.MetricInfo(
                description=NER_DESCRIPTION,
                citation=NER_CITATION,
                inputs_description=NER_INPUTS,
                features=datasets.Features({"predictions": tags, "references": tags}),
            )

        def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
            return score_entities(references, predictions)

    return _make_quiet(Ner, "conlleval")
