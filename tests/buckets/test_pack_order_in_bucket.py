"""Pack order from an object store: the batches of the directory, and packs that come whole."""

from __future__ import annotations

from pathlib import Path

from helpers.remote_samples import make_cache

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.cli.app import main
from latentcache.remote.bucket_store import BucketStore


def test_the_order_is_that_of_the_directory(tmp_path: Path, s3_url: str) -> None:
    cache = make_cache(tmp_path / "cache")
    assert main(["push", str(cache), s3_url]) == 0
    found = []
    for where, options in ((cache, {}), (s3_url, {"local": tmp_path / "local"})):
        dataset = LatentDataset(where, order="packs", **options)
        with LatentLoader(BucketBatchSampler(dataset, 4, seed=1, window=2), device="cpu") as loader:
            found.append([batch["sample_id"] for batch in loader])
        dataset.cache.close()
    assert isinstance(dataset.cache.store, BucketStore)
    assert found[0] == found[1] and len(sum(found[0], [])) == len(dataset)  # noqa: RUF017 - few
    packs = {path.name for path in (cache / "packs").rglob("*.safetensors")}
    assert packs <= {path.name for path in (tmp_path / "local").rglob("*.safetensors")}, "they came whole"
