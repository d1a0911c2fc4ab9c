"""How far a precache run is, for another process that looks: a note in the memo, compared with the store's counts."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from latentcache.precache.workspace import Memo, Workspace, look_up
from latentcache.provenance import now
from latentcache.utils.json_document import recalled

_NAME = "progress/1"
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class RunNote:
    """When a run began to encode (ISO 8601), by which process, how many entries it misses and how many there were."""

    begun: str
    num_misses: _Count
    num_entries: _Count
    host: str
    pid: Annotated[int, Field(gt=0)]

    def num_done(self, num_entries: int) -> int:
        """How many of the misses are there by now, when the store has so many entries."""
        return max(0, min(self.num_misses, num_entries - self.num_entries))

    def seconds(self) -> float:
        """Seconds since it began."""
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.begun)).total_seconds())

    def is_alive(self) -> bool | None:
        """Whether its process runs. None: it is, or was, on another machine."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is another user's
            return True
        return True


_NOTE = TypeAdapter(RunNote)


def write_note(workspace: Workspace, num_misses: int) -> None:
    """Note that a run begins to encode so many entries. A memo in memory is not written: nobody else could look."""
    if isinstance(workspace.memo, Memo):
        num_entries = sum(workspace.store.stats().num_entries.values())
        note = RunNote(now(), num_misses, num_entries, socket.gethostname(), os.getpid())
        workspace.memo[_NAME] = json.dumps(asdict(note))
        workspace.memo.flush()


def read_note(path: Path) -> RunNote | None:
    """The note of the last run in the memo at `path`, if there is one."""
    text = look_up(path, _NAME)
    return None if text is None else recalled({_NAME: text}, _NAME, _parse)


def _parse(text: str) -> RunNote:
    note = _NOTE.validate_json(text)
    if datetime.fromisoformat(note.begun).tzinfo is None:
        raise ValueError(f"{note.begun!r:.40} has no time zone")
    return note
