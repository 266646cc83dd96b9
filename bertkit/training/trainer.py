"""The Trainer of transformers with bertkit's additions.

Losses are divided by the labels of the whole update, and their parts are logged; the log does not depend on whether the
run was interrupted. A run reports its progress, keeps its last and its best checkpoint, and stops on a signal, on a NaN
or infinite loss, or when another of its processes is lost. Everything else is the Trainer's.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments
from transformers.trainer_pt_utils import nested_concat

from bertkit.errors import UsageError, join_lines
from bertkit.system.files import write_json
from bertkit.system.progress import Report, describe_duration
from bertkit.system.signals import Interrupted, note_signals
from bertkit.tasks.task import Task, score_summaries
from bertkit.training.callbacks import Milestones, StopAfter, StopEarly, StopOnSignal, refuse_divergence
from bertkit.training.parts import add_indices
from bertkit.training.processes import begin_worker
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import list_checkpoints, mark_complete, rotate_checkpoints, write_log

SUMS = "loss_sums.json"  # in a checkpoint: sums of the losses since the last log


def train(trainer: "BertTrainer", checkpoint: Path | None, report: Report) -> None:
    """Train to the end, from a checkpoint if one is given.

    Raises:
        Interrupted: SIGTERM or SIGINT was received; a checkpoint was saved.
        UnpicklingError: The checkpoint holds pickled code, which torch does not execute.
    """
    if checkpoint:
        report(f"continues after {checkpoint.name}")
        trainer.restore_sums(checkpoint)
        trainer.args.eval_on_start = False  # a resumed run has evaluated at its first start
    start = time.monotonic()
    stopper = next(x for x in trainer.callback_handler.callbacks if isinstance(x, StopOnSignal))
    # SIGTERM and the first Ctrl-C let the update finish, write a checkpoint and end the training.
    with note_signals(partial(setattr, stopper, "signalled")):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if number := stopper.agreed or stopper.ask_all(trainer.args):  # a signal may come after the last update
        update = trainer.state.global_step
        # Later checkpoints are damaged: a resumed run has skipped them.
        saved = max((step for step in list_checkpoints(Path(trainer.args.output_dir)) if step <= update), default=0)
        where = f" after update {saved:,}" if saved else " from the beginning"
        if saved == update:
            where = ""
        raise Interrupted(f"stopped after update {update:,}; the same command continues{where}", number)
    trainer.check_numbers(trainer.add_up())
    if (update := trainer.state.global_step) < trainer.state.max_steps:
        is_due = any(x.is_due(trainer.state) for x in trainer.callback_handler.callbacks if isinstance(x, StopAfter))
        reason = "its time was over (stop_after)" if is_due else f"{trainer.criterion[0]} did not improve (patience)"
        report(f"stopped early after update {update:,}, because {reason}")
    report(f"trained for {describe_duration(time.monotonic() - start)}")


class BertTrainer(Trainer):
    """A Trainer that divides losses by the labels of the whole update and logs every part of the loss.

    A head counts its own labels (`count_labels`); the counts of all micro-batches and processes are added before the
    first micro-batch is computed, so no loss or gradient depends on how an update is split.

    Args:
        keep: Number of checkpoints to keep, the last and the best always among them; 0 keeps all.
        milestones: Updates after which a checkpoint is saved and kept, whatever `keep` is.
        pause: Seconds after a checkpoint in which planned ones are left out.
        patience: Number of evaluations in a row without a better score that end the training; 0 never does.
        max_tokens: The most tokens of a part of a batch, in training and in evaluation; 0: batches are not divided.
    """

    def __init__(
        self,
        args: TrainingArguments,
        *,
        task: Task,
        keep: int = 0,
        milestones: Collection[int] = (),
        pause: float = 0.0,
        patience: int = 0,
        max_tokens: tuple[int, int] = (0, 0),
        **kwargs,
    ) -> None:
        args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes (accelerate launch), never DataParallel
        super().__init__(args=args, **kwargs)
        self.task = task
        self.compute_metrics = self.score
        self.keep = keep
        self.max_tokens = max_tokens
        self.milestones = frozenset(milestones)
        self.add_callback(Milestones(self.milestones, pause))
        if patience:
            self.add_callback(StopEarly(patience, *self.criterion))
        self.sums: dict[str, Tensor] = {}  # this process's sums of the loss and its parts since the last log
        self.logged_at = 0  # the update of the last log
        self.resumed_at = 0  # the update after which this process began
        self.scored: tuple[int, Any] = -1, None  # the update of the last evaluation, and its summaries
        self.is_weightless = False  # whether the rows of the update have weights, and all are 0
        if self.is_fsdp_enabled:
            drop_second_names(self.model)

    def _run_epoch(self, **kwargs) -> None:
        """Train an epoch, unless the run was resumed from a checkpoint after its last update."""
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            super()._run_epoch(**kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device) -> tuple[list, dict[str, Tensor]]:
        """Return the micro-batches of one update, and its label counts over all micro-batches and processes."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        head = self.accelerator.unwrap_model(self.model)
        counts: dict[str, Tensor] = {}
        for sample in samples:
            for name, count in head.count_labels(**sample).items():
                counts[name] = counts.get(name, 0) + count
        counts = {name: self.accelerator.reduce(count.to(device), "sum") for name, count in counts.items()}
        self.is_weightless = "sample_weight" in samples[0] and not any(counts.values())
        return samples, counts

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """Return the loss of a batch, computed part by part; processes exchange gradients after the last one."""
        *first, last = self.take_parts(inputs)
        compute = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        with self.accelerator.no_sync(model):
            losses = list(map(compute, first))
        loss = torch.stack([*losses, compute(last)]).sum()
        # An optimizer skips weights without a gradient: no decay, no momentum. The scaler of fp16 needs gradients.
        if self.is_weightless and self.accelerator.scaler is None:
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def take_parts(self, batch: dict[str, Any]) -> list[dict[str, Tensor]]:
        """Return the parts of a batch; with FSDP as many in each process, because a forward pass gathers weights."""
        parts = batch.pop("parts")
        if self.is_fsdp_enabled and (most := max(gather_object([len(parts)]))) > len(parts):
            head = type(self.accelerator.unwrap_model(self.model))
            columns = {name: column.tensor_split(most) for name, column in batch.items()}
            parts = [add_indices({name: columns[name][i] for name in columns}, head) for i in range(most)]
        return parts

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> Any:
        """Return this micro-batch's share of the update's loss.

        It is multiplied by the number of processes, over which gradients are averaged.
        """
        outputs = model(**inputs, **(num_items_in_batch or {}))
        for name, value in outputs.items():
            if name.endswith("loss"):
                self.sums[name] = self.sums.get(name, 0.0) + value.detach().float()
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the means of the loss and its parts over the updates since the last log, across restarts."""
        if "loss" in logs:
            updates = self.state.global_step - self.logged_at
            logs |= {name: total / updates for name, total in self.add_up().items()}
            self.sums, self.logged_at = {}, self.state.global_step
        logs.pop("train_loss", None)  # the Trainer's mean covers only the updates since the last start
        if "train_runtime" in logs and self.resumed_at:  # a runtime is that of the last start
            logs["resumed_at"] = self.resumed_at
        super().log(logs, start_time)

    def add_up(self) -> dict[str, float]:
        """Return the sums of the loss and its parts since the last log, over all processes.

        All processes must call this together.
        """
        names = sorted(self.sums)
        if not names:
            return {}
        totals = self.accelerator.reduce(torch.stack([self.sums[name] for name in names]), "sum")
        return dict(zip(names, totals.tolist(), strict=True))

    def _save_checkpoint(self, model, trial) -> None:
        """Save a checkpoint, mark it complete once every process has written its part, and delete old checkpoints."""
        sums = self.add_up()
        self.check_numbers(sums)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            output = Path(self.args.output_dir)
            checkpoint = output / f"checkpoint-{self.state.global_step}"
            write_json({"logged_at": self.logged_at, "sums": sums}, checkpoint / SUMS)
            write_log(self.state.log_history, output)
            mark_complete(checkpoint)
            if self.keep > 0:
                protected = [*self.milestones, *([best["step"]] if (best := self.find_best()) else [])]
                if loaded := self.state.best_model_checkpoint:  # at the end, by the Trainer
                    protected.append(int(loaded.rpartition("-")[2]))
                rotate_checkpoints(output, self.state.global_step, self.keep, protected)

    def check_numbers(self, sums: Mapping[str, float]) -> None:
        """Check that the loss sums and the weights are finite. All processes must call this together."""
        parts = (each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters())
        sound = torch.stack([part.isfinite().all() for part in parts]).all() & all(map(math.isfinite, sums.values()))
        if self.accelerator.reduce((~sound).float().to(self.args.device), "sum") > 0:
            refuse_divergence("a loss or a weight is NaN or infinite", self.state.global_step, self.args)

    @property
    def criterion(self) -> tuple[str, bool]:
        """Return the name of the score that decides which checkpoint is best, and whether lower is better."""
        if given := self.args.metric_for_best_model:
            return given.removeprefix("eval_"), not self.args.greater_is_better
        return self.task.metric, self.task.lower_is_better

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save the model; tied weights of a sharded model, whose `state_dict` is given, are saved under one name."""
        for second, first in self.model.all_tied_weights_keys.items():
            if state_dict and second in state_dict:
                state_dict[first] = state_dict.pop(second)
        super()._save(output_dir, state_dict)

    def find_best(self) -> dict[str, float] | None:
        """Return `step` and scores of the best evaluated checkpoint on disk, the first if several are equal."""
        metric, lower_is_better = self.criterion
        saved = list_checkpoints(Path(self.args.output_dir))
        scores = [
            {key.removeprefix("eval_"): value for key, value in entry.items()}
            for entry in self.state.log_history
            if entry["step"] in saved and math.isfinite(entry.get(f"eval_{metric}", math.nan))
        ]
        sign = 1 if lower_is_better else -1
        return min(scores, key=lambda entry: sign * entry[metric], default=None)

    def restore_sums(self, checkpoint: Path) -> None:
        """Restore the loss sums since the last log; the first process takes those of all processes."""
        self.resumed_at = int(checkpoint.name.rpartition("-")[2])
        saved = json.loads((checkpoint / SUMS).read_text(encoding="utf-8"))
        self.logged_at = saved["logged_at"]
        own = float(self.is_world_process_zero())  # the others have zeros: sums are added over processes
        self.sums = {name: torch.tensor(own * x, device=self.args.device) for name, x in saved["sums"].items()}

    def _get_dataloader(self, *args, is_training=False, **kwargs) -> Any:
        """Return the Trainer's loader, which divides batches; this process needs its workers, which ignore signals."""
        loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps the loader that starts the workers
        inner.collate_fn = partial(inner.collate_fn, self.max_tokens[not is_training])
        inner.worker_init_fn = partial(begin_worker, inner.worker_init_fn)
        return loader

    def _get_eval_sampler(self, eval_dataset) -> None:
        """Return None to keep the order of the data, which scores and prediction files need.

        With group_by_length the Trainer's own sampler would sort them.
        """

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the scores of an evaluation, as `compute_metrics`, and remember its summaries."""
        self.scored = self.state.global_step, prediction.predictions
        return score_summaries(self.task, prediction.predictions, self.eval_dataset)

    def summarize(self, data: Any) -> Any:
        """Return the summaries of a data set; those of the last evaluation are not computed again by the same model.

        Numbers are: the scale that they are learned in is part of the saved classifier only at the end.
        """
        config = self.accelerator.unwrap_model(self.model).config
        is_same = data is self.eval_dataset and not self.args.load_best_model_at_end and config.learned_scale is None
        if is_same and self.scored[0] == self.state.global_step:
            return self.scored[1]
        return self.predict(data).predictions

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, Tensor, Tensor]:
        """Return the task's summary of a batch, also in place of the labels, which the Trainer requires."""
        summaries = []
        # Layers that `compile_layers` has compiled for training would need other graphs here.
        stance = "default" if self.args.torch_compile else "force_eager"
        for part in map(self._prepare_inputs, self.take_parts(inputs)):
            with torch.no_grad(), self.compute_loss_context_manager(), torch.compiler.set_stance(stance):
                outputs = model(**part, **self.task.evaluation_options)
            summaries.append(self.task.summarize(outputs, part))
        summary = reduce(nested_concat, summaries)
        return None, summary, summary[:, :1]


def drop_second_names(model: nn.Module) -> None:
    """Delete the second name of each decoder's bias, so that only the decoder holds it.

    FSDP puts the decoder into a group with its tied embeddings, and the other modules into another group; since torch
    2.13 it rejects a parameter that is in both.
    """
    for module in model.modules():
        if isinstance(getattr(module, "decoder", None), nn.Linear) and getattr(module, "bias", None) is not None:
            del module.bias


@contextmanager
def explain_shortage(args: TrainingArguments, find_recipe: Callable[[], Recipe]) -> Iterator[None]:
    """Convert out-of-memory errors (CPU or accelerator) and dead data workers to a UsageError with remedies."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        words, keys = join_lines(error).rpartition("DefaultCPUAllocator: ")[2][:120], "--set train."
        if "DataLoader worker" in words and ("killed by signal" in words or "exited unexpectedly" in words):
            raise UsageError(
                f"a data worker has died ({words}); the same command continues from the last checkpoint; if memory "
                f"is too small, disable workers with {keys}dataloader_num_workers=0"
            ) from error
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in words:
            raise
        recipe, size, evaluated = find_recipe(), args.per_device_train_batch_size, args.per_device_eval_batch_size
        less = ""
        if size > 1:
            less = f"{keys}per_device_train_batch_size={size // 2} (now {size}; updates stay the same), "
        less += f"{keys}per_device_eval_batch_size={max(1, evaluated // 2)} for evaluation, "
        if most := recipe.data["max_tokens"]:
            tokens = min(most, size * (longest := max(recipe.lengths)))
            less = ""
            if tokens > longest:
                less = f"--set data.max_tokens={tokens // 2} (now {most}; updates stay the same), "
        raise UsageError(
            f"memory is too small ({words}); reduce memory use with {less}{keys}gradient_checkpointing=true, a lower "
            "max_length or less data; the size of a part and checkpointing do not change the run, so with them the "
            "same command continues from the last checkpoint"
        ) from error
