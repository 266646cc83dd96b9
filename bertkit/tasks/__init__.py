"""The tasks of the paper, the tasks that predict with each head, and the forms of results; imported on first use."""

from typing import Any

__all__ = ["ANSWERING", "FORMS", "TASKS", "Task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bertkit.tasks.answers import PairAnswers
    from bertkit.tasks.fill_mask import FillMaskTask, MaskAnswers
    from bertkit.tasks.glue import GLUE
    from bertkit.tasks.kinds import ClassAnswers, LabelAnswers, NumberAnswers, NumbersAnswers
    from bertkit.tasks.ner import NER
    from bertkit.tasks.pretraining import PRETRAINING
    from bertkit.tasks.squad import SQUAD, SpanAnswers
    from bertkit.tasks.swag import SWAG, EndingAnswers
    from bertkit.tasks.tag_answers import TagAnswers
    from bertkit.tasks.task import Task
    from bertkit.tasks.text import CLASSIFICATION, NextSentenceTask

    tasks = {task.name: task for task in (PRETRAINING, CLASSIFICATION, *GLUE.values(), *SQUAD.values(), SWAG, NER)}
    answering: dict[str, Task] = {}  # head -> the task that encodes its inputs and decodes its outputs
    for task in (FillMaskTask(), NextSentenceTask(), CLASSIFICATION, SQUAD["squad1"], SWAG, NER):
        for heads in ({"": task.head}, *task.heads.values()):
            answering |= dict.fromkeys(heads.values(), task)
    texts = (ClassAnswers, LabelAnswers, NumberAnswers, NumbersAnswers)
    # A result of masks may also say whether a text follows the other, so that its form comes first.
    forms = {form.key: form for form in (*texts, EndingAnswers, SpanAnswers, TagAnswers, MaskAnswers, PairAnswers)}
    globals().update(TASKS=tasks, ANSWERING=answering, FORMS=forms, Task=Task)
    return globals()[name]
