"""Two ranks that share one GPU, through gloo: NCCL refuses that, and gloo sends what lies in a GPU's memory, but no messages between stages.

So data parallelism and ZeRO are fitted and trained, and pipelines are not asked. Captures are told that gloo is the backend, which makes buffers of its own.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Iterator
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from gpu.rows import plainly
from gpu.setting import Setting, adamw
from torch import nn

import memfit
from memfit.capture import recording

WAYS = ("data", "zero1", "zero2", "zero2+whole", "zero3")
RANKS = 2
WIDTH = 256
LIMIT_SECONDS = 60.0


def ranks(setting: Setting) -> Iterator[dict[str, Any]]:
    """Losses of three steps beside those of one device with the whole batch, and each rank's predicted and measured peak."""
    for way in WAYS[:1] if setting.tiny else WAYS:
        yield {"way": way, **_together(setting, way)}


def _together(setting: Setting, way: str) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    told: Any = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [spawn.Process(target=_rank, args=(rank, way, port, setting.tiny, told)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        rows = dict(told.get(timeout=LIMIT_SECONDS) for _ in processes)
    except Empty:
        return {"failed": f"no answer in {LIMIT_SECONDS:.0f} s"}
    finally:
        for process in processes:
            process.kill()
    failed = [row["failed"] for row in rows.values() if "failed" in row]
    if failed:
        return {"failed": failed[0]}
    return {
        "losses": rows[0]["losses"],
        "alone": rows[0]["alone"],
        "predicted_bytes": [rows[rank]["predicted_bytes"] for rank in range(RANKS)],
        "allocated_bytes": [rows[rank]["allocated_bytes"] for rank in range(RANKS)],
    }


def _rank(rank: int, way: str, port: int, tiny: bool, told: Any) -> None:  # noqa: FBT001 - pickled for another process
    try:
        torch.set_num_threads(1)
        told.put((rank, _fitted(Setting(tiny=tiny), rank, way, port)))
    except Exception:  # noqa: BLE001 - a way that fails is a finding
        told.put((rank, {"failed": traceback.format_exc()[-1500:]}))


def _fitted(setting: Setting, rank: int, way: str, port: int) -> dict[str, Any]:
    vars(recording)["backend_for"] = lambda _device: "gloo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model, batch = _model_and_batch(setting)
    alone = _alone(setting)
    count = len(batch[0]) // RANKS
    own = tuple(t[rank * count : (rank + 1) * count].clone() for t in batch)
    fixed = {"sharding": way, "micro_batches": 1}
    engine = memfit.fit(model, own, _loss, "2GiB", adamw, devices=RANKS, fixed=fixed)
    losses = [float(engine.step(own).loss) for _ in alone]
    setting.fresh()
    return {
        "losses": losses,
        "alone": alone,
        "predicted_bytes": engine.plan.prediction.ranks[rank].peak_bytes,
        "allocated_bytes": engine.step(own, meter=True).peak_bytes,
    }


def _alone(setting: Setting) -> list[float]:
    """Losses of plain PyTorch on the whole batch."""
    model, batch = _model_and_batch(setting)
    step = plainly(model, _loss, batch)
    return [step() for _ in range(3)]


def _model_and_batch(setting: Setting) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    width = 32 if setting.tiny else WIDTH
    model = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(6)
        )
    )
    return model.to(setting.device), tuple(torch.randn(2 * width, width).to(setting.device) for _ in range(2))  # type: ignore[return-value]


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()
