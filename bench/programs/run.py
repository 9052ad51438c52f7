"""Training programs of other people: exact, predicted truly and inside the budget, or the reason why not?

python -m pip install --no-deps --target FOLDER -r bench/programs/requirements.txt
PYTHONPATH=FOLDER python bench/run.py programs
PYTHONPATH=FOLDER python bench/programs/run.py --only WORDS    # of package and name; the other rows are kept as they are
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

SHARE: Final = 0.6  # of the plain peak
STEPS: Final = 3  # at each budget
CHANGING_STEPS: Final = {"share": 200, "smallest": 100}  # where forward changes from step to step
SLOWER: Final = 1.03  # times the work that is planned
LIMIT_SECONDS: Final = 600  # of one program, on a busy machine
FILES: Final = ("language", "vision", "audio", "generative", "graphs", "tables", "dynamics", "learning")
KINDS: Final = {
    "exact": "all steps have the numbers of plain PyTorch and are inside the budget",
    "kept plain": "the same, but nothing is dropped",
    "refused": "memfit says why it cannot",
    "changed by running": "a forward changes the model itself (its modules, or what is trained), so the plan no longer fits it",
    "not deterministic": "plain PyTorch differs from itself",
    "above budget": "a bug, or a path that planning did not see",
    "wrong": "a bug",
    "failed": "an error that is not memfit's own",
    "not installed": "",
}


def programs() -> list[Any]:
    """All of them."""
    from programs.program import PROGRAMS

    for name in FILES:
        importlib.import_module(f"programs.{name}")
    return PROGRAMS


def seeded(number: int) -> None:
    """Seed every generator that programs draw from."""
    from programs.program import seeded

    seeded(number)


def trained(program: Any, plan: Any, made: tuple[Any, Any, Any], steps: int) -> dict[str, Any]:
    """Some steps under a plan, each beside the same step of plain PyTorch from the same seed."""
    import torch

    import memfit
    from memfit.api import default_optimizer

    model, batch, loss_fn = made
    engine = memfit.apply(plan, model, loss_fn, default_optimizer)
    reference = Plain(program)
    peaks, different, divergences, begun_anew, slower = [], 0, [], 0, 0
    for step in range(steps):
        seeded(1000 + step)
        record = engine.step(batch, meter=True)
        begun_anew += bool(record.begun_anew)
        slower += is_slower(record, engine.plan_for(batch))
        peaks.append(record.peak_bytes or 0)
        different += not equal(torch.tensor(record.loss), torch.tensor(reference.step(batch, 1000 + step)))
        divergences += list(record.divergences)[:1]
    return {
        **of_peaks(plan, peaks),
        "peaks": len(set(peaks)),
        "diverged": len(divergences),
        "begun_anew": begun_anew,
        "slower": slower,
        "divergence": str(divergences[0]) if divergences else "",
        "different_losses": different,
        "different_tensors": reference.differs_from(model),
        "slowdown": plan.prediction.slowdown,
        "last_slowdown": engine.plan_for(batch).prediction.slowdown,
    }


def is_slower(record: Any, plan: Any) -> bool:
    """Whether a step has done more than 1.03 times the work that its plan says, in seconds measured in planning; a clock would say how busy the machine is.

    Whatever forward runs besides the known paths, or a second time, counts as such a step.
    """
    if record.begun_anew or record.divergences:
        return True
    prediction, planned = plan.prediction, _recomputations(plan)
    extra = prediction.step_seconds - prediction.plain_step_seconds
    done = prediction.step_seconds + extra * max(0, record.recomputations - planned) / max(1, planned)
    return bool(done > SLOWER * prediction.step_seconds)


def _recomputations(plan: Any) -> int:
    """Operations that run again in a step on the path that a plan is timed for."""
    from memfit.planning import planning_of

    if not plan.script.calls:
        return int(plan.script.recomputations)
    planning = planning_of(plan)
    assert planning is not None, "made in this process"
    own = {(call.module, call.number): call.script.recomputations for call in plan.script.calls}
    last = {module: max(number for name, number in own if name == module) for module, _ in own}
    calls = planning.solver(plan.choices.micro_batches).trace.calls
    return sum(own.get((call.module, min(call.number, last.get(call.module, 0))), 0) for call in calls)


class Plain:
    """A program in plain PyTorch."""

    def __init__(self, program: Any) -> None:
        from memfit.api import default_optimizer

        seeded(0)
        self.model, _, self._loss_fn = program.build()  # a loss may close over its model
        self._optimizer = default_optimizer(self.model.parameters())

    def step(self, batch: Any, seed: int) -> float:
        """One step; its loss."""
        from memfit import batches

        seeded(seed)
        loss = batches.loss_of(self.model, batch, self._loss_fn)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def differs_from(self, other: Any) -> list[str]:
        """Names of parameters and buffers that are not equal to the last bit."""
        return apart(self.model.state_dict(), other.state_dict())


def of_peaks(plan: Any, peaks: Sequence[int]) -> dict[str, int]:
    """Of steps under a plan that held so many bytes at their peaks, what a row tells."""
    return {
        "steps": len(peaks),
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.prediction.peak_bytes,
        "least_bytes": min(peaks),
        "largest_bytes": max(peaks),
        "above_budget": sum(peak > plan.budget_bytes for peak in peaks),
    }


def apart(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of two models that are not equal to the last bit; of those that one alone has, where there are any."""
    import torch

    if mine.keys() != theirs.keys():
        return sorted(mine.keys() ^ theirs.keys())
    tensors = [name for name, value in mine.items() if isinstance(value, torch.Tensor)]
    return [name for name in tensors if not equal(mine[name], theirs[name])]


def equal(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits, those of NaN included."""
    import torch

    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and (torch.equal(one, other) or torch.equal(_bits(one), _bits(other)))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def deterministic(program: Any, made: tuple[Any, Any, Any]) -> bool:
    """Whether plain PyTorch does the same twice."""
    first, second = Plain(program), Plain(program)
    losses = [[each.step(made[1], 1000 + n) for n in range(STEPS)] for each in (first, second)]
    return losses[0] == losses[1] and not first.differs_from(second.model)


def row_of(program: Any, steps: int | None = None) -> dict[str, Any]:
    """One program under the budgets, or the reason why it does not train under any."""
    import memfit
    from memfit.api import default_optimizer
    from memfit.planning import planning_of

    def made() -> tuple[Any, Any, Any]:
        seeded(0)
        return program.build()

    began = time.process_time()
    row: dict[str, Any] = named(program)
    try:
        first = made()
    except ModuleNotFoundError as error:
        return {**row, "kind": "not installed", "reason": f"{error}"}
    try:
        plain = memfit.plan(*first, 1 << 50, default_optimizer, fixed={"micro_batches": 1})
        smallest = memfit.smallest_budget(plain)
        planning = planning_of(plain)
        assert planning is not None
        trace, peak = planning.solver(1).trace, plain.prediction.plain_peak_bytes
        if smallest >= peak:
            smallest = (
                planning.plain_peak()
            )  # with the bytes of scalars that kernels wrap into tensors, as plans have them
        wanted = {"plain": planning.plain_peak(), "share": max(smallest, int(SHARE * peak)), "smallest": smallest}
        row |= {"plain_peak_bytes": peak, "paths": 1 + len(trace.paths), "source": trace.source, "budgets": {}}
        row["planning_seconds"] = time.process_time() - began
        for name, budget in wanted.items():
            each = steps or (CHANGING_STEPS[name] if program.changing and name in CHANGING_STEPS else STEPS)
            plan = memfit.replan(plain, budget)
            # The very model that was planned for, as planning left it, and new ones: a copy would share what hooks close over.
            model = first if name == "share" else made()
            row["budgets"][name] = trained(program, plan, model, 2 if name == "plain" else each)
            row |= {"recomputations": plan.script.recomputations, "notes": list(plan.notes)}
    except memfit.PlanFileError as error:
        return {**row, "kind": "changed by running", "reason": f"{type(error).__name__}: {error}"}
    except memfit.MemfitError as error:
        return {**row, "kind": "refused", "reason": f"{type(error).__name__}: {error}"}
    row["seconds"] = time.process_time() - began
    row |= judged(row)
    if row["kind"] == "wrong" and not deterministic(program, first):
        row["kind"] = "not deterministic"
    return row


def named(program: Any) -> dict[str, Any]:
    """What a row begins with."""
    return {"package": program.package, "program": program.name, "changing": program.changing}


def judged(row: dict[str, Any]) -> dict[str, str]:
    """The class of a row that has trained, and what is to be said of it."""
    for name, tried in row["budgets"].items():
        if tried["different_losses"] or tried["different_tensors"]:
            where = ", ".join(tried["different_tensors"][:2])
            return {
                "kind": "wrong",
                "reason": f"{tried['different_losses']} losses and {where or 'no tensor'} differ ({name})",
            }
    for name, tried in row["budgets"].items():
        if tried["above_budget"]:
            over = 100 * (tried["largest_bytes"] / tried["budget_bytes"] - 1)
            return {
                "kind": "above budget",
                "reason": f"{tried['above_budget']} steps, by {over:.2f} % at most ({name})",
            }
    if not row["recomputations"]:
        return {"kind": "kept plain", "reason": "nothing to drop: the smallest plan is the plain one"}
    return {"kind": "exact", "reason": ""}


def _run(program: Any, steps: int | None, sender: Any) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        sender.send(row_of(program, steps))
    except BaseException as error:  # noqa: BLE001 - whatever comes out of it is what the row says
        traceback.print_exc()
        sender.send({**named(program), "kind": "failed", "reason": f"{type(error).__name__}: {error}"})


def alone(program: Any, steps: int | None = None) -> dict[str, Any]:
    """The row of a program from a process of its own, so that none meets what another one left behind."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(program, steps, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(LIMIT_SECONDS):
            return dict(receiver.recv())
        return {**named(program), "kind": "failed", "reason": f"not done after {LIMIT_SECONDS} s"}
    except EOFError:
        return {**named(program), "kind": "failed", "reason": "the process ended"}
    finally:
        process.kill()
        process.join()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown: the classes, every program that trained, and why others did not."""
    counts = Counter(row["kind"] for row in rows)
    ran = [row for row in rows if row["kind"] in {"exact", "kept plain", "above budget", "wrong"}]
    tried = [each for row in ran for each in row["budgets"].values()]
    parts = [
        _in_numbers(rows, tried),
        measuring.table(
            ["class", "what it means", "programs"], [[k, w, str(counts[k])] for k, w in KINDS.items() if counts[k]]
        ),
        measuring.table(
            [
                "package",
                "program",
                "budgets / plain",
                "paths seen",
                "steps",
                "least and largest peak / predicted",
                "begun anew, kept plain",
                "slower than planned",
                "above budget",
                "bit-equal",
                "predicted time / plain",
            ],
            [_cells(row) for row in ran],
        ),
    ]
    others = [row for row in rows if row["reason"]]
    if others:
        parts.append(
            measuring.table(
                ["package", "program", "class", "reason"],
                [
                    [row["package"], row["program"], row["kind"], row["reason"].replace("|", "/").replace("\n", " ")]
                    for row in others
                ],
            )
        )
    return "\n\n".join(parts)


def _in_numbers(rows: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]) -> str:
    packages = len({row["package"] for row in rows})
    minutes = sum(row.get("seconds", 0) for row in rows) / 60
    return (
        f"{len(rows)} programs from {packages} packages, {sum(each['steps'] for each in tried):,} steps, {minutes:.0f} minutes of processor time. "
        f"Steps with another loss: {sum(each['different_losses'] for each in tried)}. "
        f"Steps above the budget: {sum(each['above_budget'] for each in tried)}."
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    tried = list(row["budgets"].values())
    plans = [row["budgets"]["share"], row["budgets"]["smallest"]]
    shares = [each[which] / each["predicted_bytes"] for each in tried for which in ("least_bytes", "largest_bytes")]
    wrong = any(each["different_losses"] or each["different_tensors"] for each in tried)
    return [
        row["package"],
        row["program"],
        ", ".join(f"{each['budget_bytes'] / row['plain_peak_bytes']:.2f}" for each in plans),
        str(row["paths"]),
        str(sum(each["steps"] for each in tried)),
        f"{min(shares):.4f}, {max(shares):.4f}",
        f"{sum(each.get('begun_anew', 0) for each in tried)}, {sum(each['diverged'] for each in tried)}",
        _slower(row) if row["changing"] else "",
        str(sum(each["above_budget"] for each in tried)),
        "no" if wrong else "yes",
        ", ".join(f"{each['slowdown']:.2f}" for each in plans),
    ]


def _slower(row: Mapping[str, Any]) -> str:
    """Of the steps at the two lower budgets."""
    tried = [row["budgets"][name] for name in CHANGING_STEPS]
    if any("slower" not in each for each in tried):
        return ""
    return f"{100 * sum(each['slower'] for each in tried) / sum(each['steps'] for each in tried):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="programs with these words in package or name")
    parser.add_argument("--steps", type=int, help="at each budget")
    arguments = parser.parse_args()
    import torch
    import transformers  # noqa: F401 - once, before the processes that need it

    torch.set_num_threads(1)
    known = {
        (row["package"], row["program"]): {
            name: value for name, value in row.items() if name not in {"bench", "machine"}
        }
        for row in measuring.kept("programs")
    }
    about = measuring.machine()
    for program in programs():
        title = f"{program.package}: {program.name}"
        if not arguments.only or any(words in title for words in arguments.only):
            row = alone(program, arguments.steps)
            print(f"{row['kind']:13} {title}  {row['reason']}", flush=True)
            known[program.package, program.name] = row
            rows = [known[key] for key in ((p.package, p.name) for p in programs()) if key in known]
            measuring.keep("programs", about, rows)


if __name__ == "__main__":
    main()
