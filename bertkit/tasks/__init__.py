"""The tasks of the paper, by name, and what answers for a model with a head."""

from bertkit.tasks.glue import GLUE
from bertkit.tasks.ner import NER
from bertkit.tasks.pretraining import PRETRAINING
from bertkit.tasks.squad import SQUAD
from bertkit.tasks.swag import SWAG
from bertkit.tasks.task import Task
from bertkit.tasks.texts import NextSentenceTask, TextTask

TASKS: dict[str, Task] = {task.name: task for task in (PRETRAINING, *GLUE.values(), *SQUAD.values(), SWAG, NER)}
ANSWERING: dict[str, Task] = {  # head -> the task that reads its inputs and answers them
    "BertForSequenceClassification": TextTask(),
    "BertForNextSentencePrediction": NextSentenceTask(),
    "BertForPreTraining": PRETRAINING,
    "BertForMaskedLM": PRETRAINING,
    "BertForTokenClassification": NER,
    "BertFeaturesForTokenClassification": NER,
    "BertForQuestionAnswering": SQUAD["squad1"],
    "BertForMultipleChoice": SWAG,
}

__all__ = ["ANSWERING", "TASKS", "Task"]
