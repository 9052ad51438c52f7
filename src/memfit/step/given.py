"""Loss and optimizer in the forms in which people hand them over, as the functions that a step calls: a criterion, a class, a name, an object."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memfit.batches import Batch, LossFunction, size
from memfit.errors import BatchError, InputError
from memfit.optimizers.alike import unwrapped
from memfit.optimizers.lion import Lion
from memfit.step.other_kernels import refuse_other_kernels, refuse_other_loss
from memfit.step.program import OptimizerFactory

_FUSED: Final = frozenset(["Adam", "AdamW", "SGD", "Adagrad"])  # have a form in one kernel, without temporaries


@dataclass(frozen=True, slots=True)
class OfPair:
    """The loss of batches that are pairs (input, target): the criterion of the model's output and the target.

    Attributes:
        criterion: such as `torch.nn.CrossEntropyLoss()` or `torch.nn.functional.mse_loss`.
    """

    criterion: Any

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scalar loss.

        Raises:
            InputError: the batch is no pair.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            name = _name_of(self.criterion)
            raise InputError(
                f"the loss {name} takes the model's output and a target, and the batch is {_form(batch)}, no pair (input, target): write "
                "loss_fn=lambda model, batch: ..., which returns the scalar loss"
            )
        loss: torch.Tensor = self.criterion(model(batch[0]), batch[1])
        return loss


def loss_function(given: Any) -> LossFunction | None:
    """`loss_fn(model, batch)` of what was given for it: such a function, a criterion of torch for pairs (input, target), or None.

    Raises:
        InputError: it is none of these.
    """
    if given is None or isinstance(given, OfPair):
        return given
    if isinstance(given, str) and callable(getattr(nn.functional, given, None)):
        raise InputError(
            f"loss_fn={given!r} is a name: write loss_fn=nn.functional.{given}, for batches (input, target)"
        )
    if isinstance(given, (str, int)):
        raise InputError(f"loss_fn={given!r} is no function: if it is the budget, name it, budget={given!r}")
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise InputError(f"loss_fn={given.__name__} is a class: write loss_fn=nn.{given.__name__}()")
    if isinstance(given, torch.optim.Optimizer) or _makes_optimizers(given):
        name = getattr(given, "__name__", type(given).__name__)
        raise InputError(f"loss_fn is an optimizer ({name}): name it, optimizer=...")
    refuse_other_loss(given)
    if _of_torch(given):
        return OfPair(given)
    if not callable(given):
        raise InputError(
            f"loss_fn={given!r} is no function: write loss_fn=lambda model, batch: ..., which returns the scalar loss"
        )
    if (signature := _takes_not(given, 2)) is not None:
        raise InputError(
            f"loss_fn takes {signature}, and it is called with the model and the whole batch: write loss_fn=lambda model, batch: ..., which takes the batch "
            "apart"
        )
    return given  # type: ignore[no-any-return]


def _takes_not(given: Any, number: int) -> inspect.Signature | None:
    """What a function takes that cannot be called with so many arguments; None where it can."""
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # of what is written in C there may be none
        return None
    try:
        signature.bind(*(None for _ in range(number)))
    except TypeError:
        return signature
    return None


def _of_torch(given: Any) -> bool:
    """Whether this is a criterion of torch, which takes (input, target): a module of `torch.nn.modules.loss`, or a function of `torch.nn.functional`."""
    if isinstance(given, nn.Module):
        return type(given).__module__ == "torch.nn.modules.loss"
    return getattr(given, "__module__", "") == "torch.nn.functional"


def optimizer_factory(given: Any, model: nn.Module) -> OptimizerFactory | None:
    """What makes the optimizer from the parameters, of what was given for it: such a function, a class, a name of torch's, an optimizer of the model, or None.

    Raises:
        InputError: it is none of these, or there is more than one.
    """
    if given is None or isinstance(given, type):
        return given
    if isinstance(given, str):
        return _by_name(given)
    if isinstance(given, torch.optim.Optimizer):
        return _alike(unwrapped(given), model)
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        raise InputError(
            f"optimizer is a schedule ({type(given).__name__}): give its optimizer, and call the schedule's step() after each engine.step(batch)"
        )
    if isinstance(given, (Sequence, Mapping)) and any(
        isinstance(each, torch.optim.Optimizer) or callable(each) for each in _members(given)
    ):
        raise InputError(
            f"optimizer holds {len(given)} optimizers, and a step of memfit has one, after one backward: plan each of them on its own, with the part of the "
            "model that it trains and its own loss_fn (of a GAN, the generator and the discriminator)"
        )
    if not callable(given):
        raise InputError(
            f"optimizer={given!r}: write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        )
    if (signature := _takes_not(given, 1)) is not None:
        raise InputError(
            f"optimizer takes {signature}, and it is called with the parameters: write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        )
    return given  # type: ignore[no-any-return]


def _makes_optimizers(given: Any) -> bool:
    return isinstance(given, type) and issubclass(given, torch.optim.Optimizer)


def refuse_made_optimizer(given: Any) -> None:
    """Refuse, where a step is shared out among ranks, an optimizer that holds the whole model's parameters.

    Raises:
        InputError: it is one.
    """
    if isinstance(given, torch.optim.Optimizer):
        raise InputError(
            "the optimizer of a sharded model is made over this rank's shards: hand over a function that makes it (lambda p: torch.optim.AdamW(p))"
        )


def _by_name(name: str) -> OptimizerFactory:
    known: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known["lion"] = Lion
    wanted = name.lower().removeprefix("torch.optim.").removeprefix("paged_").removesuffix("_torch").replace("_", "")
    wanted = wanted.removesuffix("torchfused").removesuffix("fused")
    kind = known.get(wanted)
    whole = known.get(wanted.removesuffix("8bit"))
    if kind is None and whole is not None and wanted.endswith("8bit"):
        raise InputError(
            f'optimizer={name!r}: write optimizer="{whole.__name__}", allow=["8bit"]: memfit keeps the state in 8 bits where that helps'
        )
    if kind is None:
        near = get_close_matches(name.lower(), known, 1, 0.6)
        hint = f"did you mean {known[near[0]].__name__!r}; " if near else ""
        raise InputError(
            f"optimizer={name!r}: torch.optim has none of this name; {hint}any other is given by a function, "
            "optimizer=lambda parameters: MyOptimizer(parameters, lr=1e-4)"
        )
    settings: dict[str, Any] = {"fused": True} if kind.__name__ in _FUSED else {}
    return lambda parameters: kind(parameters, **settings)


def _alike(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """Makes optimizers of this one's kind, groups and settings, over the model's parameters as they are by then (in a capture they are others)."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    groups: list[tuple[list[int], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in places for parameter in group["params"]):
            raise InputError(
                f"the optimizer ({type(optimizer).__name__}) holds parameters that are not the model's: make it from model.parameters(), after the model is as "
                "it is to be trained, or give the function that makes it: optimizer=lambda parameters: torch.optim.AdamW(parameters)"
            )
        settings = {name: value for name, value in group.items() if name != "params"}
        groups.append(([places[id(parameter)] for parameter in group["params"]], settings))
    kind = type(optimizer)
    taken = set(inspect.signature(kind).parameters)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = {id(parameter) for parameter in parameters}
        now = list(model.parameters())
        made = [
            {**settings, "params": [now[place] for place in own if id(now[place]) in trained]}
            for own, settings in groups
        ]
        return kind([group for group in made if group["params"]], **defaults)

    return make


def check_sample(sample: Any) -> None:
    """Check that a sample is a batch and not what gives batches, before anything runs.

    Raises:
        InputError: it is a loader or a dataset.
        BatchError: it is no batch, or holds no samples.
    """
    if isinstance(sample, torch.utils.data.DataLoader):
        raise InputError(
            "sample is a DataLoader: give one batch of it, the largest that will come, such as sample=next(iter(loader))"
        )
    if sample is None:
        raise InputError(
            "no sample was given: give one batch, the largest that will come, such as memfit.plan(model, next(iter(loader)), loss_fn, budget=...)"
        )
    if isinstance(sample, torch.utils.data.Dataset):
        raise InputError(
            "sample is a Dataset: give one batch of it, such as sample=next(iter(torch.utils.data.DataLoader(dataset, batch_size=8)))"
        )
    if size(sample) == 0:
        raise BatchError("the batch holds no samples: give one of the largest shape that will come")


def made_optimizer(make: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """What a factory makes of these parameters: one optimizer.

    Raises:
        InputError: it is something else, or nothing (a `return` was forgotten), or the factory takes the parameters for the model.
    """
    try:
        made: Any = make(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise InputError(
            f"optimizer is called with the parameters, and asks them for .{error.name}, as if they were the model: write "
            "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        ) from error
    if not hasattr(made, "param_groups"):
        raise InputError(
            f"optimizer gave {_form(made)}: it has to return one torch.optim.Optimizer over the parameters that it is given; several are planned one by one"
        )
    return made  # type: ignore[no-any-return]


def check_trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that an optimizer is over some of this model's parameters.

    Raises:
        InputError: it is over those of another one, a copy, say.
    """
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the model's parameters, so nothing would be trained: make it from model.parameters() "
            "of the very model that is handed over"
        )


def steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer without a closure.

    Raises:
        InputError: its `step` takes a closure and fails without one.
    """
    try:
        optimizer.step()
    except Exception as error:
        if "closure" not in inspect.signature(type(optimizer).step).parameters or "closure" not in str(error):
            raise
        raise _closure_needed(optimizer) from error


def check_closure(made: Any) -> None:
    """Check that an optimizer steps without a closure.

    Raises:
        InputError: it does not.
    """
    closure = inspect.signature(type(made).step).parameters.get("closure") if made is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _closure_needed(made)


def _closure_needed(optimizer: Any) -> InputError:
    return InputError(
        f"{type(optimizer).__name__} calls a closure that runs forward and backward again, as often as it likes, so no step of it can be planned: take an "
        "optimizer that steps once after each backward, such as torch.optim.AdamW, or plan with optimizer=None and call engine.forward() inside your own "
        "closure (the optimizer's own memory is then not counted)"
    )


def check_model(model: Any) -> None:
    """Check that a model is one, of operations that can be planned by, before anything is asked of it.

    Raises:
        InputError: it is something else; the message says what to write.
    """
    if isinstance(model, nn.Module):
        refuse_other_kernels(model)
        if any(not is_lazy(parameter) and parameter.is_inference() for parameter in model.parameters()):
            raise InputError(
                "the model was built inside torch.inference_mode(), where nothing that is made can be trained: build or load it outside"
            )
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"the model is the class {model.__name__}: give a module, made by {model.__name__}(...)")
    if isinstance(model, str):
        raise InputError(
            f"the model is the text {model!r}: give a torch.nn.Module, such as transformers.AutoModelForCausalLM.from_pretrained(folder); of a folder, "
            "`memfit estimate FOLDER` tells what it takes"
        )
    if isinstance(model, (Sequence, Mapping)) and any(isinstance(each, nn.Module) for each in _members(model)):
        raise InputError(
            f"the model is {_form(model)}, and a step trains one: put them into one torch.nn.Module whose loss_fn runs them all, or, where each has an "
            "optimizer of its own (a GAN), plan each of them on its own"
        )
    whose = {base.__module__.split(".")[0] for base in type(model).__mro__ if base.__name__ == "Trainer"}
    if "transformers" in whose:
        raise InputError("the model is a Trainer of transformers: call memfit.transformers.fit(trainer, budget=...)")
    if whose & {"lightning", "pytorch_lightning"}:
        raise InputError(
            "the model is a Trainer of Lightning: write Trainer(..., callbacks=[memfit.lightning.FitToMemory(budget=...)])"
        )
    hint = "; the arguments are model, sample, loss_fn, budget, optimizer, in this order" if _is_batch(model) else ""
    raise InputError(f"the model is {type(model).__name__}: give a torch.nn.Module{hint}")


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _is_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (Sequence, Mapping)) and any(isinstance(each, torch.Tensor) for each in _members(value))
    )


def _name_of(criterion: Any) -> str:
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def _form(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, list(value)[:4]))}"
    return f"a {type(value).__name__}"
