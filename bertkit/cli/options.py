"""The options that several commands share, and the typer apps that commands are added to."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from bertkit.cli.console import print_line
from bertkit.tasks.option import DIR, PRETRAINING_OPTIONS, Options

app = typer.Typer(
    name="bertkit",
    help="Pretrain BERT on your own text, fine-tune it on everything the paper did, and know how close you came.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def read_path(text: str) -> Path:
    """Return a path with `~` and `~user` expanded, because a shell does not expand them after `--output=`."""
    return Path(os.path.expanduser(text))


# Options and arguments for paths (Path…), and for values that are a path or a name (Place…).
PathOption, PathArgument = (partial(kind, parser=read_path) for kind in (typer.Option, typer.Argument))
PlaceOption, PlaceArgument = (partial(kind, parser=os.path.expanduser) for kind in (typer.Option, typer.Argument))

Sources = Annotated[list[str], PlaceArgument(help="Text files, directories of them, a Hub data set, or docs.")]
RecipeFile = Annotated[Path | None, PathOption("--recipe", help="A TOML file; see recipes/.", metavar="FILE")]
Output = Annotated[Path | None, PathOption("--output", help="The run directory.", metavar="DIR")]
Model = Annotated[str | None, PlaceOption("--model", help="Start from this checkpoint or run.", metavar="NAME|RUN")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of the recipe, such as train.learning_rate=1e-4.", metavar="KEY=VALUE"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]
Data = Annotated[str | None, PlaceOption("--data", help=DIR.help, metavar="DIR")]
Push = Annotated[
    str | None, typer.Option("--push-to-hub", help="Upload the finished run to this repository.", metavar="REPO")
]
Workers = Annotated[
    str, typer.Option("--workers", help="Processes that share the runs; ray: a Ray cluster.", metavar="N|ray")
]
JsonFile = Annotated[Path | None, PathOption("--json", help="Write the figures here.", metavar="FILE")]
Builders = Annotated[
    str | None,
    typer.Option("--workers", help="Processes that build it, one a CPU if not given; ray: a cluster.", metavar="N|ray"),
]
Cased = Annotated[bool, typer.Option("--cased", help=PRETRAINING_OPTIONS["cased"].help)]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; the first accelerator if not given.", metavar="D")
]
Size = Annotated[
    str | None,
    typer.Option("--size", help="Of random weights: tiny, mini, small, medium, base, large.", metavar="NAME"),
]
Text = Annotated[
    str | None, PlaceOption("--data", help="The text: as a corpus of pretrain; docs if not given.", metavar="FILE|DIR")
]
Updates = Annotated[int, typer.Option("--updates", help="Of each side in a round.", min=1)]
Repeats = Annotated[int, typer.Option("--repeats", help="Rounds; the median counts.", min=1)]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Try stock with torch.compile, too.")]


def list_options(options: Options) -> str:
    """Return the end of a help text, which lists the keys of `--set data.KEY=VALUE`."""
    lines = ["Keys of --set data.KEY=VALUE:"]
    for name, option in options.items():
        lines.append(f"{name} = {json.dumps(option.default)}  {option.explain(option.default)}")
    return "\n".join(lines).replace("[", r"\[")  # escapes rich markup


@dataclass(frozen=True)
class RunOptions:
    """The options of every command that trains one task."""

    recipe: RecipeFile = None
    model: Model = None
    output: Output = None
    settings: Settings = None
    push_to: Push = None
    dry_run: DryRun = False


def training_command(options: Options) -> Callable[[Callable[..., None]], None]:
    """Return a decorator that adds a command to `app` and passes it `RunOptions` as first argument.

    Args:
        options: Options of `[data]`, which the help text lists.
    """
    shared = signature(RunOptions).parameters

    def add(command: Callable[..., None]) -> None:
        @wraps(command)
        def call(**values: Any) -> None:
            command(RunOptions(**{name: values.pop(name) for name in shared}), **values)

        _, *own = signature(command).parameters.values()
        call.__signature__ = Signature([*own, *shared.values()])  # typer derives its options from it
        call.__annotations__ = {option.name: option.annotation for option in (*own, *shared.values())}
        app.command(epilog=list_options(options))(call)

    return add


@app.callback(invoke_without_command=True)
def show_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Print the version and exit if `--version` is given."""
    if version:
        import bertkit

        print_line(bertkit.__version__)
        raise typer.Exit


scores = typer.Typer(no_args_is_help=True, help="Score files of predictions, made by anything.")
app.add_typer(scores, name="score")
corpora = typer.Typer(no_args_is_help=True, help="Build a corpus of any size on disk, and look at it.")
app.add_typer(corpora, name="corpus")
benches = typer.Typer(no_args_is_help=True, help="Time this package beside other code that does the same.")
app.add_typer(benches, name="bench")
