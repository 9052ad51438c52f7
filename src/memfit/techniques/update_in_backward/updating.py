"""Update each parameter inside backward, as soon as its gradient is whole, and let the gradient go at once.

Then there is never more than the gradients of a few layers. What a parameter becomes depends on nothing but itself, its gradient and its state, so the
result is that of updating after backward, bit for bit. LOMO (arXiv 2306.09782) and torchtune's fused backward do the same with an optimizer for each
parameter; here it stays one optimizer, with its groups, schedules and snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from memfit.errors import InputError
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.optimizers.elementwise import MOMENTS, own_step

Around = Callable[[torch.Tensor], AbstractContextManager[object]]

# Optimizers in which what a parameter becomes depends on no other parameter.
BY_PARAMETER: Final = frozenset({
    *MOMENTS,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
})  # fmt: skip


def why_not_in_backward(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer cannot update inside backward; None when it can."""
    if isinstance(optimizer, ChunkedOptimizer) or type(optimizer) in BY_PARAMETER:
        return None
    return (
        f"{type(optimizer).__name__} is not known to update each parameter by itself, so it cannot be updated inside backward: "
        f"supported are {', '.join(sorted(kind.__name__ for kind in BY_PARAMETER))}"
    )


@contextmanager
def updating(
    optimizer: torch.optim.Optimizer,
    around: Around = nullcontext,
) -> Iterator[None]:
    """Run backward inside: the optimizer's parameters are updated on the way.

    Args:
        optimizer: one that can (`why_not_in_backward`), with each parameter's gradient whole at the end of this backward.
        around: gives what is entered for the update of a parameter.

    Raises:
        InputError: out of backward: a gradient was added to again after its update.
    """
    done: set[torch.Tensor] = set()

    def hook_of(group: dict[str, Any]) -> Callable[[torch.Tensor], None]:
        def update(parameter: torch.Tensor) -> None:
            if parameter in done:
                raise InputError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is added to more than once in one backward (reentrant "
                    "torch.utils.checkpoint does so), so it is never known to be whole inside it: update after backward, or use use_reentrant=False"
                )
            done.add(parameter)
            with torch.no_grad(), around(parameter):
                _update_one(optimizer, group, parameter)
            parameter.grad = None

        return update

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(group))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _update_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    if isinstance(optimizer, ChunkedOptimizer):
        optimizer.update(group, [parameter])
        return
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        own_step(optimizer)
    finally:
        optimizer.param_groups = groups
