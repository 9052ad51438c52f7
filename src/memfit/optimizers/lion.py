"""Lion, which torch does not have: the sign of an average is the update, so there is one moment to keep instead of AdamW's two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of the interpolated gradient and momentum, decoupled weight decay.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2.

    Args:
        params: as for torch's optimizers.
        lr: learning rate; a third to a tenth of AdamW's.
        betas: weight of the momentum in the update, and of the momentum in the next momentum.
        weight_decay: with which, times lr, parameters shrink.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                momentum = state["exp_avg"]
                direction = momentum.lerp(gradient, 1 - first).sign_()
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(direction.mul_(group["lr"]))
                momentum.lerp_(gradient, 1 - second)
        return loss
