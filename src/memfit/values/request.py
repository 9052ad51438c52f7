"""What the user asked of a plan: bytes on each tier, what may change results, what is frozen, fixed and clipped. A value: frozen, torch-free, JSON both ways.

The public functions take these as keyword arguments, build one `Request` of them, once, and hand on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from types import MappingProxyType
from typing import Any, Final

from memfit.errors import BudgetError, InputError
from memfit.units import parse_bytes

Budget = str | int

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TierBudget:
    """Bytes allowed on one tier.

    Attributes:
        given: as the user wrote it: "8GiB", "80%", 1_000_000.
        bytes: that number on this computer; 0 where nothing may be offloaded there.
    """

    given: Budget
    bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked; whatever is set here is a constraint, never a hint.

    Attributes:
        budget: bytes a step may hold on its device; None where budgets are given later, one after the other.
        host_budget: bytes on the nearest lower tier: host memory for a GPU, the disk for a CPU; None for the default.
        disk_budget: bytes on the disk of a computer with a GPU; None for none.
        allow: what may change results, by name.
        freeze: patterns of the modules that are not trained.
        fixed: choices that the user pinned, by name.
        clip_norm: global gradient norm to clip to; None for no clipping.
        device: name of a device that this computer does not have; None for the one that the model is on.
        folder: for what is offloaded to disk; None for the default (MEMFIT_OFFLOAD_DIR).
        settled: names in `fixed` that are not the user's: another library's trainer has settled them, so no way out may name them.
    """

    budget: TierBudget | None = None
    host_budget: TierBudget | None = None
    disk_budget: TierBudget | None = None
    allow: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    device: str | None = None
    folder: str | None = None
    settled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        number = isinstance(self.clip_norm, (int, float)) and not isinstance(self.clip_norm, bool)
        if self.clip_norm is not None and not (number and self.clip_norm > 0):
            raise InputError(f"clip_norm={self.clip_norm!r}: a positive number is needed, or None for no clipping")

    @classmethod
    def of(
        cls,
        capacity: Callable[[str], int],
        *,
        budget: Budget | None = None,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
        allow: Iterable[str] = (),
        freeze: Iterable[str] = (),
        fixed: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        device: str | None = None,
        folder: str | PathLike[str] | None = None,
    ) -> Request:
        """From the arguments of a public function.

        Args:
            capacity: total bytes of "device", "host" (the nearest lower tier) and "disk", to convert budgets that are shares; called only for budgets given.
            budget, host_budget, disk_budget, allow, freeze, fixed, clip_norm, device: as for `memfit.plan`.
            folder: for what is offloaded to disk.

        Raises:
            BudgetError: a number of bytes cannot be read.
            InputError: something is not of the form it must have.
        """

        def read(given: Budget | None, tier: str, name: str) -> TierBudget | None:
            if given is None:
                return None
            nothing = tier != "device" and given == 0
            try:
                return TierBudget(given, 0 if nothing else parse_bytes(given, total_bytes=capacity(tier)))
            except BudgetError as error:
                raise BudgetError(f"{name}: {error}") from None

        on_device = read(budget, "device", "budget")
        for name, value in (("allow", allow), ("freeze", freeze)):
            if not isinstance(value, Iterable):
                raise InputError(f"{name}={value!r} is no list of words: write {name}=[...], or leave it out")
        if isinstance(allow, str):
            raise InputError(f"allow={allow!r} is a word: give a list of them, allow=[{allow!r}]")
        if isinstance(freeze, str):
            raise InputError(f"freeze={freeze!r} is one pattern: give a list of them, freeze=[{freeze!r}]")
        if fixed is not None and not isinstance(fixed, Mapping):
            raise InputError(f'fixed={fixed!r} is no mapping: write names and values, such as {{"micro_batches": 4}}')
        return cls(
            on_device,
            read(host_budget, "host", "host_budget"),
            read(disk_budget, "disk", "disk_budget"),
            tuple(allow),
            tuple(freeze),
            {name: value for name, value in (fixed or _NOTHING).items() if value is not None},
            clip_norm,
            device,
            None if folder is None else str(folder),
        )

    @property
    def micro_batches(self) -> int | None:
        """The number that the user fixed; None where it is searched."""
        return self.fixed.get("micro_batches")

    @property
    def numbers_are_open(self) -> bool:
        """Whether the user fixed a number of micro-batches and may as well fix another."""
        return self.micro_batches is not None and "micro_batches" not in self.settled

    @property
    def told_fixed(self) -> dict[str, Any]:
        """What of `fixed` is the user's, as a way out repeats it."""
        return {name: value for name, value in self.fixed.items() if name not in self.settled}

    def fixing(self, **choices: Any) -> Request:
        """The same, with more choices fixed, or others."""
        return replace(self, fixed={**self.fixed, **choices})

    def settling(self, **choices: Any) -> Request:
        """The same, with choices fixed that are not the user's."""
        return replace(self.fixing(**choices), settled=tuple(dict.fromkeys((*self.settled, *choices))))

    def leaving_open(self, name: str) -> Request:
        """The same, with one choice no longer fixed."""
        return replace(self, fixed={key: value for key, value in self.fixed.items() if key != name})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        lists = {name: list(getattr(self, name)) for name in ("allow", "freeze", "settled")}
        return {**asdict(self), **lists, "fixed": dict(self.fixed)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError, InputError: these are not the fields of a request, or not such values.
        """
        budgets = {
            name: None if data[name] is None else TierBudget(**data[name])
            for name in ("budget", "host_budget", "disk_budget")
        }
        lists = {name: tuple(map(str, data.get(name, ()))) for name in ("allow", "freeze", "settled")}
        return cls(**{**data, **budgets, **lists, "fixed": dict(data["fixed"])})
