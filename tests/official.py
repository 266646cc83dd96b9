"""Small data sets in the official formats, and a tiny BERT to fine-tune, for the tests of the tasks."""

import csv
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bertkit import BertForSequenceClassification, BertModel
from bertkit.data import spans
from bertkit.data.tokenizer import make_tokenizer, save_tokenizer
from bertkit.model.config import BertConfig
from bertkit.tasks.glue import BENCHMARKS, NLI
from bertkit.tasks.option import WINDOW_OPTIONS, list_defaults

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {
    "0": "bad",
    "1": "good",
    "entailment": "good",
    "not_entailment": "bad",
    "neutral": "so",
    "contradiction": "bad",
}
FILLERS = [f"word{number}" for number in range(20)]
ROWS = {"train": 48, "dev": 18, "test": 10}


encode_questions = partial(spans.encode_questions, **list_defaults(WINDOW_OPTIONS))


def write_checkpoint(folder: Path, seed: int = 0, labels: Sequence[str] = (), characters: str = "", **values) -> Path:
    """Write a tiny random BERT with a tokenizer that knows the words of `write_glue`.

    labels: of its classifier; without them it has no head.
    characters: further tokens.
    """
    import torch

    tokens = [
        *SPECIAL,
        *sorted(set(WORDS.values())),
        "word",
        "?",
        *(f"##{digit}" for digit in range(10)),
        ".",
        '"',
        "'",
        *sorted(set(characters)),
    ]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if labels:
        values["id2label"] = dict(enumerate(labels))
    config = BertConfig(**{"vocab_size": len(tokens), "max_position_embeddings": 128} | sizes | dropout | values)
    torch.manual_seed(seed)
    (BertForSequenceClassification if labels else BertModel)(config).save_pretrained(folder)
    save_tokenizer(make_tokenizer(tokens, cased=False, max_length=128), folder)
    return folder


def write_glue(folder: Path, skip: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write the GLUE download in its official formats, a few dozen rows per file; one word reveals the label.

    skip: files that are left out, as in a download that is not complete.
    """
    draw = np.random.default_rng(seed)

    def make_text(word: str) -> str:
        words = list(draw.choice(FILLERS, draw.integers(2, 7)))
        words.insert(int(draw.integers(len(words) + 1)), word)
        return " ".join(words) + draw.choice([".", ' "', " '"])  # quotes that nobody closes

    for row in BENCHMARKS:
        labels = list(row.labels) or ["0", "1"]
        for name, split in row.splits.items():
            path = folder / split.file
            if split.file in skip or path.exists():
                continue
            labelled = not split.submission
            count = ROWS[name.partition("_")[0]] if name != "ax" else 9
            columns = COLUMNS["ax" if name == "ax" else row.name][not labelled].split("|")
            columns = [column for column in columns if name != "train" or column not in ANNOTATORS[1:]]
            lines = [] if row.name == "cola" and labelled else ["\t".join(columns)]
            for index in range(count):
                label = labels[index % len(labels)]
                texts = [make_text(WORDS[label]) for _ in row.texts]
                spelled = label if row.labels else f"{5 * int(label) * draw.uniform(0.8, 1):.3f}"
                lines.append("\t".join(list_cells(columns, index, texts, spelled)))
            path.parent.mkdir(parents=True, exist_ok=True)
            start = "\ufeff" if row.name == "mrpc" else ""
            path.write_text(start + "\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return folder


def write_squad(folder: Path, version: int = 2, seed: int = 0) -> Path:
    """Write the SQuAD files in their official format: two articles of four paragraphs with three questions.

    A question names the word before its answer. In 2.0 the last question of each paragraph has no answer.
    """
    draw = np.random.default_rng(seed)
    release = {1: "1.1", 2: "2.0"}[version]
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):

        def ask(context: str, name: str, impossible: bool, split: str = split) -> dict:
            words = context.split()
            place = int(draw.integers(len(words) - 3))
            answers = [" ".join(words[place + 1 : place + 1 + count]) for count in (2, 1)]
            start = len(" ".join(words[: place + 1])) + 1
            found = [{"text": text, "answer_start": start} for text in answers[: 1 if split == "train" else 2]]
            question = {"id": name, "question": f"{words[place]} ?", "answers": [] if impossible else found}
            return question | ({"is_impossible": impossible} if version == 2 else {})

        articles = []
        for article in range(2):
            paragraphs = []
            for paragraph in range(4):
                context = " ".join(draw.choice(FILLERS, draw.integers(6, 30), replace=True)) + " ."
                names = [f"{split}-{article}-{paragraph}-{number}" for number in range(3)]
                qas = [ask(context, name, version == 2 and name.endswith("2")) for name in names]
                paragraphs.append({"context": context, "qas": qas})
            articles.append({"title": f"Article_{article}", "paragraphs": paragraphs})
        content = {"version": f"v{release}" if version == 2 else release, "data": articles}
        (folder / f"{split}-v{release}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def list_questions(path: Path) -> list[dict[str, object]]:
    """Return the questions of an official SQuAD file as rows in the form of the Hub."""
    rows = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}
                row = {"id": asked["id"], "title": article["title"], "context": paragraph["context"]}
                rows.append(row | {"question": asked["question"], "answers": answers})
    return rows


def write_questions(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Write rows of questions as a table; in CSV and TSV the answers are JSON texts."""
    if path.suffix in (".csv", ".tsv"):
        rows = [
            {key: json.dumps(cell) if key == "answers" and cell else cell for key, cell in row.items()} for row in rows
        ]
    if path.suffix == ".json":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
        return path
    return write_table(path, rows)


def write_swag(folder: Path, skip: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write the SWAG files in their official format; the right ending has the word "good".

    skip: files that are left out.
    """
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    fixed = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
    for name, count in zip(("train.csv", "val.csv", "test.csv"), ROWS.values(), strict=True):
        if name in skip:
            continue
        labelled = name != "test.csv"
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*fixed, *(f"ending{place}" for place in range(4)), *(["label"] if labelled else [])])
            for index in range(count):
                context, start = " ".join(draw.choice(FILLERS, 5)) + " .", str(draw.choice(FILLERS))
                label = int(draw.integers(4))
                endings = []
                for place in range(4):
                    words = [*draw.choice(FILLERS, draw.integers(1, 6)), "good" if place == label else "bad"]
                    endings.append(" ".join(draw.permutation(words)) + draw.choice([".", ', "so".']))  # in quotes
                row = [index, "anetv_1", index, f"{context} {start}", context, start, "gold", *endings]
                writer.writerow(row + [label] * labelled)
    return folder


def write_conll(folder: Path, skip: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write the CoNLL-2003 files in their official format: four columns, IOB1, documents of three sentences.

    Each "good" is a person and each "bad" a place, two in a row being two of them; "so" continues either, and some
    words are of a control character, which no tokenizer keeps.

    skip: files that are left out.
    """
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in zip(("eng.train", "eng.testa", "eng.testb"), ROWS.values(), strict=True):
        if name in skip:
            continue
        lines = []
        for index in range(count):
            if index % 3 == 0:
                lines += ["-DOCSTART- -X- -X- O", ""]
            before = ""
            for word in [str(draw.choice([*FILLERS[:4], "good", "good", "bad", "so", "\u200b"])) for _ in range(7)]:
                kind = {"good": "PER", "bad": "LOC", "so": before}.get(word, "")
                mark = "B" if kind and kind == before and word != "so" else "I"
                lines.append(f"{word} NN I-NP {f'{mark}-{kind}' if kind else 'O'}")
                before = kind
            lines.append("")
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return folder


CLASSES = {"good": "ADJ JJ", "bad": "ADJ JJ", "so": "ADV RB", ".": "PUNCT ."}  # word -> UPOS and XPOS; others: nouns


def write_treebank(folder: Path, seed: int = 0) -> Path:
    """Write a treebank in CoNLL-U under the names of Universal Dependencies, with documents of three sentences.

    Each sentence has a range of two words and an empty node. "word0" is a noun, and after "so" a verb.
    """
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        lines = []
        for index in range(count):
            lines += [f"# newdoc id = {split}{index}"] * (index % 3 == 0) + [f"# sent_id = {split}{index}"]
            words = [*draw.choice([*FILLERS[:4], "word0", "good", "bad", "so"], 6).tolist(), "."]
            for number, (before, word) in enumerate(zip(["", *words], words, strict=False), 1):
                other = "VERB VB" if (before, word) == ("so", "word0") else "NOUN NN"
                upos, xpos = CLASSES.get(word, other).split(" ")
                if number == 2:
                    lines += ["\t".join(["2-3", f"{words[1]}{words[2]}", *"_" * 8])]
                lines += ["\t".join([str(number), word, word, upos, xpos, "_", str(number - 1), "dep", "_", "_"])]
            lines += ["\t".join(["7.1", "word9", "word9", "NOUN", "NN", *"_" * 5]), ""]
        (folder / f"en_tiny-ud-{split}.conllu").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return folder


def write_reviews(path: Path, count: int = 72, seed: int = 0, labelled: bool = True) -> Path:
    """Write a person's own table, in the format of the suffix; a word in both texts decides all labels.

    The columns are id, title, body, stars (1 to 3), tags (none, one or two of them, joined by "|"), the same as slow
    and dear (0 or 1), price (a number) and customer (one of eight).

    labelled: without it, the labels are empty.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        stars = int(draw.integers(3)) + 1
        title, body = (
            " ".join(draw.permutation([*draw.choice(FILLERS, draw.integers(2, 7)), ("bad", "so", "good")[stars - 1]]))
            for _ in range(2)
        )
        tags = [tag for tag, most in (("slow", 1), ("dear", 2)) if stars <= most]
        row = {"id": f"r{index}", "title": title, "body": f'it is "{body}", word', "stars": stars}
        row |= {"tags": "|".join(tags), "slow": int("slow" in tags), "dear": int("dear" in tags)}
        row["price"] = round(stars + draw.uniform(0.1, 0.4), 3)
        if not labelled:
            row |= dict.fromkeys(("stars", "tags", "slow", "dear", "price"), "")
        rows.append(row | {"customer": f"c{index % 8}"})
    return write_table(path, rows)


def write_table(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Write rows with the same columns as CSV, TSV (quoted), JSON lines or Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
MNLI = "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
PAIR = "index|sentence1|sentence2"
COLUMNS = {  # task -> the columns of a file with labels and of one without, as in the download
    "cola": ("source|label|mark|sentence", "index|sentence"),
    "sst2": ("sentence|label", "index|sentence"),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "index|#1 ID|#2 ID|#1 String|#2 String"),
    "stsb": (f"{STSB}|score", STSB),
    "qqp": ("id|qid1|qid2|question1|question2|is_duplicate", "id|question1|question2"),
    "mnli": (
        f"{MNLI}|sentence1|sentence2|label1|label2|label3|label4|label5|gold_label",
        f"{MNLI}|sentence1|sentence2",
    ),
    "qnli": ("index|question|sentence|label", "index|question|sentence"),
    **dict.fromkeys(("rte", "wnli", "ax"), (f"{PAIR}|label", PAIR)),
}
TEXT_COLUMNS = (*("sentence", "sentence1", "sentence2", "question", "question1", "question2"), "#1 String", "#2 String")
LABEL_COLUMNS = ("label", "Quality", "score", "is_duplicate", "gold_label")
ANNOTATORS = [f"label{number}" for number in range(1, 6)]  # of MNLI's dev files; its training file has the first one


def list_cells(columns: Sequence[str], index: int, texts: Sequence[str], label: str) -> list[str]:
    """Return the cells of a row of a GLUE file."""
    fixed = {"index": index, "id": index, "qid1": 2 * index, "qid2": 2 * index + 1, "source": "gj04", "mark": ""}
    fixed |= {"#1 ID": 1000 + index, "#2 ID": 2000 + index} | dict.fromkeys(ANNOTATORS, next(iter(NLI)))
    fixed |= dict.fromkeys(LABEL_COLUMNS, label)
    fixed |= dict(zip((column for column in columns if column in TEXT_COLUMNS), texts, strict=True))
    return [str(fixed.get(column, "n/a")) for column in columns]
