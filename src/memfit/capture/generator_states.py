"""States of the CPU's generator that Python code asks for: 5,056 bytes each that no kernel makes.

`torch.utils.checkpoint` keeps one for each of its regions, and `torch.random.fork_rng` one for as long as its block runs. The generator allocates them itself:
no dispatch mode, torch-function mode or hook of autograd sees it, and setting a generator to such a state is as hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from memfit.capture.recorder import Recorder

GENERATOR_STATE: Final = "torch.get_rng_state"
"""The name of an operation that is no kernel: it is not timed."""


@contextmanager
def following_generator_states(recorder: Recorder, *, as_operations: bool = False) -> Iterator[None]:
    """Inside, generator states that the recorded code asks for are followed too.

    The one place in which a function of torch is replaced, for as long as a step is recorded; what it gives is the same. What would leave it alone was tried:
    `torch.get_rng_state` cannot be overridden by a torch-function mode, and nothing it calls dispatches; `sys.setprofile` sees it return, but takes the place
    of any other profiler and about a tenth of a capture's time. Python 3.12 can watch single functions (`sys.monitoring`), 3.11 cannot.

    States that other threads ask for meanwhile are not written down.

    Args:
        recorder: records the states while it is recording.
        as_operations: write each down as an operation of its own, so that one which is freed before the next kernel counts too. Only where nobody
            follows the operations by number, as an engine's dispatch mode would not see these.
    """
    ask = torch.get_rng_state

    def seen() -> torch.Tensor:
        state = ask()
        if recorder.recording and recorder in _get_current_dispatch_mode_stack():
            recorder.record_state(state, GENERATOR_STATE if as_operations else None)
        return state

    torch.get_rng_state = seen
    try:
        yield
    finally:
        torch.get_rng_state = ask
