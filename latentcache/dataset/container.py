"""What can be read of an image file without decoding it: its format, whether it is whole, its EXIF orientation.

Pillow would do some of this, but only by decoding pixels (a PNG whose eXIf chunk comes last), by allocating the canvas
(WebP), or not at all (a JPEG that was only half downloaded into a file of the full size loads with grey below).
No function raises: bytes that make no sense give "unknown", "upright" or "ends early".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from latentcache.dataset import jpeg_xl_header, tiff_header
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
    """The image format that the first bytes name, or None."""
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


MATROSKA_MAGIC = b"\x1a\x45\xdf\xa3"
"""Of `.mkv` and `.webm`."""


def is_video(data: bytes) -> bool:
    """Whether it is a video of MP4's kind or Matroska's, and no image."""
    return data.startswith(MATROSKA_MAGIC) or (data[4:8] == b"ftyp" and sniff(data) is None)


def ends_early(data: bytes, name: str) -> bool:
    """Whether the container says that bytes are missing at the end. `name` is what `sniff` gives."""
    if name == "JPEG":
        # Inside a scan 0xFF is always escaped, so that an end mark after its start is one.
        return data.find(_JPEG_END, _jpeg_scan(data)) < 0
    if name == "PNG":
        return not any(kind == b"IEND" for kind, _, _ in _png_chunks(data))
    if name == "WEBP":
        return len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data)
    if name == "GIF":
        return not all(is_whole for _, is_whole, _ in _gif_frames(data))
    if name == "BMP":
        return _bmp_ends_early(data)
    if name == "TIFF":
        return tiff_header.ends_early(data)
    if data.startswith(b"\xff\x0a"):  # a JPEG XL without boxes
        return False
    return any(end > len(data) for _, _, end in boxes(data))


def num_frames(data: bytes, name: str) -> int | None:
    """How many pictures a GIF, TIFF or JPEG XL holds, at least; 0 if its header makes no sense. Of others None."""
    if name == "GIF":
        return sum(1 for _ in _gif_frames(data))
    if name == "TIFF":
        return tiff_header.num_pages(data)
    if name == "JPEG XL":
        header = jpeg_xl_header.read_header(data)
        return 0 if header is None else 1 + header[1]
    return None


def frame_times(data: bytes, name: str) -> list[float]:
    """How many ms each frame of an animated GIF, PNG or WebP is shown, in their order; nothing for a still image.

    Frames of 0 ms are shown for 100, as browsers show those of a GIF.
    """
    times: list[float] = []
    if name == "GIF":
        times = [milliseconds for _, _, milliseconds in _gif_frames(data)]
    elif name == "PNG":
        controls = [data[start:end] for kind, start, end in _png_chunks(data) if kind == b"fcTL"]
        for numerator, denominator in (struct.unpack_from(">2H", each, 20) for each in controls if len(each) == 26):
            times.append(1000 * numerator / (denominator or 100))
    elif name == "WEBP":
        times = [float(int.from_bytes(data[start + 12 : start + 15], "little")) for start in _webp_frames(data)]
    return [each or 100.0 for each in times] if len(times) > 1 else []


def _webp_frames(data: bytes) -> Iterator[int]:
    """Where the contents of the frames of an animated WebP start."""
    offset = 12
    while offset + 8 <= len(data):
        if data[offset : offset + 4] == b"ANMF":
            yield offset + 8
        length = int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += 8 + length + length % 2


def canvas(data: bytes, name: str) -> Size | None:
    """The size that a decoder may allocate as soon as it opens the file; None where it allocates nothing then.

    None too where the header makes no sense. Of a TIFF it is the size of a tile.
    """
    if name == "WEBP":
        return _webp_canvas(data)
    if name == "GIF" and (frame := next(_gif_frames(data), None)):
        return frame[0]
    if name == "TIFF":
        return tiff_header.tile_size(data)
    if name == "JPEG XL" and (header := jpeg_xl_header.read_header(data)):
        return header[0]
    return None


def _webp_canvas(data: bytes) -> Size | None:
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


def boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of each top-level box of an ISO base media file. The last one may reach past the end."""
    offset = 0
    while offset + 8 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        if length == 0:  # to the end of the file
            length = len(data) - offset
        elif length == 1:
            length = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if length < 8:  # nonsense, but not an early end: the decoder will say
            return
        yield data[offset + 4 : offset + 8], offset, offset + length
        offset += length


def _gif_frames(data: bytes) -> Iterator[tuple[Size, bool, float]]:
    """For each frame, the canvas that it needs, whether it is whole, and its ms on the screen. Nothing for no GIF."""
    if len(data) < 13:
        return
    height, width = struct.unpack_from("<6x2H", data)[::-1]
    offset, milliseconds = 13 + _gif_table_bytes(data[10]), 0.0
    while offset + 10 <= len(data):
        if data[offset] == 0x21:  # an extension
            if data[offset + 1] == 0xF9:
                milliseconds = 10.0 * int.from_bytes(data[offset + 4 : offset + 6], "little")
            offset = _gif_blocks_end(data, offset + 2)
        elif data[offset] == 0x2C:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<4HB", data, offset + 1)
            offset = _gif_blocks_end(data, offset + 11 + _gif_table_bytes(flags))
            size = Size(max(height, top + frame_height), max(width, left + frame_width))
            yield size, offset <= len(data), milliseconds
            milliseconds = 0.0
        else:  # the end mark, or nonsense
            return


def _gif_table_bytes(flags: int) -> int:
    """The bytes of the colour table that the flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks_end(data: bytes, offset: int) -> int:
    """Where a chain of blocks ends that begins at `offset`: after an empty one. Past the end if there is none."""
    while offset < len(data):
        length = data[offset]
        offset += 1 + length
        if length == 0:
            return offset
    return len(data) + 1


def _bmp_ends_early(data: bytes) -> bool:
    """Whether the rows of a bitmap without compression reach past the end. The last row may lack its padding."""
    if len(data) < 34:
        return True
    start, header_bytes = struct.unpack_from("<10x2I", data)
    if header_bytes == 12:
        width, height, bits = struct.unpack_from("<18x2H2xH", data)
        compression = 0
    else:
        width, height, bits, compression = struct.unpack_from("<18xIi2xHI", data)
    if compression not in (0, 3) or height == 0:  # 3: masks name the bits of each colour
        return False
    row = width * bits
    return bool(start + (row + 31) // 32 * 4 * (abs(height) - 1) + (row + 7) // 8 > len(data))
