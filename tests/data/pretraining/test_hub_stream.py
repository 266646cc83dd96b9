"""A data set streamed from a Hub whose connections stall, break off, or are refused for some seconds."""

import io
import re
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.data.pretraining import sources
from bertkit.data.pretraining.build import build
from bertkit.data.pretraining.store import list_shards
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tests.corpora import list_finished, read_files, write_text
from tests.hub import Repo

NAME = "ada/stories"
FILES = [f"train-{number:05d}-of-00003.parquet" for number in range(3)]


def write_parquet(texts):
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), stream, row_group_size=40, compression="none")
    return stream.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return three parquet files of some row groups each, and a vocabulary."""
    folder = tmp_path_factory.mktemp("data")
    documents = write_text(folder / "text.txt", documents=1200).read_text().strip().split("\n\n")
    save_tokenizer(train_tokenizer(documents, size=100), folder / "vocab")
    files = {name: write_parquet(documents[number::3]) for number, name in enumerate(FILES)}
    assert min(map(len, files.values())) > 40_000
    return SimpleNamespace(files=files, vocab=folder / "vocab")


@pytest.fixture
def stories(hub, data, monkeypatch, tmp_path):
    """Serve the data set, with short waiting times."""
    import datasets
    import huggingface_hub.constants

    hub.repos[f"datasets/{NAME}"] = Repo(files=dict(data.files))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0.3)
    monkeypatch.setattr(datasets.config, "STREAMING_OPEN_RETRY_INTERVAL", 0.3)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    sources._load_hub.cache_clear()
    yield hub
    sources._load_hub.cache_clear()


FAULTS = {
    "stalls": {"sent": 10_000, "stall": 5.0},
    "is gone": {"sent": 10_000, "gone": 1.5},
    "is busy": {"status": 503},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_outage_changes_no_byte(stories, data, tmp_path, fault):
    build_it = partial(build, [NAME], load_tokenizer(str(data.vocab)))
    build_it(tmp_path / "straight")
    sources._load_hub.cache_clear()
    stories.fail("GET", r"/resolve/.*/train-00001", **FAULTS[fault])
    build_it(tmp_path / "made")
    assert stories.faults[0].times == 0
    assert read_files(tmp_path / "made") == read_files(tmp_path / "straight")


def test_a_hub_that_stays_away_is_one_line_and_the_same_command_continues(stories, data, monkeypatch, tmp_path, call):
    monkeypatch.setattr("datasets.config.STREAMING_READ_MAX_RETRIES", 2)
    monkeypatch.setattr("datasets.config.STREAMING_OPEN_MAX_RETRIES", 2)
    command = ("corpus", "build", NAME, "--vocab", data.vocab, "--workers", "1", "--output")
    assert call(*command, "straight")[0] == 0
    sources._load_hub.cache_clear()
    stories.fail("GET", r"/resolve/.*/train-00001", sent=10_000, gone=10_000)
    code, _, err = call(*command, "made")
    assert code == 2
    assert re.search(rf"^bertkit: the data set '{NAME}' cannot be read \(.*\); run the same command again$", err, re.M)
    there = list_finished(tmp_path / "made")
    assert [piece for piece, _ in list_shards(tmp_path / "made" / "shards")] == [0]
    sources._load_hub.cache_clear()
    code, _, err = call(*command, "made")
    assert (code, err.count("\n")) == (2, 1)
    assert "the Hub cannot be reached" in err
    stories.come_back()
    assert call(*command, "made")[0] == 0
    assert there.items() <= list_finished(tmp_path / "made").items()
    assert read_files(tmp_path / "made") == read_files(tmp_path / "straight")
