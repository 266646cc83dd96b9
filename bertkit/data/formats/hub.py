"""Data sets on the Hub, or their copies in the cache of `datasets` -> columns of texts."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.formats.line import FILE_REMEDY, TextColumns, find_column
from bertkit.errors import UsageError, join_lines
from bertkit.system.hub import PINNED, READ, find_hub_trouble

if TYPE_CHECKING:
    import datasets

ROWS_A_BATCH = 1_000  # rows of a Hub data set held in memory


def read_hub(
    name: str, config: str, splits: Mapping[str, str], columns: Mapping[str, str], *, optional: Container[str] = ()
) -> dict[str, TextColumns]:
    """Read the splits of a data set on the Hub; `splits` and `columns` map the wanted names to the Hub's.

    A class label becomes its name and a number its shortest text in the column's own precision: a float32 that holds
    the official file's 3.800 is "3.8". A missing value is "". A column of labels or numbers with only missing values
    (-1 on the Hub), such as the labels of GLUE's test sets, is left out of that split. An `optional` split that the
    data set does not have is left out too.

    If the Hub is unreachable, the copy in the cache of `datasets` is used.

    Raises:
        UsageError: The Hub cannot serve the data set and no copy is cached, or a split or a column is missing.
    """
    found = load_splits(name, config, splits, optional)
    return {split: _convert(rows, source, columns) for split, source, rows in found}


def load_splits(
    name: str, config: str, splits: Mapping[str, str], optional: Container[str] = ()
) -> Iterator[tuple[str, str, "datasets.Dataset"]]:
    """Yield every wanted split with its name for messages and its rows."""
    source = f"{name}:{config}"
    found = load_hub(name, config)
    for split, hub_split in splits.items():
        if hub_split in found:
            yield split, f"{source}, {hub_split}", found[hub_split]
        elif split not in optional:
            listed = ", ".join(found)
            raise UsageError(f"the data set {source} has no split {hub_split!r}; found {listed}; {FILE_REMEDY}")


def load_hub(
    name: str, config: str | None, revision: str | None = None, remedy: str = FILE_REMEDY
) -> "datasets.DatasetDict":
    """Load a data set from the Hub, or its copy in the cache of `datasets` if the Hub is unreachable.

    Its commit is noted in `READ`.

    Raises:
        UsageError: The Hub cannot serve the data set and no copy is cached; `remedy` ends the message.
    """
    revision = PINNED.get(f"datasets/{name}") or revision
    trouble = find_hub_trouble(name, "dataset", revision)
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache

        if not trouble:
            found = datasets.load_dataset(name, config, **({"revision": revision} if revision else {}))
        else:
            # load_dataset falls back to this too, but only after retrying for a long time without a network.
            version, commit = ("0.0.0", revision) if revision else ("auto", "auto")  # auto: the latest in the cache
            copy = {"config_name": config, "version": version, "hash": commit}
            found = Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **copy).as_dataset()
        files = [file["filename"] for rows in found.values() for file in rows.cache_files]
        READ.update({f"datasets/{name}": Path(file).parent.name for file in files})
        return found
    except Exception as error:  # includes HTTP errors: huggingface_hub has changed its HTTP library more than once
        trouble = (
            trouble or f"the data set {name}{f':{config}' if config else ''} cannot be loaded ({join_lines(error)})"
        )
    raise UsageError(f"{trouble}; {remedy}")


def _convert(rows: "datasets.Dataset", source: str, columns: Mapping[str, str]) -> TextColumns:
    if not len(rows):
        raise UsageError(f"{source} has no rows; {FILE_REMEDY}")
    texts: dict[str, list[str]] = {}
    for name, hub_name in columns.items():
        find_column(source, rows.column_names, hub_name, FILE_REMEDY)
        feature, values = rows.features[hub_name], rows[hub_name][:]
        if "string" in feature.dtype or any(value not in (None, -1) for value in values):
            texts[name] = _write(feature, values)
    return TextColumns(source, texts, range(1, len(rows) + 1))


def _write(feature: Any, values: list[Any]) -> list[str]:
    """Return the values as an official file has them."""
    if hasattr(feature, "names"):  # a class label
        return ["" if value in (None, -1) else feature.names[value] for value in values]
    kind = str if "string" in feature.dtype else np.dtype(feature.dtype).type
    return ["" if value is None else str(kind(value)) for value in values]
