"""What others say of a rank's bytes before it runs: DeepSpeed's estimators, and torch's tracker for `fully_shard`, which torchtitan's estimation used."""

from __future__ import annotations

from typing import Any

from sharding.arrangements import ByHand, gpt


def deepspeed(way: str, ranks: int) -> int | None:
    """Parameters, gradients and state on each rank, by DeepSpeed's own estimators. It has none for data parallelism, ZeRO 1 and activations."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    model = gpt()[0]
    if way == "zero2":
        return int(
            stage_1_and_2.estimate_zero2_model_states_mem_needs(
                stage_1_and_2.model_to_params(model), num_gpus_per_node=ranks, cpu_offload=False
            )[1]
        )
    if way == "zero3":
        return int(
            stage3.estimate_zero3_model_states_mem_needs(
                *stage3.model_to_params(model), num_gpus_per_node=ranks, cpu_offload=False, cpu_offload_params=False
            )[1]
        )
    return None


def tracked(way: str, ranks: int, *, checkpoint: bool = False) -> int | None:
    """The peak of a rank by `FSDPMemTracker`, of two steps on fake tensors under the fake process group; None for what `fully_shard` does not do.

    Args:
        way, ranks: as in settings of sharding.
        checkpoint: torch's checkpoint around every block.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from memfit.capture.process_group import fake_group
    from memfit.sharding.ways import mesh_of

    if way not in {"zero2", "zero3"}:
        return None
    with fake_group(ranks, 0) as group:
        mesh = mesh_of(group, "cpu")  # before the fake tensors: it reads the ranks
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _peak(ByHand(checkpoint=checkpoint, reshards=way == "zero3", mesh=mesh))


def _peak(arranged: ByHand) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(arranged.model, arranged.optimizer)
    tracker.track_inputs(tuple(arranged.sample.values()) if isinstance(arranged.sample, dict) else (arranged.sample,))
    with tracker:
        arranged.step()
        tracker.reset_mod_stats()
        arranged.step()
    peaks: Any = tracker.get_tracker_snapshot("peak")
    return sum(of_device["Total"] for of_device in peaks.values())
