"""What the user set, what the step can have, and what cannot stand together -> the ways to run the step that are to be weighed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Final

from memfit.errors import InputError
from memfit.values.choices import VALUES, Choices, conflict, in_words

ALLOWED: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "8bit": ("state_format", "8bit"),
    "in_backward": ("update", "in_backward"),
}  # what changes results, or leaves no gradients to look at after a step, is weighed only where the user names it


@dataclass(frozen=True, slots=True)
class Offers:
    """What this step could have besides running as it is.

    Attributes:
        values: field of `Choices` -> values it could take beside plain PyTorch's.
        why_not: field of `Choices` -> why it can take no other.
        on_request: field of `Choices` -> further values that are taken where the user fixes them, and not weighed otherwise.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    why_not: Mapping[str, str] = field(default_factory=dict)
    on_request: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def ways(
    offers: Offers,
    *,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clips: bool = False,
) -> tuple[tuple[Choices, ...], tuple[str, ...]]:
    """Every way to run the step that respects what the user set, the plainest first; and what was asked for and cannot be, each with its reason.

    Args:
        offers: what could be.
        allow: names of `ALLOWED`.
        freeze: patterns of modules that are not trained.
        fixed: fields of `Choices` and their values; the number of micro-batches is not looked at.
        clips: whether the step clips the global gradient norm.

    Raises:
        InputError: a name or value there is not, or one that this step cannot have.
    """
    if isinstance(allow, str):
        raise InputError(f"allow={allow!r} is a word: give a list of them, allow=[{allow!r}]")
    allow = tuple(dict.fromkeys(allow))
    for name in allow:
        if name not in ALLOWED:
            raise InputError(
                f"allow={list(allow)!r}: {name!r} is nothing that can be allowed; there is {_listed(ALLOWED)}"
            )
    pinned = _pinned(fixed or {}, offers)
    refused: list[str] = []
    values: dict[str, tuple[Any, ...]] = {}
    needs_leave = dict.fromkeys(ALLOWED.values())
    for each in fields(Choices):
        name, plain = each.name, each.default
        if name in {"micro_batches", "micro_batch_size", "weights", "frozen", "unforced"}:
            continue
        if name in pinned:
            values[name] = (pinned[name],)
            continue
        others = [v for v in offers.values.get(name, ()) if (name, v) not in needs_leave]
        for word in allow:
            field_name, value = ALLOWED[word]
            if field_name != name:
                continue
            if value in offers.values.get(name, ()):
                others.append(value)
            else:
                refused.append(f"{word}: {offers.why_not.get(name, 'this step cannot have it')}")
        values[name] = (plain, *others)
    found: list[Choices] = []
    reasons: list[str] = []
    for chosen in product(*values.values()):
        way = replace(Choices(frozen=tuple(freeze)), **dict(zip(values, chosen, strict=True)))
        reason = conflict(way, clips=clips)
        if reason is None:
            found.append(way)
        else:
            reasons.append(f"{in_words(way)}: {reason}")
    if not found:
        raise InputError(f"fixed={dict(fixed or {})!r} cannot be honoured: {reasons[0]}")
    found.sort(key=lambda way: sum(1 for _ in way.told_apart()))
    # Of what cannot stand together, the smallest sets say it all.
    plainest = sorted(reasons, key=lambda r: r.partition(": ")[0].count(","))
    told: dict[str, str] = {}
    for reason in plainest:
        told.setdefault(reason.partition(": ")[2], reason)
    return tuple(found), (*refused, *told.values())


def _pinned(fixed: Mapping[str, Any], offers: Offers) -> dict[str, Any]:
    known = [f.name for f in fields(Choices) if f.name not in {"micro_batch_size", "weights", "frozen", "unforced"}]
    pinned: dict[str, Any] = {}
    for name, value in fixed.items():
        if name == "frozen":
            raise InputError(f"fixed={dict(fixed)!r}: what is frozen is named by freeze=[...]")
        if name not in known:
            raise InputError(f"fixed={dict(fixed)!r}: {name!r} is no choice; there is {_listed(known)}")
        if name == "micro_batches":
            continue
        plain = getattr(Choices(), name)
        if name in VALUES and value not in VALUES[name]:
            raise InputError(f"fixed {name}={value!r}: there is {_listed(VALUES[name])}")
        if type(value) is not type(plain):
            raise InputError(
                f"fixed {name}={value!r}: {'a whole number' if isinstance(plain, int) else 'a word'} is needed"
            )
        possible = tuple(dict.fromkeys((*offers.values.get(name, ()), *offers.on_request.get(name, ()))))
        if value != plain and value not in possible:
            why = offers.why_not.get(name, "this step cannot have it")
            have = f"; there is {_listed((plain, *possible))}" if possible else ""
            raise InputError(f"fixed {name}={value!r} cannot be honoured: {why}{have}")
        pinned[name] = value
    return pinned


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
