"""The directories of a TIFF or BigTIFF: how many pages it has, how large a tile is, whether it is whole.

Pillow reads a directory's values as soon as it opens a file, and some versions read the same bytes once per tag. Here a
directory that names more bytes than the file has makes no sense, and ends the walk. No function raises.
(Source: TIFF revision 6.0, sections 2 and 15; the BigTIFF design.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from latentcache.types import Size

_SUBFILE_TYPE, _STRIP_OFFSETS, _STRIP_BYTES = 254, 273, 279
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325
_READ = {_SUBFILE_TYPE, _STRIP_OFFSETS, _STRIP_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES}
_NO_PAGE_OF_ITS_OWN = 1 | 4
"""Bits of the subfile type: a smaller copy of another page, and a mask for one."""
_NUM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of one value, by the type's number."""
_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_MAX_STRIPS = 1 << 19
"""Tiles of 16 x 16 pixels, of 100 megapixels."""

_Tags = dict[int, tuple[int, ...]]


def num_pages(data: bytes) -> int:
    """How many pictures there are: smaller copies and masks are none. 0 if the first directory makes no sense."""
    kinds = [tags.get(_SUBFILE_TYPE, (0,))[0] for tags in _pages(data)]
    return sum(index == 0 or not kind & _NO_PAGE_OF_ITS_OWN for index, kind in enumerate(kinds))


def tile_size(data: bytes) -> Size | None:
    """The size of the first page's tiles, which the decoder allocates whole; None if it has strips."""
    tags = next(_pages(data), {})
    height, width = tags.get(_TILE_HEIGHT), tags.get(_TILE_WIDTH)
    return Size(height[0], width[0]) if height and width else None


def ends_early(data: bytes) -> bool:
    """Whether a strip or tile of the first page reaches past the end."""
    tags = next(_pages(data), {})
    for starts, lengths in ((_STRIP_OFFSETS, _STRIP_BYTES), (_TILE_OFFSETS, _TILE_BYTES)):
        # A file without byte counts says only where its strips begin.
        pairs = zip(tags.get(starts, ()), tags.get(lengths, tags.get(starts, ())), strict=False)
        if any(start + (length if lengths in tags else 1) > len(data) for start, length in pairs):
            return True
    return False


def _pages(data: bytes) -> Iterator[_Tags]:
    """The tags that are read here, of each directory that makes sense."""
    order, is_big = "<" if data[:2] == b"II" else ">", b"+" in data[2:4]
    word, word_bytes = ("Q", 8) if is_big else ("I", 4)
    entry_bytes = 4 + 2 * word_bytes
    seen, left = set[int](), len(data)
    try:
        (offset,) = struct.unpack_from(order + word, data, word_bytes)
        while offset and offset not in seen:
            seen.add(offset)
            (num_tags,) = struct.unpack_from(order + ("Q" if is_big else "H"), data, offset)
            start = offset + (8 if is_big else 2)
            end = start + num_tags * entry_bytes
            tags: _Tags = {}
            left -= end - offset
            if left < 0:
                return
            for tag, kind, count, value in struct.iter_unpack(f"{order}HH{word}{word_bytes}s", data[start:end]):
                num_bytes = count * _NUM_BYTES.get(kind, 0)
                left -= num_bytes if num_bytes > word_bytes else 0
                if left < 0 or (tag in _READ and count > _MAX_STRIPS):
                    return
                if tag in _READ and kind in _INTEGERS and count:
                    source, at = (value, 0) if num_bytes <= word_bytes else (data, _integer(value, order))
                    tags.setdefault(tag, struct.unpack_from(f"{order}{count}{_INTEGERS[kind]}", source, at))
            yield tags
            (offset,) = struct.unpack_from(order + word, data, end)
    except (struct.error, OverflowError):
        return


def _integer(value: bytes, order: str) -> int:
    return int.from_bytes(value, "little" if order == "<" else "big")
