"""The learning rate, epochs, optimizer and start that the preset `auto` leaves to the training rows.

They are facts for `bertkit.training.recipe.resolve`, as are the tokens that fit into memory (`parts.py`). `settle`
gathers all of them, and loads the model.

The paper's few epochs at a low rate are for thousands of rows. On fewer rows fine-tuning fails mostly because it is too
short and Adam's bias is not corrected (Mosbach et al. 2021, Zhang et al. 2021): a training therefore has at least
ENOUGH_UPDATES updates in at least LEAST_EPOCHS epochs (the middle of A.3's range) and at most MOST_EPOCHS (20 in
Mosbach et al.). The rate is inversely proportional to the hidden size: 4e-5 for BERT-base, inside A.3's range, and
higher for smaller models, as in Turc et al. 2019. There is no early stop: the rate falls to zero over all updates.

A training of texts or words starts from a linear head that is solved on the vectors of the encoder as it is: linear
probing, then fine-tuning (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution").
Gradients are a slow way to this head, which is the solution of a convex problem. With `freeze = "encoder"` nothing else
is learned. Where the vectors tell little, as those of pairs do before a training, there is nothing to start from, and
the head is random.
"""

import copy
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import set_seed

from bertkit.data.sequences import collate
from bertkit.model.checkpoint import load_config
from bertkit.model.precision import choose_device
from bertkit.system.progress import Report, ignore
from bertkit.tasks.finetuning import ENOUGH_UPDATES
from bertkit.tasks.frozen import STRENGTHS, choose_head, encode_labelled, encode_sentences, measure_explained, solve
from bertkit.tasks.ner import get_words
from bertkit.tasks.prediction import check_types
from bertkit.tasks.task import Task
from bertkit.tasks.text import list_targets
from bertkit.training.network import load_head
from bertkit.training.parts import bound_tokens
from bertkit.training.prepare import Prepared, choose_rows
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import ADAPTED, Recipe, resolve

LEAST_EPOCHS, MOST_EPOCHS = 3, 20
RATE_TIMES_HIDDEN = 0.03
# Share of a constant answer's loss that a solved head explains: 0.01 on CoLA, 0.1 on 50 rows of SST-2
LEAST_EXPLAINED = 0.05
MOST_SOLVED, MOST_SOLVED_WORDS = 20_000, 50_000  # texts and words that a head is solved on
UNUSED = ("batch_size", "patience", *ADAPTED, "max_steps", "warmup_steps")  # keys of a training by gradients


def settle(
    task: Task, recipe: Recipe, first: str, prepared: Prepared, goes_on: bool, device: torch.device, report: Report
) -> tuple[Recipe, nn.Module]:
    """Return the recipe with what the data and the machine decide, and its model.

    Args:
        first: The directory of the training that comes before this one; empty without one.
        goes_on: Whether the run continues from a checkpoint, which has the model.
    """
    if "train" in prepared.data:
        recipe = resolve(recipe, describe_rows(recipe, len(prepared.data["train"]), report, prepared.pairs))
    start = resolve(recipe, {"checkpoint": first, "reinit_layers": 0}) if first else recipe
    set_seed(recipe.train["seed"])  # a run must not depend on whether its data were prepared here
    model, new = load_head(task, start, prepared.settings, report)
    rows = next(iter(prepared.data.values()))
    check_types(collate(rows.__getitems__([0])), model.config)
    if recipe.starts_solved and not goes_on and "train" in prepared.data:
        if recipe.is_solved or new:
            recipe = resolve(recipe, solve_start(task, recipe, model, prepared, report))
            set_seed(recipe.train["seed"])
            if not recipe.starts_solved:
                model, _ = load_head(task, resolve(start, {"start": recipe.start}), prepared.settings, report)
        else:
            report("the training starts from the classifier of the checkpoint, which is for these labels")
    return resolve(recipe, bound_tokens(recipe, task, model, rows, device)), model


def describe_rows(recipe: Recipe, rows: int, report: Report = ignore, pairs: bool = False) -> dict[str, Any]:
    """Return rate, epochs and optimizer for some training rows, which a preset other than `auto` has already.

    Args:
        rows: The number of training sequences.
        pairs: Whether they are pairs of texts, whose training starts at random.
    """
    facts: dict[str, Any] = {}
    if pairs and is_open(recipe):
        facts["start"] = start_at_random("the vectors of pairs tell little before a training", report)
    if recipe.preset != "auto" or recipe.is_solved:
        return facts
    hidden = load_config(recipe.checkpoint).hidden_size
    epochs = ceil(ENOUGH_UPDATES * recipe.batch_size / rows)
    values = {
        "optim": "adamw_torch",  # corrects the bias
        "learning_rate": float(f"{RATE_TIMES_HIDDEN / hidden:.2g}"),
        "num_train_epochs": float(min(max(epochs, LEAST_EPOCHS), MOST_EPOCHS)),
    }
    if recipe.train.get("max_steps", -1) > 0:
        del values["num_train_epochs"]
    if left := {key: value for key, value in values.items() if key not in recipe.train}:
        words = ", ".join(f"{key} {value}" for key, value in left.items())
        report(f"preset auto, for {rows:,} training sequences and a hidden size of {hidden}: {words}")
    return facts | left


def solve_start(task: Task, recipe: Recipe, model: nn.Module, prepared: Prepared, report: Report) -> dict[str, Any]:
    """Give a model the classifier that is solved on the training rows, and return what was chosen.

    Pooling and strength that the recipe leaves open are chosen by folds over the training rows; no row of dev decides.
    The first process does both, and sends the result to the others. Where the recipe leaves the start open and the
    chosen one is random, the model is as it was.
    """
    if recipe.is_solved:
        given = {**recipe.given, **recipe.given.get("train", {})}
        usual = {**task.recipe, **task.recipe["train"]}
        if unused := [key for key in UNUSED if given.get(key, usual.get(key)) != usual.get(key)]:
            report(f"unused, because the head of a frozen encoder is solved and not trained: {', '.join(unused)}")
    found = solve_first(task, recipe, model, prepared, report) if join_processes(recipe).is_main_process else None
    pooling, strength, weight, bias, share = take_first(found)
    if share < LEAST_EXPLAINED:  # NaN where nothing was measured
        reason = f"the vectors explain {max(share, 0.0):.1%} of the loss of a constant answer"
        return {"start": start_at_random(reason, report)}
    if pooling == "mean" and not model.config.mean_layer:
        model.bert.add_mean_layer()
    with torch.no_grad():
        model.classifier.weight.copy_(torch.from_numpy(weight))
        model.classifier.bias.copy_(torch.from_numpy(bias))
    facts = {"pooling": pooling} if pooling else {}
    return facts | {"strength": strength} | ({"start": "solved"} if is_open(recipe) else {})


def is_open(recipe: Recipe) -> bool:
    """Return whether the data decide how a training starts."""
    return recipe.start == "auto" and not recipe.is_solved


def start_at_random(reason: str, report: Report) -> str:
    """Say why an open start is random."""
    report(f"the head starts at random: {reason}")
    return "random"


def solve_words(
    task: Task, recipe: Recipe, model: nn.Module, prepared: Prepared, report: Report
) -> tuple[str, float, np.ndarray, np.ndarray, float]:
    """Return what `solve_first` does, with an empty pooling, of a head of words."""
    windows = get_words(prepared.data["train"]).merge()
    order = np.random.default_rng(0).permutation(len(windows))
    words = np.diff(windows.word_ends, prepend=0)[order].cumsum()
    numbers = np.sort(order[: max(int((words <= MOST_SOLVED_WORDS).sum()), 1)])
    encoder = copy.deepcopy(model.bert).eval().to(choose_device())
    vectors, targets, rows = encode_labelled(encoder, windows.__getitems__(numbers.tolist()), report)
    sentences = np.repeat(np.arange(len(prepared.groups)), [len(sentence.words) for sentence in windows.text.sentences])
    firsts = np.concatenate([[0], windows.word_ends[:-1]])[numbers]  # the first word of each window
    labels, strength, groups = model.config.num_labels, recipe.strength, prepared.groups[sentences[firsts]][rows]
    weights = prepared.settings.get("class_weights")
    if not strength:
        _, strength = choose_head({"": vectors}, targets, labels, groups, weights)
    share = measure_explained(vectors, targets, labels, groups, weights, strength) if is_open(recipe) else np.nan
    report(f"the head is solved on vectors of {len(targets):,} words: C = {strength:g}")
    return "", strength, *solve(vectors, targets, strength, labels, weights), share


def solve_first(
    task: Task, recipe: Recipe, model: nn.Module, prepared: Prepared, report: Report
) -> tuple[str, float, np.ndarray, np.ndarray, float]:
    """Return pooling, strength, weight (L, H) and bias (L,), and `measure_explained` if the start is open."""
    if "pooling" not in task.options:
        return solve_words(task, recipe, model, prepared, report)
    train, pooling = prepared.data["train"], recipe.data["pooling"]
    if model.config.mean_layer:
        pooling = "mean"
    elif model.config.is_decoder and pooling == "auto":
        pooling = "cls"
    rows = choose_rows(prepared.checked.keys["train"], MOST_SOLVED)
    encoder = copy.deepcopy(model.bert).eval().to(choose_device())
    vectors = encode_sentences(encoder, train.__getitems__(rows.tolist()), report)  # pooling -> (S, H)
    if pooling != "auto":
        vectors = {pooling: vectors[pooling]}
    weights = prepared.settings.get("class_weights")
    places, targets, row_weights = list_targets(train, rows)
    vectors, groups = {name: found[places] for name, found in vectors.items()}, prepared.groups[rows][places]
    if (scale := model.config.target_scale) is not None:
        targets = (targets - scale[0]) / scale[1]
    labels, strength = model.config.num_labels, recipe.strength
    strengths = (strength,) if strength else STRENGTHS
    if len(vectors) * len(strengths) > 1:
        pooling, strength = choose_head(vectors, targets, labels, groups, weights, strengths, row_weights)
    share = np.nan
    if is_open(recipe):
        share = measure_explained(vectors[pooling], targets, labels, groups, weights, strength, row_weights)
    report(f"the head is solved on vectors of {len(rows):,} texts: pooling {pooling}, C = {strength:g}")
    return pooling, strength, *solve(vectors[pooling], targets, strength, labels, weights, row_weights), share
