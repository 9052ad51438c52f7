"""The service over HTTP: a thin view of `memfit.service.service`, with an OpenAPI document, and the page."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp

import memfit
from memfit.errors import InputError
from memfit.runner.ends import tail_of
from memfit.service import demo, exports
from memfit.service.database import StoreError
from memfit.service.guarding import UPLOADS, Guarding
from memfit.service.housekeeping import Housekeeping
from memfit.service.http_values import (
    LARGEST,
    MOST_LISTED,
    USUALLY_LISTED,
    Answer,
    Known,
    Number,
    SubmissionBody,
    Told,
    attached,
)
from memfit.service.prometheus import exposition
from memfit.service.refusals import Refusal, TooLargeError
from memfit.service.run_answers import AskedOften, RunAnswers
from memfit.service.service import Service, Submission
from memfit.service.states import State
from memfit.service.streams import RunStream, followed
from memfit.service.studies import Studies
from memfit.service.studies_app import searched
from memfit.units import format_bytes

PAGE: Final = Path(__file__).parent / "page"
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_MOST_STREAMS: Final = 200
_STALE_SECONDS: Final = 15.0


def application(service: Service, studies: Studies, housekeeping: Housekeeping, hosts: Collection[str]) -> ASGIApp:
    """The application of one service.

    Args:
        service: that it is a view of.
        studies: of it.
        housekeeping: of it.
        hosts: names by which it may be called.
    """
    # A refusal is JSON, whatever the request asks for.
    told = {"description": "refused", "content": {"application/json": {"schema": Told.model_json_schema()}}}
    refusals: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 409, 413, 421, 422, 503, 507), told)
    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(
        title="memfit service",
        version=memfit.__version__,
        docs_url=None,
        redoc_url=None,
        responses=refusals,
        default_response_class=Answer,
    )
    _errors(app)
    app.state.service, app.state.streams = service, 0
    _open_to_all(app, service)
    _changes(app, service)
    _ends(app, service, housekeeping)
    answers = RunAnswers(service)
    _questions(app, service, answers)
    searched(app, studies)
    return Guarding(AskedOften(app, answers), service.store, hosts, service.settings.config_bytes)


def _errors(app: FastAPI) -> None:
    def told(status: int, error: str, message: str, headers: Any = None) -> Response:
        return Answer({"error": error, "message": message}, status, headers)

    @app.exception_handler(InputError)
    def _(_request: Request, error: InputError) -> Response:
        full = not isinstance(error, Refusal) and str(error).startswith("cannot write")
        status = (
            error.status
            if isinstance(error, Refusal)
            else 507
            if full
            else 503
            if isinstance(error, StoreError)
            else 422
        )
        return told(status, type(error).__name__, str(error))

    @app.exception_handler(OSError)
    def _(_request: Request, error: OSError) -> Response:
        return told(507, "OSError", f"the service cannot write: {error.strerror or error}; nothing was changed")

    @app.exception_handler(RequestValidationError)
    def _(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(each) for each in first["loc"])
        if where == "body":
            return told(422, "Refusal", "the body is to be a JSON object, sent with content-type: application/json")
        return told(422, "Refusal", f"{where}: {first['msg']}")

    @app.exception_handler(RecursionError)
    def _(_request: Request, _error: RecursionError) -> Response:
        return told(422, "Refusal", "the request is nested too deep to be a run file")

    @app.exception_handler(HTTPException)
    def _(request: Request, error: HTTPException) -> Response:
        headers = error.headers
        if error.status_code == 405:  # routes are looked at one by one, and the first names its own method alone
            headers = {"allow": ", ".join(sorted(_methods(app, request)))}
        return told(error.status_code, "Refusal", str(error.detail), headers)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods that a path is for."""
    return {
        method
        for route in app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def _open_to_all(app: FastAPI, service: Service) -> None:
    """What needs no token, and tells nothing of anybody's runs."""

    @app.get("/healthz", tags=["operations"])
    def alive() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive", "version": memfit.__version__}

    @app.get("/readyz", tags=["operations"])
    def ready() -> Response:
        """Runs are taken, planned and started."""
        view = service.dispatcher.view
        why = view.error or (
            "it is being drained, or about to end: it starts nothing new" if service.dispatcher.draining else ""
        )
        if not why and time.time() - view.made > _STALE_SECONDS:
            why = "it has not looked at its runs for a while"
        return Answer({"status": why or "ready"}, 503 if why else 200)

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return FileResponse(PAGE / "index.html", media_type="text/html")

    for file in sorted(PAGE.iterdir()):
        if file.suffix in _KINDS and file.name != "index.html":
            _file(app, file)


def _file(app: FastAPI, file: Path) -> None:
    @app.get(f"/page/{file.name}", include_in_schema=False)
    def part() -> Response:
        return FileResponse(file, media_type=_KINDS[file.suffix])


def _changes(app: FastAPI, service: Service) -> None:
    @app.post(
        UPLOADS,
        status_code=201,
        tags=["runs"],
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def upload(request: Request, caller: Known) -> Response:
        """Send a folder of code, as a zip archive; the answer's `code` goes into submissions."""
        from anyio import to_thread

        caller.check_submits()
        handle, name = tempfile.mkstemp(prefix="upload-", dir=service.settings.folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                left = service.settings.upload.bytes
                async for chunk in request.stream():
                    left -= len(chunk)
                    if left < 0:
                        raise TooLargeError(f"the upload has more than {format_bytes(service.settings.upload.bytes)}")
                    stream.write(chunk)
            found = await to_thread.run_sync(service.upload, caller, Path(name))
        finally:
            os.unlink(name)  # noqa: PTH108 - one system call, not a wait
        return Answer({"code": found.digest, "bytes": found.bytes, "files": found.files}, 201)

    @app.post(
        "/v1/runs", status_code=201, tags=["runs"], responses={200: {"description": "known under this key already"}}
    )
    def submit(
        body: SubmissionBody, caller: Known, idempotency_key: Annotated[str | None, Header()] = None
    ) -> Response:
        """Submit a run: it is planned, and then runs or is refused."""
        sent = Submission(body.config, body.name, body.code, body.priority, body.plan_only, idempotency_key)
        run, new = service.submit(caller, sent)
        return Answer(service.described(run), 201 if new else 200)

    def changing(verb: str, text: str) -> None:
        @app.post(f"/v1/runs/{{number}}/{verb}", name=verb, description=text, tags=["runs"])
        def change(number: Number, caller: Known) -> Response:
            return Answer(service.described(getattr(service, verb)(caller, number)))

    changing("cancel", "Have a run end for good.")
    changing("pause", "Have a run stop with a snapshot, and give its bytes back.")
    changing("resume", "Put a paused run back into the queue.")


def _ends(app: FastAPI, service: Service, housekeeping: Housekeeping) -> None:
    @app.post("/v1/runs/{number}/remove", tags=["runs"])
    def remove(number: Number, caller: Known) -> Response:
        """Have the files of a run that is over removed; the run itself stays known."""
        return Answer(service.described(housekeeping.remove(caller, number)))

    @app.post("/v1/drain", tags=["operations"])
    def drain(caller: Known, on: bool = True) -> Response:  # noqa: FBT001, FBT002 - a query
        """Take and start nothing new, or do so again; what runs goes on."""
        return Answer({"draining": on, "running": service.drain(caller, on=on)})


def _questions(app: FastAPI, service: Service, answers: RunAnswers) -> None:
    @app.get("/v1/me", tags=["operations"])
    def me(caller: Known) -> Response:
        """Whose token this is, what it may do, and a run file to begin with, where the service has one."""
        return Answer({**asdict(caller), "example": demo.RUN if demo.MODULE in service.settings.modules else None})

    @app.get("/v1/devices", tags=["operations"])
    def devices(caller: Known) -> Response:
        """Each device and tier, with the runs on it over time."""
        return Answer({"now": time.time(), "devices": service.devices(caller)})

    @app.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
    def metrics(caller: Known) -> Response:  # noqa: ARG001 - that there is one is enough
        """Figures for Prometheus."""
        return Response(exposition(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/runs", tags=["runs"])
    async def runs(
        caller: Known,
        state: Annotated[list[State] | None, Query()] = None,
        before: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = USUALLY_LISTED,
    ) -> Response:
        """Runs, the newest first."""
        return Response(answers.newest(caller, state or (), before, limit), media_type="application/json")

    @app.get("/v1/runs/{number}", tags=["runs"])
    async def run(number: Number, caller: Known) -> Response:
        """One run, with its run file and what happened to it."""
        return Response(answers.one(caller, number), media_type="application/json")

    @app.get("/v1/runs/{number}/plan", tags=["runs"])
    def plan(number: Number, caller: Known) -> Response:
        """The plan, in figures and in words."""
        return Answer({"plan": service.run(caller, number).plan, "text": service.words(caller, number)})

    @app.get("/v1/runs/{number}/export", tags=["runs"], response_class=PlainTextResponse)
    def export(
        number: Number,
        caller: Known,
        kind: Annotated[str, Query(json_schema_extra={"enum": list(exports.KINDS)})] = "slurm",
        image: str = "",
    ) -> Response:
        """A run for another scheduler, with the bytes of its plan: `slurm`, or `trainjob` with an image."""
        return PlainTextResponse(service.exported(caller, number, kind, image))

    @app.get("/v1/runs/{number}/output", tags=["runs"], response_class=PlainTextResponse)
    def output(number: Number, caller: Known, errors: bool = True) -> Response:  # noqa: FBT001, FBT002 - a query
        """The end of what a run has printed to standard error, where progress goes; or to standard output."""
        return PlainTextResponse(tail_of(service.output(caller, number, errors=errors)))

    @app.get("/v1/runs/{number}/stream", tags=["runs"], response_class=StreamingResponse)
    async def stream(number: Number, caller: Known, last_event_id: Annotated[str, Header()] = "") -> Response:
        """A run as it goes on (server-sent events): `run`, `event`, `metrics`, `output`, and `end`."""
        if app.state.streams >= _MOST_STREAMS:
            raise HTTPException(503, f"{_MOST_STREAMS} streams are open, as many as the service keeps: try again later")
        found = RunStream(service, caller, number, last_event_id)

        async def sent() -> Any:
            app.state.streams += 1
            try:
                async for message in followed(found):
                    yield message
            finally:
                app.state.streams -= 1

        return StreamingResponse(sent(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/v1/runs/{number}/artifacts", tags=["runs"])
    def artifacts(number: Number, caller: Known) -> Response:
        """Files that a run has written."""
        return Answer([{"name": name, "bytes": size} for name, size in service.artifacts(caller, number)])

    @app.get("/v1/runs/{number}/artifacts/{name:path}", tags=["runs"], response_class=StreamingResponse)
    def artifact(number: Number, name: str, caller: Known) -> Response:
        """One of them; never shown as a page."""
        return attached(service.artifact(caller, number, name))
