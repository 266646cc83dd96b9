"""Pre-training: masked LM and next sentence on raw text (paper sections 3.1, A.1 and A.2), as a Task.

One map-style data set covers the whole run: a position gives a phase, an epoch, a pair and its masks, all computed from
the seed. Therefore the Trainer reads it in order, and a resumed run continues with exactly the batch it would have
seen.

Differs from the paper: the reference code draws the masks of its ten copies of the data once; here masks are drawn
afresh in every epoch (the pairs still come from `dupe_factor` copies, used in turn).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.pretraining.dataset import Phase, PretrainingData
from bertkit.data.pretraining.masking import check_rates
from bertkit.data.pretraining.sources import Document, is_built, read_documents
from bertkit.data.pretraining.statistics import PHASE_LENGTHS, measure_pairs, warn_of_random
from bertkit.data.pretraining.store import open_corpus, read_manifest
from bertkit.data.pretraining.tokenize import (
    TokenizedCorpus,
    check_documents,
    choose_held_out,
    tokenize_documents,
)
from bertkit.data.scripts import UNSPACED_CHARACTER
from bertkit.data.sequences import IGNORED
from bertkit.data.tokenizer import describe_vocabulary, load_tokenizer, train_tokenizer
from bertkit.errors import UsageError, raise_first
from bertkit.metrics.rows import WeightedScore
from bertkit.metrics.table import make_rows, read_facts, read_numbers
from bertkit.reports.tables import ScoreLine
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Answers, Decisions, Sums
from bertkit.tasks.option import PRETRAINING_OPTIONS, list_defaults
from bertkit.tasks.task import (
    BERT_TRAIN,
    PredictionSettings,
    Task,
    check_finite,
    refuse_tuning,
)

if TYPE_CHECKING:
    from torch import Tensor

HEADS = {  # objective -> head; the second and third are rows of Table 5, with the half-random pairs of the first (5.1)
    "mlm+nsp": "BertForPreTraining",
    "mlm": "BertForMaskedLM",
    "clm": "BertLMHeadModel",
}
KNOWN_LOSSES = {"ln V": "uniform_loss", "token frequencies": "unigram_loss"}
KNOWN_ACCURACY = {"the most frequent token": "unigram_accuracy"}
FOREIGN_SHARE = 0.3  # share of unknown tokens; above it a vocabulary is for another script
MOST_PASSES = 40  # most passes of a training over its text, A.2
FORECAST_CHARACTERS = 20_000_000  # characters of text for a forecast of a run's cost
TOKENS_ASKED = 100_000  # tokens that tell the script of a text
MOST_CONTINUING = 0.9  # share of tokens that continue a word; 0.4 in Chinese, 0.97 where a sentence is one word

# The defaults of `bertkit pretrain` without a recipe or a model: those of recipes/demo/pretrain.toml.
STARTER = {
    "batch_size": 128,
    "model": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "data": {"corpus": ["docs"], "vocab_size": 8192, "heldout_share": 0.05, "heldout_length": 64},
    "phase": [
        {"share": 0.6, "max_length": 16},
        {"share": 0.2, "max_length": 32},
        {"share": 0.15, "max_length": 64},
        {"share": 0.05, "max_length": 128},
    ],
    "train": {"max_steps": 3000, "learning_rate": 7e-4, "warmup_steps": 0.2, "eval_steps": 1500, "save_steps": 1500},
}


def choose_starter(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return STARTER without phases if a length is given, and without sizes if a checkpoint is given."""
    if given.get("checkpoint"):
        data = {key: STARTER["data"][key] for key in ("corpus", "heldout_share")}
        length = {} if given.get("phase") else {"max_length": 64}
        return {"batch_size": 64, "data": data | length, "train": STARTER["train"] | {"learning_rate": 1e-4}}
    if given.get("phase") or "max_length" in given.get("data", {}):
        data = {key: value for key, value in STARTER["data"].items() if key != "heldout_length"}
        return {key: value for key, value in STARTER.items() if key != "phase"} | {"data": data}
    return STARTER


def list_phases(recipe: Any) -> list[Phase]:
    """Return the phases of a recipe, each a whole number of updates."""
    steps, batch_size = recipe.train["max_steps"], recipe.batch_size
    given = recipe.phase or [{"share": 1.0, "max_length": recipe.data["max_length"]}]
    bounds = [round(steps * share) for share in np.cumsum([0.0, *(phase["share"] for phase in given)])]
    return [
        Phase((stop - start) * batch_size, phase["max_length"])
        for phase, start, stop in zip(given, bounds, bounds[1:], strict=False)
        if stop > start
    ]


# The columns of a summary, one row a sequence.
TOKEN_LOSS, TOKENS, TOKENS_RIGHT, NSP_LOSS, NSP_RIGHT = range(5)
COLUMNS = ("token_loss", "tokens", "tokens_right", "nsp_loss", "nsp_accuracy")  # columns of the prediction table


class PretrainingTask(Task):
    """Predict masked tokens, and whether the second text of a pair follows the first."""

    name = command = "pretrain"
    head = HEADS["mlm+nsp"]
    heads: Mapping[str, Mapping[str, str]] = {"objective": HEADS}
    next_commands = (
        "bertkit classify --model {run} --data FILE.csv --output runs/classify  # fine-tune it",
        "bertkit pretrain --model {run} --corpus your.txt --set data.objective={objective} --output {run}-more",
        "bertkit pretrain --recipe recipes/pretrain/small.toml --corpus your.txt --output runs/small  # a larger model",
    )
    metric = "perplexity"
    lower_is_better = True
    reusable = False  # the samples depend on the seed, the batch size and the length of the run
    evaluation_options: Mapping[str, Any] = {"targets_only": True}
    stable: Mapping[str, Any] = {"train": {"optim": "adamw_torch"}}
    options = PRETRAINING_OPTIONS
    recipe: Mapping[str, Any] = {
        "task": "pretrain",
        "batch_size": 256,  # A.2
        "precision": "auto",
        "preset": "paper",
        "model": {},  # BERT-base: BertConfig's defaults
        "data": list_defaults(PRETRAINING_OPTIONS),
        "train": {
            **BERT_TRAIN,
            "max_steps": 1_000_000,
            "learning_rate": 1e-4,
            "warmup_steps": 10_000,
            "train_sampling_strategy": "sequential",  # the data set is in order already
            "eval_on_start": True,
            "eval_strategy": "steps",
            "eval_steps": 10_000,
            "logging_steps": 100,
            "save_steps": 10_000,
            "save_total_limit": 2,
        },
    }
    table = (
        ScoreLine("masked-LM loss", "mlm_loss", KNOWN_LOSSES),
        ScoreLine("masked-LM accuracy", "mlm_accuracy", KNOWN_ACCURACY, unit="fraction"),
        ScoreLine("left-to-right loss", "clm_loss", KNOWN_LOSSES),
        ScoreLine("left-to-right accuracy", "clm_accuracy", KNOWN_ACCURACY, unit="fraction"),
        ScoreLine("next-sentence loss", "nsp_loss"),
        ScoreLine("next-sentence accuracy", "nsp_accuracy", {"the larger class": "nsp_majority"}, unit="fraction"),
    )

    # --- The recipe ---------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check also the objective, the rates, the lengths, and the absence of fine-tuning options."""
        options, length = recipe.data, recipe.data["max_length"]
        super().check(recipe)
        check_rates(options["masked_lm_prob"], options["mask_rate"], options["random_rate"], options["same_rate"])
        refuse_tuning(recipe, "pretraining")
        troubles = {
            f"max_length is {length} in [data], but the recipe has phases with lengths of their own; set "
            f"'phase=[{{share=1.0, max_length={length}}}]' instead": (
                recipe.phase and length != self.options["max_length"].default
            ),
            "the order of pretraining samples is fixed; remove train_sampling_strategy": (
                recipe.train.get("train_sampling_strategy") != "sequential"
            ),
            "pretraining is measured in updates; set max_steps in [train] instead of num_train_epochs": (
                "num_train_epochs" in recipe.train or recipe.train.get("max_steps", 0) < 1
            ),
        }
        raise_first(troubles)

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(self, options: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Read the documents to train on, and those held out: sentences, or token ids of a built corpus."""
        if not options["corpus"]:
            raise UsageError(
                "no corpus given; give a built corpus, text files, directories, a Hub data set or docs with --corpus"
            )
        path = options["corpus"][0]
        if any(map(is_built, options["corpus"])):
            if len(options["corpus"]) > 1:
                raise UsageError(
                    f"{path} is a built corpus and must be the only one; build one from all sources with bertkit "
                    "corpus build"
                )
            report(f"opening {path}")
            corpus = open_corpus(path, report, verify=os.environ.get("LOCAL_RANK", "0") == "0")
            if options["words"] and not corpus.word_offset:
                raise UsageError(f"{path} was built without data.words; build it with --words {options['words']}")
            return hold_out(corpus, options, report)
        limit, names = options["limit_characters"] or None, ", ".join(options["corpus"])
        if options.get("is_forecast"):  # the time of an update does not depend on the rest
            limit = min(limit or FORECAST_CHARACTERS, FORECAST_CHARACTERS)
            names = f"at most {limit:,} characters of {names}"
        report(f"reading {names}")
        how = {name: options[name] for name in ("split_sentences", "passages", "words")}
        documents = list(read_documents(options["corpus"], **how, limit_characters=limit, report=report))
        return hold_out(documents, options, report)

    def tokenize(self, recipe: Any, examples: Mapping[str, Any], report: Report) -> Any:
        """Return the tokenizer: the built corpus's, `[data] vocab` if given, the checkpoint's else a trained one."""
        options = recipe.data
        asked = options["vocab"] or recipe.checkpoint
        if isinstance(examples["train"], TokenizedCorpus):
            if asked:
                check_vocabulary(options["corpus"][0], load_tokenizer(asked), asked)
            return load_tokenizer(options["corpus"][0], cased=options["cased"] or None, report=report)
        if asked:
            return load_tokenizer(asked, cased=options["cased"] or None, report=report)
        sentences = (sentence for document in examples["train"] for sentence in document)
        if options["words"]:
            sentences = ("".join(sentence.split()) for sentence in sentences)
        report(f"training a vocabulary of {options['vocab_size']:,} tokens")
        longest = max(phase.max_length for phase in list_phases(recipe))
        trained = {"size": options["vocab_size"], "cased": options["cased"], "max_length": longest}
        return train_tokenizer(sentences, report=report, **trained)

    def configure(self, recipe: Any, tokenizer: Any, examples: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the vocabulary's size and padding token, and the direction of attention."""
        tokens = recipe.data["vocab_size"] if tokenizer is None else len(tokenizer)
        return {
            "vocab_size": max(recipe.model.get("vocab_size", 0), tokens),
            "pad_token_id": 0 if tokenizer is None else tokenizer.pad_token_id,
            "is_decoder": recipe.data["objective"] == "clm",
        }

    def encode(
        self,
        documents: list[Document] | TokenizedCorpus,
        tokenizer: Any,
        recipe: Any,
        split: str,
        report: Report = ignore,
    ) -> PretrainingData:
        """Return all samples of the run, or of a held-out split a fixed choice of at most `heldout_pairs` pairs."""
        options, seed, phases = recipe.data, recipe.train["seed"], list_phases(recipe)
        is_tokenized = isinstance(documents, TokenizedCorpus)
        corpus = documents if is_tokenized else tokenize_documents(documents, tokenizer, options["words"])
        has_pairs = options["objective"] == "mlm+nsp"
        check_documents(corpus.document_count, has_pairs)  # documents without a token are left out
        if split != "train":
            data = PretrainingData(corpus, tokenizer, phases, options, seed=0)
            longest = options["heldout_length"] or phases[0].max_length
            data.phases = [Phase(min(options["heldout_pairs"], data.count_pairs(longest)), longest)]
            return data
        if corpus.directory is not None:  # a run that continues has its tokenizer from its own directory
            check_vocabulary(corpus.directory, tokenizer, "this run")
            statistics = read_manifest(corpus.directory)["statistics"]
            unknown, pairs = statistics["unknown_rate"], statistics["pairs"][str(PHASE_LENGTHS[0])]
        else:
            ids = corpus.strip_words(corpus.ids[:])
            unknown = np.count_nonzero(ids == tokenizer.unk_token_id) / max(len(ids), 1)
            pairs = measure_pairs(corpus, PHASE_LENGTHS[0]) if has_pairs else {}
        if unknown > FOREIGN_SHARE:
            raise UsageError(
                f"{unknown:.0%} of the text is {tokenizer.unk_token} in this vocabulary; "
                "give one that fits the text, or remove --vocab to train one"
            )
        if options["whole_word_masking"]:
            check_words(corpus, tokenizer)
        for line in warn_of_random(pairs["random_next"]) if has_pairs else ():
            report(line)
        data = PretrainingData(corpus, tokenizer, phases, options, seed)
        if not options.get("is_forecast") and data.passes > MOST_PASSES:
            report(
                f"warning: the training passes its text {data.passes:,.0f} times (the paper: {MOST_PASSES}); give more "
                "text, or fewer updates with --steps"
            )
        return data

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(
        self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings | None = None
    ) -> "Tensor":
        """Return (B, 5) float: token losses, labelled tokens, right ones; next-sentence loss and whether right.

        The model has decoded the labelled positions only (`targets_only`).
        """
        import torch
        from torch.nn.functional import cross_entropy

        # Left to right the first token is never labelled, so labels and logits have the same order.
        labelled = batch["labels"] != IGNORED  # (B, T)
        rows, labels = labelled.nonzero()[:, 0], batch["labels"][labelled]  # (M,) each
        logits = (outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits).float()  # (M, V)
        losses = cross_entropy(logits, labels, reduction="none")
        columns = torch.stack([losses, torch.ones_like(losses), (logits.argmax(-1) == labels).float()], dim=1)  # (M, 3)
        summary = logits.new_full((len(batch["labels"]), 5), math.nan)
        summary[:, :3] = 0
        summary[:, :3].index_add_(0, rows, columns)
        if "next_sentence_label" in batch:
            relationship, label = outputs.seq_relationship_logits.float(), batch["next_sentence_label"]
            summary[:, NSP_LOSS] = cross_entropy(relationship, label, reduction="none")
            summary[:, NSP_RIGHT] = (relationship.argmax(-1) == label).float()
        return summary

    def decode(self, summaries: np.ndarray, data: PretrainingData, decided: Decisions | None = None) -> Answers:
        """Return the summed losses of each sequence in nats, and how many tokens and next sentences are right."""
        objective = data.options["objective"]
        columns = COLUMNS if objective == "mlm+nsp" else COLUMNS[:NSP_LOSS]
        check_finite(summaries[:, TOKEN_LOSS])
        sums = dict(zip(columns, summaries.T.astype(np.float32), strict=False))
        return Sums(make_rows(sums, objective="clm" if objective == "clm" else "mlm"))

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return `mlm_loss` (nats a token), `perplexity`, `mlm_accuracy`; with pairs also `nsp_loss`, `nsp_accuracy`.

        Left to right the first ones are called `clm_loss` and `clm_accuracy`.
        """
        objective = read_facts(rows)["objective"]
        names = [name for name in COLUMNS if name in rows.column_names]
        totals = dict(zip(names, np.stack([read_numbers(rows, name) for name in names], axis=1).sum(0), strict=True))
        loss, accuracy = (totals[name] / max(totals["tokens"], 1) for name in ("token_loss", "tokens_right"))
        scores = {f"{objective}_loss": loss, f"{objective}_accuracy": accuracy, "perplexity": math.exp(min(loss, 700))}
        scores |= {name: totals[name] / len(rows) for name in names[NSP_LOSS:]}
        return {name: float(value) for name, value in scores.items()}

    def baseline(self, train: PretrainingData, dev: PretrainingData) -> dict[str, float]:
        """Return the scores of uniform and of frequency-based predictions on the held-out pairs.

        `uniform_loss` is ln V; `unigram_loss` the cross-entropy of the training text's token frequencies (plus one),
        and `unigram_accuracy` that of always naming the most frequent token; `nsp_majority` the larger class, and
        `nsp_majority_error` its standard error, `random_next` the share of pairs whose B is random, and `heldout_pairs`
        how many pairs there are.
        """
        counts = train.corpus.count_tokens(dev.vocab_size) + 1.0  # (V,)
        if train.options["objective"] == "clm":  # left to right the two [SEP] of a pair are predicted too
            counts[train.special["sep_id"]] += 2 * train.count_pairs(dev.phases[0].max_length)
        chances = np.log(counts / counts.sum())
        batch = dev.__getitems__(range(len(dev)))
        targets = batch["labels"][batch["labels"] != IGNORED].numpy()
        baselines = {
            "uniform_loss": math.log(dev.vocab_size),
            "unigram_loss": float(-chances[targets].mean()),
            "unigram_accuracy": float((targets == counts.argmax()).mean()),
            "heldout_pairs": len(dev),
        }
        if "next_sentence_label" in batch:
            random_next = float(batch["next_sentence_label"].numpy().mean())
            majority = max(random_next, 1 - random_next)
            baselines |= {
                "random_next": random_next,
                "nsp_majority": majority,
                "nsp_majority_error": math.sqrt(majority * (1 - majority) / len(dev)),
            }
        return baselines

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return also the significance of the next-sentence accuracy."""
        lines = super().comment(metrics)
        if metrics.get("nsp_majority_error"):
            distance = (metrics["nsp_accuracy"] - metrics["nsp_majority"]) / metrics["nsp_majority_error"]
            lines.append(
                f"{metrics['heldout_pairs']:,} held-out pairs, {metrics['random_next']:.1%} of them random; "
                f"next-sentence accuracy is {distance:+.1f} standard errors from the larger class"
            )
        return lines


def hold_out(documents: list[Document] | TokenizedCorpus, options: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Return the documents of "train", and those held out as "dev"; the same ones for every seed of a run.

    Lines are held out where there are too few documents and no next sentences, which need whole documents.
    """
    is_tokenized, has_pairs = isinstance(documents, TokenizedCorpus), options["objective"] == "mlm+nsp"
    count, share = documents.document_count if is_tokenized else len(documents), options["heldout_share"]
    check_documents(count, has_pairs)
    unit, chosen = "documents", choose_held_out(count, share, seed=0)
    held_out = chosen
    if share and not has_pairs and not chosen.any():
        unit, chosen = "lines", choose_held_out(int(count_lines(documents).sum()), share, seed=0)
        documents, held_out = divide_at_lines(documents, chosen)
    if not chosen.any():
        reason = "none are held out" if share == 0 else f"{len(chosen)} are too few to hold any out"
        report(f"{len(chosen):,} {unit}; {reason}, so the scores are on the training text")
        return {"train": documents, "dev": documents}
    report(f"{len(chosen) - chosen.sum():,} {unit} to train on, {chosen.sum():,} held out")
    parts = {"train": ~held_out, "dev": held_out}
    return {
        name: documents.select(part) if is_tokenized else list(compress(documents, part))
        for name, part in parts.items()
    }


def count_lines(documents: list[Document] | TokenizedCorpus) -> np.ndarray:
    """Return the number of lines of each document (D,)."""
    if isinstance(documents, TokenizedCorpus):
        return np.diff(documents.document_ends, prepend=0)
    return np.array([len(document) for document in documents])


def divide_at_lines(
    documents: list[Document] | TokenizedCorpus, chosen: np.ndarray
) -> tuple[list[Document] | TokenizedCorpus, np.ndarray]:
    """Divide documents so that each of the chosen lines (S,) is a document, and return whether a document is (D,)."""
    begins = chosen | np.roll(chosen, 1)
    sizes = count_lines(documents)
    begins[np.cumsum(sizes) - sizes] = True
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(chosen))
    if isinstance(documents, TokenizedCorpus):
        return replace(documents, document_starts=starts, document_ends=stops), chosen[starts]
    lines = list(chain.from_iterable(documents))
    return [lines[start:stop] for start, stop in zip(starts, stops, strict=True)], chosen[starts]


def check_words(corpus: TokenizedCorpus, tokenizer: Any) -> None:
    """Check that a text whose words are to be masked has spaces between words."""
    ids = corpus.ids[:TOKENS_ASKED]
    if corpus.word_offset:
        if (ids >= corpus.word_offset).mean() > MOST_CONTINUING:
            raise UsageError(
                "data.words=spaces finds hardly any spaces in the text; divide it into words by spaces with a program "
                "of your choice"
            )
        return
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist(), skip_special_tokens=True)
    words = [token for token in tokens if any(map(str.isalpha, token))]
    if 2 * sum(bool(UNSPACED_CHARACTER.match(word.removeprefix("##"))) for word in words) > len(words):
        raise UsageError(
            "whole_word_masking finds no words in a text of a script without spaces; divide it into words by spaces "
            "with a program of your choice and set data.words=spaces (corpus build: --words spaces)"
        )


def check_vocabulary(corpus: str | Path, tokenizer: Any, owner: str) -> None:
    """Check that a built corpus has the vocabulary of the tokenizer of `owner`, else raise a UsageError."""
    if describe_vocabulary(load_tokenizer(corpus)) != describe_vocabulary(tokenizer):
        raise UsageError(
            f"{corpus} was built with a different vocabulary from that of {owner}; build one with it: "
            "bertkit corpus build … --vocab DIR"
        )


PRETRAINING = PretrainingTask()
