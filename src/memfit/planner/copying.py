"""How long the copies of a plan keep their links busy, and how much of that does not overlap with computing: a walk over the two queues of each link.

Copies wait for each other; computing goes on until the plan has it wait. Bytes do not depend on any of it: when a copy is waited for is the plan's
(`Recipes.reloads`), how long the wait takes is what is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memfit.planner.recipes import Recipes


@dataclass(frozen=True, slots=True)
class Carried:
    """What goes over one link in one micro-batch.

    Attributes:
        tier: that it leads to.
        offloaded: storages that are copied down, and up again.
        lower_bytes: that they take on that tier.
        copy_seconds: in which the link is busy, both directions added up.
        exposed_seconds: of these, in which computing waits.
    """

    tier: str
    offloaded: frozenset[int]
    lower_bytes: int
    copy_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class Copying:
    """What goes over all links in one micro-batch.

    Attributes:
        links: those that carry something, the nearest tier first.
    """

    links: tuple[Carried, ...] = ()

    @property
    def offloaded(self) -> frozenset[int]:
        """Storages that are copied down, and up again."""
        return frozenset().union(*(link.offloaded for link in self.links))

    @property
    def lower_bytes(self) -> int:
        """What they take on all tiers."""
        return sum(link.lower_bytes for link in self.links)

    @property
    def copy_seconds(self) -> float:
        """Seconds in which links are busy, added up over links and directions."""
        return sum(link.copy_seconds for link in self.links)

    @property
    def exposed_seconds(self) -> float:
        """Of these seconds, those in which computing waits."""
        return sum(link.exposed_seconds for link in self.links)


@dataclass(frozen=True, slots=True)
class CopyClock:
    """Walks through a step under any plan, with one clock for each queue.

    Attributes:
        recipes: of the trace.
        unpack_uses: of each storage, (unpack event, last event held).
        saves_at: the storage asked for at each unpack.
        run_seconds: what one run of a recipe takes.
    """

    recipes: Recipes
    unpack_uses: Mapping[int, Sequence[tuple[int, int]]]
    saves_at: Mapping[int, int]
    run_seconds: Callable[[int], float]

    def walk(self, recomputations: Mapping[int, Sequence[int]]) -> Copying:
        """Seconds of the copies of a plan, and how many of them do not overlap with computing.

        One queue in each direction of each link, in which copies wait for each other; computing goes on until the plan has it wait. Memory that both
        share slows neither down here: the bandwidths are measured, and what is left shows in the rehearsal.
        """
        reloads, clock = self.recipes.reloads, self.recipes.clock
        if not reloads:
            return Copying()
        chosen = self.recipes.copied_down(recomputations)
        if not chosen:
            return Copying()
        tiers = range(len(self.recipes.tiers))
        busy = [sum(r.out_seconds for r in chosen.values() if r.tier == tier) for tier in tiers]
        waited = [0.0 for _ in tiers]
        # [1] Down: begun once a storage is written, waited for where the plan lets it go.
        delay = 0.0
        free = [0.0 for _ in tiers]
        done: dict[int, float] = {}
        moments = [(r.ready, False, s) for s, r in chosen.items()] + [(r.gone_by, True, s) for s, r in chosen.items()]
        for event, waits, s in sorted(moments):
            now, tier = clock[event + 1] + delay, chosen[s].tier
            if not waits:
                free[tier] = done[s] = max(free[tier], now) + chosen[s].out_seconds
            elif done[s] > now:
                waited[tier] += done[s] - now
                delay += done[s] - now
        # [2] Up: begun at an unpack, waited for by whatever reads it first. Recipes run meanwhile hide copies as well.
        table = self.recipes.recipes
        free = [0.0 for _ in tiers]
        coming: dict[int, float] = {}
        asked = {event for s in chosen for event, _ in self.unpack_uses.get(s, ())}

        def wait(s: int, event: int) -> float:
            late = max(0.0, coming.pop(s) - clock[event] - delay) if s in coming else 0.0
            waited[chosen[s].tier] += late
            return late

        for event in sorted(asked.union(recomputations)):
            for recipe in recomputations.get(event, ()):
                if recipe in reloads:
                    s = reloads[recipe].storage
                    reload = chosen[s]
                    free[reload.tier] = coming[s] = (
                        max(free[reload.tier], clock[event] + delay, done[s]) + reload.in_seconds
                    )
                    busy[reload.tier] += reload.in_seconds
                    continue
                for s in table[recipe].inputs:
                    if s in coming:
                        delay += wait(s, event)
                delay += self.run_seconds(recipe)
            s = self.saves_at[event]
            if s in coming:
                delay += wait(s, event)
        carried = [frozenset(s for s, reload in chosen.items() if reload.tier == tier) for tier in tiers]
        return Copying(
            tuple(
                Carried(link.tier, own, sum(map(self.recipes.place_bytes, own)), seconds, exposed)
                for link, own, seconds, exposed in zip(self.recipes.tiers, carried, busy, waited, strict=True)
                if own
            )
        )
