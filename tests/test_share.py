"""The model card of a run, and its way to the Hub."""

import json
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from bertkit import share
from bertkit.errors import UsageError
from bertkit.run import run
from bertkit.tasks import TASKS
from tests.official import write_checkpoint
from tests.tasks.test_conformance import make_glue, make_pretraining


def test_the_card_says_what_it_is_how_to_load_it_and_how_to_repeat_it(tmp_path):
    run(TASKS["pretrain"], make_pretraining(tmp_path), output=tmp_path / "my-bert")
    card = ModelCard.load(tmp_path / "my-bert" / "README.md")
    assert card.data.library_name == "transformers"
    assert set(card.data.tags) == {"bert", "bertkit", "pretrain"}
    assert "from transformers import BertForPreTraining" in card.text
    metrics = json.loads((tmp_path / "my-bert" / "metrics.json").read_text())
    assert f"| masked-LM loss | {metrics['mlm_loss']:.4f} |" in card.text
    assert "hidden_size = 16" in card.text
    assert "torch 2" in card.text


def test_the_card_of_a_fine_tuned_model(tmp_path):
    run(TASKS["mnli"], make_glue(tmp_path, "mnli"), {"train": {"max_steps": 2}}, output=tmp_path / "run")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert set(card.data.tags) == {"bert", "bertkit", "mnli"}
    assert card.data.metrics == ["accuracy", "accuracy_mm"]
    assert "from transformers import BertForSequenceClassification" in card.text
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert f"| accuracy | {metrics['accuracy']:.4f} |" in card.text
    assert "`bertkit glue --task mnli --recipe recipe.toml` repeats the run" in card.text
    assert f"| accuracy, mismatched | {metrics['accuracy_mm']:.4f} |" in card.text


def test_the_card_of_a_head_that_plain_transformers_lacks_says_so(tmp_path):
    short = {"train": {"max_steps": 2}}
    run(TASKS["rte"], make_glue(tmp_path, "rte"), {"bilstm": True} | short, output=tmp_path / "top")
    card = ModelCard.load(tmp_path / "top" / "README.md").text
    assert "from bertkit import BertBiLSTMForSequenceClassification" in card
    assert "it loads the encoder only" in card
    assert "from left to right" not in card
    recipe = make_glue(tmp_path / "causal", "rte") | {
        "checkpoint": str(write_checkpoint(tmp_path / "c", is_decoder=True))
    }
    run(TASKS["rte"], recipe, short, output=tmp_path / "left")
    card = ModelCard.load(tmp_path / "left" / "README.md").text
    assert "from bertkit import BertForSequenceClassification" in card
    assert "one answer for every text" in card
    assert "BiLSTM" not in card


class FakeHub:
    """The part of HfApi that is used; `refuse` is what an upload raises."""

    def __init__(self, token=True, refuse=None):
        self.token = token
        self.refuse = refuse
        self.calls = []

    def __call__(self):
        return self

    def whoami(self):
        if not self.token:
            raise OSError("Token is required,\nbut no token found.")
        return {"name": "ada"}

    def create_repo(self, repo, **settings):
        self.calls.append(("create_repo", repo, settings))
        return Address(f"https://huggingface.co/ada/{repo.rpartition('/')[2]}")

    def upload_folder(self, **settings):
        if self.refuse:
            raise self.refuse
        self.calls.append(("upload_folder", SimpleNamespace(**settings)))

    def upload_file(self, **settings):
        self.calls.append(("upload_file", SimpleNamespace(**settings)))


class Address(str):
    """huggingface_hub's RepoUrl, in so far as it is used."""

    @property
    def repo_id(self):
        return "/".join(self.split("/")[-2:])


@pytest.fixture
def connect(monkeypatch):
    """Puts a fake Hub in the place of the real one, and gives it."""

    def connect(**settings):
        hub = FakeHub(**settings)
        monkeypatch.setattr(share, "HfApi", hub)
        return hub

    return connect


def test_without_a_token_nothing_can_be_pushed(connect):
    connect(token=False)
    with pytest.raises(UsageError) as error:
        share.check_push("ada/bert")
    assert str(error.value) == (
        "nothing can be pushed to ada/bert: Token is required, but no token found.; log in with `hf auth login`, or "
        "leave out --push-to-hub"
    )


def test_without_a_network_either():
    """The tests run offline, with the real HfApi."""
    with pytest.raises(UsageError, match=r"nothing can be pushed to ada/bert: .*leave out --push-to-hub") as error:
        share.check_push("ada/bert")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("repo", ["bert", "ada/bert"])
def test_names_of_repositories(connect, repo):
    hub = connect()
    share.check_push(repo)
    assert hub.calls == [], "to ask is not to make it"


@pytest.mark.parametrize(
    ("repo", "proposed"), [("a/b/c", "ada/c"), ("ada/", "ada/ada"), ("/bert", "ada/bert"), ("", "ada/my-bert")]
)
def test_names_that_are_none(connect, repo, proposed):
    connect()
    with pytest.raises(UsageError) as error:
        share.check_push(repo)
    assert str(error.value) == f"{repo!r} is no repository; write {proposed}"


def test_a_run_is_uploaded_without_its_checkpoints(connect, tmp_path):
    hub = connect()
    with pytest.raises(UsageError, match="has no weights here"):
        share.push(tmp_path, "ada/bert")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "README.md").write_text(f'from_pretrained("{tmp_path}")\n\n## Recipe\n')
    assert share.push(tmp_path, "ada/bert", "The best of 5.") == "https://huggingface.co/ada/bert"
    (_, repo, settings), (_, upload), (_, card) = hub.calls
    assert (card.repo_id, card.path_in_repo) == ("ada/bert", "README.md")
    assert card.path_or_fileobj.decode() == 'from_pretrained("ada/bert")\n\nThe best of 5.\n\n## Recipe\n'
    assert (repo, settings) == ("ada/bert", {"exist_ok": True})
    assert (upload.repo_id, upload.folder_path) == ("ada/bert", tmp_path)
    assert upload.commit_message.startswith("bertkit ")
    ours = ["model.safetensors", "predictions/dev.tsv"]
    files = [*ours, "README.md", "checkpoint-3/model.safetensors", "first/model.safetensors", "best/config.json"]
    kept = list(filter_repo_objects(files, ignore_patterns=upload.ignore_patterns))
    assert kept == ours


def test_a_refused_upload_is_one_line(connect, tmp_path):
    connect(refuse=OSError("403 Forbidden:\nyou may not write there"))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "README.md").touch()
    with pytest.raises(UsageError) as error:
        share.push(tmp_path, "eve/bert")
    assert str(error.value) == (
        f"{tmp_path} is not on the Hub as eve/bert (403 Forbidden: you may not write there); "
        "the same command tries again"
    )
