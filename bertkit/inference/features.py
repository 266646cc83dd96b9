"""Contextual vectors of text: activations of an encoder, for each word or pooled (paper section 5.3)."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch
from torch import Tensor

from bertkit.data.formats.line import detect_encoding, walk_file
from bertkit.data.formats.rows import check_output
from bertkit.data.sequences import encode_inputs
from bertkit.data.tokenizer import get_backend, load_tokenizer
from bertkit.errors import UsageError, as_usage_error
from bertkit.inference.batching import cut_into_chunks
from bertkit.model.bert import BertModel
from bertkit.model.bilstm import select_layers
from bertkit.system.files import atomic_open
from bertkit.system.progress import Report, ignore
from bertkit.tasks.frozen import load_encoder, run_encoder

TEXTS_A_CHUNK = 1024  # texts read, encoded and written at a time
CHARACTERS_A_TEXT_CHUNK = 200_000  # limit of a chunk with long texts; about 150 MB of one layer's vectors of BERT-base
POOLING = {"cls": itemgetter(0), "mean": partial(torch.mean, dim=0)}  # (T, H) to (H,)
POOLS = ("words", *POOLING)
FEATURE_SUFFIXES = (".jsonl", ".npz")


def extract(
    checkpoint: str, source: Path, layers: str, output: Path, pool: str = "words", report: Report = ignore
) -> int:
    """Write the vectors of a file's texts, one text per line, and return the number of texts.

    The layers of a weighted sum have equal weights here, because no weights have been learned. Each line of a .jsonl
    file is an object with `text`, and `vector` or `words`, each with `word`, its `start` and `end` in characters, and
    `vector`. A .npz file holds `vectors` (M, F), and with words also `texts` (M,), the index of each word's text,
    `starts` and `ends` (M,), and `words` (M,).

    Args:
        layers: As in `bertkit.model.bilstm.select_layers`.
        pool: "words": a vector for each word, that of its first token, with the words of BERT's tokenizer before
            WordPiece, so each Chinese character is one; "cls": the vector of [CLS]; "mean": the mean over all tokens,
            [CLS] and [SEP] included.
    """
    if pool not in POOLS:
        raise UsageError(f"unknown --pool {pool}; expected one of {', '.join(POOLS)}")
    if output.suffix not in FEATURE_SUFFIXES:
        raise UsageError(f"{output} must end in {' or '.join(FEATURE_SUFFIXES)}; change --output")
    check_output(str(source), output)
    tokenizer = load_tokenizer(checkpoint, report=report)
    model = load_encoder(checkpoint, layers, len(tokenizer))
    if pool == "cls":
        report("without fine-tuning the vector of [CLS] is not a sentence vector (the paper's footnote on C, 3.1)")
    with as_usage_error(f"the file {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        is_text = output.suffix == ".jsonl"
        with atomic_open(output, "w" if is_text else "wb") as file:
            found = describe_texts(model, tokenizer, read_texts(source), layers, pool, str(source))
            count = (write_lines if is_text else write_arrays)(found, file)
            if not count:
                raise UsageError(f"{source} is empty; write one text per line")
    report(f"{count:,} {'text' if count == 1 else 'texts'} in {output}")
    return count


def read_texts(source: Path) -> Iterator[str]:
    """Yield the lines of a file."""
    for number, line in enumerate(walk_file(source, detect_encoding(source)), 1):
        if isinstance(line, UsageError) or not line.strip():
            trouble = line if isinstance(line, UsageError) else "is empty; write one text per line"
            raise UsageError(f"{source}, line {number} {trouble}")
        yield line.rstrip("\r\n")


def describe_texts(
    model: BertModel, tokenizer: Any, texts: Iterable[str], layers: str, pool: str, source: str
) -> Iterator[dict[str, Any]]:
    """Yield the object for each text, in order, as in `extract`, with vectors as arrays."""
    longest = model.config.max_position_embeddings
    backend = get_backend(tokenizer, "--pool words") if pool == "words" else None
    chosen, kind = select_layers(layers, model.config.num_hidden_layers)
    done = 0
    for chunk in cut_into_chunks(texts, TEXTS_A_CHUNK, CHARACTERS_A_TEXT_CHUNK // len(chosen)):
        sequences = encode_inputs(chunk, None, tokenizer, 1 << 30)
        lengths = np.diff(sequences.ends, prepend=0)
        if (lengths > longest).any():
            row = int((lengths > longest).argmax())
            raise UsageError(
                f"{source}, line {done + row + 1} has {lengths[row]:,} tokens, but the model takes at most "
                f"{longest:,}; split it"
            )
        found: list[dict[str, Any]] = [{} for _ in chunk]
        for numbers, states, mask in run_encoder(model, sequences, layers):
            vectors = states.sum(dim=-2) if kind == "sum" else states.flatten(-2)  # (B, T, F)
            for row, number in enumerate(numbers.tolist()):
                found[number] = pool_text(chunk[number], vectors[row, : int(mask[row].sum())], backend, pool)
        yield from found
        done += len(chunk)


def pool_text(text: str, vectors: Tensor, backend: Any, pool: str) -> dict[str, Any]:
    """Return the object of `extract` for a text with the vectors (T, F) of its tokens."""
    if pool != "words":
        return {"text": text, "vector": POOLING[pool](vectors).cpu().numpy()}
    encoding = backend.encode(text)
    words = encoding.word_ids
    firsts = [position for position, word in enumerate(words) if word is not None and word != words[position - 1]]
    spans = [encoding.word_to_chars(words[position]) for position in firsts]
    return {
        "text": text,
        "words": [
            {"word": text[start:end], "start": start, "end": end, "vector": vector}
            for (start, end), vector in zip(spans, vectors[firsts].cpu().numpy(), strict=True)
        ],
    }


def write_lines(found: Iterable[Mapping[str, Any]], file: TextIO) -> int:
    """Write one JSON object per text and return the number of texts."""
    count = 0
    for text in found:
        file.write(json.dumps(text, ensure_ascii=False, default=lambda vector: vector.tolist()) + "\n")
        count += 1
    return count


def write_arrays(found: Iterable[Mapping[str, Any]], file: BinaryIO) -> int:
    """Write a .npz file, whose arrays are made in memory, and return the number of texts."""
    texts = list(found)
    rows = [(number, row) for number, text in enumerate(texts) for row in text.get("words", [text])]
    arrays: dict[str, Any] = {"vectors": [row["vector"] for _, row in rows]}
    if texts and "words" in texts[0]:
        arrays["texts"] = np.array([number for number, _ in rows], np.int64)
        for name, key in (("words", "word"), ("starts", "start"), ("ends", "end")):
            arrays[name] = [row[key] for _, row in rows]
    np.savez(file, **arrays)
    return len(texts)
