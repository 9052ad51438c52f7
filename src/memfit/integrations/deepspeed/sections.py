"""The sections of a DeepSpeed configuration that memfit reads value by value, with DeepSpeed's defaults. Frozen, torch-free."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.integrations.deepspeed.values import AUTO, Auto, within

Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Which optimizer.

    Attributes:
        type: one of DeepSpeed's, in lower case, or a name in torch.optim. "adam" means AdamW unless `params` say adam_w_mode: false.
        params: its settings as they stand in the file; single ones may be "auto".
        legacy_fusion: of DeepSpeed's kernels; without effect.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)
    legacy_fusion: bool = False


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How the learning rate changes.

    Attributes:
        type: one of DeepSpeed's schedules, or a name in torch.optim.lr_scheduler.
        params: its settings as they stand in the file; single ones may be "auto".
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fp16:
    """Training in fp16.

    Attributes:
        enabled: whether.
        auto_cast: cast the inputs too; under autocast, operations cast theirs.
        loss_scale: fixed factor of the loss; 0 for one that adapts itself, which the next five describe.
        initial_scale_power: it starts at two to this power.
        loss_scale_window: steps without overflow until it doubles.
        hysteresis, consecutive_hysteresis: overflows that are let pass before it halves, and whether a step without one starts counting anew.
        min_loss_scale: below which it does not fall.
        fp16_master_weights_and_grads: no copies in fp32; refused.
    """

    enabled: bool | Auto = False
    auto_cast: bool | Auto = False
    loss_scale: float | Auto = field(default=0.0, metadata=within(least=0))
    initial_scale_power: int | Auto = 16
    loss_scale_window: int | Auto = 1000
    hysteresis: int | Auto = 2
    consecutive_hysteresis: bool | Auto = False
    min_loss_scale: int | Auto = 1
    fp16_master_weights_and_grads: bool | Auto = False


@dataclass(frozen=True, slots=True)
class Bf16:
    """Training in bf16.

    Attributes:
        enabled: whether.
        immediate_grad_update: when DeepSpeed adds gradients up; the sums are the same.
        check_grad_overflow: skip a step whose gradients are not finite.
        bf16_master_weights_and_grads, bf16_optimizer_states: no copies in fp32, no state in fp32; refused.
    """

    enabled: bool | Auto = False
    immediate_grad_update: bool | Auto = False
    check_grad_overflow: bool | Auto = True
    bf16_master_weights_and_grads: bool | Auto = False
    bf16_optimizer_states: bool | Auto = False


@dataclass(frozen=True, slots=True)
class TorchAutocast:
    """torch's own autocast.

    Attributes:
        enabled: whether; no "auto", which DeepSpeed would take for true.
        dtype: "bf16" or "fp16"; None where nothing is said.
        lower_precision_safe_modules: classes whose parameters DeepSpeed sends in that dtype; refused.
    """

    enabled: bool = False
    dtype: str | None = None
    lower_precision_safe_modules: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class OffloadParam:
    """Where parameters lie between uses; stage 3 only.

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
    """Where the optimizer's state lies between updates; from stage 1 on.

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
    keys are about, have nothing to act on; they are read, checked and kept.

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
        """Where the optimizer's state is to lie; None where nothing is said."""
        return None if self.offload_optimizer is None else self.offload_optimizer.device

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters are to lie off the device."""
        return self.offload_param is not None and self.offload_param.device not in {"none", AUTO}


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """How DeepSpeed's own checkpoint function keeps what it is called on. It switches nothing on, in DeepSpeed either.

    Attributes:
        partition_activations: share what is kept out among model-parallel ranks.
        cpu_checkpointing: keep it in the host's memory.
        contiguous_memory_optimization, number_checkpoints: in one buffer, for so many.
        synchronize_checkpoint_boundary, profile: wait for the device at each; time them.
    """

    partition_activations: bool | Auto = False
    cpu_checkpointing: bool | Auto = False
    contiguous_memory_optimization: bool | Auto = False
    number_checkpoints: int | Auto | None = field(default=None, metadata=within(least=1))
    synchronize_checkpoint_boundary: bool | Auto = False
    profile: bool | Auto = False
