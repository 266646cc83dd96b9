"""The tasks of the paper, by name."""

from bertkit.tasks.glue import GLUE
from bertkit.tasks.ner import NER
from bertkit.tasks.pretraining import PRETRAINING
from bertkit.tasks.squad import SQUAD
from bertkit.tasks.swag import SWAG
from bertkit.tasks.task import Task

TASKS: dict[str, Task] = {PRETRAINING.name: PRETRAINING} | GLUE | SQUAD | {SWAG.name: SWAG, NER.name: NER}

__all__ = ["TASKS", "Task"]
