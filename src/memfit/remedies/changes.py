"""What a user could ask for besides, where nothing fits: arguments of `memfit.plan`, a switch of the model, adapters. Each says what it changes.

A change is made to the request, or to what is captured (`TraceSource`), never to the user's own model for good: a switch is put back, adapters go into a copy
without weights.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.capture.trace_source import TraceSource
from memfit.lower_tiers import capacity
from memfit.storage.staging import STAGES_BYTES
from memfit.techniques.frozen_weights.four_bit import bitsandbytes_quiet
from memfit.techniques.layer_streaming.blocks import own_parameters, repeated_blocks
from memfit.techniques.registry import ALLOWED
from memfit.units import format_budget, parse_bytes
from memfit.values.bundle import Weighting
from memfit.values.request import Request, TierBudget

OFFLOADING: Final = "offloading"
DIVIDING: Final = "micro-batches"
LORA_RANK: Final = 8
SGD: Final = "optimizer=functools.partial(torch.optim.SGD, lr=0.01)"
SGD_KEYS: Final = ('optim={"name": "sgd", "lr": 0.01}',)  # the same in a run file


class Effect(IntEnum):
    """What a change does to the results; what does less comes first."""

    SAME_NUMBERS = 0
    ORDER_OF_ADDITIONS = 1
    ROUNDED = 2
    LESS_IS_TRAINED = 3
    ANOTHER_TRAINING = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that are there when the optimizer updates, at least: of parameters, gradients and optimizer state."""

    parameters: float
    gradients: float
    state: float

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.state

    def times(self, parameters: float, gradients: float, state: float) -> Held:
        """With a share of each left."""
        return Held(self.parameters * parameters, self.gradients * gradients, self.state * state)

    def under(self, shares: Sequence[tuple[float, float, float]]) -> Held:
        """What several changes leave at least. Of parameters the smallest share: weights in 4 bits are not halved by 16."""
        parameters = min((each[0] for each in shares), default=1.0)
        return self.times(parameters, prod(each[1] for each in shares), prod(each[2] for each in shares))


def _same(anything: Any) -> Any:
    return anything


def _nothing(model: nn.Module) -> AbstractContextManager[object]:
    del model
    return nullcontext()


@dataclass(frozen=True)
class Change:
    """One thing that the user could ask for.

    Attributes:
        name: of the change, unique.
        effect: on the results.
        settings: of techniques, that a candidate has under it and would not have without.
        request: makes the request that asks for it.
        source: makes what the steps are captured from.
        inside: is entered around everything that is captured; takes the user's model.
        statement: what to write besides arguments of `memfit.plan`; "" for nothing.
        keys: of a run file, as `--set` takes them, that do what the statement does; None where none does.
        shares: of parameters, gradients and state, the least that may be left of them.
        apart: names of changes that it cannot be combined with.
        kind: of the remedy.
    """

    name: str
    effect: Effect
    settings: Mapping[str, Any] = field(default_factory=dict)
    request: Callable[[Request], Request] = _same
    source: Callable[[TraceSource], TraceSource] | None = None
    inside: Callable[[nn.Module], AbstractContextManager[object]] = _nothing
    statement: str = ""
    keys: tuple[str, ...] | None = ()
    shares: tuple[float, float, float] = (1.0, 1.0, 1.0)
    apart: tuple[str, ...] = ()
    kind: str = ""


def in_words(some: Sequence[Change]) -> str:
    """Changes as the user would ask for them, without the numbers that were tried: 'host_budget, allow=["8bit", "4bit"], freeze'."""
    words = [change.name for change in some if change.name in ALLOWED]
    told = {
        OFFLOADING: "host_budget",
        "adapters": "adapters (peft.LoraConfig)",
        DIVIDING: "another number of micro-batches",
    }
    others = [
        told.get(change.name) or (change.statement or change.name) for change in some if change.name not in ALLOWED
    ]
    return ", ".join([*others, *([f"allow={json.dumps(words)}"] if words else [])])


# Of parameters, gradients and state, what a word of `allow=` leaves at least.
_SHARES: Final = {
    "in_backward": (1.0, 0.0, 1.0),
    "8bit": (1.0, 1.0, 0.25),
    "bf16": (1.0, 1.0, 1.0),
    "bf16_parameters": (0.5, 0.5, 0.5),
    "4bit": (0.125, 1.0, 1.0),
}
_APART: Final = {"bf16_parameters": ("bf16", "8bit"), "freeze": ("adapters",)}


def changes(source: TraceSource, request: Request, room_bytes: int) -> list[Change]:
    """All changes that may be tried for this model and request, those that change results least first.

    Args:
        source: of the model, batch and optimizer.
        request: what the user asked.
        room_bytes: that a lower tier needs so that everything could be offloaded.
    """
    found = [
        *_offloading(source, request, room_bytes),
        *_switches(source),
        *_allowed(request),
        *_adapters(source, request),
        *_freezing(source, request),
    ]
    return sorted(found, key=lambda change: change.effect)


def arguments(before: Request, after: Request) -> dict[str, Any]:
    """The keyword arguments of `memfit.plan` that make one request of another."""
    made: dict[str, Any] = {}
    for name in ("allow", "freeze"):
        if getattr(before, name) != getattr(after, name):
            made[name] = list(getattr(after, name))
    for name in ("host_budget", "disk_budget"):
        budget: TierBudget | None = getattr(after, name)
        if budget != getattr(before, name) and budget is not None:
            made[name] = budget.given
    if before.told_fixed != after.told_fixed:
        made["fixed"] = after.told_fixed
    return made


def written(given: Mapping[str, Any], statements: Sequence[str] = ()) -> str:
    """Arguments and statements as the user would write them."""
    told = ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
    return " and ".join([*statements, *([told] if told else [])])


def _offloading(source: TraceSource, request: Request, room_bytes: int) -> Iterator[Change]:
    """More of the nearest lower tier: what a CPU offloads at all only on request, and a GPU without limit where none is given."""
    gpu = source.machine.kind == "cuda"
    have = request.host_budget
    if gpu and have is None:
        return
    needed = room_bytes + (STAGES_BYTES if request.disk_budget is not None else 0)
    given = format_budget(needed)
    size = parse_bytes(given)
    if (have is not None and have.bytes >= size) or capacity(source.machine, "host", request.folder) < size:
        return

    def more(asked: Request) -> Request:
        return replace(asked, host_budget=TierBudget(given, size))

    yield Change(OFFLOADING, Effect.SAME_NUMBERS, request=more)


def resident_bytes(model: nn.Module) -> int:
    """Parameter bytes that are on the device at least where layers are streamed: of what is in no block, and of the largest block."""
    found = repeated_blocks(model)
    every = sum(p.nbytes for p in model.parameters())
    if not found:
        return every
    blocks = own_parameters(model, found[0].paths).values()
    return every - found[0].own_bytes + max(sum(p.nbytes for p in own) for own in blocks)


def keeps_cache(model: Any) -> bool:
    """Whether a Hugging Face model hands out its keys and values with what it computes: a decoder, or one with a decoder, whose `use_cache` is on."""
    config = getattr(model, "config", None)
    decodes = getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False)
    return bool(decodes) and getattr(config, "use_cache", False) is True


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    before, model.config.use_cache = model.config.use_cache, False
    try:
        yield
    finally:
        model.config.use_cache = before


def _switches(source: TraceSource) -> Iterator[Change]:
    """Hugging Face's cache of keys and values, which nothing reads in training: it holds activations, and streamed blocks cannot have it."""
    if keeps_cache(source.model):
        yield Change(
            "use_cache",
            Effect.SAME_NUMBERS,
            source=replace,
            inside=_without_cache,
            statement="model.config.use_cache = False",
            keys=None,
        )


def _allowed(request: Request) -> Iterator[Change]:
    """Words of `allow=`. fp16 takes no fewer bytes than bf16, and skips steps."""
    for word, (name, setting) in ALLOWED.items():
        if word in request.allow or word == "fp16" or name in request.fixed:
            continue
        yield Change(
            word,
            Effect.SAME_NUMBERS if word == "in_backward" else Effect.ROUNDED,
            {name: setting},
            partial(_allowing, word=word),
            shares=_SHARES.get(word, (0.0, 0.0, 0.0)),
            apart=_APART.get(word, ()),
        )


def _allowing(request: Request, word: str) -> Request:
    return replace(request, allow=(*request.allow, word))


def _freezing(source: TraceSource, request: Request) -> Iterator[Change]:
    """All but the last of the repeated blocks, and what is before them."""
    patterns = below_the_last_block(source.model)
    if patterns and not request.freeze:
        yield Change(
            "freeze",
            Effect.LESS_IS_TRAINED,
            request=lambda asked: replace(asked, freeze=patterns),
            shares=(1.0, 0.0, 0.0),
            apart=_APART["freeze"],
        )


def below_the_last_block(model: nn.Module) -> tuple[str, ...]:
    """Patterns of what comes before the last of the model's repeated blocks, in the order in which it is registered; () where there are no such blocks."""
    found = repeated_blocks(model)
    if not found or len(found[0].paths) < 2:
        return ()
    *below, last = found[0].paths
    # What is registered before the blocks is taken to run before them: embeddings, a stem.
    before: list[str] = []
    at = ""
    for name in below[0].split("."):
        for child, module in model.get_submodule(at).named_children():
            if child == name:
                break
            if any(True for _ in module.parameters()):
                before.append(f"{at}.{child}" if at else child)
        at = f"{at}.{name}" if at else name
    trained = {id(p) for p in model.parameters()} - {
        id(p) for path in (*before, *below) for p in model.get_submodule(path).parameters()
    }
    held = any(id(p) in trained for p in model.get_submodule(last).parameters())
    return (*before, *_patterns(below)) if held else ()


def _patterns(paths: Sequence[str]) -> list[str]:
    """The paths themselves, or fewer patterns that match the same where their ends are numbers in a row: "layers.[0-9]", "layers.1[0-4]"."""
    parents, numbers = zip(*(path.rpartition(".")[::2] for path in paths), strict=True)
    if len(set(parents)) > 1 or not all(number.isdigit() for number in numbers):
        return list(paths)
    first, last = int(numbers[0]), int(numbers[-1])
    if [int(number) for number in numbers] != list(range(first, last + 1)):
        return list(paths)
    front = f"{parents[0]}." if parents[0] else ""
    return [front + pattern for pattern in _of_numbers(first, last)]


def _of_numbers(first: int, last: int) -> Iterator[str]:
    while first <= last:
        # The longest row from here on whose numbers differ in one digit and have any after it.
        free = max(
            place for place in range(len(str(first))) if first % 10**place == 0 and first + 10**place - 1 <= last
        )
        digit = first // 10**free % 10
        end = min(9, digit + (last - first + 1) // 10**free - 1)
        higher = str(first // 10 ** (free + 1)) if first >= 10 ** (free + 1) else ""
        yield higher + (str(digit) if end == digit else f"[{digit}-{end}]") + "[0-9]" * free
        first += (end - digit + 1) * 10**free


class _Adapted(TraceSource):
    """Of a copy with adapters. Whether the batch splits is known of the model itself."""

    def __init__(self, original: TraceSource, model: nn.Module) -> None:
        super().__init__(
            model,
            original.sample,
            original.loss_fn,
            original.optimizer,
            original.clip_norm,
            original.device,
            original.progress,
            original.loader_batches,
        )
        self._original = original

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        return self._original.weighting(freeze)


def _adapters(source: TraceSource, request: Request) -> Iterator[Change]:
    """Low-rank adapters beside frozen weights, made by PEFT. Sources: Hu et al. 2021, arXiv:2106.09685."""
    targets = adapter_targets(source.model)
    adapted = hasattr(source.model, "peft_config")
    on_gpu = source.here.type != "cpu"  # a copy without weights is captured as one on the CPU
    if find_spec("peft") is None or adapted or request.freeze or not targets or on_gpu or source.optimizer is None:
        return
    said = json.dumps(targets)
    # Of a classifier PEFT trains the head besides, by these names, where a run file says that it is one.
    trains_head = any(name in {"classifier", "score"} for name, _ in source.model.named_children())
    yield Change(
        "adapters",
        Effect.LESS_IS_TRAINED,
        source=partial(_with_adapters, targets=targets),
        statement=f"model = peft.get_peft_model(model, peft.LoraConfig(r={LORA_RANK}, target_modules={said}))",
        keys=None if trains_head else (f"lora.rank={LORA_RANK}", f"lora.targets={said}"),
        shares=(1.0, 0.0, 0.0),
        apart=("freeze",),
    )


def adapter_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers in the model's largest repeated blocks, Transformers' `Conv1D` among them; of all of them where there are none."""
    found = repeated_blocks(model)
    roots = found[0].paths if found else ("",)
    # Only a model that is made of it has imported it.
    others = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return sorted(
        {
            _own_name(root, path)
            for root in roots
            for path, module in model.get_submodule(root).named_modules()
            if isinstance(module, (nn.Linear, others)) and (path or root)
        }
    )


def _own_name(root: str, path: str) -> str:
    """The end of a path in a block as PEFT matches it: with its parent where it is a mere number, as blocks have such names too, and as a whole without one."""
    parent, _, name = path.rpartition(".")
    if name and not name.isdigit():
        return name
    if parent:
        return f"{parent.rpartition('.')[2]}.{name}"
    return ".".join(filter(None, (root, path)))


def _peft() -> Any:
    """The package, without what bitsandbytes, which it imports, has to say of kernels of its own."""
    with bitsandbytes_quiet():
        import peft

    return peft


def _with_adapters(source: TraceSource, targets: Sequence[str]) -> TraceSource:
    peft = _peft()
    known = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in source.model.parameters()
    }
    shadow = copy.deepcopy(source.model, dict(known))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT has to say, it says to whoever writes that line
        adapted = peft.get_peft_model(shadow, peft.LoraConfig(r=LORA_RANK, target_modules=list(targets)))
    adapted.train(source.model.training)
    for module in adapted.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            if own.device.type != "meta":
                setattr(module, name, nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad))
    return _Adapted(source, adapted)


def with_another_optimizer(source: TraceSource) -> TraceSource:
    """With an optimizer that keeps no state."""
    return replace(source, optimizer=partial(torch.optim.SGD, lr=0.01))


def with_samples(source: TraceSource, samples: int) -> TraceSource:
    """With so many of the batch's samples."""
    total = batches.size(source.sample)
    return replace(source, sample=batches.split(source.sample, [samples, total - samples])[0])
