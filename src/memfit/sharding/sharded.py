"""What a step needs to know of a model that several ranks train together, whichever of torch's engines does it.

torch's engines differ in what they put around a model (a wrapper, hooks, an optimizer), in what the optimizer updates and in where gradients are. This is the
one face of all of them, which capture and engine share, so that the step that is predicted is the step that is trained.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from memfit.batches import LossFunction
from memfit.errors import BatchError, EngineError, InputError
from memfit.sharding.agreement import Agreement

# What has been made of a model last, and whether a rank has only a part of it since.
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[ShardedModel], bool]] = weakref.WeakKeyDictionary()
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class ShardedModel(ABC):
    """A model as one rank has it.

    Attributes:
        model: the user's own object, with the engine's hooks in it.
        group: the ranks that train it.
        agreement: what they decide together.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model = model
        self.group = group
        self.agreement = Agreement(group, next(model.parameters()).device)
        if self.agreement.real:
            _OF_MODELS[model] = weakref.ref(self), self.lacks_parameters or self.shards_parameters

    @property
    def ranks(self) -> int:
        """How many train it."""
        return self.group.size()

    def wait_at_most(self, limit: timedelta) -> None:
        """How long this rank waits for others from here on, in every group that it belongs to; all ranks have to call it, between steps."""
        from torch.distributed.distributed_c10d import _set_pg_timeout, _world

        for group in list(_world.pg_map):
            _set_pg_timeout(limit, group)

    def refuse(self, error: BatchError) -> None:
        """Tell the others in place of this rank's first message of a step that it takes none, so that none of them waits for it."""
        self.agreement.refuse(error)

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """What is on this rank between steps, plain tensors: whole parameters or shards."""

    def trainable(self) -> list[nn.Parameter]:
        """Of these, what gets gradients: an optimizer that steps only this rank's part is made of them."""
        return [p for p in self.parameters() if p.requires_grad]

    @abstractmethod
    def held(self) -> list[torch.Tensor]:
        """What the engine holds besides from step to step: buckets of gradients."""

    @abstractmethod
    def gathered(self) -> list[torch.Tensor]:
        """Tensors whose storages the engine resizes: whole parameters, empty while they are not gathered."""

    def accumulated(self) -> list[torch.Tensor]:
        """Gradients of micro-batches before the last, where they are not those of `trainable`."""
        return []

    @abstractmethod
    def optimizer(
        self, make: OptimizerFactory, arrange: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The optimizer that this rank steps.

        Args:
            make: the user's factory.
            arrange: what the choices make of an optimizer, for the part that steps this rank's own state.
        """

    @abstractmethod
    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch run inside; gradients are synchronised in that of the last."""
        yield

    @contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Forward and loss of a micro-batch run inside. Where a rank learns paths, torch's engine knows nothing of them until they have ended."""
        del last
        yield

    @property
    def learns_paths(self) -> bool:
        """Whether a rank may begin a forward anew by itself: nothing is sent before the last backward, in which the others wait meanwhile."""
        return False

    def fail(self, error: Exception, *, agrees: bool = False) -> None:
        """Forward or backward of a step has failed on this rank: the others, which wait for its gradients, are told where that can be.

        Under ZeRO 2 and 3 and in pipelines they wait inside their forward, too, and for other messages than this rank could send them.

        Args:
            error: why.
            agrees: as for `collect`.
        """
        del error, agrees

    @contextmanager
    def telling_of_failure(self, *, agrees: bool = False) -> Iterator[None]:
        """Where this rank fails inside, the others do not wait for it any longer (`fail`, with these arguments)."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # where there are no others any more, what has failed is what counts
                self.fail(error, agrees=agrees)
            raise

    def by_itself(self) -> AbstractContextManager[None]:
        """What is run of the model inside is run on this rank alone."""
        return nullcontext()

    def has_gradients(self) -> bool:
        """Whether a parameter has one; one that was zeroed by `clear` is none."""
        return any(parameter.grad is not None for parameter in self.parameters())

    @abstractmethod
    def follow_cleared(self) -> None:
        """Before a forward in a loop of the user's own: gradients that were cleared through the optimizer are so in the model, too, and the other way round."""

    @abstractmethod
    def collect(self, *, agrees: bool = False) -> None:
        """After the last backward: the gradients are where the optimizer looks for them.

        Args:
            agrees: before any update ranks tell each other what each lacks (`lacking`); else all raise here where one lacks a gradient that it needs.
        """

    @abstractmethod
    def collect_awaited(self) -> None:
        """In a loop of the user's own, before anything is done with the gradients that takes other ranks: as `collect`, which nothing else has called."""

    @property
    def lacking(self) -> int | None:
        """Number, among the parameters that are trained, of the first that got no gradient on this rank in the step that is collected and needs one."""
        return None

    def overflowed(self, found: Iterable[torch.Tensor]) -> None:
        """Whether scaled gradients have, which becomes that of all ranks."""
        self.collect_awaited()
        self.agreement.largest_of(found)

    def raise_lacking(self, rank: int, lacking: int) -> NoReturn:
        """No rank takes the step.

        Args:
            rank: on which a gradient is missing.
            lacking: number of the parameter.

        Raises:
            EngineError: always.
        """
        name = [name for name, p in self.model.named_parameters() if p.requires_grad][lacking]
        raise EngineError(
            f"on rank {rank} a parameter gets no gradient in this step ({name}), which DistributedDataParallel does not bear, and no rank has taken it: "
            "use all parameters in every step (in the last micro-batch, too) on every rank, or train with ZeRO 2 or 3"
        )

    @abstractmethod
    def clip(self, norm: float) -> torch.Tensor:
        """Clip the global norm of the gradient, of all ranks' shards together.

        Returns:
            The norm before.
        """

    @abstractmethod
    def clear(self, *, accumulates: bool) -> None:
        """Let go of the gradients.

        Args:
            accumulates: a step has several micro-batches.
        """

    def named(self) -> dict[str, nn.Parameter]:
        """What is on this rank between steps, by the names of the model's parameters."""
        return dict(zip((name for name, _ in self.model.named_parameters()), self.parameters(), strict=True))

    def placed(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """What belongs to a parameter (itself, or its optimizer state), told to torch as the part of a whole that it is.

        Args:
            name: of the parameter.
            part: as large as this rank's part of it.
        """
        del name
        return part

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what belongs to a whole parameter, laid out as the parameter is."""
        del name
        return whole

    def stepped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Of what `optimizer` gave, that which steps this rank's own part."""
        return optimizer

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank has only a part of each parameter."""
        return False

    @property
    def lacks_parameters(self) -> bool:
        """Whether some parameters are on other ranks alone."""
        return False

    @property
    def saves_its_part(self) -> bool:
        """Whether what is here takes space of its own in a snapshot of all ranks."""
        return self.agreement.rank == 0 or self.shards_parameters

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model for calls without gradients, which all ranks make alike."""
        yield self.model

    def loss_without_gradients(self, loss_fn: LossFunction | None) -> LossFunction | None:
        """What gives the loss of a batch that all ranks have alike: the user's own function."""
        return loss_fn

    def whole(self) -> dict[str, torch.Tensor]:
        """The model's state dict with whole tensors in host memory, one after the other; all ranks have to call it, and rank 0 gets it."""
        found = {}
        for name, value in self.model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if self.agreement.rank == 0:
                found[name] = whole.detach().to("cpu", copy=True) if isinstance(whole, torch.Tensor) else whole
        return found

    @abstractmethod
    def close(self) -> None:
        """Take the engine off the model. Parameters that were shared out stay so."""


def taken_back(model: nn.Module) -> None:
    """Take what an earlier `memfit.fit` has made of a model off it, as it is to have another engine.

    Raises:
        InputError: this rank has only a part of it since.
    """
    if model not in _OF_MODELS:
        return
    earlier, in_parts = _OF_MODELS[model]
    if in_parts:
        raise InputError(
            "this rank has only a part of the model, since an earlier memfit.fit or memfit.apply has shared it out: go on with that engine, or make the model "
            "anew in all ranks and load into it what engine.state_dict() gives rank 0"
        )
    if (made := earlier()) is not None:
        made.close()
