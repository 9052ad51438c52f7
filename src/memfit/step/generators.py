"""States of the default generators: taken, put back, and made for the micro-batches that do not draw from the process's own."""

from __future__ import annotations

import hashlib

import torch

States = tuple[torch.Tensor, ...]


def taken(device: torch.device) -> States:
    """States of the CPU's default generator and of the device's, as uint8 tensors."""
    # By this name, since a capture follows the state through it (`capture.generator_states`).
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def put_back(states: States, device: torch.device) -> None:
    """Set the default generators to what `taken` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def derived_seed(states: States, index: int) -> int:
    """A seed made from these and a number: another stream for each number, and nothing is drawn."""
    digest = hashlib.blake2b(digest_size=7)
    for state in states:
        digest.update(state.cpu().numpy().tobytes())
    digest.update(index.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def seed(number: int, device: torch.device) -> None:
    """Seed the CPU's default generator and the device's, and no other device's."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)
