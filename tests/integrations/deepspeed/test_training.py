"""What a DeepSpeed configuration describes is trained under a budget, with DeepSpeed's numbers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from integrations.deepspeed import trained
from memfit.errors import ConfigError, InfeasibleError, InputError
from memfit.integrations.deepspeed import VERSION
from memfit.integrations.deepspeed.training import from_deepspeed
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.techniques.autocast.precision import ScaleRule, Scaling
from memfit.techniques.sharding import way_of
from memfit.values.report import StepRecord
from small import adamw

Config = dict[str, Any]
TB = trained.ROWS
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def whole(**more: Any) -> Config:
    return {"train_batch_size": TB, "gradient_clipping": 0, **more}


def torch_adam(name: str, **params: Any) -> Config:
    return {"type": name, "params": {"lr": 0.01, "torch_adam": True, **params}}


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}}
HALVING = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
RUNS: dict[str, Config] = {
    "AdamW": whole(optimizer=torch_adam("AdamW")),
    "Adam, ZeRO 2, four micro-batches, warmup": whole(
        gradient_accumulation_steps=4,
        zero_optimization={"stage": 2},
        optimizer=torch_adam("Adam", adam_w_mode=False, weight_decay=0.1),
        scheduler=WARMUP,
    ),
    "AdamW, OneCycle": whole(optimizer=torch_adam("AdamW"), scheduler=CYCLE),
    "SGD, bf16 autocast": whole(torch_autocast={"enabled": True, "dtype": "bfloat16"}, optimizer=SGD),
    "SGD, a schedule of torch's": whole(optimizer=SGD, scheduler=HALVING, gradient_checkpointing=True),
    "Adagrad": whole(optimizer={"type": "Adagrad", "params": {"lr": 0.01}}),
    "clipped": whole(gradient_clipping=0.01, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
}


# In 16 bits, beside the same runs in full precision and with rates of zero.
ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
ZERO_2 = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
MOMENTUM = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}
STILL = {"type": "SGD", "params": {"lr": 0.0}}
IN_16_BITS: dict[str, Config] = {
    "bf16, SGD": whole(optimizer=MOMENTUM, **BF16),
    "bf16, ZeRO 1, four micro-batches, clipped": whole(
        gradient_accumulation_steps=4, optimizer=MOMENTUM, **BF16, **ZERO_1
    )
    | {"gradient_clipping": 0.01},
    "bf16, ZeRO 2, AdamW, warmup": whole(optimizer=torch_adam("AdamW"), scheduler=WARMUP, **BF16, **ZERO_2),
    "fp16, ZeRO 1, SGD": whole(optimizer=MOMENTUM, **FP16, **ZERO_1),
    "fp16, ZeRO 2, AdamW": whole(optimizer=torch_adam("AdamW"), **FP16, **ZERO_2),
}
EMPTY_STEP = whole(optimizer=torch_adam("AdamW"), **BF16)
ALONE = {"full": whole(optimizer=STILL), "bf16": whole(optimizer=STILL, **BF16), "fp16": whole(optimizer=STILL, **FP16)}
UNSCALED = whole(optimizer=MOMENTUM, **FP16)
COMPARED = {**RUNS, **IN_16_BITS, **ALONE, "bf16, AdamW": EMPTY_STEP, "fp16, SGD": UNSCALED}
OPERATIONS = 12  # of the network one after the other, each of which rounds what it makes, in forward and in backward
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-11}  # of a number to the nearest


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return trained.loss_of(model(batch[0]), batch[1])


def nine_tenths(config: Config) -> int:
    """Of what a plain step of this configuration takes, with as many micro-batches."""
    found = from_deepspeed(config)
    plan = found.plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    return plan.prediction.plain_peak_bytes * 9 // 10


@functools.cache
def run(name: str) -> tuple[dict[str, list[float]], memfit.Engine, list[StepRecord]]:
    """Losses and rates as `trained.trained` gives them."""
    config, model, data = RUNS[name], trained.build(), trained.batches()
    engine = from_deepspeed(config).fit(model, data[0], loss_fn, nine_tenths(config))
    assert engine.optimizer is not None
    rates, records = [], []
    for batch in data:
        rates.append(float(engine.optimizer.param_groups[0]["lr"]))
        records.append(engine.step(batch, meter=True))
    return {"losses": [record.loss for record in records], "rates": rates}, engine, records


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, list[float]]]:
    """What DeepSpeed itself makes of the same configurations, in a process of its own."""
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        pytest.skip("deepspeed is not installed: `make test` does, see the Makefile")
    if version != VERSION:
        pytest.skip(f"deepspeed {version} is installed, and {VERSION} is what is followed")
    command = [sys.executable, trained.__file__, json.dumps(list(COMPARED.values()))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    return dict(zip(COMPARED, json.loads(line.removeprefix("LOSSES ")), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_rates_are_those_of_deepspeed(
    name: str, theirs: dict[str, dict[str, list[float]]], one_thread: None
) -> None:
    found, engine, _ = run(name)

    assert engine.plan.prediction.peak_bytes < engine.plan.prediction.plain_peak_bytes
    assert found["rates"] == theirs[name]["rates"]
    if name == "clipped":  # DeepSpeed adds the squares of the norms in another order
        assert found["losses"] == pytest.approx(theirs[name]["losses"], rel=1e-6)
    else:
        assert found["losses"] == theirs[name]["losses"]


def apart_by_rounding(theirs: dict[str, dict[str, list[float]]], name: str) -> list[float]:
    """How far losses of two runs in 16 bits may lie apart, step by step.

    Both round in forward, each in its own places (DeepSpeed casts the model, memfit runs operations under autocast): as much as DeepSpeed's own losses lie
    away from full precision where nothing is learned. And both round in backward, so what has been learned is off by the gradient's relative error.
    """
    kind = name.partition(",")[0]
    still, plain = theirs[kind]["losses"], theirs["full"]["losses"]
    forward = max(abs(one - other) for one, other in zip(still, plain, strict=True))
    learned = [abs(one - other) for one, other in zip(theirs[name]["losses"], still, strict=True)]
    assert max(learned) > 20 * forward  # else there would be nothing to compare
    return [2 * forward + 2 * OPERATIONS * ROUNDING[kind] * each for each in learned]


def distances(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_in_16_bits_losses_are_deepspeeds_up_to_rounding(
    name: str, theirs: dict[str, dict[str, list[float]]], one_thread: None
) -> None:
    engine = from_deepspeed(IN_16_BITS[name]).fit(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    assert engine.optimizer is not None
    rates, losses = [], []
    for batch in trained.batches():
        rates.append(float(engine.optimizer.param_groups[0]["lr"]))
        losses.append(engine.step(batch, meter=True).loss)

    assert engine.plan.choices.precision == name[:4]
    assert engine.records[-1].peak_bytes == pytest.approx(engine.plan.prediction.peak_bytes, rel=0.01)
    assert rates == theirs[name]["rates"]
    allowed = apart_by_rounding(theirs, name)
    assert all(map(float.__le__, distances(losses, theirs[name]["losses"]), allowed))


def test_without_a_zero_stage_deepspeeds_16_bits_begin_with_an_empty_step(
    theirs: dict[str, dict[str, list[float]]], one_thread: None
) -> None:
    """Adam counts it. memfit takes no such step, and says so; with one, losses are DeepSpeed's."""
    allowed = apart_by_rounding(theirs, "bf16, AdamW")

    def losses(*, empty: bool) -> list[float]:
        model = trained.build()
        engine = from_deepspeed(EMPTY_STEP).fit(model, trained.batches()[0], loss_fn, 1 << 40)
        assert engine.optimizer is not None
        if empty:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return [engine.step(batch).loss for batch in trained.batches()]

    own = theirs["bf16, AdamW"]["losses"]
    assert all(map(float.__le__, distances(losses(empty=True), own), allowed))
    assert any(map(float.__gt__, distances(losses(empty=False), own), allowed))
    assert any("a step of zero gradients" in notice for notice in from_deepspeed(EMPTY_STEP).notices)


def test_without_a_zero_stage_deepspeeds_fp16_divides_by_a_scale_it_has_not_multiplied_by(
    theirs: dict[str, dict[str, list[float]]], one_thread: None
) -> None:
    engine = from_deepspeed(UNSCALED).fit(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    losses = [engine.step(batch).loss for batch in trained.batches()]

    still, unscaled = theirs["fp16"]["losses"], theirs["fp16, SGD"]["losses"]
    assert max(distances(unscaled, still)) < 0.02 * max(distances(losses, still))  # 1/256 of each update
    own = "fp16, ZeRO 1, SGD"
    assert all(map(float.__le__, distances(losses, theirs[own]["losses"]), apart_by_rounding(theirs, own)))
    assert any("does not multiply the loss" in notice for notice in from_deepspeed(UNSCALED).notices)


@pytest.mark.parametrize("name", ["AdamW", "Adam, ZeRO 2, four micro-batches, warmup", "SGD, bf16 autocast"])
def test_the_predicted_peak_is_measured_and_inside_the_budget(name: str, one_thread: None) -> None:
    _, engine, records = run(name)

    # From the second step on the optimizer's state is there.
    peaks = [record.peak_bytes for record in records[1:]]
    assert peaks == [engine.plan.prediction.peak_bytes] * len(peaks)
    assert engine.plan.prediction.peak_bytes <= engine.plan.budget_bytes
    assert [record.divergences for record in records] == [()] * len(records)


def test_the_plan_says_what_is_taken_otherwise() -> None:
    config = RUNS["SGD, a schedule of torch's"]
    plan = from_deepspeed(config).plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    engine = from_deepspeed(config).fit(trained.build(), trained.batches()[0], loss_fn, 1 << 40)

    words = "DeepSpeed configuration: gradient_checkpointing is no key of DeepSpeed, which ignores it"
    assert any(note.startswith(words) for note in plan.notes)
    assert engine.plan.notes == plan.notes


def test_a_plan_made_before_is_applied_with_schedule_and_scale() -> None:
    config = whole(optimizer=SGD, scheduler=WARMUP, fp16={"enabled": True, "initial_scale_power": 4})
    found, model = from_deepspeed(config), trained.build()
    plan = found.plan(model, trained.batches()[0], loss_fn, 1 << 40)
    loaded = memfit.Plan.from_json(plan.to_json())

    for each in (plan, loaded):
        engine = found.apply(each, trained.build(), loss_fn)
        assert engine.optimizer is not None
        assert engine.optimizer.param_groups[0]["lr"] == 0
        assert engine.scaling is not None
        assert engine.scaling.scaler.get_scale() == 16


def test_what_is_auto_is_the_callers() -> None:
    config = {"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}

    with pytest.raises(ConfigError, match='optimizer.params.lr is "auto", which a plan does not decide'):
        from_deepspeed(config).plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    found = from_deepspeed(config, auto={"optimizer.params.lr": 0.25})
    plan = found.plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)
    assert plan.choices.micro_batch_size == TB
    assert found.optimizer([nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.25


def test_one_micro_batch_more_would_be_a_contradiction() -> None:
    found = from_deepspeed(whole(optimizer=SGD))

    with pytest.raises(
        ConfigError, match=r"fixed micro_batches=2 contradicts the DeepSpeed configuration, which says 1"
    ):
        found.plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40, fixed={"micro_batches": 2})


def test_another_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 64 samples a step and the sample holds 128"):
        from_deepspeed({"train_batch_size": 64, "optimizer": SGD}).fit(trained.build(), trained.batches()[0], loss_fn)


@pytest.mark.parametrize(("stage", "way"), [(0, "data"), (1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_for_several_ranks_the_stage_says_how_the_step_is_shared_out(stage: int, way: str) -> None:
    said = {"train_batch_size": 4 * TB, "gradient_accumulation_steps": 2, "optimizer": SGD}
    found = from_deepspeed(said | {"zero_optimization": {"stage": stage}}, world_size=2)

    assert found.config.batch.micro == TB
    assert found.config.arguments()["fixed"]["sharding"] == way
    if stage == 2:
        plan = found.plan(trained.build(), tuple(torch.cat([t, t]) for t in trained.batches()[0]), loss_fn, 1 << 40)
        assert (*way_of(plan.choices.sharding)[:2], plan.choices.micro_batches) == ("zero2", 2, 2)
        assert len(plan.prediction.ranks) == 2
    with pytest.raises(ConfigError, match="the sample holds 128 on each of 2 ranks: give a sample of a whole step"):
        found.plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)


def test_the_optimizer_is_the_configurations_or_the_callers() -> None:
    model, sample = trained.build(), trained.batches()[0]

    with pytest.raises(ConfigError, match="the DeepSpeed configuration has no optimizer"):
        from_deepspeed(whole()).plan(model, sample, loss_fn, 1 << 40)
    with pytest.raises(InputError, match="has an optimizer, and one was given besides"):
        from_deepspeed(whole(optimizer=SGD)).plan(model, sample, loss_fn, 1 << 40, adamw)
    assert from_deepspeed(whole()).plan(model, sample, loss_fn, 1 << 40, adamw).choices.micro_batches == 1


def test_a_budget_that_is_too_small_is_told_as_ever() -> None:
    with pytest.raises(InfeasibleError):
        from_deepspeed(whole(optimizer=SGD)).plan(trained.build(), trained.batches()[0], loss_fn, "16KiB")


# ------------------------------------------------------------------------------------------------------------ optimizers


def made(name: str, **params: Any) -> torch.optim.Optimizer:
    config = {"train_batch_size": 1, "optimizer": {"type": name, "params": params}}
    return from_deepspeed(config).optimizer([nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("name", "params", "kind", "settings"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True}),
        ("Adam", {"adam_w_mode": False, "betas": [0.8, 0.9]}, torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01, "fused": None}),
        ("AdamW", {"torch_adam": True, "amsgrad": True, "foreach": False}, torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        ("Lion", {"set_grad_none": False}, memfit.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
        ("SGD", {"lr": 0.1, "nesterov": True, "momentum": 0.9}, torch.optim.SGD, {"nesterov": True, "momentum": 0.9}),
        ("RMSprop", {"alpha": 0.9}, torch.optim.RMSprop, {"alpha": 0.9}),
    ],
)  # fmt: skip
def test_optimizers_have_deepspeeds_defaults(
    name: str, params: Config, kind: type[torch.optim.Optimizer], settings: Config
) -> None:
    optimizer = made(name, **params)

    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamW", {"bias_correction": False}, "optimizer.params.bias_correction: false cannot be honoured"),
        ("AdamW", {"amsgrad": True}, "optimizer.params.amsgrad: DeepSpeed 0.19.8 has it with torch_adam: true alone"),
        ("AdamW", {"foreach": True}, "optimizer.params.foreach: goes with torch_adam: true"),
        ("AdamW", {"torch_adam": True, "bias_correction": True}, "optimizer.params.bias_correction: torch's Adam"),
        ("AdamW", {"betas": [0.9, 2.0]}, "torch refuses what they say of adamw"),
        ("SGD", {"nesterov": True}, "torch refuses what they say of SGD"),
    ],
)
def test_what_no_optimizer_can_do_is_refused(name: str, params: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(name, **params)


def test_groups_of_parameters_keep_their_own_settings() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    found = from_deepspeed({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}})

    optimizer = found.optimizer([{"params": [one]}, {"params": [other], "weight_decay": 0.0}])  # type: ignore[arg-type]

    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_lion_is_deepspeeds_rule() -> None:
    """As in csrc/lion: the sign of the blend of momentum and gradient, decay times the rate, momentum after it."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    found = from_deepspeed(
        {"train_batch_size": 1, "optimizer": {"type": "Lion", "params": {"weight_decay": 0.5, "lr": 0.1}}}
    )
    optimizer = found.optimizer([parameter])
    wanted, momentum = parameter.detach().clone(), torch.zeros(3)
    for gradient in (torch.tensor([1.0, -1.0, 0.5]), torch.tensor([-30.0, 2.0, -0.1])):
        parameter.grad = gradient.clone()
        optimizer.step()
        wanted = wanted * (1 - 0.1 * 0.5) - 0.1 * (0.9 * momentum + 0.1 * gradient).sign()
        momentum = 0.999 * momentum + (1 - 0.999) * gradient

    torch.testing.assert_close(parameter.detach(), wanted)


# -------------------------------------------------------------------------------------------------------------- offload


def test_state_on_nvme_lies_in_the_folder_that_is_named(tmp_path: Path, one_thread: None) -> None:
    below = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = whole(optimizer=torch_adam("AdamW"), zero_optimization={"stage": 3, "offload_optimizer": below})
    model, data = trained.build(), trained.batches()
    engine = from_deepspeed(config).fit(model, data[0], loss_fn, 1 << 40)
    plain = from_deepspeed(RUNS["AdamW"]).fit(trained.build(), data[0], loss_fn, 1 << 40)

    assert engine.plan.choices.state_place == "disk"
    assert isinstance(engine.optimizer, ChunkedOptimizer)
    assert engine.optimizer._folder == str(tmp_path)
    assert [engine.step(b).loss for b in data] == [plain.step(b).loss for b in data]


def test_what_lies_on_nvme_counts_on_the_tier_where_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    below = {"device": "nvme", "nvme_path": str(tmp_path)}
    found = from_deepspeed(
        whole(optimizer=torch_adam("AdamW"), zero_optimization={"stage": 2, "offload_optimizer": below})
    )
    given = trained.build(), trained.batches()[0], loss_fn, "1GiB"
    gpu: Any = {"device": "rtx4090", "host_budget": "17MiB"}

    assert found.plan(*given, disk_budget="1MiB", **gpu).choices.state_place == "disk"
    too_small = "is less than the optimizer state to be offloaded"
    with pytest.raises(InputError, match=f"disk_budget=100 {too_small}"):
        found.plan(*given, disk_budget=100, **gpu)
    for plan_or_fit in (found.plan, found.fit):
        with pytest.raises(InputError, match=f"host_budget=100 {too_small}"):
            plan_or_fit(*given, host_budget=100)
        with pytest.raises(InputError, match="disk_budget='1MiB' is for the disk below a GPU's host memory"):
            plan_or_fit(*given, host_budget="1MiB", disk_budget="1MiB")


class Stack(nn.Module):
    """Blocks that can be streamed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = trained.WIDTH
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_parameters_on_nvme_are_streamed_from_the_folder_that_is_named(tmp_path: Path, one_thread: None) -> None:
    below = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = whole(optimizer={"type": "AdamW", "params": {"lr": 0.01}}, scheduler=WARMUP)
    moved = {**config, "zero_optimization": {"stage": 3, "offload_param": below, "offload_optimizer": below}}
    data = trained.batches()
    plain = from_deepspeed(config).fit(Stack(), data[0], loss_fn, 1 << 40)
    engine = from_deepspeed(moved, streamed="layers").fit(Stack(), data[0], loss_fn, 1 << 40)

    assert engine.plan.choices.streamed == "layers"
    assert engine.stream is not None
    assert [engine.step(b).loss for b in data] == [plain.step(b).loss for b in data]
    engine.stream.close()
    nowhere = {**below, "nvme_path": str(tmp_path / "nowhere")}
    lost = {**config, "zero_optimization": {"stage": 3, "offload_param": nowhere}}
    with pytest.raises(InputError, match="there is no folder .*nowhere to offload to .* nvme_path.: make it"):
        from_deepspeed(lost, streamed="layers").fit(Stack(), data[0], loss_fn, 1 << 40)
    with pytest.raises(InputError, match="there is no folder .*nowhere to offload to"):
        memfit.plan(Stack(), data[0], loss_fn, 1 << 40, disk_budget="50%", lower_tier=tmp_path / "nowhere")


def test_state_on_the_cpu_is_where_a_cpu_has_it() -> None:
    config = whole(optimizer=SGD, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})

    plan = from_deepspeed(config).plan(trained.build(), trained.batches()[0], loss_fn, 1 << 40)

    assert plan.choices.state_place == "device"


# --------------------------------------------------------------------------------------------------- schedule and scale


def test_the_schedule_stands_still_in_rehearsals_and_skipped_steps(one_thread: None) -> None:
    config = whole(optimizer=SGD, scheduler=HALVING, fp16={"enabled": True, "initial_scale_power": 40})
    data = trained.batches()
    engine = from_deepspeed(config).fit(trained.build(), data[0], loss_fn, 1 << 40)
    assert engine.optimizer is not None
    assert engine.schedule is not None
    assert engine.scaling is not None

    skipped = engine.step(data[0])
    assert skipped.skipped
    assert engine.scaling.scaler.get_scale() == 2.0**39
    assert engine.schedule.get_last_lr() == [0.1]  # type: ignore[attr-defined]
    memfit.api.rehearse(engine, data[0])
    assert engine.schedule.get_last_lr() == [0.1]  # type: ignore[attr-defined]
    while engine.step(data[0]).skipped:
        pass
    engine.step(data[1])
    assert engine.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR"])
def test_a_schedule_of_torchs_goes_on_where_another_stopped(kind: str) -> None:
    params: Any = {"StepLR": {"step_size": 2}, "OneCycleLR": {"max_lr": 0.5, "total_steps": 12}}[kind]
    found = from_deepspeed(whole(optimizer=torch_adam("AdamW"), scheduler={"type": kind, "params": params}))
    chosen = [found.optimizer([nn.Parameter(torch.zeros(1))]) for _ in range(3)]
    plain = getattr(torch.optim.lr_scheduler, kind)(chosen[0], **params)
    first, second = found.schedule(chosen[1]), found.schedule(chosen[2])
    assert first is not None
    assert second is not None
    for number in range(8):
        if number == 4:
            second.load_state_dict(first.state_dict())
            second.set()
        settings = [{k: each.param_groups[0][k] for k in ("lr", "betas")} for each in chosen]
        assert settings[1] == settings[0]
        assert number < 4 or settings[2] == settings[0]
        for schedule in (first, second):
            schedule.step()
        chosen[0].step()
        plain.step()


OVERFLOWS = [True, True, True, False, False, False, True, False, True, True, False, False, False, False, False, False]


def scales(rule: ScaleRule, *, halfway: bool = False) -> list[float]:
    """Of each step, where some overflow; a snapshot may be taken in between."""
    scaling = Scaling(torch.device("cpu"))
    scaling.follow(rule)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    found = []
    for number, overflows in enumerate(OVERFLOWS):
        if halfway and number == 7:
            state = scaling.state()
            scaling = Scaling(torch.device("cpu"))
            scaling.follow(rule)
            scaling.set_state(state)
        found.append(scaling.scaler.get_scale())
        parameter.grad = torch.full((1,), float("inf") if overflows else 1.0)
        scaling.unscale(optimizer)
        assert scaling.step(optimizer) is not overflows
    return found


RULES = [
    ScaleRule(2.0**16),
    ScaleRule(2.0**16, window=2),
    ScaleRule(8.0, window=2, least=4.0),
    ScaleRule(2.0**16, window=3, hysteresis=2),
    ScaleRule(2.0**16, window=2, hysteresis=3, refilled=True),
]
# By hand, from deepspeed/runtime/fp16/loss_scaler.py; the powers of two.
POWERS = [
    [16, 15, 14, 13, 13, 13, 13, 12, 12, 11, 10, 10, 10, 10, 10, 10],
    [16, 15, 14, 13, 13, 13, 14, 13, 13, 12, 11, 11, 11, 12, 12, 13],
    [3, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 3, 3, 4],
    [16, 16, 15, 14, 14, 14, 14, 13, 13, 12, 11, 11, 11, 11, 12, 12],
    [16, 16, 16, 15, 15, 15, 16, 16, 16, 16, 16, 16, 16, 17, 17, 18],
]


@pytest.mark.parametrize(("rule", "powers"), [*zip(RULES, POWERS, strict=True)])
@pytest.mark.parametrize("halfway", [False, True])
def test_the_scale_moves_as_deepspeeds(rule: ScaleRule, powers: list[int], *, halfway: bool) -> None:
    assert scales(rule, halfway=halfway) == [2.0**power for power in powers]


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
@pytest.mark.parametrize("rule", RULES)
def test_deepspeeds_own_scaler_moves_so(rule: ScaleRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # there is no group to ask, and rank 1 prints nothing
    real = loss_scaler.DynamicLossScaler(
        rule.initial, rule.window, rule.least, rule.hysteresis, rule.refilled, raise_error_at_min_scale=False
    )
    found = []
    for overflows in OVERFLOWS:
        found.append(float(real.cur_scale))
        real.update_scale(overflows)

    assert scales(rule) == found


def test_a_constant_scale_stays() -> None:
    assert set(scales(ScaleRule(128.0, constant=True))) == {128.0}
