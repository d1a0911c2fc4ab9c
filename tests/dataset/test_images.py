"""Each odd image meets its declared verdict, and damaged bytes give a typed refusal or pixels, nothing else."""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import odd_images
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_images import HEIGHT, WIDTH, Odd, exif, over, photo, turned
from PIL import Image, ImageFile
from skimage.transform import resize as reference_resize

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode, prepare, probe
from latentcache.errors import ImageRefused
from latentcache.types import Crop, Geometry, Size

# Pillow itself reads the EXIF block of a JPEG, for its DPI, and warns about a broken one.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")

POLICY = ImagesConfig(min_side=16)
CORPUS = odd_images.CORPUS


@functools.cache
def made(name: str) -> Odd:
    return CORPUS[name]()


def difference(pixels: np.ndarray, reference: np.ndarray) -> float:
    assert pixels.shape == reference.shape
    return float(np.abs(pixels.astype(np.float64) - reference).max())


def verdict(data: bytes, path: str, policy: ImagesConfig = POLICY) -> str | None:
    try:
        decode(data, path, policy)
    except ImageRefused as refused:
        return refused.reason
    return None


@pytest.mark.parametrize("name", CORPUS)
def test_each_odd_image_meets_its_verdict(name: str) -> None:
    """The header alone gives every verdict but damage."""
    odd = made(name)
    if odd.reason is None:
        size = probe(odd.data, odd.path, POLICY)
        pixels = decode(odd.data, odd.path, POLICY)
        assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.flags.writeable
        assert size == pixels.shape[:2]
        assert difference(pixels, odd.pixels) <= odd.tolerance
        return
    with pytest.raises(ImageRefused) as caught:
        decode(odd.data, odd.path, POLICY)
    assert (caught.value.reason, caught.value.path) == (odd.reason, odd.path) and odd.path in str(caught.value)
    if odd.reason not in ("corrupt", "truncated"):
        with pytest.raises(ImageRefused, match=odd.path):
            probe(odd.data, odd.path, POLICY)
    if odd.reason == "animated":
        first = decode(odd.data, odd.path, ImagesConfig(min_side=16, animated="first-frame"))
        # WebP and AVIF are lossy, GIF has few colours; the second frame is mirrored, and differs by up to 200.
        assert difference(first, photo()) <= 40


def test_half_a_phones_picture_is_refused() -> None:
    """Filled up with zeros, as a download that reserves its space leaves it: libjpeg would make the rest grey."""
    thumbnail = b"Exif\0\0MM\0*\0\0\0\x08" + bytes(6) + odd_images.save(Image.fromarray(photo()), "JPEG")
    data = odd_images.frames("MPO", quality=95, exif=thumbnail)
    assert verdict(data, "phone.jpg") is None
    num_bytes = data.index(b"\xff\xda", len(thumbnail)) + 500
    assert verdict(data[:num_bytes].ljust(len(data), b"\0"), "phone.jpg") == "truncated"


def test_alpha_is_composited_on_the_declared_colour() -> None:
    odd = made("webp-alpha")
    pixels = decode(odd.data, odd.path, ImagesConfig(min_side=16, alpha_colour="#10C0f0"))
    assert difference(pixels, over(photo(), odd_images.alpha(), (0x10, 0xC0, 0xF0))) <= 1


def test_threads_get_the_same_pixels() -> None:
    odds = [odd for odd in map(made, CORPUS) if odd.reason is None]
    alone = [decode(odd.data, odd.path, POLICY).tobytes() for odd in odds]
    barrier = threading.Barrier(4)

    def all_of_them(_: int) -> list[bytes]:
        barrier.wait()
        return [decode(odd.data, odd.path, POLICY).tobytes() for odd in odds]

    with ThreadPoolExecutor(4) as pool:
        assert all(result == alone for result in pool.map(all_of_them, range(4)))


def test_prepare_resizes_crops_and_mirrors() -> None:
    pixels = photo(120, 200)
    geometry = Geometry(Size(120, 200), Size(60, 100), Crop(4, 18), Size(48, 64))
    result = prepare(pixels, geometry)
    reference = 255 * reference_resize(pixels, (60, 100), anti_aliasing=True)[4:52, 18:82]
    assert result.shape == (48, 64, 3) and result.dtype == np.uint8 and result.flags.c_contiguous
    assert difference(result, reference) <= 2
    mirrored = prepare(pixels, Geometry(Size(120, 200), Size(60, 100), Crop(4, 18), Size(48, 64), flip=True))
    assert mirrored.flags.c_contiguous and mirrored.flags.writeable
    np.testing.assert_array_equal(mirrored, result[:, ::-1])


# --- damage ----------------------------------------------------------------------------------------------------------

EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=20)), min_size=1, max_size=6)
"""Where in the file, how many bytes go, and which come in their place."""


@pytest.mark.parametrize(
    "name",
    [
        *("exif-6", "exif-tiff", "exif-avif", "exif-png-late", "jpeg-mpo", "cmyk-icc", "icc-linear-alpha", "grey-16"),
        *("palette-alpha", "webp-alpha", "gif-transparent", "bmp", "animated-png"),
    ],
)
@given(edits=EDITS)
@settings(max_examples=40)
def test_mutated_files_give_pixels_or_a_refusal(name: str, edits: list[tuple[float, int, bytes]]) -> None:
    odd = made(name)
    mutated = bytearray(odd.data)
    for place, num_bytes, data in edits:
        at = int(place * len(mutated))
        mutated[at : at + num_bytes] = data
    try:
        pixels = decode(bytes(mutated), odd.path, POLICY)
    except ImageRefused as refused:
        assert refused.reason and refused.detail
    else:
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


@pytest.mark.parametrize(
    "name", ["exif-1", "exif-png", "exif-webp", "exif-avif", "gif-transparent", "bmp", "exif-tiff"]
)
def test_every_prefix_is_refused(name: str) -> None:
    odd = made(name)
    for end in range(0, len(odd.data) - 12, 7):
        assert verdict(odd.data[:end], odd.path) is not None, f"{end} of {len(odd.data)} bytes were accepted"


# --- JPEG XL: a plug-in of Pillow's, which decodes as soon as it opens a file ----------------------------------------

BARE = b"\xff\x0a"
"""How a JPEG XL begins."""


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
    with pytest.raises(ImageRefused, match="Generic Error"):
        probe(BARE + b"cut", "a.jxl", POLICY)
