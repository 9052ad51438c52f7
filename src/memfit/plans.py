"""A plan: what is chosen, what each step does about each saved storage, what is predicted, what was turned down and why. A value.

`Script` is the part the engine follows, written in terms of the forward operations' order and autograd's saves, so that it can be checked against
the real run operation by operation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from memfit.choices import Choices
from memfit.errors import PlanFileError
from memfit.units import format_bytes, format_seconds

FORMAT_VERSION: Final = 6
MOST_PATHS: Final = 8  # of what is frozen, told in a sentence; `Plan.frozen` has them all
TIERS: Final = ("host", "disk")  # below a device, the nearest first
KEPT: Final = -1  # in `Script.saves`: autograd keeps the tensor itself


@dataclass(frozen=True, slots=True)
class Step:
    """What happens before autograd is given one saved tensor.

    Attributes:
        save: number of the save it asks for.
        runs: recipes to run first; each is the operations to run, in order, or `~storage` alone where the copy of that storage back from its lower
            tier begins.
        releases: for each run, storages to let go after it.
        after: storages to let go once the tensor has been handed over.
    """

    save: int
    runs: tuple[tuple[int, ...], ...]
    releases: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """How one storage goes to a lower tier.

    Attributes:
        offset, bytes: its place on that tier.
        begin: forward operation after which its copy down begins.
        gone_by: forward operation after which that copy is waited for and the storage let go.
        tier: which, "host" or "disk".
    """

    offset: int
    bytes: int
    begin: int
    gone_by: int
    tier: str


@dataclass(frozen=True, slots=True)
class Script:
    """What the engine follows in one micro-batch.

    Attributes:
        operations: name of each forward operation, in order; checked against the run.
        makes: for the operations that matter, (output position, storage, largest bytes or -1 when values decide) of
            the storages to know by number.
        held: storages the engine itself holds from when they are made.
        recorded: operations whose arguments are noted for reruns -> storage of each tensor argument (-1: there anyway).
        random: recorded operations that draw random numbers -> the step after which their generator state is let go.
        saves: for each save in order, its storage when the engine answers for it, KEPT when autograd keeps the tensor.
        steps: what to do at each unpack of a storage the engine answers for, in the order of the captured backward.
        wanted: of each forward operation, whether one of its arguments needs a gradient.
        swaps: storages that go to a lower tier.
        writes: forward operations that write in place -> the storages they write, -1 for those that the engine does not know by number.
    """

    operations: tuple[str, ...] = ()
    makes: Mapping[int, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    recorded: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    random: Mapping[int, int] = field(default_factory=dict)
    saves: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    wanted: tuple[bool, ...] = ()
    swaps: Mapping[int, Swap] = field(default_factory=dict)
    writes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether there is nothing to do: the step runs as PyTorch runs it."""
        return not self.steps

    @property
    def reruns(self) -> int:
        """Operations run again in one micro-batch."""
        return sum(operation >= 0 for step in self.steps for run in step.runs for operation in run)

    @property
    def lower_bytes(self) -> Mapping[str, int]:
        """Of each lower tier that is used, the bytes in which all places lie."""
        out: dict[str, int] = {}
        for swap in self.swaps.values():
            out[swap.tier] = max(out.get(swap.tier, 0), swap.offset + swap.bytes)
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings; operation names are stored once each."""
        names: dict[str, int] = {}
        operations = [names.setdefault(n, len(names)) for n in self.operations]
        return {
            "names": list(names),
            "operations": operations,
            "makes": {str(k): [list(x) for x in v] for k, v in self.makes.items()},
            "held": sorted(self.held),
            "recorded": {str(k): list(v) for k, v in self.recorded.items()},
            "random": {str(k): v for k, v in self.random.items()},
            "saves": list(self.saves),
            "steps": [
                [s.save, [list(r) for r in s.runs], [list(r) for r in s.releases], list(s.after)] for s in self.steps
            ],
            "wanted": "".join("01"[w] for w in self.wanted),
            "swaps": {str(k): [s.offset, s.bytes, s.begin, s.gone_by, s.tier] for k, s in self.swaps.items()},
            "writes": {str(k): list(v) for k, v in self.writes.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Script:
        """Inverse of `to_json`; checks that the numbers refer to something.

        Raises:
            ValueError: numbers out of range.
        """
        operations = tuple(data["names"][i] for i in data["operations"])
        script = cls(
            operations,
            {int(k): tuple((int(a), int(b), int(c)) for a, b, c in v) for k, v in data["makes"].items()},
            frozenset(int(s) for s in data["held"]),
            {int(k): tuple(int(x) for x in v) for k, v in data["recorded"].items()},
            {int(k): int(v) for k, v in data["random"].items()},
            tuple(int(s) for s in data["saves"]),
            tuple(
                Step(
                    int(save),
                    tuple(tuple(int(x) for x in r) for r in runs),
                    tuple(tuple(int(x) for x in r) for r in releases),
                    tuple(int(x) for x in after),
                )
                for save, runs, releases, after in data["steps"]
            ),
            tuple(w == "1" for w in data["wanted"]),
            {int(k): Swap(int(a), int(b), int(c), int(d), tier) for k, (a, b, c, d, tier) in data["swaps"].items()},
            {int(k): tuple(int(x) for x in v) for k, v in data["writes"].items()},
        )
        count = len(operations)
        if len(script.wanted) != count:
            raise ValueError(f"{len(script.wanted)} operations are told whether they need gradients, of {count}")
        known = {s for made in script.makes.values() for _, s, _ in made}
        for operation in (*script.makes, *script.recorded, *script.random, *script.writes):
            if not 0 <= operation < count:
                raise ValueError(f"operation {operation} of {count}")
        for step in script.steps:
            if not 0 <= step.save < len(script.saves) or script.saves[step.save] == KEPT:
                raise ValueError(f"step for save {step.save}, which autograd keeps or does not exist")
            if len(step.releases) != len(step.runs):
                raise ValueError(f"{len(step.releases)} releases for {len(step.runs)} runs at save {step.save}")
            for run in step.runs:
                for operation in run:
                    if operation < 0 and (len(run) > 1 or ~operation not in script.swaps):
                        raise ValueError(f"storage {~operation} is to come back, but was not copied down")
                    if operation >= 0 and operation not in script.recorded:
                        raise ValueError(f"operation {operation} is to run again but is not recorded")
        answered = {s for s in script.saves if s != KEPT}
        read = {s for places in script.recorded.values() for s in places if s >= 0}
        written = {s for places in script.writes.values() for s in places if s >= 0}
        for storage in (*script.held, *answered, *read, *written, *script.swaps):
            if storage not in known:
                raise ValueError(f"storage {storage} is made by no operation")
        if answered and not script.steps:
            raise ValueError("saves are answered for, but no step answers")
        script._check_swaps()
        rebuilt = {
            s for step in script.steps for run in step.runs for op in run for _, s, _ in script.makes.get(op, ())
        }
        rebuilt |= {~op for step in script.steps for run in step.runs for op in run if op < 0}
        unheld = (read | {script.saves[step.save] for step in script.steps}) - rebuilt - script.held
        if unheld:
            raise ValueError(
                f"storage {min(unheld)} is read by a rerun or by backward, but neither held nor made again"
            )
        if not all(isinstance(name, str) for name in script.operations):
            raise ValueError("operation names are words")
        return script

    def _check_swaps(self) -> None:
        """Raise ValueError where places on a lower tier overlap, or a storage goes before it is made, or to no tier there is."""
        made_by = {s: operation for operation, made in self.makes.items() for _, s, _ in made}
        ends = dict.fromkeys(TIERS, 0)
        for storage, swap in sorted(self.swaps.items(), key=lambda item: item[1].offset):
            if swap.tier not in ends:
                raise ValueError(f"storage {storage} is to go to {swap.tier!r}, tiers are {' and '.join(TIERS)}")
            if swap.offset < ends[swap.tier] or swap.bytes < 0:
                raise ValueError(f"the place of storage {storage} on the lower tier overlaps another")
            ends[swap.tier] = swap.offset + swap.bytes
            if not made_by[storage] <= swap.begin <= swap.gone_by < len(self.operations):
                raise ValueError(f"storage {storage} cannot be copied down by operation {swap.gone_by}")


@dataclass(frozen=True, slots=True)
class TierUse:
    """What is swapped to one tier, and what that takes.

    Attributes:
        tier: which, "host" or "disk".
        bytes: that lie there when forward ends.
        copy_seconds: the link to it is busy with them in a step.
        exposed_seconds: of these, computing waits.
    """

    tier: str
    bytes: int
    copy_seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float:
        """The part of the copying that hides behind computing."""
        return 1 - self.exposed_seconds / self.copy_seconds if self.copy_seconds else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step will take.

    Attributes:
        peak_bytes: largest number of bytes held at once, of the budget's device.
        plain_peak_bytes: the same without a plan.
        step_seconds, plain_step_seconds: one optimizer step, with and without the plan.
        bound_seconds: no plan in these bytes (with these micro-batches) takes less.
        seconds_are: "measured" (operation by operation, on this device) or "estimated" (from a device's data sheet).
        peak_phase, peak_module, peak_operation: where the peak is.
        categories_at_peak: bytes by category there.
        curve: bytes by category at chosen moments of the step, under the plan; `moments` are their positions, `plain_curve` the plain totals there.
        copy_seconds: links to lower tiers are busy in a step, each for itself.
        exposed_seconds: of these, computing waits; the rest hides behind it.
        tiers: of what is swapped, by tier.
        varies_bytes: where random numbers decide sizes, how far apart the peaks of the draws seen lie: `peak_bytes` is the largest of them, and as much
            is kept free above it.
    """

    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    plain_step_seconds: float
    bound_seconds: float
    seconds_are: str
    peak_phase: str = ""
    peak_module: str = ""
    peak_operation: str = ""
    categories_at_peak: Mapping[str, int] = field(default_factory=dict)
    moments: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    curve: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plain_curve: tuple[int, ...] = ()
    copy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    varies_bytes: int = 0
    tiers: tuple[TierUse, ...] = ()

    @property
    def slowdown(self) -> float:
        """Seconds of a step against plain."""
        return self.step_seconds / self.plain_step_seconds if self.plain_step_seconds else 1.0

    @property
    def hidden_share(self) -> float:
        """Of the seconds of copying, those that hide behind computing; 1 where nothing is copied."""
        return 1 - self.exposed_seconds / self.copy_seconds if self.copy_seconds else 1.0


@dataclass(frozen=True, slots=True)
class ModuleSaving:
    """What a plan does in one module.

    Attributes:
        module: path.
        kept_bytes, dropped_bytes: of what autograd saves there.
        rerun_seconds: spent running operations of this module again, per micro-batch.
        swapped_bytes: copied to lower tiers and back.
    """

    module: str
    kept_bytes: int
    dropped_bytes: int
    rerun_seconds: float
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """A module or parameter that is not trained.

    Attributes:
        path: from the model's root.
        parameters: numbers in it.
        bytes: of these parameters.
    """

    path: str
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Saving:
    """What one technique takes off the peak of a step in which nothing is dropped, beside what is commonly said of it, and what it costs.

    Attributes:
        technique: its name, as in `allow=` or as the argument that asks for it.
        claimed_bytes: by the formula that is usually given for it.
        predicted_bytes: the peak without it less the peak with it, all other techniques of the plan used in both.
        claim: the formula, in words.
        seconds: that a step takes longer for it, before anything is dropped; negative where it is faster.
    """

    technique: str
    claimed_bytes: int
    predicted_bytes: int
    claim: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """How to train one model on one shape of batch inside a number of bytes.

    Attributes:
        budget_bytes: what the user allowed.
        choices: how a step is run.
        script: what the engine follows, operation by operation.
        prediction: what a step will take.
        signature: the batch it is for (nothing in a run may be larger).
        model: identity of the model's structure.
        device: what it was made for.
        torch_version: with which it was made.
        clip_norm: gradient clipping that the prediction includes.
        by_module: kept, dropped and rerun by module.
        turned_down: choices weighed and not taken, each with its reason.
        notes: what the reader should know.
        source: how the bytes were captured.
        changed_buffers: names of buffers that forward writes; the engine keeps copies of them for a step that fails.
        savings: of the techniques it uses, each taken away by itself.
        frozen: what is not trained because the user said so.
        runtime: not part of the value: what `plan()` was given and `apply()` needs again (loss function, optimizer factory).
    """

    budget_bytes: int
    choices: Choices
    script: Script
    prediction: Prediction
    signature: str
    model: str
    device: str
    torch_version: str
    clip_norm: float | None = None
    by_module: tuple[ModuleSaving, ...] = ()
    turned_down: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = "fake"
    changed_buffers: tuple[str, ...] = ()
    savings: tuple[Saving, ...] = ()
    frozen: tuple[FrozenPart, ...] = ()
    format_version: int = FORMAT_VERSION
    runtime: Any = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """How far, at most, this plan is from the fastest one that fits, as a part of the step."""
        if self.prediction.step_seconds <= 0:
            return 0.0
        return max(0.0, (self.prediction.step_seconds - self.prediction.bound_seconds) / self.prediction.step_seconds)

    def summary(self) -> dict[str, Any]:
        """What a program wants to know of it: plain data, few."""
        p = self.prediction
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": p.peak_bytes,
            "plain_peak_bytes": p.plain_peak_bytes,
            "step_seconds": p.step_seconds,
            "plain_step_seconds": p.plain_step_seconds,
            "seconds_are": p.seconds_are,
            "gap": self.gap,
            "micro_batches": self.choices.micro_batches,
            "reruns": self.script.reruns,
            "peak_module": p.peak_module,
            "peak_phase": p.peak_phase,
            "notes": list(self.notes),
            "turned_down": list(self.turned_down),
        }

    def explain(self) -> str:
        """The plan in words, for a person."""
        p = self.prediction
        reference = "plain PyTorch"
        if self.choices.precision != "full":
            scaler = " and gradient scaler" if self.choices.precision == "fp16" else ""
            reference = f"PyTorch's own {self.choices.precision} autocast{scaler}"
        if self.choices.frozen:
            reference += " with these parts frozen"
        exact = f"the same numbers as {reference}, bit for bit"
        if self.choices.micro_batches > 1 or self.choices.loss_chunks > 1:
            rounding = "" if self.choices.precision != "full" else " (relative difference below 1e-5 in fp32)"
            exact = f"the same step as {reference} up to the order of additions{rounding}"
        lines = [
            (
                f"Fits: {format_bytes(p.peak_bytes)} of {format_bytes(self.budget_bytes)} at the peak; plainly it would take "
                f"{format_bytes(p.plain_peak_bytes)} ({100 * p.peak_bytes / p.plain_peak_bytes:.1f} %)."
            ),
            (
                f"A step takes {format_seconds(p.step_seconds)} instead of {format_seconds(p.plain_step_seconds)} "
                f"({100 * (p.slowdown - 1):+.1f} %, {p.seconds_are}); no plan in these bytes with as many micro-batches "
                f"can be more than {100 * self.gap:.1f} % faster."
            ),
            f"Numbers: {exact}.",
            f"Peak: in {p.peak_phase}, {p.peak_module or 'outside any module'} ({p.peak_operation}).",
        ]
        share = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(n)}"
            for name, n in sorted(p.categories_at_peak.items(), key=lambda x: -x[1])
            if n
        )
        if share:
            lines.append(f"There: {share}.")
        if self.choices.micro_batches > 1:
            lines.append(f"Micro-batches: {self.choices.micro_batches}, losses weighted by {self.choices.weights}.")
        if self.script.plain:
            lines.append("Nothing is dropped: the step runs as PyTorch runs it.")
        else:
            dropped = sum(m.dropped_bytes for m in self.by_module)
            kept = sum(m.kept_bytes for m in self.by_module)
            lines.append(
                f"Of what backward needs, {format_bytes(kept)} are kept and {format_bytes(dropped)} dropped and rebuilt "
                f"({self.script.reruns} operation{'s' if self.script.reruns != 1 else ''} run again"
                f"{' per micro-batch' if self.choices.micro_batches > 1 else ''}). Most is dropped in:"
            )
            for m in sorted(self.by_module, key=lambda m: -m.dropped_bytes)[:8]:
                if m.dropped_bytes:
                    lines.append(
                        f"  {m.module or '(model)'}: {format_bytes(m.dropped_bytes)} dropped, {format_bytes(m.kept_bytes)} kept, "
                        f"{format_seconds(m.rerun_seconds)} again"
                    )
        if self.script.swaps:
            swapped = format_bytes(sum(s.bytes for s in self.script.swaps.values()))
            where = "the tier below" if len(p.tiers) < 2 else "two tiers below"
            lines.append(f"Swapped: {swapped} go to {where} and come back.")
        if p.copy_seconds:
            where = "the tier below" if len(p.tiers) < 2 else "the tiers below"
            lines.append(
                f"Copying to and from {where}: {format_seconds(p.copy_seconds)} a step, of which {100 * p.hidden_share:.0f} % hide behind computing."
            )
        if len(p.tiers) > 1:
            lines += [
                f"  the {tier.tier}: {format_bytes(tier.bytes)}, {format_seconds(tier.copy_seconds)} a step, of which {100 * tier.hidden_share:.0f} % hide"
                for tier in p.tiers
            ]
        if self.frozen:
            count = sum(part.parameters for part in self.frozen)
            held = format_bytes(sum(part.bytes for part in self.frozen))
            paths = ", ".join(part.path for part in self.frozen[:MOST_PATHS])
            more = f" and {len(self.frozen) - MOST_PATHS} more" if len(self.frozen) > MOST_PATHS else ""
            lines.append(f"Frozen: {count:,} parameters ({held}) in {paths}{more}.")
        lines += [
            f"{saving.technique}: takes {format_bytes(saving.predicted_bytes)} off the peak before anything is dropped "
            f"({saving.claim or 'its formula'}: {format_bytes(saving.claimed_bytes)}), and {'adds' if saving.seconds >= 0 else 'takes off'} "
            f"{format_seconds(abs(saving.seconds))} a step."
            for saving in self.savings
        ]
        lines += [f"Turned down: {text}" for text in self.turned_down]
        lines += [f"Note: {text}" for text in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON of everything but `runtime`."""
        return {
            "memfit": "plan",
            "format_version": self.format_version,
            "budget_bytes": self.budget_bytes,
            "choices": asdict(self.choices),
            "prediction": asdict(self.prediction),
            "signature": self.signature,
            "model": self.model,
            "device": self.device,
            "torch_version": self.torch_version,
            "clip_norm": self.clip_norm,
            "by_module": [asdict(m) for m in self.by_module],
            "turned_down": list(self.turned_down),
            "notes": list(self.notes),
            "source": self.source,
            "changed_buffers": list(self.changed_buffers),
            "savings": [asdict(s) for s in self.savings],
            "frozen": [asdict(f) for f in self.frozen],
            "script": self.script.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Inverse of `to_json`.

        Raises:
            PlanFileError: not a plan, another format version, or edited into something that cannot be followed.
        """
        if not isinstance(data, Mapping) or data.get("memfit") != "plan":
            raise PlanFileError(
                "this is not a memfit plan: make one with memfit.plan(...).save(path) or `memfit plan --save path`"
            )
        if data.get("format_version") != FORMAT_VERSION:
            raise PlanFileError(
                f"this plan has format {data.get('format_version')!r} and this memfit reads {FORMAT_VERSION}: plan again"
            )
        try:
            prediction = dict(data["prediction"])
            for name in ("moments", "phases", "plain_curve"):
                prediction[name] = tuple(prediction[name])
            prediction["tiers"] = tuple(TierUse(**use) for use in prediction["tiers"])
            prediction["curve"] = {str(k): tuple(v) for k, v in prediction["curve"].items()}
            choices = Choices.from_json(data["choices"])
            budget = data["budget_bytes"]
            if not isinstance(budget, int) or budget <= 0:
                raise ValueError(f"budget_bytes is {budget!r}")
            clip_norm = data["clip_norm"]
            if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
                raise ValueError(f"clip_norm is {clip_norm!r}")
            plan = cls(
                budget,
                choices,
                Script.from_json(data["script"]),
                Prediction(**prediction),
                str(data["signature"]),
                str(data["model"]),
                str(data["device"]),
                str(data["torch_version"]),
                data["clip_norm"],
                tuple(ModuleSaving(**m) for m in data["by_module"]),
                tuple(data["turned_down"]),
                tuple(data["notes"]),
                str(data["source"]),
                tuple(str(name) for name in data["changed_buffers"]),
                tuple(Saving(**s) for s in data["savings"]),
                tuple(FrozenPart(**f) for f in data["frozen"]),
            )
            _check_prediction(plan.prediction)
            if plan.prediction.peak_bytes <= 0 or plan.prediction.peak_bytes > budget:
                raise ValueError(f"predicted peak {plan.prediction.peak_bytes} does not fit the budget {budget}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise PlanFileError(
                f"this plan file cannot be followed ({error}); if it was edited by hand, plan again"
            ) from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanFileError: the file is not there, not JSON, or not a plan that can be followed.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanFileError(f"cannot read the plan {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise PlanFileError(f"{path} is not JSON ({error}): plan again") from error
        return cls.from_json(data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_prediction(prediction: Prediction) -> None:
    for name in ("peak_bytes", "plain_peak_bytes"):
        value = getattr(prediction, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name} is {value!r}")
    if not isinstance(prediction.varies_bytes, int) or prediction.varies_bytes < 0:
        raise ValueError(f"varies_bytes is {prediction.varies_bytes!r}")
    for name in ("step_seconds", "plain_step_seconds", "bound_seconds", "copy_seconds", "exposed_seconds"):
        value = getattr(prediction, name)
        if not _is_number(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    for use in prediction.tiers:
        if use.tier not in TIERS or not all(_is_number(n) for n in (use.bytes, use.copy_seconds, use.exposed_seconds)):
            raise ValueError(f"{use!r} is among its tiers")
    if not isinstance(prediction.categories_at_peak, Mapping) or not all(
        _is_number(n) for n in prediction.categories_at_peak.values()
    ):
        raise ValueError(f"categories_at_peak is {prediction.categories_at_peak!r}")
