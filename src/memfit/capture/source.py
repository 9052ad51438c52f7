"""What is captured: a model with its batch, loss, optimizer and clipping, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.cuda.optimizers import as_on_cuda
from memfit.errors import InputError
from memfit.hardware.machine import Capability
from memfit.identity import digest
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.sharding.sharded import ShardedModel
from memfit.step.arranging import arranged
from memfit.step.device import device_of
from memfit.step.program import OptimizerFactory, StepProgram
from memfit.techniques.autocast.precision import Scaling
from memfit.techniques.choices import Choices


@dataclass(frozen=True, slots=True, eq=False)
class StepSource:
    """One optimizer step of the user's, independent of the choices it is run with.

    Attributes:
        model: any module; may be on the meta device.
        sample: the whole batch of one optimizer step, or one of its batches.
        loss_fn: as in `StepProgram`.
        optimizer: makes the optimizer from the trainable parameters; None when only gradients are wanted.
        clip_norm: as in `StepProgram`.
        loader_batches: batches like the sample that the step takes one after the other; one is there at a time. Each is split alike.
        forwards_before: how many forwards are run before the one that is captured; 0 for the first one, which may build what later ones find.
        trained_elsewhere: names of parameters that get gradients in other steps: their optimizer state is there in this one, too.
        cuda: compute capability of the absent GPU whose kernels a capture on fake tensors is to show; None for those of the model's own device.
        steps_before: how many whole steps are taken before the one that is captured, on real tensors of its own.
        draws: other draws of random numbers are captured, too, where they may decide sizes or operations.
        other_samples: for a number of samples, batches like the sample in host memory: micro-batches of so many samples will come that are like theirs, and
            may run other operations. None where none are known.
        views_anew: a capture on fake tensors leaves out the views that autograd makes anew, as it does on real ones where no mode sees them.
    """

    model: nn.Module
    sample: Batch
    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    clip_norm: float | None = None
    loader_batches: int = 1
    forwards_before: int = 1
    trained_elsewhere: frozenset[str] = frozenset()
    cuda: Capability | None = None
    steps_before: int = 0
    draws: bool = True
    other_samples: Callable[[int], Sequence[Batch]] | None = None
    views_anew: bool = False

    @property
    def on_meta(self) -> bool:
        """Whether some parameter has no values, so that nothing can be run for real."""
        return any(p.device.type == "meta" for p in self.model.parameters())

    def micro_batches(self, number: int) -> list[Batch]:
        """The micro-batches of a step that has this many; the largest last. They are views of the sample."""
        sizes = batches.micro_batch_sizes(batches.size(self.sample), number // self.loader_batches)
        return batches.split(self.sample, sizes) * self.loader_batches

    def program(self, choices: Choices, sharded: ShardedModel | None = None) -> StepProgram:
        """The step as chosen, with an optimizer over the parameters that the model has now."""
        program = StepProgram(self.model, self.loss_fn, None, self.clip_norm, choices, sharded=sharded)

        def arrange(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
            found = arranged(made, choices, self.model)
            if self.cuda is not None and isinstance(found, ChunkedOptimizer):
                found.device_kind = "cuda"
            return found

        if self.optimizer is not None and sharded is not None:
            program.optimizer = sharded.optimizer(self._made, arrange)
        elif self.optimizer is not None:
            program.optimizer = arrange(self._made(program.trainable()))
        if program.optimizer is not None and choices.precision == "fp16":
            agree = None if sharded is None else sharded.agreement.largest_of
            program.scaling = Scaling(device_of(self.model), agree)
        return program

    def _made(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's optimizer, in the form that it has by default where the step is to run; shards are plain tensors, for which that is the same."""
        assert self.optimizer is not None, "something is updated"
        optimizer = self.optimizer(iter(parameters))
        if self.cuda is not None:
            as_on_cuda(optimizer)
        return optimizer


def made_by_its_first_forward(
    model: nn.Module, before: Mapping[str, tuple[nn.Parameter, torch.Size]] | None = None
) -> None:
    """Refuse a model whose parameters are not the ones that it will train.

    Args:
        model: as it is now.
        before: its parameters before a first forward, with their shapes then; None where none was run, then those are looked for that say themselves that
            they are not made yet.

    Raises:
        InputError: the first forward makes parameters, puts others in their place, or gives them another shape.
    """
    now = dict(model.named_parameters())
    if before is None:
        made = [name for name, parameter in now.items() if is_lazy(parameter)]
    else:
        made = [name for name in {**before, **now} if name not in before or before[name][0] is not now.get(name)]
    if made:
        raise InputError(
            f"the model's first forward makes {len(made)} of its parameters ({_first(made)}), which an optimizer made before it would not have: run one "
            "forward on a batch (with torch.no_grad(): model(x)) before planning, and where one has been run, have the model itself hold them, not a store "
            "beside it"
        )
    laid_out = [name for name, (parameter, shape) in (before or {}).items() if parameter.shape != shape]
    if laid_out:
        raise InputError(
            f"the model's first forward gives {len(laid_out)} of its parameters another shape ({_first(laid_out)}), so they would not be what is planned for: "
            "run one forward on a batch (with torch.no_grad(): model(x)) before planning"
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def model_digest(model: nn.Module) -> str:
    """Identity of a model's structure: module classes, parameter and buffer names, shapes, dtypes, what is trained.

    A plan for a model whose first forward makes buffers (rotary tables, masks) has two, that before it and that after it, with a stroke between them.
    """
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    tensors = [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, list(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
    return digest(modules, tensors, buffers, model.training)
