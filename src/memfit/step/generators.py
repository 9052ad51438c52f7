"""States of the default generators: of the CPU and of the device that computes, or of all devices.

A state as a tensor (`taken`) is memory of the step, and a capture counts it. A state as a generator of its own (`GeneratorStates`) is not, so what only
guards a step against its own failure adds nothing to its peak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

States = tuple[torch.Tensor, ...]


def of_device(device: torch.device) -> torch.Generator:
    """The default generator that operations on a device draw from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _drawn_from(device: torch.device) -> tuple[torch.Generator, ...]:
    """The CPU's, and that of the device where it has one: a step on a GPU may draw from both."""
    cpu, own = torch.default_generator, of_device(device)
    return (cpu,) if own is cpu else (cpu, own)


# -- as tensors, which a capture counts ----------------------------------------------------------------------------------------


def taken(device: torch.device) -> States:
    """States of the CPU's default generator and of the device's, as uint8 tensors."""
    # By this name, since a capture follows the state through it (`Recorder.seeing_generator_states`).
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def put_back(states: States, device: torch.device) -> None:
    """Set the default generators to what `taken` gave."""
    for generator, state in zip(_drawn_from(device), states, strict=True):
        generator.set_state(state)


@contextmanager
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Draw from an earlier state of a device's default generator, then go on as if nothing had been drawn."""
    generator = of_device(device)
    present = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(present)


# -- as generators, which nothing counts ---------------------------------------------------------------------------------------


class GeneratorStates:
    """The states that the default generators have now, to be put back later.

    Args:
        device: the one that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._states = [(generator, generator.clone_state()) for generator in _drawn_from(device)]

    def put_back(self) -> None:
        """Have the default generators draw what they would have drawn."""
        for generator, state in self._states:
            generator.set_state(state.get_state())


@contextmanager
def forked_generators(device: torch.device | None = None) -> Iterator[None]:
    """Random numbers drawn inside leave the default generators as they were.

    Args:
        device: the one that computes; None for the current CUDA device, or the CPU where there is none.
    """
    before = GeneratorStates(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        yield
    finally:
        before.put_back()


# -- of micro-batches and of ranks that do not draw from the process's own -----------------------------------------------------


def derived_seed(states: States, index: int) -> int:
    """A seed made from these and a number: another stream for each number, and nothing is drawn."""
    digest = hashlib.blake2b(digest_size=7)
    for state in states:
        digest.update(state.cpu().numpy().tobytes())
    digest.update(index.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def seed(number: int, device: torch.device) -> None:
    """Seed the CPU's default generator and the device's, and no other device's."""
    for generator in _drawn_from(device):
        generator.manual_seed(number)


@contextmanager
def own_stream(index: int, device: torch.device) -> Iterator[None]:
    """Inside, numbers are drawn from a stream of this index alone; afterwards the default generators have moved on by one number.

    So processes whose generators are in one state draw different numbers inside and are in one state afterwards, too, and a state that was saved between two
    blocks gives the next one its numbers again. After an error they are as they were.

    Args:
        index: of the stream.
        device: the one that computes.
    """
    before = GeneratorStates(device)
    seed(derived_seed(taken(device), index), device)
    try:
        yield
    finally:
        before.put_back()
    for generator in _drawn_from(device):
        torch.empty((), device=generator.device).uniform_(generator=generator)
