"""What a step must not run, refused in one sentence wherever a model comes in: compiled code, and kernels that PyTorch's dispatcher does not see.

memfit plans by the operations that a dispatch mode sees. Compiled code fuses them and allocates otherwise; a Triton kernel writes where no operation says
so. What can be told from the model is told before anything runs (`refuse_other_kernels`), the rest while a step is captured (`running_compiled`) or from the
error that it ends with there (`explained`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.step.modules import modules_of

_DYNAMO: Final = "torch._dynamo.eval_frame"  # where it is not loaded, nothing can have been compiled
_AS_WRITTEN: Final = "force_eager"
_LIGER: Final = "liger_kernel"
_TO_SDPA: Final = 'model.set_attn_implementation("sdpa"), or "attn_implementation": "sdpa" in its config.json'
_TRITON: Final = (
    "a Triton kernel needs a GPU and tensors with values, so a step with one can be planned for only on a computer that has the GPU: plan there, or put "
    "PyTorch's own operations in the kernel's place"
)
_FLEX: Final = (
    "flex_attention is made to be compiled by torch.compile, and memfit plans by single operations: take "
    f"torch.nn.functional.scaled_dot_product_attention, with the mask as attn_mask (a model of transformers is told so by {_TO_SDPA})"
)

_FUNC: Final = (
    "the step uses torch.func.grad, vjp, jacrev or hessian, which PyTorch runs under no saved-tensor hooks, and by these memfit sees what autograd keeps: take "
    "torch.autograd.grad(..., create_graph=True), or torch.autograd.functional.jacobian and hessian, in its place"
)
_SUBCLASS: Final = (
    "the step calls a subclass of torch.Tensor to make a tensor (torch.nn.attention.bias.causal_lower_right does), which PyTorch cannot where a dispatch mode "
    "sees its operations, and by that memfit sees them: take is_causal=True or a mask of booleans for attention, and tensor.as_subclass(...) for classes of "
    "your own"
)


def compiled(what: str) -> InputError:
    """The refusal of compiled code.

    Args:
        what: is compiled, as a subject: "the model".
    """
    return InputError(
        f"{what} is compiled by torch.compile: fused operations allocate other bytes than the single ones that memfit plans by, and none inside can be "
        'dropped and run again. Leave torch.compile out, or call torch.compiler.set_stance("force_eager") first, and what is compiled runs as it is written'
    )


def liger(what: str) -> InputError:
    """The refusal of Liger's kernels.

    Args:
        what: runs them, as a subject.
    """
    return InputError(
        f"{what} runs kernels of the package liger-kernel: they are Triton's and write where no operation of PyTorch says so, so memfit can neither count "
        "them nor run them again. Leave Liger out; in place of its fused loss memfit has a loss head in chunks, which a plan takes where it pays, or by "
        'fixed={"loss_chunks": 8}'
    )


def refuse_other_kernels(model: nn.Module, name: str = "the model") -> None:
    """Check that a model runs PyTorch's own operations, as far as it shows before it runs.

    Args:
        model: any module.
        name: what it is, in the message.

    Raises:
        InputError: a part is compiled, has attention of another package, or kernels of Liger's; the message says what to do.
    """
    written = runs_as_written()
    own_forwards: set[Any] = set()
    for path, module in modules_of(model).items():
        what = f"{name}'s {path}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} is TorchScript, which takes other operations after its first calls than before, so what is captured would not be what runs: give the "
                "module that it was made of"
            )
        if not written and _is_compiled(module):
            raise compiled(what)
        attention = getattr(vars(module).get("config"), "_attn_implementation", None)
        if isinstance(attention, str):
            refuse_attention(attention)
        forward = vars(module).get("forward", type(module).forward)
        if type(module).__module__.startswith(f"{_LIGER}.") or _of_liger(forward):
            raise liger(what)
        code = getattr(forward, "__code__", None)
        if code is None or code in own_forwards:
            continue
        own_forwards.add(code)
        names = forward.__globals__
        if any(_of_liger(names[called]) for called in code.co_names if called in names):
            raise liger(what)


def refuse_attention(name: str | None) -> None:
    """Check that attention is made of PyTorch's own operations.

    Args:
        name: that transformers has for it; None for its own choice.

    Raises:
        InputError: it is not.
    """
    if name is None:
        return
    if "flex_attention" in name:
        raise InputError(f'attn_implementation="{name}": {_FLEX}')
    if "flash" in name or "/" in name:
        raise InputError(
            f'attn_implementation="{name}" runs kernels of another package, which need a GPU and allocate what PyTorch does not see, so their memory cannot be '
            f'predicted: take "sdpa", PyTorch\'s own, whose flash kernel memfit counts on a GPU ({_TO_SDPA})'
        )


def refuse_other_loss(loss_fn: Any) -> None:
    """The same of a loss function.

    Raises:
        InputError: as for `refuse_other_kernels`.
    """
    if isinstance(loss_fn, nn.Module):
        refuse_other_kernels(loss_fn, "the loss function")
    elif _of_liger(loss_fn) or type(loss_fn).__module__.startswith(f"{_LIGER}."):
        raise liger("the loss function")
    elif _is_compiled_function(loss_fn) and not runs_as_written():
        raise compiled("the loss function")


class CompileWatch:
    """Refuses steps through code that was compiled after the step was planned, or whose stance was taken back.

    The modules inside the model are looked at before the first step and after a change of stance; the model itself, the loss function and the optimizer before
    each step.
    """

    def __init__(self) -> None:
        self._looked = False

    def check(self, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer | None, *, first: bool) -> None:
        """Look before a step.

        Args:
            model, loss_fn, optimizer: of the step; None where there is none.
            first: no step was taken yet, other than in a rehearsal.

        Raises:
            InputError: something that the step would run is compiled.
        """
        if _DYNAMO not in sys.modules:
            return
        if runs_as_written():
            self._looked = False
            return
        for path, module in [("", model)] if self._looked and not first else modules_of(model).items():
            if _is_compiled(module):
                raise compiled(f"the model's {path}" if path else "the model")
        self._looked = True
        if _is_compiled_function(loss_fn) or (isinstance(loss_fn, nn.Module) and _is_compiled(loss_fn)):
            raise compiled("the loss function")
        if _is_compiled_function(getattr(optimizer, "__dict__", {}).get("step")):
            raise compiled("the optimizer's step")


def running_compiled() -> str:
    """Name of the compiled function that called the operation which is running; "" where none did."""
    frame = sys._getframe(1) if _DYNAMO in sys.modules else None  # noqa: SLF001 - the only way to see one's callers
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == _DYNAMO:
            function = frame.f_locals.get("fn")
            return str(getattr(function, "__qualname__", type(function).__name__))
        frame = frame.f_back
    return ""


@contextmanager
def run_as_written() -> Iterator[bool]:
    """Inside, compiled code runs as single operations, even what was compiled before.

    Yields:
        Whether it runs so outside, too, as the user has said.
    """
    if _DYNAMO not in sys.modules:
        yield False
        return
    before = runs_as_written()
    with torch.compiler.set_stance(_AS_WRITTEN):
        yield before


def explained(error: BaseException, *, on_gpu: bool) -> InputError | None:
    """What to say of an error that a capture ended with: in another's kernel, in `torch.func`, or for a class of tensors; None for any other.

    Args:
        error: that was raised.
        on_gpu: the model is on a GPU of this computer, where Triton's kernels run, and what they raise is the user's own.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError):
            return None
        if "torch.func" in str(found) and "saved tensor hooks" in str(found):
            return InputError(_FUNC)
        if "Creating a new Tensor subclass" in str(found):
            return InputError(_SUBCLASS)
        traceback = found.__traceback__
        while traceback is not None:
            file = PurePath(traceback.tb_frame.f_code.co_filename)
            if _LIGER in file.parts:
                return liger("the step")
            if file.parts[-3:] == ("nn", "attention", "flex_attention.py"):
                return InputError(_FLEX)
            if not on_gpu and file.parts[-3:-1] == ("triton", "runtime"):
                return InputError(_TRITON)
            traceback = traceback.tb_next
        found = found.__cause__
    return None


def runs_as_written() -> bool:
    """Whether the user has told torch to run what is compiled as it is written."""
    dynamo = sys.modules.get(_DYNAMO)
    return dynamo is not None and dynamo._stance.stance == _AS_WRITTEN  # noqa: SLF001 - torch sets it by a public function and has none to ask


def _is_compiled(module: nn.Module) -> bool:
    # `torch.compile(module)` and `module.compile()` both leave a compiled function among the attributes.
    return _DYNAMO in sys.modules and any(map(_is_compiled_function, vars(module).values()))


def _is_compiled_function(value: Any) -> bool:
    """Whether this is what torch.compile made of a function; `torch.compiler.disable` leaves the same mark and one of its own."""
    own: Callable[[str], Any] = getattr(value, "__dict__", {}).get
    return own("_torchdynamo_orig_callable") is not None and not own("_torchdynamo_disable")


def _of_liger(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(f"{_LIGER}.")
