"""Whether all ranks call the same units in the same order: under `fully_shard` each call gathers parameters from all of them.

A rank that leaves a block out (stochastic depth, an expert for which it has no tokens) would take the next block's parameters for those of another, or wait for
ever. As long as a forward calls every unit once, in the order of the model, nothing is sent. From the first call on that is another one a rank tells the others
through the store by which the group was made, in which nobody waits for a collective, and goes on where they all do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import EngineError

# Ranks begin a forward together, so this is how much longer one may take to the same place than another.
PATIENCE: Final = timedelta(minutes=1)
_watched = count()  # alike on all ranks, which share out the same models one after the other


class UnitCalls:
    """Watches the forwards of a training step.

    Args:
        model: that is shared out.
        units: paths of the modules that are gathered one by one.
        group: of the ranks.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], group: dist.ProcessGroup) -> None:
        self._units, self._group = tuple(units), group
        self._name = f"memfit/unit calls/{next(_watched)}"
        self._forwards = 0
        self._calls: list[int] = []
        self._expected = [*range(len(units) + 1)]  # the last one is the end of forward
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            # Before that in which torch gathers.
            *(
                model.get_submodule(path).register_forward_pre_hook(self._calling(number), prepend=True)
                for number, path in enumerate(units)
            ),
            model.register_forward_hook(self._calling(len(units))),
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._forwards += 1
        self._calls = []

    def _calling(self, number: int) -> Any:
        def called(*_: Any) -> None:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:  # not what backward runs again
                self._call(number)

        return called

    def _call(self, number: int) -> None:
        self._calls.append(number)
        if self._calls == self._expected[: len(self._calls)]:
            return
        self._check_others(number)
        if number == len(self._units):
            self._expected = self._calls

    def _check_others(self, number: int) -> None:
        """Go on where all ranks call this unit now.

        Raises:
            EngineError: one does not.
        """
        from torch.distributed.distributed_c10d import _get_default_store

        store, own = _get_default_store(), self._group.rank()
        place = f"{self._name}/{self._forwards}/{len(self._calls)}"
        store.set(f"{place}/{own}", str(number))
        for rank in range(self._group.size()):
            try:
                store.wait([f"{place}/{rank}"], PATIENCE)
                there = int(store.get(f"{place}/{rank}"))
            except dist.DistStoreError:  # it has called what was expected, and waits to be sent parameters
                there = self._expected[min(len(self._calls), len(self._expected)) - 1]
            if there != number:
                raise EngineError(
                    f"in this forward rank {own} {self._words(number)} where rank {rank} {self._words(there)}: all ranks have to call the same blocks in the "
                    'same order where each block is gathered by itself. Let them choose alike, or plan with fixed={"sharding": "zero2+whole"}, under which the '
                    "model is gathered as one"
                )

    def _words(self, number: int) -> str:
        return f"calls {self._units[number]}" if number < len(self._units) else "calls no further block"
