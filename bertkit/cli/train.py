"""The commands that train (pretrain, glue, squad, swag, ner, study) and those for finished runs (push, reproduce)."""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bertkit.cli.console import NOTHING_DONE, Screen
from bertkit.cli.options import (
    STUDIED,
    Cased,
    Data,
    DryRun,
    LabelNames,
    Model,
    Output,
    PathArgument,
    PathOption,
    RunOptions,
    Settings,
    SourceOption,
    TextNames,
    Workers,
    app,
    split_names,
    training_command,
)
from bertkit.errors import UsageError, explain_disk_error
from bertkit.system.hub import check_checkpoint, check_path
from bertkit.tasks.option import (
    CLASSIFY_OPTIONS,
    GLUE_OPTIONS,
    NER_OPTIONS,
    PRETRAINING_OPTIONS,
    SQUAD_OPTIONS,
    SWAG_OPTIONS,
)

BEGUN = time.monotonic()  # `--budget` also counts the time in which libraries are imported


@training_command(PRETRAINING_OPTIONS, duration="steps")
def pretrain(
    options: RunOptions,
    corpus: Annotated[
        list[str] | None, SourceOption(help=PRETRAINING_OPTIONS["corpus"].help, metavar="PATH|docs|NAME")
    ] = None,
    vocab: Annotated[str | None, SourceOption(help=PRETRAINING_OPTIONS["vocab"].help, metavar="DIR|FILE|NAME")] = None,
    cased: Cased = False,
) -> None:
    """Pretrain BERT on raw text: masked LM and next sentence.

    Without options it trains a small BERT for a few minutes on the documentation installed on this machine. With
    --model it continues from a checkpoint (domain adaptation).

    $ bertkit pretrain --corpus corpus.txt --output runs/mine

    $ bertkit pretrain --model runs/mine --corpus more.txt --output runs/more
    """
    from bertkit.tasks.pretraining import choose_starter

    given = {"corpus": corpus or None, "vocab": vocab, "cased": cased or None}
    execute("pretrain", options, given, starter=choose_starter)


@training_command(CLASSIFY_OPTIONS, *STUDIED)
def classify(
    options: RunOptions,
    data: Annotated[str | None, SourceOption(help=CLASSIFY_OPTIONS["dir"].help, metavar="FILE|DIR|NAME")] = None,
    text: TextNames = None,
    label: LabelNames = None,
    weight: Annotated[str | None, typer.Option(help=CLASSIFY_OPTIONS["weight"].help, metavar="COLUMN")] = None,
) -> None:
    """Fine-tune a classifier on your own texts: CSV, TSV, Excel, JSON lines, JSON, Parquet or a Hub data set.

    One label, several labels or a number per text or pair of texts. Without files named dev and test, both are split
    off by a hash of the text. --folds, --grid and --restarts make a study, which continues where it was stopped.

    $ bertkit classify --data reviews.csv --output runs/reviews

    $ bertkit classify --data reviews.csv --text title,body --label stars

    $ bertkit classify --data reviews.csv --folds 5 --output runs/folds
    """
    columns = {"text": split_names(text), "label": split_names(label), "weight": weight}
    train(["classify"], options, {"dir": data, **columns})


@training_command(GLUE_OPTIONS, "grid", "restarts", "workers", "search", "no_baseline")
def glue(
    options: RunOptions,
    task: Annotated[str, typer.Option(help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax or all.")],
    data: Data = None,
) -> None:
    """Fine-tune on a GLUE task, or on all of them.

    --task all, --grid and --restarts make a study: a table of runs, which continues where it was stopped. ax is
    predicted by a model fine-tuned on mnli (--model RUN).

    $ bertkit glue --task mnli --data GLUE --output runs/mnli

    $ bertkit glue --task rte --data GLUE --grid --restarts 5 --output runs/grid
    """
    from bertkit.tasks.glue import BENCHMARKS, get_glue_task

    together = task.lower() == "all"
    names = [row.name for row in BENCHMARKS if row.metrics] if together else [get_glue_task(task).name]
    output = options.output or Path("runs") / ("glue" if together else names[0])
    if together and options.push_to is not None:
        raise UsageError("--push-to-hub takes one model; name one task; see bertkit glue --help")
    train(names, replace(options, output=output), {"dir": data}, together)


@training_command(SQUAD_OPTIONS, "folds", "grid", "restarts", "workers", "search")
def squad(
    options: RunOptions,
    version: Annotated[int, typer.Option(help="1 (for 1.1) or 2 (for 2.0).", metavar="1|2", min=1, max=2)],
    data: Annotated[str | None, SourceOption(help=SQUAD_OPTIONS["dir"].help, metavar="DIR|FILE|NAME")] = None,
    extra_train: Annotated[str | None, SourceOption(help=SQUAD_OPTIONS["extra_train"].help, metavar="FILE")] = None,
) -> None:
    """Fine-tune on SQuAD 1.1 or 2.0 or your own questions: find the answer in a text, or that there is none.

    For 2.0 the threshold tau is tuned on the dev set for best F1, and kept with the model. Your own questions are CSV,
    TSV, Excel, JSON lines, JSON, Parquet or a Hub data set with question, context and answers, or in SQuAD's form.
    --folds, --grid and --restarts make a study, which continues where it was stopped.

    $ bertkit squad --version 2 --data SQUAD --output runs/squad2

    $ bertkit squad --version 1 --data questions.jsonl --output runs/own
    """
    from bertkit.tasks.squad import SQUAD

    train([SQUAD[f"squad{version}"].name], options, {"dir": data, "extra_train": extra_train})


@training_command(SWAG_OPTIONS, "grid", "restarts", "workers", "search")
def swag(options: RunOptions, data: Data = None) -> None:
    """Fine-tune on SWAG: choose which of four endings follows.

    --grid and --restarts make a study, which continues where it was stopped.

    $ bertkit swag --data SWAG --output runs/swag

    $ bertkit swag --data SWAG --restarts 5 --output runs/swag-seeds
    """
    train(["swag"], options, {"dir": data})


@training_command(NER_OPTIONS, *STUDIED)
def ner(
    options: RunOptions,
    data: Annotated[str | None, SourceOption(help=NER_OPTIONS["dir"].help, metavar="FILE|DIR|NAME")] = None,
    label: Annotated[str | None, typer.Option(help=NER_OPTIONS["label"].help, metavar="COLUMN")] = None,
    layers: Annotated[
        str | None, typer.Option("--features", help=NER_OPTIONS["features"].help, metavar="LAYERS")
    ] = None,
) -> None:
    """Find names in text, or parts of speech: fine-tune on CoNLL-2003 or your own data, or learn from BERT's features.

    Data: CoNLL and CoNLL-U files, or CSV, Excel, JSON lines, JSON, Parquet or a Hub data set with tokens and ner_tags,
    or text and spans. Tags without B- or I- are the classes of words.

    LAYERS: embeddings, second-to-last, last, sum-last-four, concat-last-four or sum-all, as in Table 7.

    $ bertkit ner --data CONLL --output runs/ner

    $ bertkit ner --data letters.jsonl --output runs/letters

    $ bertkit ner --data TREEBANK --label XPOS --output runs/tagger

    $ bertkit ner --data CONLL --features concat-last-four --output runs/lstm
    """
    train(["ner"], options, {"dir": data, "label": [label] if label else None, "features": layers})


@app.command()
def push(
    run: Annotated[Path, PathArgument(help="Directory of a finished run.", metavar="RUN")],
    repo: Annotated[
        str, typer.Argument(help="Repository: owner/name, or a name under your own account.", metavar="REPO")
    ],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload a finished run to the Hugging Face Hub: weights, tokenizer, scores and model card.

    Log in first with a token that has write access: hf auth login. If an upload is interrupted, the same command
    completes it.

    $ bertkit push runs/mine ada/my-bert --private
    """
    with Screen() as screen:
        upload(screen, run, repo, private)


@app.command()
def reproduce(
    run: Annotated[Path, PathArgument(help="Directory of a finished run.", metavar="RUN")],
    output: Annotated[
        Path | None, PathOption(help="Directory for the repetition (default: RUN-again).", metavar="DIR")
    ] = None,
) -> None:
    """Repeat a finished run from its directory, and compare scores and weights.

    Exit code 0: equal bit for bit. 1: different; the differences and those of the two machines are listed. The
    repetition is written to RUN-again unless --output is given. Run it in the directory where the run was started,
    because paths of data in its recipe may be relative.

    $ bertkit reproduce runs/rte
    """
    from bertkit.training.run_dir import check_finished

    check_finished(run)
    from bertkit.training import reproduce as reproduction

    with Screen() as screen:
        again = output or Path(f"{run}-again")
        with screen.watch_training():
            found = reproduction.reproduce(run, again, report=screen.say, progress=screen.advance)
        screen.show_reproduction(found, run, again)
        sys.exit(0 if found.is_exact else 1)


@app.command()
def study(
    file: Annotated[Path, PathArgument(help="Study file in TOML; see recipes/studies/.", metavar="FILE")],
    data: Annotated[
        str | None,
        SourceOption(help="Folder that contains glue/, squad/, swag/, ner/; or a file of your own.", metavar="ROOT"),
    ] = None,
    model: Model = None,
    output: Output = None,
    settings: Settings = None,
    workers: Workers = "1",
    dry_run: DryRun = False,
) -> None:
    """Run a table of runs: recipe variants x tasks x a grid, with seeds, next to the paper's values.

    If it is killed, the same command continues it.

    $ bertkit study recipes/studies/glue-grid.toml --data ROOT --workers 2
    """
    from bertkit.training.recipe import read_recipe

    check_path(data)
    check_checkpoint(model)
    options = RunOptions(
        recipe=file,
        model=model,
        output=output or Path("runs") / file.stem,
        settings=settings,
        workers=workers,
        dry_run=dry_run,
    )
    compare(read_recipe(file), options, {"data_root": data})


@app.command(hidden=True)
def run(
    recipe: Annotated[Path, PathOption(help="Saved recipe of a run.", metavar="FILE")],
    output: Annotated[Path, PathOption(help="Directory of the run.", metavar="DIR")],
    keep_step: Annotated[list[int] | None, typer.Option(help="Update whose checkpoint is kept.")] = None,
) -> None:
    """Do a run of a study; ends when standard input closes. Studies and searches start this command.

    $ bertkit run --recipe runs/grid/recipes/rte.toml --output runs/grid/rte
    """
    from bertkit.studies import run_processes
    from bertkit.training.processes import ProcessLost

    run_processes.follow_starter()
    try:
        with Screen() as screen, screen.watch_training():
            run_processes.do_run(recipe, output, keep_step or [], screen.say, screen.advance)
    except ProcessLost:  # without a message, so that the study starts the run again
        sys.exit(1)


def train(names: list[str], options: RunOptions, data: Mapping[str, Any], together: bool = False) -> None:
    """Run a task, or a study: folds, a grid, restarts, or several tasks.

    Args:
        data: As for `execute`.
    """
    from bertkit.studies.spec import define_runs
    from bertkit.tasks import TASKS
    from bertkit.tasks.glue import GRID
    from bertkit.training.recipe import check, check_inputs, merge, parse_setting, read_recipe
    from bertkit.training.study_results import STUDY_RESULT

    definition = define_runs(
        names,
        folds=options.folds,
        grid=GRID if options.grid else None,
        restarts=options.restarts,
        together=together,
        budget=options.budget,
        search=options.search,
    )
    if definition is None:
        if options.workers != "1":
            raise UsageError("--workers is for --folds, --grid, --restarts and --task all; leave it out")
        execute(names[0], options, data)
        return
    written = read_recipe(options.recipe) if options.recipe else {}
    if together:
        written.pop("task", None)
    output = options.output or Path("runs") / names[0]
    is_finished = (output / STUDY_RESULT).exists()
    settings = list(map(parse_setting, options.settings or []))
    for task in [] if is_finished else [TASKS[name] for name in names]:
        part = merge(task.recipe, written, {"data": data}, *settings)
        checked = check({"data": part["data"]}, task, "--set")
        check_inputs(task, checked["data"])
    definition["recipe"] = merge(written, definition["recipe"])
    compare(definition, replace(options, output=output), {"data": data})


def execute(name: str, options: RunOptions, data: Mapping[str, Any], starter: Any = None) -> None:
    """Run a task with the options of the command line, and print its results.

    Args:
        data: Values for `[data]` in the recipe; None means "not given".
        starter: Returns the laptop-sized recipe that is used if none is named; None: the task's own recipe is used.
    """
    from bertkit.studies.spec import check_searchable
    from bertkit.tasks import TASKS
    from bertkit.training.clock import Clock
    from bertkit.training.recipe import Recipe, check_early, merge, parse_setting, read_recipe
    from bertkit.training.run_dir import METRICS_FILE, check_free, find_finished

    settings = merge(*map(parse_setting, options.settings or []))
    given, task = merge({"checkpoint": options.model or None, "data": data}, settings), TASKS[name]
    if options.recipe:
        written = read_recipe(options.recipe)
    else:
        written = starter(given) if starter else {}
    if options.push_to is not None:
        from bertkit.training.push import check_push

        check_push(options.push_to)
    output, where = options.output or Path("runs") / name, str(options.recipe or "recipe")
    clock = Clock.make(options.budget, settings, BEGUN) if options.budget else None
    if not (output / METRICS_FILE).exists():  # a finished run needs no data
        check_free(output)
        early = check_early(task, written, given, where=where)
        if options.search or (clock and "trial_rows" in task.options):
            check_searchable(task, early.data)
    recipe = Recipe.make(task, written, given, where=where)  # imports torch

    from bertkit.studies.search import search_or_train
    from bertkit.training import costs
    from bertkit.training.run import dry_run

    with Screen() as screen:
        screen.names |= {row.key: row.name for row in task.table}
        if options.show:
            from bertkit.training.prepare import prepare
            from bertkit.training.shown_rows import show_rows

            screen.say(*show_rows(prepare(recipe, screen.say), options.show), NOTHING_DONE)
            return
        if options.dry_run:
            plan = dry_run(recipe, output)
            if not (options.search or clock):  # a search and a clock change the recipe of the run
                find_finished(output, recipe)  # refuses a directory of another run
            screen.say(*costs.describe_cost(recipe, output, screen.say))
            screen.show_plan(plan, task.options)
            return
        with screen.watch_training():
            news = {"output": output, "report": screen.say, "progress": screen.advance}
            metrics = search_or_train(recipe, trials=options.search, clock=clock, **news)
        if not screen.quiet:
            screen.show_results(task, metrics, output)
            if options.push_to is not None:
                upload(screen, output, options.push_to)


def compare(definition: Mapping[str, Any], options: RunOptions, given: Mapping[str, Any]) -> None:
    """Run a study with the options of the command line, and print its results."""
    from bertkit.studies import runner as studies
    from bertkit.studies.cells import describe_plan, describe_time
    from bertkit.studies.folds import gather_folds
    from bertkit.studies.results import check_all_finished
    from bertkit.system.cluster import read_workers
    from bertkit.training import push
    from bertkit.training.recipe import parse_setting

    output, settings = options.output, map(parse_setting, options.settings or [])
    with Screen() as screen:
        where = str(options.recipe or "study")
        made = studies.make_study(definition, {"checkpoint": options.model}, given, *settings, where=where)
        if options.push_to is not None:
            push.check_push(options.push_to)
        if options.dry_run:
            read_workers(options.workers)
            studies.check_directory(made, output)
            screen.say(*describe_plan(made))
            screen.say(*describe_time(made, output, screen.say))
            screen.say(NOTHING_DONE)
            return
        with screen.watch_training(), explain_disk_error(output):
            results = studies.run_study(
                made, output=output, workers=options.workers, report=screen.say, progress=screen.show_study
            )
        if screen.quiet:
            return
        screen.show_study_results(results, output)
        if options.folds and (table := gather_folds(results, output)):
            screen.show_table(table)
        if options.push_to is not None and results.chosen:
            upload(screen, output / results.chosen[0].run, options.push_to)
        check_all_finished(results, output)


def upload(screen: Screen, run: Path, repo: str, private: bool = False) -> None:
    """Upload a finished run, with a progress bar if this is a terminal, and print its URL."""
    from huggingface_hub.utils import enable_progress_bars

    from bertkit.training import push

    if screen.console.is_terminal:
        enable_progress_bars()
    screen.say(f"Pushed: {push.push(run, repo, private=private, report=screen.say)}")
