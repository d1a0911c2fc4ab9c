"""What several machines do to one bucket at once, in an order that the test chooses: no data is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from buckets.test_bucket_upkeep import keep_only, tidy
from helpers.remote_samples import entries_of
from obstore.store import MemoryStore
from transfers.test_transfers import check, fill, key_of_image, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.remote import bucket_upkeep
from latentcache.remote.bucket import Bucket, StoredObject
from latentcache.remote.bucket_manifests import BucketManifests
from latentcache.remote.bucket_marks import read_marks
from latentcache.remote.bucket_store import BucketStore
from latentcache.remote.bucket_upkeep import BucketUpkeep, removals_in
from latentcache.remote.places import DirectoryPlace, open_far_place
from latentcache.remote.remote_packs import verify_place
from latentcache.remote.transfers import Move, transfer
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


def test_a_pack_that_says_nothing_any_more_is_sent_again(tmp_path: Path, url: str) -> None:
    """By the machine that has it too, which takes its own pack for what is there until `verify` has looked."""
    here = fill(tmp_path / "here", range(16))
    transfer(here, url)
    pack, data = next(iter(packs_of(here).items()))
    Bucket.open(url).put(pack_name(pack), data[:20] + bytes([data[20] ^ 1]) + data[21:])
    with open_far_place(url) as place:
        assert list(verify_place(place).unreadable) == [pack]
    assert transfer(here, url).num_packs == 1
    with open_far_place(url) as place:
        manifest = place.manifests.read("photos")
        assert manifest is not None and place.find(manifest.keys()) == manifest.keys()
    Bucket.open(url).remove_packs([pack])  # by hand, as the guide says
    assert transfer(here, url).num_packs == 0
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))
    tidy(url)
    assert not Bucket.open(url).names("marks")


def test_marks_of_a_pack_that_went_do_not_count_where_it_is_sent_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object has marks of two packs, of which one was pruned: they are there still."""
    monkeypatch.setattr("latentcache.store.upkeep.SMALL_ENTRIES", 0)
    here = fill(tmp_path / "here", range(16))
    transfer(here, url)
    for pack, data in packs_of(here).items():
        number = 3 if entries_of(3)[0].tensors["moments"].numpy().tobytes() in data else 12
        Bucket.open(url).put(pack_name(pack), broken(data, number))
    with open_far_place(url) as place:
        assert verify_place(place).damaged.keys() == {key_of_image(3), key_of_image(12)}
    assert transfer(here, url).ok
    keep_only(here, range(8, 16))
    transfer(here, url, replace=True)
    for _ in range(2):
        tidy(url, prune=True, grace_h=0)
    assert len(Bucket.open(url).names("marks")) == 1
    fill(here, range(16))
    assert transfer(here, url).ok
    with open_far_place(url) as place:
        manifest = place.manifests.read("photos")
        assert manifest is not None and place.find(manifest.keys()) == manifest.keys()


def test_what_is_removed_from_a_pack_that_came_just_now_stays_removed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer(fill(tmp_path / "here", range(8)), url)
    other = fill(tmp_path / "other", range(8, 16), "others")

    def meanwhile(bucket: Bucket) -> Any:
        transfer(other, url)
        with BucketStore(url) as store:
            assert store.remove([key_of_image(9)]) == 1
        return read_marks(bucket)

    monkeypatch.setattr(bucket_upkeep, "read_marks", meanwhile)
    tidy(url)
    with BucketStore(url) as store:
        assert store.find([key_of_image(9)]) == set()


def test_a_push_ends_its_own_note_alone(tmp_path: Path, url: str) -> None:
    first, second = (fill(tmp_path / name, range(8)) for name in ("first", "second"))
    with open_far_place(url, is_target=True, near=DirectoryPlace(second, is_target=False)) as place:
        place.manifests.begin("photos")  # of a push that takes long
    assert transfer(first, url).ok
    assert BucketManifests(Bucket.open(url)).unfinished() == ["photos"]
    with pytest.raises(StoreError, match="not finished: photos"):
        tidy(url, prune=True, grace_h=0)
    assert transfer(second, url).manifests == [], "there is nothing to change"
    assert BucketManifests(Bucket.open(url)).unfinished() == []
    assert tidy(url, prune=True, grace_h=0).num_removed == 0


def test_notes_of_machines_that_are_gone_are_given_up(tmp_path: Path, url: str) -> None:
    transfer(fill(tmp_path / "here", range(8)), url)
    BucketManifests(Bucket.open(url), source="another").begin("photos")
    tidy(url, prune=True, unfinished=True, grace_h=24.0)
    assert BucketManifests(Bucket.open(url)).unfinished() == ["photos"], "it may be at work"
    tidy(url, prune=True, unfinished=True, grace_h=0)
    assert BucketManifests(Bucket.open(url)).unfinished() == []


def test_a_pull_ends_the_note_of_one_that_died_behind_its_manifest(tmp_path: Path) -> None:
    here, there = fill(tmp_path / "here", range(8)), tmp_path / "there"
    transfer(here, there)
    manifests = ManifestFolder(there / "manifests")
    manifests.begin("photos")
    assert transfer(here, there, dry_run=True).ok and list(manifests.unfinished()) == ["photos"]
    assert transfer(here, there).ok and manifests.unfinished() == {}


@pytest.mark.parametrize("is_listed", [False, True])
def test_what_goes_during_a_push_is_sent_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """What was there when it began, and what it has sent itself."""
    transfer(fill(tmp_path / "old", range(24, 32), None), url)
    here = fill(tmp_path / "here", range(16), per_pack=4)
    for pack, data in list(packs_of(here).items())[:2]:
        Bucket.open(url).create(pack_name(pack), data)
    move = Move._move_manifest

    def meanwhile(self: Move, *args: Any) -> None:
        packs = sorted(Bucket.open(url).packs())
        if is_listed:
            Bucket.open(url).put("removals/1.json", json.dumps({"packs": packs}).encode())
        else:
            Bucket.open(url).remove_packs(packs)
        move(self, *args)
        if is_listed:
            Bucket.open(url).remove_packs(packs)

    with monkeypatch.context() as patch:
        patch.setattr(Move, "_move_manifest", meanwhile)
        assert transfer(here, url).ok
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))


def test_the_grace_time_is_counted_by_the_clock_of_the_store(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is three hours behind that of this machine."""
    transfer(fill(tmp_path / "here", range(16), per_pack=4), url)
    read, times, late = Bucket.read, Bucket.times, timedelta(hours=3)

    def read_late(self: Bucket, name: str) -> StoredObject | None:
        found = read(self, name)
        return None if found is None else replace(found, modified=found.modified - late)

    monkeypatch.setattr(Bucket, "read", read_late)
    monkeypatch.setattr(
        Bucket, "times", lambda self, folder: {name: at - late for name, at in times(self, folder).items()}
    )
    assert tidy(url, grace_h=1).num_listed == 4
    assert tidy(url, grace_h=1).num_removed == 0
    assert tidy(url, grace_h=0, dry_run=True).num_removed == 4
    names = Bucket.open(url).names("")
    assert not [name for name in names if name.startswith("probe")]
    assert tidy(url, grace_h=0).num_removed == 4
