"""An entry in the form that stores keep: field names and dtypes, bytes and their digest, and the record as JSON."""

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
from latentcache.utils.wording import short

if TYPE_CHECKING:
    import torch

MAX_RECORD_BYTES = 1 << 20
"""Upper bound for the identity and provenance of one entry, as JSON. A pack holds thousands of them."""

PACK_SUFFIX = ".safetensors"

ALIGNMENT = 64
"""Fields in packs and in pooled buffers start at multiples of this many bytes, as torch's own tensors do."""

_STAND_INS = {"float8_e4m3fn": "int8", "float8_e5m2": "int8", "bfloat16": "int16"}
ARRAY_DTYPES = {
    name: np.dtype(_STAND_INS.get(name, name))
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    )
}
"""The numpy dtype for each dtype that can be stored, by torch's name. Dtypes that numpy lacks use an integer type."""

_MAX_DESCRIPTIONS = 4096  # a real cache has a few dozen: combinations of fields, buckets and dtypes
_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_PACK_ID = re.compile(r"[0-9a-f]{32}")


def is_field(value: object) -> bool:
    """Whether the value is a valid field name: at most 100 letters, digits and _ . - characters."""
    return isinstance(value, str) and _FIELD.fullmatch(value) is not None


def is_kind(value: object) -> bool:
    """Whether the value is a valid kind of entry: up to 32 of a-z, 0-9, _ and -, a letter first."""
    return isinstance(value, str) and _KIND.fullmatch(value) is not None


def is_pack_id(value: object) -> bool:
    """Whether the value is a pack id: 32 lowercase hexadecimal digits, which can never be a path."""
    return isinstance(value, str) and _PACK_ID.fullmatch(value) is not None


def check_key(key: str) -> str:
    """Return the key. StoreError unless it is 64 lowercase hexadecimal digits."""
    if not is_key(key):
        raise StoreError(f"{short(repr(key))} is not a key: give 64 lowercase hexadecimal digits, see identity.key_of")
    return key


def dtype_name(value: torch.Tensor | torch.dtype) -> str:
    """`float16` for torch.float16 and for tensors of that dtype."""
    return str(getattr(value, "dtype", value)).removeprefix("torch.")


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """View a CPU tensor as an array of the same shape, with the dtype from ARRAY_DTYPES."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    stand_in = _STAND_INS.get(dtype_name(tensor))
    if stand_in is not None:
        import torch

        tensor = tensor.view(getattr(torch, stand_in))
    return tensor.numpy()


Description = Mapping[str, tuple[str, tuple[int, ...]]]
"""Field -> (dtype name, shape), sorted by field."""


def payload_digest(key: str, description: Description, arrays: Iterable[np.ndarray]) -> bytes:
    """The xxh3-128 digest (16 bytes) of the key, each field's name, dtype name and shape, and the arrays' bytes.

    It covers key, names and shapes so that swapped rows or keys are detected too.
    """
    # Equal to canonical_json([key, fields]), but the part for the fields is cached.
    hasher = xxhash.xxh3_128(b'["%b",%b]' % (key.encode(), _fields_json(tuple(description.items()))))
    for array in arrays:
        hasher.update(array.data)
    return hasher.digest()


@lru_cache
def _fields_json(fields: tuple[tuple[str, tuple[str, tuple[int, ...]]], ...]) -> bytes:
    return canonical_json([[name, dtype, list(shape)] for name, (dtype, shape) in fields])


@lru_cache(_MAX_DESCRIPTIONS)
def description_of(*fields: tuple[str, str, tuple[int, ...]]) -> Description:
    """The description with these fields (name, dtype, shape). Equal ones are one shared object: do not modify it."""
    return {name: (dtype, shape) for name, dtype, shape in fields}


class EntryArrays(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One entry's verified values: an array [1, *shape] for each field of `description`, in that order.

    The arrays have dtypes from ARRAY_DTYPES and are read-only by convention. Entries with equal fields share one
    description. Memory may hold very many of these.
    """

    description: Description
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class OwnedEntry:
    """An entry to be written: its record as JSON, a private copy of its values, and its ragged fields."""

    key: str
    kind: str
    record: bytes
    values: EntryArrays
    ragged: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return sum(array.nbytes for array in self.values.arrays)

    def spec(self) -> tuple[Any, ...]:
        """The grouping key in a pack: the kind, and each field's name, dtype, shape and whether it is ragged."""
        fields = []
        for name, (dtype, shape) in self.values.description.items():
            is_ragged = name in self.ragged
            fields.append((name, dtype, shape[1:] if is_ragged else shape, is_ragged))
        return self.kind, tuple(fields)

    def digest(self) -> bytes:
        """The digest of the payload."""
        return payload_digest(self.key, self.values.description, self.values.arrays)


def own_entry(entry: Entry) -> OwnedEntry:
    """Validate an entry and copy it for a store.

    StoreError if the key is not the digest of the identity, if a tensor is not a dense, non-empty CPU tensor of a
    supported dtype, or if the record is not JSON or exceeds MAX_RECORD_BYTES.
    """
    record = entry.record
    key = check_key(record.key)
    if not is_kind(record.kind):
        raise StoreError(f"entry {key}: kind {record.kind!r:.100}: give up to 32 of a-z, 0-9, _ and -, a letter first")
    try:
        identity, provenance = canonical_json(record.identity), canonical_json(record.provenance)
    except (TypeError, ValueError) as error:
        raise StoreError(f"entry {key}: identity and provenance must be JSON: {error}") from error
    num_bytes = len(identity) + len(provenance)
    if num_bytes > MAX_RECORD_BYTES:
        raise StoreError(f"entry {key}: its record has {num_bytes:,} bytes; at most {MAX_RECORD_BYTES:,} are allowed")
    if digest(identity) != key:
        raise StoreError(f"entry {key}: its identity gives the key {digest(identity)}; use identity.key_of(identity)")
    if not entry.tensors:
        raise StoreError(f"entry {key}: it has no tensors; give at least one field")
    if not entry.ragged <= entry.tensors.keys():
        raise StoreError(f"entry {key}: ragged {sorted(entry.ragged)} names fields that the entry lacks")
    for name in entry.ragged:
        if entry.tensors[name].ndim == 0:
            raise StoreError(f"entry {key}: field {name} is a scalar, which cannot be ragged")
    names = sorted(entry.tensors)
    arrays = tuple([_own_array(key, name, entry.tensors[name]) for name in names])
    fields = [(name, dtype_name(entry.tensors[name]), tuple(entry.tensors[name].shape)) for name in names]
    values = EntryArrays(description_of(*fields), arrays)
    return OwnedEntry(key, record.kind, record_json(identity, provenance), values, entry.ragged)


def record_json(identity: bytes, provenance: bytes) -> bytes:
    """Assemble a record's JSON from the JSON of its two parts."""
    return b'{"identity":%b,"provenance":%b}' % (identity, provenance)


def record_of(key: str, kind: str, data: bytes) -> Record:
    """Parse a record that `own_entry` wrote. ValueError if it is invalid or its identity gives another key."""
    if len(data) > MAX_RECORD_BYTES + len(record_json(b"", b"")):
        raise ValueError(f"its record has {len(data):,} bytes; at most {MAX_RECORD_BYTES:,} are allowed")
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
        identity, provenance = value["identity"], value["provenance"]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a record: {error!r:.100}") from error
    if not isinstance(identity, dict) or not isinstance(provenance, dict) or key_of(identity) != key:
        raise ValueError("the record's identity gives another key")
    return Record(key, kind, identity, provenance)


def _own_array(key: str, name: str, tensor: torch.Tensor) -> np.ndarray:
    import torch  # not at the top: commands such as `status` create no entries and start faster without it

    if not is_field(name):
        raise StoreError(f"entry {key}: field {name!r:.200}: a name has up to 100 letters, digits and _ . - only")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise StoreError(f"entry {key}: field {name} is {tensor.layout} on {tensor.device}; give a dense tensor on cpu")
    if dtype_name(tensor) not in ARRAY_DTYPES:
        raise StoreError(f"entry {key}: field {name} has dtype {tensor.dtype}; allowed: {', '.join(ARRAY_DTYPES)}")
    if tensor.numel() == 0:
        raise StoreError(f"entry {key}: field {name} of shape {tuple(tensor.shape)} has no elements")
    return as_array(tensor.detach().clone(memory_format=torch.contiguous_format))[None]
