"""The bench of pretraining data: its figures beside a stand-in for the reference, its text, and bad input."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bertkit.bench import corpus as bench
from bertkit.bench.corpus import Made, bench_corpus, make_samples, write_text
from bertkit.bench.measure import BERTKIT, REFERENCE
from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.sources import read_documents
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.tokenizer import train_tokenizer
from bertkit.errors import UsageError

TOKENIZATION = '''
import six
import tensorflow as tf


class FullTokenizer(object):
    def __init__(self, vocab_file, do_lower_case=True):
        assert do_lower_case
        with tf.gfile.GFile(vocab_file, "r") as reader:
            self.vocab = {line.strip(): place for place, line in enumerate(reader)}

    def tokenize(self, text):
        assert six.PY3
        """Greedy pieces of words that are separated by blanks."""
        pieces = []
        for word in text.lower().split():
            start = 0
            while start < len(word):
                prefix = "##" if start else ""
                ends = range(len(word), start, -1)
                end = next(end for end in ends if prefix + word[start:end] in self.vocab)
                pieces.append(prefix + word[start:end])
                start = end
        return pieces
'''
CREATE = """
import collections
import tensorflow as tf
import tokenization

flags = tf.flags
FLAGS = flags.FLAGS
flags.DEFINE_string("input_file", None, "Its text.")
flags.DEFINE_bool("do_whole_word_mask", False, "Whether words are masked whole.")
flags.DEFINE_integer("max_seq_length", 128, "Its length.")
flags.DEFINE_float("masked_lm_prob", 0.15, "Its rate.")

Instance = collections.namedtuple("Instance", ["tokens", "is_random_next"])


def create_training_instances(files, tokenizer, max_seq_length, dupe_factor, short, rate, most, rng):
    assert (max_seq_length, short, rate, most) == (128, 0.1, 0.15, 20)
    assert not FLAGS.do_whole_word_mask
    assert "[MASK]" in list(tokenizer.vocab.keys())
    lines = []
    for name in files:
        with tf.gfile.GFile(name, "r") as reader:
            lines += [tokens for line in reader if (tokens := tokenizer.tokenize(line.strip()))]
    instances = []
    for _ in range(dupe_factor):
        for first, second in zip(lines[::2], lines[1::2]):
            tokens = ["[CLS]"] + first + ["[SEP]"] + second + ["[SEP]"]
            instances.append(Instance(tokens, rng.random() < 0.5))
    return instances


def main(_):
    tf.logging.info("never reached here")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a stand-in for google-research/bert."""
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "tokenization.py").write_text(TOKENIZATION, encoding="utf-8")
    (folder / "create_pretraining_data.py").write_text(CREATE, encoding="utf-8")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Text of 40 documents, the n-th of n % 16 + 2 sentences."""
    random = np.random.default_rng(0)
    words = np.array([f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in "lmnrst"])
    documents = [
        "\n".join(" ".join(random.choice(words, random.integers(4, 30))).capitalize() for _ in range(number % 16 + 2))
        for number in range(40)
    ]
    path = tmp_path / "source.txt"
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return str(path)


TEXT = {"characters": 4_000_000}
ROW = {"documents", "sentences", "characters", "vocabulary", "copies", "cores"}
MEASURED = {"made", "random_next", "fill", "seconds", "median_seconds", "tokens_per_second", "stages"}


def test_beside_a_reference_all_figures_are_there(checkout, source):
    modules, places = set(sys.modules), list(sys.path)
    lines = []
    found, (table,) = bench_corpus(checkout, source, report=lines.append, **TEXT, repeats=2, copies=3)

    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"bench", "machine", "data", "rows", "ratios"}
    assert (found["bench"], found["data"]) == ("corpus", source)
    row = found["rows"]["corpus"]
    assert set(row) == ROW | MEASURED | {"differ"}
    assert (row["documents"], row["sentences"], row["copies"]) == (40, sum(n % 16 + 2 for n in range(40)), 3)
    for key in MEASURED:
        assert set(row[key]) == {BERTKIT, REFERENCE}
    ours, theirs = row["made"][BERTKIT], row["made"][REFERENCE]
    assert ours["text_tokens"] == theirs["text_tokens"]  # the same text and vocabulary
    assert theirs["samples"] == row["sentences"] // 2 * 3
    assert theirs["tokens"] == 3 * (theirs["text_tokens"] + 3 * (row["sentences"] // 2))
    for side, made in row["made"].items():
        assert row["fill"][side] == pytest.approx(made["tokens"] / made["samples"] / 128)
        assert row["tokens_per_second"][side] == pytest.approx(made["tokens"] / np.mean(row["seconds"][side]))
        assert 0 < row["stages"][side]["tokenizing"] < row["median_seconds"][side]
        assert sum(row["stages"][side].values()) == pytest.approx(row["median_seconds"][side])
    rates = {side: made["tokens"] / np.array(row["seconds"][side]) for side, made in row["made"].items()}
    assert found["ratios"] == {"corpus": pytest.approx(np.mean(rates[BERTKIT] / rates[REFERENCE]))}  # the median of two
    assert "tokens" in row["differ"]  # the stand-in makes pairs of two sentences, however short
    assert [cells[0].lines[0][0] for cells in table.rows] == [BERTKIT, REFERENCE]
    assert "warning" in lines[-1]

    assert not {"tensorflow", "six", "tokenization", "create_pretraining_data"} & (set(sys.modules) - modules)
    assert sys.path == places
    assert sorted(path.name for path in checkout.iterdir()) == ["create_pretraining_data.py", "tokenization.py"]


def test_without_a_reference_there_is_our_own_rate_and_no_ratio(source):
    lines = []
    found, (table,) = bench_corpus(data=source, report=lines.append, **TEXT, repeats=1, copies=1)
    assert found["ratios"] == {}
    row = found["rows"]["corpus"]
    assert set(row) == ROW | MEASURED
    assert set(row["made"]) == set(row["seconds"]) == {BERTKIT}
    assert row["tokens_per_second"][BERTKIT] > 0
    assert len(table.rows) == 1
    assert not any("warning" in line for line in lines)


def test_the_ratio_is_of_tokens_a_second():
    seconds = {BERTKIT: [1.0, 4.0, 2.0], REFERENCE: [10.0, 12.0, 12.0]}
    made = {BERTKIT: [Made(1000, 100, 12_000, 51, 0.5)] * 3, REFERENCE: [Made(1000, 100, 11_900, 51, 9.0)] * 3}
    row, measured = bench.summarize(seconds, made)
    assert row["seconds"] == seconds
    assert row["tokens_per_second"] == {BERTKIT: 6000, REFERENCE: pytest.approx(11_900 / 12)}
    assert row["stages"][BERTKIT] == {"tokenizing": 0.5, "pairs_and_masks": 1.5}
    assert row["stages"][REFERENCE] == {"tokenizing": 9, "pairs_and_masks": 3}
    assert measured.compare(REFERENCE) == pytest.approx(6 * 12_000 / 11_900)  # of 10, 3 and 6
    assert row["differ"] == []


@pytest.mark.parametrize(
    ("theirs", "differ"),
    [
        (Made(1000, 1000, 110_000, 515, 1.0), []),
        (Made(1009, 1000, 110_000, 515, 1.0), []),
        (Made(1020, 1000, 110_000, 515, 1.0), ["text_tokens"]),
        (Made(1000, 1000, 110_000, 530, 1.0), ["random_next"]),
        (Made(1000, 1000, 108_000, 515, 1.0), ["tokens", "fill"]),
        (Made(1000, 900, 99_000, 464, 1.0), ["samples", "tokens"]),
        (Made(1000, 982, 110_000, 506, 1.0), ["samples", "fill"]),
    ],
)
def test_sides_that_do_another_job_are_told(theirs, differ):
    ours = Made(1000, 1000, 110_000, 515, 0.1)
    row, _ = bench.summarize({BERTKIT: [1.0], REFERENCE: [1.0]}, {BERTKIT: [ours], REFERENCE: [theirs]})
    assert row["differ"] == differ


def test_how_many_samples_there_are_may_be_chance():
    theirs = {"text_tokens": 1000, "samples": 982, "tokens": 110_000}
    row = {
        "made": {BERTKIT: theirs | {"samples": 1000}, REFERENCE: theirs},
        "random_next": {BERTKIT: 0.51, REFERENCE: 0.53},
        "fill": {BERTKIT: 0.859, REFERENCE: 0.875},
    }
    assert bench.list_differences(row, 0.001) == ["samples", "random_next", "fill"]
    assert bench.list_differences(row, 0.005) == ["random_next"]  # 2.1 % by chance
    assert bench.measure_spread([100, 110, 90, 100]) == pytest.approx(0.0816 / 2, rel=1e-3)


# --- The input, and this package's side -------------------------------------------------------------------------------


def test_the_text_has_a_sentence_a_line_and_a_blank_line_after_each_document(tmp_path):
    source, text = tmp_path / "source.txt", tmp_path / "text.txt"
    source.write_text(
        "One here.  Two\there. Three, too.\n\nFour\xa0here. Five.\n\nSix is too much.\n", encoding="utf-8"
    )
    written = write_text(str(source), text, 40)
    assert text.read_text(encoding="utf-8") == "One here.\nTwo here.\nThree, too.\n\nFour here.\nFive.\n\n"
    assert written == {"documents": 2, "sentences": 5, "characters": 44}


@pytest.mark.parametrize("cores", [1, 2])
def test_every_pair_of_every_copy_is_made_once(source, cores):
    documents = list(read_documents([source], split_sentences=False))
    tokenizer = train_tokenizer((line for document in documents for line in document), size=300)
    made = make_samples(Path(source), tokenizer, 2, cores)

    corpus = tokenize_documents(documents, tokenizer)
    options = {"max_length": 128, "seed": bench.REFERENCE_SEED, "short_seq_prob": 0.1}
    pairings = [Pairing(corpus, copy=copy, **options) for copy in (0, 1)]
    pairs = np.concatenate([pairing.draw_pairs(pairing.find_chunks()) for pairing in pairings])
    lengths = 3 + pairs[:, 1] - pairs[:, 0] + pairs[:, 3] - pairs[:, 2]
    assert made.text_tokens == corpus.token_count
    assert (made.samples, made.tokens) == (len(pairs), lengths.sum())
    assert made.random_next == pairs[:, 4].sum()
    assert made.tokenizing > 0


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        (None, None, "bert/tokenization.py is not a file"),
        ("tokenization.py", None, "tokenization.py is not a file"),
        ("create_pretraining_data.py", None, "create_pretraining_data.py is not a file"),
        ("tokenization.py", "", "has no function FullTokenizer"),
        ("tokenization.py", "class FullTokenizer: pass", "the reference's FullTokenizer fails (TypeError: "),
        ("create_pretraining_data.py", "import tokenization, that_is_missing", "cannot be imported (No module named"),
        ("create_pretraining_data.py", "def create(): pass", "has no function create_training_instances"),
        ("create_pretraining_data.py", "def create_training_instances(): pass", "create_training_instances fails (Typ"),
        (
            "create_pretraining_data.py",
            "def create_training_instances(*_): return [1]",
            "create_training_instances fails (AttributeError",
        ),
    ],
)
def test_a_checkout_that_is_none_is_one_line(checkout, source, tmp_path, file, content, complaint):
    if file is None:
        checkout.rename(tmp_path / "elsewhere")
    elif content is None:
        (checkout / file).unlink()
    else:
        (checkout / file).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        bench_corpus(checkout, source, **TEXT, repeats=1, copies=1)
    message = str(caught.value)
    assert complaint in message
    assert "\n" not in message
    assert "give a checkout of github.com/google-research/bert with --reference DIR" in message


def test_the_command_writes_its_figures_and_refuses_a_wrong_folder(call, checkout, source, tmp_path):
    command = ("bench", "corpus")
    figures = tmp_path / "figures.json"
    code, out, err = call(*command, "--data", source, "--reference", checkout, "--copies", 1, "--json", figures)
    assert (code, err) == (0, "")
    assert "the speedup of bertkit" in out
    assert set(json.loads(figures.read_text())["ratios"]) == {"corpus"}

    code, out, err = call(*command, "--reference", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "nothing/tokenization.py is not a file" in err
    assert call(*command, "--copies", 0)[0] == 2
