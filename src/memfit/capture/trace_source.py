"""A model, a batch and choices -> the Trace of that step, with seconds: captured when asked for, and no more than once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.calls import ResultLayouts
from memfit.capture.captured import Captured
from memfit.capture.confirmation import trustworthy, without_forced_gradients
from memfit.capture.cost_table import CostTable
from memfit.capture.costs import other_bytes, with_costs
from memfit.capture.cuda.workspaces import has_products, library_bytes, take_workspaces
from memfit.capture.filling import filled, filled_rows
from memfit.capture.gloo_time import agreeing_seconds, core_sharing
from memfit.capture.host_time import ELSEWHERE, HostTime, has_kernel
from memfit.capture.layouts import wrong_layouts
from memfit.capture.noting_time import noting_seconds
from memfit.capture.present_machine import present_machine
from memfit.capture.roofline import estimated_costs
from memfit.capture.samples import rows_of
from memfit.capture.source import StepSource, made_by_its_first_forward, model_digest
from memfit.capture.splitting import SAMPLES as COMPARED_SAMPLES
from memfit.capture.splitting import Splitting, find_splitting
from memfit.capture.timing import processor_clock
from memfit.hardware.machine import Capability, Machine, known_machine
from memfit.hardware.topology import Topology
from memfit.progress import Progress, tell
from memfit.sharding.agreement import IN_A_STEP, OF_SHARDS
from memfit.step.device import device_of
from memfit.step.given import check_sample, loss_function, optimizer_factory
from memfit.step.held_tensors import loss_tensors, model_tensors
from memfit.step.process_generators import outside_torch_kept
from memfit.step.program import OptimizerFactory
from memfit.techniques.choices import Choices, named, sizing_state
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.layer_streaming.blocks import blocks_at, own_parameters
from memfit.techniques.sharding import way_of
from memfit.units import format_bytes
from memfit.values.bundle import StreamedLayer, Weighting
from memfit.values.trace import Category, Phase, Trace

LARGEST_FILLED_BYTES: Final = 1 << 30  # of a model on the meta device that gets values for a look at them
LAYOUT_ROUNDS: Final = 4  # captures until fake kernels lay out what they return as the real ones do
# What the engine takes, in multiples of what a dispatch mode that does nothing adds to an operation (`bench/overhead`): for each operation of forward that it
# follows, and for each time that it runs an operation again.
FOLLOWED: Final = 1.8
RECOMPUTED: Final = 1.75
# Likewise, what Python and autograd take between an operation of a step and the next, on a CPU. Found as `BETWEEN` of the trace was.
PYTHON: Final = 0.36
# Likewise, what counting one call of a module takes (by hand on three models, 0.3 to 0.9: log of 2026-11-26).
COUNTED: Final = 0.55
# Likewise, what the host takes to launch a kernel of a step on a GPU, with the Python of its modules or autograd's bookkeeping: the median of eleven models,
# from 2.6 to 4.3 (`bench/gpu`). To time the launch of each operation alone says no more of a step (docs/design/log.md).
LAUNCHED: Final = 3.2
RNG_STATE_BYTES: Final = {"cpu": 5056, "cuda": 16}


@dataclass(eq=False)
class TraceSource:
    """One model and batch, and every trace made of them.

    Args:
        model: any module, whatever it freezes by itself; its own object, which is left as it is.
        sample: the whole batch of a step, or one of its batches.
        loss_fn, optimizer, clip_norm: as for `memfit.plan`.
        device: name of a device that this computer does not have; None for the model's.
        progress: called with what is being done.
        loader_batches: batches like the sample that a step takes one after the other; one is on the device at a time.
        trained_elsewhere: names of parameters that have optimizer state by now, from whichever path.
        forwards_before: as in `StepSource`; 0 to capture the very next forward.
        draws: as in `StepSource`.
        network: the devices of a sharded step and their links; None for one device, or assumed links.
        other_samples: as in `StepSource`.

    Attributes:
        here: the device that the model is on.
        machine: the device that seconds are predicted for.
    """

    model: nn.Module
    sample: Batch
    loss_fn: LossFunction | None
    optimizer: OptimizerFactory | None
    clip_norm: float | None = None
    device: str | None = None
    progress: Progress | None = None
    loader_batches: int = 1
    trained_elsewhere: frozenset[str] = frozenset()
    forwards_before: int = 1
    draws: bool = True
    network: Topology | None = None
    other_samples: Callable[[int], Sequence[Batch]] | None = None

    def __post_init__(self) -> None:
        check_sample(self.sample)
        self.loss_fn = loss_function(self.loss_fn)
        self.optimizer = optimizer_factory(self.optimizer, self.model)
        made_by_its_first_forward(self.model)
        self.here = device_of(self.model)
        self.machine = machine_of(self.model, self.device)
        if self.network is not None and self.device is not None:
            self.machine = self.network.devices[0]  # as a machine file has it
        absent = self.device is not None and self.machine.kind == "cuda" and self.here.type == "cpu"
        self._cuda = self.machine.capability if absent else None
        self._table = None if self.device is not None else CostTable(self.here)
        self._traces: dict[Choices, Trace] = {}
        self._believed: dict[Choices, Captured] = {}  # by the way the step is run
        self._unforced: dict[Choices, tuple[str, ...]] = {}
        self._layouts: dict[str, ResultLayouts] = {}
        self._noting: float | None = None
        self._splitting: dict[tuple[str, ...], Splitting] = {}

    @property
    def samples(self) -> int:
        """In the batch of a step."""
        return batches.size(self.sample) * self.loader_batches

    def trace_of(self, choices: Choices, ahead: str = "", *, stands_for: Choices | None = None) -> Trace:
        """The step with these choices, nothing dropped; transfers of offloaded state and streamed layers are not included.

        Args:
            choices: of the step.
            ahead: told after what is being captured: how much is left to do.
            stands_for: others, which are told in place of these.

        Raises:
            CaptureError, InputError, EngineError: it cannot be run so, or not be predicted.
        """
        if choices not in self._traces:
            run = self._runnable_here(choices)
            if run != choices:
                self._traces[choices] = _told_as(self.trace_of(run, ahead, stands_for=choices), choices)
            else:
                told = stands_for or choices
                tell(self.progress, f"capturing a step ({named(told, told.micro_batches)}){ahead}", 0.1)
                with outside_torch_kept():
                    self._traces[choices] = self.captured(choices)
        return self._traces[choices]

    def _runnable_here(self, choices: Choices) -> Choices:
        """These choices as they can run on this computer.

        Beside a GPU that is not here, host memory is another tier; beside the CPU that the model is on it is the device's own. State on the disk goes through
        the same buffers of the device, so it stands in for state in host memory.
        """
        elsewhere = self.machine.kind != "cpu" and self.here.type == "cpu"
        return choices.but(state_place="disk") if elsewhere and choices.state_place == "host" else choices

    def captured(self, choices: Choices) -> Trace:
        """The step, captured with these choices as they run here."""
        way = replace(choices, micro_batches=1)
        for _ in range(LAYOUT_ROUNDS):
            with frozen(self.model, choices.frozen):
                captured = self._captured_as(choices, self._believed.get(way))
            self._believed.setdefault(way, captured)
            if self._table is None:
                costs, are = (
                    estimated_costs(captured.calls, self.machine, workspaces=self._cuda is not None),
                    "estimated",
                )
                break
            costs, are = self._table.measure(captured.calls, self.progress), "measured"
            known = len(self._layouts)
            self._layouts.update(wrong_layouts(captured, costs))
            if len(self._layouts) == known:
                break
        speed = 1.0 if self.network is None else self.network.devices[0].fp32_flops / self.machine.fp32_flops
        if speed != 1.0:  # a machine file's
            costs = {key: replace(cost, seconds=cost.seconds / speed) for key, cost in costs.items()}
        if not self.model.training and any(_has_two_modes(module) for module in self.model.modules()):
            captured = captured.noting(
                "the model is in eval mode, as from_pretrained returns it: nothing is dropped out, and batch norm updates no statistics; where that is not "
                "meant, call model.train() and plan again"
            )
        # Measured after the operations have run once: by then the libraries have taken what they keep.
        return self._with_seconds(captured, costs, are)

    def priced(self, captured: Captured) -> Trace:
        """What was captured of this step elsewhere (one of its stages), with seconds and workspaces as in all traces of this source."""
        if self._table is None:
            costs = estimated_costs(captured.calls, self.machine, workspaces=self._cuda is not None)
            return self._with_seconds(captured, costs, "estimated")
        return self._with_seconds(captured, self._table.measure(captured.calls, None), "measured")

    @property
    def slowdown(self) -> float:
        """As for `CostTable`; 1 of a computer that is not here."""
        return 1.0 if self._table is None else self._table.slowdown

    @property
    def cuda(self) -> Capability | None:
        """Compute capability of the absent GPU whose kernels are captured; None for the device's own."""
        return self._cuda

    def _with_seconds(self, captured: Captured, costs: Any, are: str) -> Trace:
        model = self.model
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        present = [*model.parameters(), *model.buffers(), *batches.leaves(self.sample), *gradients]
        present += [*model_tensors(model), *loss_tensors(self.loss_fn)]
        network = self.network
        if network is None and self._table is not None and self.here.type == "cpu":
            network = Topology((self.machine,), processes=True)
        if network is not None:
            network = replace(network, slowdown=self.slowdown)
        trace = with_costs(
            captured,
            costs,
            seconds_are=are,
            device=self.machine.name,
            allocation_bytes=self.machine.allocation_bytes,
            other_bytes=self._other_bytes(captured, present),
            network=network,
            host=host_time_of(self._table),
        )

        if libraries := self._cuda is not None and self._other_bytes(captured, present):
            workspaces = f"{format_bytes(libraries)} of cuBLAS's workspaces are counted, as other bytes: PyTorch holds them from the first product on"
            trace = replace(trace, notes=(*trace.notes, workspaces))
        between, followed, recomputed = self._host_seconds(trace)
        noted = counting = 0.0
        if self.machine.kind == "cpu" and self._table is not None:  # a GPU is busy meanwhile
            noted, counting = self._noted_seconds(trace), COUNTED * host_time_of(self._table).mode
            sharing = core_sharing(network)
            between, followed, recomputed, noted, counting = (
                sharing * each for each in (between, followed, recomputed, noted, counting)
            )
            if trace.choices.sharding:
                way, ranks, _ = way_of(trace.choices.sharding)
                messages = IN_A_STEP + (OF_SHARDS if way in {"zero2", "zero3"} else 0)
                noted += agreeing_seconds(network, tuple(range(ranks)), messages)

        def completed(path: Trace) -> Trace:
            return replace(
                path,
                rng_state_bytes=RNG_STATE_BYTES.get(self.machine.kind if self._cuda else self.here.type, 0),
                dispatch_seconds=followed,
                recomputed_seconds=recomputed,
                python_seconds=between,
                noted_seconds=noted,
                counted_seconds=counting * sum(_factors_of_calls(path)),
                clip_norm=self.clip_norm,
                torch_version=torch.__version__,
                paths=tuple(map(completed, path.paths)),
                first=None if path.first is None else completed(path.first),
            )

        return completed(trace)

    def _host_seconds(self, trace: Trace) -> tuple[float, float, float]:
        """Of the host between two operations, and of the engine for one that it follows or runs again."""
        followed, recomputed = engine_seconds(self._table)
        mode = host_time_of(self._table).mode
        if self.machine.kind == "cuda":
            return _beside_a_gpu(trace, mode, followed, recomputed)
        return PYTHON * mode, followed, recomputed

    def of_whole_model(self, trace: Trace, choices: Choices) -> Trace:
        """A trace made of those of a part of this model, with what is of the whole: its identity, and the host's seconds beside kernels."""
        between, followed, recomputed = self._host_seconds(trace)
        with frozen(self.model, choices.frozen):
            identity = model_digest(self.model)
        return replace(
            trace, model=identity, dispatch_seconds=followed, recomputed_seconds=recomputed, python_seconds=between
        )

    def _noted_seconds(self, trace: Trace) -> float:
        """Measured once, as all candidates are compared by it."""
        if self._noting is None:
            self._noting = noting_seconds(self.model, self.loss_fn, trace.changed_buffers, processor_clock())
        return self._noting

    def _other_bytes(self, captured: Captured, present: Sequence[torch.Tensor]) -> int:
        """Bytes of libraries, and of the user's other tensors where the device is here."""
        names = [operation.name for operation in captured.trace.operations]
        if self.device is None:
            if self.here.type == "cuda":
                gc.collect()  # what looks at the model have left behind in cycles is held by nobody when it trains
                if has_products(names):
                    take_workspaces(self.here)
            return other_bytes(self.here, present, captured.met_bytes)
        if self._cuda is None:
            return 0
        return library_bytes(names, self._cuda)

    def _captured_as(self, choices: Choices, known: Captured | None) -> Captured:
        source = StepSource(
            self.model,
            self.sample,
            self.loss_fn,
            self.optimizer,
            self.clip_norm,
            self.loader_batches,
            forwards_before=self.forwards_before,
            trained_elsewhere=self.trained_elsewhere,
            cuda=self._cuda,
            draws=self.draws,
            other_samples=self.other_samples,
        )

        def run(way: Choices) -> Captured:
            others = self._believed.values()
            return trustworthy(source, way, believed=known, layouts=self._layouts, others=others)

        way = replace(choices, micro_batches=1)
        if way in self._unforced:
            return run(replace(choices, unforced=self._unforced[way]))
        captured, self._unforced[way] = without_forced_gradients(run, choices)
        return captured

    def state_bytes(self, choices: Choices) -> int:
        """Bytes of the whole optimizer state. The batch does not change them, so any known trace will do.

        Args:
            choices: of which those matter that change the size of the state (`sizing_state`).
        """
        way = sizing_state(choices)
        known = (t for c, t in self._traces.items() if replace(way, micro_batches=c.micro_batches) == c)
        return (next(known, None) or self.trace_of(way)).bytes_of(Category.OPTIMIZER_STATE)

    def layers(self, choices: Choices) -> tuple[StreamedLayer, ...]:
        """What these choices stream, and last what is not in the blocks, of which the state alone moves."""
        state = self.state_bytes(Choices(frozen=choices.frozen))
        model = self.model
        blocks = own_parameters(model, blocks_at(model, choices.streamed).paths)
        moved = {id(p) for own in blocks.values() for p in own}
        with frozen(model, choices.frozen):
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

            def layer_of(path: str, own: Sequence[nn.Parameter]) -> StreamedLayer:
                mine = [p for p in own if p.requires_grad]
                share = sum(p.numel() for p in mine) / trained if trained else 0.0
                return StreamedLayer(
                    path, sum(p.nbytes for p in own), sum(p.nbytes for p in mine), round(share * state)
                )

            rest = layer_of("", [p for p in model.parameters() if id(p) not in moved])
            return (
                *(layer_of(path, own) for path, own in blocks.items()),
                replace(rest, weight_bytes=0, gradient_bytes=0),
            )

    def compared(self) -> Batch:
        """Samples whose losses show how those of micro-batches add up."""
        return self.sample

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        """How the losses of micro-batches add up to the batch's, with these patterns frozen."""
        patterns = tuple(freeze)
        if patterns not in self._splitting:
            model = self.model
            if any(p.device.type == "meta" for p in model.parameters()):
                if sum(p.nbytes for p in model.parameters()) > LARGEST_FILLED_BYTES:
                    return Weighting(
                        None,
                        "the model is on the meta device and too large to be filled with random values, so it cannot be checked whether its batch splits: "
                        "plan for a sample of one micro-batch, or with a model that has weights",
                    )
                model = filled(model)
            compared = self.compared()
            if any(t.device.type == "meta" for t in batches.leaves(compared)):
                few = rows_of(compared, COMPARED_SAMPLES)
                compared = filled_rows(few, device_of(model))
            tell(self.progress, "checking whether the batch splits", 0.5)
            with outside_torch_kept(), frozen(model, patterns):
                self._splitting[patterns] = find_splitting(model, compared, self.loss_fn)
        found = self._splitting[patterns]
        return Weighting(found.weights, found.reason)


def host_time_of(table: CostTable | None) -> HostTime:
    """What the computer takes beside the kernels.

    Args:
        table: of costs on this computer; None for one that is not here.
    """
    if table is None:
        return ELSEWHERE
    host = table.host_time()
    return host if table.device.type == "cpu" else HostTime.same_after_all(host.mode)


def engine_seconds(table: CostTable | None) -> tuple[float, float]:
    """What the engine takes for each operation of forward that it follows, and for each that it runs again, with warm caches."""
    mode_seconds = host_time_of(table).mode
    return FOLLOWED * mode_seconds, RECOMPUTED * mode_seconds


def _factors_of_calls(trace: Trace) -> Iterator[float]:
    """Of each call of a module, how many times longer than with warm caches Python takes when it begins."""
    operations = [operation for operation in trace.operations if operation.phase is Phase.FORWARD]
    for call in trace.calls:
        first = call.operations[0]
        yield operations[first].host_factor if first < len(operations) else 1.0


def _beside_a_gpu(trace: Trace, mode_seconds: float, followed: float, recomputed: float) -> tuple[float, float, float]:
    """Between two operations, and of the engine for one that it follows or runs again, what adds to a step on a GPU.

    The host launches kernels ahead of the GPU, so what it takes is hidden where the GPU takes longer; where the GPU waits for the host, the host's time is the
    step's.

    Args:
        trace: with the seconds of its kernels.
        mode_seconds: that a dispatch mode which does nothing adds to an operation.
        followed, recomputed: of the engine on the host.
    """
    of_a_pass = [o for o in trace.operations if o.phase is not Phase.OPTIMIZER]
    if not of_a_pass:
        return 0.0, 0.0, 0.0
    device = sum(o.seconds for o in of_a_pass)
    host = LAUNCHED * mode_seconds * sum(o.times for o in of_a_pass if has_kernel(o))
    forward = sum(o.phase is Phase.FORWARD for o in of_a_pass)
    late = host + followed * forward - device  # of a step under the engine
    if late <= 0:
        return 0.0, 0.0, 0.0
    return max(0.0, host - device) / len(of_a_pass), min(followed, late / max(1, forward)), recomputed


def _told_as(trace: Trace, choices: Choices) -> Trace:
    """A trace with its state in another place."""
    return replace(
        trace,
        choices=trace.choices.but(state_place=choices.state_place),
        paths=tuple(_told_as(path, choices) for path in trace.paths),
    )


def machine_of(model: nn.Module, device: str | None) -> Machine:
    """The device of this name, or the one that the model is on."""
    return known_machine(device) if device is not None else present_machine(device_of(model))


def _has_two_modes(module: nn.Module) -> bool:
    """Whether a module of torch's computes something else in training than in evaluation."""
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return drops or isinstance(module, nn.modules.batchnorm._BatchNorm)
