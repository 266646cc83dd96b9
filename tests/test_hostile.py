"""Files from other people: nothing in them is executed."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import modeling_utils

from bertkit import cli
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import load_config, load_model, make_config
from bertkit.model.heads import BertForSequenceClassification
from bertkit.model.onnx_model import ONNX_FILE
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from bertkit.training.run_dir import mark_complete
from tests.corpora import write_text
from tests.official import write_checkpoint, write_glue
from tests.world import PRETRAIN, make_recipe, stop_at

ROOT = Path(cli.__file__).parents[2]


class Exploit:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path):
    """Return the file that exists if foreign code was executed."""
    return tmp_path / "run-by-a-stranger"


def write_code(folder, mark):
    """Write a module that creates the mark, and the keys for which transformers would import it if trusted."""
    classes = "".join(f"class {name}: ...\n" for name in ("Config", "Model", "Tokenizer"))
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n{classes}")
    for name, keys in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": keys, "tokenizer_class": "Tokenizer"}))
    return folder / "tokenizer_config.json"


def test_code_that_comes_with_a_model_is_not_run(tmp_path, mark):
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"))
    written = write_code(folder, mark)
    load_config(str(folder))
    load_model(BertForSequenceClassification, str(folder), {})
    with pytest.raises(UsageError, match="is code of its own, which bertkit never runs; "):
        load_tokenizer(str(folder))
    content = json.loads(written.read_text())
    del content["auto_map"]
    written.write_text(json.dumps(content | {"tokenizer_class": "BertTokenizer"}))
    (found,) = Predictor(folder)(["good word1"])
    assert found["label"] in ("yes", "no")
    data = {"dir": str(write_glue(tmp_path / "glue")), "max_length": 16}
    recipe = {"checkpoint": str(folder), "data": data, "train": {"max_steps": 1}}
    run(Recipe.make(TASKS["rte"], recipe), output=tmp_path / "run")
    assert not mark.exists()
    assert "auto_map" not in json.loads((tmp_path / "run" / "config.json").read_text()), "nor is it handed on"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_code_of_the_hub_that_a_configuration_names_is_not_run(tmp_path, monkeypatch, key):
    fetched = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, **_: fetched.append(name))
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {key: "owner/repo"}))
    for load in (lambda: load_config(str(folder)), lambda: BertForSequenceClassification.from_pretrained(folder)):
        with pytest.raises(ValueError, match=r"attn_implementation 'owner/repo' is unknown; expected one of packed, "):
            load()
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match="'owner/repo' is unknown"):
        load_model(BertForSequenceClassification, str(folder), {"attn_implementation": "owner/repo"})
    with pytest.raises(UsageError, match=r"\[model\] cannot be used: attn_implementation 'owner/repo' is unknown"):
        make_config({"attn_implementation": "owner/repo"})
    assert fetched == []


def test_a_pickled_checkpoint_is_refused_with_the_remedy(tmp_path, mark, call):
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(mark)))
    glue = write_glue(tmp_path / "glue")
    for command in (["glue", "--task", "rte", "--data", glue, "--model", folder], ["predict", folder, "good"]):
        code, _, err = call(*command)
        assert code == 2
        assert re.fullmatch(
            r"bertkit: .*bert has no weights in safetensors but pytorch_model.bin, .*save_pretrained.*\n", err
        )
    with pytest.raises(UsageError, match="safetensors"):
        load_model(BertForSequenceClassification, str(folder), {})
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "it would have worked"


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scheduler.pt", "rng_state.pth"))],
)
def test_a_pickle_among_the_files_of_a_checkpoint_is_not_run(tmp_path, mark, name):
    """Return somebody else's run directory, to be continued."""
    recipe = make_recipe(write_text(tmp_path / "corpus.txt"))
    with pytest.raises(Interrupted):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run", progress=stop_at(4))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    torch.save({"state": Exploit(mark)}, checkpoint / name)
    mark_complete(checkpoint)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")
    assert not mark.exists()
    shutil.rmtree(checkpoint)
    assert run(Recipe.make(PRETRAIN, recipe), output=tmp_path / "run")["updates"] == 8


def test_an_export_with_weights_in_files_elsewhere_is_refused(tmp_path):
    """A graph may name files of weights."""
    onnx = pytest.importorskip("onnx")
    from tests.exports import write_export

    folder = shutil.copytree(write_export("BertForSequenceClassification")[1], tmp_path / "export")
    graph = onnx.load(folder / ONNX_FILE)
    tensor = max(graph.graph.initializer, key=lambda x: len(x.raw_data))
    (tmp_path / "outside").write_bytes(tensor.raw_data)
    shutil.copy(tmp_path / "outside", folder)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = tensor.external_data.add(key="location")

    def load(location):
        place.value = location
        (folder / ONNX_FILE).write_bytes(graph.SerializeToString())
        return Predictor(folder)

    for location in ("../outside", str(tmp_path / "outside")):
        with pytest.raises(UsageError, match=r"model\.onnx cannot be read .*; export the run again"):
            load(location)
    assert load("outside")(["good"]), "beside the graph it would be read"


def test_no_source_trusts_remote_code_or_reads_pickles_of_others():
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "bertkit").rglob("*.py")}
    assert len(sources) > 40
    unsafe = re.compile(r"trust_remote_code|torch\.load\(|allow_pickle=True|(?<![.\w])(eval|exec)\(|pickle\.load")
    assert [path.name for path, text in sources.items() if unsafe.search(text)] == []
