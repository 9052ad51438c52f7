"""What a stage does not have: parameters and buffers of other stages, taken out of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from memfit.step.absent import Absent
from memfit.step.part_calls import PartCalls


class OtherStages:
    """Parameters and buffers that are in other stages; taken out of the model from here on.

    What is read between parts, before the last of them, is to stay everywhere: the forward of each stage passes by.

    Args:
        model: whole.
        parts: paths of the modules that are called one after the other.
        ranges: of these, what the stages that are here call.
        names: of the parameters that stay.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[str], ranges: Sequence[tuple[int, int]], names: frozenset[str]
    ) -> None:
        stays = {id(p) for name, p in model.named_parameters() if name in names}
        mine = {parts[position] for first, end in ranges for position in range(first, end)}
        theirs = set(parts) - mine
        gone = {id(b) for path in theirs for b in model.get_submodule(path).buffers()}
        gone -= {id(b) for path in mine for b in model.get_submodule(path).buffers()}
        self._places: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
        for module in model.modules():
            for table in _tables(module):
                for name, tensor in table.items():
                    if tensor is not None and (
                        id(tensor) in gone if table is module._buffers else id(tensor) not in stays  # noqa: SLF001 - there is no other way to take them out
                    ):
                        self._places.append((module, table, name, tensor))
        taken = {id(tensor): number for number, (_, _, _, tensor) in enumerate(self._places)}
        # Of what is taken out, where a module has it in a list besides (an LSTM its `_flat_weights`), which would keep it in memory.
        self._listed = [
            (each, index, taken[id(tensor)])
            for module in model.modules()
            for each in vars(module).values()
            if isinstance(each, list)
            for index, tensor in enumerate(each)
            if id(tensor) in taken
        ]
        self._orders = [
            (table, tuple(table)) for table in {id(table): table for _, table, _, _ in self._places}.values()
        ]
        # Models ask for the type or device of a weight they do not use.
        self._take_out([Absent.like(tensor, tensor.device) for *_, tensor in self._places])

    def _take_out(self, absent: Sequence[Tensor]) -> None:
        """With these, by place, for what goes."""
        for (module, table, name, _), instead in zip(self._places, absent, strict=True):
            del table[name]
            module.__dict__[name] = instead
        self._list(absent)

    def put_back(self) -> None:
        """The model is whole again, its parameters in the order that they had: optimizers number them, and so does the model's identity."""
        for module, table, name, tensor in self._places:
            del module.__dict__[name]
            table[name] = tensor
        for table, names in self._orders:
            for name in filter(table.__contains__, names):
                table[name] = table.pop(name)
        self._list([tensor for *_, tensor in self._places])

    def _list(self, tensors: Sequence[Tensor]) -> None:
        """These, by place, in the lists that modules have of them."""
        for listed, index, number in self._listed:
            listed[index] = tensors[number]

    def let_go(self) -> None:
        """Keep shapes alone, so that what is in other stages takes no memory here."""
        without: dict[int, Tensor] = {}
        for number, (module, table, name, tensor) in enumerate(self._places):
            if id(tensor) not in without:
                meta: Tensor = tensor.detach().to("meta")
                without[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if table is module._parameters else meta  # noqa: SLF001
            self._places[number] = module, table, name, without[id(tensor)]

    @contextmanager
    def there(self) -> Iterator[None]:
        """Inside, the model is whole; what was let go is on the meta device."""
        absent = [module.__dict__[name] for module, _, name, _ in self._places]
        self.put_back()
        try:
            yield
        finally:
            self._take_out(absent)


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers  # noqa: SLF001


@contextmanager
def without_other_stages(model: nn.Module, calls: PartCalls, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Inside, the model has the parameters and buffers of these stretches of calls alone."""
    names = frozenset(name for first, end in ranges for name in calls.parameters(model, first, end))
    others = OtherStages(model, [call.path for call in calls.calls], ranges, names | calls.read_between)
    try:
        yield
    finally:
        others.put_back()
