"""The solver for each candidate, made of the traces in a bundle. A missing trace is asked for by an exception; the planner never runs a model.

The caller (`planning.Planning`) answers `MissingTrace` and `MissingWeighting` by capturing, and asks again. Solvers are kept between questions, so that
asking again costs nothing; an answer depends only on the solvers that were asked for within it (`Solvers.asked`).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

from memfit.garbage import uncollected
from memfit.hardware.machine import Link
from memfit.planner.branches import branches
from memfit.planner.offloading import solver_for
from memfit.planner.optimistic import step_facts
from memfit.planner.recipes import Recipes
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planner.transfers import Transfers, layer_transfers, state_transfers
from memfit.techniques.choices import Choices, sizing_state
from memfit.techniques.sharding import at_rank, way_of
from memfit.techniques.technique import StepFacts
from memfit.values.bundle import Refusal, TraceBundle
from memfit.values.request import Request
from memfit.values.trace import Category, Trace

# Python numbers that kernels wrap into tensors of 8 bytes, which no dispatch mode sees; measured up to 280 bytes at once.
SLACK_BYTES: Final = 512
NOT_CAPTURED: Final = "not captured in this bundle"


class MissingTrace(Exception):  # noqa: N818 - a question to whoever captures, not an error
    """A trace is needed that the bundle does not have yet.

    Attributes:
        choices: it is of these.
        further: how many other candidates may be asked for after it; None where that was not counted.
    """

    def __init__(self, choices: Choices) -> None:
        super().__init__(str(choices))
        self.choices = choices
        self.further: int | None = None


class MissingWeighting(Exception):  # noqa: N818 - as above
    """How the losses of micro-batches add up is needed, and the bundle does not say yet."""


class RefusedError(Exception):
    """The step cannot be captured with these choices, or was not."""

    def __init__(self, choices: Choices, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.choices = choices
        self.refusal = refusal


class Solvers:
    """Solvers for the traces of one bundle.

    Args:
        bundle: what is known.
        known: solvers of earlier times, for traces of the same bundle; added to.
        asks: whether the caller captures what is missing; otherwise a missing trace is refused.

    Attributes:
        asked: solvers asked for so far, by their choices.
    """

    def __init__(
        self, bundle: TraceBundle, known: MutableMapping[Choices, Solver] | None = None, *, asks: bool = False
    ) -> None:
        self.bundle = bundle
        self.asks = asks
        self.asked: dict[Choices, Solver] = {}
        self._known = {} if known is None else known
        self._facts: dict[Choices, StepFacts] = {}

    def of(self, number: int, candidate: Choices | None = None) -> Solver:
        """The solver for a candidate in this many micro-batches; the baseline where none is named.

        Raises:
            MissingTrace: it is to be captured.
            RefusedError: it cannot be.
        """
        choices = replace(candidate or self.bundle.candidates[0], micro_batches=number)
        if choices not in self.asked:
            if choices not in self._known:
                with uncollected():
                    self._known[choices] = self._made(choices)
            self.asked[choices] = self._known[choices]
            self.asked[choices].other_roles = partial(self._other_roles, choices)
            for place, branch in enumerate(self.asked[choices].branches):
                branch.other_roles = partial(self._branch_of_other_roles, choices, place)
        return self.asked[choices]

    def _made(self, choices: Choices) -> Solver:
        trace, tier = self.trace(choices), self._lower_tier(choices)
        solver, *others = (solver_for(Timeline(path, Recipes(path, tier))) for path in branches(trace) or (trace,))
        solver.branches = tuple(others)
        return solver

    def _other_roles(self, choices: Choices) -> tuple[Solver, ...]:
        """For the ranks of a sharded step whose roles are others than that of these choices."""
        _, *others = roles(self.bundle, choices)
        return tuple(self.of(choices.micro_batches, each) for each in others)

    def _branch_of_other_roles(self, choices: Choices, place: int) -> tuple[Solver, ...]:
        return tuple(role.branches[place] for role in self._other_roles(choices))

    def of_request(self, request: Request) -> Solvers:
        """Of the same traces under another request with the same candidates."""
        return Solvers(replace(self.bundle, request=request), self._known, asks=self.asks)

    @property
    def baseline(self) -> Solver:
        """For the step as the user has it, in one micro-batch or as many as are fixed."""
        return self.of(self.baseline_number)

    @cached_property
    def baseline_facts(self) -> StepFacts:
        """Of the baseline, what techniques ask for."""
        return step_facts(self.baseline.timeline, self.bundle.lower_tier, self.bundle.layers)

    def facts(self, choices: Choices) -> StepFacts:
        """Of a step that was asked for, the same."""
        if choices not in self._facts:
            self._facts[choices] = step_facts(self.asked[choices].timeline, self.bundle.lower_tier, self.bundle.layers)
        return self._facts[choices]

    @property
    def baseline_number(self) -> int:
        """Of the baseline's micro-batches."""
        return self.bundle.request.micro_batches or 1

    def trace(self, choices: Choices) -> Trace:
        """The step with these choices and nothing dropped, including transfers of offloaded optimizer state and streamed layers.

        Raises:
            MissingTrace, RefusedError: as for `of`.
        """
        trace = self._captured(choices)
        moved = self._transfers(trace, choices)
        if moved is None:
            return trace
        return replace(trace, transfer_seconds=moved.seconds, waited_seconds=moved.waited_seconds)

    def _captured(self, choices: Choices) -> Trace:
        bundle = self.bundle
        if choices in bundle.refusals:
            raise RefusedError(choices, bundle.refusals[choices])
        if choices not in bundle.traces:
            if self.asks:
                raise MissingTrace(choices)
            raise RefusedError(choices, Refusal("InputError", NOT_CAPTURED))
        return bundle.traces[choices]

    def _transfers(self, trace: Trace, choices: Choices) -> Transfers | None:
        bundle = self.bundle
        if trace.transfer_seconds or not (choices.streamed or choices.state_place != "device"):
            return None
        if choices.streamed:
            link = bundle.topology.down[0][0]
            return layer_transfers(trace, bundle.layers, link, clips=bundle.request.clip_norm is not None)
        return state_transfers(self._state_bytes(choices), bundle.topology.link_to(choices.state_place))

    def offloaded_bytes(self, choices: Choices) -> tuple[int, int, str]:
        """Of layers and of optimizer state that choices offload, and the tier they go to; empty where they offload nothing."""
        bundle = self.bundle
        if choices.streamed:
            clips = bundle.request.clip_norm is not None
            layers = sum(layer.weight_bytes + clips * layer.gradient_bytes for layer in bundle.layers)
            return layers, sum(layer.state_bytes for layer in bundle.layers), bundle.topology.down[0][0].tier
        if choices.state_place == "device":
            return 0, 0, ""
        return 0, self._state_bytes(choices), bundle.topology.link_to(choices.state_place).tier

    def _state_bytes(self, choices: Choices) -> int:
        """Bytes of the optimizer's state. Where it is and how the batch is split do not change them, so any known trace will do."""
        kept = sizing_state(choices)
        known = (t for c, t in self.bundle.traces.items() if replace(kept, micro_batches=c.micro_batches) == c)
        trace = next(known, None) or self._captured(replace(kept, micro_batches=self.baseline_number))
        return trace.bytes_of(Category.OPTIMIZER_STATE)

    def _lower_tier(self, choices: Choices) -> Link | None:
        """The link to the lower tiers, with the offloaded optimizer state taken off their capacity."""
        left: Link | None = None
        for link in reversed(self.bundle.lower_tier.chain if self.bundle.lower_tier is not None else ()):
            free = link.free_bytes
            if free is not None and choices.state_place == link.tier:
                free = max(0, free - self.bundle.state_bytes)
            left = replace(link, free_bytes=free, below=left)
        return left

    def weights(self) -> tuple[str | None, str]:
        """How micro-batches add up: (one of `batches.weightings`, or None; why None).

        Raises:
            MissingWeighting: it is to be found out.
        """
        found = self.bundle.weighting
        if found is not None:
            return found.weights, found.reason
        if self.asks:
            raise MissingWeighting
        return None, f"whether the batch splits was {NOT_CAPTURED}"

    @property
    def cannot_split(self) -> bool:
        """Whether the batch is known not to be divisible."""
        return self.bundle.weighting is not None and self.bundle.weighting.weights is None

    def numbers(self) -> list[int]:
        """Of micro-batches that are weighed: powers of two and as many as there are samples, or what the user fixed."""
        fixed = self.bundle.request.micro_batches
        return doubled_up_to(self.bundle.samples) if fixed is None else [fixed]

    @property
    def extra_bytes(self) -> int:
        """What the engine keeps besides what is in the trace: copies of the buffers that forward writes."""
        return self.baseline.trace.changed_buffer_bytes

    def budget_for(self, solver: Solver, solution: Solution) -> int:
        """The smallest budget for which a plan is accepted."""
        # Plain PyTorch is accepted at its own peak: it needs the bytes that the slack is for, too. A streamed step is not that of plain PyTorch.
        slack = SLACK_BYTES if solution.recomputations or solver.trace.choices.streamed else 0
        return solver.needed(solution) + self.extra_bytes + slack

    def fits_undropped(self, solver: Solver, budget_bytes: int) -> bool:
        """Whether a step fits with nothing dropped."""
        return solver.plain.peak <= budget_bytes and self.budget_for(solver, solver.plain) <= budget_bytes

    def plain_peak(self) -> int:
        """Budget in which the step runs as PyTorch runs it, in the baseline's micro-batches."""
        solver = self.baseline
        others = [other.plain.peak + self.extra_bytes for other in solver.branches]
        return max((self.budget_for(solver, solver.plain), *others)) + SLACK_BYTES


def roles(bundle: TraceBundle, choices: Choices) -> tuple[Choices, ...]:
    """These choices, and the same as the ranks of a sharded step have them that play another role; none where the bundle knows no roles."""
    if not choices.sharding or not bundle.roles:
        return (choices,)
    *_, own = way_of(choices.sharding)
    others = dict.fromkeys(role for role in bundle.roles if role != bundle.roles[own])
    return choices, *(choices.but(sharding=at_rank(choices.sharding, role)) for role in others)


def doubled_up_to(number: int) -> list[int]:
    """Powers of two below a number, and the number."""
    return [*(1 << power for power in range((number - 1).bit_length())), number]
