"""Every file that Pillow tests itself with gets a verdict.

They are not ours to ship: PILLOW_IMAGES=<Tests/images of a checkout of python-pillow/Pillow> names them.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode, probe
from latentcache.errors import ImageRefused

pytestmark = [
    pytest.mark.skipif("PILLOW_IMAGES" not in os.environ, reason="PILLOW_IMAGES names no folder of images"),
    # Broken metadata, of which Pillow warns, does not cost an image.
    pytest.mark.filterwarnings("ignore"),
]
POLICY = ImagesConfig(animated="first-frame", min_side=1, max_aspect=1e9)


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
