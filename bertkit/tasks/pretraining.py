"""Pre-training: masked LM and next sentence on raw text (paper sections 3.1, A.1 and A.2), as a Task.

One map-style data set covers the whole run: a position gives a phase, an epoch, a pair and its masks, all computed from
the seed. So the Trainer reads it in order, and a resumed run continues with exactly the batch it would have seen.

Differs from the paper: the reference code draws the masks of its ten copies of the data once; here every epoch draws
anew (the pairs still come from `dupe_factor` copies, used in turn).
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.pretraining.dataset import Phase, PretrainingData, take
from bertkit.data.pretraining.masking import check_rates
from bertkit.data.pretraining.sources import Document, is_built, read_documents
from bertkit.data.pretraining.store import open_corpus, read_manifest
from bertkit.data.pretraining.tokenize import TokenizedCorpus, choose_held_out, start_of, tokenize_documents
from bertkit.data.sequences import IGNORED
from bertkit.data.tokenizer import describe_vocabulary, load_tokenizer, make_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.model.config import BertConfig
from bertkit.reports.tables import ScoreRow
from bertkit.system.progress import Report
from bertkit.tasks import finetuning
from bertkit.tasks.task import Task, use_transformers

HEADS = {  # objective -> head; the second and third are rows of Table 5
    "mlm+nsp": "BertForPreTraining",
    "mlm": "BertForMaskedLM",
    "clm": "BertLMHeadModel",
}

PRETRAINING_RECIPE = {
    "task": "pretrain",
    "batch_size": 256,  # A.2
    "precision": "auto",
    "preset": "paper",
    "model": {},  # BERT-base: BertConfig's defaults
    "data": {
        "corpus": [],
        "vocab": "",
        "vocab_size": 30522,
        "cased": False,
        "objective": "mlm+nsp",
        "max_length": 128,  # where there is no [[phase]]
        "short_seq_prob": 0.1,
        "dupe_factor": 10,
        "masked_lm_prob": 0.15,  # section 3.1
        "mask_rate": 0.8,
        "random_rate": 0.1,
        "same_rate": 0.1,
        "whole_word_masking": False,
        "split_sentences": True,
        "heldout_share": 0.01,
        "heldout_pairs": 5000,  # evaluated at most
        "heldout_length": 0,  # of those pairs, at most; 0: that of the first phase
        "limit_characters": 0,  # 0: the whole corpus
    },
    "train": {
        "max_steps": 1_000_000,
        "learning_rate": 1e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.01,
        "warmup_steps": 10_000,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "optim": "bert_adam",
        "train_sampling_strategy": "sequential",  # the data set is in order already
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": 10_000,
        "logging_steps": 100,
        "save_steps": 10_000,
        "save_total_limit": 2,
        "seed": 42,
    },
}


FOREIGN_SHARE = 0.3  # of the tokens; above it a vocabulary is for another script
DOCUMENTS_SHOWN = 100  # of a built corpus, among which the predictions to look at are chosen

# What `bertkit pretrain` does when nobody names a recipe or a model: the recipe of `make demo`,
# recipes/demo/pretrain.toml.
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
    "train": {"max_steps": 3000, "learning_rate": 7e-4, "warmup_steps": 0.05, "eval_steps": 1500, "save_steps": 1500},
}


def list_phases(recipe: Mapping[str, Any]) -> list[Phase]:
    """The phases of a recipe; each is a whole number of updates."""
    steps, batch_size = recipe["train"]["max_steps"], recipe["batch_size"]
    given = recipe.get("phase") or [{"share": 1.0, "max_length": recipe["data"]["max_length"]}]
    bounds = [round(steps * share) for share in np.cumsum([0.0, *(phase["share"] for phase in given)])]
    return [
        Phase((stop - start) * batch_size, phase["max_length"])
        for phase, start, stop in zip(given, bounds, bounds[1:], strict=False)
        if stop > start
    ]


def estimate_cost(recipe: Mapping[str, Any]) -> float:
    """Multiplications of a run, roughly: the encoder's matrices at every token, the decoder's where it decodes."""
    model, options = BertConfig(**recipe["model"]), recipe["data"]
    hidden, decoded = model.hidden_size, 1.0 if options["objective"] == "clm" else options["masked_lm_prob"]
    layer = 4 * hidden**2 + 2 * hidden * model.intermediate_size
    decoder = hidden * (hidden + max(recipe["model"].get("vocab_size", 0), options["vocab_size"]))
    tokens = sum(phase.samples * phase.max_length for phase in list_phases(recipe))
    return tokens * (model.num_hidden_layers * layer + decoded * decoder)


def check(recipe: Mapping[str, Any]) -> None:
    """Nothing.

    Raises:
        UsageError: an unknown objective, rates that do not add up, a count or a share out of its range.
    """
    options = recipe["data"]
    if options["objective"] not in HEADS:
        raise UsageError(f"unknown objective {options['objective']!r} in [data]; the objectives are {', '.join(HEADS)}")
    check_rates(options["masked_lm_prob"], None, options["mask_rate"], options["random_rate"], options["same_rate"])
    ranges = {"dupe_factor": 1, "heldout_pairs": 1, "vocab_size": 1, "limit_characters": 0, "max_length": 5}
    for key, least in ranges.items():
        if options[key] < least:
            raise UsageError(f"{key} is {options[key]} in [data]; it must be at least {least}")
    if options["heldout_length"] != 0 and options["heldout_length"] < ranges["max_length"]:
        raise UsageError(
            f"heldout_length is {options['heldout_length']} in [data]; it must be at least {ranges['max_length']}, "
            "or 0 for the length of the first phase"
        )
    for key in ("short_seq_prob", "heldout_share"):
        if not 0 <= options[key] < 1:
            raise UsageError(f"{key} is {options[key]} in [data]; it must be at least 0 and below 1")
    if recipe.get("phase") and options["max_length"] != PRETRAINING_RECIPE["data"]["max_length"]:
        raise UsageError(
            f"max_length is {options['max_length']} in [data], but the recipe has phases with lengths of their own; "
            f"set 'phase=[{{share=1.0, max_length={options['max_length']}}}]' instead"
        )
    if recipe["train"].get("train_sampling_strategy") != "sequential" or recipe["train"].get("ignore_data_skip"):
        raise UsageError(
            "the samples of pretraining are in order already; leave train_sampling_strategy and ignore_data_skip out"
        )
    for key in ("freeze", "bilstm", "reinit_layers"):
        if recipe.get(key):
            raise UsageError(f"{key} is for fine-tuning; leave it out of a recipe for pretraining")
    if recipe["model"].get("type_vocab_size", 2) < 2:
        raise UsageError("type_vocab_size is below 2 in [model]; pairs have two segments")
    if "num_train_epochs" in recipe["train"] or recipe["train"].get("max_steps", 0) < 1:
        raise UsageError("pretraining is measured in updates; set max_steps in [train], and no num_train_epochs")


def name_head(options: Mapping[str, Any]) -> str:
    """The head of an objective."""
    return HEADS[options["objective"]]


def load(options: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """The documents to train on, and those held out: sentences, or token ids if a corpus has been built of them."""
    if not options["corpus"]:
        raise UsageError(
            "no corpus given; name a built corpus, text files, directories, a Hub data set or docs: --corpus PATH"
        )
    if any(is_built(source) for source in options["corpus"]):
        return load_built(options, report)
    report(f"reading {', '.join(options['corpus'])}")
    documents = list(
        read_documents(
            options["corpus"],
            split_sentences=options["split_sentences"],
            limit_characters=options["limit_characters"] or None,
            report=report,
        )
    )
    held_out = hold_out(len(documents), options["heldout_share"], report)
    if not held_out.any():
        return {"train": documents, "dev": documents}
    return {"train": list(compress(documents, ~held_out)), "dev": list(compress(documents, held_out))}


def load_built(options: Mapping[str, Any], report: Report) -> dict[str, TokenizedCorpus]:
    """As `load`, of a corpus that `bertkit corpus build` has made."""
    path = options["corpus"][0]
    if len(options["corpus"]) > 1:
        raise UsageError(f"{path} is a built corpus and stands alone; build one of all sources: bertkit corpus build")
    if options["limit_characters"] or not options["split_sentences"]:
        raise UsageError(
            f"{path} is a built corpus; limit_characters and split_sentences are for text, so leave them out"
        )
    report(f"opening {path}")
    corpus = open_corpus(path, report, verify=os.environ.get("LOCAL_RANK", "0") == "0")
    held_out = hold_out(corpus.document_count, options["heldout_share"], report)
    if not held_out.any():
        return {"train": corpus, "dev": corpus}
    return {"train": corpus.select(~held_out), "dev": corpus.select(held_out)}


def hold_out(count: int, share: float, report: Report) -> np.ndarray:
    """(count,) bool, the documents that are held out; the same ones for every seed of a run."""
    held_out = choose_held_out(count, share, seed=0)
    if held_out.any():
        report(f"{count - held_out.sum():,} documents to train on, {held_out.sum():,} held out")
    else:
        reason = "none are held out" if share == 0 else f"{count} are too few to hold any out"
        report(f"{count:,} documents; {reason}, so the scores are those of the training text")
    return held_out


def tokenize(recipe: Mapping[str, Any], examples: Mapping[str, Any], report: Report) -> Any:
    """The tokenizer: the built corpus's, `[data] vocab` if given, the checkpoint's if there is one, else a trained one.

    Raises:
        UsageError: a built corpus has another vocabulary than was asked for.
    """
    options = recipe["data"]
    asked = options["vocab"] or recipe.get("checkpoint")
    if isinstance(examples["train"], TokenizedCorpus):
        if asked:
            check_vocabulary(options["corpus"][0], load_tokenizer(asked), asked)
        return load_tokenizer(options["corpus"][0], cased=options["cased"] or None)
    if asked:
        return load_tokenizer(asked, cased=options["cased"] or None)
    sentences = (sentence for document in examples["train"] for sentence in document)
    report(f"training a vocabulary of {options['vocab_size']:,} tokens")
    tokens = train_vocabulary(sentences, size=options["vocab_size"], cased=options["cased"], report=report)
    lengths = [phase.max_length for phase in list_phases(recipe)]
    return make_tokenizer(tokens, cased=options["cased"], max_length=max(lengths))


def check_vocabulary(corpus: str | Path, tokenizer: Any, owner: str) -> None:
    """Nothing, or a UsageError: a built corpus has another vocabulary than the tokenizer of `owner`."""
    if describe_vocabulary(load_tokenizer(corpus)) != describe_vocabulary(tokenizer):
        raise UsageError(
            f"{corpus} was built with another vocabulary than that of {owner}; build a corpus with it: "
            "bertkit corpus build … --vocab DIR"
        )


def configure(recipe: Mapping[str, Any], tokenizer: Any, examples: Mapping[str, Any] | None) -> dict[str, Any]:
    """The vocabulary's size and padding token, and the direction of attention."""
    tokens = recipe["data"]["vocab_size"] if tokenizer is None else len(tokenizer)
    return {
        "vocab_size": max(recipe["model"].get("vocab_size", 0), tokens),
        "pad_token_id": 0 if tokenizer is None else tokenizer.pad_token_id,
        "is_decoder": recipe["data"]["objective"] == "clm",
    }


def encode(
    documents: list[Document] | TokenizedCorpus, tokenizer: Any, recipe: Mapping[str, Any], split: str
) -> PretrainingData:
    """Every sample of the run; of a split held out, a fixed choice of at most `heldout_pairs` pairs."""
    corpus = documents if isinstance(documents, TokenizedCorpus) else tokenize_documents(documents, tokenizer)
    options, seed, phases = recipe["data"], recipe["train"]["seed"], list_phases(recipe)
    if split != "train":
        data = PretrainingData(corpus, tokenizer, phases, options, seed=0)
        longest = options["heldout_length"] or phases[0].max_length
        data.phases = [Phase(min(options["heldout_pairs"], data.count_pairs(longest)), longest)]
        return data
    if corpus.directory is not None:  # a run that continues has its tokenizer from its own directory
        check_vocabulary(corpus.directory, tokenizer, "this run")
        unknown = read_manifest(corpus.directory)["statistics"]["unknown_rate"]
    else:
        unknown = np.count_nonzero(corpus.ids[:] == tokenizer.unk_token_id) / max(len(corpus.ids), 1)
    if unknown > FOREIGN_SHARE:
        raise UsageError(
            f"{unknown:.0%} of the text is {tokenizer.unk_token} to this vocabulary; "
            "give one that was made for such text, or none, and it is trained: leave --vocab out"
        )
    return PretrainingData(corpus, tokenizer, phases, options, seed)


# The columns of a summary, one row a sequence.
TOKEN_LOSS, TOKENS, TOKENS_RIGHT, NSP_LOSS, NSP_RIGHT = range(5)


def summarize(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, 5) float: sum of token losses, labelled tokens, right ones; next-sentence loss and whether right (or NaN).

    The model has decoded the labelled positions only (`targets_only`).
    """
    labelled = batch["labels"] != IGNORED  # (B, T); left to right, never the first token, so the order is the logits'
    rows, labels = labelled.nonzero()[:, 0], batch["labels"][labelled]  # (M,) each
    logits = (outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits).float()  # (M, V)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    columns = torch.stack([losses, torch.ones_like(losses), (logits.argmax(-1) == labels).float()], dim=1)  # (M, 3)
    summary = logits.new_full((len(batch["labels"]), 5), math.nan)
    summary[:, :3] = 0
    summary[:, :3].index_add_(0, rows, columns)
    if "next_sentence_label" in batch:
        relationship, label = outputs.seq_relationship_logits.float(), batch["next_sentence_label"]
        summary[:, NSP_LOSS] = nn.functional.cross_entropy(relationship, label, reduction="none")
        summary[:, NSP_RIGHT] = (relationship.argmax(-1) == label).float()
    return summary


def score(summaries: np.ndarray, data: PretrainingData) -> dict[str, float]:
    """`mlm_loss` (nats a token), `perplexity` and `mlm_accuracy`; with next sentences also `nsp_loss`, `nsp_accuracy`.

    Left to right the first ones are called `clm_loss` and `clm_accuracy`.

    Raises:
        UsageError: they are no numbers, as those of a model that has diverged.
    """
    objective = "clm" if data.options["objective"] == "clm" else "mlm"
    totals = summaries.sum(axis=0, dtype=np.float64)
    loss = totals[TOKEN_LOSS] / max(totals[TOKENS], 1)
    if not math.isfinite(loss):
        raise UsageError(finetuning.DIVERGED)
    scores = {
        f"{objective}_loss": loss,
        f"{objective}_accuracy": totals[TOKENS_RIGHT] / max(totals[TOKENS], 1),
        "perplexity": math.exp(min(loss, 700)),
    }
    if data.options["objective"] == "mlm+nsp":
        scores |= {"nsp_loss": totals[NSP_LOSS] / len(summaries), "nsp_accuracy": totals[NSP_RIGHT] / len(summaries)}
    return {name: float(value) for name, value in scores.items()}


def baseline(train: PretrainingData, dev: PretrainingData) -> dict[str, float]:
    """What knowing nothing, or only frequencies, scores on the held-out pairs.

    `uniform_loss` is ln V; `unigram_loss` the cross-entropy of the training text's token frequencies (plus one), and
    `unigram_accuracy` that of always naming the most frequent token; `nsp_majority` the share of the larger class and
    `nsp_majority_error` its standard error, `random_next` the share of pairs whose B is random, and `heldout_pairs`
    how many pairs there are.
    """
    counts = train.corpus.count_tokens(dev.vocab_size) + 1.0  # (V,)
    if train.options["objective"] == "clm":  # left to right the two [SEP] of a pair are predicted too
        counts[train.special["sep_id"]] += 2 * train.count_pairs(dev.phases[0].max_length)
    chances = np.log(counts / counts.sum())
    labels, following = [], []
    for start in range(0, len(dev), 1024):
        batch = dev.__getitems__(range(start, min(start + 1024, len(dev))))
        labels.append(batch["labels"][batch["labels"] != IGNORED].numpy())
        if "next_sentence_label" in batch:
            following.append(batch["next_sentence_label"].numpy())
    targets = np.concatenate(labels)
    baselines = {
        "uniform_loss": math.log(dev.vocab_size),
        "unigram_loss": float(-chances[targets].mean()),
        "unigram_accuracy": float((targets == counts.argmax()).mean()),
        "heldout_pairs": len(dev),
    }
    if following:
        random_next = float(np.concatenate(following).mean())
        majority = max(random_next, 1 - random_next)
        baselines |= {
            "random_next": random_next,
            "nsp_majority": majority,
            "nsp_majority_error": math.sqrt(majority * (1 - majority) / len(dev)),
        }
    return baselines


def show_examples(model: nn.Module, tokenizer: Any, examples: Mapping[str, Any], count: int = 5) -> list[str]:
    """Some held-out sentences, a word of each masked, with the model's three likeliest words; none left to right."""
    if model.config.is_decoder:
        return []
    longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    documents = examples["dev"]
    if isinstance(documents, TokenizedCorpus):
        documents = read_sentences(documents, tokenizer, DOCUMENTS_SHOWN)
    masked = choose_masked(documents, tokenizer, count, longest)
    guesses = fill_masks(model, tokenizer, [text for text, _ in masked])
    return [
        f"{text}  →  {', '.join(f'{word} {chance:.0%}' for word, chance in words)}  ({answer})"
        for (text, answer), words in zip(masked, guesses, strict=True)
    ]


def read_sentences(corpus: TokenizedCorpus, tokenizer: Any, count: int) -> list[Document]:
    """The first `count` documents, put together again from their tokens."""
    documents = []
    for start, end in zip(corpus.document_starts[:count], corpus.document_ends[:count], strict=True):
        sentences = np.arange(start, end)
        spans = zip(start_of(corpus.sentence_ends, sentences), corpus.sentence_ends[sentences], strict=True)
        documents.append([tokenizer.decode(corpus.ids[a:b].tolist()) for a, b in spans])
    return documents


def choose_masked(documents: Sequence[Document], tokenizer: Any, count: int, longest: int) -> list[tuple[str, str]]:
    """`count` sentences of different documents, of at most `longest` tokens, with one ordinary word masked; the words.

    A word is ordinary if it has four letters or more and is one token of the more frequent half of the vocabulary.
    """
    chosen: list[tuple[str, str]] = []
    for document in documents:
        sentence = min(document, key=lambda sentence: abs(len(sentence) - 70))
        words = sentence.split()
        places = sorted(range(1, len(words) - 1), key=lambda place: abs(place - len(words) // 2))
        for place in places:
            ids = tokenizer(words[place], add_special_tokens=False)["input_ids"]
            if len(words[place]) > 3 and words[place].isalpha() and len(ids) == 1 and ids[0] < len(tokenizer) // 2:
                text = " ".join([*words[:place], tokenizer.mask_token, *words[place + 1 :]])
                masked = tokenizer(text)["input_ids"]
                whole = len(masked) <= longest and masked.count(tokenizer.mask_token_id) == 1
                if whole and 40 <= len(sentence) <= 110:
                    chosen.append((text, words[place]))
                break
        if len(chosen) == count:
            break
    return chosen


@torch.no_grad()
def fill_masks(model: nn.Module, tokenizer: Any, texts: list[str], top: int = 3) -> list[list[tuple[str, float]]]:
    """For each text with one [MASK], none too long, the `top` likeliest tokens there, with their probabilities."""
    if not texts:
        return []
    batch = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    outputs = model(**batch)
    logits = outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits  # (B, T, V)
    chances = logits[batch["input_ids"] == tokenizer.mask_token_id].float().softmax(-1)  # (B, V)
    best = chances[:, : len(tokenizer)].topk(top)  # (B, top); the model may have room for more tokens
    return [
        list(zip(tokenizer.convert_ids_to_tokens(ids), values.tolist(), strict=True))
        for ids, values in zip(best.indices, best.values, strict=True)
    ]


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """How sure it is that the model has learned to tell sentences that follow from random ones."""
    if not metrics.get("nsp_majority_error"):
        return []
    distance = (metrics["nsp_accuracy"] - metrics["nsp_majority"]) / metrics["nsp_majority_error"]
    return [
        f"{metrics['heldout_pairs']:,} held-out pairs, {metrics['random_next']:.1%} of them random; next-sentence "
        f"accuracy is {distance:+.1f} standard errors from the larger class"
    ]


def suggest(output: Path, recipe: Mapping[str, Any]) -> list[str]:
    """What to do with a pretrained model; one that reads from left to right goes on so, and fills in no mask."""
    config = output / "config.json"
    is_causal = config.is_file() and json.loads(config.read_text()).get("is_decoder")
    objective = " --set data.objective=clm" if is_causal else ""
    use, text = ("text-generation", "This function") if is_causal else ("fill-mask", "This [MASK] returns the array.")
    call = f'from transformers import pipeline; print(pipeline("{use}", {json.dumps(str(output))})("{text}"))'
    run, more = quote(str(output)), quote(f"{output}-more")
    return [
        f"bertkit pretrain --model {run} --corpus your.txt{objective} --output {more}  # on your text",
        "bertkit pretrain --recipe recipes/pretrain/small.toml --corpus your.txt --output runs/small  # a larger model",
        use_transformers(call),
    ]


def start_small(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """STARTER; without its phases where lengths are given, and where a checkpoint is, which has its own sizes."""
    if given.get("checkpoint"):
        data = {key: STARTER["data"][key] for key in ("corpus", "heldout_share")}
        length = {} if given.get("phase") else {"max_length": 64}
        return {"batch_size": 64, "data": data | length, "train": STARTER["train"] | {"learning_rate": 1e-4}}
    if given.get("phase") or "max_length" in given.get("data", {}):
        data = {key: value for key, value in STARTER["data"].items() if key != "heldout_length"}
        return {key: value for key, value in STARTER.items() if key != "phase"} | {"data": data}
    return STARTER


PRETRAINING = Task(
    name="pretrain",
    recipe=PRETRAINING_RECIPE,
    stable={"train": {"optim": "adamw_torch"}},
    metric="perplexity",
    lower_is_better=True,
    check=check,
    head=name_head,
    load=load,
    tokenize=tokenize,
    configure=configure,
    encode=encode,
    collate=take,
    summarize=summarize,
    score=score,
    baseline=baseline,
    examples=show_examples,
    diagnose=diagnose,
    suggest=suggest,
    starter=start_small,
    table=(
        ScoreRow("masked-LM loss", "mlm_loss", {"ln V": "uniform_loss", "token frequencies": "unigram_loss"}),
        ScoreRow(
            "masked-LM accuracy", "mlm_accuracy", {"the most frequent token": "unigram_accuracy"}, unit="fraction"
        ),
        ScoreRow("left-to-right loss", "clm_loss", {"ln V": "uniform_loss", "token frequencies": "unigram_loss"}),
        ScoreRow(
            "left-to-right accuracy", "clm_accuracy", {"the most frequent token": "unigram_accuracy"}, unit="fraction"
        ),
        ScoreRow("next-sentence loss", "nsp_loss"),
        ScoreRow("next-sentence accuracy", "nsp_accuracy", {"the larger class": "nsp_majority"}, unit="fraction"),
    ),
    evaluation_options={"targets_only": True},
    reusable=False,  # the samples depend on the seed, the batch size and the length of the run
)
