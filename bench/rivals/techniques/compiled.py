"""`torch.compile` with Inductor and `activation_memory_budget`: a share of what would be saved, from all (1) to the inputs of the graph alone (0)."""

from __future__ import annotations

import shutil
from typing import Any

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "torch.compile"
PACKAGE = INSTALL = None
NOTE = "Time to compile is left out of the times. Fused kernels differ from eager ones in rounding and draw other dropout masks."

SHARES = (1.0, 0.5, 0.2, 0.0)


def obstacle(subject: Subject) -> str | None:
    if not subject.compiles:
        return "left out: minutes of compiling for each share"
    # Inductor's kernels for the CPU are C++.
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler on this machine"
    return None


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [(f"budget {share:g}", _arrange(share)) for share in SHARES]


def _arrange(share: float) -> Arrange:
    def arrange(_subject: Subject, built: Built) -> Loss:
        import torch._dynamo
        import torch._functorch.config
        import torch._inductor.compile_fx
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = 256  # several arrangements of one model in one process
        torch._inductor.config.compile_threads = 1

        # A backend of its own for each share: dynamo would hand one share's code to the next, as their guards are the same.
        def backend(graph: Any, inputs: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return torch._inductor.compile_fx.compile_fx(graph, inputs)

        built[0].compile(backend=backend)
        return lambda: batches.loss_of(*built)

    return arrange
