"""Output and exit of the command line: progress, tables, one line for a mistake, signals."""

import atexit
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bertkit.errors import UsageError, as_usage_error, explain_os_error
from bertkit.reports.tables import Table, find_main, list_shown, make_table, tabulate_scores
from bertkit.system.signals import STOPS, Interrupted, note_signals
from bertkit.tasks.option import Options

if TYPE_CHECKING:
    from bertkit.training.study_results import StudyResults

# Control characters, line and paragraph separators, and marks that change the text direction.
TERMINAL_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FOR, AGAINST = (90, 160, 255), (255, 150, 60)  # colours of the largest attributions, in red, green and blue
LEAST_COLOURED = 0.1  # share of the largest attribution
MISTAKES_PRINTED = 5  # after a run
MOST_LINES = 25  # of a run where there is no terminal
SPEED_PERIOD = 3600.0  # seconds of progress that the remaining time is estimated from; a run of a study is slow
NOTHING_DONE = "dry run: nothing was trained or written"


class Screen(AbstractContextManager):
    """The output of a command: lines, a progress bar if this is a terminal, tables at the end."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        self.quiet = not is_first_process()
        self.names: dict[str, str] = {"loss": "loss"}  # log entry -> its displayed name
        self.bar: Any = None
        self.shown = 0
        self.began = 0.0  # the start of a build
        self.done = 0
        self.latest: dict[str, float] = {}
        self.trains = False  # training continues when standard output is closed
        self.lines = 0  # said so far

    def __exit__(self, *exception: Any) -> None:
        self.finish_progress()

    def say(self, *lines: str) -> None:
        """Print some lines, above the progress bar if there is one."""
        if self.quiet:
            return
        self.lines += len(lines)
        for line in lines:
            if self.bar is None:
                print_line(line, goes_on=self.trains)
            else:
                from rich.text import Text

                self.show(Text(escape_controls(line)))

    def show(self, renderable: Any, wraps: bool = False) -> None:
        """Print a rich renderable, whose long lines are wrapped where they would be cut, as in a list of Markdown."""
        write(self.draw(renderable, wraps), goes_on=self.trains)

    def draw(self, renderable: Any, wraps: bool = False) -> str:
        """Return the text of a rich renderable."""
        with self.console.capture() as drawn:
            self.console.print(renderable, soft_wrap=not wraps)
        return drawn.get()

    def show_table(self, table: Table, **options: Any) -> None:
        """Print a table."""
        self.show(draw_table(table, **options))

    def show_explanation(self, targets: Sequence[Mapping[str, Any]]) -> None:
        """Print one line per target: the coloured words or, without colours, the words with the largest attributions.

        Words that speak for the target are blue, words that speak against it orange.
        """
        from bertkit.analysis.explanation import describe_words, list_parts

        for target in targets:
            if not sys.stdout.isatty() or self.console.color_system is None or self.console.no_color:
                self.say(f"  {target['target']}: {describe_words(target['words'])}")
                continue
            from rich.text import Text

            line = Text(f"  {escape_controls(' '.join(target['target'].split()))}: ")
            for text, share in list_parts(target["words"]):
                fade = [round(255 + abs(share) * (full - 255)) for full in (FOR if share > 0 else AGAINST)]
                style = f"black on rgb({','.join(map(str, fade))})" if abs(share) >= LEAST_COLOURED else ""
                line.append(escape_controls(text), style)
            self.show(line)

    def advance(self, done: int, total: int, log: Mapping[str, float]) -> None:
        """Show the progress of the training and the latest losses."""
        if done < self.done:  # another training has begun
            self.finish_progress()
            self.shown, self.latest = 0, {}
        self.done = done
        self.latest |= {self.names[key]: value for key, value in log.items() if key in self.names}
        state = ", ".join(f"{name} {value:.3f}" for name, value in self.latest.items())
        self._move_bar(done, total, f"update {done:,} of {total:,}  {state}".rstrip())

    def show_build(self, done: int, total: int, tokens: int) -> None:
        """Show the progress of a corpus build in bytes of text; if the total is unknown (0), only the tokens."""
        self.began = self.began or time.monotonic()
        rate = f"{tokens:,} tokens, {tokens / max(time.monotonic() - self.began, 1):,.0f} per second"
        self._move_bar(done, total, f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate}" if total else rate)

    def _move_bar(self, done: int, total: int, state: str) -> None:
        """Move the progress bar, or without a terminal print the state after each third, or every half minute."""
        if not self.console.is_terminal:
            part = done * 3 // total if total else int(time.monotonic()) // 30
            if part > self.shown:
                self.shown = part
                self.say(f"  {state}")
            return
        if self.bar is None:
            from rich import progress

            text = progress.TextColumn("{task.fields[state]}", markup=False)
            columns = progress.BarColumn(), progress.TimeRemainingColumn(), text
            self.bar = progress.Progress(*columns, console=self.console, speed_estimate_period=SPEED_PERIOD)
            self.bar.start()
            self.bar.add_task("", total=total or None, state=state)
        # Above 0, because rich measures the speed from the first such amount: also over the start of a first run.
        self.bar.update(self.bar.task_ids[0], completed=max(done, 1e-9), state=state)

    def show_statistics(self, statistics: Mapping[str, Any], directory: Path) -> None:
        """Print the statistics of a corpus, with warnings about unusual ones."""
        from bertkit.data.pretraining.statistics import list_rows, list_warnings

        self.show_table(make_table(f"{directory}", ["", ""], list_rows(statistics)), show_header=False)
        self.say(*list_warnings(statistics))

    @contextmanager
    def watch_training(self) -> Iterator[None]:
        """End the progress bar and leave the other processes when the training in this context ends.

        If a signal stopped the training, exit with 128 + the signal's number.
        """
        from bertkit.training.processes import leave_processes

        self.trains = True
        try:
            yield
        except Interrupted as stop:
            self.finish_progress()
            complain(str(stop))
            sys.exit(128 + stop.number)
        self.finish_progress()
        leave_processes()

    def finish_progress(self) -> None:
        """End the progress bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show_study(self, results: "StudyResults") -> None:
        """Move the bar of a study, only on a terminal: each finished run also prints a line.

        Runs at work count by their share of the updates.
        """
        if self.console.is_terminal and not self.quiet:
            runs = {run.directory: run for cell in results.cells for run in cell.runs}
            runs |= {run.directory: run for run in results.pretrainings}
            shares = sum(run.update / run.updates for run in runs.values() if run.updates)
            state = f"{results.over} of {results.runs} runs"
            self._move_bar(results.over + shares, results.runs, state)

    def show_study_results(self, results: "StudyResults", output: Path) -> None:
        """Print the tables of a study and the paths of its files."""
        from rich.markdown import Markdown

        from bertkit.studies.folds import FOLD_SCORES, OUT_OF_FOLD
        from bertkit.studies.spec import CURVE, PICTURE, TABLE
        from bertkit.training.study_results import STUDY_RESULT

        text = (output / TABLE).read_text(encoding="utf-8")
        self.show(Markdown("\n".join(map(escape_controls, text.split("\n"))), hyperlinks=False), wraps=True)
        for chosen in results.chosen:
            names = [name for name in (chosen.row, chosen.column) if name]
            self.say(f"Chosen for {', '.join(names)}: {output / chosen.run}")
        there = [name for name in (STUDY_RESULT, TABLE, PICTURE, CURVE, FOLD_SCORES) if (output / name).exists()]
        there += sorted(path.name for path in output.glob(f"{OUT_OF_FOLD}.*"))
        self.say(f"In {output}: {', '.join(there)}")

    def show_plan(self, plan: Mapping[str, Any], options: Options) -> None:
        """Print a dry run: the sizes, then the complete recipe, with comments on the task's options."""
        import tomli_w

        plan = dict(plan)
        recipe, table = plan.pop("recipe"), ""
        for name, value in plan.items():
            self.say(f"{name.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
        self.say(f"{NOTHING_DONE}; the recipe:")
        for line in tomli_w.dumps(recipe.to_dict()).split("\n"):
            table = line if line.startswith("[") else table
            name = line.partition(" = ")[0]
            option = options.get(name) if table == "[data]" else None
            self.say(f"{line}  # {option.explain(recipe.data[name])}" if option else line)

    def show_results(self, task: Any, metrics: Mapping[str, Any], output: Path) -> None:
        """Print the scores of a run, its worst mistakes, the verdict, its directory, and commands to try next.

        Without a terminal there are as many mistakes as MOST_LINES allows, and many scores are one line.
        """
        from bertkit.reports.plots import plot_log
        from bertkit.reports.verdict import describe_verdict
        from bertkit.tasks.task import list_advice, list_commands
        from bertkit.training.predictions import read_first_table
        from bertkit.training.recipe import load_recipe
        from bertkit.training.run_dir import CURVES_FILE, METRICS_FILE, RECIPE_FILE, read_log

        rows, predicted = list_shown(task.table, task.metric, metrics), read_first_table(task, output)
        curves, last = output / CURVES_FILE, list_advice(task, metrics)
        main = find_main(rows, task.metric) if rows else None
        plot_log(read_log(output), [main] if main else [], metrics, curves)
        if main:
            count = 0 if predicted is None else len(predicted)
            last.append(f"verdict: {describe_verdict(main, metrics, count)}")
        last.append(f"Results: {output}: {METRICS_FILE}" + (f", {CURVES_FILE}" if curves.exists() else ""))
        last += [f"Next: {command}" for command in list_commands(task, output, load_recipe(output / RECIPE_FILE))]
        room = math.inf if self.console.is_terminal else MOST_LINES - self.lines - len(last)
        if rows:
            shown = self.draw(draw_table(replace(tabulate_scores(rows, metrics, "after"), caption=f"{output}")))
            if shown.count("\n") > room:
                shown = f"scores: {', '.join(row.describe(metrics[row.key]) for row in rows)}\n"
            write(shown, goes_on=self.trains)
            room -= shown.count("\n")
        if room > 1:  # mistakes have a heading
            self.show_predictions(task, predicted, min(room - 1, MISTAKES_PRINTED))
        self.say(*last)

    def show_predictions(self, task: Any, predicted: Any, count: int) -> None:
        """Print the worst mistakes of the first evaluated split, from its prediction table, if there is one."""
        from bertkit.tasks.task import shorten_text
        from bertkit.training.predictions import show_mistakes

        split = next(iter(task.splits), "")
        if predicted is not None and (mistakes := show_mistakes(predicted, count)):
            self.say(f"The worst mistakes on {split} (the right answer in parentheses):")
            for row, *words in mistakes:
                *texts, predicted, right = map(shorten_text, words)
                self.say(f"  row {row}: {'  |  '.join(texts)}  →  {predicted}  ({right})")

    def show_reproduction(self, found: Any, run: Path, again: Path) -> None:
        """Print the differences between a run and its repetition, and possible reasons."""
        self.say(*(f"{name}: {before} -> {now}" for name, (before, now) in found.scores.items()))
        if found.weights:
            name, apart = max(found.weights.items(), key=lambda item: item[1])
            self.say(f"{len(found.weights)} weights differ, {name} the most: by {apart:.3g}")
        self.say(*(f"different machine, software or data: {difference}" for difference in found.environment))
        if found.is_exact:
            self.say(f"{again} equals {run} bit for bit: scores and weights")
        elif not found.environment:
            self.say(
                "machine, software and data are the same; on a GPU, train.full_determinism makes sums deterministic"
            )


def print_line(line: str, *, err: bool = False, goes_on: bool = False) -> None:
    """Print one line; see `write`."""
    write(f"{escape_controls(line)}\n", err=err, goes_on=goes_on)


def write(text: str, *, err: bool = False, goes_on: bool = False) -> None:
    """Write to standard output or error and flush it; all output but rich's progress passes here.

    If the stream has no reader, the command ends quietly, as is usual on Unix. With `goes_on`, and on standard error,
    the command continues without output.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        typer.echo(text, nl=False, err=err)
        if stream is not None:  # None if it is closed
            stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # discards the buffer and later output
        if err or goes_on:
            return
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + 13)  # SIGPIPE, which Windows lacks
        raise UsageError(
            f"cannot write to standard output ({error.strerror}); free some space or redirect the output, and try again"
        ) from None


def write_figures(figures: Mapping[str, Any], path: Path, *sources: str) -> None:
    """Write what a command has found in some sources to the file of `--json`."""
    from bertkit.data.formats.rows import check_output
    from bertkit.system.files import write_json

    for source in sources:
        check_output(source, path, "--json")
    with as_usage_error(f"the file {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(figures, path)


def escape_controls(line: str) -> str:
    r"""Return a line with \uXXXX for characters that move the cursor, colour or reorder text; JSON stays the same."""
    return TERMINAL_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def draw_table(table: Table, **options: Any) -> Any:
    """Return a table for rich, whose text is not parsed as markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    def show(*lines: str) -> Text:
        return Text("\n".join(escape_controls(part) for line in lines for part in line.split("\n")))

    drawn = RichTable(title=show(table.caption), title_justify="left", **options)
    for heading in table.heads:
        drawn.add_column(show(heading), overflow="fold")  # a long path keeps its end
    for row in table.rows:
        drawn.add_row(*(show(*(f"{text} {words}" if words else text for text, words in cell.lines)) for cell in row))
    return drawn


def is_first_process() -> bool:
    """Return whether this process prints: the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def complain(message: str, everywhere: bool = False) -> None:
    """Print one line on standard error, in the first of several processes or in all of them."""
    if everywhere or is_first_process():
        print_line(f"bertkit: {message}", err=True)


@contextmanager
def obey_signals() -> Iterator[None]:
    """Exit at a signal with one line and code 128 + its number, unless inner code handles the signal."""
    code = 0

    def stop(number: int) -> None:
        nonlocal code
        code = 128 + number
        complain("stopped; finished work is kept, and the same command continues")
        sys.exit(code)

    try:
        with note_signals(stop):
            yield
    finally:
        if code:  # a library may have caught the first exit during an import
            sys.exit(code)


@contextmanager
def explain_mistakes() -> Iterator[None]:
    """Convert a user's mistake to one line and exit code 2."""
    try:
        with obey_signals():
            yield
    except UsageError as error:
        complain(str(error), getattr(error, "speaks", False))
        sys.exit(2)
    except Exception as error:
        if line := explain_os_error(error):
            complain(line)
            sys.exit(2)
        # Errors of typer itself; the module of their class depends on its version.
        if not hasattr(error, "format_message"):
            raise
        if message := " ".join(error.format_message().split()):
            command = getattr(getattr(error, "ctx", None), "command_path", None) or "bertkit"
            complain(
                f"{message} See {command} --help"
                if message[-1] == "?"
                else f"{message.rstrip('.')}; see {command} --help"
            )
        sys.exit(error.exit_code)


def leave_at_once(code: int) -> None:
    """Exit without Python's teardown, which waits for running threads, such as those of a download.

    Exit functions registered by libraries are called, so trackers close their runs. A signal interrupts them.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
