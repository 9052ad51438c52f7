"""How long work tells whoever waits what is being done, and the share done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]


def tell(progress: Progress | None, what: str, share: float) -> None:
    """Say what is being done, and the share done, to whoever wants to know."""
    if progress is not None:
        progress(what, share)
