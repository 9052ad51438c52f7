"""Trainer and Lightning over weights in 4 and 16 bits: each library's own losses to the bit, and the peak as predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from integrations import trainer_ranks
from integrations.quiet_trainers import QUIET, trained_by_lightning
from memfit.errors import InputError
from memfit.techniques.frozen_weights import four_bit

transformers = pytest.importorskip("transformers")
pytest.importorskip("lightning")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")

SHAPE = {**trainer_ranks.SHAPE, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 128}
SAMPLES, TOKENS, STEPS = 4, 64, 3
WITHIN = 0.005  # of the predicted peak

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft asks models for what transformers calls otherwise since.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning"
    ),  # PEFT's default
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, num_key_value_heads=4, use_cache=False, tie_word_embeddings=False)
    )


def with_adapters(model: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )


def packed(model: Any) -> Any:
    """As transformers loads it in 4 bits: its linear layers bitsandbytes' own, the head as it was."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and path != "lm_head":
            small_layer = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            small_layer.load_state_dict({"weight": layer.weight.data})
            model.set_submodule(path, small_layer)
    model.is_loaded_in_4bit = True
    return model.to("cpu")  # where bitsandbytes packs the weights


def by_bitsandbytes() -> Any:
    prepared = peft.prepare_model_for_kbit_training(packed(llama()), use_gradient_checkpointing=False)
    return with_adapters(prepared)


def checkpointed() -> Any:
    """At the defaults of PEFT: each block is run again in a backward of its own."""
    return with_adapters(peft.prepare_model_for_kbit_training(packed(llama())))


def by_memfit() -> Any:
    model = with_adapters(llama())
    four_bit.convert(model)
    return model


def in_bf16() -> Any:
    return llama().to(torch.bfloat16)


def adapters_on_bf16() -> Any:
    """PEFT holds the adapters in fp32."""
    return with_adapters(in_bf16())


def rows() -> list[dict[str, Tensor]]:
    return trainer_ranks.rows("language model", SAMPLES * STEPS, TOKENS)


# -- Trainer -------------------------------------------------------------------------------------------------------------------


def trainer(model: Any, folder: Path, **named: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": SAMPLES,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        **QUIET,
        **named,
    }
    return transformers.Trainer(model, transformers.TrainingArguments(**settings), train_dataset=rows())


def logged(made: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry]


@pytest.mark.alternate(0)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("make", [by_bitsandbytes, by_memfit, in_bf16, adapters_on_bf16])
def test_trainers_own_losses_in_the_bytes_predicted(make: Callable[[], Any], fraction: float, tmp_path: Path) -> None:
    plainly = trainer(make(), tmp_path)
    plainly.train()
    fixed = {"micro_batches": 1}
    most = memfit.transformers.fit(trainer(make(), tmp_path), "1GiB", fixed=fixed)
    inside = trainer(make(), tmp_path)
    fitted = memfit.transformers.fit(inside, between(most.plan, fraction), fixed=fixed, meter=True)
    inside.train()

    assert fitted.plan.script.plain == (fraction == 1.0)
    assert logged(inside) == logged(plainly)
    assert all(map(torch.equal, trained(inside.model), trained(plainly.model)))
    assert peaks(fitted) == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=WITHIN)] * (STEPS - 1)


def test_trainers_model_is_packed_where_that_is_allowed_and_needed(tmp_path: Path) -> None:
    plainly = trainer(by_memfit(), tmp_path)
    plainly.train()
    full = memfit.transformers.fit(trainer(with_adapters(llama()), tmp_path), "1GiB", fixed={"micro_batches": 1})
    inside = trainer(with_adapters(llama()), tmp_path)
    fitted = memfit.transformers.fit(
        inside, memfit.smallest_budget(full.plan) - 1, allow=["4bit"], fixed={"micro_batches": 1}, meter=True
    )
    inside.train()

    assert fitted.plan.choices.frozen_weights == "4bit"
    assert logged(inside) == logged(plainly)
    assert peaks(fitted) == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=WITHIN)] * (STEPS - 1)


def test_trainer_says_how_to_leave_recomputation_to_the_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare_model_for_kbit_training\(model, use_gradient_checkpointing=False\)"):
        memfit.transformers.fit(trainer(checkpointed(), tmp_path), "1GiB")


# -- Lightning -----------------------------------------------------------------------------------------------------------------


def by_lightning(model: Any, *callbacks: Any, precision: Any = "32-true") -> Any:
    return trained_by_lightning(model, rows(), SAMPLES, *callbacks, max_steps=STEPS, precision=precision)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (by_bitsandbytes, "32-true"),
        (checkpointed, "32-true"),
        (by_memfit, "32-true"),
        (in_bf16, "32-true"),
        (llama, "bf16-true"),
        (adapters_on_bf16, "32-true"),
    ],
)
def test_lightnings_own_losses_in_the_bytes_predicted(make: Callable[[], Any], precision: str, fraction: float) -> None:
    plainly = by_lightning(make(), precision=precision)
    fixed = {"micro_batches": 1}
    most = memfit.lightning.FitToMemory("1GiB", fixed=fixed)
    by_lightning(make(), most, precision=precision)
    fitted = memfit.lightning.FitToMemory(between(most.plan, fraction), fixed=fixed, meter=True)
    inside = by_lightning(make(), fitted, precision=precision)

    assert inside.losses[-STEPS:] == plainly.losses
    assert all(map(torch.equal, trained(inside), trained(plainly)))
    assert peaks(fitted) == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=WITHIN)] * (STEPS - 1)


# -- a loop of one's own -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_at_pefts_defaults_the_peak_is_the_predicted_one_to_the_byte(fraction: float) -> None:
    batch = {name: torch.stack([row[name] for row in rows()[:SAMPLES]]) for name in rows()[0]}
    plan = memfit.plan(checkpointed(), batch, None, "1GiB", small.adamw, fixed={"micro_batches": 1})
    plan = memfit.replan(plan, between(plan, fraction))
    engine = memfit.apply(plan, checkpointed())
    records = [engine.step(batch, meter=True) for _ in range(2)]

    assert records[-1].peak_bytes == plan.prediction.peak_bytes


def between(plan: memfit.Plan, fraction: float) -> int:
    """A budget between the smallest and that of all kept."""
    least = memfit.smallest_budget(plan)
    return round(least + fraction * (max(plan.prediction.plain_peak_bytes, least) - least)) + 512 * (fraction == 1.0)


def trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def peaks(fitted: Any) -> list[int]:
    """Measured, from the second step on: the first has no optimizer state yet."""
    return [record.peak_bytes for record in fitted.engine.records[1:]]
