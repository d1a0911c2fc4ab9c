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
    grey,
    ink_colour,
    over,
    photo,
    save,
    sixteen_bit_grey,
    stripes,
    turned,
    wide_profile,
    wide_to_srgb,
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


def raw_tiff(tags: Tags, pixels: bytes, *, order: str = "<", after: bytes = b"", next_page: int = 0) -> bytes:
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
    directory, values = struct.pack(f"{order}H", len(page)), b""
    for tag, (kind, numbers) in sorted(page.items()):
        value = struct.pack(f"{order}{len(numbers)}{'H' if kind == _SHORT else 'I'}", *numbers)
        if len(value) > 4:
            value, values = struct.pack(f"{order}I", beyond + len(values)), values + value
        directory += struct.pack(f"{order}HHI", tag, kind, len(numbers)) + value.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    return head + pixels + directory + struct.pack(f"{order}I", next_page) + values + after


def _bits(*bits: int) -> Tags:
    return {258: (_SHORT, bits), 277: (_SHORT, (len(bits),))}


def _photometric(value: int) -> Tags:
    return {262: (_SHORT, (value,))}


def _tiff_grey(path: str, order: str, white: int = 65535, *, white_is_zero: bool = False) -> Odd:
    """Grey of 16 bits a pixel."""
    levels = sixteen_bit_grey()
    stored = white - levels if white_is_zero else levels
    data = raw_tiff(_bits(16) | _photometric(1 - white_is_zero), stored.astype(f"{order}u2").tobytes(), order=order)
    return Odd(data, path, pixels=as_rgb(levels * (255 / white)), tolerance=0.51)


def _tiff_turned(orientation: int) -> Odd:
    tags = _bits(8, 8, 8) | _photometric(2) | {274: (_SHORT, (orientation,))}
    data = raw_tiff(tags, photo().tobytes())
    return Odd(data, f"turned{orientation}.tif", pixels=turned(photo(), orientation), tolerance=0)


def _tiff_alpha(path: str, kind: int) -> Odd:
    """`kind` of the extra sample: 0 means nothing, 1 is alpha with which the colours are multiplied, 2 is alpha."""
    share = alpha()[..., None] / 255.0
    stored = (photo() * share).round() if kind == 1 else photo()
    data = np.dstack([stored.astype(np.uint8), alpha()]).tobytes()
    tags = _bits(8, 8, 8, 8) | _photometric(2) | {338: (_SHORT, (kind,))}
    return Odd(raw_tiff(tags, data), path, pixels=photo() if kind == 0 else over(photo(), alpha()), tolerance=2)


def _tiff_rgb16() -> Odd:
    values = np.stack([sixteen_bit_grey(), sixteen_bit_grey()[::-1], sixteen_bit_grey().T.reshape(HEIGHT, WIDTH)], -1)
    data = raw_tiff(_bits(16, 16, 16) | _photometric(2), values.astype("<u2").tobytes())
    return Odd(data, "rgb16.tif", pixels=values / 257.0)


def _tiff_cmyk(path: str, icc: bytes | None) -> Odd:
    image, corners = cmyk_patches()
    naive = [np.array([(1 - c) * (1 - k), (1 - m) * (1 - k), (1 - y) * (1 - k)]) * 255.0 for c, m, y, k in corners]
    managed = [ink_colour(corner) for corner in corners]
    data = save(image, "TIFF", **({"icc_profile": icc} if icc else {}))
    return Odd(data, path, pixels=stripes(managed if icc else naive), tolerance=3)


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


def _photo_in(name: str, path: str, **options: object) -> Odd:
    return Odd(save(Image.fromarray(photo()), name, **options), path, pixels=photo(), tolerance=0)


def _bmp_rgba() -> Odd:
    rgba = np.dstack([photo()[..., ::-1], alpha()])[::-1]
    info = struct.pack("<IiiHHIIiiII", 108, WIDTH, HEIGHT, 1, 32, 3, rgba.nbytes, 0, 0, 0, 0)
    info += struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + bytes(108 - 56)
    data = b"BM" + struct.pack("<I4xI", 122 + rgba.nbytes, 122) + info + np.ascontiguousarray(rgba).tobytes()
    return Odd(data, "rgba.bmp", pixels=over(photo(), alpha()))


RASTERS: dict[str, Callable[[], Odd]] = {
    "gif": lambda: _gif("s.gif"),
    "gif-transparent": lambda: _gif("t.gif", transparent=5),
    "gif-no-end-mark": lambda: _gif("e.gif", cut=1),
    "truncated-gif": lambda: _gif("cut.gif", "truncated", cut=40),
    "truncated-gif-no-frame": lambda: Odd(raw_gif((48, 64), (48, 64))[:20], "none.gif", "not-an-image"),
    "animated-gif": lambda: Odd(frames("GIF", duration=40), "a.gif", "animated"),
    "bmp": lambda: _photo_in("BMP", "s.bmp"),
    "bmp-grey": lambda: Odd(save(Image.fromarray(grey()), "BMP"), "g.bmp", pixels=as_rgb(grey()), tolerance=0),
    "bmp-palette": lambda: Odd(save(_palette()[1], "BMP"), "p.dib", pixels=_palette()[0], tolerance=0),
    "bmp-rgba": _bmp_rgba,
    "bmp-run-lengths": _bmp_rle,
    "truncated-bmp": lambda: Odd(save(Image.fromarray(photo()), "BMP")[:-200], "t.bmp", "truncated"),
    "tiff": lambda: _photo_in("TIFF", "s.tif"),
    "tiff-big": lambda: _photo_in("TIFF", "b.tiff", big_tiff=True),
    "tiff-deflate": lambda: _photo_in("TIFF", "zip.tif", compression="tiff_adobe_deflate"),
    "tiff-wide": lambda: Odd(
        save(Image.fromarray(photo()), "TIFF", icc_profile=wide_profile()), "w.tif", None, wide_to_srgb(photo()), 2
    ),
    "tiff-turned": lambda: _tiff_turned(6),
    "tiff-16": lambda: _tiff_grey("16.tif", "<"),
    "tiff-16-big-endian": lambda: _tiff_grey("16b.tif", ">"),
    "tiff-16-white-is-zero": lambda: _tiff_grey("16w.tif", "<", white_is_zero=True),
    "tiff-rgb-16": _tiff_rgb16,
    "tiff-cmyk": lambda: _tiff_cmyk("cmyk.tif", None),
    "tiff-cmyk-icc": lambda: _tiff_cmyk("cmyk-icc.tif", cmyk_profile()),
    "tiff-extra": lambda: _tiff_alpha("x.tif", 0),
    "tiff-premultiplied": lambda: _tiff_alpha("pre.tif", 1),
    "tiff-alpha": lambda: _tiff_alpha("a.tif", 2),
    "tiff-lab": lambda: Odd(
        raw_tiff(_bits(8, 8, 8) | _photometric(8), photo().tobytes()), "lab.tif", "unsupported-format"
    ),
    "animated-tiff": _tiff_of_pages,
    "truncated-tiff": lambda: Odd(save(Image.fromarray(photo()), "TIFF")[:-200], "t.tif", "truncated"),
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
