"""An optimizer whose state takes fewer bytes of the device: in 8 bits, on the host, in a file; updated chunk by chunk in a constant workspace.

The arithmetic is the user's own optimizer: its `step` is called on one chunk of a parameter at a time, with the chunk's gradient and state beside it.
So every setting it has (weight decay, Nesterov, fused, schedules) means what it means there, and state in 32 bits gives the same bits wherever it is kept.

FlashOptim has the formats (`formats`); it needs a GPU and its own kernels. bitsandbytes has neither chunks on the CPU (its workspace is five times the
largest tensor) nor exceptions apart from a register of the process.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from memfit import dispatch
from memfit.errors import InputError
from memfit.optimizers.elementwise import MOMENTS, Group, own_step, why_not_there
from memfit.optimizers.formats import BLOCK, blocks, dequantise
from memfit.optimizers.memory_order import flat, shaped
from memfit.optimizers.state_format import StateFormat, format_of
from memfit.optimizers.state_storage import StateSlice, StateStorage, StateTensor, Workspace

# Elements updated at a time. On the CPU the workspace stays in the cache; on a GPU each chunk costs some twenty launches.
CHUNK: Final[Mapping[str, int]] = {"cpu": 1 << 18, "cuda": 1 << 22}


@dataclass(frozen=True, slots=True)
class _Sketch:
    """Of each parameter only the first chunks are updated.

    Attributes:
        chunks: how many.
        stands_for: told how many chunks the next one stands for, and 1 after the last.
    """

    chunks: int
    stands_for: Callable[[float], None]

    def of(self, starts: range, numel: int) -> Iterator[int]:
        """Where the chunks begin that are run; the last of them stands for all from there on."""
        run = starts[: self.chunks]
        for start in run:
            rest = max(1, numel - start)
            self.stands_for(rest / min(starts.step, rest) if start == run[-1] else 1.0)
            yield start
        self.stands_for(1.0)


def kind_and_groups(optimizer: torch.optim.Optimizer) -> tuple[type[torch.optim.Optimizer], list[Group]]:
    """Of an optimizer, or of the one that a `ChunkedOptimizer` runs."""
    return (optimizer.kind if isinstance(optimizer, ChunkedOptimizer) else type(optimizer)), optimizer.param_groups


class ChunkedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates chunk by chunk, with its state in 8 bits or away from the device.

    Parameters shorter than a block keep 32 bits. State is stored flat, in the order of the parameter's memory; `state_dict` returns ordinary tensors.

    Args:
        optimizer: one of `MOMENTS`; its parameter groups, and state if it has any, are taken over. It is not to be used by itself any more.
        state_format: "32bit" (as the optimizer keeps it, to the bit), "8bit", or another format (`state_format`).
        state_place: "device", "host" (pinned memory, for parameters on a GPU) or "disk" (a file without a name).
        in_32bit: patterns of parameters that keep 32 bits, such as "*embeddings": of the parameter's name or of a module it is in (`fnmatch`).
        names: parameters by name, for the patterns; None where the optimizer was given names, or `name` is called later.
        folder: of the file; None for the one that is set (MEMFIT_OFFLOAD_DIR).

    Attributes:
        device_kind: of the device that its chunks are for, "cpu" or "cuda"; None for that of its parameters. A plan may be for a GPU that is not here.

    Raises:
        InputError: the optimizer cannot be treated so, or a pattern matches nothing.
        InfeasibleError: the disk has no space for the state.
        EngineError: no file can be created in the folder.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        state_format: str | StateFormat = "32bit",
        state_place: str = "device",
        in_32bit: Sequence[str] = (),
        names: Mapping[str, nn.Parameter] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.inner = optimizer
        self.kind = type(optimizer)
        self.in_32bit = tuple(in_32bit)
        self._folder = folder
        self.device_kind: str | None = None
        self._sketch: _Sketch | None = None
        self._exempt: set[Tensor] | None = None if self.in_32bit else set()
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._arrange(state_format, state_place)
        known, optimizer.state, optimizer.param_groups = optimizer.state, defaultdict(dict), []
        if names is None and all("param_names" in group for group in self.param_groups):
            named = (zip(group["param_names"], group["params"], strict=True) for group in self.param_groups)
            names = dict(itertools.chain.from_iterable(named))
        if names is not None:
            self.name(names)
        elif self._exempt is not None:
            self._reserve()
        if known:
            group_of = {p: group for group in self.param_groups for p in group["params"]}
            for parameter, state in known.items():
                self._adopt(group_of[parameter], parameter, state)

    def _arrange(self, state_format: str | StateFormat, state_place: str) -> None:
        self.format = format_of(state_format)
        reason = self.format.why_not(self.kind, self.param_groups)
        if reason is None and state_place != "device":
            on_cpu = any(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            reason = why_not_there(self.kind, self.param_groups, state_place, "cpu" if on_cpu else "cuda")
        if reason is not None:
            raise InputError(f"{reason}. Take another optimizer, or leave its state as it is")
        self.state_place = state_place
        self._storage = StateStorage(state_place, self._folder)

    def rearrange(self, state_format: str | StateFormat, state_place: str, folder: str | Path | None = None) -> None:
        """Keep the state otherwise from the first step on; on disk in this folder, where the optimizer was made with none of its own.

        Raises:
            InputError: as for a new one; or there is state already.
        """
        wanted = format_of(state_format).name
        if (wanted, state_place) == (self.state_format, self.state_place):
            return
        if self.state:
            raise InputError(
                f"the optimizer has state already, {self.state_format} on the {self.state_place}, and the plan wants it {wanted} on the {state_place}: "
                "give apply() the function that makes the optimizer, then load the state into it"
            )
        self._folder = self._folder if self._folder is not None else folder
        self._arrange(state_format, state_place)

    def around(self, optimizer: torch.optim.Optimizer) -> ChunkedOptimizer:
        """One that keeps another optimizer's state as this one does."""
        return ChunkedOptimizer(
            optimizer,
            state_format=type(self.format)(),
            state_place=self.state_place,
            in_32bit=self.in_32bit,
            folder=self._folder,
        )

    @property
    def state_format(self) -> str:
        """Name of the format that its state is in."""
        return self.format.name

    def name(self, names: Mapping[str, nn.Parameter]) -> None:
        """Tell the parameters' names, which `in_32bit` speaks of.

        Raises:
            InputError: a pattern matches no parameter of this optimizer.
            InfeasibleError: the disk has no space for the state.
            EngineError: no file can be created in the folder.
        """
        own = {p for group in self.param_groups for p in group["params"]}
        exempt: set[Tensor] = set()
        for pattern in self.in_32bit:
            found = {p for name, p in names.items() if p in own and _matches(name, pattern)}
            if not found:
                raise InputError(
                    f"in_32bit={list(self.in_32bit)!r}: {pattern!r} matches no parameter of the optimizer; names are like {next(iter(names), '')!r}, "
                    "and * stands for any part"
                )
            exempt |= found
        self._exempt = exempt
        self._reserve()

    def _reserve(self) -> None:
        pairs = ((group, p) for group in self.param_groups for p in group["params"] if p.requires_grad)
        self._storage.reserve(
            [(p, part) for group, p in pairs if not self._as_ever(p) for part in self._parts(group, p)]
        )

    # -- updating ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def sketching(self, chunks: int, stands_for: Callable[[float], None] = lambda _: None) -> Iterator[None]:
        """Updates inside run only the first chunks of each parameter: enough for fake tensors, of which only shapes count.

        Args:
            chunks: how many of each; in the second one what is left of the first is still there.
            stands_for: told how many chunks the next one stands for, and 1 after the last.
        """
        before, self._sketch = self._sketch, _Sketch(chunks, stands_for)
        try:
            yield
        finally:
            self._sketch = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group, group["params"])
        return loss

    @torch.no_grad()
    def update(self, group: Group, parameters: Iterable[Tensor]) -> None:
        """The step for some parameters of a group.

        Raises:
            InputError: a gradient is sparse; nothing was updated.
            EngineError: the disk failed; what was updated is.
        """
        graded = [p for p in parameters if p.grad is not None]
        as_ever = [p for p in graded if self._as_ever(p)]
        chunked = [p for p in graded if not self._as_ever(p)]
        for parameter in chunked:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be cut into chunks: let its layer make a dense one "
                    "(sparse=False)"
                )
        fresh = [p for p in chunked if p not in self.state]
        if fresh:
            self._reserve()
        try:
            for parameter in fresh:  # Space for all of it is reserved before anything is updated.
                self.state[parameter] = self._storage.made(parameter, self._parts(group, parameter))
            if as_ever:
                self._run(group, as_ever, self.state)
            workspaces = Workspace(), Workspace()
            for parameter in chunked:
                new = bool(fresh) and parameter is fresh[0]
                self._update_in_chunks(group, parameter, workspaces[new], fresh=new)
                if new:
                    del fresh[0]
        except BaseException:
            for parameter in fresh:
                self.state.pop(parameter, None)  # it holds nothing yet
            raise

    def _run(self, group: Group, parameters: list[Tensor], state: Any) -> None:
        """The optimizer's own step, on these parameters with this state."""
        inner = self.inner
        inner.param_groups, inner.state = [{**group, "params": parameters}], state
        try:
            own_step(inner)
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)

    def _update_in_chunks(self, group: Group, parameter: Tensor, workspace: Workspace, *, fresh: bool) -> None:
        assert parameter.grad is not None
        values, gradient = flat(parameter.detach(), parameter), flat(parameter.grad.detach(), parameter)
        state, storage = self.state[parameter], self._storage
        packed = self._packed(parameter)
        computed = self.format.computed_in(parameter.dtype) if packed else parameter.dtype
        # The optimizer itself makes a new parameter's state, a chunk at a time: beside the workspace, so both get half. Never more than later updates
        # take, which are what is predicted: an update inside backward has no more free bytes in the first step than in any other. In whole blocks, also where
        # nothing is packed: what is left of a chunk after whole vectors is rounded otherwise in 16 bits.
        chunk = self._chunk(parameter)
        if fresh:
            chunk = max(1, -(-min(chunk, values.numel()) // (2 * BLOCK))) * BLOCK

        def buffer(name: str, count: int) -> Tensor:
            return workspace.get(name, chunk, computed, parameter)[:count]

        moments = MOMENTS[self.kind](group)
        shared = {key: value for key, value in state.items() if not _is_moment(value)}
        own: dict[str, Any] = {}
        starts = range(0, max(1, values.numel()), chunk)  # one of no elements has its counters, too
        for start in starts if self._sketch is None else self._sketch.of(starts, values.numel()):
            stop = min(start + chunk, values.numel())
            count, padded = stop - start, blocks(stop - start) * BLOCK
            part, part_gradient = values[start:stop], gradient[start:stop]
            if computed != parameter.dtype:
                part = buffer("parameter", count).copy_(part)
                part_gradient = buffer("gradient", count).copy_(part_gradient)
            slices_of = {
                name: list(
                    storage.slices(state, parameter, self._parts_of(name, parameter), start, stop, chunk, workspace)
                )
                for name in moments
            }
            own = {}
            if not fresh:
                own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in shared.items()}
                for name, slices in slices_of.items():
                    for piece in slices:
                        storage.load(state, parameter, piece)
                    own[name] = slices[0].there
                    if packed:
                        self.format.unpack(_kept(slices), buffer(name, padded), buffer("scratch", padded))
                        own[name] = buffer(name, count)
            part.grad = part_gradient
            states = defaultdict(dict, {part: own})
            self._run(group, [part], states)
            own, part.grad = states[part], None
            for name, slices in slices_of.items():
                if packed:
                    held = "moment" if fresh else name
                    if fresh:
                        buffer(held, count).copy_(own.pop(name))  # it goes before there is anything else
                    self.format.pack(buffer(held, padded), count, _kept(slices), buffer("scratch", padded))
                elif fresh:
                    slices[0].there.copy_(own[name])
                for piece in slices:
                    storage.store(state, parameter, piece)
            if computed != parameter.dtype:
                self.format.write(part, values[start:stop], buffer("scratch", count))
        for key, value in own.items():
            if key in moments:
                continue
            if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value
        if dispatch.storage_key(values) != dispatch.storage_key(parameter):
            parameter.detach().copy_(shaped(values, parameter))  # its memory has gaps, so it was updated in a copy

    def _chunk(self, parameter: Tensor) -> int:
        """Elements updated at a time; not more than the parameter has, in whole blocks."""
        kind = self.device_kind or parameter.device.type
        return min(CHUNK.get(kind, CHUNK["cuda"]), max(1, blocks(parameter.numel())) * BLOCK)

    # -- what is kept of a parameter -----------------------------------------------------------------------------------------

    def _packed(self, parameter: Tensor) -> bool:
        """Whether its state is packed in a format."""
        if not self.format.packs(parameter):
            return False
        if self._exempt is None:
            raise InputError(
                f"in_32bit={list(self.in_32bit)!r} speaks of names, which the optimizer does not know: make it from model.named_parameters(), "
                "or pass names=dict(model.named_parameters())"
            )
        return parameter not in self._exempt

    def _as_ever(self, parameter: Tensor) -> bool:
        """Whether its state is as the optimizer itself keeps it, so that nothing need be cut into chunks."""
        return self.state_place == "device" and not self._packed(parameter)

    def _parts_of(self, moment: str, parameter: Tensor) -> tuple[StateTensor, ...]:
        if not self._packed(parameter):
            return (StateTensor(moment, parameter.dtype),)
        return self.format.tensors(moment)

    def _parts(self, group: Group, parameter: Tensor) -> list[StateTensor]:
        return [part for moment in MOMENTS[self.kind](group) for part in self._parts_of(moment, parameter)]

    # -- saving and loading --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer. State in 32 bits reads as if it had never moved; in 8 bits a moment is `_codes` and `_scales`, flat."""
        found: dict[str, Any] = super().state_dict()
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, parameter) in enumerate(pairs):
            if parameter not in self.state or self._as_ever(parameter):
                continue
            state = self.state[parameter]
            readable = {key: value for key, value in state.items() if not _is_moment(value)}
            for part in self._parts(group, parameter):
                whole = self._storage.whole(state, parameter, part)
                readable[part.name] = (
                    whole if self._packed(parameter) and self.format.coded else shaped(whole, parameter)
                )
            found["state"][index] = readable
        own = self.format.state()
        return {**found, "state_format": dict(own)} if own else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`, to the bit; also takes the state of the same optimizer in the other format, or kept elsewhere.

        Raises:
            ValueError: other parameter groups.
            InputError: state of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.format.set_state(state_dict.get("state_format", {}))
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            group, parameter = pairs[index]
            self._adopt(group, parameter, saved)

    @torch.no_grad()
    def _adopt(self, group: Group, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        moments = MOMENTS[self.kind](group)
        for name in moments:
            if name not in saved and f"{name}_codes" not in saved:
                raise InputError(
                    f"the saved optimizer state has no {name!r} for a parameter of shape {tuple(parameter.shape)}: it is of another optimizer"
                )
        on_device = group.get("fused") or group.get("capturable")
        state: dict[str, Any] = {}
        if self._as_ever(parameter):
            state = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in moments}
        else:
            self._reserve()
            state = self._storage.made(parameter, self._parts(group, parameter))
        for key, value in saved.items():
            if not _is_moment(value):
                where = parameter.device if on_device else "cpu"
                state[key] = value.detach().to(where, copy=True) if isinstance(value, Tensor) else value
        self.state[parameter] = state
        workspace = Workspace()
        for name in moments:
            self._adopt_moment(parameter, name, saved, workspace)

    def _adopt_moment(self, parameter: Tensor, name: str, saved: Mapping[str, Any], workspace: Workspace) -> None:
        state, packed, was_packed = self.state[parameter], self._packed(parameter), f"{name}_codes" in saved
        given = [saved[f"{name}_codes"], saved[f"{name}_scales"]] if was_packed else [flat(saved[name], parameter)]
        if self._as_ever(parameter):
            state = {name: flat(state[name], parameter)}
        chunk = self._chunk(parameter)
        parts = self._parts_of(name, parameter)
        for start in range(0, parameter.numel(), chunk):
            stop = min(start + chunk, parameter.numel())
            count, padded = stop - start, blocks(stop - start) * BLOCK
            taken = [given[0][start:stop], *(scales[start // BLOCK : blocks(stop)] for scales in given[1:])]
            slices = list(self._storage.slices(state, parameter, parts, start, stop, chunk, workspace))
            if packed is was_packed or (packed and not self.format.coded and taken[0].dtype == slices[0].there.dtype):
                for piece, value in zip(slices, taken, strict=True):
                    piece.there.copy_(value)
            else:
                moment, scratch = (
                    workspace.get(what, chunk, self.format.computed_in(parameter.dtype), parameter)[:padded]
                    for what in ("moment", "scratch")
                )
                if packed:
                    moment[:count].copy_(taken[0])
                    self.format.pack(moment, count, _kept(slices), scratch)
                else:
                    dequantise(taken[0].to(parameter.device), taken[1].to(parameter.device), moment, scratch)
                    slices[0].there.copy_(moment[:count])
            for piece in slices:
                self._storage.store(state, parameter, piece)


def _kept(slices: Sequence[StateSlice]) -> list[Tensor]:
    """What is kept of a moment, on the device."""
    return [piece.there for piece in slices]


def _is_moment(value: object) -> bool:
    """Whether it has an element for each of the parameter's (or for each block); counters of steps have none."""
    return isinstance(value, Tensor) and value.dim() > 0


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of this parameter or of a module it is in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
