"""A table of runs done: what `bertkit.studies.spec` describes, run, chosen from, kept and written down.

The paper's grid (section A.3), its random restarts (section 4.1) and every table of its ablations (sections 5 and C)
are studies. First come the pretrainings that rows begin with, then all other runs. The directories of the runs are the
truth about what is done; `study.json` is made of them. `workers.py` does the runs, `results.py`
says what came of them, `tables.py` and `plots.py` show it.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
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
from bertkit.studies.workers import RunJob, State, do_runs
from bertkit.system.differences import find_differences, name_differences
from bertkit.system.files import atomic_write, write_json
from bertkit.system.parallel import read_workers
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import estimate_cost
from bertkit.training.arguments import make_arguments
from bertkit.training.prepare import Prepared, name_data, name_examples, prepare
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, list_decisive, merge, read_recipe, save_recipe
from bertkit.training.run_dir import BEST, FIRST, STUDY_RESULT, check_data, hold_run_dir

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
    """The results of all runs, as written to `output/study.json`; see `summarize`. What is finished is not repeated.

    Recipes and data are checked first; until then nothing is written. A run that fails is recorded, the others go on,
    and the same command tries it again.

    Args:
        output: new, empty, or of the same study, which then continues.
        workers: 1: this process; more: so many processes; "ray": the cluster of RAY_ADDRESS, or else a local one.
        report: gets one line now and then.
        progress: gets the results so far, a new dictionary each time.

    Raises:
        UsageError: a mistake in the study, the data or the directory.
        Interrupted: by SIGTERM or SIGINT; its runs have written checkpoints.
    """
    output, count = Path(output), read_workers(workers)
    pretrainings, cells = list_pretrainings(study), list_cells(study, output)
    processes = join_processes(cells[0].recipe)
    if not processes.is_main_process:
        report = progress = ignore
    check_directory(study, output)
    first, rest = make_jobs(study, pretrainings, cells, output)
    states, left = find_states(first | rest, output)
    origins = {pretraining.directory: pretraining for pretraining in pretrainings}
    state = StudyState(study, origins, cells, states, output, report, progress, processes.is_main_process)
    report(f"{describe_size(state.summarize())}, {len(states) - len(left)} of them finished")
    if count:  # a cluster may have what this machine lacks
        check_arguments(left)
    first, rest = ({place: job for place, job in jobs.items() if place in left} for jobs in (first, rest))
    later = [place for place, job in rest.items() if state.waits(place, job, first)]
    rehearse(first, [rest[place] for place in later], report)
    ready, prepared = prepare_data({place: job for place, job in rest.items() if place not in later}, report)
    check_finished(state, prepared, output)
    processes.wait_for_everyone()  # all have to find the same directories
    with hold_run_dir(output) if processes.is_main_process else nullcontext():
        state.start()
        number = state.work(first if count == 1 else order_longest_first(first), {}, count)
        if not number:
            state.keep_models(rest)
            processes.wait_for_everyone()  # the first one has kept them
            state.give_up(rest)
            able = {place: rest[place] for place in later if states[place].status != "failed"}
            more, data = prepare_data(able, report, state.refuse)
            check_finished(state, data, output)
            ready = {place: job for place, job in ready.items() if states[place].status != "failed"}
            number = state.work(ready | more, prepared | data, count)
        return state.finish(number)


@dataclass(eq=False)
class StudyState:
    """What is known of the runs while they are done; everything it hears is shown, and what matters written.

    pretrainings: by directory.
    states: directory of a run below the study's -> how far it is.
    is_main: of several processes that share each run the one that writes.
    shown: when progress was last told.
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
        """The cells of each row and column."""
        return group_cells(self.cells)

    def summarize(self) -> dict[str, Any]:
        """The results so far."""
        return summarize(self.study, list(self.pretrainings.values()), self.cells, self.states)

    def find_cell(self, directory: str) -> Cell:
        """The first cell that a run belongs to."""
        return next(cell for cell in self.cells if not cell.borrowed and directory in cell.runs.values())

    def find_origin(self, directory: str) -> str:
        """The pretraining that a run starts from; empty without one."""
        return self.find_cell(directory).origin

    def waits(self, directory: str, job: RunJob, first: Mapping[str, RunJob]) -> bool:
        """Whether what a run starts from is still to be made."""
        origin = self.find_origin(directory)
        return bool(origin) and (origin in first or not holds_weights(Path(job.recipe["checkpoint"])))

    def start(self) -> None:
        """Begins the directory."""
        if self.is_main:
            with explain_refusal(f"the directory {self.output}"):
                self.output.mkdir(parents=True, exist_ok=True)
            save_recipe(define(self.study), self.output / STUDY_FILE)
            for group in self.groups:
                prune(self.study, group, self.states, self.output)
        self.save()

    def work(self, jobs: Mapping[str, RunJob], prepared: Mapping[str, Prepared], workers: int) -> int:
        """The signal by which the jobs were stopped, or 0 when every one is over."""
        places = list(jobs)

        def hear(number: int, news: State | str) -> None:
            self.take(places[number], news)

        return do_runs(list(jobs.values()), prepared, hear, workers, self.study.num_cpus, self.study.num_gpus)

    def keep_models(self, jobs: Mapping[str, RunJob]) -> None:
        """Keeps of the pretrainings what the runs to come start from, and nothing else."""
        every = {cell.recipe["checkpoint"] for cell in self.cells if cell.origin}
        needed = {job.recipe["checkpoint"] for place, job in jobs.items() if self.find_origin(place)}
        for directory, origin in self.pretrainings.items():
            if self.is_main and self.states[directory].status == "finished":
                keep_models(origin, self.output, every if self.study.keep == "all" else needed)

    def give_up(self, jobs: Mapping[str, RunJob]) -> None:
        """Fails the runs whose pretraining has left nothing to start from."""
        for directory, job in jobs.items():
            if (origin := self.find_origin(directory)) and (reason := self.explain_missing(origin, job)):
                self.take(directory, State("failed", reason=reason))

    def explain_missing(self, origin: str, job: RunJob) -> str:
        """Why a run has nothing to start from; empty if it has."""
        start = Path(job.recipe["checkpoint"])
        if self.states[origin].status == "failed":
            again = f"; delete {origin} to pretrain again" if self.states[origin].metrics is not None else ""
            return f"its pretraining, {origin}, has failed{again}"
        if not holds_weights(start):
            return (
                f"its pretraining has left no weights in {start.relative_to(self.output)}; delete {origin}, and the "
                "same command pretrains again (the machines of a cluster have to share the disk of --output)"
            )
        return ""

    def refuse(self, directory: str, reason: str) -> None:
        """Takes in that a run cannot begin."""
        self.take(directory, State("failed", reason=reason))

    def take(self, directory: str, news: State | str) -> None:
        """Takes in what a run says: its state, or a line."""
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
            self.report(f"{directory}: {outcome} ({over} of {len(self.states)} runs over)")
        elif time.monotonic() - self.shown > SHOWN_EVERY or state.done == 0:
            self.shown = time.monotonic()
            self.progress(self.summarize())

    def clean(self, directory: str) -> None:
        """Removes what is needed no more now that a run is over; of a pretraining, `keep_models` does."""
        if directory in self.pretrainings:
            return
        group = next(group for group in self.groups if any(directory in cell.runs.values() for cell in group))
        prune(self.study, group, self.states, self.output)
        origin = self.find_origin(directory)
        if origin and self.study.keep != "all":
            drop_steps(self.pretrainings[origin], self.cells, self.states, self.output)

    def save(self) -> dict[str, Any]:
        """The results so far, written and shown."""
        results = self.summarize()
        if self.is_main:
            write_json(results, self.output / STUDY_RESULT)
        self.progress(results)
        return results

    def finish(self, number: int) -> dict[str, Any]:
        """The results; writes the tables, unless a signal (its number, or 0) came before the end.

        Raises:
            Interrupted: it did.
        """
        for directory, state in self.states.items():
            if state.status == "running":
                self.states[directory] = State()
        results = self.save()
        if number and not results["finished"]:
            over = sum(state.status != "waiting" for state in self.states.values())
            raise Interrupted(
                f"stopped with {over} of {len(self.states)} runs over; the same command continues", number
            )
        if self.is_main:
            atomic_write(write_table(results), self.output / TABLE)
            plot_heatmap(results, self.output / PICTURE)
            plot_curve(results, self.output / CURVE)
        return results


def check_directory(study: Study, output: Path) -> None:
    """Nothing, or a UsageError: the directory holds another study, or something else."""
    if not (output / STUDY_FILE).exists():
        # A hidden file may be what is left of a study that was killed in its first moment.
        if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
            raise UsageError(f"{output} is not empty and holds no study; name another directory with --output")
        return
    old = list_parts(make_study(read_recipe(output / STUDY_FILE), where=str(output / STUDY_FILE)))
    new = list_parts(study)
    differences = [
        f"{place}{difference}"
        for place in old | new
        for difference in find_differences(old.get(place, {}), new.get(place, {}))
    ]
    if list(old) != list(new) and not differences:
        differences = ["the order of the rows"]
    if differences:
        unique = list(dict.fromkeys(differences))
        raise UsageError(
            f"{output} holds another study ({name_differences(unique)}); name another directory with --output"
        )


def list_parts(study: Study) -> dict[str, Recipe]:
    """What decides the results of a study, by what a message calls it; not words, and not where a key was written."""
    words = ("note", "average", "column", "row", "recipe", *HARDWARE)
    parts = {"": {key: value for key, value in define(study).items() if key not in words}}
    parts[""]["columns"] = [[column.name, column.task, column.key] for column in study.columns]
    for name, row in study.rows.items():
        for column in study.columns:
            place = f"{name or 'recipe'}, {column.name}" if any(c.recipe for c in study.columns) else name or "recipe"
            parts[f"{place}: "] = list_decisive(merge(study.recipe, column.recipe, row.recipe))
        if row.pretrain is not None:
            parts[f"{name}, pretraining: ".lstrip(", ")] = list_decisive(row.pretrain) | (
                {"step": row.step} if row.step else {}
            )
    return parts


def make_jobs(
    study: Study, pretrainings: Sequence[Pretraining], cells: Sequence[Cell], output: Path
) -> tuple[dict[str, RunJob], dict[str, RunJob]]:
    """The jobs of the pretrainings and of all other runs, by the run's directory below the study's."""
    first = {
        origin.directory: RunJob(PRETRAIN, origin.recipe, str(output / origin.directory), milestones=origin.steps)
        for origin in pretrainings
    }
    rest = {
        directory: RunJob(cell.column.task, merge(cell.recipe, {"train": {"seed": seed}}), str(output / directory))
        for cell in cells
        if not cell.borrowed
        for seed, directory in cell.runs.items()
    }
    return first, rest


def order_longest_first(jobs: Mapping[str, RunJob]) -> dict[str, RunJob]:
    """Pretrainings, those first that will take longest: several workers are then done at about the same time."""
    return dict(sorted(jobs.items(), key=lambda item: -estimate_cost(item[1].recipe)))


def check_arguments(jobs: Mapping[str, RunJob]) -> None:
    """Nothing, or a UsageError about what the Trainer would refuse."""
    for directory, job in jobs.items():
        try:
            make_arguments(TASKS[job.task], job.recipe, Path(job.output))
        except UsageError as error:
            raise UsageError(f"{directory}: {error}") from None


def prepare_data(
    jobs: Mapping[str, RunJob], report: Report, refuse: Callable[[str, str], None] | None = None
) -> tuple[dict[str, RunJob], dict[str, Prepared]]:
    """The jobs with the names of their data, those with the same data together, and the data by name.

    Every data set is read and encoded once. Where the data depend on more of the recipe (pretraining: seed, length of
    the run), this is a rehearsal, for mistakes to come to light now, and each run prepares its own.

    Args:
        refuse: gets the directory and the reason of each job whose data cannot be used, which is then left out.

    Raises:
        UsageError: wrong or missing files, or a tokenizer that cannot be loaded, and nobody to tell.
    """
    seen: dict[str, int] = {}
    refused: dict[str, str] = {}
    prepared: dict[str, Prepared] = {}
    ordered: list[tuple[int, str, RunJob]] = []
    for directory, job in jobs.items():
        task = TASKS[job.task]
        name = name_examples(task, job.recipe)
        if name not in seen:
            seen[name] = len(seen)
            try:
                data = prepare(task, job.recipe, report)
            except UsageError as error:
                if refuse is None:
                    raise
                refused[name] = str(error)
            else:
                if task.reusable:
                    prepared[name] = data
        if name in refused:
            refuse(directory, refused[name])
            continue
        ordered.append((seen[name], directory, replace(job, data=name if task.reusable else "")))
    ordered.sort(key=lambda entry: entry[0])
    return {directory: job for _, directory, job in ordered}, prepared


def check_finished(state: StudyState, prepared: Mapping[str, Prepared], output: Path) -> None:
    """Nothing, or a UsageError: runs that are finished had other data than these, and stand in the same table.

    Left out: pretrainings, whose data depend on more than their text.
    """
    for cell in state.cells:
        data = prepared.get(name_data(TASKS[cell.column.task], cell.recipe))
        for directory in cell.runs.values() if data else ():
            if state.states[directory].status == "finished":
                check_data(output / directory, data.fingerprints)


def rehearse(first: Mapping[str, RunJob], later: Iterable[RunJob], report: Report) -> None:
    """Nothing, or a UsageError: texts to pretrain on, or data of the runs that come after, that cannot be read.

    Of pretrainings on the same texts one is rehearsed; what comes after has no tokenizer yet, and its files are read.
    """
    seen: set[str] = set()
    for job in later:  # before the pretrainings, for files are read in seconds, and vocabularies trained in minutes
        if (name := json.dumps([job.task, job.recipe["data"]], sort_keys=True)) not in seen:
            seen.add(name)
            TASKS[job.task].load(job.recipe["data"], report)
    for directory, job in first.items():
        source = {key: job.recipe["data"][key] for key in ("corpus", "vocab")} | {"of": job.recipe.get("checkpoint")}
        if not source["corpus"]:
            raise UsageError(
                f"{directory} has no corpus; name a folder that holds text/: --data ROOT, or write corpus in "
                "[pretrain.data]"
            )
        if (name := json.dumps(source, sort_keys=True)) not in seen:
            seen.add(name)
            prepare(TASKS[PRETRAIN], job.recipe, report)


# --- What is kept -----------------------------------------------------------------------------------------------------


def prune(study: Study, group: Sequence[Cell], states: Mapping[str, State], output: Path) -> None:
    """Removes what the finished runs of a row and column need no more, and the weights of those that can win no more.

    Where means are compared, a cell with a run to come, or to be tried again, can still win with its best run.
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
    """Removes all models from a finished run's directory but the last."""
    for model in (*run.glob("checkpoint-*"), run / FIRST, run / BEST):
        shutil.rmtree(model, ignore_errors=True)


def holds_weights(folder: Path) -> bool:
    """Whether there is a model to start from."""
    return any(folder.glob("model*.safetensors"))


def keep_models(origin: Pretraining, output: Path, needed: Iterable[str]) -> None:
    """Leaves of a finished pretraining's checkpoints those that runs to come start from, fit to be started from.

    A checkpoint has no tokenizer, which is the run's, and an optimizer, which is twice as large as the model.

    needed: the directories that runs start from.
    """
    run = output / origin.directory
    for step in origin.steps:
        target, source = run / name_step(step), run / f"checkpoint-{step}"
        if str(target) not in needed or target.exists() or not source.exists():
            continue
        temporary = run / f".{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for path in (source / "config.json", *source.glob("model*.safetensors*")):
            with suppress(FileNotFoundError):  # of a model that is saved in another way; `explain_missing` says so
                shutil.copy2(path, temporary)
        save_tokenizer(load_tokenizer(run), temporary)
        temporary.rename(target)
    drop_checkpoints(run)


def drop_steps(origin: Pretraining, cells: Iterable[Cell], states: Mapping[str, State], output: Path) -> None:
    """Removes the kept models that no run to come, or to be tried again, starts from."""
    used = {
        cell.recipe["checkpoint"]
        for cell in cells
        if cell.origin == origin.directory and any(states[run].status != "finished" for run in cell.runs.values())
    }
    for step in origin.steps:
        folder = output / origin.directory / name_step(step)
        if str(folder) not in used:
            shutil.rmtree(folder, ignore_errors=True)
