"""Video files -> their frames, by PyAV: the extra `video`. It is imported when the first one is read.

The demuxer is named, because FFmpeg's own choice includes playlists, which read other files.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import islice, pairwise
from typing import Any

import numpy as np

from latentcache.config import ImagesConfig
from latentcache.dataset import container
from latentcache.dataset.images import check_limits
from latentcache.errors import ImageRefused
from latentcache.types import Size

_PQ_AND_HLG = (16, 18)
"""FFmpeg's numbers of the transfer functions of HDR, whose values are no sRGB."""
MAX_FRAMES = 1 << 22
"""Of a video: 19 hours at 60 a second. FFmpeg takes 40 bytes and more for each that a table names."""
_TRACK, _VIDEO = re.compile(rb"trak"), re.compile(rb"hdlr.{8}vide", re.DOTALL)
_TABLES = re.compile(rb"co64|dcomzlib|elst|stco|stsc|stsz|stz2|trun")


def probe_video(data: bytes, path: str, images: ImagesConfig) -> tuple[Size, np.ndarray]:
    """The upright size, and for how many ms each frame is shown. Its first frame is decoded. Raises ImageRefused."""
    with _opened(data, path, images) as (file, stream):
        first = next(file.decode(stream), None)
        if first is None:
            raise ImageRefused(path, "corrupt", "the video has no frame")
        size = Size(*_upright(first).shape[:2])
        check_limits(size, path, images)
    times = _starts(data, path, images)
    shown = np.diff(times)
    return size, np.append(shown, np.median(shown) if len(shown) else 100.0)


def decode_video(data: bytes, path: str, images: ImagesConfig, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    """These frames, numbered from 0 in the order in which they are shown: uint8 [H, W, 3]. `numbers` ascend."""
    starts, place = _starts(data, path, images), 0
    with _opened(data, path, images) as (file, stream):
        for frame in file.decode(stream):
            start = -math.inf if frame.pts is None else _milliseconds(frame.pts, stream)
            if start > starts[numbers[place]]:
                break
            if start == starts[numbers[place]]:
                yield _upright(frame)
                place += 1
                if place == len(numbers):
                    return
    raise ImageRefused(path, "corrupt", f"frame {numbers[place]} cannot be decoded")


def _starts(data: bytes, path: str, images: ImagesConfig) -> np.ndarray:
    """When each frame is shown, in ms, ascending. Nothing is decoded."""
    with _opened(data, path, images) as (file, stream):
        packets = (packet for packet in file.demux(stream) if packet.pts is not None and not packet.is_discard)
        times = (_milliseconds(packet.pts, stream) for packet in packets)
        starts = np.fromiter(islice(times, MAX_FRAMES + 1), np.float64)
    _check_frames(len(starts), path)
    return np.sort(starts)


def _check_frames(num_frames: int, path: str) -> None:
    if num_frames > MAX_FRAMES:
        detail = f"it has more than {MAX_FRAMES:,} frames, or its tables say so; cut the video"
        raise ImageRefused(path, "too-many-pixels", detail)


def _milliseconds(pts: int, stream: Any) -> float:
    return float(1000 * pts * stream.time_base)


@contextmanager
def _opened(data: bytes, path: str, images: ImagesConfig) -> Iterator[tuple[Any, Any]]:
    """The open file and its first video stream. What FFmpeg raises becomes an ImageRefused."""
    if importlib.util.find_spec("av") is None:
        raise ImageRefused(path, "unsupported-format", "a video; pip install 'latentcache[video]' reads it")
    import av

    is_matroska = data.startswith(container.MATROSKA_MAGIC)
    if not is_matroska and container.ends_early(data, "MP4"):
        raise ImageRefused(path, "truncated", f"the video ends after {len(data):,} bytes, before its end")
    source = BytesIO(data) if is_matroska else _without_sound(data, path)
    try:
        with av.open(source, format="matroska" if is_matroska else "mov") as file:
            if not file.streams.video:
                raise ImageRefused(path, "unsupported-format", "it has no video stream")
            stream = file.streams.video[0]
            _check(stream, path, images)
            yield file, stream
    except (av.error.FFmpegError, ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        raise ImageRefused(path, "corrupt", f"FFmpeg: {error}") from error


def _without_sound(data: bytes, path: str) -> BytesIO:
    """An MP4 whose tables name at most MAX_FRAMES frames, or ImageRefused. Those of other tracks than video are hidden.

    FFmpeg takes memory for each sample that a table names and for each time that an edit repeats it, whatever the file
    has. Sound may have 48,000 a second. Tables are searched by name, since FFmpeg reads them wherever they are.
    """
    file, num_frames = BytesIO(data), 0
    for kind, start, end in container.boxes(data):
        if kind == b"mdat":  # the frames themselves
            continue
        tracks = [start, *(found.start() for found in _TRACK.finditer(data, start, end)), end]
        for at, until in pairwise(tracks):
            is_video, num_samples, num_edits = _VIDEO.search(data, at, until), 0, 1
            for table in _TABLES.finditer(data, at, until):
                name, place = table[0], table.start()
                if name == b"dcomzlib":
                    raise ImageRefused(path, "unsupported-format", "a video with a compressed header; save it again")
                if name == b"trun":  # of a fragment, which names its track by number
                    num_samples += _number(data, place + 8)
                elif not is_video:
                    file.seek(place)
                    file.write(b"free")
                elif name == b"elst":  # of 12 bytes for each edit; FFmpeg goes by its size too
                    num_bytes = _number(data, place - 4)
                    num_edits = max(num_edits, ((num_bytes if num_bytes >= 16 else until - place) - 16) // 12)
                elif name in (b"stsz", b"stz2"):
                    num_samples += _number(data, place + 12)
            num_frames += num_samples * num_edits
    _check_frames(num_frames, path)
    file.seek(0)
    return file


def _number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "big")


def _check(stream: Any, path: str, images: ImagesConfig) -> None:
    codec, sides = stream.codec_context, stream.sample_aspect_ratio
    if codec is None:
        detail = "a video in a codec that FFmpeg cannot decode; convert it to H.264"
        raise ImageRefused(path, "unsupported-format", detail)
    check_limits(Size(codec.height, codec.width), path, images)
    if codec.color_trc in _PQ_AND_HLG:
        raise ImageRefused(path, "unsupported-format", "a video in HDR; convert it to SDR")
    if sides and not math.isclose(float(sides), 1):
        raise ImageRefused(path, "unsupported-format", f"a video whose pixels have sides {sides}; scale it to 1:1")


def _upright(frame: Any) -> np.ndarray:
    """The frame in RGB, turned as the file's display matrix says."""
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
