"""The search for ways out: single changes first, then the smallest combination, each captured and solved before it is told.

Every remedy has a plan: the smallest of one candidate in one number of micro-batches, which fits into the budget; `memfit.plan` with the remedy's arguments
weighs that candidate too, so it finds a plan. Captures take most of the time, so a change is tried in the number of micro-batches in which the smallest
plan was found, and not at all where what is held during the update (`Held`) is more than the budget already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, MemfitError, Remedy
from memfit.offers import offered_bundle
from memfit.planner.found import Found
from memfit.planner.infeasible import with_remedies
from memfit.planner.solvers import SLACK_BYTES
from memfit.planning import Planning
from memfit.progress import tell
from memfit.remedies.changes import (
    DIVIDING,
    OFFLOADING,
    SGD,
    SGD_KEYS,
    Change,
    Effect,
    Held,
    arguments,
    changes,
    in_words,
    resident_bytes,
    with_another_optimizer,
    with_samples,
    written,
)
from memfit.techniques.choices import Choices
from memfit.techniques.registry import ALLOWED
from memfit.values.request import Request
from memfit.values.trace import Category

MOST_WAYS: Final = 3  # told besides the budget that would do
MOST_CANDIDATES: Final = 3  # captured for one combination
MOST_CAPTURES: Final = 10  # for all; each takes as long as a part of planning did
FAR: Final = 2  # times the budget: where a candidate needs more, no other one of the same changes is captured


@dataclass(frozen=True)
class _Tried:
    """The smallest plan under some changes.

    Attributes:
        changes: that it makes use of.
        size: budget in which it is accepted.
        found: the plan.
        request: that asks for it.
    """

    changes: tuple[Change, ...]
    size: int
    found: Found
    request: Request


def with_ways_out(
    error: InfeasibleError,
    planning: Planning,
    source: TraceSource,
    request: Request,
    *,
    own_model: bool = True,
    allows: bool = True,
) -> InfeasibleError:
    """The error with ways out that were tried, the one that changes results least first.

    Args:
        error: of the planner, which knows only what the request allows.
        planning: that raised it.
        source: of its traces.
        request: what the user asked.
        own_model: whether model, optimizer and batch are the user's to change; otherwise a trainer's, and `request` alone may be changed.
        allows: whether the user can be told a word of `allow=`; not where the call that they made has no such argument.
    """
    if error.minimum_bytes is None:
        return error
    larger = tuple(remedy for remedy in error.remedies if remedy.kind == "budget")
    divided = tuple(remedy for remedy in error.remedies if remedy.kind != "budget")
    search = _Search(
        planning,
        source,
        request,
        error.budget_bytes,
        error.beside_bytes,
        own_model=own_model,
        allows=allows,
        found=len(divided),
    )
    try:
        ways = search.run()
    except MemfitError:
        return error  # what the planner says is true all the same
    same = tuple(remedy for effect, remedy in ways if effect == Effect.SAME_NUMBERS)
    others = tuple(remedy for effect, remedy in ways if effect != Effect.SAME_NUMBERS)
    return with_remedies(error, (*larger, *same, *divided, *others), search.nothing_else)


@dataclass
class _Search:
    planning: Planning
    source: TraceSource
    request: Request
    budget_bytes: int
    beside_bytes: int = 0  # of the budget, for what no change makes smaller
    own_model: bool = True
    allows: bool = True
    found: int = 0  # ways out that the planner knows
    nothing_else: str = field(default="", init=False)
    _left_out: bool = field(default=False, init=False)  # something was not tried
    _impossible: set[str] = field(default_factory=set, init=False)  # changes that this model cannot have
    _sources: dict[tuple[str, ...], TraceSource] = field(default_factory=dict, init=False)
    _solved: dict[Any, tuple[int, Found | None] | None] = field(default_factory=dict, init=False)

    def run(self) -> list[tuple[Effect, Remedy]]:
        """The ways out that were found, each with what it does to results."""
        self.size, smallest = self.planning.smallest()
        self.number, self.chunks = smallest.number, smallest.candidate.loss_chunks
        self.plain_seconds = (self.planning.plain or self.planning).plain_step().plain_step_seconds
        trace = self.planning.solver(self.number).trace
        self.held = Held(
            trace.bytes_of(Category.PARAMETER),
            trace.bytes_of(Category.GRADIENT),
            trace.bytes_of(Category.OPTIMIZER_STATE),
        )
        self.resident_bytes = resident_bytes(self.source.model)
        room = max(self.planning.plain_peak(), trace.bytes_before_step * 2)
        possible = changes(self.source, self.request, room)
        if self.own_model:
            possible = sorted([*possible, *self._dividing()], key=lambda change: change.effect)
        else:
            possible = [change for change in possible if change.source is None and change.name != "freeze"]
        if not self.allows:
            possible = [change for change in possible if change.name not in ALLOWED]
        ways: list[_Tried] = []
        for change in possible:
            tell(self.source.progress, f"looking for ways out: {change.name}", 0.95)
            found = None if change.name == DIVIDING else self._fits((change,))  # the planner tried that alone
            if found is not None:
                ways.append(found)
            if len(ways) + self.found >= MOST_WAYS:
                break
        if not ways and not self.found:
            combination = self._combination(self._can_be_had(possible))
            ways = [] if combination is None else [combination]
        told = [(max(change.effect for change in way.changes), self._remedy(way)) for way in ways]
        left = MOST_WAYS - len(told) - self.found
        if self.own_model and left > 0:
            told += [(Effect.ANOTHER_TRAINING, remedy) for remedy in self._other_training()[:left]]
        possible = self._can_be_had(possible)
        if not told and not self.found and possible:
            tried = " that were tried" if self._left_out else ""
            self.nothing_else = (
                f"Nothing fits with any of these besides, or with combinations of them{tried}: {in_words(possible)}"
            )
        return told

    def _dividing(self) -> list[Change]:
        """Another number of micro-batches where the user fixed it: the one with the smallest plan."""
        if not self.request.numbers_are_open or self.source.samples < 2:
            return []
        _, free = self.planning.smallest_in_any_number()
        if free.number == self.request.micro_batches:
            return []
        return [
            Change(
                DIVIDING,
                Effect.ORDER_OF_ADDITIONS,
                request=lambda asked: asked.fixing(micro_batches=free.number),
                kind="micro_batches",
            )
        ]

    @property
    def room(self) -> int:
        """Bytes of the budget for the model and its step."""
        return self.budget_bytes - self.beside_bytes

    # -- trying ---------------------------------------------------------------------------------------------------------------

    def _tried(self, combined: Sequence[Change]) -> _Tried | None:
        """The smallest plan with these changes, the first that fits; None where they cannot be had or must take more than the budget."""
        if self._least(combined) > self.room:
            return None
        request = self.request
        for change in combined:
            request = change.request(request)
        with ExitStack() as stack:
            for change in combined:
                stack.enter_context(change.inside(self.source.model))
            try:
                source = self._source(combined)
                return self._smallest(combined, source, request)
            except Exception as error:  # noqa: BLE001 - a change that a user's model cannot have is none, whatever it raises
                names = ", ".join(change.name for change in combined)
                tell(self.source.progress, f"{names} cannot be had: {error}", 0.9)
                return None

    def _smallest(self, combined: Sequence[Change], source: TraceSource, request: Request) -> _Tried | None:
        bundle = offered_bundle(source, request)
        wanted = {name: value for change in combined for name, value in change.settings.items()}
        known = set(self.planning.bundle.candidates)
        number = request.micro_batches or self.number
        same_steps = source is self.source and request.freeze == self.request.freeze
        candidates = [
            candidate
            for candidate in bundle.candidates
            if all(candidate.used.get(name, value) == value for name, value in wanted.items())
        ]
        if len(combined) == 1:
            candidates = [c for c in candidates if all(c.used.get(name) == value for name, value in wanted.items())]
        if same_steps and request.host_budget == self.request.host_budget and number == self.number:
            candidates = [c for c in candidates if c not in known]  # those are solved already, and too large
        # A loss head in other chunks than the smallest plan's is left out: each would be one more capture, and of many operations.
        candidates = [c for c in candidates if c.loss_chunks == self.chunks]
        candidates = [c for c in candidates if self._left(c, combined).bytes <= self.room]
        candidates.sort(key=lambda c: (bool(c.streamed), self._left(c, combined).bytes, len(c.techniques)))
        best: _Tried | None = None
        planning = Planning(bundle, source)
        for candidate in candidates[:MOST_CANDIDATES]:
            key = (id(source), candidate, number, request.host_budget)
            if key not in self._solved:
                if len(self._solved) == MOST_CAPTURES:
                    self._left_out = True
                    break
                self._solved[key] = _least_of(planning, candidate, number, self.budget_bytes)
            solved = self._solved[key]
            if solved is None:
                continue
            size, found = solved
            if found is not None and (best is None or size < best.size):
                used = tuple(c for c in combined if _uses(candidate, c))
                best = _Tried(used, size, found, self._request(used))
            if size <= self.budget_bytes:
                break
            if size > FAR * self.budget_bytes:
                self._left_out = True
                break
        return best

    def _request(self, used: Iterable[Change]) -> Request:
        request = self.request
        for change in used:
            request = change.request(request)
        return request

    def _source(self, combined: Sequence[Change]) -> TraceSource:
        """What is captured under these changes; made once for each set of those that need another."""
        makers = [change for change in combined if change.source is not None]
        names = tuple(change.name for change in makers)
        if not names:
            return self.source
        if names not in self._sources:
            source = self.source
            for change in makers:
                assert change.source is not None
                try:
                    source = change.source(source)
                except Exception:
                    self._impossible.add(change.name)
                    raise
            self._sources[names] = source
        return self._sources[names]

    def _least(self, combined: Sequence[Change]) -> float:
        """Bytes that are held under these changes at least; with offloading, where state or layers are elsewhere."""
        held = self.held.under([change.shares for change in combined])
        # Of what a step works on at the smallest peak, 16 bits leave half, and backward through a part of the model perhaps half again.
        part = 0.25 if any(change.effect == Effect.LESS_IS_TRAINED for change in combined) else 0.5
        working = part * max(0.0, self.size - self.beside_bytes - self.held.bytes)
        if any(change.name == OFFLOADING for change in combined):
            return min(max(held.parameters + held.gradients, held.parameters + working), self.resident_bytes + working)
        return max(held.bytes, held.parameters + held.state + working)

    def _left(self, candidate: Choices, combined: Sequence[Change]) -> Held:
        """Bytes that are held at least where a candidate runs under these changes."""
        held = self.held.under([c.shares for c in combined if c.name != OFFLOADING and _uses(candidate, c)])
        if candidate.streamed:  # one layer is there at least, and what is in none
            return Held(self.resident_bytes, 0.0, 0.0)
        return held.times(1.0, 1.0, 0.0) if candidate.state_place != "device" else held

    # -- combinations ---------------------------------------------------------------------------------------------------------

    def _combination(self, possible: Sequence[Change]) -> _Tried | None:
        """A combination that fits, from which nothing can be left out; None where none was found.

        Of what changes results no more than so much, everything is tried at once; where that fits, one change after the other is left out as long as it
        still does, those that change most first. Where everything there is does not do, nothing is tried of less: each try is a capture.
        """
        if not any(self._fits(together) for together in _compatible(possible)):
            left = self._can_be_had(possible)
            return self._combination(left) if len(left) < len(possible) else None
        possible = self._can_be_had(possible)
        for effect in Effect:
            some = [change for change in possible if change.effect <= effect]
            if len(some) < 2 or not any(change.effect == effect for change in some):
                continue
            for together in _compatible(some):
                found = self._fits(together)
                if found is not None:
                    return self._leaner(found)
        return None

    def _can_be_had(self, some: Sequence[Change]) -> list[Change]:
        return [change for change in some if change.name not in self._impossible]

    def _fits(self, combined: Sequence[Change]) -> _Tried | None:
        """The plan with these changes, where it fits."""
        found = self._tried(combined)
        return found if found is not None and found.size <= self.budget_bytes else None

    def _leaner(self, found: _Tried) -> _Tried:
        for change in sorted(found.changes, key=lambda change: -change.effect):
            if len(found.changes) < 2:
                break
            found = self._fits([each for each in found.changes if each is not change]) or found
        return found

    # -- what is told ---------------------------------------------------------------------------------------------------------

    def _remedy(self, way: _Tried) -> Remedy:
        given = arguments(self.request, way.request)
        statements = [change.statement for change in way.changes if change.statement]
        kind = way.changes[0].kind if len(way.changes) == 1 else ""
        return Remedy(
            written(given, statements),
            self.size - way.size,
            self._seconds(way.found) - self.plain_seconds,
            kind,
            given or None,
            _together(change.keys for change in way.changes),
        )

    def _seconds(self, found: Found) -> float:
        """Of the fastest plan within the budget that the search for the smallest one met: the smallest itself is slower than need be.

        A search for that budget finds faster ones, and takes as long as all else here together; what is told is a bound.
        """
        room = self.budget_bytes - self.planning.extra_bytes - SLACK_BYTES
        fitting = [plan for plan in found.solver.smallest_search().front if found.solver.needed(plan) <= room]
        return min([found.seconds, *(replace(found, solution=plan).seconds for plan in fitting)])

    def _other_training(self) -> list[Remedy]:
        """An optimizer without state, a smaller batch: other runs than the user's, told last."""
        made: list[Remedy] = []
        if self.held.state and self.held.times(1.0, 1.0, 0.0).bytes <= self.room:
            made += self._elsewhere(SGD, with_another_optimizer(self.source), "optimizer", SGD_KEYS)
        samples = self.source.samples // 2
        tries = self.held.bytes <= self.room and self.source.loader_batches == 1 and self._needs_whole_batch()
        while tries and samples >= 1 and not any(remedy.kind == "batch" for remedy in made):
            text = f"a batch of {samples} instead of {self.source.samples} samples"
            made += self._elsewhere(text, with_samples(self.source, samples), "batch", (f"fit.global_batch={samples}",))
            samples //= 2
        return made

    def _needs_whole_batch(self) -> bool:
        """Whether the batch is not divided anyway: where it is, a smaller one saves nothing."""
        return self.number < self.source.samples

    def _elsewhere(self, text: str, source: TraceSource, kind: str, settings: tuple[str, ...]) -> list[Remedy]:
        request = self.request
        try:
            bundle = offered_bundle(source, request)
            number = min(self.number, source.samples)
            candidate = bundle.candidates[0]
            size, found = Planning(bundle, source).restricted(candidate, number).smallest()
        except (MemfitError, RuntimeError):
            return []
        if size > self.budget_bytes:
            return []
        return [Remedy(text, self.size - size, found.seconds - self.plain_seconds, kind, settings=settings)]


def _least_of(
    planning: Planning, candidate: Choices, number: int, budget_bytes: int
) -> tuple[int, Found | None] | None:
    """Bytes and plan of the smallest plan of one candidate in so many micro-batches; None where it cannot run.

    Where every plan holds more than the budget at some moment, that many bytes, and no plan: none is searched for.
    """
    alone = planning.restricted(candidate, number)
    try:
        held = alone.solver(number, candidate).problem.floor_bytes + alone.extra_bytes
        return (held, None) if held > budget_bytes else alone.smallest()
    except (MemfitError, RuntimeError):  # torch itself refuses some steps in 16 bits
        return None


def _together(keys: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Keys of a run file that several changes need; None where one of them has none."""
    made: tuple[str, ...] = ()
    for each in keys:
        if each is None:
            return None
        made += each
    return made


def _uses(candidate: Choices, change: Change) -> bool:
    """Whether a candidate makes use of a change; what is no technique it always does."""
    return all(candidate.used.get(name) == value for name, value in change.settings.items())


def _compatible(some: Sequence[Change]) -> list[list[Change]]:
    """The largest sets of changes that can be combined, those first that keep what comes first."""
    sets: list[list[Change]] = [[]]
    for change in some:
        grown: list[list[Change]] = []
        for each in sets:
            if any(change.name in other.apart or other.name in change.apart for other in each):
                grown += [
                    each,
                    [*(o for o in each if change.name not in o.apart and o.name not in change.apart), change],
                ]
            else:
                grown.append([*each, change])
        sets = grown
    unique = {frozenset(change.name for change in each): each for each in sets}
    return [each for names, each in unique.items() if not any(names < others for others in unique)]
