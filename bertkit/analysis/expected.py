"""Scores of simple baselines on the training rows, before a training, and a forecast of them for twice as many rows.

The baselines are a constant answer, a linear head on TF-IDF, and a linear head on the frozen vectors of each
checkpoint; sentences with tags have a linear head on words and their neighbours. By folds each head is fitted to four
fifths of the rows and predicts the others. IDF and the penalty are computed from all rows. The best baseline is fitted
to more and more rows, and the curve of its scores, `a - b n^-c`, is extrapolated.

Left out: dev and test, which must not choose anything, and tasks without such baselines (questions and endings).

Shape letters: S rows, L labels, H hidden, M words, N sizes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.sequences import Sequences, encode_inputs
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.metrics.baseline import TERM_LISTS, rotate, vectorize_texts, vectorize_words
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.intervals import estimate_interval
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.model.checkpoint import find_weights
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import Table, find_row, make_table
from bertkit.system.progress import Report
from bertkit.tasks import TASKS
from bertkit.tasks.frozen import choose_head, divide_rows, encode, load_encoder, run_encoder
from bertkit.tasks.ner import TaggedExamples
from bertkit.tasks.tag_answers import tabulate_tags
from bertkit.tasks.task import Task
from bertkit.tasks.text import TextExamples
from bertkit.training.baselines import WORDS_STRENGTH, answer
from bertkit.training.prepare import choose_rows

EXPECTED = "expected"  # the key in the doctor's findings
TIMED = 64  # sequences whose reading is timed
SHARES, CURVE_DRAWS = (1 / 8, 1 / 4, 1 / 2, 1.0), 10
FITTED = 0.8  # share of the rows that a head of the curve is fitted to at most, as by five folds
LEAST_FORECAST, LARGEST_GROUP = 100, 0.1  # rows, and share of the rows
EXPONENTS = np.linspace(0.05, 1.5, 15)  # exponents of the number of rows; a small one is nearly a logarithm
LEAST_ERROR = 0.001  # the least error of a score: draws of few distinct scores may be equal by chance
NORMAL = 1.96  # standard errors of a 95 % interval
SMALL_GAIN = 1.0  # points

Fit = Callable[[np.ndarray, np.ndarray], Any]  # numbers of fitted and of held-out rows -> answers to the latter
Baselines = Iterator[tuple[dict[str, Any], Fit]]  # facts on a baseline: its name, and those on a checkpoint


class TextRows:
    """Training rows of texts or pairs, and what is scored on them."""

    most = 5_000  # rows that are read

    def __init__(self, task: Task, examples: TextExamples, groups: np.ndarray) -> None:
        examples = replace(examples, shares=None, weights=None)  # all rows count alike
        self.task, self.examples, self.groups = task, examples, groups
        self.texts, self.names = examples[:], examples.space.names
        self.targets = self.strata = examples.labels

    def score(self, answers: Sequence[np.ndarray], held: np.ndarray) -> Mapping[str, WeightedScore]:
        """Return the scores of the logits (S, L) of some rows."""
        fixed = {"thresholds": [FIXED_THRESHOLD] * len(self.names)}
        return self.task.score(self.task.decode(np.concatenate(answers), self.examples.take(held), fixed).rows)

    def score_nothing(self) -> float:
        """Return the score of a constant answer."""
        return self.task.score_nothing(self.examples, self.examples)[self.task.metric]

    def list_baselines(self, models: Sequence[str], longest: int, report: Report) -> Baselines:
        """Yield TF-IDF of words or of characters, and the frozen vectors of each checkpoint."""
        terms = {unit: rotate(vectorize_texts(self.texts, self.texts[:1], unit)[0]) for unit in TERM_LISTS}
        yield {"name": "TF-IDF"}, self.choose_fit(terms)
        for model in models:
            report(f"reading {len(self.texts):,} rows by {model}")
            tokenizer = load_tokenizer(model)
            encoder = load_encoder(model, "last", len(tokenizer))
            most = min(longest, encoder.config.max_position_embeddings)
            inputs = [row if len(row) == 2 else row[0] for row in self.texts]
            whole = encode_inputs(inputs, None, tokenizer, most)
            facts = {"name": "frozen vectors", "model": model, "parameters": encoder.num_parameters()}
            facts["tokens_per_second"] = time_reading(encoder, whole)
            facts["truncated"] = int(whole.shortened.sum())
            columns = zip(*self.texts, strict=True)
            vectors = [encode(encoder, encode_inputs(texts, None, tokenizer, most), report) for texts in columns]
            yield facts, self.choose_fit({"": compare_sides(*vectors) if len(vectors) == 2 else vectors[0]})

    def choose_fit(self, candidates: Mapping[str, np.ndarray]) -> Fit:
        """Return the fit of a linear head on one of several vectors (S, H); folds choose vectors and penalty."""
        name, strength = choose_head(candidates, self.targets, len(self.names), self.groups)
        vectors, is_number = candidates[name], self.targets.ndim == 1 and self.targets.dtype.kind == "f"

        def fit(fitted: np.ndarray, held: np.ndarray) -> np.ndarray:
            targets = self.targets[fitted]
            logits = answer(vectors[fitted], vectors[held], targets, strength, len(self.names))
            # The mean of fitted numbers is high where that of held-out ones is low, which would lower correlations.
            return logits - targets.mean() if is_number else logits

        return fit


class WordRows:
    """Training sentences with tags, and what is scored on them."""

    most = 2_000

    def __init__(self, task: Task, examples: TaggedExamples, groups: np.ndarray) -> None:
        self.task, self.examples, self.groups = task, examples, groups
        self.strata = np.arange(len(groups), dtype=float)  # numbers, so that folds are not stratified
        sentences = examples.text.sentences
        self.words = [sentence.words for sentence in sentences]
        self.ends = np.cumsum(list(map(len, self.words)))
        tags = list(chain.from_iterable(sentence.tags for sentence in sentences))
        self.names, self.targets = np.unique(tags, return_inverse=True)  # (M,)

    def score(self, answers: Sequence[Sequence[np.ndarray]], held: np.ndarray) -> Mapping[str, WeightedScore]:
        """Return the scores of the tags of some sentences."""
        tags = [sentence.tolist() for part in answers for sentence in part]
        return self.task.score(tabulate_tags(self.examples.take(held).text, tags))

    def score_nothing(self) -> float:
        """Return the score of the most frequent tag, which is 0 where that is O."""
        usual = self.names[np.bincount(self.targets).argmax()]
        tags = [np.full(len(words), usual) for words in self.words]
        return take_values(self.score([tags], np.arange(len(tags))))[self.task.metric]

    def list_baselines(self, models: Sequence[str], longest: int, report: Report) -> Baselines:
        """Yield a linear head on words and their neighbours."""
        if len(models) > 1:
            report("checkpoints are not compared for sentences with tags, whose baseline reads the words alone")
        vectors, _ = vectorize_words(self.words, self.words[:1])  # (M, V)

        def fit(fitted: np.ndarray, held: np.ndarray) -> list[np.ndarray]:
            given, asked = self.index_words(fitted), self.index_words(held)
            targets = self.targets[given]
            logits = answer(vectors[given], vectors[asked], targets, WORDS_STRENGTH, len(self.names))
            sizes = [len(self.words[number]) for number in held.tolist()]
            return np.split(self.names[logits.argmax(1)], np.cumsum(sizes)[:-1])

        yield {"name": "words alone"}, fit

    def index_words(self, sentences: np.ndarray) -> np.ndarray:
        """Return the numbers of the words of sentences."""
        starts = np.concatenate([[0], self.ends[:-1]])
        return np.concatenate([np.arange(starts[number], self.ends[number]) for number in sentences.tolist()])


ROWS = {TextExamples: TextRows, TaggedExamples: WordRows}


def measure_expected(
    task: Task,
    examples: Any,
    groups: np.ndarray,
    keys: np.ndarray,
    models: Sequence[str],
    longest: int,
    report: Report,
) -> dict[str, Any] | None:
    """Return what baselines score on training rows, and the forecast of the best one; None where there are none.

    Args:
        examples, groups, keys: The training rows as the task reads them, their groups (S,), and their hashes (S,).
        models: Checkpoints whose vectors are compared.
        longest: The maximum number of tokens of a text.

    Returns:
        `rows` (how many were read) `of` all, the `metric`, and `baselines`: each with its `name`, `score`, the interval
        `low` to `high`, and of a checkpoint `model`, `parameters`, `tokens_per_second` and `truncated` (rows). The
        `curve` of the best one has `sizes`, `scores` and the `forecast`; without it `no_forecast` has the reason.
    """
    rows = ROWS[type(examples)]
    numbers = choose_rows(keys, rows.most)
    data = rows(task, examples.take(numbers), groups[numbers])
    folds = divide_rows(data.strata, data.groups)
    if not folds:
        return None
    held = np.concatenate([part for _, part in folds])
    baselines, fits = [], []
    for facts, fit in data.list_baselines(models, longest, report):
        scores = data.score([fit(*fold) for fold in folds], held)
        score = scores[task.metric]
        metric = next(key for key, other in scores.items() if other is score)  # the one that `score` stands for
        interval = estimate_interval(score, data.groups[held].tolist())
        limits = {} if interval is None else {"low": interval.low, "high": interval.high}
        baselines.append({**facts, "score": get_value(score), **limits})
        fits.append(fit)
    constant = {"name": "constant answer", "score": data.score_nothing()}
    result = {"task": task.name, "rows": len(numbers), "of": len(keys), "metric": metric}
    result["baselines"] = [constant, *baselines]
    best = max(range(len(fits)), key=lambda number: baselines[number]["score"])
    if reason := explain_no_forecast(data.groups, baselines[best], constant["score"]):
        return result | {"no_forecast": reason}
    report(f"fitting {name_baseline(baselines[best])} to more and more rows")
    sizes = [round(share * FITTED * len(numbers)) for share in SHARES]
    scores = draw_curve(data, sizes, fits[best])
    curve = {key: value for key, value in baselines[best].items() if key in ("name", "model")}
    curve |= {"sizes": sizes, "scores": scores.mean(1).tolist()}
    growth = 2 * len(keys) / len(numbers)  # at most TextRows.most rows were read
    ahead = {"rows": 2 * len(keys), **forecast(sizes, scores, baselines[best], growth)}
    return result | {"curve": curve | {"forecast": ahead}}


def explain_no_forecast(groups: np.ndarray, best: Mapping[str, Any], constant: float) -> str:
    """Return why the best baseline has no forecast; empty if it has one."""
    if len(groups) < LEAST_FORECAST:
        return f"fewer than {LEAST_FORECAST} training rows"
    if np.unique(groups, return_counts=True)[1].max() >= LARGEST_GROUP * len(groups):
        return f"a group has {LARGEST_GROUP:.0%} of the rows or more"
    return "" if best.get("low", constant) > constant else "no baseline is above a constant answer"


def choose_models(given: Sequence[str], checkpoint: str, report: Report) -> list[str]:
    """Return the given checkpoints, or the task's if its weights are on this disk."""
    if given:
        return list(given)
    try:
        find_weights(checkpoint)
    except UsageError:
        report(f"the weights of {checkpoint} are not on this disk: no expected score of its vectors; name a --model")
        return []
    return [checkpoint]


def draw_curve(data: TextRows | WordRows, sizes: Sequence[int], fit: Fit) -> np.ndarray:
    """Return the scores (N, CURVE_DRAWS) of heads that are fitted to some numbers of rows.

    In each draw all of them are scored on the same rows, whose groups none of them has seen.
    """
    rng, scores = np.random.default_rng(0), []
    _, codes = np.unique(data.groups, return_inverse=True)
    for _ in range(CURVE_DRAWS):
        order = np.argsort(rng.permutation(codes.max() + 1)[codes], kind="stable")  # groups stay together
        seen, held = order[: sizes[-1]], order[sizes[-1] :]
        held = held[~np.isin(codes[held], codes[seen])]
        scores.append([get_value(data.score([fit(seen[:size], held)], held)[data.task.metric]) for size in sizes])
    return np.transpose(scores)


def get_value(score: WeightedScore) -> float:
    """Return the value of a score."""
    return take_values({"": score})[""]


def forecast(sizes: Sequence[int], scores: np.ndarray, now: Mapping[str, float], growth: float) -> dict[str, float]:
    """Return the score that a baseline will have with more rows, and its gain, both with 95 % intervals.

    The curve `a - b n^-c` with b >= 0 is fitted for each exponent c by least squares, and their forecasts are
    averaged with the likelihoods as weights. The error of a size is the deviation of its draws, not that of their mean:
    the draws share rows.

    Args:
        scores: (N, CURVE_DRAWS) of heads on some numbers of rows.
        now: The `score` of heads on the largest number, over all rows, with its interval `low` to `high`.
        growth: How many times as many rows.
    """
    means = scores.mean(1)
    errors = np.maximum(scores.std(1, ddof=1), LEAST_ERROR)
    gains, variances, log_likelihoods = [], [], []
    for exponent in EXPONENTS:
        powers = np.array(sizes, float) ** -exponent  # (N,)
        design = np.stack([np.ones(len(sizes)), -powers], 1) / errors[:, None]  # (N, 2)
        covariance = np.linalg.inv(design.T @ design)
        level, slope = covariance @ design.T @ (means / errors)
        if slope < 0:
            level, slope = np.average(means, weights=errors**-2), 0.0
        step = powers[-1] - (growth * sizes[-1]) ** -exponent
        gains.append(slope * step)
        variances.append(covariance[1, 1] * step**2)
        log_likelihoods.append(-0.5 * np.square((level - slope * powers - means) / errors).sum())
    shares = np.exp(np.array(log_likelihoods) - max(log_likelihoods))
    shares /= shares.sum()
    gain = shares @ gains
    error = NORMAL * np.sqrt(shares @ (np.array(variances) + (np.array(gains) - gain) ** 2))
    score, width = now["score"] + gain, np.hypot(error, (now["high"] - now["low"]) / 2)
    found = {"score": score, "low": score - width, "high": score + width}
    found |= {"gain": gain, "gain_low": max(gain - error, 0.0), "gain_high": gain + error}
    return {key: float(min(value, 1.0)) for key, value in found.items()}


def time_reading(model: Any, sequences: Sequences) -> float:
    """Return the tokens that a frozen encoder reads a second here."""
    ends = sequences.ends[:TIMED]
    some = Sequences(sequences.ids[: ends[-1]], ends, sequences.seconds[:TIMED], None)
    for _ in range(2):  # the first time is a warm-up
        begun = time.perf_counter()
        for _ in run_encoder(model, some, "last"):
            pass
    return len(some.ids) / (time.perf_counter() - begun)


def compare_sides(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return vectors (S, 2H) of pairs: the absolute differences and the products of their texts' vectors (S, H).

    They tell how alike two texts are (Conneau et al. 2017, section 3.1; Reimers and Gurevych 2019).
    """
    first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (first, second))
    return np.sqrt(first.shape[1]) * np.concatenate([abs(first - second), first * second], axis=1)


# --- Tables -----------------------------------------------------------------------------------------------------------


def tabulate_expected(expected: Mapping[str, Any]) -> Table:
    """Return the table of the baselines."""
    row, lines = find_row(TASKS[expected["task"]].table, expected["metric"]), []
    for baseline in expected["baselines"]:
        score = row.show(baseline["score"])
        if "low" in baseline:
            score += f" ({row.show(baseline['low'])} to {row.show(baseline['high'])})"
        facts = [""] * 3
        if "model" in baseline:
            facts = [f"{baseline['parameters'] / 1e6:.1f} M", f"{baseline['tokens_per_second']:,.0f}"]
            facts.append(f"{baseline['truncated']:,}")
        lines.append([name_baseline(baseline), score, *facts])
    heads = ["", f"{row.head}, 95 % interval", "parameters", "tokens/s", "truncated"]
    if not any("model" in baseline for baseline in expected["baselines"]):
        heads, lines = heads[:2], [line[:2] for line in lines]
    read, total = expected["rows"], expected["of"]
    some = f"{read:,}" if read == total else f"{read:,} of {total:,}"
    return make_table(f"Expected scores: simple baselines on {some} training rows, by folds", heads, lines)


def plot_expected(expected: Mapping[str, Any]) -> Plot:
    """Return the curve of the best baseline, and its forecast."""
    row, curve = find_row(TASKS[expected["task"]].table, expected["metric"]), expected["curve"]
    ahead = curve["forecast"]
    points = list(zip(curve["sizes"], map(row.scale, curve["scores"]), strict=True))
    score, low, high = (row.scale(ahead[key]) for key in ("score", "low", "high"))
    point = Series("forecast", [(FITTED * ahead["rows"], score)], "C1o", [(score - low, high - score)])
    series, title = [Series(name_baseline(curve), points, "C0o-"), point], "Scores of more rows"
    words = f"{title}: {describe_expected(expected)}"
    return Plot(title, "fitted rows", series, ylabel=row.head, words=words)


def name_baseline(baseline: Mapping[str, Any]) -> str:
    """Return the name of a baseline, with the last two parts of its checkpoint: the whole of a name on the Hub."""
    if "model" not in baseline:
        return baseline["name"]
    return f"{baseline['name']} of {'/'.join(Path(baseline['model']).parts[-2:])}"


def describe_expected(expected: Mapping[str, Any]) -> str:
    """Return the sentence about twice as many rows."""
    if "curve" not in expected:
        return f"no forecast for more rows: {expected['no_forecast']}"
    row, ahead = find_row(TASKS[expected["task"]].table, expected["metric"]), expected["curve"]["forecast"]
    gain, least, most = (100 * ahead[key] for key in ("gain", "gain_low", "gain_high"))
    score, low, high = (row.show(ahead[key]) for key in ("score", "low", "high"))
    name, rows = name_baseline(expected["curve"]), f"{ahead['rows']:,}"
    if most < SMALL_GAIN:
        return f"more rows will hardly help {name}: {gain:+.1f} points (at most {most:.1f}) with {rows} rows"
    return f"twice as many rows ({rows}): about {gain:+.1f} points ({least:.1f} to {most:.1f}) for {name}, " + (
        f"to {score} ({low} to {high})"
    )
