"""Odd images, made in code, each with its verdict and, if it is accepted, pixels computed in numpy.

`CORPUS` maps a name to a function, so that nothing is made at import.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 48, 64


@dataclass(frozen=True)
class Odd:
    """`reason` is the refusal, or None. `pixels` are the expected ones, to within `tolerance` of 255."""

    data: bytes
    path: str
    reason: str | None = None
    pixels: np.ndarray | None = None
    tolerance: float = 1.0


def photo(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Smooth, without symmetry, so that any wrong turn shows: uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    channels = (200 * x / width + 40, 180 * y / height + 30, 120 * (x / width) * (y / height) + 60)
    return np.stack(channels, axis=-1).astype(np.uint8)


def grey() -> np.ndarray:
    return photo()[..., 0]


def alpha() -> np.ndarray:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return (255 * ((x + y) % 32) / 31).astype(np.uint8)


def over(colour: np.ndarray, opacity: np.ndarray, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    share = (opacity / 255.0)[..., None]
    return colour * share + np.array(background) * (1 - share)


def as_rgb(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=-1)


def save(image: Image.Image, name: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def png(array: np.ndarray, **options: object) -> bytes:
    return save(Image.fromarray(array), "PNG", **options)


def jpeg(array: np.ndarray | None = None, **options: object) -> bytes:
    return save(
        Image.fromarray(photo() if array is None else array), "JPEG", **{"quality": 95, "subsampling": 0} | options
    )


def exif(orientation: int) -> bytes:
    """The smallest EXIF block: one tag, big-endian."""
    return b"Exif\x00\x00MM\x00*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What a viewer shows of stored `pixels`, from the table in the EXIF standard: where row 0 and column 0 are."""
    return {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels, 1),
    }[orientation]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(
    size: tuple[int, int], depth: int, colour_type: int, rows: bytes, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG of (height, width) from its filtered rows, for what Pillow cannot write. `before`, `after`: chunks."""
    header = struct.pack(">IIBBBBB", size[1], size[0], depth, colour_type, 0, 0, 0)
    body = before + chunk(b"IDAT", zlib.compress(rows, 9)) + after
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def filtered(rows: np.ndarray) -> bytes:
    """Rows of bytes, each after filter type 0."""
    return b"".join(b"\x00" + row.tobytes() for row in rows)


def png_bomb(side: int) -> bytes:
    """side x side white pixels of one bit, deflated without ever being held in memory."""
    deflate = zlib.compressobj(9)
    row = b"\x00" + b"\xff" * ((side + 7) // 8)
    body = b"".join([deflate.compress(row) for _ in range(side)] + [deflate.flush()])
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# --- ICC profiles, by hand -------------------------------------------------------------------------------------------

D50 = np.array([0.9642, 1.0, 0.8249])
SRGB_TO_XYZ_D50 = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
WIDE_TO_XYZ_D50 = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
"""Adobe RGB (1998), adapted to D50."""
WIDE_GAMMA = 563 / 256


def _s15fixed16(values: np.ndarray) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _profile(colour_space: bytes, connection: bytes, device: bytes, tags: dict[bytes, bytes]) -> bytes:
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"test\x00" + bytes(78),
        b"cprt": b"text" + bytes(4) + b"none\x00",
        b"wtpt": b"XYZ " + bytes(4) + _s15fixed16(D50),
    } | tags
    offset, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        table += name + struct.pack(">II", offset + len(body), len(value))
        body += value
    size = offset + len(body)
    header = struct.pack(">I4xI", size, 0x02100000) + device + colour_space + connection
    header += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _s15fixed16(D50)
    return header + bytes(128 - len(header)) + struct.pack(">I", len(tags)) + table + body


def _gamma(value: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(value * 256)) + bytes(2)


def wide_profile() -> bytes:
    tags = {
        name: b"XYZ " + bytes(4) + _s15fixed16(WIDE_TO_XYZ_D50[:, i])
        for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))
    }
    return _profile(b"RGB ", b"XYZ ", b"mntr", tags | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _gamma(WIDE_GAMMA)))


def grey_profile(gamma: float) -> bytes:
    return _profile(b"GRAY", b"XYZ ", b"mntr", {b"kTRC": _gamma(gamma)})


def srgb_encode(linear: np.ndarray) -> np.ndarray:
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def srgb_decode(values: np.ndarray) -> np.ndarray:
    values = values / 255.0
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def wide_to_srgb(pixels: np.ndarray) -> np.ndarray:
    linear = (pixels / 255.0) ** WIDE_GAMMA
    return srgb_encode(linear @ (np.linalg.inv(SRGB_TO_XYZ_D50) @ WIDE_TO_XYZ_D50).T)


INKS = np.array([[0, 150, 200], [200, 40, 120], [240, 220, 60], [50, 50, 50]])
"""What the press of the CMYK profile prints for full cyan, magenta, yellow and black, in sRGB."""


def ink_colour(cmyk: tuple[int, int, int, int]) -> np.ndarray:
    """sRGB of a corner of the CMYK cube (each ink 0 or 1), as the profile defines it."""
    colour = np.array([255.0, 255.0, 255.0])
    for amount, ink in zip(cmyk, INKS, strict=True):
        colour = colour * (ink / 255.0) if amount else colour
    return colour


def _lab16(srgb: np.ndarray) -> bytes:
    xyz = SRGB_TO_XYZ_D50 @ srgb_decode(srgb) / D50
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    lab = np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
    return struct.pack(">3H", *np.round([lab[0] * 652.8, (lab[1] + 128) * 256, (lab[2] + 128) * 256]).astype(int))


def cmyk_profile() -> bytes:
    """A press whose table has two points a side: lut16Type, CMYK -> Lab. Other intents than perceptual print grey."""
    corners = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    identity = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    ramp = struct.pack(">2H", 0, 65535)
    head = b"mft2" + bytes(4) + bytes([4, 3, 2, 0]) + identity + struct.pack(">2H", 2, 2) + ramp * 4
    perceptual = head + b"".join(_lab16(ink_colour(corner)) for corner in corners) + ramp * 3
    other = head + _lab16(np.full(3, 128.0)) * len(corners) + ramp * 3
    return _profile(b"CMYK", b"Lab ", b"prtr", {b"A2B0": perceptual, b"A2B1": other, b"A2B2": other})


# --- the corpus ------------------------------------------------------------------------------------------------------


def cmyk_patches() -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """Flat stripes of 16 pixels, which JPEG keeps: paper, each ink, and two overprints."""
    corners = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0)]
    pixels = np.repeat(np.array(corners, dtype=np.uint8) * 255, 16, axis=0)
    return Image.fromarray(np.broadcast_to(pixels, (32, *pixels.shape)).copy(), "CMYK"), corners


def stripes(colours: list[np.ndarray]) -> np.ndarray:
    row = np.repeat(np.array(colours), 16, axis=0)
    return np.broadcast_to(row, (32, *row.shape))


def frames(name: str, **options: object) -> bytes:
    images = [Image.fromarray(photo()), Image.fromarray(photo()[:, ::-1].copy()), Image.fromarray(photo()[::-1].copy())]
    return save(images[0], name, save_all=True, append_images=images[1:], **options)


def sixteen_bit_grey() -> np.ndarray:
    return np.linspace(0, 65535, HEIGHT * WIDTH).round().astype(np.uint16).reshape(HEIGHT, WIDTH)


def _late_exif() -> Odd:
    data = raw_png((HEIGHT, WIDTH), 8, 2, filtered(photo()), after=chunk(b"eXIf", exif(6)[6:]))
    return Odd(data, "late-exif.png", pixels=turned(photo(), 6), tolerance=0)


def _sixteen_bit_rgb() -> Odd:
    values = np.stack([sixteen_bit_grey(), sixteen_bit_grey()[::-1], sixteen_bit_grey().T.reshape(HEIGHT, WIDTH)], -1)
    data = raw_png((HEIGHT, WIDTH), 16, 2, filtered(values.astype(">u2")))
    return Odd(data, "rgb16.png", pixels=values / 257.0)


def _grey_with_colour_key(depth: int) -> Odd:
    """Grey of `depth` bits in which one level is transparent, and so becomes the (white) background."""
    levels = 2**depth
    key = levels // 2 - 1
    values = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 7) % levels
    if depth == 16:
        packed = values.astype(">u2")
    elif depth == 8:
        packed = values.astype(np.uint8)
    else:
        bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
        packed = np.packbits(bits.reshape(HEIGHT, -1), axis=-1)
    data = raw_png((HEIGHT, WIDTH), depth, 0, filtered(packed), before=chunk(b"tRNS", struct.pack(">H", key)))
    if depth in (2, 4, 16):
        return Odd(data, f"key{depth}.png", "unsupported-format")
    shown = np.where(values == key, 255.0, values * 255.0 / (levels - 1))
    return Odd(data, f"key{depth}.png", pixels=as_rgb(shown))


def _rgb_with_colour_key(depth: int) -> Odd:
    # The low bytes are the same in all pixels, and differ from the high ones.
    pixels = photo().astype(np.uint16) * (256 if depth == 16 else 1) + (7 if depth == 16 else 0)
    key = pixels[20, 30]
    data = raw_png(
        (HEIGHT, WIDTH),
        depth,
        2,
        filtered(pixels.astype(">u2" if depth == 16 else np.uint8)),
        before=chunk(b"tRNS", struct.pack(">3H", *(int(value) for value in key))),
    )
    if depth == 16:
        return Odd(data, "rgbkey16.png", "unsupported-format")
    shown = np.where((pixels == key).all(-1, keepdims=True), 255, photo())
    return Odd(data, f"rgbkey{depth}.png", pixels=shown, tolerance=0)


def indexed() -> tuple[np.ndarray, np.ndarray]:
    """Indices [H, W] and the palette [16, 3]."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    colours = np.stack([np.arange(16) * 17, 255 - np.arange(16) * 13, np.arange(16) * 5 + 40], -1).astype(np.uint8)
    return ((x // 4 + y // 3) % 16).astype(np.uint8), colours


def indexed_image() -> Image.Image:
    indices, colours = indexed()
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    image.putpalette(colours.tobytes())
    return image


def _palette_transparent(path: str, transparency: bytes | int) -> Odd:
    indices, colours = indexed()
    opacity = np.full(256, 255)
    if isinstance(transparency, int):
        opacity[transparency] = 0
    else:
        opacity[: len(transparency)] = list(transparency)
    data = save(indexed_image(), "PNG", transparency=transparency)
    return Odd(data, path, pixels=over(colours[indices], opacity[indices]))


def _one_bit() -> Odd:
    bits = grey() > 120
    return Odd(save(Image.fromarray(bits), "PNG"), "bit.png", pixels=as_rgb(bits * 255), tolerance=0)


def _la() -> Odd:
    data = save(Image.merge("LA", [Image.fromarray(grey()), Image.fromarray(alpha())]), "PNG")
    return Odd(data, "la.png", pixels=over(as_rgb(grey()), alpha()))


def _rgba(path: str, name: str, tolerance: float = 1.0, **options: object) -> Odd:
    rgba = np.dstack([photo(), alpha()])
    return Odd(save(Image.fromarray(rgba), name, **options), path, pixels=over(photo(), alpha()), tolerance=tolerance)


def _cmyk(path: str, icc: bytes | None) -> Odd:
    image, corners = cmyk_patches()
    naive = [np.array([(1 - c) * (1 - k), (1 - m) * (1 - k), (1 - y) * (1 - k)]) * 255.0 for c, m, y, k in corners]
    managed = [ink_colour(corner) for corner in corners]
    data = save(image, "JPEG", quality=100, subsampling=0, **({"icc_profile": icc} if icc else {}))
    return Odd(data, path, pixels=stripes(managed if icc == cmyk_profile() else naive), tolerance=4)


def _mpo() -> Odd:
    return Odd(frames("MPO", quality=95, subsampling=0), "phone.jpg", pixels=photo(), tolerance=6)


def _icc_bomb() -> Odd:
    """A profile of 64 MiB."""
    body = chunk(b"iCCP", b"icc\x00\x00" + zlib.compress(bytes(64 << 20), 9))
    return Odd(raw_png((HEIGHT, WIDTH), 8, 2, filtered(photo()), before=body), "icc-bomb.png", reason="corrupt")


def _flipped_bit() -> Odd:
    """A flipped bit of a pixel. zlib's own checksum is in a chunk apart, to which Pillow's load never gets."""
    body = bytearray(zlib.compress(filtered(photo()), 0))
    chunks = [bytearray(chunk(b"IDAT", bytes(part))) for part in (body[:-4], body[-4:])]
    chunks[0][3000] ^= 4
    data = raw_png((HEIGHT, WIDTH), 8, 2, b"")
    start = data.index(b"IDAT") - 4
    return Odd(data[:start] + b"".join(chunks) + chunk(b"IEND", b""), "flipped.png", reason="corrupt")


def _zero_padded() -> Odd:
    data = jpeg(photo(480, 640))
    return Odd(data[: len(data) // 2] + bytes(len(data) - len(data) // 2), "padded.jpg", reason="truncated")


def _thumbnailed() -> Odd:
    """Cut in the scan, but with an end mark in front of it, in the thumbnail."""
    block = exif(1) + jpeg(photo(16, 16))
    data = jpeg(photo(480, 640), exif=block)
    return Odd(data[: len(data) // 2], "thumbnail.jpg", reason="truncated")


def _pixels(data: bytes, path: str, tolerance: float) -> Odd:
    return Odd(data, path, pixels=photo(), tolerance=tolerance)


def _strip(path: str, height: int, width: int, reason: str) -> Odd:
    return Odd(png(np.zeros((height, width, 3), np.uint8)), path, reason)


def _wide_gamut() -> Odd:
    return Odd(png(photo(), icc_profile=wide_profile()), "wide.png", pixels=wide_to_srgb(photo()), tolerance=2)


def _wide_rgba() -> Odd:
    data = png(np.dstack([photo(), alpha()]), icc_profile=wide_profile())
    return Odd(data, "wide-rgba.png", pixels=over(wide_to_srgb(photo()), alpha()), tolerance=2)


def _wide_grey() -> Odd:
    """A grey image with an RGB profile, as many tools write: each level is a neutral colour of that profile."""
    data = png(grey(), icc_profile=wide_profile())
    return Odd(data, "wide-grey.png", pixels=wide_to_srgb(as_rgb(grey())), tolerance=2)


def _linear_grey() -> Odd:
    data = png(grey(), icc_profile=grey_profile(1.0))
    return Odd(data, "linear-grey.png", pixels=srgb_encode(as_rgb(grey()) / 255.0), tolerance=2)


def _exif_jpeg(orientation: int) -> Odd:
    data = jpeg(exif=exif(orientation))
    return Odd(data, f"exif{orientation}.jpg", pixels=turned(photo(), orientation), tolerance=6)


# GIF, BMP and TIFF

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


CORPUS: dict[str, Callable[[], Odd]] = {
    **{f"exif-{n}": (lambda n=n: _exif_jpeg(n)) for n in range(1, 9)},
    "exif-png": lambda: Odd(png(photo(), exif=exif(8)), "e.png", pixels=turned(photo(), 8), tolerance=0),
    "exif-png-late": _late_exif,
    "exif-webp": lambda: Odd(
        save(Image.fromarray(photo()), "WEBP", lossless=True, exif=exif(5)),
        "e.webp",
        pixels=turned(photo(), 5),
        tolerance=0,
    ),
    "exif-avif": lambda: Odd(
        save(Image.fromarray(photo()), "AVIF", quality=100, subsampling="4:4:4", exif=exif(6)),
        "e.avif",
        pixels=turned(photo(), 6),
        tolerance=6,
    ),
    "exif-broken": lambda: _pixels(jpeg(exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f"), "b.jpg", 6),
    "jpeg": lambda: _pixels(jpeg(), "a.jpg", 6),
    "jpeg-mpo": _mpo,
    "jpeg-polyglot": lambda: _pixels(jpeg() + b"PK\x03\x04<script>alert(1)</script>", "poly.jpg", 6),
    "cmyk": lambda: _cmyk("cmyk.jpg", None),
    "cmyk-icc": lambda: _cmyk("cmyk-icc.jpg", cmyk_profile()),
    "icc-wide": _wide_gamut,
    "icc-wide-alpha": _wide_rgba,
    "icc-wide-grey": _wide_grey,
    "icc-linear-grey": _linear_grey,
    "icc-of-grey-on-rgb": lambda: _pixels(png(photo(), icc_profile=grey_profile(1.0)), "mismatch.png", 0),
    "icc-broken": lambda: _pixels(png(photo(), icc_profile=b"not a profile at all"), "icc.png", 0),
    "grey-16": lambda: Odd(
        raw_png((HEIGHT, WIDTH), 16, 0, filtered(sixteen_bit_grey().astype(">u2"))),
        "grey16.png",
        pixels=as_rgb(sixteen_bit_grey() / 257.0),
        tolerance=0.51,
    ),
    "rgb-16": _sixteen_bit_rgb,
    **{f"key-grey-{depth}": (lambda depth=depth: _grey_with_colour_key(depth)) for depth in (1, 4, 8, 16)},
    **{f"key-rgb-{depth}": (lambda depth=depth: _rgb_with_colour_key(depth)) for depth in (8, 16)},
    "one-bit": _one_bit,
    "grey-alpha": _la,
    "palette-one-transparent": lambda: _palette_transparent("p1.png", 3),
    "palette-alpha": lambda: _palette_transparent("pa.png", bytes(range(0, 256, 17))),
    "webp-alpha": lambda: _rgba("a.webp", "WEBP", lossless=True, exact=True),
    "avif": lambda: _pixels(save(Image.fromarray(photo()), "AVIF", quality=98, subsampling="4:4:4"), "v.avif", 8),
    "truncated-jpeg": lambda: Odd(jpeg(photo(480, 640))[:9000], "t.jpg", "truncated"),
    "truncated-jpeg-padded": _zero_padded,
    "truncated-jpeg-thumbnail": _thumbnailed,
    "truncated-png": lambda: Odd(png(photo())[:-40], "t.png", "truncated"),
    "truncated-avif": lambda: Odd(save(Image.fromarray(photo()), "AVIF")[:-60], "t.avif", "truncated"),
    "corrupt-png": _flipped_bit,
    "corrupt-png-no-pixels": lambda: Odd(raw_png((0, 0), 8, 2, b""), "zero.png", "not-an-image"),
    "corrupt-jpeg": lambda: Odd(b"\xff\xd8\xff\xe0" + bytes(range(200)) + b"\xff\xd9", "c.jpg", "not-an-image"),
    "empty": lambda: Odd(b"", "empty.jpg", "empty"),
    "text": lambda: Odd(b"<html>404 Not Found</html>", "text.jpg", "not-an-image"),
    "wrong-suffix": lambda: Odd(png(photo()), "png.jpg", "wrong-suffix"),
    "ico": lambda: Odd(save(Image.fromarray(photo()), "ICO"), "s.ico", "unsupported-format"),
    "small": lambda: _strip("small.png", 15, 20, "too-small"),
    "strip-upright": lambda: _strip("upright.png", 4000, 20, "extreme-aspect"),
    "animated-webp": lambda: Odd(frames("WEBP", duration=40), "an.webp", "animated"),
    "animated-png": lambda: Odd(frames("PNG", duration=40), "an.png", "animated"),
    "animated-avif": lambda: Odd(frames("AVIF", duration=40), "an.avif", "animated"),
    "bomb-20000": lambda: Odd(png_bomb(20_000), "bomb.png", "too-many-pixels"),
    "bomb-icc": _icc_bomb,
    "bomb-webp": lambda: Odd(
        b"RIFF" + struct.pack("<I", 4096) + b"WEBPVP8X\x0a\x00\x00\x00" + bytes(4) + b"\xdf\x2e\x00" * 2 + bytes(4096),
        "bomb.webp",
        "corrupt",
    ),
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
