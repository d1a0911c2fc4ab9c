"""What can be read of an image file without decoding it: its format, whether it is whole, its EXIF orientation.

Pillow would do some of this, but only by decoding pixels (a PNG whose eXIf chunk comes last), by allocating the canvas
(WebP), or not at all (a JPEG that was only half downloaded into a file of the full size loads with grey below).
No function raises: bytes that make no sense give "unknown", "upright" or "ends early".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from latentcache.types import Size

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_MAGICS = (
    (b"\xff\xd8\xff", "JPEG"),
    (PNG_MAGIC, "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"8BPS", "PSD"),
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}

_JPEG_SCAN, _JPEG_END = 0xDA, b"\xff\xd9"
_ORIENTATION_TAG = 0x0112


def sniff(data: bytes) -> str | None:
    """The image format that the first bytes name, or None. `JPEG`, `PNG`, `WEBP` and `AVIF` are Pillow's names."""
    for magic, name in _MAGICS:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    # "BM" alone begins many a text; the reserved bytes are zero in every bitmap.
    if data[:2] == b"BM" and data[6:10] == bytes(4):
        return "BMP"
    if data[4:8] == b"ftyp":
        length = min(int.from_bytes(data[:4], "big"), 256)
        brands = {data[8:12]} | {data[i : i + 4] for i in range(16, length, 4)}
        if brands & _AVIF_BRANDS:
            return "AVIF"
        if brands & _HEIF_BRANDS:
            return "HEIF"
    return None


def ends_early(data: bytes, name: str) -> bool:
    """Whether the container says that bytes are missing at the end. `name` is JPEG, PNG, WEBP or AVIF."""
    if name == "JPEG":
        # Inside a scan 0xFF is always escaped, so that an end mark after its start is one.
        return data.find(_JPEG_END, _jpeg_scan(data)) < 0
    if name == "PNG":
        return not any(kind == b"IEND" for kind, _, _ in _png_chunks(data))
    if name == "WEBP":
        return len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data)
    return _boxes_end_early(data)


def webp_canvas(data: bytes) -> Size | None:
    """The canvas of a WebP, or None where its first chunk makes no sense."""
    kind = data[12:16]
    if len(data) < 30:
        return None
    if kind == b"VP8X":
        return Size(int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return Size((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Size(height & 0x3FFF, width & 0x3FFF)
    return None


def png_chunk(data: bytes, kind: bytes) -> bytes | None:
    """The first whole chunk of this kind, wherever it is: eXIf may come before or after the pixels."""
    for found, start, end in _png_chunks(data):
        if found == kind:
            return data[start:end]
    return None


def exif_orientation(exif: bytes | None) -> int:
    """The orientation, 1 to 8, in an EXIF block; 1 (upright) if there is none that makes sense."""
    if not exif:
        return 1
    tiff = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 10:
        return 1
    (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
    if directory + 2 > len(tiff):
        return 1
    (num_tags,) = struct.unpack_from(f"{order}H", tiff, directory)
    for offset in range(directory + 2, min(directory + 2 + 12 * num_tags, len(tiff) - 11), 12):
        tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, offset)
        if tag == _ORIENTATION_TAG and count == 1 and kind in (3, 4):
            (value,) = struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", tiff, offset + 8)
            return value if 1 <= value <= 8 else 1
    return 1


def _jpeg_scan(data: bytes) -> int:
    """Where the first scan begins. The segments before it are skipped, since a thumbnail has an end mark too."""
    offset = 2
    while offset + 4 <= len(data):
        if data[offset] != 0xFF:
            return offset
        marker = data[offset + 1]
        if marker == _JPEG_SCAN:
            return offset
        # Fill bytes and the markers that stand alone have no length.
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:
            offset += 1 if marker == 0xFF else 2
        else:
            offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return len(data)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of each whole chunk."""
    offset = len(PNG_MAGIC)
    while offset + 12 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        if offset + 12 + length > len(data):
            return
        yield data[offset + 4 : offset + 8], offset + 8, offset + 8 + length
        offset += 12 + length


def _boxes_end_early(data: bytes) -> bool:
    """Whether a top-level box of an ISO base media file reaches past the end."""
    offset = 0
    while offset + 8 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        if length == 0:  # to the end of the file
            return False
        if length == 1:
            length = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if length < 8:  # nonsense, but not an early end: the decoder will say
            return False
        offset += length
    return offset > len(data)
