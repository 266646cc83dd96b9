"""The tasks of the paper by name, and the tasks that predict with each head; imported on first use."""

from typing import Any

__all__ = ["ANSWERING", "TASKS", "Task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bertkit.tasks.glue import GLUE
    from bertkit.tasks.ner import NER
    from bertkit.tasks.pretraining import PRETRAINING
    from bertkit.tasks.squad import SQUAD
    from bertkit.tasks.swag import SWAG
    from bertkit.tasks.task import Task
    from bertkit.tasks.text import CLASSIFICATION, NextSentenceTask

    tasks = {task.name: task for task in (PRETRAINING, CLASSIFICATION, *GLUE.values(), *SQUAD.values(), SWAG, NER)}
    answering = {  # head -> the task that encodes its inputs and decodes its outputs
        "BertForSequenceClassification": CLASSIFICATION,
        "BertForNextSentencePrediction": NextSentenceTask(),
        "BertForPreTraining": PRETRAINING,
        "BertForMaskedLM": PRETRAINING,
        "BertForTokenClassification": NER,
        "BertFeaturesForTokenClassification": NER,
        "BertForQuestionAnswering": SQUAD["squad1"],
        "BertForMultipleChoice": SWAG,
    }
    globals().update(TASKS=tasks, ANSWERING=answering, Task=Task)
    return globals()[name]
