"""The keys and names of one version of DeepSpeed that memfit does not act on itself: harmless here, refused, or no longer DeepSpeed's.

`config` acts on the others. Together they are what a misspelt key is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Whose keys, defaults and refusals are followed. Defaults have moved: gradient_clipping was 0 and pin_memory false in 0.16.
VERSION: Final = "0.19.8"

_REPORTS: Final = "what is printed, and when, is memfit's own"
ONE_RANK: Final = "it speaks of what ranks send each other, and there is one"
_BUCKETS: Final = (
    "torch's engines lay out buckets and messages in their own way, and what they hold is in the prediction"
)
_TRACKERS: Final = "memfit's own log has the figures"

# Read and checked as far as DeepSpeed checks them; they change neither results nor what is held.
HARMLESS: Final[Mapping[str, str]] = {
    "steps_per_print": _REPORTS,
    "wall_clock_breakdown": _REPORTS,
    "memory_breakdown": _REPORTS,
    "dump_state": _REPORTS,
    "log_level": _REPORTS,
    "timers": _REPORTS,
    "flops_profiler": "memfit counts operations when it plans",
    "comms_logger": ONE_RANK,
    "tensorboard": _TRACKERS,
    "wandb": _TRACKERS,
    "comet": _TRACKERS,
    "csv_monitor": _TRACKERS,
    "communication_data_type": ONE_RANK,
    "seq_parallel_communication_data_type": ONE_RANK,
    "prescale_gradients": ONE_RANK,
    "gradient_predivide_factor": ONE_RANK,
    "gradient_allreduce_op": ONE_RANK,
    "disable_allgather": ONE_RANK,
    "allgather_size": ONE_RANK,
    "use_data_before_expert_parallelism": ONE_RANK,
    "autotuning": "memfit plans, and has nothing to try out",
    "aio": "memfit writes to disk in its own way",
    "checkpoint": "memfit writes its own snapshots",
    "datastates_ckpt": "memfit writes its own snapshots",
    "dataloader_drop_last": "the loader is yours, and decides what becomes of the last batch",
    "disable_python_gc": "memfit leaves Python's garbage collection on",
    "vocabulary_size": "it only warns of sizes that are no multiple of 8",
    "zero_allow_untested_optimizer": "memfit plans with any optimizer of torch",
    "zero_force_ds_cpu_optimizer": "memfit takes the optimizer that the configuration or you name",
}

# Of these, what several ranks send each other: torch's engines average gradients in the parameters' own type.
MESSAGES: Final[Mapping[str, str]] = {
    "prescale_gradients": "gradients are averaged by torch's engines: the same up to rounding",
    "gradient_predivide_factor": "gradients are averaged by torch's engines: the same up to rounding",
    "disable_allgather": _BUCKETS,
    "allgather_size": _BUCKETS,
    "comms_logger": _REPORTS,
}
# Of zero_optimization, where several ranks train.
ZERO_ON_RANKS: Final[Mapping[str, str]] = {
    "overlap_comm": "torch's engines send gradients while backward runs; predicted seconds count none of that",
    "contiguous_gradients": "data parallelism keeps gradients in its buckets, and fully_shard copies them into one before they are sent",
    **dict.fromkeys(
        (
            *("reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions"),
            *("allgather_bucket_size", "round_robin_gradients", "parameter_alignment", "sub_group_size"),
            *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
            *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
            "stage3_allgather_sequential",
        ),
        _BUCKETS,
    ),
}

# Keys of sections that are not read value by value. Unknown ones DeepSpeed refuses in the first, ignores in the second, and into the sections that
# stand in neither (autotuning, checkpoint, data_efficiency, datastates_ckpt, expert_parallel, timers) memfit does not look further than above.
CLOSED: Final[Mapping[str, tuple[str, ...]]] = {
    "comms_logger": ("enabled", "verbose", "prof_all", "debug", "prof_ops"),
    "tensorboard": ("enabled", "output_path", "job_name"),
    "wandb": ("enabled", "group", "team", "project"),
    "csv_monitor": ("enabled", "output_path", "job_name"),
    "comet": (
        *("enabled", "samples_log_interval", "project", "workspace", "api_key"),
        *("experiment_name", "experiment_key", "online", "mode"),
    ),
    "compile": (
        *("deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation"),
        *("offload_activation_pin_memory", "offload_opt_states", "offload_parameters", "double_buffer"),
        *("symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
        *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes"),
    ),
    "hybrid_engine": (
        *("enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
        *("tp_gather_partition_size", "enable_cuda_graph"),
    ),
    "tensor_parallel": (
        *("dtype", "autotp_size", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend"),
        *("tensor_parallel", "tp", "injection_policy_tuple", "partition_config", "preset_model"),
        *("keep_module_on_host", "replace_with_kernel_inject", "kernel_inject"),
    ),
}
OPEN: Final[Mapping[str, tuple[str, ...]]] = {
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "flops_profiler": (
        *("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed"),
        "output_file",
    ),
    "pipeline": (
        *("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned"),
        *("grad_partitioned", "use_reentrant"),
    ),
}
LEAF_MODULE: Final = ("classes", "names", "name_suffixes")

# DeepSpeed itself refuses these since they were removed from it.
REMOVED: Final[Mapping[str, str]] = {
    "amp": "take fp16, bf16 or torch_autocast",
    "compression_training": "there is nothing in its place",
    "curriculum_learning": "its place is data_efficiency.data_sampling, which memfit does not have",
    "eigenvalue": "there is nothing in its place",
    "elasticity": "give the batch sizes themselves",
    "graph_harvesting": "there is nothing in its place",
    "nebula": "there is nothing in its place",
    "progressive_layer_drop": "there is nothing in its place",
    "quantize_training": "there is nothing in its place",
    "sparse_attention": "there is nothing in its place",
    "sparse_gradients": "embeddings made with sparse=True need no key",
}
REMOVED_ZERO: Final[Mapping[str, str]] = {
    "mics_shard_size": "there is nothing in its place",
    "mics_hierarchical_params_gather": "there is nothing in its place",
    "zeropp_loco_param": "there is nothing in its place",
}

# Sections that are fine while switched off: (the keys that switch them on, with their values when off; the reason).
REFUSED: Final[Mapping[str, tuple[Mapping[str, object], str]]] = {
    "compile": (
        dict.fromkeys(
            (
                "deepcompile",
                "autoep_non_moe",
                "free_activation",
                "offload_activation",
                "offload_opt_states",
                "offload_parameters",
                "passes",
            )
        ),
        "memfit plans steps that are not compiled",
    ),
    "data_efficiency": (
        {"enabled": False},
        "it changes what is trained on, and memfit trains on the batches it is given",
    ),
    "expert_parallel": ({"enabled": False}, "memfit trains on one device"),
    "hybrid_engine": ({"enabled": False}, "memfit trains, and generates nothing"),
    "pipeline": (
        {"stages": "auto", "activation_checkpoint_interval": 0},
        "it goes with DeepSpeed's PipelineModule, which memfit does not read; what to recompute memfit chooses itself",
    ),
    "tensor_parallel": ({"autotp_size": 0}, "memfit trains on one device"),
    "weight_quantization": ({}, "memfit trains weights as they are"),
}
# What a switch may also say without asking for anything.
IDLE: Final[Mapping[str, tuple[object, ...]]] = {"autotp_size": (1,), "stages": (1, None)}

# Names that DeepSpeed takes in any case, and torch's own, which it takes as they are written.
OWN_OPTIMIZERS: Final = ("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
REFUSED_OPTIMIZERS: Final[Mapping[str, str]] = {
    "lamb": "memfit has no Lamb",
    "muadam": "memfit has no optimizers of mup",
    "muadamw": "memfit has no optimizers of mup",
    "musgd": "memfit has no optimizers of mup",
    "muon": "DeepSpeed's Muon updates some parameters with Adam, which memfit has no counterpart for",
    "LBFGS": "it calls the model as often as it likes, and a planned step runs once",
}
_TORCH: Final = ("maximize", "foreach", "differentiable", "capturable")
_ADAM: Final = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad"),
    # Of DeepSpeed's own Adam, and which Adam it is.
    *("bias_correction", "set_grad_none", "torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach"),
)
OPTIMIZER_PARAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": (
        *("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "fused"),
        *("foreach", "maximize", "differentiable"),
    ),
    "lion": ("lr", "betas", "weight_decay", "set_grad_none"),
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", *_TORCH),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", *_TORCH),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adamax": ("lr", "betas", "eps", "weight_decay", *_TORCH),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", *_TORCH),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", *_TORCH),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", *_TORCH),
    "Rprop": ("lr", "etas", "step_sizes", *_TORCH),
    "SGD": (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
        "foreach",
        "differentiable",
        "fused",
    ),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
}

_WARMUP: Final = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
# DeepSpeed's own schedules and what they take.
SCHEDULES: Final[Mapping[str, tuple[str, ...]]] = {
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
        "last_batch_iteration",
    ),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
        *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": (
        *("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        "last_batch_iteration",
    ),
}
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
# torch's, of which only the names are known here: those that numbers in a file can make.
TORCH_SCHEDULES: Final = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
    *("MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
)
