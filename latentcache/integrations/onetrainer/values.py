"""What a pipeline gives for an item, as entries of a store, and back: tensors as fields, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from latentcache.errors import EntryDamagedError, EntryMissingError, PipelineError
from latentcache.fingerprint import canonical_json
from latentcache.store.base import Store, is_field

PLAIN_FIELD = "plain_values"
"""The field with the values that are no tensors: UTF-8 JSON, padded with spaces."""
PADDING = 256
"""So that entries of one kind have few different shapes: those of equal shape are read together."""


def tensors_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The fields of an entry with these values, on the CPU.

    Other values than tensors are None, bool, int, float and str, and tuples, lists and dicts (with keys of str) of
    them. Raises PipelineError for anything else, for None itself, and for tensors with NaN or Inf.
    """
    fields: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            raise PipelineError(f"the pipeline gives nothing (None) for {name!r}, which cannot be cached")
        if not isinstance(value, torch.Tensor):
            plain[name] = _encoded(name, value)
            continue
        if not is_field(name) or name == PLAIN_FIELD:
            raise PipelineError(f"{name!r} cannot name a tensor: use letters, digits and _ . - only")
        tensor = value.detach().to("cpu").contiguous()
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise PipelineError(f"{name!r} holds NaN or Inf; an encoder that overflows needs another dtype")
        fields[name] = tensor
    if plain or not fields:
        data = canonical_json(plain)
        data += b" " * (-len(data) % PADDING)
        fields[PLAIN_FIELD] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return fields


def values_of(fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `tensors_of`: tensors on the CPU, other values with the types that they had."""
    values: dict[str, Any] = dict(fields)
    data = values.pop(PLAIN_FIELD, None)
    if data is not None:
        plain = json.loads(data.numpy().tobytes())
        values |= {name: _decoded(value) for name, value in plain.items()}
    return values


def read_values(store: Store, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The values of the entries that are there and whole, by key; those of equal shape are read together."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for key in dict.fromkeys(keys):
        try:
            groups.setdefault(tuple(sorted(store.describe(key).items())), []).append(key)
        except (EntryDamagedError, EntryMissingError):
            continue  # a miss: the caller makes it anew
    found: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        found |= _read_group(store, group)
    return found


def _read_group(store: Store, keys: list[str]) -> dict[str, dict[str, Any]]:
    try:
        batch = store.read_batch(keys)
    except (EntryDamagedError, EntryMissingError):
        if len(keys) == 1:
            return {}  # a miss, as above
        middle = len(keys) // 2
        return _read_group(store, keys[:middle]) | _read_group(store, keys[middle:])
    return {key: values_of({name: rows[i] for name, rows in batch.items()}) for i, key in enumerate(keys)}


def _encoded(name: str, value: Any) -> Any:
    """JSON that keeps tuples and lists apart."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return {"tuple" if type(value) is tuple else "list": [_encoded(name, item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _encoded(name, item)] for key, item in value.items()]}
    raise PipelineError(
        f"{name!r} is a {type(value).__name__}: a tensor can be cached, and numbers, strings, tuples, lists and dicts"
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: _decoded(item) for key, item in content}
    items = [_decoded(item) for item in content]
    return tuple(items) if kind == "tuple" else items
