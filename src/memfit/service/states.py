"""The states of a run of the service, and what a person may ask of a run in each."""

from __future__ import annotations

from typing import Final, Literal

State = Literal["planning", "waiting", "running", "paused", "planned", "done", "failed", "refused", "cancelled"]
Asked = Literal["", "cancel", "pause"]

PLANNING: Final = "planning"  # submitted; whether it fits is being found out
WAITING: Final = "waiting"  # planned, and in the queue
RUNNING: Final = "running"  # promised its bytes, in a process of its own
PAUSED: Final = "paused"  # out of the queue until it is resumed, with what its last snapshot holds
PLANNED: Final = "planned"  # fits; nothing but a plan was asked for
DONE: Final = "done"
FAILED: Final = "failed"
REFUSED: Final = "refused"  # cannot fit, or cannot be planned; nothing of it was started
CANCELLED: Final = "cancelled"

LIVE: Final = (PLANNING, WAITING, RUNNING, PAUSED)
OVER: Final = (PLANNED, DONE, FAILED, REFUSED, CANCELLED)
"""In the last ones nothing happens any more."""
