"""The commands under `bertkit bench`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bertkit.cli.console import Screen
from bertkit.cli.options import (
    Compile,
    Data,
    Device,
    JsonFile,
    PathOption,
    PlaceArgument,
    PlaceOption,
    Repeats,
    Size,
    Text,
    Updates,
    benches,
)
from bertkit.errors import UsageError, explain_disk_error
from bertkit.reports.tables import Table


@benches.command("squad")
def bench_squad(
    data: Data = None,
    reference: Annotated[
        Path | None,
        PathOption("--reference", help="Copy of transformers' utils_qa.py to compare with.", metavar="FILE"),
    ] = None,
    as_json: JsonFile = None,
) -> None:
    """Time the decoding and scoring of SQuAD answers beside the stock example.

    $ bertkit bench squad --data SQUAD --reference utils_qa.py --json squad.json
    """
    from bertkit.bench import squad

    run_bench(squad.bench_squad, as_json, reference, Path(data) if data else None)


@benches.command("corpus")
def bench_corpus(
    data: Text = None,
    reference: Annotated[
        Path | None,
        PathOption("--reference", help="Checkout of google-research/bert to compare with.", metavar="DIR"),
    ] = None,
    vocab: Annotated[
        str | None,
        PlaceOption("--vocab", help="Lower-case vocabulary (default: trained on the text).", metavar="DIR|FILE"),
    ] = None,
    characters: Annotated[
        int, typer.Option("--characters", help="Approximate number of characters of text.", min=1)
    ] = 4_000_000,
    copies: Annotated[
        int, typer.Option("--copies", help="Number of copies of the text, each with different pairs.", min=1)
    ] = 10,
    as_json: JsonFile = None,
) -> None:
    """Time the conversion of text to masked next-sentence pairs beside the reference code.

    $ bertkit bench corpus --data text/ --reference bert/ --json corpus.json
    """
    from bertkit.bench import corpus

    run_bench(corpus.bench_corpus, as_json, reference, data, vocab, characters=characters, copies=copies)


@benches.command("predict")
def bench_predict(
    run: Annotated[
        str | None, PlaceArgument(help="Classifier (default: a randomly initialised BERT-base).", metavar="RUN")
    ] = None,
    source: Annotated[
        str | None,
        PlaceOption("--input", help="Texts, as for predict --input (default: synthetic texts).", metavar="FILE"),
    ] = None,
    count: Annotated[int, typer.Option("--texts", help="Number of texts, from the first one on.", min=1)] = 512,
    repeats: Repeats = 3,
    export: Annotated[str | None, PlaceOption("--export", help="Export of RUN to time as well.", metavar="DIR")] = None,
    as_json: JsonFile = None,
) -> None:
    """Time predictions beside the pipeline of transformers at its best batch size.

    $ bertkit bench predict runs/sst2 --input reviews.txt --json predict.json
    """
    from bertkit.bench import predict

    run_bench(predict.bench_predict, as_json, run, source, count, repeats, export)


@benches.command("serve")
def bench_serve(
    run: Annotated[
        str | None,
        PlaceArgument(help="Text classifier or export (default: MiniLM's size, random weights).", metavar="RUN"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a text.", min=3)] = 64,
    limit: Annotated[float, typer.Option("--limit", help="Limit of the 99th percentile in ms.", min=1)] = 50.0,
    seconds: Annotated[float, typer.Option("--seconds", help="Duration of the load at each rate.", min=1)] = 10.0,
    as_json: JsonFile = None,
) -> None:
    """Find the highest rate of requests at a bounded latency, beside the pipeline of transformers behind FastAPI.

    $ bertkit bench serve runs/sst2 --tokens 64 --json serve.json
    """
    from bertkit.bench import serve

    run_bench(serve.bench_serve, as_json, run, tokens, limit, seconds)


@benches.command("finetune")
def bench_finetune(
    model: Annotated[
        str | None, PlaceOption("--model", help="Checkpoint (default: random weights).", metavar="NAME|RUN")
    ] = None,
    data: Annotated[
        Path | None,
        PathOption(
            "--data", help="Folder of the official GLUE files (default: pairs from documentation).", metavar="DIR"
        ),
    ] = None,
    task: Annotated[str, typer.Option("--task", help="GLUE task of --data.", metavar="NAME")] = "",
    size: Size = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Examples per update.", min=1)] = 32,
    updates: Updates = 50,
    repeats: Repeats = 3,
    compiled: Compile = True,
    device: Device = None,
    as_json: JsonFile = None,
) -> None:
    """Time fine-tuning beside plain transformers: on the same batches, at its best, and as its examples do.

    $ bertkit bench finetune --model MINILM --data GLUE --task rte --json rte.json
    """
    choose_device(device)
    from bertkit.bench import finetune

    options = {"task": task, "size": size, "batch_size": batch_size, "updates": updates, "repeats": repeats}
    run_bench(finetune.bench_finetune, as_json, model, data, compiled=compiled, **options)


@benches.command("pretrain")
def bench_pretrain(
    data: Text = None,
    size: Size = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs per update.", min=1)] = 64,
    length: Annotated[int, typer.Option("--length", help="Maximum number of tokens per pair.", min=16)] = 128,
    updates: Updates = 20,
    repeats: Repeats = 3,
    compiled: Compile = True,
    device: Device = None,
    as_json: JsonFile = None,
) -> None:
    """Time pretraining from random weights beside plain transformers: speed and memory.

    $ bertkit bench pretrain --size small --json pretrain.json
    """
    choose_device(device)
    from bertkit.bench import pretrain

    options = {"size": size, "batch_size": batch_size, "length": length, "updates": updates, "repeats": repeats}
    run_bench(pretrain.bench_pretrain, as_json, data, compiled=compiled, **options)


@benches.command("gpu")
def bench_gpu(
    output: Annotated[
        Path | None,
        PathOption("--output", help="Directory to write (default: runs/gpu or runs/gpu-tiny).", metavar="DIR"),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time for the whole command.", min=1)] = 20.0,
    data: Annotated[
        Path | None, PathOption("--data", help="Folder that may hold text/ and squad/.", metavar="DIR")
    ] = None,
    model: Annotated[
        str | None, PlaceOption("--model", help="MiniLM checkpoint (default: random weights).", metavar="NAME|RUN")
    ] = None,
    recipe: Annotated[
        Path | None, PathOption("--recipe", help="Pretraining recipe whose curve is measured.", metavar="FILE")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Rehearse with tiny sizes on the CPU.")] = False,
) -> None:
    """Run all that needs an accelerator: tests, parity, benchmarks, a pretraining and SQuAD.

    Finished steps are not repeated: the same command continues. The directory has a JSON file per step, and RESULTS.md.

    $ bertkit bench gpu --recipe recipes/pretrain/small.toml --minutes 20
    """
    choose_device("cpu" if tiny else None)
    from bertkit.bench.campaign import Campaign, run_campaign
    from bertkit.bench.campaign_page import write_page
    from bertkit.bench.campaign_steps import check_accelerator, list_steps

    folder = output or Path("runs", "gpu-tiny" if tiny else "gpu")
    campaign = Campaign(folder, data, model, recipe, tiny)
    check_accelerator(campaign)
    with Screen() as screen, explain_disk_error(folder):
        failed = run_campaign(campaign, list_steps(campaign), minutes, screen.say)
        screen.say(f"Figures: {write_page(folder)}")
    if failed:
        raise typer.Exit(1)


def run_bench(
    bench: Callable[..., tuple[Mapping[str, Any], list[Table]]], as_json: Path | None, *arguments: Any, **options: Any
) -> None:
    """Run a benchmark, show its tables, and write its figures to the file `as_json`, if given."""
    from bertkit.system.files import write_json

    if as_json is not None and (as_json.is_dir() or not os.access(as_json.parent, os.W_OK)):
        raise UsageError(f"{as_json} cannot be written; name a file in an existing folder with --json")
    with Screen() as screen, explain_disk_error(as_json or "."):
        found, tables = bench(*arguments, report=screen.say, **options)
        for table in tables:
            screen.show_table(table)
        if as_json is not None:
            write_json(found, as_json)
            screen.say(f"Figures: {as_json}")


def choose_device(device: str | None) -> None:
    """Hide all accelerators but the given one. It must be called before torch initialises CUDA.

    Raises:
        UsageError: The device is unknown or not available.
    """
    if device is None:
        return
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"unknown device {device!r}; expected cpu, cuda or cuda:N")
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if kind == "cpu" else number or "0"
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"{device} is not available; leave --device out, or give cpu")
