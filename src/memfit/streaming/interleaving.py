"""Interleaved micro-batches: several forwards of one model take turns, and none continues past a waiting point before all have reached it.

A forward is a call of the user's own code and cannot be suspended, so each runs in a thread of its own; only one runs at any time. What torch keeps by
thread (modes, autocast, grad mode) is set in each as it is where they are started.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memfit.step import generators
from memfit.step.autocast import AutocastState


class _AbandonedError(BaseException):
    """Raised inside a micro-batch to end it; never leaves this module."""


class Onlooker(Protocol):
    """Is called when execution moves to another thread."""

    def leave_thread(self) -> None:
        """Called in the thread that stops."""

    def enter_thread(self) -> None:
        """Called in the thread that goes on."""


class _Surroundings:
    """What torch keeps by thread, as it is where this is made."""

    def __init__(self, device: torch.device) -> None:
        self.modes = [*_get_current_dispatch_mode_stack()]
        self.function_modes = [*_get_current_function_mode_stack()]
        self.autocast = AutocastState.present(device)
        self.grad = torch.is_grad_enabled()
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same in the thread that calls this."""
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(self.autocast.entered())
            for mode in (*self.function_modes, *self.modes):
                stack.enter_context(mode)
            yield


class _MicroBatch:
    """The forward of one micro-batch in a thread of its own, which runs only between `resume` and its own next `wait`."""

    def __init__(
        self, body: Callable[[], Any], surroundings: _Surroundings, seed: int | None, onlooker: Onlooker
    ) -> None:
        self._onlooker = onlooker
        self._seed = seed  # None: it begins with the generators as they are
        self.states: generators.States = ()  # of the generators where it waits; a few kilobytes, so not longer than that
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.abandoned = False
        self._body = body
        self._surroundings = surroundings
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="memfit micro-batch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        self._onlooker.enter_thread()
        try:
            if not self.abandoned:
                with self._surroundings.entered():
                    self.result = self._body()
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where they are run
            self.error = error
        finally:
            self.done = True
            self._onlooker.leave_thread()
            self._back.release()

    def resume(self) -> None:
        """Let it run until it waits or ends."""
        self._onlooker.leave_thread()
        self._go.release()
        self._back.acquire()
        self._onlooker.enter_thread()

    def enter_generators(self, device: torch.device) -> None:
        """The default generators go on where this micro-batch left them."""
        if self.states:
            generators.put_back(self.states, device)
            self.states = ()
        elif self._seed is not None:
            generators.seed(self._seed, device)

    def wait(self) -> None:
        """Called inside: let the others run."""
        self._onlooker.leave_thread()
        self._back.release()
        self._go.acquire()
        self._onlooker.enter_thread()
        if self.abandoned:
            raise _AbandonedError

    def abandon(self, *, running: bool) -> None:
        """Unwind it."""
        self.abandoned = True
        if running:
            self._back.acquire()
            self._onlooker.enter_thread()
        while not self.done:  # a forward may catch what it is unwound with
            self.resume()
        self._thread.join()


class Interleaving:
    """Forwards of micro-batches that take turns; a single one runs where it is, without a thread.

    With one, random numbers are drawn as if there were no turns. With several, the first draws from the default generators, and each other from
    generators seeded from their state and its own number.

    Args:
        device: whose generator, autocast and stream are looked after, beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: _MicroBatch | None = None

    def run(self, bodies: Sequence[Callable[[], Any]], onlooker: Onlooker) -> list[Any]:
        """Run them all; what they return. The first error of any of them ends the others and is raised."""
        if len(bodies) == 1:
            return [bodies[0]()]
        before = generators.taken(self._device)
        seeds = [None, *(generators.derived_seed(before, i) for i in range(1, len(bodies)))]
        del before
        surroundings = _Surroundings(self._device)
        micro_batches = [
            _MicroBatch(body, surroundings, seed, onlooker) for body, seed in zip(bodies, seeds, strict=True)
        ]
        try:
            while any(not micro_batch.done for micro_batch in micro_batches):
                for micro_batch in micro_batches:
                    if micro_batch.done:
                        continue
                    micro_batch.enter_generators(self._device)
                    self._running = micro_batch
                    micro_batch.resume()
                    self._running = None
                    if not micro_batch.done or micro_batch is micro_batches[0]:
                        micro_batch.states = generators.taken(self._device)
                    if micro_batch.error is not None:
                        raise micro_batch.error
        finally:
            if self._running is not micro_batches[0]:
                micro_batches[0].enter_generators(self._device)
            for micro_batch in micro_batches:
                if not micro_batch.done:
                    micro_batch.abandon(running=micro_batch is self._running)
            self._running = None
        return [micro_batch.result for micro_batch in micro_batches]

    def wait(self) -> None:
        """Called inside a body, at a point that each body reaches: returns when all others have reached it."""
        if self._running is not None:
            self._running.wait()
