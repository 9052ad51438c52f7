"""One optimizer step written down: operations, storages, and what autograd saves. A value: frozen, torch-free, JSON both ways.

Words: an *event* is an operation (a kernel the dispatcher sees) or an *unpack* (autograd asks for a tensor it saved). Times are positions in the
event list. A storage is born at an event and is gone after an event. Bytes are what the allocator hands out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from memfit.errors import PlanFileError
from memfit.garbage import uncollected
from memfit.techniques.choices import Choices

FORMAT_VERSION: Final = 13
# What Python and autograd take longer beside an operation where kernels have driven them out of the caches, over what the engine does that follows it. Found on
# one computer, from steps of GPT, Llama, ViT, T5 and both BERTs in one part and in several (docs/design/log.md).
BETWEEN: Final = 0.1
BEFORE_STEP: Final = -1


class Category(StrEnum):
    """What the bytes are for; the bands of the picture."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENT = "gradient"
    BATCH = "batch"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OTHER = "other"


class Phase(StrEnum):
    """Part of the step in which an operation runs; the loss counts as forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"


REDUCTIONS: Final = ("all_reduce", "reduce_scatter")  # collectives that add up what ranks have
FILLS_REDUCTION: Final = "fsdp.chunk_cat"  # the beginning of its name, which torch 2.15 makes longer


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
        bytes: as handed out by the allocator.
        category: what it is for.
        module: path of the module whose operation made it ("" outside any).
        birth: event that makes it; BEFORE_STEP when it is there when the step starts.
        death: last event at which it is alive when autograd keeps nothing (its *transient* death); the number of events when it outlives the step.
    """

    bytes: int
    category: Category
    module: str
    birth: int
    death: int


@dataclass(frozen=True, slots=True)
class Collective:
    """What makes an operation one that several devices take part in. It is never run again by one of them alone.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "receive".
        bytes: that this rank sends or receives over its links, whichever is more.
        ranks: that take part, this one among them.
    """

    kind: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel call as the dispatcher sees it.

    Attributes:
        name: overload name, e.g. "aten.mm.default".
        phase: part of the step.
        module: path of the module in which it ran.
        reads: storages of its tensor arguments, in argument order, repeats included.
        writes: storages it changes in place.
        makes: storages it allocates and returns, in output order.
        seconds: time of one run on the device the trace is for.
        workspace_bytes: allocated inside and freed before it returns.
        random: draws from the default generator.
        rerunnable: running it twice on the same inputs gives the same outputs and has no other effect (batch norm's statistics are handled by the engine).
        key: names all operations that cost the same (name, shapes, dtypes, layout); one measurement serves them.
        outputs: for each tensor output, the position in `makes` of its storage, or -1 when it aliases one that was there.
        wanted: in forward, whether one of its arguments needs a gradient.
        by_values: its results are as large as the values of its arguments make them (nonzero, an index of booleans).
        shape: of its first tensor argument; empty where it takes none.
        same_layout: all its tensor arguments have one dtype, one shape and the same strides.
        collective: what it moves between devices; None for what one device does alone.
        host_factor: how many times longer than with warm caches the engine takes beside it.
        times: how many like it this one stands for; `seconds` are those of all. Of an update in chunks only the first ones are written down.
    """

    name: str
    phase: Phase
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    workspace_bytes: int
    random: bool
    rerunnable: bool
    key: str
    outputs: tuple[int, ...] = ()
    wanted: bool = False
    by_values: bool = False
    shape: tuple[int, ...] = ()
    same_layout: bool = False
    collective: Collective | None = None
    host_factor: float = 1.0
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saved in forward.

    Attributes:
        storage: the storage it lies in.
        by: event of the operation whose backward reads it.
        unpacks: pairs (unpack event, last event at which the backward node still holds what it was given).
        freed: last event at which autograd holds what it packed; a little after the last release, as a node's results are checked in between.
        packed: the last event that has run when autograd saves it.
    """

    storage: int
    by: int
    unpacks: tuple[tuple[int, int], ...]
    freed: int
    packed: int = BEFORE_STEP


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in forward.

    Attributes:
        module: its path in the model.
        number: how many calls of this module came before it in this forward.
        operations: the forward operations that ran in it, from the first up to, not including, the second.
        saves: likewise, the tensors that autograd saved in it.
        arguments: storages of the tensors among its arguments.
        results: storages of the tensors among what it returned.
        repeatable: whether it may be called again with the same arguments: they and its results are tensors and plain values, it has no hooks, and forward
            changes no attribute of any module and draws no random numbers of Python's or numpy's.
    """

    module: str
    number: int
    operations: tuple[int, int]
    saves: tuple[int, int]
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    repeatable: bool = False


@dataclass(frozen=True)  # no slots: the sums over its operations are worked out once
class Trace:
    """One micro-batch's forward and backward, followed by clipping and the optimizer.

    Attributes:
        events: operation indices, and `~i` where save i is unpacked.
        operations: kernel calls, in order.
        storages: all that is allocated.
        saves: what autograd notes for backward.
        forward_events: events [0, forward_events) belong to forward and loss.
        pass_events: events [0, pass_events) belong to one micro-batch; the rest run once a step.
        choices: how the step was run. `micro_batches` is how often the pass runs in it; with more than one, gradients are there when the pass starts.
        device: name of the device the seconds are for.
        seconds_are: "measured" or "estimated".
        source: "fake", "real" or "scaled": how the bytes were found.
        signature: shapes and dtypes of the batch.
        model: hash of the model's structure (module paths, shapes, dtypes, requires_grad); where its first forward makes buffers, also that after it.
        notes: what the reader should know (fallbacks taken, operations not understood).
        rng_state_bytes: bytes the engine keeps to replay one random operation.
        dispatch_seconds: host seconds the engine adds to each forward operation that it follows, with warm caches.
        recomputed_seconds: likewise, to an operation, each time that it runs again.
        python_seconds: host seconds between an operation and the next, with warm caches: of modules and autograd; on a GPU, as far as the GPU waits for them.
        noted_seconds: that the engine takes once a step, whatever its plan: notes of what a step may change, so that it can be undone.
        counted_seconds: that it takes for each micro-batch, whatever its plan: calls of modules are counted.
        fresh_memory_seconds: of a micro-batch's forward and backward, what it takes to get large blocks from the system each time, on a CPU. Smaller
            micro-batches make smaller blocks, which the process keeps.
        changed_buffers: names of the buffers that forward writes (running statistics); the engine keeps a copy of each, to put back when a step fails.
        changed_buffer_bytes: of these copies.
        clip_norm: gradient clipping that the step includes.
        transfer_seconds: of a step, in which the link to the lower tier is busy with streamed layers or offloaded optimizer state.
        waited_seconds: of these, in which computing waits.
        torch_version: with which it was captured.
        in_flight: forwards that may have run before their backward begins: 1 on a single device, more in a pipeline.
        calls: of modules in forward, in the order in which they began.
        paths: the same step where it ran other operations, under other random numbers; this trace is that with the most operations.
        shared_operations: of one of several paths that is planned for by itself, with how many operations it begins that others begin with, too: nothing
            that was made or saved by then is dropped. 0 where forward takes one path.
        first: the first step, where its forward runs other operations than those of all later ones: it builds what they find.
        before: of a first step, what modules hold before its forward and not after it (`memfit.step.fingerprint.fingerprint`).
        drawn_bytes: of every storage, under other draws of the random numbers, where those decide sizes; `storages` has those of one draw. The last is of the
            generators as they were, where these took this path.
        gathered: of each parameter that is whole at times only, the events between which it is: what reads it can be run again then alone.
    """

    events: tuple[int, ...]
    operations: tuple[Operation, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    forward_events: int
    pass_events: int
    choices: Choices
    device: str
    seconds_are: str
    source: str
    signature: str
    model: str
    notes: tuple[str, ...] = ()
    rng_state_bytes: int = 0
    dispatch_seconds: float = 0.0
    recomputed_seconds: float = 0.0
    python_seconds: float = 0.0
    noted_seconds: float = 0.0
    counted_seconds: float = 0.0
    fresh_memory_seconds: float = 0.0
    changed_buffers: tuple[str, ...] = ()
    changed_buffer_bytes: int = 0
    clip_norm: float | None = None
    transfer_seconds: float = 0.0
    waited_seconds: float = 0.0
    torch_version: str = ""
    drawn_bytes: tuple[tuple[int, ...], ...] = ()
    in_flight: int = 1
    calls: tuple[ModuleCall, ...] = ()
    paths: tuple[Trace, ...] = ()
    shared_operations: int = 0
    first: Trace | None = None
    before: tuple[tuple[str, str], ...] = ()
    gathered: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    @cached_property
    def sized_by_values(self) -> bool:
        """Whether sizes may differ from one batch, or one draw of random numbers, to the next."""
        return bool(self.drawn_bytes) or any(operation.by_values for operation in self.operations)

    @property
    def micro_batches(self) -> int:
        """How often the pass runs in a step."""
        return self.choices.micro_batches

    @cached_property
    def between_seconds(self) -> float:
        """Of one micro-batch's forward and backward, what lies between operations: Python and autograd.

        It takes longer after a long kernel, as it is read from memory again then, like the engine's own part.
        """
        return self._between(self._of_a_pass)

    def between_seconds_of(self, phase: Phase) -> float:
        """Of these, those of forward or of backward."""
        return self._between(operation for operation in self._of_a_pass if operation.phase is phase)

    def _between(self, operations: Iterable[Operation]) -> float:
        return sum(map(self.beside_seconds, operations))

    def beside_seconds(self, operation: Operation) -> float:
        """Of `between_seconds`, what lies between one operation and the next."""
        return self.python_seconds + BETWEEN * self.dispatch_seconds * (operation.host_factor - 1.0)

    @cached_property
    def pass_seconds(self) -> float:
        """Seconds of one micro-batch's forward and backward with nothing dropped."""
        return sum(operation.seconds for operation in self._of_a_pass) + self.between_seconds

    @cached_property
    def _of_a_pass(self) -> tuple[Operation, ...]:
        operations = (self.operations[e] for e in self.events[: self.pass_events] if e >= 0)
        return tuple(operation for operation in operations if operation.phase is not Phase.OPTIMIZER)

    @cached_property
    def bytes_before_step(self) -> int:
        """Bytes of the storages that exist before the step: no plan can drop them."""
        return sum(s.bytes for s in self.storages if s.birth == BEFORE_STEP)

    @cached_property
    def plain_step_seconds(self) -> float:
        """Seconds of one optimizer step in which nothing is dropped."""
        # An update inside backward happens in the last pass only, and so does what synchronises gradients.
        every = sum(self.operations[e].seconds for e in self.events if e >= 0)
        once = sum(self.operations[number].seconds for number in self.synchronising) if self.micro_batches > 1 else 0.0
        if not self.pass_events:  # streamed layers: all micro-batches are in its events
            whole = (operation for operation in self.operations if operation.phase is not Phase.OPTIMIZER)
            return every + self._between(whole) + self.waited_seconds
        every += self.between_seconds
        return every + (self.pass_seconds - once) * (self.micro_batches - 1) + self.waited_seconds

    @property
    def planned_step_seconds(self) -> float:
        """The same under a plan that drops nothing."""
        return self.plain_step_seconds + self.noted_seconds + self.micro_batches * self.counted_seconds

    @cached_property
    def synchronising(self) -> frozenset[int]:
        """Operations of backward that reduce gradients over all ranks, with what fills and reads their buffers: the last micro-batch alone runs them."""
        found: set[int] = set()
        reduced: set[int] = set()
        for code in self.events[: self.pass_events]:
            operation = self.operations[code] if code >= 0 else None
            if operation is None or operation.phase is not Phase.BACKWARD:
                continue
            touched = (*operation.reads, *operation.writes)
            if operation.collective is not None and operation.collective.kind in REDUCTIONS:
                reduced.update(touched, operation.makes)
                found.add(code)
            elif operation.name.startswith(FILLS_REDUCTION):
                found.add(code)
            elif not reduced.isdisjoint(touched) and operation.collective is None:
                reduced.update(operation.makes)
                found.add(code)
        return frozenset(found)

    def bytes_of(self, *categories: Category) -> int:
        """Bytes of all storages of these categories, whenever they are alive."""
        return sum(s.bytes for s in self.storages if s.category in categories)

    def in_forward(self) -> Iterator[Operation]:
        """The operations of forward and loss, in the order in which they ran."""
        return (self.operations[e] for e in self.events[: self.forward_events] if e >= 0)

    @cached_property
    def events_in_forward(self) -> tuple[int, ...]:
        """The events at which these ran."""
        return tuple(event for event, code in enumerate(self.events[: self.forward_events]) if code >= 0)

    @cached_property
    def forward_operations(self) -> int:
        """Number of operations in forward and loss; the engine counts these."""
        return sum(1 for e in self.events[: self.forward_events] if e >= 0)

    def to_json(self) -> dict[str, Any]:
        """Columns rather than rows: a trace of 10,000 operations stays a few hundred kB once compressed."""
        names: dict[str, int] = {}

        def intern(text: str) -> int:
            return names.setdefault(text, len(names))

        interned = {"name", "module", "key", "phase", "category"}

        def table(rows: tuple[Any, ...], cls: type) -> dict[str, list[Any]]:
            return {
                f.name: [
                    intern(str(value))
                    if f.name in interned
                    else asdict(value)
                    if isinstance(value, Collective)
                    else value
                    for value in (getattr(r, f.name) for r in rows)
                ]
                for f in fields(cls)
            }

        rows = {
            "operations": table(self.operations, Operation),
            "storages": table(self.storages, Storage),
            "saves": table(self.saves, Save),
        }
        apart = {"operations", "storages", "saves", "choices", "calls", "paths", "first"}
        scalars = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        paths = {
            "calls": [
                [c.module, c.number, *c.operations, *c.saves, list(c.arguments), list(c.results), c.repeatable]
                for c in self.calls
            ],
            "paths": [path.to_json() for path in self.paths],
            "first": None if self.first is None else self.first.to_json(),
        }
        return {**scalars, "choices": self.choices.to_json(), **rows, **paths, "names": list(names)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Inverse of `to_json`.

        Raises:
            PlanFileError: another format version, or columns that do not fit together.
        """
        if not isinstance(data, Mapping) or data.get("format_version") != FORMAT_VERSION:
            have = data.get("format_version") if isinstance(data, Mapping) else type(data).__name__
            if isinstance(data, Mapping) and data.get("memfit") == "bundle":
                raise PlanFileError(
                    "this is a trace bundle, not a single trace: read it with memfit.TraceBundle.load(path)"
                )
            raise PlanFileError(
                f"this trace has format {have!r}, this memfit reads {FORMAT_VERSION}: capture it again with memfit.record(...).save(path)"
            )
        try:
            names = data["names"]
            ops, sts, svs = data["operations"], data["storages"], data["saves"]

            def columns(table: Mapping[str, list[Any]], kind: type) -> list[tuple[Any, ...]]:
                return list(zip(*(table[f.name] for f in fields(kind)), strict=True))

            operations = tuple(
                Operation(
                    names[name],
                    Phase(names[phase]),
                    names[module],
                    tuple(reads),
                    tuple(writes),
                    tuple(makes),
                    seconds,
                    workspace,
                    random,
                    rerunnable,
                    names[key],
                    tuple(outputs),
                    wanted,
                    by_values,
                    tuple(shape),
                    alike,
                    None if among is None else Collective(among["kind"], among["bytes"], tuple(among["ranks"])),
                    host_factor,
                    times,
                )
                for (
                    name,
                    phase,
                    module,
                    reads,
                    writes,
                    makes,
                    seconds,
                    workspace,
                    random,
                    rerunnable,
                    key,
                    outputs,
                    wanted,
                    by_values,
                    shape,
                    alike,
                    among,
                    host_factor,
                    times,
                ) in columns(ops, Operation)
            )
            storages = tuple(
                Storage(size, Category(names[category]), names[module], birth, death)
                for size, category, module, birth, death in columns(sts, Storage)
            )
            saves = tuple(
                Save(storage, by, tuple((u, r) for u, r in unpacks), freed, packed)
                for storage, by, unpacks, freed, packed in columns(svs, Save)
            )
            drawn = tuple(tuple(map(int, sizes)) for sizes in data["drawn_bytes"])
            if any(len(sizes) != len(storages) for sizes in drawn):
                raise ValueError(f"drawn_bytes are of other storages than the {len(storages)} there are")
            rest = {
                f.name: data[f.name]
                for f in fields(cls)
                if f.name
                not in {
                    "operations",
                    "storages",
                    "saves",
                    "events",
                    "choices",
                    "notes",
                    "changed_buffers",
                    "drawn_bytes",
                    "calls",
                    "paths",
                    "first",
                    "before",
                    "gathered",
                    "shared_operations",
                }
            }
            if "gathered" not in data and data["choices"].get("sharding", "").startswith(("zero2", "zero3")):
                raise PlanFileError("this trace does not say when parameters are gathered: capture it again")
            return cls(
                operations=operations,
                storages=storages,
                saves=saves,
                events=tuple(data["events"]),
                choices=Choices.from_json(data["choices"]),
                notes=tuple(data["notes"]),
                changed_buffers=tuple(data["changed_buffers"]),
                drawn_bytes=drawn,
                calls=tuple(
                    ModuleCall(m, n, (a, b), (c, d), tuple(given), tuple(results), repeatable)
                    for m, n, a, b, c, d, given, results, repeatable in data["calls"]
                ),
                paths=tuple(cls.from_json(path) for path in data["paths"]),
                first=None if data.get("first") is None else cls.from_json(data["first"]),
                before=tuple((str(name), str(value)) for name, value in data.get("before", ())),
                gathered=tuple(
                    (int(s), tuple((int(a), int(b)) for a, b in each)) for s, each in data.get("gathered", ())
                ),
                shared_operations=int(data.get("shared_operations", 0)),
                **rest,
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise PlanFileError(f"this trace file is damaged ({error}): capture it again") from error

    def save(self, path: str | Path) -> None:
        """Write the trace as gzipped JSON."""
        Path(path).write_bytes(gzip.compress(json.dumps(self.to_json()).encode(), mtime=0))

    @classmethod
    @uncollected()
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            PlanFileError: not a trace file, or damaged.
        """
        try:
            data = json.loads(gzip.decompress(Path(path).read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise PlanFileError(f"{path} is not a readable trace ({error}): capture it again") from error
        return cls.from_json(data)


__all__ = ["BEFORE_STEP", "FORMAT_VERSION", "Category", "Collective", "Operation", "Phase", "Save", "Storage", "Trace"]
