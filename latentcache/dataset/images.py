"""Untrusted bytes -> upright sRGB pixels, or a typed refusal.

All limits are checked in the header, before a pixel is decoded. Nothing global in Pillow is changed, and
`Image.open` is not used: it warns about large images through `warnings`, whose filters threads share. The plugin of
the format that the first bytes name is called instead, so no other decoder ever sees the bytes.

Metadata that cannot be read does not cost the image: a broken EXIF block means "upright", and a broken ICC profile, or
one for another kind of image, means "none" and is logged.

What no decoder notices is not found here either: damage inside a JPEG's scan, which has no checksum, and a PNG or WebP
that was written whole but holds fewer rows than its header says. Of a 16-bit RGB PNG Pillow gives the high bytes only,
so a transparent colour of such a file means all colours with the same high bytes.
"""

from __future__ import annotations

import importlib.util
import os
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
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from latentcache.config import ImagesConfig
from latentcache.dataset import container
from latentcache.dataset.colour_profiles import to_srgb
from latentcache.dataset.resampling import LANCZOS, resize
from latentcache.errors import ImageRefused
from latentcache.types import Geometry, RefusalReason, Size

_SUFFIXES_OF_FORMAT = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "AVIF": (".avif", ".avifs"),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "HEIF": (".heic", ".heif", ".hif"),
    "JPEG 2000": (".jp2", ".j2k", ".jpx"),
    "JPEG XL": (".jxl",),
    "ICO": (".ico",),
    "PSD": (".psd",),
}
_FORMAT_OF_SUFFIX = {suffix: name for name, suffixes in _SUFFIXES_OF_FORMAT.items() for suffix in suffixes}

IMAGE_SUFFIXES = frozenset(_FORMAT_OF_SUFFIX)
"""Lower-case suffixes of image files, also those of formats that are refused, so that they are reported."""


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
    return _open(data, path, config)[2]


def decode(data: bytes, path: str, config: ImagesConfig, *, alpha_only: bool = False) -> np.ndarray:
    """Upright sRGB pixels of these very bytes: uint8 [H, W, 3], C-contiguous and writable. Raises ImageRefused.

    Colours: an ICC profile is converted to sRGB with the perceptual intent, unless it is sRGB to within one step.
    CMYK without a profile becomes (255 - C)(255 - K) / 255, and so on. 16-bit grey is divided by 257 and rounded; of
    16-bit RGB, Pillow keeps the high byte, at most one step away. Transparent pixels are blended in straight alpha,
    in sRGB, with `config.alpha_colour`. With `alpha_only` it is the alpha channel: uint8 [H, W], 255 without one.
    """
    image, name, size, orientation = _open(data, path, config)
    with _refusals(path, name, size):
        _check_crcs(data, name)
        return _upright(image, path, config, orientation, alpha_only=alpha_only)


def decode_frames(data: bytes, path: str, config: ImagesConfig, numbers: Iterable[int]) -> Iterator[np.ndarray]:
    """As `decode` each of these frames of a GIF, PNG or WebP. They are numbered from 0, and come in ascending order.

    An image that a PNG shows where animations are not known is none of its frames.
    """
    config = config.model_copy(update={"animated": "first-frame"})
    image, name, size, orientation = _open(data, path, config)
    with _refusals(path, name, size):
        _check_crcs(data, name)
        first = int(name == "PNG" and getattr(image, "default_image", False))
        for number in numbers:
            image.seek(first + number)
            yield _upright(image, path, config, orientation)


@contextmanager
def _refusals(path: str, name: str, size: Size) -> Iterator[None]:
    """What the decoder of this format raises becomes an ImageRefused."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ImageRefused(path, "too-many-pixels", f"{error}") from error
    except _DECODER_ERRORS as error:
        raise _refusal(path, name, error) from error
    except MemoryError as error:
        raise ImageRefused(path, "out-of-memory", f"{size} pixels do not fit in this host's memory") from error


def _check_crcs(data: bytes, name: str) -> None:
    """Check a PNG: loading checks no CRC of pixel data, so that a flipped bit could give another picture."""
    if name == "PNG":
        PngImagePlugin.PngImageFile(BytesIO(data)).verify()


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


def _open(data: bytes, path: str, config: ImagesConfig) -> tuple[ImageFile.ImageFile, str, Size, int]:
    """The image before it is loaded, its format, its upright size and its EXIF orientation (1 to 8)."""
    name = _checked_format(data, path)
    if container.ends_early(data, name):
        raise ImageRefused(path, "truncated", f"the {name} data ends after {len(data):,} bytes, before its end")
    num_frames = container.num_frames(data, name)
    if num_frames == 0:
        raise ImageRefused(path, "corrupt", f"{name}: its header makes no sense")
    if canvas := container.canvas(data, name):
        _check_num_pixels(canvas, path, config)
    try:
        image = _PLUGINS[name](BytesIO(data))
    except Image.DecompressionBombError as error:
        raise ImageRefused(path, "too-many-pixels", f"{error}") from error
    except _DECODER_ERRORS as error:
        raise _refusal(path, name, error) from error
    except MemoryError as error:
        raise ImageRefused(path, "out-of-memory", "not even its header fits in this host's memory") from error
    orientation = _orientation(image, data, name)
    width, height = image.size
    size = Size(width, height) if orientation >= 5 else Size(height, width)
    check_limits(size, path, config)
    if num_frames is None:
        num_frames = 1 if name == "JPEG" else getattr(image, "n_frames", 1)
    _check_kind(image, name, num_frames, path, config)
    return image, name, size, orientation


def _check_kind(image: ImageFile.ImageFile, name: str, num_frames: int, path: str, config: ImagesConfig) -> None:
    if num_frames > 1 and config.animated == "refuse":
        what = "pages" if name == "TIFF" else "frames"
        raise ImageRefused(path, "animated", f'{num_frames} {what}; set animated to "first-frame" to use the first')
    if image.mode not in _MODES:
        detail = f"{name} of Pillow's mode {image.mode}, which has no known white; save it with 8 or 16 bits a channel"
        raise ImageRefused(path, "unsupported-format", detail)
    if image.tile and image.tile[0][0] == "bmp_rle":
        # Pillow decodes it in Python, pixel by pixel: a file of some kilobytes would take minutes.
        raise ImageRefused(path, "unsupported-format", "a BMP with run lengths; save it without, or as PNG")


def _orientation(image: ImageFile.ImageFile, data: bytes, name: str) -> int:
    """How the loaded pixels are to be turned, by the numbers of EXIF."""
    if name == "PNG":
        return container.exif_orientation(container.png_chunk(data, b"eXIf"))
    # Pillow turns a TIFF when it loads it, and libjxl a JPEG XL, whose EXIF does not count then. Of a JPEG in a
    # JPEG XL the plug-in gives the JPEG's pixels and EXIF.
    if name == "TIFF" or (name == "JPEG XL" and not getattr(image, "jpeg", False)):
        return 1
    return container.exif_orientation(image.info.get("exif"))


def _checked_format(data: bytes, path: str) -> str:
    """The format by the first bytes, if it is accepted and the suffix of `path` does not say another one."""
    if not data:
        raise ImageRefused(path, "empty", "the file has no bytes")
    name = container.sniff(data)
    if name is None:
        raise ImageRefused(path, "not-an-image", f"it begins with {data[:8]!r}, which no known image format does")
    # First, because a new name would not make an ICO usable.
    if name not in _PLUGINS:
        raise ImageRefused(path, "unsupported-format", f"{name}; convert it to one of {', '.join(_PLUGINS)}")
    if name == "JPEG XL" and importlib.util.find_spec("pillow_jxl") is None:
        detail = "JPEG XL, which Pillow cannot read alone; pip install pillow-jxl-plugin, or convert it to PNG"
        raise ImageRefused(path, "unsupported-format", detail)
    supported = {"WEBP": WebPImagePlugin.SUPPORTED, "AVIF": AvifImagePlugin.SUPPORTED}
    if not supported.get(name, True):
        raise ImageRefused(path, "unsupported-format", f"this Pillow was built without {name}; install Pillow's wheel")
    suffix = os.path.splitext(path)[1].lower()
    if _FORMAT_OF_SUFFIX.get(suffix, name) != name:
        raise ImageRefused(
            path, "wrong-suffix", f"the bytes are {name}; rename it to end in {_SUFFIXES_OF_FORMAT[name][0]}"
        )
    return name


def _check_num_pixels(size: Size, path: str, config: ImagesConfig) -> None:
    num_pixels = size.height * size.width
    if num_pixels < 1:
        raise ImageRefused(path, "corrupt", f"its header gives a size of {size}")
    if num_pixels > config.max_pixels:
        raise ImageRefused(
            path, "too-many-pixels", f"{size} is {num_pixels:,} pixels; max_pixels is {config.max_pixels:,}"
        )


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


def _refusal(path: str, name: str, error: BaseException) -> ImageRefused:
    text = str(error) or type(error).__name__
    if text.lower().startswith(("unsupported", "unknown pixel mode")):
        return ImageRefused(path, "unsupported-format", f"{name}: {text}; convert it to PNG")
    reason: RefusalReason = "truncated" if "truncated" in text.lower() else "corrupt"
    return ImageRefused(path, reason, f"{name}: {text}")


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
