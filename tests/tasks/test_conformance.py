"""The contract of every Task. A new task is tested once it is declared: it only needs a small recipe here."""

import json
from functools import cache, reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import nested_concat

import bertkit
from bertkit.data.long_texts import LONG
from bertkit.data.pretraining.build import BORDERS
from bertkit.data.sequences import collate
from bertkit.data.tags import ENTITIES, WORDS
from bertkit.errors import UsageError
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.metrics.squad import LANGUAGES
from bertkit.metrics.table import LABEL, PREDICTION, read_facts
from bertkit.model.bilstm import FEATURE_LAYERS
from bertkit.reports.tables import find_row
from bertkit.tasks import TASKS
from bertkit.tasks.examples import divide
from bertkit.tasks.glue import GLUE
from bertkit.tasks.kinds import LABEL_KINDS
from bertkit.tasks.option import list_defaults
from bertkit.tasks.pretraining import HEADS
from bertkit.tasks.squad import SQUAD
from bertkit.tasks.task import score_summaries
from bertkit.training import costs
from bertkit.training.network import make_model, name_head
from bertkit.training.parts import divide_batch
from bertkit.training.predictions import KEY, join_rows, read_table
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe
from bertkit.training.scoring import score_splits
from tests.world import CASES, replace_values, vary, write_start

FINE_TUNED = [name for name, (task, _, _) in CASES.items() if task.metric and task.name != "pretrain"]
TAU = ("tau", "null_score_diff_threshold")
EACH = ("precision_", "recall_", "f1_", "count_", "threshold_")  # of each class
LABELS = {  # the head's output -> what it should say
    "seq_relationship_logits": "next_sentence_label",
    "start_logits": "start_positions",
    "end_logits": "end_positions",
}
UNMOVED = {"swag": ("classifier.bias",)}  # it adds the same to all choices, which a softmax does not see
# A task without a metric has nothing to learn from: it is only predicted.
LEARNED = pytest.mark.parametrize("case", [name for name in CASES if CASES[name][0].metric], indirect=True)


def test_every_task_is_covered():
    assert {task.name for task, _, _ in CASES.values()} == set(TASKS)


@pytest.fixture(scope="module")
def prepare(tmp_path_factory):
    """Return by case a complete small recipe, examples, tokenizer and data sets, all made once."""

    @cache
    def prepare(name):
        torch.manual_seed(0)  # for the checkpoint to start from
        task, make_recipe, _ = CASES[name]
        recipe = Recipe.make(task, make_recipe(tmp_path_factory.mktemp("case")))
        examples = task.load(recipe.data, lambda line: None)
        tokenizer = task.tokenize(recipe, examples, lambda line: None)
        data = {split: task.encode(examples[split], tokenizer, recipe, split) for split in examples}
        return recipe, examples, tokenizer, data

    return prepare


@pytest.fixture(params=CASES)
def case(request, prepare):
    """Return a task, its complete small recipe, examples, tokenizer, data sets and a fresh model."""
    task, _, wrong = CASES[request.param]
    recipe, examples, tokenizer, data = prepare(request.param)
    torch.manual_seed(0)
    model = make_model(task, recipe, task.configure(recipe, tokenizer, examples))
    return task, recipe, examples, tokenizer, data, model, wrong


def take_batch(task, data, count=8):
    return collate(data.__getitems__(list(range(count))))


def answer(task, model, data):
    """Return the summaries of a data set."""
    batch = take_batch(task, data, len(data))
    with torch.no_grad():
        return task.summarize(model.eval()(**batch, **task.evaluation_options), batch).numpy()


def test_what_is_loaded_is_declared(case):
    task, _, examples, _, _, _, _ = case
    assert set(examples) <= {"train", *task.splits, *task.unlabelled}
    assert ("train" in examples) == bool(task.metric)
    assert set(list(task.splits)[:1]) <= set(examples)


def test_data_are_known_by_their_fingerprint(case):
    """Equal examples have equal fingerprints; a changed token or answer changes the fingerprint."""
    task, recipe, examples, tokenizer, data, _, _ = case
    for split, found in data.items():
        assert task.encode(examples[split], tokenizer, recipe, split).fingerprint() == found.fingerprint()
        inner = next((getattr(found, name) for name in ("corpus", "sequences", "words") if hasattr(found, name)), found)
        labels = [getattr(one, name, None) for one in (inner, found) for name in ("answers", "labels")]
        seen = {found.fingerprint()}
        for array in (inner.ids, next((array for array in labels if array is not None), None)):
            if array is not None:
                array[(0,) * array.ndim] += 1
                assert found.fingerprint() not in seen
                seen.add(found.fingerprint())
                array[(0,) * array.ndim] -= 1  # the data are shared
    assert len({found.fingerprint() for found in data.values()}) == len(data)


@pytest.mark.parametrize("case", FINE_TUNED, indirect=True)
def test_some_of_dev_decide_and_the_others_are_scored(case):
    """Each example is in one part, in order, with all of its group; the division is always the same."""
    task, _, examples, _, _, _, _ = case
    dev = examples[next(iter(task.splits))]
    groups = task.tabulate_examples(dev).groups
    found = [task.tabulate_examples(part).groups for part in divide(task, dev, 0.3)]
    assert found == [task.tabulate_examples(part).groups for part in divide(task, dev, 0.3)]
    assert len(found[0]) + len(found[1]) == len(groups)
    assert len(set(found[0])) == round(0.3 * len(set(groups)))
    if task.name != "ner":  # a document's number is its own; sentences without documents are renumbered
        assert not set(found[0]) & set(found[1])
        assert found[1] == [group for group in groups if group in set(found[1])], "in order"
    for share in (1e-6, 1 - 1e-6):
        with pytest.raises(UsageError, match="leaves one part empty"):
            divide(task, dev, share)


def answer_dev(case):
    """Return the task, its first evaluated split, all of it as a batch, and the model's outputs without dropout."""
    task, _, _, _, data, model, _ = case
    dev = data[next(iter(task.splits))]
    batch = take_batch(task, dev, len(dev))
    with torch.no_grad():
        return task, dev, batch, model.eval()(**batch, **task.evaluation_options)


@LEARNED
def test_a_model_that_has_diverged_is_refused(case):
    task, dev, batch, outputs = answer_dev(case)
    for name in [name for name in outputs if name.endswith("logits")]:
        outputs[name] = torch.full_like(outputs[name], torch.nan)
    with pytest.raises(UsageError, match="training has diverged"):
        task.decode(task.summarize(outputs, batch).numpy(), dev).rows.validate()


@LEARNED
def test_one_step_has_a_finite_loss_and_a_gradient_everywhere(case):
    task, _, _, _, data, model, _ = case
    model.train()
    batch = take_batch(task, data["train"])
    loss = model(**batch, **model.count_labels(**batch)).loss
    assert loss.isfinite()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.requires_grad or model.is_frozen, name
        moved = parameter.grad is not None and parameter.grad.abs().sum() > 0
        assert moved == parameter.requires_grad or name in UNMOVED.get(task.name, ()), name
    assert loss.item() == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-5)


@LEARNED
def test_a_frozen_parameter_gets_no_gradient(case):
    task, _, _, _, data, model, _ = case
    batch = take_batch(task, data["train"])
    model.bert.requires_grad_(False)
    model.bert.embeddings.word_embeddings.weight.requires_grad_(True)
    model.train()(**batch).loss.backward()
    for name, parameter in model.bert.named_parameters():
        is_reached = name == "embeddings.word_embeddings.weight" and "input_ids" in batch
        assert (parameter.grad is None) != is_reached, name


@LEARNED
def test_a_batch_in_parts_has_the_same_loss_gradients_and_answers(case):
    """Without dropout."""
    task, _, _, _, data, model, _ = case
    batch = take_batch(task, data["train"])
    parts = divide_batch(batch, 40)
    assert len(parts) > 1
    found, counts = [], model.count_labels(**batch)
    for divided in ([batch], parts):
        model.eval().zero_grad()
        loss = sum(model(**part, **counts).loss for part in divided)
        loss.backward()
        with torch.no_grad():
            outputs = [model(**part, **task.evaluation_options) for part in divided]
        summary = reduce(nested_concat, map(task.summarize, outputs, divided))
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append((loss, summary, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("case", [name for name in FINE_TUNED if name != "ner, features"], indirect=True)
@pytest.mark.parametrize("bilstm", [False, True])
def test_every_fine_tuned_task_can_freeze_its_encoder_and_have_a_bilstm(case, bilstm):
    task, recipe, examples, tokenizer, data, _, _ = case
    settings = task.configure(recipe, tokenizer, examples)
    model = make_model(task, recipe := vary(recipe, freeze="encoder", bilstm=bilstm), settings)
    assert type(model) is getattr(bertkit, name_head(task, recipe))
    assert recipe.is_solved == (task.name in ("classify", "ner", *GLUE) and not bilstm)
    loss = model.train()(**take_batch(task, data["train"])).loss
    assert loss.isfinite()
    loss.backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not [name for name in learned if name.startswith(("bert.embeddings", "bert.encoder"))]
    assert any(name.startswith(("classifier", "qa_outputs")) for name in learned)
    assert any(name.startswith("bilstm") for name in learned) == bilstm


@LEARNED
def test_gold_answers_score_the_maximum_and_wrong_ones_do_not(case):
    """Replace the head's outputs by logits that are certain of the labels."""
    task, dev, batch, outputs = answer_dev(case)
    worst = score_summaries(task, task.summarize(outputs, batch).numpy(), dev)
    for name, value in outputs.items():
        if name.endswith("logits"):
            labels = batch[LABELS.get(name, "labels")]
            classes = not labels.is_floating_point()
            if classes and value.shape[:-1] != labels.shape:  # these logits are of the labelled tokens alone
                labels = labels[labels != -100]
            numbers = labels.clamp(min=0)
            certain = 100.0 * torch.nn.functional.one_hot(numbers, value.shape[-1]) if classes else labels[:, None]
            outputs[name] = 200.0 * labels - 100.0 if value.shape == labels.shape else certain
    best = score_summaries(task, task.summarize(outputs, batch).numpy(), dev)
    for name, value in best.items():
        if name not in TAU and not name.startswith(EACH):
            is_gain = find_row(task.table, name).unit == "fraction" and name != "ece"
            least = 1.0 if is_gain or name in ("perplexity", "r2") else 0.0
            perfect = 100.0 if task.name in SQUAD else least
            assert value == pytest.approx(perfect, abs=1e-6), name
            # A model that knows nothing may still be right about all questions without an answer, and calibrated.
            assert abs(worst[name] - perfect) > 1e-3 or "NoAns" in name or name == "ece", name
    assert task.metric in best


@LEARNED
def test_the_tables_of_a_run_hold_all_of_its_scores(case, tmp_path):
    """The rows of a file have the scores in any order, and repeated rows those of weights."""
    task, recipe, examples, tokenizer, data, model, _ = case
    prepared = Prepared(examples, tokenizer, data, {})
    found = score_splits(task, recipe, lambda rows: answer(task, model, rows), prepared, lambda line: None)
    for split in [split for split in task.splits if split in data]:
        path = tmp_path / f"{split}.parquet"
        path.write_bytes(found.files[path.name])
        rows = read_table(path)
        assert len(set(rows.column(KEY).to_pylist())) == len(rows)
        measured = task.score(rows)
        scores = take_values(measured)
        assert scores == {name: found.metrics[task.splits[split].format(name)] for name in measured}
        draws = np.random.default_rng(0)
        shuffled = take_values(task.score(rows.take(draws.permutation(len(rows)))))
        assert shuffled == pytest.approx(scores, rel=1e-9, abs=1e-9)
        weights = draws.integers(0, 4, len(rows))
        repeated = take_values(task.score(rows.take(np.repeat(np.arange(len(rows)), weights))))
        for name, score in measured.items():
            if isinstance(score, WeightedScore):
                weighted = score.score(weights[None].astype(float))[0]
                assert weighted == pytest.approx(repeated.get(name, 0.0), rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("case", FINE_TUNED, indirect=True)
def test_a_table_of_another_program_has_the_keys_of_a_run(case, tmp_path):
    """It has the texts, the right answers and the predictions as CSV, in another order."""
    task, _, examples, tokenizer, data, model, _ = case
    split = next(iter(task.splits))
    rows = task.decode(answer(task, model, data[split]), data[split]).rows
    ours = join_rows(rows, task.tabulate_examples(examples[split]), tokenizer)
    texts = read_facts(ours)["texts"]
    theirs = ours.select([*texts, LABEL, PREDICTION]).to_pandas().sample(frac=1, random_state=0)
    path = tmp_path / "theirs.csv"
    theirs.map(lambda cell: json.dumps(cell.tolist()) if isinstance(cell, np.ndarray) else cell).to_csv(path)
    found = read_table(path, texts)
    assert set(found.column(KEY).to_pylist()) == set(ours.column(KEY).to_pylist())


@LEARNED
def test_scores_and_baselines_are_what_the_table_shows(case):
    task, _, _, _, data, model, _ = case
    dev = data[next(iter(task.splits))]
    scores = score_summaries(task, answer(task, model, dev), dev)
    baselines = task.baseline(data["train"], dev)
    shown = [row for row in task.table if row.key in scores]
    unshown = {key for key in scores if key in TAU or key.startswith(("tau0_", "NoAns", *EACH))}
    assert {row.key for row in shown} | {task.metric} | unshown == set(scores)
    everywhere = {name.format(row.key) for name in task.splits.values() for row in shown}
    assert everywhere <= {row.key for row in task.table}, "the other splits too"
    for row in shown:
        for key in row.baselines.values():
            assert key.startswith(tuple(f"{name}_" for name in task.baselines)) or np.isfinite(baselines[key])


def test_a_wrong_file_is_named_in_one_line(case):
    task, recipe, _, _, _, _, wrong = case
    with pytest.raises(UsageError) as error:
        task.load({**recipe.data, **wrong}, lambda line: None)
    (value,) = wrong.values()
    assert (value[0] if isinstance(value, list) else value) in str(error.value)
    assert "\n" not in str(error.value)


def test_predictions_are_texts_in_files_of_their_own(case):
    """Check every split that is evaluated or predicted."""
    task, _, _, _, data, model, _ = case
    names = []
    for split in data.keys() & {*task.splits, *task.unlabelled}:
        answers = task.decode(answer(task, model, data[split]), data[split])
        files = task.format_predictions(answers, data[split], split)
        assert split not in task.unlabelled or files
        assert all(text.endswith("\n") for text in files.values())
        names += files
    assert len(set(names)) == len(names)
    assert all(Path(name).name == name for name in names)


def test_options_have_the_values_that_the_code_knows():
    known = {
        "objective": tuple(HEADS),
        "long": LONG,
        "problem_type": ("auto", *reversed(LABEL_KINDS)),
        "features": ("", *FEATURE_LAYERS),
        "order": ("", "documents"),
        "pooling": ("auto", "mean", "cls"),
        "language": ("", *LANGUAGES),
        "scheme": ("", ENTITIES, WORDS),
        "words": BORDERS,
    }
    choices = [(key, option.choices) for task in TASKS.values() for key, option in task.options.items()]
    assert {key: values for key, values in choices if values} == known


def test_the_recipe_of_the_paper_is_complete_and_passes_its_own_check(tmp_path):
    for task in TASKS.values():
        # The default one is on the Hub.
        start = write_start(tmp_path / task.name, task, max_position_embeddings=512)
        given = {"checkpoint": start, "preset": "paper"} if "checkpoint" in task.recipe else {}
        recipe = Recipe.make(task, given)
        assert recipe.task == task.name
        assert task.recipe["data"] == list_defaults(task.options)
        assert all(option.help.endswith(".") for option in task.options.values())
        assert {"batch_size", "precision", "preset", "data", "train"} <= set(recipe.to_dict())
        assert recipe.train["optim"] == "bert_adam"
        assert Recipe.make(task, given, {"preset": "stable"}).train["optim"] == "adamw_torch"


@pytest.mark.parametrize("case", ["pretrain, clm", "squad2", "swag", "ner", "classify, several labels"], indirect=True)
def test_the_cost_of_an_update_is_measured(case):
    task, recipe, examples, tokenizer, data, model, _ = case
    settings = task.configure(recipe, tokenizer, examples)
    recipe = replace_values(recipe, start="random")  # another one may add a layer
    found = costs.measure(recipe, Prepared(examples, tokenizer, data, settings), 0.0)
    assert min(found.tokens, found.seconds_per_update, found.seconds_per_row, *found.memory.values()) > 0
    assert found.memory["weights"] == sum(4 * x.numel() for x in model.parameters())
