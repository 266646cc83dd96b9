"""Run a study as `bertkit.studies.spec` defines it: do its runs, choose among them, keep weights, write the results.

The paper's grid (section A.3), its random restarts (section 4.1) and every table of its ablations (sections 5 and C)
are studies. The pretrainings that rows start from come first, then all other runs. The run directories decide which
runs are done; `study.json` is made from them. `workers.py` does the runs, `results.py` summarises them, `tables.py`
and `plots.py` show the results.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bertkit.data.tokenizer import load_tokenizer, save_tokenizer
from bertkit.errors import UsageError, explain_refusal
from bertkit.studies.cells import Cell, Pretraining, list_cells, list_pretrainings, name_step
from bertkit.studies.plots import plot_curve, plot_heatmap
from bertkit.studies.results import choose, describe_score, find_states, group_cells, judge, list_scores, summarize
from bertkit.studies.spec import CURVE, HARDWARE, PICTURE, PRETRAIN, STUDY_FILE, TABLE, Study, define, make_study
from bertkit.studies.tables import describe_size, write_table
from bertkit.studies.workers import RunJob, State, do_runs, list_model
from bertkit.system.cluster import read_workers
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, write_json
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import list_phases
from bertkit.training.arguments import make_arguments
from bertkit.training.prepare import Prepared, name_examples, prepare
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, RecipePart, list_decisive, merge, read_recipe, save_recipe
from bertkit.training.run_dir import BEST, DATA, FIRST, STUDY_RESULT, check_data, hold_run_dir

SHOWN_EVERY = 0.1  # seconds


# --- The runs ---------------------------------------------------------------------------------------------------------


def run_study(
    study: Study,
    *,
    output: str | Path,
    workers: int | str = 1,
    report: Report = ignore,
    progress: Callable[[dict[str, Any]], None] = ignore,
) -> dict[str, Any]:
    """Do all runs that are not finished, and return the results as written to `output/study.json`.

    Recipes and data are checked before anything is written. A failed run is recorded and the others continue; the same
    command tries it again.

    Args:
        output: A new or empty directory, or one of the same study, which then continues.
        workers: 1 for this process, N > 1 for N processes, "ray" for the cluster of RAY_ADDRESS or else a local one.
        report: Receives single lines.
        progress: Receives the results so far, a new dictionary each time.

    Returns:
        The results as described in `summarize`.

    Raises:
        UsageError: There is a mistake in the study, the data or the directory.
        Interrupted: SIGTERM or SIGINT stopped the study; its runs have written checkpoints.
    """
    output, count = Path(output), read_workers(workers)
    pretrainings, cells = list_pretrainings(study), list_cells(study, output)
    processes = join_processes(cells[0].recipe)
    if not processes.is_main_process:
        report = progress = ignore
    check_directory(study, output)
    first, rest = make_jobs(study, pretrainings, cells, output)
    jobs = first | rest
    states, left = find_states(jobs, output)
    origins = {pretraining.directory: pretraining for pretraining in pretrainings}
    state = StudyState(study, origins, cells, states, output, report, progress, processes.is_main_process)
    report(f"{describe_size(state.summarize())}, {len(states) - len(left)} of them finished")
    if count:  # a Ray cluster may have hardware that this machine lacks
        check_arguments(left)
    first, rest = ({place: job for place, job in part.items() if place in left} for part in (first, rest))
    later = [place for place, job in rest.items() if state.waits(place, job, first)]
    rehearse(first, [rest[place] for place in later], report)
    ready, prepared = prepare_data({place: job for place, job in rest.items() if place not in later}, report)
    check_finished(state, jobs, prepared)
    processes.wait_for_everyone()  # so that all find the same directories
    with hold_run_dir(output) if processes.is_main_process else nullcontext():
        state.start()
        number = state.work(first if count == 1 else order_longest_first(first), {}, count)
        if not number:
            state.keep_models(rest)
            processes.wait_for_everyone()  # until the main process has kept them
            state.give_up(rest)
            able = {place: rest[place] for place in later if states[place].status != "failed"}
            more, data = prepare_data(able, report, state.refuse)
            ready = {place: job for place, job in ready.items() if states[place].status != "failed"}
            number = state.work(ready | more, prepared | data, count)
        return state.finish(number)


@dataclass(eq=False)
class StudyState:
    """The state of a study while it runs: shows every message, and writes the results.

    Attributes:
        pretrainings: Pretrainings by directory.
        states: Mapping from run directory, relative to the study's, to the run's state.
        is_main: Whether this process writes, if several processes share each run.
        shown: The time of the last progress report.
    """

    study: Study
    pretrainings: Mapping[str, Pretraining]
    cells: Sequence[Cell]
    states: dict[str, State]
    output: Path
    report: Report
    progress: Callable[[dict[str, Any]], None]
    is_main: bool
    shown: float = 0.0

    @cached_property
    def groups(self) -> list[list[Cell]]:
        """Return the cells of each row and column."""
        return group_cells(self.cells)

    def summarize(self) -> dict[str, Any]:
        """Return the results so far."""
        return summarize(self.study, list(self.pretrainings.values()), self.cells, self.states)

    def find_cell(self, directory: str) -> Cell:
        """Return the first cell that a run belongs to."""
        return next(cell for cell in self.cells if not cell.borrowed and directory in cell.runs.values())

    def find_origin(self, directory: str) -> str:
        """Return the directory of the pretraining that a run starts from; empty without one."""
        return self.find_cell(directory).origin

    def waits(self, directory: str, job: RunJob, first: Mapping[str, RunJob]) -> bool:
        """Return whether the model that a run starts from does not exist yet."""
        origin = self.find_origin(directory)
        return bool(origin) and (origin in first or not holds_weights(Path(job.recipe.checkpoint)))

    def start(self) -> None:
        """Create the directory, write study.toml, and remove models that are no longer needed."""
        if self.is_main:
            with explain_refusal(f"the directory {self.output}"):
                self.output.mkdir(parents=True, exist_ok=True)
            save_recipe(define(self.study), self.output / STUDY_FILE)
            for group in self.groups:
                prune(self.study, group, self.states, self.output)
        self.save()

    def work(self, jobs: Mapping[str, RunJob], prepared: Mapping[str, Prepared], workers: int) -> int:
        """Do the jobs, and return the signal that stopped them, or 0 when all are over."""
        places = list(jobs)

        def hear(number: int, news: State | str) -> None:
            self.take(places[number], news)

        hardware = self.study.num_cpus, self.study.num_gpus
        return do_runs(list(jobs.values()), prepared, hear, workers, *hardware, str(self.output))

    def keep_models(self, jobs: Mapping[str, RunJob]) -> None:
        """Keep only those models of the pretrainings that later runs start from."""
        every = {cell.recipe.checkpoint for cell in self.cells if cell.origin}
        needed = {job.recipe.checkpoint for place, job in jobs.items() if self.find_origin(place)}
        for directory, origin in self.pretrainings.items():
            if self.is_main and self.states[directory].status == "finished":
                keep_models(origin, self.output, every if self.study.keep == "all" else needed)

    def give_up(self, jobs: Mapping[str, RunJob]) -> None:
        """Mark runs as failed whose pretraining has left no model to start from."""
        for directory, job in jobs.items():
            if (origin := self.find_origin(directory)) and (reason := self.explain_missing(origin, job)):
                self.take(directory, State("failed", reason=reason))

    def explain_missing(self, origin: str, job: RunJob) -> str:
        """Return why a run has no model to start from; empty if it has one."""
        start = Path(job.recipe.checkpoint)
        if self.states[origin].status == "failed":
            again = f"; delete {origin} to pretrain again" if self.states[origin].metrics is not None else ""
            return f"its pretraining, {origin}, has failed{again}"
        if not holds_weights(start):
            return (
                f"its pretraining left no weights in {start.relative_to(self.output)}; delete {origin}, and the "
                "same command pretrains again"
            )
        return ""

    def refuse(self, directory: str, reason: str) -> None:
        """Record that a run cannot begin."""
        self.take(directory, State("failed", reason=reason))

    def take(self, directory: str, news: State | str) -> None:
        """Handle a run's message: its state, or a line."""
        if isinstance(news, str):
            self.report(f"{directory}: {news}")
            return
        state = judge(replace(news, reason=news.reason.replace(str(self.output / directory), directory)))
        self.states[directory] = state
        if state.status in ("finished", "failed"):
            task = PRETRAIN if directory in self.pretrainings else self.find_cell(directory).column.task
            if self.is_main:
                self.clean(directory)
            self.save()
            outcome = f"failed: {state.reason}" if state.status == "failed" else describe_score(task, state)
            over = sum(state.status in ("finished", "failed") for state in self.states.values())
            self.report(f"{directory}: {outcome} ({over} of {len(self.states)} runs done)")
        elif time.monotonic() - self.shown > SHOWN_EVERY or state.done == 0:
            self.shown = time.monotonic()
            self.progress(self.summarize())

    def clean(self, directory: str) -> None:
        """Remove models that are no longer needed after a run; `keep_models` does this for pretrainings."""
        if directory in self.pretrainings:
            return
        group = next(group for group in self.groups if any(directory in cell.runs.values() for cell in group))
        prune(self.study, group, self.states, self.output)
        origin = self.find_origin(directory)
        if origin and self.study.keep != "all":
            drop_steps(self.pretrainings[origin], self.cells, self.states, self.output)

    def save(self) -> dict[str, Any]:
        """Write, show and return the results so far."""
        results = self.summarize()
        if self.is_main:
            write_json(results, self.output / STUDY_RESULT)
        self.progress(results)
        return results

    def finish(self, number: int) -> dict[str, Any]:
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
        if number and not results["finished"]:
            over = sum(state.status != "waiting" for state in self.states.values())
            raise Interrupted(
                f"stopped with {over} of {len(self.states)} runs done; the same command continues", number
            )
        if self.is_main:
            atomic_write(write_table(results), self.output / TABLE)
            plot_heatmap(results, self.output / PICTURE)
            plot_curve(results, self.output / CURVE)
        return results


def check_directory(study: Study, output: Path) -> None:
    """Check that the directory holds the same study, or nothing."""
    if not (output / STUDY_FILE).exists():
        # A study that is killed in its first moments may leave a hidden file.
        if output.is_dir() and any(not path.name.startswith(".") and path.name != DATA for path in output.iterdir()):
            raise UsageError(f"{output} is not empty and holds no study; name another directory with --output")
        return
    before = make_study(read_recipe(output / STUDY_FILE), where=str(output / STUDY_FILE))
    refuse_other(f"{output} holds another study", list_parts(before), list_parts(study))
    if list(before.rows) != list(study.rows):
        raise UsageError(f"{output} has other rows, or in another order; name another directory with --output")


def list_parts(study: Study) -> RecipePart:
    """Return the values of a study that decide its results, by their names in messages.

    Notes are left out, and it does not matter which table of the study sets a key.
    """
    words = ("note", "average", "column", "row", "recipe", *HARDWARE)
    parts = {key: value for key, value in define(study).items() if key not in words}
    parts["columns"] = [[column.name, column.task, column.key] for column in study.columns]

    def add(place: str, part: RecipePart) -> None:
        parts.update({f"{place}: {key}": value for key, value in list_decisive(part).items()})

    for name, row in study.rows.items():
        for column in study.columns:
            place = f"{name or 'recipe'}, {column.name}" if any(c.recipe for c in study.columns) else name or "recipe"
            add(place, merge(study.recipe, column.recipe, row.recipe))
        if row.pretrain is not None:
            add(f"{name}, pretraining".lstrip(", "), row.pretrain | ({"step": row.step} if row.step else {}))
    return parts


def make_jobs(
    study: Study, pretrainings: Sequence[Pretraining], cells: Sequence[Cell], output: Path
) -> tuple[dict[str, RunJob], dict[str, RunJob]]:
    """Return the jobs of the pretrainings and those of all other runs, by run directory relative to the study's."""
    first = {
        origin.directory: RunJob(origin.recipe, str(output / origin.directory), milestones=origin.steps)
        for origin in pretrainings
    }
    rest = {
        directory: RunJob(cell.recipe.override(train={"seed": seed}), str(output / directory))
        for cell in cells
        if not cell.borrowed
        for seed, directory in cell.runs.items()
    }
    return first, rest


def order_longest_first(jobs: Mapping[str, RunJob]) -> dict[str, RunJob]:
    """Sort pretrainings by estimated cost, longest first, so that workers finish at about the same time."""
    return dict(sorted(jobs.items(), key=lambda item: -estimate_cost(item[1].recipe)))


def estimate_cost(recipe: Recipe) -> float:
    """Estimate a run's multiplications: the encoder's matrices at every token, the decoder's at predicted tokens."""
    from bertkit.model.config import BertConfig

    model, options = BertConfig(**recipe.model), recipe.data
    hidden, decoded = model.hidden_size, 1.0 if options["objective"] == "clm" else options["masked_lm_prob"]
    layer = 4 * hidden**2 + 2 * hidden * model.intermediate_size
    decoder = hidden * (hidden + max(recipe.model.get("vocab_size", 0), options["vocab_size"]))
    tokens = sum(phase.samples * phase.max_length for phase in list_phases(recipe))
    return tokens * (model.num_hidden_layers * layer + decoded * decoder)


def check_arguments(jobs: Mapping[str, RunJob]) -> None:
    """Check that the Trainer accepts the arguments of every job."""
    for directory, job in jobs.items():
        try:
            make_arguments(job.recipe, Path(job.output))
        except UsageError as error:
            raise UsageError(f"{directory}: {error}") from None


def prepare_data(
    jobs: Mapping[str, RunJob], report: Report, refuse: Callable[[str, str], None] | None = None
) -> tuple[dict[str, RunJob], dict[str, Prepared]]:
    """Prepare the data of the jobs, each data set once.

    If the data depend on more of the recipe (pretraining: seed, length of the run), they are prepared here only to find
    mistakes early, and each run prepares its own.

    Args:
        refuse: Receives the directory and the reason of each job whose data cannot be used; the job is left out.

    Returns:
        The jobs with the names of their data, grouped by data, and the data by name.

    Raises:
        UsageError: Files are wrong or missing, or a tokenizer cannot be loaded, and `refuse` is None.
    """
    seen: dict[str, int] = {}
    refused: dict[str, str] = {}
    prepared: dict[str, Prepared] = {}
    ordered: list[tuple[int, str, RunJob]] = []
    for directory, job in jobs.items():
        name, is_reusable = name_examples(job.recipe), TASKS[job.recipe.task].reusable
        if name not in seen:
            seen[name] = len(seen)
            try:
                data = prepare(job.recipe, report)
            except UsageError as error:
                if refuse is None:
                    raise
                refused[name] = str(error)
            else:
                if is_reusable:
                    prepared[name] = data
        if name in refused:
            refuse(directory, refused[name])
            continue
        ordered.append((seen[name], directory, replace(job, data=name if is_reusable else "")))
    ordered.sort(key=lambda entry: entry[0])
    return {directory: job for _, directory, job in ordered}, prepared


def check_finished(state: StudyState, jobs: Mapping[str, RunJob], prepared: Mapping[str, Prepared]) -> None:
    """Check that finished runs used the data as they are now, because one table shows all runs.

    Finished pretrainings are checked only if another one is still to be done: reading a corpus may take hours.

    Raises:
        UsageError: A finished run used other data, or its data can no longer be read.
    """
    known = {name: data.fingerprints for name, data in prepared.items()}
    finished = {place: job for place, job in jobs.items() if state.states[place].status == "finished"}
    pretrains = any(job.recipe.task == PRETRAIN for place, job in jobs.items() if place not in finished)
    for directory, job in finished.items():
        recipe, name = job.recipe, name_examples(job.recipe)
        if recipe.task == PRETRAIN:
            if not pretrains:
                continue
            recipe = recipe.override(data={"vocab": job.output})  # otherwise it may have to be trained again
        elif origin := state.find_origin(directory):  # its models may be removed, but each run has its tokenizer
            if recipe.data.get("features"):  # they are the model's
                continue
            name = name_examples(recipe.override(checkpoint=origin))
            recipe = recipe.override(checkpoint=job.output)
        if name not in known:  # large data take minutes
            state.report(f"{directory}: comparing its data with those of today")
            known[name] = prepare(recipe).fingerprints
        check_data(Path(job.output), known[name])


def rehearse(first: Mapping[str, RunJob], later: Iterable[RunJob], report: Report) -> None:
    """Check that the pretraining texts, and the data of the runs that follow, can be read.

    One of several pretrainings on the same texts is prepared in full. The files of the runs that follow are only read,
    because there is no tokenizer yet.
    """
    seen: set[str] = set()
    for job in later:  # before the pretrainings: reading files takes seconds, training vocabularies takes minutes
        if (name := json.dumps([job.recipe.task, dict(job.recipe.data)], sort_keys=True)) not in seen:
            seen.add(name)
            TASKS[job.recipe.task].load(job.recipe.data, report)
    for directory, job in first.items():
        source = {key: job.recipe.data[key] for key in ("corpus", "vocab")} | {"of": job.recipe.checkpoint}
        if not source["corpus"]:
            raise UsageError(
                f"{directory} has no corpus; give a folder that holds text/ with --data ROOT, or write corpus "
                "in [pretrain.data]"
            )
        if (name := json.dumps(source, sort_keys=True)) not in seen:
            seen.add(name)
            prepare(job.recipe, report)


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
            for weights in (output / directory).glob("model*.safetensors*"):
                weights.unlink(missing_ok=True)


def drop_checkpoints(run: Path) -> None:
    """Remove all models from a finished run's directory except the last."""
    for model in (*run.glob("checkpoint-*"), run / FIRST, run / BEST):
        shutil.rmtree(model, ignore_errors=True)


def holds_weights(folder: Path) -> bool:
    """Return whether the folder has a model's weights."""
    return any(folder.glob("model*.safetensors"))


def keep_models(origin: Pretraining, output: Path, needed: Iterable[str]) -> None:
    """Keep those checkpoints of a finished pretraining that later runs start from, as loadable models.

    The run's tokenizer is added, which a checkpoint lacks, and the optimizer, twice as large as the model, is dropped.

    Args:
        needed: Directories that runs start from.
    """
    run = output / origin.directory
    for step in origin.steps:
        target, source = run / name_step(step), run / f"checkpoint-{step}"
        if str(target) not in needed or target.exists() or not source.exists():
            continue
        temporary = run / f".{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for path in list_model(source):  # empty if it is saved in another form; `explain_missing` reports it
            shutil.copy2(path, temporary)
        save_tokenizer(load_tokenizer(run), temporary)
        temporary.rename(target)
    drop_checkpoints(run)


def drop_steps(origin: Pretraining, cells: Iterable[Cell], states: Mapping[str, State], output: Path) -> None:
    """Remove the kept models that no unfinished run starts from."""
    used = {
        cell.recipe.checkpoint
        for cell in cells
        if cell.origin == origin.directory and any(states[run].status != "finished" for run in cell.runs.values())
    }
    for step in origin.steps:
        folder = output / origin.directory / name_step(step)
        if str(folder) not in used:
            shutil.rmtree(folder, ignore_errors=True)
