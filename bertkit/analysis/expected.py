"""Scores that simple baselines reach on the training rows, before a training, and what more rows would bring.

The baselines are a constant answer, a linear head on TF-IDF, and for each checkpoint one on its frozen vectors; pairs
also have one on the vectors of the two texts, each read alone. Each predicts a fifth of the rows by a head that is
fitted to the others; the weights of terms and the strength are those of all rows. The best one is fitted to more and
more rows, and the curve of its scores, `a - b n^-c`, is extrapolated to twice the rows.

Left out: dev and test, which must not choose anything, and tasks without such baselines (questions and endings).

Shape letters: S rows, F fitted rows, A asked rows, L labels, H hidden, N sizes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.sequences import Sequences, encode_inputs
from bertkit.data.tokenizer import find_words, load_tokenizer
from bertkit.errors import UsageError
from bertkit.metrics.baseline import TERM_LISTS, rotate, vectorize_texts, vectorize_words
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.intervals import find_interval
from bertkit.metrics.rows import RowScore, take_values
from bertkit.model.checkpoint import find_weights
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import Table, find_row, make_table
from bertkit.system.progress import Report
from bertkit.tasks import TASKS
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.frozen import Fold, choose_head, divide_rows, encode, load_encoder, run_encoder
from bertkit.tasks.ner import TaggedExamples, tabulate_tags
from bertkit.tasks.task import Task
from bertkit.tasks.text import TextExamples
from bertkit.training.baselines import WORDS_STRENGTH, answer
from bertkit.training.prepare import choose_rows

EXPECTED = "expected"  # the key in the doctor's findings
MOST_READ = 5_000  # rows, those with the smallest keys
TIMED = 64  # sequences whose reading is timed
SHARES, CURVE_DRAWS = (1 / 8, 1 / 4, 1 / 2, 1.0), 10
POOL = 0.8  # share of the rows that a head of the curve is fitted to at most, as by five folds
LEAST_FORECAST = 100  # rows
EXPONENTS = np.linspace(0.05, 1.5, 15)  # of the rows; a small one is nearly a logarithm
LEAST_ERROR = 0.001  # of a mean over draws
NORMAL = 1.96  # standard errors of a 95 % interval
HARDLY = 1.0  # points that are not worth more rows

Fit = Callable[[np.ndarray, np.ndarray], Sequence[Any]]  # numbers of fitted and of asked rows -> answers to the latter


@dataclass(frozen=True)
class SimpleModel:
    """A baseline whose score is measured."""

    name: str
    fit: Fit
    facts: Mapping[str, Any] = field(default_factory=dict)  # on a checkpoint; see `find_expected`


class TextRows:
    """Training rows of texts or pairs, and what is scored on them.

    Attributes:
        targets: (S,) classes or numbers, or (S, L) several labels.
    """

    def __init__(self, task: Task, examples: TextExamples, groups: np.ndarray) -> None:
        self.task, self.examples, self.groups = task, examples, groups
        self.texts, self.labels = examples[:], len(examples.space.names)
        self.targets = self.strata = examples.labels

    def score(self, answers: Sequence[np.ndarray], asked: np.ndarray) -> Mapping[str, RowScore]:
        """Return the scores of the logits (A, L) of some rows."""
        fixed = {"thresholds": [FIXED_THRESHOLD] * self.labels}
        return self.task.score(self.task.rows(np.stack(answers), self.examples.take(asked), fixed))

    def score_nothing(self) -> float:
        """Return the score of a constant answer."""
        return self.task.score_nothing(self.examples, self.examples)[self.task.metric]

    def list_baselines(self, models: Sequence[str], longest: int, report: Report) -> list[SimpleModel]:
        """Return TF-IDF of words or of characters, and the frozen vectors of each checkpoint."""
        terms = {unit: rotate(vectorize_texts(self.texts, self.texts[:1], unit)[0]) for unit in TERM_LISTS}
        found = [SimpleModel("TF-IDF", self.fit_head(terms))]
        for model in models:
            report(f"reading {len(self.texts):,} rows by {model}")
            tokenizer = load_tokenizer(model)
            encoder = load_encoder(model, "last", len(tokenizer))
            most = min(longest, encoder.config.max_position_embeddings)
            whole = encode_inputs([x if len(x) == 2 else x[0] for x in self.texts], None, tokenizer, most)
            facts = {"model": model, "parameters": encoder.num_parameters()}
            facts["tokens_per_second"] = time_reading(encoder, whole)
            facts["truncated"] = count_truncated(tokenizer, self.texts, most)
            found.append(SimpleModel("frozen vectors", self.fit_head({"": encode(encoder, whole, report)}), facts))
            if len(self.texts[0]) == 2:
                sides = [encode_inputs(side, None, tokenizer, most) for side in zip(*self.texts, strict=True)]
                vectors = compare_sides(*(encode(encoder, side, report) for side in sides))
                found.append(SimpleModel("vectors of both texts", self.fit_head({"": vectors}), facts))
        return found

    def fit_head(self, candidates: Mapping[str, np.ndarray]) -> Fit:
        """Return a linear head on the vectors (S, H), of some, that folds choose."""
        name, strength = choose_head(candidates, self.targets, self.labels, self.groups)
        vectors = candidates[name]

        def fit(fitted: np.ndarray, asked: np.ndarray) -> np.ndarray:
            return answer(vectors[fitted], vectors[asked], self.targets[fitted], strength, self.labels)

        return fit


class WordRows:
    """Training sentences with tags, and what is scored on them."""

    def __init__(self, task: Task, examples: TaggedExamples, groups: np.ndarray) -> None:
        self.task, self.examples, self.groups = task, examples, groups
        self.sentences = examples.text.sentences
        self.strata = np.arange(len(groups), dtype=float)  # nothing to stratify by

    def score(self, answers: Sequence[Sequence[str]], asked: np.ndarray) -> Mapping[str, RowScore]:
        """Return the scores of the tags of some sentences."""
        return self.task.score(tabulate_tags(self.examples.take(asked).text, answers))

    def score_nothing(self) -> float:
        """Return the score of the most frequent tag, which is 0 where that is O."""
        names, counts = np.unique(list(chain.from_iterable(x.tags for x in self.sentences)), return_counts=True)
        usual = [[str(names[counts.argmax()])] * len(sentence.words) for sentence in self.sentences]
        return take_values(self.score(usual, np.arange(len(usual))))[self.task.metric]

    def list_baselines(self, models: Sequence[str], longest: int, report: Report) -> list[SimpleModel]:
        """Return a linear head on words and their neighbours."""
        return [SimpleModel("words", self.fit)]

    def fit(self, fitted: np.ndarray, asked: np.ndarray) -> list[list[str]]:
        """Return the tags of the asked sentences."""
        given, others = ([self.sentences[number] for number in part.tolist()] for part in (fitted, asked))
        names, targets = np.unique(list(chain.from_iterable(x.tags for x in given)), return_inverse=True)
        vectors = vectorize_words([x.words for x in given], [x.words for x in others])
        tags = iter(names[answer(*vectors, targets, WORDS_STRENGTH, len(names)).argmax(1)].tolist())
        return [[next(tags) for _ in sentence.words] for sentence in others]


def find_expected(
    task: Task,
    examples: Any,
    rows: ExampleRows,
    keys: np.ndarray,
    models: Sequence[str],
    longest: int,
    report: Report,
) -> dict[str, Any] | None:
    """Return what baselines score on training rows, and the forecast of the best one; None where there are none.

    Args:
        examples, rows, keys: The training rows as the task reads them, as rows with groups, and their hashes.
        models: Checkpoints whose vectors are compared.
        longest: The maximum number of tokens of a text.

    Returns:
        `rows` (how many were read) `of` all, the `metric`, `baselines` (each with its `score`, the interval `low` to
        `high` and of a checkpoint `model`, `parameters`, `tokens_per_second` and `truncated` texts), and the `curve` of
        the best one: `sizes`, `scores` and `forecast`; no curve below LEAST_FORECAST rows or with a group of a tenth of
        the rows.
    """
    numbers = choose_rows(keys, MOST_READ)
    data = {TextExamples: TextRows, TaggedExamples: WordRows}[type(examples)](
        task, examples.take(numbers), np.asarray(rows.groups)[numbers]
    )
    folds = divide_rows(data.strata, data.groups)
    if not folds:
        return None
    found, fits = [{"name": "constant answer", "score": data.score_nothing()}], []
    for baseline in data.list_baselines(models, longest, report):
        metric, score = measure(data, folds, baseline.fit)
        asked = np.concatenate([part for _, part in folds])
        interval = find_interval(score, data.groups[asked].tolist())
        limits = {} if interval is None else {"low": interval.low, "high": interval.high}
        found.append({"name": baseline.name, **baseline.facts, "score": get_value(score), **limits})
        fits.append(baseline.fit)
    result = {"task": task.name, "rows": len(numbers), "of": len(keys), "metric": metric, "baselines": found}
    best = max(range(len(fits)), key=lambda number: found[number + 1]["score"])
    own = found[best + 1]
    if len(numbers) < LEAST_FORECAST or "low" not in own or 10 * np.bincount(data.groups).max() >= len(numbers):
        return result
    report(f"fitting {name_baseline(own)} to more and more rows")
    sizes = [round(share * POOL * len(numbers)) for share in SHARES]
    scores = draw_curve(data, sizes, fits[best])
    ahead = forecast(sizes, scores, own["score"], (own["high"] - own["low"]) / (2 * NORMAL), len(numbers))
    curve = {name: own[name] for name in ("name", "model") if name in own}
    return result | {"curve": curve | {"sizes": sizes, "scores": scores.mean(1).tolist(), "forecast": ahead}}


def choose_models(given: Sequence[str], checkpoint: str) -> list[str]:
    """Return the given checkpoints, or the task's if its weights are on this disk."""
    if given:
        return list(given)
    try:
        find_weights(checkpoint)
    except UsageError:
        return []
    return [checkpoint]


def measure(data: TextRows | WordRows, folds: Sequence[Fold], fit: Fit) -> tuple[str, RowScore]:
    """Return the task's score, with its name, of the asked rows of all folds."""
    answers = list(chain.from_iterable(fit(*fold) for fold in folds))
    scores = data.score(answers, np.concatenate([asked for _, asked in folds]))
    main = scores[data.task.metric]  # of texts it is the score of another name
    return next((name, score) for name, score in scores.items() if score is main)


def draw_curve(data: TextRows | WordRows, sizes: Sequence[int], fit: Fit) -> np.ndarray:
    """Return the scores (N, CURVE_DRAWS) of heads that are fitted to some numbers of rows, on all other groups."""
    rng, scores = np.random.default_rng(0), []
    _, codes = np.unique(data.groups, return_inverse=True)
    for _ in range(CURVE_DRAWS):
        order = np.argsort(rng.permutation(codes.max() + 1)[codes], kind="stable")
        parts = [(order[:size], order[size:][~np.isin(codes[order[size:]], codes[order[:size]])]) for size in sizes]
        scores.append([get_value(measure(data, [part], fit)[1]) for part in parts])
    return np.transpose(scores)


def get_value(score: RowScore) -> float:
    """Return the value of a score."""
    return take_values({"": score})[""]


def forecast(
    sizes: Sequence[int], scores: np.ndarray, now: float, standard_error: float, rows: int
) -> dict[str, float]:
    """Return what a baseline will score with twice the rows and how far that is above the score with all rows.

    The curve `a - b n^-c` with b >= 0 is fitted for each exponent c by least squares, and their forecasts are
    averaged with the likelihoods as weights. Both values have 95 % intervals.

    Args:
        scores: (N, CURVE_DRAWS) of heads on some numbers of rows.
        now: The score of heads on the largest number, over all rows, with its standard error `standard_error`.
        rows: The number of all rows.
    """
    means = scores.mean(1)
    errors = np.maximum(scores.std(1, ddof=1) / np.sqrt(CURVE_DRAWS), LEAST_ERROR)
    found, log_likelihoods = [], []
    for exponent in EXPONENTS:
        powers = np.array(sizes, float) ** -exponent  # (N,)
        design = np.stack([np.ones(len(sizes)), -powers], 1) / errors[:, None]  # (N, 2)
        covariance = np.linalg.inv(design.T @ design)
        level, slope = covariance @ design.T @ (means / errors)
        if slope < 0:
            level, slope = np.average(means, weights=errors**-2), 0.0
        log_likelihoods.append(-0.5 * np.square((level - slope * powers - means) / errors).sum())
        twice = (2 * rows) ** -exponent
        steps = np.array([powers[-1] - twice, rows**-exponent - twice])  # from the largest size, and from all rows
        found.append([*(slope * steps), *(covariance[1, 1] * steps**2)])
    shares = np.exp(np.array(log_likelihoods) - max(log_likelihoods))
    shares /= shares.sum()
    values, variances = np.split(np.array(found), 2, axis=1)  # (exponents, 2) each
    (rise, gain) = shares @ values
    rise_error, gain_error = np.sqrt(shares @ (variances + (values - [rise, gain]) ** 2))
    gain, score, error = min(gain, 1.0 - now), min(now + rise, 1.0), NORMAL * np.hypot(rise_error, standard_error)
    found = {"score": score, "low": score - error, "high": min(score + error, 1.0), "gain": gain}
    found |= {"gain_low": max(gain - NORMAL * gain_error, 0.0), "gain_high": gain + NORMAL * gain_error}
    return {"rows": 2 * rows, **{name: float(value) for name, value in found.items()}}


def time_reading(model: Any, sequences: Sequences) -> float:
    """Return the tokens that a frozen encoder reads a second here."""
    ends = sequences.ends[:TIMED]
    some = Sequences(sequences.ids[: ends[-1]], ends, sequences.seconds[:TIMED], None)
    for _ in range(2):  # the first time is a warm-up
        begun = time.perf_counter()
        for _ in run_encoder(model, some, "last"):
            pass
    return len(some.ids) / (time.perf_counter() - begun)


def count_truncated(tokenizer: Any, texts: Sequence[Sequence[str]], longest: int) -> int:
    """Return how many texts or pairs have more tokens than a model reads."""
    _, sizes = find_words(tokenizer).encode(list(chain.from_iterable(texts)), np.int32)
    tokens = sizes.reshape(len(texts), -1).sum(1) + 1 + len(texts[0])  # [CLS], and [SEP] after each text
    return int((tokens > longest).sum())


def compare_sides(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return vectors (S, 2H) of pairs: the absolute differences and the products of their texts' vectors (S, H).

    They tell how alike two texts are (Conneau et al. 2017, section 3.1; Reimers and Gurevych 2019).
    """
    one, other = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (one, other))
    return np.sqrt(one.shape[1]) * np.concatenate([abs(one - other), one * other], axis=1)


# --- Tables -----------------------------------------------------------------------------------------------------------


def tabulate_expected(found: Mapping[str, Any]) -> Table:
    """Return the table of the baselines."""
    row, lines = find_row(TASKS[found["task"]].table, found["metric"]), []
    for one in found["baselines"]:
        facts = [""] * 3
        if "model" in one:
            facts = [f"{one['parameters'] / 1e6:.1f} M", f"{one['tokens_per_second']:,.0f}", f"{one['truncated']:,}"]
        limits = f"{row.show(one['low'])} to {row.show(one['high'])}" if "low" in one else ""
        lines.append([name_baseline(one), *facts, row.show(one["score"]), limits])
    some = f"{found['rows']:,}" if found["rows"] == found["of"] else f"{found['rows']:,} of {found['of']:,}"
    heads = ["", "parameters", "tokens a second", "truncated", row.head, "95 % interval"]
    return make_table(f"Expected scores: simple baselines on {some} training rows, by folds", heads, lines)


def plot_expected(found: Mapping[str, Any]) -> Plot:
    """Return the curve of the best baseline, and its forecast."""
    row, curve = find_row(TASKS[found["task"]].table, found["metric"]), found["curve"]
    ahead, points = curve["forecast"], zip(curve["sizes"], map(row.scale, curve["scores"]), strict=True)
    score, low, high = (row.scale(ahead[name]) for name in ("score", "low", "high"))
    forecast = Series("forecast", [(ahead["rows"], score)], "C1o", [(score - low, high - score)])
    series, title = [Series(name_baseline(curve), list(points), "C0o-"), forecast], "Scores of more rows"
    return Plot(title, "training rows", series, ylabel=row.head, words=f"{title}: {describe_expected(found)}")


def name_baseline(one: Mapping[str, Any]) -> str:
    """Return the name of a baseline, with the last part of its checkpoint."""
    return f"{one['name']} of {Path(one['model']).name}" if "model" in one else one["name"]


def describe_expected(found: Mapping[str, Any]) -> str:
    """Return the sentence about twice as many rows."""
    if "curve" not in found:
        return f"what more rows bring is forecast from {LEAST_FORECAST} rows on, of groups that are not too large"
    row, ahead = find_row(TASKS[found["task"]].table, found["metric"]), found["curve"]["forecast"]
    gain, low, high = (100 * ahead[name] for name in ("gain", "gain_low", "gain_high"))
    score, least, most = (row.show(ahead[name]) for name in ("score", "low", "high"))
    gained = f"{gain:+.1f} points ({low:.1f} to {high:.1f}) by {name_baseline(found['curve'])}"
    words = f"{gained}; {score} ({least} to {most}) with {ahead['rows']:,} rows"
    return f"more rows will hardly help: {words}" if high < HARDLY else f"twice as many rows: about {words}"
