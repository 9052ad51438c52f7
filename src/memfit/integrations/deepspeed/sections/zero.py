"""`zero_optimization`: what ranks share out among themselves, and what is moved off the device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import keys
from memfit.integrations.deepspeed.values import AUTO, Auto, ConfigReader, shown, within

Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class OffloadParam:
    """Where parameters are between uses; stage 3 only.

    Attributes:
        device: "none" (where they are used), "cpu" or "nvme".
        nvme_path: folder on the disk.
        buffer_count, buffer_size: buffers for the disk, and the elements of each.
        max_in_cpu: elements that stay in the host's memory when there is a disk.
        pin_memory: page-locked host memory.
    """

    device: Device | Auto = "none"
    nvme_path: str | Auto | None = None
    buffer_count: int | Auto = field(default=5, metadata=within(least=0))
    buffer_size: int | Auto = field(default=100_000_000, metadata=within(least=0))
    max_in_cpu: int | Auto = field(default=1_000_000_000, metadata=within(least=0))
    pin_memory: bool | Auto = True


@dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    """Where the optimizer's state is between updates; from stage 1 on.

    Attributes:
        device, nvme_path, buffer_count, pin_memory: as for parameters.
        pipeline_read, pipeline_write, fast_init: how the disk is read and written.
        ratio: share of the state that is moved; below 1 refused.
        super_offload, cpuadam_cores_perc: which processor updates, and how many of its cores.
    """

    device: Device | Auto = "none"
    nvme_path: str | Auto | None = None
    buffer_count: int | Auto = field(default=4, metadata=within(least=0))
    pin_memory: bool | Auto = True
    pipeline_read: bool | Auto = False
    pipeline_write: bool | Auto = False
    fast_init: bool | Auto = False
    ratio: float | Auto = field(default=1.0, metadata=within(least=0, most=1))
    super_offload: bool | Auto = False
    cpuadam_cores_perc: float | Auto = field(default=0.8, metadata=within(least=0, most=1))


@dataclass(frozen=True, slots=True)
class ZeroOptimization:
    """What ranks share out among themselves, and what is moved off the device.

    On one rank every stage holds as it is: what is shared out among one stays there. The sizes of buckets and the order of messages, which most
    keys are about, are DeepSpeed's own way of doing it; they are read, checked and kept, and have no effect.

    Attributes:
        stage: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        offload_param, offload_optimizer: what is moved; None for nothing said. The deprecated cpu_offload and cpu_offload_param stand here too.
        zero_quantized_weights, zero_quantized_nontrainable_weights, zero_quantized_gradients: ZeRO++; refused, since they change values.
        zenflow: updates that lag behind; refused, since they change results.
        leaf_module: modules taken as wholes.
    """

    stage: int | Auto = field(default=0, metadata=within(least=0, most=3))
    contiguous_gradients: bool | Auto = True
    reduce_scatter: bool | Auto = True
    reduce_bucket_size: int | Auto = field(default=500_000_000, metadata=within(least=1))
    use_multi_rank_bucket_allreduce: bool | Auto = True
    allgather_partitions: bool | Auto = True
    allgather_bucket_size: int | Auto = field(default=500_000_000, metadata=within(least=0))
    overlap_comm: bool | Auto | None = None
    compute_grad_norm: bool | Auto = True
    load_from_fp32_weights: bool | Auto = True
    elastic_checkpoint: bool | Auto = False
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: Mapping[str, Any] | None = None
    sub_group_size: int | Auto = field(default=1_000_000_000, metadata=within(least=0))
    cpu_offload_param: bool | Auto | None = None
    cpu_offload_use_pin_memory: bool | Auto | None = None
    cpu_offload: bool | Auto | None = None
    prefetch_bucket_size: int | Auto = field(
        default=50_000_000, metadata=within(least=0, name="stage3_prefetch_bucket_size")
    )
    param_persistence_threshold: int | Auto = field(
        default=100_000, metadata=within(least=0, name="stage3_param_persistence_threshold")
    )
    model_persistence_threshold: int | Auto = field(
        default=sys.maxsize, metadata=within(least=0, name="stage3_model_persistence_threshold")
    )
    max_live_parameters: int | Auto = field(
        default=1_000_000_000, metadata=within(least=0, name="stage3_max_live_parameters")
    )
    max_reuse_distance: int | Auto = field(
        default=1_000_000_000, metadata=within(least=0, name="stage3_max_reuse_distance")
    )
    gather_16bit_weights_on_model_save: bool | Auto = field(
        default=False, metadata=within(name="stage3_gather_16bit_weights_on_model_save")
    )
    module_granularity_threshold: int | Auto = field(
        default=0, metadata=within(name="stage3_module_granularity_threshold")
    )
    use_all_reduce_for_fetch_params: bool | Auto = field(
        default=False, metadata=within(name="stage3_use_all_reduce_for_fetch_params")
    )
    allgather_sequential: bool | Auto = field(default=False, metadata=within(name="stage3_allgather_sequential"))
    stage3_gather_fp16_weights_on_model_save: bool | Auto = False
    ignore_unused_parameters: bool | Auto = True
    legacy_stage1: bool | Auto = False
    round_robin_gradients: bool | Auto = False
    parameter_alignment: bool | Auto = False
    zero_hpz_partition_size: int | Auto = field(default=1, metadata=within(least=0))
    zero_quantized_weights: bool | Auto = False
    zero_quantized_nontrainable_weights: bool | Auto = False
    zero_quantized_gradients: bool | Auto = False
    memory_efficient_linear: bool | Auto = True
    pipeline_loading_checkpoint: bool | Auto = False
    override_module_apply: bool | Auto = True
    log_trace_cache_warnings: bool | Auto = False
    enable_sanity_checks: bool | Auto = False
    save_muon_momentum_buffer_in_memory: bool | Auto = False
    leaf_module: Mapping[str, Any] = field(default_factory=dict)

    @property
    def moves_state(self) -> Device | Auto | None:
        """Where the optimizer's state is offloaded; None where nothing is said."""
        return None if self.offload_optimizer is None else self.offload_optimizer.device

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters are offloaded."""
        return self.offload_param is not None and self.offload_param.device not in {"none", AUTO}

    @property
    def state_goes_with_parameters(self) -> bool:
        """Whether optimizer state is offloaded to where parameters are: the same device, the same folder."""
        state, parameters = self.offload_optimizer, self.offload_param
        if state is None or parameters is None or state.device not in {"cpu", "nvme"}:
            return True
        return (state.device, state.nvme_path) == (parameters.device, parameters.nvme_path)


def read_zero(given: Mapping[str, Any], reader: ConfigReader, world_size: int) -> ZeroOptimization:
    """The section, in its present form where the file has an old one.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.
        world_size: ranks that share the batch.

    Raises:
        ConfigError: a key that is gone, a placement without its stage, or what changes results.
    """
    data = given.get("zero_optimization", {})
    if isinstance(data, bool):
        reader.notices.append(f"zero_optimization: {shown(data)} is the old form of stage {int(data)}")
        data = {"stage": int(data)}
    for key in data if isinstance(data, Mapping) else ():
        if key in keys.REMOVED_ZERO:
            raise ConfigError(
                f"zero_optimization.{key}: DeepSpeed {keys.VERSION} has it no longer, and refuses it: {keys.REMOVED_ZERO[key]}"
            )
    if isinstance(data, Mapping) and "leaf_module" in data:
        reader.known(data["leaf_module"], "zero_optimization.leaf_module", keys.LEAF_MODULE, closed=True)
    zero = _without_old_names(reader.section(ZeroOptimization, data, "zero_optimization", closed=True), reader.notices)
    _check_stage(zero)
    for key in ("zenflow", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, key) not in (None, False, AUTO):
            raise ConfigError(
                f"zero_optimization.{key}: cannot be honoured: it changes results, and memfit's plans do not"
            )
    if isinstance(zero.stage, int) and zero.stage > 0 and world_size == 1:
        reader.notices.append(
            f"zero_optimization.stage {zero.stage} holds as it is on one rank: what is shared out among one stays there"
        )
    if world_size > 1 and isinstance(data, Mapping):
        reader.notices.extend(
            f"zero_optimization.{key} has no effect: {keys.ZERO_ON_RANKS[key]}"
            for key in data
            if key in keys.ZERO_ON_RANKS
        )
    return zero


def _without_old_names(zero: ZeroOptimization, notices: list[str]) -> ZeroOptimization:
    for old, new, section in (
        ("cpu_offload", "offload_optimizer", OffloadOptimizer),
        ("cpu_offload_param", "offload_param", OffloadParam),
    ):
        value = getattr(zero, old)
        if value in (None, AUTO):
            continue
        if getattr(zero, new) is not None:
            raise ConfigError(f"zero_optimization: {old} is the old name of {new}: give one of them")
        notices.append(f'zero_optimization.{old} is the old form of {new}: {{"device": "cpu"}}')
        if value is True:
            moved: dict[str, Any] = {new: section(device="cpu")}
            zero = replace(zero, **moved)
    return zero


def _check_stage(zero: ZeroOptimization) -> None:
    path = "zero_optimization"
    if zero.compute_grad_norm is False and zero.stage not in (1, 2, AUTO):
        raise ConfigError(f"{path}.compute_grad_norm: false goes with stage 1 or 2, not with stage {zero.stage}")
    state, parameters = zero.offload_optimizer, zero.offload_param
    if state is not None and state.device in {"cpu", "nvme"} and zero.stage == 0:
        raise ConfigError(
            f"{path}.offload_optimizer: goes with stage 1, 2 or 3, and DeepSpeed drops it at stage 0: give a stage"
        )
    if state is not None and not isinstance(state.ratio, Auto) and state.ratio < 1:
        raise ConfigError(
            f"{path}.offload_optimizer.ratio: {state.ratio} cannot be honoured: memfit moves all state or none"
        )
    if parameters is not None and parameters.device in {"cpu", "nvme"} and zero.stage not in (3, AUTO):
        raise ConfigError(
            f"{path}.offload_param: goes with stage 3, and DeepSpeed drops it at stage {zero.stage}: give stage 3"
        )
    for name, part in (("offload_optimizer", state), ("offload_param", parameters)):
        if part is not None and part.device == "nvme" and part.nvme_path is None:
            raise ConfigError(f"{path}.{name}.nvme_path is missing: the folder to write to")
