"""What the user sets becomes the ways to run the step: nothing he did not allow, nothing that cannot stand together, nothing dropped in silence."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.planner.candidates import Offers, candidates
from memfit.techniques.choices import Choices, conflict, in_words
from memfit.techniques.registry import BY_NAME

EVERYTHING = Offers(
    {
        "precision": ("bf16", "fp16"),
        "state_format": ("8bit",),
        "state_place": ("disk",),
        "update": ("in_backward",),
        "loss_chunks": (8,),
        "streamed": ("layers",),
    }
)


def settings_of(name: str) -> tuple[Any, ...]:
    return BY_NAME[name].settings or ()


def test_with_nothing_on_offer_there_is_the_plain_step() -> None:
    assert candidates(Offers()) == ((Choices(),), ())


def test_what_changes_results_is_weighed_only_where_it_is_named() -> None:
    found, _ = candidates(EVERYTHING)
    assert {w.precision for w in found} == {"full"}
    assert {w.state_format for w in found} == {"32bit"}
    assert {w.update for w in found} == {"after"}
    found, _ = candidates(EVERYTHING, allow=["bf16", "8bit", "in_backward"])
    assert {w.update for w in found} == {"after", "in_backward"}
    assert {w.precision for w in found} == {"full", "bf16"}
    assert {w.state_format for w in found} == {"32bit", "8bit"}


def test_every_way_can_stand_and_every_one_that_can_is_there() -> None:
    found, _ = candidates(EVERYTHING, allow=["bf16", "fp16", "8bit", "in_backward"])
    assert len(found) == len(set(found))
    every = [
        Choices(precision=p, state_format=f, state_place=s, update=u, loss_chunks=c, streamed=b)
        for p, f, s, u, c, b in product(
            settings_of("precision"),
            settings_of("state_format"),
            ("device", "disk"),
            settings_of("update"),
            (1, 8),
            ("", "layers"),
        )
    ]
    assert set(found) == {w for w in every if conflict(w) is None}
    counts = [len(w.techniques) for w in found]
    assert counts == sorted(counts)
    assert found[0] == Choices()


def test_what_cannot_stand_together_is_told_once_with_its_reason() -> None:
    found, refused = candidates(EVERYTHING, allow=["in_backward"], clips=True)
    assert {w.update for w in found} == {"after"}
    (about_clipping,) = [text for text in refused if "clipping" in text]
    assert about_clipping.startswith("update inside backward: ")


def test_what_is_allowed_and_cannot_be_is_named_with_the_reason() -> None:
    _, refused = candidates(Offers(why_not={"state_format": "the optimizer is a Muon"}), allow=["8bit", "bf16"])
    assert refused == ("bf16: this step cannot have it", "8bit: the optimizer is a Muon")


def test_what_is_fixed_is_in_every_way() -> None:
    found, _ = candidates(
        EVERYTHING, freeze=["embeddings"], fixed={"precision": "fp16", "micro_batches": 3, "state_format": "8bit"}
    )
    assert {(w.precision, w.frozen, w.state_format) for w in found} == {("fp16", ("embeddings",), "8bit")}
    assert {w.update for w in found} == {"after"}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"allow": "bf16"}, r"allow='bf16' is a word: give a list of them, allow=\['bf16'\]"),
        (
            {"allow": ["bf32"]},
            "'bf32' is nothing that can be allowed; there is 'bf16', 'fp16', 'bf16_parameters', '8bit', 'in_backward'",
        ),
        ({"fixed": {"precisoin": "bf16"}}, "'precisoin' is no choice; there is 'micro_batches', 'precision'"),
        ({"fixed": {"precisoin": "bf16"}}, r"; did you mean 'precision'\?$"),
        ({"fixed": {"micro_batch": 2}}, r"; did you mean 'micro_batches'\?$"),
        ({"fixed": {"gradient_accumulation_steps": 2}}, r"; did you mean 'micro_batches'\?$"),
        ({"allow": ["8-bit"]}, r"; did you mean '8bit'\?$"),
        ({"allow": ["AMP"]}, r"; did you mean 'bf16'\?$"),
        ({"allow": ["nf4"]}, r"; did you mean '4bit'\?$"),
        ({"allow": ["activation_checkpointing"]}, "; recomputation, micro-batches and offloading need no word$"),
        ({"allow": ["fp8"]}, "'4bit'$"),  # nothing is near
        ({"allow": [8]}, "8 is nothing that can be allowed; there is "),
        ({"fixed": {"precision": "int4"}}, "fixed precision='int4': there is 'full', 'bf16', 'fp16'"),
        ({"fixed": {"loss_chunks": "all"}}, "fixed loss_chunks='all': a whole number is needed"),
        ({"fixed": {"loss_chunks": True}}, "fixed loss_chunks=True: a whole number is needed"),
        ({"fixed": {"frozen": ["a"]}}, "what is frozen is named by freeze="),
        ({"fixed": {"streamed": "blocks"}}, "cannot be honoured: this step cannot have it; there is '', 'layers'"),
        (
            {"fixed": {"update": "in_backward"}, "clips": True},
            "cannot be honoured: update inside backward: clipping needs",
        ),
    ],
)
def test_bad_wishes_are_refused_in_one_sentence(named: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        candidates(EVERYTHING, **named)


def test_a_way_is_put_into_words() -> None:
    assert in_words(Choices(4, 2, "samples")) == ""
    assert in_words(Choices(precision="bf16", state_place="disk")) == "bf16 autocast, optimizer state on the disk"
