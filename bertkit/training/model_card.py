"""A finished run for others: the model card, with metadata that the Hub reads, and the upload to the Hub.

What is uploaded is named here, file by file: weights, configuration, tokenizer, recipe, scores, log and card. All else
stays behind: checkpoints and earlier models, and the predictions, which may repeat the words of data that are not ours
to publish. The folders of the machine that trained stay behind as well: of a path only its last part is published.

Left out: licences, of which a run knows nothing, and pull requests.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import tomli_w
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import get_session, logging, validate_repo_id

import bertkit
from bertkit.data.pretraining.sources import DOCS, ignore, is_hub_name
from bertkit.errors import UsageError, explain_refusal, join_lines, make_printable
from bertkit.tasks.task import Report, Row, Task
from bertkit.training.recipe import list_lengths
from bertkit.training.run_dir import ENVIRONMENT, LOG, METRICS, RECIPE, STUDY_RESULT, VOCABULARY

CARD = "README.md"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
PUBLISHED = (
    "config.json",
    "generation_config.json",
    VOCABULARY,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    RECIPE,
    ENVIRONMENT,
    LOG,
    "curves.png",
    METRICS,
)
PIPELINES = {  # how the name of a head ends -> the Hub's word for what it does
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "LMHeadModel": "text-generation",
    "ForNextSentencePrediction": "text-classification",
    "ForSequenceClassification": "text-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
MEASURES = {  # a score -> the Hub's word for it
    "accuracy": "accuracy",
    "f1": "f1",
    "precision": "precision",
    "recall": "recall",
    "matthews_correlation": "matthews_correlation",
    "pearson": "pearsonr",
    "spearmanr": "spearmanr",
    "exact": "exact_match",
    "exact_match": "exact_match",
    "perplexity": "perplexity",
    "mlm_accuracy": "accuracy",
    "clm_accuracy": "accuracy",
}
UPLOAD_TIMEOUT = 30.0  # seconds without an answer of the Hub
LOGIN = "hf auth login --force"
REMEDIES = (  # status of the Hub's answer -> what to do
    ((400,), f"mend what it names; the card is {CARD} in the run's directory"),
    ((401,), f"log in again: {LOGIN}"),
    ((402, 403), f"name a repository of your own, or log in with a token that may write there: {LOGIN}"),
    ((404,), f"write its name anew, or log in with a token that may see it: {LOGIN}"),
    ((429,), "wait some minutes, and the same command tries again"),
)
ORIGINS = {  # an option that names data -> what was done with them
    "corpus": "Text: {}.",
    "train_file": "Trained on {} instead of the official training file.",
    "extra_train": "Trained on {} first.",
}
LOCAL = ("dir", "features_dir", "train_file", "extra_train")  # options whose value is a path, never a name on the Hub

TEXT = """
# {title}

A BERT trained by bertkit {version} on the task `{task}`: {head}, {size}. It started from {start}.

## Use it

```python
{imports}

model = {head}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
{use}
## Scores

{scores}

## Data

{data}

## Limitations

{limits}

## Recipe

`bertkit {command} --recipe recipe.toml` repeats the run.{hidden}

```toml
{recipe}```

Trained with {environment}.
"""
STOCK = "from transformers import AutoTokenizer, {head}"
OURS = "from bertkit import {head}  # not from transformers, see below\nfrom transformers import AutoTokenizer"
SAME = "\nWith bertkit, `from bertkit import {head}` loads the same weights and computes nothing on padding.\n"
BILSTM = (
    "\nThere is a BiLSTM on top of the encoder, which plain transformers does not have: it loads the encoder only "
    "(`AutoModel.from_pretrained`), and with one of its own heads the answers are wrong.\n"
)
LEFT_TO_RIGHT = (
    "\nThis model reads from left to right, so its first token has seen nothing, and the head reads the last one. "
    "Plain transformers' head would read the first one and give one answer for every text.\n"
)


# --- The card ---------------------------------------------------------------------------------------------------------


def write_card(
    task: Task,
    name: str,
    recipe: Mapping[str, Any],
    metrics: Mapping[str, Any],
    environment: Mapping[str, Any],
    model: Any,
    sizes: Mapping[str, int],
) -> str:
    """The text of the model card of a run in the directory `name`.

    sizes: split -> the number of inputs that it has.
    """
    head, config = type(model).__name__, model.config
    is_causal = config.is_decoder and bool(task.metric) and getattr(model.base_model, "pooler", None) is not None
    has_bilstm = hasattr(model, "bilstm")
    is_ours = has_bilstm or is_causal
    use = LEFT_TO_RIGHT * is_causal + BILSTM * has_bilstm or SAME.format(head=head)
    labels = [label for label in config.id2label.values() if not label.startswith("LABEL_")]
    if labels and hasattr(model, "classifier"):
        use += f"\nIts labels: {', '.join(map(quote_code, labels))}.\n"
    title = Path(name).resolve().name or "bert"
    shape = f"{config.num_hidden_layers} layers of {config.hidden_size:,}, {config.num_attention_heads} heads"
    public = hide_paths(recipe)
    text = TEXT.format(
        title=title,
        name=name,
        version=bertkit.__version__,
        task=task.name,
        command=task.command or task.name,
        head=head,
        size=f"{model.num_parameters():,} parameters ({shape})",
        start=describe_start(recipe),
        imports=(OURS if is_ours else STOCK).format(head=head),
        use=use,
        scores="\n".join(list_scores(task, recipe, metrics)),
        data="\n".join(f"- {line}" for line in describe_data(task, recipe, sizes)),
        limits="\n".join(f"- {line}" for line in list_limits(task, recipe, metrics, config)),
        hidden="" if public == recipe else " Of paths only the last part is here: give your own.",
        recipe=tomli_w.dumps(public),
        environment=describe_machine(environment),
    )
    metadata = make_metadata(task, title, recipe, metrics, head, "bertkit" if is_ours else "transformers")
    return f"---\n{metadata.to_yaml()}\n---\n{text}"


def make_metadata(
    task: Task, name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any], head: str, library: str
) -> ModelCardData:
    """What the Hub reads of a card; the language only where the data are the Hub's, which all are English."""
    pipeline = next(word for end, word in PIPELINES.items() if head.endswith(end))
    results = list_results(task, recipe, metrics, pipeline)
    data = list_datasets(task, recipe)
    return ModelCardData(
        language="en" if data and not recipe["data"].get("corpus") else None,
        library_name=library,
        pipeline_tag=pipeline,
        tags=["bert", "bertkit", task.name],
        base_model=find_base(recipe),
        datasets=data or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def find_base(recipe: Mapping[str, Any]) -> str | None:
    """The Hub's name of the checkpoint; None if it is a directory, or there is none."""
    checkpoint = recipe.get("checkpoint") or ""
    return checkpoint if is_hub_name(checkpoint) and not Path(checkpoint).exists() else None


def describe_start(recipe: Mapping[str, Any]) -> str:
    """What the training started from."""
    if base := find_base(recipe):
        return f"[{base}](https://huggingface.co/{base})"
    return quote_code(hide_paths(recipe["checkpoint"])) if recipe.get("checkpoint") else "random weights"


def list_datasets(task: Task, recipe: Mapping[str, Any]) -> list[str]:
    """The data sets of the Hub that were trained on."""
    options, copies = recipe["data"], task.copies
    corpora = [source for source in options.get("corpus", []) if source != DOCS and is_hub_name(source)]
    found = [source.partition(":")[0] for source in corpora if not Path(source).exists()]
    if "train" in copies and not options["dir"] and not options.get("train_file"):
        found.append(copies["train"][0])
    return list(dict.fromkeys(found))


def place_score(task: Task, key: str) -> tuple[str, str]:
    """The split that a score in metrics.json is of, and the score's name in every split."""
    found = []
    for split, form in task.splits.items():
        before, after = form.split("{}")
        if key.startswith(before) and key.endswith(after):
            found.append((len(form), split, key.removeprefix(before).removesuffix(after)))
    _, split, name = max(found)
    return split, name


def list_results(task: Task, recipe: Mapping[str, Any], metrics: Mapping[str, Any], pipeline: str) -> list[EvalResult]:
    """The scores for which the Hub has a word, in their official unit, with the data that they are of."""
    title, copies = task.title, task.copies
    if recipe["data"].get("dir"):
        title, copies = f"{title}, local files", {}
    results = []
    for row in task.list_rows(metrics):
        split, name = place_score(task, row.key)
        if name not in MEASURES:
            continue
        dataset, config, hub_split = copies.get(split, ("unknown", None, split))
        results.append(
            EvalResult(
                task_type=pipeline,
                dataset_type=dataset,
                dataset_name=title,
                dataset_config=config,
                dataset_split=hub_split,
                metric_type=MEASURES[name],
                metric_name=row.name,
                metric_value=metrics[row.key],
            )
        )
    return results


def list_scores(task: Task, recipe: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """The lines of a table: the scores beside what knowing nothing has and what the paper has; and the seed."""
    rows = task.list_rows(metrics)
    if not rows:
        return ["The data have no labels, so nothing is scored."]
    lines = ["| held out | this model | knowing nothing | the paper |", "|---|---|---|---|"]
    for row in rows:
        nothing = [f"{row.show(metrics[key])} ({name})" for name, key in row.baselines.items()]
        paper = [f"{row.show(value)} ({name})" for name, value in row.paper.items()]
        title = row.name + " (%)" * bool(row.unit)
        lines.append(f"| {title} | {row.show(metrics[row.key])} | {', '.join(nothing)} | {', '.join(paper)} |")
    return [*lines, "", f"Seed {recipe['train']['seed']}, after {metrics['updates']:,} updates."]


def describe_data(task: Task, recipe: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Where the data are from, and how many."""
    options, title, copies = recipe["data"], task.title, task.copies
    lines = []
    if options.get("dir"):
        folder = quote_code(hide_paths(options["dir"], "dir"))
        lines.append(f"{title}, from local files in the official form ({folder}).")
    elif copies:
        dataset, config, _ = next(iter(copies.values()))
        lines.append(f"{title}: [{dataset}](https://huggingface.co/datasets/{dataset}), configuration `{config}`.")
    for key, words in ORIGINS.items():
        if given := options.get(key):
            names = hide_paths(given if isinstance(given, list) else [given], key)
            lines.append(words.format(", ".join(map(quote_code, names))))
    if DOCS in options.get("corpus", []):
        lines.append(f"`{DOCS}` is the documentation of the Python packages that were installed there.")
    return [*lines, "Inputs to the model: " + ", ".join(f"{split} {count:,}" for split, count in sizes.items()) + "."]


def list_limits(task: Task, recipe: Mapping[str, Any], metrics: Mapping[str, Any], config: Any) -> list[str]:
    """What the recipe and the scores say of what the model cannot be expected to do."""
    options, updates = recipe["data"], metrics["updates"]
    longest = max(list_lengths(recipe))
    lines = [f"It takes up to {config.max_position_embeddings:,} tokens, and this run used up to {longest:,}."]
    if recipe.get("freeze") or options.get("features"):
        lines.append("The encoder was left as it was; only what is above it was trained.")
    for key, words in (("max_train_samples", "examples"), ("limit_characters", "characters of each source")):
        if options.get(key):
            lines.append(f"Trained on the first {options[key]:,} {words} only.")
    seen = updates * recipe["batch_size"]
    whole = task.recipe["train"].get("max_steps", 0) * task.recipe["batch_size"]
    if seen < whole:
        lines.append(f"This training has seen {seen:,} sequences, {seen / whole:.2%} of the paper's {whole:,}.")
    if options.get("dir"):
        lines.append(
            "Whether the local files are the official ones, on which the paper's values are, nobody has checked."
        )
    lines += [line[0].upper() + line[1:] + "." for line in task.comment(metrics)]
    return [*lines, "It was measured on the data named above, and on nothing else."]


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Versions, hardware and commit."""
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    hardware = ", ".join(environment["gpus"]) or f"{environment['processor']}, {environment['threads']} threads"
    count = f", {environment['processes']} processes" * (environment["processes"] > 1)
    commit = f" (commit `{environment['commit']}`)" if environment.get("commit") else ""
    system = f"Python {environment['python']} and bertkit {environment['bertkit']}{commit}"
    return f"{packages}, {system}, on {hardware}{count}; {environment['platform']}"


def quote_code(text: str) -> str:
    """Return a text of unknown origin as a Markdown code span, in which nothing has a meaning but longer backticks."""
    text = make_printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " * (not text or "`" in (text[0], text[-1]))
    return f"{fence}{pad}{text}{pad}{fence}"


def hide_paths(value: Any, key: str = "") -> Any:
    """Return the value with every path in it shortened to its last part: folders may name a person or a client.

    What can be a name on the Hub, and is no path here, stays, unless its key takes paths only.
    """
    if isinstance(value, Mapping):
        return {name: hide_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_paths(item, key) for item in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    is_path = key in LOCAL or not is_hub_name(value) or os.path.exists(value)
    return Path(value).name or value if is_path else value


# --- The upload -------------------------------------------------------------------------------------------------------


def check_push(repo: str) -> str:
    """The whole name of a repository that can be pushed to, as far as is known without trying; asked before training.

    Raises:
        UsageError: no token, one that may only read, no Hub, a name that is none or in a namespace of others.
    """
    with explain_hub(f"nothing can be pushed to {repo}"):
        me = HfApi().whoami()
        user, role = me["name"], me.get("auth", {}).get("accessToken", {}).get("role")
        proposed = f"{user}/{re.sub('[^A-Za-z0-9_]+', '-', repo.rpartition('/')[2]).strip('-') or 'my-bert'}"
        try:
            validate_repo_id(repo)
        except HFValidationError:
            raise UsageError(f"{repo!r} is no name of a repository; write {proposed}") from None
        if role == "read":
            raise UsageError(
                f"nothing can be pushed to {repo}: the token of {user} may only read; log in with one that may write: "
                f"{LOGIN}"
            )
        owner, _, name = repo.rpartition("/")
        known = [user, *(organization["name"] for organization in me.get("orgs", []))]
        # A fine-grained token does not tell all organizations.
        if owner and role == "write" and owner.lower() not in map(str.lower, known):
            raise UsageError(
                f"nothing can be pushed to {repo}: it would belong to {owner}, not {user}; write {proposed}"
            )
    return f"{owner or user}/{name}"


def push(output: Path, repo: str, *, private: bool = False, report: Report = ignore) -> str:
    """Uploads a finished run to a repository that is made if need be, in one commit, and gives its address.

    What has been uploaded when something fails is not uploaded again. The card gets the repository's name, and of a run
    in a study what the study knows.

    Args:
        private: make the repository private; one that is public already is refused.

    Raises:
        UsageError: the run is not finished or has no weights, the Hub refuses or cannot be reached; the run stays as it
            is, and nothing is half there.
    """
    files = gather_files(output)
    repo = check_push(repo)
    files |= {CARD: make_public_card(output, repo).encode(), RECIPE: make_public_recipe(output / RECIPE)}
    with explain_hub(f"{output} is not on the Hub as {repo}"):
        address = HfApi().create_repo(repo, private=private or None, exist_ok=True)
        if private and not HfApi().repo_info(repo).private:
            raise UsageError(
                f"{output} is not pushed: {repo} is public already; leave out --private, choose another name, or make "
                f"it private first: hf repos settings {repo} --private"
            )
        size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
        report(f"{len(files)} files, {size / 1e6:,.1f} MB, go to {address}")
        operations = [CommitOperationAdd(name, file) for name, file in files.items()]
        HfApi().create_commit(
            repo, operations, commit_message=f"bertkit {bertkit.__version__}: {output.resolve().name}"
        )
    return str(address)


def gather_files(output: Path) -> dict[str, Path | bytes]:
    """Name -> the file of a finished run that is published, but for its card.

    Raises:
        UsageError: there is no run, it is not finished, it lacks weights, tokenizer or card, or one of them is a link.
    """
    if not (output / RECIPE).is_file():
        if study := read_study(output):
            chosen = dict.fromkeys(str(output / one["run"]) for one in study["chosen"])
            runs = shorten(", ".join(chosen), 200, placeholder="…") or "none has finished"
            raise UsageError(f"{output} is a study; push a run of it ({runs})")
        raise UsageError(f"there is no run in {output}; give the directory of a finished one")
    if not (output / METRICS).is_file():
        raise UsageError(f"the run in {output} is not finished; the command that began it finishes it")
    weights = list_weights(output)
    if missing := [name for name in weights if not (output / name).is_file()]:
        raise UsageError(f"{output} has no {missing[0]} here, so nothing can be pushed; push from where it was trained")
    for name in (VOCABULARY, CARD):
        if not (output / name).is_file():
            raise UsageError(f"{output} has no {name}; delete {METRICS}, and the command that began the run writes it")
    files = {name: output / name for name in (*weights, *PUBLISHED) if (output / name).is_file()}
    if link := next((path for path in (*files.values(), output / CARD) if path.is_symlink()), None):
        raise UsageError(f"{link} is a link, and what it leads to may be no part of the run; put a copy in its place")
    return files


def list_weights(output: Path) -> list[str]:
    """Return the names of a run's files of weights: one, or an index and the shards that it lists.

    Raises:
        UsageError: the index is damaged, or lists something else.
    """
    if (output / WEIGHTS).is_file() or not (output / INDEX).is_file():
        return [WEIGHTS]
    try:
        names = sorted(set(json.loads((output / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        if other := [name for name in names if not SHARD.fullmatch(name)]:
            raise ValueError(f"{other[0]!r} is no shard of a model")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{output / INDEX} is damaged ({join_lines(error)}); put back the run's own") from None
    return [INDEX, *names]


def make_public_card(output: Path, repo: str) -> str:
    """A run's card, as it is now, with the name of the repository instead of the run's, and what its study knows."""
    name = repo.rpartition("/")[2]
    with explain_refusal(f"the card {output / CARD}"):
        card = ModelCard((output / CARD).read_text(encoding="utf-8"))
        if card.data.get("model_name"):
            card.data.model_name = name
        text = str(card)
    if found := re.search(r'from_pretrained\("([^"\n]+)"\)', text):
        text = text.replace(found[0], f'from_pretrained("{repo}")')
        titles = "|".join(re.escape(path.name) for path in (Path(found[1]), output.resolve()) if path.name)
        text = re.sub(rf"^# ({titles})$", f"# {name}", text, count=1, flags=re.MULTILINE)
    if note := describe_study(output):
        parts = re.split(r"(?<=\n)(?=## )", text)
        scores = next((place for place, part in enumerate(parts) if part.startswith("## Scores")), -1)
        parts[scores] = f"{parts[scores].rstrip()}\n\n{note}\n\n"
        text = "".join(parts)
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}\b", "~", text) if home != "/" else text


def make_public_recipe(path: Path) -> bytes:
    """Return the recipe without the folders of this machine, as the card has it since the training.

    Where the run was trained it could be seen which names are paths; a card without a recipe is decided on here.
    """
    with explain_refusal(str(path)):
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    hidden = hide_paths(recipe)
    with suppress(OSError, ValueError, TypeError):
        card = path.with_name(CARD).read_text(encoding="utf-8")
        shown = tomllib.loads(re.search(r"^```toml\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[1])
        hidden = hide_paths(shown) if shown.keys() == recipe.keys() else hidden
    return path.read_bytes() if hidden == recipe else tomli_w.dumps(hidden).encode()


def describe_study(output: Path) -> str:
    """What the study that a run belongs to says of it: of how many it is the best, and what its other seeds score.

    Empty where it belongs to none.
    """
    run = output.resolve()
    studies = ((folder, read_study(folder)) for folder in run.parents)
    folder, study = next(((folder, study) for folder, study in studies if study), (None, None))
    if study is None:
        return ""
    place = run.relative_to(folder).as_posix()
    lines = [
        f"The best of {one['of_runs']} runs on the very data that it is scored on: its score is optimistic."
        for one in study["chosen"]
        if one["run"] == place and one["of_runs"] > 1
    ][:1]
    for cell in study["cells"]:
        seeds = [str(one["seed"]) for one in cell["runs"] if one["status"] == "finished"]
        if cell["n"] > 1 and place in [one["directory"] for one in cell["runs"]]:
            column = study["columns"][cell["column"]]
            row = Row(column["name"], column["metric"], unit=column["unit"])
            lines.append(
                f"Over the {cell['n']} seeds {', '.join(seeds)}: {row.name} {row.show(cell['mean'])} ± "
                f"{row.show(cell['sd'])}{' %' * bool(row.unit)} (mean and standard deviation)."
            )
    return " ".join(dict.fromkeys(lines))


def read_study(folder: Path) -> dict[str, Any] | None:
    """The results of the study in a directory; None where there is none, or a study.json of somebody else's.

    Raises:
        UsageError: the file is damaged.
    """
    if not (folder / STUDY_RESULT).is_file():
        return None
    with explain_refusal(str(folder / STUDY_RESULT)):
        found = json.loads((folder / STUDY_RESULT).read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("columns"), dict):
        return None
    for name, keys in (("chosen", {"run", "of_runs"}), ("cells", {"n", "column", "runs"})):
        parts = found.get(name)
        if not isinstance(parts, list) or not all(isinstance(part, dict) and keys <= part.keys() for part in parts):
            return None
    return found


# --- What goes wrong --------------------------------------------------------------------------------------------------


@contextmanager
def explain_hub(what: str) -> Iterator[None]:
    """What huggingface_hub raises becomes a UsageError that begins with `what`; it says nothing of what it retries.

    It waits up to UPLOAD_TIMEOUT for each answer, and not without end.
    """
    verbosity, session = logging.get_verbosity(), get_session()
    timeout, session.timeout = session.timeout, UPLOAD_TIMEOUT
    logging.set_verbosity_error()
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # also the transport's: huggingface_hub has changed its HTTP library more than once
        raise UsageError(f"{what}: {explain_failure(error)}") from None
    finally:
        session.timeout = timeout
        logging.set_verbosity(verbosity)


def explain_failure(error: BaseException) -> str:
    """The reason and the remedy."""
    while not hasattr(error, "response") and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token; log in with hf auth login, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    words = getattr(error, "server_message", None) or join_lines(error)
    reason = shorten(" ".join(words.split()), 200, placeholder="…")
    if "xet-write-token" in words and "404" in words:
        return "this server has no xet storage, which huggingface_hub uses; set HF_HUB_DISABLE_XET=1"
    # The errors of xet have no response, only words.
    found = re.search(r"\b([45]\d\d) [A-Z]", words)
    status = getattr(getattr(error, "response", None), "status_code", None) or int(found[1] if found else 0)
    for statuses, remedy in REMEDIES:
        if status in statuses:
            return f"{reason} ({status}); {remedy}"
    if status:
        return f"{reason} ({status}); the same command tries again"
    return f"{reason} ({type(error).__name__}); check the network, and the same command tries again"
