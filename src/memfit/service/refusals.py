"""What the service refuses of a client, with the status of HTTP that says so."""

from __future__ import annotations

from memfit.errors import InputError


class Refusal(InputError):  # noqa: N818 - what it says is no error of anybody's program
    """A request cannot be followed as it is.

    Attributes:
        status: of HTTP.
    """

    status = 422


class NotKnownError(Refusal):
    """There is no such thing, or it belongs to somebody else: the two are not told apart."""

    status = 404


class NotNowError(Refusal):
    """What is asked does not go with the state of things: another body under the same key, a pause of what is over."""

    status = 409


class NotAllowedError(Refusal):
    """The token is right, and its role is not enough."""

    status = 403


class TooLargeError(Refusal):
    """More bytes, files or runs than the service takes."""

    status = 413


class DrainingError(Refusal):
    """The service takes nothing new for now."""

    status = 503
