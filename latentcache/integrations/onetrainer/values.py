"""The values of an item as the fields of an entry, and back: tensors as they are, other values as one field of JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from latentcache.errors import EntryDamagedError, EntryMissingError, PipelineError
from latentcache.identity import digest
from latentcache.store.base import Store, is_field
from latentcache.store.stacking import read_batch

PLAIN_FIELD = "plain_values"
"""The field with the values that are no tensors: UTF-8 JSON, padded with spaces."""
PADDING = 256
"""Bytes to which the JSON is padded: entries of few different lengths are read together."""


def fields_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The fields of an entry with these values, on the CPU.

    A value is a tensor, or plain: bool, int, float, str, or a tuple, list or dict (with keys of str) of these and None.
    Raises PipelineError for anything else, and for tensors with NaN or Inf.
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
        data = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")
        data += b" " * (-len(data) % PADDING)
        fields[PLAIN_FIELD] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return fields


def values_of(fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `fields_of`: tensors on the CPU, other values with the types that they had."""
    values: dict[str, Any] = dict(fields)
    data = values.pop(PLAIN_FIELD, None)
    return values if data is None else values | _plain_values(data.numpy().tobytes())


class PlainValues:
    """The plain values of entries, by key. They are kept in memory: all are needed before the first batch.

    `memo` keeps copies, each with its digest, so that a new process need not read every entry.
    """

    def __init__(self, store: Store, memo: MutableMapping[str, str]):
        self._store, self._memo = store, memo
        self._values: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        """The plain values of an entry; None if they were not loaded."""
        return self._values.get(key)

    def load(self, keys: Collection[str]) -> set[str]:
        """Load the values of these entries, and drop all others. Returns the keys of missing and damaged entries."""
        self._values = {key: self._values[key] for key in keys if key in self._values}
        missing = set()
        for key in keys:
            if key not in self._values:
                try:
                    self._values[key] = self._copy(key) or self._read(key)
                except (EntryDamagedError, EntryMissingError):
                    missing.add(key)  # the caller encodes them again
        return missing

    def _copy(self, key: str) -> dict[str, Any] | None:
        """The values from the memo; None if it has none, or a damaged copy."""
        found, _, text = self._memo.get(_memo_name(key), "").partition(" ")
        data = text.encode()
        return _plain_values(data) if data and digest(data) == found else None

    def _read(self, key: str) -> dict[str, Any]:
        if PLAIN_FIELD not in self._store.describe(key):
            return {}
        data = read_batch(self._store, [key], [PLAIN_FIELD])[PLAIN_FIELD][0].numpy().tobytes().rstrip()
        self._memo[_memo_name(key)] = f"{digest(data)} {data.decode()}"
        return _plain_values(data)


def _memo_name(key: str) -> str:
    return f"onetrainer-values/1 {key}"


def _plain_values(data: bytes) -> dict[str, Any]:
    return {name: _decoded(value) for name, value in json.loads(data).items()}


def _encoded(name: str, value: Any) -> Any:
    """A plain value as JSON: containers are objects with one key, which names their type."""
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
