"""JPEG XL is read by a plug-in of Pillow's, which decodes as soon as it opens a file."""

from __future__ import annotations

import io
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
from odd_images import HEIGHT, WIDTH, exif, photo, turned
from PIL import Image, ImageFile

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode, probe
from latentcache.errors import ImageRefused
from latentcache.types import Size

POLICY = ImagesConfig(min_side=16)
BARE = bytes.fromhex("ff0acb4024080001008c004b188b15001c1037c68dbfbb17080100500009870028f9008af5800331ee8d6bbcfc14")
"""48 x 64 without loss, as cjxl makes it: the upper half is (10, 220, 60), the lower (200, 30, 90)."""
BOXED = bytes.fromhex("0000000c4a584c200d0a870a00000014667479706a786c20000000006a786c20") + (
    (8 + len(BARE)).to_bytes(4, "big") + b"jxlc" + BARE
)


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the plug-in's name, and what it registers with Pillow."""

    class JXLImageFile(ImageFile.ImageFile):
        format = "JXL"

        def _open(self) -> None:
            data = self.fp.read()
            if data.endswith(b"cut"):
                raise RuntimeError("Generic Error.")
            self.jpeg = b"jpeg" in data
            pixels = Image.fromarray(photo())
            self._size, self._mode, self.tile = pixels.size, pixels.mode, []
            self.info["exif"], self.im = exif(6), pixels.im

    package = ModuleType("pillow_jxl")
    package.__spec__ = ModuleSpec("pillow_jxl", None)
    monkeypatch.setitem(sys.modules, "pillow_jxl", package)
    monkeypatch.setitem(Image.OPEN, "JXL", (JXLImageFile, lambda prefix: prefix.startswith(b"\xff\x0a")))


@pytest.mark.usefixtures("plug_in")
def test_the_codestreams_turn_counts_and_exif_only_in_a_packed_jpeg() -> None:
    np.testing.assert_array_equal(decode(BARE, "a.jxl", POLICY), photo())
    packed = BARE + b"jpeg"
    assert probe(packed, "a.jxl", POLICY) == Size(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decode(packed, "a.jxl", POLICY), turned(photo(), 6))


@pytest.mark.usefixtures("plug_in")
def test_damage_is_refused() -> None:
    with pytest.raises(ImageRefused, match="Generic Error"):
        probe(BARE + b"cut", "a.jxl", POLICY)


def test_the_real_plug_in_gives_the_pixels() -> None:
    pytest.importorskip("pillow_jxl", reason="pillow-jxl-plugin is not installed")
    for data in (BARE, BOXED):
        pixels = decode(data, "a.jxl", POLICY)
        assert (pixels[: HEIGHT // 2] == (10, 220, 60)).all() and (pixels[HEIGHT // 2 :] == (200, 30, 90)).all()
    buffer = io.BytesIO()
    Image.fromarray(photo()).save(buffer, "JXL", lossless=True)
    np.testing.assert_array_equal(decode(buffer.getvalue(), "p.jxl", POLICY), photo())
