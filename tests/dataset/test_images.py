"""Odd images, made in code: each meets its verdict, and damaged bytes give a typed refusal or pixels, nothing else."""

from __future__ import annotations

import functools
import io
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile
from skimage.transform import resize as reference_resize

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode, prepare, probe
from latentcache.errors import ImageRefused
from latentcache.types import Crop, Geometry, Size

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


def sixteen_bit_grey() -> np.ndarray:
    return np.linspace(0, 65535, HEIGHT * WIDTH).round().astype(np.uint16).reshape(HEIGHT, WIDTH)


def alpha() -> np.ndarray:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return (255 * ((x + y) % 32) / 31).astype(np.uint8)


def over(colour: np.ndarray, opacity: np.ndarray, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    share = (opacity / 255.0)[..., None]
    return colour * share + np.array(background) * (1 - share)


def as_rgb(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=-1)


def save(image: Image.Image | np.ndarray, name: str, **options: object) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def png(array: np.ndarray, **options: object) -> bytes:
    return save(array, "PNG", **options)


def jpeg(array: np.ndarray, **options: object) -> bytes:
    return save(array, "JPEG", **{"quality": 95, "subsampling": 0} | options)


def frames(name: str, **options: object) -> bytes:
    images = [Image.fromarray(photo()), Image.fromarray(photo()[:, ::-1].copy()), Image.fromarray(photo()[::-1].copy())]
    return save(images[0], name, save_all=True, append_images=images[1:], **options)


def exif(orientation: int) -> bytes:
    """The smallest EXIF block: one tag, big-endian."""
    return b"Exif\x00\x00MM\x00*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What a viewer shows of stored `pixels`, from the table in the EXIF standard: where row 0 and column 0 are."""
    shown = pixels if orientation < 5 else pixels.transpose(1, 0, 2)
    shown = shown[::-1] if orientation in (3, 4, 7, 8) else shown
    return shown[:, ::-1] if orientation in (2, 3, 6, 7) else shown


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(depth: int, colour_type: int, rows: np.ndarray | None = None, *, side: int = 0, **chunks: bytes) -> bytes:
    """A PNG of what Pillow cannot write, from its rows in the file's byte order. `before`, `after`: chunks.

    One of `side` x `side` has no rows.
    """
    header = struct.pack(">IIBBBBB", side or WIDTH, side or HEIGHT, depth, colour_type, 0, 0, 0)
    filtered = b"" if rows is None else b"".join(b"\x00" + row.tobytes() for row in rows)
    body = chunks.get("before", b"") + chunk(b"IDAT", zlib.compress(filtered, 9)) + chunks.get("after", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


# --- ICC profiles ---------------------------------------------------------------------------------------------------


def srgb_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def linear_profile(*, grey: bool = False) -> bytes:
    """That of sRGB with linear curves, and with red and blue exchanged; or of linear grey."""
    data = srgb_profile()
    at = data.index(b"para")
    data = data[:at] + b"curv" + bytes(4) + struct.pack(">IH", 1, 256) + data[at + 14 :]
    if grey:
        return data.replace(b"RGB ", b"GRAY", 1).replace(b"rTRC", b"kTRC")
    return data.replace(b"rXYZ", b"....").replace(b"bXYZ", b"rXYZ").replace(b"....", b"bXYZ")


def srgb_encode(linear: np.ndarray) -> np.ndarray:
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def linear_to_srgb(pixels: np.ndarray) -> np.ndarray:
    return srgb_encode(pixels / 255.0)[..., ::-1]


def lightness(inks: tuple[int, ...]) -> int:
    """How light (0 to 100) the press of the CMYK profile prints a corner of the cube: each ink its own grey."""
    return 100 - int(np.dot(inks, (5, 14, 26, 47)))


def cmyk_profile() -> bytes:
    """A press whose table has two points a side: lut16Type, CMYK -> Lab. The colorimetric intent prints black."""
    corners = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    identity = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    ramp = struct.pack(">2H", 0, 65535)
    head = b"mft2" + bytes(4) + bytes([4, 3, 2, 0]) + identity + struct.pack(">2H", 2, 2) + ramp * 4
    greys = [struct.pack(">3H", round(lightness(corner) * 652.8), 0x8000, 0x8000) for corner in corners]
    perceptual = head + b"".join(greys) + ramp * 3
    colorimetric = head + struct.pack(">3H", 0, 0x8000, 0x8000) * len(corners) + ramp * 3
    at, end, num_bytes = 156, 156 + len(perceptual), len(perceptual)
    tags = struct.pack(">I4sII4sII", 2, b"A2B0", at, num_bytes, b"A2B1", end, num_bytes)
    header = struct.pack(">I", end + num_bytes) + srgb_profile()[4:12] + b"prtrCMYKLab " + srgb_profile()[24:128]
    return header + tags + perceptual + colorimetric


# --- the corpus ------------------------------------------------------------------------------------------------------


def _pixels(data: bytes, path: str, tolerance: float, pixels: np.ndarray | None = None) -> Odd:
    return Odd(data, path, pixels=photo() if pixels is None else pixels, tolerance=tolerance)


def _turned(name: str, orientation: int, tolerance: float = 0, **options: object) -> Odd:
    data = save(photo(), name, exif=exif(orientation), **options)
    return _pixels(data, f"exif.{name.lower()}", tolerance, turned(photo(), orientation))


def _late_exif() -> Odd:
    data = raw_png(8, 2, photo(), after=chunk(b"eXIf", exif(6)[6:]))
    return _pixels(data, "late-exif.png", 0, turned(photo(), 6))


def _cmyk(path: str, **options: object) -> Odd:
    """Flat stripes of 16 pixels, which JPEG keeps: paper, each ink, and two overprints."""
    corners = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0)]
    if options:
        shades = srgb_encode(((np.array([lightness(corner) for corner in corners]) + 16) / 116) ** 3)
        colours = as_rgb(shades)
    else:
        colours = np.array([np.subtract(1, corner[:3]) * (1 - corner[3]) * 255.0 for corner in corners])
    inks, shown = (np.broadcast_to(np.repeat(row, 16, axis=0), (32, 96, len(row[0]))) for row in (corners, colours))
    image = Image.fromarray((inks * 255).astype(np.uint8), "CMYK")
    return _pixels(save(image, "JPEG", quality=100, subsampling=0, **options), path, 4, shown)


def _sixteen_bit_rgb() -> Odd:
    values = np.stack([sixteen_bit_grey(), sixteen_bit_grey()[::-1], sixteen_bit_grey().T.reshape(HEIGHT, WIDTH)], -1)
    return _pixels(raw_png(16, 2, values.astype(">u2")), "rgb16.png", 1, values / 257.0)


def _rgb_with_colour_key() -> Odd:
    key = photo()[20, 30]
    data = raw_png(8, 2, photo(), before=chunk(b"tRNS", struct.pack(">3H", *map(int, key))))
    return _pixels(data, "key.png", 0, np.where((photo() == key).all(-1, keepdims=True), 255, photo()))


def _grey_key(depth: int, colour_type: int = 0) -> Odd:
    """A transparent colour in the scale of the file, of which Pillow gives the pixels in another."""
    key = chunk(b"tRNS", struct.pack(">3H", 1, 1, 1)[: 6 if colour_type else 2])
    return Odd(raw_png(depth, colour_type, before=key), f"key{depth}.png", "unsupported-format")


def _one_bit() -> Odd:
    bits = grey() > 120
    return _pixels(png(bits), "bit.png", 0, as_rgb(bits * 255))


def _palette(name: str, transparency: bytes | int, opacity: np.ndarray) -> Odd:
    """Sixteen colours, each as opaque as `opacity` says."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    indices = ((x // 4 + y // 3) % 16).astype(np.uint8)
    colours = np.stack([np.arange(16) * 17, 255 - np.arange(16) * 13, np.arange(16) * 5 + 40], -1).astype(np.uint8)
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    image.putpalette(colours.tobytes())
    data = save(image, name, transparency=transparency)
    return _pixels(data, f"palette.{name.lower()}", 1, over(colours[indices], opacity[indices]))


def _rgba(path: str, name: str, colours: np.ndarray | None = None, tolerance: float = 1, **options: object) -> Odd:
    data = save(np.dstack([photo(), alpha()]), name, **options)
    return _pixels(data, path, tolerance, over(photo() if colours is None else colours, alpha()))


def _linear_grey(profile: bytes) -> Odd:
    return _pixels(png(grey(), icc_profile=profile), "linear-grey.png", 2, linear_to_srgb(as_rgb(grey())))


def _flipped_bit() -> Odd:
    """A flipped bit of a pixel. zlib's own checksum is in a chunk apart, to which Pillow's load never gets."""
    body = bytearray(zlib.compress(b"".join(b"\x00" + row.tobytes() for row in photo()), 0))
    chunks = [bytearray(chunk(b"IDAT", bytes(part))) for part in (body[:-4], body[-4:])]
    chunks[0][3000] ^= 4
    data = raw_png(8, 2)
    start = data.index(b"IDAT") - 4
    return Odd(data[:start] + b"".join(chunks) + chunk(b"IEND", b""), "flipped.png", "corrupt")


def _thumbnailed() -> Odd:
    """Cut in the scan, but with an end mark in front of it, in the thumbnail."""
    data = jpeg(photo(480, 640), exif=exif(1) + jpeg(photo(16, 16)))
    return Odd(data[: len(data) // 2], "thumbnail.jpg", "truncated")


def _bmp_rle() -> Odd:
    palette = bytes(4 * 256)
    info = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 1, 2, 0, 0, 0, 0)
    header = b"BM" + struct.pack("<I4xI", 56 + len(palette), 54 + len(palette))
    return Odd(header + info + palette + b"\x00\x01", "rle.bmp", "unsupported-format")


def _tiff_white_is_zero() -> Odd:
    """Grey of 16 bits a pixel, whose white is zero: Pillow writes it, but for the tag that says so."""
    data = save(65535 - sixteen_bit_grey(), "TIFF")
    black, white = (struct.pack("<HHIHH", 262, 3, 1, value, 0) for value in (1, 0))
    assert data.count(black) == 1
    return _pixels(data.replace(black, white), "16w.tif", 0.51, as_rgb(sixteen_bit_grey() / 257.0))


CORPUS: dict[str, Callable[[], Odd]] = {
    **{f"exif-{n}": (lambda n=n: _turned("JPEG", n, 6, quality=95, subsampling=0)) for n in range(1, 9)},
    "exif-png": lambda: _turned("PNG", 8),
    "exif-png-late": _late_exif,
    "exif-webp": lambda: _turned("WEBP", 5, lossless=True),
    "exif-avif": lambda: _turned("AVIF", 6, 6, quality=100, subsampling="4:4:4"),
    "exif-tiff": lambda: _turned("TIFF", 6, compression="tiff_adobe_deflate"),
    "exif-broken": lambda: _pixels(jpeg(photo(), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f"), "b.jpg", 6),
    "jpeg-mpo": lambda: _pixels(frames("MPO", quality=95, subsampling=0), "phone.jpg", 6),
    "cmyk": lambda: _cmyk("cmyk.jpg"),
    "cmyk-icc": lambda: _cmyk("cmyk-icc.jpg", icc_profile=cmyk_profile()),
    "icc-linear-alpha": lambda: _rgba("l.png", "PNG", linear_to_srgb(photo()), 2, icc_profile=linear_profile()),
    # As many tools write grey images: each level is a neutral colour of that profile.
    "icc-of-rgb-on-grey": lambda: _linear_grey(linear_profile()),
    "icc-linear-grey": lambda: _linear_grey(linear_profile(grey=True)),
    "icc-of-grey-on-rgb": lambda: _pixels(png(photo(), icc_profile=linear_profile(grey=True)), "mismatch.png", 0),
    "icc-srgb": lambda: _pixels(png(photo(), icc_profile=srgb_profile()), "srgb.png", 0),
    "icc-broken": lambda: _pixels(png(photo(), icc_profile=b"not a profile at all"), "icc.png", 0),
    "grey-16": lambda: _pixels(
        raw_png(16, 0, sixteen_bit_grey().astype(">u2")), "grey16.png", 0.51, as_rgb(sixteen_bit_grey() / 257.0)
    ),
    "rgb-16": _sixteen_bit_rgb,
    "key-rgb-8": _rgb_with_colour_key,
    "key-rgb-16": lambda: _grey_key(16, colour_type=2),
    **{f"key-grey-{depth}": (lambda depth=depth: _grey_key(depth)) for depth in (2, 4, 16)},
    "one-bit": _one_bit,
    "palette-alpha": lambda: _palette("PNG", bytes(range(0, 256, 17)), np.arange(0, 256, 17)),
    "gif-transparent": lambda: _palette("GIF", 5, np.where(np.arange(16) == 5, 0, 255)),
    "webp-alpha": lambda: _rgba("a.webp", "WEBP", lossless=True, exact=True),
    "bmp": lambda: _pixels(save(photo(), "BMP"), "a.bmp", 0),
    "bmp-run-lengths": _bmp_rle,
    "tiff-16-white-is-zero": _tiff_white_is_zero,
    "tiff-lab": lambda: Odd(save(Image.new("LAB", (WIDTH, HEIGHT)), "TIFF"), "lab.tif", "unsupported-format"),
    "truncated-png": lambda: Odd(png(photo())[:-40], "t.png", "truncated"),
    "truncated-jpeg-thumbnail": _thumbnailed,
    "corrupt-png": _flipped_bit,
    "empty": lambda: Odd(b"", "empty.jpg", "empty"),
    "text": lambda: Odd(b"<html>404 Not Found</html>", "text.jpg", "not-an-image"),
    "wrong-suffix": lambda: Odd(png(photo()), "png.jpg", "wrong-suffix"),
    "ico": lambda: Odd(save(photo(), "ICO"), "s.ico", "unsupported-format"),
    "small": lambda: Odd(png(photo(15, 20)), "small.png", "too-small"),
    "strip-upright": lambda: Odd(png(photo(4000, 20)), "upright.png", "extreme-aspect"),
    **{
        f"animated-{name}": (lambda name=name: Odd(frames(name.upper(), duration=40), f"an.{name}", "animated"))
        for name in ("png", "webp", "avif", "gif", "tiff")
    },
    "bomb-20000": lambda: Odd(raw_png(1, 0, side=20_000), "bomb.png", "too-many-pixels"),
}


# Pillow itself reads the EXIF block of a JPEG, for its DPI, and warns about a broken one.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")

POLICY = ImagesConfig(min_side=16)


@functools.cache
def made(name: str) -> Odd:
    return CORPUS[name]()


def difference(pixels: np.ndarray, reference: np.ndarray) -> float:
    assert pixels.shape == reference.shape
    return float(np.abs(pixels.astype(np.float64) - reference).max())


def verdict(data: bytes, path: str, policy: ImagesConfig = POLICY) -> str | None:
    try:
        decode(data, path, policy)
    except ImageRefused as refused:
        return refused.reason
    return None


@pytest.mark.parametrize("name", CORPUS)
def test_each_odd_image_meets_its_verdict(name: str) -> None:
    """The header alone gives every verdict but damage."""
    odd = made(name)
    if odd.reason is None:
        size = probe(odd.data, odd.path, POLICY)
        pixels = decode(odd.data, odd.path, POLICY)
        assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.flags.writeable
        assert size == pixels.shape[:2]
        assert difference(pixels, odd.pixels) <= odd.tolerance
        return
    with pytest.raises(ImageRefused) as caught:
        decode(odd.data, odd.path, POLICY)
    assert (caught.value.reason, caught.value.path) == (odd.reason, odd.path) and odd.path in str(caught.value)
    if odd.reason not in ("corrupt", "truncated"):
        with pytest.raises(ImageRefused, match=odd.path):
            probe(odd.data, odd.path, POLICY)
    if odd.reason == "animated":
        first = decode(odd.data, odd.path, ImagesConfig(min_side=16, animated="first-frame"))
        # WebP and AVIF are lossy, GIF has few colours; the second frame is mirrored, and differs by up to 200.
        assert difference(first, photo()) <= 40


def test_half_a_phones_picture_is_refused() -> None:
    """Filled up with zeros, as a download that reserves its space leaves it: libjpeg would make the rest grey."""
    thumbnail = b"Exif\0\0MM\0*\0\0\0\x08" + bytes(6) + save(Image.fromarray(photo()), "JPEG")
    data = frames("MPO", quality=95, exif=thumbnail)
    assert verdict(data, "phone.jpg") is None
    num_bytes = data.index(b"\xff\xda", len(thumbnail)) + 500
    assert verdict(data[:num_bytes].ljust(len(data), b"\0"), "phone.jpg") == "truncated"


def test_alpha_is_composited_on_the_declared_colour() -> None:
    odd = made("webp-alpha")
    pixels = decode(odd.data, odd.path, ImagesConfig(min_side=16, alpha_colour="#10C0f0"))
    assert difference(pixels, over(photo(), alpha(), (0x10, 0xC0, 0xF0))) <= 1


def test_threads_get_the_same_pixels() -> None:
    odds = [odd for odd in map(made, CORPUS) if odd.reason is None]
    alone = [decode(odd.data, odd.path, POLICY).tobytes() for odd in odds]
    barrier = threading.Barrier(4)

    def all_of_them(_: int) -> list[bytes]:
        barrier.wait()
        return [decode(odd.data, odd.path, POLICY).tobytes() for odd in odds]

    with ThreadPoolExecutor(4) as pool:
        assert all(result == alone for result in pool.map(all_of_them, range(4)))


def test_prepare_resizes_crops_and_mirrors() -> None:
    pixels = photo(120, 200)
    geometry = Geometry(Size(120, 200), Size(60, 100), Crop(4, 18), Size(48, 64))
    result = prepare(pixels, geometry)
    reference = 255 * reference_resize(pixels, (60, 100), anti_aliasing=True)[4:52, 18:82]
    assert result.shape == (48, 64, 3) and result.dtype == np.uint8 and result.flags.c_contiguous
    assert difference(result, reference) <= 2
    mirrored = prepare(pixels, Geometry(Size(120, 200), Size(60, 100), Crop(4, 18), Size(48, 64), flip=True))
    assert mirrored.flags.c_contiguous and mirrored.flags.writeable
    np.testing.assert_array_equal(mirrored, result[:, ::-1])


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("exif-6", "exif-tiff", "exif-avif", "exif-webp", "exif-png", "exif-png-late", "jpeg-mpo", "cmyk-icc"),
        *("icc-linear-alpha", "grey-16", "palette-alpha", "webp-alpha", "gif-transparent", "bmp", "animated-png"),
    ],
)
def test_a_damaged_file_gives_pixels_or_a_refusal_and_the_begin_of_one_a_refusal(name: str) -> None:
    """Of a phone's pictures the first may be whole."""
    data, path = made(name).data, made(name).path
    for at in range(0, len(data) - 12, max(7, len(data) // 400)):
        for mutated in (data[:at] + b"\xa5\x00\x5a" + data[at + 3 :], data[:at] + data[at + 5 :]):
            verdict(mutated, path)  # which raises what is no refusal
        assert name == "jpeg-mpo" or verdict(data[:at], path) is not None, f"{at} of {len(data)} bytes were accepted"


# --- JPEG XL: a plug-in of Pillow's, which decodes as soon as it opens a file ----------------------------------------

BARE = b"\xff\x0a"
"""How a JPEG XL begins."""


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the plug-in's name, and what it registers with Pillow."""

    class JXLImageFile(ImageFile.ImageFile):
        format = "JXL"

        def _open(self) -> None:
            data = self.fp.read()
            if data.endswith(b"cut"):
                raise RuntimeError("Generic Error.")
            self.jpeg = b"jpeg" in data
            pixels = Image.fromarray(photo())
            self._size, self._mode, self.tile = pixels.size, pixels.mode, []
            self.info["exif"], self.im = exif(6), pixels.im

    package = ModuleType("pillow_jxl")
    package.__spec__ = ModuleSpec("pillow_jxl", None)
    monkeypatch.setitem(sys.modules, "pillow_jxl", package)
    monkeypatch.setitem(Image.OPEN, "JXL", (JXLImageFile, lambda prefix: prefix.startswith(b"\xff\x0a")))


@pytest.mark.usefixtures("plug_in")
def test_the_codestreams_turn_counts_and_exif_only_in_a_packed_jpeg() -> None:
    np.testing.assert_array_equal(decode(BARE, "a.jxl", POLICY), photo())
    packed = BARE + b"jpeg"
    assert probe(packed, "a.jxl", POLICY) == Size(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decode(packed, "a.jxl", POLICY), turned(photo(), 6))
    with pytest.raises(ImageRefused, match="Generic Error"):
        probe(BARE + b"cut", "a.jxl", POLICY)
