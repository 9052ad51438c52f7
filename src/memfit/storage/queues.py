"""Threads that copy while the main one computes: jobs in order, one at a time.

`JobQueue` only runs them. `Worker` also keeps a CUDA stream in step with the one that submits, and stops at the first job that fails.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch

Job = Callable[[], None]


class JobQueue:
    """One thread that does jobs in the order in which they are put; it ends when the queue is closed or collected.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._jobs, thread)

    def put(self, job: Job) -> None:
        """Do this after all that was put before. It must not raise: nothing would report the exception."""
        self._jobs.put(job)

    def close(self) -> None:
        """Return when all jobs are done and the thread has ended."""
        self._finalizer()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # the queue may stay empty for long, and what the job holds must not wait for it


def _end(jobs: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a collection may run anywhere
        thread.join()


class Worker:
    """Does jobs in order, in a thread of its own; on CUDA on a stream of its own.

    A job starts after what the submitting thread has put on its stream, and is done when its own stream is. After an error no further job is begun until
    `settle`: what later ones would read is not there.

    Args:
        device: that the jobs copy to and from.
        inline: do each job at once where it is submitted, for a step that is only captured.
    """

    def __init__(self, device: torch.device, *, inline: bool = False) -> None:
        self._queue = None if inline else JobQueue("memfit worker")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not inline else None
        self._error: BaseException | None = None
        self._last: Future[None] | None = None

    def submit(self, job: Job, seconds: list[float] | None = None) -> Future[None]:
        """Do this after all that was submitted before.

        Args:
            job: what to do.
            seconds: where to note how long it took.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        done: Future[None] = Future()

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

        def told() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                done.set_exception(error)
            else:
                done.set_result(None)

        self._last = done
        if self._queue is not None:
            self._queue.put(told)
        else:
            told()
            done.result()
        return done

    def drain(self) -> None:
        """Wait until everything is done.

        Raises:
            Exception: of the first job that failed.
        """
        if self._last is not None:
            self._last.result()

    def settle(self) -> None:
        """Wait until no job runs and forget failures; jobs submitted from now on are run again."""
        if self._last is not None:
            self._last.exception()
        self._last = self._error = None

    def close(self) -> None:
        """End the thread."""
        if self._queue is not None:
            self._queue.close()
