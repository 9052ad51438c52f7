"""What the operations of a published step do, from a capture of it on fake tensors; how long that takes on its card, and what was said before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Works = Sequence[tuple[Any, float, Any]]
"""What an operation does (`memfit.hardware.efficiency.Work`), how often in a step, and what it was taken to do before."""

FORMER_MATRIX, FORMER_BANDWIDTH = (
    0.6,
    0.8,
)  # of the data sheet's rates, for every operation, before kinds and sizes were told apart


def optimizer_of(name: str) -> Any:
    """The optimizers of these runs: all parameters at once."""
    import torch

    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)
    return lambda parameters: torch.optim.AdamW(parameters, fused=True)


def works_of(row: Mapping[str, Any]) -> Works:
    """The operations of one step, or of one of its passes where it is accumulated from several.

    Args:
        row: model, batch and tokens; precision: "fp32", or "fp16" by autocast, or with parameters of fp16 where `half_parameters` says so; tf32: in products.
    """
    import torch
    from networks import built

    from memfit.capture.capture import capture
    from memfit.capture.roofline import work_of
    from memfit.capture.source import StepSource
    from memfit.hardware.machine import known_machine
    from memfit.techniques.choices import BASELINE
    from memfit.values.trace import Phase

    half, layout = row.get("half_parameters", False), row.get("channels_last", False)
    model, sample, loss = built(
        row["model"], row["batch"], tokens=row.get("tokens", 0), channels_last=layout, half_parameters=half
    )
    capability = known_machine(row["device"]).capability
    source = StepSource(model, sample, loss, optimizer_of(row["optimizer"]), cuda=capability)
    autocast = row["precision"] == "fp16" and not half
    torch.backends.cuda.matmul.fp32_precision = "tf32" if row["tf32"] else "ieee"
    captured = capture(source, BASELINE.but(precision="fp16" if autocast else "full"))
    times: Counter[str] = Counter()
    for operation in captured.trace.operations:
        times[operation.key] += 1 / row.get("accumulated", 1) if operation.phase is Phase.OPTIMIZER else 1
    calls = {key: captured.calls[key] for key in times}
    return [(work_of(c), times[k], _formerly(c)) for k, c in calls.items() if c.made_bytes or c.written]


def _formerly(call: Any) -> Any:
    """The work that was seen in a call before: every tensor moved once, a grouped convolution's weights differentiated as if it had no groups."""
    from memfit.capture.roofline import HALF, flops_of
    from memfit.hardware.efficiency import Work

    flops = flops_of(call)
    if str(call.func) == "aten.convolution_backward.default":
        image, weight = (int(bool(wanted)) for wanted in call.args[10][:2])
        flops *= (image + call.args[9] * weight) / max(1, image + weight)
    half = any(tensor.dtype in HALF for tensor in call.tensors)
    return Work(flops=flops, moved_bytes=call.input_bytes + sum(call.made_bytes), half=half)


def capture_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for rows that run the same operations."""
    named = ("model", "batch", "tokens", "precision", "tf32", "channels_last", "half_parameters", "optimizer")
    return (*(row.get(name) for name in named), row.get("accumulated", 1))


def step_seconds(works: Works, device: str, efficiencies: Any = None) -> float:
    """As predicted; with other constants than those of memfit where some are given."""
    from memfit.hardware.efficiency import FITTED, work_seconds
    from memfit.hardware.machine import known_machine

    machine = known_machine(device)
    return sum(number * work_seconds(work, machine, efficiencies or FITTED) for work, number, _ in works)


def former_seconds(works: Works, device: str) -> float:
    """As predicted before: a roofline of the data sheet's rates in fp32 and 16 bits, less one part for products and one for traffic."""
    from memfit.hardware.machine import known_machine

    machine = known_machine(device)
    seconds = 0.0
    for _, number, work in works:
        rate = (machine.tensor_flops if work.half else machine.fp32_flops) * FORMER_MATRIX
        moving = work.moved_bytes / (machine.bandwidth * FORMER_BANDWIDTH)
        seconds += number * (max(work.flops / rate, moving) + machine.launch_seconds)
    return seconds


def operation_seconds(row: Mapping[str, Any], efficiencies: Any = None) -> tuple[float, float]:
    """Of one published operation: predicted, and published."""
    from memfit.hardware.efficiency import FITTED, Kind, Work, work_seconds
    from memfit.hardware.machine import known_machine

    if row["kind"] == "copy":
        work, published = Work(moved_bytes=row["bytes"]), row["bytes"] / row["gb_s"] / 1e9
    else:
        m, n, k, half = row["m"], row["n"], row["k"], row["units"] == "half"
        moved = (m * k + k * n + m * n) * (2 if half else 4)
        work = Work(Kind.PRODUCT, 2.0 * m * n * k, moved, half, row["units"] == "tf32", depth=k)
        published = work.flops / row["tflops"] / 1e12
    return work_seconds(work, known_machine(row["device"]), efficiencies or FITTED), published


def large(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Published operations that a GPU, and not the loop that starts them, takes the time of: from 10 MB, or a product of 600 rows, on."""
    return [r for r in rows if (r["bytes"] > 10e6 if r["kind"] == "copy" else r["m"] > 600)]
