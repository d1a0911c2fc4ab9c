"""Strict JSON documents that any parser accepts: no NaN, no Infinity, no invalid UTF-8."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from pydantic import ValidationError

T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Convert a value to JSON's own types, as parsing the document would return it.

    Mappings become dicts with string keys, tuples become lists, non-finite numbers become null. Other values stay.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Integral):
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return value


def to_bytes(value: Any) -> bytes:
    """Serialize a value as indented UTF-8. TypeError if JSON has no type for a part of it."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    # A sample_id from a broken archive may contain lone surrogates, which UTF-8 cannot encode but JSON can escape.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def recalled(memo: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """Parse what a memo has under this name. None if there is nothing or `parse` refuses it, so recompute it then."""
    try:
        return parse(memo[name])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def first_fault(error: ValidationError) -> tuple[str, object, str]:
    """The first field that does not fit a schema: its dotted name, its value, and a message with both."""
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, first["loc"]))
    more = f"; {len(others)} more fields are invalid" if others else ""
    return (
        field,
        first["input"],
        f"{field or 'the document'}: {first['msg']} (met: {reprlib.repr(first['input'])}){more}",
    )
