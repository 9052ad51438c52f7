"""`memfit estimate`: what training a model would take on a GPU, from its configuration alone."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, Status
from memfit.cli.way_table import RECOMPUTED, table
from memfit.errors import BudgetError, ConfigError
from memfit.hardware.machine import KNOWN, known_machine, of_torch
from memfit.techniques.registry import BY_NAME
from memfit.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from memfit.estimating.estimate import Estimate
    from memfit.estimating.models import Named
    from memfit.estimating.several import SeveralEstimate

_SEVERAL = re.compile(r"\s*\d+\s*[x*]\s*\S")  # "4x4090"
_MACHINE_FILES = (".yaml", ".yml", ".json")
METHODS = ("full", "lora", "qlora")
TASKS = ("causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "multimodal-lm")


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "estimate",
        parents=[shared],
        help="say what training a model takes on a GPU, from its configuration alone",
        description=__doc__,
        epilog=f"GPUs: {', '.join(machine.name for machine in KNOWN)}; cuda for the one that is here",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a transformers model, its config.json, or python:package.module:function",
    )
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help='the GPU, which need not be here: "4090", "a100-80", "cuda"'
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="full: all weights; lora: adapters beside frozen 16-bit weights; qlora: beside 4-bit ones. Left out: the first that has room for its weights",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="samples of a step, on each of several GPUs (1)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a sample (1024, or what the model has positions for)"
    )
    parser.add_argument(
        "--longest", action="store_true", help="look for the longest samples that fit, too (takes longer)"
    )
    parser.add_argument(
        "--budget", default="90%", metavar="BYTES", help="what a step may take (90%% of the GPU's memory)"
    )
    parser.add_argument("--task", choices=TASKS, help="what the model learns; left out: what its configuration says")
    parser.add_argument(
        "--data", metavar="package.module:function", help="dataset for a python: model that does not take tokens"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Estimate, and report the result."""
    if _SEVERAL.match(arguments.gpu) or arguments.gpu.endswith(_MACHINE_FILES):
        return _on_several(arguments)
    if arguments.gpu.partition(":")[0] != "cuda":
        if of_torch(arguments.gpu):
            raise ConfigError(
                f'--gpu {arguments.gpu}: that is a device of torch, of which there is no data sheet: name a GPU, such as --gpu 4090 ("memfit estimate --help" '
                "lists them), or plan a run file for this computer with memfit plan"
            )
        known_machine(arguments.gpu)  # a name that is mistyped is refused before torch is imported, which takes seconds
    from memfit.estimating.estimate import estimate, gpu_of
    from memfit.estimating.models import named
    from memfit.train import progress

    machine = gpu_of(arguments.gpu)
    try:
        parse_bytes(arguments.budget, total_bytes=machine.memory_bytes)
    except BudgetError as error:
        raise ConfigError(f"--budget: {error}") from None
    display = progress.display()
    try:
        display.stage("reading the configuration", 0.0)
        model = named(arguments.model, arguments.task, arguments.data)
        length = _length(arguments, model)
        found = estimate(
            model,
            machine,
            method=arguments.method,
            batch=arguments.batch,
            length=length,
            budget=arguments.budget,
            longest=arguments.longest,
            progress=display.stage,
        )
    finally:
        display.close()
    status = Status.FITS if found.plan is not None else Status.DOES_NOT_FIT
    return Answer(
        {"verb": "estimate", **found.to_json()}, told(found, shutil.get_terminal_size((100, 24)).columns), status
    )


def _length(arguments: argparse.Namespace, model: Named) -> int:
    """Tokens of a sample, as asked for or as a model of so many positions takes them."""
    asked: int | None = arguments.length
    return min(1024, model.longest or 1024) if asked is None else asked


def _on_several(arguments: argparse.Namespace) -> Answer:
    from memfit.estimating.models import named
    from memfit.estimating.several import estimate_on_several
    from memfit.train import progress

    if arguments.longest:
        raise ConfigError(
            "--longest is of one GPU: name one, or ask for several lengths one after the other (--length)"
        )
    display = progress.display()
    try:
        display.stage("reading the configuration", 0.0)
        model = named(arguments.model, arguments.task, arguments.data)
        found = estimate_on_several(
            model, arguments.gpu, method=arguments.method, batch=arguments.batch, length=_length(arguments, model),
            budget=arguments.budget, progress=display.stage,
        )  # fmt: skip
    finally:
        display.close()
    status = Status.FITS if found.best is not None else Status.DOES_NOT_FIT
    text = told_of_several(found, shutil.get_terminal_size((100, 24)).columns)
    return Answer({"verb": "estimate", **found.to_json()}, text, status)


def told_of_several(found: SeveralEstimate, columns: int) -> str:
    """The answer for a person, wrapped to so many columns; table and Python are left as they are."""
    ranks, best = len(found.topology.devices), found.best
    trained = "" if found.trained == found.parameters else f", {_count(found.trained)} trained"
    each = f"a batch of {found.batch}" + (f" x {found.length} tokens" if found.length else "") + " on each GPU"
    headline = (
        f"{found.title}: {_count(found.parameters)} parameters{trained}; {found.method.name}: {found.method.title}; AdamW; on {ranks} "
        f"{found.topology.devices[0].name} with {format_bytes(found.topology.devices[0].memory_bytes)} each"
    )
    if best is None:
        verdict = (
            f"Does not fit: {each} needs {format_bytes(found.least.peak_bytes)} of each, {format_bytes(found.least.peak_bytes - found.budget_bytes)} more than "
            f"the {format_bytes(found.budget_bytes)} there are, shared out by {found.least.way} with {RECOMPUTED[found.least.recompute]} recomputed. Take more "
            "or larger GPUs, or fewer or shorter samples."
        )
        seconds = []
    else:
        verdict = (
            f"Fits: {each} takes {format_bytes(best.peak_bytes)} of {format_bytes(found.budget_bytes)} at the peak, shared out by {best.way} with "
            f"{RECOMPUTED[best.recompute]} recomputed, the fastest of these that fit."
        )
        tokens = best.samples * found.length
        rate = (
            f", {tokens / best.step_seconds:,.0f} to {tokens / best.overlapped_seconds:,.0f} tokens a second on all of them"
            if tokens
            else ""
        )
        pace = (
            f"A step takes {format_seconds(best.overlapped_seconds)} (collectives beside computing) to {format_seconds(best.step_seconds)} (one after the "
            f"other), {best.seconds_are}{rate}."
        )
        seconds = [pace]
    places = f"Host memory: {format_bytes(found.weights_bytes)} for each process while it reads the weights. Disk: {format_bytes(found.disk_bytes)} of weights."

    def wrapped(lines: list[str]) -> list[str]:
        return [textwrap.fill(line, max(20, columns), break_on_hyphens=False) for line in lines]

    notes = [f"Note: {note}." for note in found.notes]
    said = [
        *wrapped([headline, "", verdict, *seconds, ""]),
        *table(found.predictions, found.budget_bytes, max(20, columns)),
        "",
    ]
    said += wrapped([places, *notes])
    if best is not None:
        said += ["", f"To train so, write this into train.py and call {found.command}:", "", found.lines]
    return "\n".join(said)


def told(found: Estimate, columns: int) -> str:
    """The answer for a person, in lines of so many columns; the Python is left as it is."""
    said = [
        _headline(found),
        "",
        _verdict(found),
        *_seconds(found),
        *_techniques(found),
        *_sizes(found),
        _places(found),
    ]
    said += [f"Note: {note}." for note in found.notes]
    wrapped = [textwrap.fill(line, max(20, columns), break_on_hyphens=False) for line in said]
    if found.plan is None:
        return "\n".join(wrapped)
    return "\n".join(
        [
            *wrapped,
            "",
            "To train so (it runs as it stands, on random tokens until you put your batches in):",
            "",
            found.lines,
        ]
    )


def _headline(found: Estimate) -> str:
    trained = "" if found.trained == found.parameters else f", {_count(found.trained)} trained"
    return (
        f"{found.title}: {_count(found.parameters)} parameters{trained}; {found.method.name}: {found.method.title}; "
        f"AdamW; on {found.machine.name} with {format_bytes(found.machine.memory_bytes)}"
    )


def _verdict(found: Estimate) -> str:
    what = f"a batch of {found.batch}" + (f" x {found.length} tokens" if found.length else "")
    if found.plan is not None:
        return f"Fits: {what} takes {format_bytes(found.plan.prediction.peak_bytes)} of {format_bytes(found.budget_bytes)} at the peak."
    return (
        f"Does not fit: {what} needs {format_bytes(found.minimum_bytes)}, {format_bytes(found.minimum_bytes - found.budget_bytes)} more than the "
        f"{format_bytes(found.budget_bytes)} there are, with everything recomputed that can be."
    )


def _seconds(found: Estimate) -> list[str]:
    if found.plan is None:
        return []
    figures = found.plan.prediction
    tokens = f", {found.batch * found.length / figures.step_seconds:,.0f} tokens a second" if found.length else ""
    slower = (
        "" if figures.slowdown < 1.005 else f"; {100 * (figures.slowdown - 1):.0f} % more than with everything kept"
    )
    return [f"A step takes {format_seconds(figures.step_seconds)} ({figures.seconds_are}){tokens}{slower}."]


def _techniques(found: Estimate) -> list[str]:
    if found.plan is None:
        return []
    used = [BY_NAME[name].words(setting) for name, setting in found.plan.choices.techniques]
    dropped = sum(module.dropped_bytes for module in found.plan.by_module)
    if dropped:
        used.append(f"{format_bytes(dropped)} of activations recomputed")
    return [f"Techniques: {'; '.join(used) if used else 'none needed'}."]


def _sizes(found: Estimate) -> list[str]:
    said = []
    if found.largest_batch is not None:
        at = f" of {found.length} tokens" if found.length else ""
        size, more = found.largest_batch.size, " or more" if found.largest_batch.limited else ""
        said.append(
            f"Largest batch{at}: {f'{size}{more}, with everything recomputed that can be' if size else 'not even 1'}."
        )
    if found.largest_length is not None:
        more = " (all that the model has positions for)" if found.largest_length.limited else ""
        said.append(f"Longest samples in a batch of {found.batch}: {found.largest_length.size or 'none'} tokens{more}.")
    return said


def _places(found: Estimate) -> str:
    return (
        f"Host memory: {format_bytes(found.host_bytes)} while the weights are read. Disk: {format_bytes(found.disk_bytes)} of weights, and "
        f"{format_bytes(found.snapshot_bytes)} for each snapshot of what is trained."
    )


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
