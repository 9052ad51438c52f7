"""How much of a data sheet's rates an operation reaches on a GPU, by its kind, its size and the card's power.

A roofline (Williams et al. 2009) with the rates that kernels reach, in place of the maker's:

* A product of matrices adds up `depth` terms for each element; beginning and end of that sum cost a tile as much as `Efficiencies.product_depth` terms more.
* Convolutions reach a constant part. cuDNN's 16-bit kernels want channels last: other layouts are converted before, and back after, which is memory traffic.
* Convolutions in groups fill the units by the channels of a group.
* Tensor cores at their nominal clock need more power than most cards may draw. Below that the clock falls, by a power of what is missing.
* Memory traffic and arithmetic overlap in part: the two times are joined by a p-norm, where a roofline takes their maximum.

The constants are fitted to published figures of 13 GPUs, timed in 2021 to 2024: `bench/published_seconds` has them, the fit, and its errors, also those of
a GPU that the fit has not seen. The efficiency of fused attention is not fitted, as no such step was among them: with it, an A100 reaches half of its rate and
an H100 a third, as published (50 to 73 %, and 35 %: abstracts of arXiv 2307.08691 and 2407.08608).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from memfit.hardware.machine import TERA, Machine


class Kind(Enum):
    """What decides how much of a device's rates an operation reaches."""

    TRAFFIC = "traffic"
    PRODUCT = "product"
    CONVOLUTION = "convolution"
    GROUPED = "grouped convolution"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Work:
    """What one operation does.

    Attributes:
        kind: of the operation.
        flops: floating-point operations; 0 for traffic.
        moved_bytes: read and written, each byte as often as the kernel does.
        half: its arithmetic is of 16 bits.
        tf32: TF32 may stand in for its fp32.
        depth: of a product, terms of the sum behind one element of the result.
        group_channels: of a grouped convolution, the lesser of a group's input and output channels.
        converted_bytes: read and written by kernels before and after it, which change a layout.
    """

    kind: Kind = Kind.TRAFFIC
    flops: float = 0.0
    moved_bytes: float = 0.0
    half: bool = False
    tf32: bool = False
    depth: int = 1
    group_channels: int = 1
    converted_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The constants of this model; rates are parts of the data sheet's.

    Attributes:
        bandwidth: of memory.
        product_depth: terms of a sum at which a product reaches half of its rate.
        convolution, convolution_tf32: of arithmetic, in fp32 or 16 bits, and in TF32.
        grouped, group_channels: of arithmetic in groups of many channels, and channels at which half of that is reached.
        attention: of arithmetic, in fused attention; not fitted.
        overlap: exponent of the norm: 1 for none, infinite for a roofline's.
        power: exponent of a tensor core's rate in watts, below what it needs.
        volta, data_center_ampere, ampere, ada, hopper: watts that a nominal TFLOP/s of 16-bit products needs, by how the chip is made (12, 7, 8, 5 and 4 nm).
    """

    bandwidth: float = 0.794
    product_depth: float = 348.0
    convolution: float = 0.838
    convolution_tf32: float = 0.374
    grouped: float = 0.272
    group_channels: float = 14.5
    attention: float = 0.65
    overlap: float = 1.558
    power: float = 0.515
    volta: float = 3.96
    data_center_ampere: float = 1.96
    ampere: float = 2.98
    ada: float = 2.72
    hopper: float = 2.21

    def needed_watts(self, machine: Machine) -> float:
        """Watts at which its tensor cores could keep their nominal rate. Turing is made as Volta is, Blackwell (GeForce) as Ada."""
        major, minor = machine.capability
        made = {7: self.volta, 8: self.ampere, 9: self.hopper}.get(major, self.ada)
        if major == 8 and minor in (0, 9):
            made = self.ada if minor else self.data_center_ampere
        return made * machine.tensor_flops / TERA


FITTED: Final = Efficiencies()


def arithmetic_rate(work: Work, machine: Machine, efficiencies: Efficiencies = FITTED) -> float:
    """FLOP/s that the operation's arithmetic reaches, memory aside. Where TF32 may be used the faster of it and fp32 is."""
    of = efficiencies
    single = 1.0
    if work.kind is Kind.PRODUCT:
        single = work.depth / (work.depth + of.product_depth)
    elif work.kind is Kind.CONVOLUTION:
        single = of.convolution
    elif work.kind is Kind.GROUPED:
        single = of.grouped * work.group_channels / (work.group_channels + of.group_channels)
    elif work.kind is Kind.ATTENTION:
        single = of.attention
    tf32 = of.convolution_tf32 if work.kind is Kind.CONVOLUTION else single
    powered = min(1.0, (machine.watts / of.needed_watts(machine)) ** of.power) if machine.watts else 1.0
    if work.half:
        return single * powered * machine.tensor_flops
    rates = [single * machine.fp32_flops]
    if work.tf32:
        rates.append(tf32 * powered * machine.tf32_flops)
    return max(rates)


def work_seconds(work: Work, machine: Machine, efficiencies: Efficiencies = FITTED) -> float:
    """Seconds of one operation; on a machine whose rates were measured, what its roofline says."""
    if machine.measured:
        return machine.roofline_seconds(work.flops, work.moved_bytes, half=work.half)
    bandwidth = machine.bandwidth * efficiencies.bandwidth
    moving = work.moved_bytes / bandwidth
    if work.flops:
        computing = work.flops / arithmetic_rate(work, machine, efficiencies)
        moving = (computing**efficiencies.overlap + moving**efficiencies.overlap) ** (1 / efficiencies.overlap)
    return moving + work.converted_bytes / bandwidth + machine.launch_seconds
