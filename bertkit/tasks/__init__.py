"""The tasks of the paper, by name."""

from bertkit.tasks.pretraining import PRETRAINING
from bertkit.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (PRETRAINING,)}

__all__ = ["TASKS", "Task"]
