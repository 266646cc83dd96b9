"""The activations of a frozen encoder (paper section 5.3), computed once and kept on disk.

The encoder runs once: the activations of every word's first token are kept under a name made of the weights, the tokens
and the layers, so that another seed or another study finds them there. They are mapped into memory, and an epoch costs
only what is trained on them.

Left out: training (`BertFeaturesForTokenClassification` learns from them).
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from accelerate import PartialState
from huggingface_hub import cached_assets_path
from torch import Tensor

from bertkit.data.sequences import Items, Sequences, batch_by_length, pad
from bertkit.errors import UsageError, explain_refusal
from bertkit.model.bert import BertModel
from bertkit.model.bilstm import FEATURE_LAYERS, check_feature_layers, select_features
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.precision import find_device
from bertkit.system.files import atomic_open, find_checksum

COUNTED = ("hidden_size", "num_attention_heads", "hidden_act", "layer_norm_eps", "is_decoder")  # besides the weights
DAY = 86_400.0  # seconds
RESIDUE = 0x2144DF1C  # the CRC-32 of anything with its own CRC-32 behind it


# --- The encoder at work ----------------------------------------------------------------------------------------------


def load_encoder(checkpoint: str, layers: str, tokens: int = 0) -> BertModel:
    """The encoder of a checkpoint, frozen, on the accelerator if there is one.

    tokens: how many there are in the vocabulary.

    Raises:
        UsageError: it cannot be loaded, or has no such layers, or not so many tokens.
    """
    with explain_refusal(f"the model {checkpoint}"):
        check_feature_layers(layers, load_config(checkpoint))
    model, _ = load_model(BertModel, checkpoint, {"add_pooling_layer": False, "vocab_size": tokens})
    return model.eval().requires_grad_(False).to(find_device())


@torch.no_grad()
def run_encoder(model: BertModel, sequences: Sequences, layers: str) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """The activations of all sequences, some at a time: their numbers (B,), (B, T, K, H), and (B, T) real tokens.

    sequences: without labels.

    Raises:
        UsageError: activations are NaN or infinite.
    """
    lengths = np.diff(sequences.ends, prepend=0)
    for numbers in batch_by_length(lengths):
        batch = pad(sequences.__getitems__(numbers.tolist()))
        batch = {name: column.to(model.device) for name, column in batch.items()}
        outputs = model(**batch, output_hidden_states=True, return_dict=True)
        states = select_features(outputs.hidden_states, layers)
        if not states.isfinite().all():
            raise UsageError(
                f"the model {model.name_or_path} gives vectors that are NaN or infinite; its weights are damaged or "
                "have diverged: give another checkpoint"
            )
        yield numbers, states, batch["attention_mask"]


# --- For training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features(Items):
    """S sequences of words, each word with the activations of its first token, on disk.

    path: a .npy file (M, K, H), its CRC-32 behind it. ends: (S,) the words up to each sequence's end. labels: (M,) of
    the words.
    """

    path: Path
    ends: np.ndarray
    labels: np.ndarray

    @cached_property
    def values(self) -> np.ndarray:
        """(M, K, H), mapped from the file."""
        return np.load(self.path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped file, which another process maps for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "values"}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One sequence: `features` (W, K, H) and `labels` (W,)."""
        words = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return {"features": self.values[words], "labels": self.labels[words]}


def pad_features(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """The batch of some sequences: `features` (B, W, K, H), `labels` (B, W) and `attention_mask` (B, W) at words."""
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

    They are computed if the folder does not have the file, with its checksum.

    Args:
        places: (M,) where in its sequence each word's first token is.
        ends: (S,) the words up to each sequence's end.
        folder: where files of features are kept; empty: `bertkit/features` among the assets of huggingface_hub's cache.
        half: 16 bits a number instead of 32.

    Raises:
        UsageError: the checkpoint cannot be loaded or lacks the layers, or the disk is full.
    """
    model = load_encoder(checkpoint, layers)
    remedy = "name a folder for features: --set data.features_dir=DIR"
    with explain_refusal("the cache of features (for another: --set data.features_dir=DIR)", remedy):
        kept = Path(folder) if folder else cached_assets_path("bertkit", namespace="features")
    path = kept / f"{name_features(model, layers, sequences, places, ends, half)}.npy"
    # Of several processes on a machine the first one computes, and the others find its file.
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
    """Removes what killed runs have left half written, if nobody has written to it for a day."""
    for path in folder.glob(".*.npy.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                path.unlink()


def name_features(
    model: BertModel, layers: str, sequences: Sequences, places: np.ndarray, ends: np.ndarray, half: bool
) -> str:
    """A name that depends on everything that the features depend on."""
    settings = {name: getattr(model.config, name) for name in COUNTED}
    digest = hashlib.sha256(json.dumps([list_layers(model, layers), half, settings]).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    for column in (sequences.ids, sequences.ends, sequences.seconds, places, ends):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:32]


def list_layers(model: BertModel, layers: str) -> list[int]:
    """The numbers of the layers, 0 for the embeddings."""
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
    """Writes the features of all words, (M, K, H), as a .npy file.

    Not through a mapped file: where the disk is full, the system would end the process.
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
