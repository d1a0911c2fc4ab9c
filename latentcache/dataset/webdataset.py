"""Images in tar files (WebDataset), read in place."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence

from typing_extensions import override

from latentcache.dataset.samples import (
    CaptionColumns,
    Sample,
    SampleSource,
    Signature,
    bad_caption,
    caption_bytes,
    captions_at,
    is_hidden,
    is_image,
    read_image,
    read_range,
    refusal_of,
    signature_of,
)
from latentcache.errors import ImageRefused
from latentcache.types import Refusal

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of tars, also of compressed ones, so that these are refused by name."""
# A damaged header raises TarError; a damaged extended header also whatever parsing its numbers and names raises.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError, MemoryError)

_Member = tuple[str, int, int]
"""A member's name, offset and size in bytes."""
_Group = dict[str, list[_Member]]
"""The members of a key by kind: `txt`, `json`, `.image`, and `depth.image` for `depth.png`. All lower-case."""


def members(path: str) -> Iterator[tarfile.TarInfo]:
    """Iterate over the members of an uncompressed tar, of any type, keeping one in memory at a time.

    Raises OSError, and ImageRefused if the tar is truncated (after yielding the cut member) or damaged.
    """
    end, size = -1, os.path.getsize(path)
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all, a kilobyte each
                if member.size < 0 or tar.offset <= end:  # it would point backwards
                    raise tarfile.HeaderError(f"member {member.name!r:.80} has {member.size:,} bytes")
                end = tar.offset
                yield member
                if member.offset_data + member.size > size:
                    raise ImageRefused(path, "truncated", f"the tar ends inside its member {member.name}")
            end = tar.offset
    except _TAR_ERRORS as error:
        detail = f"it cannot be read: {error}. Decompress a compressed tar first: it has no random access"
        raise ImageRefused(path, "truncated", detail) from error
    mark = read_range(path, end, tarfile.BLOCKSIZE)  # tarfile stops silently at garbage
    if len(mark) < tarfile.BLOCKSIZE or any(mark):
        raise ImageRefused(path, "truncated", f"the tar is cut or damaged at byte {end:,}: there is no end mark")


class WebDatasetSource(SampleSource):
    """Tar files. Members with the same key, the path up to the first dot of the file name, make up a sample.

    The image is the member whose name is the key and an image suffix: `cat.jpg`. `cat.depth.png` is a companion if one
    has the column `depth`; otherwise it is skipped. Captions are the lines of `.txt`, or columns of `.json`. If columns
    are configured, `.json` wins, and a column that no sample has raises DatasetError at the end. Unlike in WebDataset,
    the members of a key need not be adjacent. Samples are ordered by tar name, then by member. A truncated or damaged
    tar is a Refusal, after the samples before the damage; so is its last key, whose caption may be lost. A second image
    with the same key is refused.
    """

    kind = "webdataset"

    def __init__(
        self,
        shards: Sequence[tuple[str, str]],
        caption_columns: tuple[str, ...] | None,
        companions: tuple[tuple[str, str], ...] = (),
    ):
        """`shards` are sorted pairs (name, path). `companions` are pairs (name, column)."""
        self.path = shards[0][1]
        self._shards, self._columns = tuple(shards), caption_columns
        self._companions = [(name, column.lower()) for name, column in companions]

    @override
    def _listed(self) -> Iterator[Sample | Refusal]:
        columns = CaptionColumns(self._columns)
        for name, path in self._shards:
            try:
                yield from self._samples_of(name, path, signature_of(path), columns)
            except (ImageRefused, OSError) as error:
                yield refusal_of(name, path, error)
        columns.check(self.path)

    @override
    def read(self, sample: Sample) -> bytes:
        data, then = read_image(sample.path, *sample.locator), sample.signature
        now = signature_of(sample.locator[0])
        if then is not None and (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
            raise ImageRefused(sample.path, "changed", "the tar changed during the run; run precache again")
        return data

    def _samples_of(
        self, name: str, path: str, signature: Signature, columns: CaptionColumns
    ) -> Iterator[Sample | Refusal]:
        """The samples of a tar. All headers are read first, because a caption may come long after its image."""
        groups: dict[str, _Group] = {}
        refused: list[Refusal] = []
        key = ""
        try:
            for member in members(path):
                folder, _, base = member.name.removeprefix("./").rpartition("/")
                stem, _, what = base.partition(".")
                what = f"{what.rpartition('.')[0]}.image".lower() if is_image(base) else what.lower()
                if member.isdir() or is_hidden(base) or not (is_image(base) or what in ("txt", "json")):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if member.isreg() and not member.issparse():
                    place = member.name, member.offset_data, member.size
                    groups.setdefault(key, {}).setdefault(what, []).append(place)
                else:
                    problem = "the tar member is not a regular file"
                    refused.append(Refusal(f"{name}/{key}", f"{path}#{member.name}", "unreadable", problem))
        except ImageRefused as damage:
            if cut := groups.pop(key, {}).get(".image"):
                detail = "the tar is cut or damaged after this image, so its caption may be lost"
                refused.append(Refusal(f"{name}/{key}", f"{path}#{cut[0][0]}", "truncated", detail))
            refused.append(refusal_of(name, path, damage))
        for key, group in groups.items():
            yield from self._samples_in(f"{name}/{key}", path, signature, group, columns)
        yield from refused

    def _samples_in(
        self, sample_id: str, path: str, signature: Signature, group: _Group, columns: CaptionColumns
    ) -> Iterator[Sample | Refusal]:
        if ".image" not in group:
            known = [f"{column}.image" for _, column in self._companions]
            if others := [what for what in group if what.endswith(".image") and what not in known]:
                detail = "its name has a dot before the suffix, so it is not an image: rename it, or name the column"
                yield Refusal(sample_id, f"{path}#{group[others[0]][0][0]}", "missing", detail)
            return
        (member, *image), *again = group[".image"]
        place = f"{path}#{member}"
        try:
            captions, companions = self._captions(path, group, columns), self._companions_of(path, group)
            parts = tuple(
                Sample(sample_id, f"{path}#{at[0]}", signature=signature, locator=(path, *at[1:])) for at in companions
            )
            yield Sample(sample_id, place, captions or ("",), signature, (path, *image), parts)
        except ImageRefused as error:
            yield refusal_of(sample_id, place, error)
        for file, _, _ in again:
            yield Refusal(sample_id, f"{path}#{file}", "duplicate", f"the key already has an image: {member}")

    def _companions_of(self, path: str, group: _Group) -> list[_Member]:
        """The companions of a key. Raises ImageRefused, naming the companion, for a missing or duplicate one."""
        found = []
        for name, column in self._companions:
            places = group.get(f"{column}.image", [])
            if not places:
                raise ImageRefused(path, "missing", f"{name}: the key has no image member .{column}")
            if len(places) > 1:
                names = ", ".join(member for member, _, _ in places)
                raise ImageRefused(path, "duplicate", f"{name}: the key has several, {names}; keep one")
            found += places
        return found

    def _captions(self, path: str, group: _Group, columns: CaptionColumns) -> tuple[str, ...]:
        """The captions of a key. Raises ImageRefused."""
        places = {what: group[what] for what in ("txt", "json") if what in group}
        for several in places.values():
            if len(several) > 1:
                raise bad_caption(path, f"the tar has two members {several[1][0]}")
        if "json" in places and (self._columns is not None or "txt" not in places):
            try:
                row = json.loads(caption_bytes(path, places["json"][0][1:]))
            except (ValueError, RecursionError) as error:
                raise bad_caption(path, f"its .json cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise bad_caption(path, f"its .json holds a {type(row).__name__}; expected an object")
            return columns.captions(row, path)
        return captions_at(path, places["txt"][0][1:]) if "txt" in places else ()
