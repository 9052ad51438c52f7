"""What the engine follows in one micro-batch, in terms of the forward operations' order and autograd's saves. A value.

Written so that it can be checked against the real run, operation by operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

TIERS: Final = ("host", "disk")  # lower tiers, the nearest first
KEPT: Final = -1  # in `Script.saves`: autograd keeps the tensor itself


@dataclass(frozen=True, slots=True)
class Step:
    """What happens before autograd is given one saved tensor.

    Attributes:
        save: number of the save it asks for.
        runs: recipes to run first; each is the operations to run, in order, or `~storage` alone where the copy of that storage back from its lower
            tier begins.
        releases: for each run, storages to free after it.
        after: storages to free once autograd has the tensor.
    """

    save: int
    runs: tuple[tuple[int, ...], ...]
    releases: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadedStorage:
    """How one storage is offloaded to a lower tier in forward.

    Attributes:
        offset, bytes: where it is on that tier.
        begin: forward operation after which the copy to the tier begins.
        gone_by: forward operation after which the engine waits for that copy and frees the storage on the device.
        tier: "host" or "disk".
    """

    offset: int
    bytes: int
    begin: int
    gone_by: int
    tier: str


@dataclass(frozen=True, slots=True)
class CallScript:
    """What the engine follows in one call of a module, whatever runs before and after it.

    Attributes:
        module: its path in the model.
        number: which call of the module in one forward; the last one serves calls that no known path makes, too.
        script: counted from the first operation and the first save of the call.
    """

    module: str
    number: int
    script: Script


@dataclass(frozen=True, slots=True)
class KeptStretch:
    """Operations in a row in which nothing is dropped, from where a call of a module begins to where one ends.

    Attributes:
        begins: path of the module whose call begins with them.
        ends: path of the module whose call ends with them.
        calls: of the module `ends` that begin and end in them; with the last of these they end.
        operations: from the first up to, not including, the second.
        saves: likewise, the tensors that autograd saves in them.
        begun: the least and the most calls of modules that begin in them, the first included; they differ where calls without operations lie at their end.
    """

    begins: str
    ends: str
    calls: int
    operations: tuple[int, int]
    saves: tuple[int, int]
    begun: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """Calls of modules, one right after the other, that are made again in backward: what autograd saves in them is dropped, their arguments are kept.

    Attributes:
        modules: path of the module of each call, and which call of it in one forward. What one call returns, the later ones are given.
        saves: how many tensors autograd saves in them.
        dropped: which of these, counted from the first.
        operations: how many of their operations run again.
        random: whether one of them draws random numbers, so that the state of the generators is kept.
        buffers: names of the buffers that are put back after the second time.
    """

    modules: tuple[tuple[str, int], ...]
    saves: int
    dropped: tuple[int, ...]
    operations: int
    random: bool
    buffers: tuple[str, ...]

    @property
    def where(self) -> str:
        """The modules in words: "blocks.0", or "blocks.0 to blocks.3" for calls in a row."""
        ends = (self.modules[0], self.modules[-1]) if len(self.modules) > 1 else self.modules
        return " to ".join((path or "the model") + (f" (call {n + 1})" if n else "") for path, n in ends)


@dataclass(frozen=True, slots=True)
class FirstForward:
    """What is followed in the first forward of a model, which runs other operations than later ones: it builds what they find.

    Attributes:
        before: what modules hold before that forward and not after it, by path and name (`memfit.step.fingerprint`): tells whether this is the one.
        script: to follow in it.
    """

    before: Mapping[str, str]
    script: Script


@dataclass(frozen=True, slots=True)
class Script:
    """What the engine follows in one micro-batch.

    Attributes:
        operations: name of each forward operation, in order; checked against the run.
        makes: for the operations that matter, (output position, storage, largest bytes or -1 when values decide) of
            the storages to know by number.
        held: storages the engine itself holds from when they are made.
        recorded: operations whose arguments are noted for recomputations -> storage of each tensor argument (-1: there anyway).
        random: recorded operations that draw random numbers -> the step after which their generator state is freed.
        saves: for each save in order, its storage when the engine answers for it, KEPT when autograd keeps the tensor.
        steps: what to do at each unpack of a storage the engine answers for, in the order of the captured backward.
        wanted: of each forward operation, whether one of its arguments needs a gradient.
        swaps: storages that are offloaded to a lower tier.
        inputs: storages that the first operation which reads them for a recomputation brings along: made before a call, and held for it.
        calls: where forward takes several paths, a script for each call of a module in which something is dropped; this one has no operations then.
        writes: forward operations that write in place -> the storages they write, -1 for those that the engine does not know by number.
        kept_stretches: the longest stretches, between begins and ends of modules' calls, in which nothing is dropped, held or written that it knows by number.
        repeated_calls: calls of modules that are made again as a whole; for the engine's other actions autograd keeps what is saved in them.
        branches: where forward takes one of a few paths early on, the scripts for the others; what storages they name by the same number there are the same.
        decided: the first operation by which no other of these can be the one; -1 where there is one path.
        released: storages that the engine holds up to that operation for the other paths alone.
        first: what is followed instead in a first forward that builds what later ones find.
        most_operations: of forward on the longest path that is known, where there are calls; 0 where that is not known.
        most_calls: of each module on the known path that calls it most often, where single operations are not compared; empty where that is not known.
        call_bytes: of each module, what one call keeps for backward in plain PyTorch, calls within it aside; where nothing is dropped.
        most_call_bytes: that the calls of the known path that keeps most add up to.
    """

    operations: tuple[str, ...] = ()
    makes: Mapping[int, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    recorded: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    random: Mapping[int, int] = field(default_factory=dict)
    saves: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    wanted: tuple[bool, ...] = ()
    swaps: Mapping[int, OffloadedStorage] = field(default_factory=dict)
    writes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    calls: tuple[CallScript, ...] = ()
    kept_stretches: tuple[KeptStretch, ...] = ()
    repeated_calls: tuple[RepeatedCalls, ...] = ()
    first: FirstForward | None = None
    most_operations: int = 0
    most_calls: Mapping[str, int] = field(default_factory=dict)
    call_bytes: Mapping[str, int] = field(default_factory=dict)
    most_call_bytes: int = 0
    branches: tuple[Script, ...] = ()
    decided: int = -1
    released: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether there is nothing to do: the step runs as PyTorch runs it."""
        own = not self.steps and not self.calls and not self.repeated_calls
        return own and all(branch.plain for branch in self.branches)

    @property
    def recomputations(self) -> int:
        """Operations run again in one micro-batch, on the path on which most are."""
        own = sum(operation >= 0 for step in self.steps for run in step.runs for operation in run)
        repeated = sum(call.operations for call in self.repeated_calls)
        own += repeated + sum(call.script.recomputations for call in self.calls)
        return max([own, *(branch.recomputations for branch in self.branches)])

    @property
    def whole_calls(self) -> int:
        """Calls of modules that are made again as wholes in one micro-batch, on the path on which most are."""
        own = sum(len(again.modules) for again in self.repeated_calls)
        return max([own, *(branch.whole_calls for branch in self.branches)])

    @property
    def lower_bytes(self) -> Mapping[str, int]:
        """Bytes to reserve on each lower tier in use."""
        out: dict[str, int] = {}
        for place in self.swaps.values():
            out[place.tier] = max(out.get(place.tier, 0), place.offset + place.bytes)
        for branch in self.branches:
            for tier, size in branch.lower_bytes.items():
                out[tier] = max(out.get(tier, 0), size)
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings; operation names are stored once each."""
        names: dict[str, int] = {}
        operations = [names.setdefault(n, len(names)) for n in self.operations]
        return {
            "names": list(names),
            "operations": operations,
            "makes": {str(k): [list(x) for x in v] for k, v in self.makes.items()},
            "held": sorted(self.held),
            "recorded": {str(k): list(v) for k, v in self.recorded.items()},
            "random": {str(k): v for k, v in self.random.items()},
            "saves": list(self.saves),
            "steps": [
                [s.save, [list(r) for r in s.runs], [list(r) for r in s.releases], list(s.after)] for s in self.steps
            ],
            "wanted": "".join("01"[w] for w in self.wanted),
            "swaps": {str(k): [s.offset, s.bytes, s.begin, s.gone_by, s.tier] for k, s in self.swaps.items()},
            "writes": {str(k): list(v) for k, v in self.writes.items()},
            "inputs": sorted(self.inputs),
            "calls": [[call.module, call.number, call.script.to_json()] for call in self.calls],
            "kept_stretches": [
                [s.begins, s.ends, s.calls, *s.operations, *s.saves, *s.begun] for s in self.kept_stretches
            ],
            "repeated_calls": [
                [[list(m) for m in c.modules], c.saves, list(c.dropped), c.operations, c.random, list(c.buffers)]
                for c in self.repeated_calls
            ],
            "first": None if self.first is None else [dict(self.first.before), self.first.script.to_json()],
            "most_operations": self.most_operations,
            "most_calls": dict(self.most_calls),
            "call_bytes": dict(self.call_bytes),
            "most_call_bytes": self.most_call_bytes,
            "branches": [branch.to_json() for branch in self.branches],
            "decided": self.decided,
            "released": list(self.released),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Script:
        """Inverse of `to_json`; checks that the numbers refer to something.

        Raises:
            ValueError: numbers out of range.
        """
        operations = tuple(data["names"][i] for i in data["operations"])
        script = cls(
            operations,
            {int(k): tuple((int(a), int(b), int(c)) for a, b, c in v) for k, v in data["makes"].items()},
            frozenset(int(s) for s in data["held"]),
            {int(k): tuple(int(x) for x in v) for k, v in data["recorded"].items()},
            {int(k): int(v) for k, v in data["random"].items()},
            tuple(int(s) for s in data["saves"]),
            tuple(
                Step(
                    int(save),
                    tuple(tuple(int(x) for x in r) for r in runs),
                    tuple(tuple(int(x) for x in r) for r in releases),
                    tuple(int(x) for x in after),
                )
                for save, runs, releases, after in data["steps"]
            ),
            tuple(w == "1" for w in data["wanted"]),
            {
                int(k): OffloadedStorage(int(a), int(b), int(c), int(d), tier)
                for k, (a, b, c, d, tier) in data["swaps"].items()
            },
            {int(k): tuple(int(x) for x in v) for k, v in data["writes"].items()},
            frozenset(int(s) for s in data["inputs"]),
            tuple(CallScript(str(module), int(number), cls.from_json(own)) for module, number, own in data["calls"]),
            tuple(
                KeptStretch(str(begins), str(ends), int(calls), (int(a), int(b)), (int(c), int(d)), (int(e), int(f)))
                for begins, ends, calls, a, b, c, d, e, f in data["kept_stretches"]
            ),
            tuple(
                RepeatedCalls(
                    tuple((str(module), int(number)) for module, number in modules),
                    int(saves),
                    tuple(map(int, dropped)),
                    int(operations),
                    bool(random),
                    tuple(map(str, buffers)),
                )
                for modules, saves, dropped, operations, random, buffers in data["repeated_calls"]
            ),
            None if data["first"] is None else FirstForward(dict(data["first"][0]), cls.from_json(data["first"][1])),
            int(data.get("most_operations", 0)),
            {str(module): int(calls) for module, calls in data.get("most_calls", {}).items()},
            {str(module): int(size) for module, size in data.get("call_bytes", {}).items()},
            int(data.get("most_call_bytes", 0)),
            tuple(map(cls.from_json, data.get("branches", ()))),
            int(data.get("decided", -1)),
            tuple(map(int, data.get("released", ()))),
        )
        count = len(operations)
        if len(script.wanted) != count:
            raise ValueError(f"{len(script.wanted)} operations are told whether they need gradients, of {count}")
        known = {s for made in script.makes.values() for _, s, _ in made} | script.inputs
        if script.calls and (script.operations or script.steps):
            raise ValueError("a script of calls has no operations of its own")
        for operation in (*script.makes, *script.recorded, *script.random, *script.writes):
            if not 0 <= operation < count:
                raise ValueError(f"operation {operation} of {count}")
        for step in script.steps:
            if not 0 <= step.save < len(script.saves) or script.saves[step.save] == KEPT:
                raise ValueError(f"step for save {step.save}, which autograd keeps or does not exist")
            if len(step.releases) != len(step.runs):
                raise ValueError(f"{len(step.releases)} releases for {len(step.runs)} runs at save {step.save}")
            for run in step.runs:
                for operation in run:
                    if operation < 0 and (len(run) > 1 or ~operation not in script.swaps):
                        raise ValueError(f"storage {~operation} is to come back, but was not copied down")
                    if operation >= 0 and operation not in script.recorded:
                        raise ValueError(f"operation {operation} is to run again but is not recorded")
        answered = {s for s in script.saves if s != KEPT}
        read = {s for places in script.recorded.values() for s in places if s >= 0}
        written = {s for places in script.writes.values() for s in places if s >= 0}
        for storage in (*script.held, *answered, *read, *written, *script.swaps):
            if storage not in known:
                raise ValueError(f"storage {storage} is made by no operation")
        if answered and not script.steps:
            raise ValueError("saves are answered for, but no step answers")
        if not script.held.issuperset(script.released) or not script.decided < count:
            raise ValueError(
                f"storages {list(script.released)} are to be freed at operation {script.decided} of {count}, not all are held by then"
            )
        for branch in script.branches:
            alike = shared_beginning(script.operations, branch.operations)
            if not 0 < alike <= min(script.decided, branch.decided):
                raise ValueError(
                    f"two paths begin with {alike} operations that are the same, and one is to be known at operation {script.decided}"
                )
        script._check_offloads()
        script._check_kept_stretches()
        script._check_repeated_calls()
        rebuilt = {
            s for step in script.steps for run in step.runs for op in run for _, s, _ in script.makes.get(op, ())
        }
        rebuilt |= {~op for step in script.steps for run in step.runs for op in run if op < 0}
        unheld = (read | {script.saves[step.save] for step in script.steps}) - rebuilt - script.held
        if unheld:
            raise ValueError(
                f"storage {min(unheld)} is read by a recomputation or by backward, but neither held nor made again"
            )
        if not all(isinstance(name, str) for name in script.operations):
            raise ValueError("operation names are words")
        return script

    def acts_at(self) -> frozenset[int]:
        """Forward operations at which the engine does more than to run them: they make, read or write what it knows by number, or copies begin or end there."""
        moved = {moment for place in self.swaps.values() for moment in (place.begin, place.gone_by)}
        written = {operation for operation, storages in self.writes.items() if max(storages, default=-1) >= 0}
        return frozenset({*self.makes, *self.recorded, *moved, *written})

    def _check_kept_stretches(self) -> None:
        """Raise ValueError where something is to be done in a stretch that is not followed."""
        acts = self.acts_at()
        for stretch in self.kept_stretches:
            (begin, end), (first, last) = stretch.operations, stretch.saves
            if not (0 <= begin <= end <= len(self.operations) and 0 <= first <= last <= len(self.saves)):
                raise ValueError(f"the stretch from {stretch.begins!r} on ends at operation {end} and save {last}")
            if stretch.calls < 1:
                raise ValueError(
                    f"the stretch from {stretch.begins!r} on ends with call {stretch.calls} of {stretch.ends!r}"
                )
            if not acts.isdisjoint(range(begin, end)) or any(s != KEPT for s in self.saves[first:last]):
                raise ValueError(
                    f"nothing is dropped in the stretch from {stretch.begins!r} on, but the engine is to act in it"
                )

    def _check_repeated_calls(self) -> None:
        """Raise ValueError where one call is to be repeated twice, or drops what it does not save."""
        every = [module for calls in self.repeated_calls for module in calls.modules]
        if len(set(every)) < len(every):
            raise ValueError("a call of a module is to be repeated twice")
        for calls in self.repeated_calls:
            if not calls.modules or not calls.dropped or not all(0 <= save < calls.saves for save in calls.dropped):
                raise ValueError(f"calls of {calls.modules} are to drop the saves {calls.dropped} of {calls.saves}")

    def _check_offloads(self) -> None:
        """Raise ValueError where places on a lower tier overlap, a storage is offloaded before it is made, or a tier does not exist."""
        made_by = {s: operation for operation, made in self.makes.items() for _, s, _ in made}
        ends = dict.fromkeys(TIERS, 0)
        for storage, place in sorted(self.swaps.items(), key=lambda item: item[1].offset):
            if place.tier not in ends:
                raise ValueError(f"storage {storage} is to go to {place.tier!r}, tiers are {' and '.join(TIERS)}")
            if place.offset < ends[place.tier] or place.bytes < 0:
                raise ValueError(f"the place of storage {storage} on the lower tier overlaps another")
            ends[place.tier] = place.offset + place.bytes
            if not made_by[storage] <= place.begin <= place.gone_by < len(self.operations):
                raise ValueError(f"storage {storage} cannot be copied down by operation {place.gone_by}")


def shared_beginning(one: Sequence[str], other: Sequence[str]) -> int:
    """With how many operations of the same names two forwards begin; 0 where one of them ends there."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
