"""How long `memfit plan` takes to answer for shapes of 8 billion parameters and for BERT-large, from a folder with a config.json alone; nothing is kept.

python bench/planning/large.py [--only lora,bert] [--device 4090]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from answers.shapes import write_all

ROOT: Final = Path(__file__).resolve().parents[2]
LLAMA: Final = {"hf": "Llama-3.1-8B", "init": "random", "task": "causal-lm"}
BERT: Final = {"hf": "bert-large", "init": "random", "task": "masked-lm"}
HALF: Final = ["model.embed_tokens", *(f"model.layers.{number}.*" for number in range(16))]
# Name -> words, and the sections of the run file that differ; tokens of a sample.
QUESTIONS: Final[Mapping[str, tuple[str, dict[str, Any], int]]] = {
    "full": (
        "8B, all weights, batch 4, host memory",
        {"model": LLAMA, "fit": {"budget": "24GiB", "host_budget": "256GiB", "global_batch": 4}},
        1024,
    ),
    "lora": (
        "8B under LoRA beside bf16, batch 4, host memory, 4-bit weights and 8-bit state allowed",
        {
            "model": {**LLAMA, "weights": "bf16"},
            "lora": {"rank": 16},
            "fit": {"budget": "24GiB", "host_budget": "64GiB", "global_batch": 4, "allow": ["4bit", "8bit"]},
        },
        1024,
    ),
    "frozen": (
        "8B, half of it frozen, batch 4, host memory, bf16 and 8-bit state allowed",
        {
            "model": LLAMA,
            "fit": {
                "budget": "24GiB",
                "host_budget": "64GiB",
                "global_batch": 4,
                "allow": ["bf16", "8bit"],
                "freeze": HALF,
            },
        },
        1024,
    ),
    "bert": (
        "BERT-large, batch 32, 8 GiB",
        {"model": BERT, "fit": {"budget": "8GiB", "global_batch": 32}},
        128,
    ),
    "stages": (
        "BERT-large, batch 32, as a pipeline over four devices of 4 GiB",
        {
            "model": BERT,
            "fit": {"budget": "4GiB", "devices": "4x4GiB", "global_batch": 32, "fixed": {"sharding": "pipeline"}},
        },
        128,
    ),
    "tiny": (
        "BERT-large, batch 32, 100 MB",
        {"model": BERT, "fit": {"budget": "100MB", "global_batch": 32}},
        128,
    ),
}


def asked(sections: Mapping[str, Any], length: int, device: str, folder: Path) -> str:
    """One question: processor seconds and what is said."""
    run = folder / "run.json"
    data = {"train": [str(ROOT / "README.md")], "tokenizer": "bytes", "max_length": length}
    run.write_text(
        json.dumps({"data": data, "optim": {"name": "adamw", "lr": 1e-4}, "train": {"steps": 10}, **sections}),
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "memfit", "plan", str(run), "--device", device, "--json"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 1):
        return f"status {done.returncode}: {done.stderr.strip()[-200:]}"
    said = json.loads(done.stdout)
    fits = "fits in {peak_bytes:,} bytes, {step_seconds:.6f} s a step"
    answer = said["message"].partition(". Ways out")[0] if done.returncode else fits.format(**said)
    return f"{cpu:.0f} s of the processor, {wall:.0f} s on the clock, {done.stderr.count('capturing a step')} captures: {answer}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(QUESTIONS), help="names of questions")
    parser.add_argument("--device", default="4090")
    arguments = parser.parse_args()
    print(measuring.machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_all(folder)
        for each in arguments.only.split(","):
            words, sections, length = QUESTIONS[each]
            print(f"{each} ({words}): {asked(sections, length, arguments.device, folder)}", flush=True)


if __name__ == "__main__":
    main()
