"""Upload a finished run to a repository on the Hub.

Only named files are uploaded: weights, configuration, tokenizer, recipe, scores, log, curves and card. No other file
leaves the machine, because data, predictions, mistakes and evaluations repeat a person's texts. Only the last part of
each path is published, so folders of the training machine stay private.

Left out: pull requests.
"""

import re
from contextlib import suppress
from pathlib import Path

import tomli_w
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id

import bertkit
from bertkit.errors import UsageError, as_usage_error
from bertkit.system.hub import CARD, LOGIN, explain_hub
from bertkit.system.progress import Report, ignore
from bertkit.training.model_card import hide_paths
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import EVAL_RESULTS, PUBLISHED, RECIPE_FILE, VOCABULARY, check_finished
from bertkit.training.study_results import StudyResults

WEIGHTS = "model.safetensors"


def check_push(repo: str) -> str:
    """Check, before training, that a repository can be pushed to, and return its name with the owner."""
    with explain_hub(f"cannot push to {repo!r}"):
        validate_repo_id(repo)
        me = HfApi().whoami()
        if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UsageError(f"cannot push to {repo!r}: your token has no write access; log in with another: {LOGIN}")
    return repo if "/" in repo else f"{me['name']}/{repo}"


def push(output: Path, repo: str, *, private: bool = False, report: Report = ignore) -> str:
    """Upload a finished run in one commit, to a repository that is created if needed, and return its URL.

    Files uploaded before a failure are not uploaded again. The card gets the repository's name and, for the best run of
    a study, the number of runs that it was chosen from.

    Args:
        private: Make the repository private; a repository that is already public is an error.
    """
    files = gather_files(output)
    repo = check_push(repo)
    card = make_public_card(output, repo)
    files |= {CARD: card.encode(), RECIPE_FILE: make_public_recipe(output / RECIPE_FILE, card)}
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
    """Return the files of a finished run that are published, by name, without its card."""
    shards = sorted(path.name for path in output.glob("model*-of-*.safetensors"))
    weights = [f"{WEIGHTS}.index.json", *shards] if shards else [WEIGHTS]
    check_finished(output, *weights, VOCABULARY, CARD)
    results = [path.relative_to(output).as_posix() for path in sorted(output.glob(f"{EVAL_RESULTS}/*.yaml"))]
    return {name: output / name for name in (*weights, *PUBLISHED, *results) if (output / name).is_file()}


def make_public_card(output: Path, repo: str) -> str:
    """Return the card of a run under the repository's name, with a note on its study."""
    name = repo.rpartition("/")[2]
    with as_usage_error(f"the card {output / CARD}"):
        card = ModelCard((output / CARD).read_text(encoding="utf-8"))
        if card.data.get("model_name"):
            card.data.model_name = name
        text = str(card)
    if found := re.search(r'from_pretrained\("([^"\n]+)"\)', text):
        text = text.replace(found[0], f'from_pretrained("{repo}")')
        titles = "|".join(re.escape(path.name) for path in (Path(found[1]), output.resolve()) if path.name)
        text = re.sub(rf"^# ({titles})$", f"# {name}", text, count=1, flags=re.MULTILINE)
    if note := describe_choice(output):
        text = text.replace("\n\n## Data\n", f"\n\n{note}\n\n## Data\n", 1)
    return text


def make_public_recipe(path: Path, card: str) -> bytes:
    """Return the recipe without the folders of the machine that trained, where existing paths were recognised."""
    if found := re.search(r"^```toml\n(.*?)^```$", card, re.DOTALL | re.MULTILINE):
        return found[1].encode()
    return tomli_w.dumps(hide_paths(read_recipe(path))).encode()


def describe_choice(output: Path) -> str:
    """Return a sentence on the runs of a study of which this one is the best; empty without a study."""
    run = output.resolve()
    for folder in run.parents:
        with suppress(UsageError):  # most folders hold no study
            study = StudyResults.read(folder)
            name = run.relative_to(folder).as_posix()
            most = max((winner.of_runs for winner in study.chosen if winner.run == name), default=0)
            is_apart = all("tune_score" in one.metrics for cell in study.cells for one in cell.runs if one.metrics)
            on = "rows that are not scored" if is_apart else "the data that it is scored on, so its score is optimistic"
            return f"The best of {most} runs on {on}." if most > 1 else ""
    return ""
