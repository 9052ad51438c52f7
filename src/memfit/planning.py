"""All plans for one model and batch under one request: connects the planner with capture. Needs no torch by itself.

Where the planner lacks a trace (`MissingTrace`), the trace is captured, added to the bundle, and the planner is called again. The `Planning` of a plan made
in this process is remembered for `memfit.apply` and `memfit.replan`; the plan itself is a plain value.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final, Protocol, TypeVar

from memfit.capture.learnt_paths import as_seen, same_path, same_sizes, with_seen, writes_for_good
from memfit.errors import CaptureError, EngineError, InfeasibleError, InputError
from memfit.planner import search
from memfit.planner.by_hand import RecomputePlacement, plan_by_hand
from memfit.planner.description import PlainStep, plain_step, script_of
from memfit.planner.found import Found
from memfit.planner.known_sizes import KnownSizes
from memfit.planner.savings import without
from memfit.planner.smallest_budget import smallest
from memfit.planner.solver import Solver
from memfit.planner.solvers import (
    NOT_CAPTURED,
    SLACK_BYTES,
    MissingTrace,
    MissingWeighting,
    RefusedError,
    Solvers,
    roles,
)
from memfit.progress import Progress, tell
from memfit.techniques.choices import Choices
from memfit.units import format_bytes, format_seconds, parse_bytes
from memfit.values.bundle import Refusal, TraceBundle, Weighting
from memfit.values.plan import Plan
from memfit.values.request import Budget, Request
from memfit.values.trace import Trace

# Torch itself refuses, with a RuntimeError, a step that writes into what backward reads: in 16 bits, say, where other tensors are saved.
CANNOT_RUN: Final = (CaptureError, EngineError, InputError, RuntimeError)

T = TypeVar("T")


class Source(Protocol):
    """Where traces come from: `memfit.capture.trace_source.TraceSource`, or another object with these methods."""

    loss_fn: Any
    optimizer: Any

    def trace_of(self, choices: Choices, ahead: str = "") -> Trace:
        """The trace of the step with these choices; `ahead` is told beside its progress."""

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        """How the losses of micro-batches add up to the batch's."""


class PlansAgain(Protocol):
    """What has made a plan in this process and makes further ones of the same step: a `Planning`, or the one of a pipeline."""

    @property
    def source(self) -> Source | None:
        """Of the step; None where nothing can be captured."""

    def plan(self, budget_bytes: int | None = None) -> Plan:
        """As `Planning.plan`."""

    def smallest(self) -> tuple[int, Any]:
        """As `Planning.smallest`."""

    def as_captured(self, plan: Plan) -> PlansAgain:
        """As `Planning.as_captured`."""


class Planning:
    """Plans for one bundle at any budget.

    Args:
        bundle: what is known to begin with.
        source: captures what is missing; None where nothing can be captured, so that what is missing is rejected.
        placement: of recomputation, where the user did it by hand.

    Attributes:
        bundle: what is known by now.
        plain: of the step that predictions are compared with, where that is not this bundle's baseline; None where it is.
    """

    def __init__(
        self, bundle: TraceBundle, source: Source | None = None, placement: RecomputePlacement | None = None
    ) -> None:
        self.bundle = bundle
        self.source = source
        self.placement = placement
        self.plain: Planning | None = None
        self._solvers: dict[Choices, Solver] = {}
        self._errors: dict[Choices, Exception] = {}  # as they were raised, for whoever asks in this process

    @property
    def request(self) -> Request:
        """What the user asked."""
        return self.bundle.request

    def plan(self, budget_bytes: int | None = None, *, savings: bool = True, explained: bool = True) -> Plan:
        """The fastest plan found in so many bytes; in the request's where none are given.

        Args:
            budget_bytes: what it has to fit into.
            savings: tell what each technique saves, which takes a capture of the step without it.
            explained: where nothing fits, look for the smallest budget that would do, which takes captures.

        Raises:
            InfeasibleError: nothing fits.
            NothingFitsError: nothing fits, and that need not be `explained`.
            CaptureError, InputError: the step cannot be captured as the request wants it, or was not.
        """
        if budget_bytes is None:
            assert self.request.budget is not None, "a budget is in the request or given"
            budget_bytes = self.request.budget.bytes
        made = self._ask(lambda solvers: search.plan(solvers, budget_bytes, compared=savings, explained=explained))
        if self.plain is not None:
            made = replace(made, prediction=replace(made.prediction, **asdict(self.plain.plain_step())))
        return remember(replace(made, undoable=not self._writes_for_good(made)), self)

    def plan_by_hand(self) -> Plan:
        """The plan that recomputes where the user said; its budget is what it takes.

        Raises:
            InputError, InfeasibleError: as for `memfit.recompute`.
        """
        placement = self.placement
        assert placement is not None, "whoever asks has placed something"
        return remember(self._ask(lambda solvers: plan_by_hand(solvers, placement)), self)

    def seconds_at_best(self) -> float:
        """Of a step of the baseline, on the rank that was captured first, with nothing dropped and an engine that takes no time."""
        return self._ask(lambda solvers: solvers.baseline.trace.plain_step_seconds)

    def plain_step(self) -> PlainStep:
        """The figures of the baseline with nothing dropped."""
        return self._ask(plain_step)

    def smallest(self) -> tuple[int, Found]:
        """The smallest budget in which a plan was found, and that plan."""
        return self._ask(smallest)

    def smallest_in_any_number(self) -> tuple[int, Found]:
        """The same where the number of micro-batches is not fixed."""
        free = self.request.leaving_open("micro_batches")
        return self._ask(lambda solvers: smallest(solvers.of_request(free)))

    def plain_peak(self) -> int:
        """Budget in which the step runs as PyTorch runs it, in the baseline's micro-batches."""
        return self._ask(Solvers.plain_peak)

    def solver(self, number: int, candidate: Choices | None = None) -> Solver:
        """The solver for a candidate (None: the baseline) in so many micro-batches, with those of all roles."""
        return self._ask(lambda solvers: solvers.of(number, candidate).roles()[0])

    @property
    def extra_bytes(self) -> int:
        """What the engine keeps besides what is in the traces."""
        return self._ask(lambda solvers: solvers.extra_bytes)

    def restricted(self, candidate: Choices, number: int) -> Planning:
        """The same with one candidate and number of micro-batches alone; what is captured and solved already is shared."""
        request = self.request.fixing(micro_batches=number)
        alone = Planning(replace(self.bundle, request=request, candidates=(candidate,), refused=()), self.source)
        alone._solvers, alone._errors, alone.plain = self._solvers, self._errors, self.plain
        return alone

    def as_captured(self, plan: Plan) -> Planning:
        """The same for the techniques of a plan by their traces so far: what was not captured is refused, as one of several ranks can capture nothing."""
        candidate = Choices(techniques=plan.choices.techniques)
        found = Planning(replace(self.bundle, candidates=(candidate,), refused=()))
        found._solvers, found.plain = self._solvers, self.plain
        return found

    def knowing(
        self,
        plans: tuple[Plan, ...],
        known: Trace | None,
        budget_bytes: int,
        seen: Callable[[Choices], Trace],
    ) -> tuple[tuple[Plan, ...], Trace]:
        """Plans with the same techniques that also know what a later capture shows; the given tuple where that shows nothing new.

        One for everything that is known, where it fits. Else the given ones, and one for each path that the capture shows and they do not know; where that does
        not fit in all sizes that are known of the path, one for those of this capture; and where not even that does, the smallest, whose budget is then larger.

        Args:
            plans: of this planning, or loaded with the same techniques; made here before, since one for all did not fit.
            known: all that is known of their step, as it was returned last; None the first time.
            budget_bytes: that the new ones are to have.
            seen: captures the step with some choices.

        Returns:
            The plans, and all that is known by now.

        Raises:
            CaptureError, InputError: as for `plan`.
        """
        choices, trace = self._followed(next(plan for plan in plans if planning_of(plan) is self))
        everything = known or trace
        captured = seen(choices)
        joined = with_seen(everything, captured)
        if joined is everything:
            return plans, everything
        if len(plans) == 1:
            with suppress(InfeasibleError):
                return (self._of(choices, joined).plan(budget_bytes),), joined
        before = (everything, *everything.paths)
        new = [path for path in (joined, *joined.paths) if not any(same_sizes(path, one) for one in before)]
        made = []
        narrow = []  # paths that are planned for in the sizes of this capture alone
        for path in new:
            with suppress(InfeasibleError):
                made.append(self._of(choices, replace(path, paths=(), first=None)).plan(budget_bytes))
                continue
            now = as_seen(path, captured)
            alone = self._of(choices, now)
            narrow += [path] if now.storages != path.storages or path.drawn_bytes else []
            with suppress(InfeasibleError):
                made.append(alone.plan(budget_bytes))
                continue
            made.append(alone.plan(alone.smallest()[0]))
        kept = []
        for plan in plans:
            planning = planning_of(plan)
            own = everything if planning is None else planning._followed(plan)[1]  # noqa: SLF001 - of this class
            if (
                planning is None or own.paths or not any(same_path(own, path) for path in new if path not in narrow)
            ):  # else it was for smaller sizes
                kept.append(plan)
        return (*kept, *made), joined

    def _followed(self, plan: Plan) -> tuple[Choices, Trace]:
        """The trace that a plan of this planning is for, with the choices that it is known by."""
        ran = plan.choices.but(weights="whole")
        return next((c, t) for c, t in self.bundle.traces.items() if t.choices == ran)

    def known_sizes(self, plan: Plan) -> tuple[KnownSizes, ...]:
        """Of each path, what a plan made here takes in sizes that no capture saw; empty where values decide none, or where the plan was changed since."""
        trace = self._followed(plan)[1]
        if not any(path.sized_by_values for path in (trace, *trace.paths)):
            return ()
        found = self._ask(lambda solvers: search.weigh(solvers, plan.budget_bytes)[0])
        if found is None or script_of(found.solver, found.solution) != replace(plan.script, first=None):
            return ()
        return found.solver.draws.known_sizes(
            found.solution.recomputations, plan.budget_bytes - self.extra_bytes - SLACK_BYTES
        )

    def _writes_for_good(self, plan: Plan) -> bool:
        """Whether forward, on some path that is known, writes into what was there before the step and is put back by nobody.

        A parameter, as of a teacher that follows the model, or a tensor among attributes; buffers are put back.
        """
        trace = self._followed(plan)[1]
        paths = (trace, *trace.paths, *(() if trace.first is None else (trace.first,)))
        return any(writes_for_good(path) for path in paths)

    def following(self, plan: Plan) -> Planning:
        """For the techniques and micro-batches of a plan that another process made, as the source shows them now."""
        choices = Choices(techniques=plan.choices.techniques, micro_batches=plan.choices.micro_batches)
        assert self.source is not None, "there is a model to capture"
        return self._of(choices, self.source.trace_of(choices))

    def _of(self, choices: Choices, trace: Trace) -> Planning:
        """Of one candidate in one number of micro-batches, by this trace of it."""
        bundle = replace(
            self.bundle.with_trace(choices, trace),
            request=self.request.fixing(micro_batches=choices.micro_batches),
            candidates=(Choices(techniques=choices.techniques),),
            refused=(),
        )
        alone = Planning(bundle, self.source)
        alone.plain = self.plain
        return alone

    def frontier(self, points: int, progress: Progress | None = None) -> tuple[Plan, ...]:
        """Plans at budgets from plain PyTorch's down to the smallest, in order of falling peak, each faster than all with a smaller one."""
        plain, least = self.plain_peak(), self.smallest()[0]
        found: dict[int, Plan] = {}
        for i in range(points):
            budget = round(plain - (plain - least) * i / (points - 1))
            tell(progress, f"planning for {format_bytes(budget)}", i / points)
            made = self.plan(budget)
            known = found.get(made.prediction.peak_bytes)
            if known is None or made.prediction.step_seconds < known.prediction.step_seconds:
                found[made.prediction.peak_bytes] = made
        best: list[Plan] = []
        for peak in sorted(found):  # from the smallest up: a larger plan must be faster to be worth showing
            if not best or found[peak].prediction.step_seconds < best[-1].prediction.step_seconds:
                best.append(found[peak])
        return tuple(reversed(best))

    def complete(self) -> TraceBundle:
        """The bundle with all that the request allows captured, or refused with the reason: every candidate in every number of micro-batches.

        And each candidate with one of its techniques taken away, which is what plans tell savings against.
        """
        request, candidates = self.request, self.bundle.candidates
        one = request.micro_batches or 1
        wanted = [(candidate, one) for candidate in candidates]
        wanted += [(without(candidate, name), one) for candidate in candidates for name, _ in candidate.techniques]
        numbers = self._ask(lambda solvers: solvers.numbers())
        if numbers != [1] and self._ask(lambda solvers: solvers.weights())[0] is not None:
            wanted += [(candidate, number) for candidate in candidates for number in numbers]
        baseline = replace(candidates[0], micro_batches=one)
        every = dict.fromkeys(replace(candidate, micro_batches=number) for candidate, number in wanted)
        for choices in dict.fromkeys(role for each in every for role in roles(self.bundle, each)):
            try:
                self._ask(lambda solvers, choices=choices: solvers.trace(choices))  # type: ignore[misc]
            except CANNOT_RUN:
                if choices == baseline:
                    raise
        return self.bundle

    def _ask(self, question: Callable[[Solvers], T]) -> T:
        """The planner's answer; traces that it lacks are captured, and it is called again."""
        begun = time.monotonic()
        ways: list[Choices] = []  # that were captured, the last one perhaps in further numbers of micro-batches
        while True:
            solvers = Solvers(self.bundle, self._solvers, asks=self.source is not None)
            try:
                return question(solvers)
            except MissingTrace as missing:
                way = replace(missing.choices, micro_batches=1)
                before = sum(other != way for other in ways)
                each = (time.monotonic() - begun) / before if before else None
                self._capture(missing.choices, _ahead(missing.further, each))
                ways = list(dict.fromkeys((*ways, way)))
            except MissingWeighting:
                assert self.source is not None, "without a source, missing traces are refused"
                self.bundle = replace(self.bundle, weighting=self.source.weighting(self.request.freeze))
            except RefusedError as refused:
                raise self._error(refused) from None

    def _capture(self, choices: Choices, ahead: str) -> None:
        assert self.source is not None, "without a source, missing traces are refused"
        try:
            self.bundle = self.bundle.with_trace(choices, self.source.trace_of(choices, ahead))
        except CANNOT_RUN as error:
            self._errors[choices] = error
            self.bundle = self.bundle.with_refusal(choices, Refusal(type(error).__name__, str(error)))

    def _error(self, refused: RefusedError) -> Exception:
        """What a user is told: the error itself where it was raised in this process."""
        if refused.choices in self._errors:
            return self._errors[refused.choices]
        if refused.refusal.text == NOT_CAPTURED:
            return InputError(
                "the trace that is needed here was not captured in this bundle: record it again with all that is to be planned for, memfit.record(...)"
            )
        return CaptureError(refused.refusal.text)


def _ahead(further: int | None, each: float | None) -> str:
    """What may be left to do, by the number of other ways and the seconds that one has taken so far; nothing where either is not known."""
    if not further or each is None:
        return ""
    others = f"{further} other way{'s' if further > 1 else ''}"
    return f"; at most {others} after this one, about {format_seconds((further + 1) * each)} or less"


_PLANNINGS: Final[
    dict[int, tuple[weakref.ref[Plan], PlansAgain]]
] = {}  # by the identity of a plan, as long as it lives


def remember(plan: Plan, planning: PlansAgain) -> Plan:
    """Remember what has made a plan, or the original of a copy changed by `dataclasses.replace`. Returns the plan."""
    number, plannings = id(plan), _PLANNINGS  # by a name of its own: a module's are None when the interpreter ends
    plannings[number] = weakref.ref(plan, lambda _: plannings.pop(number, None)), planning
    return plan


def origin_of(plan: Plan) -> PlansAgain | None:
    """What has made a plan; None where that was in another process, or the plan is a changed copy."""
    found = _PLANNINGS.get(id(plan))
    return found[1] if found is not None and found[0]() is plan else None


def planning_of(plan: Plan) -> Planning | None:
    """The `Planning` of a plan; None where the plan was not made in this process, is a changed copy, or has stages."""
    origin = origin_of(plan)
    return origin if isinstance(origin, Planning) else None


def changed(plan: Plan, **fields: Any) -> Plan:
    """A plan with some fields replaced, which keeps what has made the original."""
    origin = origin_of(plan)
    made = replace(plan, **fields)
    return made if origin is None else remember(made, origin)


def replan(made: Plan | TraceBundle | Trace, budget: Budget) -> Plan:
    """The same model and batch at another budget, without capturing again what is known. Of a bundle it takes neither the model nor torch.

    Args:
        made: a plan from this process, a bundle (`memfit.record`, `TraceBundle.load`), or a single trace, to whose choices the plan then keeps.
        budget: as for `memfit.plan`, but in bytes: there may be no device to take a share of.

    Raises:
        InfeasibleError, BudgetError: as for `memfit.plan`.
        InputError: the plan was not made in this process, so its traces are not known; or the bundle lacks what is needed.
    """
    return _planning(made).plan(parse_bytes(budget))


def smallest_budget(made: Plan | TraceBundle | Trace, *others: object, **options: object) -> int:
    """The smallest budget, in bytes, in which a plan was found for this model and batch, over all that the request allows.

    `replan` gives a plan in as many bytes; in one byte less it says that nothing fits.

    Args:
        made: as for `replan`.
        others, options: none; a model and its sample are told that they are recorded first.

    Raises:
        InputError, CaptureError: as for `replan`.
    """
    if others or options:
        raise InputError(
            "smallest_budget takes one thing, a plan or what memfit.record(model, sample, ...) gave: record the step of a model first, and hand that over alone"
        )
    return _planning(made).smallest()[0]


def _planning(made: Plan | TraceBundle | Trace) -> PlansAgain:
    if isinstance(made, Trace):
        return Planning(TraceBundle.of(made))
    if isinstance(made, TraceBundle):
        return Planning(made)
    if not isinstance(made, Plan):
        raise InputError(
            f"{type(made).__name__} is nothing to plan again from: give a plan (an engine has it as engine.plan), or what memfit.record gave"
        )
    origin = origin_of(made)
    if origin is None:
        raise InputError(
            "this plan was loaded from a file, or is a changed copy, and carries no trace: keep the traces (memfit.record(...).save(path)) to plan again "
            "without the model, or call memfit.plan(model, sample, ...) again"
        )
    return origin
