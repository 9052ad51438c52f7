"""On chains the planner is never worse than the known optima at equal memory: Revolve on uniform ones, rotor's program on others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

import memfit
from memfit.errors import InfeasibleError
from memfit.planner.baselines.chain import Chain, ChainStage
from memfit.planner.baselines.revolve import revolve_cost
from memfit.planner.baselines.rotor import rotor_schedule, smallest_chain_bytes
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planning import planning_of
from memfit.techniques.choices import Choices
from memfit.values.trace import Category, Operation, Phase, Save, Storage, Trace
from models.calls import PROGRAMS, batch
from sweeps import by_turns, each_seed

UNIT = 1 << 20


class ChainTrace:
    """Writes the trace of a chain: forward of each stage, then backward in reverse."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.storages: list[list[int]] = []  # bytes, birth, death
        self.events: list[int] = []
        self.saves: list[tuple[int, int, int, int]] = []  # storage, operation that saves it, unpack, release

    def run(self, phase: Phase, reads: Sequence[int], makes: Sequence[int], seconds: float) -> list[int]:
        event = len(self.events)
        made = list(range(len(self.storages), len(self.storages) + len(makes)))
        self.storages += [[size, event, event] for size in makes]
        self.operations.append(
            Operation(
                "aten.f.default",
                phase,
                "",
                tuple(reads),
                (),
                tuple(made),
                seconds,
                0,
                False,
                True,
                "f",
                tuple(range(len(made))),
            )
        )
        self.events.append(len(self.operations) - 1)
        for s in reads:
            self.storages[s][2] = max(self.storages[s][2], event)
        return made

    def trace(self, forward_events: int) -> Trace:
        return Trace(
            events=tuple(self.events),
            operations=tuple(self.operations),
            storages=tuple(
                Storage(size, Category.ACTIVATION, "", birth, death) for size, birth, death in self.storages
            ),
            saves=tuple(Save(s, by, ((unpack, release),), release) for s, by, unpack, release in self.saves),
            forward_events=forward_events,
            pass_events=len(self.events),
            choices=Choices(1, 1),
            device="",
            seconds_are="measured",
            source="fake",
            signature="",
            model="",
        )


def uniform(length: int) -> Trace:
    """States of one unit each; backward of a step reads the state before it, as in Griewank and Walther."""
    writer = ChainTrace()
    states = [writer.run(Phase.FORWARD, [], [UNIT], 0.0)[0]]
    for i in range(length):
        states += writer.run(Phase.FORWARD, [states[-1]], [UNIT if i < length - 1 else 4], 1.0)
    forward_events = len(writer.events)
    for i in reversed(range(length)):
        unpack = len(writer.events)
        save = len(writer.saves)
        writer.events.append(~save)
        death = writer.storages[states[i]][2]
        writer.run(Phase.BACKWARD, [states[i]], [], 1.0)
        writer.storages[states[i]][2] = death  # what autograd hands over is another tensor
        writer.saves.append((states[i], i + 1, unpack, unpack + 1))
    return writer.trace(forward_events)


@pytest.mark.alternate(1)
@pytest.mark.parametrize(("length", "slots"), by_turns([8, 10, 16, 24, 40, 60], [2, 3, 4, 6, 10]))
def test_uniform_chains_are_never_worse_than_revolve(length: int, slots: int) -> None:
    if slots >= length:
        pytest.skip("as many slots as steps: nothing is recomputed")
    # Besides the slots: the state an advance reads and the state it makes.
    budget = (slots + 2) * UNIT + 64
    solution = Solver(Timeline(uniform(length))).solve(budget)
    assert solution is not None
    assert solution.peak <= budget
    first_sweep = length - 1  # Revolve counts it, a plan's extra seconds do not
    assert solution.seconds <= revolve_cost(length, slots) - first_sweep + 1e-9


def heterogeneous(stages: Sequence[ChainStage], input_bytes: int) -> Trace:
    """The chain of `baselines` as a trace: backward of a stage reads its input, its output and what else it saved."""
    writer = ChainTrace()
    values = writer.run(Phase.FORWARD, [], [input_bytes], 0.0)
    inner: list[int] = []
    for stage in stages:
        made = writer.run(
            Phase.FORWARD,
            [values[-1]],
            [stage.output_bytes, stage.saved_bytes - stage.output_bytes],
            stage.forward_seconds,
        )
        values.append(made[0])
        inner.append(made[1])
    forward_events = len(writer.events)
    deaths = [s[2] for s in writer.storages]
    gradient = writer.run(Phase.BACKWARD, [], [stages[-1].gradient_bytes], 0.0)[0]
    for i in reversed(range(len(stages))):
        for s, by in ((values[i + 1], i + 1), (inner[i], i + 1), (values[i], i + 1)):
            writer.saves.append((s, by, len(writer.events), -1))
            writer.events.append(~(len(writer.saves) - 1))
        before = stages[i - 1].gradient_bytes if i else 0
        end = len(writer.events)
        (gradient,) = writer.run(Phase.BACKWARD, [gradient], [before], stages[i].backward_seconds)
        writer.saves[-3:] = [(s, by, unpack, end) for s, by, unpack, _ in writer.saves[-3:]]
    for s, death in enumerate(deaths):
        writer.storages[s][2] = death
    return writer.trace(forward_events)


@each_seed(6, 40)
def test_heterogeneous_chains_are_never_worse_than_rotor(seed: int) -> None:
    draw = random.Random(seed)
    stages = []
    for _ in range(draw.randint(6, 14)):
        output = draw.randint(1, 8) * UNIT
        stages.append(
            ChainStage(
                draw.uniform(0.5, 3.0), draw.uniform(1.0, 6.0), output, output + draw.randint(1, 16) * UNIT, output
            )
        )
    chain = Chain(tuple(stages), draw.randint(1, 4) * UNIT)
    trace = heterogeneous(stages, chain.input_bytes)
    solver = Solver(Timeline(trace))
    plain_seconds = trace.plain_step_seconds
    smallest, largest = smallest_chain_bytes(chain), solver.plain.peak
    for share in (0.8, 0.6, 0.4, 0.2, 0.05):
        memory = int(smallest + (largest - smallest) * share)
        try:
            rival = rotor_schedule(chain, memory, 400).seconds
        except InfeasibleError:
            continue
        solution = solver.solve(memory)
        assert solution is not None, (share, rival)
        assert plain_seconds + solution.seconds <= rival + 1e-9, (share, solution.seconds, rival - plain_seconds)


def test_long_chains_are_cut_into_chains_of_groups_and_nested_where_little_is_left() -> None:
    """A hundred equal stages in some fifteen units: swept over several times, as Revolve does it, within the memory of the timeline."""
    length, slots = 150, 8
    solver = Solver(Timeline(uniform(length)))
    budget = (slots + 2) * UNIT + 64
    solution = solver.solve(budget)
    assert solution is not None
    assert solution.peak <= budget
    # Checkpoints stand where groups begin, so a sweep may be longer than Revolve's.
    assert solution.seconds <= 1.1 * (revolve_cost(length, slots) - (length - 1))


def test_nothing_is_run_again_before_it_was_made_where_forward_takes_a_gradient_itself() -> None:
    """Backward begins with the last cell only after all of forward; the inner backward asks in the middle of it."""
    model, loss_fn = PROGRAMS["step_within_the_loss"]()
    planning = planning_of(memfit.plan(model, batch(), loss_fn, 1 << 40, fixed={"micro_batches": 1}))
    assert planning is not None
    solver = planning.solver(1)
    timeline = solver.problem.timeline
    schedules = list(solver.problem.chain.smallest_schedules(solver.plain.peak))
    assert any(schedules)
    for schedule in schedules:
        for event, runs in schedule.items():
            made = [s for recipe in runs for s in timeline.recipes.recipes[recipe].makes]
            assert all(timeline.trace.storages[s].birth < event for s in made)
