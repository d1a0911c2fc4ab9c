"""Rows of packs in a bucket that do not count any more. Packs are immutable: small objects in `marks/` list these rows.

A key that is added again lies in a new pack, and counts. An object whose packs are all gone is removed by upkeep.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from latentcache.identity import canonical_json, digest
from latentcache.remote.bucket import Bucket, in_threads
from latentcache.store.base import is_pack_id
from latentcache.store.layout import PackRow

FOLDER = "marks"
_MAX_REASON_CHARS = 500

Marks = Mapping[str, Mapping[int, str]]
"""Rows that do not count any more, by pack, and why: an empty text for a removed one, a reason for a damaged one.

A pack without rows does not say what it holds.
"""

logger = logging.getLogger("latentcache")


def write_marks(bucket: Bucket, marks: Marks) -> str:
    """Write an object with these marks, which all readers honour. Returns its name."""
    name = f"{FOLDER}/{time.time_ns():016x}{uuid.uuid4().hex[:16]}.json"
    rows = {pack: {str(at): why[:_MAX_REASON_CHARS] for at, why in each.items()} for pack, each in marks.items()}
    value = {"rows": rows}
    bucket.put(name, json.dumps(value | {"digest": digest(canonical_json(value))}).encode())
    return name


def read_marks(bucket: Bucket, known: Mapping[str, Marks] | None = None) -> dict[str, Marks]:
    """All marks, by the name of their object. Objects are immutable: those that are `known` are not read again."""
    known = known or {}
    names = [name for name in bucket.names(FOLDER) if name.endswith(".json")]
    marks = {name: known[name] for name in names if name in known}
    new = [name for name in names if name not in known]
    for name, found in zip(new, in_threads(bucket.read, new), strict=True):
        if found is not None:
            marks[name] = _parsed(bytes(found.data), f"{bucket.url}/{name}")
    return marks


def _parsed(data: bytes, source: str) -> Marks:
    """What `write_marks` wrote. Nothing, with a warning, for anything else: then removed entries count again."""
    try:
        value: Any = json.loads(data)
        stored = value.pop("digest")
        if stored != digest(canonical_json(value)):
            raise ValueError("its digest differs")
        marks = {pack: {int(at): str(why) for at, why in rows.items()} for pack, rows in value["rows"].items()}
        if not all(map(is_pack_id, marks)) or any(at < 0 for rows in marks.values() for at in rows):
            raise ValueError("it names what is no row of a pack")
        return marks
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s says nothing of removed entries (%s): they count again. Remove it.", source, error)
        return {}


def marked(row: PackRow, marks: Iterable[Marks]) -> PackRow:
    """The row of a pack, in which what was removed or found damaged is not live."""
    found: dict[int, str] = {}
    for each in marks:
        for at, reason in each.get(row.pack.id, {}).items():
            if at < len(row.live) and found.get(at) != "":  # what was removed stays so
                found[at] = reason
    row.live[list(found)] = False
    row.reasons = {at: reason for at, reason in found.items() if reason}
    return row


def sweep_marks(bucket: Bucket, marks: Mapping[str, Marks]) -> None:
    """Remove the objects of these marks that are about no pack which is there."""
    packs = bucket.packs() if marks else {}  # after the marks: some may be about packs that came just before them
    bucket.remove([name for name, each in marks.items() if each and each.keys().isdisjoint(packs)])
