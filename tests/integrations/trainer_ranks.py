"""What a rank does in the tests of Trainer on several ranks: it trains a small model with Trainer alone, or with memfit's two lines, and tells the numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import memfit
from integrations.quiet_trainers import QUIET

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def built(kind: str) -> nn.Module:
    """A classifier with dropout, whose loss is a mean over the batch; a language model, whose loss is divided by the number of items of all ranks; or adapters.

    The adapters (LoRA) are of the language model, whose own weights are frozen.
    """
    import transformers

    torch.manual_seed(0)
    if kind == "classifier":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, num_key_value_heads=4))
    if kind != "adapters":
        return model
    import peft

    adapted: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    return adapted


def rows(kind: str, samples: int = 88, tokens: int = 16) -> list[dict[str, Any]]:
    """Of equal length; of the language model ever more labels are masked."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(samples):
        ids = torch.randint(5, 100, (tokens,), generator=generator)
        labels = ids.clone()
        labels[: index % 17] = -100
        one = torch.tensor(index % 2) if kind == "classifier" else labels
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": one})
    return found


def trainer(kind: str, folder: str, **named: Any) -> Any:
    """Quiet, on the CPU, with SGD: AdamW would make much of the last bits."""
    import transformers

    warnings.simplefilter("ignore")  # those of Trainer and Accelerate are theirs
    transformers.logging.set_verbosity_error()
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        **QUIET,
        **named,
    }
    return transformers.Trainer(
        built(kind), transformers.TrainingArguments(**arguments), train_dataset=rows(kind), eval_dataset=rows(kind, 8)
    )


def whole(model: nn.Module) -> list[torch.Tensor]:
    """All parameters, put together from all ranks."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def logged(trained: Any, what: str) -> list[float]:
    return [entry[what] for entry in trained.state.log_history if what in entry]


Told = tuple[list[float], list[float], list[torch.Tensor], list[int], list[int], list[float], list[float]]


def trained(rank: int, folder: str, runs: list[tuple[str, dict[str, Any], dict[str, Any] | None]]) -> list[Told]:
    """For each run losses, norms, parameters; predicted peaks of all ranks, measured ones of this one from the second step on, recorded and evaluated losses.

    Args:
        rank: of this process.
        folder: for Trainer's output.
        runs: kind of model, arguments of Trainer, and those of `memfit.transformers.fit`; None for Trainer alone.
    """
    del rank
    found: list[Told] = []
    for number, (kind, arguments, fits) in enumerate(runs):
        made = trainer(kind, str(Path(folder, str(number))), **arguments)
        predicted: list[int] = []
        measured: list[int] = []
        recorded: list[float] = []
        if fits is not None:
            fitted = memfit.transformers.fit(made, **{"budget": 1 << 40, "meter": True, **fits})
            predicted = [figures.peak_bytes for figures in fitted.plan.prediction.ranks]
        made.train()
        if fits is not None:
            assert not any(record.divergences for record in fitted.engine.records)
            measured = [record.peak_bytes or 0 for record in fitted.engine.records[1:]]
            recorded = [record.loss for record in fitted.engine.records]
        model = made.model
        told = logged(made, "loss"), logged(made, "grad_norm"), whole(model)
        found.append((*told, predicted, measured, recorded, logged(made, "eval_loss")))
    return found


def saved_and_resumed(rank: int, folder: str, first: str, second: str) -> list[Told]:
    """Four steps under one way, saved after the second; the same from there under another, and under Trainer alone."""
    del rank
    adam = {"optim": "adamw_torch", "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    found: list[Told] = []

    def run(way: str | None, *, saves: bool, begin: str | None) -> None:
        settings = {"save_strategy": "steps", "save_steps": 2} if saves else {}
        made = trainer("classifier", folder, **adam, **settings)
        if way is not None:
            memfit.transformers.fit(made, 1 << 40, fixed={"sharding": way, "micro_batches": 1})
        made.train(resume_from_checkpoint=begin)
        found.append((logged(made, "loss"), logged(made, "grad_norm"), whole(made.model), [], [], [], []))

    there = str(Path(folder, "checkpoint-2"))
    run(first, saves=True, begin=None)
    run(second, saves=False, begin=there)
    run(None, saves=False, begin=there)
    return found


def refused(rank: int, folder: str) -> list[str]:
    """What is said of settings that cannot stand beside a model that is shared out."""
    del rank
    said = []
    for fixed, arguments in (
        (
            "zero3",
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1},
        ),
        ("zero4", {}),
    ):
        made = trainer("classifier", folder, **arguments)
        try:
            memfit.transformers.fit(made, 1 << 40, fixed={"sharding": fixed, "micro_batches": 1})
        except memfit.MemfitError as error:
            said.append(str(error))
    return said
