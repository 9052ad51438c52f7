"""A run for another scheduler: a batch script of Slurm, or a TrainJob of Kubeflow's Trainer, with the bytes that the plan has found.

Nothing that a run file or a name holds is read by a shell: the file is in a here-document that is quoted, in lines none of which can end it, or in a variable
of the environment; names are reduced to letters, digits and dashes.
Sources: https://slurm.schedmd.com/sbatch.html, https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from memfit.train.limit_variable import VARIABLE as MEMORY_LIMIT
from memfit.tune.train_job import resource

KINDS: Final = ("slurm", "trainjob")
_END: Final = "MEMFIT_RUN_FILE"  # of the here-document; lines of JSON begin with a space, a bracket or a quote
_MIB: Final = 1 << 20
_SLACK_BYTES: Final = 3 << 30  # of each process, for Python, torch and its libraries
_SPARE: Final = 2.0  # times the predicted seconds, which count neither evaluation nor snapshots
_LEAST_MINUTES: Final = 10
_WARNING_SECONDS: Final = 120  # before the end of its time, when a run is told to write a snapshot


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run takes.

    Attributes:
        rank_bytes: of each rank, on a device of its own.
        device: kind of the devices: "cpu" or "cuda".
        host_bytes: of the computer's memory, besides what ranks on a CPU take.
        seconds: in all; None where that is not known.
    """

    rank_bytes: tuple[int, ...]
    device: str = "cpu"
    host_bytes: int = 0
    seconds: float | None = None

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> Needs:
        """From the figures of a plan, as the service tells them."""
        seconds = plan["startup_seconds"] + (plan["total_steps"] or 0) * plan["step_seconds"]
        known = plan["total_steps"] is not None
        return cls(
            tuple(plan["rank_bytes"]),
            plan["device"],
            plan.get("tiers", {}).get("host", 0),
            seconds if known else None,
        )

    @property
    def memory_bytes(self) -> int:
        """Of the computer, for all processes."""
        ranks = sum(size * 9 // 8 for size in self.rank_bytes) if self.device == "cpu" else 0
        return ranks + self.host_bytes + _SLACK_BYTES * len(self.rank_bytes)


def slurm(config: Mapping[str, Any], name: str, needs: Needs) -> str:
    """A batch script: `sbatch SCRIPT` in the folder with the run's code and data. Submitted again, it goes on from the last snapshot.

    Args:
        config: content of a run file.
        name: to call it by.
        needs: of the run.
    """
    short, ranks = safe_name(name), len(needs.rank_bytes)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={short}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --mem={math.ceil(needs.memory_bytes / _MIB)}M",
        *([f"#SBATCH --gpus-per-node={ranks}"] if needs.device == "cuda" else []),
        *([f"#SBATCH --time={_minutes(needs.seconds)}"] if needs.seconds is not None else []),
        f"#SBATCH --signal=TERM@{_WARNING_SECONDS}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# Predicted: {', '.join(map(str, needs.rank_bytes))} bytes on {needs.device}"
        + ("." if needs.seconds is None else f", {needs.seconds:.0f} s."),
        "set -eu",
        f"cat > {short}.json <<'{_END}'",
        *_run_file(config, f"{short}-out").splitlines(),
        _END,
        f"export {MEMORY_LIMIT}={','.join(map(str, needs.rank_bytes))}",
        f"if [ -e {short}-out/config.json ]; then",
        f"  exec srun {' '.join(_command('resume', f'{short}-out', ranks))}",
        "fi",
        f"exec srun {' '.join(_command('train', f'{short}.json', ranks))}",
    ]
    return "\n".join(lines) + "\n"


def train_job(config: Mapping[str, Any], name: str, needs: Needs, image: str) -> dict[str, Any]:
    """A TrainJob on one node.

    Args:
        config: content of a run file.
        name: to call it by.
        needs: of the run.
        image: of a container with memfit, and the run's code and data in its working folder.
    """
    short, ranks = safe_name(name), len(needs.rank_bytes)
    limits: dict[str, Any] = {"memory": f"{math.ceil(needs.memory_bytes / _MIB)}Mi"}
    if needs.device == "cuda":
        limits["nvidia.com/gpu"] = ranks
    # Kubernetes replaces $(NAME) in values; "$$" stands for a dollar.
    content = _run_file(config, f"{short}-out").replace("$(", "$$(")
    words = [
        "sh",
        "-c",
        f'printf %s "$MEMFIT_RUN_FILE" > run.json && exec {" ".join(_command("train", "run.json", ranks))}',
    ]
    trainer: dict[str, Any] = {
        "env": [
            {"name": "MEMFIT_RUN_FILE", "value": content},
            {"name": MEMORY_LIMIT, "value": ",".join(map(str, needs.rank_bytes))},
        ],
        "resourcesPerNode": {"requests": limits, "limits": limits},
    }
    return resource(short.lower(), words, image, **trainer)


def safe_name(name: str) -> str:
    """Letters, digits and dashes of a name, which no shell reads as anything else."""
    found = re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:60].rstrip("-")
    return found or "memfit-run"


def _run_file(config: Mapping[str, Any], out: str) -> str:
    content = {**config, "train": {**(config.get("train") or {}), "out": out}}
    return json.dumps(content, indent=1)


def _command(verb: str, what: str, ranks: int) -> list[str]:
    return ["memfit", verb, what, *(["--nproc", str(ranks)] if ranks > 1 else [])]


def _minutes(seconds: float) -> int:
    return max(_LEAST_MINUTES, math.ceil(_SPARE * seconds / 60) + math.ceil(_WARNING_SECONDS / 60))
