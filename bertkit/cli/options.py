"""The options that several commands share, and the typer apps that commands are added to."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bertkit.cli.console import print_line
from bertkit.tasks.option import CLASSIFY_OPTIONS, DIR, PRETRAINING_OPTIONS, REDACTIONS, TOP_LEVEL, TYPES, Options

HELP_WIDTH = 78  # columns between the margins of a terminal of 80

app = typer.Typer(
    name="bertkit",
    help="Pretrain BERT on your own text, fine-tune it on everything the paper did, and know how far to trust it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def read_path(text: str) -> Path:
    """Return a path with `~` and `~user` expanded, because a shell does not expand them after `--output=`."""
    return Path(os.path.expanduser(text))


# Options and arguments for paths (Path…), and for values that are a path or a name (Source…).
PathOption, PathArgument = (partial(kind, parser=read_path) for kind in (typer.Option, typer.Argument))
SourceOption, SourceArgument = (partial(kind, parser=os.path.expanduser) for kind in (typer.Option, typer.Argument))

Sources = Annotated[
    list[str], SourceArgument(help="Text files, directories, a Hub data set, or docs.", metavar="SOURCE")
]
RecipeFile = Annotated[Path | None, PathOption("--recipe", help="Recipe file in TOML; see recipes/.", metavar="FILE")]
Output = Annotated[
    Path | None, PathOption("--output", help="Directory to write (default: one in runs/).", metavar="DIR")
]
Model = Annotated[str | None, SourceOption("--model", help="Checkpoint or run to start from.", metavar="NAME|RUN")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set any key of the recipe, such as train.learning_rate=1e-4.", metavar="KEY=VALUE"),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", help="Time for everything, such as 20m; fine-tuning first searches values.", metavar="TIME"
    ),
]
SearchTrials = Annotated[
    int,
    typer.Option("--search", help="Compare N settings on held-back training rows, then train with the best.", min=0),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the recipe or a study's runs, with sizes and costs, then exit.")
]
ShownRows = Annotated[
    int,
    typer.Option(
        "--show", help="Print the first N training rows as the model gets them, then exit.", min=0, metavar="N"
    ),
]
Data = Annotated[str | None, SourceOption("--data", help=DIR.help, metavar="DIR")]
REPEATED = "Several: with commas, or the option again."
TextNames = Annotated[
    list[str] | None,
    typer.Option("--text", help=f"{CLASSIFY_OPTIONS['text'].help} {REPEATED}", metavar="COLUMN[,COLUMN]"),
]
LabelNames = Annotated[
    list[str] | None,
    typer.Option("--label", help=f"{CLASSIFY_OPTIONS['label'].help} {REPEATED}", metavar="COLUMN[,COLUMN…]"),
]
Push = Annotated[
    str | None, typer.Option("--push-to-hub", help="Upload the finished run to this Hub repository.", metavar="REPO")
]
Workers = Annotated[
    str, typer.Option("--workers", help="Number of worker processes; ray: run on a Ray cluster.", metavar="N|ray")
]
Folds = Annotated[
    int,
    typer.Option("--folds", help="Train one model per fold, and predict every row by a model that has not seen it."),
]
Grid = Annotated[bool, typer.Option("--grid", help="Try 4 rates x 2 batch sizes x 3 epochs; keep the best on dev.")]
Restarts = Annotated[int, typer.Option("--restarts", help="Number of runs per setting, each with another seed.", min=1)]
NoBaseline = Annotated[bool, typer.Option("--no-baseline", help="Leave out the baselines of scikit-learn.")]
JsonFile = Annotated[
    Path | None, PathOption("--json", help="Also write the figures to this JSON file.", metavar="FILE")
]
Cased = Annotated[bool, typer.Option("--cased", help=PRETRAINING_OPTIONS["cased"].help)]


def split_names(given: list[str] | None) -> list[str] | None:
    """Return the names in an option that takes several, with commas or repeated; None if there are none."""
    return [name for names in given or () if names for name in names.split(",")] or None


def escape(text: str) -> str:
    """Return a text that rich prints as it is; importing rich's own function would delay every command."""
    return text.replace("[", r"\[")


def list_keys(options: Options) -> str:
    """Return the end of a help text, which lists the keys of `--set KEY=VALUE` and `--set data.KEY=VALUE`."""
    top = [f"{name}: {text}" for name, text in TOP_LEVEL.items()]
    data = [f"{name} = {json.dumps(each.default)}: {each.explain(each.default)}" for name, each in options.items()]
    lines = ["Keys of --set KEY=VALUE:", *top, "", "Keys of --set data.KEY=VALUE:", *data]
    return escape("\n".join(fill(line, HELP_WIDTH, subsequent_indent="    ") for line in lines))


class RedactingCommand(TyperCommand):
    """A command whose option --redact may stand without a value, which is then the first of REDACTIONS."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        is_alone = [word == "--redact" and after not in REDACTIONS for word, after in pairwise([*args, ""])]
        given = [f"{word}={TYPES}" if alone else word for word, alone in zip(args, is_alone, strict=True)]
        return super().parse_args(ctx, given)


STUDIED = ("folds", "grid", "restarts", "workers", "search", "no_baseline")


@dataclass(frozen=True)
class RunOptions:
    """The options of the commands that train, which all take those that are not in STUDIED."""

    folds: Folds = 0
    grid: Grid = False
    restarts: Restarts = 1
    workers: Workers = "1"
    search: SearchTrials = 0
    no_baseline: NoBaseline = False
    recipe: RecipeFile = None
    model: Model = None
    output: Output = None
    settings: Settings = None
    budget: Budget = None
    push_to: Push = None
    dry_run: DryRun = False
    show: ShownRows = 0


# Option of every command that trains -> key of the recipe, type, and help text (default: that of the task's option).
NAMED_KEYS = {
    "learning_rate": ("train.learning_rate", float, "Peak of the learning rate."),
    "epochs": ("train.num_train_epochs", float, "Number of epochs."),
    "steps": ("train.max_steps", int, "Number of updates."),
    "batch_size": ("batch_size", int, TOP_LEVEL["batch_size"]),
    "seed": ("train.seed", int, "Seed of all that is random; with --restarts the first of them."),
    "max_length": ("data.max_length", int, ""),
}


def training_command(
    options: Options, *studied: str, duration: str = "epochs"
) -> Callable[[Callable[..., None]], None]:
    """Return a decorator that adds a command to `app` and passes it `RunOptions` as first argument.

    The options in NAMED_KEYS are appended to those of `--set`, and win over them.

    Args:
        options: Options of `[data]`, which the help text lists.
        studied: The options in STUDIED that the command takes.
        duration: The option for the length of the training, epochs or steps.
    """
    named = {name: NAMED_KEYS[name] for name in ("learning_rate", duration, "batch_size", "seed", "max_length")}
    shared, typed = dict(signature(RunOptions).parameters), []
    for name in set(STUDIED).difference(studied):
        del shared[name]
    for name, (_, kind, text) in named.items():
        option = typer.Option(f"--{name.replace('_', '-')}", help=escape(text or options[name].help))
        kind = Annotated[kind | None, option]
        typed.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind))

    def add(command: Callable[..., None]) -> None:
        @wraps(command)
        def call(**values: Any) -> None:
            given = [f"{named[name][0]}={value}" for name in named if (value := values.pop(name)) is not None]
            run = RunOptions(**{name: values.pop(name) for name in shared})
            if run.no_baseline:
                given.append("baseline=false")
            command(replace(run, settings=[*(run.settings or ()), *given] or None), **values)

        _, *own = signature(command).parameters.values()
        every = [*own, *typed, *shared.values()]
        call.__signature__ = Signature(every)  # typer derives its options from it
        call.__annotations__ = {option.name: option.annotation for option in every}
        app.command(epilog=list_keys(options))(call)

    return add


@app.callback(invoke_without_command=True)
def begin(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Print the version and exit if `--version` is given, or keep progress bars of other libraries off the screen."""
    if version:
        import bertkit

        print_line(bertkit.__version__)
        raise typer.Exit
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # before the import of transformers, which asks whether they are disabled


scores = typer.Typer(no_args_is_help=True, help="Score files of predictions from any program.")
app.add_typer(scores, name="score")
corpora = typer.Typer(no_args_is_help=True, help="Build a corpus of any size on disk, and describe it.")
app.add_typer(corpora, name="corpus")
