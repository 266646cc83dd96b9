"""Write the Markdown rows of a GPU campaign, in the form of recipes/RESULTS.md, from the files of its steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertkit.bench.campaign import FAILURE, read_records
from bertkit.bench.measure import BERTKIT
from bertkit.bench.training import COMPILED, EXAMPLE, SAME_BATCHES, SORTED
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import MISSING, Table, make_table
from bertkit.system.progress import describe_duration

PAGE_SIZES = ("minilm", "base", "large")
SPEED_AIM, MEMORY_AIM, PRODUCTS_AIM = 1.5, 0.5, 0.6  # the last one in pretraining base
PREDICTION_AIMS = {"minilm": 2.5, "base": 2.0}
SIDE_NAMES = {
    SAME_BATCHES: "transformers, the same batches",
    SORTED: "the same, rows sorted by length",
    COMPILED: "the same, compiled",
    EXAMPLE: "as in its examples: padded to the full length",
    "eager": "with eager attention",
    "flash_attention_2": "with flash attention",
}

Records = Mapping[str, Mapping[str, Any]]


def make_page(output: Path) -> str:
    """Return the page of the steps that have ended in a campaign's directory."""
    records = read_records(output)
    figures = {name: one["found"] for name, one in records.items() if one["found"]}
    lines = ["## On an accelerator", "", "`make gpu`; aims in parentheses; failed steps are in the last table.", ""]
    lines += [*list_machines(figures, records), ""]
    parts = (tabulate_parity, tabulate_training, tabulate_predictions, tabulate_curve, tabulate_scores_of_squad)
    for table in (*(make(figures) for make in parts), tabulate_steps(records)):
        if table.rows:
            lines += [f"{table.caption}:", "", *format_table(table), ""]
    return "\n".join(lines)


def list_machines(figures: Records, records: Records) -> list[str]:
    """Return the machines and versions of the steps, and a warning if this was a rehearsal."""
    found = {}
    for name, one in figures.items():
        machine = one["environment"]
        device = ", ".join(machine["gpus"]) or f"CPU ({machine['processor']}, {machine['threads']} threads)"
        packages = machine["packages"]
        versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
        found.setdefault(f"{device}; {versions}; commit {(machine['commit'] or MISSING)[:7]}", []).append(name)
    lines = [f"{machine}: {', '.join(names)}." for machine, names in found.items()]
    if any(one["tiny"] for one in records.values()):
        lines = ["Rehearsal with tiny sizes: no figure means anything.", "", *lines]
    return lines


def list_sizes(figures: Records, kind: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the sizes whose step of a kind has figures, with these."""
    for size in PAGE_SIZES:
        if f"{kind}-{size}" in figures:
            yield size, figures[f"{kind}-{size}"]


def tabulate_parity(figures: Records) -> Table:
    """Return the errors of both sides by head and precision."""
    lines = []
    for head, by_precision in figures.get("parity", {}).get("heads", {}).items():
        for precision, one in by_precision.items():
            pairs = [f"{one[kind]['bertkit']:.1e} ({one[kind]['stock']:.1e})" for kind in ("loss", "gradients")]
            lines.append([head, precision, *pairs, "yes" if one["agrees"] else "no"])
    heads = ["head", "precision", "loss", "gradients", "agrees"]
    return make_table("Relative errors of an update to stock in fp64, in parentheses stock's own", heads, lines)


def tabulate_training(figures: Records) -> Table:
    """Return the rates and the memory of all sides in fine-tuning and pretraining."""
    lines = []
    for kind in ("pretrain", "finetune"):
        for size, found in list_sizes(figures, kind):
            for side, one in found["sides"].items():
                lines.append([f"{kind} {size}", *list_side(kind, size, side, one, found)])
    heads = ["", "side", "sequences per second", "of the products' rate", "memory, MiB", "bertkit is"]
    return make_table("Training beside plain transformers, medians; memory beyond the weights", heads, lines)


def list_side(kind: str, size: str, side: str, one: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the cells of one side, with the aims for ours."""
    rate, share = one["samples_per_second"], f"{one['share_of_products']:.0%}"
    memory = MISSING if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**20:,.0f}"
    name = f"{SIDE_NAMES.get(side, side)}, {one['precision']}"
    if side != BERTKIT:
        times = f"{found['sides'][BERTKIT]['samples_per_second'] / rate:.2f} times as fast"
        if side == found["best"]:
            times += f", its best (aim {SPEED_AIM})"
        return [name, f"{rate:,.1f}", share, memory, times]
    if (kind, size) == ("pretrain", "base"):
        share += f" (aim {PRODUCTS_AIM:.0%})"
    less = "" if found["memory"] is None else f"{found['memory']:.2f} of the memory (aim {MEMORY_AIM})"
    return [name, f"{rate:,.1f}", share, memory, less]


def tabulate_predictions(figures: Records) -> Table:
    """Return the rates of predictions by size and precision."""
    lines = []
    for size, found in list_sizes(figures, "predict"):
        aim = f" (aim {PREDICTION_AIMS[size]})" if size in PREDICTION_AIMS else ""
        for precision, one in found["figures"].items():
            rates, best = one["texts_per_second"], one["best"]
            line = [size, precision, f"{rates[BERTKIT]:,.1f}", f"{rates[best]:,.1f}", best, f"{one['ratio']:.2f}{aim}"]
            lines.append(line)
    heads = ["", "precision", "bertkit, texts per second", "the pipeline's best", "which", "times as fast"]
    return make_table("Predictions beside the pipeline of transformers", heads, lines)


def tabulate_curve(figures: Records) -> Table:
    """Return the held-out scores of the pretraining over its updates."""
    found = figures.get("curve", {"curve": []})
    caption = "Pretraining"
    if found["curve"]:
        known = found["metrics"]
        caption = (
            f"`bertkit pretrain --recipe {found['recipe']}` with {found['updates']:,} updates of {found['batch_size']} "
            f"pairs of {found['text']} in {describe_duration(found['seconds'])}; masked-LM loss of the token "
            f"frequencies {known['unigram_loss']:.3f}, larger next-sentence class {known['nsp_majority']:.1%}"
        )
    lines = [
        [f"{one['update']:,}", f"{one['mlm_loss']:.3f}", f"{one['mlm_accuracy']:.1%}", f"{one['nsp_accuracy']:.1%}"]
        for one in found["curve"]
    ]
    return make_table(caption, ["update", "masked-LM loss", "masked-LM accuracy", "next-sentence accuracy"], lines)


def tabulate_scores_of_squad(figures: Records) -> Table:
    """Return the scores on SQuAD."""
    lines = []
    if found := figures.get("squad"):
        scores = found["metrics"]
        lines = [
            [f"{found['version']}", f"{found['questions']:,}", f"{scores['exact_match']:.1f}", f"{scores['f1']:.1f}"]
        ]
    return make_table("SQuAD, one epoch", ["version", "training questions, at most", "EM", "F1"], lines)


def tabulate_steps(records: Records) -> Table:
    """Return the time of every step that has ended, and the reasons of those that failed."""
    lines = [
        [name, describe_duration(one["seconds"]), f"failed: {one[FAILURE]}" if FAILURE in one else describe_tests(one)]
        for name, one in records.items()
    ]
    return make_table("Steps", ["step", "time", "result"], lines)


def describe_tests(one: Mapping[str, Any]) -> str:
    """Return the number of passed tests, if the step has any."""
    found = one["found"]
    return f"{found['passed']} of {found['tests']} tests passed" if "tests" in found else "finished"
