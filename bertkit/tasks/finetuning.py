"""What all fine-tuning tasks share.

The recipe's common part (paper A.3) and its check, the checkpoint's tokenizer, and the scores of knowing nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bertkit.data.sequences import pad
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.system.progress import Report
from bertkit.tasks.option import list_defaults
from bertkit.tasks.task import BERT_TRAIN, Task, repeat_run

TRAIN = BERT_TRAIN | {  # A.3: as in pre-training, but for batch size, learning rate and epochs, which are the task's
    "warmup_steps": 0.1,  # a share of all updates
    "save_total_limit": 1,
    "logging_steps": 0.01,  # a share of all updates
}
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}


class FineTuningTask(Task):
    """A task that starts from a checkpoint."""

    # Mosbach et al. 2021: bias correction and more epochs, against runs that never leave the majority class.
    stable: Mapping[str, Any] = {"train": {"optim": "adamw_torch", "num_train_epochs": 20.0, "learning_rate": 2e-5}}
    start = "a BERT to fine-tune"  # what it starts from
    other_causes = ""  # of a score that is no better than knowing nothing

    def make_recipe(self, batch_size: int, checkpoint: str = "google-bert/bert-base-uncased", **train: Any) -> dict:
        """Return the task's recipe: the common part and its own batch size, checkpoint and keys of `[train]`."""
        return {
            "task": self.name,
            "checkpoint": checkpoint,
            "precision": "auto",
            "preset": "paper",
            "model": {},
            "batch_size": batch_size,
            "data": list_defaults(self.options),
            "train": TRAIN | train,
        }

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Check that there is something to start from, no option of other tasks, and every number in its range."""
        if not recipe.get("checkpoint"):
            raise UsageError(f"{self.name} needs {self.start}; name one with --model")
        if recipe.get("freeze") and recipe.get("reinit_layers"):
            raise UsageError(
                "freeze would leave the layers of reinit_layers as they are drawn; leave one of the two out"
            )
        if recipe.get("phase"):
            raise UsageError(f"[[phase]] is for pretraining; leave it out of a recipe for {self.name}")
        super().check(recipe)
        if recipe["data"]["tune_share"] and not self.splits:
            raise UsageError(f"{self.title} has no labels, so nothing of it can decide; leave tune_share out")
        train = recipe["train"]
        if train.get("max_steps", -1) <= 0 and train["num_train_epochs"] <= 0:
            raise UsageError(f"num_train_epochs is {train['num_train_epochs']:g} in [train]; it must be above 0")

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the batch of some sequences."""
        return pad(items)

    def summarize(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (B, L), or (B, C) of choices: the logits."""
        return outputs.logits.float()

    def baseline(self, train: Any, dev: Any) -> dict[str, float]:
        """Return what `score_nothing` gives, each score as `majority_…`, the metric's as `majority_score` too."""
        scores = self.score_nothing(dev)
        found = {f"majority_{name}": value for name, value in scores.items()}
        return found | {"majority_score": scores[self.metric]} if scores else {}

    def score_nothing(self, dev: Any) -> dict[str, float]:
        """Return the scores of one and the same answer to everything; empty where there is none."""
        raise NotImplementedError

    def diagnose(self, metrics: Mapping[str, Any]) -> list[str]:
        """Warn where knowing nothing has as much of one of the task's scores, with its likely causes."""
        for row in self.list_rows(metrics):
            for words, key in row.baselines.items():
                if metrics[row.key] <= metrics[key]:
                    return [
                        f"warning: {row.name} ({row.show(metrics[row.key])}) is not above {words} "
                        f"({row.show(metrics[key])}). Likely causes: a learning rate that is too high, too few updates "
                        "or an unlucky seed (try --set train.learning_rate=1e-5, --set preset=stable or "
                        f"--set train.seed=43){self.other_causes}"
                    ]
        return []

    def suggest(self, output: Path, recipe: Mapping[str, Any]) -> list[str]:
        """Return the command of another seed."""
        return [f"bertkit {self.command} {repeat_run(output, '43', 'train.seed=43')}  # another seed"]

    def tokenize(self, recipe: Mapping[str, Any], examples: Mapping[str, Any], report: Report) -> Any:
        """Return the checkpoint's tokenizer."""
        return load_tokenizer(recipe["checkpoint"])
