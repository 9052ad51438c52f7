"""Lightning's Trainer under a budget: `Trainer(callbacks=[memfit.lightning.FitToMemory(budget="8GiB")])`.

What Lightning does stays Lightning's: data, backward, clipping, optimizer, schedule, logging, checkpoints. memfit plans for that step and follows
`training_step`. For Fabric there is `memfit.fit(..., fabric=fabric)`.
"""

from __future__ import annotations

from memfit.lightning.fitting import FitToMemory

__all__ = ["FitToMemory"]
