"""Parquet files with encoded images in one column and captions in others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from latentcache.dataset.samples import CaptionColumns, Sample, SampleSource, Signature, refusal_of, signature_of
from latentcache.errors import DatasetError, ImageRefused
from latentcache.types import Refusal
from latentcache.utils.extras import naming_extras

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CACHE_BYTES = 512 << 20
"""Upper bound of the cache of decompressed row groups. The latest is kept even if it alone is larger."""
_ROWS_AT_ONCE = 64  # few, because a dictionary-encoded value may repeat very often


class ParquetSource(SampleSource):
    """Parquet files. The image column has bytes, or Hugging Face's struct with `bytes`. `sample_id` is `file#row`.

    Captions are read one row group at a time. Images are read only by `read`, which caches recent row groups: read
    neighbouring rows together. An unreadable file is a Refusal, and so is a file that lacks a column; raises
    DatasetError if the first readable file lacks one.
    """

    kind = "parquet"

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        image_column: str,
        caption_columns: tuple[str, ...] | None,
        parts: Sequence[str] = (),
    ):
        """`files` are sorted pairs (name, path). `parts` are the columns of control images and the mask."""
        with naming_extras():
            import pyarrow
            import pyarrow.parquet as pq
        self.path = files[0][1]
        self._files, self._columns, self._parts = tuple(files), caption_columns, tuple(parts)
        self._image_columns = (image_column, *self._parts)
        self._pq: Any = pq
        # ArrowInvalid is a ValueError and ArrowIOError an OSError; pyarrow raises the builtin ones too.
        arrow: type[BaseException] = pyarrow.ArrowException
        self._errors = (arrow, OSError, ValueError, OverflowError, LookupError)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, Signature | None, int], pa.Table] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files, self._image_columns[0], self._columns, self._parts)

    @override
    def _listed(self) -> Iterator[Sample | Refusal]:
        is_first = True
        for name, path in self._files:
            try:
                signature = signature_of(path)
                with self._pq.ParquetFile(path) as file:
                    present = file.schema_arrow.names
                    needed = (*self._image_columns, *(self._columns or ()))
                    missing = [column for column in needed if column not in present]
                    twice = [column for column in present if present.count(column) > 1]
                    if missing or twice:
                        problem = f"has no column {missing[0]!r}; its columns: {', '.join(present)}" if missing else ""
                        problem = problem or f"has several columns {twice[0]!r}; rename one"
                        if is_first:  # most likely a typo in the config
                            raise DatasetError(path, problem)
                        yield Refusal(name, path, "unreadable", problem)
                        continue
                    is_first = False
                    yield from self._samples_of(name, path, file, signature)
            except ImageRefused as refused:
                yield refusal_of(name, path, refused)
            except self._errors as error:
                yield Refusal(name, path, "corrupt", f"it is not a readable parquet file: {error}")

    @override
    def read(self, sample: Sample) -> bytes:
        path, group, row, column = sample.locator
        try:
            value = self._images(path, sample.signature, group).column(column)[row].as_py()
        except ImageRefused as refused:
            raise ImageRefused(sample.path, refused.reason, refused.detail) from refused
        except self._errors as error:
            raise ImageRefused(sample.path, "corrupt", f"the row group cannot be read: {error}") from error
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            problem = "has no bytes in this row" if data is None else f"holds a {type(data).__name__} in this row"
            raise ImageRefused(sample.path, "missing", f"column {column!r} {problem}; expected an encoded image")
        return data

    def _samples_of(
        self, name: str, path: str, file: pq.ParquetFile, signature: Signature
    ) -> Iterator[Sample | Refusal]:
        usual = tuple(column for column in ("text", "caption") if column in file.schema_arrow.names)
        columns = self._columns or usual[:1]
        captions, first_row = CaptionColumns(columns), 0
        for group in range(file.num_row_groups):
            num_rows, row = file.metadata.row_group(group).num_rows, 0
            try:
                batches = file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=list(columns))
                read = chain.from_iterable(batch.to_pylist() for batch in batches)
                for values in read if columns else repeat({}, num_rows):
                    sample_id, place = f"{name}#{first_row + row}", f"{path}#{first_row + row}"
                    at = path, group, row
                    try:
                        texts = captions.captions(values, place) or ("",)
                    except ImageRefused as error:
                        yield refusal_of(sample_id, place, error)
                    else:
                        parts = tuple(
                            Sample(sample_id, f"{place}:{column}", ("",), signature, (*at, column))
                            for column in self._parts
                        )
                        yield Sample(sample_id, place, texts, signature, (*at, self._image_columns[0]), parts)
                    row += 1
            except self._errors as error:
                last_row = first_row + num_rows - 1
                detail = f"the captions of rows {first_row + row} to {last_row} cannot be read: {error}"
                yield Refusal(f"{name}#{first_row + row}-{last_row}", path, "corrupt", detail)
            first_row += num_rows

    def _images(self, path: str, signature: Signature | None, group: int) -> pa.Table:
        """The images of a row group. One thread reads at a time: the others most likely need the same group.

        The signature is part of the cache's key, so that a replaced file is read again.
        """
        with self._lock:
            if (key := (path, signature, group)) not in self._cache:
                signature_of(path)  # refuses anything but a regular file
                with self._pq.ParquetFile(path) as file:
                    self._cache[key] = file.read_row_group(group, columns=list(dict.fromkeys(self._image_columns)))
                while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
            return self._cache[key]
