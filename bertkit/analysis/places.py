"""Find the runs and studies of a report page, and read their files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError, join_lines
from bertkit.reports.html import attempt
from bertkit.studies.spec import STUDY_FILE
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import METRICS_FILE, RECIPE_FILE, STUDY_RESULT, read_log, read_metrics


@dataclass(frozen=True)
class Place:
    """A run or a study that has a part of the page.

    Attributes:
        study: The content of study.json, empty without one; None for a run.
        is_part: Whether a run is included only because of its study.
    """

    path: Path
    id: str
    study: Mapping[str, Any] | None = None
    is_part: bool = False


def list_places(sources: Sequence[Path]) -> list[Place]:
    """Return the sources, each once, and after each study its pretrainings and chosen runs.

    Raises:
        UsageError: A source is neither a run nor a study.
    """
    places: dict[Path, Place] = {}

    def add(path: Path, study: Mapping[str, Any] | None = None, is_part: bool = False) -> None:
        number = sum((place.study is None) == (study is None) for place in places.values()) + 1
        name = f"{'run' if study is None else 'study'}-{number}"
        places.setdefault(path.resolve(), Place(path, name, study, is_part))

    for source in sources:
        if source.name in ("", ".."):  # show the real name of the working directory, or of one above it
            source = source.resolve()
        if is_run(source):
            add(source)
        elif (source / STUDY_RESULT).is_file() or (source / STUDY_FILE).is_file():
            study = read_part(read_object, source / STUDY_RESULT, []) or {}
            add(source, study)
            found = attempt(list_chosen, study) or []
            for path in (source / directory for directory in found):
                if is_run(path):
                    add(path, is_part=True)
        else:
            raise UsageError(f"{source} is neither a run nor a study; give the --output of one")
    return list(places.values())


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run, or an ensemble of runs."""
    return (path / RECIPE_FILE).is_file() or (path / METRICS_FILE).is_file()


def list_chosen(study: Mapping[str, Any]) -> list[str]:
    """Return the directories of a study's pretrainings and chosen runs."""
    pretrainings = [origin["directory"] for origin in study.get("pretrainings", [])]
    return list(dict.fromkeys([*pretrainings, *(winner["run"] for winner in study.get("chosen", []))]))


def read_part(read: Callable[[Path], Any], path: Path, notes: list[str]) -> Any:
    """Read a file with `read`; return None if it does not exist or is damaged, which adds a note."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read, skipping ({join_lines(error)[:200]})")
        return None


def read_text(path: Path) -> str:
    """Read the text of a file."""
    return path.read_text(encoding="utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not isinstance(found := json.loads(read_text(path)), dict):
        raise ValueError("it does not contain a JSON object")
    return found


def read_entries(path: Path) -> list[dict[str, float]]:
    """Read the entries of a training log, with their numbers only."""
    return [entry for entry in map(keep_numbers, read_log(path.parent)) if "step" in entry]


def find_others(places: Sequence[Place]) -> dict[Path, list[dict[str, Any]]]:
    """Return, for each run, the metrics of all finished runs with the same recipe except the seed, itself included.

    In a study these are the runs of its cell; otherwise the sources with the same recipe.
    """
    groups: dict[str, list[Path]] = {}
    for place in places:
        if place.study is None and not place.is_part:
            recipe = read_part(read_recipe, place.path / RECIPE_FILE, [])
            groups.setdefault(attempt(drop_seed, recipe) or place.id, []).append(place.path)
    found: dict[Path, list[dict[str, Any]]] = {}
    for group in groups.values():
        metrics = [read_part(read_metrics, path / METRICS_FILE, []) for path in group]
        found |= {path.resolve(): [scores for scores in metrics if scores is not None] for path in group}
    for place in places:
        found |= attempt(group_runs, place) or {}
    return found


def group_runs(place: Place) -> dict[Path, list[dict[str, Any]]]:
    """Return, for each run of a study, the metrics of the finished runs of its cell."""
    found = {}
    for cell in (place.study or {}).get("cells", []):
        done = [run["metrics"] for run in cell["runs"] if run["status"] == "finished"]
        found |= {(place.path / run["directory"]).resolve(): done for run in cell["runs"]}
    return found


def drop_seed(recipe: Mapping[str, Any]) -> str:
    """Return a key that is equal for recipes that differ only in their seed."""
    train = recipe.get("train")
    unseeded = {**train, "seed": None} if isinstance(train, Mapping) else train  # of a damaged recipe
    return json.dumps({**recipe, "train": unseeded}, sort_keys=True, default=str)


def keep_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers; integers of 1000 bits or more are left out."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if isinstance(value, float) or value.bit_length() < 1000}
