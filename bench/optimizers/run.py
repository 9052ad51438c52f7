"""Optimizers with less state: bytes they keep, bytes and seconds an update takes, error of the updates, loss after training, peak of the whole step.

python bench/optimizers/run.py [--only NAME] [--missing] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

QUESTION: Final = "optimizers"
FOLDER: Final = Path(__file__).resolve().parent
WIDE: Final = {"layers": 4, "hidden": 256, "heads": 4, "batch": 2, "tokens": 64, "vocab": 8000}
"""Many parameters and few tokens: state and update are what a step holds most of."""
SMALL: Final = {"layers": 4, "hidden": 128, "heads": 4, "batch": 8, "tokens": 64, "vocab": 256}
"""Learns bytes of text."""
STEPS: Final = 150
SEEDS: Final = (0, 1)
ROUNDS: Final = 11
ERRORS_AT: Final = (1, 10, 100)
FAMILIES: Final = ("AdamW", "Lion", "SGD")

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- measuring one setting, in a process of its own -------------------------------------------------------------------------


def ask(setting: Any, *, quick: bool) -> Row:
    """The row of one setting."""
    from optimizers.packages import REFERENCES

    reference = setting.make is REFERENCES[setting.family]
    row: Row = {"kind": "optimizer", "who": setting.label, "family": setting.family, "note": setting.note}
    row["reference"] = reference
    if setting.make is not None:
        row |= _update(setting, quick=quick)
        row |= _errors(setting, quick=quick)
        row["losses"] = [_trained(setting.make, seed, 20 if quick else STEPS) for seed in SEEDS[: 1 if quick else None]]
    return row | _whole_step(setting)


def _built(sizes: Mapping[str, int]) -> Any:
    from models.transformer import build_gpt

    return build_gpt(**sizes)  # type: ignore[arg-type]


def _storages() -> dict[int, int]:
    """Bytes of every storage that some tensor of this process holds, by address."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    gc.collect()
    found = {}
    for each in gc.get_objects():
        # By type: asking a lazy object for its class may wake it. Of a subclass (fake, quantised) only what it is made of has memory, found by itself.
        kind = type(each)
        if issubclass(kind, torch.Tensor) and not hasattr(kind, "__tensor_flatten__") and kind is not FakeTensor:
            storage = each.untyped_storage()
            if storage.device.type == "cpu" and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _parameters(sizes: Mapping[str, int]) -> list[Any]:
    import torch

    model = _built(sizes)[0]
    generator = torch.Generator().manual_seed(3)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def _update(setting: Any, *, quick: bool) -> Row:
    """What is kept for each parameter, what an update holds besides, and its processor time against the reference's, in pairs."""
    from optimizers.packages import REFERENCES

    from memfit.meter import metered

    parameters = _parameters(WIDE)
    count = sum(p.numel() for p in parameters)
    before = _storages()
    optimizer = setting.make(parameters)
    for _ in range(2):
        optimizer.step()
    state = {address: size for address, size in _storages().items() if address not in before}
    with metered() as reading:
        optimizer.step()
    twin = _parameters(WIDE)
    reference = REFERENCES[setting.family](twin)
    reference.step()
    turns = {"this": optimizer.step, "reference": reference.step}
    times = measuring.in_turns(turns, 3 if quick else ROUNDS)
    ratios = [a / b for a, b in zip(times["this"], times["reference"], strict=True)]
    return {
        "parameters": count,
        "state_bytes": sum(state.values()),
        "transient_bytes": reading.peak_bytes,
        "largest_parameter_bytes": 4 * max(p.numel() for p in parameters),
        "reference_seconds": measuring.quartiles(times["reference"])[1],
        "time_ratio": measuring.quartiles(ratios),
    }


def _text() -> Any:
    """Sources of Python's standard library, as bytes: text that is there wherever this runs."""
    import argparse as first
    import inspect as second
    import tarfile as third
    import typing as fourth

    import torch

    whole = b"".join(Path(str(module.__file__)).read_bytes() for module in (first, second, third, fourth))
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


class _Batches:
    """Windows of the text, drawn from a seed; the last tenth is held out."""

    def __init__(self, seed: int) -> None:
        import torch

        self.text = _text()
        self.end = len(self.text) * 9 // 10
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, *, held_out: bool = False) -> tuple[Any, Any]:
        import torch

        length = SMALL["tokens"]
        first, last = (self.end, len(self.text)) if held_out else (0, self.end)
        starts = torch.randint(first, last - length - 1, (SMALL["batch"],), generator=self.generator)
        windows = torch.stack([self.text[s : s + length + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


def _errors(setting: Any, *, quick: bool) -> Row:
    """The way the parameters went, against that of the reference given the same gradients: those of a training with the reference."""
    import torch
    from optimizers.packages import REFERENCES

    from memfit import batches

    model, _, loss_fn = _built(SMALL)
    own = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    start = [p.detach().clone() for p in model.parameters()]
    reference, optimizer = REFERENCES[setting.family](model.parameters()), setting.make(own)
    text = _Batches(9)
    found: dict[str, float] = {}
    for step in range(1, (10 if quick else max(ERRORS_AT)) + 1):
        reference.zero_grad()
        batches.loss_of(model, text.draw(), loss_fn).backward()
        for mine, p in zip(own, model.parameters(), strict=True):
            mine.grad = None if p.grad is None else p.grad.clone()
        reference.step()
        optimizer.step()
        if step in ERRORS_AT:
            apart = sum(
                float((a.detach() - b.detach()).double().square().sum())
                for a, b in zip(own, model.parameters(), strict=True)
            )
            gone = sum(
                float((b.detach() - c).double().square().sum()) for b, c in zip(model.parameters(), start, strict=True)
            )
            found[str(step)] = (apart / gone) ** 0.5
    return {"errors": found}


def _trained(make: Callable[[Any], Any], seed: int, steps: int) -> float:
    """Loss on held-out text after a training of its own."""
    import torch

    from memfit import batches

    model, _, loss_fn = _built(SMALL)
    optimizer = make(list(model.parameters()))
    text = _Batches(seed)
    for _ in range(steps):
        batches.loss_of(model, text.draw(), loss_fn).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    held_out = _Batches(99)
    with torch.no_grad():
        losses = [float(loss_fn(model, held_out.draw(held_out=True))) for _ in range(20)]
    return sum(losses) / len(losses)


def _whole_step(setting: Any) -> Row:
    """Peak of the third step, everything that is there before it included; and what memfit predicts, where it plans for this optimizer."""
    import memfit

    model, sample, loss_fn = _built(WIDE)
    if setting.base is None:
        return {"peak_bytes": _peak_of_rival(setting, model, sample, loss_fn)}
    fixed = {"micro_batches": 1, **setting.fixed}
    plan = memfit.plan(model, sample, loss_fn, 1 << 50, setting.base, fixed=fixed)
    engine = memfit.apply(plan, model)
    for _ in range(2):
        engine.step(sample)
    measured = engine.step(sample, meter=True).peak_bytes
    return {"predicted_bytes": plan.prediction.peak_bytes, "peak_bytes": measured}


def _peak_of_rival(setting: Any, model: Any, sample: Any, loss_fn: Any) -> int:
    from memfit import batches
    from memfit.meter import metered

    own = [*model.parameters(), *model.buffers(), *batches.leaves(sample)]
    before = _storages().keys() - {t.untyped_storage().data_ptr() for t in own}
    if setting.steps is not None:
        step: Callable[[], object] = setting.steps(model, sample, loss_fn)
    else:
        optimizer = setting.make(list(model.parameters()))

        def step() -> None:
            batches.loss_of(model, sample, loss_fn).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    there = sum(size for address, size in _storages().items() if address not in before)
    with metered() as reading:
        step()
    return there + reading.peak_bytes


# -- asking all of them ------------------------------------------------------------------------------------------------------


def _offered(package_name: str | None = None) -> tuple[list[Any], list[Row]]:
    """(package, setting, version) of every setting that runs here, or of one package; and what does not run, with the reason."""
    from rivals import discovery

    found, absent = [], []
    for package in discovery.modules("optimizers.packages", FOLDER / "packages"):
        name = package.__name__
        if package_name not in {None, name}:
            continue
        reason = discovery.absent(package) or package.obstacle()
        if reason:
            absent.append({"kind": "absent", "who": package.NAME, "reason": reason})
            continue
        about = discovery.version(package)
        found += [(name, setting, about) for setting in package.settings()]
    return found, absent


def _asked(package: str, label: str, into: Path, *, quick: bool) -> None:
    """In the process of one setting."""
    measuring.steady_allocator()
    os.environ["MEMFIT_CACHE_DIR"] = str(into.parent)
    import torch

    torch.set_num_threads(1)
    setting, version = next((s, v) for _, s, v in _offered(package)[0] if s.label == label)
    row = {"machine": measuring.machine(), "version": version, **ask(setting, quick=quick)}
    into.write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings whose name holds this")
    parser.add_argument("--missing", action="store_true", help="only settings that have no results yet")
    parser.add_argument("--quick", action="store_true", help="few steps; results are shown, not kept")
    parser.add_argument("--ask", nargs=2, metavar=("PACKAGE", "LABEL"), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    measuring.with_tests_models()
    if arguments.ask:
        package, label = arguments.ask
        _asked(package, label, arguments.into, quick=arguments.quick)
        return
    known = {row["who"]: row for row in measuring.kept(QUESTION) if row["kind"] == "optimizer"}
    settings, absent = _offered()
    about = measuring.machine()
    shown: list[Row] = []
    for package, setting, _ in settings:
        label = setting.label
        if (arguments.only and arguments.only not in label) or (arguments.missing and label in known):
            continue
        say(f"-- {label}")
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
            into = Path(folder) / "row.json"
            command = [sys.executable, str(Path(__file__)), "--ask", package, label, "--into", str(into)]
            command += ["--quick"] if arguments.quick else []
            code = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
            if code:
                absent.append({"kind": "absent", "who": label, "reason": f"its process ended with status {code}"})
            else:
                known[label] = json.loads(into.read_text())
                shown.append(known[label])
        if not arguments.quick:  # after each, so that a broken run can go on
            measuring.keep(QUESTION, about, [*_in_order(list(known.values())), *absent])
    rows = shown if arguments.quick else list(known.values())
    print(table([*_in_order(rows), *absent]))


def _in_order(rows: list[Row]) -> list[Row]:
    """By family; in each the reference, memfit, the others."""

    def place(row: Row) -> tuple[int, bool, bool]:
        return FAMILIES.index(row["family"]), not row["reference"], "**memfit**" not in row["who"]

    return sorted(rows, key=place)


# -- the page ----------------------------------------------------------------------------------------------------------------


STEP_HEADS: Final = ("optimizer", "peak, MiB", "predicted, MiB", "error", "note")


def table(rows: Rows) -> str:
    """As Markdown."""
    asked = [row for row in rows if row["kind"] == "optimizer"]
    updates = [row for row in asked if "parameters" in row]
    one = updates[0]
    heads = ["optimizer", "state, bytes a parameter", "transient, MiB", "time / 32 bits", "quartiles"]
    heads += [*_error_heads(updates), "held-out loss", "from 32 bits"]
    largest = f"the largest tensor {one['largest_parameter_bytes'] / 2**20:.1f} MiB in 32 bits"
    parts = [
        "### Updates",
        f"{one['parameters'] / 1e6:.1f} million parameters, {largest}.",
        measuring.table(heads, [_update_cells(row, updates) for row in updates]),
        _spread(updates),
        "### Where others do better than memfit's 8 bits",
        measuring.table(["optimizer", "what", "its", "memfit's", "why"], _better(updates)),
        "### The whole step",
        f"A GPT with these parameters on {WIDE['batch']} x {WIDE['tokens']} tokens.",
        measuring.table(STEP_HEADS, [_step_cells(row) for row in asked]),
    ]
    absent = [[row["who"], row["reason"]] for row in rows if row["kind"] == "absent"]
    if absent:
        parts += ["### Not run", measuring.table(["rival", "reason"], absent)]
    return "\n\n".join(parts)


PAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "8-bit-state": ("8bit", "fused", "Lion"),
    "optimizer-state-offloading": ("torch AdamW, fused", "state in a file", "Offload"),
    "update-in-backward": ("torch AdamW, fused", "AdamW8bit"),
}
"""Page of docs/techniques -> parts of the names of the optimizers that belong there."""


def excerpt(rows: Rows, page: str) -> str:
    """The optimizers that a page about a technique is about: their updates, and the whole step with them."""
    words = PAGES.get(page, ())
    own = [row for row in rows if row["kind"] == "optimizer" and any(word in row["who"] for word in words)]
    if not own:
        return ""
    updates = [row for row in own if "parameters" in row]
    heads = ["optimizer", "state, bytes a parameter", "transient, MiB", "update's time / 32 bits", "quartiles"]
    return "\n\n".join(
        [
            (
                f"Updates of {updates[0]['parameters'] / 1e6:.1f} million parameters. *Transient*: bytes that exist only during the update. *Error*: how far "
                "the parameters are from those of the optimizer in 32 bits, as a share of the way that these have moved."
            ),
            measuring.table([*heads, *_error_heads(updates)], [_update_cells(row, updates)[:-2] for row in updates]),
            f"The whole step of a GPT with these parameters on {WIDE['batch']} x {WIDE['tokens']} tokens:",
            measuring.table(STEP_HEADS, [_step_cells(row) for row in own]),
        ]
    )


def _error_heads(rows: Rows) -> list[str]:
    steps = next(iter(rows))["errors"]
    return [f"error, {step} step{'s' if step != '1' else ''}" for step in steps]


def _reference(row: Mapping[str, Any], rows: Rows) -> Mapping[str, Any] | None:
    """Of its family; None where it has not been asked yet."""
    return next((other for other in rows if other["family"] == row["family"] and other["reference"]), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _update_cells(row: Mapping[str, Any], rows: Rows) -> list[str]:
    first, middle, third = row["time_ratio"]
    reference = _reference(row, rows)
    loss = _mean(row["losses"])
    return [
        row["who"],
        f"{row['state_bytes'] / row['parameters']:.3f}",
        f"{row['transient_bytes'] / 2**20:.2f}",
        f"{middle:.2f}",
        f"{first:.2f} to {third:.2f}",
        *(f"{100 * error:.3f} %" for error in row["errors"].values()),
        f"{loss:.4f}",
        "" if reference is None else f"{loss - _mean(reference['losses']):+.4f}",
    ]


def _spread(rows: Rows) -> str:
    """How far losses lie apart that differ in nothing but the order of the text."""
    told = []
    for row in rows:
        if row is _reference(row, rows):
            told.append(f"{row['family']} {min(row['losses']):.4f} to {max(row['losses']):.4f}")
    return f"Held-out loss is the mean over {len(rows[0]['losses'])} orders of the text. In 32 bits these alone make it {', '.join(told)}."


_UNPACKED = "its state is in 32 bits: nothing is packed or unpacked"
_COMPILED = "its update is compiled into one loop that keeps nothing aside; it takes g++ and a slow first step, and memfit compiles nothing at run time"
_SCALES = "256 elements share a scale, with memfit 128, for the error's sake"
WHY: Final[Mapping[str, Mapping[str, str]]] = {
    "state": {"torchao AdamW4bit": "codes of 4 bits", "torchao": _SCALES, "bitsandbytes": _SCALES, "": ""},
    "transient": {"torchao": _COMPILED, "": _UNPACKED},
    "time": {
        "torchao": _COMPILED,
        "bitsandbytes": "its kernels are compiled; memfit runs a score of torch's operations on each chunk",
        "": _UNPACKED,
    },
    "error": {
        "torchao": "its codes are floats or spaced otherwise",
        "bitsandbytes": "its codes are spaced otherwise",
        "": _UNPACKED,
    },
}
"""By what is compared and the beginning of a name: why somebody does better than memfit's 8 bits. The longest beginning counts."""


def _better(rows: Rows) -> list[list[str]]:
    """Of each family, what somebody else does better than its 8-bit optimizer of memfit, and the reason."""
    told = []
    for ours in (row for row in rows if row["who"].startswith("**memfit**") and row["who"].endswith("8bit")):
        for row in rows:
            if row["family"] != ours["family"] or "**memfit**" in row["who"]:
                continue
            for (what, mine), (_, theirs) in zip(_compared(ours), _compared(row), strict=True):
                if float(theirs) < float(mine):
                    why = WHY[what.split(",")[0].split()[0]]
                    known = max((start for start in why if row["who"].startswith(start)), key=len)
                    told.append([row["who"], what, theirs, mine, why[known]])
    return told


def _compared(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What updates are compared in, as the page shows it."""
    last = list(row["errors"])[-1]
    return [
        ("state, bytes a parameter", f"{row['state_bytes'] / row['parameters']:.3f}"),
        ("transient, MiB", f"{row['transient_bytes'] / 2**20:.2f}"),
        ("time / 32 bits", f"{row['time_ratio'][1]:.2f}"),
        (f"error after {last} steps, %", f"{100 * row['errors'][last]:.3f}"),
    ]


def _step_cells(row: Mapping[str, Any]) -> list[str]:
    predicted = row.get("predicted_bytes")
    return [
        row["who"],
        f"{row['peak_bytes'] / 2**20:.2f}",
        "" if predicted is None else f"{predicted / 2**20:.2f}",
        "" if predicted is None else f"{100 * (row['peak_bytes'] / predicted - 1):+.4f} %",
        row["note"],
    ]


if __name__ == "__main__":
    main()
