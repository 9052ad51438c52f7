"""The environment variable that limits the memory of a run that trains: bytes, or bytes for each rank ("1000,2000"). Read without torch by whoever sets it."""

from __future__ import annotations

from typing import Final

VARIABLE: Final = "MEMFIT_MEMORY_LIMIT"
