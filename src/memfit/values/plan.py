"""A plan: what is chosen, what each step does about each saved storage, what is predicted, what was rejected and why. A value."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from memfit.errors import PlanFileError
from memfit.techniques.choices import Choices
from memfit.techniques.freezing import FrozenPart
from memfit.techniques.registry import BY_NAME
from memfit.units import format_bytes, format_seconds
from memfit.values.pipeline import PipelinePlan
from memfit.values.prediction import (
    ModuleSaving,
    Prediction,
    RankPrediction,
    Saving,
    TierUse,
    check_prediction,
    is_number,
)
from memfit.values.script import Script

FORMAT_VERSION: Final = 11
DEVICE_KINDS: Final = ("cuda", "cpu")
MOST_PATHS: Final = 8  # of what is frozen or called again, named in a sentence; the plan has them all


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
        device: what it was made for: a GPU's or a processor's name.
        device_kind: "cuda" or "cpu".
        torch_version: with which it was made.
        clip_norm: gradient clipping that the prediction includes.
        by_module: kept, dropped and recomputed by module.
        rejected: choices weighed and not taken, each with its reason.
        notes: what the reader should know.
        source: how the bytes were captured.
        changed_buffers: names of buffers that forward writes; the engine keeps copies of them for a step that fails.
        savings: of the techniques it uses, each taken away by itself.
        frozen: what is not trained because the user said so.
        undoable: what forward changes besides buffers, generators and plain attributes is nothing that was there before it, on any path that is known: a
            forward that leaves the plan can be ended, and its step begun anew.
        pipeline: stages for the ranks of pipelines, each with a script of its own; None where every rank runs the whole model.
        differs: in what a step differs from plain PyTorch's besides the order of additions; "" where in nothing.
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
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = "fake"
    changed_buffers: tuple[str, ...] = ()
    savings: tuple[Saving, ...] = ()
    frozen: tuple[FrozenPart, ...] = ()
    device_kind: str = "cpu"
    undoable: bool = False
    pipeline: PipelinePlan | None = None
    differs: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def gap(self) -> float:
        """How far, at most, this plan is from the fastest one that fits, as a part of the step."""
        if self.prediction.step_seconds <= 0:
            return 0.0
        return max(0.0, (self.prediction.step_seconds - self.prediction.bound_seconds) / self.prediction.step_seconds)

    def summary(self) -> dict[str, Any]:
        """The main figures as plain data, for programs."""
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
            "recomputations": self.script.recomputations,
            "peak_module": p.peak_module,
            "peak_phase": p.peak_phase,
            **({"ranks": [asdict(rank) for rank in p.ranks]} if p.ranks else {}),
            "notes": list(self.notes),
            "rejected": list(self.rejected),
        }

    def __repr__(self) -> str:
        """In one line: all of its fields are as long as the step has operations."""
        fits = f"{format_bytes(self.prediction.peak_bytes)} of {format_bytes(self.budget_bytes)} at the peak"
        parts = self.choices.micro_batches
        return f"<Plan: {fits}, {parts} micro-batch{'es' if parts > 1 else ''}; print(plan) tells more>"

    def __str__(self) -> str:
        """As `explain` says it."""
        return self.explain()

    def explain(self) -> str:
        """The plan in words, for a person; `print(plan)` prints it, too."""
        p = self.prediction
        used = [(BY_NAME[name], setting) for name, setting in self.choices.techniques]
        changed = [technique.results(setting) for technique, setting in used]
        reference = " and ".join(text for text in changed if text) or "plain PyTorch"
        if self.choices.frozen:
            reference += " with these parts frozen"
        exact = f"the same numbers as {reference}, bit for bit"
        if self.choices.micro_batches > 1 or any(technique.reorders for technique, _ in used):
            rounding = "" if self.choices.precision != "full" else " (relative difference below 1e-5 in fp32)"
            besides = f", but that {self.differs}" if self.differs else rounding
            exact = f"the same step as {reference} up to the order of additions{besides}"
        longer = ""
        as_plain = self.script.plain and self.choices.micro_batches == 1 and not used
        if as_plain and not p.ranks and p.step_seconds > p.plain_step_seconds:
            longer = " Nothing is dropped; the difference is the time that memfit takes so that a step that fails can be undone."
        lines = [
            (
                f"Fits: {format_bytes(p.peak_bytes)} of {format_bytes(self.budget_bytes)} at the peak"
                f"{f' of the fullest of {len(p.ranks)} devices' if p.ranks else ''}, "
                f"{100 * p.peak_bytes / p.plain_peak_bytes:.1f} % of the {format_bytes(p.plain_peak_bytes)} that "
                f"{f'the step takes with {p.plain_with} and nothing dropped' if p.plain_with else 'plain PyTorch would take'}."
            ),
            *([_of_ranks([format_bytes(rank.peak_bytes) for rank in p.ranks])] if p.ranks else []),
            *(
                f"Needs {format_bytes(use.all_bytes)} of {in_places([use.tier])} besides{' on each device' if p.ranks else ''}: {use.contents}."
                for use in p.tiers
                if use.all_bytes
            ),
            (
                f"A step takes {format_seconds(p.step_seconds)} instead of {format_seconds(p.plain_step_seconds)} "
                f"({100 * (p.slowdown - 1):+.1f} %, {p.seconds_are}); no plan in these bytes with as many micro-batches "
                f"{f'can be more than {100 * self.gap:.1f} % faster' if self.gap > 0 else 'is faster'}.{longer}"
            ),
            f"Results: {exact}.",
            f"Peak: in {p.peak_phase}, {p.peak_module or 'outside any module'} ({p.peak_operation}).",
        ]
        share = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(n)}"
            for name, n in sorted(p.categories_at_peak.items(), key=lambda x: -x[1])
            if n
        )
        if share:
            lines.append(f"At the peak: {share}.")
        if self.choices.micro_batches > 1:
            lines.append(
                f"Micro-batches: {self.choices.micro_batches}, losses weighted by {self.choices.weights_in_words}."
            )
        if self.pipeline is not None:
            waiting = ", ".join(f"{n} {100 * rank.waiting:.0f} %" for n, rank in enumerate(p.ranks))
            lines += ["Each rank has a stage:", *self.pipeline.in_words()]
            lines.append(f"Of the passes of all micro-batches each of the ranks waits for others: {waiting}.")
        elif self.script.plain:
            alone = not self.choices.techniques and self.choices.micro_batches == 1
            lines.append(
                "Nothing is dropped: the step runs as PyTorch runs it."
                if alone
                else "Nothing that backward needs is dropped and recomputed, and no activations are offloaded."
            )
        else:
            dropped = sum(m.dropped_bytes for m in self.by_module)
            kept = sum(m.kept_bytes for m in self.by_module)
            lines.append(
                f"Of what backward needs, {format_bytes(kept)} are kept and {format_bytes(dropped)} dropped and rebuilt "
                f"({self.script.recomputations} operation{'s' if self.script.recomputations != 1 else ''} run again"
                f"{' per micro-batch' if self.choices.micro_batches > 1 else ''}{self._called_again()}). Most is dropped in:"
            )
            for m in sorted(self.by_module, key=lambda m: -m.dropped_bytes)[:8]:
                if m.dropped_bytes:
                    lines.append(
                        f"  {m.module or '(model)'}: {format_bytes(m.dropped_bytes)} dropped, {format_bytes(m.kept_bytes)} kept, "
                        f"{format_seconds(m.recompute_seconds)} of recomputation"
                    )
        if self.script.repeated_calls:
            lines.append(f"Called again in backward, as by torch.utils.checkpoint: {calls_again(self.script)}.")
        if self.script.swaps:
            offloaded = format_bytes(sum(s.bytes for s in self.script.swaps.values()))
            where = in_places({s.tier for s in self.script.swaps.values()})
            lines.append(f"Offloaded: {offloaded} of activations, to {where} in forward and back in backward.")
        if p.copy_seconds:
            lines.append(
                f"Copying to and from {self._copied_to()}: {format_seconds(p.copy_seconds)} a step, of which "
                f"{100 * p.hidden_share:.0f} % overlap with computing."
            )
        if len(p.tiers) > 1:
            lines += [
                f"  {in_places([use.tier])}: {format_bytes(use.all_bytes)}, {format_seconds(use.copy_seconds)} a step, of which "
                f"{100 * use.hidden_share:.0f} % overlap"
                for use in p.tiers
            ]
        if self.frozen:
            count = sum(part.parameters for part in self.frozen)
            held = format_bytes(sum(part.bytes for part in self.frozen))
            paths = ", ".join(part.path for part in self.frozen[:MOST_PATHS])
            more = f" and {len(self.frozen) - MOST_PATHS} more" if len(self.frozen) > MOST_PATHS else ""
            lines.append(f"Frozen: {count:,} parameters ({held}) in {paths}{more}.")
        lines += [
            f"{saving.technique}: {_off_the_peak(saving.predicted_bytes)} before anything is dropped "
            f"(the usual estimate, {saving.claim or 'its formula'}, is {format_bytes(saving.claimed_bytes)}), and "
            f"{'adds' if saving.seconds >= 0 else 'takes off'} {format_seconds(abs(saving.seconds))} a step."
            for saving in self.savings
        ]
        lines += [f"Rejected: {text}" for text in self.rejected]
        lines += [f"Note: {text}" for text in self.notes]
        return "\n".join(lines)

    def _called_again(self) -> str:
        """How many calls of modules the operations that run again are, where modules are called again."""
        number = self.script.whole_calls
        return f", in {number} whole call{'s' if number > 1 else ''} of modules" if number else ""

    def _copied_to(self) -> str:
        """The lower tiers that a step copies to and from, in words."""
        return in_places({use.tier for use in self.prediction.tiers})

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON."""
        return {
            "memfit": "plan",
            "format_version": self.format_version,
            "budget_bytes": self.budget_bytes,
            "choices": self.choices.to_json(),
            "prediction": asdict(self.prediction),
            "signature": self.signature,
            "model": self.model,
            "device": self.device,
            "device_kind": self.device_kind,
            "torch_version": self.torch_version,
            "clip_norm": self.clip_norm,
            "by_module": [asdict(m) for m in self.by_module],
            "rejected": list(self.rejected),
            "notes": list(self.notes),
            "source": self.source,
            "changed_buffers": list(self.changed_buffers),
            "savings": [asdict(s) for s in self.savings],
            "frozen": [asdict(f) for f in self.frozen],
            "undoable": self.undoable,
            "differs": self.differs,
            "script": self.script.to_json(),
            "pipeline": None if self.pipeline is None else self.pipeline.to_json(),
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
            prediction["ranks"] = tuple(RankPrediction(**rank) for rank in prediction["ranks"])
            prediction["curve"] = {str(k): tuple(v) for k, v in prediction["curve"].items()}
            choices = Choices.from_json(data["choices"])
            budget = data["budget_bytes"]
            if not isinstance(budget, int) or budget <= 0:
                raise ValueError(f"budget_bytes is {budget!r}")
            clip_norm = data["clip_norm"]
            if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
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
                tuple(data["rejected"]),
                tuple(data["notes"]),
                str(data["source"]),
                tuple(str(name) for name in data["changed_buffers"]),
                tuple(Saving(**s) for s in data["savings"]),
                tuple(FrozenPart(**f) for f in data["frozen"]),
                str(data["device_kind"]),
                bool(data.get("undoable", False)),
                None if data.get("pipeline") is None else PipelinePlan.from_json(data["pipeline"]),
                str(data.get("differs", "")),
            )
            if plan.pipeline is not None and len(plan.prediction.ranks) != plan.pipeline.ranks:
                raise ValueError(
                    f"{len(plan.prediction.ranks)} ranks are predicted, and its stages are for {plan.pipeline.ranks}"
                )
            if plan.device_kind not in DEVICE_KINDS:
                raise ValueError(f"device_kind is {plan.device_kind!r}")
            check_prediction(plan.prediction)
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


def in_places(tiers: Collection[str]) -> str:
    """Lower tiers in words: "host memory", "disk", "host memory and disk"."""
    return " and ".join({"host": "host memory"}.get(tier, tier) for tier in sorted(tiers, reverse=True))


def calls_again(script: Script) -> str:
    """The modules that are called again, in the order of forward; those of one row together. Of many rows the first."""
    rows = script.repeated_calls
    more = f" and {len(rows) - MOST_PATHS} more" if len(rows) > MOST_PATHS else ""
    return ", ".join(row.where for row in rows[:MOST_PATHS]) + more


def _off_the_peak(saved_bytes: int) -> str:
    """What a technique does to the peak."""
    return (
        f"takes {format_bytes(saved_bytes)} off the peak"
        if saved_bytes >= 0
        else f"adds {format_bytes(-saved_bytes)} to the peak"
    )


def _of_ranks(peaks: Sequence[str]) -> str:
    """The peak of each rank; of neighbours that are alike, once."""
    numbers = range(len(peaks))
    rows = [(peak, list(ranks)) for peak, ranks in groupby(numbers, key=lambda rank: peaks[rank])]
    if len(rows) == 1:
        return f"At its peak each of the {len(peaks)} ranks holds {peaks[0]}."
    told = [f"{peak} (rank {n[0]}{f' to {n[-1]}' if len(n) > 1 else ''})" for peak, n in rows]
    return f"At their peaks the ranks hold {', '.join(told)}."
