"""What hangs on modules is as before once it is put back."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from memfit.step.attributes import Attributes, held_by, values_of


def test_an_ordered_dictionary_that_grew_can_be_read_again() -> None:
    kept = OrderedDict(one=1, two=2)
    before = Attributes([kept])
    kept["three"] = 3
    kept.move_to_end("one")
    before.put_back()
    assert list(kept.items()) == [("one", 1), ("two", 2)]
    assert dict(kept) == {"one": 1, "two": 2}


def test_hooks_registered_meanwhile_go_and_later_ones_can_be_removed() -> None:
    module = nn.Linear(2, 2)
    before = Attributes([module])
    module.register_forward_hook(lambda *_: None)
    before.put_back()
    handle = module.register_forward_hook(lambda *_: None)
    assert len(dict(module._forward_hooks)) == 1
    handle.remove()
    assert not dict(module._forward_hooks)


class Irreducible(tuple[int, ...]):
    """A tuple that is no list of anything, as e3nn has them."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length_is_looked_into() -> None:
    module, inner = nn.Module(), [1]
    vars(module)["kind"] = Irreducible((1, 2))
    vars(module)["kept"] = (inner,)
    before = Attributes([module])
    inner.append(2)
    before.put_back()
    assert inner == [1]


def test_what_is_under_a_decorator_is_found() -> None:
    """A loss with a decorator of torch, or a method without gradients, seemed to hold nothing."""
    teacher, classes = nn.Linear(2, 2), torch.ones(2)

    class Weights:
        def __init__(self) -> None:
            self.classes = classes

        @torch.no_grad()
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.classes

    weights = Weights()

    @torch.enable_grad()
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - weights.apply(teacher(batch))).sum()

    assert held_by(loss) == [teacher]
    assert any(each is classes for each in values_of(loss))
