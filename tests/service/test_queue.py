"""Which waiting run starts: by priority and fair shares, and past a larger one only where that starts no later."""

from __future__ import annotations

import random

from memfit.runner import Ledger, RunRequest
from memfit.service.queue import Occupied, Queued, in_order, turns
from sweeps import each_seed

GIB = 1 << 30


def queued(name: str, size: float, seconds: float, **named: object) -> Queued:
    return Queued(RunRequest(name, ("true",), rank_bytes=(int(size * GIB),)), seconds, **named)  # type: ignore[arg-type]


def occupied(name: str, size: float, seconds: float) -> Occupied:
    return Occupied(RunRequest(name, ("true",), rank_bytes=(int(size * GIB),)), ("cpu",), seconds)


def test_two_of_sixty_percent_are_never_together() -> None:
    first, second = turns({"cpu": 10 * GIB}, (), [queued("a", 6, 30), queued("b", 6, 30)])
    assert (first.seconds, second.seconds) == (0.0, 30.0)
    assert second.reason == "needs 6.00 GiB on cpu, and 4.00 GiB are free"


def test_a_small_run_passes_a_large_one_only_where_that_starts_no_later() -> None:
    running = [occupied("running", 6, 100)]
    large = queued("large", 8, 50)
    short, long = queued("short", 2, 100), queued("long", 3, 101)
    found = {each.name: each for each in turns({"cpu": 10 * GIB}, running, [large, long, short])}
    assert found["large"].seconds == 100.0
    assert found["short"].seconds == 0.0  # over when the large one starts
    assert found["long"].seconds == 150.0
    assert found["long"].reason == "would delay large"


def test_the_largest_share_goes_last_within_one_priority() -> None:
    queue = [
        queued("a1", 1, 10, owner="a"),
        queued("a2", 1, 10, owner="a"),
        queued("b1", 1, 10, owner="b"),
        queued("late", 1, 10, owner="a", priority=1),
    ]
    assert [each.request.name for each in in_order(queue)] == ["late", "a1", "b1", "a2"]
    had = {"a": 100.0 * GIB}
    assert [each.request.name for each in in_order(queue, had)] == ["late", "b1", "a1", "a2"]


def test_ranks_get_a_device_each_all_or_none() -> None:
    capacity = {"cuda:0": 8 * GIB, "cuda:1": 8 * GIB}
    pair = Queued(RunRequest("pair", ("true",), rank_bytes=(5 * GIB, 5 * GIB), device="cuda"), 10)
    one = Occupied(RunRequest("one", ("true",), rank_bytes=(4 * GIB,), device="cuda"), ("cuda:0",), 25)
    (turn,) = turns(capacity, [one], [pair])
    assert (turn.seconds, set(turn.devices)) == (25.0, {"cuda:0", "cuda:1"})


def test_what_stands_far_behind_is_not_laid_out() -> None:
    found = turns({"cpu": GIB}, (), [queued(f"r{n}", 1, 1) for n in range(5)], depth=3)
    assert [each.seconds for each in found] == [0.0, 1.0, 2.0, None, None]
    assert found[4].reason == "4 runs are ahead of it"


@each_seed(3, 40)
def test_no_byte_is_reserved_twice_and_nobody_is_delayed_by_those_behind(seed: int) -> None:
    draw = random.Random(seed)
    capacity = {"cuda:0": 10 * GIB, "cuda:1": 6 * GIB}
    queue = [
        Queued(
            RunRequest(f"r{n}", ("true",), rank_bytes=(draw.randint(1, 6 * GIB),) * draw.choice((1, 1, 2)), device="cuda"),
            draw.uniform(1, 100),
        )
        for n in range(14)
    ]  # fmt: skip
    found = turns(capacity, (), queue)
    for moment in {each.seconds for each in found}:
        assert moment is not None
        ledger = Ledger(capacity)
        for turn, each in zip(found, queue, strict=True):
            assert turn.seconds is not None
            if turn.seconds <= moment < turn.seconds + turn.lasts:
                ledger.promise(each.request, turn.devices)
        assert all(ledger.used(name) <= size for name, size in capacity.items())
    for number in range(1, len(queue)):
        assert turns(capacity, (), queue[:number]) == found[:number]
