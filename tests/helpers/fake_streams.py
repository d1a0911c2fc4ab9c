"""A fake device module with streams for the CPU. It logs who waits for what, and never waits itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """Fake device module that logs its calls and counts events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ended: set[int] = set()
        """Finished events. The test adds some, and waiting for an event adds it."""
        self.num_events = 0
        self.num_streams = 0

    def Stream(self, device: torch.device) -> Side:
        self.num_streams += 1
        return Side(self, f"side {self.num_streams}")

    def current_stream(self, device: torch.device) -> Side:
        return Side(self, "current")

    @contextmanager
    def stream(self, stream: Side) -> Any:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    def Event(self, *, blocking: bool = False) -> Event:
        self.num_events += 1
        return Event(self, self.num_events, blocking)


class Side:
    def __init__(self, streams: Streams, name: str):
        self.streams, self.name = streams, name

    def record_event(self) -> Event:
        event = self.streams.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.number}")

    def synchronize(self) -> None:
        self.streams.log.append(f"host waits for {self.name}")


class Event:
    def __init__(self, streams: Streams, number: int, blocking: bool):
        self.streams, self.number, self.blocking = streams, number, blocking

    def record(self, stream: Side) -> None:
        self.streams.log.append(f"{stream.name} records {self.number}")

    def query(self) -> bool:
        return self.number in self.streams.ended

    def synchronize(self) -> None:
        self.streams.ended.add(self.number)
        self.streams.log.append(f"host {'sleeps' if self.blocking else 'spins'} for {self.number}")
