"""Ctrl-C and SIGTERM as a request: the running step is finished, so what is saved is the state after a whole step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has asked the training to stop.

    Attributes:
        signal: number of the signal that came; None when none has.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """While the block runs, the first signal sets the request and the second one interrupts.

    Outside the main thread Python allows no handlers: the request then stays as it is.

    Args:
        say: told that the first one has come.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal = number
        say("stopping: the running step is finished and a snapshot written; once more stops at once, without one")

    before = {each: signal.signal(each, on_signal) for each in _SIGNALS}
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
