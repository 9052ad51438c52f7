"""Devices are found by the names people write; times follow the roofline."""

from __future__ import annotations

import pytest

from memfit.errors import InputError
from memfit.hardware.machine import KNOWN, known_machine


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA H100", "h100"),
        ("nvidia-a100-40gb", "a100-40gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),  # what torch.cuda.get_device_name says
        ("T4", "t4"),
        ("4090", "rtx4090"),
        ("RTX 4090 24GB", "rtx4090"),
        ("3090 Ti", "rtx3090ti"),
        ("a100-80", "a100"),
        ("A100 40 GB", "a100-40gb"),
        ("a100 40gb pcie", "a100-40gb-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),  # what torch.cuda.get_device_name says
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h200 141GB", "h200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("A6000", "rtx-a6000"),
        ("Quadro RTX 8000", "rtx8000"),
        ("Tesla T4", "t4"),
    ],
)
def test_names_are_read_as_people_write_them(written: str, name: str) -> None:
    assert known_machine(written).name == name


def test_every_entry_is_found_by_its_own_name_and_is_plausible() -> None:
    for machine in KNOWN:
        assert known_machine(machine.name) is machine
        assert 1 << 33 <= machine.memory_bytes <= 1 << 38
        assert machine.tensor_flops > machine.fp32_flops > 1e12
        assert machine.bandwidth > machine.link_bandwidth > 1e9
        assert (machine.tf32_flops > 0) == (machine.capability >= (8, 0)) == machine.bf16
        assert machine.tensor_flops > machine.tf32_flops
        assert 50 <= machine.watts <= 1000
        assert not machine.measured
    assert len({m.name for m in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize(("written", "near"), [("rtx4080", "rtx4090"), ("h10", "h100"), ("4080 16GB", "rtx4090")])
def test_an_unknown_name_is_told_near_ones(written: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"no device called '{written}' is known; did you mean .*{near}"):
        known_machine(written)


def test_a_memory_that_no_such_device_has_is_told_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no device called 'v100-16gb' is known; there is v100 with 32 GiB: name it"):
        known_machine("v100-16gb")


def test_a_name_near_nothing_is_told_all() -> None:
    with pytest.raises(InputError, match="no device called 'abacus' is known; known are rtx3060, rtx3090, ") as caught:
        known_machine("abacus")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "written", ["b200", "GB200", "MI300X", "M3 Max", "TPU v5e", "1g.10gb", "H100 MIG 1g.10gb", "a100 3g.40gb"]
)
def test_of_a_card_that_is_not_in_the_table_the_next_step_is_told(written: str) -> None:
    with pytest.raises(
        InputError, match="name the one most like it .* the memory that there is as the budget"
    ) as caught:
        known_machine(written)
    if "g." in written:
        assert "did you mean" not in str(caught.value)


def test_the_slower_of_computing_and_moving_counts() -> None:
    machine = known_machine("a100")
    compute = 1e12 / machine.fp32_flops
    half = 1e12 / machine.tensor_flops
    move = 1e12 / machine.bandwidth
    launch = machine.launch_seconds
    assert machine.roofline_seconds(1e12, 0, half=False) == pytest.approx(compute + launch)
    assert machine.roofline_seconds(1e12, 0, half=True) == pytest.approx(half + launch)
    assert machine.roofline_seconds(1e12, 1e12, half=True) == pytest.approx(move + launch)
    assert machine.roofline_seconds(0, 0, half=False) == launch
