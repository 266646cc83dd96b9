"""The activations of a frozen encoder (paper section 5.3), computed once and cached on disk, and a linear head on them.

The encoder runs once: the activations of every word's first token, or the vector of a text, are stored under a hash of
the weights, the tokens and the layers, so that another seed or study reuses them. The file of words is memory-mapped,
and an epoch costs only the training of the layers above.

Left out: training by gradients (`BertFeaturesForTokenClassification` learns from the words' activations).
"""

import hashlib
import json
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
from torch import Tensor

from bertkit.data.long_texts import pool_windows
from bertkit.data.sequences import Sequences, batch_by_length, pad
from bertkit.errors import UsageError, explain_refusal
from bertkit.model.bert import BertModel
from bertkit.model.bilstm import find_layers, select_features
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.precision import find_device
from bertkit.system.files import atomic_open, remove_unfinished
from bertkit.system.progress import Report, ShareDone, ignore

# Beside the weights, these values of the configuration decide the vectors.
COUNTED = ("hidden_size", "num_attention_heads", "hidden_act", "layer_norm_eps", "is_decoder")
NEVER = -50.0  # the logit of an answer that no row has
SOLVER_STEPS = 1000  # of a logistic regression


# --- The encoder ------------------------------------------------------------------------------------------------------


def load_encoder(checkpoint: str, layers: str, tokens: int = 0) -> BertModel:
    """Load the encoder of a checkpoint, frozen, on the accelerator if there is one.

    Args:
        tokens: The size of the tokenizer's vocabulary.
    """
    with explain_refusal(f"the model {checkpoint}"):
        config = load_config(checkpoint)
    with explain_refusal(f"--layers {layers}"):
        find_layers(layers, config.num_hidden_layers)
    model, _ = load_model(BertModel, checkpoint, {"add_pooling_layer": False, "vocab_size": tokens})
    return model.eval().requires_grad_(False).to(find_device())


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
        if not states.isfinite().all():
            raise UsageError(
                f"the model {model.name_or_path} gives vectors that are NaN or infinite: its weights are damaged or "
                "have diverged; give another checkpoint"
            )
        yield numbers, states, batch["attention_mask"]


# --- Texts as vectors, and a head on them -----------------------------------------------------------------------------


def encode_items(
    model: BertModel, items: Sequence[Mapping[str, Any]], pooling: str = "mean", report: Report = ignore
) -> np.ndarray:
    """Return the vectors (S, H) of encoded texts and pairs; that of a text in windows is the mean over its windows."""
    names = ("input_ids", "token_type_ids")
    windows, segments = (
        [item[name] if isinstance(item[name], list) else [item[name]] for item in items] for name in names
    )
    ids = list(chain.from_iterable(windows))
    seconds = np.array([part.sum() for part in chain.from_iterable(segments)])
    sequences = Sequences(np.concatenate(ids).astype(np.int32), np.cumsum(list(map(len, ids))), seconds, None)
    return pool_windows(encode(model, sequences, pooling, report), np.array(list(map(len, windows))), "mean")


def encode(model: BertModel, sequences: Sequences, pooling: str = "mean", report: Report = ignore) -> np.ndarray:
    """Return the vectors (S, H) of sequences in the last layer of a frozen encoder, from the cache if it has them.

    Args:
        sequences: Without labels.
        pooling: "mean", or "cls" for the vector that sentence heads read, through the pooler if the model has one.
        report: Receives the share that is done, now and then.
    """

    @torch.no_grad()
    def compute() -> np.ndarray:
        share, done = ShareDone(report, "of the tokens read"), 0
        vectors = np.empty((len(sequences), model.config.hidden_size), np.float32)
        for numbers, states, mask in run_encoder(model, sequences, "last"):
            for row, number in enumerate(numbers.tolist()):
                vectors[number] = pool_states(model, states[row, : int(mask[row].sum()), 0], pooling).cpu().numpy()
            done += int(mask.sum())
            share.note(done, len(sequences.ids))
        return vectors  # (S, H)

    return keep_array(name_vectors(model, [pooling], sequences.ids, sequences.ends, sequences.seconds), compute)


def pool_states(model: BertModel, states: Tensor, pooling: str) -> Tensor:
    """Return the vector (H,) of a sequence from the states (T, H) of its tokens, as the heads at work compute it."""
    if pooling == "mean":
        return states.mean(0)
    sentence = states[-1 if model.config.is_decoder else 0]
    return sentence if model.pooler is None else model.pooler(sentence[None, None])[0]


def solve(
    vectors: Any, targets: np.ndarray, strength: float, labels: int, weights: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight (L, H) and the bias (L,) of a linear head on vectors (S, H), dense or sparse.

    The head is a logistic regression, one for each of several labels, or for numbers a ridge regression.

    Args:
        targets: Integers (S,): classes; (S, L): whether each of several labels is right; floats (S,): numbers.
        strength: The inverse of the penalty, as scikit-learn's C; a ridge regression has the penalty 1 / 2C.
        labels: The number of classes, some of which may have no row.
        weights: (L,) the weight of the rows of each class, or of the rows that have each label; None: equal.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    if targets.ndim == 1 and targets.dtype.kind == "f":
        ridge = Ridge(1 / (2 * strength)).fit(vectors, targets)
        return ridge.coef_[None], np.array([ridge.intercept_])
    if targets.ndim == 2:
        sides = [None] * targets.shape[1] if weights is None else [(1.0, weight) for weight in weights]
        columns = zip(targets.T, sides, strict=True)
        pairs = [solve(vectors, column.astype(int), strength, 2, side) for column, side in columns]
        weight, bias = (np.stack([part[1] - part[0] for part in parts]) for parts in zip(*pairs, strict=True))
        return weight, bias
    found = np.unique(targets)
    weight, bias = np.zeros((labels, vectors.shape[1])), np.full(labels, NEVER)
    bias[found] = 0.0
    if len(found) > 1:
        balance = None if weights is None else {label: weights[label] for label in found.tolist()}
        head = LogisticRegression(C=strength, max_iter=SOLVER_STEPS, class_weight=balance).fit(vectors, targets)
        learned = found[-len(head.coef_) :]  # of two classes, the first one's logit is 0
        weight[learned], bias[learned] = head.coef_, head.intercept_
    return weight, bias


# --- For training -----------------------------------------------------------------------------------------------------


def pad_features(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Collate sequences into `features` (B, W, K, H), `labels` (B, W) and `attention_mask` (B, W) of words."""
    longest = max(1, *(len(item["labels"]) for item in items))
    shape = (len(items), longest)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX)
    features = torch.zeros(*shape, *items[0]["features"].shape[1:])  # (B, W, K, H)
    for row, item in enumerate(items):
        count = len(item["labels"])
        mask[row, :count] = 1
        labels[row, :count] = torch.from_numpy(np.array(item["labels"], np.int64))
        features[row, :count] = torch.from_numpy(np.array(item["features"]))
    return {"features": features, "labels": labels, "attention_mask": mask}


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
    numbers, _ = find_layers(layers, model.config.num_hidden_layers)  # 0 for the embeddings
    name = name_vectors(model, [numbers, half], sequences.ids, sequences.ends, sequences.seconds, positions, ends)
    remedy = "give a folder for features with --set data.features_dir=DIR"
    # The first process on each machine computes the features, and the others read its file.
    with PartialState().local_main_process_first(), explain_refusal("the folder of features", remedy):
        path = Path(folder or find_cache(), f"{name}.npy")
        if not path.is_file():
            shape = (len(positions), len(numbers), model.config.hidden_size)
            write_cached(path, partial(write_features, model, layers, sequences, positions, ends, shape, half))
    return path


def find_cache() -> Path:
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
        return np.load(find_cache() / f"{name}.npy")
    array = make()
    with suppress(OSError, ValueError):
        write_cached(find_cache() / f"{name}.npy", partial(np.save, arr=array))
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
