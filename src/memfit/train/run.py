"""A configured run, from the start or resumed: fit, train, save the model, write the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from memfit import api, trackers
from memfit.api import frontier_points
from memfit.errors import ConfigError, PlanFileError, SnapshotError
from memfit.integrations.deepspeed.training import RateSchedule
from memfit.ranks import check_plan, fit_together, place
from memfit.trackers import Tracker
from memfit.train import alike, limit, log, ranks, snapshot_folders, snapshots
from memfit.train.adapters import merged
from memfit.train.assemble import Assembly, cache_as_read, quietly, read_deepspeed
from memfit.train.begun import CONFIG_NAME, PLAN_NAME, begun_in, folder_of
from memfit.train.config import Config, ScheduleConfig
from memfit.train.folder_lock import alone_in
from memfit.train.loop import MakeRates, RunOutcome, RunOutput, Validation, total_steps, train
from memfit.train.plans import assembled, check_budget, frontier_of, lower_tier, make_plan, plan_arguments
from memfit.train.progress import Display, SilentDisplay
from memfit.train.schedule import MovedRates
from memfit.train.snapshots import Snapshot
from memfit.train.text import FolderEncoder, has_tokenizer
from memfit.units import format_bytes
from memfit.values.plan import Plan
from memfit.values.prediction import RankPrediction
from memfit.values.report import FrontierPoint, MeasuredRank, Rehearsal, Report

if TYPE_CHECKING:
    from memfit.engine import Engine

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
        ConfigError: the output folder already holds a run, or another process trains in it; there is no budget; the plan needs more than the budget.
        InputError: the package of a tracker is missing.
    """
    display = display or SilentDisplay()
    config, there = ranks.here(config, plan)
    trackers.check(config.report.to)  # now, not when all is planned
    if there is not None:
        with _writing(config.out, there[0]):
            if ranks.restarted() and (config.out / CONFIG_NAME).is_file():
                return _resumed_on_ranks(config.out, display, (), plan, *there)
            if there[0] == 0:
                _check_out(config.out)
            return _on_ranks(config, display, plan, None, *there)
    _check_out(config.out)
    check_budget(config, plan)
    with alone_in(config.out):
        _check_out(config.out)  # again: another process may have begun there meanwhile
        assembly = assembled(config, display)
        engine = _engine(config, assembly, plan, display)
        return _train(config, assembly, engine, None, display)


def _writing(out: Path, rank: int) -> AbstractContextManager[None]:
    """While a rank trains: the first one writes into the run's folder, so no other process may."""
    return alone_in(out) if rank == 0 else nullcontext()


def _check_out(out: Path) -> None:
    if snapshot_folders.folders(out) or (out / log.NAME).exists():
        raise ConfigError(
            f"{out} holds a run already: go on with it (memfit resume {out}), or set train.out to another folder"
        )


def _on_ranks(
    config: Config, display: Display, plan: Plan | None, snapshot: Snapshot | None, rank: int, number: int
) -> Result:
    """The same as one of several ranks, of which the first one plans, finds the snapshot to go on from, prints and writes."""
    display = display if rank == 0 else SilentDisplay()
    if rank == 0:  # the others may not know the plan yet
        check_budget(config, plan)
    assembly = assembled(config, display)
    assembly = replace(assembly, batches=assembly.batches.of_rank(rank, number))
    if snapshot is not None:  # rank 0 alone has looked for one
        _check_steps(snapshot, total_steps(config.train, assembly.batches))
    own = alike.marks_of(config, assembly)
    engine = fit_together(
        lambda _: plan or make_plan(config, assembly, None, display),
        assembly.model, assembly.batches.sample(), assembly.loss_fn, assembly.optimizer, **lower_tier(assembly), progress=display.stage,
    )  # fmt: skip
    assert engine.sharded is not None
    agreement = engine.sharded.agreement
    alike.check_alike(agreement, own)
    if config.train.rank_timeout is not None:
        engine.sharded.wait_at_most(timedelta(seconds=config.train.rank_timeout))
    return _train(config, assembly, engine, agreement.told(snapshot), display)


def resume(
    path: Path, display: Display | None = None, settings: Iterable[str] = (), plan: Plan | None = None
) -> Result:
    """Resume a run that stopped.

    The saved plan is followed again, so that the numbers are those of a run that never stopped; with another budget,
    batch or the like in `settings`, it is planned anew.

    Args:
        path: folder of the run, or one of its snapshots.
        display: shows progress.
        settings: changes to the run's configuration, such as "fit.budget=4GiB".
        plan: to follow instead of the saved one, or of one that is made.

    Raises:
        ConfigError: another process trains in the folder.
        SnapshotError: there is nothing to go on from, or what was named is damaged.
        PlanFileError: never; a plan that does not apply here is made again, with a note.
    """
    display = display or SilentDisplay()
    there = place()
    with _writing(folder_of(path), 0 if there is None else there[0]):
        if there is not None:
            return _resumed_on_ranks(path, display, settings, plan, *there)
        begun = begun_in(path, settings, display)
        config, snapshot = begun.config, begun.snapshot
        if config.fit.devices is None:
            config = ranks.for_number(config, 1)
        ranks.here(config, plan)
        trackers.check(config.report.to)
        plan = plan or begun.plan(config, display)
        check_budget(config, plan)
        assembly = assembled(config, display)
        if snapshot is not None:
            otherwise = replace(begun, before=ranks.for_number(begun.before, 1)).planned_otherwise(config)
            _check_steps(snapshot, total_steps(config.train, assembly.batches), otherwise=otherwise)
        engine = _engine(config, assembly, None, display) if plan is None else _again(plan, config, assembly, display)
        return _train(config, assembly, engine, snapshot, display)


def _check_steps(snapshot: Snapshot, total: int, *, otherwise: bool = False) -> None:
    """Refuse what a run that goes on from a snapshot cannot be: shorter than it is, or over and planned anew.

    Args:
        snapshot: to go on from.
        total: steps of the whole run.
        otherwise: whether it is planned anew.
    """
    if snapshot.step > total:
        raise ConfigError(
            f"{snapshot.step} steps are done, and the run is to have {total}: ask for {snapshot.step} or more (--set train.steps=...), or name an "
            "earlier snapshot, as memfit resume takes one, too"
        )
    if otherwise and snapshot.step == total:
        # Nothing is to be replaced by a plan that no step was taken under.
        raise ConfigError(
            f"{snapshot.step} steps are done, and none is left to train with other settings: ask for more (--set train.steps=...)"
        )


def _resumed_on_ranks(
    path: Path, display: Display, settings: Iterable[str], plan: Plan | None, rank: int, number: int
) -> Result:
    """The same as one of several ranks, more or fewer than before. Each looks for itself what was configured; it is compared once they have met."""
    begun = begun_in(path, settings, display if rank == 0 else None)
    config = ranks.for_number(begun.config, number)
    trackers.check(config.report.to)
    if rank == 0:
        plan = plan or begun.plan(config, display)
    return _on_ranks(config, display, plan, begun.snapshot, rank, number)


def plan_to_resume(path: Path, number: int, display: Display, settings: Iterable[str] = ()) -> Plan:
    """The plan that so many ranks will follow when they go on with a run, before they start.

    Args:
        path: folder of the run, or one of its snapshots.
        number: of ranks.
        display: shows progress.
        settings: changes to the run's configuration.

    Raises:
        ConfigError, InputError, SnapshotError: it cannot be gone on with so.
    """
    with alone_in(folder_of(path)):
        begun = begun_in(path, settings, display)
        config = ranks.for_number(begun.config, number)
        ranks.check(config, number)
        trackers.check(config.report.to)
        plan = begun.plan(config, display)
        check_budget(config, plan)
        return plan or make_plan(config, assembled(config, display), None, display)


def _again(plan: Plan, config: Config, assembly: Assembly, display: Display) -> Engine:
    """An engine that follows the saved plan."""
    try:
        return _engine(config, assembly, plan, display)
    except PlanFileError as error:
        check_budget(config)  # what was trained under a plan made before may have none
        display.note(f"the saved plan does not apply here ({error}); planning again")
        return _engine(config, assembly, None, display)


def _engine(config: Config, assembly: Assembly, plan: Plan | None, display: Display) -> Engine:
    if plan is not None:
        return api.apply(plan, assembly.model, assembly.loss_fn, assembly.optimizer, **lower_tier(assembly))
    assert config.fit.budget is not None
    return api.fit(
        assembly.model, assembly.batches.sample(), assembly.loss_fn, config.fit.budget, assembly.optimizer,
        **plan_arguments(config, assembly), **lower_tier(assembly), progress=display.stage,
    )  # fmt: skip


def _train(config: Config, assembly: Assembly, engine: Engine, snapshot: Snapshot | None, display: Display) -> Result:
    out = config.out
    together = None if engine.sharded is None else engine.sharded.agreement
    rank = 0 if together is None else together.rank
    writes = rank == 0
    if writes:
        _begin_folder(config, engine)
    if assembly.deepspeed is not None:
        assembly.deepspeed.scale(engine)
    if assembly.generation is not None and engine.sharded is not None and engine.sharded.lacks_parameters:
        raise ConfigError(
            f"generate needs the whole model on every rank, and under {engine.plan.choices.sharding} each has a stage of it: leave generate out, or set "
            "fit.fixed.sharding to zero3"
        )
    read = 0 if snapshot is None else snapshot_folders.size(snapshot.folder)
    if config.early_stopping is not None:  # the best model is read in the end
        read = max(read, snapshots.bytes_of(engine.model.state_dict()))
    limit.enforce(engine.model, assembly.batches.device, read)
    with _tracked(config, engine.plan, snapshot, display) if writes else nullcontext(()) as opened:
        outcome = train(
            engine,
            assembly.batches,
            RunOutput(out, config.to_json(), display, opened, together),
            config.train,
            schedule=_schedule(config, assembly),
            validation=_validation(config, assembly, engine.plan),
            snapshot=snapshot,
            early_stopping=config.early_stopping,
            generation=assembly.generation,
        )
        if outcome.signal is not None:
            for tracker in opened:
                tracker.close("stopped")
    if outcome.signal is not None:
        return Result(outcome, engine.plan, out, None, None, rank)
    if engine.sharded is not None:
        whole = engine.state_dict()
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
        read_from = config.hf_folder(config.model.hf)
        if config.lora is not None and config.lora.merge and whole is None:
            with quietly(), cache_as_read(model, read_from):
                merged(model).save_pretrained(out / "merged")  # type: ignore[operator] # transformers' own method
        folder = out / "model"
        with quietly(), cache_as_read(model, read_from):
            # transformers' own method
            model.save_pretrained(folder, **({} if whole is None else {"state_dict": whole}))  # type: ignore[operator]
        source = config.hf_folder(config.data.tokenizer or config.model.hf)
        if source.is_dir() and has_tokenizer(source):
            for each in (folder, out / "merged"):
                if each.is_dir():
                    FolderEncoder(source).save(each)
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
    if outcome.stopped_early is not None:
        facts.append(("stopped early", outcome.stopped_early))
    if outcome.best is not None:
        facts.append(("best evaluation, of which the model is", str(outcome.best)))
    facts += [
        ("global batch", str(assembly.batches.size)),
        ("torch", torch.__version__),
        ("device", str(assembly.batches.device)),
    ]
    facts += [
        (f"rank {number}", _of_rank(measured, predicted))
        for number, (measured, predicted) in enumerate(zip(outcome.ranks, engine.plan.prediction.ranks, strict=True))
    ]
    points: tuple[FrontierPoint, ...] = ()
    if config.report.frontier:
        points = frontier_points(frontier_of(config, assembly, display))
    report: Report = engine.report(config.model.hf or config.model.python or "memfit")
    report = replace(
        report,
        rehearsal=engine.rehearsal or _rehearsal(config.out),
        records=log.records(config.out),
        texts=log.texts(config.out),
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


def _of_rank(measured: MeasuredRank, predicted: RankPrediction) -> str:
    """Measured beside predicted, in words."""
    peak = "not measured" if measured.measured_peak_bytes is None else format_bytes(measured.measured_peak_bytes)
    told = f"peak {peak}, {format_bytes(predicted.peak_bytes)} predicted"
    if measured.waiting is not None:
        told += f"; waits {100 * measured.waiting:.0f} % of its passes, {100 * predicted.waiting:.0f} % predicted"
    return told


def _rehearsal(out: Path) -> Rehearsal | None:
    """The one held before the run was interrupted."""
    try:
        return Rehearsal.from_json(json.loads((out / REHEARSAL_NAME).read_text(encoding="utf-8")))
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
