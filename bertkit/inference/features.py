"""Contextual vectors: activations of a frozen encoder (paper section 5.3), of words for training and of any text.

For training the encoder runs once: the activations of every word's first token are kept on disk, under a name made of
the weights, the tokens and the layers, so that another seed or another study finds them there. They are mapped into
memory, and an epoch costs only what is trained on them.

Left out: training (`BertFeaturesForTokenClassification` learns from them).
"""

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset

from bertkit.data.formats.inputs import check_output, cut_into_chunks, walk_lines
from bertkit.data.pretraining.sources import ignore
from bertkit.data.pretraining.store import BYTES_A_READ, find_checksum
from bertkit.data.pretraining.tokenize import copy_backend
from bertkit.data.sequences import Sequences, encode_texts, pad
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError, explain_full_disk, explain_refusal
from bertkit.model.bert import FEATURE_LAYERS, BertModel, check_feature_layers, select_features
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.loss import IGNORED
from bertkit.model.precision import find_device
from bertkit.system.files import open_whole

TOKENS_A_BATCH = 8192
TEXTS_A_CHUNK = 1024  # read, encoded and written at a time
CHARACTERS_A_CHUNK = 200_000  # at which a chunk ends, however few its texts; some 150 MB of vectors of BERT-base
COUNTED = ("hidden_size", "num_attention_heads", "hidden_act", "layer_norm_eps", "is_decoder")  # besides the weights
POOLS = ("words", "cls", "mean")
SUFFIXES = (".jsonl", ".npz")
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


def batch_by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of sequences of similar length, together about TOKENS_A_BATCH tokens; the longest ones first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, TOKENS_A_BATCH // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count


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
class Features(Dataset):
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

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several of them."""
        return [self[index] for index in indices]


def pad_features(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """The batch of some sequences: `features` (B, W, K, H), `labels` (B, W) and `attention_mask` (B, W) at words."""
    longest = max(1, *(len(item["labels"]) for item in items))
    shape = (len(items), longest)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
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
        folder: where files of features are kept; empty: `bertkit/features` in the user's cache.
        half: 16 bits a number instead of 32.

    Raises:
        UsageError: the checkpoint cannot be loaded or lacks the layers, or the disk is full.
    """
    model = load_encoder(checkpoint, layers)
    kept = Path(folder) if folder else find_cache()
    path = kept / f"{name_features(model, layers, sequences, places, ends, half)}.npy"
    # Of several processes on a machine the first one computes, and the others find its file.
    remedy = "name a folder for features: --set data.features_dir=DIR"
    with PartialState().local_main_process_first(), explain_refusal(f"the folder {kept}", remedy):
        if is_whole(path, describe_file(model, layers, places, half)):
            return path, False
        is_damaged = path.exists()
        kept.mkdir(parents=True, exist_ok=True)
        remove_remains(kept)
        with open_whole(path, "wb") as file:
            write_features(model, layers, sequences, places, ends, file, half)
            file.flush()
            checksum = find_checksum(Path(file.name))
            file.seek(0, os.SEEK_END)
            file.write(checksum.to_bytes(4, "little"))
    return path, is_damaged


def describe_file(model: BertModel, layers: str, places: np.ndarray, half: bool) -> dict[str, Any]:
    """The header of the file of M words' features, (M, K, H)."""
    shape = (len(places), len(list_layers(model, layers)), model.config.hidden_size)
    kind = np.dtype(np.float16 if half else np.float32)
    return {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}


def is_whole(path: Path, form: Mapping[str, Any]) -> bool:
    """Return whether there is a file of features with this header and the right checksum."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    is_same = found.shape == form["shape"] and np.lib.format.dtype_to_descr(found.dtype) == form["descr"]
    return is_same and find_checksum(path) == RESIDUE


def remove_remains(folder: Path) -> None:
    """Removes what killed runs have left half written, if nobody has written to it for a day."""
    for path in folder.glob(".*.npy.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                path.unlink()


def find_cache() -> Path:
    """Return the folder of features where the recipe names none.

    Raises:
        UsageError: This user has no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertkit" / "features"
    except RuntimeError:
        raise UsageError(
            "there is no home directory to keep features in; name a folder for them: --set data.features_dir=DIR"
        ) from None


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
    form = describe_file(model, layers, places, half)
    np.lib.format.write_array_header_1_0(file, form)
    kind = np.dtype(form["descr"])
    start, size = file.tell(), form["shape"][1] * form["shape"][2] * kind.itemsize
    starts = np.concatenate([[0], ends[:-1]])
    for numbers, states, _ in run_encoder(model, sequences, layers):
        for row, number in enumerate(numbers.tolist()):
            chosen = torch.from_numpy(places[starts[number] : ends[number]].astype(np.int64)).to(states.device)
            file.seek(start + int(starts[number]) * size)
            file.write(states[row, chosen].cpu().numpy().astype(kind).tobytes())


# --- Of any text ------------------------------------------------------------------------------------------------------


def extract(
    checkpoint: str,
    source: Path,
    layers: str,
    output: Path,
    pool: str = "words",
    report: Callable[[str], None] = ignore,
) -> int:
    """Writes the vectors of a file's texts, one a line, and gives their number.

    The layers of a weighted sum weigh the same here, for nothing has been learned. Each line of a .jsonl file is an
    object: `text`, and `vector` or else `words`, each with `word`, its `start` and `end` in characters, and `vector`.
    A .npz file holds `vectors` (M, F), and with words also `texts` (M,) the number of each word's text, `starts` and
    `ends` (M,) and `words` (M,).

    Args:
        pool: "words": a vector a word, that of its first token; a word is what BERT's tokenizer begins with, so each
            Chinese character is one; "cls": that of [CLS]; "mean": the mean over all tokens, [CLS] and [SEP] included.

    Raises:
        UsageError: an unknown pool, layer or suffix, a file that cannot be read, a text that is empty or longer than
            the model's positions, or a model that cannot be loaded.
    """
    for option, value, known in (("--pool", pool, POOLS), ("--layers", layers, FEATURE_LAYERS)):
        if value not in known:
            raise UsageError(f"{option} {value} is unknown; expected one of {', '.join(known)}")
    if output.suffix not in SUFFIXES:
        raise UsageError(f"{output} must end in {' or '.join(SUFFIXES)}; change --output")
    if not source.is_file():
        raise UsageError(f"there is no file {source}; name one with --input")
    check_output(str(source), output)
    tokenizer = load_tokenizer(checkpoint)
    model = load_encoder(checkpoint, layers, len(tokenizer))
    if pool == "cls" and model.config.is_decoder:
        raise UsageError(
            f"{checkpoint} reads from left to right, so its [CLS] has seen nothing; take --pool mean or words"
        )
    with explain_refusal(f"the file {output}"), explain_full_disk(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        is_text = output.suffix == ".jsonl"
        with open_whole(output, "w" if is_text else "wb") as file:
            found = describe_texts(model, tokenizer, read_texts(source), layers, pool, str(source))
            count = write_lines(found, file) if is_text else write_arrays(found, file, output.parent)
            if not count:
                raise UsageError(f"{source} is empty; write a text a line")
    report(f"{count:,} {'text' if count == 1 else 'texts'} in {output}")
    return count


def read_texts(source: Path) -> Iterator[str]:
    """The lines of a file.

    Raises:
        UsageError: it cannot be read, is not UTF-8, or has a line that is empty or too long.
    """
    with explain_refusal(str(source)), source.open("rb") as file:
        for number, text in walk_lines(file):
            if isinstance(text, UsageError):
                raise UsageError(f"{source}, line {number} {text}")
            if not text.strip():
                raise UsageError(f"{source}, line {number} is empty; write a text a line")
            yield text


def describe_texts(
    model: BertModel, tokenizer: Any, texts: Iterable[str], layers: str, pool: str, source: str
) -> Iterator[dict[str, Any]]:
    """What there is to say of each text, in order: see `extract`; vectors are arrays here."""
    longest = model.config.max_position_embeddings
    backend = copy_backend(tokenizer)  # special tokens written out in a text are ordinary text, as for the encoder
    done = 0
    for chunk in cut_into_chunks(texts, TEXTS_A_CHUNK, CHARACTERS_A_CHUNK):
        sequences = encode_texts([chunk], None, tokenizer, 1 << 30)
        lengths = np.diff(sequences.ends, prepend=0)
        if (lengths > longest).any():
            place = int((lengths > longest).argmax())
            raise UsageError(
                f"{source}, line {done + place + 1} has {lengths[place]:,} tokens and the model takes {longest:,}; "
                "split it"
            )
        found: list[dict[str, Any]] = [{} for _ in chunk]
        for numbers, states, mask in run_encoder(model, sequences, layers):
            vectors = combine(states, layers)  # (B, T, F)
            for row, number in enumerate(numbers.tolist()):
                found[number] = pool_text(chunk[number], vectors[row, : int(mask[row].sum())], backend, pool)
        yield from found
        done += len(chunk)


def combine(states: Tensor, layers: str) -> Tensor:
    """(..., F) one vector a token of the activations (..., K, H) of the chosen layers."""
    return states.sum(dim=-2) if FEATURE_LAYERS[layers][1] == "sum" else states.flatten(-2)


def pool_text(text: str, vectors: Tensor, backend: Any, pool: str) -> dict[str, Any]:
    """What `extract` says of a text with the vectors (T, F) of its tokens."""
    if pool != "words":
        return {"text": text, "vector": (vectors[0] if pool == "cls" else vectors.mean(dim=0)).cpu().numpy()}
    encoding = backend.encode(text)
    numbers = encoding.word_ids
    firsts = [place for place, word in enumerate(numbers) if word is not None and word != numbers[place - 1]]
    spans = [encoding.word_to_chars(numbers[place]) for place in firsts]
    return {
        "text": text,
        "words": [
            {"word": text[start:end], "start": start, "end": end, "vector": vector}
            for (start, end), vector in zip(spans, vectors[firsts].cpu().numpy(), strict=True)
        ],
    }


def write_lines(found: Iterable[Mapping[str, Any]], file: TextIO) -> int:
    """Writes one JSON object a text and gives their number."""
    count = 0
    for text in found:
        file.write(json.dumps(text, ensure_ascii=False, default=lambda vector: vector.tolist()) + "\n")
        count += 1
    return count


def write_arrays(found: Iterable[Mapping[str, Any]], file: BinaryIO, folder: Path) -> int:
    """Writes a .npz file and gives the number of texts; the columns wait in files without a name in the folder."""
    kinds = {"vectors": np.dtype(np.float32)}
    count = rows = width = longest = 0
    with ExitStack() as stack:
        columns = {
            name: stack.enter_context(TemporaryFile(dir=folder))
            for name in ("vectors", "texts", "starts", "ends", "words")
        }
        for number, text in enumerate(found):
            count = number + 1
            for row in text.get("words", [text]):
                columns["vectors"].write(row["vector"].tobytes())
                rows, width = rows + 1, len(row["vector"])
                if "word" in row:
                    for name, value in (("texts", number), ("starts", row["start"]), ("ends", row["end"])):
                        columns[name].write(np.int64(value).tobytes())
                    columns["words"].write(row["word"].encode() + b"\n")
                    longest = max(longest, len(row["word"]))
        if count and "words" in text:
            kinds |= {name: np.dtype(np.int64) for name in ("texts", "starts", "ends")}
            kinds["words"] = np.dtype((np.str_, max(longest, 1)))
        with zipfile.ZipFile(file, "w") as archive:  # as numpy's savez does
            for name, kind in kinds.items():
                shape = (rows, width) if name == "vectors" else (rows,)
                form = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
                columns[name].seek(0)
                blocks = iter(partial(columns[name].read, BYTES_A_READ), b"")
                if name == "words":
                    blocks = (np.array(line[:-1].decode(), kind).tobytes() for line in columns[name])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, form)
                    for block in blocks:
                        member.write(block)
    return count
