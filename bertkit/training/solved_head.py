"""Solve the head of a frozen encoder: vectors computed once, a linear head by scikit-learn, its penalty by score.

Gradients are a slow way to this head: at the rates of fine-tuning it hardly moves, and the best one is the solution of
a convex problem. The solution is set on the model, which is then scored, saved and used as any other.
"""

import numpy as np
import torch
from torch import nn

from bertkit.system.progress import Report
from bertkit.tasks.finetuning import SOLVED
from bertkit.tasks.frozen import encode_items, solve
from bertkit.tasks.task import TUNE, Task, score_summaries
from bertkit.training.prepare import Prepared
from bertkit.training.processes import join_processes
from bertkit.training.recipe import ADAPTED, Recipe

TRIED_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
UNUSED = ("batch_size", "patience", *ADAPTED, "max_steps", "warmup_steps")  # keys of a training by gradients


def solve_head(task: Task, recipe: Recipe, model: nn.Module, prepared: Prepared, report: Report) -> dict[str, float]:
    """Give a model with a frozen encoder the classifier whose strength has the best score on the rows that choose.

    Returns:
        The strength, as metrics.json records it.
    """
    given = {**recipe.given, **recipe.given.get("train", {})}
    usual = {**task.recipe, **task.recipe["train"]}
    if unused := [key for key in UNUSED if given.get(key, usual.get(key)) != usual.get(key)]:
        report(f"unused, because the head of a frozen encoder is solved and not trained: {', '.join(unused)}")
    split = TUNE if TUNE in prepared.data else next(iter(task.splits))
    train, chooses = prepared.data["train"], prepared.data[split]
    report(f"solving the head on frozen vectors ({recipe.data['pooling']}) of {len(train):,} texts")
    with join_processes(recipe).main_process_first():  # the others read the first one's vectors
        vectors, others = (
            encode_items(model.bert, data.__getitems__(range(len(data))), recipe.data["pooling"], report)
            for data in (train, chooses)
        )
    weights = prepared.settings.get("class_weights")
    heads = [solve(vectors, train.labels, strength, model.config.num_labels, weights) for strength in TRIED_STRENGTHS]
    scores = [score_summaries(task, others @ weight.T + bias, chooses)[task.metric] for weight, bias in heads]
    best = int(np.nan_to_num(scores, nan=-np.inf).argmax())
    with torch.no_grad():
        for parameter, values in zip((model.classifier.weight, model.classifier.bias), heads[best], strict=True):
            parameter.copy_(torch.from_numpy(values))
    # The solved head computes the numbers themselves.
    model.config.learned_scale, model.config.target_scale = model.config.target_scale, None
    report(f"the strength C = {TRIED_STRENGTHS[best]:g} is the best of {len(heads)} on {split}")
    return {SOLVED: TRIED_STRENGTHS[best]}
