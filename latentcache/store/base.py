"""What every store promises, and what all of them ask of an entry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, get_args

import numpy as np
import torch
import xxhash

from latentcache.errors import StoreError
from latentcache.identity import canonical_json, digest
from latentcache.types import Entry, Kind, Record

KINDS: tuple[str, ...] = get_args(Kind)
MAX_RECORD_BYTES = 1 << 20
"""Identity and provenance of one entry, as JSON. Pack headers hold thousands of them."""

ALIGNMENT = 64
"""Bytes. Fields in packs and in pooled buffers start at its multiples, as torch's own tensors do."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
"""The dtypes that can be stored, by name."""
ARRAY_DTYPES = {
    name: np.dtype({"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}.get(name, name))
    for name in DTYPES
}
"""What numpy holds each of them as: the same, or an integer of that size where numpy has no such dtype."""
_STAND_INS = {DTYPES[name]: getattr(torch, str(dtype)) for name, dtype in ARRAY_DTYPES.items() if str(dtype) != name}

_KEY = re.compile(r"[0-9a-f]{64}")
_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def is_key(value: object) -> bool:
    """Whether the value is 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def is_field(value: object) -> bool:
    """Whether the value can name a field: letters, digits and _ . - only, 100 at most."""
    return isinstance(value, str) and _FIELD.fullmatch(value) is not None


def check_key(key: str) -> str:
    """Return the key. StoreError unless it is 64 lower-case hexadecimal digits."""
    if not is_key(key):
        shown = repr(key) if len(repr(key)) <= 100 else repr(key)[:100] + "..."
        raise StoreError(
            f"key {shown} is not a key: 64 lower-case hexadecimal digits, as fingerprint.key_of gives them"
        )
    return key


def dtype_name(tensor: torch.Tensor) -> str:
    """`float16` for torch.float16."""
    return str(tensor.dtype).removeprefix("torch.")


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as an array of the same shape that shares its memory, of the dtype in ARRAY_DTYPES."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    stand_in = _STAND_INS.get(tensor.dtype)
    return (tensor if stand_in is None else tensor.view(stand_in)).numpy()


def flat_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor as a flat uint8 array that shares its memory."""
    return as_array(tensor).reshape(-1).view(np.uint8)


def payload_digest(key: str, fields: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> str:
    """xxh3-128 of the key and, by name, each field's (dtype name, shape, bytes): 32 hexadecimal digits.

    Key, names and shapes are part of it, so that rows or keys that were exchanged are found too.
    """
    names = sorted(fields)
    hasher = xxhash.xxh3_128(canonical_json([key, [[name, fields[name][0], list(fields[name][1])] for name in names]]))
    for name in names:
        hasher.update(fields[name][2])
    return hasher.hexdigest()


def entry_digest(entry: Entry) -> str:
    """`payload_digest` of an entry with contiguous CPU tensors."""
    fields = {name: (dtype_name(t), tuple(t.shape), flat_bytes(t)) for name, t in entry.tensors.items()}
    return payload_digest(entry.record.key, fields)


def own_entry(entry: Entry) -> tuple[Entry, int]:
    """A copy that the store owns: contiguous tensors, and the record as plain JSON. And the record's bytes as JSON.

    StoreError if the key does not follow from the identity, if a tensor is not a dense CPU tensor of a known dtype
    with at least one element, or if the record is not JSON or larger than MAX_RECORD_BYTES.
    """
    record = entry.record
    key = check_key(record.key)
    if record.kind not in KINDS:
        raise StoreError(f"entry {key}: kind {record.kind!r}, allowed: {', '.join(KINDS)}")
    try:
        identity, provenance = canonical_json(record.identity), canonical_json(record.provenance)
    except (TypeError, ValueError) as error:
        raise StoreError(f"entry {key}: identity and provenance must be JSON: {error}") from error
    record_bytes = len(identity) + len(provenance)
    if record_bytes > MAX_RECORD_BYTES:
        raise StoreError(
            f"entry {key}: its record has {record_bytes:,} bytes, at most {MAX_RECORD_BYTES:,} are allowed"
        )
    if digest(identity) != key:
        raise StoreError(
            f"entry {key}: its identity gives the key {digest(identity)}; use fingerprint.key_of(identity)"
        )
    if not entry.tensors:
        raise StoreError(f"entry {key}: it holds no tensor")
    tensors = {name: _own_tensor(key, name, tensor) for name, tensor in entry.tensors.items()}
    return Entry(Record(key, record.kind, _plain(identity), _plain(provenance)), tensors), record_bytes


def _plain(data: bytes) -> dict[str, Any]:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _own_tensor(key: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not is_field(name):
        raise StoreError(f"entry {key}: field {name!r}: a name has letters, digits and _ . - only, 100 at most")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise StoreError(f"entry {key}: field {name} is {tensor.layout} on {tensor.device}; give a dense tensor on cpu")
    if dtype_name(tensor) not in DTYPES:
        raise StoreError(f"entry {key}: field {name} has dtype {tensor.dtype}, allowed: {', '.join(DTYPES)}")
    if tensor.numel() == 0:
        raise StoreError(f"entry {key}: field {name} of shape {tuple(tensor.shape)} holds no element")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. `payload_bytes` are those of live entries, `file_bytes` those of the packs on disk."""

    num_entries: dict[str, int]
    num_damaged: int
    num_packs: int
    payload_bytes: int
    file_bytes: int
    index_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Writer(Protocol):
    """Adds entries in the order given. Leaving the block seals, on an exception too: what was added is whole.

    One thread calls `add`. Another seals behind it; its errors come up at the next `add`, `seal` or on leaving.
    """

    num_added: int
    """Entries that are durable and were not there before."""
    bytes_written: int
    """Bytes of the files written."""

    def add(self, entry: Entry) -> None:
        """Copy the entry and buffer it. StoreError if it cannot be stored."""

    def seal(self) -> None:
        """Make all that was added durable."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *exc_info: object) -> None: ...


Description = Mapping[str, tuple[str, tuple[int, ...]]]
"""Field -> (dtype name, shape)."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one entry can be read: an array [1, *shape] for each field of `description`, in its order.

    Arrays are of the dtypes in ARRAY_DTYPES. Entries with equal fields share one description. There may be very many
    of these in memory.
    """

    description: Description
    parts: tuple[np.ndarray, ...]


class Rows(Protocol):
    """Keys that were looked up once. Valid for the store that gave them, also after a compaction."""

    keys: tuple[str, ...]


class Store(Protocol):
    """Immutable entries by key. Keys are 64 lower-case hexadecimal digits, anything else is a StoreError.

    EntryMissingError: there is no such entry. EntryDamagedError: its bytes are not those that were stored; it counts
    as absent (`find`) until it is added again.
    """

    read_only: bool

    def writer(self) -> Writer:
        """A context manager that adds entries in the background. ReadOnlyError, StoreBusyError."""

    def add(self, entries: Iterable[Entry]) -> int:
        """Add entries and return how many are new. Durable on return. Entries that are there are left alone."""

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose entries are there."""

    def get(self, key: str) -> Entry:
        """The entry, with CPU tensors that the caller owns. EntryMissingError, EntryDamagedError."""

    def record(self, key: str) -> Record:
        """What the entry is and how it was made, without its tensors. EntryMissingError, EntryDamagedError."""

    def describe(self, key: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Each field's dtype name and shape, without reading the payload. EntryMissingError, EntryDamagedError."""

    def resolve(self, keys: Sequence[str]) -> Rows:
        """Look keys up once, for many `read_rows`. EntryMissingError, EntryDamagedError."""

    def read_rows(
        self, rows: Rows, fields: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """As `read_batch`, for keys that were resolved."""

    def read_batch(
        self, keys: Sequence[str], fields: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """One CPU tensor [n, *shape] per field (all fields by default), a row per key; keys may repeat.

        Written into the tensors of `out` where given: contiguous CPU tensors of that shape and dtype. New tensors
        cannot be resized. StoreError if the entries' fields, shapes or dtypes differ. No keys give no tensors.
        """

    @property
    def version(self) -> object | None:
        """As long as it is the same object, what `sources` gave lies where it did. Ask for it before `sources`.

        None: entries are read from the disk each time, so nothing is gained by remembering where they lie.
        """

    def sources(self, keys: Sequence[str]) -> Sequence[Source]:
        """Where the bytes of these entries can be read, verified. EntryMissingError, EntryDamagedError.

        They may be remembered as long as `version` is the same, and be read with `gather.stack`.
        """

    def asks_ahead(self) -> bool:
        """Whether the read that comes now should be preceded by `ask_ahead`, because lately the disk was read.

        Each call counts as a read.
        """

    def ask_ahead(self, keys: Iterable[str]) -> None:
        """These entries are read soon: a store that reads from a disk may bring them into memory meanwhile.

        It waits for nothing, and leaves out what is not there. Where lately all was in memory the keys are not even
        looked at.
        """

    def keys(self) -> Iterator[str]:
        """The keys of all entries that are there now."""

    def remove(self, keys: Iterable[str]) -> int:
        """Forget entries and return how many there were. Space comes back with `upkeep.compact`."""

    def damaged(self) -> dict[str, str]:
        """Entries known to be damaged, with the reason, until they are added again or removed."""

    def stats(self) -> StoreStats:
        """Counts and sizes."""

    def close(self) -> None:
        """Let go of files. Using the store afterwards is a StoreError."""
