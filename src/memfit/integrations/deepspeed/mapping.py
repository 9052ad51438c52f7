"""What DeepSpeed's keys mean to memfit: one table from keys to choices of a plan, and one of choices that no key can say.

`config` asks here which choices a configuration settles, `writing` what it cannot write down. A technique with a key of its own in DeepSpeed is one more
row. Two things follow from several keys together and are not rows: the number of micro-batches (`batch`), and clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memfit.integrations.deepspeed.values import AUTO

Setting = str | int | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """One key, and the choice of a plan that it settles.

    Attributes:
        key: its path, with dots.
        choice: name of the technique whose setting it is.
        settings: value of the key -> setting of the choice; another value settles nothing.
        when: path of a key that has to be true for this one to count; "" for none.
        allowed: the setting changes results, so it is a word of `allow=` as well. Where the key says "auto", the word is all that follows.
    """

    key: str
    choice: str
    settings: Mapping[object, Setting]
    when: str = ""
    allowed: bool = False


# Where something lies that DeepSpeed moves, as a plan names the place.
PLACES: Final[Mapping[object, str]] = {"none": "device", "cpu": "host", "nvme": "disk"}

KEYS: Final = (
    KeyMapping("bf16.enabled", "precision", {True: "bf16"}, allowed=True),
    KeyMapping("fp16.enabled", "precision", {True: "fp16"}, allowed=True),
    KeyMapping(
        "torch_autocast.dtype",
        "precision",
        {"bf16": "bf16", "fp16": "fp16"},
        when="torch_autocast.enabled",
        allowed=True,
    ),
    KeyMapping("zero_optimization.offload_optimizer.device", "state_place", PLACES),
    # Here the place; which blocks lie there DeepSpeed does not say.
    KeyMapping("zero_optimization.offload_param.device", "streamed", PLACES),
)

# What a choice is where no key says anything about it. Of the others DeepSpeed says nothing then, and the planner chooses.
UNLESS_ASKED: Final[Mapping[str, Setting]] = {"precision": "full"}


@dataclass(frozen=True, slots=True)
class Unsaid:
    """A choice that no key of DeepSpeed's can say.

    Attributes:
        choice: name of the technique whose setting it is.
        baseline: its setting in plain PyTorch, of which nothing needs to be said.
        words: what the reader of a written configuration has to do instead; `{setting}` stands for the setting.
    """

    choice: str
    baseline: Setting
    words: str


UNSAID: Final = (
    Unsaid("state_format", "32bit", "optimizer state in 8 bits: make such an optimizer in the script"),
    Unsaid("update", "after", "the update inside backward: DeepSpeed updates after it"),
    Unsaid("frozen", (), "what is frozen ({setting}): set requires_grad to false in the script"),
    Unsaid("loss_chunks", 1, "the loss head in {setting} chunks: the model would have to do it itself"),
    Unsaid(
        "streamed", "", "that the layers of {setting} are what is moved: DeepSpeed moves every parameter above a size"
    ),
)


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
            if each.allowed:
                words.setdefault(each.choice, []).extend(str(setting) for setting in each.settings.values())
        elif value in each.settings:
            fixed[each.choice] = each.settings[value]
    for choice, setting in UNLESS_ASKED.items():
        if choice not in left_open:
            fixed.setdefault(choice, setting)
    changing = {(each.choice, setting) for each in KEYS if each.allowed for setting in each.settings.values()}
    for choice, setting in fixed.items():
        words[choice] = [str(setting)] if (choice, setting) in changing else []
    return Asked(fixed, tuple(word for each in words.values() for word in each))


def left_out(choices: Any) -> tuple[str, ...]:
    """What of a plan's choices no key can say, in whole clauses."""
    found = []
    for each in UNSAID:
        setting = getattr(choices, each.choice)
        if setting != each.baseline:
            shown = ", ".join(setting) if isinstance(setting, tuple) else setting
            found.append(each.words.format(setting=shown))
    return tuple(found)
