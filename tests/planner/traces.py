"""Traces written by hand or drawn at random: small enough that what a plan comes to can be worked out slowly."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memfit.techniques.choices import Choices
from memfit.values.trace import BEFORE_STEP, Category, Operation, Phase, Save, Storage, Trace


class Writer:
    """Writes a trace event by event.

    A storage dies, when autograd keeps nothing, after the last operation of its own phase that reads or writes it, or later
    when told so.
    """

    def __init__(self) -> None:
        self.events: list[int] = []
        self.operations: list[Operation] = []
        self.bytes: list[int] = []
        self.categories: list[Category] = []
        self.modules: list[str] = []
        self.births: list[int] = []
        self.deaths: list[int] = []
        self.saves: list[tuple[int, int, list[list[int]]]] = []
        self.let_go_late: dict[int, int] = {}
        self.phase = Phase.FORWARD
        self.forward_events = self.pass_events = -1

    def _storage(self, size: int, category: Category, module: str, birth: int) -> int:
        self.bytes.append(size)
        self.categories.append(category)
        self.modules.append(module)
        self.births.append(birth)
        self.deaths.append(birth)
        return len(self.bytes) - 1

    def before(self, size: int, category: Category = Category.PARAMETER, *, death: int | None = None) -> int:
        """A storage that is there when the step starts; it stays unless told when it dies."""
        s = self._storage(size, category, "", BEFORE_STEP)
        self.deaths[s] = 1 << 30 if death is None else death
        return s

    def run(
        self,
        reads: Sequence[int] = (),
        makes: Sequence[int] = (),
        *,
        writes: Sequence[int] = (),
        seconds: float = 1.0,
        workspace: int = 0,
        random: bool = False,
        rerunnable: bool = True,
        by_values: bool = False,
        name: str = "aten.f.default",
        module: str = "",
        category: Category | None = None,
    ) -> tuple[int, ...]:
        """An operation; `makes` are sizes. Returns the storages made."""
        event = len(self.events)
        if category is None:
            category = Category.ACTIVATION if self.phase is Phase.FORWARD else Category.TEMPORARY
        made = tuple(self._storage(size, category, module, event) for size in makes)
        for s in (*reads, *writes):
            saved_from_forward = self.phase is not Phase.FORWARD and 0 <= self.births[s] < self.forward_events
            if not saved_from_forward:
                self.deaths[s] = max(self.deaths[s], event)
        self.events.append(len(self.operations))
        self.operations.append(
            Operation(
                name,
                self.phase,
                module,
                tuple(reads) + tuple(w for w in writes if w not in reads),
                tuple(writes),
                made,
                seconds,
                workspace,
                random,
                rerunnable,
                f"{name} {len(self.operations)}",
                tuple(range(len(made))),
                by_values=by_values,
                host_factor=1.0 + 0.5 * (len(self.operations) % 3),  # cold caches, but for every third
            )
        )
        return made

    def one(self, reads: Sequence[int], size: int, **named: object) -> int:
        """`run` with one result."""
        return self.run(reads, (size,), **named)[0]  # type: ignore[arg-type]

    def stays(self, storage: int, until: int | None = None) -> None:
        """Something holds the storage until this event; None: until the end of the step."""
        self.deaths[storage] = 1 << 30 if until is None else max(self.deaths[storage], until)

    def save(self, storage: int, *, output: bool = False) -> int:
        """Autograd saves it for the backward of the operation that comes next or, where it is an output, of the last one."""
        self.saves.append((storage, len(self.events) - output, []))
        return len(self.saves) - 1

    def backward(self) -> None:
        """Forward ends here."""
        self.forward_events = len(self.events)
        self.phase = Phase.BACKWARD

    def unpack(self, save: int, held: int = 1, late: int = 0) -> int:
        """Autograd asks for a save; its node holds it for `held` more events, and what it packed for `late` more. Returns the storage."""
        event = len(self.events)
        self.events.append(~save)
        self.saves[save][2].append([event, event + held])
        self.let_go_late[save] = late
        return self.saves[save][0]

    def update(self) -> None:
        """The pass ends here."""
        self.pass_events = len(self.events)
        self.phase = Phase.OPTIMIZER

    def trace(self, **named: object) -> Trace:
        """What was written."""
        if self.forward_events < 0:
            self.backward()
        if self.pass_events < 0:
            self.update()
        end = len(self.events)
        scalars: dict[str, object] = {
            "choices": Choices(1, 1),
            "device": "cpu",
            "seconds_are": "measured",
            "source": "fake",
            "signature": "x float32[1]",
            "model": "by hand",
            **named,
        }
        return Trace(
            events=tuple(self.events),
            operations=tuple(self.operations),
            storages=tuple(
                Storage(size, category, module, birth, min(death, end))
                for size, category, module, birth, death in zip(
                    self.bytes, self.categories, self.modules, self.births, self.deaths, strict=True
                )
            ),
            saves=tuple(
                Save(
                    s,
                    by,
                    tuple((u, min(r, end)) for u, r in unpacks),
                    min(max((r for _, r in unpacks), default=end) + self.let_go_late.get(number, 0), end),
                )
                for number, (s, by, unpacks) in enumerate(self.saves)
            ),
            forward_events=self.forward_events,
            pass_events=self.pass_events,
            **scalars,  # type: ignore[arg-type]
        )


def layers(count: int, size: int = 100, *, inner: int = 300, seconds: float = 1.0) -> Trace:
    """A chain: each layer makes a large tensor and, from it, a small one that the next layer reads; backward reads both."""
    w = Writer()
    weight = w.before(10)
    x = w.before(size, Category.BATCH)
    saves = []
    for number in range(count):
        module = f"layer.{number}"
        saves.append(w.save(x))
        h = w.one((x, weight), inner, seconds=seconds, module=module)
        saves.append(w.save(h))
        x = w.one((h,), size, seconds=seconds / 2, module=module)
    w.backward()
    gradient = w.one((x,), size)
    for save in reversed(saves):
        s = w.unpack(save)
        gradient = w.one((gradient, s), size)
    w.update()
    w.run((gradient,), writes=(weight,))
    return w.trace()


def encoder_decoder(blocks: int, *, stream: int = 100, inner: int = 400) -> Trace:
    """Blocks with a residual connection; the second half also reads what the first half came to, and a bias made once."""
    w = Writer()
    weight = w.before(10)
    saves: list[int] = []

    def block(x: int, memory: Sequence[int], module: str) -> int:
        saves.append(w.save(x))
        h = w.one((x, weight), inner, module=module)
        for other in memory:
            saves.append(w.save(other))
            h = w.one((h, other), inner, module=module)
        saves.append(w.save(h))
        g = w.one((h,), inner, module=module)
        saves.append(w.save(g))
        return w.one((w.one((g, weight), stream, module=module), x), stream, module=module)

    x = w.one((w.before(stream, Category.BATCH), weight), stream)
    for number in range(blocks):
        x = block(x, (), f"encoder.{number}")
    memory = x
    bias = w.one((weight,), stream)
    x = w.one((w.before(stream, Category.BATCH), weight), stream)
    for number in range(blocks):
        x = block(x, (memory, bias), f"decoder.{number}")
    w.backward()
    gradient = w.one((x,), stream)
    for save in reversed(saves):
        gradient = w.one((gradient, w.unpack(save)), stream)
    w.update()
    w.run((gradient,), writes=(weight,))
    return w.trace()


def drawn(
    seed: int,
    *,
    forward: int = 7,
    most_saved: int = 8,
    plain_operations: bool = False,
    rng_bytes: int = 0,
    dispatch: float = 0.0,
    constants: bool = False,
) -> Trace:
    """A random step: several inputs and outputs an operation, writes in place, tensors saved twice, unpacked in any order.

    Args:
        seed: of the draw.
        forward: number of forward operations.
        most_saved: saves at most.
        plain_operations: every forward operation makes one storage and may run again.
        rng_bytes: of a generator's state; with it some operations draw.
        dispatch: the engine's seconds for each forward operation.
        constants: some operations read what none makes and what is gone when the last of them has run.
    """
    r = random.Random(seed)
    w = Writer()
    passing = -1
    there = [w.before(r.randint(1, 50)) for _ in range(2)]
    there.append(w.before(r.randint(1, 50), Category.BATCH))
    alive = list(there)
    managed: list[int] = []
    saves: list[int] = []
    for _ in range(forward):
        reads = (
            [alive[-1], *r.sample(alive, min(len(alive), r.randint(0, 2)))] if r.random() < 0.8 else r.sample(alive, 1)
        )
        makes = [r.randint(1, 200) for _ in range(1 if plain_operations else r.choice((0, 1, 1, 1, 2)))]
        writes = []
        if managed and not plain_operations and r.random() < 0.2:
            writes = [r.choice(managed)]
        if constants and r.random() < 0.6:
            if passing < 0 or r.random() < 0.5:
                passing = w.before(r.randint(1, 50), Category.OTHER, death=0)
            reads.append(passing)
        made = w.run(
            reads,
            makes,
            writes=writes,
            seconds=r.choice((0.0, 0.1, 1.0, 2.0, 5.0)),
            workspace=r.choice((0, 0, 0, 60)),
            random=bool(rng_bytes) and r.random() < 0.3,
            rerunnable=plain_operations or r.random() < 0.9,
        )
        managed += made
        alive += made
        if managed and r.random() < 0.8 and len(saves) < most_saved:
            saves.append(w.save(r.choice(managed[-3:]), output=True))
        if r.random() < 0.1:
            saves.append(w.save(there[0]))
    for s in managed:
        if r.random() < 0.2:
            w.stays(s, until=r.choice((len(w.events), len(w.events) + 3, None)))
    w.backward()
    gradient = w.one((alive[-1],), r.randint(1, 100))
    order = list(reversed(saves))
    if r.random() < 0.3:
        r.shuffle(order)
    if order and r.random() < 0.3:
        order.append(r.choice(order))  # asked for a second time
    for save in order:
        s = w.unpack(save, held=r.choice((0, 1, 1, 2, 4)), late=r.choice((0, 0, 0, 1, 2)))
        if r.random() < 0.85:
            gradient = w.one((gradient, s), r.randint(1, 100), workspace=r.choice((0, 0, 40)))
        if r.random() < 0.15:
            w.stays(gradient)
    w.update()
    w.run((gradient,), (r.randint(1, 50),), writes=(there[0],))
    return w.trace(rng_state_bytes=rng_bytes, dispatch_seconds=dispatch, recomputed_seconds=dispatch)


def network(seed: int, *, blocks: int = 3, dispatch: float = 0.0) -> Trace:
    """A random small network: blocks of cheap and dear layers, some with a residual connection, unpacked in reverse order."""
    r = random.Random(seed)
    w = Writer()
    weight = w.before(r.randint(5, 40))
    x = w.before(50, Category.BATCH)
    saves: list[int] = []
    residual = r.random() < 0.5
    for number in range(blocks):
        start, module = x, f"block.{number}"
        for _ in range(r.randint(1, 3)):
            dear = r.random() < 0.5
            saved_input = r.random() < 0.7
            if saved_input:
                saves.append(w.save(x))
            x = w.one(
                (x, weight) if dear else (x,),
                r.choice((50, 100, 200)),
                seconds=r.uniform(3, 6) if dear else r.uniform(0.1, 0.5),
                workspace=r.choice((0, 0, 30)),
                module=module,
            )
            if not saved_input:
                saves.append(w.save(x, output=True))
        if residual:
            x = w.one((x, start), 100, seconds=0.3, module=module)
    w.backward()
    gradient = w.one((x,), 50)
    for save in reversed(saves):
        gradient = w.one((gradient, w.unpack(save)), 50)
    w.update()
    w.run((gradient,), writes=(weight,))
    return w.trace(dispatch_seconds=dispatch, recomputed_seconds=dispatch)
