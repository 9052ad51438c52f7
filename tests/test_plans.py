"""A plan is the same after a journey through a file; what cannot be followed is refused before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
import small
from memfit.errors import InputError, MemfitError, PlanFileError
from memfit.planning import planning_of
from memfit.techniques.choices import Choices
from memfit.values.plan import FORMAT_VERSION, Plan
from memfit.values.prediction import Prediction, RankPrediction
from memfit.values.script import KEPT, Script, Step

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@cache
def made() -> Plan:
    return small.plan_at(0.0, small.chain(3, dropout=0.1), small.rows())


def model() -> torch.nn.Module:
    return small.chain(3, dropout=0.1)


def as_data() -> Any:
    return json.loads(json.dumps(made().to_json()))


def test_the_plan_of_these_tests_does_something() -> None:
    assert made().script.recomputations > 3
    assert made().script.random  # dropout masks are drawn again
    assert made().script.held


def test_json_gives_the_same_plan_back() -> None:
    assert Plan.from_json(as_data()) == made()


def test_a_file_gives_the_same_plan_back_and_trains(tmp_path: Path) -> None:
    made().save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made()
    assert planning_of(loaded) is None
    ends = []
    for each in (made(), loaded):
        trained = model()
        engine = memfit.apply(each, trained, small.squared_error, small.adamw)
        torch.manual_seed(3)
        assert engine.step(small.rows()).divergences == ()
        ends.append(small.state_of(trained, engine.optimizer))
    assert small.same(*ends)


def test_a_loaded_plan_cannot_be_made_anew(tmp_path: Path) -> None:
    made().save(tmp_path / "plan.json")
    with pytest.raises(
        InputError, match=r"loaded from a file, or is a changed copy, and carries no trace: keep the traces"
    ):
        memfit.api.replan(Plan.load(tmp_path / "plan.json"), "1GiB")


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, None, "1"])
def test_another_version_is_refused_by_number(version: object) -> None:
    with pytest.raises(
        PlanFileError, match=rf"has format {version!r} and this memfit reads {FORMAT_VERSION}: plan again"
    ):
        Plan.from_json({**as_data(), "format_version": version})


@pytest.mark.parametrize("data", [[], "plan", 3, None, {}, {"memfit": "report"}])
def test_what_is_no_plan_is_refused(data: Any) -> None:
    with pytest.raises(PlanFileError, match="this is not a memfit plan: make one with"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "is not JSON"), (b"{", "is not JSON"), (b"\xff\xfe\x00", "is not JSON"), (b"[]", "not a memfit plan")],
)
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanFileError, match=sentence):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot read the plan .*nothing: No such file"):
        Plan.load(tmp_path / "nothing")
    with pytest.raises(PlanFileError, match="cannot read the plan .*: Is a directory"):
        Plan.load(tmp_path)


# -- another model ---------------------------------------------------------------------------------------------------------


def frozen() -> torch.nn.Module:
    other = model()
    next(other.parameters()).requires_grad_(False)
    return other


@pytest.mark.parametrize(
    "other",
    [
        lambda: small.chain(4, dropout=0.1),
        lambda: small.chain(3),
        lambda: model().to(torch.bfloat16),
        lambda: model().eval(),
        frozen,
    ],
    ids=["deeper", "without dropout", "other dtype", "eval", "frozen"],
)
def test_a_plan_for_another_model_is_refused(other: Callable[[], torch.nn.Module]) -> None:
    with pytest.raises(PlanFileError, match="the plan is for a model with digest .* Plan again for this model"):
        memfit.apply(made(), other())


def test_values_of_parameters_do_not_matter() -> None:
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert memfit.apply(made(), other).plan is made()


# -- edited by hand --------------------------------------------------------------------------------------------------------


def put(value: object, *path: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for name in path[:-1]:
            data = data[name]
        data[path[-1]] = value

    return edit


def gone(*path: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for name in path[:-1]:
            data = data[name]
        del data[path[-1]]

    return edit


def first_rerun(data: Any) -> Any:
    return next(step for step in data["script"]["steps"] if step[1])


REFUSED: dict[str, Callable[[Any], None]] = {
    "no budget": gone("budget_bytes"),
    "budget in words": put("8GiB", "budget_bytes"),
    "budget of nothing": put(0, "budget_bytes"),
    "budget below the peak": put(1, "budget_bytes"),
    "negative peak": put(-1, "prediction", "peak_bytes"),
    "peak in words": put("little", "prediction", "peak_bytes"),
    "no prediction": gone("prediction"),
    "prediction of another thing": put(3, "prediction", "luck"),
    "no parts": put(0, "choices", "micro_batches"),
    "half a part": put(1.5, "choices", "micro_batches"),
    "an unknown choice": put(1, "choices", "colour"),
    "no script": gone("script"),
    "script is a list": put([], "script"),
    "no names": put([], "script", "names"),
    "operation without a name": put(10**6, "script", "operations", 0),
    "save of an unknown storage": lambda d: d["script"]["saves"].__setitem__(
        d["script"]["saves"].index(next(s for s in d["script"]["saves"] if s != KEPT)), 10**6
    ),
    "an unknown storage held": lambda d: d["script"]["held"].append(10**6),
    "a step for a save that autograd keeps": lambda d: d["script"]["steps"][0].__setitem__(
        0, d["script"]["saves"].index(KEPT)
    ),
    "a step for no save": lambda d: d["script"]["steps"][0].__setitem__(0, 10**6),
    "a step for a negative save": lambda d: d["script"]["steps"][0].__setitem__(0, -1),
    "a step with too few parts": lambda d: d["script"]["steps"][0].pop(),
    "a rerun of what is not recorded": lambda d: first_rerun(d)[1][0].append(10**6),
    "a rerun that makes nothing": lambda d: d["script"]["makes"].pop(str(first_rerun(d)[1][0][0])),
    "an operation of unknown gradients": lambda d: d["script"].update(wanted=d["script"]["wanted"][1:]),
    "runs without releases": lambda d: first_rerun(d)[2].pop(),
    "a recorded operation that is not there": put([0], "script", "recorded", "1000000"),
    "made by an operation that is not there": put([[0, 0, 1]], "script", "makes", "1000000"),
    "made by an operation without a number": put([[0, 0, 1]], "script", "makes", "first"),
    "steps are words": put(["all"], "script", "steps"),
    "by_module is words": put(["all"], "by_module"),
    "notes are missing": gone("notes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_with_a_sentence(name: str) -> None:
    data = as_data()
    REFUSED[name](data)
    with pytest.raises(PlanFileError, match=r"cannot be followed \(.+\); if it was edited by hand, plan again"):
        Plan.from_json(data)


TOO_LATE: dict[str, Callable[[Any], None]] = {
    "infinite numbers": put([float("inf")], "script", "held"),
    "names are numbers": put(3, "script", "names", 0),
    "clip_norm in words": put("x", "clip_norm"),
    "clip_norm below zero": put(-1.0, "clip_norm"),
    "seconds in words": put("x", "prediction", "step_seconds"),
    "plain peak of nothing": put(0, "prediction", "plain_peak_bytes"),
    "categories are words": put("x", "prediction", "categories_at_peak"),
    "peak is not a number": put(float("nan"), "prediction", "peak_bytes"),
    "weights of no kind": lambda d: d["choices"].update(micro_batches=2, micro_batch_size=128, weights="luck"),
    "parts without samples": lambda d: d["choices"].update(micro_batches=2, micro_batch_size=0, weights="samples"),
    "a rerun reads what nobody makes": lambda d: d["script"]["recorded"].__setitem__(
        str(first_rerun(d)[1][0][0]), [10**6]
    ),
    "what a rerun reads is not held": put([], "script", "held"),
    "a save that no step answers": lambda d: d["script"]["steps"].clear(),
}


@pytest.mark.parametrize("name", TOO_LATE)
def test_what_would_fail_in_the_step_or_in_words_is_refused_at_once(name: str) -> None:
    data = as_data()
    TOO_LATE[name](data)
    with pytest.raises(PlanFileError):
        Plan.from_json(data)


def small_edits(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to some leaves of each table of the script."""
    if isinstance(data, dict):
        return [p for k in list(data)[:3] for p in small_edits(data[k], (*path, k))]
    if isinstance(data, list):
        return [p for i in range(min(3, len(data))) for p in small_edits(data[i], (*path, i))]
    return [path]


@pytest.mark.filterwarnings("ignore:a forward differed from the plan")
def test_an_edited_script_trains_the_same_numbers_or_fails_with_nothing_changed() -> None:
    """Whatever stands in a script, a step happens right or not at all."""
    sample = small.rows(64)
    plan = small.plan_at(0.2, small.chain(1), sample)
    start = small.chain(1)
    plain = memfit.apply(replace(plan, script=Script()), start, small.squared_error, small.adamw)
    plain.step(sample)
    right = small.state_of(start)
    origin = json.loads(json.dumps(plan.to_json()))
    for path in small_edits(origin["script"]):
        if path[0] in {"names", "recorded", "operations", "makes"}:
            continue  # which operation, and on what: a change there is another computation
        for value in (0, 1, 5):
            data = json.loads(json.dumps(origin))
            put(value, "script", *path)(data)
            trained = small.chain(1)
            before = small.state_of(trained)
            try:
                engine = memfit.apply(Plan.from_json(data), trained, small.squared_error, small.adamw)
                engine.step(sample)
            except (MemfitError, KeyError, IndexError):
                assert small.same(small.state_of(trained), before), (path, value)
            else:
                assert small.same(small.state_of(trained), right), (path, value)


# -- words -----------------------------------------------------------------------------------------------------------------


def prediction(**named: Any) -> Prediction:
    return Prediction(**{**asdict_(), **named})


def asdict_() -> dict[str, Any]:
    return {
        "peak_bytes": 512 << 20,
        "plain_peak_bytes": 1 << 30,
        "step_seconds": 1.2,
        "plain_step_seconds": 1.0,
        "bound_seconds": 1.08,
        "seconds_are": "measured",
        "peak_phase": "backward",
        "peak_module": "layer.3",
        "peak_operation": "aten.mm.default",
        "categories_at_peak": {"parameter": 100 << 20, "activation": 412 << 20},
    }


def plan(**named: Any) -> Plan:
    given: dict[str, Any] = {
        "budget_bytes": 600 << 20,
        "choices": Choices(),
        "script": Script(),
        "prediction": prediction(),
        "signature": "x float32[1]",
        "model": "m",
        "device": "cpu",
        "torch_version": "2",
        **named,
    }
    return Plan(**given)


def test_an_explanation_names_figures_and_place() -> None:
    text = plan(rejected=("2 micro-batches: slower",), notes=("estimated",)).explain()
    for words in (
        "512 MiB of 600 MiB",
        "50.0 % of the 1.00 GiB that plain PyTorch would take",
        "1.20 s instead of 1.00 s (+20.0 %, measured)",
        "10.0 % faster",
        "bit for bit",
        "backward, layer.3 (aten.mm.default)",
        "activation 412 MiB, parameter 100 MiB",
        "Nothing is dropped",
        "Rejected: 2 micro-batches: slower",
        "Note: estimated",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("peaks", "told"),
    [
        ([512] * 8, "At its peak each of the 8 ranks holds 512 MiB."),
        (
            [512, 512, 256, 512],
            "At their peaks the ranks hold 512 MiB (rank 0 to 1), 256 MiB (rank 2), 512 MiB (rank 3).",
        ),
    ],
)
def test_ranks_that_are_alike_are_told_once(peaks: list[int], told: str) -> None:
    ranks = tuple(RankPrediction(rank, peak << 20, 0.5) for rank, peak in enumerate(peaks))
    assert told in plan(prediction=prediction(ranks=ranks)).explain().splitlines()


def test_a_printed_plan_is_its_explanation_and_its_repr_one_line() -> None:
    made = plan(choices=Choices(micro_batches=2))
    assert str(made) == made.explain()
    assert repr(made) == "<Plan: 512 MiB of 600 MiB at the peak, 2 micro-batches; print(plan) tells more>"


def test_an_explanation_of_parts_promises_no_equal_bits() -> None:
    text = plan(choices=Choices(4, 2, "tokens:labels")).explain()
    assert "bit for bit" not in text
    assert "up to the order of additions" in text
    assert "Micro-batches: 4, losses weighted by entries of labels that are not -100." in text
    text = plan(choices=Choices(4, 2, "tokens:1")).explain()
    assert "Micro-batches: 4, losses weighted by entries of batch[1] that are not -100." in text


def test_the_gap_is_a_part_of_the_step_and_never_negative() -> None:
    assert plan().gap == pytest.approx(0.1)
    assert plan(prediction=prediction(bound_seconds=2.0)).gap == 0
    assert plan(prediction=prediction(step_seconds=0.0)).gap == 0
    assert prediction().slowdown == pytest.approx(1.2)


def test_a_script_counts_what_it_runs_again() -> None:
    script = Script(steps=(Step(0, ((1, 2), (3,)), ((), ()), ()), Step(1, (), (), ())))
    assert script.recomputations == 3
    assert not script.plain
    assert Script().plain


def test_a_prediction_is_one_for_each_device() -> None:
    single = plan()
    (alone,) = single.prediction.by_rank
    assert (alone.rank, alone.peak_bytes) == (0, single.prediction.peak_bytes)
    ranks = tuple(RankPrediction(rank, 10 + rank, 0.5, stage=rank) for rank in range(2))
    pair = replace(single, prediction=replace(single.prediction, ranks=ranks))
    assert Plan.from_json(json.loads(json.dumps(pair.to_json()))) == pair
    assert pair.prediction.by_rank == ranks
