"""The activations of a frozen encoder (paper section 5.3), computed once and cached on disk.

The encoder runs once: the activations of every word's first token are stored under a hash of the weights, the tokens
and the layers, so that another seed or study reuses them. The file is memory-mapped, and an epoch costs only the
training of the layers above.

Left out: training (`BertFeaturesForTokenClassification` learns from them).
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from accelerate import PartialState
from huggingface_hub import cached_assets_path
from torch import Tensor

from bertkit.data.sequences import Sequences, batch_by_length, pad
from bertkit.errors import UsageError, explain_refusal
from bertkit.model.bert import BertModel
from bertkit.model.bilstm import FEATURE_LAYERS, check_feature_layers, select_features
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.precision import find_device
from bertkit.system.files import atomic_open, find_checksum

COUNTED = ("hidden_size", "num_attention_heads", "hidden_act", "layer_norm_eps", "is_decoder")  # besides the weights
DAY = 86_400.0  # seconds
RESIDUE = 0x2144DF1C  # the CRC-32 of any data followed by its own CRC-32


# --- The encoder ------------------------------------------------------------------------------------------------------


def load_encoder(checkpoint: str, layers: str, tokens: int = 0) -> BertModel:
    """Load the encoder of a checkpoint, frozen, on the accelerator if there is one.

    Args:
        tokens: The size of the tokenizer's vocabulary.

    Raises:
        UsageError: The checkpoint cannot be loaded, lacks the layers, or has a smaller vocabulary.
    """
    with explain_refusal(f"the model {checkpoint}"):
        check_feature_layers(layers, load_config(checkpoint))
    model, _ = load_model(BertModel, checkpoint, {"add_pooling_layer": False, "vocab_size": tokens})
    return model.eval().requires_grad_(False).to(find_device())


@torch.no_grad()
def run_encoder(model: BertModel, sequences: Sequences, layers: str) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield the activations of all sequences in batches.

    Args:
        sequences: Without labels.

    Yields:
        The numbers of the sequences (B,), their activations (B, T, K, H), and their attention mask (B, T).

    Raises:
        UsageError: Activations are NaN or infinite.
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
    places: np.ndarray,
    ends: np.ndarray,
    *,
    folder: str | Path = "",
    half: bool = False,
) -> tuple[Path, bool]:
    """Return the file of the features (M, K, H) of S sequences' words, and whether a damaged one was replaced.

    They are computed unless the folder has the file with a valid checksum.

    Args:
        places: (M,) the position of each word's first token in its sequence.
        ends: (S,) the number of words up to each sequence's end.
        folder: The folder of feature files; empty: `bertkit/features` among the assets of huggingface_hub's cache.
        half: Whether to store 16 bits per number instead of 32.

    Raises:
        UsageError: The checkpoint cannot be loaded or lacks the layers, or the disk is full.
    """
    model = load_encoder(checkpoint, layers)
    remedy = "give a folder for features with --set data.features_dir=DIR"
    with explain_refusal("the cache of features (change it with --set data.features_dir=DIR)", remedy):
        kept = Path(folder) if folder else cached_assets_path("bertkit", namespace="features")
    path = kept / f"{name_features(model, layers, sequences, places, ends, half)}.npy"
    # The first process on each machine computes the features, and the others read its file.
    with PartialState().local_main_process_first(), explain_refusal(f"the folder {kept}", remedy):
        if path.is_file() and find_checksum(path) == RESIDUE:
            return path, False
        is_damaged = path.exists()
        kept.mkdir(parents=True, exist_ok=True)
        remove_remains(kept)
        with atomic_open(path, "wb") as file:
            write_features(model, layers, sequences, places, ends, file, half)
            file.flush()
            checksum = find_checksum(Path(file.name))
            file.seek(0, os.SEEK_END)
            file.write(checksum.to_bytes(4, "little"))
    return path, is_damaged


def remove_remains(folder: Path) -> None:
    """Remove partial files of killed runs that have not been written to for a day."""
    for path in folder.glob(".*.npy.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                path.unlink()


def name_features(
    model: BertModel, layers: str, sequences: Sequences, places: np.ndarray, ends: np.ndarray, half: bool
) -> str:
    """Return a hash of everything that the features depend on."""
    settings = {name: getattr(model.config, name) for name in COUNTED}
    digest = hashlib.sha256(json.dumps([list_layers(model, layers), half, settings]).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    for column in (sequences.ids, sequences.ends, sequences.seconds, places, ends):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:32]


def list_layers(model: BertModel, layers: str) -> list[int]:
    """Return the numbers of the layers, 0 for the embeddings."""
    return list(range(model.config.num_hidden_layers + 1)[FEATURE_LAYERS[layers][0]])


def write_features(
    model: BertModel,
    layers: str,
    sequences: Sequences,
    places: np.ndarray,
    ends: np.ndarray,
    file: BinaryIO,
    half: bool,
) -> None:
    """Write the features of all words, (M, K, H), as a .npy file.

    The file is not memory-mapped: on a full disk the system would kill the process.
    """
    kind = np.dtype(np.float16 if half else np.float32)
    count, width = len(list_layers(model, layers)), model.config.hidden_size
    form = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (len(places), count, width)}
    np.lib.format.write_array_header_1_0(file, form)
    start, size = file.tell(), count * width * kind.itemsize
    starts = np.concatenate([[0], ends[:-1]])
    for numbers, states, _ in run_encoder(model, sequences, layers):
        for row, number in enumerate(numbers.tolist()):
            chosen = torch.from_numpy(places[starts[number] : ends[number]].astype(np.int64)).to(states.device)
            file.seek(start + int(starts[number]) * size)
            file.write(states[row, chosen].cpu().numpy().astype(kind).tobytes())
