"""What requests and answers of the service are made of, whatever they are about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Annotated, Any, Final

from fastapi import Depends, Request
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from memfit.service.tokens import Caller

_CHUNK: Final = 1 << 20
LARGEST: Final = 2**62  # a number of a run; SQLite's are below 2**63
MOST_LISTED: Final = 500  # runs in one answer
USUALLY_LISTED: Final = 100

Number = Annotated[int, InPath(ge=1, le=LARGEST, description="of the run")]


class Answer(JSONResponse):
    """JSON in ASCII, so that whatever a client sent can be sent back."""

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return json.dumps(content, allow_nan=False).encode("ascii")


class SubmissionBody(BaseModel):
    """A run to submit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    config: dict[str, Any] = Field(description="content of a run file, as `memfit train` reads it")
    name: str = Field("", description="to call it by")
    code: str | None = Field(None, description="digest that POST /v1/uploads has answered")
    priority: int = Field(0, description="from -100 to 100; higher goes first, above 0 is for admins")
    plan_only: bool = Field(False, description="find out whether it fits, and run nothing")


class Told(BaseModel):
    """Why a request was not followed."""

    error: str
    message: str


_BEARER: Final = HTTPBearer(auto_error=False)


async def known(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> Caller:
    """Whose token a request carries."""
    found = None if given is None else request.app.state.service.tokens.caller(given.credentials)
    if found is None:
        raise HTTPException(
            401, "a bearer token is needed, and this is none that is good", {"WWW-Authenticate": "Bearer"}
        )
    request.scope["state"]["caller"] = found.name
    assert isinstance(found, Caller)
    return found


Known = Annotated[Caller, Depends(known)]


def attached(opened: IO[bytes]) -> StreamingResponse:
    """A file that a run has written, as a download: never shown as a page."""
    headers = {"content-disposition": "attachment", "content-security-policy": "default-src 'none'; sandbox"}
    return StreamingResponse(_chunks(opened), media_type="application/octet-stream", headers=headers)


def _chunks(opened: IO[bytes]) -> Iterator[bytes]:
    """A file in pieces, closed at its end."""
    with opened:
        while chunk := opened.read(_CHUNK):
            yield chunk
