"""Repeated blocks are found where they are, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.errors import InputError
from memfit.techniques.layer_streaming import MODEL_ITSELF
from memfit.techniques.layer_streaming.blocks import blocks_at, repeated_blocks
from models import huggingface
from models.transformer import build_gpt


@pytest.mark.parametrize(
    ("build", "path", "count"),
    [
        (lambda: build_gpt(3, 32, 4, 2, 16, 64), "blocks", 3),
        (lambda: huggingface.bert("sdpa"), "bert.encoder.layer", 3),
        (huggingface.llama, "model.layers", 3),
        (huggingface.t5, "decoder.block", 2),
        (huggingface.vit, "vit.layers", 3),
    ],
)
def test_the_largest_family_is_the_stack_of_layers(build: object, path: str, count: int) -> None:
    model = build()[0]  # type: ignore[operator]
    found = blocks_at(model)

    assert (found.path, len(found.paths)) == (path, count)
    own = sum(p.numel() * p.element_size() for b in found.paths for p in model.get_submodule(b).parameters())
    assert found.own_bytes == own


def test_a_plain_sequence_holds_its_blocks_itself() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    model = nn.Sequential(nn.Embedding(10, 8), block(), block(), block(), nn.Linear(8, 10))

    assert blocks_at(model).path == MODEL_ITSELF
    assert blocks_at(model).paths == ("1", "2", "3")


def test_what_blocks_share_is_not_theirs() -> None:
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for block in blocks:
        block.weight = blocks[0].weight
    model = nn.Sequential(blocks)

    assert blocks_at(model).own_bytes == 3 * 8 * 4


def test_none_is_said_with_what_there_is() -> None:
    with pytest.raises(InputError, match="no repeated block was found anywhere in this model.*Plan without streaming"):
        blocks_at(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    with pytest.raises(InputError, match=r"found under 'nothing'.*There are blocks under 'blocks' \(3 of"):
        blocks_at(build_gpt(3, 32, 4, 2, 16, 64)[0], "nothing")


def test_shared_whole_blocks_are_one_block() -> None:
    block = nn.Linear(8, 8)
    model = nn.ModuleList([block, block, block])

    assert repeated_blocks(model) == ()
    assert torch.is_tensor(model[2].weight)


def test_lists_of_modules_are_no_blocks() -> None:
    """They are never called: nothing could gather, load or run them as one."""
    model = nn.Module()
    model.layers, model.gates = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))
    assert [blocks.path for blocks in repeated_blocks(model)] == ["layers", "gates"]
