"""Traces of a model with many blocks that are alike, from captures of it with a few of them: a deep one is captured in seconds instead of minutes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from torch import nn

from memfit.capture.deeper import BLOCKS, deeper
from memfit.capture.trace_source import TraceSource
from memfit.clusters import shortened
from memfit.errors import MemfitError
from memfit.techniques.choices import Choices
from memfit.techniques.layer_streaming.blocks import repeated_blocks
from memfit.values.trace import Trace

WORTH_IT: Final = sum(BLOCKS)  # blocks that are captured for a model of any depth
_PLAIN: Final = (bool, int, float, complex, bytes, type(None))


class FewBlocksSource(TraceSource):
    """Captures a few blocks where all of them are alike, and the whole model elsewhere: the traces are the same.

    Attributes:
        alike: nothing has shown yet that a few of this model's blocks do not tell of all of them.
    """

    alike: bool = True

    def captured(self, choices: Choices) -> Trace:
        """The step, captured with these choices."""
        found = self._of_few_blocks(choices) if self.alike else None
        self.alike = found is not None
        return super().captured(choices) if found is None else found

    def _of_few_blocks(self, choices: Choices) -> Trace | None:
        blocks = alike_blocks(self.model)
        if len(blocks) <= WORTH_IT or choices.streamed or choices.sharding:
            return None
        traces = []
        for count in BLOCKS:
            with shortened(self.model, count, blocks):
                source = TraceSource(
                    self.model, self.sample, self.loss_fn, self.optimizer, self.clip_norm, self.device, draws=self.draws
                )
                try:
                    traces.append(source.captured(choices))
                except (MemfitError, RuntimeError):
                    return None  # the capture of the whole model says what is wrong
        if any("/" in trace.model for trace in traces):  # its first forward makes buffers
            return None
        found = deeper(traces, len(blocks))
        return None if found is None else self.of_whole_model(found, choices)


def alike_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the model's repeated blocks, which are alone in their list and do the same but perhaps the first; none where it has no such blocks."""
    found = repeated_blocks(model)
    paths = found[0].paths if found else ()
    if len(paths) < 2:
        return ()
    holder = model.get_submodule(paths[0].rpartition(".")[0])
    if not isinstance(holder, (nn.ModuleList, nn.Sequential)) or len(holder) != len(paths):
        return ()
    kinds = [_kind(block, number) for number, block in enumerate(holder) if number]
    if len({len(kind) for kind in kinds}) > 1 or _told_apart(model, len(paths)):
        return ()
    own = range(1, len(paths))
    alike = all(len(set(values)) == 1 or all(map(_is_number, values, own)) for values in zip(*kinds, strict=True))
    return paths if alike else ()


def _kind(block: nn.Module, number: int) -> list[Any]:
    """What a block is: its modules, their tensors and their plain attributes."""
    found: list[Any] = []
    for path, module in block.named_modules():
        found += [path, type(module), module.training]
        found += [
            (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False)
        ]
        found += [(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers(recurse=False)]
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_"):
                found += [name, type(value), _plain(value, number)]
    return found


def _plain(value: Any, number: int) -> Hashable:
    if isinstance(value, (str, list, tuple, set, frozenset, dict)):
        return str(value).replace(f".{number}.", ".#.")  # PEFT's layers know their paths
    return value if isinstance(value, _PLAIN) else None


def _is_number(value: Hashable, number: int) -> bool:
    return type(value) is int and value == number


def _told_apart(model: nn.Module, blocks: int) -> bool:
    """Whether a configuration has a list with one entry for each block, which are not all the same: the model may run its blocks by it."""
    configurations = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return any(
        isinstance(value, (list, tuple)) and len(value) == blocks and any(each != value[0] for each in value)
        for config in configurations.values()
        for value in getattr(config, "__dict__", {}).values()
    )


__all__ = ["FewBlocksSource", "alike_blocks"]
