"""Larger, better-fed operations reach more of a data sheet's rates, never more than all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.hardware.efficiency import FITTED, Kind, Work, arithmetic_rate, work_seconds
from memfit.hardware.machine import KNOWN, Machine, known_machine

A100 = known_machine("a100")
PRODUCT = Work(Kind.PRODUCT, 1e12, 1e6, half=True, depth=4096)


@pytest.mark.parametrize("machine", KNOWN, ids=lambda machine: machine.name)
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.TRAFFIC])
@pytest.mark.parametrize(("half", "tf32"), [(True, False), (False, True), (False, False)])
def test_no_operation_is_faster_than_the_data_sheet(machine: Machine, kind: Kind, half: bool, tf32: bool) -> None:  # noqa: FBT001 - a parameter
    work = Work(kind, 1e12, 1e9, half, tf32, depth=1 << 20, group_channels=1 << 20)
    rate = machine.tensor_flops if half else max(machine.fp32_flops, machine.tf32_flops * tf32)
    assert 0 < arithmetic_rate(work, machine) <= rate
    assert work_seconds(work, machine) > max(1e12 / rate, 1e9 / machine.bandwidth)


def test_a_deeper_product_reaches_more_of_the_rate() -> None:
    rates = [arithmetic_rate(replace(PRODUCT, depth=depth), A100) for depth in (64, 512, 4096)]
    assert rates == sorted(rates)
    assert rates[2] > 3 * rates[0]


def test_groups_of_few_channels_reach_least() -> None:
    work = Work(Kind.GROUPED, 1e12, 1e6)
    depthwise, wide = (arithmetic_rate(replace(work, group_channels=channels), A100) for channels in (1, 64))
    dense = arithmetic_rate(replace(work, kind=Kind.CONVOLUTION), A100)
    assert depthwise < wide / 5 < dense


def test_arithmetic_and_traffic_overlap_in_part() -> None:
    both = Work(Kind.PRODUCT, 1e12, 5e9, half=True, depth=4096)
    computing = work_seconds(replace(both, moved_bytes=0), A100)
    moving = work_seconds(Work(moved_bytes=5e9), A100)
    assert max(computing, moving) < work_seconds(both, A100) < computing + moving


def test_a_card_with_less_power_is_slower_in_tensor_cores_alone() -> None:
    weaker = replace(A100, watts=A100.watts / 2)
    assert arithmetic_rate(PRODUCT, weaker) < arithmetic_rate(PRODUCT, A100)
    single = replace(PRODUCT, half=False)
    assert arithmetic_rate(single, weaker) == arithmetic_rate(single, A100)
    assert work_seconds(Work(moved_bytes=1e9), weaker) == work_seconds(Work(moved_bytes=1e9), A100)
    unlimited = replace(A100, watts=10 * A100.watts)
    assert arithmetic_rate(PRODUCT, unlimited) == arithmetic_rate(PRODUCT, replace(A100, watts=0.0))


def test_tf32_is_taken_where_it_is_allowed_and_faster() -> None:
    plain, allowed = (replace(PRODUCT, half=False, tf32=tf32) for tf32 in (False, True))
    assert arithmetic_rate(allowed, A100) > 4 * arithmetic_rate(plain, A100)
    for name in ("v100", "rtx3090"):  # one has none, of the other it is as fast as fp32
        assert arithmetic_rate(allowed, known_machine(name)) == arithmetic_rate(plain, known_machine(name))


def test_a_changed_layout_is_paid_for_in_traffic() -> None:
    work = Work(Kind.CONVOLUTION, 1e12, 1e9, half=True)
    more = work_seconds(replace(work, converted_bytes=2e9), A100) - work_seconds(work, A100)
    assert more == pytest.approx(2e9 / (A100.bandwidth * FITTED.bandwidth))


def test_rates_that_were_measured_are_reached() -> None:
    here = replace(A100, measured=True)
    assert work_seconds(PRODUCT, here) == here.roofline_seconds(PRODUCT.flops, PRODUCT.moved_bytes, half=True)
