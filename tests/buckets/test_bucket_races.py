"""What several machines do to one bucket at once, in an order that the test chooses: no data is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buckets.test_bucket_upkeep import keep_only, tidy
from obstore.store import MemoryStore
from transfers.test_transfers import check, fill, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.remote import upkeep
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import End, Move, transfer
from latentcache.remote.transport import ANY_VERSION, Listed, packs_in
from latentcache.remote.upkeep import Tidying, removals_in
from latentcache.store.directory import pack_name


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in memory."""
    store = MemoryStore()

    def opened(url: str, **_: Any) -> BucketTransport:
        return BucketTransport(store, url)

    monkeypatch.setattr(BucketTransport, "open", opened)
    return "s3://tests/cache"


def two_lists(url: str, monkeypatch: pytest.MonkeyPatch, *, prune: bool) -> list[list[str]]:
    """Two runs of upkeep at once: neither sees what the other lists. Returns what each has listed."""
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "removals_in", lambda bucket: {})
        for run in [Tidying(BucketTransport.open(url), prune=prune, grace_h=0.0) for _ in range(2)]:
            run.run()
    return [packs for _, packs in removals_in(BucketTransport.open(url)).values()]


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
    RemoteManifests(BucketTransport.open(url)).write(whole)  # of a push that counted on the pack
    assert tidy(url, grace_h=0).num_removed == 0
    assert transfer(url, tmp_path / "back").ok


def test_compact_removes_no_entry_that_lies_only_in_packs_that_two_lists_name(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two runs copied these packs, or found their entries elsewhere; no manifest has them yet."""
    transfer(fill(tmp_path / "here", range(16), None, per_pack=8), url)
    listed = sorted(packs_in(BucketTransport.open(url)))
    for packs in (listed[:1], listed[1:]):
        note = b'{"packs": ["%s"]}' % packs[0].encode()
        BucketTransport.open(url).write(f"removals/{packs[0]}.json", note, version=ANY_VERSION)
    report = tidy(url, grace_h=0)
    assert (report.num_removed, report.num_waiting) == (0, 2)
    assert sorted(packs_in(BucketTransport.open(url))) == listed


def test_a_push_ends_its_own_note_alone(tmp_path: Path, url: str) -> None:
    first, second = (fill(tmp_path / name, range(8)) for name in ("first", "second"))
    End.open(url, is_target=True, source=str(second)).manifests.begin("photos")  # of a push that takes long
    assert transfer(first, url).ok
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == ["photos"]
    with pytest.raises(StoreError, match="not finished: photos"):
        tidy(url, prune=True, grace_h=0)
    assert transfer(second, url).manifests == [], "there is nothing to change"
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == []
    assert tidy(url, prune=True, grace_h=0).num_removed == 0


def test_notes_of_machines_that_are_gone_are_given_up(tmp_path: Path, url: str) -> None:
    transfer(fill(tmp_path / "here", range(8)), url)
    RemoteManifests(BucketTransport.open(url), source="another").begin("photos")
    tidy(url, prune=True, unfinished=True, grace_h=24.0)
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == ["photos"], "it may be at work"
    tidy(url, prune=True, unfinished=True, grace_h=0)
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == []


def test_a_pull_ends_the_note_of_one_that_died_behind_its_manifest(tmp_path: Path) -> None:
    here, there = fill(tmp_path / "here", range(8)), tmp_path / "there"
    transfer(here, there)
    manifests = ManifestFolder(there / "manifests")
    manifests.begin("photos")
    assert transfer(here, there, dry_run=True).ok and list(manifests.unfinished()) == ["photos"]
    assert transfer(here, there).ok and manifests.unfinished() == {}


def test_what_goes_during_a_push_is_sent_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there when it began, and what it has sent itself."""
    transfer(fill(tmp_path / "old", range(24, 32), None), url)
    here = fill(tmp_path / "here", range(16), per_pack=4)
    for pack, data in list(packs_of(here).items())[:2]:
        BucketTransport.open(url).write(pack_name(pack), data, version=ANY_VERSION)
    move = Move._move_manifest

    def meanwhile(self: Move, *args: Any) -> None:
        bucket = BucketTransport.open(url)
        bucket.remove(map(pack_name, packs_in(bucket)))
        move(self, *args)

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
    listed, late = BucketTransport.list, 3 * 3600.0

    def late_list(self: BucketTransport, folder: str) -> dict[str, Listed]:
        return {name: Listed(each.num_bytes, each.modified - late) for name, each in listed(self, folder).items()}

    monkeypatch.setattr(BucketTransport, "list", late_list)
    assert tidy(url, grace_h=1).num_listed == 4
    assert tidy(url, grace_h=1).num_removed == 0
    assert tidy(url, grace_h=0, dry_run=True).num_removed == 4
    names = BucketTransport.open(url).list("")
    assert not [name for name in names if name.startswith("probe")]
    assert tidy(url, grace_h=0).num_removed == 4
