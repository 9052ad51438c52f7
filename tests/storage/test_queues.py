"""Jobs are done in order, and a job that fails is told to whoever waits, who never waits for ever."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest
import torch

from memfit.storage.queues import JobQueue, Worker

CPU = torch.device("cpu")


def failing() -> None:
    raise OSError("no disk")


@pytest.mark.parametrize("inline", [False, True])
def test_jobs_are_done_in_order_and_none_after_one_that_failed(inline: bool) -> None:  # noqa: FBT001 - a case
    worker, done, seconds = Worker(CPU, inline=inline), list[int](), list[float]()
    for number in range(5):
        worker.submit(partial(done.append, number), seconds)
    worker.drain()
    assert done == [0, 1, 2, 3, 4]
    assert len(seconds) == 5

    with pytest.raises(OSError, match="no disk"):
        worker.submit(failing).result()
    with pytest.raises(OSError, match="no disk"):
        worker.submit(lambda: done.append(5)).result()
    worker.settle()
    worker.submit(lambda: done.append(6)).result()
    assert done == [0, 1, 2, 3, 4, 6]
    worker.close()


def test_a_queue_that_nobody_holds_ends_its_thread() -> None:
    queue = JobQueue("memfit test of a queue")
    done = threading.Event()
    queue.put(done.set)
    assert done.wait(60)
    del queue
    gc.collect()
    assert not any(thread.name == "memfit test of a queue" for thread in threading.enumerate())
