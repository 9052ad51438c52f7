"""ZeRO 2 and ZeRO 3: `torch.distributed.fsdp.fully_shard` on each of the model's repeated blocks and on what is left of it.

Without resharding after forward, whole parameters are there from a block's forward to its backward (ZeRO 2, which shares out gradients and state; between
steps parameters are shared out, too); with it they are gathered a second time for backward (ZeRO 3). Under ZeRO 2 the whole model may be one unit: gathered
before forward, its gradients reduced after backward, in one collective each, where whole gradients fit besides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from memfit.errors import CaptureError, InputError
from memfit.sharding.sharded import OptimizerFactory, ShardedModel
from memfit.sharding.unit_calls import UnitCalls
from memfit.techniques.layer_streaming.blocks import repeated_blocks


class FullySharded(ShardedModel):
    """Parameters are shards between steps.

    The optimizer steps the shards as plain tensors, not as the DTensors that torch puts into the model: formats of state, chunks and fused kernels are
    then those of one device, and blocks of 8-bit state lie within shards.

    Args:
        model, group: as for `ShardedModel`.
        mesh: the group as a mesh of one dimension.
        reshards: after forward (ZeRO 3).
        one_unit: the blocks are not gathered and reduced one by one.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh, *, reshards: bool, one_unit: bool = False
    ) -> None:
        super().__init__(model, group)
        self._classes = {module: type(module) for module in model.modules()}
        self._used: set[nn.Parameter] = set()  # by this rank, in a step
        self._collects = False  # in a micro-batch, after which `collect` is called
        found = () if one_unit else units(model)
        _check_not_shared(model, found)
        for path in found:
            fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        # The first time that parameters are gathered makes what holds them: before the first step, so that it is like all others.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
                for unit in _groups(module):
                    self._reduce_what_has_no_gradient(unit)
        self._shards = {name: _local(p) for name, p in model.named_parameters()}
        self._shard_of = {p: self._shards[name] for name, p in model.named_parameters()}
        self._unit_calls = UnitCalls(model, found, group) if found and self.agreement.real else None
        # After the hook in which torch gathers.
        self._hooks = [model.register_forward_pre_hook(self._let_go_of_buffer)] if one_unit else []

    def _reduce_what_has_no_gradient(self, unit: Any) -> None:
        """Send zeros for it beside the others of its unit: torch reduces what has a gradient here, and another rank may have used other parameters.

        Where nothing in a unit has a gradient yet, torch has called this for one of several uses, or in a backward inside the loss.
        """
        reduce = unit.post_backward

        def post_backward(*unused: Any) -> None:
            if unit.reduce_grads:
                trained = [each for each in unit.fsdp_params if each.unsharded_param.requires_grad]
                used = [
                    p for p in trained if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None
                ]
                self._used.update(each.sharded_param for each in used)
                for each in trained if used else ():
                    if each not in used:
                        each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
            reduce(*unused)
            if not self._collects:
                self._lend(unit)

        unit.post_backward = post_backward

    def _let_go_of_buffer(self, *_: Any) -> None:
        """Of the only all-gather. torch holds each until the next or the end of forward, so that sending one may overlap with copying from the other."""
        context: Any = self._root()._get_fsdp_state()._comm_ctx
        if (gathered := context.all_gather_state) is not None:
            context.all_gather_copy_in_stream.wait_event(gathered.event)
            context.all_gather_stream.wait_event(gathered.event)
            context.all_gather_state = None

    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def parameters(self) -> list[nn.Parameter]:
        """The shards."""
        return list(self._shards.values())

    @property
    def shards_parameters(self) -> bool:
        """Rows of each."""
        return True

    def placed(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """As a DTensor laid out as the parameter is."""
        whole: Any = self.model.get_parameter(name)
        found: torch.Tensor = DTensor.from_local(
            part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return found

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Its rows."""
        laid_out: Any = self.model.get_parameter(name)
        found = distribute_tensor(
            whole.to(laid_out.device), laid_out.device_mesh, laid_out.placements, src_data_rank=None
        )
        return _plain(found)

    def held(self) -> list[torch.Tensor]:
        """Shards are padded to equal sizes, in the same storages."""
        return []

    def gathered(self) -> list[torch.Tensor]:
        """Whole parameters, known from the first forward on."""
        return [
            output
            for module in self.model.modules()
            if isinstance(module, FSDPModule)
            for group in _groups(module)
            for parameter in group.fsdp_params
            for output in getattr(parameter, "all_gather_outputs", ())
        ]

    def accumulated(self) -> list[torch.Tensor]:
        """Of whole parameters."""
        return [p.grad for p in self._whole() if p.grad is not None]

    def _whole(self) -> list[torch.Tensor]:
        return [
            parameter.unsharded_param
            for module in self.model.modules()
            if isinstance(module, FSDPModule)
            for group in _groups(module)
            for parameter in group.fsdp_params
            if hasattr(parameter, "_unsharded_param")
        ]

    def optimizer(
        self, make: OptimizerFactory, arrange: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The user's, over the shards."""
        made = arrange(make(iter(self.trainable())))
        made.register_step_pre_hook(lambda *_: self.collect_awaited())
        return made

    def _lend(self, unit: Any) -> None:
        """In a loop of the user's own: a scaler works on the shards' gradients before the update, and clipping on the model's, so these are the same bytes."""
        for each in unit.fsdp_params:
            if each.sharded_param.grad is not None:
                self._shard_of[each.sharded_param].grad = _plain(each.sharded_param.grad)

    def follow_cleared(self) -> None:
        """What one side has no longer goes from the other."""
        for parameter, shard in self._shard_of.items():
            if parameter.grad is None or shard.grad is None:
                parameter.grad = shard.grad = None
                self._used.discard(parameter)

    def collect_awaited(self) -> None:
        """In a loop of the user's own nothing has called `collect` by the time of the update; what is left is alike on all ranks."""
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            self.collect()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gradients are whole until the last micro-batch, in which they are added up over ranks and sharded."""
        self._root().set_requires_gradient_sync(last)
        with warnings.catch_warnings():
            # Nearly every model's output is a view. What the warning is about, a loss that writes into it, only leaves out a hook of the model itself, whose
            # parameters are not resharded after forward.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            self._collects = True
            try:
                yield
            finally:
                self._collects = False

    def collect(self, *, agrees: bool = False) -> None:
        """Hand the shards' gradients over; none has to be there. What no rank has used has none, as in plain PyTorch: an optimizer leaves it as it is."""
        del agrees
        named = dict(self.model.named_parameters())
        zeros = [parameter.grad is not None and parameter not in self._used for parameter in named.values()]
        unused = self.agreement.said_by_all(zeros)
        self._used.clear()
        for (name, parameter), by_none in zip(named.items(), unused, strict=True):
            if parameter.grad is not None:
                self._shards[name].grad = None if by_none else _plain(parameter.grad)
                parameter.grad = None

    def clip(self, norm: float) -> torch.Tensor:
        """The squares of the shards' norms are added up over ranks."""
        gradients = [p.grad for p in self._shards.values() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients).square_() if gradients else torch.zeros(())
        dist.all_reduce(total, group=self.group)
        torch.nn.utils.clip_grads_with_norm_(self.trainable(), norm, total.sqrt_())
        return total

    def clear(self, *, accumulates: bool) -> None:
        """Shards and whole parameters alike."""
        del accumulates
        for parameter in (*self._shards.values(), *self.model.parameters(), *self._whole()):
            parameter.grad = None

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Parameters are shards again afterwards, and calls are forgotten: only a backward would have seen to either."""
        self.agreement.call("engine.evaluating()")
        context: Any = self._root()._get_fsdp_state()._comm_ctx
        calls = len(context.post_forward_order)
        try:
            yield self.model
        finally:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
                    for group in _groups(
                        module
                    ):  # or the next backward would gather the unit that was called last here
                        group._post_forward_indices[:] = [n for n in group._post_forward_indices if n < calls]
            del context.post_forward_order[calls:]

    def whole(self) -> dict[str, torch.Tensor]:
        """Gathered one by one, on all ranks."""
        self.agreement.call("engine.state_dict()")
        return super().whole()

    def close(self) -> None:
        """Take the hooks and classes of `fully_shard` off the model."""
        for hook in self._hooks:
            hook.remove()
        if self._unit_calls is not None:
            self._unit_calls.close()
        unsharded(self._classes)


def units(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules whose parameters are gathered together: the model's largest family of repeated blocks; the model as a whole is one more."""
    found = repeated_blocks(model)
    return found[0].paths if found else ()


def _check_not_shared(model: nn.Module, paths: Sequence[str]) -> None:
    """Raise CaptureError where a parameter is in several units: each would get a shard and an optimizer's state of its own, and some versions of torch say so.

    Args:
        model: whole.
        paths: of its units besides the model as a whole.
    """
    first: dict[nn.Parameter, tuple[str, str]] = {}  # the unit and the name that a parameter is met by first
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((path for path in paths if name.startswith(f"{path}.")), "")
        other_unit, other = first.setdefault(parameter, (unit, name))
        if unit != other_unit:
            raise CaptureError(
                f"{other} and {name} are one parameter, and fully_shard gathers each block by itself: train data parallel or with ZeRO 1, or with the model as "
                'one unit (fixed={"sharding": "zero2+whole"})'
            )


def _local(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_plain(parameter), requires_grad=parameter.requires_grad)


def _plain(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, as the storage has it."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
        return local.detach()


def _groups(module: FSDPModule) -> list[Any]:
    """Parameter groups of one `fully_shard` (a list in newer versions of torch)."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def unsharded(classes: dict[nn.Module, type]) -> None:
    """Undo what `fully_shard` made of modules, but for their tensors."""
    from torch.distributed._composable_state import _module_state_mapping

    for module, kind in classes.items():
        module.__class__ = kind
        _module_state_mapping.pop(module, None)


def checked(model: nn.Module) -> None:
    """Refuse what `fully_shard` cannot shard.

    Raises:
        InputError: a parameter without dimensions, or not contiguous.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 or not parameter.is_contiguous():
            what, instead = (
                ("is a single number", "give it the shape (1,)")
                if parameter.ndim == 0
                else ("is not contiguous", "make it contiguous")
            )
            raise InputError(
                f"the parameter {name} {what}, which torch's fully_shard cannot shard: train data parallel or with ZeRO 1, or {instead}"
            )
