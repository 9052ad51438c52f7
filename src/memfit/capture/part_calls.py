"""Look at one forward and loss, on fake tensors: which parts are called in which order, what they return, and what of it is read later.

`torch.distributed.pipelining.pipeline` finds the same with `torch.export`, which needs the whole forward to be a graph, and hands each stage a graph to run.
Here the stages run the user's own forward, so all that has to be known is what crosses from part to part, and what of the batch each reads. Each tensor carries
the labels of the parts' results, of the batch's tensors and of the parameters that it depends on (a *taint*, kept by storage); what runs between parts unites
them, a part's result has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from memfit import batches, dispatch
from memfit.batches import Batch, LossFunction
from memfit.capture.constants import run_recorded
from memfit.capture.index_bounds import indices_checked
from memfit.capture.isolation import batch_kept, lent
from memfit.errors import CaptureError, MemfitError
from memfit.sharding.same_step import FirstLoss
from memfit.step.device import device_of
from memfit.step.generators import forked_generators
from memfit.step.part_calls import (
    PLAIN,
    BatchLeaf,
    Forward,
    Label,
    PartCall,
    PartCalls,
    TensorMeta,
    parts_at,
    taken_over,
)

Around = Callable[[], AbstractContextManager[object]]
# What a tensor may depend on: a part's result, a tensor of the batch, a parameter by its name.
_Mark = Label | BatchLeaf | str
_Marks = frozenset[_Mark]
# Functions of torch that tell of a tensor what is known without its values, besides its properties.
_DESCRIBE: Final = frozenset(
    {
        "__len__", "__hash__", "__dir__", "dim", "dense_dim", "element_size", "get_device", "has_names", "is_coalesced", "is_complex", "is_conj",
        "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "ndimension",
        "nelement", "numel", "size", "storage_offset", "stride", "type", "untyped_storage",
        "_is_view", "_is_zerotensor", "result_type", "can_cast", "promote_types",
    }
)  # fmt: skip


# Before, torch's stages ask for gradients of all that they receive.
WHOLE_NUMBERS_CROSS: Final = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def find_part_calls(
    model: nn.Module,
    micro_batch: Batch,
    loss_fn: LossFunction | None,
    paths: Sequence[str],
    around: Around = nullcontext,
) -> PartCalls:
    """The calls of the modules at these paths in one forward on a micro-batch. The model is left as it is; it may be on the meta device.

    Args:
        model, micro_batch, loss_fn: as for `memfit.plan`.
        paths: of the parts.
        around: makes what a forward and loss run inside.

    Raises:
        CaptureError: fake tensors cannot run the model (its path depends on values of activations).
    """
    target = device_of(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        where = target if tensor.device.type == "meta" else tensor.device
        with mode:
            return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=where)

    try:
        sample = batches.map_tensors(lambda t: fake(t) if t.device.type == "meta" else t, micro_batch)
        with indices_checked(target), forked_generators(), batch_kept(sample), lent(model, fake, loss_fn), mode:
            # The first forward may build what later ones find, so the second is looked at.
            with around(), _Look(model, sample):
                batches.loss_of(model, sample, loss_fn)
            torch.clear_autocast_cache()  # where a region of the caller's lies around both, the second casts weights anew
            look = _Look(model, sample)
            with around(), look, ValuesRead(look), taken_over(parts_at(model, paths), look.called):
                first = FirstLoss(())
                loss = first(lambda: batches.loss_of(model, sample, loss_fn))
            return look.finished(loss, first.digest)
    except MemfitError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0][:200]
        raise CaptureError(
            f"the model cannot be cut into stages: its forward cannot be run without values ({type(error).__name__}: {first_line})"
        ) from error


class Marks(dispatch.DispatchMode):
    """Follows what tensors depend on from operation to operation.

    Args:
        sample: the batch, whose tensors are marked by their places.

    Attributes:
        batch: its leaves, by name.
    """

    def __init__(self, sample: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = batches.names_and_leaves(sample)
        self._marks: dict[int, _Marks] = {}  # by storage
        self._alive: list[torch.Tensor] = []  # addresses are reused after a storage's death
        for number, (_, leaf) in enumerate(self.batch):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, frozenset([BatchLeaf(number)]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.result(func, args, kwargs)
        self.ran(func, args, kwargs, result, self.of((args, kwargs)))
        return result

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of an operation, which is run."""
        return func(*args, **kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, read: _Marks) -> None:
        """An operation has run: what it has made or written depends on what it read."""
        for tensor in (*dispatch.tensors_in(result), *dispatch.written(func, args, kwargs)):
            self.add(tensor, read)

    def value_read(self, tree: Any) -> None:
        """Python has read the values of the tensors in here."""
        raise NotImplementedError

    def add(self, tensor: torch.Tensor, marks: _Marks) -> None:
        """Besides what it depends on already."""
        if dispatch.has_storage(tensor):
            key = dispatch.storage_key(tensor)
            self._marks[key] = self._marks.get(key, frozenset()) | marks
            self._alive.append(tensor)

    def of(self, tree: Any) -> _Marks:
        """What the tensors in here depend on."""
        found: _Marks = frozenset()
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and dispatch.has_storage(tensor):
                found |= self._marks.get(dispatch.storage_key(tensor), frozenset())
        return found

    def leaves_of(self, tree: Any) -> frozenset[int]:
        """Places of the tensors of the batch that these depend on."""
        return frozenset(mark.number for mark in self.of(tree) if isinstance(mark, BatchLeaf))


class _Look(Marks):
    """Follows the labels of results, of the tensors of the batch and of parameters through what runs between parts."""

    def __init__(self, model: nn.Module, sample: Batch) -> None:
        super().__init__(sample)
        for name, parameter in model.named_parameters():
            self.add(parameter, frozenset([name]))
        self._values_read: frozenset[int] = frozenset()
        self._calls: list[PartCall] = []
        self._needs: list[_Marks] = []
        self._read: set[str] = set()
        self._inside = False
        self._results: dict[Label, tuple[torch.Tensor, int]] = {}
        self._refused: dict[int, str] = {}
        self._changed: set[Label] = set()
        self._current = ""
        self._checkpoint: FrameType | None = None  # around the last call
        self._opaque: tuple[int, str] | None = None  # a boundary, and why the model cannot be cut from there on

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return run_recorded(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, read: _Marks) -> None:
        if self._inside:  # what a part reads may be among its attributes, or in an object that it is given (a cache)
            self._needs[-1] |= {mark for mark in read if not isinstance(mark, str)}
            return
        self._read |= {mark for mark in read if isinstance(mark, str)}
        super().ran(func, args, kwargs, result, read)

    def value_read(self, tree: Any) -> None:
        read = self.leaves_of(tree)
        if self._inside:
            self._needs[-1] |= {BatchLeaf(number) for number in read}
        else:
            self._values_read |= read

    def called(self, path: str, own: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._inside:
            return own(*args, **kwargs)
        position = len(self._calls)
        self._find_changes(position)
        before, self._checkpoint = self._checkpoint, _checkpoint_around()
        if before is not None and self._checkpoint is before:
            reason = (
                f"{path} and what is called before it are in one checkpoint of the model's own, which calls both again"
            )
            self._refused.setdefault(position, reason)
        self._current = path
        self._needs.append(self.of((args, dict(kwargs))))
        self._inside = True
        try:
            result = own(*args, **kwargs)
        finally:
            self._inside = False
        self._find_changes(position)
        leaves, structure = pytree.tree_flatten(result)
        self._calls.append(
            PartCall(path, structure, tuple(self._noted(Label(position, n), leaf) for n, leaf in enumerate(leaves)))
        )
        return result

    def _noted(self, label: Label, leaf: Any) -> Any:
        """One of the values that a call returns, as `PartCall` has it."""
        path_of = self._current
        if not (isinstance(leaf, torch.Tensor) and dispatch.has_storage(leaf)):
            if not isinstance(leaf, PLAIN):
                reason = f"{path_of} returns an object of type {type(leaf).__name__}, which cannot be sent"
                self._opaque = self._opaque or (label.call + 1, reason)
            return leaf
        for earlier, (tensor, _) in self._results.items():
            if tensor is leaf and earlier.call < label.call and earlier not in self._changed:
                return earlier
        # A result in the storage of an earlier one is a view of it, of which both may be read later; one that was written has but the new contents.
        key = dispatch.storage_key(leaf)
        before = self._marks.get(key, frozenset())
        self._marks[key] = (frozenset() if before & self._changed else before) | {label}
        self._alive.append(leaf)
        self._results[label] = leaf, leaf._version
        return TensorMeta.of(leaf)

    def _find_changes(self, position: int) -> None:
        """A result that is written in place is another one from there on, and what was sent of it is not: no cut where both are read."""
        for label, (tensor, version) in self._results.items():
            if tensor._version != version:
                self._results[label] = tensor, tensor._version
                self._changed.add(label)
                for boundary in range(label.call + 1, position + 1):
                    self._refused.setdefault(boundary, self._why_changed(label))

    def _why_changed(self, label: Label) -> str:
        return f"what {self._calls[label.call].path} returns is changed in place after it"

    def _why_not_received(self, label: Label) -> str:
        """Why torch's stages before 2.13 cannot receive a result; "" where they can."""
        call = self._calls[label.call]
        leaf = call.leaves[label.leaf]
        if not isinstance(leaf, TensorMeta) or leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return ""
        return f"what {call.path} returns is {leaf.dtype}, and torch {torch.__version__} has stages receive what gradients can be taken of; 2.13 does not"

    def finished(self, loss: torch.Tensor, digest: str) -> PartCalls:
        self._checkpoint = None
        self._find_changes(len(self._calls))
        self._needs.append(self.of(loss))
        number = len(self._calls)
        reasons = [self._refused.get(boundary, "") for boundary in range(number)]
        if self._opaque is not None:
            first, reason = self._opaque
            reasons[first:] = [have or reason for have in reasons[first:]]
        needs = tuple(frozenset(label for label in need if isinstance(label, Label)) for need in self._needs)
        for boundary in range(1, number):
            read = frozenset[Label]().union(*needs[boundary:])
            for label in sorted(self._changed & read):
                if label.call < boundary and not reasons[boundary]:
                    reasons[boundary] = self._why_changed(label)
            if not WHOLE_NUMBERS_CROSS:
                crossing = (label for label in sorted(read) if label.call < boundary)
                reasons[boundary] = reasons[boundary] or next(filter(None, map(self._why_not_received, crossing)), "")
        reads = (frozenset(mark.number for mark in need if isinstance(mark, BatchLeaf)) for need in self._needs)
        last = {label for label in self._needs[-1] if isinstance(label, str)}
        before = {label for need in self._needs[:-1] for label in need if isinstance(label, str)}
        return PartCalls(
            tuple(self._calls),
            needs,
            tuple(frozenset(label for label in need if isinstance(label, str)) for need in self._needs),
            frozenset(self._read) - (last - before),
            tuple(reasons),
            tuple((name, TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else None) for name, leaf in self.batch),
            tuple(reads),
            self._values_read,
            loss.dtype,
            digest,
        )


def _checkpoint_around() -> FrameType | None:
    """The innermost call of `torch.utils.checkpoint` among the callers, of either kind; None where there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame


class ValuesRead(TorchFunctionMode):
    """Tells of what Python reads of tensors: what is neither a tensor nor known without values.

    Args:
        marks: that is told.
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if result is None or isinstance(result, torch.Tensor) or name == "__get__" or name in _DESCRIBE:
            return result
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._marks.value_read((args, kwargs))
        return result
