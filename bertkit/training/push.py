"""Upload a finished run to a repository on the Hub.

Only named files are uploaded: weights, configuration, tokenizer, recipe, scores, log, curves and card. No other file
leaves the machine, because data, predictions, mistakes and evaluations repeat a person's texts. Only the last part of
each path is published, so folders of the training machine stay private.

Left out: pull requests.
"""

import os
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import msgspec
import tomli_w
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

import bertkit
from bertkit.errors import UsageError, explain_refusal, join_lines
from bertkit.reports.tables import ScoreRow
from bertkit.system.hub import CARD, LOGIN, explain_hub
from bertkit.system.progress import Report, ignore
from bertkit.training.model_card import hide_paths
from bertkit.training.run_dir import (
    EVAL_RESULTS,
    METRICS_FILE,
    PUBLISHED,
    RECIPE_FILE,
    VOCABULARY,
    StudyResult,
    read_record,
    read_study,
)

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ShardName = Annotated[str, msgspec.Meta(pattern=r"^model-\d+-of-\d+\.safetensors$")]


class WeightsIndex(msgspec.Struct):
    """The index of sharded weights: the shard of each of them."""

    weight_map: dict[str, ShardName]


def check_push(repo: str) -> str:
    """Check, before training, that a repository can be pushed to, and return its name with the owner.

    Raises:
        UsageError: There is no token, the token is read-only, the Hub cannot be reached, the name is invalid or its
            namespace belongs to others.
    """
    with explain_hub(f"cannot push to {repo}"):
        me = HfApi().whoami()
        user, role = me["name"], me.get("auth", {}).get("accessToken", {}).get("role")
        proposed = f"{user}/{re.sub('[^A-Za-z0-9_]+', '-', repo.rpartition('/')[2]).strip('-') or 'my-bert'}"
        try:
            validate_repo_id(repo)
        except HFValidationError:
            raise UsageError(f"{repo!r} is not a repository name; use {proposed}") from None
        owner, _, name = repo.rpartition("/")
        known = [user, *(organization["name"] for organization in me.get("orgs", []))]
        # With a fine-grained token the Hub does not list all organizations.
        is_foreign = owner and role == "write" and owner.lower() not in map(str.lower, known)
        if role == "read" or is_foreign:
            raise UsageError(
                f"cannot push to {repo}: the token of {user} has no write access to it; use {proposed}, or log in with "
                f"a token that has: {LOGIN}"
            )
    return f"{owner or user}/{name}"


def push(output: Path, repo: str, *, private: bool = False, report: Report = ignore) -> str:
    """Upload a finished run in one commit, to a repository that is created if needed, and return its URL.

    Files uploaded before a failure are not uploaded again. The card gets the repository's name and, for a run in a
    study, the study's results.

    Args:
        private: Make the repository private; a repository that is already public is an error.

    Raises:
        UsageError: The run is not finished or has no weights, or the Hub refuses or cannot be reached; the run is
            unchanged, and nothing is committed in part.
    """
    files = gather_files(output)
    repo = check_push(repo)
    files |= {CARD: make_public_card(output, repo).encode(), RECIPE_FILE: make_public_recipe(output / RECIPE_FILE)}
    with explain_hub(f"{output} was not pushed to {repo}"):
        address = HfApi().create_repo(repo, private=private or None, exist_ok=True)
        if private and not HfApi().repo_info(repo).private:
            raise UsageError(
                f"{output} was not pushed: {repo} is already public; leave out --private, choose another name, or make "
                f"it private first: hf repos settings {repo} --private"
            )
        size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
        report(f"pushing {len(files)} files, {size / 1e6:,.1f} MB, to {address}")
        operations = [CommitOperationAdd(name, file) for name, file in files.items()]
        HfApi().create_commit(
            repo, operations, commit_message=f"bertkit {bertkit.__version__}: {output.resolve().name}"
        )
    return str(address)


def gather_files(output: Path) -> dict[str, Path | bytes]:
    """Return the files of a finished run that are published, by name, without its card.

    Raises:
        UsageError: There is no run, it is not finished, it lacks weights, tokenizer or card, or one of them is a link.
    """
    if not (output / RECIPE_FILE).is_file():
        if study := find_study(output):
            chosen = dict.fromkeys(str(output / one.run) for one in study.chosen)
            runs = shorten(", ".join(chosen), 200, placeholder="…") or "none has finished"
            raise UsageError(f"{output} is a study; push one of its runs ({runs})")
        raise UsageError(f"there is no run in {output}; give the directory of a finished run")
    if not (output / METRICS_FILE).is_file():
        raise UsageError(f"the run in {output} is not finished; repeat the command that started it")
    weights = list_weights(output)
    if missing := [name for name in (*weights, VOCABULARY, CARD) if not (output / name).is_file()]:
        raise UsageError(
            f"{output} has no {missing[0]} here; push from the machine that trained it, or delete {METRICS_FILE} and "
            "repeat the command of the run"
        )
    results = [path.relative_to(output).as_posix() for path in sorted(output.glob(f"{EVAL_RESULTS}/*.yaml"))]
    files = {name: output / name for name in (*weights, *PUBLISHED, *results) if (output / name).is_file()}
    others = (output / name for name in (CARD, EVAL_RESULTS))
    if link := next((path for path in (*files.values(), *others) if path.is_symlink()), None):
        raise UsageError(f"{link} is a link, and its target may not belong to the run; replace it with a copy")
    return files


def list_weights(output: Path) -> list[str]:
    """Return the names of a run's weight files: one file, or an index and its shards.

    Raises:
        UsageError: The index is damaged, or lists other files.
    """
    if (output / WEIGHTS).is_file() or not (output / WEIGHTS_INDEX).is_file():
        return [WEIGHTS]
    try:
        index = read_record(output / WEIGHTS_INDEX, WeightsIndex)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{output / WEIGHTS_INDEX} is damaged ({join_lines(error)}); restore the run's original file"
        ) from None
    return [WEIGHTS_INDEX, *sorted(set(index.weight_map.values()))]


def make_public_card(output: Path, repo: str) -> str:
    """Return the current card of a run with the repository's name in place of the run's, and its study's results."""
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
    """Return the recipe without the folders of this machine, as it stands in the card.

    On the training machine existing paths were recognised; if the card has no recipe, paths are recognised here.
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
    """Return sentences on the study of a run: how many runs it was selected from, and scores over seeds.

    Empty if the run belongs to no study.
    """
    run = output.resolve()
    studies = ((folder, find_study(folder)) for folder in run.parents)
    folder, study = next(((folder, study) for folder, study in studies if study), (None, None))
    if study is None:
        return ""
    place = run.relative_to(folder).as_posix()
    is_apart = all("tune_score" in one.metrics for cell in study.cells for one in cell.runs if one.metrics)
    on = "rows that are not scored." if is_apart else "the data that it is scored on, so its score is optimistic."
    most = max((winner.of_runs for winner in study.chosen if winner.run == place), default=0)
    lines = [f"The best of {most} runs on {on}"] if most > 1 else []
    for cell in study.cells:
        if cell.n > 1 and place in [one.directory for one in cell.runs]:
            seeds = ", ".join(str(one.seed) for one in cell.runs if one.status == "finished")
            column = study.columns[cell.column]
            row = ScoreRow(column.name, column.metric, unit=column.unit)
            lines.append(
                f"Over the {cell.n} seeds {seeds}: {row.name} {row.show(cell.mean)} ± "
                f"{row.show(cell.sd)}{' %' * bool(row.unit)} (mean and standard deviation)."
            )
    return " ".join(dict.fromkeys(lines))


def find_study(folder: Path) -> StudyResult | None:
    """Return the results of the study in a directory; None if there is none that can be read."""
    with suppress(UsageError):
        return read_study(folder)
