"""The activations of a frozen encoder (paper section 5.3), computed once and cached on disk, and a linear head on them.

The encoder runs once: the activations of every word's first token, or the vector of a text, are stored under a hash of
the weights, the tokens and the layers, so that another seed or study reuses them. The file of words is memory-mapped,
and an epoch costs only the training of the layers above.

Left out: training by gradients (`BertFeaturesForTokenClassification` learns from the words' activations).
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from accelerate import PartialState
from huggingface_hub import cached_assets_path
from scipy.sparse import issparse
from scipy.special import expit, softmax
from torch import Tensor

from bertkit.data.long_texts import pool_windows
from bertkit.data.sequences import Sequences, batch_by_length, pad
from bertkit.errors import UsageError, as_usage_error
from bertkit.model.bert import BertModel
from bertkit.model.bilstm import select_features, select_layers
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.precision import choose_device
from bertkit.system.files import atomic_open, remove_unfinished, take_fingerprint
from bertkit.system.progress import Report, ShareDone, ignore

# Beside the weights, these values of the configuration decide the vectors.
COUNTED = ("hidden_size", "num_attention_heads", "hidden_act", "layer_norm_eps", "is_decoder")
NEVER = -50.0  # the logit of an answer that no row has
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)  # the choices of folds; a strength is the inverse of a penalty
MOST_FOLDS, FOLD_ROWS = 5, 5_000
LEAST = 1e-15  # the probability of a right answer, in a loss
# A logistic regression that decides is solved exactly, and those of folds only as far as a choice needs it.
SOLVER_STEPS, SOLVER_TOLERANCE = 1000, 1e-4
FOLD_STEPS, FOLD_TOLERANCE = 100, 3e-4

Head = tuple[np.ndarray, np.ndarray]  # the weight (L, H) and the bias (L,)
Fold = tuple[np.ndarray, np.ndarray]  # the numbers of the fitted and of the held-out rows


# --- The encoder ------------------------------------------------------------------------------------------------------


def load_encoder(checkpoint: str, layers: str, tokens: int = 0) -> BertModel:
    """Load the encoder of a checkpoint, frozen, on the accelerator if there is one.

    Args:
        tokens: The size of the tokenizer's vocabulary.
    """
    with as_usage_error(f"the model {checkpoint}"):
        config = load_config(checkpoint)
    with as_usage_error(f"--layers {layers}"):
        select_layers(layers, config.num_hidden_layers)
    model, _ = load_model(BertModel, checkpoint, {"add_pooling_layer": False, "vocab_size": tokens})
    return model.eval().requires_grad_(False).to(choose_device())


@torch.no_grad()
def run_encoder(model: BertModel, sequences: Sequences, layers: str) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield the activations of all sequences in batches.

    Args:
        sequences: Without labels.

    Yields:
        The numbers of the sequences (B,), their activations (B, T, K, H), and their attention mask (B, T).
    """
    lengths = np.diff(sequences.ends, prepend=0)
    for numbers in batch_by_length(lengths):
        batch = pad(sequences.__getitems__(numbers.tolist()))
        batch = {name: column.to(model.device) for name, column in batch.items()}
        outputs = model(**batch, output_hidden_states=True, return_dict=True)
        states = select_features(outputs.hidden_states, layers)
        check_vectors(model, states)
        yield numbers, states, batch["attention_mask"]


def check_vectors(model: BertModel, vectors: Tensor) -> None:
    """Check that the vectors of a model are finite."""
    if not vectors.isfinite().all():
        raise UsageError(
            f"the model {model.name_or_path} gives vectors that are NaN or infinite: its weights are damaged or "
            "have diverged; give another checkpoint"
        )


# --- Texts as vectors, and a head on them -----------------------------------------------------------------------------


def gather_windows(items: Sequence[Mapping[str, Any]]) -> tuple[Sequences, np.ndarray]:
    """Return the sequences of encoded texts and pairs, and the number of windows (S,) of each text."""
    names = ("input_ids", "token_type_ids")
    windows, segments = (
        [item[name] if isinstance(item[name], list) else [item[name]] for item in items] for name in names
    )
    ids = list(chain.from_iterable(windows))
    seconds = np.array([part.sum() for part in chain.from_iterable(segments)])
    sequences = Sequences(np.concatenate(ids).astype(np.int32), np.cumsum(list(map(len, ids))), seconds, None)
    return sequences, np.array(list(map(len, windows)))


def encode_items(model: BertModel, items: Sequence[Mapping[str, Any]], report: Report = ignore) -> np.ndarray:
    """Return the vectors (S, H) of encoded texts and pairs; that of a text in windows is the mean over its windows."""
    sequences, counts = gather_windows(items)
    return pool_windows(encode(model, sequences, report), counts, "mean")


def encode(model: BertModel, sequences: Sequences, report: Report = ignore) -> np.ndarray:
    """Return the means (S, H) of sequences in the last layer of a frozen encoder, from the cache if it has them.

    Args:
        sequences: Without labels.
        report: Receives the share that is done, now and then.
    """

    def compute() -> np.ndarray:
        share, done = ShareDone(report, "of the tokens read"), 0
        vectors = np.empty((len(sequences), model.config.hidden_size), np.float32)
        for numbers, states, mask in run_encoder(model, sequences, "last"):
            for row, number in enumerate(numbers.tolist()):
                vectors[number] = states[row, : int(mask[row].sum()), 0].mean(0).cpu().numpy()
            done += int(mask.sum())
            share.note(done, len(sequences.ids))
        return vectors  # (S, H)

    return keep_array(name_vectors(model, ["mean"], sequences.ids, sequences.ends, sequences.seconds), compute)


def encode_sentences(
    model: BertModel, items: Sequence[Mapping[str, Any]], report: Report = ignore
) -> dict[str, np.ndarray]:
    """Return what the head of texts reads of encoded texts and pairs: pooling -> vectors (S, H), from the cache.

    "cls" is [CLS] through the pooler, "mean" the mean through a layer that the model gets here. A model that has this
    layer already has no other pooling. The vector of a text in windows is the mean over its windows.

    Args:
        model: With a pooler; it is changed.
    """
    first, poolings = None, ["mean"]
    if not model.config.mean_layer:
        first, poolings = copy.deepcopy(model.pooler), ["mean", "cls"]
        model.add_mean_layer()
    sequences, counts = gather_windows(items)

    @torch.no_grad()
    def compute() -> np.ndarray:
        share, done = ShareDone(report, "of the tokens read"), 0
        vectors = np.empty((len(sequences), len(poolings), model.config.hidden_size), np.float32)
        for numbers in batch_by_length(np.diff(sequences.ends, prepend=0)):
            batch = pad(sequences.__getitems__(numbers.tolist()))
            batch = {name: column.to(model.device) for name, column in batch.items()}
            outputs = model(**batch, output_hidden_states=True)
            check_vectors(model, outputs.pooler_output)
            vectors[numbers, 0] = outputs.pooler_output.cpu().numpy()
            if first is not None:
                lengths = batch["attention_mask"].sum(1)  # (B,)
                read = lengths - 1 if model.config.is_decoder else torch.zeros_like(lengths)
                states = outputs.hidden_states[-2][torch.arange(len(read), device=read.device), read]  # (B, H)
                vectors[numbers, 1] = first(states[:, None]).cpu().numpy()
            done += int(batch["attention_mask"].sum())
            share.note(done, len(sequences.ids))
        return vectors  # (S, 1 or 2, H)

    facts = [] if first is None else [take_fingerprint(*(x.detach().cpu().numpy() for x in first.parameters()))]
    vectors = keep_array(name_vectors(model, facts, sequences.ids, sequences.ends, sequences.seconds), compute)
    return {name: pool_windows(vectors[:, number], counts, "mean") for number, name in enumerate(poolings)}


@torch.no_grad()
def encode_labelled(
    model: BertModel, items: Sequence[Mapping[str, Any]], report: Report = ignore
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the states (M, H) of all tokens with a label, their labels (M,), and the numbers of their items (M,)."""
    share, done, lengths = ShareDone(report, "of the windows read"), 0, np.array([len(x["input_ids"]) for x in items])
    found = []
    for numbers in batch_by_length(lengths):
        batch = pad([items[number] for number in numbers.tolist()])
        labels = batch.pop("labels")  # (B, T)
        batch = {name: column.to(model.device) for name, column in batch.items()}
        states, rows = model(**batch).last_hidden_state.cpu(), torch.from_numpy(numbers)[:, None].expand_as(labels)
        check_vectors(model, states)
        read = labels != IGNORE_INDEX
        found.append((states[read].numpy(), labels[read].numpy(), rows[read].numpy()))
        share.note(done := done + len(numbers), len(items))
    vectors, labels, rows = map(np.concatenate, zip(*found, strict=True))
    return vectors, labels, rows


def solve(
    vectors: Any,
    targets: np.ndarray,
    strength: float,
    labels: int,
    weights: Sequence[float] | None = None,
    row_weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight (L, H) and the bias (L,) of a linear head on vectors (S, H), dense or sparse.

    The head is a logistic regression, one for each of several labels, or for numbers a ridge regression.

    Args:
        targets: Integers (S,): classes; (S, L): whether each of several labels is right; floats (S,): numbers.
        strength: The inverse of the penalty, as scikit-learn's C; a ridge regression has the penalty 1 / 2C.
        labels: The number of classes, some of which may have no row.
        weights: (L,) the weight of the rows of each class, or of the rows that have each label; None: equal.
        row_weights: (S,) the weight of each row, above 0; None: 1. A row of weight 2 is a row that is there twice.
    """
    return next(solve_path(vectors, targets, [strength], labels, weights, row_weights))


def solve_path(
    vectors: Any,
    targets: np.ndarray,
    strengths: Sequence[float],
    labels: int,
    weights: Sequence[float] | None = None,
    row_weights: np.ndarray | None = None,
    steps: int = SOLVER_STEPS,
    tolerance: float = SOLVER_TOLERANCE,
) -> Iterator[Head]:
    """Yield the weight (L, H) and the bias (L,) of `solve` for each strength; each solution starts from the last."""
    centre = np.zeros(vectors.shape[1])
    if not issparse(vectors):  # around their mean the solution is the same, in a third of the steps
        centre = vectors.mean(0) if row_weights is None else np.average(vectors, axis=0, weights=row_weights)
        vectors = vectors - centre
    exactness = {"steps": steps, "tolerance": tolerance}
    if targets.ndim == 1:
        path = solve_numbers(vectors, targets, strengths, row_weights)
        if targets.dtype.kind != "f":
            path = solve_classes(vectors, targets, strengths, labels, weights, row_weights, **exactness)
    else:
        sides = [None] * targets.shape[1] if weights is None else [(1.0, weight) for weight in weights]
        columns = zip(targets.T.astype(int), sides, strict=True)
        path = join_labels(
            [solve_classes(vectors, column, strengths, 2, side, row_weights, **exactness) for column, side in columns]
        )
    for weight, bias in path:
        yield weight, bias - weight @ centre


def solve_numbers(
    vectors: Any, targets: np.ndarray, strengths: Sequence[float], row_weights: np.ndarray | None
) -> Iterator[Head]:
    """Yield the ridge regression for each strength."""
    from sklearn.linear_model import Ridge

    for strength in strengths:
        ridge = Ridge(1 / (2 * strength)).fit(vectors, targets, row_weights)
        yield ridge.coef_[None], np.array([ridge.intercept_])


def solve_classes(
    vectors: Any,
    targets: np.ndarray,
    strengths: Sequence[float],
    labels: int,
    weights: Sequence[float] | None,
    row_weights: np.ndarray | None,
    steps: int,
    tolerance: float,
) -> Iterator[Head]:
    """Yield the logistic regression for each strength."""
    from sklearn.linear_model import LogisticRegression

    found = np.unique(targets)
    balance = None if weights is None else {label: weights[label] for label in found.tolist()}
    head = LogisticRegression(max_iter=steps, tol=tolerance, class_weight=balance, warm_start=True)
    for strength in strengths:
        weight, bias = np.zeros((labels, vectors.shape[1])), np.full(labels, NEVER)
        bias[found] = 0.0
        if len(found) > 1:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The number of unique classes")  # many of few rows look like numbers
                head.set_params(C=strength).fit(vectors, targets, row_weights)
            learned = found[-len(head.coef_) :]  # with two classes the first one's logit is 0
            weight[learned], bias[learned] = head.coef_, head.intercept_
        yield weight, bias


def join_labels(paths: Sequence[Iterator[Head]]) -> Iterator[Head]:
    """Yield the head of several labels for each strength, from the two classes of each label."""
    for heads in zip(*paths, strict=True):
        weight, bias = (np.stack([part[1] - part[0] for part in parts]) for parts in zip(*heads, strict=True))
        yield weight, bias


# --- The choice by folds ----------------------------------------------------------------------------------------------


def choose_head(
    candidates: Mapping[str, Any],
    targets: np.ndarray,
    labels: int,
    groups: Sequence[int] | np.ndarray,
    weights: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    row_weights: np.ndarray | None = None,
) -> tuple[str, float]:
    """Return the name of the vectors and the strength that have the lowest loss over folds of the rows.

    Equal losses are decided for the first candidate and the smallest strength. At most FOLD_ROWS rows are read.

    Args:
        candidates: Name -> the vectors (S, H) of the same rows, dense or sparse.
        targets, labels, weights, row_weights: Those of `solve`.
        groups: (S,) the rows of one group stay in one fold.
    """
    losses = compare_heads(candidates, targets, labels, groups, weights, strengths, row_weights)
    if not losses:
        return next(iter(candidates)), strengths[len(strengths) // 2]
    return min(losses, key=lambda pair: losses[pair])


def measure_explained(
    vectors: Any,
    targets: np.ndarray,
    labels: int,
    groups: Sequence[int] | np.ndarray,
    weights: Sequence[float] | None,
    strength: float,
    row_weights: np.ndarray | None = None,
) -> float:
    """Return the share of a constant answer's loss that vectors explain by folds; NaN where there are no folds.

    Arguments as for `choose_head`.
    """
    candidates = {"constant": np.zeros((len(targets), 1)), "": vectors}
    losses = compare_heads(candidates, targets, labels, groups, weights, [strength], row_weights)
    return 1 - losses["", strength] / losses["constant", strength] if losses else float("nan")


def compare_heads(
    candidates: Mapping[str, Any],
    targets: np.ndarray,
    labels: int,
    groups: Sequence[int] | np.ndarray,
    weights: Sequence[float] | None,
    strengths: Sequence[float],
    row_weights: np.ndarray | None,
) -> dict[tuple[str, float], float]:
    """Return the loss over folds of each name and strength; empty where nothing can be compared. See `choose_head`."""
    from sklearn.exceptions import ConvergenceWarning

    if len(targets) > FOLD_ROWS:  # drawn, because the rows of a file may be sorted by class
        rows = np.sort(np.random.default_rng(0).permutation(len(targets))[:FOLD_ROWS])
        candidates = {name: vectors[rows] for name, vectors in candidates.items()}
        targets, groups = targets[rows], np.asarray(groups)[rows]
        row_weights = None if row_weights is None else row_weights[rows]
    folds = divide_rows(targets, np.asarray(groups))
    if not folds:
        return {}
    losses: dict[tuple[str, float], float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a choice needs no exact solution
        for name, vectors in candidates.items():
            lowest = np.inf
            for strength, loss in measure_strengths(vectors, targets, labels, folds, weights, strengths, row_weights):
                losses[name, strength] = loss
                if loss > lowest:  # still weaker penalties fit still more noise, and are the slowest to solve
                    break
                lowest = loss
    return losses


def measure_strengths(
    vectors: Any,
    targets: np.ndarray,
    labels: int,
    folds: Sequence[Fold],
    weights: Sequence[float] | None,
    strengths: Sequence[float],
    row_weights: np.ndarray | None = None,
) -> Iterator[tuple[float, float]]:
    """Yield each strength with the loss of the held-out rows of all folds."""
    paths = []
    for fitted, _ in folds:
        fitted_weights = None if row_weights is None else row_weights[fitted]
        rows = vectors[fitted], targets[fitted]
        paths.append(solve_path(*rows, strengths, labels, weights, fitted_weights, FOLD_STEPS, FOLD_TOLERANCE))
    held = np.concatenate([held for _, held in folds])
    answers, held_weights = targets[held], None if row_weights is None else row_weights[held]
    for strength, heads in zip(strengths, zip(*paths, strict=True), strict=True):
        pairs = zip(heads, folds, strict=True)
        logits = np.concatenate([vectors[held] @ weight.T + bias for (weight, bias), (_, held) in pairs])
        yield strength, measure_loss(logits, answers, weights, held_weights)


def divide_rows(targets: np.ndarray, groups: np.ndarray) -> list[Fold]:
    """Return the numbers of the fitted and the held-out rows of each fold; none where nothing can be chosen.

    The classes of the groups' first rows have equal shares in all folds. A class with one row is always fitted.
    """
    from sklearn.model_selection import StratifiedKFold

    number, always, rows = MOST_FOLDS, np.empty(0, int), np.arange(len(targets))
    has_classes = targets.ndim == 1 and targets.dtype.kind != "f"
    if has_classes:
        _, codes, counts = np.unique(targets, return_inverse=True, return_counts=True)
        is_divided = counts[codes] > 1
        always, rows = rows[~is_divided], rows[is_divided]
        number = min([MOST_FOLDS, *counts[counts > 1].tolist()])
    _, firsts, codes = np.unique(groups[rows], return_index=True, return_inverse=True)
    # Groups are divided, not rows: StratifiedGroupKFold takes 12 s for 20,000 groups.
    strata = targets[rows[firsts]] if has_classes else np.zeros(len(firsts), int)
    number = min(number, max(np.unique(strata, return_counts=True)[1], default=0))
    if number < 2 or len(np.unique(targets, axis=0)) < 2:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scikit-learn warns of a class in fewer groups than folds
        parts = list(StratifiedKFold(number, shuffle=True, random_state=0).split(firsts, strata))
    folds = ([rows[np.isin(codes, part)] for part in pair] for pair in parts)
    return [(np.concatenate([fitted, always]), held) for fitted, held in folds]


def measure_loss(
    logits: np.ndarray,
    targets: np.ndarray,
    weights: Sequence[float] | None = None,
    row_weights: np.ndarray | None = None,
) -> float:
    """Return the mean loss of logits (S, L): of classes and several labels the log-loss, of numbers the squared error.

    Args:
        weights: (L,) the weight of the rows of each class.
        row_weights: (S,) the weight of each row.
    """
    if targets.ndim == 1 and targets.dtype.kind == "f":
        return float(np.average(np.square(logits[:, 0] - targets), weights=row_weights))
    if targets.ndim == 2:
        losses = -np.log(expit(np.where(targets, logits, -logits)).clip(min=LEAST))
        shares = None if row_weights is None else np.broadcast_to(row_weights[:, None], losses.shape)
        return float(np.average(losses, weights=shares))
    right = softmax(logits, axis=1)[np.arange(len(targets)), targets]
    shares = row_weights
    if weights is not None:
        shares = np.asarray(weights)[targets] * (1.0 if row_weights is None else row_weights)
    return float(np.average(-np.log(right.clip(min=LEAST)), weights=shares))


# --- For training -----------------------------------------------------------------------------------------------------


def cache_features(
    checkpoint: str,
    layers: str,
    sequences: Sequences,
    positions: np.ndarray,
    ends: np.ndarray,
    *,
    folder: str | Path = "",
    half: bool = False,
) -> Path:
    """Return the file of the features (M, K, H) of S sequences' words, which are computed if there is none.

    Args:
        positions: (M,) the position of each word's first token in its sequence.
        ends: (S,) the number of words up to each sequence's end.
        folder: The folder of feature files; empty: `bertkit/features` among the assets of huggingface_hub's cache.
        half: Whether to store 16 bits per number instead of 32.
    """
    model = load_encoder(checkpoint, layers)
    numbers, _ = select_layers(layers, model.config.num_hidden_layers)  # 0 for the embeddings
    name = name_vectors(model, [numbers, half], sequences.ids, sequences.ends, sequences.seconds, positions, ends)
    remedy = "give a folder for features with --set data.features_dir=DIR"
    # The first process on each machine computes the features, and the others read its file.
    with PartialState().local_main_process_first(), as_usage_error("the folder of features", remedy):
        path = Path(folder or locate_cache(), f"{name}.npy")
        if not path.is_file():
            shape = (len(positions), len(numbers), model.config.hidden_size)
            write_cached(path, partial(write_features, model, layers, sequences, positions, ends, shape, half))
    return path


def locate_cache() -> Path:
    """Return the folder of cached files, among the assets of huggingface_hub's cache."""
    return cached_assets_path("bertkit", namespace="features")


def write_cached(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Put a file into a folder of cached files, which appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent, older=24 * 3600.0)
    with atomic_open(path, "wb") as file:
        write(file)


def keep_array(name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array of this name from the cache, where it is put if the disk allows that."""
    with suppress(OSError, ValueError):
        return np.load(locate_cache() / f"{name}.npy")
    array = make()
    with suppress(OSError, ValueError):
        write_cached(locate_cache() / f"{name}.npy", partial(np.save, arr=array))
    return array


def name_vectors(model: BertModel, facts: Sequence[Any], *columns: np.ndarray) -> str:
    """Return a hash of a model, of the facts about what is computed with it, and of the columns of its inputs."""
    settings = {name: getattr(model.config, name) for name in COUNTED}
    digest = hashlib.sha256(json.dumps([*facts, settings]).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    for column in columns:
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:32]


def write_features(
    model: BertModel,
    layers: str,
    sequences: Sequences,
    positions: np.ndarray,
    ends: np.ndarray,
    shape: tuple[int, int, int],
    half: bool,
    file: BinaryIO,
) -> None:
    """Write the features of all words, (M, K, H), as a .npy file.

    The file is not memory-mapped: on a full disk the system would kill the process.
    """
    kind = np.dtype(np.float16 if half else np.float32)
    form = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, form)
    start, size = file.tell(), shape[1] * shape[2] * kind.itemsize
    starts = np.concatenate([[0], ends[:-1]])
    for numbers, states, _ in run_encoder(model, sequences, layers):
        for row, number in enumerate(numbers.tolist()):
            chosen = torch.from_numpy(positions[starts[number] : ends[number]].astype(np.int64)).to(states.device)
            file.seek(start + int(starts[number]) * size)
            file.write(states[row, chosen].cpu().numpy().astype(kind).tobytes())
