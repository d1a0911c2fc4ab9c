"""Parquet: images as a column of bytes, captions as further columns."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from latentcache.dataset.samples import CaptionError, Sample, SampleSource, Signature, captions_in_columns, refuse_read
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CACHE_BYTES = 512 << 20
"""Row groups are kept up to this size, decompressed. The latest is kept even if it alone is larger."""


def _parquet() -> Any:
    """pyarrow.parquet, which only this source needs, and which is an extra."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "a parquet source needs pyarrow: pip install 'latentcache[parquet]'", key="source.kind"
        ) from error
    return pq


def _errors() -> tuple[type[BaseException], ...]:
    import pyarrow as pa

    # ArrowInvalid is a ValueError and ArrowIOError an OSError; pyarrow raises plain ones too.
    return (pa.ArrowException, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class _ParquetRow:
    file: str
    row_group: int
    row: int


class ParquetSource(SampleSource):
    """Parquet files. The image column has bytes, or Hugging Face's struct with `bytes`. `sample_id` is `file#row`.

    Captions are read a row group at a time, and images only by `read`, which keeps the last row groups: read
    neighbouring rows soon after each other.
    """

    def __init__(self, files: Sequence[tuple[str, str]], image_column: str, caption_columns: tuple[str, ...] | None):
        """`files`: (name, path) of each, sorted. Raises DatasetError if the first one lacks a column."""
        self._files, self._image_column, self._columns = tuple(files), image_column, caption_columns
        self._pq, self._errors = _parquet(), _errors()
        self._read_errors: tuple[type[BaseException], ...] = (*self._errors, IndexError)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, int], pa.ChunkedArray] = OrderedDict()
        first = self._files[0][1]
        try:
            schema = self._pq.read_schema(first)
        except self._errors as error:
            raise DatasetError(first, f"is no parquet file that can be read: {error}") from error
        if problem := self._problem(schema):
            raise DatasetError(first, problem)

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        for name, path in self._files:
            try:
                with self._pq.ParquetFile(path) as file:
                    if problem := self._problem(file.schema_arrow):
                        yield Refusal(name, path, "unreadable", problem)
                        continue
                    yield from self._samples_of(name, path, file)
            except self._errors as error:
                yield Refusal(name, path, "corrupt", f"is no parquet file that can be read: {error}")

    @override
    def read(self, sample: Sample) -> bytes:
        place: _ParquetRow = sample.locator
        try:
            value = self._images(place.file, place.row_group)[place.row].as_py()
        except FileNotFoundError as error:
            refuse_read(sample.path, error)
        except self._read_errors as error:
            raise ImageRefused(sample.path, "corrupt", f"the row group cannot be read: {error}") from error
        data: bytes | None = value.get("bytes") if isinstance(value, dict) else value
        if data is None:
            raise ImageRefused(sample.path, "missing", f"column {self._image_column!r} has no bytes in this row")
        return data

    def _samples_of(self, name: str, path: str, file: pq.ParquetFile) -> Iterator[Sample | Refusal]:
        signature = Signature.of(os.stat(path))
        columns = self._caption_columns(file.schema_arrow)
        first_row = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            try:
                rows = file.read_row_group(group, columns=list(columns)).to_pylist() if columns else [{}] * num_rows
            except self._errors as error:
                last_row = first_row + num_rows - 1
                detail = f"the captions of rows {first_row} to {last_row} cannot be read: {error}"
                yield Refusal(f"{name}#{first_row}-{last_row}", path, "corrupt", detail)
                rows = []
            for row, values in enumerate(rows):
                sample_id, place = f"{name}#{first_row + row}", f"{path}#{first_row + row}"
                try:
                    captions = captions_in_columns(values, columns)
                except CaptionError as error:
                    yield Refusal(sample_id, place, "bad-caption", str(error))
                    continue
                yield Sample.of(sample_id, place, captions, signature, _ParquetRow(path, group, row))
            first_row += num_rows

    def _caption_columns(self, schema: pa.Schema) -> tuple[str, ...]:
        if self._columns is not None:
            return self._columns
        return tuple(column for column in ("text", "caption") if column in schema.names)[:1]

    def _problem(self, schema: pa.Schema) -> str | None:
        """What the columns lack, if anything."""
        import pyarrow.types as types

        present = ", ".join(schema.names)
        missing = [column for column in (self._image_column, *(self._columns or ())) if column not in schema.names]
        if missing:
            return f"has no column {missing[0]!r}, but: {present}"
        kind = schema.field(self._image_column).type
        if types.is_struct(kind):
            if kind.get_field_index("bytes") < 0:
                return f"column {self._image_column!r} is {kind}; a struct needs a field `bytes`"
            kind = kind.field("bytes").type
        if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)):
            return f"column {self._image_column!r} is {kind}; it must hold the bytes of the encoded image"
        return None

    def _images(self, path: str, row_group: int) -> pa.ChunkedArray:
        """The image column of a row group. One thread reads at a time: the others most likely need the same one."""
        key = (path, row_group)
        with self._lock:
            if key not in self._cache:
                with self._pq.ParquetFile(path) as file:
                    table = file.read_row_group(row_group, columns=[self._image_column])
                self._cache[key] = table.column(self._image_column)
                while len(self._cache) > 1 and sum(column.nbytes for column in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
            return self._cache[key]
