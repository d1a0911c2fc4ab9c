"""MDS, the shards of MosaicML streaming: `shard.00000.mds` and so on, and `index.json`.

A shard is: number of samples (uint32), their offsets and the end (uint32 each), its settings as JSON, the samples. A
sample is: the sizes (uint32) of those columns that have no fixed size, then the columns' values, in the order of the
index. All numbers are little-endian. An array has a byte for its dtype and one for the number and dtype of its sides,
unless the column's encoding has them (`ndarray:float16:4,32,32`).

Exports have the columns sample_id, caption, captions, geometry, keys, scaled, scaling_factor, shift_factor, output and
a column for each tensor. An import reads any columns that a declaration names, and never those encoded as `pkl`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.interop.declaration import Declaration, read_declaration
from latentcache.interop.declared_samples import declared_items
from latentcache.interop.foreign_files import MAX_FILE_BYTES, corrupt, opened, read_at, read_file, tensor_in
from latentcache.interop.readers import ForeignItem, SourceImages, path_parts, refusing, sample_id_of
from latentcache.interop.reports import ExportReport
from latentcache.interop.shards import ShardExport, ShardRow
from latentcache.loading.cache import LatentCache
from latentcache.utils.json_document import first_fault
from latentcache.utils.progress import Progress

_INDEX = "index.json"
_MAX_INDEX_BYTES = 1 << 28
_MAX_TEXT_BYTES = 4 << 20
"""Of a text or a JSON document."""
_MAX_SHARD_BYTES = (1 << 32) - 1
_MAX_SAMPLES = 1 << 20
"""Of a shard: with 4 KB each they fill the largest one. Each that is refused takes memory, and a file can be sparse."""
_HASH = "sha256"
_CHUNK_BYTES = 1 << 20
_FIELDS = {
    "latents": "latents",
    "prompt_embeds": "prompt_embeds",
    "pooled_prompt_embeds": "pooled_prompt_embeds",
    "sample_id": "sample_id",
    "caption": "captions",
    "geometry": "geometry",
}
_ENCODINGS = {"sample_id": "str", "caption": "str", "scaling_factor": "float64"}
"""Of columns that are no tensors; all others are JSON."""
_DTYPES = {18: "float16", 34: "float32"}
"""The byte of a dtype in an array's header; those of integers are no latents."""
_MAX_SIDES = 8
_SIDES = ("u1", "<u2", "<u4", "<u8")
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    scaled: bool = False,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 64 << 20,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the manifest `name` as MDS shards to the new `folder`. Memory holds a shard.

    Latents are the mean of the moments, or with `seed` a draw. A column of a tensor that a sample lacks, as that of a
    second caption, has an array of no values. See `ShardExport` for the rest.
    """
    run = ShardExport(
        "mds", cache, name, folder, scaled=scaled, dtype=dtype, shard_bytes=shard_bytes, seed=seed, progress=progress
    )
    columns = _columns(run)
    shards = [_write(run, number, list(rows), columns) for number, rows in enumerate(run.shards())]
    if shards:
        run.finish(_FIELDS)
        # It comes last: a folder without index is no dataset.
        run.write_small(_INDEX, json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())
    return run.report


def _columns(run: ShardExport) -> dict[str, str]:
    """Column -> encoding, sorted, as MDSWriter has them. They are the same for all samples."""
    columns = dict.fromkeys(("captions", "geometry", "keys", "output", "scaled", "shift_factor"), "json") | _ENCODINGS
    if "latents_flipped" in (tensors := run.fields()):
        columns["geometry_flipped"] = "json"
    return dict(sorted((columns | dict.fromkeys(tensors, "ndarray")).items()))


def _write(run: ShardExport, number: int, rows: list[ShardRow], columns: dict[str, str]) -> dict[str, Any]:
    """Write a shard; its item of the index."""
    settings = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [_HASH],
        "size_limit": None,
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": [8 if encoding == "float64" else None for encoding in columns.values()],
    }
    samples = [_encoded(row, columns) for row in rows]
    head = json.dumps(settings, sort_keys=True).encode()
    starts = np.cumsum([4 * (len(samples) + 2) + len(head), *map(len, samples)], dtype=np.uint64)
    parts = [np.uint32(len(samples)).tobytes(), starts.astype("<u4").tobytes(), head, *samples]
    name = f"shard.{number:05}.mds"
    digest = hashlib.new(_HASH)
    with run.sealed(name) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    raw = {"basename": name, "bytes": int(starts[-1]), "hashes": {_HASH: digest.hexdigest()}}
    return {**settings, "samples": len(samples), "raw_data": raw, "zip_data": None}


def _encoded(row: ShardRow, columns: dict[str, str]) -> bytes:
    cells = []
    for column, encoding in columns.items():
        if encoding == "ndarray":
            cells.append(_array_bytes(row.tensors.get(column, np.empty(0, np.float32))))
        elif encoding == "float64":
            cells.append(np.float64(row.values[column]).tobytes())
        else:
            value = row.values.get(column)
            cells.append((str(value or "") if encoding == "str" else json.dumps(value)).encode())
    sizes = [len(cell) for cell, encoding in zip(cells, columns.values(), strict=True) if encoding != "float64"]
    return np.array(sizes, "<u4").tobytes() + b"".join(cells)


def _array_bytes(array: np.ndarray) -> bytes:
    code = next(code for code, name in _DTYPES.items() if name == array.dtype.name)
    return bytes([code, array.ndim << 2 | 2]) + np.array(array.shape, "<u4").tobytes() + array.tobytes()


class _Item(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class MdsFile(_Item):
    """The file of a shard."""

    basename: str
    bytes: Annotated[int, Field(ge=8, le=_MAX_SHARD_BYTES)]
    hashes: dict[str, str] = {}


class MdsShard(_Item):
    """A shard, as the index describes it."""

    format: Literal["mds"]
    version: Literal[2]
    compression: str | None
    samples: Annotated[int, Field(ge=0, le=1 << 30)]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Annotated[int, Field(ge=0, le=_MAX_SHARD_BYTES)] | None]
    raw_data: MdsFile

    @model_validator(mode="after")
    def _fits(self) -> MdsShard:
        if not len(self.column_names) == len(self.column_encodings) == len(self.column_sizes):
            raise ValueError("it has not one encoding and one size for each column")
        return self


class MdsIndex(_Item):
    """`index.json`."""

    version: Literal[2]
    shards: list[MdsShard]

    @model_validator(mode="after")
    def _once(self) -> MdsIndex:
        seen = set()
        for shard in self.shards:
            if (parts := path_parts(shard.raw_data.basename)) in seen:
                raise ValueError(f"it lists the shard {'/'.join(parts)!r:.200} twice")
            seen.add(parts)
        return self


class MdsCache:
    """The latents in the MDS shards of the folder `root`. `declaration`: see `read_declaration`.

    `images` is the folder of the images, if they are still there: an entry then knows its image, and can be verified.
    Raises ConfigError for a declaration that is missing or wrong, and DatasetError for an index that cannot be used.
    """

    format = "mds"

    def __init__(self, root: str | Path, *, declaration: Path | None = None, images: str | Path | None = None):
        self._root = os.path.abspath(root)
        self.declaration = read_declaration(declaration, Path(root))
        self.family, self.keeps_padding = self.declaration.family, self.declaration.keeps_padding
        self._images = SourceImages(images)
        path = os.path.join(self._root, _INDEX)
        try:
            self._shards = MdsIndex.model_validate(json.loads(read_file(path, _MAX_INDEX_BYTES))).shards
        except ValidationError as error:
            raise DatasetError(path, f"is no index of MDS shards: {first_fault(error)[2]}") from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(path, f"is no JSON document: {error}") from error

    def items(self) -> Iterator[ForeignItem]:
        """Shard by shard, sample by sample: the latent, the flipped one, then the texts."""
        yield from self._images.refusals
        for shard in self._shards:
            yield from refusing(shard.raw_data.basename, self._items(shard))

    def _items(self, shard: MdsShard) -> Iterator[ForeignItem]:
        """Raises ForeignFileRefused for what makes the whole shard unusable."""
        index = os.path.join(self._root, _INDEX)
        name = sample_id_of(shard.raw_data.basename, index)
        path = os.path.join(self._root, name)
        if shard.compression:
            detail = f"it is compressed with {shard.compression}: write the shards again without compression"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        columns = _wanted(shard, self.declaration, path)
        with opened(path) as (fd, num_bytes):
            if num_bytes != shard.raw_data.bytes:
                reason = "truncated" if num_bytes < shard.raw_data.bytes else "corrupt"
                detail = f"it has {num_bytes:,} bytes; the index says {shard.raw_data.bytes:,}"
                raise ForeignFileRefused(path, reason, detail)
            _check_hashes(fd, shard.raw_data, path)
            offsets = _offsets(fd, shard, path)
            for number in range(shard.samples):
                sample = MdsSample(f"{name}/{number}", f"{path}#{number}", shard, columns, self.declaration)
                start, end = offsets[number : number + 2].tolist()
                yield from refusing(sample.name, self._sample(sample, fd, start, end))

    def _sample(self, sample: MdsSample, fd: int, start: int, end: int) -> Iterator[ForeignItem]:
        if end - start > MAX_FILE_BYTES:
            raise corrupt(sample.path, f"it has {end - start:,} bytes; {MAX_FILE_BYTES:,} are allowed")
        sample.take(read_at(fd, start, end - start))
        yield from declared_items(sample, self.declaration, self._images)


read = MdsCache


def _wanted(shard: MdsShard, declaration: Declaration, path: str) -> dict[str, int]:
    """Column -> its number. Raises ForeignFileRefused if one that is declared is not there, or would be unpickled."""
    columns = {column: number for number, column in enumerate(shard.column_names)}
    if len(columns) != len(shard.column_names):
        raise corrupt(path, "two of its columns have one name")
    fields = declaration.fields.model_dump(exclude_none=True, exclude={"original_size"}).values()
    for field in (*fields, *(declaration.fields.original_size or ())):
        if field not in columns:
            raise ForeignFileRefused(path, "missing", f"it has no column {field}; it has {', '.join(columns)}")
        if shard.column_encodings[columns[field]] == "pkl":
            detail = f"column {field} is encoded as pkl: reading it would run code that is in the file"
            raise ForeignFileRefused(path, "unsupported-format", detail)
    return columns


def _check_hashes(fd: int, file: MdsFile, path: str) -> None:
    """Compare the file with the hashes in the index that Python can compute; those of xxhash are not compared."""
    digests = {
        name: hashlib.new(name)
        for name in file.hashes
        if name in hashlib.algorithms_guaranteed and not name.startswith("shake")
    }
    for start in range(0, file.bytes if digests else 0, _CHUNK_BYTES):
        chunk = read_at(fd, start, min(_CHUNK_BYTES, file.bytes - start))
        for digest in digests.values():
            digest.update(chunk)
    for name, digest in digests.items():
        if digest.hexdigest() != file.hashes[name]:
            raise corrupt(path, f"its {name} is {digest.hexdigest()}; the index says {file.hashes[name]:.80}")


def _offsets(fd: int, shard: MdsShard, path: str) -> np.ndarray:
    """Where the samples begin, and the end: int64 [samples + 1]. Raises ForeignFileRefused.

    A shard whose samples overlap, or are too small for its columns, is refused as a whole: a few bytes would otherwise
    be read as any number of samples.
    """
    num_bytes, table_end = shard.raw_data.bytes, 4 * (shard.samples + 2)
    if int.from_bytes(read_at(fd, 0, 4), "little") != shard.samples or table_end > num_bytes:
        raise corrupt(path, f"it has not the {shard.samples:,} samples that the index says")
    if shard.samples > _MAX_SAMPLES:
        raise corrupt(path, f"it has {shard.samples:,} samples; {_MAX_SAMPLES:,} are allowed in a shard")
    if len(table := read_at(fd, 4, table_end - 4)) < table_end - 4:
        raise ForeignFileRefused(path, "truncated", "it became shorter while it was read")
    offsets = np.frombuffer(table, "<u4").astype(np.int64)
    least = sum(size or 4 for size in shard.column_sizes)
    if offsets[0] < table_end or offsets[-1] > num_bytes or (shard.samples and np.diff(offsets).min() < least):
        allowed = f"allowed are {table_end:,} to {num_bytes:,}, and each sample needs {least:,} bytes at least"
        raise corrupt(path, f"the offsets of its samples do not fit: {allowed}")
    return offsets


class MdsSample:
    """One sample of a shard: see `ShardSample`."""

    def __init__(self, name: str, path: str, shard: MdsShard, columns: dict[str, int], declaration: Declaration):
        self.name, self.path = name, path
        self._shard, self._columns, self._declaration = shard, columns, declaration
        self._cells: list[memoryview] = []

    def take(self, data: bytes) -> None:
        """Split the sample's bytes into columns. Raises ForeignFileRefused."""
        sizes, start = list(self._shard.column_sizes), 0
        for number, size in enumerate(sizes):
            if not size:
                sizes[number] = int.from_bytes(data[start : start + 4], "little")
                start += 4
        if start + sum(size or 0 for size in sizes) != len(data):
            raise corrupt(self.path, f"its columns do not fill its {len(data):,} bytes")
        view = memoryview(data)
        for size in sizes:
            self._cells.append(view[start : start + (size or 0)])
            start += size or 0

    def value(self, field: str) -> Any:
        """The value of a column of text, JSON, an integer or a number; None without such a column."""
        if field not in self._columns:
            return None
        encoding, cell = self._cell(field)
        try:
            if len(cell) > _MAX_TEXT_BYTES:
                raise ValueError(f"{len(cell):,} bytes; {_MAX_TEXT_BYTES:,} are allowed")
            match encoding:
                case "str":
                    return str(cell, "utf-8")
                case "json":
                    return json.loads(bytes(cell))
                case "str_int":
                    return int(bytes(cell))
                case "int":
                    return np.frombuffer(cell, "<i8").item()
                case _ if encoding in _SCALARS:
                    return np.frombuffer(cell, np.dtype(encoding).newbyteorder("<")).item()
        except (ValueError, RecursionError) as error:
            raise corrupt(self.path, f"its {field} ({encoding}) cannot be read: {error}") from error
        raise ForeignFileRefused(self.path, "unsupported-format", f"its {field} is encoded as {encoding}: no value")

    def tensor(self, field: str, ndim: int | None) -> torch.Tensor | None:
        """The array of a column, or the plain bytes of one that the declaration has in `raw`."""
        if field not in self._columns:
            return None
        encoding, cell = self._cell(field)
        if len(cell) == 0:
            return None
        name, _, form = encoding.partition(":")
        try:
            if name == "ndarray":
                dtype, shape, values = _array_form(form, cell)
            elif name == "bytes" and field in self._declaration.raw:
                raw = self._declaration.raw[field]
                dtype, shape, values = raw.dtype, tuple(raw.shape), cell
            else:
                detail = (
                    f"its {field} is encoded as {encoding}: a tensor is an ndarray, or bytes that are declared in raw"
                )
                raise ForeignFileRefused(self.path, "unsupported-format", detail)
        except (ValueError, IndexError, KeyError) as error:
            raise corrupt(self.path, f"its {field} is no array: {error!r:.200}") from error
        if math.prod(shape) * np.dtype(dtype).itemsize != len(values):
            raise corrupt(self.path, f"its {field} has {len(values):,} bytes, and is {dtype} {list(shape)}")
        if not values:
            return None
        array = np.frombuffer(bytearray(values), np.dtype(dtype).newbyteorder("<")).reshape(shape)
        return tensor_in(torch.from_numpy(array.astype(dtype, copy=False)), field, self.path, ndim=ndim)

    def _cell(self, field: str) -> tuple[str, memoryview]:
        number = self._columns[field]
        return self._shard.column_encodings[number], self._cells[number]


def _array_form(form: str, cell: memoryview) -> tuple[str, tuple[int, ...], memoryview]:
    """Dtype, shape and values of an array. `form` is what its encoding fixes: nothing, the dtype, or the shape too."""
    dtype, _, sides = form.partition(":")
    if not dtype:
        dtype, cell = _DTYPES[cell[0]], cell[1:]
    elif dtype not in _DTYPES.values():
        raise ValueError(f"dtype {dtype!r:.40}")
    if sides:
        shape, values = [int(side) for side in sides.split(",")], cell
    else:
        num_sides, side_type = cell[0] >> 2, np.dtype(_SIDES[cell[0] & 3])
        end = 1 + num_sides * side_type.itemsize
        shape, values = np.frombuffer(cell[1:end], side_type).tolist(), cell[end:]
    if len(shape) > _MAX_SIDES:
        raise ValueError(f"it has {len(shape)} sides; {_MAX_SIDES} are allowed")
    if min(shape, default=0) < 0:
        raise ValueError(f"it has a side of {min(shape)}")
    return dtype, tuple(shape), values
