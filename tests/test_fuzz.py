"""Readers of user files, on spoiled files: a value or a one-line error, never a traceback or a hang.

Each reader starts from small valid files. One of them is spoiled in one to three positions - a byte, a line, a cell, a
value of JSON or TOML - and then processed as far as in a run: a task's examples are encoded, a study is planned, a
model predicts, a server answers. The fast suite tries a few inputs for each reader, the slow one two thousand.
"""

import copy
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from bertkit.data.formats.rows import read_inputs
from bertkit.data.pretraining.sources import read_documents
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.sequences import collate, encode_inputs
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.studies.cells import describe_plan
from bertkit.studies.spec import define, make_study
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, check, read_recipe
from bertkit.training.run import dry_run
from tests import official
from tests.conftest import draft
from tests.conftest import make_model as make_head

RECIPES = Path(__file__).parents[1] / "recipes"
FEW, MANY, REQUESTS = 25, 2_000, 500  # inputs of a reader in the fast suite and in the slow one, and of a server
ACCEPTED = 0.05  # least share of inputs that are read without an error

# --- Mutations --------------------------------------------------------------------------------------------------------

SPACES = ("", " ", "\0", "\ufeff", "\u2028", "\r", "\n", "\t")
MARKS = ('"', '""', "'", "\\", "\x1b[31m", "\u200b", "\xa0", "é", "日本語")
LONG = ("9" * 400, "word " * 700, "日" * 3000, "\n" * 50, "x, y" * 40)
TAGS = ("[MASK]", "-DOCSTART-", "O", "I-", "B-LOC", "U-PER", "index", "label", "entailment", "null", "{}", "[]")
PARTS = ("..", "/", "-1", "0", "3", "5.001", "1e999", "nan", "inf")
WORDS = (*SPACES, *MARKS, *TAGS, *PARTS, *LONG)  # some have a meaning for a reader
ODD_BYTES = (*(word.encode() for word in WORDS), b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xfe\xff", b"\x1f\x8b", bytes(64))
PLAIN = ("0", "-1", "2", "0.5", "1e999", "9" * 400, str(2**63), "true", "false", "[]", "{}", "[[]]", "[1, 2]", '["a"]')
JSON_VALUES = (*PLAIN, "null", "NaN", '"\\ud800"', '{"text": "a", "answer_start": 2}', "[" * 200 + "]" * 200)
TOML_VALUES = (*PLAIN, "nan", "{ a = 1 }", "2020-01-01", "0x10", '"rte"', '"pretrain"', '"auto"', '"x"', "[1e-5, 2e-5]")


def spoil_bytes(chance: Random, content: bytes) -> bytes:
    """Return the content with bytes deleted, doubled, flipped or inserted, or another encoding or line end."""
    start = chance.randrange(max(len(content), 1))
    stop = start + chance.randint(1, 40)
    before, middle, after = content[:start], content[start:stop], content[stop:]
    return chance.choice(
        [
            lambda: before + after,
            lambda: before + middle * 2 + after,
            lambda: before + bytes(byte ^ chance.randint(1, 255) for byte in middle) + after,
            lambda: before + chance.choice(ODD_BYTES) + after,
            lambda: before,
            lambda: content.replace(b"\n", chance.choice((b"\r\n", b"\r", b"\n\n", b""))),
            lambda: content.decode("utf-8", "replace").encode(chance.choice(("utf-16", "utf-8-sig"))),
        ]
    )()


def spoil_items(chance: Random, items: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the items with one deleted, doubled or changed."""
    index = chance.randrange(len(items))
    changed = chance.choice(([], items[index : index + 1] * 2, *[[change(items[index])]] * 2))
    return [*items[:index], *changed, *items[index + 1 :]]


def spoil_table(chance: Random, content: bytes, separator: str) -> bytes:
    """Return the content with a line or a cell deleted, doubled or replaced."""

    def change(line: str) -> str:
        return separator.join(spoil_items(chance, line.split(separator), lambda _: chance.choice(WORDS)))

    lines = content.decode("utf-8", "surrogateescape").split("\n")
    return "\n".join(spoil_items(chance, lines, change)).encode("utf-8", "surrogateescape")


def list_values(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield holder and key of every value inside a JSON value."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from list_values(item)


def spoil_json(chance: Random, content: bytes) -> bytes:
    """Return content with a value replaced or removed, an item doubled, or two values swapped."""
    try:
        value = json.loads(content)
        holder, key = chance.choice(list(list_values(value)))
    except (ValueError, IndexError, RecursionError):
        return spoil_bytes(chance, content)
    mark = "\ue000"  # stands for text that `json` would not write
    how = chance.randint(0, 3)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = mark
    text = chance.choice((*JSON_VALUES, *map(json.dumps, WORDS)))
    return json.dumps(value, ensure_ascii=False).replace(f'"{mark}"', text).encode("utf-8", "surrogatepass")


def spoil_jsonl(chance: Random, content: bytes) -> bytes:
    """Return the content with a line deleted or doubled, or a value in it changed."""
    return b"\n".join(spoil_items(chance, content.split(b"\n"), lambda line: spoil_json(chance, line)))


def spoil_toml(chance: Random, content: bytes) -> bytes:
    """Return the content with a line deleted or doubled, or a value changed."""

    def change(line: str) -> str:
        key, equals, _ = line.partition("=")
        if equals:
            return f"{key}= {chance.choice(TOML_VALUES)}"
        return chance.choice(("[train]", "[[row]]", "x = 1", "= 1"))

    return "\n".join(spoil_items(chance, content.decode("utf-8", "replace").split("\n"), change)).encode()


KINDS = {  # suffix of a file -> how it is spoiled; all files are also spoiled as bytes
    ".json": spoil_json,
    ".jsonl": spoil_jsonl,
    ".toml": spoil_toml,
    **dict.fromkeys((".tsv", ".conllu"), partial(spoil_table, separator="\t")),
    ".csv": partial(spoil_table, separator=","),
    **dict.fromkeys((".train", ".testa", ".testb", ".txt"), partial(spoil_table, separator=" ")),
}


def spoil(chance: Random, content: bytes, suffix: str) -> bytes:
    """Return the content of a file, spoiled in one to three positions."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = (spoil_bytes if chance.random() < 0.25 else KINDS.get(suffix, spoil_bytes))(chance, content)
    return content


# --- The readers: a function of a folder returns the files to spoil, and a function that reads one of them ------------

Reader = tuple[Sequence[Path], Callable[[Path], Any]]


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
        assert collate(data.__getitems__([0])) is not None
    task.configure(recipe, tokenizer, examples)


def make_tokenizer(folder: Path) -> Any:
    return load_tokenizer(official.write_checkpoint(folder / "bert"))


def prepare_glue(folder: Path) -> Reader:
    tokenizer = make_tokenizer(folder)
    official.write_glue(folder)
    names = {"CoLA": "cola", "MRPC": "mrpc", "STS-B": "stsb", "QQP": "qqp", "RTE": "rte"}
    files = [file for name in names for file in sorted((folder / name).iterdir())]
    shorten(files, 6)
    return files, lambda file: encode_all(names[file.parent.name], folder, tokenizer)


def prepare_squad(folder: Path) -> Reader:
    tokenizer = make_tokenizer(folder)
    for version in (1, 2):
        official.write_squad(folder / f"squad{version}", version)
    files = sorted(folder.glob("squad*/*.json"))
    for file in files:  # one paragraph of each article
        content = json.loads(file.read_text())
        for article in content["data"]:
            del article["paragraphs"][1:]
        file.write_text(json.dumps(content))
    lengths = {"max_length": 64, "max_query_length": 16, "doc_stride": 16}
    return files, lambda file: encode_all(file.parent.name, file.parent, tokenizer, **lengths)


def prepare_folder(name: str, write: Callable, pattern: str, most: int, folder: Path) -> Reader:
    tokenizer = make_tokenizer(folder)
    write(folder)
    files = sorted(folder.glob(pattern))
    shorten(files, most)
    return files, lambda file: encode_all(name, folder, tokenizer)


def prepare_table(name: str, suffix: str, folder: Path) -> Reader:
    """Read and encode a person's own table, with dev and test taken from it."""
    tokenizer = make_tokenizer(folder)
    spans = [{"start": 0, "end": 4, "label": "PER"}, {"start": 8, "end": 9, "label": "LOC"}]
    rows = {
        "classify": [{"text": f"{('good', 'bad')[n % 2]}, word{n}", "label": "yn"[n % 2]} for n in range(24)],
        "ner": [{"text": f"good so a{n}", "spans": spans} for n in range(24)],
        "squad2": official.list_questions(official.write_squad(folder / "squad", 2) / "train-v2.0.json")[::2],
    }[name]
    file = official.write_table(folder / f"table{suffix}", rows)
    if suffix == ".parquet":  # with numbers that are not compressed, so that some spoiled files are read
        table = pyarrow.Table.from_pylist([row | {"vector": [0.5] * 50} for row in rows])
        parquet.write_table(table, file, compression="none", use_dictionary=False)
    options = {"max_length": 64, "dev_share": 0.3, "test_share": 0.2}
    options |= {"max_query_length": 16, "doc_stride": 16, "group": "id"} if name == "squad2" else {}
    return [file], lambda file: encode_all(name, file, tokenizer, **options)


def prepare_chinese(folder: Path) -> Reader:
    """Read and encode a table in Chinese as Excel writes it."""
    tokenizer = make_tokenizer(folder)
    lines = [
        "text,label",
        *(
            f"房间很{'干净，位置也好' if n % 2 else '小，而且早餐种类也少'}。第{n}次来,{'好' if n % 2 else '坏'}"
            for n in range(24)
        ),
    ]
    file = folder / "table.csv"
    file.write_text("\n".join(lines), encoding="gb18030")
    return [file], lambda file: encode_all("classify", file, tokenizer, max_length=64)


TEXT = "One word. Two words?\nA third sentence e.g. this one.\n\nMore of it: 3.5 words!\n 日本語。二。\n\n\nThe end.\n"


def prepare_text(folder: Path) -> Reader:
    """Read and tokenize a corpus of text as a pretraining does."""
    tokenizer = make_tokenizer(folder)
    (folder / "corpus.txt").write_text(TEXT, encoding="utf-8")
    rows = [{"text": part, "id": number} for number, part in enumerate(TEXT.split("\n\n"))]
    official.write_table(folder / "corpus.jsonl", rows)

    def read(file: Path) -> None:
        documents = list(read_documents([str(file)]))
        assert all(documents)
        corpus = tokenize_documents(documents, tokenizer)
        assert len(corpus.ids)

    return sorted(folder.glob("corpus.*")), read


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
        files += [folder / head / "in.jsonl", folder / head / "in.csv"]
        official.write_table(files[-2], inputs)
        official.write_table(files[-1], [inputs[0]] * 2)

    def read(file: Path) -> None:
        predictor = predictors[file.parent.name]
        results = list(predictor.stream(read_inputs(str(file))))
        for result in results:
            json.dumps(result, ensure_ascii=False).encode()
            if "error" in result:
                check_message(result["error"])
        if all("error" in result for result in results):
            raise UsageError(f"{file} holds nothing for this model; see the lines above")

    return files, read


def prepare_recipe(folder: Path) -> Reader:
    """Read the project's recipe of a task as `--dry-run` does."""
    bert = str(official.write_checkpoint(folder / "bert", labels=("a", "b")))
    sources = {"pretrain": "pretrain/tiny.toml", "rte": "glue/rte-stable.toml", "squad1": "squad/v1.toml"}
    for name, source in sources.items():
        (folder / f"{name}.toml").write_text((RECIPES / source).read_text())

    def read(file: Path) -> None:
        task, recipe = TASKS[file.stem], read_recipe(file)
        check(recipe, task, str(file))
        lengths = {"data": {"max_length": 64, "max_query_length": 16, "doc_stride": 16}}
        given = {"pretrain": {}, "rte": {"checkpoint": bert}, "squad1": {"checkpoint": bert, **lengths}}[file.stem]
        plan = dry_run(Recipe.make(task, recipe, given), output=folder / "out")
        json.dumps(plan | {"recipe": plan["recipe"].to_dict()})

    return sorted(folder.glob("*.toml")), read


def prepare_study(folder: Path) -> Reader:
    bert = str(official.write_checkpoint(folder / "bert"))
    for name in ("table5", "restarts"):
        text = (RECIPES / "studies" / f"{name}.toml").read_text()
        (folder / f"{name}.toml").write_text(re.sub(r"google-bert/[\w-]+", bert, text))

    def read(file: Path) -> None:
        study = make_study(read_recipe(file), {"checkpoint": None}, where=str(file))
        assert len(describe_plan(study)) > 1
        assert make_study(define(study)) == study

    return sorted(folder.glob("*.toml")), read


def prepare_model(folder: Path) -> Reader:
    """Open the directory of a run as `predict` does."""
    run = official.write_checkpoint(folder / "run", labels=("yes", "no"), num_hidden_layers=1, hidden_size=8)
    (run / "recipe.toml").write_text('task = "rte"\n[data]\nmax_length = 32\n[train]\nseed = 1\n')
    names = ("config.json", "model.safetensors", "recipe.toml")
    return [run / name for name in names], lambda file: Predictor(run)([["so good", "bad"]])


def prepare_tokenizer(folder: Path) -> Reader:
    whole = official.write_checkpoint(folder / "whole", num_hidden_layers=1, hidden_size=8)
    (folder / "old").mkdir()
    shutil.copy(whole / "vocab.txt", folder / "old")
    (folder / "old" / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 64}')

    def read(file: Path) -> None:
        for source in (file.parent, *([file] if file.name == "vocab.txt" else [])):
            tokenizer = load_tokenizer(source)
            found = encode_inputs(["Word1 so good [MASK] é日"], None, tokenizer, 32)[0]["input_ids"]
            assert 0 <= found.min() <= found.max() < len(tokenizer)

    files = [whole / "tokenizer.json", whole / "tokenizer_config.json"]
    return [*files, *sorted((folder / "old").iterdir())], read


READERS = {
    "GLUE": prepare_glue,
    "SQuAD": prepare_squad,
    "SWAG": partial(prepare_folder, "swag", official.write_swag, "*.csv", 5),
    "CoNLL": partial(prepare_folder, "ner", official.write_conll, "eng.*", 60),
    "CoNLL-U": partial(prepare_folder, "ner", official.write_treebank, "*.conllu", 60),
    "CSV": partial(prepare_table, "classify", ".csv"),
    "CSV in GB18030": prepare_chinese,
    "JSONL": partial(prepare_table, "ner", ".jsonl"),
    "Parquet": partial(prepare_table, "squad2", ".parquet"),
    "text": prepare_text,
    "predict": prepare_predict,
    "recipe": prepare_recipe,
    "study": prepare_study,
    "model": prepare_model,
    "tokenizer": prepare_tokenizer,
}


def check_message(message: str) -> None:
    """Check that an error is one line without control characters and states the next step."""
    odd = [character for character in message if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")]
    assert not odd, f"{odd} in {message!r}"
    assert "; " in message or " must " in message, message


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_gives_a_value_or_one_line_that_says_what_to_do(name, count, tmp_path):
    files, read = READERS[name](tmp_path)
    originals = {file: file.read_bytes() for file in files}
    for file in originals:
        read(file)
    accepted = 0
    for seed in range(count):
        chance = Random(seed)
        file = chance.choice(list(files))
        file.write_bytes(spoil(chance, originals[file], file.suffix))
        try:
            read(file)
            accepted += 1
        except UsageError as error:
            check_message(str(error))
        except BaseException as error:
            error.add_note(f"input {seed} of {name}: {file.read_bytes()!r}")
            raise
        file.write_bytes(originals[file])
    assert accepted >= ACCEPTED * count


@pytest.mark.parametrize("count", [FEW, pytest.param(REQUESTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["classes", "names", "null", "endings", "masks"])
def test_whatever_is_sent_gets_an_answer_or_one_line_that_says_what_to_do(name, count, tmp_path):
    pytest.importorskip("fastapi")  # the extra `serve`
    from tests.served import SERVED, Client, serving, write_served

    inputs = SERVED[name][2]
    bodies = [json.dumps(given).encode() for given in (*inputs, inputs)]
    predictor, accepted = Predictor(write_served(tmp_path, name), precision="fp32"), 0
    with serving(predictor, tmp_path) as port:
        expected = Client(port).predict(bodies[0])
        for seed in range(count):
            chance = Random(seed)
            body = spoil(chance, chance.choice(bodies), ".json")
            status, answer = Client(port).predict(body)
            assert status in (200, 400, 413, 422), (seed, body, answer)
            accepted += status == 200
            assert status == 200 or "error" in answer
            for result in answer if isinstance(answer, list) else [answer]:
                if "error" in result:
                    check_message(result["error"])
        assert Client(port).predict(bodies[0]) == expected
    assert ACCEPTED * count <= accepted < count
