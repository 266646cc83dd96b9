"""The model card of a run, with metadata for the Hub. Only the last part of each path is published."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from bertkit.data.pretraining.sources import DOCS
from bertkit.errors import make_printable, pluralize
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import ScoreLine, list_shown, tabulate_scores
from bertkit.system.hub import CARD, HubName, parse_dataset, parse_hub_name, split_revision
from bertkit.tasks.finetuning import KEPT, SOLVED
from bertkit.tasks.task import CHOSEN_ON_DEV, Task
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import SEARCH

SAME_NAMES = ("accuracy", "f1", "precision", "recall", "matthews_correlation", "exact_match", "perplexity")
MEASURES = {name: name for name in SAME_NAMES} | {  # a score -> its metric name on the Hub
    "pearson": "pearsonr",
    "spearmanr": "spearmanr",
    "exact": "exact_match",
    "mlm_accuracy": "accuracy",
    "clm_accuracy": "accuracy",
}
ORIGINS = {  # an option that names data -> a sentence about their use
    "corpus": "Text: {}.",
    "train_file": "Trained on {} instead of the official training file.",
    "extra_train": "Trained on {} first.",
}
LOCAL = ("features_dir", "train_file", "extra_train")  # options whose value is a path, never a name on the Hub

# Keys of a card's metadata; the last two are set if the license is "other".
LICENSE = ("license", "license_name", "license_link")
OTHER_DATA = ("dir", "label", "tune_share", "trial_rows", "train_file", "max_train_samples")  # not the benchmark's data
ESCAPABLE = re.compile(r"[!-/:-@\[-`{-~]")  # what a backslash escapes in Markdown
CARD_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def write_card(
    task: Task,
    name: str,
    recipe: Recipe,
    metrics: Mapping[str, Any],
    environment: Mapping[str, Any],
    model: Any,
    sizes: Mapping[str, int],
) -> str:
    """Return the text of the model card of a run in the directory `name`.

    Args:
        sizes: Number of inputs of each split.
    """
    head, config = type(model).__name__, model.config
    is_causal = config.is_decoder and bool(task.metric) and getattr(model.base_model, "pooler", None) is not None
    top = "a BiLSTM on top of the encoder" if hasattr(model, "bilstm") else ""
    labels = [label for label in config.id2label.values() if not label.startswith("LABEL_")]
    title = Path(name).resolve().name or "bert"
    saved, commits = recipe.to_dict(), environment.get("commits", {})
    public = hide_paths(saved)
    rows = list_shown(task.table, task.metric, metrics)
    library = "bertkit" if top or is_causal else "transformers"
    card = ModelCard.from_template(
        make_metadata(task, title, recipe, metrics, type(model).pipeline_tag, library),
        CARD_TEMPLATE,
        title=title,
        name=name,
        task=task,
        head=head,
        model=model,
        start=describe_start(recipe, commits),
        is_causal=is_causal,
        top=top,
        strength=metrics.get(SOLVED, 0.0) if metrics.get(KEPT) == "start" else 0.0,
        labels=[quote_code(label) for label in labels if hasattr(model, "classifier")],
        trials=len(list(Path(name, SEARCH).glob("*/trial-*.toml"))),  # trials of the search before the run
        scores=format_table(tabulate_scores(rows, metrics, "this model")) if rows else [],
        metrics=metrics,
        data=describe_data(task, recipe, sizes, commits),
        recipe=recipe,
        longest=max(recipe.lengths),
        seen=metrics["updates"] * recipe.batch_size,
        whole=task.recipe["train"].get("max_steps", 0) * task.recipe["batch_size"],
        has_hidden_paths=public != saved,
        public_recipe=tomli_w.dumps(public),
        environment=environment,
        machine=describe_machine(environment),
    )
    return str(card)


def make_metadata(
    task: Task, name: str, recipe: Recipe, metrics: Mapping[str, Any], pipeline: str, library: str
) -> ModelCardData:
    """Return the metadata for the Hub, with the licence of the base model.

    The language is that of the tasks' data sets on the Hub, which are all English, otherwise that of the base model.
    """
    results = list_results(task, recipe, metrics, pipeline)
    data, base = list_datasets(task, recipe), read_base_card(recipe)
    is_english = data and task.is_official(recipe.data.get("dir", ""))
    return ModelCardData(
        language="en" if is_english else base.get("language"),
        **{key: base.get(key) for key in LICENSE},
        library_name=library,
        pipeline_tag=pipeline,
        tags=["bert", "bertkit", task.name],
        base_model=name_base(recipe),
        datasets=data or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def name_base(recipe: Recipe) -> str | None:
    """Return the name of the checkpoint on the Hub; None if it is a directory, or there is none."""
    found = parse_hub_name(recipe.checkpoint)
    return found and found.name


def read_base_card(recipe: Recipe) -> dict[str, Any]:
    """Return language and licence in the base model's card, from its directory or the cache of the Hub."""
    if not (checkpoint := recipe.checkpoint):
        return {}
    with suppress(Exception):  # the card may be missing or wrong
        model, revision = split_revision(checkpoint)
        is_local = Path(checkpoint).exists()
        path = Path(checkpoint, CARD) if is_local else try_to_load_from_cache(model, CARD, revision=revision)
        found = metadata_load(path)
        return {key: found[key] for key in ("language", *LICENSE) if key in found}
    return {}


def describe_start(recipe: Recipe, commits: Mapping[str, str]) -> str:
    """Return the initial weights of the training as Markdown."""
    if base := name_base(recipe):
        return link_hub(base, commits)
    return quote_code(hide_paths(recipe.checkpoint)) if recipe.checkpoint else "random weights"


def link_hub(name: str, commits: Mapping[str, str]) -> str:
    """Return a link to a model, or to the data set `datasets/owner/name`, and the commit that was read, if known."""
    commit = f" (commit `{commits[name]}`)" if name in commits else ""
    return f"[{name.removeprefix('datasets/')}](https://huggingface.co/{name}){commit}"


def list_datasets(task: Task, recipe: Recipe) -> list[str]:
    """Return the names of the training data sets on the Hub."""
    options, copies = recipe.data, task.copies
    corpora = (parse_hub_name(source) for source in options.get("corpus", []) if source != DOCS)
    found = [source.name for source in corpora if source]
    if own := name_own_dataset(task, options):
        found.append(own.name)
    if "train" in copies and not options["dir"] and not options.get("train_file"):
        found.append(copies["train"][0])
    return list(dict.fromkeys(found))


def name_own_dataset(task: Task, options: Mapping[str, Any]) -> HubName | None:
    """Return the name of a person's own data on the Hub; the folder of official files is never there."""
    source = options.get("dir", "")
    return None if task.is_official(source) else parse_dataset(source)


def walk_scores(task: Task, metrics: Mapping[str, Any]) -> Iterator[tuple[ScoreLine, str, str]]:
    """Yield each score that is shown, its split, and its name without the split."""
    for row in list_shown(task.table, task.metric, metrics):
        found = []
        for split, form in task.splits.items():
            before, after = form.split("{}")
            if row.key.startswith(before) and row.key.endswith(after):
                found.append((len(form), split, row.key.removeprefix(before).removesuffix(after)))
        _, split, name = max(found)
        yield row, split, name


def list_results(task: Task, recipe: Recipe, metrics: Mapping[str, Any], pipeline: str) -> list[EvalResult]:
    """Return the scores that have a metric name on the Hub, in their official unit, with their data sets."""
    title, copies, unknown = task.title, task.copies, ("unknown", None)
    if own := name_own_dataset(task, recipe.data):
        title, copies, unknown = own.name, {}, own[:2]
    elif source := recipe.data.get("dir"):
        title, copies = f"{title}, local files" if task.is_official(source) else "local files", {}
    for option, whole in (("tune_share", "dev"), ("trial_rows", "train")):
        if recipe.data.get(option):
            title, copies = f"{title}, part of {whole}", {}
    results = []
    for row, split, name in walk_scores(task, metrics):
        if name in MEASURES:
            dataset, config, hub_split = copies.get(split, (*unknown, split))
            score = {"metric_type": MEASURES[name], "metric_name": row.name, "metric_value": metrics[row.key]}
            source = {"dataset_type": dataset, "dataset_config": config, "dataset_split": hub_split}
            results.append(EvalResult(task_type=pipeline, dataset_name=title, **source, **score))
    return results


def list_benchmarks(task: Task, recipe: Recipe, metrics: Mapping[str, Any], date: str) -> list[EvalResultEntry]:
    """Return the paper's metric on the data set of the Hub as entries of `.eval_results`; empty for any other data.

    An entry names the task of a benchmark that the data set registers in its `eval.yaml`; the Hub shows only results
    of registered benchmarks. The task is named like the configuration that holds its rows: `mrpc`, for the halves of
    MNLI's dev set `mnli_matched` and `mnli_mismatched`. A score on test takes precedence over one on dev.

    Args:
        date: When the model was evaluated, in ISO 8601.
    """
    if not task.copies or any(recipe.data.get(key) for key in OTHER_DATA):
        return []
    found = {}
    for row, split, name in walk_scores(task, metrics):
        if name == task.metric:
            dataset, config, hub_split = task.copies[split]
            task_id = "_".join([config, *hub_split.split("_")[1:]])
            chosen = f"; {metrics[CHOSEN_ON_DEV]} chosen on dev" if CHOSEN_ON_DEV in metrics else ""
            notes = f"{row.name}, split {hub_split}, fine-tuned with bertkit{chosen}"
            found[task_id] = EvalResultEntry(dataset, task_id, metrics[row.key], date=date, notes=notes)
    return list(found.values())


def describe_data(task: Task, recipe: Recipe, sizes: Mapping[str, int], commits: Mapping[str, str]) -> list[str]:
    """Return lines about the sources of the data and the size of each split."""
    options, title, copies = recipe.data, task.title, task.copies
    lines = []
    if own := name_own_dataset(task, options):
        form = f", configuration `{own.config}`" if own.config else ""
        lines.append(f"{link_hub(f'datasets/{own.name}', commits)}{form}.")
    elif source := options.get("dir"):
        files = quote_code(hide_paths(source, "dir"))
        official = f"{title}, from local files in the official format ({files})."
        lines.append(official if task.is_official(source) else f"Local files: {files}.")
    elif copies:
        dataset, config, _ = next(iter(copies.values()))
        lines.append(f"{title}: {link_hub(f'datasets/{dataset}', commits)}, configuration `{config}`.")
    for key, words in ORIGINS.items():
        if given := options.get(key):
            names = hide_paths(given if isinstance(given, list) else [given], key)
            lines.append(words.format(", ".join(map(quote_code, names))))
    if DOCS in options.get("corpus", []):
        lines.append(f"`{DOCS}` is the documentation of the Python packages installed on the training machine.")
    return [*lines, "Inputs to the model: " + ", ".join(f"{split} {size:,}" for split, size in sizes.items()) + "."]


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Return the versions, the hardware and the commit of a run."""
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    threads = pluralize(environment["threads"], "thread")
    hardware = ", ".join(environment["gpus"]) or f"{environment['processor']}, {threads}"
    several = f", {environment['processes']} processes" if environment["processes"] > 1 else ""
    commit = f" (commit `{environment['commit']}`)" if environment.get("commit") else ""
    system = f"Python {environment['python']} and bertkit {environment['bertkit']}{commit}"
    return f"{packages}, {system}, on {hardware}{several}; {environment['platform']}"


def quote_code(text: str) -> str:
    """Return untrusted text as a Markdown code span, in which backticks become apostrophes; with <, all is escaped."""
    text = make_printable(text).replace("`", "'") or " "
    if "<" in text:  # some programs read tags in code too
        return ESCAPABLE.sub(r"\\\g<0>", text)
    return f"`{text}`"


def hide_paths(value: Any, key: str = "") -> Any:
    """Return the value with every path in it shortened to its last part, also of files joined by commas.

    Folders may name a person or a client. A possible Hub name that is not an existing path is kept, unless its key
    takes only paths (LOCAL).
    """
    if isinstance(value, Mapping):
        return {name: hide_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_paths(item, key) for item in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    if key not in LOCAL and parse_hub_name(value):
        return value
    return ",".join(Path(path).name or path for path in value.split(","))
