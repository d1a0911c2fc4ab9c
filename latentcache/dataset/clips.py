"""Animated files (by Pillow) and videos (by PyAV, the extra `video`) -> the frames of a clip.

A clip consists of the frames shown at times 0, 1/fps, 2/fps, ... of its file. PyAV is imported with the first video.
The demuxer is chosen explicitly, because FFmpeg's own choice includes playlists, which read other files.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np

from latentcache.config import FramesConfig, ImagesConfig
from latentcache.dataset.images import check_limits, decode_frames, frame_times, prepare, probe
from latentcache.errors import ImageRefused
from latentcache.identity import Preparation
from latentcache.types import Size

_ROUNDING = 1e-6
"""Tolerance, in ms, for sums of floating-point durations."""
_MATROSKA_MAGIC = b"\x1a\x45\xdf\xa3"
"""The first bytes of `.mkv` and `.webm`."""
_IMAGE_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"hevx")
"""Brands of AVIF and HEIC, which begin with the same box as MP4."""
_PQ_AND_HLG = (16, 18)
"""FFmpeg's numbers for the HDR transfer functions, whose values are not sRGB."""


def probe_clip(data: bytes, path: str, images: ImagesConfig, frames: FramesConfig | None) -> tuple[Size, int | None]:
    """The upright size, and how many frames the file has at the rate of `frames`; None for a still image.

    Without `frames`, the file must be a still image, and only its header is read. Otherwise all frames of an animation,
    or the first frame of a video, are decoded. Raises ImageRefused.
    """
    if frames is None:
        return probe(data, path, images), None
    size, times = _size_and_times(data, path, images)
    if not len(times):
        return probe(data, path, images), None
    return size, _num_frames(times, frames.fps)


def num_frames_of_clip(num_available: int, frames: FramesConfig, factor: int) -> int:
    """How many of the available frames a clip uses: one plus a multiple of `factor`, at most `frames.count`.

    A video VAE makes one latent frame from the first frame and from each `factor` further ones, and silently drops the
    remainder.
    """
    return (min(num_available, frames.count) - 1) // factor * factor + 1


def decode_clip(data: bytes, path: str, images: ImagesConfig, preparation: Preparation) -> np.ndarray:
    """Decode the frames that a clip's preparation selects, each prepared like an image: uint8 [frames, h, w, 3].

    Only one frame at a time is in memory at full size. Raises ImageRefused.
    """
    geometry, num_frames = preparation.geometry, preparation.geometry.num_frames
    assert num_frames is not None
    times = _size_and_times(data, path, images)[1]
    num_available = _num_frames(times, preparation.fps)
    if num_available < num_frames:
        raise ImageRefused(path, "corrupt", f"it has {num_available} frames; {num_frames} are needed")
    first = (num_available - num_frames) // 2 if preparation.start == "middle" else 0
    numbers = np.arange(first, first + num_frames)
    if preparation.fps is not None:
        numbers = np.cumsum(times).searchsorted(numbers * (1000 / preparation.fps) + _ROUNDING, side="right")
    clip = np.empty((num_frames, *geometry.target_size, 3), np.uint8)
    wanted, decode = np.unique(numbers), _decode_video if _is_video(data) else decode_frames
    for number, pixels in zip(wanted, decode(data, path, images, wanted.tolist()), strict=True):
        size = Size(*pixels.shape[:2])
        if size != geometry.original_size:
            detail = f"frame {number} is {size}, but the first is {geometry.original_size}: save the clip in one size"
            raise ImageRefused(path, "corrupt", detail)
        clip[numbers == number] = prepare(pixels, geometry, preparation.resample)
    return clip


def _size_and_times(data: bytes, path: str, images: ImagesConfig) -> tuple[Size, np.ndarray]:
    """The upright size, and each frame's duration in ms; no durations for a still image. Raises ImageRefused."""
    if not _is_video(data):
        size, times = frame_times(data, path, images)
        return size, np.array(times, np.float64)
    with _opened_video(data, path, images) as (file, stream):
        first = next(file.decode(stream), None)
        if first is None:
            raise ImageRefused(path, "corrupt", "the video has no frames")
        size = Size(*_upright(first).shape[:2])
        check_limits(size, path, images)
    starts = _starts(data, path, images)
    shown = np.diff(starts)
    all_shown = np.append(shown, np.median(shown) if len(shown) else 100.0)
    if not len(starts) or all_shown.sum() < 1:
        raise ImageRefused(path, "corrupt", f"its {len(starts):,} frames last {all_shown.sum():g} ms")
    return size, all_shown


def _num_frames(times: np.ndarray, fps: float | None) -> int:
    """The number of frames at this rate: times k/fps before the end. Without a rate, all frames of the file."""
    return len(times) if fps is None else max(1, math.ceil(float(times.sum()) * fps / 1000 - _ROUNDING))


def _is_video(data: bytes) -> bool:
    """Whether the bytes are a video (MP4 family or Matroska) rather than an image."""
    return data.startswith(_MATROSKA_MAGIC) or (data[4:8] == b"ftyp" and data[8:12] not in _IMAGE_BRANDS)


def _decode_video(data: bytes, path: str, images: ImagesConfig, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield these frames, numbered from 0 in display order: uint8 [H, W, 3]. `numbers` must ascend."""
    starts, waiting = _starts(data, path, images), list(numbers)
    with _opened_video(data, path, images) as (file, stream):
        for frame in file.decode(stream):
            start = -math.inf if frame.pts is None else _milliseconds(frame.pts, stream)
            if start == starts[waiting[0]]:
                yield _upright(frame)
                del waiting[0]
            if not waiting:
                return
            if start > starts[waiting[0]]:
                break
    raise ImageRefused(path, "corrupt", f"frame {waiting[0]} cannot be decoded")


def _starts(data: bytes, path: str, images: ImagesConfig) -> np.ndarray:
    """The ascending start times of the frames, in ms. Nothing is decoded."""
    with _opened_video(data, path, images) as (file, stream):
        packets = (packet for packet in file.demux(stream) if packet.pts is not None and not packet.is_discard)
        return np.sort(np.fromiter((_milliseconds(packet.pts, stream) for packet in packets), np.float64))


def _milliseconds(pts: int, stream: Any) -> float:
    return float(1000 * pts * stream.time_base)


@contextmanager
def _opened_video(data: bytes, path: str, images: ImagesConfig) -> Iterator[tuple[Any, Any]]:
    """The open file and its first video stream. FFmpeg's errors become ImageRefused."""
    if importlib.util.find_spec("av") is None:
        raise ImageRefused(path, "unsupported-format", "it is a video; to read it, pip install 'latentcache[video]'")
    import av

    is_matroska = data.startswith(_MATROSKA_MAGIC)
    if not is_matroska and _ends_early(data):  # FFmpeg would conceal the missing part of a truncated frame
        raise ImageRefused(path, "truncated", f"the video is cut off after {len(data):,} bytes")
    try:
        with av.open(BytesIO(data), format="matroska" if is_matroska else "mov") as file:
            if not file.streams.video:
                raise ImageRefused(path, "unsupported-format", "it has no video stream")
            stream = file.streams.video[0]
            _check(stream, path, images)
            yield file, stream
    except (av.error.FFmpegError, ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        raise ImageRefused(path, "corrupt", f"FFmpeg: {error}") from error


def _ends_early(data: bytes) -> bool:
    """Whether a top-level box of an MP4 extends past the end of the data."""
    offset = 0
    while offset + 8 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        if length == 1:
            length = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if length < 8:  # 0 means up to the end of the file; other values are invalid, which the decoder will report
            return False
        offset += length
    return offset > len(data)


def _check(stream: Any, path: str, images: ImagesConfig) -> None:
    codec, sides = stream.codec_context, stream.sample_aspect_ratio
    if codec is None:
        detail = "a video in a codec that FFmpeg cannot decode; convert it to H.264"
        raise ImageRefused(path, "unsupported-format", detail)
    if not codec.height or not codec.width:
        raise ImageRefused(path, "corrupt", f"the video claims to have {codec.height}x{codec.width} pixels")
    check_limits(Size(codec.height, codec.width), path, images)
    if codec.color_trc in _PQ_AND_HLG:
        raise ImageRefused(path, "unsupported-format", "a video in HDR; convert it to SDR")
    if sides and not math.isclose(float(sides), 1):
        raise ImageRefused(path, "unsupported-format", f"a video with a pixel aspect ratio of {sides}; scale it to 1:1")


def _upright(frame: Any) -> np.ndarray:
    """The frame in RGB, rotated by the file's display matrix."""
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
