"""Write down what DeepSpeed's own reader says of each configuration: python tests/integrations/deepspeed/record.py, where deepspeed is installed.

The recording is what the tests compare with where it is not; where it is, they ask DeepSpeed itself as well.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

RECORDING = Path(__file__).parent / "deepspeed.json"
WALKED = Path(__file__).parent / "courses.json"


def asked(said: dict[str, Any] | str, ranks: int) -> list[int] | str:
    """(train, micro, accumulation) by DeepSpeed, or the name of what it raises."""
    from deepspeed.runtime import config

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] | str = said
        if isinstance(said, str):
            given = str(Path(folder, "ds_config.json"))
            Path(given).write_text(said, encoding="utf-8")
        with mock.patch.multiple(config.dist, get_rank=lambda: 0, get_world_size=lambda: ranks):
            try:
                found = config.DeepSpeedConfig(given)
            except Exception as error:  # noqa: BLE001 - it raises whatever comes
                return type(error).__name__
    return [found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps]


def walk(name: str) -> dict[str, Any]:
    """What DeepSpeed's own schedule sets, by optimizer."""
    import torch
    from deepspeed.runtime import lr_schedules

    from integrations.deepspeed.courses import COURSES, walked

    kind, params = COURSES[name]
    own = getattr(lr_schedules, kind)
    return {
        each.__name__: walked(lambda optimizer: own(optimizer, **params), each)
        for each in (torch.optim.AdamW, torch.optim.SGD)
    }


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.insert(0, str(RECORDING.parents[2]))
    import deepspeed

    from integrations.deepspeed.configurations import CASES
    from integrations.deepspeed.courses import COURSES

    logging.disable(logging.CRITICAL)
    found = {case.name: asked(case.said, case.ranks) for case in CASES}
    RECORDING.write_text(
        "{\n"
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(value)}"
            for name, value in {"version": deepspeed.__version__, **found}.items()
        )
        + "\n}\n",
        encoding="utf-8",
    )
    courses = ",\n".join(f"  {json.dumps(name)}: {json.dumps(walk(name))}" for name in COURSES)
    WALKED.write_text("{\n" + courses + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
