"""Data parallelism (DistributedDataParallel), and ZeRO 1 (ZeroRedundancyOptimizer beside it)."""

from __future__ import annotations

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
        self._send_zeros(self.trainable())
        self._engine.reducer._rebuild_buckets()
        self._expect_gradients()
        self._send_zeros(self.trainable())
        self._views = [(p, p.grad.detach()) for p in self.trainable() if p.grad is not None]
        self._buckets = list({dispatch.storage_key(view): view for _, view in self._views}.values())
        for parameter in self.trainable():
            parameter.grad = None
        self._cleared: list[tuple[int, int]] = []  # gradients as `clear` has left them
        self._expected_beside: list[tuple[int, int]] = []  # gradients as a step's last backward finds them
        self._lacking: int | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def _expect_gradients(self) -> None:
        self._engine.reducer.prepare_for_forward()
        self._engine.reducer.prepare_for_backward([])

    @staticmethod
    def _send_zeros(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in reversed(parameters):
            torch.autograd.backward(
                parameter, torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
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
        return sharded_state(made, self.group, arrange) if self._shards_state else arrange(made)

    def stepped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Under ZeRO 1 the one inside of torch's."""
        return stepped(optimizer)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gradients are sent in the last one; those of the others are added up in the buckets, from the first step on, in which none is there yet."""
        for parameter, view in [] if last else self._views:
            if parameter.grad is None:
                parameter.grad = view.zero_()
        with nullcontext() if last else self._engine.no_sync():
            yield

    @contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Gradients are expected from here on, not from the end of the module's forward: those of an earlier micro-batch that is run again would be sent."""
        with self._engine.no_sync():
            yield
        if last:
            self._expect_gradients()
            self._expected_beside = self._gradients()

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

    def follow_cleared(self) -> None:
        """The optimizer's are those of the model."""

    def collect(self, *, agrees: bool = False) -> None:
        """They are there, as views of the buckets.

        Where ranks agree, zeros are sent in place of what is missing, so that the backward of the others ends.

        Raises:
            CaptureError: a parameter gets none in the step that is planned for.
            EngineError: a parameter has got none on this rank, so that a part of them was not sent, and other ranks may wait for it; not where they agree.
        """
        without = self._without()
        self._lacking = without[0] if without else None
        if not without:
            return
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        which = ", ".join(names[number] for number in without[:3]) + (", ..." if len(without) > 3 else "")
        if not self.agreement.real:
            raise CaptureError(
                f"a parameter gets no gradient in a step ({which}), which DistributedDataParallel does not bear: leave out what is not used, freeze it "
                "(requires_grad_(False)), or train with ZeRO 2 or 3"
            )
        if not agrees:
            raise EngineError(
                f"on rank {self.agreement.rank} a parameter gets no gradient in this step ({which}), which DistributedDataParallel does not bear, and the "
                "others wait for it: use all parameters in every step on every rank, or train with ZeRO 2 or 3"
            )
        trained = self.trainable()
        self._send_zeros([trained[number] for number in without])

    def _without(self) -> list[int]:
        """Numbers, among the parameters that are trained, of those of which nothing was sent in the last backward."""
        try:
            self._engine.reducer._rebuild_buckets()  # which asks whether all were sent; it rebuilds nothing any more
        except RuntimeError as error:
            found = _WITHOUT.search(str(error))
            if found is None:
                raise
            return [int(number) for number in found[1].split()]
        # Where nothing was sent at all, DistributedDataParallel does not ask.
        return list(range(len(self._views))) if self._gradients() == self._expected_beside else []

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
        self._views, self._buckets = [], []
        self.__dict__.pop("_engine", None)
