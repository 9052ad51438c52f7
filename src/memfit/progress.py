"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]


def tell(progress: Progress | None, what: str, share: float) -> None:
    """Report what is being done, and the share done (0 to 1), where a callback was given."""
    if progress is not None:
        progress(what, share)
