"""Calls of modules that are made again in backward: in forward nothing that autograd saves in them is kept, only their arguments.

As `torch.utils.checkpoint` does: the modules are called a second time under hooks that take the saved tensors, one after the other, and are stopped at the last
one that is asked for. Forward need not be followed, since what runs again is the user's own code on the same arguments. What the plan has found to be the
same both times is checked: how many tensors are saved, and the shape and dtype of each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit import dispatch
from memfit.engine.geometry import written_after
from memfit.engine.kept import FREED
from memfit.errors import EngineError
from memfit.step import generators
from memfit.step.autocast import AutocastState
from memfit.step.call_arguments import copied, found, tensors_passed
from memfit.step.process_generators import outside_torch
from memfit.values.script import RepeatedCalls

Keep = Callable[[torch.Tensor], Any]
Forward = Callable[..., Any]


class _EnoughError(BaseException):
    """Ends a repeated call: what backward asks for has been saved. Models that go on after any `Exception` end all the same."""


class _Passed:
    """A tensor argument, without the graph that it comes from."""

    __slots__ = ("leaf", "requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch._C._DisableTorchDispatch():  # else the mode that is on would be asked, in Python
            self.tensor = tensor.detach()
        self.version = dispatch.version_of(tensor)
        self.requires_grad, self.leaf = tensor.requires_grad, tensor.is_leaf

    def again(self) -> torch.Tensor:
        if dispatch.version_of(self.tensor) != self.version:
            raise written_after(self.tensor, self.version)
        tensor = self.tensor.detach().requires_grad_(self.requires_grad)
        # Autocast keeps its casts of leaves, as if they were weights, and a leaf cannot be written in place.
        return tensor if self.leaf else tensor.view_as(tensor)


class _Returned:
    """A tensor argument that an earlier one of the calls returned.

    Attributes:
        call: its position among the calls.
        place: of the tensor among what it returned.
    """

    __slots__ = ("call", "place")

    def __init__(self, call: int, place: int) -> None:
        self.call, self.place = call, place


class DroppedTensor:
    """What autograd holds in place of a tensor that was saved in repeated calls."""

    __slots__ = ("__weakref__", "calls", "number")

    def __init__(self, calls: MadeCalls, number: int) -> None:
        self.calls = calls
        self.number = number

    def saved_tensor(self) -> torch.Tensor:
        """The tensor that autograd saved."""
        return self.calls.saved_tensor(self.number)


class MadeCalls:
    """Calls that were made in forward one after the other, until backward has what was saved in them.

    Args:
        script: which calls.
        model: whose buffers.
        retain: backward may run more than once, so the arguments stay.
        made_again: called with the number of operations when the calls have been made again.
        drawn: whether forward has drawn random numbers that are not torch's.

    Attributes:
        packed: tensors that autograd has saved in them.
    """

    def __init__(
        self,
        script: RepeatedCalls,
        model: nn.Module,
        *,
        retain: bool,
        made_again: Callable[[int], None],
        drawn: Callable[[], bool],
    ) -> None:
        self.script = script
        self._model = model
        self.packed = 0
        self._retain, self._made_again, self._drawn = retain, made_again, drawn
        self._calls: list[tuple[Forward, Any]] = []  # with the arguments
        self._returned: list[list[weakref.ref[torch.Tensor]]] = []
        self._freed = False
        self._autocast: AutocastState | None = None
        self._states: list[tuple[torch.Tensor, torch.device]] = []
        self._dropped = frozenset(script.dropped)
        # What is to be saved again. Weakly: what autograd holds no more is never asked for, and the arguments must not outlive a loss that is thrown away.
        self._waiting: dict[int, tuple[weakref.ref[DroppedTensor], torch.Size, torch.dtype]] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    @property
    def made(self) -> int:
        """How many of the calls have been made."""
        return len(self._calls)

    def begins(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The next of the calls: this forward of a module, with these arguments."""
        if not self._calls:
            device = next((t.device for t in dispatch.tensors_in((args, kwargs)) if t.device.type != "cpu"), _CPU)
            self._autocast = AutocastState.present(device)
            if self.script.random:
                drawn_from = dict.fromkeys((_CPU, device))
                self._states = [(generators.of_device(each).get_state(), each) for each in drawn_from]
        # One for each tensor, as attention asks whether its query is its key.
        noted: dict[int, _Passed | _Returned] = {}

        def argument(tensor: torch.Tensor) -> _Passed | _Returned:
            if id(tensor) not in noted:
                noted[id(tensor)] = self._argument(tensor)
            return noted[id(tensor)]

        self._calls.append((forward, copied((args, kwargs), torch.Tensor, argument)))

    def _argument(self, tensor: torch.Tensor) -> _Passed | _Returned:
        for call, returned in enumerate(self._returned):
            for place, reference in enumerate(returned):
                if reference() is tensor:
                    return _Returned(call, place)
        return _Passed(tensor)

    def returns(self, result: Any) -> None:
        """The call that began last has returned this. Weakly: what forward lets go must go."""
        if len(self._calls) < len(self.script.modules):
            self._returned.append([weakref.ref(tensor) for tensor in dispatch.tensors_in(result)])

    def packing(self, keep: Keep) -> Keep:
        """The hook that says what autograd is to hold in place of a tensor that it saves.

        Args:
            keep: what to hold for those that are not dropped.
        """
        dropped, waiting = self._dropped, self._waiting

        def pack(tensor: torch.Tensor) -> Any:
            number = self.packed
            self.packed = number + 1
            if number not in dropped:
                return keep(tensor)
            handle = DroppedTensor(self, number)
            waiting[number] = weakref.ref(handle), tensor.shape, tensor.dtype
            return handle

        return pack

    def saved_tensor(self, number: int) -> torch.Tensor:
        """A tensor that was dropped.

        Raises:
            EngineError: it was freed already, or the calls were not the same the second time.
            RuntimeError: an argument was written since forward.
        """
        if number not in self._tensors:
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    self._make_again()
            else:
                self._make_again()
        return self._tensors[number] if self._retain else self._tensors.pop(number)

    def _make_again(self) -> None:
        if self._freed:
            raise EngineError(FREED)
        if self._drawn():
            raise self._differs("would draw other random numbers of Python's or numpy's")
        saved = 0
        waiting = {n: (shape, dtype) for n, (handle, shape, dtype) in self._waiting.items() if handle() is not None}
        tensors, last = self._tensors, max(waiting)

        def take(tensor: torch.Tensor) -> None:
            nonlocal saved
            number, saved = saved, saved + 1
            expected = waiting.get(number)
            if expected is None:
                return
            shape, dtype = expected
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise self._differs(
                    f"saved a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) where it had saved {tuple(shape)} ({dtype})"
                )
            tensors[number] = tensor.detach()
            if number == last:
                raise _EnoughError

        assert self._autocast is not None, "the first call has begun"
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self._autocast.regions:
                stack.enter_context(self._autocast.entered())
            for state in self._states:
                stack.enter_context(generators.drawing_from(*state))
            if self.script.buffers:
                stack.enter_context(self._buffers_put_back())
            with torch.autograd.graph.saved_tensors_hooks(take, _never):
                try:
                    self._call_each()
                except _EnoughError:
                    pass
                else:
                    raise self._differs(f"saved {saved} tensors where it had saved {self.packed}")
        self._made_again(self.script.operations)
        if not self._retain:
            self._calls.clear()
            self._states.clear()
            self._freed = True

    def _call_each(self) -> None:
        returned: list[list[torch.Tensor]] = []
        last_use: dict[int, int] = {}  # of what each call returns: the last call that is given some of it

        passed: dict[_Passed, torch.Tensor] = {}  # to one call

        def argument(noted: _Passed | _Returned) -> torch.Tensor:
            if isinstance(noted, _Returned):
                return returned[noted.call][noted.place]
            if noted not in passed:
                passed[noted] = noted.again()
            return passed[noted]

        for number, (_, arguments) in enumerate(self._calls):
            last_use.update((noted.call, number) for noted in found(arguments, _Returned))
        for number, (forward, arguments) in enumerate(self._calls):
            args, kwargs = copied(arguments, (_Passed, _Returned), argument)
            passed.clear()
            for call, last in last_use.items():
                if last == number:
                    returned[call].clear()  # as in forward, what nothing reads any more goes
            result = forward(*args, **kwargs)
            del args, kwargs
            returned.append(list(dispatch.tensors_in(result)) if number in last_use else [])
            del result

    @contextmanager
    def _buffers_put_back(self) -> Iterator[None]:
        """The buffers that a second call changes are as before afterwards."""
        there = [self._model.get_buffer(name) for name in self.script.buffers]
        copies = [buffer.clone() for buffer in there]
        try:
            yield
        finally:
            for buffer, copy in zip(there, copies, strict=True):
                buffer.data.copy_(copy)  # not counted as a write: backward may have saved the buffer

    def _differs(self, how: str) -> EngineError:
        names = ", ".join(dict.fromkeys(path or "the model" for path, _ in self.script.modules))
        return EngineError(
            f"{names}: called again in backward, as the plan has it, and the second time it {how}. Its forward depends on something that has changed "
            "meanwhile: have it depend on its arguments, parameters and buffers alone"
        )


_CPU = torch.device("cpu")


def _never(_: object) -> torch.Tensor:
    raise AssertionError("no backward runs through a call that was made again")


class CallsToRepeat:
    """Puts the calls of one forward that are to be made again under hooks of their own.

    Args:
        modules: whose calls these may be, by path. What else takes over forwards of modules may do so inside, and ends before.
        model: whose modules.
        hooks: for what is not dropped.
        ended: told of each call that has ended, and how many tensors were saved in it.
        differs: told how forward differs from the plan.
        retain: backward may run more than once.

    Attributes:
        recomputations: operations that were run again.
    """

    def __init__(
        self,
        modules: Iterable[str],
        model: nn.Module,
        hooks: tuple[Keep, Callable[[Any], torch.Tensor]],
        ended: Callable[[int], None],
        differs: Callable[[str], None],
        *,
        retain: bool,
    ) -> None:
        self._model = model
        self._keep, self._unpack = hooks
        self._ended, self._differs, self._retain = ended, differs, retain
        self._modules = tuple(dict.fromkeys(modules))
        self._places: dict[tuple[str, int], tuple[RepeatedCalls, int]] = {}
        self._present: MadeCalls | None = None
        self._before: object = None  # what numpy and Python would draw next
        self._drawn = False
        self.recomputations = 0

    def repeat(self, scripts: Sequence[RepeatedCalls]) -> None:
        """Which calls: from here on, where it is known only in forward."""
        for script in scripts:
            for position, call in enumerate(script.modules):
                self._places[call] = script, position
        self._before = outside_torch()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Forward runs inside."""
        instead: list[tuple[nn.Module, Any]] = []
        try:
            for path in self._modules:
                module = self._model.get_submodule(path)
                instead.append((module, vars(module).get("forward")))
                vars(module)["forward"] = self._noting(module, module.forward, path)
            yield
            if self._places and outside_torch() != self._before:
                self._drawn = True  # a second call would draw others
                self._differs("random numbers of Python's or numpy's are drawn, none were when the plan was made")
        finally:
            for module, own in instead:
                if own is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = own

    def _noting(self, module: nn.Module, forward: Forward, path: str) -> Forward:
        """The module's forward, with what is saved in the calls of the plan dropped."""
        number = 0

        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            place = self._places.get((path, number))
            number += 1
            made = None if place is None else self._made(*place)
            if made is None:
                return forward(*args, **kwargs)
            if tensors_passed((args, kwargs)) is None:
                self._differs(f"{type(module).__name__} is given something that is neither a tensor nor a plain value")
                return forward(*args, **kwargs)
            before = made.packed
            made.begins(forward, args, kwargs)
            with torch.autograd.graph.saved_tensors_hooks(made.packing(self._keep), self._unpack):
                result = forward(*args, **kwargs)
            made.returns(result)
            self._ended(made.packed - before)
            script = made.script
            if made.made == len(script.modules) and made.packed != script.saves:
                self._differs(
                    f"autograd saved {made.packed} tensors in {script.modules[-1][0]}, the plan has {script.saves}"
                )
            return result

        return noted

    def _made(self, script: RepeatedCalls, position: int) -> MadeCalls | None:
        """The calls that one belongs to; None where those before it were not made."""
        if position == 0:
            self._present = MadeCalls(
                script,
                self._model,
                retain=self._retain,
                made_again=self._note_recomputations,
                drawn=lambda: self._drawn,
            )
        present = self._present
        if present is None or present.script is not script or present.made != position:
            self._differs(f"{script.modules[position][0]} is not called right after {script.modules[position - 1][0]}")
            return None
        if position + 1 == len(script.modules):
            self._present = None
        return present

    def _note_recomputations(self, operations: int) -> None:
        self.recomputations += operations
