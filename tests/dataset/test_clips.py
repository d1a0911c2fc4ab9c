"""Animated files and videos become clips: which frames are taken, what is cached of them, and what is refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from latentcache import BucketBatchSampler, LatentCache, LatentDataset
from latentcache.config import Config, FramesConfig, ImagesConfig, SourceConfig
from latentcache.config_file import parse_config
from latentcache.dataset.clips import decode_clip, num_frames_of_clip, probe_clip
from latentcache.dataset.images import decode_frames, preparation_policy
from latentcache.dataset.sources import open_source
from latentcache.errors import ImageRefused
from latentcache.families import family_named
from latentcache.identity import Preparation
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache
from latentcache.types import ClipSize, Crop, Geometry, Size

HEIGHT, WIDTH = 48, 64
WHOLE = Size(HEIGHT, WIDTH)
IMAGES = ImagesConfig(min_side=8)
GREYS = [0, 17, 34, 51, 68, 85, 102, 119, 136, 153, 170, 187]


def clip_file(durations: Sequence[int], suffix: str = ".gif", size: tuple[int, int] = (HEIGHT, WIDTH)) -> bytes:
    """An animation whose frame k is of the grey GREYS[k % 12], and shown for durations[k] ms."""
    frames = [Image.new("RGB", size[::-1], (GREYS[k % 12],) * 3) for k in range(len(durations))]
    options: dict[str, Any] = {"duration": list(durations), "loop": 0}
    if suffix == ".webp":
        options["lossless"] = True
    buffer = io.BytesIO()
    kind = {".gif": "GIF", ".png": "PNG", ".webp": "WEBP"}[suffix]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], **options)
    return buffer.getvalue()


def preparation(num_frames: int, fps: float | None, start: str = "first", **sizes: Any) -> Preparation:
    geometry = Geometry(
        **{"original_size": WHOLE, "resized_size": WHOLE, "crop_top_left": Crop(0, 0), **sizes},
        target_size=sizes.get("resized_size", WHOLE),
        num_frames=num_frames,
    )
    return Preparation.of({**preparation_policy(IMAGES), "fps": fps, "start": start}, geometry)


def shown(data: bytes, num_frames: int, fps: float | None, start: str = "first") -> list[int]:
    """The numbers of the file's frames in the clip."""
    pixels = decode_clip(data, "clip", IMAGES, preparation(num_frames, fps, start))
    assert pixels.shape == (num_frames, HEIGHT, WIDTH, 3) and pixels.dtype == np.uint8
    assert (pixels == pixels[:, :1, :1, :1]).all(), "each frame is of one grey"
    return [GREYS.index(int(frame[0, 0, 0])) for frame in pixels]


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_frames_are_those_shown_at_the_times_of_the_rate(suffix: str) -> None:
    data = clip_file([100, 300, 50, 50, 500], suffix)
    # Every 100 ms: at 400 frame 2 begins, and at 450 frame 3, which no such time meets.
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=10)) == (Size(HEIGHT, WIDTH), 10)
    assert shown(data, 9, 10) == [0, 1, 1, 1, 2, 4, 4, 4, 4]
    assert shown(data, 5, 10, "middle") == [1, 1, 2, 4, 4]
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=None))[1] == 5
    assert shown(data, 5, None) == [0, 1, 2, 3, 4]
    assert shown(data, 1, None, "middle") == [2]


def test_a_png_whose_first_picture_is_no_frame() -> None:
    frames = [Image.new("RGB", (WIDTH, HEIGHT), (grey,) * 3) for grey in (255, *GREYS[:5])]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], default_image=True, duration=100)
    assert shown(buffer.getvalue(), 5, 10) == [0, 1, 2, 3, 4]


def test_each_frame_is_prepared_as_an_image() -> None:
    """Resized, cropped, and on the colour of transparent images; pixels as Pillow composes them."""
    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8) for _ in range(3)]
    buffer = io.BytesIO()
    pictures = [Image.fromarray(layer) for layer in layers]
    pictures[0].save(buffer, "PNG", save_all=True, append_images=pictures[1:], duration=100, blend=0, disposal=1)
    found = list(decode_frames(buffer.getvalue(), "a.png", IMAGES, [0, 2]))
    for pixels, layer in zip(found, (layers[0], layers[2]), strict=True):
        white = Image.new("RGB", (WIDTH, HEIGHT), "#ffffff")
        white.paste(Image.fromarray(layer).convert("RGB"), mask=Image.fromarray(layer[..., 3]))
        assert np.array_equal(pixels, np.array(white))
    small = decode_clip(buffer.getvalue(), "a.png", IMAGES, preparation(1, None, resized_size=Size(24, 32)))
    assert small.shape == (1, 24, 32, 3)


@given(
    durations=st.lists(st.integers(1, 90).map(lambda each: 10 * each), min_size=2, max_size=12),
    fps=st.sampled_from([4.0, 10.0, 16.0, 24.0, None]),
    count=st.integers(1, 40),
    start=st.sampled_from(["first", "middle"]),
)
def test_any_clip_has_a_multiple_of_four_and_one_frames(
    durations: list[int], fps: float | None, count: int, start: str
) -> None:
    data, rule = clip_file(durations, size=(16, 16)), FramesConfig(count=count, fps=fps)
    num_available = probe_clip(data, "a.gif", IMAGES, rule)[1]
    assert num_available is not None
    num_frames = num_frames_of_clip(num_available, rule, 4)
    assert num_frames % 4 == 1 and num_frames <= min(count, num_available) < num_frames + 4
    sizes = {"original_size": Size(16, 16), "resized_size": Size(16, 16)}
    pixels = decode_clip(data, "a.gif", IMAGES, preparation(num_frames, fps, start, **sizes))
    step, ends = 1000 / fps if fps else None, np.cumsum(durations)
    first = (num_available - num_frames) // 2 if start == "middle" else 0
    for place, frame in enumerate(pixels[:, 0, 0, 0], first):
        at = place if step is None else next(k for k, end in enumerate(ends) if place * step < end - 1e-6)
        assert frame == GREYS[at]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def broken_crc(data: bytes) -> bytes:
    at = data.rindex(b"fdAT") + 10
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_clip_whose_frames_have_several_sizes_is_refused() -> None:
    """As an animation that reaches past its screen, and a recording of a call."""
    data, whole = clip_file([100] * 5), struct.pack("<4H", 0, 0, WIDTH, HEIGHT)
    at = data.rindex(b"\x2c" + whole) + 1
    with pytest.raises(ImageRefused, match="frame 4 is 48x74, and the first 48x64: save the clip in one size"):
        shown(data[:at] + struct.pack("<H", 10) + data[at + 2 :], 5, 10)


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_an_animation_that_ends_anywhere_is_refused_or_shorter(suffix: str) -> None:
    data = clip_file([100] * 3, suffix)
    for num_bytes in range(0, len(data), 7):
        try:
            size, num_frames = probe_clip(data[:num_bytes], f"a{suffix}", IMAGES, FramesConfig(fps=10))
        except ImageRefused as refused:
            assert refused.detail
        else:
            assert size == (HEIGHT, WIDTH) and num_frames in (None, 2, 3)


# Caching


def config_of(folder: Path, cache: Path) -> Config:
    """A config over the clips of a folder: nine frames of each, at 10 fps."""
    dataset: dict[str, Any] = {"name": "clips", "source": {"path": folder}, "frames": {"count": 9, "fps": 10}}
    dataset |= {"buckets": {"area": HEIGHT * WIDTH, "step": 16}, "images": {"min_side": 8}}
    model = {"path": tiny_folder("wan"), "family": "wan"}
    settings = {"cache": {"path": cache}, "datasets": [dataset], "model": model}
    return parse_config({**settings, "encode": {"device": "cpu", "num_workers": 2}})


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cache of clips of 12, 10 and 3 frames at 10 fps, and of an image; all of one bucket."""
    root = tmp_path_factory.mktemp("cached")
    folder = root / "clips"
    folder.mkdir()
    (folder / "a.gif").write_bytes(clip_file([100] * 12))
    (folder / "b.webp").write_bytes(clip_file([50] * 20, ".webp"))
    (folder / "bad.gif").write_bytes(truncated(clip_file([100] * 9)))
    (folder / "bad.png").write_bytes(broken_crc(clip_file([100] * 9, ".png")))
    (folder / "bad.webp").write_bytes(truncated(clip_file([100] * 9, ".webp")))
    (folder / "short.png").write_bytes(clip_file([100] * 3, ".png"))
    Image.new("RGB", (WIDTH, HEIGHT), "#505050").save(folder / "still.png")
    (folder / "a.txt").write_text("a grey wall\n")
    config = config_of(folder, root / "cache")
    report = run_precache(config)
    assert report.num_samples == 7
    refused = {each["sample_id"]: each["reason"] for each in report.to_json()["refused"]}
    assert refused == {"bad.gif": "truncated", "bad.png": "corrupt", "bad.webp": "corrupt"}
    return config


def test_clips_are_cached_as_the_vae_encodes_their_frames(cached: Config) -> None:
    """The manifest says how many frames each has, and nothing of an image."""
    vae = tiny_encoders("wan")["vae"]
    with LatentCache(cached.cache.path) as cache:
        for name, num_frames in (("a.gif", 9), ("b.webp", 9), ("short.png", 1), ("still.png", None)):
            ref = cache.row(name)[1].images[0]
            assert ("num_frames" in ref.geometry.to_json()) == (num_frames is not None)
            assert ref.geometry.num_frames == num_frames and ref.geometry.target_size == (HEIGHT, WIDTH)
            entry = cache.get(ref.key)
            preparation = entry.record.identity["preparation"]
            assert ("fps" in preparation, "num_frames" in preparation) == (num_frames is not None,) * 2
            latents = entry.tensors["latents"]
            assert latents.shape == (16, ((num_frames or 1) - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)
        assert cache.manifest("clips").common["frames"] == {"fps": 10.0, "start": "first"}
        greys = np.array([GREYS[k % 12] for k in range(0, 18, 2)], np.uint8)  # every second one is shown at 10 fps
        pixels = np.broadcast_to(greys[None, :, None, None, None], (1, 9, HEIGHT, WIDTH, 3))
        live = encode_images(vae, pixels.copy(), family_named("wan"))[0, :16]
        assert torch.equal(cache.get(cache.row("b.webp")[1].images[0].key).tensors["latents"], live)


def test_batches_never_mix_numbers_of_frames(cached: Config) -> None:
    dataset = LatentDataset(cached.cache.path)
    extents = [dataset.bucket(index) for index in range(len(dataset))]
    assert extents == [ClipSize(*WHOLE, 9), ClipSize(*WHOLE, 9), ClipSize(*WHOLE, 1), WHOLE]
    assert str(extents[0]) == "9 frames of 48x64"
    dealt = list(BucketBatchSampler(dataset, 4, shuffle=False))
    assert sorted(map(sorted, dealt)) == [[0, 1], [2], [3]]


# Videos: they are made with PyAV, the extra `video`

SHADES = [20 * number for number in range(12)]
KINDS = [("mp4", "mpeg4"), ("mov", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx")]


def video(durations: Sequence[int], kind: str = "mp4", codec: str = "mpeg4", **options: Any) -> bytes:
    """Frame k has the grey SHADES[k], and is shown for durations[k] ms."""
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = WHOLE.width, WHOLE.height, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in options.items():
            setattr(stream.codec_context, name, value)
        for number, start in enumerate(np.cumsum([0, *durations[:-1]]).tolist()):
            pixels = np.full((*WHOLE, 3), SHADES[number], np.uint8)
            pixels[:16, :16] = 255  # at the top left, so that a turn shows
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = start, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def clip(data: bytes, num_frames: int, fps: float | None, start: str = "first") -> np.ndarray:
    return decode_clip(data, "a.mp4", IMAGES, preparation(num_frames, fps, start))


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_frames_of_a_video_are_those_shown_at_the_times_of_the_rate(kind: str, codec: str) -> None:
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
        assert np.abs(found[:, 40, 40, 0].astype(int) - [SHADES[number] for number in numbers]).max() <= 6


def test_a_video_is_turned_as_its_matrix_says() -> None:
    data = video([100] * 5)
    upright, turned = ((65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), (0, 65536, 0, -65536, 0, 0, 48 << 16, 0, 1 << 30))
    at = data.index(struct.pack(">9i", *upright), data.index(b"tkhd"))
    data = data[:at] + struct.pack(">9i", *turned) + data[at + 36 :]  # by 90 degrees, clockwise
    assert probe_clip(data, "a.mp4", IMAGES, FramesConfig()) == (Size(64, 48), 8)
    sizes = {"original_size": Size(64, 48), "resized_size": Size(64, 48)}
    (pixels,) = decode_clip(data, "a.mp4", IMAGES, preparation(1, None, **sizes))
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


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [(b"\x2a\xd7\xb1\x83\x0f\x42\x40", b"\x2a\xd7\xb1\x83\x00\x00\x01"), (b"\xb0\x81\x40", b"\xec\x81\x40")],
    ids=["a millisecond that is a nanosecond", "no width"],
)
@pytest.mark.parametrize("fps", [10, None])
def test_a_video_without_time_or_width_stops_no_run(whole: bytes, damaged: bytes, fps: float | None) -> None:
    data = video([100] * 5, "webm", "libvpx")
    assert data.count(whole) == 1
    with pytest.raises(ImageRefused) as caught:
        probe_clip(data.replace(whole, damaged), "a.webm", IMAGES, FramesConfig(fps=fps))
    assert caught.value.reason == "corrupt"


def test_a_folder_has_videos_where_they_become_clips(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video([100] * 9))
    (tmp_path / "b.MKV").write_bytes(video([100] * 5, "matroska"))
    (tmp_path / "a.txt").write_text("a grey wall")
    source = open_source(SourceConfig(path=tmp_path), videos=True)
    assert [sample.sample_id for sample in source.samples()] == ["a.mp4", "b.MKV"]
    config = config_of(tmp_path, tmp_path / "cache")
    report = run_precache(config)
    assert report.num_refused == 0 and report.num_encoded > 0
    with LatentCache(config.cache.path) as cache:
        images = [cache.row(name)[1].images[0] for name in ("a.mp4", "b.MKV")]
        assert [ref.geometry.num_frames for ref in images] == [9, 5]
        assert cache.get(images[0].key).tensors["latents"].shape == (16, 3, 6, 8)
        assert cache.get(images[0].key).record.identity["preparation"]["decoder"] == "pillow-or-pyav"
