"""Plans with stages: what is chosen and told, what may be fixed, what is refused; as JSON, and in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memfit
import small
from defined_costs import defined_costs
from memfit import batches
from memfit.capture import confirmation, real_forward, trace_source
from memfit.capture.present_machine import present_machine
from memfit.capture.trace_source import TraceSource
from memfit.hardware.topology import Topology
from memfit.pipelining import planning, stages
from memfit.pipelining.alike_stretches import AlikeStretches
from memfit.pipelining.planning import PipelinePlanning, settings_for
from memfit.pipelining.stage_planner import StagePlanner
from memfit.pipelining.undivided import Undivided
from memfit.planner.stage_bytes import seconds_of
from memfit.planning import origin_of
from memfit.techniques.sharding import Pipelines, way_of
from memfit.units import format_bytes, format_seconds
from memfit.values.report import MeasuredRank, Rehearsal, Report, StepRecord
from memfit.values.stages import Schedule
from memfit.values.trace import BEFORE_STEP, Category
from memfit.views import write_report
from models.padded import LENGTH, Padded, loss_of, tokens
from models.transformer import build_gpt
from pipelining import running
from sharding import steps

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = 4


def planned(fixed: Any = None, budget: Any = 1 << 40, ranks: Any = RANKS, **named: Any) -> memfit.Plan:
    model, sample, loss_fn = running.short_decoder()
    own = steps.part_of(sample, 0, RANKS)
    return memfit.plan(model, own, loss_fn, budget, steps.adamw, devices=ranks, fixed=fixed, **named)


@pytest.fixture(scope="module")
def plan() -> memfit.Plan:
    with defined_costs():  # which are those of single tests otherwise
        return planned({"sharding": "pipeline", "micro_batches": 4})


@pytest.mark.slow
def test_a_cut_that_does_not_settle_is_the_best_of_those_that_were_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where stages take longer than their parts by themselves, those that are not captured yet always look faster."""
    fixed = {"sharding": "interleaved/2", "micro_batches": 4}
    model, sample, loss_fn = running.decoder()
    own = steps.part_of(sample, 0, 2)

    def made() -> memfit.Plan:
        return memfit.plan(model, own, loss_fn, 1 << 40, steps.adamw, devices=2, fixed=fixed)

    settled = made()
    monkeypatch.setattr(stages, "ROUNDS", 1)
    early = made()
    assert early.pipeline is not None
    assert settled.pipeline is not None
    assert early.pipeline.cut.stages[-1].end == settled.pipeline.cut.stages[-1].end
    assert early.prediction.step_seconds >= settled.prediction.step_seconds
    assert [bool(script.plain) for script in early.pipeline.scripts] == [True] * len(early.pipeline.ends)


def test_the_faster_of_the_pipelines_is_taken_and_the_other_one_told(plan: memfit.Plan) -> None:
    """Eight samples of each of four ranks: 32 in every way."""
    assert plan.pipeline is not None
    pipelines = Pipelines.of(plan.choices.sharding)
    stages = pipelines.ranks
    assert stages * pipelines.replicas == RANKS == len(plan.prediction.ranks) == plan.pipeline.ranks
    assert plan.choices.micro_batches * plan.choices.micro_batch_size == stages * 8
    assert plan.choices.weights == "tokens:labels"
    # Everything fits, so nobody sends parameters after the update for nothing. Eight stages are more than the model has parts.
    told = [each.partition(": ") for each in plan.rejected]
    words = [Pipelines.of(setting).in_words() for setting in settings_for("pipeline", RANKS)]
    assert sorted(name for name, _, _ in told) == sorted({*words} - {pipelines.in_words()})
    assert not pipelines.shards_state
    for name, _, why in told:
        assert " a step at " in why or (
            name.startswith("a pipeline of 8") and "the model has 5: take fewer devices" in why
        )
    for number, rank in enumerate(plan.prediction.ranks):
        assert rank.stage == number % stages == plan.pipeline.stages_of(number)[0]
        assert 0 < rank.waiting < 1
        assert rank.peak_bytes <= plan.prediction.peak_bytes <= plan.budget_bytes


def test_a_plan_goes_to_json_and_back_and_into_words(plan: memfit.Plan) -> None:
    assert plan.pipeline is not None
    assert memfit.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    told = plan.explain()
    for number in range(plan.pipeline.stages):
        assert f"  stage {number}: {plan.pipeline.named(number)}; " in told
    assert "where (K - 1)/(M + K - 1) is" in told
    assert "each of the ranks waits for others: 0 " in told
    edited = plan.to_json()
    edited["pipeline"]["scripts"].pop()
    with pytest.raises(memfit.PlanFileError, match="cannot be followed"):
        memfit.Plan.from_json(edited)


def test_every_parameter_is_in_a_stage_and_what_crosses_is_named(plan: memfit.Plan) -> None:
    assert plan.pipeline is not None
    names = {name for name, _ in running.short_decoder()[0].named_parameters()}
    assert set().union(*plan.pipeline.parameters) == names
    for behind in plan.pipeline.messages:
        assert sum(message.bytes for message in behind) > 0
        assert all(message.shape[0] == plan.choices.micro_batch_size for message in behind)


@pytest.mark.slow
def test_all_of_a_pipeline_may_be_fixed() -> None:
    fixed = planned({"sharding": "gpipe/2x2", "micro_batches": 2})
    assert (fixed.choices.sharding, fixed.choices.micro_batches) == ("gpipe/2x2", 2)
    assert fixed.pipeline is not None
    assert fixed.pipeline.cut.schedule is Schedule.GPIPE
    # With fewer micro-batches than stages there is nothing to alternate.
    few = planned({"sharding": "1f1b/4", "micro_batches": 2})
    assert few.choices.sharding == "gpipe/4"


@pytest.mark.slow
def test_a_budget_that_would_do_is_told_where_one_device_has_less() -> None:
    model, sample, loss_fn = running.short_decoder()
    own = steps.part_of(sample, 0, 2)
    here = replace(present_machine(torch.device("cpu")), memory_bytes=1 << 40)

    def planned_in(budget: int, less: int = 1 << 40) -> memfit.Plan:
        devices = Topology((here, replace(here, memory_bytes=less)))
        fixed = {"micro_batches": 4, "sharding": "1f1b/2"}
        return memfit.plan(model, own, loss_fn, budget, steps.adamw, devices=devices, fixed=fixed)

    def refused(*sizes: int) -> int:
        with pytest.raises(memfit.InfeasibleError, match="Ways out: budget=") as told:
            planned_in(*sizes)
        assert told.value.minimum_bytes is not None
        return told.value.minimum_bytes

    less = int(0.95 * refused(1 << 10))
    needed = refused(1 << 10, less)
    assert less < needed
    assert planned_in(needed, less).prediction.peak_bytes <= needed


def test_a_device_with_less_memory_gets_a_stage_that_fits_it() -> None:
    model, sample, loss_fn = running.short_decoder()
    own = steps.part_of(sample, 0, 2)
    here = replace(present_machine(torch.device("cpu")), memory_bytes=1 << 40)

    def of(*sizes: int) -> memfit.Plan:
        unequal = Topology(tuple(replace(here, memory_bytes=size) for size in sizes))
        fixed = {"micro_batches": 4} if len(set(sizes)) > 1 else {"micro_batches": 4, "sharding": "pipeline"}
        return memfit.plan(model, own, loss_fn, 1 << 40, steps.adamw, devices=unequal, fixed=fixed)

    equal = of(1 << 40, 1 << 40)
    lacking = int(0.8 * equal.prediction.ranks[1].peak_bytes)
    made = of(1 << 40, lacking)
    assert made.prediction.ranks[1].peak_bytes <= lacking < made.prediction.ranks[0].peak_bytes
    assert made.prediction.step_seconds > 0.0
    assert any(
        ": equal parts are for devices that are alike, and these are not: take a pipeline" in each
        for each in made.rejected
    )
    assert f"1 such as {here.name}, with {format_bytes(lacking)}" in made.explain()


@pytest.mark.slow
def test_a_smaller_budget_drops_more_until_nothing_fits(plan: memfit.Plan) -> None:
    fixed = {"sharding": plan.choices.sharding, "micro_batches": 4}
    assert plan.pipeline is not None
    made = plan
    # A cut that holds less and drops nothing may be faster than one that drops something, so at first it may only be cut elsewhere.
    for _ in plan.pipeline.parts:
        before = made.prediction
        made = planned(fixed, int(0.8 * before.peak_bytes))
        assert made.prediction.peak_bytes <= made.budget_bytes < before.peak_bytes
        assert made.pipeline is not None
        if any(script.recomputations for script in made.pipeline.scripts):
            break
    else:
        pytest.fail("nothing was ever dropped")
    with pytest.raises(memfit.InfeasibleError, match="no plan was found for less than") as error:
        planned(fixed, 50_000)
    assert error.value.minimum_bytes is not None
    assert error.value.minimum_bytes > 50_000


@pytest.mark.slow
def test_stages_run_no_more_again_than_the_bytes_of_their_devices_ask_for() -> None:
    """The few ways to hold activations that a cut knows are coarse: between everything kept and the next one there may be a whole block."""
    model, sample, loss_fn = build_gpt(layers=4, hidden=32, heads=2, batch=8, tokens=32, vocab=50)
    fixed = {"sharding": "1f1b/2", "micro_batches": 4}
    plain = memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=2, fixed=fixed)
    planning = origin_of(plain)
    assert isinstance(planning, PipelinePlanning)
    budget = plain.prediction.peak_bytes - 1
    coarse, less = (planning.cut_as(plain, budget, refines=refines) for refines in (False, True))
    assert max(coarse.prediction.peak_bytes, less.prediction.peak_bytes) <= budget
    assert plain.prediction.step_seconds < less.prediction.step_seconds < coarse.prediction.step_seconds
    assert less.pipeline is not None
    assert sum(script.recomputations for script in less.pipeline.scripts) == 1
    assert memfit.Plan.from_json(less.to_json()) == less


def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The stretches of parts that are captured as stages from now on."""
    found: list[tuple[int, int]] = []
    capture = StagePlanner._trace

    def noting(planner: StagePlanner, first: int, end: int, *of: Any) -> Any:
        found.append((first, end))
        return capture(planner, first, end, *of)

    monkeypatch.setattr(StagePlanner, "_trace", noting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, 0.7])
def test_of_stretches_that_are_alike_one_is_captured_while_a_cut_is_searched(
    part: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the stages of the cut that is taken: the plan is the one that is found where each stretch is captured."""
    made, found = [], captured(monkeypatch)
    for alike in (True, False):
        if not alike:
            monkeypatch.setattr(AlikeStretches, "description", lambda _, first, end: (first, end))
        model, sample, loss_fn = build_gpt(layers=8, hidden=32, heads=2, batch=8, tokens=32, vocab=50)
        fixed = {"sharding": "1f1b/4", "micro_batches": 4}
        plan = memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=4, fixed=fixed)
        if part is not None:
            plan = memfit.replan(plan, int(part * plan.prediction.peak_bytes))
        assert plan.pipeline is not None
        assert {(stage.first, stage.end) for stage in plan.pipeline.cut.stages} <= set(found)
        made.append((plan.to_json(), len(found)))
        found.clear()
    (few_plan, few), (every_plan, every) = made
    assert few_plan == every_plan
    assert few < every


def test_stretches_are_alike_by_what_they_run_train_and_send() -> None:
    model, sample, loss_fn = build_gpt(layers=5, hidden=32, heads=2, batch=8, tokens=32, vocab=50)
    frozen = [name for name, module in model.named_modules() if type(module).__name__ == "Block"][1]
    fixed = {"sharding": "1f1b/2", "micro_batches": 4}
    plan = memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=2, fixed=fixed, freeze=[frozen])
    planning = origin_of(plan)
    assert isinstance(planning, PipelinePlanning)
    (planner,) = planning.planners.values()
    paths = [call.path for call in planner.calls.calls]
    first = paths.index(frozen) - 1  # of the blocks
    described = [planner._alike.description(number, number + 1) for number in range(first, first + 5)]
    assert described[2] == described[3] == described[4]
    assert (
        len(set(described[:3])) == 3
    )  # before the first nothing is trained that its input could tell apart, the second is frozen
    assert planner._alike.description(first + 2, first + 4) == planner._alike.description(first + 3, first + 5)
    assert planner._alike.description(first + 2, first + 4) != described[2]
    assert planner._alike.description(first, len(paths)) != planner._alike.description(0, len(paths))
    # What lies between operations is in the seconds of parts: a stretch that nobody has captured does not look faster than it is.
    forward, backward, _ = seconds_of(planner.whole, Schedule.ONE_FORWARD_ONE_BACKWARD)
    assert sum(part.forward_seconds for part in planner.parts.parts) == pytest.approx(forward)
    assert sum(part.backward_seconds for part in planner.parts.parts) == pytest.approx(backward)


def test_stages_that_were_not_captured_look_as_fast_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a cut is found after few captures: each of a stage that looked faster than it is costs a round."""
    found = captured(monkeypatch)
    model, sample, loss_fn = build_gpt(layers=6, hidden=32, heads=2, batch=8, tokens=32, vocab=50)
    fixed = {"sharding": "1f1b/2", "micro_batches": 4}
    memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=2, fixed=fixed)
    assert 2 <= len(found) <= 6  # of the eighteen there are


def test_what_a_checkpoint_saves_of_an_earlier_stage_takes_no_bytes_of_a_later_one() -> None:
    """The user's checkpoint saves what its block is given, which is absent where an earlier stage runs the block."""
    model, sample, loss_fn = running.checkpointed()
    fixed = {"sharding": "1f1b/2", "micro_batches": 4}
    plan = memfit.plan(model, steps.part_of(sample, 0, 2), loss_fn, 1 << 40, steps.sgd, devices=2, fixed=fixed)
    planning = origin_of(plan)
    assert isinstance(planning, PipelinePlanning)
    (planner,) = planning.planners.values()
    number = len(planner.calls.calls)
    trace = planner.solver(number // 2 + 1, number).trace  # of the second call of the model all but the first layer
    before = [s for s in trace.storages if s.category is Category.OTHER and s.birth == BEFORE_STEP]
    assert before, "the absent tensor is there"
    assert not sum(storage.bytes for storage in before)


def test_pipelines_of_one_length_share_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(monkeypatch)
    made = planned({"sharding": "pipeline/2x2", "micro_batches": 4})
    assert len(found) == len(set(found))
    assert sum("interleaved 1F1B" in each for each in made.rejected) + ("interleaved" in made.choices.sharding) == 1


def test_no_stage_is_captured_where_a_pipeline_cannot_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What parts take by themselves, shared out as well as can be, is more than what another way takes."""
    fastest = planned({"sharding": "1f1b/4", "micro_batches": 4})
    known = origin_of(fastest)
    assert isinstance(known, PipelinePlanning)
    seconds = fastest.prediction.step_seconds
    found = captured(monkeypatch)
    anew = PipelinePlanning(known.source, known.request, known.topology, known.setting)
    with pytest.raises(stages.NotFasterError) as error:
        anew.plan(faster_than=seconds / 3)
    assert not found
    assert seconds / 3 < error.value.at_best_seconds <= seconds
    assert anew.plan(faster_than=2 * seconds).prediction.step_seconds == pytest.approx(seconds)


@pytest.mark.slow
def test_pipelines_that_cannot_be_faster_are_told_with_what_they_take_at_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_faster(*_: Any, **__: Any) -> Any:
        raise stages.NotFasterError(0.5)

    monkeypatch.setattr(planning, "find_stages", not_faster)
    made = planned({"micro_batches": 4})
    assert made.pipeline is None
    for setting in settings_for("pipeline", RANKS):
        assert f"{Pipelines.of(setting).in_words()}: {format_seconds(0.5)} a step at best" in made.rejected


@pytest.mark.slow
def test_one_micro_batch_of_a_size_is_looked_at_for_pipelines_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    look = Undivided.of

    def noted(source: TraceSource, micro_batch: Any, *rest: Any) -> Undivided:
        sizes.append(batches.size(micro_batch))
        return look(source, micro_batch, *rest)

    monkeypatch.setattr(Undivided, "of", noted)
    planned({"sharding": "pipeline"})
    assert len(sizes) == len(set(sizes)) > 1


def test_a_forward_is_compared_with_a_real_one_once_for_all_numbers_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []
    compared = real_forward.real_forward_names

    def noted(*args: Any, **named: Any) -> list[str]:
        ran.append(1)
        return compared(*args, **named)

    monkeypatch.setattr(confirmation, "real_forward_names", noted)
    monkeypatch.setattr(real_forward, "real_forward_names", noted)

    def times(**fixed: int) -> int:
        ran.clear()
        model, sample, loss_fn = steps.chain()
        memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=2, fixed={"sharding": "1f1b/2", **fixed})
        return len(ran)

    assert times() == times(micro_batches=2) > 0


def test_stages_that_share_a_device_run_something_again_where_each_alone_would_fit_with_everything_kept() -> None:
    model, sample, loss_fn = steps.chain()
    fixed = {"sharding": "interleaved/2", "micro_batches": 4}
    plain = memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, devices=2, fixed=fixed)
    planning = origin_of(plain)
    assert isinstance(planning, PipelinePlanning)
    budget = plain.prediction.peak_bytes - 1
    less = planning.cut_as(plain, budget)
    assert less.pipeline is not None
    assert any(script.recomputations for script in less.pipeline.scripts)
    assert less.prediction.peak_bytes <= budget


@pytest.mark.parametrize(
    ("fixed", "named", "says"),
    [
        (
            {"sharding": "1f1b/3"},
            {},
            r"is nothing that 4 devices can form: write one of '1f1b/4', '1f1b/2x2', '1f1b/2x2\+zero1', or name",
        ),
        ({"sharding": "interleaved/3"}, {}, "4 devices can form: write one of 'interleaved/4', 'interleaved/2x2'"),
        (
            {"sharding": "interleaved/4"},
            {},
            "8 stages need as many parts, and the model has 5: take fewer devices, or fewer stages on each",
        ),
        ({"sharding": "gpipe/4+zero1"}, {}, "4 devices can form: write one of 'gpipe/4', 'gpipe/2x2'"),
        ({"sharding": "pipeline+zero2"}, {}, "4 devices can form: write one of '1f1b/4', '1f1b/2x2'"),
        (
            {"sharding": "ring"},
            {},
            "there is 'data', 'zero1', 'zero2', 'zero3', 'gpipe', '1f1b', 'interleaved', 'pipeline'",
        ),
        (
            {"sharding": "pipeline", "precision": "fp16"},
            {},
            "fixed precision='fp16' is not for stages of a pipeline: of techniques they have precision='bf16', state_format='8bit'",
        ),
        (
            {"sharding": "1f1b/4"},
            {"host_budget": "1GiB"},
            "host_budget='1GiB' is for what is offloaded, and stages of a",
        ),
        ({"sharding": "pipeline"}, {"freeze": ["nowhere"]}, "freeze='nowhere' matches no module or parameter"),
        ({"sharding": "1f1b/4"}, {"ranks": None}, "is a pipeline, which is planned for devices that are named"),
        ({"sharding": "1f1b/4", "micro_batches": 7}, {}, "32 samples does not divide into 7 micro-batches"),
    ],
)
def test_what_stages_cannot_have_is_one_sentence(fixed: Any, named: dict[str, Any], says: str) -> None:
    with pytest.raises(memfit.MemfitError, match=says):
        planned(fixed, **named)


class OneMoreForPadding(Padded):
    """Calls a layer only where some token is padding."""

    def forward(self, tokens: Tensor, filled: Tensor) -> Tensor:
        x = super().forward(tokens, filled)
        return x if bool(filled.all()) else self.mixing[0](x)


def test_parts_that_are_called_for_some_batches_only_are_refused() -> None:
    fixed = {"sharding": "1f1b/2", "micro_batches": 2}
    with pytest.raises(memfit.InputError, match="decide which parts the forward calls or what they give"):
        memfit.plan(OneMoreForPadding(), tokens([LENGTH] * 4 + [9] * 4), loss_of, 1 << 40, devices=2, fixed=fixed)


def test_paths_of_other_samples_than_the_ranks_own_are_planned_for() -> None:
    source = TraceSource(Padded(), tokens([LENGTH] * 4), loss_of, None)
    assert not StagePlanner(source, tokens([LENGTH] * 8), 2).kinds
    source.other_samples = lambda _: [tokens([9] * 4)]
    (kind,) = StagePlanner(source, tokens([LENGTH] * 8), 2).kinds
    assert torch.equal(kind[1].sum(1), torch.tensor([9] * 8))


def test_settings_are_written_in_a_few_letters() -> None:
    assert str(Pipelines("1f1b", 4)) == "1f1b/4"
    assert way_of(str(Pipelines("gpipe", 2, 3))) == ("gpipe", 6, 0)
    assert Pipelines.of("interleaved/4").in_words() == "a pipeline of 8 stages (interleaved 1F1B) on 4 ranks"
    for setting in ("1f1b/4", "gpipe/2x3", "1f1b/2x2+zero1", "interleaved/2x2"):
        assert str(Pipelines.of(setting)) == setting
    assert settings_for("1f1b+zero1", 8) == ("1f1b/4x2+zero1", "1f1b/2x4+zero1")
    assert settings_for("pipeline/2x2", 4) == ("1f1b/2x2", "interleaved/2x2")
    for wrong in ("1f1b", "1f1b/1", "1f1b/2x0", "gpipe/x", "1f1b/4+zero1", "1f1b/2x2+zero3", "1f1b/2x2+"):
        with pytest.raises(memfit.InputError, match="of pipelines the ranks of one and how many there are"):
            way_of(wrong)


def test_its_report_is_a_page(plan: memfit.Plan, tmp_path: Path) -> None:
    ranks = tuple(MeasuredRank(rank.peak_bytes, rank.peak_bytes, rank.waiting) for rank in plan.prediction.ranks)
    peak = plan.prediction.peak_bytes
    rehearsal = Rehearsal(peak, peak, 0.1, curve=(1, peak), ranks=ranks, waiting=0.2)
    report = Report("decoder", plan, rehearsal, tuple(StepRecord(n, 1.0 / n, 0.1, 4, peak) for n in range(1, 4)))
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    write_report(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "stage 0" in page


@pytest.mark.parametrize("too_large", [False, True])
def test_a_model_without_values_is_told_to_be_weighted_by_samples_only_where_nothing_shows_how(
    monkeypatch: pytest.MonkeyPatch, *, too_large: bool
) -> None:
    """A note began with the colon that was to stand behind a reason."""
    if too_large:
        monkeypatch.setattr(trace_source, "LARGEST_FILLED_BYTES", 0)
    with torch.device("meta"):
        model = small.chain(2)

    plan = memfit.plan(
        model, small.rows(4), small.squared_error, 1 << 40, small.adamw, devices="2xh100", fixed={"sharding": "gpipe/2"}
    )

    assert not any(note.startswith(":") for note in plan.notes)
    assert any(note.endswith(": micro-batches are weighted by samples") for note in plan.notes) is too_large
