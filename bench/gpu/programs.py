"""The models on which exactness and prediction are proven (`tests/models`), on the GPU: the same bits as plain PyTorch, and the bytes that were predicted."""

from __future__ import annotations

import faulthandler
import multiprocessing
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import measuring
import torch
from gpu.setting import Setting, adamw

import memfit
from memfit import batches

PROCESSES = 8  # at the same time on one GPU: the allocator's counters are those of a process
SHARES = (1.0, 0.5, 0.0)  # of the way from the smallest budget to plain


def programs(setting: Setting) -> Iterator[dict[str, Any]]:
    """Every case in processes beside each other: bytes of a whole step, then loss, gradients and buffers bit by bit."""
    measuring.with_tests_models()
    from models import CASES

    names = [case.name for case in CASES if not case.slow]
    names = names[:2] if setting.tiny else names
    workers = 1 if setting.tiny else PROCESSES
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        asked = {pool.submit(case_rows, name, tiny=setting.tiny): name for name in names}
        for done in as_completed(asked):
            yield from done.result()
        pool.shutdown()
    except BaseException:  # out of time: the ones that run are not waited for
        for process in multiprocessing.active_children():
            process.kill()
        raise


def case_rows(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of one case; one that fails says so, with the traceback."""
    measuring.with_tests_models()
    torch.set_num_threads(1)
    faulthandler.enable()
    setting = Setting(tiny=tiny)
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(_rows(setting, name))
    except Exception as error:  # noqa: BLE001 - a case that fails is a finding
        rows.append(
            {"case": name, "failed": f"{type(error).__name__}: {error}"[:500], "at": traceback.format_exc()[-1500:]}
        )
    return rows


def _rows(setting: Setting, name: str) -> Iterator[dict[str, Any]]:
    from models import case
    from models.outcome import outcome_of, plans_between

    def built() -> Any:
        model, sample, loss_fn = case(name).build()
        return model.to(setting.device), batches.map_tensors(lambda t: t.to(setting.device), sample), loss_fn

    model, sample, loss_fn = built()
    setting.fresh()
    before = generators(setting)
    # `outcome_of` runs forward and backward by itself, which layer streaming does not allow.
    plans = plans_between(model, sample, loss_fn, adamw, SHARES, streamed="")
    left_as_they_were = all(torch.equal(a, b) for a, b in zip(before, generators(setting), strict=True))
    found = []
    for share, made in zip(SHARES, plans, strict=True):
        setting.fresh()
        engine = memfit.apply(made, model, loss_fn)
        for meter in (False, True):  # the first step makes the optimizer's state
            torch.manual_seed(7)
            record = engine.step(sample, meter=meter)
        found.append(
            {
                "case": name,
                "share": share,
                "budget_bytes": made.budget_bytes,
                "predicted_bytes": made.prediction.peak_bytes,
                "allocated_bytes": record.peak_bytes,
                "error": made.prediction.peak_bytes / (record.peak_bytes or 1) - 1,
                "divergences": list(record.divergences),
                "recomputations": made.script.recomputations,
                "generators_kept": left_as_they_were,
                "captured_on": made.source,
            }
        )
        del engine
    del model, sample, loss_fn
    # Some kernels add in another order each time (atomics, cuDNN's choice): bits can be compared where they do not.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    model, sample, loss_fn = built()
    outcome_of(model, sample, loss_fn)
    reference = outcome_of(model, sample, loss_fn)
    repeats = reference.differs(outcome_of(model, sample, loss_fn))
    for row, made in zip(found, plans, strict=True):
        differs = reference.differs(outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn)))
        yield {**row, "plain_repeats": repeats is None, "equal": differs is None, "differs": differs}


def generators(setting: Setting) -> list[torch.Tensor]:
    """States of the generators that a step may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if setting.device.type == "cuda" else states
