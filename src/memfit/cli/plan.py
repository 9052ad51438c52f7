"""`memfit plan`: does it fit, and at what cost?"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import (
    Answer,
    Status,
    add_deepspeed,
    add_device,
    add_settings,
    check_place,
    device_of,
    read_config,
)
from memfit.cli.way_table import RECOMPUTED, table
from memfit.errors import ConfigError, PlanFileError
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.clusters import ClusterPrediction
    from memfit.integrations.deepspeed import Written
    from memfit.largest import Largest
    from memfit.train.config import Config
    from memfit.values.plan import Plan


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "plan", parents=[shared], help="say whether training fits, and what it costs", description=__doc__
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="configuration file (YAML, or JSON)")
    add_settings(parser)
    add_deepspeed(parser)
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan as JSON, for memfit train --plan")
    parser.add_argument(
        "--deepspeed-out",
        metavar="FILE",
        type=Path,
        help="write the plan as a DeepSpeed configuration; what that cannot say is told",
    )
    add_device(parser, "plan")
    parser.add_argument(
        "--devices",
        metavar="DEVICES",
        help='plan for several devices, none of which need be here: "4x24GiB", "2x8xh100@360GB/s,400GB/s" (nodes of eight, and their links), or a machine '
        "file, machines.yaml (sets fit.devices); the budget is that of each",
    )
    parser.add_argument(
        "--few-blocks",
        action="store_true",
        help="with --devices: predict bytes and seconds from a few of the model's blocks, with no block recomputed, with every block, and two choices "
        "between; for models and clusters of any size. Without a budget each device has all of its memory",
    )
    parser.add_argument(
        "--largest",
        choices=("batch", "length"),
        help="find instead the largest batch that fits in one piece, or the longest samples",
    )
    parser.add_argument(
        "--save-trace",
        metavar="FILE",
        type=Path,
        help="write down the steps that planning may weigh, to plan from later without the model",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="plan from what --save-trace wrote, in place of CONFIG; takes --budget",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Plan, and report the result."""
    if (arguments.config is None) == (arguments.trace is None):
        raise ConfigError("memfit plan takes a CONFIG or --trace FILE, one of them")
    check_place(arguments.save, "plan")
    check_place(arguments.save_trace, "trace")
    check_place(arguments.deepspeed_out, "DeepSpeed configuration")
    if arguments.trace is not None:
        return _from_trace(arguments)
    device = device_of(arguments)
    config = read_config(arguments)
    from memfit.train import progress
    from memfit.train.plans import (
        assembled,
        check_budget,
        make_bundle,
        make_largest,
        make_plan,
        predict_few_blocks,
    )
    from memfit.train.ranks import elsewhere

    if not arguments.few_blocks:
        check_budget(config)
    display = progress.display()
    device = device or elsewhere(config)
    try:
        assembly = assembled(config, display, device)
        if arguments.few_blocks:
            return _few_blocks(*predict_few_blocks(config, assembly, device, display))
        if arguments.largest is not None:
            found = make_largest(config, assembly, device, display, arguments.largest)
            return _largest(found, arguments.largest)
        if arguments.save_trace is not None:
            bundle = make_bundle(config, assembly, device, display)
            _written(bundle.save, arguments.save_trace, "trace")
        plan = make_plan(config, assembly, device, display)
    finally:
        display.close()
    from memfit.train.loop import total_steps

    return _answer(plan, arguments, config, total_steps(config.train, assembly.batches))


def _few_blocks(found: Sequence[ClusterPrediction], devices: str, budget_bytes: int) -> Answer:
    """What a step takes on each device, way by way."""
    from memfit.clusters import fastest

    first = found[0]
    split = f", in {first.micro_batches} micro-batches" if first.micro_batches > 1 else ""
    computing = (
        "all are estimated"
        if first.seconds_are == "estimated"
        else "computing is measured on this computer, collectives are estimated"
    )
    each_has = f"{first.samples // first.ranks} of {first.samples} samples on each{split}"
    lines = [
        f"{first.blocks} blocks on {devices}, each of which may hold {format_bytes(budget_bytes)}; {each_has}.",
        f"Seconds of a step are between those with collectives beside computing and those with nothing beside it; {computing}.",
        "",
        *table(found, budget_bytes, 160),
        "",
    ]
    rows = [
        {**asdict(each), "state_bytes": each.state_bytes, "fits": each.peak_bytes <= budget_bytes} for each in found
    ]
    best = fastest(found, budget_bytes)
    if best is not None:
        lines.append(
            f"Fastest that fits: {best.way}, {RECOMPUTED[best.recompute]} recomputed: {format_bytes(best.peak_bytes)} on each device, "
            f"{best.samples / best.step_seconds:.3g} to {best.samples / best.overlapped_seconds:.3g} samples a second on all of them."
        )
    else:
        least = min(found, key=lambda each: each.peak_bytes)
        lines.append(
            f"Nothing fits: the least is {format_bytes(least.peak_bytes)} on each device, with {least.way} and {RECOMPUTED[least.recompute]} recomputed. "
            "Take more or larger devices, fewer samples on each (fit.global_batch), or more micro-batches (fit.fixed.micro_batches)."
        )
    return Answer(
        {"verb": "plan", "fits": best is not None, "budget_bytes": budget_bytes, "predictions": rows},
        "\n".join(lines),
        Status.FITS if best is not None else Status.DOES_NOT_FIT,
    )


def _largest(found: Largest, what: str) -> Answer:
    unit = {"batch": "samples", "length": "positions"}[what]
    needs = f"its smallest plan needs {format_bytes(found.needed_bytes)}"
    text = f"Largest {what} that fits in one piece: {found.size} {unit}{' (no more was tried)' if found.limited else ''}; {needs}."
    if not found.size:
        text = f"No {what} fits: one of 1 needs {format_bytes(found.needed_bytes)}."
    data = {"verb": "plan", "fits": found.size > 0, f"largest_{what}": found.size, "needed_bytes": found.needed_bytes}
    return Answer(data, text, Status.FITS if found.size else Status.DOES_NOT_FIT)


def _from_trace(arguments: argparse.Namespace) -> Answer:
    from memfit.values.bundle import TraceBundle

    for name in ("settings", "device", "devices", "few_blocks", "save_trace", "deepspeed", "largest"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{'set' if name == 'settings' else name.replace('_', '-')} needs a CONFIG: a trace is as it was captured"
            )
    if arguments.budget is None:
        raise ConfigError("--trace needs --budget: the bytes to plan for")
    from memfit.planning import replan

    return _answer(replan(TraceBundle.load(arguments.trace), arguments.budget), arguments)


def _written(save: Callable[[Path], None], path: Path, what: str) -> None:
    try:
        save(path)
    except OSError as error:
        raise PlanFileError(f"cannot write the {what} {path}: {error.strerror or error}") from error


def _deepspeed(plan: Plan, config: Config | None) -> Written:
    """The plan in DeepSpeed's words, with the optimizer and schedule of the DeepSpeed configuration beside ours, or our own optimizer."""
    from memfit.integrations import deepspeed

    if config is None:
        return deepspeed.write(plan)
    folder = str(config.out)
    if config.deepspeed.get("optimizer"):
        said = deepspeed.read(config.deepspeed, strict=config.deepspeed_strict)
        return deepspeed.write(plan, optimizer=said.optimizer, scheduler=said.scheduler, nvme_path=folder)
    settings = {name: value for name, value in config.optim.settings().items() if name != "fused"}
    # torch's own, so that its defaults are the ones that count here; SGD is torch's in any case.
    which = {"sgd": {"type": "SGD"}, "adam": {"type": "Adam"}, "adamw": {"type": "AdamW"}}[config.optim.name]
    more = {} if config.optim.name == "sgd" else {"torch_adam": True}
    more |= {"adam_w_mode": False} if config.optim.name == "adam" else {}
    return deepspeed.write(plan, optimizer=deepspeed.Optimizer(which["type"], {**settings, **more}), nvme_path=folder)


def _answer(
    plan: Plan, arguments: argparse.Namespace, config: Config | None = None, steps: int | None = None
) -> Answer:
    data = {"verb": "plan", "fits": True, **plan.summary()}
    if steps is not None:
        data["total_steps"] = steps
    text = plan.explain()
    if arguments.save is not None:
        _written(plan.save, arguments.save, "plan")
        data["saved"] = str(arguments.save)
        text += f"\nSaved: {arguments.save}"
    if arguments.deepspeed_out is not None:
        written = _deepspeed(plan, config)
        _written(written.save, arguments.deepspeed_out, "DeepSpeed configuration")
        data["deepspeed"], data["left_out"] = str(arguments.deepspeed_out), list(written.left_out)
        text += f"\nDeepSpeed configuration: {arguments.deepspeed_out}\nIt cannot say:"
        text += "".join(f"\n- {each}" for each in written.left_out)
    return Answer(data, text)
