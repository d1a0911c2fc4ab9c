"""WebDataset: images and captions as members of tar files, read in place."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from latentcache.dataset.folders import is_image
from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    CaptionError,
    Sample,
    SampleSource,
    Signature,
    captions_in_columns,
    captions_in_text,
    is_hidden,
    read_range,
    refuse_read,
)
from latentcache.errors import DatasetError, ImageRefused
from latentcache.types import Refusal

_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
_BLOCK = tarfile.BLOCKSIZE
# A damaged header gives a TarError; a damaged extended header also what its numbers and names give.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError)


def check_uncompressed(path: str) -> None:
    """Raise DatasetError for a compressed tar: its members cannot be read at random."""
    try:
        start = read_range(path, 0, 8)
    except OSError as error:
        raise DatasetError(path, f"cannot be read: {error.strerror}") from error
    for magic, name in _COMPRESSED:
        if start.startswith(magic):
            raise DatasetError(path, f"is compressed with {name}; decompress it: images do not get smaller by it")


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
    """The members that share a key: places (offset, size) in the tar."""

    images: list[tuple[str, int, int]] = field(default_factory=list)
    text: tuple[int, int] | None = None
    json: tuple[int, int] | None = None


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
            if extension == "txt":
                group.text = (member.offset_data, member.size)
            elif extension == "json":
                group.json = (member.offset_data, member.size)
            else:
                group.images.append((member.name, member.offset_data, member.size))


@dataclass(frozen=True, slots=True)
class _Member:
    tar: str
    offset: int
    num_bytes: int


class WebDatasetSource(SampleSource):
    """Tar files. Members belong together if their paths are equal up to the first dot of the file name: the key.

    The image is the member with an image's suffix; captions are the lines of `.txt`, or columns of `.json`. If columns
    are configured, `.json` comes first. Unlike in WebDataset, the members of a key may be apart in the tar. Samples
    come in the order of the tars' names, then of the members. A tar that is cut or damaged is a Refusal, after the
    samples before the damage; so is its last key, whose caption may be lost. A second image under one key is refused.
    """

    def __init__(self, shards: Sequence[tuple[str, str]], caption_columns: tuple[str, ...] | None):
        """`shards`: (name, path) of each tar, sorted. Raises DatasetError if one is compressed."""
        self._shards, self._columns = tuple(shards), caption_columns
        for _, path in self._shards:
            check_uncompressed(path)

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        for name, path in self._shards:
            try:
                yield from self._samples_of(name, path)
            except OSError as error:
                yield Refusal(name, path, "unreadable", error.strerror or str(error))

    @override
    def read(self, sample: Sample) -> bytes:
        place: _Member = sample.locator
        try:
            status = os.stat(place.tar)
            data = read_range(place.tar, place.offset, place.num_bytes)
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
            yield Sample.of(sample_id, place, captions, signature, _Member(path, offset, num_bytes))

    def _captions(self, path: str, group: _Group) -> tuple[str, ...]:
        """Raises CaptionError."""
        if group.json is not None and (self._columns is not None or group.text is None):
            try:
                row = json.loads(self._member(path, group.json))
            except (ValueError, RecursionError) as error:
                raise CaptionError(f"its .json cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise CaptionError(f"its .json holds a {type(row).__name__}; an object is needed")
            return captions_in_columns(row, self._columns)
        return () if group.text is None else captions_in_text(self._member(path, group.text))

    def _member(self, path: str, place: tuple[int, int]) -> bytes:
        offset, num_bytes = place
        if num_bytes > MAX_CAPTION_BYTES:
            raise CaptionError(f"its caption has {num_bytes:,} bytes; {MAX_CAPTION_BYTES:,} are allowed")
        return read_range(path, offset, num_bytes)
