"""What commands print: one JSON document, or text; and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

DONE, DONE_WITH_FAULTS, COULD_NOT_RUN = 0, 1, 2


def finish(report: Any, as_json: bool, *, has_faults: bool, text: str | None = None) -> int:
    """Print a report by its `to_json`, or as `text`, or by its `to_text`. Damage or errors make the exit code 1.

    A report without a text is printed a line each value.
    """
    document = report.to_json()
    if as_json:
        print(json.dumps(document, ensure_ascii=True))
    elif text is not None:
        print(text)
    elif hasattr(report, "to_text"):
        print(report.to_text())
    else:
        print("\n".join(_lines(document)))
    return DONE_WITH_FAULTS if has_faults else DONE


def size(num_bytes: int) -> str:
    """A number of bytes for people: `1.8 MB`."""
    number, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 pack`, `2 packs`, `3 entries`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(title: str, problems: Mapping[str, str]) -> list[str]:
    """Lines that name what has a problem, under a title; none where nothing has."""
    return [f"{title}:", *(f"  {name}: {reason}" for name, reason in problems.items())] if problems else []


def _lines(document: dict[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            value = [f"{key}: {reason}" for key, reason in value.items()]
        if isinstance(value, list):
            yield f"{name:<12} {len(value)}"
            yield from (f"             {item}" for item in value)
        else:
            yield f"{name:<12} {value:,}" if type(value) is int else f"{name:<12} {value}"


def fail(error: BaseException, as_json: bool) -> int:
    """The exit code of a command that could not run; with `--json` its error is one document."""
    if as_json:
        print(json.dumps({"error": str(error), "type": type(error).__name__}))
    return COULD_NOT_RUN
