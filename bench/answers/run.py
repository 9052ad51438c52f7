"""The first questions of a person with one card of 24 GB: each asked as a command, with its answer and its seconds.

python bench/answers/run.py [--only 1,5] [--limit 600]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from answers.shapes import write_all

Row = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
RUN: Final = "examples/cli/byte_gpt.yaml"
BUILDER: Final = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(4096, 10))
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def read():
    return torch.utils.data.TensorDataset(torch.zeros(8, 3, 64, 64), torch.zeros(8, dtype=torch.long))
"""
CRASH: Final = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.12 GiB is free. "
    "Of the allocated memory 21.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.\n"
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a person asks, and the command that answers.

    Attributes:
        text: the question.
        command: after `memfit`; a name of `answers.shapes` is a folder with that configuration.
        status: that the command ends with when it answers.
    """

    text: str
    command: str
    status: int = 0


QUESTIONS: Final = (
    Question(
        "Does QLoRA of an 8B model fit, and how large a batch?", "estimate Llama-3.1-8B --gpu 4090 --method qlora"
    ),
    Question("Does LoRA of it beside 16-bit weights?", "estimate Llama-3.1-8B --gpu 4090 --method lora"),
    Question("Can I train all of its weights?", "estimate Llama-3.1-8B --gpu 4090 --method full", 1),
    Question("And QLoRA of a 7B model on a 3090?", "estimate Mistral-7B --gpu 3090 --method qlora"),
    Question("Which method, if I name none?", "estimate Llama-3.2-3B --gpu 4090"),
    Question("All weights of a 1B model?", "estimate Llama-3.2-1B --gpu 4090 --method full"),
    Question("LoRA of 0.5B, with long samples?", "estimate Qwen2.5-0.5B --gpu 4090 --method lora --length 4096"),
    Question(
        "BERT-large on 32 texts of 512 tokens?", "estimate bert-large --gpu 4090 --method full --batch 32 --length 512"
    ),
    Question("GPT-2 medium, batch 8?", "estimate gpt2-medium --gpu 'RTX 4090 24GB' --method full --batch 8"),
    Question("The same for a program?", "estimate gpt2-medium --gpu 4090 --method full --json"),
    Question("A model of my own, in Python?", "estimate python:own:build --data own:read --gpu 4090 --batch 64"),
    Question("What if I mistype the card?", "estimate gpt2-medium --gpu 4900", 3),
    Question("What if the folder is not complete?", "estimate half --gpu 4090", 3),
    Question("What has this computer?", "doctor"),
    Question("Why did my run die?", "doctor --oom crash.log"),
    Question("Does this run fit in what its file says?", f"plan {RUN}"),
    Question("And in less?", f"plan {RUN} --budget 24MiB"),
    Question("What if that is too little?", f"plan {RUN} --budget 4MiB", 1),
    Question("What would it take on a card that is not here?", f"plan {RUN} --device 4090"),
    Question("And on two cards?", f"plan {RUN} --devices 2x24GiB"),
    Question("How large a batch would fit?", f"plan {RUN} --largest batch"),
    Question("What do fewer bytes cost?", f"frontier {RUN} --points 4"),
    Question("Train it.", f"train {RUN} --budget 32MiB --set train.steps=5 --set train.out=OUT"),
    Question("What did the plan do, and what was measured?", "explain OUT"),
    Question("Go on with it.", "resume OUT --set train.steps=8"),
)


def asked(question: Question, folder: Path, limit: float) -> Row:
    """One question's answer: status, seconds on the wall and of the processor, and the first lines."""
    words = [
        str(folder / "out") if word == "OUT" else word.replace("=OUT", f"={folder / 'out'}")
        for word in shlex.split(question.command)
    ]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memfit", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = -1, "", f"no answer in {limit:.0f} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "question": question.text,
        "command": f"memfit {question.command}",
        "status": status,
        "expected": question.status,
        "wall_seconds": time.perf_counter() - began,
        "processor_seconds": used,
        "answer": answer(out if question.status in {0, 1} and out.strip() else err, folder),
    }


def answer(text: str, folder: Path) -> str:
    """The lines that answer: the verdict of a command, or the last line of what it says otherwise."""
    lines = [line.strip() for line in text.replace(f"{folder}/", "").splitlines() if line.strip()]
    if lines and lines[0] == "{":
        found: Mapping[str, Any] = json.loads(text)
        return f"fits: {found.get('fits')}, peak_bytes: {found.get('peak_bytes'):,}"
    starts = ("Fits", "Does not fit", "memfit:", "Largest", "Predicted", "Peak:", "The largest")
    # A sentence may go on over several lines of the terminal.
    paragraph = ""
    for line in lines:
        if line.startswith(starts):
            paragraph = line
        elif paragraph.startswith("memfit:") or (paragraph and not paragraph.endswith((".", "allowed"))):
            paragraph += f" {line}"
        elif paragraph:
            break
    return paragraph or (lines[0] if lines else "")


def table(rows: Sequence[Row]) -> str:
    """Each question with its command, its seconds and its answer."""
    heads = ("question", "command", "processor s", "answered", "what it says")
    return measuring.table(
        heads,
        (
            (
                row["question"],
                f"`{row['command']}`",
                f"{row['processor_seconds']:.0f}",
                "yes"
                if row["status"] == row["expected"]
                else f"no: status {row['status']}, expected {row['expected']}",
                row["answer"].replace("|", "/"),
            )
            for row in rows
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of questions, such as 1,5; the rows of others are kept")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds after which a question counts as not answered"
    )
    arguments = parser.parse_args()
    wanted = [int(n) for n in arguments.only.split(",")] if arguments.only else range(1, len(QUESTIONS) + 1)
    rows = {row["question"]: row for row in measuring.kept("answers")}
    with tempfile.TemporaryDirectory(prefix="memfit-answers-") as name:
        folder = Path(name)
        write_all(folder)
        (folder / "own.py").write_text(BUILDER)
        (folder / "crash.log").write_text(CRASH)
        for number in wanted:
            question = QUESTIONS[number - 1]
            row = asked(question, folder, arguments.limit)
            rows[question.text] = row
            print(
                f"{number:2} {row['status']} {row['processor_seconds']:5.1f} s {question.command}: {row['answer']}",
                flush=True,
            )
            order = [rows[each.text] for each in QUESTIONS if each.text in rows]
            measuring.keep("answers", measuring.machine(), order)


if __name__ == "__main__":
    main()
