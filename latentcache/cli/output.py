"""What commands print: one JSON document, or text; and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

DONE, DONE_WITH_FAULTS, COULD_NOT_RUN = 0, 1, 2


class Printable(Protocol):
    """A report that a command prints."""

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON document."""
        ...

    def to_text(self) -> str:
        """The report for people."""
        ...


def finish(report: Printable, as_json: bool, *, has_faults: bool) -> int:
    """Print a report. Refusals, damage or errors in it make the exit code 1."""
    print_result(report.to_json(), report.to_text, as_json)
    return DONE_WITH_FAULTS if has_faults else DONE


def finish_upkeep(report: Any, as_json: bool) -> int:
    """Print an upkeep report, a line each value; damage makes the exit code 1."""
    document = report.to_json()
    print_result(document, lambda: "\n".join(_lines(document)), as_json)
    faults = ("damaged", "known_damaged", "unreadable")
    return DONE_WITH_FAULTS if any(document.get(name) for name in faults) else DONE


def _lines(document: dict[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            value = [f"{key}: {reason}" for key, reason in value.items()]
        if isinstance(value, list):
            yield f"{name:<12} {len(value)}"
            yield from (f"             {item}" for item in value)
        else:
            yield f"{name:<12} {value:,}" if type(value) is int else f"{name:<12} {value}"


def print_result(document: Any, text: Callable[[], str], as_json: bool) -> None:
    """Print the document as JSON, or what `text` returns."""
    print(json.dumps(document, ensure_ascii=True) if as_json else text())


def fail(error: BaseException, as_json: bool) -> int:
    """The exit code of a command that could not run; with `--json` its error is one document."""
    if as_json:
        print(json.dumps({"error": str(error), "type": type(error).__name__}))
    return COULD_NOT_RUN
