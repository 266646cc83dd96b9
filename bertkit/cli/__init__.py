"""The command line: parse, call, print. No other package imports typer, prints or exits.

A user's mistake gives one line on standard error and exit code 2; a run stopped by a signal ends with 128 + its number.
"""

import os
import re
import sys
from importlib import import_module
from inspect import getdoc

import typer

from bertkit.cli.console import explain_mistakes, leave_at_once
from bertkit.cli.options import app

for _part in ("train", "inference", "data"):  # each module adds its commands to `app`
    import_module(f"bertkit.cli.{_part}")


PANELS = {  # the parts of --help -> their commands
    "Train": "pretrain classify glue squad swag ner study vocab corpus sample",
    "Use": "predict evaluate features serve",
    "Look": "doctor report compare score",
    "Share": "push export reproduce",
}


def unwrap_help(program: typer.Typer) -> None:
    """Join the lines of each paragraph of the help texts, because rich keeps the line breaks of a docstring."""
    for command in program.registered_commands:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(command.callback))
    for group in program.registered_groups:
        unwrap_help(group.typer_instance)


_panel_of = {name: panel for panel, names in PANELS.items() for name in names.split()}
for _entry in (*app.registered_commands, *app.registered_groups):
    _entry.rich_help_panel = _panel_of.get(_entry.name or _entry.callback.__name__, "")  # a hidden command has no panel
app.registered_commands.sort(key=lambda entry: ["", *PANELS].index(entry.rich_help_panel))
unwrap_help(app)


def main() -> None:
    """Run the console command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escapes characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        with explain_mistakes():
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers reads it at its import
            code = app(standalone_mode=False)
        sys.exit(code)
    except SystemExit as end:
        if (end.code or 0) > 128:  # ended by a signal
            leave_at_once(end.code)
        raise
