"""Run a study as `bertkit.studies.spec` defines it: do its runs, choose among them, keep weights, write the results.

The paper's grid (section A.3), its random restarts (section 4.1) and every table of its ablations (sections 5 and C)
are studies. The pretrainings that rows start from come first, then all other runs, then ensembles of these. The run
directories decide which runs are done; `study.json` is made from them. `run_processes.py` starts the runs, `results.py`
summarises them, `tables.py` and `plots.py` show the results.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bertkit.data.pretraining.sources import is_built, read_documents
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer
from bertkit.errors import UsageError, as_usage_error, locate_refusal
from bertkit.inference.ensemble import combine
from bertkit.studies.cells import Cell, Pretraining, list_cells, list_pretrainings, name_step
from bertkit.studies.folds import check_folds
from bertkit.studies.plots import plot_curve, plot_heatmap
from bertkit.studies.results import (
    choose,
    describe_score,
    fail_if_not_finite,
    group_cells,
    list_scores,
    read_states,
    summarize,
)
from bertkit.studies.run_processes import RunJob, Runs, State, drop_checkpoints, drop_weights, share_gpus
from bertkit.studies.spec import CURVE, HARDWARE, PICTURE, PRETRAIN, STUDY_FILE, TABLE, Study, define, make_study
from bertkit.studies.tables import describe_size, write_table
from bertkit.system.cluster import Command, Remote, count_processes, join_cluster, read_workers, start_command
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, check_empty, hold_directory
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.arguments import make_arguments
from bertkit.training.prepare import name_examples
from bertkit.training.recipe import RecipePart, merge, read_recipe, save_recipe
from bertkit.training.run_dir import DATA, ENVIRONMENT, METRICS_FILE, identify, read_environment
from bertkit.training.study_results import StudyResults

SHOWN_EVERY = 0.1  # seconds


# --- The runs ---------------------------------------------------------------------------------------------------------


def run_study(
    study: Study,
    *,
    output: str | Path,
    workers: int | str = 1,
    report: Report = ignore,
    progress: Callable[[StudyResults], None] = ignore,
) -> StudyResults:
    """Do all runs that are not finished, and return the results as written to `output/study.json`.

    Recipes and data are checked before anything is written. A failed run is recorded and the others continue; the same
    command tries it again.

    Args:
        output: A new or empty directory, or one of the same study, which then continues.
        workers: The number of processes at once, or "ray" for the cluster of RAY_ADDRESS or else a local one.
        report: Receives single lines.
        progress: Receives the results so far.

    Raises:
        Interrupted: SIGTERM or SIGINT stopped the study; its runs have written checkpoints.
    """
    if count_processes() > 1:
        refusal = UsageError(
            "a study starts processes of its own; leave out torchrun or accelerate launch (--set num_gpus=N gives each "
            "run N GPUs)"
        )
        refusal.speaks = True  # torchrun may end the first process before it has printed the line
        raise refusal
    output, count = Path(output), read_workers(workers)
    pretrainings, cells = list_pretrainings(study), list_cells(study, output)
    check_directory(study, output)
    first, rest = make_jobs(pretrainings, cells, output)
    states, left = read_states(first | rest, cells, output)
    origins = {pretraining.directory: pretraining for pretraining in pretrainings}
    state = StudyState(study, origins, cells, first | rest, states, output, report, progress)
    over = sum(one.metrics is not None for one in states.values())
    report(f"{describe_size(state.summarize())}, {over} of them finished")
    check_folds(job for directory, job in rest.items() if directory not in left)
    first, rest = ({directory: job for directory, job in part.items() if directory in left} for part in (first, rest))
    later = [directory for directory, job in rest.items() if state.waits(directory, job, first)]
    check_inputs(first, rest, later, bool(count), report)
    if count:
        state.gpus = share_gpus(count, study.num_gpus)
    cluster = join_cluster(study.num_cpus, study.num_gpus or 0) if left and not count else nullcontext()
    with hold_directory(output), cluster as state.ray:
        state.start()
        number = state.work(first)
        if not number:
            state.keep_models(rest)
            number = state.work(state.select_ready(rest))
        if not number:
            state.combine()
        return state.finish(number)


@dataclass(eq=False)
class StudyState:
    """The state of a study while it runs: shows every message, and writes the results."""

    study: Study
    pretrainings: Mapping[str, Pretraining]  # pretrainings by directory
    cells: Sequence[Cell]
    # jobs, states: Mapping from run directory, relative to the study's, to the run's job and to its state; ensembles
    # have no job
    jobs: Mapping[str, RunJob]
    states: dict[str, State]
    output: Path
    report: Report
    progress: Callable[[StudyResults], None]
    gpus: Sequence[Sequence[str]] = ()  # the names of the GPUs of each process of this machine
    ray: Any = None  # Ray, connected to a cluster, or None to use this machine
    shown: float = 0.0  # the time of the last progress report
    # Mapping from a name of data to a finished run that used them, and their fingerprints
    data: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[list[Cell]]:
        """Return the cells of each row and column."""
        return group_cells(self.cells)

    def summarize(self) -> StudyResults:
        """Return the results so far."""
        return summarize(self.study, list(self.pretrainings.values()), self.cells, self.states)

    def find_cell(self, directory: str) -> Cell:
        """Return the first cell that a run belongs to."""
        return next(cell for cell in self.cells if not cell.is_pretraining and directory in cell.runs.values())

    def waits(self, directory: str, job: RunJob, first: Mapping[str, RunJob]) -> bool:
        """Return whether the model that a run starts from does not exist yet."""
        origin = self.find_cell(directory).origin
        return bool(origin) and (origin in first or not holds_weights(Path(job.recipe.checkpoint)))

    def start(self) -> None:
        """Create the directory, write study.toml, compare finished runs, and remove models that are not needed."""
        with as_usage_error(f"the directory {self.output}"):
            self.output.mkdir(parents=True, exist_ok=True)
        save_recipe(define(self.study), self.output / STUDY_FILE)
        finished = [directory for directory in self.jobs if self.states[directory].status == "finished"]
        for directory in sorted(finished, key=lambda one: (self.output / one / METRICS_FILE).stat().st_mtime_ns):
            self.states[directory] = self.compare_data(directory, self.states[directory])
        for group in self.groups:
            prune(self.study, group, self.states, self.output)
        self.save()

    def work(self, jobs: Mapping[str, RunJob]) -> int:
        """Do the jobs, and return the signal that stopped them, or 0 when all are over."""
        directories = {job.output: directory for directory, job in jobs.items()}

        def on_state(output: str, news: State | str) -> None:
            self.take(directories[output], news)

        slots = len(jobs) if self.ray else min(len(self.gpus), len(jobs))
        threads, num_gpus = max(torch.get_num_threads() // max(slots, 1), 1), self.study.num_gpus
        if self.ray and num_gpus is None:
            num_gpus = min(self.ray.cluster_resources().get("GPU", 0), 1)

        def begin(words: Sequence[str], log: Path, slot: int) -> Command | Remote:
            if self.ray:
                return Remote(self.ray, words, log, self.study.num_cpus, num_gpus)
            return start_command(words, log, threads, self.gpus[slot])

        return Runs(self.output, list(jobs.values()), on_state, begin, slots).execute()

    def compare_data(self, directory: str, state: State) -> State:
        """Return the state of a run; it becomes failed if an earlier run used other data.

        Only recorded fingerprints are compared. Samples of a pretraining depend on its seed.
        """
        job = self.jobs.get(directory)
        if state.status != "finished" or job is None or not TASKS[job.recipe.task].reusable:
            return state
        with suppress(OSError, ValueError):  # the file is lost or damaged
            data = read_environment(self.output / directory)["data"]
            other, known = self.data.setdefault(name_examples(job.recipe), (directory, data))
            if data != known:
                reason = f"its data differ from those of {other} ({ENVIRONMENT}); delete one of both, and run again"
                return replace(state, status="failed", reason=reason)
        return state

    def keep_models(self, jobs: Mapping[str, RunJob]) -> None:
        """Keep only those models of the pretrainings that later runs start from."""
        every = {cell.recipe.checkpoint for cell in self.cells if cell.origin}
        needed = {job.recipe.checkpoint for directory, job in jobs.items() if self.find_cell(directory).origin}
        for directory, origin in self.pretrainings.items():
            if self.states[directory].status == "finished":
                keep_models(origin, self.output, every if self.study.keep == "all" else needed)

    def combine(self) -> None:
        """Combine the runs of each ensemble that is not finished."""
        ensembles = {cell.directory: cell for cell in self.cells if cell.members}
        for directory, cell in ensembles.items():
            if self.states[directory].metrics is None:
                members, task = [self.output / member for member in cell.members], TASKS[cell.recipe.task]
                try:
                    if failed := [member for member in cell.members if self.states[member].status == "failed"]:
                        raise UsageError(f"its run {failed[0]} has failed")
                    metrics = combine(task, members, self.output / directory, None, ignore)
                    self.take(directory, State("finished", metrics=metrics))
                except UsageError as error:
                    self.take(directory, State("failed", reason=str(error)))

    def select_ready(self, jobs: Mapping[str, RunJob]) -> dict[str, RunJob]:
        """Mark runs as failed whose pretraining has left no model to start from, and return the others."""
        for directory, job in jobs.items():
            origin, start = self.find_cell(directory).origin, Path(job.recipe.checkpoint)
            if origin and self.states[origin].status == "failed":
                again = f"; delete {origin} to pretrain again" if self.states[origin].metrics is not None else ""
                self.take(directory, State("failed", reason=f"its pretraining, {origin}, has failed{again}"))
            elif origin and not holds_weights(start):
                reason = (
                    f"its pretraining left no weights in {start.relative_to(self.output)}; delete {origin}, and the "
                    "same command pretrains again"
                )
                self.take(directory, State("failed", reason=reason))
        return {directory: job for directory, job in jobs.items() if self.states[directory].status != "failed"}

    def take(self, directory: str, news: State | str) -> None:
        """Handle a run's message: its state, or a line."""
        if isinstance(news, str):
            self.report(f"{directory}: {news}")
            return
        news = replace(news, reason=news.reason.replace(str(self.output / directory), directory))
        state = self.states[directory] = self.compare_data(directory, fail_if_not_finite(news))
        if state.status in ("finished", "failed"):
            task = PRETRAIN
            if directory not in self.pretrainings:  # `keep_models` removes those of a pretraining
                task = self.find_cell(directory).column.task
                group = next(group for group in self.groups if any(directory in cell.runs.values() for cell in group))
                prune(self.study, group, self.states, self.output)
            self.save()
            outcome = f"failed: {state.reason}" if state.status == "failed" else describe_score(task, state)
            over = sum(state.status in ("finished", "failed") for state in self.states.values())
            self.report(f"{directory}: {outcome} ({over} of {len(self.states)} runs done)")
        elif time.monotonic() - self.shown > SHOWN_EVERY or state.done == 0:
            self.shown = time.monotonic()
            self.progress(self.summarize())

    def save(self) -> StudyResults:
        """Write, show and return the results so far."""
        results = self.summarize()
        results.write(self.output)
        self.progress(results)
        return results

    def finish(self, number: int) -> StudyResults:
        """Return the results, after writing the table and the plots.

        Args:
            number: The signal that stopped the runs, or 0.

        Raises:
            Interrupted: A signal stopped the study before its end.
        """
        for directory, state in self.states.items():
            if state.status == "running":
                self.states[directory] = State()
        results = self.save()
        if not number and self.study.keep != "all":
            others = {one: job for one, job in self.jobs.items() if one not in self.pretrainings}
            self.keep_models({one: job for one, job in others.items() if self.states[one].status == "failed"})
        if number and not results.finished:
            over = sum(state.status != "waiting" for state in self.states.values())
            raise Interrupted(
                f"stopped with {over} of {len(self.states)} runs done; the same command continues", number
            )
        atomic_write(write_table(results), self.output / TABLE)
        plot_heatmap(results, self.output / PICTURE)
        plot_curve(results, self.output / CURVE)
        return results


def check_directory(study: Study, output: Path) -> None:
    """Check that the directory holds the same study, or nothing."""
    if not (output / STUDY_FILE).exists():
        check_empty(output, "study", DATA)
        return
    before = make_study(read_recipe(output / STUDY_FILE), where=str(output / STUDY_FILE))
    refuse_other(f"{output} holds another study", list_parts(before), list_parts(study))


def list_parts(study: Study) -> RecipePart:
    """Return the values of a study that decide its results, by their names in messages; notes are left out.

    It does not matter which table of the study sets a key.
    """
    words = ("note", "average", "cited", "column", "row", "recipe", *HARDWARE)
    parts = {key: value for key, value in define(study).items() if key not in words}
    parts["columns"] = [[column.name, column.task, column.key] for column in study.columns]
    parts["rows"] = list(study.rows)
    for name, row in study.rows.items():
        cells = {f"{name}, {column.name}": merge(study.recipe, column.recipe, row.recipe) for column in study.columns}
        if row.pretrain is not None:
            cells[f"{name}, pretraining"] = row.pretrain | {"step": row.step}
        parts |= {f"{name}: ensemble": row.ensemble} if row.ensemble else {}
        for cell, recipe in cells.items():
            parts |= {f"{cell}: {key}".lstrip(", "): value for key, value in identify(recipe).items()}
    return parts


def make_jobs(
    pretrainings: Sequence[Pretraining], cells: Sequence[Cell], output: Path
) -> tuple[dict[str, RunJob], dict[str, RunJob]]:
    """Return the jobs of the pretrainings and those of all other runs, by run directory relative to the study's."""
    first = {one.directory: RunJob(one.recipe, str(output / one.directory), one.steps) for one in pretrainings}
    rest = {
        directory: RunJob(replace(cell.recipe, train={**cell.recipe.train, "seed": seed}), str(output / directory))
        for cell in cells
        if not cell.is_pretraining and not cell.members
        for seed, directory in cell.runs.items()
    }
    return first, rest


def check_inputs(
    first: Mapping[str, RunJob], rest: Mapping[str, RunJob], later: Collection[str], is_here: bool, report: Report
) -> None:
    """Check that the data of all runs, and the tokenizers of those that do not start later, can be read.

    Only the first document of a corpus is read.

    Args:
        is_here: Whether the runs use this machine; a Ray cluster may have hardware that this machine lacks.
    """
    seen: set[str] = set()
    for directory, job in (rest | first).items():  # reading files takes seconds, a corpus may come from the Hub
        recipe, options = job.recipe, job.recipe.data
        if is_here:
            with locate_refusal(directory):
                make_arguments(recipe, Path(job.output))
        tokenizer = "" if directory in later else options.get("vocab") or recipe.checkpoint
        if tokenizer and tokenizer not in seen:
            seen.add(tokenizer)
            load_tokenizer(tokenizer)
        name = json.dumps([recipe.task, dict(options)], sort_keys=True)
        if name in seen:
            continue
        seen.add(name)
        corpus = options.get("corpus")
        if directory in first and not corpus:
            raise UsageError(
                f"{directory} has no corpus; give a folder that holds text/ with --data ROOT, or write corpus "
                "in [pretrain.data]"
            )
        if corpus and not any(map(is_built, corpus)):
            next(read_documents(corpus, split_sentences=False))
        else:
            TASKS[recipe.task].load(options, report)


# --- Keeping weights --------------------------------------------------------------------------------------------------


def prune(study: Study, group: Sequence[Cell], states: Mapping[str, State], output: Path) -> None:
    """Remove the checkpoints of finished runs of a row and column, and the weights of those that cannot win.

    If means are compared, a cell whose runs are not all finished can still win with its best run.
    """
    runs = [directory for cell in group for directory in cell.runs.values()]
    ended = [directory for directory in runs if states[directory].metrics is not None]
    for directory in ended:
        drop_checkpoints(output / directory)
    if study.keep == "all":
        return
    waits = [cell for cell in group if study.select == "mean" and len(list_scores(cell, states)) < len(cell.runs)]
    rivals = [[cell for cell in group if cell not in waits], *([cell] for cell in waits)]
    winners = {found[1] for rival in rivals if (found := choose(study, rival, states))}
    for directory in ended:
        if directory not in winners:
            drop_weights(output / directory)


def holds_weights(folder: Path) -> bool:
    """Return whether the folder has a model's weights."""
    return any(folder.glob("model*.safetensors"))


def keep_models(origin: Pretraining, output: Path, needed: Iterable[str]) -> None:
    """Keep only those checkpoints of a finished pretraining that runs start from, as loadable models.

    The run's tokenizer is added, which a checkpoint lacks, and the optimizer, twice as large as the model, is dropped.

    Args:
        needed: Directories that runs start from.
    """
    run = output / origin.directory
    for step in origin.steps:
        target, source = run / name_step(step), run / f"checkpoint-{step}"
        if str(target) not in needed:
            shutil.rmtree(target, ignore_errors=True)
        elif not target.exists() and source.exists():
            temporary = run / f".{target.name}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            for path in (*source.glob("config.json"), *source.glob("model*.safetensors*")):
                shutil.copy2(path, temporary)
            save_tokenizer(load_tokenizer(run), temporary)
            temporary.rename(target)
    drop_checkpoints(run)
