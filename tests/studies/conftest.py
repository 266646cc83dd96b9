import pytest

from bertkit.reports.tables import ScoreLine
from bertkit.tasks import TASKS
from tests.conftest import change_task


@pytest.fixture
def fake(monkeypatch):
    """Return a task "fake": pretraining with a higher-is-better score, shared data and a published value."""
    task = TASKS["pretrain"]
    row = ScoreLine("next sentence", "nsp_accuracy", unit="fraction", paper={"BERT-base, held out": 0.97})
    changes = {"metric": "nsp_accuracy", "lower_is_better": False, "reusable": True, "table": (row,), "folder": "fakes"}
    task = change_task(task, name="fake", check=lambda recipe: None, recipe={**task.recipe, "task": "fake"}, **changes)
    monkeypatch.setitem(TASKS, "fake", task)
    return task
