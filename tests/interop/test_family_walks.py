"""Datasets of several families, with clips, as shards; and texts that shards have no place for."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers.family_walks import clips, photos, walked

from latentcache.interop.formats import webdataset
from latentcache.loading.cache import LatentCache
from latentcache.store.entry import as_array

pytestmark = pytest.mark.families


@pytest.mark.parametrize("family", ["flux", "flux2", "z-image", "qwen-image", "wan"])
def test_shards_hold_the_entries_that_precache_made(family: str, tmp_path: Path) -> None:
    """Of Wan clips of 9, 9 and 5 frames and a still image of one bucket; all are mirrored too."""
    data = clips if family == "wan" else photos
    config = walked(tmp_path, family, data, image_output="mean", text_store_dtype="float32")
    with LatentCache(config.cache.path) as cache:
        rows = cache.manifest("walk").rows
        report = webdataset.export(cache, "walk", tmp_path / "shards")
        num_texts = sum(len(row.captions) for row in rows.values())
        assert (report.num_images, report.num_texts, report.skipped) == (2 * len(rows), num_texts, [])
        with tarfile.open(tmp_path / "shards/shard-000000.tar") as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for number, row in enumerate(rows.values()):
            facts = json.loads(members[f"{number:09}.json"])
            assert [facts["geometry"], facts["geometry_flipped"]] == [ref.geometry.to_json() for ref in row.images]
            for name, ref in (
                ("latents", row.images[0]),
                ("latents_flipped", row.images[1]),
                ("prompt_embeds", row.captions[0]),
            ):
                stored = cache.get(ref.key).tensors[name.removesuffix("_flipped")]
                found = np.load(io.BytesIO(members[f"{number:09}.{name}.npy"]))
                np.testing.assert_array_equal(found, as_array(stored), strict=True)
