"""The steps of a GPU campaign: tests, parity, benchmarks beside plain transformers, a pretraining's curve, and SQuAD.

Every library is imported within its step, so that a missing one makes only that step fail.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bertkit
from bertkit.bench.campaign import FAILURE, Campaign, Step
from bertkit.errors import UsageError
from bertkit.reports.tables import list_shown
from bertkit.system.progress import Report

CHECKOUT = Path(bertkit.__file__).parents[1]
GPU_MARK = "mark.gpu"
STOCK_KERNELS = ("eager", "flash_attention_2")  # stock's attention beside sdpa
PARITY_LENGTHS = [2, 17, 128, 128, 64, 5, 90, 33]
PAIRS_AN_UPDATE = {"base": 256, "minilm": 256, "large": 64}  # of pretraining
CURVE_SECONDS = 300  # of training
PROBE_UPDATES = 200  # from which the updates that fit are estimated
CURVE_CHARACTERS = 100_000_000  # of text at most
CURVE_POINTS = 20
CURVE_SCORES = ("mlm_loss", "mlm_accuracy", "nsp_accuracy")
SQUAD_QUESTIONS = 20_000  # for training
SQUAD_RELEASES = {1: "1.1", 2: "2.0"}

# A rehearsal's sizes.
TINY_BENCH = {"size": "tiny", "batch_size": 4, "updates": 2, "repeats": 1, "compiled": False, "kernels": ("eager",)}
TINY_CHARACTERS = 200_000
TINY_TEXTS = 8
TINY_LENGTHS = [2, 17, 33, 9]
TINY_VOCABULARY = 500
TINY_RECIPE: Mapping[str, Any] = {
    "batch_size": 8,
    "model": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 128},
    "data": {"vocab_size": 1000, "heldout_pairs": 16},
    "phase": [{"share": 0.9, "max_length": 32}, {"share": 0.1, "max_length": 64}],
}
TINY_UPDATES = 10  # of the probe
TINY_SQUAD: Mapping[str, Any] = {"batch_size": 4, "data": {"max_length": 64, "doc_stride": 16, "max_query_length": 16}}


def list_steps(campaign: Campaign) -> dict[str, Step]:
    """Return the steps in their order, without those whose tests, recipe or data are missing.

    The seconds are estimates for an H200; most of those of training are compilation. A rehearsal has benchmarks of one
    size.
    """
    steps = {
        "tests": Step(60, run_tests),
        "parity": Step(90, compare_with_stock),
        **list_benches("base", 200, 220, 40),
        **list_benches("minilm", 140, 150, 30),
        "curve": Step(CURVE_SECONDS + 60, pretrain),
        "squad": Step(120, answer_questions),
        "mlm-base": Step(150, bench_masked_lm),
        **list_benches("large", 280, 300, 70),
    }
    missing = {
        "tests": not (CHECKOUT / "tests").is_dir(),
        "curve": campaign.recipe is None,
        "squad": not list_squad_versions(campaign),
    }
    steps = {name: step for name, step in steps.items() if not missing.get(name)}
    if not campaign.tiny:
        return steps
    return {name: Step(30, step.run) for name, step in steps.items() if not name.endswith(("-minilm", "-large"))}


def list_benches(size: str, pretraining: float, finetuning: float, prediction: float) -> dict[str, Step]:
    """Return the benchmarks of a size, with their seconds."""
    return {
        f"pretrain-{size}": Step(pretraining, partial(bench_pretraining, size)),
        f"finetune-{size}": Step(finetuning, partial(bench_finetuning, size)),
        f"predict-{size}": Step(prediction, partial(bench_predictions, size)),
    }


def check_accelerator(campaign: Campaign) -> None:
    """Check that there is an accelerator, unless this is a rehearsal.

    Raises:
        UsageError: No accelerator was found.
    """
    import torch

    if not campaign.tiny and not torch.accelerator.is_available():
        raise UsageError("no accelerator was found; use a machine that has one, or rehearse on the CPU with --tiny")


# --- Tests and parity -------------------------------------------------------------------------------------------------


class PytestCounter:
    """A plugin of pytest that collects the names of passed and failed tests."""

    def __init__(self) -> None:
        self.collected = 0
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        """Count the tests."""
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test's result; setup and teardown can only fail."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run_tests(campaign: Campaign, report: Report) -> dict[str, Any]:
    """Run the tests that need a GPU; a rehearsal only collects them."""
    import pytest

    from bertkit.bench.measure import note_machine

    environment = note_machine(report)
    os.chdir(CHECKOUT)
    files = [str(path) for path in Path("tests").rglob("test_*.py") if GPU_MARK in path.read_text(encoding="utf-8")]
    # The checkout's own options need plugins that may be missing.
    options = ["-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    counter = PytestCounter()
    code = pytest.main([*options, *["--collect-only"] * campaign.tiny, *files], plugins=[counter])
    found = {
        "tests": counter.collected,
        "passed": len(counter.passed),
        "failed": sorted(set(counter.failed)),
        "environment": environment,
    }
    report(f"{found['tests']} tests, {found['passed']} passed")
    if code:
        named = ", ".join(found["failed"]) or "see its log"
        found[FAILURE] = f"pytest ended with exit code {int(code)}: {named}"
    return found


def compare_with_stock(campaign: Campaign, report: Report) -> dict[str, Any]:
    """Compare losses and gradients with plain transformers."""
    from bertkit.bench.parity import compare_heads
    from bertkit.bench.training import choose_size

    if campaign.tiny:
        return compare_heads(choose_size("tiny") | {"vocab_size": TINY_VOCABULARY}, TINY_LENGTHS, report)
    return compare_heads(choose_size("base"), PARITY_LENGTHS, report)


# --- Benchmarks -------------------------------------------------------------------------------------------------------


def bench_pretraining(size: str, campaign: Campaign, report: Report) -> dict[str, Any]:
    """Measure pretraining of a size beside plain transformers."""
    from bertkit.bench.pretrain import bench_pretrain

    options = {"size": size, "batch_size": PAIRS_AN_UPDATE[size], "updates": 20, "kernels": STOCK_KERNELS}
    if campaign.tiny:
        options = {**TINY_BENCH, "length": 32, "characters": TINY_CHARACTERS}
    return bench_pretrain(find_text(campaign), **options, report=report)[0]


def bench_masked_lm(campaign: Campaign, report: Report) -> dict[str, Any]:
    """Measure masked LM alone beside plain transformers, which can run it without padding."""
    from bertkit.bench.pretrain import bench_pretrain

    options = {"size": "base", "batch_size": PAIRS_AN_UPDATE["base"], "updates": 20}
    if campaign.tiny:
        options = {**TINY_BENCH, "length": 32, "characters": TINY_CHARACTERS}
    return bench_pretrain(find_text(campaign), objective="mlm", **options, report=report)[0]


def bench_finetuning(size: str, campaign: Campaign, report: Report) -> dict[str, Any]:
    """Measure fine-tuning of a size beside plain transformers; MiniLM's starts from the checkpoint, if given."""
    from bertkit.bench.finetune import bench_finetune

    options = {"size": size, "updates": 100, "repeats": 2, "kernels": STOCK_KERNELS}
    if campaign.tiny:
        options = {**TINY_BENCH, "characters": TINY_CHARACTERS}
    return bench_finetune(campaign.model if size == "minilm" else None, **options, report=report)[0]


def bench_predictions(size: str, campaign: Campaign, report: Report) -> dict[str, Any]:
    """Measure predictions of a size, with random weights, beside the pipeline of plain transformers."""
    from bertkit.bench.predict import bench_predict

    if campaign.tiny:
        return bench_predict(count=TINY_TEXTS, repeats=1, size="tiny", report=report)[0]
    return bench_predict(size=size, report=report)[0]


# --- Runs -------------------------------------------------------------------------------------------------------------


def find_text(campaign: Campaign) -> str:
    """Return the folder `text` of the data, else the installed documentation."""
    text = campaign.data / "text" if campaign.data else None
    return str(text) if text is not None and text.is_dir() else "docs"


def pretrain(campaign: Campaign, report: Report) -> dict[str, Any]:
    """Pretrain by the campaign's recipe for about CURVE_SECONDS, and return the held-out scores over the updates.

    A stopped run continues. The number of updates follows from the time of a few.
    """
    from bertkit.bench.measure import note_machine
    from bertkit.tasks.pretraining import PRETRAINING
    from bertkit.training.recipe import Recipe, merge, read_recipe
    from bertkit.training.run import run
    from bertkit.training.run_dir import RECIPE_FILE, read_log

    environment, output = note_machine(report), campaign.output / "curve"
    recipe = merge(read_recipe(campaign.recipe), TINY_RECIPE if campaign.tiny else {})
    corpus = campaign.output / "corpus"
    build_corpus(campaign, corpus, recipe["data"]["vocab_size"], report)
    recipe = merge(recipe, {"data": {"corpus": [str(corpus)]}})
    if (output / RECIPE_FILE).exists():
        updates = read_recipe(output / RECIPE_FILE)["train"]["max_steps"]
    else:
        probe, allowed = (TINY_UPDATES, 1) if campaign.tiny else (PROBE_UPDATES, CURVE_SECONDS)
        with TemporaryDirectory() as folder:
            run(Recipe.make(PRETRAINING, shorten(recipe, probe, 1)), output=folder, report=report)
            seconds = find_training_seconds(read_log(Path(folder)))
        updates = max(int(allowed * probe / seconds), CURVE_POINTS)
    metrics = run(Recipe.make(PRETRAINING, shorten(recipe, updates, CURVE_POINTS)), output=output, report=report)
    log = read_log(output)
    draw_curve(output, metrics)
    curve = [
        {"update": entry["step"]} | {name: entry[f"eval_{name}"] for name in CURVE_SCORES}
        for entry in log
        if "eval_mlm_loss" in entry
    ]
    found = {"curve": curve, "metrics": metrics, "updates": updates, "batch_size": recipe["batch_size"]}
    found |= {"text": find_text(campaign), "recipe": campaign.recipe.name, "seconds": find_training_seconds(log)}
    return found | {"environment": environment}


def build_corpus(campaign: Campaign, corpus: Path, vocab_size: int, report: Report) -> None:
    """Build the corpus of the curve, with a vocabulary trained on it, unless it exists."""
    from bertkit.bench.corpus import write_text
    from bertkit.data.pretraining.build import build
    from bertkit.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
    from bertkit.system.cluster import count_cores

    text, vocabulary = corpus.with_name("text.txt"), corpus.with_name("vocab")
    if not vocabulary.exists():
        write_text(find_text(campaign), text, TINY_CHARACTERS if campaign.tiny else CURVE_CHARACTERS)
        with text.open(encoding="utf-8") as lines:
            tokenizer = train_tokenizer(lines, size=vocab_size, report=report)
        with TemporaryDirectory(dir=corpus.parent) as folder:
            save_tokenizer(tokenizer, Path(folder, "vocab"))
            Path(folder, "vocab").rename(vocabulary)
    tokenizer = load_tokenizer(str(vocabulary), cased=False)
    build([str(text)], tokenizer, corpus, split_sentences=False, workers=count_cores(), report=report)


def shorten(recipe: Mapping[str, Any], updates: int, points: int) -> dict[str, Any]:
    """Return a pretraining recipe with another number of updates, evaluated at the given number of points."""
    from bertkit.training.recipe import merge

    every = max(1, updates // points)
    train = {"max_steps": updates, "warmup_steps": 0.1, "eval_steps": every, "save_steps": 5 * every}
    return merge(recipe, {"train": train})


def find_training_seconds(log: list[dict[str, float]]) -> float:
    """Return the `train_runtime` of a log; a continued run has that of its last part."""
    return next(entry["train_runtime"] for entry in reversed(log) if "train_runtime" in entry)


def draw_curve(output: Path, metrics: Mapping[str, Any]) -> None:
    """Draw the curves of a pretraining."""
    from bertkit.reports.plots import plot_log
    from bertkit.tasks.pretraining import PRETRAINING
    from bertkit.training.run_dir import read_log

    rows = list_shown(PRETRAINING.table, PRETRAINING.metric, metrics)
    plot_log(read_log(output), rows, metrics, output / "curves.png")


def list_squad_versions(campaign: Campaign) -> list[int]:
    """Return the versions of SQuAD whose training file is in the data, 1.1 first."""
    if campaign.data is None:
        return []
    folder = campaign.data / "squad"
    return [number for number, release in SQUAD_RELEASES.items() if (folder / f"train-v{release}.json").exists()]


def answer_questions(campaign: Campaign, report: Report) -> dict[str, Any]:
    """Fine-tune on a part of SQuAD for one epoch, from the checkpoint, if given, else from the curve's model."""
    from bertkit.bench.measure import note_machine
    from bertkit.tasks.squad import find_squad
    from bertkit.training.recipe import Recipe, merge
    from bertkit.training.run import run
    from bertkit.training.run_dir import METRICS_FILE

    environment, trained = note_machine(report), campaign.output / "curve"
    if not campaign.model and not (trained / METRICS_FILE).exists():
        raise UsageError("SQuAD needs a pretrained model: give one with --model, or let the step curve finish first")
    number = list_squad_versions(campaign)[0]
    recipe: dict[str, Any] = {
        "checkpoint": campaign.model or str(trained),
        "data": {"dir": str(campaign.data / "squad"), "max_train_samples": SQUAD_QUESTIONS},
        "train": {"num_train_epochs": 1.0},
    }
    recipe = merge(recipe, TINY_SQUAD if campaign.tiny else {})
    metrics = run(Recipe.make(find_squad(number), recipe), output=campaign.output / "squad", report=report)
    return {
        "version": SQUAD_RELEASES[number],
        "scores": {"EM": metrics["exact_match" if number == 1 else "exact"], "F1": metrics["f1"]},
        "metrics": metrics,
        "start": campaign.model or "curve",
        "questions": SQUAD_QUESTIONS,
        "environment": environment,
    }
