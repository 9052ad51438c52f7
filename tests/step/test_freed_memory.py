"""What a step frees is there for the next one: once there is an engine, malloc gives nothing back to the system."""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path

import pytest

import forking
import memfit
import small
from memfit.step.freed_memory import keep_freed_memory

MEBIBYTE = 1 << 20


def given_back() -> int:
    """Bytes that malloc gives back to the system as it is let go of three blocks which it has just been asked for."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    blocks = [libc.malloc(31 * MEBIBYTE) for _ in range(3)]
    end = libc.sbrk(0)
    for block in reversed(blocks):
        libc.free(ctypes.c_void_p(block))
    return int(end - libc.sbrk(0))


def before_and_with_an_engine(found: Path) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 * MEBIBYTE)
    mallopt(-1, MEBIBYTE)  # about as it is in the beginning
    before = given_back()
    model, sample = small.chain(1), small.rows(16)
    plan = memfit.plan(model, sample, small.squared_error, 1 << 40, small.adamw)
    memfit.apply(plan, model, small.squared_error, small.adamw)
    found.write_text(json.dumps([before, given_back()]))


@pytest.mark.slow
@pytest.mark.skipif(not keep_freed_memory(), reason="malloc is another one, or told otherwise")
def test_nothing_is_given_back_between_steps(tmp_path: Path) -> None:
    process = forking.process(before_and_with_an_engine, tmp_path / "found", output=tmp_path / "output")
    forking.start([process])
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    before, after = json.loads((tmp_path / "found").read_text())
    assert before > 60 * MEBIBYTE
    assert after == 0


def test_what_the_environment_says_of_malloc_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")
    assert not keep_freed_memory()


def test_another_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
