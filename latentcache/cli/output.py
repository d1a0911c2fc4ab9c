"""What commands print: one JSON document, or text; and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

DONE, DONE_WITH_FAULTS, COULD_NOT_RUN = 0, 1, 2


def finish(report: Any, as_json: bool, *, has_faults: bool) -> int:
    """Print a report by its `to_json` or `to_text`. Refusals, damage or errors in it make the exit code 1.

    A report without `to_text` is printed a line each value.
    """
    document = report.to_json()
    if as_json:
        print(json.dumps(document, ensure_ascii=True))
    elif hasattr(report, "to_text"):
        print(report.to_text())
    else:
        print("\n".join(_lines(document)))
    return DONE_WITH_FAULTS if has_faults else DONE


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
