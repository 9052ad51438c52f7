"""The models on which exactness and prediction are proven (`tests/models`), on the GPU: the same bits as plain PyTorch, and the bytes that were predicted."""

from __future__ import annotations

import faulthandler
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import measuring
import torch
from gpu.rows import plainly
from gpu.setting import Setting, adamw
from torch import nn

import memfit
from memfit import batches

Ask = Callable[[Setting, str], Iterator[dict[str, Any]]]
PROCESSES = 8  # at the same time on one GPU: the allocator's counters are those of a process
SHARES = (1.0, 0.5, 0.0)  # of the way from the smallest budget to plain
FIVE_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
STEPS = 4  # stretches in which nothing is dropped are left alone from the second on


def programs(setting: Setting) -> Iterator[dict[str, Any]]:
    """Every case in processes beside each other: bytes of a whole step, then loss, gradients and buffers bit by bit."""
    measuring.with_tests_models()
    from models import CASES

    names = [case.name for case in CASES if not case.slow]
    names = names[:2] if setting.tiny else names
    workers = 1 if setting.tiny else PROCESSES
    yield from beside_each_other(names, _rows, workers, tiny=setting.tiny)


def calls(setting: Setting) -> Iterator[dict[str, Any]]:
    """Programs that are unusual by how modules are called, trained for some steps at five budgets: losses and parameters bit by bit, and bytes of a step."""
    measuring.with_tests_models()
    from models.calls import PROGRAMS

    names = list(PROGRAMS)[:2] if setting.tiny else list(PROGRAMS)
    yield from beside_each_other(names, _trained_rows, 1 if setting.tiny else PROCESSES, tiny=setting.tiny)


def beside_each_other(names: Sequence[str], ask: Ask, workers: int, *, tiny: bool) -> Iterator[dict[str, Any]]:
    # Each in a process of its own: after an assertion in a kernel a process can use the GPU for nothing any more.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    try:
        asked = {pool.submit(case_rows, name, ask, tiny=tiny): name for name in names}
        for done in as_completed(asked):
            yield from done.result()
        pool.shutdown()
    except BaseException:  # out of time: the ones that run are not waited for
        for process in multiprocessing.active_children():
            process.kill()
        raise


def case_rows(name: str, ask: Ask, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of one case; one that fails says so, with the traceback."""
    measuring.with_tests_models()
    torch.set_num_threads(1)
    faulthandler.enable()
    setting = Setting(tiny=tiny)
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(ask(setting, name))
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


def _trained_rows(setting: Setting, name: str) -> Iterator[dict[str, Any]]:
    from models.calls import PROGRAMS, batch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model, loss_fn = PROGRAMS[name]()
    model = model.to(setting.device)
    sample = batches.map_tensors(lambda t: t.to(setting.device), batch())
    base = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 1})
    smallest, largest = memfit.smallest_budget(base), base.prediction.peak_bytes
    # Of each run, losses and parameters are kept on the host, so that the GPU holds the step alone, as when it was planned for.
    initial = on_the_host(model)

    def trained(step: Callable[[], float]) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(7)
        return [step() for _ in range(STEPS)], on_the_host(model)

    def plain() -> tuple[list[float], list[torch.Tensor]]:
        put(model, initial)
        return trained(plainly(model, loss_fn, sample))

    def same(a: Any, b: Any) -> bool:
        return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))

    plain()
    reference = plain()
    repeats = same(reference, plain())
    for share in FIVE_SHARES:
        put(model, initial)
        made = memfit.replan(base, smallest + int((largest - smallest) * share))
        engine = memfit.apply(made, model, loss_fn, adamw)
        equal = same(reference, trained(partial(_loss_of_step, engine, sample)))
        setting.fresh()
        yield {
            "case": name,
            "share": share,
            "plain_repeats": repeats,
            "equal": equal,
            "predicted_bytes": made.prediction.peak_bytes,
            "allocated_bytes": engine.step(sample, meter=True).peak_bytes,
            "divergences": [each for record in engine.records for each in record.divergences],
            "recomputations": made.script.recomputations,
            "captured_on": made.source,
        }
        del engine, made


def repeatable() -> None:
    """Kernels that add in the same order each time, attention's among them: with a mask its memory-efficient kernel does not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    for enable in (
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)


def on_the_host(model: nn.Module) -> list[torch.Tensor]:
    """Copies of parameters and buffers, which the GPU does not hold."""
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]


def put(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Give parameters and buffers these values."""
    with torch.no_grad():
        for tensor, value in zip((*model.parameters(), *model.buffers()), values, strict=True):
            tensor.copy_(value)


def _loss_of_step(engine: memfit.Engine, sample: Any) -> float:
    return float(engine.step(sample).loss)


def generators(setting: Setting) -> list[torch.Tensor]:
    """States of the generators that a step may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if setting.device.type == "cuda" else states
