"""Flat buffers and what lies where in them; and the worker that fills and empties them beside the computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from memfit import dispatch

ALIGNMENT_BYTES: Final = 64  # what torch's own allocator gives on the CPU


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie in a flat buffer.

    Attributes:
        places: of each tensor its offset in bytes, shape, stride and dtype.
        size_bytes: of the buffer.
    """

    places: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        """One after the other, in their own order of dimensions where they are dense."""
        places = []
        end = 0
        for tensor in tensors:
            stride = tensor.stride() if dispatch.is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            places.append((end, tuple(tensor.shape), tuple(stride), tensor.dtype))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(places), end)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, in a flat uint8 buffer of at least `size_bytes`."""
        out = []
        for offset, shape, stride, dtype in self.places:
            size = dtype.itemsize
            for n in shape:
                size *= n
            out.append(flat[offset : offset + size].view(dtype).as_strided(shape, stride))
        return out


@dataclass(slots=True, eq=False)
class Slot:
    """Room on the device for one layer.

    Attributes:
        weights, gradients: flat uint8 buffers.
        layer: number of the layer whose weights are in it, or on their way into it; None for none.
        loading: the job that brings them.
    """

    weights: Tensor
    gradients: Tensor
    layer: int | None = None
    loading: Future[None] | None = None
    _views: dict[tuple[Layout, bool], list[Tensor]] = field(default_factory=dict)

    def views(self, layout: Layout, *, gradients: bool = False) -> list[Tensor]:
        """Of one layer's tensors; layers of one layout share them."""
        key = (layout, gradients)
        if key not in self._views:
            self._views[key] = layout.views(self.gradients if gradients else self.weights)
        return self._views[key]


class Worker:
    """Does jobs in order, in a thread beside the computation; on CUDA on a stream of its own.

    A job starts after what the submitting thread has put on its stream, and is done when its own stream is. After an error no further job is begun until
    `settle`: what later ones would read is not there.

    Args:
        device: that the jobs copy to and from.
        inline: do each job at once where it is submitted, for a step that is only written down.
    """

    def __init__(self, device: torch.device, *, inline: bool = False) -> None:
        self._pool = None if inline else ThreadPoolExecutor(1, "memfit-tier")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not inline else None
        self._error: BaseException | None = None
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None], seconds: list[float] | None = None) -> Future[None]:
        """Do this after all that was submitted before.

        Args:
            job: what to do.
            seconds: where to note how long it took.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

        def run() -> None:
            if self._error is not None:
                raise self._error
            started = time.perf_counter()
            try:
                if self._stream is None or ready is None:
                    job()
                else:
                    with torch.cuda.stream(self._stream):
                        self._stream.wait_event(ready)
                        job()
                        self._stream.synchronize()
            except BaseException as error:
                self._error = error
                raise
            if seconds is not None:
                seconds.append(time.perf_counter() - started)

        if self._pool is None:
            self._last = Future()
            run()
            self._last.set_result(None)
        else:
            self._last = self._pool.submit(run)
        return self._last

    def drain(self) -> None:
        """Wait until everything is done.

        Raises:
            Exception: of the first job that failed.
        """
        if self._last is not None:
            self._last.result()

    def settle(self) -> None:
        """Wait until nothing runs, whatever became of it; jobs submitted from now on begin anew."""
        if self._last is not None:
            self._last.exception()
        self._last = self._error = None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()
