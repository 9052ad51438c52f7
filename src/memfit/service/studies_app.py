"""Studies over HTTP: a thin view of `memfit.service.studies`."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Header, Query
from fastapi.responses import Response, StreamingResponse

from memfit.service.http_values import LARGEST, Answer, Known, Number, SubmissionBody, attached
from memfit.service.service import Submission
from memfit.service.stored_studies import StudyState
from memfit.service.studies import Studies


def searched(app: FastAPI, studies: Studies) -> None:
    """The requests that are about studies."""

    @app.post(
        "/v1/studies",
        status_code=201,
        tags=["studies"],
        responses={200: {"description": "known under this key already"}},
    )
    def submit_study(
        body: SubmissionBody, caller: Known, idempotency_key: Annotated[str | None, Header()] = None
    ) -> Response:
        """Submit a search (a run file with `search`): its trials are runs, each planned before it starts."""
        sent = Submission(body.config, body.name, body.code, body.priority, body.plan_only, idempotency_key)
        study, new = studies.submit(caller, sent)
        return Answer(studies.described(study), 201 if new else 200)

    @app.get("/v1/studies", tags=["studies"])
    def all_studies(
        caller: Known,
        state: Annotated[list[StudyState] | None, Query()] = None,
        before: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        """Studies, the newest first."""
        return Answer([studies.described(each) for each in studies.studies(caller, state or (), before, limit)])

    @app.get("/v1/studies/{number}", tags=["studies"])
    def study(number: Number, caller: Known) -> Response:
        """One study, with its search file and its trials."""
        found = studies.study(caller, number)
        told = {"config": found.config, "trials": studies.trials(caller, number)}
        return Answer({**studies.described(found), **told})

    @app.post("/v1/studies/{number}/cancel", tags=["studies"])
    def cancel_study(number: Number, caller: Known) -> Response:
        """Have a study end, with all of its trials."""
        return Answer(studies.described(studies.cancel(caller, number)))

    @app.get("/v1/studies/{number}/artifacts", tags=["studies"])
    def study_files(number: Number, caller: Known) -> Response:
        """What it has written so far: the trials as CSV, the best run file, a report."""
        return Answer([{"name": name, "bytes": size} for name, size in studies.files(caller, number)])

    @app.get("/v1/studies/{number}/artifacts/{name}", tags=["studies"], response_class=StreamingResponse)
    def study_file(number: Number, name: str, caller: Known) -> Response:
        """One of them; never shown as a page."""
        return attached(studies.file(caller, number, name))
