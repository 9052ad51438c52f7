"""A machine file says which devices there are and what joins them; what it gets wrong is told with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.errors import ConfigError, InputError
from memfit.hardware.machine import GIB, Machine, known_machine
from memfit.hardware.machine_file import named_devices, read_machine_file
from memfit.hardware.network import BETWEEN_LATENCY_SECONDS, SWITCH_LATENCY_SECONDS, collective_seconds, devices_of
from memfit.hardware.topology import Nodes, PeerLink, Topology, Wire
from memfit.values.stages import Line

HERE = Machine("here", "cpu", 8 * GIB, 1e11, 1e11, 1e10)

UNEQUAL = """\
devices:
  - {gpu: h100, number: 2}
  - {name: old, memory: 24GiB, speed: 0.5, number: 2}
inside: {bandwidth: 50GB, latency: 0.00001}
links:
  - {between: [old 0, old 1], bandwidth: 100GB/s}
"""
CLUSTER = """\
nodes:
  - number: 4
    devices: [{gpu: a100, number: 8}]
between: {bandwidth: 200GB}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "machines.yaml"
    path.write_text(text)
    return path


def test_unequal_devices_and_their_links_become_a_line_for_a_pipeline(tmp_path: Path) -> None:
    topology = named_devices(str(written(tmp_path, UNEQUAL)), HERE)
    assert [machine.name for machine in topology.devices] == ["h100", "h100", "here", "here"]
    assert topology.devices[2] == replace(
        HERE, memory_bytes=24 * GIB, fp32_flops=5e10, tensor_flops=5e10, bandwidth=5e9
    )
    assert topology.link_between(0, 3) == PeerLink(0, 3, 50e9, 1e-5)
    assert topology.link_between(3, 2) == PeerLink(2, 3, 100e9, 0.0)
    line = Line.of(topology)
    assert [device.bytes for device in line.devices] == [80 * GIB, 80 * GIB, 24 * GIB, 24 * GIB]
    assert line.devices[2].speed == pytest.approx(5e10 / known_machine("h100").fp32_flops)
    assert line.message_seconds(2, 3, 10**9) == pytest.approx(0.01)
    assert line.message_seconds(0, 2, 10**9) == pytest.approx(0.02 + 1e-5)
    assert Topology.from_json(topology.to_json()) == topology


def test_nodes_are_joined_by_what_each_sends_to_the_others(tmp_path: Path) -> None:
    topology = read_machine_file(written(tmp_path, CLUSTER), HERE)
    assert topology.nodes == Nodes((8,) * 4, Wire(240e9, SWITCH_LATENCY_SECONDS), Wire(200e9, BETWEEN_LATENCY_SECONDS))
    assert len(topology.devices) == 32
    assert topology.link_between(7, 8) == PeerLink(7, 8, 25e9, BETWEEN_LATENCY_SECONDS)
    assert topology.nodes.node_of(31) == 3
    with pytest.raises(IndexError):
        topology.nodes.node_of(32)
    assert topology == devices_of("4x8xa100@240GB/s,200GB/s", HERE)


def test_only_named_links_join_where_no_others_are_told(tmp_path: Path) -> None:
    text = "devices: [{name: a}, {name: b}, {name: c}]\nlinks:\n- {between: [a, b], bandwidth: 1GB}\n"
    line = Line.of(read_machine_file(written(tmp_path, text), HERE))
    assert line.message_seconds(0, 1, 10**9) == 1.0
    assert line.message_seconds(1, 2, 10**9) == float("inf")


def test_links_join_devices_without_a_name_by_their_number(tmp_path: Path) -> None:
    text = 'devices: [{memory: 1GiB, number: 2}]\nlinks:\n- {between: ["0", "1"], bandwidth: 1GB}\n'
    line = Line.of(read_machine_file(written(tmp_path, text), replace(HERE, name="")))
    assert line.message_seconds(0, 1, 10**9) == 1.0


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("devices:\n- {gpu: h1000}", 2, r"devices\[0\].gpu: no device called 'h1000' is known; did you mean"),
        (
            "devices:\n- gpu: h100\n  memory_bytes: 24GiB",
            3,
            r"devices\[0\].memory_bytes: no such key; did you mean devices\[0\].memory\?",
        ),
        ("devices:\n- {memory: 24 lots}", 2, r"devices\[0\].memory: '24 lots' has a unit memfit does not read"),
        ("devices:\n- {memory: 24}", 2, r"devices\[0\].memory: 24 without a unit counts bytes, .*, as in 24GiB$"),
        ("devices: [{}, {}]\ninside: {bandwidth: 50/s}", 2, r"inside.bandwidth: 50 without a unit .*, as in 50GB$"),
        ("devices:\n- {number: 0}", 2, r"devices\[0\].number: 0 is less than 1"),
        ("devices:\n- {speed: -1}", 2, r"devices\[0\].speed: -1.0 is not more than 0"),
        ("nodes:\n- number: 2", 2, r"nodes\[0\].devices is missing"),
        ("nodes:\n- devices: []", 2, r"nodes\[0\].devices: a node needs devices, and this one has none"),
        (
            "devices: [{}]\nbetween: {bandwidth: 1GB}",
            2,
            "between: this is the link between nodes, and there is one node",
        ),
        (
            "devices: [{name: a}]\nlinks:\n- {between: [a, b], bandwidth: 1GB}",
            3,
            r"links\[0\].between: no device is called 'b'",
        ),
        (
            "devices: [{name: a}]\nlinks:\n- {between: [a, a], bandwidth: 1GB}",
            3,
            r"links\[0\].between: 'a' is named twice",
        ),
        ("devices: [{name: a, number: 2}]\ninside: {latency: -1}", 2, r"inside.latency: -1.0 is less than 0"),
    ],
)
def test_what_is_wrong_is_told_with_line_and_key(tmp_path: Path, text: str, line: int, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"machines.yaml, line {line}: {told}"):
        read_machine_file(written(tmp_path, text), HERE)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="cannot read the machine file .*: No such file or directory: give the path of one"
    ):
        read_machine_file(tmp_path / "none.yaml", HERE)
    with pytest.raises(ConfigError, match="line 2: the key 'devices' is given twice"):
        read_machine_file(written(tmp_path, "devices: []\ndevices: []\n"), HERE)
    with pytest.raises(ConfigError, match="list the devices of one computer under devices"):
        read_machine_file(written(tmp_path, ""), HERE)


def test_collectives_across_nodes_take_the_slower_of_two_rates() -> None:
    cluster = devices_of("4x8xa100@240GB/s,200GB/s", HERE)
    everybody, node, pair = tuple(range(32)), tuple(range(8)), (0, 8)
    inside, between = SWITCH_LATENCY_SECONDS, BETWEEN_LATENCY_SECONDS
    size = 10**9
    assert collective_seconds(cluster, "all_gather", size, node) == pytest.approx(size / 240e9 + 7 * inside)
    assert collective_seconds(cluster, "all_gather", size, everybody) == pytest.approx(
        size / 200e9 + 28 * inside + 3 * between
    )
    # One of eight devices of each node takes part: an eighth of what the nodes have.
    assert collective_seconds(cluster, "reduce_scatter", size, pair) == pytest.approx(size / 25e9 + between)
    assert collective_seconds(cluster, "send", size, (0, 1)) == pytest.approx(size / 240e9 + inside)
    # An all-reduce among many nodes takes a logarithm of steps.
    many = devices_of("512x8xa100", HERE)
    tree = collective_seconds(many, "all_reduce", 0, tuple(range(4096)))
    assert tree == pytest.approx(2 * (7 * inside + 9 * between))
    assert collective_seconds(many, "all_gather", 0, tuple(range(4096))) == pytest.approx(3584 * inside + 511 * between)


def test_devices_in_nodes_are_written_in_a_few_words() -> None:
    cluster = devices_of("2x8xh100@360GB/s,400GB/s", HERE)
    assert cluster.devices == (known_machine("h100"),) * 16
    assert cluster.nodes == Nodes((8, 8), Wire(360e9, SWITCH_LATENCY_SECONDS), Wire(400e9, BETWEEN_LATENCY_SECONDS))
    assert devices_of("2x4x24GiB", HERE).devices[0].memory_bytes == 24 * GIB
    assert devices_of("8x4090", HERE).devices[0].name == "rtx4090"  # no number of bytes
    assert devices_of("8x25769803776", HERE).devices[0].memory_bytes == 24 * GIB
    for text, told in (
        ("4x24", "names devices of 24 bytes: write"),
        ("4x24GiB@50/s", "a link of 50 bytes a second: write"),
    ):
        with pytest.raises(InputError, match=told):
            devices_of(text, HERE)
    for text in ("8x8x8xh100", "8x8x", "8x24gigs"):
        with pytest.raises(InputError, match="write how many and what"):
            devices_of(text, HERE)
    assert (
        devices_of("8xa100-80", HERE).devices[0] == devices_of("8xA100 80GB", HERE).devices[0] == known_machine("a100")
    )
    assert devices_of("8xa100-40", HERE).devices[0] == known_machine("a100-40gb")
    assert devices_of("4xh100", HERE).peers[0].bandwidth == known_machine("h100").peer_bandwidth
    for wrong in ("2x0xh100", "8xh100@1GB/s,2GB/s", "machines.yml.txt"):
        with pytest.raises(InputError, match="write how many and what"):
            devices_of(wrong, HERE)
