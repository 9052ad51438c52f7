"""`memfit submit`: send a run to a service, or a search, with its folder of code."""

from __future__ import annotations

import argparse
import glob
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, Status, add_settings, settings_of
from memfit.cli.serve import service_folder
from memfit.errors import BudgetError, ConfigError, InfeasibleError, PlanFileError
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.service.client import Client


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "submit", parents=[shared], help="send a run or a search to a service", description=__doc__
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        help="configuration file (YAML, or JSON), as memfit train or memfit tune reads it",
    )
    add_settings(parser)
    parser.add_argument(
        "--code",
        metavar="FOLDER",
        type=Path,
        help="that is sent along (that of CONFIG, where the file names Python functions or files in it)",
    )
    parser.add_argument("--name", default="", help="to call the run by")
    parser.add_argument("--priority", type=int, default=0, help="higher goes first; above 0 is for admins")
    parser.add_argument("--key", help="submitted twice under the same key, it is one run")
    parser.add_argument("--plan-only", action="store_true", help="find out whether it fits there, and run nothing")
    parser.add_argument("--wait", action="store_true", help="follow it until it is over")
    parser.add_argument(
        "--export",
        choices=("slurm", "trainjob"),
        help="ask no service: write it for another scheduler, with the bytes of its budget (memfit runs N --export: of its plan)",
    )
    add_export(parser)
    add_service(parser)
    parser.set_defaults(run=run)


def add_export(parser: argparse.ArgumentParser) -> None:
    """The arguments that go with --export."""
    parser.add_argument("--to", dest="export_file", metavar="FILE", type=Path, help="for --export; else it is printed")
    parser.add_argument(
        "--image", help="for --export trainjob: container image with memfit, and the run's code and data"
    )


def written(text: str, arguments: argparse.Namespace, told: dict[str, Any]) -> Answer:
    """An export, in its file or as the answer.

    Raises:
        PlanFileError: the file cannot be written.
    """
    told = {"verb": arguments.verb, **told, "export": arguments.export}
    if arguments.export_file is None:
        return Answer({**told, "text": text}, text.rstrip("\n"))
    try:
        arguments.export_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanFileError(f"cannot write the export {arguments.export_file}: {error.strerror or error}") from error
    return Answer({**told, "output": str(arguments.export_file)}, f"Written: {arguments.export_file}")


def _exported(config: dict[str, Any], arguments: argparse.Namespace) -> Answer:
    """Without a service, and so without a plan: it takes what its budget says."""
    import yaml

    from memfit.service import exports

    fit = config.get("fit") or {}
    if "search" in config:
        raise ConfigError("--export is of one run, and the file has a search: part")
    if fit.get("budget") is None or isinstance(fit.get("devices"), str):
        raise ConfigError(
            "--export needs fit.budget, the bytes of one device; what takes several devices is submitted, and exported with its plan (memfit runs N --export)"
        )
    try:
        budget = parse_bytes(fit["budget"])
    except BudgetError as error:
        raise ConfigError(f"fit.budget: {error}") from None
    device = "cuda" if str(fit.get("device", "cuda")).startswith(("cuda", "auto")) else "cpu"
    name, needs = arguments.name or arguments.config.stem, exports.Needs((budget,), device)
    if arguments.export == "slurm":
        return written(exports.slurm(config, name, needs), arguments, {"name": name})
    if not arguments.image:
        raise ConfigError("--export trainjob needs --image: of a container with memfit, and the run's code and data")
    job = exports.train_job(config, name, needs, arguments.image)
    return written(yaml.safe_dump(job, sort_keys=False), arguments, {"name": name})


def add_service(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which service is asked."""
    parser.add_argument(
        "--url", help="of the service, as it tells it (MEMFIT_SERVICE; else the one that this user has started here)"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="with the token (MEMFIT_SERVICE_TOKEN holds it; else as for --url)",
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", type=Path, help="of a service of this user that was started with --folder"
    )


def client_of(arguments: argparse.Namespace) -> Client:
    """The service that was named, or that of this user.

    Raises:
        ConfigError: none is known, or its client is not installed.
    """
    import os

    try:
        import httpx2  # noqa: F401 - as the client will

        from memfit.service.client import Client
        from memfit.service.serving import local_address
    except ImportError as error:
        raise ConfigError(
            f"asking a service needs a package that is missing ({error.name}): pip install 'memfit[service]'"
        ) from error
    here = local_address(arguments.folder or service_folder()) or {}
    # An address as memfit serve tells it, for the browser, has the token at its end.
    told, _, in_address = (arguments.url or os.environ.get("MEMFIT_SERVICE") or "").partition("#token=")
    url = told.rstrip("/") or here.get("url")
    token = in_address or os.environ.get("MEMFIT_SERVICE_TOKEN")
    if arguments.token_file is not None:
        try:
            token = arguments.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"cannot read the token in {arguments.token_file}: {why}") from error
    if token is None and url == here.get("url"):
        token = here.get("token")
    if url is None:
        if arguments.folder is not None:
            raise ConfigError(
                f"no service has been started in {arguments.folder.absolute()}: name the folder that memfit serve --folder was given, "
                "or give --url and --token-file"
            )
        raise ConfigError(
            "no service is known: start one with memfit serve, or say which one is meant: --folder of one that was started with it, or --url and --token-file"
        )
    if token is None:
        raise ConfigError(
            f"the service at {url} wants a token: give --token-file, or MEMFIT_SERVICE_TOKEN (memfit serve tells one when it starts, after #token=)"
        )
    return Client(url, token)


def run(arguments: argparse.Namespace) -> Answer:
    """Submit, and follow it where that is asked."""
    from memfit.train.config import read_content

    config = read_content(arguments.config, settings_of(arguments))
    if arguments.export is not None:
        return _exported(config, arguments)
    code = arguments.code
    if code is None and (_names_functions(config) or _names_files(config, arguments.config.parent)):
        code = arguments.config.resolve().parent
    with client_of(arguments) as client:
        found = client.submit(
            config,
            code=code,
            name=arguments.name,
            priority=arguments.priority,
            plan_only=arguments.plan_only,
            key=arguments.key,
        )
        if "search" in config:
            return _study(client, found, wait=arguments.wait)
        number = found["run"]
        if not arguments.wait:
            return Answer(
                {"verb": "submit", **found},
                f"Run {number} is {found['state']}.\nTo follow it: memfit runs {number} --follow",
            )
        for line in followed(client, number):
            print(line, file=sys.stderr, flush=True)
        found = client.run(number)
        status = Status.FITS if found["state"] in {"done", "planned"} else Status.COULD_NOT_TELL
        refusal = found.get("refusal") or {}
        if refusal.get("error") == InfeasibleError.__name__:
            status = Status.DOES_NOT_FIT
        return Answer({"verb": "submit", **found}, f"Run {number} is {found['state']}: {found['reason']}", status)


def _study(client: Client, found: dict[str, Any], *, wait: bool) -> Answer:
    from memfit.cli.studies import line, tell

    number = found["study"]
    if not wait:
        told = f"Study {number} is {found['state']}.\nTo follow it: memfit studies {number} --follow"
        return Answer({"verb": "submit", **found}, told)
    found = client.wait_for_study(number, tell)
    status = {"done": Status.FITS if found["best"] else Status.COULD_NOT_TELL, "refused": Status.DOES_NOT_FIT}
    return Answer({"verb": "submit", **found}, line(found), status.get(found["state"], Status.COULD_NOT_TELL))


def followed(client: Client, number: int) -> Any:
    """What happens to a run, in lines for a person."""
    for kind, content in client.stream(number):
        if kind == "event":
            yield f"{content['kind']}: {content['text']}"
        elif kind == "output":
            yield from content["lines"]


def _names_functions(config: dict[str, Any]) -> bool:
    return any(isinstance(part, dict) and part.get("python") for part in (config.get("model"), config.get("data")))


def _names_files(config: dict[str, Any], folder: Path) -> bool:
    from memfit.service.submission import paths

    return any(glob.glob(text, root_dir=folder) for _, text in paths(config) if not Path(text).is_absolute())  # noqa: PTH207 - as the reader does
