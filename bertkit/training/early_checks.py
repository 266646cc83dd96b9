"""The checks that come before torch and transformers are imported, so that a mistake is named within a second.

`bertkit.training.arguments.complete` checks everything again, with the values that a person has not given.
"""

import os
from collections.abc import Mapping
from typing import Any

from bertkit.system.hub import find_dataset
from bertkit.system.progress import ignore
from bertkit.tasks.task import Task
from bertkit.training.recipe import check, merge


def check_early(task: Task, *recipes: Mapping[str, Any], reads_data: bool) -> None:
    """Check the keys and values of the recipes of a person, and that their data exist.

    Args:
        reads_data: Whether the data will be read: not by a finished run.

    Raises:
        UsageError: As from `bertkit.training.run.run`.
    """
    given, defaults = merge(*recipes), task.recipe["data"]
    check({key: value for key, value in given.items() if key not in ("model", "train")}, data_defaults=defaults)
    options = merge({"data": defaults}, given)["data"]
    place = options.get("dir")
    if reads_data and place and not os.path.exists(place) and find_dataset(place) is None:
        task.load(options, ignore)  # raises the error that names what is expected there
    check(given, data_defaults=defaults)  # [model] and [train] need the fields of transformers' classes
