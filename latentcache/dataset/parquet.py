"""Images in a column of bytes of parquet files, and the captions in other columns."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from latentcache.dataset.samples import (
    Sample,
    SampleSource,
    Signature,
    captions_in_columns,
    not_empty,
    refusal_of,
    signature_of,
)
from latentcache.errors import DatasetError, ImageRefused
from latentcache.types import Refusal
from latentcache.utils.extras import naming_extras

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CACHE_BYTES = 512 << 20
"""Row groups of parquet files are kept up to this size, decompressed. The latest is kept even if it alone is larger:
its columns of images are read in turn, and each would have to be decompressed again for each row."""
_ROWS_AT_ONCE = 64

_Column = tuple[str, Signature | None, int, str]
"""A file as it was listed, a row group, and a column of images. The file may be another one in the next run."""


class ParquetSource(SampleSource):
    """Parquet files. The image column has bytes, or Hugging Face's struct with `bytes`. `sample_id` is `file#row`.

    Captions are read a row group at a time, and images only by `read`, which keeps the last row groups: read
    neighbouring rows soon after each other. A file that cannot be read is a Refusal, and so is one without the columns;
    if all are, it is a DatasetError.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        image_column: str,
        caption_columns: tuple[str, ...] | None,
        parts: tuple[tuple[str, str], ...] = (),
    ):
        """`files`: (name, path) of each, sorted. `parts`: (name, column) of each further part."""
        with naming_extras():
            import pyarrow
            import pyarrow.parquet as pq
        self._files, self._image_column, self._columns = tuple(files), image_column, caption_columns
        self._parts = parts
        self._pq: Any = pq
        # ArrowInvalid is a ValueError and ArrowIOError an OSError; pyarrow raises plain ones too.
        self._errors: tuple[type[BaseException], ...] = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
        self._read_errors: tuple[type[BaseException], ...] = (*self._errors, IndexError)
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Column, pa.ChunkedArray] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files, self._image_column, self._columns, self._parts)

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        return not_empty(self._samples(), self._files[0][1], "parquet")

    def _samples(self) -> Iterator[Sample | Refusal]:
        num_read, refusal = 0, None
        for name, path in self._files:
            try:
                signature = signature_of(path)
                with self._pq.ParquetFile(path) as file:
                    num_read += 1
                    problem = self._problem(file.schema_arrow)
                    if problem is None:
                        yield from self._samples_of(name, path, file, signature)
                        continue
                    if num_read == 1:  # most likely a slip in the config
                        raise DatasetError(path, problem)
                refusal = Refusal(name, path, "unreadable", problem)
            except ImageRefused as refused:
                refusal = refusal_of(name, path, refused)
            except self._errors as error:
                refusal = Refusal(name, path, "corrupt", f"is no parquet file that can be read: {error}")
            yield refusal
        if num_read == 0 and refusal is not None:
            raise DatasetError(refusal.path, refusal.detail)

    @override
    def read(self, sample: Sample) -> bytes:
        path, row_group, row, column = sample.locator
        try:
            value = self._images((path, sample.signature, row_group, column))[row].as_py()
        except ImageRefused as refused:
            raise ImageRefused(sample.path, refused.reason, refused.detail) from refused
        except self._read_errors as error:
            raise ImageRefused(sample.path, "corrupt", f"the row group cannot be read: {error}") from error
        data: bytes | None = value.get("bytes") if isinstance(value, dict) else value
        if data is None:
            raise ImageRefused(sample.path, "missing", f"column {column!r} has no bytes in this row")
        return data

    def _samples_of(
        self, name: str, path: str, file: pq.ParquetFile, signature: Signature
    ) -> Iterator[Sample | Refusal]:
        columns = self._caption_columns(file.schema_arrow)
        first_row = 0
        for group in range(file.num_row_groups):
            num_rows, row = file.metadata.row_group(group).num_rows, 0
            try:
                for values in _rows(file, group, columns) if columns else repeat({}, num_rows):
                    sample_id, place = f"{name}#{first_row + row}", f"{path}#{first_row + row}"
                    try:
                        captions = captions_in_columns(values, columns, place)
                        locator = path, group, row, self._image_column
                        parts = tuple(
                            Sample(sample_id, f"{place}:{column}", ("",), signature, (path, group, row, column))
                            for _, column in self._parts
                        )
                        yield Sample(sample_id, place, captions or ("",), signature, locator, parts)
                    except ImageRefused as error:
                        yield refusal_of(sample_id, place, error)
                    row += 1
            except self._errors as error:
                last_row = first_row + num_rows - 1
                detail = f"the captions of rows {first_row + row} to {last_row} cannot be read: {error}"
                yield Refusal(f"{name}#{first_row + row}-{last_row}", path, "corrupt", detail)
            first_row += num_rows

    def _caption_columns(self, schema: pa.Schema) -> tuple[str, ...]:
        if self._columns is not None:
            return self._columns
        return tuple(column for column in ("text", "caption") if column in schema.names)[:1]

    def _problem(self, schema: pa.Schema) -> str | None:
        """What the columns lack, if anything."""
        import pyarrow.types as types

        present = ", ".join(schema.names)
        images = (self._image_column, *(column for _, column in self._parts))
        missing = [column for column in (*images, *(self._columns or ())) if column not in schema.names]
        if missing:
            return f"has no column {missing[0]!r}, but: {present}"
        if twice := [column for column in schema.names if schema.names.count(column) > 1]:
            return f"has several columns {twice[0]!r}; rename one"
        for column in images:
            kind = schema.field(column).type
            if types.is_struct(kind):
                if kind.get_field_index("bytes") < 0:
                    return f"column {column!r} is {kind}; a struct needs a field `bytes`"
                kind = kind.field("bytes").type
            if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)):
                return f"column {column!r} is {kind}; it must hold the bytes of the encoded image"
        return None

    def _images(self, key: _Column) -> pa.ChunkedArray:
        """A column of images of a row group. One thread reads at a time: the others most likely need the same one."""
        path, _, row_group, name = key
        with self._lock:
            if key not in self._cache:
                signature_of(path)  # of what is no file it says so
                with self._pq.ParquetFile(path) as file:
                    self._cache[key] = file.read_row_group(row_group, columns=[name]).column(0)
                others = [other for other in self._cache if other[:3] != key[:3]]
                while others and sum(column.nbytes for column in self._cache.values()) > CACHE_BYTES:
                    del self._cache[others.pop(0)]
            self._cache.move_to_end(key)
            return self._cache[key]


def _rows(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a group by column. Few at a time: one value may be repeated very often."""
    for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=list(columns)):
        yield from batch.to_pylist()
