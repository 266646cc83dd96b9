"""Write real data in the forms of a person's own data, for recipes/RESULTS.md.

python -m tests.forms wnut ROOT/ner/wnut17 DIR        WNUT-17 in six forms
python -m tests.forms squad ROOT/squad DIR            SQuAD 1.1 and 2.0 as JSON lines and Parquet
python -m tests.forms documents ROOT DIR              long documents whose label stands behind token 512
"""

import random
import sys
from bisect import bisect_right
from itertools import accumulate, takewhile
from pathlib import Path

from bertkit.data.formats.conll import find_conll, read_conll
from bertkit.data.formats.squad import read_squad
from bertkit.data.tagging import split_words
from bertkit.data.tags import from_iob2
from bertkit.data.tokenizer import make_tokenizer
from bertkit.metrics.ner import find_entities
from tests.official import write_table

SENTENCES = 50_000  # of SST-2's training phrases, in an order drawn with seed 0, for the classifier of sentences
EVIDENCE = 6  # phrases of one label in each document


def write_wnut(source: Path, folder: Path) -> None:
    """Write CoNLL files in four schemes, tokens with tags, and texts with spans; words as prediction divides them."""
    for split, path in find_conll(source).items():
        rows = []
        for sentence in read_conll(path).sentences:
            text = " ".join(sentence.words)
            starts = list(accumulate((len(word) + 1 for word in sentence.words), initial=0))
            spans = [(starts[first], starts[end] - 1, kind) for first, end, kind in find_entities(sentence.tags)]
            places = split_words(text)
            tags = ["O"] * len(places)
            for start, end, kind in spans:
                inside = [word for word, (left, right) in enumerate(places) if left < end and right > start]
                for word in inside:
                    tags[word] = f"{'B' if word == inside[0] else 'I'}-{kind}"
            if places:
                rows.append((text, [text[start:end] for start, end in places], tags, spans))
        for scheme in ("IOB1", "IOB2", "IOBES", "BILOU"):
            (folder / scheme).mkdir(parents=True, exist_ok=True)
            tagged = (zip(words, from_iob2(tags, scheme), strict=True) for _, words, tags, _ in rows)
            lines = ("".join(f"{word} {tag}\n" for word, tag in sentence) for sentence in tagged)
            (folder / scheme / f"{split}.conll").write_text("\n".join(lines))
        write_table(folder / "tokens" / f"{split}.jsonl", [{"tokens": row[1], "ner_tags": row[2]} for row in rows])
        write_table(folder / "spans" / f"{split}.jsonl", [{"text": row[0], "spans": row[3]} for row in rows])


def write_squad_tables(source: Path, folder: Path) -> None:
    """Write the questions of both versions as tables in the form of the Hub."""
    for version, name in ((1, "v1.1"), (2, "v2.0")):
        for split in ("train", "dev"):
            rows = [
                {
                    "id": one.id,
                    "question": one.question,
                    "context": one.context,
                    "answers": {"text": list(one.answers), "answer_start": list(one.starts)},
                }
                for one in read_squad(source / f"{split}-{name}.json", version)
            ]
            for suffix in ("jsonl", "parquet"):
                write_table(folder / f"{name}-{suffix}" / f"{split}.{suffix}", rows)


def write_documents(source: Path, folder: Path) -> None:
    """Write SST-2's phrases as a table, and documents of 300 to 1,500 tokens.

    A document is consecutive text of Wikipedia with EVIDENCE other phrases of one label at a random place behind token
    512; shorter ones end with them.
    """
    vocabulary = (source / "vocab" / "bert-base-uncased.txt").read_text().splitlines()
    tokenizer = make_tokenizer(vocabulary, cased=False)
    lines = (source / "glue" / "SST-2" / "train.tsv").read_text().splitlines()[1:]
    phrases = [(text, ("negative", "positive")[int(label)]) for text, label in (line.rsplit("\t", 1) for line in lines)]
    random.Random(0).shuffle(phrases)
    table = [{"text": text.strip(), "label": label} for text, label in phrases]
    write_table(folder / "sentences" / "train.csv", table[:SENTENCES])
    write_table(folder / "sentences" / "dev.csv", table[SENTENCES : SENTENCES + 1000])
    others = [row for row in table[SENTENCES:] if len(row["text"].split()) >= 8]
    words, middle, rng = (source / "text" / "wikipedia.txt").read_text().split(), len(others) // 2, random.Random(1)
    for split, pool, drawn, kept in (("train", others[:middle], 1200, 600), ("dev", others[middle:], 600, 400)):
        rows = []
        for _ in range(drawn):
            label, size = rng.choice(("negative", "positive")), rng.randint(300, 1500)
            evidence = " ".join(rng.sample([row["text"] for row in pool if row["label"] == label], EVIDENCE))
            room, start = size - len(tokenizer.tokenize(evidence)), rng.randrange(len(words) - 2000)
            ends = accumulate(len(tokenizer.tokenize(word)) for word in words[start:])
            ends = list(takewhile(lambda end: end <= room, ends))  # noqa: B023
            behind = start + bisect_right(ends, rng.randint(512, room) if room > 512 else room)
            text = [*words[start:behind], evidence, *words[behind : start + len(ends)]]
            rows.append({"text": " ".join(text), "label": label})
        write_table(folder / "documents" / f"{split}.csv", rows[:kept])


if __name__ == "__main__":
    kind, source, folder = sys.argv[1:]
    {"wnut": write_wnut, "squad": write_squad_tables, "documents": write_documents}[kind](Path(source), Path(folder))
