"""Work counted instead of timed: which operations a step runs, how many FLOPs that is, and what they take at prices that are the same for all arrangements.

Times of whole steps carry the machine's noise. The multiset of operations does not: it is the same in every run, so two arrangements that are priced from one
table differ by what they really do. What is left out: time between operations (Python, hooks, allocation), and kernels that `torch.compile` made.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Key = tuple[Any, ...]


@dataclass(slots=True)
class Work:
    """What one step ran.

    Attributes:
        flops: of matrix products, convolutions and attention, as torch counts them.
        calls: how often each operation ran on each shape.
        seconds: processor time of each of these calls, one by one, as they came; of this thread, so it takes torch with one thread.
    """

    flops: int = 0
    calls: Counter[Key] = field(default_factory=Counter)
    seconds: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))


class _Watching(TorchDispatchMode):
    """Notes each call and its time."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = (
            str(func),
            *(
                (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else None
                for leaf in tree_leaves((args, kwargs))
            ),
        )
        begin = time.thread_time()
        out = func(*args, **kwargs)
        self.work.seconds[key].append(time.thread_time() - begin)
        self.work.calls[key] += 1
        return out


def counted(step: Callable[[], object]) -> Work:
    """Run a step and count."""
    work = Work()
    with (
        _Watching(work),
        FlopCounterMode(display=False) as flops,
    ):  # the inner one sees a call first: its own time is not counted
        step()
    work.flops = flops.get_total_flops()
    return work


def priced(works: Iterable[Work]) -> list[float]:
    """Seconds of each step's operations, every operation at its median over all steps."""
    works = list(works)
    seen: dict[Key, list[float]] = defaultdict(list)
    for work in works:
        for key, seconds in work.seconds.items():
            seen[key] += seconds
    price = {key: statistics.median(seconds) for key, seconds in seen.items()}
    return [sum(price[key] * count for key, count in work.calls.items()) for work in works]
