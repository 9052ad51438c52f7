"""How much of the copying ran while a device computed, from the intervals that a profiler saw. Apart from `run`, so that a test needs no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Span = tuple[float, float]  # seconds


def device_spans(events: Iterable[Any]) -> tuple[list[Span], list[Span], list[Span]]:
    """What the device did: kernels of the stream that computes most, copies to the host, copies from it; in seconds.

    Only that one stream computes the step: where others run kernels (an optimizer beside backward), copies hide behind the step, not behind these.

    Args:
        events: `torch.profiler.profile.events()`, whose times are microseconds.
    """
    kernels: dict[Any, list[Span]] = {}
    down: list[Span] = []
    up: list[Span] = []
    for event in events:
        if event.device_type != torch._C._autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.name.startswith("Memcpy DtoH"):
            down.append(span)
        elif event.name.startswith("Memcpy HtoD"):
            up.append(span)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.setdefault(event.device_resource_id, []).append(span)
    busiest = max(kernels.values(), key=lambda spans: sum(end - start for start, end in spans), default=[])
    return busiest, down, up


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same stretches of time, in order, none touching another."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def hidden_share(copies: Sequence[Span], kernels: Sequence[Span]) -> float | None:
    """Of the time in which something is copied, the part in which something computes too; None where nothing is copied."""
    copying, computing = merged(copies), merged(kernels)
    whole = sum(end - start for start, end in copying)
    if not whole:
        return None
    both = 0.0
    place = 0
    for start, end in copying:
        while place < len(computing) and computing[place][1] <= start:
            place += 1
        at = place
        while at < len(computing) and computing[at][0] < end:
            both += min(end, computing[at][1]) - max(start, computing[at][0])
            at += 1
    return both / whole
