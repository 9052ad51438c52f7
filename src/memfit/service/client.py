"""Asks a service from Python, with the same words as its command line.

from memfit.service.client import Client
with Client("http://127.0.0.1:8321", token) as client:
    run = client.submit({"model": ..., "data": ..., "fit": ...}, code="my_project")
    for kind, content in client.stream(run["run"]):
        print(kind, content)
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from urllib.parse import quote

import httpx2

from memfit.errors import InfeasibleError, InputError, Remedy
from memfit.service.refusals import TooLargeError
from memfit.service.states import OVER
from memfit.service.uploads import packed

_RETRIES: Final = 5  # where no connection was ever made
_PATIENCE: Final = 60.0  # seconds, where one broke: a service that is upgraded is back by then
_CHUNK: Final = 1 << 20


class Client:
    """One service.

    Args:
        url: of it: "http://127.0.0.1:8321".
        token: as `memfit serve` has told it.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise InputError("this is no token: a token is one word of letters, digits, dashes and underscores")
        headers = {"authorization": f"Bearer {token}"}
        try:
            # No proxies of the environment: a token goes to the service alone.
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
            named = self._http.base_url
        except httpx2.InvalidURL:
            named = httpx2.URL("")
        if named.scheme not in {"http", "https"} or not named.host or (named.port or 0) > 65535:
            raise InputError(f"{url!r} is no address of a service: write it as http://127.0.0.1:8321")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def me(self) -> dict[str, Any]:
        """Whose token this is.

        Raises:
            InputError: the service does not answer, or refuses; here and in every other call, with its own words.
        """
        return self._asked("GET", "/v1/me")  # type: ignore[no-any-return]

    def upload(self, folder: str | Path) -> str:
        """Send a folder of code; its digest, for `submit`."""
        if not Path(folder).is_dir():
            raise InputError(f"there is no folder {folder} to send: name the one with the run's code")
        with tempfile.TemporaryFile() as archive:
            try:
                packed(Path(folder), archive)
            except TooLargeError as error:
                raise InputError(
                    f"the folder {folder} is too large to be sent along ({error}): have data in a folder that the service lets runs read "
                    "(memfit serve --data), or name the folder of the code alone (memfit submit --code)"
                ) from None
            except OSError as error:
                raise InputError(
                    f"cannot read {error.filename or folder} to send it: {error.strerror or error}"
                ) from error
            archive.seek(0)
            content = archive.read()
        answer = self._asked("POST", "/v1/uploads", content=content, headers={"content-type": "application/zip"})
        return str(answer["code"])

    def submit(
        self, config: Mapping[str, Any], *, code: str | Path | None = None, name: str = "", priority: int = 0,
        plan_only: bool = False, key: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Submit a run; or a study, where the file has `search`.

        Args:
            config: content of a run file, as `memfit train` reads it, or of a search file, as `memfit tune` does.
            code: folder that is sent along; or the digest of one that was.
            name: to call it by.
            priority: higher goes first.
            plan_only: find out whether it fits, and run nothing.
            key: the same submission under the same key, sent twice, is one run.

        Returns:
            The run, as `run` tells it; or the study, as `study` does.
        """
        is_digest = re.fullmatch(r"[0-9a-f]{64}", str(code)) is not None
        digest = str(code) if is_digest else None if code is None else self.upload(code)
        body = {"config": config, "name": name, "code": digest, "priority": priority, "plan_only": plan_only}
        where = "/v1/studies" if "search" in config else "/v1/runs"
        try:
            content = json.dumps(body, allow_nan=False).encode("ascii")
        except (TypeError, ValueError) as error:
            raise InputError(f"the run file cannot be sent, as it holds what JSON cannot say: {error}") from error
        headers = {"content-type": "application/json", **({"idempotency-key": key.encode()} if key else {})}
        return self._asked("POST", where, content=content, headers=headers)  # type: ignore[no-any-return]

    def runs(self, *states: str, limit: int = 100) -> list[dict[str, Any]]:
        """Runs, the newest first; only those in some states, where they are named."""
        return self._asked("GET", "/v1/runs", params={"state": list(states), "limit": limit})  # type: ignore[no-any-return]

    def run(self, number: int) -> dict[str, Any]:
        """One run, with its run file and what happened to it."""
        return self._asked("GET", f"/v1/runs/{number}")  # type: ignore[no-any-return]

    def plan(self, number: int) -> str:
        """Its plan in words."""
        return str(self._asked("GET", f"/v1/runs/{number}/plan")["text"])

    def export(self, number: int, kind: str = "slurm", image: str = "") -> str:
        """It for another scheduler, with the bytes of its plan: a batch script of "slurm", or a "trainjob" with an image."""
        return str(self._send("GET", f"/v1/runs/{number}/export", params={"kind": kind, "image": image}).text)

    def output(self, number: int, *, errors: bool = True) -> str:
        """The end of what it has printed to standard error, or to standard output."""
        return str(self._send("GET", f"/v1/runs/{number}/output", params={"errors": errors}).text)

    def cancel(self, number: int) -> dict[str, Any]:
        """Have it end for good."""
        return self._asked("POST", f"/v1/runs/{number}/cancel")  # type: ignore[no-any-return]

    def pause(self, number: int) -> dict[str, Any]:
        """Have it stop with a snapshot, and give its bytes back."""
        return self._asked("POST", f"/v1/runs/{number}/pause")  # type: ignore[no-any-return]

    def resume(self, number: int) -> dict[str, Any]:
        """Put it back into the queue."""
        return self._asked("POST", f"/v1/runs/{number}/resume")  # type: ignore[no-any-return]

    def studies(self, *states: str, limit: int = 100) -> list[dict[str, Any]]:
        """Studies, the newest first; only those in some states, where they are named."""
        return self._asked("GET", "/v1/studies", params={"state": list(states), "limit": limit})  # type: ignore[no-any-return]

    def study(self, number: int) -> dict[str, Any]:
        """One study, with its search file and its trials."""
        return self._asked("GET", f"/v1/studies/{number}")  # type: ignore[no-any-return]

    def cancel_study(self, number: int) -> dict[str, Any]:
        """Have it end, with all of its trials."""
        return self._asked("POST", f"/v1/studies/{number}/cancel")  # type: ignore[no-any-return]

    def wait_for_study(self, number: int, told: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
        """Wait until a study is over, however it ends.

        Args:
            number: of the study.
            told: is called with each trial that is over, once.

        Returns:
            The study.
        """
        seen: set[int] = set()
        while True:
            study = self.study(number)
            for trial in study["trials"]:
                if trial["state"] not in {"running", "waiting"} and trial["number"] not in seen:
                    seen.add(trial["number"])
                    told(trial)
            if study["state"] != "running":
                return study
            time.sleep(1.0)

    def fetch_study(self, number: int, folder: str | Path) -> list[Path]:
        """Copy what a study has written into a folder: the trials as CSV, the best run file, a report."""
        names = [each["name"] for each in self._asked("GET", f"/v1/studies/{number}/artifacts")]
        return self._fetched(f"/v1/studies/{number}/artifacts", folder, names)

    def remove(self, number: int) -> dict[str, Any]:
        """Have the files of a run that is over removed."""
        return self._asked("POST", f"/v1/runs/{number}/remove")  # type: ignore[no-any-return]

    def drain(self, *, on: bool = True) -> int:
        """Have the service take and start nothing new, or do so again; how many runs run."""
        return int(self._asked("POST", "/v1/drain", params={"on": on})["running"])

    def devices(self) -> list[dict[str, Any]]:
        """Each device, with the runs on it over time."""
        return self._asked("GET", "/v1/devices")["devices"]  # type: ignore[no-any-return]

    def artifacts(self, number: int) -> dict[str, int]:
        """Files that it has written, with their bytes."""
        return {each["name"]: each["bytes"] for each in self._asked("GET", f"/v1/runs/{number}/artifacts")}

    def fetch(self, number: int, folder: str | Path, *names: str) -> list[Path]:
        """Copy files that it has written.

        Args:
            number: of the run.
            folder: that they are written into.
            names: which; all where none is named. A run that goes on removes older snapshots meanwhile: of what was there at first, those are left out.
        """
        path = f"/v1/runs/{number}/artifacts"
        return self._fetched(path, folder, names or list(self.artifacts(number)), may_go=not names)

    def _fetched(self, path: str, folder: str | Path, names: Sequence[str], *, may_go: bool = False) -> list[Path]:
        found = []
        for name in names:
            file = Path(folder) / name
            if not file.resolve().is_relative_to(Path(folder).resolve()):
                raise InputError(f"the service names a file out of the folder, {name!r}: it was not fetched")
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with self._http.stream("GET", f"{path}/{quote(name)}") as answer:
                    if may_go and answer.status_code == httpx2.codes.NOT_FOUND:
                        continue
                    if answer.status_code != httpx2.codes.OK:
                        answer.read()
                        _refused(answer)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("wb") as target:
                        for chunk in answer.iter_bytes(_CHUNK):
                            target.write(chunk)
            except httpx2.TransportError as error:
                raise self._silent(error) from error
            except OSError as error:
                raise InputError(
                    f"cannot write {file}: {error.strerror or error}; name another folder, or free space"
                ) from error
            found.append(file)
        return found

    def stream(self, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """What happens to a run until it is over: ("run" | "event" | "metrics" | "output", content). A connection that breaks is taken up again."""
        last, failures, connected, broken = "", 0, False, 0.0
        while True:
            try:
                with self._http.stream(
                    "GET", f"/v1/runs/{number}/stream", headers={"last-event-id": last}, timeout=60.0
                ) as answer:
                    if answer.status_code != httpx2.codes.OK:
                        answer.read()
                        _refused(answer)
                    for kind, identity, content in _messages(answer.iter_lines()):
                        failures, last, connected = 0, identity or last, True
                        if kind == "end":
                            return
                        yield kind, content
            except httpx2.TransportError as error:
                broken = broken if failures else time.monotonic()
                failures += 1
                if failures > _RETRIES and not (connected and time.monotonic() - broken < _PATIENCE):
                    raise self._silent(error) from error
            time.sleep(min(8.0, 0.25 * 2**failures))

    def wait_for(self, number: int) -> dict[str, Any]:
        """Wait until a run is over, however it ends; the run."""
        for _ in self.stream(number):
            continue
        return self.run(number)

    def wait(self, number: int) -> dict[str, Any]:
        """Wait until a run is over.

        Returns:
            The run.

        Raises:
            InfeasibleError: it cannot fit, with the smallest budget and the ways out that the service has found.
        """
        run = self.wait_for(number)
        assert run["state"] in OVER
        refusal = run.get("refusal") or {}
        if refusal.get("error") == "InfeasibleError":
            remedies = tuple(Remedy(**each) for each in refusal.get("remedies", ()))
            raise InfeasibleError(
                refusal["message"],
                budget_bytes=refusal["budget_bytes"],
                minimum_bytes=refusal["minimum_bytes"],
                remedies=remedies,
            )
        return run

    def _asked(self, method: str, path: str, **named: Any) -> Any:
        answer = self._send(method, path, **named)
        try:
            return answer.json()
        except ValueError:
            _refused(answer)

    def _send(self, method: str, path: str, **named: Any) -> Any:
        try:
            answer = self._http.request(method, path, **named)
        except httpx2.TransportError as error:
            raise self._silent(error) from error
        if not answer.is_success:
            _refused(answer)
        return answer

    def _silent(self, error: Exception) -> InputError:
        return InputError(
            f"no service answers at {self.url} ({error}): start one with memfit serve, or name another with --url"
        )


def _refused(answer: Any) -> NoReturn:
    try:
        message = answer.json()["message"]
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{answer.url} answers {answer.status_code} and not as a service of memfit does: is the address right, and does nothing stand in between?"
        ) from None
    raise InputError(f"the service refuses ({answer.status_code}): {message}")


def _messages(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Server-sent events: kind, id and content."""
    told: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            told[name] = value.removeprefix(" ")
        elif "data" in told:
            yield told.get("event", "message"), told.get("id", ""), json.loads(told["data"])
            told = {}
