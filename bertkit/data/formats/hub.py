"""Data sets on the Hub, or their copies in the cache of `datasets` -> columns of texts."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bertkit.data.formats.line import FILE_REMEDY
from bertkit.errors import UsageError, join_lines
from bertkit.system.hub import PINNED, READ, explain_hub_trouble, parse_dataset

if TYPE_CHECKING:
    import datasets


def load_splits(
    name: str, config: str, splits: Mapping[str, str], optional: Container[str] = ()
) -> Iterator[tuple[str, str, "datasets.Dataset"]]:
    """Yield every wanted split with its name for messages and its rows."""
    source = f"{name}:{config}"
    found = load_hub(source)
    for split, wanted in splits.items():
        if wanted in found:
            yield split, f"{source}, {wanted}", found[wanted]
        elif split not in optional:
            raise UsageError(f"{source} has no split {wanted!r}; found {', '.join(found)}; {FILE_REMEDY}")


def load_hub(source: str, remedy: str = FILE_REMEDY) -> "datasets.DatasetDict":
    """Load the data set `owner/name[:config][@revision]`, or its copy in the cache if the Hub is unreachable.

    Its commit is noted in `READ`.
    """
    if (found := parse_dataset(source)) is None:
        raise UsageError(f"{source!r} does not exist; {remedy}")
    name, config, revision = found
    revision = PINNED.get(f"datasets/{name}") or revision
    trouble = explain_hub_trouble(name, "dataset", revision)
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache

        if not trouble:
            loaded = datasets.load_dataset(name, config, **({"revision": revision} if revision else {}))
        else:
            # load_dataset falls back to this too, but only after retrying for a long time without a network.
            version, commit = ("0.0.0", revision) if revision else ("auto", "auto")  # auto: the latest in the cache
            copy = {"config_name": config, "version": version, "hash": commit}
            loaded = Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **copy).as_dataset()
        files = [file["filename"] for rows in loaded.values() for file in rows.cache_files]
        READ.update({f"datasets/{name}": Path(file).parent.name for file in files})
        return loaded
    except Exception as error:  # includes HTTP errors: huggingface_hub has changed its HTTP library more than once
        trouble = trouble or f"the data set {source} cannot be loaded ({join_lines(error)})"
    raise UsageError(f"{trouble}; {remedy}")
