"""What Python reads of a batch between the parts of a model: found in a forward with the real batch, in which no part is run.

A look on fake tensors does not see it where a model asks whether it is being traced, and then leaves such reads out (Hugging Face's masks: is all of it one?).
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.index_bounds import indices_checked
from memfit.capture.isolation import batch_kept, lent
from memfit.capture.part_calls import Around, Marks, ValuesRead
from memfit.parallel.other_stages import OtherStages
from memfit.parallel.stage_module import StageModule
from memfit.step.absent import absent
from memfit.step.device import device_of
from memfit.step.generators import forked_generators
from memfit.step.part_calls import PartCalls, parts_at

# Operations whose results cannot be known without values: of an absent tensor they cannot be asked for.
_BY_VALUES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


def with_real_reads(
    calls: PartCalls, model: nn.Module, micro_batch: Batch, loss_fn: LossFunction | None, around: Around = nullcontext
) -> PartCalls:
    """The calls, with what the real forward reads of the batch as well. The model is left as it is.

    Where that forward cannot pass by its parts, all of the batch is wanted everywhere.

    Args:
        calls: of the model's parts, as a look on fake tensors has found them.
        model, micro_batch, loss_fn: as for `memfit.plan`. Without values nothing more is found.
        around: makes what a forward and loss run inside.
    """
    if any(leaf.device.type == "meta" for leaf in batches.leaves(micro_batch)):
        return calls
    number = len(calls.calls)
    reads = _Reads(micro_batch, number)
    with (
        indices_checked(device_of(model)),
        forked_generators(),
        batch_kept(micro_batch),
        torch.no_grad(),
        lent(model, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.clone(), loss_fn),
    ):
        others = OtherStages(model, [call.path for call in calls.calls], [], calls.read_between)
        try:
            stage = StageModule(model, loss_fn, calls, number, number)
            received = [absent(meta, device_of(model)) for meta in stage.received]
            with ExitStack() as stack:
                for module in parts_at(model, (call.path for call in calls.calls)).values():
                    handle = module.register_forward_pre_hook(reads.called, with_kwargs=True, prepend=True)
                    stack.callback(handle.remove)
                for each in (around(), reads, ValuesRead(reads)):
                    stack.enter_context(each)
                stage(micro_batch, *received)
        except Exception:  # noqa: BLE001 - the user's code, and what it makes of tensors that have no values
            if reads.position < number:
                every = frozenset(place for place, (_, meta) in enumerate(calls.batch) if meta is not None)
                return replace(calls, values_read=every)
        finally:
            others.put_back()
    each_reads = tuple(known | own for known, own in zip(calls.batch_reads, reads.of_calls, strict=True))
    return replace(calls, batch_reads=each_reads, values_read=calls.values_read | reads.between)


class _Reads(Marks):
    """What is read of the batch, by Python and by parts that are given it.

    Args:
        sample: the batch.
        number: of the calls of parts.

    Attributes:
        position: calls that have begun.
        of_calls: places of the tensors that each call is given; in the last entry, of which Python reads values after the last call.
        between: of which it reads values before that.
    """

    def __init__(self, sample: Batch, number: int) -> None:
        super().__init__(sample)
        self.position = 0
        self.of_calls: list[frozenset[int]] = [frozenset()] * (number + 1)
        self.between: frozenset[int] = frozenset()
        self._number = number

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the forward of a part."""
        del module
        if self.position < self._number:
            self.of_calls[self.position] |= self.leaves_of((args, kwargs))
        self.position += 1

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, read: Any) -> None:
        """As for any marks."""
        super().ran(func, args, kwargs, result, read)
        if any(tag in func.tags for tag in _BY_VALUES):
            self.value_read((args, kwargs))

    def value_read(self, tree: Any) -> None:
        """Noted where it is."""
        if self.position < self._number:
            self.between |= self.leaves_of(tree)
        else:
            self.of_calls[-1] |= self.leaves_of(tree)
