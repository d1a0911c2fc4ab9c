"""Images inside larger files, read in place: members of tar files (WebDataset), and columns of bytes (parquet)."""

from __future__ import annotations

import json
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    CaptionError,
    Sample,
    SampleSource,
    Signature,
    captions_in_columns,
    captions_in_text,
    is_hidden,
    is_image,
    read_range,
    refuse_read,
)
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CACHE_BYTES = 512 << 20
"""Row groups of parquet files are kept up to this size, decompressed. The latest is kept even if it alone is larger."""

_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
_BLOCK = tarfile.BLOCKSIZE
# A damaged header gives a TarError; a damaged extended header also what its numbers and names give.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError)


def scan(name: str, path: str) -> _Tar:
    """Read the headers of a tar. `name` is its name within the dataset. Raises OSError."""
    shard = _Tar(name, path, Signature.of(os.stat(path)))
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                # tarfile would keep every member, a kilobyte each.
                tar.members = []  # type: ignore[attr-defined]  # typeshed lacks it
                shard.add(member)
            end = tar.offset
    except _TAR_ERRORS as error:
        shard.damage = shard.damage or Refusal(name, path, "truncated", f"the tar ends in a broken member: {error}")
    if shard.damage is None:
        shard.damage = _damage_at_end(name, path, end)
    if shard.damage is not None and (cut := shard.groups.pop(shard.last_key, None)) and cut.images:
        detail = "the tar is cut or damaged after this image, where its caption may have been"
        shard.refusals.append(Refusal(f"{name}/{shard.last_key}", f"{path}#{cut.images[0][0]}", "truncated", detail))
    return shard


def _damage_at_end(name: str, path: str, end: int) -> Refusal | None:
    """After the last member comes a block of zeros. tarfile stops silently at any other block, too."""
    block = read_range(path, end, _BLOCK)
    if len(block) < _BLOCK:
        return Refusal(name, path, "truncated", f"the tar ends at byte {end + len(block):,} without an end mark")
    if any(block):
        return Refusal(name, path, "corrupt", f"no member begins at byte {end:,}; what follows is not read")
    return None


@dataclass(slots=True)
class _Group:
    """The members that share a key: places (offset, size) in the tar, those of captions by `txt` and `json`."""

    images: list[tuple[str, int, int]] = field(default_factory=list)
    captions: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Tar:
    """The contents of one tar by its headers. `damage` is the reason if they end early."""

    name: str
    path: str
    signature: Signature
    groups: dict[str, _Group] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    damage: Refusal | None = None
    last_key: str = ""

    def add(self, member: tarfile.TarInfo) -> None:
        folder, _, base = member.name.removeprefix("./").rpartition("/")
        stem, _, extension = base.partition(".")
        extension = extension.lower()
        if member.isdir() or is_hidden(base) or not (is_image(base) or extension in ("txt", "json")):
            return
        self.last_key = key = f"{folder}/{stem}" if folder else stem
        place = f"{self.path}#{member.name}"
        if not member.isreg() or member.issparse():
            self.refusals.append(Refusal(f"{self.name}/{key}", place, "unreadable", "not a regular member of the tar"))
        elif member.offset_data + member.size > self.signature.size:
            self.damage = Refusal(self.name, self.path, "truncated", f"the tar ends inside its member {member.name}")
        else:
            group = self.groups.setdefault(key, _Group())
            if extension in ("txt", "json"):
                group.captions[extension] = (member.offset_data, member.size)
            else:
                group.images.append((member.name, member.offset_data, member.size))


class WebDatasetSource(SampleSource):
    """Tar files. Members belong together if their paths are equal up to the first dot of the file name: the key.

    The image is the member with an image's suffix; captions are the lines of `.txt`, or columns of `.json`. If columns
    are configured, `.json` comes first. Unlike in WebDataset, the members of a key may be apart in the tar. Samples
    come in the order of the tars' names, then of the members. A tar that is cut or damaged is a Refusal, after the
    samples before the damage; so is its last key, whose caption may be lost. A second image under one key is refused.
    """

    def __init__(self, shards: Sequence[tuple[str, str]], caption_columns: tuple[str, ...] | None):
        """`shards`: (name, path) of each tar, sorted. DatasetError for a compressed one, which has no random access."""
        self._shards, self._columns = tuple(shards), caption_columns
        for _, path in self._shards:
            try:
                start = read_range(path, 0, 8)
            except OSError as error:
                raise DatasetError(path, f"cannot be read: {error.strerror}") from error
            for magic, name in _COMPRESSED:
                if start.startswith(magic):
                    raise DatasetError(
                        path, f"is compressed with {name}; decompress it: images do not get smaller by it"
                    )

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        for name, path in self._shards:
            try:
                yield from self._samples_of(name, path)
            except OSError as error:
                yield Refusal(name, path, "unreadable", error.strerror or str(error))

    @override
    def read(self, sample: Sample) -> bytes:
        tar, offset, num_bytes = sample.locator
        try:
            status = os.stat(tar)
            data = read_range(tar, offset, num_bytes)
        except OSError as error:
            refuse_read(sample.path, error)
        now, then = Signature.of(status), sample.signature
        if then is not None and (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
            raise ImageRefused(sample.path, "changed", "the tar was changed during the run; run precache again")
        return data

    def _samples_of(self, name: str, path: str) -> Iterator[Sample | Refusal]:
        shard = scan(name, path)
        for key, group in shard.groups.items():
            yield from self._samples_in(f"{name}/{key}", path, shard.signature, group)
        yield from shard.refusals
        if shard.damage is not None:
            yield shard.damage

    def _samples_in(self, sample_id: str, path: str, signature: Signature, group: _Group) -> Iterator[Sample | Refusal]:
        for number, (member, offset, num_bytes) in enumerate(group.images):
            place = f"{path}#{member}"
            if number:
                yield Refusal(sample_id, place, "duplicate", f"the key has an image already: {group.images[0][0]}")
                continue
            try:
                captions = self._captions(path, group)
            except CaptionError as error:
                yield Refusal(sample_id, place, "bad-caption", str(error))
                continue
            yield Sample.of(sample_id, place, captions, signature, (path, offset, num_bytes))

    def _captions(self, path: str, group: _Group) -> tuple[str, ...]:
        """Raises CaptionError."""
        if "json" in group.captions and (self._columns is not None or "txt" not in group.captions):
            try:
                row = json.loads(_caption_member(path, *group.captions["json"]))
            except (ValueError, RecursionError) as error:
                raise CaptionError(f"its .json cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise CaptionError(f"its .json holds a {type(row).__name__}; an object is needed")
            return captions_in_columns(row, self._columns)
        if "txt" not in group.captions:
            return ()
        return captions_in_text(_caption_member(path, *group.captions["txt"]))


def _caption_member(path: str, offset: int, num_bytes: int) -> bytes:
    if num_bytes > MAX_CAPTION_BYTES:
        raise CaptionError(f"its caption has {num_bytes:,} bytes; {MAX_CAPTION_BYTES:,} are allowed")
    return read_range(path, offset, num_bytes)


class ParquetSource(SampleSource):
    """Parquet files. The image column has bytes, or Hugging Face's struct with `bytes`. `sample_id` is `file#row`.

    Captions are read a row group at a time, and images only by `read`, which keeps the last row groups: read
    neighbouring rows soon after each other.
    """

    def __init__(self, files: Sequence[tuple[str, str]], image_column: str, caption_columns: tuple[str, ...] | None):
        """`files`: (name, path) of each, sorted. Raises DatasetError if the first one lacks a column."""
        try:
            import pyarrow
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ConfigError(
                "a parquet source needs pyarrow: pip install 'latentcache[parquet]'", key="source.kind"
            ) from error
        self._files, self._image_column, self._columns = tuple(files), image_column, caption_columns
        self._pq: Any = pq
        # ArrowInvalid is a ValueError and ArrowIOError an OSError; pyarrow raises plain ones too.
        self._errors: tuple[type[BaseException], ...] = (pyarrow.ArrowException, OSError, ValueError)
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
        path, row_group, row = sample.locator
        try:
            value = self._images(path, row_group)[row].as_py()
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
                yield Sample.of(sample_id, place, captions, signature, (path, group, row))
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
