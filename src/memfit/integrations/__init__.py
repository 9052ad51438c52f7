"""Integrations: trainers and configurations that people have already, run inside a byte budget.

`transformers` and `lightning` work inside another library's training loop; what they share is in `adapter` (one step under a plan) and `window` (the samples of
one step, and a plan for them). `deepspeed` reads DeepSpeed's configuration and trains what it describes; `paddle` has PaddlePaddle's optimizer that
recomputes. Fabric's users call `memfit.fit(..., fabric=fabric)`, which steps through `memfit.engine.fabric`.
"""
