"""Write the Markdown rows of a GPU campaign, in the form of recipes/RESULTS.md, from the files of its steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertkit.bench.campaign import FAILURE, read_records
from bertkit.bench.campaign_steps import CURVE_SCORES
from bertkit.bench.measure import BERTKIT
from bertkit.bench.training import COMPILED, EXAMPLE, FLATTENED, SAME_BATCHES, SORTED
from bertkit.reports.markdown import format_table
from bertkit.reports.tables import MISSING, Table, make_table
from bertkit.system.files import atomic_write
from bertkit.system.progress import describe_duration

PAGE_SIZES = ("minilm", "base", "large")
SPEED_AIM, MEMORY_AIM, PRODUCTS_AIM = 1.5, 0.5, 0.6  # the last one in pretraining base
PREDICTION_AIMS = {"minilm": 2.5, "base": 2.0}
SIDE_NAMES = {
    SAME_BATCHES: "transformers, the same batches",
    SORTED: "the same, rows sorted by length",
    COMPILED: "the same, compiled",
    EXAMPLE: "as in its examples: padded to the full length",
    FLATTENED: "without padding, with flash attention",
    "eager": "with eager attention",
    "flash_attention_2": "with flash attention",
}

Records = Mapping[str, Mapping[str, Any]]


def write_page(output: Path) -> Path:
    """Write the page of the steps that have ended in a campaign's directory, and return its path."""
    records = read_records(output)
    figures = {name: one["found"] for name, one in records.items() if one["found"]}
    lines = ["## On an accelerator", "", "`make gpu`; aims in parentheses; failed steps are in the last table.", ""]
    lines += [*list_machines(figures, records), ""]
    parts = (tabulate_parity, tabulate_training, tabulate_predictions, tabulate_curve, tabulate_scores_of_squad)
    for table in (*(make(figures) for make in parts), tabulate_steps(records)):
        if table.rows:
            lines += [f"{table.caption}:", "", *format_table(table), ""]
    path = output / "RESULTS.md"
    atomic_write("\n".join(lines), path)
    return path


def list_machines(figures: Records, records: Records) -> list[str]:
    """Return the machines and versions of the steps, and a warning if this was a rehearsal."""
    found = {}
    for name, one in figures.items():
        machine = one["environment"]
        device = ", ".join(machine["gpus"]) or f"CPU ({machine['processor']}, {machine['threads']} threads)"
        packages = machine["packages"]
        versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
        found.setdefault(f"{device}; {versions}; commit {shorten_commit(machine['commit'])}", []).append(name)
    lines = [f"{machine}: {', '.join(names)}." for machine, names in found.items()]
    if any(one["tiny"] for one in records.values()):
        lines = ["Rehearsal with tiny sizes: no figure means anything.", "", *lines]
    return lines


def shorten_commit(commit: str | None) -> str:
    """Return the first digits of a commit, with the "+" of changed files."""
    return MISSING if commit is None else commit[:7] + "+" * commit.endswith("+")


def show_share(share: float, digits: int = 0) -> str:
    """Return a share in percent."""
    return f"{100 * share:.{digits}f} %"


def list_sizes(figures: Records, kind: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the sizes whose step of a kind has figures, with these."""
    for size in PAGE_SIZES:
        if f"{kind}-{size}" in figures:
            yield size, figures[f"{kind}-{size}"]


def tabulate_parity(figures: Records) -> Table:
    """Return the errors of our side by head and precision, with those of stock's gradients."""
    lines = []
    for head, found in figures.get("parity", {}).get("heads", {}).items():
        cells = []
        for one in found.values():
            gradients = "{bertkit:.1e} ({stock:.1e})".format(**one["gradients"])
            cells.append(f"{one['loss']['bertkit']:.1e}; {gradients}{'' if one['agrees'] else ', does not agree'}")
        lines.append([head, *cells])
    caption = "Relative errors of the loss; of the gradients (in parentheses of stock's), each to stock in fp64"
    return make_table(caption, ["head", "fp32", "bf16", "fp16"], lines)


def tabulate_training(figures: Records) -> Table:
    """Return the rates and the memory of all sides in fine-tuning and pretraining."""
    lines: list[list[str]] = []
    rates: dict[str, list[float]] = {}
    apart = []
    for kind in ("pretrain", "mlm", "finetune"):
        for size, found in list_sizes(figures, kind):
            lines += [[f"{kind} {size}", *list_side(kind, size, side, found)] for side in found["sides"]]
            apart.append(found["losses"]["mean_difference"])
            for precision, measured in found["products"].items():
                rates.setdefault(precision, []).extend(measured)
    products = ", ".join(f"{name} {min(found) / 1e12:.3g} to {max(found) / 1e12:.3g}" for name, found in rates.items())
    caption = (
        f"Training beside plain transformers, medians, memory beyond the weights; products: {products} TFLOP/s; mean "
        f"loss difference without dropout at most {max(apart, default=0):.1e}"
    )
    heads = ["", "side", "sequences per second", "of the products' rate", "memory, MiB", "bertkit is"]
    return make_table(caption, heads, lines)


def list_side(kind: str, size: str, side: str, found: Mapping[str, Any]) -> list[str]:
    """Return the cells of one side, with the aims for ours."""
    one = found["sides"][side]
    rate, share = one["samples_per_second"], show_share(one["share_of_products"])
    memory = MISSING if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**20:,.0f}"
    name = f"{SIDE_NAMES.get(side, side)}, {one['precision']}"
    if side != BERTKIT:
        times = f"{found['sides'][BERTKIT]['samples_per_second'] / rate:.2f} times as fast"
        if side == found["best"]:
            times += f", its best (aim {SPEED_AIM})"
        return [name, f"{rate:,.1f}", share, memory, times]
    if (kind, size) == ("pretrain", "base"):
        share += f" (aim {show_share(PRODUCTS_AIM)})"
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
        majority = show_share(known["nsp_majority"], 1)
        caption = (
            f"`bertkit pretrain --recipe {found['recipe']}` with {found['updates']:,} updates of {found['batch_size']} "
            f"pairs of {found['text']} in {describe_duration(found['seconds'])}; masked-LM loss of the token "
            f"frequencies {known['unigram_loss']:.3f}, larger next-sentence class {majority}"
        )
    lines = [
        [f"{one['update']:,}", f"{one['mlm_loss']:.3f}", *(show_share(one[name], 1) for name in CURVE_SCORES[1:])]
        for one in found["curve"]
    ]
    return make_table(caption, ["update", "masked-LM loss", "masked-LM accuracy", "next-sentence accuracy"], lines)


def tabulate_scores_of_squad(figures: Records) -> Table:
    """Return the scores on SQuAD."""
    lines = []
    if found := figures.get("squad"):
        lines = [[found["version"], f"{found['questions']:,}", *(f"{score:.1f}" for score in found["scores"].values())]]
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
