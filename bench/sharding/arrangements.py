"""What one rank does in this bench: steps under plans, and steps as people write them, metered and timed."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit import batches
from memfit.meter import metered
from memfit.step.held_tensors import model_tensors
from memfit.step.program import state_tensors
from models.transformer import build_gpt

METERED = 8  # steps, of which the least counts: the meter does not see what gloo's own thread releases


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of every step here."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": {"layers": 4, "hidden": 128, "heads": 4, "batch": 8, "tokens": 64, "vocab": 500},
    "larger": {"layers": 6, "hidden": 256, "heads": 8, "batch": 8, "tokens": 128, "vocab": 2000},
}


def gpt(size: str = "small") -> tuple[nn.Module, Any, Any]:
    """Model, batch of each rank, loss."""
    return build_gpt(**SIZES[size])


def least_of(peak: Callable[[], int]) -> int:
    """The least of some metered steps."""
    return min(peak() for _ in range(METERED))


class Planned:
    """Steps under a plan, of the GPT of one size."""

    def __init__(self, data: dict[str, Any], size: str = "small") -> None:
        model, self.sample, loss_fn = gpt(size)
        self.engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, adamw)

    def step(self) -> None:
        """One."""
        self.engine.step(self.sample)

    def peak(self) -> int:
        """Of one metered step."""
        return self.engine.step(self.sample, meter=True).peak_bytes or 0

    def close(self) -> None:
        """The model's own again."""
        assert not any(record.divergences for record in self.engine.records)
        if self.engine.sharded is not None:
            self.engine.sharded.close()


class ByHand:
    """As torch's tutorials have it: torch's checkpoint around every block, or not, then `fully_shard` on every block and on the model."""

    def __init__(self, *, checkpoint: bool, reshards: bool = True, mesh: Any = None) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import fully_shard

        self.model, self.sample, self.loss_fn = gpt()
        blocks: Any = self.model.blocks
        for number, block in enumerate(blocks):
            if checkpoint:
                blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)
            fully_shard(blocks[number], mesh=mesh, reshard_after_forward=reshards)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(self.model.parameters())

    def step(self) -> None:
        """One."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            loss = self.loss_fn(self.model, self.sample)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self) -> int:
        """Of one metered step; what is there before it is what a plan counts, too."""
        kept: list[Any] = [*self.model.parameters(), *state_tensors(self.optimizer)]
        local = [t.to_local().detach() if hasattr(t, "to_local") else t for t in kept]
        present = [*local, *self.model.buffers(), *model_tensors(self.model), *batches.leaves(self.sample)]
        with metered(present) as reading:
            self.step()
        return reading.peak_bytes

    def close(self) -> None:
        """Nothing to undo."""


HAND = {"by hand, no recomputation": False, "by hand, every block": True}


def peaks(rank: int, plans: Sequence[dict[str, Any]], size: str = "small") -> list[dict[str, Any]]:
    """Of each plan, for the GPT of one size, this rank's peak."""
    del rank
    found: list[dict[str, Any]] = []
    for data in plans:
        planned = Planned(data, size)
        planned.step()
        found.append({"peak_bytes": least_of(planned.peak)})
        planned.close()
    return found


def timed(rank: int, plans: Sequence[dict[str, Any]], rounds: int) -> list[list[tuple[float, float]]]:
    """Of each plan the seconds of some steps of this rank, of the processor and by the clock, every plan once a round, so that all meet the same load."""
    del rank
    arranged = [Planned(data) for data in plans]
    for planned in arranged:
        planned.step()
        planned.step()
    found: list[list[tuple[float, float]]] = [[] for _ in plans]
    for _ in range(rounds):
        for number, planned in enumerate(arranged):
            planned.step()  # in training the step before was one of its kind
            if dist.is_initialized():
                dist.barrier()
            found[number].append(clocked(planned.step))
    for planned in arranged:
        planned.close()
    return found


def peaks_by_hand(rank: int) -> dict[str, int]:
    """Of each arrangement without a plan."""
    del rank
    found = {}
    for name, checkpoint in HAND.items():
        arranged = ByHand(checkpoint=checkpoint)
        arranged.step()
        found[name] = least_of(arranged.peak)
    return found


def in_turns(rank: int, plans: Mapping[str, dict[str, Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Peak, and processor seconds in each round, of plans and of what is written by hand, every one once a round in an order that shifts."""
    del rank
    rows: dict[str, Planned | ByHand] = {name: ByHand(checkpoint=checkpoint) for name, checkpoint in HAND.items()}
    rows |= {name: Planned(data) for name, data in plans.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        row.step()
        found[name] = {"peak_bytes": least_of(row.peak), "seconds": []}
        row.step()
    names = list(rows)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            found[name]["seconds"].append(seconds_of(rows[name].step))
    for row in rows.values():
        row.close()
    return found


def seconds_of(step: Callable[[], None]) -> float:
    """Of this process, gloo's threads included."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def clocked(step: Callable[[], None]) -> tuple[float, float]:
    """Of the processor, as `seconds_of`, and by the clock."""
    begin = time.perf_counter()
    used = seconds_of(step)
    return used, time.perf_counter() - begin


def on_path() -> None:
    """Let the ranks, which are new interpreters, find this file."""
    here = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH", "")) if p)
