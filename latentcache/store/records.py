"""A pack's table of contents as text: its columns, and each entry's record with its rows.

Most entries of a pack share most of their identity and provenance (the encoder, the versions of software). Equal
values are kept once, in a table of their own, so that headers stay small.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latentcache.errors import StoreError
from latentcache.identity import key_of
from latentcache.store.base import DTYPES, KINDS, check_key, is_field
from latentcache.store.location import checked_shape, count_bytes, is_pack_id
from latentcache.types import Record

_MIN_SHARED_CHARS = 32  # a shorter value is not worth a reference

# json.dumps makes an encoder for each call, which takes most of its time for small values.
_text = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Column:
    """Equal fields of many entries, stacked: the tensor `name` of shape [num_rows, *shape]."""

    name: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    num_rows: int

    @property
    def row_bytes(self) -> int:
        return count_bytes(self.dtype, self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One entry's record, its payload digest, and where its fields are: (index of the column, row)."""

    record: Record
    digest: str
    rows: tuple[tuple[int, int], ...]


def encode_records(columns: Sequence[Column], records: Sequence[PackedRecord]) -> str:
    """ASCII JSON. `decode_records` is its inverse."""
    texts = [(_texts(packed.record.identity), _texts(packed.record.provenance)) for packed in records]
    counts = Counter(text for parts in texts for part in parts for text in part.values())
    shared = {
        text: index for index, text in enumerate(t for t, n in counts.items() if n > 1 and len(t) >= _MIN_SHARED_CHARS)
    }
    table = ",".join(shared)
    rows = [
        {
            "key": packed.record.key,
            "kind": packed.record.kind,
            "digest": packed.digest,
            "rows": packed.rows,
            "identity": _split(packed.record.identity, identity, shared),
            "provenance": _split(packed.record.provenance, provenance, shared),
        }
        for packed, (identity, provenance) in zip(records, texts, strict=True)
    ]
    heads = [[c.name, c.field, c.dtype, c.shape, c.num_rows] for c in columns]
    return f'{{"columns":{_text(heads)},"shared":[{table}],"records":{_text(rows)}}}'


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(item) for name, item in value.items()}


def _split(value: Mapping[str, Any], texts: Mapping[str, str], shared: Mapping[str, int]) -> dict[str, Any]:
    return {
        "own": {name: item for name, item in value.items() if texts[name] not in shared},
        "shared": {name: shared[text] for name, text in texts.items() if text in shared},
    }


def decode_records(text: str) -> tuple[tuple[Column, ...], tuple[PackedRecord, ...]]:
    """Columns and records. ValueError for anything but what `encode_records` gives, or a key that its identity denies.

    Records share the values of the table: copy before changing one.
    """
    try:
        value = json.loads(text)
        columns = tuple(_column(*head) for head in value["columns"])
        records = tuple(_packed_record(row, value["shared"], columns) for row in value["records"])
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, StoreError) as error:
        raise ValueError(f"not a table of records: {error}") from error
    if len({packed.record.key for packed in records}) != len(records):
        raise ValueError("a key is listed twice")
    return columns, records


def _column(name: str, field: str, dtype: str, shape: Any, num_rows: Any) -> Column:
    if not isinstance(name, str) or not is_field(field) or dtype not in DTYPES:
        raise ValueError(f"not a column: {name!r:.100}")
    if type(num_rows) is not int or num_rows < 1:
        raise ValueError(f"column {name!r:.100} has {num_rows!r:.20} rows")
    return Column(name, field, dtype, checked_shape(shape), num_rows)


def _packed_record(row: Mapping[str, Any], shared: Sequence[Any], columns: Sequence[Column]) -> PackedRecord:
    identity, provenance = _join(row["identity"], shared), _join(row["provenance"], shared)
    key = check_key(row["key"])
    if key_of(identity) != key:
        raise ValueError(f"entry {key}: its identity gives another key")
    if row["kind"] not in KINDS or not is_pack_id(row["digest"]):
        raise ValueError(f"entry {key}: unknown kind or digest")
    rows = tuple((column, number) for column, number in row["rows"])
    for column, number in rows:
        if (
            type(column) is not int
            or type(number) is not int
            or column < 0
            or not 0 <= number < columns[column].num_rows
        ):
            raise ValueError(f"entry {key}: row {number!r:.20} of column {column!r:.20} does not exist")
    if not rows or len({columns[column].field for column, _ in rows}) != len(rows):
        raise ValueError(f"entry {key}: no field, or one listed twice")
    return PackedRecord(Record(key, row["kind"], identity, provenance), row["digest"], rows)


def _join(parts: Mapping[str, Any], shared: Sequence[Any]) -> dict[str, Any]:
    return {**parts["own"], **{name: shared[index] for name, index in parts["shared"].items()}}
