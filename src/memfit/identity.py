"""Short names for what must be the same: a model's structure, a batch's shapes, a device."""

from __future__ import annotations

import hashlib
import json


def digest(*parts: object) -> str:
    """Short stable hash of JSON-able parts, for signatures and model identity."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
