"""The optimizer state of a stream: offloaded to the lower tier, and loaded into one slot on the device while its parameters are updated."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from memfit.optimizers.elementwise import MOMENTS
from memfit.streaming.layers import ParameterGroup
from memfit.streaming.packing import PackedLayout
from memfit.streaming.placement import LayerPlacement

STAYS_BYTES: Final = 64  # state tensors up to this size (step counts) are not worth moving


class StreamedState:
    """State of groups of parameters.

    Args:
        groups: of all parameters that are trained, those of the layers first.
        placement: of the layers; its tier and device are used.

    Attributes:
        optimizer: whose state it is; None before `adopt`.
        slot: buffer on the device; None before the end of the first step.
    """

    def __init__(self, groups: Sequence[ParameterGroup], placement: LayerPlacement) -> None:
        self.groups = groups
        self.optimizer: torch.optim.Optimizer | None = None
        self.slot: Tensor | None = None
        self._placement = placement

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Offload the state of an optimizer to the lower tier, and reserve space there for state that it has not made yet.

        How much state there will be is known of optimizers in `elementwise.MOMENTS`; others reserve space in their first step.

        Raises:
            InfeasibleError: the lower tier does not have the space; the state is where it was.
        """
        if type(optimizer) in MOMENTS:
            count = max(len(MOMENTS[type(optimizer)](group)) for group in optimizer.param_groups)
            for group in self.groups:
                self._reserve(group, count * group.like.size_bytes)
        self.optimizer = optimizer
        for group in self.groups:
            group.state, group.keys = None, []
            self.send(group)

    def _reserve(self, group: ParameterGroup, size_bytes: int) -> None:
        if size_bytes > group.size_bytes:
            group.offset, group.size_bytes = self._placement.tier.reserve(size_bytes), size_bytes

    def bring(self, group: ParameterGroup) -> list[Tensor]:
        """Load the group's state into the slot; there is none before the group's first update, which makes it."""
        if group.state is None:
            return []
        assert self.optimizer is not None, "a step has one"
        if self.slot is None:
            self.make_slot()
        flat = self._in_slot(group.state)
        self._placement.tier.read(group.offset, flat)
        views = group.state.views(flat)
        for (parameter, key), view in zip(group.keys, views, strict=True):
            self.optimizer.state[parameter][key] = view
        return views

    def send(self, group: ParameterGroup, brought: Sequence[Tensor] = ()) -> None:
        """Write the group's state to the lower tier, and put empty tensors in its place."""
        assert self.optimizer is not None, "a step has one"
        keys = [
            (parameter, key)
            for parameter in group.parameters
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.numel() * value.element_size() > STAYS_BYTES
        ]
        tensors = [self.optimizer.state[parameter][key] for parameter, key in keys]
        if group.state is not None and keys == group.keys and all(map(operator.is_, tensors, brought)):
            self._placement.tier.write(group.offset, self._in_slot(group.state))
        elif keys:
            group.state, group.keys = PackedLayout.of(tensors), keys
            self._reserve(group, group.state.size_bytes)
            if self.slot is not None and group.state.size_bytes > self.slot.numel():
                self.slot = None
            self._placement.write(group.state, group.offset, tensors)
        self._leave_empty(keys)

    def _leave_empty(self, keys: Sequence[tuple[nn.Parameter, str]]) -> None:
        for parameter, key in keys:
            assert self.optimizer is not None, "there is no state without one"
            self.optimizer.state[parameter][key] = self._placement.empty(self.optimizer.state[parameter][key].dtype)

    def leave_all_empty(self) -> None:
        """Put empty tensors in the place of state that is on the lower tier, without writing it."""
        for group in self.groups:
            self._leave_empty(group.keys)

    def make_slot(self) -> None:
        """Allocate memory on the device for the largest group's state."""
        self.slot = self._placement.flat(
            max((group.state.size_bytes for group in self.groups if group.state is not None), default=0)
        )

    def _in_slot(self, layout: PackedLayout) -> Tensor:
        assert self.slot is not None, "made after the first step"
        return self.slot[: layout.size_bytes]

    def gather(self, device: torch.device) -> None:
        """Load all state to a device, into memory of its own; call the placement's `synchronise` before reading it."""
        if self.optimizer is None:
            return
        for group in self.groups:
            if group.state is not None:
                flat = torch.empty(group.state.size_bytes, dtype=torch.uint8, device=device)
                self._placement.tier.read(group.offset, flat)
                for (parameter, key), view in zip(group.keys, group.state.views(flat), strict=True):
                    self.optimizer.state[parameter][key] = view

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the state on the tier at the end of the block to what it was at the beginning."""
        before = [(group, group.state, group.keys, group.offset) for group in self.groups]
        for group in self.groups:
            if group.state is not None:
                group.copy_offset = self._placement.tier.reserve(group.state.size_bytes)
                self._copy(group.state, group.offset, group.copy_offset)
        try:
            yield
        finally:
            for group, state, keys, offset in before:
                group.state, group.keys = state, keys
                if state is not None:
                    group.offset = offset
                    self._copy(state, group.copy_offset, offset)

    def _copy(self, layout: PackedLayout, source: int, target: int) -> None:
        if self.slot is None:
            self.make_slot()
        flat = self._in_slot(layout)
        self._placement.tier.read(source, flat)
        self._placement.tier.write(target, flat)
        self._placement.synchronise()
