"""BERT's Adam: no bias correction, decoupled weight decay (paper section A.2; AdamWeightDecayOptimizer in its code).

Without the correction the first steps are larger than Adam's, which a warm-up hides in pre-training, and which makes
fine-tuning on small sets unstable (Mosbach et al. 2021); torch's AdamW, which corrects, is the `stable` preset.
Which parameters decay (all but LayerNorm and biases) is the Trainer's choice of parameter groups, and the learning
rate's schedule is transformers' linear one.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

BERT_ADAM = "bert_adam"  # under this name `[train] optim` reaches it, beside TrainingArguments' own
LATE = 1e9  # a step at which a power of either beta is 0


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction: p -= lr * (m / (sqrt(v) + eps) + weight_decay * p).

    Args:
        params: parameters or groups of them; a group may set any of the values below.
        lr: learning rate; 1e-4 in pre-training (A.2).
        betas: decay rates of the moments m and v (A.2).
        eps: added to sqrt(v); 1e-6 in the reference code.
        weight_decay: applied to the weight itself, not through the moments; 0.01 (A.2).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; the closure's loss if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict) -> None:
        """The update of one group in one pass over its values, by the kernel of torch's fused AdamW.

        It divides the moments by 1 - beta ** step, which is 1 once the step is late enough.
        """
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._fused_adamw_(
            params,
            [p.grad for p in params],
            means,
            squares,
            [],
            [torch.full((), LATE, device=params[0].device)] * len(params),  # filled there: no copy, no waiting
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
