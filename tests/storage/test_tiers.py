"""The lower tier gives back what it was given, and says in one sentence when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memfit
from memfit.errors import EngineError, InfeasibleError
from memfit.step.program import StepProgram
from memfit.storage.tiers import DiskTier
from memfit.streaming.stream import LayerStream
from models.transformer import build_gpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "beyond_memory.py"


def test_regions_keep_their_bytes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tensors = [
        torch.randn(1000),
        torch.randn(33, 7).t(),
        torch.randint(256, (5000,), dtype=torch.uint8),
        torch.ones(()),
    ]
    places = [tier.reserve(t.numel() * t.element_size()) for t in tensors]
    for place, tensor in zip(places, tensors, strict=True):
        tier.write(place, tensor)
    for place, tensor in zip(places, tensors, strict=True):
        into = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        tier.read(place, into)
        assert torch.equal(into, tensor)


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tier.reserve(1 << 20)

    assert list(tmp_path.iterdir()) == []
    tier.close()
    tier.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"set MEMFIT_OFFLOAD_DIR, or what names it .*, to a folder that exists"):
        DiskTier(tmp_path / "nowhere")


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    kept = tier.reserve(4096)
    tier.write(kept, torch.arange(1024, dtype=torch.int32))
    asked = 1 << 55
    with pytest.raises(InfeasibleError, match="free space there") as caught:
        tier.reserve(asked)

    assert caught.value.minimum_bytes == asked + 4096
    assert caught.value.budget_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.5)
    into = torch.empty(1024, dtype=torch.int32)
    tier.read(kept, into)
    assert torch.equal(into, torch.arange(1024, dtype=torch.int32))


def stream_of(tier: DiskTier) -> tuple[LayerStream, StepProgram, object]:
    model, sample, loss_fn = build_gpt(4, 32, 4, 2, 16, 64)
    program = StepProgram(model, loss_fn, torch.optim.AdamW(model.parameters(), fused=True))
    return LayerStream(model, "blocks", tier), program, sample


def test_a_file_cut_under_the_run_ends_it_with_a_reason(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    stream, program, sample = stream_of(tier)
    stream.step(program, [sample], [None])
    os.ftruncate(tier._file._file, 8192)
    for _ in range(2):  # and no later step goes on from there
        with pytest.raises(EngineError, match="something cut it while it was in use: load the last snapshot"):
            stream.step(program, [sample], [None])


def test_a_disk_that_fails_under_the_run_ends_it_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    stream, program, sample = stream_of(tier)

    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.storage.files.os", SimpleNamespace(**{**vars(os), "pwritev": failing}))
    with pytest.raises(EngineError, match=r"could not be written .* \(No space left on device\)"):
        stream.step(program, [sample], [None])
    assert stream.updating


def test_the_engine_says_that_a_failed_write_left_half_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample, loss_fn = build_gpt(4, 32, 4, 2, 16, 64)
    made = memfit.plan(model, sample, loss_fn, 1 << 40, fixed={"streamed": "blocks", "micro_batches": 1})
    engine = memfit.apply(made, model, lower_tier=tmp_path)
    engine.step(sample)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("memfit.storage.files.os", SimpleNamespace(**{**vars(os), "pwritev": failing}))
    for _ in range(2):
        with pytest.raises(EngineError, match="failed half way"):
            engine.step(sample)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is Linux's")
def test_a_model_four_times_its_limit_trains_where_plain_pytorch_dies() -> None:
    command = [sys.executable, str(EXAMPLE), "--layers", "16", "--hidden", "256", "--budget", "48MiB", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4.1 times the 48.0 MiB" in done.stdout
    assert "Equal bit for bit, where plain PyTorch dies." in done.stdout
