"""An entry as a store owns it: its names and dtypes, its bytes and their digest, its record as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from latentcache.errors import StoreError
from latentcache.identity import canonical_json, digest, is_key, key_of
from latentcache.types import Entry, Record

if TYPE_CHECKING:
    import torch

MAX_RECORD_BYTES = 1 << 20
"""Identity and provenance of one entry, as JSON. A pack holds thousands of them."""

PACK_SUFFIX = ".safetensors"

ALIGNMENT = 64
"""Bytes. Fields in packs and in pooled buffers start at its multiples, as torch's own tensors do."""

_STAND_INS = {"float8_e4m3fn": "int8", "float8_e5m2": "int8", "bfloat16": "int16"}
ARRAY_DTYPES = {
    name: np.dtype(_STAND_INS.get(name, name))
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    )
}
"""The dtypes that can be stored, by torch's name, and numpy's for each: an integer of that size where it has none."""

_MAX_DESCRIPTIONS = 4096  # a real cache has some dozens: fields, buckets and dtypes
_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_PACK_ID = re.compile(r"[0-9a-f]{32}")


def is_field(value: object) -> bool:
    """Whether the value can name a field: letters, digits and _ . - only, 100 at most."""
    return isinstance(value, str) and _FIELD.fullmatch(value) is not None


def is_pack_id(value: object) -> bool:
    """Whether the value can name a pack: 32 lower-case hexadecimal digits. So it can never be a path."""
    return isinstance(value, str) and _PACK_ID.fullmatch(value) is not None


def check_key(key: str) -> str:
    """Return the key. StoreError unless it is 64 lower-case hexadecimal digits."""
    if not is_key(key):
        shown = repr(key) if len(repr(key)) <= 100 else repr(key)[:100] + "..."
        raise StoreError(f"key {shown} is not a key: 64 lower-case hexadecimal digits, as identity.key_of gives them")
    return key


def dtype_name(value: torch.Tensor | torch.dtype) -> str:
    """`float16` for torch.float16, and for a tensor of it."""
    return str(getattr(value, "dtype", value)).removeprefix("torch.")


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as an array of the same shape that shares its memory, of the dtype in ARRAY_DTYPES."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    stand_in = _STAND_INS.get(dtype_name(tensor))
    if stand_in is not None:
        import torch

        tensor = tensor.view(getattr(torch, stand_in))
    return tensor.numpy()


Description = Mapping[str, tuple[str, tuple[int, ...]]]
"""Field -> (dtype name, shape), in the order of the names."""


def payload_digest(key: str, description: Description, arrays: Iterable[np.ndarray]) -> bytes:
    """xxh3-128 of the key, each field's name, dtype name and shape, and the bytes of their arrays: 16 bytes.

    Key, names and shapes are part of it, so that rows or keys that were exchanged are found too.
    """
    # As canonical_json([key, fields]): many entries have the same fields.
    hasher = xxhash.xxh3_128(b'["%b",%b]' % (key.encode(), _fields_json(tuple(description.items()))))
    for array in arrays:
        hasher.update(array.data)
    return hasher.digest()


@lru_cache
def _fields_json(fields: tuple[tuple[str, tuple[str, tuple[int, ...]]], ...]) -> bytes:
    return canonical_json([[name, dtype, list(shape)] for name, (dtype, shape) in fields])


@lru_cache(_MAX_DESCRIPTIONS)
def description_of(*fields: tuple[str, str, tuple[int, ...]]) -> Description:
    """The description with these fields (name, dtype, shape). Equal ones are the same object: never change one."""
    return {name: (dtype, shape) for name, dtype, shape in fields}


class EntryArrays(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One entry's verified bytes: an array [1, *shape] for each field of `description`, in its order.

    Arrays are of the dtypes in ARRAY_DTYPES and must not be written to. Entries with equal fields share one
    description. There may be very many of these in memory.
    """

    description: Description
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class OwnedEntry:
    """An entry that is to be written: its record as JSON, its values, which nobody changes, and its ragged fields."""

    key: str
    kind: str
    record: bytes
    values: EntryArrays
    ragged: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return sum(array.nbytes for array in self.values.arrays)

    def spec(self) -> tuple[Any, ...]:
        """What entries of one group of a pack share: the kind, and each field's name, dtype, shape and raggedness."""
        fields = []
        for name, (dtype, shape) in self.values.description.items():
            is_ragged = name in self.ragged
            fields.append((name, dtype, shape[1:] if is_ragged else shape, is_ragged))
        return self.kind, tuple(fields)

    def digest(self) -> bytes:
        """The payload's digest."""
        return payload_digest(self.key, self.values.description, self.values.arrays)


def own_entry(entry: Entry) -> OwnedEntry:
    """A copy that the store owns.

    StoreError if the key does not follow from the identity, if a tensor is not a dense CPU tensor of a known dtype
    with at least one element, or if the record is not JSON or larger than MAX_RECORD_BYTES.
    """
    record = entry.record
    key = check_key(record.key)
    if not isinstance(record.kind, str) or not _KIND.fullmatch(record.kind):
        raise StoreError(f"entry {key}: kind {record.kind!r:.100}: a kind is up to 32 of a-z, 0-9, _ and -")
    try:
        identity, provenance = canonical_json(record.identity), canonical_json(record.provenance)
    except (TypeError, ValueError) as error:
        raise StoreError(f"entry {key}: identity and provenance must be JSON: {error}") from error
    num_bytes = len(identity) + len(provenance)
    if num_bytes > MAX_RECORD_BYTES:
        raise StoreError(f"entry {key}: its record has {num_bytes:,} bytes, at most {MAX_RECORD_BYTES:,} are allowed")
    if digest(identity) != key:
        raise StoreError(f"entry {key}: its identity gives the key {digest(identity)}; use identity.key_of(identity)")
    if not entry.tensors:
        raise StoreError(f"entry {key}: it holds no tensor")
    if not entry.ragged <= entry.tensors.keys():
        raise StoreError(f"entry {key}: ragged {sorted(entry.ragged)} names fields that it lacks")
    for name in entry.ragged:
        if entry.tensors[name].ndim == 0:
            raise StoreError(f"entry {key}: field {name} is a scalar, and has no length that could be ragged")
    names = sorted(entry.tensors)
    arrays = tuple([_own_array(key, name, entry.tensors[name]) for name in names])
    fields = [(name, dtype_name(entry.tensors[name]), tuple(entry.tensors[name].shape)) for name in names]
    values = EntryArrays(description_of(*fields), arrays)
    return OwnedEntry(key, record.kind, record_json(identity, provenance), values, entry.ragged)


def record_json(identity: bytes, provenance: bytes) -> bytes:
    """The JSON of a record, of that of its two parts."""
    return b'{"identity":%b,"provenance":%b}' % (identity, provenance)


def record_of(key: str, kind: str, data: bytes) -> Record:
    """The record that `own_entry` wrote. ValueError for other bytes, and if its identity gives another key."""
    if len(data) > MAX_RECORD_BYTES + len(record_json(b"", b"")):
        raise ValueError(f"its record has {len(data):,} bytes, {MAX_RECORD_BYTES:,} are allowed")
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
        identity, provenance = value["identity"], value["provenance"]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a record: {error!r:.100}") from error
    if not isinstance(identity, dict) or not isinstance(provenance, dict) or key_of(identity) != key:
        raise ValueError("the record's identity gives another key")
    return Record(key, kind, identity, provenance)


def _own_array(key: str, name: str, tensor: torch.Tensor) -> np.ndarray:
    import torch  # here: `status` and its like make no entry, and need not wait for it

    if not is_field(name):
        raise StoreError(f"entry {key}: field {name!r}: a name has letters, digits and _ . - only, 100 at most")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise StoreError(f"entry {key}: field {name} is {tensor.layout} on {tensor.device}; give a dense tensor on cpu")
    if dtype_name(tensor) not in ARRAY_DTYPES:
        raise StoreError(f"entry {key}: field {name} has dtype {tensor.dtype}, allowed: {', '.join(ARRAY_DTYPES)}")
    if tensor.numel() == 0:
        raise StoreError(f"entry {key}: field {name} of shape {tuple(tensor.shape)} has no element")
    return as_array(tensor.detach().clone(memory_format=torch.contiguous_format))[None]
