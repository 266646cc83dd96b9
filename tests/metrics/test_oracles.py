"""Scores and intervals in metrics.json, computed again from the prediction tables by other programs and plain loops.

Nothing here imports `bertkit.metrics`. Labels and numbers are scored by scikit-learn and scipy, answers by SQuAD's
rules, tags by a loop over words; tau and thresholds are found by trying all of them. Intervals are those of Clopper and
Pearson by statsmodels, or percentiles of a bootstrap in which each group has an exponential weight. Shape letters: S
rows, L labels, R samples.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy import stats
from sklearn import metrics as sk
from statsmodels.stats.proportion import proportion_confint

from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import ROWS, write_squad
from tests.world import CASES, write_start

MAIN = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "spearmanr", "squad1": "f1", "squad2": "f1"}
MAIN |= dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli", "swag"), "accuracy")
MAIN |= dict.fromkeys(("squad1, own", "squad2, own", "ner", "ner, features", "ner, words"), "f1")
MAIN |= {"classify": "macro_f1", "classify, several labels": "macro_f1", "classify, a number": "pearson"}
PATTERNS = {"dev": "{}", "dev_matched": "{}", "dev_mismatched": "{}_mm", "test": "test_{}"}
LEFT_OUT = re.compile(  # keys that the tables cannot give
    r"updates|own_data|chosen_on_dev|best_baseline"
    r"|majority_\w+|\w+_without_leaks"  # they need the training rows, except in GLUE, SWAG, SQuAD and names
    # The tables have the answers of the best baseline alone, if they are classes; of three, not all probabilities.
    r"|(tfidf|frozen|words)_\w+|baseline_gain(_low|_high)?"
)
MANY = {"train": 60, "dev": 150, "test": 120}  # rows of a split
ONCE = {"train": {"max_steps": 1, "learning_rate": 1e-5, "eval_strategy": "no", "save_strategy": "no"}}
ONCE |= {"precision": "fp32", "preset": "paper", "batch_size": 8}
SAMPLES = 2_000
# Between two bootstraps of 2,000 samples, a limit differs by 2 % of the width and the width by 3 % (standard errors).
LIMIT_TOLERANCE, WIDTH_TOLERANCE = 0.1, 0.07
TINY = 1e-150  # instead of 0 below a fraction


# --- Runs and their tables --------------------------------------------------------------------------------------------


def write_easy(folder, version):
    """Write SQuAD's files; in dev every second word of a context is a right answer, so that some are given."""
    (path,) = write_squad(folder, version).glob("dev*")
    content = json.loads(path.read_text())
    for paragraph in [paragraph for article in content["data"] for paragraph in article["paragraphs"]]:
        words = paragraph["context"].split()[::2]
        found = [{"text": word, "answer_start": paragraph["context"].index(word)} for word in words]
        for asked in paragraph["qas"]:
            asked["answers"] = asked["answers"] and found
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Return by case the folder of a finished run, and its metrics; large random weights give various answers."""

    @cache
    def finish(name):
        folder, (task, make_recipe, _) = tmp_path_factory.mktemp("case"), CASES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.world.write_squad", write_easy)
            for split, count in MANY.items():
                patch.setitem(ROWS, split, count)
            recipe = make_recipe(folder)
        recipe["checkpoint"] = write_start(folder / "start", task, initializer_range=0.4)
        changes = {"train": ONCE["train"] | {"max_steps": 40, "learning_rate": 3e-3}} if "squad1" in name else {}
        if "squad2" in name:  # a start that answers
            recipe["checkpoint"] = str(finish("squad1")[0] / "run")
        run(Recipe.make(task, recipe, ONCE | changes), output=folder / "run")
        return folder, json.loads((folder / "run" / "metrics.json").read_text())

    return finish


def read_tables(folder):
    """Yield the split, the rows and the facts of each table with right answers; words become rows of their own."""
    for path in sorted((folder / "run" / "predictions").glob("*.parquet")):
        table = pq.read_table(path)
        found = {name.decode().removeprefix("bertkit."): value for name, value in table.schema.metadata.items()}
        facts = {name: json.loads(value) for name, value in found.items() if name != "pandas"}
        rows = table.to_pandas()
        if "scheme" in facts:
            rows = rows.explode(["label", "prediction"], ignore_index=True)
        if "id" in rows and "null_odds" in rows:
            (best,) = path.parent.glob("test_nbest*" if path.stem == "test" else "nbest*")
            spans = json.loads(best.read_text())
            rows["span"] = [next(span["text"] for span in spans[name] if span["text"]) for name in rows["id"]]
        if "label" in rows:
            yield path.stem, rows, facts


# --- Labels and numbers -----------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """The scores of a table, as functions of the weights of its rows."""

    ratios: Mapping[str, tuple]  # name -> two arrays (S,), whose weighted sums are divided
    rate: Callable = lambda weights: {}  # returns the other scores by weights (S,)
    known: Mapping[str, float] = {}  # the scores of other programs, and all that has no interval
    scale: float = 1.0

    def sample(self, weights):
        """Return a row of scores for each row of weights (R, S)."""
        found = pd.DataFrame([self.rate(row) for row in weights], index=range(len(weights)))
        for name, (right, counted) in self.ratios.items():
            found[name] = self.scale * (weights @ right) / np.maximum(weights @ counted, TINY)
        return found

    def compute(self, count):
        """Return the scores of all rows, which other programs confirm."""
        found = self.sample(np.ones((1, count))).iloc[0].to_dict()
        for name in found.keys() & self.known.keys():
            assert found[name] == pytest.approx(self.known[name], abs=1e-9), name
        return found | self.known


def mark(column, names):
    """Return (S, L), 1 where a row has a label and 0 elsewhere."""
    rows = [[cell] if isinstance(cell, str) else cell for cell in column]
    return np.array([[float(name in row) for name in names] for row in rows])


def measure_labels(rows, facts):
    """Return the scores of one or several labels for each row; where labels are ordered, they are whole numbers."""
    names, ones, is_single = facts["names"], np.ones(len(rows)), isinstance(rows["label"].tolist()[0], str)
    correct, found = (mark(rows[column], names) for column in ("label", "prediction"))
    is_right = (correct == found).all(1) * 1.0, ones
    each = sk.precision_recall_fscore_support(correct, found, average=None, zero_division=0.0)
    ratios, known, rank, sides = {"accuracy": is_right, "exact_match": is_right}, {}, lambda weights: {}, {"": found}
    for name, one, right, *values in zip(names, found.T, correct.T, *each, strict=True):
        ratios |= {f"precision_{name}": (one * right, one), f"recall_{name}": (one * right, right)}
        ratios[f"f1_{name}"] = one * right, (one + right) / 2
        known |= {f"{key}_{name}": x for key, x in zip(("precision", "recall", "f1", "count"), values, strict=True)}
    if f"probability_{names[0]}" in rows:
        probabilities = rows[[f"probability_{name}" for name in names]].to_numpy()
        ranked = slice(is_single and len(names) == 2, None)  # the second of two classes
        rank = make_ranking(correct[:, ranked], probabilities[:, ranked])
        known |= confirm_probabilities(correct, probabilities, ranked, is_single)
        squares = (probabilities - correct) ** 2
        ratios["brier"] = squares.sum(1) / 2 if is_single else squares.mean(1), ones
        if not is_single:
            sides["fixed_"] = (probabilities > 0.5) * 1.0
            columns = zip(names, probabilities.T, correct.T, strict=True)
            known |= {f"threshold_{name}": find_threshold(*column) for name, *column in columns}
    for at, x in sides.items():
        ratios[f"{at}micro_f1"] = (x * correct).sum(1), (x + correct).sum(1) / 2
        for kind in ("macro", "micro", "weighted"):
            known[f"{at}{kind}_f1"] = sk.f1_score(correct, x, average=kind, zero_division=0.0)
    ratios["f1"] = ratios["accuracy" if "scheme" in facts else f"f1_{names[1]}"]  # of words and of GLUE
    numbers = [marks @ np.array(names, float) for marks in (correct, found)] if all(map(str.isdigit, names)) else []
    if numbers:
        known["quadratic_kappa"] = sk.cohen_kappa_score(*numbers, weights="quadratic")
        known["mae"] = sk.mean_absolute_error(*numbers)
    if is_single:
        known["matthews_correlation"] = sk.matthews_corrcoef(correct.argmax(1), found.argmax(1))

    def rate(weights):
        scores, total, other = rank(weights), weights.sum(), weights @ correct
        for at, x in sides.items():
            right, one = weights @ (x * correct), weights @ x
            f1 = 2 * right / np.maximum(one + other, TINY)
            scores |= {f"{at}macro_f1": f1.mean(), f"{at}weighted_f1": f1 @ other / other.sum()}
        if is_single:
            spread = (total**2 - one @ one) * (total**2 - other @ other)
            scores["matthews_correlation"] = (right.sum() * total - one @ other) / np.sqrt(max(spread, TINY))
        if numbers:
            (label, answer), means = numbers, [weights @ column for column in numbers]
            chance = weights @ (label**2 + answer**2) - 2 * means[0] * means[1] / total
            scores["quadratic_kappa"] = 1 - weights @ (label - answer) ** 2 / chance
            scores["mae"] = weights @ abs(label - answer) / total
        return scores

    return Scores(ratios, rate, known)


def confirm_probabilities(correct, probabilities, ranked, is_single):
    """Return scikit-learn's scores of rankings, and the calibration error in 15 bins."""
    stated, came = probabilities.ravel(), correct.ravel()
    if is_single:
        stated, came = probabilities.max(1), np.take_along_axis(correct, probabilities.argmax(1)[:, None], 1)[:, 0]
    bins = pd.cut(stated, np.linspace(0, 1, 16), include_lowest=True)
    gaps = pd.Series(came - stated).groupby(bins, observed=True).sum()
    pair = correct[:, ranked], probabilities[:, ranked]
    scores = {"roc_auc": sk.roc_auc_score(*pair), "average_precision": sk.average_precision_score(*pair)}
    return scores | {"ece": gaps.abs().sum() / len(stated)}


def make_ranking(correct, probabilities):
    """Return a function of weights: the area under the ROC curve and the average precision, means over labels."""
    labels = []
    for scores, positive in zip(probabilities.T, correct.T, strict=True):
        differences = scores[:, None] - scores  # (S, S)
        labels.append((positive, (1 + np.sign(differences)) / 2, (differences <= 0) * 1.0))

    def rank(weights):
        areas, precisions = [], []
        for positive, wins, at_least in labels:
            ours, others = weights * positive, weights * (1 - positive)
            areas.append(ours @ (wins @ others) / (ours.sum() * others.sum()))
            precisions.append(ours @ ((at_least @ ours) / (at_least @ weights)) / ours.sum())
        return {"roc_auc": np.mean(areas), "average_precision": np.mean(precisions)}

    return rank


def find_threshold(probabilities, correct):
    """Return the threshold with the best F1 of a label, among equal ones the nearest to 0.5, by trying all."""
    tried = {}
    for low, high in pairwise(sorted({0.0, 1.0, *probabilities})):
        cut = 0.5 if low <= 0.5 < high else (low + high) / 2
        found = probabilities > cut
        tried[cut] = 2 * correct[found].sum() / (found.sum() + correct.sum())
    return min((cut for cut in tried if tried[cut] > max(tried.values()) - 1e-12), key=lambda cut: abs(cut - 0.5))


def measure_numbers(rows, facts):
    """Return the scores of a number for each row."""
    labels, answers = rows["label"].to_numpy(), rows["prediction"].to_numpy()
    shares = [(1 + np.sign(column[:, None] - column)) / 2 for column in (labels, answers)]  # (S, S)

    def correlate(one, other, weights):
        found = np.cov(one, other, aweights=weights)
        return found[0, 1] / np.sqrt(max(found[0, 0] * found[1, 1], TINY))

    def rate(weights):
        error, mean = np.average((labels - answers) ** 2, weights=weights), np.average(labels, weights=weights)
        scores = {"pearson": correlate(labels, answers, weights), "rmse": np.sqrt(error)}
        scores["spearmanr"] = correlate(*(share @ weights for share in shares), weights)
        return scores | {"r2": 1 - error / np.average((labels - mean) ** 2, weights=weights)}

    known = {"rmse": sk.root_mean_squared_error(labels, answers), "r2": sk.r2_score(labels, answers)}
    if np.ptp(answers):
        known |= {"pearson": stats.pearsonr(labels, answers)[0], "spearmanr": stats.spearmanr(labels, answers)[0]}
    return Scores({}, rate, known)


# --- Answers and tags -------------------------------------------------------------------------------------------------


def compare(answers, rows, version=2):
    """Return (S,) exact match and F1 of answers by the rules of evaluate-v1.1.py and evaluate-v2.0.py."""

    def normalise(text):
        kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    found = []
    for answer, references in zip(answers, rows["label"], strict=True):
        words, scores = normalise(answer), []
        others = [other for other in map(normalise, references) if other or version == 1]
        for reference in others or [[]]:
            f1 = 2 * (Counter(words) & Counter(reference)).total() / max(len(words) + len(reference), 1)
            if version == 2 and not (words and reference):
                f1 = words == reference
            scores.append((words == reference, f1))
        found.append(np.max(scores, axis=0))
    return np.array(found, float).T


def measure_answers(rows, facts):
    """Return the scores of answers, and for 2.0 the best tau by trying one between any two odds."""
    if "null_odds" not in rows:
        (em, f1), ones = compare(rows["prediction"], rows, version=1), np.ones(len(rows))
        return Scores({"exact_match": (em, ones), "f1": (f1, ones)}, scale=100.0)
    odds, tau = rows["null_odds"].to_numpy(), facts["decided"]["tau"]
    assert rows["prediction"].tolist() == np.where(odds < -tau, rows["span"], "").tolist()
    best, none = compare(rows["span"], rows), compare([""] * len(rows), rows)
    ordered = sorted(set(odds))
    cuts = [ordered[0] - 1, *((low + high) / 2 for low, high in pairwise(ordered)), ordered[-1] + 1]
    totals = np.array([np.where(odds < cut, best[1], none[1]).sum() for cut in cuts])
    tau = min(-np.array(cuts)[totals > totals.max() - 1e-9], key=lambda tau: (abs(tau), tau < 0))
    known = {"tau": tau, "null_score_diff_threshold": -tau}
    known |= {"majority_exact": 100 * none[0].mean(), "majority_f1": 100 * none[1].mean()}
    has_answer, ratios = rows["label"].map(len).to_numpy() > 0, {}
    for part, counted in {"": has_answer >= 0, "HasAns_": has_answer, "NoAns_": ~has_answer}.items():
        for at, values in {"": compare(rows["prediction"], rows), "tau0_": np.where(odds < 0, best, none)}.items():
            for name, score in zip(("exact", "f1"), values, strict=True):
                ratios[f"{at}{part}{name}"] = score * counted, counted * 1.0
    return Scores(ratios, known=known, scale=100.0)


def find_spans(tags, is_strict=False):
    """Return the spans of tags in IOB2 by a loop over words; an I- that continues nothing begins one unless strict."""
    spans, start, kind = set(), None, ""
    for place, tag in enumerate([*tags, "O"]):
        if start is not None and tag == f"I-{kind}":
            continue
        if start is not None:
            spans.add((start, place, kind))
        is_start = tag[0] == "B" or (tag[0] == "I" and not is_strict)
        start, kind = (place, tag[2:]) if is_start else (None, "")
    return spans


def measure_tags(rows, facts):
    """Return the scores of entities; the counts of each type are those of the table."""
    wanted, found = (rows[name].map(find_spans) for name in ("label", "prediction"))
    strict = rows["prediction"].map(lambda tags: find_spans(tags, is_strict=True))
    for kind in facts["names"]:
        for name, sets in {"wanted": wanted, "found": found, "right": map(set.__and__, wanted, found)}.items():
            assert rows[f"{name}_{kind}"].tolist() == [sum(span[2] == kind for span in spans) for spans in sets]
    ratios, all_wanted = {}, wanted.map(len).to_numpy(float)
    for at, spans in {"": found, "strict_": strict}.items():
        right, counts = np.array(list(map(len, map(set.__and__, wanted, spans))), float), spans.map(len).to_numpy(float)
        ratios |= {f"{at}precision": (right, counts), f"{at}recall": (right, all_wanted)}
        ratios[f"{at}f1"] = right, (counts + all_wanted) / 2
    return Scores(ratios, known={f"majority_{name}": 0.0 for name in ratios})


# --- What a run says --------------------------------------------------------------------------------------------------


def choose_measure(name, rows, facts):
    """Return the function that measures a table."""
    if name.startswith("squad"):
        return measure_answers
    if "strict_found" in rows and "scheme" not in facts:
        return measure_tags
    return measure_numbers if rows["label"].dtype == float else measure_labels


def draw(rows):
    """Return weights of rows (R, S), the same for all rows of a group."""
    owners = pd.factorize(rows["group"])[0]
    return np.random.default_rng(1).exponential(size=(SAMPLES, owners.max() + 1))[:, owners]


def find_limits(scores, rows):
    """Return by name the limits of each interval, and how far they may be off; 0: they are exact."""
    limits, owners = {}, pd.factorize(rows["group"])[0]
    for name, samples in scores.sample(draw(rows)).items():
        sums = [np.bincount(owners, part) for part in scores.ratios.get(name, ())]
        if sums and np.isin(sums, (0, 1)).all():  # a share of independent rows
            low, high = proportion_confint(*map(np.sum, sums), method="beta")
            limits[name] = scores.scale * low, scores.scale * high, 0.0
        elif np.ptp(samples) > 1e-9:
            low, high = samples.quantile([0.025, 0.975])
            limits[name] = low, high, LIMIT_TOLERANCE * (high - low)
    return limits


def answer_constantly(rows, facts):
    """Return rows with the most frequent class or, of numbers, with a constant."""
    if rows["label"].dtype == float:
        return rows.assign(prediction=1.0)
    usual = max(facts["names"], key=rows["label"].tolist().count)
    return rows.assign(prediction=usual, **{f"probability_{name}": float(name == usual) for name in facts["names"]})


def compare_baseline(rows, facts, main):
    """Return the scores of the best baseline, and the gain over it with limits by the formula of intervals.py."""
    rows, names = rows[rows["baseline_prediction"].notna()], facts["names"]
    other, likely = rows.assign(prediction=rows["baseline_prediction"]), rows["baseline_probability"]
    for name in names:  # the table has the highest probability alone, which is enough for two classes
        other[f"probability_{name}"] = likely.where(other["prediction"] == name, 1 - likely)
    other = other if len(names) == 2 else other.drop(columns=f"probability_{names[0]}")
    both = measure_labels(other, facts), measure_labels(rows, facts)
    first, second = (scores.compute(len(rows)) for scores in both)
    before, after = (scores.sample(draw(rows))[main] for scores in both)
    differs = other["prediction"] != rows["prediction"]
    if main == "accuracy":
        differs &= (other["prediction"] == rows["label"]) | (rows["prediction"] == rows["label"])
    count, gain = rows["group"][differs].nunique(), second[main] - first[main]
    error = (after - before).std() * np.sqrt(1 + 2 / max(count, 1))
    half = stats.norm.isf(0.025) * max(error, abs(gain) / stats.norm.isf(2.0 ** -max(count, 2)))
    limits = gain - half, gain + half, 2 * LIMIT_TOLERANCE * half
    return first | {"score": first[main], "scored": len(rows)}, gain, limits


def expect(name, folder, metrics, edit=lambda rows: rows):
    """Return what the tables of a case's run give: values by key of its metrics, and `find_limits`."""
    main, values, limits = MAIN[name], {}, {}
    for split, rows, facts in read_tables(folder):
        rows, pattern = edit(rows), PATTERNS[split]
        measure = choose_measure(name, rows, facts)
        scores = measure(rows, facts)
        found, bounds = scores.compute(len(rows)), find_limits(scores, rows)
        if split == "test":  # dev has decided
            found |= {key: values[key] for key in found if re.match("tau$|null_score|threshold_", key)}
        if (folder / "glue").exists() or name == "swag":
            constant = measure(answer_constantly(rows, facts), facts).compute(len(rows))
            found |= {f"majority_{key}": value for key, value in constant.items()}
        found["score"], bounds["score"] = found[main], bounds[main]
        if f"majority_{main}" in found:
            found["majority_score"] = found[f"majority_{main}"]
        if "baseline_prediction" in rows:
            other, found["baseline_gain"], bounds["baseline_gain"] = compare_baseline(rows, facts, main)
            found |= {f"{metrics['best_baseline']}_{key}": value for key, value in other.items()}
        values |= {pattern.format(key): value for key, value in found.items()}
        limits |= {pattern.format(key): value for key, value in bounds.items()}
    return values, limits


def list_differences(metrics, values, limits):
    """Return the keys of metrics.json that are unknown or have another value, and the limits that it lacks."""
    expected, shares = {key: (value, 1e-6) for key, value in values.items()}, []
    wrong = [key for key in limits.keys() & metrics.keys() if not {f"{key}_low", f"{key}_high"} <= metrics.keys()]
    for key in (limits.keys() & metrics.keys()) - {*wrong}:
        low, high, tolerance = limits[key]
        expected |= {f"{key}_low": (low, tolerance or 1e-9), f"{key}_high": (high, tolerance or 1e-9)}
        shares += [(metrics[f"{key}_high"] - metrics[f"{key}_low"]) / (high - low)] if tolerance else []
    for key, value in metrics.items():
        known = expected.get(key)
        if known is None and not LEFT_OUT.fullmatch(key):
            wrong.append(key)
        if known is not None and value != pytest.approx(known[0], abs=known[1], rel=1e-9):
            wrong.append(key)
    return wrong + (["widths"] if abs(np.mean(shares) - 1) > WIDTH_TOLERANCE else [])


@pytest.mark.parametrize("name", MAIN)
def test_the_tables_of_a_run_give_its_metrics(name, finish):
    folder, metrics = finish(name)
    assert list_differences(metrics, *expect(name, folder, metrics)) == []
    assert {"score", "score_low", "score_high", MAIN[name]} <= metrics.keys()


def test_all_tasks_with_scores_are_computed_again():
    assert MAIN.keys() == {name for name, (task, _, _) in CASES.items() if task.metric and task.name != "pretrain"}


@pytest.mark.parametrize("name", ["mrpc", "classify, several labels", "squad1", "ner, words"])
def test_another_answer_in_a_table_is_found(name, finish):
    """The first wrong row gets the right answer."""

    def correct(rows):
        right = [label[0] if name == "squad1" else label for label in rows["label"]]
        answers = rows["prediction"].tolist()
        place = next(place for place, answer in enumerate(answers) if not np.array_equal(answer, right[place]))
        return rows.assign(prediction=[*answers[:place], right[place], *answers[place + 1 :]])

    folder, metrics = finish(name)
    found = list_differences(metrics, *expect(name, folder, metrics, correct))
    assert {"score", MAIN[name]} <= {*found}


@pytest.mark.parametrize("factor", [0.85, 1.15])
@pytest.mark.parametrize("name", ["rte", "swag", "squad2, own", "classify"])
def test_intervals_of_another_width_are_found(name, factor, finish):
    folder, metrics = finish(name)
    wide = dict(metrics)
    for low, high in [(key, key.removesuffix("low") + "high") for key in metrics if key.endswith("_low")]:
        added = (factor - 1) * (metrics[high] - metrics[low]) / 2
        wide |= {low: metrics[low] - added, high: metrics[high] + added}
    assert "widths" in list_differences(wide, *expect(name, folder, metrics))


def test_an_unknown_key_is_found(finish):
    folder, metrics = finish("stsb")
    assert list_differences(metrics | {"mystery": 1.0}, *expect("stsb", folder, metrics)) == ["mystery"]
