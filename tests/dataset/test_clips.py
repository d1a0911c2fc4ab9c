"""Animated files and videos become clips: which frames are taken, what is cached of them, and what is refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_configs import config_of_dataset
from helpers.tiny_models import tiny_encoders, tiny_folder
from PIL import Image

from latentcache import BucketBatchSampler, LatentCache, LatentDataset
from latentcache.config import Config, FramesConfig, ImagesConfig
from latentcache.dataset.clips import decode_clip, probe_clip
from latentcache.dataset.images import decode_frames, preparation_policy
from latentcache.errors import ImageRefused
from latentcache.families import family_named
from latentcache.identity import Preparation
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache
from latentcache.types import ClipSize, Crop, Geometry, Size

HEIGHT, WIDTH = 48, 64
WHOLE = Size(HEIGHT, WIDTH)
IMAGES = ImagesConfig(min_side=8)
GREYS = [17 * number for number in range(14)]
ANIMATIONS = {".gif": "GIF", ".png": "PNG", ".webp": "WEBP"}
VIDEOS = {
    ".mp4": ("mp4", "mpeg4"),
    ".mov": ("mov", "libx264"),
    ".MKV": ("matroska", "mpeg4"),
    ".webm": ("webm", "libvpx"),
}
"""Those of a suffix: the container and the codec."""


def picture(number: int) -> np.ndarray:
    """Frame `number`: its grey, and white at the top left, so that a turn shows."""
    pixels = np.full((*WHOLE, 3), GREYS[number % len(GREYS)], np.uint8)
    pixels[:16, :16] = 255
    return pixels


def clip_file(durations: Sequence[int], suffix: str = ".gif", **options: Any) -> bytes:
    """An animation or a video whose frame k is `picture(k)`, shown for durations[k] ms."""
    buffer = io.BytesIO()
    if suffix in ANIMATIONS:
        frames = [Image.fromarray(picture(number)) for number in range(len(durations))]
        options |= {"duration": list(durations), "loop": 0, "lossless": True}
        frames[0].save(buffer, ANIMATIONS[suffix], save_all=True, append_images=frames[1:], **options)
        return buffer.getvalue()
    av = pytest.importorskip("av")
    kind, codec = VIDEOS[suffix]
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in options.items():
            setattr(stream.codec_context, name, value)
        for number, start in enumerate(np.cumsum([0, *durations[:-1]]).tolist()):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = start, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def preparation(num_frames: int, fps: float | None, start: str = "first", *, size: Size = WHOLE) -> Preparation:
    geometry = Geometry(WHOLE, size, Crop(0, 0), size, num_frames=num_frames)
    return Preparation(**preparation_policy(IMAGES), fps=fps, start=start, geometry=geometry)


def shown(data: bytes, num_frames: int, fps: float | None, start: str = "first") -> list[int]:
    """The numbers of the file's frames in the clip."""
    pixels = decode_clip(data, "clip", IMAGES, preparation(num_frames, fps, start))
    assert pixels.shape == (num_frames, HEIGHT, WIDTH, 3) and pixels.dtype == np.uint8
    assert (pixels[:, 4:10, 4:10] > 230).all()
    distances = np.abs(pixels[:, 40, 40, :1].astype(int) - GREYS)
    assert (distances.min(axis=1) <= 6).all(), "codecs of videos move greys a little"
    return distances.argmin(axis=1).tolist()


@pytest.mark.parametrize("suffix", [*ANIMATIONS, *VIDEOS])
def test_frames_are_those_shown_at_the_times_of_the_rate(suffix: str) -> None:
    # Every 100 ms: at 400 frame 2 begins, and at 450 frame 3, which no such time meets.
    data = clip_file([100, 300, 50, 50, 100, 100, 100, 100, 100], suffix)
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=10)) == (WHOLE, 10)
    assert shown(data, 9, 10) == [0, 1, 1, 1, 2, 4, 5, 6, 7]
    assert shown(data, 5, 10, "middle") == [1, 1, 2, 4, 5]
    assert probe_clip(data, "a", IMAGES, FramesConfig(fps=None)) == (WHOLE, 9)
    assert shown(data, 5, None) == [0, 1, 2, 3, 4]
    assert shown(data, 5, None, "middle") == [2, 3, 4, 5, 6]
    assert probe_clip(clip_file([100, 50], suffix), "a", IMAGES, FramesConfig(fps=10)) == (WHOLE, 2), "it has begun"


def test_a_png_whose_first_picture_is_no_frame() -> None:
    assert shown(clip_file([100] * 5, ".png", default_image=True), 4, 10) == [1, 2, 3, 4]


def test_each_frame_is_prepared_as_an_image() -> None:
    """Resized, cropped, and on the colour of transparent images; pixels as Pillow composes them."""
    rng = np.random.default_rng(0)
    layers = [Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)) for _ in range(3)]
    buffer = io.BytesIO()
    layers[0].save(buffer, "PNG", save_all=True, append_images=layers[1:], duration=100, blend=0, disposal=1)
    found = decode_frames(buffer.getvalue(), "a.png", IMAGES, [0, 2])
    for pixels, layer in zip(found, layers[::2], strict=True):
        white = Image.new("RGB", (WIDTH, HEIGHT), "#ffffff")
        white.paste(layer.convert("RGB"), mask=layer.getchannel("A"))
        assert np.array_equal(pixels, np.array(white))
    small = decode_clip(buffer.getvalue(), "a.png", IMAGES, preparation(1, None, size=Size(24, 32)))
    assert small.shape == (1, 24, 32, 3)


def test_a_video_is_turned_as_its_matrix_says() -> None:
    data = clip_file([100] * 5, ".mp4")
    upright, turned = ((65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), (0, 65536, 0, -65536, 0, 0, 48 << 16, 0, 1 << 30))
    at = data.index(struct.pack(">9i", *upright), data.index(b"tkhd"))
    data = data[:at] + struct.pack(">9i", *turned) + data[at + 36 :]  # by 90 degrees, clockwise
    assert probe_clip(data, "a.mp4", IMAGES, FramesConfig()) == (Size(64, 48), 8)
    geometry = Geometry(Size(64, 48), Size(64, 48), Crop(0, 0), Size(64, 48), num_frames=1)
    turn = Preparation(**preparation_policy(IMAGES), fps=None, start="first", geometry=geometry)
    (pixels,) = decode_clip(data, "a.mp4", IMAGES, turn)
    assert pixels.shape == (64, 48, 3) and (pixels[4:10, -10:-4] > 230).all() and (pixels[4:10, 4:10] < 30).all()


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def broken_crc(data: bytes) -> bytes:
    at = data.rindex(b"fdAT") + 10
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_clip_whose_frames_have_several_sizes_is_refused() -> None:
    """As an animation that reaches past its screen, and a recording of a call."""
    data = clip_file([100] * 5)
    at = data.rindex(b"\x2c\0\0\0\0") + 1  # the left edge of the last frame
    with pytest.raises(ImageRefused, match=r"frame 4 is .*, but the first is 48x64: save the clip in one size"):
        shown(data[:at] + struct.pack("<H", 10) + data[at + 2 :], 5, 10)


def test_what_cannot_be_read_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    video, matroska, limits = clip_file([100] * 9, ".mp4"), clip_file([100] * 5, ".webm"), {"max_pixels": 100}
    a_nanosecond = matroska.replace(b"\x2a\xd7\xb1\x83\x0f\x42\x40", b"\x2a\xd7\xb1\x83\x00\x00\x01")
    no_width = matroska.replace(b"\xb0\x81\x40", b"\xec\x81\x40")
    assert matroska not in (a_nanosecond, no_width)
    for reason, damaged, changes in (
        ("truncated", truncated(video), {}),
        ("corrupt", video[:40] + bytes(len(video) - 40), {}),
        ("corrupt", a_nanosecond, {}),
        ("corrupt", no_width, {}),
        ("unsupported-format", clip_file([100] * 9, ".mov", color_trc=16), {}),
        ("too-many-pixels", video, limits),
    ):
        for fps in (10, None):
            with pytest.raises(ImageRefused, match=rf"refused \({reason}\)"):
                probe_clip(damaged, "a.mp4", IMAGES.model_copy(update=changes), FramesConfig(fps=fps))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImageRefused, match=r"pip install 'latentcache\[video\]'"):
        probe_clip(video, "a.mp4", IMAGES, FramesConfig())


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cache of nine frames of each clip at 10 fps, where there are as many, and of an image; all of one bucket."""
    root = tmp_path_factory.mktemp("cached")
    files = {
        "a.gif": clip_file([100] * 12),
        "b.webp": clip_file([50] * 20, ".webp"),
        "bad.gif": truncated(clip_file([100] * 9)),
        "bad.png": broken_crc(clip_file([100] * 9, ".png")),
        "bad.webp": truncated(clip_file([100] * 9, ".webp")),
        "c.mp4": clip_file([100] * 9, ".mp4"),
        "d.MKV": clip_file([100] * 5, ".MKV"),
        "short.png": clip_file([100] * 3, ".png"),
        "a.txt": b"a grey wall\n",
    }
    folder = root / "photos"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    Image.new("RGB", (WIDTH, HEIGHT), "#505050").save(folder / "still.png")
    settings = {"model": {"path": tiny_folder("wan"), "family": "wan"}, "validation": {}}
    buckets = {"area": HEIGHT * WIDTH, "step": 16}
    config = config_of_dataset(root, settings, buckets=buckets, frames={"count": 9, "fps": 10})
    report = run_precache(config)
    assert report.num_samples == 9
    refused = {each.sample_id: each.reason for each in report.refused}
    assert refused == {"bad.gif": "truncated", "bad.png": "corrupt", "bad.webp": "corrupt"}
    return config


def test_clips_are_cached_as_the_vae_encodes_their_frames(cached: Config) -> None:
    """The manifest says how many frames each has, and nothing of an image."""
    clips = {"a.gif": 9, "b.webp": 9, "c.mp4": 9, "d.MKV": 5, "short.png": 1, "still.png": None}
    with LatentCache(cached.cache.path) as cache:
        for name, num_frames in clips.items():
            ref = cache.row(name)[1].images[0]
            assert ref.geometry.num_frames == num_frames and ref.geometry.target_size == (HEIGHT, WIDTH)
            entry = cache.get(ref.key)
            preparation = entry.record.identity["preparation"]
            assert ("fps" in preparation, "num_frames" in preparation) == (num_frames is not None,) * 2
            latents = entry.tensors["latents"]
            assert latents.shape == (16, ((num_frames or 1) - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)
        assert preparation["decoder"] == "pillow"
        video = cache.get(cache.row("c.mp4")[1].images[0].key).record.identity
        assert video["preparation"]["decoder"] == "pillow-or-pyav"
        assert cache.manifest("photos").common["frames"] == {"fps": 10.0, "start": "first"}
        pixels = np.stack([picture(number) for number in range(0, 18, 2)])  # every second one is shown at 10 fps
        live = encode_images(tiny_encoders("wan")["vae"], pixels[None], family_named("wan"))[0, :16]
        assert torch.equal(cache.get(cache.row("b.webp")[1].images[0].key).tensors["latents"], live)


def test_batches_never_mix_numbers_of_frames(cached: Config) -> None:
    dataset = LatentDataset(cached.cache.path)
    extents = [dataset.bucket(index) for index in range(len(dataset))]
    nine = ClipSize(*WHOLE, 9)
    assert extents == [nine, nine, nine, ClipSize(*WHOLE, 5), ClipSize(*WHOLE, 1), WHOLE]
    assert str(extents[0]) == "9 frames of 48x64"
    dealt = list(BucketBatchSampler(dataset, 4, shuffle=False))
    assert sorted(map(sorted, dealt)) == [[0, 1, 2], [3], [4], [5]]
