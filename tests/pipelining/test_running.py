"""Planned pipelines over gloo processes: gradients, losses and parameters of the undivided model, and the predicted peak of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import memfit
from memfit.pipelining import planning, stage_planner, stages
from memfit.pipelining.planning import SEVERAL_PATHS, WITHIN_CALLS
from memfit.planner.cut_costs import cost_of
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.stage_bytes import StageLevels
from memfit.planner.timeline import Recomputations
from memfit.techniques.freezing.freeze import freeze
from memfit.values.stages import Recompute
from pipelining import running
from sharding import steps

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 0.005  # the promise; what is found is some bytes


def planned(
    build: Callable[[], steps.Built], ranks: int, setting: str, optimizer: str, share: float = 1.0, **named: Any
) -> memfit.Plan:
    """A plan for a rank's part of the batch, in this share of the fullest rank's bytes with everything kept."""

    def plan(budget: int) -> memfit.Plan:
        model, sample, loss_fn = build()
        own = steps.part_of(sample, 0, ranks)
        fixed = {"sharding": setting, **named.get("fixed", {})}
        more = {**named, "fixed": fixed}
        return memfit.plan(model, own, loss_fn, budget, running.OPTIMIZERS[optimizer], devices=ranks, **more)

    roomy = plan(1 << 40)
    return roomy if share == 1.0 else memfit.replan(roomy, int(share * roomy.prediction.peak_bytes))


def compared(
    ranks: int,
    build: Callable[[], steps.Built],
    optimizer: str,
    plans: Sequence[memfit.Plan],
    alike: Callable[[], steps.Built] | None = None,
) -> list[list[running.Ran]]:
    """Gradients within 1e-6, and losses and parameters after three steps; peaks as predicted. `alike` is the undivided model, where that is not `build`'s."""
    clip_norm = plans[0].clip_norm
    gradients, losses, parameters = running.undivided(alike or build, optimizer, clip_norm)
    ran = running.together(ranks, running.run, [plan.to_json() for plan in plans], build, optimizer)
    for number, plan in enumerate(plans):
        seen: set[str] = set()
        for rank in range(ranks):
            of_rank = ran[rank][number]
            assert of_rank.losses == pytest.approx(losses, rel=1e-5), plan.choices
            for name, gradient in of_rank.gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6, msg=f"{plan.choices} {name}")
            for name, parameter in of_rank.parameters.items():
                torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-6, msg=f"{plan.choices} {name}")
            assert 0 <= of_rank.waiting < 1
            seen |= of_rank.gradients.keys()
        assert seen == gradients.keys()
        peaks = [of_rank[number].peak_bytes for of_rank in ran]
        assert running.as_predicted(peaks, plan, CLOSE), (plan.choices, plan.prediction.ranks, peaks)
        whole = ran[0][number].whole
        assert whole.keys() == build()[0].state_dict().keys()
        assert not any(each[number].whole for each in ran[1:])
        for name, value in whole.items():
            if name in parameters:
                torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-6)
    return ran


def test_two_ranks_train_as_one_device_does_and_hold_what_is_predicted() -> None:
    plans = [
        planned(running.short_tied, 2, "1f1b/2", "sgd", 0.9, clip_norm=0.1, fixed={"micro_batches": 4}),
        planned(running.short_tied, 2, "gpipe/2", "sgd", clip_norm=0.1, fixed={"micro_batches": 2}),
    ]
    assert any(script.recomputations for script in plans[0].pipeline.scripts), "something is to be run again"
    compared(2, running.short_tied, "sgd", plans)


def test_losses_in_float64_are_as_large_as_they_are() -> None:
    """The schedule holds those of all micro-batches to the end of the step. The norm for clipping is in float64, too: in float32 it cost nine digits."""
    plan = planned(running.short_double, 2, "1f1b/2", "sgd", fixed={"micro_batches": 4}, clip_norm=0.1)
    ran = running.together(2, running.run, [plan.to_json()], running.short_double, "sgd")
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)
    _, losses, parameters = running.undivided(running.short_double, "sgd", 0.1)
    for (of_rank,) in ran:
        assert of_rank.losses == pytest.approx(losses, rel=1e-13)
        for name, parameter in of_rank.parameters.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-13)


def test_a_rank_that_trains_nothing_has_the_norm_for_clipping_in_the_others_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_at((4, 8), monkeypatch)
    plan = planned(running.half_frozen_double, 2, "1f1b/2", "sgd", fixed={"micro_batches": 4}, clip_norm=0.1)
    ran = running.together(2, running.run, [plan.to_json()], running.half_frozen_double, "sgd")
    assert [bool(of_rank.gradients) for (of_rank,) in ran] == [False, True]
    _, losses, _ = running.undivided(running.half_frozen_double, "sgd", 0.1)
    for (of_rank,) in ran:
        assert of_rank.losses == pytest.approx(losses, rel=1e-13)


def cut_at(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut is this one."""

    def cut(parts: Any, line: Any, micro_batches: int, schedule: Any, stages: int, per_device: int) -> Any:
        assert stages * per_device == len(ends)
        return cost_of(parts, line, ends, micro_batches, schedule)

    monkeypatch.setattr(stages, "cut_parts", cut)


@pytest.mark.parametrize("ends", [(2, 9), pytest.param((5, 9), marks=pytest.mark.slow)])
def test_a_cut_after_an_activation_in_place_or_a_pooling_layer_trains_as_one_device_does(
    ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_at(ends, monkeypatch)
    plans = [planned(running.vgg, 2, f"{how}/2", "adamw", fixed={"micro_batches": 4}) for how in ("gpipe", "1f1b")]
    assert all(plan.pipeline is not None and plan.pipeline.ends == ends for plan in plans)
    compared(2, running.vgg, "adamw", plans)


@pytest.mark.parametrize("ends", [pytest.param((1, 4), marks=pytest.mark.slow), (2, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_what_a_schedule_holds_of_what_it_has_sent_is_predicted_to_the_byte(
    schedule: str, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's GPipe holds all that it sends to the end of the step. Cuts that other seconds would not choose."""
    cut_at(ends, monkeypatch)
    plan = planned(running.sequential, 2, f"{schedule}/2", "adamw", fixed={"micro_batches": 4})
    ran = running.together(2, running.run, [plan.to_json()], running.sequential, "adamw")
    assert plan.pipeline is not None
    assert plan.pipeline.ends == ends
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
def test_a_parameter_that_two_stages_of_a_rank_have_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its gradient and its state."""
    cut_at((2, 3, 4, 7), monkeypatch)
    for optimizer in ("sgd", "adamw"):
        plan = planned(running.blocks_that_share, 2, "interleaved/2", optimizer, fixed={"micro_batches": 4})
        assert plan.pipeline is not None
        assert set(plan.pipeline.parameters[0]) & set(plan.pipeline.parameters[2]), "both are of the first rank"
        if optimizer == "sgd":
            ran = compared(2, running.blocks_that_share, optimizer, [plan])
        else:
            ran = running.together(2, running.run, [plan.to_json()], running.blocks_that_share, optimizer)
        assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


def test_a_tensor_that_every_rank_has_alike_is_there_once() -> None:
    plan = planned(running.weighed, 2, "1f1b/2", "sgd", fixed={"micro_batches": 4})
    ran = compared(2, running.weighed, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "schedules"),
    [("one by one", ("1f1b", "gpipe")), ("at once", ("1f1b",))],
)
def test_what_is_gone_before_the_update_is_not_counted_at_it(optimizer: str, schedules: tuple[str, ...]) -> None:
    """The batch that ranks have put together, the loss, and the gradients of what the last stage has received."""
    plans = [planned(running.few_rows, 2, f"{how}/2", optimizer) for how in schedules]
    assert all(plan.prediction.peak_phase == "optimizer" for plan in plans)
    ran = running.together(2, running.run, [plan.to_json() for plan in plans], running.few_rows, optimizer)
    for number, plan in enumerate(plans):
        assert running.as_predicted([of_rank[number].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
def test_an_optimizer_steps_the_stages_of_a_rank_together() -> None:
    """What it takes for all parameters at once is that of all stages, but for some numbers."""
    plan = planned(running.few_rows, 2, "interleaved/2", "at once")
    assert plan.prediction.peak_phase == "optimizer"
    ran = running.together(2, running.run, [plan.to_json()], running.few_rows, "at once")
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan, CLOSE)


def test_two_stages_on_each_rank_train_as_one_device_does_and_hold_what_is_predicted() -> None:
    """Torch's interleaved schedule holds all that it sends, as its GPipe does. The gradients of four stages, two of them run again."""
    plan = planned(running.short_decoder, 2, "interleaved/2", "sgd", clip_norm=0.1, fixed={"micro_batches": 4})
    tight = memfit.replan(plan, int(0.7 * plan.prediction.peak_bytes))
    whole = planned(running.short_decoder, 2, "interleaved/2", "sgd", clip_norm=0.1, fixed={"micro_batches": 1})
    assert plan.pipeline is not None
    assert (plan.pipeline.stages, plan.pipeline.ranks) == (4, 2)
    assert tight.pipeline is not None
    assert any(script.recomputations for script in tight.pipeline.scripts)
    ran = compared(2, running.short_decoder, "sgd", [plan, tight, whole])
    for number, made in enumerate((plan, tight, whole)):
        assert running.as_predicted([of_rank[number].peak_bytes for of_rank in ran], made)


def test_a_rank_holds_the_weights_of_its_own_recurrent_layers_alone() -> None:
    """They count once for each of its stages."""
    fixed = {"micro_batches": 4}
    plan = planned(running.recurrent, 2, "interleaved/2", "sgd", fixed=fixed)
    ran = compared(2, running.recurrent, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


def test_what_one_stage_of_a_rank_reads_of_the_batch_the_other_is_not_given() -> None:
    """A mask that only the first stage reads is made in that one alone."""
    plan = planned(running.masked_first, 2, "interleaved/2", "sgd", fixed={"micro_batches": 4})
    assert plan.pipeline is not None
    assert plan.pipeline.stages == 4
    ran = compared(2, running.masked_first, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


def test_what_a_stage_hands_on_from_its_buffer_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third stage receives what the encoder ended with and sends it on: of that it has no bytes of its own."""
    cut_at((2, 5, 6, 8), monkeypatch)
    plan = planned(running.encoder_decoder, 2, "interleaved/2", "sgd", fixed={"micro_batches": 4})
    assert plan.pipeline is not None
    received, sent = (plan.pipeline.messages[behind] for behind in (1, 2))
    assert {message.part for message in received} & {message.part for message in sent}
    ran = running.together(2, running.run, [plan.to_json()], running.encoder_decoder, "sgd")
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_of_a_loss_that_lies_in_a_large_storage_the_number_is_held(schedule: str) -> None:
    """The mean of a squared error does."""
    model, batch, loss_fn = running.squared()
    loss = loss_fn(model, batch)
    assert loss.untyped_storage().nbytes() > loss.nbytes
    plan = planned(running.squared, 2, f"{schedule}/2", "sgd", fixed={"micro_batches": 4})
    ran = compared(2, running.squared, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
def test_what_micro_batches_with_and_without_padding_hold_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where stages run something again: each path has a plan of its own. The most that there can be is what both kinds in turn take."""
    cut_at((3, 7), monkeypatch)
    roomy = planned(running.padded, 2, "1f1b/2", "sgd", fixed={"micro_batches": 4})
    least = memfit.smallest_budget(roomy)
    half_way = memfit.replan(roomy, (least + roomy.prediction.peak_bytes) // 2)
    plans = [roomy, half_way, memfit.replan(roomy, least)]
    assert least < 0.85 * roomy.prediction.peak_bytes
    for plan in plans:
        assert plan.pipeline is not None
        assert any(script.branches for script in plan.pipeline.scripts) == (plan is not roomy)
        assert SEVERAL_PATHS in plan.notes
        assert WITHIN_CALLS not in plan.notes
    in_turns = compared(2, running.padded_in_turns, "sgd", plans)
    mostly_padded = running.together(2, running.run, [plan.to_json() for plan in plans], running.padded, "sgd")
    for number, plan in enumerate(plans):
        for rank, figures in enumerate(plan.prediction.ranks):
            assert in_turns[rank][number].peak_bytes == figures.peak_bytes
            assert mostly_padded[rank][number].peak_bytes <= figures.peak_bytes


def test_a_pipeline_whose_sample_has_no_padding_tells_that_other_batches_may_take_more() -> None:
    model, (ids, filled), loss_fn = running.padded()
    whole = ids[:8], filled[:8]
    plan = memfit.plan(
        model, whole, loss_fn, 1 << 40, running.OPTIMIZERS["sgd"], devices=2, fixed={"sharding": "1f1b/2"}
    )
    assert any("has one answer in all of the sample" in note for note in plan.notes)
    assert SEVERAL_PATHS not in plan.notes


@pytest.mark.slow
def test_stages_whose_paths_part_late_run_again_what_these_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at((3, 9), monkeypatch)
    roomy = planned(running.padded_late, 2, "1f1b/2", "sgd", fixed={"micro_batches": 4})
    plan = memfit.replan(roomy, least := memfit.smallest_budget(roomy))
    assert least < 0.9 * roomy.prediction.peak_bytes
    assert plan.pipeline is not None
    assert any(script.calls for script in plan.pipeline.scripts)
    assert WITHIN_CALLS in plan.notes
    ran = compared(2, running.padded_late, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)
    with pytest.raises(memfit.InfeasibleError, match="padded to one length longer than any text"):
        memfit.replan(roomy, least - 1)


def of_calls(
    solver: Solver, levels_of: Callable[[Recomputations], StageLevels], *, plain_only: bool = False
) -> list[tuple[Recompute, Solution]]:
    """A menu with one plan, which makes the calls of all blocks again."""
    del plain_only
    solution = solver.call_plans.plan(solver.call_plans.orders[0])
    levels = levels_of(solution.recomputations)
    return [(Recompute(levels.kept_bytes, levels.pass_bytes, solution.seconds), solution)]


@pytest.mark.parametrize("setting", ["1f1b/2", pytest.param("gpipe/2", marks=pytest.mark.slow)])
def test_stages_make_whole_calls_of_blocks_again(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage is left right after its last block, which is called again, too. From the second forward on nothing is followed."""
    monkeypatch.setattr(stage_planner, "menu", of_calls)
    monkeypatch.setattr(planning, "refined", lambda planner, found, line: found)
    cut_at((3, 7), monkeypatch)
    plan = planned(running.decoder, 2, setting, "sgd", fixed={"micro_batches": 4})
    assert plan.pipeline is not None
    for script in plan.pipeline.scripts:
        assert script.whole_calls == 2
        assert script.recomputations
        # The call of the model; the loss of the last stage comes after it.
        assert [(stretch.begins, stretch.ends) for stretch in script.kept_stretches] == [("", "")]
    ran = compared(2, running.decoder, "sgd", [plan])
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
@pytest.mark.parametrize("build", [running.encoder_decoder, running.tied, running.resnet])
def test_interleaved_stages_of_other_models(build: Callable[[], steps.Built]) -> None:
    plans = [planned(build, 2, "interleaved/2", "sgd", share, fixed={"micro_batches": 8}) for share in (1.0, 0.95)]
    compared(2, build, "sgd", plans)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["1f1b/2", "gpipe/2"])
def test_what_checkpoints_of_the_users_save_of_earlier_stages_takes_nothing(setting: str) -> None:
    plan = planned(running.checkpointed, 2, setting, "sgd", fixed={"micro_batches": 4})
    ran = running.together(2, running.run, [plan.to_json()], running.checkpointed, "sgd")
    assert running.as_predicted([of_rank[0].peak_bytes for of_rank in ran], plan)


@pytest.mark.slow
def test_interleaved_pipelines_beside_each_other_share_out_their_state() -> None:
    settings = ("interleaved/2x2", "interleaved/2x2+zero1")
    plans = [planned(running.decoder, 4, setting, "sgd", fixed={"micro_batches": 4}) for setting in settings]
    compared(4, running.decoder, "sgd", plans)


def test_a_batch_that_cannot_be_run_is_told_on_all_ranks() -> None:
    """Thirteen and twelve samples for micro-batches of eight: five of five, which two ranks cannot run in rounds of two. Seventeen are more than planned."""
    plan = planned(running.decoder, 2, "interleaved/2", "sgd", fixed={"micro_batches": 4})
    found = running.together(
        2, running.of_another_size, plan.to_json(), running.decoder, [(13, 12), (17, 15), (16, 16)]
    )
    for uneven, _ in found:
        assert "rounds of 2 micro-batches of at most 8 samples, and a pipeline's batch of 25 samples does not" in uneven
    (_, own), (_, told) = found
    assert own.startswith("the batch is [ids int64[17, ")
    assert told == f"rank 0 refuses its batch, and no rank takes the step: {own}"


def test_a_batch_that_one_of_two_pipelines_cannot_run_is_told_on_the_ranks_of_both() -> None:
    """Fifteen samples for micro-batches of four: five of three, which two ranks cannot run in rounds of two. The other pipeline has sixteen."""
    plan = planned(running.many_rows, 4, "interleaved/2x2", "sgd", fixed={"micro_batches": 4})
    found = running.together(
        4, running.of_another_size, plan.to_json(), running.many_rows, [(7, 8, 8, 8), (8, 8, 8, 8), (8, 8, 8, 7)]
    )
    for told in found:
        assert len(told) == 2
        assert all("and a pipeline's batch of 15 samples does not divide into them" in each for each in told)
        assert all(each.endswith('or plan with fixed={"sharding": "1f1b/2x2"}') for each in told)


def test_a_forward_that_one_of_two_pipelines_cannot_run_is_told_on_the_ranks_of_both() -> None:
    plan = planned(running.either_way, 4, "1f1b/2x2", "sgd", fixed={"micro_batches": 2})
    found = running.together(4, running.turned_round_on, 2, plan.to_json())
    for rank, (told, loss) in enumerate(found):
        assert told.endswith("the forward calls layers.3 where it called layers.0 when it was planned for: plan again")
        assert told.startswith("rank 2 cannot run its stages, so no rank takes the step") == (rank < 2)
        assert loss == found[0][1] > 0


BUILDS = [running.sequential, running.decoder, running.tied, running.encoder_decoder, running.resnet]


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_two_stages_of_every_model(build: Callable[[], steps.Built]) -> None:
    """With everything kept, and in as little as there is a plan for."""
    roomy = [planned(build, 2, f"{schedule}/2", "sgd", fixed={"micro_batches": 4}) for schedule in ("gpipe", "1f1b")]
    least = [memfit.replan(plan, memfit.smallest_budget(plan)) for plan in roomy]
    compared(2, build, "sgd", [*roomy, *least])


def test_pipelines_beside_each_other_sum_their_gradients_and_may_share_out_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_at((3, 7), monkeypatch)
    plans = [
        planned(running.tied, 4, setting, "sgd", clip_norm=0.1, fixed={"micro_batches": 2})
        for setting in ("1f1b/2x2", "1f1b/2x2+zero1")
    ]
    compared(4, running.tied, "sgd", plans)
    whole, shared = ([rank.peak_bytes for rank in plan.prediction.ranks] for plan in plans)
    assert all(less < more for less, more in zip(shared, whole, strict=True))


def frozen_decoder(patterns: Sequence[str]) -> steps.Built:
    model, sample, loss_fn = running.decoder()
    freeze(model, patterns)
    return model, sample, loss_fn


BELOW = ("words", "start", "blocks.[0-2]")


@pytest.mark.parametrize(
    ("schedule", "patterns", "sends_back"),
    [
        ("1f1b", BELOW, False),
        pytest.param("gpipe", BELOW, False, marks=pytest.mark.slow),
        # The last stage trains nothing, and sends gradients through what is frozen.
        pytest.param("1f1b", ("blocks.[1-3]", "norm", "head"), True, marks=pytest.mark.slow),
    ],
)
def test_stages_without_anything_to_train(
    schedule: str,
    patterns: Sequence[str],
    sends_back: bool,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_at((4, 7), monkeypatch)
    plan = planned(running.decoder, 2, f"{schedule}/2", "sgd", freeze=list(patterns), fixed={"micro_batches": 4})
    assert plan.pipeline is not None
    (between,) = plan.pipeline.messages
    assert [message.gradient for message in between] == [sends_back]
    ran = compared(2, running.decoder, "sgd", [plan], partial(frozen_decoder, patterns))
    assert sorted(not of_rank[0].gradients for of_rank in ran) == [False, True]


@pytest.mark.slow
def test_state_is_shared_out_where_some_stages_train_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen by the user's own hand, in both schedules."""
    cut_at((4, 7), monkeypatch)
    build = partial(frozen_decoder, BELOW)
    plans = [
        planned(build, 4, setting, "sgd", share, fixed={"micro_batches": 2})
        for setting in ("gpipe/2x2+zero1", "1f1b/2x2+zero1")
        for share in (1.0, 0.95)
    ]
    compared(4, build, "sgd", plans)


@pytest.mark.slow
@pytest.mark.parametrize("build", [running.tied, running.encoder_decoder])
def test_four_stages_and_two_of_two(build: Callable[[], steps.Built]) -> None:
    plans = [
        planned(build, 4, setting, "sgd", fixed={"micro_batches": 4}) for setting in ("1f1b/4", "gpipe/4", "1f1b/2x2")
    ]
    compared(4, build, "sgd", plans)


def test_what_forward_writes_between_parts_is_alike_on_all_ranks_and_saved() -> None:
    """Each rank had its own, stale where forward is left before that code; and planning left the model with one call more."""
    model, sample, loss_fn = running.averaging()
    alone = memfit.apply(memfit.plan(model, sample, loss_fn, "1GiB", steps.sgd, fixed={"micro_batches": 2}), model)
    for _ in range(2):
        alone.step(sample)
    expected = dict(model.named_buffers())
    assert float(expected["calls"]) == 4

    plan = planned(running.averaging, 2, "1f1b", "sgd", fixed={"micro_batches": 2})
    for of_rank in running.together(2, running.averaged, plan.to_json()):
        for found in of_rank:
            for name, buffer in found.items():
                torch.testing.assert_close(buffer, expected[name], rtol=0, atol=1e-6, msg=name)

    model, sample, loss_fn = running.averaging()
    with pytest.raises(memfit.InputError, match="forward writes the buffer .+ between the parts of the model"):
        memfit.plan(model, sample[:8], loss_fn, "1GiB", steps.sgd, devices=2, fixed={"sharding": "interleaved"})
    memfit.plan(model, sample[:8], loss_fn, "1GiB", steps.sgd, devices=2, fixed={"sharding": "1f1b"})
    assert float(model.calls) == 0  # type: ignore[arg-type]
