"""Formats numbers and lists for messages."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 5
"""How many samples of one kind a text report names."""


def size(num_bytes: int) -> str:
    """Format a number of bytes: `1.8 MB`."""
    number, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 pack`, `2 packs`, `3 entries`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def first_of(names: Sequence[str], count: int) -> str:
    """Join the names, followed by dots if `count` is larger: `a, b, ...`."""
    return ", ".join(names) + (", ..." if count > len(names) else "")


def short(text: str) -> str:
    """Shorten a text to at most 100 characters."""
    return text if len(text) <= 100 else f"{text[:97]}..."


def cut_note(count: int, sample_ids: Sequence[str]) -> str:
    """Say how many samples have truncated captions, and name the first ones."""
    verb = "has" if count == 1 else "have"
    ends = "a caption that is cut because it is longer than the text encoders read"
    return f"{counted(count, 'sample')} {verb} {ends}: {first_of(sample_ids, count)}"
