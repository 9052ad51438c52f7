"""The `memfit` command: find the verb, run it, print its answer; turn errors into one message and an exit status."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn, get_args, get_type_hints

from memfit import __version__
from memfit.cli import doctor, estimate, explain, frontier, plan, runs, serve, studies, submit, train, tune
from memfit.cli.answer import ITEM, Answer, Status, failure
from memfit.errors import BudgetError, MemfitError

_VERBS: Final = (estimate, plan, frontier, train, tune, serve, submit, runs, studies, explain, doctor)
_ONLY_PLAN: Final = frozenset({"estimate", "plan", "frontier"})
_DESCRIPTION: Final = (
    "Train PyTorch models that do not fit: give a number of bytes, be told before it runs, keep the same numbers."
)
# What other commands call these options.
_OTHER_NAMES: Final = {
    "--gpu": ("--device", "--devices"),
    "--gpus": ("--gpu", "--devices"),
    **dict.fromkeys(("--seq-len", "--seq-length", "--sequence-length", "--max-length"), ("--length",)),
    **dict.fromkeys(("--out", "--output", "-o"), ("--save", "--html")),
    **dict.fromkeys(("--memory", "--vram", "--max-memory"), ("--budget",)),
    "--budget": ("--capacity",),
    **dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes"), ("--nproc",)),
    **dict.fromkeys(("--lora", "--qlora", "--peft"), ("--method",)),
}
# The folder of memfit's own source.
_HOME: Final = Path(__file__).resolve().parent.parent
_STATUS: Final = "exit status: 0 it fits (done), 1 it does not fit, 2 could not tell, 3 bad input, 130 interrupted"


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on bad arguments, which here means "could not tell"; and a shell leaves the ~ of --save=~/plan.json as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", Path, _at_home)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Status.BAD_INPUT, f"{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = get_close_matches(str(value), [str(each) for each in action.choices or ()], 1)
            error.message += f"; did you mean {near[0]}?" if near else ""
            raise


def _at_home(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises where there is no such user


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    shared = _Parser(add_help=False)
    shared.add_argument(
        "--json", action="store_true", help="write the answer as JSON, and nothing else, to standard output"
    )
    shared.add_argument("--debug", action="store_true", help="show where an error comes from")
    top = _Parser(prog="memfit", description=_DESCRIPTION, epilog=_STATUS)
    top.add_argument("--version", action="version", version=f"memfit {__version__}")
    verbs = top.add_subparsers(title="commands", dest="verb", metavar="COMMAND", required=True)
    for verb in _VERBS:
        verb.add(verbs, shared)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    _print_anything()
    try:
        top = parser()
        if not given:
            top.print_help(sys.stderr)
            return Status.BAD_INPUT
        parsed, unknown = top.parse_known_args(_with_negative_sizes(given))
        if unknown:
            _refuse(top, parsed.verb, unknown)
    except SystemExit as end:  # argparse has printed what there is to say
        return int(end.code or 0)
    # What a user's own model or data prints must not end up in the JSON.
    aside = contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext()
    if parsed.verb in _ONLY_PLAN:
        # A process that ends looks through all objects once more, which takes seconds after a large model was planned for.
        atexit.register(gc.freeze)
    error: BaseException | None = None
    try:
        with aside:
            answer: Answer = parsed.run(parsed)
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001 - the last place that can turn it into an exit status
        error, answer = caught, failure(caught)
    if isinstance(error, BudgetError):
        answer = replace(answer, text=_told_where(answer.text, parsed))
    if error is not None:
        _complain(error, answer, debug=parsed.debug)
    try:
        if parsed.json and answer.data:
            print(json.dumps(_finite(dict(answer.data)), indent=1, allow_nan=False))
        elif error is None and answer.text:
            print(answer.text)
        sys.stdout.flush()
    except BrokenPipeError:  # `memfit explain plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as full:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"memfit: cannot write the answer to standard output: {full.strerror or full}", file=sys.stderr)
        return Status.COULD_NOT_TELL
    return int(answer.status)


def _print_anything() -> None:
    """What standard output cannot say (a folder's name, where it takes ASCII alone) is escaped: a run that has ended must not fail on its answer."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _refuse(top: argparse.ArgumentParser, verb: str, unknown: Sequence[str]) -> NoReturn:
    """Tell of arguments that a verb does not have, and of those that were probably meant."""
    (verbs,) = (each for each in top._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001 - argparse tells it nowhere else
    own: argparse.ArgumentParser = verbs.choices[verb]
    options = [option for action in own._actions for option in action.option_strings if option.startswith("--")]  # noqa: SLF001 - likewise
    names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
    early = [name for name in names if name in options]
    if early:
        own.error(f"options stand after the command: memfit {verb} ... {' '.join(early)}")
    verbal = [name.lstrip("-") for name in names if name.lstrip("-") in verbs.choices]
    meant = [f"memfit {name}" for name in verbal] or [_meant(name, options) for name in names]
    hint = f"; did you mean {' '.join(filter(None, meant))}?" if any(meant) else ""
    own.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _meant(option: str, options: Sequence[str]) -> str:
    """The option, or the key of a run file, of that name or the nearest one; "" where none is near."""
    other = next((each for each in _OTHER_NAMES.get(option, ()) if each in options), "")
    # Without the dashes, which all have in common.
    near = "".join(f"--{each}" for each in get_close_matches(option.lstrip("-"), [o[2:] for o in options], 1, 0.6))
    if other or "--set" not in options:
        return other or near
    from memfit.strict import known_elsewhere
    from memfit.train.config import Config

    name = option.lstrip("-").replace("-", "_")
    for section, hint in get_type_hints(Config).items():
        for kind in get_args(hint) or (hint,):
            if is_dataclass(kind) and name in {each.name for each in fields(kind)}:
                return f"--set {section}.{name}=..."
    key, _, value = (known_elsewhere(name) or "").partition(": ")
    return near or (f"--set {key}={value or '...'}" if key else "")


def _with_negative_sizes(arguments: Sequence[str]) -> list[str]:
    """`--budget -3GiB` as `--budget=-3GiB`: argparse would take the size for an option, and the message for it would be about something else."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-[0-9]", argument):
            joined[-1] = f"{joined[-1]}={argument}"
        else:
            joined.append(argument)
    return joined


def _told_where(message: str, parsed: argparse.Namespace) -> str:
    """A message about the budget, which is named as it was given: as an option, as a setting, or in the configuration file."""
    if not message.startswith("budget=") or getattr(parsed, "config", None) is None:
        return message
    given = [s for s in getattr(parsed, "settings", ()) if s.partition("=")[0].strip() == "fit.budget"]
    where = "--budget" if parsed.budget is not None else "--set fit.budget" if given else f"{parsed.config}: fit.budget"
    return f"{where}{message.removeprefix('budget')}"


def _complain(error: BaseException, answer: Answer, *, debug: bool) -> None:
    """One message for what was foreseen; the traceback for what was not, which is most often the user's own model."""
    expected = isinstance(error, (MemfitError, KeyboardInterrupt))
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    elif not expected:
        told = traceback.TracebackException.from_exception(error)
        left_out = [_without_our_lines(each) for each in _printed(told)]
        if any(left_out):
            print(
                "memfit: code that memfit called has failed (--debug shows memfit's own lines, too):", file=sys.stderr
            )
        told.print(file=sys.stderr)
    if expected:
        print(_wrapped(f"memfit: {answer.text}"), file=sys.stderr)


def _printed(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """A traceback and those of what the exception came from, as far as Python prints them."""
    each: traceback.TracebackException | None = told
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _without_our_lines(told: traceback.TracebackException) -> bool:
    """Leave out the lines of memfit where what failed is not ours: a user looks for the lines of the model.

    Returns:
        Whether any was left out.
    """
    ours = [Path(frame.filename).is_relative_to(_HOME) for frame in told.stack]
    if not any(ours) or ours[-1]:
        return False
    told.stack[:] = [frame for frame, own in zip(told.stack, ours, strict=True) if not own]
    return True


def _wrapped(text: str) -> str:
    """Text as wide as the terminal; as it is where there is none."""
    if not sys.stderr.isatty():
        return text
    columns = max(20, shutil.get_terminal_size((100, 24)).columns)
    how: dict[str, Any] = {"width": columns, "break_on_hyphens": False, "break_long_words": False}
    return "\n".join(
        textwrap.fill(line, subsequent_indent=2 * ITEM if line.startswith(ITEM) else "", **how)
        for line in text.splitlines()
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124 - NaN
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
