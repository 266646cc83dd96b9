"""What to expect before a training: the scores of simple ways on the training rows, and what more rows would bring.

The ways are a constant answer, a linear head on TF-IDF, and for each checkpoint one on its frozen vectors; pairs also
have one on the vectors of the two texts, each read alone. Each predicts a fifth of the rows by a head that is fitted to
the others. The best one is fitted to ever more rows, and the curve of its scores, `a - b n^-c`, is prolonged to twice
the rows. Fine-tuning is usually above all of them; how many rows help it is another matter (recipes/data/README.md).

Left out: dev and test, which must not choose anything, and questions and endings, which have no simple ways.

Shape letters: S rows, F fitted rows, A asked rows, L labels, H hidden, N sizes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit.data.sequences import encode_inputs
from bertkit.data.tagging import ABSENT
from bertkit.data.tokenizer import find_words
from bertkit.metrics.baseline import TERM_LISTS, rotate, vectorize_texts, vectorize_words
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.intervals import find_interval
from bertkit.metrics.rows import RowScore
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import Table, find_row, make_table
from bertkit.system.progress import Report
from bertkit.tasks import TASKS
from bertkit.tasks.frozen import (
    choose_head,
    divide_rows,
    encode,
    encode_items,
    gather_windows,
    load_encoder,
    run_encoder,
)
from bertkit.tasks.ner import fill_summaries, get_words
from bertkit.training.baselines import WORDS_STRENGTH, answer
from bertkit.training.prepare import FITTED_ROWS, Prepared, choose_rows, prepare
from bertkit.training.recipe import Recipe

EXPECTED = "expected"  # the key in the doctor's findings
MOST_READ = 5_000  # rows, those with the smallest keys
TIMED = 64  # sequences whose reading is timed
SHARES, DRAWS = (1 / 8, 1 / 4, 1 / 2, 1.0), 10
POOL = 0.8  # share of the rows that a head of the curve is fitted to at most, as by five folds
LEAST_ROWS = 100  # for a forecast
EXPONENTS = np.linspace(0.05, 1.5, 15)  # of the rows; a small one is nearly a logarithm
LEAST_ERROR = 0.001  # of a mean over draws
NORMAL = 1.96  # standard errors of a 95 % interval
HARDLY = 1.0  # points: a gain that is smaller is hardly one

Fit = Callable[[np.ndarray, np.ndarray], np.ndarray]  # numbers of fitted and of asked rows -> answers to the latter


@dataclass(frozen=True)
class Way:
    """A simple way to answer.

    Attributes:
        facts: `model`, `parameters`, `tokens_per_second` and `longer` (texts that are cut) of a checkpoint.
    """

    name: str
    fit: Fit
    facts: Mapping[str, Any] = field(default_factory=dict)


def expect(recipe: Recipe, models: Sequence[str], report: Report) -> dict[str, Any] | None:
    """Return what simple ways score on the training rows, and the forecast of the best one; None where none applies.

    Args:
        models: Checkpoints whose vectors are compared; their weights may be downloaded.

    Returns:
        `rows` (how many were read) `of` all, the `metric`, `ways` (each with its `score`, the interval `low` to `high`
        and the facts of its checkpoint), and `curve`: the best way's `sizes`, `scores` and `forecast`, which is missing
        below LEAST_ROWS.
    """
    task = TASKS[recipe.task]
    if not getattr(task, "baselines", ()):
        return None
    prepared = prepare(recipe.override(baseline=True))
    rows = choose_rows(prepared.checked.keys.get("train", np.empty(0)), MOST_READ)
    if not len(rows):
        return None
    scores = Scores(recipe, prepared, rows)
    folds = divide_rows(scores.strata, scores.groups)
    if not folds:
        return None
    ways = list_text_ways(scores, models, report) if scores.words is None else [Way("words", scores.fit_words)]
    nothing = task.score_nothing(prepared.data["train"], prepared.data["train"])
    found = [{"way": "constant answer", "score": nothing[task.metric]}]
    for way in ways:
        score = scores.measure(folds, way.fit)
        low, high = find_interval(score, scores.groups[np.concatenate([held for _, held in folds])].tolist())
        found.append({"way": way.name, **way.facts, "score": get_value(score), "low": low, "high": high})
    best = max(range(len(ways)), key=lambda number: found[number + 1]["score"])
    result = {"task": task.name, "rows": len(rows), "of": len(scores.keys), "metric": scores.metric, "ways": found}
    curve = {name: found[best + 1][name] for name in ("way", "model") if name in found[best + 1]}
    report(f"fitting {curve['way']} to ever more rows")
    sizes, drawn = scores.draw_curve(ways[best].fit)
    curve |= {"sizes": sizes, "scores": drawn.mean(1).tolist()}
    if len(rows) >= LEAST_ROWS:
        own = found[best + 1]
        noise = (own["high"] - own["low"]) / (2 * NORMAL)
        curve["forecast"] = forecast(sizes, drawn, own["score"], noise, len(rows))
    return result | {"curve": curve}


def list_text_ways(scores: "Scores", models: Sequence[str], report: Report) -> list[Way]:
    """Return TF-IDF, and the frozen vectors of each checkpoint."""
    texts = scores.texts
    terms = {unit: rotate(vectorize_texts(texts, texts[:1], unit)[0]) for unit in TERM_LISTS}
    unit, strength = scores.choose(terms)
    ways = [Way("TF-IDF", scores.fit_vectors(terms[unit], strength))]
    for model in models:
        report(f"reading {len(scores.rows):,} rows by {model}")
        own = scores.recipe.override(checkpoint=model)
        prepared = scores.prepared if model == scores.recipe.checkpoint else prepare(own)
        encoder, length = load_encoder(model, "last", len(prepared.tokenizer)), own.data["max_length"]
        items = prepared.data["train"].__getitems__(scores.rows.tolist())
        facts = {
            "model": model,
            "parameters": encoder.num_parameters(),
            "tokens_per_second": time_reading(encoder, items),
            "longer": count_cut(prepared.tokenizer, texts, length),
        }
        vectors = {"frozen vectors": encode_items(encoder, items, report)}
        if len(texts[0]) == 2:
            vectors["vectors of both texts"] = encode_sides(encoder, texts, prepared.tokenizer, length)
        for name, found in vectors.items():
            _, strength = scores.choose({"": found})
            ways.append(Way(name, scores.fit_vectors(found, strength), facts))
    return ways


class Scores:
    """The training rows that are read, and the scores of ways on them.

    Attributes:
        rows: (S,) their numbers among all training rows.
        targets: (S,) classes or numbers, or (S, L) several labels.
        metric: The name of the score that decides, such as macro_f1.
    """

    def __init__(self, recipe: Recipe, prepared: Prepared, rows: np.ndarray) -> None:
        self.recipe, self.prepared, self.rows = recipe, prepared, rows
        self.task, self.data, self.groups = TASKS[recipe.task], prepared.data["train"], prepared.groups[rows]
        self.keys, self.labels, self.words = prepared.checked.keys["train"], len(prepared.settings["id2label"]), None
        if "words" in self.task.baselines:
            self.words = get_words(self.data)
            self.sentences = [sentence.words for sentence in self.words.text.sentences]
            self.ends = np.cumsum(list(map(len, self.sentences)))
            self.strata = np.arange(len(rows), dtype=float)
        else:
            self.targets = self.strata = self.data.labels[rows]
            known = np.searchsorted(choose_rows(self.keys, FITTED_ROWS), rows)
            self.texts = [prepared.texts[number] for number in known.tolist()]

    def choose(self, candidates: Mapping[str, np.ndarray]) -> tuple[str, float]:
        """Return the vectors (S, H) and the strength that are best by folds."""
        return choose_head(candidates, self.targets, self.labels, self.groups)

    def fit_vectors(self, vectors: np.ndarray, strength: float) -> Fit:
        """Return the way of a linear head on vectors (S, H)."""
        return lambda fitted, asked: answer(
            vectors[fitted], vectors[asked], self.targets[fitted], strength, self.labels
        )

    def fit_words(self, fitted: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Return the labels (M,) of the words of the asked sentences, by a head on words and their neighbours."""
        given, others = ([self.sentences[self.rows[n]] for n in part.tolist()] for part in (fitted, asked))
        targets = self.words.labels[self.find_words(fitted)]
        return answer(*vectorize_words(given, others), targets, WORDS_STRENGTH, self.labels).argmax(1)

    def find_words(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers (M,) of all words of some of the sentences."""
        firsts, ends = self.ends - np.diff(self.ends, prepend=0), self.ends
        chosen = self.rows[numbers].tolist()
        return np.concatenate([np.arange(firsts[n], ends[n]) for n in chosen])

    def measure(self, divisions: Sequence[tuple[np.ndarray, np.ndarray]], fit: Fit) -> RowScore:
        """Return the score of the asked rows of some divisions, of which none is asked twice."""
        asked = np.concatenate([part for _, part in divisions])
        if self.words is not None:
            tags = np.zeros(len(self.words.labels), np.int64)
            for fitted, part in divisions:
                tags[self.find_words(part)] = fit(fitted, part)
            summaries = fill_summaries(self.words, tags[self.words.firsts != ABSENT])
        else:
            summaries = np.zeros((len(self.data), self.labels))
            for fitted, part in divisions:
                summaries[self.rows[part]] = fit(fitted, part)
        fixed = {"thresholds": [FIXED_THRESHOLD] * self.labels}
        rows = self.task.rows(summaries, self.data, fixed).take(pa.array(self.rows[asked]))
        found = self.task.score(rows)
        self.metric = next(name for name, value in found.items() if value is found[self.task.metric])
        return found[self.metric]

    def draw_curve(self, fit: Fit) -> tuple[list[int], np.ndarray]:
        """Return the fitted rows (N,) and the scores (N, DRAWS) of a way; rows of one group are on one side."""
        rng, scores = np.random.default_rng(0), []
        sizes = [round(share * POOL * len(self.rows)) for share in SHARES]
        for _ in range(DRAWS):
            _, codes = np.unique(self.groups, return_inverse=True)
            order = np.argsort(rng.permutation(codes.max() + 1)[codes], kind="stable")
            own = [self.measure([(order[:size], find_rest(order, size, codes))], fit) for size in sizes]
            scores.append([get_value(score) for score in own])
        return sizes, np.transpose(scores)


def find_rest(order: np.ndarray, size: int, codes: np.ndarray) -> np.ndarray:
    """Return the rows after the first `size` of an order, without those of a group that is among them."""
    return order[size:][~np.isin(codes[order[size:]], codes[order[:size]])]


def get_value(score: RowScore) -> float:
    """Return the value of a score."""
    return float(score.score(np.ones((1, len(score))))[0])


def forecast(sizes: Sequence[int], scores: np.ndarray, now: float, noise: float, rows: int) -> dict[str, float]:
    """Return what a way will score with twice the rows and how far that is above the score with all rows.

    The curve `a - b n^-c` with b >= 0 is fitted for each exponent c by least squares, and what they forecast is
    averaged with their likelihoods as weights. Both values have 95 % intervals.

    Args:
        scores: (N, DRAWS) of heads on some numbers of rows.
        now: The score of heads on the largest number, over all rows, with its standard error `noise`.
        rows: The number of all rows.
    """
    means = scores.mean(1)
    errors = np.maximum(scores.std(1, ddof=1) / np.sqrt(DRAWS), LEAST_ERROR)
    found, chances = [], []
    for exponent in EXPONENTS:
        powers = np.array(sizes, float) ** -exponent  # (N,)
        design = np.stack([np.ones(len(sizes)), -powers], 1) / errors[:, None]  # (N, 2)
        covariance = np.linalg.inv(design.T @ design)
        level, slope = covariance @ design.T @ (means / errors)
        if slope < 0:
            level, slope = np.average(means, weights=errors**-2), 0.0
        chances.append(-0.5 * np.square((level - slope * powers - means) / errors).sum())
        twice = (2 * rows) ** -exponent
        steps = np.array([powers[-1] - twice, rows**-exponent - twice])  # from the largest size, and from all rows
        found.append([*(slope * steps), *(covariance[1, 1] * steps**2)])
    shares = np.exp(np.array(chances) - max(chances))
    shares /= shares.sum()
    values, variances = np.split(np.array(found), 2, axis=1)  # (exponents, 2) each
    (rise, gain) = shares @ values
    rise_error, gain_error = np.sqrt(shares @ (variances + (values - [rise, gain]) ** 2))
    score, error = min(now + rise, 1.0), NORMAL * np.hypot(rise_error, noise)
    found = {"score": score, "low": score - error, "high": min(score + error, 1.0), "gain": gain}
    found |= {"gain_low": max(gain - NORMAL * gain_error, 0.0), "gain_high": gain + NORMAL * gain_error}
    return {"rows": 2 * rows, **{name: float(value) for name, value in found.items()}}


def time_reading(model: Any, items: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens that a frozen encoder reads a second here."""
    sequences, _ = gather_windows(items[:TIMED])
    for _ in range(2):  # the first time is a warm-up
        begun = time.perf_counter()
        for _ in run_encoder(model, sequences, "last"):
            pass
    return len(sequences.ids) / (time.perf_counter() - begun)


def count_cut(tokenizer: Any, texts: Sequence[Sequence[str]], longest: int) -> int:
    """Return how many texts or pairs have more tokens than a model reads."""
    _, sizes = find_words(tokenizer).encode([text for row in texts for text in row], np.int32)
    tokens = sizes.reshape(len(texts), -1).sum(1) + 1 + len(texts[0])  # [CLS], and [SEP] after each text
    return int((tokens > longest).sum())


def encode_sides(model: Any, texts: Sequence[Sequence[str]], tokenizer: Any, longest: int) -> np.ndarray:
    """Return vectors (S, 2H) of pairs, each text read alone: the absolute differences and the products of their means.

    They tell how alike two texts are (Conneau et al. 2017, section 3.1; Reimers and Gurevych 2019).
    """
    sides = []
    for side in zip(*texts, strict=True):
        vectors = encode(model, encode_inputs(list(side), None, tokenizer, longest))
        sides.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    one, other = sides
    return np.sqrt(one.shape[1]) * np.concatenate([abs(one - other), one * other], axis=1)


# --- What it says -----------------------------------------------------------------------------------------------------


def tabulate_expected(found: Mapping[str, Any]) -> Table:
    """Return the table of the ways."""
    row = find_row(TASKS[found["task"]].table, found["metric"])
    lines = []
    for way in found["ways"]:
        facts = [""] * 3
        if "model" in way:
            facts = [f"{way['parameters'] / 1e6:.1f} M", f"{way['tokens_per_second']:,.0f}", f"{way['longer']:,}"]
        limits = f"{row.show(way['low'])} to {row.show(way['high'])}" if "low" in way else ""
        lines.append([name_way(way), *facts, row.show(way["score"]), limits])
    some = f"{found['rows']:,}" if found["rows"] == found["of"] else f"{found['rows']:,} of {found['of']:,}"
    heads = ["", "parameters", "tokens a second", "cut", row.head, "95 % interval"]
    return make_table(f"What to expect: simple ways on {some} training rows, by folds", heads, lines)


def plot_expected(found: Mapping[str, Any]) -> Plot:
    """Return the curve of the best way, and its forecast."""
    row, curve = find_row(TASKS[found["task"]].table, found["metric"]), found["curve"]
    points = list(zip(curve["sizes"], map(row.scale, curve["scores"]), strict=True))
    series = [Series(name_way(curve), points, "C0o-")]
    if ahead := curve.get("forecast"):
        score, low, high = (row.scale(ahead[name]) for name in ("score", "low", "high"))
        series.append(Series("forecast", [(ahead["rows"], score)], "C1o", [(score - low, high - score)]))
    title = "What more rows would bring"
    return Plot(title, "training rows", series, ylabel=row.head, words=f"{title}: {describe_expected(found)}")


def name_way(way: Mapping[str, Any]) -> str:
    """Return the name of a way, with the checkpoint's last part."""
    return f"{way['way']} of {Path(way['model']).name}" if "model" in way else way["way"]


def describe_expected(found: Mapping[str, Any]) -> str:
    """Return the sentence about twice as many rows."""
    row, ahead = find_row(TASKS[found["task"]].table, found["metric"]), found["curve"].get("forecast")
    if ahead is None:
        return f"below {LEAST_ROWS} rows there is no forecast of what more rows bring"
    gain, low, high = (100 * ahead[name] for name in ("gain", "gain_low", "gain_high"))
    score, least, most = (row.show(ahead[name]) for name in ("score", "low", "high"))
    score = f"{score} ({least} to {most}) with {ahead['rows']:,} rows"
    way = name_way(found["curve"])
    if high < HARDLY:
        return f"more rows will hardly help {way}: twice as many, {gain:+.1f} points ({low:.1f} to {high:.1f}); {score}"
    return f"twice as many rows: about {gain:+.1f} points ({low:.1f} to {high:.1f}) by {way}; {score}"
