"""Request, offers of the techniques and conflicts between them -> the candidates: sets of techniques that the search considers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from typing import Any, Final

from memfit.errors import InputError
from memfit.techniques.choices import Choices, conflict, in_words
from memfit.techniques.registry import ALLOWED, BY_NAME, TECHNIQUES
from memfit.techniques.technique import CANNOT_HAVE_IT, Offer, Subject, listed


@dataclass(frozen=True, slots=True)
class Offers:
    """The settings of all techniques that this step can have, by the name of the technique.

    Attributes:
        values: settings that the search considers besides the baseline.
        why_not: why there are no others.
        on_request: further settings, used only where the user pins them.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    why_not: Mapping[str, str] = field(default_factory=dict)
    on_request: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def offers_to(subject: Subject, names: Sequence[str] | None = None) -> Offers:
    """The offers of all techniques, or of those with these names, for a step."""
    made: dict[str, Offer] = {t.name: t.offer(subject) for t in TECHNIQUES if names is None or t.name in names}
    return Offers(
        {name: offer.values for name, offer in made.items() if offer.values},
        {name: offer.why_not for name, offer in made.items() if offer.why_not},
        {name: offer.on_request for name, offer in made.items() if offer.on_request},
    )


def candidates(
    offers: Offers,
    *,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clips: bool = False,
) -> tuple[tuple[Choices, ...], tuple[str, ...]]:
    """Every candidate that respects what the user set, those with fewest techniques first; and what was asked for and is impossible, with its reason.

    Args:
        offers: settings that the step can have.
        allow: words of techniques.
        freeze: patterns of modules that are not trained.
        fixed: names of techniques and their settings; the number of micro-batches is not looked at.
        clips: whether the step clips the global gradient norm.

    Raises:
        InputError: a name or setting there is not, or one that this step cannot have.
    """
    check_names(allow, fixed or {})
    allow = tuple(dict.fromkeys(allow))
    pinned = _pinned(fixed or {}, offers)
    refused: list[str] = []
    settings: dict[str, tuple[Any, ...]] = {}
    asks_leave = set(ALLOWED.values())
    for technique in TECHNIQUES:
        name = technique.name
        if not technique.pinned:
            continue
        if name in pinned:
            settings[name] = (pinned[name],)
            continue
        others = [value for value in offers.values.get(name, ()) if (name, value) not in asks_leave]
        for word in allow:
            if word not in technique.allow:
                continue
            if technique.allow[word] in offers.values.get(name, ()):
                others.append(technique.allow[word])
            else:
                refused.append(f"{word}: {offers.why_not.get(name, CANNOT_HAVE_IT)}")
        settings[name] = (technique.baseline, *others)
    found: list[Choices] = []
    reasons: list[tuple[int, str, str]] = []  # techniques in it, the reason, both in words
    for chosen in product(*settings.values()):
        candidate = Choices(frozen=tuple(freeze), **dict(zip(settings, chosen, strict=True)))
        reason = conflict(candidate, clips=clips)
        if reason is None:
            found.append(candidate)
        else:
            reasons.append((len(candidate.techniques), reason, f"{in_words(candidate)}: {reason}"))
    if not found:
        raise InputError(f"fixed={dict(fixed or {})!r} cannot be honoured: {reasons[0][2]}")
    found.sort(key=lambda candidate: len(candidate.techniques))
    # Of what conflicts, the smallest sets say it all.
    told: dict[str, str] = {}
    for _, reason, sentence in sorted(reasons, key=lambda each: each[0]):
        told.setdefault(reason, sentence)
    return tuple(found), (*refused, *told.values())


# What other tools call what is named otherwise here, without signs and capitals.
_ELSEWHERE: Final = {
    **dict.fromkeys(("amp", "autocast", "mixedprecision", "bfloat16"), ("bf16", "precision")),
    **dict.fromkeys(("float16", "half"), ("fp16", "precision")),
    **dict.fromkeys(("int8", "adam8bit", "adamw8bit", "pagedadamw8bit", "8bitadam"), ("8bit", "state_format")),
    **dict.fromkeys(("int4", "nf4", "fp4", "qlora", "loadin4bit"), ("4bit", "frozen_weights")),
    **dict.fromkeys(("optimizerinbackward", "optimizerinbwd", "fusedbackward"), ("in_backward", "update")),
    **dict.fromkeys(("accumulation", "gradientaccumulation", "gradientaccumulationsteps", "accumulategradbatches"), ("micro_batches",)),
    **dict.fromkeys(("zero", "zerostage", "stage", "fsdp", "ddp"), ("sharding",)),
}  # fmt: skip
_OPEN: Final = re.compile("checkpoint|recompute|offload|accumulat")  # parts of words for what needs none


def _meant(name: object, known: Iterable[str]) -> str:
    """What to say of a word that there is not: the one that was meant, where that can be told."""
    plain = re.sub(r"[^a-z0-9]", "", str(name).lower())
    known = tuple(known)
    near = get_close_matches(plain, [re.sub(r"[^a-z0-9]", "", each) for each in known], 1, 0.8)
    found = [each for each in known if each in _ELSEWHERE.get(plain, ()) or re.sub(r"[^a-z0-9]", "", each) in near]
    if found:
        return f"; did you mean {found[0]!r}?"
    return "; recomputation, micro-batches and offloading need no word" if _OPEN.search(plain) else ""


def check_names(allow: Sequence[str], fixed: Mapping[str, Any]) -> None:
    """Raise InputError where a word can not be allowed, or a name is that of no choice."""
    if isinstance(allow, str):
        raise InputError(f"allow={allow!r} is a word: give a list of them, allow=[{allow!r}]")
    for name in allow:
        if name not in ALLOWED:
            raise InputError(
                f"allow={list(allow)!r}: {name!r} is nothing that can be allowed; there is {listed(ALLOWED)}{_meant(name, ALLOWED)}"
            )
    known = ["micro_batches", *(technique.name for technique in TECHNIQUES if technique.pinned)]
    for name in fixed:
        if name != "micro_batches" and name not in BY_NAME:
            raise InputError(
                f"fixed={dict(fixed)!r}: {name!r} is no choice; there is {listed(known)}{_meant(name, known)}"
            )


def _pinned(fixed: Mapping[str, Any], offers: Offers) -> dict[str, Any]:
    pinned: dict[str, Any] = {}
    for name, value in fixed.items():
        if name == "micro_batches":
            continue
        technique = BY_NAME[name]
        technique.check(value)
        possible = tuple(dict.fromkeys((*offers.values.get(name, ()), *offers.on_request.get(name, ()))))
        if value != technique.baseline and value not in possible:
            why = offers.why_not.get(name, CANNOT_HAVE_IT)
            have = f"; there is {listed((technique.baseline, *possible))}" if possible else ""
            raise InputError(f"fixed {name}={value!r} cannot be honoured: {why}{have}")
        pinned[name] = value
    return pinned
