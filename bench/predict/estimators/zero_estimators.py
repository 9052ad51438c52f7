"""DeepSpeed's estimator for ZeRO-2 on one GPU without offload."""

from __future__ import annotations

from predict.estimators import NotEstimated
from rivals.subjects import Subject

NAME = "DeepSpeed estimate_zero2"
PACKAGE, INSTALL = "deepspeed", "deepspeed==0.19.8"
NOTE = "20 bytes a parameter: it has mixed precision in mind."
COVERS = "weights, gradients, Adam's state; no activations"


def estimate(subject: Subject, optimizer: str) -> int:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs, model_to_params

    if not optimizer.startswith("AdamW"):
        raise NotEstimated("Adam only")
    parameters = model_to_params(subject.build()[0])
    _, on_device = estimate_zero2_model_states_mem_needs(
        total_params=parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=False
    )
    return int(on_device)
