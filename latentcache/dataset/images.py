"""Untrusted bytes -> upright sRGB pixels, or a typed refusal.

Pillow reads the header, where all limits are checked, and then the pixels. `Image.open` is not used: it warns about
large images through `warnings`, whose filters threads share. The plugin of the format that the first bytes name is
called instead, so no other decoder ever sees the bytes, and nothing global in Pillow is changed.

Metadata that cannot be read does not cost the image: a broken EXIF block means "upright", and a broken ICC profile, or
one for another kind of image, means "none" and is logged.

What no decoder notices is not found here either: damage inside a JPEG's scan, which has no checksum, and a PNG or WebP
that was written whole but holds fewer rows than its header says. Of a 16-bit RGB PNG Pillow gives the high bytes only,
so a transparent colour of such a file means all colours with the same high bytes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TILELENGTH, TILEWIDTH

from latentcache.config import ImagesConfig
from latentcache.dataset.colour import to_srgb
from latentcache.dataset.resampling import LANCZOS, resize
from latentcache.errors import ImageRefused
from latentcache.types import Geometry, RefusalReason, Size


def _open_jpeg_xl(stream: BytesIO) -> ImageFile.ImageFile:
    """By pillow-jxl-plugin, which is imported here since it registers itself with Pillow."""
    from pillow_jxl.JpegXLImagePlugin import JXLImageFile

    image: ImageFile.ImageFile = JXLImageFile(stream)
    return image


# MpoImagePlugin is left out on purpose: a phone's MPO is a JPEG that is followed by further pictures.
_PLUGINS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "JPEG XL": _open_jpeg_xl,
}
_SUFFIXES_OF_FORMAT = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "AVIF": (".avif", ".avifs"),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "JPEG XL": (".jxl",),
    "HEIF": (".heic", ".heif", ".hif"),
    "a format that is not read": (".jp2", ".j2k", ".jpx", ".ico", ".psd"),
}
_FORMAT_OF_SUFFIX = {suffix: name for name, suffixes in _SUFFIXES_OF_FORMAT.items() for suffix in suffixes}

IMAGE_SUFFIXES = frozenset(_FORMAT_OF_SUFFIX)
"""Lower-case suffixes of image files, also those of formats that are refused, so that they are reported."""

_MAGICS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"II+\x00": "TIFF",
    b"MM\x00+": "TIFF",
    b"\x00\x00\x00\x0cJXL \r\n\x87\n": "JPEG XL",
}
_FORMAT_OF_BRAND = dict.fromkeys((b"avif", b"avis"), "AVIF") | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "HEIF"
)
_CODESTREAM = b"\xff\x0a"
"""Where a JPEG XL begins, or what is in its boxes."""
_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L", "I;16N"}
"""Pillow's modes whose values have a known white. Floats, 32 bits, signed values and Lab have none."""

# What Pillow's decoders raise on damaged input. Warnings are met only where the program turns them into errors.
_DECODER_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(EOFError, struct.error, zlib.error, ImageCms.PyCMSError, Warning),
)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# 2 and 4 bits of grey are loaded as 8 bits.
_STEP_OF_GREY = {"L;2": 85, "L;4": 17}
_SUBFILE_TYPE = 254
_NO_PAGE_OF_ITS_OWN = 1 | 4
"""Bits of a TIFF directory's subfile type: a smaller copy of another page, and a mask for one."""
_MAX_DIRECTORIES = 64
"""Directories of a TIFF that are read to see whether there is a second page; if there are more, there is one."""


def preparation_policy(config: ImagesConfig) -> dict[str, str]:
    """What changes the pixels of an accepted image, by name: the `policy` of `identity.Preparation.of`."""
    return {
        "exif": "upright",
        "colour": "srgb-perceptual",
        "alpha": f"composite-{config.alpha_colour.lower()}",
        "decoder": "pillow",
        "resample": LANCZOS,
    }


def with_filter(policy: dict[str, str], name: str) -> dict[str, str]:
    """The policy with the filter `name` of a rule of buckets, where that is another than the usual one."""
    return policy if name == LANCZOS else {**policy, "resample": name}


def probe(data: bytes, path: str, config: ImagesConfig) -> Size:
    """The size after the EXIF turn, by the header alone. `path` is for the message; its suffix must fit the bytes.

    Raises ImageRefused. Bytes that pass may still be refused by `decode`.
    """
    return _open(data, path, config)[1]


def decode(data: bytes, path: str, config: ImagesConfig, *, alpha_only: bool = False) -> np.ndarray:
    """Upright sRGB pixels of these very bytes: uint8 [H, W, 3], C-contiguous and writable. Raises ImageRefused.

    Colours: an ICC profile is converted to sRGB with the perceptual intent, unless it is sRGB to within one step.
    CMYK without a profile becomes (255 - C)(255 - K) / 255, and so on. 16-bit grey is divided by 257 and rounded; of
    16-bit RGB, Pillow keeps the high byte, at most one step away. Transparent pixels are blended in straight alpha,
    in sRGB, with `config.alpha_colour`. With `alpha_only` it is the alpha channel: uint8 [H, W], 255 without one.
    """
    image, _, orientation = _open(data, path, config)
    with _refusals(path):
        _check_crcs(data)
        return _upright(image, path, config, orientation, alpha_only=alpha_only)


def frame_times(data: bytes, path: str, config: ImagesConfig, max_pixels: int) -> tuple[Size, list[float]]:
    """The upright size of a GIF, PNG or WebP, and for how many ms each frame is shown; none for a still image.

    Frames of 0 ms are shown for 100, as browsers show those of a GIF. Pillow knows a frame's time when it has decoded
    it: frames of more than `max_pixels` together are refused. Raises ImageRefused.
    """
    image, size, _ = _open(data, path, config.model_copy(update={"animated": "first-frame"}))
    times: list[float] = []
    with _refusals(path):
        first, num_frames = _frames_of_animation(image)
        if num_frames * size.height * size.width > max_pixels:
            raise ImageRefused(path, "too-many-pixels", f"its {num_frames:,} frames of {size} are too many; cut it")
        for number in range(first, first + num_frames):
            image.seek(number)
            image.load()
            times.append(float(image.info.get("duration") or 100))
    return size, times


def decode_frames(data: bytes, path: str, config: ImagesConfig, numbers: Iterable[int]) -> Iterator[np.ndarray]:
    """These frames of a GIF, PNG or WebP, numbered from 0, in ascending order, each as `decode` gives it.

    An image that a PNG shows where animations are not known is none of its frames.
    """
    image, _, orientation = _open(data, path, config.model_copy(update={"animated": "first-frame"}))
    with _refusals(path):
        _check_crcs(data)
        first, _ = _frames_of_animation(image)
        for number in numbers:
            image.seek(first + number)
            yield _upright(image, path, config, orientation)


def prepare(pixels: np.ndarray, geometry: Geometry, resample: str = LANCZOS) -> np.ndarray:
    """Resize to `resized_size`, crop at `crop_top_left` to `target_size`, mirror left to right if `flip`.

    `resample` is a filter's name (`resampling.FILTERS`). `pixels` is uint8 [H, W, 3] of `original_size`, or ValueError.
    Returns uint8 [h, w, 3], C-contiguous.
    """
    if pixels.shape != (*geometry.original_size, 3) or pixels.dtype != np.uint8:
        raise ValueError(
            f"pixels are {pixels.dtype} {pixels.shape}, but the geometry was made for uint8 "
            f"{(*geometry.original_size, 3)}: call buckets.fit with the size of these pixels"
        )
    top, left = geometry.crop_top_left
    target = resize(pixels, geometry.resized_size, resample)[
        top : top + geometry.target_size.height, left : left + geometry.target_size.width
    ]
    if target.shape[:2] != geometry.target_size:
        raise ValueError(
            f"crop {geometry.target_size} at {tuple(geometry.crop_top_left)} leaves the resized image "
            f"{geometry.resized_size}: use a geometry of buckets.fit"
        )
    # A copy, so that the result owns its memory: torch.from_numpy wants it writable, with positive strides.
    return np.array(target[:, ::-1] if geometry.flip else target, order="C")


def as_picture(pixels: np.ndarray) -> Image.Image:
    """Prepared pixels uint8 [H, W, 3] as an image of Pillow, for processors that take one."""
    return Image.fromarray(pixels)


def sniff(data: bytes) -> str | None:
    """The image format that the first bytes name, or None."""
    for magic, name in _MAGICS.items():
        if data.startswith(magic):
            return name
    if data.startswith(_CODESTREAM):
        return "JPEG XL"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    # "BM" alone begins many a text; the reserved bytes are zero in every bitmap.
    if data[:2] == b"BM" and data[6:10] == bytes(4):
        return "BMP"
    if data[4:8] == b"ftyp":
        end = min(int.from_bytes(data[:4], "big"), 256)
        found = {_FORMAT_OF_BRAND.get(data[at : at + 4]) for at in (8, *range(16, end, 4))}
        return "AVIF" if "AVIF" in found else "HEIF" if "HEIF" in found else None
    return None


def check_limits(size: Size, path: str, config: ImagesConfig) -> None:
    """ImageRefused, naming `path`, for an image of a size that the config does not allow."""
    _check_num_pixels(size, path, config)
    if max(size) > config.max_aspect * min(size):
        raise ImageRefused(
            path,
            "extreme-aspect",
            f"{size} has sides 1 : {max(size) / min(size):.4g}; max_aspect is {config.max_aspect:g}",
        )
    if min(size) < config.min_side:
        raise ImageRefused(path, "too-small", f"{size} has a side below {config.min_side} pixels, min_side")


def _check_num_pixels(size: Size, path: str, config: ImagesConfig) -> None:
    num_pixels = size.height * size.width
    if num_pixels > config.max_pixels:
        raise ImageRefused(
            path, "too-many-pixels", f"{size} is {num_pixels:,} pixels; max_pixels is {config.max_pixels:,}"
        )


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """What a decoder raises becomes an ImageRefused."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ImageRefused(path, "too-many-pixels", f"{error}") from error
    except _DECODER_ERRORS as error:
        text = str(error) or type(error).__name__
        if text.lower().startswith(("unsupported", "unknown pixel mode")):
            raise ImageRefused(path, "unsupported-format", f"{text}; convert it to PNG") from error
        reason: RefusalReason = "truncated" if "truncated" in text.lower() else "corrupt"
        raise ImageRefused(path, reason, f"it cannot be decoded: {text}") from error
    except MemoryError as error:
        raise ImageRefused(path, "out-of-memory", "it does not fit in this host's memory") from error


def _open(data: bytes, path: str, config: ImagesConfig) -> tuple[ImageFile.ImageFile, Size, int]:
    """The image before it is loaded, its upright size and its EXIF orientation (1 to 8)."""
    name = _checked_format(data, path)
    is_animated = False
    with _refusals(path):
        if name == "JPEG XL":  # its plug-in decodes as soon as it opens a file
            canvas, is_animated = _jpeg_xl_header(data)
            _check_num_pixels(canvas, path, config)
        stream = BytesIO(data)
        image = _PLUGINS[name](stream)
        # Inside a scan 0xFF is always escaped, so that an end mark after its start is one. libjpeg would make the rest
        # of a JPEG that was only half downloaded grey.
        if name == "JPEG" and data.find(b"\xff\xd9", stream.tell()) < 0:
            raise ImageRefused(path, "truncated", f"the JPEG data ends after {len(data):,} bytes, before its end")
        orientation = _orientation(image, data, name)
        width, height = image.size
        size = Size(width, height) if orientation >= 5 else Size(height, width)
        check_limits(size, path, config)
        if name == "TIFF":
            _check_tile(image, path, config)
        is_animated = is_animated or getattr(image, "is_animated", False)
        if is_animated and config.animated == "refuse" and (name != "TIFF" or _has_pages(data)):
            what = "pages" if name == "TIFF" else "frames"
            raise ImageRefused(path, "animated", f'it has several {what}; set animated to "first-frame" for the first')
        if image.mode not in _MODES:
            detail = (
                f"{name} of Pillow's mode {image.mode}, which has no known white; save it with 8 or 16 bits a channel"
            )
            raise ImageRefused(path, "unsupported-format", detail)
        if image.tile and image.tile[0][0] == "bmp_rle":
            # Pillow decodes it in Python, pixel by pixel: a file of some kilobytes would take minutes.
            raise ImageRefused(path, "unsupported-format", "a BMP with run lengths; save it without, or as PNG")
    return image, size, orientation


def _checked_format(data: bytes, path: str) -> str:
    """The format by the first bytes, if it is accepted and the suffix of `path` does not say another one."""
    if not data:
        raise ImageRefused(path, "empty", "the file has no bytes")
    name, by_suffix = sniff(data), _FORMAT_OF_SUFFIX.get(os.path.splitext(path)[1].lower())
    if name is None and by_suffix in (None, *_PLUGINS):
        raise ImageRefused(path, "not-an-image", f"it begins with {data[:8]!r}, as none of {', '.join(_PLUGINS)} does")
    if name not in _PLUGINS:
        raise ImageRefused(
            path, "unsupported-format", f"{name or by_suffix}; convert it to one of {', '.join(_PLUGINS)}"
        )
    if name == "JPEG XL" and importlib.util.find_spec("pillow_jxl") is None:
        detail = "JPEG XL, which Pillow cannot read alone; pip install pillow-jxl-plugin, or convert it to PNG"
        raise ImageRefused(path, "unsupported-format", detail)
    if name in ("WEBP", "AVIF") and not features.check(name.lower()):
        raise ImageRefused(path, "unsupported-format", f"this Pillow was built without {name}; install Pillow's wheel")
    if by_suffix not in (None, name):
        suffix = _SUFFIXES_OF_FORMAT[name][0]
        raise ImageRefused(path, "wrong-suffix", f"the bytes are {name}; rename it to end in {suffix}")
    return name


def _orientation(image: ImageFile.ImageFile, data: bytes, name: str) -> int:
    """How the loaded pixels are to be turned, by the numbers of EXIF, 1 to 8."""
    # Pillow turns a TIFF when it loads it, and libjxl a JPEG XL, whose EXIF does not count then. Of a JPEG in a
    # JPEG XL the plug-in gives the JPEG's pixels and EXIF.
    if name == "TIFF" or (name == "JPEG XL" and not getattr(image, "jpeg", False)):
        return 1
    exif = Image.Exif()
    try:
        # Not `getexif`, which decodes a PNG to find the block after its pixels, and which asks XMP too.
        exif.load((_png_exif(data) if name == "PNG" else image.info.get("exif")) or b"")
        value = exif.get(ExifTags.Base.Orientation)
    except _DECODER_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_exif(data: bytes) -> bytes | None:
    """The first whole chunk eXIf, which may come before or after the pixels."""
    offset = 8
    while offset + 12 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        if data[offset + 4 : offset + 8] == b"eXIf":
            return data[offset + 8 : offset + 8 + length]
        offset += 12 + length
    return None


def _check_tile(image: ImageFile.ImageFile, path: str, config: ImagesConfig) -> None:
    """Refuse a TIFF of tiles that are too large: the decoder allocates one whole, whatever the image's size."""
    sides = [image.tag_v2.get(tag) for tag in (TILELENGTH, TILEWIDTH)]  # type: ignore[attr-defined]
    if all(isinstance(side, int) for side in sides):
        _check_num_pixels(Size(*sides), path, config)


def _has_pages(data: bytes) -> bool:
    """Whether a TIFF has a second page. Smaller copies of a page and masks are none."""
    file = BytesIO(data)
    is_big = b"+" in data[2:4]
    directory = TiffImagePlugin.ImageFileDirectory_v2(data[: 16 if is_big else 8])
    file.seek(directory.next)
    directory.load(file)
    for _ in range(_MAX_DIRECTORIES):
        if not directory.next:
            return False
        file.seek(directory.next)
        directory.load(file)
        kind = directory.get(_SUBFILE_TYPE, 0)
        if not isinstance(kind, int) or not kind & _NO_PAGE_OF_ITS_OWN:
            return True
    return True


def _jpeg_xl_header(data: bytes) -> tuple[Size, bool]:
    """The size in the header of a JPEG XL, before any turn, and whether it is an animation. Raises ValueError.

    An animation that also holds a preview counts as a still image. (Source: ISO/IEC 18181-1, `SizeHeader` and
    `ImageMetadata`; 18181-2 for the box that the codestream is in.)
    """
    box = re.search(rb"jxlc|jxlp....", data, re.DOTALL)
    start = 0 if data.startswith(_CODESTREAM) or box is None else box.end()
    if not data.startswith(_CODESTREAM, start):
        raise ValueError("it has no codestream")
    bits = int.from_bytes(data[start + len(_CODESTREAM) : start + 32], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & (1 << count) - 1, bits >> count
        return value

    def size() -> Size:
        is_small = take(1)
        height = side(is_small)
        ratio = take(3)
        if ratio == 0:
            return Size(height, side(is_small))
        across, down = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))[ratio - 1]
        return Size(height, height * across // down)

    def side(is_small: int) -> int:
        return 8 * (1 + take(5)) if is_small else 1 + take((9, 13, 18, 30)[take(2)])

    found, is_animated = size(), False
    if not take(1) and take(1):  # not all metadata are the usual ones, and there are extra fields
        take(3)  # the orientation, which the decoder applies
        if take(1):
            size()  # the intrinsic one
        is_animated = not take(1) and bool(take(1))
    return found, is_animated


def _check_crcs(data: bytes) -> None:
    """Check a PNG: loading checks no CRC of pixel data, so that a flipped bit could give another picture."""
    if sniff(data) == "PNG":
        PngImagePlugin.PngImageFile(BytesIO(data)).verify()


def _frames_of_animation(image: ImageFile.ImageFile) -> tuple[int, int]:
    """The number of the first frame of a GIF, PNG or WebP, and how many it has; (0, 0) for a still image."""
    if image.format not in ("GIF", "PNG", "WEBP") or not image.is_animated:  # type: ignore[attr-defined]
        return 0, 0
    first = int(getattr(image, "default_image", False))
    num_frames = image.n_frames - first  # type: ignore[attr-defined]
    return first, num_frames if num_frames > 1 else 0


def _upright(
    image: ImageFile.ImageFile, path: str, config: ImagesConfig, orientation: int, *, alpha_only: bool = False
) -> np.ndarray:
    """The pixels of the frame at which an image stands: see `decode`."""
    transparency = _transparency(image)
    image.load()
    colour, alpha = _colour_and_alpha(image, transparency)
    if alpha_only:
        upright = Image.new("L", colour.size, 255) if alpha is None else alpha
    else:
        upright = to_srgb(colour, image.info.get("icc_profile"), path)
    if alpha is not None and not alpha_only:
        canvas = Image.new("RGB", upright.size, config.alpha_colour)
        canvas.paste(upright, mask=alpha)
        upright = canvas
    if orientation in _TURNS:
        upright = upright.transpose(_TURNS[orientation])
    return np.array(upright)


def _colour_and_alpha(
    image: Image.Image, transparency: int | bytes | tuple[int, ...] | None
) -> tuple[Image.Image, Image.Image | None]:
    """The straight colours (mode L, RGB or CMYK) and the alpha (mode L), if there is one."""
    if image.mode.startswith("I;16"):
        grey = np.asarray(image)
        colour = Image.fromarray(_eight_bits(grey, getattr(image, "tag_v2", {})))
        return colour, None if transparency is None else Image.fromarray((grey != transparency) * np.uint8(255))
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode == "CMYK":
        return image, None
    if transparency is not None or image.mode in {"RGBA", "LA", "PA"}:
        if transparency is not None:
            image.info["transparency"] = transparency
        rgba = image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert("L" if image.mode in {"1", "L"} else "RGB"), None


def _eight_bits(grey: np.ndarray, tags: Mapping[int, Any]) -> np.ndarray:
    """16-bit grey [H, W] to uint8, rounded. Pillow's own conversion clips all but the lowest 256 levels to white.

    `tags` are those of a TIFF, of which Pillow leaves 12 bits as they are, and white too where white is zero.
    """
    (num_bits, *_), photometric = tags.get(BITSPERSAMPLE, (16,)), tags.get(PHOTOMETRIC_INTERPRETATION, 1)
    white = (1 << num_bits) - 1
    levels: np.ndarray = ((grey.astype(np.uint32) * 255 + white // 2) // white).astype(np.uint8)
    return levels if photometric else np.uint8(255) - levels


def _transparency(image: ImageFile.ImageFile) -> int | bytes | tuple[int, ...] | None:
    """PNG's transparent colour in the scale of the loaded pixels; Pillow gives that of the file. Call before load."""
    value: Any = image.info.get("transparency")
    layout = image.tile[0][3] if value is not None and image.tile else None
    if layout in _STEP_OF_GREY:
        return int(value) * _STEP_OF_GREY[layout]
    if layout == "RGB;16B":
        return tuple(channel >> 8 for channel in value)
    return value  # type: ignore[no-any-return]  # an int, bytes or a tuple, by Pillow's PNG plugin
