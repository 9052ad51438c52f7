"""What a Trainer may not be set to do beside a budget, each with its reason: refused before anything is planned."""

from __future__ import annotations

from typing import Any

from memfit.errors import InputError
from memfit.integrations.ranks import ranks_here
from memfit.step.given import check_model
from memfit.step.other_kernels import compiled, liger, runs_as_written


def refuse(trainer: Any) -> None:
    """Refuse settings that are incompatible with a plan.

    Raises:
        InputError: there is one; the message says which, why, and what to do.
    """
    args = trainer.args
    if args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size=True tries batch sizes until one does not run out of memory, and changes the global batch on the way; a plan says "
            "what fits before it runs and keeps the global batch: leave it out"
        )
    compiles = args.torch_compile or str(trainer.accelerator.state.dynamo_plugin.backend) != "NO"
    if compiles and not runs_as_written():
        set_by = (
            "TrainingArguments(torch_compile=True)" if args.torch_compile else "Accelerate (ACCELERATE_DYNAMO_BACKEND)"
        )
        raise compiled(f"the model of a Trainer under {set_by}")
    if args.use_liger_kernel:
        raise liger("the model of a Trainer under TrainingArguments(use_liger_kernel=True)")
    check_model(trainer.model)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled:
        raise InputError(
            f"{_shared_out(trainer)}. memfit shares the step out itself, by torch's own engines, and says what each rank will hold: leave the argument out and "
            "start the ranks as ever"
        )
    if args.n_gpu > 1:
        raise InputError(
            f"{args.n_gpu} GPUs in one process (DataParallel): start one process for each (torchrun --nproc-per-node {args.n_gpu}, or accelerate launch "
            f"--num_processes {args.n_gpu}), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.world_size > 1 and ranks_here() != args.world_size:
        raise InputError(
            f"{args.world_size} processes that are no group of torch.distributed: start them with torchrun or accelerate launch"
        )
    # Before transformers 5.23 the argument had the other name.
    recomputes = (getattr(args, name, False) for name in ("activation_checkpointing", "gradient_checkpointing"))
    if any(recomputes) or _recomputes(trainer.model):
        raise InputError(
            "activation (gradient) checkpointing recomputes every layer whether or not the budget asks for it, and a plan recomputes what pays: leave it "
            "out of the arguments, and call model.activation_checkpointing_disable() where the model has it on (PEFT turns it on, unless told "
            "prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))"
        )
    if args.fp16:
        raise InputError(
            "fp16=True: Accelerate scales the gradients and skips steps, which the plan for Trainer does not count: take bf16=True, or a loop with "
            'memfit.fit(..., allow=["fp16"])'
        )
    if trainer.model_init is not None:
        raise InputError(
            "model_init makes another model in train() than the one that is planned for: give Trainer the model itself"
        )
    if trainer.neftune_noise_alpha is not None:
        raise InputError(
            "neftune_noise_alpha changes the model's forward in train(), after it has been planned for: leave it out"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim.lower() for word in ("lomo", "layerwise")):
        raise InputError(
            f"optim={optim!r} updates parameters inside backward in a way of its own, which is not in the prediction: take another optimizer"
        )


def _shared_out(trainer: Any) -> str:
    """How the trainer was told to share the step out, and what says the same to memfit."""
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        stage = int(getattr(getattr(state, "deepspeed_plugin", None), "zero_stage", 0))
        return f"deepspeed= with ZeRO {stage} is {_fixed('zero' + str(stage) if stage else 'data')}"
    plugin = getattr(state, "fsdp_plugin", None)
    reshards = getattr(plugin, "reshard_after_forward", True)
    words = str(getattr(reshards, "name", reshards)).lower()
    way = {"shard_grad_op": "zero2", "false": "zero2", "no_shard": "data"}.get(words, "zero3")
    return f"fsdp= is {_fixed(way)}"


def _fixed(way: str) -> str:
    return f'memfit.transformers.fit(trainer, ..., fixed={{"sharding": "{way}"}})'


def _recomputes(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
