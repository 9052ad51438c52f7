"""Hugging Face's Trainer under a budget: `memfit.transformers.fit(trainer, budget="8GiB")`, and `trainer.train()` as ever.

What Trainer does stays Trainer's: data, backward (Accelerate's), clipping, optimizer, schedule, logging, saving, resuming. memfit plans for that step, divides
the batch where the plan says so, and follows forward and loss.
"""

from __future__ import annotations

from memfit.integrations.transformers.fitting import FitToMemory, fit

__all__ = ["FitToMemory", "fit"]
