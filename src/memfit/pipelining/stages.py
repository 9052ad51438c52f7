"""Stages of a model, captured and planned: each alone, in this process.

The parts are found in a trace of one micro-batch and cut for what they take by themselves; the stages of that cut are captured as they will run, and planned;
then it is cut again with what was learnt, until nothing changes. No process is started for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from math import inf
from typing import Final, TypeAlias

from memfit.parallel.schedule import MESSAGES_ARE_RELEASED
from memfit.pipelining.alike_stretches import Stretch
from memfit.pipelining.refinement import faster
from memfit.pipelining.stage_paths import NOTHING, OnPaths, StagePlan, on_paths
from memfit.pipelining.stage_planner import StagePlanner
from memfit.planner.cut_costs import cost_of
from memfit.planner.cutting import cut as cut_parts
from memfit.planner.schedules import rank_orders
from memfit.planner.solution import Solution
from memfit.planner.stage_bytes import around_seconds, rank_peak
from memfit.step.part_calls import PartCalls
from memfit.values.pipeline import Message, PipelinePlan
from memfit.values.stages import Cut, Line, Parts, Recompute, Schedule, StageCost

# Of what a step takes at best. Parts by themselves take about as long as in stages, which do more around them.
SURE: Final = 0.97
ROUNDS: Final = 20  # of cutting again with what the captured stages have shown, until the best of these cuts is taken


@dataclass(frozen=True, slots=True)
class StagesFound:
    """A cut whose stages are planned.

    Attributes:
        pipeline: the stages; of one pipeline.
        peak_bytes: of each rank of a pipeline, in each of the pipelines.
        plain_peak_bytes: of each rank, the largest with nothing dropped.
        phases: of each rank, where the largest peak is.
        gradient_bytes: of each parameter of each rank.
        changed_buffers: that forwards write.
        model: digest of the model.
        plain_seconds: of a step in which nothing is dropped, in this cut.
        seconds_are: as in `Prediction`.
    """

    pipeline: PipelinePlan
    peak_bytes: tuple[tuple[int, ...], ...]
    plain_peak_bytes: tuple[int, ...]
    phases: tuple[str, ...]
    gradient_bytes: tuple[tuple[int, ...], ...]
    changed_buffers: tuple[str, ...]
    model: str
    plain_seconds: float
    seconds_are: str


class NotFasterError(Exception):
    """No cut is as fast as what is known already.

    Attributes:
        at_best_seconds: of a step, with everything kept, by what parts take by themselves.
    """

    def __init__(self, at_best_seconds: float) -> None:
        super().__init__(f"{at_best_seconds} s at best")
        self.at_best_seconds = at_best_seconds


def find_stages(
    planner: StagePlanner,
    line: Line,
    schedule: Schedule,
    ranks: int,
    per_rank: int = 1,
    *,
    faster_than: float = inf,
) -> StagesFound:
    """The fastest cut found in which every device holds no more than its bytes. Nothing is trained, no process started.

    Args:
        planner: of the model and its batch.
        line: its devices and their links; their speeds are relative to that for which the planner's source has seconds.
        schedule: as for `memfit.planner.cutting.cut`.
        ranks, per_rank: of a pipeline, and the stages on each.
        faster_than: seconds of a step; what cannot be faster is of no use, and no stage is captured for it.

    Raises:
        NotFasterError: no cut is, whatever it holds.
        InfeasibleError: no cut fits.
        InputError: the model, the batch or the schedule is not one for a pipeline.
        CaptureError: the forward cannot be looked at without values.
    """
    known: dict[tuple[int, int], StageCost] = {}
    around = around_seconds(planner.whole, schedule)
    least = min(device.bytes for device in line.devices)
    cuts: list[Cut] = []
    if faster_than < inf:
        parts = replace(planner.parts_now(), around_seconds=around)
        number = planner.micro_batches
        at_best = cut_parts(parts, _ample(line), number, schedule, stages=ranks, per_device=per_rank).step_seconds
        if SURE * at_best >= faster_than:
            raise NotFasterError(at_best)
    for tried in count(1):
        exact = replace(planner.parts_now(), known=known, around_seconds=around)
        found = cut_parts(exact, line, planner.micro_batches, schedule, stages=ranks, per_device=per_rank)
        new = [stretch for stretch in _stretches(found) if stretch not in known] or _captured_now(planner, found)
        if not new:
            break
        for stretch in new:
            known[stretch] = planner.cost(*stretch, found, least)
        cuts.append(found)
        # Stages may take longer than their parts by themselves, and then those that are not captured yet always look faster.
        if tried >= ROUNDS and (best := _best_of(cuts, exact, line)) is not None:
            for stretch in _captured_now(planner, best):
                known[stretch] = planner.cost(*stretch, best, least)
            found = _cost_anew(best, exact, line)
            break
    return _described(planner, found, line, exact)


def _stretches(cut: Cut) -> list[Stretch]:
    return [(stage.first, stage.end) for stage in cut.stages]


def _captured_now(planner: StagePlanner, cut: Cut) -> list[Stretch]:
    """Capture the stages for which others like them stood until now; which these were."""
    lacking = [stretch for stretch in _stretches(cut) if not planner.is_captured(*stretch)]
    for stretch in lacking:
        planner.solver(*stretch)
    return lacking


def _best_of(cuts: Sequence[Cut], parts: Parts, line: Line) -> Cut | None:
    """The fastest of these by what their stages take as they were captured; None where none fits."""
    fitting = (
        cut
        for cut in (_cost_anew(each, parts, line) for each in cuts)
        if all(peak <= line.devices[d].bytes for d, peak in zip(cut.devices, cut.peak_bytes, strict=True))
    )
    return min(fitting, key=lambda cut: cut.step_seconds, default=None)


def _cost_anew(cut: Cut, parts: Parts, line: Line) -> Cut:
    """The same cut with other costs of its parts, or other devices."""
    return cost_of(parts, line, [s.end for s in cut.stages], cut.micro_batches, cut.schedule, cut.devices)


def same_stages(planner: StagePlanner, line: Line, cut: Cut) -> StagesFound:
    """The same cut for other bytes: nothing is captured for it, only what is run again in each stage may be other than it was.

    Args:
        planner: by which it was found.
        line: the devices with the bytes that they have now.
        cut: of the planner's batch.
    """
    least = min(device.bytes for device in line.devices)
    _captured_now(planner, cut)
    known = {stretch: planner.cost(*stretch, cut, least) for stretch in _stretches(cut)}
    exact = replace(planner.parts, known=known)
    found = _cost_anew(cut, exact, line)
    return _described(planner, found, line, exact)


def refined(planner: StagePlanner, found: StagesFound, line: Line) -> StagesFound:
    """The same cut, in which stages run no more again than the bytes of their devices ask for.

    Args:
        planner: by which it was found.
        found: stages that fit.
        line: the devices with the bytes that they have.
    """
    cut = found.pipeline.cut
    before = [planner.solution(stage.first, stage.end, stage.recompute) for stage in cut.stages]
    if not any(solution.recomputations for of_stage in before for solution in of_stage):
        return found
    solvers = [planner.solvers(stage.first, stage.end) for stage in cut.stages]

    of_ranks: dict[tuple[int, ...], _RankPeaks] = {}

    def of_stages(solutions: Sequence[Solution]) -> list[StagePlan]:
        each = iter(solutions)
        return [tuple(islice(each, len(of_stage))) for of_stage in solvers]

    def fits(tried: Sequence[Solution]) -> bool:
        if not all(
            solver.draws.holds_on_all_paths(one.recomputations)
            for solver, one in zip(chain.from_iterable(solvers), tried, strict=True)
        ):
            return False
        peaks = _peaks(planner, cut, list(map(on_paths, of_stages(tried))), of_ranks)
        return all(
            size <= line.devices[device].bytes
            for device, of_replicas in zip(cut.devices, peaks, strict=True)
            for size, _ in of_replicas
        )

    flat = list(chain.from_iterable(before))
    made_faster = faster(list(chain.from_iterable(solvers)), flat, fits)
    if sum(one.seconds for one in made_faster) >= sum(one.seconds for one in flat):
        return found
    solutions = of_stages(made_faster)
    known = {}
    for stage, solution in zip(cut.stages, solutions, strict=True):
        cost = planner.cost(stage.first, stage.end, cut, min(device.bytes for device in line.devices))
        known[stage.first, stage.end] = replace(
            cost, menu=(planner.way(stage.first, stage.end, solution, cut.schedule),)
        )
    exact = replace(planner.parts, known=known)
    made = cost_of(exact, line, [s.end for s in cut.stages], cut.micro_batches, cut.schedule, cut.devices)
    made = replace(made, bound_seconds=min(cut.bound_seconds, made.step_seconds))
    return _described(planner, made, line, exact, solutions, plain_seconds=found.plain_seconds)


# Of a rank in each of the pipelines, bytes and phase; and what its stages run again there: while it is kept, nothing else has its identity.
_RankPeaks: TypeAlias = tuple[list[tuple[int, str]], list[OnPaths]]


def _peaks(
    planner: StagePlanner, cut: Cut, dropped: Sequence[OnPaths], known: dict[tuple[int, ...], _RankPeaks]
) -> list[list[tuple[int, str]]]:
    """What each rank holds, in each of the pipelines, and in which phase, where its stages run this again.

    Args:
        planner, cut: of the stages.
        dropped: what each runs again.
        known: of ranks, with which they are looked up here: a search changes one stage after the other.
    """
    ranks = len(cut.devices)
    orders = rank_orders(cut.schedule, ranks, cut.micro_batches, len(cut.stages) // ranks)
    stretches = _stretches(cut)

    def of_rank(rank: int) -> list[tuple[int, str]]:
        mine = {number: stretches[number] for number in range(rank, len(stretches), ranks)}
        here = list(mine.values())
        shared, batch, released = planner.shared_bytes(here), planner.batch_bytes(here), MESSAGES_ARE_RELEASED
        peaks = []
        for share in planner.shares(here):
            levels = {
                n: planner.levels(*stretch, dropped[n], share[stretch], [mine[each] for each in mine if each > n])
                for n, stretch in mine.items()
            }
            peaks.append(rank_peak(orders[rank], cut.schedule, levels, shared, batch, messages_released=released))
        return peaks

    def of_rank_once(rank: int) -> list[tuple[int, str]]:
        mine = list(dropped[rank::ranks])
        key = rank, *(id(plan) for of_stage in mine for plan in of_stage)
        if key not in known:
            known[key] = of_rank(rank), mine
        return known[key][0]

    return [of_rank_once(rank) for rank in range(ranks)]


def _described(
    planner: StagePlanner,
    found: Cut,
    line: Line,
    parts: Parts,
    solutions: Sequence[StagePlan] | None = None,
    plain_seconds: float | None = None,
) -> StagesFound:
    """The cut with the script of each stage, and what each rank will hold.

    Args:
        planner: of its stages.
        found, line, parts: the cut, and what it was made of.
        solutions: the plans of its stages; None for those that the cut has chosen among.
        plain_seconds: of a step in which nothing is dropped; None where the fastest way of each stage is the one.
    """
    ranks = len(found.devices)
    if solutions is None:
        solutions = [planner.solution(stage.first, stage.end, stage.recompute) for stage in found.stages]
    solvers = [planner.solver(stage.first, stage.end) for stage in found.stages]
    stretches = _stretches(found)
    dropped = list(map(on_paths, solutions))
    scripts = [planner.script(*stretch, plans) for stretch, plans in zip(stretches, dropped, strict=True)]
    of_ranks = _peaks(planner, found, dropped, {})
    plain = [max(size for size, _ in of_rank) for of_rank in _peaks(planner, found, [NOTHING for _ in stretches], {})]
    calls, model = planner.calls, planner.source.model
    parameters = [calls.parameters(model, *stretch) for stretch in stretches]
    pipeline = PipelinePlan(
        found,
        tuple(call.path for call in calls.calls),
        tuple(tuple(named) for named in parameters),
        tuple(sorted(calls.read_between)),
        tuple(_messages(calls, stage.end) for stage in found.stages[:-1]),
        tuple(scripts),
        draws=any(operation.random for operation in planner.whole.operations),
    )
    if plain_seconds is None:
        unhurried = replace(parts, known={k: replace(c, menu=(_fastest(c),)) for k, c in (parts.known or {}).items()})
        plain_seconds = cost_of(
            unhurried, _ample(line), pipeline.ends, found.micro_batches, found.schedule, found.devices
        ).step_seconds
    of_rank = [{n: p for named in parameters[rank::ranks] for n, p in named.items()} for rank in range(ranks)]
    return StagesFound(
        pipeline,
        tuple(tuple(size for size, _ in of_replicas) for of_replicas in of_ranks),
        tuple(plain),
        tuple(max(of_replicas)[1] for of_replicas in of_ranks),
        tuple(tuple(p.nbytes for p in named.values() if p.requires_grad) for named in of_rank),
        tuple(dict.fromkeys(_buffer_of_model(name) for solver in solvers for name in solver.trace.changed_buffers)),
        planner.whole.model,
        plain_seconds,
        planner.whole.seconds_are,
    )


def _ample(line: Line) -> Line:
    """Devices on which everything fits."""
    return replace(line, devices=tuple(replace(device, bytes=1 << 62) for device in line.devices))


def _fastest(cost: StageCost) -> Recompute:
    return min(cost.menu, key=lambda way: way.extra_seconds)


def _buffer_of_model(name: str) -> str:
    """A stage has the model as its part."""
    return name.removeprefix("model.")


def _messages(calls: PartCalls, end: int) -> tuple[Message, ...]:
    """What crosses a boundary."""
    found = ((calls.calls[label.call].path, calls.meta(label)) for label in calls.crossing(end))
    return tuple(
        Message(path, meta.shape, str(meta.dtype).removeprefix("torch."), meta.bytes, meta.requires_grad)
        for path, meta in found
    )
