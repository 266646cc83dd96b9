"""Another vocabulary for a checkpoint: trimmed to the pieces of a text, or extended by its words (paper section 3).

The tokenizer is renumbered, and with it the rows of the token embeddings and of the masked-LM decoder. All other
weights and settings are written as they are, so that any head is kept.

Left out: training a vocabulary (`bertkit.data.tokenizer`).
"""

import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from bertkit.data.formats.line import read_json
from bertkit.data.tokenizer import get_backend, get_cached_tokenizer, load_tokenizer, save_tokenizer
from bertkit.errors import UsageError, as_usage_error, pluralize
from bertkit.model.checkpoint import check_weights, load_config
from bertkit.system.files import atomic_open, write_json
from bertkit.system.hub import find_file
from bertkit.system.progress import Report, ignore
from bertkit.training.run_dir import RECIPE_FILE

SHARE_HELD_OUT = 10  # one line in this number is held out; equal lines are on the same side
WEIGHTS_FILE = "model.safetensors"
TOKEN_TABLES = (  # ends of the names of the parameters that have a row for each token
    "embeddings.word_embeddings.weight",
    "predictions.decoder.weight",
    "predictions.decoder.bias",
    "predictions.bias",
)

Origins = Mapping[str, Sequence[int]]  # token of the new vocabulary -> the old ids whose rows its row is the mean of


def change_vocabulary(
    checkpoint: str, lines: Iterable[str], output: Path, words: int = 0, report: Report = ignore
) -> None:
    """Write a checkpoint whose vocabulary is trimmed to a text or extended by words of it.

    Args:
        words: Number of words to add; 0: the vocabulary is trimmed.
        report: Receives what changes for held-out lines if the vocabulary is chosen without them, and the sizes. The
            checkpoint that is written has the vocabulary chosen from all lines.
    """
    load_config(checkpoint)
    check_weights(checkpoint)
    tokenizer = load_tokenizer(checkpoint, report=report)
    kind = type(get_backend(tokenizer, "another vocabulary").model).__name__
    if kind != "WordPiece":
        raise UsageError(f"the tokenizer of {checkpoint} is {kind}, not WordPiece; name another checkpoint")
    separator = get_cached_tokenizer(tokenizer).separator
    counts, held_out = Counter[str](), []
    for line in lines:
        parts = line.split(separator) if separator else [line]
        if zlib.crc32(line.encode()) % SHARE_HELD_OUT:
            counts.update(parts)
        else:
            held_out.append(parts)
    every = counts + Counter(chain.from_iterable(held_out))
    if not any(divide(tokenizer, part) for part in every):
        raise UsageError("the text has no words; give a text that has some")
    choose = partial(extend, number=words) if words else trim
    if held_out:
        report(compare(tokenizer, renumber(tokenizer, choose(tokenizer, counts)), held_out))
    else:
        report("no line is held out, because the text has few different ones")
    report(write_changed(checkpoint, tokenizer, choose(tokenizer, every), output))


def divide(tokenizer: Any, text: str) -> list[str]:
    """Return the normalised words of a text before WordPiece."""
    backend = get_cached_tokenizer(tokenizer).backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text] if text else []
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def trim(tokenizer: Any, counts: Counter[str]) -> Origins:
    """Return the tokens that the parts of a text need, special and added tokens, and all single characters."""
    backend = get_cached_tokenizer(tokenizer).backend
    needed = set(get_cached_tokenizer(tokenizer).encode(list(counts), np.int64)[0].tolist())
    needed.update(backend.get_added_tokens_decoder())
    prefix, ids = backend.model.continuing_subword_prefix, backend.get_vocab()
    needed.update(ids[token] for token in ids if len(token.removeprefix(prefix)) == 1)
    return {token: [ids[token]] for token in sorted(ids, key=ids.__getitem__) if ids[token] in needed}


def extend(tokenizer: Any, counts: Counter[str], number: int) -> Origins:
    """Return all tokens, and those words of the parts of a text that are divided into most pieces in total."""
    backend = get_cached_tokenizer(tokenizer).backend
    words: Counter[str] = Counter()
    for part, count in counts.items():
        for word in divide(tokenizer, part):
            words[word] += count
    pieces = {word: [piece.id for piece in backend.model.tokenize(word)] for word in words}
    saved = {word: count * (len(pieces[word]) - 1) for word, count in words.items() if len(pieces[word]) > 1}
    added = sorted(saved, key=lambda word: (-saved[word], word))[:number]
    ids = backend.get_vocab()
    old = {token: [ids[token]] for token in sorted(ids, key=ids.__getitem__)}
    return old | {word: pieces[word] for word in added}


def renumber(tokenizer: Any, tokens: Iterable[str]) -> Any:
    """Return a tokenizer with these tokens in this order, those that are added tokens only at the end."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        path, config = Path(folder, "tokenizer.json"), Path(folder, "tokenizer_config.json")
        content, settings = (read_json(file, dict[str, Any], "") for file in (path, config))
        added, known = content["added_tokens"], content["model"]["vocab"]
        last = [token["content"] for token in added if token["content"] not in known]
        content["model"]["vocab"] = {token: index for index, token in enumerate(t for t in tokens if t not in last)}
        ids = {token: index for index, token in enumerate([*content["model"]["vocab"], *last])}
        for token in added:
            token["id"] = ids[token["content"]]
        template = content["post_processor"] or {}
        for token in template.get("special_tokens", {}).values():
            token["ids"] = [ids[name] for name in token["tokens"]]
        if content["padding"]:
            content["padding"]["pad_id"] = ids[content["padding"]["pad_token"]]
        settings.pop("added_tokens_decoder", None)  # tokenizer.json has the same
        write_json(content, path)
        write_json(settings, config)
        return load_tokenizer(folder)


def compare(before: Any, after: Any, lines: Sequence[Sequence[str]]) -> str:
    """Return how another tokenizer changes the pieces of lines, which are lists of their parts."""
    counts = Counter(chain.from_iterable(lines))
    words = sum(count * len(divide(before, part)) for part, count in counts.items())
    pieces, rates = [], []
    for tokenizer in (before, after):
        found = get_cached_tokenizer(tokenizer).tokenize(list(counts))
        pieces.append({part: tokenizer.convert_ids_to_tokens(ids) for part, ids in zip(counts, found, strict=True)})
        rates.append(sum(count * len(pieces[-1][part]) for part, count in counts.items()) / max(words, 1))
    kept = sum(all(pieces[0][part] == pieces[1][part] for part in line) for line in lines)
    return (
        f"{pluralize(len(lines), 'held-out line')}: {kept / len(lines):.1%} keep all pieces; "
        f"pieces per word: {rates[0]:.3f} before, {rates[1]:.3f} after"
    )


def write_changed(checkpoint: str, tokenizer: Any, origins: Origins, output: Path) -> str:
    """Write a checkpoint with another vocabulary, and return its sizes before and after in a sentence."""
    changed = renumber(tokenizer, origins)
    ids = changed.get_vocab()
    rows = [origins[token] for token in sorted(ids, key=ids.__getitem__)]
    if (path := find_file(checkpoint, WEIGHTS_FILE)) is None:
        raise UsageError(f"{checkpoint} has no {WEIGHTS_FILE}; save it again in one file with save_pretrained")
    with as_usage_error(f"the weights of {checkpoint}"):
        weights = load_file(path)
    tables = [name for name in weights if name.endswith(TOKEN_TABLES)]
    known = min((len(weights[name]) for name in tables), default=0)
    if len(tokenizer) > known:
        raise UsageError(
            f"the tokenizer of {checkpoint} has {len(tokenizer):,} tokens, but its weights have rows for {known:,}; "
            "restore the files that belong together"
        )
    before = sum(tensor.nbytes for tensor in weights.values())
    for name in tables:
        means = [weights[name][row].float().mean(0) for row in rows]
        weights[name] = torch.stack(means).to(weights[name].dtype)
    after = sum(tensor.nbytes for tensor in weights.values())
    output.mkdir(parents=True, exist_ok=True)
    with atomic_open(output / WEIGHTS_FILE, "wb") as file:
        file.write(save(weights, metadata={"format": "pt"}))
    numbers = {row[0]: number for number, row in enumerate(rows) if len(row) == 1}
    config = load_config(checkpoint)
    for name, value in translate_ids(config.to_dict(), numbers).items():
        setattr(config, name, value)
    config.vocab_size = len(rows)
    config.save_pretrained(output)
    if found := find_file(checkpoint, RECIPE_FILE):
        shutil.copyfile(found, output / RECIPE_FILE)  # predictions need the lengths
    save_tokenizer(changed, output)
    return (
        f"{len(tokenizer):,} tokens before, {len(rows):,} after; "
        f"{before / 1e6:,.1f} MB of weights before, {after / 1e6:,.1f} MB after"
    )


def translate_ids(settings: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, int | None]:
    """Return the settings that are ids of tokens, with their new numbers."""
    return {name: numbers.get(index) for name, index in settings.items() if name.endswith("token_id")}
