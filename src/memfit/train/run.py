"""A configured run, from the start or resumed: fit, train, save the model, write the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from memfit import api, trackers
from memfit.api import frontier_points
from memfit.errors import ConfigError, PlanFileError, SnapshotError
from memfit.hardware.machine import known_machine
from memfit.integrations.deepspeed.training import RateSchedule
from memfit.ranks import check_plan, fit_together
from memfit.trackers import Tracker
from memfit.train import log, ranks, snapshot_folders, snapshots
from memfit.train.assemble import Assembly, assemble, read_deepspeed, without_bars
from memfit.train.config import Config, ScheduleConfig, from_json, load_config, override
from memfit.train.loop import MakeRates, RunOutcome, RunOutput, Validation, train
from memfit.train.progress import Display, SilentDisplay
from memfit.train.schedule import MovedRates
from memfit.train.snapshots import Snapshot
from memfit.train.text import FolderEncoder, has_tokenizer
from memfit.units import format_bytes, parse_bytes
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan
from memfit.values.report import FrontierPoint, Rehearsal, Report

if TYPE_CHECKING:
    from memfit.engine import Engine

CONFIG_NAME: Final = "config.json"
PLAN_NAME: Final = "plan.json"
REPORT_NAME: Final = "report.json"
REHEARSAL_NAME: Final = "rehearsal.json"
TRACKERS_NAME: Final = "trackers"


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run.

    Attributes:
        outcome: how the training ended.
        plan: what it followed.
        out: its folder.
        model: where the trained model is; None when the run was stopped.
        report: the report's page, or its JSON when no page was asked for.
        rank: of this process, where it is one of several.
    """

    outcome: RunOutcome
    plan: Plan
    out: Path
    model: Path | None
    report: Path | None
    rank: int = 0


def start(config: Config, display: Display | None = None, plan: Plan | None = None) -> Result:
    """Train from the start.

    Args:
        config: of the run.
        display: shows progress.
        plan: to follow instead of making one.

    Raises:
        ConfigError: the output folder already holds a run; there is no budget; the plan needs more than the budget.
        InputError: the package of a tracker is missing.
    """
    display = display or SilentDisplay()
    config, there = ranks.here(config, plan)
    trackers.check(config.report.to)  # now, not when all is planned
    if there is not None:
        return _on_ranks(config, display if there[0] == 0 else SilentDisplay(), plan, *there)
    _check_out(config.out)
    check_budget(config, plan)
    snapshots.check_space(config.out, 0)
    assembly = assembled(config, display)
    engine = _engine(config, assembly, plan, display)
    return _train(config, assembly, engine, None, display)


def _check_out(out: Path) -> None:
    if snapshot_folders.folders(out) or (out / log.NAME).exists():
        raise ConfigError(
            f"{out} holds a run already: go on with it (memfit resume {out}), or set train.out to another folder"
        )


def _on_ranks(config: Config, display: Display, plan: Plan | None, rank: int, number: int) -> Result:
    """The same as one of several ranks, of which the first one plans, prints and writes."""
    if rank == 0:
        _check_out(config.out)
    check_budget(config, plan)
    assembly = assembled(config, display)
    assembly = replace(assembly, batches=assembly.batches.of_rank(rank, number))
    engine = fit_together(
        lambda: plan or make_plan(config, assembly, None, display),
        assembly.model, assembly.batches.sample(), assembly.loss_fn, assembly.optimizer, progress=display.stage,
    )  # fmt: skip
    return _train(config, assembly, engine, None, display)


def resume(path: Path, display: Display | None = None, settings: Iterable[str] = ()) -> Result:
    """Resume a run that stopped.

    The saved plan is followed again, so that the numbers are those of a run that never stopped; with another budget,
    batch or the like in `settings`, it is planned anew.

    Args:
        path: folder of the run, or one of its snapshots.
        display: shows progress.
        settings: changes to the run's configuration, such as "fit.budget=4GiB".

    Raises:
        SnapshotError: there is nothing to go on from, or what was named is damaged.
        PlanFileError: never; a plan that does not apply here is made again, with a note.
    """
    display = display or SilentDisplay()
    snapshot, out = _find(path, display)
    config = load_config(out / CONFIG_NAME) if snapshot is None else from_json(snapshot.config, out)
    data = config.to_json()
    data["train"]["out"] = str(out.resolve())  # the folder may have been moved
    before = from_json(data, out)
    for setting in settings:
        override(data, setting)
    config = from_json(data, out)
    ranks.not_resumed(config)
    trackers.check(config.report.to)
    if config.out.resolve() != out.resolve():
        raise ConfigError(f"train.out: a run goes on in its own folder, {out}")
    plan = None
    planned = [(each.fit, each.model, each.optim.name, each.deepspeed) for each in (config, before)]
    if planned[0] == planned[1]:
        plan = _plan_so_far(snapshot, out, display)
    check_budget(config, plan)
    assembly = assembled(config, display)
    engine = _engine(config, assembly, None, display) if plan is None else _again(plan, config, assembly, display)
    return _train(config, assembly, engine, snapshot, display)


def _find(path: Path, display: Display) -> tuple[Snapshot | None, Path]:
    """The snapshot to go on from (None: the run stopped before its first), and the run's folder."""
    if (path / "snapshot.json").exists():
        return snapshots.read(path), path.resolve().parent
    snapshots.sweep(path)
    if not snapshot_folders.folders(path) and (path / CONFIG_NAME).is_file():
        display.note(f"{path} holds no snapshot yet: starting from the beginning")
        return None, path
    return snapshots.latest(path, display.note), path


def _plan_so_far(snapshot: Snapshot | None, out: Path, display: Display) -> Plan | None:
    """What the run has followed: another plan might split the batch in another way, which changes the last bits."""
    try:
        if snapshot is not None:
            return Plan.from_json(snapshot.plan)
        return Plan.load(out / PLAN_NAME) if (out / PLAN_NAME).exists() else None
    except PlanFileError as error:
        display.note(f"the saved plan cannot be read ({error}); planning again")
        return None


def _again(plan: Plan, config: Config, assembly: Assembly, display: Display) -> Engine:
    """An engine that follows the saved plan."""
    try:
        return _engine(config, assembly, plan, display)
    except PlanFileError as error:
        check_budget(config)  # what was trained under a plan made before may have none
        display.note(f"the saved plan does not apply here ({error}); planning again")
        return _engine(config, assembly, None, display)


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
        ConfigError: the DeepSpeed configuration offloads the optimizer's state to another place.
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
    """The pinned choices. Where DeepSpeed's offloading goes depends on the device, so it is known here and not earlier."""
    fixed = dict(config.fit.fixed)
    if assembly.deepspeed is None:
        return fixed
    kind = assembly.batches.device.type if device is None else known_machine(device).kind
    said = assembly.deepspeed.config.arguments(streamed=assembly.deepspeed.streamed, device=kind)["fixed"]
    if "state_place" in said:
        place = said["state_place"]
        if fixed.get("state_place", place) != place:
            raise ConfigError(
                f"fit.fixed.state_place: {fixed['state_place']!r} contradicts zero_optimization.offload_optimizer of the DeepSpeed configuration, "
                f"which comes to {place!r} here: change one of them"
            )
        fixed["state_place"] = place
    return fixed


def _engine(config: Config, assembly: Assembly, plan: Plan | None, display: Display) -> Engine:
    if plan is not None:
        return api.apply(plan, assembly.model, assembly.loss_fn, assembly.optimizer, **_lower_tier(assembly))
    assert config.fit.budget is not None
    return api.fit(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, config.fit.budget, assembly.optimizer,
        **plan_arguments(config, assembly), **_lower_tier(assembly), progress=display.stage,
    )  # fmt: skip


def _lower_tier(assembly: Assembly) -> dict[str, Any]:
    folder = None if assembly.deepspeed is None else assembly.deepspeed.lower_tier
    return {} if folder is None else {"lower_tier": folder}


def _train(config: Config, assembly: Assembly, engine: Engine, snapshot: Snapshot | None, display: Display) -> Result:
    out = config.out
    together = None if engine.sharded is None else engine.sharded.agreement
    rank = 0 if together is None else together.rank
    writes = rank == 0
    if writes:
        _begin_folder(config, engine)
    if assembly.deepspeed is not None:
        assembly.deepspeed.scale(engine)
    with _tracked(config, engine.plan, snapshot, display) if writes else nullcontext(()) as opened:
        outcome = train(
            engine,
            assembly.batches,
            RunOutput(out, config.to_json(), display, opened, together),
            config.train,
            schedule=_schedule(config, assembly),
            validation=_validation(config, assembly, engine.plan),
            snapshot=snapshot,
        )
        if outcome.signal is not None:
            for tracker in opened:
                tracker.close("stopped")
    if outcome.signal is not None:
        return Result(outcome, engine.plan, out, None, None, rank)
    if engine.sharded is not None:
        whole = engine.sharded.whole()
        engine.sharded.close()
        model = _save_model(config, engine.model, whole) if writes else None
    else:
        with engine.gathered(on_host=True, changed=False) as trained:
            model = _save_model(config, trained)
    report = _report(config, assembly, engine, outcome, display) if writes else None
    return Result(outcome, engine.plan, out, model, report, rank)


def _begin_folder(config: Config, engine: Engine) -> None:
    """What is known before the first step."""
    out = config.out
    snapshots.check_space(out, 0)
    (out / PLAN_NAME).unlink(missing_ok=True)  # The folder must never hold a plan that was made for other settings.
    _write(out / CONFIG_NAME, json.dumps(config.to_json(), indent=1) + "\n")
    _write(out / PLAN_NAME, json.dumps(engine.plan.to_json()) + "\n")
    if engine.rehearsal is not None:  # a resumed run follows the plan without rehearsing it again
        _write(out / REHEARSAL_NAME, json.dumps(asdict(engine.rehearsal)) + "\n")


def _schedule(config: Config, assembly: Assembly) -> ScheduleConfig | MakeRates:
    """The run's own, or the one of the DeepSpeed configuration beside it."""
    if assembly.deepspeed is None or assembly.deepspeed.config.scheduler is None:
        return config.schedule

    def rates(optimizer: torch.optim.Optimizer, total_steps: int) -> MovedRates:
        deepspeed = read_deepspeed(config, total_steps)
        assert deepspeed is not None

        def make(optimizer: torch.optim.Optimizer) -> RateSchedule:
            made = deepspeed.schedule(optimizer)
            assert made is not None
            return made

        return MovedRates(optimizer, make)

    return rates


@contextmanager
def _tracked(config: Config, plan: Plan, snapshot: Snapshot | None, display: Display) -> Iterator[tuple[Tracker, ...]]:
    """The trackers that the configuration names, open; a resumed run goes on in the same ones."""
    with ExitStack() as stack:
        opened = []
        for kind in dict.fromkeys(config.report.to):
            tracker = trackers.tracker(
                kind,
                config.out / TRACKERS_NAME,
                plan=plan,
                settings=config.to_json(),
                name=config.out.resolve().name,
                step=0 if snapshot is None else snapshot.step,
                note=display.note,
            )
            opened.append(stack.enter_context(tracker))
            display.note(f"tracked with {kind}; to look: {tracker.look}")
        yield tuple(opened)


def _validation(config: Config, assembly: Assembly, plan: Plan) -> Validation | None:
    """The validation data, with what its loss averages over."""
    if assembly.validation is None:
        return None
    return Validation(assembly.validation, assembly.loss_fn, _weights(config, plan))


def _weights(config: Config, plan: Plan) -> str:
    """What the loss averages over: the task says it, or what was found when the batch was split."""
    by_task = {"causal-lm": "next_tokens:labels", "masked-lm": "tokens:labels", "sequence-classification": "samples"}
    if config.model.task is not None:
        return by_task[config.model.task]
    return "samples" if plan.choices.weights == "whole" else plan.choices.weights


def _write(file: Path, text: str) -> None:
    """Replace a file whole."""
    waiting = file.with_name(f".{file.name}.partial")
    try:
        waiting.write_text(text, encoding="utf-8")
        waiting.replace(file)
    except OSError as error:
        raise SnapshotError(f"cannot write {file}: {error.strerror or error}") from error


def _save_model(config: Config, model: torch.nn.Module, whole: Mapping[str, Any] | None = None) -> Path:
    """The trained model, in the form its users read: a Hugging Face folder, or torch's state dict.

    Args:
        config: of the run.
        model: to save.
        whole: its state dict, where this rank has a part of it only.
    """
    out = config.out
    try:
        if config.model.hf is None:
            waiting = out / ".model.pt.partial"
            with waiting.open("wb") as stream:
                snapshots.save(model.state_dict() if whole is None else whole, stream)
            return waiting.rename(out / "model.pt")
        folder = out / "model"
        with without_bars():
            # transformers' own method
            model.save_pretrained(folder, **({} if whole is None else {"state_dict": whole}))  # type: ignore[operator]
        source = config.path(config.data.tokenizer or config.model.hf)
        if source.is_dir() and has_tokenizer(source):
            FolderEncoder(source).save(folder)
        return folder
    except OSError as error:
        raise SnapshotError(
            f"cannot write the trained model to {out}: {error.strerror or error}; the last snapshot holds it too"
        ) from error


def _report(config: Config, assembly: Assembly, engine: Engine, outcome: RunOutcome, display: Display) -> Path:
    """Write the report; the page only when asked for."""
    facts = [("steps", str(outcome.step))]
    if outcome.loss is not None:
        facts.append(("loss of the last step", f"{outcome.loss:.4f}"))
    if outcome.validation_loss is not None:
        facts.append(("validation loss", f"{outcome.validation_loss:.4f}"))
    facts += [
        ("global batch", str(assembly.batches.size)),
        ("torch", torch.__version__),
        ("device", str(assembly.batches.device)),
    ]
    points: tuple[FrontierPoint, ...] = ()
    if config.report.frontier:
        points = frontier_points(_frontier(config, assembly, display))
    report: Report = engine.report(config.model.hf or config.model.python or "memfit")
    report = replace(
        report,
        rehearsal=engine.rehearsal or _rehearsal(config.out),
        records=log.records(config.out),
        frontier=points,
        facts=(*report.facts, *facts),
    )
    json_file = config.out / REPORT_NAME
    _write(json_file, json.dumps(report.to_json()) + "\n")
    if not config.report.html:
        return json_file
    from memfit.views import write_report

    page = config.out / "report.html"
    write_report(report, page)
    return page


def _rehearsal(out: Path) -> Rehearsal | None:
    """The one held before the run was interrupted."""
    try:
        held = json.loads((out / REHEARSAL_NAME).read_text(encoding="utf-8"))
        return Rehearsal(**{**held, "divergences": tuple(held["divergences"]), "curve": tuple(held["curve"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def plan_for_ranks(config: Config, number: int, display: Display, plan: Plan | None = None) -> Plan:
    """The plan that so many ranks will follow, made before they start.

    Args:
        config: of the run.
        number: of ranks.
        display: shows progress.
        plan: to follow instead of making one.

    Raises:
        ConfigError, InputError: the run cannot be started so.
    """
    ranks.check(config, number)
    trackers.check(config.report.to)
    _check_out(config.out)
    check_budget(config, plan)
    if plan is not None:
        check_plan(plan, number)
        return plan
    config = ranks.of_ranks(config, number)
    return make_plan(config, assembled(config, display), None, display)


def make_plan(config: Config, assembly: Assembly, device: str | None, display: Display) -> Plan:
    """Only plan, for this computer or, by name, for a device that is not here."""
    assert config.fit.budget is not None
    several = ranks.devices(config, assembly, device)
    batches = assembly.batches if several is None else assembly.batches.of_rank(0, len(several.devices))
    return api.plan(
        assembly.model, batches.sample(), assembly.loss_fn, config.fit.budget, assembly.optimizer,
        **plan_arguments(config, assembly, device), **_lower_tier(assembly), device=device, devices=several, progress=display.stage,
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
    return _frontier(config, assembly, display, points, device)


def _frontier(
    config: Config, assembly: Assembly, display: Display, points: int = 9, device: str | None = None
) -> tuple[Plan, ...]:
    return api.frontier(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, assembly.optimizer,
        points=points, **plan_arguments(config, assembly, device), device=device, progress=display.stage,
    )  # fmt: skip
