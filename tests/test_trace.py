"""A trace is the same after a journey through JSON or a file; a damaged one is refused with a sentence."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import PlanFileError
from memfit.identity import digest
from memfit.techniques.choices import Choices
from memfit.values.trace import BETWEEN, FORMAT_VERSION, Category, Collective, Phase, Trace
from planner import traces
from sweeps import each_seed


def trace() -> Trace:
    return replace(
        traces.drawn(4, forward=12, rng_bytes=16, dispatch=1e-5),
        notes=("a note", "ünïcode"),
        choices=Choices(3, 5, "tokens:labels"),
    )


@each_seed(20)
def test_json_gives_the_same_trace_back(seed: int) -> None:
    before = traces.drawn(seed, rng_bytes=seed)
    assert Trace.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_a_file_gives_the_same_trace_back(tmp_path: Path) -> None:
    before = trace()
    before.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace") == before
    assert Trace.load(str(tmp_path / "trace")) == before


def test_two_files_of_one_trace_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        trace().save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_trace_of_thousands_of_operations_stays_small(tmp_path: Path) -> None:
    traces.layers(2500).save(tmp_path / "trace")
    assert (tmp_path / "trace").stat().st_size < 400_000


def test_seconds_add_up_over_micro_batches() -> None:
    once = traces.layers(3, seconds=1.0)
    several = replace(once, choices=Choices(4))
    update = once.operations[-1].seconds
    assert once.pass_seconds == pytest.approx(sum(o.seconds for o in once.operations) - update)
    assert several.plain_step_seconds == pytest.approx(4 * once.pass_seconds + update)
    assert once.forward_operations == 6


def test_a_plan_that_drops_nothing_takes_what_the_engine_does_once_a_step_and_in_each_micro_batch() -> None:
    noted = replace(traces.layers(3, seconds=1.0), noted_seconds=0.5, counted_seconds=0.25)
    several = replace(noted, choices=Choices(4))
    assert noted.planned_step_seconds == noted.plain_step_seconds + 0.75
    assert several.planned_step_seconds == several.plain_step_seconds + 1.5


def test_a_step_without_passes_has_python_between_all_its_operations() -> None:
    """That of streamed layers: its events are those of all micro-batches."""
    trace = replace(traces.layers(3, seconds=1.0), python_seconds=1e-4, choices=Choices(4))
    streamed = replace(trace, pass_events=0, forward_events=0)
    passed = [o for o in trace.operations if o.phase is not Phase.OPTIMIZER]
    seconds = sum(o.seconds for o in trace.operations)
    assert streamed.plain_step_seconds == pytest.approx(seconds + 1e-4 * len(passed))


def test_what_lies_between_operations_is_there_in_each_micro_batch_and_longer_where_kernels_take_the_caches() -> None:
    nothing = replace(traces.layers(3, seconds=1.0), dispatch_seconds=0.0)
    warm = replace(nothing, python_seconds=1e-4)
    cold = replace(warm, dispatch_seconds=1e-3)
    passed = [o for o in cold.operations[: cold.pass_events] if o.phase is not Phase.OPTIMIZER]
    added = sum(o.host_factor - 1.0 for o in passed)
    assert added > 0
    assert warm.between_seconds == pytest.approx(1e-4 * len(passed))
    assert cold.between_seconds == pytest.approx(warm.between_seconds + BETWEEN * 1e-3 * added)
    assert cold.pass_seconds - nothing.pass_seconds == pytest.approx(cold.between_seconds)
    several = [replace(each, choices=Choices(4)).plain_step_seconds for each in (nothing, cold)]
    assert several[1] - several[0] == pytest.approx(4 * cold.between_seconds)


def test_another_format_is_refused_by_number() -> None:
    with pytest.raises(
        PlanFileError, match=f"this trace has format 99, this memfit reads {FORMAT_VERSION}: capture it again"
    ):
        Trace.from_json({**trace().to_json(), "format_version": 99})


def without(data: dict[str, Any], *path: str) -> dict[str, Any]:
    data = json.loads(json.dumps(data))
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return data


@pytest.mark.parametrize(
    "path",
    [
        ("names",),
        ("events",),
        ("operations",),
        ("operations", "reads"),
        ("storages", "birth"),
        ("saves", "unpacks"),
        ("signature",),
    ],
    ids=".".join,
)
def test_a_missing_part_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(PlanFileError, match="damaged"):
        Trace.from_json(without(trace().to_json(), *path))


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("operations", "name", [0]),
        ("operations", "phase", "x"),
        ("storages", "category", 10**6),
        ("storages", "bytes", None),
        ("saves", "unpacks", [[1]]),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(table: str, column: str, value: Any) -> None:
    data = json.loads(json.dumps(trace().to_json()))
    if isinstance(value, list) or value is None:
        data[table][column] = value
    else:
        data[table][column][0] = value
    with pytest.raises(PlanFileError, match="damaged"):
        Trace.from_json(data)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x1f\x8b", gzip.compress(b"{", mtime=0), gzip.compress(b"\xff\xfe", mtime=0)]
)
def test_what_is_no_trace_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(PlanFileError, match="is not a readable trace"):
        Trace.load(tmp_path / "trace")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="is not a readable trace"):
        Trace.load(tmp_path / "nothing")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    trace().save(tmp_path / "trace")
    content = (tmp_path / "trace").read_bytes()
    for length in range(0, len(content), 97):
        (tmp_path / "trace").write_bytes(content[:length])
        with pytest.raises(PlanFileError):
            Trace.load(tmp_path / "trace")


def test_a_flipped_bit_is_refused_or_means_nothing(tmp_path: Path) -> None:
    trace().save(tmp_path / "trace")
    content = (tmp_path / "trace").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chance.randrange(10, len(content))] ^= 1 << chance.randrange(8)  # behind gzip's header
        (tmp_path / "trace").write_bytes(damaged)
        try:
            found = Trace.load(tmp_path / "trace")
        except PlanFileError:
            refused += 1
        else:  # a few bits of a deflated file mean nothing, those that fill up its last byte for one
            assert found == trace()
    assert refused > 190


@pytest.mark.parametrize("data", [[], "x", 3, None])
def test_json_of_another_shape_is_refused(data: Any) -> None:
    with pytest.raises(PlanFileError):
        Trace.from_json(data)


def test_digests_tell_apart_and_stay() -> None:
    assert digest("a", [1, 2]) == digest("a", [1, 2])
    assert len({digest("a", "b"), digest("ab"), digest(["a", "b"]), digest("b", "a")}) == 4
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})


def test_categories_are_plain_words() -> None:
    assert str(Category.OPTIMIZER_STATE) == "optimizer_state"


def test_a_step_of_several_devices_is_the_same_value() -> None:
    once = trace()
    gather = replace(once.operations[0], collective=Collective("all_gather", 1 << 20, (0, 1)))
    several = replace(once, operations=(gather, *once.operations[1:]), in_flight=4)
    assert Trace.from_json(json.loads(json.dumps(several.to_json()))) == several
    assert all(operation.collective is None for operation in once.operations)
    assert once.in_flight == 1
