"""Python's cyclic garbage collector, switched off for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection starts by itself inside; reference counts go on as ever.

    Planning and reading a trace make millions of small objects that live on and form no cycles: looking through them again and again takes longer than
    making them. And in a step that is written down or metered, a collection would release cycles at a moment that no other run repeats.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
