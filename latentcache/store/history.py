"""Moments in the life of an index, so that a reader who knows one reads only what came later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in an index's life. As long as no row is removed or replaced, later ones can be read alone.

    `history` is random text, new with each such change. The other values tell an index that was put back from a copy,
    or changed by a version that keeps no history: the last row's number and digest, and the number of rows.
    """

    history: str
    last_row: int
    last_digest: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Rows in parts, oldest first, and the moment that they bring their reader to.

    `point` is None if a version wrote the index that keeps no history.
    """

    point: Point | None
    pages: Iterator[list[tuple[str, str]]]
