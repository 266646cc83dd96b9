"""An export answers as its run, no other directory is overwritten, and an int8 export states what it loses on dev."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from bertkit import BertForSequenceClassification, Predictor
from bertkit.data.tokenizer import TOKENIZER_FILES
from bertkit.errors import UsageError
from bertkit.inference import export as module
from bertkit.inference.export import export, make_batch
from bertkit.inference.predictor import EXPORT_FILE, get_form
from bertkit.model.checkpoint import load_config
from bertkit.model.onnx import quantize, write_onnx
from bertkit.model.onnx_model import ONNX_FILE, OnnxModel
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.exports import FAST, HEADS, LABELS, write_export
from tests.official import write_checkpoint, write_glue
from tests.world import make_texts, write_head

LONG = " ".join(make_texts(40))  # several times as long as the models' 128 positions
TEXTS = [*make_texts(9), LONG, {"text": "good", "text_pair": LONG}]
INPUTS = {
    "BertForSequenceClassification": TEXTS,
    "BertForPreTraining": [{"text": "good [MASK] word1", "text_pair": "so"}, "[MASK] [MASK]", "bad word [MASK] . ?"],
    "BertForTokenClassification": [*make_texts(5), LONG, {"words": ["good", "word1"]}],
    "BertForQuestionAnswering": [{"question": "word1 ?", "context": text} for text in (*make_texts(4), LONG)],
    "BertForMultipleChoice": [{"context": text, "endings": ["good", "so bad", "word1"]} for text in make_texts(4)],
    "BertForMaskedLM": ["good [MASK] word1", "[MASK] [MASK]", "bad word [MASK] . ?"],
    "BertForNextSentencePrediction": list(zip(make_texts(5), make_texts(5, seed=1), strict=True)),
}


def find_difference(one, other):
    """Return the largest difference of numbers in two results that are equal otherwise."""
    if isinstance(one, dict) and one.keys() == other.keys():
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list) and len(one) == len(other):
        return max((find_difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    assert one == other
    return 0.0


@pytest.mark.parametrize("head", HEADS)
def test_an_export_answers_as_its_run(head):
    run, folder = write_export(head)
    exact, exported = Predictor(run, precision="fp32"), Predictor(str(folder))
    expected, found = exact(INPUTS[head]), exported(INPUTS[head])
    assert find_difference(found, expected) < 1e-4
    assert [*map(exported.describe, found)] == [*map(exact.describe, expected)]
    assert exact.output_schema == exported.output_schema
    assert exported.settings.head == exact.settings.head == head
    if head == "BertForSequenceClassification":
        assert len({round(result["probability"], 2) for result in found}) > 3
        assert exported.settings.lengths == exact.settings.lengths == {"long": "mean"}
    if head == "BertForQuestionAnswering":
        assert {result["tau"] for result in found} == {0.25}
    if get_form(found[0]).has_pipeline:
        found, expected = map(exported.format_for_pipeline, found), map(exact.format_for_pipeline, expected)
        assert find_difference(list(found), list(expected)) < 1e-4


def test_the_command_reads_an_export_without_torch_and_transformers():
    _, folder = write_export(FAST[0])
    words = [sys.executable, "-X", "importtime", "-m", "bertkit", "predict", str(folder), "good word1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert Predictor(folder).describe(Predictor(folder)(["good word1"])[0]) == done.stdout.strip()
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"onnxruntime", "tokenizers", "bertkit"} <= packages
    assert not packages & {"torch", "transformers"}


def test_a_layer_that_computes_the_mean_is_exported(tmp_path):
    """Texts of several lengths, padded to one."""
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no", "perhaps"), initializer_range=0.5)
    model = BertForSequenceClassification.from_pretrained(folder)
    model.bert.add_mean_layer()
    model.save_pretrained(folder)
    export(str(folder), tmp_path / "onnx")
    expected, found = Predictor(folder, precision="fp32")(TEXTS), Predictor(tmp_path / "onnx")(TEXTS)
    assert find_difference(found, expected) < 1e-5
    assert len({round(result["probability"], 3) for result in found}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_thresholds_and_scores_are_those_of_the_run(kind):
    thresholds = {"thresholds": (0.2, 0.5, 0.7)} if kind.startswith("multi") else {}
    run, exported = write_export(FAST[0], problem_type=kind, window_pooling=None, **thresholds)
    texts = make_texts(12)
    expected = Predictor(run, precision="fp32")(texts)
    assert find_difference(Predictor(exported)(texts), expected) < 1e-4
    assert len({str(result.get("labels", result.get("scores"))) for result in expected}) > 1


# --- The directory ----------------------------------------------------------------------------------------------------


def test_the_record_and_the_card_describe_the_export(tmp_path, monkeypatch, capsys):
    _, exported = write_export(FAST[0])
    record = json.loads((exported / EXPORT_FILE).read_text())
    assert (record["run"], record["head"], record["precision"]) == ("run", FAST[0], "fp32")
    assert record["largest_difference"] < 1e-5
    assert list(record["timings"]) == ["run", "fp32"]
    timing = record["timings"]["fp32"]
    assert timing["size"] == (exported / ONNX_FILE).stat().st_size
    assert list(timing["latency"]) == ["16", "128"], "the model has no 512 positions"
    assert all(0 < one["p50"] <= one["p99"] for one in timing["latency"].values())
    written = {"README.md", "config.json", EXPORT_FILE, ONNX_FILE, *TOKENIZER_FILES}
    assert {path.name for path in exported.iterdir()} == written
    card = (exported / "README.md").read_text()
    assert f"bertkit predict {exported.name} " in card
    monkeypatch.chdir(exported.parent)
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "array([[" in capsys.readouterr().out


def test_an_export_that_differs_from_its_run_leaves_no_file(tmp_path, monkeypatch, refused):
    _, exported = write_export(FAST[0])
    monkeypatch.setattr(module, "write_onnx", lambda model, path: shutil.copy(exported / ONNX_FILE, path))
    other = write_head(tmp_path / "other", FAST[0], seed=4, id2label=LABELS)
    with pytest.raises(UsageError, match=r"probabilities of the exported model differ from those of .* by "):
        export(str(other), tmp_path / "output")
    assert list((tmp_path / "output").iterdir()) == []
    copy = shutil.copytree(exported, tmp_path / "export")
    with refused():
        export(str(copy), tmp_path / "output")
    with refused():
        Predictor(copy, precision="bf16")


def test_an_export_that_was_killed_is_incomplete_and_written_again(tmp_path, monkeypatch, refused):
    run, exported = write_export(FAST[0])
    output = shutil.copytree(exported, tmp_path / "output")
    monkeypatch.setattr(module, "write_onnx", lambda model, path: shutil.copy(exported / ONNX_FILE, path))
    monkeypatch.setattr(module, "MOST_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            export(str(run), output)
    with refused():
        Predictor(output)
    (output / "recipe.toml").write_text('task = "rte"')  # of another run
    export(str(run), output)
    assert not (output / "recipe.toml").exists()
    assert Predictor(output)(["good"])


def test_the_command_shows_the_measurements(call, tmp_path, monkeypatch):
    run, exported = write_export(FAST[0])
    monkeypatch.setattr(module, "write_onnx", lambda model, path: shutil.copy(exported / ONNX_FILE, path))
    monkeypatch.setattr(module, "MOST_SECONDS", 0.01)
    for _ in range(2):  # the second replaces the first
        code, out, err = call("export", run, "--output", "output")
        assert (code, err) == (0, "")
    parts = ("as ONNX, and comparing both", "differs from", "timing both on this machine", "one text of 128 tokens")
    assert [out.index(part) for part in parts] == sorted(map(out.index, parts))
    assert not list((tmp_path / "output").glob(".*"))
    assert (tmp_path / "output" / EXPORT_FILE).exists()
    code, out, err = call("export", run, "--output", run)
    assert (code, out) == (2, "")
    assert err == f"bertkit: {run} is not empty and holds no export; name another directory with --output\n"


def test_a_damaged_record_is_one_line(tmp_path, refused):
    (tmp_path / EXPORT_FILE).write_text('{"run": 1}')
    with refused():
        Predictor(tmp_path)


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """Train a run that has learned RTE's rule."""
    folder = tmp_path_factory.mktemp("rte")
    recipe = {
        "checkpoint": str(write_checkpoint(folder / "bert")),
        "batch_size": 8,
        "precision": "fp32",
        "data": {"dir": str(write_glue(folder / "glue")), "max_length": 32},
        "train": {"max_steps": 150, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"},
    }
    metrics = run(Recipe.make(TASKS["rte"], recipe), output=folder / "run")
    assert metrics["accuracy"] > 0.8
    return folder / "run"


def test_int8_is_written_with_what_it_loses(rte, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    lines = []
    record, _ = export(str(rte), tmp_path / "x", lines.append, int8=True)
    found = record["int8"]
    assert (record["precision"], found["metric"]) == ("int8", "accuracy")
    assert found["score"] - found["run_score"] == pytest.approx(found["difference"], abs=1e-3)
    assert found["low"] <= found["difference"] <= found["high"]
    assert any(line.endswith(f"in int8 on {found['rows']} rows of dev") for line in lines)
    assert list(record["timings"]) == ["run", "fp32", "int8"]
    assert record["timings"]["int8"]["size"] == found["size"] < record["timings"]["fp32"]["size"]
    assert json.loads((tmp_path / "x" / EXPORT_FILE).read_text()) == record
    assert f"({found['rows']} rows), difference to the run in points" in (tmp_path / "x" / "README.md").read_text()
    texts = [("good", "good"), ("bad word1", "so")]
    expected, found = (
        Predictor(source, precision=how)(texts) for source, how in ((rte, "fp32"), (tmp_path / "x", "auto"))
    )
    for one, other in zip(expected, found, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=0.1)


@pytest.fixture(scope="module")
def exact(rte, tmp_path_factory):
    """Write the run's graph in fp32."""
    path = tmp_path_factory.mktemp("exact") / ONNX_FILE
    write_onnx(Predictor(rte, precision="fp32").settings.model, path)
    return path


def test_int8_answers_do_not_depend_on_the_batch(rte, exact, tmp_path):
    quantize(exact, tmp_path / ONNX_FILE)
    config, lengths = load_config(str(rte)), [2, 31, 7, 12]
    exported, batch = OnnxModel(tmp_path / ONNX_FILE, config, is_int8=True), make_batch(config, lengths, chooses=False)
    together = exported(**batch).logits
    for row, length in enumerate(lengths):
        alone = exported(**{name: column[row : row + 1, :length] for name, column in batch.items()}).logits
        assert np.array_equal(alone[0], together[row])


# --- An export in the cache -------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(module, "cached_assets_path", lambda *names, **kinds: folder / kinds["namespace"])
    return folder / "exports"


def watch(predictor, monkeypatch):
    """Return the sizes of the batches that the export answers."""
    sizes, exported = [], predictor.settings.exported
    monkeypatch.setattr(exported, "session", Mock(wraps=exported.session))
    exported.session.run.side_effect = lambda names, given: (
        sizes.append(given["attention_mask"].shape) or exported.session._mock_wraps.run(names, given)
    )
    return sizes


@pytest.mark.parametrize("head", FAST)
def test_small_batches_are_answered_by_an_export_in_the_cache(head, cache, monkeypatch):
    """Once made, it is read; the run's directory stays as it is."""
    run, _ = write_export(head)
    files, inputs, lines = sorted(run.iterdir()), INPUTS[head], []
    expected = Predictor(run, precision="fp32")(inputs)
    for made in (1, 0):
        predictor, write = Predictor(run, precision="fp32"), Mock(wraps=write_onnx)
        monkeypatch.setattr(module, "write_onnx", write)
        module.add_export(predictor, 1000, lines.append)
        sizes = watch(predictor, monkeypatch)
        assert find_difference(predictor(inputs), expected) < 1e-4
        assert (write.call_count, len(list(cache.glob("*.onnx")))) == (made, 1)
        assert sizes
    assert sorted(run.iterdir()) == files
    assert all(line.startswith("onnxruntime answers texts of up to 1,000 tokens, torch all else (") for line in lines)
    predictor.settings = replace(predictor.settings, most_exported=8)
    sizes.clear()
    predictor(inputs)
    assert all(rows * columns <= (8 if rows == 1 else 4) for rows, columns in sizes)


def test_an_export_is_left_out_where_it_does_not_agree_or_another_precision_is_asked_for(cache, monkeypatch):
    run, _ = write_export("BertForSequenceClassification")
    lines, predictor = [], Predictor(run, precision="bf16")
    module.add_export(predictor, 1000, lines.append)
    assert (predictor.settings.exported, lines, cache.exists()) == (None, [], False)
    predictor = Predictor(run, precision="fp32")
    monkeypatch.setattr(module, "measure_difference", lambda *sides: float("nan"))
    module.add_export(predictor, 1000, lines.append)
    assert predictor.settings.exported is None
    assert lines == ["onnxruntime is not used: its probabilities differ by nan"]


def test_other_weights_have_another_export(cache, tmp_path):
    run, _ = write_export("BertForSequenceClassification")
    shutil.copytree(run, tmp_path / "other")
    model = BertForSequenceClassification.from_pretrained(run)
    with torch.no_grad():
        model.classifier.bias.add_(0.5)
    model.save_pretrained(tmp_path / "other")
    for folder in (run, tmp_path / "other"):
        predictor = Predictor(folder, precision="fp32")
        module.add_export(predictor, 1000)
        assert find_difference(predictor(TEXTS), Predictor(folder, precision="fp32")(TEXTS)) < 1e-4
    assert len(list(cache.glob("*.onnx"))) == 2


def test_the_command_takes_the_engine_that_is_asked_for(cache, call, tmp_path):
    run, _ = write_export("BertForSequenceClassification")
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in make_texts(30)))
    given = ["--input", tmp_path / "texts.txt", "--precision", "fp32"]
    answers = [call("predict", run, *given, "--engine", engine) for engine in ("torch", "onnx")]
    assert [len(list(cache.glob("*.onnx"))), "onnxruntime answers" in answers[1][2], answers[0][2]] == [1, True, ""]
    one, other = ([json.loads(line) for line in said.splitlines()] for _, said, _ in answers)
    assert find_difference(one, other) < 1e-4


def test_configurations_and_tokenizers_as_they_are_found(tmp_path):
    """Labels may have no names, pairs no token types, and tokens the form of objects."""
    run, _ = write_export(FAST[0])
    changed = shutil.copytree(run, tmp_path / "run")
    config = json.loads((changed / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (changed / "config.json").write_text(json.dumps(config | {"num_labels": 3}))
    tokens = json.loads((changed / "tokenizer_config.json").read_text())
    tokens |= {"model_input_names": ["input_ids", "attention_mask"]}
    (changed / "tokenizer_config.json").write_text(json.dumps(tokens))
    export(str(changed), tmp_path / "export")
    pairs = [{"text": "good word1", "text_pair": "so bad"}, "good"]
    expected = Predictor(changed, precision="fp32")(pairs)
    assert expected[0]["probabilities"].keys() == {"LABEL_0", "LABEL_1", "LABEL_2"}
    assert find_difference(Predictor(tmp_path / "export")(pairs), expected) < 1e-4
    tokens |= {"cls_token": {"content": "[CLS]", "__type": "AddedToken"}}
    (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert find_difference(Predictor(tmp_path / "export")(pairs), expected) < 1e-4
    for heads in ([], ["BertModel"]):
        (tmp_path / "export" / "config.json").write_text(json.dumps(config | {"architectures": heads}))
        with pytest.raises(UsageError, match="does not predict classes"):
            Predictor(tmp_path / "export")
