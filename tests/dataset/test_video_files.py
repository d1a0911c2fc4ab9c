"""Videos become clips as animated files do. They are made with PyAV, the extra `video`."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_models import tiny_folder

from latentcache import LatentCache
from latentcache.config import FramesConfig, ImagesConfig, SourceConfig
from latentcache.config_file import parse_config
from latentcache.dataset.clips import decode_clip, probe_clip
from latentcache.dataset.images import preparation_policy
from latentcache.dataset.sources import open_source
from latentcache.dataset.video_files import decode_video
from latentcache.errors import ImageRefused
from latentcache.identity import Preparation
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Geometry, Size

IMAGES, WHOLE = ImagesConfig(min_side=8), Size(48, 64)
GREYS = [20 * number for number in range(12)]
KINDS = [("mp4", "mpeg4"), ("mov", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx")]


def video(durations: Sequence[int], kind: str = "mp4", codec: str = "mpeg4", **options: Any) -> bytes:
    """Frame k has the grey GREYS[k], and is shown for durations[k] ms."""
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = WHOLE.width, WHOLE.height, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in options.items():
            setattr(stream.codec_context, name, value)
        for number, start in enumerate(np.cumsum([0, *durations[:-1]]).tolist()):
            pixels = np.full((*WHOLE, 3), GREYS[number], np.uint8)
            pixels[:16, :16] = 255  # at the top left, so that a turn shows
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = start, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def clip(data: bytes, num_frames: int, fps: float | None, start: str = "first") -> np.ndarray:
    geometry = Geometry(WHOLE, WHOLE, Crop(0, 0), WHOLE, num_frames=num_frames)
    preparation = Preparation.of({**preparation_policy(IMAGES), "fps": fps, "start": start}, geometry)
    return decode_clip(data, "a.mp4", IMAGES, preparation)


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_frames_are_those_shown_at_the_times_of_the_rate(kind: str, codec: str) -> None:
    data = video([100, 300, 40, 60, 100, 100, 100, 100, 100], kind, codec)
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=10)) == (WHOLE, 10)
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=None)) == (WHOLE, 9)
    for fps, start, numbers in (
        (10, "first", [0, 1, 1, 1, 2]),
        (10, "middle", [1, 1, 2, 4, 5]),
        (None, "middle", [2, 3, 4, 5, 6]),
    ):
        found = clip(data, 5, fps, start)
        assert found.shape == (5, *WHOLE, 3) and (found[:, 4:10, 4:10] > 230).all()
        assert np.abs(found[:, 40, 40, 0].astype(int) - [GREYS[number] for number in numbers]).max() <= 6


def test_a_video_is_turned_as_its_matrix_says() -> None:
    data = video([100] * 5)
    upright, turned = ((65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), (0, 65536, 0, -65536, 0, 0, 48 << 16, 0, 1 << 30))
    at = data.index(struct.pack(">9i", *upright), data.index(b"tkhd"))
    data = data[:at] + struct.pack(">9i", *turned) + data[at + 36 :]  # by 90 degrees, clockwise
    assert probe_clip(data, "a.mp4", IMAGES, FramesConfig()) == (Size(64, 48), 8)
    (pixels,) = decode_video(data, "a.mp4", IMAGES, [0])
    assert pixels.shape == (64, 48, 3) and (pixels[4:10, -10:-4] > 230).all() and (pixels[4:10, 4:10] < 30).all()


def test_what_cannot_be_read_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video([100] * 9)
    cases = {
        "truncated": data[: len(data) // 2],
        "corrupt": data[:40] + bytes(len(data) - 40),
        "unsupported-format": video([100] * 9, "mov", "libx264", color_trc=16),
        "too-many-pixels": data,
    }
    for reason, damaged in cases.items():
        images = IMAGES.model_copy(update={"max_pixels": 100}) if reason == "too-many-pixels" else IMAGES
        with pytest.raises(ImageRefused) as caught:
            probe_clip(damaged, "a.mp4", images, FramesConfig())
        assert caught.value.reason == reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImageRefused, match=r"pip install 'latentcache\[video\]'"):
        probe_clip(data, "a.mp4", IMAGES, FramesConfig())


def test_a_codec_that_is_not_known_is_refused_by_name() -> None:
    data = video([100] * 9, "matroska").replace(b"V_MPEG4/ISO/ASP", b"V_MPEG9/ISO/ASP")
    with pytest.raises(ImageRefused, match="a codec that FFmpeg cannot decode") as caught:
        probe_clip(data, "a.mkv", IMAGES, FramesConfig())
    assert caught.value.reason == "unsupported-format"


def patched(data: bytes, name: bytes, offset: int, *numbers: int) -> bytes:
    at = data.index(name) + offset
    return data[:at] + struct.pack(f">{len(numbers)}I", *numbers) + data[at + 4 * len(numbers) :]


def longer(data: bytes, name: bytes, more: bytes) -> bytes:
    """The box with more at its end."""
    end = data.index(name) - 4 + int.from_bytes(data[data.index(name) - 4 : data.index(name)], "big")
    for each in (b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl", name):
        at = data.index(each) - 4
        num_bytes = int.from_bytes(data[at : at + 4], "big")
        if at + num_bytes >= end:
            data = patched(data, each, -4, num_bytes + len(more))
    return data[:end] + more + data[end:]


def same_size(data: bytes, num_frames: int) -> bytes:
    """Its tables say that it has so many frames of one byte, in one chunk."""
    return patched(patched(data, b"stsz", 8, 1, num_frames), b"stsc", 12, 1, num_frames, 1)


def test_tables_of_more_frames_than_a_video_may_have_are_refused_before_ffmpeg_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = video([100] * 9)
    monkeypatch.setattr("av.open", lambda *_, **__: pytest.fail("FFmpeg takes memory for each"))
    edits = longer(same_size(data, 100_000), b"elst", struct.pack(">IiI", 1000, 0, 1 << 16) * 600)
    fragment = struct.pack(">I4sI4s3I", 28, b"moof", 20, b"trun", 0, 1 << 30, 0)
    for forged in (same_size(data, 20_000_000), edits, data + fragment):
        with pytest.raises(ImageRefused, match="has more than 4,194,304 frames, or its tables say so") as caught:
            probe_clip(forged, "a.mp4", IMAGES, FramesConfig())
        assert caught.value.reason == "too-many-pixels"
    with pytest.raises(ImageRefused, match="a compressed header"):
        probe_clip(data + struct.pack(">I4sI8s", 20, b"cmov", 12, b"dcomzlib"), "a.mp4", IMAGES, FramesConfig())


def test_tables_of_sound_are_not_read() -> None:
    """Uncompressed sound has 48,000 samples a second, in one table with the frames."""
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(io.BytesIO(video([100] * 9))) as source, av.open(buffer, "w", format="mov") as file:
        pictures = file.add_stream_from_template(source.streams.video[0])
        sound = file.add_stream("pcm_s16le", rate=48_000, layout="mono")
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = pictures
                file.mux(packet)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 43_200), np.int16), format="s16", layout="mono")
        frame.sample_rate = 48_000
        file.mux(sound.encode(frame))
        file.mux(sound.encode())
    data, at = buffer.getvalue(), buffer.getvalue().rindex(b"stsz")
    assert struct.unpack_from(">2I", data, at + 8) == (2, 43_200)
    forged = data[:at] + struct.pack(">4s3I", b"stsz", 0, 1, 1 << 31) + data[at + 16 :]
    for each in (data, forged):
        assert probe_clip(each, "a.mov", IMAGES, FramesConfig(fps=10)) == (WHOLE, 9)
        assert decode_video(each, "a.mov", IMAGES, [0, 8]).__next__().shape == (*WHOLE, 3)


def test_a_video_of_too_many_frames_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video([100] * 9, "matroska")
    monkeypatch.setattr("latentcache.dataset.video_files.MAX_FRAMES", 8)
    with pytest.raises(ImageRefused, match="more than 8 frames"):
        probe_clip(data, "a.mkv", IMAGES, FramesConfig())


def test_a_folder_has_videos_where_they_become_clips(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video([100] * 9))
    (tmp_path / "b.MKV").write_bytes(video([100] * 5, "matroska"))
    (tmp_path / "a.txt").write_text("a grey wall")
    source = open_source(SourceConfig(path=tmp_path), videos=True)
    assert [sample.sample_id for sample in source.samples()] == ["a.mp4", "b.MKV"]
    dataset = {
        "name": "clips",
        "source": {"path": tmp_path},
        "buckets": {"area": 48 * 64, "step": 16},
        "images": {"min_side": 8},
        "frames": {"count": 9, "fps": 10},
    }
    config = parse_config(
        {
            "cache": {"path": tmp_path / "cache"},
            "datasets": [dataset],
            "model": {"path": tiny_folder("wan"), "family": "wan"},
            "encode": {"device": "cpu", "num_workers": 2},
        }
    )
    report = run_precache(config)
    assert report.num_refused == 0 and report.num_encoded > 0
    with LatentCache(config.cache.path) as cache:
        images = [cache.row(name)[1].images[0] for name in ("a.mp4", "b.MKV")]
        assert [ref.geometry.num_frames for ref in images] == [9, 5]
        assert cache.get(images[0].key).tensors["latents"].shape == (16, 3, 6, 8)
        assert cache.get(images[0].key).record.identity["preparation"]["decoder"] == "pillow-or-pyav"
