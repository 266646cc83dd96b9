"""Describe the differences between two nested tables: recipes, records of a build, environments."""

import datetime
import json
import os
from collections.abc import Mapping
from typing import Any

from bertkit.errors import UsageError

LONGEST_NAME, LONGEST_TEXT = 40, 100  # characters of a user's input that a message shows


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return `table.key: old -> new` for every value that differs, in the order of the old recipe."""
    before, after = flatten_recipe(old), flatten_recipe(new)
    return [
        f"{_escape(key)}: {show_toml(before.get(key))} -> {show_toml(after.get(key))}"
        for key in before | after
        if before.get(key) != after.get(key)
    ]


def refuse_other(problem: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that a directory has what is asked for."""
    if differences := describe_differences(old, new):
        more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
        shown = "; ".join(differences[:2]) + more
        raise UsageError(f"{problem} ({shown}); name another directory with --output")


def show_toml(value: Any) -> str:
    """Format a value approximately as TOML, on one line; long values are truncated."""
    if value is None:
        return "(not set)"
    if isinstance(value, datetime.date | datetime.time):
        return str(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
    return _escape(text)


def _escape(text: str) -> str:
    """Return a text with escapes in place of its unprintable characters."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def expand_recipe(value: Any) -> Any:
    """Return a deep copy without keys whose value is None, with `~` and `~user` expanded at the start of paths."""
    if isinstance(value, str):
        return os.path.expanduser(value) if "/" in value else value
    if isinstance(value, Mapping):
        return {key: expand_recipe(item) for key, item in value.items() if item is not None}
    return [expand_recipe(item) for item in value] if isinstance(value, list | tuple) else value


def flatten_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by `key` or `table.key`, in the recipe's order."""
    flat: dict[str, Any] = {}
    for key, value in expand_recipe(recipe).items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat
