"""`memfit serve`: a service that plans, queues and trains runs inside the bytes of this computer; with a page for people."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from memfit.cli.answer import Answer
from memfit.errors import BudgetError, ConfigError
from memfit.units import parse_bytes

DEFAULT_CAPACITY = "50%"


def service_folder() -> Path:
    """Where the service of this user keeps its runs, unless another folder is named."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "memfit" / "service"


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser("serve", parents=[shared], help="serve runs that others submit", description=__doc__)
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        type=Path,
        help=f"for all that it keeps ({str(service_folder()).replace('%', '%%')})",
    )
    parser.add_argument(
        "--capacity", metavar="DEVICE=BYTES", action="append", default=[],
        help=f'bytes that runs share: "8GiB" of the CPU, cuda:0=24GiB, host=64GiB, disk=500GiB; once for each (cpu={DEFAULT_CAPACITY}%)',
    )  # fmt: skip
    parser.add_argument(
        "--cores", metavar="N", type=int, help="of the processor, which runs on it share (those of this computer)"
    )
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, action="append", default=[], help="that runs may read: data sets, models"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where it listens (127.0.0.1); elsewhere, put TLS in front of it"
    )
    parser.add_argument("--port", type=int, default=8321, help="where it listens (8321); 0 for any that is free")
    parser.add_argument("--name", action="append", default=[], help="by which it may be called besides --host")
    parser.add_argument("--run-seconds", metavar="SECONDS", type=float, help="after which a run is stopped")
    parser.add_argument(
        "--silent-seconds", metavar="SECONDS", type=float, help="without output, after which a run is stopped"
    )
    parser.add_argument(
        "--planning-memory",
        metavar="BYTES",
        help="that a process of planning may take (a quarter of the memory, 8GiB at most)",
    )
    parser.add_argument(
        "--keep-days", metavar="DAYS", type=float, help="after which files of runs that are over are removed (never)"
    )
    parser.add_argument(
        "--keep-bytes",
        metavar="BYTES",
        help="of all runs' files; above it those of the oldest that are over are removed",
    )
    parser.add_argument(
        "--keep-audit-days", metavar="DAYS", type=float, help="after which rows of the audit log are removed (never)"
    )
    parser.add_argument("--owner-disk", metavar="BYTES", help="that the files of one owner's runs may take")
    parser.add_argument(
        "--store", metavar="URL", help="of a PostgreSQL database that several hosts share, with --folder (a file in it)"
    )
    parser.add_argument(
        "--host-name", metavar="NAME", help="of this computer among those that share --store (that of the computer)"
    )
    parser.add_argument(
        "--lease", metavar="SECONDS", type=float,
        help="that runs go on while their host says nothing, or on a cluster the service; after twice as long others have them (120)",
    )  # fmt: skip
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help='of a Ray cluster whose machines train: "auto" for the one of this computer',
    )
    parser.add_argument("--unconfined", action="store_true", help="let runs read and write whatever this user may")
    parser.add_argument("--demo", action="store_true", help="serve a demonstration, in a folder that is thrown away")
    parser.add_argument(
        "--make-token", metavar="NAME=ROLE", help="make a token (roles: read, submit, admin), tell it and end"
    )
    parser.add_argument("--take-back", metavar="NAME", help="take back the tokens of somebody, and end")
    parser.add_argument("--backup", metavar="FILE", type=Path, help="write a copy of the store, and end")
    parser.add_argument(
        "--restore", metavar="FILE", type=Path, help="put a copy of the store back, while no service of the folder runs"
    )
    parser.add_argument(
        "--drain", action="store_true", help="have the service that runs take and start nothing new, and end"
    )
    parser.add_argument("--undrain", action="store_true", help="have it take and start runs again, and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Serve until told to end."""
    try:
        # What is missing is told before anything is done.
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"memfit serve needs a package that is missing ({error.name}): pip install 'memfit[service]'"
        ) from error
    for name in ("keep_days", "keep_audit_days", "run_seconds", "silent_seconds"):
        given = getattr(arguments, name)
        if given is not None and not given > 0:
            raise ConfigError(f"--{name.replace('_', '-')}: {given:g} is not positive; leave it out for no limit")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: a port is a number from 1 to 65535, or 0 for any that is free")
    folder = (arguments.folder or service_folder()).resolve()
    if not arguments.store and (arguments.host_name or (arguments.lease and not arguments.cluster)):
        raise ConfigError("--host-name and --lease are for hosts that share a store: name it with --store")
    if arguments.cluster is not None:
        _check_cluster(arguments)
    if arguments.store and (arguments.demo or arguments.restore):
        raise ConfigError(
            "--demo and --restore are for a store in a file: leave --store out, or restore the database with PostgreSQL's own tools"
        )
    if arguments.drain or arguments.undrain:
        return _drained(folder, on=arguments.drain)
    if arguments.restore:
        return _restored(folder, arguments.restore)
    if arguments.make_token or arguments.take_back or arguments.backup:
        return _about_store(arguments, folder)
    if not arguments.demo:
        return _served(arguments, folder)
    with tempfile.TemporaryDirectory(prefix="memfit-demo-") as temporary:
        return _served(arguments, Path(temporary).resolve())


def _check_cluster(arguments: argparse.Namespace) -> None:
    """Check that what is said about a cluster goes together."""
    if arguments.store:
        raise ConfigError("--cluster is for one service, and --store for several hosts: give one of them")
    if arguments.capacity or arguments.cores is not None:
        raise ConfigError(
            "--capacity and --cores are of this computer, and the bytes and cores of a cluster are what its machines have told Ray: leave them out"
        )
    if arguments.demo:
        raise ConfigError("--demo trains on this computer: leave --cluster out")


def _about_store(arguments: argparse.Namespace, folder: Path) -> Answer:
    """Tokens and copies, whether a service is running or not."""
    from memfit.service.store import ServiceStore
    from memfit.service.tokens import Tokens

    store = ServiceStore(_made(folder), arguments.store)
    try:
        if arguments.make_token:
            name, _, role = arguments.make_token.partition("=")
            token = Tokens(store).make(name, role or "submit")
            return Answer({"verb": "serve", "name": name, "token": token}, token)
        if arguments.take_back:
            number = Tokens(store).take_back(arguments.take_back)
            return Answer({"verb": "serve", "taken_back": number}, f"Taken back: {number}")
        store.backup(arguments.backup)
        return Answer({"verb": "serve", "backup": str(arguments.backup)}, f"Written: {arguments.backup}")
    finally:
        store.close()


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"--folder: cannot make the folder {folder} ({error.strerror or error}): name another one"
        ) from error
    return folder


def _restored(folder: Path, copy: Path) -> Answer:
    from memfit.service.restoring import restore

    before = restore(folder, copy)
    there = "" if before is None else f"\nThe store that was there: {before}"
    told = {"verb": "serve", "restored": str(copy), "before": None if before is None else str(before)}
    return Answer(told, f"Restored: {copy}{there}")


def _drained(folder: Path, *, on: bool) -> Answer:
    """A word to the service of this user that runs."""
    from memfit.service.client import Client
    from memfit.service.serving import local_address

    here = local_address(folder)
    if here is None:
        raise ConfigError(f"no service has been started in {folder}: name its folder with --folder")
    with Client(here["url"], here["token"]) as client:
        running = client.drain(on=on)
    text = f"It takes and starts nothing new; {running} runs run." if on else "It takes and starts runs again."
    return Answer({"verb": "serve", "draining": on, "running": running}, text)


def _bytes(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except BudgetError as error:
        raise ConfigError(f"--{name}: {error}") from None


def _served(arguments: argparse.Namespace, folder: Path) -> Answer:
    from memfit.hardware.cores import cores
    from memfit.runner.machines import Machines
    from memfit.service import demo
    from memfit.service.serving import JsonLines, Serving
    from memfit.service.settings import LEASE_SECONDS, ServiceSettings, own_name, planning_memory, read_capacity

    if arguments.cores is not None and arguments.cores < 1:
        raise ConfigError(f"--cores {arguments.cores}: runs share at least one core")
    capacity = (
        read_capacity(tuple(arguments.capacity) or ("64MiB" if arguments.demo else DEFAULT_CAPACITY,))
        if arguments.cluster is None
        else Machines()  # told by them
    )
    for each in arguments.data:
        if not each.is_dir():
            raise ConfigError(f"--data: there is no folder {each}")
    settings = ServiceSettings(
        _made(folder), capacity, data=tuple(each.resolve() for each in arguments.data), modules=(demo.MODULE,) if arguments.demo else (),
        confined=not arguments.unconfined, run_seconds=arguments.run_seconds, silent_seconds=arguments.silent_seconds,
        planning_bytes=_bytes("planning-memory", arguments.planning_memory) or planning_memory(), keep_days=arguments.keep_days,
        keep_bytes=_bytes("keep-bytes", arguments.keep_bytes), keep_audit_days=arguments.keep_audit_days,
        owner_disk_bytes=_bytes("owner-disk", arguments.owner_disk), store=arguments.store,
        host=(arguments.host_name or own_name()) if arguments.store else "",
        lease_seconds=LEASE_SECONDS if arguments.lease is None else arguments.lease, cores=arguments.cores or cores(),
        cluster=arguments.cluster,
    )  # fmt: skip
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    log = logging.getLogger("memfit.service")
    log.addHandler(handler)
    log.setLevel(logging.WARNING if arguments.demo else logging.INFO)
    for name in ("uvicorn", "memfit.runner"):
        logging.getLogger(name).addHandler(handler)
    serving = Serving(settings, arguments.host, arguments.port, arguments.name)

    def begun() -> None:
        token = serving.tell_local_clients()
        print(f"memfit serves {serving.url}/#token={token}", file=sys.stderr, flush=True)

    serving.run(begun)
    if arguments.demo:
        serving.stop_runs()
    return Answer(
        {"verb": "serve", "folder": str(folder)}, "Ended; runs that run go on, and the next memfit serve finds them."
    )
