"""What a technique is: one way to make a training step hold less, or run in the bytes there are, told in one file.

A technique says what it offers a given step, what it conflicts with and why, the best it could do for bytes and seconds, how a step runs under it, its words
for people, what is commonly claimed of it, and its keys in other libraries' configurations. Everything else (the search, the explanation, the checks of what a
user pins) goes through the list in `techniques.registry` and knows no technique by name.

These files are read by the planner, which needs no torch: torch and whatever is built on it are imported inside the methods that run on a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from memfit.errors import InputError

Setting = str | int | tuple[str, ...]

CANNOT_HAVE_IT: Final = "this step cannot have it"


@dataclass(frozen=True, slots=True)
class Offer:
    """What one technique could do for one step.

    Attributes:
        values: settings worth weighing besides the baseline.
        on_request: further settings that are taken where the user pins them, and not weighed otherwise.
        why_not: why there are no other settings; "" where nobody would ask.
    """

    values: tuple[Setting, ...] = ()
    on_request: tuple[Setting, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class OptimisticBound:
    """The best a technique could do, added to a step; known before the step is captured with it.

    Attributes:
        saved_bytes: the most it takes off any moment of the step; None where it does what recomputation does, and a bound for that says nothing.
        seconds: the least it adds to a step; negative where it may be faster.
    """

    saved_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LossHead:
    """Logits of many classes and the cross entropy of them, as a trace shows them.

    Attributes:
        rows, classes: shape of the logits.
        bytes: of everything as large as the logits that is made on the way, there and back.
        first, last: events between which any of it lives, where autograd keeps what it saves.
        seconds: of one pass's operations that make or read any of it, the products among them.
    """

    rows: int
    classes: int
    bytes: int
    first: int
    last: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamingFacts:
    """What streaming the layers of a step would take, at the least.

    Attributes:
        again_seconds: of computing all layers once more in backward.
        copy_seconds: of copies that no order of copying can leave out.
    """

    again_seconds: float
    copy_seconds: float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a trace says of one step, in numbers: all that a technique's bound and claim are made of.

    Attributes:
        micro_batches: in which the step was captured.
        parameter_bytes, gradient_bytes, state_bytes, activation_bytes: by category, whenever they are there.
        step_seconds, update_seconds: of the whole step in which nothing is dropped, and of the optimizer in it.
        head: the loss head; None where there is none.
        state_transfer_seconds: to bring the optimizer's state to the device and back once; None where it can lie nowhere else.
        streaming: of the layers that could be streamed; None where none can.
    """

    micro_batches: int = 1
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    head: LossHead | None = None
    state_transfer_seconds: float | None = None
    streaming: StreamingFacts | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The step that techniques are offered to.

    Attributes:
        model: the user's `torch.nn.Module`.
        optimizer: made for the parameters that are trained; None where there is none.
        fixed: what the user pinned, by the name of the technique, and "micro_batches".
        facts: of the baseline step; None before it is captured: what depends on it offers nothing then.
        head_sets_peak: whether the step holds most in its loss head.
        capacity_bytes: of each tier that is open, what may lie there; None for no bound.
        streamed: path of the blocks that could be streamed; "" for none.
    """

    model: Any
    optimizer: Any
    fixed: Mapping[str, Any] = field(default_factory=dict)
    facts: StepFacts | None = None
    head_sets_peak: bool = False
    capacity_bytes: Mapping[str, int | None] = field(default_factory=dict)
    streamed: str = ""


@dataclass(frozen=True, slots=True)
class DialectKey:
    """A key of another library's configuration that settles a technique.

    Attributes:
        dialect: whose, "deepspeed".
        key: path of the key, with dots.
        settings: value of the key -> setting of the technique; another value settles nothing.
        when: path of a key that has to be true for this one to count; "" for none.
        allowed: the setting changes results, so it is a word of `allow=` as well. Where the key says "auto", the word is all that follows.
    """

    dialect: str
    key: str
    settings: Mapping[object, Setting]
    when: str = ""
    allowed: bool = False


class Technique(ABC):
    """One technique. A subclass is one file; its only instance stands in `techniques.registry.TECHNIQUES`.

    Attributes:
        name: in `fixed=` and in `Choices`.
        baseline: the setting under which the step is plain PyTorch's.
        settings: all settings where they can be listed; None where they depend on the model.
        allow: word of `allow=` -> the setting that is weighed only where the user names the word.
        page: of the documentation.
        dialect_keys: in other libraries' configurations.
        unsaid: of a library whose keys cannot say it, what the reader of a written configuration has to do instead; `{setting}` stands for the setting.
        pinned: whether the user may pin it with `fixed=`.
        baseline_words: the baseline in a few words.
        expected_faster: whether people expect a step to be faster with it; where it is not, the plan says so.
        lasting: whether an engine goes on with its setting where it plans again for another batch, as model or optimizer are made for it.
        sizes_state: whether the optimizer's state takes other bytes with it, wherever it lies.
        reorders: whether additions come in another order than plain PyTorch's.
        repeatable: operations of its own, "library::name", that are functions of their inputs alone, bit for bit: recomputation may run them again.
    """

    name: ClassVar[str]
    baseline: ClassVar[Setting]
    settings: ClassVar[tuple[Setting, ...] | None] = None
    allow: ClassVar[Mapping[str, Setting]] = {}
    page: ClassVar[str] = ""
    dialect_keys: ClassVar[Sequence[DialectKey]] = ()
    unsaid: ClassVar[Mapping[str, str]] = {}
    pinned: ClassVar[bool] = True
    baseline_words: ClassVar[str] = "the step without it"
    expected_faster: ClassVar[bool] = False
    lasting: ClassVar[bool] = False
    sizes_state: ClassVar[bool] = False
    reorders: ClassVar[bool] = False
    repeatable: ClassVar[Sequence[str]] = ()

    # -- for people ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self, setting: Any) -> str:
        """The setting in a few words, for sentences: "8-bit optimizer state"."""

    def asked_by(self, setting: Any) -> str:
        """As the user would ask for it; its words where it needs no asking."""
        return self.words(setting)

    @abstractmethod
    def claim(self, without: StepFacts, used: StepFacts, setting: Any) -> tuple[int, str]:
        """Bytes that are commonly said to be saved, and that formula in words: told beside what is predicted.

        Args:
            without, used: the step without the technique and with it, nothing dropped in either.
            setting: how it is used.
        """

    def results(self, setting: Any) -> str:
        """What computes the same results, bit for bit, where plain PyTorch does not: "PyTorch's own bf16 autocast"; "" where it does."""
        del setting
        return ""

    # -- for the search ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def offer(self, subject: Subject) -> Offer:
        """What this technique could do for a step."""

    def conflict(self, setting: Any, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Why it cannot stand with what else is used; None when it can.

        Args:
            setting: of this technique.
            used: settings of all techniques in use, by name.
            clips: whether the step clips the global gradient norm.
        """
        del setting, used, clips
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound | None:
        """The best it could do for this step, whatever its setting; None where nobody knows.

        No fewer seconds, no more bytes: where it is wrong, a faster plan is missed.
        """
        del facts
        return None

    def check(self, setting: Any) -> None:
        """See that a pinned setting is one there is.

        Raises:
            InputError: it is not.
        """
        if self.settings is not None and setting not in self.settings:
            raise InputError(f"fixed {self.name}={setting!r}: there is {listed(self.settings)}")
        if type(setting) is not type(self.baseline):
            kind = "a whole number" if isinstance(self.baseline, int) else "a word"
            raise InputError(f"fixed {self.name}={setting!r}: {kind} is needed")

    # -- for a step ----------------------------------------------------------------------------------------------------------

    def region(self, model: Any, setting: Any, device_type: str) -> AbstractContextManager[object]:
        """What forward and loss of a micro-batch run inside."""
        del model, setting, device_type
        return nullcontext()

    def convert(self, model: Any, setting: Any) -> None:
        """Make the model as the technique has it, for good: other parameters' types, other modules. Done twice it is done once.

        `memfit.apply` calls it on the user's model, before the optimizer is made; a capture on a model whose tensors are lent, which is put back whole.
        """
        del model, setting

    def why_no_optimizer(self, optimizer: Any, setting: Any) -> str | None:
        """Why this optimizer cannot be used under the technique; None when it can."""
        del optimizer, setting
        return None

    def optimizer_settings(self, setting: Any) -> Mapping[str, Any]:
        """What `optimizers.chunked.ChunkedOptimizer` is given under it; nothing where any optimizer stays as it is."""
        del setting
        return {}


def listed(names: Any) -> str:
    """Names or values as a sentence lists them."""
    return ", ".join(repr(name) for name in names)
