"""A run of several ranks that is done ends as done, whether or not the program leaves its group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

_SENDS = """
import os

import torch
import torch.distributed as dist

from memfit.sharding.process_exit import wait_for_senders_at_exit

wait_for_senders_at_exit()
dist.init_process_group("gloo")
kept = dist.group.WORLD
for tensor in [torch.ones(100_000) for _ in range(20)]:
    dist.all_reduce(tensor)
"""


@pytest.mark.slow
def test_ranks_that_have_sent_end_as_done(tmp_path: Path) -> None:
    """Without the wait about one process in four ends by SIGABRT here."""
    script = tmp_path / "sends.py"
    script.write_text(_SENDS, encoding="utf-8")
    ended: list[int] = []
    for _ in range(6):
        port = TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port  # free by the time it is used
        place = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, str(script)], env={**os.environ, **place, "RANK": str(rank)})
            for rank in range(4)
        ]
        ended.extend(rank.wait(timeout=120) for rank in ranks)
    assert ended == [0] * 24
