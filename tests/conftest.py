"""Fixtures for the model tests: tiny random models, the same in plain transformers, and padded batches."""

import copy
import gc
import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ["HF_ASSETS_CACHE"] = mkdtemp(prefix="bertkit-assets-")  # of features and baselines

import hypothesis
import pytest
import torch
import transformers
from huggingface_hub import constants
from torch import Tensor

import bertkit
from bertkit import cli
from bertkit.errors import UsageError
from bertkit.model.config import BertConfig
from bertkit.system.signals import Interrupted
from bertkit.tasks import Task
from bertkit.training.recipe import Recipe, merge
from tests.browser import BROWSERS, Browser
from tests.hub import serve
from tests.refusals import (  # noqa: F401 - hooks and a fixture
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionfinish,
    refused,
)

transformers.utils.logging.set_verbosity_error()  # as the command line has it
transformers.utils.logging.disable_progress_bar()
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HEADS = (
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)


# No deadline: a busy machine may take a second for what takes 10 ms. `make test-all` asks for the thorough profile.
hypothesis.settings.register_profile("fast", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile("fast")
torch.set_num_threads(1)  # the models are too small for more, and several test processes share the cores


def pytest_unconfigure() -> None:
    """Delete the cache of features and baselines."""
    shutil.rmtree(os.environ["HF_ASSETS_CACHE"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which each Trainer run triggers."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draft(task: Task, *given: Mapping[str, Any]) -> Recipe:
    """Return a recipe that is not checked, for a test of what reads it."""
    return Recipe(**merge(task.recipe, *given))


def change_task(task: Task, **values) -> Task:
    """Return the task with other attributes or methods; a method is a function without self."""
    other = copy.copy(task)
    vars(other).update(values)
    return other


def make_model(head: str, kernel: str = "packed", **values) -> transformers.PreTrainedModel:
    """Return a tiny model in evaluation mode with random parameters, including biases and LayerNorms."""
    values = TINY | {"num_labels": 3} | {"is_decoder": head == "BertLMHeadModel"} | values
    if head == "BertForQuestionAnswering":
        values["num_labels"] = 2
    model = getattr(bertkit, head)._from_config(BertConfig(**values), attn_implementation=kernel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
    return model.eval()


def make_twin(model: transformers.PreTrainedModel, kernel: str = "sdpa") -> transformers.PreTrainedModel:
    """Return the transformers model of the same name, sizes and weights, in evaluation mode."""
    config = transformers.BertConfig(**{**model.config.to_dict(), "use_cache": False})
    twin = getattr(transformers, type(model).__name__)._from_config(config, attn_implementation=kernel)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def make_batch(lengths: list[int], vocab_size: int = TINY["vocab_size"], left: bool = False) -> dict[str, Tensor]:
    """Return a batch (B, T) of random tokens in two segments, padded right or left to the longest length."""
    columns = torch.arange(max(lengths))
    mask = (columns < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if left else mask
    ids = torch.randint(1, vocab_size, mask.shape) * mask
    segments = (columns >= torch.tensor(lengths)[:, None] // 2).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def shape_for(head: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch for a head: multiple choice reads B rows as B / 2 questions with two choices."""
    if head != "BertForMultipleChoice":
        return batch
    return {name: x.unflatten(0, (-1, 2)) for name, x in batch.items()}


def make_labels(head: str, batch: dict[str, Tensor], num_labels: int = 3) -> dict[str, Tensor]:
    """Return random labels for a batch (B, T); token labels for about half of the real tokens."""
    shape, mask = batch["input_ids"].shape, batch["attention_mask"].bool()
    chosen = mask & (torch.rand(shape) < 0.5)
    sentence = torch.randint(2, shape[:1])
    if head in ("BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel"):
        tokens = torch.randint(1, TINY["vocab_size"], shape).masked_fill(~chosen, -100)
        extra = {"next_sentence_label": sentence} if head == "BertForPreTraining" else {}
        return {"labels": tokens} | extra
    if head == "BertForTokenClassification":
        return {"labels": torch.randint(num_labels, shape).masked_fill(~chosen, -100)}
    if head == "BertForQuestionAnswering":
        ends = mask.long().argmax(dim=1)  # the first real token; 0 except with left padding
        return {"start_positions": ends, "end_positions": ends + 1}
    if head == "BertForMultipleChoice":
        return {"labels": sentence[::2]}
    return {"labels": sentence}


def collect(outputs: transformers.utils.ModelOutput, mask: Tensor) -> dict[str, Tensor]:
    """Return every output by name, hidden states separately; token outputs (B, T, ...) without padding."""
    flat: dict[str, Tensor] = {}
    for name, value in outputs.items():
        many = isinstance(value, tuple)
        flat.update({f"{name}.{i}": x for i, x in enumerate(value)} if many else {name: value})
    mask = mask.flatten(0, -2).bool()
    return {name: x[mask] if x.shape[:2] == mask.shape else x for name, x in flat.items()}


def differ(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the second's largest absolute value."""
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.fixture
def call(here, monkeypatch, capsys, tmp_path):
    """Call the program in an empty directory; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["bertkit", *map(str, arguments)])
        capsys.readouterr()  # discard earlier output, such as the progress of writing a model
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return call


class RunHere:
    """Does a run in this process, in place of `start_command`; `watch` is told of its directory and progress."""

    watch = staticmethod(lambda output, done: None)

    def __init__(self, words, log, threads, gpus=()):
        from bertkit.studies.run_processes import do_run

        given = dict(zip(words[1::2], words[2::2], strict=True))
        recipe, output, kept = Path(given["--recipe"]), Path(given["--output"]), map(int, words[6::2])
        self.code = 0
        with log.open("w") as stream:
            try:
                say, watch = partial(print, file=stream), lambda done, *_: self.watch(output, done)
                do_run(recipe, output, set(kept), say, watch)
            except Interrupted as stop:
                self.code = 128 + stop.number
            except UsageError as error:
                print(f"bertkit: {error}", file=stream)
                self.code = 2

    def poll(self):
        return self.code

    def terminate(self):
        pass


@pytest.fixture(scope="module")
def here():
    """Do the runs of studies in this process: starting one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertkit.studies.runner.start_command", RunHere)
        patch.setattr("bertkit.studies.search.start_command", RunHere)
        patch.setattr("bertkit.studies.run_processes.POLL", 0.0)
        yield


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve a mock Hub to huggingface_hub, with ada logged in, an empty cache and no waiting times."""
    with serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_ada")
        hub.waits = []
        for module in ("utils._http", "file_download"):
            monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=hub.waits.append))
        yield hub


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """Return a tiny random classifier of three labels."""
    from tests.world import write_head

    labels = {0: "bad", 1: "so-so", 2: "good"}
    return write_head(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", id2label=labels)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no Chromium on PATH ({', '.join(BROWSERS)})")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
