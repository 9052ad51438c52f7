"""Runs from submission to end: planned first, refused at once where they cannot fit, started in their turn, found again after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from memfit.service.refusals import NotAllowedError, NotKnownError, NotNowError
from memfit.service.service import Submission
from memfit.service.tokens import Caller
from service import small_runs
from service.conftest import ANNA, Serving

BEN = Caller("ben", "submit")


def kinds(serving: Serving, number: int) -> list[str]:
    return [event.kind for event in serving.service.store.events(number)]


@pytest.mark.slow  # the same goes over HTTP in the quick run
def test_a_run_is_planned_then_trained_inside_its_budget(serve: Callable[..., Serving]) -> None:
    serving = serve()
    number = serving.submit(name="first").number
    run = serving.until_state(number, "done", "failed", "refused")

    assert (run.state, kinds(serving, number)) == ("done", ["planning", "waiting", "running", "done"])
    assert run.plan is not None
    assert run.plan["total_steps"] == 6
    assert run.measured_peak_bytes == run.plan["peak_bytes"] <= 400 << 10
    files = dict(serving.service.artifacts(ANNA, number))
    assert {"model.pt", "log.jsonl", "report.json"} <= files.keys()
    with serving.service.artifact(ANNA, number, "log.jsonl") as stream:
        assert [json.loads(line)["step"] for line in stream] == [1, 2, 3, 4, 5, 6]
    assert "Fits:" in serving.service.words(ANNA, number)


@pytest.mark.slow  # a search for the smallest plan
def test_what_cannot_fit_is_refused_with_the_smallest_budget_and_ways_out(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.until_state(serving.submit(budget="40KiB").number, "refused", "waiting")

    assert run.state == "refused"
    assert run.refusal is not None
    assert run.refusal["minimum_bytes"] > 40 << 10
    assert run.refusal["remedies"]
    assert "is too little: the smallest plan found needs" in run.reason
    assert run.started is None
    again = serving.until_state(
        serving.submit(budget=run.refusal["minimum_bytes"], plan_only=True).number, "planned", "refused"
    )
    assert again.state == "planned"


def test_a_submission_that_is_sent_twice_is_one_run(serve: Callable[..., Serving]) -> None:
    serving = serve()
    first, second = serving.submit(key="k1"), serving.submit(key="k1")
    assert first.number == second.number
    with pytest.raises(NotNowError, match="this idempotency key belongs to run 1"):
        serving.submit(key="k1", steps=7)
    assert serving.submit(BEN, key="k1").number == 2  # a key is its owner's


def test_two_people_are_isolated_from_each_other(serve: Callable[..., Serving]) -> None:
    serving = serve()
    number = serving.submit().number
    with pytest.raises(NotKnownError, match="there is no run 1"):
        serving.service.run(BEN, number)
    assert serving.service.runs(BEN) == []
    with pytest.raises(NotKnownError, match="there is no uploaded code"):
        serving.service.submit(BEN, Submission(small_runs.run_file(), code=serving.code()))
    reader = Caller("reader", "read")
    assert serving.service.run(reader, number).number == number
    with pytest.raises(NotAllowedError, match="this token may not change it"):
        serving.service.cancel(reader, number)
    with pytest.raises(NotAllowedError, match="may read and not submit"):
        serving.submit(reader)
    assert serving.service.cancel(Caller("chief", "admin"), number).asked == "cancel"
    assert serving.until_state(number, "cancelled").started is None


@pytest.mark.slow  # six processes that import torch
def test_a_run_is_paused_with_a_snapshot_and_goes_on_to_the_same_numbers(serve: Callable[..., Serving]) -> None:
    serving = serve(capacity={"cpu": 4 << 20})
    plain = serving.submit(steps=30).number
    slow = serving.submit(steps=30, slow=0.1).number
    serving.until(lambda: bool((progress := serving.service.dispatcher.view.progress.get(slow)) and progress.step >= 4))
    serving.service.pause(ANNA, slow)
    run = serving.until_state(slow, "paused")
    assert run.reason.startswith("paused after step")
    assert serving.service.dispatcher.runner.ledger.devices(f"{slow:06d}-1") == ()
    with pytest.raises(NotNowError, match="what waits or runs can be paused"):
        serving.service.pause(ANNA, serving.until_state(plain, "done").number)
    serving.service.resume(ANNA, slow)
    done = serving.until_state(slow, "done", "failed")
    assert (done.state, done.part) == ("done", 2)

    def losses(number: int) -> list[float]:
        with serving.service.artifact(ANNA, number, "log.jsonl") as stream:
            return [json.loads(line)["loss"] for line in stream]

    assert losses(slow) == losses(plain)
    assert len(losses(slow)) == 30


@pytest.mark.slow  # as above
def test_two_runs_that_do_not_fit_together_run_one_after_the_other(serve: Callable[..., Serving]) -> None:
    probe = serve(capacity={"cpu": 10 << 20})
    peak = (probe.until_state(probe.submit(plan_only=True).number, "planned").plan or {})["peak_bytes"]
    serving = probe.again(capacity={"cpu": int(peak / 0.6)})  # each takes 60 %
    first, second = (serving.submit(steps=40, slow=0.4).number for _ in range(2))
    seen: set[str] = set()

    def over() -> bool:
        states = [serving.service.store.run(number).state for number in (first, second)]
        seen.add("-".join(states))
        return set(states) <= {"done", "failed"}

    serving.until(over)
    assert "running-running" not in seen
    assert "running-waiting" in seen
    one, two = serving.service.store.run(first), serving.service.store.run(second)
    assert (one.state, two.state) == ("done", "done")
    assert one.ended is not None
    assert two.started is not None
    assert two.started >= one.ended - 1
