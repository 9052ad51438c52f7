"""Lightning's Trainer under a budget: `Trainer(callbacks=[memfit.lightning.FitToMemory(budget="8GiB")])`.

What Lightning does stays Lightning's: data, backward, clipping, optimizer, schedule, logging, checkpoints. memfit plans for that step and follows
`training_step`. For Fabric there is `memfit.fit(..., fabric=fabric)`.
"""

from __future__ import annotations

from memfit.errors import InputError

try:
    from memfit.integrations.lightning.fitting import FitToMemory
except ImportError as error:
    raise InputError("memfit.lightning needs lightning: pip install 'memfit[lightning]'") from error

__all__ = ["FitToMemory"]
