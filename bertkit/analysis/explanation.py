"""Explain results: attribute a class, an answer or a name to the words of the input.

The logits that decided a result are attributed to the token embeddings by integrated gradients (Sundararajan et al.
2017, "Axiomatic Attribution for Deep Networks"; captum): the gradient is integrated on the straight line from a
baseline, in which every token but [CLS] and [SEP] is [MASK], to the input. [MASK] is the one token that pre-training
has taught to stand for a word that is not known; [PAD] is never computed on here, so its embedding is arbitrary. A
word's attribution is the sum over its tokens. All attributions add up to the logit's rise above the baseline, except
for the error of the integral, which is reported as a share of the logit; steps are doubled until it is small.

The model runs on the padded path, in fp32. Left out: heads without targets, and exports, which have no
gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.analysis.targets import NO_WORD, find_explainer
from bertkit.data.formats.rows import Input, Line
from bertkit.errors import UsageError, name_extra
from bertkit.inference.predictor import Predictor, take_rows
from bertkit.model.bilstm_heads import BertFeaturesForTokenClassification
from bertkit.model.onnx import OnnxModel
from bertkit.tasks.prediction import run_model
from bertkit.tasks.task import PredictionSettings, Result

EXPLANATIONS = "explanations.jsonl"  # among the predictions of a run: the results for its report page
FIRST_STEPS, MOST_STEPS = 32, 512  # of the integral
MOST_ERROR = 0.005  # of the logit; steps are doubled until the error is below it
LEAST_LOGIT = 1e-6  # in the denominator of the error
TOKENS_AT_ONCE = 2048  # in the batches of the integral
MOST_NAMED_WORDS = 5  # in a line


def explain(
    predictor: Predictor, inputs: Iterable[Input | Sequence[str] | Line], at_once: int | None = None
) -> Iterator[Result]:
    """Yield the result of each input, as `Predictor.stream` does, with the key `explanation`.

    It is a list with an entry for the predicted class, for each predicted label or score, for the best span, or for
    each entity. An entry has the explained `target` in words, its `logit` and that of the `baseline`, the completeness
    `error` (a share of the logit), and `words` that the model has read: each with the `field` of the input, `text`,
    `start` and `end` (as for the results) and `attribution`.

    Raises:
        UsageError: The predictor's results cannot be explained (`check_explainable`).
    """
    check_explainable(predictor)
    inputs, again = tee(take_rows(inputs))
    for given, result in zip(again, predictor.stream(inputs, at_once), strict=True):
        if "error" not in result:
            example = predictor.read(given.value if isinstance(given, Line) else given)
            result = result | {"explanation": explain_example(predictor, example, result)}
        yield result


def check_explainable(predictor: Predictor) -> None:
    """Check that captum is installed and that the predictor's results can be explained.

    Raises:
        UsageError: They cannot.
    """
    settings = predictor.settings
    if isinstance(settings.model, OnnxModel):
        raise UsageError("an export has no gradients to explain its results by; explain the run it was made from")
    if find_explainer(predictor.task) is None or isinstance(settings.model, BertFeaturesForTokenClassification):
        raise UsageError(
            f"the results of {settings.head} cannot be explained; give a run with classes, answers or names"
        )
    if predictor.precision != "fp32":
        raise UsageError(f"explanations need fp32, got precision {predictor.precision!r}; give fp32")
    import_captum()


def import_captum() -> Any:
    """Import captum's layer integrated gradients.

    Raises:
        UsageError: captum is not installed.
    """
    try:
        from captum.attr import LayerIntegratedGradients
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "captum":
            raise
        raise UsageError(f"an explanation needs captum; {name_extra('explain')}") from None
    return LayerIntegratedGradients


def explain_example(predictor: Predictor, example: Any, result: Result) -> list[dict[str, Any]]:
    """Return the explanation of an example's result."""
    task, settings = predictor.task, predictor.settings
    inputs = task.encode_inputs([example], settings)
    found = []
    with use_padded_path(settings.model):
        kept = run_model(task, inputs, settings)
        words, owners, targets = find_explainer(task)(result, kept, inputs.data, example, settings)
        for target in targets:
            paths: dict[int, GradientPath] = {}
            for logit in target.logits:
                number = logit.sequence
                if number not in paths:
                    paths[number] = GradientPath(settings, inputs.data[number], owners[number] == NO_WORD)
                paths[number].logits.append(logit)
            value, baseline, error, tokens = attribute(list(paths.values()))
            read = np.concatenate([owners[number] for number in paths])
            values = np.concatenate(tokens)[read != NO_WORD]
            read = read[read != NO_WORD]
            sums = np.bincount(read, values, len(words)).tolist()
            own = [{**words[word]._asdict(), "attribution": sums[word]} for word in np.unique(read).tolist()]
            found.append({"target": target.name, "logit": value, "baseline": baseline, "error": error, "words": own})
    return found


def attribute(paths: Sequence["GradientPath"]) -> tuple[float, float, float, list[np.ndarray]]:
    """Attribute a target to the tokens of the sequences that decide it.

    Returns:
        The target's value, that at the baseline, the completeness error as a share of the value, and the attributions
        (T,) to the tokens of each sequence.
    """
    value, baseline = np.sum([path.read_ends() for path in paths], axis=0).tolist()
    steps = FIRST_STEPS
    while True:
        tokens = [path.integrate(steps) for path in paths]
        gap = sum(values.sum() for values in tokens) - (value - baseline)
        error = float(abs(gap) / max(abs(value), LEAST_LOGIT))
        if error < MOST_ERROR or steps >= MOST_STEPS:
            return value, baseline, error, tokens
        steps *= 2


class GradientPath:
    """The straight line from a sequence's baseline to the sequence, and the logits whose sum is followed along it.

    Args:
        item: A sequence of `Task.encode_inputs`.
        is_special: (T,) bool, the tokens that the baseline keeps.
    """

    def __init__(self, settings: PredictionSettings, item: Mapping[str, np.ndarray], is_special: np.ndarray) -> None:
        self.model, self.logits = settings.model, []
        self.ids, self.segments = (
            torch.from_numpy(item[name])[None].to(self.model.device) for name in ("input_ids", "token_type_ids")
        )  # (1, T) each
        keeps = torch.from_numpy(is_special).to(self.model.device)
        self.baseline = self.ids.where(keeps, settings.tokenizer.mask_token_id)  # (1, T)

    def read(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Return the weighted sum of the logits (B,) of some points of the line, as captum calls it."""
        outputs = self.model(input_ids=ids, token_type_ids=segments)
        parts = [logit.weight * outputs[logit.output][:, *logit.index] for logit in self.logits]
        return torch.stack(parts).sum(0)  # (B,)

    @torch.no_grad()
    def read_ends(self) -> list[float]:
        """Return the sum at the sequence and at its baseline."""
        return self.read(torch.cat([self.ids, self.baseline]), self.segments.expand(2, -1)).tolist()

    def integrate(self, steps: int) -> np.ndarray:
        """Return the attributions (T,) to the tokens: the integral by Gauss-Legendre, summed over each embedding."""
        follow = import_captum()(self.read, self.model.get_input_embeddings())
        found = follow.attribute(
            self.ids,
            baselines=self.baseline,
            additional_forward_args=(self.segments,),
            n_steps=steps,
            method="gausslegendre",
            internal_batch_size=max(TOKENS_AT_ONCE // self.ids.shape[1], 1),
        )  # (1, T, H)
        return found[0].sum(-1).double().cpu().numpy()


@contextmanager
def use_padded_path(model: nn.Module) -> Iterator[None]:
    """Run a model without packing, as in stock BERT; cuDNN has no gradients of a BiLSTM in evaluation mode."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        model.set_attn_implementation(usual)


# --- In words ---------------------------------------------------------------------------------------------------------


def describe_words(words: Sequence[Mapping[str, Any]]) -> str:
    """Return the words with the largest attributions, in one line."""
    largest = sorted(words, key=lambda word: -abs(word["attribution"]))[:MOST_NAMED_WORDS]
    return ", ".join(f"{' '.join(word['text'].split())} {word['attribution']:+.2f}" for word in largest)


def list_parts(words: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the parts of a line with all words: each with its share of the largest attribution, from -1 to 1.

    Words that stand apart in their text are separated by a space, texts by a bar.
    """
    most = max((abs(word["attribution"]) for word in words), default=0.0) or 1.0
    before: Mapping[str, Any] | None = None
    for word in words:
        if before is not None:
            is_same = before["field"] == word["field"]
            gap = " " if (is_same and word["start"] > before["end"]) or word["field"] == "words" else ""
            yield gap if is_same else "  |  ", 0.0
        yield " ".join(word["text"].split()), word["attribution"] / most
        before = word
