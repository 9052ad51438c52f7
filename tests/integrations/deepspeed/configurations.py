"""Small DeepSpeed configurations, good and bad, with what follows from each and where DeepSpeed's own reader says something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        name: unique; names it in the recording.
        said: the content, or the text of a file.
        wants: (train, micro, accumulation), or words of the refusal.
        ranks: world size.
        strict: whether keys that DeepSpeed ignores are errors.
        apart: why DeepSpeed's reader does otherwise; "" where it does the same.
    """

    name: str
    said: dict[str, Any] | str
    wants: tuple[Any, Any, Any] | str
    ranks: int = 1
    strict: bool = True
    apart: str = ""


TB, MB, GA = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
LATER = "DeepSpeed fails later, when it makes its engine"
DROPS = "DeepSpeed drops it without a word"
LAX = "DeepSpeed does not look at the type"
LACKS = "memfit has no counterpart"
AUTO = "DeepSpeed itself knows no auto here; Transformers and Accelerate do"


def four(**more: Any) -> dict[str, Any]:
    return {TB: 4, **more}


def zero(**more: Any) -> dict[str, Any]:
    return {TB: 4, "zero_optimization": more}


def fp16(**more: Any) -> dict[str, Any]:
    return {TB: 4, "fp16": {"enabled": True, **more}}


WHOLE = (4, 4, 1)

BATCHES = [
    Case("all three", {TB: 32, MB: 4, GA: 8}, (32, 4, 8)),
    Case("all three, four ranks", {TB: 32, MB: 4, GA: 2}, (32, 4, 2), ranks=4),
    Case("all three, not a product", {TB: 32, MB: 4, GA: 4}, "32 is not 4 * 4 * 1"),
    Case("all three, not on four ranks", {TB: 32, MB: 4, GA: 8}, "32 is not 4 * 8 * 4", ranks=4),
    Case("accumulation inferred", {TB: 32, MB: 4}, (32, 4, 8)),
    Case("accumulation inferred, two ranks", {TB: 32, MB: 4}, (32, 4, 4), ranks=2),
    Case("accumulation uneven", {TB: 13, MB: 3}, "13 is not 3 * 4 * 1"),
    Case("micro-batch larger than the batch", {TB: 4, MB: 8}, "gradient_accumulation_steps: 0 is less than 1"),
    Case("micro inferred", {TB: 16, GA: 4}, (16, 4, 4)),
    Case("micro inferred, two ranks", {TB: 16, GA: 4}, (16, 2, 4), ranks=2),
    Case("micro uneven", {TB: 10, GA: 4}, "10 is not 2 * 4 * 1"),
    Case("more accumulation than samples", {TB: 4, GA: 8}, "train_micro_batch_size_per_gpu: 0 is less than 1"),
    Case("batch inferred", {MB: 4, GA: 8}, (32, 4, 8)),
    Case("batch inferred, three ranks", {MB: 4, GA: 8}, (96, 4, 8), ranks=3),
    Case("batch alone", {TB: 16}, (16, 16, 1)),
    Case("batch alone, four ranks", {TB: 16}, (16, 4, 1), ranks=4),
    Case("batch alone, uneven on three ranks", {TB: 16}, "16 is not 5 * 1 * 3", ranks=3),
    Case("fewer samples than ranks", {TB: 2}, "train_micro_batch_size_per_gpu: 0 is less than 1", ranks=4),
    Case("micro alone", {MB: 4}, (4, 4, 1)),
    Case("micro alone, four ranks", {MB: 4}, (16, 4, 1), ranks=4),
    Case("nothing", {}, "train_batch_size or train_micro_batch_size_per_gpu is missing"),
    Case("accumulation alone", {GA: 4}, "train_batch_size or train_micro_batch_size_per_gpu is missing"),
    Case("null is left out", {TB: None, MB: 2, GA: None}, (2, 2, 1)),
    Case("batch of none", {TB: 0}, "train_batch_size: 0 is less than 1"),
    Case("batch below none", {TB: -4, MB: 2}, "train_batch_size: -4 is less than 1"),
    Case("micro-batch of none", {TB: 4, MB: 0}, "train_micro_batch_size_per_gpu: 0 is less than 1"),
    Case("accumulation of none", {TB: 4, GA: 0}, "gradient_accumulation_steps: 0 is less than 1"),
    Case("batch in exponents", {TB: 1e3, GA: 10}, (1000, 100, 10)),
    Case("batch with a fraction", {MB: 2.5}, "train_micro_batch_size_per_gpu: expected a whole number", apart=LAX),
    Case("batch in quotes", {TB: "4"}, "train_batch_size: expected a whole number"),
    Case("batch is true", {TB: True}, "train_batch_size: expected a whole number", apart=LAX),
    Case("batch is a list", {TB: [4]}, "train_batch_size: expected a whole number"),
    Case("micro auto", {TB: 16, MB: "auto", GA: 4}, (16, 4, 4), apart=AUTO),
    Case("accumulation auto", {TB: 16, MB: 2, GA: "auto"}, (16, 2, 8), apart=AUTO),
    Case("batch auto", {TB: "auto", MB: 2, GA: 4}, (8, 2, 4), apart=AUTO),
    Case("split auto", {TB: 16, MB: "auto", GA: "auto"}, (16, "auto", "auto"), apart=AUTO),
    Case("micro auto, accumulation left out", {TB: 16, MB: "auto"}, (16, "auto", "auto"), apart=AUTO),
    Case("all auto", {TB: "auto", MB: "auto", GA: "auto"}, ("auto", "auto", "auto"), apart=AUTO),
    Case("only micro known", {TB: "auto", MB: 2, GA: "auto"}, ("auto", 2, "auto"), apart=AUTO),
    Case("only accumulation known", {TB: "auto", MB: "auto", GA: 4}, ("auto", "auto", 4), apart=AUTO),
    Case("loop decides where a step ends", four(managed_gradient_accumulation=False), "takes the whole batch", apart=LACKS),
]  # fmt: skip

FILES = [
    Case("plain JSON", '{"train_batch_size": 4}', WHOLE),
    Case("hjson", "{\n  # samples\n  train_batch_size: 4\n  fp16: {enabled: false,}\n}", WHOLE),
    Case("key twice", '{"train_batch_size": 4, "train_batch_size": 8}', "'train_batch_size' is given twice"),
    Case("key twice, deeper", '{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}', "'enabled' is given twice"),
    Case("key twice, hjson", "{\n  train_batch_size: 4\n  train_batch_size: 8\n}", "'train_batch_size' is given twice"),
    Case("neither", '{"train_batch_size": [4', "neither JSON nor hjson"),
    Case("a list", "[4]", "expected keys and values"),
]  # fmt: skip

KEYS = [
    Case("the article's", {TB: 16, GA: 4, "zero_optimization": {"stage": 2, "contiguous_gradients": True}, "gradient_checkpointing": True}, (16, 4, 4)),
    Case("gradient_checkpointing in words", four(gradient_checkpointing="every layer"), "gradient_checkpointing: expected true or false", apart=DROPS),
    Case("misspelt", {TB: 4, "gradient_cliping": 1.0}, "did you mean gradient_clipping?", apart=DROPS),
    Case("misspelt, lenient", {TB: 4, "gradient_cliping": 1.0}, WHOLE, strict=False),
    Case("far from any", four(qqq=1), "there are: activation_checkpointing", apart=DROPS),
    Case("key of its documentation", four(activation_checkpointing={"partitioned_activations": True}), "did you mean partition_activations?", apart=DROPS),
    Case("key of its documentation, lenient", four(activation_checkpointing={"partitioned_activations": True}), WHOLE, strict=False),
    Case("activation_checkpointing", four(activation_checkpointing={"cpu_checkpointing": True, "number_checkpoints": 4}), WHOLE),
    Case("activation_checkpointing is true", four(activation_checkpointing=True), "expected keys and values, found true"),
    Case("amp", four(amp={"enabled": False}), "take fp16, bf16 or torch_autocast"),
    Case("sparse_gradients", four(sparse_gradients=False), "refuses it"),
    Case("elasticity", four(elasticity={"enabled": True}), "give the batch sizes"),
    Case("curriculum_learning", four(curriculum_learning={}), "refuses it"),
    Case("mics", zero(stage=3, mics_shard_size=2), "zero_optimization.mics_shard_size: DeepSpeed"),
    Case("what is printed", four(steps_per_print=10, wall_clock_breakdown=True), WHOLE),
    Case("tracker", four(wandb={"enabled": True, "project": "p"}), WHOLE),
    Case("tracker, misspelt", four(wandb={"enabld": True}), "did you mean enabled?", strict=False),
    Case("profiler, misspelt", four(flops_profiler={"enabled": True, "depth": 1}), "did you mean module_depth?", apart=DROPS),
    Case("profiler, misspelt, lenient", four(flops_profiler={"enabled": True, "depth": 1}), WHOLE, strict=False),
    Case("profiler is true", four(flops_profiler=True), "flops_profiler: expected keys and values"),
    Case("compiled, misspelt", four(compile={"deepcompil": True}), "did you mean deepcompile?", strict=False),
    Case("leaf modules, misspelt", zero(stage=3, leaf_module={"class": []}), "did you mean classes?", strict=False),
    Case("leaf modules", zero(stage=3, leaf_module={"classes": ["MoE"]}), WHOLE),
    Case("disk settings null", four(aio=None), WHOLE),
    Case("messages in fp8", four(communication_data_type="fp8"), "expected one of fp32, fp16, bf16"),
    Case("messages in BF16", four(communication_data_type="BF16"), WHOLE),
    Case("gradients by maximum", four(gradient_allreduce_op="max"), "expected one of mean, sum"),
    Case("sums at stage 3", four(gradient_allreduce_op="sum", zero_optimization={"stage": 3}), "does not go with ZeRO stage 3"),
    Case("sums", four(gradient_allreduce_op="SUM"), WHOLE),
    Case("compiled", four(compile={"deepcompile": True}), "compile.deepcompile: cannot be honoured", apart=LACKS),
    Case("not compiled", four(compile={"deepcompile": False}), WHOLE),
    Case("pipeline that recomputes", four(pipeline={"activation_checkpoint_interval": 1}), "PipelineModule", apart=LACKS),
    Case("pipeline of one", four(pipeline={"stages": 1}), WHOLE),
    Case("tensor parallel", four(tensor_parallel={"autotp_size": 2}), "tensor_parallel.autotp_size", apart=LACKS),
    Case("curriculum", four(data_efficiency={"enabled": True}), "data_efficiency.enabled", apart=LACKS),
    Case("sequence parallel", four(sequence_parallel_size=2), "sequence_parallel_size", apart=LACKS),
    Case("sums in bf16", four(data_types={"grad_accum_dtype": "bf16"}), "data_types.grad_accum_dtype", apart=LACKS),
    Case("sums in fp32", four(data_types={"grad_accum_dtype": "fp32"}), WHOLE),
    Case("clipping", four(gradient_clipping=0.5), WHOLE),
    Case("clipping auto", four(gradient_clipping="auto"), WHOLE),
    Case("clipping below nothing", four(gradient_clipping=-1), "gradient_clipping: -1.0 is less than 0", apart=LAX),
    Case("clipping null", four(gradient_clipping=None), "gradient_clipping: expected a number", apart=LATER),
]  # fmt: skip

PRECISION = [
    Case("fp16", fp16(), WHOLE),
    Case("fp16 in words", {TB: 4, "fp16": {"enabled": "yes"}}, WHOLE),
    Case("fp16 two", {TB: 4, "fp16": {"enabled": 2}}, "fp16.enabled: expected true or false"),
    Case("fp16 null", four(fp16=None), "fp16: expected keys and values, found null"),
    Case("fp16 misspelt", {TB: 4, "fp16": {"enable": True}}, "did you mean enabled?"),
    Case("fp16 misspelt, lenient", {TB: 4, "fp16": {"enable": True}}, "did you mean enabled?", strict=False),
    Case("fp16 auto", {TB: 4, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, WHOLE),
    Case("fp16 static", fp16(loss_scale=128), WHOLE),
    Case("fp16 scale below none", fp16(loss_scale=-1), "fp16.loss_scale: -1.0 is less than 0"),
    Case("fp16 scale is true", fp16(loss_scale=True), "fp16.loss_scale: expected a number"),
    Case("fp16 scale in quotes", fp16(loss_scale="128"), WHOLE),
    Case("fp16 window of none", fp16(loss_scale_window=0), "fp16.loss_scale_window: 0 is less than 1"),
    Case("fp16 window of none, static", fp16(loss_scale_window=0, loss_scale=8), WHOLE),
    Case("fp16 floor of none", fp16(min_loss_scale=0), "fp16.min_loss_scale: 0 is less than 1"),
    Case("fp16 power with a fraction", fp16(initial_scale_power=1.5), "expected a whole number"),
    Case("fp16 masters", four(fp16={"enabled": True, "fp16_master_weights_and_grads": True}), "fp16.fp16_master_weights_and_grads"),
    Case("bf16", four(bf16={"enabled": True}), WHOLE),
    Case("bf16 null", four(bf16=None), WHOLE),
    Case("bf16 by its old name", four(bfloat16={"enabled": True}), WHOLE),
    Case("bf16 misspelt", four(bfloat16={"enabld": True}), "bfloat16.enabld"),
    Case("bf16 masters at stage 2", {**zero(stage=2), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "model's own precision", apart=LACKS),
    Case("bf16 state without masters", four(bf16={"enabled": True, "bf16_optimizer_states": True}, zero_optimization={"stage": 2}), "bf16_optimizer_states"),
    Case("both", four(fp16={"enabled": True}, bf16={"enabled": True}), "fp16 and bf16 are enabled together"),
    Case("both, one off", four(fp16={"enabled": False}, bf16={"enabled": True}), WHOLE),
    Case("autocast", four(torch_autocast={"enabled": True, "dtype": "bfloat16"}), WHOLE),
    Case("autocast auto", four(torch_autocast={"enabled": "auto", "dtype": "bfloat16"}), "torch_autocast.enabled: expected true or false", apart=LAX),
    Case("autocast in no type", four(torch_autocast={"enabled": True, "dtype": "bflaot16"}), "did you mean bfloat16?"),
    Case("autocast in fp32", four(torch_autocast={"enabled": True, "dtype": "fp32"}), "computes in bfloat16 or float16", apart=LACKS),
    Case("autocast without a type", four(torch_autocast={"enabled": True}), "torch_autocast.dtype is missing", apart="DeepSpeed leaves it to torch, by device"),
    Case("autocast beside bf16", four(torch_autocast={"enabled": True, "dtype": "bf16"}, bf16={"enabled": True}), "enabled together", apart=LACKS),
    Case("autocast by module", four(torch_autocast={"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["A"]}), "by operation", apart=LACKS),
]  # fmt: skip

ZERO = [
    *(Case(f"stage {n}", zero(stage=n), WHOLE) for n in range(4)),
    Case("stage 4", zero(stage=4), "zero_optimization.stage: 4 is more than 3"),
    Case("stage in quotes", zero(stage="2"), WHOLE),
    Case("stage auto", zero(stage="auto"), WHOLE),
    Case("stage is true", zero(stage=True), "expected a whole number", apart=LAX),
    Case("stage misspelt", zero(stge=2), "did you mean stage?"),
    Case("stage misspelt, lenient", zero(stge=2), "did you mean stage?", strict=False),
    Case("old form", four(zero_optimization=True), WHOLE),
    Case("zero null", four(zero_optimization=None), "zero_optimization: expected keys and values"),
    Case("bucket in exponents", zero(stage=2, reduce_bucket_size=5e8), WHOLE),
    Case("bucket in quoted exponents", zero(stage=2, reduce_bucket_size="5e8"), "expected a whole number"),
    Case("bucket with a fraction", zero(stage=2, reduce_bucket_size=1.5), "expected a whole number"),
    Case("bucket of none", zero(stage=2, reduce_bucket_size=0), "reduce_bucket_size: 0 is less than 1"),
    Case("bucket auto", zero(stage=2, reduce_bucket_size="auto"), WHOLE),
    Case("stage 3 names", zero(stage=3, stage3_prefetch_bucket_size=1, max_live_parameters=2), WHOLE),
    Case("two names of one key", zero(stage=3, stage3_prefetch_bucket_size=1, prefetch_bucket_size=2), "are one key"),
    Case("norm left out at stage 3", zero(stage=3, compute_grad_norm=False), "goes with stage 1 or 2"),
    Case("state to the host", zero(stage=2, offload_optimizer={"device": "cpu", "pin_memory": True}), WHOLE),
    Case("state nowhere", zero(stage=2, offload_optimizer={"device": "none"}), WHOLE),
    Case("state null", zero(stage=2, offload_optimizer=None), WHOLE),
    Case("state to the gpu", zero(stage=2, offload_optimizer={"device": "gpu"}), "device: expected one of none, cpu, nvme"),
    Case("state misspelt", zero(stage=2, offload_optimizer={"device": "cpu", "pin": True}), "offload_optimizer.pin: DeepSpeed"),
    Case("state at stage 0", zero(offload_optimizer={"device": "cpu"}), "drops it at stage 0", apart=DROPS),
    Case("state to the disk", zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/disk"}), WHOLE),
    Case("state to no disk", zero(stage=3, offload_optimizer={"device": "nvme"}), "nvme_path is missing", apart=LATER),
    Case("half of the state, stage 2", zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio: 0.5"),
    Case("half of the state, stage 3", zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "all state or none", apart=LACKS),
    Case("twice the state", zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 2}), "2.0 is more than 1"),
    Case("parameters to the host", zero(stage=3, offload_param={"device": "cpu"}), WHOLE),
    Case("parameters at stage 2", zero(stage=2, offload_param={"device": "cpu"}), "drops it at stage 2", apart=DROPS),
    Case("old offload", zero(stage=2, cpu_offload=True), WHOLE),
    Case("old offload, and the new", zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "is the old name"),
    Case("zenflow", zero(stage=2, zenflow={"topk_ratio": 0.1}), "zenflow: cannot be honoured", apart=LACKS),
    Case("quantized messages", zero(stage=3, zero_quantized_weights=True), "zero_quantized_weights", apart=LACKS),
]  # fmt: skip

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
OPTIMIZERS = [
    Case("AdamW", four(optimizer=ADAM), WHOLE),
    Case("optimizer of torch", four(optimizer={"type": "RMSprop", "params": {"lr": 1e-3}}), WHOLE),
    Case("optimizer auto", four(optimizer={"type": "Adam", "params": {"lr": "auto", "betas": "auto"}}), WHOLE),
    Case("optimizer empty", four(optimizer={}), WHOLE),
    Case("optimizer null", four(optimizer=None), "optimizer: expected keys and values"),
    Case("optimizer without a type", four(optimizer={"params": {"lr": 1}}), "optimizer.type is missing", apart=DROPS),
    Case("optimizer of a number", four(optimizer={"type": 5}), "optimizer.type: expected text"),
    Case("optimizer misspelt", four(optimizer={"type": "AdmW"}), "did you mean adamw?", apart=LATER),
    Case("torch's in lower case", four(optimizer={"type": "sgd"}), "did you mean SGD?", apart=LATER),
    Case("optimizer that is gone", four(optimizer={"type": "OneBitAdam"}), "neither DeepSpeed's nor in torch.optim", apart=LATER),
    Case("Lamb", four(optimizer={"type": "Lamb"}), "memfit has no Lamb", apart=LACKS),
    Case("max_grad_norm", four(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}}), "only as gradient_clipping", apart=LATER),
    Case("parameter misspelt", four(optimizer={"type": "Adam", "params": {"weigth_decay": 0.1}}), "did you mean weight_decay?", apart=LATER),
    Case("rate in words", four(optimizer={"type": "Adam", "params": {"lr": "fast"}}), "optimizer.params.lr: expected a number", apart=LATER),
    Case("optimizer key misspelt", four(optimizer={"type": "Adam", "param": {}}), "did you mean params?", apart=DROPS),
    Case("schedule", four(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}), WHOLE),
    Case("schedule auto", four(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}), WHOLE),
    Case("schedule of torch", four(scheduler={"type": "StepLR", "params": {"step_size": 3}}), WHOLE),
    Case("schedule misspelt", four(scheduler={"type": "WarmupCosinLR"}), "did you mean WarmupCosineLR?", apart=LATER),
    Case("schedule without its length", four(scheduler={"type": "WarmupDecayLR", "params": {}}), "total_num_steps is missing", apart=LATER),
    Case("schedule of no steps", four(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}}), "0 is less than 1", apart=LATER),
    Case("warm-up by square", four(scheduler={"type": "WarmupLR", "params": {"warmup_type": "square"}}), "expected one of log, linear", apart=DROPS),
    Case("scheduler null", four(scheduler=None), "scheduler: expected keys and values"),
]  # fmt: skip

CASES = [*BATCHES, *FILES, *KEYS, *PRECISION, *ZERO, *OPTIMIZERS]
