"""Train a model across four processes, none of which may have the memory that it needs.

The limit is the operating system's (RLIMIT_DATA), set in each process when the ranks have met, at what the process uses then and the budget. The same model is
trained on the same batches:

    [1] plain     PyTorch in one process without a limit: the losses to be reached.
    [2] plain     PyTorch in one process under the limit: it dies.
    [3] memfit    four processes under the same limit each, parameters, gradients and optimizer state shared out among them (ZeRO 3). Its losses must be
                  those of [1], but for the order in which numbers are added up, and the measured peak of each process the predicted one.

The exit status is 0 when [2] dies, [3] lives, and losses and peaks are as claimed; 1 else.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from beyond_memory import BYTES_A_PARAMETER, GPT, TOKENS, VOCAB, adamw, apart, limit, loss_of, told
from torch import Tensor, nn

import memfit
from memfit.units import format_bytes, parse_bytes

RANKS: Final = 4
SAMPLES: Final = 8  # of all ranks together
SAME: Final = 1e-5  # relative: sums over ranks are added up in another order
PLANNED: Final = 0.7  # of the limit: the rest is for what gloo's threads, where they get no core, hold longer than the step does, and what malloc keeps
METERED: Final = 16  # steps at most, of which the least peak counts: a thread of gloo's may hold what it has sent a little longer than the step does


def built(options: argparse.Namespace) -> nn.Module:
    """The same in every process; without dropout, which draws other numbers in each."""
    torch.manual_seed(0)
    model = GPT(options.layers, options.hidden)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batches(steps: int) -> list[Tensor]:
    """Token ids of all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (SAMPLES, TOKENS), generator=generator) for _ in range(steps)]


def train_plainly(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of plain PyTorch."""
    if options.limited:
        limit(parse_bytes(options.budget))
    model = built(options)
    optimizer = adamw(model.parameters())
    losses = []
    for ids in batches(options.steps):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def shard_something_small() -> None:
    """One step of a layer: the limit is for the model, not for what torch imports and sets up in the first step of all."""
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(8, 8)
    fully_shard(layer)
    layer(torch.ones(8, 8)).sum().backward()
    adamw(layer.parameters()).step()


def train_a_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Losses and measured peaks, as one of the ranks that torchrun has started."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    shard_something_small()
    plan = memfit.Plan.load(options.plan)
    limit(parse_bytes(options.budget))
    engine = memfit.apply(plan, built(options), loss_of, adamw)
    own = [ids.chunk(RANKS)[rank] for ids in batches(options.steps)]
    losses = [engine.step(ids).loss for ids in own]
    predicted = [figures.peak_bytes for figures in plan.prediction.ranks]
    least = [1 << 62] * RANKS
    for _ in range(METERED):
        peaks: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(peaks, engine.step(own[0], meter=True).peak_bytes or 0)
        least = [min(each) for each in zip(least, peaks, strict=True)]
        if least == predicted:
            break
    # What holds groups goes first: gloo's threads are to end before the process does.
    del engine
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {"losses": losses, "peaks": least} if rank == 0 else {}


def run(options: argparse.Namespace, role: str, *, limited: bool, plan: Path | None = None) -> dict[str, Any]:
    """One of the three trainings; under a plan in four processes."""
    launcher = [] if plan is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, __file__, "--role", role, *(["--limited"] if limited else [])]
    command += [] if plan is None else ["--plan", str(plan)]
    return apart(command, options, ("layers", "hidden", "steps", "budget"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="160MiB")
    parser.add_argument("--role", choices=["plain", "rank"], help=argparse.SUPPRESS)
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        torch.set_num_threads(1)  # sums in one order
        found = train_plainly(options) if options.role == "plain" else train_a_rank(options)
        if found:
            Path(options.result).write_text(json.dumps(found), encoding="utf-8")
        return 0
    model, budget = built(options), parse_bytes(options.budget)
    parameters = sum(p.numel() for p in model.parameters())
    needed = parameters * BYTES_A_PARAMETER
    print(
        f"{options.layers} layers, {parameters / 1e6:.1f} million parameters: parameters, gradients and optimizer state take {format_bytes(needed)}, "
        f"{needed / budget:.1f} times the {format_bytes(budget)} that each process is allowed"
    )
    free = run(options, "plain", limited=False)
    print(f"[1] one process, no limit:            {told(free)}")
    limited = run(options, "plain", limited=True)
    print(f"[2] one process under the limit:      {told(limited)}")
    own = batches(1)[0].chunk(RANKS)[0]
    plan = memfit.plan(model, own, loss_of, int(budget * PLANNED), adamw, devices=RANKS, fixed={"sharding": "zero3"})
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder, "plan.json"))
        shared = run(options, "rank", limited=True, plan=Path(folder, "plan.json"))
    print(f"[3] four processes, that limit each:  {told(shared)}")
    predicted = [figures.peak_bytes for figures in plan.prediction.ranks]
    print(f"    peaks predicted: {', '.join(map(format_bytes, predicted))}")
    if "peaks" in shared:
        print(f"    peaks measured:  {', '.join(map(format_bytes, shared['peaks']))}")
    same = all(
        math.isclose(a, b, rel_tol=SAME)
        for a, b in zip(shared.get("losses", [math.nan]), free.get("losses", [0.0]), strict=True)
    ) if len(shared.get("losses", [])) == options.steps else False  # fmt: skip
    held = same and "died" in limited and shared.get("peaks") == predicted
    print("The losses of one process, to the last digits; every peak as predicted." if held else "NOT as claimed.")
    return 0 if held else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
