"""Keep what `run.py --out DIR` measured on a GPU: of each question the rows of the last folder that has some become those of results.jsonl.

python bench/gpu/keep.py DIR [DIR ...]
python bench/gpu/keep.py --absent       # what is predicted without the GPU, predicted anew with the versions that are here
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring


def predict_anew() -> None:
    """The plain steps of a GPU that is not here; measured figures stay."""
    from gpu.absent import PLAIN_STEPS, predicted
    from gpu.setting import Setting

    from memfit.hardware.machine import known_machine

    rows = measuring.kept("gpu")
    steps = {each.name: each for each in PLAIN_STEPS}
    for row in rows:
        if row["part"] == "absent":
            card = known_machine(row["machine"]["device"]).name
            made = predicted(Setting(tiny=False).on_meta(), steps[row["step"]], card)
            row |= {f"absent_{key}": value for key, value in made.items()}
            row["absent_error"] = row["absent_bytes"] / row["allocated_bytes"] - 1
            row["absent_seconds_error"] = row["absent_seconds"] / row["seconds"] - 1
            row["absent_predicted"] = {
                package: importlib.metadata.version(package) for package in ("torch", "transformers")
            }
            print(f"{row['step']}: {100 * row['absent_error']:+.2f} %", file=sys.stderr, flush=True)
    (measuring.FOLDER / "gpu" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _is_asked_again(row: Mapping[str, Any], asked: Collection[tuple[Any, ...]] | None) -> bool:
    return asked is None or _asked(row) in asked


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("case", "share", "way", "row", "batch", "step", "model", "technique"))


def main() -> None:
    """Rows of other questions stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--absent", action="store_true", help="predict anew what is predicted without the GPU")
    arguments = parser.parse_args()
    if arguments.absent:
        predict_anew()
    for folder in arguments.folders:
        for path in sorted(folder.glob("*.jsonl")):
            first, *rows = map(json.loads, path.read_text().splitlines())
            # How a question ended (done, cut, failed) is no figure.
            found = [row for row in rows if not row.keys() & {"done", "cut_after_seconds"} and row.keys() != {"failed"}]
            if found:
                # A question that was cut short has asked again what it has rows of, and nothing else.
                asked = {_asked(row) for row in found}
                whole = any("done" in row for row in rows)
                again = partial(_is_asked_again, asked=None if whole else asked)
                measuring.keep_part("gpu", path.stem, first["machine"], found, again)


if __name__ == "__main__":
    main()
