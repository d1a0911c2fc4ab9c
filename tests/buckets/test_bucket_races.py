"""What several machines do to one bucket at once, in an order that the test chooses: no data is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buckets.test_bucket_upkeep import keep_only, tidy
from helpers.remote_samples import entries_of
from obstore.store import MemoryStore
from transfers.test_transfers import fill, key_of_image, manifest_of, packs_of

from latentcache.remote import bucket_upkeep
from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_manifests import BucketManifests
from latentcache.remote.bucket_upkeep import BucketUpkeep, removals_in
from latentcache.remote.places import open_far_place
from latentcache.remote.remote_packs import verify_place
from latentcache.remote.transfers import transfer
from latentcache.store.directory import pack_name


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in memory."""
    store = MemoryStore()

    def opened(url: str, **_: Any) -> Bucket:
        return Bucket(store, url)

    monkeypatch.setattr(Bucket, "open", opened)
    return "s3://tests/cache"


def two_lists(url: str, monkeypatch: pytest.MonkeyPatch, *, prune: bool) -> list[list[str]]:
    """Two runs of upkeep at once: neither sees what the other lists. Returns what each has listed."""
    with monkeypatch.context() as patch:
        patch.setattr(bucket_upkeep, "removals_in", lambda bucket: {})
        for run in [BucketUpkeep(url, prune=prune, grace_h=0.0) for _ in range(2)]:
            run.run()
    return [packs for _, packs in removals_in(Bucket.open(url)).values()]


def broken(data: bytes, number: int) -> bytes:
    """The bytes of a pack in which the latents of a sample are damaged."""
    changed = bytearray(data)
    changed[data.index(entries_of(number)[0].tensors["moments"].numpy().tobytes())] ^= 1
    return bytes(changed)


def test_a_pack_that_two_lists_name_stays_if_it_is_needed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fill(tmp_path / "here", range(16), per_pack=8)
    transfer(here, url)
    whole = manifest_of(here)
    assert whole is not None
    keep_only(here, range(8))
    transfer(here, url, replace=True)
    first, second = two_lists(url, monkeypatch, prune=True)
    assert first == second and len(first) == 1
    BucketManifests(Bucket.open(url)).write(whole)  # of a push that counted on the pack
    assert tidy(url, grace_h=0).num_removed == 0
    assert transfer(url, tmp_path / "back").ok


def test_compact_removes_no_entry_that_lies_only_in_packs_that_two_lists_name(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two runs copied these packs, or found their entries elsewhere; no manifest has them yet."""
    transfer(fill(tmp_path / "here", range(16), None, per_pack=8), url)
    listed = sorted(Bucket.open(url).packs())
    for packs in (listed[:1], listed[1:]):
        Bucket.open(url).put(f"removals/{packs[0]}.json", b'{"packs": ["%s"]}' % packs[0].encode())
    report = tidy(url, grace_h=0)
    assert (report.num_removed, report.num_waiting) == (0, 2)
    assert sorted(Bucket.open(url).packs()) == listed


def test_a_pack_goes_only_when_the_copies_that_stay_are_whole(tmp_path: Path, url: str) -> None:
    big = fill(tmp_path / "big", range(16), per_pack=32)
    transfer(big, url)
    [(pack, data)] = packs_of(big).items()
    Bucket.open(url).put(pack_name(pack), broken(data, 5))
    for other, small in packs_of(fill(tmp_path / "small", range(4, 6), None)).items():
        Bucket.open(url).put(pack_name(other), small)
    with open_far_place(url) as place:
        assert verify_place(place).ok
    for _ in range(4):
        report = tidy(url, grace_h=0)
    assert report.num_listed == report.num_written == 0, "what is damaged is copied once, from where it is whole"
    with open_far_place(url) as place:
        assert verify_place(place).ok and key_of_image(5) in place.find([key_of_image(5)])
    assert transfer(url, tmp_path / "back").ok
