"""Images that are members of tar files (WebDataset), read in place."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    MAX_IMAGE_BYTES,
    MAX_NAME_CHARS,
    CaptionColumns,
    CaptionError,
    Sample,
    SampleSource,
    Signature,
    captions_in_text,
    is_hidden,
    is_image,
    open_file,
    read_range,
    refuse_read,
    too_large,
)
from latentcache.errors import DatasetError, ImageRefused
from latentcache.types import Refusal

_MAX_HEADER_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 20

_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
_BLOCK = tarfile.BLOCKSIZE
# A damaged header gives a TarError; a damaged extended header also what its numbers and names give.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError)


class TarDamage(Exception):
    """A tar ends early. `reason` is a RefusalReason."""

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(detail)


class TarHeaders(io.BufferedReader):
    """A tar for tarfile, which reads only headers: none may be large, for each is read as a whole."""

    def __init__(self, path: str):
        """Raises OSError, also for what is no regular file."""
        self._path, self._end = path, 0
        super().__init__(open_file(path))

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {size} bytes; {_MAX_HEADER_BYTES:,} are allowed")
        return super().read(size)

    def members(self) -> Iterator[tarfile.TarInfo]:
        """The members, of any kind, one in memory at a time. Raises TarDamage where the tar ends early, and OSError."""
        try:
            with tarfile.open(self._path, "r:", fileobj=self) as tar:
                while (member := tar.next()) is not None:
                    # tarfile would keep every member, a kilobyte each.
                    tar.members = []  # type: ignore[attr-defined]  # typeshed lacks it
                    if member.size < 0 or tar.offset <= self._end:  # it would lead back
                        raise tarfile.HeaderError(f"member {member.name!r:.80} has {member.size:,} bytes")
                    self._end = tar.offset
                    yield member
                self._end = tar.offset
        except _TAR_ERRORS as error:
            raise TarDamage("truncated", f"the tar ends in a broken member: {error}") from error
        # After the last member comes a block of zeros. tarfile stops silently at any other block, too.
        block = read_range(self._path, self._end, _BLOCK)
        if len(block) < _BLOCK:
            raise TarDamage("truncated", f"the tar ends at byte {self._end + len(block):,} without an end mark")
        if any(block):
            raise TarDamage("corrupt", f"no member begins at byte {self._end:,}; what follows is not read")

    def rest(self) -> str | None:
        """What follows the end mark but for the zeros that fill a tar's last record, for messages; None for nothing.

        Call it after `members`.
        """
        num_bytes = os.fstat(self.fileno()).st_size - self._end
        if num_bytes <= _MAX_RECORD_BYTES and not any(read_range(self._path, self._end, _MAX_RECORD_BYTES)):
            return None
        return f"{num_bytes:,} bytes follow its end mark, and are not read: is it several tars?"


def scan(name: str, path: str, parts: frozenset[str] = frozenset()) -> _Tar:
    """Read the headers of a tar. `name` is its name within the dataset, `parts` its parts' columns. Raises OSError."""
    with TarHeaders(path) as file:
        shard = _Tar(name, path, Signature.of(os.fstat(file.fileno())), parts)
        try:
            for member in file.members():
                shard.add(member)
            if shard.damage is None and (rest := file.rest()) is not None:
                shard.refusals.append(Refusal(name, path, "corrupt", rest))
        except TarDamage as damage:
            shard.damage = shard.damage or Refusal(name, path, damage.reason, damage.detail)
    if shard.damage is not None and (cut := shard.groups.pop(shard.last_key, None)) and cut.images:
        detail = "the tar is cut or damaged after this image, where its caption may have been"
        shard.refusals.append(Refusal(f"{name}/{shard.last_key}", f"{path}#{cut.images[0][0]}", "truncated", detail))
    return shard


@dataclass(slots=True)
class _Group:
    """The members that share a key, as places in the tar: captions by `txt` and `json`, parts by their columns."""

    images: list[tuple[str, int, int]] = field(default_factory=list)
    captions: dict[str, tuple[int, int]] = field(default_factory=dict)
    parts: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    """Images that are neither: `cat.depth.png` where no part has the column `depth`."""
    twice: str | None = None
    """A member with captions whose name another has too."""


@dataclass(slots=True)
class _Tar:
    """The contents of one tar by its headers. `damage` is the reason if they end early."""

    name: str
    path: str
    signature: Signature
    part_columns: frozenset[str] = frozenset()
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
        if len(member.name) > MAX_NAME_CHARS:
            place, detail = f"{self.name}@{member.offset}", f"its name has {len(member.name):,} characters"
            self.refusals.append(Refusal(place, self.path, "unreadable", f"{detail}; {MAX_NAME_CHARS:,} are allowed"))
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
                group.twice = member.name if extension in group.captions else group.twice
                group.captions[extension] = (member.offset_data, member.size)
            elif member.size > MAX_IMAGE_BYTES:
                self.refusals.append(Refusal(f"{self.name}/{key}", place, "unreadable", too_large(member.size)))
            else:
                column = extension.rpartition(".")[0]
                if column and column not in self.part_columns:
                    group.others.append(member.name)
                    return
                images = group.parts.setdefault(column, []) if column else group.images
                images.append((member.name, member.offset_data, member.size))


class WebDatasetSource(SampleSource):
    """Tar files. Members belong together if their paths are equal up to the first dot of the file name: the key.

    The image is the member whose name has an image's suffix after the key, and nothing between them: `cat.jpg`, but not
    `cat.depth.png`, which is a further part where one has the column `depth`, and else is left out. Captions are the
    lines of `.txt`, or columns of `.json`. If columns are configured, `.json` comes first, and a column that no sample
    has is a DatasetError at the end. Unlike in WebDataset, the members of a key may be apart in the tar. Samples come
    in the order of the tars' names, then of the members. A tar that is cut or damaged is a Refusal, after the samples
    before the damage; so is its last key, whose caption may be lost. A second image under one key is refused.
    """

    def __init__(
        self,
        shards: Sequence[tuple[str, str]],
        caption_columns: tuple[str, ...] | None,
        parts: tuple[tuple[str, str], ...] = (),
    ):
        """`shards`: (name, path) of each tar, sorted. `parts`: (name, column) of each further part.

        DatasetError if none can be read, and for a compressed one, which has no random access.
        """
        self._shards, self._columns, self._parts = tuple(shards), caption_columns, parts
        unreadable: list[DatasetError] = []
        for _, path in self._shards:
            try:
                start = read_range(path, 0, 8)
            except OSError as error:
                unreadable.append(DatasetError(path, f"cannot be read: {error.strerror}"))
                continue
            for magic, name in _COMPRESSED:
                if start.startswith(magic):
                    raise DatasetError(
                        path, f"is compressed with {name}; decompress it: images do not get smaller by it"
                    )
        if len(unreadable) == len(self._shards):
            raise unreadable[0]

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        columns = CaptionColumns(self._columns)
        for name, path in self._shards:
            try:
                yield from self._samples_of(name, path, columns)
            except OSError as error:
                yield Refusal(name, path, "unreadable", error.strerror or str(error))
        columns.check(self._shards[0][1])

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

    def _samples_of(self, name: str, path: str, columns: CaptionColumns) -> Iterator[Sample | Refusal]:
        shard = scan(name, path, frozenset(column.lower() for _, column in self._parts))
        for key, group in shard.groups.items():
            yield from self._samples_in(f"{name}/{key}", path, shard.signature, group, columns)
        yield from shard.refusals
        if shard.damage is not None:
            yield shard.damage

    def _samples_in(
        self, sample_id: str, path: str, signature: Signature, group: _Group, columns: CaptionColumns
    ) -> Iterator[Sample | Refusal]:
        if group.others and not group.images:
            detail = "it is no image of its key, as its name has a dot before the suffix: rename it, or name the column"
            yield Refusal(sample_id, f"{path}#{group.others[0]}", "missing", detail)
        for number, (member, offset, num_bytes) in enumerate(group.images):
            place = f"{path}#{member}"
            if number:
                yield Refusal(sample_id, place, "duplicate", f"the key has an image already: {group.images[0][0]}")
                continue
            try:
                captions = self._captions(path, group, columns)
                parts = self._parts_of(sample_id, path, signature, group)
            except CaptionError as error:
                yield Refusal(sample_id, place, "bad-caption", str(error))
                continue
            except ImageRefused as refused:
                yield Refusal(sample_id, place, refused.reason, refused.detail)
                continue
            yield Sample.of(sample_id, place, captions, signature, (path, offset, num_bytes), parts)

    def _parts_of(self, sample_id: str, path: str, signature: Signature, group: _Group) -> tuple[Sample, ...]:
        """Raises ImageRefused, naming the part, for one that is not there or there twice."""
        found = []
        for name, column in self._parts:
            members = group.parts.get(column.lower(), [])
            if not members:
                raise ImageRefused(path, "missing", f"{name}: its key has no member .{column} of an image")
            if len(members) > 1:
                names = ", ".join(member for member, _, _ in members)
                raise ImageRefused(path, "duplicate", f"{name}: its key has several: {names}")
            [(member, offset, num_bytes)] = members
            found.append(Sample.of(sample_id, f"{path}#{member}", (), signature, (path, offset, num_bytes)))
        return tuple(found)

    def _captions(self, path: str, group: _Group, columns: CaptionColumns) -> tuple[str, ...]:
        """Raises CaptionError."""
        if group.twice is not None:
            raise CaptionError(f"the tar has two members {group.twice}")
        if "json" in group.captions and (self._columns is not None or "txt" not in group.captions):
            try:
                row = json.loads(_caption_member(path, *group.captions["json"]))
            except (ValueError, RecursionError) as error:
                raise CaptionError(f"its .json cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise CaptionError(f"its .json holds a {type(row).__name__}; an object is needed")
            return columns.captions(row)
        if "txt" not in group.captions:
            return ()
        return captions_in_text(_caption_member(path, *group.captions["txt"]))


def _caption_member(path: str, offset: int, num_bytes: int) -> bytes:
    if num_bytes > MAX_CAPTION_BYTES:
        raise CaptionError(f"its caption has {num_bytes:,} bytes; {MAX_CAPTION_BYTES:,} are allowed")
    return read_range(path, offset, num_bytes)
