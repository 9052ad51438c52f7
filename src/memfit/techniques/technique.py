"""The base class of techniques. A technique is one way to reduce the memory of a training step, described in one file.

A technique says which settings a given step can have, what it conflicts with and why, the best it could do for bytes and seconds, how a step runs under it,
its description for people, what is commonly claimed of it, and its keys in other libraries' configurations. Everything else (the search, the explanation,
the checks of pinned choices) goes through the list in `techniques.registry` and knows no technique by name.

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
    """The settings of one technique that one step can have.

    Attributes:
        values: settings that the search considers besides the baseline.
        on_request: further settings, used only where the user pins them.
        why_not: why there are no other settings; "" where no reason is needed.
    """

    values: tuple[Setting, ...] = ()
    on_request: tuple[Setting, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class OptimisticBound:
    """The best a technique could do, added to a step; known before the step is captured with it.

    Attributes:
        saved_bytes: the most it takes off any moment of the step; None where it does what recomputation does, and a bound for that says nothing.
        seconds: the least it adds to a step; negative where the step may become faster.
        within: the events, first and last, between which it saves them; None for all moments. At others the step holds what it holds without.
        of_state: whether these bytes are those of the optimizer's state and of what the update makes beside it, which no two techniques save twice.
    """

    saved_bytes: int | None
    seconds: float
    within: tuple[int, int] | None = None
    of_state: bool = False


@dataclass(frozen=True, slots=True)
class LossHead:
    """Logits of many classes and the cross entropy of them, as a trace shows them.

    Attributes:
        rows, classes: shape of the logits.
        bytes: of all tensors as large as the logits that forward and backward make for the loss.
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
    """The least that streaming the layers of a step would cost.

    Attributes:
        again_seconds: of recomputing all layers in backward.
        copy_seconds: of the copies that every schedule needs.
    """

    again_seconds: float
    copy_seconds: float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The figures of one step, from its trace, that a technique's bound and claim use.

    Attributes:
        micro_batches: in which the step was captured.
        pass_events: events of forward and backward.
        parameter_bytes, gradient_bytes, state_bytes, activation_bytes: totals by category over the step.
        frozen_bytes: of parameters that get no gradient, at most.
        update_temporary_bytes: that the optimizer holds while it updates, beside parameters, gradients and state. A foreach update makes some for all
            parameters at once.
        step_seconds, update_seconds: of the whole step in which nothing is dropped, and of the optimizer in it.
        head: the loss head; None where there is none.
        state_transfer_seconds: to copy the optimizer's state to the device and back once; None where it cannot be offloaded.
        streaming: of the layers that could be streamed; None where none can.
    """

    micro_batches: int = 1
    pass_events: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    frozen_bytes: int = 0
    update_temporary_bytes: int = 0
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
        facts: of the baseline step; None before it is captured: techniques that depend on it offer nothing then.
        head_sets_peak: whether the peak of the step is in its loss head.
        capacity_bytes: of each lower tier that may be used, the bytes that may be offloaded to it; None for no limit.
        streamed: path of the blocks that could be streamed; "" for none.
        device_kind: of the device that the step is planned for, "cuda" or "cpu".
    """

    model: Any
    optimizer: Any
    fixed: Mapping[str, Any] = field(default_factory=dict)
    facts: StepFacts | None = None
    head_sets_peak: bool = False
    capacity_bytes: Mapping[str, int | None] = field(default_factory=dict)
    streamed: str = ""
    device_kind: str = "cpu"


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
        baseline: the setting under which the step is that of plain PyTorch.
        settings: all settings where they can be listed; None where they depend on the model.
        allow: word of `allow=` -> the setting that is weighed only where the user names the word.
        page: of the documentation.
        dialect_keys: in other libraries' configurations.
        unsaid: by library whose configuration has no key for it, what the user has to do instead; `{setting}` stands for the setting.
        pinned: whether the user may pin it with `fixed=`.
        baseline_words: the baseline in a few words.
        expected_faster: whether people expect a step to be faster with it; where it is not, the plan says so.
        lasting: whether an engine keeps its setting when it plans again for another batch, because model or optimizer were made for it.
        sizes_state: whether it changes the bytes of the optimizer's state, wherever the state is.
        reorders: whether additions come in another order than in plain PyTorch.
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
        """The settings that a step can have."""

    def conflict(self, setting: Any, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Why it cannot be combined with the other techniques in use; None when it can.

        Args:
            setting: of this technique.
            used: settings of all techniques in use, by name.
            clips: whether the step clips the global gradient norm.
        """
        del setting, used, clips
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound | None:
        """The best it could do for this step, whatever its setting; None where that is not known.

        A bound that promises too little makes the search miss a faster plan.
        """
        del facts
        return None

    def goes_beyond(self, setting: Any, known: Any) -> bool:
        """Whether a setting does more of what another one does, so that `bound_beyond` holds."""
        del setting, known
        return False

    def bound_beyond(self, facts: StepFacts, known: Any) -> OptimisticBound:
        """The most that a setting beyond a known one could still do to a step that has that; of seconds, beside what the known one did.

        Args:
            facts: of the step without it.
            known: setting.
        """
        raise NotImplementedError

    def check(self, setting: Any) -> None:
        """Check that a pinned setting exists.

        Raises:
            InputError: it does not.
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
