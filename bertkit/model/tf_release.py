"""Import a checkpoint in BERT's original TensorFlow format (github.com/google-research/bert).

The release is a folder with `bert_config.json`, `vocab.txt` and TensorFlow's `bert_model.ckpt.index` and `.data-…`.
TensorFlow itself is not needed: the index is a LevelDB table, made of blocks of sorted keys with a checksum each, that
maps variable names to the location of their bytes. Every byte that is used is verified against its checksum.

Left out, because the release has none of it: compressed tables, sliced variables, TensorFlow 2's object-based
checkpoints. The optimizer's state is not imported.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import google_crc32c
import numpy as np
import torch
from transformers import BertTokenizerFast, PreTrainedModel

import bertkit
from bertkit.data.formats.line import read_json
from bertkit.data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer
from bertkit.errors import UsageError, explain_disk_error, explain_refusal
from bertkit.model.config import BertConfig
from bertkit.system.progress import ignore

RELEASED_CONFIG = "bert_config.json"
RELEASED_VOCABULARY = "vocab.txt"


def mask_checksum(checksum: int) -> int:
    """Return a CRC-32C in its stored, masked form, so that data that contains checksums is checked reliably."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- The table: sorted names in blocks (LevelDB's format, without compression) ----------------------------------------

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48  # bytes: two block handles, zeros, MAGIC
LARGEST_INDEX = 16 << 20  # bytes; the index of BERT-large with its optimizer has 0.1 MB
LONGEST_VARIABLE = 1000  # bytes


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Read the values of a table by key.

    Raises:
        ValueError: The table is damaged.
        IndexError: The table is damaged.
        UsageError: The table is compressed.
    """
    footer = data[-FOOTER:]
    if len(footer) < FOOTER or not footer.endswith(MAGIC):
        raise ValueError("its footer is not that of a table")
    _, at = _read_place(footer, 0)  # of an empty block
    index, _ = _read_place(footer, at)
    records: dict[bytes, bytes] = {}
    for _, place in _list_records(_read_block(data, *index)):
        records.update(_list_records(_read_block(data, *_read_place(place, 0)[0])))
    return records


def _read_place(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Read a block handle (offset and size), and return it with the position after it."""
    offset, at = _read_number(data, at)
    size, at = _read_number(data, at)
    return (offset, size), at


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint (seven bits per byte, lowest first), and return it with the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a varint does not end")


def _read_block(data: bytes, offset: int, size: int) -> bytes:
    """Return the content of a block, which is followed by a compression byte and the checksum of both."""
    end = offset + size
    if end + 5 > len(data):
        raise ValueError("a block lies outside the file")
    if mask_checksum(google_crc32c.value(data[offset : end + 1])) != int.from_bytes(data[end + 1 : end + 5], "little"):
        raise ValueError("a block has a wrong checksum")
    if data[end]:
        raise UsageError("its index is compressed, unlike those of the release; save it again with TensorFlow")
    return data[offset:end]


def _list_records(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block; a key is stored without the prefix it shares with its predecessor.

    A block ends with the positions of the keys stored in full, for binary search, and their number.
    """
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if len(block) < 4 or end < 0:
        raise ValueError("a block is shorter than its length field")
    key, at = b"", 0
    while at < end:
        shared, at = _read_number(block, at)
        added, at = _read_number(block, at)
        length, at = _read_number(block, at)
        value = at + added
        if shared > len(key) or value + length > end or shared + added > LONGEST_VARIABLE:
            raise ValueError("a name or its value lies outside its block")
        key = key[:shared] + block[at:value]
        at = value + length
        yield key, block[value:at]


# --- The bundle: the meaning of the values (TensorFlow's tensor_bundle.proto) ----------------------------------------

# The fields of a message by tag, 8 * number + wire type; the wire types are 0 varint, 2 bytes, 5 four bytes.
HEADER = {0x08: "parts", 0x10: "endianness", 0x1A: "version"}
TF_ENTRY = {0x08: "dtype", 0x12: "shape", 0x18: "part", 0x20: "offset", 0x28: "size", 0x35: "checksum", 0x3A: "slices"}
SHAPE = {0x12: "sizes"}
DIMENSION = {0x08: "size", 0x12: "name"}
BFLOAT16 = "<u2"  # the upper half of a float32; numpy has no dtype for it
TF_DTYPES = {1: "<f4", 9: "<i8", 14: BFLOAT16, 19: "<f2"}
OBJECTS = b"_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True)
class Variable:
    """The shape of a variable and the location of its bytes.

    Attributes:
        dtype: One of the values of `TF_DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    size: int
    checksum: int


def read_bundle(prefix: Path) -> dict[str, Variable]:
    """Return the variables of the checkpoint `prefix`.index by name, without reading their values.

    All of them lie within their files.

    Raises:
        UsageError: A file is missing, damaged or truncated, or differs from the release's format.
    """
    index = prefix.with_name(f"{prefix.name}.index")
    with explain_refusal(str(index)):
        if index.stat().st_size > LARGEST_INDEX:
            raise UsageError(f"{index} is too large for the index of a BERT; name another checkpoint")
        data = index.read_bytes()
    try:
        records = read_table(data)
        header = _read_message(records.pop(b"", b""), HEADER)
        if OBJECTS in records:
            raise UsageError("it holds TensorFlow 2 objects; expected TensorFlow 1 variables")
        if _pick(header, "endianness"):
            raise UsageError("its numbers are big-endian; save it again on a little-endian machine")
        found = {key: _read_entry(value, prefix, _pick(header, "parts")) for key, value in records.items()}
        variables = {key.decode(): variable for key, variable in found.items()}  # the names of slices are not text
        if not all(name.isprintable() for name in variables):
            raise ValueError("a name is not text")
    except UsageError as error:
        raise UsageError(f"{index} cannot be imported: {error}") from None
    except (ValueError, IndexError) as error:
        raise UsageError(f"{index} is damaged ({error}); download it again") from None
    _check_files(variables.values())
    return variables


def read_variable(name: str, variable: Variable) -> np.ndarray:
    """Read the values of a variable, with 16-bit values as float32.

    Raises:
        UsageError: The checksum is wrong.
    """
    with explain_refusal(str(variable.path)):
        data = np.fromfile(variable.path, np.uint8, variable.size, offset=variable.offset)
    if mask_checksum(google_crc32c.value(data)) != variable.checksum:
        raise UsageError(f"{variable.path} is damaged: {name} has a wrong checksum; download it again")
    values = data.view(variable.dtype).reshape(variable.shape)
    if variable.dtype == BFLOAT16:
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4") if variable.dtype == "<f2" else values


def _read_message(data: bytes, fields: Mapping[int, str]) -> dict[str, list[Any]]:
    """Return the values of a protobuf message by field name; a field may be repeated."""
    found: dict[str, list[Any]] = {}
    at = 0
    while at < len(data):
        tag, at = _read_number(data, at)
        if tag not in fields:
            raise ValueError(f"it has an unknown field {tag}")
        value: int | bytes
        if tag & 7 == 0:
            value, at = _read_number(data, at)
        else:
            length, at = (4, at) if tag & 7 == 5 else _read_number(data, at)
            value, at = data[at : at + length], at + length
        if at > len(data):
            raise ValueError("a value is truncated")
        found.setdefault(fields[tag], []).append(value)
    return found


def _pick(message: Mapping[str, list[Any]], field: str) -> int:
    """Return the number in a field, 0 if it is missing."""
    return message.get(field, [0])[-1]


def _read_entry(value: bytes, prefix: Path, parts: int) -> Variable:
    entry = _read_message(value, TF_ENTRY)
    if "slices" in entry:
        raise UsageError("it has a sliced variable, unlike those of the release; save it again unsliced")
    dtype = _pick(entry, "dtype")
    if dtype not in TF_DTYPES:
        raise UsageError(f"it has a variable of type {dtype}; expected float32, float16, bfloat16 or int64")
    shape = _read_message(entry.get("shape", [b""])[-1], SHAPE)
    sizes = tuple(_pick(_read_message(size, DIMENSION), "size") for size in shape.get("sizes", []))
    size, part = _pick(entry, "size"), _pick(entry, "part")
    if size != math.prod(sizes) * np.dtype(TF_DTYPES[dtype]).itemsize:
        raise ValueError(f"a variable of {size:,} bytes has the shape {sizes}")
    if part >= parts:
        raise ValueError(f"a variable refers to part {part}, but there are {parts}")
    path = prefix.with_name(f"{prefix.name}.data-{part:05}-of-{parts:05}")
    checksum = int.from_bytes(entry.get("checksum", [b""])[-1], "little")
    return Variable(sizes, TF_DTYPES[dtype], path, _pick(entry, "offset"), size, checksum)


def _check_files(variables: Collection[Variable]) -> None:
    """Check that every file exists and is large enough for its variables.

    Raises:
        UsageError: A file is missing or too small.
    """
    for path in sorted({variable.path for variable in variables}):
        if not path.is_file():
            raise UsageError(f"there is no {path}; copy all files of the checkpoint into one folder")
        end = max(variable.offset + variable.size for variable in variables if variable.path == path)
        if (size := path.stat().st_size) < end:
            raise UsageError(f"{path} is truncated: it has {size:,} of {end:,} bytes; download it again")


# --- From the release to ours -----------------------------------------------------------------------------------------

# Parts of parameter names, ours and the release's, replaced in this order; a matrix named kernel is transposed there.
VARIABLE_NAMES = (
    ("encoder.layer.", "encoder.layer_"),
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("_embeddings.weight", "_embeddings"),
    ("cls.predictions.bias", "cls.predictions.output_bias"),
    ("cls.seq_relationship.", "cls.seq_relationship.output_"),
    ("classifier.", "output_"),
    ("qa_outputs.", "cls.squad.output_"),
    ("output_weight", "output_weights"),
    (".weight", ".kernel"),
    (".", "/"),
)
POOLER = ("bert/pooler/dense/kernel", "bert/pooler/dense/bias")
# Variables of an optimizer: the reference code's, and TensorFlow's own Adam.
OPTIMIZER = re.compile(r"global_step|beta[12]_power|(.+)/(?:adam_[mv]|(?:Adam|AdamWeightDecayOptimizer)(?:_1)?)")
RELEASED_VALUES = (  # all that the reference code reads from bert_config.json
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
)


def import_checkpoint(
    source: Path, output: Path, *, cased: bool | None = None, report: Callable[[str], None] = ignore
) -> None:
    """Convert a TensorFlow checkpoint and its tokenizer to the form that transformers and this package load.

    A pre-trained model becomes `BertForPreTraining`, or `BertModel` if it has no head. A fine-tuned one becomes the
    class of the head that run_classifier.py or run_squad.py trained. All variables are used except those of the
    optimizer and of a pooler that the head does not read; every parameter is filled.

    Differs from the reference code: its GELU is the tanh approximation (transformers' `gelu_new`). The `gelu` of
    bert_config.json stays `gelu`, the exact one, as in every copy of these models on the Hub.

    Args:
        source: The folder, or one of its checkpoints, such as `folder/model.ckpt-1000`.
        output: A new or empty directory, written atomically.
        cased: Whether upper case is kept; None: inferred from the vocabulary, which the folder's name may contradict.

    Raises:
        UsageError: Something is missing, damaged, left over, or inconsistent.
    """
    prefix = find_prefix(source)
    config_file, vocabulary = (prefix.with_name(name) for name in (RELEASED_CONFIG, RELEASED_VOCABULARY))
    for path in (config_file, vocabulary):
        if not path.is_file():
            raise UsageError(f"there is no {path}; copy it from the model that this one was trained from")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty directory; name another one")
    if output.resolve() == Path.cwd():
        raise UsageError(f"{output} is the current directory and would be replaced; name another one")
    variables = read_bundle(prefix)
    config = read_config(config_file, variables)
    tokenizer = read_tokenizer(vocabulary, config, cased, report)
    model = make_model(choose_head(variables), config, variables, prefix)
    wanted = match_variables(model, variables, prefix)
    fill(model, wanted, variables)
    report(f"{type(model).__name__} with {model.num_parameters():,} parameters, from {prefix.name}")
    left_out = variables.keys() - wanted.values()
    if state := left_out.difference(POOLER):
        report(f"skipping {len(state):,} variables of the optimizer")
    if POOLER[0] in left_out:
        report("skipping the pooler: this head does not read it")
    if hasattr(model, "classifier"):
        report(f"its {model.config.num_labels} labels have no names; write them into id2label in config.json")
    save(model, tokenizer, output)
    report(f"In {output}: config.json, model.safetensors, {RELEASED_VOCABULARY} and the tokenizer")


def find_prefix(source: Path) -> Path:
    """Return the prefix of the only checkpoint in a folder, or of the named one, without `.index`.

    Raises:
        UsageError: There is no checkpoint, or several.
    """
    if source.is_dir():
        found = sorted(path.with_suffix("") for path in source.glob("*.index"))
    else:
        prefix = source.with_name(source.name.removesuffix(".index"))
        found = [prefix] if prefix.with_name(f"{prefix.name}.index").is_file() else []
    if not found:
        raise UsageError(
            f"{source} is not a TensorFlow checkpoint; name a folder with {RELEASED_CONFIG}, {RELEASED_VOCABULARY} and "
            "bert_model.ckpt.*"
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"{source} has {len(found)} checkpoints ({names}); name one of them: {found[-1]}")
    return found[0]


def read_config(path: Path, names: Collection[str]) -> BertConfig:
    """Read the configuration in bert_config.json.

    Args:
        names: The names of the variables. The layers must agree, so that no model of absurd size is built.

    Raises:
        UsageError: The file is damaged, or does not fit the variables.
    """
    values = read_json(path, dict[str, Any])
    with explain_refusal(str(path)):
        config = BertConfig(**{"type_vocab_size": 16} | {key: values[key] for key in RELEASED_VALUES if key in values})
    layers = {found[1] for name in names if (found := re.match(r"bert/encoder/layer_(\d+)/", name))}
    if len(layers) != config.num_hidden_layers:
        raise UsageError(
            f"{path} asks for {config.num_hidden_layers} layers, but the checkpoint has {len(layers)}; "
            f"use the {RELEASED_CONFIG} that belongs to it"
        )
    return config


def read_tokenizer(
    path: Path, config: BertConfig, cased: bool | None, report: Callable[[str], None]
) -> BertTokenizerFast:
    """Return the tokenizer of a vocabulary, inferring its case, which no file of the release states.

    Raises:
        UsageError: The vocabulary is damaged, larger than the model's, or contradicts the name of its folder.
    """
    tokenizer = load_tokenizer(path, cased=cased)
    ids = tokenizer.get_vocab()
    if len(ids) > config.vocab_size:
        raise UsageError(
            f"{path} has {len(ids):,} tokens, but the model only {config.vocab_size:,}; use the vocabulary of the model"
        )
    if len(ids) < config.vocab_size:
        report(
            f"{path.name} has {len(ids):,} tokens, but the model {config.vocab_size:,}; ids without "
            "a token cannot be decoded"
        )
    if cased is None:
        cased = not tokenizer.backend_tokenizer.normalizer.lowercase  # inferred from the vocabulary
        letters = f"{path.name} has {'' if cased else 'no '}capital letters"
        folder = path.absolute().parent.name
        if "cased" in folder.lower() and cased is ("uncased" in folder.lower()):
            raise UsageError(f"{letters}, but the folder is called {folder}; choose --cased or --uncased")
        report(f"loaded as {'cased' if cased else 'uncased'}: {letters}, and the folder is called {folder}")
    return make_tokenizer(sorted(ids, key=ids.__getitem__), cased=cased, max_length=config.max_position_embeddings)


def choose_head(names: Collection[str]) -> str:
    """Return the name of our class for the head that the variables belong to."""
    if "cls/squad/output_weights" in names:
        return "BertForQuestionAnswering"
    if "output_weights" in names:
        # run_classifier.py reads C; other programs use the same names for a token classifier. An unused pooler gets no
        # gradient, so the optimizer has no state for it.
        learned = {found[1] for name in names if (found := OPTIMIZER.fullmatch(name))}
        reads_tokens = "output_weights" in learned and POOLER[0] not in learned
        return "BertForTokenClassification" if reads_tokens else "BertForSequenceClassification"
    return "BertForPreTraining" if any(name.startswith("cls/") for name in names) else "BertModel"


def make_model(head: str, config: BertConfig, variables: Mapping[str, Variable], prefix: Path) -> PreTrainedModel:
    """Return a model on the meta device (no memory for weights), with the checkpoint's number of labels."""
    if "output_weights" in variables and (shape := variables["output_weights"].shape):
        config.num_labels = shape[0]
    with explain_refusal(str(prefix.with_name(RELEASED_CONFIG))), torch.device("meta"):
        return getattr(bertkit, head)(config)


def match_variables(model: PreTrainedModel, variables: Mapping[str, Variable], prefix: Path) -> dict[str, str]:
    """Map each parameter name to the name of its variable.

    Raises:
        UsageError: A variable is missing, left over, or of another shape or type.
    """
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wanted = {name: name_variable(name if hasattr(model, "bert") else f"bert.{name}") for name in parameters}
    known = {*wanted.values(), *POOLER}
    missing = [name for name in wanted.values() if name not in variables]
    unknown = [name for name in variables if name not in known and not _is_state(name, known)]
    for names, what in ((missing, "lacks"), (unknown, "has")):
        if names:
            raise UsageError(
                f"{prefix} is not a {type(model).__name__} of the release: it {what} {', '.join(names[:3])}"
                f"{f' and {len(names) - 3:,} more' * (len(names) > 3)}; name another checkpoint"
            )
    for parameter, name in wanted.items():
        expected = parameters[parameter][:: -1 if name.endswith("/kernel") else 1]
        if variables[name].shape != expected:
            raise UsageError(
                f"{name} has the shape {variables[name].shape} but {prefix.with_name(RELEASED_CONFIG)} asks for "
                f"{expected}; use the one that belongs to it"
            )
        if variables[name].dtype == "<i8":
            raise UsageError(f"{name} in {prefix} has integers, expected weights; name another checkpoint")
    return wanted


def name_variable(parameter: str) -> str:
    """Return the release's name of one of our parameters."""
    for ours, theirs in VARIABLE_NAMES:
        parameter = parameter.replace(ours, theirs)
    return parameter


def _is_state(name: str, known: Collection[str]) -> bool:
    """Return whether a variable is optimizer state, global or belonging to one of the `known` variables."""
    found = OPTIMIZER.fullmatch(name)
    return bool(found) and (found[1] is None or found[1] in known)


def fill(model: PreTrainedModel, wanted: Mapping[str, str], variables: Mapping[str, Variable]) -> None:
    """Fill each parameter with the values of its variable."""
    weights = {}
    for parameter, name in wanted.items():
        values = read_variable(name, variables[name])
        weights[parameter] = torch.from_numpy(np.ascontiguousarray(values.T) if name.endswith("/kernel") else values)
    model.load_state_dict(weights, strict=False, assign=True)  # not strict: tied weights have two names
    model.tie_weights()


def save(model: PreTrainedModel, tokenizer: BertTokenizerFast, output: Path) -> None:
    """Write a checkpoint atomically."""
    with explain_refusal(f"the directory {output}"), explain_disk_error(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
            whole = Path(folder) / output.name
            model.save_pretrained(whole)
            save_tokenizer(tokenizer, whole)
            whole.rename(output)
