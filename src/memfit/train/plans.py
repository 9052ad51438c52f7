"""Plans for what a configuration describes, before anything is trained."""

from __future__ import annotations

from typing import Any

from memfit import api
from memfit.clusters import RECOMPUTED, ClusterPrediction, predict_cluster, predict_ways
from memfit.devices import share_of
from memfit.errors import ConfigError
from memfit.hardware.machine import known_machine
from memfit.largest import Largest, largest_batch, largest_length
from memfit.techniques.sharding import ANY_PIPELINE, PIPELINES, WAYS
from memfit.techniques.technique import listed
from memfit.train import ranks
from memfit.train.assemble import Assembly, assemble
from memfit.train.config import Config
from memfit.train.progress import Display
from memfit.units import format_bytes, parse_bytes
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan


def check_budget(config: Config, plan: Plan | None = None) -> None:
    """Check that there is a budget, and that an existing plan fits into it.

    Raises:
        ConfigError: there is no budget, or the plan takes more.
    """
    budget = config.fit.budget
    if budget is None and plan is None:
        raise ConfigError('fit.budget is missing: the bytes that training may take, such as "8GiB" (or --budget 8GiB)')
    # A share of the device ("80%") is checked in planning, where the device is known.
    if budget is None or plan is None or str(budget).strip().endswith("%"):
        return
    if plan.prediction.peak_bytes > parse_bytes(budget):
        raise ConfigError(
            f"the plan takes {format_bytes(plan.prediction.peak_bytes)}, more than fit.budget allows "
            f"({format_bytes(parse_bytes(budget))}): plan again, or raise the budget"
        )


def assembled(config: Config, display: Display, device: str | None = None) -> Assembly:
    """What a configuration describes; its notes are shown.

    Args:
        config: of the run.
        display: shows progress.
        device: name of a device that this computer does not have, to plan for; then the weights of a Hugging Face model are not loaded.

    Raises:
        ConfigError, InputError: as for `assemble`.
    """
    assembly = assemble(config, display.stage, weights=device is None)
    for note in assembly.notes:
        display.note(note)
    return assembly


def plan_arguments(config: Config, assembly: Assembly, device: str | None = None) -> dict[str, Any]:
    """The keyword arguments that `memfit.plan`, `fit` and `frontier` take from a configuration, but for the budget and the device.

    Args:
        config: of the run.
        assembly: what it describes.
        device: name of the device that is planned for; None for the one that the data goes to.

    Raises:
        ConfigError: the DeepSpeed configuration says otherwise.
    """
    fit = config.fit
    return {
        "host_budget": fit.host_budget,
        "disk_budget": fit.disk_budget,
        "allow": fit.allow,
        "freeze": fit.freeze,
        "fixed": _fixed(config, assembly, device) or None,
        "clip_norm": fit.clip_norm,
    }


def _fixed(config: Config, assembly: Assembly, device: str | None) -> dict[str, Any]:
    """The pinned choices. Where DeepSpeed's offloading goes depends on the device, and how a step is shared out on the ranks: known here and not earlier."""
    fixed = {**config.fit.fixed, **config.kept_as}
    if assembly.deepspeed is None:
        return fixed
    kind = assembly.batches.device.type if device is None else known_machine(device).kind
    said = assembly.deepspeed.config.arguments(streamed=assembly.deepspeed.streamed, device=kind)["fixed"]
    settles = {
        "state_place": "zero_optimization.offload_optimizer",
        "micro_batches": "gradient_accumulation_steps",
        "sharding": "zero_optimization.stage",
    }
    for name, key in settles.items():
        value = said.get(name)
        if value is None:
            continue
        if str(fixed.get(name, value)).partition("/")[0] != str(value):
            raise ConfigError(
                f"fit.fixed.{name}: {fixed[name]!r} contradicts {key} of the DeepSpeed configuration, which comes to {value!r} here: change one of them"
            )
        fixed.setdefault(name, value)
    return fixed


def lower_tier(assembly: Assembly) -> dict[str, Any]:
    """Where a DeepSpeed configuration offloads to, as an argument of `memfit.plan`; none where it names no place."""
    folder = None if assembly.deepspeed is None else assembly.deepspeed.lower_tier
    return {} if folder is None else {"lower_tier": folder}


def make_plan(config: Config, assembly: Assembly, device: str | None, display: Display) -> Plan:
    """Only plan, for this computer or, by name, for a device that is not here."""
    assert config.fit.budget is not None
    several = ranks.devices(config, assembly, device)
    batches = assembly.batches if several is None else assembly.batches.of_rank(0, len(several.devices))
    return api.plan(
        assembly.model, batches.sample(), assembly.loss_fn, config.fit.budget, assembly.optimizer,
        **plan_arguments(config, assembly, device), **lower_tier(assembly), device=device, devices=several, progress=display.stage,
    )  # fmt: skip


def predict_few_blocks(
    config: Config, assembly: Assembly, device: str | None, display: Display
) -> tuple[tuple[ClusterPrediction, ...], str, int]:
    """Steps on many devices, of each way to share them out, from captures of a few of the model's blocks; the devices, in words; the bytes that each may hold.

    A way that the model does not allow is left out, with a note.

    Raises:
        ConfigError: the configuration names no devices.
        CaptureError, InputError: as for `predict_ways`.
    """
    if config.fit.devices is None:
        raise ConfigError("--few-blocks is of several devices: name them, --devices 64x8xh100")
    several = ranks.devices(config, assembly, device)
    assert several is not None
    asked = str(config.fit.fixed.get("sharding", "")).partition("/")[0]
    if asked in (*PIPELINES, ANY_PIPELINE):
        raise ConfigError(
            f"fit.fixed.sharding: --few-blocks predicts {listed(WAYS)}, and {asked} cuts the model into stages: leave --few-blocks out, or name another way"
        )
    machine = several.devices[0]
    budget_bytes = machine.memory_bytes if config.fit.budget is None else share_of(several, config.fit.budget)
    halves = [name for name in ("bf16", "fp16") if name in config.fit.allow]
    sample = assembly.batches.of_rank(0, len(several.devices)).sample()

    def predict(way: str) -> tuple[ClusterPrediction, ...]:
        return predict_cluster(
            assembly.model, sample, assembly.loss_fn, devices=several, optimizer=assembly.optimizer, way=way,
            recompute=tuple(RECOMPUTED), micro_batches=int(config.fit.fixed.get("micro_batches", 1)),
            precision=halves[0] if halves else "full", clip_norm=config.fit.clip_norm, device=device, progress=display.stage,
        )  # fmt: skip

    found, refused = predict_ways((asked,) if asked else WAYS, predict)
    for why in refused:
        display.note(why)
    nodes = several.nodes
    where = f" in {len(nodes.sizes)} nodes" if nodes is not None and len(nodes.sizes) > 1 else ""
    return found, f"{len(several.devices)} {machine.name}{where}", budget_bytes


def make_largest(config: Config, assembly: Assembly, device: str | None, display: Display, what: str) -> Largest:
    """The largest batch, or length of samples, that fits in one piece."""
    assert config.fit.budget is not None
    ranks.one_device(config, f"the largest {what}")
    find = largest_batch if what == "batch" else largest_length
    return find(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, config.fit.budget, assembly.optimizer,
        **plan_arguments(config, assembly, device), device=device, progress=display.stage,
    )  # fmt: skip


def make_bundle(config: Config, assembly: Assembly, device: str | None, display: Display) -> TraceBundle:
    """All that the configuration allows written down, to plan from later without the model."""
    ranks.one_device(config, "a trace")
    return api.record(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, assembly.optimizer,
        **plan_arguments(config, assembly, device), device=device, progress=display.stage,
    )  # fmt: skip


def make_frontier(config: Config, device: str | None, display: Display, points: int) -> tuple[Plan, ...]:
    """Plans from plain down to the smallest budget, likewise."""
    ranks.one_device(config, "a frontier")
    assembly = assembled(config, display, device)
    return frontier_of(config, assembly, display, points, device)


def frontier_of(
    config: Config, assembly: Assembly, display: Display, points: int = 9, device: str | None = None
) -> tuple[Plan, ...]:
    """The same of what is assembled already."""
    return api.frontier(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, assembly.optimizer,
        points=points, **plan_arguments(config, assembly, device), device=device, progress=display.stage,
    )  # fmt: skip
