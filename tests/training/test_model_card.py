"""The model card of a run, and its upload and download with the real huggingface_hub and a mock server."""

import json
import shutil
import tomllib
from functools import cache, partial

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from bertkit.errors import UsageError
from bertkit.inference.evaluate import evaluate
from bertkit.model import heads
from bertkit.system.hub import explain_trouble
from bertkit.tasks import TASKS
from bertkit.tasks.squad import VERSIONS
from bertkit.training import model_card, push
from bertkit.training.network import make_model
from bertkit.training.recipe import Recipe, load_recipe, merge, read_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import LOG
from tests.conftest import draft
from tests.hub import Repo, check_metadata
from tests.official import write_checkpoint
from tests.world import make_classify, make_features, make_glue, make_pretraining, make_squad, replace_values

SHORT = {"train": {"max_steps": 2, "save_strategy": "no"}}


def make_causal(folder):
    return make_glue(folder, "rte") | {"checkpoint": str(write_checkpoint(folder / "causal", is_decoder=True))}


RUNS = {  # name -> task and recipe
    "pretrain": ("pretrain", make_pretraining),
    "mnli": ("mnli", partial(make_glue, name="mnli")),
    "mrpc": ("mrpc", partial(make_glue, name="mrpc")),
    "bilstm": ("rte", lambda folder: make_glue(folder, "rte") | {"bilstm": True}),
    "mean": ("rte", lambda folder: make_glue(folder, "rte") | {"freeze": "encoder"}),
    "causal": ("rte", make_causal),
    "squad2": ("squad2", partial(make_squad, version=VERSIONS[1])),
    "features": ("ner", make_features),
}


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Return the directory of a finished run; each run is done once."""

    @cache
    def finish(name):
        folder, (task, make) = tmp_path_factory.mktemp(name), RUNS[name]
        run(Recipe.make(TASKS[task], make(folder), SHORT), output=folder / f"my-{name}")
        return folder / f"my-{name}"

    return finish


@pytest.fixture
def mrpc(finish, tmp_path):
    """Return a copy of a finished run with all its files, one per test."""
    folder = shutil.copytree(finish("mrpc"), tmp_path / "mrpc")
    for stray in ("checkpoint-2", "first", "best", ".best", "predictions"):
        (folder / stray).mkdir(exist_ok=True)
        (folder / stray / "model.safetensors").write_bytes(b"stays behind")
    for stray in (".model.safetensors.tmp", "notes.txt", ".env", "training_args.bin"):
        (folder / stray).write_text("stays behind")
    return folder


def read_files(folder):
    """Return the modification time and the content of each file of a folder."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# --- The card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pipeline", "library", "head", "words"),
    [
        ("pretrain", "fill-mask", "transformers", "BertForPreTraining", ["It started from random weights", "Text: `"]),
        ("mnli", "text-classification", "transformers", "BertForSequenceClassification", ["`contradiction`"]),
        ("bilstm", "text-classification", "bertkit", "BertBiLSTMForSequenceClassification", ["load only the encoder"]),
        ("mean", "text-classification", "transformers", "BertForSequenceClassification", ["above it was solved."]),
        ("causal", "text-classification", "bertkit", "BertForSequenceClassification", ["the same answer for every"]),
        ("squad2", "question-answering", "transformers", "BertForQuestionAnswering", ["to choose tau", "than tau = "]),
        ("features", "token-classification", "bertkit", "BertFeaturesForTokenClassification", ["encoder was frozen"]),
    ],
)
def test_the_card_of_each_head_is_valid_and_says_how_to_load_it(finish, name, pipeline, library, head, words):
    output = finish(name)
    text, card = (output / "README.md").read_text(), ModelCard.load(output / "README.md")
    assert check_metadata(text) == []
    assert str(card) == text, "as huggingface_hub itself writes it"
    assert (card.data.pipeline_tag, card.data.library_name) == (pipeline, library)
    assert set(card.data.tags) == {"bert", "bertkit", RUNS[name][0]}
    assert card.data.get("language") is card.data.get("datasets") is card.data.get("base_model") is None
    scores = json.loads((output / "metrics.json").read_text()).values()
    results = {(result.task_type, result.metric_value in scores) for result in card.data.eval_results}
    assert results == {(pipeline, True)}
    assert "\n\n\n" not in card.text
    assert "{" not in card.text
    assert all(word in card.text for word in words)
    assert ("load only the encoder" in card.text) == (name in ("bilstm", "features"))
    assert ("computes the mean over the tokens" in card.text) == (name == "mean")
    assert ("from left to right" in card.text) == (name == "causal")
    code = card.text.split("```python\n")[1].split("```")[0]
    space = {}
    exec(code, space)
    assert type(space["model"]).__name__ == head
    assert f"{space['model'].num_parameters():,} parameters" in card.text
    stock = type(space["model"]).__module__.startswith("transformers.")
    assert stock == (library == "transformers")


def start(checkpoint: str) -> Recipe:
    """Return a recipe that starts from a checkpoint."""
    return draft(TASKS["pretrain"], {"checkpoint": checkpoint})


def write_again(output, model, **changes):
    """Return the card of a finished run with another recipe or model."""
    recipe = replace_values(load_recipe(output / "recipe.toml"), **changes)
    metrics, environment = (json.loads((output / f"{name}.json").read_text()) for name in ("metrics", "environment"))
    return model_card.write_card(TASKS[recipe.task], "run", recipe, metrics, environment, model, {"train": 7})


def test_the_card_has_scores_data_limits_recipe_and_machine(finish):
    output = finish("mnli")
    card = ModelCard.load(output / "README.md").text
    metrics = json.loads((output / "metrics.json").read_text())
    names = ("accuracy", "accuracy_low", "accuracy_high", "majority_accuracy", "tfidf_accuracy", "frozen_accuracy")
    accuracy, low, high, nothing, counted, frozen = (f"{100 * metrics[name]:.1f}" for name in names)
    other = f"{100 * metrics['accuracy_mm']:.1f}"
    ours = f"{accuracy} | {low} to {high} | 84.6 (BERT-base, test), 86.7 ("
    assert (
        f"| accuracy (%) | {nothing} (the majority class), {counted} (TF-IDF), {frozen} (frozen vectors) | {ours}"
        in card
    )
    assert f"| accuracy, mismatched (%) |  | {other} | " in card, "without baselines"
    assert "The 95 % intervals are over examples; they do not include the spread over seeds." in card
    assert "Seed 42, after 2 updates." in card
    assert "- MNLI, from local files in the official format (`glue`)." in card
    assert "Inputs to the model: train 48, dev_matched 18, dev_mismatched 18, " in card
    assert "- The model accepts up to 128 tokens; this run used up to 40." in card
    assert "- The local files were not compared with the official ones, " in card
    assert "`bertkit glue --task mnli --recipe recipe.toml` repeats the run. Paths are shortened" in card
    environment = json.loads((output / "environment.json").read_text())
    assert f"torch {environment['packages']['torch']}" in card
    assert environment["processor"] in card
    assert not environment["commit"] or environment["commit"] in card
    recipe = read_recipe(output / "recipe.toml")
    assert f"learning_rate = {recipe['train']['learning_rate']}" in card.split("```toml")[1]
    assert str(output.parent) not in card.replace(f'("{output}")', ""), "but where to load it from"


def test_what_the_recipe_leaves_out_is_among_the_limits(finish):
    card = ModelCard.load(finish("pretrain") / "README.md").text
    assert "The training covered 16 sequences, 0.00% of the paper's 256,000,000." in card, "2 updates of 8"
    output = finish("mrpc")
    model = heads.BertForSequenceClassification.from_pretrained(output)
    card = write_again(output, model, freeze="encoder", data={"max_train_samples": 7})
    assert "\n- Trained on the first 7 examples only.\n" in card
    assert "\n- The encoder was frozen; only the layers above it were trained.\n" in card


def test_scores_on_the_hubs_data_name_its_data_sets():
    task, metrics = TASKS["squad2"], {"exact": 70.0, "f1": 72.5, "tau": 1.5, "tau0_f1": 71.0}
    data = model_card.make_metadata(task, "mine", draft(task), metrics, task.head, "transformers")
    found = [(one.dataset_config, one.dataset_split, one.metric_type, one.metric_value) for one in data.eval_results]
    assert found == [("squad_v2", "validation", "exact_match", 70.0), ("squad_v2", "validation", "f1", 72.5)]
    assert {(one.dataset_type, one.dataset_name) for one in data.eval_results} == {("rajpurkar/squad_v2", "SQuAD 2.0")}
    assert (data.datasets, data.language) == (["rajpurkar/squad_v2"], "en")
    assert data.base_model == "google-bert/bert-base-uncased"
    assert check_metadata(f"---\n{data.to_yaml()}\n---\n") == []


DATE = "2019-05-24T12:00:00+00:00"


@pytest.mark.parametrize(
    ("task", "metrics", "expected"),
    [
        ("mrpc", {"f1": 0.9, "accuracy": 0.8}, [("nyu-mll/glue", "mrpc", 0.9, "F1, split validation")]),
        ("ner", {"f1": 0.9, "test_f1": 0.8}, [("lhoestq/conll2003", "default", 0.8, "F1, test, split test")]),
        ("pretrain", {"mlm_accuracy": 0.5}, []),
    ],
)
def test_the_paper_s_metric_is_a_result_of_the_benchmark_it_is_from(task, metrics, expected):
    """The paper scores CoNLL's test set."""
    entries = model_card.list_benchmarks(TASKS[task], draft(TASKS[task]), metrics, DATE)
    found = [(one.dataset_id, one.task_id, one.value, one.notes.partition(", fine-tuned")[0]) for one in entries]
    assert found == expected
    assert all(one.date == DATE for one in entries)


@pytest.mark.parametrize(
    "options", [{"dir": "SQUAD"}, {"tune_share": 0.5}, {"train_file": "mine.json"}, {"max_train_samples": 7}]
)
def test_a_score_on_other_data_is_no_result_of_a_benchmark(options):
    task, metrics = TASKS["squad2"], {"f1": 70.0, "tau": 1.5, "chosen_on_dev": "tau"}
    (entry,) = model_card.list_benchmarks(task, draft(task), metrics, DATE)
    assert entry.notes == "F1, split validation, fine-tuned with bertkit; tau chosen on dev"
    assert model_card.list_benchmarks(task, draft(task, {"data": options}), metrics, DATE) == []


CARDS = {  # the base model's card -> what a card repeats of it
    "---\nlicense: mit\nlanguage:\n- de\n- fr\ntags:\n- x\n---\n": {"license": "mit", "language": ["de", "fr"]},
    "---\nlicense: other\nlicense_name: acme\n---\n": {"license": "other", "license_name": "acme"},
    "---\n[\n---\n": {},
    "# Only a title": {},
}


@pytest.mark.parametrize("text", CARDS)
def test_the_licence_and_the_language_of_the_base_model_are_repeated(tmp_path, text):
    for checkpoint in ("", str(tmp_path), "ada/bert", "not a name"):
        assert model_card.read_base_card(start(checkpoint)) == {}
    (tmp_path / "README.md").write_text(text)
    assert model_card.read_base_card(start(str(tmp_path))) == CARDS[text]
    for name, folder, own in (("classify", "mine.csv", {}), ("rte", "", {"language": "en"})):
        task = TASKS[name]
        recipe = draft(task, {"checkpoint": str(tmp_path), "data": {"dir": folder}})
        data = model_card.make_metadata(task, "mine", recipe, {}, task.head, "transformers").to_dict()
        assert {key: data[key] for key in ("language", *model_card.LICENSE) if key in data} == CARDS[text] | own


def test_the_card_of_a_model_on_the_hub_is_downloaded_with_it_and_read_from_the_cache(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "bert")
    hub.repos["ada/bert"] = Repo(files={path.name: path.read_bytes() for path in folder.iterdir()})
    hub.repos["ada/bert"].files["README.md"] = b"---\nlicense: cc-by-4.0\n---\n"
    explain_trouble.cache_clear()
    recipe = draft(TASKS["rte"], {"checkpoint": "ada/bert"})
    make_model(TASKS["rte"], recipe, {})
    hub.asked.clear()
    assert model_card.read_base_card(recipe) == {"license": "cc-by-4.0"}
    assert hub.asked == []
    explain_trouble.cache_clear()


def test_a_checkpoint_of_ones_own_is_not_taken_for_one_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ada" / "bert").mkdir(parents=True)
    for checkpoint in ("ada/bert", "../clients/acme/bert", "/home/ada/bert"):
        assert model_card.name_base(start(checkpoint)) is None
        assert model_card.describe_start(start(checkpoint), {}) == "`bert`"
    assert model_card.name_base(start("eve/bert")) == "eve/bert"
    assert model_card.describe_start(start("eve/bert"), {}) == "[eve/bert](https://huggingface.co/eve/bert)"


HUB = "https://huggingface.co/datasets"


@pytest.mark.parametrize(
    ("name", "options", "said", "listed"),
    [
        ("mnli", {}, f"MNLI: [nyu-mll/glue]({HUB}/nyu-mll/glue), configuration `mnli`.", ["nyu-mll/glue"]),
        ("classify", {"dir": "/home/ada/reviews.csv"}, "Local files: `reviews.csv`.", []),
        ("classify", {"dir": "eve/a:b"}, f"[eve/a]({HUB}/eve/a), configuration `b`.", ["eve/a"]),
        ("swag", {"dir": "../../clients/acme"}, "SWAG, from local files in the official format (`acme`).", []),
        ("squad1", {"train_file": "/home/ada/mine.json"}, "Trained on `mine.json` instead of the official ", []),
        ("pretrain", {"corpus": ["docs", "ada/b:c", "a/b/c.txt"]}, "Text: `docs`, `ada/b:c`, `c.txt`.", ["ada/b"]),
        ("pretrain", {"corpus": ["docs"]}, "`docs` is the documentation of the Python packages installed on ", []),
    ],
)
def test_the_card_says_where_the_data_are_from_and_lists_those_of_the_hub(name, options, said, listed):
    task = TASKS[name]
    recipe = draft(task, {"data": options})
    *lines, inputs = model_card.describe_data(task, recipe, {"train": 1234, "dev": 5}, {})
    assert any(line.startswith(said) for line in lines)
    assert inputs == "Inputs to the model: train 1,234, dev 5."
    assert model_card.list_datasets(task, recipe) == listed


def test_paths_shrink_to_their_last_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clients" / "acme").mkdir(parents=True)
    corpus = ["~/a", "b/c", "b/c:d@v1", "docs", "../b/e", "./f", "g/h/i", "clients/acme", "text/j.txt"]
    recipe = {"checkpoint": "google-bert/bert-base-cased", "data": {"dir": "/home/ada/GLUE", "corpus": corpus}}
    shrunk = ["a", "b/c", "b/c:d@v1", "docs", "e", "f", "i", "acme", "j.txt"]
    assert model_card.hide_paths(recipe) == recipe | {"data": {"dir": "GLUE", "corpus": shrunk}}
    files = {"dir": "../../clients/acme", "train_file": "gone/acme", "extra_train": "gone/b", "features_dir": "gone/c"}
    assert model_card.hide_paths(files) == dict(zip(files, ["acme", "acme", "b", "c"], strict=True))
    assert model_card.hide_paths(f"{tmp_path}/a.json,{tmp_path}/b.csv", "dir") == "a.json,b.csv"
    assert model_card.hide_paths({"seed": 42, "path": "/"}) == {"seed": 42, "path": "/"}


def test_a_path_where_the_run_was_trained_is_no_name_where_it_is_pushed(tmp_path):
    """`clients/acme` was a folder there, so the card of the run does not name it."""
    (tmp_path / "recipe.toml").write_text('data = { corpus = ["clients/acme", "ada/books"] }\n')
    public = 'data = { corpus = ["acme", "ada/books"] }\n'
    card = f"## Recipe\n\n```toml\n{public}```\n"
    assert push.make_public_recipe(tmp_path / "recipe.toml", card).decode() == public


LABELS = ["`", "``a`b```", "a | b", "<script>alert(1)</script>", "a\n\n# b", "*a*_b_", "[a](b)", "\\`", "&lt;", ""]


def test_labels_and_names_do_not_break_the_card(finish):
    output = finish("mnli")
    model = heads.BertForSequenceClassification.from_pretrained(output)
    model.config.id2label = dict(enumerate(LABELS))
    card = write_again(output, model, data={"dir": "/home/ada/`<b>`"})
    tokens = MarkdownIt().enable("table").parse(ModelCard(card).text)
    lines = {token.content.split(":")[0]: token.children for token in tokens if token.type == "inline"}
    shown = [" ".join(label.split()).replace("`", "'") or " " for label in LABELS]
    found = [token.content for token in lines["Its labels"] if token.type == "code_inline"]
    assert found == [label for label in shown if "<" not in label]
    assert {token.type for token in lines["Its labels"]} == {"text", "code_inline"}
    assert "".join(token.content for token in lines["Its labels"]) == f"Its labels: {', '.join(shown)}."
    assert not any(tag in card.partition("## Recipe")[0] for tag in ("<b>", "<script>"))
    assert [token.type for token in tokens].count("heading_open") == 6


# --- To the Hub and back ----------------------------------------------------------------------------------------------


def test_the_card_in_the_repository_has_its_name_and_no_path_of_this_machine(hub, mrpc):
    before = read_files(mrpc)
    push.push(mrpc, "engines/difference")
    assert read_files(mrpc) == before
    repo = hub.repos["engines/difference"]
    assert len(repo.commits) == 1, "all at once, or nothing"
    assert "POST /api/validate-yaml" in hub.asked
    files, tokenizer = repo.files, {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    scores = {"README.md", "config.json", "metrics.json", "calibration.json"}
    assert files.keys() == tokenizer | scores | {"model.safetensors", "environment.json", "recipe.toml", LOG}
    assert not [name for name, data in files.items() if str(mrpc.parents[2]).encode() in data]
    pushed = ModelCard(files["README.md"].decode())
    assert pushed.data.model_name == "difference"
    assert "\n# difference\n" in pushed.text
    assert pushed.text.count('from_pretrained("engines/difference")') == 2
    assert "my-mrpc" not in files["README.md"].decode()
    recipe, public = read_recipe(mrpc / "recipe.toml"), files["recipe.toml"].decode()
    assert tomllib.loads(public) == model_card.hide_paths(recipe)


def test_no_text_of_a_person_is_in_an_upload(hub, tmp_path):
    """The word is in every row of every split, in another evaluated file, and in all that may lie in a run."""
    secret, run_dir = "Rumpelstiltskin", tmp_path / "run"
    recipe = merge(make_classify(tmp_path, ["title", "body"], "stars"), SHORT, {"train": {"save_strategy": "steps"}})
    for path in (tmp_path / "reviews").glob("*.csv"):
        path.write_text(path.read_text().replace(", word", f", word {secret}"))
    run(Recipe.make(TASKS["classify"], recipe), output=run_dir)
    evaluate(str(run_dir), str(tmp_path / "reviews" / "dev.csv"), output=None)
    for name in ("data/train.parquet", "checkpoint-2/optimizer.pt", "explained.jsonl", "report.html"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_bytes(secret.encode())
    paths = [path for path in run_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    holders = {path.relative_to(run_dir).parts[0] for path in paths}
    assert holders >= {"predictions", "evaluations", "data", "checkpoint-2", "explained.jsonl", "report.html"}
    push.push(run_dir, "ada/bert")
    files = hub.repos["ada/bert"].files
    assert "README.md" in files
    assert not [name for name, content in files.items() if secret.lower().encode() in content.lower()]


# --- What goes wrong --------------------------------------------------------------------------------------------------


FAULTS = {  # the token, the repository, and a request that fails -> the status of its answer
    "no token": ("", "ada/bert", None),
    "a wrong token": ("hf_wrong", "ada/bert", None),
    "trouble at the end": ("hf_ada", "ada/bert", ("POST", "commit", 500)),
    "the name of another": ("hf_fine", "eve/taken", None),
    "no name": ("hf_ada", "ada/my bert!", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_is_one_line_and_the_same_command_completes_it(hub, mrpc, monkeypatch, name):
    token, repo, fault = FAULTS[name]
    before = read_files(mrpc)
    monkeypatch.setenv("HF_TOKEN", token)
    if fault:
        hub.fail(*fault[:2], status=fault[2])
    with pytest.raises(UsageError) as error:
        push.push(mrpc, repo)
    assert repo in str(error.value)
    assert "; " in str(error.value), "the next step"
    assert "\n" not in str(error.value)
    assert read_files(mrpc) == before
    assert not any(repo.files for repo in hub.repos.values()), "nothing is uploaded partially"
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    hub.faults.clear()
    assert push.push(mrpc, "ada/bert") == f"{hub.address}/ada/bert"
    assert hub.repos["ada/bert"].files["model.safetensors"] == (mrpc / "model.safetensors").read_bytes()
    assert sum(request.startswith("PUT /storage") for request in hub.asked) == 1


@pytest.mark.parametrize("missing", ["metrics.json", "model.safetensors", "README.md"])
def test_what_is_no_finished_run_is_refused_before_the_hub_is_asked(hub, mrpc, missing, refused):
    (mrpc / missing).unlink()
    with refused():
        push.push(mrpc, "ada/bert")
    assert hub.asked == []


def test_what_is_public_does_not_become_private_by_asking(hub, mrpc):
    push.push(mrpc, "ada/bert")
    commits = list(hub.repos["ada/bert"].commits)
    (mrpc / "README.md").write_text((mrpc / "README.md").read_text() + "\nSecret.\n")
    with pytest.raises(UsageError, match=r"ada/bert is already public; leave out --private, .*ada/bert --private$"):
        push.push(mrpc, "ada/bert", private=True)
    assert hub.repos["ada/bert"].commits == commits
    hub.repos["ada/bert"].private = True
    push.push(mrpc, "ada/bert", private=True)
    assert len(hub.repos["ada/bert"].commits) == 2


def test_of_a_model_in_shards_those_of_the_index_are_published(hub, mrpc):
    heads.BertForSequenceClassification.from_pretrained(mrpc).save_pretrained(mrpc, max_shard_size="20KB")
    (mrpc / "model.old.safetensors").write_bytes(b"stays behind")
    shards = {path.name for path in mrpc.glob("model-*.safetensors")}
    assert len(shards) > 1
    link = shutil.move(mrpc, mrpc.parent / "disk")
    mrpc.symlink_to(link)  # the run directory itself may be one
    push.push(mrpc, "ada/bert")
    found = {name for name in hub.repos["ada/bert"].files if name.startswith("model")}
    assert found == shards | {"model.safetensors.index.json"}


@pytest.mark.parametrize("content", ["{", "[]", '{"chosen": 3, "cells": []}'])
def test_somebody_else_s_study_json_says_nothing(hub, mrpc, content):
    (mrpc.parent / "study.json").write_text(content)
    assert push.describe_choice(mrpc) == ""


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("pretrain",), ("glue", "--task", "mrpc", "--restarts", "2")])
def test_every_training_command_asks_the_hub_before_it_begins(call, hub, tmp_path, command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    code, out, err = call(*command, "--push-to-hub", "ada/bert", "--output", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("bertkit: cannot push to 'ada/bert': your token has no write access; ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_of_a_grid_the_chosen_run_is_pushed(call, hub, tmp_path):
    bert = write_checkpoint(tmp_path / "bert")
    data = make_glue(tmp_path / "made", "rte")["data"]["dir"]
    options = ["--model", bert, "--data", data, "--output", "grid", "--push-to-hub", "ada/rte"]
    axes = ("batch_size=[8]", "train.learning_rate=[5e-5, 1e-3]", "train.num_train_epochs=[1.0]")
    settings = [part for axis in axes for part in ("--set", axis)]
    code, out, err = call("glue", "--task", "rte", "--grid", *options, *settings)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"Pushed: {hub.address}/ada/rte"
    (chosen,) = json.loads((tmp_path / "grid" / "study.json").read_text())["chosen"]
    files = hub.repos["ada/rte"].files
    assert files["model.safetensors"] == (tmp_path / "grid" / chosen["run"] / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert ModelCard(card).data.model_name == "rte"
    note = "The best of 2 runs on the data that it is scored on, so its score is optimistic."
    assert card.count(f"\n\n{note}\n\n## Data\n") == 1
