"""The size in the header of a JPEG XL, and whether it is an animation: its plug-in decodes as soon as it opens a file.

(Source: ISO/IEC 18181-1, `SizeHeader` and `ImageMetadata`; 18181-2 for the boxes around them.)
"""

from __future__ import annotations

from collections.abc import Iterator

from latentcache.types import Size

_CODESTREAM = b"\xff\x0a"
_RATIOS = {1: (1, 1), 2: (6, 5), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
"""Width to height, by the header's number."""
_HEADER_BYTES = 32


def read_header(data: bytes) -> tuple[Size, bool] | None:
    """The size before any turn, and whether it is an animation; None where there is no header.

    An animation that also holds a preview counts as a still image.
    """
    start = _start(data)
    if start is None:
        return None
    bits = _bits(data[start + len(_CODESTREAM) : start + _HEADER_BYTES])
    try:
        size = _size(bits)
        is_animated = False
        if not _take(bits, 1) and _take(bits, 1):  # not all default, and with extra fields
            _take(bits, 3)  # the orientation, which the decoder applies
            if _take(bits, 1):
                _size(bits)  # the intrinsic size
            is_animated = not _take(bits, 1) and bool(_take(bits, 1))
    except StopIteration:
        return None
    return size, is_animated


def _start(data: bytes) -> int | None:
    """Where the codestream begins: at once, or in the first box that holds it or a part of it."""
    if data.startswith(_CODESTREAM):
        return 0
    offset = 0
    while offset + 8 <= len(data):
        length, kind, head = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8], 8
        if length == 1:
            length, head = int.from_bytes(data[offset + 8 : offset + 16], "big"), 16
        if kind in (b"jxlc", b"jxlp"):
            start = offset + head + (4 if kind == b"jxlp" else 0)
            return start if data.startswith(_CODESTREAM, start) else None
        if length < head:
            return None
        offset += length
    return None


def _bits(data: bytes) -> Iterator[int]:
    """The bits, the lowest of each byte first."""
    return (byte >> place & 1 for byte in data for place in range(8))


def _take(bits: Iterator[int], count: int) -> int:
    """The next `count` bits as a number. Raises StopIteration."""
    value = 0
    for place in range(count):
        value |= next(bits) << place
    return value


def _size(bits: Iterator[int]) -> Size:
    is_small = _take(bits, 1)

    def side() -> int:
        if is_small:
            return 8 * (1 + _take(bits, 5))
        return 1 + _take(bits, (9, 13, 18, 30)[_take(bits, 2)])

    height = side()
    ratio = _take(bits, 3)
    if ratio == 0:
        return Size(height, side())
    across, down = _RATIOS[ratio]
    return Size(height, height * across // down)
