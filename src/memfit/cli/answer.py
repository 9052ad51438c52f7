"""What a verb answers: for a program, for a person, and as an exit status."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memfit.errors import InfeasibleError, InputError, PlanFileError, Remedy, in_words

if TYPE_CHECKING:
    from memfit.train.config import Config

ITEM: Final = "  "  # before each line of a list


class Status(IntEnum):
    """Exit statuses: the answer to "does it fit?"."""

    FITS = 0
    DOES_NOT_FIT = 1
    COULD_NOT_TELL = 2
    BAD_INPUT = 3
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: for `--json`.
        text: for a person.
        status: exit status.
    """

    data: Mapping[str, Any]
    text: str
    status: int = Status.FITS


def status_of(error: BaseException) -> Status:
    """The exit status that an exception stands for."""
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED
    if isinstance(error, InfeasibleError):
        return Status.DOES_NOT_FIT
    # Not 1 for what nobody foresaw, as Python would have it: that would say "does not fit".
    return Status.BAD_INPUT if isinstance(error, InputError) else Status.COULD_NOT_TELL


def failure(error: BaseException) -> Answer:
    """The answer when a verb ended in an exception."""
    status = status_of(error)
    text = in_words(error)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    data: dict[str, Any] = {"error": type(error).__name__, "message": text, "exit_status": int(status)}
    if isinstance(error, InfeasibleError):
        data |= {
            "fits": False,
            "budget_bytes": error.budget_bytes,
            "minimum_bytes": error.minimum_bytes,
            "moment": error.moment,
            "module": error.module,
            "remedies": [remedy._asdict() for remedy in error.remedies],
            "settings": [told for remedy in error.remedies if (told := as_settings(remedy))],
        }
        text = _in_lines(error, text)
        if data["settings"]:
            text += ".\nOn the command line: " + ", or ".join(data["settings"])
    return Answer(data, text, status)


def _in_lines(error: InfeasibleError, text: str) -> str:
    """The message of an error that lists ways out and what was weighed, with each of these on a line of its own."""
    items = "; ".join(error.weighed)
    if items:
        text = text.replace(items, "".join(f"\n{ITEM}{each}" for each in error.weighed))
    for remedy in error.remedies:
        text = text.replace(f"; {remedy.text} (", f"\n{ITEM}{remedy.text} (")
    text = text.replace(". Ways out: ", f".\nWays out:\n{ITEM}")
    for heading in ("Nothing ", "Not tried:", "Weighed:"):
        text = text.replace(f". {heading}", f".\n{heading}")
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_settings(remedy: Remedy) -> str:
    """A way out as options of a verb that reads a configuration; "" where they can say only a part of it, or nothing."""
    if remedy.settings is None:
        return ""
    options = [f"--set {shlex.quote(setting)}" for setting in remedy.settings]
    for name, value in (remedy.arguments or {}).items():
        told = value if isinstance(value, str) else json.dumps(value)
        options.append(f"--budget {told}" if name == "budget" else f"--set {shlex.quote(f'fit.{name}={told}')}")
    return " ".join(options)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments of verbs that read a configuration."""
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML, or JSON)")
    add_settings(parser)
    add_deepspeed(parser)


def add_device(parser: argparse.ArgumentParser, words: str) -> None:
    """The argument that names a GPU that is not here; `device_of` reads it."""
    parser.add_argument(
        "--device", metavar="NAME", help=f'{words} for a GPU that is not here, such as "rtx4090"; times are estimated'
    )


def device_of(arguments: argparse.Namespace) -> str | None:
    """The GPU that is planned for, looked up before anything is read; None for the device of this computer that the run file names.

    Raises:
        InputError: no such GPU is known.
    """
    from memfit.hardware.machine import known_machine, of_torch

    name: str | None = arguments.device
    if name is None:
        return None
    if of_torch(name):
        raise InputError(
            f"--device {name} is a device of this computer: --set fit.device={name} plans for it; --device takes the name of a GPU that is not here, "
            "such as rtx4090"
        )
    known_machine(name)
    return name


def check_place(file: Path | None, what: str, *, folder_is_made: bool = False) -> None:
    """See that a file can be written, before the work that ends with writing it.

    Args:
        file: that will be written; None for none.
        what: it is.
        folder_is_made: where it is not there yet.

    Raises:
        PlanFileError: it cannot.
    """
    if file is None:
        return
    folder = file.absolute().parent
    while folder_is_made and not folder.exists():
        folder = folder.parent
    problem = ""
    if file.is_dir():
        problem = "it is a folder: name a file in it"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        problem = f"the folder {folder} may not be written to"
    if problem:
        raise PlanFileError(f"cannot write the {what} {file}: {problem}")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The arguments that change a configuration."""
    parser.add_argument("--budget", metavar="BYTES", help='what training may take: "8GiB", "512MiB" (sets fit.budget)')
    add_set(parser, "optim.lr=1e-4")


def add_set(parser: argparse.ArgumentParser, example: str) -> None:
    """The argument that changes one key of a file, with an example of such a change."""
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"change one key, as if it stood in the file: --set {example}",
    )


def add_deepspeed(parser: argparse.ArgumentParser) -> None:
    """The argument that puts a DeepSpeed configuration beside ours."""
    parser.add_argument(
        "--deepspeed",
        metavar="FILE",
        type=Path,
        help="DeepSpeed configuration (JSON) that says batch, precision, clipping, offload, optimizer and schedule",
    )


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """What `--set`, `--budget`, `--devices` and `--deepspeed` say."""
    budget = [] if arguments.budget is None else [f"fit.budget={arguments.budget}"]
    devices = getattr(arguments, "devices", None)
    several = [] if devices is None else [f"fit.devices={json.dumps(devices)}"]
    file = getattr(arguments, "deepspeed", None)
    # Quoted as JSON, which YAML reads: paths may hold anything.
    beside = [] if file is None else [f"deepspeed={json.dumps(str(file.resolve()))}"]
    return [*beside, *arguments.settings, *budget, *several]


def read_config(arguments: argparse.Namespace) -> Config:
    """The configuration a verb was given."""
    from memfit.train.config import load_config

    processes = getattr(arguments, "nproc", None)
    last = str(processes or "").rpartition(":")[2]
    return load_config(arguments.config, settings_of(arguments), int(last) if last.isdecimal() else None)
