"""Animated files and videos -> the frames of a clip.

A clip's frames are those that are shown at the times 0, 1/fps, 2/fps, ... of its file. Legend: F frames of the clip.
"""

from __future__ import annotations

import math

import numpy as np

from latentcache.config import FramesConfig, ImagesConfig
from latentcache.dataset import container
from latentcache.dataset.images import decode_frames, prepare, probe
from latentcache.dataset.video_files import decode_video, probe_video
from latentcache.errors import ImageRefused
from latentcache.identity import Preparation
from latentcache.types import Size

MAX_DECODED_PIXELS = 1 << 35
"""Of the frames before the last one that a clip needs, which decoders have to go through: 4.6 hours of 1920x1080 would
be more. Without a bound a small file could make work for days."""
_ROUNDING = 1e-6
"""Times are in ms, and sums of them in floating point."""


def probe_clip(data: bytes, path: str, images: ImagesConfig, frames: FramesConfig | None) -> tuple[Size, int | None]:
    """The upright size, and how many frames the file has at the rate of `frames`; None for a still image.

    Without `frames` it has to be one. By the headers alone; of a video the first frame is decoded. Raises ImageRefused.
    """
    if frames is None:
        return probe(data, path, images), None
    if container.is_video(data):
        size, shown = probe_video(data, path, images)
        return size, _num_frames(shown, frames.fps)
    times = _times(data)
    if not len(times):
        return probe(data, path, images), None
    size = probe(data, path, images.model_copy(update={"animated": "first-frame"}))
    return size, _num_frames(times, frames.fps)


def num_frames_of_clip(num_available: int, frames: FramesConfig, factor: int) -> int:
    """How many frames a clip has of so many: a multiple of `factor`, and one more, at most `frames.count`.

    A VAE of video makes one latent frame of the first, and of each `factor` more; it drops what is over silently.
    """
    return (min(num_available, frames.count) - 1) // factor * factor + 1


def decode_clip(data: bytes, path: str, images: ImagesConfig, preparation: Preparation) -> np.ndarray:
    """The frames that the preparation of a clip names, each prepared as an image: uint8 [F, h, w, 3].

    One frame at a time has its full size. Raises ImageRefused.
    """
    geometry = preparation.geometry
    num_frames, is_video = geometry.num_frames, container.is_video(data)
    assert num_frames is not None
    times = probe_video(data, path, images)[1] if is_video else _times(data)
    num_available = _num_frames(times, preparation.fps)
    if num_available < num_frames:
        raise ImageRefused(path, "corrupt", f"{num_available} frames are shown, where {num_frames} are needed")
    first = (num_available - num_frames) // 2 if preparation.start == "middle" else 0
    numbers = np.arange(first, first + num_frames)
    if preparation.fps is not None:
        numbers = np.cumsum(times).searchsorted(numbers * (1000 / preparation.fps) + _ROUNDING, side="right")
    _check_work(int(numbers[-1]) + 1, geometry.original_size, path)
    clip = np.empty((num_frames, *geometry.target_size, 3), np.uint8)
    wanted, decode = np.unique(numbers), decode_video if is_video else decode_frames
    for number, pixels in zip(wanted, decode(data, path, images, wanted.tolist()), strict=True):
        size = Size(*pixels.shape[:2])
        if size != geometry.original_size:
            detail = f"frame {number} is {size}, and the first {geometry.original_size}: save the clip in one size"
            raise ImageRefused(path, "corrupt", detail)
        clip[numbers == number] = prepare(pixels, geometry, preparation.resample)
    return clip


def _times(data: bytes) -> np.ndarray:
    """For how many ms each frame is shown; empty for what is no animation that is read as a clip."""
    return np.array(container.frame_times(data, container.sniff(data) or ""), np.float64)


def _num_frames(times: np.ndarray, fps: float | None) -> int:
    """The number of frames at this rate: times k/fps that lie before the end. Without one those of the file."""
    return len(times) if fps is None else math.ceil(float(times.sum()) * fps / 1000 - _ROUNDING)


def _check_work(num_frames: int, size: Size, path: str) -> None:
    num_pixels = num_frames * math.prod(size)
    if num_pixels > MAX_DECODED_PIXELS:
        detail = f"its {num_frames:,} frames of {size} to the last one that is needed have {num_pixels:,} pixels"
        raise ImageRefused(path, "too-many-pixels", f"{detail}; {MAX_DECODED_PIXELS:,} are allowed. Cut the clip")
