"""Untrusted bytes -> upright sRGB pixels, or a typed refusal. Limits are checked against the header, by Pillow.

Unreadable metadata does not cost the image: a broken EXIF block means "upright". An ICC profile that is broken, or for
another kind of image, is logged and ignored.

Damage that no decoder detects goes unnoticed: inside a JPEG's scan, which has no checksum, and in a complete PNG or
WebP with fewer rows than its header says.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageFile, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from latentcache.config import ImagesConfig
from latentcache.dataset.resampling import BOX, LANCZOS, resize
from latentcache.errors import ImageRefused
from latentcache.types import Geometry, RefusalReason, Size

_log = logging.getLogger(__name__)
_MODE_OF_COLOUR_SPACE = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
_FORMAT_OF_SUFFIX = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), "JPEG"),
    **dict.fromkeys((".png", ".apng"), "PNG"),
    ".webp": "WEBP",
    **dict.fromkeys((".avif", ".avifs"), "AVIF"),
    ".gif": "GIF",
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".jxl": "JXL",
    **dict.fromkeys((".heic", ".heif", ".hif", ".jp2", ".j2k", ".jpx", ".ico", ".psd"), "an unsupported format"),
}
IMAGE_SUFFIXES = frozenset(_FORMAT_OF_SUFFIX)
"""Lower-case suffixes of image files, including unsupported formats, so that these are reported."""

_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L", "I;16N"}
"""Pillow modes with a known white level. Floats, 32 bits, signed values and Lab have none."""
_UNSCALED = {"L;2", "L;4", "RGB;16B"}
"""PNG layouts whose transparent colour Pillow gives in the file's own scale, but whose pixels in 8 bits."""

# What Pillow's decoders raise on damaged input. Warnings matter only if the program turns them into errors.
_DECODER_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(EOFError, struct.error, zlib.error, ImageCms.PyCMSError, Warning),
)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # `max_pixels` is the limit

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def preparation_policy(config: ImagesConfig) -> dict[str, str]:
    """The policies that determine the pixels of an accepted image, as `identity.Preparation` takes them."""
    return {
        "exif": "upright",
        "colour": "srgb-perceptual",
        "alpha": f"composite-{config.alpha_colour.lower()}",
        "decoder": "pillow",
        "resample": LANCZOS,
    }


def with_filter(policy: dict[str, str], name: str) -> dict[str, str]:
    """The policy with the filter `name` of a bucket rule, unless it is the default."""
    return policy if name == LANCZOS else {**policy, "resample": name}


def probe(data: bytes, path: str, config: ImagesConfig) -> Size:
    """The size after EXIF rotation, from the header alone. `path` is for messages; its suffix must match the bytes.

    Raises ImageRefused. Bytes that pass may still be refused by `decode`.
    """
    return _open(data, path, config)[1]


def decode(data: bytes, path: str, config: ImagesConfig, *, alpha_only: bool = False) -> np.ndarray:
    """Decode to upright sRGB pixels: uint8 [H, W, 3], C-contiguous and writable. Raises ImageRefused.

    Colours are converted from the ICC profile to sRGB with the perceptual intent, unless the profile is sRGB to within
    one level. CMYK without a profile becomes (255 - C)(255 - K) / 255, and so on. 16-bit grey is divided by 257 and
    rounded; for 16-bit RGB, Pillow keeps the high byte, at most one level off. Transparent pixels are blended with
    `config.alpha_colour` in sRGB, with straight alpha. `alpha_only` returns the alpha channel instead: uint8 [H, W],
    255 if there is none.
    """
    image, _, orientation = _open(data, path, config)
    with _refusals(path):
        _check_crcs(image, data)
        return _upright(image, path, config, orientation, alpha_only=alpha_only)


def frame_times(data: bytes, path: str, config: ImagesConfig) -> tuple[Size, list[float]]:
    """The upright size of a GIF, PNG or WebP, and the duration of each frame in ms; none for a still image.

    A duration of 0 counts as 100 ms, as in browsers. Pillow has to decode a frame to know its duration. Raises
    ImageRefused.
    """
    image, size, _ = _open(data, path, config.model_copy(update={"animated": "first-frame"}))
    times: list[float] = []
    with _refusals(path):
        for number in _frames(image):
            image.seek(number)
            image.load()
            times.append(float(image.info.get("duration") or 100))
    return size, times


def decode_frames(data: bytes, path: str, config: ImagesConfig, numbers: Iterable[int]) -> Iterator[np.ndarray]:
    """Decode these frames of a GIF, PNG or WebP, numbered from 0 and ascending, as `decode` does.

    The fallback image of an animated PNG is not a frame.
    """
    image, _, orientation = _open(data, path, config.model_copy(update={"animated": "first-frame"}))
    with _refusals(path):
        _check_crcs(image, data)
        frames = _frames(image)
        for number in numbers:
            image.seek(frames[number])
            yield _upright(image, path, config, orientation)


def prepare(pixels: np.ndarray, geometry: Geometry, resample: str = LANCZOS) -> np.ndarray:
    """Resize to `resized_size`, crop at `crop_top_left` to `target_size`, mirror left to right if `flip`.

    `resample` is a filter's name (`resampling.FILTERS`). `pixels` must be uint8 [H, W, 3] of `original_size`, or [H, W]
    for a mask. Returns uint8 [h, w, 3], or [h, w], C-contiguous. Raises ValueError for other pixels.
    """
    (top, left), (height, width) = geometry.crop_top_left, geometry.target_size
    fits = top + height <= geometry.resized_size.height and left + width <= geometry.resized_size.width
    is_whole = pixels.shape in (geometry.original_size, (*geometry.original_size, 3))
    if not is_whole or pixels.dtype != np.uint8 or not fits:
        raise ValueError(
            f"pixels are {pixels.dtype} {pixels.shape}, but the geometry is {geometry}: compute the geometry from the "
            "size of these pixels"
        )
    target = resize(pixels, geometry.resized_size, resample)[top : top + height, left : left + width]
    # A copy that owns its memory: torch.from_numpy needs it writable, with positive strides.
    return np.array(target[:, ::-1] if geometry.flip else target, order="C")


def as_picture(pixels: np.ndarray) -> Image.Image:
    """Prepared pixels uint8 [H, W, 3] as a Pillow image, for processors that expect one."""
    return Image.fromarray(pixels)


def check_limits(size: Size, path: str, config: ImagesConfig) -> None:
    """Raise ImageRefused, naming `path`, for a size that the config does not allow."""
    if (num_pixels := size.height * size.width) > config.max_pixels:
        detail = f"{size} is {num_pixels:,} pixels; max_pixels is {config.max_pixels:,}"
        raise ImageRefused(path, "too-many-pixels", detail)
    if max(size) > config.max_aspect * min(size):
        detail = f"{size} has sides 1 : {max(size) / min(size):.4g}; max_aspect is {config.max_aspect:g}"
        raise ImageRefused(path, "extreme-aspect", detail)
    if min(size) < config.min_side:
        raise ImageRefused(path, "too-small", f"{size} has a side below {config.min_side} pixels, min_side")


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Turn a decoder's errors into ImageRefused."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ImageRefused(path, "too-many-pixels", f"{error}") from error
    except _DECODER_ERRORS as error:
        text = str(error) or type(error).__name__
        reason: RefusalReason = "truncated" if "truncated" in text.lower() else "corrupt"
        raise ImageRefused(path, reason, f"it cannot be decoded: {text}") from error
    except MemoryError as error:
        raise ImageRefused(path, "out-of-memory", "it does not fit in this host's memory") from error


def _open(data: bytes, path: str, config: ImagesConfig) -> tuple[ImageFile.ImageFile, Size, int]:
    """Open without decoding: the image, its upright size and its EXIF orientation (1 to 8)."""
    if not data:
        raise ImageRefused(path, "empty", "the file has no bytes")
    by_suffix = _FORMAT_OF_SUFFIX.get(os.path.splitext(path)[1].lower())
    formats: tuple[str, ...] = _FORMATS
    is_jpeg_xl = by_suffix == "JXL" or data.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL "))
    if is_jpeg_xl and importlib.util.find_spec("pillow_jxl") is not None:  # which takes as long as half a probe
        import pillow_jxl  # noqa: F401  # it registers itself with Pillow

        formats += ("JXL",)
    with _refusals(path):
        try:
            image = Image.open(stream := BytesIO(data), formats=formats)
        except UnidentifiedImageError:
            reason: RefusalReason = "not-an-image" if by_suffix in (None, *formats) else "unsupported-format"
            begins = f"it begins with {data[:8]!r}, which is none of {', '.join(formats)}"
            raise ImageRefused(path, reason, f"{begins}; convert it to one of them, or download it again") from None
        if image.format == "MPO":  # from phones: a JPEG followed by further pictures, which are ignored
            image = JpegImagePlugin.JpegImageFile(stream := BytesIO(data))
        name = str(image.format)
        if by_suffix not in (None, name):
            raise ImageRefused(path, "wrong-suffix", f"the bytes are {name}; rename the file accordingly")
        # Inside a scan 0xFF is always escaped, so an end marker after its start is real. libjpeg would fill the missing
        # part of a half-downloaded JPEG with grey.
        if name == "JPEG" and data.find(b"\xff\xd9", stream.tell()) < 0:
            raise ImageRefused(path, "truncated", f"the JPEG data is cut off after {len(data):,} bytes")
        check_limits(Size(image.height, image.width), path, config)
        if getattr(image, "is_animated", False) and config.animated == "refuse":
            detail = 'it has several frames or pages; set animated to "first-frame" to use the first'
            raise ImageRefused(path, "animated", detail)
        _check_kind(image, path)
        orientation = _orientation(image, data)
    width, height = image.size if orientation < 5 else image.size[::-1]
    return image, Size(height, width), orientation


def _check_kind(image: ImageFile.ImageFile, path: str) -> None:
    """Raise ImageRefused for pixels that Pillow decodes wrongly, or far too slowly."""
    decoder, layout = (image.tile[0][0], image.tile[0][3]) if image.tile else ("", "")
    detail = None
    if image.mode not in _MODES:
        detail = f"Pillow's mode {image.mode}, which has no known white level"
    elif decoder == "bmp_rle":
        # Pillow decodes it in Python, pixel by pixel: a file of some kilobytes would take minutes.
        detail = "run-length encoding"
    elif "transparency" in image.info and (image.mode.startswith("I;16") or layout in _UNSCALED):
        detail = "a transparent colour and other than 8 bits per channel"
    if detail:
        raise ImageRefused(path, "unsupported-format", f"a {image.format} with {detail}; save it as an 8-bit PNG")


def _orientation(image: Image.Image, data: bytes) -> int:
    """The EXIF orientation, 1 to 8, that is still to be applied to the loaded pixels."""
    # Pillow rotates a TIFF on load. libjxl rotates a JPEG XL and overrides its EXIF, but for a recompressed JPEG the
    # plug-in returns the JPEG's own pixels and EXIF.
    if image.format == "TIFF" or (image.format == "JXL" and not getattr(image, "jpeg", False)):
        return 1
    block = image.info.get("exif")
    if block is None and image.format == "PNG" and (at := data.rfind(b"eXIf")) > 0:  # a block after the pixels
        block = data[at + 4 : at + 4 + int.from_bytes(data[at - 4 : at], "big")]
    exif = Image.Exif()
    try:
        # Not `getexif`, which decodes a PNG to find a block after its pixels, and also consults XMP.
        exif.load(block or b"")
        value = exif.get(ExifTags.Base.Orientation)
    except _DECODER_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _check_crcs(image: Image.Image, data: bytes) -> None:
    """Check a PNG's CRCs. Loading does not check those of pixel data, so a flipped bit could change the picture."""
    if image.format == "PNG":
        PngImagePlugin.PngImageFile(BytesIO(data)).verify()


def _frames(image: Image.Image) -> range:
    """The frame numbers of an animated GIF, PNG or WebP; empty for a still image."""
    first, end = int(getattr(image, "default_image", False)), getattr(image, "n_frames", 1)
    return range(first, end if image.format in ("GIF", "PNG", "WEBP") and end - first > 1 else first)


def _upright(
    image: Image.Image, path: str, config: ImagesConfig, orientation: int, *, alpha_only: bool = False
) -> np.ndarray:
    """The pixels of the image's current frame: see `decode`."""
    image.load()
    colour, alpha = _colour_and_alpha(image)
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


def _colour_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """The unpremultiplied colours (mode L, RGB or CMYK) and the alpha (mode L), if there is one."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(np.asarray(image), getattr(image, "tag_v2", {}))), None
    if image.mode == "CMYK":
        return image, None
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert("L" if image.mode in {"1", "L"} else "RGB"), None


def _eight_bits(grey: np.ndarray, tags: Mapping[int, Any]) -> np.ndarray:
    """Scale 16-bit grey [H, W] to uint8, rounded. Pillow's own conversion clips all but the lowest 256 levels.

    `tags` are those of a TIFF: Pillow does not scale 12-bit values, and does not invert if zero means white.
    """
    (num_bits, *_), photometric = tags.get(BITSPERSAMPLE, (16,)), tags.get(PHOTOMETRIC_INTERPRETATION, 1)
    white = (1 << num_bits) - 1
    levels: np.ndarray = ((grey.astype(np.uint32) * 255 + white // 2) // white).astype(np.uint8)
    return levels if photometric else np.uint8(255) - levels


# Colour


def to_srgb(image: Image.Image, icc: bytes | None, path: str) -> Image.Image:
    """Convert mode L, RGB or CMYK with this ICC profile to RGB in sRGB. `path` is for the log."""
    if icc:
        found, transform = _conversion(icc)
        mode = "RGB" if found == "RGB" and image.mode == "L" else image.mode
        if isinstance(transform, str):
            _log.warning("%s: ignoring its ICC profile, which cannot be used: %s", path, transform)
        elif found != mode:
            _log.warning("%s: ignoring its ICC profile, which is for %s images, not %s", path, found, image.mode)
        elif transform is not None:
            converted = ImageCms.applyTransform(image.convert(mode), transform)
            assert converted is not None  # it is None only for in-place conversion
            return converted
    return image.convert("RGB")


@functools.lru_cache(maxsize=16)
def _conversion(icc: bytes) -> tuple[str, ImageCms.ImageCmsTransform | str | None]:
    """The mode that a profile describes, and its transform to sRGB: None if it is sRGB, a text if it is unusable.

    Cached, because most images of a dataset share a few profiles.
    """
    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(icc))
        mode = _MODE_OF_COLOUR_SPACE.get(profile.profile.xcolor_space.strip())
        if mode is None:
            return "", f"unknown colour space {profile.profile.xcolor_space!r}"
        transform = ImageCms.buildTransform(
            profile,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.PERCEPTUAL,
            # A transform is thread-safe only without lcms's cache of the last pixel.
            ImageCms.Flags.NOCACHE,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        return "", str(error)
    return mode, None if _is_srgb(transform, mode) else transform


def _is_srgb(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether the transform moves no colour of a grid by more than one level. A profile's name proves nothing."""
    if mode == "CMYK":
        return False
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(1, -1, 3)
    if mode == "L":
        grid = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, -1, 3)
    source = Image.fromarray(grid if mode == "RGB" else np.ascontiguousarray(grid[..., 0]))
    moved = np.asarray(ImageCms.applyTransform(source, transform))
    return bool(np.abs(moved.astype(np.int16) - grid).max() <= 1)


# Masks


def mask_policy(images: dict[str, str], *, alpha: bool) -> dict[str, str]:
    """The policies that determine the values of masks in a dataset whose images have the policy `images`.

    With `alpha`, the mask is the image's own alpha channel.
    """
    if alpha:
        return {**images, "colour": "alpha-channel", "alpha": "alpha-channel", "resample": BOX}
    return {**images, "colour": f"{images['colour']} luma", "resample": BOX}


def luma(pixels: np.ndarray) -> np.ndarray:
    """The luma of sRGB pixels, uint8 [H, W, 3] -> uint8 [H, W], like Pillow's mode L (ITU-R 601-2)."""
    red, green, blue = (pixels[..., channel].astype(np.uint32) for channel in range(3))
    grey: np.ndarray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey.astype(np.uint8)


def kept_by(mask: np.ndarray, rule: str) -> np.ndarray:
    """How much of each pixel a mask keeps, uint8 of its shape. The rest becomes mid-grey, 0 in the range -1 to 1.

    `hard`: all or nothing, like diffusers' inpainting pipelines: `image * (mask < 0.5)` in the range -1 to 1.
    `soft`: like OneTrainer: `image * (1 - mask) + 0.5 * mask` in the range 0 to 1.
    """
    return np.asarray(np.where(mask < 128, np.uint8(255), np.uint8(0)) if rule == "hard" else np.uint8(255) - mask)


def prepare_mask(values: np.ndarray, geometry: Geometry, downscale: int) -> np.ndarray:
    """Prepare the mask [H, W] like its image, then average squares of `downscale` pixels.

    Returns uint8 [1, h, w], halves rounded up. kohya's trainer averages too, in floating point (`interpolate(...,
    mode="area")` in `apply_masked_loss`). Raises ValueError unless the mask has the geometry's original size.
    """
    taken, (height, width) = prepare(values, geometry, BOX), geometry.target_size
    rows, columns, area = height // downscale, width // downscale, downscale**2
    squares = taken[: rows * downscale, : columns * downscale].reshape(rows, downscale, columns, downscale)
    means: np.ndarray = (squares.sum(axis=(1, 3), dtype=np.uint32) + area // 2) // area
    return np.asarray(means.astype(np.uint8)[None])
