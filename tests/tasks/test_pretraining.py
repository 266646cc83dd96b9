"""Pre-training's data set is a pure function of position; its scores and baselines are correct."""

import json
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data.pretraining.dataset import Phase, PretrainingData
from bertkit.data.pretraining.tokenize import TokenizedCorpus, tokenize_documents
from bertkit.data.tokenizer import make_tokenizer
from bertkit.system.progress import ignore
from bertkit.tasks.pretraining import PRETRAINING, STARTER, check_words, choose_starter, hold_out, list_phases
from bertkit.tasks.task import score_summaries
from bertkit.training.recipe import merge, read_recipe
from tests.conftest import draft
from tests.corpora import list_documents

LETTERS = [a + b for a in "abcdefgh" for b in "abcdefgh"]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letters}" for letters in LETTERS)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(TOKENS, cased=False, max_length=64)


@pytest.fixture(scope="module")
def corpus():
    """Return thirty documents of one to twelve sentences of one to twenty tokens."""
    draw = np.random.default_rng(1)
    sentences = draw.integers(1, 20, size=200)
    documents = np.minimum(draw.integers(1, 12, size=60).cumsum(), 200)
    documents = np.unique(np.append(documents, 200))
    ids = draw.integers(5, len(TOKENS), size=sentences.sum()).astype(np.uint16)
    return TokenizedCorpus(ids, sentences.cumsum(), documents)


TWO_PHASES = (Phase(400, 32), Phase(80, 64))


def make_data(corpus, tokenizer, phases=TWO_PHASES, seed=3, **options):
    return PretrainingData(corpus, tokenizer, phases, PRETRAINING.recipe["data"] | options, seed)


def get_rows(batch):
    """Return the rows of a batch without padding, each as a dictionary of lists."""
    lengths = batch["attention_mask"].sum(1).tolist()
    names = ("input_ids", "token_type_ids", "labels")
    return [
        {name: batch[name][i, :length].tolist() for name in names} | {"next": batch["next_sentence_label"][i].item()}
        for i, length in enumerate(lengths)
    ]


def test_a_sample_does_not_depend_on_its_batch(corpus, tokenizer):
    """Samples do not depend on batch size, order, worker or object, so a run can resume anywhere."""
    whole = get_rows(make_data(corpus, tokenizer).__getitems__(range(300)))
    data = make_data(corpus, tokenizer)
    assert [get_rows(data[i])[0] for i in (299, 0, 150, 7)] == [whole[i] for i in (299, 0, 150, 7)]
    assert get_rows(data.__getitems__([40, 3, 299])) == [whole[i] for i in (40, 3, 299)]
    copied = pickle.loads(pickle.dumps(data))
    assert get_rows(copied.__getitems__(range(100, 120))) == whole[100:120]
    assert get_rows(make_data(corpus, tokenizer, seed=4).__getitems__(range(50))) != whole[:50]


def test_passes_are_counted_over_all_phases(corpus, tokenizer):
    data = make_data(corpus, tokenizer)
    short, long = (data.count_pairs(length) for length in (32, 64))
    assert short > long > 0
    assert data.passes == 400 / short + 80 / long
    data.phases = [Phase(3 * long, 64)]
    assert data.passes == 3


def test_an_epoch_takes_every_pair_of_a_copy_once(corpus, tokenizer):
    """Pairs are identified by the positions of their segments in the corpus."""
    numbered = replace(corpus, ids=np.arange(len(corpus.ids)))  # a token's value is its offset
    data = make_data(numbered, tokenizer, objective="clm")
    start, orders = 0, []
    for copy in range(2):
        pairing, chunks = data.plan(32, copy)
        expected = [[*range(a, b), *range(c, d)] for a, b, c, d, _ in pairing.draw_pairs(chunks).tolist()]
        batch = data.__getitems__(range(start, start + len(chunks)))
        ids, special = batch["input_ids"].numpy(), batch["labels"].numpy()  # [CLS] and [SEP] hide offsets 2 and 3
        found = [row[:length][1:-1].tolist() for row, length in zip(ids, (special != -100).sum(1) + 1, strict=True)]
        for row, segments in zip(found, batch["token_type_ids"].numpy(), strict=True):
            del row[int(np.argmax(segments)) - 2]  # the [SEP] between A and B
        assert sorted(found) == sorted(expected)
        assert found != expected
        orders.append(found)
        start += len(chunks)
    assert orders[0] != orders[1]


def test_a_sample_is_located_without_going_through_the_epochs(corpus, tokenizer):
    data = make_data(corpus, tokenizer, [Phase(100_000, 32)], dupe_factor=3)
    counts = [data.count_pairs(32, copy) for copy in range(3)]
    starts = np.concatenate([[0], np.cumsum(counts * (100_000 // sum(counts) + 1))])
    samples = [0, 3, 4, 5, 400, 5000, 20_000, 99_999, counts[0] - 1, counts[0], sum(counts) - 1, sum(counts)]
    epochs, numbers = data.locate(0, np.array(samples))
    expected = np.searchsorted(starts, samples, side="right") - 1
    assert epochs.tolist() == expected.tolist()
    assert numbers.tolist() == (np.array(samples) - starts[expected]).tolist()


def test_masks_are_drawn_afresh_when_a_copy_comes_again(corpus, tokenizer):
    data = make_data(corpus, tokenizer, [Phase(1000, 32)], dupe_factor=1)
    pairs = data.count_pairs(32)

    def collect(first):
        """Return the original tokens of each pair of an epoch -> its labels."""
        found = {}
        for row in get_rows(data.__getitems__(range(first, first + pairs))):
            original = [i if label == -100 else label for i, label in zip(row["input_ids"], row["labels"], strict=True)]
            found[tuple(original)] = row["labels"]
        return found

    one, other = collect(0), collect(pairs)
    assert one.keys() == other.keys()
    assert np.mean([one[key] != other[key] for key in one]) > 0.8


def test_a_batch_is_what_the_paper_describes(corpus, tokenizer):
    batch = make_data(corpus, tokenizer).__getitems__(range(200))
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    lengths, counts = mask.sum(1), (labels != -100).sum(1)
    assert ids.shape[1] == lengths.max() <= 32
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    assert (ids[torch.arange(200), lengths - 1] == tokenizer.sep_token_id).all()
    assert ((ids == tokenizer.pad_token_id) >= (mask == 0)).all()
    assert counts.tolist() == [min(5, max(1, round(0.15 * length))) for length in lengths.tolist()]
    assert 0.4 < batch["next_sentence_label"].float().mean() < 0.8


def test_the_phases_follow_one_another_in_whole_updates(corpus, tokenizer):
    data = make_data(corpus, tokenizer)
    assert len(data) == 480
    assert data.__getitems__(range(399, 400))["input_ids"].shape[1] <= 32
    assert data.__getitems__(range(400, 480))["input_ids"].shape[1] > 32
    for outside in ([480], [399, 400], [3, 480]):
        with pytest.raises(IndexError):
            data.__getitems__(outside)
    phases = [{"share": 0.9, "max_length": 128}, {"share": 0.1, "max_length": 512}]
    assert list_phases(draft(PRETRAINING, {"phase": phases})) == [Phase(900_000 * 256, 128), Phase(100_000 * 256, 512)]
    assert list_phases(draft(PRETRAINING)) == [Phase(1_000_000 * 256, 128)]


def test_documents_of_one_sentence_have_random_next_sentences_only_and_it_is_said(corpus, tokenizer):
    single = TokenizedCorpus(corpus.ids, corpus.sentence_ends, np.arange(1, len(corpus.sentence_ends) + 1))
    for given, objective, count in ((corpus, "mlm+nsp", 0), (single, "mlm", 0), (single, "mlm+nsp", 1)):
        recipe, lines = draft(PRETRAINING, {"data": {"objective": objective}}), []
        PRETRAINING.encode(given, tokenizer, recipe, "train", lines.append)
        assert sum("next sentence" in line for line in lines) == count
    assert lines[0].startswith("warning: 100% of the next sentences are random instead of half, as documents have one")


MESSAGES = [[f"{a}{b} {b}{a}" for a in "abcde" for b in "abcd"]]


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_without_next_sentences_lines_of_one_document_are_held_out(tokenizer, objective, refused):
    """A built corpus holds out the same lines; no line is lost or in both parts."""
    options, lines = {"heldout_share": 0.1, "objective": objective}, []
    parts = hold_out(MESSAGES, options, lines.append)
    assert lines == ["18 lines to train on, 2 held out"]
    assert [len(document) for document in parts["dev"]] == [1, 1]
    assert sorted(line for part in parts.values() for document in part for line in document) == MESSAGES[0]
    built = hold_out(tokenize_documents(MESSAGES, tokenizer), options, ignore)
    for part, corpus in built.items():
        assert list_documents(corpus) == list_documents(tokenize_documents(parts[part], tokenizer))
        PRETRAINING.encode(parts[part], tokenizer, draft(PRETRAINING, {"data": options}), part)
    with refused():
        hold_out(MESSAGES, {"heldout_share": 0.1, "objective": "mlm+nsp"}, ignore)


def test_three_lines_are_too_few_to_hold_any_out():
    lines: list[str] = []
    parts = hold_out([["one", "two", "three"]], {"heldout_share": 0.5, "objective": "mlm"}, lines.append)
    assert parts == {"train": [["one", "two", "three"]], "dev": [["one", "two", "three"]]}
    assert lines == ["3 lines; 3 are too few to hold any out, so the scores are on the training text"]


def test_passages_alone_are_read_if_asked_for(tmp_path):
    (tmp_path / "text.txt").write_text("Heading\n\nOne. Two.\n* item\n\nThree.\n")
    for passages, documents in ((False, 3), (True, 2)):
        options = PRETRAINING.recipe["data"] | {"corpus": [str(tmp_path / "text.txt")], "passages": passages}
        assert len(PRETRAINING.load(options, ignore)["train"]) == documents


def test_objectives(corpus, tokenizer):
    masked = make_data(corpus, tokenizer, objective="mlm").__getitems__(range(20))
    both = make_data(corpus, tokenizer).__getitems__(range(20))
    assert "next_sentence_label" not in masked
    assert torch.equal(masked["input_ids"], both["input_ids"])
    causal = make_data(corpus, tokenizer, objective="clm").__getitems__(range(20))
    assert "next_sentence_label" not in causal
    assert (causal["labels"][:, 0] == -100).all()
    real = causal["attention_mask"][:, 1:] == 1
    assert torch.equal(causal["labels"][:, 1:][real], causal["input_ids"][:, 1:][real])
    assert (causal["labels"][:, 1:][~real] == -100).all()


def test_recipes_that_make_no_sense_are_refused(refused):
    phases = [{"share": 1.0, "max_length": 64}]
    for change in (
        {"data": {"heldout_share": 1.0}},
        {"data": {"short_seq_prob": -0.1}},
        {"data": {"max_length": 32}, "phase": phases},
    ):
        with refused():
            PRETRAINING.check(draft(PRETRAINING, change))
    for change in ({}, {"phase": phases}):
        PRETRAINING.check(draft(PRETRAINING, change))


def test_whole_words_are_masked_together(corpus, tokenizer):
    batch = make_data(corpus, tokenizer, whole_word_masking=True).__getitems__(range(200))
    labels, mask = batch["labels"], batch["attention_mask"].bool()
    original = torch.where(labels == -100, batch["input_ids"], labels)
    piece = original >= 5 + len(LETTERS)
    inside = mask[:, 1:] & piece[:, 1:] & (original[:, :-1] > 4)
    together = (labels[:, 1:] != -100) == (labels[:, :-1] != -100)
    assert inside.sum() > 500
    assert together[inside].all()


def test_words_are_looked_for_by_tokens_not_by_letters(refused):
    """Six of eight words are Chinese, but only six of 22 letters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = make_tokenizer([*special, *"使用训练模型", "transformers", "bert"], cased=False)
    for text in ("使用Transformers训练BERT模型", "Transformers BERT Transformers BERT 模型"):
        corpus = tokenize_documents([[text]], tokenizer)
        with refused() if text.startswith("使") else nullcontext():
            check_words(corpus, tokenizer)


def test_words_of_text_without_spaces_are_masked_together():
    """Each side of a pair is 中国|的|首都|是|北京: three words of two characters and two of one.

    A pair has 8 + 8 + 3 = 19 tokens; with a probability of 0.1, round(1.9) = 2 are masked. If the first word drawn has
    two characters (6 of 10), they are both. If it has one (4 of 10), there is room for one more, so a word of two is
    skipped until another of one comes. Each character draws for itself: both are [MASK] in 0.8 * 0.8 of the cases.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = make_tokenizer([*special, *"中国的首都是北京"], cased=False)
    divided = tokenize_documents([["中国 的 首都 是 北京"]] * 2, tokenizer, "spaces")
    options = {"masked_lm_prob": 0.1, "whole_word_masking": True, "random_rate": 0.0, "same_rate": 0.2}
    batch = make_data(divided, tokenizer, [Phase(2000, 19)], **options, short_seq_prob=0.0).__getitems__(range(2000))
    labels, masked = batch["labels"].numpy(), batch["input_ids"].numpy() == tokenizer.mask_token_id
    assert batch["input_ids"].max() < len(tokenizer)
    assert labels.max() < len(tokenizer)
    words = ["".join(tokenizer.convert_ids_to_tokens(row[row != -100].tolist())) for row in labels]
    assert set(words) == {"中国", "首都", "北京", "的的", "的是", "是的", "是是"}
    assert np.mean(np.isin(words, ["中国", "首都", "北京"])) == pytest.approx(0.6, abs=0.04)
    assert np.mean(masked.sum(axis=1) == 2) == pytest.approx(0.64, abs=0.04)
    plain = make_data(divided, tokenizer, [Phase(2000, 19)], masked_lm_prob=0.1).__getitems__(range(50))
    assert plain["input_ids"].max() < len(tokenizer)
    assert (plain["labels"][:, 1:8] != -100).sum(0).min() > 0  # single characters of words, too


def test_baselines_by_hand(tokenizer):
    """Return two documents of two sentences; three of eight tokens are 7."""
    ids = np.array([7, 7, 8, 9, 7, 10, 11, 12], np.uint16)
    corpus = TokenizedCorpus(ids, np.array([2, 4, 6, 8]), np.array([2, 4]))
    data = make_data(corpus, tokenizer, [Phase(2, 16)])
    known = PRETRAINING.baseline(data, data)
    batch = data.__getitems__(range(2))
    targets = batch["labels"][batch["labels"] != -100].tolist()
    chances = {token: (np.sum(ids == token) + 1) / (len(ids) + len(TOKENS)) for token in targets}
    assert known["uniform_loss"] == pytest.approx(math.log(len(TOKENS)))
    assert known["unigram_loss"] == pytest.approx(-np.mean([math.log(chances[token]) for token in targets]))
    assert known["unigram_accuracy"] == np.mean([token == 7 for token in targets])
    share = batch["next_sentence_label"].float().mean().item()
    assert known["random_next"] == share
    assert known["nsp_majority"] == max(share, 1 - share)
    assert known["nsp_majority_error"] == pytest.approx(math.sqrt(share * (1 - share) / 2))


def test_scores_weigh_every_token_and_every_pair_once(corpus, tokenizer):
    """Two sequences with one and three masked tokens: the loss is the mean over four tokens, not over two means."""
    summaries = np.array([[2.0, 1, 0, 0.5, 1], [3.0, 3, 2, 1.5, 0]])
    scores = score_summaries(PRETRAINING, summaries, make_data(corpus, tokenizer))
    tokens = {"mlm_loss": 5 / 4, "mlm_accuracy": 2 / 4, "perplexity": math.exp(5 / 4)}
    assert scores == pytest.approx(tokens | {"nsp_loss": 1.0, "nsp_accuracy": 0.5})
    causal = score_summaries(PRETRAINING, summaries, make_data(corpus, tokenizer, objective="clm"))
    assert set(causal) == {"clm_loss", "clm_accuracy", "perplexity"}


def test_the_left_to_right_baseline_counts_separators(tokenizer, corpus):
    """Two of a pair's targets are [SEP], which no corpus contains."""
    data = make_data(corpus, tokenizer, [Phase(100, 32)], objective="clm")
    known = PRETRAINING.baseline(data, data)
    labels = data.__getitems__(range(100))["labels"]
    share = (labels[labels != -100] == tokenizer.sep_token_id).float().mean().item()
    assert share > 0.04
    entropy = -(share * math.log(share) + (1 - share) * math.log((1 - share) / (len(TOKENS) - 6)))
    assert known["unigram_loss"] == pytest.approx(entropy, rel=0.02)


def test_the_starter_is_the_recipe_of_the_demo():
    """`bertkit pretrain` does the same without options and with the recipe."""
    demo = read_recipe(Path(__file__).parents[2] / "recipes" / "demo" / "pretrain.toml")
    assert demo.pop("task") == "pretrain"
    assert json.loads(json.dumps(demo)) == STARTER
    continued = choose_starter({"checkpoint": "some/model"})
    assert not {"model", "phase"} & continued.keys()
    assert continued["data"] == {"corpus": ["docs"], "heldout_share": 0.05, "max_length": 64}


@pytest.mark.parametrize("checkpoint", [{}, {"checkpoint": "some/model"}])
@pytest.mark.parametrize(
    "lengths", [{"phase": [{"share": 1.0, "max_length": 32}]}, {"data": {"corpus": ["x.txt"], "max_length": 48}}]
)
def test_lengths_given_to_the_starter_are_those_of_the_run(lengths, checkpoint):
    given = lengths | checkpoint
    made = merge(PRETRAINING.recipe, choose_starter(given), given)
    assert made.get("phase", []) == lengths.get("phase", [])
    assert made["data"]["heldout_length"] == 0
    if "data" in lengths:
        assert made["data"]["max_length"] == 48


def test_pairs_held_out_are_as_long_as_asked(corpus, tokenizer):
    phases = [{"share": 0.9, "max_length": 16}, {"share": 0.1, "max_length": 64}]
    for length, longest in {0: 16, 48: 48}.items():
        recipe = draft(PRETRAINING, {"phase": phases, "data": {"heldout_length": length, "heldout_pairs": 50}})
        data = PRETRAINING.encode(corpus, tokenizer, recipe, "dev")
        assert len(data) == 50
        lengths = data.__getitems__(range(50))["attention_mask"].sum(1)
        assert longest - 8 < lengths.max() <= longest
