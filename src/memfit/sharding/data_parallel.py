"""Data parallelism (DistributedDataParallel), and ZeRO 1 (ZeroRedundancyOptimizer beside it)."""

from __future__ import annotations

import cmath
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit import dispatch
from memfit.errors import CaptureError, EngineError
from memfit.sharding.sharded import OptimizerFactory, ShardedModel
from memfit.sharding.state_sharding import sharded_state, stepped

# Numbers among the parameters that are trained.
_WITHOUT: Final = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DataParallel(ShardedModel):
    """Parameters and gradients are whole on every rank.

    The model stays the user's own object: what DistributedDataParallel does before and after its module's forward is done in hooks of that module
    (so does `torch.distributed._composable.replicate`), as a loss function may want the model's attributes and not a wrapper's.

    Gradients are views of the buckets that are sent, so that they are on the device once. Where a step has several micro-batches they are zeroed and not
    freed: autograd would add up others beside the buckets.

    DistributedDataParallel lays its buckets out anew after the first backward, by the order in which gradients came; for a moment there are two of each.
    So that no step differs from another, zero gradients are sent through before the first one, in the reverse order of the parameters.

    A rank on which a parameter has got no gradient sends something in its place all the same, or the others would wait for it in their backward: zeros where
    ranks tell each other what they lack before the update, and else no numbers, by which the others see that there is something to be told.

    Args:
        model, group: as for `ShardedModel`.
        synchronised: whether the parameters of rank 0 are sent to all at the start; False in a capture.
        shards_state: ZeRO 1.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, *, synchronised: bool = True, shards_state: bool = False
    ) -> None:
        super().__init__(model, group)
        self._shards_state = shards_state
        # Buffers are each rank's own, as under `fully_shard`: sending them would take a collective in every forward.
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # newer versions have another argument beside this one, older ones do not
            self._engine = DistributedDataParallel(
                model,
                process_group=group,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=synchronised,
            )
        self._expect_gradients()
        self._send(0.0, self.trainable())
        self._engine.reducer._rebuild_buckets()
        self._expect_gradients()
        self._send(0.0, self.trainable())
        self._views = [(p, p.grad.detach()) for p in self.trainable() if p.grad is not None]
        self._buckets = list({dispatch.storage_key(view): view for _, view in self._views}.values())
        self._firsts = [view.as_strided((), (), 0) for view in self._buckets]  # numbers of the buckets
        for parameter in self.trainable():
            parameter.grad = None
        self._cleared: list[tuple[int, int]] = []  # gradients as `clear` has left them
        self._written_before = self._written()  # by the last backward of a step
        self._lacking: int | None = None
        self._last, self._collected = True, True  # the micro-batch in progress, and what its backward has sent
        self._awaited = False  # gradients, in a loop that is not the engine's
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def _expect_gradients(self) -> None:
        self._engine.reducer.prepare_for_forward()
        self._engine.reducer.prepare_for_backward([])

    @staticmethod
    def _send(number: float, parameters: Sequence[nn.Parameter]) -> None:
        """As the gradients of these."""
        for parameter in reversed(parameters):
            torch.autograd.backward(
                parameter, torch.full((), number, dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
            )

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        before: tuple[Any, Any] = self._engine._pre_forward(*args, **kwargs)
        return before

    def _after(self, _: nn.Module, _args: object, output: Any) -> Any:
        return self._engine._post_forward(output)

    def parameters(self) -> list[nn.Parameter]:
        """All."""
        return list(self.model.parameters())

    def held(self) -> list[torch.Tensor]:
        """The buckets."""
        return self._buckets

    def gathered(self) -> list[torch.Tensor]:
        """None."""
        return []

    def optimizer(
        self, make: OptimizerFactory, arrange: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The user's own; under ZeRO 1 one like it for this rank's parameters."""
        made = make(iter(self.trainable()))
        made = sharded_state(made, self.group, arrange) if self._shards_state else arrange(made)
        made.register_step_pre_hook(lambda *_: self.collect_awaited())
        return made

    def stepped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Under ZeRO 1 the one inside of torch's."""
        return stepped(optimizer)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gradients are sent in the last one; those of the others are added up in the buckets, from the first step on, in which none is there yet."""
        for parameter, view in [] if last else self._views:
            if parameter.grad is None:
                parameter.grad = view.zero_()
        self._written_before = self._written()
        self._last, self._collected = last, False
        with nullcontext() if last else self._engine.no_sync():
            yield

    @contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Gradients are expected from here on, not from the end of the module's forward: those of an earlier micro-batch that is run again would be sent."""
        with self._engine.no_sync():
            yield
        if last:
            self._expect_gradients()
            self._written_before = self._written()

    @property
    def learns_paths(self) -> bool:
        """Forward sends nothing."""
        return True

    def by_itself(self) -> AbstractContextManager[None]:
        """Nothing is sent."""
        return self._engine.no_sync()

    def has_gradients(self) -> bool:
        """Where steps add up gradients in the buckets, these are there between them, too."""
        return self._gradients() != self._cleared

    def _gradients(self) -> list[tuple[int, int]]:
        """Which tensors they are, and how often each was written."""
        return [(id(p.grad), p.grad._version) for p, _ in self._views if p.grad is not None]

    def _written(self) -> list[int]:
        """How often each bucket was, by whatever."""
        return [first._version for first in self._firsts]

    def follow_cleared(self) -> None:
        """The optimizer's are those of the model. From here on this forward's are awaited."""
        self.collect_awaited()
        self._awaited = torch.is_grad_enabled() and self._engine.require_backward_grad_sync
        self._written_before = self._written()

    def collect_awaited(self) -> None:
        """As `collect`, where gradients are awaited that a loop of the user's own has not collected.

        Where all of a backward was left out, as on a batch that is skipped, others may have done the same, or wait in theirs. So something is sent, but for
        where the gradients of others are there, which would be spoiled.
        """
        if not self._awaited:
            return
        if self._written() == self._written_before and any(p.grad is not None for p in self.trainable()):
            self._awaited = False
            return
        self.collect()

    def collect(self, *, agrees: bool = False) -> None:
        """They are there, as views of the buckets.

        Raises:
            CaptureError: a parameter gets none in the step that is planned for.
            EngineError: a parameter has got none on a rank; on all ranks, not where they agree later.
        """
        self._awaited = False
        without = self._without()
        self._collected = True
        self._lacking = without[0] if without else None
        if not self.agreement.real:
            if not without:
                return
            names = [name for name, p in self.model.named_parameters() if p.requires_grad]
            which = ", ".join(names[number] for number in without[:3]) + (", ..." if len(without) > 3 else "")
            raise CaptureError(
                f"a parameter gets no gradient in a step ({which}), which DistributedDataParallel does not bear: leave out what is not used, freeze it "
                "(requires_grad_(False)), or train with ZeRO 2 or 3"
            )
        self._send_in_place(without, agrees=agrees)
        if not agrees:
            self._hear_of_lacking(everything=len(without) == len(self._views))

    def _send_in_place(self, without: Sequence[int], *, agrees: bool) -> None:
        """Something for these parameters, so that the backward of the others ends."""
        trained = [self.trainable()[number] for number in without]
        if agrees:
            self._send(0.0, trained)
            return
        here = {dispatch.storage_key(self._views[number][1]) for number in without}
        for first in self._firsts:
            if dispatch.storage_key(first) in here:  # not sent yet
                first.fill_(math.nan)
        self._send(math.nan, trained)

    def fail(self, error: Exception, *, agrees: bool = False) -> None:
        """Send something in place of what the last backward would have sent, and tell the others why."""
        self._awaited = False
        if not self._collected:
            without = self._begun_without()
            if without is None and (not self._last or self._written() == self._written_before):  # it has not begun
                self._expect_gradients()
                without = list(range(len(self._views)))
            self._send_in_place(without or [], agrees=agrees)
            self._collected = True
        self._free_gradients()
        self.agreement.fail(error, alone=not agrees)

    def _hear_of_lacking(self, *, everything: bool) -> None:
        """Ask all ranks what they lack, where what was sent says that one does (or a loss was no number): all were sent the same, so all ask.

        Args:
            everything: this one lacks all gradients; where all ranks do, they have left out a backward together.

        Raises:
            EngineError: a rank lacks a gradient, or has failed; gradients are let go.
        """
        if not any(cmath.isnan(first.item()) for first in self._firsts):
            return
        try:
            told = self.agreement.lacking(self._lacking, everything=everything)
        except EngineError:
            self._free_gradients()
            raise
        if told is None and not everything:
            return
        self._free_gradients()
        if told is not None:
            self.raise_lacking(*told)

    def _free_gradients(self) -> None:
        for parameter in self.trainable():
            parameter.grad = None

    def _without(self) -> list[int]:
        """Numbers, among the parameters that are trained, of those of which nothing was sent in the last backward."""
        without = self._begun_without()
        if without is not None:
            return without
        # Where nothing was sent at all, DistributedDataParallel does not ask.
        return list(range(len(self._views))) if self._written() == self._written_before else []

    def _begun_without(self) -> list[int] | None:
        """The same of a backward that has sent something and not all; None of another one."""
        try:
            self._engine.reducer._rebuild_buckets()  # which asks whether all were sent; it rebuilds nothing any more
        except RuntimeError as error:
            found = _WITHOUT.search(str(error))
            if found is None:
                raise
            return [int(number) for number in found[1].split()]
        return None

    @property
    def lacking(self) -> int | None:
        """Of what `collect` has sent zeros for, the first."""
        return self._lacking

    def clip(self, norm: float) -> torch.Tensor:
        """Every rank has all gradients."""
        return torch.nn.utils.clip_grad_norm_(self.trainable(), norm)

    def clear(self, *, accumulates: bool) -> None:
        """Views of buckets: zeroed where the next step adds to them."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                continue
            if accumulates:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        self._cleared = self._gradients()

    def close(self) -> None:
        """Remove the hooks; those of the parameters go with torch's engine, and gradients that are views of its buckets with them."""
        for handle in self._handles:
            handle.remove()
        for parameter in self.trainable():
            parameter.grad = None
        self._views, self._buckets, self._firsts = [], [], []
        self.__dict__.pop("_engine", None)
