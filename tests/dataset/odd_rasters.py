"""Odd GIF, BMP and TIFF files, made in code as `odd_images` makes the others, each with its verdict or its pixels."""

from __future__ import annotations

import struct
import zlib
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


def _palette() -> tuple[np.ndarray, Image.Image]:
    """RGB [H, W, 3] of sixteen colours, and the same as an image with a palette."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    indices = ((x // 4 + y // 3) % 16).astype(np.uint8)
    colours = np.stack([np.arange(16) * 17, 255 - np.arange(16) * 13, np.arange(16) * 5 + 40], -1).astype(np.uint8)
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    image.putpalette(colours.tobytes())
    return colours[indices], image


def _gif(path: str, reason: str | None = None, transparent: int | None = None, **cut: int) -> Odd:
    colours, image = _palette()
    data = save(image, "GIF", **({} if transparent is None else {"transparency": transparent}))
    if transparent is not None:
        opacity = np.where(np.asarray(image) == transparent, 0, 255)
        colours = over(colours, opacity)
    return Odd(data[: len(data) - cut.get("cut", 0)], path, reason, None if reason else colours, tolerance=0)


def raw_gif(canvas: tuple[int, int], frame: tuple[int, int], disposal: int = 0) -> bytes:
    """A GIF of one pixel's data whose canvas and frame claim to be (height, width)."""
    control = b"\x21\xf9\x04" + bytes([disposal << 2, 0, 0, 0, 0])
    head = b"GIF89a" + struct.pack("<2HBBB", canvas[1], canvas[0], 0x80, 0, 0) + bytes(3) + b"\xff\xff\xff"
    image = b"\x2c" + struct.pack("<4HB", 0, 0, frame[1], frame[0], 0) + b"\x02\x02\x44\x01\x00"
    return head + control + image + b"\x3b"


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


def _tiff_tile_bomb() -> Odd:
    """A small image in one tile of 60,000 pixels square."""
    tags = _bits(8) | _photometric(1) | {259: (_SHORT, (8,)), 322: (_LONG, (60_000,)), 323: (_LONG, (60_000,))}
    body = zlib.compress(bytes(1 << 20), 9)
    return Odd(raw_tiff(tags | {324: (_LONG, (8,)), 325: (_LONG, (len(body),))}, body), "tile.tif", "corrupt")


def _tiff_tag_bomb() -> Odd:
    """30,000 tags that all name the same 300,000 bytes: nine gigabytes where each is read."""
    num_tags, start = 30_000, 8 + 300_000
    entries = b"".join(struct.pack("<HHII", 1000 + i, 7, 300_000, 8) for i in range(num_tags))
    data = b"II*\0" + struct.pack("<I", start) + bytes(300_000) + struct.pack("<H", num_tags) + entries + bytes(4)
    return Odd(data, "tags.tif", "not-an-image")


def _tiff_page_bomb() -> Odd:
    """Pages inside pages: each directory holds all entries of the next ones."""
    body = bytearray(b"II*\0" + struct.pack("<I", 8))
    for i in range(20_000):
        body += struct.pack("<HI6x", 5_000, 8 + 12 * (i + 1))
    return Odd(bytes(body), "pages.tif", "not-an-image")


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
    "bomb-gif": lambda: Odd(raw_gif((50_000, 50_000), (1, 1), 2), "bomb.gif", "too-many-pixels"),
    "bomb-gif-frame": lambda: Odd(raw_gif((48, 64), (60_000, 60_000), 2), "bomb2.gif", "too-many-pixels"),
    "bomb-tiff": lambda: Odd(
        raw_tiff(_bits(1) | _photometric(1) | {256: (_LONG, (50_000,)), 257: (_LONG, (50_000,))}, bytes(999)),
        "bomb.tif",
        "too-many-pixels",
    ),
    "bomb-tiff-tile": _tiff_tile_bomb,
    "bomb-tiff-tags": _tiff_tag_bomb,
    "bomb-tiff-pages": _tiff_page_bomb,
}
