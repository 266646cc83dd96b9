"""Readers of user files, on thousands of spoiled files: a value or a one-line error, never a hang or a crash.

Each reader starts from small valid files. One of them is spoiled in one to three places - a byte, a line, a cell, a
value of JSON or TOML - or replaced completely, and then processed as far as in a run: a task's examples are encoded,
a study is planned, a model predicts. The fast suite tries a few inputs, so that the functions stay in use; the slow
one tries 10,000 for each reader:

    pytest tests/test_fuzz.py -m slow -rP     # -rP shows the number of inputs and the accepted share

Memory is bounded while a test runs: an allocation beyond the bound fails instead of exhausting the machine.
"""

import copy
import csv
import gzip
import hashlib
import json
import resource
import shutil
import signal
import socket
import struct
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bertkit.analysis.cleaning import USUAL_DROPS, write_clean
from bertkit.analysis.compare import comment, compare, list_values, tabulate
from bertkit.analysis.doctor import examine, list_tables
from bertkit.data.formats import triviaqa
from bertkit.data.formats.glue import read_split
from bertkit.data.formats.rows import read_columns, read_inputs
from bertkit.data.formats.squad import Candidate, read_predictions
from bertkit.data.pretraining import store
from bertkit.data.pretraining.sources import read_documents
from bertkit.data.pretraining.statistics import list_rows
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.sequences import encode_texts
from bertkit.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.export_record import EXPORT_FILE
from bertkit.inference.features import describe_texts, read_texts
from bertkit.inference.forms import list_columns
from bertkit.inference.predictor import Predictor
from bertkit.inference.tables import WRITERS
from bertkit.studies.cells import describe_plan
from bertkit.studies.spec import define, make_study
from bertkit.system.files import find_checksum, write_json
from bertkit.tasks import TASKS, glue, squad
from bertkit.tasks.frozen import load_encoder
from bertkit.training.recipe import Recipe, check, parse_setting, read_recipe
from bertkit.training.run import dry_run
from bertkit.training.run_dir import CALIBRATION_FILE
from tests import official
from tests.analysis.test_compare import draw as draw_right
from tests.analysis.test_compare import write_run
from tests.conftest import draft
from tests.conftest import make_model as make_head

FEW, MANY = 40, 10_000  # inputs of a reader in the fast suite, and at least in the slow one
REPEATED = 2  # most inputs made for each one needed: a small file is sometimes spoiled in the same way
ACCEPTED = 0.05  # minimum share of inputs that are read without an error
SECONDS = 5  # processor time for one input
WAITING = timedelta(seconds=60)  # wall-clock limit, for code that waits: this machine may be busy
MEMORY = 400 << 20  # bytes by which a test may grow the process; the five served models need the most
ADDRESSES = 4 << 30  # bytes by which its address space may grow

# --- Mutations --------------------------------------------------------------------------------------------------------

DEEP = 10_000  # lists in lists
WORDS = (  # some have a meaning for a reader
    *("", " ", "\0", "\ufeff", "\u2028", "\x85", "\x0b", "\x1c", "\r", "\n", "\t", "\r\n\r\n", '"', '""', "'", "\\"),
    *("\x1b[31m", "\x7f", "\u200b", "\u202e", "\xa0", "\ufffd", "é", "e\u0301", "İ", "ß", "日本語", "😀", "𝔄" * 9),
    *("[MASK]", "[CLS]", "[UNK]", "-DOCSTART-", "O", "I-", "B-\x07", "B-LOC", "U-PER", "index", "label", "prediction"),
    *("-1", "0", "3", "4", "5.001", "1e999", "nan", "inf", "-0", "1_0", "٣", "²", "0x10", "9" * 400, "1" * 5000),
    *("entailment", "Entailment", "null", "{}", "[]", '{"text": 1}', '"', "# ", "..", "/", "../x", "~", "a" * 9999),
    *("word " * 700, "日" * 3000, "." * 3000, "a\u0301" * 500, "\u0301" * 300, "\n" * 50, "\t" * 50, "x, y" * 40),
)
ODD_BYTES = (*(word.encode() for word in WORDS), b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xfe\xff", b"\x1f\x8b", bytes(64))
ANYTHING = st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode())
NESTED, NESTED_LESS, NESTED_LEAST = ("[" * depth + "]" * depth for depth in (DEEP, 900, 300))
PLAIN = ("0", "-1", "1", "2", "0.5", "-1.5", "1e999", "-1e400", "9" * 400, "1" * 5000, str(2**31), str(2**63), "true")
JSON_VALUES = (
    *PLAIN,
    *("null", "false", "NaN", "Infinity", "-Infinity", "[]", "{}", "[[]]", "[null]", '{"": null}', "[1, 2]", '["a"]'),
    *(json.dumps(word) for word in WORDS),
    *('"\\ud800"', '"a\\udc80b"', '{"\\ud800": 1}', '{"a\\nb": 1}', '{"a": ' * DEEP + "1" + "}" * DEEP),
    *('{"type": "BPE"}', '{"0": "yes", "1": "no"}', '{"text": "a", "answer_start": 2}', f"[{'[],' * 999}0]"),
    *(NESTED, NESTED_LESS, NESTED_LEAST),
)
TOML_VALUES = (
    *PLAIN,
    *("false", "nan", "inf", "-inf", "[]", "{}", "[[]]", "[1, 2]", '["a"]', '["a", 1]', "[0.1]", "{ a = 1 }", "1e-5"),
    *("2020-01-01", "2020-01-01T00:00:00Z", "07:32:00", "0x10", "1_000", '"""a\nb"""', "'c:\\d'", '"\\n"', '"\\u001b"'),
    *('"\\u0000"', '"\\u2028"', '"rte"', '["rte", "mrpc"]', '"pretrain"', '"best"', '"auto"', '"paper"', '"bf16"'),
    *('"stable"', '"mlm"', '"clm"', '"encoder"', '"packed"', '"steps"', '"no"', '"x"', '"a"*9', f'"{"a" * 9999}"'),
    *(
        NESTED,
        NESTED_LESS,
        NESTED_LEAST,
        '"' + "日" * 300 + '"',
        "{ MNLI = 1 }",
        '[{ name = "x" }]',
        "[[1, 2], [3]]",
        "[1e-5, 2e-5]",
        "[16, 32]",
    ),
)


def pick_word(chance: Random) -> str:
    """Return one of `WORDS`, some of them joined, or a few arbitrary characters."""
    how = chance.randrange(4)
    if how == 0:
        return "".join(chr(chance.choice((chance.randrange(128), chance.randrange(0xD800)))) for _ in range(6))
    return "".join(chance.choices(WORDS, k=chance.choice((1, 1, 1, 2, 3))))


def pick_value(chance: Random) -> str:
    """Return a value as JSON text."""
    return chance.choice(JSON_VALUES) if chance.random() < 0.7 else json.dumps(pick_word(chance))


def cut(chance: Random, length: int, longest: int = 40) -> slice:
    """Return an arbitrary slice of `length` items."""
    start = chance.randrange(max(length, 1))
    return slice(start, min(start + chance.randint(1, longest), length))


def spoil_bytes(chance: Random, content: bytes) -> bytes:
    """Return the content with bytes deleted, doubled, moved, flipped or inserted, or another encoding or line end."""
    place = cut(chance, len(content))
    before, middle, after = content[: place.start], content[place], content[place.stop :]
    how = chance.randint(0, 12)
    if how <= 1:
        return before + after
    if how == 2:
        return before + middle * 2 + after
    if how == 3:
        other = cut(chance, len(after))
        return before + after[other] + after[: other.start] + middle + after[other.stop :]
    if how <= 5:
        return before + bytes(byte ^ chance.randint(1, 255) for byte in middle[:2]) + middle[2:] + after
    if how <= 8:
        return before + chance.choice(ODD_BYTES) + after
    if how == 9:
        return before
    if how == 10:
        return content.replace(b"\n", chance.choice((b"\r\n", b"\r", b"\n\n", b"")))
    if how == 11:
        return b"\xef\xbb\xbf" + content
    return content.decode("utf-8", "replace").encode(chance.choice(("utf-16", "utf-32-le", "utf-8-sig")))


def spoil_items(chance: Random, items: list[Any], put: Callable[[Any], Any]) -> list[Any]:
    """Return the items with one deleted, doubled, moved or changed by `put`, which also makes one from nothing."""
    items = list(items)
    place = chance.randint(0, max(len(items) - 1, 0))
    how = chance.randint(0, 7)
    if not items or how == 0:
        items.insert(place, put(None))
    elif how == 1:
        del items[place]
    elif how == 2:
        items.insert(place, items[place])
    elif how == 3:
        items.append(items.pop(place))
    else:
        items[place] = put(items[place])
    return items


def spoil_table(chance: Random, content: bytes, separator: str) -> bytes:
    """Return the content with a line or a cell changed."""

    def change(line: str | None) -> str:
        if line is None or chance.randint(0, 5) == 0:
            return pick_word(chance)
        return separator.join(spoil_items(chance, line.split(separator), lambda _: pick_word(chance)))

    return "\n".join(spoil_items(chance, content.decode("utf-8", "replace").split("\n"), change)).encode()


def spoil_json(chance: Random, content: bytes) -> bytes:
    """Return content with a value replaced, a key removed, renamed or doubled, an item doubled or values swapped."""
    try:
        value = json.loads(content)
        places = list(list_places(value))
    except (ValueError, RecursionError):
        return spoil_bytes(chance, content)
    raw = pick_value(chance)
    if not places:
        return raw.encode()
    holder, key = chance.choice(places)
    how = chance.randint(0, 11)
    mark = "\ue000"  # stands for text that `json` would not write
    if how <= 5:
        holder[key] = mark
    elif how == 6:
        del holder[key]
    elif how == 7 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == 8 and isinstance(holder, list):
        holder.insert(key, mark)
    elif how == 8:
        holder[mark] = holder.pop(key)  # usually a key that is not a string
    elif how == 9:
        other, name = chance.choice(places)
        holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
    elif how == 10:
        holder[key] = [holder[key]]
    elif isinstance(holder, dict):
        holder[pick_word(chance)] = holder.pop(key)
    return json.dumps(value, ensure_ascii=False).replace(f'"{mark}"', raw).encode("utf-8", "surrogatepass")


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield holder and key of every value inside a JSON value."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from list_places(item)


def spoil_jsonl(chance: Random, content: bytes) -> bytes:
    """Return the content with a line or a value in it changed."""
    return b"\n".join(
        spoil_items(
            chance,
            content.split(b"\n"),
            lambda line: pick_value(chance).encode() if line is None else spoil_json(chance, line),
        )
    )


def spoil_toml(chance: Random, content: bytes) -> bytes:
    """Return the content with a line, a key or a value changed."""
    lines = content.decode("utf-8", "replace").split("\n")
    keys = [line.partition("=")[0] for line in lines if "=" in line] or ["x"]

    def change(line: str | None) -> str:
        key, equals, value = (line or "").partition("=")
        how = chance.randint(0, 5)
        if key.startswith("#"):
            return f"# {pick_word(chance)}"
        if not equals or how == 0:
            return chance.choice((*WORDS, "[train]", "[x]", "[[row]]", "[[phase]]", "[row.pretrain]", "x = 1", "= 1"))
        if how == 1:
            return f"{chance.choice(keys)}= {value}"
        if how == 2:
            return f'"{pick_word(chance)}" = {value}'
        return f"{key}= {chance.choice(TOML_VALUES)}"

    return "\n".join(spoil_items(chance, lines, change)).encode()


def spoil_gzip(chance: Random, content: bytes) -> bytes:
    """Return compressed spoiled text, or a spoiled archive."""
    if chance.random() < 0.5:
        return spoil_bytes(chance, content)
    try:
        return gzip.compress(spoil_bytes(chance, gzip.decompress(content)), 1, mtime=0)
    except (OSError, EOFError, zlib.error):
        return spoil_bytes(chance, content)


def spoil_weights(chance: Random, content: bytes) -> bytes:
    """Return the content with a value of the header changed and its length updated, or any bytes changed."""
    if chance.randint(0, 2) == 0 or len(content) < 8:
        return spoil_bytes(chance, content)
    size = struct.unpack("<Q", content[:8])[0]
    head = spoil_json(chance, content[8 : 8 + size])
    return struct.pack("<Q", len(head)) + head + content[8 + size :]


KINDS = {  # suffix of a file -> how it is spoiled; all files are also spoiled as bytes
    ".json": spoil_json,
    ".jsonl": spoil_jsonl,
    ".toml": spoil_toml,
    ".tsv": partial(spoil_table, separator="\t"),
    ".csv": partial(spoil_table, separator=","),
    ".train": partial(spoil_table, separator=" "),
    ".testa": partial(spoil_table, separator=" "),
    ".testb": partial(spoil_table, separator=" "),
    ".txt": partial(spoil_table, separator=" "),
    ".conll": partial(spoil_table, separator=" "),
    ".set": partial(spoil_table, separator="="),
    ".gz": spoil_gzip,
    ".safetensors": spoil_weights,
}


@st.composite
def spoil(draw: Callable, files: Sequence[tuple[Path, bytes]]) -> tuple[Path, bytes]:
    """Return one of the files and its spoiled content."""
    chance = draw(st.randoms(use_true_random=True))  # one draw, which is fast; otherwise a failure would be shrunk
    path, content = chance.choice(files)
    if chance.random() < 0.05:
        return path, draw(ANYTHING)
    spoil_kind = KINDS.get(path.suffix, spoil_bytes)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = (spoil_bytes if chance.random() < 0.25 else spoil_kind)(chance, content)
    return path, content


# --- The readers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A reader of some files.

    Attributes:
        files: The files to spoil, one at a time.
        read: Reads the spoiled file; it may raise a UsageError.
    """

    files: Sequence[Path]
    read: Callable[[Path], Any]


def shorten(files: Sequence[Path], lines: int) -> None:
    """Keep only the first lines of each file."""
    for file in files:
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:lines]))


def encode_all(name: str, folder: Path, tokenizer: Any, **options: Any) -> None:
    """Read and encode a task's files as a run does, up to the first sequence of each split."""
    task = TASKS[name]
    recipe = draft(task, {"data": {"dir": str(folder), **options}})
    examples = task.load(recipe.data, str)
    for split, found in examples.items():
        data = task.encode(found, tokenizer, recipe, split)
        assert task.collate(data.__getitems__([0])) is not None
    task.configure(recipe, tokenizer, examples)


def prepare_glue(folder: Path) -> Reader:
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    official.write_glue(folder)
    names = {"CoLA": "cola", "MRPC": "mrpc", "STS-B": "stsb", "QQP": "qqp", "RTE": "rte"}
    files = [file for name in names for file in sorted((folder / name).iterdir())]
    shorten(files, 6)
    return Reader(files, lambda file: encode_all(names[file.parent.name], folder, tokenizer))


def prepare_squad(folder: Path) -> Reader:
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    for version in (1, 2):
        official.write_squad(folder / f"squad{version}", version)
    files = sorted(folder.glob("squad*/*.json"))
    for file in files:  # one paragraph of each article
        content = json.loads(file.read_text())
        for article in content["data"]:
            del article["paragraphs"][1:]
        file.write_text(json.dumps(content))
    lengths = {"max_length": 64, "max_query_length": 16, "doc_stride": 16}
    return Reader(files, lambda file: encode_all(file.parent.name, file.parent, tokenizer, **lengths))


def prepare_questions(suffix: str, folder: Path) -> Reader:
    """Read and encode a table of a person's own questions, with dev and test taken from it."""
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    rows = official.list_questions(official.write_squad(folder / "squad", 2) / "train-v2.0.json")[::2]
    file = official.write_questions(folder / f"questions{suffix}", rows)
    if suffix == ".parquet":  # with numbers that are not compressed, so that some spoiled files are read
        table = pyarrow.Table.from_pylist([row | {"vector": [0.5] * 50} for row in rows])
        parquet.write_table(table, file, compression="none", use_dictionary=False)
    lengths = {"max_length": 64, "max_query_length": 16, "doc_stride": 16}
    options = lengths | {"dev_share": 0.3, "test_share": 0.2, "group": "id"}
    return Reader([file], lambda file: encode_all("squad2", file, tokenizer, **options))


def prepare_entities(suffix: str, folder: Path) -> Reader:
    """Read and encode texts with spans, or words with tags, with dev and test taken from them."""
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    spans = [{"start": 0, "end": 4, "label": "PER"}, {"start": 8, "end": 9, "label": "LOC"}]
    texts = [{"text": f"good so a{n}", "spans": spans} for n in range(24)]
    words = [{"tokens": ["good", f"a{n}"], "ner_tags": ["S-PER", "O"]} for n in range(24)]
    files = [folder / f"a{suffix}", folder / f"b{suffix}"]
    for file, rows in zip(files, (texts, words), strict=True):
        official.write_table(file, rows)
        if suffix == ".parquet":  # with numbers that are not compressed, so that some spoiled files are read
            table = pyarrow.Table.from_pylist([row | {"vector": [0.5] * 50} for row in rows])
            parquet.write_table(table, file, compression="none", use_dictionary=False)
    return Reader(files, lambda file: encode_all("ner", file, tokenizer, max_length=8, dev_share=0.3, test_share=0.2))


def prepare_rows(name: str, write: Callable, pattern: str, most: int, folder: Path) -> Reader:
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    write(folder)
    files = sorted(folder.glob(pattern))
    shorten(files, most)
    return Reader(files, lambda file: encode_all(name, folder, tokenizer))


TEXT = "One word. Two words?\nA third sentence e.g. this one.\n\nMore of it: 3.5 words!\n 日本語。二。\n\n\nThe end.\n"


def read_text(file: Path, tokenizer: Any) -> None:
    """Read and tokenize a corpus of text as a pretraining does."""
    documents = list(read_documents([str(file)]))
    assert all(documents)
    corpus = tokenize_documents(documents, tokenizer)
    assert corpus.token_count == len(corpus.ids)


def prepare_text(folder: Path) -> Reader:
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    (folder / "corpus.txt").write_text(TEXT, encoding="utf-8")
    (folder / "corpus.gz").write_bytes(gzip.compress(TEXT.encode(), mtime=0))
    return Reader([folder / "corpus.txt", folder / "corpus.gz"], partial(read_text, tokenizer=tokenizer))


def prepare_jsonl(folder: Path) -> Reader:
    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert"))
    rows = [{"text": part, "id": number} for number, part in enumerate(TEXT.split("\n\n"))]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return Reader([folder / "corpus.jsonl"], partial(read_text, tokenizer=tokenizer))


# Head -> its inputs for `predict --input`; the columns of a table are the names of the first input.
INPUTS: dict[str, list[Any]] = {
    "BertForSequenceClassification": [{"text": "word1 good"}, "bad", {"sentence1": "a", "sentence2": "so", "id": 7}],
    "BertForQuestionAnswering": [
        {"question": "word1 ?", "context": "word2 so. " * 9},
        {"question": "", "context": "."},
    ],
    "BertForTokenClassification": [{"text": "word3 good so"}, {"words": ["word3", "so"]}, "good bad"],
    "BertForMultipleChoice": [
        {"sent1": "so", "sent2": "a", "ending0": "good", "ending1": "bad"},
        {"context": "so", "endings": ["good", "bad", "so"]},
    ],
    "BertForPreTraining": [{"text": "word1 [MASK] so", "text_pair": "good"}, "so [MASK]."],
}


def prepare_predict(folder: Path) -> Reader:
    official.write_checkpoint(folder / "bert")
    tokens = len(load_tokenizer(folder / "bert"))
    predictors, files = {}, []
    for head, inputs in INPUTS.items():
        shutil.copytree(folder / "bert", folder / head)
        tags = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}} if head == "BertForTokenClassification" else {}
        make_head(head, vocab_size=tokens, num_hidden_layers=1, **tags).save_pretrained(folder / head)
        predictors[head] = Predictor(folder / head)
        rows = ["\t".join(inputs[0])] + 2 * ["\t".join(inputs[0].values())]
        cells = [",".join(f'"{cell}"' for cell in row.split("\t")) for row in rows]
        texts = [line for line in inputs if isinstance(line, str)]
        given = {".jsonl": list(map(json.dumps, inputs)), ".csv": cells, ".tsv": rows, ".txt": texts}
        for suffix, lines in given.items():
            if lines:
                files.append(folder / head / f"in{suffix}")
                files[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / head / "in.csv.gz").write_bytes(gzip.compress((folder / head / "in.csv").read_bytes(), mtime=0))
        table = pyarrow.Table.from_pylist(2 * [inputs[0]])
        parquet.write_table(table, folder / head / "in.parquet")
        files += [folder / head / "in.csv.gz", folder / head / "in.parquet"]

    def read(file: Path) -> None:
        predictor = predictors[file.parent.name]
        results = list(predictor.stream(read_inputs(str(file))))
        if list_columns(predictor.output_schema):
            for suffix in WRITERS:
                predictor.write(read_inputs(str(file)), folder / f"out{suffix}")
        for result in results:
            json.dumps(result, ensure_ascii=False).encode()
            if predictor.task.pipeline:
                json.dumps(predictor.format_for_pipeline(result), ensure_ascii=False).encode()
            if "error" in result:
                check_message(result["error"])
            assert len(predictor.describe(result).splitlines()) <= 1
        if all("error" in result for result in results):
            raise UsageError(f"{file} holds nothing for this model; see the lines above")

    return Reader(files, read)


def prepare_features(folder: Path) -> Reader:
    checkpoint = official.write_checkpoint(folder / "bert", num_hidden_layers=1)
    tokenizer, model = load_tokenizer(checkpoint), load_encoder(str(checkpoint), "last")
    file = folder / "texts.txt"
    file.write_text("word1 good.\nso, bad\n日本語 so\n", encoding="utf-8")

    def read(file: Path) -> None:
        found = describe_texts(model, tokenizer, read_texts(file), "last", "words", str(file))
        for text in found:
            assert all(text["text"][word["start"] : word["end"]] == word["word"] for word in text["words"])

    return Reader([file], read)


def prepare_triviaqa(folder: Path) -> Reader:
    (folder / "evidence").mkdir()
    entries = []
    for number, answer in enumerate(("Sinclair Lewis", "York")):
        page = {"Filename": f"{number}.txt", "Title": answer}
        (folder / "evidence" / f"{number}.txt").write_text(f"In 1930 {answer.lower()} was there.\nAnd more.\n")
        given = {"Value": answer, "Aliases": [answer, f"{answer}'s", "x"]}
        entries.append({"QuestionId": f"q{number}", "Question": "Who?", "Answer": given, "EntityPages": [page]})
    (folder / "qa.json").write_text(json.dumps({"Data": entries}))

    def read(file: Path) -> None:
        output = folder / "out.json"
        output.unlink(missing_ok=True)
        triviaqa.convert(folder / "qa.json", folder / "evidence", output)
        squad.read_squad(output, 1)

    return Reader([folder / "qa.json", *[folder / "qa.json"] * 3, *sorted(folder.glob("evidence/*"))], read)


TABLE = {"text": ["one, two", 'so "bad"\nor not', "日本語", ""], "label": [1, 2.5, True, None]}


def prepare_columns(suffix: str, folder: Path) -> Reader:
    """Read a table as its owner's own data."""
    file = folder / f"table{suffix}"
    rows = [dict(zip(TABLE, cells, strict=True)) for cells in zip(*TABLE.values(), strict=True)]
    if suffix == ".parquet":
        stars = datasets.ClassLabel(names=["bad", "good"])
        features = {"text": datasets.Value("string"), "stars": stars, "tags": datasets.List(stars)}
        found = {"text": TABLE["text"], "stars": [0, 1, -1, None], "tags": [[0, 1], [], None, [1]]}
        datasets.Dataset.from_dict(found, features=datasets.Features(features)).to_parquet(file)
    elif suffix in (".csv", ".tsv"):
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(TABLE), delimiter="," if suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        rows[1]["tags"] = ["x", 1, 2.5]
        text = json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
        file.write_text(text, encoding="utf-8")
    files = [file]
    if suffix != ".parquet":
        files.append(folder / f"table{suffix}.gz")
        files[-1].write_bytes(gzip.compress(file.read_bytes(), mtime=0))

    def read(file: Path) -> None:
        table = read_columns(file)
        for name in table.table.column_names:
            cells = table.find(name).to_pylist()
            assert len(cells) == len(table.lines) > 0
            "".join(cells).encode()
            assert all(isinstance(json.loads(cell), list) for cell in cells if cell and name in table.lists)
        assert table.locate(len(table) - 1).startswith(str(file))

    return Reader(files, read)


def prepare_score(folder: Path) -> Reader:
    """Write files of predictions beside the official ones."""
    official.write_glue(folder)
    names = {"RTE": "rte", "STS-B": "stsb", "CoLA": "cola"}
    files = []
    for name, task in names.items():
        files += [folder / name / "dev.tsv", folder / name / "answers.tsv", folder / name / "lines.txt"]
        shorten(files[-3:-2], 7)
        labels = read_split(glue.GLUE[task].row, "dev", files[-3]).find("label").to_pylist()
        files[-2].write_text(glue.write_predictions(labels))
        files[-1].write_text("\n".join(labels) + "\n")
    for version in (1, 2):
        (gold,) = official.write_squad(folder / f"squad{version}", version).glob("dev-*")
        questions = squad.read_squad(gold)
        (gold.parent / "predictions.json").write_text(json.dumps({one.id: one.context[:5] for one in questions}))
        (gold.parent / "odds.json").write_text(json.dumps({one.id: 0.5 for one in questions}))
        nbest = {one.id: [{"text": "so", "probability": 0.5}] for one in questions}
        (gold.parent / "nbest.json").write_text(json.dumps(nbest))
        files += [gold, gold.parent / "predictions.json"]
    files += [gold.parent / "odds.json", gold.parent / "nbest.json"]  # of 2.0

    def read(file: Path) -> None:
        home = file.parent
        if home.name in names:
            answers = home / ("lines.txt" if file.name == "lines.txt" else "answers.tsv")
            scores = glue.GLUE[names[home.name]].score_files(home / "dev.tsv", answers)
        elif file.name == "nbest.json":
            read_predictions(file, list[Candidate])
            return
        else:
            task = squad.SQUAD[home.name]
            odds = home / "odds.json" if task.version.unanswerable else None
            scores = task.score_files(next(home.glob("dev-*")), home / "predictions.json", odds)
        json.dumps(scores, allow_nan=False)

    return Reader(files, read)


REVIEWS = [{"text": f"{('good', 'bad')[n % 2]} word{n // 3}", "label": "yn"[n % 2], "stars": n} for n in range(12)]


def prepare_doctor(folder: Path) -> Reader:
    """Diagnose a task's data, and write a person's own table without the rows found."""
    checkpoint = str(official.write_checkpoint(folder / "bert"))
    sources = {folder / f"own{suffix}": ("classify", folder / f"own{suffix}") for suffix in (".csv", ".jsonl")}
    for file in sources:
        official.write_table(file, REVIEWS)
    (folder / "own").mkdir()
    for split in ("train", "dev"):
        sources[official.write_table(folder / "own" / f"{split}.csv", REVIEWS)] = "classify", folder / "own"
    official.write_glue(folder / "glue")
    for name, task in {"CoLA": "cola", "STS-B": "stsb", "RTE": "rte"}.items():
        files = sorted((folder / "glue" / name).iterdir())
        shorten(files, 6)
        sources |= dict.fromkeys(files, (task, folder / "glue"))
    for task, write, pattern in (("swag", official.write_swag, "*.csv"), ("ner", official.write_conll, "eng.*")):
        write(folder / task)
        files = sorted((folder / task).glob(pattern))
        shorten(files, 30)
        sources |= dict.fromkeys(files, (task, folder / task))

    def read(file: Path) -> None:
        name, place = sources[file]
        found = examine(TASKS[name], {"data": {"dir": str(place)}}, checkpoint, lambda line: None)
        json.dumps(found.findings, allow_nan=False)
        assert all(table.rows for table in list_tables(found.findings))
        if name == "classify":
            shutil.rmtree(folder / "clean", ignore_errors=True)
            write_clean(found, USUAL_DROPS, folder / ("clean" if place.is_dir() else "clean.jsonl"), lambda line: None)

    return Reader(sorted(sources), read)


def prepare_comparison(folder: Path) -> Reader:
    """Compare two tables of other programs, or two runs."""
    pairs = []
    for suffix in (".csv", ".jsonl", ".parquet"):
        both = [folder / f"{name}{suffix}" for name in "ab"]
        for shift, file in enumerate(both):
            answers = [{"prediction": "yn"[(n + shift) % 3 % 2], "probability": 0.5} for n in range(len(REVIEWS))]
            official.write_table(file, [row | answer for row, answer in zip(REVIEWS, answers, strict=True)])
        pairs.append(both)
    runs = [write_run(folder / name, draw_right(seed, rows=20), rate=seed) for seed, name in enumerate("ab")]
    places = {file: both for both in pairs for file in both}
    names = ("recipe.toml", "metrics.json", "predictions/dev.parquet")
    places |= {runs[0] / name: runs for name in names}

    def read(file: Path) -> None:
        found = compare(places[file])
        assert all(table.rows for table in tabulate(found))
        json.dumps(list_values(found), allow_nan=False)
        list(comment(found))

    return Reader([*sorted(places), *[runs[0] / names[-1]] * 3], read)


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
PRETRAIN = f"""# A lab note.
#
# What the paper does,
# and what was measured.
batch_size = 8
precision = "fp32"
preset = "paper"
[model]
{chr(10).join(f"{key} = {value}" for key, value in SIZES.items())}
hidden_act = "gelu"
hidden_dropout_prob = 0.1
attention_probs_dropout_prob = 0.1
initializer_range = 0.02
layer_norm_eps = 1e-12
[data]
heldout_share = 0.1
heldout_pairs = 50
short_seq_prob = 0.1
dupe_factor = 2
corpus = ["some.txt"]
vocab_size = 100
objective = "mlm"
mask_rate = 0.8
cased = false
[train]
max_steps = 20
learning_rate = 1e-4
lr_scheduler_type = "linear"
warmup_steps = 0.1
per_device_train_batch_size = 4
optim = "bert_adam"
seed = 1
save_steps = 0.5
weight_decay = 0.01
adam_epsilon = 1e-6
adam_beta1 = 0.9
max_grad_norm = 1.0
run_name = "x"
[[phase]]
share = 0.9
max_length = 16
[[phase]]
share = 0.1
max_length = 32
"""
FINETUNE = """# Another note.
#
# Of two lines.
checkpoint = "{}"
batch_size = 8
reinit_layers = 1
bilstm = true
[data]
max_length = 80
max_train_samples = 100
[train]
num_train_epochs = 2.0
weight_decay = 0.01
save_strategy = "epoch"
eval_strategy = "epoch"
load_best_model_at_end = true
lr_scheduler_kwargs = {{}}
"""


def prepare_recipe(folder: Path) -> Reader:
    checkpoint = official.write_checkpoint(folder / "bert", labels=("a", "b"))
    (folder / "pretrain.toml").write_text(PRETRAIN)
    (folder / "rte.toml").write_text(FINETUNE.format(checkpoint))
    (folder / "squad1.toml").write_text(FINETUNE.format(checkpoint))

    def read(file: Path) -> None:
        task, recipe = TASKS[file.stem], read_recipe(file)
        check(recipe, task, str(file))
        plan = dry_run(Recipe.make(task, recipe), output=folder / "out")
        json.dumps(plan | {"recipe": plan["recipe"].to_dict()})

    return Reader(sorted(folder.glob("*.toml")), read)


def prepare_setting(folder: Path) -> Reader:
    """Apply the lines of a file as `--set`, one after the other."""
    given = ("batch_size=8", "model.hidden_size=16", "train.optim=adamw_torch", 'data.corpus=["a"]', "data.vocab=my")
    files = [folder / f"{number}.set" for number in range(len(given))]
    for file, line in zip(files, given, strict=True):
        file.write_text(line)
    base = read_recipe_text(PRETRAIN, folder)

    def read(file: Path) -> None:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")  # as Python reads a command line
        settings = [parse_setting(line) for line in lines if line]
        dry_run(Recipe.make(TASKS["pretrain"], base, *settings), output=folder / "out")

    return Reader([*files, files[-1]], read)


def read_recipe_text(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "base.toml"
    path.write_text(text)
    return read_recipe(path)


SHORT_STUDY = """# A note
# that is read by nobody,
# and another line.
note = "RTE stands for MRPC."
tasks = ["rte", "mrpc"]
average = ["rte", "mrpc"]
seeds = [42, 43]
select = "best"
keep = "chosen"
num_cpus = 1
num_gpus = 0.5
[recipe]
checkpoint = "{}"
batch_size = 32
[recipe.train]
weight_decay = 0.1
[recipe.data]
max_length = 64
[grid]
"train.learning_rate" = [5e-5, 3e-5]
batch_size = [16, 32]
"""
LONG_STUDY = """# Another note
#
# of three lines.
restarts = 2
select = "mean"
[[column]]
name = "SQuAD"
task = "squad1"
metric = "f1"
paper = "dev"
[column.recipe]
batch_size = 16
[column.recipe.data]
max_length = 80
[[column]]
name = "MNLI"
task = "mnli"
[[column]]
name = "Perplexity"
task = "pretrain"
[recipe.data]
max_length = 80
[pretrain]
batch_size = 8
[pretrain.model]
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 16
[pretrain.data]
corpus = ["some.txt"]
[pretrain.train]
max_steps = 100
[[row]]
name = "BERT"
paper = { "SQuAD" = 87.9 }
[[row]]
name = "No NSP"
[row.pretrain]
data.objective = "mlm"
[row.recipe]
bilstm = true
"""


def prepare_study(folder: Path) -> Reader:
    checkpoint = official.write_checkpoint(folder / "bert")
    (folder / "short.toml").write_text(SHORT_STUDY.format(checkpoint))
    (folder / "long.toml").write_text(LONG_STUDY)

    def read(file: Path) -> None:
        study = make_study(read_recipe(file), {"checkpoint": None}, where=str(file))
        lines = describe_plan(study)
        assert len(lines) > 1
        assert make_study(define(study)) == study

    return Reader(sorted(folder.glob("*.toml")), read)


def prepare_model(folder: Path) -> Reader:
    """Open the directory of a run as `predict` does."""
    run = official.write_checkpoint(folder / "run", labels=("yes", "no"), num_hidden_layers=1, hidden_size=8)
    (run / "recipe.toml").write_text('task = "rte"\n[data]\nmax_length = 32\n[train]\nseed = 1\n')
    (run / CALIBRATION_FILE).write_text('{"split": "dev", "scores": [0.1, 0.4, 0.6, 0.9]}')
    names = ("config.json", "model.safetensors", "config.json", "model.safetensors", "recipe.toml", CALIBRATION_FILE)
    return Reader([run / name for name in names], lambda file: Predictor(run, coverage=0.5)([["so good", "bad"]]))


def prepare_export(folder: Path) -> Reader:
    """Open the directory of an export as `predict` does."""
    pytest.importorskip("onnxruntime")
    from tests.exports import write_export

    made = folder / "export"
    shutil.copytree(write_export("BertForSequenceClassification")[1], made)
    files = [file for file in sorted(made.iterdir()) if file.is_file() and file.name != "README.md"]
    return Reader([*files, *[made / EXPORT_FILE] * 9], lambda file: Predictor(made)(["so good"]))


def prepare_tokenizer(folder: Path) -> Reader:
    whole = official.write_checkpoint(folder / "whole", num_hidden_layers=1, hidden_size=8)
    (folder / "old").mkdir()
    shutil.copy(whole / "vocab.txt", folder / "old")
    (folder / "old" / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 64}')

    def read(file: Path) -> None:
        for source in (file.parent, *([file] if file.name == "vocab.txt" else [])):
            tokenizer = load_tokenizer(source)
            found = encode_texts([["Word1 so good [MASK] é日"]], None, tokenizer, 32)[0]["input_ids"]
            assert 0 <= found.min() <= found.max() < len(tokenizer)

    files = [whole / "tokenizer.json", whole / "tokenizer_config.json"]
    return Reader([*files, *sorted((folder / "old").iterdir())], read)


def prepare_built(folder: Path) -> Reader:
    """Open a corpus on disk as pretraining does."""
    text = folder / "text.txt"
    text.write_text("word1 good. so bad.\nword2 so.\n\n" * 6)
    from bertkit.data.pretraining.build import build

    tokenizer = load_tokenizer(official.write_checkpoint(folder / "bert", num_hidden_layers=1, hidden_size=8))
    made = folder / "made"
    build([str(text)], tokenizer, made, workers=1)
    recipe = draft(
        TASKS["pretrain"],
        {"data": {"corpus": [str(made)], "max_length": 16}, "train": {"max_steps": 2}, "batch_size": 2},
    )

    def read(file: Path) -> None:
        with seal_again(made, file):
            task = TASKS["pretrain"]
            examples = task.load(recipe.data, str)
            tokenizer = task.tokenize(recipe, examples, str)
            data = task.encode(examples["train"], tokenizer, recipe, "train")
            assert data.__getitems__([0])["input_ids"].max() < len(tokenizer)
            list(list_rows(store.read_manifest(made)["statistics"]))

    return Reader([file for file in sorted(made.rglob("*")) if file.is_file()], read)


def prepare_server(folder: Path) -> Reader:
    """Send the content of a file to a served model: a body, or with the suffix .http all of a request."""
    from tests import served

    servers = {}  # which end with the reader
    for name in ("classes", "names", "null", "endings", "masks"):
        (folder / name).mkdir()
        predictor = Predictor(served.write_served(folder / name, name))
        manager = served.serving(predictor, folder / name)
        servers[name] = manager, manager.__enter__()
        inputs = [*served.SERVED[name][2], predictor.sample]
        (folder / f"{name}.one.json").write_text(json.dumps(inputs[-1]))
        (folder / f"{name}.list.json").write_text(json.dumps(inputs))
    head = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    (folder / "classes.all.http").write_bytes(
        b'POST /predict HTTP/1.1\r\n%bContent-Length: 16\r\n\r\n{"text": "good"}' % head
    )

    def read(file: Path) -> None:
        name, kind, _ = file.name.split(".")
        content = file.read_bytes()
        if kind != "all":
            content = b"POST /predict HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(content), content)
        patience = 0.2 if kind == "all" else 30
        with socket.create_connection(("127.0.0.1", servers[name][1]), timeout=patience) as connection:
            connection.sendall(content)
            try:
                answer = b"".join(iter(partial(connection.recv, 1 << 20), b""))
            except TimeoutError:
                assert kind == "all"
                raise UsageError("the server waits for more; send all of the request") from None
        top, _, body = answer.partition(b"\r\n\r\n")  # another answer may follow
        status = int(top.split(b" ")[1])
        if b"\r\ncontent-type: text/plain" in top.lower():  # uvicorn's own answer
            assert status in (400, 426), answer
            raise UsageError("the server understands no HTTP; correct the request")
        body = body[: int(top.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])]
        found = json.loads(body) if body else None
        if status != 200:
            assert 400 <= status < 500, answer
            raise UsageError(found["error"])

    return Reader(sorted(folder.glob("*.*.*")), read)


@contextmanager
def seal_again(made: Path, file: Path) -> Iterator[None]:
    """Correct the checksum of a file of the tokenizer, because otherwise nothing else would be tested.

    Those of other files stay: only bertkit writes these files, so a correct checksum proves their content.
    """
    path, name = made / store.MANIFEST, file.name
    before = path.read_bytes()
    if name in TOKENIZER_FILES:
        manifest = json.loads(before)
        manifest["files"][name] = [file.stat().st_size, f"{find_checksum(file):08x}"]
        del manifest["checksum"]
        write_json({"checksum": store._seal(manifest), **manifest}, path)
    try:
        yield
    finally:
        path.write_bytes(before)


READERS = {
    "GLUE": prepare_glue,
    "SQuAD": prepare_squad,
    "entities of JSONL": partial(prepare_entities, ".jsonl"),
    "entities of Parquet": partial(prepare_entities, ".parquet"),
    "questions of JSONL": partial(prepare_questions, ".jsonl"),
    "questions of Parquet": partial(prepare_questions, ".parquet"),
    "SWAG": partial(prepare_rows, "swag", official.write_swag, "*.csv", 5),
    "CoNLL": partial(prepare_rows, "ner", official.write_conll, "eng.*", 60),
    "text": prepare_text,
    "JSONL": prepare_jsonl,
    "predict": prepare_predict,
    "server": prepare_server,
    "features": prepare_features,
    "TriviaQA": prepare_triviaqa,
    "columns of CSV": partial(prepare_columns, ".csv"),
    "columns of TSV": partial(prepare_columns, ".tsv"),
    "columns of JSONL": partial(prepare_columns, ".jsonl"),
    "columns of JSON": partial(prepare_columns, ".json"),
    "columns of Parquet": partial(prepare_columns, ".parquet"),
    "score": prepare_score,
    "doctor": prepare_doctor,
    "comparison": prepare_comparison,
    "recipe": prepare_recipe,
    "setting": prepare_setting,
    "study": prepare_study,
    "model": prepare_model,
    "export": prepare_export,
    "tokenizer": prepare_tokenizer,
    "built": prepare_built,
}


# --- Promises ---------------------------------------------------------------------------------------------------------


def check_message(message: str) -> None:
    """Check that an error is one line without control characters and states the next step."""
    odd = [character for character in message if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")]
    assert not odd, f"{odd} in {message!r}"
    assert "; " in message or " must " in message, message


@contextmanager
def limit_seconds() -> Iterator[None]:
    """Raise an AssertionError in code that uses more processor time than an input may."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"more than {SECONDS} seconds for one input")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


@contextmanager
def limit_memory() -> Iterator[Callable[[], int]]:
    """Make an allocation far beyond current use fail; yield a function that returns the growth in bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = measure_peak()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, limits[1]))
    try:
        yield lambda: measure_peak() - before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def measure_peak() -> int:
    """Return the largest resident size of the process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(name: str, folder: Path, count: int) -> None:
    """Give a reader `count` different spoiled files; anything except a value or a promised error is raised."""
    reader = READERS[name](folder)
    for file in set(reader.files):
        reader.read(file)  # unspoiled; this also does all late imports
    originals = {file: file.read_bytes() for file in reader.files}
    tried: set[bytes] = set()
    accepted, began = 0, time.monotonic()

    @settings(
        max_examples=REPEATED * count,
        derandomize=True,
        database=None,
        deadline=WAITING,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(spoil([(file, originals[file]) for file in reader.files]))
    def attempt(spoiled: tuple[Path, bytes]) -> None:
        nonlocal accepted
        file, content = spoiled
        digest = hashlib.blake2b(f"{file}\0".encode() + content, digest_size=8).digest()
        if digest in tried or len(tried) == count:
            return
        file.write_bytes(content)
        try:
            with limit_seconds():
                reader.read(file)
            accepted += 1
        except UsageError as error:
            check_message(str(error))
        finally:
            file.write_bytes(originals[file])
        tried.add(digest)  # last: hypothesis retries a failing input

    with limit_memory() as measure_growth:
        attempt()
    seconds = time.monotonic() - began
    print(f"{name}: {len(tried):,} inputs, {accepted / len(tried):.1%} accepted, {seconds:.0f} s", end=", ")
    print(f"grown by {measure_growth() / 1e6:,.0f} MB")
    assert len(tried) == count
    assert accepted >= ACCEPTED * count
    assert measure_growth() < MEMORY


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_gives_a_value_or_one_line_that_says_what_to_do(name, count, tmp_path):
    fuzz(name, tmp_path, count)
