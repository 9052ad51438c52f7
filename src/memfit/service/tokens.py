"""Who may do what: bearer tokens with a name and a role. The store has their digests alone, so whoever reads it has no token."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from typing import Final, Literal, get_args

from memfit.errors import InputError
from memfit.service.refusals import NotAllowedError
from memfit.service.store import ServiceStore

Role = Literal["read", "submit", "admin"]
ROLES: Final = get_args(Role)
_REMEMBERED: Final = 1000  # tokens
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: whose runs they are.
        role: "read" sees all runs and changes none; "submit" sees and changes their own; "admin" sees and changes all.
    """

    name: str
    role: Role

    @property
    def sees(self) -> str | None:
        """Whose runs they see; None for everybody's."""
        return self.name if self.role == "submit" else None

    def may_change(self, owner: str) -> bool:
        """Whether they may change a run of somebody."""
        return self.role == "admin" or (self.role == "submit" and self.name == owner)

    def check_submits(self) -> None:
        """Check that they may submit.

        Raises:
            NotAllowedError: they may not.
        """
        if self.role == "read":
            raise NotAllowedError("this token may read and not submit: ask for one with the role submit")


class Tokens:
    """The tokens of one service."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        # By digest: whose it is, until when, and the version of the store that said so.
        self._found: dict[str, tuple[Caller, float | None, object]] = {}

    def make(self, name: str, role: str, days: float | None = None) -> str:
        """A new token; it is told here and never again.

        Args:
            name: whose it is: small letters, digits, dots, dashes.
            role: see `Caller`.
            days: that it is good for; None for as long as it is not taken back.

        Raises:
            InputError: the name or role cannot be, or the store cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is no name for a token: use small letters, digits, dots and dashes, 32 at most")
        if role not in ROLES:
            raise InputError(f"{role!r} is no role: there are {', '.join(ROLES)}")
        token, now = f"memfit_{secrets.token_urlsafe(32)}", time.time()
        expires = None if days is None else now + days * 86400
        with self._store.writing() as connection:
            connection.execute(
                "INSERT INTO tokens (digest, owner, role, made, expires) VALUES (?, ?, ?, ?, ?)",
                (_digest(token), name, role, now, expires),
            )
        return token

    def caller(self, token: str, version: object | None = None) -> Caller | None:
        """Whose token it is; None where it is none of ours, or has expired.

        Args:
            token: as it was sent.
            version: of the store, as it is now: what it said at the same version is not asked again. None to ask in any case.
        """
        digest = _digest(token)
        found = self._found.get(digest) if version is not None else None
        if found is None or found[2] != version:
            rows = self._store.read("SELECT owner, role, expires FROM tokens WHERE digest=?", (digest,))
            if not rows:
                return None
            found = Caller(rows[0]["owner"], rows[0]["role"]), rows[0]["expires"], version
            if version is not None:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[digest] = found
        caller, expires, _ = found
        return None if expires is not None and expires < time.time() else caller

    def take_back(self, name: str) -> int:
        """All tokens of somebody are good for nothing any more; how many there were."""
        with self._store.writing() as connection:
            return connection.execute("DELETE FROM tokens WHERE owner=?", (name,)).rowcount

    def forget(self, token: str) -> None:
        """One token is good for nothing any more."""
        with self._store.writing() as connection:
            connection.execute("DELETE FROM tokens WHERE digest=?", (_digest(token),))


def _digest(token: str) -> str:
    # Of 256 random bits: there is nothing to guess, so nothing slows a guess down.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
