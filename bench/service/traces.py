"""Traces of jobs that others have published, in the formats in which they have: when a job came, how long it took, and what it took of GPUs.

* Philly (Microsoft, https://github.com/msr-fiddle/philly-traces): `cluster_job_log`, JSON. It names the GPUs of each attempt and says nothing of bytes, so a
  job takes all of each.
* OpenB (Alibaba's GPU cluster of 2023, https://github.com/alibaba/clusterdata): `openb_pod_list_*.csv`. A job on one GPU says which share of it it asks for, in
  thousandths (`gpu_milli`); bytes are taken to be that share of the device's.

The files are not part of this repository: name one that is on this computer.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.errors import InputError


@dataclass(frozen=True)
class Job:
    """One job of a trace.

    Attributes:
        arrives: seconds after the first.
        seconds: that it ran.
        gpus: that it ran on.
        share: of each of them, from 0 to 1.
        owner: whose it was, as far as that is told.
    """

    arrives: float
    seconds: float
    gpus: int
    share: float
    owner: str


def read(file: Path, jobs: int, longest: float = math.inf) -> list[Job]:
    """The first jobs of a trace that ran on GPUs, by their arrival.

    Args:
        file: `cluster_job_log` of Philly, or a list of pods of OpenB.
        jobs: so many at most.
        longest: seconds; those that ran longer are left out.

    Raises:
        InputError: it is neither.
    """
    text = file.read_text(encoding="utf-8")
    if text.startswith("name,cpu_milli,"):
        found = _openb(text)
    elif text.lstrip().startswith("["):
        found = _philly(json.loads(text))
    else:
        raise InputError(f"{file} is no trace of Philly (cluster_job_log) or OpenB (openb_pod_list_*.csv)")
    found = sorted((job for job in found if job.gpus and 0 < job.seconds <= longest), key=lambda job: job.arrives)[
        :jobs
    ]
    if not found:
        raise InputError(f"{file} has no job that ran on a GPU")
    first = found[0].arrives
    return [Job(job.arrives - first, job.seconds, job.gpus, job.share, job.owner) for job in found]


def _philly(rows: Sequence[dict[str, Any]]) -> list[Job]:
    found = []
    for row in rows:
        attempts = [each for each in row["attempts"] if each["start_time"] and each["end_time"]]
        seconds = sum((_moment(each["end_time"]) - _moment(each["start_time"])) for each in attempts)
        gpus = max((sum(len(machine["gpus"]) for machine in each["detail"]) for each in attempts), default=0)
        if row["submitted_time"]:
            found.append(Job(_moment(row["submitted_time"]), seconds, gpus, 1.0, row["user"]))
    return found


def _moment(text: str) -> float:
    return datetime.strptime(text + "+0000", "%Y-%m-%d %H:%M:%S%z").timestamp()


def _openb(text: str) -> list[Job]:
    return [
        Job(
            float(row["creation_time"]),
            float(row["deletion_time"]) - float(row["scheduled_time"]),
            int(row["num_gpu"]),
            int(row["gpu_milli"]) / 1000,
            row["qos"],
        )
        for row in csv.DictReader(text.splitlines())
        if row["scheduled_time"]
    ]
