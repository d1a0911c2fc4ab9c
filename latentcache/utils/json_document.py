"""JSON documents that any reader accepts: no NaN, no Infinity, no broken UTF-8."""

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
    """The value in JSON's own types: what reading the document gives back.

    Mappings become dicts with text keys, sequences lists, and numbers that are not finite null. Other types stay.
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
    """The document as indented UTF-8. TypeError for what JSON has no type for."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    # A sample_id from a broken archive may contain lone surrogates, which UTF-8 cannot encode. JSON can escape them.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def recalled(memo: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """What a memo has by this name; None for nothing, and for what `parse` refuses: it is then found out again."""
    try:
        return parse(memo[name])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def first_fault(error: ValidationError) -> tuple[str, object, str]:
    """What does not fit a schema: the first field's dotted name, the value met, and a sentence that has both."""
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, first["loc"]))
    more = f"; {len(others)} more fields do not fit" if others else ""
    return (
        field,
        first["input"],
        f"{field or 'the document'}: {first['msg']} (met: {reprlib.repr(first['input'])}){more}",
    )
