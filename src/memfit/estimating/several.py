"""A step of a named model on several GPUs that need not be here: the bytes of each and the seconds, for every way to share the step out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from memfit.capture.trace_source import machine_of
from memfit.clusters import RECOMPUTED, ClusterPrediction, fastest, predict_cluster, predict_ways
from memfit.devices import several_devices, share_of
from memfit.errors import InputError
from memfit.estimating.estimate import SHARE, allowed, check_size, in_words, script
from memfit.estimating.long_forward import check_operations
from memfit.estimating.methods import METHODS, Method, least_bytes, method_of
from memfit.estimating.models import Named
from memfit.hardware.machine import known_machine
from memfit.hardware.machine_file import SUFFIXES
from memfit.hardware.topology import Topology
from memfit.progress import Progress, tell
from memfit.techniques.sharding import WAYS
from memfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class SeveralEstimate:
    """The answer.

    Attributes:
        title: of the model.
        parameters, trained: numbers of weights, and of those that are trained.
        method: how it is trained.
        gpus: as they were named.
        topology: of them.
        budget_bytes: what a step may take of each.
        batch, length: of a step on each; length 0 where samples are as long as they are.
        predictions: one for each way to share the step out and each part of the blocks that is recomputed.
        weights_bytes: in host memory while each process reads them.
        disk_bytes: of the weights' files, or what they will be.
        lines: Python that trains so, on every GPU.
        command: that starts it.
        notes: what the reader should know.
    """

    title: str
    parameters: int
    trained: int
    method: Method
    gpus: str
    topology: Topology
    budget_bytes: int
    batch: int
    length: int
    predictions: tuple[ClusterPrediction, ...]
    weights_bytes: int
    disk_bytes: int
    lines: str
    command: str
    notes: tuple[str, ...]

    @property
    def best(self) -> ClusterPrediction | None:
        """The fastest that fits; None where nothing does."""
        return fastest(self.predictions, self.budget_bytes)

    @property
    def least(self) -> ClusterPrediction:
        """What takes the fewest bytes."""
        return min(self.predictions, key=lambda each: each.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        best = self.best
        return {
            "fits": best is not None,
            "model": self.title,
            "parameters": self.parameters,
            "trained": self.trained,
            "method": self.method.name,
            "gpus": self.gpus,
            "ranks": len(self.topology.devices),
            "budget_bytes": self.budget_bytes,
            "batch": self.batch,
            "length": self.length or None,
            "way": best.way if best else None,
            "recompute": best.recompute if best else None,
            "peak_bytes": best.peak_bytes if best else None,
            "minimum_bytes": self.least.peak_bytes,
            "step_seconds": best.step_seconds if best else None,
            "overlapped_seconds": best.overlapped_seconds if best else None,
            "predictions": [
                {**asdict(each), "fits": each.peak_bytes <= self.budget_bytes} for each in self.predictions
            ],
            "weights_bytes": self.weights_bytes,
            "disk_bytes": self.disk_bytes,
            "python": self.lines,
            "command": self.command,
            "notes": list(self.notes),
        }


def gpus_of(gpus: str) -> Topology:
    """The GPUs that were named.

    Raises:
        InputError: they cannot be read, are no GPUs, or not alike.
        ConfigError: the machine file cannot be read.
    """
    found = several_devices(gpus, machine_of(nn.Linear(1, 1), None))
    if any(machine.kind != "cuda" for machine in found.devices):
        last = gpus.partition("@")[0].replace("*", "x").rpartition("x")[2].strip()
        if not gpus.endswith(SUFFIXES):
            known_machine(last)  # which says what is meant, where it is close to a name
        raise InputError(
            f'--gpu {gpus}: that names no GPU; write how many and which, as "4x4090" ("memfit estimate --help" lists them)'
        )
    return found


def estimate_on_several(
    named: Named,
    gpus: str,
    *,
    method: str | None = None,
    batch: int = 1,
    length: int = 1024,
    budget: str | int = SHARE,
    progress: Progress | None = None,
) -> SeveralEstimate:
    """Estimate training of a model on several GPUs, by captures of a few of its blocks.

    Args:
        named: the model.
        gpus: how many and which; none need be here.
        method: "full" or "lora"; None for the first of them whose weights, gradients and optimizer state fit when they are shared out.
        batch, length: of a step on each GPU.
        budget: bytes that a step may take of each, or a share of its memory.
        progress: told what is being done.

    Raises:
        InputError, CaptureError: as for `estimate`; or the method does not share its weights out, or the model has no repeated blocks.
    """
    check_size(named, batch, length)
    topology = gpus_of(gpus)
    machine, ranks = topology.devices[0], len(topology.devices)
    budget_bytes = share_of(topology, budget)
    if method == "qlora":
        raise InputError(
            f"--method qlora on {gpus}: weights in 4 bits are not shared out among GPUs; ask for one of them (--gpu {machine.name}), which then holds all of "
            "them, or for --method lora"
        )
    tell(progress, "building the model without its weights", 0.0)
    ways = [name for name in METHODS if name != "qlora"] if method is None else [method]
    for name in ways:
        chosen = method_of(name, bf16=machine.bf16)
        bare = named.built(chosen.dtype)
        if name == ways[-1] or least_bytes(bare, chosen) / ranks < budget_bytes:
            break
    weights_bytes, parameters = (
        sum(each) for each in zip(*((p.nbytes, p.numel()) for p in bare.parameters()), strict=True)
    )
    each_bytes = least_bytes(bare, chosen) // ranks
    chosen, model = chosen.on(bare)
    check_operations(named, model, batch, length, each_bytes, budget_bytes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sample = named.sample(batch, length)

    def told(done: int, text: str, share: float) -> None:
        tell(progress, text, (done + share) / len(WAYS))

    def predict(way: str) -> tuple[ClusterPrediction, ...]:
        return predict_cluster(
            model, sample, named.loss_fn, devices=topology, way=way, recompute=tuple(RECOMPUTED),
            precision=chosen.settings.get("precision", "full"),
            progress=partial(told, WAYS.index(way)),
        )  # fmt: skip

    with named.captured():
        predictions, refused = predict_ways(WAYS, predict)
    notes = [
        *named.notes,
        "here the loss head is not divided into chunks, and the batch not split; a plan (memfit plan --devices) may do both",
        *refused,
    ]
    if weights_bytes > budget_bytes:
        notes.append(
            f"each process reads all weights, {format_bytes(weights_bytes)}, before they are shared out, more than a GPU has to spare: these lines cannot read "
            "them onto it"
        )
    tell(progress, "estimated", 1.0)
    best = fastest(predictions, budget_bytes)
    lines = _lines(named, chosen, best, gpus, batch, length, budget_bytes)
    return SeveralEstimate(
        named.title, parameters, trained, chosen, gpus, topology, budget_bytes, batch, length if named.has_length else 0, predictions, weights_bytes,
        named.disk_bytes or parameters * 2, lines, _command(topology), tuple(notes),
    )  # fmt: skip


def _lines(
    named: Named,
    method: Method,
    best: ClusterPrediction | None,
    gpus: str,
    batch: int,
    length: int,
    budget_bytes: int,
) -> str:
    """The Python that trains so; each process runs it."""
    fixed = {**method.settings} if best is None else {**method.settings, "sharding": best.way, "micro_batches": 1}
    arguments = [in_words(budget_bytes), *allowed(method), f'devices="{gpus}"', f"fixed={fixed}"]
    where = ('device = f"cuda:{os.environ[\'LOCAL_RANK\']}" if torch.cuda.is_available() else "cpu"',)
    return script(
        named,
        method,
        (*where, "torch.manual_seed(0)  # the same weights in every process"),
        batch,
        length,
        arguments,
        ("import os", ""),
    )


def _command(topology: Topology) -> str:
    """That starts a process on every GPU."""
    sizes = (len(topology.devices),) if topology.nodes is None else topology.nodes.sizes
    nodes = "" if len(sizes) == 1 else f" --nnodes {len(sizes)} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    return f"torchrun{nodes} --nproc-per-node {sizes[0]} train.py"
