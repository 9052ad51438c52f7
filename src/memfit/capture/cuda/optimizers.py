"""The form in which PyTorch runs an optimizer on a GPU where the user names none: all parameters at once (foreach), whose temporaries are the model's size.

On a CPU, and on fake tensors anywhere, the default is a loop over single parameters.
"""

from __future__ import annotations

import torch

from memfit.optimizers.chunked import kind_and_groups


def as_on_cuda(optimizer: torch.optim.Optimizer) -> bool:
    """Set `foreach` where PyTorch's default on a GPU is to use it (`_default_to_fused_or_foreach`).

    Returns:
        Whether it is used for some group now.
    """
    _, groups = kind_and_groups(optimizer)
    if not type(optimizer).__module__.startswith("torch.optim"):
        return False
    for group in groups:
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        tensor_rate = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        if undecided and not group.get("differentiable") and not tensor_rate:
            group["foreach"] = True
    return any(group.get("foreach") for group in groups)
