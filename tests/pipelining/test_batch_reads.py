"""What of a batch a real forward reads between its parts, where a look on fake tensors does not show it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.capture.part_calls import find_part_calls
from memfit.pipelining.batch_reads import with_real_reads
from memfit.step.part_calls import PartCalls

LAYERS = ["layers.0", "layers.1", "layers.2"]


class Asking(nn.Module):
    """Leaves its mask out where that changes nothing, but not while it is traced, as models of Hugging Face do.

    Args:
        asks: what it reads between its layers: "mask", "label" (after the last one), "activation", "nothing".
    """

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.seen: list[float] = []

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        traced = isinstance(self.layers[0].weight, FakeTensor)
        whole = not traced and self.asks == "mask" and bool(mask.all())
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if not traced and self.asks == "activation" and number == 1:
                self.seen.append(float(x.mean()))
        x = x if whole else x * mask[:, None]
        if not traced and self.asks == "label":
            self.seen.append(float(labels.max()))
        return (x - labels[:, None]).square().mean()


def found(asks: str, masked: int = 0) -> tuple[Asking, PartCalls]:
    torch.manual_seed(0)
    model = Asking(asks)
    mask = torch.ones(4)
    mask[:masked] = 0.0
    batch = (torch.randn(4, 8), mask, torch.randn(4))
    calls = find_part_calls(model, batch, None, LAYERS)
    return model, with_real_reads(calls, model, batch, None)


@pytest.mark.parametrize("masked", [0, 1])
def test_a_mask_whose_values_are_asked_for_is_wanted_by_every_stage(masked: int) -> None:
    model, calls = found("mask", masked)
    assert calls.values_read == {1}
    assert [calls.leaves_read(*each) for each in ((0, 1), (1, 2), (2, 3))] == [{0, 1}, {1}, {1, 2}]
    assert all(type(p) is nn.Parameter for p in model.parameters()), "the model is whole again"


def test_without_such_a_question_it_is_wanted_where_it_is_read() -> None:
    _, calls = found("nothing")
    assert [calls.leaves_read(*each) for each in ((0, 1), (1, 2), (2, 3))] == [{0}, set(), {1, 2}]


def test_what_is_read_after_the_last_part_is_wanted_there() -> None:
    model, calls = found("label")
    assert calls.values_read == set()
    assert [calls.leaves_read(*each) for each in ((0, 1), (1, 2), (2, 3))] == [{0}, set(), {1, 2}]
    assert model.seen == [], "what forward notes is as before"


def test_where_a_forward_cannot_pass_by_its_parts_all_of_the_batch_is_wanted_everywhere() -> None:
    model, calls = found("activation")
    assert calls.leaves_read(1, 2) == {0, 1, 2}
    assert model.seen == []
