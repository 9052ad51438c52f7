"""Callbacks for the parts of a streamed step: capture uses them to tell phases apart, the meter to change threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final


class Watch:
    """Callbacks for the parts of a streamed step; these do nothing."""

    def forward(self) -> AbstractContextManager[object]:
        """Entered for each stretch of forward: that of a micro-batch, and of a block that runs again. Backward follows it."""
        return nullcontext()

    def goes_on(self) -> None:
        """A micro-batch goes on with its forward after others had their turn."""

    def update(self) -> AbstractContextManager[object]:
        """Entered for each update of the optimizer."""
        return nullcontext()

    def leave_thread(self) -> None:
        """The step goes on in another thread: called in the one that stops."""

    def enter_thread(self) -> None:
        """Called in the one that goes on."""


NO_WATCH: Final = Watch()
