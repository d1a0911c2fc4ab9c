"""Connections that take their time: a client that sends its headers slowly, or reads nothing, is dropped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from latentcache.service.limits import Limits


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, for which a client has limited time. uvicorn itself waits for ever.

    A connection without a request is closed after `Limits.idle_s`; headers that are not whole after `header_s` are
    answered with 408; a client that takes no byte for `stall_s` is dropped.
    """

    limits = Limits()
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # uvicorn begins to count after the first answer.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    @override
    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._header_timer = self.loop.call_later(self.limits.header_s, self._refuse_slow_header)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_header_timer()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall_timer()

    @override
    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client never read the last answer
        else:
            super().timeout_keep_alive_handler()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def _refuse_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        allowed = self.limits.header_s
        document = {
            "type": "urn:latentcache:RequestRefused",
            "title": "Request Timeout",
            "status": 408,
            "detail": f"the headers were not whole after {allowed:g} s",
            "kind": "RequestRefused",
            "allowed": allowed,
        }
        body = json.dumps(document).encode("ascii")
        head = (
            "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/problem+json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def protocol_of(limits: Limits) -> type[H11Protocol]:
    """The protocol with these limits."""
    return type("LimitedProtocol", (ImpatientProtocol,), {"limits": limits})
