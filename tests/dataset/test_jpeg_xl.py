"""JPEG XL: the header is read here, the pixels by a plug-in that decodes as soon as it opens a file."""

from __future__ import annotations

import io
import sys
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


class Bits:
    """Bits in the order of the format: the lowest of a byte first."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def put(self, value: int, count: int) -> None:
        self.bits += [value >> place & 1 for place in range(count)]

    def to_bytes(self) -> bytes:
        return bytes(np.packbits(self.bits, bitorder="little")) + bytes(16)

    def put_side(self, side: int) -> None:
        selector = next(number for number, count in enumerate((9, 13, 18, 30)) if side - 1 < 1 << count)
        self.put(selector, 2)
        self.put(side - 1, (9, 13, 18, 30)[selector])


def header(height: int, width: int, *, animated: bool | None = None) -> bytes:
    """A codestream's header with both sides; `animated` None leaves all metadata at their defaults."""
    bits = Bits()
    bits.put(0, 1)
    bits.put_side(height)
    bits.put(0, 3)
    bits.put_side(width)
    bits.put(animated is None, 1)
    if animated is not None:
        bits.put(1, 1)  # extra fields
        bits.put(5, 3)  # orientation
        bits.put(0, 2)  # no intrinsic size, no preview
        bits.put(animated, 1)
    return b"\xff\x0a" + bits.to_bytes()


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A module with the plug-in's names; the list has what it was given to decode."""
    decoded: list[bytes] = []

    class JXLImageFile(ImageFile.ImageFile):
        format = "JXL"

        def _open(self) -> None:
            decoded.append(self.fp.read())
            self.jpeg = b"jpeg" in decoded[-1]
            pixels = Image.fromarray(photo())
            self._size, self._mode, self.tile = pixels.size, pixels.mode, []
            self.info["exif"], self.im = exif(6), pixels.im
            if decoded[-1].endswith(b"cut"):
                raise RuntimeError("Generic Error.")

    package, module = ModuleType("pillow_jxl"), ModuleType("pillow_jxl.JpegXLImagePlugin")
    module.JXLImageFile = JXLImageFile
    monkeypatch.setitem(sys.modules, "pillow_jxl", package)
    monkeypatch.setitem(sys.modules, "pillow_jxl.JpegXLImagePlugin", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    return decoded


@pytest.mark.usefixtures("plug_in")
def test_the_codestreams_turn_counts_and_exif_only_in_a_packed_jpeg() -> None:
    np.testing.assert_array_equal(decode(BARE, "a.jxl", POLICY), photo())
    packed = BARE + b"jpeg"
    assert probe(packed, "a.jxl", POLICY) == Size(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decode(packed, "a.jxl", POLICY), turned(photo(), 6))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(20_000, 20_000), "too-many-pixels"),
        (header(48, 1 << 30), "too-many-pixels"),
        (header(1 << 20, 1 << 20, animated=True), "too-many-pixels"),
        (BOXED[:32] + b"\0\0\0\x30jxlc" + header(20_000, 20_000), "too-many-pixels"),
        (BOXED[:30], "corrupt"),
        (BOXED[:32] + b"\0\0\0\x30jxlp\0\0\0\0nothing", "corrupt"),
    ],
)
def test_what_the_header_refuses_is_never_decoded(data: bytes, reason: str, plug_in: list[bytes]) -> None:
    with pytest.raises(ImageRefused) as caught:
        probe(data, "a.jxl", POLICY)
    assert caught.value.reason == reason and plug_in == []


@pytest.mark.usefixtures("plug_in")
def test_sizes_in_each_form_of_the_header_are_read() -> None:
    """A small size in eighths with a ratio, as cjxl writes it, and sides of 9 and 14 bits."""
    wide = ImagesConfig(min_side=16, max_pixels=48 * 64)
    for data in (BARE, BOXED, header(HEIGHT, WIDTH)):
        assert probe(data, "a.jxl", wide) == Size(HEIGHT, WIDTH)
        with pytest.raises(ImageRefused, match="48x64 is 3,072 pixels"):
            probe(data, "a.jxl", ImagesConfig(min_side=16, max_pixels=48 * 64 - 1))
    with pytest.raises(ImageRefused, match="600x9000 is"):
        probe(header(600, 9000), "a.jxl", wide)


@pytest.mark.usefixtures("plug_in")
def test_animations_and_damage_are_refused() -> None:
    with pytest.raises(ImageRefused, match="first-frame"):
        probe(header(HEIGHT, WIDTH, animated=True), "a.jxl", POLICY)
    probe(header(HEIGHT, WIDTH, animated=True), "a.jxl", ImagesConfig(min_side=16, animated="first-frame"))
    with pytest.raises(ImageRefused, match="Generic Error") as caught:
        probe(BARE + b"cut", "a.jxl", POLICY)
    assert caught.value.reason == "corrupt"


def test_the_real_plug_in_gives_the_pixels() -> None:
    pytest.importorskip("pillow_jxl", reason="pillow-jxl-plugin is not installed")
    for data in (BARE, BOXED):
        pixels = decode(data, "a.jxl", POLICY)
        assert (pixels[: HEIGHT // 2] == (10, 220, 60)).all() and (pixels[HEIGHT // 2 :] == (200, 30, 90)).all()
    buffer = io.BytesIO()
    Image.fromarray(photo()).save(buffer, "JXL", lossless=True)
    np.testing.assert_array_equal(decode(buffer.getvalue(), "p.jxl", POLICY), photo())
