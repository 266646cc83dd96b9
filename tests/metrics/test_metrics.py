"""GLUE, SQuAD and NER scores: worked values, direct formulas, what is undefined, bad input, `evaluate` modules."""

import math
import re
import string
from itertools import accumulate, pairwise

import evaluate
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.metrics.glue import compute_scores, make_metric
from bertkit.metrics.ner import count_entities, find_entities, score_entities, score_types
from bertkit.metrics.rows import take_values
from bertkit.metrics.squad import (
    choose_tau,
    measure_questions,
    normalize_answer,
    normalize_chinese,
    score_answers,
    score_squad1,
    score_squad2,
)
from bertkit.metrics.table import make_rows

pytestmark = pytest.mark.filterwarnings("error")
CLASSES = ("accuracy", "f1", "matthews_correlation")
NUMBERS = ("pearson", "spearmanr")


def score(name: str, predictions: object, references: object) -> float:
    return compute_scores([name], predictions, references)[name]


# Pairs (prediction, reference): three (1, 1), one (0, 0), two (1, 0), one (0, 1): TP 3, TN 1, FP 2, FN 1.
# accuracy (3 + 1) / 7; precision 3/5 and recall 3/4: f1 = 2 * 3 / (2 * 3 + 2 + 1) = 2/3;
# Matthews (3 * 1 - 2 * 1) / sqrt(5 * 4 * 3 * 2) = 1 / sqrt(120).
@pytest.mark.parametrize(
    ("name", "value"), [("accuracy", 4 / 7), ("f1", 2 / 3), ("matthews_correlation", 1 / math.sqrt(120))]
)
def test_classes_worked_by_hand(name, value):
    predictions, references = [1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]
    assert score(name, predictions, references) == pytest.approx(value, abs=1e-15)


# Means 2.5 and 4; deviations (-1.5, -0.5, 0.5, 1.5) and (-3, -1, -2, 6): products sum to 4.5 + 0.5 - 1 + 9 = 13,
# squares to 5 and 50: Pearson 13 / sqrt(250). Ranks (1, 2, 3, 4) and (1, 3, 2, 4): Spearman 1 - 6 * 2 / (4 * 15) = 0.8.
@pytest.mark.parametrize(("name", "value"), [("pearson", 13 / math.sqrt(250)), ("spearmanr", 0.8)])
def test_numbers_worked_by_hand(name, value):
    assert score(name, [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 10.0]) == pytest.approx(value, abs=1e-15)


def test_accuracy_and_matthews_of_three_classes():
    """Matthews, Gorodkin's form: (c s - sum p_k t_k) / sqrt((s² - sum p_k²)(s² - sum t_k²)), here with s = 4, c = 3,
    p = (1, 1, 2), t = (1, 2, 1): (12 - 5) / sqrt(10 * 10).
    """
    found = compute_scores(["accuracy", "matthews_correlation"], [0, 1, 2, 2], [0, 1, 1, 2])
    assert found == {"accuracy": 0.75, "matthews_correlation": pytest.approx(0.7)}


def test_predictions_that_are_no_numbers_are_refused(refused):
    for names, predictions in ((["accuracy"], [1, math.nan]), (["pearson"], [-math.inf, 2])):
        with refused():
            compute_scores(names, predictions, [1, 0])


@pytest.mark.parametrize("names", [("accuracy", "f1"), ("matthews_correlation",), NUMBERS])
def test_module_in_two_batches_is_the_pure_function_and_leaves_no_files(names, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    generator = np.random.default_rng(0)
    is_class = set(names) <= set(CLASSES)
    predictions, references = generator.integers(0, 2, (2, 40)) if is_class else generator.normal(size=(2, 40))
    expected = compute_scores(names, predictions, references)
    metric, other = make_metric(*names), make_metric(*names)
    other.add(prediction=predictions[0], reference=references[1])  # modules do not mix
    for part in (slice(0, 15), slice(15, 40)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == expected
    assert metric.compute(predictions=predictions.tolist(), references=references.tolist()) == expected
    assert list(tmp_path.iterdir()) == []


def test_a_module_reads_labels_as_texts():
    """Right are one of two of a, both of b and none of c."""
    predictions, references = ["a", "b", "b", "a"], ["a", "b", "b", "c"]
    found = make_metric("accuracy", "f1").compute(predictions=predictions, references=references, average="macro")
    assert found == {"accuracy": 0.75, "f1": pytest.approx((2 / 3 + 1 + 0) / 3)}
    chosen = {"predictions": ["yes", "no"], "references": ["yes", "yes"], "pos_label": "yes"}
    assert make_metric("f1").compute(**chosen) == {"f1": pytest.approx(2 / 3)}


# --- SQuAD: worked examples


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Denver Broncos!", "denver broncos"),
        ("  a cat,\tan\u00a0owl\nand the dog ", "cat owl and dog"),
        ("U.S.A.'s", "usas"),  # punctuation goes first and leaves no gap ...
        ("the-rapist a_n A.", "therapist"),  # ... so that new words and articles appear: a_n -> an, A. -> a
        ("theatre then another banana the2", "theatre then another banana the2"),
        ("“the” –a– (an)", "“ ” – –"),  # punctuation beyond ASCII stays and separates words
        ("ÉTÉ İ $5.00", "été i̇ 500"),
        ("thé a\u0301 然the", "thé \u0301 然the"),  # a combining mark ends a word, a letter of any script does not
        ("", ""),
        ("The, a; AN.", ""),
    ],
)
def test_answers_are_normalized(text, normalized):
    assert normalize_answer(text) == normalized


def test_squad1_worked_by_hand():
    """q1 is right after normalisation. q2 shares one token with the first reference, whose F1 is 2 * 1 * 1/3 / (4/3) =
    1/2, and none with the second. q3 has no answer: 0. q4 agrees on nothing: exact 1, F1 0. "else" is not asked for.
    """
    gold = {"q1": ["Broncos", "Denver Broncos"], "q2": ["blue and white", "white"], "q3": ["x"], "q4": ["The"]}
    predictions = {"else": "x", "q4": "a.", "q1": "the broncos!", "q2": "blue"}
    assert score_answers(gold, predictions, 1) == (
        {"q1": 1, "q2": 0, "q3": 0, "q4": 1},
        {"q1": 1.0, "q2": 0.5, "q3": 0, "q4": 0},
    )
    assert list(score_squad1(gold, predictions).items()) == [("exact_match", 50.0), ("f1", 37.5)]


SQUAD2_GOLD = {
    "right": ["the Broncos", "Denver"],
    "half": ["blue and white"],
    "none": [],
    "missed": ["1976"],
    "void": ["The", "a."],
    "part": ["the", "gold"],
}
SQUAD2_PREDICTIONS = {"right": "Broncos", "half": "blue", "none": "", "missed": "", "void": "an", "part": "the"}


def test_squad2_worked_by_hand():
    """Answerable with: right 1, half 0 and 1/2, missed 0; void, whose references are nothing, is right with nothing; of
    part only "gold" counts, so that nothing is wrong. Unanswerable: none, right.
    """
    exact, f1 = score_answers(SQUAD2_GOLD, SQUAD2_PREDICTIONS, 2)
    assert exact == {"right": 1, "half": 0, "none": 1, "missed": 0, "void": 1, "part": 0}
    assert f1 == exact | {"half": 0.5}
    scores = score_squad2(SQUAD2_GOLD, SQUAD2_PREDICTIONS)
    assert scores == {
        "exact": 50.0,
        "f1": 100.0 * 3.5 / 6,
        "total": 6,
        "HasAns_exact": 40.0,
        "HasAns_f1": 50.0,
        "HasAns_total": 5,
        "NoAns_exact": 100.0,
        "NoAns_f1": 100.0,
        "NoAns_total": 1,
    }
    answerable = list(map(bool, SQUAD2_GOLD.values()))
    assert take_values(measure_questions(list(exact.values()), list(f1.values()), answerable)) == scores


def test_squad2_thresholds_worked_by_hand():
    """Answered are right, whose odds are the threshold, and both of -1: half (F1 1/2), asked (no answer, wrong). Not:
    void, which has references and so is wrong with "" here, and none, right.

    The best scores, from one question without answer that is right, asked and none being the two: start 2; half 2 or
    2.5 at -1, asked 1 or 1.5; right 2 or 2.5 at 0.5; void 3 or 3.5 at 2.0; none, which is answered "", as it is.
    """
    gold = {"right": ["x"], "half": ["blue and white"], "asked": [], "void": ["a"], "none": []}
    predictions = {"right": "x", "half": "blue", "asked": "y", "void": "", "none": ""}
    odds = {"half": -1, "asked": -1, "right": 0.5, "none": 3.0, "void": 2.0, "else": -7.0}
    scores = score_squad2(gold, predictions, odds, 0.5)
    best = {"best_exact": 60.0, "best_exact_thresh": 2.0, "best_f1": 70.0, "best_f1_thresh": 2.0}
    assert list(scores)[-4:] == list(best)
    assert scores == best | {
        "exact": 40.0,
        "f1": 50.0,
        "total": 5,
        "HasAns_exact": pytest.approx(100.0 / 3),
        "HasAns_f1": 50.0,
        "HasAns_total": 3,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
    }
    # Without odds all are 0.0: below a negative threshold nothing is answered.
    assert score_squad2(gold, predictions, threshold=-0.1)["exact"] == 40.0


def test_best_scores_cut_between_ties_as_the_official_script_does_and_tau_does_not():
    gold, predictions = {"q1": ["x"], "q2": []}, {"q1": "x", "q2": "y"}
    assert score_squad2(gold, predictions, {"q1": 0.5, "q2": 0.5})["best_f1"] == 100.0
    assert score_squad2(gold, predictions, {"q2": 0.5, "q1": 0.5})["best_f1"] == 50.0
    assert choose_tau([0.5, 0.5], [1, 0], [0, 1]) == 0.5  # both right at once is out of reach; -1.5 is farther from 0


# --- SQuAD: an oracle of the official scripts


def slow_tokens(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    parts = re.findall(r"\w+|\W+", kept)
    return "".join(" " if part in ("a", "an", "the") else part for part in parts).split()


def slow_f1(answer: list[str], reference: list[str]) -> float:
    left, shared = list(reference), 0
    for token in answer:
        if token in left:
            left.remove(token)
            shared += 1
    if shared == 0:
        return 0
    precision, recall = shared / len(answer), shared / len(reference)
    return (2 * precision * recall) / (precision + recall)


def slow_squad1(gold: dict, predictions: dict) -> dict:
    exact = f1 = 0
    for question, texts in gold.items():
        if question in predictions:
            answer, references = slow_tokens(predictions[question]), [slow_tokens(text) for text in texts]
            exact += any(answer == reference for reference in references)
            f1 += max(slow_f1(answer, reference) for reference in references)
    return {"exact_match": 100.0 * exact / len(gold), "f1": 100.0 * f1 / len(gold)}


def slow_squad2(gold: dict, predictions: dict, odds: dict | None, threshold: float) -> dict:
    exact, f1 = {}, {}
    for question, texts in gold.items():
        answer = slow_tokens(predictions[question])
        references = [slow_tokens(text) for text in texts if slow_tokens(text)]
        exact[question] = int(answer in (references or [[]]))
        f1[question] = max(slow_f1(answer, each) for each in references) if references else int(not answer)
    rows: list[tuple[str, list[str]]] = [("", list(gold))]
    rows += [("HasAns_", [each for each in gold if gold[each]]), ("NoAns_", [each for each in gold if not gold[each]])]
    result = {}
    for prefix, questions in rows:
        for name, raw in (("exact", exact), ("f1", f1)):
            left = [(odds[each] if odds else 0.0) > threshold for each in questions]
            cut = [float(not gold[q]) if no else raw[q] for q, no in zip(questions, left, strict=True)]
            if questions:
                result[prefix + name] = 100.0 * sum(cut) / len(cut)
        if questions:
            result[f"{prefix}total"] = len(questions)
    for name, raw in (("best_exact", exact), ("best_f1", f1)) if odds else ():
        places = {question: place for place, question in enumerate(odds)}
        order = sorted(gold, key=lambda each: (odds[each], places[each]))
        steps = [raw[each] if gold[each] else (-1 if predictions[each] else 0) for each in order]
        totals = list(accumulate(steps, initial=[bool(texts) for texts in gold.values()].count(False)))
        first = totals.index(max(totals))
        result[name] = 100.0 * totals[first] / len(gold)
        result[f"{name}_thresh"] = odds[order[first - 1]] if first else 0.0
    return result


PLAIN = ["a", "an", "the", "The", "AN", "cat", "Cat", "dog", "dogs", "5", "50", "a.", "the-", "t-he", "_", ".", "'", ""]
ODD = ["“", "”", "–", "É", "é", "e\u0301", "İ", "ß", "ﬁ", "然", "😀", "\u200b", "\u00a0", "\t", "\n", "\ud83d"]
pieces = st.sampled_from([*PLAIN, *ODD])
texts = st.lists(st.tuples(pieces, st.sampled_from(["", " ", " ", "  "])), max_size=5).map(
    lambda parts: "".join(piece + gap for piece, gap in parts)
)


@st.composite
def answered_questions(draw, fewest: int):
    """Questions with at least `fewest` references from a small pool; answers, also to another one, in any order."""
    pool = st.sampled_from([*draw(st.lists(texts, min_size=1, max_size=5)), ""])
    count = draw(st.integers(1, 6))
    gold = {f"q{number}": draw(st.lists(pool, min_size=fewest, max_size=3)) for number in range(count)}
    predictions = {question: draw(pool | texts) for question in draw(st.permutations([*gold, "else"]))}
    return gold, predictions


@given(answered_questions(1), st.data())
def test_squad1_is_the_oracle(questions, data):
    gold, predictions = questions
    for question in data.draw(st.sets(st.sampled_from(list(gold)))):
        del predictions[question]
    assert score_squad1(gold, predictions) == pytest.approx(slow_squad1(gold, predictions), rel=1e-12)


@given(answered_questions(0), st.data())
def test_squad2_is_the_oracle(questions, data):
    gold, predictions = questions
    values = data.draw(st.sampled_from([st.sampled_from([0, 0.25, 0.5, 1.0]), st.floats(-9, 9), st.floats(0, 1)]))
    order = data.draw(st.permutations(list(predictions)))
    odds = data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(order, values)))
    threshold = data.draw(st.sampled_from([1.0, 0.0, 0.25, -1.0]) | st.floats(-9, 9))
    ours, slow = score_squad2(gold, predictions, odds, threshold), slow_squad2(gold, predictions, odds, threshold)
    assert list(ours) == list(slow)
    assert ours == pytest.approx(slow, rel=1e-12)


# --- SQuAD: Chinese, as CMRC scores it


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("《红楼梦》，", "红楼梦"),
        (" 苹果\u3000手机 ", "苹果 手机"),
        ("A-B 3.5%", "ab 3.5%"),  # ASCII punctuation stays, except what CMRC lists
        ("the 苹果", "the 苹果"),
        ("…。", "…"),
    ],
)
def test_chinese_answers_are_normalized(text, normalized):
    assert normalize_chinese(text) == normalized


def test_chinese_worked_by_hand():
    """q1: the longest common sequence of 一名教师 and 教师节 is 教师: 2 * (2/4 * 2/3) / (2/4 + 2/3) = 4/7. q2:
    punctuation does not count. q3: 东 and 西 are shared, but only one in a row: 1/2. q4: the words are 3.5, % and 米; %
    is shared. The official scripts give 0 to all four.
    """
    gold = {"q1": ["教师节", "护士"], "q2": ["《红楼梦》"], "q3": ["东西"], "q4": ["3.5% 米"]}
    predictions = {"q1": "一名教师", "q2": "红楼梦。", "q3": "西东", "q4": "7%"}
    exact, f1 = score_answers(gold, predictions, 1, "zh")
    assert exact == {"q1": 0, "q2": 1, "q3": 0, "q4": 0}
    assert f1 == {"q1": pytest.approx(4 / 7), "q2": 1, "q3": 0.5, "q4": pytest.approx(2 / 5)}
    assert score_answers(gold, predictions, 1) == (dict.fromkeys(gold, 0), dict.fromkeys(gold, 0))
    silent = score_answers(
        {"none": [], "void": ["。"], "some": ["好"]}, {"none": "", "void": "，", "some": ""}, 2, "zh"
    )
    assert silent == ({"none": 1, "void": 1, "some": 0},) * 2


# --- SQuAD: tau


def total_at(tau: float, odds: list[float], answered: list[float], unanswered: list[float]) -> float:
    rows = zip(odds, answered, unanswered, strict=True)
    return sum(yes if value < -tau else no for value, yes, no in rows)


@pytest.mark.parametrize(
    ("odds", "answered", "unanswered", "tau"),
    [
        # Sorted -3 -1 2 4. Answered first k of them: 0 + 1, then 1.5, 0.5, 1.0, 0.0: k = 1, midway between -3 and -1.
        ([-1, 4, -3, 2], [0.0, 0, 0.5, 0.5], [1, 1, 0, 0], 2.0),
        ([-1.0, 4.0], [1, 1], [0, 0], -5.0),  # all: 1.0 above 4
        ([-1.0, 4.0], [0, 0], [1, 1], 2.0),  # none: 1.0 below -1
        ([-1.0, 4.0], [0, 0], [0, 0], -1.5),  # 2.0, -1.5 or -5.0: nearest to 0
        ([-3.0, -1.0, 1.0, 3.0], [0, 1, 0, 0], [1, 0, 0, 1], 0.0),  # -1 and what is below or above it: -0.0 is 0.0
        ([-2.0, 0.0, 2.0], [0, 1, 0], [0, 1, 0], 1.0),  # 3, 1, -1 or -3: the positive one
        ([7.0, 7.0, 7.0], [1, 0, 0], [0, 0.25, 0.25], -8.0),  # ties change sides together: 1 against 0.5
        ([7.0, 7.0, 7.0], [1, 0, 0], [0, 0.75, 0.75], -6.0),
        ([math.inf, 3.0, -math.inf], [0, 1, 1], [1, 0, 0], -4.0),  # no tau changes the infinite ones
    ],
)
def test_tau_worked_by_hand(odds, answered, unanswered, tau):
    found = choose_tau(odds, answered, unanswered)
    assert type(found) is float
    assert (found, math.copysign(1, found)) == (tau, math.copysign(1, tau))


few_odds = st.sampled_from([-2.5, -0.0, 0.1, 0.3]) | st.integers(-3, 3).map(float)
quarters = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # their sums are exact


@given(st.lists(st.tuples(few_odds, quarters, quarters), min_size=1, max_size=12), st.randoms())
def test_tau_is_the_nearest_of_the_best_cuts(rows, random):
    columns = [list(column) for column in zip(*rows, strict=True)]
    steps = sorted(set(columns[0]))
    cuts = [steps[0] - 1.0, *((low + high) / 2 for low, high in pairwise(steps)), steps[-1] + 1.0]
    totals = {-cut: total_at(-cut, *columns) for cut in cuts}
    best = [tau for tau, total in totals.items() if total == max(totals.values())]
    assert choose_tau(*columns) == min(best, key=lambda tau: (abs(tau), -tau))
    random.shuffle(rows)
    assert choose_tau(*zip(*rows, strict=True)) == choose_tau(*columns)


def test_totals_that_differ_by_rounding_alone_are_equal():
    """Answering all and answering none both score 0.3, but rounding makes one larger: tau 0 is chosen."""
    assert -0.3 + 0.1 + 0.2 > 0 > -0.1 - 0.2 + 0.3
    assert choose_tau([1.0, 2.0, 3.0], [0, 0.1, 0.2], [0.3, 0, 0]) == 0.0  # none; all would be -4.0
    assert choose_tau([-3.0, -2.0, -1.0], [0, 0, 0.3], [0.1, 0.2, 0]) == 0.0  # all; none would be 4.0


def test_questions_without_an_answer_or_odds_are_refused(refused):
    for arguments in (
        ({"q1": []}, {}),
        ({"q1": ["x"], "q2": [], "q3": []}, {"q1": ""}),
        ({"q1": ["x"], "q2": []}, {"q1": "", "q2": ""}, {"q2": 0.0}),
    ):
        with refused():
            score_squad2(*arguments)


# --- NER


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-X I-X O", [(0, 2, "X")]),
        ("I-X I-X O I-X", [(0, 2, "X"), (3, 4, "X")]),  # IOB1
        ("I-X B-X I-X", [(0, 1, "X"), (1, 3, "X")]),  # IOB1, two in a row
        ("O I-X", [(1, 2, "X")]),  # not IOB2: an I- after O begins an entity
        ("B-X I-Y", [(0, 1, "X"), (1, 2, "Y")]),  # neither: an I- of another type begins one
        ("I-X I-Y I-X", [(0, 1, "X"), (1, 2, "Y"), (2, 3, "X")]),
        ("B-a-b I-a-b I-a", [(0, 2, "a-b"), (2, 3, "a")]),  # the type follows the first hyphen
        ("", []),
    ],
)
def test_entities_read_by_hand(tags, entities):
    assert find_entities(tags.split()) == entities


def tabulate(gold, predicted):
    counts = count_entities(list(map(find_entities, gold)), predicted)
    return make_rows(counts, names=[name.removeprefix("wanted_") for name in counts if name.startswith("wanted_")])


def score_tags(gold, predicted):
    return take_values(score_entities(tabulate(gold, predicted)))


def test_entities_scored_by_hand():
    """Two of five predicted and four gold entities are right, the PER and the second LOC: 2/5, 2/4, 4/9.

    The first LOC is a word short, the MISC has another type and the last ORG is invented. The I-LOC still begins an
    entity.
    """
    gold = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC"], ["B-LOC", "O", "B-MISC", "O", "O", "O"]]
    predicted = [["B-PER", "I-PER", "O", "B-LOC", "O"], ["I-LOC", "O", "B-ORG", "O", "I-ORG", "O"]]
    # Strict scores ignore the I-LOC and the I-ORG: 1/3, 1/4, 2/7.
    strict = {"strict_precision": 1 / 3, "strict_recall": 1 / 4, "strict_f1": 2 / 7}
    assert score_tags(gold, predicted) == pytest.approx({"precision": 2 / 5, "recall": 2 / 4, "f1": 4 / 9} | strict)
    assert score_types(tabulate(gold, predicted)) == {
        "LOC": {"precision": 0.5, "recall": 0.5, "f1": 0.5},
        "MISC": {"precision": 0.0, "recall": 0.0, "f1": 0.0},
        "ORG": {"precision": 0.0, "recall": 0.0, "f1": 0.0},
        "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0},
    }


def walk_conlleval(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, int]:
    """Count as conlleval does: word by word, looking at two neighbours, with a blank line as an O.

    A chunk has begun where the tag is B, or I after O, or the type has changed; it has ended where the tag before was
    in one and this one is B or O, or the type has changed. A chunk is right if it begins on both sides with one type,
    and ends on both sides at once.
    """

    def has_begun(before: tuple[str, str], tag: tuple[str, str]) -> bool:
        return tag[0] != "O" and (tag[0] == "B" or before[0] == "O" or before[1] != tag[1])

    def has_ended(before: tuple[str, str], tag: tuple[str, str]) -> bool:
        return before[0] != "O" and (tag[0] in "BO" or before[1] != tag[1])

    counts = dict.fromkeys(("right", "found", "wanted"), 0)
    lines = [
        (tag, guess)
        for pair in zip(gold, predicted, strict=True)
        for tag, guess in [*zip(*pair, strict=True), ("O", "O")]
    ]
    rows = [[(text[0], text[2:]) for text in line] for line in lines]
    before, inside = [("O", ""), ("O", "")], False
    for row in rows:
        ended, begun = ([rule(*pair) for pair in zip(before, row, strict=True)] for rule in (has_ended, has_begun))
        counts["right"] += inside and all(ended)
        inside = (inside and not any(ended)) or (all(begun) and row[0][1] == row[1][1])
        counts["wanted"] += begun[0]
        counts["found"] += begun[1]
        before = row
    return counts


tagged_pairs = st.lists(
    st.lists(st.tuples(*[st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])] * 2), max_size=7), max_size=6
)


@given(tagged_pairs)
def test_entities_are_counted_as_conlleval_does(sentences):
    gold, predicted = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    counts = walk_conlleval(gold, predicted)
    precision, recall = counts["right"] / max(counts["found"], 1), counts["right"] / max(counts["wanted"], 1)
    scores = score_tags(gold, predicted)
    assert (scores["precision"], scores["recall"]) == (precision, recall)
    assert scores["f1"] == pytest.approx(2 * counts["right"] / max(counts["found"] + counts["wanted"], 1))
    swapped = score_tags(predicted, gold)
    assert (swapped["precision"], swapped["recall"]) == (recall, precision)
    # The scores of a type are those of a text that has no other.
    for kind, found in score_types(tabulate(gold, predicted)).items():
        alone = [[[t if t[2:] == kind else "O" for t in tags] for tags in side] for side in (gold, predicted)]
        expected = score_tags(*alone)
        assert found == {name: expected[name] for name in found}
