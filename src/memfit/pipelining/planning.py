"""The plan of a step that pipelines share: how many stages, how many pipelines beside each other, how many micro-batches; the fastest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

import torch

from memfit import batches
from memfit.batches import Batch
from memfit.capture.gloo_time import agreeing_seconds
from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, InputError
from memfit.hardware.topology import Topology
from memfit.parallel.pipeline import buffers_between
from memfit.pipelining.candidates import candidates_for_stages
from memfit.pipelining.links import line_of, sending_seconds
from memfit.pipelining.stage_planner import StagePlanner
from memfit.pipelining.stages import NotFasterError, StagesFound, find_stages, refined, same_stages
from memfit.planner.description import own_numbers
from memfit.planner.schedules import check_schedule, textbook_bubble
from memfit.planning import remember
from memfit.progress import tell
from memfit.techniques.accumulation import ACCUMULATION
from memfit.techniques.choices import Choices, in_words
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.sharding import PIPELINES, SHARDED_STATE, Pipelines
from memfit.techniques.technique import listed
from memfit.units import format_bytes, format_seconds
from memfit.values.pipeline import PipelinePlan
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction, RankPrediction
from memfit.values.request import Request
from memfit.values.script import Script
from memfit.values.stages import Line, Schedule

MOST_ROUNDS: Final = 8  # micro-batches for each stage: with as many the textbook's bubble is below an eighth
ROUNDS: Final = 4  # of cutting anew where the ranks of a cut hold more than it has counted, or less
SEVERAL_PATHS: Final = (
    "values of the batch (whether there is padding, say) decide which operations run: stages are planned for on all paths that the sample shows, and the "
    "predicted peak is that of micro-batches that take most"
)
WITHIN_CALLS: Final = (
    "values of the batch choose among paths of forward that part late in a stage, so it runs again only what lies in calls of modules that run the same on all "
    "of them; it runs anything again where every batch is padded to one length longer than any text"
)
OWN_NUMBERS: Final = (
    "forward draws random numbers (dropout): each rank draws its own, also those with the same stage, so masks are not those of one device, and losses are "
    "equal to its losses in distribution only"
)
StagePlanners: TypeAlias = dict[tuple[int, int, Choices, int], StagePlanner]
TOO_MUCH: Final = 0.1  # of a budget: no cut counts so much more than its ranks hold


def settings_for(asked: str, ranks: int) -> tuple[str, ...]:
    """The pipelines that so many ranks may form, the longest first.

    Args:
        asked: what the user fixed: "" or "pipeline" for all, a schedule as "1f1b", or all of it as "1f1b/2x2"; with "+zero1" those that share out state.
        ranks: of all pipelines.

    Raises:
        InputError: what was asked is for another number of ranks.
    """
    shape, plus, sharded = asked.partition("+")
    way, _, numbers = shape.partition("/")
    # GPipe holds more and is no faster than 1F1B, which becomes it where there are fewer micro-batches than stages.
    schedules = (way,) if way in PIPELINES else ("1f1b", "interleaved")
    lengths = [n for n in range(ranks, 1, -1) if ranks % n == 0]
    made = [
        Pipelines(schedule, n, ranks // n, shards_state=shards)
        for schedule in schedules
        for n in lengths
        for shards in ((False,) if n == ranks else (False, True))
    ]
    if numbers:
        found = [one for one in made if str(one).partition("/")[2] == asked.partition("/")[2]]
    else:
        found = [one for one in made if not plus or (one.shards_state and sharded == SHARDED_STATE)]
    if not found:
        raise InputError(
            f"fixed sharding={asked!r} is nothing that {ranks} devices can form: write one of {listed(map(str, made))}, or name as many devices as it takes"
        )
    return tuple(map(str, found))


@dataclass(eq=False)
class PipelinePlanning:
    """Plans for pipelines of one length at any budget; what is captured for one serves the next.

    All ranks hand in their parts of the batch, as for every other way: a pipeline of K ranks runs K of them.

    Args:
        source: of the model; its sample is the part of one rank.
        request: whose budget is that of each device.
        topology: the devices.
        setting: as `Pipelines` writes it; in "1f1b" GPipe is taken where there are fewer micro-batches than stages.
        planners: of stages, by length of a pipeline, micro-batches, techniques and how many ranks share out state; those of other settings serve this one, too.

    Raises:
        InputError: the request asks for more than stages can have, or the devices cannot form such pipelines.
    """

    source: TraceSource
    request: Request
    topology: Topology
    setting: str
    planners: StagePlanners = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipelines = Pipelines.of(self.setting)
        self._candidates, self._left_out = candidates_for_stages(self.source, self.request)
        weighting = self.source.weighting(self.request.freeze)
        if weighting.weights is None and not _on_meta(self.source):
            raise InputError(f"its micro-batches would not add up to the batch: {weighting.reason}")
        self._weights, self._unsure = weighting.weights or "samples", weighting.reason
        length, devices = self.pipelines.ranks, self.topology.devices
        self._batch = _of_pipeline(self.source.sample, length)
        for other in range(length, len(devices)):
            if devices[other] != devices[other % length]:
                raise InputError(
                    f"pipelines beside each other have the same stages, and devices {other % length} and {other} are not alike: take a pipeline over all of "
                    "them, or list the same devices in the same order for each"
                )

    def plan(self, budget_bytes: int | None = None, *, refines: bool = True, faster_than: float = math.inf) -> Plan:
        """The fastest plan found in so many bytes on each device; in the request's where none are given.

        Args:
            budget_bytes: of each device.
            refines: what the stages of a cut run again is chosen anew for the bytes that are left.
            faster_than: seconds of a step; what cannot be faster is not looked for.

        Raises:
            NotFasterError: nothing is faster.
            InfeasibleError: no cut fits.
            InputError: the model cannot be cut.
        """
        budget_bytes = self._budget(budget_bytes)
        best: Plan | None = None
        lacking: InfeasibleError | InputError | NotFasterError | None = None
        others: list[Plan] = []
        for techniques in self._candidates:
            # State in 8 bits makes no step faster in which nothing has to be run again.
            if techniques.state_format != "32bit" and any(
                _techniques_of(plan.choices).techniques == techniques.but(state_format="32bit").techniques
                and _keeps_everything(plan)
                for plan in others
            ):
                continue
            try:
                made = self._in_the_best_number(techniques, budget_bytes, refines=refines, faster_than=faster_than)
            except (InfeasibleError, InputError, NotFasterError) as error:
                if lacking is None or _least(error) < _least(lacking):
                    lacking = error
                continue
            others.append(made)
            if best is None or made.prediction.step_seconds < best.prediction.step_seconds:
                best = made
        if best is None:
            assert lacking is not None, "at least one candidate was tried"
            raise lacking
        slower = (
            f"{in_words(plan.choices)}: {format_seconds(plan.prediction.step_seconds)} a step at {format_bytes(plan.prediction.peak_bytes)}"
            for plan in others
            if plan is not best
        )
        return remember(replace(best, rejected=(*best.rejected, *slower, *self._left_out)), self)

    def smallest(self) -> tuple[int, Plan]:
        """The smallest budget in which a plan was found, and that plan.

        Raises:
            InputError: the model cannot be cut.
        """
        least = _smallest(partial(self.plan, refines=False))
        return least, self.plan(least)

    def as_captured(self, plan: Plan) -> AsCut:
        """For the cut of a plan of this one: in one of several ranks other stages than its own cannot be captured."""
        return AsCut(self, plan)

    def _budget(self, budget_bytes: int | None) -> int:
        if budget_bytes is not None:
            return budget_bytes
        assert self.request.budget is not None, "a budget is in the request or given"
        return self.request.budget.bytes

    def _in_the_best_number(self, techniques: Choices, budget_bytes: int, *, refines: bool, faster_than: float) -> Plan:
        """The fastest with these techniques: micro-batches are doubled for as long as the step gets faster.

        Raises:
            InfeasibleError, InputError, NotFasterError: as for `plan`.
        """
        best: Plan | None = None
        lacking: InfeasibleError | InputError | NotFasterError | None = None
        for number in self._numbers():
            named = self.pipelines.in_words()
            tell(self.source.progress, f"planning for {named}, {ACCUMULATION.words(number)}", 0.0)
            limit = faster_than if best is None else min(faster_than, best.prediction.step_seconds)
            try:
                with frozen(self.source.model, self.request.freeze):
                    found = self._found(techniques, number, budget_bytes, refines=refines, faster_than=limit)
            except NotFasterError as error:
                if best is not None:
                    break
                lacking = error
                continue
            except (InfeasibleError, InputError) as error:
                if lacking is None or _least(error) < _least(lacking):
                    lacking = error
                continue
            made = self._plan(found, techniques, budget_bytes)
            if best is not None and made.prediction.step_seconds >= best.prediction.step_seconds:
                break
            best = made
        if best is None:
            assert lacking is not None, "at least one number was tried"
            raise lacking
        return best

    def _numbers(self) -> Iterator[int]:
        """Numbers of micro-batches to try: from one for each rank on, doubled; fewer where there are not as many samples."""
        length, samples = self.pipelines.ranks, batches.size(self._batch)
        asked = self.request.micro_batches
        if asked is not None:
            yield asked
            return
        number = length
        if samples < length or samples % length:
            number = next(n for n in range(samples, 0, -1) if samples % n == 0 and n <= max(length, 1))
        while number <= min(samples, MOST_ROUNDS * length):
            if samples % number == 0:
                yield number
            number *= 2

    def _planner(self, techniques: Choices, number: int) -> StagePlanner:
        sharing = self.pipelines.replicas if self.pipelines.shards_state else 1
        key = self.pipelines.ranks, number, techniques, sharing
        if key not in self.planners:
            alike = [one.undivided for (_, _, had, _), one in self.planners.items() if had == techniques]
            samples = batches.size(self._batch) // number
            known = next((one for one in alike if one.samples == samples), None)
            known = known or next((one for one in alike if not one.unconfirmed), None)
            self.planners[key] = StagePlanner(
                self.source, self._batch, number, techniques, self._weights, sharing, known
            )
        return self.planners[key]

    def _found(
        self, techniques: Choices, number: int, budget_bytes: int, *, refines: bool, faster_than: float
    ) -> StagesFound:
        """The fastest cut found.

        Raises:
            NotFasterError, InfeasibleError, InputError: as for `find_stages`; or the best cut found needs more.
        """
        length, per_rank = self.pipelines.ranks, self.pipelines.per_rank
        few = self.pipelines.schedule == Schedule.ONE_FORWARD_ONE_BACKWARD and number < length
        used = Schedule.GPIPE if few else Schedule(self.pipelines.schedule)
        check_schedule(used, length, number, per_rank)
        planner = self._planner(techniques, number)
        model, parts = self.source.model, {call.path for call in planner.calls.calls}
        twice = set(buffers_between(model, parts)).intersection(planner.whole.changed_buffers) if per_rank > 1 else ()
        if twice:
            raise InputError(
                f"forward writes the buffer {min(twice)} between the parts of the model, which each of a rank's stages would do: interleaved stages are "
                "left out"
            )
        line = self._line(budget_bytes)
        try:
            find = partial(find_stages, planner, faster_than=faster_than)
            found = self._within(line, lambda line: find(line, used, length, per_rank))
        except InfeasibleError as error:
            why = _why_little_again(planner)
            if not why:
                raise
            raise InfeasibleError(f"{error}; {why}", **error.facts) from error
        return refined(planner, found, line) if refines else found

    def _line(self, budget_bytes: int) -> Line:
        return line_of(self._network, self.pipelines, max(1, budget_bytes))

    @property
    def _network(self) -> Topology:
        """The devices, as slow as this computer is by now where they are its processes. After something was captured, which tells."""
        return replace(self.topology, slowdown=self.source.slowdown)

    def cut_as(self, made: Plan, budget_bytes: int, *, refines: bool = True) -> Plan:
        """A plan of this one in other bytes with the cut that it has: only what is run again in each stage is chosen anew, and nothing is captured.

        Raises:
            InfeasibleError: it does not fit.
        """
        assert made.pipeline is not None, "it is of a pipeline"
        cut = made.pipeline.cut
        techniques = next(one for one in self._candidates if one.techniques == _techniques_of(made.choices).techniques)
        with frozen(self.source.model, self.request.freeze):
            planner = self._planner(techniques, cut.micro_batches)
            line = self._line(budget_bytes)
            found = self._within(line, lambda line: same_stages(planner, line, cut))
            found = refined(planner, found, line) if refines else found
        return remember(self._plan(found, techniques, budget_bytes), self)

    def _within(self, line: Line, find: Callable[[Line], StagesFound]) -> StagesFound:
        """Stages with which no rank takes more than its device has.

        Raises:
            InfeasibleError, InputError: as for `find`; or what it finds needs more.
        """
        searched = line
        budget_bytes = max(device.bytes for device in line.devices)
        found: StagesFound | None = None
        for _ in range(ROUNDS):
            try:
                found = find(searched)
            except InfeasibleError as error:
                # The cut counts somewhat more than a rank holds, since not everything that a stage holds is there at its peak.
                lacking = (error.minimum_bytes or 1 << 62) - (error.budget_bytes or 0)
                if found is not None or searched != line or lacking > TOO_MUCH * budget_bytes:
                    raise
                searched = _with_more(line, [lacking] * len(line.devices))
                continue
            above = [max(peaks) - device.bytes for peaks, device in zip(found.peak_bytes, line.devices, strict=True)]
            if max(above) <= 0:
                return found
            # And a rank that shares out state otherwise than the one with the most may hold more at another moment.
            searched = _with_more(searched, [-max(0, more) for more in above])
        assert found is not None, "a round that finds nothing raises, or is followed by another one"
        rank = above.index(max(above))
        has, needed = line.devices[rank].bytes, max(found.peak_bytes[rank])
        raise InfeasibleError(
            f"the best cut found needs {format_bytes(needed)} on device {rank}, which has {format_bytes(has)}: "
            "give it more, or take more micro-batches",
            budget_bytes=has,
            minimum_bytes=needed,
        )

    def _plan(self, found: StagesFound, techniques: Choices, budget_bytes: int) -> Plan:
        source, cut = self.source, found.pipeline.cut
        number, length, ranks = cut.micro_batches, self.pipelines.ranks, len(self.topology.devices)
        setting = str(replace(self.pipelines, schedule=str(cut.schedule)))
        size = batches.size(self._batch) // number
        choices = techniques.but(
            micro_batches=number,
            micro_batch_size=size,
            weights=self._weights,
            techniques=(*techniques.techniques, ("sharding", setting)),
        )
        sending = max(sending_seconds(self._network, sizes, self.pipelines) for sizes in found.gradient_bytes)
        sending += agreeing_seconds(self._network, tuple(range(length)))
        passes = max(cut.pass_seconds, 1e-12)
        predicted = tuple(
            RankPrediction(
                rank,
                found.peak_bytes[rank % length][rank // length % len(found.peak_bytes[rank % length])],
                cut.step_seconds + sending,
                rank % length,
                max(0.0, 1 - cut.busy_seconds[rank % length] / passes),
            )
            for rank in range(ranks)
        )
        fullest = max(range(length), key=lambda rank: max(found.peak_bytes[rank]))
        pipeline: PipelinePlan = replace(found.pipeline, replicas=self.pipelines.replicas)
        average = sum(rank.waiting for rank in predicted) / ranks
        told = (
            f"stages wait {100 * average:.1f} % of their passes on average, where (K - 1)/(M + K - 1) is {100 * textbook_bubble(length, number):.1f} % for "
            f"{length} equal stages and {ACCUMULATION.words(number)}; messages between stages are counted as if they overlapped with computing on both sides"
        )
        masks = (OWN_NUMBERS,) if pipeline.draws else ()
        planner = self._planner(techniques, number)
        several = SEVERAL_PATHS if planner.kinds else planner.one_answer
        why = _why_little_again(planner)
        on_meta = (f"{self._unsure}: micro-batches are weighted by samples",) if self._unsure else ()
        named = " and ".join(f"stage {stage}, {pipeline.named(stage)}" for stage in pipeline.stages_of(fullest))
        return Plan(
            budget_bytes,
            choices,
            # Every rank follows the scripts of its stages.
            script=Script(),
            prediction=Prediction(
                max(found.peak_bytes[fullest]),
                max(found.plain_peak_bytes),
                cut.step_seconds + sending,
                found.plain_seconds + sending,
                min(cut.bound_seconds, cut.step_seconds) + sending,
                found.seconds_are,
                peak_phase=found.phases[fullest],
                peak_module=named,
                peak_operation=f"{cut.schedule}, {ACCUMULATION.words(number)}",
                plain_with=in_words(choices),
                ranks=predicted,
            ),
            signature=batches.signature(source.sample),
            model=found.model,
            device=source.machine.name,
            torch_version=torch.__version__,
            clip_norm=self.request.clip_norm,
            notes=(told, *masks, *filter(None, (several, why)), *on_meta),
            changed_buffers=found.changed_buffers,
            device_kind=source.machine.kind,
            pipeline=pipeline,
            differs=own_numbers("rank") if pipeline.draws else "",
        )


@dataclass(frozen=True, slots=True, eq=False)
class AsCut:
    """Further plans for the cut of one, where nothing can be captured.

    Attributes:
        planning: that has made it.
        made: the plan.
    """

    planning: PipelinePlanning
    made: Plan

    @property
    def source(self) -> None:
        """Nothing is captured."""

    def plan(self, budget_bytes: int | None = None, *, refines: bool = True) -> Plan:
        """As `PipelinePlanning.cut_as`."""
        budget_bytes = self.made.budget_bytes if budget_bytes is None else budget_bytes
        return self.planning.cut_as(self.made, budget_bytes, refines=refines)

    def smallest(self) -> tuple[int, Plan]:
        """The smallest budget in which a plan was found."""
        least = _smallest(partial(self.plan, refines=False))
        return least, self.plan(least)

    def as_captured(self, plan: Plan) -> AsCut:
        """The same for another plan."""
        return AsCut(self.planning, plan)


def _smallest(plan: Callable[[int], Plan]) -> int:
    """The smallest budget in which a plan is found: by halves, down to the byte; what a plan takes is tried as a budget of its own."""
    refused, least = 0, 1 << 62
    found = plan(least)
    tried = found.prediction.peak_bytes
    while least - refused > 1:
        try:
            found, least = plan(tried), tried
            peak = found.prediction.peak_bytes
            tried = peak if refused < peak < least else (least + refused) // 2
        except InfeasibleError:
            refused = tried
            tried = min(2 * refused, (least + refused) // 2)
    return least


def _with_more(line: Line, more: Sequence[int]) -> Line:
    """Devices with so many more bytes each; fewer where that is less than nothing."""
    devices = zip(line.devices, more, strict=True)
    return replace(line, devices=tuple(replace(device, bytes=max(1, device.bytes + size)) for device, size in devices))


def _why_little_again(planner: StagePlanner) -> str:
    """What the user should know where stages run nothing again, or only some of what they could; empty where they may run anything."""
    if planner.unconfirmed:
        return f"{planner.unconfirmed}, and stages are captured on fake tensors alone: so they run nothing again, and may hold other bytes than predicted"
    return WITHIN_CALLS if planner.plans_within_calls else ""


def _techniques_of(choices: Choices) -> Choices:
    """What a candidate has."""
    return Choices(techniques=choices.techniques, sharding="")


def _keeps_everything(plan: Plan) -> bool:
    return plan.pipeline is not None and not any(script.recomputations for script in plan.pipeline.scripts)


def _least(error: InfeasibleError | InputError | NotFasterError) -> int:
    """Bytes that it tells; more than there can be where it tells none, and fewer where they are not what is lacking."""
    if isinstance(error, NotFasterError):
        return 0
    return getattr(error, "minimum_bytes", None) or 1 << 62


def _on_meta(source: TraceSource) -> bool:
    return any(p.device.type == "meta" for p in source.model.parameters())


def _of_pipeline(sample: Batch, ranks: int) -> Batch:
    """The parts of so many ranks, each like the sample."""
    size = batches.size(sample)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        if not batches.counts_samples(tensor, size):
            return tensor
        if tensor.device.type == "meta":
            return tensor.new_empty((ranks * size, *tensor.shape[1:]))
        return tensor.repeat(ranks, *(1 for _ in tensor.shape[1:]))

    return batches.map_tensors(longer, sample)
