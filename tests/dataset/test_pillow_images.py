"""Every file that Pillow tests itself with gets a verdict, and what it reads plainly is the same picture here.

They are not ours to ship: PILLOW_IMAGES=<Tests/images of a checkout of python-pillow/Pillow> names them.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode, probe
from latentcache.errors import ImageRefused

pytestmark = [
    pytest.mark.skipif("PILLOW_IMAGES" not in os.environ, reason="PILLOW_IMAGES names no folder of images"),
    # Broken metadata, of which Pillow warns, does not cost an image.
    pytest.mark.filterwarnings("ignore"),
]
POLICY = ImagesConfig(animated="first-frame", min_side=1, max_aspect=1e9)
PLAIN = {"1", "L", "P", "RGB", "CMYK", "YCbCr"}
KINDS = (".bmp", ".dib", ".gif", ".tif", ".tiff")


def files() -> list[Path]:
    found = sorted(path for path in Path(os.environ["PILLOW_IMAGES"]).rglob("*") if path.is_file())
    assert len(found) > 1000
    return found


def test_every_file_gets_a_verdict() -> None:
    verdicts: Counter[str] = Counter()
    for path in files():
        data = path.read_bytes()
        for policy in (ImagesConfig(min_side=16), POLICY):
            try:
                size = probe(data, str(path), policy)
                assert decode(data, str(path), policy).shape == (*size, 3)
                verdicts["read"] += 1
            except ImageRefused as refused:
                assert refused.detail and path.name in str(refused)
                verdicts[refused.reason] += 1
    print(dict(verdicts))
    assert verdicts.total() == 2 * len(files()) and verdicts["read"] > 1000


def test_plain_pictures_are_those_that_pillow_gives() -> None:
    """Without alpha, profile or 16 bits there is nothing to convert, and the peers' `convert("RGB")` is the measure."""
    num_compared = 0
    for path in files():
        data = path.read_bytes()
        if path.suffix.lower() not in KINDS:
            continue
        try:
            pixels = decode(data, str(path), POLICY)
        except ImageRefused:
            continue
        with Image.open(io.BytesIO(data)) as image:
            if image.mode not in PLAIN or {"transparency", "icc_profile"} & image.info.keys():
                continue
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(pixels, expected), path.name
        num_compared += 1
    assert num_compared > 100
