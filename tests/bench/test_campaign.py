"""The GPU campaign: what is repeated, cut off and recorded, and the page made from the files of its steps."""

import json
import os
import signal
import time
from functools import partial

import pytest

from bertkit.bench import campaign as campaigns
from bertkit.bench.campaign import Campaign, Outcome, Step, read_records, run_campaign, run_in_process
from bertkit.errors import UsageError
from bertkit.system.progress import ignore

ENVIRONMENT = {
    "gpus": ["A Card"],
    "processor": "A Processor",
    "threads": 8,
    "packages": {"torch": "2.13", "transformers": "5.23"},
    "commit": "0123456789abcdef+",
}


def make_one(value, campaign, report):
    report(f"makes {value}")
    print("into the log")
    return {"value": value}


def fail(campaign, report):
    raise RuntimeError("out of\nmemory")


def disagree(campaign, report):
    return {"value": 3, "failure": "other losses"}


def die(campaign, report):
    os._exit(7)


def wait_for_the_end(campaign, report):
    def save(number, frame):
        (campaign.output / "saved").touch()
        raise SystemExit

    signal.signal(signal.SIGTERM, save)
    report("ready")
    time.sleep(60)


def run_here(step, campaign, log, seconds, report):
    """Run a step in this process; a step without a function is cut off."""
    if step.run is None:
        return Outcome()
    try:
        found = step.run(campaign, report)
    except Exception as error:
        return Outcome(failure=campaigns.explain_failure(error))
    return Outcome(found, found.get("failure", ""))


def run_steps(output, steps, minutes=1.0, tiny=False):
    """Run steps here, and return the failed ones, the lines and the order in which steps ran."""
    lines, ran = [], []

    def execute(step, *rest):
        ran.append(next(name for name, one in steps.items() if one is step))
        return run_here(step, *rest)

    failed = run_campaign(Campaign(output, tiny=tiny), steps, minutes, lines.append, execute)
    return failed, lines, ran


# --- Steps ------------------------------------------------------------------------------------------------------------


def test_finished_steps_are_not_repeated_and_failed_ones_come_last(tmp_path):
    steps = {"one": Step(1, partial(make_one, 1)), "bad": Step(1, fail), "two": Step(1, partial(make_one, 2))}
    failed, lines, ran = run_steps(tmp_path, steps)
    assert (failed, ran) == (["bad"], ["one", "bad", "two"])
    assert any(
        line.startswith("bad: failed after 0 s: RuntimeError: out of memory (test_campaign.py:") for line in lines
    )
    assert read_records(tmp_path)["two"]["found"] == {"value": 2}
    more = steps | {"bad": Step(1, partial(make_one, 5)), "new": Step(1, partial(make_one, 4))}
    assert run_steps(tmp_path, more)[::2] == ([], ["new", "bad"])
    assert {path.name for path in tmp_path.glob("*.json")} == {"one.json", "two.json", "bad.json", "new.json"}


def test_a_step_that_does_not_fit_is_left_and_a_shorter_one_runs(tmp_path):
    steps = {"long": Step(90, partial(make_one, 1)), "short": Step(10, partial(make_one, 2))}
    failed, lines, ran = run_steps(tmp_path, steps)
    assert (failed, ran) == ([], ["short"])
    assert "long: left for the next call; it takes about 1 min 30 s, and 40 s are left" in lines
    assert run_steps(tmp_path, steps, minutes=2.0)[2] == ["long"]


def test_a_step_cut_off_by_the_total_is_left_and_one_that_had_its_time_has_failed(tmp_path):
    failed, lines, _ = run_steps(tmp_path, {"slow": Step(30, None)})
    assert failed == []
    assert "slow: cut off after 0 s; left for the next call" in lines
    assert read_records(tmp_path) == {}
    failed, lines, _ = run_steps(tmp_path, {"slow": Step(10, None)})
    assert failed == ["slow"]
    assert read_records(tmp_path)["slow"]["failure"] == "it took longer than 30 s"


def test_figures_of_a_failed_step_are_kept(tmp_path):
    assert run_steps(tmp_path, {"parity": Step(1, disagree)})[0] == ["parity"]
    record = json.loads((tmp_path / "parity.failed.json").read_text())
    assert (record["failure"], record["found"]["value"]) == ("other losses", 3)


def test_a_rehearsal_and_a_campaign_do_not_share_a_directory(tmp_path):
    steps = {"one": Step(1, partial(make_one, 1))}
    run_steps(tmp_path, steps, tiny=True)
    with pytest.raises(UsageError, match="holds the figures of a rehearsal; name another directory with --output"):
        run_steps(tmp_path, steps)


# --- Processes --------------------------------------------------------------------------------------------------------


def test_a_process_sends_lines_and_figures_and_keeps_a_log(tmp_path):
    lines = []
    step, log = Step(1, partial(make_one, 8)), tmp_path / "log"
    assert run_in_process(step, Campaign(tmp_path), log, 60, lines.append) == Outcome({"value": 8})
    assert (lines, log.read_text()) == (["  makes 8"], "into the log\n")


@pytest.mark.parametrize(
    ("function", "reason"),
    [(fail, "RuntimeError: out of memory"), (die, "its process ended with exit code 7; see ")],
)
def test_whatever_ends_a_process_is_the_reason(tmp_path, function, reason):
    outcome = run_in_process(Step(1, function), Campaign(tmp_path), tmp_path / "log", 60, ignore)
    assert outcome.failure.startswith(reason)


def test_a_process_that_is_stopped_may_save_its_state(tmp_path):
    lines = []
    outcome = run_in_process(Step(1, wait_for_the_end), Campaign(tmp_path), tmp_path / "log", 3, lines.append)
    assert (outcome, lines) == (Outcome(), ["  ready"])
    assert (tmp_path / "saved").exists()


# --- The page ---------------------------------------------------------------------------------------------------------


def make_side(rate, share, memory):
    return {"precision": "bf16", "samples_per_second": rate, "share_of_products": share, "peak_bytes": memory}


TRAINING = {
    "sides": {"bertkit": make_side(900, 0.55, 2**30), "same": make_side(300, 0.2, 4 * 2**30)},
    "best": "same",
    "memory": 0.25,
    "products": {"bf16": [6e14, 7e14]},
    "losses": {"mean_difference": 2e-5},
    "environment": ENVIRONMENT,
}
ERRORS = {"bertkit": 1e-6, "stock": 2e-6}
FIGURES = {
    "tests": {"tests": 22, "passed": 22, "environment": ENVIRONMENT},
    "parity": {
        "heads": {"BertForMaskedLM": {"fp32": {"agrees": True, "loss": ERRORS, "gradients": ERRORS}}},
        "environment": ENVIRONMENT,
    },
    "pretrain-base": TRAINING,
    "predict-minilm": {
        "figures": {
            "fp32": {"texts_per_second": {"bertkit": 50, "pipeline of 8": 20}, "best": "pipeline of 8", "ratio": 2.5}
        },
        "environment": ENVIRONMENT,
    },
    "curve": {
        "curve": [{"update": 1000, "mlm_loss": 4.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.75}],
        "metrics": {"unigram_loss": 6.5, "nsp_majority": 0.5},
        "updates": 1000,
        "batch_size": 256,
        "text": "docs",
        "recipe": "small.toml",
        "seconds": 300,
        "environment": ENVIRONMENT,
    },
    "squad": {
        "version": "1.1",
        "questions": 2000,
        "scores": {"EM": 50.0, "F1": 60.0},
        "environment": ENVIRONMENT,
    },
}


def test_the_page_has_the_rows_and_aims_of_every_step(tmp_path):
    from bertkit.bench.campaign_page import write_page

    for name, found in FIGURES.items():
        record = {"step": name, "tiny": False, "seconds": 61, "found": found}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    failed = {
        "step": "finetune-large",
        "tiny": False,
        "seconds": 5,
        "found": None,
        "failure": "OutOfMemoryError: 80 GB",
    }
    (tmp_path / "finetune-large.failed.json").write_text(json.dumps(failed))
    page = write_page(tmp_path).read_text()
    for row in (
        "| BertForMaskedLM | 1.0e-06; 1.0e-06 (2.0e-06) |",
        "| pretrain base | bertkit, bf16 | 900.0 | 55 % (aim 60 %) | 1,024 | 0.25 of the memory (aim 0.5) |",
        "| pretrain base | transformers, the same batches, bf16 | 300.0 | 20 % | 4,096 | 3.00 times as fast, its best "
        "(aim 1.5) |",
        "| minilm | fp32 | 50.0 | 20.0 | pipeline of 8 | 2.50 (aim 2.5) |",
        "| 1,000 | 4.500 | 25.0 % | 75.0 % |",
        "| 1.1 | 2,000 | 50.0 | 60.0 |",
        "| tests | 1 min 1 s | 22 of 22 tests passed |",
        "| finetune-large | 5 s | failed: OutOfMemoryError: 80 GB |",
    ):
        assert row in page
    assert "products: bf16 600 to 700 TFLOP/s" in page
    assert page.count("A Card; torch 2.13, transformers 5.23; commit 0123456+") == 1
    assert "Rehearsal" not in page


# --- The command ------------------------------------------------------------------------------------------------------


def test_without_an_accelerator_one_line_says_so(call, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    code, out, err = call("bench", "gpu")
    assert (code, out) == (2, "")
    assert "no accelerator was found; use a machine that has one, or rehearse on the CPU with --tiny" in err


@pytest.mark.slow
def test_the_rehearsal_runs_every_step(call, tmp_path, monkeypatch):
    from bertkit.bench.campaign_steps import CHECKOUT
    from tests.official import write_squad

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command hides them, too
    write_squad(tmp_path / "data" / "squad")
    recipe = CHECKOUT / "recipes" / "pretrain" / "small.toml"
    command = ("bench", "gpu", "--tiny", "--recipe", recipe, "--data", tmp_path / "data", "--output", tmp_path / "gpu")
    code, out, err = call(*command)
    assert (code, err) == (0, "")
    names = {"tests", "parity", "pretrain-base", "mlm-base", "finetune-base", "predict-base", "curve", "squad"}
    records = read_records(tmp_path / "gpu")
    assert records.keys() == names
    assert all(record["tiny"] for record in records.values())
    assert records["tests"]["found"]["tests"] > 0
    page = (tmp_path / "gpu" / "RESULTS.md").read_text()
    assert page.count("\n|---|") == 6
    assert "Rehearsal with tiny sizes: no figure means anything." in page
    code, out, _ = call(*command)
    assert code == 0
    assert all(f"{name}: finished\n" in out for name in names)
