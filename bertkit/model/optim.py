"""BERT's Adam: no bias correction, decoupled weight decay (paper section A.2; AdamWeightDecayOptimizer in its code).

Without bias correction the first steps are larger than Adam's. Warm-up hides this in pre-training, but fine-tuning on
small sets becomes unstable (Mosbach et al. 2021); the `stable` preset uses torch's AdamW, which corrects the bias. The
Trainer chooses the parameters that decay (all except LayerNorm and biases); the learning rate follows transformers'
linear schedule.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BERT_ADAM = "bert_adam"  # the name in `[train] optim`, beside those of TrainingArguments
LATE = 1e9  # a step at which a power of either beta is 0; adding 1 to it changes no float of 32 bits


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction: p -= lr * (m / (sqrt(v) + eps) + weight_decay * p).

    Args:
        params: Parameters or groups of them; a group may set any of the values below.
        lr: Learning rate; 1e-4 in pre-training (A.2).
        betas: Decay rates of the moments m and v (A.2).
        eps: Added to sqrt(v); 1e-6 in the reference code.
        weight_decay: Applied to the weight itself, not through the moments; 0.01 (A.2).
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
        """Update every parameter that has a gradient, and return the closure's loss if there is one."""
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
        """Update one group in one pass over its values, with the kernel of torch's fused AdamW.

        The kernel divides the moments by 1 - beta ** step, which is 1 at the step LATE.
        """
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            means,
            squares,
            [],
            [torch.full((), LATE, device=params[0].device)] * len(params),  # on the device: no copy, no waiting
            fused=True,
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
