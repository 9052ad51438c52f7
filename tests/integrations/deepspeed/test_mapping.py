"""The table of DeepSpeed's keys: each row names a key that is read and a choice that there is."""

from __future__ import annotations

import pytest

from memfit.integrations.deepspeed import AUTO, read
from memfit.integrations.deepspeed.mapping import KEYS, UNSAID, KeyMapping, asked, left_out
from memfit.techniques.choices import Choices
from memfit.techniques.registry import BY_NAME


@pytest.mark.parametrize("row", KEYS, ids=lambda row: row.key)
def test_each_key_is_read_and_settles_a_choice_that_there_is(row: KeyMapping) -> None:
    moved = {"device": "cpu"}
    config = read(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": moved, "offload_optimizer": moved}}
    )
    for path in filter(None, (row.key, row.when)):
        value: object = config
        for name in path.split("."):
            assert hasattr(value, name), path
            value = getattr(value, name)
    assert row.choice in BY_NAME


def test_what_is_left_auto_is_allowed_and_not_fixed() -> None:
    found = asked({"fp16.enabled": AUTO, "bf16.enabled": AUTO}.get)

    assert (found.fixed, found.allow) == ({}, ("bf16", "fp16"))


def test_what_one_key_asks_for_is_not_left_open_by_another() -> None:
    found = asked({"fp16.enabled": True, "bf16.enabled": AUTO}.get)

    assert (found.fixed, found.allow) == ({"precision": "fp16"}, ("fp16",))


def test_a_baseline_leaves_nothing_unsaid() -> None:
    assert left_out(Choices(1, 4)) == ()
    assert set(UNSAID) <= set(BY_NAME)
