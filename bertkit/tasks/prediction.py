"""The core of prediction, from examples to answers, for every task. `bertkit.inference` is its interface."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bertkit.data.sequences import TOKENS_A_BATCH, EncodedInputs, batch_by_length, collate, stack_summaries, to_tensors
from bertkit.errors import UsageError
from bertkit.metrics.calibration import scale_logits
from bertkit.model.onnx_model import OnnxModel
from bertkit.system.progress import ignore
from bertkit.tasks.answers import Result
from bertkit.tasks.task import PredictionSettings, Task

SIZED_AT_ONCE = 256  # rows collated to find their lengths
TOKENS_ON_CPU = 1024  # tokens of a batch whose activations fit into a core's cache


def predict(
    task: Task,
    examples: Sequence[Any],
    settings: PredictionSettings,
    precision: str = "fp32",
    note: Callable[[np.ndarray], None] = ignore,
) -> list[Result]:
    """Predict the results of some examples; truncated ones are marked `truncated`.

    Args:
        note: Receives (S,) the tokens of each sequence.
    """
    if not examples:
        return []
    inputs = task.encode_inputs(examples, settings)
    note(inputs.lengths)
    summaries = inputs.join(summarize_inputs(task, inputs, settings, precision))
    results = task.decode(summaries, inputs.data, settings.decided).list_results()
    for result, is_truncated in zip(results, inputs.truncated, strict=True):
        if is_truncated:
            result["truncated"] = True
    return results


def summarize_inputs(
    task: Task, inputs: EncodedInputs, settings: PredictionSettings, precision: str = "fp32"
) -> list[Any]:
    """Return the summary of each sequence of some inputs."""

    def make_batch(numbers: list[int]) -> dict[str, Any]:
        return inputs.collate([inputs.data[number] for number in numbers])

    return run_model(task, settings.model, inputs.lengths, make_batch, precision, settings)


def summarize_split(task: Task, model: Any, data: Any, precision: str = "fp32") -> np.ndarray:
    """Return the summaries (S, ...) of a split's data set."""

    def make_batch(numbers: Sequence[int]) -> dict[str, Any]:
        return collate(data.__getitems__(numbers))

    parts = [range(start, min(start + SIZED_AT_ONCE, len(data))) for start in range(0, len(data), SIZED_AT_ONCE)]
    lengths = [make_batch(part)["attention_mask"].flatten(1).sum(1).numpy() for part in parts]
    return stack_summaries(run_model(task, model, np.concatenate(lengths), make_batch, precision))


def run_model(
    task: Task,
    model: Any,
    lengths: np.ndarray,
    make_batch: Callable[[list[int]], dict[str, Any]],
    precision: str,
    settings: PredictionSettings | None = None,
) -> list[Any]:
    """Return what `Task.summarize` returns of each sequence, with the temperature of the model.

    Args:
        lengths: (S,) the tokens of each sequence.
        make_batch: Returns the batch of the sequences with some numbers, arrays or tensors.
    """
    summaries: list[Any] = [None] * len(lengths)
    for numbers in batch_by_length(lengths, limit_batch(model)):
        engine = model
        # The export computes padding, so it is slower with several texts of different lengths.
        padded = len(numbers) * lengths[numbers].max() * (1 if len(numbers) == 1 else 2)
        if settings is not None and padded <= settings.most_exported:
            engine = settings.exported
        batch = make_batch(numbers.tolist())
        check_types(batch, model.config)
        if isinstance(engine, OnnxModel):
            batch = {name: np.asarray(column) for name, column in batch.items()}
            rows = task.summarize(engine(**batch, **task.evaluation_options), batch, settings)
        else:
            rows = summarize_batch(task, engine, batch, precision, settings)
        if task.is_classifier:
            rows = scale_logits(rows, model.config.temperature)
        for number, row in zip(numbers.tolist(), rows, strict=True):
            summaries[number] = row
    return summaries


def summarize_batch(
    task: Task, model: Any, batch: Mapping[str, Any], precision: str, settings: PredictionSettings | None
) -> Any:
    """Return what `Task.summarize` returns of a batch in main memory, in arrays."""
    import torch

    from bertkit.model.heads import BertHead
    from bertkit.model.precision import use_precision

    batch = to_tensors(batch)
    if isinstance(model, BertHead):
        batch |= model.index_tokens(**batch)
    with torch.inference_mode():
        batch = {name: column.to(model.device) for name, column in batch.items()}
        with use_precision(precision, model.device):
            outputs = model(**batch, **task.evaluation_options)
        rows = task.summarize(outputs, batch, settings)
        return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows


def check_types(batch: Mapping[str, Any], config: Any) -> None:
    """Check that the model has the token types of a batch in main memory."""
    needed = 1 + int(batch["token_type_ids"].max()) if "token_type_ids" in batch else 1
    if needed > config.type_vocab_size:
        raise UsageError(
            f"the model has {config.type_vocab_size} token type (type_vocab_size), but pairs, questions and sentence "
            f"pairs for pretraining need {needed}; use single texts, or a model with {needed}"
        )


def limit_batch(model: Any) -> int:
    """Return the tokens of a batch in prediction."""
    return TOKENS_ON_CPU if isinstance(model, OnnxModel) or model.device.type == "cpu" else TOKENS_A_BATCH
