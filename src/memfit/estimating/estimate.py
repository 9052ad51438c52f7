"""One step of a named model on a GPU that need not be here: does it fit, how large a batch and how long a sample would, what it takes of host and disk."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from memfit.batches import Batch
from memfit.errors import BatchError, CaptureError, InfeasibleError, InputError
from memfit.estimating.few_blocks import FewBlocksSource
from memfit.estimating.long_forward import check_operations
from memfit.estimating.methods import METHODS, Method, least_bytes, method_of
from memfit.estimating.models import Named, of_text
from memfit.hardware.machine import Machine, known_machine
from memfit.hardware.topology import Topology
from memfit.largest import BytesBySize, Largest, between, of_the_same_operations, search_largest
from memfit.lower_tiers import requested
from memfit.planner.head import head_of
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.progress import Progress, tell
from memfit.step.program import default_optimizer
from memfit.techniques.choices import Choices
from memfit.units import format_bytes
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan
from memfit.values.request import Request
from memfit.values.trace import Category, Trace

SHARE: Final = "90%"  # of a GPU's memory: the rest is for the CUDA context and what its allocator cannot use
MOST_SAMPLES: Final = 4096
CHUNKS: Final = 8
# The loss head is run in chunks where what is as large as the logits would take this part of the budget: in fp32 the logits, their softmax and its gradient.
WORTH_CHUNKS: Final = 0.05
OF_LOGITS: Final = 12
EVERY_POSITIONS: Final = 32  # lengths are told apart no finer


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer.

    Attributes:
        title: of the model.
        parameters, trained: numbers of weights, and of those that are trained.
        method: how it is trained.
        machine: the GPU.
        budget_bytes: what a step may take.
        batch, length: of a step; length 0 where samples are as long as they are.
        plan: of the step; None where it does not fit.
        minimum_bytes: of the smallest plan of the step; the plan's peak where it fits.
        largest_batch: at this length; None where it was not looked for.
        largest_length: at this batch; None where it was not looked for.
        weights_bytes: in host memory while they are read, before they are on the GPU.
        disk_bytes: of the weights' files, or what they will be.
        snapshot_bytes: of what is trained, with the optimizer's state.
        lines: Python that trains so.
        notes: what the reader should know.
    """

    title: str
    parameters: int
    trained: int
    method: Method
    machine: Machine
    budget_bytes: int
    batch: int
    length: int
    plan: Plan | None
    minimum_bytes: int
    largest_batch: Largest | None
    largest_length: Largest | None
    weights_bytes: int
    disk_bytes: int
    snapshot_bytes: int
    lines: str
    notes: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Host memory: for the weights while they are read, or for what a plan keeps there."""
        below = sum(use.all_bytes for use in self.plan.prediction.tiers if use.tier == "host") if self.plan else 0
        return max(self.weights_bytes, below)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        figures = self.plan.prediction if self.plan is not None else None
        return {
            "fits": self.plan is not None,
            "model": self.title,
            "parameters": self.parameters,
            "trained": self.trained,
            "method": self.method.name,
            "gpu": self.machine.name,
            "budget_bytes": self.budget_bytes,
            "batch": self.batch,
            "length": self.length or None,
            "peak_bytes": figures.peak_bytes if figures else None,
            "minimum_bytes": self.minimum_bytes,
            "step_seconds": figures.step_seconds if figures else None,
            "seconds_are": figures.seconds_are if figures else None,
            "techniques": dict(self.plan.choices.used) if self.plan else {},
            "largest_batch": self.largest_batch.size if self.largest_batch else None,
            "largest_length": self.largest_length.size if self.largest_length else None,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "snapshot_bytes": self.snapshot_bytes,
            "python": self.lines,
            "notes": list(self.notes),
        }


def gpu_of(name: str) -> Machine:
    """The GPU of this name; "cuda" is the one that is here.

    Raises:
        InputError: no such GPU is known, or none is here.
    """
    if name.partition(":")[0] != "cuda":
        return known_machine(name)
    if not torch.cuda.is_available():
        raise InputError(
            '--gpu cuda: torch sees no GPU here; name one, such as --gpu 4090 ("memfit estimate --help" lists them)'
        )
    index = torch.device(name)
    found = known_machine(torch.cuda.get_device_name(index))
    return replace(found, memory_bytes=torch.cuda.get_device_properties(index).total_memory)


def estimate(
    named: Named,
    machine: Machine,
    *,
    method: str | None = None,
    batch: int = 1,
    length: int = 1024,
    budget: str | int = SHARE,
    longest: bool = False,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate training of a model on one GPU.

    Args:
        named: the model.
        machine: the GPU; it need not be here.
        method: "full", "lora" or "qlora"; None for the first of them whose weights, gradients and optimizer state fit.
        batch, length: of a step.
        budget: bytes that a step may take, or a share of the GPU's memory.
        longest: look for the longest samples, too, which takes a capture for each length that is tried.
        progress: told what is being done.

    Raises:
        InputError, CaptureError: the step cannot be made or captured.
    """
    check_size(named, batch, length)
    tell(progress, "building the model without its weights", 0.0)
    chosen, bare = _chosen(named, machine, method, budget)
    least_of_all = least_bytes(bare, chosen)
    weights_bytes = sum(p.nbytes for p in bare.parameters())
    parameters = sum(p.numel() for p in bare.parameters())
    chosen, model = chosen.on(bare)
    step = _Step(named, model, chosen, machine, budget, progress)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    check_operations(named, model, batch, length, least_of_all, step.budget_bytes)
    with named.captured():
        planning = step.at(batch, length)
    tell(progress, "planning", 0.4)
    in_16_bits = chosen.in_16_bits(model)
    notes = [*named.notes, *(() if in_16_bits is None else (in_16_bits,))]
    plan: Plan | None = None
    try:
        plan = planning.plan(savings=False)
    except InfeasibleError as error:
        least = error.minimum_bytes or planning.smallest()[0]
    if plan is not None:
        least = plan.prediction.peak_bytes
        notes += [note for note in plan.notes if "allocator takes" in note]
    largest = step.largest_batch(planning, batch, length)
    at_length = step.largest_length(batch, length) if named.has_length and longest else None
    trace = next(iter(planning.bundle.traces.values()))
    state = trace.bytes_of(Category.OPTIMIZER_STATE)
    own = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if weights_bytes > step.budget_bytes and plan is not None:
        notes.append(
            f"the weights take {format_bytes(weights_bytes)} before they are packed, more than the GPU has to spare: these lines cannot read them onto it"
        )
    if weights_bytes > (here := physical_bytes()):
        notes.append(
            f"this computer has {format_bytes(here)} of memory, less than the {format_bytes(weights_bytes)} of weights that are read into it: "
            "train on one that has more"
        )
    tell(progress, "estimated", 1.0)
    return Estimate(
        named.title, parameters, trained, chosen, machine, step.budget_bytes, batch, length if named.has_length else 0, plan, least, largest, at_length,
        weights_bytes, named.disk_bytes or parameters * 2, own + state,
        _lines(named, chosen, plan, step.settings, batch, length, step.budget_bytes), tuple(notes),
    )  # fmt: skip


def check_size(named: Named, batch: int, length: int) -> None:
    """Check that a step can have so many samples of so many tokens.

    Raises:
        InputError: it cannot.
    """
    for name, value in (("--batch", batch), ("--length", length)):
        if value < 1:
            raise InputError(f"{name} {value}: a whole number of at least 1 is needed")
    if named.has_length and named.longest is not None and length > named.longest:
        raise InputError(
            f"--length {length}: this model has positions for {named.longest} tokens (max_position_embeddings)"
        )


def physical_bytes() -> int:
    """The memory of this computer."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _chosen(named: Named, machine: Machine, method: str | None, budget: str | int) -> tuple[Method, nn.Module]:
    """The method, and the model with its weights in the type that it wants."""
    names = METHODS if method is None else (method,)
    request = requested(nn.Linear(1, 1), budget=budget, device=machine.name)
    assert request.budget is not None
    for name in names:
        way = method_of(name, bf16=machine.bf16)
        model = named.built(way.dtype)
        if name == names[-1] or least_bytes(model, way) < request.budget.bytes:
            return way, model
    raise AssertionError("the last one is taken whatever it needs")


@dataclass(slots=True)
class _Step:
    """One model and method, at any size of batch.

    Attributes:
        settings: of techniques; the loss head in chunks is among them where it was found to help.
        alike: a few of the model's blocks tell of all of them, as far as is known.
    """

    named: Named
    model: nn.Module
    method: Method
    machine: Machine
    budget: str | int
    progress: Progress | None
    settings: dict[str, Any] | None = None
    alike: bool = True

    @property
    def budget_bytes(self) -> int:
        """What a step may take."""
        request = self._request()
        assert request.budget is not None
        return request.budget.bytes

    def _request(self) -> Request:
        return requested(
            self.model,
            budget=self.budget,
            host_budget=0,
            device=self.machine.name,
            allow=self.method.allow,
            fixed={"micro_batches": 1, **(self.settings if self.settings is not None else self.method.settings)},
        )

    def at(self, batch: int, length: int) -> Planning:
        """The step of this size, captured."""
        sample = self.named.sample(batch, length)
        source = FewBlocksSource(
            self.model, sample, self.named.loss_fn, default_optimizer, None, self.machine.name, self.progress
        )
        source.alike = self.alike
        if self.settings is None:
            self.settings = dict(self.method.settings)
            config = of_text(getattr(self.model, "config", None))
            words = getattr(config, "vocab_size", 0)
            # In 4 bits the head is another operation, which is not divided; a tied one stays as it is.
            packed = "frozen_weights" in self.settings and not getattr(config, "tie_word_embeddings", False)
            if (
                not packed
                and batch * length * words * OF_LOGITS > WORTH_CHUNKS * self.budget_bytes
                and batch * length >= 64 * CHUNKS
            ):
                found = self._in_chunks(source, sample)
                if found is not None:
                    return found
        return self._planning(source, Choices(**self.settings))

    def _in_chunks(self, source: FewBlocksSource, sample: Batch) -> Planning | None:
        """With the loss head in chunks; None where it cannot be divided, or is divided already."""
        assert self.settings is not None
        choices = Choices(**self.settings, loss_chunks=CHUNKS)
        rows = sample["labels"].numel() if isinstance(sample, dict) and "labels" in sample else 0
        try:
            found = head_of(Timeline(source.trace_of(choices)))
        except (CaptureError, InputError, RuntimeError):
            return None
        if found is None or found.rows * CHUNKS > rows + CHUNKS:
            return None
        self.settings["loss_chunks"] = CHUNKS
        return self._planning(source, choices)

    def _planning(self, source: FewBlocksSource, choices: Choices) -> Planning:
        trace = source.trace_of(choices)
        self.alike = source.alike
        bundle = TraceBundle(
            self._request(),
            Topology.single(source.machine),
            source.samples,
            (replace(choices, micro_batches=1),),
            state_bytes=trace.bytes_of(Category.OPTIMIZER_STATE),
            traces={choices: trace},
        )
        return Planning(bundle, source)

    def largest_batch(self, planning: Planning, batch: int, length: int) -> Largest:
        """The most samples of this length that fit: two captures, and what lies on the line through them.

        A single sample often runs other operations (where there is one of everything nothing is copied), and so does a batch whose loss head is divided where
        that of the one asked for is not: no line leads from one to the other, and a third is captured.
        """
        first = next(iter(planning.bundle.traces.values()))
        there = sum(s.bytes for s in first.storages if s.birth < 0 and s.category != Category.BATCH)
        least = planning.smallest()[0]
        room, each = self.budget_bytes - there, max(1, (least - there) / batch)
        guess = min(MOST_SAMPLES, max(1, int(room / each)))
        second = guess if guess != batch else batch + 1
        step = self if second < batch else replace(self, settings=None)
        bundle = step.at(second, length).bundle
        choices = next(iter(bundle.traces))

        def captured(size: int) -> Trace:
            return next(iter(step.at(size, length).bundle.traces.values()))

        traces = {batch: first, second: bundle.traces[choices]}
        if not of_the_same_operations(*traces.values()):
            above = max(traces) + 1
            traces[above] = captured(above)
        ends = sorted(traces)[-2:]

        alike = of_the_same_operations(*(traces[end] for end in ends))
        lines = BytesBySize([Timeline(traces[end]) for end in ends], ends) if alike else None
        reached = [second]  # nothing better is known

        def needed(size: int) -> int:
            tell(self.progress, f"a batch of {size}", 0.7)
            if size == batch:
                return least
            trace = traces.get(size)
            if trace is None and size > 1 and alike:
                trace = between(traces[ends[0]], traces[ends[1]], ends, size)
            planning = Planning(replace(bundle, samples=size, traces={choices: trace or captured(size)}))
            bytes_needed, found = planning.smallest()
            if lines is not None and size > 1:
                solution = found.solution
                room = self.budget_bytes - (bytes_needed - solution.peak)
                reached.append(max(*reached[1:], 0, lines.largest(solution.recomputations, room, MOST_SAMPLES)))
            return bytes_needed

        return search_largest(needed, self.budget_bytes, batch, MOST_SAMPLES, likely=lambda: reached[-1])

    def largest_length(self, batch: int, length: int) -> Largest | None:
        """The most tokens that fit in each of so many samples."""
        most = self.named.longest or 1 << 17
        try:
            return search_largest(
                lambda size: self.at(batch, size).smallest()[0], self.budget_bytes, length, most, every=EVERY_POSITIONS
            )
        except (CaptureError, BatchError):
            return None


def _lines(
    named: Named,
    method: Method,
    plan: Plan | None,
    settings: dict[str, Any] | None,
    batch: int,
    length: int,
    budget_bytes: int,
) -> str:
    """The Python that trains so; it runs as it stands where the GPU is."""
    fixed = {"micro_batches": 1, **(settings or {})} if plan is not None else {}
    given = [in_words(budget_bytes), "host_budget=0"] if plan is not None else ['"90%"']
    pinned = [f"fixed={fixed}"] if fixed else []
    return script(
        named,
        method,
        ('device = "cuda" if torch.cuda.is_available() else "cpu"',),
        batch,
        length,
        [*given, *allowed(method), *pinned],
    )


def in_words(budget_bytes: int) -> str:
    """A budget as Python has it."""
    return f'"{budget_bytes >> 20}MiB"' if budget_bytes >= 1 << 26 else f'"{budget_bytes}B"'


def allowed(method: Method) -> list[str]:
    """The argument that allows what a method needs, where it needs any."""
    return [f"allow={list(method.allow)}"] if method.allow else []


def script(
    named: Named,
    method: Method,
    device_lines: tuple[str, ...],
    batch: int,
    length: int,
    arguments: list[str],
    imports: tuple[str, ...] = (),
) -> str:
    """Python that trains a model three steps.

    Args:
        named, method, batch, length: of the step.
        device_lines: that say what `device` is.
        arguments: of `memfit.fit`, after the loss function.
        imports: lines before all others.
    """
    made = [line.format(dtype=f"torch.{str(method.dtype).removeprefix('torch.')}") for line in named.model_lines]
    return "\n".join(
        [
            *imports,
            "import torch",
            *method.lines[:1],
            "import memfit",
            *made[: made.index("")],
            "",
            *device_lines,
            f"batch, length = {batch}, {length}",
            *made[made.index("") + 1 :],
            *method.lines[2:],
            *named.sample_lines,
            f"engine = memfit.fit({', '.join(['model.to(device).train()', 'sample', named.loss, *arguments])})",
            "for step in range(3):",
            "    print(engine.step(sample).loss)",
        ]
    )


__all__ = ["SHARE", "Estimate", "estimate", "gpu_of"]
