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
    geometry = Geometry(Size(64, 48), Size(64, 48), Crop(0, 0), Size(64, 48), num_frames=1)
    preparation = Preparation.of({**preparation_policy(IMAGES), "fps": None, "start": "first"}, geometry)
    (pixels,) = decode_clip(data, "a.mp4", IMAGES, preparation)
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


def test_sound_beside_the_pictures_changes_nothing() -> None:
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
    assert probe_clip(buffer.getvalue(), "a.mov", IMAGES, FramesConfig(fps=10)) == (WHOLE, 9)
    assert np.array_equal(clip(buffer.getvalue(), 9, 10), clip(video([100] * 9), 9, 10))


def test_a_video_whose_frames_take_days_to_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latentcache.dataset.clips.MAX_DECODED_PIXELS", 8 * 48 * 64)
    with pytest.raises(ImageRefused, match="its 9 frames of 48x64 are too many") as caught:
        probe_clip(video([100] * 9, "matroska"), "a.mkv", IMAGES, FramesConfig())
    assert caught.value.reason == "too-many-pixels"


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
