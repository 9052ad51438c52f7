"""Every number in every sentence of `explain()`, and of the error where nothing fits, is one of the plan's fields or follows from them.

The sentences stand here once more, as patterns with a gap for each number or name; what fills a gap is written anew from the fields. A sentence that is in
none of the patterns fails, so a new one gets its pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
import small
from memfit.errors import InfeasibleError
from memfit.techniques.registry import BY_NAME
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan, in_places
from memfit.values.prediction import Saving
from models import build_gpt
from models.outcome import plan_of_calls

pytestmark = pytest.mark.usefixtures("one_thread")

GAP = "\N{HORIZONTAL ELLIPSIS}"


def build() -> Any:
    torch.manual_seed(0)
    return build_gpt(layers=3, hidden=32, heads=2, batch=4, tokens=16, vocab=40)


def planned(budget: int = 1 << 40, share: float | None = None, **named: Any) -> Plan:
    """A plan; where a share is given, in so much of what lies between the smallest budget and the plain peak."""
    model, sample, loss_fn = build()
    fixed = {"micro_batches": 1, **named.pop("fixed", {})}
    plan = memfit.plan(model, sample, loss_fn, budget, small.adamw, fixed=fixed, **named)
    if share is None:
        return plan
    least = memfit.smallest_budget(plan)
    return memfit.replan(plan, int(least + share * (plan.prediction.plain_peak_bytes - least)))


PLANS: dict[str, Callable[[], Plan]] = {
    "plain": planned,
    "recompute": lambda: planned(share=0.6),
    "offload": lambda: planned(share=0.5, host_budget="1GiB", fixed={"streamed": "", "state_place": "device"}),
    "state elsewhere": lambda: planned(fixed={"state_place": "disk"}),
    "streamed": lambda: planned(fixed={"streamed": "blocks"}),
    "streamed and clipped": lambda: planned(fixed={"streamed": "blocks"}, clip_norm=1.0),
    "in backward": lambda: planned(fixed={"update": "in_backward"}),
    "8 bits": lambda: planned(fixed={"state_format": "8bit"}),
    "bf16": lambda: planned(share=0.7, fixed={"precision": "bf16"}),
    "bf16 parameters": lambda: planned(fixed={"parameters": "bf16"}),
    "frozen": lambda: planned(freeze=["token", "blocks.0"]),
    "micro-batches": lambda: planned(fixed={"micro_batches": 2}),
    "calls": lambda: plan_of_calls(planned(), 0, 2),
    "calls in a row": lambda: plan_of_calls(planned(), -1, 1),
    "elsewhere": lambda: planned(device="rtx4090", fixed={"state_place": "host"}),
}


def percent(part: float, digits: int = 1) -> str:
    return f"{100 * part:.{digits}f} %"


def places(plan: Plan) -> str:
    return in_places({use.tier for use in plan.prediction.tiers})


def fits(plan: Plan) -> list[str]:
    p = plan.prediction
    reference = (
        f"the step takes with {p.plain_with} and nothing dropped" if p.plain_with else "plain PyTorch would take"
    )
    return [
        format_bytes(p.peak_bytes),
        format_bytes(plan.budget_bytes),
        percent(p.peak_bytes / p.plain_peak_bytes),
        format_bytes(p.plain_peak_bytes),
        reference,
    ]


def step(plan: Plan) -> list[str]:
    p = plan.prediction
    slower = f"{100 * (p.step_seconds / p.plain_step_seconds - 1):+.1f} %, {p.seconds_are}"
    left = max(0.0, (p.step_seconds - p.bound_seconds) / p.step_seconds)
    at_best = f"can be more than {percent(left)}" if left else "is"
    return [format_seconds(p.step_seconds), format_seconds(p.plain_step_seconds), slower, at_best]


def kept(plan: Plan) -> list[str]:
    plural = "" if plan.script.recomputations == 1 else "s"
    each = " per micro-batch" if plan.choices.micro_batches > 1 else ""
    return [
        format_bytes(sum(m.kept_bytes for m in plan.by_module)),
        format_bytes(sum(m.dropped_bytes for m in plan.by_module)),
        f"{plan.script.recomputations} operation{plural} run again{each}{in_calls(plan)}",
    ]


def in_calls(plan: Plan) -> str:
    number = sum(len(row.modules) for row in plan.script.repeated_calls)
    return f", in {number} whole call{'s' if number > 1 else ''} of modules" if number else ""


def called_again(plan: Plan) -> list[str]:
    rows = [[path for path, _ in row.modules] for row in plan.script.repeated_calls]
    return [", ".join(row[0] if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in rows)]


def copying(plan: Plan) -> list[str]:
    p = plan.prediction
    return [places(plan), format_seconds(p.copy_seconds), percent(1 - p.exposed_seconds / p.copy_seconds, 0)]


def frozen(plan: Plan) -> list[str]:
    parameters, held = sum(f.parameters for f in plan.frozen), sum(f.bytes for f in plan.frozen)
    return [f"{parameters:,}", format_bytes(held), ", ".join(f.path for f in plan.frozen)]


def offloaded(plan: Plan) -> list[str]:
    swaps = plan.script.swaps.values()
    return [format_bytes(sum(swap.bytes for swap in swaps)), in_places({swap.tier for swap in swaps})]


# Sentences of which a plan has one.
ONCE: dict[str, Callable[[Plan], list[str]]] = {
    f"Fits: {GAP} of {GAP} at the peak, {GAP} of the {GAP} that {GAP}.": fits,
    (
        f"A step takes {GAP} instead of {GAP} ({GAP}); no plan in these bytes with as many micro-batches {GAP} faster."
    ): step,
    f"Peak: in {GAP}, {GAP} ({GAP}).": lambda plan: [
        plan.prediction.peak_phase,
        plan.prediction.peak_module or "outside any module",
        plan.prediction.peak_operation,
    ],
    f"Micro-batches: {GAP}, losses weighted by {GAP}.": lambda plan: [
        str(plan.choices.micro_batches),
        weights_in_words(plan.choices.weights),
    ],
    f"Of what backward needs, {GAP} are kept and {GAP} dropped and rebuilt ({GAP}). Most is dropped in:": kept,
    f"Called again in backward, as by torch.utils.checkpoint: {GAP}.": called_again,
    f"Offloaded: {GAP} of activations, to {GAP} in forward and back in backward.": offloaded,
    f"Copying to and from {GAP}: {GAP} a step, of which {GAP} overlap with computing.": copying,
    f"Frozen: {GAP} parameters ({GAP}) in {GAP}.": frozen,
}


def listed(plan: Plan) -> set[str]:
    """Sentences of which a plan has as many as it has tiers, modules, techniques; and those without a number of its own."""
    p = plan.prediction
    lines = {
        f"Needs {format_bytes(use.all_bytes)} of {in_places([use.tier])} besides: {contents(use)}." for use in p.tiers
    }
    lines |= {
        f"  {m.module or '(model)'}: {format_bytes(m.dropped_bytes)} dropped, {format_bytes(m.kept_bytes)} kept, {format_seconds(m.recompute_seconds)} of "
        "recomputation"
        for m in plan.by_module
    }
    categories = sorted(p.categories_at_peak.items(), key=lambda item: -item[1])
    assert sum(size for _, size in categories) == p.peak_bytes
    lines.add(
        "At the peak: " + ", ".join(f"{n.replace('_', ' ')} {format_bytes(size)}" for n, size in categories) + "."
    )
    for saving in plan.savings:
        saved, seconds = saving.predicted_bytes, saving.seconds
        effect = f"takes {format_bytes(saved)} off" if saved >= 0 else f"adds {format_bytes(-saved)} to"
        cost = f"adds {format_seconds(seconds)}" if seconds >= 0 else f"takes off {format_seconds(-seconds)}"
        lines.add(
            f"{saving.technique}: {effect} the peak before anything is dropped "
            f"(the usual estimate, {saving.claim}, is {format_bytes(saving.claimed_bytes)}), and {cost} a step."
        )
    lines.add("Nothing is dropped: the step runs as PyTorch runs it.")
    lines.add("Nothing that backward needs is dropped and recomputed, and no activations are offloaded.")
    return lines


def contents(use: Any) -> str:
    parts = {"layers": use.layer_bytes, "optimizer state": use.state_bytes, "activations": use.bytes}
    assert use.all_bytes == sum(parts.values())
    return ", ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)


def told(sentence: str, plan: Plan) -> bool:
    """Whether a sentence is one of the plan's, with its numbers in it."""
    for pattern, fields in ONCE.items():
        if sentence.startswith(pattern.partition(GAP)[0]):
            return sentence == filled(pattern, fields(plan))
    if sentence.startswith("Results: "):
        used = [BY_NAME[name].results(setting) for name, setting in plan.choices.techniques]
        numbers = re.findall(r"\d+(?:e-\d+)?", sentence)
        known = re.findall(r"\d+(?:e-\d+)?", " ".join(used))
        return set(numbers) <= {*known, "1e-5", "32"}
    return sentence in listed(plan) or sentence.startswith(("Rejected: ", "Note: "))


def weights_in_words(weights: str) -> str:
    kind, _, name = weights.partition(":")
    name = f"batch[{name}]" if name.isdigit() else name
    words = {
        "next_tokens": f"entries of {name}, from the second column on, that are not -100",
        "tokens": f"entries of {name} that are not -100",
        "filled": f"nonzero entries of {name}",
        "samples": "samples",
        "sum": "nothing, as the loss is a sum",
    }
    return words[kind]


def filled(pattern: str, texts: list[str]) -> str:
    parts = pattern.split(GAP)
    assert len(parts) == len(texts) + 1
    return "".join(part + text for part, text in zip(parts, [*texts, ""], strict=True))


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", PLANS)
def test_every_number_of_a_plan_is_a_field_of_it(name: str) -> None:
    plan = PLANS[name]()
    assert [sentence for sentence in plan.explain().splitlines() if not told(sentence, plan)] == []
    needs = [text for text in plan.rejected if "the smallest plan found needs " in text]
    smallest = [text.partition("the smallest plan found needs ")[2].partition(",")[0] for text in needs]
    assert all(budget_of(text) > plan.budget_bytes * 0.99 for text in smallest)


def budget_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


def test_patterns_notice_a_number_that_is_another() -> None:
    plan = planned(share=0.6)
    for changed in (
        replace(plan, budget_bytes=plan.budget_bytes * 2),
        replace(plan, prediction=replace(plan.prediction, plain_peak_bytes=plan.prediction.plain_peak_bytes * 2)),
        replace(plan, by_module=tuple(replace(m, kept_bytes=m.kept_bytes * 2) for m in plan.by_module)),
    ):
        assert [sentence for sentence in plan.explain().splitlines() if not told(sentence, changed)] != []


@pytest.mark.parametrize("saved", [970 << 20, 0, -(970 << 20)])
@pytest.mark.parametrize("seconds", [0.5, 0.0, -0.5])
def test_what_a_technique_does_is_told_with_its_direction(saved: int, seconds: float) -> None:
    plan = replace(planned(), savings=(Saving("a technique", 1 << 20, saved, "a claim", seconds),))
    (sentence,) = (text for text in plan.explain().splitlines() if text.startswith("a technique: "))
    assert told(sentence, plan)
    assert "-" not in sentence
    assert ("off the peak" in sentence) is (saved >= 0)


def test_what_lies_on_the_device_beside_the_model_is_told_where_it_is_much_of_what_is_needed() -> None:
    """On an absent H100 cuBLAS's workspaces; on a CPU what the loss holds."""
    model, sample, table = torch.nn.Linear(8, 8), torch.ones(4, 8), torch.zeros(1 << 20)

    def alone(m: torch.nn.Module, b: torch.Tensor) -> torch.Tensor:
        return m(b).square().mean()

    def with_table(m: torch.nn.Module, b: torch.Tensor) -> torch.Tensor:
        return alone(m, b) + table[0]

    for loss, device, beside in ((alone, "h100", 1 << 26), (with_table, None, table.nbytes), (alone, None, 0)):
        plan = memfit.plan(model, sample, loss, "1GiB", device=device, fixed={"micro_batches": 1}, host_budget=0)
        with pytest.raises(InfeasibleError) as caught:
            memfit.replan(plan, 64)
        assert caught.value.beside_bytes == beside
        told = f"{format_bytes(beside)} of it for what lies on the device beside the model"
        assert (told in str(caught.value)) == bool(beside)
    with pytest.raises(InfeasibleError) as of_several:
        memfit.plan(model, sample, alone, "64MiB", devices="2xh100", fixed={"micro_batches": 1}, host_budget=0)
    assert of_several.value.beside_bytes == 1 << 26
    assert f"of what each device needs, {format_bytes(1 << 26)} are for what lies on the device" in str(
        of_several.value
    )


def test_every_number_of_the_error_is_a_field_of_it() -> None:
    model, sample, loss_fn = build()
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, loss_fn, "10KiB", small.adamw, fixed={"micro_batches": 1})
    error = caught.value
    assert error.minimum_bytes is not None
    phase, _, operation = error.moment.partition(": ")
    head, _, rest = str(error).partition(". Ways out: ")
    assert head == (
        f"{format_bytes(error.budget_bytes)} is too little: the smallest plan found needs {format_bytes(error.minimum_bytes)} ({error.minimum_bytes} bytes), "
        f"set in {phase} by {error.module or 'an operation outside any module'} ({operation})"
    )
    for remedy in error.remedies:
        size = format_bytes(remedy.saved_bytes)
        size = f"{size} more" if remedy.kind == "budget" else f"at least {size} less"
        way, bound = ("slower", "at most ") if remedy.extra_seconds >= 0 else ("faster", "at least ")
        bound = "" if remedy.kind == "budget" else bound
        seconds = (
            f"{bound}{format_seconds(abs(remedy.extra_seconds))} a step {way}" if remedy.extra_seconds else "no slower"
        )
        cost = f"{size}, {seconds}"
        assert f"{remedy.text} ({cost})" in rest
    assert rest.endswith("Weighed: " + "; ".join(error.weighed))
    (budget,) = (remedy for remedy in error.remedies if remedy.kind == "budget")
    assert budget.saved_bytes == error.minimum_bytes - error.budget_bytes


def among_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    """A contrastive loss: a row is told from the others of its batch."""
    x, y = batch
    return nn.functional.cross_entropy(model(x) @ y.T, torch.arange(len(x)))


@pytest.mark.parametrize(
    ("layer", "loss_fn", "asked", "told"),
    [
        (nn.Dropout(0.1), small.squared_error, {"fixed": {"micro_batches": 1}}, "plain PyTorch, bit for bit."),
        (
            nn.Dropout(0.1),
            small.squared_error,
            {"fixed": {"micro_batches": 2}},
            "each micro-batch draws random numbers",
        ),
        (nn.Dropout(0.1), small.squared_error, {"devices": 2, "fixed": {"sharding": "data"}}, "each rank draws random"),
        (
            nn.ReLU(),
            among_rows,
            {"devices": 2, "fixed": {"sharding": "data"}},
            "each rank takes the loss of its own part",
        ),
        (
            nn.ReLU(),
            small.squared_error,
            {"devices": 2, "fixed": {"sharding": "data"}},
            "additions (relative difference",
        ),
    ],
    ids=["whole", "micro-batches", "ranks", "a loss of the whole batch", "nothing drawn"],
)
def test_in_what_results_differ_is_part_of_the_promise(
    layer: nn.Module, loss_fn: Any, asked: dict[str, Any], told: str
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.Linear(32, 32))
    plan = memfit.plan(model, small.rows(8), loss_fn, "1MiB", small.adamw, **asked)
    (results,) = (line for line in plan.explain().splitlines() if line.startswith("Results: "))
    assert told in results
    assert memfit.Plan.from_json(plan.to_json()) == plan


def test_progress_names_the_tier_that_the_plan_names() -> None:
    """State on the disk stands in for that in the host's memory, which is no tier of its own beside this CPU."""
    told: list[str] = []
    memfit.plan(
        torch.nn.Linear(8, 8),
        torch.ones(4, 8),
        lambda model, x: model(x).square().mean(),
        "1GiB",
        device="h100",
        fixed={"micro_batches": 1, "state_place": "host"},
        progress=lambda text, _: told.append(text),
    )
    captured = [each for each in told if "optimizer state on the" in each]
    assert captured
    assert all("on the host" in each for each in captured)
