"""Who may read and who may write: tokens, browser sessions, and the check of Host and Origin."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from latentcache.errors import ConfigError, RequestRefused
from latentcache.utils.durable_files import read_small_file

SESSION_S = 24 * 3600
"""How long a browser stays logged in."""
_MAX_TOKEN_BYTES = 4096
_END = re.compile(r"[0-9]{1,12}")
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")
_SESSION = "latentcache session v1"


class Role(IntEnum):
    """What a request may do. Each role includes those before it."""

    NOTHING = 0
    READ = 1
    WRITE = 2


def token_from(file: Path | None, variable: str) -> str | None:
    """The token in a file, or without a file in an environment variable; None if neither is given.

    ConfigError, which never shows the value, if it is not a token.
    """
    if file is None:
        source, text = variable, os.environ.get(variable)
        if not text:
            return None
    else:
        source = str(file)
        try:
            # The file may be a symbolic link: mounted secrets are.
            data = read_small_file(Path(os.path.realpath(file)), _MAX_TOKEN_BYTES, "name a file with a token")
        except FileNotFoundError:
            raise ConfigError("no such file; create one with a token in it", source=source) from None
        text = data.decode("ascii", "replace")
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        step = "generate one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        message = "does not hold a token, which has 16 to 1,024 printable ASCII characters and no space"
        raise ConfigError(f"{message}; {step}", source=source)
    return token


@dataclass(frozen=True, kw_only=True)
class Access:
    """Decides what a request may do.

    Without a `reading_token` anyone may read if `is_open`; without a `writing_token` nobody may write. `hosts` are the
    names and addresses that the Host header may have; None allows all.
    """

    reading_token: str | None = field(default=None, repr=False)
    writing_token: str | None = field(default=None, repr=False)
    is_open: bool = True
    hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.reading_token is not None and self.reading_token == self.writing_token:
            raise ConfigError("the reading and the writing token are equal: every reader could write; use two tokens")

    def role(self, token: str | None, session: str | None = None) -> Role:
        """The role that a token, or the cookie of a session, gives."""
        if token is not None and _is_equal(token, self.writing_token):
            return Role.WRITE
        if self.is_open or (token is not None and _is_equal(token, self.reading_token)):
            return Role.READ
        if session is not None and self._is_session(session):
            return Role.READ
        return Role.NOTHING

    def session_of(self, token: str) -> str | None:
        """The cookie of a new session, valid for SESSION_S; None if the token is wrong.

        It consists of its expiry time and an HMAC with the token as the key, so the server stores no sessions.
        """
        is_known = _is_equal(token, self.reading_token) or _is_equal(token, self.writing_token)
        return _session_of(token, str(int(time.time()) + SESSION_S)) if is_known else None

    def _is_session(self, session: str) -> bool:
        end = session.partition(".")[0]
        if not _END.fullmatch(end) or int(end) <= time.time():
            return False
        tokens = [token for token in (self.reading_token, self.writing_token) if token is not None]
        return any(_is_equal(session, _session_of(token, end)) for token in tokens)

    def check(self, role: Role, needed: Role) -> None:
        """RequestRefused if the role is less than the needed one."""
        if role >= needed:
            return
        if needed is Role.WRITE and self.writing_token is None:
            step = "Start it with --write-token-file, or set LATENTCACHE_WRITE_TOKEN for it"
            raise RequestRefused("this server is read-only", status=403, next_step=step)
        if role is Role.READ and not self.is_open:
            raise RequestRefused("this needs the writing token, but the reading token was sent", status=403)
        which = "writing token" if needed is Role.WRITE else "token"
        step = f"Send `Authorization: Bearer TOKEN` with the server's {which}"
        raise RequestRefused(f"the {which} is missing or wrong", status=401, next_step=step)

    def check_host(self, host: str | None, origin: str | None) -> None:
        """RequestRefused if the Host or Origin is not this server's, so that another site may have made the request.

        By DNS rebinding a site can point its own name to 127.0.0.1. The browser then lets its pages read the responses.
        """
        if self.hosts is not None and (host is None or _host_name(host) not in self.hosts):
            allowed = ", ".join(sorted(self.hosts))
            step = "Use one of these names, or start the server with a token"
            raise RequestRefused(
                "the Host header does not name this server", status=421, met=host, allowed=allowed, next_step=step
            )
        if origin is not None and host is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestRefused("the request comes from a page of another site", status=403, met=origin, allowed=host)


def _host_name(host: str) -> str:
    """The name or address of a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_equal(given: str, token: str | None) -> bool:
    """Compare in constant time."""
    if token is None:
        return False
    return hmac.compare_digest(*(hashlib.sha256(each.encode("utf-8", "replace")).digest() for each in (given, token)))


def _session_of(token: str, end: str) -> str:
    signature = hmac.new(token.encode("ascii"), f"{_SESSION} {end}".encode("ascii"), hashlib.sha256)
    return f"{end}.{signature.hexdigest()}"


def cookie_of(scope: Mapping[str, Any]) -> str:
    """The name of the session cookie.

    It has the server's port, since browsers share cookies between ports: two servers would end each other's sessions.
    """
    _, port = scope.get("server") or ("", None)
    return f"latentcache_session_{port}"


def bearer_token(authorization: str | None) -> str | None:
    """The token of an Authorization header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
