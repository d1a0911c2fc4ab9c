"""Odd GIF, BMP and TIFF files, made in code as `odd_images` makes the others, each with its verdict or its pixels."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
from odd_images import (
    HEIGHT,
    WIDTH,
    Odd,
    alpha,
    as_rgb,
    cmyk_patches,
    cmyk_profile,
    frames,
    indexed,
    indexed_image,
    ink_colour,
    over,
    photo,
    save,
    sixteen_bit_grey,
    stripes,
    turned,
)
from PIL import Image

_SHORT, _LONG = 3, 4
Tags = dict[int, tuple[int, tuple[int, ...]]]
"""Number -> (type, values)."""


def _gif(path: str, reason: str | None = None, transparent: int | None = None, **cut: int) -> Odd:
    indices, palette = indexed()
    colours, image = palette[indices], indexed_image()
    data = save(image, "GIF", **({} if transparent is None else {"transparency": transparent}))
    if transparent is not None:
        colours = over(colours, np.where(indices == transparent, 0, 255))
    return Odd(data[: len(data) - cut.get("cut", 0)], path, reason, None if reason else colours, tolerance=0)


def _bmp_rle() -> Odd:
    palette = b"".join(bytes([i, i, 255 - i, 0]) for i in range(256))
    runs, start = bytes([WIDTH, 7, 0, 0]) * HEIGHT + b"\x00\x01", 54 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 1, len(runs), 0, 0, 0, 0)
    data = b"BM" + struct.pack("<I4xI", start + len(runs), start) + info + palette + runs
    return Odd(data, "rle.bmp", "unsupported-format")


def raw_tiff(tags: Tags, pixels: bytes, *, after: bytes = b"", next_page: int = 0) -> bytes:
    """A TIFF of one strip. `tags` are added to what every strip needs. `after` ends the file."""
    page = {
        256: (_LONG, (WIDTH,)),
        257: (_LONG, (HEIGHT,)),
        259: (_SHORT, (1,)),
        273: (_LONG, (8,)),
        277: (_SHORT, (1,)),
        278: (_LONG, (HEIGHT,)),
        279: (_LONG, (len(pixels),)),
    } | tags
    pixels += bytes(len(pixels) % 2)
    start = 8 + len(pixels)
    beyond = start + 2 + 12 * len(page) + 4
    directory, values = struct.pack("<H", len(page)), b""
    for tag, (kind, numbers) in sorted(page.items()):
        value = struct.pack(f"<{len(numbers)}{'H' if kind == _SHORT else 'I'}", *numbers)
        if len(value) > 4:
            value, values = struct.pack("<I", beyond + len(values)), values + value
        directory += struct.pack("<HHI", tag, kind, len(numbers)) + value.ljust(4, b"\0")
    head = b"II*\0" + struct.pack("<I", start)
    return head + pixels + directory + struct.pack("<I", next_page) + values + after


def _bits(*bits: int) -> Tags:
    return {258: (_SHORT, bits), 277: (_SHORT, (len(bits),))}


def _photometric(value: int) -> Tags:
    return {262: (_SHORT, (value,))}


def _tiff_white_is_zero() -> Odd:
    """Grey of 16 bits a pixel, whose white is zero."""
    levels = sixteen_bit_grey()
    data = raw_tiff(_bits(16) | _photometric(0), (65535 - levels).astype("<u2").tobytes())
    return Odd(data, "16w.tif", pixels=as_rgb(levels / 257.0), tolerance=0.51)


def _tiff_turned(orientation: int) -> Odd:
    tags = _bits(8, 8, 8) | _photometric(2) | {274: (_SHORT, (orientation,))}
    data = raw_tiff(tags, photo().tobytes())
    return Odd(data, f"turned{orientation}.tif", pixels=turned(photo(), orientation), tolerance=0)


def _tiff_premultiplied() -> Odd:
    """Its extra sample is alpha with which the colours are multiplied."""
    stored = (photo() * (alpha()[..., None] / 255.0)).round().astype(np.uint8)
    tags = _bits(8, 8, 8, 8) | _photometric(2) | {338: (_SHORT, (1,))}
    data = raw_tiff(tags, np.dstack([stored, alpha()]).tobytes())
    return Odd(data, "pre.tif", pixels=over(photo(), alpha()), tolerance=2)


def _tiff_cmyk_icc() -> Odd:
    image, corners = cmyk_patches()
    data = save(image, "TIFF", icc_profile=cmyk_profile())
    return Odd(data, "cmyk-icc.tif", pixels=stripes([ink_colour(corner) for corner in corners]), tolerance=3)


def _tiff_of_pages() -> Odd:
    """A second page after the file's end."""
    tags = _bits(8, 8, 8) | _photometric(2)
    start = len(raw_tiff(tags, photo().tobytes()))
    page = struct.pack("<HHHIII", 1, 254, _LONG, 1, 0, 0)
    data = raw_tiff(tags, photo().tobytes(), next_page=start, after=page)
    return Odd(data, "pages.tif", "animated")


def _bmp_rgba() -> Odd:
    rgba = np.dstack([photo()[..., ::-1], alpha()])[::-1]
    info = struct.pack("<IiiHHIIiiII", 108, WIDTH, HEIGHT, 1, 32, 3, rgba.nbytes, 0, 0, 0, 0)
    info += struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + bytes(108 - 56)
    data = b"BM" + struct.pack("<I4xI", 122 + rgba.nbytes, 122) + info + np.ascontiguousarray(rgba).tobytes()
    return Odd(data, "rgba.bmp", pixels=over(photo(), alpha()))


RASTERS: dict[str, Callable[[], Odd]] = {
    "gif-transparent": lambda: _gif("t.gif", transparent=5),
    "truncated-gif": lambda: _gif("cut.gif", "truncated", cut=40),
    "animated-gif": lambda: Odd(frames("GIF", duration=40), "a.gif", "animated"),
    "bmp-rgba": _bmp_rgba,
    "bmp-run-lengths": _bmp_rle,
    "tiff-deflate": lambda: Odd(
        save(Image.fromarray(photo()), "TIFF", compression="tiff_adobe_deflate"), "zip.tif", None, photo(), 0
    ),
    "tiff-turned": lambda: _tiff_turned(6),
    "tiff-16-white-is-zero": _tiff_white_is_zero,
    "tiff-cmyk-icc": _tiff_cmyk_icc,
    "tiff-premultiplied": _tiff_premultiplied,
    "tiff-lab": lambda: Odd(
        raw_tiff(_bits(8, 8, 8) | _photometric(8), photo().tobytes()), "lab.tif", "unsupported-format"
    ),
    "animated-tiff": _tiff_of_pages,
    "corrupt-tiff": lambda: Odd(b"II*\0" + struct.pack("<I", 1 << 30) + bytes(40), "c.tif", "not-an-image"),
    "bomb-tiff": lambda: Odd(
        raw_tiff(_bits(1) | _photometric(1) | {256: (_LONG, (50_000,)), 257: (_LONG, (50_000,))}, bytes(999)),
        "bomb.tif",
        "too-many-pixels",
    ),
}
