"""What DeepSpeed's keys mean to memfit, as techniques tell it: from keys to choices of a plan, and the choices that no key can say.

`config` asks here which choices a configuration settles, `writing` what it cannot write down. Rows stand with their techniques
(`Technique.dialect_keys`, `Technique.unsaid`). Two things follow from several keys together and are not rows: the number of micro-batches (`batch`),
and clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memfit.integrations.deepspeed.values import AUTO
from memfit.techniques.registry import BY_NAME, TECHNIQUES
from memfit.techniques.technique import DialectKey, Setting


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """One key, and the choice of a plan that it settles.

    Attributes:
        choice: name of the technique whose setting it is.
        row: what the technique says of it.
    """

    choice: str
    row: DialectKey

    @property
    def key(self) -> str:
        """Its path, with dots."""
        return self.row.key

    @property
    def when(self) -> str:
        """Path of a key that has to be true for this one to count; "" for none."""
        return self.row.when


KEYS: Final = tuple(
    KeyMapping(technique.name, row)
    for technique in TECHNIQUES
    for row in technique.dialect_keys
    if row.dialect == "deepspeed"
)

# What a choice is where no key says anything about it. Of the others DeepSpeed says nothing then, and the planner chooses.
UNLESS_ASKED: Final[Mapping[str, Setting]] = {"precision": "full"}


# Names of the techniques that no key of DeepSpeed's can say.
UNSAID: Final = tuple(technique.name for technique in TECHNIQUES if "deepspeed" in technique.unsaid)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a configuration asks for.

    Attributes:
        fixed: choice -> setting.
        allow: words of `allow=`, for what is fixed or left open.
    """

    fixed: dict[str, Setting] = field(default_factory=dict)
    allow: tuple[str, ...] = ()


def asked(said: Callable[[str], object]) -> Asked:
    """The choices that a configuration settles.

    Args:
        said: value of a key by its path; None where the file says nothing.
    """
    fixed: dict[str, Setting] = {}
    words: dict[str, list[str]] = {}  # of allow=, by choice; where the choice is fixed its setting alone
    left_open = set()
    for each in KEYS:
        value = None if each.when and said(each.when) is not True else said(each.key)
        if value is AUTO:
            left_open.add(each.choice)
            if each.row.allowed:
                words.setdefault(each.choice, []).extend(str(setting) for setting in each.row.settings.values())
        elif value in each.row.settings:
            fixed[each.choice] = each.row.settings[value]
    for choice, setting in UNLESS_ASKED.items():
        if choice not in left_open:
            fixed.setdefault(choice, setting)
    changing = {(each.choice, setting) for each in KEYS if each.row.allowed for setting in each.row.settings.values()}
    for choice, setting in fixed.items():
        words[choice] = [str(setting)] if (choice, setting) in changing else []
    return Asked(fixed, tuple(word for each in words.values() for word in each))


def left_out(choices: Any) -> tuple[str, ...]:
    """What of a plan's choices no key can say, in whole clauses."""
    found = []
    for name in UNSAID:
        setting = choices.used.get(name)
        if setting is not None:
            shown = ", ".join(setting) if isinstance(setting, tuple) else setting
            found.append(BY_NAME[name].unsaid["deepspeed"].format(setting=shown))
    return tuple(found)
